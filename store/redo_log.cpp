#include "store/redo_log.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/checksum.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kLeastStaging = 64U << 10;
constexpr std::uint64_t kGrowBytes = 64U << 20;                   // of the file at a time, at most; it is sparse
constexpr std::uint64_t kLongBytes = 256U << 20, kLongShare = 4;  // a log longer than both, by its limit, begins anew
constexpr std::uint64_t kEncodeGrain = 64U << 10;                 // bytes of pages that a thread encodes at a time
// Applying in the background begins with a commit after which the log is so many times as long as the pages in it take once: most
// of what was appended is never read and written again then, whatever is applied costs little beside appending it, and a longer
// log would save hardly more. At an eighth of the limit at least: before, applying is not worth its syncs. At three quarters it
// begins whenever that is, so that there is room for what comes meanwhile.
constexpr std::uint64_t kApplyVersions = 4;
constexpr std::uint64_t kApplyLeast = 8;
constexpr std::uint64_t nearly_full(std::uint64_t limit) noexcept { return limit / 4 * 3; }
// Until an eighth of the limit is left it rests this many times as long as it works, so that batches find the disk free.
constexpr int kRest = 1;
constexpr std::uint64_t kEntryBytes = 4096;  // of the limit that an entry of the index stands for, where memory is not the bound

}  // namespace

std::uint64_t RedoLog::entry_bytes_for(const RedoLogOptions& options) noexcept {
  std::uint64_t fit = 1, most = options.limit / kEntryBytes + 1;  // entries: the first fits, the second may not
  if (memory_for(most) <= options.memory) return kEntryBytes;
  while (most - fit > 1) {
    const std::uint64_t middle = fit + (most - fit) / 2;
    (memory_for(middle) <= options.memory ? fit : most) = middle;
  }
  return std::max(kEntryBytes, options.limit / fit);
}

File RedoLog::open_file(const std::filesystem::path& path, FileOps& ops, const LogHeader& first) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) return File::open(path, File::Mode::kReadWrite, ops);
  File file = File::open(path, File::Mode::kCreateNew, ops);
  // Both slots take their disk now: later a full one must not be in the way of a header.
  const std::vector<std::byte> zeros(kLogStart);
  file.write(0, zeros);
  write_log_header(file, first);
  file.sync();
  sync_directory(path.parent_path(), ops);
  return file;
}

RedoLog::RedoLog(const std::filesystem::path& file, const RedoLogOptions& options, ThreadPool& compute, ThreadPool& io,
                 FileOps& ops, std::function<void(std::string_view)> save_manifest, std::uint64_t commit)
    : options_{options},
      entry_bytes_{entry_bytes_for(options)},
      compute_{compute},
      save_manifest_{std::move(save_manifest)},
      file_{open_file(file, ops, first_header(commit, options.store))},
      io_{file_, io, options.io},
      staging_{std::max(kLeastStaging, options.transfer_bytes)} {
  const auto header = read_log_header(file_);
  if (header) check_log_store(file, header->store, options.store);
  header_ = header ? *header : first_header(commit, options.store);
  if (!header_.store.known()) header_.store = options.store.known() ? options.store : StoreId::random();  // in the next header
  store_ = header_.store;
  if (!header) set_header(header_);
  file_bytes_ = file_.size();
  index_records(commit);
  if (!lacked_ || commit < header_.applied) check_log_moment(file_.path(), header_.applied, commit_, commit);
}

RedoLog::~RedoLog() { stop(); }

