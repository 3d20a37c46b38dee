#include "store/evicting_pages.hpp"

#include <algorithm>
#include <bit>
#include <exception>
#include <new>
#include <utility>

#include "base/stopwatch.hpp"
#include "store/worker.hpp"

namespace embermap {
namespace {

constexpr std::size_t kSlotsAhead = 24;     // look-ups whose slot is on its way
constexpr std::size_t kFramesAhead = 12;    // of those, look-ups whose frame is
constexpr std::uint64_t kFindGrain = 8192;  // look-ups of a thread at a time
// Write-behind hands this many bytes to the file at a time: enough for the disk to be busy, short enough for whoever wants to
// change one of the pages.
constexpr std::uint64_t kRoundBytes = 4U << 20;

}  // namespace

EvictingPages::Lookup::Lookup(const std::vector<Frame>& frames) : frames_{frames} {
  const std::uint64_t slots = std::bit_ceil(std::max<std::uint64_t>(frames.size() * 2, 16));
  slots_.resize(slots);
  shift_ = static_cast<unsigned>(32 - std::countr_zero(slots));
}

std::uint32_t EvictingPages::Lookup::find(std::uint64_t page) const noexcept {
  const std::uint32_t tag = tag_of(page);
  for (std::uint64_t at = home(tag);; at = (at + 1) & (slots_.size() - 1)) {
    const Slot& slot = slots_[at];
    if (slot.frame == kAbsent || (slot.tag == tag && frames_[slot.frame].page == page)) return slot.frame;
  }
}

void EvictingPages::Lookup::insert(std::uint64_t page, std::uint32_t frame) noexcept {
  const std::uint32_t tag = tag_of(page);
  std::uint64_t at = home(tag);
  while (slots_[at].frame != kAbsent) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = {tag, frame};
}

void EvictingPages::Lookup::erase(std::uint64_t page) noexcept {
  const std::uint64_t mask = slots_.size() - 1;
  const std::uint32_t tag = tag_of(page);
  std::uint64_t hole = home(tag);
  while (slots_[hole].frame != kAbsent && (slots_[hole].tag != tag || frames_[slots_[hole].frame].page != page))
    hole = (hole + 1) & mask;
  if (slots_[hole].frame == kAbsent) return;
  // Moves later entries of the run back over the hole, so that no probe stops early.
  for (std::uint64_t at = (hole + 1) & mask; slots_[at].frame != kAbsent; at = (at + 1) & mask) {
    if (((at - home(slots_[at].tag)) & mask) >= ((at - hole) & mask)) {
      slots_[hole] = slots_[at];
      hole = at;
    }
  }
  slots_[hole].frame = kAbsent;
}

EvictingPages::EvictingPages(PageFile& file, std::uint64_t frames, ThreadPool& compute, Worker* cleaner, Replacement replacement)
    : HotPages{file, frames, compute, /*whole=*/false},
      frames_(frames),
      lookup_{frames_},
      policy_{ReplacementPolicy::make(replacement, frames_)},
      cleaner_{cleaner} {
  free_.reserve(frames);
  for (std::uint64_t i = frames; i > 0; --i) free_.push_back(static_cast<std::uint32_t>(i - 1));
}

EvictingPages::~EvictingPages() {
  Lock lock(mutex_);
  stop_ = true;
  changed_.wait(lock, [&] { return !cleaning_; });
}

void EvictingPages::mark_dirty(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  counts_.dirty += frame.dirty ? 0 : 1;
  frame.dirty = true;
}

void EvictingPages::forget(std::uint32_t index, bool evicted) noexcept {
  Frame& frame = frames_[index];
  lookup_.erase(frame.page);
  policy_->removed(index, evicted);
  frame.state = State::kFree;
  counts_.dirty -= frame.dirty ? 1 : 0;
  frame.dirty = false;
  --counts_.resident;
  free_.push_back(index);
}

void EvictingPages::release(Hold& hold) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (hold.ticket_ == 0) {  // of hold_resident()
      for (const std::uint32_t index : hold.frames_) --frames_[index].scans;
    } else {
      for (const std::uint32_t index : hold.frames_) {
        if (hold.replaced_)
          frames_[index].state = State::kReady;
        else
          forget(index, /*evicted=*/false);
      }
      active_.end(hold.ticket_);
    }
  }
  changed_.notify_all();
}

