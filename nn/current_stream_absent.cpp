#include <string>

#include "base/error.hpp"
#include "nn/current_stream.hpp"

namespace embermap::detail {

CudaStream current_stream(int device) {
  throw CudaError("ids are on cuda:" + std::to_string(device) + ", but embermap was built without CUDA: give ids on the CPU");
}

}  // namespace embermap::detail
