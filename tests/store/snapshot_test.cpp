// Snapshots: of stores that stand still, that are trained meanwhile, of all kinds of tables; interrupted, and gone on with.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "store/snapshot.hpp"
#include "tests/store/power_loss.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using testing::HasSubstr;
using Mode = StoreOptions::Mode;

// What two tables hold: all columns of a row have the same value.
struct Model {
  std::vector<float> a, b, sum;  // rows of "a", of "b", and of its state
  bool operator==(const Model&) const = default;
};

constexpr std::uint64_t kDimA = 256, kDimB = 128;

std::vector<float> spread(const std::vector<float>& rows, std::uint64_t dim) {
  std::vector<float> out;
  for (const float row : rows) out.insert(out.end(), dim, row);
  return out;
}

std::vector<float> first_column(const std::vector<float>& values, std::uint64_t dim) {
  std::vector<float> rows;
  for (std::size_t i = 0; i < values.size(); i += dim) {
    rows.push_back(values[i]);
    for (std::size_t j = i; j < i + dim; ++j) EXPECT_EQ(values[j], values[i]) << "row " << i / dim << " is torn";
  }
  return rows;
}

Model model_of(Store& store) {
  return {first_column(test::read_all(store.table("a")), kDimA), first_column(test::read_all(store.table("b")), kDimB),
          first_column(test::read_all(store.table("b"), "sum"), kDimB)};
}

class Snapshot : public test::StoreTest {
 protected:
  std::filesystem::path copy() const { return directory_ / "copy"; }
  StoreOptions options(Mode mode = Mode::kOpenOrCreate, std::uint64_t log_limit = 16U << 20) const {
    return {.mode = mode, .memory = 4U << 20, .threads = 2, .log_limit = log_limit, .autocommit = false};
  }
  Store open_now(Mode mode = Mode::kOpenOrCreate) const { return Store::open(path(), options(mode)); }

  // Two tables, of which the second has state.
  static Model make_tables(Store& store, std::uint64_t rows_a = 400, std::uint64_t rows_b = 200) {
    store.create("a", {.rows = rows_a, .dim = kDimA, .init = Constant{0.5}});
    store.create("b", {.rows = rows_b, .dim = kDimB, .optimizer = Adagrad{.initial_accumulator_value = 0.25}});
    return {std::vector<float>(rows_a, 0.5F), std::vector<float>(rows_b, 0.0F), std::vector<float>(rows_b, 0.25F)};
  }
  // Some rows of each get another value.
  static void change(Store& store, Model& model, std::mt19937& random, std::uint64_t rows = 20) {
    const auto some = [&](const std::string& name, std::vector<float>& values, std::uint64_t dim, std::string_view field) {
      std::set<std::int64_t> ids;
      while (ids.size() < std::min<std::uint64_t>(rows, values.size()))
        ids.insert(static_cast<std::int64_t>(random() % values.size()));
      std::vector<float> given;
      for (const std::int64_t id : ids) {
        const auto value = static_cast<float>(random() % 1'000'000);
        values[static_cast<std::size_t>(id)] = value;
        given.push_back(value);
      }
      test::scatter(store.table(name), {ids.begin(), ids.end()}, spread(given, dim), field);
    };
    some("a", model.a, kDimA, "weight");
    some("b", model.b, kDimB, "weight");
    some("b", model.sum, kDimB, "sum");
  }
  // Opens a snapshot in every way there is.
  static void expect_is(const std::filesystem::path& snapshot, std::uint64_t commit, const Model& model) {
    Store store = Store::open(snapshot, {.mode = Mode::kRead, .memory = 64U << 20, .threads = 1});
    EXPECT_EQ(store.commit_number(), commit);
    EXPECT_EQ(model_of(store), model);
    for (const std::string& name : store.tables()) {
      const VerifyReport report = store.table(name).verify();
      EXPECT_EQ(report.bad_pages, 0U) << name;
      EXPECT_EQ(report.verified, report.written) << name;
    }
    for (const std::string_view name : {kSnapshotName, UncommittedMark::kName})
      EXPECT_FALSE(std::filesystem::exists(snapshot / name));
  }
};

