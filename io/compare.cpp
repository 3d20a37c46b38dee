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

}  // namespace

RowDifference compare_rows(RowReader& a, RowReader& b, bool bits, std::uint64_t memory, const Progress& progress) {
  if (a.rows() != b.rows() || a.dim() != b.dim())
    throw InvalidArgument(
        fmt::format("{} has {} x {}, {} has {} x {}", a.description(), a.rows(), a.dim(), b.description(), b.rows(), b.dim()));
  const bool exact = bits && a.dtype() == b.dtype();
  const DType wide_a = is_integer(a.dtype()) ? DType::kInt64 : DType::kFloat64;
  const DType wide_b = is_integer(b.dtype()) ? DType::kInt64 : DType::kFloat64;
  const std::uint64_t row =
      checked_mul(a.dim(), item_size(a.dtype()) + item_size(b.dtype()) + 4 * sizeof(double), "bytes of a row");
  if (row > memory)
    throw BudgetError(fmt::format("a row of {} takes {}, more than {}", a.description(), format_size(row), format_size(memory)));
  const std::uint64_t block = std::clamp<std::uint64_t>(std::max(a.block_rows(), b.block_rows()), 1, memory / row);
  Widened left(a, exact ? a.dtype() : wide_a, block), right(b, exact ? b.dtype() : wide_b, block);
  const std::uint64_t item = item_size(exact ? a.dtype() : wide_a);

  RowDifference out;
  const auto differs = [&](std::uint64_t r, std::uint64_t column, double by) {
    if (out.elements == 0) out.first_row = r, out.first_column = column;
    ++out.elements;
    if (!(by <= out.largest))
      out.largest = std::isnan(by) ? std::numeric_limits<double>::infinity() : by, out.largest_row = r,
      out.largest_column = column;
  };
  std::vector<std::byte> numbers(exact && a.dtype() != wide_a ? 2 * a.dim() * item_size(wide_a) : 0);
  for (std::uint64_t first = 0; first < a.rows();) {
    const std::uint64_t count = std::min(block, a.rows() - first);
    const std::byte* const x = left.read(first, count);
    const std::byte* const y = right.read(first, count);
    for (std::uint64_t r = 0; r < count; ++r) {
      const std::uint64_t row_bytes = a.dim() * item;
      const std::byte* p = x + r * row_bytes;
      const std::byte* q = y + r * row_bytes;
      if (wide_a == wide_b && std::memcmp(p, q, row_bytes) == 0) continue;
      const std::uint64_t before = out.elements;
      std::vector<bool> other_bits;
      if (exact) {
        other_bits.resize(a.dim());
        for (std::uint64_t c = 0; c < a.dim(); ++c) other_bits[c] = std::memcmp(p + c * item, q + c * item, item) != 0;
        if (a.dtype() != wide_a) {
          ConversionReport ignored;
          std::byte* const wide = numbers.data();
          convert_elements(a.dtype(), p, wide_a, wide, a.dim(), ignored);
          convert_elements(a.dtype(), q, wide_a, wide + a.dim() * item_size(wide_a), a.dim(), ignored);
          p = wide;
          q = wide + a.dim() * item_size(wide_a);
        }
      }
      for (std::uint64_t c = 0; c < a.dim(); ++c) {
        const long double u = number(wide_a, p, c), v = number(wide_b, q, c);
        const bool equal = u == v || (std::isnan(u) && std::isnan(v));
        if (exact ? !other_bits[c] : equal) continue;
        differs(first + r, c, equal ? 0 : static_cast<double>(std::abs(u - v)));
      }
      if (out.elements != before) ++out.different_rows;
    }
    first += count;
    out.rows = first;
    if (progress) progress(first, a.rows());
  }
  return out;
}

}  // namespace embermap
