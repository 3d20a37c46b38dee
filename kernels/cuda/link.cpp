#include "kernels/cuda/link.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <limits>
#include <thread>
#include <utility>

#include "base/checked.hpp"
#include "kernels/cuda/runtime.hpp"
#include "kernels/rows.hpp"

namespace embermap::gpu {
namespace {

constexpr std::uint64_t kMostPieceRows = 1024;
constexpr std::uint64_t kLeastChunk = 256 << 10;
constexpr std::uint64_t kChunksOfCall = 12;

// Waits for something that another running thread is about to do.
template <class Done>
void look_until(const Done& done) {
  for (unsigned looks = 0; !done(); ++looks)
    if (looks >= 256) std::this_thread::yield();
}

void wait_for(cudaEvent_t event) {
  for (;;) {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) check(state, "cudaEventQuery");
    (void)cudaGetLastError();
  }
}

// How the rows of one call are cut: pieces and chunks are counted from the last row downwards, and lie in ascending order inside
// their chunk.
struct Cut {
  std::uint64_t rows, row_bytes, piece_rows, pieces_per_chunk;

  Cut(const LinkShape& shape, std::uint64_t all, std::uint64_t bytes)
      : rows{all}, row_bytes{bytes}, piece_rows{std::clamp<std::uint64_t>(shape.piece_bytes / bytes, 1, kMostPieceRows)} {
    // Few rows go in small chunks, so that the link has something to carry soon.
    const std::uint64_t chunk =
        std::clamp<std::uint64_t>(all * bytes / kChunksOfCall, std::min(kLeastChunk, shape.chunk_bytes), shape.chunk_bytes);
    pieces_per_chunk = std::max<std::uint64_t>(1, chunk / (piece_rows * bytes));
  }

  std::uint64_t chunk_rows() const { return piece_rows * pieces_per_chunk; }
  std::uint64_t pieces() const { return ceil_div(rows, piece_rows); }
  std::uint64_t piece_end(std::uint64_t piece) const { return rows - piece * piece_rows; }
  std::uint64_t piece_begin(std::uint64_t piece) const {
    const std::uint64_t end = piece_end(piece);
    return end > piece_rows ? end - piece_rows : 0;
  }
  std::uint64_t chunk_end(std::uint64_t chunk) const { return rows - chunk * chunk_rows(); }
  std::uint64_t chunk_begin(std::uint64_t chunk) const {
    const std::uint64_t end = chunk_end(chunk);
    return end > chunk_rows() ? end - chunk_rows() : 0;
  }
  std::uint64_t pieces_of(std::uint64_t chunk) const { return ceil_div(chunk_end(chunk) - chunk_begin(chunk), piece_rows); }
};

// What the threads of one call share. Chunks are taken in order, one after the other: a chunk that was taken is the host's, the
// kernel sees that by its mark.
class Transfer {
 public:
  Transfer(LinkLane& lane, std::uint64_t rows, std::uint64_t row_bytes, bool alone, std::uint64_t least = 0)
      : cut{lane.shape(), rows, row_bytes}, lane_{lane}, alone_{alone}, slots_(lane.shape().chunks), least_{least}, low_{rows} {
    show(rows);
  }

  // Takes chunks up to the one with this number, as long as their places are free and the kernel has not their rows, and calls
  // begin(chunk) for each.
  template <class Begin>
  void take(std::uint64_t chunk, const Begin& begin) {
    const std::lock_guard lock(mutex_);
    while (!met_.load(std::memory_order_relaxed) && taken_.load(std::memory_order_relaxed) <= chunk) {
      const std::uint64_t next = taken_.load(std::memory_order_relaxed);
      if (slot(next).closed.load(std::memory_order_acquire) != next / slots_.size()) return;
      if (low_ == 0 || cut.chunk_begin(next) < least_ ||
          (!alone_ && low_ <= std::atomic_ref(lane_.meeting()->kernel_high).load(std::memory_order_relaxed))) {
        met_.store(true, std::memory_order_release);
        return;
      }
      low_ = cut.chunk_begin(next);
      show(low_);
      begin(next);
      slot(next).pieces.store(0, std::memory_order_relaxed);
      taken_.store(next + 1, std::memory_order_release);
    }
  }
  bool taken(std::uint64_t chunk) const { return taken_.load(std::memory_order_acquire) > chunk; }
  bool met() const { return met_.load(std::memory_order_acquire); }
  std::uint64_t next_piece() { return next_piece_.fetch_add(1, std::memory_order_relaxed); }
  // A piece of the chunk is done; true for the last one.
  bool done(std::uint64_t chunk) {
    return slot(chunk).pieces.fetch_add(1, std::memory_order_acq_rel) + 1 == cut.pieces_of(chunk);
  }
  void close(std::uint64_t chunk) { slot(chunk).closed.fetch_add(1, std::memory_order_release); }
  void open(std::uint64_t chunk) { slot(chunk).opened.store(chunk + 1, std::memory_order_release); }
  bool opened(std::uint64_t chunk) const {
    return slots_[chunk % slots_.size()].opened.load(std::memory_order_acquire) == chunk + 1;
  }
  // Where a row of a chunk has its place.
  std::byte* place(std::uint64_t chunk, std::uint64_t row) const {
    return lane_.chunk(chunk % slots_.size()) + (row - cut.chunk_begin(chunk)) * cut.row_bytes;
  }
  cudaEvent_t event(std::uint64_t chunk) const { return lane_.event(chunk % slots_.size()); }
  std::uint64_t ring() const { return slots_.size(); }
  std::uint64_t low() const { return low_; }  // when all threads have ended

