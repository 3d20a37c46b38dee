// The way of a batch on a CUDA device. The device sorts the ids and finds their pages, the host makes those pages resident and
// holds them, the device moves the rows.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "base/checked.hpp"
#include "kernels/profile.hpp"
#include "store/table_impl.hpp"
#include "store/whole_pages.hpp"

namespace embermap {

namespace {
// Batches of fewer bytes move well enough without being measured.
constexpr std::uint64_t kWorthMeasuring = 8 << 20;
// Of gathers that nobody waited for; what is beyond is waited for.
constexpr std::size_t kMostReaders = 4;
constexpr std::uint64_t kMostReaderBytes = 64 << 20;  // of device memory
// Of a batch that is fetched ahead, and of changes that may come between that and its use.
constexpr std::uint64_t kMostAheadBytes = 1 << 30;
constexpr std::size_t kMostNewer = 4;
}  // namespace

// The records that a gather brought, or that were fetched ahead of one, by the table's count of changes.
struct WorkingSet::State {
  std::shared_ptr<CudaBatch> batch;    // until an update takes its rows
  std::shared_ptr<CudaBatch> grouped;  // the same, for its ids
  std::weak_ptr<const TableImpl> table;
  std::uint64_t changes = 0;
  std::uint64_t count = 0;
  int device = 0;
  void* stream = nullptr;
  // Fetched ahead, and not used yet. What has changed the table since then counts as known to it where it is in `newer`, oldest
  // first. Changed with flights_mutex_ held.
  std::shared_ptr<CudaFlight> ahead = nullptr;
  std::vector<std::shared_ptr<CudaFlight>> newer = {};
};

void WorkingSet::check() const {
  if (!state_ || !state_->batch) return;
  if (const std::shared_ptr<const TableImpl> table = state_->table.lock()) table->check(*state_->batch, state_->device);
}

void WorkingSet::ids(std::int64_t* out, CudaStream stream) const {
  if (!state_ || !state_->grouped) throw InvalidArgument("ids of a batch of which nothing was kept");
  const std::shared_ptr<const TableImpl> table = state_->table.lock();
  if (!table) throw ClosedError("the table of a batch is gone");
  table->expand_ids(*state_->grouped, state_->device, out, stream, stream.handle == state_->stream);
}

FrameSource TableImpl::frame_source(HotPages& pages) const {
  return {.slab = pages.slab().data(),
          .registered = pinned_.registered(),
          .page_bytes = entry_.geometry.page_bytes(),
          .rows_per_page = entry_.geometry.rows_per_page,
          .stride = entry_.geometry.stride,
          .whole = pages.whole(),
          .slab_bytes = pages.frames() * entry_.geometry.page_bytes()};
}

void TableImpl::measure_movers(CudaEngine& engine, std::uint64_t count, std::uint64_t offset, std::uint64_t bytes) {
  if (count < kWorthMeasuring / bytes) return;
  const auto known = [&] {
    return engine.model().knows(
        {.rows = count, .row_bytes = bytes, .pool_bytes = frame_source(hot()).slab_bytes, .threads = core_->movers().threads()});
  };
  {
    const auto lock = side_by_side();
    if (entry_.geometry.rows == 0) return;  // without frames
    (void)hot();
    if (!pinned_.registered() || known()) return;
  }
  const auto lock = alone();  // rows are read, and written as they were
  if (entry_.geometry.rows == 0) return;
  HotPages& pages = hot();
  if (!pinned_.registered() || known()) return;
  const std::uint64_t rows = std::min(entry_.geometry.rows, pages.frames() * entry_.geometry.rows_per_page);
  try {
    engine.calibrate(frame_source(pages), rows, offset, bytes, /*both_ways=*/true, core_->movers());
  } catch (const CudaError&) {
    // No memory on the device for the measurement, say: the batch may do without.
  }
  if (!known()) {
    // Nothing could be measured. In this session it is not tried again.
    for (const bool fetch : {true, false}) {
      const MoverCase of{.fetch = fetch,
                         .rows = count,
                         .row_bytes = bytes,
                         .pool_bytes = frame_source(pages).slab_bytes,
                         .threads = core_->movers().threads()};
      engine.model().add({{.of = of, .rates = {engine.model().choose(of)}}});
    }
    return;
  }
  core_->keep_measurements();
}

void TableImpl::note_moved(const DeviceCall& call) {
  Moved moved = call.engine.moved(*call.batch);
  moved.nanoseconds = call.nanoseconds;
  note_moved(moved);
}

void TableImpl::note_moved(const Moved& moved) const {
  const std::lock_guard lock(moved_mutex_);
  moved_.batches += moved.batches;
  moved_.kernel_rows += moved.kernel_rows;
  moved_.thread_rows += moved.thread_rows;
  moved_.pageable_rows += moved.pageable_rows;
  moved_.bytes += moved.bytes;
  moved_.nanoseconds += moved.nanoseconds;
}

DeviceStats TableImpl::device_stats() const {
  core_->check_usable();
  land(Access::kWrite);  // what is under way counts as well
  DeviceStats stats;
  stats.device = core_->device;
  if (CudaEngine* const engine = core_->engine_in_use()) {
    stats.device_name = engine->device_name();
    stats.measured = engine->model().measurements();
  }
  const std::lock_guard lock(moved_mutex_);
  stats.transfers = moved_.batches;
  stats.kernel_rows = moved_.kernel_rows;
  stats.thread_rows = moved_.thread_rows;
  stats.pageable_rows = moved_.pageable_rows;
  stats.bytes = moved_.bytes;
  stats.seconds = static_cast<double>(moved_.nanoseconds) * 1e-9;
  return stats;
}

std::shared_lock<FairSharedMutex> TableImpl::reading_rows() {
  std::shared_lock lock(rows_);
  land(Access::kRead);
  return lock;
}

std::unique_lock<FairSharedMutex> TableImpl::changing_rows() {
  std::unique_lock lock(rows_);
  land(Access::kWrite);
  ++changes_;
  return lock;
}

void TableImpl::land(Access access) const {
  if (!flying_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(flights_mutex_);
  if (behind_) {
    behind_->wait();
    retire(*behind_);
    behind_.reset();
  }
  if (access == Access::kWrite) {
    readers_.insert(readers_.end(), ahead_.begin(), ahead_.end());
    ahead_.clear();
    while (!readers_.empty()) {
      const std::shared_ptr<CudaFlight> reader = std::move(readers_.back());
      readers_.pop_back();
      try {
        reader->wait();
        retire(*reader);
      } catch (const CudaError&) {
        // It only read, and a device that has failed reads no more: what the host has can be committed.
      }
    }
  }
  if (readers_.empty() && ahead_.empty()) flying_.store(false, std::memory_order_release);
}

void TableImpl::land_quietly() const noexcept {
  try {
    land(Access::kWrite);
  } catch (const Error&) {
    // The device has failed, as whoever used it was told.
    const std::lock_guard lock(flights_mutex_);
    behind_.reset();
    readers_.clear();
    ahead_.clear();
    flying_.store(false, std::memory_order_release);
  }
}

void TableImpl::retire(CudaFlight& flight) const {
  const Moved moved = flight.moved();
  static_cast<WholePages&>(*hot_ready_.load(std::memory_order_acquire)).count_hits(flight.pages());
  note_moved(moved);
}

std::shared_ptr<CudaFlight> TableImpl::behind() const {
  if (!flying_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(flights_mutex_);
  if (behind_ && behind_->landed()) {
    retire(*behind_);
    behind_.reset();
  }
  return behind_;
}

void TableImpl::add_reader(std::shared_ptr<CudaFlight> flight) {
  std::vector<std::shared_ptr<CudaFlight>> over;  // the oldest ones
  {
    const std::lock_guard lock(flights_mutex_);
    flying_.store(true, std::memory_order_release);
    readers_.push_back(std::move(flight));
    std::uint64_t bytes = 0;
    for (const auto& reader : readers_) bytes += reader->device_bytes();
    for (const auto& reader : readers_) {
      if (readers_.size() - over.size() <= kMostReaders && bytes <= kMostReaderBytes && !reader->landed()) break;
      bytes -= reader->device_bytes();
      over.push_back(reader);
    }
  }
  for (const auto& reader : over) reader->wait();
  const std::lock_guard lock(flights_mutex_);
  for (const auto& reader : over) {
    const auto at = std::find(readers_.begin(), readers_.end(), reader);
    if (at == readers_.end()) continue;  // somebody else has waited for it as well
    retire(*reader);
    readers_.erase(at);
  }
}

WholePages* TableImpl::resident() {
  if (entry_.geometry.rows == 0) return nullptr;  // there are no frames, and every id is bad
  HotPages& pages = hot();
  if (!pages.whole()) return nullptr;
  auto& whole = static_cast<WholePages&>(pages);
  return whole.all_ready() ? &whole : nullptr;
}

void TableImpl::for_device_passes(DeviceCall& call, Access access, CudaStream stream, const DevicePass& body) {
  const CudaBatch& batch = *call.batch;
  HotPages& pages_in_memory = hot();
  const FrameSource source = frame_source(pages_in_memory);
  if (source.whole) return for_device_whole(call, source, access, stream, body);
  // Passes.
  std::vector<std::uint32_t> frames(std::min<std::uint64_t>(batch.pages.size(), pages_in_memory.frames()));
  for (std::uint64_t first = 0; first < batch.pages.size();) {
    const std::uint64_t count = std::min<std::uint64_t>(frames.size(), batch.pages.size() - first);
    const std::span<std::uint32_t> places(frames.data(), count);
    try {
      const auto hold = [&] {
        const ProfileRange range("embermap: hold pages");
        try {
          return pages_in_memory.hold(std::span(batch.pages).subspan(first, count), places, access);
        } catch (const NoFrames& none) {
          none.rethrow_cause();
        }
      }();
      device_pass(call, access, stream, [&] { body(source, first, places, {}); });
    } catch (const std::exception& error) {
      if (access != Access::kWrite || first == 0) throw;
      core_->tear(
          fmt::format("a batch of table '{}' was changed in part and then failed ({}): its rows with ids below {} are "
                      "changed, of the others some may be",
                      printable(name_), error.what(), batch.pages[first] * entry_.geometry.rows_per_page));
    }
    first += count;
  }
}

void TableImpl::device_pass(DeviceCall& call, Access access, CudaStream stream, const std::function<void()>& body) {
  std::shared_lock<FairSharedMutex> reading;
  std::unique_lock<FairSharedMutex> writing;
  if (call.shared.owns_lock()) {
    if (access == Access::kRead)
      reading = reading_rows();
    else
      writing = changing_rows();
  }
  const auto begin = std::chrono::steady_clock::now();
  try {
    body();
  } catch (...) {
    // Frames must not be given up while a kernel may still use them.
    try {
      call.engine.wait(stream);
    } catch (const CudaError&) {
      // the first error is the one to report
    }
    throw;
  }
  call.engine.wait(stream);
  call.nanoseconds += static_cast<std::uint64_t>((std::chrono::steady_clock::now() - begin).count());
}

// Every page has its frame, and keeps it. Where all of them are in memory the rows may move at once, and pages are marked
// meanwhile: nobody looks at the marks before the call has let go of files_.
void TableImpl::for_device_whole(DeviceCall& call, const FrameSource& source, Access access, CudaStream stream,
                                 const DevicePass& body) {
  auto& pages = static_cast<WholePages&>(hot());
  bool loaded = false;
  const auto load = [&] {
    if (loaded) return;
    const HostKeys keys = call.engine.keys(*call.batch);
    if (pages.all_ready()) {
      if (access == Access::kWrite) pages.mark_rows(keys);
      pages.count_hits(call.engine.pages_used(*call.batch));
    } else {
      pages.load_rows(keys, access);
    }
    loaded = true;
  };
  if (!pages.all_ready()) load();
  try {
    device_pass(call, access, stream, [&] { body(source, 0, {}, load); });
  } catch (...) {
    if (!loaded && access == Access::kWrite) {
      try {
        pages.mark_rows(call.engine.keys(*call.batch));  // some rows may have been written
      } catch (const RowIdError&) {
        // nothing was written
      } catch (...) {
        pages.mark_all();  // the device has failed, or memory is short, and what was written before is not known
      }
    }
    throw;
  }
}

TableImpl::DeviceCall TableImpl::begin_device(int device, const std::int64_t* ids, std::uint64_t count, std::uint64_t offset,
                                              std::uint64_t bytes, CudaStream stream) {
  CudaEngine& engine = core_->engine(device);
  engine.check_stream(stream);
  measure_movers(engine, count, offset, bytes);
  const auto begin = [&] {
    const Geometry& geometry = entry_.geometry;
    if (count != 0 && geometry.rows != 0 && hot().whole())
      return engine.begin_batch(ids, count, geometry.rows, geometry.rows_per_page, name_, stream);
    return engine.make_batch(ids, count, geometry.rows, geometry.rows_per_page, name_, stream);
  };
  DeviceCall call{engine, side_by_side(), {}, nullptr};
  call.batch = begin();
  if (count == 0 || call.batch->pages.size() <= hot().frames()) return call;  // a whole table's batch has none
  call.shared.unlock();
  call.alone = alone();
  call.batch = begin();  // the table may have other rows and other memory than a moment ago
  return call;
}

void TableImpl::gather_device(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out,
                              std::string_view field_name, CudaStream stream) {
  const ProfileRange range("embermap: gather");
  const Field& field = schema_.field(field_name);
  if (core_->pin == Pin::kMapping && gather_mapped_device(device, ids, count, out, field, stream)) return;
  if (gather_whole(device, ids, count, out, field, stream)) return;
  DeviceCall call = begin_device(device, ids, count, field.offset, field.bytes, stream);
  if (count == 0) return;
  for_device_passes(call, Access::kRead, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames,
                        const std::function<void()>& meanwhile) {
                      call.engine.fetch(*call.batch, source, first, frames, field.offset, field.bytes, core_->movers(), stream,
                                        meanwhile);
                    });
  call.engine.expand(*call.batch, out, stream);
  note_moved(call);
  rows_gathered_ += count;
}

// Where all pages are in memory for good, nothing has to be held: rows are on their way before the host has looked at the ids.
// False if it is not so.
bool TableImpl::gather_whole(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, const Field& field,
                             CudaStream stream) {
  CudaEngine& engine = core_->engine(device);
  if (count == 0) return false;
  engine.check_stream(stream);
  measure_movers(engine, count, field.offset, field.bytes);
  const auto lock = side_by_side();
  const WholePages* const pages = resident();
  if (pages == nullptr) return false;
  const FrameSource source = frame_source(hot());
  const std::shared_lock reading(rows_);  // nobody begins to change rows before this call's are on their way
  std::shared_ptr<CudaFlight> newer;
  begin_flight(engine, stream, [&] {
    if (!source.registered) land(Access::kRead);
    newer = behind();
    std::shared_ptr<CudaBatch> batch = engine.gather(ids, count, entry_.geometry.rows, name_, source, field.offset, field.bytes,
                                                     out, core_->movers(), stream, newer);
    add_reader(engine.depart(std::move(batch), newer, stream));
  });
  rows_gathered_ += count;
  return true;
}

void TableImpl::begin_flight(CudaEngine& engine, CudaStream stream, const std::function<void()>& body) {
  engine.check_stream(stream);
  try {
    body();
  } catch (...) {
    // What has been enqueued must not go on without being known.
    try {
      engine.wait(stream);
    } catch (const CudaError&) {
      // the first error is the one to report
    }
    throw;
  }
}

WorkingSet TableImpl::gather_working_set(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out,
                                         CudaStream stream, bool check_later) {
  const ProfileRange range("embermap: gather");
  const Field& weight = schema_.fields()[0];
  const std::uint64_t bytes = schema_.record_bytes();
  const auto plain = [&] {
    gather_device(device, ids, count, out, weight.name, stream);
    return WorkingSet();
  };
  if (count == 0 || core_->pin == Pin::kMapping || !writable()) return plain();
  CudaEngine& engine = core_->engine(device);
  engine.check_stream(stream);
  measure_movers(engine, count, 0, bytes);
  {
    const auto lock = side_by_side();
    if (resident() != nullptr && pinned_.registered()) {
      WorkingSet kept;
      kept.state_ = std::make_shared<WorkingSet::State>();
      const FrameSource source = frame_source(hot());
      const std::shared_lock reading(rows_);
      const std::shared_ptr<CudaFlight> newer = behind();
      begin_flight(engine, stream, [&] {
        std::shared_ptr<CudaBatch> batch =
            engine.begin_batch(ids, count, entry_.geometry.rows, entry_.geometry.rows_per_page, name_, stream, true);
        engine.fetch(*batch, source, 0, {}, 0, bytes, core_->movers(), stream);
        if (!check_later) engine.check(*batch);  // `out` has not been touched
        if (newer) engine.patch(*batch, newer, stream);
        engine.expand(*batch, weight.bytes, out, stream);
        *kept.state_ = {.batch = batch,
                        .grouped = batch,
                        .table = weak_from_this(),
                        .changes = changes_,
                        .count = count,
                        .device = device,
                        .stream = stream.handle};
        add_reader(engine.depart(std::move(batch), newer, stream));
      });
      rows_gathered_ += count;
      return kept;
    }
  }
  return plain();
}

void TableImpl::check(CudaBatch& batch, int device) const { core_->engine(device).check(batch); }

void TableImpl::expand_ids(CudaBatch& batch, int device, std::int64_t* out, CudaStream stream, bool own_stream) const {
  CudaEngine& engine = core_->engine(device);
  engine.expand_ids(batch, out, stream);
  if (!own_stream) engine.wait(stream);  // the batch's memory is freed in the order of its own
}

Prefetch TableImpl::prefetch_pages(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  if (count == 0) return prefetch({});
  CudaEngine& engine = core_->engine(device);
  {
    const auto lock = side_by_side();
    engine.check_stream(stream);
  }
  const auto job =
      std::make_shared<Prefetch::State>(this, [self = shared_from_this(), arriving = engine.bring_ids(ids, count, stream),
                                               ahead = std::optional<Ahead>()](const Prefetch::State& state) mutable {
        if (arriving) ahead = self->pages_ahead(arriving->wait());  // a bad id ends the job: the call that needs it reports it
        if (arriving) arriving.reset();
        return self->prefetch_some(*ahead, state);
      });
  core_->prefetcher.add(job);
  return Prefetch(job);
}

WorkingSet TableImpl::prefetch_device(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  const ProfileRange range("embermap: prefetch");
  if (count == 0 || core_->pin == Pin::kMapping) return {};
  CudaEngine& engine = core_->engine(device);
  engine.check_stream(stream);
  const auto lock = side_by_side();
  const WholePages* const pages = resident();
  const std::uint64_t bytes = writable() ? schema_.record_bytes() : schema_.fields()[0].bytes;
  if (pages == nullptr || !pinned_.registered() || bytes > kMostAheadBytes / count) return {};
  const std::shared_lock reading(rows_);  // nobody begins to change rows before this call's are on their way
  const FrameSource source = frame_source(hot());
  const std::shared_ptr<CudaFlight> newer = behind();
  CudaEngine::Ahead begun =
      engine.fetch_ahead(ids, count, entry_.geometry.rows, name_, source, bytes, newer, core_->movers(), stream);
  WorkingSet kept;
  kept.state_ = std::make_shared<WorkingSet::State>();
  *kept.state_ = {.batch = begun.batch,
                  .grouped = begun.batch,
                  .table = weak_from_this(),
                  .changes = changes_,
                  .count = count,
                  .device = device,
                  .stream = nullptr,
                  .ahead = begun.flight,
                  .newer = {}};
  const std::lock_guard flights(flights_mutex_);
  flying_.store(true, std::memory_order_release);
  ahead_.push_back(std::move(begun.flight));
  std::erase_if(waiting_, [](const std::weak_ptr<WorkingSet::State>& state) { return state.expired(); });
  waiting_.push_back(kept.state_);
  return kept;
}

bool TableImpl::gather_prefetched(WorkingSet& ahead, std::uint64_t count, std::byte* out, CudaStream stream) {
  const ProfileRange range("embermap: gather");
  if (!ahead.state_ || ahead.state_->table.lock().get() != this || ahead.state_->count != count) return false;
  WorkingSet::State& state = *ahead.state_;
  CudaEngine& engine = core_->engine(state.device);
  const auto lock = side_by_side();
  WholePages* const pages = resident();
  if (pages == nullptr) return false;
  const std::shared_lock reading(rows_);
  CudaEngine::Ahead begun;
  std::vector<std::shared_ptr<CudaFlight>> newer;
  {
    const std::lock_guard flights(flights_mutex_);
    if (!state.ahead || state.changes != changes_) return false;
    begun = {state.batch, std::move(state.ahead)};
    newer = std::move(state.newer);
  }
  begin_flight(engine, stream, [&] {
    engine.adopt(begun, stream);
    for (const std::shared_ptr<CudaFlight>& change : newer) engine.patch(*begun.batch, change, stream);
    engine.expand(*begun.batch, schema_.fields()[0].bytes, out, stream);
    // The flight that brought the rows ends before `out` has them: another one keeps the batch's memory until then.
    if (newer.empty()) add_reader(engine.depart(begun.batch, nullptr, stream));
    for (const std::shared_ptr<CudaFlight>& change : newer) add_reader(engine.depart(begun.batch, change, stream));
  });
  pages->count_hits(engine.pages_used(*begun.batch));
  rows_gathered_ += count;
  state.stream = stream.handle;  // from here on it is as if a gather had made it
  return true;
}

void TableImpl::scatter_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows,
                               std::string_view field_name, CudaStream stream) {
  const ProfileRange range("embermap: scatter");
  core_->bound_log();
  check_writable();
  const Field& field = schema_.field(field_name);
  DeviceCall call = begin_device(device, ids, count, field.offset, field.bytes, stream);
  if (count == 0) return;
  bool assigned = false;
  for_device_passes(call, Access::kWrite, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames,
                        const std::function<void()>& meanwhile) {
                      if (source.whole)
                        return call.engine.write_back_last(*call.batch, source, field.offset, field.bytes, rows, core_->movers(),
                                                           stream, meanwhile);
                      if (!std::exchange(assigned, true)) {
                        call.engine.reserve(*call.batch, field.offset, field.bytes, stream);
                        call.engine.assign(*call.batch, rows, stream);
                      }
                      call.engine.write_back(*call.batch, source, first, frames, core_->movers(), stream, meanwhile);
                    });
  note_moved(call);
  rows_written_ += count;
  note_dirty();
}

