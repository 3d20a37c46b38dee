#include "io/uring.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kFixedPiece = 1ULL << 30;    // the kernel's limit for one buffer
constexpr std::uint64_t kBounceMemory = 1ULL << 20;  // of one ring
// The thread sleeps until this share of the requests in flight has ended: the others keep the disk busy meanwhile, and waking for
// each one would cost a call to the kernel and a change of threads for each page.
constexpr std::size_t kWaitShare = 8;

[[noreturn]] void throw_refused(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

}  // namespace

Uring::Uring(const File& file, int direct_fd, unsigned depth) : file_{file}, fds_{file.fd(), direct_fd}, depth_{depth} {
  io_uring_params parameters{};
  // Completions wait until this thread asks for them: no interrupts of its other work.
  parameters.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  int result = file.ops().uring_setup(depth, &ring_, &parameters);
  if (result != 0 && errno == EINVAL) {  // Linux before 5.19
    parameters = {};
    result = file.ops().uring_setup(depth, &ring_, &parameters);
  }
  if (result != 0) throw_refused("io_uring_setup");
  // Spares the kernel a look-up for each request; without it the descriptors themselves do.
  fixed_files_ = io_uring_register_files(&ring_, fds_, direct_fd < 0 ? 1 : 2) == 0;
  memory_ = ring_.sq.ring_sz + ring_.sq.ring_entries * sizeof(io_uring_sqe);
}

Uring::~Uring() {
  // A ring that goes with files still registered keeps them open, in some kernels for good: what was deleted would keep its disk
  // space, and a file system could not be unmounted. In a forked child they are the parent's.
  if (fixed_files_ && ::getpid() == process_) io_uring_unregister_files(&ring_);
  io_uring_queue_exit(&ring_);
}

bool Uring::register_frames(const FixedFrames& frames) {
  if (!frames_.slab.empty()) io_uring_unregister_buffers(&ring_);
  frames_ = {frames.generation, {}};
  if (frames.slab.empty()) return true;
  std::vector<iovec> pieces;
  for (std::uint64_t at = 0; at < frames.slab.size(); at += kFixedPiece)
    pieces.push_back({frames.slab.data() + at, std::min(kFixedPiece, frames.slab.size() - at)});
  if (file_.ops().uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size())) != 0) return false;
  frames_.slab = frames.slab;
  return true;
}

int Uring::fixed_index(const std::byte* memory, std::uint64_t bytes) const noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const auto slab = reinterpret_cast<std::uintptr_t>(frames_.slab.data());
  if (begin < slab || begin - slab >= frames_.slab.size()) return -1;
  const std::uint64_t at = begin - slab;
  if (bytes > frames_.slab.size() - at || at / kFixedPiece != (at + bytes - 1) / kFixedPiece) return -1;
  return static_cast<int>(at / kFixedPiece);
}

void Uring::prepare(const UringJob& job, std::size_t index, std::uint32_t slot) {
  const IoRequest& request = job.plan.requests[index];
  io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
  const int which = request.direct ? 1 : 0;
  const bool other = index >= job.others_from;
  const bool fixed_file = fixed_files_ && !other;
  const int fd = other ? job.other_fds[static_cast<std::size_t>(which)] : fixed_file ? which : fds_[which];
  const auto bytes = static_cast<unsigned>(request.bytes);
  if (request.bounced) {
    io_uring_prep_read(sqe, fd, bounce_.data() + slot * slot_bytes_, bytes, request.offset);
  } else if (request.vectors == 1) {
    void* const memory = job.plan.vectors[request.first_vector].iov_base;
    const int fixed = fixed_index(static_cast<const std::byte*>(memory), request.bytes);
    if (job.write && fixed >= 0)
      io_uring_prep_write_fixed(sqe, fd, memory, bytes, request.offset, fixed);
    else if (job.write)
      io_uring_prep_write(sqe, fd, memory, bytes, request.offset);
    else if (fixed >= 0)
      io_uring_prep_read_fixed(sqe, fd, memory, bytes, request.offset, fixed);
    else
      io_uring_prep_read(sqe, fd, memory, bytes, request.offset);
  } else {
    const iovec* const vectors = &job.plan.vectors[request.first_vector];
    const auto count = static_cast<unsigned>(request.vectors);
    if (job.write)
      io_uring_prep_writev(sqe, fd, vectors, count, request.offset);
    else
      io_uring_prep_readv(sqe, fd, vectors, count, request.offset);
  }
  if (fixed_file) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data64(sqe, (std::uint64_t{slot} << 32) | index);
}

