#include "store/log_index.hpp"

#include <algorithm>
#include <bit>

namespace embermap {
namespace {

constexpr std::uint64_t kLeastSlots = 64;

std::uint64_t mix(std::uint64_t a) noexcept {
  a ^= a >> 32;
  a *= 0x9E3779B97F4A7C15ULL;
  return a ^ a >> 29;
}

// Slots for `pages` entries: a power of two, at most five eighths of them used.
std::uint64_t slots_for(std::uint64_t pages) noexcept { return std::bit_ceil(std::max(kLeastSlots, pages / 5 * 8 + 8)); }

}  // namespace

std::uint64_t LogIndex::bytes_for(std::uint64_t pages) noexcept { return slots_for(pages) * sizeof(Slot); }

std::uint64_t LogIndex::pack(const LoggedVersion& version) noexcept {
  return version.there() ? version.position | (version.in_place ? kInPlace : 0) : kNothing;
}

LoggedVersion LogIndex::unpack(std::uint64_t packed, std::uint32_t checksum) noexcept {
  if (packed == kNothing) return {};
  return {packed & ~kInPlace, checksum, (packed & kInPlace) != 0};
}

LoggedPage LogIndex::page_of(const Slot& slot) noexcept {
  return {slot.page, slot.table, unpack(slot.newest, slot.newest_checksum), unpack(slot.before, slot.before_checksum)};
}

std::uint64_t LogIndex::home(std::uint32_t table, std::uint64_t page) const noexcept {
  return mix(mix(page) + table) & (slots_.size() - 1);
}

std::uint64_t LogIndex::place_of(std::uint32_t table, std::uint64_t page) const noexcept {
  std::uint64_t at = home(table, page);
  while (slots_[at].newest != kFree && (slots_[at].page != page || slots_[at].table != table))
    at = (at + 1) & (slots_.size() - 1);
  return at;
}

std::optional<LoggedPage> LogIndex::find(std::uint32_t table, std::uint64_t page) const noexcept {
  if (size_ == 0) return std::nullopt;
  const Slot& slot = slots_[place_of(table, page)];
  return slot.newest == kFree ? std::nullopt : std::optional(page_of(slot));
}

bool LogIndex::put(std::uint32_t table, std::uint64_t page, const LoggedVersion& version, std::uint64_t epoch) {
  if (slots_.size() < slots_for(size_ + 1)) grow();
  Slot& slot = slots_[place_of(table, page)];
  const bool first = slot.newest == kFree || (slot.newest & ~kInPlace) < epoch;
  if (slot.newest == kFree) {
    slot = {.page = page, .table = table};
    ++size_;
  } else if (first) {
    slot.before = slot.newest;
    slot.before_checksum = slot.newest_checksum;
  }
  slot.newest = pack(version);
  slot.newest_checksum = version.checksum;
  return first;
}

void LogIndex::grow() {
  std::vector<Slot> old(slots_for(size_ + 1));
  old.swap(slots_);
  for (const Slot& slot : old)
    if (slot.newest != kFree) slots_[place_of(slot.table, slot.page)] = slot;
}

void LogIndex::erase(std::uint64_t hole) noexcept {
  const std::uint64_t mask = slots_.size() - 1;
  // Moves later entries of the run back over the hole, so that no probe stops early.
  for (std::uint64_t at = (hole + 1) & mask; slots_[at].newest != kFree; at = (at + 1) & mask) {
    if (((at - home(slots_[at].table, slots_[at].page)) & mask) < ((at - hole) & mask)) continue;
    slots_[hole] = slots_[at];
    hole = at;
  }
  slots_[hole] = {};
  --size_;
}

void LogIndex::sweep(const std::function<bool(Slot&)>& body) {
  // Erasing moves a later entry to this place, or one from the front, which was seen already, to a place behind.
  for (std::uint64_t at = 0; at < slots_.size();) {
    if (slots_[at].newest != kFree && !body(slots_[at]))
      erase(at);
    else
      ++at;
  }
  if (size_ == 0) clear();
}

void LogIndex::forget_before(std::uint64_t position) {
  sweep([&](Slot& slot) {
    if ((slot.newest & ~kInPlace) < position) return false;
    if (slot.before != kNothing && (slot.before & ~kInPlace) < position) slot.before = kNothing;
    return true;
  });
}

void LogIndex::forget_from(std::uint64_t position, std::optional<std::uint32_t> table) {
  sweep([&](Slot& slot) {
    if ((table && slot.table != *table) || (slot.newest & ~kInPlace) < position) return true;
    slot.newest = slot.before;
    slot.newest_checksum = slot.before_checksum;
    slot.before = kNothing;
    return slot.newest != kNothing;
  });
}

void LogIndex::forget_table(std::uint32_t table) {
  sweep([&](const Slot& slot) { return slot.table != table; });
}

std::uint64_t LogIndex::count_from(std::uint64_t position) const noexcept {
  return static_cast<std::uint64_t>(std::count_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return slot.newest != kFree && (slot.newest & ~kInPlace) >= position;
  }));
}

void LogIndex::clear() noexcept {
  slots_ = {};
  size_ = 0;
}

void LogIndex::for_each(const std::function<void(const LoggedPage&)>& body) const {
  for (const Slot& slot : slots_)
    if (slot.newest != kFree) body(page_of(slot));
}

}  // namespace embermap
