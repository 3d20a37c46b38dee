// What of a file is in the page cache already.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "io/file.hpp"

namespace embermap {

// Copies come from reads that do not wait (preadv2 with RWF_NOWAIT), not from a mapping: a file that someone cuts short meanwhile
// is a short read, where a mapping would be SIGBUS, and a page costs a sixth of a page fault.
// Thread safety: all members may be called from several threads at once. The file may grow and shrink.
class CachedFile {
 public:
  // `in_memory`: the file system is memory, so that no read waits.
  CachedFile(const File& file, bool in_memory) : file_{file}, in_memory_{in_memory} {}

  // Copies out.size() bytes from `offset` on if all of them are in the page cache. False if not, or where the system does not
  // read so, or the file ends before, or the read fails: a plain read then says what is wrong.
  bool copy(std::uint64_t offset, std::span<std::byte> out);
  // The share of the file that is in the page cache, by samples of it. 0 where that cannot be told.
  double resident_share();
  // Empty if it works, else why not.
  std::string why() const;

 private:
  void refuse(std::string_view why);

  const File& file_;
  const bool in_memory_;
  std::atomic<bool> refused_{false};
  mutable std::mutex mutex_;
  std::string why_;
};

}  // namespace embermap
