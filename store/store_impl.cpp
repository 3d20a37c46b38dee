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

constexpr std::string_view kWriterLockName = "LOCK";

constexpr std::uint64_t kSmallestLimit = 1U << 20;  // of the redo log

constexpr int kMostLooks = 200;  // of a reader at a store that changes

// Also true for a dangling symbolic link.
bool is_there(const std::filesystem::path& path) {
  struct stat status {};
  return lstat(path.c_str(), &status) == 0;
}

bool is_leftover(const std::filesystem::path& file) {
  const std::string name = file.filename().native();
  return name.size() > 5 && name.front() == '.' && name.ends_with(".tmp");
}

// Names the header of a table's file against what the manifest says.
void check_header(const NpyHeader& header, const std::filesystem::path& file, const Schema& schema, const TableEntry& entry,
                  bool resized) {
  const auto fail = [&](std::string_view what) {
    return FormatError(file, fmt::format("{} (shape {}, dtype {}); the manifest says {} rows x {} of {}, {} bytes a record", what,
                                         header.shape_text(), header.dtype_text(), entry.geometry.rows, entry.dim,
                                         dtype_name(entry.dtype), entry.geometry.stride));
  };
  if (header.fortran_order && header.shape.size() == 2 && header.shape[0] > 1 && header.shape[1] > 1)
    throw fail("the file is in Fortran order");
  if (header.item_bytes == 0) throw fail("the file holds no elements");
  const std::uint64_t rows = header.shape.empty() ? 0 : header.shape[0];
  if ((rows < entry.geometry.rows && !resized) || (entry.adopted && rows != entry.geometry.rows))
    throw fail("the file has other rows");
  if (header.data_offset != entry.geometry.data_offset) throw fail(fmt::format("its data begins at byte {}", header.data_offset));
  if (!schema.structured()) {
    const bool same =
        entry.big_endian
            ? dtype_of_big_endian_npy_descr(header.descr) == entry.dtype
            : header.descr == npy_descr(entry.dtype) || dtype_of_npy_descr(header.descr) == entry.dtype ||
                  (entry.dtype == DType::kBFloat16 && header.item_bytes == 2 && header.descr.find('V') != std::string::npos);
    if (header.shape.size() != 2 || header.shape[1] != entry.dim || !same) throw fail("the file has another shape or dtype");
    return;
  }
  if (header.shape.size() != 1 || header.item_bytes != entry.geometry.stride || header.fields.size() != schema.fields().size())
    throw fail("the file has other records");
  for (std::size_t i = 0; i < header.fields.size(); ++i) {
    const Field& field = schema.fields()[i];
    if (header.fields[i].name != field.name || header.fields[i].offset != field.offset || header.fields[i].bytes != field.bytes)
      throw fail(fmt::format("the file's field {} is '{}'", i, printable(header.fields[i].name)));
  }
}

// A table's .npy.
File open_data(const StoreCore& core, const std::string& name, const TableEntry& entry, bool write) {
  const std::filesystem::path path = entry.adopted ? *entry.adopted : core.path / (name + ".npy");
  if (!entry.adopted) check_own_file(path);
  return File::open(path, write ? File::Mode::kReadWrite : File::Mode::kRead, core.ops);
}

// Its page file, which has room for all its pages.
PageLedger open_ledger(const StoreCore& core, const std::string& name, const TableEntry& entry) {
  const std::filesystem::path path = core.path / (name + ".pages");
  check_own_file(path);
  PageLedger ledger = PageLedger::open(File::open(path, core.writable ? File::Mode::kReadWrite : File::Mode::kRead, core.ops));
  if (ledger.pages() < entry.geometry.pages())
    throw FormatError(path,
                      fmt::format("page file of {} pages, but the table has {}", ledger.pages(), entry.geometry.pages()));
  return ledger;
}

// Of the manifest in the store's file and that of a commit in its log, the one with the higher revision.
Manifest newer_manifest(Manifest manifest, std::string_view in_log, const std::filesystem::path& store) {
  Manifest committed = Manifest::parse(in_log, store / kLogName);
  if (committed.revision <= manifest.revision) return manifest;
  if (!committed.store_id.known()) committed.store_id = manifest.store_id;  // a commit of before
  return committed;
}

CorruptError unclean_end(const std::filesystem::path& store, std::uint64_t commit, std::string_view why) {
  return CorruptError(
      fmt::format("store {} has pages written after its last commit ({}): {}. Its tables may mix committed and later rows; "
                  "accept_unclean, or 'embermap recover', takes them as they are",
                  printable(store), commit, why));
}

