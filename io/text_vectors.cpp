#include "io/text_vectors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/half.hpp"
#include "base/size_text.hpp"
#include "base/thread_pool.hpp"
#include "io/elements.hpp"
#include "io/file_stream.hpp"
#include "io/formats.hpp"
#include "io/row_index.hpp"

namespace embermap {
namespace {

bool is_blank(char c) { return c == ' ' || c == '\t'; }

std::string_view without_blanks_behind(std::string_view text) {
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// A line without what ends it: "\r" of "\r\n", blanks.
std::string_view without_end(std::string_view line) {
  while (!line.empty() && (is_blank(line.back()) || line.back() == '\r')) line.remove_suffix(1);
  return line;
}

std::string_view without_blanks_before(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  return text;
}

// For messages: no line of megabytes.
std::string shown(std::string_view text) {
  constexpr std::size_t kMost = 60;
  return printable(text, kMost);
}

enum class Number { kGood, kTooLarge, kNotWhole, kNone };

// Whether a decimal number that its type cannot hold is too large, or else too small: the place of its first digit that is not 0
// decides.
bool is_too_large(std::string_view text) {
  std::int64_t power = 0;
  bool point = false, significant = false;
  std::size_t i = 0;
  for (; i < text.size() && text[i] != 'e' && text[i] != 'E'; ++i) {
    if (text[i] == '.') {
      point = true;
    } else if (text[i] >= '0' && text[i] <= '9') {
      significant = significant || text[i] != '0';
      if (significant && !point) ++power;
      if (!significant && point) --power;
    }
  }
  std::int64_t exponent = 0;
  if (i < text.size()) {
    std::string_view digits = text.substr(i + 1);
    const bool negative = digits.starts_with('-');
    if (negative || digits.starts_with('+')) digits.remove_prefix(1);
    const std::errc error = std::from_chars(digits.data(), digits.data() + digits.size(), exponent).ec;
    // Far beyond any number of digits, and far from the end of the range.
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 2;
    exponent = error == std::errc::result_out_of_range ? kMost : std::min(exponent, kMost);
    if (negative) exponent = -exponent;
  }
  return power + exponent > 0;
}

// Reads the number at `at` and moves behind it; a '+' before it is taken as Python takes it. Numbers too small are what they
// round to.
template <class T>
inline Number parse_number(const char*& at, const char* end, T& out) {
  const char* begin = at;
  if (begin != end && *begin == '+' && end - begin > 1 && begin[1] != '-') ++begin;
  if constexpr (std::is_same_v<T, std::int64_t>) {
    const auto [behind, wrong] = std::from_chars(begin, end, out);
    if (wrong == std::errc() && (behind == end || is_blank(*behind))) {
      at = behind;
      return Number::kGood;
    }
    // "3.0", "1e5": whole as well, and exact as long as a double is.
    constexpr double kExact = 9007199254740992.0;
    double real = 0;
    const char* from = at;
    const Number found = parse_number(from, end, real);
    if (found != Number::kGood) return found == Number::kTooLarge ? Number::kNotWhole : found;
    if (std::trunc(real) != real || std::fabs(real) > kExact) return Number::kNotWhole;  // also for NaN
    out = static_cast<std::int64_t>(real);
    at = from;
    return Number::kGood;
  } else {
    const auto [next, error] = std::from_chars(begin, end, out);
    if (error == std::errc()) {
      at = next;
      return Number::kGood;
    }
    if (error != std::errc::result_out_of_range) return Number::kNone;
    const std::string_view text(begin, static_cast<std::size_t>(next - begin));
    if (is_too_large(text)) return Number::kTooLarge;
    if constexpr (std::is_same_v<T, float>) {  // what is left of it, if anything
      double wide = 0;
      if (std::from_chars(begin, end, wide).ec == std::errc()) {
        out = static_cast<float>(wide);
        at = next;
        return Number::kGood;
      }
    }
    out = text.starts_with('-') ? -T{0} : T{0};
    at = next;
    return Number::kGood;
  }
}

template <class T>
bool is_number(std::string_view field) {
  T value{};
  const char* at = field.data();
  return parse_number(at, field.data() + field.size(), value) != Number::kNone && at == field.data() + field.size();
}

// Takes the last field off a line.
std::string_view take_last_field(std::string_view& line) {
  line = without_blanks_behind(line);
  std::size_t begin = line.size();
  while (begin > 0 && !is_blank(line[begin - 1])) --begin;
  const std::string_view field = line.substr(begin);
  line = line.substr(0, begin);
  return field;
}

// Whether numbers alone follow the first part of a word: they would be taken for columns.
template <class T>
bool ends_with_numbers(std::string_view word) {
  const std::size_t blank = word.find_first_of(" \t");
  if (blank == std::string_view::npos) return false;
  std::string_view others = word.substr(blank);
  if (without_blanks_before(others).empty()) return false;
  while (!without_blanks_before(others).empty())
    if (!is_number<T>(take_last_field(others))) return false;
  return true;
}

// The word of what stands before the first number. One blank, the last, separates them, and those before it belong to the word
// (" ", "\t" and "a " are words of published files), unless numbers are wider apart than by one blank too: then columns were
// aligned.
std::string_view word_before_numbers(std::string_view before, std::string_view numbers) {
  bool aligned = false;
  for (std::size_t i = 1; i < numbers.size(); ++i) aligned = aligned || (is_blank(numbers[i]) && is_blank(numbers[i - 1]));
  if (aligned) return without_blanks_behind(before);
  before.remove_suffix(before.empty() ? 0 : 1);
  return before;
}

template <class T>
constexpr const char* kTypeName = std::is_same_v<T, float>    ? "float32"
                                  : std::is_same_v<T, double> ? "float64"
                                                              : "int64";

// The way of lines that are not plain: words with blanks, and everything that is wrong.
template <class T>
std::string parse_odd_row(std::string_view line, std::uint64_t dim, T* out, std::string_view& word) {
  const std::uint64_t numbers = count_numbers(line);
  if (numbers < dim) {
    if (line.find('\0') != std::string_view::npos) return "is no text: it holds a zero byte (is this a binary file?)";
    return line.empty() ? std::string("is empty")
                        : fmt::format("has {} numbers, {} are expected: '{}'", numbers, dim, shown(line));
  }
  std::string_view rest = line;
  for (std::uint64_t column = dim; column-- > 0;) {
    const std::string_view field = take_last_field(rest);
    const char* at = field.data();
    const char* const end = at + field.size();
    const Number found = parse_number(at, end, out[column]);
    if (found == Number::kTooLarge)
      return fmt::format("column {}: '{}' is more than {} can hold{}", column, shown(field), kTypeName<T>,
                         std::is_same_v<T, float> ? " (float64 as the source's dtype may)" : "");
    if (found == Number::kNotWhole)
      return fmt::format("column {}: '{}' is no whole number that {} can hold", column, shown(field), kTypeName<T>);
    if (found == Number::kNone || at != end) return fmt::format("column {}: '{}' is no number", column, shown(field));
  }
  // "1 2 3 4" with three columns: four numbers in a row of three, and no word "1 2"; ". . ." is one, and "to name@host" too.
  if (ends_with_numbers<std::conditional_t<std::is_integral_v<T>, double, T>>(without_blanks_behind(rest)))
    return fmt::format("has {} numbers, {} are expected: '{}'", numbers, dim, shown(line));
  word = word_before_numbers(rest, line.substr(rest.size()));
  return {};
}

template <class T>
inline bool parse_plain_row(std::string_view line, std::uint64_t dim, T* out, std::string_view& word) {
  const char* at = line.data();
  const char* const end = at + line.size();
  while (at != end && !is_blank(*at)) ++at;
  word = line.substr(0, static_cast<std::size_t>(at - line.data()));
  for (std::uint64_t column = 0; column < dim; ++column) {
    if (at == end || !is_blank(*at)) return false;
    ++at;
    if (at != end && is_blank(*at)) {
      if (column == 0) return false;  // perhaps they belong to the word
      do ++at;
      while (at != end && is_blank(*at));
    }
    const auto [next, error] = std::from_chars(at, end, out[column]);
    if (error != std::errc()) {
      if (parse_number(at, end, out[column]) != Number::kGood) return false;
    } else {
      at = next;
    }
  }
  return at == end;
}

template <class T>
T load(const std::byte* at) {
  T out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

template <class T>
void format_numbers(const std::byte* row, std::uint64_t dim, std::string& out, char blank) {
  constexpr std::size_t kLongest = 32;  // "-2.2250738585072014e-308" has 24 characters
  for (std::uint64_t column = 0; column < dim; ++column) {
    std::array<char, kLongest> text;
    text[0] = blank;
    const T value = load<T>(row + column * sizeof(T));
    char* end = nullptr;
    if constexpr (kIsHalf<T>)
      end = std::to_chars(text.data() + 1, text.data() + kLongest, static_cast<float>(value)).ptr;
    else
      end = std::to_chars(text.data() + 1, text.data() + kLongest, value).ptr;
    out.append(text.data(), end);
  }
}

}  // namespace

std::optional<Word2vecHeader> parse_word2vec_header(std::string_view line) {
  std::string_view rest = without_blanks_before(without_end(line));
  if (rest.starts_with("\xEF\xBB\xBF")) rest.remove_prefix(3);
  Word2vecHeader header;
  const auto take = [&](std::uint64_t& out) {
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out);
    if (error != std::errc()) return false;
    rest.remove_prefix(static_cast<std::size_t>(end - rest.data()));
    return true;
  };
  if (!take(header.rows) || rest.empty() || !is_blank(rest.front())) return std::nullopt;
  rest = without_blanks_before(rest);
  if (!take(header.dim) || !rest.empty()) return std::nullopt;
  return header;
}

std::uint64_t count_numbers(std::string_view line) {
  line = without_end(line);
  std::uint64_t fields = 0;
  for (std::size_t i = 0; i + 1 < line.size(); ++i) fields += is_blank(line[i]) && !is_blank(line[i + 1]) ? 1U : 0U;
  return fields;
}

namespace {

// How many of the fields behind the first one are numbers, from the end of the line on.
std::uint64_t numbers_at_end(std::string_view line) {
  std::uint64_t most = count_numbers(line), count = 0;
  line = without_end(line);
  while (count < most && is_number<double>(take_last_field(line))) ++count;
  return count;
}

}  // namespace

template <class T>
std::string parse_text_row(std::string_view line, std::uint64_t dim, T* out, std::string_view& word) {
  line = without_end(line);
  if (parse_plain_row(line, dim, out, word)) return {};
  return parse_odd_row(line, dim, out, word);
}
template std::string parse_text_row(std::string_view, std::uint64_t, float*, std::string_view&);
template std::string parse_text_row(std::string_view, std::uint64_t, double*, std::string_view&);
template std::string parse_text_row(std::string_view, std::uint64_t, std::int64_t*, std::string_view&);

void format_text_row(std::string_view word, DType dtype, const std::byte* row, std::uint64_t dim, std::string& out, char blank) {
  out.append(word);
  switch (dtype) {
    case DType::kFloat32: format_numbers<float>(row, dim, out, blank); break;
    case DType::kFloat16: format_numbers<Float16>(row, dim, out, blank); break;
    case DType::kBFloat16: format_numbers<BFloat16>(row, dim, out, blank); break;
    case DType::kFloat64: format_numbers<double>(row, dim, out, blank); break;
    case DType::kInt8: format_numbers<std::int8_t>(row, dim, out, blank); break;
    case DType::kUInt8: format_numbers<std::uint8_t>(row, dim, out, blank); break;
    case DType::kInt32: format_numbers<std::int32_t>(row, dim, out, blank); break;
    case DType::kInt64: format_numbers<std::int64_t>(row, dim, out, blank); break;
  }
  out += '\n';
}

std::string text_word_obstacle(std::string_view word, bool spaces) {
  if (word.find('\n') != std::string_view::npos) return "holds a newline, which ends a row of text";
  if (word.find_first_of(" \t") == std::string_view::npos) return {};
  if (!spaces) return "holds a space, which ends a word in word2vec's formats (GloVe's text can hold it)";
  return ends_with_numbers<double>(without_blanks_behind(word)) ? "ends with numbers, which would be taken for columns of its row"
                                                                : "";
}

namespace {

constexpr std::uint64_t kLongestWord = VocabularyReader::kLongestWord;

// Lines are parsed by several threads, a block of some MiB at a time, and their words given on in their order.
class TextVectorReader final : public RowReader {
 public:
  TextVectorReader(const Location& location, const ReadOptions& options, bool header)
      : file_{File::open(location.file, File::Mode::kRead)},
        where_{printable(location.file)},
        header_{header},
        words_{options.words} {
    if (!location.selector.empty())
      throw NotFound(
          fmt::format("{}: there is no '{}' in it, a text file holds one table", where_, printable(location.selector)));
    dtype_ = options.dtype.value_or(DType::kFloat32);
    if (dtype_ != DType::kFloat32 && dtype_ != DType::kFloat64 && dtype_ != DType::kInt64)
      throw DTypeError(fmt::format("{}: numbers of text are read as float32, float64 or int64, not as {} (convert them after)",
                                   where_, dtype_name(dtype_)));
    const std::uint64_t size = file_.size();
    if (size == 0) throw FormatError(location.file, "is empty");
    stream_ = FileStream(file_, 0, end_of_text(size));
    if (header_)
      read_header();
    else
      count_lines(options.dim);
    if (options.dim != 0 && options.dim != dim_)
      throw FormatError(file_.path(), fmt::format("its rows have {} columns, not {}", dim_, options.dim));
    // No number takes less than two bytes with its blank, so that no length is taken on the file's word.
    const std::uint64_t most_dim = file_.size() / 2;
    if (header_ && rows_ > 0 && (dim_ > most_dim || rows_ > file_.size() / (2 * dim_)))
      throw FormatError(file_.path(), fmt::format("its first line says {} rows of {} numbers, more than a file of {} can hold{}",
                                                  rows_, dim_, format_size(size), row_hint()));
    index_.add(0, stream_.position());
    if (rows_ == 0) check_end();
  }
  TextVectorReader(const TextVectorReader&) = delete;
  TextVectorReader& operator=(const TextVectorReader&) = delete;

