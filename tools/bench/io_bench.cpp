// Pages between a file and memory: PageIo beside the bare system calls, on the same file in one run.
//
// The file lies under TMPDIR (else /tmp): name a folder on the disk that is meant. "uring" and "threads" read 4 KiB pieces at
// random places with direct I/O where the file system has it; "bare_uring" is the shortest loop over liburing, "bare_pread"
// threads that call pread. Sequential ones move 1 MiB pieces, "bare" is one thread with direct pread or pwrite, as dd with
// oflag=direct.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/size_text.hpp"
#include "io/page_io.hpp"

namespace {

using namespace embermap;

constexpr std::uint64_t kFileBytes = 4_GiB;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kBatch = 8192;  // pages
constexpr std::uint64_t kSequential = 256_MiB;
constexpr unsigned kDepth = 128;

// 8-byte words that say where they are.
void fill(std::byte* memory, std::uint64_t offset, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; i += 8) {
    const std::uint64_t word = offset + i;
    std::memcpy(memory + i, &word, 8);
  }
}
bool right(const std::byte* memory, std::uint64_t offset) {
  std::uint64_t word = 0;
  std::memcpy(&word, memory + (8 - offset % 8) % 8, 8);
  return word == offset + (8 - offset % 8) % 8;
}

class Scratch {
 public:
  Scratch() : path_{std::filesystem::temp_directory_path() / ("embermap-io-bench-" + std::to_string(getpid()))} {
    file_ = File::open(path_, File::Mode::kCreateNew);
    AlignedBuffer block(16_MiB);
    PageIo io(file_, pool_);
    for (std::uint64_t offset = 0; offset < kFileBytes; offset += block.size()) {
      fill(block.data(), offset, block.size());
      const IoPiece piece{offset, block.data(), block.size(), block.size()};
      io.write({&piece, 1});
    }
    file_.sync();
    direct_ = ::open(path_.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (direct_ < 0) direct_ = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    (void)::posix_fadvise(direct_, 0, 0, POSIX_FADV_DONTNEED);
  }
  ~Scratch() {
    ::close(direct_);
    std::filesystem::remove(path_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const File& file() const { return file_; }
  int direct() const { return direct_; }

  static Scratch& get() {
    static Scratch scratch;
    return scratch;
  }

 private:
  std::filesystem::path path_;
  ThreadPool pool_{16};
  File file_;
  int direct_ = -1;
};

std::vector<IoPiece> random_pieces(std::byte* memory, std::uint64_t page, std::uint64_t first, std::uint64_t apart) {
  static std::mt19937_64 random(7);
  std::vector<std::uint64_t> pages(kBatch);
  first += kSequential;  // what is written there is not checked
  for (auto& one : pages) one = random() % ((kFileBytes - first) / page - 1);
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  std::vector<IoPiece> pieces;
  for (std::size_t i = 0; i < pages.size(); ++i) pieces.push_back({first + pages[i] * page, memory + i * apart, page, apart});
  return pieces;
}

void check(benchmark::State& state, const std::vector<IoPiece>& pieces) {
  for (const IoPiece& piece : pieces)
    if (!right(piece.memory, piece.offset)) return state.SkipWithError("wrong bytes: a time would mean nothing");
}

// Args: page bytes, first byte, threads of the pool.
void page_io(benchmark::State& state, IoEngine engine, bool fixed) {
  const auto page = static_cast<std::uint64_t>(state.range(0));
  const auto first = static_cast<std::uint64_t>(state.range(1));
  Scratch& scratch = Scratch::get();
  ThreadPool pool(static_cast<unsigned>(state.range(2)));
  PageIo io(scratch.file(), pool, {.engine = engine});
  if (io.report().engine != engine) return state.SkipWithError(io.report().note.c_str());
  AlignedBuffer memory(kBatch * page);
  std::memset(memory.data(), 0, memory.size());
  if (fixed) io.register_frames(memory.span());
  std::uint64_t pages = 0;
  std::vector<IoPiece> pieces;
  for (auto _ : state) {
    state.PauseTiming();
    pieces = random_pieces(memory.data(), page, first, page);
    pages += pieces.size();
    state.ResumeTiming();
    io.read(pieces, [](std::size_t) {});
  }
  check(state, pieces);
  io.forget_frames();
  state.SetItemsProcessed(static_cast<std::int64_t>(pages));
}

void bare_uring(benchmark::State& state) {
  Scratch& scratch = Scratch::get();
  io_uring ring{};
  if (io_uring_queue_init(kDepth, &ring, 0) != 0) return state.SkipWithError("no io_uring");
  AlignedBuffer memory(kBatch * kPage);
  std::memset(memory.data(), 0, memory.size());
  std::uint64_t pages = 0;
  std::vector<IoPiece> pieces;
  for (auto _ : state) {
    state.PauseTiming();
    pieces = random_pieces(memory.data(), kPage, 0, kPage);
    pages += pieces.size();
    state.ResumeTiming();
    std::size_t next = 0, flying = 0;
    while (next < pieces.size() || flying > 0) {
      while (next < pieces.size() && flying < kDepth) {
        io_uring_sqe* const sqe = io_uring_get_sqe(&ring);
        io_uring_prep_read(sqe, scratch.direct(), pieces[next].memory, kPage, pieces[next].offset);
        ++next;
        ++flying;
      }
      io_uring_submit_and_wait(&ring, 1);
      io_uring_cqe* cqe = nullptr;
      unsigned head = 0, count = 0;
      io_uring_for_each_cqe(&ring, head, cqe) {
        if (cqe->res != static_cast<int>(kPage)) return state.SkipWithError("a read failed");
        ++count;
      }
      io_uring_cq_advance(&ring, count);
      flying -= count;
    }
  }
  check(state, pieces);
  io_uring_queue_exit(&ring);
  state.SetItemsProcessed(static_cast<std::int64_t>(pages));
}

// Args: threads.
void bare_pread(benchmark::State& state) {
  Scratch& scratch = Scratch::get();
  ThreadPool pool(static_cast<unsigned>(state.range(0)));
  AlignedBuffer memory(kBatch * kPage);
  std::memset(memory.data(), 0, memory.size());
  std::uint64_t pages = 0;
  std::vector<IoPiece> pieces;
  for (auto _ : state) {
    state.PauseTiming();
    pieces = random_pieces(memory.data(), kPage, 0, kPage);
    pages += pieces.size();
    state.ResumeTiming();
    pool.parallel_for(pieces.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i)
        if (::pread(scratch.direct(), pieces[i].memory, kPage, static_cast<off_t>(pieces[i].offset)) !=
            static_cast<ssize_t>(kPage))
          throw std::runtime_error("pread");
    });
  }
  check(state, pieces);
  state.SetItemsProcessed(static_cast<std::int64_t>(pages));
}

// What is in the page cache: copied without waiting, or read as any other page.
void cached(benchmark::State& state, IoEngine engine) {
  Scratch& scratch = Scratch::get();
  std::vector<std::byte> block(1_MiB);
  const std::uint64_t bytes = kFileBytes / 8;
  for (std::uint64_t offset = 0; offset < bytes; offset += block.size()) scratch.file().read(kSequential + offset, block);
  ThreadPool pool(static_cast<unsigned>(state.range(0)));
  PageIo io(scratch.file(), pool, {.engine = engine, .direct = false});
  AlignedBuffer memory(1024 * kPage);
  std::mt19937_64 random(3);
  std::uint64_t pages = 0;
  std::vector<IoPiece> pieces;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<std::uint64_t> numbers(1024);
    for (auto& one : numbers) one = random() % (bytes / kPage);
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    pieces.clear();
    for (std::size_t i = 0; i < numbers.size(); ++i)
      pieces.push_back({kSequential + numbers[i] * kPage, memory.data() + i * kPage, kPage, kPage});
    pages += pieces.size();
    state.ResumeTiming();
    io.read(pieces);
  }
  check(state, pieces);
  state.SetItemsProcessed(static_cast<std::int64_t>(pages));
}

