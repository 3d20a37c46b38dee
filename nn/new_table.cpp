#include "nn/new_table.hpp"

#include <algorithm>
#include <cstring>

namespace embermap::nn {
namespace {

// The rows of a tensor on the host, to be imported.
class TensorRows final : public RowReader {
 public:
  explicit TensorRows(torch::Tensor rows) : tensor_{std::move(rows)} {
    rows_ = static_cast<std::uint64_t>(tensor_.size(0));
    dim_ = static_cast<std::uint64_t>(tensor_.size(1));
    dtype_ = table_dtype(tensor_.scalar_type());
  }
  std::string description() const override { return c10::str("a tensor of shape ", tensor_.sizes()); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    if (count != 0)
      std::memcpy(out, static_cast<const std::byte*>(tensor_.const_data_ptr()) + first * row_bytes, count * row_bytes);
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, (1 << 20) / (dim_ * item_size(dtype_))); }

 private:
  torch::Tensor tensor_;
};

}  // namespace

Table create_from_tensor(Store& store, std::string_view name, const torch::Tensor& rows, const Optimizer& optimizer) {
  if (!rows.defined()) detail::refuse<c10::ValueError>("table '", printable(name), "': embeddings are an undefined tensor");
  if (rows.layout() != torch::kStrided)
    detail::refuse<c10::ValueError>("table '", printable(name), "': embeddings must be a dense tensor, not ", rows.layout());
  // torch's words.
  if (rows.dim() != 2)
    detail::refuse<c10::ValueError>("Embeddings parameter is expected to be 2-dimensional, but got shape ", rows.sizes(),
                                    " for table '", printable(name), "'");
  return detail::as_torch([&] {
    TensorRows reader(rows.detach().cpu().contiguous());
    return store.import(name, reader, {.dtype = reader.dtype(), .optimizer = optimizer});
  });
}

}  // namespace embermap::nn
