#include "store/table_impl.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <utility>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/size_text.hpp"
#include "io/checksum.hpp"
#include "io/npy.hpp"
#include "kernels/rows.hpp"
#include "store/whole_pages.hpp"

namespace embermap {
namespace {
// A gather of more ids is treated as several batches, so that its bookkeeping (20 bytes an id) stays small.
constexpr std::uint64_t kGatherBlock = 1U << 20;
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();  // of carried_
constexpr std::uint64_t kGrain = 16384;                                // ids a thread looks after at a time
// Pages of a part of a prefetch, at least; two of them are read at the same time. A batch that comes early reads those not yet
// asked for itself, beside them.
constexpr std::uint64_t kPrefetchBytes = 4U << 20;

std::uint64_t physical_memory() noexcept {
  const long pages = ::sysconf(_SC_PHYS_PAGES), bytes = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || bytes <= 0) return std::numeric_limits<std::uint64_t>::max();
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(bytes);
}
}  // namespace

TableImpl::TableImpl(std::shared_ptr<StoreCore> core, std::string name, TableEntry entry, File data, PageLedger ledger)
    : core_{std::move(core)},
      name_{std::move(name)},
      schema_{entry.dim, entry.dtype, entry.optimizer},
      writable_{!entry.adopted || entry.adopted_writable},
      page_of_row_{entry.geometry.rows_per_page},
      entry_{std::move(entry)},
      step_{entry_.step},
      carried_{entry_.carried.value_or(kNothing)} {
  make_file(std::move(data), std::move(ledger));
}

void TableImpl::make_file(File data, PageLedger ledger) {
  StoreCore* const shared = core_.get();  // outlives file_
  PageFileOptions options{.io = core_->page_io,
                          .alone = core_->writable,
                          .swap = entry_.big_endian,
                          .logged = core_->logged,
                          .log = core_->log.get(),
                          .id = entry_.id,
                          .verify_reads = core_->verify == Verify::kRead && core_->checks_pages};
  // Others use such a file too: what of it is in the page cache already may be used from there.
  options.io.prefer_cached = !core_->writable || entry_.adopted.has_value();
  file_ = std::make_unique<PageFile>(
      name_, std::move(data), std::move(ledger), schema_, entry_.geometry, entry_.init, entry_.seed, core_->compute, core_->io,
      [shared] {
        if (!shared->log) shared->mark.set(shared->newest.load());
      },
      options);
  if (core_->log) core_->log->attach(entry_.id, *file_);
}

void TableImpl::check_open() const {
  core_->check_usable();
  if (!file_ && no_files_ != nullptr) std::rethrow_exception(no_files_);
  if (!file_) throw ClosedError(fmt::format("table '{}' was removed", printable(name_)));
}

TableImpl::Shared TableImpl::side_by_side() const {
  core_->check_usable();  // first: in a forked child the lock may be held by a thread that does not exist
  Shared lock(files_);
  check_open();
  return lock;
}

TableImpl::Alone TableImpl::alone() const {
  core_->check_usable();
  Alone lock(files_);
  check_open();
  land(Access::kWrite);
  ++changes_;
  return lock;
}

void TableImpl::check_writable() const {
  if (!core_->writable) throw ReadOnlyError(fmt::format("store {} is open read-only", printable(core_->path)));
  if (!writable_) throw ReadOnlyError(fmt::format("table '{}' uses {} read-only", printable(name_), printable(*entry_.adopted)));
}

std::span<const std::uint64_t> TableImpl::checked_ids(std::span<const std::int64_t> ids) const {
  if (const auto bad = first_bad_id(ids, entry_.geometry.rows, core_->compute))
    throw RowIdError(name_, ids[*bad], *bad, entry_.geometry.rows);
  // From here no id is negative, and signed and unsigned may alias.
  return {reinterpret_cast<const std::uint64_t*>(ids.data()), ids.size()};
}

void TableImpl::check_size(std::uint64_t ids, std::uint64_t bytes, std::uint64_t row_bytes, std::string_view what) const {
  if (bytes == checked_mul(ids, row_bytes, what)) return;
  throw InvalidArgument(fmt::format("table '{}': {} ids, {} bytes of {}; {} bytes a row make {}", printable(name_), ids, bytes,
                                    what, row_bytes, ids * row_bytes));
}

void TableImpl::check_gradient_dtype(DType dtype) const {
  if (std::holds_alternative<std::monostate>(entry_.optimizer))
    throw InvalidArgument(fmt::format("table '{}' has no optimizer; create it with one to update it", printable(name_)));
  const bool half = schema_.dtype() == DType::kFloat16 || schema_.dtype() == DType::kBFloat16;
  if (dtype != schema_.dtype() && !(half && dtype == DType::kFloat32))
    throw DTypeError(fmt::format("table '{}' of {} cannot be updated with gradients of {}", printable(name_),
                                 dtype_name(schema_.dtype()), dtype_name(dtype)));
}

