#include "io/streams.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/size_text.hpp"
#include "io/direct_file.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;

constexpr std::uint64_t kBytes = 17_MiB + 123;  // more than what is worth a thread, and no whole number of blocks

// Says no to the n-th call that moves bytes, and all after it if `always`.
class Faults final : public FileOps {
 public:
  enum class Kind { kNone, kShort, kInterrupted, kIoError, kFull, kRefused };
  explicit Faults(Kind kind, int at = 0, bool always = true) : kind_{kind}, at_{at}, always_{always} {}

  // Nothing is in the page cache: what was just written would be, and no direct read be asked for.
  ssize_t preadv_cached(int, const struct iovec*, int, off_t) override {
    errno = EAGAIN;
    return -1;
  }
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    if (!fails()) return FileOps::pread(fd, buffer, bytes, offset);
    if (kind_ == Kind::kShort && bytes > 1) return FileOps::pread(fd, buffer, bytes / 2, offset);
    return answer([&] { return FileOps::pread(fd, buffer, bytes, offset); });
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (!fails()) return FileOps::pwrite(fd, buffer, bytes, offset);
    if (kind_ == Kind::kShort && bytes > 1) return FileOps::pwrite(fd, buffer, bytes / 2, offset);
    return answer([&] { return FileOps::pwrite(fd, buffer, bytes, offset); });
  }
  int calls() const { return calls_; }
  void arm() { calls_ = 0, armed_ = true; }

 private:
  bool fails() {
    if (!armed_) return false;
    const int call = calls_++;
    return always_ ? call >= at_ : call == at_;
  }
  template <class Real>
  ssize_t answer(Real real) {
    switch (kind_) {
      case Kind::kInterrupted: errno = EINTR; return calls_ % 2 == 0 ? -1 : real();
      case Kind::kIoError: errno = EIO; return -1;
      case Kind::kFull: errno = ENOSPC; return -1;
      // Only of a direct descriptor, which is the first to be asked: then as the system does it.
      case Kind::kRefused: errno = EINVAL; return calls_ == at_ + 1 ? -1 : real();
      default: return real();
    }
  }

  Kind kind_;
  int at_;
  bool always_;
  std::atomic<int> calls_{0};
  std::atomic<bool> armed_{false};
};

std::string pattern(std::uint64_t bytes) {
  std::string out(bytes, '\0');
  std::uint64_t state = 88172645463325252ULL;
  for (std::uint64_t i = 0; i + 8 <= bytes; i += 8) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(out.data() + i, &state, 8);
  }
  return out;
}

class StreamsTest : public testing::FolderTest {
 protected:
  bool in_memory() const { return lives_in_memory(File::open(at("x"), File::Mode::kRead)); }
  StreamedFile open(FileOps& ops = FileOps::system()) const { return StreamedFile(File::open(at("x"), File::Mode::kRead, ops)); }
  static std::string read(StreamedFile& file, std::uint64_t begin, std::uint64_t end, std::uint64_t step) {
    std::string out(end - begin, '\0');
    for (std::uint64_t at = begin; at < end; at += step) {
      const std::uint64_t now = std::min(step, end - at);
      file.read(at, std::as_writable_bytes(std::span(out)).subspan(at - begin, now));
    }
    return out;
  }
};

TEST_F(StreamsTest, WhatIsReadAheadIsWhatTheFileHolds) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{128}, 4_KiB, 4_KiB + 1, 1_MiB - 1})
    for (const std::uint64_t memory : {1_MiB, 3_MiB, 16_MiB, 64_MiB}) {
      StreamedFile file = open();
      const std::uint64_t taken = file.read_ahead(begin, kBytes, memory);
      EXPECT_LE(taken, memory);
      if (!in_memory()) {
        EXPECT_GT(taken, 0U);
        EXPECT_THAT(file.how(), ::testing::AnyOf("direct", HasSubstr("buffered (")));
      }
      ASSERT_TRUE(read(file, begin, kBytes, 777'777) == data.substr(begin)) << begin << ' ' << memory;
    }
}

TEST_F(StreamsTest, GapsArePassedOverAndOtherPlacesAreRead) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  StreamedFile file = open();
  file.read_ahead(0, kBytes, 2_MiB);
  for (const std::uint64_t at : {std::uint64_t{3}, 1_MiB, 9_MiB + 5, 9_MiB + 205})
    EXPECT_EQ(read(file, at, at + 100, 100), data.substr(at, 100));
  EXPECT_EQ(read(file, 7, 107, 100), data.substr(7, 100));  // back: nothing is ahead any more
  EXPECT_TRUE(read(file, 0, kBytes, 1_MiB) == data);
  file.read_ahead(1_MiB, kBytes, 2_MiB);  // and once more
  EXPECT_TRUE(read(file, 1_MiB, kBytes, 3_MiB) == data.substr(1_MiB));
}

