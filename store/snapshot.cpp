#include "store/snapshot.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/error.hpp"
#include "io/checksum.hpp"
#include "io/elements.hpp"
#include "io/lock.hpp"
#include "io/npy.hpp"
#include "store/commit_history.hpp"
#include "store/moment.hpp"
#include "store/page_ledger.hpp"
#include "store/small_json.hpp"
#include "store/table_impl.hpp"

namespace embermap {
namespace {

constexpr std::string_view kFormat = "embermap snapshot";
constexpr unsigned kMostRounds = 20;
constexpr unsigned kRoundsBeforePause = 2;        // in the writer's process
constexpr unsigned kMostUnexplained = 3;          // failures to read a store that has not changed
constexpr std::uint64_t kMarksTogether = 8192;    // pages whose marks are read at a time
constexpr std::uint64_t kUnsettledPages = 65536;  // written, but not yet durable
constexpr std::uint64_t kUnsettledBytes = 64ULL << 20;

// A failure of the destination: there is nothing to be waited for.
struct DestinationFailed {
  std::exception_ptr why;
};

template <class Call>
auto at_destination(const Call& call) {
  try {
    return call();
  } catch (const std::exception&) {
    throw DestinationFailed{std::current_exception()};
  }
}

// A table's pages on their way: where each is, and what it has to be.
struct Wanted {
  std::uint64_t page = 0;
  std::uint32_t checksum = 0;  // 0: not known
  PageMark there;              // at the destination
};

// The files of a table at the destination.
class Copy {
 public:
  Copy(std::filesystem::path data, std::filesystem::path pages, FileOps& ops)
      : data_path_{std::move(data)}, pages_path_{std::move(pages)}, ops_{ops} {}

  bool there() const { return is_there(data_path_) && is_there(pages_path_); }
  void remove() {
    io_.reset();
    ledger_.reset();
    data_ = File();
    for (const auto& path : {data_path_, pages_path_})
      if (ops_.unlink(path.c_str()) != 0 && errno != ENOENT) throw IoError(errno, "unlink", path);
    sync_directory(data_path_.parent_path(), ops_);
  }
  // Opens what is there, or makes it; with so many rows.
  void open(const Schema& schema, const Geometry& geometry) {
    if (there()) {
      try {
        data_ = File::open(data_path_, File::Mode::kReadWrite, ops_);
        ledger_.emplace(PageLedger::open(File::open(pages_path_, File::Mode::kReadWrite, ops_)));
      } catch (const FormatError&) {  // its making was interrupted
        remove();
      }
    } else {
      remove();  // one of the two
    }
    if (!ledger_) {
      data_ = File::open(data_path_, File::Mode::kCreateNew, ops_);
      ledger_.emplace(PageLedger::create(File::open(pages_path_, File::Mode::kCreateNew, ops_), geometry.pages(), false));
      sync_directory(data_path_.parent_path(), ops_);
    }
    if (ledger_->pages() != geometry.pages()) ledger_->resize(geometry.pages());
    data_.resize(geometry.file_bytes());
    data_.write(0, table_header(schema, geometry));
  }
  void use(ThreadPool& io, const PageIoOptions& options) { io_ = std::make_unique<PageIo>(data_, io, options); }

  PageLedger& ledger() { return *ledger_; }
  File& data() { return data_; }

  // Forgets what is there of these pages, durably: they are about to be overwritten.
  void forget(std::span<const std::uint64_t> pages) {
    if (pages.empty()) return;
    for (const std::uint64_t page : pages) ledger_->record(page, 0);
    ledger_->flush();
  }
  void write(std::span<const IoPiece> pieces, std::span<const std::pair<std::uint64_t, std::uint32_t>> pages) {
    io_->write(pieces);
    for (const IoPiece& piece : pieces) unsettled_bytes_ += piece.bytes;
    unsettled_.insert(unsettled_.end(), pages.begin(), pages.end());
    if (unsettled_.size() >= kUnsettledPages || unsettled_bytes_ >= kUnsettledBytes) settle();
  }
  // Data, then what is told of it.
  void settle() {
    data_.sync();
    for (const auto& [page, checksum] : unsettled_) ledger_->record(page, checksum);
    ledger_->flush();
    unsettled_.clear();
    unsettled_bytes_ = 0;
  }

