// fastText's models.
#include <array>
#include <vector>

#include "io/formats.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::string selector = std::array{"input", "output", "words"}[taker.number(1) % 3];
  const File file = folder().make("t.bin", taker.piece(input.size()));
  std::uint64_t next = 0;
  const WordSink words = [&](std::uint64_t row, std::string_view word) {
    require(row == next++, "words in another order than their rows");
    require(word.size() <= file.size() + 32, "a word longer than the file");
  };
  const auto reader = open_fasttext_rows(Location{file.path(), selector}, {.words = words});
  require(reader->rows() == 0 || reader->dim() <= file.size() / 4 / reader->rows(), "more numbers than bytes");
  std::vector<std::byte> rows(reader->rows() == 0 ? 0 : reader->rows() * reader->dim() * 4);
  reader->read(0, reader->rows(), rows.data());
  require(next == reader->rows(), "rows without words");
  if (next == 0) return;
  std::vector<std::byte> last(reader->dim() * 4);
  --next;
  reader->read(next, 1, last.data());
  require(std::equal(last.begin(), last.end(), rows.end() - static_cast<std::ptrdiff_t>(last.size())), "another last row");
}

}  // namespace embermap::fuzz