TEST_F(StreamsTest, LittleIsReadByTheCaller) {
  make_file(at("x"), pattern(1_MiB));
  StreamedFile file = open();
  EXPECT_EQ(file.read_ahead(0, 1_MiB, 64_MiB), 0U);
  EXPECT_EQ(file.read_ahead(0, 0, 64_MiB), 0U);
  EXPECT_EQ(read(file, 0, 1_MiB, 1_MiB), file_text(at("x")));
  EXPECT_EQ(file.how(), "");
}

TEST_F(StreamsTest, FilesThatEndEarlyAreTruncated) {
  make_file(at("x"), pattern(kBytes));
  StreamedFile file = open();
  file.read_ahead(0, kBytes + 40_MiB, 4_MiB);
  EXPECT_THAT(error_of<FormatError>([&] { read(file, 0, kBytes + 1_MiB, 1_MiB); }), HasSubstr("truncated"));
  EXPECT_EQ(read(file, 5, 15, 10), pattern(kBytes).substr(5, 10));
}

TEST_F(StreamsTest, FaultsOfReadingAreToldOrOvercome) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  using Kind = Faults::Kind;
  for (const int at : {0, 1, 5})
    for (const Kind kind : {Kind::kShort, Kind::kInterrupted, Kind::kRefused}) {
      Faults ops(kind, at);
      StreamedFile file = open(ops);
      ops.arm();
      file.read_ahead(0, kBytes, 4_MiB);
      ASSERT_TRUE(read(file, 0, kBytes, 1_MiB + 1) == data) << static_cast<int>(kind) << ' ' << at;
      EXPECT_GT(ops.calls(), at);
    }
  for (const int at : {1, 6, 15}) {
    Faults ops(Kind::kIoError, at);
    StreamedFile file = open(ops);
    file.read_ahead(0, kBytes, 4_MiB);
    ops.arm();
    const std::string text = error_of<IoError>([&] { read(file, 0, kBytes, 1_MiB); });
    EXPECT_THAT(text, HasSubstr("pread"));
    EXPECT_THAT(text, HasSubstr("x ["));
  }
}

TEST_F(StreamsTest, AForkedChildReadsOn) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  StreamedFile file = open();
  file.read_ahead(0, kBytes, 2_MiB);
  EXPECT_TRUE(read(file, 0, 1_MiB, 1_MiB) == data.substr(0, 1_MiB));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);  // to wait for a thread that is not there would not end
    ::_exit(read(file, 1_MiB, kBytes, 1_MiB) == data.substr(1_MiB) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(read(file, 1_MiB, kBytes, 1_MiB) == data.substr(1_MiB));
}

TEST_F(StreamsTest, HolesAreZerosAndFilesOfHolesAreSparse) {
  {
    const File out = File::open(at("x"), File::Mode::kCreateNew);
    out.resize(200_MiB);
    out.write(100_MiB + 3, "here");
    out.write(200_MiB - 4, "end!");
  }
  StreamedFile file = open();
  file.read_ahead(0, 200_MiB, 16_MiB);
  const std::string read_back = read(file, 0, 200_MiB, 5_MiB);
  EXPECT_EQ(read_back.substr(100_MiB + 3, 4), "here");
  EXPECT_EQ(read_back.substr(200_MiB - 4), "end!");
  EXPECT_EQ(std::count(read_back.begin(), read_back.end(), '\0'), static_cast<std::ptrdiff_t>(200_MiB - 8));
  if (!in_memory()) {
    EXPECT_TRUE(file.sparse());
  }
}

