// The words that formats of word vectors have beside their rows. Tables and other files have none: there the words lie in a
// vocabulary, a text file with the word of row 0, 1, 2, ... one a line.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "io/file.hpp"
#include "io/file_stream.hpp"
#include "io/row_index.hpp"

namespace embermap {

// Is given the word of a row by a reader, each once for every time its row is read. A word is bytes: often UTF-8, possibly empty,
// possibly the same as another row's. May throw.
using WordSink = std::function<void(std::uint64_t row, std::string_view word)>;

// Puts the word of a row into `word`, for rows 0, 1, 2, ... in turn. May throw.
using WordSource = std::function<void(std::uint64_t row, std::string& word)>;

// Takes words in order into a temporary file; finish() completes it under its name, without it nothing is left behind. A word
// that no line could give back is refused (FormatError naming its row): one with a newline, of more than 64 KiB, or a
// first one that ends with "\r". Everything else is kept as it is. Not thread-safe.
class VocabularyWriter {
 public:
  // Throws AlreadyExists, IoError.
  VocabularyWriter(const std::filesystem::path& file, bool overwrite);
  // Rows in ascending order; rows that were given before are passed over, so that a reader may go back.
  void add(std::uint64_t row, std::string_view word);
  // Throws InvalidArgument unless there are `rows` words.
  void finish(std::uint64_t rows);

 private:
  void flush();

  TemporaryFile temporary_;
  std::string pending_;
  std::uint64_t written_ = 0, words_ = 0;
};

// Reads a vocabulary in order, with little memory. A file whose first line ends with "\r\n" is one of such lines; the last line
// may lack its end. Not thread-safe.
class VocabularyReader {
 public:
  static constexpr std::size_t kLongestWord = 64_KiB;

  // Counts the words. Throws IoError, FormatError (a line longer than kLongestWord).
  explicit VocabularyReader(const std::filesystem::path& file);
  VocabularyReader(const VocabularyReader&) = delete;
  VocabularyReader& operator=(const VocabularyReader&) = delete;

  const std::filesystem::path& path() const noexcept { return file_.path(); }
  std::uint64_t words() const noexcept { return words_; }
  void read(std::uint64_t row, std::string& word);  // row 0, 1, 2, ... in turn, or 0 again
  void find(std::uint64_t row, std::string& word);  // of any row; ascending ones are quick

 private:
  File file_;
  FileStream stream_;
  RowIndex index_;  // some of the lines
  std::uint64_t words_ = 0, next_ = 0;
  bool crlf_ = false;
};

// Hands words from a reader to a writer that are at work at the same time, each on its thread. The reader is as far ahead as
// copy_rows() lets it; so many words wait here.
class WordQueue {
 public:
  void add(std::uint64_t row, std::string_view word);  // ascending; a row that was given before is passed over
  void take(std::uint64_t row, std::string& word);     // its words must have been added before

 private:
  std::mutex mutex_;
  std::deque<std::string> words_;
  std::uint64_t first_ = 0;
};

// "x.npy.vocab.txt" of "x.npy": where the words of rows lie whose own file has none. Beside a table of a store, "STORE/TABLE", it
// is "STORE/TABLE.vocab.txt".
std::filesystem::path vocabulary_beside(const std::filesystem::path& file);

// Where the words of one copy come from and go to: from the source to the destination, or from or to a vocabulary where only one
// of them has words. Members are called by the thread that copies; what sink() and source() give may be called by two.
class WordTransfer {
 public:
  struct Options {
    // A vocabulary. Empty: the one beside the source or the destination. "none": words are left out, or are the numbers of their
    // rows. Where source and destination have words, a file named here is written as well.
    std::string vocabulary = {};
    bool source_has_words = false, destination_has_words = false;
    std::filesystem::path source = {}, destination = {};  // whose vocabularies are meant
    bool overwrite = false;                               // of the vocabulary that is written
    // Which row of the source a row of the destination is, where a vocabulary of the source's rows is read; empty: the same.
    std::function<std::uint64_t(std::uint64_t)> source_row = {};
  };

  // Throws InvalidArgument for a vocabulary that nothing needs, NotFound where words are needed and there are none,
  // AlreadyExists, IoError, FormatError. Reads the vocabulary once, to count its words.
  explicit WordTransfer(const Options& options);

  WordSink sink();      // for ReadOptions::words; empty where the source has none, or they are not needed
  WordSource source();  // for WriteOptions::words; empty where the destination has none

  // Once the rows are known, before they are copied: throws FormatError unless the vocabulary has as many words as the source has
  // rows, makes the one that is to be written.
  void begin(std::uint64_t rows, std::uint64_t source_rows);
  void begin(std::uint64_t rows) { begin(rows, rows); }
  // Completes it, before the rows' own file or table is completed; withdraw() takes it away again, where that fails.
  void finish();
  void withdraw() noexcept;

  const std::filesystem::path& written() const noexcept { return write_to_; }  // empty: none

 private:
  bool overwrite_ = false;
  std::function<std::uint64_t(std::uint64_t)> source_row_;
  std::uint64_t rows_ = 0;
  bool to_queue_ = false, numbers_ = false, complete_ = false;
  WordQueue queue_;
  std::filesystem::path write_to_;
  std::optional<VocabularyWriter> writer_;
  std::unique_ptr<VocabularyReader> reader_;
};

}  // namespace embermap
