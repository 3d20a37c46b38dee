// word2vec's binary format: a line "rows dim", then for each row its word, a space and the float32s; the original program, but
// not every other, puts a newline behind each row.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"
#include "io/file_stream.hpp"
#include "io/formats.hpp"
#include "io/row_index.hpp"
#include "io/text_vectors.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kLongestWord = VocabularyReader::kLongestWord;

class Word2vecBinaryReader final : public RowReader {
 public:
  Word2vecBinaryReader(const Location& location, const ReadOptions& options)
      : file_{File::open(location.file, File::Mode::kRead)}, where_{printable(location.file)}, words_{options.words} {
    if (!location.selector.empty())
      throw NotFound(fmt::format("{}: there is no '{}' in it, the file holds one table", where_, printable(location.selector)));
    const std::uint64_t size = file_.size();
    if (size == 0) throw FormatError(location.file, "is empty");
    stream_ = FileStream(file_, 0, size);
    const auto line = stream_.take_until('\n', 256);
    const auto header = line ? parse_word2vec_header(*line) : std::nullopt;
    if (!header) {
      const auto head = stream_.peek(64);
      const std::string like = line ? "" : looks_like(head.first(std::min<std::size_t>(64, head.size())));
      throw FormatError(location.file,
                        fmt::format("does not begin with the line of word2vec's binary files, which is the numbers of "
                                    "rows and columns{}",
                                    like.empty() ? "" : fmt::format(" (it looks like {})", like)));
    }
    rows_ = header->rows;
    dim_ = header->dim;
    dtype_ = DType::kFloat32;
    check_requested_dtype(where_, dtype_, options.dtype);
    if (dim_ == 0) throw FormatError(location.file, fmt::format("says it has {} rows of no columns", rows_));
    if (options.dim != 0 && options.dim != dim_)
      throw FormatError(location.file, fmt::format("its rows have {} columns, not {}", dim_, options.dim));
    // A row takes its numbers and a space at least, so no length is taken on the file's word.
    if (rows_ > 0 && (dim_ > size / 4 || rows_ > size / (4 * dim_ + 1)))
      throw FormatError(location.file,
                        fmt::format("says it has {} rows of {} float32, more than a file of {} can hold: at most {}", rows_, dim_,
                                    format_size(size), dim_ > size / 4 ? 0 : size / (4 * dim_ + 1)));
    index_.add(0, stream_.position());
    if (rows_ == 0) check_end();
    if (rows_ > 1) look_for_newlines();
  }
  Word2vecBinaryReader(const Word2vecBinaryReader&) = delete;
  Word2vecBinaryReader& operator=(const Word2vecBinaryReader&) = delete;

  std::string description() const override {
    return fmt::format("{}, word2vec binary, {} rows of {} numbers", where_, rows_, dim_);
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, 4_MiB / (4 * dim_)); }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    if (count > 0) go_to(first);
    for (std::uint64_t i = 0; i < count; ++i) {
      index_.add(next_, stream_.position());
      const std::string_view word = take_word();
      if (words_) words_(next_, word);
      stream_.take({out + i * 4 * dim_, 4 * dim_});
      ++next_;
    }
    if (next_ == rows_) check_end();
  }

 private:
  // Whether rows end with a newline: the first one tells. A row without one then is a row that lost or gained bytes.
  void look_for_newlines() {
    const std::uint64_t begin = stream_.position();
    const auto word = stream_.take_until(' ', kLongestWord + 1);
    if (word && stream_.left() > 4 * dim_) {
      stream_.skip(4 * dim_);
      newlines_ = stream_.peek_text(1).front() == '\n';
    }
    stream_.seek(begin);
  }

  void go_to(std::uint64_t row) {
    if (row == next_) return;
    const RowIndex::Place place = index_.before(row);
    if (row < next_ || place.row > next_) {
      stream_.seek(place.offset);
      next_ = place.row;
    }
    for (; next_ < row; ++next_) {
      index_.add(next_, stream_.position());
      take_word();
      stream_.skip(4 * dim_);
    }
  }

  // Makes sure that the numbers are there as well. After an error the stream is at the row again.
  std::string_view take_word() {
    const std::uint64_t begin = stream_.position();
    if (newlines_ && next_ > 0 && stream_.left() > 0 && stream_.peek_text(1).front() != '\n')
      throw FormatError(
          file_.path(),
          fmt::format("row {} does not end with a newline at byte {}, as those before it do: bytes of it are missing, "
                      "or too many",
                      next_ - 1, begin));
    // Newlines are not part of words: they end the row before.
    while (stream_.left() > 0 && stream_.peek_text(1).front() == '\n') stream_.skip(1);
    const std::uint64_t word_begin = stream_.position();
    const auto word = stream_.take_until(' ', kLongestWord + 1);
    if (!word && stream_.left() > kLongestWord) {
      stream_.seek(begin);
      throw FormatError(file_.path(), fmt::format("the word of row {}, from byte {} on, has no end within {}", next_, word_begin,
                                                  format_size(kLongestWord)));
    }
    if (!word || stream_.left() < 4 * dim_) {
      const std::uint64_t left = stream_.end() - word_begin;
      stream_.seek(begin);
      throw FormatError(file_.path(), fmt::format("says it has {} rows; it ends {} bytes behind {}", rows_, left,
                                                  next_ == 0 ? "its first line" : fmt::format("row {}", next_ - 1)));
    }
    // What no word holds shows that this is none, but numbers.
    if (const std::size_t odd = word->find_first_of(std::string_view("\0\n", 2)); odd != std::string_view::npos) {
      const char* const what = (*word)[odd] == '\0' ? "zero byte" : "newline";
      stream_.seek(begin);
      throw FormatError(
          file_.path(),
          fmt::format("the word of row {}, from byte {} on, holds a {}: bytes of a row before it are missing, or too "
                      "many",
                      next_, word_begin, what));
    }
    return *word;
  }

  void check_end() {
    const std::uint64_t begin = stream_.position();
    while (stream_.left() > 0 && stream_.peek_text(1).front() == '\n') stream_.skip(1);
    const std::uint64_t left = stream_.left();
    stream_.seek(begin);
    if (left > 0)
      throw FormatError(file_.path(), fmt::format("says it has {} rows; {} bytes follow the last one, from byte {} on", rows_,
                                                  left, stream_.end() - left));
  }

  File file_;
  std::string where_;
  WordSink words_;
  FileStream stream_{file_, 0, 0};
  RowIndex index_;
  bool newlines_ = false;   // behind every row
  std::uint64_t next_ = 0;  // row that begins at the stream's position
};

