#include "tests/store/power_loss.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "tests/store/store_fixture.hpp"

namespace embermap::test {
namespace {

using ::testing::Contains;
using ::testing::UnorderedElementsAre;
using Kept = PowerLoss::Kept;

// Name -> content, of a folder.
using Files = std::map<std::string, std::string>;

class PowerLossTest : public ::testing::Test {
 protected:
  TemporaryDirectory directory_{memory_folder()};
  std::filesystem::path live() const { return directory_ / "live"; }
  std::filesystem::path after() const { return directory_ / "after"; }
  std::filesystem::path at(std::string_view name) const { return live() / name; }
  PowerLossTest() { std::filesystem::create_directory(live()); }

  // All that a disk may hold after what `work` does to live(), if power is lost when `point` changes were made.
  static constexpr std::uint64_t kSeeds = 60;
  std::set<Files> outcomes(const PowerLoss& loss, std::uint64_t point) {
    PowerLoss::Disk disk(loss);
    std::set<Files> found;
    for (const Kept kept : {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast}) {
      disk.make(point, kept, 0, after());
      found.insert(snapshot(after()));
    }
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      disk.make(point, Kept::kRandom, seed, after());
      found.insert(snapshot(after()));
    }
    return found;
  }
  std::set<Files> outcomes_anywhere(const PowerLoss& loss) {
    std::set<Files> found;
    for (std::uint64_t point = 0; point <= loss.count(); ++point) found.merge(outcomes(loss, point));
    return found;
  }
  Files made(const PowerLoss& loss, std::uint64_t point, Kept kept, std::uint64_t seed = 0) {
    PowerLoss::Disk(loss).make(point, kept, seed, after());
    return snapshot(after());
  }
};

TEST_F(PowerLossTest, AcceptsReplaceFileAtEveryPoint) {
  const std::string before(3000, 'a'), later(5000, 'b');
  write_text(at("m"), before);
  PowerLoss loss(live());
  replace_file(at("m"), later, loss);
  ASSERT_GT(loss.count(), 4U);
  bool both = false;
  for (std::uint64_t point = 0; point <= loss.count(); ++point) {
    std::set<std::string> contents;
    for (const Files& files : outcomes(loss, point)) {
      ASSERT_TRUE(files.contains("m")) << loss.describe(point);
      EXPECT_THAT((std::vector{before, later}), Contains(files.at("m"))) << loss.describe(point);
      contents.insert(files.at("m"));
    }
    both = both || contents.size() == 2;
  }
  EXPECT_TRUE(both) << "between the rename and the sync of the folder";
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", later}})) << "it returned";
}

TEST_F(PowerLossTest, CatchesAFileRenamedWithoutASyncOfItsData) {
  write_text(at("m"), "old");
  PowerLoss loss(live());
  {
    const File file = File::open(at("t"), File::Mode::kCreateNew, loss);
    file.write(0, "new");
    ASSERT_EQ(loss.rename(at("t").c_str(), at("m").c_str()), 0);
    sync_directory(live(), loss);
  }
  EXPECT_THAT(outcomes(loss, loss.count()),
              UnorderedElementsAre(Files{{"m", "new"}}, Files{{"m", ""}}, Files{{"m", std::string(3, '\0')}}));
}

TEST_F(PowerLossTest, CatchesARenameWithoutASyncOfTheFolder) {
  write_text(at("m"), "old");
  PowerLoss loss(live());
  {
    const File file = File::open(at("t"), File::Mode::kCreateNew, loss);
    file.write(0, "new");
    file.sync();
    ASSERT_EQ(loss.rename(at("t").c_str(), at("m").c_str()), 0);
  }
  EXPECT_THAT(outcomes(loss, loss.count()),
              UnorderedElementsAre(Files{{"m", "old"}}, Files{{"m", "new"}}, Files{{"m", "old"}, {"t", "new"}}));
}

TEST_F(PowerLossTest, TheSyncOfAFileSavesNoNameAndThatOfAFolderNoData) {
  PowerLoss loss(live());
  const File file = File::open(at("t"), File::Mode::kCreateNew, loss);
  file.write(0, "data");
  file.sync();
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{}, Files{{"t", "data"}}));
  file.write(0, "more");
  sync_directory(live(), loss);
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"t", "data"}}, Files{{"t", "more"}}));
}

