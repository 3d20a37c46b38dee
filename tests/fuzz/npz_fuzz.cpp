// A .npz archive as it is: directory, members stored and deflated, headers of the arrays.
#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "io/rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kMostBytes = 1 << 20;

std::vector<std::byte> read_by(RowReader& reader, std::uint64_t step) {
  const std::uint64_t row_bytes = reader.dim() * item_size(reader.dtype());
  std::vector<std::byte> out(reader.rows() * row_bytes);
  for (std::uint64_t row = 0; row < reader.rows(); row += step)
    reader.read(row, std::min(step, reader.rows() - row), out.data() + row * row_bytes);
  return out;
}

void read_rows(const std::filesystem::path& file, const Entry& entry) {
  try {
    const auto reader = open_rows(Location{file, entry.name, Location::Format::kNpz}, {.dtype = DType::kBFloat16});
    require(reader->dim() > 0 && reader->block_rows() > 0, "rows without columns");
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(reader->rows(), reader->dim() * item_size(reader->dtype()), &bytes) || bytes > kMostBytes) return;
    const std::vector<std::byte> all = read_by(*reader, std::max<std::uint64_t>(1, reader->rows()));
    require(read_by(*reader, 3) == all, "other rows in pieces");
  } catch (const Error&) {
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const std::filesystem::path file = folder().make("x.npz", input).path();
  const std::vector<Entry> entries = list_entries(file, Location::Format::kNpz);
  for (std::size_t i = 0; i < std::min<std::size_t>(entries.size(), 8); ++i) read_rows(file, entries[i]);
  (void)parse_location(file.native());
}

}  // namespace embermap::fuzz
