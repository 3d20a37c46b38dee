#include "kernels/cuda/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "kernels/batch.hpp"
#include "kernels/cuda/group_ids.hpp"
#include "kernels/cuda/row_copy.hpp"
#include "kernels/cuda/row_sum.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/profile.hpp"

namespace embermap::gpu {

namespace {
constexpr std::uint64_t kFewPages = 1024;                                // pages read back together with the counts, at least and
constexpr std::uint64_t kManyPages = kStagingPiece / sizeof(PageEntry);  // at most
}  // namespace

DeviceBatch& Engine::own(CudaBatch& batch, CudaStream stream, const char* call) const {
  refuse_capture(native(stream), call);
  auto* const mine = dynamic_cast<DeviceBatch*>(&batch);
  if (mine == nullptr || mine->engine != this)
    throw InvalidArgument(fmt::format("{}: the batch was made with another engine", call));
  if (mine->stream != native(stream)) throw InvalidArgument(fmt::format("{}: the batch was made with another stream", call));
  return *mine;
}

DeviceBatch& Engine::with_rows(CudaBatch& batch, CudaStream stream, const char* call) const {
  DeviceBatch& mine = own(batch, stream, call);
  if (mine.count != 0 && !mine.has_working)
    throw InvalidArgument(fmt::format("{}: the batch has no rows yet; fetch or reserve them", call));
  return mine;
}

// A kernel that follows a wrong address ends the process's use of CUDA, so addresses are looked at first.
cudaMemoryType Engine::check_memory(const void* memory, const char* what) const {
  if (memory == nullptr) throw InvalidArgument(fmt::format("{}: null pointer", what));
  cudaPointerAttributes attributes{};
  EMBERMAP_CUDA(cudaPointerGetAttributes(&attributes, memory));
  if (attributes.type == cudaMemoryTypeUnregistered && pageable_access_ == 0)
    throw InvalidArgument(fmt::format("{}: not in the memory of CUDA device {}", what, device_));
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device_)
    throw InvalidArgument(fmt::format("{}: in the memory of CUDA device {}, not of {}", what, attributes.device, device_));
  return attributes.type;
}

void Engine::check_ids(const std::int64_t* ids) const {
  check_memory(ids, "ids of a batch");
  if (reinterpret_cast<std::uintptr_t>(ids) % alignof(std::int64_t) != 0)
    throw InvalidArgument(fmt::format("ids of a batch: at {}, which is no multiple of 8", static_cast<const void*>(ids)));
}

// The host has to know only the number of distinct ids and the pages, and to get both in one wait it asks for as many pages as
// the last batches had. What is missing is read in a second one; entries past those that there are were never written, as
// compute-sanitizer's initcheck tells, and nobody looks at them.
std::unique_ptr<CudaBatch> Engine::make_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                              std::uint64_t rows_per_page, const std::string& table, CudaStream stream) {
  const ProfileRange range("embermap: sort ids");
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "make_batch");
  auto batch = new_batch(ids, count, rows, rows_per_page, "make_batch", stream);
  batch->page_starts = {0};
  if (count == 0) return batch;

  const std::uint64_t most_pages = std::max<std::uint64_t>(std::min(count, ceil_div(rows, rows_per_page)), 1);
  const DeviceBuffer result(pool_, sizeof(GroupHeader) + most_pages * sizeof(PageEntry), batch->stream);
  auto* const header = result.at<GroupHeader>(0);
  auto* const entries = result.at<PageEntry>(sizeof(GroupHeader));
  group_ids(ids, static_cast<std::uint32_t>(count), rows, rows_per_page, batch->groups, header, entries, nullptr, false, limits_,
            pool_, batch->stream);

  const std::uint64_t first_copy =
      std::min(most_pages, std::clamp(expected_pages_.load(std::memory_order_relaxed), kFewPages, kManyPages));
  const std::uint64_t first_bytes = sizeof(GroupHeader) + first_copy * sizeof(PageEntry);
  StagingPool::Lease staging = staging_.acquire(first_bytes, batch->stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(staging.data(), header, first_bytes, cudaMemcpyDeviceToHost, batch->stream));
  EMBERMAP_CUDA(cudaStreamSynchronize(batch->stream));
  staging.settled();

  GroupHeader counts{};
  std::memcpy(&counts, staging.data(), sizeof counts);
  if (counts.bad_position != kNoBadId) {
    std::int64_t bad = 0;
    EMBERMAP_CUDA(cudaMemcpyAsync(&bad, ids + counts.bad_position, sizeof bad, cudaMemcpyDefault, batch->stream));
    EMBERMAP_CUDA(cudaStreamSynchronize(batch->stream));
    throw RowIdError(table, bad, counts.bad_position, rows);
  }
  batch->distinct = counts.distinct;
  read_pages(*batch, counts, entries, reinterpret_cast<const PageEntry*>(staging.data() + sizeof(GroupHeader)), first_copy);
  // A little more than was needed; it shrinks slowly, so that one small batch among large ones costs nothing.
  const std::uint64_t before = expected_pages_.load(std::memory_order_relaxed);
  expected_pages_.store(std::max(counts.pages + counts.pages / 8, before - before / 16), std::memory_order_relaxed);
  return batch;
}

