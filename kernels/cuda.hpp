// The CUDA side of a batch, behind a header that needs no CUDA. cuda/*.cu implements it; cuda_absent.cpp does in a build without
// CUDA. The same binary runs on a machine without a GPU: cuda_devices() is then 0 and everything else throws CudaError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "kernels/mover_model.hpp"
#include "kernels/optimizer.hpp"

namespace embermap {

// A cudaStream_t; null is the legacy default stream. Owned by the caller.
struct CudaStream {
  void* handle = nullptr;
};

// Devices that can be used now: 0 in a build without CUDA, without a driver, or with none visible. Never throws, leaves no CUDA
// error behind.
int cuda_devices() noexcept;

// Why cuda_devices() is 0 ("no CUDA driver is installed ...", "embermap was built without CUDA", ...); empty if it is not.
std::string cuda_absence();

// Host memory registered with CUDA (cudaHostRegister, portable and mapped) for as long as this lives, in pieces of at most 1 GiB.
// It does not own the memory, which must outlive it. Registration is all or nothing: after a failure nothing stays registered,
// CUDA's last error is cleared, and `error()` says what happened ("... pinned host memory ..." with the amount): not an
// exception, for pageable copies work without it. Registering memory that is registered already counts as a failure, and so does
// an empty range. Kernels read across the border of two pieces; cudaMemcpy and its kin refuse a range that does. Ending waits
// until the device is idle. In a forked child the end leaves the parent's registration alone.
class PinnedRange {
 public:
  PinnedRange() = default;
  PinnedRange(std::byte* begin, std::uint64_t bytes);
  // The same for memory that the host has for reading only, such as the mapping of a file that cannot be written: kernels read
  // it. `device` is the one whose kernels will; one that cannot have such memory (cudaDevAttrHostRegisterReadOnlySupported) is a
  // failure. Pages of a file are read now, if they are not in the page cache, and stay where they are: kernels go on reading them
  // where the file has other pages in their place since, or is shorter.
  static PinnedRange read_only(const std::byte* begin, std::uint64_t bytes, int device);
  PinnedRange(PinnedRange&& other) noexcept;
  PinnedRange& operator=(PinnedRange&& other) noexcept;
  ~PinnedRange();

  bool registered() const noexcept { return bytes_ != 0; }
  const std::string& error() const noexcept { return error_; }

