#include "store/commit_history.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "io/checksum.hpp"
#include "store/adoption.hpp"
#include "store/log_format.hpp"
#include "store/small_json.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kMostFileBytes = 4 * kHistoryBytes;  // of a file of ours: it is replaced where it would be longer
constexpr std::string_view kChecksumKey = "\"checksum\"";
constexpr int kMostLooks = 200;
constexpr int kDeepest = 32;  // nesting of a line; a note may be less deep

std::string checksum_of(std::string_view text) { return fmt::format("{:016x}", checksum64(std::as_bytes(std::span(text)))); }

std::string line_of(const CommitInfo& commit) {
  // A time from a file that is not ours may be any text.
  const std::string time = nlohmann::json(commit.time).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string text = fmt::format(R"({{"commit": {}, "time": {}, )", commit.number, time);
  if (!commit.note.empty()) text += fmt::format(R"("note": {}, )", commit.note);
  return text + fmt::format("{}: \"{}\"}}\n", kChecksumKey, checksum_of(text));
}

std::optional<CommitInfo> parse_line(std::string_view line) {
  const std::size_t end = line.rfind(kChecksumKey);
  if (end == std::string_view::npos ||
      line.substr(end) != fmt::format("{}: \"{}\"}}", kChecksumKey, checksum_of(line.substr(0, end))))
    return std::nullopt;
  const auto found = parse_small_json(line, kDeepest);
  if (!found || !found->is_object()) return std::nullopt;
  const nlohmann::json& json = *found;
  if (!json.contains("commit") || !json["commit"].is_number_unsigned() || !json.contains("time") || !json["time"].is_string())
    return std::nullopt;
  CommitInfo commit{.number = json["commit"], .time = json["time"], .note = {}};
  if (!json.contains("note")) return commit;
  try {
    commit.note = note_text(json["note"].dump());
  } catch (const InvalidArgument&) {  // none that a commit takes
    return std::nullopt;
  }
  return commit;
}

CommitInfo info_of(const Manifest& manifest) { return {.number = manifest.commit, .time = manifest.time, .note = manifest.note}; }

// What a file holds: its commits, and whether it holds anything else.
struct Found {
  std::map<std::uint64_t, CommitInfo> commits;
  std::uint64_t bytes = 0, lines = 0;
  bool others = false;
};

Found read_file(const std::filesystem::path& path, std::uint64_t last, FileOps& ops) {
  Found found;
  check_own_file(path);
  std::string text;
  try {
    text = read_text(path, kMostFileBytes + kHistoryBytes, ops);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) return found;
    throw;
  } catch (const FormatError&) {  // longer than any of ours
    found.bytes = kMostFileBytes;
    found.others = true;
    return found;
  }
  found.bytes = text.size();
  for (std::size_t at = 0; at < text.size(); ++found.lines) {
    const std::size_t end = text.find('\n', at);
    const auto commit = end == std::string::npos ? std::nullopt : parse_line(std::string_view(text).substr(at, end - at));
    const bool ours =
        commit && commit->number <= last && (found.commits.empty() || commit->number > found.commits.rbegin()->first);
    if (ours)
      found.commits.emplace(commit->number, *commit);
    else
      found.others = true;
    at = end == std::string::npos ? text.size() : end + 1;
  }
  return found;
}

// The last of these that are kept.
std::vector<CommitInfo> newest(const std::map<std::uint64_t, CommitInfo>& commits) {
  std::vector<CommitInfo> kept;
  std::uint64_t bytes = 0;
  for (auto at = commits.rbegin(); at != commits.rend() && kept.size() < kHistoryCommits; ++at) {
    bytes += line_of(at->second).size();
    if (bytes > kHistoryBytes && !kept.empty()) break;
    kept.push_back(at->second);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

// What the log and the manifest know of commits up to the manifest's takes the place of what the file has of them: that may have
// been brought back from another copy of the store. A commit of before there were times knows nothing.
void put_known(std::map<std::uint64_t, CommitInfo>& commits, std::span<const CommitInfo> logged, const Manifest& manifest) {
  const auto put = [&](const CommitInfo& commit) {
    if (commit.number > manifest.commit || commit.number == 0) return;
    if (commit.time.empty())
      commits.emplace(commit.number, commit);
    else
      commits.insert_or_assign(commit.number, commit);
  };
  for (const CommitInfo& commit : logged) put(commit);
  put(info_of(manifest));
}

}  // namespace

std::vector<CommitInfo> commits_in_log(const std::filesystem::path& log, FileOps& ops) {
  File file;
  try {
    file = File::open(log, File::Mode::kRead, ops);
  } catch (const IoError& error) {
    if (error.error_number() == ENOENT) return {};
    throw;
  }
  // The writer may be making room in what is read: once more then.
  for (int look = 1;; ++look) {
    const std::uint64_t bytes = file.size();
    const auto header = read_log_header(file);
    if (!header) return {};
    bool whole = true;
    struct Text {
      std::uint64_t position, bytes;
    };
    std::deque<Text> texts;
    std::vector<CommitInfo> commits;
    try {
      walk_log(file, *header, [&](const LogRecord& record) {
        if (record.header.kind != static_cast<std::uint32_t>(LogRecordKind::kCommit)) return;
        texts.push_back({record.header.position + sizeof record.header, record.text.size()});
        if (texts.size() > kHistoryCommits) texts.pop_front();
      });
      for (const Text& text : texts) {
        std::string manifest(text.bytes, '\0');
        file.read(text.position, std::as_writable_bytes(std::span(manifest)));
        commits.push_back(info_of(Manifest::parse(manifest, log)));
      }
    } catch (const FormatError&) {
      // A log that begins anew is cut after its header has said so.
      if (read_log_header(file) == header && file.size() == bytes) throw;
      whole = false;
    }
    if (whole && read_log_header(file) == header) return commits;
    if (look == kMostLooks) throw StaleError(fmt::format("{} changes all the time", printable(log)));
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(look, 50)));
  }
}

