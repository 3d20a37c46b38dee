#include "store/page_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "io/checksum.hpp"
#include "io/elements.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using ::testing::HasSubstr;

struct Shape {
  std::uint64_t dim, data_offset;
  IoEngine engine;
  bool swap = false;
};

// A table of float32 rows 0, 1, ... of which page p begins as all p (Constant is 7.5).
class PageFileTest : public ::testing::TestWithParam<Shape> {
 protected:
  static constexpr std::uint64_t kRows = 5003;

  void make(const Shape& shape) {
    schema_ = std::make_unique<Schema>(shape.dim, DType::kFloat32, Optimizer{});
    geometry_ = make_geometry(kRows, shape.dim * 4, 4, false, 4096);
    geometry_.data_offset = shape.data_offset;
    File data = File::open(directory_ / "t.npy", File::Mode::kCreateNew);
    data.resize(geometry_.file_bytes());
    PageLedger ledger =
        PageLedger::create(File::open(directory_ / "t.pages", File::Mode::kCreateNew), geometry_.pages(), /*adopted=*/false);
    ledger.keep_checksums();
    file_ = std::make_unique<PageFile>(
        "t", std::move(data), std::move(ledger), *schema_, geometry_, Constant{7.5}, 0, compute_, io_,
        [this] { ++writes_begun_; }, PageFileOptions{.io = {.engine = shape.engine}, .swap = shape.swap});
  }
  std::vector<PageBuffer> buffers(const std::vector<std::uint64_t>& pages) {
    memory_ = AlignedBuffer(pages.size() * geometry_.page_bytes());
    std::memset(memory_.data(), 0xEE, memory_.size());
    std::vector<PageBuffer> out;
    for (std::size_t i = 0; i < pages.size(); ++i) out.push_back({pages[i], memory_.data() + i * geometry_.page_bytes()});
    return out;
  }
  float* floats(const PageBuffer& page) const { return reinterpret_cast<float*>(page.memory); }
  std::uint64_t count(std::uint64_t page) const { return geometry_.bytes_in(page) / 4; }
  void write(const std::vector<std::uint64_t>& pages, float add = 0) {
    auto out = buffers(pages);
    for (const PageBuffer& page : out)
      std::iota(floats(page), floats(page) + count(page.page), static_cast<float>(page.page) + add);
    file_->write(out);
  }
  void expect(const std::vector<std::uint64_t>& pages, const std::vector<bool>& written, float add = 0) {
    auto in = buffers(pages);
    file_->read(in);
    for (const PageBuffer& page : in) {
      for (std::uint64_t i = 0; i < count(page.page); ++i)
        ASSERT_EQ(floats(page)[i], written[page.page] ? static_cast<float>(page.page) + add + static_cast<float>(i) : 7.5F)
            << "page " << page.page << ", element " << i;
      for (std::uint64_t i = geometry_.bytes_in(page.page); i < geometry_.page_bytes(); ++i)
        ASSERT_EQ(page.memory[i], std::byte{0}) << "behind the last row";
    }
  }

  test::TemporaryDirectory directory_;
  ThreadPool compute_{2}, io_{4};
  std::unique_ptr<Schema> schema_;
  Geometry geometry_;
  std::unique_ptr<PageFile> file_;
  AlignedBuffer memory_;
  int writes_begun_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Shapes, PageFileTest,
                         ::testing::Values(Shape{128, 4096, IoEngine::kUring}, Shape{128, 4096, IoEngine::kThreads},
                                           Shape{128, 4096, IoEngine::kCached},
                                           // Pages of 4000 bytes from byte 128 on, and both byte orders.
                                           Shape{100, 128, IoEngine::kUring}, Shape{100, 128, IoEngine::kThreads},
                                           Shape{100, 128, IoEngine::kCached}, Shape{100, 128, IoEngine::kUring, true},
                                           Shape{128, 4096, IoEngine::kUring, true}, Shape{3, 80, IoEngine::kThreads, true},
                                           Shape{2000, 4096, IoEngine::kUring}));

TEST_P(PageFileTest, WrittenPagesAreReadAndOthersGenerated) {
  make(GetParam());
  const std::uint64_t pages = geometry_.pages();
  std::vector<bool> written(pages, false);
  std::vector<std::uint64_t> all(pages), some;
  std::iota(all.begin(), all.end(), 0);
  std::mt19937_64 random(1);
  for (std::uint64_t page = 0; page < pages; ++page)
    if (random() % 3 != 0 || page + 1 == pages) some.push_back(page), written[page] = true;
  std::shuffle(all.begin(), all.end(), random);
  std::shuffle(some.begin(), some.end(), random);
  expect(all, std::vector<bool>(pages, false));
  EXPECT_EQ(writes_begun_, 0);
  write(some, 0.25F);
  EXPECT_EQ(writes_begun_, 1);
  EXPECT_TRUE(file_->ahead());
  expect(all, written, 0.25F);
  EXPECT_EQ(file_->counters().pages_written, some.size());
  EXPECT_EQ(file_->counters().pages_read, some.size());
  EXPECT_EQ(file_->counters().pages_generated, 2 * pages - some.size());
  EXPECT_EQ(file_->counters().bytes_read, file_->counters().bytes_written);
  // An unaligned page may need its two edges first.
  EXPECT_LE(file_->counters().write_requests, 3 * some.size() + file_->counters().bytes_written / (256 << 10));
  EXPECT_GT(file_->counters().write_requests, 0U);
  EXPECT_GT(file_->counters().read_nanoseconds, 0U);
  file_->sync();
  EXPECT_FALSE(file_->ahead());
  // Once more over what is there.
  write(some, 3);
  expect(all, written, 3);
}

