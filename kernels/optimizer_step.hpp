// One optimizer step on one element, compiled for host and device. The build forbids contraction to fused multiply-add in the
// files that include this (-ffp-contract=off, -fmad=false), so that both give the same bits: addition, multiplication, division
// and square root are IEEE's everywhere, and nothing else is used, not even where a step's scalars are made. Private to kernels/.
#pragma once

#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "base/philox.hpp"
#include "kernels/optimizer.hpp"

namespace embermap::detail {

using StepKind = StepScalars::Kind;

// float16, bfloat16 and float32 rows compute in float, float64 rows in double.
template <class T>
struct Arithmetic {
  using type = float;
};
template <>
struct Arithmetic<double> {
  using type = double;
};

// base ^ n by repeated squaring, within some n roundings of the exact power. The more steps, the closer it is to 0 where it
// counts beside 1: some 4e-9 of it for a base of 0.999999.
EMBERMAP_HOST_DEVICE inline double power(double base, std::uint64_t n) {
  double result = 1;
  for (; n != 0; n >>= 1) {
    if ((n & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

// x ^ y of a finite x >= 1 and a finite y, to some 1e-14 of the value: 2 ^ k e ^ r of y log(x), both by series.
EMBERMAP_HOST_DEVICE inline double power(double x, double y) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // its product with a small whole number is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  std::uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  auto exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1023;
  bits = (bits & 0xFFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL;
  double m;
  memcpy(&m, &bits, sizeof m);  // in [1, 2)
  if (m > 0x1.6a09e667f3bcdp+0) {
    m *= 0.5;
    ++exponent;
  }
  const double f = (m - 1) / (m + 1);  // log(m) = 2 (f + f^3 / 3 + f^5 / 5 + ...), |f| < 0.172
  const double square = f * f;
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = series * square + 1.0 / k;
  const double log = exponent * kLn2High + (exponent * kLn2Low + 2 * f * series);
  const double z = y * log;
  if (z > 709) return HUGE_VAL;
  if (z < -708) return 0;
  const double turns = z / kLn2;
  const int k = static_cast<int>(turns + (turns < 0 ? -0.5 : 0.5));
  const double r = z - k * kLn2High - k * kLn2Low;
  double e = 1;
  for (int i = 15; i >= 1; --i) e = 1 + e * r / i;
  const std::uint64_t scale_bits = static_cast<std::uint64_t>(k + 1023) << 52;
  double scale;
  memcpy(&scale, &scale_bits, sizeof scale);
  return e * scale;
}

// NAdam's mu of step t, decay_power being 0.96 ^ momentum_decay.
EMBERMAP_HOST_DEVICE inline double nadam_mu(const StepScalars& s, std::uint64_t t) {
  return s.beta1 * (1 - 0.5 * power(s.decay_power, t));
}

// What the formulas below need, made in double and used in A.
template <class A>
struct StepConstants {
  A rate{};                     // the size of the step
  A rate2{};                    // NAdam: of the average's part
  A weight_decay{}, shrink{1};  // added to the gradient; multiplied with the weight
  A eps{};
  A momentum{}, gain{1};             // m = momentum * m + gain * g
  A mix1{}, keep1{};                 // of an average that is moved towards the gradient, and 1 - mix1
  A decay2{}, mix2{};                // of a mean of squares
  A root{1};                         // what corrects the second moment; RowWiseAdagrad: what the row's gradients are divided by
  A mu{1};                           // ASGD
  A minus{}, plus{}, low{}, high{};  // Rprop
  bool nesterov = false;
  bool near1 = false;     // mix1 is less than a half
  bool adaptive = false;  // RAdam

  // Of step `t`, counted from 1. `mu_product` is NAdam's of the steps before.
  EMBERMAP_HOST_DEVICE StepConstants(const StepScalars& s, std::uint64_t t, double mu_product)
      : rate{static_cast<A>(s.lr)},
        weight_decay{static_cast<A>(s.decoupled ? 0 : s.weight_decay)},
        shrink{static_cast<A>(s.decoupled ? 1 - s.lr * s.weight_decay : 1)},
        eps{static_cast<A>(s.eps)},
        momentum{static_cast<A>(s.momentum)},
        mix1{static_cast<A>(1 - s.beta1)},
        decay2{static_cast<A>(s.beta2)},
        mix2{static_cast<A>(1 - s.beta2)},
        nesterov{s.nesterov} {
    keep1 = A{1} - mix1;
    near1 = mix1 < A{0.5};
    const auto before = static_cast<double>(t - 1);
    switch (s.kind) {
      case StepKind::kSgdMomentum:
        if (t != 1) gain = static_cast<A>(1 - s.dampening);
        break;
      case StepKind::kAdagrad:
      case StepKind::kRowWiseAdagrad: rate = static_cast<A>(s.lr / (1 + before * s.lr_decay)); break;
      case StepKind::kAdam:
      case StepKind::kAdamAmsgrad: {
        const double first = 1 - power(s.beta1, t);
        const double second = std::sqrt(1 - power(s.beta2, t));
        rate = static_cast<A>(s.eps_inside ? s.lr * second / first : s.lr / first);
        root = static_cast<A>(s.eps_inside ? 1 : second);
        break;
      }
      case StepKind::kAdamax: rate = static_cast<A>(s.lr / (1 - power(s.beta1, t))); break;
      case StepKind::kNAdam: {
        const double mu_now = nadam_mu(s, t);
        const double mu_next = nadam_mu(s, t + 1);
        const double product = mu_product * mu_now;
        rate = static_cast<A>(s.lr * (1 - mu_now) / (1 - product));
        rate2 = static_cast<A>(s.lr * mu_next / (1 - product * mu_next));
        root = static_cast<A>(1 - power(s.beta2, t));
        break;
      }
      case StepKind::kRAdam: {
        const double left = power(s.beta2, t);
        const double most = 2 / (1 - s.beta2) - 1;
        const double length = most - 2 * static_cast<double>(t) * left / (1 - left);
        double size = s.lr / (1 - power(s.beta1, t));
        adaptive = length > 5;
        if (adaptive)
          size = size * std::sqrt(1 - left) * std::sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length));
        rate = static_cast<A>(size);
        break;
      }
      case StepKind::kAsgd: {
        // A step's size is made at the end of the one before, with the rate of then.
        const double lr = t == 1 ? s.lr : s.lr_before;
        const double eta = lr / power(1 + s.lambd * lr * before, s.alpha);
        rate = static_cast<A>(eta);
        shrink = static_cast<A>(1 - s.lambd * eta);
        const double beyond = before - s.t0;
        if (t != 1 && beyond > 1) mu = static_cast<A>(1 / beyond);
        break;
      }
      case StepKind::kRmsPropCentered:
      case StepKind::kRmsPropCenteredMomentum:
        mix1 = mix2;
        keep1 = A{1} - mix1;
        near1 = mix1 < A{0.5};
        break;
      case StepKind::kRprop:
        minus = static_cast<A>(s.eta_minus);
        plus = static_cast<A>(s.eta_plus);
        low = static_cast<A>(s.step_size_min);
        high = static_cast<A>(s.step_size_max);
        break;
      default: break;
    }
  }
  EMBERMAP_HOST_DEVICE explicit StepConstants(const StepScalars& s) : StepConstants(s, s.step, s.mu_product) {}
};

// Elements of state of a row's element.
EMBERMAP_HOST_DEVICE constexpr int element_states_of(StepKind kind) {
  switch (kind) {
    case StepKind::kSgd:
    case StepKind::kRowWiseAdagrad: return 0;
    case StepKind::kSgdMomentum:
    case StepKind::kAdagrad:
    case StepKind::kAsgd:
    case StepKind::kRmsProp: return 1;
    case StepKind::kAdamAmsgrad:
    case StepKind::kRmsPropCenteredMomentum: return 3;
    default: return 2;
  }
}

// As torch.lerp: exact at both ends.
template <class A>
EMBERMAP_HOST_DEVICE inline A moved(const StepConstants<A>& c, A average, A gradient) {
  const A way = gradient - average;
  return c.near1 ? average + c.mix1 * way : gradient - way * c.keep1;
}

// The greater one; NaN if one of them is.
template <class A>
EMBERMAP_HOST_DEVICE inline A greater(A a, A b) {
  return a > b || a != a ? a : b;
}

// weight and states are updated in place, in the order of state_fields; what the kind does not have is not used.
template <StepKind kKind, class A>
EMBERMAP_HOST_DEVICE inline void step_element(const StepConstants<A>& c, A g, A& weight, A& first, A& second, A& third) {
  if (c.weight_decay != A{0}) g = g + c.weight_decay * weight;
  if constexpr (kKind == StepKind::kSgd) {
    weight = weight - c.rate * g;
  } else if constexpr (kKind == StepKind::kSgdMomentum) {
    first = c.momentum * first + c.gain * g;
    weight = weight - c.rate * (c.nesterov ? g + c.momentum * first : first);
  } else if constexpr (kKind == StepKind::kAdagrad) {
    first = first + g * g;
    weight = weight - c.rate * g / (std::sqrt(first) + c.eps);
  } else if constexpr (kKind == StepKind::kRowWiseAdagrad) {
    weight = weight - c.rate * g / c.root;
  } else if constexpr (kKind == StepKind::kAdadelta) {
    first = c.decay2 * first + c.mix2 * g * g;
    const A delta = std::sqrt(second + c.eps) / std::sqrt(first + c.eps) * g;
    second = c.decay2 * second + c.mix2 * delta * delta;
    weight = weight - c.rate * delta;
  } else if constexpr (kKind == StepKind::kAdam || kKind == StepKind::kAdamAmsgrad) {
    first = moved(c, first, g);
    second = c.decay2 * second + c.mix2 * g * g;
    A most = second;
    if constexpr (kKind == StepKind::kAdamAmsgrad) most = third = greater(third, second);
    weight = weight * c.shrink - c.rate * first / (std::sqrt(most) / c.root + c.eps);
  } else if constexpr (kKind == StepKind::kAdamax) {
    first = moved(c, first, g);
    second = greater(c.decay2 * second, std::abs(g) + c.eps);
    weight = weight - c.rate * first / second;
  } else if constexpr (kKind == StepKind::kNAdam) {
    first = moved(c, first, g);
    second = c.decay2 * second + c.mix2 * g * g;
    const A divisor = std::sqrt(second / c.root) + c.eps;
    weight = weight * c.shrink - c.rate * g / divisor;
    weight = weight - c.rate2 * first / divisor;
  } else if constexpr (kKind == StepKind::kRAdam) {
    first = moved(c, first, g);
    second = c.decay2 * second + c.mix2 * g * g;
    const A divisor = c.adaptive ? std::sqrt(second) + c.eps : A{1};
    weight = weight * c.shrink - c.rate * first / divisor;
  } else if constexpr (kKind == StepKind::kAsgd) {
    weight = weight * c.shrink - c.rate * g;
    first = c.mu == A{1} ? weight : first + (weight - first) * c.mu;
  } else if constexpr (kKind == StepKind::kRprop) {
    const A turn = g * first;
    const A factor = turn > A{0} ? c.plus : turn < A{0} ? c.minus : A{1};
    A size = second * factor;
    size = size < c.low ? c.low : size;
    second = size > c.high ? c.high : size;
    first = turn < A{0} ? A{0} : g;
    weight = weight - (first > A{0} ? second : first < A{0} ? -second : A{0});
  } else {  // RMSprop: square_avg, [grad_avg], [momentum_buffer]
    constexpr bool kCentered = kKind == StepKind::kRmsPropCentered || kKind == StepKind::kRmsPropCenteredMomentum;
    first = c.decay2 * first + c.mix2 * g * g;
    A square = first;
    if constexpr (kCentered) {
      second = moved(c, second, g);
      square = first - second * second;
    }
    const A divisor = std::sqrt(square) + c.eps;
    if constexpr (kKind == StepKind::kRmsPropMomentum || kKind == StepKind::kRmsPropCenteredMomentum) {
      A& buffer = kCentered ? third : second;
      buffer = c.momentum * buffer + g / divisor;
      weight = weight - c.rate * buffer;
    } else {
      weight = weight - c.rate * g / divisor;
    }
  }
}

// What is done to a sum of gradients before anything else. clip_value 0: not clipped.
template <class A>
EMBERMAP_HOST_DEVICE inline A prepared(A gradient, A clip_value, bool maximize) {
  if (maximize) gradient = -gradient;
  if (clip_value != A{0}) {
    gradient = gradient > clip_value ? clip_value : gradient;
    gradient = gradient < -clip_value ? -clip_value : gradient;
  }
  return gradient;
}

// Sums of squares are made in double, in kSquareLanes sums over every kSquareLanes-th column, which are then added in pairs (l
// and l + 16, l and l + 8, ...): a warp's way, and a vector's.
inline constexpr int kSquareLanes = 32;

// A row's own step after `taken` ones; it stays at the greatest number.
EMBERMAP_HOST_DEVICE inline std::int32_t next_step(std::int32_t taken) {
  return taken < 0 ? 1 : taken == 0x7FFFFFFF ? taken : taken + 1;
}

// By what a row with this sum of squares is multiplied.
EMBERMAP_HOST_DEVICE inline double clip_factor(double squares, double clip_row) {
  const double norm = std::sqrt(squares);
  return norm > clip_row ? clip_row / norm : 1;
}

// Key and counter of the random words of columns [4 * block, 4 * block + 4).
EMBERMAP_HOST_DEVICE inline std::uint64_t rounding_key(const StepScalars& s) {
  return s.seed ^ 0x9216D5D98979FB1BULL ^ (s.step >> 32 << 32);
}
EMBERMAP_HOST_DEVICE inline void rounding_counter(const StepScalars& s, std::uint64_t row, std::uint64_t block,
                                                  std::uint32_t (&word)[4]) {
  word[0] = static_cast<std::uint32_t>(block);
  word[1] = static_cast<std::uint32_t>(s.step);
  word[2] = static_cast<std::uint32_t>(row);
  word[3] = static_cast<std::uint32_t>(row >> 32);
}

// One of the two values next to `value`, the nearer one the more probably; beyond the largest finite one the nearest.
template <class T>
EMBERMAP_HOST_DEVICE inline T round_by_chance(float value, std::uint32_t random);

template <>
EMBERMAP_HOST_DEVICE inline BFloat16 round_by_chance<BFloat16>(float value, std::uint32_t random) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFU) >= 0x7F7F0000U) return BFloat16(value);
  BFloat16 out;
  out.bits = static_cast<std::uint16_t>((bits + (random & 0xFFFFU)) >> 16);
  return out;
}
template <>
EMBERMAP_HOST_DEVICE inline Float16 round_by_chance<Float16>(float value, std::uint32_t random) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude >= 0x477FE000U) return Float16(value);  // 65504 and up
  std::uint32_t out;
  if (magnitude >= 0x38800000U) {  // from 2^-14: 13 bits of the mantissa go
    out = ((magnitude + (random & 0x1FFFU)) >> 13) - (112U << 10);
  } else {  // multiples of 2^-24
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint64_t mantissa = (magnitude & 0x7FFFFFU) | (exponent != 0 ? 0x800000U : 0U);
    const std::uint32_t gone = 126U - (exponent != 0 ? exponent : 1U);  // bits of it, 14 and more
    if (gone <= 32)
      out = static_cast<std::uint32_t>((mantissa + (random & ((std::uint64_t{1} << gone) - 1))) >> gone);
    else  // less than 2^-33: its part of a unit against 32 random bits
      out = static_cast<std::uint32_t>(((gone < 56 ? mantissa >> (gone - 32) : 0) + random) >> 32);
  }
  Float16 rounded;
  rounded.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000U) | out);
  return rounded;
}

}  // namespace embermap::detail