TEST_F(PowerLossTest, WritesAreTornAtSectorsAndEachSectorHoldsWhatItHeldOnce) {
  write_text(at("m"), std::string(2048, 'a'));
  PowerLoss loss(live());
  const File file = File::open(at("m"), File::Mode::kReadWrite, loss);
  file.write(0, std::string(2048, 'b'));
  file.write(500, std::string(24, 'c'));
  std::set<std::string> first;
  bool torn = false;
  for (const Files& files : outcomes(loss, loss.count())) {
    const std::string& text = files.at("m");
    ASSERT_EQ(text.size(), 2048U);
    first.insert(text.substr(0, 512));
    for (std::size_t sector = 1; sector < 4; ++sector) {
      const std::string part = text.substr(sector * 512 + 12, 500);
      ASSERT_TRUE(part == std::string(500, 'a') || part == std::string(500, 'b'));
      torn = torn || part[0] != text[2047];
    }
  }
  EXPECT_TRUE(torn);
  // Never the second write over what was there before the first.
  EXPECT_THAT(first,
              UnorderedElementsAre(std::string(512, 'a'), std::string(512, 'b'), std::string(500, 'b') + std::string(12, 'c')));
  EXPECT_THAT(made(loss, loss.count(), Kept::kTornLast).at("m").substr(1024), std::string(1024, 'b'));
}

TEST_F(PowerLossTest, FilesThatGrewAreShortOrLongWithZerosUntilSynced) {
  write_text(at("m"), "abc");
  PowerLoss loss(live());
  const File file = File::open(at("m"), File::Mode::kReadWrite, loss);
  file.resize(4096);
  file.write(4096, std::string(4096, 'd'));
  std::set<std::size_t> sizes;
  for (const Files& files : outcomes(loss, loss.count())) {
    EXPECT_EQ(files.at("m").substr(0, 3), "abc");
    sizes.insert(files.at("m").size());
  }
  EXPECT_THAT(sizes, ::testing::IsSupersetOf({std::size_t{3}, std::size_t{4096}, std::size_t{8192}}));
  EXPECT_GT(sizes.size(), 3U) << "half grown";
  EXPECT_EQ(made(loss, loss.count(), Kept::kMetadata).at("m"), "abc" + std::string(8189, '\0'));
  EXPECT_EQ(made(loss, loss.count(), Kept::kData).at("m"), "abc");
  file.sync();
  EXPECT_THAT(outcomes(loss, loss.count()),
              UnorderedElementsAre(Files{{"m", "abc" + std::string(4093, '\0') + std::string(4096, 'd')}}));
  file.resize(2);
  file.resize(3);
  EXPECT_EQ(made(loss, loss.count(), Kept::kEverything).at("m"), std::string("ab\0", 3));
  file.sync();
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", std::string("ab\0", 3)}}));
}

TEST_F(PowerLossTest, RemovedFilesComeBackUntilTheFolderIsSynced) {
  write_text(at("m"), "old");
  PowerLoss loss(live());
  ASSERT_EQ(loss.unlink(at("m").c_str()), 0);
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", "old"}}, Files{}));
  File::open(at("m"), File::Mode::kCreateNew, loss);  // another file of that name
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", "old"}}, Files{}, Files{{"m", ""}}));
  sync_directory(live(), loss);
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", ""}}));
}

TEST_F(PowerLossTest, WhatASyncThatFailedWasToSaveStaysInDoubt) {
  write_text(at("m"), "old");
  PowerLoss loss(live());
  const File file = File::open(at("m"), File::Mode::kReadWrite, loss);
  file.write(0, "new");
  file.resize(600);
  loss.fail(0, PowerLoss::Fault::kSyncLost);
  EXPECT_THROW(file.sync(), IoError);
  file.write(512, "!");
  file.sync();
  std::set<std::string> found;
  for (const Files& files : outcomes(loss, loss.count())) {
    EXPECT_EQ(files.at("m")[512], '!') << "written after it";
    found.insert(files.at("m").substr(0, 3));
  }
  EXPECT_THAT(found, UnorderedElementsAre("old", "new"));
  sync_directory(live(), loss);
  ASSERT_EQ(loss.unlink(at("m").c_str()), 0);
  loss.fail(0, PowerLoss::Fault::kSyncLost);
  EXPECT_THROW(sync_directory(live(), loss), IoError);
  sync_directory(live(), loss);
  EXPECT_THAT(outcomes(loss, loss.count()), Contains(Files{}));
  EXPECT_GT(outcomes(loss, loss.count()).size(), 1U);
}

