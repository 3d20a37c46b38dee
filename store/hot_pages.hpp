// The pages of one table that are in memory: frames of the slab, which page each holds, how recently it was used, whether it is
// dirty, and which batches hold it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/thread_pool.hpp"
#include "store/page_file.hpp"
#include "store/slab.hpp"

namespace embermap {

enum class Access : std::uint8_t { kRead, kWrite };

// Replacement is exact LRU in units of batches: a hold uses each of its pages once, as it begins: first the pages that were in
// memory, in the order in which the batch asks for them, then those it misses, in the order of the file. A held page is never
// evicted. A frame is free, or in the look-up table and the LRU list; a fill that failed takes it out of both, and it becomes
// free when the last batch that waited for it has let go.
//
// Thread safety: all members may be called from several threads. Residency is decided under one lock; reading misses and copying
// rows happen outside it, with the pages held. Whoever writes into frames must hold them with Access::kWrite and keep other
// writers of the same rows and flush() away (the table's lock does).
class HotPages {
 public:
  // Frame `i` of the slab begins at data() + i * page_bytes. `frames` >= 1. Allocates and prefaults.
  HotPages(PageFile& file, std::uint64_t frames, ThreadPool& compute);
  ~HotPages() = default;
  HotPages(const HotPages&) = delete;
  HotPages& operator=(const HotPages&) = delete;

  // Pages held by one batch, until it dies.
  class [[nodiscard]] Hold {
   public:
    Hold(Hold&& other) noexcept : owner_{std::exchange(other.owner_, nullptr)}, frames_{std::move(other.frames_)} {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (owner_ != nullptr) owner_->release(frames_);
    }
    std::uint64_t pages() const noexcept { return frames_.size(); }

   private:
    friend class HotPages;
    Hold(HotPages* owner, std::vector<std::uint32_t> frames) : owner_{owner}, frames_{std::move(frames)} {}
    HotPages* owner_;
    std::vector<std::uint32_t> frames_;
  };

  // Makes pages[i] resident in frame frame_of[i] and holds it; pages may repeat. Misses are read together. With Access::kWrite
  // the pages are marked dirty here, before anyone can change them: a dirty mark cannot be lost. nullopt, and nothing done, if
  // there are more distinct pages than frames. Waits while other holds leave too few frames. Throws what PageFile::read and write
  // throw; nothing is held then.
  std::optional<Hold> hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access);

  // Copies what is resident: for each page, holds it if it is in memory (frame_of[i] its frame) or sets kAbsent. For scans, which
  // load nothing and do not count as use.
  Hold hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access);
  static constexpr std::uint32_t kAbsent = 0xFFFFFFFFU;

  // Writes all dirty pages to the file (not synced). Needs the absence of writers.
  void flush();
  std::uint64_t frames() const noexcept { return frames_.size(); }
  std::byte* frame(std::uint32_t index) const noexcept { return slab_.data() + index * page_bytes_; }
  const Slab& slab() const noexcept { return slab_; }

  struct Counts {
    std::uint64_t hits = 0, misses = 0, evictions = 0, resident = 0, dirty = 0;
  };
  Counts counts() const;

  // Memory a frame takes besides its page: its entry and its part of the look-up table.
  static constexpr std::uint64_t kFrameOverhead = 40 + 2 * 2 * 16;

 private:
  enum class State : std::uint8_t { kFree, kFilling, kReady, kFailed };
  struct Frame {
    std::uint64_t page = 0;
    std::uint64_t batch = 0;  // the last batch that asked for it
    std::uint32_t previous = kAbsent, next = kAbsent;
    std::uint32_t holds = 0;
    State state = State::kFree;
    bool dirty = false;
  };
  static_assert(sizeof(Frame) <= 40);

  // Page -> frame for resident pages: open addressing, linear probing, at most half full.
  class Lookup {
   public:
    explicit Lookup(std::uint64_t frames);
    std::uint32_t find(std::uint64_t page) const noexcept;
    void prefetch(std::uint64_t page) const noexcept { __builtin_prefetch(&slots_[slot(page)]); }
    void insert(std::uint64_t page, std::uint32_t frame) noexcept;
    void erase(std::uint64_t page) noexcept;

   private:
    struct Slot {
      std::uint64_t page = 0;
      std::uint32_t frame = kAbsent;
    };
    std::uint64_t slot(std::uint64_t page) const noexcept { return (page * 0x9E3779B97F4A7C15ULL) >> shift_; }
    std::vector<Slot> slots_;
    unsigned shift_;
  };

  void release(std::span<const std::uint32_t> frames) noexcept;
  // All below: with mutex_ held.
  // Splits the batch into frames found and pages missing; waits until there are frames for the missing ones. False: more pages
  // than frames.
  bool look_up(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, std::vector<std::uint32_t>& found,
               std::vector<std::uint64_t>& missing, std::unique_lock<std::mutex>& lock);
  // Gives each missing page a frame, held, and reads them with the lock released; appends the frames to `found`.
  std::exception_ptr fill(std::span<const std::uint64_t> missing, Access access, std::vector<std::uint32_t>& found,
                          std::unique_lock<std::mutex>& lock);
  void mark(Frame& frame, Access access) noexcept;
  void acquire(std::uint32_t frame) noexcept;
  void let_go(std::uint32_t frame) noexcept;
  void use(std::uint32_t frame) noexcept;                          // makes it the most recently used
  std::uint32_t oldest_unheld(std::uint32_t from) const noexcept;  // from `from` on, towards the newest
  void append(std::uint32_t frame) noexcept;                       // most recently used end
  void unlink(std::uint32_t frame) noexcept;
  void clean(std::uint64_t victims);  // makes the next victims clean, writing a larger group of dirty pages at once
  std::uint32_t take_victim();

  PageFile& file_;
  std::uint64_t page_bytes_;
  Slab slab_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a hold ended or a fill ended
  std::vector<Frame> frames_;
  std::vector<std::uint32_t> free_;
  Lookup lookup_;
  std::uint32_t oldest_ = kAbsent, newest_ = kAbsent;
  std::uint64_t batch_ = 0;
  std::uint64_t held_ = 0;  // frames with holds
  Counts counts_;
};

}  // namespace embermap