void RedoLog::index_records(std::uint64_t commit) {
  head_ = epoch_ = committed_ = header_.tail;
  commit_ = header_.applied;
  const std::uint64_t end = walk_log(file_, header_, [&](const LogRecord& record) {
    head_ = record.end();
    if (record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit)) {
      committed_ = epoch_ = head_;
      commit_ = record.header.commit;
      manifest_ = record.text;
      return;
    }
    const bool in_place = record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kInPlace);
    const auto table = static_cast<std::uint32_t>(record.header.table);
    if (!in_place && record.entries[0].page != kHeaderPage) {
      const auto known = page_bytes_.emplace(table, record.header.page_bytes).first;
      if (known->second != record.header.page_bytes)
        throw FormatError(file_.path(), fmt::format("pages of table {} have {} bytes at byte {} and {} before", table,
                                                    record.header.page_bytes, record.header.position, known->second));
    }
    publish(record, 0);
  });
  const std::optional<std::uint64_t> last = committed_ == header_.tail ? std::nullopt : std::optional(commit_);
  const auto lack = what_log_lacks(file_, header_, read_log_mark(file_), {.position = end, .last_commit = last});
  if (!lack.empty()) {
    if (!options_.accept_damage) throw log_error(file_.path(), lack, std::max(commit_, commit));
    accept_lack(commit);
  }
  index_.forget_from(epoch_);
  head_ = epoch_;
  next_commit_ = commit_ + 1;
  appended_ = 0;
  touched_.clear();
  in_place_.clear();
  entries_ = index_.size();
  if (committed_ != header_.tail) found_ = Found{commit_, manifest_, index_.size(), committed_ - header_.tail};
}

void RedoLog::accept_lack(std::uint64_t commit) {
  // What tells of it on the disk stays until the log begins anew, and so do records behind the damage: a crash before that leaves
  // what this opening found. There may be a manifest of a commit that is gone: its number is not used again.
  lacked_ = tells_of_lack_ = true;
  least_applied_ = std::max(commit_, commit);
  if (committed_ != header_.tail) return;
  header_.applying = header_.applied = commit_ = least_applied_;
}

std::uint64_t RedoLog::pages_of(std::uint32_t table) const {
  std::uint64_t count = 0;
  for_each(table, [&](std::uint64_t, const LoggedVersion&) { ++count; });
  return count;
}

RedoLog::Pause RedoLog::pause() {
  {
    const std::lock_guard lock(mutex_);
    ++waiting_;
  }
  changed_.notify_all();
  Pause applying(apply_mutex_);
  const std::lock_guard lock(mutex_);
  --waiting_;
  return applying;
}

std::uint64_t RedoLog::used() const {
  const std::uint64_t bytes = head_ - header_.tail, index = index_.size() * entry_bytes_;
  return index <= bytes || !index_may_overflow() ? bytes : index;
}

bool RedoLog::applying_is_due() const {
  if (committed_ == header_.tail) return false;
  const std::uint64_t bytes = head_ - header_.tail;
  return used() >= nearly_full(options_.limit) ||
         (bytes >= options_.limit / kApplyLeast && bytes / kApplyVersions >= once_bytes_);
}

void RedoLog::count_once() {
  once_bytes_ = 0;
  index_.for_each([&](const LoggedPage& logged) {
    if (logged.newest.in_place) return;
    const auto target = targets_.find(logged.table);
    const bool page = logged.page != kHeaderPage && target != targets_.end();
    once_bytes_ += page ? target->second->page_bytes() : kLogBlock;
  });
}

bool RedoLog::index_may_overflow() const {
  std::uint64_t pages = targets_.size();  // headers
  for (const auto& [table, target] : targets_) pages = checked_add(pages, target->pages(), "pages of all tables");
  return pages > index_pages();
}

void RedoLog::attach(std::uint32_t table, LogTarget& target) {
  const auto applying = pause();
  if (const auto known = page_bytes_.find(table); known != page_bytes_.end() && known->second != target.page_bytes())
    throw FormatError(file_.path(), fmt::format("has pages of {} bytes for table {}, whose pages have {}", known->second, table,
                                                target.page_bytes()));
  const std::lock_guard lock(mutex_);
  targets_[table] = &target;
}

