#include "store/initializer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/half.hpp"
#include "base/philox.hpp"
#include "base/vector_dispatch.hpp"

// Everything a row is made of is IEEE addition, multiplication, division, square root and integer arithmetic in a fixed order,
// and the build forbids contraction for this file: the bits do not depend on the compiler, the vector width or the C library.

namespace embermap {
namespace {

using Blocks = detail::PhiloxBlocks;
using detail::kPhiloxBlocks;
using Word = std::uint32_t;

constexpr std::size_t kVector = 16;  // loops run over whole multiples of this many blocks

// A double from an integer below 2^52, and from a signed one within +-2^51, without the conversions that older vector units lack:
// the integer becomes the mantissa of 2^52 (of 1.5 x 2^52), which is then taken away. Exact.
EMBERMAP_ALWAYS_INLINE inline double to_double(std::uint64_t value) {
  return std::bit_cast<double>(value | 0x4330000000000000U) - 4503599627370496.0;
}
EMBERMAP_ALWAYS_INLINE inline double to_double(std::int64_t value) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(value) + 0x4338000000000000U) - 6755399441055744.0;
}

// -2 ln u for u in (0, 1), to about 1 unit in the last place. u = 2^k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); with s = f / (2
// + f), ln(1 + f) = 2 atanh(s) = 2 s + s^3 P(s^2), P a Chebyshev fit (error below 2^-57).
EMBERMAP_ALWAYS_INLINE inline double minus_two_log(double u) {
  constexpr std::uint64_t kSqrtHalf = 0x3FE6A09E667F3BCDU;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(u);
  const std::uint64_t biased = bits - kSqrtHalf + (std::uint64_t{1024} << 52);  // its exponent field is k + 1024
  const double k = to_double(biased >> 52) - 1024.0;
  const double f = std::bit_cast<double>((biased & 0x000FFFFFFFFFFFFFU) + kSqrtHalf) - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double p = 0x1.2b584aae78a57p-3;
  p = p * z + 0x1.39fe606542ddep-3;
  p = p * z + 0x1.7462b4ab2ef6bp-3;
  p = p * z + 0x1.c71c62e5800a1p-3;
  p = p * z + 0x1.2492492df148dp-2;
  p = p * z + 0x1.99999999952e2p-2;
  p = p * z + 0x1.5555555555558p-1;
  return -2.0 * (k * 0x1.62e42fefa39efp-1 + (2.0 * s + s * z * p));
}

struct SinCos {
  double sin, cos;
};

// Sine and cosine of quarter x pi/2 + x for |x| <= pi/4, to about 1 unit in the last place (Chebyshev fits, error below 2^-55).
EMBERMAP_ALWAYS_INLINE inline SinCos sin_cos(std::uint64_t quarter, double x) {
  const double z = x * x;
  double ps = 0x1.5e0b19f8b1451p-33;
  ps = ps * z + -0x1.ae600b02b6262p-26;
  ps = ps * z + 0x1.71de37968a100p-19;
  ps = ps * z + -0x1.a01a019e83aaep-13;
  ps = ps * z + 0x1.1111111110bb2p-7;
  ps = ps * z + -0x1.5555555555555p-3;
  double pc = -0x1.907da367a37cbp-37;
  pc = pc * z + 0x1.1eeb68e93b64cp-29;
  pc = pc * z + -0x1.27e4fa17da09ep-22;
  pc = pc * z + 0x1.a01a019f4eb01p-16;
  pc = pc * z + -0x1.6c16c16c16967p-10;
  pc = pc * z + 0x1.5555555555555p-5;
  const std::uint64_t s = std::bit_cast<std::uint64_t>(x + x * z * ps);
  const std::uint64_t c = std::bit_cast<std::uint64_t>((1.0 - 0.5 * z) + z * z * pc);
  // Quarter 0: (s, c), 1: (c, -s), 2: (-s, -c), 3: (-c, s). Masks, not branches.
  const std::uint64_t swap = std::uint64_t{0} - (quarter & 1);
  const std::uint64_t sin_sign = (quarter >> 1) << 63;
  const std::uint64_t cos_sign = ((quarter ^ (quarter >> 1)) & 1) << 63;
  return {std::bit_cast<double>(((s & ~swap) | (c & swap)) ^ sin_sign),
          std::bit_cast<double>(((c & ~swap) | (s & swap)) ^ cos_sign)};
}

