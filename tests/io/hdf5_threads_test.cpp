// No two threads of ours may be inside the library at once, whether it was built thread-safe or not. The linker puts the
// functions below in front of the library's (--wrap, in tests/CMakeLists.txt): they watch.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "io/describe_hdf5.hpp"
#include "io/hdf5.hpp"
#include "io/rows.hpp"
#include "tests/io/test_folder.hpp"

namespace {

std::atomic<int> inside{0};
std::atomic<int> calls{0};
std::atomic<int> overlaps{0};
thread_local int depth = 0;  // the library calls itself, and our callbacks call it

class Inside {
 public:
  Inside() {
    if (depth++ > 0) return;
    ++calls;
    if (inside.fetch_add(1) > 0) ++overlaps;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  ~Inside() {
    if (--depth == 0) --inside;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp): the linker's names.
extern "C" {
// NOLINTBEGIN(bugprone-macro-parentheses): types and lists of parameters.
#define WATCH(result, name, parameters, arguments) \
  result __real_##name parameters;                 \
  result __wrap_##name parameters {                \
    const Inside watched;                          \
    return __real_##name arguments;                \
  }
// NOLINTEND(bugprone-macro-parentheses)
WATCH(herr_t, H5open, (), ())  // what H5T_IEEE_F32LE, H5P_FILE_ACCESS and their like stand for begins with it
WATCH(hid_t, H5Tcopy, (hid_t a), (a))
WATCH(herr_t, H5Tset_fields, (hid_t a, size_t b, size_t c, size_t d, size_t e, size_t f), (a, b, c, d, e, f))
WATCH(herr_t, H5Tclose, (hid_t a), (a))
WATCH(size_t, H5Tget_size, (hid_t a), (a))
WATCH(hid_t, H5Pcreate, (hid_t a), (a))
WATCH(herr_t, H5Pclose, (hid_t a), (a))
WATCH(hid_t, H5Screate_simple, (int a, const hsize_t* b, const hsize_t* c), (a, b, c))
WATCH(herr_t, H5Sclose, (hid_t a), (a))
WATCH(hid_t, H5Fcreate, (const char* a, unsigned b, hid_t c, hid_t d), (a, b, c, d))
WATCH(hid_t, H5Fopen, (const char* a, unsigned b, hid_t c), (a, b, c))
WATCH(herr_t, H5Fflush, (hid_t a, H5F_scope_t b), (a, b))
WATCH(herr_t, H5Fclose, (hid_t a), (a))
WATCH(hid_t, H5Dopen2, (hid_t a, const char* b, hid_t c), (a, b, c))
WATCH(herr_t, H5Dread, (hid_t a, hid_t b, hid_t c, hid_t d, hid_t e, void* f), (a, b, c, d, e, f))
WATCH(herr_t, H5Dwrite, (hid_t a, hid_t b, hid_t c, hid_t d, hid_t e, const void* f), (a, b, c, d, e, f))
WATCH(herr_t, H5Dread_chunk, (hid_t a, hid_t b, const hsize_t* c, uint32_t* d, void* e), (a, b, c, d, e))
WATCH(herr_t, H5Dwrite_chunk, (hid_t a, hid_t b, uint32_t c, const hsize_t* d, size_t e, const void* f), (a, b, c, d, e, f))
WATCH(herr_t, H5Dget_chunk_storage_size, (hid_t a, const hsize_t* b, hsize_t* c), (a, b, c))
WATCH(haddr_t, H5Dget_offset, (hid_t a), (a))
WATCH(herr_t, H5Dclose, (hid_t a), (a))
WATCH(int, H5Pget_nfilters, (hid_t a), (a))
WATCH(herr_t, H5Eget_auto2, (hid_t a, H5E_auto2_t* b, void** c), (a, b, c))
WATCH(herr_t, H5Eset_auto2, (hid_t a, H5E_auto2_t b, void* c), (a, b, c))
WATCH(herr_t, H5Ewalk2, (hid_t a, H5E_direction_t b, H5E_walk2_t c, void* d), (a, b, c, d))
#undef WATCH
}
// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)

namespace embermap {
namespace {

class Hdf5ThreadsTest : public testing::FolderTest {
 protected:
  // Calls body(t) on four threads at once.
  template <class Body>
  static void run(const Body& body) {
    std::atomic<int> waiting{4};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        --waiting;
        while (waiting.load() > 0) std::this_thread::yield();
        body(t);
      });
    for (std::thread& thread : threads) thread.join();
  }

  Location file(int thread, std::string_view selector = "") const {
    constexpr std::array kNames{"0.h5", "1.h5", "2.h5", "3.h5"};
    return parse_location(at(kNames.at(static_cast<std::size_t>(thread))).string() + std::string(selector));
  }
};

TEST_F(Hdf5ThreadsTest, NoTwoThreadsAreInsideTheLibraryAtOnce) {
  calls = 0;
  overlaps = 0;
  std::array<std::vector<float>, 4> back;
  run([&](int t) {
    std::vector<float> rows(60);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(100 * t) + static_cast<float>(i);
    const auto* const bytes = reinterpret_cast<const std::byte*>(rows.data());
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const auto writer = create_rows(file(t), 0, 3, dtype, {.overwrite = true});
      writer->finish();
    }
    const auto writer = create_rows(file(t, ":/g/v"), 20, 3, DType::kFloat32, {.gzip = 4});
    writer->write(20, bytes);
    writer->finish();
    EXPECT_THROW(create_rows(file(t, ":/g/v"), 20, 3, DType::kFloat32), AlreadyExists);
    EXPECT_THROW(open_rows(file(t, ":/g/w")), NotFound);
    EXPECT_EQ(describe_hdf5(file(t).file).datasets.size(), 2U);
    const auto reader = open_rows(file(t, ":/g/v"));
    EXPECT_FALSE(reader->description().empty());
    back[static_cast<std::size_t>(t)].resize(60);
    reader->read(0, 20, reinterpret_cast<std::byte*>(back[static_cast<std::size_t>(t)].data()));
  });
  for (std::size_t t = 0; t < 4; ++t) EXPECT_EQ(back[t].at(59), static_cast<float>(100 * t + 59));
  EXPECT_GT(calls.load(), 400);
  EXPECT_EQ(overlaps.load(), 0);
}

// The block that is read and the block that is written are both in HDF5 files, and several threads pack and unpack chunks.
TEST_F(Hdf5ThreadsTest, CopyingBetweenFilesTakesTurns) {
  constexpr std::uint64_t kRows = 3'000'000, kDim = 2;
  std::vector<float> rows(kRows * kDim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  const auto writer = create_rows(file(0), kRows, kDim, DType::kFloat32, {.gzip = 1});
  writer->write(kRows, reinterpret_cast<const std::byte*>(rows.data()));
  writer->finish();
  overlaps = 0;
  {
    const auto reader = open_rows(file(0));
    const auto copy = create_rows(file(1), kRows, kDim, DType::kFloat32, {.gzip = 1});
    std::uint64_t blocks = 0;
    copy_rows(*reader, *copy, DType::kFloat32, 8ULL << 20, [&](std::uint64_t, std::uint64_t) { ++blocks; });
    copy->finish();
    EXPECT_GT(blocks, 1U);
  }
  std::vector<float> back(rows.size());
  open_rows(file(1))->read(0, kRows, reinterpret_cast<std::byte*>(back.data()));
  EXPECT_TRUE(back == rows);
  EXPECT_EQ(overlaps.load(), 0);
}

}  // namespace
}  // namespace embermap
