#include "store/store_core.hpp"

#include <fmt/format.h>

#include <charconv>
#include <string>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "store/store_impl.hpp"

namespace embermap {
namespace {
constexpr std::string_view kMarkName = "UNCOMMITTED";
}

std::filesystem::path UncommittedMark::path() const { return store_ / kMarkName; }

bool UncommittedMark::present(const std::filesystem::path& store, std::uint64_t commit) {
  const std::filesystem::path file = store / kMarkName;
  std::error_code error;
  if (!std::filesystem::exists(file, error)) return false;
  const std::string text = read_text(file, 64);
  std::uint64_t after = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), after);
  // An empty mark was made and its writer died before the number was in it; pages come after that, but who knows.
  return problem != std::errc{} || after >= commit;
}

void UncommittedMark::set(std::uint64_t commit) {
  const std::lock_guard lock(mutex_);
  if (set_ == commit) return;
  replace_file(path(), fmt::format("{}\n", commit), ops_);
  set_ = commit;
}

void UncommittedMark::clear() {
  const std::lock_guard lock(mutex_);
  std::error_code error;
  if (!set_ && !std::filesystem::exists(path(), error)) return;
  // From here the file may be gone: whatever happens, the next page written needs a new one.
  set_.reset();
  if (ops_.unlink(path().c_str()) != 0 && errno != ENOENT) throw IoError(errno, "unlink", path());
  sync_directory(store_, ops_);
}

bool UncommittedMark::is_set() const {
  const std::lock_guard lock(mutex_);
  return set_.has_value();
}

void ManifestFile::save(const Manifest& manifest) {
  const std::lock_guard lock(mutex_);
  if (manifest.revision <= revision_) return;
  manifest.save(store_, ops_);
  revision_ = manifest.revision;
}

void ManifestFile::save_text(std::string_view text) { save(Manifest::parse(text, store_ / kLogName)); }

void ManifestFile::is_saved(std::uint64_t revision) {
  const std::lock_guard lock(mutex_);
  revision_ = std::max(revision_, revision);
}

void Prefetch::State::end() {
  {
    const std::lock_guard lock(mutex);
    ended = true;
    job = nullptr;
  }
  changed.notify_all();
}

void Prefetch::cancel() noexcept {
  if (state_) state_->cancelled = true;
}

bool Prefetch::wait(std::optional<std::chrono::nanoseconds> timeout) const {
  if (!state_) return true;
  std::unique_lock lock(state_->mutex);
  const auto ended = [&] { return state_->ended; };
  if (timeout) return state_->changed.wait_for(lock, *timeout, ended);
  state_->changed.wait(lock, ended);
  return true;
}

bool Prefetch::done() const { return wait(std::chrono::nanoseconds(0)); }

void Prefetcher::add(std::shared_ptr<Prefetch::State> job) {
  std::shared_ptr<Prefetch::State> given_up;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) {
      given_up = std::move(job);
    } else {
      if (jobs_.size() == kMostJobs) {
        given_up = std::move(jobs_.front());
        jobs_.pop_front();
      }
      jobs_.push_back(std::move(job));
      if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    }
  }
  if (given_up) given_up->end();
  changed_.notify_all();
}

void Prefetcher::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    running_ = std::move(jobs_.front());
    jobs_.pop_front();
    const auto job = running_;
    lock.unlock();
    try {
      if (!job->cancelled) job->job(job->cancelled);
    } catch (const std::exception&) {
      // A hint that failed: the call that needs the rows meets the same error and reports it.
    }
    job->end();
    lock.lock();
    running_ = nullptr;
  }
}

void Prefetcher::stop() {
  if (getpid() != process_) {  // the thread stayed in the parent
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::deque<std::shared_ptr<Prefetch::State>> given_up;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    given_up.swap(jobs_);
    if (running_) running_->cancelled = true;
  }
  for (const auto& job : given_up) job->end();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StoreCore::check_usable() const {
  if (getpid() != process)
    throw ClosedError(
        fmt::format("store {} was opened in process {} and is used in process {}, a forked child, which has to open it again",
                    printable(path), process, getpid()));
  if (closed.load()) throw ClosedError(fmt::format("store {} is closed", printable(path)));
  if (reporting_.load() == std::this_thread::get_id())
    throw Error(
        fmt::format("store {} is used by a progress callback of one of its own calls, which waits for it", printable(path)));
}

void StoreCore::report(const Progress& progress, std::uint64_t done, std::uint64_t total) {
  if (!progress) return;
  struct Mark {
    std::atomic<std::thread::id>& thread;
    explicit Mark(std::atomic<std::thread::id>& t) : thread{t} { thread = std::this_thread::get_id(); }
    ~Mark() { thread = std::thread::id{}; }
  } const mark_thread(reporting_);
  progress(done, total);
}

void StoreCore::bound_log() {
  if (!log) return;
  log->check_usable();
  const std::uint64_t bytes = log->uncommitted_bytes() + dirty_bytes.load(std::memory_order_relaxed);
  if (bytes <= log->limit() / 2) return;
  const auto store = owner.lock();
  if (!store) return;  // it is being closed
  if (!autocommit)
    throw LogFullError(
        fmt::format("store {}: {} bytes were changed since the last commit; the redo log's limit ({}) allows for half of "
                    "it. commit() more often, raise log_limit, or let the store commit by itself (autocommit)",
                    printable(path), bytes, format_size(log->limit())));
  store->commit();
}

CudaEngine& StoreCore::engine(int on_device) {
  if (device < 0)
    throw CudaError(fmt::format("store {} was opened without a device; open it with device {} to use ids in its memory",
                                printable(path), on_device));
  if (on_device != device)
    throw CudaError(
        fmt::format("store {} was opened for CUDA device {}, the ids are on device {}", printable(path), device, on_device));
  const std::lock_guard lock(engine_mutex_);
  if (!engine_) engine_ = CudaEngine::create(device);
  return *engine_;
}

}  // namespace embermap
