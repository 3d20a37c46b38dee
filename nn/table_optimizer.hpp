// The optimizer of embeddings, in the shape of torch::optim.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "nn/table_module.hpp"

namespace embermap {

// Of one parameter group; a group is a table. Learning rate schedulers read and write it.
class TableOptimizerOptions : public torch::optim::OptimizerCloneableOptions<TableOptimizerOptions> {
 public:
  explicit TableOptimizerOptions(double lr = 0) : lr_{lr} {}
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override;
  void serialize(torch::serialize::InputArchive& archive) override;

 private:
  double lr_;
};

//   embermap::TableOptimizer optimizer({embedding, bag});
//   optimizer.zero_grad();  loss.backward();  optimizer.step();
// Which optimizer it is, its state and its other hyperparameters belong to the tables; this class says when, and with which lr.
// It works in place of any torch::optim::Optimizer: for schedulers, in lists of optimizers, with closures.
//
// Keeps the modules alive. Not for use by several threads at once.
class TableOptimizer : public torch::optim::Optimizer {
 public:
  // Modules over the same table form one group, in order of first mention; its lr begins as the table's.
  // Throws InvalidArgument for no modules, a null one, one given twice, or a table without an optimizer; ReadOnlyError;
  // DTypeError (integers).
  explicit TableOptimizer(const std::vector<std::shared_ptr<TableModule>>& modules);

  // One Table::update for each table that has pending gradients, with all of them, in order of module and arrival: a row's
  // gradients are summed before its step. Gradients stay pending until zero_grad(): a second step() applies them again, as in
  // torch. A group's lr that differs from the table's is written to the table first (and kept by the store's next commit).
  // Gradients on several devices are brought to that of the first. `closure` is called before, with gradients enabled; returns
  // what it returns, otherwise an undefined tensor. Throws what Table::update throws; tables before the one that failed are then
  // updated, their gradients still pending.
  torch::Tensor step(LossClosure closure = nullptr) override;

  // Drops the pending gradients of all modules. Both values of `set_to_none` do the same.
  void zero_grad(bool set_to_none = true);

  double lr(std::size_t group = 0) const;
  // For all tables. Throws InvalidArgument for an lr a table's optimizer refuses; nothing is changed then.
  void set_lr(double lr);

  // The learning rates. State lies in the tables.
  void save(torch::serialize::OutputArchive& archive) const override;
  // Throws InvalidArgument if the archive has another number of groups.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Group {
    Table table;
    std::vector<std::shared_ptr<TableModule>> modules;
  };
  struct Grouped {
    std::vector<Group> groups;
  };
  explicit TableOptimizer(Grouped grouped);
  static Grouped group(const std::vector<std::shared_ptr<TableModule>>& modules);
  static std::vector<torch::optim::OptimizerParamGroup> param_groups_of(const Grouped& grouped);

  std::vector<Group> groups_;
};

}  // namespace embermap
