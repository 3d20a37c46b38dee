#include "io/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/convert.hpp"

namespace embermap {
namespace {

bool is_integer(DType dtype) { return !is_floating(dtype); }

// Rows as elements of int64 or float64, or as they are.
class Widened {
 public:
  Widened(RowReader& reader, DType to, std::uint64_t rows) : reader_{reader}, to_{to} {
    raw_.resize(rows * reader.dim() * item_size(reader.dtype()));
    if (to != reader.dtype()) wide_.resize(rows * reader.dim() * item_size(to));
  }
  const std::byte* read(std::uint64_t first, std::uint64_t count) {
    reader_.read(first, count, raw_.data());
    if (to_ == reader_.dtype()) return raw_.data();
    ConversionReport ignored;
    convert_rows(reader_, first, count, raw_.data(), to_, wide_.data(), ignored);
    return wide_.data();
  }

 private:
  RowReader& reader_;
  DType to_;
  std::vector<std::byte> raw_, wide_;
};

template <class T>
T element(const std::byte* at, std::uint64_t i) {
  T value;
  std::memcpy(&value, at + i * sizeof(T), sizeof value);
  return value;
}

// An element as a number. The mantissa of x86's long double holds every int64.
long double number(DType as, const std::byte* at, std::uint64_t i) {
  static_assert(std::numeric_limits<long double>::digits >= 64);
  return as == DType::kInt64 ? static_cast<long double>(element<std::int64_t>(at, i))
                             : static_cast<long double>(element<double>(at, i));
}

// Whole numbers are compared as int64, others as float64, where their bits are not.
DType widest(DType dtype) { return is_integer(dtype) ? DType::kInt64 : DType::kFloat64; }

// Compares rows that are there, and keeps count.
class RowCompare {
 public:
  RowCompare(DType a, DType b, std::uint64_t dim, bool bits)
      : dtype_{a}, exact_{bits && a == b}, wide_a_{widest(a)}, wide_b_{widest(b)}, dim_{dim} {
    if (exact_ && dtype_ != wide_a_) numbers_.resize(2 * dim * item_size(wide_a_));
    item_ = item_size(exact_ ? dtype_ : wide_a_);
  }
  // What rows have to be given as.
  DType as_a() const noexcept { return exact_ ? dtype_ : wide_a_; }
  DType as_b() const noexcept { return exact_ ? dtype_ : wide_b_; }

  void row(std::uint64_t number, const std::byte* p, const std::byte* q) {
    const std::uint64_t row_bytes = dim_ * item_;
    if (wide_a_ == wide_b_ && std::memcmp(p, q, row_bytes) == 0) return;
    const std::uint64_t before = out.elements;
    if (exact_)
      bits(number, p, q);
    else
      for (std::uint64_t c = 0; c < dim_; ++c) element(number, c, p, q, /*same_bits=*/false);
    if (out.elements != before) ++out.different_rows;
  }

  RowDifference out;

 private:
  // Elements whose bits are not the same differ, by what their values do.
  void bits(std::uint64_t number, const std::byte* p, const std::byte* q) {
    const std::byte *wide_p = p, *wide_q = q;
    if (dtype_ != wide_a_) {
      ConversionReport ignored;
      wide_p = numbers_.data();
      wide_q = numbers_.data() + dim_ * item_size(wide_a_);
      convert_elements(dtype_, p, wide_a_, numbers_.data(), dim_, ignored);
      convert_elements(dtype_, q, wide_a_, numbers_.data() + dim_ * item_size(wide_a_), dim_, ignored);
    }
    for (std::uint64_t c = 0; c < dim_; ++c)
      element(number, c, wide_p, wide_q, std::memcmp(p + c * item_, q + c * item_, item_) == 0);
  }

  void element(std::uint64_t number_of_row, std::uint64_t column, const std::byte* p, const std::byte* q, bool same_bits) {
    if (same_bits) return;
    const long double u = number(wide_a_, p, column), v = number(wide_b_, q, column);
    const bool equal = u == v || (std::isnan(u) && std::isnan(v));
    if (equal && !exact_) return;
    const double by = equal ? 0 : static_cast<double>(std::abs(u - v));
    if (out.elements == 0) out.first_row = number_of_row, out.first_column = column;
    ++out.elements;
    if (by <= out.largest) return;
    out.largest = std::isnan(by) ? std::numeric_limits<double>::infinity() : by;
    out.largest_row = number_of_row;
    out.largest_column = column;
  }

  DType dtype_;
  bool exact_;
  DType wide_a_, wide_b_;
  std::uint64_t dim_, item_ = 0;
  std::vector<std::byte> numbers_;
};

}  // namespace

RowDifference compare_rows(RowReader& a, RowReader& b, bool bits, std::uint64_t memory, const Progress& progress) {
  if (a.rows() != b.rows() || a.dim() != b.dim())
    throw InvalidArgument(
        fmt::format("{} has {} x {}, {} has {} x {}", a.description(), a.rows(), a.dim(), b.description(), b.rows(), b.dim()));
  const std::uint64_t row =
      checked_mul(a.dim(), item_size(a.dtype()) + item_size(b.dtype()) + 4 * sizeof(double), "bytes of a row");
  if (row > memory)
    throw BudgetError(fmt::format("a row of {} takes {}, more than {}", a.description(), format_size(row), format_size(memory)));
  const std::uint64_t block = std::clamp<std::uint64_t>(std::max(a.block_rows(), b.block_rows()), 1, memory / row);
  RowCompare compare(a.dtype(), b.dtype(), a.dim(), bits);
  Widened left(a, compare.as_a(), block), right(b, compare.as_b(), block);
  const std::uint64_t bytes_a = a.dim() * item_size(compare.as_a()), bytes_b = a.dim() * item_size(compare.as_b());
  for (std::uint64_t first = 0; first < a.rows();) {
    const std::uint64_t count = std::min(block, a.rows() - first);
    const std::byte* const x = left.read(first, count);
    const std::byte* const y = right.read(first, count);
    for (std::uint64_t r = 0; r < count; ++r) compare.row(first + r, x + r * bytes_a, y + r * bytes_b);
    first += count;
    compare.out.rows = first;
    if (progress) progress(first, a.rows());
  }
  return compare.out;
}

}  // namespace embermap
