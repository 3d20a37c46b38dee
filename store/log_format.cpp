#include "store/log_format.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "io/checksum.hpp"

namespace embermap {
namespace {

constexpr char kMagic[8] = {'E', 'M', 'B', 'R', 'E', 'D', 'O', '1'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kMostNumber = 1ULL << 62;
constexpr std::uint32_t kRecordMagic = 0x43524D45;  // "EMRC"

struct StoredHeader {
  char magic[8];
  std::uint32_t version, zero;
  std::uint64_t id, serial, tail, applying, applied, checksum;
  std::uint64_t store_high, store_low, store_checksum;
};
static_assert(sizeof(StoredHeader) == 88);

// In a sector that no header is written to: written over in place, it is the old one or the new one.
constexpr std::uint64_t kSector = 512;
constexpr std::uint64_t kMarkPlace = kSector;
constexpr char kMarkMagic[8] = {'E', 'M', 'B', 'M', 'A', 'R', 'K', '1'};

struct StoredMark {
  char magic[8];
  std::uint64_t id, commit, end, checksum;
};
static_assert(sizeof(StoredMark) == 40 && sizeof(StoredHeader) <= kMarkPlace);

std::uint64_t checksum_of(const StoredMark& mark) {
  return checksum64(std::as_bytes(std::span(&mark, 1)).first(offsetof(StoredMark, checksum)));
}

std::uint64_t checksum_of(const StoredHeader& header, std::size_t bytes) {
  return checksum64(std::as_bytes(std::span(&header, 1)).first(bytes));
}

bool is_valid(const StoredHeader& header) {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return false;
  if (header.checksum != checksum_of(header, offsetof(StoredHeader, checksum))) return false;
  const bool without_store = (header.store_high | header.store_low | header.store_checksum) == 0;
  return without_store || header.store_checksum == checksum_of(header, offsetof(StoredHeader, store_checksum));
}

// A header whose counted bytes can be believed: what they take fits the record, and the record the file.
bool plausible(const LogRecordHeader& header, const LogHeader& log, std::uint64_t position, std::uint64_t file_bytes) {
  if (header.magic != kRecordMagic || header.id != log.id || header.position != position) return false;
  if (header.commit >= kMostNumber || header.bytes < kLogBlock || header.bytes % kLogBlock != 0 ||
      header.bytes > file_bytes - position)
    return false;
  switch (static_cast<LogRecordKind>(header.kind)) {
    case LogRecordKind::kPages: {
      if (header.count == 0 || header.count > kMaxLogEntries || header.table >> 32 != 0) return false;
      const std::uint64_t head = log_record_head(header.count);
      return head <= header.bytes && header.page_bytes != 0 && header.page_bytes <= (header.bytes - head) / header.count;
    }
    case LogRecordKind::kInPlace:
      return header.count != 0 && header.count <= kMaxLogEntries && header.table >> 32 == 0 &&
             log_record_head(header.count) <= header.bytes;
    case LogRecordKind::kCommit: return header.count <= kMaxLogText && header.count <= header.bytes - sizeof header;
  }
  return false;
}

std::uint64_t covered_bytes(const LogRecordHeader& header) {
  return header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit) ? header.count : header.count * sizeof(LogEntry);
}

}  // namespace

std::optional<LogHeader> read_log_header(const File& file) {
  std::optional<LogHeader> found;
  bool foreign = false;
  for (std::uint64_t slot = 0; slot < 2; ++slot) {
    StoredHeader stored{};
    // What is behind the end of the file counts as zeros.
    if (file.read_some(slot * kLogBlock, std::as_writable_bytes(std::span(&stored, 1))) < offsetof(StoredHeader, store_high))
      continue;
    if (!is_valid(stored)) {
      foreign = foreign || std::any_of(std::begin(stored.magic), std::end(stored.magic), [](char c) { return c != 0; });
      continue;
    }
    if (stored.version > kVersion)
      throw FormatError(file.path(),
                        fmt::format("redo log of version {}; this embermap reads version {}", stored.version, kVersion));
    if (stored.tail < kLogStart || stored.tail % kLogBlock != 0 || stored.tail >= kMostNumber)
      throw FormatError(file.path(), fmt::format("the redo log's first record cannot begin at byte {}", stored.tail));
    // They only ever grow by one, and must not come round to zero.
    for (const std::uint64_t number : {stored.id, stored.serial, stored.applying, stored.applied})
      if (number >= kMostNumber)
        throw FormatError(file.path(), fmt::format("the redo log cannot have come as far as number {}", number));
    if (!found || stored.serial > found->serial)
      found = LogHeader{stored.id,       stored.serial,  stored.tail,
                        stored.applying, stored.applied, {stored.store_high, stored.store_low}};
  }
  // A log is made with its header before anything else is in it. One without any is one whose making was interrupted.
  if (!found && (foreign || file.size() > kLogStart))
    throw CorruptError(fmt::format(
        "{}: neither of the redo log's two headers is whole, and what it has of commits cannot be told. Bring the file "
        "back; accept_unclean, or 'embermap recover', takes the tables as they are, which may mix rows of several "
        "commits, and keeps the file under another name",
        printable(file.path())));
  return found;
}

void check_log_store(const std::filesystem::path& file, const StoreId& log, const StoreId& store) {
  if (!log.known() || !store.known() || log == store) return;
  throw FormatError(file,
                    fmt::format("is the redo log of another store: it belongs to store {}, and this is store {}. Bring this "
                                "store's own log back, or move this one away to go on without",
                                log.text(), store.text()));
}

void check_log_moment(const std::filesystem::path& file, std::uint64_t applied, std::uint64_t last, std::uint64_t manifest) {
  if (manifest >= applied && manifest <= last) return;
  throw FormatError(
      file, fmt::format("is of another moment than the store's manifest, which is at commit {}: {} {}. One of them was brought "
                        "back without the other. Bring all files of the store back from one copy; where manifest and tables "
                        "are of one copy, and only the log is not, move the log away",
                        manifest, manifest < applied ? "the tables' files have gone on to" : "the log's last is",
                        manifest < applied ? applied : last));
}

void write_log_header(const File& file, const LogHeader& header) {
  std::array<std::byte, kSector> sector{};
  StoredHeader stored{};
  std::memcpy(stored.magic, kMagic, sizeof kMagic);
  stored.version = kVersion;
  stored.id = header.id;
  stored.serial = header.serial;
  stored.tail = header.tail;
  stored.applying = header.applying;
  stored.applied = header.applied;
  stored.checksum = checksum_of(stored, offsetof(StoredHeader, checksum));
  if (header.store.known()) {
    stored.store_high = header.store.high;
    stored.store_low = header.store.low;
    stored.store_checksum = checksum_of(stored, offsetof(StoredHeader, store_checksum));
  }
  std::memcpy(sector.data(), &stored, sizeof stored);
  file.write(header.serial % 2 * kLogBlock, sector);
}

std::optional<LogMark> read_log_mark(const File& file) {
  StoredMark stored{};
  if (file.read_some(kMarkPlace, std::as_writable_bytes(std::span(&stored, 1))) < sizeof stored) return std::nullopt;
  if (std::memcmp(stored.magic, kMarkMagic, sizeof kMarkMagic) != 0 || stored.checksum != checksum_of(stored))
    return std::nullopt;
  return LogMark{stored.id, stored.commit, stored.end};
}

void write_log_mark(const File& file, const LogMark& mark) {
  StoredMark stored{.magic = {}, .id = mark.id, .commit = mark.commit, .end = mark.end, .checksum = 0};
  std::memcpy(stored.magic, kMarkMagic, sizeof kMarkMagic);
  stored.checksum = checksum_of(stored);
  std::array<std::byte, kSector> sector{};
  std::memcpy(sector.data(), &stored, sizeof stored);
  file.write(kMarkPlace, sector);
}

void erase_log_mark(const File& file) { file.write(kMarkPlace, std::array<std::byte, kSector>{}); }

std::string how_headers_were_cut(const File& file) {
  if (!read_log_header(file)) return "it was cut to nothing, and had its two headers before it had commits";
  const std::uint64_t bytes = file.size();
  return bytes < kLogStart ? fmt::format("it was cut to {} bytes, and its two headers have {}", bytes, kLogStart) : std::string();
}

void seal_log_record(LogRecordHeader header, std::byte* memory, std::uint64_t bytes) {
  header.magic = kRecordMagic;
  header.checksum = 0;
  std::memcpy(memory, &header, sizeof header);
  header.checksum = checksum64({memory, sizeof header + static_cast<std::size_t>(bytes)});
  std::memcpy(memory, &header, sizeof header);
}

namespace {

// The record at `position`, in `memory`; false if there is none.
bool read_record(const File& file, const LogHeader& log, std::uint64_t position, std::uint64_t file_bytes,
                 std::vector<std::byte>& memory, LogRecord& record) {
  memory.resize(kLogBlock);
  file.read(position, memory);
  std::memcpy(&record.header, memory.data(), sizeof record.header);
  if (!plausible(record.header, log, position, file_bytes)) return false;
  const std::uint64_t covered = sizeof record.header + covered_bytes(record.header);
  if (covered > memory.size()) {
    memory.resize(covered);
    file.read(position + kLogBlock, std::span(memory).subspan(kLogBlock));
  }
  LogRecordHeader blank = record.header;
  blank.checksum = 0;
  std::memcpy(memory.data(), &blank, sizeof blank);
  return checksum64(std::span(memory).first(covered)) == record.header.checksum;
}

}  // namespace

std::uint64_t walk_log(const File& file, const LogHeader& log, const std::function<void(const LogRecord&)>& visit) {
  const std::uint64_t file_bytes = file.size();
  std::vector<std::byte> memory;
  std::uint64_t position = log.tail;
  while (position < file_bytes && file_bytes - position >= kLogBlock) {
    LogRecord record;
    if (!read_record(file, log, position, file_bytes, memory, record)) break;
    const std::byte* const body = memory.data() + sizeof record.header;
    if (record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit))
      record.text = {reinterpret_cast<const char*>(body), record.header.count};
    else
      record.entries = {reinterpret_cast<const LogEntry*>(body), record.header.count};
    visit(record);
    position = record.end();
  }
  return position;
}

