// Checking, sorting and grouping the ids of a batch on the GPU.
#include <algorithm>
#include <limits>
#include <map>

#include "base/error.hpp"
#include "kernels/batch.hpp"
#include "tests/kernels/cuda_test_support.hpp"

namespace embermap::test {
namespace {

enum class Ids { kAny, kManyDuplicates, kAllEqual, kAscending, kDescending };

std::vector<std::int64_t> make_ids(Ids kind, std::uint64_t count, std::uint64_t rows, Random& random) {
  const std::uint64_t few = std::min<std::uint64_t>(rows, count / 8 + 1);
  switch (kind) {
    case Ids::kAny: return random_ids(random, count, rows);
    case Ids::kManyDuplicates: return random_ids(random, count, few);
    case Ids::kAllEqual: return std::vector<std::int64_t>(count, static_cast<std::int64_t>(rows - 1));
    case Ids::kAscending:
    case Ids::kDescending: {
      std::vector<std::int64_t> ids(count);
      for (std::uint64_t i = 0; i < count; ++i)
        ids[i] = static_cast<std::int64_t>(kind == Ids::kAscending ? i % rows : rows - 1 - i % rows);
      return ids;
    }
  }
  return {};
}

void expect_pages(const CudaBatch& batch, std::vector<std::int64_t> ids, std::uint64_t rows_per_page) {
  EXPECT_EQ(batch.count, ids.size());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  EXPECT_EQ(batch.distinct, ids.size());
  std::vector<std::uint64_t> pages;
  std::vector<std::uint64_t> starts;
  for (std::uint64_t u = 0; u < ids.size(); ++u) {
    const std::uint64_t page = static_cast<std::uint64_t>(ids[u]) / rows_per_page;
    if (!pages.empty() && pages.back() == page) continue;
    pages.push_back(page);
    starts.push_back(u);
  }
  starts.push_back(ids.size());
  EXPECT_TRUE(batch.pages == pages) << batch.pages.size() << " pages, not " << pages.size();
  EXPECT_TRUE(batch.page_starts == starts);
}

class CudaGroupCount : public GpuTest, public testing::WithParamInterface<std::uint64_t> {};

// Tables with 32-bit keys, with exactly 2^32 rows, and with 64-bit keys; one row a page gives the distinct ids themselves.
TEST_P(CudaGroupCount, PagesAndTheirFirstRowsAreThoseOfSortedIds) {
  const std::uint64_t count = GetParam();
  Random random(count);
  for (const std::uint64_t rows : Values{std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1000}, std::uint64_t{1} << 32,
                                         (std::uint64_t{1} << 32) + 1, std::uint64_t{1} << 40, std::uint64_t{1} << 63})
    for (const Ids kind : {Ids::kAny, Ids::kManyDuplicates, Ids::kAllEqual, Ids::kAscending, Ids::kDescending})
      for (const std::uint64_t rows_per_page : Values{std::uint64_t{1}, std::uint64_t{7}, std::uint64_t{4096}}) {
        if (count > 100'000 && rows_per_page == 7 && kind != Ids::kAny) continue;
        SCOPED_TRACE(testing::Message() << count << " ids of kind " << static_cast<int>(kind) << ", " << rows << " rows, "
                                        << rows_per_page << " a page");
        const std::vector<std::int64_t> ids = make_ids(kind, count, rows, random);
        const DeviceArray<std::int64_t> device(ids);
        const auto batch = engine->make_batch(device.data(), count, rows, rows_per_page, "t", stream);
        expect_pages(*batch, ids, rows_per_page);
      }
}

// A record holds its own id: what comes out at position i tells whether the inverse is right. What the last position wrote tells
// about the groups' order.
TEST_P(CudaGroupCount, PositionsOfEachIdAreFoundInOrder) {
  const std::uint64_t count = GetParam();
  Random random(count + 1);
  const std::uint64_t rows = count / 2 + 1;
  SlabTable table(random, {.rows = rows, .rows_per_page = 8, .stride = 8});
  for (std::uint64_t row = 0; row < rows; ++row) std::memcpy(table.record(static_cast<std::int64_t>(row)), &row, sizeof row);
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  for (const Ids kind : {Ids::kAny, Ids::kManyDuplicates, Ids::kAllEqual}) {
    const std::vector<std::int64_t> ids = make_ids(kind, count, rows, random);
    const DeviceArray<std::int64_t> device(ids);
    const auto batch = engine->make_batch(device.data(), count, rows, 8, "t", stream);
    fetch_all(*engine, *batch, table, true, 0, 8, pool, stream);
    const DeviceArray<std::int64_t> out(count);
    engine->expand(*batch, reinterpret_cast<std::byte*>(out.data()), stream);
    engine->wait(stream);
    EXPECT_TRUE(out.host() == ids);

    std::vector<std::uint64_t> positions(count);
    std::iota(positions.begin(), positions.end(), std::uint64_t{0});
    const DeviceArray<std::uint64_t> in(positions);
    engine->assign(*batch, reinterpret_cast<const std::byte*>(in.data()), stream);
    write_back_all(*engine, *batch, table, true, pool, stream);
    engine->wait(stream);
    std::map<std::int64_t, std::uint64_t> last;
    for (std::uint64_t i = 0; i < count; ++i) last[ids[i]] = i;
    std::uint64_t wrong = 0;
    for (const auto& [id, position] : last) {
      std::uint64_t value = 0;
      std::memcpy(&value, table.record(id), sizeof value);
      wrong += value != position;
      const auto row = static_cast<std::uint64_t>(id);
      std::memcpy(table.record(id), &row, sizeof row);
    }
    EXPECT_EQ(wrong, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Edges, CudaGroupCount,
                         testing::Values(0, 1, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049, 4096, 4097, 8192, 8193, 16385, 32769,
                                         65536, 65537, 131072, 131073, 1'000'003));

class CudaGroup : public GpuTest {};

TEST_F(CudaGroup, FirstBadIdIsNamedAndTheEngineGoesOnWorking) {
  constexpr std::uint64_t kRows = 1000;
  Random random(3);
  const std::vector<std::int64_t> good = random_ids(random, 1000, kRows);
  for (const std::int64_t bad :
       {std::int64_t{-1}, static_cast<std::int64_t>(kRows), std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::min(),
        std::numeric_limits<std::int64_t>::max(), (std::int64_t{1} << 32) + 5})
    for (const std::uint64_t position : Values{0, 1, 500, 999}) {
      std::vector<std::int64_t> ids = good;
      ids[position] = bad;
      for (std::uint64_t later = position + 7; later < ids.size(); later += 31) ids[later] = -static_cast<std::int64_t>(later);
      const DeviceArray<std::int64_t> device(ids);
      try {
        (void)engine->make_batch(device.data(), ids.size(), kRows, 16, "items", stream);
        FAIL() << "id " << bad << " was taken";
      } catch (const RowIdError& error) {
        EXPECT_EQ(error.id(), bad);
        EXPECT_EQ(error.position(), position);
        EXPECT_NE(std::string(error.what()).find("items"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("1000"), std::string::npos) << error.what();
      }
      EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    }
  const DeviceArray<std::int64_t> device(good);
  expect_pages(*engine->make_batch(device.data(), good.size(), kRows, 16, "items", stream), good, 16);
}

TEST_F(CudaGroup, AllIdsBadInATableWithOneRowOrNone) {
  Random random(4);
  for (const std::uint64_t rows : Values{std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 40) + 1}) {
    std::vector<std::int64_t> ids(70'000);
    for (std::uint64_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(rows + i);
    const DeviceArray<std::int64_t> device(ids);
    try {
      (void)engine->make_batch(device.data(), ids.size(), rows, 4, "t", stream);
      FAIL();
    } catch (const RowIdError& error) {
      EXPECT_EQ(error.position(), 0U);
      EXPECT_EQ(error.id(), static_cast<std::int64_t>(rows));
    }
  }
}

TEST_F(CudaGroup, EmptyBatchHasNoPagesAndEveryCallDoesNothing) {
  const auto batch = engine->make_batch(nullptr, 0, 10, 4, "t", stream);
  EXPECT_EQ(batch->count, 0U);
  EXPECT_EQ(batch->distinct, 0U);
  EXPECT_TRUE(batch->pages.empty());
  EXPECT_EQ(batch->page_starts, std::vector<std::uint64_t>{0});
  engine->fetch(*batch, {}, 0, {}, 0, 16, pool, stream);
  engine->expand(*batch, nullptr, stream);
  engine->assign(*batch, nullptr, stream);
  engine->add(*batch, 4, DType::kFloat32, nullptr, stream);
  engine->step(*batch, {.dim = 4, .stride = 16, .dtype = DType::kFloat32}, {.lr = 0.1}, nullptr, DType::kFloat32, stream);
  engine->write_back(*batch, {}, 0, {}, pool, stream);
  engine->wait(stream);
}

TEST_F(CudaGroup, TooManyIdsAreRefusedBeforeTheyAreRead) {
  try {
    (void)engine->make_batch(reinterpret_cast<const std::int64_t*>(64), kMaxBatch + 1, 10, 4, "t", stream);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("4294967295"), std::string::npos) << error.what();
  }
}

TEST_F(CudaGroup, AddressesOutsideTheDeviceAreRefusedAndLeaveItUsable) {
  std::vector<std::int64_t> ids = {3, 1, 2};
  EXPECT_THROW((void)engine->make_batch(nullptr, 3, 10, 4, "t", stream), InvalidArgument);
  int pageable = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0));
  if (pageable == 0) {
    EXPECT_THROW((void)engine->make_batch(ids.data(), 3, 10, 4, "t", stream), InvalidArgument);
  }
  const DeviceArray<std::int64_t> device(ids);
  const auto* const between = reinterpret_cast<const std::int64_t*>(reinterpret_cast<const std::byte*>(device.data()) + 4);
  EXPECT_THROW((void)engine->make_batch(between, 2, 10, 4, "t", stream), InvalidArgument);
  EXPECT_THROW((void)engine->begin_batch(between, 2, 10, 4, "t", stream), InvalidArgument);
  const auto batch = engine->make_batch(device.data(), 3, 10, 4, "t", stream);
  expect_pages(*batch, ids, 4);
  engine->reserve(*batch, 0, 8, stream);
  EXPECT_THROW(engine->expand(*batch, nullptr, stream), InvalidArgument);
  engine->wait(stream);
}

// The pages of a batch come back in one copy sized by the batches before; here the guess is too small, then too large.
TEST_F(CudaGroup, BatchesOfVeryDifferentSizesFollowOneAnother) {
  Random random(5);
  for (const std::uint64_t count : Values{10, 200'000, 3, 1'200'000, 1, 70'000}) {
    const std::vector<std::int64_t> ids = random_ids(random, count, std::uint64_t{1} << 36);
    const DeviceArray<std::int64_t> device(ids);
    expect_pages(*engine->make_batch(device.data(), count, std::uint64_t{1} << 36, 3, "t", stream), ids, 3);
  }
}

}  // namespace
}  // namespace embermap::test
