// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as 1, 2, 3", SC
// 2011).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.hpp"
#include "base/vector_dispatch.hpp"

namespace embermap::detail {

// Blocks made at a time: enough to fill vectors and hide latency, few enough to stay in the first-level cache.
inline constexpr std::size_t kPhiloxBlocks = 64;

// Word j of every block side by side: what the vectoriser wants. Block i is word[0][i] .. word[3][i].
struct PhiloxBlocks {
  alignas(64) std::uint32_t word[4][kPhiloxBlocks];
};

// The first `count` blocks in place: counters in, random words out. The key's first word is the low half of `key`.
EMBERMAP_ALWAYS_INLINE inline void philox(PhiloxBlocks& blocks, std::size_t count, std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  auto& w = blocks.word;
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * w[0][i];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * w[2][i];
      const std::uint32_t next0 = static_cast<std::uint32_t>(p1 >> 32) ^ w[1][i] ^ k0;
      const std::uint32_t next2 = static_cast<std::uint32_t>(p0 >> 32) ^ w[3][i] ^ k1;
      w[1][i] = static_cast<std::uint32_t>(p1);
      w[3][i] = static_cast<std::uint32_t>(p0);
      w[0][i] = next0;
      w[2][i] = next2;
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

// One block alone, for host and device.
EMBERMAP_HOST_DEVICE inline void philox(std::uint32_t (&word)[4], std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53U} * word[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57U} * word[2];
    const std::uint32_t next0 = static_cast<std::uint32_t>(p1 >> 32) ^ word[1] ^ k0;
    const std::uint32_t next2 = static_cast<std::uint32_t>(p0 >> 32) ^ word[3] ^ k1;
    word[1] = static_cast<std::uint32_t>(p1);
    word[3] = static_cast<std::uint32_t>(p0);
    word[0] = next0;
    word[2] = next2;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
}

}  // namespace embermap::detail
