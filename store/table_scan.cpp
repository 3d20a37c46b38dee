// Consecutive rows, past the hot pages.
#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "io/checksum.hpp"
#include "store/table_impl.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kScanBytes = 8U << 20;  // pages of one step of a scan, where the budget has that much for pages in flight

// Scratch for the pages of one step of a scan.
class ScanBuffer {
 public:
  // For at most `most` pages and `bytes` bytes, but one page at least.
  ScanBuffer(const Geometry& geometry, std::uint64_t most, std::uint64_t bytes)
      : page_bytes_{geometry.page_bytes()},
        pages_{std::max<std::uint64_t>(1, std::min(kScanBytes, bytes) / page_bytes_)},
        memory_(std::min(pages_, std::max<std::uint64_t>(most, 1)) * page_bytes_) {
    pages_ = memory_.size() / page_bytes_;
  }
  std::uint64_t pages() const noexcept { return pages_; }
  std::byte* page(std::uint64_t index) noexcept { return memory_.data() + index * page_bytes_; }

 private:
  std::uint64_t page_bytes_;
  std::uint64_t pages_;
  AlignedBuffer memory_;
};

void check_range(std::string_view name, std::uint64_t first, std::uint64_t count, std::uint64_t rows) {
  if (first > rows || count > rows - first)
    throw InvalidArgument(
        fmt::format("rows [{}, +{}) reach past the end of table '{}' with {} rows", first, count, printable(name), rows));
}

}  // namespace

void TableImpl::read(std::uint64_t first, std::uint64_t count, std::span<std::byte> out, std::string_view field_name) {
  const auto lock = side_by_side();
  const Field& field = schema_.field(field_name);
  const Geometry& geometry = entry_.geometry;
  check_range(name_, first, count, geometry.rows);
  check_size(count, out.size(), field.bytes, "room for rows");
  if (count == 0) return;
  // From the look at what is in memory to the last copy nobody changes rows: what is read from the file beside it is as old.
  const std::shared_lock reading(rows_);
  keep_checksums();
  const std::uint64_t end_page = geometry.page_of(first + count - 1) + 1;
  HotPages* const ready = hot_ready_.load(std::memory_order_acquire);
  // While the pages of one step are read, the rows of the step before are copied out.
  struct Step {
    Step(const Geometry& geometry, std::uint64_t most, std::uint64_t bytes) : scratch{geometry, most, bytes} {}
    ScanBuffer scratch;
    std::vector<std::uint64_t> pages;
    std::vector<std::uint32_t> frames;
    std::optional<HotPages::Hold> hold;
  };
  const auto copy = [&](Step& step, std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      const std::byte* memory = step.frames[i] == HotPages::kAbsent ? step.scratch.page(i) : ready->frame(step.frames[i]);
      const std::uint64_t page_first = step.pages[i] * geometry.rows_per_page;
      const std::uint64_t from = std::max(first, page_first);
      const std::uint64_t to = std::min(first + count, page_first + geometry.rows_in(step.pages[i]));
      std::byte* target = out.data() + (from - first) * field.bytes;
      const std::byte* source = memory + (from - page_first) * geometry.stride + field.offset;
      if (field.bytes == geometry.stride) {
        std::memcpy(target, source, (to - from) * field.bytes);
        continue;
      }
      for (std::uint64_t row = from; row < to; ++row, target += field.bytes, source += geometry.stride)
        std::memcpy(target, source, field.bytes);
    }
  };
  const std::uint64_t first_page = geometry.page_of(first);
  const std::uint64_t half = core_->transfer_bytes() / 2;
  Step steps[2]{Step(geometry, end_page - first_page, half), Step(geometry, end_page - first_page, half)};
  std::vector<PageBuffer> absent;
  std::uint64_t page = first_page;
  for (std::uint64_t number = 0; page < end_page || !steps[(number + 1) % 2].pages.empty(); ++number) {
    Step& now = steps[number % 2];
    Step& before = steps[(number + 1) % 2];
    now.pages.clear();
    while (now.pages.size() < now.scratch.pages() && page < end_page) now.pages.push_back(page++);
    now.frames.assign(now.pages.size(), HotPages::kAbsent);
    if (ready != nullptr) now.hold.emplace(ready->hold_resident(now.pages, now.frames, Access::kRead));
    absent.clear();
    for (std::uint64_t i = 0; i < now.pages.size(); ++i)
      if (now.frames[i] == HotPages::kAbsent) absent.push_back({now.pages[i], now.scratch.page(i)});
    file_->read(absent, {.count = before.pages.size(),
                         .grain = 16,
                         .pool = &core_->compute,
                         .body = [&](std::uint64_t begin, std::uint64_t end) { copy(before, begin, end); }});
    before.pages.clear();
    before.hold.reset();
  }
}

