#include "store/store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>

#include "io/checksum.hpp"
#include "io/npy.hpp"
#include "store/commit_history.hpp"
#include "store/log_format.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::message_of;
using test::range;
using test::read_all;
using test::scatter;
using test::snapshot;
using test::StoreTest;
using test::update;
using test::write_text;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST_F(StoreTest, OpensWhatItCreated) {
  {
    Store store = open();
    Table table = store.create("items", {.rows = 100,
                                         .dim = 8,
                                         .dtype = DType::kBFloat16,
                                         .optimizer = Adagrad{.lr = 0.3, .eps = 1e-7},
                                         .init = Uniform{-0.5, 0.5},
                                         .seed = 11,
                                         .page_bytes = 65536});
    store.create("ünïcode.2", {.rows = 3, .dim = 1});
    EXPECT_EQ(store.tables(), (std::vector<std::string>{"items", "ünïcode.2"}));
    store.close();
    EXPECT_TRUE(store.closed());
    store.close();
    EXPECT_THROW(table.rows(), ClosedError);
    EXPECT_THROW(store.tables(), ClosedError);
  }
  Store store = open();
  const Table table = store.table("items");
  EXPECT_EQ(table.rows(), 100U);
  EXPECT_EQ(table.dim(), 8U);
  EXPECT_EQ(table.dtype(), DType::kBFloat16);
  EXPECT_EQ(std::get<Adagrad>(table.optimizer()).lr, 0.3);
  EXPECT_EQ(std::get<Adagrad>(table.optimizer()).eps, 1e-7);
  EXPECT_EQ(std::get<Uniform>(table.initializer()).low, -0.5);
  EXPECT_EQ(table.seed(), 11U);
  EXPECT_EQ(table.page_bytes_option(), 65536U);
  EXPECT_THAT(message_of<NotFound>([&] { store.table("nothing"); }), HasSubstr("no table 'nothing'; it has items, ünïcode.2"));
}

TEST_F(StoreTest, CommitsAreCountedAndKept) {
  Store store = open();
  Table table = store.create("t", {.rows = 10, .dim = 2});
  EXPECT_EQ(store.commit(), 0U);
  scatter(table, {3}, {1, 2});
  EXPECT_EQ(store.commit(), 1U);
  EXPECT_EQ(store.commit(), 1U) << "nothing changed";
  scatter(table, {4}, {3, 4});
  store.abandon();
  Store again = open();
  EXPECT_EQ(again.commit_number(), 1U);
  EXPECT_EQ(gather(again.table("t"), {3, 4}), (std::vector<float>{1, 2, 0, 0}));
}

TEST_F(StoreTest, OneWriterAndReadersOfTheLastCommit) {
  Store store = open();
  Table table = store.create("t", {.rows = 10, .dim = 2});
  scatter(table, {3}, {1, 2});
  store.commit();
  EXPECT_THAT(message_of<LockedError>([&] { open(); }), HasSubstr(std::to_string(getpid())));
  const auto before = snapshot(path());
  Store reader = open(1 << 20, StoreOptions::Mode::kRead);
  Table read = reader.table("t");
  EXPECT_EQ(gather(read, {3}), (std::vector<float>{1, 2}));
  EXPECT_THROW(scatter(read, {3}, {0, 0}), ReadOnlyError);
  EXPECT_THROW(reader.create("u", {.rows = 1, .dim = 1}), ReadOnlyError);
  EXPECT_THROW(reader.commit(), ReadOnlyError);
  EXPECT_THROW(read.resize(1), ReadOnlyError);
  reader.close();
  EXPECT_EQ(snapshot(path()), before);
  store.close();
  open().close();
}

TEST_F(StoreTest, TheLockDiesWithItsOwner) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    Store store = open();
    (void)!write(ready[1], "x", 1);
    pause();
    _exit(0);
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_THAT(message_of<LockedError>([&] { open(); }), HasSubstr("process " + std::to_string(child)));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(open());
}

TEST_F(StoreTest, AForkedChildCannotUseTheHandleAndLeavesTheParentAlone) {
  Store store = open();
  Table table = store.create("t", {.rows = 1000, .dim = 8});
  scatter(table, range(0, 1000), std::vector<float>(8000, 2));
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      (void)gather(table, {1});
    } catch (const ClosedError& error) {
      const std::string both = fmt::format("was opened in process {} and is used in process {}", getppid(), getpid());
      code = std::string(error.what()).find(both) != std::string::npos ? 0 : 2;
    }
    store.forget_after_fork();
    {
      Store gone = std::move(store);  // destroys the child's copy
      Table gone_table = std::move(table);
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_THROW(open(), LockedError);
  EXPECT_EQ(gather(table, {999})[7], 2.0F);
  EXPECT_EQ(store.commit(), 1U);
}

