// What all optimizers have in common: options, rows cut for threads, vectors of every width, rounding by chance.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/vector_dispatch.hpp"
#include "kernels/batch.hpp"
#include "kernels/optimizer.hpp"
#include "kernels/optimizer_step.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr StepOf kRow = StepOf::kRow;

std::vector<std::string> names_of(const Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const StateField& field : state_fields(optimizer)) {
    std::string name(field.name);
    if (field.shape == StateShape::kOne) name += " (one)";
    if (field.shape == StateShape::kCount) name += " (count)";
    names.push_back(name);
  }
  return names;
}

TEST(OptimizerKinds, StateFieldsHaveTorchsNames) {
  EXPECT_THAT(names_of(RowWiseAdagrad{}), ElementsAre("sum (one)"));
  EXPECT_THAT(names_of(RowWiseAdagrad{.step = kRow}), ElementsAre("sum (one)", "step (count)"));
  EXPECT_THAT(names_of(Adadelta{}), ElementsAre("square_avg", "acc_delta"));
  EXPECT_THAT(names_of(Adam{}), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of(AdamW{.amsgrad = true, .step = kRow}),
              ElementsAre("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step (count)"));
  EXPECT_THAT(names_of(SparseAdam{}), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of(Adamax{}), ElementsAre("exp_avg", "exp_inf"));
  EXPECT_THAT(names_of(NAdam{}), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of(NAdam{.step = kRow}), ElementsAre("exp_avg", "exp_avg_sq", "step (count)", "mu_product (one)"));
  EXPECT_THAT(names_of(RAdam{}), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of(Asgd{}), ElementsAre("ax"));
  EXPECT_THAT(names_of(RmsProp{}), ElementsAre("square_avg"));
  EXPECT_THAT(names_of(RmsProp{.momentum = 0.5, .centered = true}), ElementsAre("square_avg", "grad_avg", "momentum_buffer"));
  EXPECT_THAT(names_of(Rprop{}), ElementsAre("prev", "step_size"));
  EXPECT_THAT(names_of(Sgd{.step = kRow}), ElementsAre("step (count)"));
  EXPECT_EQ(state_fields(Rprop{.lr = 0.25})[1].initial, 0.25);
  EXPECT_EQ(state_fields(RowWiseAdagrad{.initial_accumulator_value = 2})[0].initial, 2);
}

TEST(OptimizerKinds, NamesLeadToTheirOptimizers) {
  for (const char* name : {"none", "sgd", "adagrad", "rowwise_adagrad", "adadelta", "adam", "adamw", "sparse_adam", "adamax",
                           "nadam", "radam", "asgd", "rmsprop", "rprop"}) {
    const auto optimizer = optimizer_named(name);
    ASSERT_TRUE(optimizer) << name;
    EXPECT_EQ(optimizer_name(*optimizer), name);
    check_optimizer(*optimizer);
  }
  EXPECT_FALSE(optimizer_named("Adam"));
  EXPECT_FALSE(optimizer_named(""));
}

