#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/half.hpp"
#include "io/rows.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

template <class From, class To>
std::vector<To> convert(DType from, const std::vector<From>& in, DType to, ConversionReport& report) {
  std::vector<To> out(in.size());
  convert_elements(from, reinterpret_cast<const std::byte*>(in.data()), to, reinterpret_cast<std::byte*>(out.data()), in.size(),
                   report);
  return out;
}

template <class From, class To>
std::vector<To> convert(DType from, const std::vector<From>& in, DType to) {
  ConversionReport report;
  return convert<From, To>(from, in, to, report);
}

template <class T>
std::vector<std::uint16_t> bits(const std::vector<T>& in) {
  std::vector<std::uint16_t> out;
  for (const T& value : in) out.push_back(value.bits);
  return out;
}

// The half closest to `value`, ties to even, found by looking at all of them.
std::uint16_t nearest(double value, const std::vector<double>& halves) {
  std::uint16_t best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (std::uint16_t i = 0; i < halves.size(); ++i) {
    const double d = std::fabs(halves[i] - std::fabs(value));
    if (d < distance || (d == distance && (i & 1) == 0)) {
      distance = d;
      best = i;
    }
  }
  return static_cast<std::uint16_t>(best | (std::signbit(value) ? 0x8000U : 0U));
}

TEST(ConvertElements, Float32ToFloat16AndBfloat16SpecialValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> in{65504, 65520, 1e5F, 6e-8F, 1e-8F, 5.96e-8F, -0.0F, nan, infinity, -infinity};
  ConversionReport report;
  EXPECT_THAT(bits(convert<float, Float16>(DType::kFloat32, in, DType::kFloat16, report)),
              ElementsAre(0x7BFF, 0x7C00, 0x7C00, 1, 0, 1, 0x8000, 0x7E00, 0x7C00, 0xFC00));
  EXPECT_EQ(report.became_infinite, 2U);
  EXPECT_EQ(report.became_zero, 1U);
  report = {};
  const auto b = bits(
      convert<float, BFloat16>(DType::kFloat32, {65504, 3.4e38F, 1e-8F, -0.0F, nan, 1e-41F, 1e-45F}, DType::kBFloat16, report));
  EXPECT_THAT(b, ElementsAre(0x4780, 0x7F80, 0x322C, 0x8000, 0x7FC0, 0, 0));
  EXPECT_EQ(report.became_infinite, 1U);
  EXPECT_EQ(report.became_zero, 2U);
}

TEST(ConvertElements, Float64ToFloat16RoundsOnce) {
  const std::vector<double> in{1 + std::ldexp(1, -11), 1 + 3 * std::ldexp(1, -11), 2049, 65519, 65520, 1e-8};
  ConversionReport report;
  const auto out = convert<double, Float16>(DType::kFloat64, in, DType::kFloat16, report);
  std::vector<float> values;
  for (const Float16 value : out) values.push_back(static_cast<float>(value));
  EXPECT_THAT(values, ElementsAre(1.0F, 1.001953125F, 2048.0F, 65504.0F, std::numeric_limits<float>::infinity(), 0.0F));
  // Just above a tie: through float32 these would become the tie and then round to even, the wrong way.
  const double tie = 1 + std::ldexp(1, -11);
  EXPECT_THAT(
      bits(convert<double, Float16>(
          DType::kFloat64, {tie + std::ldexp(1, -40), tie, std::nextafter(tie, 2), std::nextafter(tie, 0)}, DType::kFloat16)),
      ElementsAre(0x3C01, 0x3C00, 0x3C01, 0x3C00));
  const double bf_tie = 1 + std::ldexp(1, -8);
  EXPECT_THAT(bits(convert<double, BFloat16>(DType::kFloat64, {bf_tie + std::ldexp(1, -40), bf_tie, -std::nextafter(bf_tie, 0)},
                                             DType::kBFloat16)),
              ElementsAre(0x3F81, 0x3F80, 0xBF80));
}

