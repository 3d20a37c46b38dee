#include "store/slab.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <fstream>
#include <new>
#include <string>
#include <utility>

#include "base/checked.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = 2ULL << 20;

// AnonHugePages of the mapping that holds `address`, from /proc/self/smaps; 0 if that cannot be read.
std::uint64_t huge_bytes_at(const std::byte* address) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      inside = begin <= wanted && wanted < end;
    else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1)
      return std::uint64_t{kib} << 10;
  }
  return 0;
}

}  // namespace

Slab::Slab(std::uint64_t bytes, ThreadPool& pool) {
  if (bytes == 0) return;
  const std::uint64_t length = round_up(bytes, kPage);
  const std::uint64_t alignment = length >= kHugePage ? kHugePage : kPage;
  const std::uint64_t reserved = checked_add(length, alignment, "bytes of the slab");
  void* mapping = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<std::byte*>(mapping);
  auto* aligned = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(begin), alignment));
  if (aligned != begin) munmap(begin, static_cast<std::size_t>(aligned - begin));
  std::byte* const end = begin + reserved;
  if (aligned + length != end) munmap(aligned + length, static_cast<std::size_t>(end - (aligned + length)));
  data_ = aligned;
  bytes_ = length;
  // Advice: both only cost speed where the kernel does not take them.
  (void)madvise(data_, bytes_, MADV_HUGEPAGE);
  (void)madvise(data_, bytes_, MADV_DONTFORK);
  pool.parallel_for(ceil_div(bytes_, kHugePage), 1, [&](std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t at = first * kHugePage; at < std::min(last * kHugePage, bytes_); at += kPage)
      *reinterpret_cast<volatile std::byte*>(data_ + at) = std::byte{0};
  });
  huge_pages_ = bytes_ >= kHugePage && huge_bytes_at(data_) >= bytes_ / 2;
}

Slab::Slab(Slab&& other) noexcept
    : data_{std::exchange(other.data_, nullptr)}, bytes_{std::exchange(other.bytes_, 0)}, huge_pages_{other.huge_pages_} {}

Slab& Slab::operator=(Slab&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    huge_pages_ = other.huge_pages_;
  }
  return *this;
}

Slab::~Slab() { release(); }

void Slab::release() noexcept {
  if (data_ != nullptr) munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace embermap
