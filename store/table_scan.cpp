// Consecutive rows, past the hot pages.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <set>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "io/checksum.hpp"
#include "kernels/rows.hpp"
#include "store/table_impl.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kScanBytes = 8U << 20;  // pages of one step, where the budget has that much for pages in flight
// Scans and bulk writes have several steps under way, so that the disk never waits for copies and checksums: a step of half of
// the budget's share for pages in flight, and the next only when that is done, left a disk a third of its time with nothing to
// do. Each has a ring of its own; a file has twice as many.
constexpr std::uint64_t kScanLanes = 8;
constexpr std::uint64_t kBouncedLanes = 2;       // where a ring has a MiB to bounce pages that direct I/O cannot move as they are
constexpr std::uint64_t kLaneBytes = 64U << 10;  // of the share for each lane at least: a ring takes 13 KiB beside
constexpr std::uint64_t kStepBytes = 1U << 20;   // at most

// Scratch for the pages of one step.
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

// `rows` pieces of `bytes` bytes, from every `from_stride` bytes to every `to_stride`.
void copy_records(std::byte* to, std::uint64_t to_stride, const std::byte* from, std::uint64_t from_stride, std::uint64_t rows,
                  std::uint64_t bytes) {
  if (to_stride == bytes && from_stride == bytes) {
    std::memcpy(to, from, rows * bytes);
    return;
  }
  for (std::uint64_t row = 0; row < rows; ++row, to += to_stride, from += from_stride) std::memcpy(to, from, bytes);
}

// Adds a page to ranges of ascending pages.
void add_page(std::vector<PageRange>& ranges, const Geometry& geometry, std::uint64_t page) {
  constexpr std::size_t kMost = 1000;
  const std::uint64_t first = page * geometry.rows_per_page;
  const std::uint64_t last = first + geometry.rows_in(page) - 1;
  if (!ranges.empty() && ranges.back().page + ranges.back().pages == page) {
    ++ranges.back().pages;
    ranges.back().last_row = last;
  } else if (ranges.size() < kMost) {
    ranges.push_back({page, 1, first, last});
  }
}

}  // namespace

// A step of a scan or a bulk write, in memory of its own.
struct TableImpl::ScanStep {
  std::byte* memory = nullptr;
  std::vector<std::uint64_t> pages;   // consecutive
  std::vector<std::uint32_t> frames;  // HotPages::kAbsent for all of them, to be filled in
  std::vector<PageBuffer> reads, writes;
  std::byte* page(std::uint64_t index, const Geometry& geometry) const { return memory + index * geometry.page_bytes(); }
};

// Where the rows of one page lie, in the call's range and in memory.
TableImpl::PageRows TableImpl::rows_of_page(std::uint64_t page, std::uint64_t first, std::uint64_t count) const {
  const Geometry& geometry = entry_.geometry;
  const std::uint64_t page_first = page * geometry.rows_per_page;
  const std::uint64_t from = std::max(first, page_first);
  return {.index = from - first,
          .slot = from - page_first,
          .rows = std::min(first + count, page_first + geometry.rows_in(page)) - from};
}

void TableImpl::for_steps(std::uint64_t first_page, std::uint64_t end_page, const std::function<void(ScanStep&)>& body) {
  const std::uint64_t page_bytes = entry_.geometry.page_bytes();
  const std::uint64_t room = std::max<std::uint64_t>(core_->transfer_bytes() / page_bytes, 1);
  const bool bounced = page_bytes % kDirectAlignment != 0 || entry_.geometry.data_offset % kDirectAlignment != 0;
  const std::uint64_t most =
      std::clamp<std::uint64_t>(core_->transfer_bytes() / kLaneBytes, 1, bounced ? kBouncedLanes : kScanLanes);
  const std::uint64_t lanes = std::min(most, room);
  const std::uint64_t each = std::clamp<std::uint64_t>(kStepBytes / page_bytes, 1, room / lanes);
  const std::uint64_t count = std::min(lanes, ceil_div(end_page - first_page, each));
  // Taken by the caller, all at once: what each I/O thread takes for itself, malloc would keep for each.
  const std::uint64_t lane_bytes = round_up(std::min(each, end_page - first_page) * page_bytes, AlignedBuffer::kAlignment);
  const AlignedBuffer memory(count * lane_bytes);
  std::atomic<std::uint64_t> next{first_page};
  std::atomic<bool> failed{false};
  const auto work = [&](std::uint64_t lane, std::uint64_t) {
    ScanStep step;
    step.memory = memory.data() + lane * lane_bytes;
    while (!failed) {
      const std::uint64_t first = next.fetch_add(each);
      if (first >= end_page) return;
      step.pages.resize(std::min(each, end_page - first));
      std::iota(step.pages.begin(), step.pages.end(), first);
      step.frames.assign(step.pages.size(), HotPages::kAbsent);
      try {
        body(step);
      } catch (...) {
        failed = true;
        throw;
      }
    }
  };
  core_->io.parallel_for(count, 1, work);
}

