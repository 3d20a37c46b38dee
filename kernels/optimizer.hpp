// The optimizers a table can be trained with, their per-row state, and what one step needs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/dtype.hpp"

namespace embermap {

// Whose steps are counted where a formula depends on them: bias corrections, decays of the learning rate, what is different in a
// first step. The table's, as torch does: a row that comes into a batch late is treated as if its gradients had been 0 until
// then. Or each row's own, kept in its record as an int32 (torch's name: "step"): a row then trains as a torch parameter of its
// own.
enum class StepOf : std::uint8_t { kGlobal, kRow };

// What every optimizer has beyond torch's options. All of it concerns the sum of a row's gradients in a batch, before weight
// decay.
struct RowOptions {
  std::optional<double> clip_value = {};  // each element is kept within [-clip_value, clip_value]; then
  std::optional<double> clip_row = {};    // a row whose L2 norm is greater than this is scaled to have it
  // float16 and bfloat16 rows: a weight that lies between two of its dtype's values becomes one of both, with a probability by
  // distance (Philox of the table's seed, the step, the row and the column: the same on every device, with any number of
  // threads). Steps too small for the dtype then count on average. Values beyond the largest finite one round as usual.
  bool stochastic_rounding = false;
};

// The structs have torch's names, defaults and meaning (torch 2.11): `maximize` follows the gradient uphill, eps stands where
// torch has it. Rows that are not in the batch keep weight and state as they are.

// With dampening the first step's gradient goes into the momentum as it is.
struct Sgd {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;  // needs momentum > 0 and no dampening
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

// lr is divided by 1 + (step - 1) * lr_decay, steps counting from 1.
struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

// Adagrad with one number of state a row, as FBGEMM and torchrec have it: the sum of the means of the squared gradients.
struct RowWiseAdagrad {
  double lr = 1e-2;
  double lr_decay = 0;
  double weight_decay = 0;
  double initial_accumulator_value = 0;
  double eps = 1e-10;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

struct Adadelta {
  double lr = 1;
  double rho = 0.9;
  double eps = 1e-6;
  double weight_decay = 0;
  bool maximize = false;
  RowOptions row = {};
};

using Betas = std::array<double, 2>;

struct Adam {
  double lr = 1e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

// Adam whose weight decay is decoupled.
struct AdamW {
  double lr = 1e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

// Adam whose eps is added before the second moment's bias is corrected.
struct SparseAdam {
  double lr = 1e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

struct Adamax {
  double lr = 2e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

struct NAdam {
  double lr = 2e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum_decay = 4e-3;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

struct RAdam {
  double lr = 1e-3;
  Betas betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled_weight_decay = false;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

// State "ax" is the average of the weights. Steps up to t0 + 1 set it to the weight; later ones draw it closer.
struct Asgd {
  double lr = 1e-2;
  double lambd = 1e-4;
  double alpha = 0.75;
  double t0 = 1e6;
  double weight_decay = 0;
  bool maximize = false;
  StepOf step = StepOf::kGlobal;
  RowOptions row = {};
};

struct RmsProp {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0;
  double momentum = 0;
  bool centered = false;
  bool maximize = false;
  RowOptions row = {};
};

// lr is where each row's step sizes begin, nothing else.
struct Rprop {
  double lr = 1e-2;
  std::array<double, 2> etas = {0.5, 1.2};
  std::array<double, 2> step_sizes = {1e-6, 50};
  bool maximize = false;
  RowOptions row = {};
};

// monostate: the table is not trained.
using Optimizer = std::variant<std::monostate, Sgd, Adagrad, RowWiseAdagrad, Adadelta, Adam, AdamW, SparseAdam, Adamax, NAdam,
                               RAdam, Asgd, RmsProp, Rprop>;

// "none", "sgd", "adagrad", "rowwise_adagrad", "adadelta", "adam", "adamw", "sparse_adam", "adamax", "nadam", "radam", "asgd",
// "rmsprop", "rprop".
std::string_view optimizer_name(const Optimizer& optimizer);
// The optimizer of that name with its defaults; nothing for a name that is none of these.
std::optional<Optimizer> optimizer_named(std::string_view name);
// All names but "none", separated by ", ".
const std::string& optimizer_names();

// Calls f(name, value, said) for each option of one of the structs above, `value` a reference to it: double, bool, StepOf,
// std::optional<double>, or std::array<double, 2>. `said`: a description names the option even if it has its default.
template <class O, class F>
void visit_options(O& o, const F& f) {
  if constexpr (requires { o.lr; }) f("lr", o.lr, true);
  if constexpr (requires { o.lr_decay; }) f("lr_decay", o.lr_decay, true);
  if constexpr (requires { o.betas; }) f("betas", o.betas, true);
  if constexpr (requires { o.rho; }) f("rho", o.rho, true);
  if constexpr (requires { o.lambd; }) f("lambd", o.lambd, true);
  if constexpr (requires { o.alpha; }) f("alpha", o.alpha, true);
  if constexpr (requires { o.t0; }) f("t0", o.t0, true);
  if constexpr (requires { o.etas; }) f("etas", o.etas, true);
  if constexpr (requires { o.step_sizes; }) f("step_sizes", o.step_sizes, true);
  if constexpr (requires { o.momentum; }) f("momentum", o.momentum, true);
  if constexpr (requires { o.dampening; }) f("dampening", o.dampening, false);
  if constexpr (requires { o.weight_decay; }) f("weight_decay", o.weight_decay, true);
  if constexpr (requires { o.initial_accumulator_value; }) f("initial_accumulator_value", o.initial_accumulator_value, true);
  if constexpr (requires { o.eps; }) f("eps", o.eps, true);
  if constexpr (requires { o.momentum_decay; }) f("momentum_decay", o.momentum_decay, true);
  if constexpr (requires { o.nesterov; }) f("nesterov", o.nesterov, true);
  if constexpr (requires { o.amsgrad; }) f("amsgrad", o.amsgrad, true);
  if constexpr (requires { o.centered; }) f("centered", o.centered, true);
  if constexpr (requires { o.decoupled_weight_decay; }) f("decoupled_weight_decay", o.decoupled_weight_decay, false);
  if constexpr (requires { o.maximize; }) f("maximize", o.maximize, false);
  if constexpr (requires { o.step; }) f("step", o.step, false);
  if constexpr (requires { o.row; }) {
    f("clip_value", o.row.clip_value, false);
    f("clip_row", o.row.clip_row, false);
    f("stochastic_rounding", o.row.stochastic_rounding, false);
  }
}

// Whether an option has the value that it has where it need not be said: 0, false, kGlobal, nothing.
template <class T>
bool is_unset(const T& value) {
  return value == T{};
}

std::string_view step_of_name(StepOf step);  // "global", "row"
std::optional<StepOf> step_of_named(std::string_view name);

// Throws InvalidArgument naming the hyperparameter and its value (negative, not finite, a beta that is not in [0, 1), ...), with
// torch's words for it.
void check_optimizer(const Optimizer& optimizer);

// What a state field has for each row: `dim` elements, or one, of the dtype of states; or an int32 that counts.
enum class StateShape : std::uint8_t { kElements, kOne, kCount };

// One per-row state field under torch's name; all its elements begin with `initial`.
struct StateField {
  std::string_view name;
  double initial;
  StateShape shape = StateShape::kElements;
};

// In the order in which they lie in the record, those of dim elements first:
//   sgd with momentum  momentum_buffer                        rmsprop  square_avg, [grad_avg], [momentum_buffer]
//   adagrad            sum                                    adamax   exp_avg, exp_inf
//   rowwise_adagrad    sum (one)                              asgd     ax
//   adadelta           square_avg, acc_delta                  rprop    prev, step_size
//   adam, adamw        exp_avg, exp_avg_sq, [max_exp_avg_sq]  sparse_adam, nadam, radam   exp_avg, exp_avg_sq
// and with StepOf::kRow behind them: step (count), and for nadam mu_product (one).
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
  std::uint64_t state_offset[4] = {};  // in the order of state_fields; the weight lies at 0
};

// What one step is made with, on every device the same. The formulas are those of kernels/optimizer_step.hpp.
struct StepScalars {
  enum class Kind : std::uint8_t {
    kSgd,
    kSgdMomentum,
    kAdagrad,
    kRowWiseAdagrad,
    kAdadelta,
    kAdam,
    kAdamAmsgrad,
    kAdamax,
    kNAdam,
    kRAdam,
    kAsgd,
    kRmsProp,
    kRmsPropMomentum,
    kRmsPropCentered,
    kRmsPropCenteredMomentum,
    kRprop
  };
  Kind kind = Kind::kSgd;
  bool nesterov = false;
  bool maximize = false;
  bool decoupled = false;   // the weight decay
  bool eps_inside = false;  // SparseAdam: eps counts before the bias is corrected
  bool per_row = false;     // steps are the row's own; they are found in the record
  bool stochastic_rounding = false;
  double lr = 0;        // already decayed
  double lr_decay = 0;  // with steps of rows' own only
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  double eps = 0;
  double beta1 = 0;
  double beta2 = 0;  // also Adadelta's rho and RMSprop's alpha
  double momentum_decay = 0;
  double decay_power = 0;  // NAdam: 0.96 ^ momentum_decay
  double mu_product = 1;   // NAdam: the product of the mu of all steps before this one; not of rows' own steps
  double lr_before = 0;    // ASGD: the rate of the step before, of which this one's is made, as torch has it
  double lambd = 0;
  double alpha = 0;
  double t0 = 0;
  double eta_minus = 0;
  double eta_plus = 0;
  double step_size_min = 0;
  double step_size_max = 0;
  double clip_value = 0;   // 0: not clipped
  double clip_row = 0;     // likewise
  std::uint64_t step = 1;  // of the table, counted from 1
  std::uint64_t seed = 0;  // for stochastic rounding

  // Whether a row's step needs all of its gradient, or something of which the record has one.
  bool whole_rows() const noexcept { return per_row || clip_row != 0 || kind == Kind::kRowWiseAdagrad; }
};

// How many state fields with one element for each of the row's, and how many in all.
std::uint32_t element_states(StepScalars::Kind kind);
std::uint32_t all_states(const StepScalars& scalars);

// `step` counts from 1; `seed` is the table's; `carried` is what carried_on() gave for the step before, without which all steps
// before count as made with these hyperparameters. Throws InvalidArgument for step 0 and for a monostate.
StepScalars step_scalars(const Optimizer& optimizer, std::uint64_t step, std::uint64_t seed = 0,
                         std::optional<double> carried = std::nullopt);

// The number of a table that the step after this one depends on, as torch has it in the state of a parameter: NAdam's product of
// the mu of all steps, whose beta may have changed from step to step, and ASGD's learning rate, which counts a step later.
std::optional<double> carried_on(const StepScalars& scalars);

// The optimizer with another learning rate. Throws InvalidArgument for one that cannot be, and for Rprop, whose lr is where step
// sizes begin and has no part in a step.
Optimizer with_learning_rate(const Optimizer& optimizer, double lr);

}  // namespace embermap
