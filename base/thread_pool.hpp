// A fixed set of threads owned by whoever makes it (a Store has one). There is no global pool.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace embermap {

class ThreadPool {
 public:
  static constexpr unsigned kMaxThreads = 1024;

  // `threads` is the parallelism of parallel_for, the caller's own thread included: 1 starts no thread. 0 takes what the
  // process may use (sched_getaffinity), at most 16. Where the system refuses to start that many, there are fewer: threads()
  // says how many. Their stacks are of 1 MiB, so that many of them fit into a limited address space. Throws InvalidArgument above
  // kMaxThreads.
  explicit ThreadPool(unsigned threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned threads() const noexcept { return threads_; }

  // Calls body(begin, end) on pieces of [0, count), each at least `grain` long but for the last, and returns when all are done.
  // The caller takes part. Pieces are handed out in ascending order. The first exception is rethrown here after all running
  // pieces have ended; pieces not begun are dropped. May be called from several threads at once and from inside a body, of this
  // pool or another (the inner call then runs on the calling thread alone, unless the outer one has a single piece).
  void parallel_for(std::uint64_t count, std::uint64_t grain, const std::function<void(std::uint64_t, std::uint64_t)>& body);

  // Ends the threads, after the pieces that they have begun; from then on parallel_for works on its caller's thread alone.
  void stop() noexcept;

 private:
  struct Loop;
  static void* start(void* pool) noexcept;
  void work();

  unsigned threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<Loop>> loops_;  // with pieces left to hand out
  std::atomic<std::uint64_t> posted_{0};      // loops so far
  bool looks_out_ = false;                    // threads stay awake for a moment; where each has a core
  bool stop_ = false;
  std::vector<pthread_t> workers_;
};

}  // namespace embermap
