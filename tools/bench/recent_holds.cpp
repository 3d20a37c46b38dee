#include "tools/bench/recent_holds.hpp"

#include <algorithm>

namespace embermap::bench {

void RecentHolds::stamp(Use& use) noexcept {
  use.hold = now_;
  use.prefetched = prefetching_;
  ++recent(now_).frames;
  recent(now_).prefetched += use.prefetched;
}

void RecentHolds::unstamp(const Use& use) noexcept {
  if (now_ - use.hold >= kRecent) return;
  --recent(use.hold).frames;
  recent(use.hold).prefetched -= use.prefetched;
}

void RecentHolds::begin(Hold hold) noexcept {
  ++now_;
  if (hold != Hold::kNextPass) call_ = (call_ + 1) & kCallMask;
  prefetching_ = hold == Hold::kPrefetch;
  recent(now_) = {.call = call_};
  give_up();
}

bool RecentHolds::used(std::uint32_t frame) noexcept {
  Use& use = uses_[frame];
  unstamp(use);
  stamp(use);
  if (((call_ - use.counted) & kCallMask) < options_.apart) return false;
  use.counted = call_ & kCallMask;
  return true;
}

void RecentHolds::inserted(std::uint32_t frame) noexcept {
  uses_[frame].counted = call_ & kCallMask;
  stamp(uses_[frame]);
  ++resident_;
}

void RecentHolds::removed(std::uint32_t frame) noexcept {
  unstamp(uses_[frame]);
  --resident_;
}

void RecentHolds::make_room(std::uint64_t victims) noexcept {
  give_up();
  if (options_.guard == 0) return;
  std::uint64_t young = recent(now_).frames;
  std::uint64_t prefetched = 0;  // kept for that alone: not young
  for (std::uint32_t age = 1; age < std::min(kPrefetchHolds, now_); ++age) prefetched += recent(now_ - age).prefetched;
  keep_prefetched_ = resident_ >= young + prefetched + victims;
  if (!keep_prefetched_) prefetched = 0;
  for (std::uint32_t age = 1; age < std::min(kRecent, now_); ++age) {
    const Recent& hold = recent(now_ - age);
    young += hold.frames;
    if (keep_prefetched_ && age < kPrefetchHolds) prefetched -= hold.prefetched;
    const std::uint32_t calls = (call_ - hold.call) & kCallMask;
    if (calls > options_.guard || resident_ < young + prefetched + victims) return;
    if (calls > 1 && static_cast<double>(young) > options_.share * static_cast<double>(uses_.size())) return;
    reach_ = age;
  }
}

}  // namespace embermap::bench