HotPages& TableImpl::hot() {
  if (HotPages* ready = hot_ready_.load(std::memory_order_acquire)) return *ready;
  const std::lock_guard lock(hot_mutex_);
  if (hot_) return *hot_;
  if (share_.frames == 0) throw BudgetError(fmt::format("table '{}' has no share of the store's memory", printable(name_)));
  // Frames are touched at once: what no machine has would end the process.
  const std::uint64_t bytes = share_.frames * entry_.geometry.page_bytes();
  if (const std::uint64_t machine = physical_memory(); bytes > machine)
    throw BudgetError(fmt::format("table '{}' would take {} of the store's memory, {}; this machine has {}", printable(name_),
                                  format_size(bytes), format_size(core_->memory), format_size(machine)));
  keep_checksums();
  Worker* const cleaner = writable() && core_->write_behind ? &core_->cleaner : nullptr;
  hot_ = make_hot_pages(*file_, share_.frames, core_->compute, cleaner, core_->replacement);
  file_->register_frames({hot_->slab().data(), hot_->slab().bytes()});
  if (core_->device >= 0) {
    pinned_ = PinnedRange(hot_->slab().data(), hot_->slab().bytes());
    if (!pinned_.registered() && !core_->pin_warned.exchange(true))
      std::fprintf(stderr, "embermap: warning: %s; rows travel through pageable copies\n", pinned_.error().c_str());
  }
  hot_ready_.store(hot_.get(), std::memory_order_release);
  return *hot_;
}

void TableImpl::keep_checksums() {
  if (share_.checksums && core_->checks_pages) file_->ledger().keep_checksums();
}

void TableImpl::pages_of(std::span<const std::uint64_t> ids, std::span<std::uint64_t> pages) const {
  core_->compute.parallel_for(ids.size(), kGrain, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) pages[i] = page_of_row_.quotient(ids[i]);
  });
}

class TableImpl::Passes {
 public:
  // `ids` ascend without repetition and outlive it.
  Passes(TableImpl& table, std::span<const std::uint64_t> ids)
      : table_{table}, hot_{table.hot()}, ids_{ids}, pages_(ids.size()), frames_(ids.size()), records_(ids.size()) {
    table_.pages_of(ids_, pages_);
  }

  bool done() const noexcept { return begin_ == ids_.size(); }
  // Goes on to as many of the next rows as fit into memory together. If not all do, passes take half of the frames: one that
  // took all would push out everything that was worth keeping.
  void advance() {
    advance(begin_ == end_ && end_ == 0 ? hot_.frames() : std::max<std::uint64_t>(hot_.frames() / 2, 1));
    if (begin_ != 0 || all()) return;
    end_ = 0;
    advance(std::max<std::uint64_t>(hot_.frames() / 2, 1));
  }
  bool all() const noexcept { return end_ - begin_ == ids_.size(); }
  std::uint64_t first() const noexcept { return begin_; }

  // Holds the pages of the pass; `replaces`: the rows will be written, as whole records.
  HotPages::Hold hold(Access access, bool replaces) {
    const auto pages = std::span(pages_).subspan(begin_, end_ - begin_);
    if (replaces) mark_replaced();
    auto hold = hot_.hold(pages, std::span(frames_).subspan(begin_, pages.size()), access,
                          replaces ? std::span<const std::uint8_t>(replaced_) : std::span<const std::uint8_t>());
    const Geometry& geometry = table_.entry_.geometry;
    table_.core_->compute.parallel_for(pages.size(), kGrain, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin_ + begin; i < begin_ + end; ++i)
        records_[i] = hot_.frame(frames_[i]) + (ids_[i] - pages_[i] * geometry.rows_per_page) * geometry.stride;
    });
    return std::move(*hold);  // the pass was cut to fit
  }
  std::span<std::byte* const> records() const noexcept { return std::span(records_).subspan(begin_, end_ - begin_); }

 private:
  // Which pages of the pass have all their rows in it.
  void mark_replaced() {
    replaced_.assign(end_ - begin_, 0);
    for (std::uint64_t from = begin_; from < end_;) {
      std::uint64_t to = from + 1;
      while (to < end_ && pages_[to] == pages_[from]) ++to;
      if (to - from == table_.entry_.geometry.rows_in(pages_[from]))
        std::fill(replaced_.begin() + static_cast<std::ptrdiff_t>(from - begin_),
                  replaced_.begin() + static_cast<std::ptrdiff_t>(to - begin_), std::uint8_t{1});
      from = to;
    }
  }

  void advance(std::uint64_t most) {
    begin_ = end_;
    // Ids ascend, so a page's rows stand together and each page is read once.
    for (std::uint64_t distinct = 0; end_ < ids_.size(); ++end_)
      if ((end_ == begin_ || pages_[end_] != pages_[end_ - 1]) && ++distinct > most) break;
  }

  TableImpl& table_;
  HotPages& hot_;
  std::span<const std::uint64_t> ids_;
  std::vector<std::uint64_t> pages_;
  std::vector<std::uint32_t> frames_;
  std::vector<std::byte*> records_;
  std::vector<std::uint8_t> replaced_;
  std::uint64_t begin_ = 0, end_ = 0;
};

