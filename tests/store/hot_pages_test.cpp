#include "store/hot_pages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <future>
#include <iterator>
#include <list>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "base/shared_mutex.hpp"
#include "store/evicting_pages.hpp"
#include "store/whole_pages.hpp"
#include "store/worker.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using testing::ElementsAre;

// Fails reads or writes when told to, and keeps reads from one offset waiting.
class FaultyOps final : public FileOps {
 public:
  std::atomic<bool> fail_reads{false}, fail_writes{false};
  std::function<void()> before_write = [] {};
  std::atomic<unsigned> fail_one_of{0};  // reads; 0: none
  std::atomic<off_t> waiting_offset{-1};
  std::atomic<bool> waits{false};  // one is there
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    return fails(offset) ? (errno = EIO, -1) : FileOps::pread(fd, buffer, bytes, offset);
  }
  ssize_t preadv(int fd, const iovec* pieces, int count, off_t offset) override {
    return fails(offset) ? (errno = EIO, -1) : FileOps::preadv(fd, pieces, count, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    before_write();
    return fail_writes ? (errno = ENOSPC, -1) : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
    before_write();
    return fail_writes ? (errno = ENOSPC, -1) : FileOps::pwritev(fd, pieces, count, offset);
  }

 private:
  bool fails(off_t offset) {
    while (waiting_offset == offset) {
      waits = true;
      std::this_thread::yield();
    }
    const unsigned one_of = fail_one_of;
    return fail_reads || (one_of != 0 && ++reads_ % one_of == 0);
  }
  std::atomic<unsigned> reads_{0};
};

// A table of one 4 KiB record a page: row r begins as all r.
class HotPagesTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kPages = 64;
  static constexpr std::uint64_t kDim = 1024;

  HotPagesTest() {
    File data = File::open(directory_ / "t.npy", File::Mode::kCreateNew, ops_);
    data.resize(geometry_.file_bytes());
    PageLedger ledger = PageLedger::create(File::open(directory_ / "t.pages", File::Mode::kCreateNew, ops_), kPages, false);
    file_ =
        std::make_unique<PageFile>("t", std::move(data), std::move(ledger), schema_, geometry_, Zeros{}, 0, pool_, io_, [] {});
    std::vector<float> row(kDim);
    for (std::uint64_t page = 0; page < kPages; ++page) {
      std::fill(row.begin(), row.end(), static_cast<float>(page));
      PageBuffer buffer{page, reinterpret_cast<std::byte*>(row.data())};
      file_->write({&buffer, 1});
    }
  }

  // The pages in memory, oldest first, seen from outside: those that a hold finds without a miss.
  std::set<std::uint64_t> resident(HotPages& hot) {
    std::set<std::uint64_t> pages;
    for (std::uint64_t page = 0; page < kPages; ++page) {
      std::uint32_t frame = 0;
      const auto hold = hot.hold_resident({&page, 1}, {&frame, 1}, Access::kRead);
      if (frame != HotPages::kAbsent) pages.insert(page);
    }
    return pages;
  }
  float value(const HotPages& hot, std::uint32_t frame) { return *reinterpret_cast<const float*>(hot.frame(frame)); }
  void use(HotPages& hot, std::vector<std::uint64_t> pages, Access access = Access::kRead, float add = 0) {
    std::vector<std::uint32_t> frames(pages.size());
    const auto hold = hot.hold(pages, frames, access);
    ASSERT_TRUE(hold.has_value());
    std::set<std::uint32_t> seen;
    for (std::size_t i = 0; i < pages.size(); ++i)
      if (add != 0 && seen.insert(frames[i]).second) *reinterpret_cast<float*>(hot.frame(frames[i])) += add;
  }

  test::TemporaryDirectory directory_;
  FaultyOps ops_;
  ThreadPool pool_{2}, io_{4};
  Schema schema_{kDim, DType::kFloat32, {}};
  Geometry geometry_ = make_geometry(kPages, kDim * 4, 4, false, 4096);
  std::unique_ptr<PageFile> file_;
};

TEST_F(HotPagesTest, EvictsTheLeastRecentlyUsedBatchFirst) {
  EvictingPages hot(*file_, 3, pool_, nullptr);
  use(hot, {0});
  use(hot, {1});
  use(hot, {2});
  use(hot, {0});
  use(hot, {3});  // 1 is the oldest
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 2U, 3U));
  use(hot, {4, 0});
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 3U, 4U));
  EXPECT_EQ(hot.counts().evictions, 2U);
  EXPECT_EQ(hot.counts().hits, 2U);
  EXPECT_EQ(hot.counts().misses, 5U);
  EXPECT_EQ(hot.counts().resident, 3U);
}

TEST_F(HotPagesTest, LooksAtHitsBeforeItEvicts) {
  EvictingPages hot(*file_, 3, pool_, nullptr);
  use(hot, {0, 1, 2});
  use(hot, {3, 0});  // 0 is the oldest, but the batch has it
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 2U, 3U));
}

TEST_F(HotPagesTest, AgreesWithAPlainLruOnRandomBatches) {
  constexpr std::size_t kFrames = 10;
  EvictingPages hot(*file_, kFrames, pool_, nullptr);
  std::list<std::uint64_t> lru;  // oldest first
  std::uint64_t misses = 0, evictions = 0;
  std::mt19937 random(7);
  for (int batch = 0; batch < 2000; ++batch) {
    std::vector<std::uint64_t> pages(1 + random() % kFrames);
    for (auto& page : pages) page = random() % 24;
    use(hot, pages);
    std::vector<std::uint64_t> hits, missing;
    for (const auto page : pages) {
      const bool in = std::find(lru.begin(), lru.end(), page) != lru.end();
      auto& list = in ? hits : missing;
      if (std::find(list.begin(), list.end(), page) == list.end()) list.push_back(page);
    }
    std::sort(missing.begin(), missing.end());
    for (const auto page : hits) lru.remove(page);
    while (lru.size() + hits.size() + missing.size() > kFrames) {
      lru.pop_front();
      ++evictions;
    }
    lru.insert(lru.end(), hits.begin(), hits.end());
    lru.insert(lru.end(), missing.begin(), missing.end());
    misses += missing.size();
    ASSERT_EQ(hot.counts().misses, misses) << batch;
    ASSERT_EQ(hot.counts().evictions, evictions) << batch;
    ASSERT_EQ(resident(hot), std::set<std::uint64_t>(lru.begin(), lru.end())) << batch;
  }
}

