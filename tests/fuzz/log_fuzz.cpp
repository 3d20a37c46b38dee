// redo.log. Such a file is mostly zeros, so an input describes one: a byte whose bits 0 and 1 say which header slots there are,
// 56 bytes of each of these, the file's size (2 bytes of blocks of 4096 bytes), and then pieces: block (2 bytes), place in it (2
// bytes), length (1 byte), bytes. The log belongs to a table "t", number 1, of 500 rows of 32 bytes: four pages of 4096 bytes, of
// which the last is cut.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/error.hpp"
#include "io/checksum.hpp"
#include "store/log_format.hpp"
#include "store/log_view.hpp"
#include "store/page_file.hpp"
#include "store/redo_log.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kPages = 4, kPage = 4096;
constexpr std::uint64_t kMostBlocks = 4096;        // of a log
constexpr std::uint64_t kLastCommit = 1ULL << 61;  // numbers of commits may not come to 2^62
constexpr PageIoOptions kIo{.engine = IoEngine::kThreads, .direct = false, .depth = 4};

using PageBytes = std::array<std::byte, kPage>;

ThreadPool& pool() {
  static ThreadPool instance(1);
  return instance;
}

const Schema& schema() {
  static const Schema instance(8, DType::kFloat32, {});
  return instance;
}

Geometry geometry() { return make_geometry(500, 32, 4, false, kPage); }

// What the table's file has: each byte of page p is p + 1.
PageBytes stored_page(std::uint64_t page) {
  PageBytes bytes{};
  std::fill_n(bytes.begin(), geometry().bytes_in(page), std::byte(page + 1));
  return bytes;
}

std::uint32_t checksum_of(std::uint64_t page, std::span<const std::byte> bytes) {
  return page_checksum(page < kPages ? bytes.first(geometry().bytes_in(page)) : bytes);
}

void make_table() {
  const File data = folder().make("t.npy", std::vector<std::byte>(kDataOffset));
  PageLedger ledger = PageLedger::create(folder().make("t.pages", {}), kPages, false);
  for (std::uint64_t page = 0; page < kPages; ++page) {
    const PageBytes bytes = stored_page(page);
    data.write(geometry().offset_of(page), std::span(bytes).first(geometry().bytes_in(page)));
    if (page != 2) ledger.record(page, checksum_of(page, bytes));  // one that was never written, as far as it knows
  }
  ledger.flush();
}

PageFile open_table(const PageFileOptions& options) {
  return {"t",
          File::open(folder().path() / "t.npy", File::Mode::kReadWrite),
          PageLedger::open(File::open(folder().path() / "t.pages", File::Mode::kReadWrite)),
          schema(),
          geometry(),
          Zeros{},
          0,
          pool(),
          pool(),
          [] {},
          options};
}

// Gives the record at this place the checksums that belong to it, and the place that it has.
void seal(const File& file, std::uint64_t position, std::uint64_t file_bytes) {
  LogRecordHeader header;
  file.read(position, std::as_writable_bytes(std::span(&header, 1)));
  header.position = position;
  const bool text = header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit);
  const bool in_place = header.kind == static_cast<std::uint32_t>(LogRecordKind::kInPlace);
  const std::uint64_t room = file_bytes - position - sizeof header;
  const std::uint64_t entry_bytes = text ? 1 : sizeof(LogEntry);
  if (header.count > room / entry_bytes) return;
  std::vector<std::byte> memory(sizeof header + header.count * entry_bytes);
  file.read(position, memory);
  auto* const entries = reinterpret_cast<LogEntry*>(memory.data() + sizeof header);
  const std::uint64_t known = text ? 0 : std::min<std::uint64_t>(header.count, 8);
  for (std::uint64_t i = 0; i < known; ++i) {
    PageBytes bytes{};
    if (in_place && entries[i].page < kPages)
      bytes = stored_page(entries[i].page);
    else if (file.read_some(position + log_record_head(header.count) + i * kPage, bytes) == 0)
      break;
    entries[i].checksum = checksum_of(entries[i].page, bytes);
  }
  seal_log_record(header, memory.data(), memory.size() - sizeof header);
  file.write(position, memory);
}

// With `sealed`, headers and records have the checksums that belong to them, so that mutations get past those.
File make_log(std::span<const std::byte> input, bool sealed) {
  Taker taker(input);
  const std::uint64_t slots = taker.number(1);
  File file = folder().make(kLogName, {});
  for (std::uint64_t slot = 0; slot < 2; ++slot) {
    if ((slots >> slot) % 2 == 0) continue;
    std::array<std::byte, 64> header{};
    const auto given = taker.piece(56);
    std::copy(given.begin(), given.end(), header.begin());
    const std::uint64_t sum = checksum64(std::span(header).first(56));
    if (sealed) std::memcpy(header.data() + 56, &sum, sizeof sum);
    file.write(slot * kLogBlock, header);
  }
  const std::uint64_t size = std::min(taker.number(2), kMostBlocks) * kLogBlock;
  std::vector<std::uint64_t> records;
  while (!taker.empty()) {
    const std::uint64_t block = taker.number(2) % kMostBlocks;
    const std::uint64_t place = taker.number(2) % kLogBlock;
    const auto piece = taker.piece(taker.number(1));
    if (block * kLogBlock < kLogStart) continue;
    file.write(block * kLogBlock + place, piece);
    if (place == 0) records.push_back(block * kLogBlock);
  }
  file.resize(size);
  for (const std::uint64_t position : records)
    if (sealed && position < size) seal(file, position, size);
  return file;
}

// What the table's pages are once the log's commits count. Those of which nothing can be said are left out.
using Pages = std::map<std::uint64_t, PageBytes>;

