// Notes of commits and the list of them: what it has after sessions, crashes and damage.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "store/commit_history.hpp"
#include "store/manifest.hpp"
#include "tests/store/power_loss.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using testing::HasSubstr;

class Commits : public test::StoreTest, public testing::WithParamInterface<Durability> {
 protected:
  Store open_now(StoreOptions::Mode mode = StoreOptions::Mode::kOpenOrCreate) {
    return Store::open(path(), {.mode = mode, .memory = 64U << 20, .threads = 2, .durability = GetParam()});
  }
  std::filesystem::path history() const { return path() / kHistoryName; }

  static std::vector<std::uint64_t> numbers(const Store& store) {
    std::vector<std::uint64_t> numbers;
    for (const CommitInfo& commit : store.commits()) numbers.push_back(commit.number);
    return numbers;
  }
  static std::vector<std::string> notes(const Store& store) {
    std::vector<std::string> notes;
    for (const CommitInfo& commit : store.commits()) notes.push_back(commit.note);
    return notes;
  }
  static std::vector<std::uint64_t> up_to(std::uint64_t first, std::uint64_t last) {
    std::vector<std::uint64_t> numbers;
    for (; first <= last; ++first) numbers.push_back(first);
    return numbers;
  }
};

INSTANTIATE_TEST_SUITE_P(Durability, Commits, testing::Values(Durability::kCommit, Durability::kNone),
                         [](const auto& each) { return std::string(durability_name(each.param)); });

TEST_P(Commits, ANoteIsPartOfTheCommitAndMakesOneWithoutChanges) {
  Store store = open_now();
  Table table = store.create("t", {.rows = 10, .dim = 2});
  EXPECT_EQ(store.last_commit(), CommitInfo{});
  EXPECT_TRUE(store.commits().empty());
  test::scatter(table, {1}, {1, 2});
  EXPECT_EQ(store.commit(R"({"step": 1000, "loss": 0.25})"), 1U);
  EXPECT_EQ(store.commit(), 1U);  // nothing changed
  EXPECT_EQ(store.commit("{}"), 2U);
  test::scatter(table, {1}, {3, 4});
  EXPECT_EQ(store.commit(), 3U);
  EXPECT_EQ(notes(store), (std::vector<std::string>{R"({"loss":0.25,"step":1000})", "{}", ""}));
  EXPECT_EQ(store.last_commit().note, "");
  store.close();

  for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite}) {
    Store again = open_now(mode);
    EXPECT_EQ(notes(again), (std::vector<std::string>{R"({"loss":0.25,"step":1000})", "{}", ""}));
    EXPECT_EQ(numbers(again), up_to(1, 3));
    EXPECT_EQ(again.commits().back(), again.last_commit());
    EXPECT_THAT(again.last_commit().time, testing::MatchesRegex("20..-..-..T..:..:..\\....Z"));
  }
}

TEST_P(Commits, AReaderSeesThoseUpToItsCommitWhereverTheyAre) {
  Store writer = open_now();
  Table table = writer.create("t", {.rows = 10, .dim = 2});
  for (int i = 0; i < 3; ++i) {
    test::scatter(table, {i}, {1, 2});
    writer.commit(R"({"i": )" + std::to_string(i) + "}");
  }
  Store reader = open_now(StoreOptions::Mode::kRead);
  writer.commit(R"({"i": 3})");
  EXPECT_EQ(numbers(reader), up_to(1, 3));
  writer.checkpoint();
  EXPECT_EQ(numbers(reader), up_to(1, 3));
  writer.commit(R"({"i": 4})");
  EXPECT_EQ(reader.refresh(), 5U);
  EXPECT_EQ(reader.commits(), writer.commits());
  EXPECT_EQ(reader.last_commit().note, R"({"i":4})");
}

