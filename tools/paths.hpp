// What the paths on the command line mean, and the questions to ask before a file is read or written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "io/rows.hpp"

namespace embermap::tools {

// STORE/TABLE or STORE/TABLE:FIELD: the last component is the table.
struct TablePath {
  std::filesystem::path store;
  std::string table;
  std::string field = "weight";
  std::string text() const;  // for messages: "tables/items"
};

// Throws UsageError where there is no table part. With `with_field` false a ':' is left in the name, which the store refuses.
TablePath parse_table_path(const std::string& text, bool with_field = false);

// STORE or STORE/TABLE, whichever is there (`table` is then empty, or named, but not looked up). Throws NotFound or FormatError
// if there is no store at either place, IoError if that could not be found out.
TablePath find_store_or_table(const std::string& text);

// True if there is a store; throws IoError if that cannot be told ("Permission denied").
bool store_at(const std::filesystem::path& path);

// parse_location with what is wrong about the text as UsageError. `format`: what --from or --to names, empty where it is to be
// told by the file.
Location parse_source(std::string_view option, const std::string& text, const std::string& format);
Location parse_destination(std::string_view option, const std::string& text, const std::string& format);

// Throws IoError (nothing there, no permission, a directory) or FormatError (FIFO, device, socket) unless `file` is a regular
// file. Does not open it, so it cannot hang.
void require_regular_file(const std::filesystem::path& file);

// Throws unless `destination` may be written as a new file that replaces an old one only with `overwrite`: AlreadyExists, IoError
// (a directory), InvalidArgument (a device, anything in a store's own directory, an HDF5 file of several datasets none of which
// is named: they would be lost). A named dataset of an HDF5 file is left to its writer, which keeps the others. `source` may be
// empty.
// `whole`: the file is replaced with all it holds, which is what --overwrite then means.
void check_destination(const Location& destination, const std::filesystem::path& source, bool overwrite, bool whole = false);

// Throws FormatError if `source` is the file of a table whose never-written rows are not what the file's holes read as: only the
// store knows them. Warns if that store cannot be opened, with `memory`, to find out, and of bytes that follow the array of any
// other .npy file.
void check_source_is_whole(const Location& source, std::uint64_t memory);

}  // namespace embermap::tools
