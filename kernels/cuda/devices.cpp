#include <fmt/format.h>

#include "kernels/cuda.hpp"
#include "kernels/cuda/runtime.hpp"

namespace embermap {
namespace {

// "13.0" of 13000.
std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

int cuda_devices() noexcept {
  if (gpu::in_forked_child()) return 0;  // the runtime may still count what it knew before fork()
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
  (void)cudaGetLastError();
  return 0;
}

std::string cuda_absence() {
  if (gpu::in_forked_child()) return "CUDA was in use before fork(), a child cannot use it";
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess) return devices > 0 ? "" : "no CUDA device is visible";
  (void)cudaGetLastError();
  if (error == cudaErrorNoDevice) return "no CUDA device is visible";
  int runtime = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) (void)cudaGetLastError();
  if (driver == 0) return fmt::format("no CUDA driver is installed (this build needs one for CUDA {})", version_text(runtime));
  if (error == cudaErrorInsufficientDriver)
    return fmt::format("the CUDA driver is too old: it supports CUDA {}, this build needs {}", version_text(driver),
                       version_text(runtime));
  return fmt::format("CUDA does not start: {}", gpu::error_text(error));
}

}  // namespace embermap
