// What a store's tables share: where it is, its threads, its devices, and the mark that says that files are ahead of the last
// commit. Private to store/.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/thread_pool.hpp"
#include "io/file.hpp"
#include "kernels/cuda.hpp"
#include "store/commit_history.hpp"
#include "store/log_view.hpp"
#include "store/manifest.hpp"
#include "store/redo_log.hpp"
#include "store/store.hpp"
#include "store/worker.hpp"

namespace embermap {

inline constexpr std::string_view kWriterLockName = "LOCK";

// The file UNCOMMITTED in the store's directory: made, durably, before the first page is written after a commit, and removed
// after the next commit. It holds the number of the commit it follows, so that one left behind by a commit that did succeed is
// known to be stale.
class UncommittedMark {
 public:
  static constexpr std::string_view kName = "UNCOMMITTED";
  UncommittedMark(std::filesystem::path store, FileOps& ops) : store_{std::move(store)}, ops_{ops} {}
  // True if a session ended (or one is running) with pages written after commit `commit`.
  static bool present(const std::filesystem::path& store, std::uint64_t commit, FileOps& ops = FileOps::system());
  void set(std::uint64_t commit);
  void clear();
  bool is_set() const;

 private:
  std::filesystem::path path() const;
  std::filesystem::path store_;
  FileOps& ops_;
  mutable std::mutex mutex_;
  std::optional<std::uint64_t> set_;  // the number in the file
};

// embermap.json, written by whoever has the newest manifest: commits as they are applied, and what makes and removes tables.
// Thread safety: all members may be called from several threads.
class ManifestFile {
 public:
  ManifestFile(std::filesystem::path store, CommitHistory& history, FileOps& ops)
      : store_{std::move(store)}, history_{history}, ops_{ops} {}
  // Unless the file is newer, that is. Durable.
  void save(const Manifest& manifest);
  void save_text(std::string_view text);
  void is_saved(std::uint64_t revision);  // the file has it

 private:
  std::filesystem::path store_;
  CommitHistory& history_;  // has the commits up to the manifest's before that is saved
  FileOps& ops_;
  std::mutex mutex_;
  std::uint64_t revision_ = 0;
};

// Reads ahead, on threads of its own, in the order in which it is asked to: the first to be asked for is the first to be needed.
// Two threads work at the parts of one job (share()): while one has the last pages of its part in flight, and then takes frames
// for the next, the other keeps the disk busy. A table whose memory has no room for more pages ahead makes its jobs wait, not
// those of other tables, and no thread or lock waits with them. At most kMostJobs of a table wait; what comes then ends at once:
// it is a hint.
class Prefetcher {
 public:
  enum class Step : std::uint8_t {
    kAgain,  // there is more to read
    kWaits,  // for look_again()
    kEnded
  };
  Prefetcher() = default;
  ~Prefetcher() { stop(); }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;
  // The job ends at once after stop(), where it is one too many, and where the system refuses a thread.
  void add(std::shared_ptr<Prefetch::State> job);
  // What waits may go on. Calls nobody back: the caller may hold any lock.
  void look_again();
  // Of a job whose step runs: there is more of it that may be done at the same time, by another call of its step. As above.
  void share(const Prefetch::State& job);
  void stop();  // gives up what waits and what runs, and waits until it has ended

 private:
  static constexpr std::ptrdiff_t kMostJobs = 32;
  static constexpr std::size_t kThreads = 2;
  void work(std::size_t thread);
  // Below: with mutex_ held.
  bool start(std::size_t threads = 1);            // if fewer work; false: none does
  std::shared_ptr<Prefetch::State> next() const;  // nullptr: none can go on

