#include "io/page_io.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "io/cached_file.hpp"
#include "io/direct_file.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

constexpr std::uint64_t kPage = 4096;

std::byte pattern(std::uint64_t offset) { return static_cast<std::byte>((offset * 0x9E3779B97F4A7C15ULL) >> 56); }

std::vector<std::byte> pattern_of(std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) out[i] = pattern(offset + i);
  return out;
}

class PageIoFolder : public testing::FolderTest {
 protected:
  // A file of `bytes` bytes that hold the pattern.
  File make(std::string_view name, std::uint64_t bytes, FileOps& ops = FileOps::system()) {
    {
      const File file = File::open(at(name), File::Mode::kCreateNew);
      for (std::uint64_t offset = 0; offset < bytes; offset += 1U << 20)
        file.write(offset, pattern_of(offset, std::min<std::uint64_t>(1U << 20, bytes - offset)));
    }
    return File::open(at(name), File::Mode::kReadWrite, ops);
  }

  ThreadPool io_{4};
};

// Pieces with memory of their own between guards.
class Pieces {
 public:
  // `slack`: bytes by which every piece's memory is off a multiple of 512.
  explicit Pieces(std::uint64_t slack = 0) : slack_{slack} {}

  void add(std::uint64_t offset, std::uint64_t bytes, std::uint64_t room = 0) {
    room = std::max(room, bytes);
    places_.push_back(end_ + 512 + slack_);
    end_ = round_up(places_.back() + room + 512, 512);
    pieces_.push_back({offset, nullptr, bytes, room});
  }
  std::span<IoPiece> get() {
    if (memory_.size() != end_ + 1024) {
      memory_ = AlignedBuffer(end_ + 1024);
      std::memset(memory_.data(), 0xEE, memory_.size());
      for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i].memory = memory_.data() + places_[i];
    }
    return pieces_;
  }
  // Every piece holds the pattern, and what lies around its room is as it was.
  void expect_pattern() const {
    for (const IoPiece& piece : pieces_) {
      for (std::uint64_t i = 0; i < piece.bytes; ++i)
        if (piece.memory[i] != pattern(piece.offset + i)) {
          ADD_FAILURE() << "byte " << i << " of the piece at " << piece.offset;
          break;
        }
      for (std::uint64_t i = 0; i < 256; ++i) {
        ASSERT_EQ(piece.memory[piece.room + i], std::byte{0xEE}) << "behind the piece at " << piece.offset;
        ASSERT_EQ(*(piece.memory - 1 - i), std::byte{0xEE}) << "before the piece at " << piece.offset;
      }
    }
  }
  std::size_t size() const { return pieces_.size(); }

 private:
  std::uint64_t slack_;
  std::uint64_t end_ = 0;
  std::vector<std::uint64_t> places_;
  std::vector<IoPiece> pieces_;
  AlignedBuffer memory_;
};

struct Way {
  IoEngine engine;
  bool direct;
};

class PageIoWays : public PageIoFolder, public ::testing::WithParamInterface<Way> {
 protected:
  PageIoOptions options() const { return {.engine = GetParam().engine, .direct = GetParam().direct}; }
};

TEST_P(PageIoWays, TwoFilesAreReadTogether) {
  constexpr std::uint64_t kBytes = 4U << 20, kShift = 1ULL << 30;
  const File first = make("a", kBytes), second = make("b", kBytes);
  for (std::uint64_t offset = 0; offset < kBytes; offset += 1U << 20)
    second.write(offset, pattern_of(kShift + offset, 1U << 20));  // other bytes than the first one has
  PageIo io(first, io_, options()), beside(second, io_, options());
  for (const std::uint64_t slack : {0U, 17U}) {
    Pieces mine(slack), theirs(slack);
    for (std::uint64_t page = 0; page < 300; page += 3) mine.add(page * kPage, kPage);
    mine.add(3U << 20, 0);
    theirs.add(5, 1000);
    for (std::uint64_t page = 2; page < 200; page += 2) theirs.add(page * kPage, kPage);
    theirs.add(1U << 20, 3U << 20);  // several requests
    std::vector<std::atomic<int>> done(mine.size()), others_done(theirs.size());
    std::atomic<std::uint64_t> worked{0};
    const PageIo::Done theirs_done = [&](std::size_t i) { ++others_done[i]; };
    const Meanwhile meanwhile{
        .count = 1000, .grain = 10, .body = [&](std::uint64_t begin, std::uint64_t end) { worked += end - begin; }};
    const std::uint64_t requests =
        io.read(mine.get(), [&](std::size_t i) { ++done[i]; }, meanwhile, {beside, theirs.get(), theirs_done});
    if (GetParam().engine != IoEngine::kCached) {
      EXPECT_GE(requests, 200U);  // what is copied needs none
    }
    EXPECT_EQ(worked, 1000U);
    mine.expect_pattern();
    for (const IoPiece& piece : theirs.get())
      EXPECT_TRUE(std::ranges::equal(std::span(piece.memory, piece.bytes), pattern_of(kShift + piece.offset, piece.bytes)))
          << "the piece at " << piece.offset;
    for (const auto& times : done) EXPECT_EQ(times, 1);
    for (const auto& times : others_done) EXPECT_EQ(times, 1);
  }
  // Either may have nothing to read, or both.
  Pieces nothing, some;
  some.add(kPage, kPage);
  const PageIo::Done ignored;
  const std::uint64_t one = GetParam().engine == IoEngine::kCached ? 0 : 1;
  EXPECT_EQ(io.read(some.get(), {}, {}, {beside, nothing.get(), ignored}), one);
  some.expect_pattern();
  EXPECT_EQ(io.read(nothing.get(), {}, {}, {beside, some.get(), ignored}), one);
  EXPECT_EQ(some.get()[0].memory[9], pattern(kShift + kPage + 9));
  EXPECT_EQ(io.read(nothing.get(), {}, {}, {beside, nothing.get(), ignored}), 0U);
}

