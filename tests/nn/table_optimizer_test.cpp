#include "nn/table_optimizer.hpp"

#include <torch/torch.h>

#include <sstream>

#include "nn/embedding.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::int64_t kRows = 40;
constexpr std::int64_t kDim = 7;

class TableOptimizerTest : public TableTest {
 protected:
  nn::Embedding over(const Table& table) { return nn::Embedding(table); }

  // torch's embedding with the same rows.
  static torch::nn::Embedding twin(const Table& table, bool sparse = true) {
    return torch::nn::Embedding::from_pretrained(weights(table),
                                                 torch::nn::EmbeddingFromPretrainedOptions().freeze(false).sparse(sparse));
  }

  // Trains both on the same batches, all of two look-ups, most with duplicates.
  void train_both(const Table& table, nn::TableOptimizer& ours, torch::optim::Optimizer& theirs, nn::Embedding embedding,
                  torch::nn::Embedding reference, bool every_row = false) {
    const auto dtype = torch_dtype(table.dtype());
    for (int step = 0; step < 12; ++step) {
      const std::int64_t n = 1 + 9 * step;
      torch::Tensor some = torch::randint(0, kRows, {n}, torch::kInt64);
      if (every_row) some = torch::cat({some, torch::arange(kRows)});
      const torch::Tensor target = torch::randn({some.numel(), kDim}, dtype);
      const auto loss = [&](const torch::Tensor& rows, const torch::Tensor& again) {
        return (rows - target).pow(2).sum() + (again * 0.25).sin().sum();
      };
      ours.zero_grad();
      theirs.zero_grad();
      loss(embedding->forward(some), embedding->forward(some.flip(0))).backward();
      loss(reference->forward(some), reference->forward(some.flip(0))).backward();
      ours.step();
      theirs.step();
    }
  }
};

class TrainsAsTorch : public TableOptimizerTest, public testing::WithParamInterface<DType> {
 protected:
  void expect_equal(const Table& table, const torch::Tensor& reference) {
    const double rtol = GetParam() == DType::kFloat64 ? 1e-12 : 2e-5;
    EXPECT_TRUE(close(weights(table), reference.detach(), rtol, rtol));
  }
};

TEST_P(TrainsAsTorch, SgdOfSparseGradients) {
  const Table table = make(kRows, kDim, Sgd{.lr = 0.05}, GetParam());
  auto embedding = over(table);
  auto reference = twin(table);
  nn::TableOptimizer ours({embedding});
  torch::optim::SGD theirs(reference->parameters(), torch::optim::SGDOptions(0.05));
  train_both(table, ours, theirs, embedding, reference);
  expect_equal(table, reference->weight);
}

TEST_P(TrainsAsTorch, AdagradOfSparseGradients) {
  const Table table =
      make(kRows, kDim, Adagrad{.lr = 0.1, .lr_decay = 0.01, .initial_accumulator_value = 0.5, .eps = 1e-8}, GetParam());
  auto embedding = over(table);
  auto reference = twin(table);
  nn::TableOptimizer ours({embedding});
  torch::optim::Adagrad theirs(reference->parameters(),
                               torch::optim::AdagradOptions(0.1).lr_decay(0.01).initial_accumulator_value(0.5).eps(1e-8));
  train_both(table, ours, theirs, embedding, reference);
  expect_equal(table, reference->weight);
  const auto& state = static_cast<const torch::optim::AdagradParamState&>(*theirs.state().begin()->second);
  EXPECT_TRUE(close(weights(table, "sum"), state.sum(), 2e-5, 1e-6));
  EXPECT_EQ(table.step(), static_cast<std::uint64_t>(state.step()));
}

