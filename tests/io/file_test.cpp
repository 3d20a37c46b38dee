#include "io/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;

using FileTest = testing::FolderTest;
using TemporaryFileTest = testing::FolderTest;

// Half of what is asked for, and EINTR every third time, as disks and signals may do.
struct Halves final : FileOps {
  int calls = 0;
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    if (++calls % 3 == 0) return errno = EINTR, -1;
    return FileOps::pread(fd, buffer, bytes > 1 ? bytes / 2 : bytes, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (++calls % 3 == 0) return errno = EINTR, -1;
    return FileOps::pwrite(fd, buffer, bytes > 1 ? bytes / 2 : bytes, offset);
  }
  int fdatasync(int fd) override {
    if (++calls % 3 != 0) return errno = EINTR, -1;
    return FileOps::fdatasync(fd);
  }
};

struct Failing final : FileOps {
  int write_error = 0, sync_error = 0, rename_error = 0, directory_error = 0, read_error = 0, allocate_error = 0;
  std::size_t room = SIZE_MAX;
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    if (read_error != 0) return errno = read_error, -1;
    return FileOps::pread(fd, buffer, bytes, offset);
  }
  ssize_t pwrite(int fd, const void* buffer, std::size_t bytes, off_t offset) override {
    if (write_error != 0 && room == 0) return errno = write_error, -1;
    const std::size_t now = std::min(bytes, room);
    room -= now;
    return FileOps::pwrite(fd, buffer, now, offset);
  }
  int fdatasync(int fd) override { return sync_error != 0 ? (errno = sync_error, -1) : FileOps::fdatasync(fd); }
  int allocate(int fd, off_t bytes) override {
    return allocate_error != 0 ? (errno = allocate_error, -1) : FileOps::allocate(fd, bytes);
  }
  int fsync(int fd) override { return directory_error != 0 ? (errno = directory_error, -1) : FileOps::fsync(fd); }
  int rename(const char* from, const char* to) override {
    return rename_error != 0 ? (errno = rename_error, -1) : FileOps::rename(from, to);
  }
  int rename_new(const char* from, const char* to) override {
    return rename_error != 0 ? (errno = rename_error, -1) : FileOps::rename_new(from, to);
  }
};

TEST_F(FileTest, ContinuesShortReadsAndWritesAndRetriesInterruptedOnes) {
  std::string text(10007, '\0');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i % 251);
  Halves ops;
  File file = File::open(at("x"), File::Mode::kCreateNew, ops);
  file.write(3, text);
  file.sync();
  std::string back(text.size(), '\0');
  file.read(3, std::as_writable_bytes(std::span(back)));
  EXPECT_EQ(back, text);
  EXPECT_GT(ops.calls, 20);
  EXPECT_EQ(file.size(), text.size() + 3);
}

TEST_F(FileTest, ReadPastTheEndIsTruncatedAndReadSomeStopsThere) {
  make_file(at("x"), "0123456789");
  const File file = File::open(at("x"), File::Mode::kRead);
  std::array<std::byte, 8> out{};
  EXPECT_EQ(file.read_some(6, out), 4U);
  EXPECT_EQ(std::to_integer<char>(out[3]), '9');
  EXPECT_EQ(file.read_some(10, out), 0U);
  EXPECT_EQ(file.read_some(1000, out), 0U);
  EXPECT_THAT(error_of<FormatError>([&] { file.read(6, out); }),
              HasSubstr("truncated: bytes [6, +8) were to be read, the file ends at byte 10"));
  EXPECT_THAT(error_of<FormatError>([&] { file.read(1000, out); }), HasSubstr("the file ends at byte 10"));
  file.read(1000, std::span<std::byte>{});  // nothing asked for, nothing missing
}

TEST_F(FileTest, RangesPastTheLargestOffsetAreErrorsNotWraps) {
  make_file(at("x"), "0123456789");
  const File file = File::open(at("x"), File::Mode::kReadWrite);
  std::array<std::byte, 8> out{};
  for (const std::uint64_t offset : {UINT64_MAX, UINT64_MAX - 3, std::uint64_t{INT64_MAX} - 3}) {
    EXPECT_THROW(file.read(offset, out), IoError);
    EXPECT_THROW(file.write(offset, out), IoError);
  }
  EXPECT_THROW(file.resize(UINT64_MAX), IoError);
  EXPECT_EQ(file.size(), 10U);
}

