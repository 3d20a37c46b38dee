#include "tests/store/power_loss.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>

namespace embermap::test {
namespace {

constexpr std::uint64_t kSector = 512;

std::uint64_t floor_sector(std::uint64_t byte) { return byte / kSector * kSector; }
std::uint64_t ceil_sector(std::uint64_t byte) { return floor_sector(byte + kSector - 1); }

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::int64_t modified_of(const struct stat& status) { return status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec; }

// 0 for what is no file of ours, which nobody asks for.
std::int64_t modified_of(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 ? modified_of(status) : 0;
}

void check(bool done, const char* call, const std::filesystem::path& path) {
  if (!done) throw std::runtime_error(fmt::format("{} {}: {}", call, path.string(), std::strerror(errno)));
}

// Blocks of zeros stay holes.
void write_file(const std::filesystem::path& path, std::string_view content, std::int64_t modified) {
  constexpr std::size_t kBlock = 4096;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  check(fd >= 0, "open", path);
  check(::ftruncate(fd, static_cast<off_t>(content.size())) == 0, "ftruncate", path);
  const auto zeros = [&](std::size_t at) { return content.substr(at, kBlock).find_first_not_of('\0') == std::string_view::npos; };
  for (std::size_t at = 0; at < content.size();) {
    std::size_t end = at;
    while (end < content.size() && !zeros(end)) end += kBlock;
    end = std::min(end, content.size());
    if (end > at)
      check(::pwrite(fd, content.data() + at, end - at, static_cast<off_t>(at)) == static_cast<ssize_t>(end - at), "pwrite",
            path);
    at = std::max(end, at + kBlock);
  }
  const timespec time{.tv_sec = modified / 1'000'000'000, .tv_nsec = modified % 1'000'000'000};
  const std::array times{time, time};
  check(::futimens(fd, times.data()) == 0, "futimens", path);
  ::close(fd);
}

}  // namespace

std::string_view kept_name(PowerLoss::Kept kept) {
  switch (kept) {
    case PowerLoss::Kept::kNothing: return "nothing unsafe kept";
    case PowerLoss::Kept::kEverything: return "everything kept";
    case PowerLoss::Kept::kMetadata: return "only sizes and names kept";
    case PowerLoss::Kept::kData: return "only data kept";
    case PowerLoss::Kept::kTornLast: return "the last change torn";
    case PowerLoss::Kept::kRandom: return "some kept";
  }
  return "?";
}

PowerLoss::PowerLoss(const std::filesystem::path& folder) : root_{std::filesystem::canonical(folder)} {
  for (const auto& item : std::filesystem::recursive_directory_iterator(root_)) {
    if (!item.is_regular_file()) continue;
    const Entry entry{item.path().parent_path().lexically_relative(root_).string(), item.path().filename().string()};
    struct stat status {};
    check(::stat(item.path().c_str(), &status) == 0, "stat", item.path());
    known_[{status.st_dev, status.st_ino}] = adopt(entry, item.path());
  }
}

PowerLoss::~PowerLoss() = default;

PowerLoss::Inode PowerLoss::adopt(const Entry& entry, const std::filesystem::path& path) {
  const Inode inode = ++last_;
  struct stat status {};
  check(::stat(path.c_str(), &status) == 0, "stat", path);
  initial_.emplace(inode, content_of(path));
  initial_times_.emplace(inode, modified_of(status));
  initial_entries_[entry] = inode;
  entries_[entry] = inode;
  return inode;
}

std::uint64_t PowerLoss::count() const {
  const std::lock_guard lock(mutex_);
  return changes_.size();
}

std::string PowerLoss::describe(std::uint64_t point) const {
  const std::lock_guard lock(mutex_);
  if (point >= changes_.size()) return "the end";
  const Change& change = changes_[point];
  const auto name = [&] {
    std::string found = fmt::format("file {}", change.inode);
    for (const auto& [entry, inode] : initial_entries_)
      if (inode == change.inode) found = entry.name;
    for (std::uint64_t i = 0; i <= point; ++i) {
      if (changes_[i].inode != change.inode) continue;
      if (changes_[i].kind == Kind::kCreate) found = changes_[i].name;
      if (changes_[i].kind == Kind::kRename) found = changes_[i].to;
    }
    return found;
  };
  switch (change.kind) {
    case Kind::kCreate: return fmt::format("create {}", change.name);
    case Kind::kWrite: return fmt::format("pwrite {} [{}, +{})", name(), change.offset, change.data.size());
    case Kind::kResize: return fmt::format("ftruncate {} to {}", name(), change.offset);
    case Kind::kSync: return fmt::format("sync {}", name());
    case Kind::kSyncFailed: return fmt::format("failed sync of {}", name());
    case Kind::kRename: return fmt::format("rename {} to {}", change.name, change.to);
    case Kind::kUnlink: return fmt::format("unlink {}", change.name);
    case Kind::kSyncFolder: return fmt::format("sync folder '{}'", change.folder);
    case Kind::kSyncFolderFailed: return fmt::format("failed sync of folder '{}'", change.folder);
  }
  return "?";
}

void PowerLoss::fail(std::uint64_t call, Fault fault) {
  const std::lock_guard lock(mutex_);
  fault_ = {call, fault};
}

bool PowerLoss::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !fault_;
}