TEST_P(PageIoWays, ErrorsOfTwoFilesNameTheOneTheyAreOf) {
  const File first = make("short", 8 * kPage), second = make("other", 100 * kPage);
  PageIo io(first, io_, options()), beside(second, io_, options());
  const PageIo::Done ignored;
  const auto read = [&](std::uint64_t in_first, std::uint64_t in_second) {
    Pieces mine, theirs;
    mine.add(in_first * kPage, kPage);
    theirs.add(in_second * kPage, kPage);
    return error_of<FormatError>([&] { io.read(mine.get(), {}, {}, {beside, theirs.get(), ignored}); });
  };
  EXPECT_THAT(read(8, 1), ::testing::AllOf(HasSubstr("short"), HasSubstr("truncated")));
  EXPECT_THAT(read(1, 100), ::testing::AllOf(HasSubstr("other"), HasSubstr("truncated")));
  // What `done` throws ends both.
  Pieces mine, theirs;
  mine.add(0, kPage);
  theirs.add(0, kPage);
  const PageIo::Done throws = [](std::size_t) { throw InvalidArgument("enough"); };
  EXPECT_EQ(error_of<InvalidArgument>([&] { io.read(mine.get(), {}, {}, {beside, theirs.get(), throws}); }), "enough");
}

INSTANTIATE_TEST_SUITE_P(All, PageIoWays,
                         ::testing::Values(Way{IoEngine::kUring, true}, Way{IoEngine::kUring, false},
                                           Way{IoEngine::kThreads, true}, Way{IoEngine::kThreads, false},
                                           Way{IoEngine::kCached, false}),
                         [](const auto& way) {
                           return std::string(io_engine_name(way.param.engine)) + (way.param.direct ? "_direct" : "_buffered");
                         });

TEST_P(PageIoWays, ReadsWhatIsThereAndTellsOfEachPieceOnce) {
  constexpr std::uint64_t kBytes = (5U << 20) + 123;
  const File file = make("f", kBytes);
  PageIo io(file, io_, options());
  std::mt19937_64 random(1);
  std::vector<Pieces> cases;
  cases.emplace_back();  // nothing
  cases.emplace_back().add(0, kPage);
  cases.emplace_back().add(kBytes - 1, 1);
  cases.emplace_back().add(0, kBytes);                     // larger than a request, no room at its end
  cases.emplace_back(/*slack=*/3).add(777, kBytes - 999);  // and at odd places
  Pieces& neighbours = cases.emplace_back();
  for (std::uint64_t i = 0; i < 600; ++i) neighbours.add(i * kPage, kPage);
  Pieces& odd = cases.emplace_back();  // 4000-byte pages from byte 128 on, as of an array that begins there
  for (std::uint64_t i = 0; i < 1000; ++i) odd.add(128 + i * 4000, 4000);
  Pieces& sparse = cases.emplace_back();
  for (std::uint64_t i = 0; i < 1000; i += 1 + random() % 3) sparse.add(128 + i * 4000, 4000);
  Pieces& last = cases.emplace_back();  // the short last page of a file, with room
  last.add(0, kPage);
  last.add(kBytes / kPage * kPage, kBytes % kPage, kPage);
  Pieces& empty = cases.emplace_back();
  empty.add(100, 0);
  empty.add(4096, 4096);
  empty.add(8192, 0);
  for (const std::uint64_t slack : {0U, 1U}) {
    Pieces& anything = cases.emplace_back(slack);
    for (std::uint64_t offset = 0; anything.size() < 500;) {
      offset += random() % 4 == 0 ? random() % 5000 : 0;
      const std::uint64_t bytes = random() % 3 == 0 ? 512 * (random() % 9) : random() % 9000;
      if (offset + bytes > kBytes) break;
      anything.add(offset, bytes, bytes + random() % 600);
      offset += bytes;
    }
  }
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE("case " + std::to_string(c));
    std::vector<std::atomic<int>> done(cases[c].size());
    io.read(cases[c].get(), [&](std::size_t i) { ++done[i]; });
    cases[c].expect_pattern();
    for (std::size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i], 1) << "piece " << i;
  }
}

TEST_P(PageIoWays, DoneFollowsTheBytes) {
  const File file = make("f", 4U << 20);
  PageIo io(file, io_, options());
  Pieces pieces;
  for (std::uint64_t i = 0; i < 500; ++i) pieces.add(128 + i * 8000, 4000);
  const auto all = pieces.get();
  std::atomic<int> wrong{0};
  io.read(all, [&](std::size_t i) { wrong += std::memcmp(all[i].memory, pattern_of(all[i].offset, 4000).data(), 4000) != 0; });
  EXPECT_EQ(wrong, 0);
}

TEST_P(PageIoWays, WritesAlignedAndNotAndReadsBoth) {
  constexpr std::uint64_t kBytes = (6U << 20) + 77;
  const File file = make("f", kBytes);
  std::vector<std::byte> model = pattern_of(0, kBytes);
  PageIo io(file, io_, options());
  std::mt19937_64 random(2);
  for (int round = 0; round < 12; ++round) {
    // Steps of 4096, 512 or anything; memory apart or not.
    const std::uint64_t unit = round % 3 == 0 ? 4096 : round % 3 == 1 ? 512 : 1;
    Pieces pieces(round % 4 == 3 ? 5 : 0);
    for (std::uint64_t offset = random() % 3 * unit; pieces.size() < 300;) {
      const std::uint64_t bytes = unit * (unit == 1 ? 1 + random() % 9000 : 1 + random() % 8);
      if (offset + bytes > kBytes) break;
      pieces.add(offset, bytes);
      offset += bytes + (random() % 2) * unit * (random() % 3);
    }
    const auto all = pieces.get();
    for (const IoPiece& piece : all)
      for (std::uint64_t i = 0; i < piece.bytes; ++i)
        model[piece.offset + i] = piece.memory[i] = static_cast<std::byte>(random());
    std::vector<std::atomic<int>> done(all.size());
    io.write(all, [&](std::size_t i) { ++done[i]; });
    for (const auto& times : done) EXPECT_EQ(times, 1);
    // Read at once, in the way of this test: whatever is still in the page cache counts.
    std::vector<std::byte> back(kBytes);
    const IoPiece whole{0, back.data(), kBytes, kBytes};
    io.read({&whole, 1});
    ASSERT_EQ(std::memcmp(back.data(), model.data(), kBytes), 0) << "round " << round;
  }
  std::vector<std::byte> plain(kBytes);
  file.read(0, plain);
  EXPECT_EQ(plain, model);
  EXPECT_EQ(file.size(), kBytes);
}

