#include "io/mapped_file.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"

namespace embermap {

// A live mapping, as the signal handler sees it. Never freed, but used again: the handler may walk the list at any time.
struct detail::MappedRegion {
  std::atomic<std::uintptr_t> begin{0}, end{0};  // begin 0: nobody's
  std::atomic<bool> failed{false};
  MappedRegion* next = nullptr;
};

namespace {

using detail::MappedRegion;

constexpr std::uint64_t kPopulated = 16ULL << 20;  // what one thread reads at a time

// A signal has no other argument than the process.
std::atomic<MappedRegion*> regions{nullptr};
std::mutex regions_mutex;                                 // not the handler's
std::atomic<const struct sigaction*> before_us{nullptr};  // what had the signal; never freed
std::atomic<const siginfo_t*> handed_on{nullptr};         // while what had it before runs
std::atomic<bool> handed_on_a_fault{false};

static_assert(std::atomic<std::uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

// Async-signal-safe.
bool give_zeros(std::uintptr_t address) noexcept {
  for (MappedRegion* region = regions.load(std::memory_order_acquire); region != nullptr; region = region->next) {
    const std::uintptr_t begin = region->begin.load(std::memory_order_acquire);
    const std::uintptr_t end = region->end.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= end) continue;
    // Another thread may have given the region to another mapping in between: `end` is that one's then, and what lies before it
    // is anybody's.
    if (region->begin.load(std::memory_order_relaxed) != begin) continue;
    region->failed.store(true);
    // All of it at once: a piece for each page that fails would be more pieces than a process may have.
    void* const zeros = mmap(reinterpret_cast<void*>(begin), end - begin, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return zeros != MAP_FAILED;
  }
  return false;
}

void on_sigbus(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const bool ours = info->si_code > 0 && give_zeros(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = error;
  if (ours) return;
  const struct sigaction& before = *before_us.load();
  // One that came later than us, and before us since we took the signal again, knows us as the one before it: it calls us, or
  // makes us the handler again and sends the signal anew. Then nobody is left.
  const bool returned = handed_on.load() == info || (info->si_code <= 0 && info->si_pid == getpid() && handed_on_a_fault.load());
  const bool is_handler = (before.sa_flags & SA_SIGINFO) != 0 || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
  if (is_handler && !returned) {
    if (info->si_code > 0) handed_on_a_fault.store(true);
    handed_on.store(info);
    if ((before.sa_flags & SA_SIGINFO) != 0)
      before.sa_sigaction(number, info, context);
    else
      before.sa_handler(number);
    handed_on.store(nullptr);
    return;
  }
  if (!is_handler && before.sa_handler == SIG_IGN && info->si_code <= 0) return;
  // The load is tried again and ends the process, where it would have without us; a signal that was sent has to be sent again.
  std::signal(number, SIG_DFL);
  if (info->si_code <= 0) (void)raise(number);
}

bool is_ours(const struct sigaction& action) noexcept {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_sigbus;
}

// Takes the signal, unless it is ours. Whoever has it hands on nothing, as a rule: Python's faulthandler, torch in its worker
// processes. false: errno says why not.
bool take_signal() {
  struct sigaction now {};
  if (sigaction(SIGBUS, nullptr, &now) != 0) return false;
  if (is_ours(now)) return true;
  const std::lock_guard lock(regions_mutex);
  if (sigaction(SIGBUS, nullptr, &now) != 0) return false;
  if (is_ours(now)) return true;
  before_us.store(new struct sigaction(now));
  struct sigaction action {};
  action.sa_sigaction = on_sigbus;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return sigaction(SIGBUS, &action, nullptr) == 0;
}

// Throws IoError.
MappedRegion* add_region(const std::byte* data, std::uint64_t bytes, const File& file) {
  if (!take_signal()) throw IoError(errno, "sigaction", file.path());
  const std::lock_guard lock(regions_mutex);
  MappedRegion* region = regions.load();
  while (region != nullptr && region->begin.load() != 0) region = region->next;
  const bool made = region == nullptr;
  if (made) {
    region = new MappedRegion;
    region->next = regions.load();
  }
  region->failed = false;
  region->end.store(reinterpret_cast<std::uintptr_t>(data) + bytes, std::memory_order_release);
  region->begin.store(reinterpret_cast<std::uintptr_t>(data), std::memory_order_release);
  if (made) regions.store(region, std::memory_order_release);
  return region;
}

std::uint64_t in_pages(std::uint64_t bytes) { return round_up(bytes, static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))); }

FormatError truncated(const File& file, std::uint64_t bytes, std::uint64_t needed) {
  return {file.path(), fmt::format("truncated: the file has {} bytes, {} are mapped", bytes, needed)};
}

}  // namespace

MappedFile::MappedFile(const File& file, std::uint64_t bytes) {
  if (bytes == 0) throw InvalidArgument("nothing of a file cannot be mapped");
  if (const std::uint64_t has = file.size(); has < bytes) throw truncated(file, has, bytes);
  void* const mapping = mmap(nullptr, in_pages(bytes), PROT_READ, MAP_SHARED, file.fd(), 0);
  if (mapping == MAP_FAILED) throw IoError(errno, "mmap", file.path(), 0, bytes);
  data_ = static_cast<std::byte*>(mapping);
  bytes_ = bytes;
  // A page that is missing is read alone, not with what lies around it: rows are asked for in any order.
  (void)madvise(mapping, in_pages(bytes), MADV_RANDOM);
  try {
    region_ = add_region(data_, in_pages(bytes), file);
  } catch (...) {
    release();
    throw;
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)},
      bytes_{std::exchange(other.bytes_, 0)},
      region_{std::exchange(other.region_, nullptr)} {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    region_ = std::exchange(other.region_, nullptr);
  }
  return *this;
}

