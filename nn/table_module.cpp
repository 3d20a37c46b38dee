#include "nn/table_module.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "nn/current_stream.hpp"

namespace embermap {
namespace {

// Of a CUDA device, through the registry in c10, which needs no CUDA headers.
c10::Stream stream_of(torch::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

std::span<const std::int64_t> host_ids(const torch::Tensor& ids) {
  return {ids.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(ids.numel())};
}

torch::Tensor gather(Table& table, const torch::Tensor& ids) {
  const auto options = torch::TensorOptions().dtype(torch_dtype(table.dtype())).device(ids.device());
  torch::Tensor out = at::empty({ids.numel(), static_cast<std::int64_t>(table.dim())}, options);
  auto* bytes = static_cast<std::byte*>(out.data_ptr());
  if (ids.is_cuda()) {
    const int device = ids.device().index();
    table.gather(device, ids.const_data_ptr<std::int64_t>(), static_cast<std::uint64_t>(ids.numel()), bytes, "weight",
                 detail::current_stream(device));
  } else {
    table.gather(host_ids(ids), {bytes, out.nbytes()});
  }
  return out;
}

// True if nobody but the caller can reach the tensor's memory: one handle to it, and it is the only tensor in its storage.
bool sole_owner(const torch::Tensor& tensor) { return tensor.use_count() == 1 && tensor.storage().use_count() == 1; }

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
  throw DTypeError("no torch dtype for a table of dtype number " + std::to_string(static_cast<int>(dtype)));
}

// The gradients of one module. They live as long as the anchor's gradient is defined. In the middle of a backward pass it is not
// yet: the gradients of several look-ups arrive before the anchor's. So those that came since the anchor's last gradient are kept
// in any case.
class PendingGradients {
 public:
  explicit PendingGradients(torch::Tensor anchor) : anchor_{std::move(anchor)} {}

  void append(RowGradients batch) {
    Entry entry{std::move(batch), std::nullopt};
    if (const auto device = entry.batch.gradients.device(); device.is_cuda()) {
      entry.ready.emplace(device.type());
      entry.ready->record(stream_of(device));
    }
    const std::lock_guard lock(mutex_);
    drop_stale();
    entries_.push_back(std::move(entry));
  }

  // What the anchor is given for its gradient: nothing, but defined.
  torch::Tensor anchor_gradient() const { return at::zeros_like(anchor_.detach()); }

  // The anchor has its gradient: the backward pass that brought the gradients up to here is over.
  void settle() {
    const std::lock_guard lock(mutex_);
    settled_ = entries_.size();
  }

  std::vector<RowGradients> batches() {
    const std::lock_guard lock(mutex_);
    drop_stale();
    std::vector<RowGradients> out;
    out.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      if (entry.ready) wait_for(entry);
      out.push_back(entry.batch);
    }
    return out;
  }

  void drop() {
    const std::lock_guard lock(mutex_);
    entries_.clear();
    settled_ = 0;
  }

 private:
  struct Entry {
    RowGradients batch;
    std::optional<c10::Event> ready;  // on a GPU: backward ran on the stream of its forward, which may not be the caller's
  };

  static void wait_for(const Entry& entry) {
    const c10::Stream stream = stream_of(entry.batch.gradients.device());
    entry.ready->block(stream);
    entry.batch.ids.record_stream(stream);  // the allocator must not reuse them before this stream is done
    entry.batch.gradients.record_stream(stream);
  }

  void drop_stale() {
    if (anchor_.grad().defined()) return;
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(settled_));
    settled_ = 0;
  }

  std::mutex mutex_;
  torch::Tensor anchor_;
  std::vector<Entry> entries_;
  std::size_t settled_ = 0;
};

