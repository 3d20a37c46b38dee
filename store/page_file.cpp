#include "store/page_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/stopwatch.hpp"
#include "io/checksum.hpp"
#include "io/elements.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kStagingBytes = 2U << 20;  // of pages that are changed on their way to the file
constexpr std::uint64_t kGrainBytes = 64U << 10;   // what one thread does at a time

void sort_by_page(std::span<PageBuffer> pages) {
  std::sort(pages.begin(), pages.end(), [](const PageBuffer& a, const PageBuffer& b) { return a.page < b.page; });
}

template <class T>
void fill_elements(std::byte* out, std::uint64_t count, double value) {
  const T element = static_cast<T>(value);
  for (std::uint64_t i = 0; i < count; ++i) std::memcpy(out + i * sizeof(T), &element, sizeof(T));
}

}  // namespace

PageFile::PageFile(std::string table, File data, PageLedger ledger, const Schema& schema, const Geometry& geometry,
                   Initializer init, std::uint64_t seed, ThreadPool& compute, ThreadPool& io, std::function<void()> before_write,
                   const PageFileOptions& options)
    : table_{std::move(table)},
      data_{std::move(data)},
      ledger_{std::move(ledger)},
      schema_{schema},
      geometry_{geometry},
      pages_{0},
      init_{init},
      seed_{seed},
      compute_{compute},
      io_threads_{io},
      before_write_{std::move(before_write)},
      alone_{options.alone},
      swap_{options.swap && item_size(schema.dtype()) > 1},
      logged_{options.logged},
      log_{options.log},
      id_{options.id},
      skip_damaged_{options.skip_damaged},
      verify_reads_{options.verify_reads},
      page_io_{std::make_unique<PageIo>(data_, io, options.io)} {
  if (swap_ && schema_.structured())
    throw InvalidArgument(fmt::format("table '{}': structured records have the byte order of this machine", printable(table_)));
  pages_ = geometry_.pages();
}

PageIo& PageFile::io() const {
  if (!page_io_) throw ClosedError(fmt::format("{} is closed", printable(data_.path())));
  return *page_io_;
}

std::string PageFile::describe(std::uint64_t page) const {
  const std::uint64_t first = page * geometry_.rows_per_page;
  return fmt::format("page {} (rows {} to {}) of table '{}'", page, first, first + geometry_.rows_in(page) - 1,
                     printable(table_));
}

void PageFile::generate(std::uint64_t first, std::uint64_t count, std::byte* out) const {
  if (schema_.structured()) generate_states(count, out);
  generate_rows(init_, seed_, first, count, schema_.dim(), schema_.dtype(), out, geometry_.stride);
}

void PageFile::generate_states(std::uint64_t count, std::byte* out) const {
  std::memset(out, 0, count * geometry_.stride);
  for (std::size_t f = 1; f < schema_.fields().size(); ++f) {
    const Field& field = schema_.fields()[f];
    if (field.initial == 0) continue;
    for (std::uint64_t row = 0; row < count; ++row) {
      std::byte* at = out + row * geometry_.stride + field.offset;
      if (field.dtype == DType::kFloat64)
        fill_elements<double>(at, field.elements, field.initial);
      else
        fill_elements<float>(at, field.elements, field.initial);
    }
  }
}

bool PageFile::written(std::uint64_t page) const {
  return ledger_.written(page) || (logged_ != nullptr && logged_->find(id_, page));
}

std::uint64_t PageFile::count_written() const {
  std::uint64_t count = ledger_.count_written();
  if (logged_ != nullptr)
    logged_->for_each(id_, [&](std::uint64_t page, const LoggedVersion&) { count += !ledger_.written(page); });
  return count;
}

void PageFile::read(std::span<PageBuffer> pages, const StillWanted& wanted, std::span<std::uint8_t> there) {
  if (pages.empty()) return;
  sort_by_page(pages);
  if (logged_ == nullptr) return read_now(pages, wanted, there);
  logged_->reading([&] {
    std::fill(there.begin(), there.end(), std::uint8_t{0});  // it may be run again
    read_now(pages, wanted, there);
  });
}

