#include "kernels/cuda/row_move.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/runtime.hpp"
#include "kernels/device/launch.cuh"
#include "kernels/device/row_move.cuh"

namespace embermap::gpu {
namespace {

constexpr std::uint64_t kLine = 128;

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

template <bool kFromHost, class Places, class Rows>
void move(const char* name, const Places& places, const Rows& device_rows, const RowMove& m, const RowMoveShape& shape,
          cudaStream_t stream) {
  const RecordPlaces& p = m.places;
  if (m.rows == 0 || p.row_bytes == 0) return;
  const std::uint64_t host = address(p.slab) | p.page_bytes | p.stride | p.offset;
  const std::uint64_t alignment = host | address(m.last_of != nullptr ? m.last_of : m.working) | p.row_bytes;
  EMBERMAP_CUDA(cudaMemsetAsync(m.claimed, 0, sizeof *m.claimed, stream));
  const auto with = [&]<class V>(V) {
    const std::uint64_t length = p.row_bytes / sizeof(V);
    std::uint32_t line_mask = 0;
    RowTiles tiles = RowTiles::over(m.rows, length, device::kMoveSteps);
    if (host % kLine != 0 && (sizeof(V) << tiles.lanes_log2) >= kLine) {
      line_mask = kLine - 1;
      tiles = RowTiles::over(m.rows, length + kLine / sizeof(V) - 1, device::kMoveSteps);
    }
    const std::uint64_t claim = std::clamp<std::uint64_t>(shape.claim_bytes / p.row_bytes, 1, 4096);
    const std::uint64_t warps = blocks_for(m.rows, claim);
    const std::uint64_t blocks = std::min<std::uint64_t>(blocks_for(warps * 32, shape.threads), shape.blocks);
    launch(name, device::move_rows<V, kFromHost, Places, Rows>, blocks, shape.threads, stream, places, device_rows, tiles, length,
           line_mask, m.rows, m.exact, static_cast<std::uint32_t>(claim), m.claimed, m.meeting);
  };
  switch (std::min<std::uint64_t>(alignment & (~alignment + 1), 16)) {
    case 16: return with(uint4{});
    case 8: return with(uint2{});
    case 4: return with(std::uint32_t{});
    case 2: return with(std::uint16_t{});
    default: return with(std::uint8_t{});
  }
}

template <bool kFromHost, class Places>
void move(const char* name, const Places& places, const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  if constexpr (!kFromHost)
    if (m.last_of != nullptr)
      return move<kFromHost>(name, places, device::LastRows{m.last_of, m.places.row_bytes, m.positions, m.starts}, m, shape,
                             stream);
  move<kFromHost>(name, places, device::DenseRows{m.working, m.places.row_bytes}, m, shape, stream);
}

template <bool kFromHost>
void move(const char* name, const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  const RecordPlaces& p = m.places;
  std::byte* const first = p.slab + p.offset;
  if (!p.whole) {
    const device::FramePlaces places{first, p.page_bytes, p.stride, p.page_index, p.slots, p.frames, p.first_page};
    if constexpr (kFromHost)
      if (p.some) return move<kFromHost>(name, device::SomeFramePlaces{places}, m, shape, stream);
    return move<kFromHost>(name, places, m, shape, stream);
  }
  const auto with = [&]<class Key>(Key) {
    const int shift = std::has_single_bit(p.rows_per_page) ? std::countr_zero(p.rows_per_page) : -1;
    move<kFromHost>(name,
                    device::WholePlaces<Key>{first, p.page_bytes, p.stride, static_cast<const Key*>(p.keys),
                                             device::PageOf{p.rows_per_page, shift}, p.page_bytes - p.rows_per_page * p.stride},
                    m, shape, stream);
  };
  if (p.wide_keys) return with(std::uint64_t{});
  return with(std::uint32_t{});
}

}  // namespace

void move_from_frames(const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  move<true>("move_from_frames", m, shape, stream);
}

void move_to_frames(const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  move<false>("move_to_frames", m, shape, stream);
}

}  // namespace embermap::gpu
