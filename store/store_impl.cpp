#include "store/store_impl.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/size_text.hpp"
#include "io/npy.hpp"
#include "store/hot_pages.hpp"
#include "store/snapshot.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kSmallestLimit = 1U << 20;  // of the redo log

bool is_leftover(const std::filesystem::path& file) {
  const std::string name = file.filename().native();
  return name.size() > 5 && name.front() == '.' && name.ends_with(".tmp");
}

// In a forked child the threads that wait on an object's condition variables do not exist, and destroying those would wait for
// them for ever; nor may a child touch the parent's registrations with CUDA. Its copy is left alone.
template <class T>
void delete_unless_forked(T* object, pid_t process) noexcept {
  if (getpid() == process) delete object;
}

// A log without a whole header is of no use to embermap; to somebody else its records may be. Returns where it is then, which is
// no file's name of one put aside before; empty: it was not put aside.
std::filesystem::path put_damaged_log_aside(const std::filesystem::path& store, FileOps& ops) {
  const std::filesystem::path log = store / kLogName;
  if (!is_there(log)) return {};
  try {
    (void)read_log_header(File::open(log, File::Mode::kRead, ops));
    return {};  // it was cut: what it still has counts
  } catch (const CorruptError&) {
  }
  std::filesystem::path aside = store / kDamagedLogName;
  for (unsigned number = 1; ops.rename_new(log.c_str(), aside.c_str()) != 0; ++number) {
    if (errno != EEXIST) throw IoError(errno, "rename", log);
    aside = store / fmt::format("{}.{}", kDamagedLogName, number);
  }
  sync_directory(store, ops);
  return aside;
}

// Whether a session without a log ended with pages written after the store's last commit, `commit`: that of the manifest's file,
// or the log's last one, which is made this.
bool has_unclean_end(const std::filesystem::path& store, std::uint64_t& commit, FileOps& ops) {
  if (!UncommittedMark::present(store, commit, ops)) return false;
  try {
    for (const CommitInfo& logged : commits_in_log(store / kLogName, ops)) commit = std::max(commit, logged.number);
  } catch (const Error&) {  // a log that cannot be read is told of, or accepted, elsewhere
  }
  return UncommittedMark::present(store, commit, ops);
}

// Creates the directory if it is free; true if this call made it.
bool make_directory(const std::filesystem::path& path) {
  if (::mkdir(path.c_str(), 0777) == 0) return true;
  if (errno == EEXIST) return false;
  throw IoError(errno, "mkdir", path);
}

}  // namespace

Store::Impl::Impl(std::shared_ptr<StoreCore> core, WriterLock lock, Manifest manifest)
    : core_{std::move(core)}, lock_{std::move(lock)}, manifest_{std::move(manifest)} {
  core_->commit = core_->newest = manifest_.commit;
}

Store::Impl::~Impl() { abandon(); }

std::shared_ptr<Store::Impl> Store::Impl::of(StoreCore& core) {
  core.check_usable();
  auto impl = core.owner.lock();
  if (!impl) throw ClosedError(fmt::format("store {} is closed", printable(core.path)));
  return impl;
}