TEST_F(HotPagesTest, RepeatedPagesShareOneFrameAndCountOnce) {
  EvictingPages hot(*file_, 2, pool_, nullptr);
  std::vector<std::uint64_t> pages{5, 5, 9, 5, 9};
  std::vector<std::uint32_t> frames(5);
  const auto hold = hot.hold(pages, frames, Access::kRead);
  ASSERT_TRUE(hold);
  EXPECT_EQ(hold->pages(), 2U);
  EXPECT_EQ(frames[0], frames[1]);
  EXPECT_EQ(frames[0], frames[3]);
  EXPECT_NE(frames[0], frames[2]);
  EXPECT_EQ(value(hot, frames[2]), 9.0F);
  EXPECT_EQ(hot.counts().misses, 2U);
}

TEST_F(HotPagesTest, RefusesABatchOfMorePagesThanFramesAndChangesNothing) {
  EvictingPages hot(*file_, 2, pool_, nullptr);
  use(hot, {0, 1});
  std::vector<std::uint64_t> pages{0, 2, 3};
  std::vector<std::uint32_t> frames(3);
  EXPECT_FALSE(hot.hold(pages, frames, Access::kWrite).has_value());
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 1U));
  EXPECT_EQ(hot.counts().dirty, 0U);
}

TEST_F(HotPagesTest, DirtyPagesComeBackFromTheFileAsTheyWereLeft) {
  EvictingPages hot(*file_, 4, pool_, nullptr);
  for (int round = 0; round < 3; ++round)
    for (std::uint64_t page = 0; page < kPages; page += 2) use(hot, {page, page + 1}, Access::kWrite, 1000);
  for (std::uint64_t page = 0; page < kPages; ++page) {
    std::uint32_t frame = 0;
    const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
    ASSERT_EQ(value(hot, frame), static_cast<float>(page) + 3000);
  }
  EXPECT_EQ(hot.counts().dirty, 0U) << "all were evicted since";
}

TEST_F(HotPagesTest, FlushWritesDirtyPagesAndKeepsThem) {
  EvictingPages hot(*file_, 4, pool_, nullptr);
  use(hot, {1, 2}, Access::kWrite, 0.5F);
  EXPECT_EQ(hot.counts().dirty, 2U);
  hot.flush();
  EXPECT_EQ(hot.counts().dirty, 0U);
  EXPECT_EQ(hot.counts().resident, 2U);
  EvictingPages fresh(*file_, 4, pool_, nullptr);
  std::uint64_t page = 2;
  std::uint32_t frame = 0;
  const auto hold = fresh.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(fresh, frame), 2.5F);
}

TEST_F(HotPagesTest, HeldPagesAreNotEvicted) {
  EvictingPages hot(*file_, 4, pool_, nullptr);
  use(hot, {7});
  use(hot, {1, 2, 3});
  std::uint64_t page = 7;
  std::uint32_t frame = 0;
  std::optional<HotPages::Hold> scan(hot.hold_resident({&page, 1}, {&frame, 1}, Access::kRead));
  for (std::uint64_t other = 10; other < 13; ++other) use(hot, {other});
  EXPECT_EQ(value(hot, frame), 7.0F) << "a scan holds the oldest page";
  scan.reset();
  use(hot, {13});
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(10U, 11U, 12U, 13U));
  {
    page = 10;
    const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
    std::thread([&] {
      for (std::uint64_t other = 20; other < 23; ++other) use(hot, {other});
    }).join();
    EXPECT_EQ(value(hot, frame), 10.0F);
    EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(10U, 20U, 21U, 22U));
  }
  use(hot, {30});
  EXPECT_FALSE(resident(hot).contains(10)) << "the oldest again";
}

TEST_F(HotPagesTest, WaitsForFramesThatOthersHold) {
  EvictingPages hot(*file_, 2, pool_, nullptr);
  std::vector<std::uint64_t> pages{1, 2};
  std::vector<std::uint32_t> frames(2);
  auto hold = hot.hold(pages, frames, Access::kRead);
  std::atomic<bool> done{false};
  std::thread other([&] {
    use(hot, {3});
    done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(done);
  hold.reset();
  other.join();
  EXPECT_TRUE(resident(hot).contains(3));
}

TEST_F(HotPagesTest, FailedReadLeavesNothingBehind) {
  EvictingPages hot(*file_, 3, pool_, nullptr);
  use(hot, {0, 1}, Access::kWrite, 1);
  ops_.fail_reads = true;
  std::vector<std::uint64_t> pages{0, 5, 6};
  std::vector<std::uint32_t> frames(3);
  EXPECT_NE(test::message_of<IoError>([&] { (void)hot.hold(pages, frames, Access::kWrite); }).find("Input/output error"),
            std::string::npos);
  ops_.fail_reads = false;
  EXPECT_FALSE(resident(hot).contains(5));
  // Every frame can be had again, and what was dirty is still there.
  use(hot, {7, 8, 9});
  use(hot, {0});
  std::uint64_t page = 1;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(hot, frame), 2.0F);
}

TEST_F(HotPagesTest, FailedWriteBackKeepsTheDirtyPages) {
  EvictingPages hot(*file_, 2, pool_, nullptr);
  use(hot, {0, 1}, Access::kWrite, 1);
  ops_.fail_writes = true;
  std::vector<std::uint64_t> pages{5};
  std::vector<std::uint32_t> frames(1);
  for (const Access access : {Access::kWrite, Access::kPrefetch})
    EXPECT_NE(test::message_of<IoError>([&] { (void)hot.hold(pages, frames, access); }).find("No space left"), std::string::npos);
  // Whoever reads can do without, and has the reason.
  try {
    (void)hot.hold(pages, frames, Access::kRead);
    ADD_FAILURE() << "there was no frame";
  } catch (const NoFrames& none) {
    EXPECT_NE(test::message_of<IoError>([&] { none.rethrow_cause(); }).find("No space left"), std::string::npos);
  }
  EXPECT_EQ(hot.counts().dirty, 2U);
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 1U));
  ops_.fail_writes = false;
  use(hot, {5, 6});
  use(hot, {0});
  std::uint64_t page = 0;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(hot, frame), 1.0F);
}

