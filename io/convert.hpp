// convert_elements() (io/rows.hpp) in parts, for callers that name rows and columns in their errors.
#pragma once

#include "io/rows.hpp"

namespace embermap {

// As convert_elements, but returns the index of the first value that `to` cannot hold, or `count`. `out` before it may be written
// or not.
std::uint64_t try_convert_elements(DType from, const std::byte* in, DType to, std::byte* out, std::uint64_t count,
                                   ConversionReport& report);

// "value 300.7 of float32 is no whole number that uint8 can hold".
std::string conversion_failure(DType from, const std::byte* element, DType to);

// Converts `count` rows that were read from row `first` of `reader` on. Throws DTypeError naming the reader, row and column of
// the first value that `to` cannot hold.
void convert_rows(const RowReader& reader, std::uint64_t first, std::uint64_t count, const std::byte* in, DType to,
                  std::byte* out, ConversionReport& report);

}  // namespace embermap
