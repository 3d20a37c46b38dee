#include "nn/table_module.hpp"

#include <ATen/ops/_unique2.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <span>
#include <variant>

#include "nn/current_stream.hpp"
#include "nn/errors.hpp"
#include "nn/pending_gradients.hpp"

namespace embermap::nn {
namespace {

using detail::as_torch;
using detail::refuse;

std::span<const std::int64_t> host_ids(const torch::Tensor& ids) {
  return {ids.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(ids.numel())};
}

// (n, dim), or (1 + n, dim) with a row of zeros first. With `fetched`, on a device, what an update of these rows can take.
torch::Tensor gather(Table& table, const torch::Tensor& ids, bool zeros_first = false, WorkingSet* fetched = nullptr) {
  const auto options = torch::TensorOptions().dtype(torch_dtype(table.dtype())).device(ids.device());
  const std::int64_t lead = zeros_first ? 1 : 0;
  torch::Tensor out = at::empty({lead + ids.numel(), static_cast<std::int64_t>(table.dim())}, options);
  if (zeros_first) out[0].zero_();
  const torch::Tensor rows = out.slice(0, lead);
  auto* bytes = static_cast<std::byte*>(rows.data_ptr());
  as_torch([&] {
    if (ids.is_cuda()) {
      const int device = ids.device().index();
      const auto* first = ids.const_data_ptr<std::int64_t>();
      const auto count = static_cast<std::uint64_t>(ids.numel());
      const CudaStream stream = embermap::detail::current_stream(device);
      if (fetched != nullptr)
        *fetched = table.gather_working_set(device, first, count, bytes, stream);
      else
        table.gather(device, first, count, bytes, "weight", stream);
    } else {
      table.gather(host_ids(ids), {bytes, rows.nbytes()});
    }
  });
  return out;
}

void scatter(Table& table, const torch::Tensor& ids, const torch::Tensor& rows) {
  const auto* bytes = static_cast<const std::byte*>(rows.const_data_ptr());
  if (ids.is_cuda()) {
    const int device = ids.device().index();
    table.scatter(device, ids.const_data_ptr<std::int64_t>(), static_cast<std::uint64_t>(ids.numel()), bytes, "weight",
                  embermap::detail::current_stream(device));
  } else {
    table.scatter(host_ids(ids), {bytes, rows.nbytes()});
  }
}

// True if nobody but the caller can reach the tensor's memory: one handle to it, and it is the only tensor in its storage.
bool sole_owner(const torch::Tensor& tensor) { return tensor.use_count() == 1 && tensor.storage().use_count() == 1; }

// What backward has to know of a look-up; in the graph, which alone keeps it alive.
struct LookUp : torch::CustomClassHolder {
  LookUp(std::shared_ptr<PendingGradients> p, const LookUpOptions& o, bool first)
      : pending{std::move(p)}, options{o}, zeros_first{first} {}
  std::shared_ptr<PendingGradients> pending;
  LookUpOptions options;
  bool zeros_first;
  WorkingSet fetched;
};

class RowLookUp : public torch::autograd::Function<RowLookUp> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& /*anchor*/, const torch::Tensor& ids,
                               Table table, const c10::intrusive_ptr<LookUp>& look_up) {
    ctx->set_materialize_grads(false);
    // The records of the batch are kept for the update, but where steps are of several look-ups or leave ids out: those are
    // fetched once more.
    const bool keep = ids.is_cuda() && look_up->pending->worth_keeping() && !look_up->options.padding_idx;
    torch::Tensor rows = gather(table, ids, look_up->zeros_first, keep ? &look_up->fetched : nullptr);
    // A copy: between here and the optimizer's step the caller may refill the buffer it gave.
    ctx->saved_data["ids"] = ids.clone();
    ctx->saved_data["look_up"] = c10::IValue::make_capsule(look_up);
    return rows;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list& outputs) {
    torch::autograd::variable_list result(4);
    if (!outputs[0].defined()) return result;
    const auto holder = ctx->saved_data["look_up"].toCapsule();
    auto& look_up = static_cast<LookUp&>(*holder);
    torch::Tensor ids = ctx->saved_data["ids"].toTensor();
    torch::Tensor gradients = own(std::move(outputs[0]));
    if (look_up.zeros_first) gradients = gradients.slice(0, 1);
    if (look_up.options.padding_idx) {
      const torch::Tensor kept = ids.ne(*look_up.options.padding_idx).nonzero().squeeze(1);
      ids = ids.index_select(0, kept);
      gradients = gradients.index_select(0, kept);
    }
    if (look_up.options.scale_grad_by_freq) {
      const auto [distinct, inverse, counts] =
          at::_unique2(ids, /*sorted=*/true, /*return_inverse=*/true, /*return_counts=*/true);
      gradients.div_(counts.index_select(0, inverse).unsqueeze(1));
    }
    const torch::Tensor& anchor = look_up.pending->anchor();
    look_up.pending->append({std::move(ids), std::move(gradients)}, std::exchange(look_up.fetched, {}));
    result[0] = at::zeros_like(anchor.detach());  // nothing, but defined
    return result;
  }

