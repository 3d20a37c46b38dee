// Pages of one table between memory and disk: read, generated if they were never written, written, checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "io/file.hpp"
#include "io/page_io.hpp"
#include "store/geometry.hpp"
#include "store/initializer.hpp"
#include "store/page_ledger.hpp"
#include "store/redo_log.hpp"
#include "store/schema.hpp"

namespace embermap {

// A page and the page_bytes() of memory that hold it or will.
struct PageBuffer {
  std::uint64_t page = 0;
  std::byte* memory = nullptr;
};

// Whether what is being read is still wanted. Asked for each page, on several threads at once. Empty: it is.
using StillWanted = std::function<bool()>;

// What PageFile::read() throws when it is not.
class NotWanted final : public Error {
 public:
  NotWanted() : Error("what was being read is not wanted any more") {}
};

struct PageFileOptions {
  PageIoOptions io = {};
  bool alone = true;  // nobody else may have changed the file since the ledger was opened: a mismatch means damage
  bool swap = false;  // elements have the other byte order in the file. Not for structured records
  // Newer pages than those of the file are here, under the number `id`; null: there are none. Must outlive the PageFile.
  LoggedPages* logged = nullptr;
  RedoLog* log = nullptr;  // the same, for a writer: written pages go to it; null: they go to the file
  std::uint32_t id = 0;
  bool skip_damaged = false;  // pages of the log that do not match their checksums are not applied: see skipped()
  bool verify_reads = false;  // compare pages with checksums that are not in memory, too: a second read
};

// Thread safety: all members but set_geometry and close may be called from several threads, but nobody may read or write a
// page while another writes it.
//
// With a log, pages that are written go there, and the file gets them when the log is applied: by apply(), with the checksums
// that then go to the ledger. Until then the ledger says what the file has, which is what the last applied commit made of it, and
// written() what whoever reads here sees.
class PageFile final : public LogTarget {
 public:
  struct Counters {
    std::atomic<std::uint64_t> pages_read{0}, pages_generated{0}, pages_written{0}, bytes_read{0}, bytes_written{0};
    std::atomic<std::uint64_t> read_requests{0}, write_requests{0};  // made to the system: neighbouring pages share one
    // Spent in read() and write() by all callers together; of read(), the time in which missing pages were generated as well.
    std::atomic<std::uint64_t> read_nanoseconds{0}, write_nanoseconds{0};
  };

  // `before_write` runs before any page is written, so that the store can note that the file is ahead of the last commit.
  PageFile(std::string table, File data, PageLedger ledger, const Schema& schema, const Geometry& geometry, Initializer init,
           std::uint64_t seed, ThreadPool& compute, ThreadPool& io, std::function<void()> before_write,
           const PageFileOptions& options = {});

  // Fills the buffers (their order is changed: sorted by page; no page twice). Written pages are read, neighbours in one request,
  // many requests at once, and compared with their checksum where that is in memory, or PageFileOptions::verify_reads; the others
  // are generated meanwhile. Bytes behind the last row are zero. Memory aligned to 4 KiB is read and written without a copy
  // (AlignedBuffer). Throws IoError, FormatError (truncated), CorruptError naming the rows.
  // Where `wanted` says no, nothing more is asked of the disk, and when nothing is in flight this throws NotWanted; `there`
  // (empty, or a flag for each buffer, 0) is 1 then for those buffers, as they are ordered now, that are filled.
  void read(std::span<PageBuffer> pages, const StillWanted& wanted = {}, std::span<std::uint8_t> there = {});
  // Writes the buffers (their order is changed) with their checksums. Durable after sync(), or with the log's next commit. After
  // a failure each page holds its old bytes, its new ones, or the first of these and the rest of those, and can be read.
  void write(std::span<PageBuffer> pages);
  // Whether the page was ever written, here or in the log.
  bool written(std::uint64_t page) const;
  std::uint64_t count_written() const;
  // The beginning of the file, as long as kLogBlock: through the log, if there is one.
  void write_header(std::string_view header);
  // Reads pages as the file has them, written or not, in its byte order and unchecked. done(page) is called for each as it
  // arrives, on several threads at once.
  void read_stored(std::span<PageBuffer> pages, const std::function<void(const PageBuffer&)>& done);
  // The other way round: pages as read_stored() gives them.
  void write_as_stored(std::span<PageBuffer> pages);
  // Records the checksum of what the file has for a written page now: after its length changed, or to accept it as it is. Where
  // it cannot be read, "none recorded" is what is known about it.
  void seal(std::uint64_t page) { seal(std::span(&page, 1)); }
  void seal(std::span<const std::uint64_t> pages);  // ascending
  // Makes what was written durable: data first, then the ledger. A sync that failed is not tried again: the system may have given
  // up the pages it could not write, and a second one would succeed without them. From then on this throws.
  // `commit`: all that it changed is in what is made durable, and the ledger says so.
  void sync(std::optional<std::uint64_t> commit = {});
  // What others changed in an adopted file counts as accepted with the next sync(): the file is as embermap left it then. Until
  // that it is told of when the store is opened again, also if pages were written here since.
  void accept_changes();
  // True if a write has not been synced.
  bool ahead() const noexcept { return ahead_.load(); }
  void set_ahead() noexcept { ahead_.store(true); }