// Args: bytes of a piece, first byte.
void sequential(benchmark::State& state, bool write) {
  const auto piece_bytes = static_cast<std::uint64_t>(state.range(0));
  const auto first = static_cast<std::uint64_t>(state.range(1));
  Scratch& scratch = Scratch::get();
  ThreadPool pool(16);
  PageIo io(scratch.file(), pool);
  AlignedBuffer memory(4_MiB);
  const std::uint64_t step = memory.size() / piece_bytes * piece_bytes;
  std::uint64_t moved = 0;
  for (auto _ : state) {
    for (std::uint64_t at = first; at + step <= first + kSequential; at += step) {
      std::vector<IoPiece> pieces;
      for (std::uint64_t i = 0; i < step; i += piece_bytes)
        pieces.push_back({at + i, memory.data() + i, piece_bytes, piece_bytes});
      if (write) {
        fill(memory.data(), at, step / 8 * 8);
        io.write(pieces);
      } else {
        io.read(pieces);
      }
      moved += step;
    }
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(moved));
}

void bare_sequential(benchmark::State& state, bool write) {
  Scratch& scratch = Scratch::get();
  AlignedBuffer memory(1_MiB);
  std::uint64_t moved = 0;
  for (auto _ : state) {
    for (std::uint64_t at = 0; at < kSequential; at += memory.size()) {
      if (write) fill(memory.data(), at, memory.size());
      const auto offset = static_cast<off_t>(at);
      const ssize_t got = write ? ::pwrite(scratch.direct(), memory.data(), memory.size(), offset)
                                : ::pread(scratch.direct(), memory.data(), memory.size(), offset);
      if (got != static_cast<ssize_t>(memory.size())) return state.SkipWithError("a call came back short");
      moved += memory.size();
    }
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(moved));
}

