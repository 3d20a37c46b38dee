#include "io/page_io.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <system_error>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/cached_file.hpp"
#include "io/direct_file.hpp"
#include "io/io_plan.hpp"
#include "io/uring.hpp"

namespace embermap {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"io_uring", "threads", "cached"};
constexpr unsigned kLargestDepth = 4096;
// The page cache may hold this much of what went through it before it is told to let go.
constexpr std::uint64_t kCachedBytes = 16ULL << 20;
// Unaligned writes are put together in memory of this size at most, in slices of which several fit.
constexpr std::uint64_t kStagingBytes = 4ULL << 20;
constexpr std::uint64_t kSliceBytes = 1ULL << 20;
// A file of which this much is in the page cache is read from there.
constexpr double kMostlyCached = 0.8;

void run_all(const Meanwhile& work) {
  if (work.count == 0) return;
  if (work.pool != nullptr)
    work.pool->parallel_for(work.count, work.grain, work.body);
  else
    work.body(0, work.count);
}

// The work for io_uring's one thread: each call does as much as keeps its pool busy for a moment.
std::function<bool()> in_steps(const Meanwhile& work) {
  if (work.count == 0) return {};
  return [&work, at = std::uint64_t{0}]() mutable {
    const std::uint64_t grain = std::max<std::uint64_t>(work.grain, 1);
    const std::uint64_t begin = at;
    const std::uint64_t count = std::min(grain * (work.pool != nullptr ? work.pool->threads() : 1), work.count - begin);
    at += count;
    if (work.pool != nullptr)
      work.pool->parallel_for(count, grain, [&](std::uint64_t from, std::uint64_t to) { work.body(begin + from, begin + to); });
    else
      work.body(begin, begin + count);
    return at < work.count;
  };
}

IoPlan direct_part(const IoPlan& plan) {
  IoPlan out = plan;
  std::erase_if(out.requests, [](const IoRequest& request) { return !request.direct; });
  out.empty.clear();
  return out;
}

}  // namespace

std::string_view io_engine_name(IoEngine engine) { return kNames[static_cast<std::size_t>(engine)]; }

IoEngine parse_io_engine(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end())
    throw InvalidArgument(fmt::format("'{}' is no I/O engine; there are {}", printable(name), fmt::join(kNames, ", ")));
  return static_cast<IoEngine>(found - kNames.begin());
}

class PageIo::Impl {
 public:
  Impl(const File& file, ThreadPool& io, const PageIoOptions& options) : file_{file}, io_{io}, options_{options} {
    if (options.depth == 0 || options.depth > kLargestDepth)
      throw InvalidArgument(fmt::format("I/O depth {}: from 1 to {}", options.depth, kLargestDepth));
  }

  ~Impl() {
    // In a forked child the mutexes may be held by threads that are not there; destroying the rings touches none.
    rings_.reset();
  }

  std::uint64_t read(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile) {
    prepare();
    if (cached_file_) return read_cached(pieces, done, meanwhile);
    const IoPlan plan = plan_reads(pieces, direct_reads_ ? direct_->alignment() : DirectAlignment{}, file_.path());
    run({plan, pieces, /*write=*/false, done}, meanwhile);
    return plan.requests.size();
  }

