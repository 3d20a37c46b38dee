#include "io/mapped_file.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <numeric>

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;

constexpr std::uint64_t kPage = 4096;

class MappedFileTest : public testing::FolderTest {
 protected:
  File make(std::string_view name, std::uint64_t bytes) {
    std::string text(bytes, '\0');
    std::iota(text.begin(), text.end(), '\1');
    make_file(at(name), text);
    return File::open(at(name), File::Mode::kReadWrite);
  }
  static int byte_at(const MappedFile& file, std::uint64_t at) {
    return static_cast<unsigned char>(*reinterpret_cast<const volatile char*>(file.data() + at));
  }
  ThreadPool pool_{3};
};

TEST_F(MappedFileTest, ShowsTheFileAsItIs) {
  const File file = make("f", 3 * kPage + 5);
  MappedFile mapping(file, 2 * kPage + 7);
  EXPECT_EQ(mapping.bytes(), 2 * kPage + 7);
  mapping.populate(pool_);
  EXPECT_EQ(std::memcmp(mapping.data(), file_text(at("f")).data(), mapping.bytes()), 0);
  file.write(kPage, "now");
  EXPECT_EQ(byte_at(mapping, kPage), 'n');
  EXPECT_NO_THROW(mapping.check(file));
  MappedFile moved(std::move(mapping));
  EXPECT_EQ(mapping.data(), nullptr);  // NOLINT: what a moved-from mapping says is promised
  mapping = std::move(moved);
  EXPECT_EQ(byte_at(mapping, kPage + 2), 'w');
  EXPECT_FALSE(mapping.failed());
}

TEST_F(MappedFileTest, WhatWillBeNeededIsReadAheadAndNothingChanges) {
  const std::uint64_t bytes = 300 * kPage + 5;
  const File file = make("f", bytes);
  const MappedFile mapping(file, bytes);
  const std::string text = file_text(at("f"));
  for (const std::uint64_t begin : {std::uint64_t{0}, kPage - 1, 200 * kPage, bytes - 1})
    for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, 100 * kPage, bytes, 1000 * kPage})
      mapping.will_need(begin, length);
  EXPECT_EQ(std::memcmp(mapping.data(), text.data(), bytes), 0);
  file.resize(kPage);
  mapping.will_need(0, bytes);
  EXPECT_FALSE(mapping.failed());
}

TEST_F(MappedFileTest, RefusesAFileThatIsTooShort) {
  const File file = make("f", kPage);
  EXPECT_THAT(error_of<FormatError>([&] { MappedFile(file, kPage + 1); }),
              HasSubstr("truncated: the file has 4096 bytes, 4097 are mapped"));
  EXPECT_THROW(MappedFile(file, 0), InvalidArgument);
}

TEST_F(MappedFileTest, AFileThatIsCutIsAnErrorAndNoSignal) {
  const File file = make("f", 8 * kPage);
  const MappedFile mapping(file, 8 * kPage);
  EXPECT_NE(byte_at(mapping, 7 * kPage), 0);
  file.resize(2 * kPage);
  EXPECT_THAT(error_of<FormatError>([&] { mapping.check(file); }), HasSubstr("truncated")) << "also if nobody reads";
  EXPECT_FALSE(mapping.failed());
  EXPECT_EQ(byte_at(mapping, 5 * kPage), 0);
  EXPECT_TRUE(mapping.failed());
  EXPECT_EQ(byte_at(mapping, 0), 0) << "nothing of it counts any more";
  EXPECT_THROW(mapping.check(file), FormatError);
  file.resize(8 * kPage);
  EXPECT_THAT(error_of<IoError>([&] { mapping.check(file); }), HasSubstr("read of the mapping")) << "what was read is gone";
  mapping.populate(pool_);
  const MappedFile again(file, 8 * kPage);
  EXPECT_EQ(byte_at(again, 1), 2);
  EXPECT_NO_THROW(again.check(file));
}

