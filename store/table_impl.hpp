// The inside of a table. Private to store/.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "base/divider.hpp"
#include "base/shared_mutex.hpp"
#include "kernels/batch.hpp"
#include "store/hot_pages.hpp"
#include "store/manifest.hpp"
#include "store/mapped_table.hpp"
#include "store/page_file.hpp"
#include "store/store_core.hpp"
#include "store/table.hpp"

namespace embermap {

// What a table may take of the store's budget.
struct MemoryShare {
  std::uint64_t bytes = 0;
  std::uint64_t frames = 0;
  bool checksums = false;  // room to keep all page checksums in memory
  bool operator==(const MemoryShare&) const = default;
};

// The .npy header of a table's own file.
std::string table_header(const Schema& schema, const Geometry& geometry);

// Two locks of a table say who may do what: files_ is shared by all that only wants rows, and taken alone by what changes the
// number of rows, files or memory, or writes past the hot pages; rows_, inside it, is shared by those who copy rows out of frames
// and taken alone by those who change rows there. A batch holds its pages first and takes rows_ then: it does not wait for the
// disk with rows_ taken, so that one batch computes while another one reads. A scan shares rows_ for one step (at most
// 1 MiB of pages) at a time.
// A batch that needs several passes takes files_ alone instead: as long as it is between two passes it keeps nobody from giving
// frames back.
//
// Lock order: Store::Impl's mutex, then files_, then hot_mutex_, then a Hold (which may have to be waited for), then rows_, then
// HotPages' own. mapped_mutex_ comes after files_, and nothing but a mapping's own lock inside it. Nothing calls back up with one
// of them held.
class WholePages;

class TableImpl : public std::enable_shared_from_this<TableImpl> {
 public:
  TableImpl(std::shared_ptr<StoreCore> core, std::string name, TableEntry entry, File data, PageLedger ledger);

