// Whether two readers give the same rows.
#pragma once

#include <cstdint>
#include <optional>

#include "io/rows.hpp"

namespace embermap {

struct RowDifference {
  std::uint64_t rows = 0;      // that were compared
  std::uint64_t elements = 0;  // that differ
  std::uint64_t different_rows = 0;
  std::uint64_t first_row = 0, first_column = 0;  // of the first element that differs, if any does
  double largest = 0;  // |a - b| of all that differ and are numbers; infinite where one is not a number
  std::uint64_t largest_row = 0, largest_column = 0;
  bool same() const noexcept { return elements == 0; }
};

// Compares all rows. Elements of one dtype are the same if their bits are, but that every NaN is as good as another and 0 is -0
// where `bits` is false; of two dtypes, if their values are: all exactly, an int64 with a double too. Buffers take at most
// `memory` bytes (BudgetError if a row of each takes more). Throws InvalidArgument where rows or columns are not as many, and
// what reading throws. `progress` may be empty.
RowDifference compare_rows(RowReader& a, RowReader& b, bool bits, std::uint64_t memory, const Progress& progress);

}  // namespace embermap