  std::uint64_t read_both(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile, Impl& other,
                          std::span<const IoPiece> other_pieces, const Done& other_done) {
    prepare();
    other.prepare();
    if (!rings_ || !other.rings_) return read(pieces, done, meanwhile) + other.read(other_pieces, other_done, {});
    const auto plan_for = [](const Impl& io, std::span<const IoPiece> of) {
      return plan_reads(of, io.direct_reads_ ? io.direct_->alignment() : DirectAlignment{}, io.file_.path());
    };
    const IoPlan mine = plan_for(*this, pieces), theirs = plan_for(other, other_pieces);
    Batch batch{mine, pieces, /*write=*/false, done}, beside{theirs, other_pieces, /*write=*/false, other_done};
    begin(batch);
    begin(beside);
    IoPlan both = mine;
    both.requests.insert(both.requests.end(), theirs.requests.begin(), theirs.requests.end());
    for (std::size_t i = mine.requests.size(); i < both.requests.size(); ++i)
      both.requests[i].first_vector += mine.vectors.size();
    both.vectors.insert(both.vectors.end(), theirs.vectors.begin(), theirs.vectors.end());
    both.bounce_bytes = std::max(mine.bounce_bytes, theirs.bounce_bytes);
    if (both.requests.empty()) {
      run_all(meanwhile);
      return 0;
    }
    rings_->run({.plan = both,
                 .write = false,
                 .complete =
                     [&](const IoRequest& request, int result, std::byte* bounce) {
                       const auto i = static_cast<std::size_t>(&request - both.requests.data());
                       if (i < mine.requests.size())
                         finish(batch, mine.requests[i], result, bounce, "io_uring ");
                       else
                         other.finish(beside, theirs.requests[i - mine.requests.size()], result, bounce, "io_uring ");
                     },
                 .meanwhile = in_steps(meanwhile),
                 .others_from = mine.requests.size(),
                 .other_fds = {other.file_.fd(), other.direct_ ? other.direct_->fd() : -1}});
    return both.requests.size();
  }

  std::uint64_t write(std::span<const IoPiece> pieces, const Done& done) {
    prepare();
    const bool direct = direct_writes_;
    const IoPlan plan = plan_writes(pieces, direct ? direct_->alignment() : DirectAlignment{}, file_.path());
    if (!direct || !plan.buffered) {
      // Calls that began before direct writes were refused may still be about to write the rest of a sector as they read it.
      std::unique_lock<std::shared_mutex> alone;
      if (!direct && refused_writes_) alone = std::unique_lock(blocks_);
      write_plan(plan, pieces, done);
      return plan.requests.size();
    }
    if (done)
      for (const std::size_t i : plan.empty) done(i);
    std::uint64_t requests = 0;
    if (plan.direct) {
      const IoPlan aligned = direct_part(plan);
      write_plan(aligned, pieces, done);
      requests = aligned.requests.size();
    }
    std::vector<std::size_t> others;
    for (const IoRequest& request : plan.requests) {
      if (request.direct) continue;
      for (std::size_t i = 0; i < request.pieces; ++i)
        if (others.empty() || others.back() != request.first_piece + i) others.push_back(request.first_piece + i);
    }
    return requests + write_unaligned(pieces, others, done);
  }

  void register_frames(std::span<std::byte> slab) {
    prepare();
    if (rings_) rings_->set_frames(slab);
  }

  void forget_frames() noexcept {
    if (rings_ && ::getpid() == process_) rings_->forget_frames();
  }

  PageIoReport report() {
    prepare();
    PageIoReport out;
    out.engine = engine_;
    out.direct_reads = direct_reads_;
    out.direct_writes = direct_writes_;
    out.depth = rings_ ? options_.depth : io_.threads();
    out.memory_bytes = thread_bounce_ + staged_;
    if (rings_) {
      out.fixed_buffers = rings_->fixed();
      out.memory_bytes += rings_->memory_bytes();
    }
    {
      const std::lock_guard lock(note_mutex_);
      out.note = note_;
    }
    const auto add = [&](const std::string& text) {
      if (!text.empty()) out.note += (out.note.empty() ? "" : "; ") + text;
    };
    if (rings_) add(rings_->why_not_fixed());
    if (cached_file_) add(cached_file_->why());
    out.read_requests = read_requests_;
    out.write_requests = write_requests_;
    out.bounced_bytes = bounced_bytes_;
    out.cached_bytes = cached_bytes_;
    return out;
  }

 private:
  // One batch under way.
  struct Batch {
    const IoPlan& plan;
    std::span<const IoPiece> pieces;
    bool write;
    const Done& done;
    std::unique_ptr<std::atomic<std::uint32_t>[]> parts = {};
  };

  void prepare() {
    if (::getpid() != process_)
      throw ClosedError(
          fmt::format("{} was opened in process {} and is used in process {}, a forked child, which has to open it again",
                      printable(file_.path()), process_, getpid()));
    std::call_once(chosen_, [&] { choose(); });
  }

  void note(std::string_view text) {
    const std::lock_guard lock(note_mutex_);
    if (!note_.empty()) note_ += "; ";
    note_ += text;
  }