TEST_P(TrainsAsTorch, SgdWithMomentumWhenEveryRowHasAGradient) {
  for (const bool nesterov : {false, true}) {
    const Table table =
        make(kRows, kDim, Sgd{.lr = 0.01, .momentum = 0.9, .weight_decay = 0.02, .nesterov = nesterov}, GetParam());
    auto embedding = over(table);
    auto reference = twin(table, /*sparse=*/false);
    nn::TableOptimizer ours({embedding});
    torch::optim::SGD theirs(reference->parameters(),
                             torch::optim::SGDOptions(0.01).momentum(0.9).weight_decay(0.02).nesterov(nesterov));
    train_both(table, ours, theirs, embedding, reference, /*every_row=*/true);
    expect_equal(table, reference->weight);
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, TrainsAsTorch, testing::Values(DType::kFloat32, DType::kFloat64), named_by_dtype);

class TrainsHalfPrecision : public TableOptimizerTest, public testing::WithParamInterface<DType> {};

TEST_P(TrainsHalfPrecision, SumsGradientsAndStateInFloatAndRoundsTheRowOnce) {
  const Table table = make(kRows, kDim, Adagrad{.lr = 0.1}, GetParam());
  const auto type = torch_dtype(GetParam());
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  torch::Tensor rows = weights(table);
  torch::Tensor sum = torch::zeros({kRows, kDim});
  for (int step = 0; step < 4; ++step) {
    const torch::Tensor some = torch::randint(0, kRows, {64}, torch::kInt64);
    const torch::Tensor upstream = torch::randn({64, kDim}).to(type);
    optimizer.zero_grad();
    const torch::Tensor out = embedding->forward(some);
    EXPECT_EQ(out.scalar_type(), type);
    out.backward(upstream);
    optimizer.step();
    const torch::Tensor gradient = torch::zeros({kRows, kDim}).index_add_(0, some, upstream.to(torch::kFloat32));
    sum += gradient * gradient;
    const torch::Tensor stepped = rows.to(torch::kFloat32) - 0.1 * gradient / (sum.sqrt() + 1e-10);
    rows = torch::where(gradient != 0, stepped.to(type), rows);
  }
  EXPECT_TRUE(close(weights(table, "sum", torch::kFloat32), sum, 1e-5, 1e-6));
  // A sum in another order may move a row over a rounding border: one unit in the last place.
  EXPECT_TRUE(close(weights(table), rows, GetParam() == DType::kFloat16 ? 1.0 / 1024 : 1.0 / 128, 1e-6));
  EXPECT_GT((weights(table) == rows).to(torch::kFloat32).mean().item<float>(), 0.98F);
}

INSTANTIATE_TEST_SUITE_P(DTypes, TrainsHalfPrecision, testing::Values(DType::kFloat16, DType::kBFloat16), named_by_dtype);

TEST_F(TableOptimizerTest, RowsWithoutGradientKeepTheirBits) {
  const Table table = make(kRows, kDim, Adagrad{.lr = 0.1});
  const torch::Tensor before = weights(table);
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({3, 3, 5})).sum().backward();
  optimizer.step();
  const torch::Tensor after = weights(table);
  for (std::int64_t row = 0; row < kRows; ++row)
    EXPECT_EQ(torch::equal(after[row], before[row]), row != 3 && row != 5) << "row " << row;
}

TEST_F(TableOptimizerTest, WithoutGradientsNothingHappens) {
  const Table table = make(kRows, kDim);
  nn::TableOptimizer optimizer({over(table)});
  EXPECT_FALSE(optimizer.step().defined());
  optimizer.zero_grad();
  optimizer.step();
  EXPECT_EQ(table.step(), 0U);
}