TEST_F(StreamsTest, WhatIsWrittenBehindIsInTheFile) {
  for (const std::uint64_t bytes : {kBytes, 16_MiB - 1, 16_MiB, 16_MiB + 1, 20_MiB - 128})
    for (const std::uint64_t begin : {0U, 128U, 4096U})
      for (const std::uint64_t memory : {1_MiB, 16_MiB}) {
        std::filesystem::remove(at("x"));
        const std::string data = pattern(bytes);
        {
          const File file = File::open(at("x"), File::Mode::kCreateNew);
          file.write(0, std::string(begin, 'h'));
          StreamWriter out(file, begin);
          EXPECT_LE(out.write_behind(bytes, memory), memory);
          const auto all = std::as_bytes(std::span(data));
          const std::uint64_t most = 1'234'567;
          for (std::uint64_t at = 0; at < bytes; at += most) {
            out.write(all.subspan(at, std::min(most, bytes - at)));
            if (at == 5 * most) out.flush();  // in the middle of a block
          }
          out.flush();
          EXPECT_EQ(out.position(), begin + bytes);
        }
        ASSERT_TRUE(file_text(at("x")) == std::string(begin, 'h') + data) << bytes << ' ' << begin << ' ' << memory;
      }
}

TEST_F(StreamsTest, FaultsOfWritingAreToldOrOvercome) {
  const std::string data = pattern(kBytes);
  using Kind = Faults::Kind;
  const auto write = [&](Faults& ops) {
    std::filesystem::remove(at("x"));
    const File file = File::open(at("x"), File::Mode::kCreateNew, ops);
    StreamWriter out(file, 0);
    out.write_behind(kBytes, 4_MiB);
    ops.arm();
    const auto all = std::as_bytes(std::span(data));
    for (std::uint64_t at = 0; at < kBytes; at += 1_MiB) out.write(all.subspan(at, std::min(1_MiB, kBytes - at)));
    out.flush();
  };
  for (const int at : {0, 1, 5})
    for (const Kind kind : {Kind::kShort, Kind::kInterrupted, Kind::kRefused}) {
      Faults ops(kind, at);
      write(ops);
      ASSERT_TRUE(file_text(this->at("x")) == data) << static_cast<int>(kind) << ' ' << at;
    }
  for (const int at : {0, 3, 9}) {
    Faults full(Kind::kFull, at), broken(Kind::kIoError, at);
    EXPECT_THAT(error_of<IoError>([&] { write(full); }), HasSubstr("No space left"));
    EXPECT_THAT(error_of<IoError>([&] { write(broken); }), HasSubstr("Input/output error"));
  }
}

TEST_F(StreamsTest, ZerosStayHolesWhereTheyMay) {
  std::string data(40_MiB + 5, '\0');
  data[10] = 'a';
  data[17_MiB] = 'b';
  for (const bool behind : {false, true}) {
    std::filesystem::remove(at("x"));
    const File file = File::open(at("x"), File::Mode::kCreateNew);
    StreamWriter out(file, 0, /*zero_from=*/0);
    if (behind) out.write_behind(data.size(), 16_MiB);
    out.write(std::as_bytes(std::span(data)));
    out.flush();
    EXPECT_TRUE(file_text(at("x")) == data);
    if (!in_memory()) {
      EXPECT_LT(file.status().st_blocks * 512, 1 << 20);
    }
  }
  // Where the file is not known to be zero, they are written.
  make_file(at("x"), std::string(40_MiB + 5, 'x'));
  const File file = File::open(at("x"), File::Mode::kReadWrite);
  StreamWriter out(file, 0);
  out.write(std::as_bytes(std::span(data)));
  out.flush();
  EXPECT_TRUE(file_text(at("x")) == data);
}

// All of `data` from byte `begin` on through views, to `to` from byte `at` on.
std::uint64_t copy_views(StreamedFile& from, std::uint64_t begin, std::uint64_t end, StreamWriter& to, std::uint64_t most) {
  std::uint64_t pieces = 0;
  for (std::uint64_t at = begin; at < end; ++pieces) {
    const std::span<const std::byte> piece = from.view(at, std::min(most, end - at));
    if (piece.empty()) throw FormatError("x", "has nothing to show");
    to.write_view(piece);
    at += piece.size();
  }
  return pieces;
}