// In a forked child the threads that wait on an object's condition variables do not exist, and destroying those would wait for
// them for ever; nor may a child touch the parent's registrations with CUDA. Its copy is left alone.
template <class T>
void delete_unless_forked(T* object, pid_t process) noexcept {
  if (getpid() == process) delete object;
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
    throw CudaError(cuda_devices() == 0 ? fmt::format("no CUDA device: {}", cuda_absence())
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
    const bool unclean = options.mode != Mode::kRead && UncommittedMark::present(absolute, manifest.commit);
    if (unclean && !options.accept_unclean) throw unclean_end(absolute, manifest.commit, "a session ended without commit");

    std::shared_ptr<StoreCore> core(new StoreCore(absolute, options, ops),
                                    [](StoreCore* gone) { delete_unless_forked(gone, gone->process); });
    core->manifest_file.is_saved(manifest.revision);
    core->unclean = unclean;
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
    impl->open_tables();
    if (!impl->manifest_.unfinished.empty()) {
      impl->remove_unfinished();
      impl->replace_manifest(impl->manifest_);
    }
    if (unclean) {
      for (const auto& [name, table] : impl->tables_) table->reseal();
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

void Store::Impl::check_unchanged(const StoreCore& core, const std::string& name, const TableEntry& entry, const File& data,
                                  const PageLedger& ledger) {
  const auto then = ledger.stamp();
  const std::string changed = then ? what_changed(*then, stamp_of(data)) : std::string();
  if (changed.empty() || core.accept_changed || core.unclean) return;
  // A crash, or a writer at work, may have brought pages from the log there that the stamp does not know of.
  bool logged = false;
  if (core.logged != nullptr) core.logged->for_each(entry.id, [&](std::uint64_t, const LoggedVersion&) { logged = true; });
  if (logged) return;
  throw CorruptError(
      fmt::format("{}: the file of table '{}' was changed by something other than embermap: {}. To take it as it is: 'embermap "
                  "verify --accept {}', or accept() of the table in a store opened with accept_changed; --repair-from takes "
                  "pages from a backup",
                  printable(*entry.adopted), printable(name), changed, printable(core.path / name)));
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
    } catch (const Error&) {
      broken_.emplace(name, std::current_exception());
      entries.erase(name);
      if (const auto known = tables_.find(name); known != tables_.end()) {
        known->second->end_mapping();
        tables_.erase(known);
      }
    }
  }
  const auto shares = plan(*core_, entries);
  for (const auto& [name, table] : tables_) table->set_share(shares.at(name));
}

void Store::Impl::look(bool accept_unclean) {
  for (int attempt = 1;; ++attempt) {
    check_own_file(core_->path / kLogName);
    auto unlogged = std::make_unique<UnloggedView>(core_->path);  // before anything is looked at
    auto view = LogView::open(core_->path / kLogName, core_->io, core_->page_io, core_->ops);
    Manifest manifest = Manifest::load(core_->path);
    if (view) view->check_store(manifest.store_id);
    if (view && !view->manifest().empty()) manifest = newer_manifest(std::move(manifest), view->manifest(), core_->path);
    core_->unclean = UncommittedMark::present(core_->path, manifest.commit);
    if (core_->unclean && !accept_unclean)
      throw unclean_end(core_->path, manifest.commit,
                        "a writer without a redo log is at work, or its session ended without commit");
    const bool whole = !view || manifest.commit <= view->commit();
    if (whole) {
      const auto still = stand_still();
      std::erase_if(tables_, [&](const auto& item) {
        const auto listed = manifest.tables.find(item.first);
        const bool gone = listed == manifest.tables.end() || !item.second->is(listed->second);
        item.second->drop_files();
        if (gone) item.second->end_mapping();
        return gone;
      });
      core_->view = std::move(view);
      core_->unlogged = core_->view ? nullptr : std::move(unlogged);
      core_->logged = core_->view ? static_cast<LoggedPages*>(core_->view.get()) : core_->unlogged.get();
      manifest_ = std::move(manifest);
      core_->commit = manifest_.commit;
      open_tables();
      if (core_->view ? core_->view->unchanged() : core_->unlogged->unchanged()) return;
    }
    // The writer came in between. It begins and ends to apply commits a few times a second at most.
    if (attempt == kMostLooks) throw StaleError(fmt::format("store {} changes all the time", printable(core_->path)));
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(attempt, 50)));
  }
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