TEST(OptimizerKinds, BadOptionsAreRefusedInTorchsWords) {
  const auto text = [](const Optimizer& optimizer) -> std::string {
    try {
      check_optimizer(optimizer);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(text(Adam{.lr = -0.5}), HasSubstr("Invalid learning rate: -0.5"));
  EXPECT_THAT(text(Adam{.betas = {1, 0.9}}), HasSubstr("Invalid beta parameter at index 0: 1.0"));
  EXPECT_THAT(text(NAdam{.betas = {0.5, -1}}), HasSubstr("Invalid beta parameter at index 1: -1.0"));
  EXPECT_THAT(text(RAdam{.eps = -1}), HasSubstr("Invalid epsilon value: -1.0"));
  EXPECT_THAT(text(Adadelta{.rho = 1.5}), HasSubstr("Invalid rho value: 1.5"));
  EXPECT_THAT(text(Rprop{.etas = {1.5, 1.2}}), HasSubstr("Invalid eta values: 1.5, 1.2"));
  EXPECT_THAT(text(Rprop{.step_sizes = {2, 1}}), HasSubstr("step_sizes = (2, 1)"));
  EXPECT_THAT(text(RmsProp{.momentum = -1}), HasSubstr("Invalid momentum value: -1.0"));
  EXPECT_THAT(text(SparseAdam{.lr = 0}), HasSubstr("Invalid learning rate: 0.0"));
  EXPECT_THAT(text(SparseAdam{.eps = 0}), HasSubstr("Invalid epsilon value: 0.0"));
  EXPECT_THAT(text(Sgd{.momentum = 0.5, .dampening = 0.5, .nesterov = true}),
              HasSubstr("Nesterov momentum requires a momentum and zero dampening"));
  EXPECT_THAT(text(Adagrad{.row = {.clip_row = 0.0}}), HasSubstr("clip_row = 0"));
  EXPECT_THAT(text(Adagrad{.row = {.clip_value = -1.0}}), HasSubstr("clip_value = -1"));
  EXPECT_EQ(text(Asgd{.alpha = -1, .t0 = -5}), "accepted");  // as torch does
}

TEST(OptimizerKinds, PowersAreThoseOfTheLibrary) {
  for (const double base : {0.0, 0.3, 0.9, 0.96, 0.999, 0.999999})
    for (const std::uint64_t n : {0U, 1U, 2U, 3U, 7U, 100U, 12345U, 2147483647U}) {
      const double expected = std::pow(base, static_cast<double>(n));
      EXPECT_NEAR(detail::power(base, n), expected, 1e-8 * expected + 1e-300) << base << " ^ " << n;
      if (n < 200) {
        EXPECT_NEAR(detail::power(base, n), expected, 5e-14 * expected) << base << " ^ " << n;
      }
    }
  for (const double x : {1.0, 1.0 + 1e-12, 1.25, 1.5, 2.0, 3.7, 1e3, 1e9, 1e300})
    for (const double y : {0.0, 0.25, 0.75, 1.0, -0.75, 2.0}) {
      const double expected = std::pow(x, y);
      if (std::isfinite(expected) && expected > 1e-300) {
        EXPECT_NEAR(detail::power(x, y), expected, 1e-13 * expected) << x << " ^ " << y;
      }
    }
}

TEST(OptimizerKinds, LearningRatesOfOneStep) {
  EXPECT_EQ(std::get<AdamW>(with_learning_rate(AdamW{}, 0.5)).lr, 0.5);
  EXPECT_THROW(with_learning_rate(AdamW{}, -1), InvalidArgument);
  EXPECT_THROW(with_learning_rate(Rprop{}, 0.5), InvalidArgument);
}

// Every kind, and every option that changes what is computed.
std::vector<Optimizer> all_optimizers() {
  const RowOptions clipped{.clip_value = 2.0, .clip_row = 5.0};
  return {Sgd{.lr = 0.05, .maximize = true},
          Sgd{.lr = 0.05, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.01, .row = {.clip_value = 1.0}},
          Sgd{.lr = 0.05, .momentum = 0.9, .dampening = 0.25, .step = kRow, .row = clipped},
          Adagrad{.lr_decay = 0.1, .weight_decay = 0.01, .step = kRow},
          RowWiseAdagrad{.lr_decay = 0.1, .weight_decay = 0.1, .row = clipped},
          Adadelta{.weight_decay = 0.01, .maximize = true},
          Adam{.weight_decay = 0.01},
          Adam{.betas = {0.3, 0.9}, .amsgrad = true, .step = kRow},
          AdamW{.row = clipped},
          SparseAdam{},
          Adamax{},
          NAdam{.weight_decay = 0.01},
          NAdam{.step = kRow},
          RAdam{.weight_decay = 0.01},
          Asgd{.lambd = 0.01, .t0 = 1},
          RmsProp{},
          RmsProp{.momentum = 0.9},
          RmsProp{.centered = true},
          RmsProp{.momentum = 0.9, .centered = true},
          Rprop{}};
}

struct Trained {
  RecordLayout layout;
  std::vector<std::byte> records;
};

// Three steps on 40 rows of `dim` elements: ids with duplicates, of which row 7 has most.
Trained train(const Optimizer& optimizer, DType dtype, std::uint64_t dim, unsigned threads) {
  constexpr std::uint64_t kRows = 40;
  const std::vector<StateField> fields = state_fields(optimizer);
  RecordLayout layout{.dim = dim, .dtype = dtype, .states = static_cast<std::uint32_t>(fields.size())};
  const DType state = state_dtype(dtype);
  std::uint64_t bytes = dim * item_size(dtype);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const std::uint64_t item = fields[i].shape == StateShape::kCount ? 4 : item_size(state);
    layout.state_offset[i] = round_up(bytes, item);
    bytes = layout.state_offset[i] + (fields[i].shape == StateShape::kElements ? dim : 1) * item;
  }
  layout.stride = round_up(bytes, 8);
  Trained trained{layout, std::vector<std::byte>(kRows * layout.stride)};
  std::mt19937_64 random(dim);
  const auto normal = [](std::mt19937_64& bits) { return static_cast<float>(static_cast<std::int32_t>(bits())) * 0x1p-30F; };
  const auto put = [](std::byte* at, DType type, double value) {
    if (type == DType::kFloat64) std::memcpy(at, &value, 8);
    const auto single = static_cast<float>(value);
    if (type == DType::kFloat32) std::memcpy(at, &single, 4);
    const Float16 half(single);
    if (type == DType::kFloat16) std::memcpy(at, &half, 2);
    const BFloat16 brain(single);
    if (type == DType::kBFloat16) std::memcpy(at, &brain, 2);
  };
  for (std::uint64_t row = 0; row < kRows; ++row) {
    std::byte* const record = trained.records.data() + row * layout.stride;
    for (std::uint64_t j = 0; j < dim; ++j) put(record + j * item_size(dtype), dtype, normal(random));
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (fields[i].initial != 0)
        for (std::uint64_t j = 0; j < (fields[i].shape == StateShape::kElements ? dim : 1); ++j)
          put(record + layout.state_offset[i] + j * item_size(state), state, fields[i].initial);
  }
  ThreadPool pool(threads);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    std::vector<std::uint64_t> ids(300, 7);
    for (std::size_t i = 0; i < 30; ++i) ids[i * 10] = random() % (kRows - 1);
    const Batch batch = make_batch(ids, pool);
    std::vector<std::byte*> records;
    for (const std::uint64_t key : batch.keys) records.push_back(trained.records.data() + key * layout.stride);
    std::vector<std::byte> grads(ids.size() * dim * item_size(dtype));
    for (std::uint64_t i = 0; i < ids.size() * dim; ++i) put(grads.data() + i * item_size(dtype), dtype, normal(random) / 8);
    step_rows(records, batch, 0, layout, step_scalars(optimizer, step, 99), grads.data(), dtype, pool);
  }
  return trained;
}

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

