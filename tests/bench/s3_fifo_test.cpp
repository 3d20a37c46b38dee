#include "tools/bench/s3_fifo.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace embermap::bench {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Hold = S3Fifo::Hold;

constexpr RecentHolds::Options kPlain{.apart = 0, .guard = 0};  // every use counts, nothing but the hold itself is guarded

// Pages in frames, as the store keeps them.
class Pages {
 public:
  Pages(std::uint32_t frames, const S3Fifo::Options& options) : policy{frames, options}, page_of_(frames), held_(frames) {
    for (std::uint32_t i = frames; i > 0; --i) free_.push_back(i - 1);
  }
  // Pages evicted by the hold, in order.
  std::vector<std::uint64_t> hold(const std::vector<std::uint64_t>& pages, Hold kind = Hold::kBatch) {
    policy.begin(kind);
    std::vector<std::uint64_t> missing, evicted;
    std::fill(held_.begin(), held_.end(), false);
    for (const std::uint64_t page : pages) {
      const auto at = frame_of.find(page);
      if (at == frame_of.end()) {
        missing.push_back(page);
      } else {
        held_[at->second] = true;
        policy.used(at->second);
      }
    }
    misses += missing.size();
    policy.make_room(missing.size() - std::min(missing.size(), free_.size()));
    for (const std::uint64_t page : missing) {
      std::uint32_t frame = S3Fifo::kNone;
      if (!free_.empty()) {
        frame = free_.back();
        free_.pop_back();
      } else {
        frame = policy.victim([&](std::uint32_t f) { return !held_[f] && pinned.count(page_of_[f]) == 0; });
        if (frame == S3Fifo::kNone) {
          ADD_FAILURE() << "no victim for page " << page;
          return evicted;
        }
        EXPECT_FALSE(held_[frame]) << "page " << page_of_[frame] << " of the hold itself was evicted";
        evicted.push_back(page_of_[frame]);
        frame_of.erase(page_of_[frame]);
      }
      held_[frame] = true;
      page_of_[frame] = page;
      frame_of[page] = frame;
      policy.inserted(frame, page);
    }
    return evicted;
  }
  std::vector<std::uint64_t> likely(std::size_t count) const {
    std::vector<std::uint32_t> frames(count);
    frames.resize(policy.likely_victims([](std::uint32_t) { return true; }, frames));
    std::vector<std::uint64_t> pages;
    for (const std::uint32_t frame : frames) pages.push_back(page_of_[frame]);
    return pages;
  }
  void drop(std::uint64_t page) {
    policy.removed(frame_of.at(page));
    free_.push_back(frame_of.at(page));
    frame_of.erase(page);
  }

  S3Fifo policy;
  std::map<std::uint64_t, std::uint32_t> frame_of;
  std::set<std::uint64_t> pinned;  // by other holds
  std::uint64_t misses = 0;

 private:
  std::vector<std::uint64_t> page_of_;
  std::vector<bool> held_;
  std::vector<std::uint32_t> free_;
};

TEST(S3Fifo, PagesUsedOnceLeaveInTheOrderTheyCame) {
  Pages pages(4, {.small = 0.5, .recent = kPlain});
  for (const std::uint64_t page : {1U, 2U, 3U, 4U}) pages.hold({page});
  EXPECT_THAT(pages.hold({5}), ElementsAre(1));
  EXPECT_THAT(pages.hold({6, 7}), ElementsAre(2, 3));
}

TEST(S3Fifo, UsedPageOutlivesAScan) {
  Pages pages(10, {.recent = kPlain});
  pages.hold({1});
  pages.hold({1});
  for (std::uint64_t page = 100; page < 1000; ++page) pages.hold({page});
  EXPECT_TRUE(pages.frame_of.contains(1));
  EXPECT_EQ(pages.misses, 901);
}

TEST(S3Fifo, UpdateAfterGatherIsNoUse) {
  Pages pages(10, {});
  pages.hold({1});
  pages.hold({1});
  for (std::uint64_t page = 100; page < 200; ++page) {
    pages.hold({page});
    pages.hold({page});
  }
  EXPECT_FALSE(pages.frame_of.contains(1));
}

