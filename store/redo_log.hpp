// The redo log of a store: pages and commits on their way to the tables' files.
//
// A page leaves memory into the log, not into its table's file; commit() makes the log durable and seals it with a commit record;
// the tables' files get the pages of whole commits later, in the background, after which the log is cut. So the files only ever
// move from one commit to a later one, and after a crash what the log has of whole commits is applied once more. A page that no
// commit has yet (its rows were initial values) is written to the file at once: nobody looks there before a commit tells of it.
// docs/durability.md has the order of all writes and syncs, and what a crash leaves at each.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/shared_mutex.hpp"
#include "base/thread_pool.hpp"
#include "io/page_io.hpp"
#include "store/log_format.hpp"
#include "store/log_index.hpp"
#include "store/logged_pages.hpp"
#include "store/worker.hpp"

namespace embermap {

// Where committed pages go: the files of a table.
class LogTarget {
 public:
  struct Page {
    std::uint64_t page = 0;
    std::byte* memory = nullptr;  // page_bytes(), as they belong into the file
    std::uint32_t checksum = 0;
  };
  virtual ~LogTarget() = default;
  virtual std::uint64_t page_bytes() const = 0;
  virtual std::uint64_t pages() const = 0;  // that it has now; may be called at any time
  // Writes pages, which ascend, and notes their checksums. Throws CorruptError for one that does not match its checksum,
  // FormatError for one that the table does not have.
  virtual void apply(std::span<const Page> pages) = 0;
  // Replaces the first kLogBlock bytes of the file.
  virtual void apply_header(std::span<const std::byte> header) = 0;
  // The page is in the file already.
  virtual void apply_in_place(std::uint64_t page, std::uint32_t checksum) = 0;
  // Makes durable what was applied: data, then checksums. It is all that commits up to this one changed.
  virtual void sync_applied(std::uint64_t commit) = 0;
  // Makes pages in place durable.
  virtual void sync_data() = 0;
};

struct RedoLogOptions {
  std::uint64_t limit = 1ULL << 30;         // bytes of the log: above it, appending waits until what is committed is applied
  std::uint64_t memory = ~0ULL;             // for memory_for() its pages: the limit counts as reached when they take so much
  std::uint64_t transfer_bytes = 4U << 20;  // memory of records under way, twice: appended and applied
  PageIoOptions io = {};
  StoreId store = {};  // whose log it is; not known: that of its header, or a new one
  // Commits that something says it had are missed (CorruptError), unless this is set: then those that there are count.
  bool accept_damage = false;
};

// Thread safety: all members may be called from several threads; what must not run side by side is said at each.
class RedoLog final : public LoggedPages {
  struct Item {  // a page to be applied
    std::uint64_t page, position;
    std::uint32_t table, checksum;
    bool in_place;
  };

 public:
  struct Statistics {
    std::uint64_t log_bytes = 0;       // between the first record that may be needed and the last
    std::uint64_t memory_bytes = 0;    // index and buffers
    std::uint64_t pages = 0;           // in the index
    std::uint64_t appended_bytes = 0;  // since the log was opened
    std::uint64_t applied_pages = 0;
    std::uint64_t commits = 0, syncs = 0;
  };
  // What the log held when it was opened.
  struct Found {
    std::uint64_t commit = 0;  // of the last commit record
    std::string manifest;      // its text
    std::uint64_t pages = 0;   // of tables, to be applied
    std::uint64_t bytes = 0;
  };

  // Memory of this many pages: the index, and the list of those that are being applied.
  static std::uint64_t memory_for(std::uint64_t pages) noexcept { return LogIndex::bytes_for(pages) + pages * sizeof(Item); }

  // Opens the log of a store whose writer's lock is held, or makes it. Records of no commit are forgotten. `save_manifest` makes
  // the text of a commit the store's manifest, unless that is newer; `commit` is the store's last one, for a new log. `file`'s
  // directory, `compute`, `io` and `ops` must outlive this. Throws CorruptError (damaged), FormatError (another store's, of
  // another moment than `commit`), IoError.
  RedoLog(const std::filesystem::path& file, const RedoLogOptions& options, ThreadPool& compute, ThreadPool& io, FileOps& ops,
          std::function<void(std::string_view)> save_manifest, std::uint64_t commit);
  ~RedoLog() override;

  // nullopt if there was no commit that may not have been applied.
  const std::optional<Found>& found() const noexcept { return found_; }
  // Whether it lacked commits that it had, which was accepted.
  bool lacked() const noexcept { return lacked_; }
  std::uint64_t pages_of(std::uint32_t table) const;  // how many the log has of it

  std::uint64_t applied() const;           // the commit up to which the tables' files have all
  std::set<std::uint32_t> tables() const;  // those it has pages of

  // Until detach(), which waits for applying to end, pages of `table` go to `target`; those of tables without a target stay where
  // they are, and so does the log. detach() forgets the table's pages if `forget` says so: the table is gone. Throws FormatError
  // if the log has pages of another size.
  void attach(std::uint32_t table, LogTarget& target);
  void detach(std::uint32_t table, bool forget);

