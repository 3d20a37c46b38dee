// The gradients of one module that wait for a step. Private to nn/.
#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "nn/table_module.hpp"
#include "store/table.hpp"

namespace embermap::nn {

// They live as long as the anchor's gradient is defined. In the middle of a backward pass it is not yet: the gradients of several
// look-ups arrive before the anchor's. So they count from when their pass has reached the anchor; those of a pass that failed
// before, or that was not for the anchor, never do. Thread safety: backward passes may run in several threads at once.
class PendingGradients {
 public:
  PendingGradients(torch::Tensor anchor, Table table) : anchor_{std::move(anchor)}, table_{std::move(table)} {}

  const torch::Tensor& anchor() const noexcept { return anchor_; }
  Table& table() noexcept { return table_; }

  // Within a backward pass: the gradient of one look-up, and what that has kept for an update.
  void append(RowGradients batch, WorkingSet fetched = {});
  // Within a backward pass: the anchor has its gradient.
  void settle();
  // Those that count, ordered on the current stream; outside of backward passes.
  std::vector<RowGradients> batches();
  // What the look-up of the gradients has kept for an update of just these rows, if they are of one look-up; once.
  WorkingSet take_fetched();
  // Whether look-ups on a device should keep what they fetch: the last step was of one look-up.
  bool worth_keeping() const noexcept { return single_.load(std::memory_order_relaxed); }
  void set_worth_keeping(bool single) noexcept { single_.store(single, std::memory_order_relaxed); }
  void drop();

 private:
  struct Entry {
    RowGradients batch;
    WorkingSet fetched;
    int backward = -1;                // the pass it comes from, by torch's number
    std::optional<c10::Event> ready;  // on a GPU: backward ran on the stream of its forward, which may not be the caller's
  };
  static void wait_for(const Entry& entry);

  std::mutex mutex_;
  torch::Tensor anchor_;
  Table table_;
  std::vector<Entry> entries_;
  std::vector<Entry> arriving_;
  std::atomic<bool> single_{true};
};

// Has the anchor tell of its gradients.
void watch(const std::shared_ptr<PendingGradients>& pending);
// The gradients that belong to an anchor; nullptr for any other tensor, and for an anchor whose module and graphs are gone.
std::shared_ptr<PendingGradients> pending_of(const torch::Tensor& anchor);

}  // namespace embermap::nn
