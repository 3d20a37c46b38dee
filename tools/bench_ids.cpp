#include "tools/bench_ids.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"

namespace embermap::tools {
namespace {

// The integral of x^-s from 1 to x, and its inverse.
double integral(double x, double s) { return s == 1 ? std::log(x) : std::expm1((1 - s) * std::log(x)) / (1 - s); }
double inverse(double y, double s) { return s == 1 ? std::exp(y) : std::exp(std::log1p((1 - s) * y) / (1 - s)); }

}  // namespace

IdSource::IdSource(std::string_view text, std::uint64_t rows, std::uint64_t seed) : rows_{rows}, random_{seed} {
  const std::string_view prefix = "zipf:";
  if (text.starts_with(prefix)) {
    exponent_ = parse_number("--ids", text.substr(prefix.size()));
    if (exponent_ <= 0 || exponent_ > 10) throw UsageError(fmt::format("--ids: the exponent {} is not in (0, 10]", exponent_));
  } else if (text != "uniform") {
    throw UsageError(fmt::format("--ids: '{}' is neither uniform nor zipf:EXPONENT", printable(text)));
  }
  if (exponent_ == 0) return;
  low_ = integral(1.5, exponent_) - 1;
  high_ = integral(static_cast<double>(rows) + 0.5, exponent_);
  half_bits_ = std::max(1U, (static_cast<unsigned>(std::bit_width(rows - 1)) + 1) / 2);
}

std::vector<std::int64_t> IdSource::draw(std::uint64_t count) {
  std::uniform_int_distribution<std::uint64_t> any(0, rows_ - 1);
  std::vector<std::int64_t> ids(count);
  for (auto& id : ids) id = static_cast<std::int64_t>(exponent_ == 0 ? any(random_) : place_of(zipf_rank()));
  return ids;
}

// Rejection from the integral of the density (Hörmann and Derflinger, 1996): exact, without a table of all rows.
std::uint64_t IdSource::zipf_rank() {
  std::uniform_real_distribution<double> uniform(low_, high_);
  for (;;) {
    const double u = uniform(random_);
    const double k = std::clamp(std::rint(inverse(u, exponent_)), 1.0, static_cast<double>(rows_));
    if (u >= integral(k + 0.5, exponent_) - std::pow(k, -exponent_)) return static_cast<std::uint64_t>(k) - 1;
  }
}

// Four rounds of a Feistel network over the next power of four, walked until inside the table: a bijection of [0, rows).
std::uint64_t IdSource::place_of(std::uint64_t rank) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t value = rank;
  do {
    std::uint64_t left = value >> half_bits_, right = value & mask;
    for (const std::uint64_t key : {0x9E3779B97F4A7C15ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL, 0x27D4EB2F165667C5ULL}) {
      std::uint64_t mixed = (right + (key & 0xFFFFFFFF)) * key;
      mixed ^= mixed >> 29;
      mixed *= 0xBF58476D1CE4E5B9ULL;
      const std::uint64_t old = left;
      left = right;
      right = old ^ ((mixed >> 32) & mask);
    }
    value = (left << half_bits_) | right;
  } while (value >= rows_);
  return value;
}

}  // namespace embermap::tools