void RedoLog::detach(std::uint32_t table, bool forget) {
  const auto applying = pause();
  const std::lock_guard lock(mutex_);
  targets_.erase(table);
  page_bytes_.erase(table);
  if (!forget) return;
  index_.forget_table(table);
  entries_ = index_.size();
  count_once();
  appended_ = index_.count_from(epoch_);
  touched_.erase(table);
  in_place_.erase(table);
}

void RedoLog::check_usable() const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty())
    throw CorruptError(
        fmt::format("{}: a sync has failed ({}); the system may have given up what it could not write, so the store takes "
                    "no writes any more. Abandon it and open it again: it is at its last commit then",
                    printable(file_.path()), failure_));
}

bool RedoLog::broken() const {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

std::uint64_t RedoLog::applied() const {
  const std::lock_guard lock(mutex_);
  return header_.applied;
}

std::set<std::uint32_t> RedoLog::tables() const {
  std::set<std::uint32_t> tables;
  const std::lock_guard lock(mutex_);
  index_.for_each([&](const LoggedPage& logged) { tables.insert(logged.table); });
  return tables;
}

void RedoLog::give_up(std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
    committing_ = false;
  }
  changed_.notify_all();
}

void RedoLog::fail(const IoError& error) {
  give_up(error.what());
  throw error;
}

bool RedoLog::may_write_in_place(std::uint32_t table, std::uint64_t page) const {
  const std::lock_guard lock(mutex_);
  const auto logged = index_.find(table, page);
  return !logged || (logged->newest.in_place && logged->newest.position >= epoch_);
}

void RedoLog::wait_for_room(std::uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const auto roomy = [&] { return used() + bytes <= options_.limit || committed_ == header_.tail; };
  while (!roomy() && failure_.empty()) {
    const std::uint64_t before = applies_;
    start_applying();
    if (!applying_) return;  // no thread to be had: rather a long log than no progress
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return applies_ != before || roomy(); });
    --waiting_;
    if (!roomy() && apply_failure_ != nullptr) std::rethrow_exception(apply_failure_);
  }
}

void RedoLog::write_record(std::uint64_t position, const AlignedBuffer& record, std::uint64_t bytes) {
  const std::uint64_t end = position + bytes;
  if (end > file_bytes_) {
    // Direct writes must lie inside of the file. What is added is a hole.
    std::uint64_t size = std::max(end, std::min(file_bytes_ * 2, round_up(end, kGrowBytes)));
    try {
      file_.resize(size);
    } catch (const IoError&) {
      if (size == end) throw;
      size = end;  // a limit on the size of files
      file_.resize(size);
    }
    file_bytes_ = size;
  }
  const IoPiece piece{position, record.data(), bytes, bytes};
  io_.write({&piece, 1});
}

void RedoLog::publish(const LogRecord& record, std::uint64_t bytes) {
  const bool in_place = record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kInPlace);
  const auto table = static_cast<std::uint32_t>(record.header.table);
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < record.entries.size(); ++i) {
    const LoggedVersion version{in_place ? record.header.position : record.data(i), record.entries[i].checksum, in_place};
    if (!in_place) {
      const auto known = index_.find(table, record.entries[i].page);
      if (!known || known->newest.in_place) once_bytes_ += record.header.page_bytes;
    }
    appended_ += index_.put(table, record.entries[i].page, version, epoch_) ? 1U : 0U;
  }
  head_ += bytes;
  entries_ = index_.size();
  touched_.insert(table);
  if (in_place) in_place_.insert(table);
  counts_.appended_bytes += bytes;
  // Where applying has failed, the next commit tries again.
  if (bytes == 0 || apply_failure_ != nullptr || committed_ == header_.tail) return;
  if (used() >= nearly_full(options_.limit)) start_applying();
}

