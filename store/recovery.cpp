// What opening a store makes of its files: of those that a crash left, and of those that a writer changes meanwhile.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "base/error.hpp"
#include "io/npy.hpp"
#include "store/store_impl.hpp"

namespace embermap {
namespace {

constexpr int kMostLooks = 200;  // of a reader at a store that changes

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
    throw FormatError(path, fmt::format("page file of {} pages, but the table has {}", ledger.pages(), entry.geometry.pages()));
  return ledger;
}

// Throws FormatError for a table's file that ends before its rows do.
void check_length(const File& data, const TableEntry& entry) {
  if (const std::uint64_t bytes = data.size(); bytes < entry.geometry.file_bytes())
    throw FormatError(data.path(), fmt::format("truncated: {} bytes, and its {} rows end at byte {}", bytes, entry.geometry.rows,
                                               entry.geometry.file_bytes()));
}

constexpr std::string_view kHeadersDamaged = "neither of its two headers is whole";

// A reader's look at the log; nullptr if there is none, and where none of its headers is whole and that is accepted (`damaged`).
std::unique_ptr<LogView> open_log(StoreCore& core, bool accept_damage, bool& damaged) {
  try {
    return LogView::open(core.path / kLogName, core.io, core.page_io, core.ops);
  } catch (const CorruptError&) {
    if (!accept_damage) throw;
    damaged = true;
    return nullptr;
  }
}

// Of the manifest in the store's file and that of a commit in its log, the one with the higher revision.
Manifest newer_manifest(Manifest manifest, std::string_view in_log, const std::filesystem::path& store) {
  Manifest committed = Manifest::parse(in_log, store / kLogName);
  if (committed.revision <= manifest.revision) return manifest;
  if (!committed.store_id.known()) committed.store_id = manifest.store_id;  // a commit of before
  return committed;
}

}  // namespace

std::string why_log_is_gone(const std::filesystem::path& store, const Manifest& manifest, FileOps& ops) {
  if (!is_there(store / kLogName)) return manifest.log ? "it is not there" : std::string();
  const File log = File::open(store / kLogName, File::Mode::kRead, ops);
  try {
    const std::string cut = how_headers_were_cut(log);
    return manifest.log ? cut : std::string();  // one without commits may be just being made
  } catch (const CorruptError&) {
    return std::string(kHeadersDamaged);
  }
}

CorruptError Store::Impl::unclean_end(const std::filesystem::path& store, std::uint64_t commit, std::string_view why) {
  return CorruptError(
      fmt::format("store {} has pages written after its last commit ({}): {}. Its tables may mix committed and later rows; "
                  "accept_unclean, or 'embermap recover', takes them as they are",
                  printable(store), commit, why));
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

void Store::Impl::look(bool accept_unclean) {
  for (int attempt = 1;; ++attempt) {
    check_own_file(core_->path / kLogName);
    auto unlogged = std::make_unique<UnloggedView>(core_->path);  // before anything is looked at
    bool damaged = false;
    auto view = open_log(*core_, accept_unclean, damaged);
    Manifest manifest = Manifest::load(core_->path);
    const std::uint64_t revision = manifest.revision;
    const Manifest in_file = manifest;
    const bool lacks = view && !view->lack().empty();
    if (view) view->check_store(manifest.store_id);
    if (view && !view->manifest().empty()) manifest = newer_manifest(std::move(manifest), view->manifest(), core_->path);
    if (lacks && !accept_unclean) throw log_error(core_->path / kLogName, view->lack(), manifest.commit);
    if (view && (!lacks || in_file.commit < view->applied())) view->check_moment(in_file.commit);
    core_->unclean = UncommittedMark::present(core_->path, manifest.commit, core_->ops);
    if (core_->unclean && !accept_unclean)
      throw unclean_end(core_->path, manifest.commit,
                        "a writer without a redo log is at work, or its session ended without commit");
    bool whole = !view || lacks || manifest.commit <= view->commit();
    if (!view && manifest.log && !damaged) {
      if (const std::string why = why_log_is_gone(core_->path, manifest, core_->ops); why.empty())
        whole = false;  // a writer has made it meanwhile
      else if (!accept_unclean)
        throw log_error(core_->path / kLogName, why, manifest.commit);
    }
    // Its headers are there as long as it is, whatever a writer does meanwhile.
    std::error_code ignored;
    if (view && manifest.log && !accept_unclean && std::filesystem::file_size(core_->path / kLogName, ignored) < kLogStart)
      throw log_error(core_->path / kLogName,
                      how_headers_were_cut(File::open(core_->path / kLogName, File::Mode::kRead, core_->ops)), manifest.commit);
    if (whole) {
      const Tables before = tables_;  // a table that is gone must not go before its lock
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
      moment_ =
          core_->view ? Moment(in_file, manifest_, core_->view->applied(), core_->view->commit()) : Moment::settled(manifest_);
      std::exception_ptr mixed;
      try {
        check_moments(*core_, moment_, manifest_);
        open_tables();
      } catch (const MomentError&) {
        mixed = std::current_exception();
      }
      // Log, manifest and tables' files were of one moment if nothing has begun or ended to be applied since the log was looked
      // at, and no table was made or removed: one of the same name has other files.
      const bool listed = Manifest::load(core_->path).revision == revision;
      if (listed && (core_->view ? core_->view->unchanged() : core_->unlogged->unchanged())) {
        if (mixed == nullptr) return;
        for (const auto& [name, table] : tables_) table->drop_files(mixed);  // some of them may have been opened
        std::rethrow_exception(mixed);
      }
    }
    // The writer came in between. It begins and ends to apply commits a few times a second at most.
    if (attempt == kMostLooks) throw StaleError(fmt::format("store {} changes all the time", printable(core_->path)));
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(attempt, 50)));
  }
}

