// Formats that are little more than rows one behind the other: .fvecs and its kind (each row behind its dimension), .fbin and its
// kind (rows and dimension, then the rows), and raw files.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"
#include "io/formats.hpp"

namespace embermap {
namespace {

struct NamedDType {
  std::string_view extension;
  DType dtype;
};
constexpr std::array kVecs{NamedDType{".fvecs", DType::kFloat32}, NamedDType{".bvecs", DType::kUInt8},
                           NamedDType{".ivecs", DType::kInt32}};
constexpr std::array kBins{NamedDType{".fbin", DType::kFloat32}, NamedDType{".u8bin", DType::kUInt8},
                           NamedDType{".i8bin", DType::kInt8}, NamedDType{".ibin", DType::kInt32},
                           NamedDType{".f16bin", DType::kFloat16}};

std::optional<DType> dtype_by_name(const std::filesystem::path& file, std::span<const NamedDType> known) {
  std::string extension = file.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const NamedDType& one : known)
    if (extension == one.extension) return one.dtype;
  return std::nullopt;
}

std::string extensions(std::span<const NamedDType> known) {
  std::string out;
  for (const NamedDType& one : known)
    out += fmt::format("{}{} is {}", out.empty() ? "" : ", ", one.extension, dtype_name(one.dtype));
  return out;
}

void refuse_selector(const Location& location) {
  if (!location.selector.empty())
    throw NotFound(fmt::format("{}: there is no '{}' in it, the file holds one table", printable(location.file),
                               printable(location.selector)));
}

DType dtype_to_read(const Location& location, const ReadOptions& options, std::span<const NamedDType> known) {
  const std::optional<DType> named = dtype_by_name(location.file, known);
  if (named) {
    check_requested_dtype(printable(location.file), *named, options.dtype);
    return *named;
  }
  if (!options.dtype)
    throw DTypeError(fmt::format("{}: neither the file nor its extension tells the dtype of its elements ({}): say which it is",
                                 printable(location.file), extensions(known)));
  return *options.dtype;
}

void check_dtype_to_write(const Location& location, DType dtype, std::span<const NamedDType> known) {
  const std::optional<DType> named = dtype_by_name(location.file, known);
  if (named && *named != dtype)
    throw DTypeError(fmt::format("{}: its extension says {}, the rows are {}: convert them, or choose another extension ({})",
                                 printable(location.file), dtype_name(*named), dtype_name(dtype), extensions(known)));
}

template <class T>
T load(const std::byte* at) {
  T out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

// Rows of `prefix` bytes and dim elements each, from byte `offset` on.
class FlatRowReader : public RowReader {
 public:
  FlatRowReader(const Location& location, std::string_view kind)
      : stream_{File::open(location.file, File::Mode::kRead)},
        file_{stream_.file()},
        where_{printable(location.file)},
        kind_{kind} {
    refuse_selector(location);
  }
  FlatRowReader(const FlatRowReader&) = delete;
  FlatRowReader& operator=(const FlatRowReader&) = delete;

  std::string description() const override {
    return fmt::format("{}, {}, {} rows of {} {}", where_, kind_, rows_, dim_, dtype_name(dtype_));
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, 4_MiB / stride()); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    check_row_range(where_, first, count, rows_);
    return stream_.read_ahead(offset_ + first * stride(), offset_ + (first + count) * stride(), memory);
  }
  bool sparse() const override { return prefix_ == 0 && stream_.sparse(); }
  std::string how() const override { return stream_.how(); }
  Plain plain() override { return prefix_ == 0 ? Plain{&stream_, offset_} : Plain{}; }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    const std::uint64_t row_bytes = stride() - prefix_;
    if (prefix_ == 0) return stream_.read(offset_ + first * row_bytes, {out, count * row_bytes});
    const std::uint64_t most = std::max<std::uint64_t>(1, 1_MiB / stride());
    buffer_.resize(std::min(most, std::max<std::uint64_t>(1, count)) * stride());
    for (std::uint64_t done = 0; done < count;) {
      const std::uint64_t here = std::min(most, count - done);
      stream_.read(offset_ + (first + done) * stride(), std::span(buffer_).first(here * stride()));
      for (std::uint64_t i = 0; i < here; ++i) {
        const std::byte* const record = buffer_.data() + i * stride();
        if (const auto dim = load<std::int32_t>(record); dim < 0 || static_cast<std::uint64_t>(dim) != dim_)
          throw FormatError(file_.path(), fmt::format("row {} says it has {} elements (byte {}), row 0 has {}", first + done + i,
                                                      dim, offset_ + (first + done + i) * stride(), dim_));
        std::memcpy(out + (done + i) * row_bytes, record + prefix_, row_bytes);
      }
      done += here;
    }
  }