TEST_F(HotPagesTest, CorruptPageIsNamedWithItsRows) {
  file_->ledger().keep_checksums();
  File(File::open(directory_ / "t.npy", File::Mode::kReadWrite)).write(geometry_.offset_of(9) + 100, "x");
  EvictingPages hot(*file_, 2, pool_, nullptr);
  std::uint64_t page = 9;
  std::uint32_t frame = 0;
  const std::string message = test::message_of<CorruptError>([&] { (void)hot.hold({&page, 1}, {&frame, 1}, Access::kRead); });
  EXPECT_NE(message.find("page 9 (rows 9 to 9) of table 't' does not match its checksum"), std::string::npos) << message;
}

TEST_F(HotPagesTest, ManyThreadsReadWhatIsThere) {
  EvictingPages hot(*file_, 12, pool_, nullptr);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 500; ++i) {
        std::vector<std::uint64_t> pages(1 + random() % 5);
        for (auto& page : pages) page = random() % kPages;
        std::vector<std::uint32_t> frames(pages.size());
        const auto hold = hot.hold(pages, frames, Access::kRead);
        for (std::size_t k = 0; k < pages.size(); ++k)
          if (value(hot, frames[k]) != static_cast<float>(pages[k])) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(hot.counts().resident, 12U);
}

TEST_F(HotPagesTest, ThreadsSurviveFailingReadsOfSharedPages) {
  EvictingPages hot(*file_, 6, pool_, nullptr);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0}, failures{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!stop) {
        std::vector<std::uint64_t> pages{random() % 20, random() % 20};
        std::vector<std::uint32_t> frames(2);
        try {
          const auto hold = hot.hold(pages, frames, Access::kRead);
          for (std::size_t k = 0; k < 2; ++k)
            if (value(hot, frames[k]) != static_cast<float>(pages[k])) ++wrong;
        } catch (const IoError&) {
          ++failures;
        }
      }
    });
  for (int i = 0; i < 50; ++i) {
    ops_.fail_reads = i % 2 == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
  }
  ops_.fail_reads = false;
  stop = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(failures, 0);
  for (std::uint64_t page = 0; page + 6 <= kPages; page += 6)
    use(hot, {page, page + 1, page + 2, page + 3, page + 4, page + 5});  // no frame was lost
}

TEST_F(HotPagesTest, WritesAreKeptWhereReadsOfTheSamePagesFail) {
  constexpr std::uint64_t kShared = 3;
  EvictingPages hot(*file_, 2, pool_, nullptr);
  std::mutex rows;
  std::array<int, kShared> added{};
  std::atomic<int> failures{0};
  ops_.fail_one_of = 2;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 3000; ++i) {
        const std::uint64_t page = random() % kShared;
        std::uint32_t frame = 0;
        try {
          const bool write = random() % 2 == 0;
          const auto hold = hot.hold({&page, 1}, {&frame, 1}, write ? Access::kWrite : Access::kRead);
          if (!write) continue;
          const std::lock_guard lock(rows);
          *reinterpret_cast<float*>(hot.frame(frame)) += 1;
          ++added[page];
        } catch (const IoError&) {
          ++failures;
        }
      }
    });
  for (auto& thread : threads) thread.join();
  ops_.fail_one_of = 0;
  EXPECT_GT(failures, 0);
  hot.flush();
  EvictingPages fresh(*file_, 4, pool_, nullptr);
  for (std::uint64_t page = 0; page < kShared; ++page) {
    std::uint32_t frame = 0;
    const auto hold = fresh.hold({&page, 1}, {&frame, 1}, Access::kRead);
    EXPECT_EQ(value(fresh, frame), static_cast<float>(page) + static_cast<float>(added[page])) << page;
  }
}

// A batch marks a page that another one is reading, and fails; then so does the other one.
TEST_F(HotPagesTest, APageThatNobodyCouldReadIsNotWritten) {
  const auto hot = make_hot_pages(*file_, kPages, pool_, nullptr);
  const std::uint64_t slow = 4;
  ops_.waiting_offset = static_cast<off_t>(geometry_.offset_of(slow));
  std::atomic<bool> failed{false};
  std::thread reader([&] {
    std::uint32_t frame = 0;
    try {
      (void)hot->hold({&slow, 1}, {&frame, 1}, Access::kRead);
    } catch (const IoError&) {
      failed = true;
    }
  });
  while (!ops_.waits) std::this_thread::yield();
  ops_.fail_reads = true;
  const std::vector<std::uint64_t> pages{slow, 9};
  std::vector<std::uint32_t> frames(2);
  EXPECT_THROW((void)hot->hold(pages, frames, Access::kWrite), IoError);
  ops_.waiting_offset = -1;
  reader.join();
  EXPECT_TRUE(failed);
  ops_.fail_reads = false;
  EXPECT_EQ(hot->counts().dirty, 0U);
  const auto written = file_->counters().pages_written.load();
  hot->flush();
  EXPECT_EQ(file_->counters().pages_written.load(), written);
  use(*hot, {slow, 9});
  EXPECT_EQ(value(*hot, static_cast<std::uint32_t>(slow)), 4.0F);
}

