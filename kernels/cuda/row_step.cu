#include <type_traits>

#include "base/half.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/device/grouped_sum_launch.cuh"
#include "kernels/optimizer_step.hpp"

namespace embermap::gpu {
namespace {

// One optimizer step on weights of type T; the state field, where there is one, has the type the step computes in.
template <StepScalars::Kind kKind, class T, class G>
struct Step {
  using Gradient = G;
  using Sum = typename detail::Arithmetic<T>::type;
  static constexpr bool kHasState = kKind != StepScalars::Kind::kSgd;

  std::byte* rows;
  std::uint64_t row_bytes;
  std::uint64_t state_offset;
  detail::StepConstants<Sum> constants;

  template <int kCount>
  __device__ void apply(std::uint64_t row, std::uint64_t column, const Sum (&sum)[kCount]) const {
    std::byte* const record = rows + row * row_bytes;
    auto* const weight_place = reinterpret_cast<device::Pack<T, kCount>*>(record + column * sizeof(T));
    auto* const state_place = reinterpret_cast<device::Pack<Sum, kCount>*>(record + state_offset + column * sizeof(Sum));
    device::Pack<T, kCount> weights = *weight_place;
    device::Pack<Sum, kCount> states{};
    if constexpr (kHasState) states = *state_place;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      Sum weight = static_cast<Sum>(weights.at[c]);
      detail::step_element<kKind>(constants, sum[c], weight, states.at[c]);
      weights.at[c] = static_cast<T>(weight);
    }
    *weight_place = weights;
    if constexpr (kHasState) *state_place = states;
  }
};

template <StepScalars::Kind kKind, class T, class G>
void step_kind(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
               const MemoryPool& pool, cudaStream_t stream) {
  using Op = Step<kKind, T, G>;
  const std::uint64_t state_offset = Op::kHasState ? layout.state_offset[0] : 0;
  const std::uint64_t alignment = reinterpret_cast<std::uintptr_t>(rows.working) | rows.row_bytes | state_offset;
  const Op op{rows.working, rows.row_bytes, state_offset, detail::StepConstants<typename Op::Sum>(scalars)};
  sum_rows("step_grouped", op, rows, layout.dim, grads, alignment, Op::kHasState ? sizeof(typename Op::Sum) : sizeof(T), pool,
           stream);
}

template <class T, class G>
void step(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
          const MemoryPool& pool, cudaStream_t stream) {
  using Kind = StepScalars::Kind;
  switch (scalars.kind) {
    case Kind::kSgd: return step_kind<Kind::kSgd, T, G>(rows, layout, scalars, grads, pool, stream);
    case Kind::kSgdMomentum: return step_kind<Kind::kSgdMomentum, T, G>(rows, layout, scalars, grads, pool, stream);
    case Kind::kAdagrad: return step_kind<Kind::kAdagrad, T, G>(rows, layout, scalars, grads, pool, stream);
  }
}

// Half-precision rows take gradients of their own dtype or float32.
template <class T>
void step_half(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
               DType grad_dtype, const MemoryPool& pool, cudaStream_t stream) {
  if (grad_dtype == DType::kFloat32) return step<T, float>(rows, layout, scalars, grads, pool, stream);
  return step<T, T>(rows, layout, scalars, grads, pool, stream);
}

}  // namespace

void step_grouped(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                  DType grad_dtype, const MemoryPool& pool, cudaStream_t stream) {
  switch (layout.dtype) {
    case DType::kFloat32: return step<float, float>(rows, layout, scalars, grads, pool, stream);
    case DType::kFloat64: return step<double, double>(rows, layout, scalars, grads, pool, stream);
    case DType::kFloat16: return step_half<Float16>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    case DType::kBFloat16: return step_half<BFloat16>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    default: throw DTypeError("step_grouped: rows of dtype " + std::string(dtype_name(layout.dtype)) + " cannot be trained");
  }
}

}  // namespace embermap::gpu
