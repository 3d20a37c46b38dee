#include "kernels/optimizer.hpp"

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "kernels/optimizer_step.hpp"

namespace embermap {
namespace {

// A number as Python writes it, torch's messages having been read there.
std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_not_of("-0123456789") == std::string::npos) text += ".0";
  return text;
}

// Torch's words, then the rule.
[[noreturn]] void refuse(std::string_view torch_says, std::string_view optimizer, const std::string& rule) {
  throw InvalidArgument(fmt::format("{} ({}: {})", torch_says, optimizer, rule));
}

std::string torch_name(std::string_view option) {
  if (option == "lr") return "learning rate";
  if (option == "eps") return "epsilon value";
  return fmt::format("{} value", option);
}

class Check {
 public:
  explicit Check(std::string_view optimizer) : optimizer_{optimizer} {}

  void operator()(std::string_view name, double value, bool) const {
    const bool negative_is_fine = name == "t0" || name == "alpha";
    if (std::isfinite(value) && (value >= 0 || (negative_is_fine && optimizer_ == "asgd"))) return;
    refuse(fmt::format("Invalid {}: {}", torch_name(name), number_text(value)), optimizer_,
           fmt::format("{} = {} must be a finite number{}", name, value, std::isfinite(value) ? " >= 0" : ""));
  }
  void operator()(std::string_view name, const std::array<double, 2>& pair, bool) const {
    if (name == "betas") {
      for (std::size_t i = 0; i < 2; ++i)
        if (!(pair[i] >= 0 && pair[i] < 1))
          refuse(fmt::format("Invalid beta parameter at index {}: {}", i, number_text(pair[i])), optimizer_,
                 fmt::format("betas[{}] = {} must be in [0, 1)", i, pair[i]));
    } else if (name == "etas") {
      if (!(pair[0] > 0 && pair[0] < 1 && pair[1] > 1 && std::isfinite(pair[1])))
        refuse(fmt::format("Invalid eta values: {}, {}", number_text(pair[0]), number_text(pair[1])), optimizer_,
               fmt::format("etas = ({}, {}) must be 0 < etas[0] < 1 < etas[1]", pair[0], pair[1]));
    } else if (!(pair[0] >= 0 && pair[0] <= pair[1] && std::isfinite(pair[1]))) {
      refuse(fmt::format("Invalid {} values: {}, {}", name, number_text(pair[0]), number_text(pair[1])), optimizer_,
             fmt::format("{} = ({}, {}) must be a smallest and a largest one, finite and >= 0", name, pair[0], pair[1]));
    }
  }
  void operator()(std::string_view name, const std::optional<double>& value, bool) const {
    if (value && !(std::isfinite(*value) && *value > 0))
      refuse(fmt::format("Invalid {} value: {}", name, number_text(*value)), optimizer_,
             fmt::format("{} = {} must be a finite number > 0", name, *value));
  }
  void operator()(std::string_view, bool, bool) const {}
  void operator()(std::string_view, StepOf, bool) const {}

 private:
  std::string_view optimizer_;
};

// What only some have.
void check_together(const Sgd& sgd) {
  if (sgd.nesterov && (!(sgd.momentum > 0) || sgd.dampening != 0))
    refuse("Nesterov momentum requires a momentum and zero dampening", "sgd",
           fmt::format("nesterov needs momentum > 0, which is {}, and dampening 0, which is {}", sgd.momentum, sgd.dampening));
}
void check_together(const Adadelta& adadelta) {
  if (adadelta.rho > 1)
    refuse(fmt::format("Invalid rho value: {}", number_text(adadelta.rho)), "adadelta",
           fmt::format("rho = {} must be in [0, 1]", adadelta.rho));
}
void check_together(const SparseAdam& adam) {
  if (adam.lr == 0) refuse("Invalid learning rate: 0.0", "sparse_adam", "lr = 0 must be > 0");
  if (adam.eps == 0) refuse("Invalid epsilon value: 0.0", "sparse_adam", "eps = 0 must be > 0");
}
template <class O>
void check_together(const O&) {}

template <class O>
constexpr std::string_view kName = "none";
template <>
constexpr std::string_view kName<Sgd> = "sgd";
template <>
constexpr std::string_view kName<Adagrad> = "adagrad";
template <>
constexpr std::string_view kName<RowWiseAdagrad> = "rowwise_adagrad";
template <>
constexpr std::string_view kName<Adadelta> = "adadelta";
template <>
constexpr std::string_view kName<Adam> = "adam";
template <>
constexpr std::string_view kName<AdamW> = "adamw";
template <>
constexpr std::string_view kName<SparseAdam> = "sparse_adam";
template <>
constexpr std::string_view kName<Adamax> = "adamax";
template <>
constexpr std::string_view kName<NAdam> = "nadam";
template <>
constexpr std::string_view kName<RAdam> = "radam";
template <>
constexpr std::string_view kName<Asgd> = "asgd";
template <>
constexpr std::string_view kName<RmsProp> = "rmsprop";
template <>
constexpr std::string_view kName<Rprop> = "rprop";

