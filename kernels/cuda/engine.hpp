// The engine of a device, in parts: engine.cpp makes batches and works on their rows, engine_move.cpp takes these to and from
// the frames, engine_gather.cpp is the short way of a whole table's gather, engine_flights.cpp has what nobody waits for, and
// engine_measure.cpp finds out how fast rows move. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda.hpp"
#include "kernels/cuda/device_batch.hpp"
#include "kernels/cuda/group_ids.hpp"
#include "kernels/cuda/link.hpp"
#include "kernels/cuda/memory.hpp"
#include "kernels/cuda/row_move.hpp"
#include "kernels/cuda/row_patch.hpp"

namespace embermap::gpu {

// Rows of an unregistered slab cross in pieces of this size, two in flight.
inline constexpr std::uint64_t kStagingPiece = 8 << 20;
inline constexpr std::uint64_t kMostUnsettled = 1 << 30;  // of a working set with room for more rows than there may be

class Engine final : public CudaEngine {
 public:
  explicit Engine(int device) : device_{device}, shared_{std::make_shared<Shared>(device)} {
    EMBERMAP_CUDA(cudaDeviceGetAttribute(&host_pointers_work_, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
    EMBERMAP_CUDA(cudaDeviceGetAttribute(&pageable_access_, cudaDevAttrPageableMemoryAccess, device));
    cudaDeviceProp properties{};
    EMBERMAP_CUDA(cudaGetDeviceProperties(&properties, device));
    name_ = properties.name;
    limits_ = group_limits(device);
  }

  int device() const noexcept override { return device_; }

  std::unique_ptr<CudaBatch> make_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                        std::uint64_t rows_per_page, const std::string& table, CudaStream stream) override;
  std::unique_ptr<CudaBatch> begin_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                         std::uint64_t rows_per_page, const std::string& table, CudaStream stream,
                                         bool tells) override;
  void fetch(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
             std::uint64_t offset, std::uint64_t bytes, ThreadPool& pool, CudaStream stream,
             const std::function<void()>& meanwhile) override;
  void check(CudaBatch& batch) override;
  HostKeys keys(CudaBatch& batch) override;
  std::uint64_t pages_used(const CudaBatch& batch) const override;
  void write_back_last(CudaBatch& batch, const FrameSource& source, std::uint64_t offset, std::uint64_t bytes,
                       const std::byte* in, ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) override;
  void reserve(CudaBatch& batch, std::uint64_t offset, std::uint64_t bytes, CudaStream stream) override;
  void write_back(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                  ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) override;
  void expand(CudaBatch& batch, std::byte* out, CudaStream stream) override;
  void expand(CudaBatch& batch, std::uint64_t bytes, std::byte* out, CudaStream stream) override;
  void expand_ids(CudaBatch& batch, std::int64_t* out, CudaStream stream) override;
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
                                                std::initializer_list<Flights> readers, const std::shared_ptr<CudaFlight>& behind,
                                                ThreadPool& pool, CudaStream stream) override;
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
  cudaMemoryType check_memory(const void* memory, const char* what) const;  // what it is
  void check_ids(const std::int64_t* ids) const;
  std::unique_ptr<DeviceBatch> new_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                         std::uint64_t rows_per_page, const char* call, CudaStream stream);
  // Has the device group the ids and tell the host of it, with the keys if it will ask for them; `looked` as of group_ids().
  void group(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, bool keys,
             const std::function<void()>& looked = {});
  void send_keys(DeviceBatch& batch, std::uint64_t most);
  StagingPool::Lease report_for(std::uint64_t key_bytes, cudaStream_t stream);
  void settle(DeviceBatch& batch);  // throws RowIdError
  RowIdError bad_id(const DeviceBatch& batch, std::uint64_t position) const;
  void read_pages(DeviceBatch& batch, const GroupHeader& header, const PageEntry* entries, const PageEntry* first,
                  std::uint64_t have);
  struct Stretch;
  RowMove move_of(const Stretch& stretch, const DeviceBuffer& frames, LinkLane* lane) const;
  LinkLane* lane_for(DeviceBatch& batch);
  MoverCase case_of(const Stretch& stretch, bool fetch, const ThreadPool& pool) const;
  StagingPool::Lease send_ids(const std::int64_t* ids, std::uint64_t count, cudaStream_t stream);
  void gather_direct(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                     const FrameSource& source, std::byte* out, const std::shared_ptr<CudaFlight>& behind);
  void patch_from(const CudaFlight& behind, const KeyedRows& rows, std::uint64_t offset, std::uint64_t bytes,
                  cudaStream_t stream) const;
  void finish_fetch(const Stretch& stretch, const MoverWay& way, LinkLane& lane, ThreadPool& pool,
                    const std::function<void()>& meanwhile);
  static void count_moved(DeviceBatch& batch, std::uint64_t by_kernel, std::uint64_t rows);
  void move_pages(DeviceBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                  bool fetch, ThreadPool& pool, const std::function<void()>& meanwhile);
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
  MemoryPool& pool_ = shared_->pool;
  StagingPool& staging_ = shared_->staging;
  LinkLanes& lanes_ = shared_->lanes;
  std::string name_;
  GroupLimits limits_;
  MoverModel model_;
  // Has the device count the distinct pages of good ids, for pages_used().
  void count_pages(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                   std::uint64_t rows_per_page);
  std::atomic<float> recent_distinct_{0};         // of the ids of the last large batch, those that were distinct
  std::atomic<std::uint64_t> expected_pages_{0};  // of the next batch: how many to read back before their number is known
};

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

// What fetch and write_back demand of their arguments: bytes [offset, offset + bytes) of a record lie in its stride, and a page's
// records in its frame. Throws InvalidArgument naming `call`.
void check_source(const DeviceBatch& batch, const FrameSource& source, std::uint64_t first_page, std::uint64_t pages,
                  std::uint64_t offset, std::uint64_t bytes, const char* call);

RowMoveShape shape_of(const MoverWay& way);

}  // namespace embermap::gpu
