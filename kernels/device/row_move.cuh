// The kernel that moves records over the link. Its warps take a few rows at a time from a common counter, in ascending order, so
// that the host addresses in use at any moment lie close together: translating them is what limits it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/row_move.hpp"
#include "kernels/device/group_ids.cuh"
#include "kernels/device/row_tiles.cuh"

namespace embermap::gpu::device {

struct FramePlaces {
  std::byte* slab;  // with the offset of the bytes in a record
  std::uint64_t page_bytes, stride;
  const std::uint32_t* page_index;
  const std::uint32_t* slots;
  const std::uint32_t* frames;
  std::uint32_t first_page;

  __device__ std::byte* operator()(std::uint64_t row) const {
    return slab + std::uint64_t{frames[page_index[row] - first_page]} * page_bytes + slots[row] * stride;
  }
};

template <class Key>
struct WholePlaces {
  std::byte* slab;
  std::uint64_t page_bytes, stride;
  const Key* keys;
  PageOf page_of;
  std::uint64_t page_gap;  // page_bytes - rows_per_page * stride

  __device__ std::byte* operator()(std::uint64_t row) const {
    const std::uint64_t id = keys[row];
    std::byte* const even = slab + id * stride;
    return page_gap == 0 ? even : even + page_of(id) * page_gap;
  }
};

// Where the device has row r.
struct DenseRows {
  std::byte* working;
  std::uint64_t row_bytes;
  __device__ std::byte* operator()(std::uint64_t row) const { return working + row * row_bytes; }
};
struct LastRows {
  const std::byte* in;
  std::uint64_t row_bytes;
  const std::uint32_t* positions;
  const std::uint32_t* starts;
  __device__ const std::byte* operator()(std::uint64_t row) const { return in + positions[starts[row + 1] - 1U] * row_bytes; }
};

// How many elements of a row a lane has in flight.
inline constexpr int kMoveSteps = 4;

// Copies tiles [item, items), every step-th of them, of the rows from `first` on: what a group of lanes does.
template <class V, bool kFromHost, class Places, class Rows>
__device__ void move_tiles(const Places& places, const Rows& device_rows, const RowTiles& t, std::uint64_t length,
                           std::uint32_t line_mask, std::uint64_t first, std::uint64_t item, std::uint64_t items,
                           std::uint64_t step) {
  if (item >= items) return;
  const std::uint32_t lanes = 1U << t.lanes_log2;
  const std::uint32_t lane_of_group = threadIdx.x & (lanes - 1U);
  RowTile place(t, item);
  std::byte* host = places(first + place.row);
  auto mine = device_rows(first + place.row);
  for (;;) {
    const auto skew = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(host) & line_mask) / sizeof(V);
    // May wrap below 0 for idle lanes; it is then larger than any length.
    const std::uint64_t column = place.tile * (std::uint64_t{lanes} * kMoveSteps) + lane_of_group - skew;
    const V* from = nullptr;
    V* to = nullptr;
    if constexpr (kFromHost) {
      from = reinterpret_cast<const V*>(host);
      to = reinterpret_cast<V*>(mine);
    } else {
      from = reinterpret_cast<const V*>(mine);
      to = reinterpret_cast<V*>(host);
    }
    V held[kMoveSteps];
#pragma unroll
    for (int s = 0; s < kMoveSteps; ++s) {
      const std::uint64_t i = column + static_cast<std::uint64_t>(s) * lanes;
      if (i < length) held[s] = from[i];
    }
    // The next row's address comes from dependent loads: fetched while this row is under way.
    item += step;
    const bool more = item < items;
    RowTile next_place = place;
    std::byte* next_host = host;
    auto next_mine = mine;
    if (more) {
      next_place = RowTile(t, item);
      next_host = places(first + next_place.row);
      next_mine = device_rows(first + next_place.row);
    }
#pragma unroll
    for (int s = 0; s < kMoveSteps; ++s) {
      const std::uint64_t i = column + static_cast<std::uint64_t>(s) * lanes;
      if (i < length) to[i] = held[s];
    }
    if (!more) return;
    place = next_place;
    host = next_host;
    mine = next_mine;
  }
}