  void choose() {
    const bool injected = &file_.ops() != &FileOps::system();
    const bool memory = lives_in_memory(file_);
    engine_ = options_.engine.value_or(injected ? IoEngine::kThreads : memory ? IoEngine::kCached : IoEngine::kUring);
    if (!options_.engine && !injected && !memory && options_.prefer_cached && options_.direct != true) {
      auto cached = std::make_unique<CachedFile>(file_, /*in_memory=*/false);
      if (cached->resident_share() >= kMostlyCached) {
        engine_ = IoEngine::kCached;
        cached_file_ = std::move(cached);
      }
    }
    if (engine_ == IoEngine::kCached) {
      if (options_.direct == true) note("direct I/O: what is cached is read from the page cache");
      if (!cached_file_) cached_file_ = std::make_unique<CachedFile>(file_, memory);
      return;
    }
    if (memory) {
      if (options_.direct == true) note("direct I/O: the file lies in memory");
    } else {
      const bool direct = options_.direct.value_or(!injected);
      direct_ = std::make_unique<DirectFile>(file_, direct);
      if (!direct_->why().empty()) note(direct_->why());
      direct_reads_ = direct_->alignment().offset != 0;
      direct_writes_ = direct_reads_ && (::fcntl(file_.fd(), F_GETFL) & O_ACCMODE) == O_RDWR;
    }
    if (engine_ != IoEngine::kUring) return;
    try {
      rings_ = std::make_unique<UringPool>(file_, direct_ ? direct_->fd() : -1, options_.depth);
    } catch (const std::system_error& error) {
      note(error.what());
      engine_ = IoEngine::kThreads;
      return;
    }
    if (!options_.engine && threads_are_faster()) {
      rings_.reset();
      engine_ = IoEngine::kThreads;
    }
  }

  // Reads a few dozen pieces of the file in both ways. False for a file with little in it, and for a disk so slow that looking
  // longer would be felt.
  bool threads_are_faster() {
    constexpr std::size_t kReads = 32;
    constexpr std::uint64_t kBytes = 4096;
    constexpr std::uint64_t kLeast = 4ULL << 20;
    constexpr double kSlow = 500e-6;
    const struct stat status = file_.status();
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (!direct_ || direct_->fd() < 0 || size < kLeast || static_cast<std::uint64_t>(status.st_blocks) * 512 < kLeast)
      return false;
    const AlignedBuffer memory(kReads * kBytes);
    std::mt19937_64 random(size);
    const auto time = [&](bool uring, std::size_t reads) {
      std::vector<std::uint64_t> offsets;
      for (std::size_t i = 0; i < reads; ++i) {
        const std::uint64_t anywhere = random() % (size - kBytes);
        const off_t data = ::lseek(direct_->fd(), static_cast<off_t>(anywhere), SEEK_DATA);  // its position serves nobody else
        const std::uint64_t at = data < 0 ? anywhere : static_cast<std::uint64_t>(data);
        offsets.push_back(std::min(at, size - kBytes) / kBytes * kBytes);
      }
      std::sort(offsets.begin(), offsets.end());
      offsets.erase(std::unique(offsets.begin(), offsets.end()), offsets.end());
      std::vector<IoPiece> pieces;
      for (std::size_t i = 0; i < offsets.size(); ++i) pieces.push_back({offsets[i], memory.data() + i * kBytes, kBytes, kBytes});
      const IoPlan plan = plan_reads(pieces, direct_reads_ ? direct_->alignment() : DirectAlignment{}, file_.path());
      const Done nothing;
      Batch batch{plan, pieces, /*write=*/false, nothing};
      const auto begin = std::chrono::steady_clock::now();
      uring ? run_uring(batch, {}) : run_threads(batch, {});
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      return taken.count() / static_cast<double>(pieces.size());
    };
    try {
      if (time(/*uring=*/true, 1) > kSlow) return false;
      (void)time(/*uring=*/false, kReads);  // its threads may have to be started
      double uring = 1, threads = 1;
      for (int round = 0; round < 2; ++round) {
        uring = std::min(uring, time(/*uring=*/true, kReads));
        threads = std::min(threads, time(/*uring=*/false, kReads));
      }
      return threads * 1.1 < uring;
    } catch (const Error&) {
      return false;  // whoever reads there is told
    }
  }

