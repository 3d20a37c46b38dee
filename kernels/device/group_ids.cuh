// Kernels around the sort of a batch's ids. Key is std::uint32_t where the table's ids fit, else std::uint64_t.
#pragma once

#include <cooperative_groups.h>

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
                                                std::uint32_t* positions, unsigned long long* bad, MoveClaims* claims) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *claims = {};
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

// What the one thread writes that has found the first of a group, the sorted place j.
template <class Key>
__device__ void write_group(const IdGroups& groups, PageEntry* entries, const PageOf& page_of, Key key, std::uint32_t j,
                            std::uint32_t group, std::uint32_t page_index, bool begins_page) {
  const Key page = page_of(key);
  groups.starts[group] = j;
  static_cast<Key*>(groups.keys)[group] = key;
  groups.page_index[group] = page_index;
  groups.slots[group] = static_cast<std::uint32_t>(key - static_cast<Key>(page * page_of.rows_per_page));
  if (entries != nullptr && begins_page) entries[page_index] = PageEntry{page, group};
}

// Of the last group and page.
inline __device__ GroupHeader header_of(std::uint64_t bad, std::uint32_t group, std::uint32_t page_index) {
  return {.bad_position = bad,
          .distinct = std::uint64_t{group} + 1U,
          .pages = std::uint64_t{page_index} + 1U,
          .movable = bad == kNoBadId ? std::uint64_t{group} + 1U : 0};
}

// Tells the host, which looks at the word, of all that this block, or cluster, has written before.
inline __device__ void say(std::uint32_t& word) {
  __threadfence_system();
  *static_cast<volatile std::uint32_t*>(&word) = 1;
}

// The keys behind a report by `threads` threads, whole lines at a time. They must be visible to this thread; say() is for after a
// barrier.
template <class Key>
__device__ void show_keys(const void* keys, std::uint32_t distinct, GroupReport* report, std::uint32_t thread,
                          std::uint32_t threads) {
  constexpr std::uint32_t kPerWord = sizeof(uint4) / sizeof(Key);
  const auto* const from = static_cast<const uint4*>(keys);
  auto* const to = reinterpret_cast<uint4*>(reinterpret_cast<std::byte*>(report) + kReportBytes);
  const std::uint32_t words = distinct / kPerWord;
  for (std::uint32_t i = thread; i < words; i += threads) to[i] = from[i];
  const std::uint32_t rest = words * kPerWord + thread;
  if (rest < distinct) reinterpret_cast<Key*>(to)[rest] = static_cast<const Key*>(keys)[rest];
}

// All of the above for at most kThreads * kItems ids, by one block: each kernel and copy of a small batch costs as much as its
// work, more so while rows of another batch keep the link busy.
template <class Key, int kThreads, int kItems>
__global__ void __launch_bounds__(kThreads)
    group_few(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, int key_bits, PageOf page_of, IdGroups groups,
              GroupHeader* header, PageEntry* entries, GroupReport* report, bool shows_keys) {
  using Sort = cub::BlockRadixSort<Key, kThreads, kItems, std::uint32_t>;
  using Scan = cub::BlockScan<std::uint64_t, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Scan::TempStorage scan;
  } temporary;
  __shared__ Key last_of_thread[kThreads];
  __shared__ unsigned long long bad;
  __shared__ std::uint32_t distinct;
  if (threadIdx.x == 0) {
    bad = kNoBadId;
    *groups.claims = {};
  }
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
    if (flags[k] != 0) write_group(groups, entries, page_of, keys[k], j, group, page_index, flags[k] >> 32 != 0);
    if (j == count - 1) {
      groups.starts[group + 1U] = count;
      distinct = group + 1U;
      *header = header_of(bad, group, page_index);
      if (report != nullptr) report->header = *header;
    }
  }
  if (report == nullptr) return;
  __syncthreads();
  if (shows_keys) show_keys<Key>(groups.keys, distinct, report, threadIdx.x, kThreads);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) say(report->grouped);
}