TEST(ConvertElements, Float64ToFloat16IsTheNearestForRandomValues) {
  std::vector<double> halves;
  for (unsigned i = 0; i < 0x7C00; ++i) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(i);
    halves.push_back(static_cast<float>(half));
  }
  std::mt19937_64 random(7);
  std::vector<double> in;
  for (int i = 0; i < 300; ++i) {
    const std::size_t at = random() % (halves.size() - 1);
    const double middle = (halves[at] + halves[at + 1]) / 2;
    in.insert(in.end(),
              {middle, std::nextafter(middle, 1e9), -std::nextafter(middle, 0), halves[at], std::nextafter(halves[at], 1e9)});
  }
  const auto out = bits(convert<double, Float16>(DType::kFloat64, in, DType::kFloat16));
  for (std::size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], nearest(in[i], halves)) << in[i];
}

TEST(ConvertElements, Float64ToBfloat16AtTheLargestAndSmallest) {
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  const double half_way = std::ldexp(511, 119);  // between the largest bfloat16 and 2^128
  ConversionReport report;
  EXPECT_THAT(bits(convert<double, BFloat16>(DType::kFloat64,
                                             {largest, 1e300, std::nextafter(half_way, 0), half_way, -1e300, 1e-300,
                                              std::ldexp(1, -134), std::nextafter(std::ldexp(1, -134), 1)},
                                             DType::kBFloat16, report)),
              ElementsAre(0x7F80, 0x7F80, 0x7F7F, 0x7F80, 0xFF80, 0, 0, 1));
  EXPECT_EQ(report.became_infinite, 4U);
  EXPECT_EQ(report.became_zero, 2U);
}

TEST(ConvertElements, IntegersToFloatsRoundToNearest) {
  constexpr std::int64_t kLow = std::numeric_limits<std::int64_t>::min(), kHigh = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT((convert<std::int64_t, float>(
                  DType::kInt64, {0, -1, 16777217, 16777219, kLow, kHigh, (std::int64_t{1} << 62) + (std::int64_t{1} << 38) + 1},
                  DType::kFloat32)),
              ElementsAre(0, -1, 16777216, 16777220, -0x1p63F, 0x1p63F, 0x1.000002p62F));
  EXPECT_THAT((convert<std::int64_t, double>(DType::kInt64, {(std::int64_t{1} << 53) + 1, kHigh}, DType::kFloat64)),
              ElementsAre(0x1p53, 0x1p63));
  ConversionReport report;
  EXPECT_THAT(bits(convert<std::int64_t, Float16>(DType::kInt64, {2049, 65519, 65520, -65520, kLow, 1}, DType::kFloat16, report)),
              ElementsAre(0x6800, 0x7BFF, 0x7C00, 0xFC00, 0xFC00, 0x3C00));
  EXPECT_EQ(report.became_infinite, 3U);
  // A tie of bfloat16 and one more than it, where float64 can no longer tell them apart.
  const std::int64_t tie = (std::int64_t{1} << 62) + (std::int64_t{1} << 54);
  EXPECT_THAT(bits(convert<std::int64_t, BFloat16>(DType::kInt64, {tie, tie + 1, tie - 1, -tie - 1, kHigh}, DType::kBFloat16)),
              ElementsAre(0x5E80, 0x5E81, 0x5E80, 0xDE81, 0x5F00));
  EXPECT_THAT(bits(convert<std::int32_t, BFloat16>(DType::kInt32, {257, 258, 259, std::numeric_limits<std::int32_t>::min()},
                                                   DType::kBFloat16)),
              ElementsAre(0x4380, 0x4381, 0x4382, 0xCF00));
}