// One run of a batch.
struct Uring::Loop {
  Uring& uring;
  const UringJob& job;
  std::vector<std::uint32_t> free_slots{};
  std::vector<std::uint64_t> again{};  // interrupted: to be submitted once more
  std::size_t next = 0, flying = 0;
  std::exception_ptr failure{};

  bool more() const { return !failure && (next < job.plan.requests.size() || !again.empty()); }

  void fill() {
    while (more() && flying < uring.depth_ && io_uring_sq_space_left(&uring.ring_) > 0) {
      if (!again.empty()) {
        const std::uint64_t data = again.back();
        again.pop_back();
        uring.prepare(job, data & 0xFFFFFFFFU, static_cast<std::uint32_t>(data >> 32));
      } else {
        std::uint32_t slot = 0;
        if (job.plan.requests[next].bounced) {
          if (free_slots.empty()) return;
          slot = free_slots.back();
          free_slots.pop_back();
        }
        uring.prepare(job, next++, slot);
      }
      ++flying;
    }
  }

  // How many have ended.
  unsigned reap() {
    std::array<io_uring_cqe*, 64> cqes;
    struct Ended {
      std::uint64_t data;
      int result;
    };
    std::array<Ended, 64> ended;
    const unsigned count = io_uring_peek_batch_cqe(&uring.ring_, cqes.data(), cqes.size());
    for (unsigned i = 0; i < count; ++i) ended[i] = {cqes[i]->user_data, cqes[i]->res};
    io_uring_cq_advance(&uring.ring_, count);
    flying -= count;
    for (unsigned i = 0; i < count; ++i) finish(ended[i].data, ended[i].result);
    return count;
  }

