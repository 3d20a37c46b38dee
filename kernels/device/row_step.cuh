// An optimizer step on the records of a working set: what is done with the sums of grouped_sum.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/device/grouped_sum.cuh"
#include "kernels/optimizer_step.hpp"

namespace embermap::gpu::device {

// Where the records of a working set lie, and what the step is.
template <class T>
struct RecordStep {
  std::byte* rows;
  std::uint64_t row_bytes;
  std::uint64_t state_offset[4];
  StepScalars scalars;
  const void* keys;  // the rows' ids, see IdGroups
  bool wide_keys;

  __device__ std::uint64_t key(std::uint64_t row) const {
    return wide_keys ? static_cast<const std::uint64_t*>(keys)[row] : static_cast<const std::uint32_t*>(keys)[row];
  }
};

template <StepScalars::Kind kKind, class Sum, int kCount>
__device__ inline void step_pack(const detail::StepConstants<Sum>& constants, const Sum (&gradients)[kCount],
                                 Sum (&weights)[kCount], std::byte* record, const std::uint64_t (&state_offset)[4],
                                 std::uint64_t column) {
  constexpr int kStates = detail::element_states_of(kKind);
  Pack<Sum, kCount> states[3] = {};
#pragma unroll
  for (int s = 0; s < kStates; ++s)
    states[s] = *reinterpret_cast<const Pack<Sum, kCount>*>(record + state_offset[s] + column * sizeof(Sum));
#pragma unroll
  for (int c = 0; c < kCount; ++c)
    detail::step_element<kKind>(constants, gradients[c], weights[c], states[0].at[c], states[1].at[c], states[2].at[c]);
#pragma unroll
  for (int s = 0; s < kStates; ++s)
    *reinterpret_cast<Pack<Sum, kCount>*>(record + state_offset[s] + column * sizeof(Sum)) = states[s];
}

// One step on kCount neighbouring columns from `column` of a row.
template <class T, class Sum, int kCount>
__device__ inline void step_columns(const RecordStep<T>& step, const detail::StepConstants<Sum>& constants, std::uint64_t row,
                                    std::uint64_t column, const Sum (&gradients)[kCount]) {
  using Kind = StepScalars::Kind;
  std::byte* const record = step.rows + row * step.row_bytes;
  auto* const place = reinterpret_cast<Pack<T, kCount>*>(record + column * sizeof(T));
  Pack<T, kCount> narrow = *place;
  Sum weights[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) weights[c] = static_cast<Sum>(narrow.at[c]);
  const auto as = [&]<Kind kKind>(std::integral_constant<Kind, kKind>) {
    step_pack<kKind>(constants, gradients, weights, record, step.state_offset, column);
  };
  switch (step.scalars.kind) {
    case Kind::kSgd: as(std::integral_constant<Kind, Kind::kSgd>{}); break;
    case Kind::kSgdMomentum: as(std::integral_constant<Kind, Kind::kSgdMomentum>{}); break;
    case Kind::kAdagrad: as(std::integral_constant<Kind, Kind::kAdagrad>{}); break;
    case Kind::kRowWiseAdagrad: as(std::integral_constant<Kind, Kind::kRowWiseAdagrad>{}); break;
    case Kind::kAdadelta: as(std::integral_constant<Kind, Kind::kAdadelta>{}); break;
    case Kind::kAdam: as(std::integral_constant<Kind, Kind::kAdam>{}); break;
    case Kind::kAdamAmsgrad: as(std::integral_constant<Kind, Kind::kAdamAmsgrad>{}); break;
    case Kind::kAdamax: as(std::integral_constant<Kind, Kind::kAdamax>{}); break;
    case Kind::kNAdam: as(std::integral_constant<Kind, Kind::kNAdam>{}); break;
    case Kind::kRAdam: as(std::integral_constant<Kind, Kind::kRAdam>{}); break;
    case Kind::kAsgd: as(std::integral_constant<Kind, Kind::kAsgd>{}); break;
    case Kind::kRmsProp: as(std::integral_constant<Kind, Kind::kRmsProp>{}); break;
    case Kind::kRmsPropMomentum: as(std::integral_constant<Kind, Kind::kRmsPropMomentum>{}); break;
    case Kind::kRmsPropCentered: as(std::integral_constant<Kind, Kind::kRmsPropCentered>{}); break;
    case Kind::kRmsPropCenteredMomentum: as(std::integral_constant<Kind, Kind::kRmsPropCenteredMomentum>{}); break;
    case Kind::kRprop: as(std::integral_constant<Kind, Kind::kRprop>{}); break;
  }
  if constexpr (kIsHalf<T>) {
    if (step.scalars.stochastic_rounding) {
      std::uint32_t word[4];
      std::uint64_t block = ~std::uint64_t{0};
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const std::uint64_t at = column + static_cast<std::uint64_t>(c);
        if (at / 4 != block) {
          block = at / 4;
          detail::rounding_counter(step.scalars, step.key(row), block, word);
          detail::philox(word, detail::rounding_key(step.scalars));
        }
        const std::uint32_t random = at % 4 == 0 ? word[0] : at % 4 == 1 ? word[1] : at % 4 == 2 ? word[2] : word[3];
        narrow.at[c] = detail::round_by_chance<T>(weights[c], random);
      }
      *place = narrow;
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < kCount; ++c) narrow.at[c] = static_cast<T>(weights[c]);
  *place = narrow;
}

// Weights of T, gradients of G; states have the type the step computes in.
template <class T, class G>
struct ElementStep {
  using Gradient = G;
  using Sum = typename detail::Arithmetic<T>::type;

