// Rows whose newest bytes are still on their way back to their frames. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace embermap::gpu {

// Rows by their ids: row r, `row_bytes` from one to the next, is of id keys[r], std::uint64_t or std::uint32_t.
struct KeyedRows {
  std::byte* rows;
  std::uint64_t row_bytes;
  const void* keys;
  bool wide_keys;
  std::uint64_t count;         // at most
  const std::uint64_t* exact;  // null, or how many there are (device memory)
};

// Bytes [to, to + bytes) of each of `rows` whose id is among the ids of `newer`, which ascend, become bytes [from, from + bytes)
// of that row there. Enqueues.
void patch_rows(const KeyedRows& rows, std::uint64_t to, const KeyedRows& newer, std::uint64_t from, std::uint64_t bytes,
                cudaStream_t stream);

}  // namespace embermap::gpu
