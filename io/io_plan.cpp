#include "io/io_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());

std::uint64_t end_of(const IoPiece& piece) { return piece.offset + piece.bytes; }

class Planner {
 public:
  Planner(std::span<const IoPiece> pieces, const DirectAlignment& alignment, bool write)
      : pieces_{pieces}, alignment_{alignment}, write_{write} {}

  IoPlan plan() {
    for (std::size_t i = 0; i < pieces_.size();) {
      if (pieces_[i].bytes == 0) {
        plan_.empty.push_back(i++);
        continue;
      }
      const Way way = way_of(pieces_[i]);
      i = way == Way::kBounced ? add_bounced(i) : add_plain(i, way);
    }
    return std::move(plan_);
  }

 private:
  enum class Way : std::uint8_t { kBuffered, kDirect, kBounced };

  Way way_of(const IoPiece& piece) const {
    if (alignment_.offset == 0) return Way::kBuffered;
    const bool placed =
        piece.offset % alignment_.offset == 0 && reinterpret_cast<std::uintptr_t>(piece.memory) % alignment_.memory == 0;
    const bool whole = piece.bytes % alignment_.offset == 0;
    if (placed && (whole || (!write_ && piece.room >= round_up(piece.bytes, alignment_.offset)))) return Way::kDirect;
    return write_ ? Way::kBuffered : Way::kBounced;
  }

  std::uint64_t asked(std::uint64_t bytes, Way way) const {
    return way == Way::kDirect ? round_up(bytes, alignment_.offset) : bytes;
  }

  // A request whose memory begins with `memory`; `needed` may grow.
  IoRequest begin(std::size_t piece, std::uint64_t offset, Way way) const {
    IoRequest request;
    request.offset = offset;
    request.first_piece = piece;
    request.pieces = 1;
    request.first_vector = plan_.vectors.size();
    request.direct = way != Way::kBuffered;
    request.bounced = way == Way::kBounced;
    return request;
  }

  void add(IoRequest request) {
    plan_.direct = plan_.direct || request.direct;
    plan_.buffered = plan_.buffered || !request.direct;
    if (!request.direct) plan_.buffered_bytes += request.bytes;
    if (request.direct && (request.offset % kCachePage != 0 || (request.offset + request.bytes) % kCachePage != 0))
      plan_.shares_blocks = true;
    if (request.bounced) plan_.bounce_bytes = std::max(plan_.bounce_bytes, request.bytes);
    if (request.part) {
      if (plan_.parts.empty()) plan_.parts.resize(pieces_.size());
      ++plan_.parts[request.first_piece];
    }
    plan_.requests.push_back(request);
  }

  // Memory that follows the last vector of this request joins it.
  bool add_memory(IoRequest& request, std::byte* memory, std::uint64_t bytes) {
    if (request.vectors > 0) {
      iovec& last = plan_.vectors.back();
      if (static_cast<std::byte*>(last.iov_base) + last.iov_len == memory) {
        last.iov_len += bytes;
        return true;
      }
      if (request.vectors == kRequestVectors) return false;
    }
    plan_.vectors.push_back({memory, bytes});
    ++request.vectors;
    return true;
  }

  std::size_t add_plain(std::size_t first, Way way) {
    const IoPiece& piece = pieces_[first];
    const std::uint64_t most = way == Way::kBuffered ? kBufferedBytes : kRequestBytes;
    if (piece.bytes > most) {
      for (std::uint64_t done = 0; done < piece.bytes; done += most) {
        IoRequest request = begin(first, piece.offset + done, way);
        request.part = true;
        request.needed = std::min(most, piece.bytes - done);
        request.bytes = asked(request.needed, way);
        add_memory(request, piece.memory + done, request.bytes);
        add(request);
      }
      return first + 1;
    }
    IoRequest request = begin(first, piece.offset, way);
    request.needed = piece.bytes;
    request.bytes = asked(piece.bytes, way);
    add_memory(request, piece.memory, request.bytes);
    std::size_t i = first + 1;
    for (; i < pieces_.size(); ++i) {
      const IoPiece& next = pieces_[i];
      // A piece that was rounded up is followed only by one that begins where that ends.
      if (next.bytes == 0 || next.offset != request.offset + request.bytes || way_of(next) != way) break;
      const std::uint64_t bytes = asked(next.bytes, way);
      if (request.bytes + bytes > most || !add_memory(request, next.memory, bytes)) break;
      request.needed = request.bytes + next.bytes;
      request.bytes += bytes;
      ++request.pieces;
    }
    add(request);
    return i;
  }