void TableImpl::gather(std::span<const std::int64_t> ids, std::span<std::byte> out, std::string_view field_name) {
  const Field& field = schema_.field(field_name);
  std::uint64_t at = 0;
  {
    const auto lock = side_by_side();
    check_size(ids.size(), out.size(), field.bytes, "room for rows");
    if (core_->pin != Pin::kMapping && !ids.empty() && entry_.geometry.rows != 0 && hot().whole()) {
      gather_whole(ids, out.data(), field);
      return;
    }
    const auto rows = checked_ids(ids);
    while (at < rows.size()) {
      const auto block = rows.subspan(at, std::min(kGatherBlock, rows.size() - at));
      std::byte* const to = out.data() + at * field.bytes;
      if (!gather_mapped(block, to, field) && !gather_block(block, to, field)) break;
      at += block.size();
    }
    if (at == rows.size()) {
      rows_gathered_ += ids.size();
      return;
    }
  }
  // More pages than frames.
  const auto lock = alone();
  const auto rows = checked_ids(ids);  // there may be fewer rows than a moment ago
  for (; at < rows.size(); at += kGatherBlock) {
    const auto block = rows.subspan(at, std::min(kGatherBlock, rows.size() - at));
    std::byte* const to = out.data() + at * field.bytes;
    try {
      gather_in_passes(block, to, field);
    } catch (const NoFrames&) {
      gather_past(block, to, field);
    }
  }
  rows_gathered_ += ids.size();
}

// Bad ids are known before the first row is copied.
void TableImpl::gather_whole(std::span<const std::int64_t> ids, std::byte* out, const Field& field) {
  auto& pages = static_cast<WholePages&>(hot());
  if (const auto bad = pages.load_rows(ids, entry_.geometry.rows)) throw RowIdError(name_, ids[*bad], *bad, entry_.geometry.rows);
  const auto reading = reading_rows();
  gather_rows(pages.frame(0) + field.offset, entry_.geometry.stride,
              {reinterpret_cast<const std::uint64_t*>(ids.data()), ids.size()}, field.bytes, out, core_->compute);
  rows_gathered_ += ids.size();
}

bool TableImpl::gather_block(std::span<const std::uint64_t> ids, std::byte* out, const Field& field) {
  HotPages& pages_in_memory = hot();
  const Geometry& geometry = entry_.geometry;
  // Rows are copied in the order of the ids; sorting would cost more than it brings while all pages fit.
  std::vector<std::uint64_t> pages(ids.size());
  pages_of(ids, pages);
  std::vector<std::uint32_t> frames(ids.size());
  std::optional<HotPages::Hold> hold;
  try {
    if (auto held = pages_in_memory.hold(pages, frames, Access::kRead)) hold.emplace(std::move(*held));
  } catch (const NoFrames&) {
    gather_past(ids, out, field);
    return true;
  }
  if (!hold) return false;
  std::vector<const std::byte*> rows(ids.size());
  core_->compute.parallel_for(ids.size(), kGrain, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i)
      rows[i] = pages_in_memory.frame(frames[i]) + (ids[i] - pages[i] * geometry.rows_per_page) * geometry.stride + field.offset;
  });
  const auto reading = reading_rows();
  gather_rows(rows, field.bytes, out, core_->compute);
  return true;
}

void TableImpl::gather_in_passes(std::span<const std::uint64_t> ids, std::byte* out, const Field& field) {
  const Batch batch = make_batch(ids, core_->compute);
  std::vector<const std::byte*> rows;
  Passes passes(*this, batch.keys);
  for (passes.advance(); !passes.done(); passes.advance()) {
    const auto hold = passes.hold(Access::kRead, /*replaces=*/false);
    const auto records = passes.records();
    const std::uint64_t first = passes.first();
    const std::uint32_t from = batch.starts[first], to = batch.starts[first + records.size()];
    rows.clear();
    for (std::uint64_t u = 0; u < records.size(); ++u)
      rows.insert(rows.end(), batch.starts[first + u + 1] - batch.starts[first + u], records[u] + field.offset);
    gather_rows_to(rows, std::span(batch.positions).subspan(from, to - from), field.bytes, out, core_->compute);
  }
}

