#include "io/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <liburing.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <limits>
#include <random>

#include "base/error.hpp"
#include "base/size_text.hpp"

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE (1U << 0)
#endif

namespace embermap {
namespace {

// One system call moves at most this much; Linux itself stops a page short of 2 GiB.
constexpr std::size_t kLargestCall = std::size_t{1} << 30;
constexpr std::uint64_t kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());

template <class Call>
auto retry_interrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

void check_range(std::string_view call, const std::filesystem::path& file, std::uint64_t offset, std::uint64_t bytes) {
  if (offset > kLargestOffset || bytes > kLargestOffset - offset) throw IoError(EOVERFLOW, call, file, offset, bytes);
}

std::uint64_t total_bytes(std::span<const iovec> pieces) {
  std::uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

// What is left of the pieces when the first `done` bytes have been moved. Changes the piece that was moved in part.
std::span<iovec> pieces_after(std::span<iovec> pieces, std::size_t done) {
  while (!pieces.empty() && done >= pieces.front().iov_len) {
    done -= pieces.front().iov_len;
    pieces = pieces.subspan(1);
  }
  if (!pieces.empty()) {
    pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + done;
    pieces.front().iov_len -= done;
  }
  return pieces;
}

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  return "a special file";
}

std::string random_suffix() {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device device;
  std::uniform_int_distribution<std::size_t> letter(0, kLetters.size() - 1);
  std::string out(8, ' ');
  for (char& c : out) c = kLetters[letter(device)];
  return out;
}

// ".NAME.XXXXXXXX.tmp" in at most `limit` bytes; NAME is cut before a whole UTF-8 character.
std::string temporary_name(const std::string& name, std::size_t limit) {
  const std::string suffix = fmt::format(".{}.tmp", random_suffix());
  std::size_t keep = std::min(name.size(), limit - 1 - suffix.size());
  while (keep > 0 && keep < name.size() && (static_cast<unsigned char>(name[keep]) & 0xC0) == 0x80) --keep;
  return fmt::format(".{}{}", std::string_view(name).substr(0, keep), suffix);
}

std::filesystem::path directory_of(const std::filesystem::path& file) {
  return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

// Whether `name` is one that temporary_name() gives for `target`.
bool is_temporary_name_of(std::string_view target, std::string_view name) {
  constexpr std::string_view kEnd = ".XXXXXXXX.tmp";
  if (name.size() < 1 + kEnd.size() || name.front() != '.' || !name.ends_with(".tmp")) return false;
  const std::string_view stem = name.substr(1, name.size() - 1 - kEnd.size());
  if (name[1 + stem.size()] != '.') return false;
  return stem == target || (target.starts_with(stem) && name.size() > 255 - 4);  // cut, perhaps before a character of 4 bytes
}

// A lock that ends with the open file: with its process at the latest.
int lock_whole(int fd, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return retry_interrupted([&] { return ::fcntl(fd, F_OFD_SETLK, &lock); });
}

// Temporary files of `target` whose process was killed: nobody has the lock that TemporaryFile keeps. Where the file system has
// no locks none is taken for one.
void remove_abandoned(const std::filesystem::path& target, FileOps& ops) {
  const std::string name = target.filename().native();
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(directory_of(target), ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::filesystem::path& path = entry->path();
    if (!is_temporary_name_of(name, path.filename().native())) continue;
    const int fd = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    struct stat status {};
    if (::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && lock_whole(fd, F_WRLCK) == 0) ops.unlink(path.c_str());
    ::close(fd);
  }
}

// Locks a temporary file that was made just now. False if somebody took it for an abandoned one before that.
bool keep_from_removal(const File& file) {
  if (lock_whole(file.fd(), F_WRLCK) != 0) return errno != EAGAIN && errno != EACCES;  // no locks here: nobody removes it
  struct stat status {};
  return ::fstat(file.fd(), &status) != 0 || status.st_nlink > 0;
}

}  // namespace

int FileOps::open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int FileOps::close(int fd) { return ::close(fd); }
ssize_t FileOps::pread(int fd, void* buffer, std::size_t bytes, off_t offset) { return ::pread(fd, buffer, bytes, offset); }
ssize_t FileOps::pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) {
  return ::pwrite(fd, buffer, bytes, offset);
}
ssize_t FileOps::preadv(int fd, const iovec* pieces, int count, off_t offset) { return ::preadv(fd, pieces, count, offset); }
ssize_t FileOps::pwritev(int fd, const iovec* pieces, int count, off_t offset) { return ::pwritev(fd, pieces, count, offset); }
ssize_t FileOps::preadv_cached(int fd, const iovec* pieces, int count, off_t offset) {
  return ::preadv2(fd, pieces, count, offset, RWF_NOWAIT);
}
int FileOps::ftruncate(int fd, off_t bytes) { return ::ftruncate(fd, bytes); }
int FileOps::fdatasync(int fd) { return ::fdatasync(fd); }
int FileOps::fsync(int fd) { return ::fsync(fd); }
int FileOps::rename(const char* from, const char* to) { return ::rename(from, to); }
int FileOps::unlink(const char* path) { return ::unlink(path); }
int FileOps::allocate(int fd, off_t bytes) { return ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, bytes); }
int FileOps::deallocate(int fd, off_t offset, off_t bytes) {
  return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

int FileOps::clone(int to, int from) { return ::ioctl(to, FICLONE, from); }

int FileOps::uring_setup(unsigned entries, io_uring* ring, io_uring_params* parameters) {
  const int result = ::io_uring_queue_init_params(entries, ring, parameters);
  if (result < 0) errno = -result;
  return result < 0 ? -1 : 0;
}
int FileOps::uring_register_buffers(io_uring* ring, const iovec* pieces, unsigned count) {
  const int result = ::io_uring_register_buffers(ring, pieces, count);
  if (result < 0) errno = -result;
  return result < 0 ? -1 : 0;
}
int FileOps::uring_complete(int result, bool /*write*/, off_t /*offset*/, std::size_t /*bytes*/) { return result; }

int FileOps::rename_new(const char* from, const char* to) {
  // By number: the wrapper is younger than some C libraries that have the call.
  if (::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) return -1;
  if (::link(from, to) == 0) return ::unlink(from);
  if (errno != EPERM && errno != ENOSYS && errno != ENOTSUP && errno != EMLINK) return -1;
  // Neither (FAT and some FUSE file systems): look, then rename. Two programs may pass each other here, nothing can be done about
  // it.
  struct stat status {};
  if (::lstat(to, &status) == 0) {
    errno = EEXIST;
    return -1;
  }
  return errno == ENOENT ? ::rename(from, to) : -1;
}

FileOps& FileOps::system() {
  static FileOps ops;
  return ops;
}

File File::open(const std::filesystem::path& path, Mode mode, FileOps& ops) {
  int flags = O_CLOEXEC;
  switch (mode) {
    case Mode::kRead: flags |= O_RDONLY | O_NONBLOCK; break;  // opening a FIFO would wait for a writer
    case Mode::kReadWrite: flags |= O_RDWR | O_NONBLOCK; break;
    case Mode::kCreateNew: flags |= O_RDWR | O_CREAT | O_EXCL; break;
  }
  const std::string_view call = mode == Mode::kCreateNew ? "create" : "open";
  if (path.native().find('\0') != std::string::npos) throw IoError(EINVAL, call, path);
  File file;
  file.ops_ = &ops;
  file.path_ = path;
  file.fd_ = retry_interrupted([&] { return ops.open(path.c_str(), flags, 0666); });
  if (file.fd_ < 0) {
    const int error = errno;
    if (error == EEXIST && mode == Mode::kCreateNew) throw AlreadyExists(fmt::format("{} already exists", printable(path)));
    throw IoError(error, call, path);
  }
  const struct stat status = file.status();
  if (S_ISDIR(status.st_mode)) throw IoError(EISDIR, call, path);
  if (!S_ISREG(status.st_mode)) throw FormatError(path, fmt::format("is {}, not a file", kind_of(status.st_mode)));
  // Regular files know no waiting, but io_uring takes the flag for "never block" and would answer EAGAIN.
  if ((flags & O_NONBLOCK) != 0) {
    const int now = ::fcntl(file.fd_, F_GETFL);
    if (now < 0 || ::fcntl(file.fd_, F_SETFL, now & ~O_NONBLOCK) != 0) throw IoError(errno, "fcntl", path);
  }
  return file;
}

File::File(File&& other) noexcept : fd_{std::exchange(other.fd_, -1)}, path_{std::move(other.path_)}, ops_{other.ops_} {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ops_->close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
    ops_ = other.ops_;
  }
  return *this;
}

