#include "nn/embedding_bag.hpp"

#include <torch/torch.h>

#include <tuple>

#include "nn/embedding.hpp"
#include "nn/table_optimizer.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;
enum class Mode { kSum, kMean, kMax };

constexpr std::int64_t kRows = 30;

class EmbeddingBagTest : public TableTest {
 protected:
  nn::EmbeddingBag over(const Table& table, nn::EmbeddingBagOptions options = nn::EmbeddingBagOptions().mode(torch::kSum)) {
    return nn::EmbeddingBag(table, options);
  }
};

nn::EmbeddingBagOptions options_of(Mode mode) {
  nn::EmbeddingBagOptions options;
  if (mode == Mode::kSum) options.mode(torch::kSum);
  if (mode == Mode::kMax) options.mode(torch::kMax);
  return options;
}

// What a bag is, written out: bag b of `count` ids is [starts[b], starts[b + 1]).
torch::Tensor bags(const torch::Tensor& all, const torch::Tensor& flat, std::vector<std::int64_t> starts, Mode mode,
                   const torch::Tensor& scale = {}) {
  const auto wide = all.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
  std::vector<torch::Tensor> out;
  starts.push_back(flat.numel());
  for (std::size_t b = 0; b + 1 < starts.size(); ++b) {
    torch::Tensor rows = torch::embedding(all, flat.slice(0, starts[b], starts[b + 1])).to(wide);
    if (scale.defined()) rows = rows * scale.flatten().slice(0, starts[b], starts[b + 1]).to(wide).unsqueeze(1);
    torch::Tensor sum = rows.sum(0);
    if (mode == Mode::kMean && rows.size(0) > 0) sum = sum / rows.size(0);
    if (mode == Mode::kMax && rows.size(0) > 0) sum = std::get<0>(rows.max(0));
    out.push_back(sum);
  }
  return torch::stack(out).to(all.scalar_type());
}

class BagsOf : public EmbeddingBagTest, public testing::WithParamInterface<std::tuple<DType, Mode>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  Mode mode() const { return std::get<1>(GetParam()); }
  nn::EmbeddingBagOptions options() const { return options_of(mode()); }
  testing::AssertionResult near(const torch::Tensor& a, const torch::Tensor& b) const {
    const double unit = dtype() == DType::kFloat64   ? 1e-13
                        : dtype() == DType::kFloat32 ? 1e-5
                        : dtype() == DType::kFloat16 ? 2e-3
                                                     : 2e-2;
    return close(a, b, unit, unit);
  }
};

TEST_P(BagsOf, IdsAndOffsets) {
  const Table table = make(kRows, 5, Sgd{.lr = 1}, dtype());
  auto bag = over(table, options());
  const torch::Tensor some = torch::randint(0, kRows, {11}, torch::kInt64);
  const std::vector<std::int64_t> starts{0, 0, 3, 4, 11, 11};  // empty bags at both ends and one of a single id
  const torch::Tensor wanted = bags(weights(table), some, starts, mode());
  EXPECT_TRUE(near(bag->forward(some, ids(starts)).detach(), wanted));
  EXPECT_TRUE(near(bag->forward(some.to(torch::kInt32), ids(starts).to(torch::kInt32)).detach(), wanted));
  std::vector<std::int64_t> ends = starts;
  ends.push_back(11);
  EXPECT_TRUE(near(over(table, options().include_last_offset(true))->forward(some, ids(ends)).detach(), wanted));
}

TEST_P(BagsOf, RowsOfTwoDimensionalIds) {
  const Table table = make(kRows, 5, Sgd{.lr = 1}, dtype());
  const torch::Tensor some = torch::randint(0, kRows, {4, 6}, torch::kInt64);
  EXPECT_TRUE(near(over(table, options())->forward(some).detach(), bags(weights(table), some.flatten(), {0, 6, 12, 18}, mode())));
}