void TableImpl::change(Shared lock, std::span<const std::int64_t> ids, const Batch& batch, const Change& change) {
  {
    Passes passes(*this, batch.keys);
    passes.advance();
    if (passes.all()) {
      std::optional<HotPages::Hold> hold(passes.hold(Access::kWrite, change.replaces));
      const auto writing = changing_rows();
      change.body(0, passes.records());
      hold->replaced();
      // Before rows_ is let go: until its hold ends, scans take a replaced page from the file, which has the rows before.
      hold.reset();
      change.done();
      note_dirty();
      return;
    }
  }
  lock.unlock();
  const auto only = alone();
  (void)checked_ids(ids);  // there may be fewer rows than a moment ago
  Passes passes(*this, batch.keys);
  for (passes.advance(); !passes.done(); passes.advance()) {
    try {
      auto hold = passes.hold(Access::kWrite, change.replaces);
      change.body(passes.first(), passes.records());
      hold.replaced();
    } catch (const std::exception& error) {
      if (passes.first() == 0) throw;  // nothing was changed
      note_dirty();
      core_->tear(
          fmt::format("a batch of table '{}' was changed in part and then failed ({}): its rows with ids below {} are "
                      "changed, those from there on are not",
                      printable(name_), error.what(), batch.keys[passes.first()]));
    }
  }
  change.done();
  note_dirty();
}

void TableImpl::note_dirty() noexcept {
  if (!core_->log) return;
  const HotPages* const pages = hot_ready_.load(std::memory_order_acquire);
  const std::uint64_t dirty = pages == nullptr ? 0 : pages->counts().dirty;
  const std::uint64_t more = dirty - dirty_known_.exchange(dirty);  // modulo 2^64: others take theirs off
  core_->dirty_pages += more;
  core_->dirty_bytes += more * entry_.geometry.page_bytes();
}

void TableImpl::scatter(std::span<const std::int64_t> ids, std::span<const std::byte> rows, std::string_view field_name) {
  core_->bound_log();
  auto lock = side_by_side();
  check_writable();
  const Field& field = schema_.field(field_name);
  check_size(ids.size(), rows.size(), field.bytes, "rows");
  const auto keys = checked_ids(ids);
  if (ids.empty()) return;
  const Batch batch = make_batch(keys, core_->compute);
  std::vector<std::byte*> places;
  std::vector<std::uint32_t> last;
  change(std::move(lock), ids, batch,
         {.body =
              [&](std::uint64_t first, std::span<std::byte* const> records) {
                places.resize(records.size());
                last.resize(records.size());
                for (std::uint64_t u = 0; u < records.size(); ++u) {
                  places[u] = records[u] + field.offset;
                  last[u] = batch.positions[batch.starts[first + u + 1] - 1];
                }
                scatter_rows(places, last, field.bytes, rows.data(), core_->compute);
              },
          .done = [&] { rows_written_ += ids.size(); },
          .replaces = field.bytes == entry_.geometry.stride});
}

void TableImpl::add(std::span<const std::int64_t> ids, std::span<const std::byte> rows) {
  core_->bound_log();
  auto lock = side_by_side();
  check_writable();
  check_size(ids.size(), rows.size(), schema_.fields()[0].bytes, "rows");
  const auto keys = checked_ids(ids);
  if (ids.empty()) return;
  const Batch batch = make_batch(keys, core_->compute);
  change(std::move(lock), ids, batch,
         {.body =
              [&](std::uint64_t first, std::span<std::byte* const> records) {
                add_rows(records, batch, first, schema_.dim(), schema_.dtype(), rows.data(), core_->compute);
              },
          .done = [&] { rows_written_ += ids.size(); }});
}

StepScalars TableImpl::next_step(std::optional<double> lr) const {
  const Optimizer optimizer = lr ? with_learning_rate(entry_.optimizer, *lr) : entry_.optimizer;
  const double carried = carried_.load();
  return step_scalars(optimizer, step_.load() + 1, entry_.seed, std::isnan(carried) ? std::nullopt : std::optional(carried));
}

void TableImpl::count_step(const StepScalars& scalars) {
  carried_ = carried_on(scalars).value_or(kNothing);
  ++step_;
  entry_changed_ = true;
}

void TableImpl::note_steps(TableEntry& entry) const {
  entry.step = step_.load();
  const double carried = carried_.load();
  entry.carried = std::isnan(carried) ? std::nullopt : std::optional(carried);
}

void TableImpl::update(std::span<const std::int64_t> ids, std::span<const std::byte> grads, DType grad_dtype,
                       std::optional<double> lr) {
  core_->bound_log();
  auto lock = side_by_side();
  check_writable();
  check_gradient_dtype(grad_dtype);
  check_size(ids.size(), grads.size(), schema_.dim() * item_size(grad_dtype), "gradients");
  (void)next_step(lr);  // an lr that cannot be is refused before anything happens
  const auto keys = checked_ids(ids);
  if (ids.empty()) return;
  const Batch batch = make_batch(keys, core_->compute);
  const RecordLayout layout = schema_.layout(entry_.geometry.stride);
  std::optional<StepScalars> scalars;  // of the step that this call turns out to be
  change(std::move(lock), ids, batch,
         {.body =
              [&](std::uint64_t first, std::span<std::byte* const> records) {
                if (!scalars) scalars = next_step(lr);
                step_rows(records, batch, first, layout, *scalars, grads.data(), grad_dtype, core_->compute);
              },
          .done =
              [&] {
                count_step(*scalars);
                rows_written_ += ids.size();
              }});
}

