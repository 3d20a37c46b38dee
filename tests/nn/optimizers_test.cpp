#include "nn/optimizers.hpp"

#include <torch/torch.h>

#include <sstream>

#include "nn/embedding.hpp"
#include "nn/embedding_bag.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

constexpr std::int64_t kRows = 12;
constexpr std::int64_t kDim = 5;

class OptimizersTest : public TableTest {
 protected:
  static torch::nn::Embedding twin(const Table& table) {
    return torch::nn::Embedding::from_pretrained(weights(table), torch::nn::EmbeddingFromPretrainedOptions().freeze(false));
  }

  // 100 steps on the same batches, each with every row, most of them several times. Allowed: 1e-5 of a value, or 1e-6 of the
  // largest in its row.
  static void expect_same_training(nn::Embedding ours, torch::optim::Optimizer& our_optimizer, torch::nn::Embedding theirs,
                                   torch::optim::Optimizer& their_optimizer) {
    for (int step = 0; step < 100; ++step) {
      const torch::Tensor some = torch::cat({torch::randint(0, kRows, {20}, torch::kInt64), torch::arange(kRows)});
      const torch::Tensor target = torch::randn({some.numel(), kDim});
      our_optimizer.zero_grad();
      their_optimizer.zero_grad();
      (ours->forward(some) - target).pow(2).sum().backward();
      (theirs->forward(some) - target).pow(2).sum().backward();
      our_optimizer.step();
      their_optimizer.step();
    }
    const torch::Tensor a = weights(ours->table());
    const torch::Tensor b = theirs->weight.detach();
    const torch::Tensor allowed = torch::maximum(1e-5 * b.abs(), 1e-6 * std::get<0>(b.abs().max(1, /*keepdim=*/true)));
    EXPECT_TRUE(((a - b).abs() <= allowed).all().item<bool>()) << "largest difference " << (a - b).abs().max().item<double>();
  }

  template <class Ours, class Theirs, class OurOptions, class TheirOptions>
  void compare(const OurOptions& our_options, const TheirOptions& their_options) {
    const Table table = make(kRows, kDim, our_options);
    nn::Embedding embedding(table);
    auto reference = twin(table);
    Ours ours({embedding}, our_options);
    Theirs theirs(reference->parameters(), their_options);
    expect_same_training(embedding, ours, reference, theirs);
    EXPECT_EQ(table.step(), 100U);
  }
};

TEST_F(OptimizersTest, SgdIsTorchs) {
  using torch::optim::SGDOptions;
  compare<nn::SGD, torch::optim::SGD>(nn::SGDOptions(0.01), SGDOptions(0.01));
  compare<nn::SGD, torch::optim::SGD>(nn::SGDOptions(0.01).weight_decay(0.1), SGDOptions(0.01).weight_decay(0.1));
  compare<nn::SGD, torch::optim::SGD>(nn::SGDOptions(0.01).momentum(0.9).dampening(0.2).weight_decay(0.01),
                                      SGDOptions(0.01).momentum(0.9).dampening(0.2).weight_decay(0.01));
  compare<nn::SGD, torch::optim::SGD>(nn::SGDOptions(0.005).momentum(0.8).nesterov(true),
                                      SGDOptions(0.005).momentum(0.8).nesterov(true));
}

TEST_F(OptimizersTest, AdagradIsTorchs) {
  using torch::optim::AdagradOptions;
  compare<nn::Adagrad, torch::optim::Adagrad>(nn::AdagradOptions(0.1), AdagradOptions(0.1));
  compare<nn::Adagrad, torch::optim::Adagrad>(
      nn::AdagradOptions(0.1).lr_decay(0.01).weight_decay(0.05).initial_accumulator_value(0.5).eps(1e-6),
      AdagradOptions(0.1).lr_decay(0.01).weight_decay(0.05).initial_accumulator_value(0.5).eps(1e-6));
}

TEST_F(OptimizersTest, AdamIsTorchs) {
  using torch::optim::AdamOptions;
  compare<nn::Adam, torch::optim::Adam>(nn::AdamOptions(0.01), AdamOptions(0.01));
  for (const bool amsgrad : {false, true})
    compare<nn::Adam, torch::optim::Adam>(nn::AdamOptions(0.02).betas({0.8, 0.98}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad),
                                          AdamOptions(0.02).betas({0.8, 0.98}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad));
}