void TableImpl::add_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, CudaStream stream) {
  const ProfileRange range("embermap: add");
  check_writable();
  change_device(
      device, ids, count, schema_.fields()[0].bytes, stream,
      [&](CudaEngine& engine, CudaBatch& batch) { engine.add(batch, schema_.dim(), schema_.dtype(), rows, stream); }, [] {});
}

TableImpl::DeviceUpdate TableImpl::device_update(const std::byte* grads, DType grad_dtype, CudaStream stream,
                                                 std::optional<double> lr) {
  {
    const auto lock = side_by_side();
    check_writable();
    check_gradient_dtype(grad_dtype);
    (void)next_step(lr);  // an lr that cannot be is refused before anything happens
  }
  return {[=, this](CudaEngine& engine, CudaBatch& batch) {
            engine.step(batch, schema_.layout(entry_.geometry.stride), next_step(lr), grads, grad_dtype, stream);
          },
          [=, this] { count_step(next_step(lr)); }};
}

void TableImpl::update_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* grads, DType grad_dtype,
                              CudaStream stream, std::optional<double> lr) {
  const ProfileRange range("embermap: update");
  const DeviceUpdate update = device_update(grads, grad_dtype, stream, lr);
  change_device(device, ids, count, schema_.record_bytes(), stream, update.change, update.done);
}

