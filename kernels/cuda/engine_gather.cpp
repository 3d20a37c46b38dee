#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <thread>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/batch.hpp"
#include "kernels/cuda/engine.hpp"
#include "kernels/cuda/group_ids.hpp"
#include "kernels/cuda/row_copy.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"

namespace embermap::gpu {

namespace {
constexpr std::uint64_t kMostEarlyBytes = 256 << 20;  // of a gather in which threads begin before the ids are sorted
constexpr float kFewRepeat = 0.9F;                    // as large a part of the ids is distinct then
}  // namespace

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
    if (const std::uint64_t bad = bad_.load(); bad != kNoBadId) throw RowIdError(table_, ids_[bad], bad, rows_);
  }

 private:
  static constexpr std::uint64_t kPiece = 8192;
  StagingPool::Lease& lease_;
  const std::span<const std::int64_t> ids_;
  const std::uint64_t rows_;
  const std::string& table_;
  std::once_flag arrived_;
  std::atomic<std::uint64_t> next_{0}, looked_at_{0}, bad_{kNoBadId};
};

}  // namespace

// Threads need neither sorted nor distinct ids: where few repeat, they begin with the last ones as they are, straight to their
// places in `out`, while the device sorts the others.
std::unique_ptr<CudaBatch> Engine::gather(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                          const std::string& table, const FrameSource& source, std::uint64_t offset,
                                          std::uint64_t bytes, std::byte* out, ThreadPool& pool, CudaStream stream,
                                          const std::shared_ptr<CudaFlight>& behind) {
  const ProfileRange range("embermap: fetch");
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "gather");
  const bool reaches = zero_copy(source);
  const MoverRate choice = model_.choose(
      {.fetch = true, .rows = count, .row_bytes = bytes, .pool_bytes = source.slab_bytes, .threads = pool.threads()});
  // Few are fetched as they are, neither sorted nor made distinct. The largest page's number must be below 2^32 - 1.
  StagingPool::Lease report;
  if (reaches && count != 0 && count <= kMostFewIds && source.rows_per_page != 0 &&
      rows / source.rows_per_page < std::numeric_limits<std::uint32_t>::max() - 1)
    report = report_for(0, native(stream));
  const bool direct = static_cast<bool>(report);

  auto batch = new_batch(ids, direct ? 0 : count, rows, source.rows_per_page, "gather", stream);
  DeviceBatch& mine = *batch;
  mine.whole = true;
  if (count == 0) return batch;
  if (bytes == 0) throw InvalidArgument("gather: rows of 0 bytes");
  check_ids(ids);
  // DMA reaches the host's memory only where it was registered as one range, and threads write to the device's alone.
  const bool on_device = check_memory(out, "output of gather") == cudaMemoryTypeDevice;
  check_source(mine, source, 0, 0, offset, bytes, "gather");
  mine.offset = offset;
  mine.bytes = bytes;
  mine.began = shared_->events.record(mine.stream);
  if (direct) {
    mine.ids = ids;
    mine.rows = rows;
    mine.table = table;
    mine.keys_on_host = std::move(report);
    gather_direct(mine, ids, count, rows, source, out, behind);
    return batch;
  }
  mine.ids = ids;
  mine.rows = rows;
  mine.table = table;
  LinkLane* const lane = reaches && choice.way.host_threads != 0 ? lane_for(mine) : nullptr;
  std::uint64_t tail = 0;
  // Not on a stream that each thread has its own of: one of several threads enqueues.
  if (lane != nullptr && on_device && mine.stream != cudaStreamPerThread && count < kMostEarlyBytes / bytes &&
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
    group(mine, ids, head, rows, lane != nullptr || !reaches);
    need_rows(mine, offset, bytes, "gather");  // waits for the keys where rows are so many that it has to know how many
    if (lane != nullptr && !follows) lane->follow(mine.stream);
    if (!reaches) return;
    ++mine.moved.batches;
    if (lane == nullptr || choice.way.blocks != 0) {
      // Bad ids count as none: see GroupHeader.
      move_from_frames(move_of(Stretch(mine, source, 0, {}), {}, lane), shape_of(choice.way), mine.stream);
      if (lane != nullptr) lane->has_kernel_on(mine.stream);
    }
    if (tail != 0)
      count_pages(mine, ids, count, rows, source.rows_per_page);
    else
      mine.uncounted_pages = true;  // they are in the header
  };
  if (tail != 0) {
    // One thread enqueues all that the device has to do, while the others look at the ids and begin.
    IdsOnHost on_host(mine.ids_on_host, count, rows, table);
    const HostPlaces as_they_are(source, on_host.data() + head, true, offset);
    (void)fetch_by_threads(*lane, as_they_are, tail, bytes, out + head * bytes, true, pool, choice.way.host_threads, enqueue,
                           [&] { on_host.check(); });
    mine.moved.thread_rows += tail;
    mine.moved.bytes += tail * bytes;
  } else {
    enqueue();
  }
  const Stretch stretch(mine, source, 0, {});
  if (!reaches) {
    fetch_through_host(stretch, pool);
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
  expand_rows(mine.working.data(), bytes, mine.groups.inverse, head, bytes, out, mine.stream);
  recent_distinct_.store(static_cast<float>(mine.distinct) / static_cast<float>(head), std::memory_order_relaxed);
  return batch;
}

// Few ids: sorting them would take longer than fetching some of them twice.
void Engine::gather_direct(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                           const FrameSource& source, std::byte* out, const std::shared_ptr<CudaFlight>& behind) {
  RecordPlaces places = move_of(Stretch(batch, source, 0, {}), {}, nullptr).places;
  places.keys = ids;
  auto& report = *reinterpret_cast<GroupReport*>(batch.keys_on_host.data());
  gather_few(places, static_cast<std::uint32_t>(count), rows, out, &report, batch.stream);
  batch.keys_on_host.mark();
  wait_for(report.looked, batch.keys_on_host);
  if (report.header.bad_position != kNoBadId) throw bad_id(batch, report.header.bad_position);
  if (behind != nullptr)
    patch_from(*behind, {out, batch.bytes, ids, true, count, nullptr}, batch.offset, batch.bytes, batch.stream);
  batch.moved = {.batches = 1, .kernel_rows = count, .bytes = count * batch.bytes};
  batch.uncounted_pages = true;
}

}  // namespace embermap::gpu
