// Replacement policies behind one interface, to be compared on page traces.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "store/replacement.hpp"
#include "tools/bench/recent_holds.hpp"
#include "tools/bench/s3_fifo.hpp"

namespace embermap::bench {

constexpr std::uint32_t kNone = S3Fifo::kNone;

// The frames of the hold in progress: those stamped with its number.
struct Held {
  const std::uint32_t* stamp;
  std::uint32_t now;
  bool operator()(std::uint32_t frame) const noexcept { return stamp[frame] == now; }
};

// As the store drives a policy: tools/bench/s3_fifo.hpp says in which order.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void begin(RecentHolds::Hold hold) = 0;
  virtual void used(std::uint32_t frame) = 0;
  virtual void make_room(std::uint64_t victims) = 0;
  virtual std::uint32_t victim(const Held& held) = 0;
  virtual void inserted(std::uint32_t frame, std::uint64_t page) = 0;
};

class S3FifoPolicy final : public Policy {
 public:
  S3FifoPolicy(std::uint32_t frames, const S3Fifo::Options& options) : frames_{frames, options} {}
  void begin(RecentHolds::Hold hold) override { frames_.begin(hold); }
  void used(std::uint32_t frame) override { frames_.used(frame); }
  void make_room(std::uint64_t victims) override { frames_.make_room(victims); }
  std::uint32_t victim(const Held& held) override {
    return frames_.victim([&](std::uint32_t frame) { return !held(frame); });
  }
  void inserted(std::uint32_t frame, std::uint64_t page) override { frames_.inserted(frame, page); }

 private:
  S3Fifo frames_;
};

// What the store has, as its hot pages drive it. Passes are batches to it.
class StorePolicy final : public Policy {
 public:
  StorePolicy(std::uint32_t frames, Replacement kind) : frames_(frames), policy_{ReplacementPolicy::make(kind, frames_)} {}
  void begin(RecentHolds::Hold hold) override {
    policy_->begin_batch(++batch_, frames_.size());
    prefetch_ = hold == RecentHolds::Hold::kPrefetch;
  }
  void used(std::uint32_t frame) override {
    const std::uint64_t before = std::exchange(frames_[frame].batch, batch_);
    policy_->used({&frame, 1}, {&before, 1}, batch_);
    if (!prefetch_) frames_[frame].promised = false;
  }
  void make_room(std::uint64_t victims) override { policy_->begin_eviction(victims); }
  std::uint32_t victim(const Held&) override {
    std::uint32_t frame = policy_->victim(batch_, Spare::kRecent);
    if (frame == kNoFrame) {
      policy_->begin_eviction(1);
      frame = policy_->victim(batch_, Spare::kNothing);
    }
    if (frame != kNoFrame) policy_->removed(frame, true);
    return frame;
  }
  void inserted(std::uint32_t index, std::uint64_t page) override {
    Frame& frame = frames_[index];
    frame.page = page;
    frame.batch = batch_;
    frame.state = Frame::State::kReady;
    frame.promised = prefetch_;
    policy_->inserted(index);
  }

 private:
  std::vector<Frame> frames_;
  std::unique_ptr<ReplacementPolicy> policy_;
  std::uint64_t batch_ = 0;
  bool prefetch_ = false;
};

// The others, with RecentHolds in front: a hold asks select() for a victim, with the guard and then without.
class GuardedPolicy : public Policy {
 public:
  GuardedPolicy(std::uint32_t frames, const RecentHolds::Options& options)
      : recent_{frames, options}, newer_(frames, kNone), older_(frames, kNone) {}
  void begin(RecentHolds::Hold hold) final {
    recent_.begin(hold);
    ++epoch_;
  }
  void used(std::uint32_t frame) final { touch(frame, recent_.used(frame)); }
  void make_room(std::uint64_t victims) final { recent_.make_room(victims); }
  std::uint32_t victim(const Held& held) final {
    std::uint32_t frame = select(held);
    if (frame == kNone) {
      recent_.give_up();
      ++epoch_;
      frame = select(held);
    }
    recent_.removed(frame);
    return frame;
  }
  void inserted(std::uint32_t frame, std::uint64_t page) final {
    recent_.inserted(frame);
    add(frame, page);
  }

