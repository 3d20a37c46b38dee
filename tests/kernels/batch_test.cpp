#include "kernels/batch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

Batch reference(const std::vector<std::uint64_t>& keys) {
  Batch batch;
  batch.positions.resize(keys.size());
  std::iota(batch.positions.begin(), batch.positions.end(), 0U);
  std::stable_sort(batch.positions.begin(), batch.positions.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return keys[a] < keys[b]; });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t key = keys[batch.positions[i]];
    if (!batch.keys.empty() && batch.keys.back() == key) continue;
    batch.keys.push_back(key);
    batch.starts.push_back(static_cast<std::uint32_t>(i));
  }
  batch.starts.push_back(static_cast<std::uint32_t>(keys.size()));
  return batch;
}

void expect_grouped(const std::vector<std::uint64_t>& keys, ThreadPool& pool, const std::string& what) {
  const Batch expected = reference(keys);
  const Batch batch = make_batch(keys, pool);
  // EXPECT_TRUE: a mismatch of 100,000 entries is not worth printing.
  EXPECT_TRUE(batch.keys == expected.keys) << what;
  EXPECT_TRUE(batch.positions == expected.positions) << what;
  EXPECT_TRUE(batch.starts == expected.starts) << what;
  EXPECT_EQ(batch.distinct(), expected.keys.size()) << what;
}

class BatchCount : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Edges, BatchCount,
                         testing::Values(0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 65536, 65537, 131073));

TEST_P(BatchCount, GroupsKeysOfEveryRange) {
  const std::uint64_t count = GetParam();
  std::mt19937_64 random(count + 1);
  for (const unsigned threads : {1U, 3U}) {
    ThreadPool pool(threads);
    for (const std::uint64_t most :
         {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{199}, std::uint64_t{65535}, std::uint64_t{65536},
          (std::uint64_t{1} << 32) - 1, std::uint64_t{1} << 32, (std::uint64_t{1} << 40) + 12345, kMost}) {
      std::vector<std::uint64_t> keys(count);
      std::uniform_int_distribution<std::uint64_t> draw(0, most);
      for (std::uint64_t& key : keys) key = draw(random);
      expect_grouped(keys, pool, "keys up to " + std::to_string(most));
    }
  }
}

TEST_P(BatchCount, GroupsKeysThatDifferInFarBitsOnly) {
  std::mt19937_64 random(GetParam() + 2);
  ThreadPool pool(3);
  for (const unsigned low : {0U, 20U, 31U, 32U, 50U, 56U})
    for (const unsigned width : {1U, 8U, 11U, 12U, 32U, 33U}) {
      if (low + width > 64) continue;
      std::vector<std::uint64_t> keys(GetParam());
      const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
      const std::uint64_t common = 0xA5A5A5A5A5A5A5A5U & ~(mask << low);
      for (std::uint64_t& key : keys) key = common | ((random() & mask) << low);
      expect_grouped(keys, pool, "bits " + std::to_string(low) + " + " + std::to_string(width));
    }
  // Two far bits and nothing between: every digit between them is empty.
  std::vector<std::uint64_t> keys(GetParam());
  for (std::uint64_t& key : keys) key = ((random() & 1) << 63) | (random() & 1);
  expect_grouped(keys, pool, "bits 0 and 63");
}

TEST_P(BatchCount, GroupsSortedReversedAndEqualKeys) {
  const std::uint64_t count = GetParam();
  for (const unsigned threads : {1U, 4U}) {
    ThreadPool pool(threads);
    std::vector<std::uint64_t> keys(count);
    for (std::uint64_t i = 0; i < count; ++i) keys[i] = i / 3 * 1000;
    expect_grouped(keys, pool, "ascending");
    std::reverse(keys.begin(), keys.end());
    expect_grouped(keys, pool, "descending");
    std::fill(keys.begin(), keys.end(), kMost);
    expect_grouped(keys, pool, "all 2^64 - 1");
    std::fill(keys.begin(), keys.end(), 0);
    expect_grouped(keys, pool, "all 0");
    for (std::uint64_t i = 0; i < count; ++i) keys[i] = i;
    if (count > 1) std::swap(keys[count - 1], keys[count - 2]);
    expect_grouped(keys, pool, "ascending but for the last");
    for (std::uint64_t i = 0; i < count; ++i) keys[i] = kMost - i % 2;
    expect_grouped(keys, pool, "two neighbours");
  }
}