void PageFile::read_now(std::span<const PageBuffer> pages, const StillWanted& wanted, std::span<std::uint8_t> there) {
  const auto is_there = [&](std::size_t i) {
    if (!there.empty()) there[i] = 1;
    if (wanted && !wanted()) throw NotWanted();
  };
  std::vector<LoggedVersion> versions(pages.size());
  if (logged_ != nullptr && !logged_->empty()) {
    std::vector<std::uint64_t> numbers(pages.size());
    std::transform(pages.begin(), pages.end(), numbers.begin(), [](const PageBuffer& page) { return page.page; });
    logged_->find(id_, numbers, versions);
  }
  std::vector<PageBuffer> written, fresh;
  std::vector<std::optional<std::uint32_t>> recorded;
  std::vector<std::size_t> in_log, written_at, fresh_at;  // of `pages`
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const PageBuffer& page = pages[i];
    if (versions[i].there()) {
      if (versions[i].in_place) {
        written.push_back(page);
        written_at.push_back(i);
        recorded.emplace_back(versions[i].checksum);
      } else {
        in_log.push_back(i);
      }
      continue;
    }
    const bool is_written = ledger_.written(page.page);
    // A page has a checksum if and only if it was written: a bit that is wrong would show other rows.
    if (!is_written && ledger_.checksum(page.page)) throw damaged(page.page, "is marked as never written, but has a checksum");
    if (is_written && ledger_.keeps_checksums() && !ledger_.adopted() && !ledger_.checksum(page.page))
      throw damaged(page.page, "is marked as written, but has no checksum");
    if (!is_written) {
      fresh.push_back(page);
      fresh_at.push_back(i);
      continue;
    }
    written.push_back(page);
    written_at.push_back(i);
    recorded.push_back(ledger_.checksum(page.page));
  }

  if (verify_reads_ && !ledger_.keeps_checksums()) recall(written, recorded);

  const auto generate_page = [&](const PageBuffer& page) {
    const std::uint64_t rows = geometry_.rows_in(page.page);
    generate(page.page * geometry_.rows_per_page, rows, page.memory);
    std::memset(page.memory + rows * geometry_.stride, 0, (geometry_.rows_per_page - rows) * geometry_.stride);
  };
  const Meanwhile meanwhile{.count = fresh.size(),
                            .grain = std::max<std::uint64_t>(1, kGrainBytes / geometry_.page_bytes()),
                            .pool = &compute_,
                            .body = [&](std::uint64_t begin, std::uint64_t end) {
                              for (; begin < end; ++begin) {
                                generate_page(fresh[begin]);
                                is_there(fresh_at[begin]);
                              }
                            }};
  const std::vector<IoPiece> pieces = pieces_of(written);
  const Stopwatch watch(counters_.read_nanoseconds);
  const PageIo::Done done = [&](std::size_t i) {
    counters_.bytes_read += pieces[i].bytes;
    arrived(written[i], recorded[i]);
    is_there(written_at[i]);
  };
  if (in_log.empty()) {
    counters_.read_requests += io().read(pieces, done, meanwhile);
  } else {
    std::sort(in_log.begin(), in_log.end(), [&](auto a, auto b) { return versions[a].position < versions[b].position; });
    std::vector<IoPiece> log_pieces;
    log_pieces.reserve(in_log.size());
    for (const std::size_t i : in_log)
      log_pieces.push_back({versions[i].position, pages[i].memory, geometry_.page_bytes(), geometry_.page_bytes()});
    const PageIo::Done log_done = [&](std::size_t i) {
      counters_.bytes_read += log_pieces[i].bytes;
      arrived(pages[in_log[i]], versions[in_log[i]].checksum);
      is_there(in_log[i]);
    };
    // At once: a batch has some of its pages in the file and some in the log, and waits for all of them.
    counters_.read_requests += io().read(pieces, done, meanwhile, {*logged_->io(), log_pieces, log_done});
  }
  counters_.pages_read += written.size() + in_log.size();
  counters_.pages_generated += fresh.size();
}

