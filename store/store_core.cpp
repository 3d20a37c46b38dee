#include "store/store_core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <exception>
#include <string>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "store/mover_file.hpp"
#include "store/store_impl.hpp"

namespace embermap {

std::filesystem::path UncommittedMark::path() const { return store_ / kName; }

bool UncommittedMark::present(const std::filesystem::path& store, std::uint64_t commit, FileOps& ops) {
  std::string text;
  try {
    text = read_text(store / kName, 64, ops);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) return false;
    throw;
  }
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
  history_.write(manifest.commit);
  manifest.save(store_, ops_);
  revision_ = manifest.revision;
}

void ManifestFile::save_text(std::string_view text) { save(Manifest::parse(text, store_ / kLogName)); }

void ManifestFile::is_saved(std::uint64_t revision) {
  const std::lock_guard lock(mutex_);
  revision_ = std::max(revision_, revision);
}

Prefetcher::Step Prefetch::State::run() {
  {
    const std::lock_guard lock(mutex);
    if (ended || cancelled) return Prefetcher::Step::kEnded;
    ++running;
  }
  Prefetcher::Step result = Prefetcher::Step::kEnded;
  try {
    result = step(*this);
  } catch (const std::exception&) {
    // A hint that failed: the call that needs the rows meets the same error and reports it.
  }
  const std::lock_guard lock(mutex);
  --running;
  return cancelled ? Prefetcher::Step::kEnded : result;
}

void Prefetch::State::end() {
  std::function<Prefetcher::Step(const State&)> done;  // destroyed without the lock: it may be the last to know the table
  {
    const std::lock_guard lock(mutex);
    ended = true;
    done.swap(step);
  }
  changed.notify_all();
}

void Prefetch::cancel() noexcept {
  if (!state_) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->cancelled = true;
    if (state_->running != 0) return;  // it ends with what it reads now
  }
  state_->end();
}

bool Prefetch::wait(std::optional<std::chrono::nanoseconds> timeout) const {
  if (!state_) return true;
  std::unique_lock lock(state_->mutex);
  const auto ended = [&] { return state_->ended; };
  if (ended()) return true;
  if (timeout && *timeout <= std::chrono::nanoseconds::zero()) return false;
  if (!state_->awaited.exchange(true)) state_->prefetcher->look_again();
  if (timeout) return state_->changed.wait_for(lock, *timeout, ended);
  state_->changed.wait(lock, ended);
  return true;
}

bool Prefetch::done() const { return wait(std::chrono::nanoseconds(0)); }

void Prefetcher::add(std::shared_ptr<Prefetch::State> job) {
  job->prefetcher = this;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(jobs_, [](const auto& other) { return other->cancelled.load(); });
    const auto same = [&](const auto& other) { return other->table == job->table; };
    if (!stop_ && std::count_if(jobs_.begin(), jobs_.end(), same) < kMostJobs && start()) {
      jobs_.push_back(std::move(job));
      return;
    }
  }
  job->end();
}

bool Prefetcher::start(std::size_t threads) {
  for (std::size_t i = 0; i < kThreads; ++i) {
    if (threads == 0) break;
    if (!working_[i]) working_[i] = workers_[i].add([this, i] { work(i); });
    threads -= working_[i] ? 1U : 0U;
  }
  return std::find(working_.begin(), working_.end(), true) != working_.end();
}

void Prefetcher::look_again() {
  if (workers_[0].forked()) return;
  const std::lock_guard lock(mutex_);
  ++looks_;
  for (const auto& job : jobs_) job->blocked = false;
  if (!stop_ && !jobs_.empty()) start();
}

void Prefetcher::share(const Prefetch::State& job) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const auto& other) { return other.get() == &job; });
  if (stop_ || found == jobs_.end()) return;
  (*found)->shared = true;
  start(kThreads);
}

std::shared_ptr<Prefetch::State> Prefetcher::next() const {
  if (stop_) return nullptr;
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    const auto waits = [&](const auto& other) { return other->table == (*job)->table && other->blocked; };
    // Those behind a job that is being worked at are not begun: its pages are to have their frames first.
    const auto busy = [&](const auto& other) { return other->table == (*job)->table && other->threads != 0; };
    if ((*job)->over || ((*job)->threads != 0 && !(*job)->shared)) continue;
    if (std::any_of(jobs_.begin(), job, busy)) continue;
    if ((*job)->awaited ? !(*job)->blocked : std::none_of(jobs_.begin(), job + 1, waits)) return *job;
  }
  return nullptr;
}

