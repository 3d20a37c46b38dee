// The way of a batch on a CUDA device. The device sorts the ids and finds their pages, the host makes those pages resident and
// holds them, the device moves the rows.
#include <fmt/format.h>

#include "base/checked.hpp"
#include "store/table_impl.hpp"
#include "store/whole_pages.hpp"

namespace embermap {

void TableImpl::for_device_passes(const DeviceCall& call, Access access, CudaStream stream, const DevicePass& body) {
  const CudaBatch& batch = *call.batch;
  HotPages& pages_in_memory = hot();
  const FrameSource source{.slab = pages_in_memory.slab().data(),
                           .registered = pinned_.registered(),
                           .page_bytes = entry_.geometry.page_bytes(),
                           .rows_per_page = entry_.geometry.rows_per_page,
                           .stride = entry_.geometry.stride,
                           .whole = pages_in_memory.whole()};
  if (source.whole) return for_device_whole(call, source, access, stream, body);
  // Passes.
  std::vector<std::uint32_t> frames(std::min<std::uint64_t>(batch.pages.size(), pages_in_memory.frames()));
  for (std::uint64_t first = 0; first < batch.pages.size();) {
    const std::uint64_t count = std::min<std::uint64_t>(frames.size(), batch.pages.size() - first);
    const std::span<std::uint32_t> places(frames.data(), count);
    const auto hold = pages_in_memory.hold(std::span(batch.pages).subspan(first, count), places, access);
    device_pass(call, access, stream, [&] { body(source, first, places); });
    first += count;
  }
}

void TableImpl::device_pass(const DeviceCall& call, Access access, CudaStream stream, const std::function<void()>& body) {
  std::shared_lock<FairSharedMutex> reading(rows_, std::defer_lock);
  std::unique_lock<FairSharedMutex> writing(rows_, std::defer_lock);
  if (call.shared.owns_lock()) {
    if (access == Access::kRead)
      reading.lock();
    else
      writing.lock();
  }
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
}

// Every page has its frame, and keeps it: what is not in memory is read while the device sorts.
void TableImpl::for_device_whole(const DeviceCall& call, const FrameSource& source, Access access, CudaStream stream,
                                 const DevicePass& body) {
  const std::span<const std::int64_t> ids = call.batch->ids;
  static_cast<WholePages&>(hot()).load_rows({reinterpret_cast<const std::uint64_t*>(ids.data()), ids.size()}, access);
  device_pass(call, access, stream, [&] { body(source, 0, {}); });
}

TableImpl::DeviceCall TableImpl::begin_device(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  CudaEngine& engine = core_->engine(device);
  const auto make = [&] {
    return engine.make_batch(ids, count, entry_.geometry.rows, entry_.geometry.rows_per_page, name_, stream);
  };
  DeviceCall call{engine, side_by_side(), {}, nullptr};
  if (count != 0 && hot().whole()) {
    call.batch = engine.begin_batch(ids, count, entry_.geometry.rows, entry_.geometry.rows_per_page, name_, core_->compute, stream);
    return call;
  }
  call.batch = make();
  if (count == 0 || call.batch->pages.size() <= hot().frames()) return call;
  call.shared.unlock();
  call.alone = alone();
  call.batch = make();  // there may be fewer rows than a moment ago
  return call;
}

void TableImpl::gather_device(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out,
                              std::string_view field_name, CudaStream stream) {
  const Field& field = schema_.field(field_name);
  const DeviceCall call = begin_device(device, ids, count, stream);
  if (count == 0) return;
  for_device_passes(call, Access::kRead, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames) {
                      call.engine.fetch(*call.batch, source, first, frames, field.offset, field.bytes, core_->compute, stream);
                    });
  call.engine.expand(*call.batch, out, stream);
  rows_gathered_ += count;
}

void TableImpl::scatter_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows,
                               std::string_view field_name, CudaStream stream) {
  core_->bound_log();
  check_writable();
  const Field& field = schema_.field(field_name);
  const DeviceCall call = begin_device(device, ids, count, stream);
  if (count == 0) return;
  bool assigned = false;
  for_device_passes(call, Access::kWrite, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames) {
                      if (!std::exchange(assigned, true)) {
                        call.engine.reserve(*call.batch, field.offset, field.bytes, stream);
                        call.engine.assign(*call.batch, rows, stream);
                      }
                      call.engine.write_back(*call.batch, source, first, frames, core_->compute, stream);
                    });
  rows_written_ += count;
  note_dirty();
}

void TableImpl::add_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, CudaStream stream) {
  check_writable();
  change_device(
      device, ids, count, schema_.fields()[0].bytes, stream,
      [&](CudaEngine& engine, CudaBatch& batch) { engine.add(batch, schema_.dim(), schema_.dtype(), rows, stream); }, [] {});
}

void TableImpl::update_device(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* grads, DType grad_dtype,
                              CudaStream stream, std::optional<double> lr) {
  {
    const auto lock = side_by_side();
    check_writable();
    check_gradient_dtype(grad_dtype);
    (void)next_step(lr);  // an lr that cannot be is refused before anything happens
  }
  change_device(
      device, ids, count, schema_.record_bytes(), stream,
      [&](CudaEngine& engine, CudaBatch& batch) {
        engine.step(batch, schema_.layout(entry_.geometry.stride), next_step(lr), grads, grad_dtype, stream);
      },
      [&] {
        ++step_;
        entry_changed_ = true;
      });
}

void TableImpl::change_device(int device, const std::int64_t* ids, std::uint64_t count, std::uint64_t bytes, CudaStream stream,
                              const std::function<void(CudaEngine&, CudaBatch&)>& change, const std::function<void()>& done) {
  core_->bound_log();
  const DeviceCall call = begin_device(device, ids, count, stream);
  if (count == 0) return;
  CudaEngine& engine = call.engine;
  CudaBatch& batch = *call.batch;
  const bool one_pass = call.shared.owns_lock();
  for_device_passes(call, one_pass ? Access::kWrite : Access::kRead, stream,
                    [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames) {
                      engine.fetch(batch, source, first, frames, 0, bytes, core_->compute, stream);
                      if (!one_pass) return;
                      change(engine, batch);
                      engine.write_back(batch, source, first, frames, core_->compute, stream);
                      done();
                    });
  if (!one_pass) {
    // The working set holds all rows; only the pages come and go.
    change(engine, batch);
    for_device_passes(call, Access::kWrite, stream,
                      [&](const FrameSource& source, std::uint64_t first, std::span<const std::uint32_t> frames) {
                        engine.write_back(batch, source, first, frames, core_->compute, stream);
                      });
    done();
  }
  rows_written_ += count;
  note_dirty();
}

}  // namespace embermap
