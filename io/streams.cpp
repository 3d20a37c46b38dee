#include "io/streams.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "base/thread_pool.hpp"
#include "io/direct_file.hpp"
#include "io/io_plan.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kLargestBlock = 4_MiB;
constexpr std::uint64_t kSmallestBlock = 256_KiB;
constexpr std::uint64_t kFewestBlocks = 4, kMostBlocks = 8;  // of a ring
constexpr std::uint64_t kWorthAThread = 16_MiB;              // less is read and written by the caller
constexpr std::uint64_t kPendingBytes = 1_MiB;               // small writes are gathered to this
constexpr std::uint64_t kHoleBytes = 64_KiB;                 // zeros are left out in pieces of so many bytes

std::uint64_t block_bytes(std::uint64_t memory) {
  return std::min(kLargestBlock, round_down(memory / kFewestBlocks, AlignedBuffer::kAlignment));
}
std::uint64_t block_count(std::uint64_t memory) { return std::clamp(memory / kLargestBlock, kFewestBlocks, kMostBlocks); }

bool is_zero(std::span<const std::byte> bytes) {
  constexpr std::size_t kFirst = 64;
  const std::size_t first = std::min(bytes.size(), kFirst);
  if (!std::all_of(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(first),
                   [](std::byte b) { return b == std::byte{0}; }))
    return false;
  // Equal to itself one place on: all are what the first is.
  return bytes.size() <= kFirst || std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0;
}

// What is answered to direct I/O that a file system does not do for this file, whatever it said before.
bool refuses_direct(int error) { return error == EINVAL || error == EOPNOTSUPP; }

std::string how_of(const DirectFile& file) {
  return file.alignment().offset > 0 ? std::string("direct") : fmt::format("buffered ({})", file.why());
}

// Calls body(begin, end) for both halves of [0, bytes), which begin at whole units, at the same time: a disk has something to do
// while the thread that waited for one of them is on its way.
template <class Body>
void in_halves(ThreadPool& pool, std::uint64_t bytes, Body body) {
  const std::uint64_t half = round_up(bytes / 2, AlignedBuffer::kAlignment);
  if (bytes < kSmallestBlock) return body(std::uint64_t{0}, bytes);
  pool.parallel_for(2, 1, [&](std::uint64_t first, std::uint64_t end) {
    for (std::uint64_t i = first; i < end; ++i) body(i == 0 ? 0 : half, i == 0 ? half : bytes);
  });
}

