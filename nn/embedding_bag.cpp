#include "nn/embedding_bag.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/full.h>

#include <optional>
#include <string>

#include "base/error.hpp"

namespace embermap {
namespace {

// torch's numbers for the modes.
constexpr std::int64_t torch_mode(EmbeddingBagOptions::Mode mode) { return mode == EmbeddingBagOptions::Mode::kSum ? 0 : 1; }

}  // namespace

EmbeddingBag::EmbeddingBag(Table table, EmbeddingBagOptions options)
    : TableModule{"EmbeddingBag", std::move(table)}, options_{options} {
  if (!is_floating(this->table().dtype()))
    throw DTypeError(prefix() + "sums and means of rows need a table of floats, not of " +
                     std::string(dtype_name(this->table().dtype())));
}

torch::Tensor EmbeddingBag::check_offsets(const torch::Tensor& offsets, const torch::Tensor& ids) const {
  const torch::Tensor flat = as_ids(offsets, "offsets");
  if (offsets.dim() != 1) throw InvalidArgument(c10::str(prefix(), "offsets must have 1 dimension, not shape ", offsets.sizes()));
  if (offsets.device() != ids.device())
    throw InvalidArgument(c10::str(prefix(), "offsets are on ", offsets.device(), ", ids on ", ids.device()));
  const torch::Tensor host = flat.cpu();
  const auto view = host.accessor<std::int64_t, 1>();
  const std::int64_t count = ids.numel();
  if (view.size(0) == 0) {
    if (options_.include_last_offset)
      throw InvalidArgument(prefix() + "offsets are empty, but the last offset was to be included");
    if (count != 0) throw InvalidArgument(c10::str(prefix(), "no offsets, so no bags, for ", count, " ids"));
    return flat;
  }
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < view.size(0); ++i) {
    if (i == 0 && view[i] != 0) throw InvalidArgument(c10::str(prefix(), "offsets[0] is ", view[i], ", not 0"));
    if (view[i] < last)
      throw InvalidArgument(c10::str(prefix(), "offsets[", i, "] is ", view[i], ", less than the ", last, " before it"));
    if (view[i] > count)
      throw InvalidArgument(c10::str(prefix(), "offsets[", i, "] is ", view[i], ", beyond the ", count, " ids"));
    last = view[i];
  }
  if (options_.include_last_offset && last != count)
    throw InvalidArgument(c10::str(prefix(), "the last offset is ", last, ", but there are ", count, " ids"));
  return flat;
}

void EmbeddingBag::check_weights(const torch::Tensor& weights, const torch::Tensor& ids) const {
  if (options_.mode != EmbeddingBagOptions::Mode::kSum) throw InvalidArgument(prefix() + "weights need the mode of sums");
  if (weights.sizes() != ids.sizes())
    throw InvalidArgument(c10::str(prefix(), "weights of shape ", weights.sizes(), " for ids of shape ", ids.sizes()));
  if (weights.device() != ids.device())
    throw InvalidArgument(c10::str(prefix(), "weights are on ", weights.device(), ", ids on ", ids.device()));
  if (weights.scalar_type() != torch_dtype(table().dtype()))
    throw DTypeError(prefix() + "weights must be " + c10::toString(torch_dtype(table().dtype())) + " as the table, not " +
                     c10::toString(weights.scalar_type()));
}

torch::Tensor EmbeddingBag::forward(const torch::Tensor& ids, const torch::Tensor& offsets, const torch::Tensor& weights) {
  const torch::Tensor flat = as_ids(ids);
  if (ids.dim() != 1 && ids.dim() != 2)
    throw InvalidArgument(c10::str(prefix(), "ids must have 1 or 2 dimensions, not shape ", ids.sizes()));
  if (weights.defined()) check_weights(weights, ids);
  const auto options = flat.options();
  torch::Tensor starts;
  bool include_last = false;
  if (ids.dim() == 2) {
    if (offsets.defined())
      throw InvalidArgument(c10::str(prefix(), "offsets given with ids of shape ", ids.sizes(), ", whose rows are the bags"));
    starts = at::arange(ids.size(0), options).mul_(ids.size(1));
  } else {
    if (!offsets.defined()) throw InvalidArgument(prefix() + "ids of 1 dimension need offsets");
    starts = check_offsets(offsets, ids);
    include_last = options_.include_last_offset;
  }
  // The rows looked up are a small table of their own, in which id i has row i. torch's bags over it give the sums, and its
  // gradient by rows.
  const torch::Tensor rows = look_up(flat);
  const std::optional<torch::Tensor> scale = weights.defined() ? std::optional(weights.reshape({-1})) : std::nullopt;
  return std::get<0>(at::embedding_bag(rows, at::arange(flat.numel(), options), starts, /*scale_grad_by_freq=*/false,
                                       torch_mode(options_.mode), /*sparse=*/false, scale, include_last));
}

}  // namespace embermap