TEST_F(TableOptimizerTest, GradientsOfSeveralBackwardsAreOneStep) {
  const Table table = make(kRows, kDim, Adagrad{.lr = 0.1});
  auto reference = twin(table);
  auto embedding = over(table);
  nn::TableOptimizer ours({embedding});
  torch::optim::Adagrad theirs(reference->parameters(), torch::optim::AdagradOptions(0.1));
  for (int i = 0; i < 3; ++i) {
    const torch::Tensor some = torch::randint(0, kRows, {20}, torch::kInt64);
    embedding->forward(some).pow(2).sum().backward();
    reference->forward(some).pow(2).sum().backward();
  }
  ours.step();
  theirs.step();
  EXPECT_EQ(table.step(), 1U);
  EXPECT_TRUE(close(weights(table), reference->weight.detach(), 1e-5, 1e-6));
}

TEST_F(TableOptimizerTest, ASecondStepAppliesTheSameGradientsAgain) {
  const Table table = make(kRows, kDim, Sgd{.lr = 0.25});
  const torch::Tensor before = weights(table);
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({4})).sum().backward();
  optimizer.step();
  optimizer.step();
  EXPECT_TRUE(close(weights(table)[4], before[4] - 0.5, 0, 1e-6));
  optimizer.zero_grad();
  optimizer.step();
  EXPECT_TRUE(close(weights(table)[4], before[4] - 0.5, 0, 1e-6));
}

TEST_F(TableOptimizerTest, ModulesOverOneTableShareOneUpdate) {
  Table table = make(kRows, kDim, Adagrad{.lr = 0.1});
  auto reference = twin(table);
  auto first = over(table);
  auto second = over(store().table(table.name()));
  nn::TableOptimizer ours({first, second});
  EXPECT_EQ(ours.param_groups().size(), 1U);
  torch::optim::Adagrad theirs(reference->parameters(), torch::optim::AdagradOptions(0.1));
  const torch::Tensor a = ids({1, 2, 3});
  const torch::Tensor b = ids({3, 4});
  (first->forward(a).pow(2).sum() + second->forward(b).pow(3).sum()).backward();
  (reference->forward(a).pow(2).sum() + reference->forward(b).pow(3).sum()).backward();
  ours.step();
  theirs.step();
  EXPECT_EQ(table.step(), 1U);
  EXPECT_TRUE(close(weights(table), reference->weight.detach(), 1e-5, 1e-6));
}

TEST_F(TableOptimizerTest, TrainsAModelOfTwoTablesAndADenseLayerAsTorchDoes) {
  const Table left = make(kRows, kDim, Adagrad{.lr = 0.1});
  const Table right = make(kRows, kDim, Sgd{.lr = 0.5});
  auto left_twin = twin(left);
  auto right_twin = twin(right);
  auto left_rows = over(left);
  auto right_rows = over(right);
  torch::nn::Linear dense(kDim, kDim);
  torch::nn::Linear dense_twin(kDim, kDim);
  {
    const torch::NoGradGuard no_grad;
    dense_twin->weight.copy_(dense->weight);
    dense_twin->bias.copy_(dense->bias);
  }
  nn::TableOptimizer tables({left_rows, right_rows});
  torch::optim::Adam dense_optimizer(dense->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adagrad left_optimizer(left_twin->parameters(), torch::optim::AdagradOptions(0.1));
  torch::optim::SGD right_optimizer(right_twin->parameters(), torch::optim::SGDOptions(0.5));
  torch::optim::Adam dense_twin_optimizer(dense_twin->parameters(), torch::optim::AdamOptions(0.01));
  const auto train = [](const torch::Tensor& l, const torch::Tensor& r, torch::nn::Linear& middle,
                        const std::vector<torch::optim::Optimizer*>& optimizers) {
    for (auto* optimizer : optimizers) optimizer->zero_grad();
    const torch::Tensor loss = -torch::log_sigmoid((middle(l) * r).sum(1)).mean();
    loss.backward();
    for (auto* optimizer : optimizers) optimizer->step();
    return loss.item<double>();
  };
  double first_loss = 0;
  double last_loss = 0;
  for (int step = 0; step < 60; ++step) {
    const torch::Tensor a = torch::randint(0, kRows, {32}, torch::kInt64);
    const torch::Tensor b = torch::randint(0, kRows, {32}, torch::kInt64);
    last_loss = train(left_rows->forward(a), right_rows->forward(b), dense, {&tables, &dense_optimizer});
    if (step == 0) first_loss = last_loss;
    const double twin_loss = train(left_twin->forward(a), right_twin->forward(b), dense_twin,
                                   {&left_optimizer, &right_optimizer, &dense_twin_optimizer});
    ASSERT_NEAR(last_loss, twin_loss, 1e-4) << "step " << step;
  }
  EXPECT_LT(last_loss, first_loss * 0.7);
  EXPECT_TRUE(close(weights(left), left_twin->weight.detach(), 1e-3, 1e-3));
  EXPECT_TRUE(close(weights(right), right_twin->weight.detach(), 1e-3, 1e-3));
}

TEST_F(TableOptimizerTest, CallsTheClosureWithGradientsAndReturnsItsLoss) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  const torch::Tensor before = weights(table);
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  const torch::NoGradGuard no_grad;
  const torch::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    torch::Tensor sum = embedding->forward(ids({2})).sum();
    sum.backward();
    return sum;
  });
  EXPECT_TRUE(close(loss.detach(), before[2].sum(), 1e-6, 1e-6));
  EXPECT_TRUE(close(weights(table)[2], before[2] - 1, 1e-6, 1e-6));
}