// Pages of a batch that writes every row of them.
TEST_F(HotPagesTest, ReplacedPagesAreNotRead) {
  EvictingPages hot(*file_, 3, pool_, nullptr);
  const auto read = file_->counters().pages_read.load();
  std::vector<std::uint64_t> pages{4, 5};
  std::vector<std::uint32_t> frames(2);
  std::vector<std::uint8_t> replaced{1, 0};
  {
    auto hold = hot.hold(pages, frames, Access::kWrite, replaced);
    ASSERT_TRUE(hold);
    EXPECT_EQ(file_->counters().pages_read.load(), read + 1);
    EXPECT_EQ(value(hot, frames[1]), 5.0F);
    *reinterpret_cast<float*>(hot.frame(frames[0])) = -4;
    hold->replaced();
  }
  use(hot, {9, 10, 11});  // evicts and writes
  use(hot, {4});
  std::uint64_t page = 4;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(hot, frame), -4.0F);
}

TEST_F(HotPagesTest, ReplacedPagesThatWereNotWrittenAreForgotten) {
  for (const bool whole : {false, true}) {
    const auto hot = make_hot_pages(*file_, whole ? kPages : 3, pool_, nullptr);
    std::uint64_t page = 4;
    std::uint32_t frame = 0;
    const std::uint8_t replaced = 1;
    { const auto hold = hot->hold({&page, 1}, {&frame, 1}, Access::kWrite, {&replaced, 1}); }
    EXPECT_EQ(hot->counts().dirty, 0U);
    EXPECT_EQ(hot->counts().resident, 0U);
    const auto hold = hot->hold({&page, 1}, {&frame, 1}, Access::kRead);
    EXPECT_EQ(value(*hot, frame), 4.0F) << "read from the file";
  }
}

TEST_F(HotPagesTest, OthersWaitForPagesThatAreBeingReplaced) {
  for (const bool whole : {false, true}) {
    const auto hot = make_hot_pages(*file_, whole ? kPages : 3, pool_, nullptr);
    std::uint64_t page = 6;
    std::uint32_t frame = 0;
    const std::uint8_t replaced = 1;
    auto hold = hot->hold({&page, 1}, {&frame, 1}, Access::kWrite, {&replaced, 1});
    std::atomic<float> seen{-1};
    std::thread reader([&] {
      std::uint32_t at = 0;
      const auto reading = hot->hold({&page, 1}, {&at, 1}, Access::kRead);
      seen = value(*hot, at);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(seen, -1.0F);
    *reinterpret_cast<float*>(hot->frame(frame)) = 66;
    hold->replaced();
    hold.reset();
    reader.join();
    EXPECT_EQ(seen, 66.0F);
  }
}

// Two batches that replace the same pages, in either order, must not wait for each other.
TEST_F(HotPagesTest, ManyThreadsReplaceTheSamePages) {
  for (const bool whole : {false, true}) {
    const auto hot = make_hot_pages(*file_, whole ? kPages : 8, pool_, nullptr);
    std::mutex rows;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int i = 0; i < 300; ++i) {
          std::vector<std::uint64_t> pages{random() % 24, random() % 24, random() % 24};
          std::vector<std::uint8_t> replaced{1, static_cast<std::uint8_t>(random() % 2), 1};
          // Of a page given twice with different flags either holds; the store never does that.
          for (std::size_t k = 1; k < 3; ++k)
            for (std::size_t j = 0; j < k; ++j)
              if (pages[k] == pages[j]) replaced[k] = replaced[j];
          std::vector<std::uint32_t> frames(3);
          auto hold = hot->hold(pages, frames, Access::kWrite, replaced);
          const std::lock_guard lock(rows);
          for (std::size_t k = 0; k < 3; ++k) *reinterpret_cast<float*>(hot->frame(frames[k])) = static_cast<float>(pages[k]);
          hold->replaced();
        }
      });
    for (auto& thread : threads) thread.join();
    hot->flush();
    const auto again = make_hot_pages(*file_, kPages, pool_, nullptr);
    for (std::uint64_t page = 0; page < kPages; ++page) {
      std::uint32_t frame = 0;
      const auto hold = again->hold({&page, 1}, {&frame, 1}, Access::kRead);
      ASSERT_EQ(value(*again, frame), static_cast<float>(page));
    }
  }
}

// The page's number, as often as it was written, in its first value: what a lost dirty mark, a page filled twice or one evicted
// in use would change.
TEST_F(HotPagesTest, ThreadsWithWriteBehindLoseNothing) {
  Worker cleaner;
  auto hot = std::make_unique<EvictingPages>(*file_, 12, pool_, &cleaner);
  FairSharedMutex rows;
  std::vector<std::atomic<int>> added(kPages);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 600; ++i) {
        std::set<std::uint64_t> chosen;
        for (unsigned k = 0; k <= random() % 6; ++k) chosen.insert(random() % kPages);
        const std::vector<std::uint64_t> pages(chosen.begin(), chosen.end());
        std::vector<std::uint32_t> frames(pages.size());
        const bool write = random() % 2 == 0;
        const auto hold = hot->hold(pages, frames, write ? Access::kWrite : Access::kRead);
        if (write) {
          const std::unique_lock lock(rows);
          for (std::size_t k = 0; k < pages.size(); ++k) {
            *reinterpret_cast<float*>(hot->frame(frames[k])) += 100;
            added[pages[k]] += 100;
          }
        } else {
          const std::shared_lock lock(rows);
          for (std::size_t k = 0; k < pages.size(); ++k)
            if (value(*hot, frames[k]) != static_cast<float>(pages[k]) + static_cast<float>(added[pages[k]])) ++wrong;
        }
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  hot->flush();
  EXPECT_EQ(hot->counts().dirty, 0U);
  hot.reset();
  cleaner.stop();
  EvictingPages fresh(*file_, 4, pool_, nullptr);
  for (std::uint64_t page = 0; page < kPages; ++page) {
    std::uint32_t frame = 0;
    const auto hold = fresh.hold({&page, 1}, {&frame, 1}, Access::kRead);
    ASSERT_EQ(value(fresh, frame), static_cast<float>(page) + static_cast<float>(added[page]));
  }
}

