// XXH3, the checksum of pages and of page files' headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace embermap {

// The low 32 bits of XXH3 (64 bits, seed 0) of `bytes`, with 0 replaced by 1: in our files 0 means "none recorded".
std::uint32_t page_checksum(std::span<const std::byte> bytes) noexcept;

// XXH3 (64 bits, seed 0) of `bytes`.
std::uint64_t checksum64(std::span<const std::byte> bytes) noexcept;

// The low 32 bits of XXH3 (64 bits) of a sector's content, seeded with the sector's number in its file, so that one in another's
// place shows; 0 for content of nothing but zeros, so that a hole in a sparse file is a valid sector.
std::uint32_t sector_checksum(std::span<const std::byte> content, std::uint64_t sector) noexcept;

}  // namespace embermap