RecoveryPlan plan_recovery(const std::filesystem::path& store) {
  RecoveryPlan plan;
  ThreadPool io(1);
  Manifest::load(store);  // says what is wrong where this is no store
  plan.writer = WriterLock::is_taken(store / kWriterLockName).value_or(false);
  check_own_file(store / kLogName);
  const auto view = LogView::open(store / kLogName, io, {}, FileOps::system());
  Manifest manifest = Manifest::load(store);  // after the log: commits go from there to here
  if (view) {
    view->check_store(manifest.store_id);
    if (!view->manifest().empty()) manifest = newer_manifest(std::move(manifest), view->manifest(), store);
    plan.log_bytes = view->bytes();
    for (const auto& [name, entry] : manifest.tables) {
      std::uint64_t pages = 0;
      view->for_each(entry.id, [&](std::uint64_t, const LoggedVersion&) { ++pages; });
      if (pages != 0) plan.pages.emplace(name, pages);
    }
  }
  plan.commit = manifest.commit;
  plan.unclean = !plan.writer && UncommittedMark::present(store, manifest.commit);
  return plan;
}

Manifest Store::Impl::recover(StoreCore& core, const StoreOptions& options, Manifest manifest) {
  const std::filesystem::path path = core.path / kLogName;
  if (core.durability == Durability::kNone && !is_there(path)) {
    core.history.load(manifest, {});
    return manifest;
  }
  check_own_file(path);
  const RedoLogOptions log_options{.limit = core.log_limit,
                                   .memory = core.most_log_memory(),
                                   .transfer_bytes = std::clamp<std::uint64_t>(core.transfer_bytes(), 64U << 10, 4U << 20),
                                   .io = core.page_io,
                                   .store = manifest.store_id};
  core.log = std::make_unique<RedoLog>(
      path, log_options, core.compute, core.io, core.ops, [&core](std::string_view text) { core.manifest_file.save_text(text); },
      manifest.commit);
  RedoLog& log = *core.log;
  if (log.found()) manifest = newer_manifest(std::move(manifest), log.found()->manifest, core.path);
  core.history.load(manifest, log.found() ? commits_in_log(path, core.ops) : std::vector<CommitInfo>());
  // Pages go to the files before anything else looks at those: a resize may have been committed, and the files not have it yet.
  struct Recovered {
    Schema schema;
    std::unique_ptr<PageFile> file;
  };
  std::vector<std::unique_ptr<Recovered>> files;
  std::set<std::uint32_t> tables = log.tables();
  for (const auto& [name, entry] : manifest.tables) {
    if (tables.erase(entry.id) == 0) continue;
    auto recovered = std::make_unique<Recovered>(Recovered{Schema(entry.dim, entry.dtype, entry.optimizer), nullptr});
    // Without this file its committed pages would be lost, so that the store is not opened at all.
    if (entry.adopted) check_adopted(core, name, entry);
    File data = open_data(core, name, entry, /*write=*/true);
    if (entry.adopted) check_header(read_npy_header(data), data.path(), recovered->schema, entry, /*resized=*/false);
    PageLedger ledger = open_ledger(core, name, entry);
    ledger.forget_stamp();  // pages may have been applied since
    recovered->file = std::make_unique<PageFile>(
        name, std::move(data), std::move(ledger), recovered->schema, entry.geometry, entry.init, entry.seed, core.compute,
        core.io, [] {}, PageFileOptions{.io = core.page_io});
    log.attach(entry.id, *recovered->file);
    files.push_back(std::move(recovered));
  }
  for (const std::uint32_t removed : tables) log.detach(removed, /*forget=*/true);
  log.apply_all(options.recovery);
  for (const auto& [name, entry] : manifest.tables) log.detach(entry.id, /*forget=*/false);
  core.manifest_file.save(manifest);
  if (core.durability == Durability::kNone) {
    core.log.reset();
    if (core.ops.unlink(path.c_str()) != 0) throw IoError(errno, "unlink", path);
    sync_directory(core.path, core.ops);
    return manifest;
  }
  core.logged = core.log.get();
  return manifest;
}

std::shared_ptr<TableImpl> Store::Impl::open_table(const std::string& name, const TableEntry& entry) {
  auto [data, ledger] = open_files(name, entry);
  return {new TableImpl(core_, name, entry, std::move(data), std::move(ledger)),
          [process = core_->process](TableImpl* gone) { delete_unless_forked(gone, process); }};
}