std::shared_ptr<Store::Impl> Store::Impl::open(const std::filesystem::path& path, const StoreOptions& options) {
  using Mode = StoreOptions::Mode;
  if (path.empty()) throw InvalidArgument("the store's path is empty");
  if (options.pin == Pin::kMapping && options.mode != Mode::kRead)
    throw InvalidArgument(fmt::format(
        "store {}: pin 'mapping' is for a store that is open read-only (mode 'r'): rows are changed in frames", printable(path)));
  if (options.log_limit != 0 && options.log_limit < kSmallestLimit)
    throw InvalidArgument(fmt::format("a log_limit of {} bytes is too small: a redo log has at least {} ({})", options.log_limit,
                                      kSmallestLimit, format_size(kSmallestLimit)));
  FileOps& ops = options.file_ops != nullptr ? *options.file_ops : FileOps::system();
  if (options.device >= 0 && options.device >= cuda_devices())
    throw CudaError(cuda_devices() == 0 ? fmt::format("no CUDA device: {}. Without a device (in Python device=None, the default) "
                                                      "the store works on the CPU",
                                                      cuda_absence())
                                        : fmt::format("no CUDA device {}: there are {}", options.device, cuda_devices()));
  // Absolute, so that a later change of the working directory does not matter.
  std::error_code error;
  std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) throw IoError(error.value(), "realpath", path);
  absolute = absolute.lexically_normal();
  if (!absolute.has_filename()) absolute = absolute.parent_path();

  const bool made = options.mode == Mode::kOpenOrCreate && !is_there(absolute) && make_directory(absolute);
  struct stat status {};
  if (::stat(absolute.c_str(), &status) != 0) {
    if (errno == ENOENT && !is_there(absolute)) throw NotFound(fmt::format("no store at {}", printable(absolute)));
    throw IoError(errno, "stat", absolute);
  }
  if (!S_ISDIR(status.st_mode)) throw IoError(ENOTDIR, "open", absolute);
  try {
    if (!made && !is_store(absolute)) {
      if (is_there(absolute / kSnapshotName))
        throw FormatError(absolute, "is a half-done snapshot, no store yet: take the snapshot once more, which goes on with it");
      if (options.mode != Mode::kOpenOrCreate) Manifest::load(absolute);  // says what is wrong
      for (const auto& item : std::filesystem::directory_iterator(absolute, error))
        if (item.path().filename() != kWriterLockName && !is_leftover(item.path()))
          throw AlreadyExists(
              fmt::format("{} is not a store (no {}), and it is not empty (it holds {}); give a new or empty directory",
                          printable(absolute), kManifestName, printable(item.path().filename())));
      if (error) throw IoError(error.value(), "opendir", absolute);
    }
    for (const std::string_view name : {kManifestName, kWriterLockName, UncommittedMark::kName, kLogName, kHistoryName})
      check_own_file(absolute / name);
    WriterLock lock;
    if (options.mode != Mode::kRead) {
      lock = WriterLock::acquire(absolute / kWriterLockName, absolute);
      for (const auto& item : std::filesystem::directory_iterator(absolute, error))
        if (is_leftover(item.path())) ops.unlink(item.path().c_str());
      if (is_store(absolute)) ops.unlink((absolute / kSnapshotName).c_str());  // a snapshot that was done but for this
    }
    Manifest manifest;
    if (options.mode == Mode::kOpenOrCreate && !is_store(absolute)) {
      manifest.store_id = StoreId::random();
      manifest.save(absolute, ops);
      sync_directory(absolute.parent_path().empty() ? "." : absolute.parent_path(), ops);
    } else {
      manifest = Manifest::load(absolute);
    }
    const std::string log_lost = options.mode != Mode::kRead ? why_log_is_gone(absolute, manifest, ops) : std::string();
    if (!log_lost.empty() && !options.accept_unclean) {
      if (is_there(absolute / kLogName))
        (void)read_log_header(File::open(absolute / kLogName, File::Mode::kRead, ops));  // says it
      throw log_error(absolute / kLogName, log_lost, manifest.commit);
    }
    const std::filesystem::path aside = log_lost.empty() ? std::filesystem::path() : put_damaged_log_aside(absolute, ops);
    std::uint64_t commit = manifest.commit;
    const bool unclean = !log_lost.empty() || (options.mode != Mode::kRead && has_unclean_end(absolute, commit, ops));
    if (unclean && !options.accept_unclean) throw unclean_end(absolute, commit, "a session ended without commit");

    std::shared_ptr<StoreCore> core(new StoreCore(absolute, options, ops),
                                    [](StoreCore* gone) { delete_unless_forked(gone, gone->process); });
    core->manifest_file.is_saved(manifest.revision);
    core->unclean = unclean;
    core->damaged_log = aside;
    if (core->writable) manifest = recover(*core, options, std::move(manifest));
    std::shared_ptr<Impl> impl(new Impl(core, std::move(lock), std::move(manifest)));
    core->owner = impl;
    const std::lock_guard guard(impl->mutex_);
    if (!core->writable) {
      impl->look(options.accept_unclean);
      return impl;
    }
    if (!impl->manifest_.store_id.known()) {  // one of before
      Manifest numbered = impl->manifest_;
      numbered.store_id = core->log ? core->log->store() : StoreId::random();
      impl->replace_manifest(std::move(numbered));
    }
    if (options.allow_adopted == true) impl->take_adopted();
    impl->moment_ = Moment::settled(impl->manifest_);
    impl->open_tables();
    if (!impl->manifest_.unfinished.empty()) {
      impl->remove_unfinished();
      impl->replace_manifest(impl->manifest_);
    }
    if (core->unclean) {
      for (const auto& [name, table] : impl->tables_) table->reseal(impl->manifest_.commit + 1);
      impl->commit_locked(/*even_unchanged=*/true);
      if (core->log) core->log->apply_all();  // the manifest's file has the commit from here on
    }
    core->mark.clear();  // a stale one
    return impl;
  } catch (...) {
    if (made) {  // nothing half-made stays
      for (const std::string_view name : {kManifestName, kWriterLockName, kLogName}) ops.unlink((absolute / name).c_str());
      ::rmdir(absolute.c_str());
    }
    throw;
  }
}