TEST_F(Snapshot, HasTheLastCommitAndNothingAfterIt) {
  std::mt19937 random(1);
  Store store = open_now();
  Model model = make_tables(store);
  store.commit("{}");
  change(store, model, random);
  store.commit();
  store.checkpoint();
  change(store, model, random);  // in the log
  store.commit(R"({"step": 3})");
  Model later = model;
  change(store, later, random);  // and what no commit has
  const SnapshotReport report = store.snapshot(copy());
  EXPECT_EQ(report.commit, store.last_commit());
  EXPECT_EQ(report.copied_pages, report.pages);
  EXPECT_EQ(report.rounds, 1U);
  expect_is(copy(), 3, model);

  // It is a store like any other, with its notes, and goes its own way.
  Store again = Store::open(copy(), options());
  EXPECT_EQ(again.commits(), store.commits());
  change(again, model, random);
  EXPECT_EQ(again.commit(), 4U);
  again.close();
  expect_is(copy(), 4, model);
  EXPECT_EQ(store.commit(), 4U);
  EXPECT_EQ(model_of(store), later);
}

TEST_F(Snapshot, OfAReaderIsOfTheLastCommit) {
  std::mt19937 random(2);
  Store writer = open_now();
  Model model = make_tables(writer);
  change(writer, model, random);
  writer.commit();
  Store reader = open_now(Mode::kRead);
  change(writer, model, random);
  writer.commit();
  EXPECT_EQ(reader.snapshot(copy()).commit.number, 2U);
  EXPECT_EQ(reader.commit_number(), 1U);
  expect_is(copy(), 2, model);
}

// Every snapshot is the model of its commit, whoever takes it.
class WhileTraining : public Snapshot, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(InTheWritersProcess, WhileTraining, testing::Bool());

