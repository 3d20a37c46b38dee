#include "nn/embedding.hpp"

#include <torch/torch.h>

#include <sstream>

#include "nn/table_optimizer.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class EmbeddingTest : public TableTest {
 protected:
  std::shared_ptr<Embedding> over(const Table& table) { return std::make_shared<Embedding>(table); }
};

class EmbeddingOfDType : public EmbeddingTest, public testing::WithParamInterface<DType> {};

TEST_P(EmbeddingOfDType, GivesRowsInTheShapeOfTheIds) {
  const Table table = make(37, 5, {}, GetParam());
  const torch::Tensor all = weights(table);
  const auto embedding = over(table);
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
  const auto embedding = over(table);
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
  const auto embedding = over(make(10, 2));
  EXPECT_THAT(text_of<DTypeError>([&] {
                embedding->forward(torch::tensor({1.0F, 2.0F}));
              }),
              AllOf(HasSubstr("Embedding of table 'table0'"), HasSubstr("ids must be integers"), HasSubstr("Float")));
  EXPECT_THAT(text_of<DTypeError>([&] { embedding->forward(torch::empty({0})); }), HasSubstr("Float"));
  EXPECT_THAT(text_of<DTypeError>([&] { embedding->forward(torch::tensor({true})); }), HasSubstr("Bool"));
  EXPECT_THAT(text_of<InvalidArgument>([&] { embedding->forward(torch::Tensor()); }), HasSubstr("undefined"));
  EXPECT_THAT(text_of<InvalidArgument>([&] { embedding->forward(ids({1, 2}).to_sparse()); }), HasSubstr("dense"));
}

TEST_F(EmbeddingTest, RefusesIdsOnAnotherKindOfDevice) {
  const auto embedding = over(make(10, 2));
  EXPECT_THAT(text_of<InvalidArgument>([&] {
                embedding->forward(ids({1, 2}).to(torch::kMeta));
              }),
              AllOf(HasSubstr("'table0'"), HasSubstr("on meta"), HasSubstr("CUDA")));
}

TEST_F(EmbeddingTest, RefusesIdsOutsideTheTableAndGoesOn) {
  const Table table = make(10, 2);
  const auto embedding = over(table);
  const torch::Tensor before = weights(table);
  for (const std::int64_t bad : {std::int64_t{10}, std::int64_t{-1}, std::int64_t{1} << 40, -(std::int64_t{1} << 40)}) {
    const torch::Tensor some = torch::zeros({4, 3}, torch::kInt64);
    some[2][1] = bad;
    try {
      embedding->forward(some);
      FAIL() << "no exception for " << bad;
    } catch (const RowIdError& e) {
      EXPECT_EQ(e.id(), bad);
      EXPECT_EQ(e.position(), 7U);
      EXPECT_THAT(e.what(), AllOf(HasSubstr("table0"), HasSubstr(std::to_string(bad)), HasSubstr("10")));
    }
  }
  EXPECT_TRUE(embedding->pending().empty());
  EXPECT_TRUE(same(weights(table), before));
  EXPECT_TRUE(same(embedding->forward(ids({9})).detach(), before.slice(0, 9, 10)));
}

TEST_F(EmbeddingTest, NamesAnIdThatInt64CannotHold) {
  const auto embedding = over(make(10, 2));
  const torch::Tensor big = ids({1, 2, -1}).view(torch::kUInt64);
  EXPECT_THAT(text_of<InvalidArgument>([&] { embedding->forward(big); }),
              AllOf(HasSubstr("ids[2]"), HasSubstr("18446744073709551615")));
}

TEST_F(EmbeddingTest, EveryIdOfAnEmptyTableIsRefused) {
  const auto embedding = over(make(0, 2));
  EXPECT_EQ(embedding->forward(ids({})).sizes(), (std::vector<std::int64_t>{0, 2}));
  EXPECT_THROW(embedding->forward(ids({0})), RowIdError);
}