namespace {

// The number of a commit whose record lies behind `from`; nullopt: none.
std::optional<std::uint64_t> commit_behind(const File& file, const LogHeader& log, std::uint64_t from) {
  constexpr std::uint64_t kChunk = 1U << 20;
  const std::uint64_t file_bytes = file.size();
  std::vector<std::byte> chunk(kChunk), memory;
  for (std::uint64_t at = from; at < file_bytes; at += kChunk) {
    // What the file system knows to be a hole has no records.
    const off_t data = ::lseek(file.fd(), static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return std::nullopt;
    if (data > 0) at = std::max(at, static_cast<std::uint64_t>(data) / kLogBlock * kLogBlock);
    const std::uint64_t bytes = file.read_some(at, chunk);
    for (std::uint64_t i = 0; i + kLogBlock <= bytes; i += kLogBlock) {
      LogRecord record;
      std::memcpy(&record.header, chunk.data() + i, sizeof record.header);
      if (record.header.magic == kRecordMagic && record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit) &&
          read_record(file, log, at + i, file_bytes, memory, record))
        return record.header.commit;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string what_log_lacks(const File& file, const LogHeader& header, const std::optional<LogMark>& mark, const LogEnd& end) {
  const std::uint64_t bytes = file.size();
  if (bytes < header.tail && header.tail > kLogStart)
    return fmt::format("it was cut to {} bytes, and its first record began at byte {}", bytes, header.tail);
  // A header is on the disk before any mark of its life: a mark of a later one says that this is not the newest header.
  if (mark && mark->id > header.id) return fmt::format("the newer of its headers, which had commit {}, is damaged", mark->commit);
  if (const auto lost = commit_behind(file, header, end.position))
    return fmt::format("the record at byte {} is damaged, and commits up to {} lie behind it", end.position, *lost);
  const std::uint64_t last = end.last_commit.value_or(header.applied);
  const bool marked = mark && mark->id == header.id;
  const std::uint64_t known = std::max(header.applying, marked ? mark->commit : 0);
  if (known > last) {
    return fmt::format("it had commit {}, and {}: it was cut or damaged{}", known,
                       end.last_commit ? fmt::format("ends with commit {}", last) : "has none of its commits any more",
                       marked && mark->commit == known && mark->end > bytes
                           ? fmt::format(" (it has {} bytes, and that commit ended at byte {})", bytes, mark->end)
                           : std::string());
  }
  return {};
}

CorruptError log_error(const std::filesystem::path& log, std::string_view lack, std::uint64_t commit) {
  return CorruptError(fmt::format(
      "{}: the redo log is gone or damaged, which had commits that the tables' files may not have: {}. The store would be {}, "
      "and "
      "its tables may mix rows of several. Bring the file back; accept_unclean, or 'embermap recover', takes the tables as they "
      "are, with those commits that the log still has",
      printable(log), lack, at_commit(commit)));
}

std::string at_commit(std::uint64_t commit) {
  return commit == 0 ? "before its first commit" : fmt::format("at commit {}", commit);
}

}  // namespace embermap
