// Rows moved by a kernel, by threads of the host and by both: every way, forced by what the engine's model is told, gives the
// same bytes.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <ostream>
#include <set>
#include <thread>
#include <unordered_set>

#include "base/error.hpp"
#include "tests/kernels/cuda_test_support.hpp"

namespace embermap {

std::ostream& operator<<(std::ostream& out, const MoverWay& way) {
  return out << way.blocks << " blocks of " << way.block_threads << " and " << way.host_threads << " host threads";
}

}  // namespace embermap

namespace embermap::test {
namespace {

constexpr std::uint64_t kChunk = 2 << 20;  // wider rows are moved by a kernel alone
constexpr double kShare = 0.7;             // of rows that threads are said to have moved

enum class Ids { kUniform, kDistinct, kSorted, kAllEqual, kZipf };

std::vector<std::int64_t> make_ids(Ids kind, std::uint64_t count, std::uint64_t rows, Random& random) {
  std::vector<std::int64_t> ids(count);
  switch (kind) {
    case Ids::kUniform: return random_ids(random, count, rows);
    case Ids::kDistinct:
    case Ids::kSorted: {  // each once, as long as there are enough
      std::vector<std::int64_t> all(rows);
      std::iota(all.begin(), all.end(), std::int64_t{0});
      std::shuffle(all.begin(), all.end(), random);
      for (std::uint64_t i = 0; i < count; ++i) ids[i] = all[i % rows];
      if (kind == Ids::kSorted) std::sort(ids.begin(), ids.end());
      return ids;
    }
    case Ids::kAllEqual: std::fill(ids.begin(), ids.end(), static_cast<std::int64_t>(rows - 1)); return ids;
    case Ids::kZipf: {
      std::uniform_real_distribution<double> draw(0, 1);
      for (std::int64_t& id : ids)
        id = static_cast<std::int64_t>(std::pow(static_cast<double>(rows), draw(random)) - 1) % static_cast<std::int64_t>(rows);
      return ids;
    }
  }
  return ids;
}

std::vector<std::int64_t> distinct_of(std::span<const std::int64_t> ids) {
  std::vector<std::int64_t> out(ids.begin(), ids.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// Page p lies in frame p.
class WholeTable {
 public:
  WholeTable(Random& random, const TableShape& shape)
      : shape_{shape},
        page_bytes_{shape.rows_per_page * shape.stride + shape.page_padding},
        bytes_{ceil_div(shape.rows, shape.rows_per_page) * page_bytes_} {
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(bytes_ + shape.slab_offset + 64, 4096))));
    const std::vector<std::byte> content = random_bytes(random, bytes_);
    std::memcpy(slab(), content.data(), content.size());
  }

