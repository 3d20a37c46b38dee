// Which way rows are moved, by what was measured.
#include "kernels/mover_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace embermap {
namespace {

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
constexpr std::uint64_t kHuge = std::uint64_t{1} << 63;
constexpr std::uint64_t kMost = ~std::uint64_t{0};
constexpr MoverWay kKernel{4, 1024, 0};
constexpr MoverWay kThreads{0, 0, 4};
constexpr MoverWay kBoth{4, 1024, 4};

MoverCase case_of(std::uint64_t rows, std::uint64_t row_bytes = 512, std::uint64_t pool_bytes = 8 * kGiB, unsigned threads = 4,
                  bool fetch = true) {
  return {.fetch = fetch, .rows = rows, .row_bytes = row_bytes, .pool_bytes = pool_bytes, .threads = threads};
}

MoverMeasurement one_way(const MoverCase& of, const MoverWay& way, double rate = 1e9) {
  return {.of = of, .rates = {{way, rate, 0}}};
}

bool is_a_way(const MoverWay& way, unsigned threads) {
  if (way.blocks == 0 && way.host_threads == 0) return false;
  if (way.host_threads > threads) return false;
  return (way.blocks == 0) == (way.block_threads == 0) && way.block_threads <= 1024 && way.block_threads % 32 == 0;
}

TEST(MoverWays, EachMovesRowsWithNoMoreThreadsThanThereAre) {
  for (const unsigned threads : {0U, 1U, 2U, 4U, 5U, 8U, 9U, 16U, 64U, 1024U}) {
    const std::vector<MoverWay> ways = mover_ways(threads);
    ASSERT_FALSE(ways.empty());
    for (std::size_t i = 0; i < ways.size(); ++i) {
      EXPECT_TRUE(is_a_way(ways[i], threads)) << ways[i].blocks << " blocks, " << ways[i].host_threads << " of " << threads;
      EXPECT_EQ(std::count(ways.begin(), ways.end(), ways[i]), 1) << "twice with " << threads << " threads";
    }
    const auto some = [&](bool kernel, bool host) {
      return std::any_of(ways.begin(), ways.end(),
                         [&](const MoverWay& way) { return (way.blocks != 0) == kernel && (way.host_threads != 0) == host; });
    };
    EXPECT_TRUE(some(true, false)) << "a kernel alone";
    EXPECT_EQ(some(false, true), threads != 0) << "threads alone";
    EXPECT_EQ(some(true, true), threads != 0) << "both";
  }
}

TEST(MoverModel, KnowsNothingAtFirstAndChoosesAKernelForFewBytesAndBothMoversForMore) {
  const MoverModel model;
  EXPECT_TRUE(model.measurements().empty());
  EXPECT_FALSE(model.knows(case_of(100'000)));
  for (const std::uint64_t rows : {0ULL, 1ULL, 100ULL, 2047ULL}) {
    const MoverRate choice = model.choose(case_of(rows));
    EXPECT_NE(choice.way.blocks, 0U);
    EXPECT_EQ(choice.way.host_threads, 0U) << rows;
    EXPECT_EQ(choice.bytes_per_second, 0);
    EXPECT_EQ(choice.thread_share, 0);
  }
  EXPECT_EQ(model.choose(case_of(2048)).way, kBoth);
  EXPECT_EQ(model.choose(case_of(100'000, 512, 8 * kGiB, 16)).way.host_threads, 8U);
}

TEST(MoverModel, ChoosesAWayThatCanBeInEveryCase) {
  const std::vector<std::uint64_t> sizes = {0,    1,         2,     36,        512,  4096, 1 << 20, (1 << 20) + 1,
                                            kGiB, kHuge - 1, kHuge, kHuge + 1, kMost};
  const std::vector<std::vector<MoverMeasurement>> contents = {
      {}, {one_way(case_of(0, 0, 0), kThreads)}, {one_way(case_of(kMost, kMost, kMost), kThreads)}};
  for (const std::vector<MoverMeasurement>& content : contents) {
    MoverModel model;
    model.add(content);
    for (const std::uint64_t rows : sizes)
      for (const std::uint64_t row_bytes : sizes)
        for (const std::uint64_t pool : {std::uint64_t{0}, std::uint64_t{1}, kHuge, kMost})
          for (const unsigned threads : {0U, 1U, 4U, 1024U})
            for (const bool fetch : {true, false}) {
              const MoverCase of = case_of(rows, row_bytes, pool, threads, fetch);
              const MoverWay way = model.choose(of).way;
              ASSERT_TRUE(is_a_way(way, threads)) << rows << " rows of " << row_bytes << ", " << threads << " threads";
              if (!content.empty() && threads == 4 && fetch) {
                ASSERT_EQ(way, kThreads);
              }
              ASSERT_LE(model.knows(of), !content.empty());
            }
  }
}

TEST(MoverModel, TakesTheFastestWayOfTheNearestCase) {
  MoverModel model;
  model.add({{.of = case_of(4096), .rates = {{kThreads, 1e9, 1}, {kKernel, 3e9, 0}, {kBoth, 2e9, 0.5}}},
             {.of = case_of(100'000), .rates = {{kThreads, 1e9, 1}, {kBoth, 4e9, 0.7}, {kKernel, 3e9, 0}}}});
  EXPECT_EQ(model.choose(case_of(4096)), (MoverRate{kKernel, 3e9, 0}));
  EXPECT_EQ(model.choose(case_of(1)), (MoverRate{kKernel, 3e9, 0}));
  EXPECT_EQ(model.choose(case_of(100'000)), (MoverRate{kBoth, 4e9, 0.7}));
  EXPECT_EQ(model.choose(case_of(kHuge)), (MoverRate{kBoth, 4e9, 0.7}));
  // The middle between the two, as a factor, is about 20,239.
  EXPECT_EQ(model.choose(case_of(20'000)).way, kKernel);
  EXPECT_EQ(model.choose(case_of(21'000)).way, kBoth);
  // Rows are a little nearer to the one, their length much nearer to the other.
  model.add({one_way(case_of(100'000, 8192), kThreads)});
  EXPECT_EQ(model.choose(case_of(100'000, 8000)).way, kThreads);
  EXPECT_EQ(model.choose(case_of(90'000, 600)).way, kBoth);
}

TEST(MoverModel, OfWaysAboutAsFastTheOneOfTheFewestBlocksIsTaken) {
  constexpr MoverWay kFew{2, 1024, 4};
  MoverModel model;
  model.add({{.of = case_of(1000),
              .rates = {{{16, 512, 4}, 100, 0.3}, {kFew, 97.5, 0.8}, {kBoth, 99, 0.5}, {{16, 512, 0}, 90, 0}, {kKernel, 88, 0}}},
             {.of = case_of(100'000), .rates = {{{16, 512, 4}, 100, 0.3}, {kFew, 96, 0.8}, {kBoth, 96.5, 0.5}}},
             {.of = case_of(100'000, 4096), .rates = {{{4, 256, 0}, 99, 0}, {kKernel, 100, 0}}}});
  EXPECT_EQ(model.choose(case_of(1000)), (MoverRate{kFew, 97.5, 0.8}));
  EXPECT_EQ(model.choose_kernel(case_of(1000)), (MoverRate{kKernel, 88, 0}));
  EXPECT_EQ(model.choose(case_of(100'000)), (MoverRate{{16, 512, 4}, 100, 0.3}));
  EXPECT_EQ(model.choose(case_of(100'000, 4096)), (MoverRate{kKernel, 100, 0}));  // as many blocks: the faster one
}

TEST(MoverModel, TheSizeOfThePoolCounts) {
  MoverModel model;
  model.add({one_way(case_of(100'000, 512, kGiB), kKernel), one_way(case_of(100'000, 512, 32 * kGiB), kBoth)});
  EXPECT_EQ(model.choose(case_of(100'000, 512, 2 * kGiB)).way, kKernel);
  EXPECT_EQ(model.choose(case_of(100'000, 512, 24 * kGiB)).way, kBoth);
  EXPECT_EQ(model.choose(case_of(100'000, 512, 0)).way, kKernel);
  EXPECT_EQ(model.choose(case_of(100'000, 512, kMost)).way, kBoth);
}

TEST(MoverModel, OfEquallyFastWaysAndEquallyNearCasesTheFirstIsTaken) {
  MoverModel model;
  model.add({{.of = case_of(1000), .rates = {{kThreads, 2e9, 1}, {kKernel, 2e9, 0}, {kBoth, 2e9, 0.5}}}});
  EXPECT_EQ(model.choose(case_of(1000)).way, kThreads);
  model.add({one_way(case_of(4000), kBoth)});
  EXPECT_EQ(model.choose(case_of(2000)).way, kThreads);  // a factor of two from either
  for (int i = 0; i < 100; ++i) ASSERT_EQ(model.choose(case_of(2000)), model.choose(case_of(2000)));
}

TEST(MoverModel, WhatWasMeasuredWithOtherThreadsOrInTheOtherDirectionSaysNothing) {
  MoverModel model;
  model.add({one_way(case_of(100'000, 512, 8 * kGiB, 8), {0, 0, 8})});
  for (const unsigned threads : {0U, 1U, 4U, 7U, 9U}) {
    EXPECT_FALSE(model.knows(case_of(100'000, 512, 8 * kGiB, threads)));
    EXPECT_TRUE(is_a_way(model.choose(case_of(100'000, 512, 8 * kGiB, threads)).way, threads)) << threads;
    EXPECT_EQ(model.choose(case_of(100'000, 512, 8 * kGiB, threads)).bytes_per_second, 0);
  }
  EXPECT_FALSE(model.knows(case_of(100'000, 512, 8 * kGiB, 8, false)));
  EXPECT_EQ(model.choose(case_of(100'000, 512, 8 * kGiB, 8, false)).bytes_per_second, 0);
  EXPECT_EQ(model.choose(case_of(100'000, 512, 8 * kGiB, 8)).way, (MoverWay{0, 0, 8}));
}

TEST(MoverModel, KnowsRowsOfAboutThisLengthInAPoolOfAboutThisSizeHoweverMany) {
  MoverModel model;
  model.add({one_way(case_of(100'000, 512, 8 * kGiB), kKernel)});
  for (const std::uint64_t rows : {std::uint64_t{0}, std::uint64_t{1}, kHuge, kMost}) EXPECT_TRUE(model.knows(case_of(rows)));
  EXPECT_TRUE(model.knows(case_of(1, 400)));
  EXPECT_TRUE(model.knows(case_of(1, 700)));
  EXPECT_FALSE(model.knows(case_of(1, 256)));
  EXPECT_FALSE(model.knows(case_of(1, 1024)));
  EXPECT_FALSE(model.knows(case_of(1, 0)));
  EXPECT_FALSE(model.knows(case_of(1, kMost)));
  EXPECT_TRUE(model.knows(case_of(1, 512, 4 * kGiB)));
  EXPECT_TRUE(model.knows(case_of(1, 512, 16 * kGiB)));
  EXPECT_FALSE(model.knows(case_of(1, 512, 3 * kGiB)));
  EXPECT_FALSE(model.knows(case_of(1, 512, 17 * kGiB)));
  EXPECT_FALSE(model.knows(case_of(1, 512, 0)));
}

TEST(MoverModel, ACaseWithoutRatesWasNotMeasured) {
  MoverModel model;
  model.add({{.of = case_of(100'000), .rates = {}}});
  EXPECT_FALSE(model.knows(case_of(100'000)));
  EXPECT_EQ(model.choose(case_of(100'000)).way, kBoth);
  model.add({one_way(case_of(kHuge, 8, 0), kThreads)});
  EXPECT_EQ(model.choose(case_of(100'000)).way, kThreads) << "farther away, but measured";
}

TEST(MoverModel, AddReplacesTheSameCaseAndKeepsTheOthers) {
  MoverModel model;
  model.add({one_way(case_of(1000), kThreads), one_way(case_of(2000), kThreads), one_way(case_of(1000), kKernel)});
  ASSERT_EQ(model.measurements().size(), 2U);
  EXPECT_EQ(model.choose(case_of(1000)).way, kKernel);
  model.add({one_way(case_of(2000), kBoth)});
  ASSERT_EQ(model.measurements().size(), 2U);
  EXPECT_EQ(model.measurements()[0], one_way(case_of(1000), kKernel));
  EXPECT_EQ(model.measurements()[1], one_way(case_of(2000), kBoth));
  model.add({});
  EXPECT_EQ(model.measurements().size(), 2U);
  for (const MoverCase& other :
       {case_of(2000, 513), case_of(2000, 512, 1), case_of(2000, 512, 8 * kGiB, 5), case_of(2000, 512, 8 * kGiB, 4, false)})
    model.add({one_way(other, kKernel)});
  EXPECT_EQ(model.measurements().size(), 6U);
}

TEST(MoverModel, ClearForgetsAll) {
  MoverModel model;
  model.add({one_way(case_of(1000), kThreads), one_way(case_of(1000, 512, 8 * kGiB, 4, false), kThreads)});
  model.clear();
  EXPECT_TRUE(model.measurements().empty());
  EXPECT_FALSE(model.knows(case_of(1000)));
  EXPECT_EQ(model.choose(case_of(1000)).way, MoverModel().choose(case_of(1000)).way);
  model.clear();
  model.add({one_way(case_of(1000), kBoth)});
  EXPECT_EQ(model.choose(case_of(1000)).way, kBoth);
}

// Each choice is that of some moment: the default, or one of the two ways that are added.
TEST(MoverModel, ThreadsAddClearAndChooseAtOnce) {
  MoverModel model;
  std::atomic<int> wrong{0};
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (const MoverWay& way : {kKernel, kThreads})
    threads.emplace_back([&model, way] {
      for (std::uint64_t i = 0; i < 2000; ++i) {
        model.add({one_way(case_of(100'000 + i % 64), way), one_way(case_of(i, 36, kGiB, 8), {8, 512, 0})});
        if (i % 97 == 96) model.clear();
      }
    });
  for (int reader = 0; reader < 2; ++reader)
    threads.emplace_back([&] {
      while (!end) {
        const MoverWay way = model.choose(case_of(100'000)).way;
        wrong += !(way == kKernel || way == kThreads || way == kBoth);
        (void)model.knows(case_of(100'000));
        for (const MoverMeasurement& one : model.measurements()) wrong += one.rates.size() != 1;
      }
    });
  threads[0].join();
  threads[1].join();
  end = true;
  threads[2].join();
  threads[3].join();
  EXPECT_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace embermap
