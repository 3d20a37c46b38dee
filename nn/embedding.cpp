#include "nn/embedding.hpp"

#include "nn/new_table.hpp"

namespace embermap::nn {
namespace {

LookUpOptions look_up_options(const EmbeddingOptions& options) {
  return {options.padding_idx(), options.max_norm(), options.norm_type(), options.scale_grad_by_freq()};
}

}  // namespace

EmbeddingImpl::EmbeddingImpl(Table table, EmbeddingOptions options)
    : TableModule{"Embedding", std::move(table), look_up_options(options)}, options_{std::move(options)} {}

torch::Tensor EmbeddingImpl::forward(const torch::Tensor& ids) {
  torch::Tensor rows = look_up(as_ids(ids));
  if (ids.dim() == 1) return rows;
  std::vector<std::int64_t> shape = ids.sizes().vec();
  shape.push_back(embedding_dim());
  return rows.view(shape);
}

std::shared_ptr<torch::nn::Module> EmbeddingImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<EmbeddingImpl>(table(), options_);
  copy_state_to(*copy, device);
  return copy;
}

Embedding Embedding::from_pretrained(Store& store, std::string_view name, const torch::Tensor& embeddings,
                                     const torch::nn::EmbeddingFromPretrainedOptions& options, const Optimizer& optimizer) {
  return over_new_table<Embedding>(store, name, embeddings, optimizer, options.freeze(),
                                   EmbeddingOptions()
                                       .padding_idx(options.padding_idx())
                                       .max_norm(options.max_norm())
                                       .norm_type(options.norm_type())
                                       .scale_grad_by_freq(options.scale_grad_by_freq()));
}

}  // namespace embermap::nn