RecoveryPlan plan_recovery(const std::filesystem::path& store, const std::optional<bool> allow_adopted) {
  return Store::Impl::plan_recovery(store, allow_adopted);
}

RecoveryPlan Store::Impl::plan_recovery(const std::filesystem::path& path, std::optional<bool> allow_adopted) {
  Manifest::load(path);  // says what is wrong where this is no store
  RecoveryPlan plan;
  plan.writer = WriterLock::is_taken(path / kWriterLockName).value_or(false);
  StoreOptions options{.mode = StoreOptions::Mode::kRead, .threads = 1};
  options.allow_adopted = allow_adopted;
  StoreCore core(std::filesystem::absolute(path), options, FileOps::system());
  check_own_file(path / kLogName);
  bool damaged = false;
  const auto view = open_log(core, /*accept_damage=*/true, damaged);
  Manifest manifest = Manifest::load(path);  // after the log: commits go from there to here
  const Manifest in_file = manifest;
  if (view) {
    view->check_store(manifest.store_id);
    if (!view->manifest().empty()) manifest = newer_manifest(std::move(manifest), view->manifest(), path);
    if (view->lack().empty() || in_file.commit < view->applied()) view->check_moment(in_file.commit);
    plan.log_bytes = view->bytes();
    core.logged = view.get();
  }
  plan.commit = manifest.commit;
  const auto count_pages = [&](std::uint32_t id) {
    std::uint64_t pages = 0;
    if (view) view->for_each(id, [&](std::uint64_t, const LoggedVersion&) { ++pages; });
    return pages;
  };
  for (const auto& [name, entry] : manifest.tables)
    if (const std::uint64_t pages = count_pages(entry.id); pages != 0) plan.pages.emplace(name, pages);
  if (plan.writer) return plan;
  plan.log_gone = view && !view->lack().empty() ? view->lack() : why_log_is_gone(path, manifest, FileOps::system());
  plan.unclean = !plan.log_gone.empty() || UncommittedMark::present(path, manifest.commit);
  core.unclean = plan.unclean;
  const Moment moment =
      view ? Moment(in_file, manifest, view->applied(), std::max(view->commit(), manifest.commit)) : Moment::settled(manifest);
  try {
    check_moments(core, moment, manifest);
  } catch (const MomentError& error) {
    plan.mixed = error.what();
    plan.unclean = true;
  }
  for (const auto& [name, entry] : manifest.tables) {
    try {
      if (entry.adopted) check_adopted(core, name, entry);
      const File data = open_data(core, name, entry, /*write=*/false);
      const bool resized = view && view->find(entry.id, kHeaderPage);
      check_header(read_npy_header(data), data.path(), Schema(entry.dim, entry.dtype, entry.optimizer), entry, resized);
      check_length(data, entry);
      const PageLedger ledger = open_ledger(core, name, entry);
      if (entry.adopted) check_unchanged(core, name, entry, data, ledger);
    } catch (const Error& error) {
      if (plan.pages.contains(name)) throw;  // nothing is opened then: its committed pages would be lost
      plan.broken.emplace(name, error.what());
    }
  }
  return plan;
}

