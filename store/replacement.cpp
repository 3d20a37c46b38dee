#include "store/replacement.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <utility>

namespace embermap {
namespace {

// Exact LRU in units of batches.
class Lru final : public ReplacementPolicy {
 public:
  explicit Lru(std::vector<Frame>& frames) : frames_{frames}, queue_{frames, 1} {}

  void begin_batch(std::uint64_t, std::uint64_t most) noexcept override { queue_.reserve(std::min(most, queue_.size())); }
  void used(std::span<const std::uint32_t> frames, std::span<const std::uint64_t>, std::uint64_t) noexcept override {
    queue_.append_more(frames);
  }
  void inserted(std::uint32_t index) noexcept override { queue_.append(index); }
  void removed(std::uint32_t index, bool) noexcept override { queue_.remove(index); }

  void begin_eviction_of(std::uint64_t) noexcept override { at_ = queue_.begin(); }
  std::uint32_t victim(std::uint64_t oldest, Spare spare) noexcept override {
    for (; at_ < queue_.end(); ++at_) {
      const std::uint32_t index = queue_.at(at_);
      if (index == kNoFrame || !frames_[index].evictable(oldest)) continue;
      if (spare == Spare::kNothing || !promised(frames_[index])) return index;
    }
    return kNoFrame;
  }
  std::vector<std::uint32_t> upcoming(std::uint64_t most, std::uint64_t oldest) override {
    std::vector<std::uint32_t> frames;
    for (std::uint32_t at = queue_.begin(); at < queue_.end() && frames.size() < most; ++at) {
      const std::uint32_t index = queue_.at(at);
      if (index == kNoFrame) continue;
      if (frames_[index].batch >= oldest) break;  // and so are nearly all behind it
      if (frames_[index].evictable(oldest) && !promised(frames_[index])) frames.push_back(index);
    }
    return frames;
  }

 private:
  std::vector<Frame>& frames_;
  FrameQueue queue_;
  std::uint32_t at_ = 0;
};

// Pages given away not long ago, by a part of their hash: sets of four slots, the oldest of which is overwritten.
class Ghosts {
 public:
  explicit Ghosts(std::uint64_t capacity)
      : capacity_{static_cast<std::uint32_t>(std::min<std::uint64_t>(std::max<std::uint64_t>(capacity, 1), 1U << 31))},
        sets_(std::bit_ceil(std::max<std::uint64_t>(capacity_ / 3, 1))) {}

  void add(std::uint64_t page) noexcept {
    const std::uint64_t hash = mix(page);
    Set& set = sets_[hash & (sets_.size() - 1)];
    Slot* oldest = &set.slots[0];
    for (Slot& slot : set.slots)
      if (now_ - slot.time > now_ - oldest->time) oldest = &slot;
    *oldest = {tag(hash), now_++};
  }
  // True, and forgotten, if the page is one of them.
  bool take(std::uint64_t page) noexcept {
    const std::uint64_t hash = mix(page);
    for (Slot& slot : sets_[hash & (sets_.size() - 1)].slots) {
      if (slot.tag != tag(hash) || now_ - slot.time > capacity_) continue;
      slot.tag = 0;
      return true;
    }
    return false;
  }

 private:
  struct Slot {
    std::uint32_t tag = 0;  // 0: none
    std::uint32_t time = 0;
  };
  struct Set {
    Slot slots[4];
  };
  static std::uint64_t mix(std::uint64_t page) noexcept {
    page = (page ^ (page >> 31)) * 0x9E3779B97F4A7C15ULL;
    return page ^ (page >> 29);
  }
  static std::uint32_t tag(std::uint64_t hash) noexcept { return static_cast<std::uint32_t>(hash >> 32) | 1U; }
  const std::uint32_t capacity_;
  std::vector<Set> sets_;
  std::uint32_t now_ = 1;
};

// S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023) with what
// batches of pages need besides (docs/replacement.md has the measurements):
//  - a page is touched again by the update that follows a gather, and by a prefetch before it: such uses do not count;
//  - what the last few batches touched, and what a prefetch brought for the next one, is kept while older pages will do.
class S3Fifo final : public ReplacementPolicy {
 public:
  explicit S3Fifo(std::vector<Frame>& frames)
      : frames_{frames},
        small_{frames, 1},
        main_{frames, 2},
        ghosts_{frames.size() * 9 / 10},
        small_target_{std::max<std::uint64_t>(frames.size() / 10, 1)} {}

