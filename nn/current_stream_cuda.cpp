#include <c10/cuda/CUDAStream.h>

#include "nn/current_stream.hpp"

namespace embermap::detail {

CudaStream current_stream(int device) {
  return CudaStream{.handle = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream()};
}

}  // namespace embermap::detail