 private:
  const std::filesystem::path data_path_, pages_path_;
  FileOps& ops_;
  File data_;
  std::optional<PageLedger> ledger_;
  std::unique_ptr<PageIo> io_;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> unsettled_;
  std::uint64_t unsettled_bytes_ = 0;
};

class Snapshot {
 public:
  Snapshot(const SnapshotSource& source, std::filesystem::path destination, const Progress& progress)
      : source_{source}, core_{source.core}, destination_{std::move(destination)}, progress_{progress} {}

  SnapshotReport take() {
    if (!prepare()) return report_;
    std::optional<RedoLog::Pause> paused;
    unsigned unexplained = 0;
    for (;;) {
      ++report_.rounds;
      if (source_.pause && report_.rounds > kRoundsBeforePause && !paused) paused.emplace(source_.pause());
      std::optional<Look> moment;
      try {
        moment = look();
        copy_all(*moment);
        confirm(*moment);
        finish(*moment);
        return report_;
      } catch (const DestinationFailed& failed) {
        std::rethrow_exception(failed.why);
      } catch (const ClosedError&) {
        throw;
      } catch (const Error&) {
        // The writer came in between; or this is what it looks like.
        const bool changed = !moment || has_changed(*moment);
        if (source_.alone || report_.rounds >= kMostRounds || (!changed && ++unexplained == kMostUnexplained)) throw;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

 private:
  // The store as it is when looked at.
  struct Look {
    std::unique_ptr<LogView> view;  // null: there is no log
    Manifest manifest;
    Moment files = {};  // what its tables' files can be
  };

  std::filesystem::path at(std::string_view name) const { return destination_ / name; }
  Copy copy_of(const std::string& name) { return {at(name + ".npy"), at(name + ".pages"), core_.ops}; }

  // ---- the destination ----

  // False if the destination is done already, but for the marker.
  bool prepare() {
    std::error_code error;
    destination_ = std::filesystem::absolute(destination_, error).lexically_normal();
    if (error) throw IoError(error.value(), "realpath", destination_);
    if (!destination_.has_filename()) destination_ = destination_.parent_path();
    refuse_inside();
    home_ = home_of(core_.path);
    if (::mkdir(destination_.c_str(), 0777) == 0) {
      sync_directory(destination_.parent_path(), core_.ops);
    } else if (errno != EEXIST) {
      throw IoError(errno, "mkdir", destination_);
    }
    check_free();
    lock_ = WriterLock::acquire(at(kWriterLockName), destination_);
    check_free();  // another one may have been at work until then
    if (is_there(at(kSnapshotName))) read_marker();
    if (is_store(destination_)) {
      const Manifest manifest = Manifest::load(destination_);
      report_.commit = {.number = manifest.commit, .time = manifest.time, .note = manifest.note};
      remove_marker();
      return false;
    }
    write_marker();
    return true;
  }

  void remove_marker() const {
    if (core_.ops.unlink(at(kSnapshotName).c_str()) != 0) throw IoError(errno, "unlink", at(kSnapshotName));
    sync_directory(destination_, core_.ops);
  }

  void refuse_inside() const {
    std::error_code error;
    const auto store = std::filesystem::weakly_canonical(core_.path, error);
    const auto here = std::filesystem::weakly_canonical(destination_, error);
    const auto parts = std::mismatch(store.begin(), store.end(), here.begin(), here.end());
    if (parts.first == store.end())
      throw InvalidArgument(fmt::format("{} is {} store {}: a snapshot needs a directory of its own", printable(destination_),
                                        parts.second == here.end() ? "the" : "inside of", printable(core_.path)));
  }

  // Throws unless the destination is empty or a half-done snapshot.
  void check_free() const {
    if (is_there(at(kSnapshotName))) return;  // a writer that opens a store removes it
    if (is_store(destination_))
      throw AlreadyExists(fmt::format("{} is a store already; a snapshot makes a new one", printable(destination_)));
    std::error_code error;
    for (const auto& item : std::filesystem::directory_iterator(destination_, error)) {
      const std::string name = item.path().filename().native();
      if (name != kWriterLockName && !(name.starts_with('.') && name.ends_with(".tmp")))
        throw AlreadyExists(fmt::format("{} exists and is not empty (it holds {}); give a new or empty directory",
                                        printable(destination_), printable(name)));
    }
    if (error) throw IoError(error.value(), "opendir", destination_);
  }

  void read_marker() {
    const std::filesystem::path file = at(kSnapshotName);
    check_own_file(file);
    constexpr int kDepth = 2;  // the tables in the whole
    const nlohmann::json json = parse_small_json(read_text(file, 64ULL << 20, core_.ops), kDepth).value_or(nlohmann::json());
    const auto number = [&](const nlohmann::json& value) {
      if (!value.is_number_unsigned()) throw FormatError(file, "is not what a half-done snapshot has; remove the directory");
      return value.get<std::uint64_t>();
    };
    if (!json.is_object() || json.value("format", nlohmann::json()) != kFormat || !json.contains("tables") ||
        !json["tables"].is_object())
      throw FormatError(file, "is not what a half-done snapshot has; remove the directory");
    if (number(json.value("version", nlohmann::json())) != 1) throw FormatError(file, "is of a newer version");
    const StoreHome home{.inode = number(json.value("inode", nlohmann::json())),
                         .born_ns = number(json.value("born_ns", nlohmann::json()))};
    if (!(home == home_))
      throw AlreadyExists(fmt::format("{} is a half-done snapshot of another store than {}; remove it, or give a new directory",
                                      printable(destination_), printable(core_.path)));
    for (const auto& [name, id] : json["tables"].items()) {
      check_table_name(name);
      begun_.emplace(name, static_cast<std::uint32_t>(number(id)));
    }
  }

  void write_marker() const {
    nlohmann::ordered_json tables = nlohmann::ordered_json::object();
    for (const auto& [name, id] : begun_) tables[name] = id;
    const nlohmann::ordered_json json{
        {"format", kFormat}, {"version", 1}, {"inode", home_.inode}, {"born_ns", home_.born_ns}, {"tables", tables}};
    replace_file(at(kSnapshotName), json.dump() + "\n", core_.ops);
  }

  // Only the tables of this manifest are there afterwards.
  void begin_tables(const Manifest& manifest) {
    std::map<std::string, std::uint32_t, std::less<>> tables;
    for (const auto& [name, entry] : manifest.tables) tables.emplace(name, entry.id);
    if (tables == begun_) return;
    for (const auto& [name, id] : begun_) {
      const auto known = tables.find(name);
      if (known == tables.end() || known->second != id) copy_of(name).remove();
    }
    begun_ = std::move(tables);
    write_marker();
  }

  // ---- the source ----

  Look look() const {
    check_own_file(core_.path / kLogName);
    Look moment{LogView::open(core_.path / kLogName, core_.io, core_.page_io, core_.ops), Manifest::load(core_.path)};
    const Manifest in_file = moment.manifest;
    if (moment.view) moment.view->check_store(in_file.store_id);
    if (moment.view && !moment.view->manifest().empty()) {
      Manifest committed = Manifest::parse(moment.view->manifest(), core_.path / kLogName);
      if (committed.revision > moment.manifest.revision) moment.manifest = std::move(committed);
    }
    if (moment.view && !moment.view->lack().empty())
      throw log_error(core_.path / kLogName, moment.view->lack(), moment.manifest.commit);
    if (moment.view) moment.view->check_moment(in_file.commit);
    if (UncommittedMark::present(core_.path, moment.manifest.commit))
      throw CorruptError(
          fmt::format("store {} has pages written after its last commit ({}): a writer without a redo log is at "
                      "work, or its session ended without commit",
                      printable(core_.path), moment.manifest.commit));
    if (moment.view && moment.manifest.commit > moment.view->commit()) throw stale();
    moment.files = moment.view ? Moment(in_file, moment.manifest, moment.view->applied(), moment.view->commit())
                               : Moment::settled(moment.manifest);
    return moment;
  }

  StaleError stale() const { return StaleError(fmt::format("store {} changes all the time", printable(core_.path))); }

  bool has_changed(const Look& moment) const noexcept {
    try {
      return (moment.view && !moment.view->unchanged()) || Manifest::load(core_.path).revision != moment.manifest.revision;
    } catch (const std::exception&) {
      return true;
    }
  }

  // Throws StaleError unless files and log have been what they were at that moment until now.
  void confirm(const Look& moment) const {
    if (moment.view) {
      moment.view->reading([] {});
    } else {
      const Manifest now = Manifest::load(core_.path);
      if (now.commit != moment.manifest.commit || UncommittedMark::present(core_.path, now.commit) ||
          is_there(core_.path / kLogName))
        throw stale();
    }
  }

  static void reading(const Look& moment, const std::function<void()>& body) {
    if (moment.view)
      moment.view->reading(body);
    else
      body();
  }

  // ---- tables ----

  void copy_all(const Look& moment) {
    at_destination([&] { begin_tables(moment.manifest); });
    report_.commit = {.number = moment.manifest.commit, .time = moment.manifest.time, .note = moment.manifest.note};
    report_.pages = 0;
    done_ = total_ = 0;
    // All of them first, so that progress knows how much there is.
    std::vector<std::unique_ptr<Source>> sources;
    for (const auto& [name, entry] : moment.manifest.tables) {
      sources.push_back(std::make_unique<Source>(open_source(moment, name, entry)));
      sources.back()->io = std::make_unique<PageIo>(sources.back()->data, core_.io, core_.page_io);
      total_ += sources.back()->written * entry.geometry.page_bytes();
    }
    core_.report(progress_, done_, total_);
    for (const auto& source : sources) copy_table(moment, *source);
  }

  struct Source {
    const std::string& name;
    const TableEntry& entry;
    Schema schema;
    File data;
    PageLedger ledger;
    std::vector<std::pair<std::uint64_t, std::uint32_t>> logged;  // pages and their checksums, ascending
    std::uint64_t written = 0;                                    // pages, in the file or the log
    std::unique_ptr<PageIo> io = {};
  };

  Source open_source(const Look& moment, const std::string& name, const TableEntry& entry) const {
    const std::filesystem::path data = entry.adopted ? *entry.adopted : core_.path / (name + ".npy");
    const std::filesystem::path pages = core_.path / (name + ".pages");
    if (entry.adopted)
      source_.check_adopted(name, entry);
    else
      check_own_file(data);
    check_own_file(pages);
    Source source{name,
                  entry,
                  Schema(entry.dim, entry.dtype, entry.optimizer),
                  File::open(data, File::Mode::kRead, core_.ops),
                  PageLedger::open(File::open(pages, File::Mode::kRead, core_.ops)),
                  {},
                  0};
    if (entry.adopted) {
      const NpyHeader header = read_npy_header(source.data);
      if (header.data_offset != entry.geometry.data_offset || header.shape.size() != 2 ||
          header.shape[0] != entry.geometry.rows || header.shape[1] != entry.dim)
        throw FormatError(data, fmt::format("has the shape {}; table '{}' has {} rows x {}", header.shape_text(), printable(name),
                                            entry.geometry.rows, entry.dim));
    }
    if (source.ledger.pages() < entry.geometry.pages())
      throw FormatError(
          pages, fmt::format("page file of {} pages, but the table has {}", source.ledger.pages(), entry.geometry.pages()));
    if (core_.checks_pages) moment.files.check(core_.path, name, entry, source.ledger.number());
    if (moment.view)
      moment.view->for_each(entry.id, [&](std::uint64_t page, const LoggedVersion& version) {
        source.logged.emplace_back(page, version.checksum);
      });
    std::sort(source.logged.begin(), source.logged.end());
    // Pages that the log has, a writer may be moving to the file just now.
    if (entry.adopted && source.logged.empty()) source_.check_unchanged(name, entry, source.data, source.ledger);
    source.written = source.ledger.count_written();
    for (const auto& [page, checksum] : source.logged) source.written += !source.ledger.written(page);
    return source;
  }

  void copy_table(const Look& moment, Source& source) {
    Copy copy = copy_of(source.name);
    Geometry geometry = source.entry.geometry;
    geometry.data_offset = kDataOffset;
    for (int attempt = 1;; ++attempt) {
      if (!copy.there() && !source.entry.adopted) clone(moment, source, geometry);
      at_destination([&] {
        copy.open(source.schema, geometry);
        copy.use(core_.io, core_.page_io);
      });
      std::uint64_t pages = 0;
      try {
        pages = copy_pages(moment, source, geometry, copy);
      } catch (...) {
        try {
          copy.settle();  // what is there need not be copied again
        } catch (const std::exception&) {
        }
        throw;
      }
      at_destination([&] {
        copy.ledger().set_commit(moment.manifest.commit);
        copy.settle();
      });
      if (copy.ledger().count_written() == pages) {
        report_.pages += pages;
        return;
      }
      // Of a table that was shortened and grew again since it was begun: it has pages that are initial rows now.
      if (attempt == 2)
        throw CorruptError(fmt::format("{}: has {} written pages, not the {} of table '{}'", printable(copy.data().path()),
                                       copy.ledger().count_written(), pages, printable(source.name)));
      at_destination([&] { copy.remove(); });
      done_ -= std::min(done_, pages * geometry.page_bytes());
    }
  }

  // Returns how many pages of the source are written ones.
  std::uint64_t copy_pages(const Look& moment, Source& source, const Geometry& geometry, Copy& copy) {
    const std::uint64_t page_bytes = geometry.page_bytes();
    const std::uint64_t together = std::max<std::uint64_t>(1, core_.transfer_bytes() / page_bytes);
    const AlignedBuffer memory(
        checked_mul(std::min(together, std::max<std::uint64_t>(1, source.written)), page_bytes, "bytes of pages of a snapshot"));
    std::vector<Wanted> batch;
    std::uint64_t written = 0;
    const auto flush = [&] {
      copy_batch(moment, source, geometry, copy, batch, memory.data());
      batch.clear();
    };
    std::vector<PageMark> marks, there;
    auto logged = source.logged.begin();
    for (std::uint64_t first = 0; first < geometry.pages();) {
      first = std::min(source.ledger.next_marked(first), logged == source.logged.end() ? geometry.pages() : logged->first);
      if (first >= geometry.pages()) break;
      const std::uint64_t count = std::min(kMarksTogether, geometry.pages() - first);
      marks.assign(count, {});
      there.assign(count, {});
      source.ledger.read_marks(first, marks);
      at_destination([&] { copy.ledger().read_marks(first, there); });
      for (; logged != source.logged.end() && logged->first < first + count; ++logged)
        marks[logged->first - first] = {.written = true, .checksum = logged->second, .damaged = false};
      for (std::uint64_t i = 0; i < count; ++i) {
        if (marks[i].damaged) throw damaged(source, first + i, "has no whole entry in the page file");
        if (!marks[i].written) continue;
        ++written;
        const bool same = there[i].written && !there[i].damaged && there[i].checksum != 0 &&
                          there[i].checksum == marks[i].checksum && !source.entry.big_endian;
        if (same) {
          done_ += page_bytes;
          continue;
        }
        batch.push_back({first + i, marks[i].checksum, there[i]});
        if (batch.size() == together) flush();
      }
      first += count;
      check_open();
      core_.report(progress_, std::min(done_, total_), total_);
    }
    flush();
    core_.report(progress_, std::min(done_, total_), total_);
    return written;
  }

  CorruptError damaged(const Source& source, std::uint64_t page, std::string_view how) const {
    const std::uint64_t first = page * source.entry.geometry.rows_per_page;
    return CorruptError(fmt::format("{}: page {} (rows {} to {}) of table '{}' {}; 'embermap verify' shows what is damaged",
                                    printable(source.data.path()), page, first, first + source.entry.geometry.rows_in(page) - 1,
                                    printable(source.name), how));
  }

  void copy_batch(const Look& moment, Source& source, const Geometry& geometry, Copy& copy, std::span<const Wanted> batch,
                  std::byte* memory) {
    if (batch.empty()) return;
    const std::uint64_t page_bytes = geometry.page_bytes();
    std::vector<std::uint32_t> checksums(batch.size());
    reading(moment, [&] { read_batch(moment, source, batch, memory, checksums); });
    std::vector<IoPiece> pieces;
    std::vector<std::pair<std::uint64_t, std::uint32_t>> pages;
    std::vector<std::uint64_t> overwritten;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      done_ += page_bytes;
      const PageMark& there = batch[i].there;
      if (there.written && !there.damaged && there.checksum == checksums[i]) continue;
      const std::uint64_t bytes = geometry.bytes_in(batch[i].page);
      if (there.written) overwritten.push_back(batch[i].page);
      pieces.push_back({geometry.offset_of(batch[i].page), memory + i * page_bytes, bytes, page_bytes});
      pages.emplace_back(batch[i].page, checksums[i]);
      report_.copied_bytes += bytes;
    }
    at_destination([&] {
      copy.forget(overwritten);
      copy.write(pieces, pages);
    });
    report_.copied_pages += pages.size();
    check_open();
    core_.report(progress_, std::min(done_, total_), total_);
  }

  // Fills memory and checksums with the pages as they belong into an ordinary table's file.
  void read_batch(const Look& moment, Source& source, std::span<const Wanted> batch, std::byte* memory,
                  std::span<std::uint32_t> checksums) const {
    const Geometry& geometry = source.entry.geometry;
    const std::uint64_t page_bytes = geometry.page_bytes();
    std::vector<LoggedVersion> versions(batch.size());
    if (moment.view && !moment.view->empty()) {
      std::vector<std::uint64_t> numbers;
      for (const Wanted& wanted : batch) numbers.push_back(wanted.page);
      moment.view->find(source.entry.id, numbers, versions);
    }
    std::vector<IoPiece> in_file, in_log;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      std::byte* const slot = memory + i * page_bytes;
      if (versions[i].there() && !versions[i].in_place)
        in_log.push_back({versions[i].position, slot, page_bytes, page_bytes});
      else
        in_file.push_back({geometry.offset_of(batch[i].page), slot, geometry.bytes_in(batch[i].page), page_bytes});
    }
    std::sort(in_log.begin(), in_log.end(), [](const IoPiece& a, const IoPiece& b) { return a.offset < b.offset; });
    source.io->read(in_file);
    if (!in_log.empty()) moment.view->read(in_log, {});
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::span<std::byte> bytes(memory + i * page_bytes, geometry.bytes_in(batch[i].page));
      checksums[i] = page_checksum(bytes);
      if (batch[i].checksum != 0 && checksums[i] != batch[i].checksum)
        throw damaged(source, batch[i].page, "does not match its checksum");
      if (!source.entry.big_endian) continue;
      const std::uint64_t item = item_size(source.entry.dtype);
      swap_elements(bytes.data(), bytes.data(), bytes.size() / item, item);
      checksums[i] = page_checksum(bytes);
    }
  }