void Store::Impl::check_adopted(const StoreCore& core, const std::string& name, const TableEntry& entry) {
  if (core.allow_adopted == true) return;
  const std::string why = core.allow_adopted ? "allow_adopted is off" : why_not_adopted_here(core.path, entry.adopted_in);
  if (why.empty()) return;
  throw FormatError(
      core.path / kManifestName,
      fmt::format("table '{}' uses {} outside the store, which is not opened: {}. If you trust the store, open it with "
                  "allow_adopted = true (--allow-adopted)",
                  printable(name), printable(*entry.adopted), why));
}

void Store::Impl::take_adopted() {
  const StoreHome here = home_of(core_->path);
  bool changed = false;
  Manifest manifest = manifest_;
  for (auto& [name, entry] : manifest.tables) {
    if (!entry.adopted || entry.adopted_in == here) continue;
    entry.adopted_in = here;
    changed = true;
  }
  if (changed) replace_manifest(std::move(manifest));
}

void Store::Impl::open_tables() {
  broken_.clear();
  // A table whose files are gone or damaged does not take the others with it: whoever asks for it gets the error.
  auto entries = manifest_.tables;
  for (const auto& [name, entry] : manifest_.tables) {
    try {
      if (entry.adopted) check_adopted(*core_, name, entry);
      const auto known = tables_.find(name);
      if (known == tables_.end()) {
        tables_.emplace(name, open_table(name, entry));
        continue;
      }
      auto [data, ledger] = open_files(name, entry);
      known->second->replace_files(entry, std::move(data), std::move(ledger));
    } catch (const MomentError&) {
      throw;  // the others may be of several moments as well
    } catch (const Error&) {
      broken_.emplace(name, std::current_exception());
      entries.erase(name);
      if (const auto known = tables_.find(name); known != tables_.end()) {
        known->second->drop_files(std::current_exception());
        known->second->end_mapping();
        tables_.erase(known);
      }
    }
  }
  const auto shares = plan(*core_, entries);
  for (const auto& [name, table] : tables_) table->set_share(shares.at(name));
}

std::uint64_t Store::Impl::refresh() {
  const auto guard = lock();
  if (!core_->writable) look(/*accept_unclean=*/!core_->checks_pages);
  return manifest_.commit;
}

void Store::Impl::checkpoint() {
  const auto guard = lock();
  check_writable();
  if (!core_->log) return;
  core_->log->check_usable();
  core_->log->apply_all();
}

