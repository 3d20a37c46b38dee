// Sums of the gradients of each distinct id, and what is done with them. Every sum is made in ascending order of position, one
// addition after the other, as the CPU makes it: the same bits, whatever the launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/half.hpp"
#include "kernels/device/row_tiles.cuh"

namespace embermap::gpu::device {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

// What added to x gives x, also where x is -0: a sum that begins with it begins with its first addend.
template <class Sum>
__device__ inline Sum nothing() {
  if constexpr (std::is_floating_point_v<Sum>) return Sum(-0.0);
  return Sum(0);
}

// Groups of positions, see IdGroups.
struct Groups {
  const std::uint32_t* positions;
  const std::uint32_t* starts;
};

// Rows with many positions, found by sum_groups and left to sum_long_groups: one warp would take milliseconds for them.
struct LongGroups {
  std::uint32_t* count;  // begins as 0
  std::uint32_t* rows;
};
inline constexpr std::uint32_t kLongGroup = 256;

// An Op has the types Gradient (of the input) and Sum, and apply<kCount>(row, column, sums), which uses the sums of kCount
// neighbouring columns. Columns are dealt in packs of kCount; `columns` is a multiple of it, and everything Op touches is aligned
// to its packs.
template <int kCount, class Op>
__global__ void __launch_bounds__(256)
    sum_groups(Op op, const typename Op::Gradient* in, std::uint64_t columns, Groups groups, LongGroups longs, RowTiles t) {
  using Sum = typename Op::Sum;
  using Gradients = Pack<typename Op::Gradient, kCount>;
  constexpr std::uint32_t kAhead = 8;  // gradients in flight; the additions wait for one another, the loads need not
  const std::uint64_t packs = columns / kCount;
  const auto* const rows = reinterpret_cast<const Gradients*>(in);
  const LaneGroup group(t);
  for (std::uint64_t item = group.first; item < t.items; item += group.step) {
    const RowTile place(t, item);
    std::uint32_t k = groups.starts[place.row];
    const std::uint32_t end = groups.starts[place.row + 1];
    if (end - k > kLongGroup) {
      if (place.tile == 0 && group.lane == 0) longs.rows[atomicAdd(longs.count, 1U)] = static_cast<std::uint32_t>(place.row);
      continue;
    }
    const std::uint64_t pack = place.tile * group.lanes + group.lane;
    if (pack >= packs) continue;
    Sum sum[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) sum[c] = nothing<Sum>();
    for (; end - k >= kAhead; k += kAhead) {
      Gradients ahead[kAhead];
#pragma unroll
      for (std::uint32_t a = 0; a < kAhead; ++a) ahead[a] = rows[groups.positions[k + a] * packs + pack];
#pragma unroll
      for (std::uint32_t a = 0; a < kAhead; ++a)
#pragma unroll
        for (int c = 0; c < kCount; ++c) sum[c] = static_cast<Sum>(sum[c] + static_cast<Sum>(ahead[a].at[c]));
    }
    for (; k < end; ++k) {
      const Gradients one = rows[groups.positions[k] * packs + pack];
#pragma unroll
      for (int c = 0; c < kCount; ++c) sum[c] = static_cast<Sum>(sum[c] + static_cast<Sum>(one.at[c]));
    }
    op.template apply<kCount>(place.row, pack * kCount, sum);
  }
}

inline constexpr std::uint32_t kProducers = 16;                  // warps that load
inline constexpr unsigned kLongThreads = (kProducers + 1) * 32;  // and one that adds
template <class Sum>
inline constexpr std::uint32_t kLoadsAhead = sizeof(Sum) > 4 ? 4 : 8;  // of each producer's thread; keeps the stages at 32 KiB

// One block takes 32 columns of a long group. The producers bring a stage of gradients into shared memory while the adder adds
// the stage before in order: the chain of additions runs at the speed of shared memory, not of one load after the other.
template <class Op>
__global__ void __launch_bounds__(kLongThreads)
    sum_long_groups(Op op, const typename Op::Gradient* in, std::uint64_t columns, Groups groups, LongGroups longs) {
  using Gradient = typename Op::Gradient;
  using Sum = typename Op::Sum;
  constexpr std::uint32_t kAhead = kLoadsAhead<Sum>;
  constexpr std::uint32_t kStage = kProducers * kAhead;  // gradient rows of a stage
  __shared__ Sum stages[2][kStage][32];

  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const bool adder = warp == kProducers;
  const std::uint64_t tiles = columns / 32 + (columns % 32 != 0);
  const std::uint64_t items = *longs.count * tiles;
  std::uint32_t turn = 0;  // runs on from group to group: the adder may still read the last stage when the next group begins
  for (std::uint64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const std::uint32_t row = longs.rows[item / tiles];
    const std::uint64_t column = (item % tiles) * 32 + lane;
    const bool inside = column < columns;
    const std::uint32_t begin = groups.starts[row];
    const std::uint32_t length = groups.starts[row + 1] - begin;

    // Positions are fetched one stage ahead of the gradients they lead to. Row a * kProducers + warp of a stage is this warp's.
    std::uint32_t positions[kAhead] = {};
    const auto fetch_positions = [&](std::uint64_t stage_begin) {
#pragma unroll
      for (std::uint32_t a = 0; a < kAhead; ++a) {
        const std::uint64_t k = stage_begin + a * kProducers + warp;
        if (k < length) positions[a] = groups.positions[begin + k];
      }
    };
    if (!adder) fetch_positions(0);

    Sum sum = nothing<Sum>();
    for (std::uint64_t stage_begin = 0; stage_begin < length; stage_begin += kStage, ++turn) {
      Sum(&stage)[kStage][32] = stages[turn % 2];
      if (!adder) {
        Gradient ahead[kAhead];
#pragma unroll
        for (std::uint32_t a = 0; a < kAhead; ++a)
          if (inside && stage_begin + a * kProducers + warp < length) ahead[a] = in[positions[a] * columns + column];
        fetch_positions(stage_begin + kStage);
#pragma unroll
        for (std::uint32_t a = 0; a < kAhead; ++a)
          if (inside && stage_begin + a * kProducers + warp < length)
            stage[a * kProducers + warp][lane] = static_cast<Sum>(ahead[a]);
      }
      // One barrier a stage is enough: a stage is written again two turns later, behind the next barrier, which the adder reaches
      // only after it has read this stage.
      __syncthreads();
      if (adder && inside) {
        if (length - stage_begin >= kStage) {
#pragma unroll 16
          for (std::uint32_t r = 0; r < kStage; ++r) sum = static_cast<Sum>(sum + stage[r][lane]);
        } else {
          for (std::uint32_t r = 0; r < length - stage_begin; ++r) sum = static_cast<Sum>(sum + stage[r][lane]);
        }
      }
    }
    if (adder && inside) {
      const Sum sums[1] = {sum};
      op.template apply<1>(std::uint64_t{row}, column, sums);
    }
  }
}

}  // namespace embermap::gpu::device
