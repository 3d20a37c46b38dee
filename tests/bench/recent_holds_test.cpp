#include "tools/bench/recent_holds.hpp"

#include <gtest/gtest.h>

#include <initializer_list>

namespace embermap::bench {
namespace {

using Hold = RecentHolds::Hold;

// A hold of frames that are in memory already.
void use(RecentHolds& recent, Hold hold, std::initializer_list<std::uint32_t> frames, std::uint64_t victims = 0) {
  recent.begin(hold);
  for (const std::uint32_t frame : frames) recent.used(frame);
  recent.make_room(victims);
}

RecentHolds filled(std::uint64_t frames, const RecentHolds::Options& options = {}) {
  RecentHolds recent(frames, options);
  recent.begin(Hold::kBatch);
  for (std::uint32_t frame = 0; frame < frames; ++frame) recent.inserted(frame);
  for (int i = 0; i < 20; ++i) recent.begin(Hold::kBatch);  // all of it long ago
  return recent;
}

TEST(RecentHolds, UseCountsOnceInSoManyCalls) {
  RecentHolds recent(1, {.apart = 3});
  recent.begin(Hold::kBatch);
  recent.inserted(0);  // counts
  for (const bool counts : {false, false, true, false, false, true}) {
    recent.begin(Hold::kBatch);
    EXPECT_EQ(recent.used(0), counts);
  }
}

TEST(RecentHolds, EveryUseCountsWithoutDistance) {
  RecentHolds recent(1, {.apart = 0});
  recent.begin(Hold::kBatch);
  recent.inserted(0);
  EXPECT_TRUE(recent.used(0));
  EXPECT_TRUE(recent.used(0));
}

TEST(RecentHolds, PassesOfABatchAreOneCall) {
  RecentHolds recent(1, {.apart = 2});
  recent.begin(Hold::kBatch);
  recent.inserted(0);
  for (int pass = 0; pass < 5; ++pass) {
    recent.begin(Hold::kNextPass);
    EXPECT_FALSE(recent.used(0));
  }
  recent.begin(Hold::kBatch);
  EXPECT_FALSE(recent.used(0));
  recent.begin(Hold::kBatch);
  EXPECT_TRUE(recent.used(0));
}

TEST(RecentHolds, FramesOfThisHoldAreAlwaysGuarded) {
  RecentHolds recent = filled(4, {.guard = 0});
  use(recent, Hold::kBatch, {1}, 3);
  EXPECT_TRUE(recent.guarded(1));
  EXPECT_FALSE(recent.guarded(0));
}

TEST(RecentHolds, GuardsTheLastCallsWhileTheyAreFew) {
  RecentHolds recent = filled(100);
  for (const std::uint32_t frame : {0U, 1U, 2U, 3U, 4U}) use(recent, Hold::kBatch, {frame});
  use(recent, Hold::kBatch, {9}, 1);
  EXPECT_TRUE(recent.guarded(9));
  for (const std::uint32_t frame : {1U, 2U, 3U, 4U}) EXPECT_TRUE(recent.guarded(frame)) << frame;  // four calls
  EXPECT_FALSE(recent.guarded(0));
  EXPECT_FALSE(recent.guarded(50));
}

TEST(RecentHolds, BeyondTheLastCallGuardsNoMoreThanItsShare) {
  RecentHolds recent = filled(8, {.share = 0.5});
  use(recent, Hold::kBatch, {0, 1});
  use(recent, Hold::kBatch, {2, 3});
  use(recent, Hold::kBatch, {4}, 1);  // with 2 and 3 three of eight; with 0 and 1 five
  EXPECT_TRUE(recent.guarded(2));
  EXPECT_FALSE(recent.guarded(0));
  use(recent, Hold::kBatch, {5, 6, 7, 0, 1}, 1);  // five, and the last call is guarded all the same
  EXPECT_TRUE(recent.guarded(4));
  EXPECT_FALSE(recent.guarded(2));
}

TEST(RecentHolds, GuardGivesWayToWhatTheHoldNeeds) {
  RecentHolds recent = filled(6);
  use(recent, Hold::kBatch, {0, 1, 2});
  use(recent, Hold::kBatch, {3}, 2);  // 4 and 5 are enough
  EXPECT_TRUE(recent.guarded(0));
  recent.make_room(3);  // they are not
  EXPECT_FALSE(recent.guarded(0));
  EXPECT_TRUE(recent.guarded(3));
}

TEST(RecentHolds, OldestPassGoesFirstWhereABatchFillsMemory) {
  RecentHolds recent = filled(6);
  use(recent, Hold::kBatch, {0, 1});
  use(recent, Hold::kNextPass, {2, 3});
  use(recent, Hold::kBatch, {4}, 3);  // of 0, 1, 2, 3 and 5
  EXPECT_FALSE(recent.guarded(0));
  EXPECT_TRUE(recent.guarded(2));
  EXPECT_FALSE(recent.guarded(5));
}

TEST(RecentHolds, PrefetchedPageStaysUntilItsFirstUse) {
  RecentHolds recent = filled(100);
  use(recent, Hold::kPrefetch, {0, 1});
  for (int i = 0; i < 5; ++i) use(recent, Hold::kBatch, {9}, 1);  // beyond the guard
  EXPECT_TRUE(recent.guarded(0));
  use(recent, Hold::kBatch, {0}, 1);
  use(recent, Hold::kBatch, {9}, 1);
  EXPECT_TRUE(recent.guarded(0)) << "used of late";
  EXPECT_TRUE(recent.guarded(1)) << "not used yet, seven holds on";
  use(recent, Hold::kBatch, {9}, 1);
  EXPECT_FALSE(recent.guarded(1)) << "given up after eight";
}

TEST(RecentHolds, PrefetchedPageIsLikeAnyOtherOnceUsed) {
  RecentHolds recent = filled(100);
  use(recent, Hold::kPrefetch, {0, 1});
  use(recent, Hold::kBatch, {0});
  for (int i = 0; i < 5; ++i) use(recent, Hold::kBatch, {9}, 1);  // beyond the guard
  EXPECT_FALSE(recent.guarded(0));
  EXPECT_TRUE(recent.guarded(1));
}

TEST(RecentHolds, PrefetchedPagesAreGivenUpWhereTheHoldNeedsThem) {
  RecentHolds recent = filled(4);
  use(recent, Hold::kPrefetch, {0, 1});
  for (int i = 0; i < 5; ++i) use(recent, Hold::kBatch, {2});
  recent.make_room(1);
  EXPECT_TRUE(recent.guarded(0));
  recent.make_room(2);
  EXPECT_FALSE(recent.guarded(0));
  EXPECT_TRUE(recent.guarded(2));
}

TEST(RecentHolds, RemovedFramesDoNotCountAsYoung) {
  RecentHolds recent = filled(4, {.share = 1});
  use(recent, Hold::kBatch, {0, 1, 2});
  recent.begin(Hold::kBatch);
  recent.removed(0);
  recent.removed(1);
  recent.make_room(1);  // 3 can go, 2 is guarded: two are left, one of them young
  EXPECT_TRUE(recent.guarded(2));
  EXPECT_FALSE(recent.guarded(3));
}

}  // namespace
}  // namespace embermap::bench
