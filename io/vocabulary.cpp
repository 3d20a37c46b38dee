#include "io/vocabulary.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "io/same_file.hpp"

namespace embermap {

VocabularyWriter::VocabularyWriter(const std::filesystem::path& file, bool overwrite)
    : temporary_{TemporaryFile::create(file, overwrite)} {}

void VocabularyWriter::add(std::uint64_t row, std::string_view word) {
  if (row < words_) return;
  if (row > words_) throw InvalidArgument(fmt::format("the word of row {} comes after that of row {}", row, words_ - 1));
  if (word.find('\n') != std::string_view::npos)
    throw FormatError(
        temporary_.target(),
        fmt::format("the word '{}' of row {} holds a newline, which no line of a vocabulary can", printable(word), row));
  // The first line tells the reader what ends lines here.
  if (row == 0 && word.ends_with('\r'))
    throw FormatError(temporary_.target(), fmt::format("the word '{}' of row 0 ends with a carriage return: its line would be "
                                                       "taken for one of a file with lines of \\r\\n",
                                                       printable(word)));
  if (word.size() > VocabularyReader::kLongestWord)
    throw FormatError(temporary_.target(), fmt::format("the word of row {} has {} bytes; {} is the most", row, word.size(),
                                                       std::size_t{VocabularyReader::kLongestWord}));
  pending_.append(word);
  pending_ += '\n';
  ++words_;
  if (pending_.size() >= 1_MiB) flush();
}

void VocabularyWriter::flush() {
  temporary_.file().write(written_, pending_);
  written_ += pending_.size();
  pending_.clear();
}

void VocabularyWriter::finish(std::uint64_t rows) {
  if (words_ != rows)
    throw InvalidArgument(fmt::format("{}: {} words for {} rows", printable(temporary_.target()), words_, rows));
  flush();
  temporary_.commit();
}

VocabularyReader::VocabularyReader(const std::filesystem::path& file)
    : file_{File::open(file, File::Mode::kRead)}, stream_{file_, 0, file_.size()} {
  std::uint64_t line = 0;  // bytes of it so far
  index_.add(0, 0);
  while (stream_.left() > 0) {
    const std::uint64_t block = stream_.position();
    const std::string_view text = stream_.peek_text(1);
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = text.find('\n', at);
      const std::size_t bytes = std::min(end, text.size()) - at;
      line += bytes;
      if (line > kLongestWord + 1)
        throw FormatError(file, fmt::format("line {} is longer than {}: this is no vocabulary of one word a line", words_ + 1,
                                            format_size(kLongestWord)));
      at += bytes;
      if (end == std::string_view::npos) break;
      if (words_ == 0) crlf_ = line > 0 && (bytes > 0 ? text[end - 1] == '\r' : crlf_);
      ++at;
      ++words_;
      index_.add(words_, block + at);
      line = 0;
    }
    if (words_ == 0) crlf_ = text.ends_with('\r');  // its line ends in the next block
    stream_.skip(text.size());
  }
  if (line > 0) ++words_;
  stream_.seek(0);
}

void VocabularyReader::read(std::uint64_t row, std::string& word) {
  if (row == 0 && next_ > 0) {  // again
    stream_.seek(0);
    next_ = 0;
  }
  if (row != next_) throw InvalidArgument(fmt::format("{}: word {} comes after word {}", printable(path()), row, next_));
  if (row >= words_) throw FormatError(path(), fmt::format("has {} words; there is none for row {}", words_, row));
  // The file may have changed since its words were counted.
  if (const auto line = stream_.take_until('\n', kLongestWord + 2)) {
    word = *line;
  } else {
    if (stream_.left() == 0 || stream_.left() > kLongestWord + 2) throw FormatError(path(), "changed while it was read");
    word = stream_.peek_text(stream_.left());
    stream_.skip(stream_.left());
  }
  if (crlf_ && word.ends_with('\r')) word.pop_back();
  ++next_;
}

void VocabularyReader::find(std::uint64_t row, std::string& word) {
  if (row < next_ || row - next_ > 1024) {
    const RowIndex::Place place = index_.before(std::min(row, words_));
    if (row < next_ || place.row > next_) {
      stream_.seek(place.offset);
      next_ = place.row;
    }
  }
  while (next_ < row && next_ < words_) read(next_, word);
  read(row, word);
}

