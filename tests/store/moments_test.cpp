// Files of one store from several moments of its life: whatever is mixed, opening gives all rows of one commit, or refuses.
//
// EMBERMAP_MOMENTS=all tries every subset of the files from another moment; a run of ctest tries single files, pairs that belong
// together, and all but one.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <sys/uio.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::read_all;
using testing::AllOf;
using testing::HasSubstr;
using Mode = StoreOptions::Mode;

constexpr std::array<const char*, 8> kFiles{"embermap.json", "redo.log", "a.npy",         "a.pages",
                                            "b.npy",         "b.pages",  "commits.jsonl", "UNCOMMITTED"};

// All that two tables hold, weights and state.
using Rows = std::vector<std::vector<float>>;

class MixedFilesTest : public test::StoreTest {
 protected:
  // Moments, as folders, and what the store has to be with files of that one alone.
  struct Kept {
    std::string name;
    std::uint64_t commit;
  };

  static Rows rows_of(const Store& store) {
    Rows rows;
    for (const char* name : {"a", "b"}) {
      if (!store.contains(name)) continue;
      Table table = const_cast<Store&>(store).table(name);
      rows.push_back(read_all(table));
      rows.push_back(read_all(table, "sum"));
    }
    return rows;
  }
  static Store open_at(const std::filesystem::path& store, Mode mode, Durability durability = Durability::kCommit) {
    return Store::open(store, {.mode = mode, .memory = 1 << 20, .threads = 1, .durability = durability});
  }
  std::filesystem::path at(std::string_view name) const { return directory_ / name; }
  void keep(const std::string& name, const Store& store) {
    std::filesystem::copy(path(), at(name));
    moments_.push_back({name, store.commit_number()});
    if (!commits_.contains(store.commit_number())) commits_.emplace(store.commit_number(), rows_of(store));
  }
  // A moment at which the store is refused.
  void keep_refused(const std::string& name) {
    EXPECT_THROW(open(1 << 20, Mode::kRead), CorruptError);
    std::filesystem::copy(path(), at(name));
    moments_.push_back({name, 0});
  }
  // A step of Adagrad for some rows, others in each commit; `tables` of "ab".
  static void change(Store& store, std::string_view tables, std::int64_t first, std::int64_t end) {
    for (const char name : tables) {
      Table table = store.table(std::string_view(&name, 1));
      const auto ids = test::range(first, end);
      std::vector<float> gradients(ids.size() * table.dim());
      for (std::size_t i = 0; i < gradients.size(); ++i)
        gradients[i] = 0.25F + static_cast<float>((i + store.commit_number() * 7) % 11);
      test::update(table, ids, gradients);
    }
  }
  static void make_tables(Store& store) {
    for (const char* name : {"a", "b"})
      store.create(name, {.rows = 200, .dim = 64, .optimizer = Adagrad{.lr = 0.1}, .init = Normal{0, 1}});
  }

  std::filesystem::path mixed(const Kept& most, const Kept& other, unsigned which) const {
    const std::filesystem::path store = at("mixed");
    std::filesystem::remove_all(store);
    std::filesystem::create_directory(store);
    for (std::size_t i = 0; i < kFiles.size(); ++i) {
      const std::filesystem::path from = at((which >> i & 1U) != 0 ? other.name : most.name) / kFiles[i];
      if (std::filesystem::exists(from)) std::filesystem::copy_file(from, store / kFiles[i]);
    }
    return store;
  }

  static std::string history_of(const Store& store) {
    std::string text;
    for (const CommitInfo& commit : store.commits()) text += fmt::format(", {} {} {}", commit.number, commit.time, commit.note);
    return text;
  }

