// The optimizers of kernels/optimizer.hpp under torch's names, and their options in torch's manner.
#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "nn/table_optimizer.hpp"

namespace embermap::nn {

// Whether both are of one kind and say the same.
bool same_hyperparameters(const Optimizer& a, const Optimizer& b);

// Options of one kind. They are also what a table of that kind is created with:
//   store.create("items", {.rows = n, .dim = 64, .optimizer = nn::AdamOptions(1e-3).amsgrad(true)});
template <class Derived, class Hyperparameters>
class OptionsOver : public TableOptimizerOptions {
 public:
  using Kind = Hyperparameters;
  OptionsOver() = default;
  explicit OptionsOver(const Hyperparameters& values) : values_{values} {}
  operator Optimizer() const { return values_; }
  Optimizer optimizer() const override { return values_; }
  void set_optimizer(const Optimizer& optimizer) override {
    const auto* values = std::get_if<Hyperparameters>(&optimizer);
    TORCH_CHECK_VALUE(values != nullptr, "options of ", optimizer_name(values_), " cannot be those of ",
                      optimizer_name(optimizer));
    values_ = *values;
  }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }
  friend bool operator==(const Derived& a, const Derived& b) { return same_hyperparameters(a.values_, b.values_); }

 protected:
  Hyperparameters values_;
};

// The options class of an optimizer's kind, with its values. Throws c10::ValueError for a monostate.
std::unique_ptr<TableOptimizerOptions> make_options(const Optimizer& optimizer);

// TORCH_ARG over a field of values_. Pairs are tuples, as in torch.
#define EMBERMAP_OPTION(T, name, field)                    \
  auto name(T value)->decltype(*this) {                    \
    values_.field = value;                                 \
    return *this;                                          \
  }                                                        \
  const T& name() const noexcept { return values_.field; } \
  T& name() noexcept { return values_.field; }
#define EMBERMAP_PAIR_OPTION(name)                               \
  auto name(std::tuple<double, double> value)->decltype(*this) { \
    values_.name = {std::get<0>(value), std::get<1>(value)};     \
    return *this;                                                \
  }                                                              \
  std::tuple<double, double> name() const noexcept { return {values_.name[0], values_.name[1]}; }
// What all have: see RowOptions.
#define EMBERMAP_ROW_OPTIONS                                         \
  EMBERMAP_OPTION(double, lr, lr)                                    \
  EMBERMAP_OPTION(bool, maximize, maximize)                          \
  EMBERMAP_OPTION(std::optional<double>, clip_value, row.clip_value) \
  EMBERMAP_OPTION(std::optional<double>, clip_row, row.clip_row)     \
  EMBERMAP_OPTION(bool, stochastic_rounding, row.stochastic_rounding)
#define EMBERMAP_ADAM_OPTIONS       \
  EMBERMAP_ROW_OPTIONS              \
  EMBERMAP_PAIR_OPTION(betas)       \
  EMBERMAP_OPTION(double, eps, eps) \
  EMBERMAP_OPTION(StepOf, step, step)

// The structs' meaning, defaults and limits are those of kernels/optimizer.hpp. How steps are counted, and what state begins with
// (initial_accumulator_value, Rprop's lr), is the table's and cannot change.

struct SGDOptions : OptionsOver<SGDOptions, Sgd> {
  SGDOptions(double lr = Sgd{}.lr) { values_.lr = lr; }
  explicit SGDOptions(const Sgd& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, momentum, momentum)
  EMBERMAP_OPTION(double, dampening, dampening)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(bool, nesterov, nesterov)
  EMBERMAP_OPTION(StepOf, step, step)
};

struct AdagradOptions : OptionsOver<AdagradOptions, embermap::Adagrad> {
  AdagradOptions(double lr = embermap::Adagrad{}.lr) { values_.lr = lr; }
  explicit AdagradOptions(const embermap::Adagrad& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, lr_decay, lr_decay)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(double, initial_accumulator_value, initial_accumulator_value)
  EMBERMAP_OPTION(double, eps, eps)
  EMBERMAP_OPTION(StepOf, step, step)
};

struct RowWiseAdagradOptions : OptionsOver<RowWiseAdagradOptions, embermap::RowWiseAdagrad> {
  RowWiseAdagradOptions(double lr = embermap::RowWiseAdagrad{}.lr) { values_.lr = lr; }
  explicit RowWiseAdagradOptions(const embermap::RowWiseAdagrad& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, lr_decay, lr_decay)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(double, initial_accumulator_value, initial_accumulator_value)
  EMBERMAP_OPTION(double, eps, eps)
  EMBERMAP_OPTION(StepOf, step, step)
};

struct AdadeltaOptions : OptionsOver<AdadeltaOptions, embermap::Adadelta> {
  AdadeltaOptions(double lr = embermap::Adadelta{}.lr) { values_.lr = lr; }
  explicit AdadeltaOptions(const embermap::Adadelta& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, rho, rho)
  EMBERMAP_OPTION(double, eps, eps)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
};