  std::string description() const override {
    return fmt::format("{}, {}, {} rows of {} numbers", where_, header_ ? "word2vec text" : "GloVe text", rows_, dim_);
  }

  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, 4_MiB / (dim_ * item_size(dtype_))); }

  // Of the rows that were read so far.
  std::vector<Remark> remarks() const override {
    std::vector<Remark> out = remarks_;
    if (rounded_ > 0)
      out.push_back(
          {fmt::format("{}: {} whole numbers have more digits than {} holds and were rounded, the first in line {}; read "
                       "as int64{} they are exact",
                       where_, rounded_.load(), dtype_name(dtype_), line_number(rounded_row_),
                       dtype_ == DType::kFloat32 ? " or float64" : ""),
           /*doubt=*/true});
    return out;
  }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    if (count == 0) return;
    go_to(first);
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    for (std::uint64_t done = 0; done < count;) {
      find_lines(count - done);
      if (dtype_ == DType::kFloat32)
        parse_lines<float>(out + done * row_bytes);
      else if (dtype_ == DType::kInt64)
        parse_lines<std::int64_t>(out + done * row_bytes);
      else
        parse_lines<double>(out + done * row_bytes);
      if (words_)
        for (std::size_t i = 0; i < lines_.size(); ++i) words_(next_ + i, lines_[i].word);
      pass_lines();
      done += lines_.size();
    }
    if (next_ == rows_) check_end();
  }

