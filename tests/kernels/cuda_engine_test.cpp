// What holds for all calls of an engine: streams, threads, graphs, lifetimes, and sizes past 32 bits.
#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "base/error.hpp"
#include "tests/kernels/cuda_test_support.hpp"

namespace embermap::test {
namespace {

class CudaEngineTest : public GpuTest {};

TEST_F(CudaEngineTest, TwoThreadsOnTwoStreamsDoNotDisturbEachOther) {
  std::atomic<int> wrong{0};
  const auto work = [&](std::uint64_t seed, bool registered) {
    cudaStream_t mine = nullptr;
    must(cudaStreamCreateWithFlags(&mine, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    {
      Random random(seed);
      SlabTable table(random, {.rows = 20'000, .rows_per_page = 8, .stride = 136});
      PinnedRange pinned;
      if (registered) pinned = PinnedRange(table.slab(), table.bytes());
      wrong += registered && !pinned.registered();
      std::vector<std::byte> expected_slab = table.content();
      for (int round = 0; round < 40; ++round) {
        const std::uint64_t count = 1 + random() % 30'000;
        const std::vector<std::int64_t> ids = random_ids(random, count, 20'000);
        const std::vector<std::byte> rows = random_bytes(random, count * 136);
        const DeviceArray<std::int64_t> device(ids);
        const DeviceArray<std::byte> in(rows);
        const DeviceArray<std::byte> out(count * 136);
        const auto batch = engine->make_batch(device.data(), count, 20'000, 8, "t", CudaStream{mine});
        fetch_all(*engine, *batch, table, registered, 0, 136, pool, CudaStream{mine}, 1 + random() % 3);
        engine->expand(*batch, out.data(), CudaStream{mine});
        engine->assign(*batch, in.data(), CudaStream{mine});
        write_back_all(*engine, *batch, table, registered, pool, CudaStream{mine});
        engine->wait(CudaStream{mine});
        std::vector<std::byte> expected;
        for (const std::int64_t id : ids) {
          const std::byte* const from = expected_slab.data() + table.record_offset(id);
          expected.insert(expected.end(), from, from + 136);
        }
        for (std::uint64_t i = 0; i < count; ++i)
          std::memcpy(expected_slab.data() + table.record_offset(ids[i]), rows.data() + i * 136, 136);
        wrong += first_difference(out.host(), expected) != -1;
        wrong += first_difference(table.content(), expected_slab) != -1;
      }
    }
    must(cudaStreamDestroy(mine), "cudaStreamDestroy");
  };
  std::thread other([&] { work(1, true); });
  std::thread third([&] { work(2, false); });
  work(3, true);
  other.join();
  third.join();
  EXPECT_EQ(wrong.load(), 0);
}

// More batches in flight than there are staging buffers; none is waited for before the end.
TEST_F(CudaEngineTest, ManyBatchesInFlightOnOneStream) {
  Random random(4);
  SlabTable table(random, {.rows = 4000, .rows_per_page = 4, .stride = 64});
  const PinnedRange pinned(table.slab(), table.bytes());
  ASSERT_TRUE(pinned.registered()) << pinned.error();
  const std::vector<std::int64_t> ids = random_ids(random, 3000, 4000);
  const DeviceArray<std::int64_t> device(ids);
  const DeviceArray<std::byte> out(ids.size() * 64);
  std::vector<std::unique_ptr<CudaBatch>> batches;
  for (int i = 0; i < 100; ++i) batches.push_back(engine->make_batch(device.data(), ids.size(), 4000, 4, "t", stream));
  for (const auto& batch : batches) fetch_all(*engine, *batch, table, true, 0, 64, pool, stream, 2);
  std::vector<std::byte> expected;
  for (const std::int64_t id : ids) expected.insert(expected.end(), table.record(id), table.record(id) + 64);
  for (const auto& batch : batches) {
    engine->expand(*batch, out.data(), stream);
    engine->wait(stream);
    ASSERT_EQ(first_difference(out.host(), expected), -1);
  }
}

TEST_F(CudaEngineTest, NullStreamAndALegacyStreamWork) {
  Random random(5);
  SlabTable table(random, {.rows = 100, .rows_per_page = 4, .stride = 20});
  const std::vector<std::int64_t> ids = random_ids(random, 77, 100);
  const DeviceArray<std::int64_t> device(ids);
  for (const CudaStream some : {CudaStream{}, CudaStream{cudaStreamLegacy}, CudaStream{cudaStreamPerThread}}) {
    const auto batch = engine->make_batch(device.data(), ids.size(), 100, 4, "t", some);
    fetch_all(*engine, *batch, table, false, 4, 12, pool, some);
    const DeviceArray<std::byte> out(ids.size() * 12);
    engine->expand(*batch, out.data(), some);
    engine->wait(some);
    std::vector<std::byte> expected;
    for (const std::int64_t id : ids) expected.insert(expected.end(), table.record(id) + 4, table.record(id) + 16);
    EXPECT_EQ(first_difference(out.host(), expected), -1);
  }
}

TEST_F(CudaEngineTest, BatchOnAnotherStreamOrEngineIsRefused) {
  const DeviceArray<std::int64_t> device(std::vector<std::int64_t>{1, 2});
  const auto batch = engine->make_batch(device.data(), 2, 10, 4, "t", stream);
  EXPECT_THROW(engine->reserve(*batch, 0, 8, CudaStream{}), InvalidArgument);
  const auto other = CudaEngine::create(0);
  EXPECT_THROW(other->reserve(*batch, 0, 8, stream), InvalidArgument);
  engine->reserve(*batch, 0, 8, stream);
}

TEST_F(CudaEngineTest, CapturingStreamIsRefusedAndTheCaptureGoesOn) {
  const DeviceArray<std::int64_t> device(std::vector<std::int64_t>{1, 2});
  auto batch = engine->make_batch(device.data(), 2, 10, 4, "t", stream);
  engine->reserve(*batch, 0, 8, stream);
  const DeviceArray<std::byte> rows(16);
  ASSERT_CUDA(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal));
  try {
    (void)engine->make_batch(device.data(), 2, 10, 4, "t", stream);
    ADD_FAILURE() << "a batch was captured";
  } catch (const CudaError& error) {
    EXPECT_NE(std::string(error.what()).find("captur"), std::string::npos) << error.what();
  }
  EXPECT_THROW(engine->expand(*batch, rows.data(), stream), CudaError);
  EXPECT_THROW(engine->assign(*batch, rows.data(), stream), CudaError);
  EXPECT_THROW(engine->wait(stream), CudaError);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(native, &graph), cudaSuccess);
  if (graph != nullptr) {
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  engine->assign(*batch, rows.data(), stream);
  engine->wait(stream);
}

TEST_F(CudaEngineTest, BatchMayOutliveItsEngine) {
  const DeviceArray<std::int64_t> device(std::vector<std::int64_t>{1, 2});
  auto batch = engine->make_batch(device.data(), 2, 10, 4, "t", stream);
  engine->reserve(*batch, 0, 1 << 20, stream);
  engine.reset();
  batch.reset();
  EXPECT_EQ(cudaStreamSynchronize(native), cudaSuccess);
}

TEST_F(CudaEngineTest, OutOfMemoryNamesTheAmountAndTheEngineGoesOn) {
  const DeviceArray<std::int64_t> device(std::vector<std::int64_t>{1, 2});
  const auto batch = engine->make_batch(device.data(), 2, 10, 4, "t", stream);
  try {
    engine->reserve(*batch, 0, std::uint64_t{1} << 43, stream);
    FAIL() << "16 TiB were allocated";
  } catch (const CudaError& error) {
    EXPECT_NE(std::string(error.what()).find("TiB"), std::string::npos) << error.what();
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_THROW(engine->reserve(*batch, 0, ~std::uint64_t{0}, stream), InvalidArgument);
  engine->reserve(*batch, 0, 8, stream);
}

TEST_F(CudaEngineTest, CallersDeviceStaysCurrent) {
  int devices = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two devices";
  const auto second = CudaEngine::create(1);
  int current = -1;
  ASSERT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
  EXPECT_EQ(second->device(), 1);
  const DeviceArray<std::int64_t> on_first(std::vector<std::int64_t>{1, 2});
  EXPECT_THROW((void)second->make_batch(on_first.data(), 2, 10, 4, "t", CudaStream{}), InvalidArgument);
  ASSERT_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

// 300,000 rows of 16 KiB: the slab, the working set and the caller's arrays all pass 2^32 bytes.
TEST_F(CudaEngineTest, SizesPast32Bits) {
  constexpr std::uint64_t kRows = 300'000;
  constexpr std::uint64_t kBytes = 16'384;
  std::size_t free = 0;
  std::size_t total = 0;
  ASSERT_CUDA(cudaMemGetInfo(&free, &total));
  if (free < kRows * kBytes * 5 / 2) GTEST_SKIP() << "needs 12 GB of GPU memory";
  void* const memory = mmap(nullptr, kRows * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const slab = static_cast<std::byte*>(memory);
  {
    const PinnedRange pinned(slab, kRows * kBytes);
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    // The rows before, across and behind 2^31 and 2^32 bytes, with a tag each.
    const std::vector<std::uint64_t> watched = {0, 131'071, 131'072, 131'073, 262'143, 262'144, 262'145, kRows - 1};
    for (const std::uint64_t row : watched) std::memset(slab + row * kBytes, static_cast<int>(row % 251 + 1), kBytes);

    std::vector<std::int64_t> ids(kRows);
    std::iota(ids.rbegin(), ids.rend(), std::int64_t{0});  // position i holds row kRows - 1 - i
    const DeviceArray<std::int64_t> device(ids);
    const FrameSource source{.slab = slab, .registered = true, .page_bytes = kBytes, .rows_per_page = 1, .stride = kBytes};
    const auto batch = engine->make_batch(device.data(), kRows, kRows, 1, "t", stream);
    ASSERT_EQ(batch->pages.size(), kRows);
    const std::vector<std::uint32_t> frames(batch->pages.begin(), batch->pages.end());
    engine->fetch(*batch, source, 0, frames, 0, kBytes, pool, stream);
    const DeviceArray<std::byte> rows(kRows * kBytes);
    engine->expand(*batch, rows.data(), stream);
    engine->wait(stream);
    for (const std::uint64_t row : watched) {
      const std::vector<std::byte> expected(kBytes, static_cast<std::byte>(row % 251 + 1));
      EXPECT_EQ(first_difference(rows.host((kRows - 1 - row) * kBytes, kBytes), expected), -1) << "row " << row;
    }
    engine->add(*batch, kBytes, DType::kUInt8, rows.data(), stream);  // doubles every row
    engine->write_back(*batch, source, 0, frames, pool, stream);
    engine->wait(stream);
    for (const std::uint64_t row : watched) {
      const std::vector<std::byte> expected(kBytes, static_cast<std::byte>((row % 251 + 1) * 2));
      EXPECT_EQ(first_difference({slab + row * kBytes, kBytes}, expected), -1) << "row " << row;
    }
    for (const std::uint64_t row : Values{std::uint64_t{1}, std::uint64_t{200'000}, kRows - 2})
      EXPECT_EQ(first_difference({slab + row * kBytes, kBytes}, std::vector<std::byte>(kBytes)), -1) << "row " << row;
  }
  munmap(memory, kRows * kBytes);
}

}  // namespace
}  // namespace embermap::test
