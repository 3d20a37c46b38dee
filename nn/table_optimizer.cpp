#include "nn/table_optimizer.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "nn/current_stream.hpp"

namespace embermap {
namespace {

double lr_of(const Optimizer& optimizer) {
  return std::visit(
      [](const auto& kind) {
        if constexpr (requires { kind.lr; })
          return kind.lr;
        else
          return 0.0;
      },
      optimizer);
}

Optimizer with_lr(Optimizer optimizer, double lr) {
  std::visit(
      [lr](auto& kind) {
        if constexpr (requires { kind.lr; }) kind.lr = lr;
      },
      optimizer);
  return optimizer;
}

// All batches as one.
RowGradients concatenate(std::vector<RowGradients> batches) {
  if (batches.size() == 1) return std::move(batches.front());
  const torch::Device device = batches.front().ids.device();
  std::vector<torch::Tensor> ids;
  std::vector<torch::Tensor> gradients;
  for (const RowGradients& batch : batches) {
    ids.push_back(batch.ids.to(device));
    gradients.push_back(batch.gradients.to(device));
  }
  return {at::cat(ids), at::cat(gradients)};
}

void update(Table& table, const RowGradients& batch) {
  const torch::Tensor& ids = batch.ids;
  const auto count = static_cast<std::uint64_t>(ids.numel());
  const auto* gradients = static_cast<const std::byte*>(batch.gradients.const_data_ptr());
  if (ids.is_cuda()) {
    const int device = ids.device().index();
    table.update(device, ids.const_data_ptr<std::int64_t>(), count, gradients, table.dtype(), detail::current_stream(device));
  } else {
    table.update(std::span{ids.const_data_ptr<std::int64_t>(), count}, std::span{gradients, batch.gradients.nbytes()},
                 table.dtype());
  }
}

}  // namespace

void TableOptimizerOptions::serialize(torch::serialize::OutputArchive& archive) const { archive.write("lr", c10::IValue(lr_)); }

void TableOptimizerOptions::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  archive.read("lr", value);
  lr_ = value.toDouble();
}

TableOptimizer::TableOptimizer(const std::vector<std::shared_ptr<TableModule>>& modules) : TableOptimizer{group(modules)} {}

TableOptimizer::TableOptimizer(Grouped grouped)
    : torch::optim::Optimizer{param_groups_of(grouped), std::make_unique<TableOptimizerOptions>()},
      groups_{std::move(grouped.groups)} {}

TableOptimizer::Grouped TableOptimizer::group(const std::vector<std::shared_ptr<TableModule>>& modules) {
  if (modules.empty()) throw InvalidArgument("TableOptimizer: no modules to optimize");
  Grouped out;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto& module = modules[i];
    const std::string which = "TableOptimizer: module " + std::to_string(i);
    if (!module) throw InvalidArgument(which + " is null");
    if (std::find(modules.begin(), modules.begin() + static_cast<std::ptrdiff_t>(i), module) !=
        modules.begin() + static_cast<std::ptrdiff_t>(i))
      throw InvalidArgument(which + ", over table '" + printable(module->table().name()) + "', is given twice");
    const Table& table = module->table();
    const std::string named = which + ": table '" + printable(table.name()) + "' ";
    if (!is_floating(table.dtype()))
      throw DTypeError(named + "has " + std::string(dtype_name(table.dtype())) + " rows, which are not trained");
    if (std::holds_alternative<std::monostate>(table.optimizer()))
      throw InvalidArgument(named + "was created without an optimizer");
    if (!table.writable()) throw ReadOnlyError(named + "is open read-only");
    const auto same =
        std::find_if(out.groups.begin(), out.groups.end(), [&](const Group& g) { return g.table.impl() == table.impl(); });
    if (same == out.groups.end())
      out.groups.push_back({table, {module}});
    else
      same->modules.push_back(module);
  }
  return out;
}

std::vector<torch::optim::OptimizerParamGroup> TableOptimizer::param_groups_of(const Grouped& grouped) {
  std::vector<torch::optim::OptimizerParamGroup> out;
  for (const Group& g : grouped.groups) {
    std::vector<torch::Tensor> anchors;
    for (const auto& module : g.modules) anchors.push_back(module->anchor());
    out.emplace_back(std::move(anchors), std::make_unique<TableOptimizerOptions>(lr_of(g.table.optimizer())));
  }
  return out;
}

torch::Tensor TableOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    Group& g = groups_[i];
    std::vector<RowGradients> batches;
    for (const auto& module : g.modules) {
      auto pending = module->pending();
      std::move(pending.begin(), pending.end(), std::back_inserter(batches));
    }
    if (batches.empty()) continue;
    const embermap::Optimizer current = g.table.optimizer();
    if (lr(i) != lr_of(current)) g.table.set_optimizer(with_lr(current, lr(i)));
    update(g.table, concatenate(std::move(batches)));
  }
  return loss;
}

void TableOptimizer::zero_grad(bool set_to_none) {
  for (const Group& g : groups_)
    for (const auto& module : g.modules) module->zero_grad(set_to_none);
}

double TableOptimizer::lr(std::size_t group) const {
  if (group >= groups_.size())
    throw InvalidArgument("TableOptimizer: group " + std::to_string(group) + " of " + std::to_string(groups_.size()));
  return param_groups()[group].options().get_lr();
}

void TableOptimizer::set_lr(double lr) {
  for (const Group& g : groups_) check_optimizer(with_lr(g.table.optimizer(), lr));
  for (std::size_t i = 0; i < groups_.size(); ++i) param_groups()[i].options().set_lr(lr);
}

void TableOptimizer::save(torch::serialize::OutputArchive& archive) const {
  torch::Tensor rates = at::empty({static_cast<std::int64_t>(groups_.size())}, torch::kFloat64);
  for (std::size_t i = 0; i < groups_.size(); ++i) rates.data_ptr<double>()[i] = lr(i);
  archive.write("lr", rates, /*is_buffer=*/true);
}

void TableOptimizer::load(torch::serialize::InputArchive& archive) {
  torch::Tensor rates;
  archive.read("lr", rates, /*is_buffer=*/true);
  if (rates.numel() != static_cast<std::int64_t>(groups_.size()))
    throw InvalidArgument("TableOptimizer: an archive of " + std::to_string(rates.numel()) + " groups for " +
                          std::to_string(groups_.size()));
  rates = rates.cpu().to(torch::kFloat64).contiguous();
  for (std::size_t i = 0; i < groups_.size(); ++i) param_groups()[i].options().set_lr(rates.const_data_ptr<double>()[i]);
}

}  // namespace embermap