 private:
  struct Line {
    std::string_view text, word;
  };
  static constexpr std::size_t kMostLines = 1U << 16;  // found at a time, which bounds their list
  static constexpr std::uint64_t kLongestFirstLine = 64_MiB;

  // Behind the last byte that is not blank: empty lines at the end are no rows.
  std::uint64_t end_of_text(std::uint64_t size) const {
    std::vector<std::byte> block(static_cast<std::size_t>(std::min<std::uint64_t>(size, 64_KiB)));
    for (std::uint64_t end = size; end > 0;) {
      const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(end, block.size()));
      file_.read(end - bytes, std::span(block).first(bytes));
      for (std::size_t i = bytes; i > 0; --i) {
        const char c = static_cast<char>(block[i - 1]);
        if (!is_blank(c) && c != '\r' && c != '\n') return end - bytes + i;
      }
      end -= bytes;
    }
    throw FormatError(file_.path(), "holds nothing but blanks");
  }

  std::uint64_t line_number(std::uint64_t row) const { return row + (header_ ? 2 : 1); }

  // How long a line may get: longer ones are no rows, and are not read into memory.
  std::uint64_t longest_line() const { return dim_ == 0 ? kLongestFirstLine : kLongestWord + 1024 + dim_ * 512; }

  // The next line with its end, which is not passed over; empty at the end of the text. Throws FormatError if it is too long.
  std::string_view peek_line(std::uint64_t number) {
    std::size_t searched = 0;
    for (std::size_t wanted = 1;; wanted = searched * 2) {
      const std::string_view text = stream_.peek_text(wanted);
      const std::size_t end = text.find('\n', searched);
      if (end != std::string_view::npos) return text.substr(0, end + 1);
      searched = text.size();
      if (searched == stream_.left() && searched <= longest_line()) return text;
      if (searched > longest_line())
        throw FormatError(file_.path(), fmt::format("line {} is longer than {}: these are no vectors as text", number,
                                                    format_size(longest_line())));
    }
  }

  void read_header() {
    const std::string_view line = peek_line(1);
    const std::string_view text = line.ends_with('\n') ? line.substr(0, line.size() - 1) : line;
    const std::optional<Word2vecHeader> header = parse_word2vec_header(text);
    if (!header) {
      const std::string like =
          looks_like(stream_.peek(64).first(static_cast<std::size_t>(std::min<std::uint64_t>(64, stream_.left()))));
      throw FormatError(
          file_.path(),
          fmt::format("line 1 is no header of word2vec text, which is the numbers of rows and columns: '{}'{}", shown(text),
                      !like.empty() && like != "text" ? fmt::format(" (it looks like {})", like)
                      : count_numbers(text) > 1       ? " (GloVe's format has none)"
                                                      : ""));
    }
    rows_ = header->rows;
    dim_ = header->dim;
    if (dim_ == 0) throw FormatError(file_.path(), fmt::format("line 1 says {} rows of no columns", rows_));
    first_line_ = shown(text);
    stream_.skip(line.size());
    if (stream_.left() == 0) return;
    const std::string_view next = stream_.peek_text(1);
    first_may_be_row_ = count_numbers(next.substr(0, next.find('\n'))) == count_numbers(text);
  }

  // Of a first line that does not fit as a header, where it would as a row.
  std::string row_hint() const {
    return first_may_be_row_ ? fmt::format(" (if line 1, '{}', is a row, name the format: glove)", first_line_) : "";
  }

  // Rows and columns of a file without header. The lines at the beginning tell how many columns there are: the most common
  // number, so that neither a word with blanks nor a broken line decides.
  void count_lines(std::uint64_t dim) {
    constexpr std::size_t kLooked = 1000;
    constexpr std::uint64_t kLookedBytes = 16_MiB;
    std::vector<std::pair<std::uint64_t, std::size_t>> found;  // numbers, lines; in the order of the lines
    std::uint64_t looked = 0;
    for (std::size_t i = 0; i < kLooked && stream_.left() > 0 && looked < kLookedBytes; ++i) {
      const std::string_view line = peek_line(i + 1);
      const std::string_view text = line.ends_with('\n') ? line.substr(0, line.size() - 1) : line;
      // Fields before the numbers belong to the word, if they are few: else they were to be numbers ("0,5").
      const std::uint64_t fields = count_numbers(text), at_end = numbers_at_end(text);
      const std::uint64_t numbers = at_end > fields / 2 ? at_end : fields;
      if (numbers == 0) {  // neither a row nor a sign of how many columns there are
        looked += line.size();
        stream_.skip(line.size());
        continue;
      }
      const auto same = std::find_if(found.begin(), found.end(), [&](const auto& f) { return f.first == numbers; });
      if (same == found.end())
        found.emplace_back(numbers, 1);
      else
        ++same->second;
      looked += line.size();
      stream_.skip(line.size());
    }
    const auto common =
        std::max_element(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    dim_ = dim != 0 ? dim : common == found.end() ? 0 : common->first;
    stream_.seek(0);
    if (dim_ == 0) {
      const std::string_view text = stream_.peek_text(64).substr(0, 64);
      const std::string like = looks_like(std::as_bytes(std::span(text)));
      throw FormatError(file_.path(),
                        fmt::format("line 1 has no numbers behind its word: '{}'{}", shown(text.substr(0, text.find('\n'))),
                                    like.empty() || like == "text" ? "" : fmt::format(" (it looks like {})", like)));
    }
    index_.add(0, 0);
    while (stream_.left() > 0) {
      const std::string_view text = stream_.peek_text(1);
      const auto lines = static_cast<std::uint64_t>(std::count(text.begin(), text.end(), '\n'));
      if (lines > 0) {
        index_.add(rows_ + 1, stream_.position() + text.find('\n') + 1);
        rows_ += lines;
      }
      stream_.skip(text.size());
    }
    ++rows_;  // the last line has lost its end
    stream_.seek(0);
  }

  void go_to(std::uint64_t row) {
    if (row == next_) return;
    const RowIndex::Place place = index_.before(row);
    if (row < next_ || place.row > next_) {
      stream_.seek(place.offset);
      next_ = place.row;
    }
    while (next_ < row) {
      find_lines(row - next_);
      pass_lines();
    }
  }

  // The next lines in lines_, `most` or those that are in the buffer: at least one. They stay valid until pass_lines().
  void find_lines(std::uint64_t most) {
    if (stream_.left() == 0)
      throw FormatError(file_.path(), header_
                                          ? fmt::format("has {} rows, its first line says {} (the end comes before line {}){}",
                                                        next_, rows_, line_number(next_), row_hint())
                                          : "changed while it was read");
    index_.add(next_, stream_.position());
    lines_.clear();
    peek_line(line_number(next_));
    const std::string_view text = stream_.peek_text(1);
    most = std::min<std::uint64_t>(most, kMostLines);
    std::size_t at = 0;
    while (lines_.size() < most && at < text.size()) {
      std::size_t end = text.find('\n', at);
      if (end == std::string_view::npos) {
        if (text.size() < stream_.left()) break;
        end = text.size();
      }
      lines_.push_back({text.substr(at, end - at), {}});
      at = std::min(end + 1, text.size());
    }
    found_bytes_ = at;
  }

  void pass_lines() {
    stream_.skip(found_bytes_);
    next_ += lines_.size();
  }

  template <class T>
  void parse_lines(std::byte* out) {
    const std::uint64_t row_bytes = dim_ * sizeof(T);
    // Some dozens of microseconds a piece, at 20 ns a number.
    const std::uint64_t grain = std::max<std::uint64_t>(1, 4096 / dim_);
    std::atomic<std::uint64_t> bad{lines_.size()};  // the first of those that are
    pool_.parallel_for(lines_.size(), grain, [&](std::uint64_t begin, std::uint64_t end) {
      std::vector<T> row;  // where the caller's memory cannot be written to as T
      for (std::uint64_t i = begin; i < end; ++i) {
        std::byte* const to = out + i * row_bytes;
        const bool aligned = reinterpret_cast<std::uintptr_t>(to) % alignof(T) == 0;
        if (!aligned) row.resize(dim_);
        T* const numbers = aligned ? reinterpret_cast<T*>(to) : row.data();
        if (!parse_text_row(lines_[i].text, dim_, numbers, lines_[i].word).empty() || lines_[i].word.size() > kLongestWord) {
          std::uint64_t first = bad.load();
          while (i < first && !bad.compare_exchange_weak(first, i)) {
          }
          return;
        }
        if constexpr (std::is_floating_point_v<T>)
          if (next_ + i >= counted_ && has_large(numbers)) count_rounded<T>(i);
        if (!aligned) std::memcpy(to, row.data(), row_bytes);
      }
    });
    const std::uint64_t first = bad.load();
    if (first == lines_.size()) {
      counted_ = std::max(counted_, next_ + lines_.size());
      return;
    }
    std::vector<T> row(dim_);
    const std::string wrong = parse_text_row(lines_[first].text, dim_, row.data(), lines_[first].word);
    throw FormatError(file_.path(),
                      fmt::format("line {} {}{}", line_number(next_ + first),
                                  wrong.empty() ? fmt::format("has a word of more than {}", format_size(kLongestWord)) : wrong,
                                  next_ + first == 0 ? row_hint() : ""));
  }

  // Whether one of a row is so large that not every whole number is near it.
  template <class T>
  bool has_large(const T* numbers) const {
    constexpr T kExact = static_cast<T>(std::uint64_t{1} << std::numeric_limits<T>::digits);
    T largest = 0;
    for (std::uint64_t column = 0; column < dim_; ++column) {
      const T size = std::fabs(numbers[column]);
      largest = size > largest ? size : largest;  // NaN is not
    }
    return largest >= kExact;
  }

  // Whole numbers of a line that are others as T.
  template <class T>
  void count_rounded(std::uint64_t line) {
    std::string_view rest = without_end(lines_[line].text);
    std::uint64_t found = 0;
    for (std::uint64_t column = 0; column < dim_; ++column) {
      std::string_view digits = take_last_field(rest);
      if (digits.starts_with('-') || digits.starts_with('+')) digits.remove_prefix(1);
      if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos) continue;
      std::uint64_t whole = 0;
      const std::errc error = std::from_chars(digits.data(), digits.data() + digits.size(), whole).ec;
      // Beyond 2^64 nothing else holds it either.
      if (error == std::errc() && static_cast<long double>(static_cast<T>(whole)) != static_cast<long double>(whole)) ++found;
    }
    if (found == 0) return;
    rounded_ += found;
    std::uint64_t row = rounded_row_.load();
    while (next_ + line < row && !rounded_row_.compare_exchange_weak(row, next_ + line)) {
    }
  }

  void check_end() const {
    if (stream_.left() > 0)
      throw FormatError(file_.path(),
                        fmt::format("its first line says {} rows, but there are more: line {} comes after the last{}", rows_,
                                    line_number(rows_), row_hint()));
  }

  File file_;
  std::string where_;
  bool header_;
  std::string first_line_;         // with a header: for messages
  bool first_may_be_row_ = false;  // the next one has as many numbers as the first then would
  WordSink words_;
  FileStream stream_{file_, 0, 0};
  RowIndex index_;
  std::uint64_t next_ = 0;  // row that begins at the stream's position
  std::vector<Line> lines_;
  std::size_t found_bytes_ = 0;
  std::uint64_t counted_ = 0;  // rows whose rounded numbers are counted
  std::atomic<std::uint64_t> rounded_{0}, rounded_row_{UINT64_MAX};
  ThreadPool pool_;
};

