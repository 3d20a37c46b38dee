#include "tools/bare_disk.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/console.hpp"

namespace embermap::tools {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// A descriptor with O_DIRECT where the file system takes it.
class BareFile {
 public:
  BareFile(std::filesystem::path path, int flags) : path_{std::move(path)} {
    fd_ = open(path_.c_str(), flags | O_DIRECT | O_CLOEXEC, 0666);
    direct_ = fd_ >= 0;
    if (fd_ < 0 && errno == EINVAL) fd_ = open(path_.c_str(), flags | O_CLOEXEC, 0666);
    if (fd_ < 0) throw IoError(errno, "open", path_);
  }
  ~BareFile() { close(fd_); }
  BareFile(const BareFile&) = delete;
  BareFile& operator=(const BareFile&) = delete;

  int fd() const { return fd_; }
  bool direct() const { return direct_; }
  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const {
    struct stat status {};
    if (fstat(fd_, &status) != 0) throw IoError(errno, "fstat", path_);
    return static_cast<std::uint64_t>(status.st_size);
  }
  void forget_cache() const { (void)posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED); }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  bool direct_ = false;
};

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;

Memory aligned_memory(std::uint64_t bytes) {
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0xA5, bytes);
  return Memory(static_cast<std::byte*>(memory));
}

class Mapping {
 public:
  Mapping(int fd, std::uint64_t bytes, off_t offset) : bytes_{bytes} {
    memory_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (memory_ == MAP_FAILED) throw IoError(errno, "mmap", "io_uring");
  }
  ~Mapping() { munmap(memory_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory_) + offset);
  }

 private:
  void* memory_;
  std::uint64_t bytes_;
};

