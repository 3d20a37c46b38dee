#include "kernels/cuda/row_copy.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/runtime.hpp"
#include "kernels/device/launch.cuh"
#include "kernels/device/row_copy.cuh"

namespace embermap::gpu {
namespace {

constexpr std::uint64_t kLine = 128;

// Over the link: translation of host addresses, not threads, is the limit, and more blocks only disturb each other.
constexpr unsigned kLinkThreads = 1024;
constexpr std::uint64_t kLinkBlocks = 16;

// Inside device memory.
constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 8;

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// `alignment`: all addresses, strides and lengths of the copy, or-ed; its lowest bit is what all are multiples of.
template <class Map>
void copy(const char* name, const Map& map, std::uint64_t rows, std::uint64_t row_bytes, std::uint64_t alignment, bool over_link,
          bool lines_aligned, cudaStream_t stream) {
  if (rows == 0 || row_bytes == 0) return;
  const auto with = [&]<class V>(V) {
    const std::uint64_t length = row_bytes / sizeof(V);
    std::uint32_t line_mask = 0;
    RowTiles tiles = RowTiles::over(rows, length, device::kCopySteps);
    if (over_link && !lines_aligned && (sizeof(V) << tiles.lanes_log2) >= kLine) {
      line_mask = kLine - 1;
      tiles = RowTiles::over(rows, length + kLine / sizeof(V) - 1, device::kCopySteps);
    }
    const std::uint64_t threads = tiles.threads();
    if (over_link)
      launch(name, device::copy_rows<V, Map>, std::min(blocks_for(threads, kLinkThreads), kLinkBlocks), kLinkThreads, stream, map,
             tiles, length, line_mask);
    else
      launch(name, device::copy_rows<V, Map>, grid(threads, kThreads, kBlocksPerMultiprocessor), kThreads, stream, map, tiles,
             length, line_mask);
  };
  switch (std::min<std::uint64_t>(alignment & (~alignment + 1), 16)) {
    case 16: return with(uint4{});
    case 8: return with(uint2{});
    case 4: return with(std::uint32_t{});
    case 2: return with(std::uint16_t{});
    default: return with(std::uint8_t{});
  }
}

template <bool kFromHost>
void copy_frames(const char* name, const FrameRows& f, cudaStream_t stream) {
  const std::uint64_t host = address(f.slab) | f.page_bytes | f.stride | f.offset;
  copy(name, device::FrameMap<kFromHost>{f}, f.rows, f.row_bytes, host | address(f.working) | f.row_bytes, true,
       host % kLine == 0, stream);
}

}  // namespace

void copy_from_frames(const FrameRows& rows, cudaStream_t stream) { copy_frames<true>("copy_from_frames", rows, stream); }

void copy_to_frames(const FrameRows& rows, cudaStream_t stream) { copy_frames<false>("copy_to_frames", rows, stream); }

void expand_rows(const std::byte* working, const std::uint32_t* inverse, std::uint64_t count, std::uint64_t row_bytes,
                 std::byte* out, cudaStream_t stream) {
  copy("expand_rows", device::ExpandMap{working, inverse, row_bytes, out}, count, row_bytes,
       address(working) | address(out) | row_bytes, false, false, stream);
}

void assign_rows(std::byte* working, const std::uint32_t* positions, const std::uint32_t* starts, std::uint64_t distinct,
                 std::uint64_t row_bytes, const std::byte* in, cudaStream_t stream) {
  copy("assign_rows", device::AssignMap{working, positions, starts, row_bytes, in}, distinct, row_bytes,
       address(working) | address(in) | row_bytes, false, false, stream);
}

}  // namespace embermap::gpu
