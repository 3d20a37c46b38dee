#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/error.hpp"
#include "base/half.hpp"
#include "base/vector_dispatch.hpp"
#include "io/convert.hpp"

namespace embermap {
namespace {

template <class T>
constexpr bool kIsFloating = kIsHalf<T> || std::is_floating_point_v<T>;

// float of `value` rounded to odd: if inexact, the neighbour whose last bit is 1. Rounding that once more to a format with at
// least two bits fewer gives what one rounding of `value` would have given, because no tie can appear that was not there.
EMBERMAP_ALWAYS_INLINE inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const bool inexact = back < value || back > value;  // not for NaN
  const bool away = std::fabs(back) > std::fabs(value);
  bits -= static_cast<std::uint32_t>(inexact && away);  // infinity becomes the largest float, as it should
  bits |= static_cast<std::uint32_t>(inexact);
  return std::bit_cast<float>(bits);
}

// A double that lies between the same two numbers of 24 bits as `value` does: what does not fit into 53 bits is folded into the
// last.
EMBERMAP_ALWAYS_INLINE inline double sticky_double(std::int64_t value) {
  const auto magnitude = value < 0 ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
  const std::uint64_t low = magnitude & 0x7FF;
  const std::uint64_t folded = (magnitude & ~std::uint64_t{0x7FF}) | (low != 0 ? 0x400U : 0U);
  const auto out = static_cast<double>(magnitude >> 53 != 0 ? folded : magnitude);
  return value < 0 ? -out : out;
}

template <class To, class From>
EMBERMAP_ALWAYS_INLINE inline To convert_one(From value) {
  if constexpr (kIsHalf<From>) {
    if constexpr (std::is_same_v<To, From>)
      return value;
    else
      return convert_one<To>(static_cast<float>(value));
  } else if constexpr (kIsHalf<To>) {
    if constexpr (std::is_same_v<From, float>)
      return To(value);
    else if constexpr (std::is_same_v<From, std::int64_t>)
      return To(round_to_odd(sticky_double(value)));
    else
      return To(round_to_odd(static_cast<double>(value)));
  } else {
    return static_cast<To>(value);
  }
}

// The bits of a float without its sign; of an integer all of them. Comparing bits, and counting in the elements' own width, is
// what compilers make vector code of.
template <class T>
using BitsOf = std::conditional_t<
    sizeof(T) == 1, std::uint8_t,
    std::conditional_t<sizeof(T) == 2, std::uint16_t, std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>>;
template <class T>
EMBERMAP_ALWAYS_INLINE inline BitsOf<T> magnitude_bits(T value) {
  const auto bits = std::bit_cast<BitsOf<T>>(value);
  if constexpr (kIsFloating<T>)
    return static_cast<BitsOf<T>>(bits & (std::numeric_limits<BitsOf<T>>::max() >> 1));
  else
    return bits;
}
template <class T>
constexpr BitsOf<T> infinity_bits() {
  if constexpr (std::is_same_v<T, Float16>)
    return 0x7C00;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return 0x7F80;
  else
    return std::bit_cast<BitsOf<T>>(std::numeric_limits<T>::infinity());
}

// How many of the elements have these magnitude_bits().
template <class T>
EMBERMAP_ALWAYS_INLINE inline std::uint64_t count_of(const T* values, std::uint64_t count, BitsOf<T> wanted) {
  std::uint64_t out = 0;
  for (std::uint64_t begin = 0; begin < count; begin += 255) {  // what a byte can count
    const std::uint64_t end = std::min(count, begin + 255);
    BitsOf<T> here = 0;
    for (std::uint64_t i = begin; i < end; ++i)
      here = static_cast<BitsOf<T>>(here + static_cast<BitsOf<T>>(magnitude_bits(values[i]) == wanted));
    out += here;
  }
  return out;
}

// Whether an integer of type To can hold the value exactly.
template <class To, class From>
EMBERMAP_ALWAYS_INLINE inline bool fits(From value) {
  if constexpr (kIsHalf<From>) {
    return fits<To>(static_cast<float>(value));
  } else if constexpr (std::is_floating_point_v<From>) {
    // The limits as floats: -2^(n-1) is exact and so is 2^n, where the maximum itself might round up.
    constexpr From low = static_cast<From>(std::numeric_limits<To>::min());
    constexpr From past = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * From{2};
    return value >= low && value < past && std::trunc(value) == value;
  } else {
    return value >= static_cast<std::int64_t>(std::numeric_limits<To>::min()) &&
           value <= static_cast<std::int64_t>(std::numeric_limits<To>::max());
  }
}

template <class T>
T load(const std::byte* at) {
  T out;
  std::memcpy(&out, at, sizeof out);
  return out;
}

constexpr std::uint64_t kBlock = 4096;  // elements looked at together

template <class From, class To>
std::uint64_t convert_all(const std::byte* in, std::byte* out, std::uint64_t count, ConversionReport& report) {
  for (std::uint64_t begin = 0; begin < count; begin += kBlock) {
    const std::uint64_t n = std::min(kBlock, count - begin);
    // Through buffers of the right alignment: the caller's bytes have none to rely on.
    alignas(64) std::array<From, kBlock> from;
    alignas(64) std::array<To, kBlock> to;
    std::memcpy(from.data(), in + begin * sizeof(From), n * sizeof(From));
    std::uint64_t infinite = 0, zero = 0, bad = 0;
    with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
      std::uint32_t bad_here = 0;
      if constexpr (!kIsFloating<To>)
        for (std::uint64_t i = 0; i < n; ++i) bad_here += fits<To>(from[i]) ? 0U : 1U;
      bad = bad_here;
      if (bad_here != 0) return;
      for (std::uint64_t i = 0; i < n; ++i) to[i] = convert_one<To>(from[i]);
      if constexpr (kIsFloating<To> && !std::is_same_v<From, To>) {
        // What was infinite or zero stays so: the others are those that are more.
        infinite = count_of<To>(to.data(), n, infinity_bits<To>());
        zero = count_of<To>(to.data(), n, 0);
        if (zero != 0) zero -= count_of<From>(from.data(), n, 0);
        if constexpr (kIsFloating<From>)
          if (infinite != 0) infinite -= count_of<From>(from.data(), n, infinity_bits<From>());
      }
    });
    if constexpr (!kIsFloating<To>)
      if (bad != 0)
        for (std::uint64_t i = 0; i < n; ++i)
          if (!fits<To>(from[i])) return begin + i;
    report.became_infinite += infinite;
    report.became_zero += zero;
    std::memcpy(out + begin * sizeof(To), to.data(), n * sizeof(To));
  }
  return count;
}

