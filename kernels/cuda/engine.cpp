#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "kernels/batch.hpp"
#include "kernels/cuda.hpp"
#include "kernels/cuda/events.hpp"
#include "kernels/cuda/group_ids.hpp"
#include "kernels/cuda/link.hpp"
#include "kernels/cuda/memory.hpp"
#include "kernels/cuda/row_copy.hpp"
#include "kernels/cuda/row_move.hpp"
#include "kernels/cuda/row_patch.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

using gpu::DeviceBuffer;
using gpu::GroupHeader;
using gpu::HostPlaces;
using gpu::Layout;
using gpu::LinkLane;
using gpu::LinkLanes;
using gpu::native;
using gpu::PageEntry;
using gpu::StagingPool;

constexpr std::uint64_t kStagingPiece = 8 << 20;  // rows of an unregistered slab cross in pieces of this size, two in flight
constexpr std::array<std::uint64_t, 4> kMeasuredRows = {4096, 32'768, 131'072, 1'048'576};
constexpr std::uint64_t kMostMeasuredBytes = 1 << 30;
constexpr std::size_t kMeasuredBatches = 3;
constexpr std::uint64_t kFewIds = 4096;               // are fetched as they are, neither sorted nor made distinct
constexpr std::uint64_t kMostEarlyBytes = 256 << 20;  // of a gather in which threads begin before the ids are sorted
constexpr float kFewRepeat = 0.9F;                    // as large a part of the ids is distinct then
constexpr std::uint64_t kMostUnsettled = 1 << 30;     // of a working set with room for more rows than there may be
constexpr double kFastEnough = 0.7;                   // of the best way: a kernel alone that nobody has to wait for
constexpr unsigned kBlocksBehind = 4;                 // of such a kernel, at most
constexpr unsigned kThreadsBehind = 512;
constexpr unsigned kLanes = 4;             // batches whose rows are moved by threads at the same time
constexpr std::uint64_t kFewPages = 1024;  // pages read back together with the counts, at least and
constexpr std::uint64_t kManyPages = kStagingPiece / sizeof(PageEntry);  // at most

// What batches go on using when their engine has ended.
struct Shared {
  explicit Shared(int device) : pool{device}, staging{device}, lanes{device, gpu::LinkShape{}, kLanes}, events{device} {}
  gpu::MemoryPool pool;
  StagingPool staging;
  LinkLanes lanes;
  gpu::EventPool events;
  gpu::OwnStream back;   // of write_back_behind()
  gpu::OwnStream ahead;  // of fetch_ahead()
  // Nothing is enqueued here: what is freed in its order, the host having seen the end of its last use, can be given out at once.
  gpu::OwnStream idle;
};

class DeviceBatch final : public CudaBatch {
 public:
  ~DeviceBatch() override {
    // The lane's chunks are for the next batch.
    if (lane && !gpu::in_forked_child()) gpu::check_teardown(cudaStreamSynchronize(lane->stream()), "cudaStreamSynchronize");
  }
  const void* engine = nullptr;
  std::shared_ptr<Shared> shared;  // before all that comes from it
  cudaStream_t stream = nullptr;
  std::uint64_t rows_per_page = 0;
  bool wide_keys = false;
  bool whole = false;             // made by begin_batch()
  DeviceBuffer memory;            // `header` and the arrays of `groups`
  GroupHeader* header = nullptr;  // of begin_batch()
  gpu::IdGroups groups;
  // Of begin_batch() and gather(): what the caller gave, as long as the stream has not passed the sort.
  const std::int64_t* ids = nullptr;
  std::uint64_t rows = 0;
  std::string table;
  StagingPool::Lease ids_on_host;
  StagingPool::Lease pages_on_host;  // of gather(): how many there are
  StagingPool::Lease keys_on_host;   // of a whole table: with the header before them
  const void* host_keys = nullptr;   // distinct ids, ascending; once settled
  bool settled = false;              // they are there
  bool uncounted = false;            // a kernel moved all rows, not counted in `moved`
  Moved moved;
  gpu::EventPool::Lease began;   // when its first rows were enqueued
  std::uint64_t claimed_at = 0;  // in `memory`: where the kernel counts
  std::uint64_t key_bytes() const noexcept { return wide_keys ? sizeof(std::uint64_t) : sizeof(std::uint32_t); }
  LinkLanes::Lease lane;  // once threads have moved rows

  DeviceBuffer working;  // distinct x bytes, from the first fetch or reserve on
  bool has_working = false;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t working_bytes = 0;

  // Rows [0, distinct) of the working set by their ids.
  gpu::KeyedRows keyed() const {
    return {.rows = working.data(),
            .row_bytes = bytes,
            .keys = groups.keys,
            .wide_keys = wide_keys,
            .count = settled ? distinct : count,
            .exact = settled ? nullptr : &header->movable};
  }
};

class Flight final : public CudaFlight {
 public:
  // `end` has been recorded.
  Flight(std::shared_ptr<Shared> shared, std::shared_ptr<DeviceBatch> batch, gpu::EventPool::Lease began,
         gpu::EventPool::Lease end)
      : shared_{std::move(shared)}, batch_{std::move(batch)}, began_{std::move(began)}, end_{std::move(end)} {}
  ~Flight() override {
    if (!over_ && !gpu::in_forked_child()) {
      const gpu::RelaxedCapture relaxed;
      gpu::check_teardown(cudaEventSynchronize(end_.get()), "cudaEventSynchronize");
    }
    settle();
  }

  bool landed() override {
    const std::lock_guard lock(mutex_);
    if (over_) return true;
    const gpu::RelaxedCapture relaxed;
    const cudaError_t state = cudaEventQuery(end_.get());
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    gpu::check(state, "rows on their way between host and device");
    over_ = true;
    behind.reset();  // nobody reads it any more
    return true;
  }
  void wait() override {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    const gpu::RelaxedCapture relaxed;
    gpu::check(cudaEventSynchronize(end_.get()), "rows on their way between host and device");
    over_ = true;
    behind.reset();
  }
  Moved moved() override {
    wait();
    const std::lock_guard lock(mutex_);
    const gpu::RelaxedCapture relaxed;
    float milliseconds = 0;
    EMBERMAP_CUDA(cudaEventElapsedTime(&milliseconds, began_.get(), end_.get()));
    if (fetch_began) {
      float before = 0;
      EMBERMAP_CUDA(cudaEventElapsedTime(&before, fetch_began.get(), ready.get()));
      milliseconds += before;
    }
    Moved out = moved_;
    if (uncounted) {
      GroupHeader counts{};
      std::memcpy(&counts, batch_->keys_on_host.data(), sizeof counts);
      out.batches += 1;
      out.kernel_rows += counts.movable;
      out.bytes += counts.movable * batch_->bytes;
    }
    out.nanoseconds = static_cast<std::uint64_t>(static_cast<double>(milliseconds) * 1e6);
    return out;
  }
  std::uint64_t pages() override {
    wait();
    std::uint64_t pages = 0;
    if (pages_on_host) std::memcpy(&pages, pages_on_host.data(), sizeof pages);
    return pages;
  }
  std::uint64_t device_bytes() const noexcept override { return batch_->working_bytes; }
  const DeviceBatch& batch() const noexcept { return *batch_; }
  cudaEvent_t end() const noexcept { return end_.get(); }

 private:
  // The last use of what the batch has is over, whatever has become of the stream that it was made with.
  void settle() noexcept {
    if (batch_.use_count() != 1) return;  // a working set that somebody keeps
    batch_->keys_on_host.settled();
    batch_->ids_on_host.settled();
    pages_on_host.settled();
    batch_->memory.follow(shared_->idle.get());
    batch_->working.follow(shared_->idle.get());
  }
  const std::shared_ptr<Shared> shared_;  // before all that comes from it
  std::mutex mutex_;
  bool over_ = false;
  const std::shared_ptr<DeviceBatch> batch_;
  const gpu::EventPool::Lease began_, end_;

 public:
  // Of a write-back: when the working set had its last bytes.
  gpu::EventPool::Lease ready;
  gpu::EventPool::Lease fetch_began;  // where its fetch was no flight of its own
  Moved moved_;
  std::shared_ptr<CudaFlight> behind;  // is read until this one has landed
  StagingPool::Lease pages_on_host;
  bool uncounted = false;  // of fetch_ahead(): how many rows it moved is in the batch's header
};

class ArrivingIds final : public CudaIds {
 public:
  // The lease is marked.
  ArrivingIds(std::shared_ptr<Shared> shared, int device, StagingPool::Lease lease, std::uint64_t count)
      : shared_{std::move(shared)}, device_{device}, lease_{std::move(lease)}, count_{count} {}
  std::span<const std::int64_t> wait() override {
    const gpu::ScopedDevice current(device_);
    const gpu::RelaxedCapture relaxed;
    lease_.wait();
    lease_.settled();
    return {reinterpret_cast<const std::int64_t*>(lease_.data()), count_};
  }

 private:
  const std::shared_ptr<Shared> shared_;  // before the lease of its pool
  const int device_;
  StagingPool::Lease lease_;
  const std::uint64_t count_;
};