std::pair<File, PageLedger> Store::Impl::open_files(const std::string& name, const TableEntry& entry) const {
  const bool write = core_->writable && (!entry.adopted || entry.adopted_writable);
  File data = open_data(*core_, name, entry, write);
  const Schema schema(entry.dim, entry.dtype, entry.optimizer);
  const NpyHeader header = read_npy_header(data);
  // A resize that is committed, but not applied: the header in the file is that of the rows before.
  const bool resized = core_->view && core_->view->find(entry.id, kHeaderPage);
  check_header(header, data.path(), schema, entry, resized);
  if (!entry.adopted && write && header.shape[0] != entry.geometry.rows) {
    // A resize was interrupted; the manifest says which size counts.
    data.write(0, table_header(schema, entry.geometry));
  }
  if (!entry.adopted && write && data.size() > entry.geometry.file_bytes()) data.resize(entry.geometry.file_bytes());
  PageLedger ledger = open_ledger(*core_, name, entry);
  const std::uint64_t pages = entry.geometry.pages();
  if (ledger.pages() > pages && core_->writable) ledger.resize(pages);  // a resize was interrupted
  if (entry.adopted) {
    check_unchanged(*core_, name, entry, data, ledger);
    const FileStamp now = stamp_of(data);
    // Where it is not known what the file was like, or a copy took its place.
    if (const auto then = ledger.stamp(); core_->writable && then != now && (!then || what_changed(*then, now).empty())) {
      ledger.set_stamp(now);
      ledger.sync();
    }
  }
  return {std::move(data), std::move(ledger)};
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
}

void Store::Impl::check_new(std::string_view name) const {
  check_table_name(name);
  if (manifest_.tables.contains(name))
    throw AlreadyExists(fmt::format("store {} has a table '{}' already", printable(core_->path), printable(name)));
  for (const auto& file : {data_path(name), pages_path(name)})
    if (is_there(file))
      throw AlreadyExists(
          fmt::format("{} exists but belongs to no table of the store; remove it or choose another name", printable(file)));
}

TableEntry Store::Impl::new_entry(std::string_view name, const TableOptions& options) const {
  check_new(name);
  const Schema schema(options.dim, options.dtype, options.optimizer);
  check_initializer(options.init, options.dtype);
  TableEntry entry;
  entry.id = manifest_.next_id;
  entry.dim = options.dim;
  entry.dtype = options.dtype;
  entry.optimizer = options.optimizer;
  entry.init = options.init;
  entry.seed = options.seed;
  entry.page_bytes = options.page_bytes;
  entry.memory = options.memory;
  entry.geometry =
      make_geometry(options.rows, schema.record_bytes(), schema.alignment(), schema.structured(), options.page_bytes);
  check_budget(name, entry);
  return entry;
}

void Store::Impl::check_budget(std::string_view name, const TableEntry& entry) const {
  auto entries = manifest_.tables;
  entries.emplace(name, entry);
  (void)plan(*core_, entries);
}

Store::Impl::NewFiles Store::Impl::new_files(std::string_view name, const TableEntry& entry) const {
  NewFiles files{TemporaryFile::create(data_path(name), /*overwrite=*/false, core_->ops),
                 TemporaryFile::create(pages_path(name), /*overwrite=*/false, core_->ops)};
  files.data.file().write(0, table_header(Schema(entry.dim, entry.dtype, entry.optimizer), entry.geometry));
  files.data.file().resize(entry.geometry.file_bytes());
  return files;
}

std::set<std::string, std::less<>> Store::Impl::files_of(std::string_view name, bool adopted) {
  std::set<std::string, std::less<>> files{fmt::format("{}.pages", name)};
  if (!adopted) files.insert(fmt::format("{}.npy", name));
  return files;
}

void Store::Impl::announce(std::string_view name, bool adopted) {
  ++manifest_.revision;
  Manifest manifest = manifest_;
  manifest.unfinished.merge(files_of(name, adopted));
  core_->manifest_file.save(manifest);
}

void Store::Impl::withdraw() noexcept {
  try {
    replace_manifest(manifest_);
  } catch (const std::exception&) {  // the next commit does
  }
}

void Store::Impl::remove_unfinished() {
  for (const std::string& name : manifest_.unfinished) {
    const std::filesystem::path file = core_->path / name;
    bool used = false;  // an adopted file may lie in the store's directory
    for (const auto& [table, entry] : manifest_.tables)
      used = used || files_of(table, entry.adopted.has_value()).contains(name) || entry.adopted == file;
    if (!used && core_->ops.unlink(file.c_str()) != 0 && errno != ENOENT) throw IoError(errno, "unlink", file);
  }
  sync_directory(core_->path, core_->ops);
  manifest_.unfinished.clear();
}