std::optional<PowerLoss::Fault> PowerLoss::next_fault(bool sync) {
  if (!fault_) return std::nullopt;
  if (fault_->first > 0) {
    --fault_->first;
    return std::nullopt;
  }
  const Fault fault = fault_->second;
  if (fault == Fault::kSyncLost && !sync) return std::nullopt;
  fault_.reset();
  return fault;
}

// Of calls that are no writes: true with errno if this one fails.
bool PowerLoss::refused(bool interruptible, bool sync) {
  const auto fault = next_fault(sync);
  if (!fault) return false;
  const bool interrupted = interruptible && (*fault == Fault::kInterrupt || *fault == Fault::kShort);
  errno = interrupted ? EINTR : *fault == Fault::kFull ? ENOSPC : EIO;
  return true;
}

std::optional<PowerLoss::Entry> PowerLoss::entry_of(const char* path) const {
  const std::filesystem::path absolute = std::filesystem::absolute(path).lexically_normal();
  const std::filesystem::path relative = absolute.lexically_relative(root_);
  if (relative.empty() || *relative.begin() == "..") return std::nullopt;
  const std::string folder = relative.parent_path().string();
  return Entry{folder.empty() ? "." : folder, relative.filename().string()};
}

std::optional<PowerLoss::Inode> PowerLoss::file_of(int fd) const {
  const auto found = open_.find(fd);
  return found == open_.end() ? std::nullopt : std::optional(found->second);
}

int PowerLoss::open(const char* path, int flags, mode_t mode) {
  const std::lock_guard lock(mutex_);
  const auto entry = entry_of(path);
  struct stat status {};
  const bool creates = entry && (flags & O_CREAT) != 0 && ::lstat(path, &status) != 0;
  const bool cuts = entry && !creates && (flags & O_TRUNC) != 0;
  if ((creates || cuts) && refused(/*interruptible=*/true)) return -1;
  const int fd = FileOps::open(path, flags, mode);
  if (fd < 0) return fd;
  check(::fstat(fd, &status) == 0, "fstat", path);
  const Identity identity{status.st_dev, status.st_ino};
  if (S_ISDIR(status.st_mode)) {
    if (entry)
      open_folders_[fd] = entry->name == "." ? "." : (std::filesystem::path(entry->folder) / entry->name).lexically_normal();
    return fd;
  }
  if (!S_ISREG(status.st_mode)) return fd;
  if (creates) {
    const Inode inode = ++last_;
    known_[identity] = inode;
    entries_[*entry] = inode;
    changes_.push_back(
        {.kind = Kind::kCreate, .inode = inode, .modified = modified_of(status), .folder = entry->folder, .name = entry->name});
  } else if (entry && !entries_.contains(*entry)) {
    known_[identity] = adopt(*entry, path);
  } else if (entry) {
    known_[identity] = entries_.at(*entry);
  }
  // A file elsewhere may have the number of one that is gone.
  if (const auto found = known_.find(identity); entry && found != known_.end()) open_[fd] = found->second;
  if (cuts) changes_.push_back({.kind = Kind::kResize, .inode = open_.at(fd), .offset = 0, .modified = modified_of(status)});
  return fd;
}

int PowerLoss::close(int fd) {
  const std::lock_guard lock(mutex_);
  open_.erase(fd);
  open_folders_.erase(fd);
  return FileOps::close(fd);
}

