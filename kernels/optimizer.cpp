#include "kernels/optimizer.hpp"

#include <fmt/format.h>

#include <cmath>

#include "base/error.hpp"

namespace embermap {
namespace {

void require_at_least_zero(std::string_view optimizer, std::string_view name, double value) {
  if (!std::isfinite(value) || value < 0)
    throw InvalidArgument(fmt::format("{}: {} = {} must be a finite number >= 0", optimizer, name, value));
}

}  // namespace

void check_optimizer(const Optimizer& optimizer) {
  if (const auto* sgd = std::get_if<Sgd>(&optimizer)) {
    require_at_least_zero("sgd", "lr", sgd->lr);
    require_at_least_zero("sgd", "momentum", sgd->momentum);
    require_at_least_zero("sgd", "weight_decay", sgd->weight_decay);
    if (sgd->nesterov && !(sgd->momentum > 0))
      throw InvalidArgument(fmt::format("sgd: nesterov needs momentum > 0, which is {}", sgd->momentum));
  } else if (const auto* adagrad = std::get_if<Adagrad>(&optimizer)) {
    require_at_least_zero("adagrad", "lr", adagrad->lr);
    require_at_least_zero("adagrad", "lr_decay", adagrad->lr_decay);
    require_at_least_zero("adagrad", "weight_decay", adagrad->weight_decay);
    require_at_least_zero("adagrad", "initial_accumulator_value", adagrad->initial_accumulator_value);
    require_at_least_zero("adagrad", "eps", adagrad->eps);
  }
}

std::string_view optimizer_name(const Optimizer& optimizer) {
  if (std::holds_alternative<Sgd>(optimizer)) return "sgd";
  if (std::holds_alternative<Adagrad>(optimizer)) return "adagrad";
  return "none";
}

std::vector<StateField> state_fields(const Optimizer& optimizer) {
  if (const auto* sgd = std::get_if<Sgd>(&optimizer); sgd != nullptr && sgd->momentum != 0) return {{"momentum_buffer", 0.0}};
  if (const auto* adagrad = std::get_if<Adagrad>(&optimizer)) return {{"sum", adagrad->initial_accumulator_value}};
  return {};
}

StepScalars step_scalars(const Optimizer& optimizer, std::uint64_t step) {
  StepScalars scalars;
  if (const auto* sgd = std::get_if<Sgd>(&optimizer)) {
    scalars.kind = sgd->momentum != 0 ? StepScalars::Kind::kSgdMomentum : StepScalars::Kind::kSgd;
    scalars.nesterov = sgd->nesterov;
    scalars.lr = sgd->lr;
    scalars.momentum = sgd->momentum;
    scalars.weight_decay = sgd->weight_decay;
  } else if (const auto* adagrad = std::get_if<Adagrad>(&optimizer)) {
    if (step == 0) throw InvalidArgument("adagrad: steps count from 1, got 0");
    scalars.kind = StepScalars::Kind::kAdagrad;
    scalars.lr = adagrad->lr / (1.0 + static_cast<double>(step - 1) * adagrad->lr_decay);
    scalars.weight_decay = adagrad->weight_decay;
    scalars.eps = adagrad->eps;
  } else {
    throw InvalidArgument("a table without an optimizer takes no step");
  }
  return scalars;
}

}  // namespace embermap
