// One table of a store: rows x dim of one dtype, with per-row optimizer state if it is trained.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "io/page_io.hpp"
#include "io/rows.hpp"
#include "kernels/cuda.hpp"
#include "kernels/optimizer.hpp"
#include "store/geometry.hpp"
#include "store/initializer.hpp"
#include "store/schema.hpp"

namespace embermap {

// What kernels, and gathers on the host, read rows from.
enum class Pin : std::uint8_t {
  kFrames,  // "frames": hot pages, in frames that the store has of its own
  // "mapping": each table's .npy where it is, mapped and registered with CUDA for reading. Processes that read the same tables
  // share the page cache, and rows take no memory of the store's. For tables that are written whole, are warm, and rarely change
  kMapping
};
std::string_view pin_name(Pin pin);
Pin parse_pin(std::string_view name);  // throws InvalidArgument listing the names

struct TableOptions {
  std::uint64_t rows = 0;  // 0 is an empty table, which can be resized
  std::uint64_t dim = 0;
  DType dtype = DType::kFloat32;
  Optimizer optimizer = {};
  Initializer init = Zeros{};
  std::uint64_t seed = 0;
  std::uint64_t page_bytes = kMinPageBytes;  // a power of two, 4 KiB to 2 MiB
  std::uint64_t memory = 0;                  // bytes of the store's budget for this table; 0: by size, see Store
};

// What happened to a table in all its sessions: what commits recorded, and this session since it began.
struct TableCounters {
  std::uint64_t hits = 0, misses = 0, evictions = 0, write_backs = 0;  // pages
  std::uint64_t bytes_read = 0, bytes_written = 0;
  std::uint64_t commits = 0;
  bool operator==(const TableCounters&) const = default;
};

// Counters since the table was opened (pages, bytes) and the state of its hot pages now.
struct TableStats {
  std::uint64_t hits = 0;    // pages a batch wanted and found in memory; a batch counts each of its pages once
  std::uint64_t misses = 0;  // pages it had to read or generate; a prefetch is a batch too
  std::uint64_t evictions = 0;
  std::uint64_t write_backs = 0;  // dirty pages written to the file
  std::uint64_t pages_read = 0;
  std::uint64_t pages_generated = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t read_requests = 0;  // made to the system: neighbouring pages share one
  std::uint64_t write_requests = 0;
  std::uint64_t rows_gathered = 0;  // ids asked for
  std::uint64_t rows_written = 0;   // ids in scatter, add, update
  double seconds_waiting = 0;       // calls waited for the disk, and for pages that others were reading; added up over threads
  std::uint64_t frames = 0;         // 0 before the first use
  std::uint64_t page_bytes = 0;
  std::uint64_t resident_pages = 0;
  std::uint64_t dirty_pages = 0;
  std::uint64_t memory_bytes = 0;   // what the table takes of the budget
  bool huge_pages = false;          // the slab was given huge pages
  bool registered = false;          // the slab is registered with CUDA
  std::uint64_t mapped_bytes = 0;   // of the file, with Pin::kMapping; 0 before the first gather
  std::uint64_t rows_mapped = 0;    // of rows_gathered: those that came from the mapping
  bool mapping_registered = false;  // the mapping is registered with CUDA; false before a device's first gather
  bool whole = false;               // every page of the table has a frame
};

// How rows moved between the table's frames and a device; those from a mapping are in TableStats::rows_mapped alone.
struct DeviceStats {
  std::uint64_t transfers = 0;             // a call moves its rows in one, an update in two
  std::uint64_t kernel_rows = 0;           // by a kernel that reads and writes the frames itself
  std::uint64_t thread_rows = 0;           // by threads of the host, through pinned memory and a DMA stream
  std::uint64_t pageable_rows = 0;         // through pageable memory: the frames are not registered
  std::uint64_t bytes = 0;                 // by kernel and threads
  double seconds = 0;                      // from a transfer's begin to its end, sorting included, added up over calls
  int device = -1;                         // the store's; -1: none
  std::string device_name;                 // empty before its first use
  std::vector<MoverMeasurement> measured;  // of the ways to move rows, on this machine
};

// Neighbouring pages, with their rows [first_row, last_row].
struct PageRange {
  std::uint64_t page, pages, first_row, last_row;
};

struct VerifyReport {
  std::uint64_t pages = 0;
  std::uint64_t written = 0;   // pages in the file
  std::uint64_t verified = 0;  // of those, pages whose checksum was compared
  std::uint64_t bad_pages = 0;
  std::vector<PageRange> bad;  // the first 1,000 ranges
};

struct RepairReport {
  std::uint64_t bad_pages = 0;  // before
  std::uint64_t repaired_pages = 0;
  std::vector<PageRange> repaired, left;  // the first 1,000 ranges of each
};

class TableImpl;

// What Table::prefetch() began; copies mean the same. It may be thrown away: the reading goes on.
// Thread safety: all members may be called from several threads.
class Prefetch {
 public:
  Prefetch() = default;  // one that has ended
  // What has not been asked of the disk yet is not read any more. Returns at once.
  void cancel() noexcept;
  // True once it has ended: read, given up, or failed. Waits at most `timeout` (nullopt: until then). From then on it waits for
  // no room in memory: pages that were read for other batches may have to go.
  bool wait(std::optional<std::chrono::nanoseconds> timeout = {}) const;
  bool done() const;