struct AdamOptions : OptionsOver<AdamOptions, embermap::Adam> {
  AdamOptions(double lr = embermap::Adam{}.lr) { values_.lr = lr; }
  explicit AdamOptions(const embermap::Adam& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(bool, amsgrad, amsgrad)
  EMBERMAP_OPTION(bool, decoupled_weight_decay, decoupled_weight_decay)
};

struct AdamWOptions : OptionsOver<AdamWOptions, embermap::AdamW> {
  AdamWOptions(double lr = embermap::AdamW{}.lr) { values_.lr = lr; }
  explicit AdamWOptions(const embermap::AdamW& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(bool, amsgrad, amsgrad)
};

struct SparseAdamOptions : OptionsOver<SparseAdamOptions, embermap::SparseAdam> {
  SparseAdamOptions(double lr = embermap::SparseAdam{}.lr) { values_.lr = lr; }
  explicit SparseAdamOptions(const embermap::SparseAdam& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
};

struct AdamaxOptions : OptionsOver<AdamaxOptions, embermap::Adamax> {
  AdamaxOptions(double lr = embermap::Adamax{}.lr) { values_.lr = lr; }
  explicit AdamaxOptions(const embermap::Adamax& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
};

struct NAdamOptions : OptionsOver<NAdamOptions, embermap::NAdam> {
  NAdamOptions(double lr = embermap::NAdam{}.lr) { values_.lr = lr; }
  explicit NAdamOptions(const embermap::NAdam& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(double, momentum_decay, momentum_decay)
  EMBERMAP_OPTION(bool, decoupled_weight_decay, decoupled_weight_decay)
};

struct RAdamOptions : OptionsOver<RAdamOptions, embermap::RAdam> {
  RAdamOptions(double lr = embermap::RAdam{}.lr) { values_.lr = lr; }
  explicit RAdamOptions(const embermap::RAdam& values) : OptionsOver{values} {}
  EMBERMAP_ADAM_OPTIONS
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(bool, decoupled_weight_decay, decoupled_weight_decay)
};

struct ASGDOptions : OptionsOver<ASGDOptions, Asgd> {
  ASGDOptions(double lr = Asgd{}.lr) { values_.lr = lr; }
  explicit ASGDOptions(const Asgd& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, lambd, lambd)
  EMBERMAP_OPTION(double, alpha, alpha)
  EMBERMAP_OPTION(double, t0, t0)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(StepOf, step, step)
};

struct RMSpropOptions : OptionsOver<RMSpropOptions, RmsProp> {
  RMSpropOptions(double lr = RmsProp{}.lr) { values_.lr = lr; }
  explicit RMSpropOptions(const RmsProp& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_OPTION(double, alpha, alpha)
  EMBERMAP_OPTION(double, eps, eps)
  EMBERMAP_OPTION(double, weight_decay, weight_decay)
  EMBERMAP_OPTION(double, momentum, momentum)
  EMBERMAP_OPTION(bool, centered, centered)
};

struct RpropOptions : OptionsOver<RpropOptions, embermap::Rprop> {
  RpropOptions(double lr = embermap::Rprop{}.lr) { values_.lr = lr; }
  explicit RpropOptions(const embermap::Rprop& values) : OptionsOver{values} {}
  EMBERMAP_ROW_OPTIONS
  EMBERMAP_PAIR_OPTION(etas)
  EMBERMAP_PAIR_OPTION(step_sizes)
};

#undef EMBERMAP_ADAM_OPTIONS
#undef EMBERMAP_ROW_OPTIONS
#undef EMBERMAP_PAIR_OPTION
#undef EMBERMAP_OPTION

// A TableOptimizer for tables of one kind:
//   nn::Adam optimizer({embedding, bag}, nn::AdamOptions(1e-3).betas({0.9, 0.99}));
// With options all tables are one group, as parameters are in torch, and have them from the first step on; without, each table is
// a group and keeps its own. Groups of torch's OptimizerParamGroup may have options of their own. Throws as TableOptimizer, and
// c10::ValueError for a table of another kind, options that need other state than the table was created with (momentum, amsgrad,
// StepOf), or hyperparameters that cannot be, in torch's words.
template <class Options>
class OptimizerOf : public TableOptimizer {
 public:
  explicit OptimizerOf(const std::vector<AnyTableModule>& modules) : OptimizerOf{anchors_of(modules)} {}
  OptimizerOf(const std::vector<AnyTableModule>& modules, const Options& options) : OptimizerOf{anchors_of(modules), options} {}
  explicit OptimizerOf(const std::vector<torch::Tensor>& anchors)
      : TableOptimizer{group(anchors, Grouping::kByTable), nullptr, typename Options::Kind{}} {}
  OptimizerOf(const std::vector<torch::Tensor>& anchors, const Options& options)
      : TableOptimizer{group(anchors, Grouping::kTogether), options.clone(), typename Options::Kind{}} {}
  explicit OptimizerOf(std::vector<torch::optim::OptimizerParamGroup> groups)
      : TableOptimizer{std::move(groups), nullptr, typename Options::Kind{}} {}
  OptimizerOf(std::vector<torch::optim::OptimizerParamGroup> groups, const Options& defaults)
      : TableOptimizer{std::move(groups), defaults.clone(), typename Options::Kind{}} {}
};

using SGD = OptimizerOf<SGDOptions>;
using Adagrad = OptimizerOf<AdagradOptions>;
using RowWiseAdagrad = OptimizerOf<RowWiseAdagradOptions>;
using Adadelta = OptimizerOf<AdadeltaOptions>;
using Adam = OptimizerOf<AdamOptions>;
using AdamW = OptimizerOf<AdamWOptions>;
using SparseAdam = OptimizerOf<SparseAdamOptions>;
using Adamax = OptimizerOf<AdamaxOptions>;
using NAdam = OptimizerOf<NAdamOptions>;
using RAdam = OptimizerOf<RAdamOptions>;
using ASGD = OptimizerOf<ASGDOptions>;
using RMSprop = OptimizerOf<RMSpropOptions>;
using Rprop = OptimizerOf<RpropOptions>;

}  // namespace embermap::nn