TEST_F(StreamsTest, ViewsAreWhatIsReadWhereverTheyGo) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  if (in_memory()) GTEST_SKIP() << "nothing is read ahead of files in memory";
  // Places that fit (equal in 4 KiB units), and others; pieces that end with blocks, and inside of them.
  for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{128}, 4_KiB + 1})
    for (const std::uint64_t shift : {std::uint64_t{0}, 4_KiB, std::uint64_t{8}, std::uint64_t{512}})
      for (const std::uint64_t most : {kBytes, 1_MiB + 3})
        for (const std::uint64_t memory : {1_MiB, 16_MiB}) {
          StreamedFile from = open();
          ASSERT_GT(from.read_ahead(begin, kBytes, memory), 0U);
          std::error_code ignored;
          std::filesystem::remove(at("y"), ignored);
          {
            const File file = File::open(at("y"), File::Mode::kCreateNew);
            file.write(0, std::string(begin + shift, '.'));
            StreamWriter to(file, begin + shift);
            ASSERT_GT(to.write_behind(kBytes - begin, memory), 0U);
            EXPECT_GE(copy_views(from, begin, kBytes, to, most), kBytes / std::min(most, memory));
            // And more behind them, which goes by the ring.
            to.write(std::as_bytes(std::span(data)).first(100));
            to.flush();
            EXPECT_EQ(to.position(), kBytes + shift + 100);
            file.sync();
          }
          ASSERT_TRUE(file_text(at("y")) == std::string(begin + shift, '.') + data.substr(begin) + data.substr(0, 100))
              << begin << ' ' << shift << ' ' << most << ' ' << memory;
        }
}

TEST_F(StreamsTest, WhatTheRingHasComesBeforeViews) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  if (in_memory()) GTEST_SKIP() << "nothing is read ahead of files in memory";
  StreamedFile from = open();
  from.read_ahead(0, kBytes, 4_MiB);
  const File file = File::open(at("y"), File::Mode::kCreateNew);
  StreamWriter to(file, 0);
  to.write_behind(2 * kBytes, 4_MiB);
  to.write(std::as_bytes(std::span(data)).first(4_KiB));
  copy_views(from, 0, kBytes, to, kBytes);
  to.flush();
  EXPECT_TRUE(file_text(at("y")) == data.substr(0, 4_KiB) + data);
}

TEST_F(StreamsTest, ThereIsNothingToSeeOfWhatIsNotAhead) {
  make_file(at("x"), pattern(kBytes));
  StreamedFile file = open();
  EXPECT_TRUE(file.view(0, 100).empty());
  file.read_ahead(1_MiB, kBytes, 2_MiB);
  EXPECT_TRUE(file.view(5, 100).empty());
  if (!in_memory()) {
    EXPECT_FALSE(file.view(2_MiB, 100).empty());
    EXPECT_TRUE(file.view(1_MiB, 100).empty());  // back
  }
  EXPECT_EQ(read(file, 5, 15, 10), pattern(kBytes).substr(5, 10));
}

TEST_F(StreamsTest, FaultsOfWritingViewsAreToldOrOvercome) {
  const std::string data = pattern(kBytes);
  make_file(at("x"), data);
  if (in_memory()) GTEST_SKIP() << "nothing is read ahead of files in memory";
  using Kind = Faults::Kind;
  for (const Kind kind : {Kind::kShort, Kind::kInterrupted, Kind::kIoError, Kind::kFull, Kind::kRefused})
    for (const int call : {0, 1, 3}) {
      Faults faults(kind, call, /*always=*/kind == Kind::kInterrupted);
      StreamedFile from = open();
      from.read_ahead(0, kBytes, 4_MiB);
      std::error_code ignored;
      std::filesystem::remove(at("y"), ignored);
      const File file = File::open(at("y"), File::Mode::kCreateNew, faults);
      StreamWriter to(file, 0);
      to.write_behind(kBytes, 4_MiB);
      faults.arm();
      const auto copy = [&] {
        copy_views(from, 0, kBytes, to, kBytes);
        to.flush();
      };
      if (kind == Kind::kIoError || kind == Kind::kFull) {
        EXPECT_THAT(error_of<IoError>(copy), HasSubstr("pwrite"));
        continue;
      }
      copy();
      EXPECT_GT(faults.calls(), call);
      ASSERT_TRUE(file_text(at("y")) == data) << static_cast<int>(kind) << ' ' << call;
    }
}

}  // namespace
}  // namespace embermap