  // "commit 3" and what the store says of its commits, or why it was refused; a failure of the test where it is neither.
  std::string outcome(const std::string& where, const std::function<Rows(std::uint64_t&, std::string&)>& look) {
    std::uint64_t commit = 0;
    std::string history;
    Rows rows;
    try {
      rows = look(commit, history);
    } catch (const CorruptError& error) {
      return fmt::format("refused: {}", error.what());
    } catch (const FormatError& error) {
      return fmt::format("refused: {}", error.what());
    } catch (const IoError& error) {
      return fmt::format("refused: {}", error.what());
    }
    const auto known = commits_.find(commit);
    // A store is at commit 0 with and without its tables: nothing of them was ever committed.
    const bool right = known != commits_.end() && (rows == known->second || (commit == 0 && rows.empty()));
    EXPECT_TRUE(right) << where << ": rows of no commit, as commit " << commit;
    return right ? fmt::format("commit {}{}", commit, history) : "WRONG";
  }

  // One mix, opened in all ways. The outcome of a writer, which all others share.
  std::string try_all(const Kept& most, const Kept& other, unsigned which, const std::string& where) {
    std::map<std::string, std::string> seen;
    std::string plan = "opens";
    {
      const auto store = mixed(most, other, which);
      const auto before = test::snapshot(store);
      seen["r"] = outcome(where + ", r", [&](std::uint64_t& commit, std::string& history) {
        const Store reader = open_at(store, Mode::kRead);
        commit = reader.commit_number();
        history = history_of(reader);
        return rows_of(reader);
      });
      seen["verify"] = outcome(where + ", verify", [&](std::uint64_t& commit, std::string& history) {
        Store reader = open_at(store, Mode::kRead);
        commit = reader.commit_number();
        history = history_of(reader);
        for (const std::string& name : reader.tables())
          if (reader.table(name).verify().bad_pages != 0) throw CorruptError("bad pages");
        return rows_of(reader);
      });
      const auto copy = at("copy");
      std::filesystem::remove_all(copy);
      seen["snapshot"] = outcome(where + ", snapshot", [&](std::uint64_t& commit, std::string& history) {
        open_at(store, Mode::kRead).snapshot(copy);
        const Store reader = open_at(copy, Mode::kRead);
        commit = reader.commit_number();
        history = history_of(reader);
        return rows_of(reader);
      });
      try {
        if (const RecoveryPlan found = plan_recovery(store); !found.mixed.empty())
          plan = "refused: " + found.mixed;
        else if (!found.log_gone.empty())
          plan = "refused: " + found.log_gone;
        else if (found.unclean)
          plan = "refused: unclean";
      } catch (const Error& error) {
        plan = fmt::format("refused: {}", error.what());
      }
      auto after = test::snapshot(store);
      after.erase("LOCK");
      EXPECT_EQ(before, after) << where << ": looking changed something";
    }
    for (const Durability durability : {Durability::kCommit, Durability::kNone})
      seen[durability == Durability::kCommit ? "r+" : "none"] =
          outcome(where + ", r+", [&](std::uint64_t& commit, std::string& history) {
            const auto store = mixed(most, other, which);
            const Store writer = open_at(store, Mode::kReadWrite, durability);
            commit = writer.commit_number();
            history = history_of(writer);
            return rows_of(writer);
          });
    const std::string writer = seen["r+"];
    const bool opens = writer.starts_with("commit");
    for (const auto& [how, what] : seen) {
      EXPECT_EQ(what.starts_with("commit"), opens) << where << ": a writer: " << writer << "; " << how << ": " << what;
      if (opens) {
        EXPECT_EQ(what, writer) << where << ", " << how;
      }
    }
    // What is wrong with the files' moments is told by all in the same words, before anything is read.
    if (writer.find("brought back") != std::string::npos) {
      EXPECT_EQ(seen["r"], writer) << where;
      EXPECT_EQ(seen["verify"], writer) << where;
      EXPECT_EQ(seen["snapshot"], writer) << where;
      EXPECT_EQ(plan, writer) << where;
    } else if (opens) {
      EXPECT_EQ(plan, "opens") << where;
    }
    return writer;
  }

  static bool chosen(unsigned which) {
    const char* const all = std::getenv("EMBERMAP_MOMENTS");
    if (all != nullptr && std::string_view(all) == "all") return true;
    constexpr unsigned kLogged = 3U, kA = 12U, kB = 48U;  // embermap.json and redo.log; the files of a table
    return std::popcount(which) == 1 || which == kLogged || which == kA || which == kB || which == (kA | kB);
  }

