#include "nn/table_optimizer.hpp"

#include <ATen/ops/cat.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "nn/current_stream.hpp"
#include "nn/errors.hpp"
#include "nn/optimizers.hpp"
#include "nn/pending_gradients.hpp"

namespace embermap::nn {
namespace {

using detail::as_torch;
using detail::refuse;
using torch::optim::OptimizerParamGroup;

// Stands in a group until its tables have said what they have.
struct Unset : torch::optim::OptimizerCloneableOptions<Unset> {};

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

void update(Table& table, const RowGradients& batch, const WorkingSet& fetched) {
  const torch::Tensor& ids = batch.ids;
  const auto count = static_cast<std::uint64_t>(ids.numel());
  const auto* gradients = static_cast<const std::byte*>(batch.gradients.const_data_ptr());
  if (ids.is_cuda()) {
    const int device = ids.device().index();
    table.update(device, ids.const_data_ptr<std::int64_t>(), count, gradients, table.dtype(),
                 embermap::detail::current_stream(device), {}, fetched ? &fetched : nullptr);
  } else {
    table.update(std::span{ids.const_data_ptr<std::int64_t>(), count}, std::span{gradients, batch.gradients.nbytes()},
                 table.dtype());
  }
}

// What Table::set_optimizer would refuse, before anything is changed.
void check_fits(const Table& table, const embermap::Optimizer& optimizer) {
  const embermap::Optimizer own = table.optimizer();
  const std::string named = "table '" + printable(table.name()) + "'";
  if (own.index() != optimizer.index())
    refuse<c10::ValueError>(named, " was created with ", optimizer_name(own), ", not with ", optimizer_name(optimizer));
  as_torch([&] { check_optimizer(optimizer); });
  const auto has = state_fields(own);
  const auto wants = state_fields(optimizer);
  const auto same = [](const StateField& a, const StateField& b) {
    return a.name == b.name && a.shape == b.shape && a.initial == b.initial;
  };
  if (std::equal(has.begin(), has.end(), wants.begin(), wants.end(), same)) return;
  const auto names = [](const std::vector<StateField>& fields) {
    std::string text;
    for (const StateField& field : fields)
      text += c10::str(text.empty() ? "" : ", ", field.name, field.initial != 0 ? c10::str(" from ", field.initial) : "");
    return text.empty() ? std::string("nothing") : text;
  };
  refuse<c10::ValueError>(named, " keeps the state of its ", optimizer_name(own), " (", names(has),
                          ") in its records; these options need ", names(wants));
}

}  // namespace

TableOptimizer::TableOptimizer(const std::vector<AnyTableModule>& modules) : TableOptimizer{anchors_of(modules)} {}

TableOptimizer::TableOptimizer(const std::vector<torch::Tensor>& anchors)
    : TableOptimizer{group(anchors, Grouping::kByTable), nullptr, std::nullopt} {}

TableOptimizer::TableOptimizer(std::vector<OptimizerParamGroup> groups)
    : TableOptimizer{std::move(groups), nullptr, std::nullopt} {}

TableOptimizer::TableOptimizer(std::vector<OptimizerParamGroup> groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                               std::optional<embermap::Optimizer> kind)
    : torch::optim::Optimizer{groups, defaults ? std::move(defaults) : std::make_unique<Unset>()}, kind_{std::move(kind)} {
  if (groups.empty()) refuse<c10::ValueError>("optimizer of tables: no modules to optimize");
  join_new_groups();
}

std::vector<torch::Tensor> TableOptimizer::anchors_of(const std::vector<AnyTableModule>& modules) {
  std::vector<torch::Tensor> out;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const auto& module = modules[i].get();
    if (!module) refuse<c10::ValueError>("optimizer of tables: module ", i, " is null");
    out.push_back(module->anchor());
  }
  return out;
}

