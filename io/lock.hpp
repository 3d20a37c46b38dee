// The lock that keeps a store to one writer, and the one under which files are exchanged.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

namespace embermap {

// Holds an exclusive lock on a file for as long as it lives. The lock belongs to the open file (F_OFD_SETLK): two locks of one
// process exclude each other too, and the kernel releases it when the process dies, however it dies. Forked children do not keep
// it alive: their copy of the descriptor is closed as they start. The file's text is "pid host\n" of the holder, and empty after
// a clean release.
class WriterLock {
 public:
  // Locks `file` (made if it is not there). Never waits.
  // Throws LockedError "store X is open for writing in process 123 on host h" (X: `store`, for the message) if another holds it,
  // IoError if the file cannot be opened for writing or its file system has no locks.
  static WriterLock acquire(const std::filesystem::path& file, const std::filesystem::path& store);
  // Whether anyone holds the lock of `file`, this process included; nullopt if that cannot be found out. Takes nothing and
  // changes nothing: a writer that starts at this moment is not disturbed. Needs no permission to write.
  static std::optional<bool> is_taken(const std::filesystem::path& file) noexcept;

  WriterLock() noexcept;  // holds nothing
  WriterLock(WriterLock&& other) noexcept;
  WriterLock& operator=(WriterLock&& other) noexcept;
  ~WriterLock();  // releases

  // False in a forked child, which has no part in its parent's lock.
  bool held() const noexcept;
  void release() noexcept;
  // Closes the descriptor and nothing more. For a forked child: its parent keeps the lock.
  void forget() noexcept;

 private:
  struct Held;
  explicit WriterLock(std::unique_ptr<Held> held) noexcept;
  std::unique_ptr<Held> held_;
};

// Held for the moments in which a file is compared with what it was and replaced, so that of several that replace it none undoes
// what another did: excludes other FolderLocks of the same folder, in this process and in others. A lock (flock) of the folder
// itself, not of the file: the file is another one after each replacement, and other programs have locks of their own on it.
//
// A hint, not a promise: where the folder cannot be locked (file systems without locks, no permission to read it), or someone has
// kept it locked for 30 s (a script that runs under `flock FOLDER`), it is not held.
class FolderLock {
 public:
  // Of the folder in which `file` is or will be. Waits.
  explicit FolderLock(const std::filesystem::path& file);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();  // releases

  bool held() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace embermap