// The queues of io_uring as the kernel maps them, for reads into one buffer of `depth` blocks.
class Ring {
 public:
  // Nothing where the kernel or a sandbox refuses it.
  static std::unique_ptr<Ring> make(unsigned depth) {
    io_uring_params params{};
    const long fd = syscall(__NR_io_uring_setup, depth, &params);
    if (fd < 0) return nullptr;
    return std::unique_ptr<Ring>(new Ring(static_cast<int>(fd), params));
  }
  ~Ring() { close(fd_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void push_read(int fd, std::byte* memory, std::uint64_t bytes, std::uint64_t offset, std::uint64_t tag) {
    const unsigned tail = *submit_tail_;
    const unsigned index = tail & *submit_mask_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = fd;
    entry.addr = reinterpret_cast<std::uintptr_t>(memory);
    entry.len = static_cast<unsigned>(bytes);
    entry.off = offset;
    entry.user_data = tag;
    submit_array_[index] = index;
    std::atomic_ref(*submit_tail_).store(tail + 1, std::memory_order_release);
    ++pushed_;
  }
  // Submits what was pushed and waits for at least one completion. Returns errno.
  int enter() {
    const long done = syscall(__NR_io_uring_enter, fd_, pushed_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (done < 0) return errno;
    pushed_ -= static_cast<unsigned>(done);
    return 0;
  }
  struct Completion {
    std::uint64_t tag;
    int result;  // bytes, or -errno
  };
  std::optional<Completion> pop() {
    const unsigned head = *complete_head_;
    if (head == std::atomic_ref(*complete_tail_).load(std::memory_order_acquire)) return std::nullopt;
    const io_uring_cqe& entry = complete_[head & *complete_mask_];
    const Completion found{entry.user_data, entry.res};
    std::atomic_ref(*complete_head_).store(head + 1, std::memory_order_release);
    return found;
  }

 private:
  Ring(int fd, const io_uring_params& p)
      : fd_{fd},
        submit_{fd, p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING},
        completions_{fd, p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING},
        entries_{fd, p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES},
        submit_tail_{submit_.at<unsigned>(p.sq_off.tail)},
        submit_mask_{submit_.at<unsigned>(p.sq_off.ring_mask)},
        submit_array_{submit_.at<unsigned>(p.sq_off.array)},
        complete_head_{completions_.at<unsigned>(p.cq_off.head)},
        complete_tail_{completions_.at<unsigned>(p.cq_off.tail)},
        complete_mask_{completions_.at<unsigned>(p.cq_off.ring_mask)},
        complete_{completions_.at<io_uring_cqe>(p.cq_off.cqes)} {}

  int fd_;
  Mapping submit_, completions_, entries_;
  unsigned *submit_tail_, *submit_mask_, *submit_array_;
  unsigned *complete_head_, *complete_tail_, *complete_mask_;
  io_uring_cqe* complete_;
  unsigned pushed_ = 0;
};

class RandomBlocks {
 public:
  RandomBlocks(std::uint64_t blocks, std::uint64_t seed) : random_{seed}, any_{0, blocks - 1} {}
  std::uint64_t operator()() { return any_(random_); }

 private:
  std::mt19937_64 random_;
  std::uniform_int_distribution<std::uint64_t> any_;
};

void read_with_ring(Ring& ring, const BareFile& file, std::uint64_t block, unsigned depth, double seconds, DiskRate& rate) {
  Memory memory = aligned_memory(block * depth);
  RandomBlocks next(file.size() / block, 1);
  unsigned flying = 0;
  const auto push = [&](std::uint64_t slot) {
    ring.push_read(file.fd(), memory.get() + slot * block, block, next() * block, slot);
    ++flying;
  };
  const Clock::time_point begin = Clock::now();
  for (unsigned slot = 0; slot < depth; ++slot) push(slot);
  int error = 0;
  bool stop = false;
  while (flying > 0) {  // also after an error: the kernel writes to the memory until then
    const int failed = ring.enter();
    if (failed != 0 && failed != EINTR && failed != EAGAIN && failed != EBUSY) {
      (void)memory.release();  // reads are in flight, and nobody can tell when they end
      throw IoError(failed, "io_uring_enter", file.path());
    }
    while (const auto done = ring.pop()) {
      --flying;
      if (done->result < 0) error = -done->result;
      if (done->result > 0) ++rate.requests, rate.bytes += static_cast<std::uint64_t>(done->result);
      if (!stop && error == 0) push(done->tag);
    }
    stop = stop || since(begin) >= seconds;
  }
  rate.seconds = since(begin);
  if (error != 0) throw IoError(error, "read", file.path());
}

void read_with_threads(const BareFile& file, std::uint64_t block, unsigned depth, double seconds, DiskRate& rate) {
  std::atomic<std::uint64_t> requests{0};
  std::atomic<int> error{0};
  const std::uint64_t blocks = file.size() / block;
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < depth; ++number)
    threads.emplace_back([&, number] {
      const Memory memory = aligned_memory(block);
      RandomBlocks next(blocks, number + 1);
      while (error == 0 && since(begin) < seconds) {
        const ssize_t got = pread(file.fd(), memory.get(), block, static_cast<off_t>(next() * block));
        if (got < 0 && errno != EINTR) error = errno;
        if (got > 0) ++requests;
      }
    });
  for (std::thread& thread : threads) thread.join();
  rate.seconds = since(begin);
  rate.requests = requests;
  rate.bytes = rate.requests * block;
  if (error != 0) throw IoError(error, "pread", file.path());
}

constexpr std::uint64_t kSequentialBlock = 1_MiB;

}  // namespace

DiskRate random_reads(const std::filesystem::path& path, std::uint64_t block, unsigned depth, double seconds) {
  const BareFile file(path, O_RDONLY);
  if (file.size() < block)
    throw InvalidArgument(fmt::format("{} has {} bytes, fewer than a read of {}", printable(path), file.size(), block));
  file.forget_cache();
  check_interrupt();
  DiskRate rate;
  rate.direct = file.direct();
  if (const auto ring = Ring::make(depth)) {
    rate.engine = "io_uring";
    read_with_ring(*ring, file, block, depth, seconds, rate);
  } else {
    rate.engine = "threads";
    read_with_threads(file, block, depth, seconds, rate);
  }
  check_interrupt();
  return rate;
}

DiskRate sequential_reads(const std::filesystem::path& path, double seconds) {
  const BareFile file(path, O_RDONLY);
  const std::uint64_t size = file.size();
  if (size == 0) throw InvalidArgument(fmt::format("{} is empty", printable(path)));
  file.forget_cache();
  const Memory memory = aligned_memory(kSequentialBlock);
  DiskRate rate{.requests = 0, .bytes = 0, .seconds = 0, .engine = "one thread", .direct = file.direct()};
  const Clock::time_point begin = Clock::now();
  for (std::uint64_t offset = 0; since(begin) < seconds;
       offset = offset + kSequentialBlock < size ? offset + kSequentialBlock : 0) {
    check_interrupt();
    if (offset == 0 && rate.bytes > 0) file.forget_cache();
    const ssize_t got = pread(file.fd(), memory.get(), kSequentialBlock, static_cast<off_t>(offset));
    if (got < 0) throw IoError(errno, "pread", path);
    ++rate.requests;
    rate.bytes += static_cast<std::uint64_t>(got);
  }
  rate.seconds = since(begin);
  return rate;
}

DiskRate sequential_writes(const std::filesystem::path& path, std::uint64_t most, double seconds) {
  struct Removed {
    const std::filesystem::path& path;
    ~Removed() { unlink(path.c_str()); }
  };
  const BareFile file(path, O_RDWR | O_CREAT | O_EXCL);
  const Removed removed{path};
  const Memory memory = aligned_memory(kSequentialBlock);
  DiskRate rate{.requests = 0, .bytes = 0, .seconds = 0, .engine = "one thread", .direct = file.direct()};
  const Clock::time_point begin = Clock::now();
  while (since(begin) < seconds && rate.bytes + kSequentialBlock <= std::max(most, kSequentialBlock)) {
    check_interrupt();
    const ssize_t put = pwrite(file.fd(), memory.get(), kSequentialBlock, static_cast<off_t>(rate.bytes));
    if (put < 0) throw IoError(errno, "pwrite", path);
    ++rate.requests;
    rate.bytes += static_cast<std::uint64_t>(put);
  }
  if (fsync(file.fd()) != 0) throw IoError(errno, "fsync", path);
  rate.seconds = since(begin);
  return rate;
}

}  // namespace embermap::tools