  struct State;
  explicit Prefetch(std::shared_ptr<State> state) : state_{std::move(state)} {}

 private:
  std::shared_ptr<State> state_;
};

// What Table::gather_working_set() keeps for an update; empty where it kept nothing. Device memory, as long as this lives: the
// records of the batch's distinct rows, and 20 bytes an id. Copies are the same one, good for one update. To be used and ended
// while the stream lives.
class WorkingSet {
 public:
  WorkingSet() = default;
  explicit operator bool() const noexcept { return state_ != nullptr; }
  // Waits until the ids are known to be good. Throws RowIdError: the rows that were gathered for them are then undefined.
  void check() const;
  // The ids that were gathered, before an update and after it, whatever has become of the caller's: as many, in the device memory
  // at `out`. On a stream that comes after that of the gather; waits for it if it is another one. Throws ClosedError (its table
  // is gone), InvalidArgument (it is empty), CudaError.
  void ids(std::int64_t* out, CudaStream stream) const;

 private:
  friend class TableImpl;
  struct State;
  std::shared_ptr<State> state_;
};

// A handle; copies name the same table. Stays valid after the store is closed or the table removed, and then throws ClosedError.
//
// Thread safety: all members may be called from several threads. gather, read and the reading of pages for any call run side by
// side; rows are changed by one call at a time, which no other sees half done (read: page by page). resize, write, materialize
// and verify run alone, and so does a call that needs more pages than the table has frames. Ids are row numbers in [0, rows());
// a bad one throws RowIdError naming the first, before anything is read or changed. Rows of ids given several times: gather
// repeats them, scatter keeps the last, add and update sum. Data is in host memory unless it says "device". Calls block on disk
// reads. Errors: IoError, CorruptError, ReadOnlyError, InvalidArgument (sizes that disagree), DTypeError, ClosedError.
class Table {
 public:
  const std::string& name() const;
  std::filesystem::path file() const;  // the .npy
  std::uint64_t rows() const;
  std::uint64_t dim() const;
  DType dtype() const;
  const Schema& schema() const;
  Geometry geometry() const;
  Optimizer optimizer() const;
  Initializer initializer() const;
  std::uint64_t seed() const;
  std::uint64_t page_bytes_option() const;
  std::uint64_t memory() const;  // bytes of the store's budget set aside for it; 0: by size
  std::uint64_t step() const;    // updates so far
  bool writable() const;
  bool adopted() const;     // a foreign file used in place
  bool big_endian() const;  // the adopted file's elements have their highest byte first; rows are native all the same

