#include "kernels/cuda/memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

#include "base/checked.hpp"
#include "base/size_text.hpp"
#include "kernels/cuda/runtime.hpp"

namespace embermap::gpu {
namespace {

constexpr std::uint64_t kSmallestBlock = 64 << 10;
constexpr std::uint64_t kHugePage = 2 << 20;
constexpr std::size_t kManyBlocks = 16;  // with so many in flight, waiting for one costs less than pinning another

// Powers of two while small, so that slowly growing batches do not allocate each time.
std::uint64_t block_size(std::uint64_t bytes) {
  return bytes < (64 << 20) ? std::bit_ceil(std::max(bytes, kSmallestBlock)) : round_up(bytes, kHugePage);
}

}  // namespace

MemoryPool::MemoryPool(int device) : device_{device} {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  EMBERMAP_CUDA(cudaMemPoolCreate(&pool_, &properties));
  try {
    std::size_t free = 0;
    std::size_t total = 0;
    EMBERMAP_CUDA(cudaMemGetInfo(&free, &total));
    std::uint64_t threshold = total / 8;
    EMBERMAP_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &threshold));
    // Memory that another stream has freed is taken when that stream has come to there, and never by waiting for it.
    int no = 0;
    EMBERMAP_CUDA(cudaMemPoolSetAttribute(pool_, cudaMemPoolReuseAllowInternalDependencies, &no));
  } catch (...) {
    check_teardown(cudaMemPoolDestroy(pool_), "cudaMemPoolDestroy");
    throw;
  }
}

MemoryPool::~MemoryPool() {
  if (in_forked_child()) return;
  const ScopedDevice current(device_, std::nothrow);
  check_teardown(cudaMemPoolDestroy(pool_), "cudaMemPoolDestroy");
}

DeviceBuffer::DeviceBuffer(const MemoryPool& pool, std::uint64_t bytes, cudaStream_t stream)
    : stream_{stream}, device_{pool.device()} {
  if (bytes == 0) return;
  void* data = nullptr;
  if (const cudaError_t error = cudaMallocFromPoolAsync(&data, bytes, pool.handle(), stream); error != cudaSuccess)
    check(error, fmt::format("allocating {} of memory on CUDA device {}", format_size(bytes), device_));
  data_ = static_cast<std::byte*>(data);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)}, stream_{other.stream_}, device_{other.device_} {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    stream_ = other.stream_;
    device_ = other.device_;
  }
  return *this;
}

void DeviceBuffer::release() noexcept {
  if (data_ == nullptr) return;
  std::byte* const data = std::exchange(data_, nullptr);
  if (in_forked_child()) return;
  const ScopedDevice current(device_, std::nothrow);  // the null stream is the current device's
  check_teardown(cudaFreeAsync(data, stream_), "cudaFreeAsync");
}

std::uint64_t Layout::add(std::uint64_t count, std::uint64_t item_bytes) {
  const std::uint64_t begin = bytes_;
  const std::uint64_t end =
      checked_add(begin, checked_mul(count, item_bytes, "device memory of a batch"), "device memory of a batch");
  bytes_ = checked_add(end, 255, "device memory of a batch") & ~std::uint64_t{255};
  return begin;
}

