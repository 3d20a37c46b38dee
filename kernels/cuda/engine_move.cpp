#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "kernels/cuda/engine.hpp"
#include "kernels/cuda/row_copy.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"
#include "kernels/rows.hpp"

namespace embermap::gpu {

void check_source(const DeviceBatch& batch, const FrameSource& source, std::uint64_t first_page, std::uint64_t pages,
                  std::uint64_t offset, std::uint64_t bytes, const char* call) {
  if (batch.whole != source.whole)
    throw InvalidArgument(fmt::format("{}: the batch was made for {}, the frames are of {}", call,
                                      batch.whole ? "a whole table" : "some pages",
                                      source.whole ? "a whole table" : "some pages"));
  if (batch.whole ? first_page != 0 || pages != 0 : first_page > batch.pages.size() || pages > batch.pages.size() - first_page)
    throw InvalidArgument(fmt::format("{}: pages [{}, +{}) of a batch with {}", call, first_page, pages, batch.pages.size()));
  if (pages == 0 && !batch.whole) return;
  if (source.slab == nullptr) throw InvalidArgument(fmt::format("{}: no slab", call));
  if (source.rows_per_page != batch.rows_per_page)
    throw InvalidArgument(
        fmt::format("{}: {} rows per page, but the batch was made for {}", call, source.rows_per_page, batch.rows_per_page));
  if (offset > source.stride || bytes > source.stride - offset)
    throw InvalidArgument(fmt::format("{}: bytes [{}, +{}) of records of {}", call, offset, bytes, source.stride));
  const std::uint64_t last = checked_mul(source.rows_per_page - 1, source.stride, "records of a page");
  if (checked_add(last, offset + bytes, "records of a page") > source.page_bytes)
    throw InvalidArgument(fmt::format("{}: {} records of {} bytes do not fit in pages of {}", call, source.rows_per_page,
                                      source.stride, source.page_bytes));
}

RowMoveShape shape_of(const MoverWay& way) {
  RowMoveShape shape;
  if (way.blocks != 0) shape = {.blocks = way.blocks, .threads = way.block_threads};
  return shape;
}

// The frame numbers on the device. They pass through staging, so that the caller's span may change at once.
DeviceBuffer Engine::send_frames(std::span<const std::uint32_t> frames, cudaStream_t stream) {
  DeviceBuffer out(pool_, frames.size_bytes(), stream);
  StagingPool::Lease staging = staging_.acquire(frames.size_bytes(), stream);
  std::memcpy(staging.data(), frames.data(), frames.size_bytes());
  EMBERMAP_CUDA(cudaMemcpyAsync(out.data(), staging.data(), frames.size_bytes(), cudaMemcpyHostToDevice, stream));
  return out;
}

RowMove Engine::move_of(const Stretch& s, const DeviceBuffer& frames, LinkLane* lane) const {
  const DeviceBatch& batch = s.batch;
  return {.places = {.slab = s.source.slab,
                     .page_bytes = s.source.page_bytes,
                     .stride = s.source.stride,
                     .offset = batch.offset,
                     .row_bytes = batch.bytes,
                     .whole = batch.whole,
                     .keys = batch.groups.keys,
                     .wide_keys = batch.wide_keys,
                     .rows_per_page = s.source.rows_per_page,
                     .page_index = batch.groups.page_index + s.begin,
                     .slots = batch.groups.slots + s.begin,
                     .frames = frames.at<std::uint32_t>(0),
                     .first_page = static_cast<std::uint32_t>(s.first)},
          .working = s.working,
          .rows = s.rows(),
          .exact = batch.header != nullptr && batch.whole && !batch.settled ? &batch.header->movable : nullptr,
          .claims = lane != nullptr ? lane->claims() : batch.groups.claims,
          .meeting = lane != nullptr ? lane->meeting() : nullptr};
}

// A lane for the batch, set up for a new transfer; null if there is none.
LinkLane* Engine::lane_for(DeviceBatch& batch) {
  if (batch.bytes > lanes_.shape().chunk_bytes) return nullptr;
  if (!batch.lane) {
    LinkLanes::Lease lease = lanes_.acquire();
    if (!lease) return nullptr;
    batch.lane = std::move(lease);
  }
  LinkLane* const lane = &*batch.lane;
  lane->wait();
  lane->reset();
  return lane;
}

MoverCase Engine::case_of(const Stretch& stretch, bool fetch, const ThreadPool& pool) const {
  return {.fetch = fetch,
          .rows = stretch.rows(),
          .row_bytes = stretch.batch.bytes,
          .pool_bytes = stretch.source.slab_bytes,
          .threads = pool.threads()};
}

void Engine::move(const Stretch& stretch, bool fetch, const MoverWay& way, ThreadPool& pool,
                  const std::function<void()>& meanwhile, const std::byte* last_of) {
  DeviceBatch& batch = stretch.batch;
  ++batch.moved.batches;
  LinkLane* const lane = way.host_threads != 0 ? lane_for(batch) : nullptr;
  const bool alone = lane != nullptr && way.blocks == 0;
  DeviceBuffer frames;
  if (!batch.whole) {
    if (lane != nullptr) need_keys(batch);
    if (!alone) frames = send_frames(stretch.frames, batch.stream);
  }
  if (lane != nullptr) lane->follow(batch.stream);
  if (!alone) {
    const RowMoveShape shape = shape_of(way);
    RowMove move = move_of(stretch, frames, lane);
    if (last_of != nullptr) {
      move.last_of = last_of;
      move.positions = batch.groups.positions;
      move.starts = batch.groups.starts;
    }
    if (fetch)
      move_from_frames(move, shape, batch.stream);
    else
      move_to_frames(move, shape, batch.stream);
    if (lane != nullptr) lane->has_kernel_on(batch.stream);
  }
  if (lane == nullptr) {
    if (meanwhile) meanwhile();
    if (batch.whole && !batch.settled) {
      batch.uncounted = true;  // how many rows there are is known when the stream has been waited for
      return;
    }
    count_moved(batch, stretch.rows(), stretch.rows());
    return;
  }
  if (fetch) return finish_fetch(stretch, way, *lane, pool, meanwhile);
  settle(batch);
  const std::uint64_t rows = stretch.rows();
  std::uint64_t least = 0;
  if (last_of != nullptr) {
    // The threads' rows one behind the other, a little more of them than threads are likely to move.
    const MoverRate known = model_.choose(case_of(stretch, false, pool));
    if (!alone)
      least = rows - std::min(rows, static_cast<std::uint64_t>(static_cast<double>(rows) * (known.thread_share * 1.1 + 0.1)));
    assign_rows(batch.working.data() + least * batch.bytes, batch.groups.positions, batch.groups.starts + least, rows - least,
                batch.bytes, last_of, lane->stream());
  }
  const std::uint64_t low = store_by_threads(*lane, stretch.host_places(), rows, batch.bytes, stretch.working, least, alone, pool,
                                             way.host_threads, meanwhile);
  if (last_of != nullptr) lane->lead(batch.stream);  // `last_of` is read until then, also where the kernel had all rows
  count_moved(batch, low, rows);
}

// The threads' part, beside the kernel's if there is one.
void Engine::finish_fetch(const Stretch& stretch, const MoverWay& way, LinkLane& lane, ThreadPool& pool,
                          const std::function<void()>& meanwhile) {
  DeviceBatch& batch = stretch.batch;
  settle(batch);
  const std::uint64_t rows = stretch.rows();
  const std::uint64_t low = fetch_by_threads(lane, stretch.host_places(), rows, batch.bytes, stretch.working, way.blocks == 0,
                                             pool, way.host_threads, meanwhile);
  lane.lead(batch.stream);
  count_moved(batch, low, rows);
}

void Engine::count_moved(DeviceBatch& batch, std::uint64_t by_kernel, std::uint64_t rows) {
  batch.moved.kernel_rows += by_kernel;
  batch.moved.thread_rows += rows - by_kernel;
  batch.moved.bytes += rows * batch.bytes;
}

void Engine::fetch(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page, std::span<const std::uint32_t> frames,
                   std::uint64_t offset, std::uint64_t bytes, ThreadPool& pool, CudaStream stream,
                   const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: fetch");
  const ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "fetch");
  if (mine.count == 0) return;
  check_source(mine, source, first_page, frames.size(), offset, bytes, "fetch");
  need_rows(mine, offset, bytes, "fetch");
  move_pages(mine, source, first_page, frames, true, pool, meanwhile);
}