TEST_F(HotPagesTest, WriteBehindCleansThePagesThatGoNext) {
  Worker cleaner;
  EvictingPages hot(*file_, 32, pool_, &cleaner);
  for (std::uint64_t page = 0; page < 30; ++page) use(hot, {page}, Access::kWrite, 1);
  EXPECT_EQ(hot.counts().dirty, 30U) << "free frames are as good as clean ones";
  for (std::uint64_t page = 30; page < 33; ++page) use(hot, {page}, Access::kWrite, 1);
  cleaner.stop();  // what it was asked for is done
  EXPECT_LT(hot.counts().dirty, 32U);
  EXPECT_GT(hot.counts().dirty, 16U) << "no more than it takes";
  const auto written = file_->counters().pages_written.load();
  use(hot, {41});
  EXPECT_EQ(file_->counters().pages_written.load(), written) << "the miss finds a clean frame";
  EXPECT_EQ(hot.counts().evictions, 2U);
  use(hot, {0});
  std::uint64_t page = 0;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(hot, frame), 1.0F);
}

TEST_F(HotPagesTest, WriteBehindThatFailsIsMetByWhoeverNeedsAFrame) {
  Worker cleaner;
  EvictingPages hot(*file_, 4, pool_, &cleaner);
  use(hot, {0, 1, 2, 3}, Access::kWrite, 1);
  ops_.fail_writes = true;
  std::vector<std::uint64_t> pages{5, 6, 7, 8};
  std::vector<std::uint32_t> frames(4);
  for (int i = 0; i < 3; ++i) EXPECT_THROW((void)hot.hold(pages, frames, Access::kRead), NoFrames);
  EXPECT_EQ(hot.counts().dirty, 4U);
  ops_.fail_writes = false;
  use(hot, {5, 6, 7, 8});
  use(hot, {0, 1, 2, 3});
  std::uint64_t page = 3;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(hot, frame), 4.0F);
}

TEST_F(HotPagesTest, ALargeBatchGetsItsTurnAmongSmallOnes) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      while (!stop) use(hot, {random() % kPages, random() % kPages, random() % kPages});
    });
  for (int i = 0; i < 20; ++i) {
    std::vector<std::uint64_t> all(16);
    for (std::uint64_t k = 0; k < 16; ++k) all[k] = (static_cast<std::uint64_t>(i) + 3 * k) % kPages;
    use(hot, all);
  }
  stop = true;
  for (auto& thread : threads) thread.join();
}

// While a batch writes dirty pages to make room, later batches may use them. They have ended by the time it looks again, and must
// not count as in use for ever.
TEST_F(HotPagesTest, PagesUsedWhileTheyAreWrittenToMakeRoomGoAllTheSame) {
  for (const auto replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    EvictingPages hot(*file_, 4, pool_, nullptr, replacement);
    use(hot, {0, 1, 2, 3}, Access::kWrite, 1);
    std::promise<void> writing, used;
    std::once_flag once;
    ops_.before_write = [&] {
      std::call_once(once, [&] {
        writing.set_value();
        used.get_future().wait();
      });
    };
    auto large = std::async(std::launch::async, [&] { use(hot, {3, 10, 11, 12}); });
    writing.get_future().wait();
    use(hot, {0});
    use(hot, {3, 1});
    used.set_value();
    large.get();
    ops_.before_write = [] {};
    EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(3U, 10U, 11U, 12U));
    use(hot, {0, 1, 2, 3}, Access::kWrite, -1);
    hot.flush();
  }
}

TEST_F(HotPagesTest, ATableThatFitsHasAFrameForEachPage) {
  const auto hot = make_hot_pages(*file_, kPages, pool_, nullptr);
  ASSERT_TRUE(hot->whole());
  EXPECT_FALSE(make_hot_pages(*file_, kPages - 1, pool_, nullptr)->whole());
  use(*hot, {3, 1, 3}, Access::kWrite, 0.5F);
  EXPECT_EQ(hot->counts().misses, 2U);
  EXPECT_EQ(hot->counts().dirty, 2U);
  use(*hot, {1, 2});
  EXPECT_EQ(hot->counts().hits, 1U);
  EXPECT_EQ(hot->counts().misses, 3U);
  EXPECT_EQ(*reinterpret_cast<const float*>(hot->slab().data() + 3 * 4096), 3.5F);
  EXPECT_THAT(resident(*hot), ElementsAre(1U, 2U, 3U));
  ops_.fail_reads = true;
  std::vector<std::uint64_t> pages{3, 8};
  std::vector<std::uint32_t> frames(2);
  EXPECT_THROW((void)hot->hold(pages, frames, Access::kWrite), IoError);
  ops_.fail_reads = false;
  EXPECT_EQ(hot->counts().resident, 3U);
  EXPECT_EQ(hot->counts().dirty, 2U);
  use(*hot, {8});
  hot->flush();
  EXPECT_EQ(hot->counts().dirty, 0U);
  EvictingPages fresh(*file_, 2, pool_, nullptr);
  std::uint64_t page = 3;
  std::uint32_t frame = 0;
  const auto hold = fresh.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(fresh, frame), 3.5F);
}

