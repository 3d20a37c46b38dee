#include "store/evicting_pages.hpp"

#include <algorithm>
#include <array>
#include <atomic>
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
constexpr std::size_t kUsesBlock = 256;     // uses that the policy is told of at a time
// Batches after which what a prefetch promised and nobody used is no longer kept: sixteen workers of a loader, two batches ahead
// each, are 32 batches to come, each of which is gathered and then updated. Whoever is further ahead than that has more promises
// before this one, and each of them may take some calls. The rest of a prefetch whose batch has come waits for calls of the same
// batch only.
constexpr std::uint64_t kPatience = 64;
constexpr std::uint64_t kPatiencePerPromise = 4;
constexpr std::uint64_t kPatienceForRest = 8;
constexpr std::size_t kWatched = 16;    // pages of a batch by which it is known
constexpr std::size_t kLookedAt = 128;  // pages they are chosen from
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
  if (when_room_) when_room_();
}

void EvictingPages::mark_dirty(std::uint32_t index) noexcept {
  Frame& frame = frames_[index];
  counts_.dirty += frame.dirty ? 0 : 1;
  frame.dirty = true;
}

void EvictingPages::forget(std::uint32_t index, bool evicted) noexcept {
  Frame& frame = frames_[index];
  if (std::exchange(frame.promised, false)) end_promise(frame.batch);
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

void EvictingPages::Wanted::clear() {
  found.clear();
  missing.clear();
  filling.clear();
  writing.clear();
  promises.clear();
}

void EvictingPages::Wanted::append(const Wanted& other) {
  found.insert(found.end(), other.found.begin(), other.found.end());
  missing.insert(missing.end(), other.missing.begin(), other.missing.end());
  filling.insert(filling.end(), other.filling.begin(), other.filling.end());
  writing.insert(writing.end(), other.writing.begin(), other.writing.end());
  promises.insert(promises.end(), other.promises.begin(), other.promises.end());
}

template <bool kShared>
void EvictingPages::look_up_part(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                 std::span<const std::uint8_t> replaced, std::uint64_t batch, Wanted& wanted) {
  // False if the batch has the frame already; `before` is the batch that had it.
  const auto take = [&](Frame& frame, std::uint64_t& before) {
    std::atomic_ref mark(frame.batch);
    before = mark.load(std::memory_order_relaxed);
    if (before == batch) return false;
    if constexpr (kShared) {
      before = mark.exchange(batch, std::memory_order_relaxed);
      return before != batch;
    }
    frame.batch = batch;
    return true;
  };
  std::array<std::uint64_t, kUsesBlock> before;  // of the frames found last, which the policy has not been told of
  std::size_t untold = 0;
  const auto tell = [&] {
    policy_->used(std::span(wanted.found).last(untold), std::span(before).first(untold), batch);
    untold = 0;
  };
  wanted.found.reserve(std::min(pages.size(), frames_.size()));
  for (std::size_t i = 0; i < pages.size(); ++i) {
    // Two steps ahead: first the slot, then the frame it names.
    if (i + kSlotsAhead < pages.size()) lookup_.prefetch(pages[i + kSlotsAhead]);
    if (i + kFramesAhead < pages.size())
      if (const std::uint32_t next = lookup_.guess(pages[i + kFramesAhead]); next != kAbsent)
        __builtin_prefetch(&frames_[next], /*write=*/1);
    const std::uint32_t index = frame_of[i] = lookup_.find(pages[i]);
    if (index == kAbsent) {
      if (wanted.missing.empty() || wanted.missing.back().page != pages[i])
        wanted.missing.push_back({pages[i], !replaced.empty() && replaced[i] != 0});
      continue;
    }
    Frame& frame = frames_[index];
    if (!take(frame, before[untold])) continue;
    if (std::exchange(frame.promised, false)) wanted.promises.push_back(before[untold]);
    if (frame.state == State::kFilling) wanted.filling.emplace_back(index, pages[i]);
    if (frame.writing) wanted.writing.push_back(index);
    wanted.found.push_back(index);
    if (++untold == before.size()) tell();
  }
  tell();
}

void EvictingPages::look_up(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                            std::span<const std::uint8_t> replaced, std::uint64_t batch, Wanted& wanted) {
  policy_->begin_batch(batch, pages.size());
  wanted.clear();
  if (pages.size() <= kFindGrain || compute_.threads() == 1) {
    look_up_part<false>(pages, frame_of, replaced, batch, wanted);
  } else {
    std::mutex joining;
    compute_.parallel_for(pages.size(), kFindGrain, [&](std::uint64_t begin, std::uint64_t end) {
      Wanted part;
      const std::uint64_t count = end - begin;
      look_up_part<true>(pages.subspan(begin, count), frame_of.subspan(begin, count),
                         replaced.empty() ? replaced : replaced.subspan(begin, count), batch, part);
      const std::lock_guard lock(joining);
      wanted.append(part);
    });
  }
  for (const std::uint64_t prefetch : wanted.promises) end_promise(prefetch);
  const auto by_page = [](const Wanted::Missing& a, const Wanted::Missing& b) { return a.page < b.page; };
  if (!std::is_sorted(wanted.missing.begin(), wanted.missing.end(), by_page))
    std::sort(wanted.missing.begin(), wanted.missing.end(), by_page);
  const auto same = [](const Wanted::Missing& a, const Wanted::Missing& b) { return a.page == b.page; };
  wanted.missing.erase(std::unique(wanted.missing.begin(), wanted.missing.end(), same), wanted.missing.end());
}

void EvictingPages::begin_promise(std::uint64_t batch, const Wanted& wanted) {
  std::uint64_t pages = wanted.missing.size();
  for (const std::uint32_t index : wanted.found) {
    Frame& frame = frames_[index];
    // Unless it was used while this one waited for frames, or could not be read.
    frame.promised = frame.batch == batch && frame.state != State::kFree;
    pages += frame.promised ? 1 : 0;
  }
  if (pages == 0) return;
  const auto at = std::upper_bound(promises_.begin(), promises_.end(), batch,
                                   [](std::uint64_t number, const Promise& promise) { return number < promise.batch; });
  promises_.insert(at, {batch, pages, pages, batches_ + kPatience + kPatiencePerPromise * promises_.size()});
  promised_ += pages;
}

void EvictingPages::end_promise(std::uint64_t batch) noexcept {
  const auto promise = std::lower_bound(promises_.begin(), promises_.end(), batch,
                                        [](const Promise& entry, std::uint64_t number) { return entry.batch < number; });
  if (promise == promises_.end() || promise->batch != batch || promise->left == 0) return;
  --promised_;
  --promise->left;
  if (2 * promise->left <= promise->pages) promise->ends = std::min(promise->ends, batches_ + kPatienceForRest);
}

void EvictingPages::end_old_promises() noexcept {
  for (Promise& promise : promises_) {
    if (promise.left == 0 || promise.ends > batches_) continue;
    promised_ -= std::exchange(promise.left, 0);
  }
  while (!promises_.empty() && promises_.front().left == 0) promises_.pop_front();
}

std::uint64_t EvictingPages::room_for_promises() const noexcept {
  const std::uint64_t most = std::max<std::uint64_t>(frames_.size() / 2, 1);
  return most - std::min(promised_, most);
}

void EvictingPages::offer_room() {
  if (when_room_ && room_for_promises() >= room_wanted_) std::exchange(when_room_, nullptr)();
}

std::uint64_t EvictingPages::promisable(std::uint64_t wanted, std::function<void()> when_room) {
  const Lock lock(mutex_);
  // Not a few at a time: many reads at once are what keeps a disk busy.
  room_wanted_ = std::min<std::uint64_t>(wanted, std::max<std::uint64_t>(frames_.size() / 8, 1));
  if (const std::uint64_t room = room_for_promises(); room >= room_wanted_) return std::min(room, wanted);
  when_room_ = std::move(when_room);
  return 0;
}

std::shared_ptr<const HotPages::Expected> EvictingPages::expect(std::span<const std::uint64_t> pages) {
  const Lock lock(mutex_);
  auto expected = std::make_shared<Expected>();
  std::vector<std::uint64_t>& some = expected->pages;
  // Pages that are not in memory: other batches hardly use them. Where there are none, any will do.
  const std::size_t step = std::max<std::size_t>(pages.size() / kLookedAt, 1);
  for (std::size_t i = 0; i < pages.size() && some.size() < kWatched; i += step)
    if (lookup_.find(pages[i]) == kAbsent) some.push_back(pages[i]);
  for (std::size_t i = 0; i < pages.size() && some.size() < kWatched; i += step)
    if (lookup_.find(pages[i]) != kAbsent) some.push_back(pages[i]);
  expected_.push_back(expected);
  return expected;
}

void EvictingPages::notice(std::uint64_t batch) {
  std::erase_if(expected_, [](const auto& expected) { return expected.use_count() == 1 || expected->came; });
  for (const auto& expected : expected_) {
    const auto used = std::count_if(expected->pages.begin(), expected->pages.end(), [&](std::uint64_t page) {
      const std::uint32_t index = lookup_.find(page);
      return index != kAbsent && frames_[index].batch == batch;
    });
    expected->came = static_cast<std::size_t>(used) > expected->pages.size() / 2;
  }
}

void EvictingPages::wait_for_turn(const Wanted& wanted, Lock& lock) {
  changed_.wait(lock, [&] {
    return !turn_taken_ && std::none_of(wanted.filling.begin(), wanted.filling.end(), [&](const auto& entry) {
      return frames_[entry.first].page == entry.second && frames_[entry.first].state == State::kFilling;
    });
  });
}

std::optional<HotPages::Hold> EvictingPages::hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                                  Access access, std::span<const std::uint8_t> replaced,
                                                  const StillWanted& still) {
  Wanted wanted;
  std::vector<std::uint32_t> reads, replaces;
  Lock lock(mutex_);
  if (access != Access::kPrefetch) {
    ++batches_;
    end_old_promises();
  }
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
    look_up(pages, frame_of, replaced, batch, wanted);
    offer_room();
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
    if (!wanted.missing.empty()) make_room(wanted, access, batch, lock);
    take_frames(wanted, batch, access, reads, replaces);
    if (access == Access::kPrefetch)
      begin_promise(batch, wanted);
    else if (!expected_.empty())
      notice(batch);
    if (!wanted.missing.empty()) {
      turn_taken_ = ending.turn = false;
      for (std::size_t i = 0; i < pages.size(); ++i) {
        if (i + kSlotsAhead < pages.size()) lookup_.prefetch(pages[i + kSlotsAhead]);
        if (frame_of[i] == kAbsent) frame_of[i] = lookup_.find(pages[i]);
      }
      wake_cleaner(wanted.missing.size());
      if (const std::exception_ptr failure = fill(reads, still, lock); failure != nullptr) {
        for (const std::uint32_t index : replaces) forget(index, /*evicted=*/false);
        std::rethrow_exception(failure);
      }
    }
    // Pages that another batch is reading just now. If that fails, this batch tries for itself; also where a third one has read
    // the page into the same frame since, which took this batch's mark off it.
    bool retry = false;
    for (const auto& [index, page] : wanted.filling) {
      const Frame& frame = frames_[index];
      changed_.wait(lock, [&, number = page] { return frame.page != number || frame.state != State::kFilling; });
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

void EvictingPages::make_room(const Wanted& wanted, Access access, std::uint64_t& batch, Lock& lock) {
  const std::uint64_t needed = wanted.missing.size();
  Spare spare = Spare::kRecent;
  const auto begin = [&] {
    const std::uint64_t promises_from = promises_.empty() ? ~std::uint64_t{0} : promises_.front().batch;
    if (free_.size() < needed) policy_->begin_eviction(needed - free_.size(), promises_from);
  };
  // A prefetch waits rather than break a promise, if there is something to wait for.
  const auto may_spare_less = [&] {
    return spare == Spare::kRecent || (spare == Spare::kPromised && (access != Access::kPrefetch || active_.only(batch)));
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
    const std::uint32_t index = policy_->victim(active_.oldest(), spare);
    if (index == kNoFrame && may_spare_less()) {
      spare = spare == Spare::kRecent ? Spare::kPromised : Spare::kNothing;
    } else if (index == kNoFrame) {
      // All that is left is in use, or being written. Those who use it need nothing from here to end.
      closed_ = true;
      if (active_.only(batch) && batch != active_.newest())
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
      try {
        write(dirty, lock);
      } catch (const Error&) {
        if (access != Access::kRead) throw;
        throw NoFrames(std::current_exception());
      }
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
  policy_->begin_batch(batch, wanted.found.size());
  for (const std::uint32_t index : wanted.found) {
    if (frames_[index].state == State::kFree) continue;  // its reading has failed
    const std::uint64_t before = std::exchange(frames_[index].batch, batch);
    policy_->used({&index, 1}, {&before, 1}, batch);
  }
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

std::exception_ptr EvictingPages::fill(std::span<const std::uint32_t> frames, const StillWanted& still, Lock& lock) {
  if (frames.empty()) return nullptr;
  std::vector<PageBuffer> buffers;
  std::vector<std::uint8_t> there;  // by page, as the frames are
  std::exception_ptr failure;
  try {
    if (still) there.resize(frames.size());
    buffers.reserve(frames.size());
    for (const std::uint32_t index : frames) buffers.push_back({frames_[index].page, frame(index)});
    lock.unlock();
    file_.read(buffers, still, there);
  } catch (const NotWanted&) {
    failure = std::current_exception();
  } catch (...) {
    failure = std::current_exception();
    there.clear();
  }
  if (!lock.owns_lock()) lock.lock();
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const bool stays = failure == nullptr || (!there.empty() && there[i] != 0);
    if (stays)
      frames_[frames[i]].state = State::kReady;
    else
      forget(frames[i], /*evicted=*/false);
    if (stays && failure != nullptr) ++counts_.misses;  // the caller will not get to that
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