// Two independent standard normal values (Box and Muller, 1958) from `kBits` random bits each. The radius comes from an odd
// multiple of 2^-(kBits + 1), so |value| <= sqrt(2 (kBits + 1) ln 2); the angle from the middles of 2^kBits equal arcs.
template <int kBits>
EMBERMAP_ALWAYS_INLINE inline SinCos normal_pair(std::uint64_t radius_bits, std::uint64_t angle_bits) {
  constexpr double kStep = 1.0 / static_cast<double>(std::uint64_t{1} << kBits);
  const double u = (to_double(radius_bits) + 0.5) * kStep;
  const double radius = std::sqrt(minus_two_log(u));
  const std::uint64_t shifted = angle_bits + (std::uint64_t{1} << (kBits - 3));
  const std::uint64_t quarter = (shifted >> (kBits - 2)) & 3;
  const auto rest =
      static_cast<std::int64_t>(shifted & ((std::uint64_t{1} << (kBits - 2)) - 1)) - (std::int64_t{1} << (kBits - 3));
  const SinCos unit = sin_cos(quarter, (to_double(rest) + 0.5) * (kStep * 0x1.921fb54442d18p+2));  // 2 pi
  return {radius * unit.sin, radius * unit.cos};
}

constexpr int kNormalBits = 32;      // float32, float16, bfloat16: sqrt(2 x 33 ln 2) = 6.763...
constexpr int kWideNormalBits = 52;  // float64: sqrt(2 x 53 ln 2) = 8.571...
constexpr double kNormalLimit = 6.7640;
constexpr double kWideNormalLimit = 8.5720;

template <class T>
EMBERMAP_ALWAYS_INLINE inline T rounded(double value) {
  if constexpr (std::is_same_v<T, double>)
    return value;
  else
    return static_cast<T>(static_cast<float>(value));
}

template <class T>
double widened(T value) {
  if constexpr (std::is_same_v<T, double>)
    return value;
  else
    return static_cast<double>(static_cast<float>(value));
}

// The next value of T above (up) or below. T is a 16-, 32- or 64-bit IEEE-like type with sign and magnitude.
template <class T>
T neighbour(T value, bool up) {
  using Bits =
      std::conditional_t<sizeof(T) == 2, std::uint16_t, std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  constexpr auto kSign = static_cast<Bits>(Bits{1} << (sizeof(T) * 8 - 1));
  auto bits = std::bit_cast<Bits>(value);
  if (static_cast<Bits>(bits & static_cast<Bits>(~kSign)) == 0)
    bits = up ? Bits{1} : static_cast<Bits>(kSign | 1U);
  else
    bits = static_cast<Bits>(up == ((bits & kSign) == 0) ? bits + 1U : bits - 1U);
  return std::bit_cast<T>(bits);
}

// The least T that is >= bound.
template <class T>
T round_up_to(double bound) {
  T value = rounded<T>(bound);
  while (widened(value) < bound) value = neighbour(value, true);
  while (widened(neighbour(value, false)) >= bound) value = neighbour(value, false);
  return value;
}

// The greatest T that is < bound.
template <class T>
T round_down_below(double bound) {
  return neighbour(round_up_to<T>(bound), false);
}

// What the elements of a row are: kColumns of them from one block.
template <class T>
struct UniformRule {
  static constexpr std::size_t kColumns = sizeof(T) == 8 ? 2 : 4;
  double low, width, least, most;

  explicit UniformRule(const Uniform& uniform)
      : low{uniform.low},
        width{uniform.high - uniform.low},
        least{widened(uniform.low < uniform.high ? round_up_to<T>(uniform.low) : rounded<T>(uniform.low))},
        most{widened(uniform.low < uniform.high ? round_down_below<T>(uniform.high) : rounded<T>(uniform.low))} {}

  // Rounding may carry a value to `high`, or below `low`: it then becomes the nearest value inside.
  EMBERMAP_ALWAYS_INLINE T element(double u) const {
    double value = low + u * width;
    value = value < least ? least : value;
    value = value > most ? most : value;
    return rounded<T>(value);
  }

