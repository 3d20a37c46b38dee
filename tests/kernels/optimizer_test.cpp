#include "kernels/optimizer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/batch.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Bad {
  Optimizer optimizer;
  const char* named;
};
class BadOptimizer : public testing::TestWithParam<Bad> {};
TEST_P(BadOptimizer, IsRefusedNamingTheHyperparameterAndItsValue) {
  try {
    check_optimizer(GetParam().optimizer);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(GetParam().named));
  }
}
INSTANTIATE_TEST_SUITE_P(Values, BadOptimizer,
                         testing::Values(Bad{Sgd{.lr = -0.1}, "sgd: lr = -0.1"}, Bad{Sgd{.lr = kNan}, "sgd: lr = nan"},
                                         Bad{Sgd{.lr = kInf}, "sgd: lr = inf"}, Bad{Sgd{.momentum = -1}, "momentum = -1"},
                                         Bad{Sgd{.weight_decay = -2}, "weight_decay = -2"},
                                         Bad{Sgd{.nesterov = true}, "nesterov needs momentum > 0"},
                                         Bad{Adagrad{.lr = -1}, "adagrad: lr = -1"},
                                         Bad{Adagrad{.lr_decay = -1}, "lr_decay = -1"},
                                         Bad{Adagrad{.weight_decay = kNan}, "weight_decay = nan"},
                                         Bad{Adagrad{.initial_accumulator_value = -1}, "initial_accumulator_value = -1"},
                                         Bad{Adagrad{.eps = -1e-10}, "eps = -1e-10"}));

TEST(Optimizer, AcceptsWhatTorchAccepts) {
  check_optimizer(std::monostate{});
  check_optimizer(Sgd{});
  check_optimizer(Sgd{.lr = 0});
  check_optimizer(Sgd{.lr = 1, .momentum = 1.5, .weight_decay = 2, .nesterov = true});
  check_optimizer(Adagrad{});
  check_optimizer(Adagrad{.lr = 0, .lr_decay = 3, .weight_decay = 0.1, .initial_accumulator_value = 2, .eps = 0});
}

TEST(Optimizer, NamesAndStateFields) {
  EXPECT_EQ(optimizer_name(std::monostate{}), "none");
  EXPECT_EQ(optimizer_name(Sgd{}), "sgd");
  EXPECT_EQ(optimizer_name(Adagrad{}), "adagrad");
  EXPECT_TRUE(state_fields(std::monostate{}).empty());
  EXPECT_TRUE(state_fields(Sgd{}).empty());
  const auto momentum = state_fields(Sgd{.momentum = 0.9});
  ASSERT_EQ(momentum.size(), 1U);
  EXPECT_EQ(momentum[0].name, "momentum_buffer");
  EXPECT_EQ(momentum[0].initial, 0.0);
  const auto adagrad = state_fields(Adagrad{.initial_accumulator_value = 0.25});
  ASSERT_EQ(adagrad.size(), 1U);
  EXPECT_EQ(adagrad[0].name, "sum");
  EXPECT_EQ(adagrad[0].initial, 0.25);
}

TEST(Optimizer, StateOfHalfPrecisionRowsIsFloat32) {
  EXPECT_EQ(state_dtype(DType::kFloat16), DType::kFloat32);
  EXPECT_EQ(state_dtype(DType::kBFloat16), DType::kFloat32);
  EXPECT_EQ(state_dtype(DType::kFloat32), DType::kFloat32);
  EXPECT_EQ(state_dtype(DType::kFloat64), DType::kFloat64);
}

