// io_uring: rings that each serve one call at a time, and the few of them that a file needs.
#pragma once

#include <liburing.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "io/io_plan.hpp"

namespace embermap {

// One batch for a ring.
struct UringJob {
  const IoPlan& plan;
  bool write = false;
  // A request has ended with `result`, a count or a negative errno. What was read lies in `bounce` if the request has no memory
  // of its own.
  std::function<void(const IoRequest&, int result, std::byte* bounce)> complete;
  // Does a little of the work that is to be done meanwhile; false: none is left. May be empty.
  std::function<bool()> meanwhile;
  // The requests from this one on are of another file, with these descriptors, as those of the ring: buffered, direct.
  std::size_t others_from = ~std::size_t{0};
  std::array<int, 2> other_fds = {-1, -1};
};

// Memory known to the kernel.
struct FixedFrames {
  std::uint64_t generation = 0;
  std::span<std::byte> slab;
};

// A ring over one file. Not thread-safe. In a forked child it can be destroyed, and that is all.
class Uring {
 public:
  // The descriptors: 0 for buffered requests, 1 for direct ones (-1: none). Throws std::system_error naming the refused call.
  Uring(const File& file, int direct_fd, unsigned depth);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // Runs all requests, up to `depth` at a time. Returns, or throws, when none is in flight any more.
  void run(const UringJob& job);

  // Makes these frames, and no others, known to the kernel. False: refused, with errno.
  bool register_frames(const FixedFrames& frames);
  const FixedFrames& frames() const noexcept { return frames_; }

  bool broken() const noexcept { return broken_; }                        // not to be used again
  std::uint64_t memory_bytes() const noexcept { return memory_.load(); }  // from any thread

 private:
  struct Loop;
  void prepare(const UringJob& job, std::size_t index, std::uint32_t slot);
  int fixed_index(const std::byte* memory, std::uint64_t bytes) const noexcept;

  const File& file_;
  int fds_[2];
  bool fixed_files_ = false;
  const pid_t process_ = ::getpid();
  unsigned depth_;
  bool broken_ = false;
  FixedFrames frames_;
  AlignedBuffer bounce_;
  std::uint64_t slot_bytes_ = 0;
  std::atomic<std::uint64_t> memory_{0};
  io_uring ring_{};
};

// Up to 16 rings over one file, made when they are needed; callers beyond that wait.
class UringPool {
 public:
  static constexpr std::size_t kMostRings = 16;

  // Makes the first ring. Throws std::system_error.
  UringPool(const File& file, int direct_fd, unsigned depth);
  ~UringPool();

  void run(const UringJob& job);
  void set_frames(std::span<std::byte> slab);
  // Returns when no ring knows them.
  void forget_frames() noexcept;
  // Whether the registered frames are known to the kernel, as far as rings have been told.
  bool fixed() const;
  std::string why_not_fixed() const;
  std::uint64_t memory_bytes() const;

 private:
  class Lease;
  std::unique_ptr<Uring> take();
  void put_back(std::unique_ptr<Uring> ring) noexcept;
  void tell(Uring& ring);  // of the frames, if it does not know

  const File& file_;
  int direct_fd_;
  unsigned depth_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Uring>> idle_;
  std::vector<const Uring*> leased_;
  FixedFrames frames_;
  std::string refused_;
};

}  // namespace embermap