  void try_every_mix() {
    std::map<std::string, std::map<std::string, int>> table;  // by what was replaced
    for (const Kept& most : moments_) {
      for (const Kept& other : moments_) {
        if (&most == &other) continue;
        for (unsigned which = 1; which + 1 < 1U << kFiles.size(); ++which) {
          if (!chosen(which)) continue;
          std::string files;
          for (std::size_t i = 0; i < kFiles.size(); ++i)
            if ((which >> i & 1U) != 0) files += fmt::format("{}{}", files.empty() ? "" : " ", kFiles[i]);
          const std::string where = fmt::format("{} with {} of {}", most.name, files, other.name);
          std::string what = try_all(most, other, which, where);
          if (std::popcount(which) == 1) std::printf("%-55s %s\n", where.c_str(), what.substr(0, what.find(" It")).c_str());
          what = what.starts_with("commit") ? "a commit" : what == "WRONG" ? what : "refused";
          ++table[files][what];
        }
      }
    }
    for (const auto& [files, outcomes] : table) {
      std::string text;
      for (const auto& [what, count] : outcomes) text += fmt::format("  {} {}", count, what);
      std::printf("%-50s%s\n", files.c_str(), text.c_str());
    }
  }

  std::vector<Kept> moments_;
  std::map<std::uint64_t, Rows> commits_;
};

TEST_F(MixedFilesTest, GiveOneCommitOrAreRefused) {
  {
    Store store = open(1 << 20);
    make_tables(store);
    keep("0 created", store);
    change(store, "ab", 0, 60);
    store.commit(R"({"at": 1})");
    keep("1 committed", store);
    change(store, "ab", 40, 120);
    store.commit();
    keep("2 committed", store);
    store.checkpoint();
    keep("3 applied", store);
    change(store, "a", 0, 200);
    store.commit();
    keep("4 a alone", store);
    change(store, "b", 100, 200);
    store.commit();
    store.create("c", {.rows = 10, .dim = 4});  // a manifest that is ahead of the tables' files
    store.remove("c");
    keep("5 b, and a table came and went", store);
    store.close();
  }
  {
    Store store = open(1 << 20);
    keep("6 closed", store);
    change(store, "ab", 10, 20);
    store.commit();
    store.abandon();
  }
  keep("7 killed", open(1 << 20, Mode::kRead));
  try_every_mix();
}

TEST_F(MixedFilesTest, AreToldByTheTablesOfAReaderUntilTheyAreOfOneMoment) {
  {
    Store store = open(1 << 20);
    make_tables(store);
    store.create("c", {.rows = 10, .dim = 4});
    change(store, "ab", 0, 60);
    store.close();
  }
  std::filesystem::copy_file(path() / "b.pages", at("b.pages"));
  const auto next = [&] {
    Store store = open(1 << 20);
    change(store, "ab", 0, 60);
    store.close();
  };
  next();
  Store reader = open(1 << 20, Mode::kRead);
  Table a = reader.table("a"), b = reader.table("b");
  next();
  std::filesystem::rename(path() / "b.pages", at("newer"));
  std::filesystem::copy_file(at("b.pages"), path() / "b.pages");
  const std::string why = test::message_of<MomentError>([&] { reader.refresh(); });
  EXPECT_THAT(why, HasSubstr("b.pages: is of commit 1"));
  for (const Table& table : {a, b, reader.table("a"), reader.table("c")})
    EXPECT_EQ(test::message_of<MomentError>([&, one = table] { read_all(one); }), why);
  std::filesystem::rename(at("newer"), path() / "b.pages");
  EXPECT_EQ(reader.refresh(), 3U);
  EXPECT_EQ(read_all(a), read_all(open(1 << 20, Mode::kRead).table("a")));
  EXPECT_EQ(read_all(b), read_all(open(1 << 20, Mode::kRead).table("b")));
  // One that is damaged goes without the others.
  std::filesystem::resize_file(path() / "b.npy", 5000);
  reader.refresh();
  EXPECT_THAT(test::message_of<FormatError>([&] { read_all(b); }), HasSubstr("b.npy"));
  EXPECT_FALSE(read_all(a).empty());
}