TEST(Optimizer, ScalarsOfAStep) {
  EXPECT_EQ(step_scalars(Sgd{.lr = 0.5}, 1).kind, StepScalars::Kind::kSgd);
  const StepScalars sgd = step_scalars(Sgd{.lr = 0.5, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}, 7);
  EXPECT_EQ(sgd.kind, StepScalars::Kind::kSgdMomentum);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_EQ(sgd.lr, 0.5);
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_EQ(sgd.weight_decay, 0.01);

  const Adagrad adagrad{.lr = 0.1, .lr_decay = 0.25, .eps = 1e-3};
  EXPECT_EQ(step_scalars(adagrad, 1).kind, StepScalars::Kind::kAdagrad);
  EXPECT_EQ(step_scalars(adagrad, 1).lr, 0.1);
  EXPECT_EQ(step_scalars(adagrad, 2).lr, 0.1 / 1.25);
  EXPECT_EQ(step_scalars(adagrad, 1'000'000'001).lr, 0.1 / 250'000'001.0);
  EXPECT_EQ(step_scalars(adagrad, 5).eps, 1e-3);
  EXPECT_THROW(step_scalars(adagrad, 0), InvalidArgument);
  EXPECT_THROW(step_scalars(std::monostate{}, 1), InvalidArgument);
}

TEST(Optimizer, NAdamsProductIsOfTheBetasThatStepsWereMadeWith) {
  std::optional<double> same, changing;
  double expected = 1;
  for (std::uint64_t step = 1; step <= 40; ++step) {
    const StepScalars plain = step_scalars(NAdam{}, step, 0, same);
    EXPECT_NEAR(plain.mu_product, step_scalars(NAdam{}, step).mu_product, 1e-14 * plain.mu_product) << step;
    same = carried_on(plain);
    const double beta = 0.5 + 0.01 * static_cast<double>(step % 40);
    const StepScalars scalars = step_scalars(NAdam{.betas = {beta, 0.999}}, step, 0, changing);
    EXPECT_NEAR(scalars.mu_product, expected, 1e-12 * expected) << step;
    expected *= beta * (1 - 0.5 * std::pow(0.96, static_cast<double>(step) * 0.004));
    changing = carried_on(scalars);
  }
  EXPECT_FALSE(carried_on(step_scalars(NAdam{.step = StepOf::kRow}, 3)));  // its rows have their own
  EXPECT_FALSE(carried_on(step_scalars(Adam{}, 3)));
}

TEST(Optimizer, TheRateOfAsgdCountsOneStepLater) {
  const StepScalars scalars = step_scalars(Asgd{.lr = 0.3}, 5, 0, 0.1);
  EXPECT_EQ(scalars.lr_before, 0.1);
  EXPECT_EQ(carried_on(scalars), 0.3);
  EXPECT_EQ(step_scalars(Asgd{.lr = 0.3}, 5).lr_before, 0.3);  // nothing is known: always the same
}

// Three updates of a 4 x 3 table with repeated ids. The expected weights and states are those of a double-precision calculation
// of torch.optim's formulas in Python, which agreed with torch.optim.SGD and Adagrad to 3e-16: plain ones dense and sparse,
// momentum and weight decay dense, on the rows touched. Row 2 is never touched.
struct Training {
  const char* name;
  Optimizer optimizer;
  std::vector<double> weights, states;
};

const std::vector<Training>& trainings() {
  static const std::vector<Training> all{
      {"sgd", Sgd{.lr = 0.1}, {0.53, -1.1825, 1.86, -0.205, 0.61, -0.635, 1.5, -0.125, 0.25, -2.16, 0.9, 3.09}, {}},
      {"sgd with weight decay",
       Sgd{.lr = 0.1, .weight_decay = 0.01},
       {0.5289005, -1.17998875, 1.856052, -0.204700075, 0.60765219925, -0.6333765495, 1.5, -0.125, 0.25, -2.155802, 0.898051,
        3.083853},
       {}},
      {"sgd with momentum",
       Sgd{.lr = 0.1, .momentum = 0.9},
       {0.62, -1.19375, 1.815, -0.46825, 0.7045, -0.743, 1.5, -0.125, 0.25, -2.34, 0.855, 3.225},
       {-0.2, -0.6875, 1.35, 1.7575, 1.505, 1.23, 0.0, 0.0, 0.0, 1.4, 0.95, -0.75}},
      {"sgd with nesterov momentum and weight decay",
       Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
       {0.635335805, -1.1260718875, 1.68446772, -0.625111664425, 0.56281623290575, -0.8490776435205, 1.5, -0.125, 0.25,
        -2.45606522, 0.76507411, 3.27813933},
       {-0.1886095, -0.71146375, 1.387012, 1.7513377075, 1.526869432075, 1.21379838695, 0.0, 0.0, 0.0, 1.358238, 0.968031,
        -0.690207}},
      {"adagrad",
       Adagrad{.lr = 0.1},
       {0.5426537655583651, -1.251198796557092, 1.8125842724163368, -0.17760093415367934, 0.6655098330708134, -0.7178866508150369,
        1.5, -0.125, 0.25, -2.0803883864821433, 0.8292893219113453, 3.062860932360222},
       {1.49, 0.655625, 1.06, 2.8525, 12.66, 0.6725, 0.0, 0.0, 0.0, 4.16, 0.5, 2.61}},
      {"adagrad with decay, eps and an initial value",
       Adagrad{.lr = 0.1, .lr_decay = 0.25, .initial_accumulator_value = 0.5, .eps = 1e-3},
       {0.5322087477258142, -1.214340550588459, 1.9058652349128584, -0.1313089453083767, 0.7124315573797234, -0.6167383409473158,
        1.5, -0.125, 0.25, -2.081889105676553, 0.9090315295564213, 3.067729826153404},
       {1.99, 1.155625, 1.56, 3.3525, 13.16, 1.1725, 0.5, 0.5, 0.5, 4.66, 1.0, 3.11}},
      {"adagrad with weight decay",
       Adagrad{.lr = 0.1, .weight_decay = 0.01, .eps = 1e-8},
       {0.5421323328115137, -1.2509427164720415, 1.812966658189402, -0.177472145713681, 0.6652751259324845, -0.7174489494483887,
        1.5, -0.125, 0.25, -2.0792023075866757, 0.829358751062724, 3.060555264800455},
       {1.488460999985809, 0.674438499855378, 1.1149610000353463, 2.8502623115700514, 12.684975008024487, 0.6568719418225738, 0.0,
        0.0, 0.0, 4.097640999995748, 0.5191810000199608, 2.5590609999914147}},
  };
  return all;
}

struct Update {
  std::vector<std::uint64_t> ids;
  std::vector<double> grads;
};
const std::vector<Update>& updates() {
  static const std::vector<Update> all{
      {{1, 3, 1}, {0.5, -0.25, 1.0, 2.0, 0.5, -1.5, 0.25, 0.75, -0.5}},
      {{0, 1}, {-1.0, 0.125, 0.5, 1.5, -2.0, 0.25}},
      {{1, 3, 0, 1, 1}, {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, 0.7, -0.8, 0.9, 1.1, 1.2, -1.3, -1.4, 1.5, 1.6}},
  };
  return all;
}

// T is float or double. Records of 3 weights, 3 states and one element of padding.
template <class T>
void trains_as_torch(DType dtype, double tolerance) {
  constexpr std::size_t kRows = 4;
  constexpr std::size_t kDim = 3;
  constexpr std::size_t kRecord = 7;
  const double initial[] = {0.5, -1.25, 2.0, 0.0, 0.75, -0.5, 1.5, -0.125, 0.25, -2.0, 1.0, 3.0};
  ThreadPool pool(2);
  for (const Training& training : trainings()) {
    const auto fields = state_fields(training.optimizer);
    std::vector<T> table(kRows * kRecord, T{-77});
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t j = 0; j < kDim; ++j) {
        table[row * kRecord + j] = static_cast<T>(initial[row * kDim + j]);
        if (!fields.empty()) table[row * kRecord + kDim + j] = static_cast<T>(fields[0].initial);
      }
    const RecordLayout layout{kDim, kRecord * sizeof(T), dtype, static_cast<std::uint32_t>(fields.size()), {kDim * sizeof(T)}};
    std::uint64_t step = 0;
    for (const Update& update : updates()) {
      const Batch batch = make_batch(update.ids, pool);
      std::vector<std::byte*> records;
      for (const std::uint64_t id : batch.keys) records.push_back(reinterpret_cast<std::byte*>(table.data() + id * kRecord));
      const std::vector<T> grads(update.grads.begin(), update.grads.end());
      step_rows(records, batch, 0, layout, step_scalars(training.optimizer, ++step),
                reinterpret_cast<const std::byte*>(grads.data()), dtype, pool);
    }
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t j = 0; j < kDim; ++j) {
        EXPECT_NEAR(table[row * kRecord + j], training.weights[row * kDim + j], tolerance)
            << training.name << ", weight " << row << ", " << j;
        if (training.states.empty()) continue;
        EXPECT_NEAR(table[row * kRecord + kDim + j], training.states[row * kDim + j], 16 * tolerance)
            << training.name << ", state " << row << ", " << j;
      }
      EXPECT_EQ(table[row * kRecord + 6], T{-77}) << training.name << ": padding of row " << row;
    }
    for (std::size_t j = 0; j < kDim; ++j)
      EXPECT_EQ(table[2 * kRecord + j], static_cast<T>(initial[2 * kDim + j])) << training.name;
  }
}

TEST(Optimizer, TrainsFloat64AsTorch) { trains_as_torch<double>(DType::kFloat64, 1e-14); }
TEST(Optimizer, TrainsFloat32AsTorch) { trains_as_torch<float>(DType::kFloat32, 6e-7); }

}  // namespace
}  // namespace embermap