SnapshotReport Store::Impl::snapshot(const std::filesystem::path& destination, const Progress& progress) {
  core_->check_usable();
  const std::lock_guard one(snapshot_mutex_);
  SnapshotSource source{
      .core = *core_,
      .pause = {},
      .check_adopted = [this](const std::string& name, const TableEntry& entry) { check_adopted(*core_, name, entry); },
      .check_unchanged = [this](const std::string& name, const TableEntry& entry, const File& data,
                                const PageLedger& ledger) { check_unchanged(*core_, name, entry, data, ledger); }};
  auto guard = lock();
  if (!core_->writable || core_->log) {
    guard.unlock();
    if (core_->log) source.pause = [this] { return core_->log->pause(); };
    return take_snapshot(source, destination, progress);
  }
  const auto still = stand_still();
  source.alone = true;
  bool changed = core_->mark.is_set();
  for (const auto& [name, table] : tables_) changed = changed || table->changed();
  if (changed)
    throw InvalidArgument(
        fmt::format("store {} was changed since its last commit, and with durability 'none' only its files have "
                    "that: commit() before a snapshot",
                    printable(core_->path)));
  return take_snapshot(source, destination, progress);
}

LogStats Store::Impl::log_stats() const {
  const auto guard = lock();
  if (!core_->log) return {};
  const RedoLog::Statistics log = core_->log->statistics();
  return {.limit = core_->log->limit(),
          .bytes = log.log_bytes,
          .pages = log.pages,
          .memory_bytes = log.memory_bytes,
          .appended_bytes = log.appended_bytes,
          .applied_pages = log.applied_pages};
}

std::shared_ptr<TableImpl> Store::Impl::open_table(const std::string& name, const TableEntry& entry) {
  auto [data, ledger] = open_files(name, entry);
  return {new TableImpl(core_, name, entry, std::move(data), std::move(ledger)),
          [process = core_->process](TableImpl* gone) { delete_unless_forked(gone, process); }};
}

std::unique_lock<std::mutex> Store::Impl::lock() const {
  core_->check_usable();  // first: in a forked child the lock may be held by a thread that does not exist
  std::unique_lock guard(mutex_);
  core_->check_usable();
  return guard;
}

void Store::Impl::check_writable() const {
  if (!core_->writable) throw ReadOnlyError(fmt::format("store {} is open read-only", printable(core_->path)));
  if (core_->log) core_->log->check_usable();  // a manifest written now might contradict a commit that is in doubt
  core_->check_whole();
}

Table Store::Impl::table(std::string_view name) {
  const auto guard = lock();
  if (const auto found = tables_.find(name); found != tables_.end()) return Table(found->second);
  if (const auto found = broken_.find(name); found != broken_.end()) std::rethrow_exception(found->second);
  std::string known;
  for (const auto& [other, unused] : tables_) known += (known.empty() ? "" : ", ") + printable(other);
  throw NotFound(fmt::format("store {} has no table '{}'; it has {}", printable(core_->path), printable(name),
                             known.empty() ? "none" : known));
}

bool Store::Impl::contains(std::string_view name) const {
  const auto guard = lock();
  return manifest_.tables.contains(name);
}

std::vector<std::string> Store::Impl::names() const {
  const auto guard = lock();
  std::vector<std::string> names;
  for (const auto& [name, unused] : manifest_.tables) names.push_back(name);
  return names;
}

std::uint64_t Store::Impl::commit(std::string_view note) {
  std::string text = note.empty() ? std::string() : note_text(note);
  const auto guard = lock();
  check_writable();
  return commit_locked(/*even_unchanged=*/false, std::move(text));
}

CommitInfo Store::Impl::last_commit() const {
  const auto guard = lock();
  return {.number = manifest_.commit, .time = manifest_.time, .note = manifest_.note};
}

std::vector<CommitInfo> Store::Impl::commits() const {
  const auto guard = lock();
  if (core_->writable) return core_->history.list(manifest_.commit);
  return read_history(core_->path, manifest_, core_->ops);
}

std::vector<std::unique_lock<FairSharedMutex>> Store::Impl::stand_still() {
  std::vector<std::unique_lock<FairSharedMutex>> still;
  for (const auto& [name, table] : tables_) still.push_back(table->stand_still());
  return still;
}