TEST_P(BagsOf, NoIdsAndNoBags) {
  const Table table = make(kRows, 5, Sgd{.lr = 1}, dtype());
  auto bag = over(table, options());
  const auto type = torch_dtype(dtype());
  EXPECT_TRUE(same(bag->forward(ids({}), ids({0, 0, 0})).detach(), torch::zeros({3, 5}, type)));
  EXPECT_TRUE(same(bag->forward(ids({}), ids({})).detach(), torch::zeros({0, 5}, type)));
  EXPECT_TRUE(same(bag->forward(torch::empty({3, 0}, torch::kInt64)).detach(), torch::zeros({3, 5}, type)));
  EXPECT_TRUE(same(bag->forward(torch::empty({0, 3}, torch::kInt64)).detach(), torch::zeros({0, 5}, type)));
  bag->forward(ids({}), ids({0, 0})).sum().backward();
  nn::TableOptimizer({bag}).step();
}

TEST_P(BagsOf, GradientsReachTheTable) {
  const Table table = make(kRows, 5, Sgd{.lr = 0.5}, dtype());
  auto bag = over(table, options());
  const torch::Tensor before = weights(table);
  const std::vector<std::int64_t> starts{0, 4, 4};
  const torch::Tensor some = ids({1, 2, 2, 3, 2, 29});
  const torch::Tensor upstream = torch::randn({3, 5}).to(before.scalar_type());
  bag->forward(some, ids(starts)).backward(upstream);
  nn::TableOptimizer({bag}).step();
  const torch::Tensor leaf = before.clone().requires_grad_();
  bags(leaf, some, starts, mode()).backward(upstream);
  EXPECT_TRUE(near(weights(table), (before - 0.5 * leaf.grad()).detach()));
}

INSTANTIATE_TEST_SUITE_P(DTypesAndModes, BagsOf,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16),
                                          testing::Values(Mode::kSum, Mode::kMean, Mode::kMax)),
                         [](const auto& test) {
                           return std::string(dtype_name(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) == Mode::kSum    ? "_sum"
                                   : std::get<1>(test.param) == Mode::kMean ? "_mean"
                                                                            : "_max");
                         });

class WeightedBagsOf : public EmbeddingBagTest, public testing::WithParamInterface<DType> {};

TEST_P(WeightedBagsOf, WeightsMultiplyRowsAndReceiveGradients) {
  const Table table = make(kRows, 5, Sgd{.lr = 0.5}, GetParam());
  auto bag = over(table);
  const torch::Tensor before = weights(table);
  const double unit = GetParam() == DType::kFloat64   ? 1e-13
                      : GetParam() == DType::kFloat32 ? 1e-5
                      : GetParam() == DType::kFloat16 ? 4e-3
                                                      : 4e-2;
  const torch::Tensor some = torch::randint(0, kRows, {3, 4}, torch::kInt64);
  const torch::Tensor scale = torch::randn({3, 4}).to(before.scalar_type()).requires_grad_();
  const torch::Tensor upstream = torch::randn({3, 5}).to(before.scalar_type());
  const torch::Tensor leaf = before.clone().requires_grad_();
  const torch::Tensor scale_leaf = scale.detach().clone().requires_grad_();

  const torch::Tensor out = bag->forward(some, {}, scale);
  const torch::Tensor wanted = bags(leaf, some.flatten(), {0, 4, 8}, Mode::kSum, scale_leaf);
  EXPECT_TRUE(close(out.detach(), wanted.detach(), unit, unit));
  out.backward(upstream);
  wanted.backward(upstream);
  EXPECT_TRUE(close(scale.grad(), scale_leaf.grad(), unit, unit));
  nn::TableOptimizer({bag}).step();
  EXPECT_TRUE(close(weights(table), (before - 0.5 * leaf.grad()).detach(), unit, unit));

  const torch::Tensor flat = bag->forward(some.flatten(), ids({0, 4, 8}), scale.detach().flatten());
  EXPECT_EQ(flat.sizes(), (std::vector<std::int64_t>{3, 5}));
}

INSTANTIATE_TEST_SUITE_P(DTypes, WeightedBagsOf,
                         testing::Values(DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16), named_by_dtype);

TEST_F(EmbeddingBagTest, TrainsAsTorchsSparseBags) {
  const Table table = make(kRows, 8, Adagrad{.lr = 0.1});
  auto bag = over(table, nn::EmbeddingBagOptions().mode(torch::kMean));
  auto reference = torch::nn::EmbeddingBag::from_pretrained(
      weights(table), torch::nn::EmbeddingBagFromPretrainedOptions().freeze(false).sparse(true).mode(torch::kMean));
  nn::TableOptimizer ours({bag});
  torch::optim::Adagrad theirs(reference->parameters(), torch::optim::AdagradOptions(0.1));
  for (int step = 0; step < 10; ++step) {
    const torch::Tensor some = torch::randint(0, kRows, {25}, torch::kInt64);
    const torch::Tensor starts = ids({0, 5, 5, 6, 20});
    ours.zero_grad();
    theirs.zero_grad();
    bag->forward(some, starts).pow(2).sum().backward();
    reference(some, starts).pow(2).sum().backward();
    ours.step();
    theirs.step();
  }
  EXPECT_TRUE(close(weights(table), reference->weight.detach(), 1e-5, 1e-5));
}