  const Cut cut;

 private:
  struct Slot {
    std::atomic<std::uint64_t> opened{0};  // the chunk whose pieces may be worked on, plus 1
    std::atomic<std::uint64_t> closed{0};  // how many chunks in it were done with
    std::atomic<std::uint64_t> pieces{0};  // of the present chunk that are done
  };
  Slot& slot(std::uint64_t chunk) { return slots_[chunk % slots_.size()]; }
  void show(std::uint64_t low) {
    if (!alone_) std::atomic_ref(lane_.meeting()->host_low).store(static_cast<std::int64_t>(low), std::memory_order_release);
  }

  LinkLane& lane_;
  const bool alone_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  const std::uint64_t least_;            // no row below this one is the host's
  std::uint64_t low_;                    // rows from here on are the host's
  std::atomic<std::uint64_t> taken_{0};  // chunks
  std::atomic<bool> met_{false};
  std::atomic<std::uint64_t> next_piece_{0};
};

// The first error of any thread; the others stop at the next occasion.
class Failure {
 public:
  bool any() const { return any_.load(std::memory_order_relaxed); }
  void keep() {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
    any_.store(true);
  }
  void raise() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  std::atomic<bool> any_{false};
};

// Calls take() until the chunk is taken, by whichever thread. False: it will not be.
template <class Take>
bool wait_for_chunk(const Transfer& transfer, std::uint64_t chunk, const Failure& failure, const Take& take) {
  while (!transfer.taken(chunk)) {
    take();
    // In this order: another thread may take the chunk, and the next one meet the kernel, between two looks of this thread, which
    // would then leave rows of a chunk that is the host's.
    const bool met = transfer.met();
    if (transfer.taken(chunk)) break;
    if (met || failure.any()) return false;
    std::this_thread::yield();
  }
  return true;
}

template <class Body>
void on_threads(ThreadPool& pool, std::uint64_t threads, int device, Failure& failure, const std::function<void()>& meanwhile,
                const Body& body) {
  pool.parallel_for(std::min<std::uint64_t>(pool.threads(), threads), 1, [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) {
      try {
        const ScopedDevice current(device);
        if (i == 0 && meanwhile) meanwhile();
        body();
      } catch (...) {
        failure.keep();
      }
    }
  });
  failure.raise();
}

int current_device() {
  int device = 0;
  EMBERMAP_CUDA(cudaGetDevice(&device));
  return device;
}

}  // namespace

LinkLane::LinkLane(const LinkShape& shape) : shape_{shape} {
  try {
    EMBERMAP_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    EMBERMAP_CUDA(cudaEventCreateWithFlags(&order_, cudaEventDisableTiming));
    EMBERMAP_CUDA(cudaEventCreateWithFlags(&kernel_, cudaEventDisableTiming));
    void* memory = nullptr;
    EMBERMAP_CUDA(cudaHostAlloc(&memory, shape.chunk_bytes * shape.chunks, cudaHostAllocPortable));
    chunks_ = static_cast<std::byte*>(memory);
    EMBERMAP_CUDA(cudaHostAlloc(&memory, sizeof(MeetingPoint), cudaHostAllocPortable | cudaHostAllocMapped));
    meeting_ = new (memory) MeetingPoint{};
    EMBERMAP_CUDA(cudaMalloc(&memory, sizeof *claims_));
    claims_ = static_cast<MoveClaims*>(memory);
    EMBERMAP_CUDA(cudaMemsetAsync(claims_, 0, sizeof *claims_, stream_));
    EMBERMAP_CUDA(cudaStreamSynchronize(stream_));
    for (unsigned i = 0; i < shape.chunks; ++i) {
      cudaEvent_t event = nullptr;
      EMBERMAP_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      events_.push_back(event);
    }
  } catch (...) {
    release();
    throw;
  }
}

