#include "nn/pending_gradients.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <iterator>
#include <utility>

namespace embermap::nn {
namespace {

// Of a CUDA device, through the registry in c10, which needs no CUDA headers.
c10::Stream stream_of(torch::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

struct SettleHook : torch::autograd::PostAccumulateGradHook {
  explicit SettleHook(std::weak_ptr<PendingGradients> p) : pending{std::move(p)} {}
  void operator()(const torch::autograd::Variable& /*anchor*/) override {
    if (const auto alive = pending.lock()) alive->settle();
  }
  std::weak_ptr<PendingGradients> pending;  // the pending gradients hold the anchor, which holds this
};

}  // namespace

void PendingGradients::append(RowGradients batch, WorkingSet fetched) {
  Entry entry{std::move(batch), std::move(fetched), torch::autograd::get_current_graph_task_id(), std::nullopt};
  if (const auto device = entry.batch.gradients.device(); device.is_cuda()) {
    entry.ready.emplace(device.type());
    entry.ready->record(stream_of(device));
  }
  const std::lock_guard lock(mutex_);
  if (!anchor_.grad().defined()) entries_.clear();
  arriving_.push_back(std::move(entry));
}

void PendingGradients::settle() {
  const int backward = torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(mutex_);
  std::vector<Entry> others;
  for (Entry& entry : arriving_) (entry.backward == backward ? entries_ : others).push_back(std::move(entry));
  arriving_ = std::move(others);
}

std::vector<RowGradients> PendingGradients::batches() {
  const std::lock_guard lock(mutex_);
  arriving_.clear();
  if (!anchor_.grad().defined()) entries_.clear();
  std::vector<RowGradients> out;
  out.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    if (entry.ready) wait_for(entry);
    out.push_back(entry.batch);
  }
  return out;
}

WorkingSet PendingGradients::take_fetched() {
  const std::lock_guard lock(mutex_);
  return entries_.size() == 1 ? std::exchange(entries_.front().fetched, {}) : WorkingSet();
}

void PendingGradients::drop() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  arriving_.clear();
}

void PendingGradients::wait_for(const Entry& entry) {
  const c10::Stream stream = stream_of(entry.batch.gradients.device());
  entry.ready->block(stream);
  entry.batch.ids.record_stream(stream);  // the allocator must not reuse them before this stream is done
  entry.batch.gradients.record_stream(stream);
}

void watch(const std::shared_ptr<PendingGradients>& pending) {
  torch::autograd::impl::set_post_acc_grad_hooks(pending->anchor(), std::make_unique<SettleHook>(pending));
}

std::shared_ptr<PendingGradients> pending_of(const torch::Tensor& anchor) {
  if (!anchor.defined()) return nullptr;
  const auto* meta = torch::autograd::impl::get_autograd_meta(anchor);
  if (meta == nullptr) return nullptr;
  const auto* hook = dynamic_cast<const SettleHook*>(meta->post_acc_grad_hooks_.get());
  return hook == nullptr ? nullptr : hook->pending.lock();
}

}  // namespace embermap::nn
