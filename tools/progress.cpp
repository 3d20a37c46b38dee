#include "tools/progress.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/console.hpp"

namespace embermap::tools {
namespace {

bool can_erase_lines() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && terminal != nullptr && std::string_view(terminal) != "dumb" && *terminal != '\0';
}

std::size_t terminal_width() {
  winsize size{};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// A line that could not be written is only a line of progress.
void put(std::string_view text) noexcept { static_cast<void>(!write(STDERR_FILENO, text.data(), text.size())); }

}  // namespace

std::string duration_text(std::uint64_t seconds) {
  const std::uint64_t hours = seconds / 3600, minutes = seconds / 60 % 60;
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes, seconds % 60);
  return fmt::format("{}:{:02}", minutes, seconds % 60);
}

ProgressLine::ProgressLine(std::string_view label, std::uint64_t unit_bytes, bool quiet)
    : label_{printable(label)},
      unit_bytes_{unit_bytes},
      enabled_{!quiet && can_erase_lines()},
      begin_{Clock::now()},
      drawn_{begin_ - std::chrono::seconds(1)} {}

ProgressLine::~ProgressLine() { erase(); }

Progress ProgressLine::callback() {
  return [this](std::uint64_t done, std::uint64_t total) {
    check_interrupt();
    if (!enabled_) return;
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (now - drawn_ >= std::chrono::milliseconds(100)) draw(done, total, now);
  };
}

void ProgressLine::draw(std::uint64_t done, std::uint64_t total, Clock::time_point now) {
  const double seconds = std::chrono::duration<double>(now - begin_).count();
  const double share = total == 0 ? 1 : static_cast<double>(done) / static_cast<double>(total);
  std::string line = fmt::format("{}  {:3.0f} %", label_, share * 100);
  if (seconds >= 0.5 && done > 0) {
    const double rate = static_cast<double>(done) / seconds;
    const double left = static_cast<double>(total - std::min(done, total)) / rate;
    line += fmt::format("  {}/s", format_size(static_cast<std::uint64_t>(rate * static_cast<double>(unit_bytes_))));
    if (left < 1e7) line += fmt::format("  {} left", duration_text(static_cast<std::uint64_t>(left)));
  }
  const std::size_t width = terminal_width();
  if (line.size() >= width) {  // a line that wraps could not be erased; cut between characters, not inside one
    std::size_t end = width - 1;
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0U) == 0x80U) --end;
    line.resize(end);
  }
  put("\r" + line + "\x1b[K");
  visible_ = true;
  drawn_ = now;
}

void ProgressLine::erase() noexcept {
  if (visible_) put("\r\x1b[K");
  visible_ = false;
}

}  // namespace embermap::tools