TEST_F(EmbeddingBagTest, SharesATablesUpdateWithAnEmbedding) {
  const Table table = make(kRows, 3, Sgd{.lr = 1});
  const torch::Tensor before = weights(table);
  auto bag = over(table);
  auto embedding = nn::Embedding(table);
  nn::TableOptimizer optimizer({embedding, bag});
  (embedding->forward(ids({1})).sum() + bag->forward(ids({1, 2}), ids({0})).sum()).backward();
  optimizer.step();
  EXPECT_EQ(table.step(), 1U);
  EXPECT_TRUE(close(weights(table)[1], before[1] - 2, 1e-6, 1e-6));
  EXPECT_TRUE(close(weights(table)[2], before[2] - 1, 1e-6, 1e-6));
}

TEST_F(EmbeddingBagTest, SumsHalfPrecisionRowsInFloat) {
  Table table = make(1, 1, {}, DType::kFloat16);
  const torch::Tensor one = torch::ones({1, 1}, torch::kFloat16);
  table.write(0, 1, {static_cast<const std::byte*>(one.const_data_ptr()), one.nbytes()});
  // In float16 a sum of ones stops at 2048.
  EXPECT_EQ(over(table)->forward(torch::zeros({1, 4096}, torch::kInt64)).item<float>(), 4096.0F);
}

TEST_F(EmbeddingBagTest, WeightsGetTheirGradientOverAFrozenTable) {
  const Table table = make(kRows, 3, {});
  const torch::Tensor scale = torch::ones({1, 2}, torch::requires_grad());
  over(table)->forward(ids({1, 2}).view({1, 2}), {}, scale).sum().backward();
  EXPECT_TRUE(close(scale.grad(), weights(table).slice(0, 1, 3).sum(1).view({1, 2}), 1e-6, 1e-6));
}

TEST_F(EmbeddingBagTest, RefusesOffsetsThatAreNone) {
  auto bag = over(make(kRows, 3));
  const auto refuse = [&](const torch::Tensor& some, const torch::Tensor& offsets) {
    return text_of<c10::ValueError>([&] { bag->forward(some, offsets); });
  };
  EXPECT_THAT(refuse(ids({1, 2}), {}), AllOf(HasSubstr("EmbeddingBag of table 'table0'"), HasSubstr("need offsets")));
  EXPECT_THAT(refuse(ids({1, 2}), ids({1})), AllOf(HasSubstr("offsets[0] has to be 0"), HasSubstr("got 1")));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 2, 1})), HasSubstr("offsets[2] is 1, less than the 2 before it"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 3})),
              AllOf(HasSubstr("can not be greater than input's length"), HasSubstr("offsets[1] is 3, beyond the 2 ids")));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, -1})), HasSubstr("offsets[1] is -1"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({})), HasSubstr("2 ids"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 1}).view({1, 2})), HasSubstr("[1, 2]"));
  EXPECT_THAT(refuse(ids({1, 2}).view({1, 2}), ids({0})), HasSubstr("[1, 2]"));
  EXPECT_THAT(refuse(torch::tensor(std::int64_t{1}), ids({0})), HasSubstr("1 or 2 dimensions"));
  EXPECT_THAT(refuse(ids({1, 2}).view({1, 1, 2}), {}), HasSubstr("1 or 2 dimensions"));
  EXPECT_THAT(text_of<c10::TypeError>([&] { bag->forward(ids({1}), torch::tensor({0.0F})); }),
              HasSubstr("offsets must be integers"));
  EXPECT_THAT(text_of<c10::TypeError>([&] { bag->forward(torch::tensor({1.0F}), ids({0})); }), HasSubstr("ids must be integers"));
  nn::EmbeddingBag with_last(bag->table(), nn::EmbeddingBagOptions().mode(torch::kSum).include_last_offset(true));
  EXPECT_THAT(text_of<c10::ValueError>([&] { with_last->forward(ids({}), ids({})); }), HasSubstr("end of the last bag"));
  EXPECT_THROW(bag->forward(ids({1, kRows}), ids({0})), c10::IndexError);
  EXPECT_TRUE(bag->pending().empty());
}