TEST_P(Commits, BadNotesAreRefusedAndChangeNothing) {
  Store store = open_now();
  store.create("t", {.rows = 10, .dim = 2});
  const auto refused = [&](const std::string& note) { return test::message_of<InvalidArgument>([&] { store.commit(note); }); };
  EXPECT_THAT(refused("{"), HasSubstr("note: is not valid JSON"));
  EXPECT_THAT(refused("[1]"), HasSubstr("note: is no JSON object: an array"));
  EXPECT_THAT(refused(R"({"a": 1, "a": 2})"), HasSubstr("the key 'a' twice"));
  EXPECT_THAT(refused(R"({"id": 18446744073709551616})"), HasSubstr("'id' has 18446744073709551616"));
  EXPECT_THAT(refused(R"({"a": NaN})"), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused("{\"a\": \"\xff\"}"), HasSubstr("not valid JSON"));
  std::string deep = "1";
  for (int i = 0; i < 13; ++i) deep = R"({"a": )" + deep + "}";
  EXPECT_THAT(refused(deep), HasSubstr("nested more than 12 deep"));
  EXPECT_THAT(refused(R"({"a": ")" + std::string(65536, 'x') + "\"}"), HasSubstr("65545 bytes of JSON"));
  EXPECT_EQ(store.commit_number(), 0U);
  EXPECT_EQ(store.commit(R"({"a": ")" + std::string(65536 - 9, 'x') + "\"}"), 1U);
}

TEST_P(Commits, OnlyTheLastAreKept) {
  {
    Store store = open_now();
    store.create("t", {.rows = 10, .dim = 2});
    for (int i = 0; i < 1100; ++i) store.commit("{}");
    EXPECT_EQ(numbers(store), up_to(101, 1100));
    store.close();
    EXPECT_LT(std::filesystem::file_size(history()), 1U << 20);
  }
  Store store = open_now();
  EXPECT_EQ(numbers(store), up_to(101, 1100));
  const std::string note = R"({"a": ")" + std::string(60000, 'x') + "\"}";
  for (int i = 0; i < 100; ++i) {
    store.commit(note);
    if (i % 10 == 0) store.checkpoint();
  }
  EXPECT_EQ(numbers(store), up_to(1184, 1200));
  store.checkpoint();
  EXPECT_LE(std::filesystem::file_size(history()), 4U << 20);
  Store reader = open_now(StoreOptions::Mode::kRead);
  EXPECT_EQ(reader.commits(), store.commits());
}

TEST_P(Commits, LinesThatAreDamagedAreLeftOutAndReplaced) {
  {
    Store store = open_now();
    store.create("t", {.rows = 10, .dim = 2});
    for (int i = 0; i < 5; ++i) store.commit("{}");
    store.close();
  }
  std::string text = test::file_text(history());
  const std::size_t third = text.find("{\"commit\": 3");
  text[third + 30] ^= 1;
  // A line of a commit that never was, and half of one.
  const CommitInfo never{6, "2031-05-06T07:08:09.123Z", "{}"};
  test::write_text(history(), text + history_text({&never, 1}) + R"({"commit": 7, "ti)");
  EXPECT_EQ(numbers(open_now(StoreOptions::Mode::kRead)), (std::vector<std::uint64_t>{1, 2, 4, 5}));
  {
    Store store = open_now();
    EXPECT_EQ(numbers(store), (std::vector<std::uint64_t>{1, 2, 4, 5}));
    store.commit(R"({"really": true})");
    store.close();
  }
  const Store reader = open_now(StoreOptions::Mode::kRead);
  EXPECT_EQ(numbers(reader), (std::vector<std::uint64_t>{1, 2, 4, 5, 6}));
  EXPECT_EQ(reader.last_commit().note, R"({"really":true})");
  EXPECT_THAT(test::file_text(history()), testing::Not(HasSubstr("\"ti)")));
}

// With a checksum that is right, as only someone who wants it makes them.
TEST_P(Commits, ALineWhoseNoteNoCommitTakesIsNone) {
  {
    Store store = open_now();
    store.create("t", {.rows = 10, .dim = 2});
    for (int i = 0; i < 3; ++i) store.commit("{}");
    store.close();
  }
  const auto line = [](std::uint64_t number, const std::string& note) {
    const std::vector<CommitInfo> one{{.number = number, .time = "2031-05-06T07:08:09.123Z", .note = note}};
    return history_text(one);
  };
  constexpr std::size_t kDeep = 400'000;
  const std::string deep = R"({"a":)" + std::string(kDeep, '[') + std::string(kDeep, ']') + "}";
  test::write_text(history(), line(1, "[1]") + line(2, deep));
  for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite})
    EXPECT_EQ(numbers(open_now(mode)), up_to(3, 3)) << "the last one is in the manifest";
  test::write_text(history(), line(1, R"({"a":[[1]]})") + line(2, R"({"a": 1.5})"));
  EXPECT_EQ(notes(open_now(StoreOptions::Mode::kRead)), (std::vector<std::string>{R"({"a":[[1]]})", R"({"a":1.5})", "{}"}));
}