class Engine final : public CudaEngine {
 public:
  explicit Engine(int device) : device_{device}, shared_{std::make_shared<Shared>(device)} {
    EMBERMAP_CUDA(cudaDeviceGetAttribute(&host_pointers_work_, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
    EMBERMAP_CUDA(cudaDeviceGetAttribute(&pageable_access_, cudaDevAttrPageableMemoryAccess, device));
    cudaDeviceProp properties{};
    EMBERMAP_CUDA(cudaGetDeviceProperties(&properties, device));
    name_ = properties.name;
  }

  int device() const noexcept override { return device_; }

  std::unique_ptr<CudaBatch> make_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                        std::uint64_t rows_per_page, const std::string& table, CudaStream stream) override;
  std::unique_ptr<CudaBatch> begin_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                         std::uint64_t rows_per_page, const std::string& table, CudaStream stream) override;
  void fetch(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
             std::uint64_t offset, std::uint64_t bytes, ThreadPool& pool, CudaStream stream,
             const std::function<void()>& meanwhile) override;
  HostKeys keys(CudaBatch& batch) override;
  std::uint64_t pages_used(const CudaBatch& batch) const override;
  void write_back_last(CudaBatch& batch, const FrameSource& source, std::uint64_t offset, std::uint64_t bytes,
                       const std::byte* in, ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) override;
  void reserve(CudaBatch& batch, std::uint64_t offset, std::uint64_t bytes, CudaStream stream) override;
  void write_back(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                  ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) override;
  void expand(CudaBatch& batch, std::byte* out, CudaStream stream) override;
  void expand(CudaBatch& batch, std::uint64_t bytes, std::byte* out, CudaStream stream) override;
  void assign(CudaBatch& batch, const std::byte* in, CudaStream stream) override;
  void add(CudaBatch& batch, std::uint64_t dim, DType dtype, const std::byte* in, CudaStream stream) override;
  void step(CudaBatch& batch, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads, DType grad_dtype,
            CudaStream stream) override;
  std::unique_ptr<CudaBatch> gather(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, const std::string& table,
                                    const FrameSource& source, std::uint64_t offset, std::uint64_t bytes, std::byte* out,
                                    ThreadPool& pool, CudaStream stream, const std::shared_ptr<CudaFlight>& behind) override;
  void patch(CudaBatch& batch, const std::shared_ptr<CudaFlight>& behind, CudaStream stream) override;
  bool writes_behind(CudaBatch& batch, const FrameSource& source, const ThreadPool& pool) override;
  std::shared_ptr<CudaFlight> write_back_behind(std::shared_ptr<CudaBatch> batch, const FrameSource& source,
                                                std::span<const std::shared_ptr<CudaFlight>> readers,
                                                const std::shared_ptr<CudaFlight>& behind, ThreadPool& pool,
                                                CudaStream stream) override;
  void check_stream(CudaStream stream) override;
  std::shared_ptr<CudaIds> bring_ids(const std::int64_t* ids, std::uint64_t count, CudaStream stream) override;
  Ahead fetch_ahead(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, const std::string& table,
                    const FrameSource& source, std::uint64_t bytes, const std::shared_ptr<CudaFlight>& behind,
                    const ThreadPool& pool, CudaStream stream) override;
  void adopt(const Ahead& ahead, CudaStream stream) override;
  std::shared_ptr<CudaFlight> depart(std::shared_ptr<CudaBatch> batch, const std::shared_ptr<CudaFlight>& behind,
                                     CudaStream stream) override;
  Moved moved(CudaBatch& batch) override;
  const std::string& device_name() const noexcept override { return name_; }
  double link_rate(bool to_device) override;
  MoverModel& model() noexcept override { return model_; }
  void calibrate(const FrameSource& source, std::uint64_t rows, std::uint64_t offset, std::uint64_t bytes, bool both_ways,
                 ThreadPool& pool) override;
  void wait(CudaStream stream) override;

 private:
  DeviceBatch& own(CudaBatch& batch, CudaStream stream, const char* call) const;
  DeviceBatch& with_rows(CudaBatch& batch, CudaStream stream, const char* call) const;
  void need_rows(DeviceBatch& batch, std::uint64_t offset, std::uint64_t bytes, const char* call);
  void check_memory(const void* memory, const char* what) const;
  void check_ids(const std::int64_t* ids) const;
  std::unique_ptr<DeviceBatch> new_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                         std::uint64_t rows_per_page, const char* call, CudaStream stream);
  void send_keys(DeviceBatch& batch, std::uint64_t most);
  void settle(DeviceBatch& batch);  // throws RowIdError
  RowIdError bad_id(const DeviceBatch& batch, std::uint64_t position) const;
  void read_pages(DeviceBatch& batch, const GroupHeader& header, const PageEntry* entries, const PageEntry* first,
                  std::uint64_t have);
  struct Stretch;
  gpu::RowMove move_of(const Stretch& stretch, const DeviceBuffer& frames, LinkLane* lane) const;
  LinkLane* lane_for(DeviceBatch& batch);
  MoverCase case_of(const Stretch& stretch, bool fetch, const ThreadPool& pool) const;
  StagingPool::Lease send_ids(const std::int64_t* ids, std::uint64_t count, cudaStream_t stream);
  void gather_direct(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                     const std::string& table, const FrameSource& source, std::byte* out, ThreadPool& pool,
                     const std::shared_ptr<CudaFlight>& behind);
  void patch_from(const CudaFlight& behind, const gpu::KeyedRows& rows, std::uint64_t offset, std::uint64_t bytes,
                  cudaStream_t stream) const;
  void finish_fetch(const Stretch& stretch, const MoverWay& way, LinkLane& lane, ThreadPool& pool,
                    const std::function<void()>& meanwhile);
  static void count_moved(DeviceBatch& batch, std::uint64_t by_kernel, std::uint64_t rows);
  // Rows of a registered slab to the working set, or back.
  // `last_of`: not the working set goes back, but the last of each id's rows there; the working set has room for it.
  void move(const Stretch& stretch, bool fetch, const MoverWay& way, ThreadPool& pool, const std::function<void()>& meanwhile,
            const std::byte* last_of);
  // Of calibrate(): every way with these batches.
  void measure(const FrameSource& whole, std::uint64_t rows, const std::vector<std::vector<std::int64_t>>& ids,
               std::uint64_t offset, std::uint64_t bytes, bool both_ways, ThreadPool& pool, CudaStream stream,
               std::vector<MoverMeasurement>& measured);
  void need_keys(DeviceBatch& batch);
  DeviceBuffer send_frames(std::span<const std::uint32_t> frames, cudaStream_t stream);
  bool zero_copy(const FrameSource& source) const { return source.registered && host_pointers_work_ != 0; }
  void fetch_through_host(const Stretch& stretch, ThreadPool& pool);
  void write_back_through_host(const Stretch& stretch, ThreadPool& pool);
  const std::byte* aligned_input(const DeviceBatch& batch, const std::byte* in, std::uint64_t bytes, std::uint64_t alignment,
                                 DeviceBuffer& copy) const;

  int device_;
  int host_pointers_work_ = 0;  // kernels reach registered memory under its host address
  int pageable_access_ = 0;     // kernels reach all host memory
  const std::shared_ptr<Shared> shared_;
  gpu::MemoryPool& pool_ = shared_->pool;
  StagingPool& staging_ = shared_->staging;
  LinkLanes& lanes_ = shared_->lanes;
  std::string name_;
  MoverModel model_;
  // Counts the distinct pages of ids, good or bad, for pages_used().
  void count_pages(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                   std::uint64_t rows_per_page);
  std::atomic<float> recent_distinct_{0};         // of the ids of the last large batch, those that were distinct
  std::atomic<std::uint64_t> expected_pages_{0};  // of the next batch: how many to read back before their number is known
};

DeviceBatch& Engine::own(CudaBatch& batch, CudaStream stream, const char* call) const {
  gpu::refuse_capture(native(stream), call);
  auto* const mine = dynamic_cast<DeviceBatch*>(&batch);
  if (mine == nullptr || mine->engine != this)
    throw InvalidArgument(fmt::format("{}: the batch was made with another engine", call));
  if (mine->stream != native(stream)) throw InvalidArgument(fmt::format("{}: the batch was made with another stream", call));
  return *mine;
}

DeviceBatch& Engine::with_rows(CudaBatch& batch, CudaStream stream, const char* call) const {
  DeviceBatch& mine = own(batch, stream, call);
  if (mine.count != 0 && !mine.has_working)
    throw InvalidArgument(fmt::format("{}: the batch has no rows yet; fetch or reserve them", call));
  return mine;
}

// A kernel that follows a wrong address ends the process's use of CUDA, so addresses are looked at first.
void Engine::check_memory(const void* memory, const char* what) const {
  if (memory == nullptr) throw InvalidArgument(fmt::format("{}: null pointer", what));
  cudaPointerAttributes attributes{};
  EMBERMAP_CUDA(cudaPointerGetAttributes(&attributes, memory));
  if (attributes.type == cudaMemoryTypeUnregistered && pageable_access_ == 0)
    throw InvalidArgument(fmt::format("{}: not in the memory of CUDA device {}", what, device_));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device_)
    throw InvalidArgument(fmt::format("{}: in the memory of CUDA device {}, not of {}", what, attributes.device, device_));
}

void Engine::check_ids(const std::int64_t* ids) const {
  check_memory(ids, "ids of a batch");
  if (reinterpret_cast<std::uintptr_t>(ids) % alignof(std::int64_t) != 0)
    throw InvalidArgument(fmt::format("ids of a batch: at {}, which is no multiple of 8", static_cast<const void*>(ids)));
}

