// Adopted files that something other than embermap changed, by their size and time: told of, unless it was embermap itself.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <chrono>
#include <thread>

#include "io/npy.hpp"
#include "tests/store/power_loss.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Mode = StoreOptions::Mode;

constexpr std::uint64_t kRows = 16, kDim = 256;  // four pages

std::string npy(float value) {
  const std::vector<float> rows(kRows * kDim, value);
  return format_npy_header("<f4", {}, 0, {kRows, kDim}, 0) +
         std::string(reinterpret_cast<const char*>(rows.data()), rows.size() * 4);
}

// The kernel's times move in steps of a few milliseconds.
void let_time_pass() { std::this_thread::sleep_for(std::chrono::milliseconds(12)); }

timespec modified(const std::filesystem::path& file) {
  struct stat status {};
  EXPECT_EQ(::stat(file.c_str(), &status), 0);
  return status.st_mtim;
}

void set_modified(const std::filesystem::path& file, const timespec& time) {
  const timespec times[2] = {time, time};
  EXPECT_EQ(::utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
}

void edit(const std::filesystem::path& file, float value = -5) {
  let_time_pass();
  File::open(file, File::Mode::kReadWrite).write(file_size(file) - 4, std::as_bytes(std::span(&value, 1)));
}

void replace(const std::filesystem::path& file, const std::string& content) {
  let_time_pass();
  test::write_text(file.string() + ".new", content);
  std::filesystem::rename(file.string() + ".new", file);
}

// A store with a table "t" whose file was adopted, and one of its own.
class Adopted : public test::StoreTest, public testing::WithParamInterface<Durability> {
 protected:
  Adopted() {
    test::write_text(file_, npy(1));
    let_time_pass();
    Store store = open_now();
    store.adopt("t", file_);
    test::scatter(store.create("own", {.rows = 10, .dim = 2}), {1}, {3, 4});
    store.close();
  }
  StoreOptions options(Mode mode = Mode::kReadWrite, bool accept = false) const {
    return {.mode = mode, .memory = 1U << 20, .threads = 1, .durability = GetParam(), .accept_changed = accept};
  }
  Store open_now(Mode mode = Mode::kOpenOrCreate, bool accept = false) { return Store::open(path(), options(mode, accept)); }
  std::string refusal(Mode mode) {
    Store store = open_now(mode);
    EXPECT_EQ(test::gather(store.table("own"), {1})[1], 4.0F);
    return test::message_of<CorruptError>([&] { store.table("t"); });
  }
  static void set(Table table, float value) {
    test::scatter(table, test::range(0, kRows), std::vector<float>(kRows * kDim, value));
  }

  const std::filesystem::path file_ = directory_ / "adopted.npy";
};

INSTANTIATE_TEST_SUITE_P(Durability, Adopted, testing::Values(Durability::kCommit, Durability::kNone),
                         [](const auto& each) { return std::string(durability_name(each.param)); });

TEST_P(Adopted, IsNoTableOfAnotherStore) {
  Store other = Store::open(directory_ / "other", {.memory = 1 << 20});
  other.create("u", {.rows = kRows, .dim = kDim});
  test::write_text(directory_ / "other" / "free.npy", npy(3));
  Store store = open_now();
  const std::filesystem::path file = directory_ / "other" / "u.npy", link = directory_ / "link.npy";
  std::filesystem::create_symlink(file, link);
  const auto before = test::snapshot(path());
  for (const auto& path : {file, link})
    for (const bool writable : {true, false})
      EXPECT_THAT(test::message_of<InvalidArgument>([&] { store.adopt("v", path, writable); }),
                  AllOf(HasSubstr("u.npy belongs to table 'u' of the store"), HasSubstr("open that store")));
  EXPECT_EQ(test::snapshot(path()), before);
  // What merely lies in its directory is no table's.
  EXPECT_EQ(test::gather(store.adopt("w", directory_ / "other" / "free.npy"), {0})[0], 3.0F);
}

TEST_P(Adopted, AFileThatOthersChangedIsTheOnlyTableThatIsRefused) {
  const std::vector<std::pair<const char*, std::function<void()>>> changes{
      {"edited in place", [&] { edit(file_); }},
      {"replaced", [&] { replace(file_, npy(2)); }},
      {"touched", [&] { set_modified(file_, {.tv_sec = 1'700'000'000, .tv_nsec = 5}); }},
      {"longer", [&] { std::filesystem::resize_file(file_, file_size(file_) + 1); }},
  };
  for (const auto& [what, change] : changes) {
    SCOPED_TRACE(what);
    change();
    const auto before = test::snapshot(path());
    for (const Mode mode : {Mode::kRead, Mode::kReadWrite}) {
      const std::string message = refusal(mode);
      EXPECT_THAT(message, AllOf(HasSubstr(file_.string()), HasSubstr("table 't'"), HasSubstr("modified 2"),
                                 HasSubstr("verify --accept " + (path() / "t").string())));
      if (std::string_view(what) == "longer") {
        EXPECT_THAT(message, HasSubstr(" -> " + std::to_string(file_size(file_)) + " bytes"));
      }
      if (std::string_view(what) == "replaced") {
        EXPECT_THAT(message, HasSubstr("inode "));
      }
    }
    EXPECT_EQ(before.at("t.pages"), test::snapshot(path()).at("t.pages"));
    Store store = open_now(Mode::kReadWrite, /*accept=*/true);
    store.table("t").accept();
    store.close();
    EXPECT_NO_THROW(open_now(Mode::kRead).table("t"));
  }
  std::filesystem::resize_file(file_, 1000);
  Store store = open_now();
  EXPECT_THAT(test::message_of<FormatError>([&] { store.table("t"); }), HasSubstr("truncated"));
}

TEST_P(Adopted, OpenedAsItIsItIsToldOfUntilItIsAccepted) {
  edit(file_);
  {
    Store store = open_now(Mode::kReadWrite, /*accept=*/true);
    EXPECT_EQ(test::gather(store.table("t"), {kRows - 1})[kDim - 1], -5.0F);
    test::scatter(store.table("t"), {0}, std::vector<float>(kDim, 7));
    store.close();
  }
  EXPECT_THAT(refusal(Mode::kReadWrite), HasSubstr("changed by something other"));
  EXPECT_EQ(test::gather(open_now(Mode::kRead, true).table("t"), {0})[0], 7.0F);
  {
    Store store = open_now(Mode::kReadWrite, /*accept=*/true);
    store.table("t").accept();
    EXPECT_EQ(store.table("t").verify().verified, 4U);
    store.close();
  }
  EXPECT_EQ(test::gather(open_now().table("t"), {kRows - 1})[kDim - 1], -5.0F);
}

TEST_P(Adopted, AFileThatIsOnlyReadIsAcceptedAsWell) {
  const std::filesystem::path file = directory_ / "protected.npy";
  test::write_text(file, npy(1));
  {
    Store store = open_now();
    store.adopt("p", file, /*writable=*/false);
    store.close();
  }
  edit(file);
  {
    Store store = open_now(Mode::kReadWrite, /*accept=*/true);
    store.table("p").accept();
    store.close();
  }
  EXPECT_EQ(test::gather(open_now(Mode::kRead).table("p"), {kRows - 1})[kDim - 1], -5.0F);
}

TEST_P(Adopted, WhatEmbermapWritesIsNoChange) {
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    let_time_pass();
    Store store = open_now();
    set(store.table("t"), static_cast<float>(round));
    store.commit();
    EXPECT_EQ(test::gather(open_now(Mode::kRead).table("t"), {3})[0], static_cast<float>(round));
    if (round % 2 == 0) store.checkpoint();
    test::scatter(store.table("own"), {2}, {1, 1});
    store.commit();
    EXPECT_EQ(test::gather(open_now(Mode::kRead).table("t"), {3})[0], static_cast<float>(round));
    round % 3 == 0 ? store.close() : store.abandon();
  }
  EXPECT_EQ(test::gather(open_now().table("t"), {3})[0], 5.0F);
}

TEST_P(Adopted, AChangeWhileTheStoreIsOpenIsNotTakenForItsOwn) {
  {
    Store store = open_now();
    edit(file_);
    let_time_pass();
    test::scatter(store.table("t"), {0}, std::vector<float>(kDim, 7));
    store.close();
  }
  EXPECT_THAT(refusal(Mode::kRead), HasSubstr("changed by something other"));
}

TEST_P(Adopted, CopiesThatKeptTheirTimeAreTheSameFile) {
  const timespec time = modified(file_);
  replace(file_, test::file_text(file_));
  set_modified(file_, time);
  EXPECT_NO_THROW(open_now(Mode::kRead).table("t"));
  replace(file_, test::file_text(file_));
  set_modified(file_, {.tv_sec = time.tv_sec, .tv_nsec = 0});  // out of an archive
  EXPECT_NO_THROW(open_now(Mode::kRead).table("t"));
  EXPECT_NO_THROW(open_now().table("t")) << "which records what it is like now";
  EXPECT_NO_THROW(open_now().table("t"));
  set_modified(file_, time);
  EXPECT_THAT(refusal(Mode::kRead), HasSubstr("modified "));
}

TEST_P(Adopted, AStoresOwnFilesMayBeCopiedAndTouched) {
  const std::filesystem::path copy = directory_ / "copy";
  let_time_pass();
  std::filesystem::copy(path(), copy, std::filesystem::copy_options::recursive);
  for (const auto& file : {path() / "own.npy", path() / "own.pages"}) set_modified(file, {.tv_sec = 1'000'000'000, .tv_nsec = 0});
  for (const auto& store : {path(), copy})
    for (const Mode mode : {Mode::kRead, Mode::kReadWrite}) {
      Store opened = Store::open(store, options(mode));
      EXPECT_EQ(test::gather(opened.table("own"), {1})[1], 4.0F);
      EXPECT_EQ(opened.table("own").verify().bad_pages, 0U);
    }
}

TEST_P(Adopted, WhatWasChangedComesBackFromABackup) {
  const std::filesystem::path backup = directory_ / "backup";
  {
    Store store = open_now();
    set(store.table("t"), 5);  // all pages have checksums
    store.close();
    open_now(Mode::kRead).snapshot(backup);
  }
  edit(file_);
  EXPECT_THROW(open_now(Mode::kRead).snapshot(directory_ / "other"), CorruptError);
  {
    Store store = open_now(Mode::kReadWrite, /*accept=*/true);
    Store other = Store::open(backup, options(Mode::kRead));
    EXPECT_EQ(store.table("t").repair_from(other.table("t")).repaired_pages, 1U);
    store.close();
  }
  EXPECT_EQ(test::gather(open_now().table("t"), {kRows - 1})[kDim - 1], 5.0F);
}

TEST_P(Adopted, APageFileThatDoesNotTellIsMadeTo) {
  const std::string nothing(32, '\0');
  File::open(path() / "t.pages", File::Mode::kReadWrite).write(40, nothing);
  edit(file_);
  EXPECT_NO_THROW(open_now(Mode::kRead).table("t"));
  EXPECT_NO_THROW(open_now().table("t"));
  EXPECT_NE(test::file_text(path() / "t.pages").substr(40, 32), nothing);
  edit(file_);
  EXPECT_THAT(refusal(Mode::kRead), HasSubstr("modified "));
}

// Whatever is on the disk when power is lost, times of files included: embermap's own writes are never taken for a change.
TEST_P(Adopted, AStoreThatLostPowerOpensIt) {
  const test::TemporaryDirectory folder(test::memory_folder());
  const std::filesystem::path live = folder / "live", file = live / "a.npy";
  std::filesystem::create_directories(live / "s");
  test::write_text(file, npy(0));
  const bool logged = GetParam() == Durability::kCommit;
  StoreOptions options{.mode = Mode::kOpenOrCreate,
                       .memory = 64U << 10,
                       .threads = 1,
                       .io = IoEngine::kThreads,
                       .direct = false,
                       .durability = GetParam(),
                       .accept_unclean = !logged};
  options.allow_adopted = true;
  test::PowerLoss loss(live);
  std::vector<std::uint64_t> done;  // changes recorded when value i was committed
  {
    options.file_ops = &loss;
    Store store = Store::open(live / "s", options);
    let_time_pass();
    Table table = store.adopt("t", file);
    done.push_back(loss.count());
    for (int i = 1; i <= 4; ++i) {
      let_time_pass();
      set(table, static_cast<float>(i));
      store.commit();
      done.push_back(loss.count());
      if (i == 2) store.checkpoint();
    }
    let_time_pass();
    store.close();
    options.file_ops = nullptr;
    options.mode = Mode::kReadWrite;
  }
  using Kept = test::PowerLoss::Kept;
  test::PowerLoss::Disk disks(loss);
  std::uint64_t opened = 0;
  for (const Kept kept :
       {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast, Kept::kRandom, Kept::kRandom}) {
    for (std::uint64_t point = done[0]; point <= loss.count(); ++point) {
      SCOPED_TRACE(testing::Message() << loss.describe(point) << ", kept " << test::kept_name(kept));
      disks.make(point, kept, /*seed=*/point + opened, live);  // where it was: the manifest names the file by its path
      float least = 0;
      while (static_cast<std::size_t>(least) + 1 < done.size() && done[static_cast<std::size_t>(least) + 1] <= point) ++least;
      for (const Mode mode : {Mode::kRead, Mode::kReadWrite, Mode::kReadWrite, Mode::kRead}) {
        options.mode = mode;
        Store store = Store::open(live / "s", options);
        const std::vector<float> rows = test::read_all(store.table("t"));
        if (logged) {
          ASSERT_GE(rows[0], least);
          ASSERT_EQ(rows, std::vector<float>(rows.size(), rows[0]));
        }
        ++opened;
      }
    }
  }
  std::printf("%s: %llu openings\n", std::string(durability_name(GetParam())).c_str(), static_cast<unsigned long long>(opened));
}

}  // namespace
}  // namespace embermap