TEST_F(TableOptimizerTest, TakesTheLearningRateOfTheTableUntilItIsSet) {
  const Table table = make(kRows, kDim, Sgd{.lr = 0.5});
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  EXPECT_EQ(optimizer.lr(), 0.5);
  optimizer.set_lr(2);
  const torch::Tensor before = weights(table);
  embedding->forward(ids({0})).sum().backward();
  optimizer.step();
  EXPECT_TRUE(close(weights(table)[0], before[0] - 2, 1e-6, 1e-6));
  EXPECT_EQ(std::get<Sgd>(table.optimizer()).lr, 2);
  EXPECT_THAT(text_of<c10::ValueError>([&] { optimizer.set_lr(-1); }), AllOf(HasSubstr("lr"), HasSubstr("-1")));
  EXPECT_EQ(optimizer.lr(), 2);
  EXPECT_THAT(text_of<c10::ValueError>([&] { optimizer.lr(1); }), HasSubstr("group 1 of 1"));
}

TEST_F(TableOptimizerTest, ObeysALearningRateScheduler) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  auto reference = twin(table);
  auto embedding = over(table);
  nn::TableOptimizer ours({embedding});
  torch::optim::SGD theirs(reference->parameters(), torch::optim::SGDOptions(1));
  torch::optim::StepLR our_schedule(ours, /*step_size=*/1, /*gamma=*/0.5);
  torch::optim::StepLR their_schedule(theirs, /*step_size=*/1, /*gamma=*/0.5);
  for (int i = 0; i < 4; ++i) {
    ours.zero_grad();
    theirs.zero_grad();
    embedding->forward(ids({0})).sum().backward();
    reference->forward(ids({0})).sum().backward();
    ours.step();
    theirs.step();
    our_schedule.step();
    their_schedule.step();
  }
  EXPECT_TRUE(same(weights(table), reference->weight.detach()));
  EXPECT_LT(ours.lr(), 1);
  EXPECT_EQ(ours.lr(), theirs.param_groups()[0].options().get_lr());
}

TEST_F(TableOptimizerTest, AnEmptyBatchChangesNoRow) {
  const Table table = make(kRows, kDim, Adagrad{.lr = 1, .weight_decay = 1});
  const torch::Tensor before = weights(table);
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({})).sum().backward();
  optimizer.step();
  EXPECT_TRUE(same(weights(table), before));
}