TEST_P(PageIoWays, ALargeWriteAndAnEmptyOne) {
  const File file = make("f", 100);
  PageIo io(file, io_, options());
  AlignedBuffer memory(5 << 20);
  const auto bytes = pattern_of(4096, memory.size());
  std::memcpy(memory.data(), bytes.data(), bytes.size());
  const std::vector<IoPiece> pieces{{4096, memory.data(), memory.size(), memory.size()}};
  int done = 0;
  io.write(pieces, [&](std::size_t) { ++done; });
  EXPECT_EQ(done, 1);
  io.write({});
  EXPECT_EQ(file.size(), 4096 + memory.size());
  Pieces all;
  all.add(4096, memory.size());
  io.read(all.get());
  all.expect_pattern();
  // At an odd place, larger than what such writes are put together in, with a neighbour in its last sector and a gap behind that.
  Pieces odd;
  odd.add(777, 9U << 20);
  odd.add(777 + (9U << 20), 10);
  odd.add(777 + (9U << 20) + 20, 10);
  file.resize(10U << 20);
  for (const IoPiece& piece : odd.get())
    for (std::uint64_t i = 0; i < piece.bytes; ++i) piece.memory[i] = pattern(piece.offset + i);
  std::vector<std::atomic<int>> times(3);
  io.write(odd.get(), [&](std::size_t i) { ++times[i]; });
  for (const auto& count : times) EXPECT_EQ(count, 1);
  odd.expect_pattern();
  Pieces back;
  back.add(777, (9U << 20) + 10);
  back.add(777 + (9U << 20) + 20, 10);
  io.read(back.get());
  back.expect_pattern();
  std::vector<std::byte> gap(10);
  file.read(777 + (9U << 20) + 10, gap);
  EXPECT_EQ(gap, std::vector<std::byte>(10, std::byte{0}));
}

TEST_P(PageIoWays, TheEndOfTheFileIsAnError) {
  const File file = make("items.npy", 10000);
  PageIo io(file, io_, options());
  Pieces fits;
  fits.add(8192, 1808, 4096);
  io.read(fits.get());
  fits.expect_pattern();
  for (const auto& [offset, bytes] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {8192, 1809}, {8192, 4096}, {9000, 2000}, {9728, 512}, {10000, 1}, {12288, 4096}, {1ULL << 40, 4096}}) {
    Pieces beyond;
    beyond.add(0, 4096);
    beyond.add(offset, bytes, 4096);
    const std::string text = error_of<FormatError>([&] { io.read(beyond.get()); });
    EXPECT_THAT(text, HasSubstr("items.npy: truncated")) << offset;
    EXPECT_THAT(text, HasSubstr("ends at byte 10000")) << offset;
  }
}

TEST_P(PageIoWays, TheFileMayGrowAndShrinkAndBeRenamedAndRemoved) {
  File file = make("f", 20000);
  PageIo io(file, io_, options());
  Pieces small;
  small.add(0, 20000);
  io.read(small.get());
  file.write(20000, pattern_of(20000, 100000));
  std::filesystem::rename(at("f"), at("g"));
  file.set_path(at("g"));
  testing::make_file(at("f"), "another file");
  Pieces grown;
  grown.add(0, 4096);
  grown.add(19000, 90000);
  io.read(grown.get());
  grown.expect_pattern();
  file.resize(30000);
  Pieces beyond;
  beyond.add(28000, 3000);
  EXPECT_THAT(error_of<FormatError>([&] { io.read(beyond.get()); }), HasSubstr("ends at byte 30000"));
  std::filesystem::remove(at("g"));
  Pieces rest;
  rest.add(1, 29999);
  io.read(rest.get());
  rest.expect_pattern();
}

TEST_P(PageIoWays, OffsetsBeyond32Bits) {
  const File file = File::open(at("sparse"), File::Mode::kCreateNew);
  constexpr std::uint64_t kBorder = 1ULL << 32;
  file.resize(3 * kBorder);
  PageIo io(file, io_, options());
  Pieces out, back;
  for (const std::uint64_t offset : {kBorder - 8192, kBorder - 4096, kBorder, kBorder + 4096, 2 * kBorder + 777}) {
    out.add(offset, offset % 4096 == 0 ? 4096 : 1000);
    back.add(offset, offset % 4096 == 0 ? 4096 : 1000);
  }
  back.add(3 * kBorder - 100, 100, 512);
  for (const IoPiece& piece : out.get())
    for (std::uint64_t i = 0; i < piece.bytes; ++i) piece.memory[i] = pattern(piece.offset + i);
  io.write(out.get());
  const auto read = back.get();
  io.read(read);
  for (const IoPiece& piece : read.first(5))
    EXPECT_EQ(std::memcmp(piece.memory, pattern_of(piece.offset, piece.bytes).data(), piece.bytes), 0) << piece.offset;
  EXPECT_EQ(read[5].memory[99], std::byte{0});
}

