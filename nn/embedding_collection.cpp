#include "nn/embedding_collection.hpp"

#include <algorithm>

#include "nn/errors.hpp"

namespace embermap::nn {
namespace {

using detail::refuse;

constexpr std::int64_t kWorthPrefetching = 64;  // ids, from which forward() reads ahead

struct Features : torch::nn::Module {
  Features() : torch::nn::Module("embermap::nn::Features") {}
};

}  // namespace

EmbeddingCollectionImpl::EmbeddingCollectionImpl(const Modules& features)
    : torch::nn::Module("embermap::nn::EmbeddingCollection") {
  const auto submodules = register_module("features", std::make_shared<Features>());
  for (const auto& [name, module] : features) {
    if (!module.get()) refuse<c10::ValueError>("EmbeddingCollection: feature '", printable(name), "' has no module");
    if (name.empty() || name.find('.') != std::string::npos)
      refuse<c10::ValueError>("EmbeddingCollection: the feature '", printable(name), "' must have a name without '.'");
    if (contains(name)) refuse<c10::ValueError>("EmbeddingCollection: feature '", printable(name), "' is given twice");
    submodules->register_module(name, module.get());
    features_.emplace_back(name, module.get());
  }
}

bool EmbeddingCollectionImpl::contains(std::string_view feature) const noexcept {
  return std::any_of(features_.begin(), features_.end(), [&](const auto& entry) { return entry.first == feature; });
}

const std::shared_ptr<TableModule>& EmbeddingCollectionImpl::module(std::string_view feature) const {
  for (const auto& [name, module] : features_)
    if (name == feature) return module;
  std::string known;
  for (const auto& [name, module] : features_) known += (known.empty() ? "" : ", ") + printable(name);
  refuse<c10::ValueError>("EmbeddingCollection: there is no feature '", printable(feature), "'; there are ",
                          known.empty() ? "none" : known);
}

std::vector<AnyTableModule> EmbeddingCollectionImpl::table_modules() const {
  std::vector<AnyTableModule> out;
  for (const auto& [name, module] : features_)
    if (std::none_of(out.begin(), out.end(), [&](const AnyTableModule& other) { return other.get() == module; }))
      out.emplace_back(module);
  return out;
}

void EmbeddingCollectionImpl::check(const Batch& batch) const {
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto& [feature, input] = batch[i];
    const bool bag = std::dynamic_pointer_cast<EmbeddingBagImpl>(module(feature)) != nullptr;
    if (!bag && (input.offsets.defined() || input.per_sample_weights.defined()))
      refuse<c10::ValueError>("EmbeddingCollection: feature '", printable(feature), "' is an Embedding, which takes ids alone");
    for (std::size_t j = 0; j < i; ++j)
      if (batch[j].first == feature)
        refuse<c10::ValueError>("EmbeddingCollection: the batch has feature '", printable(feature), "' twice");
  }
}

torch::OrderedDict<std::string, torch::Tensor> EmbeddingCollectionImpl::forward(const Batch& batch) {
  check(batch);
  // The disk reads for all tables, not for one after the other.
  for (std::size_t i = 1; i < batch.size(); ++i) {
    const torch::Tensor& ids = batch[i].second.ids;
    const auto& of = module(batch[i].first);
    if (ids.defined() && ids.is_cpu() && ids.numel() >= kWorthPrefetching &&
        torch::isIntegralType(ids.scalar_type(), /*includeBool=*/false) && !of->table().stats().whole)
      of->prefetch(ids);
  }
  torch::OrderedDict<std::string, torch::Tensor> out("feature");
  for (const auto& [feature, input] : batch) {
    const auto& of = module(feature);
    if (const auto bag = std::dynamic_pointer_cast<EmbeddingBagImpl>(of))
      out.insert(feature, bag->forward(input.ids, input.offsets, input.per_sample_weights));
    else if (const auto embedding = std::dynamic_pointer_cast<EmbeddingImpl>(of))
      out.insert(feature, embedding->forward(input.ids));
    else
      refuse<c10::NotImplementedError>("EmbeddingCollection: feature '", printable(feature),
                                       "' is neither an Embedding nor a bag");
  }
  return out;
}

void EmbeddingCollectionImpl::prefetch(const Batch& batch) {
  check(batch);
  for (const auto& [feature, input] : batch) module(feature)->prefetch(input.ids);
}

std::shared_ptr<torch::nn::Module> EmbeddingCollectionImpl::clone(const std::optional<torch::Device>& device) const {
  // A module of several features stays one.
  Modules copies;
  for (std::size_t i = 0; i < features_.size(); ++i) {
    const auto same = std::find_if(features_.begin(), features_.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const auto& other) { return other.second == features_[i].second; });
    const auto place = static_cast<std::size_t>(same - features_.begin());
    if (place < i)
      copies.emplace_back(features_[i].first, copies[place].second);
    else
      copies.emplace_back(features_[i].first, std::dynamic_pointer_cast<TableModule>(features_[i].second->clone(device)));
  }
  auto copy = std::make_shared<EmbeddingCollectionImpl>(copies);
  copy->train(is_training());
  return copy;
}

}  // namespace embermap::nn
