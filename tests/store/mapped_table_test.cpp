// Readers that gather from the tables' files (Pin::kMapping).
#include "store/mapped_table.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "io/npy.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::message_of;
using test::range;
using test::read_all;
using test::scatter;
using test::update;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::byte> gather_bytes(Table table, const std::vector<std::int64_t>& ids, std::string_view field = "weight") {
  std::vector<std::byte> out(ids.size() * table.schema().field(field).bytes);
  table.gather(ids, out, field);
  return out;
}

class MappedTableTest : public test::StoreTest {
 protected:
  Store reader(Pin pin = Pin::kMapping, std::uint64_t memory = 20'000) {
    return Store::open(path(), {.mode = StoreOptions::Mode::kRead, .memory = memory, .pin = pin, .threads = 3});
  }
  // rows x 16 of float32, element i = i + add, committed.
  static std::vector<float> numbers(std::uint64_t rows, float add = 0) {
    std::vector<float> out(rows * 16);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(i % 100'000) + add;
    return out;
  }
  Table make(Store& store, std::uint64_t rows, std::string_view name = "t") {
    Table table = store.create(name, {.rows = rows, .dim = 16});
    table.write(0, rows, std::as_bytes(std::span(static_cast<const std::vector<float>&>(numbers(rows)))));
    store.commit();
    return table;
  }
  std::filesystem::path make_npy(std::uint64_t rows, std::uint64_t dim, std::uint64_t offset, const std::string& descr = "<f4") {
    std::vector<float> data(rows * dim);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
    std::string text = format_npy_header(descr, {}, 0, {rows, dim}, offset);
    text.append(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(float));
    test::write_text(directory_ / "a.npy", text);
    return directory_ / "a.npy";
  }
};

TEST_F(MappedTableTest, RowsAreThoseOfAnOrdinaryReaderAndTakeNoMemory) {
  struct Shape {
    std::uint64_t dim;
    DType dtype;
    Optimizer optimizer;
  };
  const std::vector<Shape> shapes{{1, DType::kUInt8, {}},
                                  {3, DType::kFloat16, {}},
                                  {17, DType::kFloat32, Adagrad{}},
                                  {33, DType::kBFloat16, Adagrad{}},
                                  {128, DType::kFloat64, Sgd{.momentum = 0.5}},
                                  {1100, DType::kInt32, {}},
                                  {2, DType::kInt64, {}}};
  constexpr std::uint64_t kRows = 2003;
  std::mt19937_64 random(1);
  {
    Store store = open();
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      Table table = store.create(std::to_string(i), {.rows = kRows,
                                                     .dim = shapes[i].dim,
                                                     .dtype = shapes[i].dtype,
                                                     .optimizer = shapes[i].optimizer,
                                                     .page_bytes = i % 2 == 0 ? 4096U : 16384U});
      for (const Field& field : table.schema().fields()) {
        std::vector<std::byte> rows(kRows * field.bytes);
        for (std::byte& byte : rows) byte = static_cast<std::byte>(random() % 60);  // no NaN
        table.write(0, kRows, rows, field.name);
      }
    }
    store.close();
  }
  std::vector<std::int64_t> ids{0, kRows - 1, 0, 5};
  for (int i = 0; i < 3000; ++i) ids.push_back(static_cast<std::int64_t>(random() % kRows));
  Store plain = reader(Pin::kFrames, 1 << 20);
  Store mapped = reader(Pin::kMapping, 1 << 20);
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Table table = mapped.table(std::to_string(i));
    for (const Field& field : table.schema().fields()) {
      EXPECT_EQ(gather_bytes(table, ids, field.name), gather_bytes(plain.table(table.name()), ids, field.name))
          << i << field.name;
      EXPECT_EQ(gather_bytes(table, {}, field.name), std::vector<std::byte>{});
    }
    const TableStats stats = table.stats();
    EXPECT_EQ(stats.frames, 0U);
    EXPECT_EQ(stats.mapped_bytes, std::filesystem::file_size(table.file()));
    EXPECT_EQ(stats.rows_mapped, stats.rows_gathered);
    EXPECT_EQ(stats.rows_mapped, ids.size() * table.schema().fields().size());
    EXPECT_LT(stats.memory_bytes, 1000U);
    EXPECT_FALSE(stats.mapping_registered);
    EXPECT_THROW(gather_bytes(table, {static_cast<std::int64_t>(kRows)}), RowIdError);
  }
  EXPECT_EQ(plain.table("0").stats().rows_mapped, 0U);
}

