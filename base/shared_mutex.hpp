// A std::shared_mutex that lets nobody wait for ever.
#pragma once

#include <mutex>
#include <shared_mutex>

namespace embermap {

// The system's lock prefers readers: as long as some overlap, a writer never comes in. Here a writer that waits holds the gate,
// so that those who come after it wait behind it. Not recursive: a thread that has it, shared or alone, must not ask again. For
// std::unique_lock and std::shared_lock.
class FairSharedMutex {
 public:
  void lock() {
    const std::lock_guard gate(gate_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    const std::lock_guard gate(gate_);
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex gate_;
  std::shared_mutex mutex_;
};

}  // namespace embermap