template <class Use>
auto with_type(DType dtype, Use use) {
  switch (dtype) {
    case DType::kFloat32: return use(std::type_identity<float>{});
    case DType::kFloat16: return use(std::type_identity<Float16>{});
    case DType::kBFloat16: return use(std::type_identity<BFloat16>{});
    case DType::kFloat64: return use(std::type_identity<double>{});
    case DType::kInt8: return use(std::type_identity<std::int8_t>{});
    case DType::kUInt8: return use(std::type_identity<std::uint8_t>{});
    case DType::kInt32: return use(std::type_identity<std::int32_t>{});
    case DType::kInt64: break;
  }
  return use(std::type_identity<std::int64_t>{});
}

std::string element_text(DType dtype, const std::byte* at) {
  return with_type(dtype, [&](auto type) -> std::string {
    using T = typename decltype(type)::type;
    const T value = load<T>(at);
    if constexpr (kIsHalf<T>)
      return fmt::format("{}", static_cast<float>(value));
    else
      return fmt::format("{}", value);
  });
}

}  // namespace

std::uint64_t try_convert_elements(DType from, const std::byte* in, DType to, std::byte* out, std::uint64_t count,
                                   ConversionReport& report) {
  if (count == 0) return 0;
  if (from == to) {
    std::memcpy(out, in, count * item_size(from));
    return count;
  }
  return with_type(from, [&](auto source) {
    return with_type(to, [&](auto target) {
      return convert_all<typename decltype(source)::type, typename decltype(target)::type>(in, out, count, report);
    });
  });
}

std::string conversion_failure(DType from, const std::byte* element, DType to) {
  return fmt::format("value {} of {} is no whole number that {} can hold", element_text(from, element), dtype_name(from),
                     dtype_name(to));
}

void convert_elements(DType from, const std::byte* in, DType to, std::byte* out, std::uint64_t count, ConversionReport& report) {
  const std::uint64_t done = try_convert_elements(from, in, to, out, count, report);
  if (done < count)
    throw DTypeError(fmt::format("{} (element {})", conversion_failure(from, in + done * item_size(from), to), done));
}

void convert_rows(const RowReader& reader, std::uint64_t first, std::uint64_t count, const std::byte* in, DType to,
                  std::byte* out, ConversionReport& report) {
  const DType from = reader.dtype();
  const std::uint64_t dim = reader.dim();
  const std::uint64_t good = try_convert_elements(from, in, to, out, count * dim, report);
  if (good < count * dim)
    throw DTypeError(fmt::format("{}: {} (row {}, column {})", reader.description(),
                                 conversion_failure(from, in + good * item_size(from), to), first + good / dim, good % dim));
}

}  // namespace embermap
