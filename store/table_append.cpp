// Rows at the end of a table that has just grown.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "store/table_impl.hpp"

namespace embermap {
void TableImpl::fill(std::uint64_t first, std::span<const std::byte> weights) {
  const Geometry& geometry = entry_.geometry;
  const std::uint64_t row_bytes = schema_.fields()[0].bytes;
  const std::uint64_t end = first + weights.size() / row_bytes;
  const std::uint64_t step = std::max<std::uint64_t>(1, core_->transfer_bytes() / geometry.page_bytes());
  const std::uint64_t end_page = geometry.page_of(end - 1) + 1;
  const AlignedBuffer memory(std::min(step, end_page - geometry.page_of(first)) * geometry.page_bytes());
  std::vector<PageBuffer> pages;
  for (std::uint64_t page = geometry.page_of(first); page < end_page; page += pages.size()) {
    pages.clear();
    for (std::uint64_t i = 0; i < step && page + i < end_page; ++i)
      pages.push_back({page + i, memory.data() + i * geometry.page_bytes()});
    // Rows before the first one, state, and padding are what they were.
    file_->read(pages);
    const std::uint64_t from = std::max(first, page * geometry.rows_per_page);
    const std::uint64_t to = std::min(end, (page + pages.size()) * geometry.rows_per_page);
    std::byte* const base = memory.data();  // of row page * rows_per_page: pages lie side by side, as in the file
    for (std::uint64_t row = from; row < to; ++row)
      std::memcpy(base + (row - page * geometry.rows_per_page) * geometry.stride, weights.data() + (row - first) * row_bytes,
                  row_bytes);
    file_->write(pages);
  }
  rows_written_ += end - first;
}

}  // namespace embermap
