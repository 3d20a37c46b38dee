// What the functions of rows.hpp share: unaligned elements, prefetching, and dealing groups of a batch to threads. Private to
// kernels/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/checked.hpp"
#include "base/half.hpp"
#include "base/thread_pool.hpp"
#include "base/vector_dispatch.hpp"
#include "kernels/batch.hpp"

namespace embermap::detail {

// Bytes of rows a thread should have for a share to be worth waking it.
inline constexpr std::uint64_t kGrainBytes = 64 * 1024;

// Element i of the array of T at `at`, which need not be aligned.
template <class T>
EMBERMAP_ALWAYS_INLINE inline T load(const std::byte* at, std::uint64_t i) {
  T value;
  std::memcpy(static_cast<void*>(&value), at + i * sizeof(T), sizeof value);
  return value;
}
template <class T>
EMBERMAP_ALWAYS_INLINE inline void store(std::byte* at, std::uint64_t i, T value) {
  std::memcpy(at + i * sizeof(T), &value, sizeof value);
}

// To and from the type T is computed in: float for the 16-bit types, T otherwise.
template <class A, class T>
EMBERMAP_ALWAYS_INLINE inline A widen(T value) {
  return static_cast<A>(value);
}
template <class T, class A>
EMBERMAP_ALWAYS_INLINE inline T narrow(A value) {
  return static_cast<T>(value);
}

// Asks for the first kilobyte of [at, at + bytes), bytes > 0; after that the hardware's own prefetcher has noticed.
inline constexpr std::uint64_t kPrefetchBytes = 1024;
EMBERMAP_ALWAYS_INLINE inline void prefetch(const std::byte* at, std::uint64_t bytes) {
  const std::uint64_t asked = std::min(bytes, kPrefetchBytes);
  for (std::uint64_t byte = 0; byte < asked; byte += 64) __builtin_prefetch(at + byte);
  __builtin_prefetch(at + asked - 1);  // an unaligned row has one line more
}
// The same for bytes that will be written, and for bytes that one thread copies past the first cache: there are more places to
// wait for memory in the second one.
EMBERMAP_ALWAYS_INLINE inline void prefetch_to_write(const std::byte* at, std::uint64_t bytes) {
  const std::uint64_t asked = std::min(bytes, kPrefetchBytes);
  for (std::uint64_t byte = 0; byte < asked; byte += 64) __builtin_prefetch(at + byte, 1);
  __builtin_prefetch(at + asked - 1, 1);
}
EMBERMAP_ALWAYS_INLINE inline void prefetch_far(const std::byte* at, std::uint64_t bytes) {
  const std::uint64_t asked = std::min(bytes, kPrefetchBytes);
  for (std::uint64_t byte = 0; byte < asked; byte += 64) __builtin_prefetch(at + byte, 0, 2);
  __builtin_prefetch(at + asked - 1, 0, 2);
}
// How many rows ahead to ask: as many as keep the memory busy, few enough to be still there when they are copied (measured: 16
// rows of 512 bytes, 32 short ones, 8 long ones).
inline std::uint64_t prefetch_distance(std::uint64_t row_bytes) { return std::clamp<std::uint64_t>(8192 / row_bytes, 8, 32); }

// Groups [0, count) of some stretch of a batch. starts[count] is valid.
struct Groups {
  const std::uint32_t* positions;
  const std::uint32_t* starts;
  std::uint64_t count;