 private:
  // The gradient as a contiguous tensor of its own: itself if nobody else can reach it, otherwise a copy.
  static torch::Tensor own(torch::Tensor gradient) {
    if (gradient.layout() != torch::kStrided) return gradient.detach().to_dense().contiguous();
    const bool keep = sole_owner(gradient) && gradient.is_contiguous();
    gradient = gradient.detach();  // a backward pass that builds a graph would be kept alive otherwise
    return keep ? gradient : gradient.clone(torch::MemoryFormat::Contiguous);
  }
};

bool can_be_trained(const Table& table) {
  return is_floating(table.dtype()) && table.writable() && !std::holds_alternative<std::monostate>(table.optimizer());
}

std::vector<torch::Tensor> parameters_of(const torch::nn::Module& model, bool tables) {
  std::vector<torch::Tensor> out;
  for (const torch::Tensor& parameter : model.parameters()) {
    if ((pending_of(parameter) != nullptr) != tables) continue;
    const auto same = [&](const torch::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(out.begin(), out.end(), same)) out.push_back(parameter);
  }
  return out;
}

}  // namespace

torch::ScalarType torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return torch::kFloat32;
    case DType::kFloat16: return torch::kFloat16;
    case DType::kBFloat16: return torch::kBFloat16;
    case DType::kFloat64: return torch::kFloat64;
    case DType::kInt8: return torch::kInt8;
    case DType::kUInt8: return torch::kUInt8;
    case DType::kInt32: return torch::kInt32;
    case DType::kInt64: return torch::kInt64;
  }
  refuse<c10::TypeError>("no torch dtype for a table of dtype number ", static_cast<int>(dtype));
}

DType table_dtype(torch::ScalarType dtype) {
  for (const DType ours : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                           DType::kInt32, DType::kInt64})
    if (torch_dtype(ours) == dtype) return ours;
  refuse<c10::TypeError>("no table has rows of ", c10::toString(dtype));
}

std::vector<torch::Tensor> table_parameters(const torch::nn::Module& model) { return parameters_of(model, true); }
std::vector<torch::Tensor> dense_parameters(const torch::nn::Module& model) { return parameters_of(model, false); }

TableModule::TableModule(std::string kind, Table table, const LookUpOptions& options)
    : torch::nn::Module("embermap::nn::" + kind), kind_{std::move(kind)}, table_{std::move(table)}, look_up_options_{options} {
  if (auto& padding = look_up_options_.padding_idx) {
    if (*padding < -num_embeddings() || *padding >= num_embeddings())
      refuse<c10::ValueError>(prefix(), "Padding_idx must be within num_embeddings: ", *padding, " of ", num_embeddings(),
                              " rows");
    if (*padding < 0) *padding += num_embeddings();
  }
  if (options.max_norm && !(*options.max_norm > 0))
    refuse<c10::ValueError>(prefix(), "max_norm must be more than 0, not ", *options.max_norm);
  const auto dtype = is_floating(table_.dtype()) ? torch_dtype(table_.dtype()) : torch::kFloat32;
  anchor_ = register_parameter("anchor", at::zeros({1}, dtype), can_be_trained(table_));
  pending_ = std::make_shared<PendingGradients>(anchor_, table_);
  watch(pending_);
}

std::vector<RowGradients> TableModule::pending() const { return pending_->batches(); }

torch::Tensor TableModule::grad() const {
  const std::vector<RowGradients> batches = pending();
  if (batches.empty()) return {};
  std::vector<torch::Tensor> ids;
  std::vector<torch::Tensor> gradients;
  const torch::Device device = batches.front().ids.device();
  for (const RowGradients& batch : batches) {
    ids.push_back(batch.ids.to(device));
    gradients.push_back(batch.gradients.to(device));
  }
  return at::sparse_coo_tensor(at::cat(ids).unsqueeze(0), at::cat(gradients), {num_embeddings(), embedding_dim()});
}