TEST(OptimizerKinds, AnyNumberOfThreadsGivesTheSameBits) {
  for (const Optimizer& optimizer : all_optimizers())
    for (const DType dtype : kDTypes)
      for (const std::uint64_t dim : {5U, 700U})
        EXPECT_EQ(train(optimizer, dtype, dim, 1).records, train(optimizer, dtype, dim, 4).records)
            << optimizer_name(optimizer) << " on " << dtype_name(dtype) << " x " << dim;
}

TEST(OptimizerKinds, VectorsOfAnyWidthGiveTheSameBits) {
  auto& level = detail::vector_level();
  const VectorLevel widest = level.load();
  for (const Optimizer& optimizer : all_optimizers())
    for (const DType dtype : kDTypes) {
      const auto expected = train(optimizer, dtype, 301, 1).records;
      for (const VectorLevel lower : {VectorLevel::kBaseline, VectorLevel::kAvx2}) {
        if (lower > widest) continue;
        level = lower;
        const auto found = train(optimizer, dtype, 301, 1).records;
        level = widest;
        EXPECT_EQ(found, expected) << optimizer_name(optimizer) << " on " << dtype_name(dtype);
      }
    }
}

// A bound that nothing reaches takes the long way through sums.
TEST(OptimizerKinds, TheShortWayOfSgdAndAdagradGivesTheBitsOfTheLongOne) {
  for (const DType dtype : kDTypes)
    for (const std::uint64_t dim : {1U, 33U, 700U}) {
      const RowOptions unreached{.clip_value = 1e30};
      EXPECT_EQ(train(Sgd{.lr = 0.1, .weight_decay = 0.1}, dtype, dim, 2).records,
                train(Sgd{.lr = 0.1, .weight_decay = 0.1, .row = unreached}, dtype, dim, 2).records);
      EXPECT_EQ(train(Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5}, dtype, dim, 2).records,
                train(Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .row = unreached}, dtype, dim, 2).records);
      EXPECT_EQ(train(Adagrad{.lr_decay = 0.1}, dtype, dim, 2).records,
                train(Adagrad{.lr_decay = 0.1, .row = unreached}, dtype, dim, 2).records);
    }
}

