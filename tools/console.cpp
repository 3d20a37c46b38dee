#include "tools/console.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "base/error.hpp"

namespace embermap::tools {
namespace {

std::atomic<int> stop_signal{0};
std::atomic<int> signals_seen{0};
static_assert(std::atomic<int>::is_always_lock_free);  // usable in a signal handler
bool stdout_open = true;

extern "C" void on_stop_signal(int signal) {
  int none = 0;
  stop_signal.compare_exchange_strong(none, signal);
  if (signals_seen.fetch_add(1) + 1 >= 3) {
    std::signal(signal, SIG_DFL);
    raise(signal);  // delivered when this handler returns
  }
}

bool is_open(int descriptor) { return fcntl(descriptor, F_GETFD) != -1 || errno != EBADF; }

// Returns errno, 0 if all was written.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {  // whoever shares the other end made it non-blocking
      pollfd ready{descriptor, POLLOUT, 0};
      poll(&ready, 1, -1);
      continue;
    }
    if (written < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

void claim_standard_descriptors() {
  stdout_open = is_open(STDOUT_FILENO);
  // In ascending order: open() returns the lowest free descriptor. /dev/null read-only in place of standard output: writes to it
  // fail.
  if (!is_open(STDIN_FILENO) && open("/dev/null", O_RDONLY) < 0) std::abort();
  if (!stdout_open && open("/dev/null", O_RDONLY) < 0) std::abort();
  if (!is_open(STDERR_FILENO) && open("/dev/null", O_WRONLY) < 0) std::abort();
}

bool can_print() { return stdout_open; }

void print(std::string_view text) {
  if (const int error = write_all(STDOUT_FILENO, text)) throw IoError(error, "write", "standard output");
}

void print_json(const Json& object) { print(object.dump(2) + "\n"); }

void warn(std::string_view message) { write_all(STDERR_FILENO, fmt::format("embermap: warning: {}\n", printable(message))); }

void report_error(std::string_view message) {
  write_all(STDERR_FILENO, fmt::format("embermap: error: {}\n", printable(message)));
}

std::string json_text(std::string_view bytes) {
  try {
    static_cast<void>(nlohmann::json(bytes).dump());
    return std::string(bytes);
  } catch (const nlohmann::json::type_error&) {  // not UTF-8
    return printable(bytes);
  }
}

std::string grouped(std::uint64_t number) {
  std::string text = fmt::format("{}", number);
  for (std::size_t end = text.size(); end > 3; end -= 3) text.insert(end - 3, 1, ',');
  return text;
}

void catch_signals() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_stop_signal;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    sigaction(number, &action, nullptr);
  }
}

void check_interrupt() {
  if (const int signal = stop_signal.load()) throw Interrupted{signal};
}

}  // namespace embermap::tools