// All of the above by the blocks of one cluster, for as many ids as their shared memory holds: a radix sort of CUB's is a dozen
// kernels. Least significant digit first; each block has `tile` = kClusterThreads << items_log2 sorted places, in which it counts
// and ranks the digits, and sends each id to the block that has its next place.
inline constexpr unsigned kClusterThreads = 1024;
inline constexpr unsigned kClusterWarps = kClusterThreads / 32;
inline constexpr unsigned kDigitBits = 8;
inline constexpr unsigned kDigits = 1U << kDigitBits;
inline constexpr int kClusterItems = 8;  // of a thread, at most
inline constexpr std::uint32_t kNoBadPosition = ~std::uint32_t{0};

template <class Key>
struct ClusterMemory {
  static constexpr std::uint64_t bytes(std::uint32_t tile) {
    return 2 * std::uint64_t{tile} * (sizeof(Key) + sizeof(std::uint32_t)) + kClusterWarps * kDigits * sizeof(std::uint16_t);
  }
  __device__ ClusterMemory(std::byte* memory, std::uint32_t tile) {
    for (auto& some : keys) {
      some = reinterpret_cast<Key*>(memory);
      memory += tile * sizeof(Key);
    }
    for (auto& some : positions) {
      some = reinterpret_cast<std::uint32_t*>(memory);
      memory += tile * sizeof(std::uint32_t);
    }
    counts = reinterpret_cast<std::uint16_t*>(memory);
  }
  Key* keys[2];
  std::uint32_t* positions[2];
  std::uint16_t* counts;  // [warp][digit]
};

