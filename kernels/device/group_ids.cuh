// Kernels around the sort of a batch's ids. Key is std::uint32_t where the table's ids fit, else std::uint64_t.
#pragma once

#include <cstdint>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/group_ids.hpp"

namespace embermap::gpu::device {

// Which page a row lies on: a shift where rows_per_page is a power of two.
struct PageOf {
  std::uint64_t rows_per_page;
  int shift;  // -1: divide

  template <class Key>
  __host__ __device__ Key operator()(Key id) const {
    if (shift >= 0) return shift < int{sizeof(Key) * 8} ? id >> shift : Key{0};
    return static_cast<Key>(id / rows_per_page);
  }
};

// keys[i] = ids[i], positions[i] = i, and the first position of a bad id into *bad, which begins as kNoBadId. A bad id counts as
// row 0 from here on: the kernels that follow then stay inside their arrays, and the host throws their results away.
template <class Key>
__global__ void __launch_bounds__(256) load_ids(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, Key* keys,
                                                std::uint32_t* positions, unsigned long long* bad) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto id = static_cast<std::uint64_t>(ids[i]);  // negative ids become larger than any number of rows
    const bool good = id < rows;
    if (!good) atomicMin(bad, static_cast<unsigned long long>(i));
    keys[i] = good ? static_cast<Key>(id) : Key{0};
    positions[i] = static_cast<std::uint32_t>(i);
  }
}

// What sorted key j adds to the running counts: 1 in the low half if it begins a group, 1 in the high half if it begins a page.
// Both counts stay below 2^32, so that one scan makes both.
template <class Key>
struct HeadFlags {
  const Key* keys;
  PageOf page_of;

  __host__ __device__ std::uint64_t operator()(std::uint32_t j) const {
    if (j == 0) return (std::uint64_t{1} << 32) | 1;
    const Key key = keys[j];
    const Key before = keys[j - 1];
    if (key == before) return 0;
    return (std::uint64_t{page_of(key) != page_of(before)} << 32) | 1;
  }
};

// Writes the groups from the sorted (key, position) pairs and the running counts of HeadFlags.
template <class Key>
__global__ void __launch_bounds__(256)
    write_groups(const Key* keys, const std::uint32_t* positions, const std::uint64_t* counts, std::uint64_t count,
                 PageOf page_of, IdGroups groups, GroupHeader* header, PageEntry* entries) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t j = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < count; j += step) {
    const std::uint64_t here = counts[j];
    const std::uint64_t before = j == 0 ? 0 : counts[j - 1];
    const auto group = static_cast<std::uint32_t>(here) - 1U;
    const auto page_index = static_cast<std::uint32_t>(here >> 32) - 1U;
    const std::uint32_t position = positions[j];
    groups.inverse[position] = group;
    groups.positions[j] = position;
    if (here != before) {
      const Key key = keys[j];
      const Key page = page_of(key);
      groups.starts[group] = static_cast<std::uint32_t>(j);
      static_cast<Key*>(groups.keys)[group] = key;
      groups.page_index[group] = page_index;
      groups.slots[group] = static_cast<std::uint32_t>(key - static_cast<Key>(page * page_of.rows_per_page));
      if (entries != nullptr && here >> 32 != before >> 32) entries[page_index] = PageEntry{page, group};
    }
    if (j == count - 1) {
      groups.starts[group + 1U] = static_cast<std::uint32_t>(count);
      header->distinct = std::uint64_t{group} + 1U;
      header->movable = header->bad_position == kNoBadId ? std::uint64_t{group} + 1U : 0;
      header->pages = std::uint64_t{page_index} + 1U;
    }
  }
}

