// Events, used again and again. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <utility>
#include <vector>

namespace embermap::gpu {

// Events of one device, with times, lent one by one. Thread-safe.
class EventPool {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : owner_{std::exchange(other.owner_, nullptr)}, event_{other.event_} {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(owner_, other.owner_);  // the old one ends with `other`
      std::swap(event_, other.event_);
      return *this;
    }
    ~Lease() {
      if (owner_ != nullptr) owner_->give_back(event_);
    }
    explicit operator bool() const noexcept { return owner_ != nullptr; }
    cudaEvent_t get() const noexcept { return event_; }

   private:
    friend class EventPool;
    Lease(EventPool* owner, cudaEvent_t event) noexcept : owner_{owner}, event_{event} {}
    EventPool* owner_ = nullptr;
    cudaEvent_t event_ = nullptr;
  };

  explicit EventPool(int device) noexcept : device_{device} {}
  ~EventPool();  // no lease may be alive
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // An event that has just been recorded on `stream`. The device must be current. Throws CudaError.
  Lease record(cudaStream_t stream);

 private:
  void give_back(cudaEvent_t event) noexcept;
  const int device_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> all_, idle_;
};

}  // namespace embermap::gpu
