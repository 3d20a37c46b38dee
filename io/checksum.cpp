#include "io/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace embermap {

std::uint32_t page_checksum(std::span<const std::byte> bytes) noexcept {
  const auto low = static_cast<std::uint32_t>(checksum64(bytes));
  return low == 0 ? 1 : low;
}

std::uint64_t checksum64(std::span<const std::byte> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint32_t sector_checksum(std::span<const std::byte> content, std::uint64_t sector) noexcept {
  if (std::all_of(content.begin(), content.end(), [](std::byte b) { return b == std::byte{0}; })) return 0;
  return static_cast<std::uint32_t>(XXH3_64bits_withSeed(content.data(), content.size(), sector));
}

}  // namespace embermap