TEST(Batch, SaysWhereEachKeyStood) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{5, 9, 5, kMost, 0, 5}, pool);
  EXPECT_THAT(batch.keys, testing::ElementsAre(0, 5, 9, kMost));
  EXPECT_THAT(batch.positions, testing::ElementsAre(4, 0, 2, 5, 1, 3));
  EXPECT_THAT(batch.starts, testing::ElementsAre(0, 1, 4, 5, 6));
}

TEST(Batch, OfNothingHasOneStart) {
  ThreadPool pool(2);
  const Batch batch = make_batch({}, pool);
  EXPECT_EQ(batch.distinct(), 0U);
  EXPECT_TRUE(batch.positions.empty());
  EXPECT_THAT(batch.starts, testing::ElementsAre(0));
}

TEST(Batch, MoreIdsThanPositionsCanNumberAreRefusedBeforeAnyIsRead) {
  ThreadPool pool(1);
  const std::uint64_t one = 1;
  try {
    make_batch(std::span<const std::uint64_t>(&one, kMaxBatch + 1), pool);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("4294967295 ids"));
  }
}

TEST(FirstBadId, KnowsTheEdges) {
  ThreadPool pool(2);
  const auto first = [&](std::vector<std::int64_t> ids, std::uint64_t rows) { return first_bad_id(ids, rows, pool); };
  EXPECT_EQ(first({}, 0), std::nullopt);
  EXPECT_EQ(first({}, 10), std::nullopt);
  EXPECT_EQ(first({0}, 0), 0U);
  EXPECT_EQ(first({0}, 1), std::nullopt);
  EXPECT_EQ(first({0, 9, 5}, 10), std::nullopt);
  EXPECT_EQ(first({0, 9, 10, 11}, 10), 2U);
  EXPECT_EQ(first({3, -1, 99}, 10), 1U);
  EXPECT_EQ(first({0, 9, std::int64_t{1} << 40}, 10), 2U);
  EXPECT_EQ(first({std::numeric_limits<std::int64_t>::min()}, 10), 0U);
  EXPECT_EQ(first({-10 - 1}, 10), 0U);
  EXPECT_EQ(first({std::numeric_limits<std::int64_t>::max()}, 10), 0U);
}

TEST(FirstBadId, HugeTablesHoldEveryIdThatIsNotNegative) {
  ThreadPool pool(1);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const std::uint64_t rows : {std::uint64_t{1} << 63, (std::uint64_t{1} << 63) + 1, kMost}) {
    EXPECT_EQ(first_bad_id(std::vector<std::int64_t>{0, kMax}, rows, pool), std::nullopt) << rows;
    EXPECT_EQ(first_bad_id(std::vector<std::int64_t>{0, kMax, -1}, rows, pool), 2U) << rows;
  }
  EXPECT_EQ(first_bad_id(std::vector<std::int64_t>{0, kMax - 1, kMax}, (std::uint64_t{1} << 63) - 1, pool), 2U);
}

TEST(FirstBadId, FindsTheSmallestPositionOfSeveral) {
  for (const unsigned threads : {1U, 2U, 7U}) {
    ThreadPool pool(threads);
    std::vector<std::int64_t> ids(300001, 7);
    EXPECT_EQ(first_bad_id(ids, 8, pool), std::nullopt);
    for (const std::uint64_t position : {300000U, 299999U, 200000U, 65537U, 65536U, 16384U, 513U, 512U, 511U, 1U, 0U}) {
      ids[position] = position % 2 == 0 ? -5 : 8;  // later ones stay bad
      for (int round = 0; round < 20; ++round) ASSERT_EQ(first_bad_id(ids, 8, pool), position) << threads;
    }
  }
}

}  // namespace
}  // namespace embermap