  EMBERMAP_ALWAYS_INLINE void make(const Blocks& blocks, std::size_t count, T (&out)[kColumns][kPhiloxBlocks]) const {
    if constexpr (kColumns == 2) {
      for (std::size_t half = 0; half < 2; ++half)
        for (std::size_t i = 0; i < count; ++i) {
          // 53 bits: the top 32 and the next 21, exact in a double.
          const double top = to_double(std::uint64_t{blocks.word[2 * half][i]});
          const double rest = to_double(std::uint64_t{blocks.word[2 * half + 1][i]} >> 11);
          out[half][i] = element(top * 0x1p-32 + rest * 0x1p-53);
        }
    } else {
      for (std::size_t j = 0; j < 4; ++j)
        for (std::size_t i = 0; i < count; ++i) out[j][i] = element(to_double(std::uint64_t{blocks.word[j][i]} >> 8) * 0x1p-24);
    }
  }
};

template <class T>
struct NormalRule {
  static constexpr std::size_t kColumns = sizeof(T) == 8 ? 2 : 4;
  double mean, std;

  explicit NormalRule(const Normal& normal) : mean{normal.mean}, std{normal.std} {}

  EMBERMAP_ALWAYS_INLINE T element(double z) const { return rounded<T>(mean + std * z); }

  EMBERMAP_ALWAYS_INLINE void make(const Blocks& blocks, std::size_t count, T (&out)[kColumns][kPhiloxBlocks]) const {
    const auto& w = blocks.word;
    if constexpr (kColumns == 2) {
      for (std::size_t i = 0; i < count; ++i) {
        const SinCos pair = normal_pair<kWideNormalBits>((std::uint64_t{w[0][i]} << 20) | (w[1][i] >> 12),
                                                         (std::uint64_t{w[2][i]} << 20) | (w[3][i] >> 12));
        out[0][i] = element(pair.cos);
        out[1][i] = element(pair.sin);
      }
    } else {
      for (std::size_t half = 0; half < 2; ++half)
        for (std::size_t i = 0; i < count; ++i) {
          const SinCos pair = normal_pair<kNormalBits>(w[2 * half][i], w[2 * half + 1][i]);
          out[2 * half][i] = element(pair.cos);
          out[2 * half + 1][i] = element(pair.sin);
        }
    }
  }
};

// Integers first .. first + count - 1, `count` 0 standing for 2^64: first + floor(block x count / 2^128), the block taken as a
// 128-bit number. No value is more likely than another by more than 1 in 2^63.
struct IntegerRange {
  std::int64_t first = 0;
  std::uint64_t count = 0;
};

template <class T>
struct IntegerRule {
  static constexpr std::size_t kColumns = 1;
  IntegerRange range;

  void make(const Blocks& blocks, std::size_t count, T (&out)[kColumns][kPhiloxBlocks]) const {
    __extension__ using Wide = unsigned __int128;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t low = (std::uint64_t{blocks.word[3][i]} << 32) | blocks.word[2][i];
      const std::uint64_t high = (std::uint64_t{blocks.word[1][i]} << 32) | blocks.word[0][i];
      std::uint64_t offset = high;
      if (range.count != 0) {
        const Wide carry = (Wide{low} * range.count) >> 64;
        offset = static_cast<std::uint64_t>((Wide{high} * range.count + carry) >> 64);
      }
      out[0][i] = static_cast<T>(static_cast<std::uint64_t>(range.first) + offset);
    }
  }
};

struct Target {
  std::uint64_t first_row, rows, dim, stride;
  std::byte* out;
};

// Makes blocks in order of (row, column) kPhiloxBlocks at a time, across rows, so that narrow rows fill the vectors too.
template <class T, class Rule>
void generate(const Rule& rule, std::uint64_t seed, const Target& target) {
  constexpr std::uint64_t kColumns = Rule::kColumns;
  const std::uint64_t blocks_per_row = ceil_div(target.dim, kColumns);
  std::uint64_t row = 0;
  std::uint64_t block = 0;
  Blocks blocks;
  alignas(64) T columns[kColumns][kPhiloxBlocks];
  alignas(64) T elements[kPhiloxBlocks * kColumns];
  while (row < target.rows) {
    const std::uint64_t tile_row = row;
    const std::uint64_t tile_block = block;
    std::size_t count = 0;
    while (count < kPhiloxBlocks && row < target.rows) {
      const std::uint64_t id = target.first_row + row;
      const auto end = static_cast<std::size_t>(std::min<std::uint64_t>(kPhiloxBlocks, count + (blocks_per_row - block)));
      for (; count < end; ++count, ++block) {
        blocks.word[0][count] = static_cast<Word>(id);
        blocks.word[1][count] = static_cast<Word>(id >> 32);
        blocks.word[2][count] = static_cast<Word>(block);
        blocks.word[3][count] = static_cast<Word>(block >> 32);
      }
      if (block == blocks_per_row) {
        block = 0;
        ++row;
      }
    }
    const std::size_t padded = round_up(count, kVector);
    for (std::size_t j = 0; j < 4; ++j) std::fill(blocks.word[j] + count, blocks.word[j] + padded, Word{0});
    with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
      detail::philox(blocks, padded, seed);
      rule.make(blocks, padded, columns);
      for (std::size_t i = 0; i < padded; ++i)
        for (std::size_t j = 0; j < kColumns; ++j) elements[i * kColumns + j] = columns[j][i];
    });
    std::uint64_t to_row = tile_row;
    std::uint64_t to_block = tile_block;
    for (std::size_t i = 0; i < count;) {
      const auto taken = static_cast<std::size_t>(std::min<std::uint64_t>(count - i, blocks_per_row - to_block));
      const std::uint64_t column = to_block * kColumns;
      const std::uint64_t length = std::min<std::uint64_t>(taken * kColumns, target.dim - column);
      std::memcpy(target.out + to_row * target.stride + column * sizeof(T), elements + i * kColumns, length * sizeof(T));
      i += taken;
      to_block = 0;
      ++to_row;
    }
  }
}

