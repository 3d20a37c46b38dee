#include "nn/embedding.hpp"

#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "nn/table_optimizer.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class EmbeddingTest : public TableTest {
 protected:
  nn::Embedding over(const Table& table, const nn::EmbeddingOptions& options = {}) { return nn::Embedding(table, options); }
};

class EmbeddingOfDType : public EmbeddingTest, public testing::WithParamInterface<DType> {};

TEST_P(EmbeddingOfDType, GivesRowsInTheShapeOfTheIds) {
  const Table table = make(37, 5, {}, GetParam());
  const torch::Tensor all = weights(table);
  auto embedding = over(table);
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{}, {1}, {33}, {2, 3}, {4, 1, 2}, {0}, {0, 5}, {3, 0}}) {
    const torch::Tensor some = torch::randint(0, 37, shape, torch::kInt64);
    const torch::Tensor rows = embedding->forward(some);
    EXPECT_TRUE(same(rows, torch::embedding(all, some))) << "shape " << some.sizes();
    EXPECT_FALSE(rows.requires_grad());
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, EmbeddingOfDType,
                         testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8,
                                         DType::kUInt8, DType::kInt32, DType::kInt64),
                         named_by_dtype);

TEST_F(EmbeddingTest, TakesIntegersOfEveryWidth) {
  const Table table = make(120, 3);
  auto embedding = over(table);
  const torch::Tensor wanted = torch::embedding(weights(table), ids({0, 119, 7, 7}));
  for (const auto type :
       {torch::kInt8, torch::kUInt8, torch::kInt16, torch::kUInt16, torch::kInt32, torch::kUInt32, torch::kInt64, torch::kUInt64})
    EXPECT_TRUE(same(embedding->forward(ids({0, 119, 7, 7}).to(type)).detach(), wanted)) << type;
}

TEST_F(EmbeddingTest, TakesStridedIds) {
  const Table table = make(50, 4);
  const torch::Tensor some = torch::randint(0, 50, {6, 8}, torch::kInt64);
  const torch::Tensor strided = some.t().slice(0, 1, 8, 3);
  EXPECT_TRUE(same(over(table)->forward(strided).detach(), torch::embedding(weights(table), strided.contiguous())));
}

