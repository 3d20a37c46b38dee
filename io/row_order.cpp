#include "io/row_order.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <optional>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/elements.hpp"
#include "io/file_stream.hpp"
#include "io/npy.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();

std::uint64_t length_of(const std::filesystem::path& path, const std::vector<std::uint64_t>& shape) {
  std::uint64_t ones = 0, length = 1;
  for (const std::uint64_t extent : shape) {
    if (extent == 1)
      ++ones;
    else
      length = extent;
  }
  if (shape.empty() || shape.size() > 2 || ones + 1 < shape.size())
    throw FormatError(path, fmt::format("has the shape {}; an order of rows is one list of numbers", shape_to_text(shape)));
  return length;
}

// Of any format, and every integer dtype.
class RowsOrder final : public RowOrder {
 public:
  RowsOrder(const std::filesystem::path& file, const Location& location)
      : integers_{std::make_shared<ReadOptions::Integers>()}, reader_{open_rows(location, reading())} {
    path_ = file;
    if (!integers_->other && is_floating(reader_->dtype()))
      throw DTypeError(fmt::format("{} holds {}; the numbers of an order of rows are integers", reader_->description(),
                                   dtype_name(reader_->dtype())));
    if (integers_->boolean)  // a mask, whose rows are not those numbered 0 and 1
      throw DTypeError(
          fmt::format("{} holds truth values; the numbers of an order of rows are integers", reader_->description()));
    size_ = length_of(path_, {reader_->rows(), reader_->dim()});
    across_ = reader_->dim() > 1;
    if (!integers_->other) integers_->is_signed = reader_->dtype() != DType::kUInt8;
  }
  void read(std::uint64_t first, std::span<std::uint64_t> out) override {
    const std::uint64_t item = item_size(reader_->dtype());
    if (across_) {  // one row of all numbers
      if (buffer_.empty()) {
        buffer_.resize(size_ * item);
        reader_->read(0, 1, buffer_.data());
      }
    } else {
      buffer_.resize(out.size() * item);
      reader_->read(first, out.size(), buffer_.data());
    }
    const std::byte* at = buffer_.data() + (across_ ? first * item : 0);
    for (std::size_t i = 0; i < out.size(); ++i, at += item) {
      std::uint64_t value = 0;
      std::memcpy(&value, at, item);  // little-endian, as this machine is
      const bool negative = integers_->is_signed && (value >> (8 * item - 1) & 1U) != 0;
      if (negative) value |= item == 8 ? 0 : ~std::uint64_t{0} << (8 * item);
      if (negative || value > kMost)
        throw FormatError(path_, fmt::format("entry {} is no number of a row: {}", first + i,
                                             negative ? fmt::format("{} is negative", static_cast<std::int64_t>(value))
                                                      : fmt::format("{}", value)));
      out[i] = value;
    }
  }

 private:
  ReadOptions reading() const {
    ReadOptions out;
    out.integers = integers_;
    return out;
  }

  std::shared_ptr<ReadOptions::Integers> integers_;  // before the reader
  std::unique_ptr<RowReader> reader_;
  bool across_ = false;
  std::vector<std::byte> buffer_;
};

// Whole numbers as text. Going back begins again.
class TextOrder final : public RowOrder {
 public:
  explicit TextOrder(File file) : file_{std::move(file)}, stream_{file_, 0, file_.size()} {
    path_ = file_.path();
    while (next()) ++size_;
    stream_.seek(0);
    at_ = 0;
  }
  void read(std::uint64_t first, std::span<std::uint64_t> out) override {
    if (first < at_) {
      stream_.seek(0);
      at_ = 0;
    }
    while (at_ < first) (void)need();
    for (std::uint64_t& value : out) value = need();
  }

 private:
  static bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
  std::uint64_t need() {
    const auto value = next();
    if (!value) throw FormatError(path_, "changed while it was read");
    return *value;
  }
  std::optional<std::uint64_t> next() {
    constexpr std::size_t kLongest = 32;
    for (;;) {
      const std::string_view text = stream_.peek_text(1);
      if (text.empty()) return std::nullopt;
      std::size_t blanks = 0;
      while (blanks < text.size() && blank(text[blanks])) ++blanks;
      stream_.skip(blanks);
      if (blanks < text.size()) break;
    }
    const std::string_view text = stream_.peek_text(kLongest);
    std::size_t length = 0;
    while (length < text.size() && !blank(text[length])) ++length;
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + length, value);
    if (error != std::errc{} || end != text.data() + length || value > kMost)
      throw FormatError(
          path_, fmt::format("entry {} is no number of a row: '{}'", at_, printable(text.substr(0, std::min(length, kLongest)))));
    stream_.skip(length);
    ++at_;
    return value;
  }

  File file_;
  FileStream stream_;
  std::uint64_t at_ = 0;
};

}  // namespace

std::unique_ptr<RowOrder> RowOrder::open(const std::filesystem::path& path) {
  if (path.extension() == ".txt") return std::make_unique<TextOrder>(File::open(path, File::Mode::kRead));
  const Location location = parse_location(path.native());
  return std::make_unique<RowsOrder>(path, location);
}

std::filesystem::path order_beside(const std::filesystem::path& file) {
  return std::filesystem::path(file.native() + ".order.npy");
}

