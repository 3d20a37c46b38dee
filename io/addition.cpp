#include "io/addition.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/lock.hpp"

namespace embermap {
namespace {

constexpr std::size_t kPendingBytes = 1_MiB;

std::optional<struct stat> status_of(const std::filesystem::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) == 0) return status;
  if (errno == ENOENT) return std::nullopt;
  throw IoError(errno, "stat", file);
}

bool unchanged(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec &&
         a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

bool regular(const std::filesystem::path& file) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(file, ignored);
}

}  // namespace

Addition::Addition(const std::filesystem::path& file, std::string what, bool adds, bool overwrite)
    : what_{std::move(what)}, adds_{adds}, temporary_{TemporaryFile::create(file, overwrite || adds)} {
  // Others may make the file at any moment: finish() looks once more, when nobody can.
  if (adds_ && regular(temporary_.target())) open_existing();
}

void Addition::open_existing() {
  existing_ = File::open(temporary_.target(), File::Mode::kRead);
  status_ = existing_.status();
}

bool Addition::changed() const {
  const auto now = status_of(temporary_.target());
  if (!existing_.is_open()) return now.has_value();
  if (!now) throw NotFound(fmt::format("{} was removed by someone else while {} was written", printable(target()), what_));
  return !unchanged(*now, status_);
}

void Addition::finish(const Merge& merge) {
  temporary_.file().sync();  // the long part of commit(), before others have to wait
  const FolderLock alone(target());
  constexpr int kAttempts = 100;
  for (int attempt = 0; adds_ && changed(); ++attempt) {
    if (attempt == kAttempts)
      throw AlreadyExists(
          fmt::format("{} was changed by someone else again and again while {} was written; it is left as it is now",
                      printable(target()), what_));
    TemporaryFile newer = TemporaryFile::create(target(), /*overwrite=*/true);
    open_existing();
    merge(existing_, temporary_.file(), newer.file());
    temporary_ = std::move(newer);
  }
  temporary_.commit();
}

void Appender::write(const File& file, std::span<const std::byte> bytes) {
  if (pending_.size() + bytes.size() > kPendingBytes) flush(file);
  if (bytes.size() >= kPendingBytes) {
    file.write(at_, bytes);
    at_ += bytes.size();
  } else {
    pending_.insert(pending_.end(), bytes.begin(), bytes.end());
  }
}

void Appender::flush(const File& file) {
  file.write(at_, pending_);
  at_ += pending_.size();
  pending_.clear();
}

void copy_range(const File& from, std::uint64_t offset, std::uint64_t bytes, const File& to, std::uint64_t at) {
  std::vector<std::byte> block(std::min<std::uint64_t>(4_MiB, bytes));
  for (std::uint64_t done = 0; done < bytes; done += block.size()) {
    const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - done));
    from.read(offset + done, part);
    to.write(at + done, part);
  }
}

}  // namespace embermap
