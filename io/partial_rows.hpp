// Rows of a copy that may be interrupted, kept beside the file that they will become: what --resume goes on from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/file.hpp"
#include "io/rows.hpp"

namespace embermap {

// ".NAME.resume" beside the target: `header`, then the rows so far; and ".NAME.resume.json", which says of what copy they are and
// how many are on disk for certain. Both stay when this ends, unless finish() or remove() was called. Not thread-safe; a second
// process that wants the same files is refused (LockedError).
class PartialRows final : public RowWriter {
 public:
  struct Copy {
    // What the rows are made of and how: a file with its size, time and inode, dtype, order, ... If it is not the same again the
    // rows that are there are not what would be copied: InvalidArgument naming the key with both values.
    std::map<std::string, std::string> of;
    std::uint64_t rows = 0, dim = 0;
    DType from = DType::kFloat32, dtype = DType::kFloat32;  // as write() is given them, as they are kept
    std::string header;  // bytes before the rows, so that all of the file is the one wanted; empty: rows alone
  };
  // Throws AlreadyExists unless `target` may be made or replaced, InvalidArgument, LockedError, FormatError (a record that is
  // none), IoError.
  PartialRows(const std::filesystem::path& target, const Copy& copy, bool overwrite);
  ~PartialRows() override;

  std::uint64_t done() const noexcept { return done_; }                // rows that are there
  const ConversionReport& report() const noexcept { return report_; }  // of all of them
  // Throws DTypeError naming row and column of a value that the dtype cannot hold.
  void write(std::uint64_t count, const std::byte* rows) override;
  // Syncs the rows and writes the record: what write() does itself every 64 MiB.
  void save();
  // All rows are there: the file gets the target's name.
  void finish() override;
  // The rows, to be written in another format. As long as this lives.
  std::unique_ptr<RowReader> reader() const;
  void remove() noexcept;

  static std::filesystem::path rows_path(const std::filesystem::path& target);
  static std::filesystem::path record_path(const std::filesystem::path& target);

 private:
  std::filesystem::path target_, rows_path_, record_path_;
  Copy copy_;
  bool overwrite_;
  std::uint64_t row_bytes_, done_ = 0, saved_ = 0;
  ConversionReport report_;
  std::vector<std::byte> converted_;
  File file_;
};

// Copies the rows that are not there yet, with buffers of `memory` bytes. Where that ends early, those that are there are saved,
// or, if there are none, both files removed.
void continue_partial(RowReader& reader, PartialRows& partial, std::uint64_t memory, const Progress& progress);

// "1234 bytes, changed at 1700000000.123456789, inode 42 on 2049": another one when the file has changed.
std::string file_identity(const std::filesystem::path& file);

// What a file with these rows and nothing else begins with; nothing where its rows do not just follow one another.
std::optional<std::string> plain_header(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype);

}  // namespace embermap