  std::size_t add_bounced(std::size_t first) {
    const std::uint64_t unit = alignment_.offset;
    const std::uint64_t begin_at = round_down(pieces_[first].offset, unit);
    std::uint64_t end = round_up(end_of(pieces_[first]), unit);
    if (end - begin_at > kBouncedBytes) {
      const std::uint64_t needed_end = end_of(pieces_[first]);
      for (std::uint64_t at = begin_at; at < needed_end; at += kBouncedBytes) {
        IoRequest request = begin(first, at, Way::kBounced);
        request.part = true;
        request.bytes = std::min(kBouncedBytes, end - at);
        request.needed = std::min(request.bytes, needed_end - at);
        add(request);
      }
      return first + 1;
    }
    IoRequest request = begin(first, begin_at, Way::kBounced);
    std::size_t i = first + 1;
    for (; i < pieces_.size(); ++i) {
      const IoPiece& next = pieces_[i];
      if (next.bytes == 0 || round_down(next.offset, unit) > end || way_of(next) != Way::kBounced) break;
      const std::uint64_t next_end = round_up(end_of(next), unit);
      if (next_end - begin_at > kBouncedBytes) break;
      end = next_end;
      ++request.pieces;
    }
    request.bytes = end - begin_at;
    request.needed = end_of(pieces_[i - 1]) - begin_at;
    add(request);
    return i;
  }

  std::span<const IoPiece> pieces_;
  DirectAlignment alignment_;
  bool write_;
  IoPlan plan_;
};

}  // namespace

void check_pieces(std::span<const IoPiece> pieces, std::string_view call, const std::filesystem::path& file) {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const IoPiece& piece = pieces[i];
    if (piece.offset > kLargestOffset || piece.bytes > kLargestOffset - piece.offset)
      throw IoError(EOVERFLOW, call, file, piece.offset, piece.bytes);
    if (piece.offset < end)
      throw InvalidArgument(fmt::format("{} {}: piece {} at byte {} begins before byte {}, where the one before it ends", call,
                                        printable(file), i, piece.offset, end));
    if (piece.room < piece.bytes)
      throw InvalidArgument(
          fmt::format("{} {}: piece {} of {} bytes has room for {}", call, printable(file), i, piece.bytes, piece.room));
    end = end_of(piece);
  }
}

IoPlan plan_reads(std::span<const IoPiece> pieces, const DirectAlignment& alignment, const std::filesystem::path& file) {
  check_pieces(pieces, "read", file);
  return Planner(pieces, alignment, /*write=*/false).plan();
}

IoPlan plan_writes(std::span<const IoPiece> pieces, const DirectAlignment& alignment, const std::filesystem::path& file) {
  check_pieces(pieces, "write", file);
  return Planner(pieces, alignment, /*write=*/true).plan();
}

std::vector<iovec> memory_after(const IoPlan& plan, const IoRequest& request, std::uint64_t done) {
  std::vector<iovec> rest;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < request.vectors; ++i) {
    const iovec& vector = plan.vectors[request.first_vector + i];
    const std::uint64_t begin = std::max(at, done);
    const std::uint64_t end = std::min(at + vector.iov_len, request.needed);
    if (begin < end) rest.push_back({static_cast<std::byte*>(vector.iov_base) + (begin - at), end - begin});
    at += vector.iov_len;
  }
  return rest;
}

void copy_out(const IoRequest& request, const std::byte* bounce, std::span<const IoPiece> pieces) {
  const std::uint64_t request_end = request.offset + request.needed;
  for (const IoPiece& piece : pieces.subspan(request.first_piece, request.pieces)) {
    const std::uint64_t begin = std::max(piece.offset, request.offset);
    const std::uint64_t end = std::min(end_of(piece), request_end);
    if (begin < end) std::memcpy(piece.memory + (begin - piece.offset), bounce + (begin - request.offset), end - begin);
  }
}

}  // namespace embermap
