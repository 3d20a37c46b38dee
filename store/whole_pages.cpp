#include "store/whole_pages.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <exception>
#include <limits>
#include <mutex>
#include <utility>

#include "base/checked.hpp"
#include "base/lock_soon.hpp"
#include "base/stopwatch.hpp"
#include "kernels/batch.hpp"

namespace embermap {
namespace {
constexpr std::uint64_t kGrain = 4096;      // pages a thread looks up at a time
constexpr std::uint64_t kMarkGrain = 2048;  // rows whose pages it only marks
// A batch with more ids than half of the table's pages counts the pages it uses in bits of each thread's own: marks that all
// threads write take each other's cache lines away, which made a gather by sixteen threads five times slower than its copies.
constexpr std::uint64_t kDenseShare = 2;
constexpr std::uint64_t kFlushPages = 65536;  // pages handed to the file at a time
constexpr auto kAllGood = [](std::uint64_t, std::uint64_t) { return true; };
constexpr auto kNotReplaced = [](std::uint64_t) { return false; };
}  // namespace

WholePages::WholePages(PageFile& file, ThreadPool& compute)
    : HotPages{file, file.geometry().pages(), compute, /*whole=*/true},
      pages_{file.geometry().pages()},
      page_of_row_{file.geometry().rows_per_page},
      state_{std::make_unique<std::atomic<std::uint8_t>[]>(pages_)},
      dirty_{std::make_unique<std::atomic<std::uint8_t>[]>(pages_)},
      last_batch_{std::make_unique<std::atomic<std::uint32_t>[]>(pages_)} {}

bool WholePages::set_dirty(std::uint64_t page) noexcept {
  return dirty_[page].load(std::memory_order_relaxed) == 0 && dirty_[page].exchange(1, std::memory_order_relaxed) == 0;
}

void WholePages::mark_dirty(std::uint64_t page) noexcept {
  if (set_dirty(page)) ++dirty_count_;
}

bool WholePages::use(std::uint64_t page, std::uint32_t batch, Access access, Marks& marks, std::uint64_t* bits) noexcept {
  if (state_[page].load(std::memory_order_acquire) != kReady) return false;
  if (bits != nullptr) {
    bits[page / 64] |= 1ULL << (page % 64);
  } else if (last_batch_[page].load(std::memory_order_relaxed) != batch) {
    // Not an exchange, which costs ten times as much: two threads that meet here at the same moment count the page twice.
    last_batch_[page].store(batch, std::memory_order_relaxed);
    ++marks.used;
  }
  if (access == Access::kWrite && set_dirty(page)) ++marks.dirtied;
  return true;
}

template <class PageOf, class Replaced, class Good>
std::uint64_t WholePages::load(std::uint64_t count, Access access, const PageOf& page_of, const Replaced& replaced,
                               const Good& good, std::vector<std::uint32_t>& held_back, const StillWanted& still) {
  const std::uint32_t batch = ++batch_;
  std::atomic<std::uint64_t> used{0};
  std::vector<Wanted> wanted;
  std::vector<std::uint64_t> together(count > kGrain && count >= pages_ / kDenseShare ? ceil_div(pages_, 64) : 0);
  std::mutex merging;
  std::atomic<bool> refused{false};
  compute_.parallel_for(count, kGrain, [&](std::uint64_t begin, std::uint64_t end) {
    if (!good(begin, end)) refused.store(true, std::memory_order_relaxed);
    if (refused.load(std::memory_order_relaxed)) return;
    Marks mine;
    std::vector<Wanted> absent;
    std::vector<std::uint64_t> bits(together.size());
    for (std::uint64_t i = begin; i < end; ++i) {
      const std::uint64_t page = page_of(i);
      if (use(page, batch, access, mine, bits.empty() ? nullptr : bits.data())) continue;
      if (absent.size() == absent.capacity()) {
        dirty_count_ += std::exchange(mine.dirtied, 0);  // before memory may run out
        absent.reserve(std::max<std::size_t>(64, 2 * absent.size()));
      }
      if (absent.empty() || absent.back().page != page) absent.push_back({page, replaced(i)});
    }
    used += mine.used;
    if (mine.dirtied != 0) dirty_count_ += mine.dirtied;
    if (bits.empty() && absent.empty()) return;
    std::unique_lock lock(merging, std::defer_lock);
    lock_soon(lock);
    for (std::size_t word = 0; word < bits.size(); ++word) together[word] |= bits[word];
    wanted.insert(wanted.end(), absent.begin(), absent.end());
  });
  if (refused) return 0;
  std::uint64_t distinct = used;
  for (const std::uint64_t word : together) distinct += static_cast<std::uint64_t>(std::popcount(word));
  if (!wanted.empty()) {
    const auto by_page = [](const Wanted& a, const Wanted& b) { return a.page < b.page; };
    std::sort(wanted.begin(), wanted.end(), by_page);
    wanted.erase(std::unique(wanted.begin(), wanted.end(), [](const Wanted& a, const Wanted& b) { return a.page == b.page; }),
                 wanted.end());
    distinct += wanted.size();
    std::uint64_t filled = 0;
    {
      const Stopwatch waited(waited_ns_);
      filled = fill(std::move(wanted), access, held_back, still);
    }
    misses_ += filled;
    hits_ += distinct - filled;
  } else {
    hits_ += distinct;
  }
  return distinct;
}

std::uint64_t WholePages::fill(std::vector<Wanted> wanted, Access access, std::vector<std::uint32_t>& held_back,
                               const StillWanted& still) {
  std::uint64_t filled = 0;
  const bool replaces = std::any_of(wanted.begin(), wanted.end(), [](const Wanted& w) { return w.replaced; });
  while (!wanted.empty()) {
    std::vector<PageBuffer> reads;
    std::vector<std::uint32_t> mine;
    std::vector<Wanted> others;       // being filled by someone else
    std::vector<std::uint8_t> there;  // of `reads`
    // All memory now: once a page is marked as being filled, nothing may come in between.
    reads.reserve(wanted.size());
    mine.reserve(wanted.size());
    there.reserve(still ? wanted.size() : 0);
    others.reserve(wanted.size());
    held_back.reserve(held_back.size() + wanted.size());
    {
      std::unique_lock lock(mutex_);
      const auto filling = [&](const Wanted& w) { return state_[w.page].load(std::memory_order_relaxed) == kFilling; };
      // A page that a batch will replace stays "filling" until its rows are written. Such a batch takes all its pages at once,
      // when nobody else fills any of them: it never waits with one in its hands, or two of them could wait for each other.
      if (replaces) changed_.wait(lock, [&] { return std::none_of(wanted.begin(), wanted.end(), filling); });
      for (const Wanted& w : wanted) {
        const std::uint8_t state = state_[w.page].load(std::memory_order_relaxed);
        if (state == kFilling) others.push_back(w);
        if (state == kMissing) {
          state_[w.page].store(kFilling, std::memory_order_relaxed);
          ++resident_;
          if (w.replaced)
            mine.push_back(static_cast<std::uint32_t>(w.page));
          else
            reads.push_back({w.page, frame(static_cast<std::uint32_t>(w.page))});
        }
        if (access == Access::kWrite) mark_dirty(w.page);
      }
    }
    held_back.insert(held_back.end(), mine.begin(), mine.end());
    std::exception_ptr failure;
    try {
      if (still) there.resize(reads.size());
      file_.read(reads, still, there);
    } catch (const NotWanted&) {
      failure = std::current_exception();
    } catch (...) {
      failure = std::current_exception();
      there.clear();
    }
    std::unique_lock lock(mutex_);
    for (std::size_t i = 0; i < reads.size(); ++i) {
      const PageBuffer& page = reads[i];
      const bool filled_it = failure == nullptr || (!there.empty() && there[i] != 0);
      if (!filled_it) {
        --resident_;
        // Whoever's mark it is: a batch that still wants the page marks it again, and nothing is in it for a flush to write.
        if (dirty_[page.page].exchange(0) != 0) --dirty_count_;
      }
      state_[page.page].store(filled_it ? kReady : kMissing, std::memory_order_release);
      if (filled_it) ready_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
    if (failure != nullptr) {
      for (const std::uint32_t page : held_back) {
        state_[page].store(kMissing, std::memory_order_release);
        if (dirty_[page].exchange(0) != 0) --dirty_count_;
        --resident_;
      }
      held_back.clear();
      std::rethrow_exception(failure);
    }
    filled += reads.size() + mine.size();
    changed_.wait(lock, [&] {
      return std::none_of(others.begin(), others.end(),
                          [&](const Wanted& w) { return state_[w.page].load(std::memory_order_acquire) == kFilling; });
    });
    // Where the other one failed, this batch tries for itself.
    std::erase_if(others, [&](const Wanted& w) { return state_[w.page].load(std::memory_order_acquire) == kReady; });
    wanted = std::move(others);
  }
  return filled;
}

std::optional<HotPages::Hold> WholePages::hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of,
                                               Access access, std::span<const std::uint8_t> replaced, const StillWanted& still) {
  std::vector<std::uint32_t> held_back;
  const std::uint64_t distinct = load(
      pages.size(), access,
      [&](std::uint64_t i) {
        frame_of[i] = static_cast<std::uint32_t>(pages[i]);
        return pages[i];
      },
      [&](std::uint64_t i) { return !replaced.empty() && replaced[i] != 0; }, kAllGood, held_back, still);
  return Hold(this, 0, distinct, std::move(held_back));
}

std::optional<std::uint64_t> WholePages::load_rows(std::span<const std::int64_t> ids, std::uint64_t rows) {
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  std::atomic<std::uint64_t> bad{kNone};
  std::vector<std::uint32_t> none;
  load(
      ids.size(), Access::kRead, [&](std::uint64_t i) { return page_of_row_.quotient(static_cast<std::uint64_t>(ids[i])); },
      kNotReplaced,
      [&](std::uint64_t begin, std::uint64_t end) {
        const auto found = first_bad_id(ids.subspan(begin, end - begin), rows);
        if (found) keep_least(bad, begin + *found);
        return !found;
      },
      none);
  // Pieces are handed out in ascending order, and those before the first bad one were all looked at.
  return bad == kNone ? std::nullopt : std::optional{bad.load()};
}

void WholePages::load_rows(const HostKeys& ids, Access access) {
  std::vector<std::uint32_t> none;
  load(
      ids.count, access, [&](std::uint64_t i) { return page_of_row_.quotient(ids[i]); }, kNotReplaced, kAllGood, none);
}

void WholePages::mark_all() noexcept {
  for (std::uint64_t page = 0; page < pages_; ++page) mark_dirty(page);
}

void WholePages::mark_rows(const HostKeys& ids) {
  compute_.parallel_for(ids.count, kMarkGrain, [&](std::uint64_t begin, std::uint64_t end) {
    std::uint64_t dirtied = 0;
    std::array<std::uint64_t, 32> pages;  // their marks lie anywhere: several are on their way at once
    for (std::uint64_t first = begin; first < end; first += pages.size()) {
      const std::uint64_t count = std::min<std::uint64_t>(pages.size(), end - first);
      for (std::uint64_t i = 0; i < count; ++i) {
        pages[i] = page_of_row_.quotient(ids[first + i]);
        __builtin_prefetch(&dirty_[pages[i]], 1);
      }
      for (std::uint64_t i = 0; i < count; ++i) dirtied += set_dirty(pages[i]) ? 1U : 0U;
    }
    if (dirtied != 0) dirty_count_ += dirtied;
  });
}

HotPages::Hold WholePages::hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access) {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    frame_of[i] = kAbsent;
    // A page being read is clean: what the file has is as good.
    if (state_[pages[i]].load(std::memory_order_acquire) != kReady) continue;
    if (access == Access::kWrite) mark_dirty(pages[i]);
    frame_of[i] = static_cast<std::uint32_t>(pages[i]);
    ++found;
  }
  return Hold(this, 0, found, {});
}

