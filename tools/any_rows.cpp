#include "tools/any_rows.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/compare.hpp"
#include "io/row_range.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/store_options.hpp"
#include "tools/transfer.hpp"

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

std::pair<std::uint64_t, std::uint64_t> RangeArguments::of(std::uint64_t rows) const {
  if (text_.empty()) return {0, rows};
  const std::size_t colon = text_.find(':');
  if (colon == std::string::npos || text_.find(':', colon + 1) != std::string::npos)
    throw UsageError(fmt::format("--rows: '{}' is no FIRST:END", text_));
  const std::string first_text = text_.substr(0, colon), end_text = text_.substr(colon + 1);
  const std::uint64_t first = first_text.empty() ? 0 : parse_count("--rows", first_text);
  const std::uint64_t end = end_text.empty() ? rows : parse_count("--rows", end_text);
  if (!end_text.empty() && end < first) throw UsageError(fmt::format("--rows: {} ends before it begins", text_));
  if (first > rows || end > rows) throw InvalidArgument(fmt::format("--rows {}: there are {} rows", text_, grouped(rows)));
  return {first, end - first};
}

std::unique_ptr<RowReader> RangeArguments::apply(std::unique_ptr<RowReader> reader) const {
  if (!given()) return reader;
  const auto [first, count] = of(reader->rows());
  return std::make_unique<RangeReader>(std::move(reader), first, count);
}

std::unique_ptr<RowReader> open_written(const Location& destination, const ReadOptions& options) {
  Location location = destination;
  // Names that writers give where none was given.
  if (location.selector.empty() && location.format == Location::Format::kHdf5) location.selector = "/data";
  ReadOptions reading = options;
  const DType wanted = *options.dtype;
  if (format_has_words(location.format)) {
    // Text has numbers, and no dtype: whole ones need float64, what was written as float32 is that again.
    reading.dtype = location.format != Location::Format::kWord2vecBinary && (wanted == DType::kFloat64 || !is_floating(wanted))
                        ? DType::kFloat64
                        : DType::kFloat32;
  } else if (location.format != Location::Format::kRaw && wanted != DType::kBFloat16) {
    reading.dtype.reset();  // the file says it
  }
  if (location.format == Location::Format::kNpy || format_has_members(location.format)) reading.dim = 0;
  return open_rows(location, reading);
}

void check_written(RowReader& source, RowReader& written, DType to, bool bits, const std::string& destination,
                   std::uint64_t memory) {
  ConvertingReader converted(source, to, memory / 4);
  const RowDifference found = compare_rows(converted, written, bits, memory / 2, {});
  if (!found.same())
    throw CorruptError(fmt::format(
        "{}: read back, {} elements in {} rows are not what was written; the first is row {}, column {}", printable(destination),
        grouped(found.elements), grouped(found.different_rows), found.first_row, found.first_column));
}

}  // namespace embermap::tools
