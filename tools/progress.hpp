// One line on a terminal that says how far a long command is.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "io/rows.hpp"

namespace embermap::tools {

// Draws "import items  42 %  1.20 GiB/s  0:31 left" on standard error, at most ten times a second, and erases it at its end.
// Draws nothing if `quiet`, or if standard error is no terminal that can erase a line. In all cases callback() is where a command
// stops on SIGINT.
class ProgressLine {
 public:
  // `unit_bytes`: what one unit of done and total stands for, for the rate.
  ProgressLine(std::string_view label, std::uint64_t unit_bytes, bool quiet);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Valid while this lives. May be called from any thread. Throws Interrupted.
  Progress callback();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(std::uint64_t done, std::uint64_t total, Clock::time_point now);
  void erase() noexcept;

  std::string label_;
  std::uint64_t unit_bytes_;
  bool enabled_;
  std::mutex mutex_;
  Clock::time_point begin_, drawn_;
  bool visible_ = false;
};

// "0:42", "2:03:10".
std::string duration_text(std::uint64_t seconds);

}  // namespace embermap::tools