template <class Call>
ssize_t PowerLoss::write(int fd, std::string data, off_t offset, Call call) {
  const std::lock_guard lock(mutex_);
  const auto inode = file_of(fd);
  if (!inode) return call();
  const auto fault = next_fault(/*sync=*/false);
  if (fault && *fault != Fault::kShort) {
    errno = *fault == Fault::kFull ? ENOSPC : *fault == Fault::kIo ? EIO : EINTR;
    return -1;
  }
  if (fault && data.size() > 1) data.resize(data.size() / 2);
  const ssize_t done = fault ? FileOps::pwrite(fd, data.data(), data.size(), offset) : call();
  if (done <= 0) return done;
  data.resize(static_cast<std::size_t>(done));
  changes_.push_back({.kind = Kind::kWrite,
                      .inode = *inode,
                      .offset = static_cast<std::uint64_t>(offset),
                      .data = std::move(data),
                      .modified = modified_of(fd)});
  return done;
}

ssize_t PowerLoss::pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) {
  return write(fd, std::string(static_cast<const char*>(buffer), bytes), offset,
               [&] { return FileOps::pwrite(fd, buffer, bytes, offset); });
}

ssize_t PowerLoss::pwritev(int fd, const iovec* pieces, int count, off_t offset) {
  std::string data;
  for (int i = 0; i < count; ++i) data.append(static_cast<const char*>(pieces[i].iov_base), pieces[i].iov_len);
  return write(fd, std::move(data), offset, [&] { return FileOps::pwritev(fd, pieces, count, offset); });
}

int PowerLoss::ftruncate(int fd, off_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto inode = file_of(fd);
  if (inode && refused(/*interruptible=*/true)) return -1;
  const int result = FileOps::ftruncate(fd, bytes);
  if (result == 0 && inode)
    changes_.push_back(
        {.kind = Kind::kResize, .inode = *inode, .offset = static_cast<std::uint64_t>(bytes), .modified = modified_of(fd)});
  return result;
}

int PowerLoss::allocate(int fd, off_t bytes) {
  const std::lock_guard lock(mutex_);
  if (file_of(fd) && refused(/*interruptible=*/true)) return -1;
  return FileOps::allocate(fd, bytes);  // seen by nobody: size and content stay
}

int PowerLoss::deallocate(int fd, off_t offset, off_t bytes) {
  // A hole is zeros that were written: after a crash it may be there or not.
  if (FileOps::deallocate(fd, offset, bytes) != 0) return -1;
  const std::lock_guard lock(mutex_);
  if (const auto inode = file_of(fd))
    changes_.push_back({.kind = Kind::kWrite,
                        .inode = *inode,
                        .offset = static_cast<std::uint64_t>(offset),
                        .data = std::string(static_cast<std::size_t>(bytes), '\0'),
                        .modified = modified_of(fd)});
  return 0;
}

int PowerLoss::uring_setup(unsigned /*entries*/, io_uring* /*ring*/, io_uring_params* /*parameters*/) {
  errno = ENOSYS;
  return -1;
}

int PowerLoss::sync(int fd, bool times) {
  const std::lock_guard lock(mutex_);
  const auto inode = file_of(fd);
  const auto folder = open_folders_.find(fd);
  if (!inode && folder == open_folders_.end()) return 0;
  const bool failed = refused(/*interruptible=*/true, /*sync=*/true);
  // After EINTR it is tried again, and has saved nothing.
  if (failed && errno != EIO) return -1;
  if (inode)
    changes_.push_back({.kind = failed ? Kind::kSyncFailed : Kind::kSync, .inode = *inode, .times = times});
  else
    changes_.push_back({.kind = failed ? Kind::kSyncFolderFailed : Kind::kSyncFolder, .folder = folder->second});
  return failed ? (errno = EIO, -1) : 0;
}

int PowerLoss::fdatasync(int fd) { return sync(fd, /*times=*/false); }
int PowerLoss::fsync(int fd) { return sync(fd, /*times=*/true); }

template <class Call>
int PowerLoss::rename(const char* from, const char* to, Call call) {
  const std::lock_guard lock(mutex_);
  const auto before = entry_of(from), after = entry_of(to);
  if (before.has_value() != after.has_value() || (before && before->folder != after->folder))
    throw std::logic_error(fmt::format("rename {} to {}: renames between folders are not modelled", from, to));
  if (before && refused(/*interruptible=*/false)) return -1;
  const int result = call();
  if (result != 0 || !before) return result;
  const Inode inode = entries_.at(*before);
  entries_.erase(*before);
  entries_[*after] = inode;
  changes_.push_back({.kind = Kind::kRename, .inode = inode, .folder = before->folder, .name = before->name, .to = after->name});
  return result;
}

int PowerLoss::rename(const char* from, const char* to) {
  return rename(from, to, [&] { return FileOps::rename(from, to); });
}

int PowerLoss::rename_new(const char* from, const char* to) {
  return rename(from, to, [&] { return FileOps::rename_new(from, to); });
}

