// torch::nn::Embedding over a table.
#pragma once

#include <torch/arg.h>
#include <torch/nn/options/embedding.h>

#include "nn/table_module.hpp"

namespace embermap::nn {

// As torch::nn::EmbeddingOptions, without what the table says itself.
struct EmbeddingOptions {
  // The row of this number has no gradient, so that steps leave it as it is; it is looked up as any other, and not set to zero.
  // Negative numbers count from the end.
  TORCH_ARG(std::optional<std::int64_t>, padding_idx) = std::nullopt;
  // Rows of a batch whose norm is larger are shortened to it, in the table, before they are looked up; the store must be open for
  // writing.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  // The p of that norm.
  TORCH_ARG(double, norm_type) = 2;
  // Divides the gradient of a row by how often the look-up has its id.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
};

//   embermap::nn::Embedding embedding(store.table("items"));
//   auto rows = embedding->forward(ids);      // ids (a, b) -> rows (a, b, dim)
// As torch::nn::Embedding with sparse gradients, which stay pending in the module (see TableModule) until a TableOptimizer
// applies them.
class EmbeddingImpl : public TableModule {
 public:
  // Throws c10::ValueError for options that do not fit the table.
  explicit EmbeddingImpl(Table table, EmbeddingOptions options = {});

  // Rows of integer `ids` (any shape, any width, on the CPU or a CUDA device), a copy of shape ids.shape + (dim,), of the table's
  // dtype, on the device of the ids and ordered on its current stream. Blocks on disk reads. Throws as TableModule says.
  torch::Tensor forward(const torch::Tensor& ids);

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;

  const EmbeddingOptions& options() const noexcept { return options_; }

 private:
  EmbeddingOptions options_;
};

// Holds an EmbeddingImpl, as torch's modules do; copies share it.
class Embedding : public torch::nn::ModuleHolder<EmbeddingImpl> {
 public:
  using torch::nn::ModuleHolder<EmbeddingImpl>::ModuleHolder;

  // A module over a new table `name` with the rows of a tensor, (rows, dim), of its dtype; the store's next commit keeps them.
  // `optimizer` is the table's, for rows that are to be trained (options.freeze(false)). Of torch's options, sparse() means
  // nothing: gradients are of rows. Throws c10::ValueError (shape, options), c10::TypeError (dtype), and as Store::import does.
  static Embedding from_pretrained(Store& store, std::string_view name, const torch::Tensor& embeddings,
                                   const torch::nn::EmbeddingFromPretrainedOptions& options = {},
                                   const Optimizer& optimizer = {});
};

}  // namespace embermap::nn
