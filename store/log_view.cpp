#include "store/log_view.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.hpp"
#include "store/manifest.hpp"

namespace embermap {
namespace {
constexpr int kMostLooks = 100;  // at a log that changes meanwhile
}

LogView::LogView(File file, ThreadPool& io, const PageIoOptions& options)
    : file_{std::move(file)}, io_{file_, io, options}, applied_to_{kLogStart} {}

std::unique_ptr<LogView> LogView::open(const std::filesystem::path& path, ThreadPool& io, const PageIoOptions& options,
                                       FileOps& ops) {
  File file;
  try {
    file = File::open(path, File::Mode::kRead, ops);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) return nullptr;
    throw;
  }
  if (!read_log_header(file)) return nullptr;  // just being made
  std::unique_ptr<LogView> view(new LogView(std::move(file), io, options));
  std::string lack;
  std::uint64_t end = 0, serial = 0;
  for (int looks = 1;; ++looks) {
    const std::uint64_t bytes = view->file_.size();
    try {
      view->load();
      const bool still = view->unchanged() && view->file_.size() == bytes;
      // Where the log went on meanwhile, what is missing may have come, or have been applied: it is believed when a second look
      // meets the same.
      if (view->lack_.empty() || (still && view->lack_ == lack && view->end_ == end && view->header_.serial == serial))
        return view;
      if (looks == kMostLooks) throw StaleError(fmt::format("{} changes all the time", printable(path)));
      lack = view->lack_;
      end = view->end_;
      serial = view->header_.serial;
    } catch (const StaleError&) {
      throw;
    } catch (const Error&) {
      // A log that begins anew becomes shorter under whoever walks through it, also after its header has said so.
      if (looks == kMostLooks || (view->unchanged() && view->file_.size() == bytes)) throw;
    }
  }
}

void LogView::load() {
  index_.clear();
  manifest_.clear();
  header_ = header_now();
  applied_to_ = header_.tail;
  commit_ = first_ = header_.applied;
  // The header's serial moves on where applying begins and where it ends.
  files_known_.clear();
  if (header_.applying == header_.applied) {
    const struct stat status = file_.status();
    files_known_ = {status.st_ino, header_.id, header_.serial};
  }
  store_ = header_.store;
  const auto mark = read_log_mark(file_);  // before the walk, which then meets the commit that it speaks of
  std::uint64_t epoch = header_.tail;
  std::optional<std::uint64_t> last;
  end_ = walk_log(file_, header_, [&](const LogRecord& record) {
    if (record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit)) {
      epoch = record.end();
      commit_ = record.header.commit;
      last = commit_;
      manifest_ = record.text;
      return;
    }
    const bool in_place = record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kInPlace);
    for (std::size_t i = 0; i < record.entries.size(); ++i)
      index_.put(static_cast<std::uint32_t>(record.header.table), record.entries[i].page,
                 {in_place ? record.header.position : record.data(i), record.entries[i].checksum, in_place}, epoch);
  });
  index_.forget_from(epoch);
  bytes_ = epoch - header_.tail;
  lack_ = what_log_lacks(file_, header_, mark, {.position = end_, .last_commit = last});
}

void LogView::check_moment(std::uint64_t manifest) const {
  if (manifest <= commit_) return check_log_moment(file_.path(), first_, commit_, manifest);
  // The log has a commit before the manifest's file: if a writer has come on since, it does by now.
  std::uint64_t last = 0;
  try {
    const File file = File::open(file_.path(), File::Mode::kRead, file_.ops());
    const auto header = read_log_header(file);
    if (!header) return;
    last = header->applied;
    walk_log(file, *header, [&](const LogRecord& record) {
      if (record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit)) last = record.header.commit;
    });
    if (read_log_header(file) != header) return;
  } catch (const Error&) {  // it is gone, or just beginning anew: the caller looks again
    return;
  }
  check_log_moment(file_.path(), 0, last, manifest);
}

LogHeader LogView::header_now() const {
  const auto header = read_log_header(file_);
  struct stat status = file_.status();
  // A log that was removed is that of a store whose writer keeps none any more.
  if (!header || status.st_nlink == 0)
    throw StaleError(fmt::format("{} is gone: the store was opened without a log since this reader looked; refresh() it",
                                 printable(file_.path())));
  return *header;
}