  // All direct, or all buffered because there is no direct I/O.
  void write_plan(const IoPlan& plan, std::span<const IoPiece> pieces, const Done& done) {
    // What ends inside a page of the page cache keeps away from those who may have that page there; see write_unaligned.
    std::shared_lock<std::shared_mutex> beside;
    if (plan.shares_blocks) beside = std::shared_lock(blocks_);
    run({plan, pieces, /*write=*/true, done}, {});
  }

  // Part of an unaligned piece, itself no longer than fits the staging memory.
  struct Slice {
    std::uint64_t offset, bytes;
    const std::byte* memory;
    std::size_t piece;
  };
  // Slices that touch or share a sector, and where their hull lies in the staging memory.
  struct Hull {
    std::uint64_t begin, end;
    std::byte* memory;
    std::size_t first_slice, slices;
  };

  // Pieces that begin or end inside a sector: the rest of such sectors is read, and whole ones are written. One call at a time,
  // because the other part of a sector may be of a page that another call writes. Through the page cache this would be a read for
  // each edge, one after another. Only what ends at the end of the file goes that way, which must not grow by the rest of a
  // sector.
  std::uint64_t write_unaligned(std::span<const IoPiece> pieces, std::span<const std::size_t> which, const Done& done) {
    const std::uint64_t unit = direct_->alignment().offset;
    const std::unique_lock alone(blocks_);
    const std::uint64_t size = file_.size();
    std::vector<Slice> slices;
    std::vector<IoPiece> last;
    std::vector<std::size_t> last_which;
    std::vector<std::uint32_t> left(pieces.size(), 0);
    std::uint64_t sectors_bytes = 0;  // of the sectors that slices touch
    for (const std::size_t i : which) {
      const IoPiece& piece = pieces[i];
      const std::uint64_t end = piece.offset + piece.bytes;
      if (round_up(end, unit) > size) {
        last.push_back(piece);
        last_which.push_back(i);
        continue;
      }
      for (std::uint64_t at = piece.offset; at < end; ++left[i]) {
        const std::uint64_t next = std::min(end, round_down(at, unit) + kSliceBytes);
        slices.push_back({at, next - at, piece.memory + (at - piece.offset), i});
        sectors_bytes += round_up(next, unit) - round_down(at, unit);
        at = next;
      }
    }
    // No more than the largest call has needed: a small budget makes small calls.
    if (const std::uint64_t wanted = std::min(kStagingBytes, sectors_bytes); staging_.size() < wanted) {
      staging_ = AlignedBuffer();  // first: never both at once
      staging_ = AlignedBuffer(wanted);
      staged_ = wanted;
    }
    std::uint64_t requests = 0;
    for (std::size_t next = 0; next < slices.size();) requests += write_staged(slices, next, left, done);
    if (last.empty()) return requests;
    const IoPlan plan = plan_writes(last, {}, file_.path());
    const Done done_last = [&](std::size_t i) {
      if (done) done(last_which[i]);
    };
    run({plan, last, /*write=*/true, done_last}, {});
    return requests + plan.requests.size();
  }

