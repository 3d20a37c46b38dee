#include "store/page_ledger.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "io/checksum.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

class PageLedgerTest : public testing::Test {
 protected:
  test::TemporaryDirectory directory_;
  std::filesystem::path file_ = directory_ / "t.pages";
  PageLedger create(std::uint64_t pages, bool adopted = false) {
    return PageLedger::create(File::open(file_, File::Mode::kCreateNew), pages, adopted);
  }
  PageLedger reopen() { return PageLedger::open(File::open(file_, File::Mode::kReadWrite)); }
};

TEST_F(PageLedgerTest, RemembersBitsAndChecksumsAcrossOpens) {
  for (const bool kept : {false, true}) {
    std::filesystem::remove(file_);
    {
      PageLedger ledger = create(100'000);
      if (kept) ledger.keep_checksums();
      for (std::uint64_t page : {0U, 7U, 8U, 1023U, 1024U, 32768U, 99'999U})
        ledger.record(page, static_cast<std::uint32_t>(page + 5));
      ledger.flush();
    }
    PageLedger ledger = reopen();
    EXPECT_EQ(ledger.pages(), 100'000U);
    EXPECT_EQ(ledger.count_written(), 7U);
    EXPECT_TRUE(ledger.written(1024));
    EXPECT_FALSE(ledger.written(9));
    EXPECT_FALSE(ledger.written(1025));
    EXPECT_EQ(ledger.checksum(1024), std::nullopt) << "not in memory";
    std::vector<std::uint32_t> sums(100'000);
    ledger.read_checksums(0, sums);
    EXPECT_EQ(sums[99'999], 100'004U);
    EXPECT_EQ(sums[9], 0U);
    ledger.keep_checksums();
    EXPECT_EQ(ledger.checksum(1024), 1029U);
    EXPECT_EQ(ledger.checksum(9), std::nullopt);
  }
}

TEST_F(PageLedgerTest, TheNextMarkedPageIsNeverBeforeTheOneAskedFor) {
  for (const std::uint64_t pages : {1U, 7U, 8U, 9U, 10U, 21U, 63U, 64U, 65U, 130U, 200U}) {
    for (const std::uint64_t marked : {std::uint64_t{0}, pages / 2, pages / 8 * 8, pages - 1}) {
      if (marked >= pages) continue;
      std::filesystem::remove(file_);
      PageLedger ledger = create(pages);
      ledger.keep_checksums();
      ledger.record(marked, 5);
      ledger.flush();
      for (std::uint64_t page = 0; page <= pages; ++page) {
        const std::uint64_t next = ledger.next_marked(page);
        EXPECT_GE(next, page) << pages << " pages, " << marked << " marked";
        if (page <= marked) {
          EXPECT_LE(next, marked) << pages << " pages, from " << page;
        }
      }
    }
  }
}

TEST_F(PageLedgerTest, UnflushedChecksumsAreSeen) {
  PageLedger ledger = create(5000);
  ledger.record(4000, 77);
  EXPECT_EQ(ledger.checksum(4000), 77U);
  std::vector<std::uint32_t> sums(10);
  ledger.read_checksums(3995, sums);
  EXPECT_EQ(sums[5], 77U);
  EXPECT_EQ(sums[4], 0U);
}

TEST_F(PageLedgerTest, ManyUnflushedChecksumsFlushThemselves) {
  PageLedger ledger = create(1'000'000);
  for (std::uint64_t page = 0; page < 200'000; ++page) ledger.record(page * 5, static_cast<std::uint32_t>(page + 1));
  std::vector<std::uint32_t> sums(1'000'000);
  ledger.read_checksums(0, sums);
  for (std::uint64_t page = 0; page < 200'000; ++page) ASSERT_EQ(sums[page * 5], page + 1);
}

TEST_F(PageLedgerTest, AnAdoptedFileHasAllPages) {
  create(10, true);
  const PageLedger ledger = reopen();
  EXPECT_TRUE(ledger.written(9));
  EXPECT_EQ(ledger.count_written(), 10U);
}

TEST_F(PageLedgerTest, ResizeForgetsWhatLiesBeyondTheEnd) {
  for (const bool kept : {false, true}) {
    std::filesystem::remove(file_);
    PageLedger ledger = create(50'000);
    if (kept) ledger.keep_checksums();
    for (std::uint64_t page = 0; page < 50'000; page += 3) ledger.record(page, 9);
    ledger.resize(10'001);
    EXPECT_EQ(ledger.count_written(), 3334U);
    ledger.resize(1'000'000);  // the bits need more room: the file is written anew
    EXPECT_EQ(ledger.count_written(), 3334U);
    EXPECT_TRUE(ledger.written(9999));
    EXPECT_FALSE(ledger.written(30'000));
    ledger.record(999'999, 3);
    ledger.flush();
    std::vector<std::uint32_t> sums(1'000'000);
    ledger.read_checksums(0, sums);
    EXPECT_EQ(sums[9999], 9U);
    EXPECT_EQ(sums[30'000], 0U);
    EXPECT_EQ(sums[999'999], 3U);
    ledger.resize(0);
    ledger.resize(20);
    EXPECT_EQ(ledger.count_written(), 0U);
    const PageLedger again = reopen();
    EXPECT_EQ(again.pages(), 20U);
    EXPECT_EQ(again.count_written(), 0U);
  }
}

TEST_F(PageLedgerTest, ABillionPagesTakeNoDiskAndNoTime) {
  PageLedger ledger = create(1'000'000'000);
  ledger.record(999'999'999, 12);
  ledger.flush();
  struct stat status {};
  ASSERT_EQ(::stat(file_.c_str(), &status), 0);
  EXPECT_LT(status.st_blocks * 512, 1 << 20);
  EXPECT_TRUE(reopen().written(999'999'999));
}

TEST_F(PageLedgerTest, MarkedPagesAreFoundOneAfterAnother) {
  // Walks over all that are marked; pages in between may be given, but none may be left out.
  const auto found = [](const PageLedger& ledger) {
    std::vector<std::uint64_t> pages;
    for (std::uint64_t page = ledger.next_marked(0); page < ledger.pages(); page = ledger.next_marked(page + 1))
      if (ledger.written(page)) pages.push_back(page);
    return pages;
  };
  const std::vector<std::uint64_t> marked{0, 1, 63, 64, 65, 127, 128, 4095, 100'000, 999'999'933, 999'999'936, 999'999'998};
  for (const bool kept : {false, true}) {
    std::filesystem::remove(file_);
    PageLedger ledger = create(kept ? 1'000'000 : 999'999'999);
    if (kept) ledger.keep_checksums();
    EXPECT_EQ(ledger.next_marked(0), ledger.pages());
    std::vector<std::uint64_t> expected;
    for (const std::uint64_t page : marked)
      if (page < ledger.pages()) {
        ledger.record(page, 5);
        expected.push_back(page);
      }
    EXPECT_EQ(found(ledger), expected);
    ledger.flush();
    EXPECT_EQ(found(ledger), expected);
    EXPECT_EQ(found(reopen()), expected);
    EXPECT_EQ(ledger.next_marked(ledger.pages() + 5), ledger.pages());
  }
  // Whatever the number of pages, from every page on: the first written one that is not before it.
  for (const std::uint64_t pages : {1U, 7U, 8U, 10U, 63U, 64U, 65U, 127U, 128U, 200U})
    for (const std::uint64_t every : {1U, 3U, 50U}) {
      std::filesystem::remove(file_);
      PageLedger ledger = create(pages);
      ledger.keep_checksums();
      for (std::uint64_t page = 0; page < pages; page += every) ledger.record(page, 5);
      for (std::uint64_t page = 0; page <= pages; ++page) {
        const std::uint64_t next = ledger.next_marked(page);
        ASSERT_GE(next, page) << pages << ", " << every;
        ASSERT_LE(next, std::min(pages, (page + every - 1) / every * every)) << pages << ", " << every;
      }
      ASSERT_EQ(ledger.next_marked(pages), pages);
    }
  // A checksum without its bit is marked too.
  std::filesystem::remove(file_);
  create(50'000'000);
  const File file = File::open(file_, File::Mode::kReadWrite);
  const std::uint64_t sums = file.size() - (50'000'000ULL + 126) / 127 * 512;
  file.write(sums + 30'000'000ULL / 127 * 512 + 30'000'000ULL % 127 * 4, std::string_view("abcd"));
  const PageLedger ledger = reopen();
  EXPECT_LE(ledger.next_marked(0), 30'000'000U);
  EXPECT_EQ(ledger.next_marked(30'000'000), 30'000'000U);
  EXPECT_GT(ledger.next_marked(30'000'000 + 4096), 30'000'000U + 4096);
  std::filesystem::remove(file_);
  EXPECT_EQ(create(10, /*adopted=*/true).next_marked(3), 3U);
}

// The place of a page's checksum in a file whose checksums begin at `sums`.
std::uint64_t place_of_sum(std::uint64_t sums, std::uint64_t page) { return sums + page / 127 * 512 + page % 127 * 4; }

constexpr std::uint64_t kSums = 8192;  // of ledgers of few pages

TEST_F(PageLedgerTest, ASectorOfChecksumsThatDoesNotMatchIsNeverBelieved) {
  for (const bool kept : {false, true}) {
    std::filesystem::remove(file_);
    {
      PageLedger ledger = create(1000);
      for (std::uint64_t page = 0; page < 1000; ++page) ledger.record(page, static_cast<std::uint32_t>(page + 5));
      ledger.flush();
    }
    File::open(file_, File::Mode::kReadWrite).write(place_of_sum(kSums, 130), std::string_view("x"));
    PageLedger ledger = reopen();
    if (kept) ledger.keep_checksums();
    std::vector<std::uint32_t> sums(127), more(128);
    ledger.read_checksums(0, sums);
    EXPECT_EQ(sums[126], 131U);
    const std::string error = test::message_of<CorruptError>([&] { ledger.read_checksums(0, more); });
    EXPECT_NE(error.find("[8704, +512)"), std::string::npos) << error;
    EXPECT_NE(error.find("pages 127 to 253"), std::string::npos) << error;
    EXPECT_THROW(ledger.record(253, 1), CorruptError) << "the sector's other checksums would be lost";
    if (kept) {
      EXPECT_THROW((void)ledger.checksum(127), CorruptError);
    }
    std::vector<PageMark> marks(300);
    ledger.read_marks(0, marks);
    for (std::uint64_t page = 0; page < 300; ++page) EXPECT_EQ(marks[page].damaged, page >= 127 && page < 254) << page;
    // Others in its block are recorded and it stays damaged.
    ledger.record(0, 99);
    ledger.flush();
    EXPECT_THROW(reopen().read_checksums(127, std::span(sums)), CorruptError);

    ledger.forget_damage();
    ledger.record(127, 7);
    ledger.flush();
    const PageLedger after = reopen();
    after.read_checksums(126, sums);
    EXPECT_EQ(sums[0], 131U);
    EXPECT_EQ(sums[1], 7U);
    EXPECT_EQ(sums[2], 0U) << "none recorded";
    EXPECT_TRUE(after.written(128));
  }
}

TEST_F(PageLedgerTest, ASectorOfBitsThatDoesNotMatchIsHadFromTheChecksums) {
  {
    PageLedger ledger = create(10'000);
    for (const std::uint64_t page : {3U, 4063U, 4064U, 8000U, 9999U}) ledger.record(page, 5);
    ledger.flush();
  }
  File::open(file_, File::Mode::kReadWrite).write(4096 + 512 + 100, std::string_view("x"));
  PageLedger ledger = reopen();
  EXPECT_TRUE(ledger.written(4063));
  EXPECT_TRUE(ledger.written(9999));
  EXPECT_NE(test::message_of<CorruptError>([&] { (void)ledger.written(4064); }).find("pages 4064 to 8127"), std::string::npos);
  EXPECT_THROW(ledger.record(5000, 1), CorruptError);
  ledger.forget_damage();
  ledger.flush();
  const PageLedger after = reopen();
  EXPECT_EQ(after.count_written(), 5U);
  EXPECT_TRUE(after.written(4064));
  EXPECT_TRUE(after.written(8000));
}

TEST_F(PageLedgerTest, ASectorInThePlaceOfAnotherIsNoticed) {
  {
    PageLedger ledger = create(1000);
    for (std::uint64_t page = 0; page < 1000; ++page) ledger.record(page, static_cast<std::uint32_t>(page + 5));
    ledger.flush();
  }
  const File file = File::open(file_, File::Mode::kReadWrite);
  std::vector<std::byte> sector(512);
  file.read(kSums, sector);
  file.write(kSums + 512, sector);
  std::vector<std::uint32_t> sum(1);
  EXPECT_THROW(reopen().read_checksums(127, sum), CorruptError);
}

TEST_F(PageLedgerTest, AFileOfVersion1IsReadAndReplacedByTheFirstWriter) {
  // 40'000 pages: 4096 + 8192 bytes before the checksums, which follow each other without anything between.
  std::string text(12288 + 160'000, '\0');
  const auto put = [&](std::size_t at, auto value) { std::memcpy(text.data() + at, &value, sizeof value); };
  text.replace(0, 8, "EMBPAGES");
  put(8, std::uint32_t{1});
  put(16, std::uint64_t{40'000});
  put(24, std::uint64_t{12288});
  put(32, checksum64(std::as_bytes(std::span(text)).first(32)));
  const std::vector<std::uint64_t> pages{0, 127, 128, 4064, 32512, 39'999};
  for (const std::uint64_t page : pages) {
    text[4096 + page / 8] = static_cast<char>(text[4096 + page / 8] | 1 << page % 8);
    put(12288 + page * 4, static_cast<std::uint32_t>(page + 5));
  }
  test::write_text(file_, text);
  const auto check = [&](const PageLedger& ledger) {
    EXPECT_EQ(ledger.count_written(), pages.size());
    std::vector<std::uint32_t> sums(40'000);
    ledger.read_checksums(0, sums);
    for (const std::uint64_t page : pages) {
      EXPECT_TRUE(ledger.written(page)) << page;
      EXPECT_EQ(std::exchange(sums[page], 0), page + 5);
    }
    EXPECT_EQ(sums, std::vector<std::uint32_t>(40'000));
  };
  {
    PageLedger reader = PageLedger::open(File::open(file_, File::Mode::kRead));
    check(reader);
    reader.keep_checksums();
    check(reader);
  }
  EXPECT_EQ(test::file_text(file_), text) << "a reader changes nothing";
  check(reopen());
  EXPECT_EQ(test::file_text(file_)[8], 2);
  check(reopen());
}

TEST_F(PageLedgerTest, WhatShrinkingLeavesInTheLastSectorDoesNotComeBack) {
  for (const bool kept : {false, true}) {
    std::filesystem::remove(file_);
    PageLedger ledger = create(1000);
    if (kept) ledger.keep_checksums();
    for (std::uint64_t page = 0; page < 1000; ++page) ledger.record(page, 5);
    ledger.resize(200);
    ledger.resize(300);
    std::vector<std::uint32_t> sums(300);
    ledger.read_checksums(0, sums);
    EXPECT_EQ(std::count(sums.begin(), sums.end(), 5U), 200);
    reopen().read_checksums(0, sums);
    EXPECT_EQ(std::count(sums.begin(), sums.end(), 5U), 200);
    EXPECT_FALSE(ledger.written(200));
  }
}

TEST_F(PageLedgerTest, AnEnormousEmptyLedgerOpensAtOnce) {
  create(1ULL << 31);  // 8 GiB of checksums
  PageLedger ledger = reopen();
  EXPECT_EQ(ledger.next_marked(0), ledger.pages());
  ledger.record(ledger.pages() - 1, 5);
  ledger.flush();
  const PageLedger again = reopen();
  EXPECT_EQ(again.next_marked(again.pages() - 1), again.pages() - 1);
}

TEST_F(PageLedgerTest, RefusesForeignAndBrokenFiles) {
  create(100);
  const std::string good = test::file_text(file_);
  const auto refused = [&](std::string text) {
    test::write_text(file_, text);
    return test::message_of<FormatError>([&] { reopen(); });
  };
  EXPECT_NE(refused("").find("truncated"), std::string::npos);
  EXPECT_NE(refused(std::string(5000, 'x')).find("no magic"), std::string::npos);
  EXPECT_NE(refused(good.substr(0, good.size() - 1)).find("truncated"), std::string::npos);
  std::string newer = good;
  newer[8] = 3;
  EXPECT_NE(refused(newer).find("version 3"), std::string::npos);
  for (std::size_t byte = 12; byte < 40; ++byte) {
    std::string flipped = good;
    flipped[byte] = static_cast<char>(flipped[byte] ^ 0x40);
    EXPECT_FALSE(refused(flipped).empty()) << byte;
  }
}

}  // namespace
}  // namespace embermap