int PowerLoss::unlink(const char* path) {
  const std::lock_guard lock(mutex_);
  const auto entry = entry_of(path);
  if (entry && refused(/*interruptible=*/false)) return -1;
  const int result = FileOps::unlink(path);
  if (result != 0 || !entry || !entries_.contains(*entry)) return result;
  changes_.push_back({.kind = Kind::kUnlink, .inode = entries_.at(*entry), .folder = entry->folder, .name = entry->name});
  entries_.erase(*entry);
  return result;
}

// What is certain to be on the disk, and every change since: whether it must have happened, or cannot become certain any more.
struct PowerLoss::Disk::File {
  struct Step {
    std::uint64_t first = 0;  // byte at which the sectors begin
    std::string after;        // whole sectors, as they were after the change
    std::uint64_t size = 0;   // of the file after it
    std::uint64_t change = 0;
    bool safe = false, doubtful = false;
  };
  std::string now;   // as programs see it
  std::string safe;  // its sectors past the end are zeros
  std::vector<Step> steps;
  std::vector<std::int64_t> times;  // of modification, from the safe one on

  void step(std::uint64_t from, std::uint64_t to, std::uint64_t change) {
    Step step{.first = floor_sector(from), .after = {}, .size = now.size(), .change = change};
    const std::uint64_t end = ceil_sector(to);
    step.after.assign(end - step.first, '\0');
    if (step.first < now.size()) now.copy(step.after.data(), std::min(end, now.size()) - step.first, step.first);
    steps.push_back(std::move(step));
  }
  void write(std::uint64_t offset, std::string_view data, std::uint64_t change) {
    if (now.size() < offset + data.size()) now.resize(offset + data.size());
    now.replace(offset, data.size(), data);
    step(offset, offset + data.size(), change);
  }
  void resize(std::uint64_t size, std::uint64_t change) {
    const std::uint64_t before = now.size();
    now.resize(size);
    step(size, std::max(size, before), change);
  }
  static void put(std::string& content, std::uint64_t at, std::string_view sectors) {
    if (content.size() < at + sectors.size()) content.resize(at + sectors.size());
    content.replace(at, sectors.size(), sectors);
  }
  void sync(bool of_times) {
    if (of_times) times = {times.back()};
    bool doubt = false;
    for (Step& step : steps) {
      step.safe = step.safe || !step.doubtful;
      doubt = doubt || step.doubtful;
    }
    if (doubt) return;
    safe = now;
    steps.clear();
  }
  void sync_failed() {
    for (Step& step : steps) step.doubtful = !step.safe;
  }
};

struct PowerLoss::Disk::Folder {
  struct Step {
    const Change* change;
    std::uint64_t number;
    bool safe = false, doubtful = false;
  };
  std::map<std::string, Inode> safe;
  std::vector<Step> steps;

  static void apply(const Change& change, std::map<std::string, Inode>& names) {
    if (change.kind != Kind::kCreate) names.erase(change.name);
    if (change.kind != Kind::kUnlink) names[change.kind == Kind::kRename ? change.to : change.name] = change.inode;
  }
  void sync() {
    bool doubt = false;
    for (Step& step : steps) {
      step.safe = step.safe || !step.doubtful;
      doubt = doubt || step.doubtful;
    }
    if (doubt) return;
    for (const Step& step : steps) apply(*step.change, safe);
    steps.clear();
  }
  void sync_failed() {
    for (Step& step : steps) step.doubtful = !step.safe;
  }
};

PowerLoss::Disk::Disk(const PowerLoss& loss) : loss_{loss} { restart(); }
PowerLoss::Disk::~Disk() = default;

void PowerLoss::Disk::restart() {
  at_ = 0;
  files_.clear();
  folders_.clear();
  for (const auto& [inode, content] : loss_.initial_) {
    files_[inode].now = files_[inode].safe = content;
    files_[inode].times = {loss_.initial_times_.at(inode)};
  }
  for (const auto& [entry, inode] : loss_.initial_entries_) folders_[entry.folder].safe[entry.name] = inode;
}

void PowerLoss::Disk::apply(const Change& change) {
  switch (change.kind) {
    case Kind::kCreate: files_[change.inode].times = {change.modified}; [[fallthrough]];
    case Kind::kRename:
    case Kind::kUnlink: folders_[change.folder].steps.push_back({&change, at_}); break;
    case Kind::kWrite:
      files_.at(change.inode).write(change.offset, change.data, at_);
      files_.at(change.inode).times.push_back(change.modified);
      break;
    case Kind::kResize:
      files_.at(change.inode).resize(change.offset, at_);
      files_.at(change.inode).times.push_back(change.modified);
      break;
    case Kind::kSync: files_.at(change.inode).sync(change.times); break;
    case Kind::kSyncFailed: files_.at(change.inode).sync_failed(); break;
    case Kind::kSyncFolder: folders_[change.folder].sync(); break;
    case Kind::kSyncFolderFailed: folders_[change.folder].sync_failed(); break;
  }
  ++at_;
}

