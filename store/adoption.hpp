// Whether a store may open files outside its directory. Private to store/.
//
// A store's manifest names adopted files by path, and a store may come from anywhere: unpacked from an archive, copied from a
// colleague. Unless told otherwise it opens those files only where they were adopted: the manifest records the directory's inode
// and time of birth, which neither an archive nor a copy can bring along, and directory and manifest must be this user's, so that
// another user of this machine cannot make them up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace embermap {

// The directory in which a file was adopted. born_ns: nanoseconds since 1970; 0 where the file system does not tell.
struct StoreHome {
  std::uint64_t inode = 0;
  std::uint64_t born_ns = 0;
  bool operator==(const StoreHome&) const = default;
};

// Of the directory `store`. Throws IoError.
StoreHome home_of(const std::filesystem::path& store);

// Why the store should not open a file that was adopted in `recorded`; empty if it may.
std::string why_not_adopted_here(const std::filesystem::path& store, const StoreHome& recorded);

// Throws FormatError if `file` is a symbolic link: a store's own files are nothing but files, or one from elsewhere could name
// any file of the user.
void refuse_link(const std::filesystem::path& file);

}  // namespace embermap
