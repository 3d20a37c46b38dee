// What Embedding and EmbeddingBag share: the look-up of rows as a differentiable function, and the gradients that wait for an
// optimizer.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "store/store.hpp"
#include "store/table.hpp"

namespace embermap::nn {

// The gradient of one look-up: row i of `gradients` (n x dim, the table's dtype) belongs to row ids[i] of the table (n, int64).
// Ids may repeat. Both on the device of the ids that were looked up.
struct RowGradients {
  torch::Tensor ids;
  torch::Tensor gradients;
};

// Of every look-up, as torch::nn::EmbeddingOptions has them.
struct LookUpOptions {
  std::optional<std::int64_t> padding_idx;  // from the end of the table if negative
  std::optional<double> max_norm;
  double norm_type = 2;
  bool scale_grad_by_freq = false;
};

class PendingGradients;

// A torch module over a table of a store. The weight is not a parameter: it stays in the store, and no tensor of the table's size
// is ever made. What stands for it in the graph is `anchor`, a parameter of one zero that never changes: optimizers of tables are
// given it, requires_grad of it freezes or thaws the table, and its gradient is defined while gradients are pending. Whatever
// resets that gradient (zero_grad of this module, of a module around it, of any torch optimizer that was given the anchor) drops
// them.
//
// backward() keeps the ids and their gradients, one batch for each look-up, until they are dropped; a TableOptimizer applies
// them. Those of a backward pass that throws do not count. First derivatives only. Ids and gradients are copied where someone
// else could still change them: a tensor of ids may be overwritten as soon as forward() has returned.
//
// A table without an optimizer, of integers, or opened read-only is a frozen look-up: anchor does not require a gradient.
// The module holds a handle of the table: after the store is closed, calls throw ClosedError. Saving the module saves no rows;
// the store does (nn/checkpoint.hpp saves both). clone() gives a module over the same table, without gradients.
//
// Errors: what is wrong with arguments is what torch throws for it, a c10::Error: c10::IndexError (an id outside [0, rows), named
// with its place in the flattened ids, before anything is read), c10::TypeError (ids that are not integers), c10::ValueError
// (undefined or sparse tensors, shapes, another kind of device). What goes wrong in the store is embermap's: IoError,
// CorruptError, ClosedError, CudaError, ...
// Thread safety: as torch modules; forward() and backward() may run in several threads at once, but no step beside them.
class TableModule : public torch::nn::Module {
 public:
  const Table& table() const noexcept { return table_; }
  std::int64_t num_embeddings() const { return static_cast<std::int64_t>(table_.rows()); }
  std::int64_t embedding_dim() const { return static_cast<std::int64_t>(table_.dim()); }
  const torch::Tensor& anchor() const noexcept { return anchor_; }

  // Gradients since they were dropped last, in order of arrival. On a GPU they are ordered on the current stream.
  std::vector<RowGradients> pending() const;
  // The same as the gradient that torch::nn::Embedding's weight would have with sparse(true): (rows, dim), not coalesced.
  // Undefined if there are none.
  torch::Tensor grad() const;
  // Drops them. Both values of `set_to_none` do the same.
  void zero_grad(bool set_to_none = true) override;

  // Table::prefetch: reads the pages of a batch to come (ids on the host, any shape) while this one computes.
  Prefetch prefetch(const torch::Tensor& ids);

  void pretty_print(std::ostream& stream) const override;

 protected:
  // `kind` is the module's name in texts: "Embedding". Throws c10::ValueError for a padding_idx outside of the table or a
  // max_norm that is not positive.
  TableModule(std::string kind, Table table, const LookUpOptions& options);

  // `ids` (any shape) as a contiguous 1-D int64 tensor that may share its memory. Throws c10::ValueError (undefined, sparse,
  // neither on the CPU nor on a CUDA device, a uint64 beyond int64) or c10::TypeError (not integers), with `what` for the
  // tensor's name.
  torch::Tensor as_ids(const torch::Tensor& ids, const char* what = "ids") const;
  // Rows of the table, (n, dim), for `ids` as as_ids() returns them; with `zeros_first` a row of zeros before them.
  torch::Tensor look_up(const torch::Tensor& ids, bool zeros_first = false);
  // "Embedding of table 'items': "
  std::string prefix() const;
  // Counted from the beginning of the table.
  const std::optional<std::int64_t>& padding_row() const noexcept { return look_up_options_.padding_idx; }
  // What else pretty_print() says, behind a comma.
  virtual std::string details() const { return {}; }
  // A copy's parameter is on `device`, if that is given, and requires a gradient as this one's does.
  void copy_state_to(TableModule& copy, const std::optional<torch::Device>& device) const;

 private:
  void shorten(const torch::Tensor& ids);

  std::string kind_;
  Table table_;
  LookUpOptions look_up_options_;
  torch::Tensor anchor_;
  std::shared_ptr<PendingGradients> pending_;  // also held by graphs that have yet to run backward, and by optimizers
};

// A module over a table wherever one is asked for: from a pointer, or from an nn::Embedding or nn::EmbeddingBag.
class AnyTableModule {
 public:
  template <std::derived_from<TableModule> M>
  AnyTableModule(std::shared_ptr<M> module) : module_{std::move(module)} {}
  template <std::derived_from<TableModule> M>
  AnyTableModule(const torch::nn::ModuleHolder<M>& holder) : module_{holder.is_empty() ? nullptr : holder.ptr()} {}
  const std::shared_ptr<TableModule>& get() const noexcept { return module_; }

 private:
  std::shared_ptr<TableModule> module_;
};

// The parameters of a model apart: the anchors of its tables, which a TableOptimizer steps, and all others, which an optimizer of
// torch does. Each parameter once, in the order of parameters().
std::vector<torch::Tensor> table_parameters(const torch::nn::Module& model);
std::vector<torch::Tensor> dense_parameters(const torch::nn::Module& model);

// The torch dtype of rows.
torch::ScalarType torch_dtype(DType dtype);
// The other way. Throws c10::TypeError for a dtype that tables do not have.
DType table_dtype(torch::ScalarType dtype);

}  // namespace embermap::nn
