// torch::nn::EmbeddingBag over a table.
#pragma once

#include <torch/arg.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/options/embedding.h>

#include "nn/table_module.hpp"

namespace embermap::nn {

// As torch::nn::EmbeddingBagOptions, without what the table says itself.
struct EmbeddingBagOptions {
  // torch::kSum, torch::kMean or torch::kMax.
  TORCH_ARG(torch::nn::EmbeddingBagMode, mode) = torch::kMean;
  // As EmbeddingOptions.
  TORCH_ARG(std::optional<double>, max_norm) = std::nullopt;
  TORCH_ARG(double, norm_type) = 2;
  // Divides the gradient of a row by how often the ids of a call have it; not for torch::kMax.
  TORCH_ARG(bool, scale_grad_by_freq) = false;
  // The last of the offsets is the end of the last bag; ids beyond it are in none.
  TORCH_ARG(bool, include_last_offset) = false;
  // Ids of this row do not count: neither in a sum, nor in the number that a mean is divided by. Bags of them alone are zeros.
  TORCH_ARG(std::optional<std::int64_t>, padding_idx) = std::nullopt;
};

// The sum, mean or maximum of the rows of each bag of ids. An empty bag is a row of zeros. Sums of half-precision rows are
// rounded once. The rows of all ids of a call are in memory at once, and so are their gradients.
class EmbeddingBagImpl : public TableModule {
 public:
  // Throws c10::TypeError (a table of integers), c10::ValueError (options that do not fit the table or one another).
  explicit EmbeddingBagImpl(Table table, EmbeddingBagOptions options = {});

  // Either `ids` (bags, n), without offsets: each row is a bag; or `ids` (n) with 1-D `offsets`: bag b is ids[offsets[b],
  // offsets[b + 1]), the last ends with the ids. Result: (bags, dim), of the table's dtype, on the device of the ids.
  // `per_sample_weights` (shape of the ids, the table's dtype; only with torch::kSum) multiply the rows; they receive a gradient.
  // Throws as TableModule says, and c10::ValueError for offsets that do not begin with 0, decrease, or go beyond the ids, for
  // shapes or devices that do not fit together; c10::NotImplementedError for weights in another mode; c10::TypeError for weights
  // of another dtype. All before anything is read.
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& offsets = {},
                        const torch::Tensor& per_sample_weights = {});

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;

  const EmbeddingBagOptions& options() const noexcept { return options_; }

 protected:
  std::string details() const override;
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())}, {2, torch::nn::AnyValue(torch::Tensor())})

 private:
  torch::Tensor check_offsets(const torch::Tensor& offsets, const torch::Tensor& ids) const;
  void check_weights(const torch::Tensor& weights, const torch::Tensor& ids) const;

  EmbeddingBagOptions options_;
};

// Holds an EmbeddingBagImpl, as torch's modules do; copies share it.
class EmbeddingBag : public torch::nn::ModuleHolder<EmbeddingBagImpl> {
 public:
  using torch::nn::ModuleHolder<EmbeddingBagImpl>::ModuleHolder;

  // As Embedding::from_pretrained().
  static EmbeddingBag from_pretrained(Store& store, std::string_view name, const torch::Tensor& embeddings,
                                      const torch::nn::EmbeddingBagFromPretrainedOptions& options = {},
                                      const Optimizer& optimizer = {});
};

}  // namespace embermap::nn
