// Copying rows between frames in registered host memory, the working set, and the caller's arrays. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace embermap::gpu {

// Rows of the working set that lie on pages with known frames. Row r has its record at
// slab + frames[page_index[r] - first_page] * page_bytes + slots[r] * stride + offset and its copy at working + r * row_bytes.
// `slab` is mapped host memory, everything else device memory; the arrays begin at the first of `rows` rows.
struct FrameRows {
  std::byte* slab;
  std::uint64_t page_bytes, stride, offset, row_bytes;
  const std::uint32_t* page_index;
  const std::uint32_t* slots;
  const std::uint32_t* frames;
  std::uint32_t first_page;
  std::byte* working;
  std::uint64_t rows;
};

// Frames to working set, and back. Few, large blocks: they fill the link and leave the multiprocessors to others. Enqueue.
void copy_from_frames(const FrameRows& rows, cudaStream_t stream);
void copy_to_frames(const FrameRows& rows, cudaStream_t stream);

// out[i] = working[inverse[i]] for `count` rows of row_bytes. Enqueues.
void expand_rows(const std::byte* working, const std::uint32_t* inverse, std::uint64_t count, std::uint64_t row_bytes,
                 std::byte* out, cudaStream_t stream);

// working[u] = in[positions[starts[u + 1] - 1]] for `distinct` rows of row_bytes: the last position wins. Enqueues.
void assign_rows(std::byte* working, const std::uint32_t* positions, const std::uint32_t* starts, std::uint64_t distinct,
                 std::uint64_t row_bytes, const std::byte* in, cudaStream_t stream);

}  // namespace embermap::gpu
