// One kernel that copies rows; maps say from where to where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/row_copy.hpp"
#include "kernels/device/row_tiles.cuh"

namespace embermap::gpu::device {

struct RowPair {
  const std::byte* from;
  std::byte* to;
};

struct ExpandMap {
  const std::byte* working;
  const std::uint32_t* inverse;
  std::uint64_t row_bytes, bytes;
  std::byte* out;

  __device__ RowPair operator()(std::uint64_t row) const { return {working + inverse[row] * row_bytes, out + row * bytes}; }
};

struct AssignMap {
  std::byte* working;
  const std::uint32_t* positions;
  const std::uint32_t* starts;
  std::uint64_t row_bytes;
  const std::byte* in;

  __device__ RowPair operator()(std::uint64_t row) const {
    return {in + positions[starts[row + 1] - 1U] * row_bytes, working + row * row_bytes};
  }
};

inline constexpr int kCopySteps = 4;  // elements a lane has in flight

// Copies `length` elements of type V a row.
template <class V, class Map>
__global__ void __launch_bounds__(256) copy_rows(Map map, RowTiles t, std::uint64_t length) {
  const LaneGroup group(t);
  std::uint64_t item = group.first;
  if (item >= t.items) return;
  RowTile place(t, item);
  RowPair pair = map(place.row);
  for (;;) {
    const std::uint64_t first = place.tile * (std::uint64_t{group.lanes} * kCopySteps) + group.lane;
    const V* const from = reinterpret_cast<const V*>(pair.from);
    V* const to = reinterpret_cast<V*>(pair.to);
    V held[kCopySteps];
#pragma unroll
    for (int s = 0; s < kCopySteps; ++s) {
      const std::uint64_t i = first + static_cast<std::uint64_t>(s) * group.lanes;
      if (i < length) held[s] = from[i];
    }
    // The next row's address comes from dependent loads: fetched while this row is under way.
    item += group.step;
    const bool more = item < t.items;
    RowTile next_place = place;
    RowPair next_pair = pair;
    if (more) {
      next_place = RowTile(t, item);
      next_pair = map(next_place.row);
    }
#pragma unroll
    for (int s = 0; s < kCopySteps; ++s) {
      const std::uint64_t i = first + static_cast<std::uint64_t>(s) * group.lanes;
      if (i < length) to[i] = held[s];
    }
    if (!more) return;
    place = next_place;
    pair = next_pair;
  }
}

template <class Key>
__global__ void __launch_bounds__(256)
    expand_keys(const Key* keys, const std::uint32_t* inverse, std::uint64_t count, std::int64_t* out) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    out[i] = static_cast<std::int64_t>(keys[inverse[i]]);
}

}  // namespace embermap::gpu::device
