// Sorting and grouping the ids of a batch on the device. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "kernels/cuda/memory.hpp"

namespace embermap::gpu {

// Where the kernel that moves a batch's rows counts (row_move.hpp): 0 before it begins and again when it has ended.
struct MoveClaims {
  unsigned long long rows;  // that its warps have taken
  unsigned blocks;          // that have ended
};

// Device arrays that describe a batch of `count` ids with `distinct` distinct ones, u = 0, 1, ... in ascending order of id.
struct IdGroups {
  std::uint32_t* inverse = nullptr;     // [count]: which distinct id stands at position i
  std::uint32_t* positions = nullptr;   // [count]: those of id u, ascending, are positions[starts[u] .. starts[u + 1])
  std::uint32_t* starts = nullptr;      // [count + 1], of which distinct + 1 are used
  std::uint32_t* page_index = nullptr;  // [count], of which distinct are used: place of its page among the distinct pages
  std::uint32_t* slots = nullptr;       // likewise: its row inside the page
  void* keys = nullptr;                 // likewise: the id, std::uint32_t or std::uint64_t, see wide_keys(); aligned to 16 bytes
  MoveClaims* claims = nullptr;         // is made ready
};

// Whether ids of a table with so many rows are kept as std::uint64_t.
constexpr bool wide_keys(std::uint64_t rows) { return rows > std::uint64_t{1} << 32; }

// What the host has to know of a batch: a header followed by the distinct pages, ascending, each with its first distinct id.
struct GroupHeader {
  std::uint64_t bad_position;  // first position of an id outside [0, rows), or kNoBadId; everything else is then meaningless
  std::uint64_t distinct;
  std::uint64_t pages;
  std::uint64_t movable;  // `distinct`, but 0 if an id is bad
};
struct PageEntry {
  std::uint64_t page;
  std::uint64_t first;
};
inline constexpr std::uint64_t kNoBadId = ~std::uint64_t{0};
inline constexpr std::uint32_t kOneBlock = 2048;  // ids

// The same where the kernel that groups the ids tells the host itself, in pinned memory that it reaches: a copy of a few bytes
// takes as long as the grouping. The keys come kReportBytes behind it, if they are wanted.
struct GroupReport {
  GroupHeader header;
  std::uint32_t looked;   // not 0: header.bad_position is there
  std::uint32_t grouped;  // not 0: so is everything
};
inline constexpr std::uint64_t kReportBytes = 256;
static_assert(sizeof(GroupReport) <= kReportBytes);
// Blocks of the largest cluster that groups 32-bit and 64-bit ids; 0: the device has none.
struct GroupLimits {
  unsigned narrow_blocks = 0, wide_blocks = 0;
};
GroupLimits group_limits(int device);  // which must be current
// Whether group_ids() can fill a report for so many ids: whether one kernel groups them.
bool reports(std::uint32_t count, std::uint64_t rows, const GroupLimits& limits);

// Fills `groups`, `header` and `entries` (device memory, as `ids`); entries has room for min(count, pages of the table), at
// least 1, or is null. `report` is null, or all 0 and where reports(); with `shows_keys` it has room for `count` of them.
// `looked` is called before the sort, when what finds bad_position has been enqueued, but not where reports(). Preconditions:
// count > 0, 0 < rows_per_page <= 2^32. Enqueues.
void group_ids(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, std::uint64_t rows_per_page,
               const IdGroups& groups, GroupHeader* header, PageEntry* entries, GroupReport* report, bool shows_keys,
               const GroupLimits& limits, const MemoryPool& pool, cudaStream_t stream, const std::function<void()>& looked = {});

// *pages += how many distinct pages the good ones among the ids lie on. `bits`: one for each page of the table, all 0, and used
// up. Enqueues.
void count_pages(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, std::uint64_t rows_per_page,
                 std::uint32_t* bits, unsigned long long* pages, cudaStream_t stream);

// Throws CudaError if the kernels of this build do not run on `device`, which must be current.
void check_kernels_run(int device);

}  // namespace embermap::gpu