TEST_F(EmbeddingBagTest, IdsBeyondTheLastOffsetAreInNoBag) {
  const Table table = make(kRows, 3, Sgd{.lr = 1});
  const torch::Tensor before = weights(table);
  for (const Mode mode : {Mode::kSum, Mode::kMean, Mode::kMax}) {
    auto bag = over(table, options_of(mode).include_last_offset(true));
    const torch::Tensor out = bag->forward(ids({1, 2, 3, 4}), ids({0, 1, 3}));
    EXPECT_TRUE(close(out.detach(), bags(before, ids({1, 2, 3}), {0, 1}, mode), 1e-6, 1e-6));
    out.sum().backward();
    const torch::Tensor grad = bag->grad().to_dense();
    EXPECT_TRUE(same(grad[4], torch::zeros({3})));
    EXPECT_FALSE(torch::equal(grad[1], torch::zeros({3})));
  }
}

TEST_F(EmbeddingBagTest, RefusesWeightsThatDoNotFit) {
  const Table table = make(kRows, 3);
  auto bag = over(table);
  const torch::Tensor some = ids({1, 2});
  EXPECT_THAT(text_of<c10::ValueError>([&] { bag->forward(some, ids({0}), torch::ones({3})); }),
              AllOf(HasSubstr("[3]"), HasSubstr("[2]")));
  EXPECT_THAT(text_of<c10::TypeError>([&] { bag->forward(some, ids({0}), torch::ones({2}, torch::kFloat64)); }),
              AllOf(HasSubstr("Float"), HasSubstr("Double")));
  EXPECT_THAT(text_of<c10::ValueError>([&] { bag->forward(some, ids({0}), torch::ones({2}).to(torch::kMeta)); }),
              HasSubstr("meta"));
  for (const Mode mode : {Mode::kMean, Mode::kMax})
    EXPECT_THAT(
        text_of<c10::NotImplementedError>([&] { over(table, options_of(mode))->forward(some, ids({0}), torch::ones({2})); }),
        HasSubstr("kSum"));
  EXPECT_THAT(text_of<c10::TypeError>([&] { over(make(kRows, 3, {}, DType::kInt32)); }), HasSubstr("int32"));
  EXPECT_THAT(text_of<c10::ValueError>([&] { over(table, options_of(Mode::kMax).scale_grad_by_freq(true)); }), HasSubstr("kMax"));
}

TEST_F(EmbeddingBagTest, GradientsAreTorchs) {
  // Every mode, with and without padding, against torch's own bags over the same weight.
  for (const Mode mode : {Mode::kSum, Mode::kMean, Mode::kMax}) {
    for (const bool padded : {false, true}) {
      const Table table = make(kRows, 4, Sgd{.lr = 1}, DType::kFloat64);
      auto options = options_of(mode);
      auto theirs_options = torch::nn::EmbeddingBagFromPretrainedOptions().freeze(false);
      theirs_options.mode(options.mode());
      if (padded) {
        options.padding_idx(-2);
        theirs_options.padding_idx(kRows - 2);
      }
      auto ours = over(table, options);
      auto theirs = torch::nn::EmbeddingBag::from_pretrained(weights(table), theirs_options);
      // Repeated ids within a bag and across bags, an empty bag, and one of padding alone.
      const torch::Tensor some = ids({1, 1, kRows - 2, 5, 1, kRows - 2, kRows - 2, 7, 5});
      const torch::Tensor starts = ids({0, 3, 5, 5, 7});
      const torch::Tensor upstream = torch::randn({5, 4}, torch::kFloat64);
      const torch::Tensor out = ours->forward(some, starts);
      const torch::Tensor wanted = theirs->forward(some, starts);
      EXPECT_TRUE(close(out.detach(), wanted.detach(), 1e-12, 1e-12));
      out.backward(upstream);
      wanted.backward(upstream);
      const torch::Tensor theirs_grad = theirs->weight.grad();
      EXPECT_TRUE(close(ours->grad().to_dense(), theirs_grad, 1e-12, 1e-12))
          << "mode " << static_cast<int>(mode) << (padded ? ", padded" : "");
    }
  }
}