  const TableShape& shape() const { return shape_; }
  std::byte* slab() const { return memory_.get() + shape_.slab_offset; }
  std::uint64_t bytes() const { return bytes_; }
  std::vector<std::byte> content() const { return {slab(), slab() + bytes_}; }
  std::uint64_t record_offset(std::int64_t id) const {
    const auto row = static_cast<std::uint64_t>(id);
    return row / shape_.rows_per_page * page_bytes_ + row % shape_.rows_per_page * shape_.stride;
  }
  FrameSource source(bool registered) const {
    return {.slab = slab(),
            .registered = registered,
            .page_bytes = page_bytes_,
            .rows_per_page = shape_.rows_per_page,
            .stride = shape_.stride,
            .whole = true,
            .slab_bytes = bytes_};
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  TableShape shape_;
  std::uint64_t page_bytes_;
  std::uint64_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

// The slices of `ids` in `slab`, one behind the other.
template <class Table>
std::vector<std::byte> rows_of(const Table& table, std::span<const std::byte> slab, std::span<const std::int64_t> ids,
                               std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::byte> out(ids.size() * bytes);
  for (std::uint64_t i = 0; i < ids.size(); ++i)
    std::memcpy(out.data() + i * bytes, slab.data() + table.record_offset(ids[i]) + offset, bytes);
  return out;
}

// What scattering `rows` makes of `slab`: the last position of an id wins.
template <class Table>
void put_rows(const Table& table, std::span<std::byte> slab, std::span<const std::int64_t> ids, std::uint64_t offset,
              std::uint64_t bytes, std::span<const std::byte> rows) {
  for (std::uint64_t i = 0; i < ids.size(); ++i)
    std::memcpy(slab.data() + table.record_offset(ids[i]) + offset, rows.data() + i * bytes, bytes);
}

struct Slice {
  std::uint64_t offset = 0, bytes = 0;
};

class CudaMove : public GpuTest {
 protected:
  // All batches of `threads` threads go this way.
  void force(const MoverWay& way, unsigned threads, double share = kShare) {
    engine->model().clear();
    std::vector<MoverMeasurement> measured;
    for (const bool fetch : {true, false})
      measured.push_back({.of = {.fetch = fetch, .rows = 10'000, .row_bytes = 512, .pool_bytes = 1 << 30, .threads = threads},
                          .rates = {{way, 1e9, share}}});
    engine->model().add(measured);
  }

  // Calls `body` with each way that there is for so many threads.
  void each_way(ThreadPool& threads, const std::function<void()>& body) {
    for (const MoverWay& way : mover_ways(threads.threads())) {
      SCOPED_TRACE(testing::Message() << way << " of " << threads.threads());
      force(way, threads.threads());
      way_ = way;
      body();
      if (HasFatalFailure()) return;
    }
  }

  // How many rows each mover had, for one call that moved `rows` of so many bytes.
  void expect_moved(const Moved& moved, std::uint64_t rows, std::uint64_t bytes, std::uint64_t calls = 1) const {
    EXPECT_EQ(moved.kernel_rows + moved.thread_rows, rows);
    EXPECT_EQ(moved.pageable_rows, 0U);
    EXPECT_EQ(moved.bytes, rows * bytes);
    EXPECT_EQ(moved.batches, calls);
    if (way_.host_threads == 0 || bytes > kChunk) {
      EXPECT_EQ(moved.thread_rows, 0U);
    } else if (way_.blocks == 0) {
      EXPECT_EQ(moved.kernel_rows, 0U);
    }
  }

  // out[i] = row ids[i], by gather(); nothing behind `out` is touched.
  void check_gather(const WholeTable& table, std::span<const std::byte> content, const std::vector<std::int64_t>& ids,
                    const DeviceArray<std::int64_t>& device, const Slice& slice, ThreadPool& threads) {
    const std::uint64_t length = ids.size() * slice.bytes;
    const DeviceArray<std::byte> out(length + 64);
    must(cudaMemset(out.data(), 0xA5, length + 64), "cudaMemset");
    must(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    const auto batch = engine->gather(device.data(), ids.size(), table.shape().rows, "t", table.source(true), slice.offset,
                                      slice.bytes, out.data(), threads, stream);
    engine->wait(stream);
    std::vector<std::byte> expected = rows_of(table, content, ids, slice.offset, slice.bytes);
    expected.insert(expected.end(), 64, std::byte{0xA5});
    ASSERT_EQ(first_difference(out.host(), expected), -1);

    const Moved moved = engine->moved(*batch);
    const std::uint64_t rows = moved.kernel_rows + moved.thread_rows;
    EXPECT_EQ(moved.bytes, rows * slice.bytes);
    EXPECT_EQ(moved.batches, ids.empty() ? 0U : 1U);
    EXPECT_EQ(moved.pageable_rows, 0U);
    EXPECT_LE(rows, ids.size());
    EXPECT_GE(rows, distinct_of(ids).size());
    std::unordered_set<std::uint64_t> pages;
    for (const std::int64_t id : ids) pages.insert(static_cast<std::uint64_t>(id) / table.shape().rows_per_page);
    EXPECT_EQ(engine->pages_used(*batch), pages.size());
  }

  // Every call on a table whose pages have frames of their own number.
  void check_whole(WholeTable& table, const std::vector<std::int64_t>& ids, const Slice& slice, ThreadPool& threads,
                   Random& random) {
    const TableShape& shape = table.shape();
    const FrameSource source = table.source(true);
    const DeviceArray<std::int64_t> device(ids);
    const std::uint64_t distinct = distinct_of(ids).size();
    std::vector<std::byte> content = table.content();
    const auto begin = [&] {
      return engine->begin_batch(device.data(), ids.size(), shape.rows, shape.rows_per_page, "t", stream);
    };

    const std::vector<std::byte> rows = random_bytes(random, ids.size() * slice.bytes);
    const DeviceArray<std::byte> in(rows);
    const DeviceArray<std::byte> out(ids.size() * slice.bytes);
    {
      // Rows come, others go back, and nothing waits in between.
      const auto batch = begin();
      int calls = 0;
      const auto meanwhile = [&] { ++calls; };
      engine->fetch(*batch, source, 0, {}, slice.offset, slice.bytes, threads, stream, meanwhile);
      engine->expand(*batch, out.data(), stream);
      engine->assign(*batch, in.data(), stream);
      engine->write_back(*batch, source, 0, {}, threads, stream, meanwhile);
      engine->wait(stream);
      EXPECT_EQ(calls, ids.empty() ? 0 : 2);
      ASSERT_EQ(first_difference(out.host(), rows_of(table, content, ids, slice.offset, slice.bytes)), -1) << "fetched";
      put_rows(table, content, ids, slice.offset, slice.bytes, rows);
      ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1) << "written back";
      if (!ids.empty()) expect_moved(engine->moved(*batch), 2 * distinct, slice.bytes, 2);
      const HostKeys keys = engine->keys(*batch);
      ASSERT_EQ(keys.count, distinct);
      const std::vector<std::int64_t> ascending = distinct_of(ids);
      for (std::uint64_t i = 0; i < keys.count; ++i) ASSERT_EQ(keys[i], static_cast<std::uint64_t>(ascending[i]));
    }
    // The second time threads may begin before the ids are sorted.
    for (int i = 0; i < 2; ++i) check_gather(table, content, ids, device, slice, threads);
    {
      const std::vector<std::byte> other = random_bytes(random, ids.size() * slice.bytes);
      const DeviceArray<std::byte> from(other);
      const auto batch = begin();
      engine->write_back_last(*batch, source, slice.offset, slice.bytes, from.data(), threads, stream, {});
      engine->wait(stream);
      put_rows(table, content, ids, slice.offset, slice.bytes, other);
      ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1) << "the last rows written";
      if (!ids.empty()) expect_moved(engine->moved(*batch), distinct, slice.bytes);
    }
  }

  void check_whole(const TableShape& shape, std::uint64_t count, Ids kind, const Slice& slice, ThreadPool& threads,
                   Random& random) {
    SCOPED_TRACE(testing::Message() << count << " ids of kind " << static_cast<int>(kind) << ", " << shape.rows << " rows, "
                                    << shape.rows_per_page << " a page, stride " << shape.stride << ", page padding "
                                    << shape.page_padding << ", slab at " << shape.slab_offset << ", bytes [" << slice.offset
                                    << ", +" << slice.bytes << ")");
    WholeTable table(random, shape);
    const PinnedRange pinned(table.slab(), table.bytes());
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    each_way(threads, [&] { check_whole(table, make_ids(kind, count, shape.rows, random), slice, threads, random); });
  }

  // The same for pages in frames chosen by lot.
  void check_pages(const TableShape& shape, std::uint64_t count, Ids kind, const Slice& slice, std::uint64_t passes,
                   ThreadPool& threads, Random& random) {
    SCOPED_TRACE(testing::Message() << count << " ids of kind " << static_cast<int>(kind) << ", " << shape.rows << " rows, "
                                    << shape.rows_per_page << " a page, bytes [" << slice.offset << ", +" << slice.bytes << "), "
                                    << passes << " passes");
    SlabTable table(random, shape);
    const PinnedRange pinned(table.slab(), table.bytes());
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    each_way(threads, [&] {
      const std::vector<std::int64_t> ids = make_ids(kind, count, shape.rows, random);
      const DeviceArray<std::int64_t> device(ids);
      std::vector<std::byte> content = table.content();
      const std::vector<std::byte> rows = random_bytes(random, count * slice.bytes);
      const DeviceArray<std::byte> in(rows);
      const DeviceArray<std::byte> out(count * slice.bytes);
      const auto batch = engine->make_batch(device.data(), count, shape.rows, shape.rows_per_page, "t", stream);
      fetch_all(*engine, *batch, table, true, slice.offset, slice.bytes, threads, stream, passes);
      engine->expand(*batch, out.data(), stream);
      engine->assign(*batch, in.data(), stream);
      write_back_all(*engine, *batch, table, true, threads, stream, passes);
      engine->wait(stream);
      ASSERT_EQ(first_difference(out.host(), rows_of(table, content, ids, slice.offset, slice.bytes)), -1) << "fetched";
      put_rows(table, content, ids, slice.offset, slice.bytes, rows);
      ASSERT_EQ(first_difference(table.content(), content), -1) << "written back";
      const std::uint64_t pages = batch->pages.size();
      const std::uint64_t calls = pages == 0 ? 0 : ceil_div(pages, ceil_div(pages, passes));
      expect_moved(engine->moved(*batch), 2 * batch->distinct, slice.bytes, 2 * calls);
    });
  }

  MoverWay way_;
};

TEST_F(CudaMove, CountsFromNoneToManyOfAllKinds) {
  Random random(1);
  for (const std::uint64_t count : Values{0, 1, 31, 32, 33, 4096, 4097, 8193, 16'385, 32'769, 65'536, 65'537})
    for (const Ids kind : {Ids::kUniform, Ids::kDistinct, Ids::kSorted, Ids::kAllEqual, Ids::kZipf}) {
      if (count < 4096 && kind != Ids::kUniform && kind != Ids::kDistinct) continue;
      check_whole({.rows = 70'001, .rows_per_page = 8, .stride = 132}, count, kind, {.offset = 0, .bytes = 132}, pool, random);
      if (HasFatalFailure()) return;
    }
  check_whole({.rows = 310'000, .rows_per_page = 64, .stride = 100}, 300'000, Ids::kDistinct, {.offset = 0, .bytes = 100}, pool,
              random);
  if (HasFatalFailure()) return;
  check_whole({.rows = 310'000, .rows_per_page = 64, .stride = 64}, 300'000, Ids::kZipf, {.offset = 0, .bytes = 64}, pool,
              random);
}

TEST_F(CudaMove, RowsFromOneByteToMoreThanAChunk) {
  Random random(2);
  struct Size {
    std::uint64_t bytes, rows, count;
  };
  for (const Size& size : {Size{1, 300'000, 300'000}, Size{4, 100'000, 100'000}, Size{8, 100'000, 70'000},
                           Size{36, 50'000, 60'000}, Size{512, 30'000, 30'000}, Size{1600, 10'000, 12'000},
                           Size{4096, 8'000, 8'000}, Size{65'536, 800, 700}, Size{kChunk, 12, 20}, Size{kChunk + 8, 12, 20}})
    for (const Ids kind : {Ids::kUniform, Ids::kDistinct}) {
      check_whole({.rows = size.rows, .rows_per_page = 3, .stride = size.bytes}, size.count, kind,
                  {.offset = 0, .bytes = size.bytes}, pool, random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaMove, PaddingOddAddressesAndSlicesOfRecords) {
  Random random(3);
  for (const std::uint64_t rows_per_page : Values{1, 7, 64, 1000})
    for (const std::uint64_t page_padding : Values{0, 24, 101})
      for (const std::uint64_t slab_offset : Values{0, 1, 8, 96}) {
        if (rows_per_page != 7 && (page_padding == 101) != (slab_offset == 1)) continue;
        check_whole({.rows = 20'000,
                     .rows_per_page = rows_per_page,
                     .stride = 148,
                     .page_padding = page_padding,
                     .slab_offset = slab_offset},
                    9'000, Ids::kUniform, {.offset = slab_offset == 8 ? 1U : 4U, .bytes = 131}, pool, random);
        if (HasFatalFailure()) return;
      }
  for (const std::uint64_t offset : Values{0, 4, 16, 512})
    for (const std::uint64_t bytes : Values{16, 512, 1024}) {
      check_whole({.rows = 12'000, .rows_per_page = 5, .stride = 1536, .page_padding = 512}, 8'000, Ids::kDistinct,
                  {.offset = offset, .bytes = bytes}, pool, random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaMove, OneThreadAndManyMoveTheSame) {
  Random random(4);
  for (const unsigned threads : {1U, 2U, 16U}) {
    ThreadPool other(threads);
    check_whole({.rows = 60'000, .rows_per_page = 16, .stride = 512}, 50'000, Ids::kUniform, {.offset = 0, .bytes = 512}, other,
                random);
    if (HasFatalFailure()) return;
    check_pages({.rows = 60'000, .rows_per_page = 16, .stride = 512}, 50'000, Ids::kUniform, {.offset = 0, .bytes = 512}, 3,
                other, random);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaMove, PagesInFramesChosenByLotInSeveralPasses) {
  Random random(5);
  for (const std::uint64_t passes : Values{1, 2, 7})
    for (const std::uint64_t count : Values{0, 1, 33, 4097, 65'537}) {
      check_pages({.rows = 70'000, .rows_per_page = 9, .stride = 132, .page_padding = 12}, count, Ids::kUniform,
                  {.offset = 0, .bytes = 132}, passes, pool, random);
      if (HasFatalFailure()) return;
    }
  for (const Ids kind : {Ids::kAllEqual, Ids::kZipf, Ids::kSorted}) {
    check_pages({.rows = 70'000, .rows_per_page = 64, .stride = 260}, 50'000, kind, {.offset = 4, .bytes = 256}, 3, pool, random);
    if (HasFatalFailure()) return;
  }
  for (const std::uint64_t bytes : Values{1, 8, 4096, 65'536, kChunk, kChunk + 8}) {
    const std::uint64_t rows = std::min<std::uint64_t>(50'000, (64 << 20) / bytes);
    check_pages({.rows = rows, .rows_per_page = 3, .stride = bytes}, rows, Ids::kDistinct, {.offset = 0, .bytes = bytes}, 2, pool,
                random);
    if (HasFatalFailure()) return;
  }
}

// A transfer must leave the one before it alone, whose kernel may still be on its way when all threads have done their part.
TEST_F(CudaMove, TransfersFollowOneAnotherWithoutWaiting) {
  Random random(6);
  for (const std::uint64_t bytes : Values{512, 4096, 65'536}) {
    const std::uint64_t rows = (48 << 20) / bytes;
    WholeTable whole(random, {.rows = rows, .rows_per_page = 4, .stride = bytes});
    SlabTable pages(random, {.rows = rows, .rows_per_page = 4, .stride = bytes});
    const PinnedRange first(whole.slab(), whole.bytes());
    const PinnedRange second(pages.slab(), pages.bytes());
    ASSERT_TRUE(first.registered() && second.registered());
    const std::vector<std::int64_t> ids = make_ids(Ids::kDistinct, rows, rows, random);
    const DeviceArray<std::int64_t> device(ids);
    const DeviceArray<std::byte> out(rows * bytes);
    const std::vector<std::byte> whole_rows = rows_of(whole, whole.content(), ids, 0, bytes);
    const std::vector<std::byte> pages_rows = rows_of(pages, pages.content(), ids, 0, bytes);
    each_way(pool, [&] {
      for (int round = 0; round < 2; ++round) {
        const std::vector<std::byte> before = whole.content();
        const auto batch = engine->begin_batch(device.data(), rows, rows, 4, "t", stream);
        engine->fetch(*batch, whole.source(true), 0, {}, 0, bytes, pool, stream);
        engine->write_back(*batch, whole.source(true), 0, {}, pool, stream);  // as they were
        engine->fetch(*batch, whole.source(true), 0, {}, 0, bytes, pool, stream);
        engine->expand(*batch, out.data(), stream);
        engine->wait(stream);
        ASSERT_EQ(first_difference(out.host(), whole_rows), -1) << bytes << " bytes a row";
        ASSERT_EQ(first_difference({whole.slab(), whole.bytes()}, before), -1) << bytes << " bytes a row";

        const auto many = engine->make_batch(device.data(), rows, rows, 4, "t", stream);
        fetch_all(*engine, *many, pages, true, 0, bytes, pool, stream, 6);
        engine->expand(*many, out.data(), stream);
        engine->wait(stream);
        ASSERT_EQ(first_difference(out.host(), pages_rows), -1) << bytes << " bytes a row, in passes";
      }
    });
    if (HasFatalFailure()) return;
  }
}

// A lane goes from batch to batch and from stream to stream, before the streams have passed.
TEST_F(CudaMove, BatchesEndBeforeTheirStreamsHavePassed) {
  Random random(7);
  constexpr std::uint64_t kRows = 3000;
  constexpr std::uint64_t kBytes = 16'384;
  constexpr std::size_t kStreams = 3;
  std::array<cudaStream_t, kStreams> streams{};
  for (cudaStream_t& one : streams) ASSERT_CUDA(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  {
    std::vector<WholeTable> tables;
    std::vector<PinnedRange> pinned;
    std::vector<std::vector<std::int64_t>> ids;
    std::vector<std::vector<std::byte>> expected;
    std::vector<std::unique_ptr<DeviceArray<std::int64_t>>> device;
    std::vector<std::unique_ptr<DeviceArray<std::byte>>> out;
    for (std::size_t i = 0; i < kStreams; ++i) {
      tables.emplace_back(random, TableShape{.rows = kRows, .rows_per_page = 4, .stride = kBytes});
      pinned.emplace_back(tables[i].slab(), tables[i].bytes());
      ASSERT_TRUE(pinned[i].registered()) << pinned[i].error();
      ids.push_back(make_ids(Ids::kDistinct, kRows, kRows, random));
      expected.push_back(rows_of(tables[i], tables[i].content(), ids[i], 0, kBytes));
      device.push_back(std::make_unique<DeviceArray<std::int64_t>>(ids[i]));
      out.push_back(std::make_unique<DeviceArray<std::byte>>(kRows * kBytes));
    }
    each_way(pool, [&] {
      for (int round = 0; round < 10; ++round) {
        for (std::size_t i = 0; i < kStreams; ++i) {
          const CudaStream mine{streams[i]};
          const auto batch = engine->begin_batch(device[i]->data(), kRows, kRows, 4, "t", mine);
          engine->fetch(*batch, tables[i].source(true), 0, {}, 0, kBytes, pool, mine);
          engine->expand(*batch, out[i]->data(), mine);
        }
        for (std::size_t i = 0; i < kStreams; ++i) {
          engine->wait(CudaStream{streams[i]});
          ASSERT_EQ(first_difference(out[i]->host(), expected[i]), -1) << "stream " << i << ", round " << round;
        }
      }
    });
  }
  for (const cudaStream_t one : streams) EXPECT_EQ(cudaStreamDestroy(one), cudaSuccess);
}

// Address space for a table with more rows than 32 bits count, of which only some may be touched: all others are guarded.
class SparseTable {
 public:
  static constexpr std::uint64_t kRowsPerPage = 1000, kStride = 40, kPageBytes = kRowsPerPage * kStride + 64;

  SparseTable(std::uint64_t rows, std::vector<std::uint64_t> pages)
      : rows_{rows}, bytes_{ceil_div(rows, kRowsPerPage) * kPageBytes}, pages_{std::move(pages)} {
    void* const memory = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    slab_ = static_cast<std::byte*>(memory);
    for (const std::uint64_t page : pages_) {
      const auto [begin, end] = window(page);
      if (mprotect(slab_ + begin, end - begin, PROT_READ | PROT_WRITE) != 0) throw std::runtime_error("mprotect");
    }
  }
  ~SparseTable() { munmap(slab_, bytes_); }
  SparseTable(const SparseTable&) = delete;
  SparseTable& operator=(const SparseTable&) = delete;

  // The memory pages around a page of the table, from the slab's beginning.
  std::pair<std::uint64_t, std::uint64_t> window(std::uint64_t page) const {
    return {page * kPageBytes / 4096 * 4096, std::min(round_up((page + 1) * kPageBytes, 4096), round_up(bytes_, 4096))};
  }
  std::vector<PinnedRange> register_all() const {
    std::vector<PinnedRange> out;
    for (const std::uint64_t page : pages_) {
      const auto [begin, end] = window(page);
      out.emplace_back(slab_ + begin, end - begin);
      if (!out.back().registered()) throw std::runtime_error(out.back().error());
    }
    return out;
  }
  std::vector<std::int64_t> ids(Random& random, std::uint64_t count) const {
    std::vector<std::int64_t> out(count);
    for (std::int64_t& id : out) {
      const std::uint64_t first = pages_[random() % pages_.size()] * kRowsPerPage;
      id = static_cast<std::int64_t>(first + random() % std::min(kRowsPerPage, rows_ - first));
    }
    return out;
  }
  std::byte* record(std::int64_t id) const {
    const auto row = static_cast<std::uint64_t>(id);
    return slab_ + row / kRowsPerPage * kPageBytes + row % kRowsPerPage * kStride;
  }
  FrameSource source(bool registered) const {
    return {.slab = slab_,
            .registered = registered,
            .page_bytes = kPageBytes,
            .rows_per_page = kRowsPerPage,
            .stride = kStride,
            .whole = true,
            .slab_bytes = bytes_};
  }
  std::uint64_t rows() const { return rows_; }

 private:
  std::uint64_t rows_, bytes_;
  std::vector<std::uint64_t> pages_;
  std::byte* slab_ = nullptr;
};

TEST_F(CudaMove, MoreRowsThan32BitsCountAndOthersAreNeverTouched) {
  Random random(8);
  constexpr std::uint64_t kRows = (std::uint64_t{1} << 32) + 123'456;
  constexpr std::uint64_t kLast = (kRows - 1) / SparseTable::kRowsPerPage;
  const std::uint64_t at_border = (std::uint64_t{1} << 32) / SparseTable::kRowsPerPage;
  // At least one page between any two, so that no memory page belongs to two of them.
  const SparseTable table(kRows, {0, 2, 77, 2'147'483, at_border - 2, at_border, at_border + 2, kLast - 2, kLast});
  for (const bool registered : {true, false}) {
    const std::vector<PinnedRange> pinned = registered ? table.register_all() : std::vector<PinnedRange>{};
    each_way(pool, [&] {
      for (const std::uint64_t count : Values{33, 4097, 50'000}) {
        const std::vector<std::int64_t> ids = table.ids(random, count);
        const DeviceArray<std::int64_t> device(ids);
        const std::vector<std::byte> rows = random_bytes(random, count * SparseTable::kStride);
        const DeviceArray<std::byte> in(rows);
        const DeviceArray<std::byte> out(rows.size());
        std::map<std::int64_t, std::uint64_t> last;
        for (std::uint64_t i = 0; i < count; ++i) last[ids[i]] = i;
        std::vector<std::byte> expected(rows.size());
        for (std::uint64_t i = 0; i < count; ++i)
          std::memcpy(expected.data() + i * SparseTable::kStride, rows.data() + last[ids[i]] * SparseTable::kStride,
                      SparseTable::kStride);
        const auto writing = engine->begin_batch(device.data(), count, kRows, SparseTable::kRowsPerPage, "t", stream);
        engine->write_back_last(*writing, table.source(registered), 0, SparseTable::kStride, in.data(), pool, stream, {});
        const HostKeys keys = engine->keys(*writing);
        ASSERT_TRUE(keys.wide);
        ASSERT_EQ(keys.count, last.size());
        for (int turn = 0; turn < 2; ++turn) {
          must(cudaMemsetAsync(out.data(), 0, rows.size(), native), "cudaMemsetAsync");
          const auto reading = engine->gather(device.data(), count, kRows, "t", table.source(registered), 0, SparseTable::kStride,
                                              out.data(), pool, stream);
          engine->wait(stream);
          ASSERT_EQ(first_difference(out.host(), expected), -1) << count << " ids";
        }
        for (const auto& [id, position] : last)
          ASSERT_EQ(std::memcmp(table.record(id), rows.data() + position * SparseTable::kStride, SparseTable::kStride), 0) << id;
      }
    });
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaMove, PagesOfATableWithMoreRowsThan32BitsCount) {
  Random random(9);
  constexpr std::uint64_t kRows = std::uint64_t{1} << 40;
  constexpr std::uint64_t kRowsPerPage = 100;
  constexpr std::uint64_t kBytes = 72;
  constexpr std::uint64_t kFrames = 3000;
  std::set<std::uint64_t> pages = {0, (kRows - 1) / kRowsPerPage, (std::uint64_t{1} << 32) / kRowsPerPage};
  while (pages.size() < kFrames) pages.insert(random() % (kRows / kRowsPerPage));
  std::vector<std::uint32_t> lot(kFrames);
  std::iota(lot.begin(), lot.end(), 0U);
  std::shuffle(lot.begin(), lot.end(), random);
  std::map<std::uint64_t, std::uint32_t> frame_of;
  for (const std::uint64_t page : pages) frame_of[page] = lot[frame_of.size()];
  const std::vector<std::uint64_t> some(pages.begin(), pages.end());

  std::vector<std::byte> slab = random_bytes(random, kFrames * kRowsPerPage * kBytes);
  const PinnedRange pinned(slab.data(), slab.size());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const FrameSource source{.slab = slab.data(),
                           .registered = true,
                           .page_bytes = kRowsPerPage * kBytes,
                           .rows_per_page = kRowsPerPage,
                           .stride = kBytes,
                           .slab_bytes = slab.size()};
  const auto record_offset = [&](std::int64_t id) {
    const auto row = static_cast<std::uint64_t>(id);
    return (frame_of.at(row / kRowsPerPage) * kRowsPerPage + row % kRowsPerPage) * kBytes;
  };
  each_way(pool, [&] {
    std::vector<std::int64_t> ids(40'000);
    for (std::int64_t& id : ids)
      id = static_cast<std::int64_t>(std::min(some[random() % kFrames] * kRowsPerPage + random() % kRowsPerPage, kRows - 1));
    const DeviceArray<std::int64_t> device(ids);
    const std::vector<std::byte> rows = random_bytes(random, ids.size() * kBytes);
    const DeviceArray<std::byte> in(rows);
    const DeviceArray<std::byte> out(rows.size());
    const auto batch = engine->make_batch(device.data(), ids.size(), kRows, kRowsPerPage, "t", stream);
    std::vector<std::uint32_t> frames;
    for (const std::uint64_t page : batch->pages) frames.push_back(frame_of.at(page));
    const std::uint64_t half = frames.size() / 2;
    const std::span<const std::uint32_t> all(frames);
    engine->fetch(*batch, source, 0, all.first(half), 0, kBytes, pool, stream);
    engine->fetch(*batch, source, half, all.subspan(half), 0, kBytes, pool, stream);
    engine->expand(*batch, out.data(), stream);
    std::vector<std::byte> expected(rows.size());
    std::vector<std::byte> after = slab;
    for (std::uint64_t i = 0; i < ids.size(); ++i) {
      std::memcpy(expected.data() + i * kBytes, slab.data() + record_offset(ids[i]), kBytes);
      std::memcpy(after.data() + record_offset(ids[i]), rows.data() + i * kBytes, kBytes);
    }
    engine->wait(stream);
    engine->assign(*batch, in.data(), stream);
    engine->write_back(*batch, source, half, all.subspan(half), pool, stream);
    engine->write_back(*batch, source, 0, all.first(half), pool, stream);
    engine->wait(stream);
    ASSERT_EQ(first_difference(out.host(), expected), -1);
    ASSERT_EQ(first_difference(slab, after), -1);
  });
}

// Where recent batches were nearly distinct, threads take the last ids as they are.
TEST_F(CudaMove, GathersBeginEarlyOnceIdsHardlyRepeat) {
  Random random(10);
  WholeTable table(random, {.rows = 40'000, .rows_per_page = 8, .stride = 256});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  const DeviceArray<std::byte> out(30'000 * 256);
  const auto gather = [&](const std::vector<std::int64_t>& ids) {
    const DeviceArray<std::int64_t> device(ids);
    must(cudaMemset(out.data(), 0, ids.size() * 256), "cudaMemset");
    must(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    const auto batch =
        engine->gather(device.data(), ids.size(), 40'000, "t", table.source(true), 0, 256, out.data(), pool, stream);
    engine->wait(stream);
    EXPECT_EQ(first_difference(out.host(0, ids.size() * 256), rows_of(table, content, ids, 0, 256)), -1);
    const Moved moved = engine->moved(*batch);
    return moved.kernel_rows + moved.thread_rows;
  };
  const auto early = [&](const std::vector<std::int64_t>& ids) {
    const auto tail = static_cast<std::uint64_t>(static_cast<double>(ids.size()) * kShare / 2);
    return distinct_of(std::span(ids).first(ids.size() - tail)).size() + tail;
  };
  const std::vector<std::int64_t> repeating = make_ids(Ids::kUniform, 30'000, 2'000, random);
  const std::vector<std::int64_t> distinct = make_ids(Ids::kDistinct, 30'000, 40'000, random);
  each_way(pool, [&] {
    const bool may = way_.host_threads != 0;
    EXPECT_EQ(gather(distinct), 30'000U);
    EXPECT_EQ(gather(repeating), may ? early(repeating) : distinct_of(repeating).size()) << "after distinct ones";
    EXPECT_EQ(gather(repeating), distinct_of(repeating).size()) << "after repeating ones";
    EXPECT_EQ(gather(make_ids(Ids::kAllEqual, 30'000, 40'000, random)), 1U);
    EXPECT_EQ(gather(distinct), 30'000U);
    EXPECT_EQ(gather(make_ids(Ids::kAllEqual, 30'000, 40'000, random)), may ? 1 + 10'500U : 1U);
    // Whatever the share that was measured.
    for (const double share : {0.0, 1e-9, 0.75, 1.0}) {
      force(way_, pool.threads(), share);
      for (int i = 0; i < 2; ++i) EXPECT_EQ(gather(distinct), 30'000U) << "share " << share;
    }
  });
}

// Also once threads would begin early: their rows go to memory of the device only.
TEST_F(CudaMove, RowsAreGatheredToRegisteredMemoryOfTheHost) {
  Random random(22);
  WholeTable table(random, {.rows = 40'000, .rows_per_page = 8, .stride = 256});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  void* memory = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&memory, 30'000 * 256, cudaHostAllocPortable));
  const std::span out(static_cast<std::byte*>(memory), 30'000 * 256);
  each_way(pool, [&] {
    for (int i = 0; i < 3; ++i) {
      const std::vector<std::int64_t> ids = make_ids(Ids::kDistinct, 30'000, 40'000, random);
      const DeviceArray<std::int64_t> device(ids);
      std::fill(out.begin(), out.end(), std::byte{0});
      (void)engine->gather(device.data(), ids.size(), 40'000, "t", table.source(true), 0, 256, out.data(), pool, stream);
      engine->wait(stream);
      ASSERT_EQ(first_difference(out, rows_of(table, content, ids, 0, 256)), -1) << "time " << i;
    }
  });
  EXPECT_EQ(cudaFreeHost(memory), cudaSuccess);
}

TEST_F(CudaMove, BadIdsAreNamedByTheFirstPositionAndNothingIsTouched) {
  Random random(11);
  constexpr std::uint64_t kRows = 40'000;
  WholeTable table(random, {.rows = kRows, .rows_per_page = 8, .stride = 64});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  const DeviceArray<std::byte> out(20'000 * 64);
  each_way(pool, [&] {
    for (const std::uint64_t count : Values{10, 4096, 4097, 9'000, 20'000}) {
      const std::vector<std::int64_t> good = make_ids(Ids::kDistinct, count, kRows, random);
      const DeviceArray<std::int64_t> good_device(good);
      const std::vector<std::byte> untouched(count * 64, std::byte{0xA5});
      for (const std::uint64_t position : {std::uint64_t{0}, count / 2, count - 1})
        for (const std::int64_t bad : {std::int64_t{-1}, static_cast<std::int64_t>(kRows), std::int64_t{1} << 32,
                                       std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()}) {
          // So that the next one may begin early.
          (void)engine->gather(good_device.data(), count, kRows, "t", table.source(true), 0, 64, out.data(), pool, stream);
          std::vector<std::int64_t> ids = good;
          ids[position] = bad;
          if (position + 1 < count) ids[count - 1] = -7;
          const DeviceArray<std::int64_t> device(ids);
          must(cudaMemsetAsync(out.data(), 0xA5, count * 64, native), "cudaMemsetAsync");
          const auto refused = [&](const std::function<void()>& call) {
            try {
              call();
              FAIL() << "id " << bad << " was taken";
            } catch (const RowIdError& error) {
              EXPECT_EQ(error.id(), bad);
              EXPECT_EQ(error.position(), position);
              EXPECT_NE(std::string(error.what()).find("items"), std::string::npos) << error.what();
            }
          };
          refused([&] {
            (void)engine->gather(device.data(), count, kRows, "items", table.source(true), 0, 64, out.data(), pool, stream);
          });
          refused([&] { (void)engine->keys(*engine->begin_batch(device.data(), count, kRows, 8, "items", stream)); });
          for (const bool tells : {false, true})
            refused([&] { engine->check(*engine->begin_batch(device.data(), count, kRows, 8, "items", stream, tells)); });
          {
            // Who does not ask hears of it later, and what was enqueued behind has moved nothing.
            std::shared_ptr<CudaBatch> batch = engine->begin_batch(device.data(), count, kRows, 8, "items", stream, true);
            bool heard = false;  // where threads move rows they have to know
            try {
              engine->fetch(*batch, table.source(true), 0, {}, 0, 64, pool, stream);
            } catch (const RowIdError&) {
              heard = true;
            }
            if (!heard) {
              const auto flight = engine->depart(batch, nullptr, stream);
              EXPECT_EQ(flight->moved().bytes, 0U);
              EXPECT_EQ(flight->pages(), 0U);
            }
            refused([&] { engine->check(*batch); });
            refused([&] { (void)engine->keys(*batch); });
          }
          refused([&] {
            const auto batch = engine->begin_batch(device.data(), count, kRows, 8, "items", stream);
            engine->write_back_last(*batch, table.source(true), 0, 64, out.data(), pool, stream,
                                    [&] { (void)engine->keys(*batch); });
          });
          refused([&] {
            const auto batch = engine->begin_batch(device.data(), count, kRows, 8, "items", stream);
            engine->fetch(*batch, table.source(true), 0, {}, 0, 64, pool, stream);
            (void)engine->moved(*batch);
          });
          engine->wait(stream);
          ASSERT_EQ(first_difference(out.host(0, count * 64), untouched), -1) << count << " ids, bad at " << position;
        }
      check_gather(table, content, good, good_device, {.offset = 0, .bytes = 64}, pool);
      if (HasFatalFailure()) return;
      std::unordered_set<std::int64_t> pages;
      for (const std::int64_t id : good) pages.insert(id / 8);
      for (const bool tells : {false, true}) {
        std::shared_ptr<CudaBatch> batch = engine->begin_batch(good_device.data(), count, kRows, 8, "items", stream, tells);
        engine->fetch(*batch, table.source(true), 0, {}, 0, 64, pool, stream);
        engine->check(*batch);
        const auto flight = engine->depart(batch, nullptr, stream);
        const Moved moved = flight->moved();
        EXPECT_EQ(moved.batches, 1U);
        EXPECT_EQ(moved.kernel_rows + moved.thread_rows, count);
        EXPECT_EQ(moved.bytes, count * 64);
        EXPECT_EQ(flight->pages(), tells ? pages.size() : 0U);
        engine->check(*batch);  // again
        EXPECT_EQ(engine->keys(*batch).count, count);
      }
    }
  });
  EXPECT_EQ(first_difference(table.content(), content), -1);
}

TEST_F(CudaMove, CapturingStreamsAreRefusedByEveryCall) {
  Random random(12);
  WholeTable table(random, {.rows = 10'000, .rows_per_page = 8, .stride = 64});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  const std::vector<std::int64_t> ids = random_ids(random, 9'000, 10'000);
  const DeviceArray<std::int64_t> device(ids);
  const DeviceArray<std::byte> rows(ids.size() * 64);
  const FrameSource source = table.source(true);
  each_way(pool, [&] {
    const auto batch = engine->begin_batch(device.data(), ids.size(), 10'000, 8, "t", stream);
    engine->fetch(*batch, source, 0, {}, 0, 64, pool, stream);
    engine->wait(stream);
    ASSERT_CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal));
    EXPECT_THROW((void)engine->begin_batch(device.data(), ids.size(), 10'000, 8, "t", stream), CudaError);
    EXPECT_THROW((void)engine->gather(device.data(), ids.size(), 10'000, "t", source, 0, 64, rows.data(), pool, stream),
                 CudaError);
    EXPECT_THROW((void)engine->gather(device.data(), 5, 10'000, "t", source, 0, 64, rows.data(), pool, stream), CudaError);
    EXPECT_THROW(engine->fetch(*batch, source, 0, {}, 0, 64, pool, stream), CudaError);
    EXPECT_THROW(engine->write_back(*batch, source, 0, {}, pool, stream), CudaError);
    EXPECT_THROW(engine->write_back_last(*batch, source, 0, 64, rows.data(), pool, stream, {}), CudaError);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(native, &graph), cudaSuccess) << "the capture did not go on";
    if (graph != nullptr) {
      EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    }
    EXPECT_EQ(first_difference(table.content(), content), -1);
    check_gather(table, content, ids, device, {.offset = 0, .bytes = 64}, pool);
  });
}

TEST_F(CudaMove, WrongArgumentsAreNamedAndChangeNothing) {
  Random random(13);
  WholeTable table(random, {.rows = 10'000, .rows_per_page = 8, .stride = 64});
  SlabTable pages(random, {.rows = 10'000, .rows_per_page = 8, .stride = 64});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  const std::vector<std::int64_t> ids = random_ids(random, 5'000, 10'000);
  const DeviceArray<std::int64_t> device(ids);
  const DeviceArray<std::byte> rows(ids.size() * 64);
  const FrameSource source = table.source(true);
  const auto whole = engine->begin_batch(device.data(), ids.size(), 10'000, 8, "t", stream);
  const auto some = engine->make_batch(device.data(), ids.size(), 10'000, 8, "t", stream);
  const std::vector<std::uint32_t> frames = pages.frames(*some);
  EXPECT_THROW(engine->fetch(*whole, pages.source(false), 0, {}, 0, 64, pool, stream), InvalidArgument);
  EXPECT_THROW(engine->fetch(*whole, source, 0, frames, 0, 64, pool, stream), InvalidArgument);
  EXPECT_THROW(engine->fetch(*whole, source, 1, {}, 0, 64, pool, stream), InvalidArgument);
  EXPECT_THROW(engine->fetch(*some, source, 0, frames, 0, 64, pool, stream), InvalidArgument);
  EXPECT_THROW(engine->write_back(*whole, source, 0, {}, pool, stream), InvalidArgument);  // no rows yet
  EXPECT_THROW(engine->write_back_last(*some, source, 0, 64, rows.data(), pool, stream, {}), InvalidArgument);
  EXPECT_THROW(engine->write_back_last(*whole, source, 0, 64, nullptr, pool, stream, {}), InvalidArgument);
  EXPECT_THROW(engine->write_back_last(*whole, source, 60, 8, rows.data(), pool, stream, {}), InvalidArgument);
  EXPECT_THROW((void)engine->keys(*some), InvalidArgument);
  for (const std::uint64_t count : Values{100, 5'000}) {
    const auto gather = [&](const FrameSource& from, std::uint64_t offset, std::uint64_t bytes, std::byte* out) {
      (void)engine->gather(device.data(), count, 10'000, "t", from, offset, bytes, out, pool, stream);
    };
    EXPECT_THROW(gather(source, 0, 0, rows.data()), InvalidArgument);
    EXPECT_THROW(gather(source, 1, 64, rows.data()), InvalidArgument);
    EXPECT_THROW(gather(source, ~std::uint64_t{0}, 64, rows.data()), InvalidArgument);
    EXPECT_THROW(gather(source, 0, ~std::uint64_t{0}, rows.data()), InvalidArgument);
    EXPECT_THROW(gather(source, 0, 64, nullptr), InvalidArgument);
    EXPECT_THROW(gather(pages.source(false), 0, 64, rows.data()), InvalidArgument);
    FrameSource wrong = source;
    wrong.slab = nullptr;
    EXPECT_THROW(gather(wrong, 0, 64, rows.data()), InvalidArgument);
    wrong = source;
    wrong.rows_per_page = 0;
    EXPECT_THROW(gather(wrong, 0, 64, rows.data()), InvalidArgument);
    wrong = source;
    wrong.page_bytes = 100;
    EXPECT_THROW(gather(wrong, 0, 64, rows.data()), InvalidArgument);
    EXPECT_THROW((void)engine->gather(nullptr, count, 10'000, "t", source, 0, 64, rows.data(), pool, stream), InvalidArgument);
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  engine->wait(stream);
  EXPECT_EQ(first_difference(table.content(), content), -1);
  check_gather(table, content, ids, device, {.offset = 0, .bytes = 64}, pool);
}

// More of them than there are lanes: who gets none has a kernel move its rows.
TEST_F(CudaMove, ManyThreadsOnStreamsOfTheirOwn) {
  constexpr std::uint64_t kRows = 20'000;
  constexpr std::uint64_t kBytes = 516;
  for (const MoverWay& way : mover_ways(pool.threads())) {
    force(way, pool.threads());
    std::atomic<int> wrong{0};
    const auto work = [&](std::uint64_t seed) {
      cudaStream_t mine = nullptr;
      must(cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      const CudaStream own{mine};
      {
        Random random(seed);
        WholeTable table(random, {.rows = kRows, .rows_per_page = 8, .stride = kBytes, .page_padding = 8});
        const PinnedRange pinned(table.slab(), table.bytes());
        wrong += !pinned.registered();
        const FrameSource source = table.source(true);
        std::vector<std::byte> content = table.content();
        for (int round = 0; round < 6; ++round) {
          const std::uint64_t count = round == 0 ? 4096 : 4097 + random() % 15'000;
          const std::vector<std::int64_t> ids = make_ids(round % 2 == 0 ? Ids::kDistinct : Ids::kUniform, count, kRows, random);
          const std::vector<std::byte> rows = random_bytes(random, count * kBytes);
          const std::vector<std::byte> other = random_bytes(random, count * kBytes);
          const DeviceArray<std::int64_t> device(ids);
          const DeviceArray<std::byte> in(rows);
          const DeviceArray<std::byte> in_other(other);
          const DeviceArray<std::byte> before(count * kBytes);
          const DeviceArray<std::byte> between(count * kBytes);
          {
            const auto batch = engine->begin_batch(device.data(), count, kRows, 8, "t", own);
            engine->fetch(*batch, source, 0, {}, 0, kBytes, pool, own);
            engine->expand(*batch, before.data(), own);
            engine->assign(*batch, in.data(), own);
            engine->write_back(*batch, source, 0, {}, pool, own);
          }
          (void)engine->gather(device.data(), count, kRows, "t", source, 0, kBytes, between.data(), pool, own);
          const auto last = engine->begin_batch(device.data(), count, kRows, 8, "t", own);
          engine->write_back_last(*last, source, 0, kBytes, in_other.data(), pool, own, {});
          engine->wait(own);
          wrong += first_difference(before.host(), rows_of(table, content, ids, 0, kBytes)) != -1;
          put_rows(table, content, ids, 0, kBytes, rows);
          wrong += first_difference(between.host(), rows_of(table, content, ids, 0, kBytes)) != -1;
          put_rows(table, content, ids, 0, kBytes, other);
          wrong += first_difference({table.slab(), table.bytes()}, content) != -1;
          const Moved moved = engine->moved(*last);
          wrong += moved.kernel_rows + moved.thread_rows != distinct_of(ids).size();
        }
      }
      must(cudaStreamDestroy(mine), "cudaStreamDestroy");
    };
    std::vector<std::thread> threads;
    for (std::uint64_t seed = 0; seed < 7; ++seed) threads.emplace_back(work, seed);
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(wrong.load(), 0) << way;
  }
}

TEST_F(CudaMove, EngineMayEndBeforeItsBatchesAndTheirKernels) {
  Random random(14);
  WholeTable table(random, {.rows = 30'000, .rows_per_page = 8, .stride = 1024});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::byte> content = table.content();
  const std::vector<std::int64_t> ids = make_ids(Ids::kDistinct, 30'000, 30'000, random);
  const DeviceArray<std::int64_t> device(ids);
  const DeviceArray<std::byte> out(ids.size() * 1024);
  for (const MoverWay& way : mover_ways(pool.threads()))
    for (const bool waits : {true, false}) {
      engine = CudaEngine::create(0);
      force(way, pool.threads());
      must(cudaMemsetAsync(out.data(), 0, ids.size() * 1024, native), "cudaMemsetAsync");
      auto fetched = engine->begin_batch(device.data(), ids.size(), 30'000, 8, "t", stream);
      engine->fetch(*fetched, table.source(true), 0, {}, 0, 1024, pool, stream);
      engine->write_back(*fetched, table.source(true), 0, {}, pool, stream);
      auto gathered =
          engine->gather(device.data(), ids.size(), 30'000, "t", table.source(true), 0, 1024, out.data(), pool, stream);
      if (waits) engine->wait(stream);
      engine.reset();
      fetched.reset();
      gathered.reset();
      ASSERT_CUDA(cudaStreamSynchronize(native));
      ASSERT_EQ(first_difference(out.host(), rows_of(table, content, ids, 0, 1024)), -1) << way;
      ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1) << way;
    }
}

TEST_F(CudaMove, UnregisteredMemoryGoesThroughTheHost) {
  Random random(15);
  for (const std::uint64_t count : Values{1, 33, 4096, 4097, 60'000}) {
    WholeTable table(random, {.rows = 50'000, .rows_per_page = 7, .stride = 260, .page_padding = 12});
    const std::vector<std::int64_t> ids = random_ids(random, count, 50'000);
    const DeviceArray<std::int64_t> device(ids);
    const std::uint64_t distinct = distinct_of(ids).size();
    const FrameSource source = table.source(false);
    std::vector<std::byte> content = table.content();
    const std::vector<std::byte> rows = random_bytes(random, count * 256);
    const DeviceArray<std::byte> in(rows);
    const DeviceArray<std::byte> out(rows.size());
    each_way(pool, [&] {
      const auto expect_pageable = [&](CudaBatch& batch, std::uint64_t expected) {
        const Moved moved = engine->moved(batch);
        EXPECT_EQ(moved.pageable_rows, expected);
        EXPECT_EQ(moved.kernel_rows + moved.thread_rows + moved.batches, 0U);
      };
      for (int turn = 0; turn < 2; ++turn) {
        const auto gathered = engine->gather(device.data(), count, 50'000, "t", source, 4, 256, out.data(), pool, stream);
        engine->wait(stream);
        ASSERT_EQ(first_difference(out.host(), rows_of(table, content, ids, 4, 256)), -1);
        expect_pageable(*gathered, distinct);
      }
      const auto batch = engine->begin_batch(device.data(), count, 50'000, 7, "t", stream);
      int calls = 0;
      engine->fetch(*batch, source, 0, {}, 4, 256, pool, stream, [&] { ++calls; });
      engine->expand(*batch, out.data(), stream);
      engine->assign(*batch, in.data(), stream);
      engine->write_back(*batch, source, 0, {}, pool, stream, [&] { ++calls; });
      engine->wait(stream);
      EXPECT_EQ(calls, 2);
      ASSERT_EQ(first_difference(out.host(), rows_of(table, content, ids, 4, 256)), -1);
      put_rows(table, content, ids, 4, 256, rows);
      ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1);
      expect_pageable(*batch, 2 * distinct);
      const auto last = engine->begin_batch(device.data(), count, 50'000, 7, "t", stream);
      const std::vector<std::byte> other = random_bytes(random, count * 256);
      const DeviceArray<std::byte> from(other);
      engine->write_back_last(*last, source, 4, 256, from.data(), pool, stream, {});
      engine->wait(stream);
      put_rows(table, content, ids, 4, 256, other);
      ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1);
      expect_pageable(*last, distinct);
    });
    if (HasFatalFailure()) return;
  }
}

// The working set is made when the number of distinct rows is known.
TEST_F(CudaMove, GathersOfMoreThanAGibibyte) {
  constexpr std::uint64_t kRows = 600;
  constexpr std::uint64_t kBytes = 300'000;
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  if (free < std::size_t{4} << 30) GTEST_SKIP() << "needs 4 GiB of GPU memory";
  Random random(16);
  WholeTable table(random, {.rows = kRows, .rows_per_page = 2, .stride = kBytes});
  for (const bool registered : {true, false}) {
    const PinnedRange pinned = registered ? PinnedRange(table.slab(), table.bytes()) : PinnedRange();
    ASSERT_EQ(pinned.registered(), registered);
    for (const std::uint64_t count : Values{4096, 4097, 5000}) {
      const std::vector<std::int64_t> ids = random_ids(random, count, kRows);
      const DeviceArray<std::int64_t> device(ids);
      const DeviceArray<std::byte> out(count * kBytes);
      for (const MoverWay& way : {MoverWay{4, 1024, 0}, MoverWay{0, 0, 4}, MoverWay{4, 1024, 4}}) {
        force(way, pool.threads());
        must(cudaMemsetAsync(out.data(), 0, count * kBytes, native), "cudaMemsetAsync");
        const auto batch =
            engine->gather(device.data(), count, kRows, "t", table.source(registered), 0, kBytes, out.data(), pool, stream);
        engine->wait(stream);
        for (std::uint64_t i = 0; i < count; i = i + 1 < count ? std::min(i + 97, count - 1) : count)
          ASSERT_EQ(first_difference(out.host(i * kBytes, kBytes), {table.slab() + table.record_offset(ids[i]), kBytes}), -1)
              << "position " << i << " of " << count << ", " << way;
      }
    }
  }
}

TEST_F(CudaMove, CalibrationLeavesTheRowsAsTheyAreAndTheModelKnowsTheCase) {
  Random random(17);
  struct Case {
    TableShape shape;
    Slice slice;
  };
  for (const Case& c : {Case{{.rows = 60'000, .rows_per_page = 8, .stride = 512}, {0, 512}},
                        Case{{.rows = 40'000, .rows_per_page = 7, .stride = 148, .page_padding = 20, .slab_offset = 1}, {5, 131}},
                        Case{{.rows = 1, .rows_per_page = 1, .stride = 4096}, {0, 4096}},
                        Case{{.rows = 20, .rows_per_page = 2, .stride = kChunk + 8}, {0, kChunk + 8}}}) {
    SCOPED_TRACE(testing::Message() << c.shape.rows << " rows of " << c.slice.bytes);
    engine->model().clear();
    WholeTable table(random, c.shape);
    const std::vector<std::byte> content = table.content();
    const auto knows = [&](bool fetch) {
      return engine->model().knows(
          {.fetch = fetch, .rows = 10'000, .row_bytes = c.slice.bytes, .pool_bytes = table.bytes(), .threads = pool.threads()});
    };
    engine->calibrate(table.source(false), c.shape.rows, c.slice.offset, c.slice.bytes, true, pool);
    EXPECT_TRUE(engine->model().measurements().empty()) << "memory that is not registered";
    const PinnedRange pinned(table.slab(), table.bytes());
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    engine->calibrate(table.source(true), c.shape.rows, c.slice.offset, c.slice.bytes, false, pool);
    EXPECT_TRUE(knows(true));
    EXPECT_FALSE(knows(false));
    engine->calibrate(table.source(true), c.shape.rows, c.slice.offset, c.slice.bytes, true, pool);
    EXPECT_TRUE(knows(true) && knows(false));
    ASSERT_EQ(first_difference({table.slab(), table.bytes()}, content), -1);

    std::set<std::pair<bool, std::uint64_t>> cases;
    const std::vector<MoverWay> ways = mover_ways(pool.threads());
    for (const MoverMeasurement& one : engine->model().measurements()) {
      EXPECT_TRUE(cases.insert({one.of.fetch, one.of.rows}).second) << "measured once more, kept twice";
      EXPECT_LE(one.of.rows, c.shape.rows);
      EXPECT_EQ(one.of.row_bytes, c.slice.bytes);
      EXPECT_EQ(one.of.pool_bytes, table.bytes());
      EXPECT_EQ(one.of.threads, pool.threads());
      EXPECT_EQ(one.rates.size(), c.slice.bytes > kChunk ? 3U : ways.size());
      for (const MoverRate& rate : one.rates) {
        EXPECT_NE(std::find(ways.begin(), ways.end(), rate.way), ways.end());
        EXPECT_TRUE(std::isfinite(rate.bytes_per_second) && rate.bytes_per_second > 0);
        EXPECT_TRUE(rate.thread_share >= 0 && rate.thread_share <= 1) << rate.thread_share;
        if (rate.way.host_threads == 0) {
          EXPECT_EQ(rate.thread_share, 0);
        } else if (rate.way.blocks == 0) {
          EXPECT_EQ(rate.thread_share, 1);
        }
      }
    }
    // By whatever was fastest.
    way_ = {4, 1024, 1};
    const std::uint64_t most = std::max<std::uint64_t>(1, std::min<std::uint64_t>(50'000, (64 << 20) / c.slice.bytes));
    for (const Ids kind : {Ids::kDistinct, Ids::kUniform, Ids::kZipf}) {
      check_whole(table, make_ids(kind, most, c.shape.rows, random), c.slice, pool, random);
      if (HasFatalFailure()) return;
    }
  }
  engine->calibrate({}, 0, 0, 0, true, pool);  // nothing to do
}

}  // namespace
}  // namespace embermap::test