TEST_F(FileTest, ErrorsNameCallFileRangeAndErrno) {
  Failing ops;
  ops.write_error = ENOSPC;
  ops.room = 5;
  File file = File::open(at("x"), File::Mode::kCreateNew, ops);
  try {
    file.write(100, std::string(8, 'a'));
    FAIL();
  } catch (const IoError& error) {
    EXPECT_EQ(error.error_number(), ENOSPC);
    EXPECT_THAT(error.what(), HasSubstr("pwrite " + at("x").string() + " [105, +3): No space left on device"));
  }
  ops.read_error = EIO;
  std::array<std::byte, 4> out{};
  EXPECT_THAT(error_of<IoError>([&] { file.read(0, out); }), HasSubstr("pread"));
  ops.sync_error = EIO;
  EXPECT_THAT(error_of<IoError>([&] { file.sync(); }), HasSubstr("fdatasync"));
  ops.allocate_error = ENOSPC;
  EXPECT_THAT(
      error_of<IoError>([&] { file.reserve(std::uint64_t{3} << 40); }),
      AllOf(HasSubstr("reserve 3.00 TiB ("), HasSubstr("are free) for " + at("x").string() + ": No space left on device")));
  ops.allocate_error = 0;
  EXPECT_THAT(error_of<IoError>([&] { file.reserve(std::uint64_t{1} << 60); }), HasSubstr("No space left on device"))
      << "known before the disk is filled to find out";
  ops.allocate_error = EOPNOTSUPP;  // a file system that cannot: pages are found when they are written
  file.reserve(20000);
}

TEST_F(FileTest, OpensOnlyRegularFiles) {
  EXPECT_THAT(error_of<IoError>([&] { File::open(folder_, File::Mode::kRead); }), HasSubstr("Is a directory"));
  ASSERT_EQ(::mkfifo(at("fifo").c_str(), 0600), 0);
  EXPECT_THAT(error_of<FormatError>([&] { File::open(at("fifo"), File::Mode::kRead); }), HasSubstr("is a FIFO, not a file"));
  EXPECT_THAT(error_of<FormatError>([] { File::open("/dev/null", File::Mode::kRead); }), HasSubstr("is a character device"));
  EXPECT_THAT(error_of<IoError>([&] { File::open(at("none"), File::Mode::kRead); }), HasSubstr("No such file or directory"));
  EXPECT_THAT(error_of<IoError>([&] { File::open(at("none\xFF\n"), File::Mode::kRead); }), HasSubstr("none\\xff\\x0a"));
  make_file(at("x"), "");
  EXPECT_THAT(error_of<AlreadyExists>([&] { File::open(at("x"), File::Mode::kCreateNew); }), HasSubstr("already exists"));
}