void Store::Impl::note_settled(Manifest& manifest) const {
  if (!core_->log) return;
  const std::uint64_t settled = settled_commit();
  for (auto& [name, entry] : manifest.tables) {
    std::uint64_t known = 0;
    if (const auto before = manifest_.tables.find(name); before != manifest_.tables.end() && before->second.id == entry.id)
      known = before->second.changed <= settled ? before->second.changed : before->second.settled;
    const auto table = tables_.find(name);
    // The number of a commit that is just being applied may not be durable.
    if (const auto commit = table == tables_.end() ? std::nullopt : table->second->page_file_commit();
        commit && *commit <= settled)
      known = std::max(known, *commit);
    entry.settled = entry.changed <= known ? 0 : known;  // nothing is said twice
  }
}

void Store::Impl::replace_manifest(Manifest manifest) {
  // Not used again where saving fails: the file may have been replaced all the same, and what is committed from here on has to be
  // newer than that.
  manifest.revision = manifest_.revision = std::max(manifest.revision, manifest_.revision) + 1;
  note_settled(manifest);
  core_->manifest_file.save(manifest);
  manifest_ = std::move(manifest);
}

void Store::Impl::note_log(bool has_commits) {
  if (manifest_.log == has_commits) return;
  Manifest manifest = manifest_;
  manifest.log = has_commits;
  replace_manifest(std::move(manifest));
}

std::uint64_t Store::Impl::commit_locked(bool even_unchanged, std::string note) {
  std::optional<PendingCommit> pending;
  {
    const auto still = stand_still();
    if (!core_->log) return commit_still(even_unchanged, std::move(note));
    if (core_->log->is_long()) {
      // Where somebody always appends it would never be empty, and its file grow for ever.
      const std::uint64_t number = commit_still(even_unchanged, std::move(note));
      core_->log->apply_all();
      return number;
    }
    pending = begin_commit(even_unchanged, std::move(note));
  }
  return pending ? finish_commit(std::move(*pending)) : manifest_.commit;
}

std::uint64_t Store::Impl::commit_still(bool even_unchanged, std::string note) {
  auto pending = begin_commit(even_unchanged, std::move(note));
  return pending ? finish_commit(std::move(*pending)) : manifest_.commit;
}

std::optional<Store::Impl::PendingCommit> Store::Impl::begin_commit(bool even_unchanged, std::string note) {
  core_->check_whole();
  if (core_->log) core_->log->check_usable();  // also where nothing changed since a commit that failed: it is no commit
  // The mark counts as a change: pages were written that no manifest knows of, be it by a commit that failed or in a table
  // removed since.
  bool changed = even_unchanged || !note.empty() || core_->mark.is_set();
  for (const auto& [name, table] : tables_) changed = changed || table->changed();
  if (!changed) return std::nullopt;
  if (core_->log) note_log(true);  // once in a session
  PendingCommit pending{manifest_, {}};
  // Without a log a commit that failed may have left its manifest: its number is not used again, so that a mark is always of an
  // earlier commit than the next one.
  pending.manifest.commit = (core_->log ? manifest_.commit : core_->newest.load()) + 1;
  for (const auto& [name, table] : tables_)
    pending.manifest.tables.insert_or_assign(name, table->flush_and_sync(pending.manifest.commit));
  note_settled(pending.manifest);
  pending.manifest.revision = ++manifest_.revision;  // not used again, as in replace_manifest()
  pending.manifest.time = utc_now();
  pending.manifest.note = std::move(note);
  if (!core_->log) {
    core_->newest = pending.manifest.commit;  // also if saving it fails: it may have been replaced all the same
    return pending;
  }
  pending.log = core_->log->begin_commit(pending.manifest.commit, pending.manifest.text());
  for (const auto& [name, table] : tables_) table->mark_committed();
  return pending;
}