void Engine::write_back(CudaBatch& batch, const FrameSource& source, std::uint64_t first_page,
                        std::span<const std::uint32_t> frames, ThreadPool& pool, CudaStream stream,
                        const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: write back");
  const ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "write_back");
  if (mine.count == 0) return;
  check_source(mine, source, first_page, frames.size(), mine.offset, mine.bytes, "write_back");
  move_pages(mine, source, first_page, frames, false, pool, meanwhile);
}

// The fastest way, where there is a choice.
void Engine::move_pages(DeviceBatch& batch, const FrameSource& source, std::uint64_t first_page,
                        std::span<const std::uint32_t> frames, bool fetch, ThreadPool& pool,
                        const std::function<void()>& meanwhile) {
  if (frames.empty() && !batch.whole) return;
  const Stretch stretch(batch, source, first_page, frames);
  if (zero_copy(source)) return move(stretch, fetch, model_.choose(case_of(stretch, fetch, pool)).way, pool, meanwhile, nullptr);
  if (meanwhile) meanwhile();
  if (fetch)
    fetch_through_host(stretch, pool);
  else
    write_back_through_host(stretch, pool);
}

void Engine::write_back_last(CudaBatch& batch, const FrameSource& source, std::uint64_t offset, std::uint64_t bytes,
                             const std::byte* in, ThreadPool& pool, CudaStream stream, const std::function<void()>& meanwhile) {
  const ProfileRange range("embermap: write back");
  const ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "write_back_last");
  if (mine.count == 0) return;
  check_source(mine, source, 0, 0, offset, bytes, "write_back_last");
  check_memory(in, "input of write_back_last");
  need_rows(mine, offset, bytes, "write_back_last");
  const Stretch stretch(mine, source, 0, {});
  if (zero_copy(source)) return move(stretch, false, model_.choose(case_of(stretch, false, pool)).way, pool, meanwhile, in);
  if (meanwhile) meanwhile();
  settle(mine);
  assign_rows(mine.working.data(), mine.groups.positions, mine.groups.starts, mine.distinct, mine.bytes, in, mine.stream);
  write_back_through_host(stretch, pool);
}