// What both ways of making a batch have in common: checks, and device memory for the groups.
std::unique_ptr<DeviceBatch> Engine::new_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                               std::uint64_t rows_per_page, const char* call, CudaStream stream) {
  if (count > kMaxBatch)
    throw InvalidArgument(fmt::format("a batch of {} ids: at most {} are possible in one call", count, kMaxBatch));
  if (rows_per_page == 0 || rows_per_page > std::uint64_t{1} << 32)
    throw InvalidArgument(fmt::format("{}: {} rows per page", call, rows_per_page));

  auto batch = std::make_unique<DeviceBatch>();
  batch->engine = this;
  batch->shared = shared_;
  batch->stream = native(stream);
  batch->rows_per_page = rows_per_page;
  batch->wide_keys = wide_keys(rows);
  batch->count = count;
  if (count == 0) return batch;
  check_ids(ids);

  Layout layout;
  const std::uint64_t inverse_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t positions_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t starts_at = layout.add(count + 1, sizeof(std::uint32_t));
  const std::uint64_t page_index_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t slots_at = layout.add(count, sizeof(std::uint32_t));
  const std::uint64_t claims_at = layout.add(1, sizeof(MoveClaims));
  const std::uint64_t header_at = layout.add(1, sizeof(GroupHeader));
  const std::uint64_t keys_at = layout.add(count, batch->key_bytes());
  batch->memory = DeviceBuffer(pool_, layout.bytes(), batch->stream);
  batch->header = batch->memory.at<GroupHeader>(header_at);
  batch->groups = {.inverse = batch->memory.at<std::uint32_t>(inverse_at),
                   .positions = batch->memory.at<std::uint32_t>(positions_at),
                   .starts = batch->memory.at<std::uint32_t>(starts_at),
                   .page_index = batch->memory.at<std::uint32_t>(page_index_at),
                   .slots = batch->memory.at<std::uint32_t>(slots_at),
                   .keys = batch->memory.at<std::byte>(keys_at),
                   .claims = batch->memory.at<MoveClaims>(claims_at)};
  return batch;
}

std::unique_ptr<CudaBatch> Engine::begin_batch(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows,
                                               std::uint64_t rows_per_page, const std::string& table, CudaStream stream,
                                               bool tells) {
  const ProfileRange range("embermap: sort ids");
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "begin_batch");
  auto batch = new_batch(ids, count, rows, rows_per_page, "begin_batch", stream);
  batch->whole = true;
  if (count == 0) return batch;
  batch->ids = ids;
  batch->rows = rows;
  batch->table = table;
  batch->began = shared_->events.record(batch->stream);
  batch->uncounted_pages = tells;
  const auto tell = [&] {
    batch->bad_on_host = staging_.acquire(sizeof(std::uint64_t), batch->stream);
    EMBERMAP_CUDA(cudaMemcpyAsync(batch->bad_on_host.data(), &batch->header->bad_position, sizeof(std::uint64_t),
                                  cudaMemcpyDeviceToHost, batch->stream));
    batch->bad_on_host.mark();
  };
  group(*batch, ids, count, rows, true, tells ? std::function<void()>(tell) : std::function<void()>());
  return batch;
}

