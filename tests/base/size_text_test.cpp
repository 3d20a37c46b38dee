#include "base/size_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace embermap {
namespace {

TEST(SizeText, ParsesBytesAndUnitsInAnyCase) {
  EXPECT_EQ(parse_size("0"), 0U);
  EXPECT_EQ(parse_size("4096"), 4096U);
  EXPECT_EQ(parse_size("4096B"), 4096U);
  EXPECT_EQ(parse_size("17 bytes"), 17U);
  EXPECT_EQ(parse_size("512KiB"), 512U * 1024);
  EXPECT_EQ(parse_size("64 MiB"), 64U << 20);
  EXPECT_EQ(parse_size("8GiB"), 8_GiB);
  EXPECT_EQ(parse_size("8gib"), 8_GiB);
  EXPECT_EQ(parse_size("8g"), 8_GiB);
  EXPECT_EQ(parse_size("  3 TIB  "), std::uint64_t{3} << 40);
  EXPECT_EQ(parse_size("2GB"), 2000000000U);
  EXPECT_EQ(parse_size("7kb"), 7000U);
}

TEST(SizeText, ParsesFractionsOfAUnit) {
  EXPECT_EQ(parse_size("1.5GiB"), 1536_MiB);
  EXPECT_EQ(parse_size(".5 MiB"), 512_KiB);
  EXPECT_EQ(parse_size("2.5kb"), 2500U);
}

TEST(SizeText, TakesTheLargest64BitNumberAndNothingAbove) {
  EXPECT_EQ(parse_size("18446744073709551615"), ~std::uint64_t{0});
  EXPECT_THROW(parse_size("18446744073709551616"), InvalidArgument);
  EXPECT_EQ(parse_size("16777215TiB"), std::uint64_t{16777215} << 40);
  EXPECT_THROW(parse_size("16777216TiB"), InvalidArgument);
  EXPECT_THROW(parse_size("99999999999999999999.5GiB"), InvalidArgument);
}

class BadSize : public testing::TestWithParam<const char*> {};
TEST_P(BadSize, IsRefusedByName) {
  try {
    parse_size(GetParam());
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("'" + std::string(GetParam()) + "' is not a size"));
  }
}
INSTANTIATE_TEST_SUITE_P(Texts, BadSize,
                         testing::Values("", " ", "GiB", "-1", "+1", "1e3", "0x10", "1,5GiB", "1..5GiB", "1.5.0GiB", ".", "1 2",
                                         "8 GiBs", "8XiB", "nan", "inf", "1.5", "1.5B", "8 G iB"));

TEST(SizeText, NamesATextThatCannotBePrinted) {
  try {
    parse_size("8\n\xFF");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("'8\\x0a\\xff'"));
  }
}

TEST(SizeText, Formats) {
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(17), "17 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(1024), "1.00 KiB");
  EXPECT_EQ(format_size(4_KiB), "4.00 KiB");
  EXPECT_EQ(format_size(1536_MiB), "1.50 GiB");
  EXPECT_EQ(format_size(1_MiB - 1), "1.00 MiB");  // not 1024.00 KiB
  EXPECT_EQ(format_size(~std::uint64_t{0}), "16.00 EiB");
}

TEST(SizeText, Literals) {
  EXPECT_EQ(1_KiB, 1024U);
  EXPECT_EQ(8_GiB, std::uint64_t{8} << 30);
}

}  // namespace
}  // namespace embermap
