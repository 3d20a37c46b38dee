// A std::shared_mutex that lets nobody wait for ever.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace embermap {

// The system's lock prefers readers: as long as some overlap, a writer never comes in. Here a writer that waits holds the gate,
// so that those who come after it wait behind it. Not recursive: a thread that has it, shared or alone, must not ask again. For
// std::unique_lock and std::shared_lock.
class FairSharedMutex {
 public:
  void lock() {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    const std::lock_guard gate(gate_);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    const std::lock_guard gate(gate_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }
  // Whether somebody waits to have it alone: who shares it for long, and can go on later, should let go.
  bool wanted_alone() const noexcept { return waiting_.load(std::memory_order_relaxed) != 0; }

 private:
  std::mutex gate_;
  std::shared_mutex mutex_;
  std::atomic<unsigned> waiting_{0};
};

}  // namespace embermap
