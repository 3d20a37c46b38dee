// What an interrupted copy leaves: 1 byte for what there is, 2 bytes of length and the record, then the rows with their header.
// The copy that goes on from there is one of 10 rows of 3 float32.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/partial_rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kRows = 10, kDim = 3, kRowBytes = 12;

void clear(const std::filesystem::path& target) {
  for (const auto& path : {target, PartialRows::rows_path(target), PartialRows::record_path(target)}) ::unlink(path.c_str());
}

std::vector<std::byte> content_of(const std::filesystem::path& path) {
  const File file = File::open(path, File::Mode::kRead);
  std::vector<std::byte> out(file.size());
  file.read(0, out);
  return out;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const std::filesystem::path target = folder().path() / "x.raw";
  clear(target);
  Taker taker(input);
  const std::uint64_t kind = taker.number(1);
  const auto record = taker.piece(taker.number(2));
  const auto there = taker.piece(input.size());
  if ((kind & 1U) == 0) folder().make(PartialRows::record_path(target).filename().native(), record);
  if ((kind & 2U) == 0) folder().make(PartialRows::rows_path(target).filename().native(), there);
  if ((kind & 8U) != 0) folder().make("x.raw", there);
  const PartialRows::Copy copy{.of = {{"source", "a"}, {"order", "none"}},
                               .rows = kRows,
                               .dim = kDim,
                               .from = (kind & 16U) != 0 ? DType::kFloat64 : DType::kFloat32,
                               .dtype = DType::kFloat32,
                               .header = (kind & 32U) != 0 ? "header" : ""};
  std::vector<std::byte> expected;
  try {
    PartialRows partial(target, copy, /*overwrite=*/(kind & 4U) != 0);
    require(partial.done() <= kRows, "more rows are done than there are");
    const auto before = content_of(PartialRows::rows_path(target));
    require(before.size() == copy.header.size() + partial.done() * kRowBytes, "rows that are not counted");
    if ((kind & 64U) != 0) return;  // interrupted again: what is there stays
    expected = before;
    std::vector<float> numbers((kRows - partial.done()) * kDim);
    std::iota(numbers.begin(), numbers.end(), 0.5F);
    const std::vector<double> wide(numbers.begin(), numbers.end());
    const void* const rows = copy.from == DType::kFloat32 ? static_cast<const void*>(numbers.data()) : wide.data();
    partial.write(kRows - partial.done(), static_cast<const std::byte*>(rows));
    partial.save();
    const auto bytes = std::as_bytes(std::span(numbers));
    expected.insert(expected.end(), bytes.begin(), bytes.end());
    {
      const auto reader = partial.reader();
      std::vector<std::byte> back(kRows * kRowBytes);
      reader->read(0, kRows, back.data());
      require(std::equal(back.begin(), back.end(), expected.end() - static_cast<std::ptrdiff_t>(back.size())), "other rows");
    }
    partial.finish();
  } catch (const Error&) {
    // Refused: nothing that was there is lost.
    if ((kind & 2U) == 0 && std::filesystem::exists(PartialRows::rows_path(target)))
      require(content_of(PartialRows::rows_path(target)).size() >= std::min<std::size_t>(there.size(), 1) || (kind & 1U) != 0,
              "rows that are lost");
    throw;
  }
  require(content_of(target) == expected, "another file than was written");
  require(!std::filesystem::exists(PartialRows::record_path(target)), "a record that stays");
}

}  // namespace embermap::fuzz
