// How a batch of pieces becomes requests to the system: what is merged, what is direct, what needs a bounce buffer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "io/page_io.hpp"

namespace embermap {

// The largest multiple of `multiple` that is not above `a`; `multiple` > 0.
constexpr std::uint64_t round_down(std::uint64_t a, std::uint64_t multiple) noexcept { return a / multiple * multiple; }

// What direct I/O asks of memory addresses, and of offsets and lengths in the file. 0: there is no direct I/O.
struct DirectAlignment {
  std::uint32_t memory = 0, offset = 0;
};

// A request asks for `bytes` bytes from `offset` on, of which the first `needed` belong to pieces.
struct IoRequest {
  std::uint64_t offset = 0, bytes = 0, needed = 0;
  std::size_t first_piece = 0, pieces = 0;
  std::size_t first_vector = 0, vectors = 0;  // its memory; none if it goes through a bounce buffer
  bool direct = false;
  bool bounced = false;
  bool part = false;  // of one piece that several requests share
};

struct IoPlan {
  std::vector<IoRequest> requests;   // in the order of the file
  std::vector<iovec> vectors;        // their memory
  std::vector<std::uint32_t> parts;  // of each piece: how many requests share it; empty if none is shared
  std::vector<std::size_t> empty;    // pieces of no bytes
  std::uint64_t bounce_bytes = 0;    // the largest bounced request
  std::uint64_t buffered_bytes = 0;  // what goes through the page cache
  bool direct = false, buffered = false, shares_blocks = false;  // any request is; a direct one ends inside a page of the cache
};

inline constexpr std::uint64_t kCachePage = 4096;           // of the page cache
inline constexpr std::uint64_t kRequestBytes = 1ULL << 20;  // of one request, at most
// Smaller where the page cache is in between, so that a call at full depth cannot fill it.
inline constexpr std::uint64_t kBufferedBytes = 256ULL << 10;
inline constexpr std::uint64_t kBouncedBytes = 128ULL << 10;  // of one request through a bounce buffer
inline constexpr std::size_t kRequestVectors = 256;

// Throws InvalidArgument for pieces that are out of order, overlap or have no room, IoError (EOVERFLOW) beyond 2^63 bytes.
void check_pieces(std::span<const IoPiece> pieces, std::string_view call, const std::filesystem::path& file);
// Both check the pieces.
IoPlan plan_reads(std::span<const IoPiece> pieces, const DirectAlignment& alignment, const std::filesystem::path& file);
IoPlan plan_writes(std::span<const IoPiece> pieces, const DirectAlignment& alignment, const std::filesystem::path& file);

// The memory of a request without its first `done` bytes and what is not needed.
std::vector<iovec> memory_after(const IoPlan& plan, const IoRequest& request, std::uint64_t done);

// From the bounce buffer to the pieces.
void copy_out(const IoRequest& request, const std::byte* bounce, std::span<const IoPiece> pieces);

}  // namespace embermap