void RedoLog::append(std::uint32_t table, std::span<const std::uint64_t> pages, std::uint64_t page_bytes, const Encode& encode,
                     const Appended& appended) {
  const std::lock_guard appending(append_mutex_);
  const std::uint64_t least = log_record_head(1) + round_up(page_bytes, kLogBlock);
  if (staging_.size() < least) {
    AlignedBuffer larger(least);
    const std::lock_guard lock(mutex_);  // statistics() tells its size
    staging_ = std::move(larger);
  }
  // As many pages as fit with their entries.
  std::uint64_t together = std::min(kMaxLogEntries, staging_.size() / page_bytes);
  while (together > 1 && log_record_head(together) + round_up(together * page_bytes, kLogBlock) > staging_.size()) --together;
  for (std::size_t first = 0; first < pages.size(); first += together) {
    const std::uint64_t count = std::min<std::uint64_t>(together, pages.size() - first);
    const std::uint64_t head = log_record_head(count);
    const std::uint64_t bytes = head + round_up(count * page_bytes, kLogBlock);
    wait_for_room(bytes);
    check_usable();
    std::memset(staging_.data(), 0, head);
    std::memset(staging_.data() + head + count * page_bytes, 0, bytes - head - count * page_bytes);
    auto* const entries = reinterpret_cast<LogEntry*>(staging_.data() + sizeof(LogRecordHeader));
    compute_.parallel_for(count, std::max<std::uint64_t>(1, kEncodeGrain / page_bytes),
                          [&](std::uint64_t begin, std::uint64_t end) {
                            for (std::uint64_t i = begin; i < end; ++i)
                              entries[i] = {pages[first + i], encode(first + i, staging_.data() + head + i * page_bytes), 0};
                          });
    append_record({.kind = static_cast<std::uint32_t>(LogRecordKind::kPages),
                   .bytes = bytes,
                   .table = table,
                   .page_bytes = page_bytes,
                   .count = count});
    if (appended) appended(first, count);
  }
}

void RedoLog::append_in_place(std::uint32_t table, std::span<const LogEntry> pages) {
  const std::lock_guard appending(append_mutex_);
  const std::uint64_t together = (staging_.size() - sizeof(LogRecordHeader)) / sizeof(LogEntry);
  for (std::size_t first = 0; first < pages.size(); first += together) {
    const auto some = pages.subspan(first, std::min<std::size_t>({together, kMaxLogEntries, pages.size() - first}));
    const std::uint64_t bytes = log_record_head(some.size());
    wait_for_room(bytes);
    check_usable();
    std::memset(staging_.data(), 0, bytes);
    std::memcpy(staging_.data() + sizeof(LogRecordHeader), some.data(), some.size_bytes());
    append_record(
        {.kind = static_cast<std::uint32_t>(LogRecordKind::kInPlace), .bytes = bytes, .table = table, .count = some.size()});
  }
}

void RedoLog::append_record(LogRecordHeader header) {
  {
    const std::lock_guard lock(mutex_);
    header.id = header_.id;
    header.position = head_;
    header.commit = next_commit_;
  }
  seal_log_record(header, staging_.data(), header.count * sizeof(LogEntry));
  write_record(header.position, staging_, header.bytes);
  const std::span entries(reinterpret_cast<const LogEntry*>(staging_.data() + sizeof header), header.count);
  publish({.header = header, .entries = entries, .text = {}}, header.bytes);
}

void RedoLog::append_header(std::uint32_t table, std::span<const std::byte> header) {
  if (header.size() != kLogBlock)
    throw InvalidArgument(fmt::format("a .npy header of {} bytes; the log takes {}", header.size(), kLogBlock));
  append(table, std::span(&kHeaderPage, 1), kLogBlock, [&](std::size_t, std::byte* out) {
    std::memcpy(out, header.data(), header.size());
    return page_checksum(header);
  });
}

LogTarget* RedoLog::target_of(std::uint32_t table) const {
  const std::lock_guard lock(mutex_);
  const auto found = targets_.find(table);
  return found == targets_.end() ? nullptr : found->second;
}

bool RedoLog::uncommitted(std::uint32_t table) const {
  const std::lock_guard lock(mutex_);
  return touched_.contains(table);
}

