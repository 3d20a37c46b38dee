// Moving and changing rows in host memory. Every function takes one address per row (records lie scattered over frames), splits
// the rows over the pool's threads, prefetches ahead, and returns when done. Rows may have any byte length and alignment, and so
// may `in`, `out` and `grads`. Numbers of rows and positions that disagree are InvalidArgument; nothing has then been written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.hpp"
#include "base/thread_pool.hpp"
#include "kernels/batch.hpp"
#include "kernels/optimizer.hpp"

namespace embermap {

// out + i * row_bytes = rows[i][0, row_bytes). `out` is contiguous and does not overlap the rows. Large outputs are written with
// streaming stores: they do not push the hot rows out of the caches.
void gather_rows(std::span<const std::byte* const> rows, std::uint64_t row_bytes, std::byte* out, ThreadPool& pool);

// As gather_rows for rows that lie at equal distances: row i is base + ids[i] * stride.
void gather_rows(const std::byte* base, std::uint64_t stride, std::span<const std::uint64_t> ids, std::uint64_t row_bytes,
                 std::byte* out, ThreadPool& pool);

// As gather_rows, but row i goes to out + positions[i] * row_bytes. Positions are distinct.
void gather_rows_to(std::span<const std::byte* const> rows, std::span<const std::uint32_t> positions, std::uint64_t row_bytes,
                    std::byte* out, ThreadPool& pool);

// rows[i][0, row_bytes) = in + sources[i] * row_bytes. The addresses are distinct.
void scatter_rows(std::span<std::byte* const> rows, std::span<const std::uint32_t> sources, std::uint64_t row_bytes,
                  const std::byte* in, ThreadPool& pool);

// One thread's part of a gather or scatter: row i goes to, or comes from, the i-th row_bytes of `out` or `in`. What is gathered
// goes past the caches where a row's length and place allow it: a device reads it next. It is visible to other threads and to a
// DMA that they start once the call has returned.
void gather_piece(std::span<const std::byte* const> rows, std::uint64_t row_bytes, std::byte* out);
void scatter_piece(std::span<std::byte* const> rows, std::uint64_t row_bytes, const std::byte* in);

// rows[u] += sum of in[p] over the group's positions p, in ascending order, for groups [first, first + rows.size()) of `batch`.
// Sums are made in float (float16, bfloat16, float32), double (float64), or modulo 2^n (integers), begin with the first addend,
// and are rounded to the row's dtype once, after the row has been added. `in` holds dim elements of `dtype` per position. The
// same batch gives the same bits on every number of threads.
void add_rows(std::span<std::byte* const> rows, const Batch& batch, std::uint64_t first, std::uint64_t dim, DType dtype,
              const std::byte* in, ThreadPool& pool);

// One optimizer step on records[u] with the sum of the gradients of its group, for groups [first, first + records.size()) of
// `batch`. `grads` holds dim elements of `grad_dtype` (the weight's dtype, or float32 for half-precision rows) per position; sums
// in ascending order of position, in float or double. Throws DTypeError naming both dtypes for any other pair. Precondition:
// records are distinct.
void step_rows(std::span<std::byte* const> records, const Batch& batch, std::uint64_t first, const RecordLayout& layout,
               const StepScalars& scalars, const std::byte* grads, DType grad_dtype, ThreadPool& pool);

}  // namespace embermap