// Pinned memory for a report and so many bytes behind it, ready for a kernel; an empty lease where there is none.
StagingPool::Lease Engine::report_for(std::uint64_t key_bytes, cudaStream_t stream) {
  if (host_pointers_work_ == 0) return {};
  StagingPool::Lease lease = staging_.acquire(kReportBytes + key_bytes, stream);
  if (!lease.pinned()) return {};
  new (lease.data()) GroupReport{};
  return lease;
}

void Engine::group(DeviceBatch& batch, const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, bool keys,
                   const std::function<void()>& looked) {
  const auto some = static_cast<std::uint32_t>(count);
  const std::uint64_t bytes = keys ? count * batch.key_bytes() : 0;
  if (reports(some, rows, limits_)) batch.keys_on_host = report_for(bytes, batch.stream);
  batch.reported = static_cast<bool>(batch.keys_on_host);
  auto* const report = batch.reported ? reinterpret_cast<GroupReport*>(batch.keys_on_host.data()) : nullptr;
  group_ids(ids, some, rows, batch.rows_per_page, batch.groups, batch.header, nullptr, report, keys, limits_, pool_, batch.stream,
            batch.reported ? std::function<void()>() : looked);
  if (!batch.reported) return send_keys(batch, keys ? count : 0);
  batch.keys_on_host.mark();
  batch.host_keys = batch.keys_on_host.data() + kReportBytes;
}

// The header and `most` keys on their way to the host.
void Engine::send_keys(DeviceBatch& batch, std::uint64_t most) {
  const auto begin =
      static_cast<std::uint64_t>(static_cast<std::byte*>(batch.groups.keys) - reinterpret_cast<std::byte*>(batch.header));
  const std::uint64_t bytes = begin + most * batch.key_bytes();
  batch.keys_on_host = staging_.acquire(bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(batch.keys_on_host.data(), batch.header, bytes, cudaMemcpyDeviceToHost, batch.stream));
  batch.keys_on_host.mark();
  batch.host_keys = batch.keys_on_host.data() + begin;
}

RowIdError Engine::bad_id(const DeviceBatch& batch, std::uint64_t position) const {
  std::int64_t bad = 0;
  EMBERMAP_CUDA(cudaMemcpyAsync(&bad, batch.ids + position, sizeof bad, cudaMemcpyDefault, batch.stream));
  EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
  return {batch.table, bad, position, batch.rows};
}

// Waits for what group() has the device send.
void Engine::settle(DeviceBatch& batch) {
  if (batch.settled) return;
  if (batch.reported)
    wait_for(reinterpret_cast<GroupReport*>(batch.keys_on_host.data())->grouped, batch.keys_on_host);
  else
    batch.keys_on_host.wait();
  if (batch.whole) {
    GroupHeader counts{};
    std::memcpy(&counts, batch.keys_on_host.data(), sizeof counts);
    if (counts.bad_position != kNoBadId) throw bad_id(batch, counts.bad_position);
    batch.distinct = counts.distinct;
  }
  batch.settled = true;
}