std::uint64_t RedoLog::uncommitted_bytes() const {
  const std::lock_guard lock(mutex_);
  return head_ - epoch_;
}

bool RedoLog::index_is_full(std::uint64_t dirty_pages) const {
  const std::lock_guard lock(mutex_);
  return appended_ + dirty_pages > index_pages() / 2 && index_may_overflow();
}

std::uint64_t RedoLog::pages_at_once(std::uint64_t page_bytes) const noexcept {
  return std::max<std::uint64_t>(1, options_.limit / 4 / std::max(page_bytes, entry_bytes_));
}

bool RedoLog::is_long() const {
  const std::lock_guard lock(mutex_);
  return head_ > kLongBytes && head_ / kLongShare > options_.limit;
}

RedoLog::Pending RedoLog::begin_commit(std::uint64_t number, std::string manifest) {
  if (manifest.size() > kMaxLogText)
    throw FormatError(file_.path(),
                      fmt::format("a manifest of {} bytes; a commit has room for {}", manifest.size(), kMaxLogText));
  std::unique_lock<std::mutex> appending;
  for (;;) {
    settle_id();
    appending = std::unique_lock(append_mutex_);
    const std::lock_guard lock(mutex_);
    if (!id_in_doubt_) break;  // from here on the log does not begin anew
    appending.unlock();
  }
  check_usable();
  Pending pending;
  pending.number = number;
  pending.manifest = std::move(manifest);
  pending.bytes = round_up(sizeof(LogRecordHeader) + pending.manifest.size(), kLogBlock);
  pending.record = AlignedBuffer(pending.bytes);
  std::memset(pending.record.data(), 0, pending.bytes);
  {
    const std::lock_guard lock(mutex_);
    pending.position = head_;
  }
  // Its blocks are taken now, while a full disk is no disaster.
  write_record(pending.position, pending.record, pending.bytes);
  LogRecordHeader header{.kind = static_cast<std::uint32_t>(LogRecordKind::kCommit),
                         .position = pending.position,
                         .bytes = pending.bytes,
                         .commit = number,
                         .count = pending.manifest.size()};
  std::memcpy(pending.record.data() + sizeof header, pending.manifest.data(), pending.manifest.size());
  const std::lock_guard lock(mutex_);
  header.id = pending.id = header_.id;
  seal_log_record(header, pending.record.data(), pending.manifest.size());
  head_ += pending.bytes;
  epoch_ = head_;
  next_commit_ = number + 1;
  committing_ = true;
  appended_ = 0;
  touched_.clear();
  pending.in_place = std::exchange(in_place_, {});
  return pending;
}

void RedoLog::finish_commit(Pending pending) {
  try {
    for (const std::uint32_t table : pending.in_place)
      if (LogTarget* const target = target_of(table); target != nullptr) target->sync_data();
    file_.sync();
    // Only now: whoever finds the commit finds all of it.
    const IoPiece piece{pending.position, pending.record.data(), pending.bytes, pending.bytes};
    io_.write({&piece, 1});
    file_.sync();
  } catch (const std::exception& error) {
    // Whatever it was: what comes behind a record that is not there would never be found.
    give_up(error.what());
    throw;
  }
  try {
    // After the sync: it is never of a commit that is not there. Before anybody can begin the log anew, or commit.
    write_log_mark(file_, {.id = pending.id, .commit = pending.number, .end = pending.position + pending.bytes});
  } catch (const IoError&) {
    // The commit is done. Only, if the log is cut, this one is not missed.
  }
  const std::lock_guard lock(mutex_);
  committing_ = false;
  changed_.notify_all();
  committed_ = pending.position + pending.bytes;
  commit_ = pending.number;
  manifest_ = std::move(pending.manifest);
  ++counts_.commits;
  counts_.syncs += 2;
  if (applying_is_due()) start_applying();
}

