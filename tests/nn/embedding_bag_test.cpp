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
using Mode = EmbeddingBagOptions::Mode;

constexpr std::int64_t kRows = 30;

class EmbeddingBagTest : public TableTest {
 protected:
  std::shared_ptr<EmbeddingBag> over(const Table& table, EmbeddingBagOptions options = {.mode = Mode::kSum}) {
    return std::make_shared<EmbeddingBag>(table, options);
  }
};

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
    out.push_back(sum);
  }
  return torch::stack(out).to(all.scalar_type());
}

class BagsOf : public EmbeddingBagTest, public testing::WithParamInterface<std::tuple<DType, Mode>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  Mode mode() const { return std::get<1>(GetParam()); }
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
  const auto bag = over(table, {.mode = mode()});
  const torch::Tensor some = torch::randint(0, kRows, {11}, torch::kInt64);
  const std::vector<std::int64_t> starts{0, 0, 3, 4, 11, 11};  // empty bags at both ends and one of a single id
  const torch::Tensor wanted = bags(weights(table), some, starts, mode());
  EXPECT_TRUE(near(bag->forward(some, ids(starts)).detach(), wanted));
  EXPECT_TRUE(near(bag->forward(some.to(torch::kInt32), ids(starts).to(torch::kInt32)).detach(), wanted));
  std::vector<std::int64_t> ends = starts;
  ends.push_back(11);
  EXPECT_TRUE(near(over(table, {.mode = mode(), .include_last_offset = true})->forward(some, ids(ends)).detach(), wanted));
}

TEST_P(BagsOf, RowsOfTwoDimensionalIds) {
  const Table table = make(kRows, 5, Sgd{.lr = 1}, dtype());
  const torch::Tensor some = torch::randint(0, kRows, {4, 6}, torch::kInt64);
  EXPECT_TRUE(
      near(over(table, {.mode = mode()})->forward(some).detach(), bags(weights(table), some.flatten(), {0, 6, 12, 18}, mode())));
}

TEST_P(BagsOf, NoIdsAndNoBags) {
  const Table table = make(kRows, 5, Sgd{.lr = 1}, dtype());
  const auto bag = over(table, {.mode = mode()});
  const auto type = torch_dtype(dtype());
  EXPECT_TRUE(same(bag->forward(ids({}), ids({0, 0, 0})).detach(), torch::zeros({3, 5}, type)));
  EXPECT_TRUE(same(bag->forward(ids({}), ids({})).detach(), torch::zeros({0, 5}, type)));
  EXPECT_TRUE(same(bag->forward(torch::empty({3, 0}, torch::kInt64)).detach(), torch::zeros({3, 5}, type)));
  EXPECT_TRUE(same(bag->forward(torch::empty({0, 3}, torch::kInt64)).detach(), torch::zeros({0, 5}, type)));
  bag->forward(ids({}), ids({0, 0})).sum().backward();
  TableOptimizer({bag}).step();
}

TEST_P(BagsOf, GradientsReachTheTable) {
  const Table table = make(kRows, 5, Sgd{.lr = 0.5}, dtype());
  const auto bag = over(table, {.mode = mode()});
  const torch::Tensor before = weights(table);
  const std::vector<std::int64_t> starts{0, 4, 4};
  const torch::Tensor some = ids({1, 2, 2, 3, 2, 29});
  const torch::Tensor upstream = torch::randn({3, 5}).to(before.scalar_type());
  bag->forward(some, ids(starts)).backward(upstream);
  TableOptimizer({bag}).step();
  const torch::Tensor leaf = before.clone().requires_grad_();
  bags(leaf, some, starts, mode()).backward(upstream);
  EXPECT_TRUE(near(weights(table), (before - 0.5 * leaf.grad()).detach()));
}

INSTANTIATE_TEST_SUITE_P(DTypesAndModes, BagsOf,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16),
                                          testing::Values(Mode::kSum, Mode::kMean)),
                         [](const auto& test) {
                           return std::string(dtype_name(std::get<0>(test.param))) +
                                  (std::get<1>(test.param) == Mode::kSum ? "_sum" : "_mean");
                         });

class WeightedBagsOf : public EmbeddingBagTest, public testing::WithParamInterface<DType> {};

TEST_P(WeightedBagsOf, WeightsMultiplyRowsAndReceiveGradients) {
  const Table table = make(kRows, 5, Sgd{.lr = 0.5}, GetParam());
  const auto bag = over(table);
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
  TableOptimizer({bag}).step();
  EXPECT_TRUE(close(weights(table), (before - 0.5 * leaf.grad()).detach(), unit, unit));

  const torch::Tensor flat = bag->forward(some.flatten(), ids({0, 4, 8}), scale.detach().flatten());
  EXPECT_EQ(flat.sizes(), (std::vector<std::int64_t>{3, 5}));
}

