// The index of tensors that lie in several safetensors files: its text. Two such files are there.
#include <string>
#include <vector>

#include "io/rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

void make_shard(std::string_view name, const std::string& header, std::size_t data) {
  std::vector<std::byte> content(8);
  for (std::size_t i = 0; i < 8; ++i) content[i] = static_cast<std::byte>(header.size() >> (8 * i) & 0xFF);
  const auto text = std::as_bytes(std::span(header));
  content.insert(content.end(), text.begin(), text.end());
  content.resize(content.size() + data, std::byte{7});
  folder().make(name, content);
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  static const bool made = [] {
    make_shard("one.safetensors", R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24);
    make_shard("two.safetensors", R"({"b":{"dtype":"F16","shape":[4,1],"data_offsets":[0,8]}})", 8);
    return true;
  }();
  require(made, "no files");
  const File index = folder().make("x.safetensors.index.json", input);
  for (const Entry& entry : list_entries(index.path(), Location::Format::kSafetensors)) {
    const auto reader = open_rows(Location{index.path(), entry.name, Location::Format::kSafetensors});
    require(reader->rows() * reader->dim() <= 6, "a tensor that no file has");
    std::vector<std::byte> rows(reader->rows() * reader->dim() * item_size(reader->dtype()));
    reader->read(0, reader->rows(), rows.data());
    for (const std::byte b : rows) require(b == std::byte{7}, "other bytes than the file's");
  }
}

}  // namespace embermap::fuzz
