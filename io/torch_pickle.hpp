// The pickle of a torch.save() file, read for the tensors in it. Nothing is executed: a handful of known names stand for tensors,
// storages and containers, everything else is refused by its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/dtype.hpp"

namespace embermap {

// One tensor, as a view of a storage. Counts and strides are in elements, and lie within the storage.
struct TorchTensor {
  std::string name;     // keys and indices on the way to it, with dots between: "model.encoder.weight", "state.0.exp_avg"
  std::string dtype;    // "float32", ... as torch calls it
  std::string storage;  // key of the storage: record "data/KEY" of the archive
  std::uint64_t storage_elements = 0;
  std::uint64_t offset = 0;
  std::vector<std::uint64_t> shape, strides;
};

// Bytes of an element of a dtype of torch's; 0 for a name that is none (or has no fixed size).
std::uint64_t torch_item_size(std::string_view dtype);

// All tensors that can be reached through dictionaries, lists and tuples from the object that was saved, in its order. Protocols
// 2 to 5. Throws FormatError naming `file`: what is no such pickle, an instruction or a global name that is not known here (with
// the name), counts that contradict each other, a tensor outside of its storage, more than 4 Mi values, 64 levels, or a million
// entries.
std::vector<TorchTensor> read_torch_pickle(const std::filesystem::path& file, std::span<const std::byte> pickle);

// A number, truth value, text or None of such an object: "param_groups.0.lr", "param_groups.0.betas.1".
struct TorchScalar {
  std::string name;
  std::variant<std::monostate, bool, std::int64_t, double, std::string> value;
};

// The same with the scalars beside the tensors, in the object's order.
struct TorchContents {
  std::vector<TorchTensor> tensors;
  std::vector<TorchScalar> scalars;
};
TorchContents read_torch_contents(const std::filesystem::path& file, std::span<const std::byte> pickle);

// What a file of torch before 1.6, or of _use_new_zipfile_serialization=False, begins with: five pickles, one behind the other.
// From byte `data` on lie the storages in this order: the number of elements, int64, then the elements, all little-endian.
struct LegacyTorch {
  struct Storage {
    std::string key;
    std::uint64_t elements = 0, item_bytes = 0;
  };
  std::vector<TorchTensor> tensors;
  std::vector<TorchScalar> scalars;  // where they were asked for
  std::vector<Storage> storages;
  std::uint64_t data = 0;
};

// `head`: the first bytes of such a file. Nothing where they end inside the pickles, unless they are the `whole` file. Otherwise
// as read_torch_pickle().
std::optional<LegacyTorch> read_legacy_torch(const std::filesystem::path& file, std::span<const std::byte> head, bool whole,
                                             bool scalars = false);

// What is saved with torch: tensors (C order) in dictionaries and lists.
struct TorchTree {
  struct Tensor {
    std::size_t storage = 0;  // the record "data/N" of the archive
    DType dtype = DType::kFloat32;
    std::vector<std::uint64_t> shape = {};
  };
  struct Item;  // of a dictionary
  using Dict = std::vector<Item>;
  using List = std::vector<TorchTree>;
  struct Tuple {
    std::vector<TorchTree> items;
  };
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Tensor, Dict, List, Tuple> value;
};

struct TorchTree::Item {
  Item(TorchTree of, TorchTree is) : key{std::move(of)}, value{std::move(is)} {}
  TorchTree key, value;
};

// A pickle of protocol 2 that torch.load(weights_only=True) reads. The outermost dictionary is an OrderedDict.
std::string format_torch_pickle(const TorchTree& tree);

}  // namespace embermap
