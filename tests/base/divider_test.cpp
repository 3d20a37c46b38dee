#include "base/divider.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace embermap {
namespace {

TEST(DividerTest, AgreesWithDivisionUpTo63Bits) {
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> divisors{1,
                                      2,
                                      3,
                                      5,
                                      7,
                                      8,
                                      10,
                                      25,
                                      31,
                                      32,
                                      33,
                                      64,
                                      1000,
                                      4095,
                                      4096,
                                      524288,
                                      (1ULL << 31) - 1,
                                      1ULL << 31,
                                      (1ULL << 32) + 1,
                                      (1ULL << 62) + 1,
                                      (1ULL << 63) - 1};
  for (int i = 0; i < 200; ++i) divisors.push_back(1 + (random() >> (1 + random() % 62)));
  constexpr std::uint64_t kLast = (1ULL << 63) - 1;
  for (const std::uint64_t d : divisors) {
    const Divider divider(d);
    std::vector<std::uint64_t> numbers{0,          1,     2,        d - 1, d, (1ULL << 31) - 1, 1ULL << 31, (1ULL << 32) - 1,
                                       1ULL << 32, kLast, kLast - 1};
    // Around multiples of the divisor, where a quotient that is a little wrong shows.
    for (int i = 0; i < 200; ++i) {
      const std::uint64_t multiple = kLast / d == 0 ? 0 : random() % (kLast / d) * d;
      numbers.insert(numbers.end(), {multiple, multiple == 0 ? 0 : multiple - 1, multiple + d - 1, random() >> 1});
    }
    for (const std::uint64_t n : numbers) {
      if (n > kLast) continue;
      ASSERT_EQ(divider.quotient(n), n / d) << n << " / " << d;
    }
  }
}

}  // namespace
}  // namespace embermap