std::uint64_t Store::Impl::finish_commit(PendingCommit pending) {
  try {
    // Before: it is applied as soon as it is durable, and its line is written then.
    core_->history.add({.number = pending.manifest.commit, .time = pending.manifest.time, .note = pending.manifest.note});
    if (pending.log)
      core_->log->finish_commit(std::move(*pending.log));
    else
      core_->manifest_file.save(pending.manifest);
  } catch (const std::exception& error) {
    if (pending.log) core_->log->give_up(error.what());  // its record has a place, and is not there
    core_->history.take_back(pending.manifest.commit);
    throw;
  }
  manifest_ = std::move(pending.manifest);
  core_->commit = manifest_.commit;
  if (!core_->log) {
    for (const auto& [name, table] : tables_) table->mark_committed();
    try {
      core_->mark.clear();
    } catch (const IoError&) {
      // The commit is done. What is left is a mark of an earlier one, which says nothing.
    }
  }
  return manifest_.commit;
}

void Store::Impl::set_shares(const Shares& shares) {
  for (const auto& [name, table] : tables_) table->prepare_share(shares.at(name));
  for (const auto& [name, table] : tables_) table->set_share(shares.at(name));
}

void Store::Impl::set_memory(TableImpl& table, std::uint64_t bytes) {
  const auto guard = lock();
  const auto still = stand_still();
  if (const auto found = tables_.find(table.name()); found == tables_.end() || found->second.get() != &table)
    throw ClosedError(fmt::format("table '{}' was removed", printable(table.name())));
  auto tables = manifest_.tables;
  tables.at(table.name()).memory = bytes;
  const auto shares = plan(*core_, tables);
  set_shares(shares);
  table.set_memory(bytes);
  manifest_.tables.at(table.name()).memory = bytes;
}

void Store::Impl::materialize(TableImpl& table, const Progress& progress) {
  const auto guard = lock();
  check_writable();
  // In stretches that the log has room for: initial rows are the same before and after.
  const std::uint64_t pages = table.pages(), most = core_->log ? core_->log->pages_at_once(table.page_bytes()) : pages;
  std::uint64_t page = 0;
  do {
    page = table.materialize(page, most, progress);
    commit_locked(/*even_unchanged=*/false);
  } while (page < pages);
}

