// commits.jsonl: the last commits of a store, one a line, the newest last. Private to store/.
//
//  {"commit": 12, "time": "2031-05-06T07:08:09.123Z", "note": {"step": 1000}, "checksum": "0123456789abcdef"}
//
// "note" is absent where the commit has none. "checksum" is the XXH3-64 of the line up to it, in hexadecimal. A line that is not
// whole is none. The line of a commit is durable before a manifest of that commit, or of a later one, replaces embermap.json; the
// commits behind it are those whose records the redo log has. So the two together have every commit up to the last one, however a
// session ended, and a commit to the log writes nothing here.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.hpp"
#include "store/manifest.hpp"
#include "store/store.hpp"

namespace embermap {

inline constexpr std::string_view kHistoryName = "commits.jsonl";
inline constexpr std::size_t kHistoryCommits = 1000;        // that are kept
inline constexpr std::uint64_t kHistoryBytes = 1ULL << 20;  // of lines that are kept; the last commit always is

// The last ones that the log of a store has records of, as far as they go; ascending. Throws FormatError, IoError.
std::vector<CommitInfo> commits_in_log(const std::filesystem::path& log, FileOps& ops);

// The text of commits.jsonl for these commits.
std::string history_text(std::span<const CommitInfo> commits);

// For a reader: the last commits up to the one of `manifest`, whatever a writer does meanwhile.
std::vector<CommitInfo> read_history(const std::filesystem::path& store, const Manifest& manifest, FileOps& ops);

// The writer's. Thread safety: all members may be called from several threads.
class CommitHistory {
 public:
  CommitHistory(std::filesystem::path store, FileOps& ops) : file_{std::move(store) / kHistoryName}, ops_{ops} {}
  // What the file has, what `logged` has beside it, and the commit of `manifest`, up to which all is taken.
  void load(const Manifest& manifest, std::span<const CommitInfo> logged);
  // A commit that is about to be; later ones never were.
  void add(CommitInfo commit);
  // It has not become one.
  void take_back(std::uint64_t commit);
  // Makes the lines of all commits up to this one durable. Throws IoError; then nothing is lost, and it may be tried again.
  void write(std::uint64_t commit);
  std::vector<CommitInfo> list(std::uint64_t commit) const;  // up to this one

 private:
  struct Line {
    CommitInfo info;
    std::string text;
  };
  void push(CommitInfo commit);
  void take_back_from(std::uint64_t commit);
  void rewrite(std::uint64_t commit);

  const std::filesystem::path file_;
  FileOps& ops_;
  mutable std::mutex mutex_;
  std::deque<Line> lines_;                         // ascending
  std::uint64_t bytes_ = 0;                        // of their texts
  std::uint64_t written_ = 0;                      // lines up to this commit are in the file
  std::uint64_t file_bytes_ = 0, file_lines_ = 0;  // of the file
  bool stale_ = false;                             // the file has what is no line of ours: it is replaced, not appended to
};

}  // namespace embermap
