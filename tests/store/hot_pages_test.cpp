#include "store/hot_pages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <list>
#include <set>
#include <thread>

#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using testing::ElementsAre;

// Fails reads or writes of one byte range when told to.
class FaultyOps final : public FileOps {
 public:
  std::atomic<bool> fail_reads{false}, fail_writes{false};
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    return fail_reads ? (errno = EIO, -1) : FileOps::pread(fd, buffer, bytes, offset);
  }
  ssize_t preadv(int fd, const iovec* pieces, int count, off_t offset) override {
    return fail_reads ? (errno = EIO, -1) : FileOps::preadv(fd, pieces, count, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    return fail_writes ? (errno = ENOSPC, -1) : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
    return fail_writes ? (errno = ENOSPC, -1) : FileOps::pwritev(fd, pieces, count, offset);
  }
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
    file_ = std::make_unique<PageFile>("t", std::move(data), std::move(ledger), schema_, geometry_, Zeros{}, 0, pool_, io_,
                                       [this] { ++writes_begun_; });
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
  int writes_begun_ = 0;
};

TEST_F(HotPagesTest, EvictsTheLeastRecentlyUsedBatchFirst) {
  HotPages hot(*file_, 3, pool_);
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
  HotPages hot(*file_, 3, pool_);
  use(hot, {0, 1, 2});
  use(hot, {3, 0});  // 0 is the oldest, but the batch has it
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 2U, 3U));
}

TEST_F(HotPagesTest, AgreesWithAPlainLruOnRandomBatches) {
  constexpr std::size_t kFrames = 10;
  HotPages hot(*file_, kFrames, pool_);
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
  HotPages hot(*file_, 2, pool_);
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
  HotPages hot(*file_, 2, pool_);
  use(hot, {0, 1});
  std::vector<std::uint64_t> pages{0, 2, 3};
  std::vector<std::uint32_t> frames(3);
  EXPECT_FALSE(hot.hold(pages, frames, Access::kWrite).has_value());
  EXPECT_THAT(resident(hot), testing::UnorderedElementsAre(0U, 1U));
  EXPECT_EQ(hot.counts().dirty, 0U);
}

TEST_F(HotPagesTest, DirtyPagesComeBackFromTheFileAsTheyWereLeft) {
  HotPages hot(*file_, 4, pool_);
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
  HotPages hot(*file_, 4, pool_);
  use(hot, {1, 2}, Access::kWrite, 0.5F);
  EXPECT_EQ(hot.counts().dirty, 2U);
  hot.flush();
  EXPECT_EQ(hot.counts().dirty, 0U);
  EXPECT_EQ(hot.counts().resident, 2U);
  HotPages fresh(*file_, 4, pool_);
  std::uint64_t page = 2;
  std::uint32_t frame = 0;
  const auto hold = fresh.hold({&page, 1}, {&frame, 1}, Access::kRead);
  EXPECT_EQ(value(fresh, frame), 2.5F);
}

TEST_F(HotPagesTest, HeldPagesAreNotEvicted) {
  HotPages hot(*file_, 2, pool_);
  std::uint64_t page = 7;
  std::uint32_t frame = 0;
  const auto hold = hot.hold({&page, 1}, {&frame, 1}, Access::kRead);
  for (std::uint64_t other = 10; other < 20; ++other) use(hot, {other});
  EXPECT_EQ(value(hot, frame), 7.0F);
  EXPECT_TRUE(resident(hot).contains(7));
}

TEST_F(HotPagesTest, WaitsForFramesThatOthersHold) {
  HotPages hot(*file_, 2, pool_);
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
  HotPages hot(*file_, 3, pool_);
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
  HotPages hot(*file_, 2, pool_);
  use(hot, {0, 1}, Access::kWrite, 1);
  ops_.fail_writes = true;
  std::vector<std::uint64_t> pages{5};
  std::vector<std::uint32_t> frames(1);
  EXPECT_NE(test::message_of<IoError>([&] { (void)hot.hold(pages, frames, Access::kRead); }).find("No space left"),
            std::string::npos);
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
  HotPages hot(*file_, 2, pool_);
  std::uint64_t page = 9;
  std::uint32_t frame = 0;
  const std::string message = test::message_of<CorruptError>([&] { (void)hot.hold({&page, 1}, {&frame, 1}, Access::kRead); });
  EXPECT_NE(message.find("page 9 (rows 9 to 9) of table 't' does not match its checksum"), std::string::npos) << message;
}

TEST_F(HotPagesTest, ManyThreadsReadWhatIsThere) {
  HotPages hot(*file_, 12, pool_);
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
  HotPages hot(*file_, 6, pool_);
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

}  // namespace
}  // namespace embermap
