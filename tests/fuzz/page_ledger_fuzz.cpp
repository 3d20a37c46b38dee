// NAME.pages. Such a file is mostly zeros, so an input describes one: 40 bytes of header, the file's size (2 bytes of units of
// 512 bytes, and a byte by how much to shift it), and then pieces: sector (2 bytes), place in it (1 byte, doubled), length (1
// byte), bytes.
#include "store/page_ledger.hpp"

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "io/checksum.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kSector = 512;

// The file; with `sealed`, its header and sectors have the checksums that belong to them, so that mutations get past those.
File make_file(std::span<const std::byte> input, bool sealed) {
  Taker taker(input);
  std::vector<std::byte> header(40);
  const auto given = taker.piece(header.size());
  std::copy(given.begin(), given.end(), header.begin());
  if (sealed) {
    const std::uint64_t sum = checksum64(std::span(header).first(32));
    std::memcpy(header.data() + 32, &sum, sizeof sum);
  }
  const std::uint64_t units = taker.number(2);
  const std::uint64_t size = units * kSector << (taker.number(1) % 16);
  File file = folder().make("t.pages", header);
  std::set<std::uint64_t> sectors;
  while (!taker.empty()) {
    const std::uint64_t sector = taker.number(2);
    const std::uint64_t place = taker.number(1) * 2;
    const auto piece = taker.piece(std::min<std::uint64_t>(taker.number(1), kSector - place));
    if (sector < 8) continue;
    file.write(sector * kSector + place, piece);
    sectors.insert(sector);
  }
  for (const std::uint64_t sector : sectors) {
    std::byte content[kSector - 4] = {};
    file.read_some(sector * kSector, content);
    const std::uint32_t sum = sector_checksum(content, sector);
    if (sealed) file.write((sector + 1) * kSector - 4, std::as_bytes(std::span(&sum, 1)));
  }
  file.resize(size);
  return file;
}

void look(const PageLedger& ledger) {
  const std::uint64_t pages = ledger.pages();
  require(ledger.count_written() <= pages || ledger.adopted(), "more pages written than there are");
  std::uint64_t page = 0;
  for (int i = 0; i < 200 && page < pages; ++i) {
    const std::uint64_t next = ledger.next_marked(page);
    require(next >= page && next <= pages, "the next marked page lies before the one asked for");
    page = next + 1;
  }
  std::vector<std::uint32_t> sums(std::min<std::uint64_t>(pages, 3000));
  ledger.read_checksums(0, sums);
  ledger.read_checksums(pages - sums.size(), sums);
}

// What is done about damage, wherever it is.
void mend(PageLedger& ledger) {
  std::vector<PageMark> marks(std::min<std::uint64_t>(ledger.pages(), 3000));
  ledger.forget_damage();
  ledger.forget_unwritten();
  ledger.read_marks(0, marks);
  for (const PageMark& mark : marks) {
    require(!mark.damaged, "damage that stays");
    require(mark.written || mark.checksum == 0, "a checksum of a page never written");
  }
  ledger.flush();
}

void change(PageLedger& ledger) {
  const std::uint64_t pages = ledger.pages();
  if (pages < 100'000) ledger.keep_checksums();
  for (const std::uint64_t page : {std::uint64_t{0}, pages / 2, pages - 1}) ledger.record(page, 7);
  ledger.flush();
  std::vector<std::uint32_t> sum(1);
  for (const std::uint64_t page : {std::uint64_t{0}, pages / 2, pages - 1}) {
    ledger.read_checksums(page, sum);
    require(ledger.written(page) && sum[0] == 7, "a page that was recorded and is not there");
  }
  ledger.resize(pages / 2 + 1);
  ledger.resize(pages + 40'000);
  require(ledger.pages() == pages + 40'000 && ledger.written(0), "a ledger resized to another size");
  require(ledger.adopted() || !ledger.written(pages + 1), "a new page that counts as written");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  for (const bool sealed : {false, true}) {
    try {
      PageLedger ledger = PageLedger::open(make_file(input, sealed));
      if (ledger.pages() == 0) continue;
      try {
        look(ledger);
      } catch (const CorruptError&) {
        mend(ledger);
        look(ledger);
      }
      change(ledger);
      ledger.close();
      const PageLedger again = PageLedger::open(File::open(folder().path() / "t.pages", File::Mode::kRead));
      require(again.written(0), "a page that was recorded and is lost");
    } catch (const Error&) {  // refused
    }
  }
}

}  // namespace embermap::fuzz