  std::mutex mutex_;  // nothing is locked, and no job called, with it but the worker's own
  std::deque<std::shared_ptr<Prefetch::State>> jobs_;
  std::uint64_t looks_ = 0;               // calls of look_again()
  std::array<bool, kThreads> working_{};  // its work() runs, or will
  bool stop_ = false;
  std::array<Worker, kThreads> workers_;  // the last member: they use the others until they are gone
};

// Shared by the handle and the thread that reads.
struct Prefetch::State {
  State(const void* of_table, std::function<Prefetcher::Step(const State&)> read) : table{of_table}, step{std::move(read)} {}
  Prefetcher::Step run();
  void end();  // unless it has; not while it runs

  const void* const table;  // whose jobs keep their order
  // Reads some of it; emptied when it has ended. Called by two threads at once after share().
  std::function<Prefetcher::Step(const State&)> step;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> awaited{false};  // somebody waits for it: it waits for no room
  // With the prefetcher's lock: it said that it waits, that nothing of it is left to be begun, and that there is more of it for
  // another thread; how many threads are at it.
  bool blocked = false, over = false, shared = false;
  unsigned threads = 0;
  std::uint64_t steps = 0;  // that were made
  std::mutex mutex;         // for what follows; the prefetcher's may be locked inside it
  std::condition_variable changed;
  Prefetcher* prefetcher = nullptr;  // lives until the job has ended
  unsigned running = 0;              // calls of step
  bool ended = false;
};

struct StoreCore {
  StoreCore(std::filesystem::path store, const StoreOptions& options, FileOps& file_ops)
      : path{std::move(store)},
        writable{options.mode != StoreOptions::Mode::kRead},
        allow_adopted{options.allow_adopted},
        checks_pages{writable || !options.accept_unclean},
        accept_changed{options.accept_changed},
        accept_unclean{options.accept_unclean},
        memory{options.memory},
        replacement{options.replacement},
        write_behind{options.write_behind},
        durability{options.durability},
        verify{options.verify},
        log_limit{options.log_limit != 0 ? options.log_limit : default_log_limit(options.memory)},
        autocommit{options.autocommit},
        device{options.device},
        pin{options.pin},
        page_io{.engine = options.io, .direct = options.direct},
        ops{file_ops},
        compute{options.threads},
        io{kIoThreads},
        mark{path, file_ops},
        history{path, file_ops},
        manifest_file{path, history, file_ops} {}

  // Throws ClosedError after close() and in a forked child, Error in a progress callback, which runs with the store's locks held.
  void check_usable() const;
  // Calls `progress` if there is one.
  void report(const Progress& progress, std::uint64_t done, std::uint64_t total);
  // Of the budget, for pages in flight: what scans, imports and appends keep in memory, and rings and bounce buffers of I/O.
  static constexpr std::uint64_t transfer_bytes(std::uint64_t of_memory) noexcept {
    return std::min<std::uint64_t>(of_memory / 32, 16ULL << 20);
  }
  std::uint64_t transfer_bytes() const noexcept { return transfer_bytes(memory); }
  static constexpr std::uint64_t kLeastLogLimit = 128ULL << 20;  // by default
  // Memory of a redo log of this limit.
  static std::uint64_t memory_of_log(std::uint64_t limit) noexcept { return RedoLog::memory_for(limit / kMinPageBytes); }
  // Half of it should hold what is dirty in memory, and much more that was evicted since the last commit: where it does not, the
  // store commits by itself all the time, writes pages in constant use again and again, and moves on to the tables' files what
  // the next commit changes once more. 64 times the memory where that is no more disk than most machines have to spare, else four
  // times: a limit, which a log reaches only where its pages are seldom written twice. How many pages it may have is another
  // matter: an eighth of the budget is all that the log's index may take.
  static std::uint64_t default_log_limit(std::uint64_t memory) noexcept {
    constexpr std::uint64_t kSpare = 16ULL << 30, kMost = 128ULL << 30;
    if (memory >= kMost / 4) return kMost;
    return std::max({kLeastLogLimit, std::min(64 * memory, kSpare), 4 * memory});
  }
  // Of the budget, for the redo log.
  std::uint64_t log_memory() const noexcept {
    if (!writable || durability == Durability::kNone) return 0;
    return std::min(memory / 8, memory_of_log(log_limit));
  }
  // What it may take: small budgets do not have what a log that is of use takes, which is some 4 MiB.
  std::uint64_t most_log_memory() const noexcept { return std::max(memory / 8, memory_of_log(kLeastLogLimit)); }
  // To be called before rows are changed, with no lock held: where what was changed since the last commit takes half of the log's
  // limit, commits, or throws LogFullError if that is not wanted.
  void bound_log();
  // A batch that took several passes was changed in part, as `what` says. With a redo log nothing of it is ever committed: from
  // then on check_whole() throws. Throws CorruptError saying so, or, without a log, that the part stays.
  [[noreturn]] void tear(std::string what);
  void check_whole() const;  // throws CorruptError after tear()
  // What is dirty in memory, of all tables, will go to the log as well.
  std::atomic<std::uint64_t> dirty_bytes{0}, dirty_pages{0};
  // The kernels of a device. Throws CudaError if the store was opened for none or another.
  CudaEngine& engine(int on_device);
  // Threads that move rows to and from the device: no more than are faster together. Those of `compute` that had nothing to do
  // would look out for work on the same cores.
  ThreadPool& movers();
  // Those of all pools end: whoever works with these still does it alone.
  void stop_threads() noexcept;
  CudaEngine* engine_in_use() noexcept;  // null before its first use
  // What the engine measured goes to a file of the store's, for the next session; where that fails, it is measured again then.
  void keep_measurements() noexcept;
  // Forgets what was measured, here and in the file.
  void forget_measurements();

