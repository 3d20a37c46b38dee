// What lies between the bytes of a file and the elements of a table: byte order, truth values, rows that are not contiguous.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "io/file.hpp"

namespace embermap {

struct Remark;  // io/rows.hpp

// How one element of a file becomes one of a table.
struct ElementFormat {
  DType dtype = DType::kFloat32;
  bool swap = false;     // big-endian in the file
  bool boolean = false;  // one byte: 0 stays 0, every other value becomes 1
};

// Of an integer of 2, 4 or 8 bytes that is none of a table's, for ReadOptions::integers: its bits.
ElementFormat integer_bits(std::uint64_t bytes, bool swap);
// The same by its name, "uint32"; nothing for names of others.
struct NamedInteger {
  ElementFormat bits;
  bool is_signed = false;
};
std::optional<NamedInteger> integer_named(std::string_view name, bool swap);

// Turns `count` elements as read from the file into elements of format.dtype, in place.
void decode_elements(const ElementFormat& format, std::byte* data, std::uint64_t count);

// Turns around the bytes of each of `count` elements of `item` bytes (1, 2, 4 or 8). `in` and `out` are the same or do not
// overlap.
void swap_elements(const std::byte* in, std::byte* out, std::uint64_t count, std::uint64_t item);

// "float32, float16, ...": what a table can hold, for messages.
std::string table_dtypes();

// "(3, 4)", "(3,)", "()".
std::string shape_to_text(std::span<const std::uint64_t> shape);

// Checks a file's dtype against ReadOptions::dtype. `where` names file and dataset. Throws DTypeError.
void check_requested_dtype(std::string_view where, DType found, const std::optional<DType>& requested);

// Throws InvalidArgument where [first, first + count) leaves [0, rows).
void check_row_range(std::string_view where, std::uint64_t first, std::uint64_t count, std::uint64_t rows);

// Rows in a file that lie in any order: element (r, i, j, ...) is at offset + r * row_stride + i * inner[0].stride + ... Column c
// of a table is the c-th of (i, j, ...) in C order. Strides may be 0, and rows may overlap.
struct StridedLayout {
  struct Dimension {
    std::uint64_t extent = 0, stride = 0;
  };
  std::uint64_t rows = 0, dim = 0;
  std::uint64_t offset = 0, row_stride = 0;
  std::vector<Dimension> inner;  // as few as can be; none where a row is one piece of dim elements
  ElementFormat element;
  std::uint64_t item = 0;  // bytes that lie together at each place: one element or, of rows in pieces, several
};

// The layout of an array of one dimension or more (rows are the first one). Strides are in bytes; the array's last byte has to
// have a place below 2^64 (checked by whoever knows the file).
StridedLayout strided_layout(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> strides, std::uint64_t offset,
                             const ElementFormat& element);

// Strides of a dense array of `item` bytes an element. Sizes are checked before: their product fits 64 bits.
std::vector<std::uint64_t> dense_strides(std::span<const std::uint64_t> shape, std::uint64_t item, bool fortran_order);

// Rows and columns that an array is to a table: the first dimension, and the product of the others. Throws FormatError for none
// (shape ()), and for columns that are 0 or past 64 bits; `what` goes before the shape: "/v has ".
struct TableShape {
  std::uint64_t rows = 0, dim = 0;
};
TableShape table_shape(const std::filesystem::path& file, std::string_view what, std::span<const std::uint64_t> shape);

// Adds what has to be said of an array that has not two dimensions: "x.npy has shape (10, 3, 4): read as 10 rows of 12 columns".
void remark_on_shape(std::vector<Remark>& remarks, std::string_view where, std::span<const std::uint64_t> shape);

// Reads rows of such an array with large reads and at most 16 MiB of its own.
class StridedRows {
 public:
  StridedRows() = default;
  StridedRows(ReadBytes source, StridedLayout layout);
  void read(std::uint64_t first, std::uint64_t count, std::byte* out);
  std::uint64_t block_rows() const;
  // The bytes that read() asks for, once and in ascending order, when these rows are read by ascending blocks; nothing (begin ==
  // end) where it goes back.
  struct Bytes {
    std::uint64_t begin = 0, end = 0;
  };
  Bytes bytes_of(std::uint64_t first, std::uint64_t count) const;
  // Where row 0 begins if all rows are the source's bytes as they are, one behind the other.
  std::optional<std::uint64_t> plain_from() const;

 private:
  bool by_column() const;
  void read_strided(std::uint64_t offset, std::uint64_t count, std::uint64_t item, std::uint64_t stride, std::byte* out);
  void read_rows(std::uint64_t first, std::uint64_t count, std::byte* out);
  void read_columns(std::uint64_t first, std::uint64_t count, std::byte* out);
  std::span<std::byte> buffer(std::uint64_t bytes);

  ReadBytes source_;
  StridedLayout layout_;
  std::uint64_t items_ = 1;  // of a row
  std::uint64_t span_ = 0;   // bytes from the first of a row's to behind its last
  std::vector<std::byte> buffer_;
};

// What a file seems to be by its first bytes: "a gzip file (decompress it first)"; empty if nothing is recognised.
std::string looks_like(std::span<const std::byte> head);

}  // namespace embermap