// All of the above for at most kThreads * kItems ids, by one block: each kernel and copy of a small batch costs as much as its
// work, more so while rows of another batch keep the link busy.
template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads)
    group_few(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, int key_bits, PageOf page_of, IdGroups groups,
              GroupHeader* header, PageEntry* entries) {
  using Sort = cub::BlockRadixSort<Key, kThreads, kItems, std::uint32_t>;
  using Scan = cub::BlockScan<std::uint64_t, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
  } temporary;
  __shared__ Key last_of_thread[kThreads];
  __shared__ unsigned long long bad;
  if (threadIdx.x == 0) bad = kNoBadId;
  __syncthreads();

  Key keys[kItems];
  std::uint32_t positions[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const std::uint32_t i = threadIdx.x * kItems + static_cast<std::uint32_t>(k);
    // Places without an id have the largest key and come last: the sort is stable.
    keys[k] = static_cast<Key>(~Key{0});
    positions[k] = i;
    if (i >= count) continue;
    const auto id = static_cast<std::uint64_t>(ids[i]);
    const bool good = id < rows;
    if (!good) atomicMin(&bad, static_cast<unsigned long long>(i));
    keys[k] = good ? static_cast<Key>(id) : Key{0};
  }
  Sort(temporary.sort).Sort(keys, positions, 0, key_bits);
  last_of_thread[threadIdx.x] = keys[kItems - 1];
  __syncthreads();

  std::uint64_t flags[kItems];
  std::uint64_t counts[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const std::uint32_t j = threadIdx.x * kItems + static_cast<std::uint32_t>(k);
    const Key before = k > 0 ? keys[k > 0 ? k - 1 : 0] : last_of_thread[threadIdx.x > 0 ? threadIdx.x - 1 : 0];
    flags[k] = 0;
    if (j < count && (j == 0 || keys[k] != before))
      flags[k] = (std::uint64_t{j == 0 || page_of(keys[k]) != page_of(before)} << 32) | 1;
  }
  Scan(temporary.scan).InclusiveSum(flags, counts);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const std::uint32_t j = threadIdx.x * kItems + static_cast<std::uint32_t>(k);
    if (j >= count) continue;
    const auto group = static_cast<std::uint32_t>(counts[k]) - 1U;
    const auto page_index = static_cast<std::uint32_t>(counts[k] >> 32) - 1U;
    groups.inverse[positions[k]] = group;
    groups.positions[j] = positions[k];
    if (flags[k] != 0) {
      const Key page = page_of(keys[k]);
      groups.starts[group] = j;
      static_cast<Key*>(groups.keys)[group] = keys[k];
      groups.page_index[group] = page_index;
      groups.slots[group] = static_cast<std::uint32_t>(keys[k] - static_cast<Key>(page * page_of.rows_per_page));
      if (entries != nullptr && flags[k] >> 32 != 0) entries[page_index] = PageEntry{page, group};
    }
    if (j == count - 1) {
      groups.starts[group + 1U] = count;
      *header = {.bad_position = bad,
                 .distinct = std::uint64_t{group} + 1U,
                 .pages = std::uint64_t{page_index} + 1U,
                 .movable = bad == kNoBadId ? std::uint64_t{group} + 1U : 0};
    }
  }
}

// Sets the bits of the ids' pages, and adds up how many were not set before.
inline __global__ void __launch_bounds__(256) count_pages(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                                          PageOf page_of, std::uint32_t* bits, unsigned long long* pages) {
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  unsigned found = 0;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const auto id = static_cast<std::uint64_t>(ids[i]);
    if (id >= rows) continue;
    const std::uint64_t page = page_of(id);
    const std::uint32_t bit = 1U << (page % 32);
    found += (atomicOr(&bits[page / 32], bit) & bit) == 0 ? 1U : 0U;
  }
  for (unsigned other = 16; other != 0; other /= 2) found += __shfl_down_sync(0xFFFFFFFFU, found, other);
  if ((threadIdx.x & 31U) == 0 && found != 0) atomicAdd(pages, static_cast<unsigned long long>(found));
}

}  // namespace embermap::gpu::device
