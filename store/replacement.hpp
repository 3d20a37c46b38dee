// Which page gives its frame away to another one. The choice and its names are for everybody, what is behind them is private to
// store/.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace embermap {

enum class Replacement : std::uint8_t { kLru, kS3Fifo };
std::string_view replacement_name(Replacement replacement);  // "lru", "s3fifo"
std::optional<Replacement> parse_replacement(std::string_view name);

inline constexpr std::uint32_t kNoFrame = 0xFFFFFFFFU;

// What is known of one frame. The first group belongs to EvictingPages, the second to the policy.
struct alignas(32) Frame {
  enum class State : std::uint8_t { kFree, kFilling, kReady };

  std::uint64_t page = 0;
  std::uint64_t batch = 0;  // the last that asked for it
  std::uint16_t scans = 0;  // holds of scans
  State state = State::kFree;
  bool dirty = false;
  bool writing = false;   // write-behind reads it: nobody may change it
  bool promised = false;  // a prefetch (`batch`) brought it, and no batch has used it since

  std::uint8_t uses = 0;
  std::uint8_t queue = 0;
  std::uint32_t position = 0;  // of its entry in that queue
  std::uint32_t counted = 0;   // the batch (its lower half) whose use was counted last

  // `oldest`: number of the oldest batch still at work. What it or a later one asked for stays.
  bool evictable(std::uint64_t oldest) const noexcept {
    return batch < oldest && scans == 0 && state == State::kReady && !writing;
  }
};
static_assert(sizeof(Frame) == 32);  // half a cache line

// Frames in the order in which they were appended. Appending a frame again makes its entry before stale: moving one to the end is
// one write in sequence, where a linked list would touch two neighbours scattered over memory.
class FrameQueue {
 public:
  static constexpr std::uint64_t entries_for(std::uint64_t frames) noexcept { return 2 * frames + 16; }

  FrameQueue(std::vector<Frame>& frames, std::uint8_t number);
  void append(std::uint32_t frame) noexcept;
  // Makes room for the frames of several calls of append_more(), all of which are in the queue, each once.
  void reserve(std::uint64_t frames) noexcept;
  // May be called from several threads at once.
  void append_more(std::span<const std::uint32_t> frames) noexcept;
  void remove(std::uint32_t frame) noexcept;
  std::uint64_t size() const noexcept { return size_; }  // frames in it
  // Positions of entries, stale ones too; append() may renumber them.
  std::uint32_t begin() noexcept;  // of the first frame; end() if there is none
  std::uint32_t end() const noexcept { return end_; }
  std::uint32_t at(std::uint32_t position) const noexcept {  // kNoFrame: stale
    const std::uint32_t frame = log_[position];
    return frames_[frame].queue == number_ && frames_[frame].position == position ? frame : kNoFrame;
  }

 private:
  void compact() noexcept;
  std::vector<Frame>& frames_;
  std::vector<std::uint32_t> log_;
  const std::uint8_t number_;
  std::uint32_t begin_ = 0, end_ = 0;
  std::uint64_t size_ = 0;
};

// What a policy keeps when it is asked for a victim, besides frames that are in use.
enum class Spare : std::uint8_t {
  kNothing,
  kPromised,  // pages that a prefetch brought for a batch still to come
  kRecent     // and those that the policy would rather keep for a moment
};

// Decides which frame is given away next. Not thread-safe but for used(): called with the lock of the pages held. A batch touches
// a page once.
class ReplacementPolicy {
 public:
  static std::unique_ptr<ReplacementPolicy> make(Replacement kind, std::vector<Frame>& frames);
  static std::uint64_t bytes_per_frame(Replacement kind) noexcept;  // at most, besides Frame
  virtual ~ReplacementPolicy() = default;

  // Numbers ascend. The batch will find at most `most` pages in memory.
  virtual void begin_batch(std::uint64_t batch, std::uint64_t most) noexcept = 0;
  // The batch found the pages of these frames in memory. Frame::batch is its number already; before[i] is what it was. Threads
  // that share the look-up of one batch may call it at the same time, for different frames.
  virtual void used(std::span<const std::uint32_t> frames, std::span<const std::uint64_t> before,
                    std::uint64_t batch) noexcept = 0;
  // The frame has got a page; Frame::batch and promised are set.
  virtual void inserted(std::uint32_t frame) noexcept = 0;
  // The page has left the frame: given away, or (`evicted` false) never there for good.
  virtual void removed(std::uint32_t frame, bool evicted) noexcept = 0;

  // Before victims for one batch are asked for, and again for fewer spared ones and whenever the lock was let go in between.
  // Promises of batches before `promises_from` do not count any more.
  void begin_eviction(std::uint64_t wanted, std::uint64_t promises_from = 0) noexcept {
    promises_from_ = promises_from;
    begin_eviction_of(wanted);
  }
  // The next frame to be given away; it stays where it is until removed(). kNoFrame: there is none.
  virtual std::uint32_t victim(std::uint64_t oldest, Spare spare) noexcept = 0;
  // Up to `most` frames that are likely to be given away next, for write-behind.
  virtual std::vector<std::uint32_t> upcoming(std::uint64_t most, std::uint64_t oldest) = 0;

 protected:
  virtual void begin_eviction_of(std::uint64_t wanted) noexcept = 0;
  bool promised(const Frame& frame) const noexcept { return frame.promised && frame.batch >= promises_from_; }

 private:
  std::uint64_t promises_from_ = 0;
};

}  // namespace embermap
