#include "base/thread_pool.hpp"

#include <sched.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/error.hpp"
#include "base/lock_soon.hpp"

namespace embermap {
namespace {

thread_local bool inside_body = false;  // the thread runs pieces of some loop: a loop begun by one of them stays on this thread

// Raises inside_body, and restores it.
class InsideBody {
 public:
  InsideBody() : before_{inside_body} { inside_body = true; }
  ~InsideBody() { inside_body = before_; }
  InsideBody(const InsideBody&) = delete;
  InsideBody& operator=(const InsideBody&) = delete;

 private:
  bool before_;
};

unsigned usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<unsigned>(std::max(CPU_COUNT(&set), 1));
  return std::max(std::thread::hardware_concurrency(), 1U);
}

// A batch is several loops, one soon after the other. A thread that went to sleep in between takes tens of microseconds to come
// back, and waking sixteen of them takes the caller as long as copying the rows: so they look out for a while first. Longer than
// the time between two loops, shorter than what anyone would notice of an idle process.
constexpr std::chrono::microseconds kLookOut{60};

// Until `seen` is true, or for kLookOut. Returns what it was at last.
template <class Seen>
bool look_out(const Seen& seen) {
  const auto end = std::chrono::steady_clock::now() + kLookOut;
  do {
    for (int i = 0; i < 32; ++i) {
      if (seen()) return true;
#if defined(__SSE2__)
      _mm_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return seen();
}

// Attributes of threads with stacks of 1 MiB. What std::thread has, 8 MiB for each of the 32 threads of a store's I/O, is 256 MiB
// of addresses, which a limit on them (ulimit -v) counts though nobody touches them.
class StackSize {
 public:
  StackSize() : valid_{::pthread_attr_init(&attributes_) == 0} {
    if (valid_) (void)::pthread_attr_setstacksize(&attributes_, std::size_t{1} << 20);
  }
  ~StackSize() {
    if (valid_) ::pthread_attr_destroy(&attributes_);
  }
  StackSize(const StackSize&) = delete;
  StackSize& operator=(const StackSize&) = delete;
  const pthread_attr_t* attributes() const noexcept { return valid_ ? &attributes_ : nullptr; }

 private:
  pthread_attr_t attributes_;
  bool valid_;
};

}  // namespace

struct ThreadPool::Loop {
  std::uint64_t count;
  std::uint64_t piece;
  const std::function<void(std::uint64_t, std::uint64_t)>* body;
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::uint64_t> running{0};
  std::mutex mutex;
  std::condition_variable idle;
  std::exception_ptr error;

  // The next piece, or count if none is left. Never steps past count, which may be close to 2^64.
  std::uint64_t take() {
    std::uint64_t begin = next.load();
    while (begin < count && !next.compare_exchange_weak(begin, begin + std::min(piece, count - begin))) {
    }
    return begin;
  }

  // Takes pieces until none is left. `running` is raised before a piece is taken, so that whoever sees next >= count and
  // running == 0 knows that no body runs and none will.
  void help() {
    const InsideBody inside;
    running.fetch_add(1);
    for (std::uint64_t begin = take(); begin < count; begin = take()) {
      try {
        (*body)(begin, begin + std::min(piece, count - begin));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next.store(count);
      }
    }
    // The last one out wakes the caller, which looks with the lock held: it sees the subtraction, or waits when this comes.
    if (running.fetch_sub(1) != 1) return;
    const std::lock_guard lock(mutex);
    idle.notify_all();
  }
};

ThreadPool::ThreadPool(unsigned threads) : threads_{threads == 0 ? std::min(usable_cores(), 16U) : threads} {
  if (threads_ > kMaxThreads) throw InvalidArgument(fmt::format("threads = {}: at most {}", threads, kMaxThreads));
  looks_out_ = threads_ <= usable_cores();
  workers_.reserve(threads_ - 1);
  const StackSize stack;
  while (workers_.size() + 1 < threads_) {
    pthread_t worker{};
    if (::pthread_create(&worker, stack.attributes(), &ThreadPool::start, this) != 0)
      break;  // a limit on processes or memory: what has started serves
    workers_.push_back(worker);
  }
  threads_ = static_cast<unsigned>(workers_.size()) + 1;
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() noexcept {
  std::vector<pthread_t> workers;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    posted_.fetch_add(1, std::memory_order_relaxed);
    workers.swap(workers_);
  }
  wake_.notify_all();
  for (const pthread_t worker : workers) ::pthread_join(worker, nullptr);
}

void* ThreadPool::start(void* pool) noexcept {
  static_cast<ThreadPool*>(pool)->work();
  return nullptr;
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || !loops_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Loop> loop = loops_.front();
    const bool last = loops_.size() == 1;
    const std::uint64_t seen = posted_.load(std::memory_order_relaxed);  // counted up with mutex_ held
    lock.unlock();
    loop->help();
    if (looks_out_ && last) look_out([&] { return posted_.load(std::memory_order_relaxed) != seen; });
    if (looks_out_)
      lock_soon(lock);
    else
      lock.lock();
    std::erase(loops_, loop);  // it has no pieces left
  }
}

void ThreadPool::parallel_for(std::uint64_t count, std::uint64_t grain,
                              const std::function<void(std::uint64_t, std::uint64_t)>& body) {
  if (count == 0) return;
  grain = std::max<std::uint64_t>(grain, 1);
  if (threads_ == 1 || inside_body || count <= grain) return body(0, count);
  const auto take_lock = [&](std::unique_lock<std::mutex>& lock) { return looks_out_ ? lock_soon(lock) : lock.lock(); };
  auto loop = std::make_shared<Loop>();
  loop->count = count;
  // Four pieces a thread even out unequal speeds; fewer, larger ones keep each thread's memory accesses together.
  loop->piece = std::max(grain, count / (std::uint64_t{threads_} * 4) + 1);
  loop->body = &body;
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    take_lock(lock);
    loops_.push_back(loop);
    posted_.fetch_add(1, std::memory_order_relaxed);
  }
  wake_.notify_all();
  loop->help();
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    take_lock(lock);
    std::erase(loops_, loop);  // from here no worker can join in
  }
  if (looks_out_) look_out([&] { return loop->running.load() == 0; });
  std::unique_lock lock(loop->mutex);
  loop->idle.wait(lock, [&] { return loop->running.load() == 0; });
  // Taken out, so that the exception dies here and not with the last worker that still knows the loop.
  if (const std::exception_ptr error = std::exchange(loop->error, nullptr)) std::rethrow_exception(error);
}

}  // namespace embermap
