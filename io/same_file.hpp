// Whether two paths mean one file.
#pragma once

#include <filesystem>

namespace embermap {

// True if both lead to one file, through links, "./", other names (hard links) and bind mounts, or would if they were made: paths
// where nothing is are compared as what they would be. False where that cannot be found out.
bool same_file(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace embermap
