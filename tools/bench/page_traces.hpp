// Page traces of training: which pages the batches touch.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace embermap::bench {

// The distinct pages of each batch, ascending. Pages are numbered from 0.
struct PageTrace {
  std::uint64_t pages = 0;  // that there are
  std::vector<std::uint32_t> touched;
  std::vector<std::uint64_t> ends;  // of each batch in `touched`

  std::uint64_t batches() const noexcept { return ends.size(); }
  std::span<const std::uint32_t> batch(std::uint64_t i) const noexcept {
    const std::uint64_t begin = i == 0 ? 0 : ends[i - 1];
    return {touched.data() + begin, ends[i] - begin};
  }
};

// Shapes of ids. Rows are permuted by a fixed bijection but in `scan` parts, so that hot rows scatter over the pages as hashed
// ids do.
//   uniform, zipf0.8, zipf1.05, zipf1.2
//   drift   Zipf(1.05); after every 2^20 ids the most popular thousandth of the rows is replaced by the next one
//   scans   Zipf(1.05), `rows` ids of it in turn with a scan of the table
//   epochs  the rows in order, again and again
//   loop    the same over a fifth of the rows: for memory a little smaller than that
struct Shape {
  std::string name;
  std::uint64_t rows, rows_per_page, ids, batch;
};
const std::vector<std::string>& shape_names();
PageTrace make_trace(const Shape& shape);

// Ids of a file: `ids` batched as they come, `epochs` times over. Pages are those that occur, numbered in order.
PageTrace make_trace(std::span<const std::int64_t> ids, std::uint64_t rows_per_page, std::uint64_t batch, std::uint64_t epochs);

// Share of the pages of such ids that one id only touches.
double pages_seen_once(std::span<const std::int64_t> ids, std::uint64_t rows_per_page);

}  // namespace embermap::bench
