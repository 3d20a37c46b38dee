// A writer that commits and applies all the time, and readers in other processes that open and refresh: each sees one commit, and
// none is refused.
//
// EMBERMAP_SHARING_COMMITS=5000 for a minute or so of it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::read_all;
using Mode = StoreOptions::Mode;
class SharingTest : public test::StoreTest {};

// Where a row of a table is commit c's, all of it is c; the others are an earlier commit's, or initial (0).
// "a" is changed as a whole by each commit, "b" by every third, "c" comes and goes.
std::string wrong(Store& reader) {
  const auto commit = static_cast<float>(reader.commit_number());
  const auto all = [&](const char* name, float wanted) -> std::string {
    for (const float found : read_all(reader.table(name)))
      if (found != wanted) return fmt::format("{} in '{}' at commit {}, not {}", found, name, commit, wanted);
    return {};
  };
  std::string what = all("a", commit);
  if (what.empty()) what = all("b", commit - static_cast<float>(reader.commit_number() % 3));
  return what;
}

// Of a child: 0 where all was right.
int read_on(const std::filesystem::path& store, const std::filesystem::path& stop, unsigned seed) {
  std::mt19937 random(seed);
  unsigned looks = 0, stale = 0;
  try {
    while (!std::filesystem::exists(stop)) {
      Store reader = Store::open(store, {.mode = Mode::kRead, .memory = 1 << 20, .threads = 1});
      for (unsigned i = random() % 4 + 1; i > 0; --i) {
        try {
          if (const std::string what = wrong(reader); !what.empty()) throw Error(what);
          for (const char* name : {"a", "b"})
            if (reader.table(name).verify().bad_pages != 0) throw Error("bad pages");
          if (random() % 8 == 0) {
            const std::filesystem::path copy = store.parent_path() / fmt::format("copy-{}", seed);
            std::filesystem::remove_all(copy);
            reader.snapshot(copy);
            Store of = Store::open(copy, {.mode = Mode::kRead, .memory = 1 << 20, .threads = 1});
            if (const std::string what = wrong(of); !what.empty()) throw Error("snapshot: " + what);
          }
          ++looks;
        } catch (const StaleError&) {  // the writer went on
          ++stale;
        }
        reader.refresh();
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "reader %u: %s\n", seed, error.what());
    return 1;
  }
  std::fprintf(stderr, "reader %u: %u looks, %u stale\n", seed, looks, stale);
  return looks == 0 ? 2 : 0;
}

TEST_F(SharingTest, ReadersBesideAWriterThatAppliesAllTheTimeAreNotRefused) {
  const char* const text = std::getenv("EMBERMAP_SHARING_COMMITS");
  const int commits = text == nullptr ? 150 : std::atoi(text);
  const std::filesystem::path stop = directory_ / "stop";
  const auto change = [](Store& store) {
    const std::uint64_t next = store.commit_number() + 1;
    for (const char* name : {"a", "b"}) {
      if (*name == 'b' && next % 3 != 0) continue;
      Table table = store.table(name);
      test::scatter(table, test::range(0, static_cast<std::int64_t>(table.rows())),
                    std::vector<float>(table.rows() * table.dim(), static_cast<float>(next)));
    }
    store.commit();
  };
  {
    Store store = open(1 << 20);
    for (const char* name : {"a", "b"}) store.create(name, {.rows = 60, .dim = 128});
    for (int i = 0; i < 3; ++i) change(store);
    store.close();
  }
  std::vector<pid_t> readers;
  for (unsigned i = 0; i < 4; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) ::_exit(read_on(path(), stop, i));
    readers.push_back(child);
  }
  std::mt19937 random(1);
  for (int done = 0; done < commits;) {
    Store store = open(1 << 20);
    for (unsigned i = random() % 30 + 5; i > 0; --i, ++done) {
      change(store);
      switch (random() % 6) {
        case 0:
        case 1: store.checkpoint(); break;
        case 2: store.contains("c") ? store.remove("c") : (void)store.create("c", {.rows = 10, .dim = 4}); break;
        default: break;
      }
    }
    random() % 2 == 0 ? store.close() : store.abandon();
  }
  test::write_text(stop, "");
  for (const pid_t child : readers) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

}  // namespace
}  // namespace embermap