TEST_F(HotPagesTest, ThreadsFillAWholeTableOnce) {
  const auto hot = make_hot_pages(*file_, kPages, pool_, nullptr);
  const auto before = file_->counters().pages_read.load();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < 400; ++i) {
        std::vector<std::uint64_t> pages(1 + random() % 5);
        for (auto& page : pages) page = random() % kPages;
        std::vector<std::uint32_t> frames(pages.size());
        const auto hold = hot->hold(pages, frames, Access::kRead);
        for (std::size_t k = 0; k < pages.size(); ++k)
          if (value(*hot, frames[k]) != static_cast<float>(pages[k])) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(file_->counters().pages_read.load() - before, kPages);
  EXPECT_EQ(hot->counts().misses, kPages);
}

// Look-ups of pages whose hashes meet in few slots, with deletions among them: what linear probing gets wrong first.
TEST_F(HotPagesTest, LongRunsOfCollidingPagesAreFound) {
  // Every page of a table of 64 in 33 frames: the look-up table is as full as it gets.
  EvictingPages hot(*file_, 33, pool_, nullptr);
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) {
    std::uint64_t page = random() % kPages;
    std::uint32_t frame = 0;
    const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
    ASSERT_EQ(value(hot, frame), static_cast<float>(page));
  }
  EXPECT_EQ(hot.counts().resident, 33U);
}

TEST_F(HotPagesTest, EveryPolicyGivesRightPages) {
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo})
    for (const std::uint64_t frames : {1U, 2U, 3U, 10U, 33U}) {
      EvictingPages hot(*file_, frames, pool_, nullptr, replacement);
      std::mt19937 random(static_cast<unsigned>(frames));
      std::vector<float> expected(kPages);
      {
        EvictingPages before(*file_, 1, pool_, nullptr);
        for (std::uint64_t page = 0; page < kPages; ++page) {
          std::uint32_t frame = 0;
          const auto hold = before.hold({&page, 1}, {&frame, 1}, Access::kRead);
          expected[page] = value(before, frame);
        }
      }
      for (int i = 0; i < 2000; ++i) {
        std::set<std::uint64_t> chosen;
        for (std::uint64_t k = 0; k <= random() % frames; ++k)
          chosen.insert(random() % 8 == 0 ? random() % kPages : random() % 16);
        const std::vector<std::uint64_t> pages(chosen.begin(), chosen.end());
        std::vector<std::uint32_t> at(pages.size());
        const auto access = static_cast<Access>(random() % 3);
        const auto hold = hot.hold(pages, at, access);
        ASSERT_TRUE(hold);
        for (std::size_t k = 0; k < pages.size(); ++k) {
          ASSERT_EQ(value(hot, at[k]), expected[pages[k]]);
          if (access == Access::kWrite) *reinterpret_cast<float*>(hot.frame(at[k])) = expected[pages[k]] += 1;
        }
        ASSERT_LE(hot.counts().resident, frames);
      }
      hot.flush();
    }
}

// A batch that is told there is none waits for others to end, and there may be no others.
TEST(Replacement, FindsAVictimWheneverThereIsOne) {
  for (const auto replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    std::mt19937 random(5);
    for (int round = 0; round < 2000; ++round) {
      std::vector<Frame> frames(2 + random() % 12);
      const auto policy = ReplacementPolicy::make(replacement, frames);
      std::uint64_t next_page = 0;
      for (std::uint64_t batch = 1; batch < 60; ++batch) {
        policy->begin_batch(batch, frames.size());
        const std::uint64_t uses = random() % (3 * frames.size());
        for (std::uint64_t i = 0; i < uses; ++i)
          if (Frame& frame = frames[random() % frames.size()]; frame.state == Frame::State::kReady && frame.batch != batch) {
            const auto index = static_cast<std::uint32_t>(&frame - frames.data());
            const std::uint64_t before = std::exchange(frame.batch, batch);
            policy->used({&index, 1}, {&before, 1}, batch);
          }
        for (Frame& frame : frames) frame.scans = random() % 4 == 0 ? 1 : 0;
        const auto in_use = static_cast<std::uint64_t>(std::count_if(frames.begin(), frames.end(), [&](const Frame& f) {
          return f.state == Frame::State::kReady && !f.evictable(batch);
        }));
        const std::uint64_t missing = random() % (frames.size() - in_use + 1);
        const auto is_free = [](const Frame& f) { return f.state == Frame::State::kFree; };
        auto free = static_cast<std::uint64_t>(std::count_if(frames.begin(), frames.end(), is_free));
        if (free < missing) policy->begin_eviction(missing - free);
        for (Spare spare = Spare::kRecent; free < missing;) {
          const std::uint32_t victim = policy->victim(batch, spare);
          if (victim == kNoFrame) {
            ASSERT_NE(spare, Spare::kNothing) << replacement_name(replacement) << ", round " << round << ", batch " << batch;
            spare = spare == Spare::kRecent ? Spare::kPromised : Spare::kNothing;
            policy->begin_eviction(missing - free);
            continue;
          }
          ASSERT_TRUE(frames[victim].evictable(batch));
          policy->removed(victim, /*evicted=*/true);
          frames[victim].state = Frame::State::kFree;
          ++free;
        }
        for (std::uint64_t i = 0; i < missing; ++i) {
          const auto frame = std::find_if(frames.begin(), frames.end(), is_free);
          *frame = {.page = next_page++ % 40, .batch = batch, .state = Frame::State::kReady, .promised = random() % 3 == 0};
          policy->inserted(static_cast<std::uint32_t>(frame - frames.begin()));
        }
      }
    }
  }
}