TEST_P(WhileTraining, IsTheModelOfItsCommit) {
  std::mt19937 random(3);
  Store writer = Store::open(path(), options(Mode::kOpenOrCreate, /*log_limit=*/1U << 20));  // applied all the time
  std::mutex mutex;
  std::map<std::uint64_t, Model> models;  // by commit
  Model model = make_tables(writer);
  change(writer, model, random);
  models[1] = model;
  writer.commit();
  std::atomic<bool> stop{false};
  std::thread trainer([&] {
    for (std::uint64_t i = 2; !stop; ++i) {
      change(writer, model, random);
      {
        const std::lock_guard lock(mutex);
        models[i] = model;
      }
      EXPECT_EQ(writer.commit(), i);
      if (i % 7 == 0) writer.checkpoint();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  std::optional<Store> reader;
  if (!GetParam()) reader = open_now(Mode::kRead);
  std::uint64_t last = 0;
  for (int i = 0; i < 12; ++i) {
    const auto destination = directory_ / std::to_string(i);
    const SnapshotReport report = (reader ? *reader : writer).snapshot(destination);
    EXPECT_GE(report.commit.number, last);
    last = report.commit.number;
    const std::lock_guard lock(mutex);
    ASSERT_TRUE(models.contains(last));
    expect_is(destination, last, models.at(last));
  }
  stop = true;
  trainer.join();
  EXPECT_GT(last, 1U);
}

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped") {}
};

// The writer comes in between, in the callback that tells how far the snapshot is.
class Between : public Snapshot {
 protected:
  // Takes a snapshot as another process does; `body` runs once, when a part is copied.
  SnapshotReport take(const std::function<void()>& body) {
    Store reader = open_now(Mode::kRead);
    bool done = false;
    return reader.snapshot(copy(), [&](std::uint64_t bytes, std::uint64_t) {
      if (bytes == 0 || std::exchange(done, true)) return;
      body();
    });
  }
};

TEST_F(Between, WhatTheWriterMovesOnIsCopiedAgain) {
  std::mt19937 random(4);
  Store writer = open_now();
  Model model = make_tables(writer);
  for (int i = 0; i < 10; ++i) change(writer, model, random);
  writer.commit();
  writer.checkpoint();
  const SnapshotReport report = take([&] {
    change(writer, model, random, /*rows=*/2);
    writer.commit();
    writer.checkpoint();
  });
  EXPECT_GE(report.rounds, 2U);
  EXPECT_LT(report.copied_pages, report.pages + 10);
  expect_is(copy(), 2, model);
}

TEST_F(Between, TablesGrowShrinkAndComeAndGo) {
  std::mt19937 random(5);
  const auto refill = [&](std::vector<float>& rows, std::uint64_t count, float initial) { rows.resize(count, initial); };
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    std::filesystem::remove_all(path());
    std::filesystem::remove_all(copy());
    Store writer = open_now();
    Model model = make_tables(writer);
    for (int j = 0; j < 20; ++j) change(writer, model, random);
    writer.commit();
    writer.checkpoint();
    const SnapshotReport report = take([&] {
      if (i == 0) {
        writer.table("a").resize(1001);
        refill(model.a, 1001, 0.5F);
      } else if (i == 1) {
        writer.table("a").resize(37);
        refill(model.a, 37, 0.5F);
      } else if (i == 2) {  // pages that were copied are initial rows now
        writer.table("a").resize(37);
        writer.table("a").resize(400);
        refill(model.a, 37, 0.5F);
        refill(model.a, 400, 0.5F);
      } else {
        writer.remove("a");
        writer.create("a", {.rows = 90, .dim = kDimA, .init = Constant{0.25}});
        model.a.assign(90, 0.25F);
      }
      change(writer, model, random, /*rows=*/1);
      writer.commit();
      writer.checkpoint();
    });
    EXPECT_GE(report.rounds, 2U);
    expect_is(copy(), writer.commit_number(), model);
  }
}

TEST_F(Between, AWriterThatIsAlwaysFasterIsAnErrorAndTheNextCallGoesOn) {
  std::mt19937 random(6);
  Store writer = open_now();
  Model model = make_tables(writer);
  change(writer, model, random);
  writer.commit();
  Store reader = open_now(Mode::kRead);
  const std::string message = test::message_of<StaleError>([&] {
    reader.snapshot(copy(), [&](std::uint64_t, std::uint64_t) {
      change(writer, model, random);
      writer.commit();
      writer.checkpoint();
    });
  });
  EXPECT_THAT(message, HasSubstr("the writer has moved the store on"));
  EXPECT_FALSE(is_store(copy()));
  EXPECT_THAT(test::message_of<FormatError>([&] { Store::open(copy(), {.mode = Mode::kRead}); }),
              HasSubstr("half-done snapshot"));
  EXPECT_THAT(test::message_of<FormatError>([&] { Store::open(copy()); }), HasSubstr("half-done snapshot"));
  reader.snapshot(copy());
  expect_is(copy(), writer.commit_number(), model);
}

TEST_F(Between, TheStoreIsNotToBeUsedInProgressOfItsOwn) {
  Store writer = open_now();
  std::mt19937 random(7);
  Model model = make_tables(writer);
  change(writer, model, random);
  writer.commit();
  EXPECT_THAT(test::message_of<Error>([&] { writer.snapshot(copy(), [&](std::uint64_t, std::uint64_t) { writer.commit(); }); }),
              HasSubstr("progress callback"));
}

TEST_F(Between, WhatWentBackIsNotTakenForTheCommitInBetween) {
  Store writer = open_now();
  Model model = make_tables(writer);
  const auto set_row = [&](float value) {
    test::scatter(writer.table("a"), {3}, std::vector<float>(kDimA, value));
    model.a[3] = value;
    writer.commit();
    writer.checkpoint();
  };
  set_row(1);
  Store reader = open_now(Mode::kRead);
  const auto stop = [](std::uint64_t done, std::uint64_t total) {
    if (done == total) throw Stopped();
  };
  EXPECT_THROW(reader.snapshot(copy(), stop), Stopped);  // the page is there, as of the first commit
  set_row(2);
  bool done = false;
  const SnapshotReport report = reader.snapshot(copy(), [&](std::uint64_t, std::uint64_t) {
    if (!std::exchange(done, true)) set_row(1);
  });
  EXPECT_EQ(report.rounds, 2U);
  EXPECT_EQ(report.copied_pages, 0U);
  expect_is(copy(), 3, model);
}

TEST_F(Between, AStoreThatIsAbandonedEndsIt) {
  std::mt19937 random(16);
  Store writer = open_now();
  Model model = make_tables(writer);
  change(writer, model, random);
  writer.commit();
  std::thread other;
  EXPECT_THROW(writer.snapshot(copy(),
                               [&](std::uint64_t, std::uint64_t) {
                                 if (!other.joinable()) other = std::thread([&] { writer.abandon(); });
                                 while (!writer.closed()) std::this_thread::yield();
                               }),
               ClosedError);
  other.join();
  EXPECT_FALSE(is_store(copy()));
  open_now().snapshot(copy());
  expect_is(copy(), 1, model);
}

TEST_F(Snapshot, ThatWasStoppedIsGoneOnWith) {
  std::mt19937 random(8);
  Store store = open_now();
  Model model = make_tables(store, /*rows_a=*/2000);
  for (int i = 0; i < 100; ++i) {
    change(store, model, random);
    if (i % 10 == 9) store.commit();
  }
  const std::uint64_t number = store.commit();
  EXPECT_THROW(store.snapshot(copy(),
                              [&](std::uint64_t done, std::uint64_t total) {
                                if (done > total / 2) throw Stopped();
                              }),
               Stopped);
  EXPECT_FALSE(is_store(copy()));
  const SnapshotReport report = store.snapshot(copy());
  EXPECT_LT(report.copied_pages, report.pages * 6 / 10);
  EXPECT_GT(report.copied_pages, 0U);
  expect_is(copy(), number, model);
}

TEST_F(Snapshot, OfASparseTableTakesAMomentAndLittleDisk) {
  Store store = open(64U << 20);
  Table table = store.create("t", {.rows = 1'000'000'000, .dim = 128, .init = Normal{0, 1}, .seed = 7});
  test::scatter(table, {0, 500'000'000, 999'999'999}, std::vector<float>(3 * 128, 1));
  store.commit();
  const SnapshotReport report = store.snapshot(copy());
  EXPECT_EQ(report.pages, 3U);
  std::uint64_t used = 0;
  for (const auto& item : std::filesystem::directory_iterator(copy())) {
    struct stat status {};
    ASSERT_EQ(stat(item.path().c_str(), &status), 0);
    used += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  EXPECT_LT(used, 1U << 20);
  Store again = Store::open(copy(), {.mode = Mode::kRead});
  const std::vector<std::int64_t> ids{0, 1, 77'777, 500'000'000, 999'999'998, 999'999'999};
  EXPECT_EQ(test::gather(again.table("t"), ids), test::gather(table, ids));
  EXPECT_EQ(again.table("t").written_pages(), 3U);
}

TEST_F(Snapshot, OfAnAdoptedTableHasAFileOfItsOwn) {
  const auto npy = [&](const std::string& name, std::string_view descr) {
    std::string header = "{'descr': '" + std::string(descr) + "', 'fortran_order': False, 'shape': (5000, 3), }";
    header.resize(117, ' ');
    header += '\n';
    std::string text("\x93NUMPY\x01\x00", 8);
    text += static_cast<char>(header.size());
    text += '\0';
    text += header;
    for (int i = 0; i < 15000; ++i) {
      const auto value = static_cast<float>(i);
      char bytes[4];
      std::memcpy(bytes, &value, 4);
      if (descr[0] == '>') std::reverse(bytes, bytes + 4);
      text.append(bytes, 4);
    }
    test::write_text(directory_ / name, text);
    return directory_ / name;
  };
  Store store = open_now();
  Table little = store.adopt("little", npy("little.npy", "<f4"));
  Table big = store.adopt("big", npy("big.npy", ">f4"));
  for (Table table : {little, big}) test::scatter(table, {4999}, {-1, -2, -3});
  store.commit();
  store.snapshot(copy());
  std::filesystem::remove(directory_ / "little.npy");
  std::filesystem::remove(directory_ / "big.npy");
  Store again = Store::open(copy(), {});
  std::vector<float> expected;
  for (int i = 0; i < 14997; ++i) expected.push_back(static_cast<float>(i));
  for (const float x : {-1.F, -2.F, -3.F}) expected.push_back(x);
  for (const char* name : {"little", "big"}) {
    Table table = again.table(name);
    EXPECT_EQ(test::read_all(table), expected);
    EXPECT_EQ(table.verify().bad_pages, 0U);
    EXPECT_EQ(table.written_pages(), table.geometry().pages());
    test::scatter(table, {0}, {9, 9, 9});
  }
  again.close();
}

TEST_F(Snapshot, WithoutALogNeedsACommit) {
  std::mt19937 random(9);
  StoreOptions none = options();
  none.durability = Durability::kNone;
  Store store = Store::open(path(), none);
  Model model = make_tables(store);
  change(store, model, random);
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { store.snapshot(copy()); }), HasSubstr("commit() before a snapshot"));
  store.commit();
  EXPECT_EQ(store.snapshot(copy()).commit.number, 1U);
  expect_is(copy(), 1, model);
  EXPECT_EQ(open_now(Mode::kRead).snapshot(directory_ / "other").commit.number, 1U);
  expect_is(directory_ / "other", 1, model);
}

TEST_F(Snapshot, BadDestinationsAreRefusedAndStayAsTheyAre) {
  std::mt19937 random(10);
  Store store = open_now();
  Model model = make_tables(store);
  change(store, model, random);
  store.commit();
  store.checkpoint();
  const auto before = test::snapshot(path());
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { store.snapshot(path()); }), HasSubstr("is the store"));
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { store.snapshot(path() / "x"); }), HasSubstr("is inside of store"));
  std::filesystem::create_directory_symlink(path(), directory_ / "link");
  EXPECT_THAT(test::message_of<InvalidArgument>([&] { store.snapshot(directory_ / "link" / "x"); }), HasSubstr("is inside of"));
  EXPECT_THROW(store.snapshot(""), InvalidArgument);
  EXPECT_TRUE(test::snapshot(path()) == before);
  EXPECT_THROW(store.snapshot(directory_ / "no" / "where"), IoError);

  std::filesystem::create_directory(directory_ / "thesis");
  test::write_text(directory_ / "thesis" / "thesis.txt", "all of it");
  EXPECT_THAT(test::message_of<AlreadyExists>([&] { store.snapshot(directory_ / "thesis"); }), HasSubstr("thesis.txt"));
  EXPECT_EQ(test::snapshot(directory_ / "thesis").size(), 1U);
  test::write_text(directory_ / "file", "x");
  EXPECT_THROW(store.snapshot(directory_ / "file"), Error);

  store.snapshot(copy());
  EXPECT_THAT(test::message_of<AlreadyExists>([&] { store.snapshot(copy()); }), HasSubstr("is a store already"));

  // One that is no half of any.
  constexpr std::size_t kDeep = 400'000;
  const std::string deep = std::string(kDeep, '[') + std::string(kDeep, ']');
  for (const std::string& text : {std::string("{}"), R"({"format": )" + deep + "}", deep}) {
    std::filesystem::create_directory(directory_ / "junk");
    test::write_text(directory_ / "junk" / kSnapshotName, text);
    EXPECT_THAT(test::message_of<FormatError>([&] { store.snapshot(directory_ / "junk"); }), HasSubstr("half-done snapshot"));
    std::filesystem::remove_all(directory_ / "junk");
  }

  // A half of another store's.
  Store other = Store::open(directory_ / "other", options());
  Model others = make_tables(other);
  change(other, others, random);
  other.commit();
  EXPECT_THROW(other.snapshot(directory_ / "half", [](std::uint64_t, std::uint64_t) { throw Stopped(); }), Stopped);
  EXPECT_THAT(test::message_of<AlreadyExists>([&] { store.snapshot(directory_ / "half"); }), HasSubstr("of another store"));
  other.snapshot(directory_ / "half");
  expect_is(directory_ / "half", 1, others);
}