bool TableImpl::update_kept(const WorkingSet& from, std::uint64_t count, const std::byte* grads, DType grad_dtype,
                            CudaStream stream, std::optional<double> lr) {
  const ProfileRange range("embermap: update");
  const DeviceUpdate update = device_update(grads, grad_dtype, stream, lr);
  core_->bound_log();
  return change_kept(from, count, stream, update.change, update.done);
}

void TableImpl::change_device(int device, const std::int64_t* ids, std::uint64_t count, std::uint64_t bytes, CudaStream stream,
                              const DeviceChange& change, const std::function<void()>& done) {
  core_->bound_log();
  DeviceCall call = begin_device(device, ids, count, 0, bytes, stream);
  if (count == 0) return;
  if (change_behind(call, bytes, stream, change, done)) {
    rows_written_ += count;
    note_dirty();
    return;
  }
  CudaEngine& engine = call.engine;
  CudaBatch& batch = *call.batch;
  const bool one_pass = call.shared.owns_lock();
  for_device_passes(call, one_pass ? Access::kWrite : Access::kRead, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames,
                        const std::function<void()>& meanwhile) {
                      engine.fetch(batch, source, first, frames, 0, bytes, core_->movers(), stream, meanwhile);
                      if (!one_pass) return;
                      change(engine, batch);
                      engine.write_back(batch, source, first, frames, core_->movers(), stream, meanwhile);
                      done();
                    });
  if (!one_pass) {
    // The working set holds all rows; only the pages come and go.
    change(engine, batch);
    for_device_passes(call, Access::kWrite, stream,
                      [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames,
                          const std::function<void()>& meanwhile) {
                        engine.write_back(batch, source, first, frames, core_->movers(), stream, meanwhile);
                      });
    done();
  }
  note_moved(call);
  rows_written_ += count;
  note_dirty();
}