void WordQueue::add(std::uint64_t row, std::string_view word) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t next = first_ + words_.size();
  if (row < next) return;
  if (row > next) throw InvalidArgument(fmt::format("the word of row {} comes where that of row {} is due", row, next));
  words_.emplace_back(word);
}

void WordQueue::take(std::uint64_t row, std::string& word) {
  const std::lock_guard lock(mutex_);
  if (row != first_ || words_.empty()) throw InvalidArgument(fmt::format("there is no word for row {}", row));
  word = std::move(words_.front());
  words_.pop_front();
  ++first_;
}

std::filesystem::path vocabulary_beside(const std::filesystem::path& file) {
  return std::filesystem::path(file.native() + ".vocab.txt");
}

WordTransfer::WordTransfer(const Options& options) : overwrite_{options.overwrite}, source_row_{options.source_row} {
  const std::string& named = options.vocabulary;
  const bool none = named == "none";
  if (!options.source_has_words && !options.destination_has_words) {
    if (!named.empty() && !none)
      throw InvalidArgument(fmt::format("a vocabulary, {}, is of no use: neither side has words", printable(named)));
    return;
  }
  to_queue_ = options.source_has_words && options.destination_has_words && !none;
  numbers_ = options.destination_has_words && none;
  if (options.source_has_words && !none && (!named.empty() || !options.destination_has_words)) {
    write_to_ = named.empty() ? vocabulary_beside(options.destination) : std::filesystem::path(named);
    std::error_code ignored;
    for (const std::filesystem::path& other : {options.source, options.destination})
      if (same_file(write_to_, other))
        throw InvalidArgument(fmt::format("{} holds the rows; their words need a file of their own", printable(write_to_)));
    if (!overwrite_ && std::filesystem::exists(write_to_, ignored))
      throw AlreadyExists(fmt::format("{}, where the words would be written, exists already", printable(write_to_)));
  }
  if (options.destination_has_words && !options.source_has_words && !none) {
    const std::filesystem::path file = named.empty() ? vocabulary_beside(options.source) : std::filesystem::path(named);
    std::error_code ignored;
    if (named.empty() && !std::filesystem::exists(file, ignored))
      throw NotFound(
          fmt::format("{}: its rows have words, and {} is not there: name a vocabulary, one word a line, or none, for the "
                      "numbers of the rows",
                      printable(options.destination), printable(file)));
    // The rows' own file would take its place.
    if (same_file(file, options.destination))
      throw InvalidArgument(fmt::format("{} holds the words and would be replaced by the rows", printable(file)));
    reader_ = std::make_unique<VocabularyReader>(file);
  }
}

WordSink WordTransfer::sink() {
  if (!to_queue_ && write_to_.empty()) return {};
  return [this](std::uint64_t row, std::string_view word) {
    if (writer_) writer_->add(row, word);
    if (to_queue_) queue_.add(row, word);
  };
}

WordSource WordTransfer::source() {
  if (to_queue_) return [this](std::uint64_t row, std::string& word) { queue_.take(row, word); };
  if (reader_ && source_row_) return [this](std::uint64_t row, std::string& word) { reader_->find(source_row_(row), word); };
  if (reader_) return [this](std::uint64_t row, std::string& word) { reader_->read(row, word); };
  if (numbers_) return [](std::uint64_t row, std::string& word) { word = fmt::format("{}", row); };
  return {};
}

void WordTransfer::begin(std::uint64_t rows, std::uint64_t source_rows) {
  rows_ = rows;
  if (reader_ && reader_->words() != source_rows)
    throw FormatError(reader_->path(), fmt::format("has {} words for {} rows", reader_->words(), source_rows));
  if (!write_to_.empty()) writer_.emplace(write_to_, overwrite_);
}

void WordTransfer::finish() {
  if (!writer_) return;
  writer_->finish(rows_);
  complete_ = true;
}

void WordTransfer::withdraw() noexcept {
  if (!complete_) return;
  std::error_code ignored;
  std::filesystem::remove(write_to_, ignored);
  complete_ = false;
}

}  // namespace embermap