// The host has to know only the number of distinct ids and the pages, and to get both in one wait it asks for as many pages as
// the last batches had. What is missing is read in a second one.
std::unique_ptr<CudaBatch> Engine::make_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                              std::uint64_t rows_per_page, const std::string& table, CudaStream stream) {
  const ProfileRange range("embermap: sort ids");
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "make_batch");
  auto batch = new_batch(ids, count, rows, rows_per_page, "make_batch", stream);
  batch->page_starts = {0};
  if (count == 0) return batch;

  const std::uint64_t most_pages = std::max<std::uint64_t>(std::min(count, ceil_div(rows, rows_per_page)), 1);
  const DeviceBuffer result(pool_, sizeof(GroupHeader) + most_pages * sizeof(PageEntry), batch->stream);
  auto* const header = result.at<GroupHeader>(0);
  auto* const entries = result.at<PageEntry>(sizeof(GroupHeader));
  gpu::group_ids(ids, static_cast<std::uint32_t>(count), rows, rows_per_page, batch->groups, header, entries, pool_,
                 batch->stream);

  const std::uint64_t first_copy =
      std::min(most_pages, std::clamp(expected_pages_.load(std::memory_order_relaxed), kFewPages, kManyPages));
  const std::uint64_t first_bytes = sizeof(GroupHeader) + first_copy * sizeof(PageEntry);
  StagingPool::Lease staging = staging_.acquire(first_bytes, batch->stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(staging.data(), header, first_bytes, cudaMemcpyDeviceToHost, batch->stream));
  EMBERMAP_CUDA(cudaStreamSynchronize(batch->stream));
  staging.settled();

  GroupHeader counts{};
  std::memcpy(&counts, staging.data(), sizeof counts);
  if (counts.bad_position != gpu::kNoBadId) {
    std::int64_t bad = 0;
    EMBERMAP_CUDA(cudaMemcpyAsync(&bad, ids + counts.bad_position, sizeof bad, cudaMemcpyDefault, batch->stream));
    EMBERMAP_CUDA(cudaStreamSynchronize(batch->stream));
    throw RowIdError(table, bad, counts.bad_position, rows);
  }
  batch->distinct = counts.distinct;
  read_pages(*batch, counts, entries, reinterpret_cast<const PageEntry*>(staging.data() + sizeof(GroupHeader)), first_copy);
  // A little more than was needed; it shrinks slowly, so that one small batch among large ones costs nothing.
  const std::uint64_t before = expected_pages_.load(std::memory_order_relaxed);
  expected_pages_.store(std::max(counts.pages + counts.pages / 8, before - before / 16), std::memory_order_relaxed);
  return batch;
}

// What both ways of making a batch have in common: checks, and device memory for the groups.
std::unique_ptr<DeviceBatch> Engine::new_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                               std::uint64_t rows_per_page, const char* call, CudaStream stream) {
  if (count > kMaxBatch)
    throw InvalidArgument(fmt::format("a batch of {} ids: at most {} are possible in one call", count, kMaxBatch));
  if (rows_per_page == 0 || rows_per_page > std::uint64_t{1} << 32)
    throw InvalidArgument(fmt::format("{}: {} rows per page", call, rows_per_page));

  auto batch = std::make_unique<DeviceBatch>();
  batch->engine = this;
  batch->shared = shared_;
  batch->stream = native(stream);
  batch->rows_per_page = rows_per_page;
  batch->wide_keys = gpu::wide_keys(rows);
  batch->count = count;
  if (count == 0) return batch;
  check_ids(ids);

  Layout layout;
  const std::uint64_t inverse_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t positions_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t starts_at = layout.add(count + 1, sizeof(std::uint32_t));
  const std::uint64_t page_index_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t slots_at = layout.add(count, sizeof(std::uint32_t));
  batch->claimed_at = layout.add(1, sizeof(unsigned long long));
  const std::uint64_t header_at = layout.add(1, sizeof(GroupHeader));
  const std::uint64_t keys_at = layout.add(count, batch->key_bytes());
  batch->memory = DeviceBuffer(pool_, layout.bytes(), batch->stream);
  batch->header = batch->memory.at<GroupHeader>(header_at);
  batch->groups = {.inverse = batch->memory.at<std::uint32_t>(inverse_at),
                   .positions = batch->memory.at<std::uint32_t>(positions_at),
                   .starts = batch->memory.at<std::uint32_t>(starts_at),
                   .page_index = batch->memory.at<std::uint32_t>(page_index_at),
                   .slots = batch->memory.at<std::uint32_t>(slots_at),
                   .keys = batch->memory.at<std::byte>(keys_at)};
  return batch;
}

std::unique_ptr<CudaBatch> Engine::begin_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                               std::uint64_t rows_per_page, const std::string& table, CudaStream stream) {
  const ProfileRange range("embermap: sort ids");
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "begin_batch");
  auto batch = new_batch(ids, count, rows, rows_per_page, "begin_batch", stream);
  batch->whole = true;
  if (count == 0) return batch;
  batch->ids = ids;
  batch->rows = rows;
  batch->table = table;
  batch->began = shared_->events.record(batch->stream);
  gpu::group_ids(ids, static_cast<std::uint32_t>(count), rows, rows_per_page, batch->groups, batch->header, nullptr, pool_,
                 batch->stream);
  send_keys(*batch, count);
  return batch;
}

// The header and `most` keys on their way to the host.
void Engine::send_keys(DeviceBatch& batch, std::uint64_t most) {
  const auto begin =
      static_cast<std::uint64_t>(static_cast<std::byte*>(batch.groups.keys) - reinterpret_cast<std::byte*>(batch.header));
  const std::uint64_t bytes = begin + most * batch.key_bytes();
  batch.keys_on_host = staging_.acquire(bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(batch.keys_on_host.data(), batch.header, bytes, cudaMemcpyDeviceToHost, batch.stream));
  batch.keys_on_host.mark();
  batch.host_keys = batch.keys_on_host.data() + begin;
}

RowIdError Engine::bad_id(const DeviceBatch& batch, std::uint64_t position) const {
  std::int64_t bad = 0;
  EMBERMAP_CUDA(cudaMemcpyAsync(&bad, batch.ids + position, sizeof bad, cudaMemcpyDefault, batch.stream));
  EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
  return {batch.table, bad, position, batch.rows};
}

// Waits for what send_keys() sent.
void Engine::settle(DeviceBatch& batch) {
  if (batch.settled) return;
  batch.keys_on_host.wait();
  if (batch.whole) {
    GroupHeader counts{};
    std::memcpy(&counts, batch.keys_on_host.data(), sizeof counts);
    if (counts.bad_position != gpu::kNoBadId) throw bad_id(batch, counts.bad_position);
    batch.distinct = counts.distinct;
  }
  batch.settled = true;
}

// Fills batch.pages and page_starts: `have` entries are at `first` in host memory, all are at `entries` in device memory.
void Engine::read_pages(DeviceBatch& batch, const GroupHeader& header, const PageEntry* entries, const PageEntry* first,
                        std::uint64_t have) {
  batch.pages.resize(header.pages);
  batch.page_starts.resize(header.pages + 1);
  batch.page_starts[header.pages] = header.distinct;
  const auto take = [&](const PageEntry* from, std::uint64_t begin, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      batch.pages[begin + i] = from[i].page;
      batch.page_starts[begin + i] = from[i].first;
    }
  };
  have = std::min(have, header.pages);
  take(first, 0, have);
  if (have == header.pages) return;
  constexpr std::uint64_t kPiece = kStagingPiece / sizeof(PageEntry);
  StagingPool::Lease staging = staging_.acquire(std::min(kPiece, header.pages - have) * sizeof(PageEntry), batch.stream);
  for (std::uint64_t begin = have; begin < header.pages; begin += kPiece) {
    const std::uint64_t count = std::min(kPiece, header.pages - begin);
    EMBERMAP_CUDA(
        cudaMemcpyAsync(staging.data(), entries + begin, count * sizeof(PageEntry), cudaMemcpyDeviceToHost, batch.stream));
    EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
    take(reinterpret_cast<const PageEntry*>(staging.data()), begin, count);
  }
  staging.settled();
}

// The working set for rows of `bytes` at `offset`, made if it is not there. As long as nobody knows how many rows there are it
// has room for one per id.
void Engine::need_rows(DeviceBatch& batch, std::uint64_t offset, std::uint64_t bytes, const char* call) {
  if (bytes == 0) throw InvalidArgument(fmt::format("{}: rows of 0 bytes", call));
  if (batch.has_working) {
    if (batch.offset != offset || batch.bytes != bytes)
      throw InvalidArgument(fmt::format("{}: bytes [{}, +{}) of each record, but the batch already has [{}, +{})", call, offset,
                                        bytes, batch.offset, batch.bytes));
    return;
  }
  if (batch.whole && !batch.settled && bytes > kMostUnsettled / batch.count) settle(batch);
  const std::uint64_t rows = batch.whole && !batch.settled ? batch.count : batch.distinct;
  batch.working_bytes = checked_mul(rows, bytes, "working set of a batch");
  batch.working = DeviceBuffer(pool_, batch.working_bytes, batch.stream);
  batch.offset = offset;
  batch.bytes = bytes;
  batch.has_working = true;
}

