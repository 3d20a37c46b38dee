// A thread for what a store does in the background.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace embermap {

// Runs jobs one after another on a thread of its own, started with the first job. Jobs must not throw. In a forked child it does
// nothing: the thread stayed in the parent.
class Worker {
 public:
  Worker() = default;
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // False, and the job will not run, after stop() or where the system refuses a thread.
  bool add(std::function<void()> job);
  // Waits until all jobs have run; later ones are refused.
  void stop();
  bool forked() const noexcept { return getpid() != process_; }

 private:
  void work();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
  std::thread thread_;
  const pid_t process_ = getpid();
};

}  // namespace embermap
