// The inside of a store. Private to store/.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "io/lock.hpp"
#include "store/manifest.hpp"
#include "store/moment.hpp"
#include "store/store.hpp"
#include "store/store_core.hpp"
#include "store/table_impl.hpp"

namespace embermap {

// What is missing of a redo log that has commits, as the manifest says, or wrong with its headers; empty: nothing that a look at
// these tells.
std::string why_log_is_gone(const std::filesystem::path& store, const Manifest& manifest, FileOps& ops);

class Store::Impl : public std::enable_shared_from_this<Store::Impl> {
 public:
  static std::shared_ptr<Impl> open(const std::filesystem::path& path, const StoreOptions& options);
  static RecoveryPlan plan_recovery(const std::filesystem::path& path, std::optional<bool> allow_adopted);
  std::uint64_t refresh();
  void checkpoint();
  LogStats log_stats() const;
  SnapshotReport snapshot(const std::filesystem::path& destination, const Progress& progress);
  ~Impl();
  // The store of a table. Throws ClosedError if it is gone.
  static std::shared_ptr<Impl> of(StoreCore& core);

  Table create(std::string_view name, const TableOptions& options);
  Table import(std::string_view name, RowReader& reader, TableOptions options, const ImportedState& state,
               const Progress& progress, ConversionReport* report);
  Table adopt(std::string_view name, const std::filesystem::path& file, bool writable, std::optional<DType> dtype);
  Table table(std::string_view name);
  bool contains(std::string_view name) const;
  std::vector<std::string> names() const;
  void remove(std::string_view name);
  std::uint64_t commit(std::string_view note);
  CommitInfo last_commit() const;
  std::vector<CommitInfo> commits() const;
  void resize(TableImpl& table, std::uint64_t rows);
  std::uint64_t append(TableImpl& table, std::span<const std::byte> rows);
  std::uint64_t append(TableImpl& table, const Table::NewRows& rows, const Progress& progress);
  void set_memory(TableImpl& table, std::uint64_t bytes);
  void materialize(TableImpl& table, const Progress& progress);
  void close();
  void abandon() noexcept;
  void forget_after_fork() noexcept;

  const std::shared_ptr<StoreCore>& core() const noexcept { return core_; }

 private:
  using Shares = std::map<std::string, MemoryShare>;
  using Tables = std::map<std::string, std::shared_ptr<TableImpl>, std::less<>>;