// Skewed uses with one long scan in between: frequency keeps what recency loses.
TEST_F(HotPagesTest, S3FifoKeepsPopularPagesThroughAScan) {
  const auto misses_of = [&](Replacement replacement) {
    EvictingPages hot(*file_, 20, pool_, nullptr, replacement);
    std::mt19937 random(5);
    std::uint64_t misses = 0;
    for (int round = 0; round < 60; ++round) {
      for (int i = 0; i < 30; ++i) {
        const auto before = hot.counts().misses;
        use(hot, {random() % 10});
        misses += hot.counts().misses - before;
      }
      for (std::uint64_t page = 10; page < kPages; ++page) use(hot, {page});
    }
    return misses;
  };
  EXPECT_LT(misses_of(Replacement::kS3Fifo) * 3, misses_of(Replacement::kLru));
}

// A batch that is about to be updated, and one that was prefetched, stay: with any policy.
TEST_F(HotPagesTest, PagesOfTheLastBatchAndOfAPrefetchStay) {
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    EvictingPages hot(*file_, 30, pool_, nullptr, replacement);
    std::uint64_t misses = 0;
    for (std::uint64_t round = 0; round + 2 < 20; ++round) {
      std::vector<std::uint64_t> pages, next;
      for (std::uint64_t k = 0; k < 5; ++k) {
        pages.push_back((round * 5 + k) % kPages);
        next.push_back((round * 5 + 5 + k) % kPages);
      }
      std::vector<std::uint32_t> frames(5);
      { const auto hold = hot.hold(next, frames, Access::kPrefetch); }
      const auto before = hot.counts().misses;
      use(hot, pages);
      use(hot, pages, Access::kWrite, 1);
      if (round > 0) misses += hot.counts().misses - before;
    }
    EXPECT_EQ(misses, 0U) << replacement_name(replacement);
  }
}

// Prefetches of two batches to come, with others in between that turn memory over again and again.
TEST_F(HotPagesTest, PromisedPagesStayWhileOtherFramesWillDo) {
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    EvictingPages hot(*file_, 16, pool_, nullptr, replacement);
    use(hot, {0, 1, 2, 3}, Access::kPrefetch);
    use(hot, {4, 5, 6, 7}, Access::kPrefetch);
    for (std::uint64_t page = 8; page < 40; page += 4) use(hot, {page, page + 1, page + 2, page + 3}, Access::kWrite, 1);
    auto there = resident(hot);
    for (std::uint64_t page = 0; page < 8; ++page)
      EXPECT_EQ(there.count(page), 1U) << page << ", " << replacement_name(replacement);
    // A batch that needs more takes them.
    std::vector<std::uint64_t> many(16);
    std::iota(many.begin(), many.end(), 40U);
    use(hot, many);
    EXPECT_EQ(resident(hot), std::set<std::uint64_t>(many.begin(), many.end()));
    EXPECT_EQ(hot.promisable(8, [] {}), 8U) << "what is gone is not promised any more";
  }
}

TEST_F(HotPagesTest, PromisedPagesThatWereUsedGoAsOthersDo) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  use(hot, {40}, Access::kPrefetch);  // nobody uses it
  use(hot, {0, 1, 2, 3, 4, 5, 6, 7}, Access::kPrefetch);
  use(hot, {0, 1, 2, 3, 4, 5, 6, 7});
  std::set<std::uint64_t> last{40};
  for (std::uint64_t page = 8; page < 23; ++page) {
    use(hot, {page});
    last.insert(page);
  }
  EXPECT_EQ(resident(hot), last);
}

TEST_F(HotPagesTest, APrefetchWaitsForABatchRatherThanBreakAPromise) {
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    EvictingPages hot(*file_, 16, pool_, nullptr, replacement);
    use(hot, {0, 1, 2, 3, 4, 5, 6, 7}, Access::kPrefetch);
    const std::vector<std::uint64_t> held{8, 9, 10, 11, 12, 13, 14, 15};
    std::vector<std::uint32_t> frames(8);
    auto hold = hot.hold(held, frames, Access::kRead);
    auto prefetch = std::async(std::launch::async, [&] { use(hot, {16, 17}, Access::kPrefetch); });
    EXPECT_EQ(prefetch.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    hold.reset();
    prefetch.get();
    const auto there = resident(hot);
    for (const std::uint64_t page : {0U, 1U, 2U, 3U, 4U, 5U, 6U, 7U, 16U, 17U})
      EXPECT_EQ(there.count(page), 1U) << page << ", " << replacement_name(replacement);
  }
}

TEST_F(HotPagesTest, PromisesTakeHalfOfTheFramesUntilTheyAreUsed) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  int called = 0;
  const auto promisable = [&] { return hot.promisable(8, [&] { ++called; }); };
  EXPECT_EQ(promisable(), 8U);
  use(hot, {0, 1, 2, 3, 4, 5, 6, 7}, Access::kPrefetch);
  EXPECT_EQ(promisable(), 0U);
  use(hot, {8});
  EXPECT_EQ(called, 0);
  use(hot, {3, 3, 2, 9});
  EXPECT_EQ(called, 1);
  EXPECT_EQ(promisable(), 2U);
  use(hot, {2, 4}, Access::kPrefetch);  // what is in memory is promised too, and none twice
  EXPECT_EQ(promisable(), 0U);
  // A batch that uses most pages of a prefetch is the one they were for: soon the rest is free.
  use(hot, {0, 1, 5});
  EXPECT_EQ(called, 2);
  for (int i = 0; i < 8; ++i) use(hot, {8});
  EXPECT_EQ(promisable(), 6U);
}