void EvictingPages::look_up(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access,
                            std::span<const std::uint8_t> replaced, std::uint64_t batch, Wanted& wanted) {
  policy_->begin_batch(batch);
  wanted.found.clear();
  wanted.missing.clear();
  wanted.filling.clear();
  wanted.writing.clear();
  // Finding changes nothing, so threads share it; whose use comes first is decided in the order of the batch.
  compute_.parallel_for(pages.size(), kFindGrain, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      // Two steps ahead: first the slot, then the frame it names.
      if (i + kSlotsAhead < end) lookup_.prefetch(pages[i + kSlotsAhead]);
      if (i + kFramesAhead < end)
        if (const std::uint32_t next = lookup_.guess(pages[i + kFramesAhead]); next != kAbsent)
          __builtin_prefetch(&frames_[next]);
      frame_of[i] = lookup_.find(pages[i]);
    }
  });
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (i + kFramesAhead < pages.size() && frame_of[i + kFramesAhead] != kAbsent)
      __builtin_prefetch(&frames_[frame_of[i + kFramesAhead]], /*write=*/1);
    const std::uint32_t index = frame_of[i];
    if (index == kAbsent) {
      if (wanted.missing.empty() || wanted.missing.back().page != pages[i])
        wanted.missing.push_back({pages[i], !replaced.empty() && replaced[i] != 0});
      continue;
    }
    Frame& frame = frames_[index];
    if (frame.batch == batch) continue;
    policy_->used(index, batch);
    if (access != Access::kPrefetch) frame.promised = false;
    wanted.found.push_back(index);
    if (frame.state == State::kFilling) wanted.filling.emplace_back(index, pages[i]);
    if (frame.writing) wanted.writing.push_back(index);
  }
  const auto by_page = [](const Wanted::Missing& a, const Wanted::Missing& b) { return a.page < b.page; };
  if (!std::is_sorted(wanted.missing.begin(), wanted.missing.end(), by_page))
    std::sort(wanted.missing.begin(), wanted.missing.end(), by_page);
  const auto same = [](const Wanted::Missing& a, const Wanted::Missing& b) { return a.page == b.page; };
  wanted.missing.erase(std::unique(wanted.missing.begin(), wanted.missing.end(), same), wanted.missing.end());
}

void EvictingPages::wait_for_turn(const Wanted& wanted, Lock& lock) {
  changed_.wait(lock, [&] {
    return !turn_taken_ && std::none_of(wanted.filling.begin(), wanted.filling.end(), [&](const auto& entry) {
      return frames_[entry.first].page == entry.second && frames_[entry.first].state == State::kFilling;
    });
  });
}

std::optional<HotPages::Hold> EvictingPages::hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                                  Access access, std::span<const std::uint8_t> replaced) {
  Wanted wanted;
  std::vector<std::uint32_t> reads, replaces;
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !closed_; });
    std::uint64_t batch = active_.begin();
    // On any way out but the good one the batch is no longer at work.
    struct Ending {
      EvictingPages* pages;
      const std::uint64_t& batch;
      bool turn = false;
      ~Ending() {
        if (pages == nullptr) return;
        if (turn) pages->turn_taken_ = false;
        pages->active_.end(batch);
        pages->changed_.notify_all();
      }
    } ending{this, batch};
    look_up(pages, frame_of, access, replaced, batch, wanted);
    const std::uint64_t distinct = wanted.found.size() + wanted.missing.size();
    if (distinct > frames_.size()) return std::nullopt;
    reads.clear();
    replaces.clear();
    std::optional<Stopwatch<std::uint64_t>> waited;
    if (!wanted.missing.empty() || !wanted.filling.empty() || !wanted.writing.empty()) waited.emplace(counts_.waited_ns);
    if (!wanted.missing.empty()) {
      const bool replaces_any =
          std::any_of(wanted.missing.begin(), wanted.missing.end(), [](const Wanted::Missing& m) { return m.replaced; });
      // A page that will be replaced stays "filling" until its rows are written. A batch that has such pages takes them only when
      // it has nobody else's to wait for, or two of them could wait for each other.
      if (turn_taken_ || (replaces_any && !wanted.filling.empty())) {
        active_.end(batch);
        ending.pages = nullptr;
        changed_.notify_all();
        wait_for_turn(wanted, lock);
        continue;
      }
      turn_taken_ = ending.turn = true;
    }
    if (access == Access::kWrite)
      for (const std::uint32_t index : wanted.found) mark_dirty(index);
    if (!wanted.missing.empty()) {
      make_room(wanted, batch, lock);
      take_frames(wanted, batch, access, reads, replaces);
      turn_taken_ = ending.turn = false;
      for (std::size_t i = 0; i < pages.size(); ++i) {
        if (i + kSlotsAhead < pages.size()) lookup_.prefetch(pages[i + kSlotsAhead]);
        if (frame_of[i] == kAbsent) frame_of[i] = lookup_.find(pages[i]);
      }
      wake_cleaner(wanted.missing.size());
      if (const std::exception_ptr failure = fill(reads, lock); failure != nullptr) {
        for (const std::uint32_t index : replaces) forget(index, /*evicted=*/false);
        std::rethrow_exception(failure);
      }
    }
    // Pages that another batch is reading just now. If that fails, this batch tries for itself; also where a third one has read
    // the page into the same frame since, which took this batch's mark off it.
    bool retry = false;
    for (const auto& [index, page] : wanted.filling) {
      const Frame& frame = frames_[index];
      changed_.wait(lock, [&] { return frame.page != page || frame.state != State::kFilling; });
      retry = retry || frame.page != page || frame.state != State::kReady || (access == Access::kWrite && !frame.dirty);
    }
    if (retry) {
      for (const std::uint32_t index : replaces) forget(index, /*evicted=*/false);
      continue;
    }
    if (access == Access::kWrite)
      for (const std::uint32_t index : wanted.writing) changed_.wait(lock, [&] { return !frames_[index].writing; });
    counts_.hits += wanted.found.size();
    counts_.misses += wanted.missing.size();
    ending.pages = nullptr;
    return Hold(this, batch, distinct, std::move(replaces));
  }
}