Manifest Store::Impl::recover(StoreCore& core, const StoreOptions& options, Manifest manifest) {
  const std::filesystem::path path = core.path / kLogName;
  // What tells that the tables may be of several moments, the log and their numbers of commits, is gone before their pages are
  // sealed anew. From then on the mark tells.
  const auto keep_refusing = [&core](std::uint64_t commit) {
    if (core.unclean) core.mark.set(commit);
  };
  if (core.durability == Durability::kNone && !is_there(path)) {
    check_moments(core, Moment::settled(manifest), manifest);
    keep_refusing(manifest.commit);
    if (manifest.log) {  // it is gone, which has been accepted
      manifest.log = false;
      ++manifest.revision;
      core.manifest_file.save(manifest);
    }
    core.history.load(manifest, {});
    return manifest;
  }
  check_own_file(path);
  keep_refusing(manifest.commit);  // before a log is made where one is missed
  const RedoLogOptions log_options{.limit = core.log_limit,
                                   .memory = core.most_log_memory(),
                                   .transfer_bytes = std::clamp<std::uint64_t>(core.transfer_bytes(), 64U << 10, 4U << 20),
                                   .io = core.page_io,
                                   .store = manifest.store_id,
                                   .accept_damage = options.accept_unclean};
  core.log = std::make_unique<RedoLog>(
      path, log_options, core.compute, core.io, core.ops, [&core](std::string_view text) { core.manifest_file.save_text(text); },
      manifest.commit);
  RedoLog& log = *core.log;
  core.unclean = core.unclean || log.lacked();
  const Manifest in_file = manifest;
  if (log.found()) manifest = newer_manifest(std::move(manifest), log.found()->manifest, core.path);
  core.history.load(manifest, log.found() ? commits_in_log(path, core.ops) : std::vector<CommitInfo>());
  const Moment moment(in_file, manifest, log.applied(), manifest.commit);  // before anything is written
  check_moments(core, moment, manifest);
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
        core.io, [] {}, PageFileOptions{.io = core.page_io, .skip_damaged = core.accept_unclean});
    log.attach(entry.id, *recovered->file);
    files.push_back(std::move(recovered));
  }
  for (const std::uint32_t removed : tables) log.detach(removed, /*forget=*/true);
  keep_refusing(manifest.commit);
  log.apply_all(options.recovery);
  for (const auto& recovered : files) core.unclean = core.unclean || recovered->file->skipped();
  keep_refusing(manifest.commit);
  for (const auto& [name, entry] : manifest.tables) log.detach(entry.id, /*forget=*/false);
  if (manifest.log) {
    manifest.log = false;
    ++manifest.revision;
  }
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

void Store::Impl::check_moments(StoreCore& core, const Moment& moment, const Manifest& manifest) {
  for (const auto& [name, entry] : manifest.tables) {
    std::optional<PageLedger::Number> number;
    try {
      number = PageLedger::read_number(File::open(core.path / (name + ".pages"), File::Mode::kRead, core.ops));
    } catch (const Error&) {  // it is broken, which whoever asks for the table is told
    }
    if (number) check_moment(core, moment, name, entry, *number);
  }
}

void Store::Impl::check_moment(StoreCore& core, const Moment& moment, const std::string& name, const TableEntry& entry,
                               const PageLedger::Number& number) {
  if (core.unclean) return;
  try {
    moment.check(core.path, name, entry, number);
  } catch (const MomentError&) {
    if (!core.accept_unclean) throw;
    core.unclean = true;  // checksums are made anew
  }
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
  check_moment(*core_, moment_, name, entry, ledger.number());
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

}  // namespace embermap
