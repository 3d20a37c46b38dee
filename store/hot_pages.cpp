#include "store/hot_pages.hpp"

#include <algorithm>
#include <bit>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {

HotPages::Lookup::Lookup(std::uint64_t frames) {
  const std::uint64_t slots = std::bit_ceil(std::max<std::uint64_t>(frames * 2, 16));
  slots_.resize(slots);
  shift_ = static_cast<unsigned>(64 - std::countr_zero(slots));
}

std::uint32_t HotPages::Lookup::find(std::uint64_t page) const noexcept {
  for (std::uint64_t at = slot(page);; at = (at + 1) & (slots_.size() - 1)) {
    const Slot& entry = slots_[at];
    if (entry.frame == kAbsent || entry.page == page) return entry.frame;
  }
}

void HotPages::Lookup::insert(std::uint64_t page, std::uint32_t frame) noexcept {
  std::uint64_t at = slot(page);
  while (slots_[at].frame != kAbsent) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = {page, frame};
}

void HotPages::Lookup::erase(std::uint64_t page) noexcept {
  const std::uint64_t mask = slots_.size() - 1;
  std::uint64_t hole = slot(page);
  while (slots_[hole].frame != kAbsent && slots_[hole].page != page) hole = (hole + 1) & mask;
  if (slots_[hole].frame == kAbsent) return;
  // Moves later entries of the run back over the hole, so that no probe stops early.
  for (std::uint64_t at = (hole + 1) & mask; slots_[at].frame != kAbsent; at = (at + 1) & mask) {
    const std::uint64_t home = slot(slots_[at].page);
    if (((at - home) & mask) >= ((at - hole) & mask)) {
      slots_[hole] = slots_[at];
      hole = at;
    }
  }
  slots_[hole].frame = kAbsent;
}

HotPages::HotPages(PageFile& file, std::uint64_t frames, ThreadPool& compute)
    : file_{file},
      page_bytes_{file.geometry().page_bytes()},
      slab_{checked_mul(frames, file.geometry().page_bytes(), "bytes of the slab"), compute},
      frames_(frames),
      lookup_{frames} {
  free_.reserve(frames);
  for (std::uint64_t i = frames; i > 0; --i) free_.push_back(static_cast<std::uint32_t>(i - 1));
}

void HotPages::append(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  frame.previous = newest_;
  frame.next = kAbsent;
  (newest_ == kAbsent ? oldest_ : frames_[newest_].next) = index;
  newest_ = index;
}

void HotPages::unlink(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  (frame.previous == kAbsent ? oldest_ : frames_[frame.previous].next) = frame.next;
  (frame.next == kAbsent ? newest_ : frames_[frame.next].previous) = frame.previous;
}

void HotPages::acquire(std::uint32_t index) noexcept {
  if (frames_[index].holds++ == 0) ++held_;
}

void HotPages::use(std::uint32_t index) noexcept {
  unlink(index);
  append(index);
}

void HotPages::let_go(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  if (--frame.holds != 0) return;
  --held_;
  if (frame.state == State::kFailed) {  // in neither list nor look-up table any more
    frame.state = State::kFree;
    free_.push_back(index);
  }
}

void HotPages::release(std::span<const std::uint32_t> frames) noexcept {
  {
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t frame : frames) let_go(frame);
  }
  changed_.notify_all();
}

std::uint32_t HotPages::oldest_unheld(std::uint32_t from) const noexcept {
  while (from != kAbsent && frames_[from].holds != 0) from = frames_[from].next;
  return from;
}

void HotPages::clean(std::uint64_t victims) {
  if (victims <= free_.size()) return;
  const std::uint64_t wanted = victims - free_.size();
  // One write of many pages costs little more than one of few: where any is needed, a sixteenth of the frames is cleaned.
  const std::uint64_t reach = std::max<std::uint64_t>(wanted, frames_.size() / 16);
  std::vector<PageBuffer> buffers;
  std::vector<std::uint32_t> cleaned;
  std::uint64_t seen = 0;
  for (std::uint32_t at = oldest_unheld(oldest_); at != kAbsent && seen < reach; at = oldest_unheld(frames_[at].next), ++seen) {
    if (seen == wanted && buffers.empty()) return;  // the victims are clean
    if (!frames_[at].dirty) continue;
    buffers.push_back({frames_[at].page, frame(at)});
    cleaned.push_back(at);
  }
  file_.write(buffers);
  for (const std::uint32_t index : cleaned) frames_[index].dirty = false;
  counts_.dirty -= cleaned.size();
}

std::uint32_t HotPages::take_victim() {
  if (!free_.empty()) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  const std::uint32_t index = oldest_unheld(oldest_);
  unlink(index);
  lookup_.erase(frames_[index].page);
  ++counts_.evictions;
  --counts_.resident;
  return index;
}