struct StagingPool::Block {
  explicit Block(std::uint64_t bytes) : capacity{bytes} {
    void* memory = nullptr;
    EMBERMAP_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    pinned = cudaHostAlloc(&memory, capacity, cudaHostAllocPortable) == cudaSuccess;
    if (!pinned) {
      (void)cudaGetLastError();
      memory = std::aligned_alloc(4096, capacity);  // every capacity is a multiple of 64 KiB
      if (memory == nullptr) {
        check_teardown(cudaEventDestroy(event), "cudaEventDestroy");
        throw std::bad_alloc();
      }
    }
    data = static_cast<std::byte*>(memory);
  }
  ~Block() {
    if (in_forked_child()) return;
    // Nobody may write to memory that is given back.
    if (pending) check_teardown(cudaEventSynchronize(event), "cudaEventSynchronize");
    check_teardown(cudaEventDestroy(event), "cudaEventDestroy");
    if (pinned)
      check_teardown(cudaFreeHost(data), "cudaFreeHost");
    else
      std::free(data);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Whether the stream has passed the last use.
  bool idle() {
    if (!pending) return true;
    const cudaError_t state = cudaEventQuery(event);
    if (state != cudaSuccess) {
      (void)cudaGetLastError();
      if (state == cudaErrorNotReady) return false;
    }
    pending = false;  // a broken context runs nothing any more
    return true;
  }

  std::byte* data = nullptr;
  std::uint64_t capacity;
  cudaEvent_t event = nullptr;
  bool pinned = false;
  bool lent = false;
  bool pending = false;  // `event` was recorded and has not been seen to be done
};

StagingPool::StagingPool(int device) noexcept : device_{device} {}

StagingPool::~StagingPool() {
  if (blocks_.empty()) return;
  if (in_forked_child()) {
    for (std::unique_ptr<Block>& block : blocks_) (void)block.release();
    return;
  }
  const ScopedDevice current(device_, std::nothrow);
  blocks_.clear();
}

StagingPool::Lease StagingPool::acquire(std::uint64_t bytes, cudaStream_t stream) {
  Block* chosen = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Block* waiting = nullptr;
    for (const std::unique_ptr<Block>& block : blocks_) {
      if (block->lent || block->capacity < bytes) continue;
      if (block->idle()) {
        if (chosen == nullptr || block->capacity < chosen->capacity) chosen = block.get();
      } else if (waiting == nullptr) {
        waiting = block.get();
      }
    }
    if (chosen == nullptr && blocks_.size() >= kManyBlocks) chosen = waiting;
    if (chosen == nullptr) {
      // Idle blocks that proved too small make room for the larger one once there are many.
      if (blocks_.size() >= kManyBlocks)
        std::erase_if(blocks_, [&](const std::unique_ptr<Block>& block) {
          return !block->lent && block->capacity < bytes && block->idle();
        });
      blocks_.push_back(std::make_unique<Block>(block_size(bytes)));
      chosen = blocks_.back().get();
    }
    chosen->lent = true;
  }
  Lease lease(this, chosen, stream);
  if (chosen->pending) lease.wait();
  return lease;
}

void StagingPool::give_back(Block* block, cudaStream_t stream, bool settled) noexcept {
  if (in_forked_child()) return;
  if (!settled) {
    const ScopedDevice current(device_, std::nothrow);
    const cudaError_t error = cudaEventRecord(block->event, stream);
    check_teardown(error, "cudaEventRecord");
    if (error != cudaSuccess) check_teardown(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::lock_guard lock(mutex_);
    block->pending = error == cudaSuccess;
    block->lent = false;
    return;
  }
  const std::lock_guard lock(mutex_);
  block->pending = false;
  block->lent = false;
}

StagingPool::Lease::Lease(Lease&& other) noexcept
    : pool_{std::exchange(other.pool_, nullptr)}, block_{other.block_}, stream_{other.stream_}, settled_{other.settled_} {}

StagingPool::Lease& StagingPool::Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    block_ = other.block_;
    stream_ = other.stream_;
    settled_ = other.settled_;
  }
  return *this;
}

std::byte* StagingPool::Lease::data() const noexcept { return block_->data; }

void StagingPool::Lease::mark() { EMBERMAP_CUDA(cudaEventRecord(block_->event, stream_)); }

bool StagingPool::Lease::passed() const {
  const RelaxedCapture relaxed;
  const cudaError_t state = cudaEventQuery(block_->event);
  if (state == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  check(state, "cudaEventQuery");
  return true;
}

bool StagingPool::Lease::pinned() const noexcept { return block_->pinned; }

void StagingPool::Lease::wait() { EMBERMAP_CUDA(cudaEventSynchronize(block_->event)); }

void StagingPool::Lease::release() noexcept {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->give_back(block_, stream_, settled_);
}

}  // namespace embermap::gpu