  void begin_batch(std::uint64_t batch, std::uint64_t) noexcept override {
    batch_ = batch;
    recent_[batch % kRecent] = 0;  // of the batch kRecent before, which is no longer recent
  }
  void used(std::span<const std::uint32_t> frames, std::span<const std::uint64_t> before, std::uint64_t batch) noexcept override {
    for (const std::uint32_t index : frames) {
      Frame& frame = frames_[index];
      if (static_cast<std::uint32_t>(batch) - frame.counted < kCorrelated) continue;
      frame.counted = static_cast<std::uint32_t>(batch);
      if (frame.uses < kMostUses) ++frame.uses;
    }
    const std::lock_guard lock(recent_mutex_);
    for (const std::uint64_t last : before) leave_recent(last);
    recent_[batch % kRecent] += frames.size();
  }
  void inserted(std::uint32_t index) noexcept override {
    Frame& frame = frames_[index];
    if (frame.batch + kRecent > batch_) ++recent_[frame.batch % kRecent];
    frame.uses = 0;
    frame.counted = static_cast<std::uint32_t>(frame.batch);
    (ghosts_.take(frame.page) ? main_ : small_).append(index);
  }
  void removed(std::uint32_t index, bool evicted) noexcept override {
    Frame& frame = frames_[index];
    leave_recent(frame.batch);
    if (evicted && frame.queue == kSmall) ghosts_.add(frame.page);
    (frame.queue == kSmall ? small_ : main_).remove(index);
  }

  void begin_eviction_of(std::uint64_t wanted) noexcept override {
    // How many batches back are spared: as many as leave enough older pages, and beyond the last one at most half of all.
    const std::uint64_t resident = small_.size() + main_.size();
    std::uint64_t spared = recent_[batch_ % kRecent];
    guard_ = 0;
    while (guard_ < kGuard) {
      const std::uint64_t next = spared + recent_[(batch_ - guard_ - 1) % kRecent];
      if (resident < next + wanted || (guard_ >= 1 && next > resident / 2)) break;
      spared = next;
      ++guard_;
    }
    small_left_ = small_.size();
    main_left_ = main_.size() * (kMostUses + 1);
    moved_ = false;
  }
  std::uint32_t victim(std::uint64_t oldest, Spare spare) noexcept override {
    // Nobody is met twice between two begin_eviction() but those whose uses are counted down.
    for (;;) {
      if (small_left_ + main_left_ == 0) {
        // Those that came over from small_ stand behind others, which may all have been in use: they are met once more.
        if (!std::exchange(moved_, false)) return kNoFrame;
        main_left_ = main_.size();
      }
      const bool from_small = small_left_ > 0 && (small_.size() > small_target_ || main_left_ == 0);
      FrameQueue& queue = from_small ? small_ : main_;
      std::uint64_t& left = from_small ? small_left_ : main_left_;
      if (queue.size() == 0) {
        left = 0;
        continue;
      }
      const std::uint32_t index = queue.at(queue.begin());
      Frame& frame = frames_[index];
      const bool stays = !frame.evictable(oldest) || kept(frame, spare);
      if (!stays && frame.uses == 0) return index;
      --left;
      if (stays) {
        queue.append(index);
      } else if (from_small) {
        small_.remove(index);
        main_.append(index);
        frame.uses = 0;
        ++main_left_;
        moved_ = true;
      } else {
        --frame.uses;
        main_.append(index);
      }
    }
  }
  std::vector<std::uint32_t> upcoming(std::uint64_t most, std::uint64_t oldest) override {
    std::vector<std::uint32_t> frames;
    for (FrameQueue* queue : {&small_, &main_}) {
      const std::uint64_t share = queue == &small_ ? most - most / 2 : most;
      for (std::uint32_t at = queue->begin(); at < queue->end() && frames.size() < share; ++at) {
        const std::uint32_t index = queue->at(at);
        if (index == kNoFrame) continue;
        const Frame& frame = frames_[index];
        if (frame.evictable(oldest) && frame.uses == 0 && !kept(frame, Spare::kRecent)) frames.push_back(index);
      }
    }
    return frames;
  }

