// What a disk gives by itself: reads and writes of one file with nothing of the store in between, as a measure for the store.
// Shares no code with the store's own I/O.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace embermap::tools {

struct DiskRate {
  std::uint64_t requests = 0;
  std::uint64_t bytes = 0;
  double seconds = 0;
  std::string engine;   // "io_uring", or "threads" where the kernel refuses io_uring
  bool direct = false;  // past the page cache (O_DIRECT); false where the file system refuses it

  double per_second() const { return seconds > 0 ? static_cast<double>(requests) / seconds : 0; }
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

// Each stops after about `seconds`. All throw IoError, InvalidArgument for a file shorter than one block, and Interrupted when
// the tool was asked to stop.

// Reads of `block` bytes (a multiple of 512) at random multiples of `block`, `depth` of them in flight all the time. Without
// direct I/O what the page cache has is dropped before.
DiskRate random_reads(const std::filesystem::path& file, std::uint64_t block, unsigned depth, double seconds);

// The file from its beginning, 1 MiB at a time by one thread, as `dd bs=1M iflag=direct`; from the beginning again at its end.
DiskRate sequential_reads(const std::filesystem::path& file, double seconds);

// A new file of at most `most` bytes, 1 MiB at a time by one thread, synced at the end, as `dd bs=1M oflag=direct conv=fsync`.
// The file is removed.
DiskRate sequential_writes(const std::filesystem::path& file, std::uint64_t most, double seconds);

}  // namespace embermap::tools
