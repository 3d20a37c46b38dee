#include "io/lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace embermap {
namespace {

// All descriptors that hold a lock, so that a forked child can close its copies: a lock of an open file lives until the last of
// them is gone, and must not outlive the writer in some worker process.
struct Registry {
  std::mutex mutex;
  std::vector<int*> descriptors;
};

Registry& registry() {
  static Registry* const instance = [] {
    static Registry storage;
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       for (int* fd : registry().descriptors) {
                         if (*fd >= 0) ::close(std::exchange(*fd, -1));
                       }
                       registry().descriptors.clear();
                       registry().mutex.unlock();
                     });
    return &storage;
  }();
  return *instance;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "unknown";
  return name.data();
}

int set_lock(int fd, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  int result = 0;
  do result = ::fcntl(fd, F_OFD_SETLK, &lock);
  while (result != 0 && errno == EINTR);
  return result;
}

// "process 123 on host h", or "another process" while the holder has not written its name yet.
std::string holder(int fd) {
  for (int attempt = 0; attempt < 20; ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::array<char, 300> text;
    const ssize_t got = ::pread(fd, text.data(), text.size(), 0);
    if (got <= 0) continue;
    const std::string_view line(text.data(), static_cast<std::size_t>(got));
    if (line.back() != '\n') continue;
    long long pid = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), pid);
    if (error != std::errc{} || pid <= 0 || *end != ' ') break;
    const std::string_view host(end + 1, static_cast<std::size_t>(line.data() + line.size() - 1 - (end + 1)));
    if (pid == ::getpid() && host == host_name()) return fmt::format("this process ({}) on host {}", pid, printable(host));
    return fmt::format("process {} on host {}", pid, printable(host));
  }
  return "another process";
}

}  // namespace

struct WriterLock::Held {
  int fd = -1;

  // Opened with the registry locked: no fork can come between the opening and the entry.
  explicit Held(const std::filesystem::path& file) {
    const std::lock_guard guard(registry().mutex);
    registry().descriptors.push_back(&fd);
    do fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0666);
    while (fd < 0 && errno == EINTR);
  }
  ~Held() { close(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  void close() noexcept {
    const std::lock_guard guard(registry().mutex);
    std::erase(registry().descriptors, &fd);
    if (fd >= 0) ::close(std::exchange(fd, -1));
  }
};

std::optional<bool> WriterLock::is_taken(const std::filesystem::path& file) noexcept {
  // Closing a descriptor ends no lock of this process: those belong to the open file.
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0) return errno == ENOENT ? std::optional(false) : std::nullopt;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  const bool asked = ::fcntl(fd, F_OFD_GETLK, &lock) == 0;
  ::close(fd);
  return asked ? std::optional(lock.l_type != F_UNLCK) : std::nullopt;
}

WriterLock WriterLock::acquire(const std::filesystem::path& file, const std::filesystem::path& store) {
  for (int attempt = 0;; ++attempt) {
    WriterLock lock{std::make_unique<Held>(file)};
    const int fd = lock.held_->fd;
    if (fd < 0) throw IoError(errno, "open", file);
    struct stat opened {};
    if (::fstat(fd, &opened) != 0) throw IoError(errno, "fstat", file);
    if (!S_ISREG(opened.st_mode)) throw FormatError(file, "is not a regular file, so it cannot be the lock of a store");
    if (set_lock(fd, F_WRLCK) != 0) {
      const int error = errno;
      if (error == EAGAIN || error == EACCES) {
        const std::string who = holder(fd);
        lock.forget();
        throw LockedError(fmt::format("store {} is open for writing in {}", printable(store), who));
      }
      lock.forget();
      if (error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS || error == EINVAL)
        throw IoError(error, "lock (the file system has no locks, so a second writer could not be kept out)", file);
      throw IoError(error, "lock", file);
    }
    // Someone may have removed or replaced the file between open and lock: then this lock would guard nothing.
    struct stat named {};
    if (::stat(file.c_str(), &named) != 0 || named.st_ino != opened.st_ino || named.st_dev != opened.st_dev) {
      if (attempt == 100) throw IoError(ESTALE, "lock", file);
      continue;
    }
    // For messages only: on a full disk the lock holds without it.
    const std::string text = fmt::format("{} {}\n", ::getpid(), host_name());
    if (::ftruncate(fd, 0) == 0) [[maybe_unused]]
      const ssize_t written = ::pwrite(fd, text.data(), text.size(), 0);
    return lock;
  }
}

WriterLock::WriterLock() noexcept = default;
WriterLock::WriterLock(std::unique_ptr<Held> held) noexcept : held_{std::move(held)} {}
WriterLock::WriterLock(WriterLock&& other) noexcept : held_{std::move(other.held_)} {}

WriterLock& WriterLock::operator=(WriterLock&& other) noexcept {
  if (this != &other) {
    release();
    held_ = std::move(other.held_);
  }
  return *this;
}

WriterLock::~WriterLock() { release(); }

bool WriterLock::held() const noexcept { return held_ && held_->fd >= 0; }

void WriterLock::release() noexcept {
  // In a forked child the descriptor is closed already, and the parent's text and lock are left alone.
  if (held()) {
    [[maybe_unused]] const int cut = ::ftruncate(held_->fd, 0);
    // Not left to the close: a child in the middle of fork() and exec may still have a copy for a moment.
    set_lock(held_->fd, F_UNLCK);
  }
  held_.reset();
}

void WriterLock::forget() noexcept { held_.reset(); }

FolderLock::FolderLock(const std::filesystem::path& file) {
  const std::string folder = file.has_parent_path() ? file.parent_path().string() : ".";
  do fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (fd_ < 0 && errno == EINTR);
  if (fd_ < 0) return;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  // Asked again and again: a call that waits could not be given up.
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > end) {
      ::close(std::exchange(fd_, -1));
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  ::flock(fd_, LOCK_UN);  // not by closing alone: a child that was forked meanwhile has the descriptor too
  ::close(fd_);
}

}  // namespace embermap
