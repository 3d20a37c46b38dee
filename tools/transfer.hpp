// What import, export and convert share: converting, reporting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "io/rows.hpp"
#include "io/vocabulary.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

// `source` with its values converted to `to` as they are read. For stores, which import what a reader gives.
class ConvertingReader final : public RowReader {
 public:
  // Keeps a reference to `source`. Uses at most `memory` bytes (at least one row).
  ConvertingReader(RowReader& source, DType to, std::uint64_t memory);
  std::string description() const override { return source_.description(); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override;
  std::uint64_t block_rows() const override { return source_.block_rows(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    return source_.read_ahead(first, count, std::max(memory, ahead_));
  }
  bool sparse() const override { return source_.sparse(); }
  std::string how() const override { return source_.how(); }
  const ConversionReport& report() const noexcept { return report_; }

 private:
  RowReader& source_;
  std::uint64_t ahead_;  // bytes of the memory for what is read ahead
  std::uint64_t piece_rows_;
  std::vector<std::byte> buffer_;
  ConversionReport report_;
};

inline constexpr const char* kSourceHelp =
    "x.npy, x.npy:field, x.npz:member, x.h5:/path/to/dataset, x.pt:tensor, x.vec, ... (`embermap ls FILE` shows what a file "
    "holds)";
inline constexpr const char* kDestinationHelp =
    "x.npy, x.npz:member, x.h5:/path/to/dataset, x.safetensors:tensor, x.pt, x.vec, ...";

// --from and --to, for parse_source() and parse_destination().
void add_from_option(CLI::App& command, std::string& format);
void add_to_option(CLI::App& command, std::string& format);

// --dim and --offset: what files cannot tell of themselves; --follow-links.
class LayoutArguments {
 public:
  void add_to(CLI::App& command);
  void set(ReadOptions& options, const Location& source) const;  // throws UsageError
  // The same where the source is not known yet: what it does not need is not looked at.
  ReadOptions options(ReadOptions options) const;

 private:
  std::string dim_, offset_;
  bool follow_links_ = false;
};

void add_vocabulary_option(CLI::App& command, std::string& vocabulary, const char* help);  // --vocab
// Throws UsageError for a --vocab that nothing needs.
void check_vocabulary_option(const std::string& vocabulary, bool words);
// {"vocabulary": path} where one was written, for print_transfer().
Json vocabulary_json(const WordTransfer& words);

// --gzip and --overwrite.
class DestinationArguments {
 public:
  void add_to(CLI::App& command);
  WriteOptions options(const Location& destination) const;  // throws UsageError

 private:
  std::string gzip_;
  bool overwrite_ = false;
};

// What was done, for --json and for people.
struct TransferResult {
  std::string source, destination;
  std::uint64_t rows = 0, dim = 0;
  DType from = DType::kFloat32, to = DType::kFloat32;
  ConversionReport report;
  double seconds = 0;
  std::vector<Remark> remarks = {};  // of the source
};

// `memory` / `share` for copying, or more, up to all of it, where a single row takes that: an error then names what the user
// gave.
std::uint64_t copy_memory(const RowReader& reader, DType to, std::uint64_t memory, std::uint64_t share);

// Warns about values that became infinite or zero, and of doubts among the remarks; prints the result, and the other remarks, as
// the options say. `extra` is added to the JSON object.
void print_transfer(const Common& common, const TransferResult& result, const Json& extra = Json::object());

}  // namespace embermap::tools
