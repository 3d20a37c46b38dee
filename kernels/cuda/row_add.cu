#include "base/half.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/device/grouped_sum_launch.cuh"

namespace embermap::gpu {
namespace {

// row += sum, rounded to T once. Integers are added without a sign: they wrap.
template <class T, class S>
struct Add {
  using Gradient = T;
  using Sum = S;

  std::byte* rows;
  std::uint64_t row_bytes;

  template <int kCount>
  __device__ void apply(std::uint64_t row, std::uint64_t column, const Sum (&sum)[kCount]) const {
    auto* const place = reinterpret_cast<device::Pack<T, kCount>*>(rows + row * row_bytes + column * sizeof(T));
    device::Pack<T, kCount> values = *place;
#pragma unroll
    for (int c = 0; c < kCount; ++c) values.at[c] = static_cast<T>(static_cast<Sum>(static_cast<Sum>(values.at[c]) + sum[c]));
    *place = values;
  }
};

template <class T, class S>
void add(const SumRows& rows, std::uint64_t dim, const std::byte* in, const MemoryPool& pool, cudaStream_t stream) {
  const std::uint64_t alignment = reinterpret_cast<std::uintptr_t>(rows.working) | rows.row_bytes;
  sum_rows("add_grouped", Add<T, S>{rows.working, rows.row_bytes}, rows, dim, in, alignment, sizeof(T), pool, stream);
}

}  // namespace

void add_grouped(const SumRows& rows, std::uint64_t dim, DType dtype, const std::byte* in, const MemoryPool& pool,
                 cudaStream_t stream) {
  switch (dtype) {
    case DType::kFloat32: return add<float, float>(rows, dim, in, pool, stream);
    case DType::kFloat16: return add<Float16, float>(rows, dim, in, pool, stream);
    case DType::kBFloat16: return add<BFloat16, float>(rows, dim, in, pool, stream);
    case DType::kFloat64: return add<double, double>(rows, dim, in, pool, stream);
    case DType::kInt8:
    case DType::kUInt8: return add<std::uint8_t, std::uint8_t>(rows, dim, in, pool, stream);
    case DType::kInt32: return add<std::uint32_t, std::uint32_t>(rows, dim, in, pool, stream);
    case DType::kInt64: return add<std::uint64_t, std::uint64_t>(rows, dim, in, pool, stream);
  }
}

}  // namespace embermap::gpu
