// Calling the CUDA runtime: checks, the current device, streams. Private to kernels/cuda/.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "kernels/cuda.hpp"

// The only macro: a failure names the expression.
#define EMBERMAP_CUDA(expression) ::embermap::gpu::check((expression), #expression)

namespace embermap::gpu {

// Throws CudaError "WHAT: cudaErrorName: text (file.cpp:88)" unless `error` is cudaSuccess, and clears the runtime's last error,
// so that the next check, ours or the caller's, reports its own failure.
void check(cudaError_t error, std::string_view what, const char* file = __builtin_FILE(), int line = __builtin_LINE());

// For destructors: a line on stderr instead of an exception. Silent while the process ends (the runtime may be gone before us)
// and in a forked child, which cannot free what its parent owns.
void check_teardown(cudaError_t error, const char* what) noexcept;

// "cudaErrorName: text".
std::string error_text(cudaError_t error);

// CUDA does not survive fork(): true in a child of a process in which remember_process() was called before. The destructors of a
// child then leave the parent's memory alone.
void remember_process() noexcept;
bool in_forked_child() noexcept;

// Makes `device` current for this thread and gives the caller's back at the end.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);                         // throws CudaError
  ScopedDevice(int device, const std::nothrow_t&) noexcept;  // logs
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

// As long as it lives, calls of this thread that ask or wait for something disturb no capture of a graph, of this thread or
// another.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A stream of the current device's that waits for no other. `urgent`: its kernels come before those of other streams that have
// not begun yet.
class OwnStream {
 public:
  explicit OwnStream(bool urgent = false);  // throws CudaError
  ~OwnStream();                             // waits for it
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

inline cudaStream_t native(CudaStream stream) noexcept { return static_cast<cudaStream_t>(stream.handle); }

// Throws CudaError if `stream` is recording a graph: a batch's sizes are known only when its ids are, so it cannot be replayed.
void refuse_capture(cudaStream_t stream, std::string_view call);

}  // namespace embermap::gpu