// Calls f with each optimizer, made with its defaults.
template <class F>
void for_each_optimizer(const F& f) {
  [&]<class None, class... O>(std::variant<None, O...>*) { (f(O{}), ...); }(static_cast<Optimizer*>(nullptr));
}

using Kind = StepScalars::Kind;

Kind kind_of(std::monostate) { throw InvalidArgument("a table without an optimizer takes no step"); }
Kind kind_of(const Sgd& o) { return o.momentum != 0 ? Kind::kSgdMomentum : Kind::kSgd; }
Kind kind_of(const Adagrad&) { return Kind::kAdagrad; }
Kind kind_of(const RowWiseAdagrad&) { return Kind::kRowWiseAdagrad; }
Kind kind_of(const Adadelta&) { return Kind::kAdadelta; }
Kind kind_of(const Adam& o) { return o.amsgrad ? Kind::kAdamAmsgrad : Kind::kAdam; }
Kind kind_of(const AdamW& o) { return o.amsgrad ? Kind::kAdamAmsgrad : Kind::kAdam; }
Kind kind_of(const SparseAdam&) { return Kind::kAdam; }
Kind kind_of(const Adamax&) { return Kind::kAdamax; }
Kind kind_of(const NAdam&) { return Kind::kNAdam; }
Kind kind_of(const RAdam&) { return Kind::kRAdam; }
Kind kind_of(const Asgd&) { return Kind::kAsgd; }
Kind kind_of(const RmsProp& o) {
  if (o.centered) return o.momentum != 0 ? Kind::kRmsPropCenteredMomentum : Kind::kRmsPropCentered;
  return o.momentum != 0 ? Kind::kRmsPropMomentum : Kind::kRmsProp;
}
Kind kind_of(const Rprop&) { return Kind::kRprop; }

std::vector<StateField> fields_of(Kind kind, double initial) {
  switch (kind) {
    case Kind::kSgd: return {};
    case Kind::kSgdMomentum: return {{"momentum_buffer", 0}};
    case Kind::kAdagrad: return {{"sum", initial}};
    case Kind::kRowWiseAdagrad: return {{"sum", initial, StateShape::kOne}};
    case Kind::kAdadelta: return {{"square_avg", 0}, {"acc_delta", 0}};
    case Kind::kAdamAmsgrad: return {{"exp_avg", 0}, {"exp_avg_sq", 0}, {"max_exp_avg_sq", 0}};
    case Kind::kAdam:
    case Kind::kNAdam:
    case Kind::kRAdam: return {{"exp_avg", 0}, {"exp_avg_sq", 0}};
    case Kind::kAdamax: return {{"exp_avg", 0}, {"exp_inf", 0}};
    case Kind::kAsgd: return {{"ax", 0}};
    case Kind::kRmsProp: return {{"square_avg", 0}};
    case Kind::kRmsPropMomentum: return {{"square_avg", 0}, {"momentum_buffer", 0}};
    case Kind::kRmsPropCentered: return {{"square_avg", 0}, {"grad_avg", 0}};
    case Kind::kRmsPropCenteredMomentum: return {{"square_avg", 0}, {"grad_avg", 0}, {"momentum_buffer", 0}};
    case Kind::kRprop: return {{"prev", 0}, {"step_size", initial}};
  }
  return {};
}

// The product of the mu of the steps before `step`; once it is too small to count it is 0, and the rest need not be made.
double mu_product_before(const StepScalars& scalars, std::uint64_t step) {
  double product = 1;
  double decay = 1;
  for (std::uint64_t t = 1; t < step; ++t) {
    decay *= scalars.decay_power;
    product *= scalars.beta1 * (1 - 0.5 * decay);
    if (product < 1e-30) return 0;
  }
  return product;
}

template <class O>
StepScalars scalars_of(const O& o) {
  StepScalars s;
  s.kind = kind_of(o);
  if constexpr (requires { o.lr; }) s.lr = o.lr;
  if constexpr (requires { o.lr_decay; }) s.lr_decay = o.lr_decay;
  if constexpr (requires { o.momentum; }) s.momentum = o.momentum;
  if constexpr (requires { o.dampening; }) s.dampening = o.dampening;
  if constexpr (requires { o.weight_decay; }) s.weight_decay = o.weight_decay;
  if constexpr (requires { o.eps; }) s.eps = o.eps;
  if constexpr (requires { o.nesterov; }) s.nesterov = o.nesterov;
  if constexpr (requires { o.maximize; }) s.maximize = o.maximize;
  if constexpr (requires { o.decoupled_weight_decay; }) s.decoupled = o.decoupled_weight_decay;
  if constexpr (requires { o.step; }) s.per_row = o.step == StepOf::kRow;
  if constexpr (requires { o.rho; }) s.beta2 = o.rho;
  if constexpr (requires { o.betas; }) {
    s.beta1 = o.betas[0];
    s.beta2 = o.betas[1];
  }
  if constexpr (requires { o.momentum_decay; }) {
    s.momentum_decay = o.momentum_decay;
    s.decay_power = std::pow(0.96, o.momentum_decay);
  }
  if constexpr (std::is_same_v<O, AdamW>) s.decoupled = true;
  if constexpr (std::is_same_v<O, SparseAdam>) s.eps_inside = true;
  if constexpr (std::is_same_v<O, RmsProp>) s.beta2 = o.alpha;
  if constexpr (std::is_same_v<O, Asgd>) {
    s.lambd = o.lambd;
    s.alpha = o.alpha;
    s.t0 = o.t0;
  }
  if constexpr (std::is_same_v<O, Rprop>) {
    s.eta_minus = o.etas[0];
    s.eta_plus = o.etas[1];
    s.step_size_min = o.step_sizes[0];
    s.step_size_max = o.step_sizes[1];
  }
  if constexpr (requires { o.row; }) {
    s.clip_value = o.row.clip_value.value_or(0);
    s.clip_row = o.row.clip_row.value_or(0);
    s.stochastic_rounding = o.row.stochastic_rounding;
  }
  return s;
}

}  // namespace