TEST(S3Fifo, RememberedPageEntersTheMainFifo) {
  Pages pages(10, {.recent = kPlain});
  for (std::uint64_t page = 0; page < 11; ++page) pages.hold({page});  // 0 left last
  pages.hold({0});
  for (std::uint64_t page = 100; page < 200; ++page) pages.hold({page});
  EXPECT_TRUE(pages.frame_of.contains(0)) << "it was never used while in memory, but came back soon";
}

TEST(S3Fifo, PageComingBackLateIsNotRemembered) {
  Pages pages(10, {.recent = kPlain});
  for (std::uint64_t page = 0; page < 11; ++page) pages.hold({page});
  for (std::uint64_t page = 100; page < 109; ++page) pages.hold({page});  // nine more left since
  pages.hold({0});
  for (std::uint64_t page = 200; page < 300; ++page) pages.hold({page});
  EXPECT_FALSE(pages.frame_of.contains(0));
}

TEST(S3Fifo, MainFifoForgetsPagesNoLongerUsed) {
  Pages pages(4, {.small = 0.25, .recent = kPlain});
  for (const std::uint64_t page : {1U, 1U, 2U, 2U, 3U, 3U}) pages.hold({page});
  for (const std::uint64_t page : {10U, 10U, 11U, 11U, 12U, 12U, 13U, 13U, 14U, 14U, 15U, 15U}) pages.hold({page});
  for (const std::uint64_t page : {1U, 2U, 3U}) EXPECT_FALSE(pages.frame_of.contains(page)) << page;
}

TEST(S3Fifo, PrefetchedBatchIsThereWhenItsTurnComes) {
  Pages pages(60, {});
  const auto batch = [](std::uint64_t i) {
    std::vector<std::uint64_t> distinct;
    for (std::uint64_t page = 0; page < 15; ++page) distinct.push_back(i * 15 + page);
    return distinct;
  };
  pages.hold(batch(0), Hold::kPrefetch);
  for (std::uint64_t i = 0; i < 50; ++i) {
    pages.hold(batch(i + 1), Hold::kPrefetch);
    const std::uint64_t before = pages.misses;
    pages.hold(batch(i));  // gather
    pages.hold(batch(i));  // update
    EXPECT_EQ(pages.misses, before) << "batch " << i;
  }
}

TEST(S3Fifo, BatchThatNearlyFillsMemoryIsUpdatedWithoutMisses) {
  Pages pages(20, {});
  for (std::uint64_t i = 0; i < 20; ++i) {
    const std::vector<std::uint64_t> first{100 * i, 100 * i + 1, 100 * i + 2, 100 * i + 3, 100 * i + 4, 100 * i + 5};
    std::vector<std::uint64_t> second(first);
    for (std::uint64_t& page : second) page += 50;
    pages.hold(first);
    pages.hold(second, Hold::kNextPass);
    const std::uint64_t before = pages.misses;
    pages.hold(first);
    pages.hold(second, Hold::kNextPass);
    EXPECT_EQ(pages.misses, before);
  }
}

TEST(S3Fifo, HoldMayTakeEveryFrame) {
  Pages pages(4, {});
  pages.hold({1, 2, 3, 4});
  EXPECT_EQ(pages.hold({5, 6, 7, 8}).size(), 4);
  EXPECT_EQ(pages.hold({5, 9, 10, 11}).size(), 3);
}

TEST(S3Fifo, OneFrame) {
  Pages pages(1, {});
  for (std::uint64_t page = 0; page < 10; ++page) pages.hold({page});
  EXPECT_EQ(pages.misses, 10);
  pages.hold({9});
  EXPECT_EQ(pages.misses, 10);
}