InverseOrder::InverseOrder(RowOrder& order, std::uint64_t rows, bool permutation, const std::filesystem::path& file,
                           bool overwrite, std::uint64_t memory)
    : path_{file} {
  if (permutation && order.size() != rows)
    throw InvalidArgument(
        fmt::format("{} has {} numbers for {} rows; an order has each row once", printable(order.path()), order.size(), rows));
  temporary_ = std::make_unique<TemporaryFile>(TemporaryFile::create(file, overwrite));
  const std::string header = format_npy_header(npy_descr(DType::kInt64), {}, 0, {rows}, 0);
  File& out = temporary_->file();
  out.reserve(checked_add(header.size(), checked_mul(rows, sizeof(std::int64_t), "bytes of the order"), "bytes of the order"));
  out.write(0, header);
  constexpr std::uint64_t kBlock = 1U << 16;  // numbers read at once
  std::vector<std::uint64_t> numbers(std::min(kBlock, std::max<std::uint64_t>(order.size(), 1)));
  const std::uint64_t window = std::clamp<std::uint64_t>(memory / sizeof(std::int64_t), 1, std::max<std::uint64_t>(rows, 1));
  std::vector<std::int64_t> places(window);
  for (std::uint64_t low = 0; low < rows || low == 0; low += window) {
    const std::uint64_t count = std::min(window, rows - low);
    std::fill_n(places.begin(), count, -1);
    for (std::uint64_t first = 0; first < order.size();) {
      const auto some = std::span(numbers).first(std::min<std::uint64_t>(numbers.size(), order.size() - first));
      order.read(first, some);
      for (std::size_t i = 0; i < some.size(); ++i) {
        const std::uint64_t row = some[i];
        if (row >= rows)
          throw InvalidArgument(
              fmt::format("{}: entry {} is row {}; there are {} rows", printable(order.path()), first + i, row, rows));
        if (row < low || row - low >= count) continue;
        std::int64_t& place = places[row - low];
        if (place >= 0 && permutation)
          throw InvalidArgument(fmt::format("{}: row {} is there twice, as entries {} and {}; an order has each row once",
                                            printable(order.path()), row, place, first + i));
        if (place < 0) place = static_cast<std::int64_t>(first + i);
      }
      first += some.size();
    }
    // Of as many numbers as there are rows, none twice, none is left out.
    out.write(header.size() + low * sizeof(std::int64_t), std::as_bytes(std::span(places).first(count)));
    if (rows == 0) break;
  }
}

void InverseOrder::finish() {
  temporary_->commit();
  complete_ = true;
}

void InverseOrder::withdraw() noexcept {
  std::error_code ignored;
  if (complete_) std::filesystem::remove(path_, ignored);
  complete_ = false;
}

OrderedReader::OrderedReader(std::unique_ptr<RowReader> source, std::unique_ptr<RowOrder> order, std::uint64_t memory,
                             std::shared_ptr<Words> words)
    : source_{std::move(source)}, order_{std::move(order)}, words_{std::move(words)} {
  rows_ = order_->size();
  dim_ = source_->dim();
  dtype_ = source_->dtype();
  row_bytes_ = checked_mul(dim_, item_size(dtype_), "bytes of a row");
  // A row, its number three times over, and room to read it with neighbours.
  const std::uint64_t a_row = checked_add(checked_mul(row_bytes_, 2, "bytes of a row"), 24, "bytes of a row");
  block_rows_ = std::clamp<std::uint64_t>(memory / a_row, 1, std::max<std::uint64_t>(rows_, 1));
}

std::string OrderedReader::description() const {
  return fmt::format("{}, in the order of {}", source_->description(), printable(order_->path()));
}

void OrderedReader::read(std::uint64_t first, std::uint64_t count, std::byte* out) {
  check_row_range(description(), first, count, rows_);
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t some = std::min(block_rows_, count - done);
    numbers_.resize(some);
    order_->read(first + done, numbers_);
    sorted_.clear();
    for (std::uint64_t i = 0; i < some; ++i) {
      if (numbers_[i] >= source_->rows())
        throw InvalidArgument(fmt::format("{}: entry {} is row {}; there are {} rows", printable(order_->path()),
                                          first + done + i, numbers_[i], source_->rows()));
      sorted_.emplace_back(numbers_[i], i);
    }
    std::sort(sorted_.begin(), sorted_.end());
    std::byte* const block = out + done * row_bytes_;
    if (words_) words_->read.clear();
    for (std::size_t begin = 0; begin < sorted_.size();) {
      const std::uint64_t low = sorted_[begin].first;
      std::size_t end = begin + 1;
      while (end < sorted_.size() && sorted_[end].first <= sorted_[end - 1].first + 1) ++end;
      const std::uint64_t rows = sorted_[end - 1].first - low + 1;
      run_.resize(std::max<std::size_t>(run_.size(), rows * row_bytes_));
      source_->read(low, rows, run_.data());
      for (; begin < end; ++begin)
        std::memcpy(block + sorted_[begin].second * row_bytes_, run_.data() + (sorted_[begin].first - low) * row_bytes_,
                    row_bytes_);
    }
    if (words_ && words_->sink)
      for (std::uint64_t i = 0; i < some; ++i) {
        const auto found = std::lower_bound(words_->read.begin(), words_->read.end(), numbers_[i],
                                            [](const auto& one, std::uint64_t row) { return one.first < row; });
        if (found == words_->read.end() || found->first != numbers_[i])
          throw InvalidArgument(fmt::format("{}: row {} came without its word", source_->description(), numbers_[i]));
        words_->sink(first + done + i, found->second);
      }
    done += some;
  }
}

}  // namespace embermap