bool is_tsv(const std::filesystem::path& file) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return extension == ".tsv";
}

// Rows are formatted by several threads, each piece into a text of its own, and written in their order.
class TextVectorWriter final : public RowWriter {
 public:
  TextVectorWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options,
                   bool header)
      : where_{printable(location.file)},
        words_{options.words},
        header_{header},
        blank_{is_tsv(location.file) ? '\t' : ' '},
        dim_{dim},
        dtype_{dtype},
        count_{where_, rows} {
    if (!location.selector.empty())
      throw InvalidArgument(fmt::format("{}:{}: a text file holds one table; leave '{}' out", where_,
                                        printable(location.selector), printable(location.selector)));
    if (!words_)
      throw InvalidArgument(
          fmt::format("{}: {} names every row by a word, and there are none", where_, header ? "word2vec text" : "GloVe text"));
    temporary_ = TemporaryFile::create(location.file, options.overwrite);
    if (header_) append(fmt::format("{} {}\n", rows, dim));
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    // About 64 KiB of text a piece, and some MiB of it at a time.
    const std::uint64_t piece = std::max<std::uint64_t>(1, 8192 / dim_);
    const std::uint64_t stretch = piece * std::clamp<std::uint64_t>(kPieces * 8192 / (piece * dim_), 1, kPieces);
    for (std::uint64_t done = 0; done < count;) {
      const std::uint64_t here = std::min(stretch, count - done);
      names_.resize(std::max<std::size_t>(names_.size(), here));
      for (std::uint64_t i = 0; i < here; ++i) {
        words_(next_ + i, names_[i]);
        if (const std::string wrong = text_word_obstacle(names_[i], !header_); !wrong.empty())
          throw FormatError(temporary_->target(), fmt::format("the word '{}' of row {} {}", shown(names_[i]), next_ + i, wrong));
        if (names_[i].size() > kLongestWord)
          throw FormatError(temporary_->target(), fmt::format("the word of row {} has {} bytes; {} is the most", next_ + i,
                                                              names_[i].size(), kLongestWord));
      }
      pool_.parallel_for(ceil_div(here, piece), 1, [&](std::uint64_t begin, std::uint64_t end) {
        for (std::uint64_t p = begin; p < end; ++p) {
          std::string& text = texts_[p];
          text.clear();
          for (std::uint64_t i = p * piece; i < std::min(here, (p + 1) * piece); ++i)
            format_text_row(names_[i], dtype_, rows + (done + i) * row_bytes, dim_, text, blank_);
        }
      });
      for (std::uint64_t p = 0; p * piece < here; ++p) append(texts_[p]);
      done += here;
      next_ += here;
    }
  }

  void finish() override {
    count_.finish();
    flush();
    temporary_->commit();
  }

 private:
  static constexpr std::size_t kPieces = 32;

  void append(std::string_view text) {
    pending_.append(text);
    if (pending_.size() >= 1_MiB) flush();
  }
  void flush() {
    temporary_->file().write(end_, pending_);
    end_ += pending_.size();
    pending_.clear();
  }

  std::string where_;
  WordSource words_;
  bool header_;
  char blank_;  // between word and numbers
  std::uint64_t dim_;
  DType dtype_;
  RowCount count_;
  std::optional<TemporaryFile> temporary_;
  std::uint64_t next_ = 0, end_ = 0;
  std::vector<std::string> names_;
  std::array<std::string, kPieces> texts_;
  std::string pending_;
  ThreadPool pool_;
};

}  // namespace