  // Makes the table's files share their blocks with those of the source, where the file system can: a moment, and no disk. Pages
  // that the log has are copied over them afterwards. The page file comes first: what it says of a page that is being applied
  // just then is forgotten, and all else stands still.
  void clone(const Look& moment, Source& source, const Geometry& geometry) {
    if (!clones_) return;
    const std::filesystem::path data_path = at(source.name + ".npy"), pages_path = at(source.name + ".pages");
    TemporaryFile data = at_destination([&] { return TemporaryFile::create(data_path, /*overwrite=*/true, core_.ops); });
    TemporaryFile pages = at_destination([&] { return TemporaryFile::create(pages_path, /*overwrite=*/true, core_.ops); });
    const File source_pages = File::open(core_.path / (source.name + ".pages"), File::Mode::kRead, core_.ops);
    reading(moment, [&] {
      clones_ =
          core_.ops.clone(pages.file().fd(), source_pages.fd()) == 0 && core_.ops.clone(data.file().fd(), source.data.fd()) == 0;
    });
    if (!clones_) return;
    std::vector<std::uint64_t> logged;
    for (const auto& [page, checksum] : source.logged) logged.push_back(page);
    {
      PageLedger ledger = PageLedger::open(File::open(pages.file().path(), File::Mode::kReadWrite, core_.ops));
      at_destination([&] {
        if (ledger.pages() != geometry.pages()) ledger.resize(geometry.pages());
      });
      // One that was never written before has no mark to be forgotten.
      std::erase_if(logged, [&](std::uint64_t page) { return !ledger.written(page); });
      for (const std::uint64_t page : logged) ledger.record(page, 0);
      at_destination([&] { ledger.flush(); });
    }
    at_destination([&] {
      data.commit();
      pages.commit();
    });
    ++report_.cloned_tables;
  }

