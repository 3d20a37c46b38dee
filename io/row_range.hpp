// Some rows of a reader, as a reader of their own.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "io/rows.hpp"

namespace embermap {

// Rows [first, first + count) of `source`, numbered from 0.
class RangeReader final : public RowReader {
 public:
  // Takes `source`. Throws InvalidArgument for rows that it does not have.
  RangeReader(std::unique_ptr<RowReader> source, std::uint64_t first, std::uint64_t count)
      : source_{std::move(source)}, first_{first} {
    if (first > source_->rows() || count > source_->rows() - first)
      throw InvalidArgument(
          fmt::format("{}: rows {} to {} of {}", source_->description(), first, first + count, source_->rows()));
    rows_ = count;
    dim_ = source_->dim();
    dtype_ = source_->dtype();
  }
  std::string description() const override {
    return fmt::format("rows {} to {} of {}", first_, first_ + rows_, source_->description());
  }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override { source_->read(first_ + first, count, out); }
  std::uint64_t block_rows() const override { return source_->block_rows(); }
  std::vector<Remark> remarks() const override { return source_->remarks(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    return source_->read_ahead(first_ + first, count, memory);
  }
  bool sparse() const override { return source_->sparse(); }
  std::string how() const override { return source_->how(); }

 private:
  std::unique_ptr<RowReader> source_;
  std::uint64_t first_;
};

}  // namespace embermap