TEST_F(MixedFilesTest, OfSessionsWithAndWithoutALogGiveOneCommitOrAreRefused) {
  const auto session = [&](Durability durability, bool accept = false) {
    return Store::open(path(), {.memory = 1 << 20, .threads = 1, .durability = durability, .accept_unclean = accept});
  };
  {
    Store store = session(Durability::kNone);
    make_tables(store);
    change(store, "ab", 0, 60);
    store.commit(R"({"at": 1})");
    keep("1 without a log", open_at(path(), Mode::kRead));
    change(store, "ab", 40, 120);
    std::vector<float> rows(64 * 64, 9.0F);
    store.table("a").write(100, 64, std::as_bytes(std::span(rows)));  // past the hot pages
    store.abandon();
  }
  keep_refused("1 and a part");
  {
    Store store = session(Durability::kCommit, /*accept=*/true);
    keep("2 as it is", store);
    change(store, "a", 0, 20);
    store.commit(R"({"at": 3})");
    keep("3 in the log", store);
    store.close();
  }
  keep("4 closed", open_at(path(), Mode::kRead));
  {
    Store store = session(Durability::kNone);
    change(store, "b", 150, 160);
    store.commit(R"({"at": 4})");
    keep("5 without a log again", store);
    store.abandon();
  }
  try_every_mix();
}

// All who open a store say the same of it, whatever call failed when its tables were taken as they are: also once the log has the
// commit that makes an end of an unclean one, and the manifest's file not yet.
TEST_F(MixedFilesTest, AStoreThatWasBeingAcceptedIsTheSameToAll) {
  struct Fails final : FileOps {
    int left = 1 << 30;
    bool fail() { return left-- <= 0; }
    ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
      return fail() ? (errno = EIO, -1) : FileOps::pwrite(fd, buffer, bytes, offset);
    }
    ssize_t pwritev(int fd, const iovec* pieces, int count, off_t offset) override {
      return fail() ? (errno = EIO, -1) : FileOps::pwritev(fd, pieces, count, offset);
    }
    int fdatasync(int fd) override { return fail() ? (errno = EIO, -1) : FileOps::fdatasync(fd); }
    int fsync(int fd) override { return fail() ? (errno = EIO, -1) : FileOps::fsync(fd); }
    int unlink(const char* file) override { return fail() ? (errno = EIO, -1) : FileOps::unlink(file); }
    int rename(const char* from, const char* to) override { return fail() ? (errno = EIO, -1) : FileOps::rename(from, to); }
  } ops;
  {
    Store store = open_at(path(), Mode::kOpenOrCreate, Durability::kNone);
    make_tables(store);
    change(store, "ab", 0, 60);
    store.commit();
    const std::vector<float> rows(64 * 64, 9.0F);
    store.table("a").write(100, 64, std::as_bytes(std::span(rows)));
    store.abandon();
  }
  std::map<std::string, int> seen;
  bool done = false;
  for (int call = 0; !done; ++call) {
    ASSERT_LT(call, 300);
    const auto store = at("accepted"), copy = at("copy");
    for (const auto& folder : {store, copy}) std::filesystem::remove_all(folder);
    std::filesystem::copy(path(), store);
    ops.left = call;
    try {
      Store::open(store, {.mode = Mode::kReadWrite, .memory = 1 << 20, .accept_unclean = true, .file_ops = &ops}).abandon();
      done = true;
    } catch (const Error&) {
    }
    std::filesystem::copy(store, copy);
    const auto opened = [&](const std::filesystem::path& where, Mode mode) {
      try {
        Store again = open_at(where, mode);
        for (const std::string& name : again.tables()) EXPECT_EQ(again.table(name).verify().bad_pages, 0U);
        return fmt::format("commit {}{}", again.commit_number(), history_of(again));
      } catch (const CorruptError&) {
        return std::string("refused");
      }
    };
    const std::string reader = opened(store, Mode::kRead);
    EXPECT_EQ(plan_recovery(store).unclean, reader == "refused") << call;
    EXPECT_EQ(opened(copy, Mode::kReadWrite), reader) << call;
    ++seen[reader.substr(0, 8)];
  }
  EXPECT_GT(seen["refused"], 5);
  EXPECT_GT(seen["commit 2"], 3);
  EXPECT_EQ(seen.size(), 2U);
}