class Word2vecBinaryWriter final : public RowWriter {
 public:
  Word2vecBinaryWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options)
      : words_{options.words}, row_bytes_{4 * dim}, count_{printable(location.file), rows} {
    const std::string where = printable(location.file);
    if (!location.selector.empty())
      throw InvalidArgument(fmt::format("{}:{}: the file holds one table; leave '{}' out", where, printable(location.selector),
                                        printable(location.selector)));
    if (dtype != DType::kFloat32)
      throw DTypeError(
          fmt::format("{}: word2vec's binary format holds float32, the rows are {}: convert them", where, dtype_name(dtype)));
    if (!words_) throw InvalidArgument(fmt::format("{}: word2vec binary names every row by a word, and there are none", where));
    temporary_ = TemporaryFile::create(location.file, options.overwrite);
    pending_ = fmt::format("{} {}\n", rows, dim);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    for (std::uint64_t i = 0; i < count; ++i, ++next_) {
      words_(next_, word_);
      if (word_.find_first_of(" \n") != std::string::npos || word_.size() > kLongestWord)
        throw FormatError(
            temporary_->target(),
            fmt::format("the word '{}' of row {} {}", printable(word_, 60), next_,
                        word_.size() > kLongestWord ? fmt::format("has {} bytes; {} is the most", word_.size(), kLongestWord)
                        : word_.find('\n') != std::string::npos ? "holds a newline, which words of this format cannot"
                                                                : "holds a space, which ends a word in this format"));
      pending_ += word_;
      pending_ += ' ';
      pending_.append(reinterpret_cast<const char*>(rows + i * row_bytes_), row_bytes_);
      pending_ += '\n';
      if (pending_.size() >= 1_MiB) flush();
    }
  }

  void finish() override {
    count_.finish();
    flush();
    temporary_->commit();
  }

 private:
  void flush() {
    temporary_->file().write(end_, pending_);
    end_ += pending_.size();
    pending_.clear();
  }

  WordSource words_;
  std::uint64_t row_bytes_;
  RowCount count_;
  std::optional<TemporaryFile> temporary_;
  std::uint64_t next_ = 0, end_ = 0;
  std::string word_, pending_;
};

}  // namespace

Fit fit_word2vec_binary(const File& file, std::span<const std::byte> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  const std::size_t end = text.find('\n');
  const auto header = end == std::string_view::npos ? std::nullopt : parse_word2vec_header(text.substr(0, end));
  if (!header || header->dim == 0) return Fit::kNo;
  if (header->rows == 0) return Fit::kPossible;
  if (header->dim > file.size() / 4 || header->rows > file.size() / (4 * header->dim + 1)) return Fit::kNo;
  // Float32s of the first row have bytes that text has not; if they are all like text, the name decides.
  const std::string_view row = text.substr(end + 1);
  const std::size_t space = row.find(' ');
  if (space == std::string_view::npos) return Fit::kNo;
  const std::string_view numbers =
      row.substr(space + 1, static_cast<std::size_t>(std::min<std::uint64_t>(4 * header->dim, 4096)));
  for (const char c : numbers)
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r' && c != '\t') return Fit::kCertain;
  return Fit::kPossible;
}

std::unique_ptr<RowReader> open_word2vec_binary_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<Word2vecBinaryReader>(location, options);
}

std::unique_ptr<RowWriter> create_word2vec_binary_rows(const Location& location, std::uint64_t rows, std::uint64_t dim,
                                                       DType dtype, const WriteOptions& options) {
  return std::make_unique<Word2vecBinaryWriter>(location, rows, dim, dtype, options);
}

}  // namespace embermap