void Engine::reserve(CudaBatch& batch, std::uint64_t offset, std::uint64_t bytes, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "reserve");
  if (mine.whole && mine.count == 0) return;
  need_rows(mine, offset, bytes, "reserve");
}

namespace {

// What fetch and write_back demand of their arguments: bytes [offset, offset + bytes) of a record lie in its stride, and a page's
// records in its frame.
void check_source(const DeviceBatch& batch, const FrameSource& source, std::uint64_t first_page, std::uint64_t pages,
                  std::uint64_t offset, std::uint64_t bytes, const char* call) {
  if (batch.whole != source.whole)
    throw InvalidArgument(fmt::format("{}: the batch was made for {}, the frames are of {}", call,
                                      batch.whole ? "a whole table" : "some pages",
                                      source.whole ? "a whole table" : "some pages"));
  if (batch.whole ? first_page != 0 || pages != 0 : first_page > batch.pages.size() || pages > batch.pages.size() - first_page)
    throw InvalidArgument(fmt::format("{}: pages [{}, +{}) of a batch with {}", call, first_page, pages, batch.pages.size()));
  if (pages == 0 && !batch.whole) return;
  if (source.slab == nullptr) throw InvalidArgument(fmt::format("{}: no slab", call));
  if (source.rows_per_page != batch.rows_per_page)
    throw InvalidArgument(
        fmt::format("{}: {} rows per page, but the batch was made for {}", call, source.rows_per_page, batch.rows_per_page));
  if (offset > source.stride || bytes > source.stride - offset)
    throw InvalidArgument(fmt::format("{}: bytes [{}, +{}) of records of {}", call, offset, bytes, source.stride));
  const std::uint64_t last = checked_mul(source.rows_per_page - 1, source.stride, "records of a page");
  if (checked_add(last, offset + bytes, "records of a page") > source.page_bytes)
    throw InvalidArgument(fmt::format("{}: {} records of {} bytes do not fit in pages of {}", call, source.rows_per_page,
                                      source.stride, source.page_bytes));
}

}  // namespace

// The frame numbers on the device. They pass through staging, so that the caller's span may change at once.
DeviceBuffer Engine::send_frames(std::span<const std::uint32_t> frames, cudaStream_t stream) {
  DeviceBuffer out(pool_, frames.size_bytes(), stream);
  StagingPool::Lease staging = staging_.acquire(frames.size_bytes(), stream);
  std::memcpy(staging.data(), frames.data(), frames.size_bytes());
  EMBERMAP_CUDA(cudaMemcpyAsync(out.data(), staging.data(), frames.size_bytes(), cudaMemcpyHostToDevice, stream));
  return out;
}

// Some of a batch's rows on one of their ways.
struct Engine::Stretch {
  Stretch(DeviceBatch& of, const FrameSource& from, std::uint64_t first_page, std::span<const std::uint32_t> in_frames)
      : batch{of}, source{from}, frames{in_frames} {
    if (!batch.whole) {
      starts = std::span(batch.page_starts).subspan(first_page, frames.size() + 1);
      begin = starts.front();
    }
    first = first_page;
    working = batch.working.data() + begin * batch.bytes;
  }
  // Exact once the batch is settled.
  std::uint64_t rows() const {
    if (batch.whole) return batch.settled ? batch.distinct : batch.count;
    return starts.back() - begin;
  }
  HostPlaces host_places() const {
    const auto* const keys = static_cast<const std::byte*>(batch.host_keys) + begin * batch.key_bytes();
    if (batch.whole) return {source, keys, batch.wide_keys, batch.offset};
    return {source, keys, batch.wide_keys, batch.offset, starts, frames};
  }

  DeviceBatch& batch;
  const FrameSource& source;
  std::span<const std::uint32_t> frames;
  std::span<const std::uint64_t> starts;
  std::uint64_t begin = 0;  // its first row
  std::uint64_t first = 0;  // its first page
  std::byte* working = nullptr;
};

gpu::RowMove Engine::move_of(const Stretch& s, const DeviceBuffer& frames, LinkLane* lane) const {
  const DeviceBatch& batch = s.batch;
  return {.places = {.slab = s.source.slab,
                     .page_bytes = s.source.page_bytes,
                     .stride = s.source.stride,
                     .offset = batch.offset,
                     .row_bytes = batch.bytes,
                     .whole = batch.whole,
                     .keys = batch.groups.keys,
                     .wide_keys = batch.wide_keys,
                     .rows_per_page = s.source.rows_per_page,
                     .page_index = batch.groups.page_index + s.begin,
                     .slots = batch.groups.slots + s.begin,
                     .frames = frames.at<std::uint32_t>(0),
                     .first_page = static_cast<std::uint32_t>(s.first)},
          .working = s.working,
          .rows = s.rows(),
          .exact = batch.header != nullptr && batch.whole && !batch.settled ? &batch.header->movable : nullptr,
          .claimed = lane != nullptr ? lane->claimed() : batch.memory.at<unsigned long long>(batch.claimed_at),
          .meeting = lane != nullptr ? lane->meeting() : nullptr};
}

namespace {

gpu::RowMoveShape shape_of(const MoverWay& way) {
  gpu::RowMoveShape shape;
  if (way.blocks != 0) shape = {.blocks = way.blocks, .threads = way.block_threads};
  return shape;
}

}  // namespace

// A lane for the batch, set up for a new transfer; null if there is none.
LinkLane* Engine::lane_for(DeviceBatch& batch) {
  if (batch.bytes > lanes_.shape().chunk_bytes) return nullptr;
  if (!batch.lane) {
    LinkLanes::Lease lease = lanes_.acquire();
    if (!lease) return nullptr;
    batch.lane = std::move(lease);
  }
  LinkLane* const lane = &*batch.lane;
  lane->wait();
  lane->reset();
  return lane;
}

MoverCase Engine::case_of(const Stretch& stretch, bool fetch, const ThreadPool& pool) const {
  return {.fetch = fetch,
          .rows = stretch.rows(),
          .row_bytes = stretch.batch.bytes,
          .pool_bytes = stretch.source.slab_bytes,
          .threads = pool.threads()};
}

void Engine::move(const Stretch& stretch, bool fetch, const MoverWay& way, ThreadPool& pool,
                  const std::function<void()>& meanwhile, const std::byte* last_of) {
  DeviceBatch& batch = stretch.batch;
  ++batch.moved.batches;
  LinkLane* const lane = way.host_threads != 0 ? lane_for(batch) : nullptr;
  const bool alone = lane != nullptr && way.blocks == 0;
  DeviceBuffer frames;
  if (!batch.whole) {
    if (lane != nullptr) need_keys(batch);
    if (!alone) frames = send_frames(stretch.frames, batch.stream);
  }
  if (lane != nullptr) lane->follow(batch.stream);
  if (!alone) {
    const gpu::RowMoveShape shape = shape_of(way);
    gpu::RowMove move = move_of(stretch, frames, lane);
    if (last_of != nullptr) {
      move.last_of = last_of;
      move.positions = batch.groups.positions;
      move.starts = batch.groups.starts;
    }
    if (fetch)
      gpu::move_from_frames(move, shape, batch.stream);
    else
      gpu::move_to_frames(move, shape, batch.stream);
    if (lane != nullptr) lane->has_kernel_on(batch.stream);
  }
  if (lane == nullptr) {
    if (meanwhile) meanwhile();
    if (batch.whole && !batch.settled) {
      batch.uncounted = true;  // how many rows there are is known when the stream has been waited for
      return;
    }
    count_moved(batch, stretch.rows(), stretch.rows());
    return;
  }
  if (fetch) return finish_fetch(stretch, way, *lane, pool, meanwhile);
  settle(batch);
  const std::uint64_t rows = stretch.rows();
  std::uint64_t least = 0;
  if (last_of != nullptr) {
    // The threads' rows one behind the other, a little more of them than threads are likely to move.
    const MoverRate known = model_.choose(case_of(stretch, false, pool));
    if (!alone)
      least = rows - std::min(rows, static_cast<std::uint64_t>(static_cast<double>(rows) * (known.thread_share * 1.1 + 0.1)));
    gpu::assign_rows(batch.working.data() + least * batch.bytes, batch.groups.positions, batch.groups.starts + least,
                     rows - least, batch.bytes, last_of, lane->stream());
  }
  const std::uint64_t low = gpu::store_by_threads(*lane, stretch.host_places(), rows, batch.bytes, stretch.working, least, alone,
                                                  pool, way.host_threads, meanwhile);
  if (last_of != nullptr) lane->lead(batch.stream);  // `last_of` is read until then, also where the kernel had all rows
  count_moved(batch, low, rows);
}

// The threads' part, beside the kernel's if there is one.
void Engine::finish_fetch(const Stretch& stretch, const MoverWay& way, LinkLane& lane, ThreadPool& pool,
                          const std::function<void()>& meanwhile) {
  DeviceBatch& batch = stretch.batch;
  settle(batch);
  const std::uint64_t rows = stretch.rows();
  const std::uint64_t low = gpu::fetch_by_threads(lane, stretch.host_places(), rows, batch.bytes, stretch.working,
                                                  way.blocks == 0, pool, way.host_threads, meanwhile);
  lane.lead(batch.stream);
  count_moved(batch, low, rows);
}

void Engine::count_moved(DeviceBatch& batch, std::uint64_t by_kernel, std::uint64_t rows) {
  batch.moved.kernel_rows += by_kernel;
  batch.moved.thread_rows += rows - by_kernel;
  batch.moved.bytes += rows * batch.bytes;
}