  RecordStep<T> step;
  detail::StepConstants<Sum> constants;

  template <int kCount>
  __device__ void apply(std::uint64_t row, std::uint64_t column, const Sum (&sum)[kCount]) const {
    Sum gradients[kCount];
    const auto clip_value = static_cast<Sum>(step.scalars.clip_value);
#pragma unroll
    for (int c = 0; c < kCount; ++c) gradients[c] = detail::prepared(sum[c], clip_value, step.scalars.maximize);
    step_columns<T, Sum, kCount>(step, constants, row, column, gradients);
  }
};

// Keeps the sums, `dim` a row.
template <class S, class G>
struct KeepSums {
  using Gradient = G;
  using Sum = S;

  Sum* sums;
  std::uint64_t dim;
  Sum clip_value;
  bool maximize;

  template <int kCount>
  __device__ void apply(std::uint64_t row, std::uint64_t column, const Sum (&sum)[kCount]) const {
    Pack<Sum, kCount> kept;
#pragma unroll
    for (int c = 0; c < kCount; ++c) kept.at[c] = detail::prepared(sum[c], clip_value, maximize);
    *reinterpret_cast<Pack<Sum, kCount>*>(sums + row * dim + column) = kept;
  }
};

template <class T>
struct WholeRowStep {
  RecordStep<T> step;
  detail::StepConstants<typename detail::Arithmetic<T>::type> constants;
  std::uint32_t states;
};

// The sum of square(column) over a row's columns, in every lane of the warp; the order is that of optimizer_step.hpp.
template <class Square>
__device__ inline double sum_of_squares(std::uint64_t columns, std::uint32_t lane, const Square& square) {
  double sum = 0;
  for (std::uint64_t column = lane; column < columns; column += detail::kSquareLanes) sum += square(column);
  for (unsigned half = detail::kSquareLanes / 2; half != 0; half /= 2) sum += __shfl_down_sync(0xFFFFFFFFU, sum, half);
  return __shfl_sync(0xFFFFFFFFU, sum, 0);
}

// A warp takes a row: `sums` are its gradients, which are used up.
template <class T>
__global__ void __launch_bounds__(256)
    step_whole_rows(WholeRowStep<T> whole, typename detail::Arithmetic<T>::type* sums, std::uint64_t dim, std::uint64_t rows) {
  using Sum = typename detail::Arithmetic<T>::type;
  using Kind = StepScalars::Kind;
  const StepScalars& scalars = whole.step.scalars;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * (blockDim.x / 32);
  for (std::uint64_t row = (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32; row < rows; row += warps) {
    Sum* const gradients = sums + row * dim;
    std::byte* const record = whole.step.rows + row * whole.step.row_bytes;
    // A lane reads again only what it has written itself.
    const auto squares = [&] {
      return sum_of_squares(dim, lane, [&](std::uint64_t column) {
        const auto value = static_cast<double>(gradients[column]);
        return value * value;
      });
    };
    if (scalars.clip_row != 0)
      if (const double factor = detail::clip_factor(squares(), scalars.clip_row); factor != 1)
        for (std::uint64_t column = lane; column < dim; column += 32)
          gradients[column] = gradients[column] * static_cast<Sum>(factor);

    detail::StepConstants<Sum> constants = whole.constants;
    if (scalars.per_row) {
      const bool nadam = scalars.kind == Kind::kNAdam;
      auto* const count = reinterpret_cast<std::int32_t*>(record + whole.step.state_offset[whole.states - (nadam ? 2 : 1)]);
      auto* const product = reinterpret_cast<Sum*>(record + whole.step.state_offset[whole.states - 1]);
      const auto now = static_cast<std::uint64_t>(detail::next_step(*count));
      const double before = nadam ? static_cast<double>(*product) : 1;
      __syncwarp();  // all have read what one now writes
      if (lane == 0) {
        *count = static_cast<std::int32_t>(now);
        if (nadam) *product = static_cast<Sum>(before * detail::nadam_mu(scalars, now));
      }
      constants = detail::StepConstants<Sum>(scalars, now, before);
    }
    if (scalars.kind == Kind::kRowWiseAdagrad) {
      if (scalars.weight_decay != 0) {  // part of the gradient whose squares are taken
        const auto* const weights = reinterpret_cast<const T*>(record);
        for (std::uint64_t column = lane; column < dim; column += 32)
          gradients[column] = gradients[column] + constants.weight_decay * static_cast<Sum>(weights[column]);
        constants.weight_decay = 0;
      }
      auto* const place = reinterpret_cast<Sum*>(record + whole.step.state_offset[0]);
      const Sum sum = *place + static_cast<Sum>(squares() / static_cast<double>(dim));
      __syncwarp();
      if (lane == 0) *place = sum;
      constants.root = std::sqrt(sum) + constants.eps;
    }
    for (std::uint64_t column = lane; column < dim; column += 32) {
      const Sum one[1] = {gradients[column]};
      step_columns<T, Sum, 1>(whole.step, constants, row, column, one);
    }
  }
}

}  // namespace embermap::gpu::device
