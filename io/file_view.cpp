#include "io/file_view.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/file_mapping.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <cstring>
#include <vector>

#include "base/checked.hpp"

namespace embermap {
namespace {

namespace ipc = boost::interprocess;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kFaultAround = 64ULL << 10;  // what a page fault maps beside its page
constexpr std::size_t kLook = 512;                   // pages looked at in one call

// The same file, whatever it is called now; by its name only where there is no /proc.
ipc::file_mapping open_mapping(const File& file) {
  const std::string by_descriptor = fmt::format("/proc/self/fd/{}", file.fd());
  try {
    return {by_descriptor.c_str(), ipc::read_only};
  } catch (const ipc::interprocess_exception&) {
    if (::access("/proc/self/fd", X_OK) == 0) throw;
  }
  ipc::file_mapping mapping(file.path().c_str(), ipc::read_only);
  struct stat theirs {};
  const struct stat ours = file.status();
  if (::fstat(mapping.get_mapping_handle().handle, &theirs) != 0 || ours.st_dev != theirs.st_dev || ours.st_ino != theirs.st_ino)
    throw ipc::interprocess_exception(ipc::error_info(ESTALE));
  return mapping;
}

}  // namespace

class FileView::Region {
 public:
  Region(const File& file, std::uint64_t bytes) : region_{open_mapping(file), ipc::read_only, 0, bytes} {
    (void)region_.advise(ipc::mapped_region::advice_random);
  }
  std::uint64_t bytes() const noexcept { return region_.get_size(); }
  const std::byte* data() const noexcept { return static_cast<const std::byte*>(region_.get_address()); }

  // Takes its pages out of the page table; they stay in the page cache.
  void forget() const noexcept { (void)::madvise(region_.get_address(), region_.get_size(), MADV_DONTNEED); }

  // How many of the pages that [offset, offset + bytes) touches are in memory, until the first that is not if `all` are wanted.
  std::uint64_t resident(std::uint64_t offset, std::uint64_t bytes, bool all) const {
    unsigned char pages[kLook];
    std::uint64_t count = 0;
    const std::uint64_t end = round_up(offset + bytes, kPage);
    for (std::uint64_t at = offset / kPage * kPage; at < end;) {
      const std::uint64_t length = std::min(end - at, kLook * kPage);
      // mincore only looks: the const is the kernel's interface's matter.
      if (::mincore(const_cast<std::byte*>(data() + at), length, pages) != 0) return count;
      for (std::uint64_t i = 0; i < length / kPage; ++i) {
        if ((pages[i] & 1U) != 0)
          ++count;
        else if (all)
          return count;
      }
      at += length;
    }
    return count;
  }

 private:
  ipc::mapped_region region_;
};

FileView::FileView(const File& file) : file_{file} {
  const struct stat status = file.status();
  const int mode = ::fcntl(file.fd(), F_GETFL);
  told_ = ::geteuid() == 0 || status.st_uid == ::geteuid() || (mode >= 0 && (mode & O_ACCMODE) == O_RDWR) ||
          ::access(file.path().c_str(), W_OK) == 0;
  if (!told_) refused_ = "mincore: does not tell for the file of another user";
}

std::shared_ptr<const FileView::Region> FileView::region(std::uint64_t end, std::uint64_t file_bytes) {
  if (end > file_bytes) return nullptr;
  const std::lock_guard lock(mutex_);
  if (region_ && region_->bytes() >= end) return region_;
  if (!told_ || !refused_.empty()) return nullptr;
  try {
    region_ = std::make_shared<const Region>(file_, file_bytes);
  } catch (const ipc::interprocess_exception& error) {
    refused_ = fmt::format("mmap of {} bytes: {}", file_bytes, std::generic_category().message(error.get_native_error()));
    return nullptr;
  }
  return region_;
}

bool FileView::copy(std::uint64_t offset, std::span<std::byte> out, std::uint64_t file_bytes) {
  const auto mapped = region(offset + out.size(), file_bytes);
  if (!mapped) return false;
  const std::uint64_t pages = ceil_div(offset % kPage + out.size(), kPage);
  if (mapped->resident(offset, out.size(), /*all=*/true) != pages) return false;
  std::memcpy(out.data(), mapped->data() + offset, out.size());
  const std::uint64_t touched = std::max<std::uint64_t>(out.size(), kFaultAround);
  if (touched_.fetch_add(touched) + touched >= kMostMapped) {
    touched_ = 0;
    mapped->forget();
  }
  return true;
}

double FileView::resident_share() {
  constexpr std::uint64_t kSamples = 64;
  constexpr std::uint64_t kSample = kLook * kPage;
  const std::uint64_t bytes = file_.size();
  if (bytes == 0) return 0;
  const auto mapped = region(bytes, bytes);
  if (!mapped) return 0;
  std::uint64_t pages = 0, resident = 0;
  const std::uint64_t samples = std::min(kSamples, ceil_div(bytes, kSample));
  for (std::uint64_t i = 0; i < samples; ++i) {
    const std::uint64_t offset = bytes / samples * i / kPage * kPage;
    const std::uint64_t length = std::min(kSample, bytes - offset);
    pages += ceil_div(length, kPage);
    resident += mapped->resident(offset, length, /*all=*/false);
  }
  return static_cast<double>(resident) / static_cast<double>(pages);
}

std::string FileView::why() const {
  const std::lock_guard lock(mutex_);
  return refused_;
}

}  // namespace embermap
