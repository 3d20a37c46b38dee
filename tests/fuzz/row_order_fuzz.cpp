// An order of rows: 1 byte for the file's name, 1 for how many rows there are, 1 for the memory, then the file.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "io/row_order.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kMost = 1 << 16;

// Rows of two numbers that say which they are.
class NumberedRows final : public RowReader {
 public:
  explicit NumberedRows(std::uint64_t rows) {
    rows_ = rows;
    dim_ = 2;
    dtype_ = DType::kInt64;
  }
  std::string description() const override { return "numbered rows"; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    require(first <= rows_ && count <= rows_ - first, "rows that are not there");
    for (std::uint64_t row = first; row < first + count; ++row) {
      const std::array<std::uint64_t, 2> numbers{row, ~row};
      std::memcpy(out + (row - first) * sizeof numbers, numbers.data(), sizeof numbers);
    }
  }
  std::uint64_t block_rows() const override { return 4; }
};

std::vector<std::uint64_t> numbers_of(RowOrder& order, std::uint64_t step) {
  std::vector<std::uint64_t> out(order.size());
  for (std::uint64_t at = 0; at < out.size(); at += step)
    order.read(at, std::span(out).subspan(at, std::min<std::size_t>(step, out.size() - at)));
  return out;
}

std::vector<std::byte> inverse_of(RowOrder& order, std::uint64_t rows, bool permutation, std::uint64_t memory) {
  const std::filesystem::path file = folder().path() / "back.npy";
  InverseOrder inverse(order, rows, permutation, file, /*overwrite=*/true, memory);
  inverse.finish();
  const File written = File::open(file, File::Mode::kRead);
  std::vector<std::byte> out(written.size());
  written.read(0, out);
  return out;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  constexpr std::array kNames{"x.txt", "x.npy", "x.u8bin", "x.safetensors"};
  Taker taker(input);
  const char* const name = kNames[taker.number(1) % kNames.size()];
  const std::uint64_t rows = taker.number(1) % 64, memory = 1 + taker.number(1);
  const File file = folder().make(name, taker.piece(input.size()));
  auto order = RowOrder::open(file.path());
  if (order->size() > kMost) return;
  const std::vector<std::uint64_t> numbers = numbers_of(*order, kMost);
  require(numbers == numbers_of(*order, 3), "numbers that depend on how many are read at a time");
  for (const std::uint64_t number : numbers) require(number <= INT64_MAX, "a number that no int64 holds");

  const bool all_there = std::all_of(numbers.begin(), numbers.end(), [&](std::uint64_t row) { return row < rows; });
  std::vector<std::uint64_t> sorted = numbers;
  std::sort(sorted.begin(), sorted.end());
  const bool once = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  bool taken = true;
  std::vector<std::byte> back;
  try {
    back = inverse_of(*order, rows, /*permutation=*/false, memory);
  } catch (const InvalidArgument&) {
    taken = false;
  }
  require(taken == all_there, "an order with rows that are not there");
  if (!all_there) return;
  require(inverse_of(*order, rows, false, 1 << 20) == back, "a way back that depends on the memory");
  bool permutation = true;
  try {
    require(inverse_of(*order, rows, /*permutation=*/true, memory) == back, "another way back of a permutation");
  } catch (const InvalidArgument&) {
    permutation = false;
  }
  require(permutation == (once && numbers.size() == rows), "a permutation that is none");
  for (std::uint64_t row = 0; row < rows; ++row) {
    std::int64_t place = 0;
    std::memcpy(&place, back.data() + back.size() - (rows - row) * 8, 8);
    const auto found = std::find(numbers.begin(), numbers.end(), row);
    require(place == (found == numbers.end() ? -1 : found - numbers.begin()), "another way back");
  }

  OrderedReader reader(std::make_unique<NumberedRows>(rows), std::move(order), memory);
  require(reader.rows() == numbers.size(), "another number of rows");
  std::vector<std::uint64_t> out(2 * numbers.size());
  for (std::uint64_t at = 0; at < numbers.size(); at += 5) {
    const std::uint64_t some = std::min<std::uint64_t>(5, numbers.size() - at);
    reader.read(at, some, reinterpret_cast<std::byte*>(out.data() + 2 * at));
  }
  for (std::size_t i = 0; i < numbers.size(); ++i)
    require(out[2 * i] == numbers[i] && out[2 * i + 1] == ~numbers[i], "another row than the order says");
}

}  // namespace embermap::fuzz
