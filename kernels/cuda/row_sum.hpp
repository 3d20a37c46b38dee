// Adding gradients to, and taking optimizer steps on, the rows of a working set. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/cuda/memory.hpp"
#include "kernels/optimizer.hpp"

namespace embermap::gpu {

// Rows of a working set with the positions of each, see IdGroups. All device memory; `working` and row_bytes are aligned to the
// rows' items, `in` of the calls below to its own.
struct SumRows {
  std::byte* working;
  std::uint64_t row_bytes;
  const std::uint32_t* positions;
  const std::uint32_t* starts;
  std::uint64_t distinct;
  std::uint64_t count;         // positions
  const void* keys = nullptr;  // ids, of std::uint64_t if wide_keys, else std::uint32_t; of steps only
  bool wide_keys = false;
};

// working[u][0, dim) += sum of in[p][0, dim) over the positions p of u. Enqueues.
void add_grouped(const SumRows& rows, std::uint64_t dim, DType dtype, const std::byte* in, const MemoryPool& pool,
                 cudaStream_t stream);

// One optimizer step on the records working[u] with the sum of grads[p]. The pair of dtypes has been checked. Enqueues.
void step_grouped(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                  DType grad_dtype, const MemoryPool& pool, cudaStream_t stream);

}  // namespace embermap::gpu