TEST_P(PageIoWays, ManyThreadsAtOnce) {
  constexpr std::uint64_t kEach = 1U << 20;
  constexpr std::uint64_t kStart = 128;
  const File file = make("f", kStart + 8 * kEach);
  PageIo io(file, io_, options());
  AlignedBuffer frames(1 << 20);
  io.register_frames(frames.span());
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint64_t t = 0; t < 8; ++t)
    threads.emplace_back([&, t] {
      // Its own stretch, which begins and ends inside pages of its neighbours' stretches.
      const std::uint64_t begin = kStart + t * kEach;
      std::mt19937_64 random(t);
      AlignedBuffer memory(64 << 10);
      for (int round = 0; round < 8; ++round) {
        std::vector<IoPiece> pieces;
        for (std::uint64_t i = 0; i < 15; ++i)
          pieces.push_back({begin + (i * 17 + random() % 16) * 4000, memory.data() + i * 4096, 4000, 4096});
        io.read(pieces, [&](std::size_t i) {
          wrong += std::memcmp(pieces[i].memory, pattern_of(pieces[i].offset, 4000).data(), 4000) != 0;
        });
        io.write(pieces);
      }
      const IoPiece edge{begin + kEach - 300, memory.data(), 300, 4096};
      io.read({&edge, 1});
      io.write({&edge, 1});
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  io.forget_frames();
  std::vector<std::byte> all(file.size());
  file.read(0, all);
  EXPECT_EQ(all, pattern_of(0, file.size()));
}

TEST_P(PageIoWays, NeighbouringSectorsWrittenInBothWaysAtOnce) {
  // Pages of 3584 bytes are direct, the odd bytes between them are not; all share pages of the page cache.
  constexpr std::uint64_t kBytes = 64 * 4096;
  const File file = make("f", kBytes);
  PageIo io(file, io_, options());
  for (int round = 0; round < 20; ++round) {
    const auto fill = static_cast<std::byte>(round + 1);
    std::thread direct([&] {
      AlignedBuffer memory(64 * 4096);
      std::memset(memory.data(), round + 1, memory.size());
      std::vector<IoPiece> pieces;
      for (std::uint64_t i = 0; i < 64; ++i) pieces.push_back({i * 4096, memory.data() + i * 4096, 3584, 3584});
      io.write(pieces);
    });
    AlignedBuffer memory(64 * 512);
    std::memset(memory.data(), round + 1, memory.size());
    std::vector<IoPiece> pieces;
    for (std::uint64_t i = 0; i < 64; ++i) pieces.push_back({i * 4096 + 3584, memory.data() + i * 512, 511, 512});
    io.write(pieces);
    direct.join();
    std::vector<std::byte> all(kBytes);
    const IoPiece whole{0, all.data(), kBytes, kBytes};
    io.read({&whole, 1});
    for (std::uint64_t i = 0; i < kBytes; ++i) {
      if (i % 4096 == 4095) continue;
      ASSERT_EQ(all[i], fill) << "round " << round << ", byte " << i;
    }
  }
}

TEST_P(PageIoWays, WorkIsDoneMeanwhile) {
  const File file = make("f", 8U << 20);
  PageIo io(file, io_, options());
  ThreadPool compute(2);
  Pieces pieces;
  for (std::uint64_t i = 0; i < 300; ++i) pieces.add(i * 20000, 4000);
  for (const bool some : {false, true}) {
    std::vector<std::atomic<int>> times(1001);
    io.read(some ? pieces.get() : std::span<IoPiece>(), {},
            {.count = times.size(), .grain = 10, .pool = &compute, .body = [&](std::uint64_t begin, std::uint64_t end) {
               for (std::uint64_t i = begin; i < end; ++i) ++times[i];
             }});
    for (const auto& count : times) ASSERT_EQ(count, 1);
  }
  pieces.expect_pattern();
  EXPECT_THAT(error_of<InvalidArgument>([&] {
                io.read(pieces.get(), {},
                        {.count = 5, .body = [](std::uint64_t, std::uint64_t) { throw InvalidArgument("work"); }});
              }),
              "work");
}

TEST_P(PageIoWays, WhatDoneThrowsArrivesWhenNothingIsInFlight) {
  const File file = make("f", 8U << 20);
  PageIo io(file, io_, options());
  AlignedBuffer memory(1000 * 4096);
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 1000; ++i) pieces.push_back({i * 8192, memory.data() + i * 4096, 4096, 4096});
  for (int round = 0; round < 5; ++round) {
    EXPECT_THAT(error_of<CorruptError>([&] {
                  io.read(pieces, [](std::size_t i) {
                    if (i == 3) throw CorruptError("page 3");
                  });
                }),
                "page 3");
    std::memset(memory.data(), 0x11, memory.size());
    io.read(std::span(pieces).first(1));
    EXPECT_EQ(std::count(memory.data() + 4096, memory.data() + memory.size(), std::byte{0x11}), 999 * 4096);
  }
}

