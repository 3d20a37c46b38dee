// Rows of whatever is named on the command line: a file, or a table of a store.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "io/copy_file.hpp"
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
  // The same for a copy, which looks at the rows that there are. Throws UsageError.
  RowSelection selection() const;

 private:
  std::string text_;
};

}  // namespace embermap::tools
