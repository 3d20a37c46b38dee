#include "store/worker.hpp"

#include <system_error>
#include <utility>

namespace embermap {

bool Worker::add(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_ || forked()) return false;
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { work(); });
      } catch (const std::system_error&) {
        return false;
      }
    }
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
  return true;
}

void Worker::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

void Worker::stop() {
  if (forked()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace embermap
