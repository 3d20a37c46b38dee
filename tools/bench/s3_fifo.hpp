// Which page leaves memory. docs/replacement.md has the measurements behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tools/bench/recent_holds.hpp"

namespace embermap::bench {

// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023) over frames 0..n-1, made for batches by
// RecentHolds. New pages enter a small FIFO. Those used there go on to the main FIFO, the others leave and are remembered for a
// while; a remembered page that comes back enters the main FIFO at once. A page at the end of the main FIFO gets another round
// for each use since its last one.
//
// A hold is: begin(), used() of what is in memory, make_room(), then victim() and inserted() for what is not.
//
// Time: used() touches its frame only; victim() is O(1), amortised over the pages of the last few holds. Memory: 24 bytes a frame
// and 10 for each page remembered. Thread safety: none of its own; the owner's lock covers every call.
class S3Fifo {
 public:
  struct Options {
    double small = 0.1;        // share of the frames in the small FIFO, from which it gives pages away
    double remembered = 0.9;   // pages remembered, as a share of the frames
    std::uint8_t promote = 1;  // uses that count, to go on to the main FIFO
    std::uint8_t limit = 3;    // uses kept
    RecentHolds::Options recent;
  };
  using Hold = RecentHolds::Hold;
  static constexpr std::uint32_t kNone = 0xFFFFFFFFU;

  // 1 <= `frames` < kNone.
  explicit S3Fifo(std::uint64_t frames) : S3Fifo(frames, Options{}) {}
  S3Fifo(std::uint64_t frames, const Options& options);

  void begin(Hold hold) noexcept;
  // A page of the hold is in memory. Once a page, before make_room().
  void used(std::uint32_t frame) noexcept;
  // The hold will ask for so many victims.
  void make_room(std::uint64_t victims) noexcept;
  // Takes out a frame for which can_evict(frame) holds; kNone if there is none. Between begin() and the last victim() of a hold
  // frames may cease to be evictable, not become so.
  template <typename CanEvict>
  std::uint32_t victim(CanEvict&& can_evict);
  // The frame, which was out, has the page now.
  void inserted(std::uint32_t frame, std::uint64_t page) noexcept;
  // The frame lost its page otherwise than by victim(). Nothing is remembered of it.
  void removed(std::uint32_t frame) noexcept;

  // Frames likely to be victims soon, likeliest first, at most out.size() of them, to be written back ahead of need. How many.
  // Looks at eight times as many frames at most.
  template <typename CanEvict>
  std::size_t likely_victims(CanEvict&& can_evict, std::span<std::uint32_t> out) const;

  static std::uint64_t memory_bytes(std::uint64_t frames, const Options& options) noexcept;

 private:
  enum class Place : std::uint8_t { kOut, kSmall, kMain };
  struct Frame {
    std::uint32_t newer = kNone, older = kNone;
    std::uint32_t page_hash = 0;
    std::uint8_t uses = 0;
    Place place = Place::kOut;
  };
  static_assert(sizeof(Frame) == 16);
  struct Queue {
    std::uint32_t newest = kNone, oldest = kNone;
    std::uint64_t size = 0;
    bool exhausted = false;  // none of its frames can go in this hold
  };

  // Hashes of pages with the time they left, in buckets; a bucket forgets its oldest.
  class Memory {
   public:
    explicit Memory(std::uint64_t reach) : reach_{reach}, slots_(slots(reach)) {}
    void add(std::uint32_t hash) noexcept;
    bool take(std::uint32_t hash) noexcept;
    static std::uint64_t slots(std::uint64_t reach) noexcept;
    struct Slot {
      std::uint32_t hash = 0, time = 0;  // time 0: empty
    };

   private:
    static constexpr std::uint64_t kBucket = 8;
    std::span<Slot> bucket(std::uint32_t hash) noexcept;
    std::uint64_t reach_;
    std::vector<Slot> slots_;
    std::uint32_t now_ = 0;
  };

  Queue& queue(Place place) noexcept { return place == Place::kSmall ? small_ : main_; }
  void push(std::uint32_t index, Place place) noexcept;
  void unlink(std::uint32_t index) noexcept;
  void look_again() noexcept { small_.exhausted = main_.exhausted = false; }
  template <typename CanEvict>
  std::uint32_t oldest(Place place, CanEvict& can_evict);
  template <typename CanEvict>
  std::uint32_t find_victim(CanEvict& can_evict);

  Options options_;
  RecentHolds recent_;
  std::vector<Frame> frames_;
  Queue small_, main_;
  std::uint64_t small_frames_;
  Memory memory_;
};

// The oldest frame that may go. Others met on the way begin a new round, so that a hold meets them once.
template <typename CanEvict>
std::uint32_t S3Fifo::oldest(Place place, CanEvict& can_evict) {
  Queue& from = queue(place);
  if (from.exhausted) return kNone;
  for (std::uint64_t left = from.size; left > 0; --left) {
    const std::uint32_t index = from.oldest;
    if (!recent_.guarded(index) && can_evict(index)) return index;
    unlink(index);
    push(index, place);
  }
  from.exhausted = true;
  return kNone;
}

template <typename CanEvict>
std::uint32_t S3Fifo::find_victim(CanEvict& can_evict) {
  for (;;) {
    const bool small_first = small_.size >= small_frames_;
    std::uint32_t index = oldest(small_first ? Place::kSmall : Place::kMain, can_evict);
    if (index == kNone) index = oldest(small_first ? Place::kMain : Place::kSmall, can_evict);
    if (index == kNone) return kNone;
    Frame& frame = frames_[index];
    unlink(index);
    if (frame.place == Place::kSmall) {
      if (frame.uses < options_.promote) {
        memory_.add(frame.page_hash);
        return index;
      }
      frame.uses = 0;
      main_.exhausted = false;
    } else {
      if (frame.uses == 0) return index;
      --frame.uses;
    }
    push(index, Place::kMain);
  }
}

template <typename CanEvict>
std::uint32_t S3Fifo::victim(CanEvict&& can_evict) {
  std::uint32_t index = find_victim(can_evict);
  if (index == kNone) {
    recent_.give_up();
    look_again();
    index = find_victim(can_evict);
    if (index == kNone) return kNone;
  }
  frames_[index].place = Place::kOut;
  recent_.removed(index);
  return index;
}

template <typename CanEvict>
std::size_t S3Fifo::likely_victims(CanEvict&& can_evict, std::span<std::uint32_t> out) const {
  std::size_t found = 0;
  std::uint64_t looks = 8 * std::uint64_t{out.size()};
  const auto walk = [&](const Queue& from, std::uint8_t uses) {
    for (std::uint32_t at = from.oldest; at != kNone && found < out.size() && looks > 0; at = frames_[at].newer, --looks)
      if (frames_[at].uses < uses && !recent_.guarded(at) && can_evict(at)) out[found++] = at;
  };
  walk(small_, options_.promote);
  walk(main_, 1);
  return found;
}

}  // namespace embermap::bench