void RedoLog::roll_back() {
  const std::lock_guard appending(append_mutex_);
  const std::lock_guard lock(mutex_);
  index_.forget_from(epoch_);
  head_ = epoch_;
  appended_ = 0;
  touched_.clear();
  in_place_.clear();
  entries_ = index_.size();
  count_once();
}

void RedoLog::start_applying() {
  if (applying_ || stop_) return;
  applying_ = applier_.add([this] {
    std::exception_ptr failure;
    try {
      apply_once(/*in_background=*/true, {});
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      applying_ = false;
      apply_failure_ = failure;
      ++applies_;
    }
    changed_.notify_all();
  });
}

void RedoLog::apply_all(const Progress& progress) {
  while (apply_once(/*in_background=*/false, progress)) {
  }
  const auto applying = pause();
  // Whoever needs the log to begin anew keeps others from appending. One who appends may wait for applying, which is paused here.
  if (const std::unique_lock appending(append_mutex_, std::try_to_lock); appending.owns_lock()) begin_anew();
  check_usable();
}

std::optional<RedoLog::Applied> RedoLog::committed_now() {
  std::unique_lock lock(mutex_);
  // The index has two versions of a page. While a commit is on its way they may be its own and a later one: that of the last
  // commit is not to be found then.
  changed_.wait(lock, [&] { return !committing_ || stop_; });
  if (committed_ == header_.tail || stop_ || !failure_.empty()) return std::nullopt;
  Applied work{.tail = header_.tail, .end = committed_, .commit = commit_, .manifest = manifest_, .items = {}};
  work.items.reserve(index_.size());
  index_.for_each([&](const LoggedPage& logged) {
    const LoggedVersion& version = logged.newest.position < work.end ? logged.newest : logged.before;
    if (version.there() && version.position < work.end)
      work.items.push_back({logged.page, version.position, logged.table, version.checksum, version.in_place});
  });
  lock.unlock();
  std::sort(work.items.begin(), work.items.end(),
            [](const Item& x, const Item& y) { return std::pair(x.table, x.page) < std::pair(y.table, y.page); });
  return work;
}

bool RedoLog::apply_once(bool in_background, const Progress& progress) {
  const auto applying = in_background ? Pause(apply_mutex_) : pause();
  const auto work = committed_now();
  if (!work) return false;
  check_targets(work->items);
  LogHeader header = header_;
  ++header.serial;
  header.applying = std::max(header.applying, work->commit);
  set_header(header);
  if (!apply_items(work->items, work->commit, in_background, progress)) return false;
  save_manifest_(work->manifest);
  forget_applied(*work);
  // Where nobody appends just now and nothing is left, the log begins anew.
  if (const std::unique_lock appending(append_mutex_, std::try_to_lock); appending.owns_lock()) begin_anew();
  return true;
}

void RedoLog::check_targets(std::span<const Item> items) const {
  for (std::size_t i = 0; i < items.size(); ++i)
    if ((i == 0 || items[i].table != items[i - 1].table) && target_of(items[i].table) == nullptr)
      throw Error(fmt::format("{}: has pages of table {}, which could not be opened", printable(file_.path()), items[i].table));
}

bool RedoLog::apply_items(std::span<const Item> items, std::uint64_t commit, bool in_background, const Progress& progress) {
  std::uint64_t done = 0;
  for (std::size_t first = 0; first < items.size();) {
    std::size_t end = first + 1;
    while (end < items.size() && items[end].table == items[first].table) ++end;
    LogTarget& target = *target_of(items[first].table);
    apply_table(target, items.subspan(first, end - first), in_background, [&](std::uint64_t pages) {
      done += pages;
      if (progress) progress(done, items.size());
    });
    if (stop_ && in_background) return false;
    target.sync_applied(commit);
    first = end;
  }
  return true;
}