TEST(OptimizerKinds, RecordsWithTooFewFieldsAreRefused) {
  ThreadPool pool(1);
  const std::vector<std::uint64_t> ids{0};
  const Batch batch = make_batch(ids, pool);
  std::byte record[64] = {};
  std::byte* const address = record;
  const RecordLayout layout{.dim = 2, .stride = 64, .dtype = DType::kFloat32, .states = 2, .state_offset = {8, 16}};
  const auto step = [&](const Optimizer& optimizer) {
    step_rows(std::span(&address, 1), batch, 0, layout, step_scalars(optimizer, 1), record, DType::kFloat32, pool);
  };
  step(Adam{});
  EXPECT_THROW(step(Adam{.amsgrad = true}), InvalidArgument);
  EXPECT_THROW(step(Adam{.step = kRow}), InvalidArgument);
  EXPECT_THROW(step(NAdam{.step = kRow}), InvalidArgument);
  EXPECT_THROW(step(Sgd{.row = {.stochastic_rounding = true}}), DTypeError);
}

// --- rounding by chance ---

template <class T>
float value_of(std::uint16_t bits) {
  T half;
  half.bits = bits;
  return static_cast<float>(half);
}

// Every pair of neighbours of T, both signs: a float at each of several places between them.
template <class T>
void rounds_to_neighbours() {
  const std::uint32_t largest = std::is_same_v<T, Float16> ? 0x7BFF : 0x7F7F;
  std::mt19937 random(1);
  for (std::uint32_t bits = 0; bits < largest; ++bits) {
    const float low = value_of<T>(static_cast<std::uint16_t>(bits));
    const float high = value_of<T>(static_cast<std::uint16_t>(bits + 1));
    for (const float sign : {1.0F, -1.0F}) {
      for (const std::uint32_t chance : {0U, 0xFFFFFFFFU, 0x12345678U})
        ASSERT_EQ(static_cast<float>(detail::round_by_chance<T>(sign * low, chance)), sign * low) << low;  // is one already
      const float between = low + (high - low) / 4;
      ASSERT_EQ(static_cast<float>(detail::round_by_chance<T>(sign * between, 0)), sign * low) << between;
      ASSERT_EQ(static_cast<float>(detail::round_by_chance<T>(sign * between, 0xFFFFFFFFU)), sign * high) << between;
    }
  }
}
TEST(RoundingByChance, Float16BecomesANeighbour) { rounds_to_neighbours<Float16>(); }
TEST(RoundingByChance, BFloat16BecomesANeighbour) { rounds_to_neighbours<BFloat16>(); }