std::string_view optimizer_name(const Optimizer& optimizer) {
  return std::visit([]<class O>(const O&) { return kName<O>; }, optimizer);
}

std::optional<Optimizer> optimizer_named(std::string_view name) {
  std::optional<Optimizer> found;
  if (name == kName<std::monostate>) return Optimizer{};
  for_each_optimizer([&]<class O>(const O& defaults) {
    if (kName<O> == name) found = defaults;
  });
  return found;
}

const std::string& optimizer_names() {
  static const std::string names = [] {
    std::string text;
    for_each_optimizer([&]<class O>(const O&) { text += fmt::format("{}{}", text.empty() ? "" : ", ", kName<O>); });
    return text;
  }();
  return names;
}

std::string_view step_of_name(StepOf step) { return step == StepOf::kRow ? "row" : "global"; }

std::optional<StepOf> step_of_named(std::string_view name) {
  for (const StepOf step : {StepOf::kGlobal, StepOf::kRow})
    if (step_of_name(step) == name) return step;
  return std::nullopt;
}

void check_optimizer(const Optimizer& optimizer) {
  const std::string_view name = optimizer_name(optimizer);
  std::visit(
      [&](const auto& o) {
        visit_options(o, Check(name));
        check_together(o);
      },
      optimizer);
}

std::vector<StateField> state_fields(const Optimizer& optimizer) {
  if (std::holds_alternative<std::monostate>(optimizer)) return {};
  return std::visit(
      [](const auto& o) {
        double initial = 0;
        if constexpr (requires { o.initial_accumulator_value; }) initial = o.initial_accumulator_value;
        if constexpr (requires { o.etas; }) initial = o.lr;
        std::vector<StateField> fields = fields_of(kind_of(o), initial);
        if constexpr (requires { o.step; })
          if (o.step == StepOf::kRow) {
            fields.push_back({"step", 0, StateShape::kCount});
            if constexpr (requires { o.momentum_decay; }) fields.push_back({"mu_product", 1, StateShape::kOne});
          }
        return fields;
      },
      optimizer);
}

std::uint32_t element_states(StepScalars::Kind kind) { return static_cast<std::uint32_t>(detail::element_states_of(kind)); }

std::uint32_t all_states(const StepScalars& scalars) {
  std::uint32_t states = element_states(scalars.kind);
  if (scalars.kind == Kind::kRowWiseAdagrad) ++states;
  if (scalars.per_row) states += scalars.kind == Kind::kNAdam ? 2 : 1;
  return states;
}

StepScalars step_scalars(const Optimizer& optimizer, std::uint64_t step, std::uint64_t seed, std::optional<double> carried) {
  StepScalars scalars = std::visit([](const auto& o) { return scalars_of(o); }, optimizer);
  if (step == 0) throw InvalidArgument(fmt::format("{}: steps count from 1, got 0", optimizer_name(optimizer)));
  scalars.step = step;
  scalars.seed = seed;
  if (!scalars.per_row) scalars.lr /= 1 + static_cast<double>(step - 1) * std::exchange(scalars.lr_decay, 0);
  if (scalars.kind == Kind::kNAdam && !scalars.per_row)
    scalars.mu_product = carried ? *carried : mu_product_before(scalars, step);
  if (scalars.kind == Kind::kAsgd) scalars.lr_before = carried ? *carried : scalars.lr;
  return scalars;
}

std::optional<double> carried_on(const StepScalars& scalars) {
  if (scalars.kind == Kind::kAsgd) return scalars.lr;
  if (scalars.kind == Kind::kNAdam && !scalars.per_row) return scalars.mu_product * detail::nadam_mu(scalars, scalars.step);
  return std::nullopt;
}

Optimizer with_learning_rate(const Optimizer& optimizer, double lr) {
  Optimizer changed = optimizer;
  std::visit(
      [lr]<class O>(O& o) {
        if constexpr (std::is_same_v<O, Rprop>)
          throw InvalidArgument(fmt::format("rprop: lr = {} has no part in a step: it is where step sizes begin", lr));
        else if constexpr (requires { o.lr; })
          o.lr = lr;
      },
      changed);
  check_optimizer(changed);
  return changed;
}

}  // namespace embermap
