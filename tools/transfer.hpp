// What import, export and convert share: options, reporting.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/copy_file.hpp"
#include "io/rows.hpp"
#include "io/vocabulary.hpp"
#include "tools/any_rows.hpp"
#include "tools/command.hpp"
#include "tools/paths.hpp"

namespace embermap::tools {

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

// How a file is read: --from, --source-dtype, --dim, --offset, --allow-external.
class SourceArguments {
 public:
  void add_to(CLI::App& command);
  Location location(const std::string& text) const { return parse_source("SRC", text, from_); }
  ReadOptions options(const Location& source) const;  // throws UsageError
  std::optional<DType> dtype() const;

 private:
  std::string from_, source_dtype_;
  LayoutArguments layout_;
  bool allow_external_ = false;
};

// Which rows: --rows (only in some commands), --order, --jobs.
class SelectionArguments {
 public:
  void add_to(CLI::App& command, const char* order_help, bool with_rows = true);
  // `permutation`: whether the order has to be one. Throws UsageError.
  RowSelection selection(bool permutation) const;
  bool some() const noexcept { return rows_.given(); }  // --rows

 private:
  RangeArguments rows_;
  std::string order_, jobs_;
};

// "a,b" or "a=x,b": names, and what each is called in a file.
struct NamedField {
  std::string field, name;
};
std::vector<NamedField> parse_fields(const std::string& text);  // throws UsageError

void add_dtype_option(CLI::App& command, std::string& dtype, bool names_bytes);  // --dtype
std::optional<DType> optional_dtype(std::string_view option, const std::string& text);

void add_vocabulary_option(CLI::App& command, std::string& vocabulary, const char* help);  // --vocab
// Throws UsageError for a --vocab that nothing needs.
void check_vocabulary_option(const std::string& vocabulary, bool words);

// How a file is written: --gzip, --overwrite, --check, --resume.
class DestinationArguments {
 public:
  void add_to(CLI::App& command);
  // Sets what concerns writing. Throws UsageError.
  void set(CopyOptions& options, const Location& destination) const;
  bool overwrite() const noexcept { return overwrite_; }
  bool check() const noexcept { return check_; }

 private:
  std::string gzip_;
  bool overwrite_ = false, check_ = false, resume_ = false;
};

// What was done, for --json and for people.
struct TransferResult {
  std::string source, destination;
  std::uint64_t rows = 0, dim = 0;
  DType from = DType::kFloat32, to = DType::kFloat32;
  ConversionReport report;
  double seconds = 0;
  std::vector<Remark> remarks = {};                                         // of the source
  std::vector<std::pair<std::string, std::filesystem::path>> written = {};  // beside the rows: what, and where
};

// The same of a copy, with {"vocabulary", "order", "resumed_rows", "checked"} where there are such.
TransferResult transfer_result(const std::string& source, const std::string& destination, const CopyResult& copied,
                               double seconds);
Json copy_json(const CopyResult& copied, bool checked);

// Warns about values that became infinite or zero, and of doubts among the remarks; prints the result, and the other remarks, as
// the options say. `extra` is added to the JSON object.
void print_transfer(const Common& common, const TransferResult& result, const Json& extra = Json::object());

// print_transfer() for copies of one or, where `fields` names them, several arrays, which the JSON object then lists as "fields".
void print_transfers(const Common& common, const std::string& source, const std::string& destination,
                     const std::vector<CopyResult>& copied, const std::vector<NamedField>& fields, bool checked, double seconds,
                     const Json& extra = Json::object());

}  // namespace embermap::tools
