#include "store/adoption.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "base/error.hpp"
#include "store/manifest.hpp"

namespace embermap {
namespace {

constexpr std::int64_t kSecond = 1'000'000'000;

std::string time_text(std::int64_t ns) {
  const std::int64_t rest = (ns % kSecond + kSecond) % kSecond;
  const std::time_t seconds = (ns - rest) / kSecond;
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:09}Z", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                     parts.tm_hour, parts.tm_min, parts.tm_sec, rest);
}

}  // namespace

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

bool is_there(const std::filesystem::path& path) noexcept {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

void check_own_file(const std::filesystem::path& file) {
  struct stat status {};
  if (::lstat(file.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return;
  if (S_ISLNK(status.st_mode))
    throw FormatError(
        file, "is a symbolic link, and a store's own files may not be; to have a store on another disk, link its directory");
  throw FormatError(file, fmt::format("is {}, where the store has a file of its own", S_ISDIR(status.st_mode)    ? "a directory"
                                                                                      : S_ISFIFO(status.st_mode) ? "a FIFO"
                                                                                      : S_ISSOCK(status.st_mode) ? "a socket"
                                                                                                                 : "a device"));
}

FileStamp stamp_of(const File& file) {
  const struct stat status = file.status();
  return {.bytes = static_cast<std::uint64_t>(status.st_size),
          .modified_ns = status.st_mtim.tv_sec * kSecond + status.st_mtim.tv_nsec,
          .inode = status.st_ino};
}

std::string what_changed(const FileStamp& then, const FileStamp& now) {
  std::string changed;
  const auto add = [&](const std::string& what) { changed += (changed.empty() ? "" : ", ") + what; };
  const bool archived =
      now.modified_ns % kSecond == 0 && then.modified_ns > now.modified_ns && then.modified_ns - now.modified_ns < kSecond;
  if (now.modified_ns != then.modified_ns && !archived)
    add(fmt::format("modified {} -> {}", time_text(then.modified_ns), time_text(now.modified_ns)));
  if (now.bytes != then.bytes) add(fmt::format("{} -> {} bytes", then.bytes, now.bytes));
  if (!changed.empty() && now.inode != then.inode) add(fmt::format("inode {} -> {}", then.inode, now.inode));
  return changed;
}

}  // namespace embermap