 protected:
  std::uint64_t stride() const { return prefix_ + dim_ * item_size(dtype_); }
  void check_dim(const ReadOptions& options) const {
    if (options.dim != 0 && options.dim != dim_)
      throw FormatError(file_.path(), fmt::format("its rows have {} elements, not {}", dim_, options.dim));
  }

  StreamedFile stream_;
  const File& file_;
  std::string where_;
  std::string_view kind_;
  std::uint64_t offset_ = 0, prefix_ = 0;

 private:
  std::vector<std::byte> buffer_;
};

class VecsReader final : public FlatRowReader {
 public:
  VecsReader(const Location& location, const ReadOptions& options) : FlatRowReader{location, "vecs"} {
    dtype_ = dtype_to_read(location, options, kVecs);
    prefix_ = sizeof(std::int32_t);
    const std::uint64_t size = file_.size();
    if (size == 0) {
      if (options.dim == 0) throw FormatError(location.file, "is empty: no row tells how many columns there are (dim does)");
      dim_ = options.dim;
      checked_add(prefix_, checked_mul(dim_, item_size(dtype_), "bytes of a row"), "bytes of a row");
      return;
    }
    std::array<std::byte, 4> first{};
    if (size < first.size()) throw FormatError(location.file, fmt::format("has {} bytes, no row is that short", size));
    file_.read(0, first);
    const auto dim = load<std::int32_t>(first.data());
    if (dim <= 0) throw FormatError(location.file, fmt::format("row 0 says it has {} elements", dim));
    dim_ = static_cast<std::uint64_t>(dim);
    check_dim(options);
    if (stride() > size)
      throw FormatError(location.file,
                        fmt::format("row 0 says it has {} elements of {}, which take {} bytes with their number; the "
                                    "file has {}",
                                    dim_, dtype_name(dtype_), stride(), size));
    rows_ = size / stride();
    if (size % stride() != 0)
      throw FormatError(location.file, fmt::format("has {} bytes: {} rows of {} bytes ({} elements of {}, as row 0 says, behind "
                                                   "their number) and {} bytes more",
                                                   size, rows_, stride(), dim_, dtype_name(dtype_), size % stride()));
  }
};

class BinReader final : public FlatRowReader {
 public:
  BinReader(const Location& location, const ReadOptions& options) : FlatRowReader{location, "bin"} {
    dtype_ = dtype_to_read(location, options, kBins);
    const std::uint64_t size = file_.size();
    std::array<std::byte, 8> header{};
    offset_ = header.size();
    if (size < header.size())
      throw FormatError(location.file, fmt::format("has {} bytes, its header of rows and columns takes 8", size));
    file_.read(0, header);
    rows_ = load<std::uint32_t>(header.data());
    dim_ = load<std::uint32_t>(header.data() + 4);
    if (dim_ == 0) throw FormatError(location.file, fmt::format("says it has {} rows of no columns", rows_));
    check_dim(options);
    std::uint64_t data = 0;
    const bool overflow = __builtin_mul_overflow(rows_, stride(), &data);
    // Headers are often left as they were when rows are cut off or added: what would fit, then.
    const std::uint64_t fitting = (size - offset_) / stride(), more = (size - offset_) % stride();
    const std::string would =
        fitting == 0 ? ""
                     : fmt::format(", which would be {} rows{}", fitting, more == 0 ? "" : fmt::format(" and {} bytes", more));
    if (overflow || data > size - offset_)
      throw FormatError(location.file,
                        fmt::format("says it has {} rows of {} {}, {} bytes each behind a header of 8; it has {} bytes{}", rows_,
                                    dim_, dtype_name(dtype_), stride(), size, would));
    if (data < size - offset_)
      throw FormatError(location.file, fmt::format("says it has {} rows of {} {}, which end at byte {}; {} bytes follow{}", rows_,
                                                   dim_, dtype_name(dtype_), offset_ + data, size - offset_ - data, would));
  }
};

class RawReader final : public FlatRowReader {
 public:
  RawReader(const Location& location, const ReadOptions& options) : FlatRowReader{location, "raw"} {
    if (!options.dtype || options.dim == 0)
      throw InvalidArgument(fmt::format("{}: a raw file tells nothing about itself: give its {}", where_,
                                        options.dtype     ? "dim (columns)"
                                        : options.dim > 0 ? "dtype"
                                                          : "dtype and its dim (columns)"));
    dtype_ = *options.dtype;
    dim_ = options.dim;
    offset_ = options.offset;
    const std::uint64_t row_bytes = checked_mul(dim_, item_size(dtype_), "bytes of a row");
    const std::uint64_t size = file_.size();
    if (offset_ > size)
      throw FormatError(location.file, fmt::format("has {} bytes, rows are to begin at byte {}", size, offset_));
    rows_ = (size - offset_) / row_bytes;
    if (const std::uint64_t more = (size - offset_) % row_bytes; more != 0)
      throw FormatError(location.file, fmt::format("has {} bytes{}: {} rows of {} bytes ({} of {}) and {} bytes more",
                                                   size - offset_, offset_ > 0 ? fmt::format(" from byte {} on", offset_) : "",
                                                   rows_, row_bytes, dim_, dtype_name(dtype_), more));
  }
};

