// Several tables in one call.
#pragma once

#include <c10/util/Exception.h>  // ordered_dict.h uses it without saying so
#include <torch/ordered_dict.h>

#include "nn/embedding.hpp"
#include "nn/embedding_bag.hpp"

namespace embermap::nn {

// A module for the rows of a feature: an nn::Embedding, an nn::EmbeddingBag, a pointer to either, or a table (an Embedding of
// it).
class FeatureModule : public AnyTableModule {
 public:
  using AnyTableModule::AnyTableModule;
  FeatureModule(Table table) : AnyTableModule{std::make_shared<EmbeddingImpl>(std::move(table))} {}
};

// What a feature has in a batch: ids; for a bag, also its offsets and weights.
struct FeatureInput {
  FeatureInput(torch::Tensor i) : ids{std::move(i)} {}
  FeatureInput(torch::Tensor i, torch::Tensor o, torch::Tensor w = {})
      : ids{std::move(i)}, offsets{std::move(o)}, per_sample_weights{std::move(w)} {}
  torch::Tensor ids, offsets, per_sample_weights;
};

//   embermap::nn::EmbeddingCollection tables({{"user", users}, {"item", items}, {"history", embermap::nn::EmbeddingBag(items)}});
//   auto rows = tables->forward({{"user", user_ids}, {"item", ids}, {"history", {flat_ids, offsets}}});
//   rows["item"], rows["history"]
// Features may share a module or a table. Their modules are submodules "features.user", ...
class EmbeddingCollectionImpl : public torch::nn::Module {
 public:
  using Modules = std::vector<std::pair<std::string, FeatureModule>>;
  using Batch = std::vector<std::pair<std::string, FeatureInput>>;

  // Throws c10::ValueError (no module, a name given twice, a name that cannot be a module's).
  explicit EmbeddingCollectionImpl(const Modules& features);

  // Rows of each feature that is given, in that order; a call may leave features out. Pages of all features that are not in
  // memory are read side by side. Throws c10::ValueError (a feature it does not have, or one given twice; offsets or weights for
  // an Embedding) before anything is looked up, and what the modules throw.
  torch::OrderedDict<std::string, torch::Tensor> forward(const Batch& batch);

  // Reads the pages of a batch to come, all tables of it, while this one computes; ids on the host.
  void prefetch(const Batch& batch);

  // Of a feature. Throws c10::ValueError.
  const std::shared_ptr<TableModule>& module(std::string_view feature) const;
  // Each once, in order of first mention: for a TableOptimizer.
  std::vector<AnyTableModule> table_modules() const;
  std::size_t size() const noexcept { return features_.size(); }
  bool contains(std::string_view feature) const noexcept;

  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  void check(const Batch& batch) const;

  std::vector<std::pair<std::string, std::shared_ptr<TableModule>>> features_;
};

TORCH_MODULE(EmbeddingCollection);

}  // namespace embermap::nn