 protected:
  // A list of frames from newest to oldest.
  struct Queue {
    std::uint32_t newest = kNone, oldest = kNone, size = 0;
    std::uint64_t exhausted = 0;  // the epoch that found no frame in it that may go
  };

  virtual void touch(std::uint32_t frame, bool counts) = 0;
  virtual std::uint32_t select(const Held& held) = 0;  // takes it out; kNone: none may go
  virtual void add(std::uint32_t frame, std::uint64_t page) = 0;

  bool stays(const Held& held, std::uint32_t frame) const noexcept { return held(frame) || recent_.guarded(frame); }
  std::uint64_t epoch() const noexcept { return epoch_; }
  std::uint32_t newer(std::uint32_t frame) const noexcept { return newer_[frame]; }
  void push(Queue& to, std::uint32_t frame) noexcept {
    newer_[frame] = kNone;
    older_[frame] = to.newest;
    (to.newest == kNone ? to.oldest : newer_[to.newest]) = frame;
    to.newest = frame;
    ++to.size;
  }
  void unlink(Queue& from, std::uint32_t frame) noexcept {
    (newer_[frame] == kNone ? from.newest : older_[newer_[frame]]) = older_[frame];
    (older_[frame] == kNone ? from.oldest : newer_[older_[frame]]) = newer_[frame];
    --from.size;
  }
  // The oldest that may go. Others begin a new round, so that a hold meets them once.
  std::uint32_t oldest(Queue& from, const Held& held) noexcept {
    if (from.exhausted == epoch_) return kNone;
    for (std::uint32_t left = from.size; left > 0; --left) {
      const std::uint32_t frame = from.oldest;
      if (!stays(held, frame)) return frame;
      unlink(from, frame);
      push(from, frame);
    }
    from.exhausted = epoch_;
    return kNone;
  }

 private:
  RecentHolds recent_;
  std::vector<std::uint32_t> newer_, older_;
  std::uint64_t epoch_ = 0;
};

class Lru final : public GuardedPolicy {
 public:
  using GuardedPolicy::GuardedPolicy;

 private:
  void touch(std::uint32_t frame, bool) override {
    unlink(queue_, frame);
    push(queue_, frame);
  }
  void add(std::uint32_t frame, std::uint64_t) override { push(queue_, frame); }
  std::uint32_t select(const Held& held) override {
    const std::uint32_t frame = oldest(queue_, held);
    if (frame != kNone) unlink(queue_, frame);
    return frame;
  }
  Queue queue_;
};

// Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI 2024. New pages enter
// at the head; a hand walks from the tail to the head, forgives pages used since it last came by, and evicts the first other.
class Sieve final : public GuardedPolicy {
 public:
  Sieve(std::uint32_t frames, const RecentHolds::Options& options) : GuardedPolicy{frames, options}, used_(frames) {}

 private:
  void touch(std::uint32_t frame, bool counts) override {
    if (counts) used_[frame] = 1;
  }
  void add(std::uint32_t frame, std::uint64_t) override {
    used_[frame] = 0;
    push(queue_, frame);
  }
  std::uint32_t select(const Held& held) override {
    if (queue_.exhausted == epoch()) return kNone;
    for (std::uint64_t left = 2 * std::uint64_t{queue_.size}; left > 0; --left) {
      if (hand_ == kNone) hand_ = queue_.oldest;
      const std::uint32_t frame = hand_;
      hand_ = newer(frame);
      if (stays(held, frame)) continue;
      if (used_[frame] == 0) {
        unlink(queue_, frame);
        return frame;
      }
      used_[frame] = 0;
    }
    queue_.exhausted = epoch();
    return kNone;
  }
  Queue queue_;
  std::vector<std::uint8_t> used_;
  std::uint32_t hand_ = kNone;
};