TEST_F(OptimizersTest, AdamWIsTorchs) {
  using torch::optim::AdamWOptions;
  for (const bool amsgrad : {false, true})
    compare<nn::AdamW, torch::optim::AdamW>(
        nn::AdamWOptions(0.02).betas({0.8, 0.98}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad),
        AdamWOptions(0.02).betas({0.8, 0.98}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad));
}

TEST_F(OptimizersTest, RmsPropIsTorchs) {
  using torch::optim::RMSpropOptions;
  for (const bool centered : {false, true})
    for (const double momentum : {0.0, 0.9})
      compare<nn::RMSprop, torch::optim::RMSprop>(
          nn::RMSpropOptions(0.002).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(momentum).centered(centered),
          RMSpropOptions(0.002).alpha(0.9).eps(1e-6).weight_decay(0.1).momentum(momentum).centered(centered));
}

// Kinds that libtorch does not have are compared with torch.optim in Python (tests/python); here with a step of the table itself,
// so that the class and its options reach it.
template <class Optimizer, class Options>
void expect_steps_of_table(OptimizersTest& test, Table (*make)(OptimizersTest&, const embermap::Optimizer&),
                           const Options& options) {
  const Table trained = make(test, options);
  Table stepped = make(test, options);
  nn::Embedding embedding(trained);
  Optimizer optimizer({embedding}, options);
  for (int step = 0; step < 5; ++step) {
    const torch::Tensor some = torch::randint(0, kRows, {15}, torch::kInt64);
    const torch::Tensor upstream = torch::randn({15, kDim});
    optimizer.zero_grad();
    embedding->forward(some).backward(upstream);
    optimizer.step();
    stepped.update({some.const_data_ptr<std::int64_t>(), 15},
                   {static_cast<const std::byte*>(upstream.const_data_ptr()), upstream.nbytes()}, DType::kFloat32);
  }
  struct Rows : OptimizersTest {
    void TestBody() override {}
    static torch::Tensor of(const Table& table) { return weights(table); }
  };
  EXPECT_TRUE(same(Rows::of(trained), Rows::of(stepped))) << optimizer_name(options);
  EXPECT_EQ(trained.step(), 5U);
}

class EveryKind : public OptimizersTest {
 public:
  static Table make_for(OptimizersTest& test, const Optimizer& optimizer) {
    return static_cast<EveryKind&>(test).make(kRows, kDim, optimizer);
  }
  template <class O, class Options>
  void expect_steps(const Options& options) {
    expect_steps_of_table<O>(*this, &make_for, options);
  }
};

TEST_F(EveryKind, StepsItsTable) {
  expect_steps<nn::SGD>(nn::SGDOptions(0.1).maximize(true).clip_row(0.5));
  expect_steps<nn::Adagrad>(nn::AdagradOptions(0.1).step(StepOf::kRow).lr_decay(0.1).clip_value(0.5));
  expect_steps<nn::RowWiseAdagrad>(nn::RowWiseAdagradOptions(0.1).initial_accumulator_value(0.1));
  expect_steps<nn::Adadelta>(nn::AdadeltaOptions(0.5).rho(0.8).weight_decay(0.1));
  expect_steps<nn::Adam>(nn::AdamOptions(0.1).decoupled_weight_decay(true).weight_decay(0.1).step(StepOf::kRow));
  expect_steps<nn::AdamW>(nn::AdamWOptions(0.1).maximize(true));
  expect_steps<nn::SparseAdam>(nn::SparseAdamOptions(0.1).betas({0.8, 0.9}));
  expect_steps<nn::Adamax>(nn::AdamaxOptions(0.1).eps(1e-4));
  expect_steps<nn::NAdam>(nn::NAdamOptions(0.1).momentum_decay(0.1));
  expect_steps<nn::RAdam>(nn::RAdamOptions(0.1).weight_decay(0.1));
  expect_steps<nn::ASGD>(nn::ASGDOptions(0.1).lambd(0.1).alpha(0.5).t0(2));
  expect_steps<nn::RMSprop>(nn::RMSpropOptions(0.1).centered(true));
  expect_steps<nn::Rprop>(nn::RpropOptions(0.1).etas({0.4, 1.3}).step_sizes({1e-5, 10}));
}