  // As many slices from `next` on as the staging memory holds.
  std::uint64_t write_staged(std::span<const Slice> slices, std::size_t& next, std::vector<std::uint32_t>& left,
                             const Done& done) {
    const std::uint64_t unit = direct_->alignment().offset;
    std::vector<Hull> hulls;
    std::vector<IoPiece> sectors;  // whose other part is wanted
    bool tail_is_last = false;     // the last of them is there for the end of the last slice alone
    std::uint64_t used = 0;
    for (; next < slices.size(); ++next) {
      const Slice& slice = slices[next];
      const std::uint64_t slice_end = slice.offset + slice.bytes;
      const std::uint64_t begin = round_down(slice.offset, unit);
      const std::uint64_t end = round_up(slice_end, unit);
      const bool joins = !hulls.empty() && begin <= hulls.back().end;
      const std::uint64_t more = joins ? end - std::min(end, hulls.back().end) : end - begin;
      if (more > staging_.size() - used) break;
      if (!joins) hulls.push_back({begin, begin, staging_.data() + used, next, 0});
      Hull& hull = hulls.back();
      const bool follows = joins && slices[next - 1].offset + slices[next - 1].bytes == slice.offset;
      hull.end = std::max(hull.end, end);
      ++hull.slices;
      used += more;
      const auto want = [&](std::uint64_t sector) {
        if (!sectors.empty() && sectors.back().offset == sector) return false;
        sectors.push_back({sector, hull.memory + (sector - hull.begin), unit, unit});
        return true;
      };
      if (slice.offset != begin) {
        // Between two neighbours nothing is wanted.
        if (!follows)
          want(begin);
        else if (tail_is_last)
          sectors.pop_back();
      }
      tail_is_last = slice_end != end && want(end - unit);
    }
    std::uint64_t requests = 0;
    const Done nothing;
    if (!sectors.empty()) {
      const IoPlan plan = plan_reads(sectors, direct_->alignment(), file_.path());
      run({plan, sectors, /*write=*/false, nothing}, {});
      requests += plan.requests.size();
    }
    std::vector<IoPiece> whole;
    for (const Hull& hull : hulls) {
      for (std::size_t i = hull.first_slice; i < hull.first_slice + hull.slices; ++i)
        std::memcpy(hull.memory + (slices[i].offset - hull.begin), slices[i].memory, slices[i].bytes);
      whole.push_back({hull.begin, hull.memory, hull.end - hull.begin, hull.end - hull.begin});
    }
    const IoPlan plan = plan_writes(whole, direct_->alignment(), file_.path());
    std::mutex mutex;  // of `left`
    const Done written = [&](std::size_t h) {
      for (std::size_t i = hulls[h].first_slice; i < hulls[h].first_slice + hulls[h].slices; ++i) {
        {
          const std::lock_guard lock(mutex);
          if (--left[slices[i].piece] != 0) continue;
        }
        if (done) done(slices[i].piece);
      }
    };
    run({plan, whole, /*write=*/true, written}, {});
    return requests + plan.requests.size();
  }

  static void begin(Batch& batch) {
    if (batch.done)
      for (const std::size_t i : batch.plan.empty) batch.done(i);
    if (batch.plan.parts.empty()) return;
    batch.parts = std::make_unique<std::atomic<std::uint32_t>[]>(batch.plan.parts.size());
    for (std::size_t i = 0; i < batch.plan.parts.size(); ++i) batch.parts[i] = batch.plan.parts[i];
  }

  void run(Batch batch, const Meanwhile& meanwhile) {
    begin(batch);
    if (batch.plan.requests.empty()) return run_all(meanwhile);
    rings_ ? run_uring(batch, meanwhile) : run_threads(batch, meanwhile);
  }

  void run_uring(const Batch& batch, const Meanwhile& meanwhile) {
    rings_->run(
        {batch.plan, batch.write,
         [&](const IoRequest& request, int result, std::byte* bounce) { finish(batch, request, result, bounce, "io_uring "); },
         in_steps(meanwhile)});
  }

  void run_threads(const Batch& batch, const Meanwhile& meanwhile) {
    const std::uint64_t requests = batch.plan.requests.size();
    const std::uint64_t grain = std::max<std::uint64_t>(meanwhile.grain, 1);
    const std::uint64_t steps = meanwhile.count / grain + (meanwhile.count % grain != 0);
    if (batch.plan.bounce_bytes > 0) {
      const std::uint64_t most = batch.plan.bounce_bytes * io_.threads();
      std::uint64_t before = thread_bounce_;
      while (before < most && !thread_bounce_.compare_exchange_weak(before, most)) {
      }
    }
    // Requests come first, so that they wait while what is left is done.
    io_.parallel_for(requests + steps, 1, [&](std::uint64_t begin, std::uint64_t end) {
      AlignedBuffer bounce;
      for (std::uint64_t i = begin; i < end; ++i) {
        if (i >= requests) {
          const std::uint64_t from = (i - requests) * grain;
          meanwhile.body(from, std::min(from + grain, meanwhile.count));
          continue;
        }
        const IoRequest& request = batch.plan.requests[i];
        if (request.bounced && bounce.size() == 0) bounce = AlignedBuffer(batch.plan.bounce_bytes);
        finish(batch, request, perform(batch, request, bounce.data()), bounce.data(), "p");
      }
    });
  }

