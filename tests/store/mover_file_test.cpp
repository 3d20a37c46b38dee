// cuda.json: a cache that may be missing, old, damaged or hostile without anybody noticing more than a second of measuring.
#include "store/mover_file.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>

#include "tests/store/store_fixture.hpp"

namespace embermap::test {
namespace {

constexpr std::uint64_t kMost = ~std::uint64_t{0};

// Every way of so many threads, with rates that are whole numbers, as the file has them.
MoverMeasurement measured(std::uint64_t rows, unsigned threads = 4, bool fetch = true, std::uint64_t pool_bytes = 1U << 30) {
  MoverMeasurement out{.of = {fetch, rows, 512, pool_bytes, threads}, .rates = {}};
  double rate = 1e9;
  for (const MoverWay& way : mover_ways(threads))
    out.rates.push_back({way, rate += 123'456'789, way.host_threads == 0 ? 0 : 0.625});
  return out;
}

bool may_be_used(const MoverMeasurement& one) {
  const std::vector<MoverWay> ways = mover_ways(one.of.threads);
  return !one.rates.empty() && std::all_of(one.rates.begin(), one.rates.end(), [&](const MoverRate& rate) {
    return std::find(ways.begin(), ways.end(), rate.way) != ways.end() && std::isfinite(rate.bytes_per_second) &&
           rate.bytes_per_second >= 0 && rate.thread_share >= 0 && rate.thread_share <= 1;
  });
}

std::string way_text(std::string_view blocks = "4", std::string_view block_threads = "1024", std::string_view host_threads = "0",
                     std::string_view rate = "5e10", std::string_view share = "0") {
  return fmt::format(R"({{"blocks": {}, "block_threads": {}, "host_threads": {}, "bytes_per_second": {}, "thread_share": {}}})",
                     blocks, block_threads, host_threads, rate, share);
}

struct Text {
  std::string direction = R"("fetch")", rows = "1000", row_bytes = "512", pool_bytes = "1073741824", threads = "4";
  std::string ways = "[" + way_text() + "]";
  std::string text() const {
    return fmt::format(R"({{"direction": {}, "rows": {}, "row_bytes": {}, "pool_bytes": {}, "threads": {}, "ways": {}}})",
                       direction, rows, row_bytes, pool_bytes, threads, ways);
  }
};

std::string file_of(std::string_view list, std::string_view version = "1") {
  return fmt::format(R"({{"version": {}, "devices": {{"gpu": {}}}}})", version, list);
}

class MoverFile : public testing::Test {
 protected:
  std::vector<MoverMeasurement> read(const std::string& device = "gpu") {
    return read_movers(folder_.path(), device, FileOps::system());
  }
  void write(const std::vector<MoverMeasurement>& all, const std::string& device = "gpu") {
    write_movers(folder_.path(), device, all, FileOps::system());
  }
  // What is read where the file has this text. Writing over it works too, whatever it is.
  std::vector<MoverMeasurement> read_text_of(std::string_view text) {
    write_text(file(), text);
    std::vector<MoverMeasurement> out = read();
    write({measured(7)}, "another");
    EXPECT_EQ(read("another"), std::vector{measured(7)}) << text.substr(0, 200);
    return out;
  }
  std::filesystem::path file() const { return folder_ / kMoverFile; }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) out.push_back(entry.path().filename().string());
    return out;
  }

  TemporaryDirectory folder_{memory_folder()};
};

TEST_F(MoverFile, WhatIsWrittenIsRead) {
  for (const unsigned threads : {0U, 1U, 2U, 4U, 16U, 1024U})
    for (const std::uint64_t rows : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 63, kMost}) {
      const std::vector<MoverMeasurement> all = {measured(rows, threads), measured(rows, threads, false, kMost)};
      write(all);
      EXPECT_EQ(read(), all) << rows << " rows, " << threads << " threads";
      write(read());
      EXPECT_EQ(read(), all);
    }
  write({});
  EXPECT_TRUE(read().empty());
}