INSTANTIATE_TEST_SUITE_P(DTypes, WeightedBagsOf,
                         testing::Values(DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16), named_by_dtype);

TEST_F(EmbeddingBagTest, TrainsAsTorchsSparseBags) {
  const Table table = make(kRows, 8, Adagrad{.lr = 0.1});
  const auto bag = over(table, {.mode = Mode::kMean});
  auto reference = torch::nn::EmbeddingBag::from_pretrained(
      weights(table), torch::nn::EmbeddingBagFromPretrainedOptions().freeze(false).sparse(true).mode(torch::kMean));
  TableOptimizer ours({bag});
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
  const auto bag = over(table);
  const auto embedding = std::make_shared<Embedding>(table);
  TableOptimizer optimizer({embedding, bag});
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
  const auto bag = over(make(kRows, 3));
  const auto refuse = [&](const torch::Tensor& some, const torch::Tensor& offsets) {
    return text_of<InvalidArgument>([&] { bag->forward(some, offsets); });
  };
  EXPECT_THAT(refuse(ids({1, 2}), {}), AllOf(HasSubstr("EmbeddingBag of table 'table0'"), HasSubstr("need offsets")));
  EXPECT_THAT(refuse(ids({1, 2}), ids({1})), HasSubstr("offsets[0] is 1, not 0"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 2, 1})), HasSubstr("offsets[2] is 1, less than the 2 before it"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 3})), HasSubstr("offsets[1] is 3, beyond the 2 ids"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, -1})), HasSubstr("offsets[1] is -1"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({})), HasSubstr("2 ids"));
  EXPECT_THAT(refuse(ids({1, 2}), ids({0, 1}).view({1, 2})), HasSubstr("[1, 2]"));
  EXPECT_THAT(refuse(ids({1, 2}).view({1, 2}), ids({0})), HasSubstr("[1, 2]"));
  EXPECT_THAT(refuse(torch::tensor(std::int64_t{1}), ids({0})), HasSubstr("1 or 2 dimensions"));
  EXPECT_THAT(refuse(ids({1, 2}).view({1, 1, 2}), {}), HasSubstr("1 or 2 dimensions"));
  EXPECT_THAT(text_of<DTypeError>([&] { bag->forward(ids({1}), torch::tensor({0.0F})); }), HasSubstr("offsets must be integers"));
  EXPECT_THAT(text_of<DTypeError>([&] { bag->forward(torch::tensor({1.0F}), ids({0})); }), HasSubstr("ids must be integers"));
  const auto with_last = over(bag->table(), {.mode = Mode::kSum, .include_last_offset = true});
  EXPECT_THAT(text_of<InvalidArgument>([&] { with_last->forward(ids({1, 2}), ids({0, 1})); }), HasSubstr("the last offset is 1"));
  EXPECT_THAT(text_of<InvalidArgument>([&] { with_last->forward(ids({}), ids({})); }), HasSubstr("last offset"));
  EXPECT_THROW(bag->forward(ids({1, kRows}), ids({0})), RowIdError);
  EXPECT_TRUE(bag->pending().empty());
}

TEST_F(EmbeddingBagTest, RefusesWeightsThatDoNotFit) {
  const Table table = make(kRows, 3);
  const auto bag = over(table);
  const torch::Tensor some = ids({1, 2});
  EXPECT_THAT(text_of<InvalidArgument>([&] { bag->forward(some, ids({0}), torch::ones({3})); }),
              AllOf(HasSubstr("[3]"), HasSubstr("[2]")));
  EXPECT_THAT(text_of<DTypeError>([&] { bag->forward(some, ids({0}), torch::ones({2}, torch::kFloat64)); }),
              AllOf(HasSubstr("Float"), HasSubstr("Double")));
  EXPECT_THAT(text_of<InvalidArgument>([&] { bag->forward(some, ids({0}), torch::ones({2}).to(torch::kMeta)); }),
              HasSubstr("meta"));
  EXPECT_THAT(text_of<InvalidArgument>([&] { over(table, {.mode = Mode::kMean})->forward(some, ids({0}), torch::ones({2})); }),
              HasSubstr("sums"));
  EXPECT_THAT(text_of<DTypeError>([&] { over(make(kRows, 3, {}, DType::kInt32)); }), HasSubstr("int32"));
}

TEST_F(EmbeddingBagTest, StandsInAnyModuleWithItsDefaults) {
  const Table table = make(kRows, 3);
  torch::nn::AnyModule any(over(table));
  const torch::Tensor some = torch::randint(0, kRows, {2, 3}, torch::kInt64);
  EXPECT_TRUE(same(any.forward(some).detach(), over(table)->forward(some).detach()));
}

}  // namespace
}  // namespace embermap