  // Initial records for rows [first, first + count): what a row never written holds.
  void generate(std::uint64_t first, std::uint64_t count, std::byte* out) const;
  // The same but for the weights, which are left zero.
  void generate_states(std::uint64_t count, std::byte* out) const;

  const Geometry& geometry() const noexcept { return geometry_; }
  const Schema& schema() const noexcept { return schema_; }
  PageLedger& ledger() noexcept { return ledger_; }
  const PageLedger& ledger() const noexcept { return ledger_; }
  File& data() noexcept { return data_; }
  const Counters& counters() const noexcept { return counters_; }
  // How the file is read and written; finds out if nobody has used it yet.
  PageIoReport io_report() const { return io().report(); }
  // For memory of many reads and writes; see PageIo.
  void register_frames(std::span<std::byte> slab) { io().register_frames(slab); }
  void forget_frames() noexcept {
    if (page_io_) page_io_->forget_frames();
  }
  std::string describe(std::uint64_t page) const;  // "page 3 (rows 24 to 31) of table 'items'"

  // LogTarget
  std::uint64_t page_bytes() const override { return geometry_.page_bytes(); }
  std::uint64_t pages() const override { return pages_.load(std::memory_order_relaxed); }
  void apply(std::span<const LogTarget::Page> pages) override;
  bool skipped() const noexcept { return skipped_.load(); }  // a page, which was damaged in the log
  void apply_header(std::span<const std::byte> header) override;
  void apply_in_place(std::uint64_t page, std::uint32_t checksum) override;
  void sync_applied(std::uint64_t commit) override;
  void sync_data() override;

  // Only while no other call runs.
  void set_geometry(const Geometry& geometry) {
    geometry_ = geometry;
    pages_ = geometry.pages();
  }
  void close();

 private:
  CorruptError damaged(std::uint64_t page, std::string_view how) const;
  PageIo& io() const;
  std::vector<IoPiece> pieces_of(std::span<const PageBuffer> pages) const;
  void read_now(std::span<const PageBuffer> pages, const StillWanted& wanted, std::span<std::uint8_t> there);
  // `recorded(page, checksum)` for each page as it is written, on several threads at once.
  using Recorded = std::function<void(std::uint64_t, std::uint32_t)>;
  void write_stored(std::span<const PageBuffer> pages, std::span<const IoPiece> pieces, const Recorded& recorded);
  Recorded to_ledger();
  void check_applied(std::uint64_t page) const;  // throws FormatError if the table has no such page
  void write_swapped(std::span<const PageBuffer> pages);
  void write_logged(std::span<const PageBuffer> pages);
  void write_in_place(std::span<const PageBuffer> pages);
  void note_unfinished(std::span<const PageBuffer> pages) noexcept;  // as seal_unfinished(), of pages in place
  void seal_pages(std::span<const std::uint64_t> pages, bool forget_unreadable);
  // An adopted file's stamp, which tells whether others changed it: what is written here changes it, too.
  void note_writing();   // before the file is written to
  bool writing() const;  // since the stamp was recorded
  void record_stamp();   // after the sync of what was written
  // After a write that failed: of the pages it had not finished, some may be in the file in part, which their checksums, still
  // those of before, would call damage. They get the checksum of what the file has.
  void seal_unfinished(std::span<const PageBuffer> pages, std::span<const std::uint8_t> done) noexcept;
  void arrived(const PageBuffer& page, std::optional<std::uint32_t> recorded) const;
  template <class Sync>
  void sync_once(const Sync& sync);
  std::uint64_t elements_in(std::uint64_t page) const;

  std::string table_;
  File data_;
  PageLedger ledger_;
  const Schema& schema_;
  Geometry geometry_;
  std::atomic<std::uint64_t> pages_;  // of geometry_
  Initializer init_;
  std::uint64_t seed_;
  ThreadPool& compute_;
  ThreadPool& io_threads_;
  std::function<void()> before_write_;
  bool alone_;
  bool swap_;
  LoggedPages* const logged_;
  RedoLog* const log_;
  const std::uint32_t id_;
  const bool skip_damaged_;
  std::atomic<bool> skipped_{false};
  const bool verify_reads_;
  Counters counters_;
  std::atomic<bool> ahead_{false};
  std::atomic<bool> sync_failed_{false};
  mutable std::mutex stamp_mutex_;
  bool writing_ = false;             // to an adopted file, since its stamp was recorded
  std::optional<FileStamp> stays_;   // its stamp, where others changed the file before it was written to here
  std::unique_ptr<PageIo> page_io_;  // none once closed
  void recall(std::span<const PageBuffer> pages, std::span<std::optional<std::uint32_t>> recorded) const;
};

}  // namespace embermap
