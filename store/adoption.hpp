// Whether a store may open files outside its directory, and whether such a file is as embermap left it. Private to store/.
//
// A store's manifest names adopted files by path, and a store may come from anywhere: unpacked from an archive, copied from a
// colleague. Unless told otherwise it opens those files only where they were adopted: the manifest records the directory's inode
// and time of birth, which neither an archive nor a copy can bring along, and directory and manifest must be this user's, so that
// another user of this machine cannot make them up.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "io/file.hpp"

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

// Whether there is anything of that name, if it is a dangling symbolic link.
bool is_there(const std::filesystem::path& path) noexcept;

// Throws FormatError if there is something at `file` that is no plain file: a symbolic link, with which a store from elsewhere
// could name any file of the user, a directory, a FIFO.
void check_own_file(const std::filesystem::path& file);

// What tells that a file was changed without reading it. The device is not in it: its number is another one after a restart.
struct FileStamp {
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;  // since 1970
  std::uint64_t inode = 0;
  bool operator==(const FileStamp&) const = default;
};

// Of an open file. Throws IoError.
FileStamp stamp_of(const File& file);

// What was changed between the two, as "modified 2031-05-06T07:08:09.123456789Z -> ..., 4096 -> 5000 bytes"; empty: nothing, as
// far as this tells. Size and time decide. Another inode alone is a copy that kept its time (cp -p, rsync, a restored backup) and
// is taken for the same file, also where an archive had room for whole seconds only (tar).
std::string what_changed(const FileStamp& then, const FileStamp& now);

}  // namespace embermap