TEST_F(Snapshot, ADamagedPageIsNamedAndNothingIsMadeOfIt) {
  std::mt19937 random(11);
  Store store = open_now();
  Model model = make_tables(store);
  change(store, model, random, /*rows=*/400);
  store.commit();
  store.checkpoint();
  const int file = ::open((path() / "a.npy").c_str(), O_RDWR);
  ASSERT_EQ(pwrite(file, "x", 1, 4096 + 3 * 4096 + 5), 1);
  close(file);
  EXPECT_THAT(test::message_of<CorruptError>([&] { store.snapshot(copy()); }),
              HasSubstr("page 3 (rows 12 to 15) of table 'a' does not match its checksum"));
  EXPECT_FALSE(is_store(copy()));
}

// Files of one folder behave as a test wants.
class Folder : public FileOps {
 public:
  explicit Folder(std::filesystem::path folder) : folder_{std::move(folder)} {}
  std::atomic<std::int64_t> writes_left{1 << 30};  // before the disk is full
  std::atomic<int> clones{0};
  bool can_clone = false;
  int open(const char* path, int flags, mode_t mode) override {
    const int fd = FileOps::open(path, flags, mode);
    const std::lock_guard lock(mutex_);
    if (fd >= 0 && std::string(path).starts_with(folder_.string())) inside_.insert(fd);
    return fd;
  }
  int close(int fd) override {
    const std::lock_guard lock(mutex_);
    inside_.erase(fd);
    return FileOps::close(fd);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    return full(fd) ? -1 : FileOps::pwrite(fd, buffer, bytes, offset);
  }
  ssize_t pwritev(int fd, const struct iovec* pieces, int count, off_t offset) override {
    return full(fd) ? -1 : FileOps::pwritev(fd, pieces, count, offset);
  }
  // What a file system with shared blocks does, as far as one can see.
  int clone(int to, int from) override {
    if (!can_clone) return FileOps::clone(to, from);
    struct stat status {};
    if (fstat(from, &status) != 0) return -1;
    std::vector<char> bytes(static_cast<std::size_t>(status.st_size));
    if (::pread(from, bytes.data(), bytes.size(), 0) != status.st_size) return -1;
    ++clones;
    return ::pwrite(to, bytes.data(), bytes.size(), 0) == status.st_size ? 0 : -1;
  }