TEST_P(PageFileTest, TheFileHasTheByteOrderThatWasSaid) {
  const Shape shape = GetParam();
  make(shape);
  const std::vector<std::uint64_t> pages{0, geometry_.pages() - 1};
  write(pages);
  std::vector<bool> written(geometry_.pages(), false);
  written[0] = written.back() = true;
  expect(pages, written);
  for (const std::uint64_t page : pages) {
    std::vector<std::byte> bytes(geometry_.bytes_in(page));
    file_->data().read(geometry_.offset_of(page), bytes);
    EXPECT_EQ(file_->ledger().checksum(page), page_checksum(bytes)) << "the checksum is that of the file's bytes";
    if (shape.swap) swap_elements(bytes.data(), bytes.data(), bytes.size() / 4, 4);
    float second = 0;
    std::memcpy(&second, bytes.data() + 4, 4);
    EXPECT_EQ(second, static_cast<float>(page) + 1);
  }
}

TEST_P(PageFileTest, DamageIsFoundWhereItIs) {
  make(GetParam());
  std::vector<std::uint64_t> pages(geometry_.pages());
  std::iota(pages.begin(), pages.end(), 0);
  write(pages);
  const std::uint64_t bad = geometry_.pages() / 2;
  const std::byte wrong{0x5A};
  file_->data().write(geometry_.offset_of(bad) + 5, {&wrong, 1});
  auto in = buffers(pages);
  try {
    file_->read(in);
    ADD_FAILURE() << "no error";
  } catch (const CorruptError& error) {
    EXPECT_THAT(error.what(), HasSubstr(file_->describe(bad) + " does not match its checksum"));
  }
  // Sealed, it is what it is.
  file_->seal(pages);
  in = buffers(pages);
  file_->read(in);
  EXPECT_EQ(in[bad].memory[GetParam().swap ? 6 : 5], wrong);
}

TEST_F(PageFileTest, PagesThatCannotBeReadAreSealedAsUnknown) {
  make({128, 4096, IoEngine::kThreads});
  const std::uint64_t pages = geometry_.pages();
  std::vector<std::uint64_t> all(pages);
  std::iota(all.begin(), all.end(), 0);
  write(all);
  file_->data().resize(geometry_.offset_of(pages - 10));
  file_->seal(all);
  for (std::uint64_t page = 0; page < pages; ++page)
    EXPECT_EQ(file_->ledger().checksum(page).has_value(), page < pages - 10) << page;
}

TEST_F(PageFileTest, StoredPagesAreReadAsTheyAre) {
  make({100, 128, IoEngine::kUring, /*swap=*/true});
  write({3, 1, 2});
  auto in = buffers({2, 9, 1});
  std::atomic<int> calls{0};
  file_->read_stored(in, [&](const PageBuffer& page) {
    ++calls;
    const std::uint32_t sum = page_checksum({page.memory, static_cast<std::size_t>(geometry_.bytes_in(page.page))});
    EXPECT_TRUE(page.page == 9 || file_->ledger().checksum(page.page) == sum);
  });
  EXPECT_EQ(calls, 3);
}

TEST_F(PageFileTest, PagesLargerThanARequest) {
  for (const bool swap : {false, true}) {
    make({700001, 128, IoEngine::kUring, swap});  // 2.8 MB each, in a sparse file
    write({0, 1, kRows - 1}, 0.5F);
    std::vector<bool> written(kRows, false);
    written[0] = written[1] = written[kRows - 1] = true;
    expect({kRows - 1, 2, 0, 1}, written, 0.5F);
    file_.reset();
    std::filesystem::remove(directory_ / "t.npy");
    std::filesystem::remove(directory_ / "t.pages");
  }
}

TEST_F(PageFileTest, TheReportSaysHowItIsDoneAndAClosedFileDoesNothing) {
  make({128, 4096, IoEngine::kThreads});
  EXPECT_EQ(file_->io_report().engine, IoEngine::kThreads);
  file_->register_frames({});
  file_->forget_frames();
  file_->close();
  auto in = buffers({0});
  EXPECT_THROW(file_->read(in), ClosedError);
  file_->forget_frames();
}

TEST_F(PageFileTest, StructuredRecordsCannotBeSwapped) {
  const Schema structured(8, DType::kFloat32, Optimizer{Adagrad{}});
  File data = File::open(directory_ / "t.npy", File::Mode::kCreateNew);
  PageLedger ledger = PageLedger::create(File::open(directory_ / "t.pages", File::Mode::kCreateNew), 1, false);
  EXPECT_THROW(
      PageFile("t", std::move(data), std::move(ledger), structured, Geometry{}, Zeros{}, 0, compute_, io_, [] {}, {.swap = true}),
      InvalidArgument);
}

}  // namespace
}  // namespace embermap