void TableImpl::read(std::uint64_t first, std::uint64_t count, std::span<std::byte> out, std::string_view field_name) {
  const auto lock = side_by_side();
  const Field& field = schema_.field(field_name);
  const Geometry& geometry = entry_.geometry;
  check_range(name_, first, count, geometry.rows);
  check_size(count, out.size(), field.bytes, "room for rows");
  if (count == 0) return;
  keep_checksums();
  HotPages* const ready = hot_ready_.load(std::memory_order_acquire);
  for_steps(geometry.page_of(first), geometry.page_of(first + count - 1) + 1, [&](ScanStep& step) {
    // From the look at what is in memory to the last copy nobody changes rows: what is read from the file beside it is as old.
    // Only for one step: a change does not wait for the whole scan.
    const auto reading = reading_rows();
    std::optional<HotPages::Hold> hold;
    if (ready != nullptr) hold.emplace(ready->hold_resident(step.pages, step.frames, Access::kRead));
    step.reads.clear();
    for (std::uint64_t i = 0; i < step.pages.size(); ++i)
      if (step.frames[i] == HotPages::kAbsent) step.reads.push_back({step.pages[i], step.page(i, geometry)});
    file_->read(step.reads);
    for (std::uint64_t i = 0; i < step.pages.size(); ++i) {
      const auto [index, slot, rows] = rows_of_page(step.pages[i], first, count);
      const std::byte* memory = step.frames[i] == HotPages::kAbsent ? step.page(i, geometry) : ready->frame(step.frames[i]);
      copy_records(out.data() + index * field.bytes, field.bytes, memory + slot * geometry.stride + field.offset, geometry.stride,
                   rows, field.bytes);
    }
  });
}

void TableImpl::gather_past(std::span<const std::uint64_t> ids, std::byte* out, const Field& field) {
  const Geometry& geometry = entry_.geometry;
  const Batch batch = make_batch(ids, core_->compute);
  std::vector<std::uint64_t> page_of(batch.keys.size());
  pages_of(batch.keys, page_of);
  HotPages& pages_in_memory = hot();
  ScanBuffer scratch(geometry, page_of.size(), core_->transfer_bytes());
  std::vector<std::uint64_t> pages;
  std::vector<std::uint32_t> frames;
  std::vector<PageBuffer> reads;
  std::vector<const std::byte*> rows;
  for (std::size_t first = 0; first < page_of.size();) {
    // As many rows as lie on the pages that there is room for.
    std::size_t end = first;
    pages.clear();
    for (; end < page_of.size(); ++end) {
      if (end != first && page_of[end] == pages.back()) continue;
      if (pages.size() == scratch.pages()) break;
      pages.push_back(page_of[end]);
    }
    // As in read(): what is read from the file is as old as what is in memory.
    const auto reading = reading_rows();
    frames.assign(pages.size(), HotPages::kAbsent);
    const HotPages::Hold hold = pages_in_memory.hold_resident(pages, frames, Access::kRead);
    reads.clear();
    for (std::size_t i = 0; i < pages.size(); ++i)
      if (frames[i] == HotPages::kAbsent) reads.push_back({pages[i], scratch.page(i)});
    file_->read(reads);
    rows.clear();
    for (std::size_t row = first, page = 0; row < end; ++row) {
      if (page_of[row] != pages[page]) ++page;
      const std::byte* const memory =
          frames[page] == HotPages::kAbsent ? scratch.page(page) : pages_in_memory.frame(frames[page]);
      rows.insert(rows.end(), batch.starts[row + 1] - batch.starts[row],
                  memory + (batch.keys[row] - pages[page] * geometry.rows_per_page) * geometry.stride + field.offset);
    }
    gather_rows_to(rows, std::span(batch.positions).subspan(batch.starts[first], rows.size()), field.bytes, out, core_->compute);
    first = end;
  }
}