  void finish(std::uint64_t data, int result) {
    const IoRequest& request = job.plan.requests[data & 0xFFFFFFFFU];
    const auto slot = static_cast<std::uint32_t>(data >> 32);
    result = uring.file_.ops().uring_complete(result, job.write, static_cast<off_t>(request.offset),
                                              static_cast<std::size_t>(request.bytes));
    if (result == -EINTR) return again.push_back(data);
    if (!failure) {
      try {
        job.complete(request, result, request.bounced ? uring.bounce_.data() + slot * uring.slot_bytes_ : nullptr);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    if (request.bounced) free_slots.push_back(slot);
  }

  void submit(bool wait) {
    const auto ended = static_cast<unsigned>(std::max<std::size_t>(flying / kWaitShare, 1));
    const int result = wait ? io_uring_submit_and_wait(&uring.ring_, ended) : io_uring_submit(&uring.ring_);
    if (result >= 0 || result == -EINTR) return;
    if (result == -EAGAIN || result == -EBUSY) {  // the kernel is short of memory, or wants completions to be taken first
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      return;
    }
    // What the kernel has not taken it will not touch; what it has taken is waited for.
    if (!failure) failure = std::make_exception_ptr(IoError(-result, "io_uring_enter", uring.file_.path()));
    uring.broken_ = true;
    flying -= io_uring_sq_ready(&uring.ring_);
    while (flying > 0)
      if (reap() == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }

  void run() {
    bool work = static_cast<bool>(job.meanwhile);
    for (;;) {
      fill();
      if (flying == 0) {
        if (!more()) break;
        continue;  // only interrupted ones are left
      }
      submit(/*wait=*/!work);
      unsigned ended = 0;
      while (flying > 0) {
        const unsigned count = reap();
        ended += count;
        if (count < 64) break;
      }
      if (ended > 0 || !work || failure) {
        work = work && !failure;
        continue;
      }
      try {
        work = job.meanwhile();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    while (work && !failure) work = job.meanwhile();
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }
};

void Uring::run(const UringJob& job) {
  Loop loop{*this, job};
  if (job.plan.bounce_bytes > 0) {
    slot_bytes_ = round_up(job.plan.bounce_bytes, AlignedBuffer::kAlignment);
    const std::uint64_t slots = std::min<std::uint64_t>(depth_, std::max<std::uint64_t>(kBounceMemory / slot_bytes_, 1));
    if (bounce_.size() < slots * slot_bytes_) {
      memory_ -= bounce_.size();
      bounce_ = AlignedBuffer();  // first: never both at once
      bounce_ = AlignedBuffer(slots * slot_bytes_);
      memory_ += bounce_.size();
    }
    for (std::uint64_t slot = slots; slot > 0; --slot) loop.free_slots.push_back(static_cast<std::uint32_t>(slot - 1));
  }
  loop.again.reserve(depth_);
  loop.run();
}

// A ring for the length of one call.
class UringPool::Lease {
 public:
  explicit Lease(UringPool& pool) : pool_{pool}, ring_{pool.take()} {}
  ~Lease() { pool_.put_back(std::move(ring_)); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Uring& operator*() const noexcept { return *ring_; }

 private:
  UringPool& pool_;
  std::unique_ptr<Uring> ring_;
};

UringPool::UringPool(const File& file, int direct_fd, unsigned depth) : file_{file}, direct_fd_{direct_fd}, depth_{depth} {
  idle_.reserve(kMostRings);
  leased_.reserve(kMostRings);
  idle_.push_back(std::make_unique<Uring>(file, direct_fd, depth));
}

UringPool::~UringPool() = default;

std::unique_ptr<Uring> UringPool::take() {
  std::unique_lock lock(mutex_);
  std::unique_ptr<Uring> ring;
  while (!ring) {
    if (!idle_.empty()) {
      ring = std::move(idle_.back());
      idle_.pop_back();
      break;
    }
    if (leased_.size() < kMostRings) {
      try {
        ring = std::make_unique<Uring>(file_, direct_fd_, depth_);
        break;
      } catch (const std::system_error&) {
        if (leased_.empty()) throw;  // else those that there are serve
      }
    }
    returned_.wait(lock);
  }
  tell(*ring);
  leased_.push_back(ring.get());
  return ring;
}

void UringPool::put_back(std::unique_ptr<Uring> ring) noexcept {
  {
    const std::lock_guard lock(mutex_);
    std::erase(leased_, ring.get());
    if (!ring->broken()) idle_.push_back(std::move(ring));
  }
  returned_.notify_all();
}

void UringPool::tell(Uring& ring) {
  if (ring.frames().generation == frames_.generation) return;
  // After one refusal no ring asks again for the same frames.
  const FixedFrames wanted{frames_.generation, refused_.empty() ? frames_.slab : std::span<std::byte>()};
  if (!ring.register_frames(wanted))
    refused_ = fmt::format("io_uring_register_buffers: {}", std::generic_category().message(errno));
}

void UringPool::run(const UringJob& job) {
  const Lease ring(*this);
  (*ring).run(job);
}

void UringPool::set_frames(std::span<std::byte> slab) {
  const std::lock_guard lock(mutex_);
  frames_ = {frames_.generation + 1, slab};
  refused_.clear();
  // Told at once: the first batch need not wait for it, and a refusal is known.
  for (const auto& ring : idle_) tell(*ring);
}

void UringPool::forget_frames() noexcept {
  std::unique_lock lock(mutex_);
  frames_ = {frames_.generation + 1, {}};
  refused_.clear();
  // Rings that are taken from now on do not know them any more.
  returned_.wait(lock, [&] {
    return std::none_of(leased_.begin(), leased_.end(),
                        [&](const Uring* ring) { return ring->frames().generation != frames_.generation; });
  });
  for (const auto& ring : idle_) tell(*ring);
}

bool UringPool::fixed() const {
  const std::lock_guard lock(mutex_);
  return !frames_.slab.empty() && refused_.empty();
}

std::string UringPool::why_not_fixed() const {
  const std::lock_guard lock(mutex_);
  return refused_;
}

std::uint64_t UringPool::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t bytes = 0;
  for (const auto& ring : idle_) bytes += ring->memory_bytes();
  for (const Uring* ring : leased_) bytes += ring->memory_bytes();
  return bytes;
}

}  // namespace embermap