HostKeys Engine::keys(CudaBatch& batch) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (mine.count == 0) return {};
  if (!mine.whole) throw InvalidArgument("keys: the batch was made for some pages");
  settle(mine);
  return {mine.host_keys, mine.wide_keys, mine.distinct};
}

void Engine::count_pages(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                         std::uint64_t rows_per_page) {
  const std::uint64_t words = ceil_div(ceil_div(rows, rows_per_page), 32);
  const DeviceBuffer bits(pool_, sizeof(std::uint64_t) + words * sizeof(std::uint32_t), batch.stream);
  EMBERMAP_CUDA(cudaMemsetAsync(bits.data(), 0, sizeof(std::uint64_t) + words * sizeof(std::uint32_t), batch.stream));
  gpu::count_pages(ids, count, rows, rows_per_page, bits.at<std::uint32_t>(sizeof(std::uint64_t)), bits.at<unsigned long long>(0),
                   batch.stream);
  batch.pages_on_host = staging_.acquire(sizeof(std::uint64_t), batch.stream);
  EMBERMAP_CUDA(
      cudaMemcpyAsync(batch.pages_on_host.data(), bits.data(), sizeof(std::uint64_t), cudaMemcpyDeviceToHost, batch.stream));
}

std::uint64_t Engine::pages_used(const CudaBatch& batch) const {
  const auto& mine = dynamic_cast<const DeviceBatch&>(batch);
  std::uint64_t pages = 0;
  if (mine.pages_on_host) {
    std::memcpy(&pages, mine.pages_on_host.data(), sizeof pages);
  } else if (mine.whole && mine.settled && mine.keys_on_host) {
    GroupHeader counts{};
    std::memcpy(&counts, mine.keys_on_host.data(), sizeof counts);
    pages = counts.pages;
  }
  return pages;
}

Moved Engine::moved(CudaBatch& batch) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (std::exchange(mine.uncounted, false)) {
    settle(mine);
    count_moved(mine, mine.distinct, mine.distinct);
  }
  return mine.moved;
}

// The ids on their way to the host.
StagingPool::Lease Engine::send_ids(const std::int64_t* ids, std::uint64_t count, cudaStream_t stream) {
  StagingPool::Lease lease = staging_.acquire(count * sizeof(std::int64_t), stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(lease.data(), ids, count * sizeof(std::int64_t), cudaMemcpyDefault, stream));
  lease.mark();
  return lease;
}

namespace {

// Ids on their way to the host, which several threads look at before they use them.
class IdsOnHost {
 public:
  IdsOnHost(StagingPool::Lease& lease, std::uint64_t count, std::uint64_t rows, const std::string& table)
      : lease_{lease}, ids_{reinterpret_cast<const std::int64_t*>(lease.data()), count}, rows_{rows}, table_{table} {}
  const std::int64_t* data() const noexcept { return ids_.data(); }

  // Returns when all ids have been looked at, by whichever threads are here. Throws RowIdError, the same to all.
  void check() {
    std::call_once(arrived_, [&] { lease_.wait(); });
    for (;;) {
      const std::uint64_t begin = next_.fetch_add(kPiece, std::memory_order_relaxed);
      if (begin >= ids_.size()) break;
      const auto piece = ids_.subspan(begin, std::min<std::size_t>(kPiece, ids_.size() - begin));
      if (const auto bad = first_bad_id(piece, rows_)) {
        std::uint64_t least = bad_.load(std::memory_order_relaxed);
        while (begin + *bad < least && !bad_.compare_exchange_weak(least, begin + *bad)) {
        }
      }
      looked_at_.fetch_add(piece.size(), std::memory_order_acq_rel);
    }
    while (looked_at_.load(std::memory_order_acquire) != ids_.size()) std::this_thread::yield();  // others are at it
    if (const std::uint64_t bad = bad_.load(); bad != gpu::kNoBadId) throw RowIdError(table_, ids_[bad], bad, rows_);
  }

 private:
  static constexpr std::uint64_t kPiece = 8192;
  StagingPool::Lease& lease_;
  const std::span<const std::int64_t> ids_;
  const std::uint64_t rows_;
  const std::string& table_;
  std::once_flag arrived_;
  std::atomic<std::uint64_t> next_{0}, looked_at_{0}, bad_{gpu::kNoBadId};
};

}  // namespace

// Threads need neither sorted nor distinct ids: where few repeat, they begin with the last ones as they are, straight to their
// places in `out`, while the device sorts the others.
std::unique_ptr<CudaBatch> Engine::gather(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                          const std::string& table, const FrameSource& source, std::uint64_t offset,
                                          std::uint64_t bytes, std::byte* out, ThreadPool& pool, CudaStream stream,
                                          const std::shared_ptr<CudaFlight>& behind) {
  const ProfileRange range("embermap: fetch");
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "gather");
  const bool reaches = zero_copy(source);
  const MoverRate choice = model_.choose(
      {.fetch = true, .rows = count, .row_bytes = bytes, .pool_bytes = source.slab_bytes, .threads = pool.threads()});
  const bool direct = reaches && count <= kFewIds;

  auto batch = new_batch(ids, direct ? 0 : count, rows, source.rows_per_page, "gather", stream);
  DeviceBatch& mine = *batch;
  mine.whole = true;
  if (count == 0) return batch;
  if (bytes == 0) throw InvalidArgument("gather: rows of 0 bytes");
  check_ids(ids);
  check_memory(out, "output of gather");
  check_source(mine, source, 0, 0, offset, bytes, "gather");
  mine.offset = offset;
  mine.bytes = bytes;
  mine.began = shared_->events.record(mine.stream);
  if (direct) {
    gather_direct(mine, ids, count, rows, table, source, out, pool, behind);
    return batch;
  }
  mine.ids = ids;
  mine.rows = rows;
  mine.table = table;
  LinkLane* const lane = reaches && choice.way.host_threads != 0 ? lane_for(mine) : nullptr;
  std::uint64_t tail = 0;
  // Not on a stream that each thread has its own of: one of several threads enqueues.
  if (lane != nullptr && mine.stream != cudaStreamPerThread && count < kMostEarlyBytes / bytes &&
      recent_distinct_.load(std::memory_order_relaxed) >= kFewRepeat)
    tail = static_cast<std::uint64_t>(static_cast<double>(count) * std::min(choice.thread_share, 0.75) / 2);
  const std::uint64_t head = count - tail;
  mine.count = head;
  if (tail != 0) mine.ids_on_host = send_ids(ids, count, mine.stream);
  const bool follows = lane != nullptr && head <= kMostUnsettled / bytes;
  if (follows) {  // threads begin before the ids are sorted
    need_rows(mine, offset, bytes, "gather");
    lane->follow(mine.stream);
  }
  const auto enqueue = [&] {
    gpu::group_ids(ids, static_cast<std::uint32_t>(head), rows, source.rows_per_page, mine.groups, mine.header, nullptr, pool_,
                   mine.stream);
    send_keys(mine, lane != nullptr || !reaches ? head : 0);
    need_rows(mine, offset, bytes, "gather");  // waits for the keys where rows are so many that it has to know how many
    if (lane != nullptr && !follows) lane->follow(mine.stream);
    if (!reaches) return;
    ++mine.moved.batches;
    if (lane == nullptr || choice.way.blocks != 0) {
      // Bad ids count as none: see GroupHeader.
      gpu::move_from_frames(move_of(Stretch(mine, source, 0, {}), {}, lane), shape_of(choice.way), mine.stream);
      if (lane != nullptr) lane->has_kernel_on(mine.stream);
    }
    count_pages(mine, ids, count, rows, source.rows_per_page);
  };
  if (tail != 0) {
    // One thread enqueues all that the device has to do, while the others look at the ids and begin.
    IdsOnHost on_host(mine.ids_on_host, count, rows, table);
    const HostPlaces as_they_are(source, on_host.data() + head, true, offset);
    (void)gpu::fetch_by_threads(*lane, as_they_are, tail, bytes, out + head * bytes, true, pool, choice.way.host_threads, enqueue,
                                [&] { on_host.check(); });
    mine.moved.thread_rows += tail;
    mine.moved.bytes += tail * bytes;
  } else {
    enqueue();
  }
  const Stretch stretch(mine, source, 0, {});
  if (!reaches) {
    fetch_through_host(stretch, pool);
    count_pages(mine, ids, count, rows, source.rows_per_page);
  } else if (lane != nullptr) {
    finish_fetch(stretch, choice.way, *lane, pool, {});
  } else {
    settle(mine);
    count_moved(mine, mine.distinct, mine.distinct);
  }
  if (behind != nullptr) {
    patch_from(*behind, mine.keyed(), offset, bytes, mine.stream);
    // Signed and unsigned ids are the same, good as they are.
    patch_from(*behind, {out + head * bytes, bytes, ids + head, true, tail, nullptr}, offset, bytes, mine.stream);
  }
  gpu::expand_rows(mine.working.data(), bytes, mine.groups.inverse, head, bytes, out, mine.stream);
  recent_distinct_.store(static_cast<float>(mine.distinct) / static_cast<float>(head), std::memory_order_relaxed);
  return batch;
}

