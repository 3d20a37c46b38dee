#include "nn/embedding_collection.hpp"

#include <torch/torch.h>

#include "nn/table_optimizer.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Modules = nn::EmbeddingCollectionImpl::Modules;

class EmbeddingCollectionTest : public TableTest {};

TEST_F(EmbeddingCollectionTest, GivesWhatItsModulesGive) {
  const Table users = make(30, 3);
  const Table items = make(20, 4);
  nn::EmbeddingCollection tables(Modules{{"user", users},
                                         {"item", nn::Embedding(items)},
                                         {"history", nn::EmbeddingBag(items, nn::EmbeddingBagOptions().mode(torch::kSum))}});
  EXPECT_EQ(tables->size(), 3U);
  const torch::Tensor flat = ids({1, 2, 3});
  const torch::Tensor scale = torch::tensor({0.5F, 2.0F, 1.0F});
  const auto rows = tables->forward({{"history", {flat, ids({0, 2}), scale}}, {"user", ids({7, 8}).view({1, 2})}});
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows.keys(), (std::vector<std::string>{"history", "user"})) << "in the order that was given";
  EXPECT_TRUE(same(rows["user"].detach(), torch::embedding(weights(users), ids({7, 8}).view({1, 2}))));
  const torch::Tensor scaled = torch::embedding(weights(items), flat) * scale.unsqueeze(1);
  EXPECT_TRUE(close(rows["history"].detach(), torch::stack({scaled.slice(0, 0, 2).sum(0), scaled[2]}), 1e-6, 1e-6));
  EXPECT_EQ(tables->named_parameters()["features.user.anchor"].numel(), 1) << "as Python names it";
}

TEST_F(EmbeddingCollectionTest, TrainsItsTables) {
  const Table items = make(20, 4, Sgd{.lr = 1});
  const torch::Tensor before = weights(items);
  nn::Embedding shared(items);
  nn::EmbeddingCollection tables(Modules{{"a", shared}, {"b", shared}, {"c", items}});
  EXPECT_EQ(tables->table_modules().size(), 2U);
  nn::TableOptimizer optimizer(tables->table_modules());
  nn::TableOptimizer by_parameters(nn::table_parameters(*tables));
  EXPECT_EQ(by_parameters.param_groups()[0].params().size(), 2U);
  const auto rows = tables->forward({{"a", ids({1})}, {"b", ids({1, 2})}, {"c", ids({1})}});
  (rows["a"].sum() + rows["b"].sum() + rows["c"].sum()).backward();
  optimizer.step();
  EXPECT_EQ(items.step(), 1U);
  EXPECT_TRUE(close(weights(items)[1], before[1] - 3, 1e-6, 1e-6));
  EXPECT_TRUE(close(weights(items)[2], before[2] - 1, 1e-6, 1e-6));
}

TEST_F(EmbeddingCollectionTest, ReadsAheadForAllTables) {
  std::vector<std::pair<std::string, nn::FeatureInput>> batch;
  Modules modules;
  for (const char* name : {"a", "b"}) {
    modules.emplace_back(name, make(1000, 64));
    batch.emplace_back(name, torch::arange(1000));
  }
  nn::EmbeddingCollection tables(modules);
  tables->prefetch(batch);
  const auto rows = tables->forward(batch);
  for (const char* name : {"a", "b"}) EXPECT_TRUE(same(rows[name].detach(), weights(tables->module(name)->table())));
}

TEST_F(EmbeddingCollectionTest, RefusesWhatItDoesNotHave) {
  const Table items = make(20, 4);
  nn::EmbeddingCollection tables(Modules{{"item", items}, {"bag", nn::EmbeddingBag(items)}});
  const auto refuse = [&](const nn::EmbeddingCollectionImpl::Batch& batch) {
    return text_of<c10::ValueError>([&] { tables->forward(batch); });
  };
  EXPECT_THAT(refuse({{"item", ids({1})}, {"user", ids({1})}}), AllOf(HasSubstr("'user'"), HasSubstr("item, bag")));
  EXPECT_THAT(refuse({{"item", {ids({1}), ids({0})}}}), HasSubstr("takes ids alone"));
  EXPECT_THAT(refuse({{"item", ids({1})}, {"item", ids({1})}}), HasSubstr("twice"));
  EXPECT_THAT(text_of<c10::IndexError>([&] { tables->forward({{"item", ids({20})}}); }), HasSubstr("20"));
  const auto construct = [&](const Modules& modules) {
    return text_of<c10::ValueError>([&] { const nn::EmbeddingCollectionImpl collection(modules); });
  };
  EXPECT_THAT(construct({{"a", items}, {"a", items}}), HasSubstr("'a' is given twice"));
  EXPECT_THAT(construct({{"a.b", items}}), HasSubstr("'a.b'"));
  EXPECT_THAT(construct({{"a", nn::Embedding(nullptr)}}), HasSubstr("no module"));
}

TEST_F(EmbeddingCollectionTest, ACloneSharesWhatItShared) {
  nn::Embedding shared(make(20, 4));
  nn::EmbeddingCollection tables(Modules{{"a", shared}, {"b", shared}});
  const auto copy = std::dynamic_pointer_cast<nn::EmbeddingCollectionImpl>(tables->clone());
  ASSERT_TRUE(copy);
  EXPECT_EQ(copy->module("a"), copy->module("b"));
  EXPECT_NE(copy->module("a"), tables->module("a"));
}

}  // namespace
}  // namespace embermap