TEST(ConvertElements, FloatsToIntegersDemandWholeValuesInRange) {
  const auto refuse = [](std::vector<float> in, DType to) {
    in.insert(in.begin(), 5000, 1.0F);
    std::vector<std::byte> out(in.size() * 8);
    return error_of<DTypeError>([&] {
      ConversionReport report;
      convert_elements(DType::kFloat32, reinterpret_cast<const std::byte*>(in.data()), to, out.data(), in.size(), report);
    });
  };
  EXPECT_THAT(refuse({7, -1, 256}, DType::kUInt8), AllOf(HasSubstr("-1"), HasSubstr("element 5001"), HasSubstr("uint8")));
  EXPECT_THAT(refuse({256}, DType::kUInt8), HasSubstr("256"));
  EXPECT_THAT(refuse({300.7F}, DType::kUInt8), HasSubstr("300.7"));
  EXPECT_THAT(refuse({0.5F}, DType::kInt64), HasSubstr("0.5"));
  EXPECT_THAT(refuse({std::numeric_limits<float>::quiet_NaN()}, DType::kInt32), HasSubstr("nan"));
  EXPECT_THAT(refuse({std::numeric_limits<float>::infinity()}, DType::kInt64), HasSubstr("inf"));
  EXPECT_THAT(refuse({0x1p31F}, DType::kInt32), HasSubstr("element 5000"));
  EXPECT_THAT(refuse({0x1p63F}, DType::kInt64), HasSubstr("element 5000"));
  EXPECT_THAT((convert<float, std::int32_t>(DType::kFloat32, {-0x1p31F, -0.0F, 2147483520.0F}, DType::kInt32)),
              ElementsAre(std::numeric_limits<std::int32_t>::min(), 0, 2147483520));
  EXPECT_THAT((convert<double, std::int64_t>(DType::kFloat64, {-0x1p63, 9007199254740993.0}, DType::kInt64)),
              ElementsAre(std::numeric_limits<std::int64_t>::min(), 9007199254740992));
  EXPECT_THAT((convert<float, std::uint8_t>(DType::kFloat32, {0, 255, 128}, DType::kUInt8)), ElementsAre(0, 255, 128));
}

TEST(ConvertElements, IntegersToNarrowerIntegersAreNeverWrapped) {
  EXPECT_THAT((convert<std::int64_t, std::int8_t>(DType::kInt64, {-128, 127}, DType::kInt8)), ElementsAre(-128, 127));
  for (const std::int64_t bad :
       {std::int64_t{-129}, std::int64_t{128}, std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::min()})
    EXPECT_THROW((convert<std::int64_t, std::int8_t>(DType::kInt64, {0, bad}, DType::kInt8)), DTypeError);
  EXPECT_THROW((convert<std::int8_t, std::uint8_t>(DType::kInt8, {-1}, DType::kUInt8)), DTypeError);
  EXPECT_THROW((convert<std::uint8_t, std::int8_t>(DType::kUInt8, {128}, DType::kInt8)), DTypeError);
  EXPECT_THAT((convert<std::uint8_t, std::int64_t>(DType::kUInt8, {255}, DType::kInt64)), ElementsAre(255));
}

TEST(ConvertElements, WideningIsExactAndHalvesConvertThroughFloat) {
  std::vector<Float16> all;
  for (unsigned i = 0; i < 65536; ++i) {
    Float16 half;
    half.bits = static_cast<std::uint16_t>(i);
    all.push_back(half);
  }
  ConversionReport report;
  const auto wide = convert<Float16, double>(DType::kFloat16, all, DType::kFloat64, report);
  const auto back = convert<double, Float16>(DType::kFloat64, wide, DType::kFloat16, report);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(wide[i]))
      ASSERT_EQ(back[i].bits & 0x7E00U, 0x7E00U);
    else
      ASSERT_EQ(back[i].bits, all[i].bits);
  }
  EXPECT_EQ(report.became_infinite + report.became_zero, 0U);
  BFloat16 huge(1e38F), tiny(1e-30F);
  EXPECT_THAT(bits(convert<BFloat16, Float16>(DType::kBFloat16, {huge, tiny, BFloat16(1.5F)}, DType::kFloat16, report)),
              ElementsAre(0x7C00, 0, 0x3E00));
  EXPECT_EQ(report.became_infinite, 1U);
  EXPECT_EQ(report.became_zero, 1U);
}

TEST(ConvertElements, AnyCountAndAlignment) {
  for (const std::size_t count : {0U, 1U, 15U, 16U, 17U, 4095U, 4096U, 4097U, 10000U}) {
    std::vector<std::byte> in(count * 4 + 1), out(count * 2 + 1 + 1, std::byte{0xAA});
    for (std::size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(i % 2048);
      std::memcpy(in.data() + 1 + i * 4, &value, 4);
    }
    ConversionReport report;
    convert_elements(DType::kFloat32, in.data() + 1, DType::kFloat16, out.data() + 1, count, report);
    for (std::size_t i = 0; i < count; ++i) {
      Float16 half;
      std::memcpy(&half, out.data() + 1 + i * 2, 2);
      ASSERT_EQ(static_cast<float>(half), static_cast<float>(i % 2048));
    }
    EXPECT_EQ(out.back(), std::byte{0xAA});  // nothing past the end
  }
}

}  // namespace
}  // namespace embermap
