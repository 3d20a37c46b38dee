// A directory of tables with one writer: embermap.json (manifest), NAME.npy and NAME.pages for each table, LOCK.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/page_io.hpp"
#include "io/rows.hpp"
#include "store/replacement.hpp"
#include "store/table.hpp"

namespace embermap {

// What commit() promises.
enum class Durability : std::uint8_t {
  // "commit": everything up to it, of all tables, or nothing, whatever happens to process, system or power; opening after a crash
  // is at the last commit. Costs a redo log: changed pages are written in order, and once more into the tables' files later.
  kCommit,
  // "none": pages are written into the tables' files at any time. After a crash they may be of different moments: opening refuses
  // them until told to accept_unclean. For tables that can be made again.
  kNone
};
std::string_view durability_name(Durability durability);
Durability parse_durability(std::string_view name);  // throws InvalidArgument listing the names

// When pages that are read are compared with their checksums.
enum class Verify : std::uint8_t {
  // "memory": those of tables whose checksums fit an eighth of their memory, at no cost; `embermap verify` compares the others.
  kMemory,
  // "read": all, with a second read of the disk, of the checksum, where that is not in memory.
  kRead
};
std::string_view verify_name(Verify verify);
Verify parse_verify(std::string_view name);  // throws InvalidArgument listing the names

struct StoreOptions {
  enum class Mode {
    kOpenOrCreate,  // read and write; makes the store if the path is free or an empty directory
    kReadWrite,     // must exist
    // No lock; writes throw ReadOnlyError. Sees the last commit, as a whole, and stays there until refresh(): also while a writer
    // is at work, until that has moved the files on to a later commit, which it does every now and then; rows that are not in
    // memory are StaleError then. The writer never waits for a reader.
    kRead
  };
  Mode mode = Mode::kOpenOrCreate;
  // Bytes for all tables together: hot pages, what is kept of each page in memory, look-up tables, page bits, checksums; and a
  // thirty-second of it, at most 16 MiB, for pages in flight (scans, imports, appends). Not in it: what a call takes for its own
  // batch, 20 to 50 bytes an id; threads; and rings and bounce buffers of I/O: some 100 KiB a table, but several MiB for one
  // whose pages are not multiples of 512 bytes. Small tables get frames for all their pages, large ones share the rest by size,
  // unless TableOptions::memory says otherwise. BudgetError names the least that would do. It may be more than the machine has:
  // a table takes its share when it is first used, and no more than it has pages for. What the machine does not have is
  // BudgetError then; the limit of a control group is not looked at.
  std::uint64_t memory = 1ULL << 30;
  Replacement replacement = Replacement::kLru;  // what memory that is too small for a table keeps; see store/replacement.hpp
  bool write_behind = true;  // write dirty pages ahead of need, on a thread of the store's; false: when a miss needs their frames
  int device = -1;  // CUDA device whose kernels will use the hot pages; -1: none. Throws CudaError if there is no such device
  // Pin::kMapping needs Mode::kRead. Each table is mapped when it is first gathered from, and registered when a device first
  // does; that reads a file that is not in the page cache, waits for the device when it ends (close, refresh after a change), and
  // is refused, with a warning, where the machine has less memory available than the file has bytes, or CUDA cannot: a device's
  // rows then go through staging on the host. Checksums are not verified. gather throws InvalidArgument for a table with pages
  // that were never written (materialize) or in the other byte order; a batch with pages that the reader's commit has only in the
  // redo log (checkpoint, then refresh) goes through frames, for which `memory` is. As for all reads: StaleError once the files
  // have gone on; FormatError for a file that was cut short. A gather on the host may have filled its output by then. A process
  // gets a handler for SIGBUS with the first mapping (io/mapped_file.hpp).
  Pin pin = Pin::kFrames;
  unsigned threads = 0;  // for copies and steps; 0: what the process may use, at most 16. I/O has 32 threads of its own
  // How pages go between files and memory. nullopt: chosen for each file by a short probe; what a table got is in its statistics.
  std::optional<IoEngine> io = {};
  std::optional<bool> direct = {};  // past the page cache (O_DIRECT); what is refused falls back
  Durability durability = Durability::kCommit;
  Verify verify = Verify::kMemory;
  // Bytes of redo log: what is changed between two commits takes at most half of it, before the store commits by itself
  // (autocommit), at the beginning of a call that changes rows, or that call throws LogFullError. A single call may exceed it;
  // one that writes or materializes more than a quarter is done in stretches, before each of which the store may commit. 0: 64
  // times `memory`, at least 128 MiB and at most 16 GiB, or 4 times where that is more, at most 128 GiB. The log takes disk only
  // as it is used, and is moved on to the tables' files when it is four times as long as the pages in it. At least 1 MiB. Its
  // index takes up to 5 % of this many bytes; `memory` keeps as much for it, but no more than an eighth, or some 4 MiB, which
  // budgets below 32 MiB have beside them. Where the tables have more pages than it has room for, the limit counts as reached
  // when half of it is pages changed since the last commit.
  std::uint64_t log_limit = 0;
  bool autocommit = true;
  Progress recovery = {};       // called while opening applies what a crash left in the log: pages done, pages in all
  bool accept_unclean = false;  // take tables as they are after a session that ended without commit (see CorruptError on open)
  // Whether tables whose data is a file from elsewhere (adopt) are opened. nullopt: if the file was adopted by this user from
  // this very directory; in a store that was copied, unpacked, or belongs to someone else such a table is listed, and table()
  // throws an error that says so. true: whatever the manifest names is opened; a writer records that it belongs here now. false:
  // none is.
  std::optional<bool> allow_adopted = {};
  // Whether an adopted file that others changed since embermap last wrote or accepted it (by its size and time) is opened as it
  // is; otherwise table() throws CorruptError saying what changed. It stays told of until Table::accept().
  bool accept_changed = false;
  FileOps* file_ops = nullptr;  // the system calls to use, for tests that inject faults; must outlive the store
};

// The redo log of an open store; zeros where there is none.
struct LogStats {
  std::uint64_t limit = 0;
  std::uint64_t bytes = 0, pages = 0;                   // needed now: not committed, or not in the tables' files yet
  std::uint64_t memory_bytes = 0;                       // index and buffers
  std::uint64_t appended_bytes = 0, applied_pages = 0;  // since the store was opened
};

// A commit of a store.
struct CommitInfo {
  std::uint64_t number = 0;
  std::string time;  // when it was begun, UTC: "2031-05-06T07:08:09.123Z"; empty: not known
  std::string note;  // JSON text of the object that it was given, on one line, keys in alphabetical order; empty: none
  bool operator==(const CommitInfo&) const = default;
};

// What Store::snapshot() did.
struct SnapshotReport {
  CommitInfo commit;                                 // that the snapshot is of
  std::uint64_t pages = 0;                           // written ones, of all tables
  std::uint64_t copied_pages = 0, copied_bytes = 0;  // by this call: in a second round or after an interruption not all of them
  std::uint64_t cloned_tables = 0;                   // whose files share their blocks with the store's
  unsigned rounds = 0;                               // how often the writer came in between, and one
};

// Files of one store that are of several moments: some were brought back, the others not.
class MomentError : public CorruptError {
 public:
  using CorruptError::CorruptError;
};

// What opening a store for writing would do to it first.
struct RecoveryPlan {
  bool writer = false;   // one is at work: what follows is its business
  bool unclean = false;  // a session without log ended in the middle, or the log is gone: opening refuses unless told otherwise
  // What is missing of a redo log that had commits, which the tables' files may not have; empty: nothing.
  std::string log_gone;
  std::uint64_t commit = 0;                    // that the store would be at
  std::uint64_t log_bytes = 0;                 // of commits in the log
  std::map<std::string, std::uint64_t> pages;  // that would go from the log to a table's file
  // Files of several moments, of which some were brought back without the others: what opening says of them; empty: none are.
  std::string mixed;
  std::map<std::string, std::string> broken;  // tables that could not be opened, and why; the others could
};
// Looks at all that opening looks at, and changes nothing. Throws as Store::open, also where a table's file is missing or damaged
// without which commits in the log would be lost. `allow_adopted`: as in StoreOptions.
RecoveryPlan plan_recovery(const std::filesystem::path& store, std::optional<bool> allow_adopted = {});

// Thread safety: members may be called from several threads. Destroying the last handle without close() loses what was not
// committed: close() is the way to end a session that went well.
class Store {
 public:
  // Throws NotFound, FormatError (not a store, newer format version, broken manifest), LockedError naming the holder's process,
  // IoError, CorruptError if the last session ended in the middle of writing pages: tables may then hold a mix of the last commit
  // and later rows, which accept_unclean = true takes as they are.
  static Store open(const std::filesystem::path& path, const StoreOptions& options = {});