TEST_F(FileTest, DescriptorsBlockAsUsualAndCloseOnExec) {
  make_file(at("x"), "a");
  const File file = File::open(at("x"), File::Mode::kRead);
  EXPECT_EQ(::fcntl(file.fd(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(::fcntl(file.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(FileTest, MovingTransfersTheDescriptor) {
  make_file(at("x"), "a");
  make_file(at("y"), "b");
  File a = File::open(at("x"), File::Mode::kRead);
  const int fd = a.fd();
  File b = std::move(a);
  EXPECT_FALSE(a.is_open());  // NOLINT: what moving leaves is part of the contract
  EXPECT_EQ(b.fd(), fd);
  b = File::open(at("y"), File::Mode::kRead);
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);  // closed at once
  b.close();
  EXPECT_FALSE(b.is_open());
  b.close();
}

TEST_F(FileTest, ResizeAddsZerosAndReserveKeepsTheSize) {
  File file = File::open(at("x"), File::Mode::kCreateNew);
  file.resize(10000);
  std::array<std::byte, 4> out{};
  file.read(9000, out);
  EXPECT_EQ(out, (std::array<std::byte, 4>{}));
  file.reserve(20000);
  EXPECT_EQ(file.size(), 10000U);
}

TEST_F(FileTest, ReadTextHasALimit) {
  make_file(at("x"), std::string(40000, 'a'));
  EXPECT_EQ(read_text(at("x"), 40000), std::string(40000, 'a'));
  EXPECT_THAT(error_of<FormatError>([&] { read_text(at("x"), 39999); }), HasSubstr("more than the 39999 bytes"));
  make_file(at("x"), "");
  EXPECT_EQ(read_text(at("x"), 0), "");
}

TEST_F(TemporaryFileTest, CommitsUnderItsNameAndLeavesNothingElse) {
  {
    TemporaryFile temporary = TemporaryFile::create(at("x"), false);
    temporary.file().write(0, "hello");
    EXPECT_FALSE(std::filesystem::exists(at("x")));
    File file = temporary.commit();
    EXPECT_EQ(file.path(), at("x"));
    EXPECT_EQ(file.size(), 5U);
  }
  EXPECT_THAT(names(), ElementsAre("x"));
  EXPECT_EQ(file_text(at("x")), "hello");
}

TEST_F(TemporaryFileTest, WithoutCommitNothingIsLeft) {
  { TemporaryFile temporary = TemporaryFile::create(at("x"), false); }
  {
    TemporaryFile a = TemporaryFile::create(at("x"), false);
    TemporaryFile b = std::move(a);
    a = TemporaryFile::create(at("y"), false);
    a = std::move(b);
    EXPECT_EQ(names().size(), 1U);
  }
  EXPECT_THAT(names(), IsEmpty());
}

// A process that ends without destructors leaves its file: whoever writes to the same name next removes it.
TEST_F(TemporaryFileTest, WhatAKilledProcessLeftIsRemovedByTheNextOneOfItsName) {
  const std::string longest(251, 'x');
  for (const std::string& name : {std::string("x"), std::string("x.npy"), longest}) {
    const pid_t child = ::fork();
    if (child == 0) {
      TemporaryFile left = TemporaryFile::create(at(name), false);
      left.file().write(0, std::string_view("half"));
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
  }
  ASSERT_EQ(names().size(), 3U);
  {
    TemporaryFile other = TemporaryFile::create(at("y"), false);
    EXPECT_EQ(names().size(), 4U);  // those of other names stay
    TemporaryFile one = TemporaryFile::create(at("x"), false);
    TemporaryFile two = TemporaryFile::create(at("x"), false);  // and those that are being written
    EXPECT_EQ(names().size(), 5U);
    TemporaryFile again = TemporaryFile::create(at("x.npy"), false);
    TemporaryFile cut = TemporaryFile::create(at(longest), false);
    EXPECT_EQ(names().size(), 5U);
    one.commit();
  }
  EXPECT_EQ(names(), std::vector<std::string>{"x"});
}

TEST_F(TemporaryFileTest, ForkedChildLeavesTheFileToItsParent) {
  TemporaryFile temporary = TemporaryFile::create(at("x"), false);
  const pid_t child = ::fork();
  if (child == 0) {
    { TemporaryFile gone = std::move(temporary); }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  temporary.commit();
  EXPECT_THAT(names(), ElementsAre("x"));
}

TEST_F(TemporaryFileTest, ExistingTargetIsKeptUnlessOverwritten) {
  make_file(at("x"), "old");
  EXPECT_THROW(TemporaryFile::create(at("x"), false), AlreadyExists);
  {
    TemporaryFile temporary = TemporaryFile::create(at("x"), true);
    temporary.file().write(0, "new");
    EXPECT_EQ(file_text(at("x")), "old");
  }
  EXPECT_EQ(file_text(at("x")), "old");
  TemporaryFile temporary = TemporaryFile::create(at("x"), true);
  temporary.file().write(0, "new");
  temporary.commit();
  EXPECT_EQ(file_text(at("x")), "new");
  EXPECT_THAT(names(), ElementsAre("x"));
}

TEST_F(TemporaryFileTest, TargetMadeMeanwhileIsNotReplaced) {
  TemporaryFile temporary = TemporaryFile::create(at("x"), false);
  make_file(at("x"), "theirs");
  EXPECT_THAT(error_of<AlreadyExists>([&] { temporary.commit(); }), HasSubstr("made by someone else meanwhile"));
  EXPECT_EQ(file_text(at("x")), "theirs");
  EXPECT_THAT(names(), ElementsAre("x"));
}

TEST_F(TemporaryFileTest, LinksAreResolved) {
  std::filesystem::create_directory(at("d"));
  make_file(at("d/real"), "old");
  std::filesystem::create_symlink("d/real", at("link"));
  std::filesystem::create_symlink("link", at("link2"));
  EXPECT_THROW(TemporaryFile::create(at("link2"), false), AlreadyExists);
  TemporaryFile temporary = TemporaryFile::create(at("link2"), true);
  temporary.file().write(0, "new");
  temporary.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(at("link2")));
  EXPECT_TRUE(std::filesystem::is_symlink(at("link")));
  EXPECT_EQ(file_text(at("d/real")), "new");

  std::filesystem::create_symlink("d/none", at("dangling"));
  EXPECT_THAT(error_of<AlreadyExists>([&] { TemporaryFile::create(at("dangling"), false); }), HasSubstr("does not exist"));
  TemporaryFile::create(at("dangling"), true).commit();
  EXPECT_TRUE(std::filesystem::is_regular_file(at("d/none")));
  std::filesystem::create_symlink("loop", at("loop"));
  EXPECT_THROW(TemporaryFile::create(at("loop"), true), IoError);
}

TEST_F(TemporaryFileTest, HardLinkOfTheTargetKeepsTheOldContent) {
  make_file(at("x"), "old");
  std::filesystem::create_hard_link(at("x"), at("other"));
  replace_file(at("x"), "new");
  EXPECT_EQ(file_text(at("other")), "old");
  EXPECT_EQ(file_text(at("x")), "new");
}

TEST_F(TemporaryFileTest, OnlyFilesAreReplaced) {
  std::filesystem::create_directory(at("d"));
  ASSERT_EQ(::mkfifo(at("fifo").c_str(), 0600), 0);
  EXPECT_THAT(error_of<IoError>([&] { TemporaryFile::create(at("d"), true); }), HasSubstr("Is a directory"));
  EXPECT_THAT(error_of<IoError>([&] { TemporaryFile::create(at("new/"), true); }), HasSubstr("Is a directory"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { TemporaryFile::create(at("fifo"), true); }), HasSubstr("is a FIFO"));
  EXPECT_THAT(error_of<InvalidArgument>([] { TemporaryFile::create("/dev/null", true); }), HasSubstr("is a character device"));
  EXPECT_THROW(TemporaryFile::create("", true), InvalidArgument);
  EXPECT_THAT(error_of<IoError>([&] { TemporaryFile::create(at("none/x"), true); }), HasSubstr("none/x: No such file"));
  EXPECT_EQ(names().size(), 2U);
}

TEST_F(TemporaryFileTest, LongAndOddNamesWork) {
  for (const std::string& name : {std::string(255, 'n'), std::string(250, 'n'), std::string("\xFF\nname with spaces"), [] {
                                    std::string text;
                                    while (text.size() < 253) text += "\xC3\xA4";  // 254 bytes of two-byte letters
                                    return text;
                                  }()}) {
    TemporaryFile temporary = TemporaryFile::create(at(name), false);
    EXPECT_LE(temporary.file().path().filename().native().size(), 255U);
    temporary.commit();
    EXPECT_TRUE(std::filesystem::exists(at(name)));
  }
  EXPECT_THAT(error_of<IoError>([&] { TemporaryFile::create(at(std::string(256, 'n')), false); }),
              HasSubstr("File name too long"));
  EXPECT_THAT(error_of<IoError>([&] { TemporaryFile::create(folder_ / std::string(5000, '/') / "x", false); }),
              HasSubstr("File name too long"));
  EXPECT_EQ(names().size(), 4U);
}

TEST_F(TemporaryFileTest, FailedSyncOrRenameRemovesItAndKeepsTheOld) {
  for (const bool sync : {true, false}) {
    make_file(at("x"), "old");
    Failing ops;
    (sync ? ops.sync_error : ops.rename_error) = EIO;
    TemporaryFile temporary = TemporaryFile::create(at("x"), true, ops);
    temporary.file().write(0, "new");
    EXPECT_THROW(temporary.commit(), IoError);
    EXPECT_THAT(names(), ElementsAre("x"));
    EXPECT_EQ(file_text(at("x")), "old");
  }
}

TEST_F(TemporaryFileTest, FailedSyncOfTheDirectoryIsReported) {
  Failing ops;
  ops.directory_error = EIO;
  EXPECT_THAT(error_of<IoError>([&] { replace_file(at("x"), "new", ops); }), HasSubstr("fsync"));
  ops.directory_error = EINVAL;  // a file system without that call
  replace_file(at("y"), "new", ops);
}

TEST_F(TemporaryFileTest, ModeFollowsTheUmask) {
  const mode_t before = ::umask(027);
  replace_file(at("x"), "a");
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat(at("x").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640U);
}

}  // namespace
}  // namespace embermap