TEST_F(OptimizersTest, OptionsSayWhatTheStructsSay) {
  const auto options = nn::AdamOptions(0.5).betas({0.1, 0.2}).eps(3).weight_decay(4).amsgrad(true).maximize(true).clip_row(6.0);
  const auto values = std::get<Adam>(options.optimizer());
  EXPECT_EQ(values.lr, 0.5);
  EXPECT_EQ(values.betas, (Betas{0.1, 0.2}));
  EXPECT_EQ(values.eps, 3);
  EXPECT_EQ(values.weight_decay, 4);
  EXPECT_TRUE(values.amsgrad && values.maximize);
  EXPECT_EQ(values.row.clip_row, 6.0);
  EXPECT_EQ(options.betas(), std::make_tuple(0.1, 0.2));
  EXPECT_TRUE(options == nn::AdamOptions(values));
  EXPECT_FALSE(options == nn::AdamOptions(0.5));
  // Each kind's defaults are its struct's.
  for (const char* name : {"sgd", "adagrad", "rowwise_adagrad", "adadelta", "adam", "adamw", "sparse_adam", "adamax", "nadam",
                           "radam", "asgd", "rmsprop", "rprop"}) {
    const Optimizer defaults = *optimizer_named(name);
    const auto made = nn::make_options(defaults);
    EXPECT_TRUE(nn::same_hyperparameters(made->optimizer(), defaults)) << name;
    made->set_lr(7);
    EXPECT_EQ(made->get_lr(), 7) << name;
    EXPECT_FALSE(nn::same_hyperparameters(made->optimizer(), defaults)) << name;
    EXPECT_THROW(made->set_optimizer(name == std::string("sgd") ? Optimizer(Adam{}) : Optimizer(Sgd{})), c10::ValueError);
  }
}