TEST_P(PageIoWays, AFullFileSystemIsAnErrorNotASignal) {
  if (::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=256k") != 0) GTEST_SKIP() << "mounting is not permitted";
  {
    const File file = File::open(at("f"), File::Mode::kCreateNew);
    file.resize(1U << 20);  // holes
    PageIo io(file, io_, options());
    AlignedBuffer memory(1 << 20);
    std::memset(memory.data(), 1, memory.size());
    std::vector<IoPiece> pieces;
    for (std::uint64_t i = 0; i < 256; ++i) pieces.push_back({i * 4096, memory.data() + i * 4096, 4096, 4096});
    EXPECT_THAT(error_of<IoError>([&] { io.write(pieces); }), HasSubstr("No space left on device"));
    io.read(pieces);  // holes are read, not filled
  }
  ::umount(folder_.c_str());
}

// The rest of a request that came back short, interrupted or failed.
class Completions : public FileOps {
 public:
  std::atomic<int> result{0};  // 0: as it is; 1: half of it; negative: that error, `times` times
  std::atomic<int> times{0};
  std::atomic<int> seen{0};
  int uring_complete(int real, bool write, off_t offset, std::size_t bytes) override {
    ++seen;
    EXPECT_LE(static_cast<std::size_t>(std::max(real, 0)), bytes);
    EXPECT_GE(offset, 0);
    (void)write;
    if (times <= 0 || times.fetch_sub(1) <= 0) return real;
    return result == 1 ? real / 2 : result.load();
  }
};

class PageIoUring : public PageIoFolder {
 protected:
  // A ring, or a skip where there is none to be had.
  void SetUp() override {
    const File file = make("probe", 1);
    if (PageIo(file, io_, {.engine = IoEngine::kUring}).report().engine != IoEngine::kUring) GTEST_SKIP() << "no io_uring here";
  }
  Completions ops_;
};

TEST_F(PageIoUring, ShortAndInterruptedRequestsAreContinued) {
  const File file = make("f", 4U << 20, ops_);
  for (const bool direct : {true, false}) {
    PageIo io(file, io_, {.engine = IoEngine::kUring, .direct = direct});
    for (const int result : {1, -EINTR, -EAGAIN}) {
      SCOPED_TRACE(result);
      Pieces pieces;
      pieces.add(0, 3000, 4096);
      for (std::uint64_t i = 1; i < 300; ++i) pieces.add(i * 4096, 4096);
      for (std::uint64_t i = 300; i < 700; i += 2) pieces.add(i * 4096 + 100, 4000);
      ops_.result = result;
      ops_.times = 200;
      ops_.seen = 0;
      io.read(pieces.get());
      pieces.expect_pattern();
      EXPECT_GT(ops_.seen, 200);
      ops_.times = 200;
      io.write(pieces.get());
      pieces.expect_pattern();
      ops_.times = 0;
      Pieces back;
      back.add(0, 4U << 20);
      io.read(back.get());
      back.expect_pattern();
    }
  }
}

TEST_F(PageIoUring, AFailedRequestNamesItsRangeAndLeavesNoneInFlight) {
  const File file = make("items.npy", 4U << 20, ops_);
  PageIo io(file, io_, {.engine = IoEngine::kUring});
  AlignedBuffer memory(500 * 4096);
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 500; ++i) pieces.push_back({i * 8192, memory.data() + i * 4096, 4096, 4096});
  for (const int error : {EIO, ENOSPC}) {
    ops_.result = -error;
    ops_.times = 1;
    const std::string text = error_of<IoError>([&] { error == EIO ? io.read(pieces) : io.write(pieces); });
    EXPECT_THAT(text, HasSubstr(error == EIO ? "io_uring read " : "io_uring write "));
    EXPECT_THAT(text, HasSubstr("items.npy ["));
    EXPECT_THAT(text, HasSubstr(", +4096): "));
    std::memset(memory.data(), 0x22, memory.size());
    io.read(std::span(pieces).first(1));  // the ring goes on
    EXPECT_EQ(std::memcmp(memory.data(), pattern_of(0, 4096).data(), 4096), 0);
    EXPECT_EQ(std::count(memory.data() + 4096, memory.data() + memory.size(), std::byte{0x22}), 499 * 4096);
    io.read(pieces);
  }
}

TEST_F(PageIoUring, ADirectRequestThatIsRefusedGoesThroughThePageCache) {
  const File file = make("f", 1U << 20, ops_);
  PageIo io(file, io_, {.engine = IoEngine::kUring, .direct = true});
  if (!io.report().direct_reads) GTEST_SKIP() << "no direct I/O here";
  Pieces pieces;
  for (std::uint64_t i = 0; i < 100; ++i) pieces.add(i * 8192, 4096);
  ops_.result = -EINVAL;
  ops_.times = 1;
  io.read(pieces.get());
  pieces.expect_pattern();
  EXPECT_FALSE(io.report().direct_reads);
  EXPECT_TRUE(io.report().direct_writes);
  EXPECT_THAT(io.report().note, HasSubstr("direct read: Invalid argument"));
}

TEST_F(PageIoUring, RegisteredFrames) {
  const File file = make("f", 4U << 20);
  PageIo io(file, io_, {.engine = IoEngine::kUring});
  AlignedBuffer slab(128 * 4096);
  io.register_frames(slab.span());
  EXPECT_TRUE(io.report().fixed_buffers);
  AlignedBuffer other(4096);
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 128; ++i) pieces.push_back({i * 8192, slab.data() + (127 - i) * 4096, 4096, 4096});
  pieces.push_back({3U << 20, other.data(), 4096, 4096});  // not of the slab
  for (int round = 0; round < 2; ++round) {
    std::memset(slab.data(), 0, slab.size());
    io.read(pieces);
    for (const IoPiece& piece : pieces) ASSERT_EQ(std::memcmp(piece.memory, pattern_of(piece.offset, 4096).data(), 4096), 0);
    std::memset(slab.data(), 0x33 + round, slab.size());
    io.write(std::span(pieces).first(128));
    std::vector<std::byte> back(4096);
    file.read(127 * 8192, back);
    ASSERT_EQ(back, std::vector<std::byte>(4096, static_cast<std::byte>(0x33 + round)));
    for (IoPiece& piece : pieces) std::memcpy(piece.memory, pattern_of(piece.offset, 4096).data(), 4096);
    io.write(pieces);
  }
  io.forget_frames();
  EXPECT_FALSE(io.report().fixed_buffers);
  io.read(pieces);
}