Store::Impl::Shares Store::Impl::plan(const StoreCore& core, const std::map<std::string, TableEntry, std::less<>>& tables) {
  const std::uint64_t memory = core.memory;
  const Replacement replacement = core.replacement;
  struct Need {
    std::string name;
    std::uint64_t pages, frame, bits, least, want, given;  // want: frames for all pages, and all checksums
  };
  std::vector<Need> needs;
  std::uint64_t least = 0;
  if (tables.empty()) {
    least = kMinPageBytes + frame_overhead(replacement) + PageLedger::bits_bytes(1);
    if (memory < least)
      throw BudgetError(fmt::format("memory {} is too small for a store: one page of one table takes {} bytes ({})",
                                    format_size(memory), least, format_size(least)));
    return {};
  }
  for (const auto& [name, entry] : tables) {
    const std::uint64_t pages = entry.geometry.pages();
    const std::uint64_t frame = entry.geometry.page_bytes() + frame_overhead(replacement);
    const std::uint64_t bits = PageLedger::bits_bytes(pages);
    const std::uint64_t all = checked_add(checked_mul(pages, frame, "bytes of a table in memory"),
                                          PageLedger::checksum_bytes(pages), "bytes of a table in memory");
    Need need{name, pages, frame, bits, bits + (pages == 0 ? 0 : frame), all, 0};
    if (entry.memory != 0) {
      if (entry.memory < need.least)
        throw BudgetError(fmt::format("memory {} of table '{}' is too small: one page of it and its page bits take {} bytes ({})",
                                      format_size(entry.memory), printable(name), need.least, format_size(need.least)));
      need.given = std::min(entry.memory, checked_add(bits, need.want, "bytes of a table in memory"));
    }
    least = checked_add(least, std::max(need.least, need.given), "bytes that the tables need");
    needs.push_back(std::move(need));
  }
  if (memory < least) {
    // The largest first: they are what to change.
    std::sort(needs.begin(), needs.end(),
              [](const Need& a, const Need& b) { return std::max(a.least, a.given) > std::max(b.least, b.given); });
    constexpr std::size_t kNamed = 4;
    std::string names;
    for (std::size_t i = 0; i < std::min(kNamed, needs.size()); ++i)
      names += fmt::format("{}'{}' {}{}", i == 0 ? "" : ", ", printable(needs[i].name), std::max(needs[i].least, needs[i].given),
                           needs[i].given != 0 ? " (its own memory)" : "");
    if (needs.size() > kNamed) names += fmt::format(", {} more", needs.size() - kNamed);
    throw BudgetError(
        fmt::format("memory {} is too small for {} table{}: one page of each and the page bits take {} bytes, {} ({})",
                    format_size(memory), tables.size(), tables.size() == 1 ? "" : "s", least, format_size(least), names));
  }
  // Small tables first: a table that takes no more than a quarter of an even share gets frames for all its pages. The others
  // share the rest by size, each at least a page. Those with memory of their own come before all.
  std::sort(needs.begin(), needs.end(),
            [](const Need& a, const Need& b) { return std::pair(a.given == 0, a.want) < std::pair(b.given == 0, b.want); });
  std::uint64_t left = memory - std::min(core.transfer_bytes() + core.log_memory(), memory - least), want = 0, minima = 0;
  std::uint64_t open = 0;  // tables that share by size
  for (const Need& need : needs) {
    left -= need.bits;
    minima += need.given != 0 ? need.given - need.bits : need.least - need.bits;
    if (need.given != 0) continue;
    want = checked_add(want, need.want, "bytes of all tables in memory");
    ++open;
  }
  Shares shares;
  for (const Need& need : needs) {
    std::uint64_t bytes = 0;
    if (need.given != 0) {
      bytes = need.given - need.bits;
      minima -= bytes;
    } else {
      minima -= need.least - need.bits;
      if (want <= left || need.want <= left / (4 * open))
        bytes = need.want;
      else
        bytes = static_cast<std::uint64_t>(static_cast<long double>(left) * static_cast<long double>(need.want) /
                                           static_cast<long double>(want));
      bytes = std::max(std::min(bytes, left - minima), need.least - need.bits);
      want -= need.want;
      --open;
    }
    MemoryShare share{.bytes = bytes};
    // Checksums are kept while they take at most an eighth, so that every page read is verified at no extra I/O.
    const std::uint64_t sums = PageLedger::checksum_bytes(need.pages);
    share.checksums = sums <= bytes / 8 && bytes - sums >= need.frame;
    share.frames = std::min(need.pages, (bytes - (share.checksums ? sums : 0)) / need.frame);
    share.frames = std::min<std::uint64_t>(share.frames, HotPages::kMaxFrames);
    shares.emplace(need.name, share);
    left -= bytes;
  }
  return shares;
}

void Store::Impl::apply(const Shares& shares) {
  const auto still = stand_still();
  set_shares(shares);
}

void Store::Impl::close() {
  if (core_->closed.load()) return;
  {
    core_->check_usable();
    const std::unique_lock guard(mutex_);
    if (core_->closed.load()) return;
    const auto still = stand_still();
    if (core_->writable) commit_still(/*even_unchanged=*/false);
    if (core_->log) {
      core_->log->apply_all();
      try {
        note_log(false);
      } catch (const IoError&) {
        // Everything is where it belongs. A log that is taken away now will be missed, that is all.
      }
    }
    core_->closed = true;  // before anyone can change a row that would not be committed
  }
  release();
}

void Store::Impl::abandon() noexcept {
  if (core_->closed.exchange(true)) return;
  if (getpid() != core_->process) return;  // the parent's
  release();
}

void Store::Impl::release() noexcept {
  core_->prefetcher.stop();
  const std::lock_guard no_snapshot(snapshot_mutex_);
  const std::lock_guard guard(mutex_);
  if (core_->log) core_->log->stop();
  for (const auto& [name, table] : tables_) table->close();
  tables_.clear();
  core_->cleaner.stop();
  core_->logged = nullptr;
  core_->log.reset();
  core_->view.reset();
  core_->unlogged.reset();
  // Handles may live on: of a store that has ended none should keep threads.
  core_->stop_threads();
  lock_.release();
}

void Store::Impl::forget_after_fork() noexcept {
  core_->closed = true;
  lock_.forget();
}

}  // namespace embermap
