// Prefetches ahead of a small memory: their order, when they wait, and what ends the wait.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "store/table.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::range;
using test::StoreTest;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Not by Prefetch::wait(): a prefetch that somebody waits for waits for no room.
void expect_soon(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << "it did not happen";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A table of eight rows a page, far larger than its memory.
class PrefetchTest : public StoreTest {
 protected:
  static constexpr std::int64_t kRows = 80'000;
  static constexpr std::int64_t kPages = kRows / 8;

  PrefetchTest() {
    (void)gather(table_, {0});
    half_ = static_cast<std::int64_t>(table_.stats().frames / 2);
  }
  // One row of each of these pages.
  static std::vector<std::int64_t> pages(std::int64_t first, std::int64_t count) {
    std::vector<std::int64_t> ids;
    for (std::int64_t page = first; page < first + count; ++page) ids.push_back(page % kPages * 8);
    return ids;
  }
  // The n-th batch of as many pages as may be prefetched.
  std::vector<std::int64_t> batch(std::int64_t n) const { return pages(1 + n * half_, half_); }
  std::uint64_t misses() { return table_.stats().misses; }

  Store store_ = open(2U << 20);
  Table table_ = store_.create("t", {.rows = kRows, .dim = 128});
  std::int64_t half_ = 0;
};

TEST_F(PrefetchTest, GoesOnInTheOrderOfTheCallsAsBatchesUseTheirPages) {
  const Prefetch first = table_.prefetch(batch(0)), second = table_.prefetch(batch(1)), third = table_.prefetch(batch(2));
  expect_soon([&] { return first.done(); });
  EXPECT_FALSE(second.done());
  const std::uint64_t before = misses();
  (void)gather(table_, batch(0));
  expect_soon([&] { return second.done(); });
  EXPECT_FALSE(third.done());
  (void)gather(table_, batch(1));
  expect_soon([&] { return third.done(); });
  (void)gather(table_, batch(2));
  EXPECT_EQ(misses(), before + 2 * static_cast<std::uint64_t>(half_)) << "every page was read once";
}

TEST_F(PrefetchTest, ASmallCallDoesNotOvertakeOneThatWaits) {
  Table other = store_.create("other", {.rows = 80, .dim = 128});
  (void)gather(table_, {0});
  const auto half = static_cast<std::int64_t>(table_.stats().frames / 2);
  const Prefetch first = table_.prefetch(pages(1, half - 20));
  const Prefetch waits = table_.prefetch(pages(5000, half)), small = table_.prefetch(pages(8000, 10));
  const Prefetch last = other.prefetch(range(0, 80));
  expect_soon([&] { return last.done(); });  // the others had their turns before
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(waits.done());
  EXPECT_FALSE(small.done()) << "there is room for it, but the batch of the other one comes first";
  (void)gather(table_, pages(1, half - 20));
  expect_soon([&] { return waits.done(); });
  (void)gather(table_, pages(5000, half));
  expect_soon([&] { return small.done(); });
}

TEST_F(PrefetchTest, SeveralCallersFarAheadReadNoPageTwice) {
  constexpr int kBatches = 80, kAhead = 8;
  std::mt19937 random(5);
  std::vector<std::vector<std::int64_t>> batches(kBatches);
  std::uint64_t wanted = 0;
  for (auto& ids : batches) {
    std::set<std::int64_t> distinct;
    for (std::int64_t k = 0; k < half_ / 2; ++k) distinct.insert(ids.emplace_back(random() % kPages * 8));
    wanted += distinct.size();
  }
  const std::uint64_t before = misses();
  const auto ask = [&](int number) {
    if (number < kBatches) std::thread([&, number] { table_.prefetch(batches[static_cast<std::size_t>(number)]); }).join();
  };
  // As the workers of a loader do, not quite in order.
  for (int number = 0; number < kAhead; ++number) ask(number ^ 1);
  for (int number = 0; number < kBatches; ++number) {
    ask((number + kAhead) ^ 1);
    (void)gather(table_, batches[static_cast<std::size_t>(number)]);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_LE(misses() - before, wanted + wanted / 20);
}

TEST_F(PrefetchTest, WrongIdsHoldNobodyUpForLong) {
  const Prefetch wrong = table_.prefetch(batch(9));
  const Prefetch next = table_.prefetch(batch(0));
  expect_soon([&] { return wrong.done(); });
  EXPECT_FALSE(next.done());
  int batches = 0;
  for (; batches < 200 && !next.done(); ++batches) {
    (void)gather(table_, pages(5000, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(next.done());
  EXPECT_GT(batches, 32) << "a slow loader's batches come later";
}

TEST_F(PrefetchTest, WhatComesAfterItsBatchReadsNothing) {
  const Prefetch first = table_.prefetch(batch(0)), late = table_.prefetch(batch(1));
  expect_soon([&] { return first.done(); });
  (void)gather(table_, batch(1));
  for (std::int64_t n = 2; n < 12; ++n) (void)gather(table_, batch(n));  // which takes its pages out of memory
  const std::uint64_t before = misses();
  (void)gather(table_, batch(0));
  expect_soon([&] { return late.done(); });
  EXPECT_EQ(misses(), before);
}

TEST_F(PrefetchTest, WhatIsWaitedForWaitsForNobody) {
  table_.prefetch(batch(0));
  table_.prefetch(batch(1));
  EXPECT_TRUE(table_.prefetch(batch(2)).wait());
  const std::uint64_t before = misses();
  (void)gather(table_, batch(2));
  EXPECT_EQ(misses(), before);
}

TEST_F(PrefetchTest, OtherTablesGoOn) {
  Table other = store_.create("other", {.rows = 80, .dim = 128});
  const Prefetch first = table_.prefetch(batch(0));
  (void)table_.stats();
  const Prefetch waits = table_.prefetch(pages(9000, 1000));
  const Prefetch goes_on = other.prefetch(range(0, 80));
  expect_soon([&] { return goes_on.done(); });
  EXPECT_FALSE(waits.done());
}

TEST_F(PrefetchTest, TheNewestIsDroppedWhereTooManyWait) {
  std::vector<Prefetch> handles;
  for (std::int64_t n = 0; n < 50; ++n) handles.push_back(table_.prefetch(batch(n)));
  expect_soon([&] { return handles.front().done(); });
  EXPECT_TRUE(handles.back().done());
  EXPECT_FALSE(handles[1].done());
  EXPECT_FALSE(handles[20].done());
  for (Prefetch& handle : handles) handle.cancel();
  const Prefetch next = table_.prefetch(batch(1));
  EXPECT_FALSE(next.done()) << "those that were cancelled take no place";
}

TEST_F(PrefetchTest, CancellingEndsTheWait) {
  const Prefetch first = table_.prefetch(batch(0));
  Prefetch waits = table_.prefetch(batch(1));
  const Prefetch after = table_.prefetch(batch(2));
  expect_soon([&] { return first.done(); });
  waits.cancel();
  expect_soon([&] { return waits.done(); });
  EXPECT_FALSE(after.done());
  (void)gather(table_, batch(0));
  expect_soon([&] { return after.done(); });
}

TEST_F(PrefetchTest, WhatChangesTheMemoryEndsTheWait) {
  const std::vector<std::function<void()>> changes{
      [&] { table_.resize(kRows + 8); },
      [&] { table_.set_memory(1U << 20); },
      [&] { store_.remove("t"); },
  };
  for (const auto& change : changes) {
    const Prefetch fills = table_.prefetch(pages(100, 4000)), waits = table_.prefetch(pages(5000, 100));
    expect_soon([&] { return fills.done(); });
    EXPECT_FALSE(waits.done());
    change();
    expect_soon([&] { return waits.done(); });
    if (store_.tables().empty()) break;
    (void)gather(table_, pages(5000, 100));
  }
}

TEST_F(PrefetchTest, ClosingEndsTheWait) {
  std::vector<Prefetch> handles;
  for (std::int64_t n = 0; n < 5; ++n) handles.push_back(table_.prefetch(batch(n)));
  expect_soon([&] { return handles[0].done(); });
  store_.close();
  for (const Prefetch& handle : handles) EXPECT_TRUE(handle.done());
}

TEST_F(PrefetchTest, CallsFromManyThreadsDoNotDisturbEachOther) {
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 4; ++number)
    threads.emplace_back([&, number] {
      std::mt19937 random(number);
      for (int i = 0; i < 60; ++i) {
        const auto ids = pages(static_cast<std::int64_t>(random() % kPages), half_ / 3);
        Prefetch handle = table_.prefetch(ids);
        if (random() % 4 == 0) handle.cancel();
        if (random() % 8 == 0) {
          EXPECT_TRUE(handle.wait());
        }
        if (random() % 2 == 0) {
          EXPECT_EQ(gather(table_, ids), std::vector<float>(ids.size() * 128));
        }
        if (number == 0 && i % 20 == 7) table_.set_memory((1U << 20) + random() % (1U << 19));
      }
    });
  for (std::thread& thread : threads) thread.join();
  store_.close();
}

// The process's address space is used up but for less than a thread's stack.
[[noreturn]] void prefetch_without_a_thread(Table table, const std::vector<std::int64_t>& ids) {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t bytes = pages * static_cast<std::uint64_t>(getpagesize()) + (2U << 20);
  const rlimit limit{bytes, bytes};
  if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
  _exit(table.prefetch(ids).wait(std::chrono::seconds(60)) ? 0 : 1);
}

TEST_F(PrefetchTest, EndsWhereTheSystemRefusesAThread) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer needs address space of its own";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ids = batch(0);
  EXPECT_EXIT(prefetch_without_a_thread(table_, ids), testing::ExitedWithCode(0), "");
}

// Reads that take a while, counted.
class SlowReads final : public FileOps {
 public:
  std::atomic<int> milliseconds{0}, reads{0};
  // If set: a read at this offset ends only when one at or behind the other has been asked for.
  std::atomic<off_t> waits{-1}, waits_for{-1};
  std::atomic<bool> seen{false}, waited_long{false};
  std::atomic<int> open_for{1 << 30};  // reads: those behind them wait until there are more
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    const int number = reads++;
    while (number >= open_for) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (waits_for >= 0 && offset >= waits_for) seen = true;
    for (int i = 0; offset == waits && !seen; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (i == 10'000) waited_long = seen = true;
    }
    if (milliseconds > 0) std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return FileOps::pread(fd, buffer, bytes, offset);
  }
};

// A table on a slow disk, whose pages were all written.
class SlowPrefetchTest : public StoreTest {
 protected:
  static constexpr std::int64_t kPages = 1000;  // that are read, each in a request of its own

  SlowPrefetchTest() {
    const std::vector<float> ones(table_->rows() * 1024, 1);
    table_->write(0, table_->rows(), std::as_bytes(std::span(ones)));
    store_.commit();
    store_.checkpoint();
    table_.reset();
    store_.close();
    store_ = Store::open(path(), {.memory = 10U << 20, .threads = 2, .file_ops = &ops_});
    table_ = store_.table("t");
    (void)gather(*table_, {1});
    ops_.milliseconds = 5;  // 160 ms for all, on 32 threads
    ops_.reads = 0;
  }
  std::vector<std::int64_t> every_other_page() const {
    std::vector<std::int64_t> ids;
    for (std::int64_t page = 0; page < kPages; ++page) ids.push_back(2 * page);
    return ids;
  }

  SlowReads ops_;
  Store store_ = Store::open(path(), {.memory = 10U << 20, .threads = 2, .file_ops = &ops_});
  std::optional<Table> table_ = store_.create("t", {.rows = 2 * kPages + 10, .dim = 1024});
};

TEST_F(SlowPrefetchTest, CancellingAsksNothingMoreOfTheDiskAndKeepsWhatIsThere) {
  Prefetch ahead = table_->prefetch(every_other_page());
  expect_soon([&] { return ops_.reads > 100; });
  ahead.cancel();
  expect_soon([&] { return ahead.done(); });
  const int before = ops_.reads;
  EXPECT_LT(before, 700);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(ops_.reads, before);
  EXPECT_EQ(gather(*table_, every_other_page()), std::vector<float>(kPages * 1024, 1.0F));
  EXPECT_LE(ops_.reads, kPages + 40) << "a page that is in memory is not read again";
}

TEST_F(SlowPrefetchTest, ACommitDoesNotWaitForAllOfIt) {
  const Prefetch ahead = table_->prefetch(every_other_page());
  expect_soon([&] { return ops_.reads > 100; });
  test::scatter(*table_, {1}, std::vector<float>(1024, 2));
  store_.commit();
  EXPECT_LT(ops_.reads, 700);
  EXPECT_FALSE(ahead.done());
  expect_soon([&] { return ahead.done(); });
  EXPECT_GE(ops_.reads, kPages) << "it went on";
  EXPECT_LE(ops_.reads, kPages + 60) << "and read no page twice";
  const std::uint64_t misses = table_->stats().misses;
  (void)gather(*table_, every_other_page());
  EXPECT_EQ(table_->stats().misses, misses);
}

TEST_F(SlowPrefetchTest, ABatchThatComesWhileItIsCancelledReadsTheRest) {
  for (int round = 0; round < 3; ++round) {
    Prefetch ahead = table_->prefetch(every_other_page());
    expect_soon([&] { return ops_.reads > 50; });
    std::thread cancels([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      ahead.cancel();
    });
    EXPECT_EQ(gather(*table_, every_other_page()), std::vector<float>(kPages * 1024, 1.0F));
    cancels.join();
    table_.reset();
    store_.close();
    store_ = Store::open(path(), {.memory = 10U << 20, .threads = 2, .file_ops = &ops_});
    table_ = store_.table("t");
    ops_.reads = 0;
  }
}

// Pages of 64 KiB: a prefetch of 200 takes several parts, which two threads read.
class PrefetchInPartsTest : public StoreTest {
 protected:
  static constexpr std::int64_t kPages = 200, kPart = 64, kDim = 16384;

  PrefetchInPartsTest() {
    {
      Store store = open_now();
      Table table = store.create("t", {.rows = 2 * kPages + 10, .dim = kDim});
      for (std::int64_t row = 0; row < 2 * kPages + 10; ++row)
        test::scatter(table, {row}, std::vector<float>(kDim, static_cast<float>(row)));
      store.close();
    }
    store_ = open_now();
    table_ = store_->table("t");
    (void)gather(*table_, {1});
    ops_.reads = 0;
  }
  Store open_now() { return Store::open(path(), {.memory = 64U << 20, .threads = 2, .file_ops = &ops_}); }
  // The n-th of them is row 2 n.
  static std::vector<std::int64_t> every_other_page() {
    std::vector<std::int64_t> ids;
    for (std::int64_t page = 0; page < kPages; ++page) ids.push_back(2 * page);
    return ids;
  }
  void expect_rows() {
    const std::vector<float> rows = gather(*table_, every_other_page());
    for (std::int64_t i = 0; i < kPages; ++i)
      ASSERT_EQ(rows[static_cast<std::size_t>(i * kDim + kDim - 1)], static_cast<float>(2 * i));
  }

  SlowReads ops_;
  std::optional<Store> store_;
  std::optional<Table> table_;
};

TEST_F(PrefetchInPartsTest, TheNextPartIsAskedForWhileTheLastPagesOfOneAreOnTheirWay) {
  const auto offset = [&](std::int64_t page) {
    const Geometry geometry = table_->geometry();
    return static_cast<off_t>(geometry.offset_of(static_cast<std::uint64_t>(page)));
  };
  ops_.waits_for = offset(2 * kPart);
  ops_.waits = offset(0);
  const Prefetch ahead = table_->prefetch(every_other_page());
  expect_soon([&] { return ahead.done(); });
  EXPECT_FALSE(ops_.waited_long);
  EXPECT_EQ(ops_.reads, kPages);
  expect_rows();
  EXPECT_EQ(ops_.reads, kPages) << "all of it was there";
}

TEST_F(PrefetchInPartsTest, ACommitComesInBetweenAndNoPageIsReadTwice) {
  test::scatter(*table_, {1}, std::vector<float>(kDim, 2));
  ops_.reads = 0;
  ops_.open_for = 20;
  const Prefetch ahead = table_->prefetch(every_other_page());
  expect_soon([&] { return ops_.reads > 20; });
  std::thread commits([&] { store_->commit(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ops_.open_for = 1 << 30;
  commits.join();
  expect_soon([&] { return ahead.done(); });
  EXPECT_GE(ops_.reads, kPages) << "it went on";
  expect_rows();
  EXPECT_LE(ops_.reads, kPages + 80) << "no page that had arrived was read twice";
}

TEST_F(PrefetchInPartsTest, CancellingEndsBothThreads) {
  for (int round = 0; round < 3; ++round) {
    ops_.open_for = 20;
    Prefetch ahead = table_->prefetch(every_other_page());
    expect_soon([&] { return ops_.reads > 20; });
    ahead.cancel();
    ops_.open_for = 1 << 30;
    expect_soon([&] { return ahead.done(); });
    const int before = ops_.reads;
    EXPECT_LT(before, kPages);
    expect_rows();
    EXPECT_LE(ops_.reads, kPages + 80) << "what had arrived is there";
    table_.reset();
    store_->close();
    store_ = open_now();
    table_ = store_->table("t");
    ops_.reads = 0;
  }
}

TEST_F(PrefetchInPartsTest, ClosingEndsBothThreads) {
  ops_.open_for = 20;
  const Prefetch ahead = table_->prefetch(every_other_page());
  expect_soon([&] { return ops_.reads > 20; });
  std::thread closes([&] { store_->close(); });
  ops_.open_for = 1 << 30;
  closes.join();
  EXPECT_TRUE(ahead.done());
}

}  // namespace
}  // namespace embermap