// Fills batch.pages and page_starts: `have` entries are at `first` in host memory, all are at `entries` in device memory.
void Engine::read_pages(DeviceBatch& batch, const GroupHeader& header, const PageEntry* entries, const PageEntry* first,
                        std::uint64_t have) {
  batch.pages.resize(header.pages);
  batch.page_starts.resize(header.pages + 1);
  batch.page_starts[header.pages] = header.distinct;
  const auto take = [&](const PageEntry* from, std::uint64_t begin, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      batch.pages[begin + i] = from[i].page;
      batch.page_starts[begin + i] = from[i].first;
    }
  };
  have = std::min(have, header.pages);
  take(first, 0, have);
  if (have == header.pages) return;
  constexpr std::uint64_t kPiece = kStagingPiece / sizeof(PageEntry);
  StagingPool::Lease staging = staging_.acquire(std::min(kPiece, header.pages - have) * sizeof(PageEntry), batch.stream);
  for (std::uint64_t begin = have; begin < header.pages; begin += kPiece) {
    const std::uint64_t count = std::min(kPiece, header.pages - begin);
    EMBERMAP_CUDA(
        cudaMemcpyAsync(staging.data(), entries + begin, count * sizeof(PageEntry), cudaMemcpyDeviceToHost, batch.stream));
    EMBERMAP_CUDA(cudaStreamSynchronize(batch.stream));
    take(reinterpret_cast<const PageEntry*>(staging.data()), begin, count);
  }
  staging.settled();
}

// The working set for rows of `bytes` at `offset`, made if it is not there. As long as nobody knows how many rows there are it
// has room for one per id.
void Engine::need_rows(DeviceBatch& batch, std::uint64_t offset, std::uint64_t bytes, const char* call) {
  if (bytes == 0) throw InvalidArgument(fmt::format("{}: rows of 0 bytes", call));
  if (batch.has_working) {
    if (batch.offset != offset || batch.bytes != bytes)
      throw InvalidArgument(fmt::format("{}: bytes [{}, +{}) of each record, but the batch already has [{}, +{})", call, offset,
                                        bytes, batch.offset, batch.bytes));
    return;
  }
  if (batch.whole && !batch.settled && bytes > kMostUnsettled / batch.count) settle(batch);
  const std::uint64_t rows = batch.whole && !batch.settled ? batch.count : batch.distinct;
  batch.working_bytes = checked_mul(rows, bytes, "working set of a batch");
  batch.working = DeviceBuffer(pool_, batch.working_bytes, batch.stream);
  batch.offset = offset;
  batch.bytes = bytes;
  batch.has_working = true;
}

void Engine::reserve(CudaBatch& batch, std::uint64_t offset, std::uint64_t bytes, CudaStream stream) {
  const ScopedDevice current(device_);
  DeviceBatch& mine = own(batch, stream, "reserve");
  if (mine.whole && mine.count == 0) return;
  need_rows(mine, offset, bytes, "reserve");
}

void Engine::check(CudaBatch& batch) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (mine.count == 0) return;
  if (mine.reported && !mine.settled) {
    auto& report = *reinterpret_cast<GroupReport*>(mine.keys_on_host.data());
    wait_for(report.looked, mine.keys_on_host);
    if (report.header.bad_position != kNoBadId) throw bad_id(mine, report.header.bad_position);
    return;
  }
  if (!mine.bad_on_host) return settle(mine);
  mine.bad_on_host.wait();
  std::uint64_t bad = 0;
  std::memcpy(&bad, mine.bad_on_host.data(), sizeof bad);
  mine.bad_on_host.settled();
  mine.bad_on_host = {};
  if (bad != kNoBadId) throw bad_id(mine, bad);
}

HostKeys Engine::keys(CudaBatch& batch) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (mine.count == 0) return {};
  if (!mine.whole) throw InvalidArgument("keys: the batch was made for some pages");
  settle(mine);
  return {mine.host_keys, mine.wide_keys, mine.distinct};
}

std::uint64_t Engine::pages_used(const CudaBatch& batch) const {
  const auto& mine = dynamic_cast<const DeviceBatch&>(batch);
  std::uint64_t pages = 0;
  if (mine.pages_on_host) {
    std::memcpy(&pages, mine.pages_on_host.data(), sizeof pages);
  } else if (mine.whole && mine.keys_on_host) {
    GroupHeader counts{};
    std::memcpy(&counts, mine.keys_on_host.data(), sizeof counts);
    if (counts.bad_position == kNoBadId) pages = counts.pages;
  }
  return pages;
}

