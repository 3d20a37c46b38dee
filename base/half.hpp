// float16 and bfloat16 as 16 bits of storage, converted with round-to-nearest-even in plain integer arithmetic, so that host and
// device, with or without hardware support, give the same bits. Arithmetic is done in float.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define EMBERMAP_HOST_DEVICE __host__ __device__
#else
#define EMBERMAP_HOST_DEVICE
#endif

namespace embermap {

namespace detail {
EMBERMAP_HOST_DEVICE inline std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);  // std::bit_cast is not callable from a kernel without relaxed constexpr
  return bits;
}
EMBERMAP_HOST_DEVICE inline float bits_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
// All ones if a < b, for a and b in [0, 2^31): where `?:` may become a branch, this stays arithmetic, and loops become vector
// code.
EMBERMAP_HOST_DEVICE inline std::uint32_t mask_if_less(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(a - b) >> 31);
}
EMBERMAP_HOST_DEVICE inline std::uint32_t select(std::uint32_t mask, std::uint32_t if_ones, std::uint32_t if_zeros) {
  return (if_ones & mask) | (if_zeros & ~mask);
}
}  // namespace detail

struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  EMBERMAP_HOST_DEVICE explicit BFloat16(float value) {
    const std::uint32_t b = detail::float_bits(value);
    const std::uint32_t nan = b | 0x400000U;  // stays NaN, made quiet
    const std::uint32_t rounded = b + 0x7FFFU + ((b >> 16) & 1U);
    bits = static_cast<std::uint16_t>(detail::select(detail::mask_if_less(0x7F800000U, b & 0x7FFFFFFFU), nan, rounded) >> 16);
  }
  EMBERMAP_HOST_DEVICE explicit operator float() const { return detail::bits_float(static_cast<std::uint32_t>(bits) << 16); }
};

struct Float16 {
  std::uint16_t bits = 0;

  Float16() = default;
  EMBERMAP_HOST_DEVICE explicit Float16(float value) {
    const std::uint32_t b = detail::float_bits(value);
    const std::uint32_t magnitude = b & 0x7FFFFFFFU;
    // From 2^-14 to 65520: the exponent moves by 112 and the mantissa loses 13 bits, rounded to even; a carry moves on to the
    // exponent.
    const std::uint32_t normal = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
    // Below 2^-14: a multiple of 2^-24, which is the spacing of 0.5, so that adding 0.5 rounds to it.
    const std::uint32_t is_small = detail::mask_if_less(magnitude, 0x38800000U);
    const std::uint32_t small = detail::float_bits(detail::bits_float(magnitude & is_small) + 0.5F) - 0x3F000000U;
    const std::uint32_t nan = 0x7E00U | ((magnitude >> 13) & 0x1FFU);  // the top of the payload stays; made quiet
    std::uint32_t out = detail::select(is_small, small, normal);
    out = detail::select(detail::mask_if_less(0x477FEFFFU, magnitude), 0x7C00U, out);  // 65520 and up round to infinity
    out = detail::select(detail::mask_if_less(0x7F800000U, magnitude), nan, out);
    bits = static_cast<std::uint16_t>(((b >> 16) & 0x8000U) | out);
  }
  EMBERMAP_HOST_DEVICE explicit operator float() const {
    const std::uint32_t sign = (std::uint32_t{bits} & 0x8000U) << 16;
    const std::uint32_t magnitude = std::uint32_t{bits} & 0x7FFFU;
    const std::uint32_t shifted = magnitude << 13;
    // Below 2^-14 the mantissa counts units of 2^-24: put behind 0.5, which has that spacing, and 0.5 taken away. Exact.
    const std::uint32_t small = detail::float_bits(detail::bits_float(0x3F000000U | (magnitude & 0x3FFU)) - 0.5F);
    std::uint32_t out = detail::select(detail::mask_if_less(magnitude, 0x400U), small, shifted + (112U << 23));
    out = detail::select(detail::mask_if_less(0x7BFFU, magnitude), shifted | 0x7F800000U, out);  // infinity and NaN
    return detail::bits_float(sign | out);
  }
};

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

static_assert(sizeof(BFloat16) == 2 && sizeof(Float16) == 2);

}  // namespace embermap