// `length` elements of type V a row, which has t.tiles tiles. `line_mask` is 127 where rows may begin inside a 128-byte line and
// lanes are enough to cover one: the lanes then start at the line's beginning, the first ones idle, so that each request of the
// group is whole lines of host memory; `t` has been made for the longer row. Otherwise it is 0.
template <class V, bool kFromHost, class Places, class Rows>
__global__ void __launch_bounds__(1024)
    move_rows(Places places, Rows device_rows, RowTiles t, std::uint64_t length, std::uint32_t line_mask, std::uint64_t rows,
              const std::uint64_t* exact, std::uint32_t claim_rows, MoveClaims* claims, MeetingPoint* meeting) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  const std::uint32_t lane = threadIdx.x & 31U;
  const std::uint32_t group = lane >> t.lanes_log2;
  const std::uint32_t groups = 32U >> t.lanes_log2;
  if (exact != nullptr && *exact < rows) rows = *exact;

  // One thread of a block looks at the host's mark, one of the grid shows the kernel's: marks that all warps read and wrote would
  // keep the link busier than the rows do (each is a line that goes to and fro between the processor and the device).
  __shared__ volatile long long low;
  const bool looks = threadIdx.x == 0 && meeting != nullptr;
  const auto look = [&]() -> long long {
    return looks ? *static_cast<volatile std::int64_t*>(&meeting->host_low) : 0x7FFFFFFFFFFFFFFFLL;
  };
  if (threadIdx.x == 0) low = look();
  __syncthreads();
  const auto claim = [&]() -> unsigned long long { return lane == 0 ? atomicAdd(&claims->rows, claim_rows) : 0ULL; };

  std::uint64_t first = __shfl_sync(kAll, claim(), 0);
  while (first < rows && static_cast<long long>(first) < low) {
    // In flight while rows are copied.
    const unsigned long long next_claim = claim();
    const long long next_low = look();
    const std::uint64_t end = min(first + claim_rows, rows);
    if (looks && blockIdx.x == 0) *static_cast<volatile std::uint64_t*>(&meeting->kernel_high) = end;

    move_tiles<V, kFromHost>(places, device_rows, t, length, line_mask, first, group, (end - first) * t.tiles, groups);
    __syncwarp();
    first = __shfl_sync(kAll, next_claim, 0);
    if (looks) low = next_low;
  }

  // The last block to end leaves them as the next kernel needs them.
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&claims->blocks, 1U) == gridDim.x - 1) *claims = {};
}

// Few ids, fetched as they are. Each block looks at all of them, so that none moves anything where one is bad; the first block
// tells the host, and counts their pages while the others move the rows.
inline constexpr unsigned kFewThreads = 512;
inline constexpr std::uint32_t kPagePlaces = 2 * kMostFewIds;  // of a table that is never more than half full

template <class V>
__global__ void __launch_bounds__(kFewThreads)
    gather_few(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, WholePlaces<std::uint64_t> places, DenseRows out,
               RowTiles t, std::uint64_t length, std::uint32_t line_mask, GroupReport* report) {
  bool bad = false;
  for (std::uint32_t i = threadIdx.x; i < count; i += kFewThreads) bad |= static_cast<std::uint64_t>(ids[i]) >= rows;
  bad = __syncthreads_or(bad ? 1 : 0) != 0;
  if (blockIdx.x != 0) {
    if (bad) return;
    const std::uint64_t groups_log2 = 5U - t.lanes_log2;  // of a warp
    const std::uint64_t item = (std::uint64_t{blockIdx.x - 1} * kFewThreads + threadIdx.x) >> t.lanes_log2;
    const std::uint64_t step = (std::uint64_t{gridDim.x - 1} * (kFewThreads / 32)) << groups_log2;
    move_tiles<V, true>(places, out, t, length, line_mask, 0, item, std::uint64_t{count} * t.tiles, step);
    return;
  }
  __shared__ unsigned long long first_bad;
  __shared__ std::uint32_t pages;
  __shared__ std::uint32_t seen[kPagePlaces];  // pages, counted from 1; 0: none
  if (threadIdx.x == 0) {
    first_bad = kNoBadId;
    pages = 0;
  }
  for (std::uint32_t i = threadIdx.x; i < kPagePlaces; i += kFewThreads) seen[i] = 0;
  __syncthreads();
  if (bad) {
    for (std::uint32_t i = threadIdx.x; i < count; i += kFewThreads)
      if (static_cast<std::uint64_t>(ids[i]) >= rows) atomicMin(&first_bad, static_cast<unsigned long long>(i));
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    report->header.bad_position = first_bad;
    say(report->looked);
  }
  if (bad) return;
  std::uint32_t found = 0;
  for (std::uint32_t i = threadIdx.x; i < count; i += kFewThreads) {
    const auto page = static_cast<std::uint32_t>(places.page_of(static_cast<std::uint64_t>(ids[i]))) + 1U;
    for (std::uint32_t place = page * 0x9E3779B1U % kPagePlaces;; place = (place + 1U) % kPagePlaces) {
      const std::uint32_t there = atomicCAS(&seen[place], 0U, page);
      if (there == 0U) ++found;
      if (there == 0U || there == page) break;
    }
  }
  atomicAdd(&pages, found);
  __syncthreads();
  if (threadIdx.x == 0) report->header.pages = pages;
}

}  // namespace embermap::gpu::device