File::~File() {
  if (fd_ >= 0) ops_->close(fd_);
}

struct stat File::status() const {
  struct stat out {};
  if (::fstat(fd_, &out) != 0) throw IoError(errno, "fstat", path_);
  return out;
}

std::uint64_t File::size() const { return static_cast<std::uint64_t>(status().st_size); }

std::uint64_t File::read_some(std::uint64_t offset, std::span<std::byte> out) const {
  check_range("pread", path_, offset, out.size());
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t want = std::min(out.size() - done, kLargestCall);
    const ssize_t got = ops_->pread(fd_, out.data() + done, want, static_cast<off_t>(offset + done));
    if (got < 0) {
      if (errno == EINTR) continue;
      throw IoError(errno, "pread", path_, offset + done, out.size() - done);
    }
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

void File::read(std::uint64_t offset, std::span<std::byte> out) const {
  const std::uint64_t got = read_some(offset, out);
  if (got < out.size())
    throw FormatError(path_, fmt::format("truncated: bytes [{}, +{}) were to be read, the file ends at byte {}", offset,
                                         out.size(), got > 0 ? offset + got : std::min(offset, size())));
}

void File::write(std::uint64_t offset, std::span<const std::byte> in) const {
  check_range("pwrite", path_, offset, in.size());
  std::size_t done = 0;
  while (done < in.size()) {
    const std::size_t want = std::min(in.size() - done, kLargestCall);
    const ssize_t got = ops_->pwrite(fd_, in.data() + done, want, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    // A write of nothing is no error to the system, but repeating it would not end.
    if (got <= 0) throw IoError(got < 0 ? errno : EIO, "pwrite", path_, offset + done, in.size() - done);
    done += static_cast<std::size_t>(got);
  }
}

void File::write(std::uint64_t offset, std::string_view text) const {
  write(offset, std::as_bytes(std::span(text.data(), text.size())));
}

void File::read(std::uint64_t offset, std::span<iovec> pieces) const {
  const std::uint64_t bytes = total_bytes(pieces);
  check_range("preadv", path_, offset, bytes);
  for (std::uint64_t done = 0; done < bytes;) {
    const auto rest = pieces.first(std::min<std::size_t>(pieces.size(), IOV_MAX));
    const ssize_t got = ops_->preadv(fd_, rest.data(), static_cast<int>(rest.size()), static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError(errno, "preadv", path_, offset + done, bytes - done);
    if (got == 0)
      throw FormatError(path_, fmt::format("truncated: bytes [{}, +{}) were to be read, the file ends at byte {}", offset, bytes,
                                           done > 0 ? offset + done : std::min(offset, size())));
    done += static_cast<std::uint64_t>(got);
    pieces = pieces_after(pieces, static_cast<std::size_t>(got));
  }
}

void File::write(std::uint64_t offset, std::span<iovec> pieces) const {
  const std::uint64_t bytes = total_bytes(pieces);
  check_range("pwritev", path_, offset, bytes);
  for (std::uint64_t done = 0; done < bytes;) {
    const auto rest = pieces.first(std::min<std::size_t>(pieces.size(), IOV_MAX));
    const ssize_t got = ops_->pwritev(fd_, rest.data(), static_cast<int>(rest.size()), static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) throw IoError(got < 0 ? errno : EIO, "pwritev", path_, offset + done, bytes - done);
    done += static_cast<std::uint64_t>(got);
    pieces = pieces_after(pieces, static_cast<std::size_t>(got));
  }
}

void File::resize(std::uint64_t bytes) const {
  check_range("ftruncate", path_, bytes, 0);
  if (retry_interrupted([&] { return ops_->ftruncate(fd_, static_cast<off_t>(bytes)); }) != 0)
    throw IoError(errno, "ftruncate", path_, 0, bytes);
}

void File::reserve(std::uint64_t bytes) const {
  check_range("fallocate", path_, 0, bytes);
  if (bytes == 0) return;
  struct statvfs disk {};
  const bool known = ::fstatvfs(fd_, &disk) == 0 && disk.f_blocks != 0;
  const auto refuse = [&](int error) {
    const std::string free =
        known ? fmt::format(" ({} are free)", format_size(std::uint64_t{disk.f_bavail} * disk.f_frsize)) : std::string();
    return IoError(error, fmt::format("reserve {}{} for", format_size(bytes), free), path_);
  };
  // Some file systems take all there is before they find that it is too little: for that moment the disk is full for everybody.
  if (known) {
    const auto taken = static_cast<std::uint64_t>(status().st_blocks) * 512;
    if (bytes > taken && (bytes - taken) / std::max<std::uint64_t>(disk.f_frsize, 1) > disk.f_bavail) throw refuse(ENOSPC);
  }
  if (retry_interrupted([&] { return ops_->allocate(fd_, static_cast<off_t>(bytes)); }) == 0) return;
  const int error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == EIO) throw refuse(error);
}

void File::sync() const {
  if (retry_interrupted([&] { return ops_->fdatasync(fd_); }) != 0) throw IoError(errno, "fdatasync", path_);
}

void File::sync_all() const {
  if (retry_interrupted([&] { return ops_->fsync(fd_); }) != 0 && errno != EINVAL) throw IoError(errno, "fsync", path_);
}

void File::close() {
  if (fd_ < 0) return;
  // After EINTR Linux has closed the descriptor all the same; a second try could hit another thread's file.
  if (ops_->close(std::exchange(fd_, -1)) != 0 && errno != EINTR) throw IoError(errno, "close", path_);
}

void check_free_space(const std::filesystem::path& directory, const std::filesystem::path& file, std::uint64_t bytes) {
  struct statvfs status {};
  if (statvfs(directory.c_str(), &status) != 0) throw IoError(errno, "statvfs", directory);
  const std::uint64_t free = std::uint64_t{status.f_bavail} * status.f_frsize;
  if (bytes > free && status.f_blocks != 0)  // 0 blocks: a file system that does not count
    throw IoError(ENOSPC, fmt::format("reserve {} ({} are free) for", format_size(bytes), format_size(free)), file);
}

void sync_directory(const std::filesystem::path& directory, FileOps& ops) {
  const std::filesystem::path path = directory.empty() ? std::filesystem::path(".") : directory;
  const int fd = retry_interrupted([&] { return ops.open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (fd < 0) throw IoError(errno, "open", path);
  const int result = retry_interrupted([&] { return ops.fsync(fd); });
  const int error = errno;
  ops.close(fd);
  if (result != 0 && error != EINVAL) throw IoError(error, "fsync", path);
}

TemporaryFile::TemporaryFile(File file, std::filesystem::path target, bool overwrite)
    : file_{std::move(file)}, target_{std::move(target)}, overwrite_{overwrite}, owner_{::getpid()} {}

TemporaryFile TemporaryFile::create(const std::filesystem::path& target, bool overwrite, FileOps& ops) {
  if (!target.has_filename() || target.filename() == "." || target.filename() == "..") {
    if (target.empty()) throw InvalidArgument("an empty path names no file to write");
    throw IoError(EISDIR, "create", target);
  }
  if (target.native().find('\0') != std::string::npos) throw IoError(EINVAL, "create", target);

  std::filesystem::path resolved = target;
  struct stat status {};
  bool replaces = false;
  for (int links = 0;; ++links) {
    if (::lstat(resolved.c_str(), &status) != 0) {
      if (errno != ENOENT) throw IoError(errno, "create", target);
      if (links > 0 && !overwrite)
        throw AlreadyExists(fmt::format("{} already exists (a symbolic link to {}, which does not exist)", printable(target),
                                        printable(resolved)));
      break;
    }
    if (!S_ISLNK(status.st_mode)) {
      if (S_ISDIR(status.st_mode)) throw IoError(EISDIR, "create", target);
      if (!S_ISREG(status.st_mode))
        throw InvalidArgument(
            fmt::format("{} is {}, not a file; it is not replaced", printable(target), kind_of(status.st_mode)));
      if (!overwrite) throw AlreadyExists(fmt::format("{} already exists", printable(target)));
      replaces = true;
      break;
    }
    if (links == 40) throw IoError(ELOOP, "create", target);
    std::error_code error;
    const std::filesystem::path points_to = std::filesystem::read_symlink(resolved, error);
    if (error) throw IoError(error.value(), "readlink", resolved);
    resolved = points_to.is_absolute() ? points_to : directory_of(resolved) / points_to;
  }

  const std::filesystem::path directory = directory_of(resolved);
  remove_abandoned(resolved, ops);
  std::size_t limit = 255;
  for (int attempt = 0;; ++attempt) {
    const std::string name = temporary_name(resolved.filename().native(), limit);
    try {
      File file =
          File::open(resolved.has_parent_path() ? directory / name : std::filesystem::path(name), File::Mode::kCreateNew, ops);
      if (!keep_from_removal(file) && attempt < 100) continue;
      if (replaces) {
        // Who may read the old file, and nobody else, may read the new one. Not everybody may give a file to its owner.
        (void)!::fchown(file.fd(), status.st_uid, status.st_gid);
        (void)!::fchmod(file.fd(), status.st_mode & 07777U);
      }
      return TemporaryFile(std::move(file), std::move(resolved), overwrite);
    } catch (const AlreadyExists&) {
      if (attempt == 100) throw;
    } catch (const IoError& error) {
      constexpr std::size_t kShort = 16;  // file systems with less than 255 bytes a name
      if (error.error_number() != ENAMETOOLONG || limit == kShort) throw IoError(error.error_number(), "create", target);
      limit = kShort;
    }
  }
}

TemporaryFile::TemporaryFile(TemporaryFile&& other) noexcept
    : file_{std::move(other.file_)}, target_{std::move(other.target_)}, overwrite_{other.overwrite_}, owner_{other.owner_} {}

TemporaryFile& TemporaryFile::operator=(TemporaryFile&& other) noexcept {
  if (this != &other) {
    discard();
    file_ = std::move(other.file_);
    target_ = std::move(other.target_);
    overwrite_ = other.overwrite_;
    owner_ = other.owner_;
  }
  return *this;
}

TemporaryFile::~TemporaryFile() { discard(); }

void TemporaryFile::discard() noexcept {
  if (!file_.is_open()) return;
  if (owner_ == ::getpid()) file_.ops().unlink(file_.path().c_str());
  file_ = File();
}

File TemporaryFile::commit() {
  FileOps& ops = file_.ops();
  try {
    file_.sync();
    const char* const from = file_.path().c_str();
    const int result = overwrite_ ? ops.rename(from, target_.c_str()) : ops.rename_new(from, target_.c_str());
    if (result != 0) {
      const int error = errno;
      if (error == EEXIST && !overwrite_)
        throw AlreadyExists(fmt::format("{} already exists (made by someone else meanwhile)", printable(target_)));
      throw IoError(error, "rename", target_);
    }
  } catch (...) {
    discard();
    throw;
  }
  (void)lock_whole(file_.fd(), F_UNLCK);
  File done = std::move(file_);
  done.set_path(target_);
  sync_directory(directory_of(target_), ops);
  return done;
}

void replace_file(const std::filesystem::path& path, std::string_view text, FileOps& ops) {
  TemporaryFile temporary = TemporaryFile::create(path, /*overwrite=*/true, ops);
  temporary.file().write(0, text);
  temporary.commit();
}

std::string read_text(const std::filesystem::path& path, std::uint64_t limit, FileOps& ops) {
  const File file = File::open(path, File::Mode::kRead, ops);
  // Not by the size alone: files of /proc and /sys claim 0 bytes.
  std::string text;
  std::array<std::byte, 16384> block;
  for (;;) {
    const std::uint64_t got = file.read_some(text.size(), block);
    if (got > limit - text.size())
      throw FormatError(path, fmt::format("more than the {} bytes such a file may have (it has {})", limit, file.size()));
    text.append(reinterpret_cast<const char*>(block.data()), got);
    if (got < block.size()) return text;
  }
}

}  // namespace embermap