namespace {

// Rows of an unregistered slab on their way through host memory, in pieces.
class HostPieces {
 public:
  HostPieces(const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes, std::byte* working, ThreadPool& pool)
      : places_{places},
        rows_{rows},
        row_bytes_{row_bytes},
        working_{working},
        pool_{pool},
        piece_{std::clamp<std::uint64_t>(kStagingPiece / row_bytes, 1, rows)},
        addresses_(piece_) {}

  std::uint64_t pieces() const { return ceil_div(rows_, piece_); }
  std::uint64_t piece_bytes() const { return piece_ * row_bytes_; }
  std::uint64_t bytes(std::uint64_t piece) const { return rows(piece) * row_bytes_; }
  std::byte* working(std::uint64_t piece) const { return working_ + piece * piece_ * row_bytes_; }

  // Host addresses of the records of a piece; valid until the next call.
  std::span<std::byte* const> addresses(std::uint64_t piece) {
    const std::uint64_t from = piece * piece_;
    pool_.parallel_for(rows(piece), 16384, [&](std::uint64_t begin, std::uint64_t end) {
      places_.addresses(from + begin, from + end, addresses_.data() + begin);
    });
    return {addresses_.data(), rows(piece)};
  }

 private:
  std::uint64_t rows(std::uint64_t piece) const { return std::min(piece_, rows_ - piece * piece_); }

