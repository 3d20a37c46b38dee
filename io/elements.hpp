// What lies between the bytes of a file and the elements of a table: byte order, truth values, rows that are not contiguous.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"

namespace embermap {

// How one element of a file becomes one of a table.
struct ElementFormat {
  DType dtype = DType::kFloat32;
  bool swap = false;     // big-endian in the file
  bool boolean = false;  // one byte: 0 stays 0, every other value becomes 1
};

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

// Fills the span from this byte of a file on. Throws IoError, FormatError "truncated".
using ReadBytes = std::function<void(std::uint64_t offset, std::span<std::byte> out)>;

// A matrix in a file: element (r, c) lies at offset + r * row_stride + c * column_stride. Either the columns of a row are at
// least as close together as the rows (row_stride >= dim * column_stride, equal if column_stride is more than the element), or
// the other way round (Fortran).
struct StridedLayout {
  std::uint64_t rows = 0, dim = 0;
  std::uint64_t offset = 0, row_stride = 0, column_stride = 0;
  ElementFormat element;
};

// Reads rows of such a matrix with large reads and at most 16 MiB of its own.
class StridedRows {
 public:
  StridedRows() = default;
  StridedRows(ReadBytes source, const StridedLayout& layout);
  void read(std::uint64_t first, std::uint64_t count, std::byte* out);
  std::uint64_t block_rows() const;

 private:
  void read_strided(std::uint64_t offset, std::uint64_t count, std::uint64_t item, std::uint64_t stride, std::byte* out);
  void read_columns(std::uint64_t first, std::uint64_t count, std::byte* out);
  std::span<std::byte> buffer(std::uint64_t bytes);

  ReadBytes source_;
  StridedLayout layout_;
  std::vector<std::byte> buffer_;
};

// What a file seems to be by its first bytes: "a gzip file (decompress it first)"; empty if nothing is recognised.
std::string looks_like(std::span<const std::byte> head);

}  // namespace embermap
