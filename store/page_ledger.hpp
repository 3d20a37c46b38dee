// NAME.pages: for each page of a table one bit, written or never written, and one 32-bit checksum.
//
//  | header 4096 | bits: 1 a page, room for a power of two of bytes | checksums: 4 bytes a page |            little-endian,
//  sparse
//
// header: "EMBPAGES", u32 version (2), u32 flags (bit 0: pages without a bit count as written too: an adopted file), u64 pages,
//         u64 offset of the checksums, u64 XXH3-64 of the 32 bytes before it; for an adopted file what it was like when the
//         checksums were written: u64 bytes, i64 nanoseconds since 1970 when it was modified, u64 inode, u64 XXH3-64 of these 24
//         bytes (zeros: not known); of any file the commit up to which bits and checksums have what commits changed, u64, and u64
//         XXH3-64 of it (zeros: not known). Bits and checksums lie in sectors of 512 bytes: 508 of content and the content's own
//         checksum (sector_checksum). A crash leaves whole sectors, old or new; one that does not match is damage. Bit p is bit p
//         % 8 of byte p / 8 of the bits' content. A checksum is the low half of XXH3-64 over the page's bytes in the .npy (the
//         last page: up to the end of the last record), 1 where that is 0; 0 means that none was recorded.
//
// Version 1 had no checksums of sectors: 512 bytes of content each. It is read, and rewritten by the first writer that opens it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "io/file.hpp"
#include "store/adoption.hpp"

namespace embermap {

// What a ledger says of one page.
struct PageMark {
  bool written = false;
  std::uint32_t checksum = 0;  // 0: none recorded
  bool damaged = false;        // the sector of its bit or of its checksum is: neither can be relied on
};

// Thread safety: all members may be called from several threads. Members that need to know what stood in a damaged sector throw
// CorruptError naming the file, the bytes and the pages; those that do not go on.
class PageLedger {
 public:
  // `commit`: as set_commit().
  static PageLedger create(File file, std::uint64_t pages, bool adopted, std::optional<std::uint64_t> commit = {});
  // Throws FormatError if the file is not a ledger, or is shorter than its page count says. Holes are not read. A file of version
  // 1 that is open for writing is replaced by one of version 2.
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
  // What an adopted file was like when the checksums were written; nullopt: not known. What is set is durable with sync().
  std::optional<FileStamp> stamp() const;
  void set_stamp(const std::optional<FileStamp>& stamp);
  // It is not known, whatever the file says: something was written since. The file keeps it until the next set_stamp().
  void forget_stamp();
  // The commit up to which what is here has what commits changed: at least the last one that changed the table; nullopt: not
  // known. What is set is durable with sync().
  std::optional<std::uint64_t> commit() const { return number().commit; }
  void set_commit(std::uint64_t commit);
  struct Number {
    std::optional<std::uint64_t> commit;
    bool damaged = false;  // there is one, which does not match its checksum
  };
  Number number() const;
  // The same of a file of which nothing else is looked at. Throws FormatError where it is no page file, IoError.
  static Number read_number(const File& file);
  // What was recorded for the page, if that is in memory; nullopt if it is not or none was recorded.
  std::optional<std::uint32_t> checksum(std::uint64_t page) const;
  // Checksums of pages [first, first + out.size()), read from the file where they are not in memory; 0: none recorded.
  void read_checksums(std::uint64_t first, std::span<std::uint32_t> out) const;
  // Checksums of some pages, ascending, none of which is being written: from the file, on the pool's threads, one read of a
  // sector for all the pages it has. 0: none recorded. What the page cache keeps of it is given back now and then.
  void read_checksums_of(std::span<const std::uint64_t> pages, std::span<std::uint32_t> out, ThreadPool& io) const;
  // Bits and checksums of pages [first, first + out.size()), damaged ones as well.
  void read_marks(std::uint64_t first, std::span<PageMark> out) const;
  // Makes an end of damaged sectors. A page has a checksum if and only if its bit is set, so that bits are had from checksums
  // that are intact; where those are damaged too, bits are taken as the file has them. Damaged checksums are forgotten: their
  // pages have none recorded until they are sealed. Not for adopted files' bits, which mean nothing.
  void forget_damage();

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
  // One of the two regions of sectors. Its content is addressed as if nothing lay between.
  struct Region {
    std::uint64_t offset;
    std::set<std::uint64_t>& bad;  // sectors found damaged
  };
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  // Zeroed by the system on first touch: a billion pages nobody wrote take no memory.
  template <class T>
  using Zeroed = std::unique_ptr<T[], Free>;
  template <class T>
  static Zeroed<T> make_zeroed(std::uint64_t count);

