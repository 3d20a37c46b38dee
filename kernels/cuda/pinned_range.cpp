#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/size_text.hpp"
#include "kernels/cuda.hpp"
#include "kernels/cuda/runtime.hpp"

namespace embermap {
namespace {

constexpr std::uintptr_t kPiece = std::uintptr_t{1} << 30;
constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;

// Length of the piece that begins at `at`: at most 1 GiB, ending on a huge page's border, so that no page is in two pieces.
std::uint64_t piece_length(const std::byte* at, std::uint64_t left) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const std::uintptr_t end = (address + kPiece) & ~(kHugePage - 1);
  return std::min<std::uint64_t>(left, end - address);
}

void unregister_pieces(std::byte* begin, std::uint64_t bytes) noexcept {
  for (std::uint64_t done = 0; done < bytes;) {
    gpu::check_teardown(cudaHostUnregister(begin + done), "cudaHostUnregister");
    done += piece_length(begin + done, bytes - done);
  }
}

}  // namespace

PinnedRange::PinnedRange(std::byte* begin, std::uint64_t bytes) {
  pin(begin, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
}

PinnedRange PinnedRange::read_only(const std::byte* begin, std::uint64_t bytes, int device) {
  PinnedRange range;
  int supported = 0;
  if (const cudaError_t error = cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, device);
      error != cudaSuccess)
    (void)cudaGetLastError();  // no device: pin() says so
  if (supported == 0 && device >= 0 && device < cuda_devices()) {
    range.error_ = fmt::format("cannot register {} of pinned host memory: CUDA device {} does not take memory for reading only",
                               format_size(bytes), device);
    return range;
  }
  // Nothing is written through the pointer.
  range.pin(const_cast<std::byte*>(begin), bytes, cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly);
  return range;
}

void PinnedRange::pin(std::byte* begin, std::uint64_t bytes, unsigned flags) {
  const auto fail = [&](const std::string& why) {
    error_ = fmt::format("cannot register {} of pinned host memory: {}", format_size(bytes), why);
  };
  if (begin == nullptr || bytes == 0) {
    fail("the range is empty");
    return;
  }
  if (cuda_devices() == 0) {
    fail(cuda_absence());
    return;
  }
  gpu::remember_process();
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t length = piece_length(begin + done, bytes - done);
    const cudaError_t error = cudaHostRegister(begin + done, length, flags);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      fail(fmt::format("cudaHostRegister of bytes [{}, +{}): {}", done, length, gpu::error_text(error)));
      unregister_pieces(begin, done);
      return;
    }
    done += length;
  }
  begin_ = begin;
  bytes_ = bytes;
}

PinnedRange::PinnedRange(PinnedRange&& other) noexcept
    : begin_{std::exchange(other.begin_, nullptr)}, bytes_{std::exchange(other.bytes_, 0)}, error_{std::move(other.error_)} {}

PinnedRange& PinnedRange::operator=(PinnedRange&& other) noexcept {
  if (this != &other) {
    release();
    begin_ = std::exchange(other.begin_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    error_ = std::move(other.error_);
  }
  return *this;
}

PinnedRange::~PinnedRange() { release(); }

void PinnedRange::release() noexcept {
  const std::uint64_t bytes = std::exchange(bytes_, 0);
  if (bytes != 0 && !gpu::in_forked_child()) unregister_pieces(begin_, bytes);
  begin_ = nullptr;
}

}  // namespace embermap