// A count-min sketch of 4-bit counters with four hash functions, halved after each 10 * frames counts: Einziger, Friedman, Manes,
// "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on Storage 2017.
class FrequencySketch {
 public:
  explicit FrequencySketch(std::uint64_t frames)
      : words_(std::bit_ceil(std::max<std::uint64_t>(frames, 8))), period_{10 * frames} {}
  unsigned count(std::uint64_t page) const noexcept {
    unsigned least = 15;
    for (unsigned row = 0; row < 4; ++row) {
      const auto [word, shift] = place(page, row);
      least = std::min(least, static_cast<unsigned>(words_[word] >> shift) & 15U);
    }
    return least;
  }
  void add(std::uint64_t page) noexcept {
    for (unsigned row = 0; row < 4; ++row) {
      const auto [word, shift] = place(page, row);
      if (((words_[word] >> shift) & 15U) != 15) words_[word] += std::uint64_t{1} << shift;
    }
    if (++added_ < period_) return;
    for (std::uint64_t& word : words_) word = (word >> 1) & 0x7777777777777777ULL;
    added_ /= 2;
  }

 private:
  // A word holds sixteen counters, four for each row of the sketch.
  std::pair<std::uint64_t, unsigned> place(std::uint64_t page, unsigned row) const noexcept {
    std::uint64_t hash = (page + 1) * 0x9E3779B97F4A7C15ULL + row * 0xD6E8FEB86659FD93ULL;
    hash = (hash ^ (hash >> 32)) * 0xBF58476D1CE4E5B9ULL;
    hash ^= hash >> 29;
    return {hash >> 8 & (words_.size() - 1), (row * 4 + static_cast<unsigned>(hash & 3U)) * 4};
  }
  std::vector<std::uint64_t> words_;
  std::uint64_t period_, added_ = 0;
};

// W-TinyLFU of the same paper: an LRU window; what falls out of it meets the victim of the main part, a segmented LRU (80 %
// protected), and the page counted more often of late stays.
class TinyLfu final : public GuardedPolicy {
 public:
  TinyLfu(std::uint32_t frames, const RecentHolds::Options& options, double window)
      : GuardedPolicy{frames, options},
        place_(frames),
        page_(frames),
        sketch_{frames},
        window_frames_{std::max<std::uint32_t>(1, static_cast<std::uint32_t>(window * frames))},
        main_frames_{frames - std::min(frames, window_frames_)},
        protected_frames_{static_cast<std::uint32_t>(0.8 * main_frames_)} {}

 private:
  enum Place : std::uint8_t { kWindow, kProbation, kProtected };
  Queue& queue(std::uint32_t frame) noexcept { return queues_[place_[frame]]; }
  void touch(std::uint32_t frame, bool counts) override {
    if (counts) sketch_.add(page_[frame]);
    move(frame, place_[frame] == kProbation && counts ? kProtected : place_[frame]);
    while (queues_[kProtected].size > protected_frames_) move(queues_[kProtected].oldest, kProbation);
  }
  void add(std::uint32_t frame, std::uint64_t page) override {
    page_[frame] = page;
    sketch_.add(page);
    place_[frame] = kWindow;
    push(queue(frame), frame);
  }
  std::uint32_t select(const Held& held) override {
    for (;;) {
      const std::uint32_t candidate = queues_[kWindow].size >= window_frames_ ? oldest(queues_[kWindow], held) : kNone;
      if (candidate != kNone && queues_[kProbation].size + queues_[kProtected].size < main_frames_) {
        move(candidate, kProbation);
        continue;
      }
      std::uint32_t rival = oldest(queues_[kProbation], held);
      if (rival == kNone) rival = oldest(queues_[kProtected], held);
      if (candidate == kNone && rival == kNone) rival = oldest(queues_[kWindow], held);
      if (candidate == kNone && rival == kNone) return kNone;
      if (candidate == kNone) return take(rival);
      if (rival == kNone || sketch_.count(page_[candidate]) <= sketch_.count(page_[rival])) return take(candidate);
      move(candidate, kProbation);
      return take(rival);
    }
  }
  std::uint32_t take(std::uint32_t frame) noexcept {
    unlink(queue(frame), frame);
    return frame;
  }
  void move(std::uint32_t frame, Place to) noexcept {
    take(frame);
    place_[frame] = to;
    push(queue(frame), frame);
    queue(frame).exhausted = 0;
  }
  std::vector<Place> place_;
  std::vector<std::uint64_t> page_;
  FrequencySketch sketch_;
  std::array<Queue, 3> queues_;
  std::uint32_t window_frames_, main_frames_, protected_frames_;
};

}  // namespace embermap::bench
