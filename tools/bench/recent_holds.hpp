// What a replacement policy must know of batches: which uses say something, and which pages are about to be used again.
#pragma once

#include <cstdint>
#include <vector>

namespace embermap::bench {

// Training touches the pages of a batch two or three times within moments (prefetch, gather, update). That says nothing about how
// hot they are, and they must still be in memory each time, which policies that let new pages go first do not care for. Hence:
//  - A use counts if the last one that counted lies `apart` calls back or more; coming into memory counts as one.
//  - Guard: frames that the last calls used are no victims, as many calls as leave enough other frames, `guard` at most, and
//    beyond the last call only while the guarded are no more than `share` of all. So where batches nearly fill memory the oldest
//    batch goes first, as in LRU.
//  - A prefetched page is no victim until its first use, for eight holds at most.
// A hold is what begin() to the next begin() does; a call is a batch with all its passes.
//
// 8 bytes a frame. Thread safety: none of its own; the owner's lock covers every call.
class RecentHolds {
 public:
  struct Options {
    std::uint32_t apart = 6;
    std::uint32_t guard = 4;  // 0: nothing but the frames of the hold itself, not even prefetched ones
    double share = 0.5;
  };
  enum class Hold : std::uint8_t { kBatch, kNextPass, kPrefetch };
  static constexpr std::uint64_t kFrameBytes = 8;

  RecentHolds(std::uint64_t frames, const Options& options) : options_{options}, uses_(frames) {}

  void begin(Hold hold) noexcept;
  bool used(std::uint32_t frame) noexcept;  // whether this use counts
  void inserted(std::uint32_t frame) noexcept;
  void removed(std::uint32_t frame) noexcept;
  // Decides how far the guard reaches: `victims` frames will be asked for. After the hold's used(), before its inserted().
  void make_room(std::uint64_t victims) noexcept;
  // Ends the guard for this hold: there were not enough others, because other holds keep frames that looked old.
  void give_up() noexcept { reach_ = 0, keep_prefetched_ = false; }
  bool guarded(std::uint32_t frame) const noexcept {
    const std::uint32_t age = now_ - uses_[frame].hold;
    return age <= reach_ || (keep_prefetched_ && uses_[frame].prefetched != 0 && age < kPrefetchHolds);
  }

 private:
  struct Use {
    std::uint32_t hold = 0;            // the last one
    std::uint32_t counted : 31 = 0;    // the call of the last use that counted
    std::uint32_t prefetched : 1 = 0;  // and not used since
  };
  static_assert(sizeof(Use) == kFrameBytes);
  struct Recent {
    std::uint32_t call = 0;
    std::uint64_t frames = 0, prefetched = 0;  // whose last hold it is
  };
  static constexpr std::uint32_t kRecent = 16, kPrefetchHolds = 8;
  static constexpr std::uint32_t kCallMask = 0x7FFFFFFFU;  // calls wrap; only the distance of near ones matters

  Recent& recent(std::uint32_t hold) noexcept { return recent_[hold % kRecent]; }
  void stamp(Use& use) noexcept;
  void unstamp(const Use& use) noexcept;

  Options options_;
  std::vector<Use> uses_;
  std::uint64_t resident_ = 0;
  std::uint32_t now_ = 0, call_ = 0;
  bool prefetching_ = false;
  std::uint32_t reach_ = 0;  // frames used so many holds ago, or later, are guarded
  bool keep_prefetched_ = false;
  Recent recent_[kRecent];
};

}  // namespace embermap::bench