TEST_F(MoverFile, RatesAreKeptAsWholeNumbersAndSharesAsTheyAre) {
  MoverMeasurement one = measured(5);
  one.rates.resize(2);
  one.rates[0].bytes_per_second = 51'234'567'890.75;
  one.rates[1].bytes_per_second = 0.25;
  one.rates[1].thread_share = 1.0 / 3;
  write({one});
  ASSERT_EQ(read().size(), 1U);
  EXPECT_EQ(read()[0].rates[0].bytes_per_second, 51'234'567'891);
  EXPECT_EQ(read()[0].rates[1].bytes_per_second, 0);
  EXPECT_EQ(read()[0].rates[1].thread_share, 1.0 / 3);
}

TEST_F(MoverFile, WithoutAFileOrAFolderNothingIsKnown) {
  EXPECT_TRUE(read().empty());
  EXPECT_TRUE(read_movers(folder_ / "none", "gpu", FileOps::system()).empty());
  EXPECT_TRUE(read("").empty());
  EXPECT_TRUE(names().empty()) << "reading made a file";
}

TEST_F(MoverFile, DevicesAreKeptSideBySide) {
  write({measured(1)}, "first");
  write({measured(2), measured(3)}, "second");
  write({measured(4)}, "");
  write({measured(5)}, "a \"quoted\"\n\\name");
  EXPECT_EQ(read("first"), std::vector{measured(1)});
  EXPECT_EQ(read("second"), (std::vector{measured(2), measured(3)}));
  EXPECT_EQ(read(""), std::vector{measured(4)});
  EXPECT_EQ(read("a \"quoted\"\n\\name"), std::vector{measured(5)});
  EXPECT_TRUE(read("third").empty());
  write({}, "second");
  EXPECT_TRUE(read("second").empty());
  EXPECT_EQ(read("first"), std::vector{measured(1)});
}

TEST_F(MoverFile, ANameThatIsNotUtf8IsNoError) {
  const std::string name = "gpu \xFF\xC0";
  write({measured(1)}, "first");
  EXPECT_NO_THROW(write({measured(2)}, name));
  EXPECT_NO_THROW((void)read(name));
  EXPECT_EQ(read("first"), std::vector{measured(1)});
}

TEST_F(MoverFile, OtherVersionsAndOtherFormsAreMeasuredAnew) {
  const std::string list = "[" + Text().text() + "]";
  ASSERT_EQ(read_text_of(file_of(list)).size(), 1U);
  for (const std::string_view version : {"0", "2", "-1", "18446744073709551616", "\"1\"", "null", "true", "[1]", "{}", "1.5"})
    EXPECT_TRUE(read_text_of(file_of(list, version)).empty()) << version;
  for (const std::string& text :
       {std::string(), std::string("\0\0\0", 3), std::string("null"), std::string("1"), std::string("\"text\""),
        std::string("[]"), std::string("{}"), std::string("{\"version\": 1}"), std::string("{\"devices\": {}}"),
        std::string("\xEF\xBB\xBF"), std::string("\xFF\xFE{\0}\0", 6), file_of(list) + "}", file_of(list).substr(1),
        "\x1F\x8B" + file_of(list), std::string(R"({"version": 1, "devices": []})"),
        std::string(R"({"version": 1, "devices": "gpu"})"), std::string(R"({"version": 1, "devices": {"gpu": "\xFF"}})")})
    EXPECT_TRUE(read_text_of(text).empty()) << text;
  for (const std::string_view instead : {"null", "{}", "1", "\"\"", "[]", "[null]", "[[]]", "[1, 2]", "[{}]", "[\"fetch\"]"})
    EXPECT_TRUE(read_text_of(file_of(instead)).empty()) << instead;
}

TEST_F(MoverFile, WhatIsNoMeasurementIsLeftOutAndTheOthersStay) {
  const std::string good = Text().text();
  const std::vector<Text> bad = {
      {.direction = R"("to")"},
      {.direction = "null"},
      {.direction = "1"},
      {.direction = R"(["fetch"])"},
      {.rows = "-1"},
      {.rows = "1.5"},
      {.rows = "1e3"},
      {.rows = "\"1000\""},
      {.rows = "null"},
      {.rows = "18446744073709551616"},
      {.row_bytes = "-512"},
      {.row_bytes = "true"},
      {.pool_bytes = "[]"},
      {.pool_bytes = "-0.0"},
      {.threads = "-4"},
      {.threads = "1025"},
      {.threads = "4294967300"},  // 4 in 32 bits
      {.threads = "{}"},
      {.ways = "null"},
      {.ways = "{}"},
      {.ways = "[]"},
      {.ways = "[1]"},
      {.ways = "[{}]"},
      {.ways = "[[" + way_text() + "]]"},
      {.ways = "[" + way_text("-4") + "]"},
      {.ways = "[" + way_text("4.0") + "]"},
      {.ways = "[" + way_text("4294967300") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "-1") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "null") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "\"nan\"") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "5e10", "1.0000001") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "5e10", "-0.1") + "]"},
      {.ways = "[" + way_text("4", "1024", "0", "5e10", "false") + "]"},
  };
  for (const Text& one : bad) {
    const std::string text = one.text();
    EXPECT_EQ(read_text_of(file_of("[" + good + "," + text + "," + good + "]")).size(), 2U) << text;
  }
  for (const std::string_view nan : {"1e400", "NaN", "nan", "Infinity", "-Infinity", "0x10", "01", "+1", ".5", "1."})
    EXPECT_TRUE(read_text_of(file_of("[" + Text{.ways = "[" + way_text("4", "1024", "0", nan) + "]"}.text() + "]")).empty())
        << nan;
}