Moved Engine::moved(CudaBatch& batch) {
  auto& mine = dynamic_cast<DeviceBatch&>(batch);
  if (std::exchange(mine.uncounted, false)) {
    settle(mine);
    count_moved(mine, mine.distinct, mine.distinct);
  }
  return mine.moved;
}

void Engine::expand(CudaBatch& batch, std::byte* out, CudaStream stream) {
  const ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "expand");
  if (mine.count == 0) return;
  check_memory(out, "output of expand");
  expand_rows(mine.working.data(), mine.bytes, mine.groups.inverse, mine.count, mine.bytes, out, mine.stream);
}

void Engine::expand(CudaBatch& batch, std::uint64_t bytes, std::byte* out, CudaStream stream) {
  const ScopedDevice current(device_);
  const DeviceBatch& mine = with_rows(batch, stream, "expand");
  if (mine.count == 0) return;
  if (bytes > mine.bytes) throw InvalidArgument(fmt::format("expand: {} bytes of rows of {}", bytes, mine.bytes));
  check_memory(out, "output of expand");
  expand_rows(mine.working.data(), mine.bytes, mine.groups.inverse, mine.count, bytes, out, mine.stream);
}

void Engine::expand_ids(CudaBatch& batch, std::int64_t* out, CudaStream stream) {
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "expand_ids");
  auto* const mine = dynamic_cast<DeviceBatch*>(&batch);
  if (mine == nullptr || mine->engine != this) throw InvalidArgument("expand_ids: the batch was made with another engine");
  if (mine->count == 0) return;
  if (!mine->whole) throw InvalidArgument("expand_ids: the batch was made for some pages");
  check_memory(out, "output of expand_ids");
  expand_keys(mine->groups.keys, mine->wide_keys, mine->groups.inverse, mine->count, out, native(stream));
}

void Engine::assign(CudaBatch& batch, const std::byte* in, CudaStream stream) {
  const ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "assign");
  if (mine.count == 0) return;
  if (mine.whole) settle(mine);
  check_memory(in, "input of assign");
  assign_rows(mine.working.data(), mine.groups.positions, mine.groups.starts, mine.distinct, mine.bytes, in, mine.stream);
}

// `in` itself, or a copy of it where its address is not a multiple of `alignment` (a view into a byte buffer).
const std::byte* Engine::aligned_input(const DeviceBatch& batch, const std::byte* in, std::uint64_t bytes,
                                       std::uint64_t alignment, DeviceBuffer& copy) const {
  if (reinterpret_cast<std::uintptr_t>(in) % alignment == 0) return in;
  copy = DeviceBuffer(pool_, bytes, batch.stream);
  EMBERMAP_CUDA(cudaMemcpyAsync(copy.data(), in, bytes, cudaMemcpyDefault, batch.stream));
  return copy.data();
}

void Engine::add(CudaBatch& batch, std::uint64_t dim, DType dtype, const std::byte* in, CudaStream stream) {
  const ProfileRange range("embermap: add");
  const ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "add");
  if (mine.count == 0) return;
  if (mine.whole) settle(mine);
  const std::uint64_t row_bytes = checked_mul(dim, item_size(dtype), "bytes of a row");
  if (row_bytes != mine.bytes)
    throw InvalidArgument(fmt::format("add: {} x {} on rows of {} bytes", dim, dtype_name(dtype), mine.bytes));
  check_memory(in, "input of add");
  DeviceBuffer copy;
  in = aligned_input(mine, in, checked_mul(mine.count, row_bytes, "input of a batch"), item_size(dtype), copy);
  add_grouped({mine.working.data(), mine.bytes, mine.groups.positions, mine.groups.starts, mine.distinct, mine.count}, dim, dtype,
              in, pool_, mine.stream);
}

