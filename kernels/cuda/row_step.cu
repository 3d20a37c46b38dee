#include <type_traits>

#include "base/half.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/device/grouped_sum_launch.cuh"
#include "kernels/device/row_step.cuh"
#include "kernels/optimizer_step.hpp"

namespace embermap::gpu {
namespace {

// The kind is a value, not a parameter of the template: kernels wait for memory, and there are 16 kinds.
template <class T>
device::RecordStep<T> record_step(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars) {
  device::RecordStep<T> step{rows.working, rows.row_bytes, {}, scalars, rows.keys, rows.wide_keys};
  for (int state = 0; state < 4; ++state) step.state_offset[state] = layout.state_offset[state];
  return step;
}

// Steps for which an element of the sum is enough.
template <class T, class G>
void step_elements(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                   const MemoryPool& pool, cudaStream_t stream) {
  using Op = device::ElementStep<T, G>;
  const Op op{record_step<T>(rows, layout, scalars), detail::StepConstants<typename Op::Sum>(scalars)};
  const std::uint32_t states = element_states(scalars.kind);
  std::uint64_t alignment = reinterpret_cast<std::uintptr_t>(rows.working) | rows.row_bytes;
  for (std::uint32_t state = 0; state < states; ++state) alignment |= layout.state_offset[state];
  sum_rows("step_grouped", op, rows, layout.dim, grads, alignment, states != 0 ? sizeof(typename Op::Sum) : sizeof(T), pool,
           stream);
}

// The sums of all rows first, then a warp for each row.
template <class Sum, class G>
void sum_into(Sum* sums, const SumRows& rows, std::uint64_t dim, const StepScalars& scalars, const std::byte* grads,
              const MemoryPool& pool, cudaStream_t stream) {
  const device::KeepSums<Sum, G> op{sums, dim, static_cast<Sum>(scalars.clip_value), scalars.maximize};
  sum_rows("step_grouped", op, rows, dim, grads, dim * sizeof(Sum), sizeof(Sum), pool, stream);
}

template <class T>
void step_whole_rows(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                     DType grad_dtype, const MemoryPool& pool, cudaStream_t stream) {
  using Sum = typename detail::Arithmetic<T>::type;
  if (rows.distinct == 0) return;
  const DeviceBuffer buffer(pool, rows.distinct * layout.dim * sizeof(Sum), stream);  // no more than the gradients, in Sum
  Sum* const sums = buffer.at<Sum>(0);
  if constexpr (std::is_same_v<Sum, double>) {
    sum_into<double, double>(sums, rows, layout.dim, scalars, grads, pool, stream);
  } else {
    if (grad_dtype == DType::kFloat32)
      sum_into<float, float>(sums, rows, layout.dim, scalars, grads, pool, stream);
    else if (grad_dtype == DType::kFloat16)
      sum_into<float, Float16>(sums, rows, layout.dim, scalars, grads, pool, stream);
    else
      sum_into<float, BFloat16>(sums, rows, layout.dim, scalars, grads, pool, stream);
  }
  constexpr unsigned kThreads = 256;
  const device::WholeRowStep<T> step{record_step<T>(rows, layout, scalars), detail::StepConstants<Sum>(scalars),
                                     all_states(scalars)};
  launch("step_grouped", device::step_whole_rows<T>, grid(rows.distinct * 32, kThreads, 8), kThreads, stream, step, sums,
         layout.dim, rows.distinct);
}

template <class T>
void step(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads, DType grad_dtype,
          const MemoryPool& pool, cudaStream_t stream) {
  if (scalars.whole_rows()) return step_whole_rows<T>(rows, layout, scalars, grads, grad_dtype, pool, stream);
  if constexpr (kIsHalf<T>)  // these take gradients of float32 too
    if (grad_dtype == DType::kFloat32) return step_elements<T, float>(rows, layout, scalars, grads, pool, stream);
  step_elements<T, T>(rows, layout, scalars, grads, pool, stream);
}

}  // namespace

void step_grouped(const SumRows& rows, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                  DType grad_dtype, const MemoryPool& pool, cudaStream_t stream) {
  switch (layout.dtype) {
    case DType::kFloat32: return step<float>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    case DType::kFloat64: return step<double>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    case DType::kFloat16: return step<Float16>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    case DType::kBFloat16: return step<BFloat16>(rows, layout, scalars, grads, grad_dtype, pool, stream);
    default: throw DTypeError("step_grouped: rows of dtype " + std::string(dtype_name(layout.dtype)) + " cannot be trained");
  }
}

}  // namespace embermap::gpu
