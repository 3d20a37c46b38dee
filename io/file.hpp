// A file descriptor with errors that say what happened where, and the seam through which faults are injected.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

struct io_uring;
struct io_uring_params;

namespace embermap {

// The system calls files are made of. Tests substitute their own to inject short reads, EINTR, EIO, ENOSPC, failing syncs. Calls
// return as the system's do: -1 with errno.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset);
  virtual ssize_t preadv(int fd, const struct iovec* pieces, int count, off_t offset);
  virtual ssize_t pwritev(int fd, const struct iovec* pieces, int count, off_t offset);
  // preadv of what is in the page cache, up to the first byte that is not; EAGAIN if that is the first of all.
  virtual ssize_t preadv_cached(int fd, const struct iovec* pieces, int count, off_t offset);
  virtual int ftruncate(int fd, off_t bytes);
  virtual int fdatasync(int fd);
  virtual int fsync(int fd);
  virtual int rename(const char* from, const char* to);
  virtual int unlink(const char* path);
  // Fails with EEXIST where `to` exists. Atomic (RENAME_NOREPLACE, or link and unlink) wherever the file system has either.
  virtual int rename_new(const char* from, const char* to);
  virtual int allocate(int fd, off_t bytes);                  // fallocate of [0, bytes), the file's size kept
  virtual int deallocate(int fd, off_t offset, off_t bytes);  // makes a hole of it: it reads as zeros and takes no disk
  virtual int clone(int to, int from);                        // all of `from`, sharing its blocks (FICLONE)
  // io_uring: making a ring, telling it where buffers lie (`count` pieces), and the result of a request for `bytes` bytes from
  // `offset` on (a count or a negative errno), which may be replaced.
  virtual int uring_setup(unsigned entries, struct io_uring* ring, struct io_uring_params* parameters);
  virtual int uring_register_buffers(struct io_uring* ring, const struct iovec* pieces, unsigned count);
  virtual int uring_complete(int result, bool write, off_t offset, std::size_t bytes);
  static FileOps& system();  // the real ones; stateless
};

// Owns one descriptor (close-on-exec). Reads and writes name their offset, so threads may share a File and a forked child
// cannot disturb a file position. Throws IoError.
class File {
 public:
  enum class Mode { kRead, kReadWrite, kCreateNew };  // kCreateNew: read and write; fails with AlreadyExists if there is one

  File() = default;
  // Opens regular files only: a directory is IoError with EISDIR, a FIFO, socket or device FormatError (and is not waited for).
  static File open(const std::filesystem::path& path, Mode mode, FileOps& ops = FileOps::system());
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();  // a failing close is ignored here; call sync() before where it matters

  bool is_open() const noexcept { return fd_ >= 0; }
  int fd() const noexcept { return fd_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  void set_path(std::filesystem::path path) { path_ = std::move(path); }  // after a rename
  std::uint64_t size() const;
  struct stat status() const;

  // Fills `out` from `offset`. Short reads are continued, EINTR is retried, the end of the file inside the range is FormatError
  // "truncated".
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  // Reads up to out.size() bytes, fewer only at the end of the file; returns how many.
  std::uint64_t read_some(std::uint64_t offset, std::span<std::byte> out) const;
  void write(std::uint64_t offset, std::span<const std::byte> in) const;
  void write(std::uint64_t offset, std::string_view text) const;
  // The same for pieces that lie apart in memory (at most IOV_MAX of them). The array is used up: its entries are changed.
  void read(std::uint64_t offset, std::span<struct iovec> pieces) const;
  void write(std::uint64_t offset, std::span<struct iovec> pieces) const;
  void resize(std::uint64_t bytes) const;  // ftruncate: what is added reads as zeros and takes no disk
  // Reserves disk for the first `bytes` bytes, so that a disk too small shows before the work is done: IoError with ENOSPC (or
  // EDQUOT, EFBIG). Where the file system cannot reserve, nothing happens. The size stays.
  void reserve(std::uint64_t bytes) const;
  void sync() const;  // fdatasync: data and size
  // fsync: its times as well, so that they are not older after a loss of power. Where a file system has no such sync (EINVAL)
  // there is nothing to do.
  void sync_all() const;
  void close();  // throws IoError where the system reports a late failure; the descriptor is gone either way

  FileOps& ops() const noexcept { return *ops_; }

 private:
  int fd_ = -1;
  std::filesystem::path path_;
  FileOps* ops_ = &FileOps::system();
};

// Fills the span from this byte of a file, or of a part of one, on. Throws IoError, FormatError "truncated".
using ReadBytes = std::function<void(std::uint64_t offset, std::span<std::byte> out)>;

// Throws IoError (ENOSPC, with both numbers, naming `file`) where the file system of `directory` has fewer than `bytes` free, if
// it tells.
void check_free_space(const std::filesystem::path& directory, const std::filesystem::path& file, std::uint64_t bytes);

// Makes entries of `directory` (empty: the current one) that were created, renamed or removed durable. Where a file system has no
// such sync (EINVAL) there is nothing to do.
void sync_directory(const std::filesystem::path& directory, FileOps& ops = FileOps::system());

// A new file under a temporary name beside `target` (".NAME.XXXXXXXX.tmp", the name shortened where it would be too long);
// commit() syncs it, renames it over or onto `target` and syncs the directory. Without commit() the destructor removes it (in the
// process that made it, not in a forked child), so that nothing half-written stays. A new file has mode 0666 less the umask,
// whatever was there before. What a killed process leaves is removed by the next create() for the same target: while it lives, a
// temporary file is locked (F_OFD_SETLK).
class TemporaryFile {
 public:
  // Throws AlreadyExists if `target` exists and `overwrite` is false. A symbolic link as target is resolved: what it points to is
  // replaced. A dangling link counts as existing: AlreadyExists, or with `overwrite` the file that it names is made. A directory
  // (IoError, EISDIR), a FIFO, a socket or a device (InvalidArgument) is never replaced. What replaces a file has its
  // permissions, and its owner where that may be given.
  static TemporaryFile create(const std::filesystem::path& target, bool overwrite, FileOps& ops = FileOps::system());
  TemporaryFile(TemporaryFile&& other) noexcept;
  TemporaryFile& operator=(TemporaryFile&& other) noexcept;
  ~TemporaryFile();

  File& file() noexcept { return file_; }
  const std::filesystem::path& target() const noexcept { return target_; }
  // Returns the open file under its final name. Throws AlreadyExists if someone made `target` meanwhile and overwrite is false,
  // IoError; the temporary file is removed then, unless only the directory's sync failed: the whole file is under its name
  // already.
  File commit();

 private:
  TemporaryFile(File file, std::filesystem::path target, bool overwrite);
  void discard() noexcept;

  File file_;  // open until commit() or discard()
  std::filesystem::path target_;
  bool overwrite_ = false;
  pid_t owner_ = 0;
};

// Writes `text` to `path` as one atomic, durable replacement.
void replace_file(const std::filesystem::path& path, std::string_view text, FileOps& ops = FileOps::system());

// The whole of a small file, at most `limit` bytes (FormatError above).
std::string read_text(const std::filesystem::path& path, std::uint64_t limit, FileOps& ops = FileOps::system());

}  // namespace embermap