TableImpl::Ahead TableImpl::pages_ahead(std::span<const std::int64_t> ids) {
  Ahead ahead;
  ahead.pages.resize(ids.size());
  const auto lock = side_by_side();
  pages_of(checked_ids(ids), ahead.pages);
  if (HotPages* const ready = hot_ready_) ahead.batch = ready->expect(ahead.pages);
  return ahead;
}

Prefetch TableImpl::prefetch(std::span<const std::int64_t> ids) {
  const auto job = std::make_shared<Prefetch::State>(
      this, [self = shared_from_this(), ahead = pages_ahead(ids)](const Prefetch::State& state) mutable {
        return self->prefetch_some(ahead, state);
      });
  core_->prefetcher.add(job);
  return Prefetch(job);
}

Prefetcher::Step TableImpl::prefetch_some(Ahead& ahead, const Prefetch::State& job) {
  using Step = Prefetcher::Step;
  std::vector<std::uint64_t>& pages = ahead.pages;
  if (core_->pin == Pin::kMapping) return Step::kEnded;  // the page cache has them, or reads them ahead itself
  if (!ahead.sorted) {                                   // the other thread comes later
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    ahead.sorted = true;
  }
  // Anew for each part: in between the table may have become smaller, and its memory too.
  const Shared lock(files_);
  if (core_->closed || !file_ || (ahead.batch && ahead.batch->came)) return Step::kEnded;
  HotPages& pages_in_memory = hot();
  // More than half of the frames would push out what the batch now at work needs.
  const std::uint64_t most = pages_in_memory.whole() ? pages.size() : std::max<std::uint64_t>(pages_in_memory.frames() / 2, 1);
  const auto end = std::lower_bound(pages.begin(), pages.end(), entry_.geometry.pages());
  const std::uint64_t all = std::min<std::uint64_t>(static_cast<std::uint64_t>(end - pages.begin()), most);
  Ahead::Parts& parts = *ahead.parts;
  Ahead::Part part{};
  {
    const std::lock_guard taking(parts.mutex);
    if (!parts.again.empty()) {
      part = parts.again.back();
      parts.again.pop_back();
    } else {
      const std::uint64_t stretch = std::max<std::uint64_t>({kPrefetchBytes / entry_.geometry.page_bytes(), all / 8, 1});
      part = {parts.begun, std::min(stretch, all - std::min(parts.begun, all))};
      parts.begun += part.count;
    }
    if (part.first < all) part.count = std::min(part.count, all - part.first);
    // The other thread's part may have to stop, and is to be read again then.
    if (part.first >= all || part.count == 0) return parts.flying != 0 ? Step::kAgain : Step::kEnded;
    if (!job.awaited) {
      // The other thread's part may be promised already, or not yet: either way there is room for both.
      const std::uint64_t wanted = part.count + parts.flying;
      auto room = pages_in_memory.promisable(wanted, [core = core_.get()] { core->prefetcher.look_again(); });
      room -= std::min(room, parts.flying);
      if (room < part.count) parts.again.push_back({part.first + room, part.count - room});
      part.count = std::min(part.count, room);
      if (room == 0) return Step::kWaits;
    }
    parts.flying += part.count;
  }
  const auto left = [&](bool stopped) {
    const std::lock_guard taking(parts.mutex);
    parts.flying -= part.count;
    if (stopped) parts.again.push_back(part);
    return !parts.again.empty() || parts.begun < all || parts.flying != 0;
  };
  try {
    std::vector<std::uint32_t> frames(part.count);
    {
      const std::lock_guard taking(parts.mutex);
      if (!parts.again.empty() || parts.begun < all) core_->prefetcher.share(job);
    }
    (void)pages_in_memory.hold(std::span(pages).subspan(part.first, part.count), frames, Access::kPrefetch, {},
                               [&] { return !job.cancelled.load(std::memory_order_relaxed) && !files_.wanted_alone(); });
  } catch (const NotWanted&) {
    (void)left(/*stopped=*/true);
    return Step::kAgain;  // behind whoever waits, a commit perhaps; pages that are there are found then
  } catch (...) {
    (void)left(/*stopped=*/false);
    throw;
  }
  return left(/*stopped=*/false) ? Step::kAgain : Step::kEnded;
}

TableEntry TableImpl::entry() const {
  const auto lock = side_by_side();
  TableEntry entry = entry_;
  note_steps(entry);
  return entry;
}