 private:
  bool full(int fd) {
    const std::lock_guard lock(mutex_);
    if (!inside_.contains(fd) || writes_left-- > 0) return false;
    errno = ENOSPC;
    return true;
  }
  const std::filesystem::path folder_;
  std::mutex mutex_;
  std::set<int> inside_;
};

TEST_F(Snapshot, AFullDiskNamesTheFileAndLeavesWhatCanBeGoneOnWith) {
  std::mt19937 random(12);
  Folder ops(copy());
  StoreOptions with = options();
  with.file_ops = &ops;
  with.io = IoEngine::kThreads;
  Store store = Store::open(path(), with);
  Model model = make_tables(store);
  for (int i = 0; i < 10; ++i) change(store, model, random);
  store.commit();
  std::set<std::string> names;
  int failures = 0;
  for (std::int64_t writes = 0; !is_store(copy()); ++writes) {
    ops.writes_left = writes;
    try {
      store.snapshot(copy());
    } catch (const IoError& error) {
      ++failures;
      EXPECT_EQ(error.error_number(), ENOSPC);
      EXPECT_THAT(error.file().string(), testing::StartsWith(copy().string()));
      names.insert(error.file().filename());
    }
    EXPECT_EQ(model_of(store), model);
  }
  EXPECT_GT(failures, 10);
  EXPECT_THAT(names, testing::IsSupersetOf({std::string("a.npy"), std::string("a.pages"), std::string("b.pages")}));
  ops.writes_left = 1 << 30;
  expect_is(copy(), 1, model);
}