// Fills in the checksums that are not in memory. Ascending pages.
void PageFile::recall(std::span<const PageBuffer> pages, std::span<std::optional<std::uint32_t>> recorded) const {
  std::vector<std::uint64_t> numbers;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (recorded[i]) continue;
    numbers.push_back(pages[i].page);
    places.push_back(i);
  }
  std::vector<std::uint32_t> sums(numbers.size());
  ledger_.read_checksums_of(numbers, sums, io_threads_);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (sums[i] != 0)
      recorded[places[i]] = sums[i];
    else if (!ledger_.adopted())
      throw damaged(numbers[i], "is marked as written, but has no checksum");
  }
}

std::vector<IoPiece> PageFile::pieces_of(std::span<const PageBuffer> pages) const {
  std::vector<IoPiece> pieces;
  pieces.reserve(pages.size());
  for (const PageBuffer& page : pages)
    pieces.push_back({geometry_.offset_of(page.page), page.memory, geometry_.bytes_in(page.page), geometry_.page_bytes()});
  return pieces;
}

std::uint64_t PageFile::elements_in(std::uint64_t page) const { return geometry_.bytes_in(page) / item_size(schema_.dtype()); }

void PageFile::arrived(const PageBuffer& page, std::optional<std::uint32_t> recorded) const {
  const std::uint64_t length = geometry_.bytes_in(page.page);
  std::memset(page.memory + length, 0, geometry_.page_bytes() - length);
  if (recorded && *recorded != page_checksum({page.memory, length})) throw damaged(page.page, "does not match its checksum");
  if (swap_) swap_elements(page.memory, page.memory, elements_in(page.page), item_size(schema_.dtype()));
}

void PageFile::read_stored(std::span<PageBuffer> pages, const std::function<void(const PageBuffer&)>& done) {
  sort_by_page(pages);
  const std::vector<IoPiece> pieces = pieces_of(pages);
  const Stopwatch watch(counters_.read_nanoseconds);
  counters_.read_requests += io().read(pieces, [&](std::size_t i) {
    counters_.bytes_read += pieces[i].bytes;
    ++counters_.pages_read;
    done(pages[i]);
  });
}

CorruptError PageFile::damaged(std::uint64_t page, std::string_view how) const {
  return CorruptError(fmt::format("{}: {} {}{}", printable(data_.path()), describe(page), how,
                                  alone_ ? "" : "; if a writer has changed the store since it was opened, open it again") +
                      (ledger_.adopted()
                           ? "; if another program changed the file on purpose, accept() of the table, or 'embermap "
                             "verify --accept', takes it as it is"
                           : ""));
}

void PageFile::write(std::span<PageBuffer> pages) {
  if (pages.empty()) return;
  before_write_();
  sort_by_page(pages);
  const Stopwatch watch(counters_.write_nanoseconds);
  if (log_ != nullptr) {
    write_logged(pages);
    return;
  }
  ahead_.store(true);
  note_writing();
  if (swap_) {
    write_swapped(pages);
    return;
  }
  // Each checksum follows its page: whatever fails, the ledger speaks of what the file has.
  write_stored(pages, pieces_of(pages), to_ledger());
}

PageFile::Recorded PageFile::to_ledger() {
  return [this](std::uint64_t page, std::uint32_t checksum) { ledger_.record(page, checksum); };
}

void PageFile::write_as_stored(std::span<PageBuffer> pages) {
  if (pages.empty()) return;
  before_write_();
  ahead_.store(true);
  note_writing();
  if (log_ != nullptr && ledger_.stamp()) {
    // Past the log, which would tell after a crash that pages were on their way.
    ledger_.set_stamp(std::nullopt);
    sync_once([&] { ledger_.sync(); });
  }
  sort_by_page(pages);
  write_stored(pages, pieces_of(pages), to_ledger());
}

