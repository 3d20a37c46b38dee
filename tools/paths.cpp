#include "tools/paths.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>
#include <vector>

#include "base/error.hpp"
#include "io/file.hpp"
#include "io/npy.hpp"
#include "io/same_file.hpp"
#include "store/store.hpp"
#include "store/table_file.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"

namespace embermap::tools {
namespace {

// The status of what `path` leads to; nothing if nothing is there. Throws IoError for every other reason.
std::optional<struct stat> status_of(const std::filesystem::path& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) == 0) return status;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw IoError(errno, "stat", path);
}

std::string kind_of(mode_t mode) {
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "not a regular file";
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

Location parse_with(std::string_view option, const std::string& text, std::string_view format_option, const std::string& format,
                    LocationOptions options) {
  if (text == "-")
    throw UsageError(
        fmt::format("{}: '-', a pipe, is no file: rows are read back and forth, and a new file gets its name when it is "
                    "whole; name a file ('./-' for one of that name)",
                    option));
  try {
    if (!format.empty()) options.format = parse_format(format);
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("{}: {}", format_option, error.what()));
  }
  try {
    return parse_location(text, options);
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("{}: {}", option, error.what()));
  }
}

}  // namespace

std::string TablePath::text() const { return table.empty() ? store.native() : (store / table).native(); }

TablePath parse_table_path(const std::string& text, bool with_field) {
  const auto fail = [&](std::string_view why) {
    return UsageError(fmt::format("'{}' {}; write STORE/TABLE, for example tables/items", printable(text), why));
  };
  std::string path = text;
  while (!path.empty() && path.back() == '/') path.pop_back();
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) throw fail("names no table");
  TablePath result;
  result.table = path.substr(slash + 1);
  result.store = slash == 0 ? std::string("/") : path.substr(0, slash);
  if (with_field) {
    if (const std::size_t colon = result.table.find(':'); colon != std::string::npos) {
      result.field = result.table.substr(colon + 1);
      result.table.resize(colon);
      if (result.field.empty()) throw fail("ends with ':' but names no field");
    }
  }
  if (result.table.empty() || result.table == "." || result.table == "..") throw fail("names no table");
  return result;
}

bool store_at(const std::filesystem::path& path) {
  if (!status_of(path / "embermap.json")) return false;
  return is_store(path);
}

TablePath find_store_or_table(const std::string& text) {
  if (text.empty()) throw UsageError("an empty path names no store");
  if (store_at(text)) return TablePath{.store = text, .table = ""};
  std::string trimmed = text;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  if (trimmed.find('/', 1) != std::string::npos || trimmed.front() == '/') {
    const TablePath table = parse_table_path(trimmed);
    if (store_at(table.store)) return table;
  }
  if (const auto status = status_of(text)) {
    if (S_ISDIR(status->st_mode)) throw FormatError(text, "is not a store: there is no embermap.json in it");
    throw FormatError(text, "is neither a store nor a table of one");
  }
  throw NotFound(fmt::format("{}: there is neither a store nor a table of one", printable(text)));
}

Location parse_source(std::string_view option, const std::string& text, const std::string& format) {
  return parse_with(option, text, "--from", format, {});
}

Location parse_destination(std::string_view option, const std::string& text, const std::string& format) {
  return parse_with(option, text, "--to", format, {.format = {}, .use = LocationOptions::Use::kWrite});
}

void require_regular_file(const std::filesystem::path& file) {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) throw IoError(errno, "open", file);
  if (S_ISDIR(status.st_mode)) throw IoError(EISDIR, "open", file);
  if (!S_ISREG(status.st_mode)) throw FormatError(file, fmt::format("is {}, not a regular file", kind_of(status.st_mode)));
}

void check_destination(const Location& destination, const std::filesystem::path& source, bool overwrite, bool whole) {
  const std::filesystem::path& file = destination.file;
  const auto status = status_of(file);
  if (!status) return check_outside_stores(file);  // free, or a dangling link, which the writer refuses
  if (S_ISDIR(status->st_mode)) throw IoError(EISDIR, "create", file);
  if (!S_ISREG(status->st_mode))
    throw InvalidArgument(fmt::format("{} is {}; it is not replaced by a file", printable(file), kind_of(status->st_mode)));
  if (const auto store = store_of(file); !store.empty())
    throw InvalidArgument(fmt::format("{} is a file of the store {}; it is not replaced", printable(file), printable(store)));
  check_outside_stores(file);
  const bool adds = format_adds(destination.format);
  if (adds && !destination.selector.empty() && !whole) return;  // adds to the file, or replaces the one named: the writer looks
  if (!overwrite) {
    if (!source.empty() && same_file(file, source))
      throw AlreadyExists(
          fmt::format("{} is the source itself; with --overwrite it is replaced when the new file is complete", printable(file)));
    throw AlreadyExists(fmt::format("{} already exists; --overwrite replaces it", printable(file)));
  }
  if (!adds || whole) return;
  std::vector<std::string> lost;
  try {
    const Location there = parse_location(file.native());
    if (format_adds(there.format))
      for (const Entry& entry : list_entries(file, there.format)) lost.push_back(entry.name);
  } catch (const FormatError&) {  // broken: nobody could read what it holds
  } catch (const InvalidArgument&) {
  }
  if (lost.size() <= 1) return;
  const std::size_t shown = std::min<std::size_t>(5, lost.size());
  throw InvalidArgument(
      fmt::format("{} holds {} arrays ({}{}), which would be lost with the file; name the one to replace, as in {}:{}",
                  printable(file), lost.size(), fmt::join(lost.begin(), lost.begin() + static_cast<std::ptrdiff_t>(shown), ", "),
                  lost.size() > shown ? ", ..." : "", printable(file), printable(lost.front())));
}

void check_source_is_whole(const Location& source, std::uint64_t memory) {
  if (source.format != Location::Format::kNpy) return;
  for (const Remark& remark : check_table_file(source, memory)) warn(remark.text);
  if (!store_of(source.file).empty()) return;
  // NumPy passes over them too: several arrays may have been saved into one file.
  const File file = File::open(source.file, File::Mode::kRead);
  const NpyHeader header = read_npy_header(file);
  const std::uint64_t end = header.data_offset + header.data_bytes(), size = file.size();
  if (size > end) warn(fmt::format("{}: {} bytes follow its array, which are not read", printable(source.file), size - end));
}

}  // namespace embermap::tools
