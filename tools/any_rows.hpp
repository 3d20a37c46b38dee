// Rows of whatever is named on the command line: a file, or a table of a store.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "io/rows.hpp"
#include "store/store.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

struct AnyRows {
  std::optional<Store> store;  // open for reading, for a table
  std::unique_ptr<RowReader> reader;
};

// `text`: FILE, FILE:NAME, STORE/TABLE or STORE/TABLE:field; a file that is there comes first. `format`: what --from names, for a
// file. A store gets `memory` bytes. Throws UsageError, and what opening throws.
AnyRows open_any_rows(std::string_view option, const std::string& text, const std::string& format, const ReadOptions& options,
                      const Common& common, std::uint64_t memory);

// --rows FIRST:END, as a slice of Python: either may be left out, END is not among them. Counts may be written as 1e6.
class RangeArguments {
 public:
  void add_to(CLI::App& command);
  bool given() const noexcept { return !text_.empty(); }
  // FIRST and how many of `rows`. Throws UsageError for a text that is no range, InvalidArgument for rows that are not there.
  std::pair<std::uint64_t, std::uint64_t> of(std::uint64_t rows) const;
  // `reader` itself if nothing was given.
  std::unique_ptr<RowReader> apply(std::unique_ptr<RowReader> reader) const;

 private:
  std::string text_;
};

// What create_rows() has written there, to be read back. `options`: as the rows were written.
std::unique_ptr<RowReader> open_written(const Location& destination, const ReadOptions& options);

// For --check: compares what was written with `source`, whose values become `to`: all bits, or values alone, for text keeps no
// payload of NaN. Throws CorruptError naming the first element that differs.
void check_written(RowReader& source, RowReader& written, DType to, bool bits, const std::string& destination,
                   std::uint64_t memory);

}  // namespace embermap::tools