std::optional<HotPages::Hold> HotPages::hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                             Access access) {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::vector<std::uint32_t> found;    // frames of the pages that are in memory, in the order of the batch
    std::vector<std::uint64_t> missing;  // the others, distinct, in the order of the file
    if (!look_up(pages, frame_of, found, missing, lock)) return std::nullopt;
    const std::size_t hits = found.size();
    for (const std::uint32_t index : found) acquire(index);
    std::exception_ptr failure;
    try {
      clean(missing.size());
      found.reserve(hits + missing.size());
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure == nullptr) {
      for (std::size_t i = 0; i < hits; ++i) {
        use(found[i]);
        mark(frames_[found[i]], access);
      }
      failure = fill(missing, access, found, lock);
      for (std::size_t i = 0; i < pages.size(); ++i)
        if (frame_of[i] == kAbsent) frame_of[i] = lookup_.find(pages[i]);
    }
    // Pages that another batch is reading just now. If that fails, this batch tries for itself.
    bool retry = false;
    for (std::size_t i = 0; i < hits && failure == nullptr; ++i) {
      changed_.wait(lock, [&] { return frames_[found[i]].state != State::kFilling; });
      retry = retry || frames_[found[i]].state == State::kFailed;
    }
    if (failure == nullptr && !retry) {
      counts_.hits += hits;
      counts_.misses += missing.size();
      return Hold(this, std::move(found));
    }
    for (const std::uint32_t index : found) let_go(index);
    changed_.notify_all();
    if (failure != nullptr) std::rethrow_exception(failure);
  }
}

bool HotPages::look_up(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, std::vector<std::uint32_t>& found,
                       std::vector<std::uint64_t>& missing, std::unique_lock<std::mutex>& lock) {
  constexpr std::size_t kAhead = 16;  // look-ups in flight
  for (;;) {
    found.clear();
    missing.clear();
    ++batch_;
    std::uint64_t unheld = 0;
    for (std::size_t i = 0; i < pages.size(); ++i) {
      if (i + kAhead < pages.size()) lookup_.prefetch(pages[i + kAhead]);
      const std::uint32_t index = lookup_.find(pages[i]);
      frame_of[i] = index;
      if (index == kAbsent) {
        if (missing.empty() || missing.back() != pages[i]) missing.push_back(pages[i]);
      } else if (frames_[index].batch != batch_) {
        frames_[index].batch = batch_;
        unheld += frames_[index].holds == 0;
        found.push_back(index);
      }
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    if (found.size() + missing.size() > frames_.size()) return false;
    if (missing.size() <= frames_.size() - held_ - unheld) return true;
    changed_.wait(lock);
  }
}

void HotPages::mark(Frame& frame, Access access) noexcept {
  if (access == Access::kRead || frame.dirty) return;
  frame.dirty = true;
  ++counts_.dirty;
}

std::exception_ptr HotPages::fill(std::span<const std::uint64_t> missing, Access access, std::vector<std::uint32_t>& found,
                                  std::unique_lock<std::mutex>& lock) {
  if (missing.empty()) return nullptr;
  const std::size_t first = found.size();
  std::vector<PageBuffer> buffers;
  std::exception_ptr failure;
  try {
    buffers.reserve(missing.size());
    for (const std::uint64_t page : missing) {
      const std::uint32_t index = take_victim();
      frames_[index] = {.page = page, .batch = batch_, .holds = 1, .state = State::kFilling};
      ++held_;
      ++counts_.resident;
      mark(frames_[index], access);
      lookup_.insert(page, index);
      append(index);
      found.push_back(index);
      buffers.push_back({page, frame(index)});
    }
    lock.unlock();
    file_.read(buffers);
  } catch (...) {
    failure = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  for (std::size_t i = first; i < found.size(); ++i) {
    Frame& frame = frames_[found[i]];
    if (failure == nullptr) {
      frame.state = State::kReady;
      continue;
    }
    frame.state = State::kFailed;
    unlink(found[i]);
    lookup_.erase(frame.page);
    --counts_.resident;
    counts_.dirty -= frame.dirty;
    frame.dirty = false;
  }
  changed_.notify_all();
  return failure;
}

HotPages::Hold HotPages::hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access) {
  std::vector<std::uint32_t> found;
  found.reserve(pages.size());
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::uint32_t index = lookup_.find(pages[i]);
    // A page being read is clean: what the file has is as good.
    if (index == kAbsent || frames_[index].state != State::kReady) {
      frame_of[i] = kAbsent;
      continue;
    }
    Frame& frame = frames_[index];
    acquire(index);
    mark(frame, access);
    frame_of[i] = index;
    found.push_back(index);
  }
  return Hold(this, std::move(found));
}

void HotPages::flush() {
  const std::lock_guard lock(mutex_);
  std::vector<PageBuffer> buffers;
  buffers.reserve(counts_.dirty);
  for (std::uint32_t i = 0; i < frames_.size(); ++i)
    if (frames_[i].dirty) buffers.push_back({frames_[i].page, frame(i)});
  file_.write(buffers);
  for (Frame& frame : frames_) frame.dirty = false;
  counts_.dirty = 0;
}

HotPages::Counts HotPages::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace embermap