Table Store::Impl::complete(const std::string& name, const TableEntry& entry, NewFiles files) {
  announce(name, /*adopted=*/false);
  try {
    files.data.commit();
  } catch (const AlreadyExists&) {
    withdraw();
    throw;  // theirs, not ours to remove
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
  try {
    files.pages.commit();
  } catch (const AlreadyExists&) {  // someone made NAME.pages meanwhile: theirs stays, ours goes
    core_->ops.unlink(data_path(name).c_str());
    withdraw();
    throw;
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
  try {
    return add(name, entry);
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
}

void Store::Impl::discard(std::string_view name, bool adopted) noexcept {
  try {
    // The manifest may have been replaced before the call that failed. As long as it lists the table, its files stay.
    if (Manifest::load(core_->path).tables.contains(name)) announce(name, adopted);
    if (!adopted) core_->ops.unlink(data_path(name).c_str());
    core_->ops.unlink(pages_path(name).c_str());
    sync_directory(core_->path, core_->ops);
    withdraw();
  } catch (const std::exception&) {
    // The table is whole and listed, or a file is left that create() will name: nothing is lost either way.
  }
}

Table Store::Impl::create(std::string_view name, const TableOptions& options) {
  const auto guard = lock();
  check_writable();
  const TableEntry entry = new_entry(name, options);
  NewFiles files = new_files(name, entry);
  PageLedger::create(files.open_pages(), entry.geometry.pages(), /*adopted=*/false);
  return complete(std::string(name), entry, std::move(files));
}

Table Store::Impl::add(const std::string& name, const TableEntry& entry) {
  Manifest manifest = manifest_;
  if (manifest.next_id == ~0U) throw InvalidArgument("a store can number no more tables");
  ++manifest.next_id;
  manifest.tables.emplace(name, entry);
  for (const std::string& file : files_of(name, entry.adopted.has_value())) manifest.unfinished.erase(file);
  const auto shares = plan(*core_, manifest.tables);
  auto table = open_table(name, entry);
  apply(shares);  // the others make room; their dirty pages may have to be written, which can fail
  table->set_share(shares.at(name));
  replace_manifest(std::move(manifest));
  tables_.emplace(name, table);
  return Table(std::move(table));
}

Table Store::Impl::import(std::string_view name, RowReader& reader, TableOptions options, const Progress& progress) {
  const auto guard = lock();
  check_writable();
  options.rows = reader.rows();
  options.dim = reader.dim();
  const TableEntry entry = new_entry(name, options);
  const Geometry& geometry = entry.geometry;
  const Schema schema(entry.dim, entry.dtype, entry.optimizer);
  NewFiles files = new_files(name, entry);
  PageFile file(std::string(name), files.open_data(), PageLedger::create(files.open_pages(), geometry.pages(), /*adopted=*/false),
                schema, geometry, entry.init, entry.seed, core_->compute, core_->io, [] {}, {.io = core_->page_io});

  const std::uint64_t source_row = options.dim * item_size(reader.dtype());
  const std::uint64_t weight = schema.fields()[0].bytes;
  // Rows are in flight as the reader gives them, converted, and in pages.
  const std::uint64_t import_bytes = core_->transfer_bytes() / 3;
  // Whole pages, and whole blocks of the reader where those are not much larger.
  const std::uint64_t page_rows_bytes = std::max(geometry.page_bytes(), source_row * geometry.rows_per_page);
  std::uint64_t block_pages = std::max<std::uint64_t>(1, import_bytes / page_rows_bytes);
  if (reader.block_rows() <= 4 * import_bytes / source_row)
    block_pages = std::max(block_pages, ceil_div(reader.block_rows(), geometry.rows_per_page));
  const std::uint64_t block_rows = std::min(block_pages * geometry.rows_per_page, std::max<std::uint64_t>(geometry.rows, 1));
  std::vector<std::byte> source(block_rows * source_row);
  std::vector<std::byte> converted(reader.dtype() == options.dtype ? 0 : block_rows * weight);
  const AlignedBuffer memory(ceil_div(block_rows, geometry.rows_per_page) * geometry.page_bytes());
  std::vector<PageBuffer> buffers;
  ConversionReport report;
  core_->report(progress, 0, geometry.rows);
  for (std::uint64_t first = 0; first < geometry.rows; first += block_rows) {
    const std::uint64_t count = std::min(block_rows, geometry.rows - first);
    reader.read(first, count, source.data());
    const std::byte* weights = source.data();
    if (!converted.empty()) {
      convert_elements(reader.dtype(), source.data(), options.dtype, converted.data(), count * options.dim, report);
      weights = converted.data();
    }
    if (schema.structured()) file.generate_states(count, memory.data());
    core_->compute.parallel_for(count, std::max<std::uint64_t>(1, (256U << 10) / geometry.stride),
                                [&](std::uint64_t begin, std::uint64_t end) {
                                  for (std::uint64_t row = begin; row < end; ++row)
                                    std::memcpy(memory.data() + row * geometry.stride, weights + row * weight, weight);
                                });
    buffers.clear();
    for (std::uint64_t row = 0; row < count; row += geometry.rows_per_page)
      buffers.push_back({geometry.page_of(first + row), memory.data() + row * geometry.stride});
    file.write(buffers);
    core_->report(progress, first + count, geometry.rows);
  }
  file.sync();
  file.close();
  return complete(std::string(name), entry, std::move(files));
}

Table Store::Impl::adopt(std::string_view name_view, const std::filesystem::path& file, bool writable,
                         std::optional<DType> dtype) {
  const std::string name(name_view);
  const auto guard = lock();
  check_writable();
  check_table_name(name);
  if (manifest_.tables.contains(name))
    throw AlreadyExists(fmt::format("store {} has a table '{}' already", printable(core_->path), printable(name)));
  if (is_there(pages_path(name)))
    throw AlreadyExists(fmt::format("{} exists but belongs to no table of the store; remove it or choose another name",
                                    printable(pages_path(name))));
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(file, error);
  if (error) throw IoError(error.value(), "open", file);
  for (const auto& [other, known] : manifest_.tables)
    if ((known.adopted && std::filesystem::equivalent(*known.adopted, path, error)) ||
        (!known.adopted && std::filesystem::equivalent(data_path(other), path, error)))
      throw AlreadyExists(fmt::format("{} is the file of table '{}' already", printable(path), printable(other)));

  const File data = File::open(path, File::Mode::kRead, core_->ops);
  const FileStamp stamp = stamp_of(data);  // before anything of it is read
  const NpyHeader header = read_npy_header(data);
  const auto refuse = [&](std::string_view why) {
    return FormatError(path, fmt::format("shape {}, dtype {} cannot be used in place: {}; import it instead", header.shape_text(),
                                         header.dtype_text(), why));
  };
  if (!header.fields.empty()) throw refuse("the elements are structured");
  if (header.shape.size() != 2) throw refuse("a table has two dimensions");
  if (header.shape[1] == 0) throw refuse("a table has at least one column");
  if (header.fortran_order && header.shape[0] > 1 && header.shape[1] > 1) throw refuse("it is in Fortran order");
  std::optional<DType> found = dtype_of_npy_descr(header.descr);
  const bool big_endian = !found && (found = dtype_of_big_endian_npy_descr(header.descr)).has_value();
  if (!found && dtype == DType::kBFloat16 && header.item_bytes == 2 && header.descr.find('V') != std::string::npos) found = dtype;
  if (!found)
    throw refuse(header.descr.find('V') != std::string::npos ? "raw bytes have no type (say bfloat16 if they are that)"
                                                             : "a table cannot hold this dtype");
  if (dtype && *dtype != *found) throw refuse(fmt::format("it is not {}", dtype_name(*dtype)));

  TableEntry entry;
  entry.id = manifest_.next_id;
  entry.dim = header.shape[1];
  entry.dtype = *found;
  const Schema schema(entry.dim, entry.dtype, {});
  entry.geometry = make_geometry(header.shape[0], schema.record_bytes(), schema.alignment(), false, entry.page_bytes);
  entry.geometry.data_offset = header.data_offset;
  entry.big_endian = big_endian;
  entry.adopted = path;
  entry.adopted_in = home_of(core_->path);
  entry.adopted_writable = writable && ::access(path.c_str(), W_OK) == 0;
  check_budget(name, entry);
  TemporaryFile pages = TemporaryFile::create(pages_path(name), /*overwrite=*/false, core_->ops);
  PageLedger::create(File::open(pages.file().path(), File::Mode::kReadWrite, core_->ops), entry.geometry.pages(), true)
      .set_stamp(stamp);
  announce(name, /*adopted=*/true);
  try {
    pages.commit();
  } catch (const AlreadyExists&) {
    withdraw();
    throw;  // theirs
  } catch (...) {
    discard(name, /*adopted=*/true);
    throw;
  }
  try {
    return add(name, entry);
  } catch (...) {
    discard(name, /*adopted=*/true);
    throw;
  }
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

void Store::Impl::remove(std::string_view name) {
  const auto guard = lock();
  check_writable();
  const auto listed = manifest_.tables.find(name);
  if (listed == manifest_.tables.end())
    throw NotFound(fmt::format("store {} has no table '{}'", printable(core_->path), printable(name)));
  const bool adopted = listed->second.adopted.has_value();
  // Out of the manifest first: a crash in between leaves files that are to be removed, not a table without files.
  Manifest manifest = manifest_;
  manifest.unfinished.merge(files_of(name, adopted));
  manifest.tables.erase(listed->first);
  replace_manifest(std::move(manifest));
  if (const auto found = tables_.find(name); found != tables_.end()) {
    found->second->close(/*removed=*/true);
    tables_.erase(found);
  }
  if (const auto found = broken_.find(name); found != broken_.end()) broken_.erase(found);
  remove_unfinished();
  replace_manifest(manifest_);
  apply(plan(*core_, manifest_.tables));
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

void Store::Impl::replace_manifest(Manifest manifest) {
  ++manifest.revision;
  core_->manifest_file.save(manifest);
  manifest_ = std::move(manifest);
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
  if (core_->log) core_->log->check_usable();  // also where nothing changed since a commit that failed: it is no commit
  // The mark counts as a change: pages were written that no manifest knows of, be it by a commit that failed or in a table
  // removed since.
  bool changed = even_unchanged || !note.empty() || core_->mark.is_set();
  for (const auto& [name, table] : tables_) changed = changed || table->changed();
  if (!changed) return std::nullopt;
  PendingCommit pending{manifest_, {}};
  for (const auto& [name, table] : tables_) pending.manifest.tables.insert_or_assign(name, table->flush_and_sync());
  // Without a log a commit that failed may have left its manifest: its number is not used again, so that a mark is always of an
  // earlier commit than the next one.
  pending.manifest.commit = (core_->log ? manifest_.commit : core_->newest.load()) + 1;
  ++pending.manifest.revision;
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

const TableEntry& Store::Impl::check_resizable(const TableImpl& table) const {
  const auto listed = manifest_.tables.find(table.name());
  if (const auto found = tables_.find(table.name()); found == tables_.end() || found->second.get() != &table)
    throw ClosedError(fmt::format("table '{}' was removed", printable(table.name())));
  if (listed->second.adopted)
    throw InvalidArgument(fmt::format("table '{}' uses {} in place; such a file is not resized", printable(table.name()),
                                      printable(*listed->second.adopted)));
  return listed->second;
}

// The steps of resize() and append() change files that the manifest describes. A crash in between is noticed as an unclean end;
// the files fit the manifest all the same, since they are never shorter than it says: it learns of fewer rows before, of more
// rows after. Either all is done, or an error says that nothing is: what fails after the commit is left to the next opening.

void Store::Impl::grow(TableImpl& table, std::uint64_t rows, std::span<const std::byte> weights) {
  const TableEntry& entry = check_resizable(table);
  make_geometry(rows, entry.geometry.stride, 1, false, entry.page_bytes);  // throws if a file cannot hold so many
  Manifest manifest = manifest_;
  manifest.tables.at(table.name()).geometry.rows = rows;
  const auto shares = plan(*core_, manifest.tables);

  const auto shares_before = plan(*core_, manifest_.tables);
  commit_still(/*even_unchanged=*/false);
  if (core_->log)
    grow_logged(table, rows, weights, shares, shares_before);
  else
    grow_in_place(table, rows, weights, shares, shares_before);
}

void Store::Impl::grow_in_place(TableImpl& table, std::uint64_t rows, std::span<const std::byte> weights, const Shares& shares,
                                const Shares& shares_before) {
  const std::uint64_t before = table.rows();
  auto last_checksum = table.last_checksum(before);
  core_->mark.set(core_->newest);
  try {
    table.grow(rows);
  } catch (...) {
    // All undone: the files are those of the commit again.
    if (!table.ahead()) core_->mark.clear();
    throw;
  }
  try {
    if (!weights.empty()) table.fill(before, weights);
    set_shares(shares);
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    if (has_committed(table)) return;
    try {
      last_checksum = table.last_checksum(before);  // the page may have been written for the first time
    } catch (const Error&) {
    }
    try {
      table.shrink(before, last_checksum);
      set_shares(shares_before);
      if (!table.ahead()) core_->mark.clear();
    } catch (const Error&) {
      // The table has its old rows. Files longer than the manifest says are cut when the store is opened; the mark is there.
    }
    throw;
  }
}

bool Store::Impl::has_committed(const TableImpl& table) {
  const auto there = [&]() -> std::optional<Manifest> {
    try {
      Manifest manifest = Manifest::load(core_->path);
      const auto listed = manifest.tables.find(table.name());
      if (listed == manifest.tables.end() || listed->second.geometry.rows != table.rows()) return std::nullopt;
      return manifest;
    } catch (const Error&) {
      return std::nullopt;
    }
  };
  auto manifest = there();
  if (!manifest) return false;
  // It was replaced before the call that failed, which was the sync of its directory.
  try {
    Manifest back = manifest_;
    back.revision = manifest->revision;
    replace_manifest(std::move(back));
    return false;
  } catch (const Error&) {
    manifest = there();
  }
  if (!manifest) return false;
  // It stays, so that is what counts. Should a loss of power bring the old one back, there is the mark.
  manifest_ = std::move(*manifest);
  core_->manifest_file.is_saved(manifest_.revision);
  core_->history.add({.number = manifest_.commit, .time = manifest_.time, .note = manifest_.note});
  core_->commit = manifest_.commit;
  for (const auto& [name, other] : tables_) other->mark_committed();
  return true;
}

void Store::Impl::grow_logged(TableImpl& table, std::uint64_t rows, std::span<const std::byte> weights, const Shares& shares,
                              const Shares& shares_before) {
  const std::uint64_t before = table.rows();
  core_->log->apply_all();
  bool prepared = false;
  try {
    table.grow(rows);
    if (!weights.empty()) table.fill(before, weights);
    set_shares(shares);
    prepared = true;
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    // A commit whose record could not be written may be on the disk all the same: the table stays as it has it.
    if (prepared && !core_->log->uncommitted(table.id())) throw;
    core_->log->roll_back();
    try {
      table.undo_grow(before, /*files=*/!core_->log->broken());
      set_shares(shares_before);
    } catch (const Error&) {
      // Files longer than the manifest says are cut when the store is opened.
    }
    throw;
  }
}

void Store::Impl::shrink(TableImpl& table, std::uint64_t rows) {
  const std::uint64_t before = table.rows();
  Manifest manifest = manifest_;
  manifest.tables.at(table.name()).geometry.rows = rows;
  const auto shares = plan(*core_, manifest.tables), shares_before = plan(*core_, manifest_.tables);
  commit_still(/*even_unchanged=*/false);
  if (core_->log)
    core_->log->apply_all();
  else
    core_->mark.set(core_->newest);
  const TableImpl::LastPage last = table.last_page(rows);
  bool prepared = false;
  try {
    table.cut(rows, last);
    set_shares(shares);
    prepared = true;
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    if (core_->log) {
      // As in grow_logged().
      if (prepared && !core_->log->uncommitted(table.id())) throw;
      core_->log->roll_back();
    }
    if (core_->log || !prepared || !has_committed(table)) {
      try {
        table.undo_cut(before, last);
        set_shares(shares_before);
        if (!core_->log && !table.ahead()) core_->mark.clear();
      } catch (const Error&) {
        // The table has its old rows. Where they were to be changed in place, the mark is there.
      }
      throw;
    }
  }
  // From here the table has so many rows, whatever happens to its files, which are longer: opening cuts them, too.
  try {
    if (core_->log) core_->log->apply_all();
    table.cut_files();
  } catch (const Error&) {
  }
}

void Store::Impl::set_shares(const Shares& shares) {
  for (const auto& [name, table] : tables_) table->prepare_share(shares.at(name));
  for (const auto& [name, table] : tables_) table->set_share(shares.at(name));
}

void Store::Impl::resize(TableImpl& table, std::uint64_t rows) {
  const auto guard = lock();
  check_writable();
  const auto still = stand_still();
  const std::uint64_t before = check_resizable(table).geometry.rows;
  if (rows == before) return;
  if (rows > before) {
    grow(table, rows, {});
  } else {
    shrink(table, rows);
  }
}

std::uint64_t Store::Impl::append(TableImpl& table, std::span<const std::byte> rows) {
  const auto guard = lock();
  check_writable();
  const auto still = stand_still();
  const std::uint64_t before = check_resizable(table).geometry.rows;
  const std::uint64_t row_bytes = table.schema().fields()[0].bytes;
  if (rows.size() % row_bytes != 0)
    throw InvalidArgument(fmt::format("table '{}': {} bytes are no whole number of rows of {} bytes", printable(table.name()),
                                      rows.size(), row_bytes));
  if (rows.empty()) return before;
  grow(table, checked_add(before, rows.size() / row_bytes, "rows of the table"), rows);
  return before;
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
    if (core_->log) core_->log->apply_all();
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
  lock_.release();
}

void Store::Impl::forget_after_fork() noexcept {
  core_->closed = true;
  lock_.forget();
}

}  // namespace embermap