  // The way of a batch on the host.
  void gather(std::span<const std::int64_t> ids, std::span<std::byte> out, std::string_view field);
  void scatter(std::span<const std::int64_t> ids, std::span<const std::byte> rows, std::string_view field);
  void add(std::span<const std::int64_t> ids, std::span<const std::byte> rows);
  void update(std::span<const std::int64_t> ids, std::span<const std::byte> grads, DType grad_dtype, std::optional<double> lr);
  Prefetch prefetch(std::span<const std::int64_t> ids);
  // On a device (table_device.cpp).
  void gather_device(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, std::string_view field,
                     CudaStream stream);
  void scatter_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, std::string_view field,
                      CudaStream stream);
  void add_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, CudaStream stream);
  void update_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* grads, DType grad_dtype,
                     CudaStream stream, std::optional<double> lr);
  bool update_kept(const WorkingSet& from, std::uint64_t count, const std::byte* grads, DType grad_dtype, CudaStream stream,
                   std::optional<double> lr);
  WorkingSet gather_working_set(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, CudaStream stream,
                                bool check_later);
  void check(CudaBatch& batch, int device) const;  // of gather_working_set(): throws RowIdError
  void expand_ids(CudaBatch& batch, int device, std::int64_t* out, CudaStream stream, bool own_stream) const;
  Prefetch prefetch_pages(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream);
  WorkingSet prefetch_device(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream);
  bool gather_prefetched(WorkingSet& ahead, std::uint64_t count, std::byte* out, CudaStream stream);
  // Past the hot pages (table_scan.cpp).
  void read(std::uint64_t first, std::uint64_t count, std::span<std::byte> out, std::string_view field);
  void write(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field);
  // Writes at most so many pages that were never written, of those from `first` on; returns the page that is next.
  std::uint64_t materialize(std::uint64_t first, std::uint64_t most, const Progress& progress);
  VerifyReport verify(const Progress& progress);
  void accept(const Progress& progress);
  RepairReport repair_from(TableImpl& backup, const Progress& progress);
  // Gives every written page the checksum of what it holds now.
  void reseal(std::uint64_t commit);  // the one that will take what is there

  // For the store. `entry` members that change (rows, optimizer, step) are read by entry().
  TableEntry entry() const;
  std::uint64_t step() const;
  std::uint64_t optimizer_version() const noexcept { return optimizer_version_; }
  void set_optimizer(const Optimizer& optimizer);
  void set_step(std::uint64_t step, std::optional<double> carried);
  std::optional<double> carried() const;
  void set_memory(std::uint64_t bytes);  // what the entry says of it; set_share() makes it so
  // Keeps everybody else out while the lock lives: the commit of all tables is one moment. For the members up to set_share().
  std::unique_lock<FairSharedMutex> stand_still();
  bool changed() const;  // since the last mark_committed()
  // For commit number `commit`.
  TableEntry flush_and_sync(std::uint64_t commit);  // dirty pages to the file, the file to the disk; the entry to record
  void mark_committed();
  bool ahead() const;                                     // the files are not those of the last commit
  std::optional<std::uint64_t> page_file_commit() const;  // as PageLedger::commit(); may be called at any time
  // Weights of the rows [first, end of the table), none of which is in memory, as after grow(); their state is initial.
  void fill(std::uint64_t first, std::span<const std::byte> weights);
  // The same of fields that are read; those that are not given are initial.
  void fill(std::uint64_t first, const Table::NewRows& rows, const Progress& progress);
  // More rows, in the files and in entry(). Everything is committed; without a log UNCOMMITTED is set. After a failure the table
  // has the old number of rows.
  void grow(std::uint64_t rows);
  // Takes that back without a log; has the old number of rows also when it throws.
  void shrink(std::uint64_t rows, std::optional<std::uint32_t> last_checksum);
  std::uint64_t rows() const noexcept { return entry_.geometry.rows; }
  std::uint64_t pages() const noexcept { return entry_.geometry.pages(); }
  std::uint64_t page_bytes() const noexcept { return entry_.geometry.page_bytes(); }
  // The checksum of the last page, read from the file, when the table has so many rows; none if that page is whole then, or was
  // never written.
  std::optional<std::uint32_t> last_checksum(std::uint64_t rows) const;
  // Takes effect at once: hot pages that do not fit the share are given up. In two steps, so that the shares of all tables change
  // or none: prepare_share() writes what is dirty, and may fail; then nothing has changed and the other cannot.
  void prepare_share(const MemoryShare& share);
  void set_share(const MemoryShare& share) noexcept;

  void undo_grow(std::uint64_t rows, bool files);  // with a log
  // Fewer rows. cut() makes the table shorter for whoever looks, cut_files() its files after that is committed. Without a log
  // UNCOMMITTED is set.
  struct LastPage {  // of the table when it is cut; read before anything is changed
    std::uint64_t page = 0;
    std::optional<std::uint32_t> cut, whole;  // its checksum then, and as it is now, without a log: nullopt if it stays as it is
  };
  LastPage last_page(std::uint64_t rows) const;
  void cut(std::uint64_t rows, const LastPage& last);
  void undo_cut(std::uint64_t rows, const LastPage& last);
  void cut_files();

  // For a reader that goes on to a later commit, with stand_still(): whether the table is that of an entry; gives its files up;
  // takes others.
  bool is(const TableEntry& entry) const noexcept;
  void drop_files(std::exception_ptr why = {}) noexcept;  // what calls throw until it has files again; null: it was removed
  void end_mapping() noexcept;                            // of a table that is gone, whose handles may live on
  void replace_files(TableEntry entry, File data, PageLedger ledger);

  void close(bool removed = false) noexcept;

  const std::string& name() const noexcept { return name_; }
  std::uint32_t id() const noexcept { return entry_.id; }  // in the redo log
  const Schema& schema() const noexcept { return schema_; }
  const std::shared_ptr<StoreCore>& core() const noexcept { return core_; }
  std::filesystem::path data_path() const;
  bool writable() const noexcept { return core_->writable && writable_; }
  TableStats stats() const;
  DeviceStats device_stats() const;
  TableCounters counters() const;
  PageIoReport io_report() const;
  std::uint64_t written_pages() const;
  void check_open() const;

 private:
  TableCounters counters_now() const;  // with files_ held
  using Shared = std::shared_lock<FairSharedMutex>;
  using Alone = std::unique_lock<FairSharedMutex>;
  // Lock files_ and check that the table is open. Throw ClosedError.
  Shared side_by_side() const;
  Alone alone() const;
  void check_writable() const;
  std::span<const std::uint64_t> checked_ids(std::span<const std::int64_t> ids) const;  // throws RowIdError; files_ must be held
  void check_size(std::uint64_t ids, std::uint64_t bytes, std::uint64_t row_bytes, std::string_view what) const;
  void check_gradient_dtype(DType dtype) const;
  HotPages& hot();  // made at first use
  // With Pin::kMapping, in table_mapped.cpp. The mapping, made at first use; nullptr with another Pin. Throws InvalidArgument
  // where the table cannot be read so. files_ must be held, here and below.
  MappedTable* mapped();
  void keep_mapping();  // if the files are still those of the mapping; else ends it
  // Runs `body`, which reads from the mapping, once or more. Throws where what it read may not be of the reader's commit.
  void read_mapped(const MappedTable& mapped, const std::function<void()>& body);
  // False, and nothing done, if the rows are not all in the mapping. The second one holds files_ itself.
  bool gather_mapped(std::span<const std::uint64_t> ids, std::byte* out, const Field& field);
  bool gather_mapped_device(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, const Field& field,
                            CudaStream stream);
  void release_hot() noexcept;
  void note_dirty() noexcept;  // what is dirty in memory, for StoreCore::bound_log()
  void make_file(File data, PageLedger ledger);
  void keep_checksums();  // if the share has room for them: from then on every page read is verified
  StepScalars next_step(std::optional<double> lr) const;  // throws InvalidArgument for an lr that cannot be
  void count_step(const StepScalars& scalars);            // which was made: the next one carries on from it
  void note_steps(TableEntry& entry) const;
  // Applies what the log has of committed pages. With files_ taken alone: then nothing of the table is applied afterwards.
  void settle();
  // Compares written pages with their checksums and calls bad(page, mark) for each that is none; files_ must be taken alone.
  using Bad = std::function<void(std::uint64_t, const PageMark&)>;
  VerifyReport find_bad(const Progress& progress, const Bad& bad);
  void check_same_pages(const TableImpl& backup) const;
  void seal_all(const Progress& progress);  // with files_ taken alone
  void pages_of(std::span<const std::uint64_t> ids, std::span<std::uint64_t> pages) const;
  // Pages to read ahead, in parts.
  struct Ahead {
    std::vector<std::uint64_t> pages;
    std::shared_ptr<const HotPages::Expected> batch;  // nullptr: there was no memory yet to watch
    bool sorted = false;
    struct Part {
      std::uint64_t first, count;  // of pages, in ascending order
    };
    struct Parts {
      std::mutex mutex;
      std::uint64_t begun = 0;   // of pages
      std::uint64_t flying = 0;  // pages of parts that are being read
      std::vector<Part> again;   // parts that had to stop
    };
    std::shared_ptr<Parts> parts = std::make_shared<Parts>();  // two threads may read at the same time
  };
  Ahead pages_ahead(std::span<const std::int64_t> ids);  // throws RowIdError
  Prefetcher::Step prefetch_some(Ahead& ahead, const Prefetch::State& job);

  // The records of a batch's distinct rows in memory, for one pass or several. What a pass needs besides its frames takes 20
  // bytes a row.
  class Passes;
  // What is done to rows: body(first, records) for consecutive stretches of the batch's keys (row ids), records[i] being the
  // record of keys[first + i]; then done(). No other call sees rows in between.
  struct Change {
    std::function<void(std::uint64_t, std::span<std::byte* const>)> body;
    std::function<void()> done;
    bool replaces = false;  // whole records are written: pages of which the batch has all rows need not be read
  };
  void change(Shared lock, std::span<const std::int64_t> ids, const Batch& batch, const Change& change);
  // All pages have frames.
  void gather_whole(std::span<const std::int64_t> ids, std::byte* out, const Field& field);
  // False, and nothing done, if the rows take more pages than there are frames.
  bool gather_block(std::span<const std::uint64_t> ids, std::byte* out, const Field& field);
  void gather_in_passes(std::span<const std::uint64_t> ids, std::byte* out, const Field& field);
  // Past the hot pages: those of the rows that are not in memory are read and forgotten (table_scan.cpp).
  void gather_past(std::span<const std::uint64_t> ids, std::byte* out, const Field& field);

  // Calls body(step) for consecutive pages [first_page, end_page) in steps, several at a time on I/O threads (table_scan.cpp).
  struct ScanStep;
  void for_steps(std::uint64_t first_page, std::uint64_t end_page, const std::function<void(ScanStep&)>& body);
  // Reads the pages of rows [first, end), has `body` change records, those of rows [row, row + count) counted from `first`, and
  // writes them back.
  using FillRecords = std::function<void(std::uint64_t row, std::uint64_t count, std::byte* records)>;
  void fill_pages(std::uint64_t first, std::uint64_t end, const FillRecords& body);
  // Of write(), with files_ taken alone.
  void write_some(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field);
  // Of the rows [first, first + count), those on a page: the first one's place in the range and on the page, and how many.
  struct PageRows {
    std::uint64_t index, slot, rows;
  };
  PageRows rows_of_page(std::uint64_t page, std::uint64_t first, std::uint64_t count) const;

  using DeviceChange = std::function<void(CudaEngine&, CudaBatch&)>;
  // Fetches `bytes` of every record of the batch, lets `change` work on them, writes them back, and calls `done`.
  void change_device(int device, const std::int64_t* ids, std::uint64_t count, std::uint64_t bytes, CudaStream stream,
                     const DeviceChange& change, const std::function<void()>& done);
  // A step of the optimizer as such a change. Throws for gradients or a rate that cannot be.
  struct DeviceUpdate {
    DeviceChange change;
    std::function<void()> done;
  };
  DeviceUpdate device_update(const std::byte* grads, DType grad_dtype, CudaStream stream, std::optional<double> lr);

  // A batch on a device with files_ held the way it has to be: shared if its pages fit into memory together, else alone.
  struct DeviceCall {
    CudaEngine& engine;
    Shared shared;
    Alone alone;
    std::shared_ptr<CudaBatch> batch;
    std::uint64_t nanoseconds = 0;
  };
  // What a device does to frames when nobody waits for it (table_device.cpp). Only where all pages are in memory for good: rows
  // of gathers are read without rows_ being shared any more, and those of the last change are written without it being taken. So
  // whoever locks rows_, or files_ alone, waits for them, once the lock is held: with it nobody can begin another.
  std::shared_lock<FairSharedMutex> reading_rows();   // and no row is on its way back
  std::unique_lock<FairSharedMutex> changing_rows();  // and none is on its way at all
  // Throws CudaError if the device has failed: then for ever.
  void land(Access access) const;
  void land_quietly() const noexcept;
  void retire(CudaFlight& flight) const;       // counts what it moved
  std::shared_ptr<CudaFlight> behind() const;  // the change on its way back, if there is one
  void add_reader(std::shared_ptr<CudaFlight> flight);
  // The pages, if the way above may be used. files_ must be held.
  WholePages* resident();
  // Calls body(), which enqueues. If it throws, waits for the stream.
  static void begin_flight(CudaEngine& engine, CudaStream stream, const std::function<void()>& body);
  // False, and nothing done, if the way above may not be used, or is not worth it.
  bool change_behind(DeviceCall& call, std::uint64_t bytes, CudaStream stream, const DeviceChange& change,
                     const std::function<void()>& done);
  // False likewise, or if the working set is not what the rows are now.
  bool change_kept(const WorkingSet& from, std::uint64_t count, CudaStream stream, const DeviceChange& change,
                   const std::function<void()>& done);
  void write_behind(CudaEngine& engine, std::shared_ptr<CudaBatch> batch, const std::shared_ptr<CudaFlight>& before,
                    const FrameSource& source, CudaStream stream, const DeviceChange& change, const std::function<void()>& done);

  // Bytes [offset, offset + bytes) of the records are to be moved.
  DeviceCall begin_device(int device, const std::int64_t* ids, std::uint64_t count, std::uint64_t offset, std::uint64_t bytes,
                          CudaStream stream);
  bool gather_whole(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, const Field& field,
                    CudaStream stream);
  FrameSource frame_source(HotPages& pages) const;
  // Measures how rows of such a length move, unless that is known or the batch is too small to need it.
  void measure_movers(CudaEngine& engine, std::uint64_t count, std::uint64_t offset, std::uint64_t bytes);
  // Adds what the batch moved, in so much time, to the statistics.
  void note_moved(const DeviceCall& call);
  void note_moved(const Moved& moved) const;
  // Calls body(frames of the slab, first, frames) for consecutive stretches of the batch's pages that fit into memory together;
  // the frames are held until the stream has passed. Where the call shares files_, rows_ is taken around the one stretch.
  // It hands `meanwhile`, what the host has to do while the device is busy, on to the engine's fetch or write_back.
  using DevicePass = std::function<void(const FrameSource&, std::uint64_t, std::span<const std::uint32_t>,
                                        const std::function<void()>& meanwhile)>;
  void for_device_passes(DeviceCall& call, Access access, CudaStream stream, const DevicePass& body);
  void for_device_whole(DeviceCall& call, const FrameSource& source, Access access, CudaStream stream, const DevicePass& body);
  // Calls body() with rows_ locked as the access demands, and waits for the stream.
  void device_pass(DeviceCall& call, Access access, CudaStream stream, const std::function<void()>& body);

  const std::shared_ptr<StoreCore> core_;
  const std::string name_;
  const Schema schema_;
  bool writable_ = true;
  const Divider page_of_row_;
  mutable FairSharedMutex files_;
  FairSharedMutex rows_;
  TableEntry entry_;
  std::atomic<std::uint64_t> step_;
  std::atomic<double> carried_;  // TableEntry::carried; NaN: nothing
  std::atomic<std::uint64_t> optimizer_version_{0};
  std::atomic<bool> entry_changed_{false};
  std::uint64_t changing_ = 0;  // the commit on its way, if it changes pages
  std::unique_ptr<PageFile> file_;
  std::exception_ptr no_files_;  // why there is none
  MemoryShare share_;
  std::uint64_t commits_ = 0;                  // of this session
  std::atomic<std::uint64_t> dirty_known_{0};  // pages
  mutable std::mutex hot_mutex_;
  std::unique_ptr<HotPages> hot_;
  PinnedRange pinned_;  // of hot_'s slab: ends before it
  std::atomic<HotPages*> hot_ready_{nullptr};
  HotPages::Counts past_;  // of hot pages that were given up for others
  mutable std::mutex mapped_mutex_;
  std::unique_ptr<MappedTable> mapped_;
  mutable std::atomic<std::uint64_t> rows_gathered_{0}, rows_written_{0}, rows_mapped_{0};
  mutable std::mutex moved_mutex_;
  mutable Moved moved_;  // to and from the device
  mutable std::mutex flights_mutex_;
  mutable std::atomic<bool> flying_{false};
  mutable std::vector<std::shared_ptr<CudaFlight>> readers_;
  mutable std::vector<std::shared_ptr<CudaFlight>> ahead_;  // readers that nobody waits for so soon
  std::vector<std::weak_ptr<WorkingSet::State>> waiting_;   // what they bring, until it is used
  mutable std::shared_ptr<CudaFlight> behind_;
  mutable std::atomic<std::uint64_t> changes_{0};  // of rows, or of where they are: with rows_ taken, or files_ taken alone
};

}  // namespace embermap