struct Committed {
  std::uint64_t commit = 0, end = 0;
  Pages pages;
};

Committed walk(const File& file, const LogHeader& header) {
  Committed out{header.applied, header.tail, {}};
  Pages now;
  const std::uint64_t file_bytes = file.size();
  std::uint64_t position = header.tail;
  walk_log(file, header, [&](const LogRecord& record) {
    require(record.header.position == position && record.header.id == header.id, "a record that belongs elsewhere");
    require(record.end() > position && record.end() <= file_bytes, "a record that ends outside of the file");
    position = record.end();
    if (record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kCommit)) {
      require(record.text.size() == record.header.count, "a commit of another length");
      out.commit = record.header.commit;
      out.end = record.end();
      for (const auto& [page, bytes] : now) out.pages[page] = bytes;
      now.clear();
      return;
    }
    require(record.entries.size() == record.header.count && record.header.count <= kMaxLogEntries, "entries of another number");
    const bool in_place = record.header.kind == static_cast<std::uint32_t>(LogRecordKind::kInPlace);
    for (std::uint64_t i = 0; i < record.entries.size(); ++i) {
      if (record.header.table != 1 || record.entries[i].page >= kPages) continue;
      PageBytes bytes = stored_page(record.entries[i].page);
      if (!in_place) {
        (void)file.read_some(record.data(i), bytes);
        std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(geometry().bytes_in(record.entries[i].page)), bytes.end(),
                  std::byte{0});
      }
      now[record.entries[i].page] = bytes;
    }
  });
  return out;
}

// The rows of each page are those of `pages`, or else those of the file; or the page is refused.
void compare(PageFile& file, const Pages& pages, bool may_be_damaged) {
  for (std::uint64_t page = 0; page < kPages; ++page) {
    const AlignedBuffer memory(kPage);
    PageBuffer buffer{page, memory.data()};
    try {
      file.read({&buffer, 1});
    } catch (const Error&) {
      require(may_be_damaged, "a page that cannot be read though it was applied");
      continue;
    }
    const auto found = pages.find(page);
    const PageBytes expected = found != pages.end() ? found->second : page == 2 ? PageBytes{} : stored_page(page);
    require(std::equal(expected.begin(), expected.end(), memory.data()), "a page with other bytes than the last commit");
  }
}

void look_as_reader(std::uint64_t commit, const Pages& pages) {
  const auto view = LogView::open(folder().path() / kLogName, pool(), kIo, FileOps::system());
  require(view != nullptr && view->unchanged(), "a log that a reader does not find");
  require(view->commit() == commit, "a reader at another commit");
  PageFile file = open_table({.io = kIo, .alone = false, .logged = view.get(), .id = 1});
  for (const auto& [page, unused] : pages) require(file.written(page), "a committed page that counts as never written");
  compare(file, pages, /*may_be_damaged=*/true);
}

std::unique_ptr<RedoLog> open_log(std::uint64_t& saved) {
  return std::make_unique<RedoLog>(
      folder().path() / kLogName, RedoLogOptions{.limit = 1ULL << 40, .transfer_bytes = 1, .io = kIo}, pool(), pool(),
      FileOps::system(), [&saved](std::string_view) { ++saved; }, 0);
}

// Opens it as the next writer does, commits a page more, and is the writer after that.
void recover(const Committed& committed) {
  std::uint64_t saved = 0;
  Pages pages = committed.pages;
  {
    const auto log = open_log(saved);
    require(log->found().has_value() ==
                (committed.end != read_log_header(File::open(folder().path() / kLogName, File::Mode::kRead))->tail),
            "commits that are there for one and not for the other");
    for (const std::uint32_t table : log->tables())
      if (table != 1) log->detach(table, /*forget=*/true);
    PageFile plain = open_table({.io = kIo});
    log->attach(1, plain);
    log->apply_all();
    require(saved == (log->found() ? 1U : 0U), "a commit's manifest that is not saved once");
    require(log->empty() && log->statistics().log_bytes == 0, "a log that is not empty after all of it was applied");
    compare(plain, pages, /*may_be_damaged=*/false);
    log->detach(1, /*forget=*/false);

    PageFile logged = open_table({.io = kIo, .logged = log.get(), .log = log.get(), .id = 1});
    log->attach(1, logged);
    const AlignedBuffer memory(kPage);
    for (const std::uint64_t page : {std::uint64_t{2}, std::uint64_t{3}}) {
      PageBytes& bytes = pages[page];
      bytes = {};
      std::fill_n(bytes.begin(), geometry().bytes_in(page), std::byte{0x77});
      std::copy(bytes.begin(), bytes.end(), memory.data());
      PageBuffer buffer{page, memory.data()};
      logged.write({&buffer, 1});
    }
    log->finish_commit(log->begin_commit(committed.commit + 1, "text"));
    look_as_reader(committed.commit + 1, pages);
    log->detach(1, /*forget=*/false);
  }
  const auto again = open_log(saved);
  require(again->found() && again->found()->manifest == "text", "a commit that is lost");
  PageFile file = open_table({.io = kIo});
  again->attach(1, file);
  again->apply_all();
  compare(file, pages, /*may_be_damaged=*/false);
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  for (const bool sealed : {false, true}) {
    try {
      const File file = make_log(input, sealed);
      const auto header = read_log_header(file);
      const Committed committed = header ? walk(file, *header) : Committed{};
      make_table();
      if (header) look_as_reader(committed.commit, committed.pages);
      if (header && committed.commit < kLastCommit) recover(committed);
    } catch (const Error&) {  // refused
    }
  }
}

}  // namespace embermap::fuzz
