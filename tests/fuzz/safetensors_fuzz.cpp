// A safetensors file: 2 bytes that say how much data stands behind the header, then the text of the header. Its length is written
// by the target, so that mutations get past it.
#include <algorithm>
#include <string>
#include <vector>

#include "io/rows.hpp"
#include "io/safetensors.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::uint64_t data = taker.number(2);
  const auto text = taker.piece(input.size());
  std::vector<std::byte> content(8);
  for (std::size_t i = 0; i < 8; ++i) content[i] = static_cast<std::byte>(text.size() >> (8 * i) & 0xFF);
  content.insert(content.end(), text.begin(), text.end());
  content.resize(content.size() + data, std::byte{7});
  const File file = folder().make("x.safetensors", content);
  SafetensorsHeader header = read_safetensors_header(file);
  std::uint64_t at = 0;
  for (const SafeTensor& tensor : header.tensors) {
    require(tensor.begin == at && tensor.end >= at && tensor.end <= data, "a tensor outside of the data");
    at = tensor.end;
    if (!tensor.element() || tensor.shape.empty() || tensor.begin == tensor.end) continue;
    const auto reader = open_rows(Location{file.path(), tensor.name, Location::Format::kSafetensors});
    std::vector<std::byte> rows(tensor.end - tensor.begin);
    reader->read(0, reader->rows(), rows.data());
  }
  require(at == data, "bytes that belong to no tensor");
  // What was read can be written, and reads as the same.
  const std::string again = format_safetensors_header(header.tensors, header.metadata);
  std::vector<std::byte> copy(again.size() + data);
  std::transform(again.begin(), again.end(), copy.begin(), [](char c) { return static_cast<std::byte>(c); });
  const SafetensorsHeader back = read_safetensors_header(folder().make("y.safetensors", copy));
  require(back.metadata == header.metadata && back.tensors.size() == header.tensors.size(), "another header after writing");
}

}  // namespace embermap::fuzz
