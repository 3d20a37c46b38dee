#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "kernels/batch.hpp"
#include "kernels/cuda/engine.hpp"
#include "kernels/cuda/flight.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"

namespace embermap::gpu {

namespace {
constexpr double kFastEnough = 0.7;    // of the best way: a kernel alone that nobody has to wait for
constexpr unsigned kBlocksBehind = 4;  // of such a kernel, at most
constexpr unsigned kThreadsBehind = 512;
}  // namespace

void Engine::patch_from(const CudaFlight& behind, const KeyedRows& rows, std::uint64_t offset, std::uint64_t bytes,
                        cudaStream_t stream) const {
  const auto& flight = dynamic_cast<const Flight&>(behind);
  const DeviceBatch& newer = flight.batch();
  // Bytes of a record that both have.
  const std::uint64_t begin = std::max(offset, newer.offset);
  const std::uint64_t end = std::min(offset + bytes, newer.offset + newer.bytes);
  if (begin >= end || rows.count == 0) return;
  EMBERMAP_CUDA(cudaStreamWaitEvent(stream, flight.ready.get(), 0));
  patch_rows(rows, begin - offset, newer.keyed(), begin - newer.offset, end - begin, stream);
}

void Engine::patch(CudaBatch& batch, const std::shared_ptr<CudaFlight>& behind, CudaStream stream) {
  const ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "patch");
  if (mine.count != 0) patch_from(*behind, mine.keyed(), mine.offset, mine.bytes, mine.stream);
}

void Engine::check_stream(CudaStream stream) {
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "rows on their way");
}

std::shared_ptr<CudaIds> Engine::bring_ids(const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "bring_ids");
  if (count > kMaxBatch)
    throw InvalidArgument(fmt::format("a batch of {} ids: at most {} are possible in one call", count, kMaxBatch));
  check_ids(ids);
  return std::make_shared<ArrivingIds>(shared_, device_, send_ids(ids, count, native(stream)), count);
}

CudaEngine::Ahead Engine::fetch_ahead(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, const std::string& table,
                                      const FrameSource& source, std::uint64_t bytes, const std::shared_ptr<CudaFlight>& behind,
                                      const ThreadPool& pool, CudaStream stream) {
  const ProfileRange range("embermap: fetch ahead");
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "fetch_ahead");
  if (count == 0 || !zero_copy(source) || !source.whole)
    throw InvalidArgument("fetch_ahead: no ids, or frames that are not registered or not of a whole table");
  if (bytes > kMostUnsettled / count)
    throw InvalidArgument(fmt::format("fetch_ahead: {} rows of {} bytes are more than {}", count, bytes, kMostUnsettled));
  const cudaStream_t own = shared_->ahead.get();
  const EventPool::Lease here = shared_->events.record(native(stream));
  EMBERMAP_CUDA(cudaStreamWaitEvent(own, here.get(), 0));
  try {
    std::shared_ptr<CudaBatch> batch = begin_batch(ids, count, rows, source.rows_per_page, table, CudaStream{own}, false);
    auto& mine = static_cast<DeviceBatch&>(*batch);
    check_source(mine, source, 0, 0, 0, bytes, "fetch_ahead");
    need_rows(mine, 0, bytes, "fetch_ahead");
    const Stretch stretch(mine, source, 0, {});
    const MoverWay way = model_.choose_kernel(case_of(stretch, true, pool)).way;
    move_from_frames(move_of(stretch, {}, nullptr), shape_of(way), own);
    if (behind) patch_from(*behind, mine.keyed(), 0, bytes, own);
    EventPool::Lease end = shared_->events.record(own);
    auto flight =
        std::make_shared<Flight>(shared_, std::static_pointer_cast<DeviceBatch>(batch), std::move(mine.began), std::move(end));
    flight->moved_.batches = 1;
    flight->behind = behind;
    flight->uncounted = true;
    return {std::move(batch), std::move(flight)};
  } catch (...) {
    (void)cudaStreamSynchronize(own);  // nothing goes on without somebody who knows of it
    throw;
  }
}

void Engine::adopt(const Ahead& ahead, CudaStream stream) {
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "adopt");
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
  const ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(*batch, stream, "write_back_behind");
  check_source(mine, source, 0, 0, mine.offset, mine.bytes, "write_back_behind");
  if (mine.count == 0 || !zero_copy(source))
    throw InvalidArgument("write_back_behind: no rows, or frames that are not registered");
  settle(mine);
  const Stretch stretch(mine, source, 0, {});
  const cudaStream_t back = shared_->back.get();
  EventPool::Lease ready = shared_->events.record(mine.stream);
  EMBERMAP_CUDA(cudaStreamWaitEvent(back, ready.get(), 0));
  for (const std::shared_ptr<CudaFlight>& reader : readers)
    EMBERMAP_CUDA(cudaStreamWaitEvent(back, dynamic_cast<Flight&>(*reader).end(), 0));
  EventPool::Lease began = shared_->events.record(back);
  try {
    RowMoveShape shape = shape_of(model_.choose_kernel(case_of(stretch, false, pool)).way);
    // What others do on the device meanwhile reaches it, and its answers the host, over the same link. With more threads their
    // turn comes tens of microseconds later, each time.
    shape.blocks = std::min(shape.blocks, kBlocksBehind);
    shape.threads = std::min(shape.threads, kThreadsBehind);
    move_to_frames(move_of(stretch, {}, nullptr), shape, back);
    EventPool::Lease end = shared_->events.record(back);
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
  const ScopedDevice current(device_);
  DeviceBatch& mine = own(*batch, stream, "depart");
  if (!mine.began) mine.began = shared_->events.record(mine.stream);  // of a batch that has departed before
  EventPool::Lease end = shared_->events.record(mine.stream);
  const bool uncounted = std::exchange(mine.uncounted, false);
  EventPool::Lease began = std::move(mine.began);
  StagingPool::Lease pages = std::move(mine.pages_on_host);
  mine.lane = {};              // for the next batch, of whichever table
  mine.ids_on_host.settled();  // the host has waited for them
  mine.ids_on_host = {};
  const Moved moved = std::exchange(mine.moved, {});
  auto flight = std::make_shared<Flight>(shared_, std::static_pointer_cast<DeviceBatch>(std::move(batch)), std::move(began),
                                         std::move(end));
  flight->moved_ = moved;
  flight->pages_on_host = std::move(pages);
  flight->uncounted = uncounted;
  flight->counts_pages = std::exchange(mine.uncounted_pages, false);
  flight->behind = behind;
  return flight;
}

}  // namespace embermap::gpu