TEST_F(HotPagesTest, PromisesThatNobodyUsesEnd) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  use(hot, {0, 1, 2, 3, 4, 5, 6, 7}, Access::kPrefetch);
  bool called = false;
  EXPECT_EQ(hot.promisable(8, [&] { called = true; }), 0U);
  int batches = 0;
  for (; !called && batches < 1000; ++batches) use(hot, {8});
  EXPECT_EQ(batches, 64);
  EXPECT_EQ(hot.promisable(8, [] {}), 8U);
  use(hot, {20, 21, 22, 23, 24, 25, 26, 27}, Access::kPrefetch);
  use(hot, {30, 31, 32, 33, 34, 35, 36});
  const auto there = resident(hot);
  EXPECT_EQ(there.count(0), 0U) << "they are like others from then on";
  EXPECT_EQ(there.count(20), 1U);
}

// Whoever is many calls ahead comes late.
TEST_F(HotPagesTest, PromisesOfLaterPrefetchesLastLonger) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  use(hot, {0, 1, 2, 3}, Access::kPrefetch);
  use(hot, {4, 5, 6, 7}, Access::kPrefetch);
  const auto promisable_after = [&](int batches) {
    for (int i = 0; i < batches; ++i) use(hot, {8});
    return hot.promisable(8, [] {});
  };
  EXPECT_EQ(promisable_after(63), 0U);
  EXPECT_EQ(promisable_after(1), 4U);
  EXPECT_EQ(promisable_after(3), 4U);
  EXPECT_EQ(promisable_after(1), 8U);
}

TEST_F(HotPagesTest, ABatchThatIsExpectedIsNoticed) {
  EvictingPages hot(*file_, 16, pool_, nullptr);
  use(hot, {0, 1, 2, 3});
  const auto expected = hot.expect(std::vector<std::uint64_t>{0, 1, 2, 3, 10, 11, 12, 13});
  use(hot, {0, 1, 2, 10});
  use(hot, {10, 11, 12, 13, 3}, Access::kPrefetch);
  EXPECT_FALSE(expected->came);
  use(hot, {10, 11, 12, 13, 2, 1});
  EXPECT_TRUE(expected->came);
}

// A look-up that threads share finds each page once.
TEST_F(HotPagesTest, LargeBatchesCountEachPageOnce) {
  ThreadPool four(4);
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo}) {
    EvictingPages hot(*file_, kPages - 1, four, nullptr, replacement);
    std::mt19937 random(3);
    std::vector<std::uint64_t> pages(100'000);
    std::vector<std::uint32_t> frames(pages.size());
    for (std::uint64_t round = 0; round < 30; ++round) {
      for (auto& page : pages) page = random() % (kPages - 1 - round % 2) + round % 2;
      const auto before = hot.counts();
      const auto access = static_cast<Access>(round % 3);
      const auto hold = hot.hold(pages, frames, access);
      ASSERT_TRUE(hold.has_value());
      ASSERT_EQ(hold->pages(), kPages - 1 - round % 2);
      const auto after = hot.counts();
      ASSERT_EQ(after.hits - before.hits + after.misses - before.misses, hold->pages());
      for (std::size_t i = 0; i < pages.size(); ++i) ASSERT_EQ(value(hot, frames[i]), static_cast<float>(pages[i]));
    }
    use(hot, {0});
    use(hot, {kPages - 1});
    EXPECT_EQ(hot.counts().resident, kPages - 1);
  }
}

TEST_F(HotPagesTest, LargeBatchesEndThePromisesOfTheirPages) {
  ThreadPool four(4);
  EvictingPages hot(*file_, 48, four, nullptr);
  std::vector<std::uint64_t> promised(24);
  std::iota(promised.begin(), promised.end(), 0U);
  use(hot, promised, Access::kPrefetch);
  EXPECT_EQ(hot.promisable(24, [] {}), 0U);
  std::vector<std::uint64_t> pages(100'000);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = i % 30;
  use(hot, pages);
  EXPECT_EQ(hot.promisable(24, [] {}), 24U);
}

// The pages that threads find in their parts of a batch are put together.
TEST_F(HotPagesTest, LargeBatchesOfATableThatFitsCountEachPageOnce) {
  ThreadPool four(4);
  const auto hot = make_hot_pages(*file_, kPages, four, nullptr);
  std::mt19937 random(9);
  std::set<std::uint64_t> there, written;
  for (std::uint64_t round = 0; round < 24; ++round) {
    std::vector<std::uint64_t> pages(30'000 + round);
    for (auto& page : pages) page = random() % kPages % (5 * (round / 2) + 8);
    if (round % 3 != 0) std::sort(pages.begin(), pages.end());  // each thread has some of the pages
    const std::set<std::uint64_t> distinct(pages.begin(), pages.end());
    std::set<std::uint64_t> missing;
    std::set_difference(distinct.begin(), distinct.end(), there.begin(), there.end(), std::inserter(missing, missing.end()));
    there.insert(distinct.begin(), distinct.end());
    const auto access = round % 4 == 3 ? Access::kWrite : Access::kRead;
    if (access == Access::kWrite) written.insert(distinct.begin(), distinct.end());
    std::vector<std::uint32_t> frames(pages.size());
    const auto before = hot->counts();
    const auto hold = hot->hold(pages, frames, access);
    const auto after = hot->counts();
    ASSERT_EQ(hold->pages(), distinct.size()) << round;
    ASSERT_EQ(after.misses - before.misses, missing.size()) << round;
    ASSERT_EQ(after.hits - before.hits, distinct.size() - missing.size()) << round;
    ASSERT_EQ(after.dirty, written.size()) << round;
    for (std::size_t i = 0; i < pages.size(); ++i) ASSERT_EQ(value(*hot, frames[i]), static_cast<float>(pages[i]));
  }
}

TEST_F(HotPagesTest, PolicyNamesAreRead) {
  EXPECT_EQ(parse_replacement("lru"), Replacement::kLru);
  EXPECT_EQ(parse_replacement("s3fifo"), Replacement::kS3Fifo);
  EXPECT_EQ(parse_replacement("LRU"), std::nullopt);
}

}  // namespace
}  // namespace embermap