TEST_F(Snapshot, SharesBlocksWhereTheFileSystemCan) {
  std::mt19937 random(13);
  Folder ops(copy());
  ops.can_clone = true;
  StoreOptions with = options();
  with.file_ops = &ops;
  Store writer = Store::open(path(), with);
  Model model = make_tables(writer);
  for (int i = 0; i < 10; ++i) change(writer, model, random);
  writer.commit();
  writer.checkpoint();
  change(writer, model, random, /*rows=*/3);  // in the log
  writer.commit();
  Model later = model;
  change(writer, later, random);
  const SnapshotReport report = writer.snapshot(copy());
  EXPECT_EQ(report.cloned_tables, 2U);
  EXPECT_EQ(ops.clones, 4);
  EXPECT_LE(report.copied_pages, 9U);
  EXPECT_GT(report.pages, 50U);
  expect_is(copy(), 2, model);

  // The writer comes in between, after one of the tables and after both.
  with.mode = Mode::kRead;
  Store reader = Store::open(path(), with);
  int calls = 0;
  const SnapshotReport second = reader.snapshot(directory_ / "second", [&](std::uint64_t, std::uint64_t) {
    ++calls;
    if (calls != 2 && calls != 6) return;
    change(writer, later, random);
    writer.commit();
    if (calls == 6) {
      writer.table("b").resize(300);
      later.b.resize(300, 0.0F);
      later.sum.resize(300, 0.25F);
    }
    writer.checkpoint();
  });
  EXPECT_GE(calls, 6);
  EXPECT_GE(second.rounds, 3U);
  EXPECT_EQ(second.cloned_tables, 2U);
  expect_is(directory_ / "second", writer.commit_number(), later);
}