  static constexpr std::uint64_t kSectorBytes = 512;
  static constexpr std::uint64_t kContent = kSectorBytes - 4;  // of a sector in the version that is written
  static constexpr std::uint64_t kBlockSectors = 8;            // unit of writing: what the page cache has in one piece
  static constexpr std::uint64_t kBlockBytes = kBlockSectors * kContent;
  static constexpr std::uint64_t kBlockSums = kBlockBytes / 4;

  PageLedger(File file, std::uint64_t pages, std::uint32_t flags, std::uint32_t version, std::uint64_t sums_offset);
  static std::uint64_t sums_offset_for(std::uint64_t pages, std::uint32_t version);
  // Bytes of the file up to the end of the checksums.
  static std::uint64_t file_bytes(std::uint64_t sums_offset, std::uint64_t pages, std::uint32_t version);
  void load_bits();
  void flush_locked();
  Region bits_region() const { return {4096, bad_bits_}; }
  Region sums_region() const { return {sums_offset_, bad_sums_}; }
  // Content of `count` sectors from `first` on, into memory that is zero. Remembers damaged ones.
  void read_sectors(const Region& region, std::uint64_t first, std::uint64_t count, std::byte* out) const;
  // Writes `content`, which begins with sector `first`, and zeros to the end of its last sector, with its checksums.
  static void write_sectors(const File& file, std::uint64_t offset, std::uint64_t first, std::span<const std::byte> content);
  // Writes a block of a region, or the end of its last one; a damaged sector in it stays as it is.
  void write_block(const Region& region, std::uint64_t block, std::span<const std::byte> content) const;
  void load_sums(std::uint64_t first, std::span<std::uint32_t> out) const;  // from the file
  void check_bit(std::uint64_t page) const;                                 // throws CorruptError
  void check_sum(std::uint64_t page) const;                                 // throws CorruptError
  [[noreturn]] void throw_damaged(const Region& region, std::uint64_t sector, std::uint64_t pages_each) const;
  void flush_pending();
  // Removes what the last sector of checksums has behind page `pages`.
  void clear_behind(std::uint64_t pages);
  // A new file for `pages` pages in place of this one.
  void rewrite(std::uint64_t pages);
  void write_header(const File& file) const;
  void load_stamp();
  std::uint64_t next_written(std::uint64_t page) const;   // with mutex_ held, as all below
  std::uint64_t next_checksum(std::uint64_t page) const;  // or earlier: the begin of the block that may hold one
  std::uint64_t bits_size() const;                        // bytes of bits_: the content of their region
  // Whether a sector is as it was written; those of version 1 cannot tell.
  bool matches(const Region& region, std::uint64_t sector, std::span<const std::byte> whole) const;
  std::uint64_t pages_of_bits() const { return content_ * 8; }  // in a sector
  std::uint64_t pages_of_sums() const { return content_ / 4; }

  File file_;
  std::uint64_t pages_ = 0;
  std::uint32_t flags_ = 0;
  std::uint64_t content_ = kContent;  // bytes a sector
  std::uint64_t sums_offset_ = 0;
  mutable std::mutex mutex_;
  std::optional<FileStamp> stamp_;
  Number number_;
  mutable std::atomic<std::uint64_t> sums_read_{0};      // sectors, by read_checksums_of()
  mutable std::set<std::uint64_t> bad_bits_, bad_sums_;  // damaged sectors, as far as they were read
  Zeroed<std::uint8_t> bits_;
  std::vector<bool> dirty_bits_;                         // a block of bits_
  Zeroed<std::uint32_t> sums_;                           // null unless kept
  std::map<std::uint64_t, bool> dirty_sums_;             // blocks of sums_ (kept)
  std::map<std::uint64_t, std::uint32_t> pending_sums_;  // page -> checksum (not kept)
};

}  // namespace embermap