LinkLane::~LinkLane() { release(); }

void LinkLane::release() noexcept {
  if (in_forked_child()) return;
  if (stream_ != nullptr) check_teardown(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  if (kernel_ != nullptr) check_teardown(cudaEventSynchronize(kernel_), "cudaEventSynchronize");
  for (const cudaEvent_t event : events_) check_teardown(cudaEventDestroy(event), "cudaEventDestroy");
  if (claims_ != nullptr) check_teardown(cudaFree(claims_), "cudaFree");
  if (meeting_ != nullptr) check_teardown(cudaFreeHost(meeting_), "cudaFreeHost");
  if (chunks_ != nullptr) check_teardown(cudaFreeHost(chunks_), "cudaFreeHost");
  for (const cudaEvent_t event : {order_, kernel_})
    if (event != nullptr) check_teardown(cudaEventDestroy(event), "cudaEventDestroy");
  if (stream_ != nullptr) check_teardown(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

void LinkLane::follow(cudaStream_t stream) {
  EMBERMAP_CUDA(cudaEventRecord(order_, stream));
  EMBERMAP_CUDA(cudaStreamWaitEvent(stream_, order_, 0));
}

void LinkLane::lead(cudaStream_t stream) {
  EMBERMAP_CUDA(cudaEventRecord(order_, stream_));
  EMBERMAP_CUDA(cudaStreamWaitEvent(stream, order_, 0));
}

void LinkLane::has_kernel_on(cudaStream_t stream) { EMBERMAP_CUDA(cudaEventRecord(kernel_, stream)); }

void LinkLane::wait() {
  EMBERMAP_CUDA(cudaStreamSynchronize(stream_));
  EMBERMAP_CUDA(cudaEventSynchronize(kernel_));
}

void LinkLane::reset() noexcept { *meeting_ = {.host_low = std::numeric_limits<std::int64_t>::max(), .kernel_high = 0}; }

LinkLanes::~LinkLanes() {
  if (lanes_.empty()) return;
  if (in_forked_child()) {
    for (std::unique_ptr<LinkLane>& lane : lanes_) (void)lane.release();
    return;
  }
  const ScopedDevice current(device_, std::nothrow);
  lanes_.clear();
}

LinkLanes::Lease LinkLanes::acquire() {
  const std::lock_guard lock(mutex_);
  if (!idle_.empty()) {
    // The one that was given back first: its last rows have most likely arrived.
    LinkLane* const lane = idle_.front();
    idle_.erase(idle_.begin());
    return {this, lane};
  }
  if (lanes_.size() >= most_ || refused_) return {};
  idle_.reserve(lanes_.size() + 1);
  try {
    lanes_.push_back(std::make_unique<LinkLane>(shape_));
  } catch (const CudaError&) {
    refused_ = true;  // the kernel does without
    return {};
  }
  return {this, lanes_.back().get()};
}

void LinkLanes::give_back(LinkLane* lane) noexcept {
  if (in_forked_child()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(lane);  // reserved
}

HostPlaces::HostPlaces(const FrameSource& source, const void* keys, bool wide_keys, std::uint64_t offset)
    : HostPlaces(source, keys, wide_keys, offset, {}, {}) {}

HostPlaces::HostPlaces(const FrameSource& source, const void* keys, bool wide_keys, std::uint64_t offset,
                       std::span<const std::uint64_t> starts, std::span<const std::uint32_t> frames)
    : slab_{source.slab + offset},
      page_bytes_{source.page_bytes},
      stride_{source.stride},
      rows_per_page_{source.rows_per_page},
      page_of_{source.rows_per_page},
      keys_{keys},
      wide_keys_{wide_keys},
      starts_{starts},
      frames_{frames} {}

void HostPlaces::addresses(std::uint64_t begin, std::uint64_t end, std::byte** out) const {
  if (starts_.empty()) {
    for (std::uint64_t row = begin; row < end; ++row) {
      const std::uint64_t id = key(row);
      const std::uint64_t page = page_of_.quotient(id);
      *out++ = slab_ + page * page_bytes_ + (id - page * rows_per_page_) * stride_;
    }
    return;
  }
  const std::uint64_t shift = starts_.front();
  auto page = static_cast<std::uint64_t>(std::upper_bound(starts_.begin(), starts_.end(), begin + shift) - starts_.begin()) - 1;
  for (std::uint64_t row = begin; row < end; ++row) {
    while (row + shift >= starts_[page + 1]) ++page;
    const std::uint64_t id = key(row);
    const std::uint64_t slot = id - page_of_.quotient(id) * rows_per_page_;
    *out++ = slab_ + frames_[page] * page_bytes_ + slot * stride_;
  }
}

std::uint64_t fetch_by_threads(LinkLane& lane, const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes,
                               std::byte* working, bool alone, ThreadPool& pool, unsigned threads,
                               const std::function<void()>& meanwhile, const std::function<void()>& before) {
  Transfer transfer(lane, rows, row_bytes, alone);
  const Cut& cut = transfer.cut;
  Failure failure;
  on_threads(pool, std::min<std::uint64_t>(threads, cut.pieces()), current_device(), failure, meanwhile, [&] {
    if (before) before();
    std::array<std::byte*, kMostPieceRows> addresses;
    while (!failure.any()) {
      const std::uint64_t piece = transfer.next_piece();
      const std::uint64_t chunk = piece / cut.pieces_per_chunk;
      if (!wait_for_chunk(transfer, chunk, failure, [&] { transfer.take(chunk, [](std::uint64_t) {}); })) return;
      if (piece >= cut.pieces()) return;
      if (piece % cut.pieces_per_chunk == 0) {
        wait_for(transfer.event(chunk));  // what was there before, of this transfer or another one, has been carried away
        transfer.open(chunk);
      } else {
        look_until([&] { return transfer.opened(chunk) || failure.any(); });
        if (failure.any()) return;
      }
      const std::uint64_t begin = cut.piece_begin(piece);
      const std::uint64_t end = cut.piece_end(piece);
      places.addresses(begin, end, addresses.data());
      gather_piece({addresses.data(), end - begin}, row_bytes, transfer.place(chunk, begin));
      if (!transfer.done(chunk)) continue;
      const std::uint64_t first = cut.chunk_begin(chunk);
      EMBERMAP_CUDA(cudaMemcpyAsync(working + first * row_bytes, transfer.place(chunk, first),
                                    (cut.chunk_end(chunk) - first) * row_bytes, cudaMemcpyHostToDevice, lane.stream()));
      EMBERMAP_CUDA(cudaEventRecord(transfer.event(chunk), lane.stream()));
      transfer.close(chunk);
    }
  });
  return transfer.low();
}

std::uint64_t store_by_threads(LinkLane& lane, const HostPlaces& places, std::uint64_t rows, std::uint64_t row_bytes,
                               const std::byte* working, std::uint64_t least, bool alone, ThreadPool& pool, unsigned threads,
                               const std::function<void()>& meanwhile) {
  Transfer transfer(lane, rows, row_bytes, alone, least);
  const Cut& cut = transfer.cut;
  const std::uint64_t ahead = std::min<std::uint64_t>(lane.shape().ahead, transfer.ring() - 1);
  Failure failure;
  const auto bring = [&](std::uint64_t chunk) {
    const std::uint64_t first = cut.chunk_begin(chunk);
    EMBERMAP_CUDA(cudaMemcpyAsync(transfer.place(chunk, first), working + first * row_bytes,
                                  (cut.chunk_end(chunk) - first) * row_bytes, cudaMemcpyDeviceToHost, lane.stream()));
    EMBERMAP_CUDA(cudaEventRecord(transfer.event(chunk), lane.stream()));
  };
  on_threads(pool, std::min<std::uint64_t>(threads, cut.pieces()), current_device(), failure, meanwhile, [&] {
    std::array<std::byte*, kMostPieceRows> addresses;
    while (!failure.any()) {
      const std::uint64_t piece = transfer.next_piece();
      const std::uint64_t chunk = piece / cut.pieces_per_chunk;
      if (piece % cut.pieces_per_chunk == 0) transfer.take(chunk + ahead, bring);
      if (!wait_for_chunk(transfer, chunk, failure, [&] { transfer.take(chunk + ahead, bring); })) return;
      if (piece >= cut.pieces()) return;
      if (piece % cut.pieces_per_chunk == 0) {
        wait_for(transfer.event(chunk));
        transfer.open(chunk);
      } else {
        look_until([&] { return transfer.opened(chunk) || failure.any(); });
        if (failure.any()) return;
      }
      const std::uint64_t begin = cut.piece_begin(piece);
      const std::uint64_t end = cut.piece_end(piece);
      places.addresses(begin, end, addresses.data());
      scatter_piece({addresses.data(), end - begin}, row_bytes, transfer.place(chunk, begin));
      if (transfer.done(chunk)) transfer.close(chunk);
    }
  });
  return transfer.low();
}

}  // namespace embermap::gpu