// They may be of a newer version, or of somebody who wants a kernel to be launched with a billion threads.
TEST_F(MoverFile, WaysThatThisVersionDoesNotKnowAreLeftOut) {
  const std::string known = way_text();
  for (const std::string& unknown :
       {way_text("5"), way_text("0", "0", "0"), way_text("4", "1023"), way_text("4", "0"), way_text("0", "1024"),
        way_text("1024", "1024"), way_text("0", "0", "3"), way_text("0", "0", "1024"), way_text("4", "1024", "5")}) {
    const auto got = read_text_of(file_of("[" + Text{.ways = "[" + unknown + "," + known + "]"}.text() + "]"));
    ASSERT_EQ(got.size(), 1U) << unknown;
    ASSERT_EQ(got[0].rates.size(), 1U) << unknown;
    EXPECT_EQ(got[0].rates[0].way, (MoverWay{4, 1024, 0}));
    EXPECT_TRUE(read_text_of(file_of("[" + Text{.ways = "[" + unknown + "]"}.text() + "]")).empty())
        << "a case without a rate would never be measured again: " << unknown;
  }
}

TEST_F(MoverFile, NestingAsDeepAsTheFileMayBeLongIsNoError) {
  for (const std::size_t depth : {10UL, 1000UL, 500'000UL}) {
    const std::string open(depth, '[');
    const std::string close(depth, ']');
    EXPECT_TRUE(read_text_of(open + close).empty());
    EXPECT_TRUE(read_text_of(open).empty());
    EXPECT_TRUE(read_text_of(file_of(open + close)).empty());
    EXPECT_TRUE(read_text_of(file_of("[" + Text{.ways = open + close}.text() + "]")).empty());
    std::string objects;
    for (std::size_t i = 0; i < depth / 6; ++i) objects += "{\"a\":";
    EXPECT_TRUE(read_text_of(file_of(objects + "1" + std::string(depth / 6, '}'))).empty());
  }
}

TEST_F(MoverFile, AFileLargerThanOursIsNotRead) {
  const std::string good = file_of("[" + Text().text() + "]");
  ASSERT_EQ(read_text_of(good + std::string((1 << 20) - good.size(), ' ')).size(), 1U);
  EXPECT_TRUE(read_text_of(good + std::string((1 << 20) - good.size() + 1, ' ')).empty());
  write_text(file(), "");
  std::filesystem::resize_file(file(), std::uintmax_t{1} << 40);
  EXPECT_TRUE(read().empty());
}

TEST_F(MoverFile, OfMoreMeasurementsThanAFileHoldsTheNewestStay) {
  std::vector<MoverMeasurement> all;
  for (std::uint64_t i = 0; i < 300; ++i) {
    all.push_back(measured(i, 1));
    all.back().rates.resize(1);
  }
  write(all);
  ASSERT_EQ(read().size(), 256U);
  EXPECT_EQ(read().front(), all[300 - 256]);
  EXPECT_EQ(read().back(), all.back());
  // So many are nobody's.
  std::string list;
  for (int i = 0; i < 257; ++i) list += fmt::format("{}{}", i == 0 ? "" : ",", Text().text());
  EXPECT_TRUE(read_text_of(file_of("[" + list + "]")).empty());
}

TEST_F(MoverFile, WhatIsNoRegularFileIsNotRead) {
  std::filesystem::create_directory(file());
  EXPECT_TRUE(read().empty());
  EXPECT_THROW(write({measured(1)}), Error);
  std::filesystem::remove(file());
  ASSERT_EQ(mkfifo(file().c_str(), 0666), 0);
  EXPECT_TRUE(read().empty());
  EXPECT_THROW(write({measured(1)}), Error);
  std::filesystem::remove(file());
  std::filesystem::create_symlink(file(), file());
  EXPECT_TRUE(read().empty());
  std::filesystem::remove(file());
  EXPECT_EQ(names().size(), 0U);
}

// Fails the chosen call, every time.
class Faulty final : public FileOps {
 public:
  enum class Call : std::uint8_t { kNone, kOpen, kRead, kWrite, kSync, kRename };
  Call fails = Call::kNone;
  int error = EIO;

  int open(const char* path, int flags, mode_t mode) override { return at(Call::kOpen) ? -1 : FileOps::open(path, flags, mode); }
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    return at(Call::kRead) ? -1 : FileOps::pread(fd, buffer, bytes, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    return at(Call::kWrite) ? -1 : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  int fdatasync(int fd) override { return at(Call::kSync) ? -1 : FileOps::fdatasync(fd); }
  int fsync(int fd) override { return at(Call::kSync) ? -1 : FileOps::fsync(fd); }
  int rename(const char* from, const char* to) override { return at(Call::kRename) ? -1 : FileOps::rename(from, to); }

 private:
  bool at(Call call) {
    if (call != fails) return false;
    errno = error;
    return true;
  }
};

TEST_F(MoverFile, AFailingDiskIsAnErrorOfWritingOnlyAndLeavesTheFileWhole) {
  write({measured(1)});
  const std::string before = file_text(file());
  for (const Faulty::Call call : {Faulty::Call::kOpen, Faulty::Call::kWrite, Faulty::Call::kSync, Faulty::Call::kRename})
    for (const int error : {EIO, ENOSPC, EROFS, EACCES, EMFILE}) {
      SCOPED_TRACE(testing::Message() << "call " << static_cast<int>(call) << ", " << strerror(error));
      Faulty ops;
      ops.fails = call;
      ops.error = error;
      EXPECT_THROW(write_movers(folder_.path(), "gpu", {measured(2)}, ops), IoError);
      EXPECT_EQ(file_text(file()), before);
      EXPECT_EQ(names(), std::vector{std::string(kMoverFile)}) << "a temporary file stayed";
    }
  Faulty ops;
  ops.fails = Faulty::Call::kRead;
  EXPECT_TRUE(read_movers(folder_.path(), "gpu", ops).empty());
  ops.fails = Faulty::Call::kOpen;
  EXPECT_TRUE(read_movers(folder_.path(), "gpu", ops).empty());
  ops.fails = Faulty::Call::kNone;
  EXPECT_EQ(read_movers(folder_.path(), "gpu", ops), std::vector{measured(1)});
}

// Whatever stands in the place of a byte, and wherever the file ends: what is read may be used, or nothing is read.
TEST_F(MoverFile, EveryByteMayBeWrong) {
  MoverMeasurement fetch = measured(1000, 4);
  MoverMeasurement back = measured(2000, 4, false);
  fetch.rates.resize(4);
  back.rates.resize(2);
  write({fetch, back});
  const std::string good = file_text(file());
  std::uint64_t reads = 0;
  const auto check = [&](const std::string& text) {
    write_text(file(), text);
    const std::vector<MoverMeasurement> got = read();
    ASSERT_LE(got.size(), 2U) << text;
    for (const MoverMeasurement& one : got) ASSERT_TRUE(may_be_used(one)) << text;
    if (++reads % 64 == 0) write({measured(3)}, "another");
  };
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::string text = good;
    for (const char instead : {'\0', '\xFF', '"', '\\', '{', ']', '9', '-', ',', 'e'}) {
      text[at] = instead;
      check(text);
    }
    for (int bit = 0; bit < 8; ++bit) {
      text[at] = static_cast<char>(static_cast<unsigned char>(good[at]) ^ (1U << bit));
      check(text);
    }
    check(good.substr(0, at));
    check(good.substr(0, at) + good.substr(at + 1));
    check(good.substr(at));
    if (HasFatalFailure()) return;
  }
  check(good);
  EXPECT_EQ(read(), (std::vector{fetch, back}));
}

}  // namespace
}  // namespace embermap::test