template <class T>
void fill(T value, const Target& target) {
  constexpr std::size_t kTile = 512;
  T tile[kTile];
  std::fill(tile, tile + std::min<std::uint64_t>(kTile, target.dim), value);
  for (std::uint64_t row = 0; row < target.rows; ++row)
    for (std::uint64_t column = 0; column < target.dim; column += kTile)
      std::memcpy(target.out + row * target.stride + column * sizeof(T), tile,
                  std::min<std::uint64_t>(kTile, target.dim - column) * sizeof(T));
}

// --- What an initializer may be ---

bool holds(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat64: return std::isfinite(value);
    case DType::kFloat32: return std::isfinite(static_cast<float>(value));
    case DType::kFloat16: return std::isfinite(static_cast<float>(rounded<Float16>(value)));
    case DType::kBFloat16: return std::isfinite(static_cast<float>(rounded<BFloat16>(value)));
    default: break;
  }
  return false;
}

// An integer dtype's values: min .. min + 2^bits - 1.
struct IntegerLimits {
  double least, beyond;  // both exact: powers of two, or 0
};

IntegerLimits integer_limits(DType dtype) {
  const double span = std::ldexp(1.0, static_cast<int>(8 * item_size(dtype)));
  if (dtype == DType::kUInt8) return {0.0, span};
  return {-span / 2, span / 2};
}

// Integers of [low, high); an empty or unrepresentable range throws.
IntegerRange integer_range(const Uniform& uniform, DType dtype) {
  const IntegerLimits limits = integer_limits(dtype);
  const double first = std::ceil(uniform.low);
  double beyond = std::ceil(uniform.high);
  if (uniform.low == uniform.high && first == uniform.low) beyond = first + 1;  // the one value, as for floating tables
  const std::string text = fmt::format("init uniform [{}, {})", uniform.low, uniform.high);
  if (first < limits.least || beyond > limits.beyond)
    throw InvalidArgument(fmt::format("{}: {} holds [{}, {})", text, dtype_name(dtype), limits.least, limits.beyond));
  if (!(first < beyond) && uniform.low != uniform.high)
    throw InvalidArgument(fmt::format("{} holds no integer for a table of {}", text, dtype_name(dtype)));
  if (uniform.low == uniform.high) {
    if (first != uniform.low)
      throw InvalidArgument(fmt::format("{} holds no integer for a table of {}", text, dtype_name(dtype)));
    return {static_cast<std::int64_t>(first), 1};
  }
  // Neither sum nor difference need fit a double or an int64: 2^63 is written as -2^63, modulo 2^64.
  const auto wrapped = [](double value) {
    return value >= 0x1p63 ? std::uint64_t{1} << 63 : static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
  };
  return {static_cast<std::int64_t>(first), wrapped(beyond) - wrapped(first)};
}

void require_finite(double value, std::string_view what) {
  if (!std::isfinite(value)) throw InvalidArgument(fmt::format("init {} is {}, not a finite number", what, value));
}

void require_held(DType dtype, double value, std::string_view what) {
  if (!holds(dtype, value))
    throw InvalidArgument(fmt::format("init {}: {} is more than {} holds", what, value, dtype_name(dtype)));
}