void TableModule::zero_grad(bool set_to_none) {
  torch::nn::Module::zero_grad(set_to_none);
  pending_->drop();
}

Prefetch TableModule::prefetch(const torch::Tensor& ids) {
  const torch::Tensor flat = as_ids(ids);
  if (!flat.is_cpu()) refuse<c10::ValueError>(prefix(), "ids to prefetch must be on the CPU, not on ", flat.device());
  return as_torch([&] { return table_.prefetch(host_ids(flat)); });
}

void TableModule::pretty_print(std::ostream& stream) const {
  stream << name() << "(table=" << printable(table_.name()) << ", rows=" << table_.rows() << ", dim=" << table_.dim()
         << ", dtype=" << dtype_name(table_.dtype());
  const LookUpOptions& o = look_up_options_;
  if (o.padding_idx) stream << ", padding_idx=" << *o.padding_idx;
  if (o.max_norm) stream << ", max_norm=" << *o.max_norm;
  if (o.norm_type != 2) stream << ", norm_type=" << o.norm_type;
  if (o.scale_grad_by_freq) stream << ", scale_grad_by_freq=true";
  stream << details() << ")";
}

std::string TableModule::prefix() const { return kind_ + " of table '" + printable(table_.name()) + "': "; }

torch::Tensor TableModule::as_ids(const torch::Tensor& ids, const char* what) const {
  if (!ids.defined()) refuse<c10::ValueError>(prefix(), what, " is an undefined tensor");
  if (!torch::isIntegralType(ids.scalar_type(), /*includeBool=*/false))
    refuse<c10::TypeError>(prefix(), what, " must be integers, not ", c10::toString(ids.scalar_type()));
  if (ids.layout() != torch::kStrided) refuse<c10::ValueError>(prefix(), what, " must be a dense tensor, not ", ids.layout());
  if (!ids.is_cpu() && !ids.is_cuda())
    refuse<c10::ValueError>(prefix(), what, " must be on the CPU or a CUDA device, not on ", ids.device());
  const torch::Tensor flat = ids.reshape({-1}).to(torch::kInt64).contiguous();
  if (ids.scalar_type() == torch::kUInt64 && flat.numel() != 0 && flat.min().item<std::int64_t>() < 0) {
    const auto first = flat.lt(0).nonzero()[0].item<std::int64_t>();
    refuse<c10::ValueError>(prefix(), what, "[", first, "] is ", static_cast<std::uint64_t>(flat[first].item<std::int64_t>()),
                            ", more than a row number can be");
  }
  return flat;
}

// The rows of the batch that are longer than max_norm become that long, in the table.
void TableModule::shorten(const torch::Tensor& ids) {
  const torch::NoGradGuard no_grad;
  const double most = *look_up_options_.max_norm;
  const torch::Tensor distinct = std::get<0>(at::_unique2(ids));
  const torch::Tensor rows = gather(table_, distinct);
  const torch::Tensor norms = at::linalg_vector_norm(rows, look_up_options_.norm_type, at::IntArrayRef{1}, /*keepdim=*/true);
  const torch::Tensor longer = norms.gt(most).reshape({-1}).nonzero().squeeze(1);
  if (longer.numel() == 0) return;
  const torch::Tensor scale = norms.index_select(0, longer).add(1e-7).reciprocal().mul(most);
  const torch::Tensor shorter = (rows.index_select(0, longer) * scale).to(rows.scalar_type()).contiguous();
  scatter(table_, distinct.index_select(0, longer), shorter);
}

torch::Tensor TableModule::look_up(const torch::Tensor& ids, bool zeros_first) {
  if (look_up_options_.max_norm) shorten(ids);
  if (torch::GradMode::is_enabled() && anchor_.requires_grad())
    return RowLookUp::apply(anchor_, ids, table_, c10::make_intrusive<LookUp>(pending_, look_up_options_, zeros_first));
  return gather(table_, ids, zeros_first);
}

void TableModule::copy_state_to(TableModule& copy, const std::optional<torch::Device>& device) const {
  copy.train(is_training());
  copy.to(device.value_or(anchor_.device()));
  copy.anchor_.requires_grad_(anchor_.requires_grad());
}

}  // namespace embermap::nn
