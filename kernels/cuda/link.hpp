// The host's part in moving a batch's records over the link: threads copy rows between frames and pinned chunks, and one DMA
// stream carries the chunks. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/divider.hpp"
#include "base/thread_pool.hpp"
#include "kernels/cuda.hpp"
#include "kernels/cuda/row_move.hpp"

namespace embermap::gpu {

// Sizes of what lies in pinned memory. Chunks are what one DMA carries, pieces what one thread copies at a time.
struct LinkShape {
  std::uint64_t chunk_bytes = 2 << 20;
  std::uint64_t piece_bytes = 32 << 10;
  unsigned chunks = 8;
  unsigned ahead = 2;  // chunks on their way from the device before threads are there for them
};

// A DMA stream with its pinned chunks, for one batch at a time. Belongs to a device, which must be current wherever it is used.
class LinkLane {
 public:
  explicit LinkLane(const LinkShape& shape);  // throws CudaError where there is no memory to pin
  ~LinkLane();                                // waits for its stream
  LinkLane(const LinkLane&) = delete;
  LinkLane& operator=(const LinkLane&) = delete;

  const LinkShape& shape() const noexcept { return shape_; }
  cudaStream_t stream() const noexcept { return stream_; }
  std::byte* chunk(std::uint64_t slot) const noexcept { return chunks_ + slot * shape_.chunk_bytes; }
  cudaEvent_t event(std::uint64_t slot) const noexcept { return events_[slot]; }
  MeetingPoint* meeting() const noexcept { return meeting_; }
  MoveClaims* claims() const noexcept { return claims_; }

  // What comes on the lane's stream waits for what was enqueued on `stream` until now, and the other way round.
  void follow(cudaStream_t stream);
  void lead(cudaStream_t stream);
  // A kernel that uses the meeting point has been enqueued on `stream`.
  void has_kernel_on(cudaStream_t stream);
  // Waits until neither such a kernel nor the lane's stream has anything left to do. Before that the marks and chunks must stay
  // as they are: a kernel that saw the next transfer's mark would leave rows of its own to threads that know nothing of them.
  void wait();
  // Makes the meeting point ready for the next kernel, which then has all rows until threads take some. After wait().
  void reset() noexcept;

 private:
  void release() noexcept;
  LinkShape shape_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t order_ = nullptr;
  cudaEvent_t kernel_ = nullptr;  // behind the last kernel
  std::byte* chunks_ = nullptr;
  std::vector<cudaEvent_t> events_;
  MeetingPoint* meeting_ = nullptr;
  MoveClaims* claims_ = nullptr;
};

// Lanes of an engine, lent to one batch each. Thread-safe.
class LinkLanes {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : owner_{std::exchange(other.owner_, nullptr)}, lane_{other.lane_} {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(owner_, other.owner_);  // the old one ends with `other`
      std::swap(lane_, other.lane_);
      return *this;
    }
    ~Lease() {
      if (owner_ != nullptr) owner_->give_back(lane_);
    }
    explicit operator bool() const noexcept { return owner_ != nullptr; }
    LinkLane* operator->() const noexcept { return lane_; }
    LinkLane& operator*() const noexcept { return *lane_; }

   private:
    friend class LinkLanes;
    Lease(LinkLanes* owner, LinkLane* lane) noexcept : owner_{owner}, lane_{lane} {}
    LinkLanes* owner_ = nullptr;
    LinkLane* lane_ = nullptr;
  };

  // At most `most` lanes are made, when they are needed.
  LinkLanes(int device, const LinkShape& shape, unsigned most) noexcept : device_{device}, shape_{shape}, most_{most} {}
  ~LinkLanes();
  // An empty lease if all are lent, or no more memory can be pinned: the kernel then moves all rows. Rows of whoever had the lane
  // before may still be on their way: wait() before it is used.
  Lease acquire();
  const LinkShape& shape() const noexcept { return shape_; }

 private:
  void give_back(LinkLane* lane) noexcept;
  const int device_;
  const LinkShape shape_;
  const unsigned most_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<LinkLane>> lanes_;
  std::vector<LinkLane*> idle_;
  bool refused_ = false;
};

// Host addresses of the records of a batch's distinct rows.
class HostPlaces {
 public:
  // Page p lies in frame p: record of row r by its id keys[r].
  HostPlaces(const FrameSource& source, const void* keys, bool wide_keys, std::uint64_t offset);
  // Rows of pages whose frames are given: page p has the rows [starts[p], starts[p + 1]), counted from starts[0] on.
  HostPlaces(const FrameSource& source, const void* keys, bool wide_keys, std::uint64_t offset,
             std::span<const std::uint64_t> starts, std::span<const std::uint32_t> frames);

  // out[i] = where row begin + i has its bytes, for rows [begin, end).
  void addresses(std::uint64_t begin, std::uint64_t end, std::byte** out) const;

 private:
  std::uint64_t key(std::uint64_t row) const noexcept {
    return wide_keys_ ? static_cast<const std::uint64_t*>(keys_)[row] : static_cast<const std::uint32_t*>(keys_)[row];
  }
  std::byte* slab_;
  std::uint64_t page_bytes_, stride_, rows_per_page_;
  Divider page_of_;
  const void* keys_;
  bool wide_keys_;
  std::span<const std::uint64_t> starts_;
  std::span<const std::uint32_t> frames_;
};

// Moves rows [result, rows) and returns when they are copied (store), or copied and given to the lane's stream (fetch); from the
// last row downwards, until the kernel at the lane's meeting point has the rest. `alone`: there is no kernel, and all rows are
// moved. `working` is device memory that the lane's stream may use by then. Rows must fit a chunk. The meeting point must have
// been as LinkLane::reset() leaves it when the kernel was enqueued. The calling thread and up to `threads` - 1 of `pool` take
// part; one of them calls `meanwhile` first, if there are any rows, while the others begin; each calls `before` ahead of its
// first row. After an exception DMA may be under way: the lane has to be waited for.
std::uint64_t fetch_by_threads(LinkLane& lane, const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes,
                               std::byte* working, bool alone, ThreadPool& pool, unsigned threads,
                               const std::function<void()>& meanwhile = {}, const std::function<void()>& before = {});
// Rows below `least` are left to the kernel.
std::uint64_t store_by_threads(LinkLane& lane, const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes,
                               const std::byte* working, std::uint64_t least, bool alone, ThreadPool& pool, unsigned threads,
                               const std::function<void()>& meanwhile = {});

}  // namespace embermap::gpu