TEST_F(PageIoUring, FramesAreForgottenWhileOthersRead) {
  const File file = make("f", 4U << 20);
  PageIo io(file, io_, {.engine = IoEngine::kUring});
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t)
    readers.emplace_back([&] {
      while (!stop) {
        Pieces pieces;
        for (std::uint64_t i = 0; i < 50; ++i) pieces.add(i * 8192, 4096);
        io.read(pieces.get());
        pieces.expect_pattern();
      }
    });
  for (int round = 0; round < 20; ++round) {
    AlignedBuffer slab(64 * 4096);
    io.register_frames(slab.span());
    std::vector<IoPiece> pieces;
    for (std::uint64_t i = 0; i < 64; ++i) pieces.push_back({i * 8192, slab.data() + i * 4096, 4096, 4096});
    io.read(pieces);
    for (const IoPiece& piece : pieces) EXPECT_EQ(std::memcmp(piece.memory, pattern_of(piece.offset, 4096).data(), 4096), 0);
    io.forget_frames();
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

// io_uring is refused: the whole of it, or the registration of buffers.
class RefusesUring final : public FileOps {
 public:
  int setup_error = 0, register_error = 0;
  int uring_setup(unsigned entries, io_uring* ring, io_uring_params* parameters) override {
    if (setup_error == 0) return FileOps::uring_setup(entries, ring, parameters);
    errno = setup_error;
    return -1;
  }
  int uring_register_buffers(io_uring* ring, const iovec* pieces, unsigned count) override {
    if (register_error == 0) return FileOps::uring_register_buffers(ring, pieces, count);
    errno = register_error;
    return -1;
  }
};

TEST_F(PageIoFolder, WithoutUringThreadsDoIt) {
  RefusesUring ops;
  const File file = make("f", 1U << 20, ops);
  for (const int error : {EPERM, ENOSYS, ENOMEM}) {
    ops.setup_error = error;
    PageIo io(file, io_, {.engine = IoEngine::kUring});
    const PageIoReport report = io.report();
    EXPECT_EQ(report.engine, IoEngine::kThreads);
    EXPECT_THAT(report.note, HasSubstr("io_uring_setup: " + std::generic_category().message(error)));
    io.register_frames({});
    Pieces pieces;
    for (std::uint64_t i = 0; i < 100; ++i) pieces.add(i * 8192, 4096);
    io.read(pieces.get());
    pieces.expect_pattern();
    io.forget_frames();
  }
}

TEST_F(PageIoUring, UnregisteredBuffersDoAsWell) {
  RefusesUring ops;
  ops.register_error = ENOMEM;
  const File file = make("f", 1U << 20, ops);
  PageIo io(file, io_, {.engine = IoEngine::kUring});
  AlignedBuffer slab(64 * 4096);
  io.register_frames(slab.span());
  EXPECT_EQ(io.report().engine, IoEngine::kUring);
  EXPECT_FALSE(io.report().fixed_buffers);
  EXPECT_THAT(io.report().note, HasSubstr("io_uring_register_buffers: Cannot allocate memory"));
  const std::vector<IoPiece> pieces{{4096, slab.data(), 64 * 4096, 64 * 4096}};
  io.read(pieces);
  EXPECT_EQ(std::memcmp(slab.data(), pattern_of(4096, slab.size()).data(), slab.size()), 0);
  io.forget_frames();
}

TEST_F(PageIoUring, ALimitOnLockedMemoryCostsFixedBuffersOnly) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs another user, to whom the limit applies";
  const std::string name = at("f").string();
  { make("f", 1U << 20); }
  std::filesystem::permissions(folder_, std::filesystem::perms::all);
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit little{256 << 10, 256 << 10};  // a ring counts too
    if (::setrlimit(RLIMIT_MEMLOCK, &little) != 0 || ::setresuid(65534, 65534, 65534) != 0) ::_exit(9);
    ::prctl(PR_SET_DUMPABLE, 1);
    int problem = 0;
    {
      const File file = File::open(name, File::Mode::kRead);
      ThreadPool alone(1);
      PageIo io(file, alone, {.engine = IoEngine::kUring});
      if (io.report().engine != IoEngine::kUring) ::_exit(8);
      AlignedBuffer slab(200 * 4096);
      io.register_frames(slab.span());
      const std::vector<IoPiece> pieces{{4096, slab.data(), slab.size(), slab.size()}};
      io.read(pieces);
      if (std::memcmp(slab.data(), pattern_of(4096, slab.size()).data(), slab.size()) != 0) problem = 1;
      if (io.report().fixed_buffers || io.report().note.find("io_uring_register_buffers") == std::string::npos) problem = 2;
      io.forget_frames();
    }
    ::_exit(problem);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) >= 8) GTEST_SKIP() << "another user gets no ring";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(PageIoUring, AChildOfAForkIsToldAndDisturbsNobody) {
  const File file = make("f", 1U << 20);
  ThreadPool alone(1);
  auto io = std::make_unique<PageIo>(file, alone, PageIoOptions{.engine = IoEngine::kUring});
  Pieces pieces;
  for (std::uint64_t i = 0; i < 100; ++i) pieces.add(i * 8192, 4096);
  io->read(pieces.get());
  for (int round = 0; round < 3; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      int problem = 1;
      try {
        io->read(pieces.get());
      } catch (const ClosedError&) {
        problem = 0;
      } catch (...) {
      }
      io->forget_frames();
      io.reset();
      ::_exit(problem);
    }
    io->read(pieces.get());  // while the child takes its copy apart
    pieces.expect_pattern();
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    io->read(pieces.get());
    pieces.expect_pattern();
  }
}

TEST_F(PageIoUring, MoreCallersThanRings) {
  const File file = make("f", 1U << 20);
  PageIo io(file, io_, {.engine = IoEngine::kUring, .depth = 4});
  std::vector<std::thread> threads;
  for (int t = 0; t < 24; ++t)
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        Pieces pieces;
        for (std::uint64_t i = 0; i < 20; ++i) pieces.add(i * 8192 + 100, 4000);
        io.read(pieces.get());
        pieces.expect_pattern();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(io.report().memory_bytes, 0U);
}