void TableImpl::write(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field_name) {
  const std::uint64_t row_bytes = schema_.field(field_name).bytes;
  // What the log has no room for at once is written in stretches, between which the store may commit.
  do {
    core_->bound_log();
    const auto lock = alone();
    check_writable();
    check_range(name_, first, count, entry_.geometry.rows);
    check_size(count, rows.size(), row_bytes, "rows");
    std::uint64_t some = count;
    if (core_->log && core_->autocommit && count != 0) {
      const Geometry& geometry = entry_.geometry;
      const std::uint64_t end_page = geometry.page_of(first) + core_->log->pages_at_once(geometry.page_bytes());
      if (end_page < geometry.pages()) some = std::min(count, end_page * geometry.rows_per_page - first);
    }
    write_some(first, some, rows.first(some * row_bytes), field_name);
    first += some;
    count -= some;
    rows = rows.subspan(some * row_bytes);
  } while (count != 0);
}

void TableImpl::write_some(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows,
                           std::string_view field_name) {
  if (count == 0) return;
  const Field& field = schema_.field(field_name);
  const Geometry& geometry = entry_.geometry;
  keep_checksums();
  for_steps(geometry.page_of(first), geometry.page_of(first + count - 1) + 1, [&](ScanStep& step) {
    std::optional<HotPages::Hold> hold;
    if (hot_) hold.emplace(hot_->hold_resident(step.pages, step.frames, Access::kWrite));
    step.reads.clear();
    step.writes.clear();
    for (std::uint64_t i = 0; i < step.pages.size(); ++i) {
      if (step.frames[i] != HotPages::kAbsent) continue;
      step.writes.push_back({step.pages[i], step.page(i, geometry)});
      // A page whose records are replaced as a whole need not be read.
      if (field.bytes != geometry.stride || rows_of_page(step.pages[i], first, count).rows != geometry.rows_in(step.pages[i]))
        step.reads.push_back(step.writes.back());
    }
    file_->read(step.reads);
    for (std::uint64_t i = 0; i < step.pages.size(); ++i) {
      const auto [index, slot, number] = rows_of_page(step.pages[i], first, count);
      std::byte* memory = step.frames[i] == HotPages::kAbsent ? step.page(i, geometry) : hot_->frame(step.frames[i]);
      copy_records(memory + slot * geometry.stride + field.offset, geometry.stride, rows.data() + index * field.bytes,
                   field.bytes, number, field.bytes);
    }
    file_->write(step.writes);
  });
  rows_written_ += count;
}

std::uint64_t TableImpl::materialize(std::uint64_t page, std::uint64_t most, const Progress& progress) {
  const auto lock = alone();
  check_writable();
  const Geometry& geometry = entry_.geometry;
  ScanBuffer scratch(geometry, geometry.pages(), core_->transfer_bytes());
  std::vector<PageBuffer> fresh;
  // Pages in memory that are dirty count as written once they are in the file.
  if (hot_) hot_->flush();
  while (page < geometry.pages() && most != 0) {
    fresh.clear();
    for (; page < geometry.pages() && fresh.size() < std::min(scratch.pages(), most); ++page)
      if (!file_->written(page)) fresh.push_back({page, scratch.page(fresh.size())});
    most -= fresh.size();
    file_->read(fresh);
    file_->write(fresh);
    core_->report(progress, page, geometry.pages());
  }
  return page;
}

VerifyReport TableImpl::verify(const Progress& progress) {
  const auto lock = alone();
  if (hot_ && writable()) hot_->flush();
  settle();
  return find_bad(progress, [](std::uint64_t, const PageMark&) {});
}