// Few ids: sorting them would take longer than fetching some of them twice.
void Engine::gather_direct(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                           const std::string& table, const FrameSource& source, std::byte* out, ThreadPool& pool,
                           const std::shared_ptr<CudaFlight>& behind) {
  batch.ids_on_host = send_ids(ids, count, batch.stream);
  batch.memory = DeviceBuffer(pool_, sizeof(unsigned long long), batch.stream);
  batch.ids_on_host.wait();
  const std::span on_host(reinterpret_cast<const std::int64_t*>(batch.ids_on_host.data()), count);
  if (const auto bad = first_bad_id(on_host, rows, pool)) throw RowIdError(table, on_host[*bad], *bad, rows);
  gpu::RowMove move = move_of(Stretch(batch, source, 0, {}), {}, nullptr);
  move.places.keys = ids;
  move.places.wide_keys = true;
  move.working = out;
  move.rows = count;
  gpu::move_from_frames(move, {}, batch.stream);
  if (behind != nullptr)
    patch_from(*behind, {out, batch.bytes, ids, true, count, nullptr}, batch.offset, batch.bytes, batch.stream);
  batch.moved = {.batches = 1, .kernel_rows = count, .bytes = count * batch.bytes};
  count_pages(batch, ids, count, rows, source.rows_per_page);
}

void Engine::fetch(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                   std::uint64_t offset, std::uint64_t bytes, ThreadPool& pool, CudaStream stream,
                   const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: fetch");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "fetch");
  if (mine.count == 0) return;
  check_source(mine, source, first_page, frames.size(), offset, bytes, "fetch");
  need_rows(mine, offset, bytes, "fetch");
  if (frames.empty() && !mine.whole) return;
  const Stretch stretch(mine, source, first_page, frames);
  if (!zero_copy(source)) {
    if (meanwhile) meanwhile();
    return fetch_through_host(stretch, pool);
  }
  move(stretch, true, model_.choose(case_of(stretch, true, pool)).way, pool, meanwhile, nullptr);
}

void Engine::write_back(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page,
                        std::span<const std::uint32_t> frames, ThreadPool& pool, CudaStream stream,
                        const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: write back");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "write_back");
  if (mine.count == 0) return;
  check_source(mine, source, first_page, frames.size(), mine.offset, mine.bytes, "write_back");
  if (frames.empty() && !mine.whole) return;
  const Stretch stretch(mine, source, first_page, frames);
  if (!zero_copy(source)) {
    if (meanwhile) meanwhile();
    return write_back_through_host(stretch, pool);
  }
  move(stretch, false, model_.choose(case_of(stretch, false, pool)).way, pool, meanwhile, nullptr);
}

void Engine::write_back_last(CudaBatch& batch, const FrameSource& source, std::uint64_t offset, std::uint64_t bytes,
                             const std::byte* in, ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: write back");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "write_back_last");
  if (mine.count == 0) return;
  check_source(mine, source, 0, 0, offset, bytes, "write_back_last");
  check_memory(in, "input of write_back_last");
  need_rows(mine, offset, bytes, "write_back_last");
  const Stretch stretch(mine, source, 0, {});
  if (zero_copy(source)) return move(stretch, false, model_.choose(case_of(stretch, false, pool)).way, pool, meanwhile, in);
  if (meanwhile) meanwhile();
  settle(mine);
  gpu::assign_rows(mine.working.data(), mine.groups.positions, mine.groups.starts, mine.distinct, mine.bytes, in, mine.stream);
  write_back_through_host(stretch, pool);
}

double Engine::link_rate(bool to_device) {
  constexpr std::uint64_t kBytes = 64 << 20;
  constexpr std::size_t kCopies = 9;
  const gpu::ScopedDevice current(device_);
  const gpu::OwnStream own;
  const DeviceBuffer on_device(pool_, kBytes, own.get());
  StagingPool::Lease on_host = staging_.acquire(kBytes, own.get());
  std::array<float, kCopies> milliseconds{};
  for (float& time : milliseconds) {
    const gpu::EventPool::Lease begin = shared_->events.record(own.get());
    if (to_device)
      EMBERMAP_CUDA(cudaMemcpyAsync(on_device.data(), on_host.data(), kBytes, cudaMemcpyHostToDevice, own.get()));
    else
      EMBERMAP_CUDA(cudaMemcpyAsync(on_host.data(), on_device.data(), kBytes, cudaMemcpyDeviceToHost, own.get()));
    const gpu::EventPool::Lease end = shared_->events.record(own.get());
    EMBERMAP_CUDA(cudaStreamSynchronize(own.get()));
    EMBERMAP_CUDA(cudaEventElapsedTime(&time, begin.get(), end.get()));
  }
  on_host.settled();
  std::nth_element(milliseconds.begin(), milliseconds.begin() + kCopies / 2, milliseconds.end());
  return static_cast<double>(kBytes) / (static_cast<double>(milliseconds[kCopies / 2]) * 1e-3);
}

void Engine::calibrate(const FrameSource& source, std::uint64_t rows, std::uint64_t offset, std::uint64_t bytes, bool both_ways,
                       ThreadPool& pool) {
  const ProfileRange range("embermap: measure movers");
  const gpu::ScopedDevice current(device_);
  if (!zero_copy(source) || rows == 0 || bytes == 0) return;
  FrameSource whole = source;
  whole.whole = true;
  const gpu::OwnStream own;
  std::mt19937_64 random(rows);
  std::vector<MoverMeasurement> measured;
  for (const std::uint64_t size : kMeasuredRows) {
    if (size > kMeasuredRows[0] && (size > rows || size > kMostMeasuredBytes / bytes)) break;
    std::vector<std::vector<std::int64_t>> ids(kMeasuredBatches);
    for (std::vector<std::int64_t>& some : ids) {
      some.resize(std::min({size, rows, std::max<std::uint64_t>(1, kMostMeasuredBytes / bytes)}));
      for (std::int64_t& id : some) id = static_cast<std::int64_t>(random() % rows);
    }
    try {
      measure(whole, rows, ids, offset, bytes, both_ways, pool, CudaStream{own.get()}, measured);
    } catch (const CudaError&) {
      // Most likely a device whose memory others have: whoever asked needs less of it, and what smaller batches told has to do.
      if (measured.empty()) throw;
      break;
    }
  }
  model_.add(std::move(measured));
}

// Several batches in turn: the processor's caches would keep the rows of a single one.
void Engine::measure(const FrameSource& whole, std::uint64_t rows, const std::vector<std::vector<std::int64_t>>& ids,
                     std::uint64_t offset, std::uint64_t bytes, bool both_ways, ThreadPool& pool, CudaStream stream,
                     std::vector<MoverMeasurement>& measured) {
  std::vector<std::unique_ptr<CudaBatch>> batches;
  for (const std::vector<std::int64_t>& some : ids) {
    const DeviceBuffer on_device(pool_, some.size() * sizeof(std::int64_t), native(stream));
    EMBERMAP_CUDA(cudaMemcpyAsync(on_device.data(), some.data(), some.size() * sizeof(std::int64_t), cudaMemcpyHostToDevice,
                                  native(stream)));
    batches.push_back(begin_batch(on_device.at<std::int64_t>(0), some.size(), rows, whole.rows_per_page, "calibration", stream));
    auto& mine = static_cast<DeviceBatch&>(*batches.back());
    check_source(mine, whole, 0, 0, offset, bytes, "calibrate");
    settle(mine);
    need_rows(mine, offset, bytes, "calibrate");
    move(Stretch(mine, whole, 0, {}), true, MoverWay{}, pool, {}, nullptr);  // now they have rows to write back
    wait(stream);
  }
  std::uint64_t distinct = 0;
  for (const auto& batch : batches) distinct += batch->distinct;
  for (const bool fetch : {true, false}) {
    if (!fetch && !both_ways) break;
    MoverMeasurement of{.of = {fetch, distinct / batches.size(), bytes, whole.slab_bytes, pool.threads()}, .rates = {}};
    for (const MoverWay& way : mover_ways(pool.threads())) {
      if (way.host_threads != 0 && bytes > lanes_.shape().chunk_bytes) continue;
      std::uint64_t by_threads = 0;
      const auto begin = std::chrono::steady_clock::now();
      for (const auto& batch : batches) {
        auto& mine = static_cast<DeviceBatch&>(*batch);
        const std::uint64_t before = mine.moved.thread_rows;
        move(Stretch(mine, whole, 0, {}), fetch, way, pool, {}, nullptr);
        wait(stream);
        by_threads += mine.moved.thread_rows - before;
        mine.lane = {};  // one lane does for all of them
      }
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      of.rates.push_back({way, static_cast<double>(distinct * bytes) / seconds,
                          static_cast<double>(by_threads) / static_cast<double>(distinct)});
    }
    measured.push_back(std::move(of));
  }
}

namespace {

// Rows of an unregistered slab on their way through host memory, in pieces.
class HostPieces {
 public:
  HostPieces(const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes, std::byte* working, ThreadPool& pool)
      : places_{places},
        rows_{rows},
        row_bytes_{row_bytes},
        working_{working},
        pool_{pool},
        piece_{std::clamp<std::uint64_t>(kStagingPiece / row_bytes, 1, rows)},
        addresses_(piece_) {}

  std::uint64_t pieces() const { return ceil_div(rows_, piece_); }
  std::uint64_t piece_bytes() const { return piece_ * row_bytes_; }
  std::uint64_t bytes(std::uint64_t piece) const { return rows(piece) * row_bytes_; }
  std::byte* working(std::uint64_t piece) const { return working_ + piece * piece_ * row_bytes_; }

