#include "store/adoption.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "store/manifest.hpp"

namespace embermap {

StoreHome home_of(const std::filesystem::path& store) {
  struct statx status {};
  if (::statx(AT_FDCWD, store.c_str(), 0, STATX_INO | STATX_BTIME, &status) != 0) throw IoError(errno, "statx", store);
  StoreHome home{.inode = status.stx_ino, .born_ns = 0};
  if ((status.stx_mask & STATX_BTIME) != 0 && status.stx_btime.tv_sec > 0)
    home.born_ns = static_cast<std::uint64_t>(status.stx_btime.tv_sec) * 1'000'000'000 + status.stx_btime.tv_nsec;
  return home;
}

std::string why_not_adopted_here(const std::filesystem::path& store, const StoreHome& recorded) {
  for (const auto& path : {store, store / kManifestName}) {
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0) throw IoError(errno, "lstat", path);
    if (status.st_uid != ::geteuid()) return fmt::format("{} belongs to user {}, not to you", printable(path), status.st_uid);
  }
  const StoreHome here = home_of(store);
  if (here.born_ns == 0) return "the file system does not tell when the store's directory was made";
  return here == recorded ? "" : "the store was copied, unpacked or restored since the file was adopted";
}

void refuse_link(const std::filesystem::path& file) {
  struct stat status {};
  if (::lstat(file.c_str(), &status) == 0 && S_ISLNK(status.st_mode))
    throw FormatError(
        file, "is a symbolic link, and a store's own files may not be; to have a store on another disk, link its directory");
}

}  // namespace embermap