// Half of what was asked, one error after many calls.
class Faults final : public FileOps {
 public:
  std::atomic<bool> half{false};
  std::atomic<int> error{0};
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    if (error != 0) return errno = error, -1;
    return FileOps::pread(fd, buffer, half && bytes > 1 ? bytes / 2 : bytes, offset);
  }
  ssize_t preadv(int fd, const iovec* pieces, int count, off_t offset) override {
    if (error != 0) return errno = error, -1;
    return FileOps::preadv(fd, pieces, half ? 1 : count, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (error != 0) return errno = error, -1;
    return FileOps::pwrite(fd, buffer, half && bytes > 1 ? bytes / 2 : bytes, offset);
  }
};

TEST_F(PageIoFolder, InjectedFaultsArriveThroughThreads) {
  Faults ops;
  const File file = make("items.npy", 1U << 20, ops);
  PageIo io(file, io_);
  EXPECT_EQ(io.report().engine, IoEngine::kThreads);
  EXPECT_FALSE(io.report().direct_reads);
  Pieces pieces;
  for (std::uint64_t i = 0; i < 100; ++i) pieces.add(i * 4096, 4096);
  for (std::uint64_t i = 100; i < 200; i += 2) pieces.add(i * 4096 + 5, 4000);
  ops.half = true;
  io.read(pieces.get());
  pieces.expect_pattern();
  io.write(pieces.get());
  ops.half = false;
  Pieces all;
  all.add(0, 1U << 20);
  io.read(all.get());
  all.expect_pattern();
  ops.error = EIO;
  EXPECT_THAT(error_of<IoError>([&] { io.read(pieces.get()); }), HasSubstr("items.npy ["));
  ops.error = ENOSPC;
  EXPECT_EQ(error_of<IoError>([&] { io.write(pieces.get()); }).find("pwrite "), 0U);
}