TEST_F(EmbeddingTest, BackwardKeepsIdsAndGradientsAndChangesNoRow) {
  const Table table = make(20, 3);
  const torch::Tensor before = weights(table);
  const auto embedding = over(table);
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
  const auto embedding = over(make(1'000'000, 64));
  embedding->forward(ids({999'999})).sum().backward();
  ASSERT_EQ(embedding->parameters().size(), 1U);
  EXPECT_EQ(embedding->anchor().numel(), 0);
  EXPECT_EQ(embedding->anchor().grad().numel(), 0);
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_EQ(embedding->pending()[0].gradients.storage().nbytes(), 64U * sizeof(float));
}

TEST_F(EmbeddingTest, ForwardsOfOneBackwardAndLaterBackwardsAddUp) {
  const auto embedding = over(make(20, 2));
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
  const auto embedding = over(make(20, 2));
  embedding->forward(ids({})).sum().backward();
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_EQ(embedding->pending()[0].gradients.sizes(), (std::vector<std::int64_t>{0, 2}));
}

TEST_F(EmbeddingTest, KeepsNothingWithoutGradients) {
  const auto embedding = over(make(20, 2));
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
  const auto embedding = over(store().table(name));
  EXPECT_FALSE(embedding->anchor().requires_grad());
  EXPECT_TRUE(same(embedding->forward(ids({3})), before.slice(0, 3, 4)));
}

TEST_F(EmbeddingTest, GradientsOfOtherInputsLeaveTheTableAlone) {
  const auto embedding = over(make(20, 2));
  const torch::Tensor scale = torch::ones({2}, torch::requires_grad());
  const torch::Tensor loss = (embedding->forward(ids({1, 2})) * scale).sum();
  torch::autograd::grad({loss}, {scale});
  EXPECT_TRUE(embedding->pending().empty());
}

TEST_F(EmbeddingTest, ABufferOfIdsMayBeRefilledAfterForward) {
  const Table table = make(20, 2);
  const auto embedding = over(table);
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
  const auto embedding = over(make(20, 2));
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
  const auto embedding = over(make(20, 4));
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
  const auto embedding = over(make(20, 2));
  const torch::Tensor rows = embedding->forward(ids({1}));
  const torch::Tensor loss = (rows * rows).sum();
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  ASSERT_EQ(embedding->pending().size(), 1U);
  EXPECT_FALSE(embedding->pending()[0].gradients.requires_grad());
  EXPECT_TRUE(same(embedding->pending()[0].gradients, (2 * rows).detach()));
}

TEST_F(EmbeddingTest, PendingGradientsAreDroppedByWhateverZeroesTheModulesGradients) {
  struct Model : torch::nn::Module {
    explicit Model(const std::shared_ptr<Embedding>& over_table)
        : embedding{register_module("embedding", over_table)}, linear{register_module("linear", torch::nn::Linear(2, 1))} {}
    std::shared_ptr<Embedding> embedding;
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
  TableOptimizer optimizer({model.embedding});
  torch::optim::Optimizer& any = optimizer;
  any.zero_grad();
  EXPECT_EQ(count(1), 1U);
  any.zero_grad();
  EXPECT_EQ(count(2), 2U) << "a backward after zero_grad() and before any look at the gradients";
}

TEST_F(EmbeddingTest, AGraphOutlivesItsModule) {
  auto embedding = over(make(20, 2));
  const torch::Tensor rows = embedding->forward(ids({1, 2}));
  embedding.reset();
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
  const auto embedding = over(table);
  const torch::Tensor rows = embedding->forward(ids({3})).detach();
  rows.fill_(100);
  EXPECT_FALSE(torch::equal(embedding->forward(ids({3})).detach(), rows)) << "what forward() gives is a copy";
  const std::vector<std::int64_t> three{3};
  table.scatter(three, {static_cast<const std::byte*>(rows.const_data_ptr()), rows.nbytes()});
  EXPECT_TRUE(same(embedding->forward(ids({3})).detach(), rows));
}

TEST_F(EmbeddingTest, SaysThatTheStoreIsClosed) {
  const auto embedding = over(make(20, 2));
  store().close();
  EXPECT_THROW(embedding->forward(ids({1})), ClosedError);
  EXPECT_THROW(embedding->forward(ids({})), ClosedError);
}

TEST_F(EmbeddingTest, PrintsItsTable) {
  std::ostringstream text;
  text << *over(make(20, 2));
  EXPECT_EQ(text.str(), "embermap::Embedding(table=table0, rows=20, dim=2, dtype=float32)");
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