std::uint64_t TableImpl::step() const {
  const auto lock = side_by_side();
  return step_;
}

void TableImpl::set_optimizer(const Optimizer& optimizer) {
  core_->check_usable();
  const Alone lock(files_);  // not alone(): no row changes, and what a device does meanwhile does not ask
  check_open();
  check_writable();
  check_optimizer(optimizer);
  const Schema wanted(schema_.dim(), schema_.dtype(), optimizer);
  const auto same = [&](const auto& of) {
    return std::equal(wanted.fields().begin(), wanted.fields().end(), schema_.fields().begin(), schema_.fields().end(), of);
  };
  if (optimizer.index() != entry_.optimizer.index() || !same([](const Field& a, const Field& b) { return a.name == b.name; }))
    throw InvalidArgument(fmt::format("table '{}' keeps the state of '{}' in its records; only hyperparameters can be changed",
                                      printable(name_), optimizer_name(entry_.optimizer)));
  if (!same([](const Field& a, const Field& b) { return a.initial == b.initial; }))
    throw InvalidArgument(
        fmt::format("table '{}': the value with which the state of '{}' begins cannot be changed: rows that were "
                    "written have begun with it",
                    printable(name_), optimizer_name(entry_.optimizer)));
  entry_.optimizer = optimizer;
  ++optimizer_version_;
  entry_changed_ = true;
}

void TableImpl::set_step(std::uint64_t step, std::optional<double> carried) {
  core_->check_usable();
  const auto lock = alone();
  check_open();
  check_writable();
  step_ = step;
  carried_ = carried.value_or(kNothing);
  entry_changed_ = true;
}

std::optional<double> TableImpl::carried() const {
  const auto lock = side_by_side();
  const double carried = carried_.load();
  return std::isnan(carried) ? std::nullopt : std::optional(carried);
}

void TableImpl::set_memory(std::uint64_t bytes) {
  if (entry_.memory == bytes) return;
  entry_.memory = bytes;
  if (core_->writable) entry_changed_ = true;  // else there is no commit to record it
}

TableImpl::Alone TableImpl::stand_still() {
  Alone lock(files_);
  land(Access::kWrite);
  ++changes_;
  return lock;
}

bool TableImpl::changed() const {
  return entry_changed_ || file_->ahead() || (hot_ && hot_->counts().dirty != 0) ||
         (core_->log && core_->log->uncommitted(entry_.id));
}

TableEntry TableImpl::flush_and_sync(std::uint64_t commit) {
  if (hot_ && writable()) hot_->flush();
  note_dirty();
  // With a log the page file is of this commit when it was applied.
  const bool in_place = file_->ahead();
  if (in_place) file_->sync(core_->log ? std::nullopt : std::optional(commit));
  changing_ = (core_->log ? core_->log->uncommitted(entry_.id) : in_place) ? commit : 0;
  TableEntry entry = entry_;
  note_steps(entry);
  if (changing_ != 0) entry.changed = changing_;
  entry.counters = counters_now();
  ++entry.counters.commits;
  return entry;
}

bool TableImpl::ahead() const { return file_->ahead(); }

std::optional<std::uint64_t> TableImpl::page_file_commit() const { return file_ ? file_->ledger().commit() : std::nullopt; }

void TableImpl::mark_committed() {
  if (changing_ != 0) entry_.changed = std::exchange(changing_, 0);
  entry_changed_ = false;
  ++commits_;
}

void TableImpl::grow(std::uint64_t rows) {
  release_hot();
  const Geometry before = entry_.geometry;
  // A shrink that failed half-way may have left marks of pages past the end: their rows are forgotten for good.
  if (file_->ledger().pages() > before.pages()) file_->ledger().resize(before.pages());
  Geometry after = before;
  after.rows = rows;
  // Rows of the old last page that come into being now: the page's memory behind its old end holds nothing, they get their
  // initial values.
  const std::uint64_t last = before.rows % before.rows_per_page != 0 ? before.pages() - 1 : before.pages();
  std::vector<std::byte> memory;
  PageBuffer buffer{last, nullptr};
  if (last < before.pages() && file_->ledger().written(last)) {
    memory.resize(before.page_bytes());
    buffer.memory = memory.data();
    file_->read({&buffer, 1});
    file_->generate(before.rows, after.rows_in(last) - before.rows_in(last), memory.data() + before.bytes_in(last));
  }
  try {
    // The header never promises more rows than the file has: after growing, before cutting.
    file_->data().resize(after.file_bytes());
    file_->ledger().resize(after.pages());
    file_->write_header(table_header(schema_, after));
    file_->set_geometry(after);
    if (buffer.memory != nullptr) file_->write({&buffer, 1});
    file_->sync();
  } catch (...) {
    // Files longer than the manifest says are cut when the store is opened; here as much as possible is undone, and the first
    // error reported.
    file_->set_geometry(before);
    if (core_->log) throw;  // the log is rolled back, and undo_grow() called
    // Its rows before the old end are in the file whether or not it was written.
    if (buffer.memory != nullptr)
      file_->ledger().record(last, page_checksum({buffer.memory, static_cast<std::size_t>(before.bytes_in(last))}));
    try {
      file_->data().write(0, table_header(schema_, before));
      file_->ledger().resize(before.pages());
      file_->data().resize(before.file_bytes());
      file_->sync();
    } catch (const Error&) {
      file_->set_ahead();
    }
    throw;
  }
  entry_.geometry = after;
}

