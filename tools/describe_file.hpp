// What `embermap info` says about a file, found out without reading its data.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/rows.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

// {"kind": "npy" | "hdf5" | ..., "path", ...}; the format is told by the content before the name. Throws FormatError if it is
// none, or broken. `selector` names one field or dataset; all if empty (NotFound if there is none of that name).
Json describe_file(const std::filesystem::path& file, const std::string& selector);

// {"name", "shape", "dtype", "bytes", "layout"} of an array in a file.
Json entry_json(const Entry& entry);
// "(1,000, 64)", "(5,)"; an extent of null is "unlimited".
std::string shape_text(const Json& shape);
// Those of `entries` called `selector`, all if it is empty. Throws NotFound if there is none.
std::vector<Entry> chosen_entries(const std::filesystem::path& file, std::vector<Entry> entries, const std::string& selector);

// The same for people: aligned lines.
std::string file_text(const Json& description);

}  // namespace embermap::tools