 private:
  void pin(std::byte* begin, std::uint64_t bytes, unsigned flags);  // of cudaHostRegister
  void release() noexcept;
  [[maybe_unused]] std::byte* begin_ = nullptr;  // unused in a build without CUDA
  std::uint64_t bytes_ = 0;
  std::string error_;
};

// Where the frames of a table lie and how a row is found in them.
struct FrameSource {
  std::byte* slab = nullptr;  // host address of frame 0; only read by fetch
  bool registered = false;    // a PinnedRange covers the slab: kernels read and write it; otherwise rows go through host staging
  std::uint64_t page_bytes = 0;  // from one frame to the next
  std::uint64_t rows_per_page = 0;
  std::uint64_t stride = 0;      // from one record to the next inside a frame
  bool whole = false;            // page p lies in frame p, for all pages of the table
  std::uint64_t slab_bytes = 0;  // of all frames: the larger, the slower their rows are reached
};

// How rows crossed the link.
struct Moved {
  std::uint64_t batches = 0;        // calls that moved rows of a registered slab
  std::uint64_t kernel_rows = 0;    // moved by a kernel; distinct, but for the ids that gather() does not sort
  std::uint64_t thread_rows = 0;    // moved by threads and DMA; likewise. What both moved counts as the threads'
  std::uint64_t pageable_rows = 0;  // through pageable or unregistered memory
  std::uint64_t bytes = 0;
  std::uint64_t nanoseconds = 0;  // from the first to the last of a batch's rows, added up over batches
};

// Distinct ids, ascending: std::uint64_t if `wide`, else std::uint32_t.
struct HostKeys {
  const void* data = nullptr;
  bool wide = false;
  std::uint64_t count = 0;
  std::uint64_t operator[](std::uint64_t i) const noexcept {
    return wide ? static_cast<const std::uint64_t*>(data)[i] : static_cast<const std::uint32_t*>(data)[i];
  }
};

// A batch of ids on the device: sorted, distinct, with its pages, and the working set: one record (or slice of one) per distinct
// id. Made by CudaEngine; owns its device memory, which is freed in the order of its stream. To be used with the engine and
// stream it was made with (anything else is InvalidArgument), by one thread at a time. The stream must outlive it; the engine
// need not.
class CudaBatch {
 public:
  virtual ~CudaBatch() = default;
  std::uint64_t count = 0;           // ids in the batch
  std::uint64_t distinct = 0;        // distinct ids
  std::vector<std::uint64_t> pages;  // distinct pages, ascending (host); of make_batch() only
  // Page pages[p] holds the distinct ids [page_starts[p], page_starts[p + 1]); pages.size() + 1 entries (host).
  std::vector<std::uint64_t> page_starts;
};

// Rows of a batch on their way between frames and the device that no call has waited for. Until it has landed the frames must
// keep their pages, and nobody but the engine may write to them (rows on their way to the device), or use those rows at all (rows
// on their way back). Thread-safe. Its end waits, if that was not done.
class CudaFlight {
 public:
  virtual ~CudaFlight() = default;
  // Whether it is over. Does not wait. Throws CudaError if the device has failed; the rows are then lost.
  virtual bool landed() = 0;
  virtual void wait() = 0;  // likewise
  // Once landed: what it moved, with the time; and for a gather() how many distinct pages its ids lie on.
  virtual Moved moved() = 0;
  virtual std::uint64_t pages() = 0;
  virtual std::uint64_t device_bytes() const noexcept = 0;  // that it keeps
};

// Ids on their way to the host. The memory they come from must stay as it is until the stream has passed the call that sent them.
class CudaIds {
 public:
  virtual ~CudaIds() = default;
  // Waits for them; from whichever thread. Valid as long as this lives. Throws CudaError.
  virtual std::span<const std::int64_t> wait() = 0;
};

// The CUDA side of the tables on one device. Thread safety: calls on different streams and batches may run at once.
//
// All work is done in the order of the caller's stream: on it, or, where threads of the host move rows, on streams of the
// engine's own between two events of it. Nothing waits for the whole device. Device memory comes from a pool of the engine's own;
// besides, up to 64 MiB of pinned host memory are made for those threads, and staging for the largest batches, which stay with
// the engine. The caller's current device stays what it was. Every call throws CudaError if the stream is capturing a graph (the
// capture goes on), and InvalidArgument for an address that the device cannot reach, before it does anything. Arrays of the
// caller may lie at any address, ids at multiples of 8, and must stay as they are until the stream has passed the call. On a
// batch without ids every call but make_batch does nothing.
class CudaEngine {
 public:
  // Throws CudaError if there is no such device.
  static std::unique_ptr<CudaEngine> create(int device);
  virtual ~CudaEngine() = default;
  virtual int device() const noexcept = 0;

  // Checks, sorts and groups `count` ids in device memory; the positions of one id stay in order. Waits for `stream` (the host
  // needs the pages), so that `ids` is not read later. A bad id is thrown as RowIdError (table name for its text), first by
  // position, before anything else happens; more than kMaxBatch ids (kernels/batch.hpp) are InvalidArgument. Takes 20 bytes of
  // device memory per id for as long as the batch lives, and up to 60 more during the call.
  virtual std::unique_ptr<CudaBatch> make_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                                std::uint64_t rows_per_page, const std::string& table, CudaStream stream) = 0;

