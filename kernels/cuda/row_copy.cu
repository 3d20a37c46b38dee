#include "kernels/cuda/row_copy.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/runtime.hpp"
#include "kernels/device/launch.cuh"
#include "kernels/device/row_copy.cuh"

namespace embermap::gpu {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 8;

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// `alignment`: all addresses and lengths of the copy, or-ed; its lowest bit is what all are multiples of.
template <class Map>
void copy(const char* name, const Map& map, std::uint64_t rows, std::uint64_t row_bytes, std::uint64_t alignment,
          cudaStream_t stream) {
  if (rows == 0 || row_bytes == 0) return;
  const auto with = [&]<class V>(V) {
    const std::uint64_t length = row_bytes / sizeof(V);
    const RowTiles tiles = RowTiles::over(rows, length, device::kCopySteps);
    launch(name, device::copy_rows<V, Map>, grid(tiles.threads(), kThreads, kBlocksPerMultiprocessor), kThreads, stream, map,
           tiles, length);
  };
  switch (std::min<std::uint64_t>(alignment & (~alignment + 1), 16)) {
    case 16: return with(uint4{});
    case 8: return with(uint2{});
    case 4: return with(std::uint32_t{});
    case 2: return with(std::uint16_t{});
    default: return with(std::uint8_t{});
  }
}

}  // namespace

void expand_rows(const std::byte* working, std::uint64_t row_bytes, const std::uint32_t* inverse, std::uint64_t count,
                 std::uint64_t bytes, std::byte* out, cudaStream_t stream) {
  copy("expand_rows", device::ExpandMap{working, inverse, row_bytes, bytes, out}, count, bytes,
       address(working) | address(out) | row_bytes | bytes, stream);
}

void expand_keys(const void* keys, bool wide, const std::uint32_t* inverse, std::uint64_t count, std::int64_t* out,
                 cudaStream_t stream) {
  if (count == 0) return;
  const std::uint64_t blocks = grid(count, kThreads, kBlocksPerMultiprocessor);
  if (wide)
    launch("expand_keys", device::expand_keys<std::uint64_t>, blocks, kThreads, stream, static_cast<const std::uint64_t*>(keys),
           inverse, count, out);
  else
    launch("expand_keys", device::expand_keys<std::uint32_t>, blocks, kThreads, stream, static_cast<const std::uint32_t*>(keys),
           inverse, count, out);
}

void assign_rows(std::byte* working, const std::uint32_t* positions, const std::uint32_t* starts, std::uint64_t distinct,
                 std::uint64_t row_bytes, const std::byte* in, cudaStream_t stream) {
  copy("assign_rows", device::AssignMap{working, positions, starts, row_bytes, in}, distinct, row_bytes,
       address(working) | address(in) | row_bytes, stream);
}

}  // namespace embermap::gpu
