#include "io/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace embermap {

std::uint32_t page_checksum(std::span<const std::byte> bytes) noexcept {
  const auto low = static_cast<std::uint32_t>(checksum64(bytes));
  return low == 0 ? 1 : low;
}

std::uint64_t checksum64(std::span<const std::byte> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace embermap