TEST_P(Commits, AListThatIsNoFileIsNamed) {
  {
    Store store = open_now();
    store.create("t", {.rows = 10, .dim = 2});
    store.commit("{}");
    store.close();
  }
  Store reader = open_now(StoreOptions::Mode::kRead);
  for (const bool fifo : {false, true}) {
    std::filesystem::remove(history());
    if (fifo) {
      ASSERT_EQ(::mkfifo(history().c_str(), 0666), 0);
    } else {
      std::filesystem::create_directory(history());
    }
    const auto wanted = testing::AllOf(HasSubstr("commits.jsonl"), HasSubstr(fifo ? "is a FIFO" : "is a directory"));
    for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite})
      EXPECT_THAT(test::message_of<FormatError>([&] { open_now(mode); }), wanted);
    EXPECT_THAT(test::message_of<FormatError>([&] { (void)reader.commits(); }), wanted);
  }
  std::filesystem::remove(history());
  EXPECT_EQ(numbers(open_now()), up_to(1, 1)) << "the last one is in the manifest";
}

// Whatever is on the disk when power is lost: the commits up to the one that the store is at, each with its note.
TEST_P(Commits, AreThoseUpToTheLastOneWheneverPowerIsLost) {
  const test::TemporaryDirectory folder(test::memory_folder());
  std::filesystem::create_directory(folder / "s");
  test::PowerLoss loss(folder / "s");
  std::vector<std::uint64_t> done;  // changes recorded when commit i was done
  {
    Store store = Store::open(
        folder / "s", {.memory = 16U << 20, .threads = 1, .io = IoEngine::kThreads, .durability = GetParam(), .file_ops = &loss});
    Table table = store.create("t", {.rows = 100, .dim = 2});
    for (int i = 1; i <= 6; ++i) {
      test::scatter(table, {i}, {static_cast<float>(i), 0});
      store.commit(R"({"i": )" + std::to_string(i) + "}");
      done.push_back(loss.count());
      if (i % 2 == 0) store.checkpoint();
    }
    store.close();
  }
  using Kept = test::PowerLoss::Kept;
  const test::TemporaryDirectory after(test::memory_folder());
  for (const Kept kept : {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast, Kept::kRandom}) {
    test::PowerLoss::Disk disks(loss);
    for (std::uint64_t point = done[0]; point <= loss.count(); ++point) {
      disks.make(point, kept, /*seed=*/point, after / "s");
      std::uint64_t least = 0;
      while (least < done.size() && done[least] <= point) ++least;
      for (const auto mode : {StoreOptions::Mode::kRead, StoreOptions::Mode::kReadWrite}) {
        SCOPED_TRACE(testing::Message() << loss.describe(point - 1) << ", kept " << test::kept_name(kept));
        const Store store = Store::open(after / "s", {.mode = mode,
                                                      .memory = 16U << 20,
                                                      .threads = 1,
                                                      .durability = GetParam(),
                                                      .accept_unclean = GetParam() == Durability::kNone});
        const std::vector<CommitInfo> commits = store.commits();
        ASSERT_GE(store.commit_number(), least);
        // Taking what an unclean end left is a commit of its own, without a note.
        for (std::uint64_t i = 1; i <= std::min<std::uint64_t>(commits.size(), 6); ++i) {
          ASSERT_EQ(commits[i - 1].number, i);
          if (i > least) continue;
          ASSERT_EQ(commits[i - 1].note, R"({"i":)" + std::to_string(i) + "}");
        }
        ASSERT_EQ(commits.size(), store.commit_number());
      }
    }
  }
}

}  // namespace
}  // namespace embermap