BENCHMARK(bare_uring)->Name("io/random_read/bare_uring")->UseRealTime();
BENCHMARK_CAPTURE(page_io, uring, IoEngine::kUring, false)
    ->Name("io/random_read/uring")
    ->ArgNames({"page", "first", "threads"})
    ->Args({4096, 4096, 1})
    ->Args({4000, 128, 1})
    ->UseRealTime();
BENCHMARK_CAPTURE(page_io, uring_fixed, IoEngine::kUring, true)
    ->Name("io/random_read/uring_fixed")
    ->ArgNames({"page", "first", "threads"})
    ->Args({4096, 4096, 1})
    ->UseRealTime();
BENCHMARK(bare_pread)->Name("io/random_read/bare_pread")->ArgName("threads")->Arg(16)->Arg(32)->Arg(64)->Arg(128)->UseRealTime();
BENCHMARK_CAPTURE(page_io, threads, IoEngine::kThreads, false)
    ->Name("io/random_read/threads")
    ->ArgNames({"page", "first", "threads"})
    ->Args({4096, 4096, 16})
    ->Args({4096, 4096, 32})
    ->Args({4096, 4096, 64})
    ->Args({4096, 4096, 128})
    ->Args({4000, 128, 64})
    ->UseRealTime();
BENCHMARK_CAPTURE(cached, cached, IoEngine::kCached)
    ->Name("io/cached_read/mapping")
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime();
BENCHMARK_CAPTURE(cached, pread, IoEngine::kThreads)
    ->Name("io/cached_read/pread")
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime();
BENCHMARK_CAPTURE(bare_sequential, read, false)->Name("io/sequential_read/bare")->UseRealTime();
BENCHMARK_CAPTURE(sequential, read, false)
    ->Name("io/sequential_read/page_io")
    ->ArgNames({"piece", "first"})
    ->Args({4096, 4096})
    ->Args({4000, 128})
    ->UseRealTime();
BENCHMARK_CAPTURE(bare_sequential, write, true)->Name("io/sequential_write/bare")->UseRealTime();
BENCHMARK_CAPTURE(sequential, write, true)
    ->Name("io/sequential_write/page_io")
    ->ArgNames({"piece", "first"})
    ->Args({4096, 4096})
    ->Args({4000, 128})
    ->UseRealTime();

}  // namespace