void EvictingPages::make_room(const Wanted& wanted, std::uint64_t& batch, Lock& lock) {
  const std::uint64_t needed = wanted.missing.size();
  bool strict = true;
  const auto begin = [&] {
    if (free_.size() < needed) policy_->begin_eviction(needed - free_.size());
  };
  // Once this batch has had to wait for others, newcomers wait until it has its frames, also while it writes.
  struct Closing {
    EvictingPages& pages;
    ~Closing() {
      if (!std::exchange(pages.closed_, false)) return;
      pages.changed_.notify_all();
    }
  } const closing{*this};
  begin();
  while (free_.size() < needed) {
    const std::uint32_t index = policy_->victim(active_.oldest(), strict);
    if (index == kNoFrame && strict) {
      strict = false;
    } else if (index == kNoFrame) {
      // All that is left is in use, or being written. Those who use it need nothing from here to end.
      closed_ = true;
      if (active_.only(batch) && !active_.newest(batch))
        renew(wanted, batch);
      else
        changed_.wait(lock);
    } else if (frames_[index].dirty) {
      // Write-behind did not come this far. One write of many pages costs little more than one of few.
      const std::uint64_t most = std::max<std::uint64_t>(16 * kRoundBytes / file_.geometry().page_bytes(), 1);
      const std::uint64_t reach = std::max<std::uint64_t>(needed - free_.size(), frames_.size() / 16);
      auto dirty = policy_->upcoming(std::min(reach, most), active_.oldest());
      dirty.push_back(index);
      keep_dirty(dirty);
      write(dirty, lock);
    } else {
      ++counts_.evictions;
      forget(index, /*evicted=*/true);
      continue;
    }
    begin();
  }
}

void EvictingPages::renew(const Wanted& wanted, std::uint64_t& batch) {
  active_.end(batch);
  batch = active_.begin();
  policy_->begin_batch(batch);
  for (const std::uint32_t index : wanted.found)
    if (frames_[index].state != State::kFree) policy_->used(index, batch);  // free: its reading has failed
}

void EvictingPages::keep_dirty(std::vector<std::uint32_t>& frames) const {
  const std::uint64_t oldest = active_.oldest();
  std::erase_if(frames, [&](std::uint32_t index) { return !frames_[index].dirty || !frames_[index].evictable(oldest); });
  std::sort(frames.begin(), frames.end(), [&](std::uint32_t a, std::uint32_t b) { return frames_[a].page < frames_[b].page; });
  frames.erase(std::unique(frames.begin(), frames.end()), frames.end());
}

void EvictingPages::write(std::span<const std::uint32_t> frames, Lock& lock) {
  std::vector<PageBuffer> buffers;
  buffers.reserve(frames.size());
  for (const std::uint32_t index : frames) {
    frames_[index].writing = true;
    // From here on a mark is a new one: whoever sets it waits until the write has ended before changing anything.
    frames_[index].dirty = false;
    buffers.push_back({frames_[index].page, frame(index)});
  }
  counts_.dirty -= frames.size();
  lock.unlock();
  std::exception_ptr failure;
  try {
    file_.write(buffers);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  for (const std::uint32_t index : frames) {
    frames_[index].writing = false;
    if (failure != nullptr && !frames_[index].dirty) {
      frames_[index].dirty = true;
      ++counts_.dirty;
    }
  }
  changed_.notify_all();
  if (failure != nullptr) std::rethrow_exception(failure);
  cleaner_failed_ = false;
}

void EvictingPages::take_frames(const Wanted& wanted, std::uint64_t batch, Access access, std::vector<std::uint32_t>& reads,
                                std::vector<std::uint32_t>& replaces) {
  reads.reserve(wanted.missing.size());
  replaces.reserve(wanted.missing.size());
  for (const Wanted::Missing& missing : wanted.missing) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    Frame& frame = frames_[index];
    frame = {.page = missing.page, .batch = batch, .state = State::kFilling, .promised = access == Access::kPrefetch};
    ++counts_.resident;
    lookup_.insert(missing.page, index);
    policy_->inserted(index);
    if (access == Access::kWrite) mark_dirty(index);
    (missing.replaced ? replaces : reads).push_back(index);
  }
}