void TableImpl::settle() {
  if (!core_->log) return;
  // What is committed is checked where it belongs; what is not, in the log. A commit begins with all tables standing still, so
  // that none does while this one is held: the log has nothing to apply to it until then, and need not be kept from applying.
  if (!core_->log->broken()) core_->log->apply_all();
  const auto ended = core_->log->pause();  // what was under way when the log broke
}

VerifyReport TableImpl::find_bad(const Progress& progress, const Bad& bad) {
  // What is in the log is looked at there: for a reader that is also what a writer may be moving to the file just now.
  std::set<std::uint64_t> logged;
  if (core_->logged != nullptr)
    core_->logged->for_each(entry_.id, [&](std::uint64_t page, const LoggedVersion&) { logged.insert(page); });
  const auto look = [&](const std::function<void()>& body) {
    !core_->writable && core_->logged != nullptr ? core_->logged->reading(body) : body();
  };
  const Geometry& geometry = entry_.geometry;
  const PageLedger& ledger = file_->ledger();
  VerifyReport report;
  report.pages = geometry.pages();
  ScanBuffer scratch(geometry, geometry.pages(), core_->transfer_bytes());
  std::vector<PageMark> marks(scratch.pages());
  std::vector<std::uint32_t> found(scratch.pages());
  std::vector<PageBuffer> stored;
  std::uint64_t count = 0;
  for (std::uint64_t first = ledger.next_marked(0); first < geometry.pages(); first = ledger.next_marked(first + count)) {
    count = std::min(scratch.pages(), geometry.pages() - first);
    look([&] {
      ledger.read_marks(first, std::span(marks).first(count));
      stored.clear();
      for (std::uint64_t i = 0; i < count; ++i)
        if (marks[i].written && marks[i].checksum != 0 && !marks[i].damaged && !logged.contains(first + i))
          stored.push_back({first + i, scratch.page(i)});
      file_->read_stored(stored, [&](const PageBuffer& page) {
        found[page.page - first] = page_checksum({page.memory, static_cast<std::size_t>(geometry.bytes_in(page.page))});
      });
    });
    for (std::uint64_t i = 0; i < count; ++i) {
      if (logged.contains(first + i)) continue;
      const PageMark& mark = marks[i];
      const bool sealed = mark.checksum != 0;
      report.written += mark.written;
      report.verified += mark.written && sealed && !mark.damaged;
      // A page has a checksum if and only if it was written; only an adopted file has pages without.
      const bool good = !mark.damaged && (mark.written ? (sealed ? mark.checksum == found[i] : ledger.adopted()) : !sealed);
      if (good) continue;
      ++report.bad_pages;
      add_page(report.bad, geometry, first + i);
      bad(first + i, mark);
    }
    core_->report(progress, first + count, geometry.pages());
  }
  for (const std::uint64_t page : logged) {
    PageBuffer buffer{page, scratch.page(0)};
    ++report.written;
    ++report.verified;
    try {
      file_->read({&buffer, 1});
    } catch (const CorruptError&) {
      ++report.bad_pages;
      add_page(report.bad, geometry, page);
    }
  }
  core_->report(progress, geometry.pages(), geometry.pages());
  return report;
}

void TableImpl::reseal(std::uint64_t commit) {
  const Alone lock(files_);
  seal_all({});
  // It may be of a later commit, which is gone.
  file_->ledger().set_commit(commit);
  file_->set_ahead();
}

void TableImpl::accept(const Progress& progress) {
  const auto lock = alone();
  // An adopted file may be one that is only read: what is written are its checksums.
  if (!core_->writable) check_writable();
  file_->ledger().forget_damage();  // dirty pages have to find room for their checksums
  if (hot_) hot_->flush();
  settle();
  seal_all(progress);
}

