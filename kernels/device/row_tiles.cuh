// How the elements of rows are dealt to threads: a row is cut into tiles, and each tile goes to a group of 1, 2, 4, ..., 32
// neighbouring lanes. Narrow rows thus share a warp, wide rows spread over many.
#pragma once

#include <bit>
#include <cstdint>

namespace embermap::gpu {

struct RowTiles {
  std::uint64_t items;  // tiles of all rows; 0 if there are no rows
  std::uint64_t tiles;  // of one row
  std::uint32_t lanes_log2;

  // `width` places in a row, of which each lane takes up to `per_lane` in a tile. Places are bytes or more of arrays in memory,
  // so that neither the tiles nor their threads can overflow 64 bits.
  static RowTiles over(std::uint64_t rows, std::uint64_t width, std::uint64_t per_lane) {
    RowTiles out{};
    out.lanes_log2 = width >= 32 ? 5U : static_cast<std::uint32_t>(std::bit_width(width - 1));
    const std::uint64_t tile = per_lane << out.lanes_log2;
    out.tiles = width / tile + (width % tile != 0);
    out.items = rows * out.tiles;
    return out;
  }
  std::uint64_t threads() const { return items << lanes_log2; }
};

// This thread's place in the grid: its lane in its group, its group, and how many groups there are.
struct LaneGroup {
  std::uint32_t lane, lanes;
  std::uint64_t first, step;

  __device__ explicit LaneGroup(const RowTiles& t)
      : lane{threadIdx.x & ((1U << t.lanes_log2) - 1U)},
        lanes{1U << t.lanes_log2},
        first{(std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> t.lanes_log2},
        step{(std::uint64_t{gridDim.x} * blockDim.x) >> t.lanes_log2} {}
};

struct RowTile {
  std::uint64_t row, tile;

  __device__ RowTile(const RowTiles& t, std::uint64_t item) : row{item}, tile{0} {
    if (t.tiles != 1) {  // spares most rows the division
      row = item / t.tiles;
      tile = item - row * t.tiles;
    }
  }
};

}  // namespace embermap::gpu
