// What is on its way between host and device when nobody waits for it. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "kernels/cuda.hpp"
#include "kernels/cuda/device_batch.hpp"
#include "kernels/cuda/events.hpp"
#include "kernels/cuda/memory.hpp"
#include "kernels/cuda/runtime.hpp"

namespace embermap::gpu {

class Flight final : public CudaFlight {
 public:
  // `end` has been recorded.
  Flight(std::shared_ptr<Shared> shared, std::shared_ptr<DeviceBatch> batch, EventPool::Lease began, EventPool::Lease end)
      : shared_{std::move(shared)}, batch_{std::move(batch)}, began_{std::move(began)}, end_{std::move(end)} {}
  ~Flight() override {
    if (!over_ && !in_forked_child()) {
      const RelaxedCapture relaxed;
      check_teardown(cudaEventSynchronize(end_.get()), "cudaEventSynchronize");
    }
    settle();
  }

  bool landed() override {
    const std::lock_guard lock(mutex_);
    if (over_) return true;
    const RelaxedCapture relaxed;
    const cudaError_t state = cudaEventQuery(end_.get());
    if (state == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(state, "rows on their way between host and device");
    over_ = true;
    behind.reset();  // nobody reads it any more
    return true;
  }
  void wait() override {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    const RelaxedCapture relaxed;
    check(cudaEventSynchronize(end_.get()), "rows on their way between host and device");
    over_ = true;
    behind.reset();
  }
  Moved moved() override {
    wait();
    const std::lock_guard lock(mutex_);
    const RelaxedCapture relaxed;
    float milliseconds = 0;
    EMBERMAP_CUDA(cudaEventElapsedTime(&milliseconds, began_.get(), end_.get()));
    if (fetch_began) {
      float before = 0;
      EMBERMAP_CUDA(cudaEventElapsedTime(&before, fetch_began.get(), ready.get()));
      milliseconds += before;
    }
    Moved out = moved_;
    if (uncounted) {
      const GroupHeader counts = header();
      out.kernel_rows += counts.movable;
      out.bytes += counts.movable * batch_->bytes;
    }
    out.nanoseconds = static_cast<std::uint64_t>(static_cast<double>(milliseconds) * 1e6);
    return out;
  }
  std::uint64_t pages() override {
    wait();
    if (counts_pages) {
      const GroupHeader counts = header();
      return counts.bad_position == kNoBadId ? counts.pages : 0;
    }
    std::uint64_t pages = 0;
    if (pages_on_host) std::memcpy(&pages, pages_on_host.data(), sizeof pages);
    return pages;
  }
  std::uint64_t device_bytes() const noexcept override { return batch_->working_bytes; }
  const DeviceBatch& batch() const noexcept { return *batch_; }
  cudaEvent_t end() const noexcept { return end_.get(); }

 private:
  GroupHeader header() const {
    GroupHeader counts{};
    std::memcpy(&counts, batch_->keys_on_host.data(), sizeof counts);
    return counts;
  }
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
  const EventPool::Lease began_, end_;

 public:
  // Of a write-back: when the working set had its last bytes.
  EventPool::Lease ready;
  EventPool::Lease fetch_began;  // where its fetch was no flight of its own
  Moved moved_;
  std::shared_ptr<CudaFlight> behind;  // is read until this one has landed
  StagingPool::Lease pages_on_host;
  bool uncounted = false;     // how many rows a kernel moved is in the batch's header
  bool counts_pages = false;  // and how many pages they lie on
};

class ArrivingIds final : public CudaIds {
 public:
  // The lease is marked.
  ArrivingIds(std::shared_ptr<Shared> shared, int device, StagingPool::Lease lease, std::uint64_t count)
      : shared_{std::move(shared)}, device_{device}, lease_{std::move(lease)}, count_{count} {}
  std::span<const std::int64_t> wait() override {
    const ScopedDevice current(device_);
    const RelaxedCapture relaxed;
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

}  // namespace embermap::gpu
