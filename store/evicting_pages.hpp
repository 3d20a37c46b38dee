// Hot pages of a table larger than its share of memory: frames are given away to other pages.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "store/hot_pages.hpp"
#include "store/replacement.hpp"

namespace embermap {

// Batches are numbered. A frame remembers the last batch that used it, and only frames whose last batch is older than every batch
// still at work are ever given away: what a batch uses stays where it is by construction, and ending a batch costs nothing. Which
// of them goes is the policy's choice (replacement.hpp). A batch uses each of its pages once, as it begins: first the pages that
// were in memory, then those it misses, in the order of the file. The former are used in the order in which the batch asks for
// them; but threads that share the look-up of more than 8192 ids tell the policy of up to 256 pages at a time, whoever comes
// first, and a page that two of them meet is used by either. So the order of a large batch's own pages may differ from one run to
// the next; that of batches does not.
//
// A prefetch promises its pages to a batch to come. Promises take at most half of the frames (promisable()), are spared while
// other frames will do, and end when the pages are used. Those that nobody uses end by themselves, counted in batches: soon after
// most pages of the same prefetch were used (its batch has come and wanted no more), else when as many have come as would make
// the slowest of loaders late.
//
// One batch at a time (the one with the turn) gives frames away; it may have to wait for a write or for other batches to end,
// which they do without its help: a batch that waits for the turn, or for a page that another one is reading, and has no frames
// yet, takes itself off the list of those at work.
class EvictingPages final : public HotPages {
 public:
  // 1 <= frames <= kMaxFrames.
  EvictingPages(PageFile& file, std::uint64_t frames, ThreadPool& compute, Worker* cleaner,
                Replacement replacement = Replacement::kLru);
  ~EvictingPages() override;

