#include "base/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <initializer_list>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace embermap {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
#else
constexpr bool kSanitized = false;
#endif

class Threads : public testing::TestWithParam<unsigned> {};
INSTANTIATE_TEST_SUITE_P(Counts, Threads, testing::Values(1, 2, 3, 8, 33));

TEST_P(Threads, EveryIndexIsVisitedOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.threads(), GetParam());
  for (const std::uint64_t count : std::initializer_list<std::uint64_t>{0, 1, 2, 31, 32, 33, 1000, 65537})
    for (const std::uint64_t grain : std::initializer_list<std::uint64_t>{0, 1, 7, 1000, 100000}) {
      std::vector<std::atomic<int>> visits(count);
      pool.parallel_for(count, grain, [&](std::uint64_t begin, std::uint64_t end) {
        ASSERT_LT(begin, end);
        for (std::uint64_t i = begin; i < end; ++i) ++visits[i];
      });
      EXPECT_TRUE(std::all_of(visits.begin(), visits.end(), [](const auto& n) { return n == 1; })) << count << " by " << grain;
    }
}

TEST_P(Threads, PiecesAreAtLeastTheGrainButForTheLast) {
  ThreadPool pool(GetParam());
  std::mutex mutex;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces;
  pool.parallel_for(1003, 10, [&](std::uint64_t begin, std::uint64_t end) {
    const std::lock_guard lock(mutex);
    pieces.emplace_back(begin, end);
  });
  std::sort(pieces.begin(), pieces.end());
  for (std::size_t i = 0; i + 1 < pieces.size(); ++i) {
    EXPECT_GE(pieces[i].second - pieces[i].first, 10U);
    EXPECT_EQ(pieces[i].second, pieces[i + 1].first);
  }
  EXPECT_EQ(pieces.back().second, 1003U);
}

TEST_P(Threads, TheFirstExceptionComesOutAndThePoolGoesOn) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    try {
      pool.parallel_for(1000, 1, [&](std::uint64_t begin, std::uint64_t) {
        if (begin >= 500) throw std::runtime_error("stop");
        if (begin == 0 && GetParam() == 1) throw std::runtime_error("stop");
      });
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "stop");
    }
    std::atomic<std::uint64_t> sum{0};
    pool.parallel_for(100, 1, [&](std::uint64_t begin, std::uint64_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 100U);
  }
}

TEST_P(Threads, AfterAnExceptionNoBodyRuns) {
  ThreadPool pool(GetParam());
  std::atomic<int> running{0};
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(pool.parallel_for(64, 1,
                                   [&](std::uint64_t, std::uint64_t) {
                                     ++running;
                                     std::this_thread::yield();
                                     --running;
                                     throw std::runtime_error("each");
                                   }),
                 std::runtime_error);
    EXPECT_EQ(running, 0);
  }
}

TEST_P(Threads, ALoopInsideABodyRunsOnItsThread) {
  ThreadPool pool(GetParam());
  std::atomic<std::uint64_t> sum{0};
  std::atomic<bool> moved{false};
  pool.parallel_for(2, 1,
                    [&](std::uint64_t begin, std::uint64_t end) {  // two pieces: with more threads some are free to interfere
                      for (std::uint64_t i = begin; i < end; ++i) {
                        const auto self = std::this_thread::get_id();
                        pool.parallel_for(100, 1, [&](std::uint64_t first, std::uint64_t last) {
                          sum += last - first;
                          if (std::this_thread::get_id() != self) moved = true;
                          std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        });
                      }
                    });
  EXPECT_EQ(sum, 200U);
  EXPECT_FALSE(moved);
}

TEST_P(Threads, ALoopOfAnotherPoolInsideABodyEnds) {
  ThreadPool outer(GetParam());
  ThreadPool inner(3);
  std::atomic<std::uint64_t> sum{0};
  outer.parallel_for(16, 1, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i)
      inner.parallel_for(100, 1, [&](std::uint64_t first, std::uint64_t last) { sum += last - first; });
  });
  EXPECT_EQ(sum, 1600U);
}