  std::uint64_t optimizer_version() const;  // changes with each set_optimizer() of this session
  // Changes the hyperparameters, not the kind nor the state fields nor what those begin with; kept by the next commit.
  void set_optimizer(const Optimizer& optimizer);
  // Makes step() and carried() what is said, as for state that came from elsewhere; kept by the next commit.
  void set_step(std::uint64_t step, std::optional<double> carried = {});
  // What the next step takes over from the last one (carried_on() of kernels/optimizer.hpp); empty: nothing.
  std::optional<double> carried() const;
  // Bytes of the store's budget for this table (frames, look-up, page bits, checksums), what it cannot use going to the others;
  // 0: by size. Takes effect at once; kept by the next commit, or, in a store that is open read-only, for this session. All
  // dirty pages are written. Throws BudgetError if it is too little for the table or leaves too little for the others, and what
  // writing throws: with the memory of all tables as before.
  void set_memory(std::uint64_t bytes);

  // out = ids.size() x dim elements of the field (x 1 of one with one number a row), C order.
  void gather(std::span<const std::int64_t> ids, std::span<std::byte> out, std::string_view field = "weight");
  // rows = ids.size() x dim elements of the field.
  void scatter(std::span<const std::int64_t> ids, std::span<const std::byte> rows, std::string_view field = "weight");
  // Adds to the weights.
  void add(std::span<const std::int64_t> ids, std::span<const std::byte> rows);
  // One optimizer step; grads = ids.size() x dim elements of the weight's dtype, or of float32 for half-precision rows. `lr`
  // replaces the optimizer's learning rate for this step alone (Rprop has none: InvalidArgument). Without ids nothing happens,
  // and step() does not count.
  void update(std::span<const std::int64_t> ids, std::span<const std::byte> grads, DType grad_dtype,
              std::optional<double> lr = {});
  // Reads pages of these rows, on a thread of the store's, while the caller goes on. Calls are served in their order. Pages that
  // were read and not used yet take at most half of the frames, and keep them until a batch uses them or needs the frames;
  // further reading waits for room. Pages that nobody wanted do not count any more when 64 other batches have come (more where
  // many calls are ahead). A hint: errors in reading are met again, and reported, by the call that needs the rows; a call whose
  // batch comes first reads nothing any more; where 32 calls for a table wait, another one ends at once. Bad ids are refused at
  // once; ids that nobody asks for afterwards only cost their reads.
  Prefetch prefetch(std::span<const std::int64_t> ids);

  // The same with ids and data in device memory of `device`, ordered on `stream`: results in device memory are there when the
  // stream has passed the call, and ids and data must stay as they are until then. Rows may still be on their way from or to the
  // hot pages when a call returns; whoever needs those rows next waits for them, in whichever call, on the host too. A failure of
  // the device shows in such a call. Element counts: `count` ids, count x dim elements.
  void gather(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, std::string_view field,
              CudaStream stream);
  void scatter(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, std::string_view field,
               CudaStream stream);
  void add(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, CudaStream stream);
  void update(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* grads, DType grad_dtype,
              CudaStream stream, std::optional<double> lr = {}, const WorkingSet* from = nullptr);
  // gather() of the weights for rows that will be updated: where all of the table is in memory, keeps what it has fetched. An
  // update with the same ids in the same order, on the same stream, then takes it `from` there, sorts and fetches nothing, and
  // gives the same bits; where rows have changed since then it does all anew. `check_later`: it does not wait to hear of a bad
  // id; check() of what it returns does, and until then `out` may be anything.
  WorkingSet gather_working_set(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, CudaStream stream,
                                bool check_later = false);
  // prefetch() of ids on a device: they are copied to the host when `stream` has come to here, and nobody waits for that but the
  // thread that reads. Bad ids are not refused: nothing is read then.
  Prefetch prefetch_pages(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream);
  // For a batch to come, on a device: where all of the table is in memory, its records are fetched while other work goes on, on a
  // stream of the store's own that follows `stream`; it waits for nothing. What update() and add() change until then is seen:
  // gather_prefetched() gives what gather() would. Empty, and nothing done, where rows are not all in memory (prefetch() then
  // reads their pages), or the batch has more than 1 GiB of records. The ids must stay as they are until gather_prefetched() has
  // given rows, or else until the device has been waited for. It holds device memory, as gather_working_set().
  WorkingSet prefetch(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream);
  // gather() of the weights of just these ids, once; `ahead` is then what gather_working_set() would have given. False, and
  // nothing done, where it was used before or rows have changed in other ways. Bad ids are thrown here.
  bool gather_prefetched(WorkingSet& ahead, std::uint64_t count, std::byte* out, CudaStream stream);
  // That part of update() alone, for whoever has the ids no more at hand: false, and nothing done, where rows have changed since
  // then, the stream is another one, or `count` is not the number of ids. grads: count x dim elements.
  bool update_kept(const WorkingSet& from, std::uint64_t count, const std::byte* grads, DType grad_dtype, CudaStream stream,
                   std::optional<double> lr = {});

