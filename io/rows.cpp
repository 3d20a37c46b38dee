#include "io/rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <system_error>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/convert.hpp"
#include "io/formats.hpp"

namespace embermap {
namespace {

struct Extension {
  std::string_view text;
  Location::Format format;
};

constexpr std::array kExtensions{Extension{".npy", Location::Format::kNpy}, Extension{".h5", Location::Format::kHdf5},
                                 Extension{".hdf5", Location::Format::kHdf5}, Extension{".he5", Location::Format::kHdf5}};

std::optional<Location::Format> format_of(std::string_view path) {
  for (const Extension& extension : kExtensions) {
    if (path.size() < extension.text.size()) continue;
    const std::string_view end = path.substr(path.size() - extension.text.size());
    if (std::equal(end.begin(), end.end(), extension.text.begin(), [](unsigned char a, char b) { return std::tolower(a) == b; }))
      return extension.format;
  }
  return std::nullopt;
}

bool path_exists(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

Location parse_location(std::string_view text) {
  if (text.empty()) throw InvalidArgument("an empty text names no file");
  if (text.find('\0') != std::string_view::npos)
    throw InvalidArgument(fmt::format("'{}' holds a zero byte, which no path can", printable(text)));
  const auto whole = [&] {
    const std::optional<Location::Format> format = format_of(text);
    if (!format) {
      std::string known;
      for (const Extension& extension : kExtensions) known += fmt::format("{}{}", known.empty() ? "" : ", ", extension.text);
      throw InvalidArgument(fmt::format("'{}': the extension names no format known here ({})", printable(text), known));
    }
    return Location{std::filesystem::path(text), {}, *format};
  };
  if (path_exists(std::filesystem::path(text))) return whole();

  std::optional<Location> last;
  for (std::size_t colon = text.rfind(':'); colon != std::string_view::npos && colon > 0; colon = text.rfind(':', colon - 1)) {
    const std::string_view before = text.substr(0, colon), after = text.substr(colon + 1);
    const std::optional<Location::Format> format = format_of(before);
    if (!format) continue;
    // "dir.h5:2/new.npy": a path, if there is such a directory.
    const std::size_t slash = after.rfind('/');
    if (slash != std::string_view::npos && format_of(text)) {
      std::error_code ignored;
      if (std::filesystem::is_directory(std::filesystem::path(text.substr(0, colon + 1 + slash)), ignored)) return whole();
    }
    if (after.empty()) throw InvalidArgument(fmt::format("'{}': nothing after the ':'", printable(text)));
    Location location{std::filesystem::path(before), std::string(after), *format};
    // "x.h5:/ds:field" and odd names: an existing file decides, else the last ':' that can.
    if (path_exists(location.file)) return location;
    if (!last) last = std::move(location);
  }
  return last ? *last : whole();
}

std::unique_ptr<RowReader> open_rows(const Location& location, const ReadOptions& options) {
  return location.format == Location::Format::kNpy ? open_npy_rows(location, options) : open_hdf5_rows(location, options);
}

std::unique_ptr<RowWriter> create_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                       const WriteOptions& options) {
  if (dim == 0) throw InvalidArgument(fmt::format("{}: a table needs at least one column", printable(location.file)));
  if (options.gzip < -1 || options.gzip > 9)
    throw InvalidArgument(
        fmt::format("{}: gzip level {} is not within 0 .. 9 (-1: no compression)", printable(location.file), options.gzip));
  checked_mul(checked_mul(rows, dim, "elements of the table"), item_size(dtype), "bytes of the table");
  return location.format == Location::Format::kNpy ? create_npy_rows(location, rows, dim, dtype, options)
                                                   : create_hdf5_rows(location, rows, dim, dtype, options);
}

void RowCount::add(std::uint64_t count) {
  if (finished_) throw InvalidArgument(fmt::format("{} is finished: no more rows can be written", where_));
  if (count > rows_ - done_)
    throw InvalidArgument(fmt::format("{}: {} rows were promised, {} more come after {}", where_, rows_, count, done_));
  done_ += count;
}

void RowCount::finish() {
  if (finished_) throw InvalidArgument(fmt::format("{} is finished already", where_));
  if (done_ != rows_)
    throw InvalidArgument(fmt::format("{}: only {} of the {} rows promised were written", where_, done_, rows_));
  finished_ = true;
}

ConversionReport copy_rows(RowReader& reader, RowWriter& writer, DType to, std::uint64_t memory, const Progress& progress) {
  ConversionReport report;
  const std::uint64_t rows = reader.rows(), dim = reader.dim();
  const DType from = reader.dtype();
  const bool convert = from != to;
  const std::uint64_t in_bytes = checked_mul(dim, item_size(from), "bytes of a row");
  const std::uint64_t out_bytes = convert ? checked_mul(dim, item_size(to), "bytes of a row") : 0;
  const std::uint64_t per_row = checked_add(in_bytes, out_bytes, "bytes of a row");
  if (memory < per_row)
    throw BudgetError(fmt::format("{}: one row takes {} to copy, more than the {} of memory given", reader.description(),
                                  format_size(per_row), format_size(memory)));
  // As much as the reader likes, in whole blocks of it if the memory allows.
  const std::uint64_t unit = std::max<std::uint64_t>(1, reader.block_rows());
  std::uint64_t block = memory / per_row;
  if (block > unit)
    block = std::max<std::uint64_t>(1, std::min(block, std::max<std::uint64_t>(8_MiB / per_row, unit)) / unit) * unit;
  block = std::max<std::uint64_t>(1, std::min(block, rows));

  const auto input = std::make_unique_for_overwrite<std::byte[]>(block * in_bytes);
  const auto output = convert ? std::make_unique_for_overwrite<std::byte[]>(block * out_bytes) : nullptr;
  for (std::uint64_t done = 0; done < rows;) {
    const std::uint64_t now = std::min(block, rows - done);
    reader.read(done, now, input.get());
    if (convert) {
      const std::uint64_t good = try_convert_elements(from, input.get(), to, output.get(), now * dim, report);
      if (good < now * dim)
        throw DTypeError(fmt::format("{}: {} (row {}, column {})", reader.description(),
                                     conversion_failure(from, input.get() + good * item_size(from), to), done + good / dim,
                                     good % dim));
    }
    writer.write(now, convert ? output.get() : input.get());
    done += now;
    if (progress) progress(done, rows);
  }
  if (rows == 0 && progress) progress(0, 0);
  return report;
}

}  // namespace embermap