bool LogView::unchanged() const {
  const std::lock_guard lock(mutex_);
  const auto now = read_log_header(file_);
  return now && now->serial == header_.serial;
}

void LogView::follow(const LogHeader& now) {
  const std::lock_guard lock(mutex_);
  if (now.applying > commit_)
    throw StaleError(fmt::format("{}: the writer has moved the store on to commit {}; this reader is at commit {}: refresh() it",
                                 printable(file_.path()), now.applying, commit_));
  if (now.id != header_.id)
    applied_to_ = LoggedVersion::kNone;  // the life of the log that the index speaks of is over
  else if (applied_to_ != LoggedVersion::kNone)
    applied_to_ = now.tail;
  header_ = now;
}

void LogView::reading(const std::function<void()>& body) {
  for (;;) {
    std::uint64_t serial = 0;
    {
      const std::lock_guard lock(mutex_);
      serial = header_.serial;
    }
    std::exception_ptr failure;
    try {
      body();
    } catch (const Error&) {  // of what changed underneath, perhaps
      failure = std::current_exception();
    }
    const LogHeader now = header_now();
    if (now.serial == serial) {
      if (failure != nullptr) std::rethrow_exception(failure);
      return;
    }
    follow(now);
  }
}

LoggedVersion LogView::place(const LoggedVersion& version) const {
  LoggedVersion now = version;
  const std::lock_guard lock(mutex_);
  if (now.there() && now.position < applied_to_) now.in_place = true;
  return now;
}

std::optional<LoggedVersion> LogView::find(std::uint32_t table, std::uint64_t page) const {
  const auto logged = index_.find(table, page);
  return logged ? std::optional(place(logged->newest)) : std::nullopt;
}

void LogView::find(std::uint32_t table, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const auto logged = index_.find(table, pages[i]);
    out[i] = logged ? place(logged->newest) : LoggedVersion{};
  }
}

void LogView::for_each(std::uint32_t table, const std::function<void(std::uint64_t, const LoggedVersion&)>& body) const {
  index_.for_each([&](const LoggedPage& logged) {
    if (logged.table == table && logged.page != kHeaderPage) body(logged.page, logged.newest);
  });
}

UnloggedView::UnloggedView(std::filesystem::path store)
    : log_{store / kLogName}, mark_{store / "UNCOMMITTED"}, manifest_{store / kManifestName}, before_{traces()} {}

UnloggedView::Trace UnloggedView::trace_of(const std::filesystem::path& file) noexcept {
  struct stat status {};
  if (::lstat(file.c_str(), &status) != 0) return {};
  return {status.st_ino, static_cast<std::uint64_t>(status.st_size), status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

std::array<UnloggedView::Trace, 3> UnloggedView::traces() const noexcept {
  return {trace_of(log_), trace_of(mark_), trace_of(manifest_)};
}

bool UnloggedView::unchanged() const noexcept { return traces() == before_; }

void UnloggedView::reading(const std::function<void()>& body) {
  std::exception_ptr failure;
  try {
    body();
  } catch (const Error&) {
    failure = std::current_exception();
  }
  // A log is made, or the mark, before the first page is written, and the manifest is replaced after the last one.
  if (!unchanged())
    throw StaleError(fmt::format("store {}: a writer has opened or changed it since this reader looked; refresh() it",
                                 printable(manifest_.parent_path())));
  if (failure != nullptr) std::rethrow_exception(failure);
}

std::vector<std::uint64_t> UnloggedView::files_known() const {
  std::vector<std::uint64_t> known;
  for (const Trace& trace : before_)
    known.insert(known.end(), {trace.inode, trace.bytes, static_cast<std::uint64_t>(trace.seconds),
                               static_cast<std::uint64_t>(trace.nanoseconds)});
  return known;
}

void UnloggedView::find(std::uint32_t, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const {
  std::fill_n(out.begin(), pages.size(), LoggedVersion{});
}

}  // namespace embermap