  // The same for a table whose pages all have frames of their own number, but it enqueues: `distinct` and `pages` are not filled
  // in, and a bad id is thrown by the first call that has to wait for the device to have sorted them: keys(), write_back, assign,
  // add, step, moved(), and fetch where threads move rows or the slab is not registered. Nothing has then been written. fetch and
  // write_back take `first_page` 0, no frames and a source that is whole.
  // `tells`: check() is going to be called.
  virtual std::unique_ptr<CudaBatch> begin_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                                 std::uint64_t rows_per_page, const std::string& table, CudaStream stream,
                                                 bool tells = false) = 0;
  // Waits until the device has looked at the ids of such a batch, which it does before it sorts them. Throws RowIdError.
  virtual void check(CudaBatch& batch) = 0;
  // The distinct ids of such a batch on the host, ascending; waits until the device has sorted them. Valid as long as the batch.
  virtual HostKeys keys(CudaBatch& batch) = 0;

  // out[i] = bytes [offset, offset + bytes) of the record of row ids[i], for a whole table of which every row is in memory: what
  // begin_batch, fetch and expand do, with as little waiting between them as can be. Enqueues; the frames must keep their pages
  // until the stream has passed. RowIdError, with `out` untouched, where an id is bad. Returns the batch, for moved(),
  // pages_used() and depart(). `behind`: of write_back_behind(), rows of the same table, which are taken from there, see patch().
  virtual std::unique_ptr<CudaBatch> gather(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                            const std::string& table, const FrameSource& source, std::uint64_t offset,
                                            std::uint64_t bytes, std::byte* out, ThreadPool& pool, CudaStream stream,
                                            const std::shared_ptr<CudaFlight>& behind = {}) = 0;
  // How many distinct pages the ids of a gather() lie on. The stream must have been waited for.
  virtual std::uint64_t pages_used(const CudaBatch& batch) const = 0;

  // Working set rows of pages [first_page, first_page + frames.size()) = bytes [offset, offset + bytes) of their records;
  // frames[i] is where page batch.pages[first_page + i] lies. All calls for one batch use one (offset, bytes), kept for the calls
  // below; `bytes` is a row's length in the working set. Enqueues: the frames must keep their pages until the stream has passed
  // the call, `frames` may be reused at once. Without a registered slab it waits. `meanwhile` is called once, on this
  // thread or one of `pool`, while others move rows already, and has returned when the call does; what it throws comes out here.
  virtual void fetch(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                     std::uint64_t offset, std::uint64_t bytes, ThreadPool& pool, CudaStream stream,
                     const std::function<void()>& meanwhile = {}) = 0;

  // Makes an uninitialised working set of `bytes` a row, for writes that replace whole rows: stands in for fetch.
  virtual void reserve(CudaBatch& batch, std::uint64_t offset, std::uint64_t bytes, CudaStream stream) = 0;

  // The way back: records of pages [first_page, ...) get their bytes from the working set. Enqueues; without a registered slab it
  // waits.
  virtual void write_back(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page,
                          std::span<const std::uint32_t> frames, ThreadPool& pool, CudaStream stream,
                          const std::function<void()>& meanwhile = {}) = 0;

  // assign() and write_back() of a whole batch in one: `in` as there. Rows that a kernel moves are read where they are.
  virtual void write_back_last(CudaBatch& batch, const FrameSource& source, std::uint64_t offset, std::uint64_t bytes,
                               const std::byte* in, ThreadPool& pool, CudaStream stream,
                               const std::function<void()>& meanwhile) = 0;

  // Throws CudaError if the stream is capturing a graph, which goes on.
  virtual void check_stream(CudaStream stream) = 0;

  // For whoever has use for them later. Enqueues.
  virtual std::shared_ptr<CudaIds> bring_ids(const std::int64_t* ids, std::uint64_t count, CudaStream stream) = 0;

  // begin_batch(), fetch() of bytes [0, bytes) and depart() on a stream of the engine's own, by a kernel alone, when `stream` has
  // come to here: for a batch that comes later. Waits for nothing. The ids must stay as they are until adopt(), or until the
  // flight has landed; the frames must be registered. `behind` as with gather().
  struct Ahead {
    std::shared_ptr<CudaBatch> batch;
    std::shared_ptr<CudaFlight> flight;
  };
  virtual Ahead fetch_ahead(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, const std::string& table,
                            const FrameSource& source, std::uint64_t bytes, const std::shared_ptr<CudaFlight>& behind,
                            const ThreadPool& pool, CudaStream stream) = 0;
  // From now on the batch is one of `stream`, which waits for its rows. Throws RowIdError, and nothing has happened then.
  virtual void adopt(const Ahead& ahead, CudaStream stream) = 0;

  // For batches of a whole table whose frames are registered: what a caller need not wait for.
  //
  // Rows that `behind` takes back to their frames, and that may not be there yet, are taken from it where the batch has fetched
  // them. Enqueues.
  virtual void patch(CudaBatch& batch, const std::shared_ptr<CudaFlight>& behind, CudaStream stream) = 0;
  // Whether write_back_behind() is worth it: a kernel alone is about as fast as the best way.
  virtual bool writes_behind(CudaBatch& batch, const FrameSource& source, const ThreadPool& pool) = 0;
  using Flights = std::span<const std::shared_ptr<CudaFlight>>;
  // write_back() on a stream of the engine's own, by a kernel, when `stream` has come to here, the rows of `readers` have left
  // their frames, and those of earlier calls have arrived. Settles the batch, so that a bad id is thrown here at the latest.
  // `behind`: what patch() was given for the batch, which may not have run yet.
  virtual std::shared_ptr<CudaFlight> write_back_behind(std::shared_ptr<CudaBatch> batch, const FrameSource& source,
                                                        std::initializer_list<Flights> readers,
                                                        const std::shared_ptr<CudaFlight>& behind, ThreadPool& pool,
                                                        CudaStream stream) = 0;
  // What fetch or gather have enqueued for the batch, as a flight. `behind` is what patch() or gather() was given. Its pages()
  // are those of gather(), and of a batch that `tells`.
  virtual std::shared_ptr<CudaFlight> depart(std::shared_ptr<CudaBatch> batch, const std::shared_ptr<CudaFlight>& behind,
                                             CudaStream stream) = 0;

  // out[i] = working set row of ids[i], `bytes` each (device memory, as all data below); or the first `bytes` of that row.
  virtual void expand(CudaBatch& batch, std::byte* out, CudaStream stream) = 0;
  virtual void expand(CudaBatch& batch, std::uint64_t bytes, std::byte* out, CudaStream stream) = 0;

  // out[i] = ids[i], of a batch of begin_batch() or fetch_ahead(), whatever has become of the caller's. On any stream that comes
  // after the batch's own; enqueues.
  virtual void expand_ids(CudaBatch& batch, std::int64_t* out, CudaStream stream) = 0;

  // Working set row of each distinct id = the row of `in` at its last position.
  virtual void assign(CudaBatch& batch, const std::byte* in, CudaStream stream) = 0;

  // Working set row (a weight of dim elements) += sum over its positions; same rules and same bits as add_rows.
  virtual void add(CudaBatch& batch, std::uint64_t dim, DType dtype, const std::byte* in, CudaStream stream) = 0;

  // One optimizer step on the working set (records from offset 0 to at least the end of their last field, their length a multiple
  // of the largest item; `layout.stride` need not be that length); same rules and bits as step_rows.
  virtual void step(CudaBatch& batch, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                    DType grad_dtype, CudaStream stream) = 0;

  // What fetch, write_back and gather moved for a batch so far, but for the time it took. The stream must have been waited for.
  virtual Moved moved(CudaBatch& batch) = 0;

  virtual const std::string& device_name() const noexcept = 0;
  // What a plain copy of pinned memory reaches, in bytes a second: the limit of all that is here. Some tens of milliseconds.
  virtual double link_rate(bool to_device) = 0;
  // How rows move; what was measured elsewhere, or before, may be added.
  virtual MoverModel& model() noexcept = 0;
  // Measures every way of moving `bytes` at `offset` of records, `rows` of which lie in a registered slab as in a whole table, in
  // batches of several sizes; about a second. Rows are read, and written back as they were where `both_ways`: nobody else may use
  // the slab meanwhile. What was measured becomes part of the model. Batches are up to 1 GiB, three at a time in device memory;
  // sizes for which that is not free are left out. Does nothing where the slab is not registered.
  virtual void calibrate(const FrameSource& source, std::uint64_t rows, std::uint64_t offset, std::uint64_t bytes, bool both_ways,
                         ThreadPool& pool) = 0;

  // Waits until everything enqueued on `stream` is done; a failure of an earlier call surfaces here as CudaError.
  virtual void wait(CudaStream stream) = 0;
};

}  // namespace embermap
