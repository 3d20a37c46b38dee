#include "io/elements.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/vector_dispatch.hpp"

namespace embermap {
namespace {

TEST(SwapElements, TurnsEachElementAroundOnEveryVectorLevel) {
  const VectorLevel widest = detail::vector_level().load();
  for (const VectorLevel level : {VectorLevel::kBaseline, VectorLevel::kAvx2, VectorLevel::kAvx512}) {
    if (level > widest) break;
    detail::vector_level() = level;
    for (const std::uint64_t item : {1U, 2U, 4U, 8U})
      for (const std::uint64_t count : {0U, 1U, 3U, 31U, 32U, 33U, 1000U}) {
        // Off by one byte: elements of a file need not be aligned.
        std::vector<std::byte> in(count * item + 1), out(in.size(), std::byte{0xEE}), wanted;
        for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7 + 1);
        wanted = in;
        for (std::uint64_t e = 0; e < count; ++e)
          std::reverse(wanted.begin() + static_cast<std::ptrdiff_t>(1 + e * item),
                       wanted.begin() + static_cast<std::ptrdiff_t>(1 + (e + 1) * item));
        swap_elements(in.data() + 1, out.data() + 1, count, item);
        EXPECT_EQ(out[0], std::byte{0xEE});
        EXPECT_TRUE(std::equal(out.begin() + 1, out.end(), wanted.begin() + 1)) << item << " x " << count;
        swap_elements(in.data() + 1, in.data() + 1, count, item);
        EXPECT_EQ(in, wanted) << item << " x " << count << " in place";
      }
  }
  detail::vector_level() = widest;
}

}  // namespace
}  // namespace embermap
