// A redo log that is damaged, not shortened: who opens the store is told the same, and may go on with what there is. And what
// recovery is said to do, and what is left of a table that was being removed.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cerrno>
#include <string>

#include "io/row_order.hpp"
#include "io/vocabulary.hpp"
#include "store/log_format.hpp"
#include "store/manifest.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::message_of;
using test::scatter;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Mode = StoreOptions::Mode;

class DamagedLogTest : public test::StoreTest {
 protected:
  // Commits 1 to 3 in the log, of which 2 and 3 have pages there.
  void make() {
    Store store = open(1 << 20);
    for (const char* name : {"t", "u"}) store.create(name, {.rows = 100, .dim = 128});
    for (float value = 1; value <= 3; ++value) {
      for (const char* name : {"t", "u"}) scatter(store.table(name), {5, 50}, std::vector<float>(256, value));
      store.commit();
    }
    store.abandon();
    end_ = read_log_mark(File::open(log(), File::Mode::kRead)).value().end;
  }
  std::filesystem::path log() const { return path() / "redo.log"; }
  void damage(std::uint64_t at, std::string_view bytes = "?!") { File::open(log(), File::Mode::kReadWrite).write(at, bytes); }
  std::uint64_t end_ = 0;  // of the last commit's record
};

TEST_F(DamagedLogTest, IsOneErrorForAllAndIsAcceptedWhereThatIsWanted) {
  make();
  std::filesystem::copy(path(), directory_ / "good");
  const std::uint64_t first = kLogStart, last = end_ - kLogBlock;
  struct Case {
    std::uint64_t at;
    std::string why;
    float left;  // of the rows, afterwards
  };
  for (const auto& [at, why, left] :
       {Case{first + 100, "is damaged, and commits up to", 0}, Case{first, "the record at byte 8192", 0},
        Case{last + 100, "it had commit 3, and ends with commit 2", 2}}) {
    SCOPED_TRACE(at);
    std::filesystem::remove_all(path());
    std::filesystem::copy(directory_ / "good", path());
    damage(at);
    const auto before = test::snapshot(path());
    const std::string writer = message_of<CorruptError>([&] { open(1 << 20); });
    EXPECT_THAT(writer, AllOf(HasSubstr(why), HasSubstr("redo.log"), Not(HasSubstr("at commit 0"))));
    EXPECT_THAT(writer, HasSubstr(left == 0 ? "before its first commit" : "would be at commit 2"));
    EXPECT_EQ(message_of<CorruptError>([&] { open(1 << 20, Mode::kRead); }), writer);
    EXPECT_THAT(plan_recovery(path()).log_gone, HasSubstr(why));
    EXPECT_EQ(test::snapshot(path()), before);
    EXPECT_EQ(gather(Store::open(path(), {.mode = Mode::kRead, .accept_unclean = true}).table("t"), {5})[0], left);
    Store::open(path(), {.memory = 1 << 20, .accept_unclean = true}).abandon();
    Store again = open(1 << 20);
    for (const char* name : {"t", "u"}) {
      EXPECT_EQ(gather(again.table(name), {5, 50}), std::vector<float>(256, left));
      EXPECT_EQ(again.table(name).verify().bad_pages, 0U);
    }
    scatter(again.table("t"), {5}, std::vector<float>(128, 9));
    again.commit();
    again.abandon();
    EXPECT_EQ(gather(open(1 << 20, Mode::kRead).table("t"), {5})[0], 9.0F);
  }
}

TEST_F(DamagedLogTest, WithoutAHeaderIsPutAside) {
  make();
  for (const std::uint64_t slot : {0U, 4096U}) damage(slot, std::string(88, 'x'));
  const std::string bytes = test::file_text(log());
  const std::string writer = message_of<CorruptError>([&] { open(1 << 20); });
  EXPECT_THAT(writer, HasSubstr("neither of the redo log's two headers is whole"));
  EXPECT_EQ(message_of<CorruptError>([&] { open(1 << 20, Mode::kRead); }), writer);
  EXPECT_THAT(plan_recovery(path()).log_gone, HasSubstr("neither of its two headers is whole"));
  EXPECT_EQ(gather(Store::open(path(), {.mode = Mode::kRead, .accept_unclean = true}).table("t"), {5})[0], 0.0F);
  Store::open(path(), {.memory = 1 << 20, .accept_unclean = true}).close();
  EXPECT_EQ(test::file_text(path() / "redo.log.damaged"), bytes);
  EXPECT_EQ(open(1 << 20).table("t").verify().bad_pages, 0U);
}