  // Reads that wait for a disk, not for a core, where there is no io_uring: 16 threads keep a disk busy to two thirds of what 32
  // reach, and more add nothing.
  static constexpr unsigned kIoThreads = 32;

  const std::filesystem::path path;
  const bool writable;
  const std::optional<bool> allow_adopted;
  const bool checks_pages;    // false where tables are taken as they are, and cannot be resealed
  const bool accept_changed;  // by others: adopted files
  const bool accept_unclean;
  bool unclean = false;               // pages were written after the last commit, and that is accepted
  std::filesystem::path damaged_log;  // that was put aside; empty: none was
  const std::uint64_t memory;
  const Replacement replacement;
  const bool write_behind;
  const Durability durability;
  const Verify verify;
  const std::uint64_t log_limit;
  const bool autocommit;
  const int device;
  const Pin pin;
  const PageIoOptions page_io;
  FileOps& ops;
  ThreadPool compute;
  ThreadPool io;
  UncommittedMark mark;
  CommitHistory history;  // of a writer
  ManifestFile manifest_file;
  std::unique_ptr<RedoLog> log;            // of a writer with Durability::kCommit
  std::unique_ptr<LogView> view;           // of a reader, where there is a log
  std::unique_ptr<UnloggedView> unlogged;  // of a reader, where there is none
  LoggedPages* logged = nullptr;           // what is newer than the files: either of the two, or none
  Prefetcher prefetcher;
  Worker cleaner;  // write-behind of all tables
  std::atomic<std::uint64_t> commit{0};
  std::atomic<std::uint64_t> newest{
      0};  // the highest commit that the manifest on the disk may be of: pages are marked as after it
  std::atomic<bool> closed{false};
  std::atomic<bool> pin_warned{false};
  const pid_t process = getpid();
  std::weak_ptr<Store::Impl> owner;

 private:
  std::atomic<std::thread::id> reporting_{};  // the thread that is in a progress callback
  CorruptError torn_error() const;            // with torn_mutex_ held
  mutable std::mutex torn_mutex_;
  std::string torn_;  // empty: nothing is
  std::mutex engine_mutex_;
  std::unique_ptr<CudaEngine> engine_;
  std::unique_ptr<ThreadPool> movers_;
};

}  // namespace embermap
