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

// kFromHost: out of the frames; otherwise into them. host_side() is the address whose 128-byte lines the copy keeps together.
template <bool kFromHost>
struct FrameMap {
  FrameRows f;

  __device__ RowPair operator()(std::uint64_t row) const {
    const std::uint64_t frame = f.frames[f.page_index[row] - f.first_page];
    std::byte* const host = f.slab + frame * f.page_bytes + f.slots[row] * f.stride + f.offset;
    std::byte* const working = f.working + row * f.row_bytes;
    return kFromHost ? RowPair{host, working} : RowPair{working, host};
  }
  __device__ static const std::byte* host_side(const RowPair& pair) { return kFromHost ? pair.from : pair.to; }
};

struct ExpandMap {
  const std::byte* working;
  const std::uint32_t* inverse;
  std::uint64_t row_bytes;
  std::byte* out;

  __device__ RowPair operator()(std::uint64_t row) const { return {working + inverse[row] * row_bytes, out + row * row_bytes}; }
  __device__ static const std::byte* host_side(const RowPair& pair) { return pair.to; }
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
  __device__ static const std::byte* host_side(const RowPair& pair) { return pair.to; }
};

inline constexpr int kCopySteps = 4;  // elements a lane has in flight

// Copies `length` elements of type V a row. `line_mask` is 127 where rows may begin inside a 128-byte line and lanes are enough
// to cover one: the lanes then start at the line's beginning, the first ones idle, so that each request of the group is whole
// lines of host memory; `t` has been made for the longer row. Otherwise it is 0.
template <class V, class Map>
__global__ void __launch_bounds__(1024) copy_rows(Map map, RowTiles t, std::uint64_t length, std::uint32_t line_mask) {
  const LaneGroup group(t);
  std::uint64_t item = group.first;
  if (item >= t.items) return;
  RowTile place(t, item);
  RowPair pair = map(place.row);
  for (;;) {
    const auto skew = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(Map::host_side(pair)) & line_mask) / sizeof(V);
    // May wrap below 0 for idle lanes; it is then larger than any length.
    const std::uint64_t first = place.tile * (std::uint64_t{group.lanes} * kCopySteps) + group.lane - skew;
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

}  // namespace embermap::gpu::device
