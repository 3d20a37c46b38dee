#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "base/error.hpp"
#include "kernels/row_walk.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

// Outputs that no cache would keep anyway are written past the caches. Measured on rows of random places: 15 % faster for rows of
// 512 and 1024 bytes and 64 MiB or more in all, equal at 16 - 32 MiB, slower for longer rows, where memcpy does better; and with
// 16 threads on a processor with 300 MiB of cache 1.6 x slower for 32 MiB, which that cache keeps.
constexpr std::uint64_t kStreamRow = 1024;
std::uint64_t stream_total() {
  static const std::uint64_t bytes = [] {
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: not known
    return std::max(std::uint64_t{32} << 20, cache > 0 ? static_cast<std::uint64_t>(cache) / 2 : 0);
  }();
  return bytes;
}

#if defined(__SSE2__)
constexpr bool kCanStream = true;

// Precondition: `to` and `bytes` are multiples of 16.
EMBERMAP_ALWAYS_INLINE inline void stream_row(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  const auto read = [&](std::uint64_t at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)); };
  const auto write = [&](std::uint64_t at, __m128i value) { _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), value); };
  std::uint64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {  // four loads, then four stores: a whole line leaves at once
    const __m128i a = read(at);
    const __m128i b = read(at + 16);
    const __m128i c = read(at + 32);
    const __m128i d = read(at + 48);
    write(at, a);
    write(at + 16, b);
    write(at + 32, c);
    write(at + 48, d);
  }
  for (; at < bytes; at += 16) write(at, read(at));
}
void finish_streaming() { _mm_sfence(); }

// The same in whole lines, which leave at once: a quarter faster on processors that can. `to` and `bytes` are multiples of 64.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx512f"))) void stream_lines(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
}
bool streams_lines() {
  static const bool can = __builtin_cpu_supports("avx512f");
  return can;
}
#else
void stream_lines(std::byte*, const std::byte*, std::uint64_t) {}
constexpr bool streams_lines() { return false; }
#endif
#else
constexpr bool kCanStream = false;
void stream_row(std::byte*, const std::byte*, std::uint64_t) {}
void finish_streaming() {}
void stream_lines(std::byte*, const std::byte*, std::uint64_t) {}
constexpr bool streams_lines() { return false; }
#endif

bool aligned(const void* address, std::uint64_t bytes) { return reinterpret_cast<std::uintptr_t>(address) % bytes == 0; }

// target(i)[0, bytes) = source(i)[0, bytes) for i in [begin, end). Bytes is a std::integral_constant for common lengths: the copy
// is then a few instructions instead of a call.
template <class Bytes, class Source, class Target>
void copy_range(Bytes bytes, std::uint64_t begin, std::uint64_t end, std::uint64_t count, const Source& source,
                const Target& target) {
  const std::uint64_t ahead = detail::prefetch_distance(bytes);
  for (std::uint64_t i = begin; i < end; ++i) {
    if (i + ahead < count) detail::prefetch(source(i + ahead), bytes);
    std::memcpy(target(i), source(i), bytes);
  }
}

template <class Source, class Target>
void copy_part(std::uint64_t bytes, std::uint64_t begin, std::uint64_t end, std::uint64_t count, const Source& source,
               const Target& target) {
  const auto copy = [&](auto length) { copy_range(length, begin, end, count, source, target); };
  switch (bytes) {
    case 4: return copy(std::integral_constant<std::uint64_t, 4>{});
    case 8: return copy(std::integral_constant<std::uint64_t, 8>{});
    case 16: return copy(std::integral_constant<std::uint64_t, 16>{});
    case 32: return copy(std::integral_constant<std::uint64_t, 32>{});
    case 64: return copy(std::integral_constant<std::uint64_t, 64>{});
    case 128: return copy(std::integral_constant<std::uint64_t, 128>{});
    default: return copy(bytes);
  }
}

// `line` is what a target must be a multiple of to be streamed: whole lines, unless rows lie one behind the other.
template <class Source, class Target>
void stream_range(std::uint64_t bytes, std::uint64_t line, std::uint64_t begin, std::uint64_t end, std::uint64_t count,
                  const Source& source, const Target& target) {
  const std::uint64_t ahead = detail::prefetch_distance(bytes);
  const bool lines = streams_lines() && bytes % 64 == 0;
  // A piece is short: its first rows are asked for as well.
  for (std::uint64_t i = begin; i < std::min(begin + ahead, count); ++i) detail::prefetch_far(source(i), bytes);
  for (std::uint64_t i = begin; i < end; ++i) {
    if (i + ahead < count) detail::prefetch_far(source(i + ahead), bytes);
    std::byte* const to = target(i);
    if (lines && aligned(to, 64))
      stream_lines(to, source(i), bytes);
    else if (aligned(to, line))
      stream_row(to, source(i), bytes);
    else
      std::memcpy(to, source(i), bytes);
  }
  finish_streaming();
}

