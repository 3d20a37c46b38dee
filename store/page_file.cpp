#include "store/page_file.hpp"

#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.hpp"
#include "io/checksum.hpp"

namespace embermap {
namespace {

// Neighbouring pages travel in one call up to this many bytes and pieces.
constexpr std::uint64_t kRunBytes = 1U << 20;
constexpr std::size_t kRunPages = 256;

// Cuts pages sorted by number into runs of neighbours.
std::vector<std::span<const PageBuffer>> find_runs(std::span<const PageBuffer> pages, std::uint64_t page_bytes) {
  const std::size_t most = std::clamp<std::size_t>(kRunBytes / page_bytes, 1, kRunPages);
  std::vector<std::span<const PageBuffer>> runs;
  for (std::size_t begin = 0; begin < pages.size();) {
    std::size_t end = begin + 1;
    while (end < pages.size() && end - begin < most && pages[end].page == pages[end - 1].page + 1) ++end;
    runs.push_back(pages.subspan(begin, end - begin));
    begin = end;
  }
  return runs;
}

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
                   bool alone)
    : table_{std::move(table)},
      data_{std::move(data)},
      ledger_{std::move(ledger)},
      schema_{schema},
      geometry_{geometry},
      init_{init},
      seed_{seed},
      compute_{compute},
      io_{io},
      before_write_{std::move(before_write)},
      alone_{alone} {}

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
        fill_elements<double>(at, schema_.dim(), field.initial);
      else
        fill_elements<float>(at, schema_.dim(), field.initial);
    }
  }
}

void PageFile::read(std::span<PageBuffer> pages) {
  if (pages.empty()) return;
  sort_by_page(pages);
  std::vector<PageBuffer> written, fresh;
  for (const PageBuffer& page : pages) {
    const bool is_written = ledger_.written(page.page);
    // A page has a checksum if and only if it was written: a bit that is wrong would show other rows.
    if (!is_written && ledger_.checksum(page.page)) throw damaged(page.page, "is marked as never written, but has a checksum");
    if (is_written && ledger_.keeps_checksums() && !ledger_.adopted() && !ledger_.checksum(page.page))
      throw damaged(page.page, "is marked as written, but has no checksum");
    (is_written ? written : fresh).push_back(page);
  }

  const auto runs = find_runs(written, geometry_.page_bytes());
  io_.parallel_for(runs.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) read_run(runs[i]);
  });
  compute_.parallel_for(fresh.size(), std::max<std::uint64_t>(1, (64U << 10) / geometry_.page_bytes()),
                        [&](std::uint64_t begin, std::uint64_t end) {
                          for (std::uint64_t i = begin; i < end; ++i) {
                            const std::uint64_t rows = geometry_.rows_in(fresh[i].page);
                            generate(fresh[i].page * geometry_.rows_per_page, rows, fresh[i].memory);
                            std::memset(fresh[i].memory + rows * geometry_.stride, 0,
                                        (geometry_.rows_per_page - rows) * geometry_.stride);
                          }
                        });
  counters_.pages_read += written.size();
  counters_.pages_generated += fresh.size();
}

CorruptError PageFile::damaged(std::uint64_t page, std::string_view how) const {
  return CorruptError(fmt::format("{}: {} {}{}", printable(data_.path()), describe(page), how,
                                  alone_ ? "" : "; if a writer has changed the store since it was opened, open it again"));
}

void PageFile::read_run(std::span<const PageBuffer> run) {
  std::vector<iovec> pieces(run.size());
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < run.size(); ++i) {
    pieces[i] = {run[i].memory, geometry_.bytes_in(run[i].page)};
    bytes += pieces[i].iov_len;
  }
  data_.read(geometry_.offset_of(run.front().page), pieces);
  counters_.bytes_read += bytes;
  for (const PageBuffer& page : run) {
    const std::uint64_t length = geometry_.bytes_in(page.page);
    std::memset(page.memory + length, 0, geometry_.page_bytes() - length);
    const auto recorded = ledger_.checksum(page.page);
    if (recorded && *recorded != page_checksum({page.memory, length})) throw damaged(page.page, "does not match its checksum");
  }
}

void PageFile::write(std::span<PageBuffer> pages) {
  if (pages.empty()) return;
  before_write_();
  ahead_.store(true);
  sort_by_page(pages);
  const auto runs = find_runs(pages, geometry_.page_bytes());
  io_.parallel_for(runs.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) write_run(runs[i]);
  });
}

void PageFile::write_run(std::span<const PageBuffer> run) {
  std::vector<iovec> pieces(run.size());
  std::vector<std::uint32_t> checksums(run.size());
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < run.size(); ++i) {
    const std::uint64_t length = geometry_.bytes_in(run[i].page);
    pieces[i] = {run[i].memory, length};
    checksums[i] = page_checksum({run[i].memory, length});
    bytes += length;
  }
  data_.write(geometry_.offset_of(run.front().page), pieces);
  for (std::size_t i = 0; i < run.size(); ++i) ledger_.record(run[i].page, checksums[i]);
  counters_.pages_written += run.size();
  counters_.bytes_written += bytes;
}

void PageFile::seal(std::uint64_t page) {
  before_write_();
  ahead_.store(true);
  std::vector<std::byte> bytes(geometry_.bytes_in(page));
  std::uint32_t checksum = 0;
  try {
    data_.read(geometry_.offset_of(page), bytes);
    checksum = page_checksum(bytes);
  } catch (const Error&) {
    // Whoever reads the page meets the error again.
  }
  ledger_.record(page, checksum);
}

void PageFile::sync() {
  const auto sync_once = [&](const auto& sync) {
    if (sync_failed_.load())
      throw CorruptError(
          fmt::format("{}: a sync has failed; what was written since the last commit may not be on the disk. Abandon the "
                      "store and open it again",
                      printable(data_.path())));
    try {
      sync();
    } catch (const IoError&) {
      sync_failed_.store(true);
      throw;
    }
  };
  sync_once([&] { data_.sync(); });
  ledger_.write_out();  // a full disk may be tried again
  sync_once([&] { ledger_.sync(); });
  ahead_.store(false);
}

void PageFile::close() {
  data_.close();
  ledger_.close();
}

}  // namespace embermap
