// A vocabulary: the words of rows, one a line. Any bytes.
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/vocabulary.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

std::vector<std::string> read(const std::filesystem::path& file) {
  VocabularyReader reader(file);
  std::vector<std::string> words(reader.words());
  for (std::uint64_t row = 0; row < words.size(); ++row) reader.read(row, words[row]);
  std::string word;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(words.size(), 50); ++i) {  // forth and back
    const std::uint64_t row = i * 7919 % words.size();
    reader.find(row, word);
    require(word == words[row], "another word out of turn");
  }
  return words;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  const File file = folder().make("x.vocab.txt", input);
  const std::vector<std::string> words = read(file.path());
  require(words.size() <= input.size(), "more words than bytes");
  // Together they are the file, but for the ends of lines.
  std::size_t bytes = 0;
  for (const std::string& word : words) bytes += word.size() + 1;
  require(bytes <= input.size() + 1, "more in the words than in the file");

  const std::filesystem::path copy = folder().path() / "copy.txt";
  VocabularyWriter writer(copy, /*overwrite=*/true);
  for (std::uint64_t row = 0; row < words.size(); ++row) {
    try {
      writer.add(row, words[row]);
    } catch (const FormatError&) {  // one that no line could give back
      return;
    }
  }
  writer.finish(words.size());
  require(read(copy) == words, "words that are others once written");
}

}  // namespace embermap::fuzz
