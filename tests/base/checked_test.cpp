#include "base/checked.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace embermap {
namespace {

constexpr std::uint64_t kMost = ~std::uint64_t{0};

TEST(Checked, MultipliesUpToTheLast64BitNumber) {
  EXPECT_EQ(checked_mul(0, kMost, "x"), 0U);
  EXPECT_EQ(checked_mul(kMost, 1, "x"), kMost);
  EXPECT_EQ(checked_mul(0xFFFFFFFFU, 0x100000001U, "x"), kMost);
}

TEST(Checked, AProductOrSumThatWrapsIsRefusedWithItsNumbers) {
  try {
    checked_mul(std::uint64_t{1} << 32, std::uint64_t{1} << 32, "bytes of table 'items'");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "bytes of table 'items': 4294967296 x 4294967296 overflows 64 bits");
  }
  EXPECT_EQ(checked_add(kMost - 1, 1, "x"), kMost);
  EXPECT_THROW(checked_add(kMost, 1, "x"), InvalidArgument);
}

TEST(Checked, CeilDivDoesNotWrap) {
  EXPECT_EQ(ceil_div(0, 7), 0U);
  EXPECT_EQ(ceil_div(1, 7), 1U);
  EXPECT_EQ(ceil_div(14, 7), 2U);
  EXPECT_EQ(ceil_div(kMost, 2), (kMost / 2) + 1);
  EXPECT_EQ(round_up(4097, 4096), 8192U);
  EXPECT_EQ(round_up(4096, 4096), 4096U);
}

}  // namespace
}  // namespace embermap