TEST_P(Threads, SeveralCallersShareThePool) {
  ThreadPool pool(GetParam());
  std::vector<std::uint64_t> sums(6);
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < sums.size(); ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 100; ++round) {
        std::atomic<std::uint64_t> sum{0};
        pool.parallel_for(500, 3, [&](std::uint64_t begin, std::uint64_t end) { sum += end - begin; });
        sums[caller] += sum;
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (const std::uint64_t sum : sums) EXPECT_EQ(sum, 50000U);
}

TEST_P(Threads, WritesOfTheBodiesAreSeenByTheCaller) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 200; ++round) {
    std::vector<int> values(256, 0);  // plain ints: a race here is a fault of the pool
    pool.parallel_for(values.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i) values[i] = round + 1;
    });
    ASSERT_TRUE(std::all_of(values.begin(), values.end(), [&](int value) { return value == round + 1; }));
  }
}

TEST(ThreadPool, UsesSeveralThreadsAtOnce) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Neither of the first two pieces ends before both have begun: this returns only if two threads run them.
  pool.parallel_for(2, 1, [&](std::uint64_t, std::uint64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, OneThreadIsTheCallersOwn) {
  ThreadPool pool(1);
  std::thread::id ran;
  pool.parallel_for(10, 1, [&](std::uint64_t, std::uint64_t) { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(ThreadPool, ZeroTakesWhatTheProcessMayUse) {
  ThreadPool pool(0);
  EXPECT_GE(pool.threads(), 1U);
  EXPECT_LE(pool.threads(), 16U);
}

TEST(ThreadPool, CountsNearTheEndOf64BitsDoNotWrap) {
  ThreadPool pool(4);
  constexpr std::uint64_t kCount = ~std::uint64_t{0};
  std::mutex mutex;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces;
  pool.parallel_for(kCount, 1, [&](std::uint64_t begin, std::uint64_t end) {
    const std::lock_guard lock(mutex);
    pieces.emplace_back(begin, end);
  });
  std::sort(pieces.begin(), pieces.end());
  ASSERT_LE(pieces.size(), 17U);
  EXPECT_EQ(pieces.front().first, 0U);
  for (std::size_t i = 0; i + 1 < pieces.size(); ++i) EXPECT_EQ(pieces[i].second, pieces[i + 1].first);
  EXPECT_EQ(pieces.back().second, kCount);
}

TEST(ThreadPool, StoppedItWorksOnItsCallersThread) {
  ThreadPool pool(4);
  pool.stop();
  pool.stop();
  std::atomic<std::uint64_t> sum{0};
  std::atomic<bool> elsewhere{false};
  const std::thread::id caller = std::this_thread::get_id();
  pool.parallel_for(1000, 1, [&](std::uint64_t begin, std::uint64_t end) {
    sum += end - begin;
    if (std::this_thread::get_id() != caller) elsewhere = true;
  });
  EXPECT_EQ(sum, 1000U);
  EXPECT_FALSE(elsewhere);
}

TEST(ThreadPool, AnAbsurdNumberOfThreadsIsRefused) {
  EXPECT_THROW(ThreadPool(ThreadPool::kMaxThreads + 1), InvalidArgument);
  EXPECT_THROW(ThreadPool(~0U), InvalidArgument);
}

// In a process of its own, whose address space has room for a few stacks but not for 200.
void run_with_little_address_space() {
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit limit{(pages << 12) + (std::uint64_t{64} << 20), RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::exit(3);
  ThreadPool pool(200);
  std::atomic<std::uint64_t> sum{0};
  pool.parallel_for(1000, 1, [&](std::uint64_t begin, std::uint64_t end) { sum += end - begin; });
  std::exit(pool.threads() >= 1 && pool.threads() < 200 && sum == 1000 ? 0 : 1);
}

TEST(ThreadPoolDeathTest, WhereThreadsCannotBeStartedThereAreFewer) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer needs the address space that this test takes away";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_with_little_address_space(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace embermap