TEST_F(StoreTest, BadTablesAreRefusedAndNothingChangesOnDisk) {
  Store store = open(1 << 20);
  store.create("t", {.rows = 10, .dim = 2});
  write_text(path() / "foreign.npy", "not ours");
  const auto before = snapshot(path());
  const auto refused = [&](std::string_view name, const TableOptions& options) {
    std::string message;
    try {
      store.create(name, options);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_EQ(snapshot(path()), before) << name;
    return message;
  };
  EXPECT_THAT(refused("t", {.rows = 1, .dim = 1}), HasSubstr("has a table 't' already"));
  EXPECT_THAT(refused("foreign", {.rows = 1, .dim = 1}), HasSubstr("foreign.npy exists"));
  for (const std::string name : {"", ".x", "-x", "a/b", "a:b", "a b", "a\nb", "\xff", ".."}) refused(name, {.rows = 1, .dim = 1});
  refused(std::string(201, 'a'), {.rows = 1, .dim = 1});
  EXPECT_THAT(refused("u", {.rows = 1, .dim = 0}), HasSubstr("dim 0"));
  EXPECT_THAT(refused("u", {.rows = 1ULL << 62, .dim = 128}), HasSubstr("overflows 64 bits"));
  EXPECT_THAT(refused("u", {.rows = 1, .dim = 1, .dtype = DType::kInt8, .optimizer = Sgd{}}), HasSubstr("int8"));
  EXPECT_THAT(refused("u", {.rows = 1, .dim = 1, .page_bytes = 5000}), HasSubstr("page size 5000"));
  EXPECT_THAT(refused("u", {.rows = 1, .dim = 1, .init = Normal{0, -1}}), HasSubstr("-1"));
  EXPECT_THAT(refused("u", {.rows = 1'000'000'000, .dim = 128}), HasSubstr("is too small"));
}

TEST_F(StoreTest, ABudgetThatCannotWorkNamesTheLeast) {
  Store store = open(20'000);
  store.create("a", {.rows = 1000, .dim = 128});
  store.create("b", {.rows = 1000, .dim = 1024});
  const std::string message = message_of<BudgetError>([&] { store.create("c", {.rows = 10, .dim = 4096}); });
  ASSERT_THAT(message, HasSubstr("take "));
  const std::uint64_t least = std::stoull(message.substr(message.find("take ") + 5));
  store.close();
  EXPECT_THROW(open(1000), BudgetError);
  EXPECT_THROW({ open(least - 1).create("c", {.rows = 10, .dim = 4096}); }, BudgetError);
  Store enough = open(least);
  Table c = enough.create("c", {.rows = 10, .dim = 4096, .init = Constant{3}});
  for (const auto& name : enough.tables()) EXPECT_EQ(gather(enough.table(name), {1, 9, 2}).size(), 3 * enough.table(name).dim());
  EXPECT_EQ(gather(c, {9})[4095], 3.0F);
}

TEST_F(StoreTest, TheBudgetIsSharedAndKept) {
  constexpr std::uint64_t kMemory = 8 << 20;
  Store store = open(kMemory);
  Table small = store.create("small", {.rows = 100, .dim = 128});
  Table large = store.create("large", {.rows = 100'000, .dim = 128, .optimizer = Adagrad{}});
  Table larger = store.create("larger", {.rows = 300'000, .dim = 128});
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i)
    for (Table table : {small, large, larger}) {
      std::vector<std::int64_t> ids(2000);
      for (auto& id : ids) id = static_cast<std::int64_t>(random() % table.rows());
      (void)gather(table, ids);
    }
  EXPECT_EQ(small.stats().frames, small.geometry().pages());
  EXPECT_LE(small.stats().memory_bytes + large.stats().memory_bytes + larger.stats().memory_bytes, kMemory);
  EXPECT_GE(small.stats().memory_bytes + large.stats().memory_bytes + larger.stats().memory_bytes, kMemory * 83 / 100)
      << "an eighth is for the log's index, a thirty-second for pages in flight";
  EXPECT_GT(larger.stats().frames, large.stats().frames);
  // A table that comes later gets its share, and rows in memory survive the move.
  scatter(larger, {7}, std::vector<float>(128, 5.0F));
  Table late = store.create("late", {.rows = 300'000, .dim = 128});
  (void)gather(late, {1});
  EXPECT_EQ(gather(larger, {7})[0], 5.0F);
  std::uint64_t sum = 0;
  for (const auto& name : store.tables()) sum += store.table(name).stats().memory_bytes;
  EXPECT_LE(sum, kMemory);
}

TEST_F(StoreTest, RefusesPathsThatAreNoStore) {
  EXPECT_THAT(message_of<NotFound>([&] { open(1 << 20, StoreOptions::Mode::kRead); }), HasSubstr("no store at"));
  EXPECT_THAT(message_of<NotFound>([&] { open(1 << 20, StoreOptions::Mode::kReadWrite); }), HasSubstr("no store at"));
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_THAT(message_of<IoError>([&] { Store::open(path() / "deep" / "er"); }), HasSubstr("No such file"));
  write_text(path(), "a file");
  EXPECT_THAT(message_of<IoError>([&] { open(); }), HasSubstr("Not a directory"));
  std::filesystem::remove(path());
  std::filesystem::create_directory(path());
  write_text(path() / "precious.txt", "keep me");
  EXPECT_THAT(message_of<AlreadyExists>([&] { open(); }), HasSubstr("not empty (it holds precious.txt)"));
  EXPECT_EQ(snapshot(path()).size(), 1U);
  std::filesystem::remove(path() / "precious.txt");
  EXPECT_NO_THROW(open()) << "an empty directory becomes a store";
}

// A manifest that was edited: its last key would say so.
std::string without_checksum(const std::string& manifest) {
  return manifest.substr(0, manifest.rfind(',', manifest.rfind("\"checksum\""))) + "\n}\n";
}

TEST_F(StoreTest, BrokenManifestsAreRefusedByName) {
  open().create("t", {.rows = 10, .dim = 2});
  const std::filesystem::path file = path() / "embermap.json";
  const std::string good = test::file_text(file);
  const auto refused = [&](std::string text) {
    write_text(file, text);
    const auto before = snapshot(path());
    const std::string message = message_of<FormatError>([&] { open(); });
    EXPECT_EQ(snapshot(path()).at("t.npy"), before.at("t.npy"));
    return message;
  };
  const auto with = [&](std::string from, std::string to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return without_checksum(text);
  };
  EXPECT_THAT(refused(""), HasSubstr("empty"));
  EXPECT_THAT(refused("{"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused("[]"), HasSubstr("not an object"));
  EXPECT_THAT(refused("{}"), HasSubstr("format"));
  EXPECT_THAT(refused(with("\"version\": 2", "\"version\": 3")), HasSubstr("version 3 is newer"));
  EXPECT_THAT(refused(with("\"version\": 2", "\"version\": \"x\"")), HasSubstr("'version'"));
  EXPECT_THAT(refused(with("\"rows\": 10", "\"rows\": -10")), HasSubstr("-10"));
  EXPECT_THAT(refused(with("\"rows\": 10", "\"rows\": 18446744073709551615")), HasSubstr("table 't'"));
  EXPECT_THAT(refused(with("\"dim\": 2", "\"dim\": 3")), HasSubstr("stride"));
  EXPECT_THAT(refused(with("\"dtype\": \"float32\"", "\"dtype\": \"float31\"")), HasSubstr("float31"));
  EXPECT_THAT(refused(with("\"stride\": 8", "\"stride\": 0")), HasSubstr("stride"));
  EXPECT_THAT(refused(with("\"rows_per_page\": 512", "\"rows_per_page\": 0")), HasSubstr("pages of 0 rows"));
  EXPECT_THAT(refused(with("\"rows_per_page\": 512", "\"rows_per_page\": 51")), HasSubstr("its records make 512"));
  EXPECT_THAT(refused(with("\"page_bytes\": 4096", "\"page_bytes\": 5")), HasSubstr("page size 5"));
  EXPECT_THAT(refused(with("\"t\": {", "\"../t\": {")), HasSubstr("cannot name a table"));
  const auto unfinished = [&](const std::string& value) {
    return refused(with("\"version\": 2", "\"version\": 2, \"unfinished\": " + value));
  };
  EXPECT_THAT(unfinished("3"), HasSubstr("no array"));
  EXPECT_THAT(unfinished("[3]"), HasSubstr("no file of a table"));
  EXPECT_THAT(unfinished("[\"LOCK\"]"), HasSubstr("'LOCK'"));
  EXPECT_THAT(unfinished("[\"../t.npy\"]"), HasSubstr("cannot name a table"));
  write_text(file, good);
  EXPECT_NO_THROW(open());
}

TEST_F(StoreTest, WhatACrashLeftOfATableIsRemovedUnlessItIsATables) {
  const std::filesystem::path adopted = path() / "a.npy";
  {
    Store store = open();
    store.create("t", {.rows = 10, .dim = 2});
    store.create("x", {.rows = 3, .dim = 1});
    std::filesystem::copy_file(path() / "x.npy", adopted);
    store.adopt("other", adopted);
  }
  for (const char* file : {"u.npy", "u.pages", "v.pages", "kept.npy"}) write_text(path() / file, "half");
  std::string text = test::file_text(path() / "embermap.json");
  text.insert(1, R"("unfinished": ["u.npy", "u.pages", "v.npy", "v.pages", "t.npy", "t.pages", "a.npy"],)");
  write_text(path() / "embermap.json", without_checksum(text));
  { open(1U << 20, StoreOptions::Mode::kRead); }
  EXPECT_TRUE(std::filesystem::exists(path() / "u.npy")) << "a reader changes nothing";
  {
    Store store = open();
    EXPECT_EQ(gather(store.table("t"), {9}), (std::vector<float>{0, 0}));
    EXPECT_EQ(gather(store.table("other"), {2}), (std::vector<float>{0}));
    EXPECT_NO_THROW(store.create("u", {.rows = 1, .dim = 1}));
  }
  for (const char* file : {"t.npy", "t.pages", "a.npy"}) EXPECT_TRUE(std::filesystem::exists(path() / file)) << file;
  EXPECT_FALSE(std::filesystem::exists(path() / "v.pages"));
  EXPECT_EQ(test::file_text(path() / "kept.npy"), "half") << "nobody said that it was a table's";
  EXPECT_THAT(test::file_text(path() / "embermap.json"), Not(HasSubstr("unfinished")));
}

TEST_F(StoreTest, MissingAndForeignTableFilesAreNamed) {
  open().create("t", {.rows = 1000, .dim = 2});
  const std::string good = test::file_text(path() / "t.npy");
  std::filesystem::resize_file(path() / "t.npy", 6000);
  EXPECT_THAT(message_of<FormatError>([&] { open().table("t"); }), HasSubstr("t.npy"));
  EXPECT_EQ(std::filesystem::file_size(path() / "t.npy"), 6000U);
  std::filesystem::remove(path() / "t.npy");
  EXPECT_THAT(message_of<IoError>([&] { open().table("t"); }), HasSubstr("t.npy"));
  write_text(path() / "t.npy", good);
  std::filesystem::remove(path() / "t.pages");
  EXPECT_THAT(message_of<IoError>([&] { open().table("t"); }), HasSubstr("t.pages"));
}

TEST_F(StoreTest, ABrokenTableLeavesTheOthersUsableAndCanBeRemoved) {
  {
    Store store = open();
    store.create("bad", {.rows = 1000, .dim = 2});
    scatter(store.create("good", {.rows = 10, .dim = 2}), {1}, {5, 6});
    store.close();
  }
  std::filesystem::remove(path() / "bad.npy");
  {
    Store store = open();
    EXPECT_EQ(store.tables(), (std::vector<std::string>{"bad", "good"}));
    EXPECT_TRUE(store.contains("bad"));
    EXPECT_THROW(store.table("bad"), IoError);
    EXPECT_THROW(store.create("bad", {.rows = 1, .dim = 1}), AlreadyExists);
    scatter(store.table("good"), {2}, {7, 8});
    store.close();
  }
  Store store = open();
  EXPECT_EQ(gather(store.table("good"), {1, 2}), (std::vector<float>{5, 6, 7, 8}));
  EXPECT_TRUE(store.contains("bad")) << "the commit kept its entry";
  store.remove("bad");
  EXPECT_EQ(store.tables(), (std::vector<std::string>{"good"}));
  EXPECT_FALSE(std::filesystem::exists(path() / "bad.pages"));
}

TEST_F(StoreTest, ACommitIsOneMomentOfAllTables) {
  Store store = open();
  Table first = store.create("first", {.rows = 1, .dim = 1});
  Table second = store.create("second", {.rows = 1, .dim = 1});
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (float i = 1; !stop; ++i) {
      scatter(first, {0}, {i});
      scatter(second, {0}, {i});
    }
  });
  for (int i = 0; i < 30; ++i) {
    store.commit();
    Store reader = Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20, .accept_unclean = true});
    const float a = gather(reader.table("first"), {0})[0], b = gather(reader.table("second"), {0})[0];
    EXPECT_TRUE(a == b || a == b + 1) << a << " and " << b;
  }
  stop = true;
  writer.join();
}

TEST_F(StoreTest, RemovedTablesAreGone) {
  Store store = open();
  Table table = store.create("t", {.rows = 10, .dim = 2});
  store.remove("t");
  EXPECT_FALSE(store.contains("t"));
  EXPECT_THROW(gather(table, {1}), ClosedError);
  EXPECT_THROW(store.remove("t"), NotFound);
  EXPECT_FALSE(std::filesystem::exists(path() / "t.npy"));
  EXPECT_FALSE(std::filesystem::exists(path() / "t.pages"));
  store.create("t", {.rows = 11, .dim = 3});
}

TEST_F(StoreTest, WithoutALogASessionThatEndedInTheMiddleIsNoticed) {
  {
    Store store = Store::open(
        path(), {.memory = 9000, .durability = Durability::kNone});  // two pages: most changes go to the file before the commit
    Table table = store.create("t", {.rows = 1000, .dim = 128, .init = Constant{1}});
    scatter(table, range(0, 100), std::vector<float>(12800, 2));
    store.commit();
    scatter(table, range(0, 1000), std::vector<float>(128000, 3));
    store.abandon();
  }
  const std::string message = message_of<CorruptError>([&] { open(9000); });
  EXPECT_THAT(message, HasSubstr("after its last commit (1)"));
  EXPECT_THROW(open(9000, StoreOptions::Mode::kRead), CorruptError);
  {
    Store store = Store::open(path(), {.memory = 9000, .durability = Durability::kNone, .accept_unclean = true});
    for (const float value : read_all(store.table("t"))) EXPECT_TRUE(value == 1 || value == 2 || value == 3);
    EXPECT_EQ(store.table("t").verify().bad_pages, 0U);
    store.close();
  }
  EXPECT_NO_THROW(open(9000));
}

TEST_F(StoreTest, ASessionThatWroteNothingNeedsNoCare) {
  {
    Store store = open();
    Table table = store.create("t", {.rows = 1000, .dim = 128});
    scatter(table, range(0, 100), std::vector<float>(12800, 2));
    store.abandon();  // all of it was in memory
  }
  Store store = open();
  EXPECT_EQ(gather(store.table("t"), {5})[0], 0.0F);
}

TEST_F(StoreTest, LeftoversOfKilledProcessesAreRemoved) {
  open().create("t", {.rows = 1, .dim = 1});
  write_text(path() / ".t.npy.abc123.tmp", "half");
  open().close();
  EXPECT_FALSE(std::filesystem::exists(path() / ".t.npy.abc123.tmp"));
}

// Fails the n-th call of those that change something, and every later one unless it is to be once.
class FailAt final : public FileOps {
 public:
  std::atomic<int> left{1 << 30};
  bool fail_unlink = true;
  bool once = false;
  bool fail() {
    const int before = left.fetch_sub(1);
    return once ? before == 0 : before <= 0;
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    return fail() ? (errno = ENOSPC, -1) : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
    return fail() ? (errno = ENOSPC, -1) : FileOps::pwritev(fd, pieces, count, offset);
  }
  int ftruncate(int fd, off_t bytes) override { return fail() ? (errno = ENOSPC, -1) : FileOps::ftruncate(fd, bytes); }
  int fdatasync(int fd) override { return fail() ? (errno = EIO, -1) : FileOps::fdatasync(fd); }
  int fsync(int fd) override { return fail() ? (errno = EIO, -1) : FileOps::fsync(fd); }
  int unlink(const char* path) override { return fail_unlink && fail() ? (errno = EIO, -1) : FileOps::unlink(path); }
  int rename(const char* from, const char* to) override { return fail() ? (errno = EIO, -1) : FileOps::rename(from, to); }
  int rename_new(const char* from, const char* to) override { return fail() ? (errno = EIO, -1) : FileOps::rename_new(from, to); }
};

TEST_F(StoreTest, CreateThatFailsAnywhereLeavesTheStoreAsItWas) {
  FailAt ops;
  ops.fail_unlink = false;  // or files that belong to no table would stay, which the next create names
  {
    Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
    store.create("kept", {.rows = 10, .dim = 2, .init = Constant{4}});
    store.close();
  }
  int failures = 0;
  for (int n = 0;; ++n) {
    Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
    ops.left = n;
    try {
      store.create("new", {.rows = 100, .dim = 2, .optimizer = Adagrad{}});
      ops.left = 1 << 30;
      break;
    } catch (const IoError&) {
      ++failures;
    }
    ops.left = 1 << 30;
    store.abandon();
    // The manifest may hold the table if it was replaced before the call that failed; it is whole then.
    Store again = open(1 << 20);
    EXPECT_EQ(gather(again.table("kept"), {9}), (std::vector<float>{4, 4}));
    if (again.contains("new")) {
      EXPECT_EQ(gather(again.table("new"), {99}), (std::vector<float>{0, 0}));
      again.remove("new");
    }
    again.close();
    ASSERT_LT(n, 200);
  }
  EXPECT_GT(failures, 5);
  EXPECT_EQ(snapshot(path()).size(), 7U);  // manifest, lock, log, two files a table
}

// A call that changes which tables there are fails at its n-th step, and the session goes on: what it commits then is what is
// there after a crash, whatever of the call was on the disk.
TEST_F(StoreTest, WhatIsCommittedAfterACallForATableHasFailedIsThereAfterACrash) {
  const test::TemporaryDirectory quick(test::memory_folder());
  std::map<std::string, int> failures;
  for (const std::string what : {"create", "remove", "adopt", "checkpoint"}) {
    for (int n = 0;; ++n) {
      SCOPED_TRACE(fmt::format("{}, call {}", what, n));
      ASSERT_LT(n, 100);
      const std::filesystem::path folder = quick / "store", file = quick / "file.npy";
      std::filesystem::remove_all(folder);
      FailAt ops;
      ops.once = true;
      Store store = Store::open(folder, {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
      for (const char* name : {"kept", "other"}) {
        store.create(name, {.rows = 10, .dim = 2});
        scatter(store.table(name), {3}, {1, 1});
      }
      store.create("large", {.rows = 4000, .dim = 2});
      store.commit();
      write_text(file, format_npy_header("<f4", {}, 0, {10, 2}, 0) + std::string(80, '\0'));
      ops.left = n;
      bool failed = false;
      try {
        if (what == "create") store.create("new", {.rows = 10, .dim = 2});
        if (what == "remove") store.remove("other");
        if (what == "adopt") store.adopt("new", file, /*writable=*/true);
        if (what == "checkpoint") store.checkpoint();
      } catch (const IoError&) {
        failed = true;
        ++failures[what];
      }
      const bool reached = ops.left < 0;
      ops.left = 1 << 30;
      std::map<std::string, float> wanted;
      std::uint64_t commit = 0;
      try {
        for (const std::string& name : store.tables()) {
          Table table = store.table(name);
          // First pages past memory: the log has to know of all tables how many pages they have, and of no other.
          const std::vector<float> rows(2 * table.rows(), 7.0F);
          table.write(0, table.rows(), std::as_bytes(std::span(rows)));
          wanted[name] = 7;
        }
        commit = store.commit();
      } catch (const CorruptError& error) {  // a sync of the log or of what it applies to
        EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
        store.abandon();
        continue;
      }
      EXPECT_EQ(commit, 2U);
      store.abandon();
      Store again = Store::open(folder, {.memory = 1 << 20});
      EXPECT_EQ(again.commit_number(), commit);
      std::map<std::string, float> found;
      for (const std::string& name : again.tables()) found[name] = gather(again.table(name), {3})[0];
      EXPECT_EQ(found, wanted);
      if (!failed && !reached) break;
    }
  }
  EXPECT_GT(failures["create"], 5);
  EXPECT_GT(failures["remove"], 5);
  EXPECT_GT(failures["adopt"], 4);
  EXPECT_GT(failures["checkpoint"], 3);
}

TEST_F(StoreTest, WithoutALogACommitThatFailsSaysSoAndCanBeTriedAgainUnlessASyncFailed) {
  FailAt ops;
  int failures = 0, syncs = 0;
  bool succeeded = false;
  for (int n = 0; !succeeded; ++n) {
    ASSERT_LT(n, 100);
    // Two of four pages. Without write-behind, so that the calls come in the same order each time.
    Store store = Store::open(path(), {.memory = 9000, .write_behind = false, .durability = Durability::kNone, .file_ops = &ops});
    Table table = store.contains("t") ? store.table("t") : store.create("t", {.rows = 1000, .dim = 4});
    const float value = static_cast<float>(n + 1);
    scatter(table, range(0, 1000), std::vector<float>(4000, value));
    const std::vector<float> others(4000, -1.0F);
    ops.left = n;
    try {
      store.commit();
      succeeded = true;
      ops.left = 1 << 30;
    } catch (const IoError&) {
      ++failures;
      ops.left = 1 << 30;
      // Pages written from here on are ahead of the manifest, whether or not it was replaced.
      table.write(0, 1000, std::as_bytes(std::span(others)));
      EXPECT_THROW(open(1 << 20, StoreOptions::Mode::kRead), CorruptError) << n;
      scatter(table, range(0, 1000), std::vector<float>(4000, value));
    }
    std::uint64_t commit = 0;
    try {
      commit = store.commit();
    } catch (const CorruptError& error) {
      // The system may have dropped what it could not write: nothing is promised any more.
      ++syncs;
      EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
      EXPECT_THROW(store.close(), CorruptError);
      store.abandon();
      EXPECT_THROW(open(9000), CorruptError) << n;
      Store::open(path(), {.memory = 9000, .durability = Durability::kNone, .accept_unclean = true}).close();
      continue;
    }
    EXPECT_EQ(table.verify().bad_pages, 0U);
    // What is written after the commit is noticed if it is not committed, whatever failed before.
    EXPECT_EQ(Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20}).commit_number(), commit) << n;
    table.write(0, 1000, std::as_bytes(std::span(others)));  // pages that are not in memory go to the file at once
    EXPECT_THROW(open(1 << 20, StoreOptions::Mode::kRead), CorruptError) << n;
    scatter(table, range(0, 1000), std::vector<float>(4000, value));
    store.close();
    Store again = Store::open(path(), {.memory = 1 << 20, .durability = Durability::kNone});
    EXPECT_EQ(gather(again.table("t"), {999})[0], value) << n;
  }
  EXPECT_GT(failures, 10);
  EXPECT_EQ(syncs, 2) << "of the data and of the page file";
}

TEST_F(StoreTest, CommitThatFailsAnywhereSaysSoAndCanBeTriedAgainUnlessASyncFailed) {
  int failures = 0, syncs = 0;
  bool succeeded = false;
  for (int n = 0; !succeeded; ++n) {
    ASSERT_LT(n, 100);
    FailAt ops;
    ops.once = true;
    std::filesystem::remove_all(path());
    // Two of four pages. Without write-behind, so that the calls come in the same order each time.
    Store store = Store::open(path(), {.memory = 9000, .write_behind = false, .file_ops = &ops});
    Table table = store.create("t", {.rows = 1000, .dim = 4});
    scatter(table, range(0, 1000), std::vector<float>(4000, 1.0F));
    store.commit();
    scatter(table, range(0, 1000), std::vector<float>(4000, 2.0F));
    ops.left = n;
    try {
      EXPECT_EQ(store.commit(), 2U);
      succeeded = ops.left >= 0;  // no call was left to fail
    } catch (const IoError&) {
      ++failures;
    }
    ops.left = 1 << 30;
    EXPECT_EQ(read_all(table), std::vector<float>(4000, 2.0F)) << "rows are there whatever failed";
    EXPECT_EQ(table.verify().bad_pages, 0U);
    try {
      EXPECT_EQ(store.commit(), 2U) << n;
    } catch (const CorruptError& error) {
      // The system may have dropped what it could not write: nothing is promised any more.
      ++syncs;
      EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
      EXPECT_THROW(scatter(table, {1}, {1, 2, 3, 4}), CorruptError);
      EXPECT_THROW(store.close(), CorruptError);
      store.abandon();
      Store again = open(9000);
      // A commit record may be there all the same.
      const float value = again.commit_number() == 2 ? 2.0F : 1.0F;
      EXPECT_EQ(read_all(again.table("t")), std::vector<float>(4000, value)) << n;
      again.close();
      continue;
    }
    store.abandon();
    Store again = open(1 << 20);
    EXPECT_EQ(again.commit_number(), 2U);
    EXPECT_EQ(read_all(again.table("t")), std::vector<float>(4000, 2.0F)) << n;
  }
  EXPECT_GT(failures, 4);
  EXPECT_GE(syncs, 2) << "of the pages and of the commit record";
}

// The first sync after arm() waits for release(), and fails.
class GatedSync final : public FileOps {
 public:
  int fdatasync(int fd) override {
    std::unique_lock lock(mutex_);
    if (!armed_) return FileOps::fdatasync(fd);
    armed_ = false;
    waits_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !waits_; });
    return errno = EIO, -1;
  }
  void arm() {
    const std::lock_guard lock(mutex_);
    armed_ = true;
  }
  void wait_until_reached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waits_; });
  }
  void release() {
    {
      const std::lock_guard lock(mutex_);
      waits_ = false;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool armed_ = false, waits_ = false;
};

// A page of commit 2 is in commit 3, which is on its way, and changed once more: should 3 never be, the files must get that of 2.
TEST_F(StoreTest, WhatIsAppliedWhileACommitIsOnItsWayIsTheCommitBefore) {
  GatedSync ops;
  {
    Store store = Store::open(path(), {.memory = 9000, .write_behind = false, .file_ops = &ops});
    Table table = store.create("t", {.rows = 400, .dim = 128});
    const auto evict = [&] { (void)gather(table, range(200, 400)); };
    scatter(table, range(0, 400), std::vector<float>(400 * 128, 1.0F));
    store.commit();
    store.checkpoint();
    scatter(table, {0}, std::vector<float>(128, 2.0F));
    EXPECT_EQ(store.commit(), 2U);
    scatter(table, {0}, std::vector<float>(128, 3.0F));
    ops.arm();
    std::thread committing([&] { EXPECT_THROW(store.commit(), IoError); });
    ops.wait_until_reached();
    scatter(table, {0}, std::vector<float>(128, 4.0F));
    evict();
    std::thread applying([&] {
      try {
        table.verify();
      } catch (const CorruptError& error) {
        EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // long enough for applying, if it did not wait
    ops.release();
    committing.join();
    applying.join();
    EXPECT_THROW(store.create("u", {.rows = 1, .dim = 1}), CorruptError) << "nothing is written any more";
    EXPECT_THROW(store.remove("t"), CorruptError);
    store.abandon();
  }
  Store again = open(1 << 20);
  EXPECT_EQ(again.commit_number(), 2U);
  EXPECT_EQ(gather(again.table("t"), {0})[0], 2.0F);
  EXPECT_EQ(gather(again.table("t"), {399})[0], 1.0F);
  EXPECT_EQ(again.table("t").verify().bad_pages, 0U);
}

// Every call of a resize fails once: the session goes on with a whole table, and so does one that opens it after a crash at that
// point.
class ResizeFaults : public StoreTest, public testing::WithParamInterface<std::pair<std::uint64_t, std::uint64_t>> {};

TEST_P(ResizeFaults, LeaveAWholeTable) {
  const auto [from, to] = GetParam();
  const std::uint64_t kept = std::min(from, to);
  FailAt ops;
  const auto check = [&](Table table) {
    const std::uint64_t rows = table.rows();
    ASSERT_TRUE(rows == from || rows == to) << rows;
    std::vector<std::int64_t> ids;
    for (std::uint64_t row = 0; row < rows; row += row < 200 ? 1 : 9973) ids.push_back(static_cast<std::int64_t>(row));
    ids.push_back(static_cast<std::int64_t>(rows) - 1);
    const std::vector<float> values = gather(table, ids);
    for (std::size_t i = 0; i < ids.size(); ++i)
      ASSERT_EQ(values[i * 128], static_cast<std::uint64_t>(ids[i]) < kept || rows == from ? 7 : 5) << ids[i] << " of " << rows;
  };
  bool succeeded = false;
  for (int n = 0; !succeeded; ++n) {
    ASSERT_LT(n, 200);
    for (const bool crash : {false, true}) {
      std::filesystem::remove_all(path());
      {
        Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
        Table table = store.create("t", {.rows = from, .dim = 128, .init = Constant{5}});
        scatter(table, range(0, static_cast<std::int64_t>(from)), std::vector<float>(from * 128, 7.0F));
        store.commit();
        ops.left = n;
        try {
          table.resize(to);
          succeeded = true;
        } catch (const IoError&) {
        }
        if (crash) {
          store.abandon();  // with every call failing still: as a crash would leave it
          ops.left = 1 << 30;
        } else {
          ops.left = 1 << 30;
          check(table);
          EXPECT_EQ(table.verify().bad_pages, 0U) << n;
          try {
            if (table.rows() != to) table.resize(to);
            check(table);
            store.close();
          } catch (const CorruptError& error) {
            EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
          }
        }
      }
      Store again = Store::open(path(), {.memory = 1 << 20, .accept_unclean = true});
      check(again.table("t"));
      EXPECT_EQ(again.table("t").verify().bad_pages, 0U) << n;
      again.close();
      EXPECT_EQ(snapshot(path()).size() - std::filesystem::exists(path() / "commits.jsonl"), 5U)
          << "manifest, lock, log and two files";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ResizeFaults,
                         testing::Values(std::pair{16U, 12U}, std::pair{12U, 16U}, std::pair{13U, 14U}, std::pair{100U, 3U},
                                         std::pair{3U, 300'000U}));

// One call of a resize fails, and the session goes on: what comes next begins where the table ends.
TEST_F(StoreTest, RowsAreAppendedAtTheEndAfterAResizeThatFailed) {
  for (const std::uint64_t to : {19U, 300'000U, 5U}) {
    bool succeeded = false;
    for (int n = 0; !succeeded; ++n) {
      ASSERT_LT(n, 200);
      std::filesystem::remove_all(path());
      FailAt ops;
      Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
      Table table = store.create("t", {.rows = 13, .dim = 128});
      scatter(table, range(0, 13), std::vector<float>(13 * 128, 7.0F));
      store.commit();
      ops.once = true;
      ops.left = n;
      try {
        table.resize(to);
        succeeded = true;
      } catch (const IoError&) {
      }
      ops.left = 1 << 30;
      const std::uint64_t rows = table.rows();
      ASSERT_TRUE(rows == to || rows == 13) << rows;
      const std::vector<float> more(3 * 128, 9.0F);
      try {
        ASSERT_EQ(table.append(std::as_bytes(std::span(more))), rows) << "call " << n << " to " << to;
        ASSERT_EQ(table.rows(), rows + 3);
        const auto values = gather(table, {0, 4, static_cast<std::int64_t>(rows) - 1, static_cast<std::int64_t>(rows) + 2});
        EXPECT_EQ(values[0], 7);
        EXPECT_EQ(values[128], 7);
        EXPECT_EQ(values[256], rows == 19 || rows == 300'000 ? 0 : 7);
        EXPECT_EQ(values[384], 9);
        EXPECT_EQ(table.verify().bad_pages, 0U);
      } catch (const CorruptError& error) {
        EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
      }
    }
  }
}

// The last page of a table that becomes smaller gets another checksum. Where it cannot be read just then, nothing happens.
TEST_F(StoreTest, AResizeThatCannotReadTheLastPageChangesNothing) {
  class NoReads final : public FileOps {
   public:
    std::atomic<bool> fail{false};
    ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
      return fail ? (errno = EIO, -1) : FileOps::pread(fd, buffer, bytes, offset);
    }
  } ops;
  Store store = Store::open(path(), {.memory = 1 << 20, .file_ops = &ops});
  Table table = store.create("t", {.rows = 100, .dim = 128});
  scatter(table, range(0, 100), std::vector<float>(100 * 128, 7.0F));
  store.commit();
  ops.fail = true;
  EXPECT_THROW(table.resize(13), IoError);
  ops.fail = false;
  EXPECT_EQ(table.rows(), 100U);
  EXPECT_EQ(test::read_all(table), std::vector<float>(100 * 128, 7.0F));
  table.resize(13);
  EXPECT_EQ(test::read_all(table), std::vector<float>(13 * 128, 7.0F));
  EXPECT_EQ(table.verify().bad_pages, 0U);
}

// One call of an append fails and those after it work, or all fail: the table is as before, and so it is after a crash.
class AppendFaults : public StoreTest, public testing::WithParamInterface<std::tuple<std::uint64_t, std::uint64_t, bool>> {};

TEST_F(StoreTest, BothHeadersOfANewLogHaveTheirPlaceOnTheDisk) {
  Store store = Store::open(path(), {.memory = 1 << 20});
  struct stat status {};
  ASSERT_EQ(::stat((path() / "redo.log").c_str(), &status), 0);
  EXPECT_EQ(status.st_size, 8192);
  EXPECT_GE(status.st_blocks * 512, 8192);  // no hole that a full disk could not fill
}

TEST_P(AppendFaults, LeaveTheTableAsItWas) {
  const auto [before, count, once] = GetParam();
  FailAt ops;
  const std::vector<float> rows(count * 128, 9.0F);
  const auto check = [&](Table table, std::uint64_t expected) {
    ASSERT_EQ(table.rows(), expected);
    const std::vector<float> values = test::read_all(table), sums = test::read_all(table, "sum");
    for (std::uint64_t row = 0; row < expected; ++row) {
      ASSERT_EQ(values[row * 128], row < before ? 7 : 9) << row;
      ASSERT_EQ(sums[row * 128 + 127], 0.5F) << row;
    }
  };
  int failures = 0;
  for (bool succeeded = false; !succeeded;) {
    ASSERT_LT(failures, 800);
    std::filesystem::remove_all(path());
    {
      Store store = Store::open(path(), {.memory = 1 << 20, .file_ops = &ops});
      Table table = store.create(
          "t", {.rows = before, .dim = 128, .optimizer = Adagrad{.initial_accumulator_value = 0.5}, .init = Constant{5}});
      scatter(table, range(0, static_cast<std::int64_t>(before)), std::vector<float>(before * 128, 7.0F));
      store.commit();
      const std::uint64_t commit = store.commit_number();
      ops.once = once;
      ops.left = failures;
      try {
        EXPECT_EQ(table.append(std::as_bytes(std::span(rows))), before);
        succeeded = true;
      } catch (const IoError&) {
      }
      if (!once && !succeeded) store.abandon();  // with every call failing still: as a crash would leave it
      ops.left = 1 << 30;
      // A commit whose record could not be made durable may count, and the store takes no more writes then.
      const bool doubtful = !succeeded && once && table.rows() != before;
      if (doubtful) {
        EXPECT_THROW(store.commit(), CorruptError) << failures;
      }
      if (once || succeeded) {
        check(table, succeeded || doubtful ? before + count : before);
        EXPECT_EQ(table.verify().bad_pages, 0U) << failures;
        try {
          if (!succeeded && !doubtful) {
            table.resize(before + count + 3);  // nothing is left of what was undone
            EXPECT_EQ(gather(table, {static_cast<std::int64_t>(before)})[0], 5.0F);
            EXPECT_EQ(gather(table, {static_cast<std::int64_t>(before + count) + 2})[0], 5.0F);
            table.resize(before);
          }
          if (!doubtful) {
            EXPECT_GT(store.commit_number(), commit);
          }
          store.close();
        } catch (const CorruptError& error) {
          EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
        }
      }
    }
    Store again = Store::open(path(), {.memory = 1 << 20, .accept_unclean = true});
    // So may a commit that is in doubt.
    check(again.table("t"), succeeded || again.table("t").rows() != before ? before + count : before);
    EXPECT_EQ(again.table("t").verify().bad_pages, 0U) << failures;
    again.close();
    EXPECT_EQ(snapshot(path()).size() - std::filesystem::exists(path() / "commits.jsonl"), 5U)
        << "manifest, lock, log and two files";
    failures += !succeeded;
  }
  EXPECT_GT(failures, 8);  // the log goes without room ahead where it is refused
}

INSTANTIATE_TEST_SUITE_P(Sizes, AppendFaults,
                         testing::Combine(testing::Values(0U, 13U), testing::Values(2U, 5000U), testing::Bool()));

// From the n-th call that needs room on, the disk is full; what writes to blocks that are there works.
class DiskFull final : public FileOps {
 public:
  std::atomic<int> left{1 << 30};
  bool full() { return left.fetch_sub(1) <= 0 ? (errno = ENOSPC, true) : false; }
  static bool is_hole(int fd, off_t offset) { return ::lseek(fd, offset, SEEK_DATA) != offset; }
  int open(const char* path, int flags, mode_t mode) override {
    return (flags & O_CREAT) != 0 && full() ? -1 : FileOps::open(path, flags, mode);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    return is_hole(fd, offset) && full() ? -1 : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
    return is_hole(fd, offset) && full() ? -1 : FileOps::pwritev(fd, pieces, count, offset);
  }
  int ftruncate(int fd, off_t bytes) override {
    struct stat status {};
    return ::fstat(fd, &status) == 0 && bytes > status.st_size && full() ? -1 : FileOps::ftruncate(fd, bytes);
  }
};

// Reading needs no room on the disk, however many pages are dirty: rows of pages that find no frame are read past them.
class FullDiskReads : public StoreTest, public testing::WithParamInterface<std::tuple<Durability, std::uint64_t>> {};

TEST_P(FullDiskReads, FindAllRowsThoughEveryFrameIsDirty) {
  const auto [durability, frames] = GetParam();
  constexpr std::int64_t kRows = 64 * 8;  // of 512 bytes, 8 on a page
  DiskFull disk;
  Store store = Store::open(
      path(), {.memory = 1 << 20, .write_behind = false, .durability = durability, .log_limit = 8 << 20, .file_ops = &disk});
  const std::uint64_t few = frames * (4096 + 64) + 200;
  Table table = store.create("t", {.rows = kRows, .dim = 128, .init = Uniform{-1, 1}, .seed = 3, .memory = few});
  std::vector<float> rows = read_all(table);
  const auto set = [&](std::int64_t first, std::int64_t end, float value) {
    test::scatter(table, range(first, end), std::vector<float>(static_cast<std::size_t>(end - first) * 128, value));
    std::fill(rows.begin() + first * 128, rows.begin() + end * 128, value);
  };
  set(100, 300, 1);  // some are in the file, or in the log, some were never written
  store.commit();
  set(200, 300, 2);
  ASSERT_LT(table.stats().frames, 64U);
  const auto dirty_all = static_cast<std::int64_t>(8 * table.stats().frames);
  disk.left = 0;
  std::int64_t changed = 0;
  try {  // as many pages as fit, and then one more
    for (; changed < kRows; changed += 8) set(changed, changed + 8, 3);
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOSPC);
    const auto first = static_cast<std::uint64_t>(changed);  // of a batch that failed, rows are what they were
    table.read(first, 8, std::as_writable_bytes(std::span(rows).subspan(first * 128, 8 * 128)));
  }
  ASSERT_LE(changed, dirty_all + 8);
  const auto expect_rows = [&](const std::vector<std::int64_t>& ids) {
    std::vector<float> wanted;
    for (const std::int64_t id : ids) wanted.insert(wanted.end(), rows.begin() + id * 128, rows.begin() + (id + 1) * 128);
    EXPECT_EQ(gather(table, ids), wanted);
  };
  for (int again = 0; again < 2; ++again) {
    expect_rows({511, 0, 250, 511, 120, 0, 401});
    for (std::int64_t id = 0; id < kRows; id += 7) expect_rows({id});
    expect_rows(range(0, kRows));  // more pages than frames
  }
  EXPECT_THROW(store.commit(), IoError);
  disk.left = 1 << 30;
  expect_rows(range(0, kRows));
  store.close();
  EXPECT_EQ(read_all(open(1 << 20).table("t")), rows);
}

TEST_P(FullDiskReads, GoOnInAStoreThatTakesNoWritesAnyMore) {
  const auto [durability, frames] = GetParam();
  if (durability == Durability::kNone) return;
  struct SyncFails final : FileOps {
    bool fail = false;
    int fdatasync(int fd) override { return fail ? (errno = EIO, -1) : FileOps::fdatasync(fd); }
  } ops;
  Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
  Table table = store.create("t", {.rows = 512, .dim = 128, .memory = frames * (4096 + 64) + 200});
  gather(table, {0});  // from here it has its frames
  const auto in_memory = static_cast<std::int64_t>(8 * table.stats().frames);
  ASSERT_GT(in_memory, 0);
  ASSERT_LT(in_memory, 512);
  const auto fill = [&](float value) {
    scatter(table, range(0, in_memory), std::vector<float>(static_cast<std::size_t>(in_memory) * 128, value));
  };
  fill(3);
  store.commit();
  fill(1);
  ops.fail = true;
  EXPECT_THROW(store.checkpoint(), IoError);
  EXPECT_THROW(fill(2), CorruptError);
  const std::vector<float> zeros(128, 0.0F), ones(128, 1.0F);
  for (std::int64_t id = 511; id >= 0; id -= 3) EXPECT_EQ(gather(table, {id}), id < in_memory ? ones : zeros) << id;
  store.abandon();
}

INSTANTIATE_TEST_SUITE_P(Frames, FullDiskReads,
                         testing::Combine(testing::Values(Durability::kCommit, Durability::kNone), testing::Values(1U, 7U)));

// A resize or an append whose n-th call fails (once, or with all after it, or the disk is full from there on) is done, or an
// error says that it is not; with a log a commit whose record is in doubt is the exception.
enum class Trouble : std::uint8_t { kOnce, kAlways, kFull };
class RowFaults
    : public StoreTest,
      public testing::WithParamInterface<std::tuple<Durability, std::pair<std::uint64_t, std::uint64_t>, Trouble, bool>> {
 protected:
  FailAt calls_;
  DiskFull disk_;
  const test::TemporaryDirectory quick_{test::memory_folder()};  // thousands of syncs
  std::filesystem::path path() const { return quick_ / "store"; }
  void arm(Trouble trouble, int call) {
    calls_.once = trouble == Trouble::kOnce;
    (trouble == Trouble::kFull ? disk_.left : calls_.left) = call;
  }
  bool disarm() {  // whether a call has failed
    const bool failed = std::min(calls_.left.load(), disk_.left.load()) < 0;
    calls_.left = disk_.left = 1 << 30;
    return failed;
  }
};

TEST_P(RowFaults, AreAllOrNothing) {
  const auto [durability, sizes, trouble, crash] = GetParam();
  const auto [from, to] = sizes;
  const std::uint64_t added = to > from && to < 200 ? to - from : 0;  // small growth is an append
  FileOps* const ops = trouble == Trouble::kFull ? static_cast<FileOps*>(&disk_) : &calls_;
  const StoreOptions options{.memory = 1 << 20, .write_behind = false, .durability = durability, .file_ops = ops};
  const auto check = [&](Table table, std::uint64_t rows) {
    ASSERT_EQ(table.rows(), rows);
    const std::vector<float> values = test::read_all(table);
    for (std::uint64_t row = 0; row < rows; row += row < 200 ? 1 : 9973)
      ASSERT_EQ(values[row * 128], row < from ? 7 : added != 0 ? 9 : 5) << row << " of " << rows;
    ASSERT_EQ(table.verify().bad_pages, 0U);
  };
  int errors = 0;
  for (int call = 0;; ++call) {
    SCOPED_TRACE(call);
    ASSERT_LT(call, 200);
    std::filesystem::remove_all(path());
    bool done = false, failed = false, doubtful = false;
    {
      Store store = Store::open(path(), options);
      Table table = store.create("t", {.rows = from, .dim = 128, .init = Constant{5}});
      scatter(table, range(0, static_cast<std::int64_t>(from)), std::vector<float>(from * 128, 7.0F));
      store.commit();
      arm(trouble, call);
      try {
        const std::vector<float> rows(added * 128, 9.0F);
        added != 0 ? void(table.append(std::as_bytes(std::span(rows)))) : table.resize(to);
        done = true;
      } catch (const IoError&) {
        ++errors;
      }
      if (crash) store.abandon();  // with calls failing still
      failed = disarm();
      if (!crash) {
        doubtful = durability == Durability::kCommit && !done && table.rows() == to;
        if (doubtful) {
          EXPECT_THROW(store.commit(), CorruptError);
        }
        check(table, done || doubtful ? to : from);
        try {
          if (table.rows() != 0) scatter(table, {0}, std::vector<float>(128, from != 0 ? 7.0F : 9.0F));
          store.commit();
          if (!done && to > from) {
            table.resize(to);
            table.resize(from);
          }
          store.close();
        } catch (const CorruptError& error) {
          EXPECT_THAT(error.what(), HasSubstr("a sync has failed"));
        }
      }
    }
    StoreOptions later = options;
    later.accept_unclean = true;
    {
      Store again = Store::open(path(), later);
      const std::uint64_t rows = again.table("t").rows();
      // A crash may leave what a call that failed has not told, and a commit in doubt may be there.
      if (done || (!crash && !doubtful)) {
        check(again.table("t"), done ? to : from);
      } else {
        ASSERT_TRUE(rows == from || rows == to);
        check(again.table("t"), rows);
      }
      again.close();
    }
    if (!failed) break;
  }
  EXPECT_GT(errors, 2);
}

INSTANTIATE_TEST_SUITE_P(Sizes, RowFaults,
                         testing::Combine(testing::Values(Durability::kCommit, Durability::kNone),
                                          testing::Values(std::pair{13U, 14U}, std::pair{13U, 100U}, std::pair{0U, 3U},
                                                          std::pair{3U, 300'000U}, std::pair{16U, 13U}, std::pair{100U, 3U},
                                                          std::pair{13U, 0U}),
                                          testing::Values(Trouble::kOnce, Trouble::kAlways, Trouble::kFull), testing::Bool()));

TEST_F(StoreTest, AppendAddsRowsWithInitialState) {
  Store store = open(300'000);
  Table table =
      store.create("t", {.rows = 10, .dim = 3, .optimizer = Adagrad{.initial_accumulator_value = 2}, .init = Constant{5}});
  scatter(table, {9}, {1, 2, 3});
  std::vector<float> rows(3 * 40'000);
  std::iota(rows.begin(), rows.end(), 0.0F);
  const auto bytes = std::as_bytes(std::span(rows));
  EXPECT_EQ(table.append({}), 10U);
  EXPECT_EQ(table.append(bytes.first(12)), 10U);
  EXPECT_EQ(table.append(bytes), 11U);
  EXPECT_EQ(table.rows(), 40'011U);
  EXPECT_EQ(gather(table, {9, 10, 11, 40'010}), (std::vector<float>{1, 2, 3, 0, 1, 2, 0, 1, 2, 119'997, 119'998, 119'999}));
  EXPECT_EQ(gather(table, {40'010}, "sum"), (std::vector<float>{2, 2, 2}));
  EXPECT_THAT(message_of<InvalidArgument>([&] { table.append(bytes.first(13)); }), HasSubstr("13 bytes"));
  EXPECT_EQ(table.rows(), 40'011U);
  store.abandon();  // an append is committed
  Store again = open(300'000);
  EXPECT_EQ(gather(again.table("t"), {40'010}), (std::vector<float>{119'997, 119'998, 119'999}));
  EXPECT_EQ(again.table("t").verify().bad_pages, 0U);
  again.close();
  Store read = open(300'000, StoreOptions::Mode::kRead);
  EXPECT_THROW(read.table("t").append(bytes.first(12)), ReadOnlyError);
}

TEST_F(StoreTest, AnAppendTheBudgetCannotHoldChangesNothing) {
  Store store = open(20'000);
  Table table = store.create("t", {.rows = 1, .dim = 1, .dtype = DType::kInt8});
  const std::vector<std::byte> rows(600'000'000);
  EXPECT_THROW(table.append(rows), BudgetError);
  EXPECT_EQ(table.rows(), 1U);
  EXPECT_EQ(table.append(std::span(rows).first(1000)), 1U);
}

TEST_F(StoreTest, AppendsFromSeveralThreadsEachGetTheirRows) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 0, .dim = 5});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 6; ++i) {
        const std::vector<float> rows(35, static_cast<float>(t * 100 + i));
        const auto first = static_cast<std::int64_t>(table.append(std::as_bytes(std::span(rows))));
        EXPECT_EQ(gather(table, range(first, first + 7)), rows);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(table.rows(), 4U * 6 * 7);
}

TEST_F(StoreTest, AResizeThatWasUndoneLeavesACleanStore) {
  FailAt ops;
  Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
  Table table = store.create("t", {.rows = 13, .dim = 128, .init = Constant{5}});
  scatter(table, range(0, 13), std::vector<float>(13 * 128, 7.0F));
  store.commit();
  // The file's size limit fails the growing; what undoes it works.
  class NoGrowing final : public FileOps {
   public:
    int ftruncate(int fd, off_t bytes) override { return bytes > 1 << 20 ? (errno = EFBIG, -1) : FileOps::ftruncate(fd, bytes); }
  } limited;
  store.close();
  Store again = Store::open(path(), {.memory = 1 << 20, .file_ops = &limited});
  EXPECT_THROW(again.table("t").resize(100'000), IoError);
  EXPECT_EQ(again.table("t").rows(), 13U);
  EXPECT_NO_THROW(open(1 << 20, StoreOptions::Mode::kRead)) << "no pages are ahead of the commit";
  EXPECT_EQ(gather(again.table("t"), {12})[0], 7.0F);
  again.table("t").resize(14);
  EXPECT_EQ(gather(again.table("t"), {13})[0], 5.0F);
}

TEST_F(StoreTest, AWrongBitInThePageFileIsNoticed) {
  {
    Store store = open(1 << 20);
    Table written = store.create("written", {.rows = 1000, .dim = 8});
    scatter(written, range(0, 1000), std::vector<float>(8000, 1));
    store.create("fresh", {.rows = 1000, .dim = 8, .init = Normal{}});
    store.close();
  }
  const auto set_byte = [&](std::string_view file, char value) {
    // With the checksum of its sector: what is wrong here is one bit, not the disk.
    const File pages = File::open(path() / file, File::Mode::kReadWrite);
    std::vector<std::byte> content(508);
    pages.read(4096, content);
    content[0] = static_cast<std::byte>(value);
    const std::uint32_t sum = sector_checksum(content, 8);
    pages.write(4096, content);
    pages.write(4096 + 508, std::as_bytes(std::span(&sum, 1)));
  };
  set_byte("written.pages", 0);
  set_byte("fresh.pages", 1);
  Store store = open(1 << 20);
  EXPECT_EQ(store.table("written").verify().bad_pages, 8U);
  EXPECT_EQ(store.table("fresh").verify().bad_pages, 1U);
  EXPECT_THAT(message_of<CorruptError>([&] { (void)gather(store.table("written"), {0}); }),
              HasSubstr("never written, but has a checksum"));
  EXPECT_THAT(message_of<CorruptError>([&] { (void)read_all(store.table("fresh")); }), HasSubstr("written, but has no checksum"));
}

// A store with an adopted table "t" that embermap has written to, and one of its own.
class AdoptedElsewhereTest : public StoreTest {
 protected:
  AdoptedElsewhereTest() : file_{path().parent_path() / "adopted.npy"}, copy_{path().parent_path() / "copy"} {
    std::filesystem::remove_all(copy_);
    const std::string header = format_npy_header("<f4", {}, 0, {100, 8}, 0);
    write_text(file_, header + std::string(100 * 32, '\0'));
    Store store = open(1 << 20);
    store.adopt("t", file_);
    store.create("own", {.rows = 10, .dim = 2});
    store.close();
    std::filesystem::copy(path(), copy_, std::filesystem::copy_options::recursive);
  }
  ~AdoptedElsewhereTest() override {
    std::filesystem::remove_all(copy_);
    std::filesystem::remove(file_);
  }
  Store open_copy(std::optional<bool> allow = {}) { return Store::open(copy_, {.memory = 1 << 20, .allow_adopted = allow}); }
  std::filesystem::path file_, copy_;
};

TEST_F(AdoptedElsewhereTest, AStoreOpensWhatWasAdoptedInIt) {
  std::filesystem::rename(path(), copy_.string() + "-moved");  // the same directory under another name
  Store store = Store::open(copy_.string() + "-moved", {.memory = 1 << 20});
  EXPECT_EQ(gather(store.table("t"), {3})[0], 0.0F);
  store.close();
  std::filesystem::rename(copy_.string() + "-moved", path());
}

TEST_F(AdoptedElsewhereTest, ACopyListsTheTableAndOpensItOnlyWhenTold) {
  const std::string before = test::file_text(file_);
  {
    Store store = open_copy();
    EXPECT_EQ(store.tables().size(), 2U);
    EXPECT_NO_THROW(store.table("own"));
    const std::string error = message_of<FormatError>([&] { store.table("t"); });
    EXPECT_THAT(error, HasSubstr(file_.filename().string()));
    EXPECT_THAT(error, HasSubstr("copied, unpacked or restored"));
    EXPECT_THAT(error, HasSubstr("allow_adopted"));
    scatter(store.table("own"), {1}, {1, 2});
    store.close();
  }
  EXPECT_EQ(test::file_text(file_), before);
  {
    Store store = open_copy(true);
    EXPECT_NO_THROW(store.table("t"));
  }
  EXPECT_NO_THROW(open_copy().table("t")) << "a writer that was told has recorded it";
}

TEST_F(AdoptedElsewhereTest, NoneIsOpenedWhereThatIsOff) {
  Store store = Store::open(path(), {.memory = 1 << 20, .allow_adopted = false});
  EXPECT_THAT(message_of<FormatError>([&] { store.table("t"); }), HasSubstr("allow_adopted is off"));
}

TEST_F(StoreTest, LinksInTheDirectoryAreNotFollowed) {
  {
    Store store = open(1 << 20);
    store.create("t", {.rows = 10, .dim = 2});
    store.close();
  }
  const std::filesystem::path victim = path().parent_path() / "victim";
  for (const char* name : {"LOCK", "UNCOMMITTED", "embermap.json"}) {
    write_text(victim, "mine");
    const std::filesystem::path link = path() / name, aside = path() / "aside";
    const bool there = std::filesystem::exists(link);
    if (there) std::filesystem::rename(link, aside);
    std::filesystem::create_symlink(victim, link);
    EXPECT_THAT(message_of<FormatError>([&] { open(1 << 20); }), HasSubstr("symbolic link")) << name;
    EXPECT_EQ(test::file_text(victim), "mine") << name;
    std::filesystem::remove(link);
    if (there) std::filesystem::rename(aside, link);
  }
  for (const char* name : {"t.npy", "t.pages"}) {
    const std::filesystem::path link = path() / name;
    std::filesystem::rename(link, victim);
    std::filesystem::create_symlink(victim, link);
    Store store = open(1 << 20);
    EXPECT_THAT(message_of<FormatError>([&] { store.table("t"); }), HasSubstr("symbolic link")) << name;
    store.abandon();
    std::filesystem::remove(link);
    std::filesystem::rename(victim, link);
  }
  EXPECT_NO_THROW(open(1 << 20).table("t"));
  std::filesystem::remove(victim);
}

// A store "s" of a table "t" of 10'000 rows of 8 floats, 128 in a page, and a backup of it.
class RepairTest : public StoreTest {
 protected:
  RepairTest() {
    Store store = open(1 << 20);
    Table table = store.create("t", {.rows = 10'000, .dim = 8});
    std::vector<float> rows(80'000);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
    scatter(table, range(0, 10'000), rows);
    store.close();
    backup_ = path().parent_path() / "backup";
    std::filesystem::remove_all(backup_);
    std::filesystem::copy(path(), backup_, std::filesystem::copy_options::recursive);
  }
  ~RepairTest() override { std::filesystem::remove_all(backup_); }

  static void damage(const std::filesystem::path& file, std::uint64_t at, char value = 'x') {
    File::open(file, File::Mode::kReadWrite).write(at, std::string_view(&value, 1));
  }
  RepairReport repair() {
    Store store = open(1 << 20);
    Store backup = Store::open(backup_, {.mode = StoreOptions::Mode::kRead});
    const RepairReport report = store.table("t").repair_from(backup.table("t"));
    store.close();
    return report;
  }
  std::filesystem::path backup_;
};

TEST_F(RepairTest, BadPagesComeBackFromABackupAndAllElseStays) {
  {
    Store store = open(1 << 20);  // a page is newer than the backup
    Table table = store.table("t");
    scatter(table, range(1280, 1281), std::vector<float>(8, -1));
    store.close();
  }
  for (const std::uint64_t page : {3U, 4U, 10U, 20U}) damage(path() / "t.npy", 4096 + page * 4096 + 17);
  damage(backup_ / "t.npy", 4096 + 20 * 4096 + 100);  // bad there too
  const RepairReport report = repair();
  EXPECT_EQ(report.bad_pages, 4U);
  EXPECT_EQ(report.repaired_pages, 2U);
  ASSERT_EQ(report.repaired.size(), 1U);
  EXPECT_EQ(report.repaired[0].first_row, 384U);
  EXPECT_EQ(report.repaired[0].last_row, 639U);
  ASSERT_EQ(report.left.size(), 2U) << "page 10 is older there, and page 20 bad";
  EXPECT_EQ(report.left[0].page, 10U);
  Store store = open(1 << 20);
  const VerifyReport verified = store.table("t").verify();
  ASSERT_EQ(verified.bad.size(), 2U);
  EXPECT_EQ(verified.bad[0].page, 10U);
  EXPECT_EQ(gather(store.table("t"), {400})[0], 3200.0F);
}

TEST_F(RepairTest, ChecksumsThatWereDamagedComeBackWherePagesAreTheSame) {
  damage(path() / "t.pages", 8192 + 5);             // the checksums of all pages
  damage(path() / "t.npy", 4096 + 5 * 4096 + 100);  // and a page among them
  EXPECT_EQ(open(1 << 20).table("t").verify().bad_pages, 79U);
  const RepairReport report = repair();
  EXPECT_EQ(report.bad_pages, 79U);
  EXPECT_EQ(report.repaired_pages, 78U);
  ASSERT_EQ(report.left.size(), 1U);
  EXPECT_EQ(report.left[0].page, 5U) << "which of the two is right nobody knows";
  EXPECT_EQ(open(1 << 20).table("t").verify().bad_pages, 1U);
}

TEST_F(RepairTest, AnotherTableIsNoBackup) {
  {
    Store backup = Store::open(backup_, {.memory = 1 << 20});
    backup.table("t").resize(9'999);
    backup.close();
  }
  EXPECT_THAT(message_of<InvalidArgument>([&] { repair(); }), HasSubstr("rows: 10000 here and 9999 there"));
}

TEST_F(RepairTest, WhatIsAcceptedIsGoodFromThenOn) {
  damage(path() / "t.npy", 4096 + 3 * 4096);
  damage(path() / "t.pages", 4096 + 400);
  damage(path() / "t.pages", 8192 + 5);
  {
    Store store = open(1 << 20);
    EXPECT_THROW((void)gather(store.table("t"), {400}), CorruptError);
    store.table("t").accept();
    EXPECT_EQ(store.table("t").verify().bad_pages, 0U);
    const auto before = store.commit_number();
    EXPECT_EQ(store.commit(), before + 1);
  }
  Store store = open(1 << 20);
  const VerifyReport report = store.table("t").verify();
  EXPECT_EQ(report.bad_pages, 0U);
  EXPECT_EQ(report.written, 79U) << "bits and checksums were both damaged: bits as the file has them";
}

TEST_F(StoreTest, AProgressCallbackCannotUseItsStore) {
  Store store = open();
  Table table = store.create("t", {.rows = 10'000, .dim = 8});
  const std::vector<std::function<void()>> uses{[&] { (void)store.tables(); }, [&] { (void)gather(table, {1}); },
                                                [&] { store.commit(); }, [&] { (void)table.stats(); }, [&] { store.close(); }};
  for (const auto& use : uses) {
    EXPECT_THAT(message_of<Error>([&] { table.materialize([&](std::uint64_t, std::uint64_t) { use(); }); }),
                HasSubstr("progress callback"));
    EXPECT_THAT(message_of<Error>([&] { table.verify([&](std::uint64_t, std::uint64_t) { use(); }); }),
                HasSubstr("progress callback"));
  }
  EXPECT_EQ(gather(table, {1})[0], 0.0F);
}

TEST_F(StoreTest, ATableRemovedAfterItsPagesWereWrittenLeavesACleanStore) {
  {
    Store store = open(9000);
    Table table = store.create("t", {.rows = 1000, .dim = 128});
    scatter(table, range(0, 1000), std::vector<float>(128000, 3));
    store.remove("t");
    store.close();
  }
  EXPECT_NO_THROW(open(9000));
}

TEST_F(StoreTest, AReaderStaysAtItsCommitAsLongAsTheFilesHaveIt) {
  Store store = open();
  Table table = store.create("t", {.rows = 1000, .dim = 128});
  scatter(table, range(0, 1000), std::vector<float>(128000, 1));
  store.commit();
  Store reader = open(1 << 20, StoreOptions::Mode::kRead);
  EXPECT_EQ(gather(reader.table("t"), {0})[0], 1.0F);
  scatter(table, range(0, 1000), std::vector<float>(128000, 2));
  EXPECT_EQ(gather(reader.table("t"), {500})[0], 1.0F) << "what no commit has is nowhere to be seen";
  store.commit();
  EXPECT_EQ(gather(reader.table("t"), {900})[0], 1.0F) << "a later commit is in the log";
  EXPECT_EQ(gather(open(1 << 20, StoreOptions::Mode::kRead).table("t"), {999})[0], 2.0F);
  table.verify();  // applies what is committed
  EXPECT_THAT(message_of<StaleError>([&] { (void)gather(reader.table("t"), {999}); }),
              HasSubstr("commit 2; this reader is at commit 1"));
  Table handle = reader.table("t");
  store.create("u", {.rows = 3, .dim = 2, .init = Constant{4}});
  EXPECT_EQ(reader.refresh(), 2U);
  EXPECT_EQ(gather(handle, {999})[0], 2.0F);
  EXPECT_EQ(gather(reader.table("u"), {2}), (std::vector<float>{4, 4}));
  store.remove("t");
  store.close();
  EXPECT_EQ(reader.refresh(), 2U);
  EXPECT_THROW(gather(handle, {0}), ClosedError);
  EXPECT_EQ(reader.tables(), std::vector<std::string>{"u"});
}

TEST_F(StoreTest, AReaderOfAStoreWithoutALogNoticesThatAWriterCame) {
  {
    Store store = Store::open(path(), {.memory = 1 << 20, .durability = Durability::kNone});
    for (const char* name : {"a", "b"})
      scatter(store.create(name, {.rows = 1000, .dim = 128}), range(0, 1000), std::vector<float>(128000, 1));
    store.close();
  }
  for (const Durability durability : {Durability::kNone, Durability::kCommit}) {
    Store reader = open(9000, StoreOptions::Mode::kRead);
    const float before = gather(reader.table("a"), {0})[0];
    {
      Store store = Store::open(path(), {.memory = 1 << 20, .durability = durability});
      for (const char* name : {"a", "b"}) scatter(store.table(name), range(0, 1000), std::vector<float>(128000, before + 1));
      store.close();
    }
    EXPECT_THROW((void)gather(reader.table("b"), {999}), StaleError);
    EXPECT_THROW((void)reader.table("b").verify(), StaleError);
    reader.refresh();
    EXPECT_EQ(gather(reader.table("b"), {999})[0], before + 1);
    EXPECT_EQ(reader.table("b").verify().bad_pages, 0U);
  }
}

TEST_F(StoreTest, DamageInTheMiddleOfTheLogIsNotTakenForItsEnd) {
  {
    Store store = open();
    Table table = store.create("t", {.rows = 1000, .dim = 128});
    scatter(table, range(0, 1000), std::vector<float>(128000, 1));
    store.commit();
    store.checkpoint();
    for (const float value : {2.0F, 3.0F, 4.0F}) {
      scatter(table, {0}, std::vector<float>(128, value));
      store.commit();
    }
    store.abandon();
  }
  const std::string good = test::file_text(path() / "redo.log");
  std::string bad = good;
  bad[8192 + 4] ^= 1;  // of the first record
  write_text(path() / "redo.log", bad);
  EXPECT_THAT(message_of<CorruptError>([&] { open(); }), HasSubstr("record at byte 8192 is damaged, and commits up to"));
  EXPECT_EQ(message_of<CorruptError>([&] { open(1U << 30, StoreOptions::Mode::kRead); }),
            message_of<CorruptError>([&] { open(); }));
  write_text(path() / "redo.log", good);
  EXPECT_EQ(gather(open().table("t"), {0})[0], 4.0F);
}

TEST_F(StoreTest, TheIndexOfALongLogStaysInItsShareOfMemory) {
  // The log would hold 262,144 pages; in such a budget the index may take what 32,768 of them do.
  Store store = Store::open(path(), {.memory = 8 << 20, .threads = 2, .log_limit = 1ULL << 30});
  const std::uint64_t rows = 50'000;
  Table table = store.create("t", {.rows = rows, .dim = 4096, .dtype = DType::kUInt8});
  const std::vector<std::byte> some(5'000 * 4096, std::byte{1});
  std::uint64_t most = 0, memory = 0;
  const auto look = [&] {
    most = std::max(most, store.log_stats().pages);
    memory = std::max(memory, store.log_stats().memory_bytes);
  };
  for (std::uint64_t first = 0; first < rows; first += 5'000) {
    table.scatter(range(static_cast<std::int64_t>(first), static_cast<std::int64_t>(first) + 5'000), some);
    look();
  }
  EXPECT_GT(store.commit_number(), 0U) << "by itself";
  EXPECT_LE(most, 32'768U + 5'000U);
  EXPECT_LE(memory, 5U << 20);
  // A write of more than a quarter of what fits is done in stretches.
  store.commit();
  const std::uint64_t commit = store.commit_number();
  const std::vector<std::byte> many(30'000 * 4096, std::byte{2});
  table.write(3, 30'000, many);
  look();
  EXPECT_GT(store.commit_number(), commit);
  EXPECT_LE(most, 32'768U + 5'000U);
  std::vector<std::byte> back(30'002 * 4096);
  table.read(2, 30'002, back);
  EXPECT_EQ(back[4095], std::byte{1});
  EXPECT_TRUE(std::equal(many.begin(), many.end(), back.begin() + 4096));
  EXPECT_EQ(back.back(), std::byte{1});
}

TEST_F(StoreTest, TheLogIsMovedOnOnceMostOfItIsLaterVersionsOfItsPages) {
  constexpr std::int64_t kPages = 1'000;  // 4 MiB
  Store store = Store::open(path(), {.memory = 64 << 20, .threads = 2, .log_limit = 64U << 20});
  Table table = store.create("t", {.rows = 20 * kPages, .dim = 4096, .dtype = DType::kUInt8});
  const std::vector<std::byte> some(kPages * 4096, std::byte{1});
  const auto change = [&](std::int64_t part) {
    table.scatter(range(part * kPages, (part + 1) * kPages), some);
    store.commit();
  };
  const auto moved_on = [&](std::uint64_t to) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (store.log_stats().pages > to && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return store.log_stats().pages <= to;
  };
  for (std::int64_t part = 0; part < 20; ++part) change(part);  // first writes, which are in place
  store.checkpoint();
  for (int version = 0; version < 4; ++version) change(0);
  EXPECT_TRUE(moved_on(0)) << "four versions of each page";
  // Pages that were logged once stay until the log is nearly full, although an eighth of it is used.
  const std::uint64_t applied = store.log_stats().applied_pages;
  for (std::int64_t part = 1; part <= 10; ++part) change(part);
  EXPECT_EQ(store.log_stats().pages, 10'000U);
  EXPECT_EQ(store.log_stats().applied_pages, applied);
  for (std::int64_t part = 11; part <= 14; ++part) change(part);
  EXPECT_TRUE(moved_on(4'000)) << "three quarters of the limit";
}

TEST_F(StoreTest, PagesOfNewTablesCountOnceInTheLogAsWell) {
  constexpr std::int64_t kPages = 1'000;  // 4 MiB
  Store store = Store::open(path(), {.memory = 64 << 20, .threads = 2, .log_limit = 64U << 20});
  Table table = store.create("t", {.rows = 4 * kPages, .dim = 4096, .dtype = DType::kUInt8});
  const std::vector<std::byte> some(kPages * 4096, std::byte{1});
  // First in place, then once to the log, of which they are an eighth.
  for (std::int64_t part = 0; part < 8; ++part) {
    table.scatter(range(part % 4 * kPages, (part % 4 + 1) * kPages), some);
    store.commit();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(store.log_stats().applied_pages, 0U);
  EXPECT_EQ(store.log_stats().pages, 4U * kPages);
}

TEST_F(StoreTest, PagesChangedAgainAndAgainCountOnceForTheIndexOfTheLog) {
  Store store = Store::open(path(), {.memory = 8 << 20, .threads = 2, .log_limit = 1ULL << 30});
  Table table = store.create("t", {.rows = 50'000, .dim = 4096, .dtype = DType::kUInt8});  // the index has room for 32,768 pages
  const std::vector<std::byte> some(5'000 * 4096, std::byte{1});
  const auto change = [&](std::int64_t first) { table.scatter(range(first, first + 5'000), some); };
  change(0);
  store.commit();
  for (int i = 0; i < 5; ++i) change(0);
  change(5'000);
  EXPECT_EQ(store.commit_number(), 1U) << "10,000 pages were changed, 30,000 times";
  for (int i = 0; i < 3; ++i) change(10'000 + i * 5'000);
  EXPECT_GT(store.commit_number(), 1U) << "more than half of the index is of no commit";
}

TEST_F(StoreTest, TablesWhosePagesAllFitTheIndexOfTheLogAreBoundByItsBytesOnly) {
  Store store = Store::open(path(), {.memory = 8 << 20, .threads = 2, .log_limit = 1ULL << 30});
  Table table = store.create("t", {.rows = 30'000, .dim = 4096, .dtype = DType::kUInt8});
  const std::vector<std::byte> some(5'000 * 4096, std::byte{1});
  for (int round = 0; round < 2; ++round)
    for (std::int64_t first = 0; first < 30'000; first += 5'000) table.scatter(range(first, first + 5'000), some);
  EXPECT_EQ(store.commit_number(), 0U);
  EXPECT_LE(store.log_stats().memory_bytes, 5U << 20);
  // With more rows they might not: what is changed is more than half of the index.
  table.resize(40'000);  // a commit
  const std::uint64_t before = store.commit_number();
  for (std::int64_t first = 0; first < 25'000; first += 5'000) table.scatter(range(first, first + 5'000), some);
  EXPECT_GT(store.commit_number(), before);
}

TEST_F(StoreTest, ALogThatIsTakenAwayWithItsCommitsIsMissed) {
  const auto log = path() / "redo.log";
  const auto says_log = [&] { return test::file_text(path() / "embermap.json").find("\"log\": true") != std::string::npos; };
  {
    Store store = open();
    scatter(store.create("t", {.rows = 100, .dim = 128}), {5}, std::vector<float>(128, 1));
    EXPECT_FALSE(says_log());
    store.commit();
    EXPECT_TRUE(says_log());
    store.close();
  }
  EXPECT_FALSE(says_log()) << "closed: all of it is in the files";
  std::filesystem::remove(log);
  EXPECT_EQ(gather(open().table("t"), {5})[0], 1.0F) << "nothing was lost";
  {
    Store store = open();
    scatter(store.table("t"), {5}, std::vector<float>(128, 2));
    EXPECT_EQ(store.commit(), 2U);
    store.abandon();
  }
  std::filesystem::rename(log, path() / "kept");
  for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite, StoreOptions::Mode::kOpenOrCreate})
    EXPECT_THAT(message_of<CorruptError>([&] { open(1 << 20, mode); }),
                AllOf(HasSubstr("redo.log: the redo log is gone"), HasSubstr("at commit 1"), HasSubstr("recover")));
  EXPECT_THAT(message_of<CorruptError>([&] { Store::open(path(), {.memory = 1 << 20, .durability = Durability::kNone}); }),
              HasSubstr("the redo log is gone"));
  EXPECT_TRUE(plan_recovery(path()).unclean);
  EXPECT_FALSE(std::filesystem::exists(log));
  for (const std::uint64_t bytes : {0U, 100U, 4096U}) {
    std::filesystem::copy_file(path() / "kept", log);
    std::filesystem::resize_file(log, bytes);
    for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite})
      EXPECT_THAT(message_of<CorruptError>([&] { open(1 << 20, mode); }), HasSubstr("cut to nothing")) << bytes;
    EXPECT_EQ(std::filesystem::file_size(log), bytes);
    std::filesystem::remove(log);
  }
  // Brought back, it counts.
  std::filesystem::rename(path() / "kept", log);
  EXPECT_EQ(gather(open(1 << 20, StoreOptions::Mode::kRead).table("t"), {5})[0], 2.0F);
  std::filesystem::copy(path(), directory_ / "copy", std::filesystem::copy_options::recursive);
  EXPECT_EQ(gather(open().table("t"), {5})[0], 2.0F);
  EXPECT_FALSE(says_log()) << "applied";
  // Without it the tables are taken as they are where that is wanted.
  for (const Durability durability : {Durability::kNone, Durability::kCommit}) {
    const auto store = directory_ / (durability == Durability::kNone ? "none" : "commit");
    std::filesystem::copy(directory_ / "copy", store, std::filesystem::copy_options::recursive);
    std::filesystem::remove(store / "redo.log");
    EXPECT_EQ(gather(Store::open(store, {.mode = StoreOptions::Mode::kRead, .accept_unclean = true}).table("t"), {5})[0], 1.0F);
    Store::open(store, {.memory = 1 << 20, .durability = durability, .accept_unclean = true}).close();
    EXPECT_EQ(gather(Store::open(store, {.mode = StoreOptions::Mode::kRead}).table("t"), {5})[0], 1.0F);
    EXPECT_TRUE(Store::open(store, {.mode = StoreOptions::Mode::kRead}).table("t").verify().bad_pages == 0);
  }
}

TEST_F(StoreTest, ALogThatWasCutToItsHeadersOrFurtherOnIsMissed) {
  const auto log = path() / "redo.log";
  {
    Store store = open();
    Table table = store.create("t", {.rows = 100, .dim = 128});
    for (float value = 1; value <= 3; ++value) {
      scatter(table, {5, 50}, std::vector<float>(256, value));
      store.commit();
    }
    store.abandon();
  }
  // Commit 1 wrote in place; 2 and 3 have a record of two pages each and their own.
  const auto end = read_log_mark(File::open(log, File::Mode::kRead)).value().end;
  for (const std::uint64_t bytes : {8192UL, 12288UL, end - 4096, end - 1}) {
    const auto store = directory_ / std::to_string(bytes);
    std::filesystem::copy(path(), store, std::filesystem::copy_options::recursive);
    std::filesystem::resize_file(store / "redo.log", bytes);
    for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite}) {
      const auto message = message_of<CorruptError>([&] { Store::open(store, {.mode = mode, .memory = 1 << 20}); });
      EXPECT_THAT(message, AllOf(HasSubstr("the redo log is gone"), HasSubstr("commit 3"))) << bytes;
    }
    const RecoveryPlan plan = plan_recovery(store);
    EXPECT_TRUE(plan.unclean);
    EXPECT_THAT(plan.log_gone, AllOf(HasSubstr("had commit 3"), HasSubstr("cut or damaged"))) << bytes;
    EXPECT_EQ(std::filesystem::file_size(store / "redo.log"), bytes) << "nothing was changed";
    // What is there is taken where that is wanted, and missed no more.
    const std::uint64_t left = bytes < 12288 + 4096 ? 0 : 2;
    Store taken = Store::open(store, {.memory = 1 << 20, .accept_unclean = true});
    EXPECT_GT(taken.commit_number(), left) << bytes;
    scatter(taken.table("t"), {5}, std::vector<float>(128, 9));
    taken.commit();
    taken.abandon();
    EXPECT_EQ(gather(Store::open(store, {.memory = 1 << 20}).table("t"), {5})[0], 9.0F) << bytes;
    EXPECT_TRUE(plan_recovery(store).log_gone.empty());
  }
  // Cut behind its last commit nothing is missing.
  std::filesystem::resize_file(log, end);
  EXPECT_TRUE(plan_recovery(path()).log_gone.empty());
  EXPECT_EQ(gather(open().table("t"), {5})[0], 3.0F);
}

TEST_F(StoreTest, ALastCommitWhoseRecordIsDamagedIsNoCommitThatWasUnderWay) {
  {
    Store store = open();
    Table table = store.create("t", {.rows = 100, .dim = 128});
    for (float value = 1; value <= 2; ++value) {
      scatter(table, {5}, std::vector<float>(128, value));
      store.commit();
    }
    store.abandon();
  }
  const auto log = path() / "redo.log";
  {
    const File file = File::open(log, File::Mode::kReadWrite);
    file.write(read_log_mark(file).value().end - 4096 + 100, std::string_view("?"));
  }
  const std::string why = message_of<CorruptError>([&] { open(); });
  EXPECT_THAT(why, AllOf(HasSubstr("had commit 2, and ends with commit 1"), HasSubstr("cut or damaged")));
  EXPECT_EQ(message_of<CorruptError>([&] { open(1 << 20, StoreOptions::Mode::kRead); }), why);
  EXPECT_THAT(plan_recovery(path()).log_gone, HasSubstr("had commit 2"));
}

TEST_F(StoreTest, ALogWithoutCommitsOfItsOwnMayBeAsLongAsItsHeaders) {
  const auto lengths_of = [&] {
    Store store = open();
    EXPECT_EQ(std::filesystem::file_size(path() / "redo.log"), 8192U);
    return store.commit_number();
  };
  {
    Store store = open();
    scatter(store.create("t", {.rows = 100, .dim = 128}), {5}, std::vector<float>(128, 1));
    store.commit();
    store.checkpoint();  // begins anew: the mark is of the log's life before
    EXPECT_EQ(std::filesystem::file_size(path() / "redo.log"), 8192U);
    store.abandon();
  }
  EXPECT_TRUE(read_log_mark(File::open(path() / "redo.log", File::Mode::kRead)).has_value());
  EXPECT_TRUE(plan_recovery(path()).log_gone.empty());
  EXPECT_EQ(lengths_of(), 1U);
  // A mark that is not whole, as after a crash in the middle of it, says nothing.
  File::open(path() / "redo.log", File::Mode::kReadWrite).write(512 + 20, std::string_view("?"));
  EXPECT_FALSE(read_log_mark(File::open(path() / "redo.log", File::Mode::kRead)).has_value());
  EXPECT_EQ(lengths_of(), 1U);
}

TEST_F(StoreTest, APageFileOfAnotherMomentIsNoticed) {
  for (const Durability durability : {Durability::kCommit, Durability::kNone}) {
    const auto folder = directory_ / (durability == Durability::kNone ? "none" : "commit");
    const auto store_at = [&](std::string_view name) { return folder / name; };
    const auto open_at = [&](const std::filesystem::path& store, bool accept = false, bool reader = false) {
      return Store::open(store, {.mode = reader ? StoreOptions::Mode::kRead : StoreOptions::Mode::kOpenOrCreate,
                                 .memory = 1 << 20,
                                 .durability = durability,
                                 .accept_unclean = accept});
    };
    const auto keep = [&](std::string_view name) {
      std::filesystem::copy(store_at("now"), store_at(name), std::filesystem::copy_options::recursive);
    };
    std::filesystem::create_directories(folder);
    {
      Store store = open_at(store_at("now"));
      scatter(store.create("t", {.rows = 100, .dim = 128}), {5}, std::vector<float>(128, 1));
      scatter(store.create("u", {.rows = 100, .dim = 128}), {5}, std::vector<float>(128, 1));
      EXPECT_EQ(store.commit(), 1U);
      store.close();
    }
    keep("first");
    {
      Store store = open_at(store_at("now"));
      scatter(store.table("t"), {90}, std::vector<float>(128, 2));  // a page that was never written before
      EXPECT_EQ(store.commit(), 2U);
      store.close();
    }
    keep("second");
    const auto mixed = [&](std::string_view store, std::string_view pages_of) {
      const auto mix = store_at(fmt::format("{} with pages of {}", store, pages_of));
      std::filesystem::copy(store_at(store), mix, std::filesystem::copy_options::recursive);
      std::filesystem::copy_file(store_at(pages_of) / "t.pages", mix / "t.pages",
                                 std::filesystem::copy_options::overwrite_existing);
      return mix;
    };
    const auto older = mixed("second", "first");
    const std::string why = "t.pages: is of commit 1, and commit 2 changed the table";
    EXPECT_THAT(message_of<CorruptError>([&] { open_at(older); }), HasSubstr(why));
    EXPECT_THAT(message_of<CorruptError>([&] { open_at(older, false, /*reader=*/true); }), HasSubstr(why));
    EXPECT_EQ(gather(open_at(older, true, /*reader=*/true).table("u"), {5})[0], 1.0F);
    open_at(older, /*accept=*/true).close();
    EXPECT_EQ(gather(open_at(older).table("t"), {5})[0], 1.0F) << "it was taken as it is, for good";
    EXPECT_THAT(message_of<CorruptError>([&] { open_at(mixed("first", "second")); }),
                HasSubstr("t.pages: is of commit 2, and the store is at commit 1"));
    // Those that belong together are good: u's has not changed since the first commit.
    for (const std::string_view name : {"first", "second"}) {
      EXPECT_EQ(gather(open_at(store_at(name), false, /*reader=*/true).table("t"), {90})[0], name == "second" ? 2.0F : 0.0F);
      EXPECT_EQ(gather(open_at(store_at(name)).table("u"), {5})[0], 1.0F);
    }
  }
  // A log whose commits are still to be applied does not hide it.
  const auto store_at = [&](std::string_view name) { return directory_ / "commit" / name; };
  {
    Store store = Store::open(store_at("now"), {.memory = 1 << 20});
    scatter(store.table("t"), {40}, std::vector<float>(128, 3));
    EXPECT_EQ(store.commit(), 3U);
    store.abandon();
  }
  std::filesystem::copy(store_at("now"), store_at("logged"), std::filesystem::copy_options::recursive);
  std::filesystem::copy_file(store_at("first") / "t.pages", store_at("logged") / "t.pages",
                             std::filesystem::copy_options::overwrite_existing);
  const auto before = test::snapshot(store_at("logged"));
  EXPECT_THAT(message_of<CorruptError>([&] { Store::open(store_at("logged"), {.memory = 1 << 20}); }),
              HasSubstr("t.pages: is of commit 1, and commit 2 changed the table"));
  EXPECT_EQ(test::snapshot(store_at("logged")), before);
  std::vector<float> both(128, 2);
  both.resize(256, 3);
  EXPECT_EQ(gather(Store::open(store_at("now"), {.memory = 1 << 20}).table("t"), {90, 40}), both);
}

TEST_F(StoreTest, ASnapshotHasNoLogAndMissesNone) {
  Store store = open();
  scatter(store.create("t", {.rows = 100, .dim = 128}), {5}, std::vector<float>(128, 1));
  store.commit();
  store.snapshot(directory_ / "snapshot");
  EXPECT_EQ(gather(Store::open(directory_ / "snapshot", {.mode = StoreOptions::Mode::kRead}).table("t"), {5})[0], 1.0F);
  EXPECT_EQ(gather(Store::open(directory_ / "snapshot", {.memory = 1 << 20}).table("t"), {5})[0], 1.0F);
}

// When armed, the disk is full for the n-th header of redo.log and those after it; what is written may be there all the same.
class LogHeadersFull final : public FileOps {
 public:
  std::atomic<int> left{1 << 30};
  std::atomic<bool> lands{false};
  int open(const char* path, int flags, mode_t mode) override {
    const int fd = FileOps::open(path, flags, mode);
    if (fd >= 0 && std::string_view(path).ends_with("redo.log")) log_ = fd;
    return fd;
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (fd != log_ || offset % 4096 != 0 || offset >= 8192 || left.fetch_sub(1) > 0)
      return FileOps::pwrite(fd, buffer, bytes, offset);
    if (lands && FileOps::pwrite(fd, buffer, bytes, offset) < 0) return -1;
    return errno = ENOSPC, -1;
  }

 private:
  std::atomic<int> log_{-1};
};

TEST_F(StoreTest, ALogWhoseHeaderFoundTheDiskFullGoesOnWhenThereIsRoom) {
  for (const bool lands : {false, true})
    for (int header = 0; header < 4; ++header) {
      SCOPED_TRACE(testing::Message() << "header " << header << (lands ? ", written all the same" : ""));
      std::filesystem::remove_all(path());
      LogHeadersFull ops;
      ops.lands = lands;
      {
        Store store = Store::open(path(), {.memory = 1 << 20, .io = IoEngine::kThreads, .direct = false, .file_ops = &ops});
        Table table = store.create("t", {.rows = 100, .dim = 128});
        scatter(table, range(0, 100), std::vector<float>(12800, 1.0F));
        store.commit();
        ops.left = header;
        if (header < 2) {  // "applying", and then the tail
          EXPECT_THAT(message_of<IoError>([&] { store.checkpoint(); }), HasSubstr("No space left"));
        } else {  // the log cannot begin anew, which nobody needs
          EXPECT_NO_THROW(store.checkpoint());
        }
        scatter(table, {5}, std::vector<float>(128, 2.0F));
        if (header == 2) {
          EXPECT_THAT(message_of<IoError>([&] { store.commit(); }), HasSubstr("No space left"));
        } else {
          store.commit();
        }
        ops.left = 1 << 30;
        scatter(table, {6}, std::vector<float>(128, 3.0F));
        store.commit();
        if (lands) {
          store.abandon();
        } else {
          store.checkpoint();
          store.close();
        }
      }
      Store again = open(1 << 20);
      EXPECT_EQ(gather(again.table("t"), {4, 5, 6})[0], 1.0F);
      EXPECT_EQ(gather(again.table("t"), {5})[0], 2.0F);
      EXPECT_EQ(gather(again.table("t"), {6})[0], 3.0F);
      EXPECT_EQ(again.table("t").verify().bad_pages, 0U);
    }
}

TEST_F(StoreTest, TheLogIsAppliedWhileATableIsVerified) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 1000, .dim = 128});
  scatter(table, range(0, 1000), std::vector<float>(128000, 1.0F));
  store.commit();
  bool applied = false;
  std::future<void> checkpoint;
  table.verify([&](std::uint64_t, std::uint64_t) {
    if (!checkpoint.valid()) checkpoint = std::async(std::launch::async, [&] { store.checkpoint(); });
    applied = applied || checkpoint.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  });
  EXPECT_TRUE(applied);
}

// Two stores "a" and "b" with a table each whose log is not empty.
class ForeignLogTest : public StoreTest {
 protected:
  ForeignLogTest() {
    for (const char* name : {"a", "b"}) {
      Store store = Store::open(directory_ / name, {.memory = 1 << 20});
      Table table = store.create("t", {.rows = 1000, .dim = 128});
      for (const float value : {1.0F, 2.0F}) {
        scatter(table, range(0, 1000), std::vector<float>(128000, value + (*name == 'b' ? 10 : 0)));
        store.commit();
      }
      store.abandon();
    }
  }
  std::string id(std::string_view name) const {
    const std::string text = test::file_text(directory_ / name / "embermap.json");
    const std::string key = "\"store_id\": \"";
    return text.substr(text.find(key) + key.size(), 32);
  }
  // Changes embermap.json as who does so by hand.
  void drop_id(std::string_view name) {
    const std::filesystem::path file = directory_ / name / "embermap.json";
    std::string text = test::file_text(file);
    const std::size_t at = text.find("  \"store_id\""), sum = text.rfind(",\n  \"checksum\"");
    text = text.substr(0, sum) + "\n}\n";
    test::write_text(file, text.erase(at, text.find('\n', at) + 1 - at));
  }
};

TEST_F(ForeignLogTest, TheLogOfAnotherStoreIsRefusedAndNothingChanges) {
  ASSERT_NE(id("a"), id("b"));
  std::filesystem::copy_file(directory_ / "b" / "redo.log", directory_ / "a" / "redo.log",
                             std::filesystem::copy_options::overwrite_existing);
  auto before = snapshot(directory_ / "a");
  const auto refused = [&](const auto& call) {
    EXPECT_THAT(message_of<FormatError>(call),
                AllOf(HasSubstr("redo.log"), HasSubstr("belongs to store " + id("b")), HasSubstr("this is store " + id("a"))));
  };
  using Mode = StoreOptions::Mode;
  for (const Mode mode : {Mode::kRead, Mode::kReadWrite, Mode::kOpenOrCreate})
    for (const Durability durability : {Durability::kCommit, Durability::kNone})
      refused([&] { Store::open(directory_ / "a", {.mode = mode, .memory = 1 << 20, .durability = durability}); });
  refused([&] { plan_recovery(directory_ / "a"); });
  auto after = snapshot(directory_ / "a");
  before.erase("LOCK");
  after.erase("LOCK");
  EXPECT_EQ(before, after);
}

TEST_F(ForeignLogTest, LogsAndManifestsOfBeforeGetAnId) {
  // A log without an id is taken for the store's.
  const std::string log_id = id("a");
  for (const std::uint64_t slot : {0U, 4096U})
    File::open(directory_ / "a" / "redo.log", File::Mode::kReadWrite).write(slot + 64, std::string(24, '\0'));
  EXPECT_EQ(gather(Store::open(directory_ / "a", {.mode = StoreOptions::Mode::kRead}).table("t"), {5})[0], 2.0F);
  Store::open(directory_ / "a", {.memory = 1 << 20}).close();
  EXPECT_NE(test::file_text(directory_ / "a" / "redo.log").substr(64, 24), std::string(24, '\0'));
  EXPECT_EQ(id("a"), log_id);
  // A manifest without one gets the log's.
  const std::string other = id("b");
  drop_id("b");
  EXPECT_EQ(gather(Store::open(directory_ / "b", {.mode = StoreOptions::Mode::kRead}).table("t"), {5})[0], 12.0F);
  Store::open(directory_ / "b", {.memory = 1 << 20}).close();
  EXPECT_EQ(id("b"), other);
  // Neither has one.
  drop_id("b");
  std::filesystem::remove(directory_ / "b" / "redo.log");
  {
    Store store = Store::open(directory_ / "b", {.memory = 1 << 20});
    EXPECT_EQ(gather(store.table("t"), {5})[0], 12.0F);
    EXPECT_NE(id("b"), other) << "at once";
  }
  EXPECT_NO_THROW(Store::open(directory_ / "b", {.memory = 1 << 20}));
}

// A store at several moments of its life, beside each other: "first", "log" with commits in its log that its files do not have,
// "later", closed after more commits. Commit c has rows of c.
class MomentsTest : public StoreTest {
 protected:
  MomentsTest() {
    Store store = Store::open(directory_ / "store", {.memory = 1 << 20});
    Table table = store.create("t", {.rows = 100, .dim = 128});
    const auto go_on = [&](int commits) {
      for (int i = 0; i < commits; ++i) {
        const auto value = static_cast<float>(store.commit_number() + 1);
        scatter(table, range(0, 100), std::vector<float>(12800, value));
        store.commit();
      }
    };
    go_on(1);
    store.checkpoint();
    keep("first");
    go_on(3);
    keep("log");
    go_on(3);
    store.close();
    keep("later");
  }
  void keep(const char* name) { std::filesystem::copy(directory_ / "store", directory_ / name); }
  // A copy of `store` with a file of that name from `other`.
  std::filesystem::path mixed(const char* store, const char* other, std::initializer_list<const char*> files) {
    const std::filesystem::path at = directory_ / "mixed";
    std::filesystem::remove_all(at);
    std::filesystem::copy(directory_ / store, at);
    for (const char* file : files)
      std::filesystem::copy_file(directory_ / other / file, at / file, std::filesystem::copy_options::overwrite_existing);
    return at;
  }
  void expect_refused(const std::filesystem::path& store, std::string_view why) {
    using Mode = StoreOptions::Mode;
    auto before = snapshot(store);
    for (const Mode mode : {Mode::kRead, Mode::kReadWrite, Mode::kOpenOrCreate})
      for (const Durability durability : {Durability::kCommit, Durability::kNone})
        EXPECT_THAT(
            message_of<FormatError>([&] { Store::open(store, {.mode = mode, .memory = 1 << 20, .durability = durability}); }),
            AllOf(HasSubstr("redo.log"), HasSubstr("another moment"), HasSubstr(why)));
    EXPECT_THAT(message_of<FormatError>([&] { plan_recovery(store); }), HasSubstr(why));
    auto after = snapshot(store);
    before.erase("LOCK");
    after.erase("LOCK");
    EXPECT_EQ(before, after);
  }
};

TEST_F(MomentsTest, AnOldLogIsNotAppliedToLaterTables) {
  expect_refused(mixed("later", "log", {"redo.log"}), "which is at commit 7: the log's last is 4");
  expect_refused(mixed("later", "first", {"redo.log"}), "which is at commit 7: the log's last is 1");
}

TEST_F(MomentsTest, AnOldManifestOfTablesThatHaveGoneOnIsRefused) {
  expect_refused(mixed("later", "first", {"embermap.json"}), "which is at commit 1: the tables' files have gone on to 7");
}

TEST_F(MomentsTest, ATableOfALaterMomentIsNotOpenedWithTheLogOfBefore) {
  expect_refused(mixed("log", "later", {"embermap.json", "t.npy", "t.pages"}), "which is at commit 7: the log's last is 4");
}

TEST_F(MomentsTest, WhatIsOfOneMomentOpens) {
  for (const auto& [name, commit] : {std::pair("first", 1), std::pair("log", 4), std::pair("later", 7)})
    for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite}) {
      Store store = Store::open(directory_ / name, {.mode = mode, .memory = 1 << 20});
      EXPECT_EQ(store.commit_number(), static_cast<std::uint64_t>(commit));
      EXPECT_EQ(gather(store.table("t"), {5})[0], static_cast<float>(commit));
    }
  // With the log moved away the manifest counts.
  const auto without = mixed("later", "log", {"redo.log"});
  std::filesystem::remove(without / "redo.log");
  EXPECT_EQ(gather(Store::open(without, {.memory = 1 << 20}).table("t"), {5})[0], 7.0F);
}

TEST_F(StoreTest, ALogThatIsCutAfterItsHeaderWasReadIsLookedAtAgain) {
  {
    Store store = open();
    scatter(store.create("t", {.rows = 10, .dim = 128}), {5}, std::vector<float>(128, 3));
    store.close();
  }
  // The log began anew, and is not cut yet.
  class Cuts final : public FileOps {
   public:
    ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
      if (offset == 8192 && ++reads == 1) EXPECT_EQ(::truncate(log.c_str(), 8192), 0);
      return FileOps::pread(fd, buffer, bytes, offset);
    }
    std::filesystem::path log;
    int reads = 0;
  };
  const std::filesystem::path log = path() / "redo.log";
  for (const bool history : {false, true}) {
    std::filesystem::resize_file(log, 65536);
    Cuts ops;
    ops.log = log;
    if (history) {
      EXPECT_TRUE(commits_in_log(log, ops).empty());
    } else {
      Store reader = Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20, .file_ops = &ops});
      EXPECT_EQ(gather(reader.table("t"), {5})[0], 3.0F);
    }
    EXPECT_GE(ops.reads, 1);
    EXPECT_EQ(std::filesystem::file_size(log), 8192U);
  }
}

TEST_F(StoreTest, ATableThatIsRemovedWhileAReaderOpensIsNotThere) {
  Store store = open();
  for (const char* name : {"a", "t"}) store.create(name, {.rows = 10, .dim = 4});
  class Removes final : public FileOps {
   public:
    int open(const char* file, int flags, mode_t mode) override {
      if (std::string_view(file).ends_with("/t.npy") && std::exchange(store, nullptr) != nullptr) owner.remove("t");
      return FileOps::open(file, flags, mode);
    }
    explicit Removes(Store& of) : owner{of}, store{&of} {}
    Store& owner;
    Store* store;
  };
  Removes ops(store);
  Store reader = Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20, .file_ops = &ops});
  EXPECT_EQ(ops.store, nullptr);
  EXPECT_EQ(reader.tables(), std::vector<std::string>{"a"});
  EXPECT_THROW(reader.table("t"), NotFound);
}

TEST_F(StoreTest, AMarkThatAWriterRemovesWhileAReaderOpensIsNoError) {
  Store store = Store::open(path(), {.memory = 1 << 20, .durability = Durability::kNone});
  Table table = store.create("t", {.rows = 10, .dim = 4});
  store.commit();
  class Commits final : public FileOps {
   public:
    int open(const char* file, int flags, mode_t mode) override {
      if (std::string_view(file).ends_with("/UNCOMMITTED")) {
        ++looks;
        if (Store* const of = std::exchange(store, nullptr); of != nullptr) of->commit();
      }
      return FileOps::open(file, flags, mode);
    }
    Store* store = nullptr;
    int looks = 0;
  };
  Commits ops;
  ops.store = &store;
  scatter(table, {5}, std::vector<float>(4, 3));
  table.verify();  // writes it
  ASSERT_TRUE(std::filesystem::exists(path() / "UNCOMMITTED"));
  Store reader = Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20, .file_ops = &ops});
  EXPECT_GE(ops.looks, 2) << "at what the commit left";
  EXPECT_EQ(gather(reader.table("t"), {5})[0], 3.0F);
}

TEST_F(StoreTest, AReaderFollowsFilesThatGetItsOwnCommit) {
  Store store = open(9000);  // pages leave memory before the commit
  Table table = store.create("t", {.rows = 1000, .dim = 128, .init = Constant{3}});
  scatter(table, range(0, 600), std::vector<float>(600 * 128, 1));
  store.commit();
  table.verify();
  scatter(table, range(300, 800), std::vector<float>(500 * 128, 2));
  store.commit();
  Store reader = open(9000, StoreOptions::Mode::kRead);
  const auto expect = [&](float last) {
    EXPECT_EQ(gather(reader.table("t"), {0, 299, 300, 799, 800})[0], 1.0F);
    EXPECT_EQ(gather(reader.table("t"), {300})[0], 2.0F);
    EXPECT_EQ(gather(reader.table("t"), {799})[127], last);
    EXPECT_EQ(gather(reader.table("t"), {800})[0], 3.0F);
  };
  expect(2.0F);
  table.verify();  // what was in the log is in the files, and the log begins anew
  expect(2.0F);
  scatter(table, {799}, std::vector<float>(128, 9.0F));
  store.commit();
  expect(2.0F);
  store.close();
  EXPECT_THROW(read_all(reader.table("t")), StaleError);
  reader.refresh();
  expect(9.0F);
}

TEST_F(StoreTest, AReaderCanTakeAnUncleanStoreAsItIs) {
  {
    Store store = Store::open(path(), {.memory = 9000, .durability = Durability::kNone});
    Table table = store.create("t", {.rows = 1000, .dim = 128});
    scatter(table, range(0, 1000), std::vector<float>(128000, 1));
    store.commit();
    scatter(table, range(0, 1000), std::vector<float>(128000, 2));
    store.abandon();
  }
  Store reader = Store::open(path(), {.mode = StoreOptions::Mode::kRead, .accept_unclean = true});
  for (const float value : read_all(reader.table("t"))) ASSERT_TRUE(value == 1 || value == 2);
  for (const float value : gather(reader.table("t"), range(0, 1000))) ASSERT_TRUE(value == 1 || value == 2);
}

// When told to, writes the first half of what one call is given, and fails.
class HalfWrites final : public FileOps {
 public:
  std::atomic<bool> fail{false};
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (!fail.exchange(false)) return FileOps::pwrite(fd, buffer, bytes, offset);
    if (FileOps::pwrite(fd, buffer, bytes / 2, offset) < 0) return -1;
    return errno = EIO, -1;
  }
  ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
    return fail ? pwrite(fd, pieces->iov_base, pieces->iov_len, offset) : FileOps::pwritev(fd, pieces, count, offset);
  }
};

TEST_F(StoreTest, PagesOfAWriteThatFailedHalfWayCanBeRead) {
  HalfWrites ops;
  Store store = Store::open(path(), {.memory = 1 << 20, .file_ops = &ops});
  Table table = store.create("t", {.rows = 2000, .dim = 128});
  const std::vector<float> ones(128000, 1), twos(128000, 2);
  table.write(0, 1000, std::as_bytes(std::span(ones)));  // also makes the mark, which must not be what fails
  ops.fail = true;
  EXPECT_THROW(table.write(504, 1000, std::as_bytes(std::span(twos))), IoError);
  ops.fail = false;
  const auto rows = read_all(table);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t row = i / 128;
    const float before = row < 1000 ? 1.0F : 0.0F;
    ASSERT_TRUE(rows[i] == before || (rows[i] == 2 && row >= 504 && row < 1504)) << row;
  }
  EXPECT_THAT(rows, testing::Contains(2.0F));
  EXPECT_EQ(table.verify().bad_pages, 0U);
}

TEST_F(StoreTest, MemoryOfAllTablesChangesOrOfNone) {
  HalfWrites ops;
  Store store = Store::open(path(), {.memory = 1 << 20, .write_behind = false, .file_ops = &ops});
  Table first = store.create("first", {.rows = 10000, .dim = 128}), second = store.create("second", {.rows = 10000, .dim = 128});
  (void)gather(first, {0});
  scatter(second, {0}, std::vector<float>(128, 1));
  const auto before = std::pair(first.stats().memory_bytes, second.stats().memory_bytes);
  ops.fail = true;
  EXPECT_THROW(first.set_memory(700000), IoError);
  ops.fail = false;
  EXPECT_EQ(first.memory(), 0U);
  EXPECT_EQ(std::pair(first.stats().memory_bytes, second.stats().memory_bytes), before);
  EXPECT_EQ(gather(second, {0})[0], 1.0F);
  first.set_memory(700000);
  (void)gather(first, {0});
  EXPECT_GT(first.stats().memory_bytes, 650000U);
}

TEST_F(StoreTest, TheLeastMemoryIsNamedAlsoWhereThereAreNoTables) {
  const std::string text = message_of<BudgetError>([&] { open(0); });
  EXPECT_THAT(text, AllOf(HasSubstr("memory 0 B is too small"), HasSubstr("one page of one table takes ")));
  EXPECT_FALSE(std::filesystem::exists(path()));
  const std::size_t at = text.find("takes ") + 6;
  Store store = open(std::stoull(text.substr(at)));
  EXPECT_EQ(gather(store.create("t", {.rows = 1, .dim = 1024, .init = Constant{3}}), {0})[0], 3.0F);
}

TEST_F(StoreTest, MemoryBeyondTheMachinesIsTakenOnlyWhereThereArePagesForIt) {
  const std::uint64_t machine = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * 4096;
  Store store = open(1ULL << 50);
  EXPECT_EQ(gather(store.create("small", {.rows = 10, .dim = 4, .init = Constant{3}}), {9})[0], 3.0F);
  Table large = store.create("large", {.rows = machine / 4096 + 1000, .dim = 1024});
  EXPECT_THAT(message_of<BudgetError>([&] { (void)gather(large, {0}); }),
              AllOf(HasSubstr("table 'large'"), HasSubstr("this machine has")));
  large.set_memory(64 << 20);
  EXPECT_EQ(gather(large, {0})[0], 0.0F);
}

TEST_F(StoreTest, GathersGoOnWhileATableIsResized) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 1000, .dim = 16, .init = Constant{3}});
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread reader([&] {
    while (!stop)
      for (const float value : gather(table, {0, 99, 50})) wrong += value != 3;
  });
  for (int i = 0; i < 20; ++i) table.resize(i % 2 == 0 ? 5000 : 100);
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(StoreTest, WhatAThreadChangesWhileTheStoreIsClosedIsCommittedOrRefused) {
  float last = 0;  // over all rounds: in some the store is closed before the thread gets to write
  for (int round = 0; round < 10; ++round) {
    {
      Store store = open(1 << 20);
      Table table = store.contains("t") ? store.table("t") : store.create("t", {.rows = 10, .dim = 1});
      std::thread writer([&] {
        try {
          for (float i = last + 1;; ++i) {
            scatter(table, {0}, {i});
            last = i;
          }
        } catch (const ClosedError&) {
        }
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      store.close();
      writer.join();
    }
    EXPECT_EQ(gather(open(1 << 20).table("t"), {0})[0], last);
  }
}

}  // namespace
}  // namespace embermap
