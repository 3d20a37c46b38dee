// What `embermap info` says about a file, found out without reading its data.
#pragma once

#include <filesystem>
#include <string>

#include "tools/command.hpp"

namespace embermap::tools {

// {"kind": "npy" | "hdf5" | ..., "path", ...}; the format is told by the content before the name. Throws FormatError if it is
// none, or broken. `selector` names one field or dataset; all if empty (NotFound if there is none of that name).
Json describe_file(const std::filesystem::path& file, const std::string& selector);

// The same for people: aligned lines.
std::string file_text(const Json& description);

}  // namespace embermap::tools