void TableImpl::undo_grow(std::uint64_t rows, bool files) {
  release_hot();
  entry_.geometry.rows = rows;
  file_->set_geometry(entry_.geometry);
  if (!files) return;
  file_->ledger().resize(entry_.geometry.pages());
  file_->data().resize(entry_.geometry.file_bytes());
}

TableImpl::LastPage TableImpl::last_page(std::uint64_t rows) const {
  LastPage last;
  if (rows == 0) return last;
  last.page = entry_.geometry.page_of(rows - 1);
  if (core_->log) return last;  // which will have the page
  last.cut = last_checksum(rows);
  if (!last.cut) return last;
  std::uint32_t whole = 0;
  file_->ledger().read_checksums(last.page, std::span(&whole, 1));
  last.whole = whole;
  return last;
}

void TableImpl::cut(std::uint64_t rows, const LastPage& last) {
  release_hot();
  Geometry after = entry_.geometry;
  after.rows = rows;
  if (!core_->log) {
    entry_.geometry = after;
    file_->set_geometry(after);
    // The last page is shorter than it was: so is what its checksum covers.
    if (!last.cut) return;
    file_->set_ahead();
    file_->ledger().record(last.page, *last.cut);
    return;
  }
  const AlignedBuffer memory(after.page_bytes());
  PageBuffer page{last.page, memory.data()};
  const bool shorter = rows % after.rows_per_page != 0 && file_->written(last.page);
  if (shorter) file_->read({&page, 1});
  entry_.geometry = after;
  file_->set_geometry(after);
  file_->write_header(table_header(schema_, after));
  if (shorter) file_->write({&page, 1});
}

void TableImpl::undo_cut(std::uint64_t rows, const LastPage& last) {
  entry_.geometry.rows = rows;
  file_->set_geometry(entry_.geometry);
  if (core_->log || !last.cut) return;
  file_->set_ahead();
  file_->ledger().record(last.page, *last.whole);
  file_->sync();
}

void TableImpl::cut_files() {
  // The header never promises more rows than the file has. With a log it has come from there.
  if (!core_->log) file_->write_header(table_header(schema_, entry_.geometry));
  file_->ledger().resize(entry_.geometry.pages());
  file_->data().resize(entry_.geometry.file_bytes());
  file_->sync();
}

std::optional<std::uint32_t> TableImpl::last_checksum(std::uint64_t rows) const {
  Geometry after = entry_.geometry;
  after.rows = rows;
  if (rows % after.rows_per_page == 0 || !file_->ledger().written(after.pages() - 1)) return std::nullopt;
  const AlignedBuffer memory(after.page_bytes());
  PageBuffer buffer{after.pages() - 1, memory.data()};
  std::uint32_t checksum = 0;
  file_->read_stored({&buffer, 1}, [&](const PageBuffer& page) {
    checksum = page_checksum({page.memory, static_cast<std::size_t>(after.bytes_in(page.page))});
  });
  return checksum;
}

void TableImpl::shrink(std::uint64_t rows, std::optional<std::uint32_t> last_checksum) {
  release_hot();
  // The manifest has the new number of rows already: it is what counts from here on, whatever fails below.
  entry_.geometry.rows = rows;
  const Geometry& after = entry_.geometry;
  file_->set_geometry(after);
  // The last page is shorter than it was: so is what its checksum covers.
  if (last_checksum) {
    file_->set_ahead();
    file_->ledger().record(after.pages() - 1, *last_checksum);
  }
  file_->ledger().resize(after.pages());
  file_->data().write(0, table_header(schema_, after));
  file_->data().resize(after.file_bytes());
  file_->sync();
}

std::string table_header(const Schema& schema, const Geometry& geometry) {
  if (!schema.structured())
    return format_npy_header(npy_descr(schema.dtype()), {}, 0, {geometry.rows, schema.dim()}, geometry.data_offset);
  std::vector<NpyField> fields;
  for (const Field& field : schema.fields())
    fields.push_back({field.name, std::string(npy_descr(field.dtype)), {field.elements}, field.offset, field.bytes});
  return format_npy_header({}, fields, geometry.stride, {geometry.rows}, geometry.data_offset);
}