void MappedFile::release() noexcept {
  if (region_ != nullptr) region_->begin.store(0);
  if (data_ != nullptr) munmap(data_, in_pages(bytes_));
  data_ = nullptr;
  bytes_ = 0;
  region_ = nullptr;
}

void MappedFile::populate(ThreadPool& pool) const noexcept {
#ifdef MADV_POPULATE_READ
  (void)madvise(data_, in_pages(bytes_), MADV_NORMAL);
  try {
    pool.parallel_for(ceil_div(bytes_, kPopulated), 1, [&](std::uint64_t begin, std::uint64_t end) {
      const std::uint64_t from = begin * kPopulated;
      // Without a signal where the file is shorter now: whoever needs the bytes finds out.
      (void)madvise(data_ + from, std::min(end * kPopulated, in_pages(bytes_)) - from, MADV_POPULATE_READ);
    });
  } catch (const std::exception&) {
    // It only saves time.
  }
  (void)madvise(data_, in_pages(bytes_), MADV_RANDOM);
#else
  (void)pool;
#endif
}

void MappedFile::will_need(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  constexpr std::uint64_t kLeast = 256_KiB;   // below, waiting for single pages costs little
  constexpr std::uint64_t kAtOnce = 128_KiB;  // the system reads no more for one call, however much it is told of
  constexpr std::uint64_t kSamples = 8;
  const std::uint64_t page = in_pages(1);
  const std::uint64_t begin = offset / page * page;
  const std::uint64_t end = std::min(in_pages(bytes_), offset + bytes);
  if (end < begin + kLeast) return;
  // What is in memory need not be told of, which takes as long as copying it: some pages tell.
  bool there = true;
  for (std::uint64_t i = 0; there && i < kSamples; ++i) {
    unsigned char resident = 0;
    there = mincore(data_ + begin + (end - 1 - begin) / kSamples * i / page * page, page, &resident) == 0 && (resident & 1U) != 0;
  }
  if (there) return;
  for (std::uint64_t at = begin; at < end; at += kAtOnce) (void)madvise(data_ + at, std::min(kAtOnce, end - at), MADV_WILLNEED);
}

void MappedFile::guard() const { (void)take_signal(); }

bool MappedFile::failed() const noexcept { return region_ != nullptr && region_->failed.load(); }

void MappedFile::check(const File& file) const {
  const std::uint64_t bytes = file.size();
  if (bytes < bytes_) throw truncated(file, bytes, bytes_);
  if (failed()) throw IoError(EIO, "read of the mapping of", file.path(), 0, bytes_);
}

}  // namespace embermap
