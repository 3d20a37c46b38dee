// Registering host memory: whole or not at all, and nothing left behind.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "tests/kernels/cuda_test_support.hpp"

namespace embermap::test {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

// Anonymous memory, untouched until registered.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : bytes_{bytes} {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap");
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  void* data_;
  std::uint64_t bytes_;
};

// A file, shared with the page cache and mapped for reading; without a name.
class FileMapping {
 public:
  explicit FileMapping(std::uint64_t bytes) : bytes_{bytes} {
    std::string name = (std::filesystem::temp_directory_path() / "embermap-test-XXXXXX").string();
    fd_ = mkstemp(name.data());
    if (fd_ < 0 || unlink(name.c_str()) != 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0)
      throw std::runtime_error("mkstemp");
    data_ = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd_, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap");
  }
  ~FileMapping() {
    munmap(data_, bytes_);
    close(fd_);
  }
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;
  void write(std::uint64_t at, std::span<const std::byte> in) const {
    if (pwrite(fd_, in.data(), in.size(), static_cast<off_t>(at)) != static_cast<ssize_t>(in.size()))
      throw std::runtime_error("pwrite");
  }
  const std::byte* data() const { return static_cast<const std::byte*>(data_); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  int fd_ = -1;
  void* data_;
  std::uint64_t bytes_;
};

bool is_registered(const std::byte* at) {
  cudaPointerAttributes attributes{};
  must(cudaPointerGetAttributes(&attributes, at), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeHost;
}

class CudaPinned : public GpuTest {};

TEST_F(CudaPinned, MemoryIsRegisteredForAsLongAsTheRangeLives) {
  const Memory memory(8 << 20);
  {
    PinnedRange range(memory.data(), memory.bytes());
    EXPECT_TRUE(range.registered());
    EXPECT_TRUE(range.error().empty());
    EXPECT_TRUE(is_registered(memory.data()) && is_registered(memory.data() + memory.bytes() - 1));
    PinnedRange moved(std::move(range));
    EXPECT_FALSE(range.registered());  // NOLINT: what a moved-from range says is promised
    EXPECT_TRUE(moved.registered() && is_registered(memory.data()));
    PinnedRange assigned;
    assigned = std::move(moved);
    EXPECT_TRUE(is_registered(memory.data()));
    assigned = PinnedRange();
    EXPECT_FALSE(is_registered(memory.data()));
    assigned = PinnedRange(memory.data(), memory.bytes());
    EXPECT_TRUE(is_registered(memory.data()));
  }
  EXPECT_FALSE(is_registered(memory.data()));
}

TEST_F(CudaPinned, EmptyRangeIsNotRegistered) {
  EXPECT_FALSE(PinnedRange().registered());
  const PinnedRange range(nullptr, 4096);
  EXPECT_FALSE(range.registered());
  EXPECT_THAT(range.error(), HasSubstr("pinned host memory"));
}

TEST_F(CudaPinned, OverlapIsAFailureThatLeavesNoErrorAndTheFirstRegistrationAlone) {
  const Memory memory(8 << 20);
  const PinnedRange first(memory.data(), 4 << 20);
  ASSERT_TRUE(first.registered()) << first.error();
  const PinnedRange again(memory.data(), memory.bytes());
  EXPECT_FALSE(again.registered());
  EXPECT_THAT(again.error(), HasSubstr("8.00 MiB of pinned host memory"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  void* unrelated = nullptr;
  EXPECT_EQ(cudaMalloc(&unrelated, 1 << 20), cudaSuccess);
  EXPECT_EQ(cudaFree(unrelated), cudaSuccess);
  EXPECT_TRUE(is_registered(memory.data()));
}

TEST_F(CudaPinned, FailureOfTheLastPieceTakesTheOthersBack) {
  const Memory memory(3 * kGiB);
  const PinnedRange obstacle(memory.data() + 2 * kGiB + kGiB / 2, 1 << 20);
  ASSERT_TRUE(obstacle.registered()) << obstacle.error();
  const PinnedRange range(memory.data(), memory.bytes());
  EXPECT_FALSE(range.registered());
  EXPECT_THAT(range.error(), HasSubstr("3.00 GiB of pinned host memory"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  for (const std::uint64_t at : Values{std::uint64_t{0}, kGiB / 2, kGiB + 4096, 2 * kGiB - 4096})
    EXPECT_FALSE(is_registered(memory.data() + at)) << at;
}

// The slab begins off every border of pages; its second piece begins inside a record.
TEST_F(CudaPinned, RowsOnBothSidesOfAPiecesBorder) {
  const Memory memory(kGiB + (32 << 20));
  std::byte* const slab = memory.data() + 4096 + 512;
  const std::uint64_t bytes = kGiB + (16 << 20);
  const PinnedRange range(slab, bytes);
  ASSERT_TRUE(range.registered()) << range.error();
  constexpr std::uint64_t kPage = 24 * 1024;
  constexpr std::uint64_t kStride = 3 * 1024;
  const std::uint64_t pages = bytes / kPage;
  std::vector<std::int64_t> ids;
  for (std::uint64_t id = pages * 8 - 8000; id < pages * 8; ++id)
    ids.push_back(static_cast<std::int64_t>(id));  // 24 MB up to the end
  Random random(1);
  const std::vector<std::byte> rows = random_bytes(random, ids.size() * kStride);
  const DeviceArray<std::int64_t> device(ids);
  const DeviceArray<std::byte> in(rows);
  const FrameSource source{.slab = slab, .registered = true, .page_bytes = kPage, .rows_per_page = 8, .stride = kStride};
  const auto batch = engine->make_batch(device.data(), ids.size(), pages * 8, 8, "t", stream);
  std::vector<std::uint32_t> frames(batch->pages.begin(), batch->pages.end());  // page p in frame p
  engine->reserve(*batch, 0, kStride, stream);
  engine->assign(*batch, in.data(), stream);
  engine->write_back(*batch, source, 0, frames, pool, stream);
  engine->wait(stream);
  EXPECT_EQ(std::memcmp(slab + static_cast<std::uint64_t>(ids[0]) * kStride, rows.data(), rows.size()), 0);

  const auto reading = engine->make_batch(device.data(), ids.size(), pages * 8, 8, "t", stream);
  engine->fetch(*reading, source, 0, frames, 0, kStride, pool, stream);
  const DeviceArray<std::byte> out(rows.size());
  engine->expand(*reading, out.data(), stream);
  engine->wait(stream);
  EXPECT_EQ(first_difference(out.host(), rows), -1);
}

// Rows off every border of pages, on both sides of a piece's border; the file ends inside a page.
TEST_F(CudaPinned, AFileThatIsMappedForReadingIsReadWhereItIs) {
  constexpr std::uint64_t kOffset = 81;
  constexpr std::uint64_t kStride = 3 * 1024 + 4;
  constexpr std::uint64_t kRowsPerPage = 8;
  const std::uint64_t rows = (kGiB + (16 << 20)) / kStride;
  const FileMapping file(kOffset + rows * kStride);
  Random random(2);
  std::vector<std::int64_t> ids;
  for (std::uint64_t id = rows - 8000; id < rows; ++id) ids.push_back(static_cast<std::int64_t>(id));
  const std::vector<std::byte> content = random_bytes(random, ids.size() * kStride);
  file.write(kOffset + static_cast<std::uint64_t>(ids[0]) * kStride, content);
  int supported = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, 0));
  {
    PinnedRange range = PinnedRange::read_only(file.data(), file.bytes(), 0);
    if (supported == 0) {
      EXPECT_FALSE(range.registered());
      EXPECT_THAT(range.error(), HasSubstr("for reading only"));
      GTEST_SKIP() << range.error();
    }
    ASSERT_TRUE(range.registered()) << range.error();
    EXPECT_TRUE(is_registered(file.data()) && is_registered(file.data() + kGiB) && is_registered(file.data() + file.bytes() - 1));
    const FrameSource source{.slab = const_cast<std::byte*>(file.data()) + kOffset,
                             .registered = true,
                             .page_bytes = kRowsPerPage * kStride,
                             .rows_per_page = kRowsPerPage,
                             .stride = kStride};
    const DeviceArray<std::int64_t> device(ids);
    const DeviceArray<std::byte> out(content.size());
    const auto batch = engine->make_batch(device.data(), ids.size(), rows, kRowsPerPage, "t", stream);
    const std::vector<std::uint32_t> frames(batch->pages.begin(), batch->pages.end());  // page p in frame p
    engine->fetch(*batch, source, 0, frames, 0, kStride, pool, stream);
    engine->expand(*batch, out.data(), stream);
    engine->wait(stream);
    EXPECT_EQ(first_difference(out.host(), content), -1);
  }
  EXPECT_FALSE(is_registered(file.data()));
}

TEST_F(CudaPinned, MemoryForReadingOnlyIsRefusedWithItsReason) {
  EXPECT_THAT(PinnedRange::read_only(nullptr, 4096, 0).error(), HasSubstr("pinned host memory"));
  const Memory memory(1 << 20);
  const PinnedRange first = PinnedRange::read_only(memory.data(), memory.bytes(), 0);
  const PinnedRange again = PinnedRange::read_only(memory.data(), memory.bytes(), 0);
  EXPECT_FALSE(again.registered());
  EXPECT_THAT(again.error(), HasSubstr("1.00 MiB of pinned host memory"));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST_F(CudaPinned, ForkedChildLeavesTheParentsMemoryAlone) {
  const Memory memory(4 << 20);
  PinnedRange range(memory.data(), memory.bytes());
  ASSERT_TRUE(range.registered()) << range.error();
  const DeviceArray<std::int64_t> device(std::vector<std::int64_t>{3, 1, 3});
  auto batch = engine->make_batch(device.data(), 3, 10, 4, "t", stream);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    batch.reset();
    engine.reset();
    range = PinnedRange();
    const PinnedRange other(memory.data(), memory.bytes());
    _exit(other.registered() || other.error().empty() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(is_registered(memory.data()));
  engine->reserve(*batch, 0, 8, stream);
  engine->wait(stream);
}

}  // namespace
}  // namespace embermap::test