  // Whether a page that is not in its table's file yet, as far as commits go, may be written there at once: no commit, and none
  // on its way, has it.
  bool may_write_in_place(std::uint32_t table, std::uint64_t page) const;
  // Appends pages; encode(i, out) writes the page_bytes of page i as they belong into the file and returns the checksum, on
  // several threads at once. Waits while the log is above its limit and something can be applied. On failure nothing was appended
  // of the pages not reported by `appended(first, count)`.
  using Encode = std::function<std::uint32_t(std::size_t, std::byte*)>;
  using Appended = std::function<void(std::size_t, std::size_t)>;
  void append(std::uint32_t table, std::span<const std::uint64_t> pages, std::uint64_t page_bytes, const Encode& encode,
              const Appended& appended = {});
  // Tells of pages that were written to the file.
  void append_in_place(std::uint32_t table, std::span<const LogEntry> pages);
  void append_header(std::uint32_t table, std::span<const std::byte> header);

  bool uncommitted(std::uint32_t table) const;  // whether something of it was appended that no commit has
  // Bytes of what was appended and no commit has.
  std::uint64_t uncommitted_bytes() const;
  // Whether the pages that no commit has, and so many that are still to be appended, take more than half of the index's memory,
  // while the tables have more pages than it has room for.
  bool index_is_full(std::uint64_t dirty_pages) const;
  // How many pages the index has memory for.
  std::uint64_t index_pages() const noexcept { return options_.limit / entry_bytes_; }
  // How many pages of this size take a quarter of the limit.
  std::uint64_t pages_at_once(std::uint64_t page_bytes) const noexcept;
  std::uint64_t limit() const noexcept { return options_.limit; }
  const StoreId& store() const noexcept { return store_; }  // that it belongs to, known in any case
  // Its file has become so long, mostly of holes, that it should begin anew: apply_all() while nobody appends.
  bool is_long() const;

  // A commit on its way: its record has its place, but is not written.
  struct Pending {
    std::uint64_t number = 0, position = 0, bytes = 0;
    std::uint64_t id = 0;  // of the log's life
    AlignedBuffer record;
    std::string manifest;
    std::set<std::uint32_t> in_place;  // tables to be synced first
  };
  // Everything appended so far becomes commit `number`; what comes from here on belongs to the next one. The caller keeps
  // everybody from appending meanwhile, and calls finish_commit() before the next begin_commit(). On failure (disk full) nothing
  // has happened.
  Pending begin_commit(std::uint64_t number, std::string manifest);
  // Makes it durable. Others may append meanwhile. Throws IoError; then the log is broken: see check_usable().
  void finish_commit(Pending pending);
  // Forgets everything that no commit has. Nobody else appends meanwhile.
  void roll_back();

  // Writes committed pages to the tables' files until none is left, on the calling thread. Unless somebody appended since the
  // last commit, the log is empty then and begins anew. Throws CorruptError where the log is broken: nothing is applied any more
  // then.
  using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;
  void apply_all(const Progress& progress = {});
  // Nothing is applied while it lives: the tables' files stay as they are, but for pages in place.
  class [[nodiscard]] Pause {
   private:
    friend class RedoLog;
    explicit Pause(std::mutex& applying) : lock_{applying} {}
    std::unique_lock<std::mutex> lock_;
  };
  Pause pause();
  // Waits for applying to end and starts no more of it. The log stays as it is.
  void stop() noexcept;

  // Throws CorruptError if a sync or a commit record failed: what is on the disk is not known then, and the system may have given
  // up what it could not write. The store takes no writes any more; opened again it is at its last commit.
  void check_usable() const;
  bool broken() const;
  void give_up(std::string_view why);  // a sync of a table's file has failed
  Statistics statistics() const;
  PageIoReport io_report() const { return io_.report(); }

