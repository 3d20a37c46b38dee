// Rows that are overwritten where another set of rows, sorted by id, has the same id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/row_patch.hpp"

namespace embermap::gpu::device {

__device__ inline std::uint64_t key_of(const void* keys, bool wide, std::uint64_t i) {
  return wide ? static_cast<const std::uint64_t*>(keys)[i] : static_cast<const std::uint32_t*>(keys)[i];
}

// A warp for a row. `length` elements of type V.
template <class V>
__global__ void __launch_bounds__(256)
    patch_rows(KeyedRows rows, std::uint64_t to, KeyedRows newer, std::uint64_t from, std::uint64_t length) {
  const std::uint32_t lane = threadIdx.x & 31U;
  const std::uint64_t step = (std::uint64_t{gridDim.x} * blockDim.x) >> 5;
  std::uint64_t count = rows.count;
  if (rows.exact != nullptr && *rows.exact < count) count = *rows.exact;
  for (std::uint64_t row = (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> 5; row < count; row += step) {
    const std::uint64_t key = key_of(rows.keys, rows.wide_keys, row);
    std::uint64_t low = 0;
    std::uint64_t high = newer.count;
    while (low < high) {
      const std::uint64_t middle = (low + high) / 2;
      if (key_of(newer.keys, newer.wide_keys, middle) < key)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == newer.count || key_of(newer.keys, newer.wide_keys, low) != key) continue;
    const V* const source = reinterpret_cast<const V*>(newer.rows + low * newer.row_bytes + from);
    V* const target = reinterpret_cast<V*>(rows.rows + row * rows.row_bytes + to);
    for (std::uint64_t i = lane; i < length; i += 32) target[i] = source[i];
  }
}

}  // namespace embermap::gpu::device
