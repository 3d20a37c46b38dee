// The ids of one batch, sorted and made distinct, on the host. The CUDA counterpart is CudaBatch in kernels/cuda.hpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"

namespace embermap {

// The distinct keys of a sequence, ascending, and for each the places where it stood, ascending:
// group u is positions[starts[u] .. starts[u + 1]).
struct Batch {
  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> positions;
  std::vector<std::uint32_t> starts;  // keys.size() + 1 entries

  std::uint64_t distinct() const noexcept { return keys.size(); }
};

// Most ids in one call that must group them (scatter, add, update). gather has no such limit.
inline constexpr std::uint64_t kMaxBatch = 0xFFFFFFFEU;

// Stable radix sort over only the digits in which the keys differ, then grouping. O(n) time, about 40 n bytes of scratch.
// Throws InvalidArgument above kMaxBatch.
Batch make_batch(std::span<const std::uint64_t> keys, ThreadPool& pool);

// The position of the first id outside [0, rows), if there is one.
std::optional<std::uint64_t> first_bad_id(std::span<const std::int64_t> ids, std::uint64_t rows) noexcept;
// The same by the pool's threads.
std::optional<std::uint64_t> first_bad_id(std::span<const std::int64_t> ids, std::uint64_t rows, ThreadPool& pool);
// least = min(least, value), for threads that share a search.
void keep_least(std::atomic<std::uint64_t>& least, std::uint64_t value) noexcept;

}  // namespace embermap
