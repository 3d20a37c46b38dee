// A second descriptor of a file, for I/O past the page cache and for keeping that cache small.
#pragma once

#include <cstdint>
#include <string>

#include "io/file.hpp"
#include "io/io_plan.hpp"

namespace embermap {

// Refers to the same file through renames. Its errors of write-back are its own: what it learns and drops, fdatasync on the first
// descriptor still reports.
class DirectFile {
 public:
  // With O_DIRECT where `direct` and the file system allow it; otherwise a plain one (none where even that fails). Never throws
  // but for memory: why() says what was refused.
  DirectFile(const File& file, bool direct);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  int fd() const noexcept { return fd_; }  // -1: none
  // {0, 0} without direct I/O.
  const DirectAlignment& alignment() const noexcept { return alignment_; }
  const std::string& why() const noexcept { return why_; }

  // Lets go of the file's clean pages in the page cache; with `write`, dirty ones are written first.
  void drop_cache(bool write) const noexcept;

 private:
  bool try_direct(const File& file);
  int reopen(const File& file, int flags);

  FileOps& ops_;
  int fd_ = -1;
  DirectAlignment alignment_;
  std::string why_;
};

// On tmpfs and its like the page cache is the file: there is nothing to go past, and nothing to drop.
bool lives_in_memory(const File& file);

}  // namespace embermap