 private:
  static constexpr std::uint8_t kSmall = 1;
  static constexpr std::uint8_t kMostUses = 3;
  static constexpr std::uint32_t kCorrelated = 6;  // batches within which a second use does not count
  static constexpr std::uint64_t kGuard = 4;       // batches back that are spared at most
  static constexpr std::uint64_t kRecent = 8;

  bool kept(const Frame& frame, Spare spare) const noexcept {
    if (spare == Spare::kRecent && frame.batch + guard_ >= batch_) return true;
    return spare != Spare::kNothing && promised(frame);
  }
  void leave_recent(std::uint64_t last_batch) noexcept {
    if (last_batch + kRecent > batch_) --recent_[last_batch % kRecent];
  }
  std::vector<Frame>& frames_;
  FrameQueue small_, main_;
  Ghosts ghosts_;
  const std::uint64_t small_target_;
  std::uint64_t batch_ = 0;
  std::uint64_t guard_ = 0;                       // batches before the last one that are spared
  std::uint64_t small_left_ = 0, main_left_ = 0;  // entries still to be met
  bool moved_ = false;                            // some went from small_ to main_
  std::uint64_t recent_[kRecent] = {};            // frames whose last batch is that one
  std::mutex recent_mutex_;                       // for used()
};

}  // namespace

std::string_view replacement_name(Replacement replacement) { return replacement == Replacement::kLru ? "lru" : "s3fifo"; }

std::optional<Replacement> parse_replacement(std::string_view name) {
  for (const Replacement replacement : {Replacement::kLru, Replacement::kS3Fifo})
    if (name == replacement_name(replacement)) return replacement;
  return std::nullopt;
}

FrameQueue::FrameQueue(std::vector<Frame>& frames, std::uint8_t number)
    : frames_{frames}, log_(entries_for(frames.size())), number_{number} {}

std::uint32_t FrameQueue::begin() noexcept {
  while (begin_ != end_ && at(begin_) == kNoFrame) ++begin_;
  return begin_;
}

void FrameQueue::append(std::uint32_t index) noexcept {
  remove(index);
  if (end_ == log_.size()) compact();
  log_[end_] = index;
  frames_[index].queue = number_;
  frames_[index].position = end_++;
  ++size_;
}

void FrameQueue::reserve(std::uint64_t frames) noexcept {
  if (log_.size() - end_ < frames) compact();
}

void FrameQueue::append_more(std::span<const std::uint32_t> frames) noexcept {
  const auto count = static_cast<std::uint32_t>(frames.size());
  std::uint32_t to = std::atomic_ref(end_).fetch_add(count, std::memory_order_relaxed);
  for (const std::uint32_t index : frames) {
    log_[to] = index;
    frames_[index].position = to++;
  }
}

void FrameQueue::remove(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  if (frame.queue != number_) return;
  frame.queue = 0;
  --size_;
}

void FrameQueue::compact() noexcept {
  // Half of the log is stale at least: this costs as much as the appends that filled it.
  std::uint32_t to = 0;
  for (std::uint32_t from = begin_; from != end_; ++from) {
    const std::uint32_t index = at(from);
    if (index == kNoFrame) continue;
    log_[to] = index;
    frames_[index].position = to++;
  }
  begin_ = 0;
  end_ = to;
}

std::unique_ptr<ReplacementPolicy> ReplacementPolicy::make(Replacement kind, std::vector<Frame>& frames) {
  if (kind == Replacement::kS3Fifo) return std::make_unique<S3Fifo>(frames);
  return std::make_unique<Lru>(frames);
}

std::uint64_t ReplacementPolicy::bytes_per_frame(Replacement kind) noexcept { return kind == Replacement::kLru ? 8 : 2 * 8 + 20; }

}  // namespace embermap
