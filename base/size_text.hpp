// Sizes as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace embermap {

// Bytes of "8GiB", "64 MiB", "512KiB", "1.5GiB", "2GB" (powers of ten), "4096" or "4096B". Case does not matter.
// Throws InvalidArgument naming the text.
std::uint64_t parse_size(std::string_view text);

// "1.50 GiB", "4.00 KiB", "17 B".
std::string format_size(std::uint64_t bytes);

inline namespace literals {
constexpr std::uint64_t operator""_KiB(unsigned long long n) { return n << 10; }
constexpr std::uint64_t operator""_MiB(unsigned long long n) { return n << 20; }
constexpr std::uint64_t operator""_GiB(unsigned long long n) { return n << 30; }
}  // namespace literals

}  // namespace embermap
