#include "kernels/mover_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace embermap {
namespace {

constexpr std::uint64_t kFewBytes = 1 << 20;  // are not worth waking threads for
constexpr double kAsFast = 0.97;              // of the fastest: what measurements differ by
constexpr MoverWay kSmallKernel{.blocks = 8, .block_threads = 512, .host_threads = 0};

double octaves(std::uint64_t a, std::uint64_t b) {
  return std::abs(std::log2(static_cast<double>(std::max<std::uint64_t>(a, 1))) -
                  std::log2(static_cast<double>(std::max<std::uint64_t>(b, 1))));
}

// How unlike two cases are; infinite where one says nothing about the other.
double distance(const MoverCase& a, const MoverCase& b) {
  if (a.fetch != b.fetch || a.threads != b.threads) return std::numeric_limits<double>::infinity();
  return octaves(a.rows, b.rows) + 2 * octaves(a.row_bytes, b.row_bytes) + octaves(a.pool_bytes, b.pool_bytes);
}

bool alike(const MoverCase& a, const MoverCase& b) {
  return a.fetch == b.fetch && a.threads == b.threads && octaves(a.row_bytes, b.row_bytes) <= 0.5 &&
         octaves(a.pool_bytes, b.pool_bytes) <= 1;
}

}  // namespace

std::vector<MoverWay> mover_ways(unsigned threads) {
  std::vector<MoverWay> ways{{4, 1024, 0}, {8, 512, 0}, {16, 512, 0}};
  std::vector<unsigned> counts{std::min(threads, kMostMoverThreads)};
  if (threads > 4) counts.push_back(4);
  if (threads > kMostMoverThreads) counts.push_back(threads);
  for (const unsigned count : counts) {
    if (count == 0) continue;
    ways.push_back({0, 0, count});
    ways.push_back({2, 1024, count});
    ways.push_back({4, 1024, count});
    ways.push_back({16, 512, count});
  }
  return ways;
}

template <class May>
std::optional<MoverRate> MoverModel::fastest(const MoverCase& of, const May& may) const {
  const std::lock_guard lock(mutex_);
  const MoverMeasurement* nearest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const MoverMeasurement& measurement : measured_) {
    const double far = distance(measurement.of, of);
    if (far < least && !measurement.rates.empty()) {
      least = far;
      nearest = &measurement;
    }
  }
  if (nearest == nullptr) return std::nullopt;
  double most = 0;
  for (const MoverRate& rate : nearest->rates)
    if (may(rate.way)) most = std::max(most, rate.bytes_per_second);
  std::optional<MoverRate> best;
  for (const MoverRate& rate : nearest->rates) {
    if (!may(rate.way) || rate.bytes_per_second < kAsFast * most) continue;
    const auto before = [](const MoverRate& a, const MoverRate& b) {
      return a.way.blocks != b.way.blocks ? a.way.blocks < b.way.blocks : a.bytes_per_second > b.bytes_per_second;
    };
    if (!best || before(rate, *best)) best = rate;
  }
  return best;
}

MoverRate MoverModel::choose(const MoverCase& of) const {
  if (const auto best = fastest(of, [](const MoverWay&) { return true; })) return *best;
  if (of.rows < kFewBytes / std::max<std::uint64_t>(of.row_bytes, 1)) return {.way = kSmallKernel};
  return {.way = {4, 1024, std::min(of.threads, kMostMoverThreads)}};
}

MoverRate MoverModel::choose_kernel(const MoverCase& of) const {
  return fastest(of, [](const MoverWay& way) { return way.host_threads == 0; }).value_or(MoverRate{.way = kSmallKernel});
}

bool MoverModel::knows(const MoverCase& of) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(measured_.begin(), measured_.end(),
                     [&](const MoverMeasurement& m) { return !m.rates.empty() && alike(m.of, of); });
}

void MoverModel::add(std::vector<MoverMeasurement> measured) {
  const std::lock_guard lock(mutex_);
  for (MoverMeasurement& one : measured) {
    const auto same = std::find_if(measured_.begin(), measured_.end(), [&](const MoverMeasurement& m) { return m.of == one.of; });
    if (same != measured_.end())
      *same = std::move(one);
    else
      measured_.push_back(std::move(one));
  }
}

void MoverModel::clear() {
  const std::lock_guard lock(mutex_);
  measured_.clear();
}

std::vector<MoverMeasurement> MoverModel::measurements() const {
  const std::lock_guard lock(mutex_);
  return measured_;
}

}  // namespace embermap
