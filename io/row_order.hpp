// Rows in another order: a list of row numbers in a file, a reader that follows it, and the way back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/rows.hpp"
#include "io/vocabulary.hpp"

namespace embermap {

// Numbers of rows in a file of any format: one dimension, or two of which one is 1, of any integer dtype, also int16, uint16,
// uint32 and uint64; a .txt has whole numbers with blanks or line ends between. Not thread-safe.
class RowOrder {
 public:
  // Throws IoError, FormatError (another shape, a text of something else, a number past 63 bits), DTypeError (not integers),
  // InvalidArgument.
  static std::unique_ptr<RowOrder> open(const std::filesystem::path& file);
  virtual ~RowOrder() = default;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::uint64_t size() const noexcept { return size_; }
  // Numbers [first, first + out.size()). Quick in ascending order. Throws FormatError for one that is negative.
  virtual void read(std::uint64_t first, std::span<std::uint64_t> out) = 0;

 protected:
  std::filesystem::path path_;
  std::uint64_t size_ = 0;
};

// Where the way back lies by default: "x.npy.order.npy" of "x.npy"; beside a table, "STORE/TABLE.order.npy".
std::filesystem::path order_beside(const std::filesystem::path& file);

// Looks at all numbers, with at most `memory` bytes (in as many passes as that takes), and writes the way back to `file`: an
// int64 .npy of shape (rows,) in which entry r is the place of row r in the new order, the first if it has several, and -1 if
// it has none. `permutation`: every row is there once. Throws InvalidArgument naming file, place and number: a row that is not
// there, is there twice, or is left out.
class InverseOrder {
 public:
  InverseOrder(RowOrder& order, std::uint64_t rows, bool permutation, const std::filesystem::path& file, bool overwrite,
               std::uint64_t memory);
  // Under its name. Without it nothing is left behind; withdraw() takes it away again.
  void finish();
  void withdraw() noexcept;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<TemporaryFile> temporary_;
  bool complete_ = false;
};

// Rows of `source` in the order of `order`: row i is row order[i] of it. A block of rows is read in the order of the file, each
// row once, neighbours together.
class OrderedReader final : public RowReader {
 public:
  // Takes both. `memory`: for a block, at least one row. `words`: its sink is given the words of the new rows; the source must
  // have been opened with a sink that appends to its `read`.
  struct Words {
    std::vector<std::pair<std::uint64_t, std::string>> read;  // by rows of the source, ascending
    WordSink sink;
  };
  OrderedReader(std::unique_ptr<RowReader> source, std::unique_ptr<RowOrder> order, std::uint64_t memory,
                std::shared_ptr<Words> words = nullptr);
  std::string description() const override;
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override;
  std::uint64_t block_rows() const override { return block_rows_; }
  std::vector<Remark> remarks() const override { return source_->remarks(); }

 private:
  std::unique_ptr<RowReader> source_;
  std::unique_ptr<RowOrder> order_;
  std::shared_ptr<Words> words_;
  std::uint64_t row_bytes_, block_rows_;
  std::vector<std::uint64_t> numbers_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sorted_;  // row of the source, place in the block
  std::vector<std::byte> run_;
};

}  // namespace embermap
