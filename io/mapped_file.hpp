// A file as memory: read-only, shared with everybody who has the file in the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/thread_pool.hpp"
#include "io/file.hpp"

namespace embermap {

namespace detail {
struct MappedRegion;
}

// The beginning of a file, mapped for reading. What nobody reads takes no memory; what is read lies in the page cache once,
// however many processes have it mapped, and page tables take 2 MiB a GiB in each of them.
//
// A mapping may fail at any load: someone cuts the file short, the disk does not answer. The system sends SIGBUS then. A handler
// of this process's puts zeros in place of the whole mapping and remembers it, so that the load goes on: whoever reads calls
// check() afterwards, and what it read counts only if that does not throw. The handler is made with the first mapping, stays, and
// hands on every other SIGBUS to whoever had it before. Where another one was installed later, each mapping and each guard()
// takes the signal again, and hands on to that one.
//
// Thread safety: all members but assignment may be called from several threads. Nobody may read when the mapping ends.
class MappedFile {
 public:
  MappedFile() = default;
  // Bytes [0, bytes) of the file, bytes > 0; the file may be closed afterwards. Throws FormatError "truncated" if it has fewer,
  // IoError.
  MappedFile(const File& file, std::uint64_t bytes);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile() { release(); }

  const std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }

  // Reads all of it into the page cache, on the pool's threads, and maps what is there. Where that fails, nothing happens.
  void populate(ThreadPool& pool) const noexcept;
  // Bytes [offset, offset + bytes) will be read, all of them: the disk begins, if they are many and not all in memory. Otherwise
  // each page that is missing is read alone.
  void will_need(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  // Before reading: a handler may have been installed since the mapping was made that would end the process. One call to the
  // system.
  void guard() const;
  // True once a load has failed. The mapping holds zeros from then on.
  bool failed() const noexcept;
  // Throws if the bytes read so far may not be those of the file: a load failed, or `file`, the same one, is shorter now than
  // what is mapped (pages that a device reads stay what they were, and nobody is sent a signal). FormatError "truncated",
  // IoError.
  void check(const File& file) const;

 private:
  void release() noexcept;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  detail::MappedRegion* region_ = nullptr;
};

}  // namespace embermap