TEST_F(MappedFileTest, ThreadsThatReadWhileAFileIsCutAllGoOn) {
  const std::uint64_t pages = 2000;
  for (int round = 0; round < 3; ++round) {
    const File file = make("f", pages * kPage);
    const MappedFile mapping(file, pages * kPage);
    const File other = make("g", kPage);
    const MappedFile untouched(other, kPage);
    std::atomic<std::uint64_t> sum{0};
    pool_.parallel_for(pages, 1, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t page = begin; page < end; ++page) {
        if (page == pages / 4) file.resize(kPage);
        sum += static_cast<std::uint64_t>(byte_at(mapping, page * kPage));
      }
    });
    EXPECT_TRUE(mapping.failed());
    EXPECT_THROW(mapping.check(file), FormatError);
    EXPECT_NO_THROW(untouched.check(other));
    EXPECT_EQ(byte_at(untouched, 0), 1);
  }
}

struct sigaction before_later {};  // what had the signal before one that came after us

// A process that has just begun, and leaves no files.
class MappedFileSignal : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
  static MappedFile some_mapping() { return MappedFile(File::open("/proc/self/exe", File::Mode::kRead), 1); }
  static MappedFile mapping_of(int file) {
    return MappedFile(File::open("/proc/self/fd/" + std::to_string(file), File::Mode::kRead), kPage);
  }
  static MappedFile mapping_and_handler(int file) {
    MappedFile mapping = mapping_of(file);
    std::signal(SIGBUS, [](int) { _exit(7); });
    return mapping;
  }
  static void later(void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction action {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO;
    (void)sigaction(SIGBUS, &action, &before_later);
  }
  // Loads what is behind the end of a file that somebody else has mapped.
  static void load_of_others() {
    const int file = memfd_create("others", 0);
    const void* const mapping = mmap(nullptr, kPage, PROT_READ, MAP_SHARED, file, 0);
    (void)*static_cast<const volatile char*>(mapping);
  }
};

TEST_F(MappedFileSignal, OfOthersEndsTheProcessAsBefore) {
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_DFL);  // a sanitizer's would come first
        const MappedFile mapping = some_mapping();
        load_of_others();
      },
      ::testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_DFL);
        const MappedFile mapping = some_mapping();
        (void)raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(MappedFileSignal, OfOthersGoesToWhoHadItBefore) {
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, [](int) { _exit(7); });
        const MappedFile mapping = some_mapping();
        load_of_others();
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(
      {
        struct sigaction action {};
        action.sa_sigaction = [](int, siginfo_t* info, void*) { _exit(info->si_addr != nullptr ? 8 : 9); };
        action.sa_flags = SA_SIGINFO;
        (void)sigaction(SIGBUS, &action, nullptr);
        (void)some_mapping();  // what was a mapping of ours is none any more
        load_of_others();
      },
      ::testing::ExitedWithCode(8), "");
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_IGN);
        const MappedFile mapping = some_mapping();
        (void)raise(SIGBUS);
        _exit(6);
      },
      ::testing::ExitedWithCode(6), "");
}

TEST_F(MappedFileSignal, IsTakenAgainFromWhoCameLater) {
  for (const bool guarded : {true, false})
    EXPECT_EXIT(
        {
          const MappedFile first = some_mapping();
          std::signal(SIGBUS, [](int) { _exit(7); });
          const int cut = memfd_create("cut", 0);
          (void)ftruncate(cut, kPage);
          const MappedFile mapping = guarded ? mapping_and_handler(cut) : mapping_of(cut);
          if (guarded) mapping.guard();
          (void)ftruncate(cut, 0);
          (void)*reinterpret_cast<const volatile char*>(mapping.data());
          if (!mapping.failed()) _exit(1);
          load_of_others();  // goes to them
          _exit(2);
        },
        ::testing::ExitedWithCode(7), "")
        << guarded;
}

TEST_F(MappedFileSignal, EndsTheProcessWhereLaterOnesKnowUsAsTheOneBefore) {
  // One that makes who had the signal before the handler again, and sends it anew, as Python's faulthandler.
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_DFL);
        const MappedFile first = some_mapping();
        later([](int number, siginfo_t*, void*) {
          (void)sigaction(number, &before_later, nullptr);
          (void)raise(number);
        });
        const MappedFile again = some_mapping();
        alarm(60);
        load_of_others();
      },
      ::testing::KilledBySignal(SIGBUS), "");
  // One that calls who had it before.
  EXPECT_EXIT(
      {
        std::signal(SIGBUS, SIG_DFL);
        const MappedFile first = some_mapping();
        later([](int number, siginfo_t* info, void* context) { before_later.sa_sigaction(number, info, context); });
        const MappedFile again = some_mapping();
        alarm(60);
        load_of_others();
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace embermap
