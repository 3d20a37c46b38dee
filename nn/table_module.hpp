// What Embedding and EmbeddingBag share: the look-up of rows as a differentiable function, and the gradients that wait for an
// optimizer.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "store/table.hpp"

namespace embermap {

// The gradient of one look-up: row i of `gradients` (n x dim, the table's dtype) belongs to row ids[i] of the table (n, int64).
// Ids may repeat. Both on the device of the ids that were looked up.
struct RowGradients {
  torch::Tensor ids;
  torch::Tensor gradients;
};

// A torch module over a table of a store. The weight is not a parameter: it stays in the store, and no tensor of the table's size
// is ever made. What stands for it in the graph is `anchor`, a parameter without elements: an optimizer over parameters() has
// nothing to do with it, requires_grad of it freezes or thaws the table, and its gradient is defined while gradients are pending.
// Whatever resets that gradient (zero_grad of this module, of a module around it, of any torch optimizer that was given the
// anchor) drops them.
//
// backward() keeps the ids and their gradients, one batch for each look-up, until they are dropped; TableOptimizer applies them.
// First derivatives only. Ids and gradients are copied where someone else could still change them: a tensor of ids may be
// overwritten as soon as forward() has returned.
//
// A table without an optimizer, of integers, or opened read-only is a frozen look-up: anchor does not require a gradient.
// The module holds a handle of the table: after the store is closed, calls throw ClosedError. Saving the module saves no rows;
// the store does. Thread safety: as torch modules; forward() and backward() may run in several threads at once.
class TableModule : public torch::nn::Module {
 public:
  const Table& table() const noexcept { return table_; }
  const torch::Tensor& anchor() const noexcept { return anchor_; }

  // Gradients since they were dropped last, in order of arrival. On a GPU they are ordered on the current stream.
  std::vector<RowGradients> pending() const;
  // Drops them. Both values of `set_to_none` do the same.
  void zero_grad(bool set_to_none = true) override;

  void pretty_print(std::ostream& stream) const override;

 protected:
  // `kind` is the module's name in texts: "Embedding".
  TableModule(std::string kind, Table table);

  // `ids` (any shape) as a contiguous 1-D int64 tensor that may share its memory. Throws InvalidArgument (undefined, sparse,
  // neither on the CPU nor on a CUDA device, a uint64 beyond int64) or DTypeError (not integers), with `what` for the tensor's
  // name.
  torch::Tensor as_ids(const torch::Tensor& ids, const char* what = "ids") const;
  // Rows of the table, (n, dim), for `ids` as as_ids() returns them.
  torch::Tensor look_up(const torch::Tensor& ids);
  // "Embedding of table 'items': "
  std::string prefix() const;

 private:
  std::string kind_;
  Table table_;
  torch::Tensor anchor_;
  std::shared_ptr<class PendingGradients> pending_;  // also held by graphs that have yet to run backward
};

// The torch dtype of rows.
torch::ScalarType torch_dtype(DType dtype);

}  // namespace embermap
