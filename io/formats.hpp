// The readers and writers behind open_rows() and create_rows(), one pair a format.
#pragma once

#include <memory>

#include "io/rows.hpp"

namespace embermap {

std::unique_ptr<RowReader> open_npy_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_npy_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options);

std::unique_ptr<RowReader> open_hdf5_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_hdf5_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                            const WriteOptions& options);

// Counts rows for a writer: throws InvalidArgument for more than promised, or at the end for fewer.
class RowCount {
 public:
  RowCount(std::string where, std::uint64_t rows) : where_{std::move(where)}, rows_{rows} {}
  std::uint64_t done() const noexcept { return done_; }
  void add(std::uint64_t count);
  void finish();

 private:
  std::string where_;
  std::uint64_t rows_;
  std::uint64_t done_ = 0;
  bool finished_ = false;
};

}  // namespace embermap
