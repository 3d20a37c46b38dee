// A table's own file as memory: the rows of a reader that keeps none of its own (Pin::kMapping).
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "io/mapped_file.hpp"
#include "kernels/cuda.hpp"
#include "store/logged_pages.hpp"
#include "store/page_file.hpp"

namespace embermap {

// Page p lies in frame p, and row r at rows() + r * stride. All pages are in the file, whether the ledger has them or the log
// does; those whose newest version is in the log itself are not had here, nor will be when it is applied meanwhile: a device goes
// on reading the pages that it was given.
//
// The way to read: has() the pages, read, check(), and the reader's look at the log (LoggedPages::reading) around it all.
//
// Thread safety: const members and pin() may be called from several threads.
class MappedTable {
 public:
  // `file` and `logged`, what the reader has beside it for table `id`, are those of one look at the store. Precondition: each
  // page was written. Throws FormatError (truncated), IoError.
  MappedTable(PageFile& file, const LoggedPages& logged, std::uint32_t id);

  // For another look at the store: true if its files are known to be these, as they were. The mapping then stays, with what the
  // log has now; otherwise it must go.
  bool keep(PageFile& file, const LoggedPages& logged, std::uint32_t id);

  // Registers it with CUDA for kernels of `device`; with the first call, which reads all of the file. Where that fails,
  // registered() is false, and error() says why.
  void pin(int device, ThreadPool& io);
  bool registered() const;
  std::string error() const;

  bool has(std::span<const std::uint64_t> pages) const noexcept;
  bool has_rows(std::span<const std::uint64_t> ids) const noexcept;
  // Before these rows are read: where they lie together, the disk may read ahead.
  void will_need(std::span<const std::uint64_t> ids) const noexcept;
  const std::byte* rows() const noexcept { return mapping_.data() + geometry_.data_offset; }
  FrameSource source() const;
  void guard() const { mapping_.guard(); }
  // Throws what MappedFile::check() throws.
  void check(PageFile& file) const { mapping_.check(file.data()); }

  std::uint64_t bytes() const noexcept { return mapping_.bytes(); }
  std::uint64_t memory_bytes() const noexcept { return logged_.size() * sizeof(logged_[0]); }

 private:
  bool is_logged(std::uint64_t page) const noexcept { return (logged_[page / 64] >> (page % 64) & 1U) != 0; }
  void look(const LoggedPages& logged, std::uint32_t id);

  Geometry geometry_;
  MappedFile mapping_;
  std::vector<std::uint64_t> known_;   // LoggedPages::files_known()
  std::vector<std::uint64_t> status_;  // of the file: which one, how long, when it was changed
  std::vector<std::uint64_t> logged_;  // one bit a page; empty: none is in the log
  mutable std::mutex pin_mutex_;
  bool pin_tried_ = false;
  PinnedRange pinned_;  // after mapping_: ends before it
  std::string error_;
};

// How many pages of the table were never written, by anyone the reader can see.
std::uint64_t pages_not_written(const PageFile& file);

// Frames of a source whose page p is in frame p, for the first of these ascending pages and as many more as 32 bits can number
// from some page on, which the result's slab begins with.
struct PageFrames {
  FrameSource source;
  std::vector<std::uint32_t> frames;
};
PageFrames frames_of_pages(const FrameSource& source, std::span<const std::uint64_t> pages);

}  // namespace embermap