void TableImpl::seal_all(const Progress& progress) {
  constexpr std::size_t kTogether = 4096;
  PageLedger& ledger = file_->ledger();
  ledger.forget_damage();
  std::vector<std::uint64_t> pages;
  const std::uint64_t end = entry_.geometry.pages();
  for (std::uint64_t page = ledger.next_marked(0); page < end; page = ledger.next_marked(page + 1)) {
    if (ledger.written(page)) pages.push_back(page);
    if (pages.size() < kTogether) continue;
    file_->seal(pages);
    pages.clear();
    core_->report(progress, page, end);
  }
  file_->seal(pages);
  ledger.forget_unwritten();
  file_->accept_changes();
  file_->sync();
  file_->set_ahead();  // of the last commit
  core_->report(progress, end, end);
}

void TableImpl::check_same_pages(const TableImpl& backup) const {
  const auto differ = [&](std::string_view what, const auto& here, const auto& there) {
    if (here != there)
      throw InvalidArgument(fmt::format("table '{}' cannot be repaired from '{}': {} {} here and {} there", printable(name_),
                                        printable(backup.data_path()), what, here, there));
  };
  const Geometry &here = entry_.geometry, &there = backup.entry_.geometry;
  differ("rows:", here.rows, there.rows);
  differ("dim:", entry_.dim, backup.entry_.dim);
  differ("dtype:", dtype_name(entry_.dtype), dtype_name(backup.entry_.dtype));
  differ("fields of a record:", schema_.fields().size(), backup.schema_.fields().size());
  differ("bytes of a record:", here.stride, there.stride);
  differ("rows of a page:", here.rows_per_page, there.rows_per_page);
  differ("byte order:", entry_.big_endian ? "big" : "little", backup.entry_.big_endian ? "big" : "little");
}

RepairReport TableImpl::repair_from(TableImpl& backup, const Progress& progress) {
  if (core_ == backup.core_)
    throw InvalidArgument(fmt::format("table '{}' cannot be repaired from its own store", printable(name_)));
  const auto lock = alone();
  const auto backup_lock = backup.alone();
  check_writable();
  check_same_pages(backup);
  const Geometry& geometry = entry_.geometry;
  // Bits come back from checksums; a page whose checksum was damaged is one without, which is bad as well. Of an adopted file
  // such pages would count as good.
  if (!file_->ledger().adopted()) file_->ledger().forget_damage();
  if (hot_) hot_->flush();
  settle();
  RepairReport report;
  const AlignedBuffer memory(2 * geometry.page_bytes());
  PageBuffer here{0, memory.data()}, there{0, memory.data() + geometry.page_bytes()};
  const auto sum_of = [&](PageFile& file, PageBuffer& buffer) {
    std::uint32_t sum = 0;
    try {
      file.read_stored(std::span(&buffer, 1), [&](const PageBuffer& page) {
        sum = page_checksum({page.memory, static_cast<std::size_t>(geometry.bytes_in(page.page))});
      });
    } catch (const Error&) {  // it cannot be read: no sum of a page
    }
    return sum;
  };
  const VerifyReport found = find_bad(progress, [&](std::uint64_t page, const PageMark& mark) {
    here.page = there.page = page;
    const std::uint32_t sum_here = sum_of(*file_, here), sum_there = sum_of(*backup.file_, there);
    PageMark other;
    backup.file_->ledger().read_marks(page, std::span(&other, 1));
    const bool good_there = other.written && !other.damaged && other.checksum == sum_there && sum_there != 0;
    const bool known = mark.checksum != 0 && !mark.damaged;
    bool repaired = true;
    if (known && sum_here == mark.checksum)
      file_->seal(page);  // only its bit was missing
    else if (known && good_there && sum_there == mark.checksum)
      file_->write_as_stored(std::span(&there, 1));
    else if (!known && !mark.damaged && good_there && sum_here == sum_there &&
             std::memcmp(here.memory, there.memory, geometry.bytes_in(page)) == 0)
      file_->seal(page);
    else
      repaired = false;
    report.repaired_pages += repaired;
    add_page(repaired ? report.repaired : report.left, geometry, page);
  });
  report.bad_pages = found.bad_pages;
  // All of it is what checksums say: whoever changed it, nothing is left of that.
  if (report.repaired_pages == found.bad_pages && found.verified == geometry.pages()) file_->accept_changes();
  file_->sync();
  file_->set_ahead();  // of the last commit
  release_hot();       // what was read from a bad page
  return report;
}

}  // namespace embermap