TEST_F(Snapshot, SharesBlocksForReal) {
  std::mt19937 random(14);
  Store store = open_now();
  Model model = make_tables(store);
  change(store, model, random);
  store.commit();
  const SnapshotReport report = store.snapshot(copy());
  expect_is(copy(), 1, model);
  if (report.cloned_tables == 0) GTEST_SKIP() << "the file system of " << directory_.path() << " shares no blocks (FICLONE)";
  change(store, model, random);
  store.commit();
  store.checkpoint();
  EXPECT_NE(model_of(store).a, std::vector<float>());
}

// Whatever is on the disk when power is lost: the destination is no store yet, and can be gone on with, or it is a whole one.
TEST_F(Snapshot, IsNoStoreBeforeAllOfItIsOnTheDisk) {
  std::mt19937 random(15);
  const test::TemporaryDirectory folder(test::memory_folder());
  std::filesystem::create_directory(folder / "copy");
  StoreOptions with = options();
  with.io = IoEngine::kThreads;
  Model model, second;
  {
    Store writer = open_now();
    model = make_tables(writer, /*rows_a=*/60, /*rows_b=*/40);
    for (int i = 0; i < 3; ++i) change(writer, model, random);
    writer.commit();
    writer.checkpoint();
  }
  test::PowerLoss loss(folder / "copy");
  with.file_ops = &loss;
  with.mode = Mode::kRead;
  Store writer = open_now();
  second = model;
  {
    Store reader = Store::open(path(), with);
    bool done = false;
    reader.snapshot(folder / "copy", [&](std::uint64_t bytes, std::uint64_t) {
      if (bytes == 0 || std::exchange(done, true)) return;
      change(writer, second, random, /*rows=*/10);
      writer.commit();
      writer.checkpoint();
    });
  }
  expect_is(folder / "copy", 2, second);
  // What was overwritten when power was lost is to be what it was before: no checksum of then may be believed.
  test::scatter(writer.table("a"), test::range(0, 60), spread(model.a, kDimA));
  test::scatter(writer.table("b"), test::range(0, 40), spread(model.b, kDimB));
  test::scatter(writer.table("b"), test::range(0, 40), spread(model.sum, kDimB), "sum");
  writer.commit();
  using Kept = test::PowerLoss::Kept;
  const test::TemporaryDirectory after(test::memory_folder());
  Store reader = open_now(Mode::kRead);
  int stores = 0, halves = 0;
  for (const Kept kept : {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast, Kept::kRandom}) {
    test::PowerLoss::Disk disks(loss);
    for (std::uint64_t point = 0; point <= loss.count(); ++point) {
      SCOPED_TRACE(testing::Message() << "before " << (point < loss.count() ? loss.describe(point) : "the end") << ", kept "
                                      << test::kept_name(kept));
      disks.make(point, kept, /*seed=*/point, after / "copy");
      if (is_store(after / "copy")) {
        ++stores;
        // Perhaps with the marker.
        std::filesystem::remove(after / "copy" / kSnapshotName);
        expect_is(after / "copy", 2, second);
      } else {
        ++halves;
        reader.snapshot(after / "copy");
        expect_is(after / "copy", 3, model);
      }
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(stores, 5);
  EXPECT_GT(halves, 50);
}

}  // namespace
}  // namespace embermap