  // Host addresses of the records of a piece; valid until the next call.
  std::span<std::byte* const> addresses(std::uint64_t piece) {
    const std::uint64_t from = piece * piece_;
    pool_.parallel_for(rows(piece), 16384, [&](std::uint64_t begin, std::uint64_t end) {
      places_.addresses(from + begin, from + end, addresses_.data() + begin);
    });
    return {addresses_.data(), rows(piece)};
  }

 private:
  std::uint64_t rows(std::uint64_t piece) const { return std::min(piece_, rows_ - piece * piece_); }

  const HostPlaces places_;
  const std::uint64_t rows_, row_bytes_;
  std::byte* const working_;
  ThreadPool& pool_;
  const std::uint64_t piece_;  // rows
  std::vector<std::byte*> addresses_;
};

}  // namespace

// A batch with pages has no header on the host, and its keys only when they are asked for.
void Engine::need_keys(DeviceBatch& batch) {
  if (batch.settled || batch.host_keys != nullptr) return;
  const std::uint64_t bytes = batch.distinct * batch.key_bytes();
  batch.keys_on_host = staging_.acquire(bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(batch.keys_on_host.data(), batch.groups.keys, bytes, cudaMemcpyDeviceToHost, batch.stream));
  batch.keys_on_host.mark();
  batch.host_keys = batch.keys_on_host.data();
}

void Engine::fetch_through_host(const Stretch& stretch, ThreadPool& pool) {
  DeviceBatch& batch = stretch.batch;
  need_keys(batch);
  settle(batch);
  HostPieces rows(stretch.host_places(), stretch.rows(), batch.bytes, stretch.working, pool);
  std::array<StagingPool::Lease, 2> staging;
  for (std::uint64_t piece = 0; piece < rows.pieces(); ++piece) {
    StagingPool::Lease& lease = staging[piece % 2];
    if (piece < 2)
      lease = staging_.acquire(rows.piece_bytes(), batch.stream);
    else
      lease.wait();
    const std::span<std::byte* const> from = rows.addresses(piece);
    gather_rows({from.data(), from.size()}, batch.bytes, lease.data(), pool);
    EMBERMAP_CUDA(cudaMemcpyAsync(rows.working(piece), lease.data(), rows.bytes(piece), cudaMemcpyHostToDevice, batch.stream));
    lease.mark();
  }
  EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
  for (StagingPool::Lease& lease : staging) lease.settled();
  batch.moved.pageable_rows += stretch.rows();
}

void Engine::write_back_through_host(const Stretch& stretch, ThreadPool& pool) {
  DeviceBatch& batch = stretch.batch;
  need_keys(batch);
  settle(batch);
  HostPieces rows(stretch.host_places(), stretch.rows(), batch.bytes, stretch.working, pool);
  std::array<StagingPool::Lease, 2> staging;
  const auto bring = [&](std::uint64_t piece) {
    StagingPool::Lease& lease = staging[piece % 2];
    if (piece < 2) lease = staging_.acquire(rows.piece_bytes(), batch.stream);
    EMBERMAP_CUDA(cudaMemcpyAsync(lease.data(), rows.working(piece), rows.bytes(piece), cudaMemcpyDeviceToHost, batch.stream));
    lease.mark();
  };
  std::vector<std::uint32_t> sources(rows.piece_bytes() / batch.bytes);
  std::iota(sources.begin(), sources.end(), 0U);
  bring(0);
  for (std::uint64_t piece = 0; piece < rows.pieces(); ++piece) {
    if (piece + 1 < rows.pieces()) bring(piece + 1);
    StagingPool::Lease& lease = staging[piece % 2];
    lease.wait();
    const std::span<std::byte* const> to = rows.addresses(piece);
    scatter_rows(to, std::span(sources).first(to.size()), batch.bytes, lease.data(), pool);
  }
  for (StagingPool::Lease& lease : staging) lease.settled();
  batch.moved.pageable_rows += stretch.rows();
}

void Engine::expand(CudaBatch& batch, std::byte* out, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "expand");
  if (mine.count == 0) return;
  check_memory(out, "output of expand");
  gpu::expand_rows(mine.working.data(), mine.bytes, mine.groups.inverse, mine.count, mine.bytes, out, mine.stream);
}

void Engine::expand(CudaBatch& batch, std::uint64_t bytes, std::byte* out, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "expand");
  if (mine.count == 0) return;
  if (bytes > mine.bytes) throw InvalidArgument(fmt::format("expand: {} bytes of rows of {}", bytes, mine.bytes));
  check_memory(out, "output of expand");
  gpu::expand_rows(mine.working.data(), mine.bytes, mine.groups.inverse, mine.count, bytes, out, mine.stream);
}

void Engine::patch_from(const CudaFlight& behind, const gpu::KeyedRows& rows, std::uint64_t offset, std::uint64_t bytes,
                        cudaStream_t stream) const {
  const auto& flight = dynamic_cast<const Flight&>(behind);
  const DeviceBatch& newer = flight.batch();
  // Bytes of a record that both have.
  const std::uint64_t begin = std::max(offset, newer.offset);
  const std::uint64_t end = std::min(offset + bytes, newer.offset + newer.bytes);
  if (begin >= end || rows.count == 0) return;
  EMBERMAP_CUDA(cudaStreamWaitEvent(stream, flight.ready.get(), 0));
  gpu::patch_rows(rows, begin - offset, newer.keyed(), begin - newer.offset, end - begin, stream);
}

void Engine::patch(CudaBatch& batch, const std::shared_ptr<CudaFlight>& behind, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "patch");
  if (mine.count != 0) patch_from(*behind, mine.keyed(), mine.offset, mine.bytes, mine.stream);
}

void Engine::check_stream(CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "rows on their way");
}

std::shared_ptr<CudaIds> Engine::bring_ids(const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "bring_ids");
  if (count > kMaxBatch)
    throw InvalidArgument(fmt::format("a batch of {} ids: at most {} are possible in one call", count, kMaxBatch));
  check_ids(ids);
  return std::make_shared<ArrivingIds>(shared_, device_, send_ids(ids, count, native(stream)), count);
}

CudaEngine::Ahead Engine::fetch_ahead(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, const std::string& table,
                                      const FrameSource& source, std::uint64_t bytes, const std::shared_ptr<CudaFlight>& behind,
                                      const ThreadPool& pool, CudaStream stream) {
  const ProfileRange range("embermap: fetch ahead");
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "fetch_ahead");
  if (count == 0 || !zero_copy(source) || !source.whole)
    throw InvalidArgument("fetch_ahead: no ids, or frames that are not registered or not of a whole table");
  if (bytes > kMostUnsettled / count)
    throw InvalidArgument(fmt::format("fetch_ahead: {} rows of {} bytes are more than {}", count, bytes, kMostUnsettled));
  const cudaStream_t own = shared_->ahead.get();
  const gpu::EventPool::Lease here = shared_->events.record(native(stream));
  EMBERMAP_CUDA(cudaStreamWaitEvent(own, here.get(), 0));
  try {
    std::shared_ptr<CudaBatch> batch = begin_batch(ids, count, rows, source.rows_per_page, table, CudaStream{own});
    auto& mine = static_cast<DeviceBatch&>(*batch);
    check_source(mine, source, 0, 0, 0, bytes, "fetch_ahead");
    need_rows(mine, 0, bytes, "fetch_ahead");
    const Stretch stretch(mine, source, 0, {});
    const MoverWay way = model_.choose_kernel(case_of(stretch, true, pool)).way;
    gpu::move_from_frames(move_of(stretch, {}, nullptr), shape_of(way), own);
    if (behind) patch_from(*behind, mine.keyed(), 0, bytes, own);
    gpu::EventPool::Lease end = shared_->events.record(own);
    auto flight =
        std::make_shared<Flight>(shared_, std::static_pointer_cast<DeviceBatch>(batch), std::move(mine.began), std::move(end));
    flight->behind = behind;
    flight->uncounted = true;
    return {std::move(batch), std::move(flight)};
  } catch (...) {
    (void)cudaStreamSynchronize(own);  // nothing goes on without somebody who knows of it
    throw;
  }
}

void Engine::adopt(const Ahead& ahead, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "adopt");
  auto& mine = dynamic_cast<DeviceBatch&>(*ahead.batch);
  if (mine.engine != this) throw InvalidArgument("adopt: the batch was made with another engine");
  settle(mine);
  EMBERMAP_CUDA(cudaStreamWaitEvent(native(stream), dynamic_cast<Flight&>(*ahead.flight).end(), 0));
  mine.stream = native(stream);
  mine.memory.follow(mine.stream);
  mine.working.follow(mine.stream);
}

bool Engine::writes_behind(CudaBatch& batch, const FrameSource& source, const ThreadPool& pool) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (!zero_copy(source) || !mine.whole || mine.count == 0) return false;
  const MoverCase of = case_of(Stretch(mine, source, 0, {}), false, pool);
  return model_.choose_kernel(of).bytes_per_second >= kFastEnough * model_.choose(of).bytes_per_second;
}

