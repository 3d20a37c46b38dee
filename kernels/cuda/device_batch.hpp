// A batch of ids on the device, as the engine sees it. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "kernels/cuda.hpp"
#include "kernels/cuda/events.hpp"
#include "kernels/cuda/group_ids.hpp"
#include "kernels/cuda/link.hpp"
#include "kernels/cuda/memory.hpp"
#include "kernels/cuda/row_patch.hpp"
#include "kernels/cuda/runtime.hpp"

namespace embermap::gpu {

inline constexpr unsigned kLanes = 4;  // batches whose rows are moved by threads at the same time

// What batches go on using when their engine has ended.
struct Shared {
  explicit Shared(int device) : pool{device}, staging{device}, lanes{device, LinkShape{}, kLanes}, events{device} {}
  MemoryPool pool;
  StagingPool staging;
  LinkLanes lanes;
  EventPool events;
  // Kernels of few blocks, which wait for the link: among a product's many they would wait for a place first.
  OwnStream back{true};   // of write_back_behind()
  OwnStream ahead{true};  // of fetch_ahead()
  // Nothing is enqueued here: what is freed in its order, the host having seen the end of its last use, can be given out at once.
  OwnStream idle;
};

// Waits until a kernel has written the word to the lease's memory, the lease having been marked behind the kernel. An event
// takes microseconds longer to be seen.
inline void wait_for(std::uint32_t& word, const StagingPool::Lease& lease) {
  for (unsigned looks = 1; std::atomic_ref(word).load(std::memory_order_acquire) == 0; ++looks) {
    if (looks % 256 != 0) continue;
    if (lease.passed()) return;  // or the device has failed, which is thrown
    std::this_thread::yield();
  }
}

class DeviceBatch final : public CudaBatch {
 public:
  ~DeviceBatch() override {
    // The lane's chunks are for the next batch.
    if (lane && !in_forked_child()) check_teardown(cudaStreamSynchronize(lane->stream()), "cudaStreamSynchronize");
  }
  const void* engine = nullptr;
  std::shared_ptr<Shared> shared;  // before all that comes from it
  cudaStream_t stream = nullptr;
  std::uint64_t rows_per_page = 0;
  bool wide_keys = false;
  bool whole = false;             // made by begin_batch()
  DeviceBuffer memory;            // `header` and the arrays of `groups`
  GroupHeader* header = nullptr;  // of begin_batch()
  IdGroups groups;
  // Of begin_batch() and gather(): what the caller gave, as long as the stream has not passed the sort.
  const std::int64_t* ids = nullptr;
  std::uint64_t rows = 0;
  std::string table;
  StagingPool::Lease ids_on_host;
  StagingPool::Lease bad_on_host;    // of begin_batch(): the position of a bad id, until check()
  StagingPool::Lease pages_on_host;  // of gather(): how many there are
  StagingPool::Lease keys_on_host;   // of a whole table: with the header before them
  bool reported = false;             // by a kernel, as a GroupReport
  const void* host_keys = nullptr;   // distinct ids, ascending; once settled
  bool settled = false;              // they are there
  bool uncounted = false;            // a kernel moved all rows, not counted in `moved`
  bool uncounted_pages = false;      // nobody has asked for the pages yet
  Moved moved;
  EventPool::Lease began;  // when its first rows were enqueued
  std::uint64_t key_bytes() const noexcept { return wide_keys ? sizeof(std::uint64_t) : sizeof(std::uint32_t); }
  LinkLanes::Lease lane;  // once threads have moved rows

  DeviceBuffer working;  // distinct x bytes, from the first fetch or reserve on
  bool has_working = false;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t working_bytes = 0;

  // Rows [0, distinct) of the working set by their ids.
  KeyedRows keyed() const {
    return {.rows = working.data(),
            .row_bytes = bytes,
            .keys = groups.keys,
            .wide_keys = wide_keys,
            .count = settled ? distinct : count,
            .exact = settled ? nullptr : &header->movable};
  }
};

}  // namespace embermap::gpu
