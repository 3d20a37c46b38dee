#include "nn/embedding.hpp"

namespace embermap {

torch::Tensor Embedding::forward(const torch::Tensor& ids) {
  torch::Tensor rows = look_up(as_ids(ids));
  if (ids.dim() == 1) return rows;
  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(static_cast<std::int64_t>(table().dim()));
  return rows.view(shape);
}

}  // namespace embermap
