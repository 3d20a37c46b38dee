// Memory of the CUDA side. Nothing here calls cudaMalloc or waits for a device. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace embermap::gpu {

// Device memory of one engine: a pool of its own, apart from the device's default pool and from any framework's allocator. Idle
// memory up to an eighth of the device's stays reserved for the next batch; what is above goes back to the driver. Thread-safe.
class MemoryPool {
 public:
  explicit MemoryPool(int device);  // throws CudaError
  ~MemoryPool();                    // buffers may outlive the pool: the driver keeps it until the last is freed
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  int device() const noexcept { return device_; }
  cudaMemPool_t handle() const noexcept { return pool_; }

 private:
  int device_;
  cudaMemPool_t pool_ = nullptr;
};

// Uninitialised device memory, aligned to 256 bytes, allocated and freed in the order of one stream: after the owner's end, work
// enqueued before may go on using it. The stream must outlive the buffer.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Throws CudaError naming the amount. 0 bytes: an empty buffer. The pool's device must be current.
  DeviceBuffer(const MemoryPool& pool, std::uint64_t bytes, cudaStream_t stream);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer() { release(); }

  // From now on it is freed in the order of another stream of the device: one that comes after all that uses it.
  void follow(cudaStream_t stream) noexcept { stream_ = stream; }
  std::byte* data() const noexcept { return data_; }
  template <class T>
  T* at(std::uint64_t byte) const noexcept {
    return reinterpret_cast<T*>(data_ + byte);
  }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void release() noexcept;
  std::byte* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
  int device_ = 0;
};

// Places for arrays in one DeviceBuffer, each aligned to 256 bytes: sum first, then allocate, then slice.
class Layout {
 public:
  // Reserves `count` items of `item_bytes` and returns where they begin. Throws InvalidArgument on overflow.
  std::uint64_t add(std::uint64_t count, std::uint64_t item_bytes);
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::uint64_t bytes_ = 0;
};

// Host buffers that DMA reads and writes: pinned where the system permits, otherwise ordinary memory (slower, still correct).
// They grow with the largest batch and are then used again and again. Thread-safe; a buffer is lent to one caller at a time and
// lent again only when the stream has passed the end of its last use.
class StagingPool {
  struct Block;

 public:
  // One buffer, lent until this ends.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { release(); }

    explicit operator bool() const noexcept { return pool_ != nullptr; }
    std::byte* data() const noexcept;
    // All that the stream is to do with this buffer so far has been enqueued; wait() waits for just that.
    void mark();
    void wait();
    bool passed() const;           // whether wait() would return at once
    bool pinned() const noexcept;  // else it is memory that the device does not reach
    // The stream has been waited for: the buffer is free at once when the lease ends.
    void settled() noexcept { settled_ = true; }

   private:
    friend class StagingPool;
    Lease(StagingPool* pool, Block* block, cudaStream_t stream) noexcept : pool_{pool}, block_{block}, stream_{stream} {}
    void release() noexcept;
    StagingPool* pool_ = nullptr;
    Block* block_ = nullptr;
    cudaStream_t stream_ = nullptr;
    bool settled_ = false;
  };

  explicit StagingPool(int device) noexcept;
  ~StagingPool();  // waits for the streams to pass the last uses; no lease may be alive
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  // A buffer of at least `bytes` to be used with `stream`. Allocates only while the pool has no idle one that is large enough;
  // with many in flight it waits for one instead. The device must be current.
  Lease acquire(std::uint64_t bytes, cudaStream_t stream);

 private:
  void give_back(Block* block, cudaStream_t stream, bool settled) noexcept;

  int device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace embermap::gpu
