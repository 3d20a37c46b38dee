#include "kernels/cuda/runtime.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace embermap::gpu {
namespace {

std::atomic<pid_t> cuda_process{0};

std::string_view base_name(std::string_view path) { return path.substr(path.find_last_of('/') + 1); }

}  // namespace

std::string error_text(cudaError_t error) { return fmt::format("{}: {}", cudaGetErrorName(error), cudaGetErrorString(error)); }

void check(cudaError_t error, std::string_view what, const char* file, int line) {
  if (error == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();
  throw CudaError(fmt::format("{}: {} ({}:{}){}", what, error_text(error), base_name(file), line,
                              in_forked_child() ? "; CUDA was in use before fork(), a child cannot use it" : ""));
}

void check_teardown(cudaError_t error, const char* what) noexcept {
  if (error == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();
  if (error == cudaErrorCudartUnloading || in_forked_child()) return;
  std::fprintf(stderr, "embermap: %s: %s: %s\n", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

void remember_process() noexcept {
  pid_t none = 0;
  cuda_process.compare_exchange_strong(none, getpid());
}

bool in_forked_child() noexcept {
  const pid_t owner = cuda_process.load();
  return owner != 0 && owner != getpid();
}

ScopedDevice::ScopedDevice(int device) {
  int current = 0;
  EMBERMAP_CUDA(cudaGetDevice(&current));
  if (current == device) return;
  EMBERMAP_CUDA(cudaSetDevice(device));
  previous_ = current;
}

ScopedDevice::ScopedDevice(int device, const std::nothrow_t&) noexcept {
  int current = device;
  check_teardown(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  const cudaError_t error = cudaSetDevice(device);
  check_teardown(error, "cudaSetDevice");
  if (error == cudaSuccess) previous_ = current;
}

ScopedDevice::~ScopedDevice() {
  if (previous_ >= 0) check_teardown(cudaSetDevice(previous_), "cudaSetDevice");
}

OwnStream::OwnStream(bool urgent) {
  int priority = 0;
  if (urgent) EMBERMAP_CUDA(cudaDeviceGetStreamPriorityRange(nullptr, &priority));
  EMBERMAP_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
}

OwnStream::~OwnStream() {
  if (in_forked_child()) return;
  check_teardown(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  check_teardown(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

void refuse_capture(cudaStream_t stream, std::string_view call) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), call);
  if (status != cudaStreamCaptureStatusNone)
    throw CudaError(fmt::format("{}: the stream is capturing a CUDA graph; embermap batches cannot be captured", call));
}

}  // namespace embermap::gpu
