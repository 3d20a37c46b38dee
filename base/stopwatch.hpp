// Time spent, for counters.
#pragma once

#include <chrono>
#include <cstdint>

namespace embermap {

// Adds the nanoseconds of its life to `total`, a std::uint64_t or an atomic one, which outlives it.
template <class Total>
class Stopwatch {
 public:
  explicit Stopwatch(Total& total) : total_{total} {}
  ~Stopwatch() {
    const std::chrono::nanoseconds taken = std::chrono::steady_clock::now() - begin_;
    total_ += static_cast<std::uint64_t>(taken.count());
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Total& total_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace embermap