TEST_F(EmbeddingBagTest, GradientsAreDividedByHowOftenAnIdIsThere) {
  // Not against torch: its bags (2.11, CPU) divide those of a row by how often another id is there.
  for (const Mode mode : {Mode::kSum, Mode::kMean}) {
    const Table table = make(kRows, 4, Sgd{.lr = 1}, DType::kFloat64);
    auto plain = over(table, options_of(mode));
    auto scaled = over(table, options_of(mode).scale_grad_by_freq(true));
    const torch::Tensor some = ids({1, 1, 3, 5, 1, 5, 7});
    const torch::Tensor starts = ids({0, 3, 5});
    const torch::Tensor upstream = torch::randn({3, 4}, torch::kFloat64);
    plain->forward(some, starts).backward(upstream);
    scaled->forward(some, starts).backward(upstream);
    const torch::Tensor counts = torch::bincount(some, {}, kRows).clamp_min(1).unsqueeze(1);
    EXPECT_TRUE(close(scaled->grad().to_dense(), plain->grad().to_dense() / counts, 1e-12, 1e-12));
  }
}

TEST_F(EmbeddingBagTest, GradientsAreThoseOfFiniteDifferences) {
  Table table = make(6, 3, Sgd{.lr = 1}, DType::kFloat64);
  const torch::Tensor some = ids({0, 1, 1, 5, 2});
  const torch::Tensor starts = ids({0, 3, 3});
  torch::Tensor scale = torch::rand({5}, torch::TensorOptions(torch::kFloat64).requires_grad(true));
  const auto loss = [&](nn::EmbeddingBag& bag, const torch::Tensor& weight) {
    return (bag->forward(some, starts, weight).sin() * torch::arange(1, 10, torch::kFloat64).view({3, 3})).sum();
  };
  for (const Mode mode : {Mode::kSum, Mode::kMean, Mode::kMax}) {
    auto bag = over(table, options_of(mode));
    const torch::Tensor weight = mode == Mode::kSum ? scale : torch::Tensor();
    loss(bag, weight).backward();
    const torch::Tensor numeric = numeric_gradient(table, [&] { return loss(bag, weight).item<double>(); });
    EXPECT_TRUE(close(bag->grad().to_dense(), numeric, 1e-6, 1e-8)) << static_cast<int>(mode);
  }
  auto bag = over(table);
  torch::Tensor numeric = torch::zeros({5}, torch::kFloat64);
  for (std::int64_t i = 0; i < 5; ++i) {
    const torch::Tensor step = torch::zeros({5}, torch::kFloat64);
    step[i] = 1e-6;
    numeric[i] = (loss(bag, scale.detach() + step) - loss(bag, scale.detach() - step)).item<double>() / 2e-6;
  }
  EXPECT_TRUE(close(scale.grad(), numeric, 1e-6, 1e-8));
}

TEST_F(EmbeddingBagTest, IsMadeOfATensor) {
  const torch::Tensor rows = torch::randn({7, 3});
  auto frozen = nn::EmbeddingBag::from_pretrained(store(), "frozen", rows,
                                                  torch::nn::EmbeddingBagFromPretrainedOptions().mode(torch::kMax));
  EXPECT_FALSE(frozen->anchor().requires_grad());
  EXPECT_TRUE(same(frozen->forward(ids({1, 4}).view({1, 2})), std::get<0>(rows.index({ids({1, 4})}).max(0)).unsqueeze(0)));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                nn::EmbeddingBag::from_pretrained(store(), "refused", rows,
                                                  torch::nn::EmbeddingBagFromPretrainedOptions().padding_idx(7));
              }),
              HasSubstr("Padding_idx"));
  EXPECT_FALSE(store().contains("refused"));
}

TEST_F(EmbeddingBagTest, StandsInAnyModuleWithItsDefaults) {
  const Table table = make(kRows, 3);
  torch::nn::AnyModule any(over(table));
  const torch::Tensor some = torch::randint(0, kRows, {2, 3}, torch::kInt64);
  EXPECT_TRUE(same(any.forward(some).detach(), over(table)->forward(some).detach()));
}

}  // namespace
}  // namespace embermap
