#include "base/size_text.hpp"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

#include "base/error.hpp"

namespace embermap {

std::uint64_t parse_size(std::string_view text) {
  const auto fail = [&] {
    return InvalidArgument(fmt::format("'{}' is not a size; write bytes or e.g. 64MiB, 1.5GiB, 2GB", printable(text)));
  };
  std::string_view rest = text;
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  while (!rest.empty() && rest.back() == ' ') rest.remove_suffix(1);
  std::size_t digits = 0;
  while (digits < rest.size() && (std::isdigit(static_cast<unsigned char>(rest[digits])) != 0 || rest[digits] == '.')) ++digits;
  const std::string_view number = rest.substr(0, digits);
  std::string_view unit = rest.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  std::string lower;
  for (const char c : unit) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));

  struct Unit {
    std::string_view name;
    std::uint64_t bytes;
  };
  static constexpr std::array<Unit, 15> kUnits{{{"", 1},
                                                {"b", 1},
                                                {"k", 1ULL << 10},
                                                {"kib", 1ULL << 10},
                                                {"m", 1ULL << 20},
                                                {"mib", 1ULL << 20},
                                                {"g", 1ULL << 30},
                                                {"gib", 1ULL << 30},
                                                {"t", 1ULL << 40},
                                                {"tib", 1ULL << 40},
                                                {"kb", 1000},
                                                {"mb", 1000000},
                                                {"gb", 1000000000},
                                                {"tb", 1000000000000},
                                                {"bytes", 1}}};
  std::uint64_t factor = 0;
  for (const Unit& known : kUnits)
    if (known.name == lower) factor = known.bytes;
  if (factor == 0 || number.empty()) throw fail();

  std::uint64_t whole = 0;
  auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), whole);
  if (error == std::errc{} && end == number.data() + number.size()) {
    std::uint64_t bytes = 0;
    if (__builtin_mul_overflow(whole, factor, &bytes)) throw fail();
    return bytes;
  }
  double value = 0;
  auto [fraction_end, fraction_error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (fraction_error != std::errc{} || fraction_end != number.data() + number.size()) throw fail();
  if (factor == 1) throw fail();  // there is no part of a byte
  const double bytes = value * static_cast<double>(factor);
  if (!(bytes >= 0) || bytes >= 18446744073709551615.0) throw fail();
  return static_cast<std::uint64_t>(bytes);
}

std::string format_size(std::uint64_t bytes) {
  static constexpr std::array<const char*, 6> kNames{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t name = 0;
  while (value >= 1023.995 && name + 1 < kNames.size()) {
    value /= 1024;
    ++name;
  }
  return fmt::format("{:.2f} {}", value, kNames[name]);
}

}  // namespace embermap