  // Consecutive rows [first, first + count) past the hot pages: for scans, import and export; they evict nothing. Rows of one
  // page are read at one moment, so no row is torn; a call that changes rows meanwhile does not wait for the whole read, and may
  // be seen on some pages and not on others. Several steps are read or written at a time, in no order. After a write that failed,
  // some rows are new and others are not. A write of more than a quarter of the redo log's limit is done in stretches, before
  // each of which the store may commit (StoreOptions::autocommit); so is materialize, which commits after each.
  void read(std::uint64_t first, std::uint64_t count, std::span<std::byte> out, std::string_view field = "weight");
  void write(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field = "weight");

  // Adds rows at the end and returns the id of the first: rows = n x dim elements of the weight, the optimizer's state of the new
  // rows initial. Commits, as resize does: add many at once. On failure the table is as it was before.
  std::uint64_t append(std::span<const std::byte> rows);
  // The same for rows that are read block by block, within the store's memory, and for state too: a reader for each field that is
  // given, of its dtype and columns, all with as many rows (InvalidArgument); the weight is among them, state that is not is
  // initial. The store's lock is held until they are committed: calls that need it wait. `progress` (rows) must not call the
  // store; what it or a reader throws leaves the table as it was.
  using NewRows = std::map<std::string, RowReader*>;
  std::uint64_t append_rows(const NewRows& rows, const Progress& progress = {});
  // Rows beyond the old end are initial rows; rows beyond the new end are forgotten for good. Commits.
  void resize(std::uint64_t rows);
  // Writes every page that was never written, so that the file alone holds all rows. Commits.
  void materialize(const Progress& progress = {});
  // Compares every written page (also those in memory are written first) with its checksum.
  VerifyReport verify(const Progress& progress = {});
  // Gives every written page the checksum of what the file holds now, for files changed on purpose by other programs, and makes
  // an end of damage in NAME.pages. Rows that were damaged are taken as they are. Part of the next commit. An adopted file that
  // others changed (StoreOptions::accept_changed) counts as embermap's own state from then on.
  void accept(const Progress& progress = {});
  // Replaces pages that are bad here by those of `backup`, a table of another store with the same rows and records. Nothing is
  // guessed: a page is taken if it has the checksum that is recorded here. Where none is (damage in NAME.pages), the page here
  // stays, and gets its checksum back, if it is the same as a good one there. Part of the next commit.
  // Throws InvalidArgument naming what differs between the tables.
  RepairReport repair_from(const Table& backup, const Progress& progress = {});
  std::uint64_t written_pages() const;

  TableStats stats() const;
  // What moved to and from the store's device, and what was measured of the ways to do it.
  DeviceStats device_stats() const;
  TableCounters counters() const;
  // How the table's file is read and written; finds out if nobody has used it yet (at most some dozen reads).
  PageIoReport io_report() const;

  explicit Table(std::shared_ptr<TableImpl> impl);
  const std::shared_ptr<TableImpl>& impl() const noexcept { return impl_; }

 private:
  std::shared_ptr<TableImpl> impl_;
};

}  // namespace embermap
