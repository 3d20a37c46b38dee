#include "io/direct_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/aligned_buffer.hpp"

#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

namespace embermap {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

// What file systems ask for that do not tell; found good or bad by a read.
constexpr std::uint32_t kUntold = 4096;

}  // namespace

bool lives_in_memory(const File& file) {
  struct statfs status {};
  if (::fstatfs(file.fd(), &status) != 0) return false;
  const auto type = static_cast<std::uint64_t>(status.f_type) & 0xFFFFFFFFU;
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

DirectFile::DirectFile(const File& file, bool direct) : ops_{file.ops()} {
  if (direct && try_direct(file)) return;
  alignment_ = {};
  if (fd_ >= 0) ops_.close(fd_);
  fd_ = reopen(file, 0);
}

DirectFile::~DirectFile() {
  if (fd_ >= 0) ops_.close(fd_);
}

bool DirectFile::try_direct(const File& file) {
  bool told = false;
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(file.fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0) {
    told = true;
    alignment_ = {status.stx_dio_mem_align, status.stx_dio_offset_align};
    if (alignment_.memory == 0 || alignment_.offset == 0) {
      why_ = "direct I/O: the file system has none for this file";
      return false;
    }
  }
#endif
  if (!told) {
    if (lives_in_memory(file)) {
      why_ = "direct I/O: the file lies in memory";
      return false;
    }
    alignment_ = {kUntold, kUntold};
  }
  fd_ = reopen(file, O_DIRECT);
  if (fd_ < 0) {
    why_ = fmt::format("open with O_DIRECT: {}", error_text(errno));
    return false;
  }
  if (told) return true;
  const AlignedBuffer block(kUntold);
  ssize_t got = -1;
  do got = ops_.pread(fd_, block.data(), block.size(), 0);
  while (got < 0 && errno == EINTR);
  if (got < 0) why_ = fmt::format("direct read: {}", error_text(errno));
  return got >= 0;
}

int DirectFile::reopen(const File& file, int flags) {
  const int mode = ::fcntl(file.fd(), F_GETFL);
  if (mode < 0) return -1;
  flags |= (mode & O_ACCMODE) | O_CLOEXEC;
  const auto open = [&](const char* path) {
    int fd = ops_.open(path, flags, 0);
    while (fd < 0 && errno == EINTR) fd = ops_.open(path, flags, 0);
    return fd;
  };
  // By descriptor: whatever the file is called now.
  int fd = open(fmt::format("/proc/self/fd/{}", file.fd()).c_str());
  if (fd >= 0 || errno != ENOENT) return fd;
  fd = open(file.path().c_str());  // no /proc
  if (fd < 0) return fd;
  struct stat ours {
  }, theirs{};
  if (::fstat(file.fd(), &ours) == 0 && ::fstat(fd, &theirs) == 0 && ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino)
    return fd;
  ops_.close(fd);
  errno = ESTALE;
  return -1;
}

void DirectFile::drop_cache(bool write) const noexcept {
  if (fd_ < 0) return;
  // Results do not matter: what cannot be written now stays dirty, and whoever syncs the file is told.
  if (write) (void)::sync_file_range(fd_, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  (void)::posix_fadvise(fd_, 0, 0, POSIX_FADV_DONTNEED);
}

}  // namespace embermap