TEST(S3Fifo, PagesHeldByOthersStayAndTheGuardGivesWay) {
  Pages pages(6, {});
  for (const std::uint64_t page : {1U, 2U, 3U, 4U}) pages.hold({page});
  for (int i = 0; i < 20; ++i) pages.hold({5, 6});
  pages.pinned = {1, 2, 3, 4};  // the policy takes these for old
  EXPECT_THAT(pages.hold({7, 8}), testing::UnorderedElementsAre(5, 6));
  pages.pinned = {1, 2, 3, 4, 7, 8};
  pages.policy.begin(Hold::kBatch);
  pages.policy.make_room(1);
  EXPECT_EQ(pages.policy.victim([](std::uint32_t) { return false; }), S3Fifo::kNone);
}

TEST(S3Fifo, RemovedFrameIsForgotten) {
  Pages pages(4, {.recent = kPlain});
  for (const std::uint64_t page : {1U, 2U, 3U, 4U}) pages.hold({page});
  pages.drop(2);
  EXPECT_THAT(pages.hold({5}), IsEmpty());  // takes the free frame
  EXPECT_THAT(pages.hold({6, 7, 8}), ElementsAre(1, 3, 4));
}

TEST(S3Fifo, LikelyVictimsAreTheNextOnes) {
  Pages pages(8, {.small = 0.25, .recent = kPlain});
  for (const std::uint64_t page : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U}) pages.hold({page});
  pages.hold({2});
  pages.policy.begin(Hold::kBatch);
  EXPECT_THAT(pages.likely(3), ElementsAre(1, 3, 4));
  EXPECT_THAT(pages.hold({11, 12, 13}), ElementsAre(1, 3, 4));
  EXPECT_THAT(pages.likely(0), IsEmpty());
}

TEST(S3Fifo, RandomHoldsNeverLoseAFrame) {
  std::mt19937_64 random(5);
  for (const std::uint32_t frames : {1U, 2U, 7U, 64U}) {
    Pages pages(frames, {});
    for (int i = 0; i < 3000; ++i) {
      std::set<std::uint64_t> distinct;
      const std::uint64_t size = 1 + random() % frames;
      while (distinct.size() < size) distinct.insert(random() % (1 + random() % (4 * frames)));
      pages.hold({distinct.begin(), distinct.end()}, static_cast<Hold>(random() % 3));
      if (random() % 50 == 0) pages.drop(*distinct.begin());
      if (pages.frame_of.size() == frames) {
        for (const std::uint64_t page : distinct) ASSERT_TRUE(pages.frame_of.contains(page));
      }
      ASSERT_LE(pages.frame_of.size(), frames);
    }
  }
}

TEST(S3Fifo, MissesLessThanLruOnSkewedBatches) {
  constexpr std::uint32_t kFrames = 200;
  Pages pages(kFrames, {});
  std::mt19937_64 random(3);
  std::map<std::uint64_t, std::uint64_t> last;  // exact LRU beside it: page -> time of use
  std::uint64_t lru_misses = 0, time = 0;
  for (int batch = 0; batch < 2000; ++batch) {
    std::set<std::uint64_t> distinct;
    for (int i = 0; i < 30; ++i) {  // P(page < x) ~ x^(1/4)
      const double u = static_cast<double>(random() >> 11) * 0x1p-53;
      distinct.insert(static_cast<std::uint64_t>(2000 * u * u * u * u));
    }
    for (int update = 0; update < 2; ++update) {
      pages.hold({distinct.begin(), distinct.end()});
      for (const std::uint64_t page : distinct) {
        lru_misses += !last.contains(page);
        last[page] = ++time;
      }
      while (last.size() > kFrames)
        last.erase(std::min_element(last.begin(), last.end(), [](auto& a, auto& b) { return a.second < b.second; }));
    }
  }
  EXPECT_LT(static_cast<double>(pages.misses), 0.95 * static_cast<double>(lru_misses));
}

TEST(S3Fifo, MemoryIsCounted) {
  EXPECT_GE(S3Fifo::memory_bytes(1000, {}), 1000 * 33);
  EXPECT_LE(S3Fifo::memory_bytes(1000, {}), 1000 * 34);
}

}  // namespace
}  // namespace embermap::bench
