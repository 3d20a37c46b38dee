// Pages of one table between memory and disk: read, generated if they were never written, written, checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "io/file.hpp"
#include "store/geometry.hpp"
#include "store/initializer.hpp"
#include "store/page_ledger.hpp"
#include "store/schema.hpp"

namespace embermap {

// A page and the page_bytes() of memory that hold it or will.
struct PageBuffer {
  std::uint64_t page = 0;
  std::byte* memory = nullptr;
};

// Thread safety: all members but set_geometry and close may be called from several threads, but nobody may read or write a
// page while another writes it.
class PageFile {
 public:
  struct Counters {
    std::atomic<std::uint64_t> pages_read{0}, pages_generated{0}, pages_written{0}, bytes_read{0}, bytes_written{0};
  };

  // `alone`: nobody else may have changed the file since the ledger was opened, so that a mismatch means damage.
  // `before_write` runs before any page is written, so that the store can note that the file is ahead of the last commit.
  PageFile(std::string table, File data, PageLedger ledger, const Schema& schema, const Geometry& geometry, Initializer init,
           std::uint64_t seed, ThreadPool& compute, ThreadPool& io, std::function<void()> before_write, bool alone = true);

  // Fills the buffers (their order is changed: sorted by page). Written pages are read, neighbours in one call, several calls at
  // once, and compared with their checksum where that is in memory; the others are generated. Bytes behind the last row are zero.
  // Throws IoError, FormatError (truncated), CorruptError naming the rows.
  void read(std::span<PageBuffer> pages);
  // Writes the buffers (their order is changed) with their checksums. Durable after sync().
  void write(std::span<PageBuffer> pages);
  // Records the checksum of what the file has for a written page now: after its length changed, or to accept it as it is. Where
  // it cannot be read, "none recorded" is what is known about it.
  void seal(std::uint64_t page);
  // Makes what was written durable: data first, then the ledger. A sync that failed is not tried again: the system may have given
  // up the pages it could not write, and a second one would succeed without them. From then on this throws.
  void sync();
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
  std::string describe(std::uint64_t page) const;  // "page 3 (rows 24 to 31) of table 'items'"

  // Only while no other call runs.
  void set_geometry(const Geometry& geometry) { geometry_ = geometry; }
  void close();

 private:
  CorruptError damaged(std::uint64_t page, std::string_view how) const;
  void read_run(std::span<const PageBuffer> run);
  void write_run(std::span<const PageBuffer> run);

  std::string table_;
  File data_;
  PageLedger ledger_;
  const Schema& schema_;
  Geometry geometry_;
  Initializer init_;
  std::uint64_t seed_;
  ThreadPool& compute_;
  ThreadPool& io_;
  std::function<void()> before_write_;
  bool alone_;
  Counters counters_;
  std::atomic<bool> ahead_{false};
  std::atomic<bool> sync_failed_{false};
};

}  // namespace embermap