  std::optional<Hold> hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access,
                           std::span<const std::uint8_t> replaced = {}, const StillWanted& still = {}) override;
  Hold hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access) override;
  std::uint64_t promisable(std::uint64_t wanted, std::function<void()> when_room) override;
  std::shared_ptr<const Expected> expect(std::span<const std::uint64_t> pages) override;
  void flush() override;
  Counts counts() const override;

  static constexpr std::uint64_t kFrameOverhead =
      sizeof(Frame) + 4 + 4 * 8;  // entry, free list, look-up; the policy's comes on top

 private:
  using State = Frame::State;

  // Page -> frame for resident pages: open addressing, linear probing, at most half full. A slot keeps the upper half of the
  // page's hash: where it belongs, and enough to tell most other pages without looking at the frame.
  class Lookup {
   public:
    explicit Lookup(const std::vector<Frame>& frames);
    std::uint32_t find(std::uint64_t page) const noexcept;
    void prefetch(std::uint64_t page) const noexcept { __builtin_prefetch(&slots_[home(tag_of(page))]); }
    // The frame that find() will most likely return: for prefetching it.
    std::uint32_t guess(std::uint64_t page) const noexcept { return slots_[home(tag_of(page))].frame; }
    void insert(std::uint64_t page, std::uint32_t frame) noexcept;
    void erase(std::uint64_t page) noexcept;

   private:
    struct Slot {
      std::uint32_t tag = 0;
      std::uint32_t frame = kAbsent;
    };
    static std::uint32_t tag_of(std::uint64_t page) noexcept {
      return static_cast<std::uint32_t>((page * 0x9E3779B97F4A7C15ULL) >> 32);
    }
    std::uint64_t home(std::uint32_t tag) const noexcept { return tag >> shift_; }
    const std::vector<Frame>& frames_;
    std::vector<Slot> slots_;
    unsigned shift_;
  };

  // Numbers of the batches at work.
  class Active {
   public:
    std::uint64_t begin() {
      done_.push_back(false);
      return first_ + done_.size() - 1;
    }
    void end(std::uint64_t batch) noexcept {
      done_[batch - first_] = true;
      while (!done_.empty() && done_.front()) {
        done_.pop_front();
        ++first_;
      }
    }
    std::uint64_t oldest() const noexcept { return first_; }  // the next one's number if there is none
    // Whether this one, which is at work, is the only one that is.
    bool only(std::uint64_t batch) const noexcept {
      return batch == first_ && std::find(done_.begin() + 1, done_.end(), false) == done_.end();
    }
    std::uint64_t newest() const noexcept { return first_ + done_.size() - 1; }  // begun so far

   private:
    std::deque<bool> done_;
    std::uint64_t first_ = 1;
  };

  // What a look-up found.
  struct Wanted {
    struct Missing {
      std::uint64_t page;
      bool replaced;
    };
    std::vector<std::uint32_t> found;                              // distinct
    std::vector<Missing> missing;                                  // distinct, in the order of the file
    std::vector<std::pair<std::uint32_t, std::uint64_t>> filling;  // frame and page: another batch is reading it
    std::vector<std::uint32_t> writing;                            // found, but write-behind is at it
    std::vector<std::uint64_t> promises;                           // prefetches that found pages were promised by

    void clear();
    void append(const Wanted& other);
  };

  // What one prefetch brought, and nobody has used yet.
  struct Promise {
    std::uint64_t batch;  // of the prefetch: its frames have it
    std::uint64_t pages, left;
    std::uint64_t ends;  // when batches_ is that
  };

  using Lock = std::unique_lock<std::mutex>;
  void release(Hold& hold) noexcept override;
  // All below: with mutex_ held.
  void look_up(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, std::span<const std::uint8_t> replaced,
               std::uint64_t batch, Wanted& wanted);
  // One thread's part: pages [begin, end). Where threads share a look-up, each page is found by one of them.
  template <bool kShared>
  void look_up_part(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                    std::span<const std::uint8_t> replaced, std::uint64_t batch, Wanted& wanted);
  void begin_promise(std::uint64_t batch, const Wanted& wanted);
  void end_promise(std::uint64_t batch) noexcept;  // of one page of that prefetch
  void end_old_promises() noexcept;
  std::uint64_t room_for_promises() const noexcept;
  void offer_room();                 // to whoever waits for it
  void notice(std::uint64_t batch);  // it may be one that is expected
  // Waits until the turn is free and nobody fills what `wanted` found filling.
  void wait_for_turn(const Wanted& wanted, Lock& lock);
  // Frees frames, oldest first, until there is one for each page that is missing. Needs the turn. May let go of the lock, and
  // give the batch another number.
  void make_room(const Wanted& wanted, Access access, std::uint64_t& batch, Lock& lock);
  // Batches that came later, and have ended, used pages that were being written: as long as this one has an older number, those
  // count as in use. It begins once more, as the newest.
  void renew(const Wanted& wanted, std::uint64_t& batch);
  void take_frames(const Wanted& wanted, std::uint64_t batch, Access access, std::vector<std::uint32_t>& read,
                   std::vector<std::uint32_t>& replaced);
  // Frames that were not filled are forgotten.
  std::exception_ptr fill(std::span<const std::uint32_t> frames, const StillWanted& still, Lock& lock);
  void mark_dirty(std::uint32_t frame) noexcept;
  void forget(std::uint32_t frame, bool evicted) noexcept;  // what is in it; the frame is free then
  // Writes these dirty frames with the lock let go.
  void write(std::span<const std::uint32_t> frames, Lock& lock);
  void keep_dirty(std::vector<std::uint32_t>& frames) const;  // those that can be written now, in the order of the file
  void wake_cleaner(std::uint64_t missed) noexcept;
  void clean_behind() noexcept;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a batch, a fill, a write, a turn ended
  std::vector<Frame> frames_;
  std::vector<std::uint32_t> free_;
  Lookup lookup_;
  std::unique_ptr<ReplacementPolicy> policy_;
  Active active_;
  std::deque<Promise> promises_;  // by batch
  std::uint64_t promised_ = 0;    // pages, of all of them
  std::uint64_t batches_ = 0;     // that were no prefetches
  std::uint64_t room_wanted_ = 0;
  std::function<void()> when_room_;
  std::vector<std::shared_ptr<Expected>> expected_;
  bool turn_taken_ = false;
  bool closed_ = false;  // the batch with the turn waits for all others: newcomers wait
  Worker* cleaner_;
  bool cleaning_ = false, stop_ = false;
  bool cleaner_failed_ = false;    // the next batch in need of frames meets the error itself
  std::uint64_t clean_share_ = 0;  // frames that should be ready to be given away
  std::uint64_t taken_since_ = 0;  // frames given away since write-behind looked
  Counts counts_;
};

}  // namespace embermap