void PageFile::note_writing() {
  if (!ledger_.adopted()) return;
  const std::lock_guard lock(stamp_mutex_);
  if (writing_) return;
  const auto stamp = ledger_.stamp();
  if (stamp && !what_changed(*stamp, stamp_of(data_)).empty()) stays_ = stamp;
  writing_ = true;
}

bool PageFile::writing() const {
  const std::lock_guard lock(stamp_mutex_);
  return writing_;
}

void PageFile::record_stamp() {
  const std::lock_guard lock(stamp_mutex_);
  if (!writing_) return;
  ledger_.set_stamp(stays_ ? *stays_ : stamp_of(data_));
  writing_ = false;
}

void PageFile::accept_changes() {
  if (!ledger_.adopted()) return;
  const std::lock_guard lock(stamp_mutex_);
  stays_.reset();
  writing_ = true;
}

void PageFile::write_stored(std::span<const PageBuffer> pages, std::span<const IoPiece> pieces, const Recorded& recorded) {
  std::vector<std::uint32_t> checksums(pieces.size());
  compute_.parallel_for(pieces.size(), std::max<std::uint64_t>(1, kGrainBytes / geometry_.page_bytes()),
                        [&](std::uint64_t begin, std::uint64_t end) {
                          for (std::uint64_t i = begin; i < end; ++i)
                            checksums[i] = page_checksum({pieces[i].memory, static_cast<std::size_t>(pieces[i].bytes)});
                        });
  // Each checksum follows its page: whatever fails, the ledger speaks of what the file has.
  std::vector<std::uint8_t> done(pieces.size(), 0);
  try {
    counters_.write_requests += io().write(pieces, [&](std::size_t i) {
      recorded(pages[i].page, checksums[i]);
      done[i] = 1;
      ++counters_.pages_written;
      counters_.bytes_written += pieces[i].bytes;
    });
  } catch (...) {
    seal_unfinished(pages, done);
    throw;
  }
}

void PageFile::seal_unfinished(std::span<const PageBuffer> pages, std::span<const std::uint8_t> done) noexcept {
  try {
    std::vector<std::uint64_t> unfinished;  // those never written before are still generated
    for (std::size_t i = 0; i < pages.size(); ++i)
      if (done[i] == 0 && ledger_.written(pages[i].page)) unfinished.push_back(pages[i].page);
    seal_pages(unfinished, /*forget_unreadable=*/false);  // they may be as they were
  } catch (const std::exception&) {
    // The failure that led here is the one to report.
  }
}

void PageFile::write_logged(std::span<const PageBuffer> pages) {
  std::vector<PageBuffer> in_place;
  std::vector<std::byte*> memory;
  std::vector<std::uint64_t> numbers;
  for (const PageBuffer& page : pages) {
    // In this order: a page that is being applied is in the ledger before the log forgets it.
    if (log_->may_write_in_place(id_, page.page) && !ledger_.written(page.page)) {
      in_place.push_back(page);
    } else {
      numbers.push_back(page.page);
      memory.push_back(page.memory);
    }
  }
  write_in_place(in_place);
  const std::uint64_t page_bytes = geometry_.page_bytes();
  log_->append(
      id_, numbers, page_bytes,
      [&](std::size_t i, std::byte* out) {
        const std::uint64_t length = geometry_.bytes_in(numbers[i]);
        if (swap_)
          swap_elements(memory[i], out, elements_in(numbers[i]), item_size(schema_.dtype()));
        else
          std::memcpy(out, memory[i], length);
        std::memset(out + length, 0, page_bytes - length);
        return page_checksum({out, static_cast<std::size_t>(length)});
      },
      [&](std::size_t first, std::size_t count) {
        for (std::size_t i = first; i < first + count; ++i) counters_.bytes_written += geometry_.bytes_in(numbers[i]);
        counters_.pages_written += count;
        ++counters_.write_requests;
      });
}