  void check_open() const {
    if (core_.closed.load()) throw ClosedError(fmt::format("store {} is closed", printable(core_.path)));
  }

  // ---- the end ----

  void finish(const Look& moment) {
    const std::vector<CommitInfo> commits = read_history(core_.path, moment.manifest, core_.ops);
    at_destination([&] {
      if (!commits.empty()) replace_file(at(kHistoryName), history_text(commits), core_.ops);
      Manifest manifest = moment.manifest;
      manifest.unfinished.clear();
      manifest.log = false;
      for (auto& [name, entry] : manifest.tables) entry.settled = 0;  // all of it is
      manifest.store_id = StoreId::random();                          // a store of its own
      for (auto& [name, entry] : manifest.tables) {
        if (!entry.adopted) continue;
        entry.adopted.reset();
        entry.adopted_in = {};
        entry.adopted_writable = entry.big_endian = false;
        entry.geometry.data_offset = kDataOffset;
      }
      manifest.save(destination_, core_.ops);  // it is a store from here on
      remove_marker();
    });
  }

  const SnapshotSource& source_;
  StoreCore& core_;
  std::filesystem::path destination_;
  const Progress& progress_;
  StoreHome home_;
  WriterLock lock_;
  std::map<std::string, std::uint32_t, std::less<>> begun_;  // tables, and the ids they have in the store
  bool clones_ = true;                                       // until the file system refuses
  std::uint64_t done_ = 0, total_ = 0;                       // bytes of pages of this round
  SnapshotReport report_;
};

}  // namespace

SnapshotReport take_snapshot(const SnapshotSource& source, const std::filesystem::path& destination, const Progress& progress) {
  if (destination.empty()) throw InvalidArgument("the snapshot's path is empty");
  return Snapshot(source, destination, progress).take();
}

}  // namespace embermap
