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
constexpr std::uint64_t kMostFewBlocks = 24;  // that move rows of few ids

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

struct LineTiles {
  RowTiles tiles;
  std::uint32_t line_mask;  // see move_rows
};

// Of rows of `length` elements of `size` bytes; all their addresses in host memory are multiples of the lowest bit of `host`.
LineTiles tiles_for(std::uint64_t rows, std::uint64_t length, std::uint64_t size, std::uint64_t host) {
  const RowTiles tiles = RowTiles::over(rows, length, device::kMoveSteps);
  if (host % kLine == 0 || (size << tiles.lanes_log2) < kLine) return {tiles, 0};
  return {RowTiles::over(rows, length + kLine / size - 1, device::kMoveSteps), kLine - 1};
}

// Calls with(V{}) for the largest element that the lowest bit of `alignment` allows.
template <class With>
void with_elements(std::uint64_t alignment, const With& with) {
  switch (std::min<std::uint64_t>(alignment & (~alignment + 1), 16)) {
    case 16: return with(uint4{});
    case 8: return with(uint2{});
    case 4: return with(std::uint32_t{});
    case 2: return with(std::uint16_t{});
    default: return with(std::uint8_t{});
  }
}

template <class Key>
device::WholePlaces<Key> whole_places(const RecordPlaces& p) {
  const int shift = std::has_single_bit(p.rows_per_page) ? std::countr_zero(p.rows_per_page) : -1;
  return {p.slab + p.offset,
          p.page_bytes,
          p.stride,
          static_cast<const Key*>(p.keys),
          device::PageOf{p.rows_per_page, shift},
          p.page_bytes - p.rows_per_page * p.stride};
}

template <bool kFromHost, class Places, class Rows>
void move(const char* name, const Places& places, const Rows& device_rows, const RowMove& m, const RowMoveShape& shape,
          cudaStream_t stream) {
  const RecordPlaces& p = m.places;
  if (m.rows == 0 || p.row_bytes == 0) return;
  const std::uint64_t host = address(p.slab) | p.page_bytes | p.stride | p.offset;
  const std::uint64_t alignment = host | address(m.last_of != nullptr ? m.last_of : m.working) | p.row_bytes;
  with_elements(alignment, [&]<class V>(V) {
    const std::uint64_t length = p.row_bytes / sizeof(V);
    const auto [tiles, line_mask] = tiles_for(m.rows, length, sizeof(V), host);
    const std::uint64_t claim = std::clamp<std::uint64_t>(shape.claim_bytes / p.row_bytes, 1, 4096);
    const std::uint64_t warps = blocks_for(m.rows, claim);
    const std::uint64_t blocks = std::min<std::uint64_t>(blocks_for(warps * 32, shape.threads), shape.blocks);
    launch(name, device::move_rows<V, kFromHost, Places, Rows>, blocks, shape.threads, stream, places, device_rows, tiles, length,
           line_mask, m.rows, m.exact, static_cast<std::uint32_t>(claim), m.claims, m.meeting);
  });
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
  if (!p.whole) {
    const device::FramePlaces places{p.slab + p.offset, p.page_bytes, p.stride, p.page_index, p.slots, p.frames, p.first_page};
    return move<kFromHost>(name, places, m, shape, stream);
  }
  if (p.wide_keys) return move<kFromHost>(name, whole_places<std::uint64_t>(p), m, shape, stream);
  move<kFromHost>(name, whole_places<std::uint32_t>(p), m, shape, stream);
}

}  // namespace

void move_from_frames(const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  move<true>("move_from_frames", m, shape, stream);
}

void move_to_frames(const RowMove& m, const RowMoveShape& shape, cudaStream_t stream) {
  move<false>("move_to_frames", m, shape, stream);
}

void gather_few(const RecordPlaces& p, std::uint32_t count, std::uint64_t rows, std::byte* out, GroupReport* report,
                cudaStream_t stream) {
  if (count == 0 || p.row_bytes == 0) return;
  const std::uint64_t host = address(p.slab) | p.page_bytes | p.stride | p.offset;
  with_elements(host | address(out) | p.row_bytes, [&]<class V>(V) {
    const std::uint64_t length = p.row_bytes / sizeof(V);
    const auto [tiles, line_mask] = tiles_for(count, length, sizeof(V), host);
    const std::uint64_t blocks = std::min(blocks_for(tiles.threads(), device::kFewThreads), kMostFewBlocks);
    launch("gather_few", device::gather_few<V>, 1 + blocks, device::kFewThreads, stream, static_cast<const std::int64_t*>(p.keys),
           count, rows, whole_places<std::uint64_t>(p), device::DenseRows{out, p.row_bytes}, tiles, length, line_mask, report);
  });
}

}  // namespace embermap::gpu