  const std::filesystem::path& path() const;
  bool writable() const;
  std::uint64_t commit_number() const;  // of the last commit; 0: none yet
  std::uint64_t memory() const;
  int device() const;
  LogStats log_stats() const;
  // Where accept_unclean has put a redo log neither of whose headers was whole: redo.log.damaged in the store's directory, or
  // with a number behind that where there are such files of before. Empty: there was none.
  const std::filesystem::path& damaged_log() const;

  // Names: letters, digits, '_', '-', '.', and any character beyond ASCII; not beginning with '.' or '-'; at most 200 bytes.
  // Durable when it returns.
  Table create(std::string_view name, const TableOptions& options);
  // `progress`, here and in Table, runs with the store's locks held: it must not call the store or its tables.
  // Creates the table and fills it from `reader` before anyone can see it (dtype: converted to options.dtype). rows and dim are
  // taken from the reader. `report`, if given, is added what the conversion did to values. On failure nothing is left.
  Table import(std::string_view name, RowReader& reader, TableOptions options, const Progress& progress = {},
               ConversionReport* report = nullptr);
  // What the optimizer of an imported table knows already: rows for state fields, each of the field's dtype and columns, and
  // as many as the table has (InvalidArgument, NotFound for a name that is no state field); and the steps made.
  struct ImportedState {
    std::map<std::string, RowReader*> fields = {};
    std::uint64_t step = 0;
    std::optional<double> carried = {};  // Table::carried()
  };
  Table import(std::string_view name, RowReader& reader, TableOptions options, const ImportedState& state,
               const Progress& progress = {}, ConversionReport* report = nullptr);
  // Uses an existing .npy (2-D, C order, either byte order; bfloat16 must be said) where it is; not copied, not changed by this
  // call. Rows are native in memory, and the file keeps its byte order.
  // Writes go to that file unless `writable` is false or the file is not writable.
  Table adopt(std::string_view name, const std::filesystem::path& file, bool writable = true, std::optional<DType> dtype = {});

