// The optimizers of tables, in the shape of torch::optim; optimizers.hpp has one for each kind.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/optimizer.hpp"
#include "nn/table_module.hpp"

namespace embermap::nn {

// Of one parameter group: the hyperparameters of its tables. Learning rate schedulers read and write lr.
class TableOptimizerOptions : public torch::optim::OptimizerOptions {
 public:
  virtual embermap::Optimizer optimizer() const = 0;
  // Throws c10::ValueError for another kind of optimizer.
  virtual void set_optimizer(const embermap::Optimizer& optimizer) = 0;
  double get_lr() const override;
  void set_lr(double lr) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;
};

//   embermap::nn::TableOptimizer optimizer({embedding, bag});
//   optimizer.zero_grad();  loss.backward();  optimizer.step();
// Which optimizer a table has, and its state, belong to the table; this class says when, and with which hyperparameters. It works
// in place of any torch::optim::Optimizer: for schedulers, in lists of optimizers, with closures. What the options of a group say
// at a step is what its tables' optimizers become, and what a commit keeps; they are those of nn::AdamOptions and the like,
// by the kind of the tables.
//
// Gradients of tables stay those of pending(): clip_grad_norm_ sees the anchors alone; options have clip_row and clip_value.
// Keeps gradients and tables alive, not the modules. Not for use by several threads at once.
class TableOptimizer : public torch::optim::Optimizer {
 public:
  // A group for each table, in order of first mention, with the table's hyperparameters; modules over one table are in one group.
  // Throws c10::ValueError for no modules, a null one, one given twice, or a table without an optimizer; c10::TypeError
  // (integers); ReadOnlyError.
  explicit TableOptimizer(const std::vector<AnyTableModule>& modules);
  // The same for anchors: embedding->parameters(), or table_parameters(model). c10::ValueError for any other parameter.
  explicit TableOptimizer(const std::vector<torch::Tensor>& anchors);
  // Groups of anchors as they are, each with options for all of its tables, or without: then they must have the same. A table may
  // be in one group only.
  explicit TableOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups);

  // One Table::update for each table that has pending gradients, with all of them, in order of module and arrival: a row's
  // gradients are summed before its step. Gradients stay pending until zero_grad(): a second step() applies them again, as in
  // torch. A table without gradients is left alone; its step does not count. Gradients on several devices are brought to that of
  // the first. `closure` is called before, with gradients enabled; returns what it returns, otherwise an undefined tensor. Groups
  // that were added since are checked first, as the constructor does. Throws what Table::set_optimizer and Table::update throw
  // (errors of arguments as c10's); tables before the one that failed are then updated, their gradients still pending.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Drops the pending gradients of all modules. Both values of `set_to_none` do the same.
  void zero_grad(bool set_to_none = true);

  double lr(std::size_t group = 0) const;
  // For all groups. Throws c10::ValueError for an lr an optimizer refuses; nothing is changed then.
  void set_lr(double lr);

  // The groups: tables by name, their steps, hyperparameters. State lies in the tables.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Throws c10::ValueError, with nothing changed, if the archive has other groups or kinds. Warns where a table is at another
  // step: archive and table are then of different moments (nn/checkpoint.hpp keeps them together).
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  // For one kind of optimizer, that of `kind`; nullopt: any. `defaults`: of groups without options; nullptr: the tables' own.
  TableOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                 std::optional<embermap::Optimizer> kind);
  // Groups of anchors: one for each table, or a single one.
  enum class Grouping { kByTable, kTogether };
  static std::vector<torch::optim::OptimizerParamGroup> group(const std::vector<torch::Tensor>& anchors, Grouping grouping);
  static std::vector<torch::Tensor> anchors_of(const std::vector<AnyTableModule>& modules);

 private:
  struct TrainedTable {
    Table table;
    std::vector<std::shared_ptr<PendingGradients>> sources;
  };
  struct Group {
    std::vector<TrainedTable> tables;
    std::size_t params = 0;  // of the group when it was looked at
  };
  void join_new_groups();
  Group join(std::size_t index);
  TableOptimizerOptions& options_of(std::size_t group) const;

  std::optional<embermap::Optimizer> kind_;
  std::vector<Group> groups_;
};

}  // namespace embermap::nn
