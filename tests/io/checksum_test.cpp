#include "io/checksum.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace embermap {
namespace {

std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST(Checksum, IsXxh3WithSeedZero) {
  // Published test vector of XXH3_64bits: the empty input. Files written today must verify tomorrow.
  EXPECT_EQ(checksum64({}), 0x2D06800538D394C2U);
  EXPECT_EQ(page_checksum({}), 0x38D394C2U);
}

TEST(Checksum, EveryBitOfAPageCounts) {
  std::string page(4096, '\0');
  std::set<std::uint32_t> seen{page_checksum(bytes(page))};
  for (std::size_t i = 0; i < page.size(); i += 31)
    for (int bit = 0; bit < 8; ++bit) {
      page[i] = static_cast<char>(1 << bit);
      seen.insert(page_checksum(bytes(page)));
      page[i] = 0;
    }
  EXPECT_EQ(seen.size(), 1 + (4096 / 31 + 1) * 8U);
}

TEST(Checksum, ZeroMeansNoneAndIsNeverReturned) {
  // An input found by trial, the low half of whose XXH3 is 0.
  const std::uint64_t number = 570295272;
  const auto input = std::as_bytes(std::span(&number, 1));
  ASSERT_EQ(static_cast<std::uint32_t>(checksum64(input)), 0U);
  EXPECT_EQ(page_checksum(input), 1U);
}

}  // namespace
}  // namespace embermap