std::vector<OptimizerParamGroup> TableOptimizer::group(const std::vector<torch::Tensor>& anchors, Grouping grouping) {
  if (anchors.empty()) return {};
  if (grouping == Grouping::kTogether) return {OptimizerParamGroup(anchors)};
  std::vector<std::vector<torch::Tensor>> groups;
  std::vector<const TableImpl*> tables;
  for (const torch::Tensor& anchor : anchors) {
    const auto pending = pending_of(anchor);
    const TableImpl* table = pending ? pending->table().impl().get() : nullptr;  // the constructor says what is wrong with others
    const auto place = static_cast<std::size_t>(std::find(tables.begin(), tables.end(), table) - tables.begin());
    if (place == tables.size()) {
      tables.push_back(table);
      groups.emplace_back();
    }
    groups[place].push_back(anchor);
  }
  return {groups.begin(), groups.end()};
}

void TableOptimizer::join_new_groups() {
  for (std::size_t i = 0; i < param_groups().size(); ++i) {
    if (i < groups_.size() && groups_[i].params == param_groups()[i].params().size()) continue;
    Group group = join(i);
    if (i < groups_.size())
      groups_[i] = std::move(group);
    else
      groups_.push_back(std::move(group));
  }
}

TableOptimizer::Group TableOptimizer::join(std::size_t index) {
  OptimizerParamGroup& params = param_groups()[index];
  Group out;
  out.params = params.params().size();
  for (std::size_t i = 0; i < out.params; ++i) {
    const std::string which = c10::str("optimizer of tables: parameter ", i, " of group ", index);
    const auto pending = pending_of(params.params()[i]);
    if (!pending) refuse<c10::ValueError>(which, " is not the anchor of a module over a table; it is for an optimizer of torch");
    Table& table = pending->table();
    const std::string named = which + ": table '" + printable(table.name()) + "' ";
    if (!is_floating(table.dtype()))
      refuse<c10::TypeError>(named, "has ", dtype_name(table.dtype()), " rows, which are not trained");
    if (std::holds_alternative<std::monostate>(table.optimizer()))
      refuse<c10::ValueError>(named, "was created without an optimizer");
    if (!table.writable()) throw ReadOnlyError(named + "is open read-only");
    if (kind_ && kind_->index() != table.optimizer().index())
      refuse<c10::ValueError>(named, "was created with ", optimizer_name(table.optimizer()), ", not with ",
                              optimizer_name(*kind_));
    for (std::size_t g = 0; g < groups_.size(); ++g)
      for (const TrainedTable& other : groups_[g].tables)
        if (g != index && other.table.impl() == table.impl()) refuse<c10::ValueError>(named, "is in group ", g, " already");
    const auto same =
        std::find_if(out.tables.begin(), out.tables.end(), [&](const TrainedTable& t) { return t.table.impl() == table.impl(); });
    if (same == out.tables.end()) {
      out.tables.push_back({table, {pending}});
    } else {
      if (std::find(same->sources.begin(), same->sources.end(), pending) != same->sources.end())
        refuse<c10::ValueError>(named, "has a module that is given twice");
      same->sources.push_back(pending);
    }
  }
  if (!params.has_options() || dynamic_cast<const Unset*>(&params.options()) != nullptr) {
    if (out.tables.empty()) refuse<c10::ValueError>("optimizer of tables: group ", index, " has no modules to optimize");
    const embermap::Optimizer first = out.tables.front().table.optimizer();
    for (const TrainedTable& t : out.tables)
      if (!same_hyperparameters(t.table.optimizer(), first))
        refuse<c10::ValueError>("optimizer of tables: group ", index, " has no options, and its tables '",
                                printable(out.tables.front().table.name()), "' and '", printable(t.table.name()),
                                "' have different ones");
    params.set_options(make_options(first));
  }
  const auto* options = dynamic_cast<const TableOptimizerOptions*>(&params.options());
  if (options == nullptr) refuse<c10::ValueError>("optimizer of tables: the options of group ", index, " are not for tables");
  for (const TrainedTable& t : out.tables) check_fits(t.table, options->optimizer());
  return out;
}

TableOptimizerOptions& TableOptimizer::options_of(std::size_t group) const {
  auto& options = const_cast<torch::optim::OptimizerOptions&>(param_groups()[group].options());
  auto* of_table = dynamic_cast<TableOptimizerOptions*>(&options);
  if (of_table == nullptr) refuse<c10::ValueError>("optimizer of tables: the options of group ", group, " are not for tables");
  return *of_table;
}

