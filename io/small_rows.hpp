// Bytes in memory, and those of a file, as rows of one uint8: for what lies beside arrays in a file of them.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"
#include "io/file.hpp"
#include "io/rows.hpp"

namespace embermap {

class TextRows final : public RowReader {
 public:
  TextRows(std::string name, std::string text) : name_{std::move(name)}, text_{std::move(text)} {
    rows_ = text_.size();
    dim_ = 1;
    dtype_ = DType::kUInt8;
  }
  std::string description() const override { return name_; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(name_, first, count, rows_);
    std::memcpy(out, text_.data() + first, count);
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, rows_); }

 private:
  std::string name_, text_;
};

class FileBytes final : public RowReader {
 public:
  explicit FileBytes(const std::filesystem::path& path) : file_{File::open(path, File::Mode::kRead)} {
    rows_ = file_.size();
    dim_ = 1;
    dtype_ = DType::kUInt8;
  }
  std::string description() const override { return printable(file_.path()); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override { file_.read(first, {out, count}); }
  std::uint64_t block_rows() const override { return 1_MiB; }

 private:
  File file_;
};

}  // namespace embermap
