// Rows of another dtype than they are read in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "io/convert.hpp"
#include "io/rows.hpp"

namespace embermap {

// `source` with its values converted to `to` as they are read. For whoever takes what a reader gives.
class ConvertingReader final : public RowReader {
 public:
  // Uses at most `memory` bytes (at least one row).
  ConvertingReader(std::unique_ptr<RowReader> source, DType to, std::uint64_t memory)
      : source_{std::move(source)}, report_{std::make_shared<ConversionReport>()} {
    rows_ = source_->rows();
    dim_ = source_->dim();
    dtype_ = to;
    ahead_ = std::min<std::uint64_t>(memory / 2, 32U << 20);
    memory -= ahead_;
    const std::uint64_t row_bytes = checked_mul(dim_, item_size(source_->dtype()), "bytes of a row");
    piece_rows_ = std::clamp<std::uint64_t>(source_->block_rows(), 1,
                                            std::max<std::uint64_t>(1, memory / std::max<std::uint64_t>(1, row_bytes)));
  }
  std::string description() const override { return source_->description(); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    if (source_->dtype() == dtype_) return source_->read(first, count, out);
    const std::uint64_t row_bytes = dim_ * item_size(source_->dtype());
    for (std::uint64_t done = 0; done < count;) {
      const std::uint64_t piece = std::min(piece_rows_, count - done);
      buffer_.resize(std::max<std::size_t>(buffer_.size(), piece * row_bytes));
      source_->read(first + done, piece, buffer_.data());
      convert_rows(*source_, first + done, piece, buffer_.data(), dtype_, out + done * dim_ * item_size(dtype_), *report_);
      done += piece;
    }
  }
  std::uint64_t block_rows() const override { return source_->block_rows(); }
  std::vector<Remark> remarks() const override { return source_->remarks(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    return source_->read_ahead(first, count, std::max(memory, ahead_));
  }
  bool sparse() const override { return source_->sparse(); }
  std::string how() const override { return source_->how(); }
  // Of all that was read so far. To be looked at while nothing is being read.
  const std::shared_ptr<ConversionReport>& shared_report() const noexcept { return report_; }

 private:
  std::unique_ptr<RowReader> source_;
  std::uint64_t ahead_;  // bytes of the memory for what is read ahead
  std::uint64_t piece_rows_;
  std::vector<std::byte> buffer_;
  std::shared_ptr<ConversionReport> report_;
};

}  // namespace embermap