  const HostPlaces places_;
  const std::uint64_t rows_, row_bytes_;
  std::byte* const working_;
  ThreadPool& pool_;
  const std::uint64_t piece_;  // rows
  std::vector<std::byte*> addresses_;
};

}  // namespace

// A batch with pages has no header on the host, and its keys only when they are asked for.
void Engine::need_keys(DeviceBatch& batch) {
  if (batch.settled || batch.host_keys != nullptr) return;
  const std::uint64_t bytes = batch.distinct * batch.key_bytes();
  batch.keys_on_host = staging_.acquire(bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(batch.keys_on_host.data(), batch.groups.keys, bytes, cudaMemcpyDeviceToHost, batch.stream));
  batch.keys_on_host.mark();
  batch.host_keys = batch.keys_on_host.data();
}

void Engine::fetch_through_host(const Stretch& stretch, ThreadPool& pool) {
  DeviceBatch& batch = stretch.batch;
  need_keys(batch);
  settle(batch);
  HostPieces rows(stretch.host_places(), stretch.rows(), batch.bytes, stretch.working, pool);
  std::array<StagingPool::Lease, 2> staging;
  for (std::uint64_t piece = 0; piece < rows.pieces(); ++piece) {
    StagingPool::Lease& lease = staging[piece % 2];
    if (piece < 2)
      lease = staging_.acquire(rows.piece_bytes(), batch.stream);
    else
      lease.wait();
    const std::span<std::byte* const> from = rows.addresses(piece);
    gather_rows({from.data(), from.size()}, batch.bytes, lease.data(), pool);
    EMBERMAP_CUDA(cudaMemcpyAsync(rows.working(piece), lease.data(), rows.bytes(piece), cudaMemcpyHostToDevice, batch.stream));
    lease.mark();
  }
  EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
  for (StagingPool::Lease& lease : staging) lease.settled();
  batch.moved.pageable_rows += stretch.rows();
}

void Engine::write_back_through_host(const Stretch& stretch, ThreadPool& pool) {
  DeviceBatch& batch = stretch.batch;
  need_keys(batch);
  settle(batch);
  HostPieces rows(stretch.host_places(), stretch.rows(), batch.bytes, stretch.working, pool);
  std::array<StagingPool::Lease, 2> staging;
  const auto bring = [&](std::uint64_t piece) {
    StagingPool::Lease& lease = staging[piece % 2];
    if (piece < 2) lease = staging_.acquire(rows.piece_bytes(), batch.stream);
    EMBERMAP_CUDA(cudaMemcpyAsync(lease.data(), rows.working(piece), rows.bytes(piece), cudaMemcpyDeviceToHost, batch.stream));
    lease.mark();
  };
  std::vector<std::uint32_t> sources(rows.piece_bytes() / batch.bytes);
  std::iota(sources.begin(), sources.end(), 0U);
  bring(0);
  for (std::uint64_t piece = 0; piece < rows.pieces(); ++piece) {
    if (piece + 1 < rows.pieces()) bring(piece + 1);
    StagingPool::Lease& lease = staging[piece % 2];
    lease.wait();
    const std::span<std::byte* const> to = rows.addresses(piece);
    scatter_rows(to, std::span(sources).first(to.size()), batch.bytes, lease.data(), pool);
  }
  for (StagingPool::Lease& lease : staging) lease.settled();
  batch.moved.pageable_rows += stretch.rows();
}

}  // namespace embermap::gpu