template <class Source, class Target>
void copy_rows(std::uint64_t count, std::uint64_t bytes, std::uint64_t line, ThreadPool& pool, const Source& source,
               const Target& target) {
  if (count == 0 || bytes == 0) return;
  const bool streamed = kCanStream && bytes % line == 0 && bytes <= kStreamRow && count >= stream_total() / bytes;
  // Up to 2 MiB at a time: where the output is new memory, threads that share a huge page wait for each other while it is zeroed.
  const std::uint64_t share = std::clamp<std::uint64_t>(count / pool.threads(), detail::kGrainBytes / bytes, (2U << 20) / bytes);
  pool.parallel_for(count, std::max<std::uint64_t>(1, share), [&](std::uint64_t begin, std::uint64_t end) {
    if (streamed) return stream_range(bytes, line, begin, end, count, source, target);
    copy_part(bytes, begin, end, count, source, target);
  });
}

// From rows one behind the other, which the processor notices, to rows anywhere: whole lines past the caches where the processor
// can do that at once, else through them, and then it is told which lines. (Measured with 8 threads on rows of 512 bytes, GB/s:
// whole lines 29, lines in four parts 24, through the caches 38. But beside a DMA, and a kernel that writes rows as well, whole
// lines are the fastest, and the most even.)
template <class Target>
void scatter_range(std::uint64_t bytes, std::uint64_t count, const std::byte* in, const Target& target) {
  const std::uint64_t ahead = detail::prefetch_distance(bytes);
  const bool lines = streams_lines() && bytes % 64 == 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::byte* const to = target(i);
    if (lines && aligned(to, 64)) {
      stream_lines(to, in + i * bytes, bytes);
      continue;
    }
    if (i + ahead < count) detail::prefetch_to_write(target(i + ahead), bytes);
    std::memcpy(to, in + i * bytes, bytes);
  }
  if (lines) finish_streaming();
}

void require_same(std::uint64_t rows, std::uint64_t places, std::string_view what) {
  if (rows != places) throw InvalidArgument(fmt::format("{} rows and {} {}", rows, places, what));
}

}  // namespace

void gather_rows(std::span<const std::byte* const> rows, std::uint64_t row_bytes, std::byte* out, ThreadPool& pool) {
  copy_rows(
      rows.size(), row_bytes, aligned(out, 16) ? 16 : 64, pool, [=](std::uint64_t i) { return rows[i]; },
      [=](std::uint64_t i) { return out + i * row_bytes; });
}

void gather_rows(const std::byte* base, std::uint64_t stride, std::span<const std::uint64_t> ids, std::uint64_t row_bytes,
                 std::byte* out, ThreadPool& pool) {
  copy_rows(
      ids.size(), row_bytes, aligned(out, 16) ? 16 : 64, pool, [=](std::uint64_t i) { return base + ids[i] * stride; },
      [=](std::uint64_t i) { return out + i * row_bytes; });
}

void gather_rows_to(std::span<const std::byte* const> rows, std::span<const std::uint32_t> positions, std::uint64_t row_bytes,
                    std::byte* out, ThreadPool& pool) {
  require_same(rows.size(), positions.size(), "positions");
  copy_rows(
      rows.size(), row_bytes, 64, pool, [=](std::uint64_t i) { return rows[i]; },
      [=](std::uint64_t i) { return out + positions[i] * row_bytes; });
}

void scatter_rows(std::span<std::byte* const> rows, std::span<const std::uint32_t> sources, std::uint64_t row_bytes,
                  const std::byte* in, ThreadPool& pool) {
  require_same(rows.size(), sources.size(), "sources");
  copy_rows(
      rows.size(), row_bytes, 64, pool, [=](std::uint64_t i) { return in + sources[i] * row_bytes; },
      [=](std::uint64_t i) { return rows[i]; });
}

void gather_piece(std::span<const std::byte* const> rows, std::uint64_t row_bytes, std::byte* out) {
  if (rows.empty() || row_bytes == 0) return;
  const auto source = [=](std::uint64_t i) { return rows[i]; };
  const auto target = [=](std::uint64_t i) { return out + i * row_bytes; };
  if (kCanStream && row_bytes % 16 == 0 && row_bytes >= 64 && aligned(out, 16))
    return stream_range(row_bytes, 16, 0, rows.size(), rows.size(), source, target);
  copy_part(row_bytes, 0, rows.size(), rows.size(), source, target);
}

void scatter_piece(std::span<std::byte* const> rows, std::uint64_t row_bytes, const std::byte* in) {
  if (row_bytes == 0) return;
  scatter_range(row_bytes, rows.size(), in, [=](std::uint64_t i) { return rows[i]; });
}

}  // namespace embermap
