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
