// The CUDA side in a build without CUDA.
#include <fmt/format.h>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "kernels/cuda.hpp"
#include "kernels/profile.hpp"

namespace embermap {

int cuda_devices() noexcept { return 0; }

std::string cuda_absence() { return "embermap was built without CUDA"; }

PinnedRange::PinnedRange(std::byte*, std::uint64_t bytes)
    : error_{fmt::format("cannot register {} of pinned host memory: {}", format_size(bytes), cuda_absence())} {}

PinnedRange PinnedRange::read_only(const std::byte*, std::uint64_t bytes, int) { return PinnedRange(nullptr, bytes); }

PinnedRange::PinnedRange(PinnedRange&& other) noexcept = default;
PinnedRange& PinnedRange::operator=(PinnedRange&& other) noexcept = default;
PinnedRange::~PinnedRange() = default;

void PinnedRange::release() noexcept {}

std::unique_ptr<CudaEngine> CudaEngine::create(int device) {
  throw CudaError(fmt::format("CUDA device {} cannot be used: {}", device, cuda_absence()));
}

ProfileRange::ProfileRange(const char*) noexcept {}
ProfileRange::~ProfileRange() = default;

}  // namespace embermap