void TableImpl::prepare_share(const MemoryShare& share) {
  if (share == share_ || !writable()) return;
  if (hot_) hot_->flush();
  file_->ledger().write_out();  // so that dropping its checksums has nothing left to write
}

void TableImpl::set_share(const MemoryShare& share) noexcept {
  if (share == share_) return;
  if (!share.checksums) file_->ledger().drop_checksums();
  release_hot();
  share_ = share;
}

void TableImpl::release_hot() noexcept {
  if (!hot_) return;
  const HotPages::Counts counts = hot_->counts();
  past_.hits += counts.hits;
  past_.misses += counts.misses;
  past_.evictions += counts.evictions;
  past_.waited_ns += counts.waited_ns;
  hot_ready_ = nullptr;
  pinned_ = {};
  file_->forget_frames();
  hot_.reset();
  note_dirty();
}

bool TableImpl::is(const TableEntry& entry) const noexcept {
  return entry.id == entry_.id && entry.dim == entry_.dim && entry.dtype == entry_.dtype &&
         entry.geometry.stride == entry_.geometry.stride && entry.geometry.rows_per_page == entry_.geometry.rows_per_page;
}

void TableImpl::drop_files(std::exception_ptr why) noexcept {
  release_hot();
  file_.reset();
  no_files_ = std::move(why);
  share_ = {};
}

void TableImpl::replace_files(TableEntry entry, File data, PageLedger ledger) {
  entry_ = std::move(entry);
  step_ = entry_.step;
  carried_ = entry_.carried.value_or(kNothing);
  make_file(std::move(data), std::move(ledger));
  keep_mapping();
}

void TableImpl::close(bool removed) noexcept {
  const Alone lock(files_);
  land_quietly();
  release_hot();
  if (core_->log) core_->log->detach(entry_.id, removed);
  end_mapping();
  file_.reset();
}

std::filesystem::path TableImpl::data_path() const { return entry_.adopted ? *entry_.adopted : core_->path / (name_ + ".npy"); }

std::uint64_t TableImpl::written_pages() const {
  const auto lock = side_by_side();
  return file_->count_written();
}

PageIoReport TableImpl::io_report() const {
  const auto lock = side_by_side();
  return file_->io_report();
}

TableCounters TableImpl::counters() const {
  const auto lock = side_by_side();
  land(Access::kWrite);
  return counters_now();
}

TableCounters TableImpl::counters_now() const {
  HotPages::Counts counts;
  {
    const std::lock_guard hot_lock(hot_mutex_);
    if (hot_) counts = hot_->counts();
  }
  const PageFile::Counters& file = file_->counters();
  TableCounters sum = entry_.counters;  // of the sessions before
  sum.hits += past_.hits + counts.hits;
  sum.misses += past_.misses + counts.misses;
  sum.evictions += past_.evictions + counts.evictions;
  sum.write_backs += file.pages_written;
  sum.bytes_read += file.bytes_read;
  sum.bytes_written += file.bytes_written;
  sum.commits += commits_;
  return sum;
}

TableStats TableImpl::stats() const {
  const auto lock = side_by_side();
  land(Access::kWrite);  // what is under way counts as well
  TableStats stats;
  HotPages::Counts counts;
  {
    const std::lock_guard hot_lock(hot_mutex_);
    if (hot_) {
      counts = hot_->counts();
      stats.frames = hot_->frames();
      stats.whole = hot_->whole();
      stats.huge_pages = hot_->slab().huge_pages();
      stats.registered = pinned_.registered();
    }
  }
  {
    const std::lock_guard mapped_lock(mapped_mutex_);
    if (mapped_) {
      stats.mapped_bytes = mapped_->bytes();
      stats.mapping_registered = mapped_->registered();
      stats.memory_bytes += mapped_->memory_bytes();
    }
  }
  const PageFile::Counters& file = file_->counters();
  stats.hits = past_.hits + counts.hits;
  stats.misses = past_.misses + counts.misses;
  stats.evictions = past_.evictions + counts.evictions;
  stats.resident_pages = counts.resident;
  stats.dirty_pages = counts.dirty;
  stats.write_backs = file.pages_written;
  stats.pages_read = file.pages_read;
  stats.pages_generated = file.pages_generated;
  stats.bytes_read = file.bytes_read;
  stats.bytes_written = file.bytes_written;
  stats.read_requests = file.read_requests;
  stats.write_requests = file.write_requests;
  stats.rows_gathered = rows_gathered_;
  stats.rows_written = rows_written_;
  stats.rows_mapped = rows_mapped_;
  stats.seconds_waiting = static_cast<double>(past_.waited_ns + counts.waited_ns) * 1e-9;
  stats.page_bytes = entry_.geometry.page_bytes();
  stats.memory_bytes += file_->ledger().memory_bytes() + stats.frames * stats.page_bytes +
                        frames_overhead(stats.frames, entry_.geometry.pages(), core_->replacement);
  return stats;
}

}  // namespace embermap
