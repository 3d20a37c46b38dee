// Rows between frames, working set and the caller's arrays: every width, alignment and page size, with and without a registered
// slab.
#include <map>
#include <set>

#include "base/error.hpp"
#include "tests/kernels/cuda_test_support.hpp"

namespace embermap::test {
namespace {

struct Case {
  TableShape shape;
  std::uint64_t count;
  std::uint64_t offset, bytes;      // the slice of each record that moves
  std::uint64_t caller_offset = 0;  // of the caller's array in its memory
  std::uint64_t passes = 1;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.count << " of " << c.shape.rows << " rows, " << c.shape.rows_per_page << " a page, stride " << c.shape.stride
             << ", page padding " << c.shape.page_padding << ", slab at " << c.shape.slab_offset << ", bytes [" << c.offset
             << ", +" << c.bytes << "), caller at " << c.caller_offset << ", " << c.passes << " passes";
}

class CudaRows : public GpuTest {
 protected:
  // fetch + expand gives the rows; assign + write_back changes the slices of the batch's rows, last position winning, and nothing
  // else.
  void check(const Case& c, Random& random) {
    SlabTable table(random, c.shape);
    const std::vector<std::int64_t> ids = random_ids(random, c.count, c.shape.rows);
    const DeviceArray<std::int64_t> device(ids);
    for (const bool registered : {true, false}) {
      SCOPED_TRACE(testing::Message() << c << (registered ? ", registered" : ", not registered"));
      PinnedRange pinned;
      if (registered) {
        pinned = PinnedRange(table.slab(), table.bytes());
        ASSERT_TRUE(pinned.registered()) << pinned.error();
      }
      const auto batch = engine->make_batch(device.data(), c.count, c.shape.rows, c.shape.rows_per_page, "t", stream);
      fetch_all(*engine, *batch, table, registered, c.offset, c.bytes, pool, stream, c.passes);
      const DeviceArray<std::byte> caller(c.count * c.bytes + c.caller_offset + 64);
      must(cudaMemset(caller.data(), 0xA5, c.count * c.bytes + c.caller_offset + 64), "cudaMemset");
      must(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // the test's stream does not wait for the null stream
      engine->expand(*batch, caller.data() + c.caller_offset, stream);
      engine->wait(stream);
      std::vector<std::byte> expected(c.caller_offset, std::byte{0xA5});
      for (const std::int64_t id : ids) {
        const std::byte* const from = table.record(id) + c.offset;
        expected.insert(expected.end(), from, from + c.bytes);
      }
      expected.insert(expected.end(), 64, std::byte{0xA5});
      ASSERT_EQ(first_difference(caller.host(), expected), -1);

      const std::vector<std::byte> rows = random_bytes(random, c.caller_offset + c.count * c.bytes);
      const DeviceArray<std::byte> in(rows);
      std::vector<std::byte> slab = table.content();
      for (std::uint64_t i = 0; i < c.count; ++i)
        std::memcpy(slab.data() + table.record_offset(ids[i]) + c.offset, rows.data() + c.caller_offset + i * c.bytes, c.bytes);
      const auto writing = engine->make_batch(device.data(), c.count, c.shape.rows, c.shape.rows_per_page, "t", stream);
      engine->reserve(*writing, c.offset, c.bytes, stream);
      engine->assign(*writing, in.data() + c.caller_offset, stream);
      write_back_all(*engine, *writing, table, registered, pool, stream, c.passes);
      engine->wait(stream);
      ASSERT_EQ(first_difference(table.content(), slab), -1);
    }
  }
};

TEST_F(CudaRows, AllWidthsOfAllItemSizes) {
  Random random(1);
  for (const std::uint64_t dim : Values{1, 2, 3, 5, 7, 17, 31, 32, 33, 64, 100, 128, 257, 300, 301, 1025})
    for (const std::uint64_t item : Values{1, 2, 4, 8}) {
      const std::uint64_t bytes = dim * item;
      check({.shape = {.rows = 200, .rows_per_page = 7, .stride = bytes}, .count = 333, .offset = 0, .bytes = bytes}, random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaRows, PagesOfOneRowUpToManyInSeveralPasses) {
  Random random(2);
  for (const std::uint64_t rows_per_page : Values{1, 7, 8, 4096})
    for (const std::uint64_t passes : Values{1, 2, 5}) {
      check({.shape = {.rows = 10'000, .rows_per_page = rows_per_page, .stride = 48},
             .count = 5000,
             .offset = 0,
             .bytes = 48,
             .passes = passes},
            random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaRows, SlicesOfRecordsAtEveryAlignment) {
  Random random(3);
  for (const std::uint64_t stride : Values{512, 1600, 1216, 1208, 1204, 1202, 1201})
    for (const std::uint64_t offset : Values{0, 1, 2, 4, 8, 16, 64, 128})
      for (const std::uint64_t bytes : Values{512, 1024, 400, 36, 6, 1}) {
        if (offset + bytes > stride) continue;
        check({.shape = {.rows = 300, .rows_per_page = 5, .stride = stride, .page_padding = stride % 3 * 8},
               .count = 200,
               .offset = offset,
               .bytes = bytes},
              random);
        if (HasFatalFailure()) return;
      }
}

TEST_F(CudaRows, SlabAndCallersArrayAtOddAddresses) {
  Random random(4);
  for (const std::uint64_t slab_offset : Values{0, 1, 2, 4, 8, 64, 96})
    for (const std::uint64_t caller_offset : Values{0, 1, 2, 4, 8, 20}) {
      check({.shape = {.rows = 100, .rows_per_page = 8, .stride = 512, .slab_offset = slab_offset},
             .count = 150,
             .offset = 0,
             .bytes = 512,
             .caller_offset = caller_offset},
            random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaRows, VeryWideRows) {
  Random random(5);
  for (const std::uint64_t bytes : Values{1919, 1920, 1921, 4096, 65535, 65536, 65537, 100'000, 800'000, 9'000'001}) {
    check({.shape = {.rows = 4, .rows_per_page = 2, .stride = bytes}, .count = 3, .offset = 0, .bytes = bytes}, random);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaRows, CountsAroundWarpsBlocksAndGrids) {
  Random random(6);
  for (const std::uint64_t count : Values{1, 31, 32, 33, 255, 256, 257, 65'535, 65'536, 70'000}) {
    check({.shape = {.rows = 20'000, .rows_per_page = 16, .stride = 32}, .count = count, .offset = 16, .bytes = 16}, random);
    if (HasFatalFailure()) return;
  }
  // Several host staging pieces where the slab is not registered.
  check({.shape = {.rows = 90'000, .rows_per_page = 16, .stride = 512}, .count = 90'000, .offset = 0, .bytes = 512}, random);
}

TEST_F(CudaRows, LastOfAHundredThousandPositionsWins) {
  Random random(7);
  SlabTable table(random, {.rows = 3, .rows_per_page = 2, .stride = 12});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::int64_t> ids(100'000, 2);
  const DeviceArray<std::int64_t> device(ids);
  for (int repetition = 0; repetition < 20; ++repetition) {
    const std::vector<std::byte> rows = random_bytes(random, ids.size() * 12);
    const DeviceArray<std::byte> in(rows);
    const auto batch = engine->make_batch(device.data(), ids.size(), 3, 2, "t", stream);
    EXPECT_EQ(batch->distinct, 1U);
    engine->reserve(*batch, 0, 12, stream);
    engine->assign(*batch, in.data(), stream);
    write_back_all(*engine, *batch, table, true, pool, stream);
    engine->wait(stream);
    EXPECT_EQ(std::memcmp(table.record(2), rows.data() + (ids.size() - 1) * 12, 12), 0);
  }
}

TEST_F(CudaRows, WritesSeenByTheNextFetchOnTheStream) {
  Random random(8);
  SlabTable table(random, {.rows = 1000, .rows_per_page = 8, .stride = 64});
  for (const bool registered : {true, false}) {
    PinnedRange pinned;
    if (registered) pinned = PinnedRange(table.slab(), table.bytes());
    const std::vector<std::int64_t> ids = random_ids(random, 5000, 1000);
    const DeviceArray<std::int64_t> device(ids);
    const DeviceArray<std::byte> out(ids.size() * 64);
    for (int round = 0; round < 20; ++round) {  // no wait between write_back and fetch
      const std::vector<std::byte> rows(ids.size() * 64, static_cast<std::byte>(round));
      const DeviceArray<std::byte> in(rows);
      const auto writing = engine->make_batch(device.data(), ids.size(), 1000, 8, "t", stream);
      engine->reserve(*writing, 0, 64, stream);
      engine->assign(*writing, in.data(), stream);
      write_back_all(*engine, *writing, table, registered, pool, stream);
      const auto reading = engine->make_batch(device.data(), ids.size(), 1000, 8, "t", stream);
      fetch_all(*engine, *reading, table, registered, 0, 64, pool, stream);
      engine->expand(*reading, out.data(), stream);
      engine->wait(stream);
      ASSERT_EQ(first_difference(out.host(), rows), -1);
    }
  }
}

TEST_F(CudaRows, WrongArgumentsAreNamedAndChangeNothing) {
  Random random(9);
  SlabTable table(random, {.rows = 100, .rows_per_page = 4, .stride = 32});
  const std::vector<std::byte> before = table.content();
  const std::vector<std::int64_t> ids = {5, 50, 99};
  const DeviceArray<std::int64_t> device(ids);
  const auto batch = engine->make_batch(device.data(), 3, 100, 4, "t", stream);
  const std::vector<std::uint32_t> frames = table.frames(*batch);
  const FrameSource source = table.source(false);
  const DeviceArray<std::byte> rows(3 * 32);
  const auto fetch = [&](const FrameSource& from, std::uint64_t first, std::uint64_t offset, std::uint64_t bytes) {
    engine->fetch(*batch, from, first, frames, offset, bytes, pool, stream);
  };
  EXPECT_THROW(engine->expand(*batch, rows.data(), stream), InvalidArgument);  // nothing fetched
  EXPECT_THROW(engine->write_back(*batch, source, 0, frames, pool, stream), InvalidArgument);
  EXPECT_THROW(fetch(source, 1, 0, 32), InvalidArgument);  // more pages than there are
  EXPECT_THROW(fetch(source, ~std::uint64_t{0}, 0, 32), InvalidArgument);
  EXPECT_THROW(fetch(source, 0, 16, 32), InvalidArgument);  // beyond the record
  EXPECT_THROW(fetch(source, 0, ~std::uint64_t{0}, 32), InvalidArgument);
  EXPECT_THROW(fetch(source, 0, 0, 0), InvalidArgument);
  FrameSource wrong = source;
  wrong.rows_per_page = 8;
  EXPECT_THROW(fetch(wrong, 0, 0, 32), InvalidArgument);
  wrong = source;
  wrong.page_bytes = 100;
  EXPECT_THROW(fetch(wrong, 0, 0, 32), InvalidArgument);
  fetch(source, 0, 0, 16);
  EXPECT_THROW(fetch(source, 0, 0, 32), InvalidArgument);  // another slice than before
  EXPECT_THROW(engine->add(*batch, 8, DType::kFloat32, rows.data(), stream), InvalidArgument);
  EXPECT_THROW(engine->step(*batch, {.dim = 4, .stride = 32, .dtype = DType::kInt32}, {}, rows.data(), DType::kInt32, stream),
               DTypeError);
  EXPECT_THROW(engine->step(*batch, {.dim = 4, .stride = 32, .dtype = DType::kFloat32}, {}, rows.data(), DType::kFloat64, stream),
               DTypeError);
  EXPECT_THROW(engine->step(*batch, {.dim = 8, .stride = 32, .dtype = DType::kFloat32}, {}, rows.data(), DType::kFloat32, stream),
               InvalidArgument);
  engine->wait(stream);
  EXPECT_EQ(first_difference(table.content(), before), -1);
}

}  // namespace
}  // namespace embermap::test
