#include "base/half.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace embermap {
namespace {

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// A 16-bit float with kMantissa bits behind the point and least exponent kLeast, spelt out in double arithmetic: what IEEE 754
// says.
template <int kMantissa, int kLeast>
struct Reference {
  static constexpr int kExponentOnes = (1 << (15 - kMantissa)) - 1;
  static constexpr std::uint16_t kInfinity = static_cast<std::uint16_t>(kExponentOnes << kMantissa);

  static double decode(std::uint16_t bits) {
    const int exponent = (bits >> kMantissa) & kExponentOnes;
    const int mantissa = bits & ((1 << kMantissa) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == kExponentOnes) return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, kLeast - kMantissa);
    return sign * std::ldexp((1 << kMantissa) + mantissa, exponent - 1 + kLeast - kMantissa);
  }

  static std::uint16_t encode(float value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::abs(static_cast<double>(value));
    if (std::isinf(size)) return static_cast<std::uint16_t>(sign | kInfinity);
    if (size == 0) return sign;
    const int exponent = std::max(std::ilogb(size), kLeast);
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, kMantissa - exponent)));  // to nearest, ties to even
    const int out = ((exponent - kLeast) << kMantissa) + units;
    return static_cast<std::uint16_t>(sign | std::min<int>(out, kInfinity));
  }
};
using Half = Reference<10, -14>;
using Brain = Reference<7, -126>;

template <class T>
std::uint16_t encode(float value) {
  return T(value).bits;
}
template <class T>
float decode(std::uint16_t bits) {
  T value;
  value.bits = bits;
  return static_cast<float>(value);
}

template <class T, class Expected>
void decodes_every_value() {
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double expected = Expected::decode(bits);
    const float value = decode<T>(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << i;
      ASSERT_EQ(std::signbit(value), i >= 0x8000) << i;
      ASSERT_TRUE(std::isnan(decode<T>(encode<T>(value)))) << i;
    } else {
      ASSERT_EQ(bits_of(value), bits_of(static_cast<float>(expected))) << i;
      ASSERT_EQ(encode<T>(value), bits) << i;
    }
  }
}

TEST(Half, Float16DecodesEveryValueAndEncodesItBack) { decodes_every_value<Float16, Half>(); }
TEST(Half, BFloat16DecodesEveryValueAndEncodesItBack) { decodes_every_value<BFloat16, Brain>(); }

// The middle between two neighbours is a float for both types: it goes to the even one, and the floats beside it to the nearer
// one.
template <class T, class Expected>
void rounds_ties_to_even() {
  for (std::uint32_t i = 0; i + 1 <= Expected::kInfinity; ++i) {
    const double low = Expected::decode(static_cast<std::uint16_t>(i));
    const double high = i + 1 == Expected::kInfinity ? 2 * low - Expected::decode(static_cast<std::uint16_t>(i - 1))
                                                     : Expected::decode(static_cast<std::uint16_t>(i + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    if (static_cast<double>(middle) != (low + high) / 2) continue;  // bfloat16 below the floats' own range
    const auto even = static_cast<std::uint16_t>(i + (i & 1));
    ASSERT_EQ(encode<T>(middle), even) << i;
    ASSERT_EQ(encode<T>(-middle), even | 0x8000) << i;
    ASSERT_EQ(encode<T>(float_of(bits_of(middle) - 1)), i) << i;
    ASSERT_EQ(encode<T>(float_of(bits_of(middle) + 1)), i + 1) << i;
  }
}

TEST(Half, Float16RoundsTiesToEven) { rounds_ties_to_even<Float16, Half>(); }
TEST(Half, BFloat16RoundsTiesToEven) { rounds_ties_to_even<BFloat16, Brain>(); }

template <class T, class Expected>
void encodes_a_dense_sample() {
  for (std::uint64_t i = 0; i < (std::uint64_t{1} << 32); i += 1021) {  // a prime: all low bits occur
    const float value = float_of(static_cast<std::uint32_t>(i));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(decode<T>(encode<T>(value)))) << i;
    } else {
      ASSERT_EQ(encode<T>(value), Expected::encode(value)) << i;
    }
  }
}

