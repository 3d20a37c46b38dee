#include "tools/any_rows.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {

AnyRows open_any_rows(std::string_view option, const std::string& text, const std::string& format, const ReadOptions& options,
                      const Common& common, std::uint64_t memory) {
  if (text.empty()) throw UsageError(fmt::format("{}: an empty path names nothing", option));
  struct stat status {};
  const bool file = stat(text.c_str(), &status) == 0 && !S_ISDIR(status.st_mode);
  if (!file && format.empty()) {
    std::optional<TablePath> path;
    try {
      path = parse_table_path(text, /*with_field=*/true);
    } catch (const UsageError&) {
      // no table; the error is that of a file
    }
    if (path && store_at(path->store)) {
      StoreOptions wanted = store_options(common, StoreOptions::Mode::kRead);
      wanted.memory = memory;
      AnyRows found{.store = Store::open(path->store, wanted), .reader = nullptr};
      found.reader = table_rows(found.store->table(path->table), path->field);
      return found;
    }
  }
  const Location location = parse_source(option, text, format);
  require_regular_file(location.file);
  check_source_is_whole(location, memory);
  return {.store = std::nullopt, .reader = open_rows(location, options)};
}

void RangeArguments::add_to(CLI::App& command) {
  command.add_option("--rows", text_, "Only these rows: FIRST:END, FIRST: or :END, END not among them")->type_name("FIRST:END");
}

RowSelection RangeArguments::selection() const {
  RowSelection out;
  if (text_.empty()) return out;
  const std::size_t colon = text_.find(':');
  if (colon == std::string::npos || text_.find(':', colon + 1) != std::string::npos)
    throw UsageError(fmt::format("--rows: '{}' is no FIRST:END", text_));
  const std::string first = text_.substr(0, colon), end = text_.substr(colon + 1);
  if (!first.empty()) out.first = parse_count("--rows", first);
  if (!end.empty()) out.end = parse_count("--rows", end);
  if (out.end && *out.end < out.first) throw UsageError(fmt::format("--rows: {} ends before it begins", text_));
  return out;
}

std::pair<std::uint64_t, std::uint64_t> RangeArguments::of(std::uint64_t rows) const {
  const RowSelection chosen = selection();
  const std::uint64_t end = chosen.end.value_or(rows);
  if (chosen.first > rows || end > rows) throw InvalidArgument(fmt::format("--rows {}: there are {} rows", text_, grouped(rows)));
  return {chosen.first, end - chosen.first};
}

}  // namespace embermap::tools