TEST_F(EmbeddingTest, RefusesWhatIsNotIntegers) {
  auto embedding = over(make(10, 2));
  EXPECT_THAT(text_of<c10::TypeError>([&] {
                embedding->forward(torch::tensor({1.0F, 2.0F}));
              }),
              AllOf(HasSubstr("Embedding of table 'table0'"), HasSubstr("ids must be integers"), HasSubstr("Float")));
  EXPECT_THAT(text_of<c10::TypeError>([&] { embedding->forward(torch::empty({0})); }), HasSubstr("Float"));
  EXPECT_THAT(text_of<c10::TypeError>([&] { embedding->forward(torch::tensor({true})); }), HasSubstr("Bool"));
  EXPECT_THAT(text_of<c10::ValueError>([&] { embedding->forward(torch::Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(text_of<c10::ValueError>([&] { embedding->forward(ids({1, 2}).to_sparse()); }), HasSubstr("dense"));
}

TEST_F(EmbeddingTest, RefusesIdsOnAnotherKindOfDevice) {
  auto embedding = over(make(10, 2));
  EXPECT_THAT(text_of<c10::ValueError>([&] {
                embedding->forward(ids({1, 2}).to(torch::kMeta));
              }),
              AllOf(HasSubstr("'table0'"), HasSubstr("on meta"), HasSubstr("CUDA")));
}

TEST_F(EmbeddingTest, RefusesIdsOutsideTheTableAndGoesOn) {
  const Table table = make(10, 2);
  auto embedding = over(table);
  const torch::Tensor before = weights(table);
  for (const std::int64_t bad : {std::int64_t{10}, std::int64_t{-1}, std::int64_t{1} << 40, -(std::int64_t{1} << 40)}) {
    const torch::Tensor some = torch::zeros({4, 3}, torch::kInt64);
    some[2][1] = bad;
    try {
      embedding->forward(some);
      FAIL() << "no exception for " << bad;
    } catch (const c10::IndexError& e) {
      EXPECT_THAT(e.what(), AllOf(HasSubstr("table0"), HasSubstr(std::to_string(bad)), HasSubstr("10"), HasSubstr("7")));
    }
  }
  EXPECT_TRUE(embedding->pending().empty());
  EXPECT_TRUE(same(weights(table), before));
  EXPECT_TRUE(same(embedding->forward(ids({9})).detach(), before.slice(0, 9, 10)));
}

TEST_F(EmbeddingTest, NamesAnIdThatInt64CannotHold) {
  auto embedding = over(make(10, 2));
  const torch::Tensor big = ids({1, 2, -1}).view(torch::kUInt64);
  EXPECT_THAT(text_of<c10::ValueError>([&] { embedding->forward(big); }),
              AllOf(HasSubstr("ids[2]"), HasSubstr("18446744073709551615")));
}

TEST_F(EmbeddingTest, EveryIdOfAnEmptyTableIsRefused) {
  auto embedding = over(make(0, 2));
  EXPECT_EQ(embedding->forward(ids({})).sizes(), (std::vector<std::int64_t>{0, 2}));
  EXPECT_THROW(embedding->forward(ids({0})), c10::IndexError);
}

TEST_F(EmbeddingTest, BackwardKeepsIdsAndGradientsAndChangesNoRow) {
  const Table table = make(20, 3);
  const torch::Tensor before = weights(table);
  auto embedding = over(table);
  const torch::Tensor some = ids({4, 4, 19, 0}).view({2, 2});
  const torch::Tensor upstream = torch::randn({2, 2, 3});
  embedding->forward(some).backward(upstream);
  const auto pending = embedding->pending();
  ASSERT_EQ(pending.size(), 1U);
  EXPECT_TRUE(same(pending[0].ids, some.flatten()));
  EXPECT_TRUE(same(pending[0].gradients, upstream.view({4, 3})));
  EXPECT_TRUE(same(weights(table), before));
  EXPECT_EQ(table.step(), 0U);
}

TEST_F(EmbeddingTest, NothingOfTheTablesSizeIsMade) {
  auto embedding = over(make(1'000'000, 64));
  embedding->forward(ids({999'999})).sum().backward();
  ASSERT_EQ(embedding->parameters().size(), 1U);
  EXPECT_EQ(embedding->anchor().numel(), 1);
  EXPECT_EQ(embedding->anchor().grad().item<float>(), 0);
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_EQ(embedding->pending()[0].gradients.storage().nbytes(), 64U * sizeof(float));
}

TEST_F(EmbeddingTest, ForwardsOfOneBackwardAndLaterBackwardsAddUp) {
  auto embedding = over(make(20, 2));
  (embedding->forward(ids({1, 2})).sum() + embedding->forward(ids({2})).sum()).backward();
  embedding->forward(ids({3})).sum().backward();
  std::int64_t total = 0;
  for (const auto& batch : embedding->pending()) total += batch.ids.numel();
  EXPECT_EQ(total, 4);
  const torch::Tensor loss = embedding->forward(ids({5})).sum();
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_EQ(embedding->pending().size(), 5U);
}

TEST_F(EmbeddingTest, EmptyIdsHaveAnEmptyGradient) {
  auto embedding = over(make(20, 2));
  embedding->forward(ids({})).sum().backward();
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_EQ(embedding->pending()[0].gradients.sizes(), (std::vector<std::int64_t>{0, 2}));
}

TEST_F(EmbeddingTest, KeepsNothingWithoutGradients) {
  auto embedding = over(make(20, 2));
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(embedding->forward(ids({1})).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_FALSE(embedding->forward(ids({1})).requires_grad());
  }
  for (auto& parameter : embedding->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(embedding->forward(ids({1})).requires_grad());
  for (auto& parameter : embedding->parameters()) parameter.requires_grad_(true);
  EXPECT_TRUE(embedding->forward(ids({1})).requires_grad());
  EXPECT_TRUE(embedding->pending().empty());
}

TEST_F(EmbeddingTest, IsFrozenOverTablesThatAreNotTrained) {
  EXPECT_FALSE(over(make(5, 2, {}))->anchor().requires_grad());
  EXPECT_FALSE(over(make(5, 2, {}, DType::kInt32))->anchor().requires_grad());
  const Table trained = make(5, 2);
  EXPECT_TRUE(over(trained)->anchor().requires_grad());
  const std::string name = trained.name();
  const torch::Tensor before = weights(trained);
  reopen_for_reading();
  auto embedding = over(store().table(name));
  EXPECT_FALSE(embedding->anchor().requires_grad());
  EXPECT_TRUE(same(embedding->forward(ids({3})), before.slice(0, 3, 4)));
}

TEST_F(EmbeddingTest, GradientsOfOtherInputsLeaveTheTableAlone) {
  auto embedding = over(make(20, 2));
  const torch::Tensor scale = torch::ones({2}, torch::requires_grad());
  const torch::Tensor loss = (embedding->forward(ids({1, 2})) * scale).sum();
  torch::autograd::grad({loss}, {scale});
  EXPECT_TRUE(embedding->pending().empty());
}

TEST_F(EmbeddingTest, ABufferOfIdsMayBeRefilledAfterForward) {
  const Table table = make(20, 2);
  auto embedding = over(table);
  for (const auto type : {torch::kInt64, torch::kInt32}) {
    embedding->zero_grad();
    const torch::Tensor buffer = ids({1, 2}).to(type);
    const torch::Tensor first = embedding->forward(buffer);
    buffer.fill_(5);
    first.sum().backward();
    buffer.fill_(6);
    ASSERT_EQ(embedding->pending().size(), 1U);
    EXPECT_TRUE(same(embedding->pending()[0].ids, ids({1, 2})));
  }
}

TEST_F(EmbeddingTest, ChangingAGivenGradientLaterChangesNothing) {
  auto embedding = over(make(20, 2));
  const torch::Tensor upstream = torch::ones({1, 2});
  embedding->forward(ids({1})).backward(upstream);
  upstream.fill_(9);
  // Here the rows' gradient is a view of one that stays visible.
  const torch::Tensor rows = embedding->forward(ids({2}));
  const torch::Tensor flat = rows.view({2});
  flat.retain_grad();
  (flat * torch::ones({2})).sum().backward();
  flat.mutable_grad().fill_(9);
  const auto pending = embedding->pending();
  ASSERT_EQ(pending.size(), 2U);
  EXPECT_TRUE(same(pending[0].gradients, torch::ones({1, 2})));
  EXPECT_TRUE(same(pending[1].gradients, torch::ones({1, 2})));
}

TEST_F(EmbeddingTest, TakesStridedAndSparseGradients) {
  auto embedding = over(make(20, 4));
  const torch::Tensor strided = torch::randn({4, 3}).t();
  embedding->forward(ids({1, 2, 3})).backward(strided);
  torch::embedding(embedding->forward(ids({1, 2, 3})), ids({2, 2}), -1, false, /*sparse=*/true).sum().backward();
  const auto pending = embedding->pending();
  ASSERT_EQ(pending.size(), 2U);
  EXPECT_TRUE(pending[0].gradients.is_contiguous());
  EXPECT_TRUE(same(pending[0].gradients, strided.contiguous()));
  EXPECT_TRUE(same(pending[1].gradients, torch::tensor({0.0F, 0.0F, 2.0F}).unsqueeze(1).expand({3, 4}).contiguous()));
}

TEST_F(EmbeddingTest, PendingGradientsHoldNoGraph) {
  auto embedding = over(make(20, 2));
  const torch::Tensor rows = embedding->forward(ids({1}));
  const torch::Tensor loss = (rows * rows).sum();
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_FALSE(embedding->pending()[0].gradients.requires_grad());
  EXPECT_TRUE(same(embedding->pending()[0].gradients, (2 * rows).detach()));
}

TEST_F(EmbeddingTest, PendingGradientsAreDroppedByWhateverZeroesTheModulesGradients) {
  struct Model : torch::nn::Module {
    explicit Model(const nn::Embedding& over_table)
        : embedding{register_module("embedding", over_table)}, linear{register_module("linear", torch::nn::Linear(2, 1))} {}
    nn::Embedding embedding;
    torch::nn::Linear linear;
  } model(over(make(20, 2)));
  const auto count = [&](int backwards) {
    for (int i = 0; i < backwards; ++i) model.linear(model.embedding->forward(ids({1}))).sum().backward();
    return model.embedding->pending().size();
  };
  EXPECT_EQ(count(2), 2U);
  model.embedding->zero_grad();
  EXPECT_EQ(count(1), 1U);
  model.zero_grad(/*set_to_none=*/false);
  EXPECT_EQ(count(2), 2U);
  torch::optim::SGD dense(model.parameters(), torch::optim::SGDOptions(0.1));
  dense.step();
  dense.zero_grad();
  EXPECT_EQ(count(0), 0U);
  EXPECT_EQ(count(2), 2U);
  nn::TableOptimizer optimizer({model.embedding});
  torch::optim::Optimizer& any = optimizer;
  any.zero_grad();
  EXPECT_EQ(count(1), 1U);
  any.zero_grad();
  EXPECT_EQ(count(2), 2U) << "a backward after zero_grad() and before any look at the gradients";
}

TEST_F(EmbeddingTest, AGraphOutlivesItsModule) {
  auto embedding = over(make(20, 2));
  const torch::Tensor rows = embedding->forward(ids({1, 2}));
  embedding = nullptr;
  EXPECT_NO_THROW(rows.sum().backward());
}

TEST_F(EmbeddingTest, StandsInSequentialAndInAnyModule) {
  const Table table = make(20, 4);
  torch::nn::Sequential model(over(table), torch::nn::Linear(4, 2));
  EXPECT_EQ(model->forward(ids({1, 2, 3})).sizes(), (std::vector<std::int64_t>{3, 2}));
  torch::nn::AnyModule any(over(table));
  EXPECT_TRUE(same(any.forward(ids({7})).detach(), weights(table).slice(0, 7, 8)));
}

TEST_F(EmbeddingTest, SeesRowsAsTheyAreNow) {
  Table table = make(20, 2);
  auto embedding = over(table);
  const torch::Tensor rows = embedding->forward(ids({3})).detach();
  rows.fill_(100);
  EXPECT_FALSE(torch::equal(embedding->forward(ids({3})).detach(), rows)) << "what forward() gives is a copy";
  const std::vector<std::int64_t> three{3};
  table.scatter(three, {static_cast<const std::byte*>(rows.const_data_ptr()), rows.nbytes()});
  EXPECT_TRUE(same(embedding->forward(ids({3})).detach(), rows));
}

TEST_F(EmbeddingTest, SaysThatTheStoreIsClosed) {
  auto embedding = over(make(20, 2));
  store().close();
  EXPECT_THROW(embedding->forward(ids({1})), ClosedError);
  EXPECT_THROW(embedding->forward(ids({})), ClosedError);
}

TEST_F(EmbeddingTest, PrintsItsTable) {
  std::ostringstream text;
  text << *over(make(20, 2));
  EXPECT_EQ(text.str(), "embermap::nn::Embedding(table=table0, rows=20, dim=2, dtype=float32)");
}

TEST_F(EmbeddingTest, OptionsAreTorchs) {
  for (const bool scaled : {false, true}) {
    for (const std::optional<std::int64_t> padding : {std::optional<std::int64_t>(), std::optional<std::int64_t>(-3)}) {
      const Table table = make(20, 4, Sgd{.lr = 1}, DType::kFloat64);
      auto ours = over(table, nn::EmbeddingOptions().padding_idx(padding).scale_grad_by_freq(scaled));
      auto options = torch::nn::EmbeddingFromPretrainedOptions().freeze(false).scale_grad_by_freq(scaled);
      if (padding) options.padding_idx(17);
      auto theirs = torch::nn::Embedding::from_pretrained(weights(table), options);
      const torch::Tensor some = ids({1, 17, 1, 3, 17, 1}).view({2, 3});
      const torch::Tensor upstream = torch::randn({2, 3, 4}, torch::kFloat64);
      const torch::Tensor rows = ours->forward(some);
      EXPECT_TRUE(same(rows.detach(), theirs->forward(some).detach()));
      rows.backward(upstream);
      theirs->forward(some).backward(upstream);
      EXPECT_TRUE(close(ours->grad().to_dense(), theirs->weight.grad(), 1e-12, 1e-12));
    }
  }
}

TEST_F(EmbeddingTest, LongRowsAreShortenedInTheTable) {
  for (const double p : {2.0, 1.0}) {
    const Table table = make(20, 4);
    const torch::Tensor before = weights(table);
    auto theirs = torch::nn::Embedding::from_pretrained(before.clone(),
                                                        torch::nn::EmbeddingFromPretrainedOptions().max_norm(1.5).norm_type(p));
    const torch::Tensor some = ids({4, 5, 4, 6, 7, 8});
    auto ours = over(table, nn::EmbeddingOptions().max_norm(1.5).norm_type(p));
    EXPECT_TRUE(close(ours->forward(some).detach(), theirs->forward(some), 1e-6, 1e-6));
    EXPECT_TRUE(close(weights(table), theirs->weight, 1e-6, 1e-6));
    EXPECT_FALSE(torch::equal(weights(table), before));
    EXPECT_TRUE(same(weights(table).slice(0, 9), before.slice(0, 9))) << "rows that were not looked up";
  }
}

TEST_F(EmbeddingTest, RefusesOptionsThatDoNotFit) {
  const Table table = make(20, 4);
  for (const std::int64_t bad : {20, -21})
    EXPECT_THAT(
        text_of<c10::ValueError>([&] { over(table, nn::EmbeddingOptions().padding_idx(bad)); }),
        AllOf(HasSubstr("Padding_idx must be within num_embeddings"), HasSubstr(std::to_string(bad)), HasSubstr("table0")));
  for (const double bad : {0.0, -1.0, std::nan("")})
    EXPECT_THAT(text_of<c10::ValueError>([&] { over(table, nn::EmbeddingOptions().max_norm(bad)); }), HasSubstr("max_norm"));
}

TEST_F(EmbeddingTest, GradientsAreThoseOfFiniteDifferences) {
  const Table table = make(6, 3, Sgd{.lr = 1}, DType::kFloat64);
  auto embedding = over(table);
  // The table twice in one graph, once through the other look-up's values, with repeated ids.
  const auto loss = [&] {
    const torch::Tensor a = embedding->forward(ids({0, 2, 2, 5}));
    const torch::Tensor b = embedding->forward(ids({2, 1}));
    return (a.sin() * torch::arange(12, torch::kFloat64).view({4, 3})).sum() + b.mm(a.t()).sin().sum();
  };
  loss().backward();
  EXPECT_EQ(embedding->pending().size(), 2U);
  EXPECT_TRUE(close(embedding->grad().to_dense(), numeric_gradient(table, [&] { return loss().item<double>(); }), 1e-6, 1e-7));
}

TEST_F(EmbeddingTest, ABackwardThatFailsLeavesNoGradients) {
  struct Fail : torch::autograd::Function<Fail> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
      throw std::runtime_error("no gradient");
    }
  };
  auto embedding = over(make(20, 2));
  // The second look-up's gradient arrives, the first one's never does, so the anchor has none.
  const torch::Tensor loss = Fail::apply(embedding->forward(ids({1}))).sum() + embedding->forward(ids({2})).sum();
  EXPECT_THROW(loss.backward(), std::runtime_error);
  EXPECT_TRUE(embedding->pending().empty());
  embedding->forward(ids({3})).sum().backward();
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_TRUE(same(embedding->pending()[0].ids, ids({3})));
}

TEST_F(EmbeddingTest, IsMadeOfATensor) {
  const torch::Tensor rows = torch::randn({3, 7}, torch::kFloat64).t();  // strided
  auto frozen = nn::Embedding::from_pretrained(store(), "frozen", rows);
  EXPECT_FALSE(frozen->anchor().requires_grad());
  EXPECT_TRUE(same(frozen->forward(torch::arange(7)), rows.contiguous()));
  auto trained =
      nn::Embedding::from_pretrained(store(), "trained", rows.to(torch::kFloat32),
                                     torch::nn::EmbeddingFromPretrainedOptions().freeze(false).padding_idx(2), Sgd{.lr = 1});
  EXPECT_TRUE(trained->anchor().requires_grad());
  trained->forward(ids({1, 2})).sum().backward();
  nn::TableOptimizer({trained}).step();
  EXPECT_TRUE(close(weights(trained->table())[1], rows[1].to(torch::kFloat32) - 1, 1e-6, 1e-6));
  EXPECT_TRUE(same(weights(trained->table())[2], rows[2].to(torch::kFloat32)));

  const auto refuse = [&](const torch::Tensor& what, const torch::nn::EmbeddingFromPretrainedOptions& options = {}) {
    return text_of<c10::Error>([&] { nn::Embedding::from_pretrained(store(), "refused", what, options); });
  };
  EXPECT_THAT(refuse(torch::ones({3})), HasSubstr("expected to be 2-dimensional"));
  EXPECT_THAT(refuse(torch::ones({3, 2}, torch::kComplexFloat)), HasSubstr("ComplexFloat"));
  EXPECT_THAT(refuse(rows, torch::nn::EmbeddingFromPretrainedOptions().freeze(false)), HasSubstr("need an optimizer"));
  EXPECT_THAT(refuse(rows, torch::nn::EmbeddingFromPretrainedOptions().padding_idx(7)), HasSubstr("Padding_idx"));
  EXPECT_FALSE(store().contains("refused"));
}

TEST_F(EmbeddingTest, ACloneIsOverTheSameTableAndHasNoGradients) {
  auto embedding = over(make(20, 2), nn::EmbeddingOptions().padding_idx(1));
  embedding->anchor().requires_grad_(true);
  embedding->forward(ids({3})).sum().backward();
  const auto copy = std::dynamic_pointer_cast<nn::EmbeddingImpl>(embedding->clone());
  ASSERT_TRUE(copy);
  EXPECT_TRUE(copy->pending().empty());
  EXPECT_EQ(copy->options().padding_idx(), 1);
  copy->forward(ids({4})).sum().backward();
  EXPECT_EQ(copy->pending().size(), 1U);
  EXPECT_EQ(embedding->pending().size(), 1U);
  EXPECT_TRUE(copy->table().impl() == embedding->table().impl());
  embedding->anchor().requires_grad_(false);
  EXPECT_FALSE(std::dynamic_pointer_cast<nn::EmbeddingImpl>(embedding->clone())->anchor().requires_grad());
}

TEST_F(EmbeddingTest, ParametersOfAModelAreTablesOrDense) {
  struct Model : torch::nn::Module {
    explicit Model(const nn::Embedding& e)
        : a{register_module("a", e)}, b{register_module("b", e)}, linear{register_module("linear", torch::nn::Linear(2, 1))} {}
    nn::Embedding a, b;
    torch::nn::Linear linear;
  } model(over(make(20, 2)));
  ASSERT_EQ(nn::table_parameters(model).size(), 1U);
  EXPECT_TRUE(nn::table_parameters(model)[0].is_same(model.a->anchor()));
  EXPECT_EQ(nn::dense_parameters(model).size(), 2U);
}

TEST_F(EmbeddingTest, ReadsAheadWhatWillBeLookedUp) {
  auto embedding = over(make(1000, 64));
  EXPECT_TRUE(embedding->prefetch(torch::arange(1000).view({10, 100})).wait());
  const auto before = embedding->table().stats().misses;
  embedding->forward(torch::arange(1000));
  EXPECT_EQ(embedding->table().stats().misses, before);
  EXPECT_THAT(text_of<c10::IndexError>([&] { embedding->prefetch(ids({1000})); }), HasSubstr("1000"));
  EXPECT_THAT(text_of<c10::TypeError>([&] { embedding->prefetch(torch::ones({1})); }), HasSubstr("integers"));
}

TEST_F(EmbeddingTest, IsSavedWithoutItsRows) {
  auto embedding = over(make(100'000, 8));
  std::stringstream archive;
  torch::save(embedding, archive);
  EXPECT_LT(archive.str().size(), 10'000U);
  EXPECT_NO_THROW(torch::load(embedding, archive));
  EXPECT_TRUE(embedding->forward(ids({1})).requires_grad());
}

}  // namespace
}  // namespace embermap
