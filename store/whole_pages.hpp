// Hot pages of a table that fits its share of memory: page p lies in frame p, nothing is ever evicted, and a batch that finds all
// its pages takes no lock.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/divider.hpp"
#include "kernels/cuda.hpp"
#include "store/hot_pages.hpp"

namespace embermap {

class WholePages final : public HotPages {
 public:
  WholePages(PageFile& file, ThreadPool& compute);

  std::optional<Hold> hold(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access,
                           std::span<const std::uint8_t> replaced = {}, const StillWanted& still = {}) override;
  // Makes the pages of these rows resident, for good: row `id` then lies at frame(0) + id * stride. If an id is not below `rows`,
  // returns the position of the first such one instead, and has loaded nothing. (One pass over the ids: with many threads the
  // beginning and end of a pass take as long as the pass.)
  std::optional<std::uint64_t> load_rows(std::span<const std::int64_t> ids, std::uint64_t rows);
  // The same for good ones; with Access::kWrite their pages are marked dirty.
  void load_rows(const HostKeys& ids, Access access);
  // Marks their pages dirty, and no more. For pages in memory.
  void mark_rows(const HostKeys& ids);
  void mark_all() noexcept;  // where all_ready()
  // A batch has used so many pages, all of them in memory.
  void count_hits(std::uint64_t pages) noexcept { hits_ += pages; }
  // Every page is in memory, and stays there.
  bool all_ready() const noexcept { return ready_.load(std::memory_order_acquire) == pages_; }
  Hold hold_resident(std::span<const std::uint64_t> pages, std::span<std::uint32_t> frame_of, Access access) override;
  std::uint64_t promisable(std::uint64_t wanted, std::function<void()>) override { return wanted; }
  std::shared_ptr<const Expected> expect(std::span<const std::uint64_t>) override { return std::make_shared<Expected>(); }
  void flush() override;
  Counts counts() const override;

  static constexpr std::uint64_t kFrameOverhead = 8;

 private:
  enum State : std::uint8_t { kMissing, kFilling, kReady };
  // Of one page: what the batch still has to do for it.
  struct Wanted {
    std::uint64_t page;
    bool replaced;
  };
  // What one thread counts for a batch: one counter that all threads write would take longer than the marks.
  struct Marks {
    std::uint64_t used = 0, dirtied = 0;
  };
  // A batch's use of a page: counts it if the batch had not used it yet, or sets its bit in `bits`, and marks it dirty. False if
  // it is not ready.
  bool use(std::uint64_t page, std::uint32_t batch, Access access, Marks& marks, std::uint64_t* bits) noexcept;
  bool set_dirty(std::uint64_t page) noexcept;  // true if it was clean: it counts as dirty then
  void mark_dirty(std::uint64_t page) noexcept;
  // Makes the pages page_of(i), i < count, ready; returns how many distinct ones there were, and in `held_back` the frames of
  // those that the caller will fill.
  // good(begin, end): whether these may be looked at. If one says no, nothing is made ready, and nothing counts.
  template <class PageOf, class Replaced, class Good>
  std::uint64_t load(std::uint64_t count, Access access, const PageOf& page_of, const Replaced& replaced, const Good& good,
                     std::vector<std::uint32_t>& held_back, const StillWanted& still = {});
  std::uint64_t fill(std::vector<Wanted> wanted, Access access, std::vector<std::uint32_t>& held_back, const StillWanted& still);
  void release(Hold& hold) noexcept override;

  template <class T>
  using Array = std::unique_ptr<std::atomic<T>[]>;
  const std::uint64_t pages_;
  const Divider page_of_row_;
  Array<std::uint8_t> state_;
  Array<std::uint8_t> dirty_;
  Array<std::uint32_t> last_batch_;  // that used the page; only for counting
  std::mutex mutex_;                 // who fills which page
  std::condition_variable changed_;  // a fill ended
  std::atomic<std::uint32_t> batch_{0};
  std::atomic<std::uint64_t> ready_{0};  // pages in that state
  std::atomic<std::uint64_t> hits_{0}, misses_{0}, resident_{0}, dirty_count_{0}, waited_ns_{0};
};

}  // namespace embermap