TEST_F(DamagedLogTest, IsPutAsideBesideThoseOfBefore) {
  make();
  std::map<std::string, std::string> kept;
  for (const char* name : {"redo.log.damaged", "redo.log.damaged.1", "redo.log.damaged.2"}) {
    if (!kept.empty()) {
      Store store = open(1 << 20);
      EXPECT_EQ(store.damaged_log(), std::filesystem::path());
      scatter(store.table("t"), {5}, std::vector<float>(128, static_cast<float>(kept.size())));
      store.commit();
      store.abandon();
    }
    for (const std::uint64_t slot : {0U, 4096U}) damage(slot, std::string(88, static_cast<char>('x' + kept.size())));
    kept.emplace(name, test::file_text(log()));
    const Store store = Store::open(path(), {.memory = 1 << 20, .accept_unclean = true});
    EXPECT_EQ(store.damaged_log(), path() / name);
    for (const auto& [file, bytes] : kept) EXPECT_EQ(test::file_text(path() / file), bytes) << file;
  }
}

TEST_F(DamagedLogTest, APageOfItThatIsDamagedIsLeftOutWhereThatIsWanted) {
  make();
  // The last page before the last commit's record.
  damage(end_ - 2 * kLogBlock + 8);
  EXPECT_THAT(message_of<CorruptError>([&] { open(1 << 20); }), HasSubstr("does not match its checksum in the redo log"));
  Store::open(path(), {.memory = 1 << 20, .accept_unclean = true}).close();
  Store store = open(1 << 20);
  for (const char* name : {"t", "u"}) EXPECT_EQ(store.table(name).verify().bad_pages, 0U);
  EXPECT_EQ(gather(store.table("t"), {5, 50}), std::vector<float>(256, 3));
  EXPECT_EQ(gather(store.table("u"), {5})[0], 3.0F);
}

// Of several moments as well.
TEST_F(DamagedLogTest, WithAManifestOfBeforeIsTheSameErrorForAllWhoAcceptIt) {
  {
    Store store = open(1 << 20);
    store.create("t", {.rows = 100, .dim = 128});
    std::filesystem::copy(path() / kManifestName, directory_ / "old");
    for (float value = 1; value <= 4; ++value) {
      scatter(store.table("t"), {5}, std::vector<float>(128, value));
      store.commit();
      if (value == 2) store.checkpoint();
    }
    store.abandon();
  }
  damage(read_log_mark(File::open(log(), File::Mode::kRead)).value().end - kLogBlock + 100);
  std::filesystem::copy_file(directory_ / "old", path() / kManifestName, std::filesystem::copy_options::overwrite_existing);
  const auto accepted = [&](Mode mode) {
    return message_of<FormatError>([&] { Store::open(path(), {.mode = mode, .memory = 1 << 20, .accept_unclean = true}); });
  };
  EXPECT_THAT(accepted(Mode::kRead), HasSubstr("is of another moment than the store's manifest"));
  EXPECT_EQ(message_of<FormatError>([&] { plan_recovery(path()); }), accepted(Mode::kRead));
  EXPECT_THAT(accepted(Mode::kReadWrite), HasSubstr("is of another moment than the store's manifest"));
}

// The system dies while the tables are taken as they are: the next opening refuses them again, or they are sealed.
TEST_F(DamagedLogTest, TablesThatAreTakenAsTheyAreAreRefusedUntilTheyAreSealed) {
  class Dies final : public FileOps {
   public:
    int left = 1 << 30;
    ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
      return dead() ? -1 : FileOps::pwrite(fd, buffer, bytes, offset);
    }
    ssize_t pwritev(int fd, const struct iovec* pieces, int count, off_t offset) override {
      return dead() ? -1 : FileOps::pwritev(fd, pieces, count, offset);
    }
    int ftruncate(int fd, off_t bytes) override { return dead() ? -1 : FileOps::ftruncate(fd, bytes); }
    int fdatasync(int fd) override { return dead() ? -1 : FileOps::fdatasync(fd); }
    int fsync(int fd) override { return dead() ? -1 : FileOps::fsync(fd); }
    int rename(const char* from, const char* to) override { return dead() ? -1 : FileOps::rename(from, to); }
    int unlink(const char* file) override { return dead() ? -1 : FileOps::unlink(file); }

   private:
    bool dead() { return --left < 0 && (errno = EIO, true); }
  };
  make();
  {
    // A page that was being applied when the system went down: the file has it, and its checksum is that of before.
    open(1 << 20).close();
    Store store = open(1 << 20);
    scatter(store.table("t"), {5}, std::vector<float>(128, 4));
    store.commit();
    store.abandon();
    const Geometry geometry = open(1 << 20, Mode::kRead).table("t").geometry();
    File::open(path() / "t.npy", File::Mode::kReadWrite).write(geometry.offset_of(geometry.page_of(5)), std::string_view("torn"));
  }
  const std::uint64_t last = read_log_mark(File::open(log(), File::Mode::kRead)).value().end - kLogBlock + 100;
  const test::TemporaryDirectory fast(test::memory_folder());
  const std::filesystem::path store = fast / "store";
  for (const Durability durability : {Durability::kCommit, Durability::kNone})
    for (const bool gone : {false, true}) {
      int refused = 0;
      bool done = false;
      for (int steps = 0; !done; ++steps) {
        SCOPED_TRACE(fmt::format("{}, {} steps", gone ? "gone" : "damaged", steps));
        std::filesystem::remove_all(store);
        std::filesystem::copy(path(), store);
        if (gone)
          std::filesystem::remove(store / kLogName);
        else
          File::open(store / kLogName, File::Mode::kReadWrite).write(last, std::string_view("?!"));
        Dies ops;
        ops.left = steps;
        const auto open_it = [&](bool accept, FileOps* with) {
          return Store::open(store, {.mode = Mode::kReadWrite,
                                     .memory = 1 << 20,
                                     .threads = 1,
                                     .durability = durability,
                                     .accept_unclean = accept,
                                     .file_ops = with});
        };
        try {
          open_it(true, &ops).abandon();
          done = ops.left >= 0;
        } catch (const Error&) {
        }
        try {
          Store again = open_it(false, nullptr);
          EXPECT_EQ(again.table("t").verify().bad_pages, 0U);
          again.abandon();
        } catch (const CorruptError&) {
          ++refused;
        }
        EXPECT_NO_THROW(open_it(true, nullptr).close());
        EXPECT_EQ(open_it(false, nullptr).table("t").verify().bad_pages, 0U);
      }
      EXPECT_GT(refused, 5);
    }
}