void PowerLoss::Disk::make(std::uint64_t point, Kept kept, std::uint64_t seed, const std::filesystem::path& folder) {
  const std::lock_guard lock(loss_.mutex_);
  if (point > loss_.changes_.size()) throw std::logic_error(fmt::format("point {} of {} changes", point, loss_.changes_.size()));
  if (point < at_) restart();
  while (at_ < point) apply(loss_.changes_[at_]);

  std::mt19937_64 random(seed * 1'000'003 + point);
  const auto chance = [&](double p) { return std::uniform_real_distribution<>(0, 1)(random) < p; };
  // Few, many or half of the changes, the same for all files: power fails early or late in what the system writes.
  const double keep = std::array{0.1, 0.5, 0.9}[random() % 3];
  const double torn = chance(0.5) ? 0.3 : 0.0;
  const auto is_last = [&](std::uint64_t change) { return change + 1 == point; };

  const auto content = [&](const File& file) {
    std::string out = file.safe;
    std::uint64_t size = file.safe.size();
    std::vector<std::uint64_t> sizes{size};
    for (const File::Step& step : file.steps) {
      if (step.safe) sizes.clear();
      sizes.push_back(step.size);
      bool whole = kept == Kept::kEverything || kept == Kept::kData, sectors = false;
      if (kept == Kept::kTornLast) whole = !(sectors = is_last(step.change));
      if (kept == Kept::kRandom) whole = chance(keep), sectors = chance(torn);
      if (step.safe || (whole && !sectors)) {
        File::put(out, step.first, step.after);
        continue;
      }
      if (!sectors) continue;
      for (std::uint64_t at = 0; at < step.after.size(); at += kSector)
        if (chance(0.5)) File::put(out, step.first + at, std::string_view(step.after).substr(at, kSector));
    }
    size = sizes.front();
    if (kept == Kept::kEverything || kept == Kept::kMetadata) size = sizes.back();
    if (kept == Kept::kTornLast)
      size = sizes.size() > 1 && is_last(file.steps.back().change) && chance(0.5) ? sizes[sizes.size() - 2] : sizes.back();
    if (kept == Kept::kRandom) {
      const std::size_t i = random() % sizes.size();
      size = sizes[i];
      // A file that grows does so in steps.
      if (i + 1 < sizes.size() && sizes[i + 1] > size && chance(0.3))
        size = std::min(sizes[i + 1], floor_sector(size + random() % (sizes[i + 1] - size)) + kSector);
    }
    out.resize(size);
    return out;
  };
  const auto modified = [&](const File& file) {
    switch (kept) {
      case Kept::kNothing:
      case Kept::kData: return file.times.front();
      case Kept::kEverything:
      case Kept::kMetadata: return file.times.back();
      case Kept::kTornLast:
        return file.times.size() > 1 && !file.steps.empty() && is_last(file.steps.back().change) && chance(0.5)
                   ? file.times[file.times.size() - 2]
                   : file.times.back();
      case Kept::kRandom: return file.times[random() % file.times.size()];
    }
    return file.times.back();
  };

  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  for (const auto& item : std::filesystem::recursive_directory_iterator(loss_.root_))
    if (item.is_directory()) std::filesystem::create_directories(folder / item.path().lexically_relative(loss_.root_));
  for (const auto& [where, entries] : folders_) {
    std::filesystem::create_directories(folder / where);
    auto names = entries.safe;
    const bool in_order = chance(0.5);
    bool cut = false;
    for (const Folder::Step& step : entries.steps) {
      bool happened = step.safe || kept == Kept::kEverything || kept == Kept::kMetadata;
      if (kept == Kept::kTornLast) happened = step.safe || !is_last(step.number);
      if (kept == Kept::kRandom && !step.safe) {
        cut = cut || !chance(keep);
        happened = in_order ? !cut : chance(keep);
      }
      if (happened) Folder::apply(*step.change, names);
    }
    for (const auto& [name, inode] : names)
      write_file(folder / where / name, content(files_.at(inode)), modified(files_.at(inode)));
  }
}

}  // namespace embermap::test