  // One system call: a count, or a negative errno.
  int perform(const Batch& batch, const IoRequest& request, std::byte* bounce) const {
    const iovec whole{bounce, request.bytes};
    const std::span<const iovec> vectors =
        request.bounced ? std::span(&whole, 1) : std::span(batch.plan.vectors).subspan(request.first_vector, request.vectors);
    return call(batch.write, request.direct ? direct_->fd() : file_.fd(), vectors, request.offset);
  }

  // The same of any memory, IOV_MAX pieces of it at most.
  int call(bool write, int fd, std::span<const iovec> vectors, std::uint64_t at) const {
    FileOps& ops = file_.ops();
    const int count = static_cast<int>(std::min<std::size_t>(vectors.size(), IOV_MAX));
    const auto offset = static_cast<off_t>(at);
    for (;;) {
      ssize_t got = 0;
      if (count == 1)
        got = write ? ops.pwrite(fd, vectors[0].iov_base, vectors[0].iov_len, offset)
                    : ops.pread(fd, vectors[0].iov_base, vectors[0].iov_len, offset);
      else
        got = write ? ops.pwritev(fd, vectors.data(), count, offset) : ops.preadv(fd, vectors.data(), count, offset);
      if (got >= 0) return static_cast<int>(got);
      if (errno != EINTR) return -errno;
    }
  }

  // What a request has brought: the rest of a short one is fetched, what was bounced goes where it belongs.
  void finish(const Batch& batch, const IoRequest& request, int result, std::byte* bounce, std::string_view engine) {
    if (result == -EINVAL && request.direct) {
      refuse_direct(batch.write);
      result = 0;
    } else if (result == -EAGAIN) {
      result = 0;  // what the kernel would not do without waiting is waited for
    } else if (result < 0) {
      throw IoError(-result, fmt::format("{}{}", engine, batch.write ? "write" : "read"), file_.path(), request.offset,
                    request.needed);
    }
    std::uint64_t got = std::min(static_cast<std::uint64_t>(result), request.needed);
    if (got < request.needed && batch.write && request.direct && direct_writes_) got = write_direct(batch, request, got);
    if (got < request.needed) {
      if (request.bounced) {
        file_.read(request.offset + got, {bounce + got, static_cast<std::size_t>(request.needed - got)});
      } else {
        std::vector<iovec> rest = memory_after(batch.plan, request, got);
        batch.write ? file_.write(request.offset + got, rest) : file_.read(request.offset + got, rest);
      }
    }
    if (request.bounced) {
      copy_out(request, bounce, batch.pieces);
      bounced_bytes_ += request.needed;
    }
    ++(batch.write ? write_requests_ : read_requests_);
    if (!request.direct || got < request.needed) through_cache(request, batch.write);
    if (!batch.done) return;
    if (request.part) {
      if (--batch.parts[request.first_piece] == 0) batch.done(request.first_piece);
      return;
    }
    for (std::size_t i = 0; i < request.pieces; ++i) batch.done(request.first_piece + i);
  }

  // Goes on with a direct write that was short, past the page cache as well: through it, the rest of a block would be read, and
  // written again over what others write to other sectors of that block meanwhile. Returns the bytes that are written then.
  std::uint64_t write_direct(const Batch& batch, const IoRequest& request, std::uint64_t done) {
    constexpr int kMostInVain = 16;
    const std::uint64_t unit = direct_->alignment().offset;
    for (int in_vain = 0; done < request.needed;) {
      done = round_down(done, unit);  // half of a sector is written once more
      const int wrote = call(/*write=*/true, direct_->fd(), memory_after(batch.plan, request, done), request.offset + done);
      if (wrote == -EINVAL) {
        refuse_direct(/*write=*/true);
        return done;
      }
      const bool moves = wrote >= 0 && static_cast<std::uint64_t>(wrote) >= unit;
      if (wrote < 0 || (!moves && ++in_vain == kMostInVain))
        throw IoError(wrote < 0 ? -wrote : EIO, "pwrite", file_.path(), request.offset + done, request.needed - done);
      if (moves) in_vain = 0;
      done += static_cast<std::uint64_t>(wrote);
    }
    return std::min(done, request.needed);
  }

