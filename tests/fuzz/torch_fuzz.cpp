// The pickle of a torch.save() file, and the pickles that files before torch 1.6 begin with.
#include "base/error.hpp"
#include "io/torch_pickle.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

namespace {

void check(const std::vector<TorchTensor>& tensors) {
  for (const TorchTensor& tensor : tensors) {
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

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  std::optional<LegacyTorch> legacy;
  try {
    legacy = read_legacy_torch("x.pt", input, /*whole=*/true);
  } catch (const Error&) {
  }
  if (legacy) {
    check(legacy->tensors);
    require(legacy->data <= input.size(), "storages behind the end");
    for (const LegacyTorch::Storage& storage : legacy->storages) require(storage.item_bytes > 0, "a storage without a dtype");
  }
  check(read_torch_pickle("x.pt", input));
}

}  // namespace embermap::fuzz