std::shared_ptr<CudaFlight> Engine::write_back_behind(std::shared_ptr<CudaBatch> batch, const FrameSource& source,
                                                      std::span<const std::shared_ptr<CudaFlight>> readers,
                                                      const std::shared_ptr<CudaFlight>& behind, ThreadPool& pool,
                                                      CudaStream stream) {
  const ProfileRange range("embermap: write back behind");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(*batch, stream, "write_back_behind");
  check_source(mine, source, 0, 0, mine.offset, mine.bytes, "write_back_behind");
  if (mine.count == 0 || !zero_copy(source))
    throw InvalidArgument("write_back_behind: no rows, or frames that are not registered");
  settle(mine);
  const Stretch stretch(mine, source, 0, {});
  const cudaStream_t back = shared_->back.get();
  gpu::EventPool::Lease ready = shared_->events.record(mine.stream);
  EMBERMAP_CUDA(cudaStreamWaitEvent(back, ready.get(), 0));
  for (const std::shared_ptr<CudaFlight>& reader : readers)
    EMBERMAP_CUDA(cudaStreamWaitEvent(back, dynamic_cast<Flight&>(*reader).end(), 0));
  gpu::EventPool::Lease began = shared_->events.record(back);
  try {
    gpu::RowMoveShape shape = shape_of(model_.choose_kernel(case_of(stretch, false, pool)).way);
    // What others do on the device meanwhile reaches it, and its answers the host, over the same link. With more threads their
    // turn comes tens of microseconds later, each time.
    shape.blocks = std::min(shape.blocks, kBlocksBehind);
    shape.threads = std::min(shape.threads, kThreadsBehind);
    gpu::move_to_frames(move_of(stretch, {}, nullptr), shape, back);
    gpu::EventPool::Lease end = shared_->events.record(back);
    auto flight = std::make_shared<Flight>(shared_, std::static_pointer_cast<DeviceBatch>(std::move(batch)), std::move(began),
                                           std::move(end));
    if (std::exchange(mine.uncounted, false)) count_moved(mine, mine.distinct, mine.distinct);  // its fetch
    ++mine.moved.batches;
    count_moved(mine, mine.distinct, mine.distinct);
    flight->moved_ = std::exchange(mine.moved, {});
    flight->ready = std::move(ready);
    flight->fetch_began = std::move(mine.began);
    flight->behind = behind;
    mine.lane = {};
    return flight;
  } catch (...) {
    (void)cudaStreamSynchronize(back);  // nothing goes on without somebody who knows of it
    throw;
  }
}

std::shared_ptr<CudaFlight> Engine::depart(std::shared_ptr<CudaBatch> batch, const std::shared_ptr<CudaFlight>& behind,
                                           CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = own(*batch, stream, "depart");
  if (!mine.began) mine.began = shared_->events.record(mine.stream);  // of a batch that has departed before
  gpu::EventPool::Lease end = shared_->events.record(mine.stream);
  if (std::exchange(mine.uncounted, false)) {
    settle(mine);
    count_moved(mine, mine.distinct, mine.distinct);
  }
  gpu::EventPool::Lease began = std::move(mine.began);
  StagingPool::Lease pages = std::move(mine.pages_on_host);
  mine.lane = {};              // for the next batch, of whichever table
  mine.ids_on_host.settled();  // the host has waited for them
  mine.ids_on_host = {};
  const Moved moved = std::exchange(mine.moved, {});
  auto flight = std::make_shared<Flight>(shared_, std::static_pointer_cast<DeviceBatch>(std::move(batch)), std::move(began),
                                         std::move(end));
  flight->moved_ = moved;
  flight->pages_on_host = std::move(pages);
  flight->behind = behind;
  return flight;
}

void Engine::assign(CudaBatch& batch, const std::byte* in, CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "assign");
  if (mine.count == 0) return;
  if (mine.whole) settle(mine);
  check_memory(in, "input of assign");
  gpu::assign_rows(mine.working.data(), mine.groups.positions, mine.groups.starts, mine.distinct, mine.bytes, in, mine.stream);
}

// `in` itself, or a copy of it where its address is not a multiple of `alignment` (a view into a byte buffer).
const std::byte* Engine::aligned_input(const DeviceBatch& batch, const std::byte* in, std::uint64_t bytes,
                                       std::uint64_t alignment, DeviceBuffer& copy) const {
  if (reinterpret_cast<std::uintptr_t>(in) % alignment == 0) return in;
  copy = DeviceBuffer(pool_, bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(copy.data(), in, bytes, cudaMemcpyDefault, batch.stream));
  return copy.data();
}

void Engine::add(CudaBatch& batch, std::uint64_t dim, DType dtype, const std::byte* in, CudaStream stream) {
  const ProfileRange range("embermap: add");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "add");
  if (mine.count == 0) return;
  if (mine.whole) settle(mine);
  const std::uint64_t row_bytes = checked_mul(dim, item_size(dtype), "bytes of a row");
  if (row_bytes != mine.bytes)
    throw InvalidArgument(fmt::format("add: {} x {} on rows of {} bytes", dim, dtype_name(dtype), mine.bytes));
  check_memory(in, "input of add");
  DeviceBuffer copy;
  in = aligned_input(mine, in, checked_mul(mine.count, row_bytes, "input of a batch"), item_size(dtype), copy);
  gpu::add_grouped({mine.working.data(), mine.bytes, mine.groups.positions, mine.groups.starts, mine.distinct, mine.count}, dim,
                   dtype, in, pool_, mine.stream);
}

void Engine::step(CudaBatch& batch, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                  DType grad_dtype, CudaStream stream) {
  const ProfileRange range("embermap: optimizer step");
  const gpu::ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "step");
  if (mine.whole && mine.count != 0) settle(mine);
  const bool half = layout.dtype == DType::kFloat16 || layout.dtype == DType::kBFloat16;
  if (!is_floating(layout.dtype))
    throw DTypeError(fmt::format("step: rows of dtype {} cannot be trained", dtype_name(layout.dtype)));
  if (grad_dtype != layout.dtype && !(half && grad_dtype == DType::kFloat32))
    throw DTypeError(
        fmt::format("step: gradients of dtype {} for rows of dtype {}", dtype_name(grad_dtype), dtype_name(layout.dtype)));
  if (mine.count == 0) return;

  // Fields with an element for each of the weight's, then those of one; each behind the one before.
  const std::uint32_t states = all_states(scalars);
  const std::uint64_t state_item = item_size(state_dtype(layout.dtype));
  std::uint64_t end = checked_mul(layout.dim, item_size(layout.dtype), "bytes of a weight");
  if (layout.states < states)
    throw InvalidArgument(fmt::format("step: {} state fields for an optimizer that needs {}", layout.states, states));
  if (scalars.stochastic_rounding && !half)
    throw DTypeError(fmt::format("step: stochastic rounding of rows of dtype {}", dtype_name(layout.dtype)));
  for (std::uint32_t state = 0; state < states; ++state) {
    const bool counter = scalars.per_row && state == states - (scalars.kind == StepScalars::Kind::kNAdam ? 2U : 1U);
    const std::uint64_t item = counter ? sizeof(std::int32_t) : state_item;
    const std::uint64_t elements = state < element_states(scalars.kind) ? layout.dim : 1;
    const std::uint64_t offset = layout.state_offset[state];
    if (offset < end || offset % item != 0)
      throw InvalidArgument(
          fmt::format("step: state field {} at byte {}, behind {} bytes, its items {} long", state, offset, end, item));
    end = checked_add(offset, checked_mul(elements, item, "bytes of a state"), "bytes of a record");
  }
  if (mine.offset != 0 || mine.bytes < end || mine.bytes % (states != 0 ? state_item : item_size(layout.dtype)) != 0)
    throw InvalidArgument(
        fmt::format("step: the batch has bytes [{}, +{}) of each record, the step needs [0, +{})", mine.offset, mine.bytes, end));
  check_memory(grads, "gradients of step");
  DeviceBuffer copy;
  const std::uint64_t grad_row = checked_mul(layout.dim, item_size(grad_dtype), "bytes of a gradient");
  grads = aligned_input(mine, grads, checked_mul(mine.count, grad_row, "gradients of a batch"), item_size(grad_dtype), copy);
  gpu::step_grouped({mine.working.data(), mine.bytes, mine.groups.positions, mine.groups.starts, mine.distinct, mine.count,
                     mine.groups.keys, mine.wide_keys},
                    layout, scalars, grads, grad_dtype, pool_, mine.stream);
}

void Engine::wait(CudaStream stream) {
  const gpu::ScopedDevice current(device_);
  gpu::refuse_capture(native(stream), "wait");
  EMBERMAP_CUDA(cudaStreamSynchronize(native(stream)));
}

}  // namespace

std::unique_ptr<CudaEngine> CudaEngine::create(int device) {
  const int devices = cuda_devices();
  if (devices == 0) throw CudaError(fmt::format("CUDA device {} cannot be used: {}", device, cuda_absence()));
  if (device < 0 || device >= devices)
    throw CudaError(fmt::format("CUDA device {} does not exist: {} {} visible", device, devices, devices == 1 ? "is" : "are"));
  gpu::remember_process();
  const gpu::ScopedDevice current(device);
  const gpu::RelaxedCapture relaxed;  // the first call may be one that will be refused
  int has_pools = 0;
  EMBERMAP_CUDA(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device));
  if (has_pools == 0)
    throw CudaError(fmt::format("CUDA device {} cannot be used: it has no stream-ordered memory pools", device));
  gpu::check_kernels_run(device);
  return std::make_unique<Engine>(device);
}

}  // namespace embermap