void Prefetcher::work(std::size_t thread) {
  std::unique_lock lock(mutex_);
  while (const auto job = next()) {
    const std::uint64_t looks = looks_, steps = job->steps;
    ++job->threads;
    job->shared = false;  // until it says so again
    lock.unlock();
    const Step step = job->run();
    lock.lock();
    --job->threads;
    job->over = step == Step::kEnded;
    // Not where the other thread's part has come to its end meanwhile.
    job->blocked = step == Step::kWaits && looks == looks_ && steps == job->steps;
    ++job->steps;
    if (!job->over || job->threads != 0) continue;
    lock.unlock();
    job->end();
    lock.lock();
    std::erase(jobs_, job);
  }
  working_[thread] = false;
}

void Prefetcher::stop() {
  if (workers_[0].forked()) return;  // the lock may be held by a thread that does not exist here
  std::deque<std::shared_ptr<Prefetch::State>> given_up;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    given_up.swap(jobs_);
    for (const auto& job : given_up)
      if (job->threads != 0) job->cancelled = true;
  }
  for (Worker& worker : workers_) worker.stop();
  for (const auto& job : given_up) job->end();
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

void StoreCore::tear(std::string what) {
  if (!log)
    throw CorruptError(
        fmt::format("store {}: {}. With durability 'none' nothing takes that back: call again for the others, or "
                    "go on with what there is",
                    printable(path), what));
  const std::lock_guard lock(torn_mutex_);
  if (torn_.empty()) torn_ = std::move(what);
  throw torn_error();
}

CorruptError StoreCore::torn_error() const {
  return CorruptError(
      fmt::format("store {}: {}. The store takes no writes and makes no commits any more, so that no part of a batch "
                  "is ever committed. Abandon it and open it again: it is at its last commit ({}) then",
                  printable(path), torn_, commit.load()));
}

void StoreCore::check_whole() const {
  const std::lock_guard lock(torn_mutex_);
  if (!torn_.empty()) throw torn_error();
}

void StoreCore::bound_log() {
  if (!log) return;
  log->check_usable();
  check_whole();
  const std::uint64_t bytes = log->uncommitted_bytes() + dirty_bytes.load(std::memory_order_relaxed);
  const bool index_full = log->index_is_full(dirty_pages.load(std::memory_order_relaxed));
  if (bytes <= log->limit() / 2 && !index_full) return;
  const auto store = owner.lock();
  if (!store) return;  // it is being closed
  if (!autocommit && index_full && bytes <= log->limit() / 2)
    throw LogFullError(fmt::format(
        "store {}: the pages changed since the last commit are more than half of the {} that the redo log's index has "
        "room for in an eighth of the store's memory ({}). commit() more often, open the store with more memory, or let "
        "it commit by itself (autocommit)",
        printable(path), log->index_pages(), format_size(memory)));
  if (!autocommit)
    throw LogFullError(
        fmt::format("store {}: what was changed since the last commit takes {} bytes of the redo log's limit ({}), more than "
                    "half. commit() more often, raise log_limit, or let the store commit by itself (autocommit)",
                    printable(path), bytes, format_size(log->limit())));
  store->commit({});
}

CudaEngine& StoreCore::engine(int on_device) {
  if (device < 0)
    throw CudaError(fmt::format("store {} was opened without a device; open it with device {} to use ids in its memory",
                                printable(path), on_device));
  if (on_device != device)
    throw CudaError(
        fmt::format("store {} was opened for CUDA device {}, the ids are on device {}", printable(path), device, on_device));
  const std::lock_guard lock(engine_mutex_);
  if (!engine_) {
    engine_ = CudaEngine::create(device);
    engine_->model().add(read_movers(path, engine_->device_name(), ops));
  }
  return *engine_;
}

ThreadPool& StoreCore::movers() {
  const std::lock_guard lock(engine_mutex_);
  if (!movers_) movers_ = std::make_unique<ThreadPool>(std::min(compute.threads(), kMostMoverThreads));
  return *movers_;
}

void StoreCore::stop_threads() noexcept {
  io.stop();
  compute.stop();
  const std::lock_guard lock(engine_mutex_);
  if (movers_) movers_->stop();
}

CudaEngine* StoreCore::engine_in_use() noexcept {
  const std::lock_guard lock(engine_mutex_);
  return engine_.get();
}

void StoreCore::keep_measurements() noexcept {
  if (!writable) return;
  try {
    const std::lock_guard lock(engine_mutex_);
    if (engine_) write_movers(path, engine_->device_name(), engine_->model().measurements(), ops);
  } catch (const std::exception&) {
    // a cache
  }
}

void StoreCore::forget_measurements() {
  check_usable();
  if (device < 0) return;
  CudaEngine& of_device = engine(device);  // has read what the file says, also where nobody has used it yet
  const std::lock_guard lock(engine_mutex_);
  of_device.model().clear();
  if (writable) write_movers(path, of_device.device_name(), {}, ops);
}

}  // namespace embermap