TEST_F(MappedTableTest, NeedsAStoreThatIsReadOnly) {
  open().close();
  for (const auto mode : {StoreOptions::Mode::kOpenOrCreate, StoreOptions::Mode::kReadWrite})
    EXPECT_THAT(message_of<InvalidArgument>([&] { Store::open(path(), {.mode = mode, .pin = Pin::kMapping}); }),
                HasSubstr("pin 'mapping' is for a store that is open read-only"));
  EXPECT_EQ(parse_pin("mapping"), Pin::kMapping);
  EXPECT_EQ(parse_pin(pin_name(Pin::kFrames)), Pin::kFrames);
  EXPECT_THAT(message_of<InvalidArgument>([] { parse_pin("slab"); }), HasSubstr("no pin 'slab'; there are frames and mapping"));
}

TEST_F(MappedTableTest, ATableWithPagesThatWereNeverWrittenIsRefused) {
  {
    Store store = open();
    Table table = store.create("t", {.rows = 1000, .dim = 16, .init = Constant{2}});
    scatter(table, range(0, 64), std::vector<float>(64 * 16, 1));  // one page
    make(store, 100, "whole");
    store.close();
  }
  {
    Store store = reader();
    const std::string error = message_of<InvalidArgument>([&] { gather(store.table("t"), {0}); });
    EXPECT_THAT(error, HasSubstr("table 't'"));
    EXPECT_THAT(error, HasSubstr("15 of 16 pages were never written"));
    EXPECT_THAT(error, HasSubstr("'embermap materialize " + (path() / "t").string() + "'"));
    EXPECT_EQ(gather(store.table("whole"), {99})[0], 99 * 16.0F) << "the others are not concerned";
    EXPECT_EQ(read_all(store.table("t"))[999 * 16], 2.0F) << "scans are as ever";
  }
  {
    Store store = open();
    store.table("t").materialize();
    store.close();
  }
  Store store = reader();
  EXPECT_EQ(gather(store.table("t"), {0})[0], 1.0F);
  EXPECT_EQ(gather(store.table("t"), {999})[15], 2.0F);
}

TEST_F(MappedTableTest, AdoptedFilesAtAnyOffset) {
  for (const std::uint64_t offset : {0U, 81U, 1000U, 4096U, 5001U}) {
    const auto file = make_npy(777, 5, offset);
    {
      Store store = open();
      store.adopt("t", file);
      store.close();
    }
    {
      Store store = reader();
      const auto rows = gather(store.table("t"), range(0, 777));
      for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows[i], static_cast<float>(i)) << offset;
      EXPECT_EQ(store.table("t").stats().frames, 0U);
    }
    Store store = open();
    store.remove("t");
    store.close();
  }
}

TEST_F(MappedTableTest, TheOtherByteOrderIsRefused) {
  Store store = open();
  store.adopt("t", make_npy(10, 2, 0, ">f4"));
  store.close();
  EXPECT_THAT(message_of<InvalidArgument>([&] { gather(reader().table("t"), {0}); }), HasSubstr("byte order"));
}