std::string history_text(std::span<const CommitInfo> commits) {
  std::string text;
  for (const CommitInfo& commit : commits) text += line_of(commit);
  return text;
}

std::vector<CommitInfo> read_history(const std::filesystem::path& store, const Manifest& manifest, FileOps& ops) {
  // The log first: what leaves it afterwards is in the file before.
  const std::vector<CommitInfo> logged = commits_in_log(store / kLogName, ops);
  Found found = read_file(store / kHistoryName, manifest.commit, ops);
  put_known(found.commits, logged, manifest);
  return newest(found.commits);
}

void CommitHistory::load(const Manifest& manifest, std::span<const CommitInfo> logged) {
  Found found = read_file(file_, manifest.commit, ops_);
  const std::lock_guard lock(mutex_);
  file_bytes_ = found.bytes;
  file_lines_ = found.lines;
  stale_ = found.others;
  written_ = found.commits.empty() ? 0 : found.commits.rbegin()->first;
  const auto in_file = found.commits;
  put_known(found.commits, logged, manifest);
  // What the file lacks in the middle, or has of another history, has to be put right.
  const auto end = found.commits.upper_bound(written_);
  stale_ = stale_ || !std::equal(in_file.begin(), in_file.end(), found.commits.begin(), end);
  for (const CommitInfo& commit : newest(found.commits)) push(commit);
}

void CommitHistory::push(CommitInfo commit) {
  std::string text = line_of(commit);
  bytes_ += text.size();
  lines_.push_back({std::move(commit), std::move(text)});
  while (lines_.size() > kHistoryCommits || (bytes_ > kHistoryBytes && lines_.size() > 1)) {
    bytes_ -= lines_.front().text.size();
    lines_.pop_front();
  }
}

void CommitHistory::take_back_from(std::uint64_t commit) {
  for (; !lines_.empty() && lines_.back().info.number >= commit; lines_.pop_back()) bytes_ -= lines_.back().text.size();
  if (written_ < commit) return;
  written_ = commit - 1;
  stale_ = true;
}

void CommitHistory::add(CommitInfo commit) {
  const std::lock_guard lock(mutex_);
  take_back_from(commit.number);
  push(std::move(commit));
}

void CommitHistory::take_back(std::uint64_t commit) {
  const std::lock_guard lock(mutex_);
  take_back_from(commit);
}

void CommitHistory::write(std::uint64_t commit) {
  const std::lock_guard lock(mutex_);
  std::string text;
  std::uint64_t lines = 0, last = written_;
  for (const Line& line : lines_) {
    if (line.info.number <= written_ || line.info.number > commit) continue;
    text += line.text;
    last = line.info.number;
    ++lines;
  }
  if (lines == 0) return;
  if (stale_ || file_bytes_ == 0 || file_bytes_ + text.size() > kMostFileBytes || file_lines_ + lines > 4 * kHistoryCommits) {
    rewrite(commit);
  } else {
    const File file = File::open(file_, File::Mode::kReadWrite, ops_);
    stale_ = true;  // if it fails: who knows what is there then
    file.write(file_bytes_, text);
    file.sync();
    stale_ = false;
    file_bytes_ += text.size();
    file_lines_ += lines;
  }
  written_ = last;
}

void CommitHistory::rewrite(std::uint64_t commit) {
  std::string text;
  std::uint64_t lines = 0;
  for (const Line& line : lines_) {
    if (line.info.number > commit) break;
    text += line.text;
    ++lines;
  }
  stale_ = true;
  replace_file(file_, text, ops_);
  stale_ = false;
  file_bytes_ = text.size();
  file_lines_ = lines;
}

std::vector<CommitInfo> CommitHistory::list(std::uint64_t commit) const {
  const std::lock_guard lock(mutex_);
  std::vector<CommitInfo> commits;
  for (const Line& line : lines_)
    if (line.info.number <= commit) commits.push_back(line.info);
  return commits;
}

}  // namespace embermap