void RedoLog::forget_applied(const Applied& work) {
  {
    // Whoever looked into the index before has read what it named; whoever looks from here on reads the files.
    const std::lock_guard cutting(cut_);
    const std::lock_guard lock(mutex_);
    index_.forget_before(work.end);
    entries_ = index_.size();
    count_once();
    counts_.applied_pages += work.items.size();
  }
  LogHeader header = header_;
  ++header.serial;
  header.tail = work.end;
  header.applied = std::max(work.commit, least_applied_);
  header.applying = std::max(header.applying, header.applied);
  set_header(header);
  {
    const std::lock_guard lock(mutex_);
    if (commit_ == work.commit) manifest_.clear();
  }
  changed_.notify_all();
  const std::uint64_t bytes = work.end - work.tail;
  if (file_.ops().deallocate(file_.fd(), static_cast<off_t>(work.tail), static_cast<off_t>(bytes)) != 0 && errno != EOPNOTSUPP &&
      errno != ENOSYS)
    throw IoError(errno, "fallocate", file_.path(), work.tail, bytes);
}

// Some of the pages that are being applied, on their way from the log to a table's file.
struct RedoLog::Slice {
  AlignedBuffer memory;
  std::vector<IoPiece> pieces;
  std::vector<LogTarget::Page> pages;
  std::size_t items = 0;   // that it stands for; 0: none
  std::future<void> read;  // ends when they are in memory
  ~Slice() {
    if (read.valid()) read.wait();
  }
};

void RedoLog::read_slice(LogTarget& target, std::span<const Item> items, Slice& slice) {
  const std::uint64_t page_bytes = target.page_bytes();
  slice.items = items.size();
  slice.pieces.clear();
  slice.pages.clear();
  for (const Item& item : items) {
    if (item.in_place) {
      target.apply_in_place(item.page, item.checksum);
    } else if (item.page == kHeaderPage) {
      std::vector<std::byte> bytes(kLogBlock);
      file_.read(item.position, bytes);
      const bool whole = page_checksum(bytes) == item.checksum;
      if (!whole && !options_.accept_damage)
        throw CorruptError(
            fmt::format("{}: the .npy header at byte {} does not match its checksum", printable(file_.path()), item.position));
      if (whole) target.apply_header(bytes);  // else who opens the table makes it anew
    } else {
      std::byte* const slot = slice.memory.data() + slice.pages.size() * page_bytes;
      slice.pages.push_back({item.page, slot, item.checksum});
      slice.pieces.push_back({item.position, slot, page_bytes, page_bytes});
    }
  }
  std::sort(slice.pieces.begin(), slice.pieces.end(), [](const IoPiece& x, const IoPiece& y) { return x.offset < y.offset; });
  const auto task = std::make_shared<std::packaged_task<void()>>([this, &slice] { io_.read(slice.pieces); });
  slice.read = task->get_future();
  if (!reader_.add([task] { (*task)(); })) (*task)();  // no thread to be had
}

void RedoLog::apply_table(LogTarget& target, std::span<const Item> items, bool in_background,
                          const std::function<void(std::uint64_t)>& step) {
  const std::uint64_t page_bytes = target.page_bytes();
  const std::uint64_t together = std::max<std::uint64_t>(1, std::max(kLeastStaging, options_.transfer_bytes) / page_bytes);
  // Two halves take turns: while one is written to the file, the other is read from the log. Or the disk would do one thing at a
  // time, and wait twice in each round for the last of it.
  std::array<Slice, 2> slices;
  const std::size_t turns = together > 1 && items.size() > 1 ? 2 : 1;
  const std::size_t most = std::min<std::uint64_t>(together / turns, items.size());
  for (std::size_t i = 0; i < turns; ++i)
    slices[i].memory = AlignedBuffer(std::max(checked_mul(most, page_bytes, "bytes of pages"), kLogBlock));
  std::size_t begun = 0;
  const auto read_next = [&](Slice& slice) {
    const std::size_t count = std::min(most, items.size() - begun);
    slice.items = 0;
    if (count == 0) return;
    read_slice(target, items.subspan(begun, count), slice);
    begun += count;
  };
  read_next(slices[0]);
  for (std::size_t turn = 0; slices[turn].items != 0 && !(stop_ && in_background); turn = (turn + 1) % turns) {
    const auto begin = std::chrono::steady_clock::now();
    Slice& slice = slices[turn];
    slice.read.get();
    if (turns == 2) read_next(slices[1 - turn]);
    target.apply(slice.pages);
    step(slice.items);
    if (turns == 1) read_next(slice);
    if (!in_background) continue;
    // The disk is the batches' as well, while there is room in the log.
    std::unique_lock lock(mutex_);
    const auto hurried = [&] { return stop_.load() || waiting_ != 0 || used() > options_.limit / 8 * 7; };
    changed_.wait_for(lock, (std::chrono::steady_clock::now() - begin) * kRest, hurried);
  }
}