  void refuse_direct(bool write) {
    std::atomic<bool>& direct = write ? direct_writes_ : direct_reads_;
    if (write) refused_writes_ = true;
    if (direct.exchange(false))
      note(fmt::format("direct {}: {}", write ? "write" : "read", std::generic_category().message(EINVAL)));
  }

  // Keeps the page cache from filling with what nobody will read there.
  void through_cache(const IoRequest& request, bool write) {
    if (!direct_) return;
    const std::uint64_t first = request.offset / kCachePage;
    const std::uint64_t last = (request.offset + request.bytes + kCachePage - 1) / kCachePage;
    const std::uint64_t bytes = (last - first) * kCachePage;
    if (write) cache_dirty_ = true;
    if (cached_.fetch_add(bytes) + bytes < kCachedBytes) return;
    const std::lock_guard lock(drop_mutex_);
    if (cached_ < kCachedBytes) return;  // another thread has done it
    cached_ = 0;
    direct_->drop_cache(cache_dirty_.exchange(false));
  }

  std::uint64_t read_cached(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile) {
    constexpr std::uint64_t kTogether = 16;  // pieces of one thread
    check_pieces(pieces, "read", file_.path());
    std::vector<unsigned char> missing(pieces.size(), 0);
    io_.parallel_for(pieces.size(), kTogether, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i) {
        if (!cached_file_->copy(pieces[i].offset, {pieces[i].memory, static_cast<std::size_t>(pieces[i].bytes)})) {
          missing[i] = 1;
          continue;
        }
        cached_bytes_ += pieces[i].bytes;
        if (done) done(i);
      }
    });
    std::vector<IoPiece> rest;
    std::vector<std::size_t> which;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (missing[i] == 0) continue;
      rest.push_back(pieces[i]);
      which.push_back(i);
    }
    const IoPlan plan = plan_reads(rest, {}, file_.path());
    const Done done_rest = [&](std::size_t i) {
      if (done) done(which[i]);
    };
    run({plan, rest, /*write=*/false, done_rest}, meanwhile);
    return plan.requests.size();
  }

  const File& file_;
  ThreadPool& io_;
  const PageIoOptions options_;
  const pid_t process_ = ::getpid();

  std::once_flag chosen_;
  IoEngine engine_ = IoEngine::kThreads;
  std::unique_ptr<DirectFile> direct_;  // none where the file lies in memory, or its cache is wanted
  std::unique_ptr<UringPool> rings_;
  std::unique_ptr<CachedFile> cached_file_;
  std::atomic<bool> direct_reads_{false}, direct_writes_{false};
  std::atomic<bool> refused_writes_{false};  // set before direct_writes_ is taken back
  mutable std::mutex note_mutex_;
  std::string note_;

  std::shared_mutex blocks_;  // sectors and pages of the page cache that writes share
  AlignedBuffer staging_;     // whoever has blocks_ alone
  std::atomic<std::uint64_t> staged_{0};
  std::atomic<std::uint64_t> cached_{0};
  std::atomic<bool> cache_dirty_{false};
  std::mutex drop_mutex_;

  std::atomic<std::uint64_t> read_requests_{0}, write_requests_{0}, bounced_bytes_{0}, cached_bytes_{0}, thread_bounce_{0};
};

PageIo::PageIo(const File& file, ThreadPool& io, const PageIoOptions& options)
    : impl_{std::make_unique<Impl>(file, io, options)} {}
PageIo::~PageIo() = default;

void PageIo::register_frames(std::span<std::byte> slab) { impl_->register_frames(slab); }
void PageIo::forget_frames() noexcept { impl_->forget_frames(); }
std::uint64_t PageIo::read(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile) {
  return impl_->read(pieces, done, meanwhile);
}
std::uint64_t PageIo::read(std::span<const IoPiece> pieces, const Done& done, const Meanwhile& meanwhile, const Beside& beside) {
  return impl_->read_both(pieces, done, meanwhile, *beside.io.impl_, beside.pieces, beside.done);
}
std::uint64_t PageIo::write(std::span<const IoPiece> pieces, const Done& done) { return impl_->write(pieces, done); }
PageIoReport PageIo::report() const { return impl_->report(); }

}  // namespace embermap
