// Launching a kernel so that a failure is its own: `<<<>>>` followed by cudaPeekAtLastError would report errors left behind by
// others.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "kernels/cuda/runtime.hpp"

namespace embermap::gpu {

// Precondition: blocks > 0; the kernels stride over what a grid does not cover. Throws CudaError naming `name`.
template <class... Parameters, class... Arguments>
void launch(std::string_view name, void (*kernel)(Parameters...), std::uint64_t blocks, unsigned threads, cudaStream_t stream,
            Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min<std::uint64_t>(blocks, 0x7FFFFFFFU)));
  config.blockDim = dim3(threads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

// Kernel sources do not include fmt, which nvcc cannot digest in every version, nor base/checked.hpp, which does: the engine has
// checked the sizes that come here.
constexpr std::uint64_t blocks_for(std::uint64_t work, std::uint64_t per_block) {
  return work / per_block + (work % per_block != 0);
}

// Blocks of `threads` for `work` threads, at most `per_multiprocessor` on each multiprocessor of the current device.
inline std::uint64_t grid(std::uint64_t work, unsigned threads, unsigned per_multiprocessor) {
  int device = 0;
  int multiprocessors = 0;
  EMBERMAP_CUDA(cudaGetDevice(&device));
  EMBERMAP_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return std::min(blocks_for(work, threads), std::uint64_t{static_cast<unsigned>(multiprocessors)} * per_multiprocessor);
}

}  // namespace embermap::gpu
