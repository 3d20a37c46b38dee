#include "store/mapped_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>

#include "base/checked.hpp"
#include "base/size_text.hpp"

namespace embermap {
namespace {

std::vector<std::uint64_t> status_of(const File& file) {
  const struct stat status = file.status();
  return {status.st_dev,
          status.st_ino,
          static_cast<std::uint64_t>(status.st_size),
          static_cast<std::uint64_t>(status.st_mtim.tv_sec),
          static_cast<std::uint64_t>(status.st_mtim.tv_nsec),
          static_cast<std::uint64_t>(status.st_ctim.tv_sec),
          static_cast<std::uint64_t>(status.st_ctim.tv_nsec)};
}

// Of the machine, with what the page cache could give up or has of the file already.
std::optional<std::uint64_t> available_memory() {
  std::ifstream memory("/proc/meminfo");
  for (std::string line; std::getline(memory, line);) {
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lu kB", &kib) == 1) return std::uint64_t{kib} << 10;
  }
  return std::nullopt;
}

}  // namespace

MappedTable::MappedTable(PageFile& file, const LoggedPages& logged, std::uint32_t id)
    : geometry_{file.geometry()},
      mapping_{file.data(), geometry_.file_bytes()},
      known_{logged.files_known()},
      status_{status_of(file.data())} {
  look(logged, id);
}

void MappedTable::look(const LoggedPages& logged, std::uint32_t id) {
  logged_.clear();
  const std::uint64_t pages = geometry_.pages();
  logged.for_each(id, [&](std::uint64_t page, const LoggedVersion& version) {
    if (version.in_place || page >= pages) return;  // the file had it before the log said so
    if (logged_.empty()) logged_.resize(ceil_div(pages, 64));
    logged_[page / 64] |= std::uint64_t{1} << (page % 64);
  });
}

bool MappedTable::keep(PageFile& file, const LoggedPages& logged, std::uint32_t id) {
  if (known_.empty() || logged.files_known() != known_ || status_of(file.data()) != status_ || file.geometry() != geometry_ ||
      mapping_.failed())
    return false;
  look(logged, id);
  return true;
}

void MappedTable::pin(int device, ThreadPool& io) {
  const std::lock_guard lock(pin_mutex_);
  if (pin_tried_) return;
  pin_tried_ = true;
  // What is registered cannot leave memory any more.
  if (const auto available = available_memory(); available && bytes() > *available) {
    error_ = fmt::format("cannot register {} of pinned host memory: the machine has {} available", format_size(bytes()),
                         format_size(*available));
    return;
  }
  mapping_.populate(io);
  pinned_ = PinnedRange::read_only(mapping_.data(), mapping_.bytes(), device);
  error_ = pinned_.error();
}

bool MappedTable::registered() const {
  const std::lock_guard lock(pin_mutex_);
  return pinned_.registered();
}

std::string MappedTable::error() const {
  const std::lock_guard lock(pin_mutex_);
  return error_;
}

bool MappedTable::has(std::span<const std::uint64_t> pages) const noexcept {
  return logged_.empty() || std::none_of(pages.begin(), pages.end(), [&](std::uint64_t page) { return is_logged(page); });
}

bool MappedTable::has_rows(std::span<const std::uint64_t> ids) const noexcept {
  return logged_.empty() ||
         std::none_of(ids.begin(), ids.end(), [&](std::uint64_t id) { return is_logged(geometry_.page_of(id)); });
}

void MappedTable::will_need(std::span<const std::uint64_t> ids) const noexcept {
  constexpr std::size_t kSome = 64;
  constexpr std::uint64_t kApart = 4;  // one row in so many is together
  if (ids.size() < kSome) return;
  const auto [first, last] = std::minmax_element(ids.begin(), ids.end());
  const std::uint64_t rows = *last - *first + 1;
  if (rows / kApart > ids.size()) return;
  const std::uint64_t begin = *first * geometry_.stride;
  mapping_.will_need(geometry_.data_offset + begin, rows * geometry_.stride);
}

FrameSource MappedTable::source() const {
  return {.slab = const_cast<std::byte*>(rows()),
          .registered = registered(),
          .page_bytes = geometry_.page_bytes(),
          .rows_per_page = geometry_.rows_per_page,
          .stride = geometry_.stride,
          .slab_bytes = checked_mul(geometry_.pages(), geometry_.page_bytes(), "bytes of a mapping")};
}

std::uint64_t pages_not_written(const PageFile& file) {
  const std::uint64_t pages = file.geometry().pages();
  const PageLedger& ledger = file.ledger();
  if (ledger.adopted() || (ledger.pages() == pages && ledger.count_written() == pages)) return 0;
  std::uint64_t missing = 0;
  for (std::uint64_t page = 0; page < pages; ++page) missing += file.written(page) ? 0U : 1U;
  return missing;
}

PageFrames frames_of_pages(const FrameSource& source, std::span<const std::uint64_t> pages) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  PageFrames out{source, {}};
  if (pages.empty()) return out;
  const std::uint64_t base = pages.back() > kMost ? pages.front() : 0;
  out.source.slab += base * source.page_bytes;
  const auto end = std::upper_bound(pages.begin(), pages.end(), base + kMost);
  out.frames.reserve(static_cast<std::size_t>(end - pages.begin()));
  for (auto page = pages.begin(); page != end; ++page) out.frames.push_back(static_cast<std::uint32_t>(*page - base));
  return out;
}

}  // namespace embermap