namespace {

// The lines of text vectors among the first bytes of a file; the last one may be cut.
struct Beginning {
  std::vector<std::string_view> lines;
  bool cut = false;  // the last line goes on behind these bytes
};
Beginning beginning(const File& file, std::span<const std::byte> head) {
  Beginning out;
  std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  out.cut = head.size() < file.size();
  while (!text.empty() && out.lines.size() < 3) {
    const std::size_t end = text.find('\n');
    out.lines.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + 1);
  }
  out.cut = false;
  return out;
}

// How many of the fields behind the first one are numbers, up to the first that is none; nothing if there is none at all, or if a
// zero byte shows that this is no text. What a cut leaves of the last field is not looked at.
std::optional<std::uint64_t> leading_numbers(std::string_view line, bool cut) {
  if (line.find('\0') != std::string_view::npos) return std::nullopt;
  line = without_end(line);
  if (cut) take_last_field(line);
  const std::size_t blank = line.find_first_of(" \t");
  if (blank == std::string_view::npos) return std::nullopt;
  std::uint64_t count = 0;
  std::string_view rest = line.substr(blank);
  while (true) {
    rest = without_blanks_before(rest);
    const std::size_t end = std::min(rest.find_first_of(" \t"), rest.size());
    if (end == 0 || !is_number<double>(rest.substr(0, end))) break;
    rest.remove_prefix(end);
    ++count;
  }
  if (count == 0) return std::nullopt;
  return count;
}

}  // namespace

