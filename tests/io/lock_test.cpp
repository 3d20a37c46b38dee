#include "io/lock.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;
using ::testing::StartsWith;

class WriterLockTest : public testing::FolderTest {
 protected:
  WriterLock acquire() { return WriterLock::acquire(at("LOCK"), folder_); }
  bool can_acquire() {
    try {
      acquire();
      return true;
    } catch (const LockedError&) {
      return false;
    }
  }
  // Runs `body` in a child; its exit code.
  template <class Body>
  int in_child(Body body) {
    const pid_t child = ::fork();
    if (child == 0) {
      int code = 99;
      try {
        code = body();
      } catch (...) {
      }
      ::_exit(code);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

TEST_F(WriterLockTest, SecondLockOfTheSameProcessIsRefusedByName) {
  const WriterLock lock = acquire();
  EXPECT_TRUE(lock.held());
  EXPECT_THAT(error_of<LockedError>([&] { acquire(); }),
              AllOf(HasSubstr("store " + folder_.string() + " is open for writing in this process"),
                    HasSubstr(std::to_string(::getpid()))));
  EXPECT_THAT(file_text(at("LOCK")), StartsWith(std::to_string(::getpid()) + " "));
}

TEST_F(WriterLockTest, AnotherProcessIsRefusedWithPidAndHost) {
  const WriterLock lock = acquire();
  const std::string expected = "process " + std::to_string(::getpid()) + " on host ";
  EXPECT_EQ(in_child([&] {
              try {
                acquire();
                return 1;
              } catch (const LockedError& error) {
                return std::string_view(error.what()).find(expected) != std::string_view::npos ? 0 : 2;
              }
            }),
            0);
}

TEST_F(WriterLockTest, ReleaseLetsTheNextIn) {
  {
    WriterLock a = acquire();
    WriterLock b = std::move(a);
    EXPECT_FALSE(a.held());  // NOLINT: what moving leaves is part of the contract
    EXPECT_FALSE(can_acquire());
    b.release();
    EXPECT_EQ(file_text(at("LOCK")), "");
    b.release();
  }
  EXPECT_TRUE(can_acquire());
  EXPECT_TRUE(can_acquire());
}

TEST_F(WriterLockTest, ReleaseDoesNotWaitForACopyOfTheDescriptor) {
  WriterLock lock = acquire();
  int copy = -1;  // as a program between vfork and exec has one
  for (int fd = 3; fd < 200 && copy < 0; ++fd) {
    std::error_code none;
    if (std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), none) == std::filesystem::canonical(at("LOCK")))
      copy = ::dup(fd);
  }
  ASSERT_GE(copy, 0);
  lock.release();
  EXPECT_TRUE(can_acquire());
  ::close(copy);
}

TEST_F(WriterLockTest, KilledHolderLetsTheNextInAtOnceEvenIfItsChildrenLive) {
  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const WriterLock lock = acquire();
    if (::fork() == 0) {  // inherits nothing of the lock, once it has begun to run: so it says who it is, not its parent
      const pid_t worker = ::getpid();
      if (::write(ready[1], &worker, sizeof worker) != sizeof worker) ::_exit(1);
      ::pause();
      ::_exit(0);
    }
    ::pause();
    ::_exit(0);
  }
  pid_t worker = 0;
  ASSERT_EQ(::read(ready[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  EXPECT_FALSE(can_acquire());
  ::kill(holder, SIGKILL);
  ::waitpid(holder, nullptr, 0);
  EXPECT_TRUE(can_acquire());
  ::kill(worker, SIGKILL);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(WriterLockTest, ForkedChildNeitherHoldsNorReleasesItsParentsLock) {
  WriterLock lock = acquire();
  EXPECT_EQ(in_child([&] {
              if (lock.held()) return 1;
              lock.release();
              lock.forget();
              WriterLock moved = std::move(lock);
              return 0;
            }),
            0);
  EXPECT_TRUE(lock.held());
  EXPECT_FALSE(can_acquire());
  EXPECT_THAT(file_text(at("LOCK")), HasSubstr(std::to_string(::getpid())));
}

TEST_F(WriterLockTest, HolderWithoutANameIsAnotherProcess) {
  const WriterLock lock = acquire();
  make_file(at("LOCK"), "rubbish\n");
  EXPECT_THAT(error_of<LockedError>([&] { acquire(); }), HasSubstr("open for writing in another process"));
}

TEST_F(WriterLockTest, AskingWhoHasItTakesNothing) {
  EXPECT_EQ(WriterLock::is_taken(at("LOCK")), false);
  EXPECT_FALSE(std::filesystem::exists(at("LOCK")));
  {
    const WriterLock lock = acquire();
    const std::string text = file_text(at("LOCK"));
    EXPECT_EQ(WriterLock::is_taken(at("LOCK")), true);
    EXPECT_EQ(in_child([&] { return WriterLock::is_taken(at("LOCK")) == true ? 0 : 1; }), 0);
    EXPECT_EQ(file_text(at("LOCK")), text);
    EXPECT_FALSE(can_acquire());  // asking has not released it
  }
  make_file(at("LOCK"), "of one that died");
  EXPECT_EQ(WriterLock::is_taken(at("LOCK")), false);
  EXPECT_EQ(file_text(at("LOCK")), "of one that died");
  std::filesystem::create_symlink(at("LOCK"), at("link"));
  EXPECT_EQ(WriterLock::is_taken(at("link")), std::nullopt);
}

TEST_F(WriterLockTest, OddLockFilesAreErrors) {
  EXPECT_THROW(WriterLock::acquire(at("none/LOCK"), folder_), IoError);
  std::filesystem::create_directory(at("d"));
  EXPECT_THROW(WriterLock::acquire(at("d"), folder_), IoError);
  ASSERT_EQ(::mkfifo(at("fifo").c_str(), 0600), 0);
  EXPECT_THROW(WriterLock::acquire(at("fifo"), folder_), FormatError);
}

TEST_F(WriterLockTest, DescriptorsAreNotLeakedByRefusedAttempts) {
  const WriterLock lock = acquire();
  const int before = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(before);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(can_acquire());
  const int after = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(after);
  EXPECT_EQ(before, after);
}

TEST_F(WriterLockTest, FolderLockWaitsForTheOtherOfItsFolder) {
  std::atomic<bool> released{false};
  std::thread other;
  {
    const FolderLock lock(at("x"));
    EXPECT_TRUE(lock.held());
    EXPECT_TRUE(FolderLock(folder_).held());  // of the folder above: another one
    other = std::thread([&] {
      const FolderLock second(at("y"));
      EXPECT_TRUE(second.held());
      EXPECT_TRUE(released.load());
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    released = true;
  }
  other.join();
  EXPECT_FALSE(FolderLock(at("none/x")).held());
}

}  // namespace
}  // namespace embermap