  // Throws NotFound listing the tables, or what went wrong when the table's files were opened (a broken table leaves the others
  // usable, and can be removed).
  Table table(std::string_view name);
  bool contains(std::string_view name) const;
  std::vector<std::string> tables() const;  // sorted
  // Deletes its files, also those that an import has put beside it (vocabulary, order of rows); an adopted file stays. Durable.
  void remove(std::string_view name);

  // Makes all changes of all tables durable, as one. Returns the commit's number; without changes the last one's. Other calls go
  // on while the disk is waited for. A failed sync is final: the store takes no writes from then on (CorruptError), and is at the
  // commit before when it is opened again. Other errors (disk full) leave everything as it was: commit() may be tried again.
  // `note`, JSON text of an object, is part of the commit: a training step, a loss, what belongs to these rows. With one (also
  // "{}") it is a commit without changes, too. Throws InvalidArgument for a note that is no JSON object, has a key twice or a
  // whole number beyond 64 bits, is nested more than 12 deep or takes more than 64 KiB.
  std::uint64_t commit(std::string_view note = {});
  // Number 0, without time, if there is none yet. A reader's: the commit that it sees.
  CommitInfo last_commit() const;
  // The last commits up to that one, the newest last: at most 1000, and as many as take a MiB as text. Those that the store makes
  // by itself (autocommit, resize, close) have no note.
  std::vector<CommitInfo> commits() const;
  // Moves what is committed from the redo log to the tables' files, which then are exactly the last commit: for NumPy, backups
  // and readers that look at the files themselves. The store does so by itself, later, and when it is closed. Commits nothing.
  void checkpoint();
  // Forgets how fast rows moved to and from the device (docs/design.md, "A batch on a GPU"): the next large batch of a table
  // measures it again, in about a second, in which others wait for the table. For a machine that has changed, or was busy then.
  // A reader forgets it for itself only. Nothing where there is no device. Throws IoError where cuda.json cannot be written.
  void recalibrate();
  // Brings a reader to the last commit: tables made since are there, removed ones closed, handles show the new rows. Returns the
  // commit's number. Throws as open() does. A writer is there already.
  std::uint64_t refresh();
  // Makes `destination` a store that is this one at its last commit, which a reader need not have seen: tables with optimizer
  // state, notes, everything but what no commit has. Others go on meanwhile, here and in other processes: the copy is gone over
  // until all of it is of one commit. In the writer's process the redo log is not applied during the last of these rounds; what
  // needs that (checkpoint, resize, append, remove, close, a log at its limit) waits. The destination is a new or empty
  // directory, not inside of the store. After an error or a crash it is no store, and the same call goes on with it. An adopted
  // table becomes an ordinary one with a file of its own. Only written pages are copied; where the file system can share blocks
  // between files, none are. With Durability::kNone nothing may have changed since the last commit, and all other calls wait.
  // `progress` (bytes) must not call the store. Throws AlreadyExists, InvalidArgument, StaleError (another process changes the
  // store faster than it is copied), CorruptError (a page of the store is), IoError.
  SnapshotReport snapshot(const std::filesystem::path& destination, const Progress& progress = {});
  // Commits (if writable) and releases everything: handles throw ClosedError after it. A second call does nothing.
  void close();
  // Releases everything without committing: what was not written stays unwritten.
  void abandon() noexcept;
  // For a child process after fork(): drops the child's copies of descriptors without touching files or the parent's lock.
  void forget_after_fork() noexcept;
  bool closed() const noexcept;

  class Impl;

 private:
  explicit Store(std::shared_ptr<Impl> impl) : impl_{std::move(impl)} {}
  std::shared_ptr<Impl> impl_;
};

// Streams for export: a field of a table as a RowReader (rows as they are when read).
std::unique_ptr<RowReader> table_rows(Table table, std::string_view field = "weight");

// True if `path` is a directory with a manifest.
bool is_store(const std::filesystem::path& path);

// The store in whose own directory the file `path` is, or would be if it were written; links are followed. Empty: in none.
std::filesystem::path store_around(const std::filesystem::path& path);
// Throws InvalidArgument naming both if a file to be written would be in a store's own directory.
void check_outside_stores(const std::filesystem::path& file);

}  // namespace embermap
