// word2vec's binary files.
#include <vector>

#include "base/error.hpp"
#include "io/formats.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

struct Table {
  std::uint64_t rows = 0, dim = 0;
  std::vector<std::string> words;
  std::vector<std::byte> numbers;
};

Table read(const std::filesystem::path& file, std::uint64_t step) {
  Table out;
  const WordSink words = [&](std::uint64_t row, std::string_view word) {
    require(row == out.words.size(), "words in another order than their rows");
    out.words.emplace_back(word);
  };
  const auto reader = open_word2vec_binary_rows(Location{file, ""}, {.words = words});
  out.rows = reader->rows();
  out.dim = reader->dim();
  require(out.rows == 0 || out.dim * 4 <= File::open(file, File::Mode::kRead).size() / out.rows, "more numbers than bytes");
  const std::uint64_t row_bytes = out.dim * 4;
  out.numbers.resize(out.rows == 0 ? 0 : out.rows * row_bytes);
  for (std::uint64_t row = 0; row < out.rows; row += step)
    reader->read(row, std::min(step, out.rows - row), out.numbers.data() + row * row_bytes);
  if (out.rows > 1) {  // the second row once more, out of turn
    std::vector<std::byte> one(row_bytes);
    const auto plain = open_word2vec_binary_rows(Location{file, ""}, {});
    plain->read(1, 1, one.data());
    require(std::equal(one.begin(), one.end(), out.numbers.begin() + static_cast<std::ptrdiff_t>(row_bytes)), "another row 1");
  }
  return out;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const File file = folder().make("t.bin", input);
  fit_word2vec_binary(file, input.first(std::min<std::size_t>(4096, input.size())));
  const Table table = read(file.path(), 1'000'000);
  const Table again = read(file.path(), 1);
  require(table.words == again.words && table.numbers == again.numbers, "rows that depend on how many are read at a time");
  if (table.rows == 0) return;
  const std::filesystem::path copy = folder().path() / "copy.bin";
  const auto writer = create_word2vec_binary_rows(
      Location{copy, ""}, table.rows, table.dim, DType::kFloat32,
      {.overwrite = true, .words = [&](std::uint64_t row, std::string& word) { word = table.words.at(row); }});
  try {
    writer->write(table.rows, table.numbers.data());
  } catch (const FormatError&) {
    return;  // a newline inside of a word
  }
  writer->finish();
  const Table second = read(copy, 3);
  require(second.words == table.words && second.numbers == table.numbers, "rows that are others once written");
}

}  // namespace embermap::fuzz