// Refuses one direct write, and lets the next wait until somebody else has written, or has not for a while.
class RefusesOneWrite final : public FileOps {
 public:
  std::atomic<bool> armed{false}, waiting{false}, others_done{false};
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (armed && (::fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
      if (!refused_.exchange(true)) return errno = EINVAL, -1;
      waiting = true;
      for (int i = 0; i < 300 && !others_done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return FileOps::pwrite(fd, buffer, bytes, offset);
  }

 private:
  std::atomic<bool> refused_{false};
};

TEST_F(PageIoFolder, AWriteBesideOneThatIsRefusedKeepsItsPartOfASector) {
  RefusesOneWrite ops;
  const File file = make("f", 1U << 20, ops);
  ThreadPool one{1};
  PageIo io(file, one, {.engine = IoEngine::kThreads, .direct = true});
  if (!io.report().direct_writes) GTEST_SKIP() << "no direct writes here";
  // Two hulls: the first is refused, the second has read the sector in which `mine` ends, and waits.
  Pieces theirs, mine;
  theirs.add(100, 1000);
  theirs.add(512 * 100 + 100, 1000);  // ends 76 bytes behind the begin of a sector
  mine.add(512 * 100 + 1100, 2000);
  const auto fill = [](Pieces& pieces, std::byte value) {
    for (const IoPiece& piece : pieces.get()) std::fill_n(piece.memory, piece.bytes, value);
  };
  fill(theirs, std::byte{1});
  fill(mine, std::byte{2});
  ops.armed = true;
  std::thread first([&] { io.write(theirs.get()); });
  while (!ops.waiting) std::this_thread::yield();
  std::thread second([&] {
    io.write(mine.get());
    ops.others_done = true;
  });
  first.join();
  second.join();
  std::vector<std::byte> found(3000);
  file.read(512 * 100 + 100, found);
  EXPECT_EQ(std::count(found.begin(), found.begin() + 1000, std::byte{1}), 1000);
  EXPECT_EQ(std::count(found.begin() + 1000, found.end(), std::byte{2}), 2000);
}

TEST_F(PageIoFolder, NeighboursAreOneRequest) {
  const File file = make("f", 1U << 20);
  for (const IoEngine engine : {IoEngine::kUring, IoEngine::kThreads}) {
    PageIo io(file, io_, {.engine = engine});
    Pieces pieces;
    for (std::uint64_t i = 0; i < 50; ++i) pieces.add(i * 4096, 4096);
    for (std::uint64_t i = 60; i < 70; i += 2) pieces.add(i * 4096, 4096);
    io.read(pieces.get());
    EXPECT_EQ(io.report().read_requests, 6U);
    io.write(pieces.get());
    EXPECT_EQ(io.report().write_requests, 6U);
    EXPECT_EQ(io.report().bounced_bytes, 0U);
  }
}

TEST_F(PageIoFolder, ThePageCacheStaysSmall) {
  constexpr std::uint64_t kBytes = 96U << 20;
  const File file = File::open(at("f"), File::Mode::kCreateNew);
  file.resize(kBytes);
  if (lives_in_memory(file)) GTEST_SKIP() << "the file lies in memory";
  for (const bool direct : {true, false}) {
    PageIo io(file, io_, {.engine = IoEngine::kThreads, .direct = direct});
    std::vector<std::byte> memory(1U << 20);
    for (std::uint64_t at = 0; at + memory.size() < kBytes; at += memory.size()) {
      const IoPiece piece{at + 7, memory.data(), memory.size(), memory.size()};
      io.write({&piece, 1});
      io.read({&piece, 1});
    }
    EXPECT_LE(CachedFile(file, false).resident_share() * kBytes, 40.0 * (1U << 20)) << direct;
  }
}

TEST_F(PageIoFolder, WhatIsInThePageCacheIsCopiedFromThere) {
  const File file = make("f", (2U << 20) + 100);
  file.sync();
  CachedFile look(file, false);
  if (look.resident_share() == 0) GTEST_SKIP() << look.why();
  Pieces pieces;
  pieces.add(0, 4096);
  pieces.add(5000, (2U << 20) - 5000);
  pieces.add(2U << 20, 100, 4096);
  {
    PageIo io(file, io_, {.prefer_cached = true});
    EXPECT_EQ(io.report().engine, IoEngine::kCached);
    io.read(pieces.get());
    pieces.expect_pattern();
    EXPECT_EQ(io.report().cached_bytes, 4096 + (2U << 20) - 5000 + 100);
    EXPECT_EQ(io.report().read_requests, 0U);
  }
  if (lives_in_memory(file)) return;
  // What is not there is read, without a page fault that would have to wait for the disk.
  ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  PageIo io(file, io_, {.engine = IoEngine::kCached});
  io.read(pieces.get());
  pieces.expect_pattern();
  EXPECT_GT(io.report().read_requests, 0U);
}

// Cuts the file short as the first read is under way.
class CutShort final : public FileOps {
 public:
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    cut(fd);
    return FileOps::pread(fd, buffer, bytes, offset);
  }
  ssize_t preadv_cached(int fd, const iovec* pieces, int count, off_t offset) override {
    cut(fd);
    return FileOps::preadv_cached(fd, pieces, count, offset);
  }
  std::atomic<bool> armed{false};

 private:
  void cut(int fd) {
    if (armed.exchange(false)) {
      ASSERT_EQ(::ftruncate(fd, 5000), 0);
    }
  }
};

TEST_F(PageIoFolder, AFileCutShortWhileItIsCopiedIsTruncatedAndNoSignal) {
  CutShort ops;
  const File file = make("f", 100000, ops);
  PageIo io(file, io_, {.engine = IoEngine::kCached});
  Pieces pieces;
  for (std::uint64_t at = 0; at < 81920; at += 8192) pieces.add(at, 8192);
  io.read(pieces.get());
  pieces.expect_pattern();
  ops.armed = true;
  EXPECT_THAT(error_of<FormatError>([&] { io.read(pieces.get()); }), AllOf(HasSubstr("truncated"), HasSubstr(at("f").string())));
}

TEST_F(PageIoFolder, TheProbeChoosesByTheFile) {
  const File fresh = File::open(at("fresh"), File::Mode::kCreateNew);
  fresh.resize(1ULL << 40);
  const PageIoReport report = PageIo(fresh, io_).report();
  if (lives_in_memory(fresh)) {
    EXPECT_EQ(report.engine, IoEngine::kCached);
    return;
  }
  EXPECT_NE(report.engine, IoEngine::kCached);
  EXPECT_EQ(report.engine == IoEngine::kThreads, report.note.find("io_uring") != std::string::npos);
  EXPECT_EQ(report.read_requests, 0U);
  // With data in it: whatever is chosen, its reads are right and few.
  const File full = make("full", 8U << 20);
  full.sync();
  PageIo io(full, io_);
  EXPECT_LE(io.report().read_requests, 200U);
  Pieces pieces;
  for (std::uint64_t i = 0; i < 100; ++i) pieces.add(i * 8192, 4096);
  io.read(pieces.get());
  pieces.expect_pattern();
}

TEST_F(PageIoFolder, AFileInMemoryIsNeverDirect) {
  const std::filesystem::path shm = "/dev/shm";
  std::error_code error;
  if (!std::filesystem::is_directory(shm, error)) GTEST_SKIP();
  const std::filesystem::path name = shm / ("embermap-test-" + std::to_string(::getpid()));
  struct Remove {
    const std::filesystem::path& name;
    ~Remove() { std::filesystem::remove(name); }
  } const remove{name};
  const File file = File::open(name, File::Mode::kCreateNew);
  if (!lives_in_memory(file)) GTEST_SKIP();
  file.write(0, pattern_of(0, 100000));
  PageIo io(file, io_, {.direct = true});
  EXPECT_EQ(io.report().engine, IoEngine::kCached);
  EXPECT_FALSE(io.report().direct_reads || io.report().direct_writes);
  EXPECT_THAT(io.report().note, HasSubstr("direct I/O"));
  Pieces pieces;
  pieces.add(1, 99999);
  io.read(pieces.get());
  pieces.expect_pattern();
  EXPECT_EQ(io.report().cached_bytes, 99999U);
  EXPECT_EQ(io.report().read_requests, 0U);
}

TEST_F(PageIoFolder, NamesAndOptionsAreChecked) {
  for (const IoEngine engine : {IoEngine::kUring, IoEngine::kThreads, IoEngine::kCached})
    EXPECT_EQ(parse_io_engine(io_engine_name(engine)), engine);
  EXPECT_THAT(error_of<InvalidArgument>([] { parse_io_engine("aio"); }), HasSubstr("io_uring, threads, cached"));
  const File file = make("f", 1);
  EXPECT_THAT(error_of<InvalidArgument>([&] { PageIo(file, io_, {.depth = 0}); }), HasSubstr("depth 0"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { PageIo(file, io_, {.depth = 4097}); }), HasSubstr("depth 4097"));
}

TEST_F(PageIoFolder, AReadOnlyFileIsReadAndNotWritten) {
  { make("f", 100000); }
  const File file = File::open(at("f"), File::Mode::kRead);
  for (const IoEngine engine : {IoEngine::kUring, IoEngine::kThreads, IoEngine::kCached}) {
    PageIo io(file, io_, {.engine = engine});
    EXPECT_FALSE(io.report().direct_writes);
    Pieces pieces;
    pieces.add(0, 100000);
    io.read(pieces.get());
    pieces.expect_pattern();
    EXPECT_THAT(error_of<IoError>([&] { io.write(pieces.get()); }), HasSubstr("Bad file descriptor"));
  }
}

}  // namespace
}  // namespace embermap
