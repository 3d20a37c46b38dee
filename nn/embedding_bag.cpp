#include "nn/embedding_bag.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_bag.h>

#include <string>

#include "nn/errors.hpp"
#include "nn/new_table.hpp"

namespace embermap::nn {
namespace {

using detail::refuse;

// torch's numbers for the modes.
constexpr std::int64_t kSumMode = 0;
constexpr std::int64_t kMeanMode = 1;
constexpr std::int64_t kMaxMode = 2;

std::int64_t number_of(const torch::nn::EmbeddingBagMode& mode) {
  if (std::holds_alternative<torch::enumtype::kSum>(mode)) return kSumMode;
  return std::holds_alternative<torch::enumtype::kMean>(mode) ? kMeanMode : kMaxMode;
}

LookUpOptions look_up_options(const EmbeddingBagOptions& options) {
  return {options.padding_idx(), options.max_norm(), options.norm_type(), options.scale_grad_by_freq()};
}

}  // namespace

EmbeddingBagImpl::EmbeddingBagImpl(Table table, EmbeddingBagOptions options)
    : TableModule{"EmbeddingBag", std::move(table), look_up_options(options)}, options_{std::move(options)} {
  if (!is_floating(this->table().dtype()))
    refuse<c10::TypeError>(prefix(), "bags of rows need a table of floats, not of ", dtype_name(this->table().dtype()));
  if (number_of(options_.mode()) == kMaxMode && options_.scale_grad_by_freq())
    refuse<c10::ValueError>(prefix(), "mode kMax does not go with scale_grad_by_freq");
}

torch::Tensor EmbeddingBagImpl::check_offsets(const torch::Tensor& offsets, const torch::Tensor& ids) const {
  const torch::Tensor flat = as_ids(offsets, "offsets");
  if (offsets.dim() != 1) refuse<c10::ValueError>(prefix(), "offsets must have 1 dimension, not shape ", offsets.sizes());
  if (offsets.device() != ids.device())
    refuse<c10::ValueError>(prefix(), "offsets are on ", offsets.device(), ", ids on ", ids.device());
  const torch::Tensor host = flat.cpu();
  const auto view = host.accessor<std::int64_t, 1>();
  const std::int64_t count = ids.numel();
  const std::int64_t size = view.size(0);
  if (size == 0) {
    if (options_.include_last_offset())
      refuse<c10::ValueError>(prefix(), "offsets must have at least the end of the last bag, which was to be included");
    if (count != 0) refuse<c10::ValueError>(prefix(), "no offsets, so no bags, for ", count, " ids");
    return flat;
  }
  // The first of each are torch's words.
  if (view[0] != 0)
    refuse<c10::ValueError>(prefix(), "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from ",
                            "position 0. However, got ", view[0]);
  for (std::int64_t i = 1; i < size; ++i)
    if (view[i] < view[i - 1])
      refuse<c10::ValueError>(prefix(), "offsets must ascend: offsets[", i, "] is ", view[i], ", less than the ", view[i - 1],
                              " before it");
  if (view[size - 1] > count)
    refuse<c10::ValueError>(prefix(), "offsets[-1] can not be greater than input's length: offsets[", size - 1, "] is ",
                            view[size - 1], ", beyond the ", count, " ids");
  return flat;
}

void EmbeddingBagImpl::check_weights(const torch::Tensor& weights, const torch::Tensor& ids) const {
  if (number_of(options_.mode()) != kSumMode)
    refuse<c10::NotImplementedError>(prefix(), "per_sample_weights are only supported for mode kSum");
  if (weights.sizes() != ids.sizes())
    refuse<c10::ValueError>(prefix(), "per_sample_weights have the shape ", weights.sizes(), ", ids ", ids.sizes());
  if (weights.device() != ids.device())
    refuse<c10::ValueError>(prefix(), "per_sample_weights are on ", weights.device(), ", ids on ", ids.device());
  if (weights.scalar_type() != torch_dtype(table().dtype()))
    refuse<c10::TypeError>(prefix(), "per_sample_weights must be ", c10::toString(torch_dtype(table().dtype())),
                           " as the table, not ", c10::toString(weights.scalar_type()));
}

torch::Tensor EmbeddingBagImpl::forward(const torch::Tensor& ids, const torch::Tensor& offsets,
                                        const torch::Tensor& per_sample_weights) {
  const torch::Tensor flat = as_ids(ids);
  if (ids.dim() != 1 && ids.dim() != 2)
    refuse<c10::ValueError>(prefix(), "ids must have 1 or 2 dimensions, not shape ", ids.sizes());
  if (per_sample_weights.defined()) check_weights(per_sample_weights, ids);
  const auto options = flat.options();
  torch::Tensor starts;
  // Ids beyond the last offset are a bag of their own, of which nothing is seen: in torch they are part of the last one, or not,
  // by mode.
  const bool beyond = ids.dim() == 1 && options_.include_last_offset();
  if (ids.dim() == 2) {
    if (offsets.defined())
      refuse<c10::ValueError>(prefix(), "offsets given with ids of shape ", ids.sizes(), ", whose rows are the bags");
    starts = at::arange(ids.size(0), options).mul_(ids.size(1));
  } else {
    if (!offsets.defined()) refuse<c10::ValueError>(prefix(), "ids of 1 dimension need offsets");
    starts = check_offsets(offsets, ids);
  }
  const bool padded = padding_row().has_value();
  const torch::Tensor rows = look_up(flat, padded);
  const std::int64_t bags = starts.numel() - (beyond ? 1 : 0);
  if (flat.numel() == 0) return rows.sum(0, /*keepdim=*/true).expand({bags, embedding_dim()}).clone();
  // The rows looked up are a small table of their own, in which id i has row i, after the row of zeros that stands for padding
  // wherever it is in the batch. torch's bags over it give the sums, and its gradient by rows.
  const std::int64_t lead = padded ? 1 : 0;
  torch::Tensor places = at::arange(lead, lead + flat.numel(), options);
  if (padded) places.masked_fill_(flat.eq(*padding_row()), 0);
  const std::optional<torch::Tensor> weights =
      per_sample_weights.defined() ? std::optional(per_sample_weights.reshape({-1})) : std::nullopt;
  const torch::Tensor found = std::get<0>(
      at::embedding_bag(rows, places, starts, /*scale_grad_by_freq=*/false, number_of(options_.mode()), /*sparse=*/false, weights,
                        /*include_last_offset=*/false, padded ? std::optional<std::int64_t>(0) : std::nullopt));
  return beyond ? found.slice(0, 0, bags) : found;
}

std::shared_ptr<torch::nn::Module> EmbeddingBagImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = std::make_shared<EmbeddingBagImpl>(table(), options_);
  copy_state_to(*copy, device);
  return copy;
}

std::string EmbeddingBagImpl::details() const {
  constexpr const char* kNames[] = {"kSum", "kMean", "kMax"};
  return c10::str(", mode=", kNames[number_of(options_.mode())],
                  options_.include_last_offset() ? ", include_last_offset=true" : "");
}

EmbeddingBag EmbeddingBag::from_pretrained(Store& store, std::string_view name, const torch::Tensor& embeddings,
                                           const torch::nn::EmbeddingBagFromPretrainedOptions& options,
                                           const Optimizer& optimizer) {
  return over_new_table<EmbeddingBag>(store, name, embeddings, optimizer, options.freeze(),
                                      EmbeddingBagOptions()
                                          .mode(options.mode())
                                          .max_norm(options.max_norm())
                                          .norm_type(options.norm_type())
                                          .scale_grad_by_freq(options.scale_grad_by_freq())
                                          .include_last_offset(options.include_last_offset())
                                          .padding_idx(options.padding_idx()));
}

}  // namespace embermap::nn
