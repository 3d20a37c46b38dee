// What of a file is in memory already, copied from a mapping of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "io/file.hpp"

namespace embermap {

// Thread safety: all members may be called from several threads at once. The file may grow and shrink: it is mapped as a whole,
// and again once it has grown. The address space taken is the file's size; of its pages at most about 32 MiB are in the page
// table, so that the process does not seem to need them.
class FileView {
 public:
  explicit FileView(const File& file);

  // Copies out.size() bytes from `offset` on if all of them are in memory, so that no page has to be read from a disk for it.
  // False if not, or where nothing is to be had: beyond `file_bytes` (the size now, asked once for many copies), or the mapping
  // is refused. Only a file cut short, or a page dropped that cannot be read again, between the look and the copy is SIGBUS, as
  // for any mapping.
  bool copy(std::uint64_t offset, std::span<std::byte> out, std::uint64_t file_bytes);
  // The share of the file that is in memory, by samples of it. 0 where that cannot be told.
  double resident_share();
  // Empty if it works, else why not.
  std::string why() const;

 private:
  class Region;
  std::shared_ptr<const Region> region(std::uint64_t end, std::uint64_t file_bytes);

  static constexpr std::uint64_t kMostMapped = 32ULL << 20;

  const File& file_;
  std::atomic<std::uint64_t> touched_{0};
  bool told_ = false;  // the kernel tells what is in memory: it does not for files of others that we may not write
  mutable std::mutex mutex_;
  std::shared_ptr<const Region> region_;
  std::string refused_;
};

}  // namespace embermap
