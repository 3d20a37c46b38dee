// Row -> page -> byte. A page is a whole number of consecutive records; rows never straddle pages.
#pragma once

#include <cstdint>

namespace embermap {

inline constexpr std::uint64_t kDataOffset = 4096;      // where our own .npy files begin their data
inline constexpr std::uint64_t kDirectAlignment = 512;  // what direct I/O asks of lengths
inline constexpr std::uint64_t kMinPageBytes = 4096;
inline constexpr std::uint64_t kMaxPageBytes = 2ULL << 20;

//  file: | header 4096 | page 0: rec 0 .. rec r-1 | page 1: rec r .. | ... | last page, cut at the last record |
struct Geometry {
  std::uint64_t rows = 0;
  std::uint64_t stride = 0;  // bytes from one record to the next
  std::uint64_t rows_per_page = 0;
  std::uint64_t data_offset = kDataOffset;

  std::uint64_t page_bytes() const noexcept { return rows_per_page * stride; }
  std::uint64_t pages() const noexcept { return rows / rows_per_page + (rows % rows_per_page != 0); }
  std::uint64_t page_of(std::uint64_t row) const noexcept { return row / rows_per_page; }
  std::uint64_t slot_of(std::uint64_t row) const noexcept { return row % rows_per_page; }
  // Rows that really are in `page` (the last one may be short).
  std::uint64_t rows_in(std::uint64_t page) const noexcept;
  std::uint64_t bytes_in(std::uint64_t page) const noexcept { return rows_in(page) * stride; }
  std::uint64_t offset_of(std::uint64_t page) const noexcept { return data_offset + page * page_bytes(); }
  std::uint64_t file_bytes() const noexcept { return data_offset + rows * stride; }
  bool operator==(const Geometry&) const = default;
};

// The geometry of a table of `rows` records of `record_bytes` with pages of about `page_bytes` (the option, a power of two from 4
// KiB to 2 MiB). A record longer than that has a page of its own. `padded` records (structured) get a stride that makes pages
// multiples of 512 bytes if that costs at most 12.5 % of disk; plain arrays cannot be padded and get such pages where their row
// length allows. `alignment` divides record_bytes and the stride. Throws InvalidArgument if the file would exceed 2^63 bytes or
// an argument is out of range.
Geometry make_geometry(std::uint64_t rows, std::uint64_t record_bytes, std::uint64_t alignment, bool padded,
                       std::uint64_t page_bytes);

}  // namespace embermap