void RedoLog::set_header(const LogHeader& header) {
  try {
    write_log_header(file_, header);
  } catch (const IoError& error) {
    // A full disk (of a file system that never writes in place) is no sync that failed: the other slot has the header before, and
    // the next one goes to this slot, whatever is in it now.
    if (error.error_number() == ENOSPC || error.error_number() == EDQUOT) throw;
    fail(error);
  }
  try {
    file_.sync();
  } catch (const IoError& error) {
    fail(error);
  }
  const std::lock_guard lock(mutex_);
  header_ = header;
  id_in_doubt_ = false;
}

void RedoLog::settle_id() {
  {
    const std::lock_guard lock(mutex_);
    if (!id_in_doubt_) return;
  }
  const auto applying = pause();
  LogHeader header = header_;
  ++header.serial;
  set_header(header);
}

void RedoLog::begin_anew() {
  LogHeader header = header_;
  {
    const std::lock_guard lock(mutex_);
    if (head_ != header.tail || !failure_.empty()) return;
  }
  if (header.tail == kLogStart && file_bytes_ <= kLogStart && !tells_of_lack_) return;
  header.applying = header.applied;
  ++header.serial;
  ++header.id;
  header.tail = kLogStart;
  {
    const std::lock_guard cutting(cut_);
    try {
      set_header(header);
    } catch (const IoError&) {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) throw;
      // It begins anew another time. What is in the slot may be the header of the next life, for which all records of this one
      // are nothing: it has to be overwritten before a commit is promised.
      id_in_doubt_ = true;
      return;
    }
    const std::lock_guard lock(mutex_);
    head_ = epoch_ = committed_ = kLogStart;
    tells_of_lack_ = false;
  }
  try {
    file_.resize(kLogStart);
    file_bytes_ = kLogStart;
  } catch (const IoError&) {
    // What is left are records of another life of the log.
  }
}

void RedoLog::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  applier_.stop();
}

void RedoLog::reading(const std::function<void()>& body) {
  const std::shared_lock lock(cut_);
  body();
}

std::optional<LoggedVersion> RedoLog::find(std::uint32_t table, std::uint64_t page) const {
  if (empty()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto logged = index_.find(table, page);
  return logged ? std::optional(logged->newest) : std::nullopt;
}

void RedoLog::find(std::uint32_t table, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto logged = index_.find(table, pages[i]);
    out[i] = logged ? logged->newest : LoggedVersion{};
  }
}

void RedoLog::for_each(std::uint32_t table, const std::function<void(std::uint64_t, const LoggedVersion&)>& body) const {
  const std::lock_guard lock(mutex_);
  index_.for_each([&](const LoggedPage& logged) {
    if (logged.table == table && logged.page != kHeaderPage) body(logged.page, logged.newest);
  });
}

RedoLog::Statistics RedoLog::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics statistics = counts_;
  statistics.log_bytes = head_ - header_.tail;
  statistics.memory_bytes = index_.memory_bytes() + staging_.size();
  statistics.pages = index_.size();
  return statistics;
}

}  // namespace embermap