TEST_F(PowerLossTest, TimesOfFilesAreSafeAfterFsyncAlone) {
  write_text(at("m"), "old");
  PowerLoss loss(live());
  const auto time_of = [](const std::filesystem::path& file) { return std::filesystem::last_write_time(file); };
  const auto times = [&] {
    std::set<std::filesystem::file_time_type> found;
    PowerLoss::Disk disk(loss);
    for (const Kept kept : {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast, Kept::kRandom}) {
      disk.make(loss.count(), kept, 0, after());
      found.insert(time_of(after() / "m"));
    }
    return found;
  };
  const auto before = time_of(at("m"));
  EXPECT_THAT(times(), UnorderedElementsAre(before));
  std::this_thread::sleep_for(std::chrono::milliseconds(12));  // the kernel's times move in steps
  const File file = File::open(at("m"), File::Mode::kReadWrite, loss);
  file.write(0, "new");
  const auto written = time_of(at("m"));
  ASSERT_NE(before, written);
  EXPECT_THAT(times(), UnorderedElementsAre(before, written));
  file.sync();
  EXPECT_THAT(times(), UnorderedElementsAre(before, written)) << "data and size are safe";
  file.sync_all();
  EXPECT_THAT(times(), UnorderedElementsAre(written));
}

TEST_F(PowerLossTest, FaultsComeOnceAtTheCallAskedFor) {
  PowerLoss loss(live());
  const File file = File::open(at("m"), File::Mode::kCreateNew, loss);
  loss.fail(1, PowerLoss::Fault::kIo);
  file.write(0, "a");
  EXPECT_FALSE(loss.has_failed());
  EXPECT_THROW(file.write(1, "b"), IoError);
  EXPECT_TRUE(loss.has_failed());
  file.write(1, "c");
  loss.fail(0, PowerLoss::Fault::kFull);
  EXPECT_THAT(message_of<IoError>([&] { file.resize(9); }), ::testing::HasSubstr("No space left"));
  const std::uint64_t before = loss.count();
  loss.fail(0, PowerLoss::Fault::kShort);
  file.write(2, "defg");
  EXPECT_EQ(loss.count(), before + 2) << "in two pieces";
  loss.fail(0, PowerLoss::Fault::kInterrupt);
  file.sync();
  EXPECT_EQ(file_text(at("m")), "acdefg");
  sync_directory(live(), loss);
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"m", "acdefg"}}));
}

TEST_F(PowerLossTest, TheSameArgumentsMakeTheSameDiskInAnyOrder) {
  PowerLoss loss(live());
  for (const char* name : {"a", "b"}) {
    File file = File::open(at(name), File::Mode::kCreateNew, loss);
    for (int i = 0; i < 6; ++i) file.write(static_cast<std::uint64_t>(i) * 300, std::string(700, static_cast<char>('a' + i)));
    if (*name == 'a') file.sync();
  }
  PowerLoss::Disk disk(loss);
  std::vector<Files> up;
  for (std::uint64_t point = 0; point <= loss.count(); ++point) {
    disk.make(point, Kept::kRandom, 7, after());
    up.push_back(snapshot(after()));
  }
  for (std::uint64_t point = loss.count() + 1; point-- > 0;) {
    disk.make(point, Kept::kRandom, 7, after());
    EXPECT_EQ(snapshot(after()), up[point]) << point;
  }
}

TEST_F(PowerLossTest, KeepsFoldersApartAndRefusesRenamesBetweenThem) {
  std::filesystem::create_directory(at("sub"));
  PowerLoss loss(live());
  File::open(at("a"), File::Mode::kCreateNew, loss);
  File::open(at("sub/b"), File::Mode::kCreateNew, loss);
  sync_directory(at("sub"), loss);
  EXPECT_THAT(outcomes(loss, loss.count()), UnorderedElementsAre(Files{{"sub/b", ""}}, Files{{"a", ""}, {"sub/b", ""}}));
  EXPECT_THROW(loss.rename(at("a").c_str(), at("sub/a").c_str()), std::logic_error);
}

}  // namespace
}  // namespace embermap::test
