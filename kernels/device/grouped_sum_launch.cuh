// Launches the two kernels of grouped_sum.cuh for an Op.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/memory.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/device/grouped_sum.cuh"
#include "kernels/device/launch.cuh"

namespace embermap::gpu {

// `alignment`: addresses, strides and offsets that `op` uses, or-ed; `widest` the size of the largest item among them and the
// gradients.
template <class Op>
void sum_rows(const char* name, const Op& op, const SumRows& rows, std::uint64_t columns, const std::byte* in,
              std::uint64_t alignment, std::uint64_t widest, const MemoryPool& pool, cudaStream_t stream) {
  using Gradient = typename Op::Gradient;
  constexpr unsigned kThreads = 256;
  constexpr int kPack = sizeof(typename Op::Sum) > 4 ? 2 : 4;
  if (rows.distinct == 0 || columns == 0) return;

  const device::Groups groups{rows.positions, rows.starts};
  device::LongGroups longs{};
  DeviceBuffer list;
  const bool long_groups = rows.count > device::kLongGroup;
  if (long_groups) {
    list = DeviceBuffer(pool, (1 + rows.count / device::kLongGroup) * sizeof(std::uint32_t), stream);
    longs = {list.at<std::uint32_t>(0), list.at<std::uint32_t>(sizeof(std::uint32_t))};
    EMBERMAP_CUDA(cudaMemsetAsync(longs.count, 0, sizeof *longs.count, stream));
  }

  const auto* const gradients = reinterpret_cast<const Gradient*>(in);
  const auto run = [&](auto kernel, std::uint64_t packs) {
    const RowTiles tiles = RowTiles::over(rows.distinct, packs, 1);
    launch(name, kernel, grid(tiles.threads(), kThreads, 8), kThreads, stream, op, gradients, columns, groups, longs, tiles);
  };
  const bool packed = columns % kPack == 0 && alignment % (widest * kPack) == 0 &&
                      reinterpret_cast<std::uintptr_t>(in) % (sizeof(Gradient) * kPack) == 0;
  if (packed)
    run(device::sum_groups<kPack, Op>, columns / kPack);
  else
    run(device::sum_groups<1, Op>, columns);

  if (long_groups) {
    const std::uint64_t most = rows.count / device::kLongGroup * blocks_for(columns, 32);  // blocks with work, at most
    launch(name, device::sum_long_groups<Op>, grid(most * device::kLongThreads, device::kLongThreads, 2), device::kLongThreads,
           stream, op, gradients, columns, groups, longs);
  }
}

}  // namespace embermap::gpu
