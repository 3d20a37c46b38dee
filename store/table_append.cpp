// Rows at the end of a table that has just grown.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "store/table_impl.hpp"

namespace embermap {

void TableImpl::fill_pages(std::uint64_t first, std::uint64_t end, const FillRecords& body) {
  const Geometry& geometry = entry_.geometry;
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
    // Of row page * rows_per_page on: pages lie side by side, as in the file.
    body(from - first, to - from, memory.data() + (from - page * geometry.rows_per_page) * geometry.stride);
    file_->write(pages);
  }
  rows_written_ += end - first;
}

void TableImpl::fill(std::uint64_t first, std::span<const std::byte> weights) {
  const std::uint64_t stride = entry_.geometry.stride, row_bytes = schema_.fields()[0].bytes;
  fill_pages(first, first + weights.size() / row_bytes, [&](std::uint64_t row, std::uint64_t count, std::byte* records) {
    for (std::uint64_t i = 0; i < count; ++i)
      std::memcpy(records + i * stride, weights.data() + (row + i) * row_bytes, row_bytes);
  });
}

void TableImpl::fill(std::uint64_t first, const Table::NewRows& rows, const Progress& progress) {
  const std::uint64_t stride = entry_.geometry.stride, all = rows.begin()->second->rows();
  for (const auto& [name, reader] : rows) reader->read_ahead(0, all, core_->transfer_bytes() / rows.size());
  std::vector<std::byte> buffer;
  core_->report(progress, 0, all);
  fill_pages(first, first + all, [&](std::uint64_t row, std::uint64_t count, std::byte* records) {
    for (const auto& [name, reader] : rows) {
      const Field& field = schema_.field(name);
      buffer.resize(std::max<std::size_t>(buffer.size(), count * field.bytes));
      reader->read(row, count, buffer.data());
      for (std::uint64_t i = 0; i < count; ++i)
        std::memcpy(records + i * stride + field.offset, buffer.data() + i * field.bytes, field.bytes);
    }
    core_->report(progress, row + count, all);
  });
}

}  // namespace embermap
