// torch::nn::EmbeddingBag over a table.
#pragma once

#include <torch/nn/modules/common.h>

#include "nn/table_module.hpp"

namespace embermap {

struct EmbeddingBagOptions {
  enum class Mode { kSum, kMean };
  Mode mode = Mode::kMean;           // as torch::nn::EmbeddingBag
  bool include_last_offset = false;  // offsets then has one entry more than there are bags, the last being the number of ids
};

// The sum or mean of the rows of each bag of ids. An empty bag is a row of zeros. Sums of half-precision rows are rounded once.
// The rows of all ids of a call are in memory at once, and so are their gradients.
class EmbeddingBag : public TableModule {
 public:
  explicit EmbeddingBag(Table table, EmbeddingBagOptions options = {});

  // Either `ids` (bags, n), without offsets: each row is a bag; or `ids` (n) with 1-D `offsets`: bag b is ids[offsets[b],
  // offsets[b + 1]), the last ends with the ids. Result: (bags, dim), of the table's dtype, on the device of the ids. `weights`
  // (shape of the ids, the table's dtype; only with sums) multiply the rows; they receive a gradient. Throws as
  // Embedding::forward, and InvalidArgument for offsets that do not begin with 0, decrease, or go beyond the ids, for shapes or
  // devices that do not fit together, and for weights with means; DTypeError for weights of another dtype. All before anything is
  // read.
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& offsets = {}, const torch::Tensor& weights = {});

  const EmbeddingBagOptions& options() const noexcept { return options_; }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())}, {2, torch::nn::AnyValue(torch::Tensor())})

 private:
  torch::Tensor check_offsets(const torch::Tensor& offsets, const torch::Tensor& ids) const;
  void check_weights(const torch::Tensor& weights, const torch::Tensor& ids) const;

  EmbeddingBagOptions options_;
};

}  // namespace embermap