template <class T>
void require_some_value(const Uniform& uniform, DType dtype) {
  if (uniform.low < uniform.high && widened(round_up_to<T>(uniform.low)) >= uniform.high)
    throw InvalidArgument(fmt::format("init uniform [{}, {}) holds no {} value", uniform.low, uniform.high, dtype_name(dtype)));
}

void check(const Zeros&, DType) {}

void check(const Constant& constant, DType dtype) {
  require_finite(constant.value, "constant");
  if (is_floating(dtype)) return require_held(dtype, constant.value, "constant");
  const IntegerLimits limits = integer_limits(dtype);
  if (constant.value != std::trunc(constant.value) || constant.value < limits.least || constant.value >= limits.beyond)
    throw InvalidArgument(fmt::format("init constant {} is not a value of {}", constant.value, dtype_name(dtype)));
}

void check(const Uniform& uniform, DType dtype) {
  require_finite(uniform.low, "uniform low");
  require_finite(uniform.high, "uniform high");
  if (uniform.low > uniform.high)
    throw InvalidArgument(fmt::format("init uniform: low {} is greater than high {}", uniform.low, uniform.high));
  if (!is_floating(dtype)) {
    (void)integer_range(uniform, dtype);
    return;
  }
  require_held(dtype, uniform.low, "uniform low");
  require_held(dtype, uniform.high, "uniform high");
  require_finite(uniform.high - uniform.low, "uniform high - low");
  switch (dtype) {
    case DType::kFloat64: return require_some_value<double>(uniform, dtype);
    case DType::kFloat32: return require_some_value<float>(uniform, dtype);
    case DType::kFloat16: return require_some_value<Float16>(uniform, dtype);
    default: return require_some_value<BFloat16>(uniform, dtype);
  }
}

void check(const Normal& normal, DType dtype) {
  require_finite(normal.mean, "normal mean");
  require_finite(normal.std, "normal std");
  if (normal.std < 0) throw InvalidArgument(fmt::format("init normal: std {} is negative", normal.std));
  if (!is_floating(dtype))
    throw InvalidArgument(
        fmt::format("init normal does not fit a table of {}; integer tables take zeros, constant or uniform", dtype_name(dtype)));
  const double limit = dtype == DType::kFloat64 ? kWideNormalLimit : kNormalLimit;
  require_held(dtype, std::abs(normal.mean) + limit * normal.std, "normal: |mean| + the farthest deviation drawn");
}

// Calls body(T{}) with the C++ type of dtype.
template <class Body>
void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(Float16{});
    case DType::kBFloat16: return body(BFloat16{});
    case DType::kFloat64: return body(double{});
    case DType::kInt8: return body(std::int8_t{});
    case DType::kUInt8: return body(std::uint8_t{});
    case DType::kInt32: return body(std::int32_t{});
    case DType::kInt64: return body(std::int64_t{});
  }
}

template <class T>
constexpr bool kIsFloating = !std::is_integral_v<T>;

}  // namespace

void check_initializer(const Initializer& init, DType dtype) {
  std::visit([&](const auto& kind) { check(kind, dtype); }, init);
}

void generate_rows(const Initializer& init, std::uint64_t seed, std::uint64_t first_row, std::uint64_t rows, std::uint64_t dim,
                   DType dtype, std::byte* out, std::uint64_t stride) {
  check_initializer(init, dtype);
  if (rows == 0 || dim == 0) return;
  const std::uint64_t row_bytes = checked_mul(dim, item_size(dtype), "bytes of a row");
  if (stride < row_bytes) throw InvalidArgument(fmt::format("stride {} is less than the {} bytes of a row", stride, row_bytes));
  const Target target{first_row, rows, dim, stride, out};
  with_type(dtype, [&]<class T>(T) {
    if (std::holds_alternative<Zeros>(init)) {
      fill(T{}, target);
    } else if (const auto* constant = std::get_if<Constant>(&init)) {
      if constexpr (kIsFloating<T>)
        fill(rounded<T>(constant->value), target);
      else
        fill(static_cast<T>(constant->value), target);
    } else if (const auto* uniform = std::get_if<Uniform>(&init)) {
      if constexpr (kIsFloating<T>)
        generate<T>(UniformRule<T>(*uniform), seed, target);
      else
        generate<T>(IntegerRule<T>{integer_range(*uniform, dtype)}, seed, target);
    } else if (const auto* normal = std::get_if<Normal>(&init)) {
      if constexpr (kIsFloating<T>) generate<T>(NormalRule<T>(*normal), seed, target);
    }
  });
}

}  // namespace embermap