TEST_F(MixedFilesTest, ATableWhoseRowsAreGoneIsOfAMomentAsWell) {
  {
    Store store = open(1 << 20);
    make_tables(store);
    change(store, "ab", 0, 60);
    store.close();
  }
  std::filesystem::copy_file(path() / "a.pages", at("a.pages"));
  {
    Store store = open(1 << 20);
    change(store, "ab", 0, 60);
    store.close();
  }
  std::filesystem::copy_file(at("a.pages"), path() / "a.pages", std::filesystem::copy_options::overwrite_existing);
  std::filesystem::remove(path() / "a.npy");
  const std::string why = test::message_of<MomentError>([&] { open_at(path(), Mode::kRead); });
  EXPECT_THAT(why, HasSubstr("a.pages: is of commit 1, and commit 2 changed the table"));
  EXPECT_EQ(plan_recovery(path()).mixed, why);
  for (const Durability durability : {Durability::kNone, Durability::kCommit})
    EXPECT_EQ(test::message_of<MomentError>([&] { open_at(path(), Mode::kReadWrite, durability); }), why);
}

TEST_F(MixedFilesTest, TheLogAndTheManifestKnowCommitsBetterThanTheListOfAnotherHistory) {
  const auto notes = [](const Store& store) {
    std::string text;
    for (const CommitInfo& commit : store.commits()) text += commit.note;
    return text;
  };
  {
    Store store = open(1 << 20);
    make_tables(store);
    change(store, "ab", 0, 60);
    store.commit(R"({"of":1})");
    store.close();
  }
  std::filesystem::copy(path(), at("before"));
  {
    Store store = open(1 << 20);
    change(store, "ab", 0, 60);
    store.commit(R"({"of":"another"})");
    store.close();
  }
  std::filesystem::copy_file(path() / "commits.jsonl", at("commits.jsonl"));
  for (const bool closed : {false, true}) {
    SCOPED_TRACE(closed);
    std::filesystem::remove_all(path());
    std::filesystem::copy(at("before"), path());
    {
      Store store = open(1 << 20);
      change(store, "ab", 0, 60);
      store.commit(R"({"of":2})");
      closed ? store.close() : store.abandon();
    }
    std::filesystem::copy_file(at("commits.jsonl"), path() / "commits.jsonl", std::filesystem::copy_options::overwrite_existing);
    EXPECT_EQ(notes(open_at(path(), Mode::kRead)), R"({"of":1}{"of":2})");
    {
      Store store = open(1 << 20);
      EXPECT_EQ(notes(store), R"({"of":1}{"of":2})");
      store.commit(R"({"of":3})");
      store.close();
    }
    EXPECT_EQ(notes(open_at(path(), Mode::kRead)), R"({"of":1}{"of":2}{"of":3})");
  }
}

TEST_F(MixedFilesTest, OfAStoreWithoutALogGiveOneCommitOrAreRefused) {
  for (int commit = 0; commit <= 3; ++commit) {
    Store store = open_at(path(), Mode::kOpenOrCreate, Durability::kNone);
    if (commit == 0) {
      make_tables(store);
    } else {
      change(store, commit == 2 ? "a" : "ab", 20 * commit, 20 * commit + 60);
    }
    store.close();
    keep(fmt::format("{} closed", commit), open_at(path(), Mode::kRead));
  }
  try_every_mix();
}

}  // namespace
}  // namespace embermap
