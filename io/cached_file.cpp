#include "io/cached_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/interprocess/file_mapping.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <cerrno>
#include <system_error>

#include "base/checked.hpp"

namespace embermap {
namespace {

namespace ipc = boost::interprocess;

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kSamplePages = 512;

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

// For files of others that we may not write, mincore calls every page resident.
bool mincore_tells(const File& file) {
  const int mode = ::fcntl(file.fd(), F_GETFL);
  return ::geteuid() == 0 || file.status().st_uid == ::geteuid() || (mode >= 0 && (mode & O_ACCMODE) == O_RDWR) ||
         ::access(file.path().c_str(), W_OK) == 0;
}

// How many of `bytes` bytes from `begin` on, at most kSamplePages pages, are in memory. Looks only: nothing of the mapping is
// touched.
std::uint64_t resident_pages(std::byte* begin, std::uint64_t bytes) {
  unsigned char pages[kSamplePages];
  if (::mincore(begin, bytes, pages) != 0) return 0;
  return static_cast<std::uint64_t>(
      std::count_if(pages, pages + ceil_div(bytes, kPage), [](unsigned char page) { return (page & 1U) != 0; }));
}

}  // namespace

bool CachedFile::copy(std::uint64_t offset, std::span<std::byte> out) {
  if (refused_) return false;
  for (std::size_t done = 0; done < out.size();) {
    const iovec rest{out.data() + done, out.size() - done};
    const auto at = static_cast<off_t>(offset + done);
    const ssize_t got = in_memory_ ? file_.ops().pread(file_.fd(), rest.iov_base, rest.iov_len, at)
                                   : file_.ops().preadv_cached(file_.fd(), &rest, 1, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno != EAGAIN && !in_memory_) refuse(fmt::format("preadv2: {}", std::generic_category().message(errno)));
    if (got <= 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}

double CachedFile::resident_share() {
  constexpr std::uint64_t kSamples = 64;
  constexpr std::uint64_t kSample = kSamplePages * kPage;
  const std::uint64_t bytes = file_.size();
  if (bytes == 0) return 0;
  if (!mincore_tells(file_)) {
    refuse("mincore: does not tell for the file of another user");
    return 0;
  }
  try {
    const ipc::mapped_region region(open_mapping(file_), ipc::read_only, 0, bytes);
    auto* const begin = static_cast<std::byte*>(region.get_address());
    std::uint64_t pages = 0, resident = 0;
    const std::uint64_t samples = std::min(kSamples, ceil_div(bytes, kSample));
    for (std::uint64_t i = 0; i < samples; ++i) {
      const std::uint64_t offset = bytes / samples * i / kPage * kPage;
      const std::uint64_t length = std::min(kSample, bytes - offset);
      pages += ceil_div(length, kPage);
      resident += resident_pages(begin + offset, length);
    }
    return static_cast<double>(resident) / static_cast<double>(pages);
  } catch (const ipc::interprocess_exception& error) {
    refuse(fmt::format("mmap of {} bytes: {}", bytes, std::generic_category().message(error.get_native_error())));
    return 0;
  }
}

std::string CachedFile::why() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

void CachedFile::refuse(std::string_view why) {
  const std::lock_guard lock(mutex_);
  if (refused_.exchange(true)) return;
  why_ = why;
}

}  // namespace embermap