void Engine::step(CudaBatch& batch, const RecordLayout& layout, const StepScalars& scalars, const std::byte* grads,
                  DType grad_dtype, CudaStream stream) {
  const ProfileRange range("embermap: optimizer step");
  const ScopedDevice current(device_);
  DeviceBatch& mine = with_rows(batch, stream, "step");
  if (mine.whole && mine.count != 0) settle(mine);
  const bool half = layout.dtype == DType::kFloat16 || layout.dtype == DType::kBFloat16;
  if (!is_floating(layout.dtype))
    throw DTypeError(fmt::format("step: rows of dtype {} cannot be trained", dtype_name(layout.dtype)));
  if (grad_dtype != layout.dtype && !(half && grad_dtype == DType::kFloat32))
    throw DTypeError(
        fmt::format("step: gradients of dtype {} for rows of dtype {}", dtype_name(grad_dtype), dtype_name(layout.dtype)));
  if (mine.count == 0) return;

  // Fields with an element for each of the weight's, then those of one; each behind the one before.
  const std::uint32_t states = all_states(scalars);
  const std::uint64_t state_item = item_size(state_dtype(layout.dtype));
  std::uint64_t end = checked_mul(layout.dim, item_size(layout.dtype), "bytes of a weight");
  if (layout.states < states)
    throw InvalidArgument(fmt::format("step: {} state fields for an optimizer that needs {}", layout.states, states));
  if (scalars.stochastic_rounding && !half)
    throw DTypeError(fmt::format("step: stochastic rounding of rows of dtype {}", dtype_name(layout.dtype)));
  for (std::uint32_t state = 0; state < states; ++state) {
    const bool counter = scalars.per_row && state == states - (scalars.kind == StepScalars::Kind::kNAdam ? 2U : 1U);
    const std::uint64_t item = counter ? sizeof(std::int32_t) : state_item;
    const std::uint64_t elements = state < element_states(scalars.kind) ? layout.dim : 1;
    const std::uint64_t offset = layout.state_offset[state];
    if (offset < end || offset % item != 0)
      throw InvalidArgument(
          fmt::format("step: state field {} at byte {}, behind {} bytes, its items {} long", state, offset, end, item));
    end = checked_add(offset, checked_mul(elements, item, "bytes of a state"), "bytes of a record");
  }
  if (mine.offset != 0 || mine.bytes < end || mine.bytes % (states != 0 ? state_item : item_size(layout.dtype)) != 0)
    throw InvalidArgument(
        fmt::format("step: the batch has bytes [{}, +{}) of each record, the step needs [0, +{})", mine.offset, mine.bytes, end));
  check_memory(grads, "gradients of step");
  DeviceBuffer copy;
  const std::uint64_t grad_row = checked_mul(layout.dim, item_size(grad_dtype), "bytes of a gradient");
  grads = aligned_input(mine, grads, checked_mul(mine.count, grad_row, "gradients of a batch"), item_size(grad_dtype), copy);
  step_grouped({mine.working.data(), mine.bytes, mine.groups.positions, mine.groups.starts, mine.distinct, mine.count,
                mine.groups.keys, mine.wide_keys},
               layout, scalars, grads, grad_dtype, pool_, mine.stream);
}

void Engine::wait(CudaStream stream) {
  const ScopedDevice current(device_);
  refuse_capture(native(stream), "wait");
  EMBERMAP_CUDA(cudaStreamSynchronize(native(stream)));
}

}  // namespace embermap::gpu

namespace embermap {

std::unique_ptr<CudaEngine> CudaEngine::create(int device) {
  const int devices = cuda_devices();
  if (devices == 0) throw CudaError(fmt::format("CUDA device {} cannot be used: {}", device, cuda_absence()));
  if (device < 0 || device >= devices)
    throw CudaError(fmt::format("CUDA device {} does not exist: {} {} visible", device, devices, devices == 1 ? "is" : "are"));
  gpu::remember_process();
  const gpu::ScopedDevice current(device);
  const gpu::RelaxedCapture relaxed;  // the first call may be one that will be refused
  int has_pools = 0;
  EMBERMAP_CUDA(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device));
  if (has_pools == 0)
    throw CudaError(fmt::format("CUDA device {} cannot be used: it has no stream-ordered memory pools", device));
  gpu::check_kernels_run(device);
  return std::make_unique<gpu::Engine>(device);
}

}  // namespace embermap