template <class Key>
__global__ void __launch_bounds__(kClusterThreads)
    group_by_cluster(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, int key_bits, std::uint32_t items_log2,
                     PageOf page_of, IdGroups groups, GroupHeader* header, PageEntry* entries, GroupReport* report,
                     bool shows_keys) {
#if __CUDA_ARCH__ >= 900
  namespace cg = cooperative_groups;
  using Scan = cub::BlockScan<std::uint64_t, kClusterThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  constexpr unsigned kAll = 0xFFFFFFFFU;
  extern __shared__ __align__(16) std::byte memory[];
  __shared__ typename Scan::TempStorage scan;
  __shared__ std::uint32_t digit_counts[kDigits];  // of this block
  __shared__ std::uint32_t digit_begin[kDigits];   // of those in front of each digit's
  __shared__ std::uint32_t digit_first[kDigits];   // place of the first id with that digit that this block has
  __shared__ std::uint32_t bad;                    // first position of a bad id that this block has
  __shared__ std::uint64_t heads;                  // groups and pages that begin in this block
  __shared__ std::uint32_t distinct;               // of block 0
  const cg::cluster_group cluster = cg::this_cluster();
  const std::uint32_t block = cluster.block_rank();
  const std::uint32_t blocks = cluster.num_blocks();
  const std::uint32_t items = 1U << items_log2;
  const std::uint32_t tile = kClusterThreads << items_log2;
  const std::uint32_t lane = threadIdx.x & 31U;
  const std::uint32_t warp = threadIdx.x >> 5U;
  const std::uint32_t tile_log2 = items_log2 + 10;
  static_assert(kClusterThreads == 1U << 10);
  ClusterMemory<Key> mine(memory, tile);

  if (threadIdx.x == 0) {
    bad = kNoBadPosition;
    if (block == 0) *groups.claims = {};
  }
  __syncthreads();
#pragma unroll 1
  for (std::uint32_t k = 0; k < items; ++k) {
    const std::uint32_t i = k * kClusterThreads + threadIdx.x;
    const std::uint32_t position = block * tile + i;
    // Places without an id have the largest key and come last: the sort is stable.
    Key key = static_cast<Key>(~Key{0});
    if (position < count) {
      const auto id = static_cast<std::uint64_t>(ids[position]);
      const bool good = id < rows;
      if (!good) atomicMin(&bad, position);
      key = good ? static_cast<Key>(id) : Key{0};
    }
    mine.keys[0][i] = key;
    mine.positions[0][i] = position;
  }
  __syncthreads();
  // After the next barrier of the cluster.
  const auto bad_of_cluster = [&]() -> std::uint64_t {
    std::uint32_t least = kNoBadPosition;
    for (std::uint32_t b = 0; b < blocks; ++b) least = min(least, *cluster.map_shared_rank(&bad, b));
    return least == kNoBadPosition ? kNoBadId : least;
  };

  const int passes = (key_bits + int{kDigitBits} - 1) / int{kDigitBits};
  int now = 0;
  for (int pass = 0; pass < passes; ++pass, now ^= 1) {
    const int shift = pass * int{kDigitBits};
    for (std::uint32_t i = threadIdx.x; i < kClusterWarps * kDigits / 2; i += kClusterThreads)
      reinterpret_cast<std::uint32_t*>(mine.counts)[i] = 0;
    __syncthreads();
    // A warp has items x 32 places one behind the other. Its k-th 32 come before the next ones: ranks of equal digits ascend.
    std::uint16_t* const counts = mine.counts + warp * kDigits;
    const auto place_of = [&](int k) { return (warp * items + static_cast<std::uint32_t>(k)) * 32 + lane; };
    const auto digit_of = [&](Key key) { return static_cast<std::uint32_t>(key >> shift) & (kDigits - 1); };
    std::uint32_t ranks[kClusterItems];
#pragma unroll
    for (int k = 0; k < kClusterItems; ++k) {
      if (static_cast<std::uint32_t>(k) >= items) break;
      const std::uint32_t digit = digit_of(mine.keys[now][place_of(k)]);
      const unsigned same = __match_any_sync(kAll, digit);
      const std::uint32_t before = counts[digit];
      __syncwarp();
      if (lane == 31U - static_cast<unsigned>(__clz(static_cast<int>(same))))
        counts[digit] = static_cast<std::uint16_t>(before + static_cast<unsigned>(__popc(same)));
      __syncwarp();
      ranks[k] = before + static_cast<unsigned>(__popc(same & ((1U << lane) - 1U)));
    }
    __syncthreads();
    if (threadIdx.x < kDigits) {
      std::uint32_t sum = 0;
#pragma unroll 4
      for (unsigned w = 0; w < kClusterWarps; ++w) {
        std::uint16_t& here = mine.counts[w * kDigits + threadIdx.x];
        const std::uint32_t its = here;
        here = static_cast<std::uint16_t>(sum);
        sum += its;
      }
      digit_counts[threadIdx.x] = sum;
    }
    cluster.sync();
    if (pass == 0 && report != nullptr && block == 0 && threadIdx.x == 0) {
      report->header.bad_position = bad_of_cluster();
      say(report->looked);
    }
    std::uint64_t all = 0;
    std::uint32_t before = 0;  // in blocks below
    if (threadIdx.x < kDigits) {
#pragma unroll 4
      for (std::uint32_t b = 0; b < blocks; ++b) {
        const std::uint32_t its = *cluster.map_shared_rank(&digit_counts[threadIdx.x], b);
        if (b < block) before += its;
        all += its;
      }
    }
    // Both sums in one: what all blocks have is below 2^32.
    if (threadIdx.x < kDigits) all |= std::uint64_t{digit_counts[threadIdx.x]} << 32;
    std::uint64_t sums = 0;
    Scan(scan).ExclusiveSum(all, sums);
    if (threadIdx.x < kDigits) {
      digit_begin[threadIdx.x] = static_cast<std::uint32_t>(sums >> 32);
      digit_first[threadIdx.x] = static_cast<std::uint32_t>(sums) + before;
    }
    // In order within the block first, so that neighbours go to neighbouring places of another.
    Key keys[kClusterItems];
    std::uint32_t positions[kClusterItems];
#pragma unroll
    for (int k = 0; k < kClusterItems; ++k) {
      if (static_cast<std::uint32_t>(k) >= items) break;
      keys[k] = mine.keys[now][place_of(k)];
      positions[k] = mine.positions[now][place_of(k)];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kClusterItems; ++k) {
      if (static_cast<std::uint32_t>(k) >= items) break;
      const std::uint32_t digit = digit_of(keys[k]);
      const std::uint32_t to = digit_begin[digit] + counts[digit] + ranks[k];
      mine.keys[now][to] = keys[k];
      mine.positions[now][to] = positions[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kClusterItems; ++k) {
      if (static_cast<std::uint32_t>(k) >= items) break;
      const std::uint32_t i = static_cast<std::uint32_t>(k) * kClusterThreads + threadIdx.x;
      const Key key = mine.keys[now][i];
      const std::uint32_t digit = digit_of(key);
      const std::uint32_t to = digit_first[digit] + (i - digit_begin[digit]);
      const std::uint32_t there = to & (tile - 1);
      *cluster.map_shared_rank(&mine.keys[now ^ 1][there], to >> tile_log2) = key;
      *cluster.map_shared_rank(&mine.positions[now ^ 1][there], to >> tile_log2) = mine.positions[now][i];
    }
    cluster.sync();
  }

  // Each thread has `items` sorted places one behind the other.
  const Key* const sorted = mine.keys[now];
  const std::uint32_t begin = threadIdx.x << items_log2;
  Key last{};  // the key before this thread's
  if (begin != 0)
    last = sorted[begin - 1];
  else if (block != 0)
    last = *cluster.map_shared_rank(&sorted[tile - 1], block - 1);
  const auto flag_of = [&](std::uint32_t j, Key key, Key before) -> std::uint64_t {
    if (j >= count || (j != 0 && key == before)) return 0;
    return (std::uint64_t{j == 0 || page_of(key) != page_of(before)} << 32) | 1;
  };
  std::uint64_t of_thread = 0;
  Key before = last;
#pragma unroll 1
  for (std::uint32_t k = 0; k < items; ++k) {
    const Key key = sorted[begin + k];
    of_thread += flag_of(block * tile + begin + k, key, before);
    before = key;
  }
  std::uint64_t counted = 0;
  std::uint64_t of_block = 0;
  Scan(scan).ExclusiveSum(of_thread, counted, of_block);
  if (threadIdx.x == 0) heads = of_block;
  cluster.sync();
#pragma unroll 1
  for (std::uint32_t b = 0; b < block; ++b) counted += *cluster.map_shared_rank(&heads, b);
  before = last;
#pragma unroll 1
  for (std::uint32_t k = 0; k < items; ++k) {
    const std::uint32_t j = block * tile + begin + k;
    if (j >= count) break;
    const Key key = sorted[begin + k];
    const std::uint64_t flag = flag_of(j, key, before);
    before = key;
    counted += flag;
    const auto group = static_cast<std::uint32_t>(counted) - 1U;
    const auto page_index = static_cast<std::uint32_t>(counted >> 32) - 1U;
    const std::uint32_t position = mine.positions[now][begin + k];
    groups.inverse[position] = group;
    groups.positions[j] = position;
    if (flag != 0) write_group(groups, entries, page_of, key, j, group, page_index, flag >> 32 != 0);
    if (j == count - 1) {
      groups.starts[group + 1U] = count;
      *cluster.map_shared_rank(&distinct, 0) = group + 1U;
      *header = header_of(bad_of_cluster(), group, page_index);
      if (report != nullptr) report->header = *header;
    }
  }
  if (report != nullptr) {
    if (shows_keys) {
      __threadfence();
      cluster.sync();
      show_keys<Key>(groups.keys, *cluster.map_shared_rank(&distinct, 0), report, block * kClusterThreads + threadIdx.x,
                     blocks * kClusterThreads);
    }
    __threadfence_system();
  }
  cluster.sync();  // no block ends while others look into its memory
  if (report != nullptr && block == 0 && threadIdx.x == 0) say(report->grouped);
#endif
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
