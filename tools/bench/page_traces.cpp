#include "tools/bench/page_traces.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

namespace embermap::bench {
namespace {

std::uint64_t mix(std::uint64_t x) noexcept {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// Ranks 0..rows-1 of a Zipf distribution, P(r) ~ (r + 1)^-exponent, by rejection-inversion: Hoermann and Derflinger,
// "Rejection-inversion to generate variates from monotone discrete distributions", 1996. Exponent 0 is uniform.
class ZipfRanks {
 public:
  ZipfRanks(std::uint64_t rows, double exponent, std::uint64_t seed);
  std::uint64_t next() noexcept;

 private:
  double integral(double x) const noexcept;
  double inverse(double y) const noexcept;
  double uniform() noexcept;
  std::uint64_t rows_, state_;
  double exponent_, low_, high_, squeeze_;
};

class Bijection {  // of 0..size-1
 public:
  explicit Bijection(std::uint64_t size) noexcept;
  std::uint64_t operator()(std::uint64_t value) const noexcept;

 private:
  std::uint64_t size_;
  unsigned half_;
};

ZipfRanks::ZipfRanks(std::uint64_t rows, double exponent, std::uint64_t seed)
    : rows_{rows}, state_{mix(seed + 1)}, exponent_{exponent} {
  low_ = integral(1.5) - 1;
  high_ = integral(static_cast<double>(rows) + 0.5);
  squeeze_ = 2 - inverse(integral(2.5) - std::exp(-exponent * std::log(2.0)));
}

double ZipfRanks::integral(double x) const noexcept {
  if (exponent_ == 1) return std::log(x);
  return (std::exp((1 - exponent_) * std::log(x)) - 1) / (1 - exponent_);
}

double ZipfRanks::inverse(double y) const noexcept {
  if (exponent_ == 1) return std::exp(y);
  return std::exp(std::log1p(y * (1 - exponent_)) / (1 - exponent_));
}

double ZipfRanks::uniform() noexcept {
  state_ += 0x9E3779B97F4A7C15ULL;
  return static_cast<double>(mix(state_) >> 11) * 0x1p-53;
}

std::uint64_t ZipfRanks::next() noexcept {
  if (exponent_ == 0) return static_cast<std::uint64_t>(uniform() * static_cast<double>(rows_));
  for (;;) {
    const double y = high_ + uniform() * (low_ - high_);
    const double x = inverse(y);
    const double rank = std::clamp(std::floor(x + 0.5), 1.0, static_cast<double>(rows_));
    if (rank - x <= squeeze_ || y >= integral(rank + 0.5) - std::exp(-exponent_ * std::log(rank)))
      return static_cast<std::uint64_t>(rank) - 1;
  }
}

Bijection::Bijection(std::uint64_t size) noexcept : size_{size}, half_{(static_cast<unsigned>(std::bit_width(size)) + 1) / 2} {}

std::uint64_t Bijection::operator()(std::uint64_t value) const noexcept {
  const std::uint64_t mask = (std::uint64_t{1} << half_) - 1;
  do {  // a Feistel network permutes 0..4^half-1; values beyond `size` walk on along their cycle
    std::uint64_t left = value >> half_, right = value & mask;
    for (std::uint64_t round = 1; round <= 4; ++round) {
      const std::uint64_t next = left ^ (mix(right + (round << 40)) & mask);
      left = right;
      right = next;
    }
    value = (left << half_) | right;
  } while (value >= size_);
  return value;
}

PageTrace group(std::uint64_t pages, std::uint64_t ids, std::uint64_t batch, const std::function<std::uint64_t()>& next_page) {
  PageTrace trace{.pages = pages, .touched = {}, .ends = {}};
  std::vector<std::uint32_t> last(pages, 0);  // 1 + the last batch that touched the page
  std::uint32_t number = 0;
  for (std::uint64_t done = 0; done < ids; done += batch) {
    ++number;
    const auto begin = static_cast<std::ptrdiff_t>(trace.touched.size());
    for (std::uint64_t i = 0; i < std::min(batch, ids - done); ++i) {
      const std::uint64_t page = next_page();
      if (last[page] == number) continue;
      last[page] = number;
      trace.touched.push_back(static_cast<std::uint32_t>(page));
    }
    std::sort(trace.touched.begin() + begin, trace.touched.end());
    trace.ends.push_back(trace.touched.size());
  }
  return trace;
}

std::vector<std::int64_t> sorted_pages(std::span<const std::int64_t> ids, std::uint64_t rows_per_page) {
  std::vector<std::int64_t> pages(ids.begin(), ids.end());
  for (std::int64_t& page : pages) page /= static_cast<std::int64_t>(rows_per_page);
  std::sort(pages.begin(), pages.end());
  return pages;
}

}  // namespace

const std::vector<std::string>& shape_names() {
  static const std::vector<std::string> names{"uniform", "zipf0.8", "zipf1.05", "zipf1.2", "drift", "scans", "epochs", "loop"};
  return names;
}

PageTrace make_trace(const Shape& shape) {
  const std::uint64_t rows = shape.name == "loop" ? shape.rows / 5 : shape.rows;
  double exponent = 1.05;
  if (shape.name == "uniform") exponent = 0;
  if (shape.name.starts_with("zipf")) exponent = std::stod(shape.name.substr(4));
  ZipfRanks zipf(rows, exponent, 1);
  const Bijection permute(rows);
  std::uint64_t n = 0;
  std::function<std::uint64_t()> next = [&] { return permute(zipf.next()); };
  if (shape.name == "drift") next = [&] { return permute((zipf.next() + (n++ >> 20) * (rows / 1000)) % rows); };
  if (shape.name == "epochs" || shape.name == "loop") next = [&] { return n++ % rows; };
  if (shape.name == "scans")
    next = [&] {
      const std::uint64_t at = n++ % (2 * rows);
      return at < rows ? permute(zipf.next()) : at - rows;
    };
  return group((rows + shape.rows_per_page - 1) / shape.rows_per_page, shape.ids, shape.batch,
               [&] { return next() / shape.rows_per_page; });
}

PageTrace make_trace(std::span<const std::int64_t> ids, std::uint64_t rows_per_page, std::uint64_t batch, std::uint64_t epochs) {
  std::vector<std::int64_t> pages = sorted_pages(ids, rows_per_page);
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  std::vector<std::uint32_t> number;
  number.reserve(ids.size());
  for (const std::int64_t id : ids) {
    const auto at = std::lower_bound(pages.begin(), pages.end(), id / static_cast<std::int64_t>(rows_per_page));
    number.push_back(static_cast<std::uint32_t>(at - pages.begin()));
  }
  std::uint64_t n = 0;
  return group(pages.size(), ids.size() * epochs, batch, [&] { return number[n++ % number.size()]; });
}

double pages_seen_once(std::span<const std::int64_t> ids, std::uint64_t rows_per_page) {
  const std::vector<std::int64_t> pages = sorted_pages(ids, rows_per_page);
  std::uint64_t once = 0, distinct = 0;
  for (auto at = pages.begin(); at != pages.end();) {
    const auto end = std::upper_bound(at, pages.end(), *at);
    once += end - at == 1;
    ++distinct;
    at = end;
  }
  return static_cast<double>(once) / static_cast<double>(distinct);
}

}  // namespace embermap::bench
