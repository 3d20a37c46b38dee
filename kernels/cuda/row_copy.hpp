// Copying rows between the working set and the caller's arrays. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace embermap::gpu {

// out[i] = the first `bytes` of working[inverse[i]] for `count` rows; rows of `working` are row_bytes apart. Enqueues.
void expand_rows(const std::byte* working, std::uint64_t row_bytes, const std::uint32_t* inverse, std::uint64_t count,
                 std::uint64_t bytes, std::byte* out, cudaStream_t stream);

// out[i] = keys[inverse[i]], std::uint64_t if `wide` and std::uint32_t if not. Enqueues.
void expand_keys(const void* keys, bool wide, const std::uint32_t* inverse, std::uint64_t count, std::int64_t* out,
                 cudaStream_t stream);

// working[u] = in[positions[starts[u + 1] - 1]] for `distinct` rows of row_bytes: the last position wins. Enqueues.
void assign_rows(std::byte* working, const std::uint32_t* positions, const std::uint32_t* starts, std::uint64_t distinct,
                 std::uint64_t row_bytes, const std::byte* in, cudaStream_t stream);

}  // namespace embermap::gpu