TEST_F(DamagedLogTest, RecoveryIsToldAsItWouldBe) {
  make();
  EXPECT_TRUE(plan_recovery(path()).broken.empty());
  EXPECT_EQ(plan_recovery(path()).pages.size(), 2U);
  const auto same_as_opening = [&] {
    std::string plan;
    try {
      plan_recovery(path());
    } catch (const Error& error) {
      plan = error.what();
    }
    try {
      open(1 << 20).abandon();
    } catch (const Error& error) {
      EXPECT_EQ(plan.substr(0, plan.find(" at ")), std::string(error.what()).substr(0, plan.find(" at ")));
      return;
    }
    ADD_FAILURE() << "opened; the plan: " << plan;
  };
  std::filesystem::rename(path() / "t.npy", directory_ / "kept");
  same_as_opening();
  std::filesystem::rename(directory_ / "kept", path() / "t.npy");
  const auto bytes = std::filesystem::file_size(path() / "t.pages");
  std::filesystem::copy(path() / "t.pages", directory_ / "kept");
  std::filesystem::resize_file(path() / "t.pages", bytes - 1000);
  same_as_opening();
  std::filesystem::copy_file(directory_ / "kept", path() / "t.pages", std::filesystem::copy_options::overwrite_existing);
  // A table of which the log has nothing does not keep the others from being opened.
  open(1 << 20).close();
  std::filesystem::remove(path() / "t.pages");
  EXPECT_THAT(plan_recovery(path()).broken.at("t"), HasSubstr("t.pages"));
  EXPECT_NO_THROW(open(1 << 20).table("u"));
}

TEST_F(DamagedLogTest, ATableThatWasBeingRemovedLeavesNoWords) {
  // The system dies at the n-th unlink.
  class Dies final : public FileOps {
   public:
    int left = 0;
    int unlink(const char* file) override { return left-- > 0 ? FileOps::unlink(file) : (errno = EIO, -1); }
  };
  for (int unlinks = 0; unlinks < 4; ++unlinks) {
    SCOPED_TRACE(unlinks);
    std::filesystem::remove_all(path());
    Dies ops;
    ops.left = 1 << 20;
    Store store = Store::open(path(), {.memory = 1 << 20, .file_ops = &ops});
    for (const char* name : {"t", "u"}) {
      store.create(name, {.rows = 10, .dim = 4});
      test::write_text(vocabulary_beside(path() / name), "words\n");
      test::write_text(order_beside(path() / name), "order\n");
    }
    ops.left = unlinks;
    EXPECT_THROW(store.remove("t"), IoError);
    ops.left = 1 << 20;
    store.abandon();
    Store again = open(1 << 20);
    EXPECT_EQ(again.tables(), std::vector<std::string>{"u"});
    for (const auto& file : {path() / "t.npy", path() / "t.pages", vocabulary_beside(path() / "t"), order_beside(path() / "t")})
      EXPECT_FALSE(std::filesystem::exists(file)) << file;
    for (const auto& file : {vocabulary_beside(path() / "u"), order_beside(path() / "u")})
      EXPECT_TRUE(std::filesystem::exists(file)) << file;
    EXPECT_TRUE(Manifest::load(path()).unfinished.empty());
  }
}

}  // namespace
}  // namespace embermap
