#include "store/initializer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/half.hpp"
#include "base/philox.hpp"
#include "base/vector_dispatch.hpp"

namespace embermap {
namespace {

using Block = std::array<std::uint32_t, 4>;

// Philox4x32-10 once more, word by word, as the paper has it.
Block philox_by_the_book(Block counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ULL * counter[0];
    const std::uint64_t b = 0xCD9E8D57ULL * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
  }
  return counter;
}

Block block_of(std::uint64_t seed, std::uint64_t row, std::uint64_t block) {
  return philox_by_the_book({static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(row >> 32),
                             static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32)},
                            {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
}

struct KnownAnswer {
  Block counter;
  std::array<std::uint32_t, 2> key;
  Block words;
};
const KnownAnswer kKnownAnswers[] = {
    // the distribution's own vectors
    {{0, 0, 0, 0}, {0, 0}, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
    {{~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
    {{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
     {0xA4093822, 0x299F31D0},
     {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}},
};

TEST(Philox, GivesTheKnownAnswersInEveryLane) {
  for (const KnownAnswer& known : kKnownAnswers) {
    detail::PhiloxBlocks blocks{};
    for (std::size_t j = 0; j < 4; ++j) std::fill(std::begin(blocks.word[j]), std::end(blocks.word[j]), known.counter[j]);
    detail::philox(blocks, detail::kPhiloxBlocks, (std::uint64_t{known.key[1]} << 32) | known.key[0]);
    for (std::size_t j = 0; j < 4; ++j)
      for (std::size_t i = 0; i < detail::kPhiloxBlocks; ++i) ASSERT_EQ(blocks.word[j][i], known.words[j]) << j << ", lane " << i;
    EXPECT_EQ(philox_by_the_book(known.counter, known.key), known.words);
  }
}

template <class T>
struct Of;
template <>
struct Of<float> {
  static constexpr DType dtype = DType::kFloat32;
};
template <>
struct Of<double> {
  static constexpr DType dtype = DType::kFloat64;
};
template <>
struct Of<Float16> {
  static constexpr DType dtype = DType::kFloat16;
};
template <>
struct Of<BFloat16> {
  static constexpr DType dtype = DType::kBFloat16;
};
template <>
struct Of<std::int8_t> {
  static constexpr DType dtype = DType::kInt8;
};
template <>
struct Of<std::uint8_t> {
  static constexpr DType dtype = DType::kUInt8;
};
template <>
struct Of<std::int32_t> {
  static constexpr DType dtype = DType::kInt32;
};
template <>
struct Of<std::int64_t> {
  static constexpr DType dtype = DType::kInt64;
};

template <class T>
std::vector<T> make(const Initializer& init, std::uint64_t rows, std::uint64_t dim, std::uint64_t seed = 1,
                    std::uint64_t first_row = 0) {
  std::vector<T> out(rows * dim);
  generate_rows(init, seed, first_row, rows, dim, Of<T>::dtype, reinterpret_cast<std::byte*>(out.data()), dim * sizeof(T));
  return out;
}

template <class T>
double value_of(T value) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>)
    return static_cast<double>(value);
  else
    return static_cast<double>(static_cast<float>(value));
}

// --- the definition of an element ---

TEST(Initializer, UniformElementsAreTheTopBitsOfTheirWords) {
  constexpr std::uint64_t kSeed = 0x123456789ABCDEF0U;
  constexpr std::uint64_t kRow = (std::uint64_t{7} << 32) + 5;
  const auto floats = make<float>(Uniform{-1, 3}, 3, 7, kSeed, kRow);
  const auto doubles = make<double>(Uniform{-1, 3}, 3, 7, kSeed, kRow);
  const auto halves = make<Float16>(Uniform{-1, 3}, 3, 7, kSeed, kRow);
  for (std::uint64_t row = 0; row < 3; ++row)
    for (std::uint64_t j = 0; j < 7; ++j) {
      const std::uint32_t word = block_of(kSeed, kRow + row, j / 4)[j % 4];
      EXPECT_EQ(floats[row * 7 + j], static_cast<float>(-1 + 4 * std::ldexp(word >> 8, -24)));
      EXPECT_EQ(halves[row * 7 + j].bits, Float16(floats[row * 7 + j]).bits);
      const Block pair = block_of(kSeed, kRow + row, j / 2);
      const std::uint64_t wide = (std::uint64_t{pair[j % 2 * 2]} << 32) | pair[j % 2 * 2 + 1];
      EXPECT_EQ(doubles[row * 7 + j], -1 + 4 * std::ldexp(static_cast<double>(wide >> 11), -53));
    }
}

TEST(Initializer, IntegersAreTheBlockScaledToTheRange) {
  constexpr std::uint64_t kSeed = 99;
  const auto bytes = make<std::int8_t>(Uniform{-100, 101}, 5, 3, kSeed, 10);
  const auto all = make<std::int64_t>(Uniform{-0x1p63, 0x1p63}, 5, 3, kSeed, 10);
  for (std::uint64_t row = 0; row < 5; ++row)
    for (std::uint64_t j = 0; j < 3; ++j) {
      const Block block = block_of(kSeed, 10 + row, j);
      const std::uint64_t high = (std::uint64_t{block[1]} << 32) | block[0];
      EXPECT_EQ(bytes[row * 3 + j], -100 + static_cast<int>(std::floor(std::ldexp(static_cast<long double>(high), -64) * 201)));
      EXPECT_EQ(static_cast<std::uint64_t>(all[row * 3 + j]), (std::uint64_t{1} << 63) + high);
    }
}

// Against the C library, in long double: what our own logarithm, sine and cosine should give.
template <class T>
double worst_error_of_normals(std::uint64_t rows, std::uint64_t dim, std::uint64_t seed) {
  const auto values = make<T>(Normal{0, 1}, rows, dim, seed);
  const long double pi = std::acos(-1.0L);
  double worst = 0;
  for (std::uint64_t row = 0; row < rows; ++row)
    for (std::uint64_t j = 0; j < dim; ++j) {
      long double radius_part, angle_part;
      if constexpr (sizeof(T) == 8) {
        const Block block = block_of(seed, row, j / 2);
        radius_part = std::ldexp(static_cast<long double>((std::uint64_t{block[0]} << 20) | (block[1] >> 12)) + 0.5L, -52);
        angle_part = std::ldexp(static_cast<long double>((std::uint64_t{block[2]} << 20) | (block[3] >> 12)) + 0.5L, -52);
      } else {
        const Block block = block_of(seed, row, j / 4);
        radius_part = std::ldexp(static_cast<long double>(block[j % 4 / 2 * 2]) + 0.5L, -32);
        angle_part = std::ldexp(static_cast<long double>(block[j % 4 / 2 * 2 + 1]) + 0.5L, -32);
      }
      const long double radius = std::sqrt(-2 * std::log(radius_part));
      const long double expected = radius * (j % 2 == 0 ? std::cos(2 * pi * angle_part) : std::sin(2 * pi * angle_part));
      worst = std::max(worst, static_cast<double>(std::abs(static_cast<long double>(value_of(values[row * dim + j])) - expected) /
                                                  std::max(std::abs(expected), 1e-3L)));
    }
  return worst;
}

TEST(Initializer, NormalElementsAreBoxMullerPairsOfTheirWords) {
  EXPECT_LT(worst_error_of_normals<float>(400, 101, 3), 6.0e-8);    // half a unit in the last place is 5.96e-8
  EXPECT_LT(worst_error_of_normals<double>(400, 101, 3), 1.5e-15);  // 2^-53 is 1.1e-16
}

// First values of a table with seed 1: they must not change, or tables that were never materialised would.
TEST(Initializer, ValuesAreTheSameForEver) {
  const auto show = [](const auto& values) {
    std::vector<std::uint64_t> bits;
    for (const auto& value : values) {
      std::uint64_t out = 0;
      std::memcpy(&out, &value, sizeof value);
      bits.push_back(out);
    }
    return bits;
  };
  using testing::ElementsAre;
  EXPECT_THAT(show(make<float>(Normal{0, 0.02}, 1, 6)),
              ElementsAre(0x3BF94CA7U, 0xBBC22B2EU, 0xBBA3566EU, 0xBCA477FCU, 0xBB5854D1U, 0x3D5B4130U));
  EXPECT_THAT(show(make<double>(Normal{1, 2}, 1, 5)), ElementsAre(0x3FC60ACAF62E45C4U, 0x3FE02BAFBB129604U, 0x3FFE98BADF535638U,
                                                                  0x401923BD71EF8706U, 0x3FF0583CA67288ADU));
  EXPECT_THAT(show(make<Float16>(Normal{0, 1}, 1, 5)), ElementsAre(0x3616U, 0xB4BEU, 0xB3FAU, 0xBC04U, 0xB148U));
  EXPECT_THAT(show(make<BFloat16>(Normal{0, 1}, 1, 5)), ElementsAre(0x3EC3U, 0xBE98U, 0xBE7FU, 0xBF80U, 0xBE29U));
  EXPECT_THAT(show(make<float>(Uniform{-0.05, 0.05}, 1, 5)),
              ElementsAre(0x3D1FD9A3U, 0x3D21A9B0U, 0x3C0C740DU, 0x3CAD1220U, 0xBD418E3AU));
  EXPECT_THAT(show(make<double>(Uniform{-1, 1}, 1, 3)),
              ElementsAre(0x3FE8FA019C394282U, 0x3FC5F222C0B615A8U, 0xBFEE3E38FB6F5F68U));
  EXPECT_THAT(show(make<std::uint8_t>(Uniform{0, 256}, 1, 5)), ElementsAre(0xE5U, 0x42U, 0x8CU, 0xDCU, 0x70U));
}

// --- independence of how it is asked for ---

std::vector<std::pair<Initializer, DType>> all_kinds() {
  std::vector<std::pair<Initializer, DType>> all;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    all.emplace_back(Normal{0.5, 2}, dtype);
    all.emplace_back(Uniform{-1, 2}, dtype);
    all.emplace_back(Constant{0.1}, dtype);
    all.emplace_back(Zeros{}, dtype);
  }
  for (const DType dtype : {DType::kInt8, DType::kUInt8, DType::kInt32, DType::kInt64}) {
    all.emplace_back(Uniform{0, 100}, dtype);
    all.emplace_back(Constant{77}, dtype);
    all.emplace_back(Zeros{}, dtype);
  }
  return all;
}

std::string describe(const Initializer& init, DType dtype) {
  return std::to_string(init.index()) + " of " + std::string(dtype_name(dtype));
}

TEST(Initializer, PiecesOfEverySizeMakeTheSameRows) {
  for (const auto& [init, dtype] : all_kinds())
    for (const std::uint64_t dim : {1U, 2U, 3U, 4U, 5U, 7U, 63U, 64U, 65U, 255U, 256U, 257U, 301U, 1030U}) {
      const std::uint64_t row_bytes = dim * item_size(dtype);
      const std::uint64_t rows = dim > 300 ? 9 : 70;
      std::vector<std::byte> whole(rows * row_bytes);
      generate_rows(init, 5, 1000, rows, dim, dtype, whole.data(), row_bytes);
      for (const std::uint64_t piece : {1U, 3U, 64U}) {
        // At an odd address, with room between the rows that must stay as it is.
        const std::uint64_t stride = row_bytes + 5;
        std::vector<std::byte> parts(rows * stride + 1, std::byte{0xEE});
        for (std::uint64_t row = 0; row < rows; row += piece)
          generate_rows(init, 5, 1000 + row, std::min(piece, rows - row), dim, dtype, parts.data() + 1 + row * stride, stride);
        EXPECT_EQ(parts[0], std::byte{0xEE});
        for (std::uint64_t row = 0; row < rows; ++row) {
          const std::byte* const at = parts.data() + 1 + row * stride;
          ASSERT_EQ(std::memcmp(at, whole.data() + row * row_bytes, row_bytes), 0)
              << describe(init, dtype) << ", dim " << dim << ", row " << row;
          ASSERT_TRUE(std::all_of(at + row_bytes, at + stride, [](std::byte byte) { return byte == std::byte{0xEE}; }))
              << describe(init, dtype) << ", dim " << dim << ", row " << row;
        }
      }
    }
}

TEST(Initializer, ANarrowerTableHasTheFirstColumnsOfAWiderOne) {
  const auto wide = make<float>(Normal{}, 20, 300);
  const auto narrow = make<float>(Normal{}, 20, 7);
  for (std::uint64_t row = 0; row < 20; ++row)
    for (std::uint64_t j = 0; j < 7; ++j) EXPECT_EQ(narrow[row * 7 + j], wide[row * 300 + j]);
}

TEST(Initializer, EveryVectorWidthGivesTheSameBits) {
  const VectorLevel best = detail::detect_vector_level();
  for (const auto& [init, dtype] : all_kinds()) {
    std::vector<std::vector<std::byte>> results;
    for (const VectorLevel level : {VectorLevel::kBaseline, VectorLevel::kAvx2, VectorLevel::kAvx512}) {
      if (level > best) continue;
      detail::vector_level() = level;
      std::vector<std::byte> out(5000 * 13 * item_size(dtype));
      generate_rows(init, 11, 0, 5000, 13, dtype, out.data(), 13 * item_size(dtype));
      results.push_back(std::move(out));
    }
    detail::vector_level() = best;
    for (const auto& result : results) EXPECT_TRUE(result == results[0]) << describe(init, dtype);
  }
}

TEST(Initializer, ThreadsMakeTheSameRowsAsOne) {
  const auto whole = make<float>(Normal{}, 4000, 33);
  std::vector<float> parts(whole.size());
  std::vector<std::thread> threads;
  for (std::uint64_t part = 0; part < 4; ++part)
    threads.emplace_back([&, part] {
      generate_rows(Normal{}, 1, part * 1000, 1000, 33, DType::kFloat32,
                    reinterpret_cast<std::byte*>(parts.data() + part * 1000 * 33), 33 * 4);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::memcmp(parts.data(), whole.data(), whole.size() * sizeof(float)), 0);
}

TEST(Initializer, SeedsRowsAndColumnsAllMatter) {
  const auto a = make<float>(Normal{}, 1, 64, 1, 0);
  EXPECT_NE(a, make<float>(Normal{}, 1, 64, 2, 0));
  EXPECT_NE(a, make<float>(Normal{}, 1, 64, std::uint64_t{1} + (std::uint64_t{1} << 32), 0));
  EXPECT_NE(a, make<float>(Normal{}, 1, 64, 1, 1));
  EXPECT_NE(a, make<float>(Normal{}, 1, 64, 1, std::uint64_t{1} << 32));
  std::vector<float> sorted = a;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
}

TEST(Initializer, NoRowsOrColumnsWriteNothing) {
  std::byte byte{0x5A};
  generate_rows(Normal{}, 1, 0, 0, 8, DType::kFloat32, &byte, 32);
  generate_rows(Normal{}, 1, 0, 8, 0, DType::kFloat32, &byte, 0);
  EXPECT_EQ(byte, std::byte{0x5A});
  EXPECT_THROW(generate_rows(Zeros{}, 1, 0, 1, 8, DType::kFloat32, &byte, 31), InvalidArgument);
}

TEST(Initializer, ZerosAndConstants) {
  EXPECT_THAT(make<float>(Zeros{}, 3, 1000), testing::Each(0.0F));
  EXPECT_THAT(make<float>(Constant{0.1}, 3, 1000), testing::Each(0.1F));
  EXPECT_THAT(make<double>(Constant{-0.1}, 3, 1000), testing::Each(-0.1));
  EXPECT_THAT(make<std::int64_t>(Constant{-9007199254740992.0}, 2, 5), testing::Each(-9007199254740992));
  EXPECT_THAT(make<std::uint8_t>(Constant{255}, 2, 600), testing::Each(255));
  for (const Float16 value : make<Float16>(Constant{0.1}, 2, 5)) EXPECT_EQ(value.bits, 0x2E66);
  for (const BFloat16 value : make<BFloat16>(Constant{0.1}, 2, 5)) EXPECT_EQ(value.bits, 0x3DCD);
  EXPECT_THAT(make<float>(Normal{3, 0}, 2, 5), testing::Each(3.0F));
  EXPECT_THAT(make<float>(Uniform{3, 3}, 2, 5), testing::Each(3.0F));
  EXPECT_THAT(make<std::int8_t>(Uniform{-3, -3}, 2, 5), testing::Each(-3));
}

// --- distributions ---

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// The greatest distance between the sample's distribution and cdf, in units in which 1.95 is passed once in 1,000 samples.
template <class Cdf>
double kolmogorov(std::vector<double> sample, const Cdf& cdf) {
  std::sort(sample.begin(), sample.end());
  const auto n = static_cast<double>(sample.size());
  double distance = 0;
  for (std::size_t i = 0; i < sample.size(); ++i) {
    const double expected = cdf(sample[i]);
    distance = std::max({distance, expected - static_cast<double>(i) / n, static_cast<double>(i + 1) / n - expected});
  }
  return distance * std::sqrt(n);
}

template <class T>
void is_standard_normal(double limit) {
  const auto values = make<T>(Normal{0, 1}, 15625, 64, 42);  // a million
  std::vector<double> sample(values.begin(), values.end());
  const auto n = static_cast<double>(sample.size());
  double moment[5] = {};
  for (const double x : sample)
    for (int k = 1; k < 5; ++k) moment[k] += std::pow(x, k) / n;
  // Four standard errors: sqrt(1, 2, 15, 96) / 1000.
  EXPECT_NEAR(moment[1], 0, 0.004);
  EXPECT_NEAR(moment[2], 1, 0.0057);
  EXPECT_NEAR(moment[3], 0, 0.0155);
  EXPECT_NEAR(moment[4], 3, 0.0392);
  EXPECT_LT(kolmogorov(sample, normal_cdf), 1.95);
  for (const double x : {2.0, 3.0, 4.0}) {  // both tails: counts within four standard deviations
    const double expected = n * normal_cdf(-x);
    EXPECT_NEAR(static_cast<double>(std::count_if(sample.begin(), sample.end(), [&](double v) { return v > x; })), expected,
                4 * std::sqrt(expected));
    EXPECT_NEAR(static_cast<double>(std::count_if(sample.begin(), sample.end(), [&](double v) { return v < -x; })), expected,
                4 * std::sqrt(expected));
  }
  const auto [least, most] = std::minmax_element(sample.begin(), sample.end());
  EXPECT_LT(*least, -4.2);
  EXPECT_GT(*most, 4.2);
  EXPECT_LT(std::max(-*least, *most), limit);
  // Neighbours are uncorrelated: columns of a pair, of a block, of blocks, and rows.
  for (const std::size_t lag : {1U, 2U, 3U, 4U, 64U}) {
    double product = 0;
    for (std::size_t i = 0; i + lag < sample.size(); ++i) product += sample[i] * sample[i + lag] / n;
    EXPECT_NEAR(product, 0, 0.004) << "lag " << lag;
  }
}

TEST(Initializer, Float32NormalsAreNormal) { is_standard_normal<float>(6.764); }
TEST(Initializer, Float64NormalsAreNormal) { is_standard_normal<double>(8.572); }

TEST(Initializer, NormalsScaleAndShift) {
  const auto standard = make<double>(Normal{0, 1}, 10, 50);
  const auto moved = make<double>(Normal{-3, 0.5}, 10, 50);
  for (std::size_t i = 0; i < moved.size(); ++i) EXPECT_EQ(moved[i], -3 + 0.5 * standard[i]);
}

TEST(Initializer, UniformsAreUniform) {
  const auto floats = make<float>(Uniform{-2, 6}, 15625, 64, 7);
  EXPECT_LT(kolmogorov({floats.begin(), floats.end()}, [](double x) { return (x + 2) / 8; }), 1.95);
  const auto doubles = make<double>(Uniform{-2, 6}, 15625, 64, 8);
  EXPECT_LT(kolmogorov({doubles.begin(), doubles.end()}, [](double x) { return (x + 2) / 8; }), 1.95);
}

template <class T>
void stays_inside(const Uniform& uniform) {
  for (const T value : make<T>(uniform, 2000, 64, 3)) {
    ASSERT_GE(value_of(value), uniform.low);
    ASSERT_LT(value_of(value), uniform.high);
  }
}

// Where the grid of the type is coarse against the range, rounding would often give the upper end.
TEST(Initializer, UniformNeverGivesItsUpperEnd) {
  for (const Uniform uniform :
       {Uniform{0, 1}, Uniform{-1, 1}, Uniform{0.1, 0.9}, Uniform{-0.9, -0.1}, Uniform{1, 1.05}, Uniform{-1, 0}}) {
    stays_inside<float>(uniform);
    stays_inside<double>(uniform);
    stays_inside<Float16>(uniform);
    stays_inside<BFloat16>(uniform);
  }
  stays_inside<float>({16777216, 16777220});
  stays_inside<float>({1, 1 + 0x1p-22});
  stays_inside<double>({1, 1 + 0x1p-51});
  stays_inside<Float16>({2048, 2054});
  stays_inside<BFloat16>({256, 262});
  stays_inside<float>({0, 0x1p-149});
  EXPECT_THAT(make<float>(Uniform{1, 1 + 0x1p-23}, 4, 100), testing::Each(1.0F));  // the only value there
  EXPECT_THAT(make<float>(Uniform{-0x1p-149, 0}, 4, 100), testing::Each(-0x1p-149F));
}

TEST(Initializer, IntegersFillTheirRangeEvenly) {
  const auto count = [](const auto& values, int low, int high) {
    std::vector<double> counts(static_cast<std::size_t>(high - low));
    for (const auto value : values) {
      EXPECT_GE(value, low);
      EXPECT_LT(value, high);
      ++counts.at(static_cast<std::size_t>(value - low));
    }
    const double expected = static_cast<double>(values.size()) / static_cast<double>(counts.size());
    double chi_square = 0;
    for (const double n : counts) chi_square += (n - expected) * (n - expected) / expected;
    return (chi_square - static_cast<double>(counts.size() - 1)) / std::sqrt(2.0 * static_cast<double>(counts.size() - 1));
  };
  EXPECT_LT(std::abs(count(make<std::int8_t>(Uniform{-128, 128}, 1000, 200), -128, 128)), 4);
  EXPECT_LT(std::abs(count(make<std::uint8_t>(Uniform{0, 256}, 1000, 200), 0, 256)), 4);
  EXPECT_LT(std::abs(count(make<std::int32_t>(Uniform{-7, 93}, 1000, 200), -7, 93)), 4);
  EXPECT_LT(std::abs(count(make<std::int64_t>(Uniform{0.5, 10.5}, 1000, 200), 1, 11)), 4);
  EXPECT_THAT(make<std::int32_t>(Uniform{41.5, 42.5}, 3, 5), testing::Each(42));
}

TEST(Initializer, WideIntegerRangesReachTheirEnds) {
  const auto values = make<std::int64_t>(Uniform{-0x1p63, 0x1p63}, 1000, 100);
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  EXPECT_LT(static_cast<double>(*least), -0x1p63 * 0.999);
  EXPECT_GT(static_cast<double>(*most), 0x1p63 * 0.999);
  for (const std::int32_t value : make<std::int32_t>(Uniform{-0x1p31, -0x1p31 + 3}, 100, 10))
    EXPECT_LT(value, std::numeric_limits<std::int32_t>::min() + 3);
}

// --- what is refused ---

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Refused {
  Initializer init;
  DType dtype;
  const char* named;
};
class BadInitializer : public testing::TestWithParam<Refused> {};
TEST_P(BadInitializer, IsRefusedByName) {
  try {
    check_initializer(GetParam().init, GetParam().dtype);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(GetParam().named));
  }
  std::byte room[64];
  EXPECT_THROW(generate_rows(GetParam().init, 1, 0, 1, 1, GetParam().dtype, room, 8), InvalidArgument);
}
INSTANTIATE_TEST_SUITE_P(
    Values, BadInitializer,
    testing::Values(
        Refused{Constant{kNan}, DType::kFloat32, "constant is nan"}, Refused{Constant{kInf}, DType::kFloat64, "constant is inf"},
        Refused{Constant{1e39}, DType::kFloat32, "float32"}, Refused{Constant{65520}, DType::kFloat16, "65520"},
        Refused{Constant{-1e39}, DType::kBFloat16, "bfloat16"},
        Refused{Constant{1.5}, DType::kInt32, "constant 1.5 is not a value of int32"},
        Refused{Constant{-1}, DType::kUInt8, "uint8"}, Refused{Constant{256}, DType::kUInt8, "uint8"},
        Refused{Constant{128}, DType::kInt8, "int8"}, Refused{Constant{0x1p63}, DType::kInt64, "int64"},
        Refused{Uniform{1, 0}, DType::kFloat32, "low 1 is greater than high 0"},
        Refused{Uniform{kNan, 0}, DType::kFloat32, "uniform low"}, Refused{Uniform{0, kInf}, DType::kFloat32, "uniform high"},
        Refused{Uniform{-1e308, 1e308}, DType::kFloat64, "high - low"}, Refused{Uniform{0, 1e39}, DType::kFloat32, "1e+39"},
        Refused{Uniform{0.1, 0.10000001}, DType::kFloat16, "holds no float16"},
        Refused{Uniform{0.2, 0.8}, DType::kInt32, "holds no integer"},
        Refused{Uniform{0.5, 0.5}, DType::kInt32, "holds no integer"},
        Refused{Uniform{0, 257}, DType::kUInt8, "uint8 holds [0, 256)"},
        Refused{Uniform{-129, 0}, DType::kInt8, "int8 holds [-128, 128)"}, Refused{Uniform{256, 256}, DType::kUInt8, "uint8"},
        Refused{Normal{0, -1}, DType::kFloat32, "std -1 is negative"}, Refused{Normal{kInf, 1}, DType::kFloat32, "normal mean"},
        Refused{Normal{0, kNan}, DType::kFloat32, "normal std"}, Refused{Normal{0, 1e4}, DType::kFloat16, "float16"},
        Refused{Normal{0, 1e308}, DType::kFloat64, "float64"}, Refused{Normal{}, DType::kInt32, "int32"}));

TEST(Initializer, AcceptsTheLastValueOfEachType) {
  check_initializer(Constant{65504}, DType::kFloat16);
  check_initializer(Constant{65519.99}, DType::kFloat16);  // rounds to 65504
  check_initializer(Constant{std::numeric_limits<float>::max()}, DType::kFloat32);
  check_initializer(Constant{-128}, DType::kInt8);
  check_initializer(Constant{-0x1p63}, DType::kInt64);
  check_initializer(Uniform{0, 256}, DType::kUInt8);
  check_initializer(Uniform{-0x1p63, 0x1p63}, DType::kInt64);
  check_initializer(Normal{0, 9000}, DType::kFloat16);
  check_initializer(Normal{1e308, 0}, DType::kFloat64);
  check_initializer(Zeros{}, DType::kInt64);
}

}  // namespace
}  // namespace embermap
