#include "store/geometry.hpp"

#include <fmt/format.h>

#include <bit>
#include <limits>
#include <numeric>

#include "base/checked.hpp"

namespace embermap {

std::uint64_t Geometry::rows_in(std::uint64_t page) const noexcept {
  const std::uint64_t first = page * rows_per_page;
  return first >= rows ? 0 : std::min(rows_per_page, rows - first);
}

Geometry make_geometry(std::uint64_t rows, std::uint64_t record_bytes, std::uint64_t alignment, bool padded,
                       std::uint64_t page_bytes) {
  if (page_bytes < kMinPageBytes || page_bytes > kMaxPageBytes || !std::has_single_bit(page_bytes))
    throw InvalidArgument(
        fmt::format("page size {} is not a power of two from {} to {}", page_bytes, kMinPageBytes, kMaxPageBytes));
  Geometry geometry{.rows = rows, .stride = record_bytes, .rows_per_page = 1, .data_offset = kDataOffset};
  // Up to an eighth of padding is worth pages that direct I/O can move as they are.
  const auto cheap = [&](std::uint64_t stride) { return padded && stride - record_bytes <= record_bytes / 8; };
  if (record_bytes >= page_bytes) {
    const std::uint64_t stride = round_up(record_bytes, kDirectAlignment);
    if (cheap(stride)) geometry.stride = stride;
  } else {
    const std::uint64_t most = page_bytes / record_bytes;
    geometry.rows_per_page = most;
    std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
    for (std::uint64_t count = most; count > 0; --count) {
      // The least stride with which `count` records are a multiple of 512 bytes.
      const std::uint64_t unit = std::lcm(kDirectAlignment / std::gcd(count, kDirectAlignment), alignment);
      const std::uint64_t stride = round_up(record_bytes, unit);
      if (stride >= best || count * stride > page_bytes || (stride != record_bytes && !cheap(stride))) continue;
      best = stride;
      geometry.stride = stride;
      geometry.rows_per_page = count;
      if (stride == record_bytes) break;  // the most records without any padding
    }
  }
  const std::uint64_t data = checked_mul(rows, geometry.stride, "bytes of the table");
  const std::uint64_t last =
      checked_add(checked_add(data, geometry.data_offset, "bytes of the table"), geometry.page_bytes(), "bytes of the table");
  if (last > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    throw InvalidArgument(fmt::format("{} rows of {} bytes are more than a file can hold", rows, geometry.stride));
  return geometry;
}

}  // namespace embermap
