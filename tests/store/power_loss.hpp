// What a disk may hold after power was lost: a FileOps that records what is done to a folder, and makes folders from the record.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "io/file.hpp"

namespace embermap::test {

// Does everything for real in a folder, and records what changes files under it, in the order in which it happened. Folders in
// it are taken to be durable from the moment they are there, with what they hold when a PowerLoss is made for them.
//
// What counts as safe is what POSIX promises and no more: fsync or fdatasync of a file makes its data and size durable, fsync of
// a folder its entries; the sync of a file says nothing of its entry, nor the other way round. Nothing is synced really.
//
// Everything else may be on the disk or not, in any combination:
// - every sector of 512 bytes holds what it held at some moment since it was last safe (so writes may be missing, torn, and
//   arrive in any order);
// - a file is as long as it was at some such moment, whatever of its data is there; what never came is zeros;
// - its time of modification is that of some moment since the last fsync: fdatasync saves none;
// - of the changes of a folder (a name made, removed, renamed) any subset has happened. A rename happens as a whole. Journals of
//   ext4, xfs and btrfs keep the order of such changes within a folder: this is harsher.
// A sync that fails leaves what it was to save in doubt for good: a later one that succeeds saves only what was written since.
//
// Direct and buffered I/O are the same here. Not recorded: what goes past FileOps (the lock file, making folders). Renames
// between folders and what grows files beyond memory are not modelled.
//
// Thread safety: the calls of FileOps may come from several threads at once; they are done one after another.
class PowerLoss final : public FileOps {
 public:
  enum class Fault : std::uint8_t {
    kIo,         // EIO, nothing done
    kFull,       // ENOSPC, nothing done
    kInterrupt,  // EINTR, nothing done; renames and unlinks know no EINTR: EIO
    kShort,      // a write stops after half of its bytes; other calls as kInterrupt
    kSyncLost    // the first sync from that call on: EIO, and what it was to save is in doubt for good
  };
  // What of the unsafe things is on the disk.
  enum class Kept : std::uint8_t {
    kNothing,
    kEverything,
    kMetadata,  // sizes and names
    kData,      // sectors, as far as files reach
    kTornLast,  // everything, but the last change is torn: of a write some sectors, of others nothing
    kRandom
  };

  explicit PowerLoss(const std::filesystem::path& folder);
  ~PowerLoss() override;
  PowerLoss(const PowerLoss&) = delete;
  PowerLoss& operator=(const PowerLoss&) = delete;

  // Changes and syncs so far: power may be lost after any of them, and before the first.
  std::uint64_t count() const;
  // "pwrite t.npy [4096, +512)", of change `point` (from 0 on).
  std::string describe(std::uint64_t point) const;
  // The `call`-th call from now on that would change something (from 0 on) fails, once.
  void fail(std::uint64_t call, Fault fault);
  bool has_failed() const;  // the fault asked for last has come

  // Makes folders as they may be. Points that ascend are quick; another one before begins from the start.
  class Disk;

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override;
  ssize_t pwritev(int fd, const struct iovec* pieces, int count, off_t offset) override;
  int ftruncate(int fd, off_t bytes) override;
  int fdatasync(int fd) override;
  int fsync(int fd) override;
  int rename(const char* from, const char* to) override;
  int unlink(const char* path) override;
  int rename_new(const char* from, const char* to) override;
  int allocate(int fd, off_t bytes) override;
  int deallocate(int fd, off_t offset, off_t bytes) override;
  int uring_setup(unsigned entries, struct io_uring* ring,
                  struct io_uring_params* parameters) override;  // refused: not seen here

 private:
  using Inode = std::uint64_t;  // number of a file in the record, from 1 on; 0: none
  enum class Kind : std::uint8_t {
    kCreate,
    kWrite,
    kResize,
    kSync,
    kSyncFailed,
    kRename,
    kUnlink,
    kSyncFolder,
    kSyncFolderFailed
  };
  struct Change {
    Kind kind;
    Inode inode = 0;
    std::uint64_t offset = 0;        // kWrite; kResize: the new size
    std::string data = {};           // kWrite
    std::int64_t modified = 0;       // kCreate, kWrite, kResize: when, in ns since 1970, as the file has it
    bool times = false;              // kSync: of the times as well
    std::string folder = {};         // relative to the root, "." for the root itself
    std::string name = {}, to = {};  // of entries; `to` of renames
  };
  struct Entry {
    std::string folder, name;
    bool operator<(const Entry& other) const { return std::tie(folder, name) < std::tie(other.folder, other.name); }
  };
  using Identity = std::pair<std::uint64_t, std::uint64_t>;  // device and inode number

  std::optional<Entry> entry_of(const char* path) const;
  std::optional<Inode> file_of(int fd) const;
  std::optional<Fault> next_fault(bool sync);
  bool refused(bool interruptible, bool sync = false);
  Inode adopt(const Entry& entry, const std::filesystem::path& path);
  template <class Call>
  ssize_t write(int fd, std::string data, off_t offset, Call call);
  int sync(int fd, bool times);
  template <class Call>
  int rename(const char* from, const char* to, Call call);

  const std::filesystem::path root_;
  mutable std::mutex mutex_;
  std::deque<Change> changes_;            // their places stay
  std::map<Inode, std::string> initial_;  // content of files that were there before
  std::map<Inode, std::int64_t> initial_times_;
  std::map<Entry, Inode> initial_entries_;
  std::map<Entry, Inode> entries_;  // now
  std::map<Identity, Inode> known_;
  std::map<int, Inode> open_;
  std::map<int, std::string> open_folders_;
  Inode last_ = 0;
  std::optional<std::pair<std::uint64_t, Fault>> fault_;  // calls left until then
};

class PowerLoss::Disk {
 public:
  explicit Disk(const PowerLoss& loss);  // must outlive this; what is recorded later is seen
  ~Disk();
  // Replaces `folder` (made if it is not there) by what the recorded one may look like if power is lost when `point` changes have
  // been made. The same arguments make the same folder.
  void make(std::uint64_t point, Kept kept, std::uint64_t seed, const std::filesystem::path& folder);

 private:
  struct File;
  struct Folder;
  void apply(const Change& change);
  const PowerLoss& loss_;
  std::uint64_t at_ = 0;
  std::map<Inode, File> files_;
  std::map<std::string, Folder> folders_;
  void restart();
};

std::string_view kept_name(PowerLoss::Kept kept);

}  // namespace embermap::test