bool TableImpl::change_behind(DeviceCall& call, std::uint64_t bytes, CudaStream stream, const DeviceChange& change,
                              const std::function<void()>& done) {
  WholePages* const pages = call.shared.owns_lock() ? resident() : nullptr;
  if (pages == nullptr) return false;
  const FrameSource source = frame_source(*pages);
  if (!call.engine.writes_behind(*call.batch, source, core_->movers())) return false;
  const std::unique_lock writing(rows_);
  const std::shared_ptr<CudaFlight> newer = behind();
  begin_flight(call.engine, stream, [&] {
    call.engine.fetch(*call.batch, source, 0, {}, 0, bytes, core_->movers(), stream);
    if (newer) call.engine.patch(*call.batch, newer, stream);
    write_behind(call.engine, std::move(call.batch), newer, source, stream, change, done);
  });
  return true;
}

bool TableImpl::change_kept(const WorkingSet& from, std::uint64_t count, CudaStream stream, const DeviceChange& change,
                            const std::function<void()>& done) {
  if (!from.state_ || from.state_->table.lock().get() != this || from.state_->count != count ||
      from.state_->stream != stream.handle)
    return false;
  CudaEngine& engine = core_->engine(from.state_->device);
  const auto lock = side_by_side();
  check_writable();
  WholePages* const pages = resident();
  if (pages == nullptr) return false;
  const FrameSource source = frame_source(*pages);
  engine.check_stream(stream);
  const std::unique_lock writing(rows_);
  if (from.state_->ahead) return false;                                    // no gather has had it yet
  const std::shared_ptr<CudaBatch> batch = std::move(from.state_->batch);  // its rows are those of this moment only once
  if (!batch || from.state_->changes != changes_ || !engine.writes_behind(*batch, source, core_->movers())) return false;
  begin_flight(engine, stream, [&] { write_behind(engine, batch, behind(), source, stream, change, done); });
  rows_written_ += count;
  note_dirty();
  return true;
}

