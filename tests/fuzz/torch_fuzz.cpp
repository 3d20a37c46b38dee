// The pickle of a torch.save() file.
#include "io/torch_pickle.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  for (const TorchTensor& tensor : read_torch_pickle("x.pt", input)) {
    require(tensor.shape.size() == tensor.strides.size(), "sizes and strides that differ in number");
    require(torch_item_size(tensor.dtype) > 0, "a dtype without a size");
    std::uint64_t last = tensor.offset;
    bool empty = false;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) empty = empty || tensor.shape[i] == 0;
    if (empty) continue;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
    require(last < tensor.storage_elements, "a tensor outside of its storage");
  }
}

}  // namespace embermap::fuzz