torch::Tensor TableOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const torch::NoGradGuard no_grad;
  join_new_groups();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    for (TrainedTable& trained : groups_[i].tables) {
      std::vector<RowGradients> batches;
      for (const auto& source : trained.sources) {
        auto pending = source->batches();
        std::move(pending.begin(), pending.end(), std::back_inserter(batches));
      }
      if (batches.empty()) continue;
      WorkingSet fetched;
      for (const auto& source : trained.sources) {
        source->set_worth_keeping(batches.size() == 1);
        WorkingSet kept = source->take_fetched();
        if (batches.size() == 1 && kept) fetched = std::move(kept);
      }
      const embermap::Optimizer wanted = options_of(i).optimizer();
      as_torch([&] {
        if (!same_hyperparameters(wanted, trained.table.optimizer())) trained.table.set_optimizer(wanted);
        update(trained.table, concatenate(std::move(batches)), fetched);
      });
    }
  }
  return loss;
}

void TableOptimizer::zero_grad(bool set_to_none) {
  torch::optim::Optimizer::zero_grad(set_to_none);
  for (const Group& group : groups_)
    for (const TrainedTable& trained : group.tables)
      for (const auto& source : trained.sources) source->drop();
}

double TableOptimizer::lr(std::size_t group) const {
  if (group >= param_groups().size())
    refuse<c10::ValueError>("optimizer of tables: group ", group, " of ", param_groups().size());
  return param_groups()[group].options().get_lr();
}

void TableOptimizer::set_lr(double lr) {
  join_new_groups();
  for (std::size_t i = 0; i < groups_.size(); ++i) as_torch([&] { (void)with_learning_rate(options_of(i).optimizer(), lr); });
  for (std::size_t i = 0; i < groups_.size(); ++i) options_of(i).set_lr(lr);
}

void TableOptimizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write("groups", c10::IValue(static_cast<std::int64_t>(groups_.size())));
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    torch::serialize::OutputArchive group(archive.compilation_unit());
    c10::List<std::string> names;
    c10::List<std::int64_t> steps;
    for (const TrainedTable& trained : groups_[i].tables) {
      names.push_back(trained.table.name());
      steps.push_back(static_cast<std::int64_t>(trained.table.step()));
    }
    group.write("tables", c10::IValue(names));
    group.write("steps", c10::IValue(steps));
    options_of(i).serialize(group);
    archive.write(std::to_string(i), group);
  }
}

void TableOptimizer::load(torch::serialize::InputArchive& archive) {
  join_new_groups();
  c10::IValue count;
  if (!archive.try_read("groups", count))
    refuse<c10::ValueError>("optimizer of tables: the archive is of another kind of optimizer");
  if (count.toInt() != static_cast<std::int64_t>(groups_.size()))
    refuse<c10::ValueError>("optimizer of tables: an archive of ", count.toInt(), " groups for ", groups_.size());
  std::vector<embermap::Optimizer> found;
  std::string warning;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    torch::serialize::InputArchive group;
    archive.read(std::to_string(i), group);
    c10::IValue names;
    c10::IValue steps;
    group.read("tables", names);
    group.read("steps", steps);
    const auto& tables = groups_[i].tables;
    if (names.toListRef().size() != tables.size() || steps.toListRef().size() != tables.size())
      refuse<c10::ValueError>("optimizer of tables: group ", i, " of the archive has ", names.toListRef().size(), " tables, not ",
                              tables.size());
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const std::string name = names.toListRef()[t].toStringRef();
      const std::int64_t step = steps.toListRef()[t].toInt();
      if (name != tables[t].table.name())
        refuse<c10::ValueError>("optimizer of tables: the archive is of table '", printable(name), "', not '",
                                printable(tables[t].table.name()), "'");
      if (const auto now = static_cast<std::int64_t>(tables[t].table.step()); step != now)
        warning += c10::str(warning.empty() ? "" : "; ", "the archive is of step ", step, " of table '", printable(name),
                            "', which is at step ", now);
    }
    const auto options = options_of(i).clone();
    options->serialize(group);
    found.push_back(dynamic_cast<const TableOptimizerOptions&>(*options).optimizer());
    for (const TrainedTable& trained : tables) check_fits(trained.table, found.back());
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) options_of(i).set_optimizer(found[i]);
  if (!warning.empty()) TORCH_WARN(warning);
}

}  // namespace embermap::nn
