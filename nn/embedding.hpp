// torch::nn::Embedding over a table.
#pragma once

#include "nn/table_module.hpp"

namespace embermap {

//   auto embedding = std::make_shared<embermap::Embedding>(store.table("items"));
//   auto rows = embedding->forward(ids);      // ids (a, b) -> rows (a, b, dim)
// As torch::nn::Embedding with sparse gradients, which stay pending in the module (see TableModule) until a TableOptimizer
// applies them.
class Embedding : public TableModule {
 public:
  explicit Embedding(Table table) : TableModule{"Embedding", std::move(table)} {}

  // Rows of integer `ids` (any shape, any width, on the CPU or a CUDA device), a copy of shape ids.shape + (dim,), of the table's
  // dtype, on the device of the ids and ordered on its current stream. Blocks on disk reads. Throws RowIdError naming the first
  // id outside [0, rows) by its place in the flattened ids, before anything is read; DTypeError (ids that are not integers),
  // InvalidArgument (undefined or sparse ids, another kind of device), CudaError, and what Table::gather throws.
  torch::Tensor forward(const torch::Tensor& ids);
};

}  // namespace embermap