void TableImpl::write_behind(CudaEngine& engine, std::shared_ptr<CudaBatch> batch, const std::shared_ptr<CudaFlight>& before,
                             const FrameSource& source, CudaStream stream, const DeviceChange& change,
                             const std::function<void()>& done) {
  auto& pages = static_cast<WholePages&>(hot());
  const HostKeys keys = engine.keys(*batch);  // before anything changes: bad ids are thrown here
  change(engine, *batch);
  // The device has something to do: pages are marked meanwhile.
  pages.mark_rows(keys);
  pages.count_hits(engine.pages_used(*batch));
  const std::uint64_t changes = changes_++;
  // Whoever fetches takes rows that are on their way back from one batch, not from several.
  if (before) before->wait();
  const std::lock_guard lock(flights_mutex_);
  if (behind_) {
    behind_->wait();
    retire(*behind_);
    behind_.reset();
  }
  flying_.store(true, std::memory_order_release);
  for (auto ahead = ahead_.begin(); ahead != ahead_.end();) {
    if (!(*ahead)->landed()) {
      ++ahead;
      continue;
    }
    retire(**ahead);
    ahead = ahead_.erase(ahead);
  }
  behind_ = engine.write_back_behind(std::move(batch), source, {ahead_, readers_}, before, core_->movers(), stream);
  done();
  for (const std::weak_ptr<WorkingSet::State>& weak : waiting_) {
    const std::shared_ptr<WorkingSet::State> state = weak.lock();
    if (!state || !state->ahead || state->changes != changes || state->newer.size() >= kMostNewer) continue;
    state->newer.push_back(behind_);
    state->changes = changes_;
  }
}

}  // namespace embermap