void TableImpl::write(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field_name) {
  core_->bound_log();
  const auto lock = alone();
  check_writable();
  const Field& field = schema_.field(field_name);
  const Geometry& geometry = entry_.geometry;
  check_range(name_, first, count, geometry.rows);
  check_size(count, rows.size(), field.bytes, "rows");
  if (count == 0) return;
  keep_checksums();
  const std::uint64_t end_page = geometry.page_of(first + count - 1) + 1;
  ScanBuffer scratch(geometry, end_page - geometry.page_of(first), core_->transfer_bytes());
  std::vector<std::uint64_t> pages;
  std::vector<std::uint32_t> frames;
  std::vector<PageBuffer> reads, writes;
  for (std::uint64_t page = geometry.page_of(first); page < end_page; page += pages.size()) {
    pages.clear();
    while (pages.size() < scratch.pages() && page + pages.size() < end_page) pages.push_back(page + pages.size());
    frames.assign(pages.size(), HotPages::kAbsent);
    std::optional<HotPages::Hold> hold;
    if (hot_) hold.emplace(hot_->hold_resident(pages, frames, Access::kWrite));
    const auto from_of = [&](std::uint64_t i) { return std::max(first, pages[i] * geometry.rows_per_page); };
    const auto to_of = [&](std::uint64_t i) {
      return std::min(first + count, pages[i] * geometry.rows_per_page + geometry.rows_in(pages[i]));
    };
    reads.clear();
    writes.clear();
    for (std::uint64_t i = 0; i < pages.size(); ++i) {
      if (frames[i] != HotPages::kAbsent) continue;
      writes.push_back({pages[i], scratch.page(i)});
      // A page whose records are replaced as a whole need not be read.
      if (field.bytes != geometry.stride || to_of(i) - from_of(i) != geometry.rows_in(pages[i]))
        reads.push_back({pages[i], scratch.page(i)});
    }
    file_->read(reads);
    for (std::uint64_t i = 0; i < pages.size(); ++i) {
      std::byte* memory = frames[i] == HotPages::kAbsent ? scratch.page(i) : hot_->frame(frames[i]);
      const std::byte* source = rows.data() + (from_of(i) - first) * field.bytes;
      std::byte* target = memory + geometry.slot_of(from_of(i)) * geometry.stride + field.offset;
      if (field.bytes == geometry.stride) {
        std::memcpy(target, source, (to_of(i) - from_of(i)) * field.bytes);
        continue;
      }
      for (std::uint64_t row = from_of(i); row < to_of(i); ++row, source += field.bytes, target += geometry.stride)
        std::memcpy(target, source, field.bytes);
    }
    file_->write(writes);
  }
  rows_written_ += count;
}

void TableImpl::materialize(const Progress& progress) {
  const auto lock = alone();
  check_writable();
  const Geometry& geometry = entry_.geometry;
  ScanBuffer scratch(geometry, geometry.pages(), core_->transfer_bytes());
  std::vector<PageBuffer> fresh;
  // Pages in memory that are dirty count as written once they are in the file.
  if (hot_) hot_->flush();
  for (std::uint64_t page = 0; page < geometry.pages();) {
    fresh.clear();
    for (; page < geometry.pages() && fresh.size() < scratch.pages(); ++page)
      if (!file_->written(page)) fresh.push_back({page, scratch.page(fresh.size())});
    file_->read(fresh);
    file_->write(fresh);
    core_->report(progress, page, geometry.pages());
  }
}

VerifyReport TableImpl::verify(const Progress& progress) {
  const auto lock = alone();
  if (hot_ && writable()) hot_->flush();
  // What is committed is checked where it belongs. What is not is in the log, and checked when it is read.
  std::unique_lock<std::mutex> paused;
  if (core_->log) {
    core_->log->apply_all();
    paused = core_->log->pause();
  }
  const Geometry& geometry = entry_.geometry;
  const PageLedger& ledger = file_->ledger();
  VerifyReport report;
  report.pages = geometry.pages();
  ScanBuffer scratch(geometry, geometry.pages(), core_->transfer_bytes());
  std::vector<std::uint32_t> recorded(scratch.pages());
  std::vector<std::uint32_t> found(scratch.pages());
  std::vector<bool> present(scratch.pages());
  std::vector<PageBuffer> stored;
  std::uint64_t count = 0;
  for (std::uint64_t first = ledger.next_marked(0); first < geometry.pages(); first = ledger.next_marked(first + count)) {
    count = std::min(scratch.pages(), geometry.pages() - first);
    for (std::uint64_t i = 0; i < count; ++i) present[i] = ledger.written(first + i);
    ledger.read_checksums(first, std::span(recorded).first(count));
    stored.clear();
    for (std::uint64_t i = 0; i < count; ++i)
      if (present[i] && recorded[i] != 0) stored.push_back({first + i, scratch.page(i)});
    file_->read_stored(stored, [&](const PageBuffer& page) {
      found[page.page - first] = page_checksum({page.memory, static_cast<std::size_t>(geometry.bytes_in(page.page))});
    });
    for (std::uint64_t i = 0; i < count; ++i) {
      const bool sealed = recorded[i] != 0;
      report.written += present[i];
      report.verified += present[i] && sealed;
      // A page has a checksum if and only if it was written; only an adopted file has pages without.
      const bool good = present[i] ? (sealed ? recorded[i] == found[i] : ledger.adopted()) : !sealed;
      if (good) continue;
      ++report.bad_pages;
      const std::uint64_t row = (first + i) * geometry.rows_per_page;
      if (report.bad.size() < 1000) report.bad.push_back({first + i, row, row + geometry.rows_in(first + i) - 1});
    }
    core_->report(progress, first + count, geometry.pages());
  }
  core_->report(progress, geometry.pages(), geometry.pages());
  return report;
}

void TableImpl::reseal() {
  const Alone lock(files_);
  constexpr std::size_t kTogether = 4096;
  const PageLedger& ledger = file_->ledger();
  std::vector<std::uint64_t> pages;
  for (std::uint64_t page = ledger.next_marked(0); page < entry_.geometry.pages(); page = ledger.next_marked(page + 1)) {
    if (ledger.written(page)) pages.push_back(page);
    if (pages.size() < kTogether) continue;
    file_->seal(pages);
    pages.clear();
  }
  file_->seal(pages);
  file_->ledger().forget_unwritten();
  file_->sync();
}

}  // namespace embermap
