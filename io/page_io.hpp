// Batches of pages between one file and memory, at the depth a disk needs: io_uring, threads that wait, or copies from the page
// cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/thread_pool.hpp"
#include "io/file.hpp"

namespace embermap {

enum class IoEngine : std::uint8_t {
  kUring,    // "io_uring": requests queued to the kernel in batches, by one thread
  kThreads,  // "threads": pread and pwrite on the threads of a pool
  kCached    // "cached": what is in the page cache is copied from there; the rest is read, and everything written, by threads
};
std::string_view io_engine_name(IoEngine engine);
// Throws InvalidArgument listing the names.
IoEngine parse_io_engine(std::string_view name);

struct PageIoOptions {
  std::optional<IoEngine> engine = {};  // nullopt: chosen by a short probe of the file
  std::optional<bool> direct = {};      // past the page cache (O_DIRECT); nullopt: wherever kernel and file system allow it
  unsigned depth = 128;                 // requests in flight of one call (1 to 4096)
  // The file was there before, and others use it: if most of it is in the page cache, it may stay there and is copied from there.
  bool prefer_cached = false;
};

// How a file is read and written, what was refused and why, and what that took so far.
struct PageIoReport {
  IoEngine engine = IoEngine::kThreads;
  bool direct_reads = false, direct_writes = false;     // whatever the alignment; but not what ends with the file
  bool fixed_buffers = false;                           // the registered frames are known to the kernel
  unsigned depth = 0;                                   // requests in flight of one call
  std::uint64_t memory_bytes = 0;                       // rings, bounce buffers, staging of unaligned writes
  std::string note;                                     // "io_uring_setup: Operation not permitted"; empty: nothing was refused
  std::uint64_t read_requests = 0, write_requests = 0;  // made to the system, after merging; a copy from the page cache is none
  std::uint64_t bounced_bytes = 0;                      // read through bounce buffers
  std::uint64_t cached_bytes = 0;                       // copied from the page cache
};

// `bytes` bytes of the file from `offset` on, and the memory that holds them or will. What follows them in memory, up to `room`
// bytes (at least `bytes`) from `memory` on, may be overwritten by a read: direct reads round up.
struct IoPiece {
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t room = 0;
};

// Work for the time that reads are in flight: body(begin, end) over [0, count) in stretches of `grain`, on threads of `pool` or
// of the I/O pool, possibly several at once.
struct Meanwhile {
  std::uint64_t count = 0;
  std::uint64_t grain = 1;
  ThreadPool* pool = nullptr;  // nullptr: the calling thread
  std::function<void(std::uint64_t, std::uint64_t)> body = {};
};

// Thread safety: all members may be called from several threads at once. A call that throws leaves no request in flight: its
// memory is the caller's again. Not usable in a forked child (ClosedError), where it can only be destroyed; that does not disturb
// the parent.
//
// Writes and direct I/O: bytes written here are seen by reads here, whichever way both go. Nothing is durable before
// File::sync(); what is written past or dropped from the page cache is not either.
class PageIo {
 public:
  using Done = std::function<void(std::size_t)>;

  // Nothing happens before the first use: then the file is probed, once. `file` and `io` must outlive this; the file may grow,
  // shrink and be renamed. Throws InvalidArgument for a depth that cannot be.
  PageIo(const File& file, ThreadPool& io, const PageIoOptions& options = {});
  ~PageIo();
  PageIo(const PageIo&) = delete;
  PageIo& operator=(const PageIo&) = delete;

  // Makes the memory of many reads and writes to come known to the kernel, which then need not look it up each time. It must stay
  // mapped until forget_frames(), which waits for the calls that run. One slab at a time. A refusal (RLIMIT_MEMLOCK) is reported
  // and costs speed only.
  void register_frames(std::span<std::byte> slab);
  void forget_frames() noexcept;

  // Pieces are sorted by offset and do not overlap, in the file or in memory. Neighbours travel in one request. done(i) is called
  // once for each piece as it arrives, while others are in flight, on the calling thread or on threads of the pool, several at
  // once. `meanwhile` is done when this returns. Throws IoError, FormatError "truncated", InvalidArgument for pieces out of
  // order, and what `done` and `meanwhile` throw. Returns how many requests were made to the system.
  std::uint64_t read(std::span<const IoPiece> pieces, const Done& done = {}, const Meanwhile& meanwhile = {});
  // Pieces of another file, on the same terms.
  struct Beside {
    PageIo& io;
    std::span<const IoPiece> pieces;
    const Done& done;
  };
  // The same, and those of `beside` in the same queue, so that the disk has all of them at once; one file after the other where
  // either is not read by io_uring.
  std::uint64_t read(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile, const Beside& beside);
  // Likewise; memory is only read. done(i): piece i is written (not durable).
  std::uint64_t write(std::span<const IoPiece> pieces, const Done& done = {});

  // Probes the file if nobody has used it yet.
  PageIoReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace embermap
