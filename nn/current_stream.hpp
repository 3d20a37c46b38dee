// The CUDA stream torch would use now. Private to nn/; current_stream_cuda.cpp implements it, current_stream_absent.cpp does in a
// build without CUDA or with a torch without CUDA.
#pragma once

#include "kernels/cuda.hpp"

namespace embermap::detail {

// The current stream of this thread on CUDA device `device`; the handle stays torch's. Throws CudaError in a build without CUDA.
CudaStream current_stream(int device);

}  // namespace embermap::detail
