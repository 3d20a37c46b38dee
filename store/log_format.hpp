// STORE/redo.log, to the byte: what commit() makes durable before the tables' files have it.
//
//  | header slot, 4096 | header slot, 4096 | record | record | ...                                   little-endian
//
// header slot: "EMBREDO1", u32 version (1), u32 zero, u64 id, u64 serial, u64 tail, u64 applying, u64 applied, u64 XXH3-64 of the
//   56 bytes before it, two u64 that are the store's id, u64 XXH3-64 of the 80 bytes before it (these three zeros in logs made
//   before stores had ids); zeros. The valid slot with the higher serial counts; the next header goes to the other one.
//     id        of this life of the log: it begins anew whenever everything in it has been applied; older records have other ids
//     tail      where the first record lies that may be needed; what lies before is in the tables' files, and may be a hole
//     applying  pages of this and earlier commits may be in the tables' files; a commit above it has touched none of them, but
//               for pages that no commit had before
//     applied   all of this and earlier commits is in the tables' files
//   byte 512 of the file, in a sector of its own: the mark, of the last commit that became durable: "EMBMARK1", u64 id, u64
//   commit, u64 end (of its record), u64 XXH3-64 of the 32 bytes before it. Zeros in logs made before there were marks.
//
// record: begins at a multiple of 4096 and is one long.
//   u32 magic "EMRC", u32 kind, u64 id, u64 position (its own), u64 bytes (its length), u64 commit (that it will be part of), u64
//   table (as "id" in the manifest), u64 page_bytes, u64 count, u64 XXH3-64 of header (this field zero) and entries (or text)
//   kind 1, pages: `count` entries {u64 page, u32 checksum, u32 zero}; then, from the next multiple of 4096 on, page_bytes for
//   each
//     entry: the bytes of the page as they belong into the .npy, zeros behind the last record. Page 2^64 - 1: the .npy's header.
//     checksum: XXH3-64's low half of those of them that the file has (as in NAME.pages), of the header's 4096
//   kind 2, pages in place: entries as above, no bytes: pages that no commit had before are in the .npy already
//   kind 3, commit: `count` bytes of text: the manifest. Everything before it is durable and part of it
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "base/error.hpp"
#include "io/file.hpp"
#include "store/store_id.hpp"

namespace embermap {

inline constexpr std::string_view kLogName = "redo.log";
inline constexpr std::string_view kDamagedLogName = "redo.log.damaged";
inline constexpr std::uint64_t kLogBlock = 4096;
inline constexpr std::uint64_t kLogStart = 2 * kLogBlock;  // of the first record
inline constexpr std::uint64_t kHeaderPage = ~0ULL;        // the page number that the .npy's header has in the log

struct LogHeader {
  std::uint64_t id = 0, serial = 0, tail = kLogStart, applying = 0, applied = 0;
  StoreId store = {};
  bool operator==(const LogHeader&) const = default;
};

// The header that counts; nullopt where there is none yet: the file ends before its first record, and no slot was ever complete.
// Throws CorruptError where there is something in it and no slot is whole, FormatError for a newer version.
std::optional<LogHeader> read_log_header(const File& file);
// Throws FormatError naming both if `log` is another store's; either may be not known.
void check_log_store(const std::filesystem::path& file, const StoreId& log, const StoreId& store);
// Throws FormatError if a manifest of commit `manifest` cannot be of the same moment as a log that has moved all up to commit
// `applied` on to the tables' files, and whose last commit is `last`: the manifest's file has a commit before the log forgets it,
// and after the log has it.
void check_log_moment(const std::filesystem::path& file, std::uint64_t applied, std::uint64_t last, std::uint64_t manifest);
// Writes it to the slot of its serial. Durable after the file's next sync.
void write_log_header(const File& file, const LogHeader& header);

// The last commit that became durable, written once it was: a log that ends before it was cut or damaged. Says nothing of a log
// of another `id`. It is durable with the log's next sync, so that after a loss of power it may be of an earlier commit, or
// missing, but never of one that is not there.
struct LogMark {
  std::uint64_t id = 0, commit = 0;
  std::uint64_t end = 0;  // of the commit's record
};
std::optional<LogMark> read_log_mark(const File& file);  // nullopt: none, or not whole
void write_log_mark(const File& file, const LogMark& mark);
void erase_log_mark(const File& file);
// How the file of a log that has commits is not even its two headers long; empty: it is.
std::string how_headers_were_cut(const File& file);

enum class LogRecordKind : std::uint32_t { kPages = 1, kInPlace = 2, kCommit = 3 };

struct LogEntry {
  std::uint64_t page = 0;
  std::uint32_t checksum = 0;
  std::uint32_t zero = 0;
};
static_assert(sizeof(LogEntry) == 16);

struct LogRecordHeader {
  std::uint32_t magic = 0;
  std::uint32_t kind = 0;
  std::uint64_t id = 0, position = 0, bytes = 0, commit = 0, table = 0, page_bytes = 0, count = 0, checksum = 0;
};
static_assert(sizeof(LogRecordHeader) == 72);

inline constexpr std::uint64_t kMaxLogEntries = 1ULL << 18;  // of one record
inline constexpr std::uint64_t kMaxLogText = 64ULL << 20;

// Bytes of a record before its pages: header and entries, in whole blocks.
constexpr std::uint64_t log_record_head(std::uint64_t entries) noexcept {
  return (sizeof(LogRecordHeader) + entries * sizeof(LogEntry) + kLogBlock - 1) / kLogBlock * kLogBlock;
}

// Fills magic and checksum of a record whose entries or text follow the header in `memory`, which has `bytes` bytes of them.
void seal_log_record(LogRecordHeader header, std::byte* memory, std::uint64_t bytes);

// What a walk through the log meets. `entries` and `text` live until the call returns.
struct LogRecord {
  LogRecordHeader header;
  std::span<const LogEntry> entries;
  std::string_view text;
  std::uint64_t end() const noexcept { return header.position + header.bytes; }
  // Where the bytes of entry i lie.
  std::uint64_t data(std::uint64_t i) const noexcept {
    return header.position + log_record_head(header.count) + i * header.page_bytes;
  }
};

// Calls `visit` for each valid record from the tail on, in order, up to the first that is none: where the log ends, which is
// returned. The bytes of pages are not read. At most kMaxLogEntries entries are in memory at a time, and none that the file is
// too short for.
std::uint64_t walk_log(const File& file, const LogHeader& header, const std::function<void(const LogRecord&)>& visit);

// What a walk through a log came to.
struct LogEnd {
  std::uint64_t position = kLogStart;             // where it ended, behind the last record that is whole
  std::optional<std::uint64_t> last_commit = {};  // the number of that record
};
// What the log lacks of commits that it had, in words; empty: nothing that anything tells. It cannot be shorter than its tail; it
// has the commits that the mark and `applying` speak of; and before a commit's record everything was durable before that was
// written, so that a record that is not whole in front of one is damage, not a crash. Of a log that is being appended to, it says
// that something is missing only where it says so twice, of the same end and the same header. Reads what lies behind the end.
std::string what_log_lacks(const File& file, const LogHeader& header, const std::optional<LogMark>& mark, const LogEnd& end);
// The error about it; `commit`: what the store would be at without that.
CorruptError log_error(const std::filesystem::path& log, std::string_view lack, std::uint64_t commit);
// "at commit 3"; "before its first commit" of 0.
std::string at_commit(std::uint64_t commit);

}  // namespace embermap
