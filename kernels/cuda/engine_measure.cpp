#include <algorithm>
#include <array>
#include <chrono>
#include <random>

#include "base/error.hpp"
#include "kernels/cuda/engine.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"

namespace embermap::gpu {

namespace {
constexpr std::array<std::uint64_t, 4> kMeasuredRows = {4096, 32'768, 131'072, 1'048'576};
constexpr std::uint64_t kMostMeasuredBytes = 1 << 30;
constexpr std::size_t kMeasuredBatches = 3;
}  // namespace

double Engine::link_rate(bool to_device) {
  constexpr std::uint64_t kBytes = 64 << 20;
  constexpr std::size_t kCopies = 9;
  const ScopedDevice current(device_);
  const OwnStream own;
  const DeviceBuffer on_device(pool_, kBytes, own.get());
  StagingPool::Lease on_host = staging_.acquire(kBytes, own.get());
  std::array<float, kCopies> milliseconds{};
  for (float& time : milliseconds) {
    const EventPool::Lease begin = shared_->events.record(own.get());
    if (to_device)
      EMBERMAP_CUDA(cudaMemcpyAsync(on_device.data(), on_host.data(), kBytes, cudaMemcpyHostToDevice, own.get()));
    else
      EMBERMAP_CUDA(cudaMemcpyAsync(on_host.data(), on_device.data(), kBytes, cudaMemcpyDeviceToHost, own.get()));
    const EventPool::Lease end = shared_->events.record(own.get());
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
  const ScopedDevice current(device_);
  if (!zero_copy(source) || rows == 0 || bytes == 0) return;
  FrameSource whole = source;
  whole.whole = true;
  const OwnStream own;
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
    batches.push_back(
        begin_batch(on_device.at<std::int64_t>(0), some.size(), rows, whole.rows_per_page, "calibration", stream, false));
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

}  // namespace embermap::gpu