class FlatRowWriter final : public RowWriter {
 public:
  // `header` stands before all rows, `prefix` before each.
  FlatRowWriter(const Location& location, std::uint64_t rows, std::uint64_t row_bytes, const WriteOptions& options,
                std::span<const std::byte> header, std::span<const std::byte> prefix)
      : temporary_{TemporaryFile::create(location.file, options.overwrite)},
        count_{printable(location.file), rows},
        row_bytes_{row_bytes},
        prefix_(prefix.begin(), prefix.end()),
        bytes_{checked_add(header.size(),
                           checked_mul(rows, checked_add(row_bytes, prefix.size(), "bytes of a row"), "bytes of the rows"),
                           "bytes of the file")},
        out_{temporary_.file(), 0, options.sparse ? 0 : UINT64_MAX} {
    if (!options.sparse) temporary_.file().reserve(bytes_);
    out_.write(header);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    if (prefix_.empty()) return out_.write({rows, count * row_bytes_});
    // Records are put together by pieces: what a row's write would cost is more than its bytes.
    const std::uint64_t record = prefix_.size() + row_bytes_;
    const std::uint64_t most = std::max<std::uint64_t>(1, 256_KiB / record);
    for (std::uint64_t done = 0; done < count;) {
      const std::uint64_t here = std::min(most, count - done);
      records_.resize(here * record);
      for (std::uint64_t i = 0; i < here; ++i) {
        std::memcpy(records_.data() + i * record, prefix_.data(), prefix_.size());
        std::memcpy(records_.data() + i * record + prefix_.size(), rows + (done + i) * row_bytes_, row_bytes_);
      }
      out_.write(records_);
      done += here;
    }
  }

  void finish() override {
    count_.finish();
    out_.flush();
    temporary_.commit();
  }

  bool takes_bytes() const override { return prefix_.empty(); }
  void write_bytes(std::span<const std::byte> bytes) override {
    count_.add_bytes(bytes.size(), row_bytes_);
    out_.write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return out_.write_behind(bytes_, memory); }
  std::string how() const override { return out_.how(); }

 private:
  TemporaryFile temporary_;
  RowCount count_;
  std::uint64_t row_bytes_;
  std::vector<std::byte> prefix_, records_;
  std::uint64_t bytes_;
  StreamWriter out_;
};

template <class T>
T checked_number(const Location& location, std::string_view what, std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<T>::max()))
    throw InvalidArgument(fmt::format("{}: {} {}, more than the {} its format can tell", printable(location.file), value, what,
                                      std::numeric_limits<T>::max()));
  return static_cast<T>(value);
}

void refuse_selector_to_write(const Location& location) {
  if (!location.selector.empty())
    throw InvalidArgument(fmt::format("{}:{}: the file holds one table; leave '{}' out", printable(location.file),
                                      printable(location.selector), printable(location.selector)));
}

}  // namespace

std::unique_ptr<RowReader> open_vecs_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<VecsReader>(location, options);
}

std::unique_ptr<RowWriter> create_vecs_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                            const WriteOptions& options) {
  refuse_selector_to_write(location);
  check_dtype_to_write(location, dtype, kVecs);
  const std::array number{checked_number<std::int32_t>(location, "columns", dim)};
  return std::make_unique<FlatRowWriter>(location, rows, dim * item_size(dtype), options, std::span<const std::byte>{},
                                         std::as_bytes(std::span(number)));
}

std::unique_ptr<RowReader> open_bin_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<BinReader>(location, options);
}

std::unique_ptr<RowWriter> create_bin_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options) {
  refuse_selector_to_write(location);
  check_dtype_to_write(location, dtype, kBins);
  const std::array header{checked_number<std::uint32_t>(location, "rows", rows),
                          checked_number<std::uint32_t>(location, "columns", dim)};
  return std::make_unique<FlatRowWriter>(location, rows, dim * item_size(dtype), options, std::as_bytes(std::span(header)),
                                         std::span<const std::byte>{});
}

std::unique_ptr<RowReader> open_raw_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<RawReader>(location, options);
}

std::unique_ptr<RowWriter> create_raw_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options) {
  refuse_selector_to_write(location);
  return std::make_unique<FlatRowWriter>(location, rows, dim * item_size(dtype), options, std::span<const std::byte>{},
                                         std::span<const std::byte>{});
}

}  // namespace embermap