template <class T>
void rounds_up_by_distance(float low, float high) {
  std::mt19937 random(2);
  constexpr int kTimes = 20'000;
  for (const float part : {0.125F, 0.5F, 0.875F}) {
    int up = 0;
    for (int i = 0; i < kTimes; ++i)
      up +=
          static_cast<float>(detail::round_by_chance<T>(low + part * (high - low), static_cast<std::uint32_t>(random()))) == high;
    EXPECT_NEAR(static_cast<float>(up) / kTimes, part, 0.02) << low;
  }
}
TEST(RoundingByChance, ProbabilityIsTheDistance) {
  rounds_up_by_distance<Float16>(1.0F, 1.0F + 0x1p-10F);
  rounds_up_by_distance<Float16>(0x1p-20F, 0x1p-20F + 0x1p-24F);
  rounds_up_by_distance<Float16>(0.0F, 0x1p-24F);
  rounds_up_by_distance<BFloat16>(1.0F, 1.0F + 0x1p-7F);
  rounds_up_by_distance<BFloat16>(0.0F, 0x1p-133F);
}

TEST(RoundingByChance, OutsideOfTheFiniteValuesItRoundsToTheNearest) {
  for (const float value : {65504.0F, 65519.0F, 65520.0F, 1e30F, std::numeric_limits<float>::infinity()})
    for (const std::uint32_t chance : {0U, 0xFFFFFFFFU}) {
      EXPECT_EQ(detail::round_by_chance<Float16>(value, chance).bits, Float16(value).bits) << value;
      EXPECT_EQ(detail::round_by_chance<Float16>(-value, chance).bits, Float16(-value).bits) << value;
    }
  for (const float value :
       {value_of<BFloat16>(0x7F7F), std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()})
    EXPECT_EQ(detail::round_by_chance<BFloat16>(value, 0xFFFFFFFFU).bits, BFloat16(value).bits) << value;
  EXPECT_TRUE(std::isnan(static_cast<float>(detail::round_by_chance<Float16>(std::nanf(""), 7))));
  EXPECT_TRUE(std::isnan(static_cast<float>(detail::round_by_chance<BFloat16>(std::nanf(""), 7))));
  // Far below half of the smallest: up once in a long while, else 0 with its sign.
  EXPECT_EQ(detail::round_by_chance<Float16>(-0x1p-60F, 0x80000000U).bits, 0x8000);
  EXPECT_EQ(detail::round_by_chance<Float16>(0x1p-40F, 0xFFFFFFFFU).bits, 1);
  EXPECT_EQ(detail::round_by_chance<Float16>(0x1p-40F, 0xFFFF0000U - 1).bits, 0);
}

TEST(RoundingByChance, EachColumnStepAndSeedHasItsOwnChance) {
  const auto train_once = [](std::uint64_t step, std::uint64_t seed, std::uint64_t row) {
    ThreadPool pool(1);
    const std::vector<std::uint64_t> ids{row};
    const Batch batch = make_batch(ids, pool);
    std::vector<BFloat16> weights(600, BFloat16(1.0F));
    std::byte* const record = reinterpret_cast<std::byte*>(weights.data());
    const std::vector<float> grads(600, 0x1p-9F);  // half of the way to the next one below 1
    const RecordLayout layout{.dim = 600, .stride = 1200, .dtype = DType::kBFloat16};
    step_rows(std::span(&record, 1), batch, 0, layout,
              step_scalars(Sgd{.lr = 1, .row = {.stochastic_rounding = true}}, step, seed),
              reinterpret_cast<const std::byte*>(grads.data()), DType::kFloat32, pool);
    std::vector<std::uint16_t> bits;
    for (const BFloat16 weight : weights) bits.push_back(weight.bits);
    return bits;
  };
  const auto first = train_once(1, 5, 3);
  EXPECT_EQ(train_once(1, 5, 3), first);
  EXPECT_NE(train_once(2, 5, 3), first);
  EXPECT_NE(train_once((1ULL << 32) + 1, 5, 3), first);
  EXPECT_NE(train_once(1, 6, 3), first);
  EXPECT_NE(train_once(1, 5, 4), first);
  EXPECT_NE(train_once(1, 5, 3 + (1ULL << 32)), first);
  const auto up = std::count(first.begin(), first.end(), BFloat16(1.0F).bits);
  EXPECT_NEAR(static_cast<double>(up), 300, 75);  // six standard deviations
}

}  // namespace
}  // namespace embermap
