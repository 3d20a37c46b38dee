// 64-bit sums and products that throw instead of wrapping. Row and byte counts come from files and users: none is trusted.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

#include "base/error.hpp"

namespace embermap {

// a * b, or InvalidArgument naming `what` ("bytes of table 'items'").
inline std::uint64_t checked_mul(std::uint64_t a, std::uint64_t b, std::string_view what) {
  std::uint64_t out = 0;
  if (__builtin_mul_overflow(a, b, &out)) throw InvalidArgument(fmt::format("{}: {} x {} overflows 64 bits", what, a, b));
  return out;
}

inline std::uint64_t checked_add(std::uint64_t a, std::uint64_t b, std::string_view what) {
  std::uint64_t out = 0;
  if (__builtin_add_overflow(a, b, &out)) throw InvalidArgument(fmt::format("{}: {} + {} overflows 64 bits", what, a, b));
  return out;
}

constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return a / b + (a % b != 0); }
constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t multiple) { return ceil_div(a, multiple) * multiple; }

}  // namespace embermap
