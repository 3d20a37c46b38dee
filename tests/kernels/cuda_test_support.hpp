// What the GPU tests share: a fixture that wants a GPU, device arrays, and a table whose pages lie scattered over the frames of a
// slab.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/thread_pool.hpp"
#include "kernels/cuda.hpp"

namespace embermap::test {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

inline void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Skipped without a GPU; fails where one was promised.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda_devices() == 0) {
      const char* required = std::getenv("EMBERMAP_REQUIRE_GPU");
      if (required != nullptr && *required != '\0') FAIL() << "EMBERMAP_REQUIRE_GPU is set, but " << cuda_absence();
      GTEST_SKIP() << cuda_absence();
    }
    engine = CudaEngine::create(0);
    must(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    stream = CudaStream{native};
  }
  void TearDown() override {
    if (native == nullptr) return;
    EXPECT_EQ(cudaStreamSynchronize(native), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(native), cudaSuccess);
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "an error was left behind";
  }

  std::unique_ptr<CudaEngine> engine;
  cudaStream_t native = nullptr;
  CudaStream stream;
  ThreadPool pool{4};
};

// Device memory for the test's own data.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::uint64_t count) : count_{count} {
    if (count != 0) must(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(std::span<const T> from) : DeviceArray(from.size()) {
    if (count_ != 0) must(cudaMemcpy(data_, from.data(), from.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    // A copy from pageable memory may return before all has arrived, and the test's stream does not wait for the null stream.
    must(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(std::span<const T>(from)) {}
  ~DeviceArray() { EXPECT_EQ(cudaFree(data_), cudaSuccess); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> host(std::uint64_t begin, std::uint64_t count) const {
    std::vector<T> out(count);
    if (count != 0) must(cudaMemcpy(out.data(), data_ + begin, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return out;
  }
  std::vector<T> host() const { return host(0, count_); }

 private:
  T* data_ = nullptr;
  std::uint64_t count_;
};

using Random = std::mt19937_64;
using Values = std::initializer_list<std::uint64_t>;

inline std::vector<std::int64_t> random_ids(Random& random, std::uint64_t count, std::uint64_t rows) {
  std::uniform_int_distribution<std::int64_t> draw(0, static_cast<std::int64_t>(rows - 1));
  std::vector<std::int64_t> ids(count);
  for (std::int64_t& id : ids) id = draw(random);
  return ids;
}

inline std::vector<std::byte> random_bytes(Random& random, std::uint64_t count) {
  std::vector<std::byte> out(count);
  std::uint64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(out.data() + i, &word, 8);
  }
  for (; i < count; ++i) out[i] = static_cast<std::byte>(random());
  return out;
}

struct TableShape {
  std::uint64_t rows = 0;
  std::uint64_t rows_per_page = 1;
  std::uint64_t stride = 0;
  std::uint64_t page_padding = 0;  // bytes of a page behind its records
  std::uint64_t slab_offset = 0;   // of the slab inside memory aligned to 4096 bytes
};

// Pages in frames chosen by lot, records of random bytes.
class SlabTable {
 public:
  SlabTable(Random& random, const TableShape& shape)
      : shape_{shape},
        page_bytes_{shape.rows_per_page * shape.stride + shape.page_padding},
        frame_of_(ceil_div(shape.rows, shape.rows_per_page)) {
    std::vector<std::uint32_t> frames(frame_of_.size() + 3);
    std::iota(frames.begin(), frames.end(), 0U);
    std::shuffle(frames.begin(), frames.end(), random);
    std::copy_n(frames.begin(), frame_of_.size(), frame_of_.begin());
    bytes_ = frames.size() * page_bytes_;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, round_up(bytes_ + shape.slab_offset, 4096))));
    const std::vector<std::byte> content = random_bytes(random, bytes_);
    std::memcpy(slab(), content.data(), content.size());
  }

  std::byte* slab() const { return memory_.get() + shape_.slab_offset; }
  std::uint64_t bytes() const { return bytes_; }
  std::vector<std::byte> content() const { return {slab(), slab() + bytes_}; }
  std::uint64_t record_offset(std::int64_t id) const {
    const auto row = static_cast<std::uint64_t>(id);
    return frame_of_[row / shape_.rows_per_page] * page_bytes_ + row % shape_.rows_per_page * shape_.stride;
  }
  std::byte* record(std::int64_t id) const { return slab() + record_offset(id); }
  FrameSource source(bool registered) const {
    return {.slab = slab(),
            .registered = registered,
            .page_bytes = page_bytes_,
            .rows_per_page = shape_.rows_per_page,
            .stride = shape_.stride};
  }
  std::vector<std::uint32_t> frames(const CudaBatch& batch) const {
    std::vector<std::uint32_t> out;
    for (const std::uint64_t page : batch.pages) out.push_back(frame_of_.at(page));
    return out;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  TableShape shape_;
  std::uint64_t page_bytes_;
  std::uint64_t bytes_ = 0;
  std::vector<std::uint32_t> frame_of_;
  std::unique_ptr<std::byte, Free> memory_;
};

// Fetches (or writes back) all pages of a batch in `passes` calls.
inline void fetch_all(CudaEngine& engine, CudaBatch& batch, const SlabTable& table, bool registered, std::uint64_t offset,
                      std::uint64_t bytes, ThreadPool& pool, CudaStream stream, std::uint64_t passes = 1) {
  std::vector<std::uint32_t> frames = table.frames(batch);
  const std::uint64_t piece = std::max<std::uint64_t>(1, ceil_div(frames.size(), passes));
  for (std::uint64_t first = 0; first < frames.size(); first += piece) {
    std::vector<std::uint32_t> some(
        frames.begin() + static_cast<std::ptrdiff_t>(first),
        frames.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(first + piece, frames.size())));
    engine.fetch(batch, table.source(registered), first, some, offset, bytes, pool, stream);
    std::fill(some.begin(), some.end(), 0xFFFFFFFFU);  // may be reused at once
  }
}

inline void write_back_all(CudaEngine& engine, CudaBatch& batch, const SlabTable& table, bool registered, ThreadPool& pool,
                           CudaStream stream, std::uint64_t passes = 1) {
  std::vector<std::uint32_t> frames = table.frames(batch);
  const std::uint64_t piece = std::max<std::uint64_t>(1, ceil_div(frames.size(), passes));
  for (std::uint64_t first = 0; first < frames.size(); first += piece) {
    std::vector<std::uint32_t> some(
        frames.begin() + static_cast<std::ptrdiff_t>(first),
        frames.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(first + piece, frames.size())));
    engine.write_back(batch, table.source(registered), first, some, pool, stream);
    std::fill(some.begin(), some.end(), 0xFFFFFFFFU);
  }
}

// Where two arrays of bytes differ first; -1 if they do not. Fails readably where EXPECT_EQ on megabytes would not.
inline std::int64_t first_difference(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return static_cast<std::int64_t>(std::min(a.size(), b.size()));
  if (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0) return -1;
  const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin());
  return at == a.end() ? -1 : at - a.begin();
}

}  // namespace embermap::test
