#include "kernels/cuda/row_patch.hpp"

#include <algorithm>

#include "kernels/cuda/runtime.hpp"
#include "kernels/device/launch.cuh"
#include "kernels/device/row_patch.cuh"

namespace embermap::gpu {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 4;

}  // namespace

void patch_rows(const KeyedRows& rows, std::uint64_t to, const KeyedRows& newer, std::uint64_t from, std::uint64_t bytes,
                cudaStream_t stream) {
  if (rows.count == 0 || newer.count == 0 || bytes == 0) return;
  const std::uint64_t alignment = reinterpret_cast<std::uintptr_t>(rows.rows) | reinterpret_cast<std::uintptr_t>(newer.rows) |
                                  rows.row_bytes | newer.row_bytes | to | from | bytes;
  const auto with = [&]<class V>(V) {
    launch("patch_rows", device::patch_rows<V>, grid(rows.count * 32, kThreads, kBlocksPerMultiprocessor), kThreads, stream, rows,
           to, newer, from, bytes / sizeof(V));
  };
  switch (std::min<std::uint64_t>(alignment & (~alignment + 1), 16)) {
    case 16: return with(uint4{});
    case 8: return with(uint2{});
    case 4: return with(std::uint32_t{});
    case 2: return with(std::uint16_t{});
    default: return with(std::uint8_t{});
  }
}

}  // namespace embermap::gpu