void WholePages::release(Hold& hold) noexcept {
  if (hold.frames_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t page : hold.frames_) {
      if (!hold.replaced_) {
        if (dirty_[page].exchange(0) != 0) --dirty_count_;
        --resident_;
      }
      state_[page].store(hold.replaced_ ? kReady : kMissing, std::memory_order_release);
      if (hold.replaced_) ready_.fetch_add(1, std::memory_order_release);
    }
  }
  changed_.notify_all();
}

void WholePages::flush() {
  std::vector<PageBuffer> buffers;
  const auto write = [&] {
    file_.write(buffers);
    for (const PageBuffer& buffer : buffers) dirty_[buffer.page].store(0, std::memory_order_relaxed);
    dirty_count_ -= buffers.size();
    buffers.clear();
  };
  for (std::uint64_t page = 0; page < pages_; ++page) {
    if (dirty_[page].load(std::memory_order_relaxed) == 0) continue;
    buffers.push_back({page, frame(static_cast<std::uint32_t>(page))});
    if (buffers.size() == kFlushPages) write();
  }
  if (!buffers.empty()) write();
}

HotPages::Counts WholePages::counts() const {
  return {
      .hits = hits_, .misses = misses_, .evictions = 0, .resident = resident_, .dirty = dirty_count_, .waited_ns = waited_ns_};
}

}  // namespace embermap