TEST_F(TableOptimizerTest, SavesAndLoadsItsGroups) {
  const Table a = make(kRows, kDim, Sgd{.lr = 1});
  const Table b = make(kRows, kDim, Adagrad{.lr = 2});
  std::stringstream archive;
  {
    nn::TableOptimizer optimizer({over(a), over(b)});
    optimizer.param_groups()[1].options().set_lr(0.25);
    torch::save(optimizer, archive);
  }
  nn::TableOptimizer same_tables({over(a), over(b)});
  nn::TableOptimizer one_table({over(a)});
  nn::TableOptimizer other_order({over(b), over(a)});
  const std::string bytes = archive.str();
  torch::load(same_tables, archive);
  EXPECT_EQ(same_tables.lr(0), 1);
  EXPECT_EQ(same_tables.lr(1), 0.25);
  const auto refuse = [&](nn::TableOptimizer& optimizer) {
    std::stringstream again(bytes);
    return text_of<c10::ValueError>([&] { torch::load(optimizer, again); });
  };
  EXPECT_THAT(refuse(one_table), HasSubstr("2 groups for 1"));
  EXPECT_THAT(refuse(other_order), AllOf(HasSubstr("'table0'"), HasSubstr("'table1'")));
  EXPECT_EQ(other_order.lr(0), 2);
}

TEST_F(TableOptimizerTest, RefusesWhatCannotBeTrained) {
  using Modules = std::vector<nn::AnyTableModule>;
  const auto refuse = [](const Modules& modules) { const nn::TableOptimizer optimizer(modules); };
  EXPECT_THAT(text_of<c10::ValueError>([&] { refuse({}); }), HasSubstr("no modules"));
  auto embedding = over(make(kRows, kDim));
  EXPECT_THAT(text_of<c10::ValueError>([&] { refuse({embedding, nn::Embedding(nullptr)}); }), HasSubstr("module 1 is null"));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                refuse({embedding, embedding});
              }),
              AllOf(HasSubstr("parameter 1"), HasSubstr("'table0'"), HasSubstr("twice")));
  EXPECT_THAT(text_of<c10::ValueError>([&] { refuse({over(make(kRows, kDim, {}))}); }),
              AllOf(HasSubstr("'table1'"), HasSubstr("without an optimizer")));
  EXPECT_THAT(text_of<c10::TypeError>([&] { refuse({over(make(kRows, kDim, {}, DType::kInt32))}); }),
              AllOf(HasSubstr("'table2'"), HasSubstr("int32")));
  torch::nn::Linear dense(2, 2);
  EXPECT_THAT(text_of<c10::ValueError>([&] { const nn::TableOptimizer optimizer(dense->parameters()); }),
              HasSubstr("for an optimizer of torch"));
  reopen_for_reading();
  EXPECT_THAT(text_of<ReadOnlyError>([&] { refuse({over(store().table("table0"))}); }),
              AllOf(HasSubstr("'table0'"), HasSubstr("read-only")));
}

TEST_F(TableOptimizerTest, AFailedStepKeepsTheGradients) {
  Table table = make(kRows, kDim, Sgd{.lr = 1});
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({2, 39})).sum().backward();
  table.resize(39);
  const torch::Tensor before = weights(table);
  EXPECT_THROW(optimizer.step(), c10::IndexError);
  EXPECT_TRUE(same(weights(table), before));
  EXPECT_EQ(embedding->pending().size(), 1U);
  store().close();
  EXPECT_THROW(optimizer.step(), ClosedError);
}

TEST_F(TableOptimizerTest, WhatIsTrainedIsThereAfterReopening) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  auto embedding = over(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({2})).sum().backward();
  optimizer.set_lr(3);
  optimizer.step();
  const torch::Tensor after = weights(table);
  reopen_for_reading();
  const Table again = store().table("table0");
  EXPECT_TRUE(same(weights(again), after));
  EXPECT_EQ(again.step(), 1U);
  EXPECT_EQ(std::get<Sgd>(again.optimizer()).lr, 3);
}

}  // namespace
}  // namespace embermap