TEST_F(OptimizersTest, OptionsGoThroughAnArchive) {
  const auto options = nn::AdamOptions(0.5).betas({0.1, 0.2}).amsgrad(true).step(StepOf::kRow).clip_value(2.0);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  options.serialize(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  nn::AdamOptions read;
  read.serialize(in);
  EXPECT_TRUE(read == options);
  nn::AdamWOptions other;
  EXPECT_THAT(text_of<c10::ValueError>([&] { other.serialize(in); }), AllOf(HasSubstr("adamw"), HasSubstr("adam")));
}

TEST_F(OptimizersTest, GroupsHaveOptionsOfTheirOwn) {
  const Table a = make(kRows, kDim, nn::SGDOptions(1));
  const Table b = make(kRows, kDim, nn::SGDOptions(1));
  const torch::Tensor a_before = weights(a);
  const torch::Tensor b_before = weights(b);
  nn::Embedding left(a);
  nn::Embedding right(b);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(left->parameters(), std::make_unique<nn::SGDOptions>(0.25));
  groups.emplace_back(right->parameters());
  nn::SGD optimizer(groups, nn::SGDOptions(0.5));
  (left->forward(ids({1})).sum() + right->forward(ids({1})).sum()).backward();
  optimizer.step();
  EXPECT_TRUE(close(weights(a)[1], a_before[1] - 0.25, 1e-6, 1e-6));
  EXPECT_TRUE(close(weights(b)[1], b_before[1] - 0.5, 1e-6, 1e-6));
  // Torch's manner of changing them.
  static_cast<nn::SGDOptions&>(optimizer.param_groups()[0].options()).lr(2).weight_decay(0.5);
  optimizer.step();
  EXPECT_EQ(std::get<Sgd>(a.optimizer()).weight_decay, 0.5);
  EXPECT_EQ(std::get<Sgd>(a.optimizer()).lr, 2);
}

TEST_F(OptimizersTest, TablesWithOptionsAreOneGroupAndWithoutOneEach) {
  nn::Embedding left(make(kRows, kDim, nn::AdamOptions(1)));
  nn::EmbeddingBag right(make(kRows, kDim, nn::AdamOptions(2)));
  nn::Adam together({left, right}, nn::AdamOptions(0.5));
  EXPECT_EQ(together.param_groups().size(), 1U);
  nn::Adam apart({left, right});
  ASSERT_EQ(apart.param_groups().size(), 2U);
  EXPECT_EQ(apart.lr(0), 1);
  EXPECT_EQ(apart.lr(1), 2);
}

TEST_F(OptimizersTest, AGroupCanBeAddedLater) {
  const Table a = make(kRows, kDim, nn::SGDOptions(1));
  const Table b = make(kRows, kDim, nn::AdagradOptions(1));
  nn::Embedding left(a);
  nn::Embedding right(b);
  nn::TableOptimizer optimizer({left});
  torch::optim::Optimizer& any = optimizer;
  any.add_param_group(OptimizerParamGroup(right->parameters()));
  right->forward(ids({1})).sum().backward();
  any.step();
  EXPECT_EQ(a.step(), 0U);
  EXPECT_EQ(b.step(), 1U);
  any.add_param_group(OptimizerParamGroup(left->parameters()));
  EXPECT_THAT(text_of<c10::ValueError>([&] { any.step(); }), AllOf(HasSubstr("'table0'"), HasSubstr("in group 0 already")));
}

TEST_F(OptimizersTest, ObeysASchedulerOfEveryGroup) {
  nn::Embedding left(make(kRows, kDim, nn::AdamOptions(1)));
  nn::Embedding right(make(kRows, kDim, nn::SGDOptions(2)));
  nn::TableOptimizer optimizer({left, right});
  torch::optim::StepLR schedule(optimizer, 1, 0.5);
  (left->forward(ids({1})).sum() + right->forward(ids({1})).sum()).backward();
  optimizer.step();
  schedule.step();  // of libtorch: the first one changes nothing
  schedule.step();
  EXPECT_EQ(optimizer.lr(0), 0.5);
  EXPECT_EQ(optimizer.lr(1), 1);
  torch::optim::ReduceLROnPlateauScheduler plateau(optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 0);
  plateau.step(1);
  plateau.step(1);
  EXPECT_NEAR(optimizer.lr(0), 0.05, 1e-6);
}

TEST_F(OptimizersTest, RefusesOptionsThatTheTableCannotHave) {
  nn::Embedding sgd(make(kRows, kDim, nn::SGDOptions(1)));
  nn::Embedding adam(make(kRows, kDim, nn::AdamOptions(1)));
  nn::Embedding rprop(make(kRows, kDim, nn::RpropOptions(1)));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::Adam optimizer({sgd}); }),
              AllOf(HasSubstr("'table0'"), HasSubstr("created with sgd, not with adam")));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::SGD optimizer({sgd}, nn::SGDOptions(1).momentum(0.9)); }),
              AllOf(HasSubstr("'table0'"), HasSubstr("nothing"), HasSubstr("momentum_buffer")));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::Adam optimizer({adam}, nn::AdamOptions(1).amsgrad(true)); }),
              HasSubstr("max_exp_avg_sq"));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::Adam optimizer({adam}, nn::AdamOptions(1).step(StepOf::kRow)); }),
              HasSubstr("step"));
  // torch's words.
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::Adam optimizer({adam}, nn::AdamOptions(-1)); }),
              HasSubstr("Invalid learning rate: -1.0"));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                nn::Adam optimizer({adam}, nn::AdamOptions(1).betas({0.9, 1}));
              }),
              HasSubstr("Invalid beta parameter at index 1: 1.0"));
  nn::Rprop begun({rprop});
  EXPECT_THAT(text_of<c10::ValueError>([&] { begun.set_lr(0.5); }), HasSubstr("rprop"));
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(adam->parameters(), std::make_unique<torch::optim::AdamOptions>(1));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::Adam optimizer(groups); }), HasSubstr("options of group 0 are not for tables"));
  // Changed to what cannot be after the optimizer was made.
  nn::Adam later({adam}, nn::AdamOptions(1));
  later.param_groups()[0].options().set_lr(-1);
  adam->forward(ids({1})).sum().backward();
  const torch::Tensor before = weights(adam->table());
  EXPECT_THAT(text_of<c10::ValueError>([&] { later.step(); }), HasSubstr("-1"));
  EXPECT_TRUE(same(weights(adam->table()), before));
  EXPECT_EQ(adam->pending().size(), 1U);
}

}  // namespace
}  // namespace embermap