void PageFile::write_in_place(std::span<const PageBuffer> pages) {
  if (pages.empty()) return;
  std::mutex mutex;
  std::vector<LogEntry> done;
  done.reserve(pages.size());
  try {
    write_stored(pages, pieces_of(pages), [&](std::uint64_t page, std::uint32_t checksum) {
      const std::lock_guard lock(mutex);
      done.push_back({page, checksum, 0});
    });
    log_->append_in_place(id_, done);
  } catch (...) {
    note_unfinished(pages);
    throw;
  }
}

void PageFile::note_unfinished(std::span<const PageBuffer> pages) noexcept {
  try {
    // Those the log does not know are still generated; the others may have their old bytes, their new ones, or a part of each.
    for (const PageBuffer& page : pages) {
      if (!log_->find(id_, page.page)) continue;
      const AlignedBuffer memory(geometry_.page_bytes());
      PageBuffer stored{page.page, memory.data()};
      LogEntry entry{page.page, 0, 0};
      read_stored({&stored, 1}, [&](const PageBuffer&) {
        entry.checksum = page_checksum({memory.data(), static_cast<std::size_t>(geometry_.bytes_in(page.page))});
      });
      log_->append_in_place(id_, {&entry, 1});
    }
  } catch (const std::exception&) {
    // The failure that led here is the one to report.
  }
}

void PageFile::write_header(std::string_view header) {
  if (log_ != nullptr)
    log_->append_header(id_, std::as_bytes(std::span(header)));
  else
    data_.write(0, header);
}

void PageFile::check_applied(std::uint64_t page) const {
  if (page >= geometry_.pages())
    throw FormatError(data_.path(), fmt::format("the redo log has page {} for table '{}', which has {}", page, printable(table_),
                                                geometry_.pages()));
}

void PageFile::apply(std::span<const LogTarget::Page> pages) {
  std::vector<IoPiece> pieces;
  pieces.reserve(pages.size());
  for (const LogTarget::Page& page : pages) {
    check_applied(page.page);
    pieces.push_back({geometry_.offset_of(page.page), page.memory, geometry_.bytes_in(page.page), geometry_.page_bytes()});
  }
  std::vector<std::uint8_t> bad(pages.size(), 0);
  compute_.parallel_for(
      pieces.size(), std::max<std::uint64_t>(1, kGrainBytes / geometry_.page_bytes()),
      [&](std::uint64_t begin, std::uint64_t end) {
        for (std::uint64_t i = begin; i < end; ++i)
          bad[i] = page_checksum({pieces[i].memory, static_cast<std::size_t>(pieces[i].bytes)}) != pages[i].checksum;
      });
  std::vector<LogTarget::Page> whole;
  if (const auto first = std::find(bad.begin(), bad.end(), 1); first != bad.end()) {
    if (!skip_damaged_)
      throw damaged(pages[static_cast<std::size_t>(first - bad.begin())].page, "does not match its checksum in the redo log");
    skipped_ = true;
    for (std::size_t i = 0; i < pages.size(); ++i)
      if (bad[i] == 0) {
        pieces[whole.size()] = pieces[i];
        whole.push_back(pages[i]);
      }
    pieces.resize(whole.size());
    pages = whole;
  }
  note_writing();
  io().write(pieces, [&](std::size_t i) { ledger_.record(pages[i].page, pages[i].checksum); });
}

void PageFile::apply_header(std::span<const std::byte> header) { data_.write(0, header); }

void PageFile::apply_in_place(std::uint64_t page, std::uint32_t checksum) {
  check_applied(page);
  ledger_.record(page, checksum);
}

void PageFile::sync_data() {
  sync_once([&] { data_.sync(); });
}

