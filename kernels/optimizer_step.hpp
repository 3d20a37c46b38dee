// One optimizer step on one element, compiled for host and device. The build forbids contraction to fused multiply-add in the
// files that include this (-ffp-contract=off, -fmad=false), so that both give the same bits. Private to kernels/.
#pragma once

#include <cmath>

#include "base/half.hpp"
#include "kernels/optimizer.hpp"

namespace embermap::detail {

// float16, bfloat16 and float32 rows compute in float, float64 rows in double.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};

template <class A>
struct StepConstants {
  A lr, momentum, weight_decay, eps;
  bool nesterov;
  explicit StepConstants(const StepScalars& s)
      : lr{static_cast<A>(s.lr)},
        momentum{static_cast<A>(s.momentum)},
        weight_decay{static_cast<A>(s.weight_decay)},
        eps{static_cast<A>(s.eps)},
        nesterov{s.nesterov} {}
};

// weight and state are updated in place; `state` is the one state field's element, unused by plain SGD.
template <StepScalars::Kind kKind, class A>
EMBERMAP_HOST_DEVICE inline void step_element(const StepConstants<A>& c, A gradient, A& weight, A& state) {
  if (c.weight_decay != A{0}) gradient = gradient + c.weight_decay * weight;
  if constexpr (kKind == StepScalars::Kind::kSgd) {
    weight = weight - c.lr * gradient;
  } else if constexpr (kKind == StepScalars::Kind::kSgdMomentum) {
    state = c.momentum * state + gradient;
    weight = weight - c.lr * (c.nesterov ? gradient + c.momentum * state : state);
  } else {
    state = state + gradient * gradient;
    weight = weight - c.lr * gradient / (std::sqrt(state) + c.eps);
  }
}

}  // namespace embermap::detail