  std::uint64_t size(std::uint64_t group) const { return starts[group + 1] - starts[group]; }
};

// Groups [first, first + count) of `batch`; throws InvalidArgument if it has fewer.
Groups groups_of(const Batch& batch, std::uint64_t first, std::uint64_t count);

// Calls body(first_group, last_group, first_column, last_column) so that every column of every group is covered once, shares
// being about equal in positions, not in groups. A group with a great part of all positions is cut by columns: no thread adds up
// a popular row alone, and each element still sees its addends in order. `column_bytes` is the size of a column of one position's
// row.
//
// `heavy_body` is called instead for such a group, as heavy_body(group, for_columns), which has to call for_columns(part) for
// part(first_column, last_column) to be called for pieces of the row, by the pool's threads, and returns when all are done.
template <class Body, class Heavy>
void for_groups(const Groups& groups, std::uint64_t dim, std::uint64_t column_bytes, ThreadPool& pool, const Body& body,
                const Heavy& heavy_body) {
  if (groups.count == 0 || dim == 0) return;
  const std::uint64_t row_bytes = dim * column_bytes;
  const std::uint64_t columns_per_line = std::max<std::uint64_t>(1, 64 / column_bytes);
  const std::uint64_t lines = ceil_div(dim, columns_per_line);
  const std::uint64_t positions = groups.starts[groups.count] - groups.starts[0];

  std::vector<std::uint64_t> heavy;
  if (pool.threads() > 1 && lines > 1) {
    const std::uint64_t least = std::max(positions / (std::uint64_t{pool.threads()} * 2), 4 * kGrainBytes / row_bytes) + 1;
    if (positions >= least)
      for (std::uint64_t group = 0; group < groups.count; ++group)
        if (groups.size(group) >= least) heavy.push_back(group);
  }

  // Work up to group u: its positions, and two more for each row to read and write. Strictly ascending, so every group begins in
  // one piece.
  const auto work_before = [&](std::uint64_t group) { return groups.starts[group] - groups.starts[0] + 2 * group; };
  const auto group_at = [&](std::uint64_t work) {
    std::uint64_t low = 0;
    std::uint64_t high = groups.count;
    while (low < high) {
      const std::uint64_t middle = low + (high - low) / 2;
      if (work_before(middle) < work)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  pool.parallel_for(work_before(groups.count), std::max<std::uint64_t>(1, kGrainBytes / row_bytes),
                    [&](std::uint64_t begin, std::uint64_t end) {
                      std::uint64_t group = group_at(begin);
                      const std::uint64_t last = group_at(end);
                      for (auto next = std::lower_bound(heavy.begin(), heavy.end(), group); group < last; ++next) {
                        const std::uint64_t stop = next == heavy.end() ? last : std::min(*next, last);
                        if (group < stop) body(group, stop, std::uint64_t{0}, dim);
                        if (next == heavy.end()) break;
                        group = stop + 1;
                      }
                    });
  for (const std::uint64_t group : heavy)
    heavy_body(group, [&](const auto& part) {
      pool.parallel_for(lines, 1, [&](std::uint64_t begin, std::uint64_t end) {
        part(begin * columns_per_line, std::min(dim, end * columns_per_line));
      });
    });
}
template <class Body>
void for_groups(const Groups& groups, std::uint64_t dim, std::uint64_t column_bytes, ThreadPool& pool, const Body& body) {
  for_groups(groups, dim, column_bytes, pool, body, [&](std::uint64_t group, const auto& for_columns) {
    for_columns(
        [&](std::uint64_t first_column, std::uint64_t last_column) { body(group, group + 1, first_column, last_column); });
  });
}

// Columns summed at a time: the sums stay in the first-level cache.
inline constexpr std::uint64_t kTileColumns = 256;

// The rows of a batch's positions, `dim` elements of T each, in order of position.
template <class T>
struct PositionRows {
  const std::byte* in;
  const std::uint32_t* positions;
  std::uint64_t dim;
  std::uint64_t end;    // positions[end] and beyond belong to somebody else
  std::uint64_t ahead;  // how far to prefetch

  EMBERMAP_ALWAYS_INLINE const std::byte* at(std::uint64_t k, std::uint64_t column) const {
    return in + (positions[k] * dim + column) * sizeof(T);
  }
  EMBERMAP_ALWAYS_INLINE void prefetch_after(std::uint64_t k, std::uint64_t column, std::uint64_t columns) const {
    if (k + ahead < end) prefetch(at(k + ahead, column), columns * sizeof(T));
  }
};

// sums[j] = the sum over positions[begin, end), in this order, of element column + j of their rows, j < columns <= kTileColumns.
// The sum begins with the first addend (not with 0, which would turn -0 into 0).
template <class A, class T>
EMBERMAP_ALWAYS_INLINE inline void sum_rows(A* __restrict sums, const PositionRows<T>& rows, std::uint64_t begin,
                                            std::uint64_t end, std::uint64_t column, std::uint64_t columns) {
  const std::byte* __restrict from = rows.at(begin, column);
  rows.prefetch_after(begin, column, columns);
  for (std::uint64_t j = 0; j < columns; ++j) sums[j] = widen<A>(load<T>(from, j));
  for (std::uint64_t k = begin + 1; k < end; ++k) {
    from = rows.at(k, column);
    rows.prefetch_after(k, column, columns);
    for (std::uint64_t j = 0; j < columns; ++j) sums[j] = static_cast<A>(sums[j] + widen<A>(load<T>(from, j)));
  }
}

}  // namespace embermap::detail
