// Moving records between frames in registered host memory and the working set by a kernel that reads and writes the frames
// itself. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/group_ids.hpp"

namespace embermap::gpu {

// Where the kernel and the threads of the host meet that move the rows of one batch: it takes rows from the first one upwards,
// they from the last one downwards. In host memory that the device reaches. A side looks at the other's mark before it takes
// more; marks may be seen late, and rows that both then move get the same bytes twice. Each side moves all that it has taken: the
// kernel every row below the host's last mark, the host every row from there on. So no row is left out, and nothing has to be
// atomic across the link.
struct MeetingPoint {
  alignas(128) std::int64_t host_low;      // the host's: rows from here on are moved, or will be
  alignas(128) std::uint64_t kernel_high;  // the kernel's: rows below are moved, or will be; may fall back a little
};

// Where the records of a batch's distinct rows lie: row r at
//   slab + frame * page_bytes + slot * stride + offset
// with frame and slot from the arrays below, or from the row's id where page p lies in frame p.
struct RecordPlaces {
  std::byte* slab;  // registered host memory
  std::uint64_t page_bytes, stride, offset, row_bytes;

  bool whole;        // page p lies in frame p
  const void* keys;  // whole: the rows' ids, std::uint32_t or
  bool wide_keys;    // std::uint64_t
  std::uint64_t rows_per_page;

  const std::uint32_t* page_index;  // otherwise: frames[page_index[r] - first_page] and slots[r]
  const std::uint32_t* slots;
  const std::uint32_t* frames;
  std::uint32_t first_page;
};

struct RowMove {
  RecordPlaces places;
  std::byte* working;          // row r is at working + r * row_bytes
  std::uint64_t rows;          // at most; arrays and `working` begin at the first
  const std::uint64_t* exact;  // null, or how many there are (device memory)
  MoveClaims* claims;          // device memory, of this kernel's alone until it has ended
  MeetingPoint* meeting;       // null: the kernel moves all rows
  // To frames: not null, and row r comes from last_of + positions[starts[r + 1] - 1] * row_bytes instead, see IdGroups.
  const std::byte* last_of = nullptr;
  const std::uint32_t* positions = nullptr;
  const std::uint32_t* starts = nullptr;
};

// Few blocks: they fill the link and leave the multiprocessors to others.
struct RowMoveShape {
  unsigned blocks = 8;
  unsigned threads = 512;
  std::uint64_t claim_bytes = 4096;
};

// Frames to working set, and back. Enqueue. With a meeting point: its host_low must be set before.
void move_from_frames(const RowMove& move, const RowMoveShape& shape, cudaStream_t stream);
void move_to_frames(const RowMove& move, const RowMoveShape& shape, cudaStream_t stream);

// Frames of a whole table to rows of `out`, one for each id, of which there are at most kMostFewIds; the table's pages have
// numbers below 2^32 - 1. `report`, all 0 before, is told whether ids are bad, and then nothing is moved; when all is done it has
// the number of their distinct pages. `places.keys` are the ids. Enqueues.
inline constexpr std::uint32_t kMostFewIds = 4096;
void gather_few(const RecordPlaces& places, std::uint32_t count, std::uint64_t rows, std::byte* out, GroupReport* report,
                cudaStream_t stream);

}  // namespace embermap::gpu
