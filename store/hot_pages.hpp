// The pages of one table that are in memory: frames of the slab and which page each holds. What batches, scans and commits see;
// WholePages and EvictingPages are the two ways it is done.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/thread_pool.hpp"
#include "store/page_file.hpp"
#include "store/replacement.hpp"
#include "store/slab.hpp"

namespace embermap {

class Worker;

enum class Access : std::uint8_t {
  kRead,
  kWrite,
  kPrefetch  // as kRead, for a batch that is still to come: a promise, see promisable()
};

// What HotPages::hold() throws with Access::kRead where the frames that it could have are dirty and what is in them cannot be
// written: the disk is full, or the store takes no writes any more. Reading needs neither: the pages can be read past the frames.
class NoFrames final : public std::exception {
 public:
  explicit NoFrames(std::exception_ptr cause) : cause_{std::move(cause)} {}
  const char* what() const noexcept override { return "dirty pages cannot be written to make room for others"; }
  [[noreturn]] void rethrow_cause() const { std::rethrow_exception(cause_); }

 private:
  std::exception_ptr cause_;
};

// Thread safety: all members may be called from several threads. Residency is decided under one lock; reading misses and copying
// rows happen outside it, with the pages held. Whoever writes into frames must hold them with Access::kWrite and keep other users
// of the same rows away (the table's lock does); flush() runs without other calls. A thread that has a Hold must not ask for
// another one.
class HotPages {
 public:
  static constexpr std::uint32_t kAbsent = kNoFrame;
  static constexpr std::uint64_t kMaxFrames = 1ULL << 31;

  struct Counts {
    std::uint64_t hits = 0, misses = 0, evictions = 0, resident = 0, dirty = 0;
    std::uint64_t waited_ns = 0;  // how long batches waited for the disk, added up over threads
  };

  // Pages held by one batch, until it dies: they stay where they are.
  class [[nodiscard]] Hold {
   public:
    Hold(Hold&& other) noexcept
        : owner_{std::exchange(other.owner_, nullptr)},
          ticket_{other.ticket_},
          pages_{other.pages_},
          frames_{std::move(other.frames_)},
          replaced_{other.replaced_} {}
    Hold& operator=(Hold&&) = delete;
    ~Hold() {
      if (owner_ != nullptr) owner_->release(*this);
    }
    std::uint64_t pages() const noexcept { return pages_; }  // distinct ones
    // All rows of the pages that were promised to be replaced are written now. Without it those that were not in memory are
    // forgotten when the hold dies, since nobody knows what is in them.
    void replaced() noexcept { replaced_ = true; }

   private:
    friend class HotPages;
    friend class WholePages;
    friend class EvictingPages;
    Hold(HotPages* owner, std::uint64_t ticket, std::uint64_t pages, std::vector<std::uint32_t> frames)
        : owner_{owner}, ticket_{ticket}, pages_{pages}, frames_{std::move(frames)} {}
    HotPages* owner_;
    std::uint64_t ticket_;  // what the owner knows the hold by
    std::uint64_t pages_;
    std::vector<std::uint32_t> frames_;  // those that need more than the ticket when the hold ends
    bool replaced_ = false;
  };

  virtual ~HotPages() = default;
  HotPages(const HotPages&) = delete;
  HotPages& operator=(const HotPages&) = delete;

  // Makes pages[i] resident in frame frame_of[i] and holds it; pages may repeat. Misses are read together. With Access::kWrite
  // the pages are marked dirty here, before anyone can change them: a dirty mark cannot be lost. nullopt, and nothing done, if
  // there are more distinct pages than frames. Waits while other holds leave too few frames. Throws what PageFile::read and write
  // throw, or NoFrames; nothing is held then.
  // `replaced` (empty, or one flag for each of `pages`): the caller will write every
  // row of the page, so that a page that is not in memory is neither read nor generated; the hold's replaced() says that it was
  // done.
  // `still` (of a prefetch): where it says no while pages are read, this throws NotWanted; those that were read stay in memory.
  virtual std::optional<Hold> hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access,
                                   std::span<const std::uint8_t> replaced = {}, const StillWanted& still = {}) = 0;

  // A page that Access::kPrefetch wants is promised to a batch: until one uses it, it is given away only to a batch that finds no
  // other frame, never to a prefetch. How many of `wanted` pages may be promised now: promises take half of the frames. If it is
  // 0, `when_room` (the last that was given) is called once when there may be room, and when these hot pages end, with locks
  // held.
  virtual std::uint64_t promisable(std::uint64_t wanted, std::function<void()> when_room) = 0;
  // A batch of these pages will come. Watches for it as long as somebody keeps the result: a prefetch that comes after its batch
  // has nothing to read.
  struct Expected {
    std::vector<std::uint64_t> pages;  // some of them
    std::atomic<bool> came{false};
  };
  virtual std::shared_ptr<const Expected> expect(std::span<const std::uint64_t> pages) = 0;

  // For each page, which must be distinct: holds it if it is in memory (frame_of[i] its frame) or sets kAbsent. For scans, which
  // load nothing and do not count as use.
  virtual Hold hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access) = 0;

  // Writes all dirty pages to the file (not synced).
  virtual void flush() = 0;
  virtual Counts counts() const = 0;

  std::uint64_t frames() const noexcept { return frame_count_; }
  std::byte* frame(std::uint32_t index) const noexcept { return slab_.data() + index * page_bytes_; }
  const Slab& slab() const noexcept { return slab_; }
  // Whether every page of the table has a frame, the one of its own number: row r then lies at slab().data() + r * stride.
  bool whole() const noexcept { return whole_; }

 protected:
  HotPages(PageFile& file, std::uint64_t frames, ThreadPool& compute, bool whole);
  virtual void release(Hold& hold) noexcept = 0;

  PageFile& file_;
  ThreadPool& compute_;

 private:
  const std::uint64_t page_bytes_;
  const std::uint64_t frame_count_;
  const bool whole_;
  Slab slab_;
};

// Makes whichever kind fits: WholePages if frames >= the table's pages. Frames are prefaulted. `cleaner` runs write-behind
// (null: dirty pages are written when their frames are needed).
std::unique_ptr<HotPages> make_hot_pages(PageFile& file, std::uint64_t frames, ThreadPool& compute, Worker* cleaner,
                                         Replacement replacement = Replacement::kLru);

// Memory that a frame takes besides its page, at most, where the table does not fit.
std::uint64_t frame_overhead(Replacement replacement) noexcept;
// Memory that `frames` frames of a table of `pages` pages take besides the pages themselves.
std::uint64_t frames_overhead(std::uint64_t frames, std::uint64_t pages, Replacement replacement) noexcept;

}  // namespace embermap
