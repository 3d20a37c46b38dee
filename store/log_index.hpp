// Where the redo log has pages: the newest version of each, and the one that the last commit before it made.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace embermap {

// A version of a page: its bytes in the log, or, for a page that no commit had before, in the table's file.
struct LoggedVersion {
  static constexpr std::uint64_t kNone = ~0ULL;
  std::uint64_t position = kNone;  // of the bytes in the log; in place: of the record that tells of it
  std::uint32_t checksum = 0;
  bool in_place = false;
  bool there() const noexcept { return position != kNone; }
};

struct LoggedPage {
  std::uint64_t page = 0;
  std::uint32_t table = 0;
  LoggedVersion newest, before;
};

// A hash table of (table, page): open addressing, linear probing, at most five eighths full. Not thread-safe.
class LogIndex {
 public:
  // Bytes that `pages` entries take once the table has grown to hold them, at most.
  static std::uint64_t bytes_for(std::uint64_t pages) noexcept;

  std::uint64_t size() const noexcept { return size_; }
  std::uint64_t memory_bytes() const noexcept { return slots_.capacity() * sizeof(Slot); }
  std::optional<LoggedPage> find(std::uint32_t table, std::uint64_t page) const noexcept;
  // `version` is the newest one from now on. What was the newest is kept as the one before if it lies before position `epoch`,
  // where the records begin that no commit has yet. Returns whether this is the page's first version from there on.
  bool put(std::uint32_t table, std::uint64_t page, const LoggedVersion& version, std::uint64_t epoch);
  // Versions before `position` are in the tables' files now.
  void forget_before(std::uint64_t position);
  // Versions from `position` on never were (of `table`; nullopt: of all).
  void forget_from(std::uint64_t position, std::optional<std::uint32_t> table = {});
  void forget_table(std::uint32_t table);
  std::uint64_t count_from(std::uint64_t position) const noexcept;  // pages whose newest version lies there or behind
  void clear() noexcept;
  void for_each(const std::function<void(const LoggedPage&)>& body) const;

 private:
  struct Slot {
    std::uint64_t page = 0;
    std::uint64_t newest = kFree;  // position; kInPlace is set in those of pages in place
    std::uint64_t before = kNothing;
    std::uint32_t table = 0;
    std::uint32_t newest_checksum = 0, before_checksum = 0;
  };
  static constexpr std::uint64_t kFree = ~0ULL, kNothing = ~0ULL;
  static constexpr std::uint64_t kInPlace = 1ULL << 63;
  static std::uint64_t pack(const LoggedVersion& version) noexcept;
  static LoggedVersion unpack(std::uint64_t packed, std::uint32_t checksum) noexcept;
  static LoggedPage page_of(const Slot& slot) noexcept;

  std::uint64_t home(std::uint32_t table, std::uint64_t page) const noexcept;
  std::uint64_t place_of(std::uint32_t table, std::uint64_t page) const noexcept;  // its slot, or the free one where it belongs
  void grow();
  void erase(std::uint64_t at) noexcept;
  // Calls body(slot) for each entry; where it returns false the entry is erased.
  void sweep(const std::function<bool(Slot&)>& body);

  std::vector<Slot> slots_;
  std::uint64_t size_ = 0;
};

}  // namespace embermap