void PageFile::sync_applied(std::uint64_t commit) { sync(commit); }

void PageFile::write_swapped(std::span<const PageBuffer> pages) {
  const std::uint64_t page_bytes = geometry_.page_bytes();
  const std::uint64_t together = std::min<std::uint64_t>(std::max<std::uint64_t>(1, kStagingBytes / page_bytes), pages.size());
  const AlignedBuffer staging(checked_mul(together, page_bytes, "bytes of pages on their way to the file"));
  for (std::uint64_t first = 0; first < pages.size(); first += together) {
    const auto some = pages.subspan(first, std::min(together, pages.size() - first));
    std::vector<IoPiece> pieces = pieces_of(some);
    for (std::uint64_t i = 0; i < some.size(); ++i) {
      pieces[i].memory = staging.data() + i * page_bytes;
      swap_elements(some[i].memory, pieces[i].memory, elements_in(some[i].page), item_size(schema_.dtype()));
    }
    write_stored(some, pieces, to_ledger());
  }
}

void PageFile::seal(std::span<const std::uint64_t> pages) {
  // Whoever reads a page that cannot be read meets the error again; here nothing is known about it.
  seal_pages(pages, /*forget_unreadable=*/true);
}

void PageFile::seal_pages(std::span<const std::uint64_t> pages, bool forget_unreadable) {
  if (pages.empty()) return;
  before_write_();
  ahead_.store(true);
  const std::uint64_t page_bytes = geometry_.page_bytes();
  const std::uint64_t together = std::min<std::uint64_t>(std::max<std::uint64_t>(1, kStagingBytes / page_bytes), pages.size());
  const AlignedBuffer memory(checked_mul(together, page_bytes, "bytes of pages to be sealed"));
  const auto seal_some = [&](std::span<const std::uint64_t> some) {
    std::vector<PageBuffer> buffers;
    for (const std::uint64_t page : some) buffers.push_back({page, memory.data() + buffers.size() * page_bytes});
    std::vector<std::uint32_t> checksums(some.size(), 0);
    try {
      read_stored(buffers, [&](const PageBuffer& page) {
        checksums[static_cast<std::uint64_t>(page.memory - memory.data()) / page_bytes] =
            page_checksum({page.memory, static_cast<std::size_t>(geometry_.bytes_in(page.page))});
      });
    } catch (const Error&) {
      if (some.size() > 1) return false;
      if (!forget_unreadable) return true;
      checksums[0] = 0;
    }
    for (std::size_t i = 0; i < some.size(); ++i) ledger_.record(some[i], checksums[i]);
    return true;
  };
  for (std::uint64_t first = 0; first < pages.size(); first += together) {
    const auto some = pages.subspan(first, std::min(together, pages.size() - first));
    if (seal_some(some)) continue;
    for (std::size_t i = 0; i < some.size(); ++i) seal_some(some.subspan(i, 1));
  }
}

template <class Sync>
void PageFile::sync_once(const Sync& sync) {
  if (sync_failed_.load())
    throw CorruptError(
        fmt::format("{}: a sync has failed; what was written since the last commit may not be on the disk. Abandon the "
                    "store and open it again",
                    printable(data_.path())));
  try {
    sync();
  } catch (const IoError& error) {
    sync_failed_.store(true);
    if (log_ != nullptr) log_->give_up(error.what());
    throw;
  }
}

void PageFile::sync(std::optional<std::uint64_t> commit) {
  // The time of the last write has to be there after a loss of power, where it is recorded.
  sync_once([&] { writing() ? data_.sync_all() : data_.sync(); });
  // A full disk may be tried again from here on.
  record_stamp();
  if (commit) ledger_.set_commit(*commit);
  ledger_.write_out();
  sync_once([&] { ledger_.sync(); });
  ahead_.store(false);
}

void PageFile::close() {
  page_io_.reset();
  data_.close();
  ledger_.close();
}

}  // namespace embermap