TEST(Half, Float16EncodesADenseSampleOfFloats) { encodes_a_dense_sample<Float16, Half>(); }
TEST(Half, BFloat16EncodesADenseSampleOfFloats) { encodes_a_dense_sample<BFloat16, Brain>(); }

TEST(Half, Float16KnownValues) {
  EXPECT_EQ(encode<Float16>(65504.0F), 0x7BFF);
  EXPECT_EQ(encode<Float16>(65519.996F), 0x7BFF);
  EXPECT_EQ(encode<Float16>(65520.0F), 0x7C00);
  EXPECT_EQ(encode<Float16>(1e5F), 0x7C00);
  EXPECT_EQ(encode<Float16>(-1e30F), 0xFC00);
  EXPECT_EQ(encode<Float16>(5.9604645e-8F), 0x0001);
  EXPECT_EQ(encode<Float16>(6e-8F), 0x0001);
  EXPECT_EQ(encode<Float16>(1e-8F), 0x0000);
  EXPECT_EQ(encode<Float16>(2.9802322e-8F), 0x0000);  // half of the smallest: a tie, to even
  EXPECT_EQ(encode<Float16>(2.9802326e-8F), 0x0001);
  EXPECT_EQ(encode<Float16>(-0.0F), 0x8000);
  EXPECT_EQ(encode<Float16>(1e-45F), 0x0000);
  EXPECT_EQ(encode<Float16>(6.103515625e-5F), 0x0400);  // 2^-14, the least normal
  EXPECT_EQ(encode<Float16>(6.1005353e-5F), 0x0400);    // a tie between the greatest subnormal and it
}

TEST(Half, BFloat16KnownValues) {
  EXPECT_EQ(encode<BFloat16>(1.0F), 0x3F80);
  EXPECT_EQ(encode<BFloat16>(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(encode<BFloat16>(float_of(0x7F7F7FFF)), 0x7F7F);
  EXPECT_EQ(encode<BFloat16>(float_of(0x7F7F8000)), 0x7F80);
  EXPECT_EQ(encode<BFloat16>(float_of(0x00000001)), 0x0000);
  EXPECT_EQ(encode<BFloat16>(float_of(0x00008001)), 0x0001);  // a float subnormal
  EXPECT_EQ(encode<BFloat16>(-0.0F), 0x8000);
}

TEST(Half, NaNStaysNaNWithSignAndTopOfThePayload) {
  for (const std::uint32_t nan : {0x7F800001U, 0x7F801000U, 0x7FBFFFFFU, 0x7FC00000U, 0x7FFFFFFFU})
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const std::uint16_t half = encode<Float16>(float_of(sign | nan));
      EXPECT_EQ(half, (sign >> 16) | 0x7E00U | ((nan >> 13) & 0x1FFU)) << std::hex << nan;
      const std::uint16_t brain = encode<BFloat16>(float_of(sign | nan));
      EXPECT_EQ(brain, (sign >> 16) | 0x7FC0U | ((nan >> 16) & 0x3FU)) << std::hex << nan;
    }
}

#if defined(__x86_64__)
__attribute__((target("f16c"))) std::uint16_t hardware_encode(float value) {
  return static_cast<std::uint16_t>(
      _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), 0));
}
__attribute__((target("f16c"))) float hardware_decode(std::uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits))));
}

TEST(Half, Float16AgreesWithTheProcessor) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "a processor of before AVX2, which may convert no float16";
  for (std::uint64_t i = 0; i < (std::uint64_t{1} << 32); i += 1021) {
    const float value = float_of(static_cast<std::uint32_t>(i));
    ASSERT_EQ(encode<Float16>(value), hardware_encode(value)) << i;  // NaNs too
  }
  for (std::uint32_t i = 0; i <= 0xFFFF; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    if ((bits & 0x7E00U) == 0x7C00U && (bits & 0x1FFU) != 0) continue;  // a signalling NaN, which the processor makes quiet
    ASSERT_EQ(bits_of(decode<Float16>(bits)), bits_of(hardware_decode(bits))) << i;
  }
}
#endif

TEST(Half, DefaultIsZero) {
  EXPECT_EQ(Float16().bits, 0);
  EXPECT_EQ(BFloat16().bits, 0);
}

}  // namespace
}  // namespace embermap