std::exception_ptr EvictingPages::fill(std::span<const std::uint32_t> frames, Lock& lock) {
  if (frames.empty()) return nullptr;
  std::vector<PageBuffer> buffers;
  std::exception_ptr failure;
  try {
    buffers.reserve(frames.size());
    for (const std::uint32_t index : frames) buffers.push_back({frames_[index].page, frame(index)});
    lock.unlock();
    file_.read(buffers);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  for (const std::uint32_t index : frames) {
    if (failure == nullptr)
      frames_[index].state = State::kReady;
    else
      forget(index, /*evicted=*/false);
  }
  changed_.notify_all();
  return failure;
}

HotPages::Hold EvictingPages::hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                            Access access) {
  std::vector<std::uint32_t> found;
  found.reserve(pages.size());
  Lock lock(mutex_);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::uint32_t index = lookup_.find(pages[i]);
    frame_of[i] = kAbsent;
    // A page being read is clean: what the file has is as good.
    if (index == kAbsent || frames_[index].state != State::kReady) continue;
    ++frames_[index].scans;
    if (access == Access::kWrite) mark_dirty(index);
    frame_of[i] = index;
    found.push_back(index);
  }
  if (access == Access::kWrite)
    for (const std::uint32_t index : found) changed_.wait(lock, [&] { return !frames_[index].writing; });
  const std::uint64_t distinct = found.size();
  return Hold(this, 0, distinct, std::move(found));
}

void EvictingPages::flush() {
  Lock lock(mutex_);
  const std::uint64_t most = std::max<std::uint64_t>(kRoundBytes * 16 / file_.geometry().page_bytes(), 1);
  changed_.wait(lock, [&] { return !cleaning_; });
  // By page number, not by age: the file is written from its beginning to its end.
  std::vector<std::uint32_t> dirty;
  dirty.reserve(counts_.dirty);
  for (std::uint32_t i = 0; i < frames_.size(); ++i)
    if (frames_[i].dirty) dirty.push_back(i);
  std::sort(dirty.begin(), dirty.end(), [&](std::uint32_t a, std::uint32_t b) { return frames_[a].page < frames_[b].page; });
  for (std::size_t begin = 0; begin < dirty.size(); begin += most)
    write(std::span(dirty).subspan(begin, std::min<std::size_t>(most, dirty.size() - begin)), lock);
}

void EvictingPages::wake_cleaner(std::uint64_t missed) noexcept {
  taken_since_ += missed;
  if (cleaner_ == nullptr || cleaning_ || stop_ || cleaner_failed_ || counts_.dirty == 0) return;
  // As many frames ready as two batches like this one need, but never less than a sixteenth nor more than half of all.
  clean_share_ = std::clamp(2 * missed, frames_.size() / 16, std::max<std::uint64_t>(frames_.size() / 2, 1));
  if (free_.size() >= clean_share_ || taken_since_ < clean_share_ / 2) return;
  try {
    cleaning_ = cleaner_->add([this] { clean_behind(); });
  } catch (const std::bad_alloc&) {
    // Write-behind is help, not duty: a batch in need of frames writes for itself.
  }
}

void EvictingPages::clean_behind() noexcept {
  Lock lock(mutex_);
  const std::uint64_t most = std::max<std::uint64_t>(kRoundBytes / file_.geometry().page_bytes(), 1);
  try {
    do {
      taken_since_ = 0;
      auto dirty = policy_->upcoming(clean_share_, active_.oldest());
      keep_dirty(dirty);
      std::vector<std::uint32_t> round;
      for (std::size_t begin = 0; begin < dirty.size() && !stop_; begin += most) {
        const auto next = std::span(dirty).subspan(begin, std::min<std::size_t>(most, dirty.size() - begin));
        round.assign(next.begin(), next.end());
        keep_dirty(round);  // the lock was let go: some may have been used, or given away
        if (!round.empty()) write(round, lock);
      }
    } while (!stop_ && counts_.dirty != 0 && taken_since_ >= std::max<std::uint64_t>(clean_share_ / 2, 1));
  } catch (const std::exception&) {
    cleaner_failed_ = true;
  }
  cleaning_ = false;
  changed_.notify_all();
}

HotPages::Counts EvictingPages::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace embermap