  // LoggedPages
  bool empty() const noexcept override { return entries_.load(std::memory_order_acquire) == 0; }
  void reading(const std::function<void()>& body) override;
  std::optional<LoggedVersion> find(std::uint32_t table, std::uint64_t page) const override;
  void find(std::uint32_t table, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const override;
  std::uint64_t read(std::span<const IoPiece> pieces, const PageIo::Done& done) override { return io_.read(pieces, done); }
  PageIo* io() noexcept override { return &io_; }
  void for_each(std::uint32_t table, const std::function<void(std::uint64_t, const LoggedVersion&)>& body) const override;

 private:
  // The header of a log of a store that is at `commit`.
  static LogHeader first_header(std::uint64_t commit, const StoreId& store) {
    return {.id = 1, .serial = 1, .applying = commit, .applied = commit, .store = store};
  }
  static std::uint64_t entry_bytes_for(const RedoLogOptions& options) noexcept;
  static File open_file(const std::filesystem::path& file, FileOps& ops, const LogHeader& first);
  void index_records(std::uint64_t commit);  // the store's last one, for what is told of a log that lacks some
  void accept_lack(std::uint64_t commit);    // of commits that it had
  void write_record(std::uint64_t position, const AlignedBuffer& record, std::uint64_t bytes);
  void wait_for_room(std::uint64_t bytes);
  // With apply_mutex_ held. Throws IoError: with the log broken, or, where the disk is full, with all as before.
  void set_header(const LogHeader& header);
  void settle_id();  // makes an end of id_in_doubt_
  // Makes the head's record of staging_, which has entries and pages, and of this header, whose members that say where and in
  // which commit it is are filled in; with append_mutex_ held.
  void append_record(LogRecordHeader header);
  void publish(const LogRecord& record, std::uint64_t bytes);  // in the index; the head moves on by `bytes`
  [[noreturn]] void fail(const IoError& error);
  // What is committed and not applied: the log from `tail` to `end`.
  struct Applied {
    std::uint64_t tail, end, commit;
    std::string manifest;
    std::vector<Item> items;  // by table and page
  };
  // Applies what is committed now. False if there was nothing. Below: its steps, with apply_mutex_ held.
  bool apply_once(bool in_background, const Progress& progress);
  std::optional<Applied> committed_now();                 // waits for a commit on its way; nullopt if there is nothing to apply
  void check_targets(std::span<const Item> items) const;  // throws Error if a table could not be opened
  // To the tables' files, durably. False if it was told to stop.
  bool apply_items(std::span<const Item> items, std::uint64_t commit, bool in_background, const Progress& progress);
  void forget_applied(const Applied& work);  // the log no longer has it
  void apply_table(LogTarget& target, std::span<const Item> items, bool in_background,
                   const std::function<void(std::uint64_t)>& step);
  struct Slice;
  // Begins to read the pages of these items from the log; what needs no reading is applied at once.
  void read_slice(LogTarget& target, std::span<const Item> items, Slice& slice);
  void start_applying();
  void begin_anew();                                // if it is empty; with apply_mutex_ and append_mutex_ held
  LogTarget* target_of(std::uint32_t table) const;  // null if there is none
  std::uint64_t used() const;                       // of the limit; with mutex_ held
  bool applying_is_due() const;                     // after a commit; with mutex_ held
  void count_once();                                // once_bytes_ anew; with mutex_ held
  bool index_may_overflow() const;                  // the tables have more pages than it has room for; with mutex_ held

  const RedoLogOptions options_;
  const std::uint64_t entry_bytes_;  // of the limit that an entry of the index stands for, at least
  ThreadPool& compute_;
  const std::function<void(std::string_view)> save_manifest_;
  File file_;
  PageIo io_;
  std::optional<Found> found_;
  bool lacked_ = false, tells_of_lack_ = false;  // the file still does
  std::uint64_t least_applied_ = 0;              // where commits were lacking: the tables are taken for this one then
  StoreId store_;

  // Order of locks: apply_mutex_, append_mutex_, cut_, mutex_.
  std::mutex apply_mutex_;   // one applies at a time; targets stay
  std::mutex append_mutex_;  // one appends at a time; staging_, file_bytes_
  FairSharedMutex cut_;      // shared while bytes of the log are read, alone while they become free
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // applying ended

  std::map<std::uint32_t, std::uint64_t> page_bytes_;  // of the tables in the log, as it was found
  AlignedBuffer staging_;
  std::uint64_t file_bytes_ = 0;
  // With mutex_:
  std::map<std::uint32_t, LogTarget*> targets_;
  LogHeader header_;
  LogIndex index_;
  std::uint64_t head_ = kLogStart;       // where the next record goes
  std::uint64_t epoch_ = kLogStart;      // where the records begin that no commit has, and none on its way
  std::uint64_t appended_ = 0;           // pages with a version since epoch_
  std::uint64_t once_bytes_ = 0;         // of the pages in the index, each counted once
  unsigned waiting_ = 0;                 // for applying to end
  std::uint64_t committed_ = kLogStart;  // where the last durable commit ends
  std::uint64_t commit_ = 0;             // its number
  std::uint64_t next_commit_ = 1;        // of what is appended now
  bool committing_ = false;              // between begin_commit() and the end of finish_commit()
  std::string manifest_;                 // its text, until applied
  std::set<std::uint32_t> touched_;      // tables with something appended since epoch_
  std::set<std::uint32_t> in_place_;     // those with pages in place
  bool id_in_doubt_ = false;             // the file may have the header of the next life
  std::string failure_;                  // why the log is broken
  std::exception_ptr apply_failure_;     // why the last applying ended early
  std::uint64_t applies_ = 0;            // how many have ended
  bool applying_ = false;                // queued or running in the background
  Statistics counts_;
  std::atomic<std::uint64_t> entries_{0};
  std::atomic<bool> stop_{false};
  Worker reader_;   // of what is being applied
  Worker applier_;  // last: ends first
};

}  // namespace embermap