TEST_F(MappedTableTest, PagesThatOnlyTheLogHasGoThroughFrames) {
  Store store = open();
  Table table = make(store, 5000);
  Store first = reader();
  EXPECT_EQ(gather(first.table("t"), {4999})[0], 79'984.0F) << "first writes are in place before they are applied";
  EXPECT_EQ(first.table("t").stats().frames, 0U);
  store.checkpoint();
  scatter(table, {4999}, std::vector<float>(16, 7));
  store.commit();

  Store later = reader();
  Table seen = later.table("t");
  EXPECT_EQ(gather(seen, {0, 3})[0], 0.0F);
  EXPECT_EQ(seen.stats().rows_mapped, 2U);
  EXPECT_THAT(gather(seen, {4999}), Each(7.0F));
  EXPECT_EQ(gather(seen, {4998, 0})[0], 79'968.0F) << "a neighbour on the same page";
  EXPECT_EQ(seen.stats().rows_mapped, 2U);
  EXPECT_NE(seen.stats().frames, 0U);
  // Its own commit is applied meanwhile: a mapping may have the pages from before.
  store.checkpoint();
  EXPECT_THAT(gather(seen, {4999}), Each(7.0F));
  EXPECT_EQ(gather(seen, {0, 3})[0], 0.0F);
  EXPECT_EQ(seen.stats().rows_mapped, 4U);
  later.refresh();
  EXPECT_THAT(gather(seen, {4999}), Each(7.0F));
  EXPECT_EQ(seen.stats().rows_mapped, 5U);
}

TEST_F(MappedTableTest, RowsOfALaterCommitAreStaleUntilTheReaderGoesOn) {
  Store store = open();
  Table table = make(store, 5000);
  store.checkpoint();
  Store reading = reader();
  Table seen = reading.table("t");
  EXPECT_EQ(gather(seen, {2500})[1], 40'001.0F);
  scatter(table, {2500}, std::vector<float>(16, 5));
  store.commit();
  EXPECT_EQ(gather(seen, {2500})[1], 40'001.0F) << "a later commit is in the log";
  store.checkpoint();
  EXPECT_THAT(message_of<StaleError>([&] { gather(seen, {2500}); }), HasSubstr("refresh() it"));
  EXPECT_THROW(gather(seen, {0}), StaleError);
  reading.refresh();
  EXPECT_THAT(gather(seen, {2500}), Each(5.0F));
  EXPECT_EQ(seen.stats().frames, 0U);
}

TEST_F(MappedTableTest, AWriterWithoutALogIsNoticed) {
  const StoreOptions options{.memory = 1 << 20, .durability = Durability::kNone};
  {
    Store store = Store::open(path(), options);
    make(store, 1000);
    store.close();
  }
  Store reading = reader();
  EXPECT_EQ(gather(reading.table("t"), {1})[0], 16.0F);
  {
    Store store = Store::open(path(), options);
    scatter(store.table("t"), {1}, std::vector<float>(16, 5));
    store.close();
  }
  EXPECT_THROW(gather(reading.table("t"), {2}), StaleError);
  reading.refresh();
  EXPECT_EQ(gather(reading.table("t"), {1})[0], 5.0F);
}

TEST_F(MappedTableTest, TheMappingStaysWhereNothingWasWrittenToTheFiles) {
  for (const Durability durability : {Durability::kCommit, Durability::kNone}) {
    std::filesystem::remove_all(path());
    const StoreOptions options{.memory = 1 << 20, .durability = durability};
    {
      Store store = Store::open(path(), options);
      make(store, 1000);
      store.close();
    }
    Store reading = reader();
    Table seen = reading.table("t");
    EXPECT_EQ(seen.stats().mapped_bytes, 0U);
    (void)gather(seen, {1});
    const std::uint64_t bytes = seen.stats().mapped_bytes;
    EXPECT_NE(bytes, 0U);
    reading.refresh();
    EXPECT_EQ(seen.stats().mapped_bytes, bytes);
    EXPECT_EQ(gather(seen, {1})[0], 16.0F);
    Store store = Store::open(path(), options);
    scatter(store.table("t"), {1}, std::vector<float>(16, 5));
    store.close();
    reading.refresh();
    EXPECT_EQ(seen.stats().mapped_bytes, 0U);
    EXPECT_EQ(gather(seen, {1})[0], 5.0F);
  }
  // A commit that is only in the log leaves the files, and its pages are not taken from there.
  Store store = open();
  Store reading = reader();
  Table seen = reading.table("t");
  (void)gather(seen, {1});
  scatter(store.table("t"), {1}, std::vector<float>(16, 6));
  store.commit();
  reading.refresh();
  EXPECT_NE(seen.stats().mapped_bytes, 0U);
  EXPECT_EQ(gather(seen, {1})[0], 6.0F);
  EXPECT_EQ(gather(seen, {999})[0], 15'984.0F);
}

TEST_F(MappedTableTest, ARemovedTablesMappingEnds) {
  Store store = open();
  make(store, 1000);
  Store reading = reader();
  Table seen = reading.table("t");
  (void)gather(seen, {1});
  store.remove("t");
  EXPECT_EQ(gather(seen, {1})[0], 16.0F) << "as every reader: its files are still there";
  reading.refresh();
  EXPECT_THROW(gather(seen, {1}), ClosedError);
  make(store, 10);
  reading.refresh();
  EXPECT_EQ(gather(reading.table("t"), {9})[0], 144.0F);
}

TEST_F(MappedTableTest, RowsThatWereAddedOrCut) {
  Store store = open();
  Table table = make(store, 1000);
  Store reading = reader();
  Table seen = reading.table("t");
  (void)gather(seen, {1});
  table.append(std::as_bytes(std::span(static_cast<const std::vector<float>&>(numbers(3000, 1)))));
  EXPECT_EQ(gather(seen, {999})[0], 15'984.0F);
  EXPECT_THROW(gather(seen, {1000}), RowIdError);
  reading.refresh();
  EXPECT_EQ(seen.stats().mapped_bytes, 0U) << "it ended too early";
  EXPECT_EQ(gather(seen, {1000, 3999})[0], 1.0F);
  EXPECT_EQ(gather(seen, {3999})[15], 48'000.0F);
  table.resize(10);
  EXPECT_THROW(gather(seen, {3999}), StaleError) << "the file is shorter now";
  reading.refresh();
  EXPECT_EQ(gather(seen, {9})[0], 144.0F);
  EXPECT_THROW(gather(seen, {10}), RowIdError);
}

TEST_F(MappedTableTest, ATableThatWasCutBeforeItIsMappedIsStale) {
  Store store = open();
  Table table = make(store, 4000);
  store.checkpoint();
  Store reading = reader();
  const Table seen = reading.table("t");
  table.resize(100);
  EXPECT_THROW(gather(seen, {5}), StaleError);
  reading.refresh();
  EXPECT_EQ(gather(reading.table("t"), {5})[1], 81.0F);
}

TEST_F(MappedTableTest, AHandlerThatCameAfterTheMappingDoesNotEndTheProcess) {
  {
    Store store = open();
    make(store, 4000);
  }
  Store reading = reader();
  gather(reading.table("t"), {0});
  const auto before = std::signal(SIGBUS, SIG_DFL);
  std::filesystem::resize_file(path() / "t.npy", 8192);
  EXPECT_THROW(gather(reading.table("t"), {3999}), FormatError);
  std::signal(SIGBUS, before);
}

TEST_F(MappedTableTest, AFileThatIsCutIsAnErrorUntilItIsThereAgain) {
  {
    Store store = open();
    make(store, 5000);
    store.close();
  }
  const std::string text = test::file_text(path() / "t.npy");
  Store reading = reader();
  Table seen = reading.table("t");
  EXPECT_EQ(gather(seen, {4999})[0], 79'984.0F);
  std::filesystem::resize_file(path() / "t.npy", 100'000);
  EXPECT_THAT(message_of<FormatError>([&] { gather(seen, {4999}); }), HasSubstr("t.npy: truncated: the file has 100000 bytes"));
  EXPECT_THROW(gather(seen, {0}), FormatError);
  test::write_text(path() / "t.npy", text);
  EXPECT_THAT(message_of<IoError>([&] { gather(seen, {0}); }), HasSubstr("t.npy"));
  reading.refresh();
  EXPECT_EQ(gather(seen, {4999})[0], 79'984.0F);
  // Cut before anybody maps it.
  Store other = reader();
  std::filesystem::resize_file(path() / "t.npy", 100'000);
  EXPECT_THROW(gather(other.table("t"), {0}), FormatError);
}

TEST_F(MappedTableTest, PrefetchIsAHintThatTakesNoFrames) {
  {
    Store store = open();
    make(store, 1000);
    store.close();
  }
  Store reading = reader();
  Table seen = reading.table("t");
  EXPECT_TRUE(seen.prefetch(range(0, 1000)).wait());
  EXPECT_THROW(seen.prefetch(range(1000, 1001)), RowIdError);
  EXPECT_EQ(seen.stats().frames, 0U);
}

TEST_F(MappedTableTest, ATableOfNoRows) {
  {
    Store store = open();
    store.create("t", {.rows = 0, .dim = 3});
    store.close();
  }
  Store reading = reader();
  EXPECT_TRUE(gather(reading.table("t"), {}).empty());
  EXPECT_THROW(gather(reading.table("t"), {0}), RowIdError);
}

// Readers that meet the writer at any moment see whole commits or an error that says so.
TEST_F(MappedTableTest, ThreadsSeeOneCommitWhileAWriterGoesOn) {
  Store store = open();
  Table table = store.create("t", {.rows = 3000, .dim = 16});
  const auto ids = range(0, 3000);
  scatter(table, ids, std::vector<float>(3000 * 16, 0));
  store.commit();
  Store reading = reader(Pin::kMapping, 1 << 20);
  Table seen = reading.table("t");
  std::atomic<bool> stop{false};
  std::atomic<int> whole{0}, stale{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      while (!stop) {
        try {
          const auto rows = gather(seen, ids);
          EXPECT_THAT(rows, Each(rows[0]));
          ++whole;
        } catch (const StaleError&) {
          ++stale;
          reading.refresh();
        }
      }
    });
  for (int commit = 1; commit < 30; ++commit) {
    scatter(table, ids, std::vector<float>(3000 * 16, static_cast<float>(commit)));
    store.commit();
    if (commit % 2 == 0) store.checkpoint();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(whole, 0);
  reading.refresh();
  EXPECT_EQ(gather(seen, {2999})[0], 29.0F);
}

TEST(PageFrames, NumberPagesBeyondThirtyTwoBits) {
  std::byte* const slab = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  const FrameSource source{.slab = slab, .registered = true, .page_bytes = 4100, .rows_per_page = 41, .stride = 100};
  const auto frames = [&](std::vector<std::uint64_t> pages) { return frames_of_pages(source, pages); };
  constexpr std::uint64_t kLast = 0xFFFFFFFF;
  EXPECT_EQ(frames({0, kLast}).source.slab, slab);
  EXPECT_THAT(frames({0, kLast}).frames, ElementsAre(0U, kLast));
  EXPECT_TRUE(frames({}).frames.empty());
  EXPECT_THAT(frames({3, kLast, kLast + 3, kLast + 4, kLast * 9}).frames, ElementsAre(0U, kLast - 3, kLast));
  EXPECT_EQ(frames({3, kLast, kLast + 3, kLast + 4}).source.slab, slab + 3 * 4100);
  const PageFrames far = frames({kLast * 9, kLast * 9 + 7});
  EXPECT_THAT(far.frames, ElementsAre(0U, 7U));
  EXPECT_EQ(far.source.slab, slab + kLast * 9 * 4100);
  EXPECT_EQ(far.source.rows_per_page, 41U);
}

}  // namespace
}  // namespace embermap