// One thread fills or empties blocks of a ring, another the other way. Blocks are numbered from 0 on; block i lies in slot
// i % slots.
class Ring {
 public:
  Ring(std::uint64_t slots, std::uint64_t block) : slots_{slots}, block_{block}, memory_{slots * block} {}
  ~Ring() { stop(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // False where the system starts no thread.
  template <class Work>
  bool start(Work work) {
    try {
      thread_ = std::thread([this, work] {
        try {
          work();
        } catch (...) {
          const std::lock_guard lock(mutex_);
          error_ = std::current_exception();
        }
        changed_.notify_all();
      });
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }
  // Waits for the block that is under way.
  void stop() noexcept {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  std::byte* slot(std::uint64_t index) const { return memory_.data() + index % slots_ * block_; }
  std::uint64_t block() const noexcept { return block_; }
  std::uint64_t bytes() const noexcept { return memory_.size(); }

  // The producer's: waits for room for block `index`. False: there will be none.
  bool wait_for_room(std::uint64_t index) {
    return wait([&] { return index < emptied_ + slots_; });
  }
  void filled(std::uint64_t count) { set(filled_, count); }
  // The consumer's.
  bool wait_for_block(std::uint64_t index) {
    return wait([&] { return index < filled_; });
  }
  void emptied(std::uint64_t count) { set(emptied_, count); }
  bool wait_until_empty() {
    return wait([&] { return emptied_ == filled_; });
  }

  // Throws what the ring's own thread threw, if it did.
  void rethrow() {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  template <class Ready>
  bool wait(Ready ready) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ready() || stop_ || error_; });
    return ready();
  }
  void set(std::uint64_t& counter, std::uint64_t count) {
    {
      const std::lock_guard lock(mutex_);
      counter = count;
    }
    changed_.notify_all();
  }

  const std::uint64_t slots_, block_;
  AlignedBuffer memory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t filled_ = 0, emptied_ = 0;  // blocks so far
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace

// ---- reading ----

class StreamedFile::Ahead {
 public:
  Ahead(const File& file, std::uint64_t begin, std::uint64_t end, std::uint64_t block, std::uint64_t blocks, bool sparse)
      : file_{file},
        direct_{file, /*direct=*/true},
        begin_{round_down(begin, AlignedBuffer::kAlignment)},
        end_{end},
        sparse_{sparse},
        uses_direct_{direct_.alignment().offset > 0 && AlignedBuffer::kAlignment % direct_.alignment().offset == 0 &&
                     AlignedBuffer::kAlignment % direct_.alignment().memory == 0},
        ring_{std::min(blocks, ceil_div(end - begin_, block)), block} {}

  bool start() {
    return ring_.start([this] {
      for (std::uint64_t index = 0; begin_ + index * ring_.block() < end_; ++index) {
        if (!ring_.wait_for_room(index)) return;
        read_block(index);
        ring_.filled(index + 1);
      }
    });
  }

  std::string how() const { return how_of(direct_); }
  std::uint64_t bytes() const noexcept { return ring_.bytes(); }
  bool ours() const noexcept { return owner_ == ::getpid(); }
  bool holds(std::uint64_t offset, std::uint64_t bytes) const noexcept {
    return offset >= next_ && offset >= begin_ && offset <= end_ && bytes <= end_ - offset;
  }
  bool done() const noexcept { return next_ >= end_; }

  void read(std::uint64_t offset, std::span<std::byte> out) {
    while (!out.empty()) {
      const std::span<const std::byte> piece = view(offset, out.size());
      std::memcpy(out.data(), piece.data(), piece.size());
      offset += piece.size();
      out = out.subspan(piece.size());
      // What was read is given back at once: its room is waited for.
      if ((offset - begin_) % ring_.block() == 0) ring_.emptied(emptied_ = (offset - begin_) / ring_.block());
    }
  }

  // What lies together of [offset, + most), block by block: to wait for a block that has no room yet would not end. The blocks
  // before are given back.
  std::span<const std::byte> view(std::uint64_t offset, std::uint64_t most) {
    const std::uint64_t index = (offset - begin_) / ring_.block(), inside = (offset - begin_) % ring_.block();
    if (index > emptied_) ring_.emptied(emptied_ = index);
    if (!ring_.wait_for_block(index)) ring_.rethrow();
    const std::uint64_t now = std::min(most, ring_.block() - inside);
    next_ = offset + now;
    return {ring_.slot(index) + inside, now};
  }

 private:
  void read_block(std::uint64_t index) {
    const std::uint64_t offset = begin_ + index * ring_.block();
    const auto out = std::span(ring_.slot(index), std::min(ring_.block(), end_ - offset));
    if (sparse_ && is_hole(offset, out.size())) return void(std::memset(out.data(), 0, out.size()));
    struct iovec piece {
      out.data(), out.size()
    };
    if (file_.ops().preadv_cached(file_.fd(), &piece, 1, static_cast<off_t>(offset)) == static_cast<ssize_t>(out.size())) return;
    if (!uses_direct_) return file_.read(offset, out);
    in_halves(pool_, out.size(),
              [&](std::uint64_t begin, std::uint64_t end) { read_direct(offset + begin, out.subspan(begin, end - begin)); });
  }

  // From a whole unit on, and there is room to the end of the last one.
  void read_direct(std::uint64_t offset, std::span<std::byte> out) {
    std::uint64_t done = 0;
    while (uses_direct_ && done < out.size()) {
      const std::uint64_t wanted = round_up(out.size() - done, AlignedBuffer::kAlignment);
      const ssize_t got = file_.ops().pread(direct_.fd(), out.data() + done, wanted, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && refuses_direct(errno))
        uses_direct_ = false;
      else if (got < 0)
        throw IoError(errno, "pread", file_.path(), offset + done, out.size() - done);
      if (got <= 0) break;
      done += static_cast<std::uint64_t>(got);
      if (done % AlignedBuffer::kAlignment != 0) break;  // the end of the file, or a short read
    }
    if (done < out.size()) file_.read(offset + done, out.subspan(done));
  }

  bool is_hole(std::uint64_t offset, std::uint64_t bytes) const {
    const off_t data = ::lseek(file_.fd(), static_cast<off_t>(offset), SEEK_DATA);  // nobody uses this position
    const bool none = data < 0 ? errno == ENXIO : static_cast<std::uint64_t>(data) >= offset + bytes;
    return none && file_.size() >= offset + bytes;
  }

  const File& file_;
  DirectFile direct_;
  std::uint64_t begin_, end_;
  bool sparse_;
  std::atomic<bool> uses_direct_;
  ThreadPool pool_{2};
  std::uint64_t next_ = 0, emptied_ = 0;
  pid_t owner_ = ::getpid();
  Ring ring_;
};

StreamedFile::StreamedFile(File&& file) : own_{std::move(file)}, file_{own_} {}
StreamedFile::StreamedFile(const File& file) : file_{file} {}
StreamedFile::~StreamedFile() { leave(); }

void StreamedFile::leave() noexcept {
  // A forked child has no such thread: nothing can be waited for, and the copy of the ring is left alone.
  if (ahead_ && !ahead_->ours()) static_cast<void>(ahead_.release());  // NOLINT(bugprone-unused-return-value)
  ahead_.reset();
}

std::uint64_t StreamedFile::read_ahead(std::uint64_t begin, std::uint64_t end, std::uint64_t memory) {
  leave();
  const std::uint64_t block = block_bytes(memory);
  if (block < kSmallestBlock || begin >= end || end - begin < kWorthAThread || lives_in_memory(file_)) return 0;
  auto ahead = std::make_unique<Ahead>(file_, begin, end, block, block_count(memory), sparse());
  if (!ahead->start()) return 0;
  ahead_ = std::move(ahead);
  how_ = ahead_->how();
  return ahead_->bytes();
}

void StreamedFile::read(std::uint64_t offset, std::span<std::byte> out) {
  if (ahead_ && (!ahead_->ours() || !ahead_->holds(offset, out.size()))) leave();
  if (!ahead_) return file_.read(offset, out);
  try {
    ahead_->read(offset, out);
  } catch (...) {
    leave();
    throw;
  }
  if (ahead_->done()) leave();
}

std::span<const std::byte> StreamedFile::view(std::uint64_t offset, std::uint64_t most) {
  // The last piece may still be looked at when all was read, so nothing ends here.
  if (ahead_ && ahead_->ours() && ahead_->holds(offset, std::max<std::uint64_t>(1, most))) try {
      return ahead_->view(offset, most);
    } catch (...) {
      leave();
      throw;
    }
  return {};
}

bool StreamedFile::sparse() const {
  const struct stat status = file_.status();
  return static_cast<std::uint64_t>(status.st_blocks) * 512 < static_cast<std::uint64_t>(status.st_size) / 2;
}

// ---- writing ----

class StreamWriter::Behind {
 public:
  Behind(const StreamWriter& owner, std::uint64_t at, std::uint64_t block, std::uint64_t blocks)
      : owner_{owner},
        direct_{owner.file_, /*direct=*/true},
        first_{round_down(at, block)},
        at_{at},
        uses_direct_{direct_.alignment().offset > 0 && AlignedBuffer::kAlignment % direct_.alignment().offset == 0 &&
                     AlignedBuffer::kAlignment % direct_.alignment().memory == 0},
        written_{at},
        ring_{blocks, block} {}

  bool start() {
    return ring_.start([this] {
      for (std::uint64_t index = 0; ring_.wait_for_block(index); ++index) {
        const std::uint64_t end = first_ + (index + 1) * ring_.block();
        write_block(index, end);
        written_ = end;
        ring_.emptied(index + 1);
      }
    });
  }
  std::string how() const { return how_of(direct_); }
  std::uint64_t bytes() const noexcept { return ring_.bytes(); }

  void write(std::span<const std::byte> bytes) {
    if (!bytes.empty()) ring_in_use_ = true;
    while (!bytes.empty()) {
      const std::uint64_t index = (at_ - first_) / ring_.block(), inside = (at_ - first_) % ring_.block();
      if (!ring_.wait_for_room(index)) ring_.rethrow();
      const std::uint64_t now = std::min<std::uint64_t>(bytes.size(), ring_.block() - inside);
      std::memcpy(ring_.slot(index) + inside, bytes.data(), now);
      at_ += now;
      bytes = bytes.subspan(now);
      if (inside + now == ring_.block()) ring_.filled(index + 1);
    }
  }

  // What lies in memory as it will in units of the file is written from there, by the caller's thread; the ends that fill no
  // unit go through the page cache. All else by the ring.
  void write_view(std::span<const std::byte> bytes) {
    constexpr std::uint64_t kUnit = AlignedBuffer::kAlignment;
    const auto place = reinterpret_cast<std::uintptr_t>(bytes.data());
    if (ring_in_use_ || !uses_direct_ || owner_.zero_from_ != UINT64_MAX || (place - at_) % kUnit != 0) return write(bytes);
    const std::uint64_t head = std::min<std::uint64_t>(bytes.size(), (kUnit - at_ % kUnit) % kUnit);
    const std::uint64_t tail = (bytes.size() - head) % kUnit;
    owner_.put(at_, bytes.first(head));
    put_in_halves(at_ + head, bytes.subspan(head, bytes.size() - head - tail));
    owner_.put(at_ + bytes.size() - tail, bytes.last(tail));
    at_ += bytes.size();
    // The ring, if it is wanted yet, begins here. Its thread looks at this when it is given a block.
    written_ = at_;
    first_ = round_down(at_, ring_.block());
  }

  // The block that is not full goes through the page cache, whatever its end: direct I/O takes whole units only.
  void flush() {
    if (!ring_.wait_until_empty()) ring_.rethrow();
    ring_.rethrow();
    if (written_ == at_) return;
    owner_.put(written_, {ring_.slot((written_ - first_) / ring_.block()) + (written_ - first_) % ring_.block(), at_ - written_});
    written_ = at_;
  }

 private:
  void write_block(std::uint64_t index, std::uint64_t end) {
    const auto all = std::span<const std::byte>(ring_.slot(index), ring_.block());
    const auto rest = all.subspan(written_ - (end - ring_.block()));
    if (owner_.zero_from_ == UINT64_MAX && written_ % AlignedBuffer::kAlignment == 0)
      put_in_halves(written_, rest);
    else
      owner_.put(written_, rest);
  }

  void put_in_halves(std::uint64_t at, std::span<const std::byte> bytes) {
    in_halves(pool_, bytes.size(),
              [&](std::uint64_t begin, std::uint64_t end) { put_direct(at + begin, bytes.subspan(begin, end - begin)); });
  }

  // Whole units; where the file system does not take them directly after all, through the page cache.
  void put_direct(std::uint64_t at, std::span<const std::byte> bytes) {
    while (uses_direct_ && !bytes.empty() && at % AlignedBuffer::kAlignment == 0) {
      const ssize_t got = owner_.file_.ops().pwrite(direct_.fd(), bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && refuses_direct(errno)) {
        uses_direct_ = false;
        break;
      }
      if (got <= 0) throw IoError(got < 0 ? errno : EIO, "pwrite", owner_.file_.path(), at, bytes.size());
      at += static_cast<std::uint64_t>(got);
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
    if (!bytes.empty()) owner_.put(at, bytes);
  }

  const StreamWriter& owner_;
  DirectFile direct_;
  // Where the ring's first block would begin; written_ too is its thread's once that is in use, until all blocks are emptied.
  std::uint64_t first_;
  std::uint64_t at_;
  std::atomic<bool> uses_direct_;
  std::uint64_t written_;
  ThreadPool pool_{2};
  bool ring_in_use_ = false;  // the caller's
  Ring ring_;
};

StreamWriter::StreamWriter(const File& file, std::uint64_t at, std::uint64_t zero_from)
    : file_{file}, at_{at}, zero_from_{zero_from} {}
StreamWriter::~StreamWriter() = default;

std::uint64_t StreamWriter::write_behind(std::uint64_t bytes, std::uint64_t memory) {
  const std::uint64_t block = block_bytes(memory);
  if (behind_ || block < kSmallestBlock || bytes < kWorthAThread || lives_in_memory(file_)) return 0;
  flush();
  auto behind = std::make_unique<Behind>(*this, at_, block, block_count(memory));
  if (!behind->start()) return 0;
  behind_ = std::move(behind);
  how_ = behind_->how();
  return behind_->bytes();
}

void StreamWriter::put(std::uint64_t at, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    if (at < zero_from_) {
      file_.write(at, bytes);
      return;
    }
    const std::uint64_t now = std::min<std::uint64_t>(bytes.size(), kHoleBytes - at % kHoleBytes);
    if (!is_zero(bytes.first(now))) file_.write(at, bytes.first(now));
    at += now;
    bytes = bytes.subspan(now);
  }
}

void StreamWriter::write(std::span<const std::byte> bytes) {
  at_ += bytes.size();
  if (behind_) return behind_->write(bytes);
  if (pending_.size() + bytes.size() > kPendingBytes && !pending_.empty()) {
    put(at_ - bytes.size() - pending_.size(), pending_);
    pending_.clear();
  }
  if (bytes.size() >= kPendingBytes)
    put(at_ - bytes.size(), bytes);
  else
    pending_.insert(pending_.end(), bytes.begin(), bytes.end());
}

void StreamWriter::write_view(std::span<const std::byte> bytes) {
  if (!behind_) return write(bytes);
  at_ += bytes.size();
  behind_->write_view(bytes);
}

void StreamWriter::flush() {
  if (behind_) {
    behind_->flush();
  } else if (!pending_.empty()) {
    put(at_ - pending_.size(), pending_);
    pending_.clear();
  }
  // Zeros at the end that were left out.
  if (zero_from_ != UINT64_MAX && file_.size() < at_) file_.resize(at_);
}

}  // namespace embermap