namespace {

// Carries the pending gradients into a graph. Only the graph keeps it alive.
struct PendingHolder : torch::CustomClassHolder {
  explicit PendingHolder(std::shared_ptr<PendingGradients> p) : pending{std::move(p)} {}
  std::shared_ptr<PendingGradients> pending;
};

struct SettleHook : torch::autograd::PostAccumulateGradHook {
  explicit SettleHook(std::weak_ptr<PendingGradients> p) : pending{std::move(p)} {}
  void operator()(const torch::autograd::Variable& /*anchor*/) override {
    if (const auto alive = pending.lock()) alive->settle();
  }
  std::weak_ptr<PendingGradients> pending;  // the pending gradients hold the anchor, which holds this
};

class RowLookUp : public torch::autograd::Function<RowLookUp> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& /*anchor*/, const torch::Tensor& ids,
                               Table table, std::shared_ptr<PendingGradients> pending) {
    ctx->set_materialize_grads(false);
    torch::Tensor rows = gather(table, ids);
    // A copy: between here and the optimizer's step the caller may refill the buffer it gave.
    ctx->saved_data["ids"] = ids.clone();
    ctx->saved_data["pending"] = c10::IValue::make_capsule(c10::make_intrusive<PendingHolder>(std::move(pending)));
    return rows;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list& outputs) {
    torch::autograd::variable_list result(4);
    if (!outputs[0].defined()) return result;
    const auto holder = ctx->saved_data["pending"].toCapsule();
    PendingGradients& pending = *static_cast<PendingHolder&>(*holder).pending;
    pending.append({ctx->saved_data["ids"].toTensor(), own(std::move(outputs[0]))});
    result[0] = pending.anchor_gradient();
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

}  // namespace

TableModule::TableModule(std::string kind, Table table)
    : torch::nn::Module("embermap::" + kind), kind_{std::move(kind)}, table_{std::move(table)} {
  anchor_ = register_parameter("anchor", at::zeros({0}, torch::kFloat32), can_be_trained(table_));
  pending_ = std::make_shared<PendingGradients>(anchor_);
  torch::autograd::impl::set_post_acc_grad_hooks(anchor_, std::make_unique<SettleHook>(pending_));
}

std::vector<RowGradients> TableModule::pending() const { return pending_->batches(); }

void TableModule::zero_grad(bool set_to_none) {
  torch::nn::Module::zero_grad(set_to_none);
  pending_->drop();
}

void TableModule::pretty_print(std::ostream& stream) const {
  stream << name() << "(table=" << printable(table_.name()) << ", rows=" << table_.rows() << ", dim=" << table_.dim()
         << ", dtype=" << dtype_name(table_.dtype()) << ")";
}

std::string TableModule::prefix() const { return kind_ + " of table '" + printable(table_.name()) + "': "; }

torch::Tensor TableModule::as_ids(const torch::Tensor& ids, const char* what) const {
  if (!ids.defined()) throw InvalidArgument(prefix() + what + " is an undefined tensor");
  if (!torch::isIntegralType(ids.scalar_type(), /*includeBool=*/false))
    throw DTypeError(prefix() + what + " must be integers, not " + c10::toString(ids.scalar_type()));
  if (ids.layout() != torch::kStrided)
    throw InvalidArgument(c10::str(prefix(), what, " must be a dense tensor, not ", ids.layout()));
  if (!ids.is_cpu() && !ids.is_cuda())
    throw InvalidArgument(prefix() + what + " must be on the CPU or a CUDA device, not on " + ids.device().str());
  const torch::Tensor flat = ids.reshape({-1}).to(torch::kInt64).contiguous();
  if (ids.scalar_type() == torch::kUInt64 && flat.numel() != 0 && flat.min().item<std::int64_t>() < 0) {
    const auto first = flat.lt(0).nonzero()[0].item<std::int64_t>();
    throw InvalidArgument(prefix() + what + "[" + std::to_string(first) + "] is " +
                          std::to_string(static_cast<std::uint64_t>(flat[first].item<std::int64_t>())) +
                          ", more than a row number can be");
  }
  return flat;
}

torch::Tensor TableModule::look_up(const torch::Tensor& ids) {
  if (torch::GradMode::is_enabled() && anchor_.requires_grad()) return RowLookUp::apply(anchor_, ids, table_, pending_);
  return gather(table_, ids);
}

}  // namespace embermap
