// A file that may be of any format, found out as the command does: by content and name. 1 byte for the name, 1 for the options,
// then the file. Every array that is listed is read. HDF5 is left out: its library is not made for damaged files (hdf5_fuzz).
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/formats.hpp"
#include "io/rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kMostBytes = 1 << 16;

struct Rows {
  std::vector<std::byte> bytes;
  std::vector<std::string> words;
  bool operator==(const Rows&) const = default;
};

// Nothing where it is refused, or is large: a file may say that a byte stands for many rows (strides of 0, deflate).
std::optional<Rows> read(const Location& location, ReadOptions options, std::uint64_t step) {
  Rows out;
  if (format_has_words(location.format))
    options.words = [&](std::uint64_t row, std::string_view word) {
      require(row == out.words.size(), "words in another order than their rows");
      out.words.emplace_back(word);
    };
  try {
    const auto reader = open_rows(location, options);
    require(reader->dim() > 0 && reader->block_rows() > 0 && !reader->description().empty(), "rows without columns");
    std::uint64_t row_bytes = 0, bytes = 0;
    if (__builtin_mul_overflow(reader->dim(), item_size(reader->dtype()), &row_bytes) ||
        __builtin_mul_overflow(reader->rows(), row_bytes, &bytes) || bytes > kMostBytes)
      return std::nullopt;
    out.bytes.resize(bytes);
    for (std::uint64_t row = 0; row < reader->rows(); row += step)
      reader->read(row, std::min(step, reader->rows() - row), out.bytes.data() + row * row_bytes);
    require(!options.words || out.words.size() == reader->rows(), "rows without words");
    return out;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  constexpr std::array kNames{
      "x.npy",       "x.npz",   "x.safetensors", "x.pt",   "x.bin",   "x.vec", "x.txt",
      "x.glove.txt", "x.fvecs", "x.bvecs",       "x.fbin", "x.u8bin", "x",     "x.safetensors.index.json"};
  Taker taker(input);
  const char* const name = kNames[taker.number(1) % kNames.size()];
  const std::uint64_t kind = taker.number(1);
  const File file = folder().make(name, taker.piece(input.size()));
  std::array<std::byte, FormatInfo::kHeadBytes> buffer;
  const auto head = std::span<const std::byte>(buffer).first(file.read_some(0, buffer));
  if (fit_hdf5(file, head) != Fit::kNo) return;

  ReadOptions options;
  if ((kind & 1U) != 0) options.dtype = static_cast<DType>(kind >> 1 & 7U);
  if ((kind & 16U) != 0) options.dim = 1 + (kind >> 5);
  Location location;
  try {
    location = parse_location(file.path().native());
  } catch (const InvalidArgument&) {  // nothing tells
    location = Location{file.path(), "", Location::Format::kRaw};
  }
  require(location.file == file.path() && location.selector.empty(), "another file than was named");
  if (location.format == Location::Format::kHdf5) return;
  std::vector<Entry> entries;
  try {
    entries = list_entries(location.file, location.format);
  } catch (const Error&) {
    entries.emplace_back();  // what cannot be listed may not be readable either; raw files need to be told
  }
  for (std::size_t i = 0; i < std::min<std::size_t>(entries.size(), 8); ++i) {
    location.selector = entries[i].name;
    const auto all = read(location, options, 1U << 20);
    require(read(location, options, 1) == all && read(location, options, 3) == all,
            "rows that depend on how many are read at a time");
  }
}

}  // namespace embermap::fuzz
