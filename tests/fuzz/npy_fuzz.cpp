// The header of a .npy file.
#include "io/npy.hpp"

#include "base/error.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  // An input that begins with a number and the text of a header stands for a file whose lengths are right, and which is as large.
  Taker taker(input);
  const std::uint64_t size = taker.number(1) << (taker.number(1) % 32);
  const bool as_it_is = input.size() >= 6 && std::to_integer<unsigned>(input[0]) == 0x93;
  std::vector<std::byte> content(input.begin(), input.end());
  if (!as_it_is) {
    const unsigned version = 1 + static_cast<unsigned>(taker.number(1) % 3);
    const auto text = taker.piece(version == 1 ? 0xFFFF : 1U << 20);
    content.clear();
    for (const char c : std::string_view("\x93NUMPY")) content.push_back(static_cast<std::byte>(c));
    content.push_back(static_cast<std::byte>(version));
    content.push_back(std::byte{0});
    for (unsigned i = 0; i < (version == 1 ? 2U : 4U); ++i) content.push_back(static_cast<std::byte>(text.size() >> (8 * i)));
    content.insert(content.end(), text.begin(), text.end());
  }
  const File file = folder().make("t.npy", content);
  if (!as_it_is) file.resize(content.size() + size);

  const NpyHeader header = read_npy_header(file);
  require(header.data_offset <= file.size() && header.data_bytes() <= file.size() - header.data_offset,
          "an array larger than its file");
  std::uint64_t end = 0;
  for (const NpyField& field : header.fields) {
    require(field.offset >= end && field.bytes <= header.item_bytes && field.offset <= header.item_bytes - field.bytes,
            "fields that overlap, or reach past their record");
    end = field.offset + field.bytes;
  }
  require(!header.dtype_text().empty() && !header.shape_text().empty(), "a header without text");
  // What was read can be written, and is then read as the same; not every header can (a field whose type is a record).
  std::string again;
  try {
    again = format_npy_header(header.descr, header.fields, header.item_bytes, header.shape, 0);
  } catch (const InvalidArgument&) {
    return;
  }
  const File copy = folder().make("again.npy", std::as_bytes(std::span(again)));
  copy.resize(again.size() + header.data_bytes());
  const NpyHeader second = read_npy_header(copy);
  require(second.shape == header.shape && second.item_bytes == header.item_bytes && second.fields.size() == header.fields.size(),
          "a header that reads as another one once written");
}

}  // namespace embermap::fuzz