  // Opens the tables of manifest_, or their files anew.
  void open_tables();
  static CorruptError unclean_end(const std::filesystem::path& store, std::uint64_t commit, std::string_view why);
  // Moment::check(), unless what it finds is to be accepted: then the store counts as unclean.
  static void check_moment(StoreCore& core, const Moment& moment, const std::string& name, const TableEntry& entry,
                           const PageLedger::Number& number);
  // The same of all tables, those whose other files cannot be opened as well: before anything else is made of any of them, so
  // that whoever opens the store is told the same.
  static void check_moments(StoreCore& core, const Moment& moment, const Manifest& manifest);
  // Has the manifest say so, or that it has none; durable.
  void note_log(bool has_commits);
  // Brings a reader to the last commit: log, manifest and files as they were at one moment.
  void look(bool accept_unclean);
  Impl(std::shared_ptr<StoreCore> core, WriterLock lock, Manifest manifest);
  std::unique_lock<std::mutex> lock() const;  // mutex_, with the store usable
  void check_writable() const;
  // All below: with mutex_ held.
  // To `rows` rows. `fill` writes the new ones, once the table has them; empty: they are initial. Throws what check_resizable
  // throws.
  using FillRows = std::function<void()>;
  void grow(TableImpl& table, std::uint64_t rows, const FillRows& fill);
  const TableEntry& check_resizable(const TableImpl& table) const;
  void check_new(std::string_view name) const;
  TableEntry new_entry(std::string_view name,
                       const TableOptions& options) const;  // checks everything that can be checked before a file is made
  void check_budget(std::string_view name, const TableEntry& entry) const;
  // The files of a table under temporary names, which vanish unless completed.
  struct NewFiles {
    TemporaryFile data, pages;
    File open_data() { return File::open(data.file().path(), File::Mode::kReadWrite, data.file().ops()); }
    File open_pages() { return File::open(pages.file().path(), File::Mode::kReadWrite, pages.file().ops()); }
  };
  NewFiles new_files(std::string_view name, const TableEntry& entry) const;
  // Says, durably, that a table's files are being made: what a crash leaves of them is removed with the next opening.
  void announce(std::string_view name, bool adopted);
  // Removes the files of a table that could not be added.
  void discard(std::string_view name, bool adopted) noexcept;
  // Takes back what was announced, of files that are not ours.
  void withdraw() noexcept;
  // Removes what is left of tables that were being created or removed; the manifest is yet to be saved.
  void remove_unfinished();
  static std::set<std::string, std::less<>> files_of(std::string_view name, bool adopted);
  // Names of what an import may put beside a table.
  static std::vector<std::string> names_beside(std::string_view table);
  // The commit that the tables' files have, durably.
  std::uint64_t settled_commit() const;
  // Has the entries say what the tables' page files have, durably.
  void note_settled(Manifest& manifest) const;
  Table complete(const std::string& name, const TableEntry& entry, NewFiles files);
  // Throws FormatError if the table's data is a file from elsewhere that this store may not open.
  static void check_adopted(const StoreCore& core, const std::string& name, const TableEntry& entry);
  // Throws CorruptError if others changed the file that a table has adopted, unless that is accepted.
  static void check_unchanged(const StoreCore& core, const std::string& name, const TableEntry& entry, const File& data,
                              const PageLedger& ledger);
  // Records in the manifest that adopted files belong to this store now.
  void take_adopted();
  std::shared_ptr<TableImpl> open_table(const std::string& name, const TableEntry& entry);
  std::pair<File, PageLedger> open_files(const std::string& name, const TableEntry& entry) const;
  // Adds an entry whose files are complete; on failure removes nothing of them.
  Table add(const std::string& name, const TableEntry& entry);
  // Keeps all tables' users out: what happens then is one moment of all of them.
  std::vector<std::unique_lock<FairSharedMutex>> stand_still();
  // `note`: as Manifest::note; where there is one, even_unchanged.
  std::uint64_t commit_locked(bool even_unchanged, std::string note = {});
  std::uint64_t commit_still(bool even_unchanged, std::string note = {});  // with all tables standing still
  // A commit in two parts: what all tables have is gathered while they stand still, and made durable while others go on.
  struct PendingCommit {
    Manifest manifest;
    std::optional<RedoLog::Pending> log;
  };
  std::optional<PendingCommit> begin_commit(bool even_unchanged, std::string note);  // nullopt: nothing has changed
  std::uint64_t finish_commit(PendingCommit pending);
  // Makes `manifest`, which is manifest_ with other tables, the store's.
  void replace_manifest(Manifest manifest);
  // Opens the log; what a crash left in it goes to the tables' files. Returns the store's manifest.
  static Manifest recover(StoreCore& core, const StoreOptions& options, Manifest manifest);
  // grow() with a log and without. Everything is committed.
  void grow_logged(TableImpl& table, std::uint64_t rows, const FillRows& fill, const Shares& shares, const Shares& shares_before);
  void grow_in_place(TableImpl& table, std::uint64_t rows, const FillRows& fill, const Shares& shares,
                     const Shares& shares_before);
  void shrink(TableImpl& table, std::uint64_t rows);
  // Without a log, after a commit that failed, of what changed the number of rows of `table`. Its manifest may be there all the
  // same: true where it stays, so that the commit counts; false where the one before is there, or is brought back.
  bool has_committed(const TableImpl& table);
  void release() noexcept;
  // Shares of the budget for these tables, less what is kept for pages in flight. Throws BudgetError naming the tables and the
  // least that would do.
  static Shares plan(const StoreCore& core, const std::map<std::string, TableEntry, std::less<>>& tables);
  void apply(const Shares& shares);
  // With all tables standing still. All of them or, when it throws, none.
  void set_shares(const Shares& shares);
  std::filesystem::path data_path(std::string_view name) const { return core_->path / (std::string(name) + ".npy"); }
  std::filesystem::path pages_path(std::string_view name) const { return core_->path / (std::string(name) + ".pages"); }

  const std::shared_ptr<StoreCore> core_;
  std::mutex snapshot_mutex_;  // before mutex_: while a snapshot is taken the log stays
  mutable std::mutex mutex_;
  WriterLock lock_;
  Manifest manifest_;
  Moment moment_;  // of the tables' files that are opened
  Tables tables_;
  std::map<std::string, std::exception_ptr, std::less<>> broken_;  // listed, but could not be opened; why
};

}  // namespace embermap
