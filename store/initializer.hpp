// What a row holds before anyone writes it: a pure function of (seed, row, column).
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "base/dtype.hpp"

namespace embermap {

struct Zeros {};
struct Constant {
  double value = 0;
};
struct Uniform {  // [low, high)
  double low = 0, high = 1;
};
struct Normal {
  double mean = 0, std = 1;
};

using Initializer = std::variant<Zeros, Constant, Uniform, Normal>;

// Throws InvalidArgument naming the parameter and its value: not finite, low > high, std < 0; or a value that `dtype` cannot
// hold, a range [low, high) without one of its values, a normal distribution whose farthest value overflows it. Integer tables
// take Zeros, an integral Constant, and Uniform, which then draws integers of [low, high); low == high is the constant low
// everywhere.
void check_initializer(const Initializer& init, DType dtype);

// Writes rows [first_row, first_row + rows) of `dim` elements of `dtype`, row i at out + i * stride; bytes between rows stay as
// they are. Neither `out` nor `stride` (in bytes) need be aligned. Throws as check_initializer, and if stride is less than a row.
// Thread-safe.
//
// Random bits are Philox4x32-10 with key = seed and counter = (row, block), two 64-bit numbers, low words first. A block of 128
// bits makes four columns (block = column / 4); of float64 two, of integers one. So an element does not depend on page size,
// thread count or on what else is generated with it, and everything after the bits is IEEE arithmetic in a fixed order, our own
// logarithm, sine and cosine included: the same seed gives the same rows with every compiler, vector width and C library.
//   Uniform  low + u (high - low) in double, u with 24 bits (float64: 53), rounded to the dtype and kept inside [low, high):
//   `high` never
//            comes. Integers: multiplication of the block by the number of values, bias below 2^-63.
//   Normal   Box-Muller pairs in double, rounded once (float16, bfloat16: by way of float). 32 bits (float64: 52) make a radius:
//   values
//            reach 6.76 (8.57) standard deviations; errors stay within 2 units in the last place of a double before that
//            rounding.
void generate_rows(const Initializer& init, std::uint64_t seed, std::uint64_t first_row, std::uint64_t rows, std::uint64_t dim,
                   DType dtype, std::byte* out, std::uint64_t stride);

}  // namespace embermap
