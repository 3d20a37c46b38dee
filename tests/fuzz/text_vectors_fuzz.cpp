// Vectors as text, with header (word2vec) and without (GloVe).
#include <cstring>
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

Table read(bool header, const std::filesystem::path& file, DType dtype, std::uint64_t step) {
  Table out;
  ReadOptions options;
  options.dtype = dtype;
  options.words = [&](std::uint64_t row, std::string_view word) {
    require(row == out.words.size(), "words in another order than their rows");
    out.words.emplace_back(word);
  };
  const Location location{file, ""};
  const auto reader = header ? open_word2vec_text_rows(location, options) : open_glove_rows(location, options);
  out.rows = reader->rows();
  out.dim = reader->dim();
  const std::uint64_t row_bytes = out.dim * item_size(dtype);
  require(out.rows <= File::open(file, File::Mode::kRead).size() && out.dim > 0, "more rows than bytes");
  out.numbers.resize(out.rows * row_bytes);
  for (std::uint64_t row = 0; row < out.rows; row += step)
    reader->read(row, std::min(step, out.rows - row), out.numbers.data() + row * row_bytes);
  require(out.words.size() == out.rows, "rows without words");
  return out;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::uint64_t kind = taker.number(1);
  const bool header = kind % 2 == 0;
  const DType dtype = kind % 4 < 2 ? DType::kFloat32 : DType::kFloat64;
  const File file = folder().make("t.txt", taker.piece(input.size()));
  for (const std::uint64_t bytes : {std::uint64_t{4096}, file.size()}) {  // as the registry looks at it
    std::vector<std::byte> head(std::min(bytes, file.size()));
    file.read(0, head);
    fit_word2vec_text(file, head);
    fit_glove(file, head);
  }
  const Table table = read(header, file.path(), dtype, 1'000'000);
  const Table again = read(header, file.path(), dtype, 1);
  require(table.words == again.words && table.numbers == again.numbers, "rows that depend on how many are read at a time");

  // What was read can be written, if its words can, and is then read as the same.
  const std::filesystem::path copy = folder().path() / "copy.txt";
  try {
    const WriteOptions options{.overwrite = true,
                               .words = [&](std::uint64_t row, std::string& word) { word = table.words.at(row); }};
    const Location location{copy, ""};
    const auto writer = header ? create_word2vec_text_rows(location, table.rows, table.dim, dtype, options)
                               : create_glove_rows(location, table.rows, table.dim, dtype, options);
    writer->write(table.rows, table.numbers.data());
    writer->finish();
  } catch (const FormatError&) {
    return;
  }
  if (table.rows == 0) return;
  Table second;
  try {
    second = read(header, copy, dtype, 7);
  } catch (const FormatError&) {
    // Few rows, whose words hold spaces, do not tell how many numbers there are where no header does.
    for (const std::string& word : table.words)
      if (!header && (word.empty() || word.find_first_of(" \t") != std::string::npos)) return;
    throw;
  }
  if (second.dim != table.dim && !header) return;
  require(second.words == table.words, "words that are others once written");
  for (std::size_t i = 0; i < table.numbers.size(); i += item_size(dtype)) {
    const auto number = [&](const Table& from) {
      double value = 0;
      float narrow = 0;
      if (dtype == DType::kFloat64) {
        std::memcpy(&value, from.numbers.data() + i, 8);
      } else {
        std::memcpy(&narrow, from.numbers.data() + i, 4);
        value = static_cast<double>(narrow);
      }
      return value;
    };
    const double a = number(table), b = number(second);
    require(!(a < b) && !(a > b) && (a != a) == (b != b), "numbers that are others once written");
  }
}

}  // namespace embermap::fuzz
