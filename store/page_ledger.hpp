// NAME.pages: for each page of a table one bit, written or never written, and one 32-bit checksum.
//
//  | header 4096 | bits: 1 a page, room for a power of two of bytes | checksums: 4 bytes a page |            little-endian,
//  sparse
//
// header: "EMBPAGES", u32 version (1), u32 flags (bit 0: pages without a bit count as written too: an adopted file), u64 pages,
//         u64 offset of the checksums, u64 XXH3-64 of the 32 bytes before it. Bit p is bit p % 8 of byte 4096 + p / 8. A checksum
//         is the low half of XXH3-64 over the page's bytes in the .npy (the last page: up to the end of the last record), 1 where
//         that is 0; 0 means that none was recorded.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "io/file.hpp"

namespace embermap {

// Thread safety: all members may be called from several threads.
class PageLedger {
 public:
  static PageLedger create(File file, std::uint64_t pages, bool adopted);
  // Throws FormatError if the file is not a ledger, or is shorter than its page count says.
  static PageLedger open(File file);
  PageLedger(PageLedger&& other) noexcept;
  PageLedger& operator=(PageLedger&&) = delete;

  std::uint64_t pages() const noexcept { return pages_; }
  bool written(std::uint64_t page) const;
  std::uint64_t count_written() const;
  // The first page from `page` on that is written or may have a checksum; pages() if there is none. Skips what is a hole in the
  // file without looking at single pages: a billion of them take a moment.
  std::uint64_t next_marked(std::uint64_t page) const;
  void record(std::uint64_t page, std::uint32_t checksum);  // the page is now in the file

  // Keeps all checksums in memory from now on (4 bytes a page), so that checksum() knows them without reading.
  void keep_checksums();
  // Gives that memory back.
  void drop_checksums();
  bool keeps_checksums() const;
  // Whether all pages count as written, with or without a checksum.
  bool adopted() const noexcept;
  // What was recorded for the page, if that is in memory; nullopt if it is not or none was recorded.
  std::optional<std::uint32_t> checksum(std::uint64_t page) const;
  // Checksums of pages [first, first + out.size()), read from the file where they are not in memory; 0: none recorded.
  void read_checksums(std::uint64_t first, std::span<std::uint32_t> out) const;

  // Writes what changed. Memory of unwritten checksums is bounded: record() writes by itself above 4 MiB.
  void write_out();
  void sync();  // makes it durable
  void flush() {
    write_out();
    sync();
  }
  // Removes checksums of pages that are not marked as written: left by a session that ended between the two.
  void forget_unwritten();
  // Pages beyond the new end are forgotten. Rewrites the file atomically if the bits need more room. Flushes.
  void resize(std::uint64_t pages);
  void close();

  std::uint64_t memory_bytes() const;  // bits, and checksums if they are kept
  // What `pages` pages take.
  static std::uint64_t bits_bytes(std::uint64_t pages) noexcept { return pages / 8 + 1; }
  static std::uint64_t checksum_bytes(std::uint64_t pages) noexcept { return pages * 4; }

 private:
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  // Zeroed by the system on first touch: a billion pages nobody wrote take no memory.
  template <class T>
  using Zeroed = std::unique_ptr<T[], Free>;
  template <class T>
  static Zeroed<T> make_zeroed(std::uint64_t count);

  static constexpr std::uint64_t kBlockBytes = 4096;  // unit of writing bits and checksums
  static constexpr std::uint64_t kBlockSums = kBlockBytes / 4;

  PageLedger(File file, std::uint64_t pages, std::uint32_t flags);
  void load_bits();
  void flush_locked();
  void write_header(const File& file) const;
  std::uint64_t next_written(std::uint64_t page) const;   // with mutex_ held, as all below
  std::uint64_t next_checksum(std::uint64_t page) const;  // or earlier: the begin of the block that may hold one
  std::uint64_t bits_room() const;                        // bytes of the bits' region

  File file_;
  std::uint64_t pages_ = 0;
  std::uint32_t flags_ = 0;
  std::uint64_t sums_offset_ = 0;
  mutable std::mutex mutex_;
  Zeroed<std::uint8_t> bits_;
  std::vector<bool> dirty_bits_;                         // a block of bits_
  Zeroed<std::uint32_t> sums_;                           // null unless kept
  std::map<std::uint64_t, bool> dirty_sums_;             // blocks of sums_ (kept)
  std::map<std::uint64_t, std::uint32_t> pending_sums_;  // page -> checksum (not kept)
};

}  // namespace embermap
