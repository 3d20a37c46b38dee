// The optimizers a table can be trained with, their per-row state, and what one step needs.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>
#include <vector>

#include "base/dtype.hpp"

namespace embermap {

// torch.optim.SGD with dampening 0. Rows that are not in the batch keep weight and momentum as they are.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;  // needs momentum > 0
};

// torch.optim.Adagrad. lr is divided by 1 + (step - 1) * lr_decay, step counting the table's updates from 1.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
};

using Optimizer = std::variant<std::monostate, Sgd, Adagrad>;  // monostate: the table is not trained

// Throws InvalidArgument naming the hyperparameter and its value (negative, not finite, nesterov without momentum).
void check_optimizer(const Optimizer& optimizer);

std::string_view optimizer_name(const Optimizer& optimizer);  // "none", "sgd", "adagrad"

// One per-row state field under torch's name; it has `dim` elements and begins with `initial`.
struct StateField {
  std::string_view name;
  double initial;
};

// In the order in which they lie in the record: SGD with momentum "momentum_buffer", Adagrad "sum".
std::vector<StateField> state_fields(const Optimizer& optimizer);

// State of float16 and bfloat16 rows is float32 (a float16 sum of squares would stop growing at 2048); otherwise the row's dtype.
constexpr DType state_dtype(DType weight) {
  return weight == DType::kFloat16 || weight == DType::kBFloat16 ? DType::kFloat32 : weight;
}

// Where things lie in a record, in bytes from its start. Offsets are multiples of the field's item size; record starts are
// multiples of the largest item size.
struct RecordLayout {
  std::uint64_t dim = 0;
  std::uint64_t stride = 0;  // from one record to the next
  DType dtype = DType::kFloat32;
  std::uint32_t states = 0;
  std::uint64_t state_offset[4] = {};  // the weight lies at 0
};

// The scalars of one step, computed on the host in double so that every device uses the same: torch's formulas, per element,
//   sgd      g += weight_decay * w;  m = momentum * m + g;  w -= lr * (nesterov ? g + momentum * m : m)      (m only if momentum)
//   adagrad  g += weight_decay * w;  s += g * g;            w -= lr * g / (sqrt(s) + eps)       (lr already decayed)
struct StepScalars {
  enum class Kind : std::uint8_t { kSgd, kSgdMomentum, kAdagrad } kind = Kind::kSgd;
  bool nesterov = false;
  double lr = 0;
  double momentum = 0;
  double weight_decay = 0;
  double eps = 0;
};

// `step` counts from 1. Precondition: the optimizer is not monostate.
StepScalars step_scalars(const Optimizer& optimizer, std::uint64_t step);

}  // namespace embermap
