#include "kernels/cuda/events.hpp"

#include "kernels/cuda/runtime.hpp"

namespace embermap::gpu {

EventPool::~EventPool() {
  if (all_.empty() || in_forked_child()) return;
  const ScopedDevice current(device_, std::nothrow);
  for (const cudaEvent_t event : all_) check_teardown(cudaEventDestroy(event), "cudaEventDestroy");
}

EventPool::Lease EventPool::record(cudaStream_t stream) {
  Lease lease;
  {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      all_.reserve(all_.size() + 1);
      idle_.reserve(all_.size() + 1);  // giving back needs no memory
      cudaEvent_t event = nullptr;
      EMBERMAP_CUDA(cudaEventCreate(&event));
      all_.push_back(event);
      lease = Lease(this, event);
    } else {
      lease = Lease(this, idle_.back());
      idle_.pop_back();
    }
  }
  EMBERMAP_CUDA(cudaEventRecord(lease.get(), stream));
  return lease;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  if (in_forked_child()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

}  // namespace embermap::gpu
