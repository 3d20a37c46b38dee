// commits.jsonl: as it is, and with each line's checksum put right, so that mutations get past it. 1 byte for the last commit.
#include "store/commit_history.hpp"

#include <string>
#include <vector>

#include "io/checksum.hpp"
#include "store/manifest.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::string_view kKey = "\"checksum\"";

std::string sealed(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string line(text.substr(0, end));
    text.remove_prefix(std::min(text.size(), end + 1));
    if (const std::size_t key = line.rfind(kKey); key != std::string::npos) {
      line.resize(key);
      std::uint64_t sum = checksum64(std::as_bytes(std::span(line)));
      std::string digits(16, '0');
      for (std::size_t i = 16; i-- > 0; sum >>= 4) digits[i] = "0123456789abcdef"[sum & 15];
      line += std::string(kKey) + ": \"" + digits + "\"}";
    }
    out += line + "\n";
  }
  return out;
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  Manifest manifest;
  manifest.commit = taker.number(1);
  const auto rest = taker.piece(input.size());
  const std::string text(reinterpret_cast<const char*>(rest.data()), rest.size());
  FileOps& ops = FileOps::system();
  for (const std::string& content : {text, sealed(text)}) {
    folder().make(kHistoryName, std::as_bytes(std::span(content)));
    const std::vector<CommitInfo> commits = read_history(folder().path(), manifest, ops);
    require(commits.size() <= kHistoryCommits, "more commits than are kept");
    std::uint64_t before = 0;
    for (const CommitInfo& commit : commits) {
      require(commit.number <= manifest.commit && (commit.number > before || &commit == commits.data()), "commits out of order");
      before = commit.number;
      if (!commit.note.empty()) require(note_text(commit.note) == commit.note, "a note that no commit takes");
    }
    // A writer knows the same, and writes what is read again.
    CommitHistory history(folder().path(), ops);
    history.load(manifest, {});
    require(history.list(UINT64_MAX) == commits, "a writer with other commits than a reader");
    history.add({.number = manifest.commit + 1, .time = "2031-05-06T07:08:09.123Z", .note = R"({"a":1})"});
    history.write(UINT64_MAX);
    Manifest next = manifest;
    next.commit += 1;
    require(read_history(folder().path(), next, ops) == history.list(UINT64_MAX), "other commits once written");
  }
}

}  // namespace embermap::fuzz