Fit fit_word2vec_text(const File& file, std::span<const std::byte> head) {
  const Beginning text = beginning(file, head);
  const auto header = text.lines.empty() ? std::nullopt : parse_word2vec_header(text.lines[0]);
  if (!header || header->dim == 0) return Fit::kNo;
  if (text.lines.size() < 2) return Fit::kPossible;  // no rows
  const bool cut = text.cut && text.lines.size() == 2;
  const auto numbers = leading_numbers(text.lines[1], cut);
  if (!numbers) return Fit::kNo;
  return *numbers == header->dim || (cut && *numbers <= header->dim) ? Fit::kCertain : Fit::kPossible;
}

Fit fit_glove(const File& file, std::span<const std::byte> head) {
  const Beginning text = beginning(file, head);
  // A word may hold spaces, so that of three lines one that is plain is enough, or one that ends with numbers.
  for (std::size_t i = 0; i < text.lines.size(); ++i) {
    const bool cut = text.cut && i + 1 == text.lines.size();
    if (leading_numbers(text.lines[i], cut)) return Fit::kPossible;
    if (!cut && text.lines[i].find('\0') == std::string_view::npos && numbers_at_end(text.lines[i]) > 0) return Fit::kPossible;
  }
  return Fit::kNo;
}

std::unique_ptr<RowReader> open_word2vec_text_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<TextVectorReader>(location, options, /*header=*/true);
}
std::unique_ptr<RowWriter> create_word2vec_text_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                                     const WriteOptions& options) {
  return std::make_unique<TextVectorWriter>(location, rows, dim, dtype, options, /*header=*/true);
}
std::unique_ptr<RowReader> open_glove_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<TextVectorReader>(location, options, /*header=*/false);
}
std::unique_ptr<RowWriter> create_glove_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                             const WriteOptions& options) {
  return std::make_unique<TextVectorWriter>(location, rows, dim, dtype, options, /*header=*/false);
}

}  // namespace embermap
