#include "store/table.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <numeric>
#include <thread>

#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::message_of;
using test::range;
using test::read_all;
using test::scatter;
using test::StoreTest;
using test::update;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class TableTest : public StoreTest {};

TEST_F(TableTest, RowsNobodyWroteAreGeneratedTheSameForEveryPageSizeAndBudget) {
  std::vector<float> expected;
  int number = 0;
  for (const std::uint64_t page : {4096U, 8192U, 2097152U}) {
    for (const std::uint64_t memory : {5ULL << 20, 1ULL << 30}) {
      Store store = open(memory);
      Table table =
          store.create("t" + std::to_string(number++),
                       {.rows = 1001, .dim = 129, .optimizer = Adagrad{}, .init = Normal{0, 0.5}, .seed = 9, .page_bytes = page});
      const auto rows = gather(table, range(0, 1001));
      if (expected.empty()) expected = rows;
      EXPECT_EQ(rows, expected);
      EXPECT_EQ(read_all(table), expected);
      EXPECT_EQ(table.written_pages(), 0U);
    }
  }
  EXPECT_NE(expected[0], expected[1]);
}

TEST_F(TableTest, StateBeginsWithItsInitialValue) {
  Store store = open();
  Table table =
      store.create("t", {.rows = 10, .dim = 3, .optimizer = Adagrad{.initial_accumulator_value = 0.25}, .init = Constant{2}});
  EXPECT_EQ(gather(table, {9}, "sum"), (std::vector<float>{0.25F, 0.25F, 0.25F}));
  EXPECT_EQ(gather(table, {9}), (std::vector<float>{2, 2, 2}));
}

// Random operations against plain arrays, with budgets from one page up.
class TableModelTest : public StoreTest, public testing::WithParamInterface<std::tuple<std::uint64_t, std::uint64_t>> {};

TEST_P(TableModelTest, EqualsAPlainArrayUnderRandomOperations) {
  const auto [frames, dim] = GetParam();
  constexpr std::int64_t kRows = 333;
  const Adagrad optimizer{.lr = 0.1, .initial_accumulator_value = 0.5};
  // Enough for the bits, the checksums and `frames` pages.
  const std::uint64_t record = dim * 8;
  const std::uint64_t memory = frames * (std::max<std::uint64_t>(4096, record + record / 8) + 200) + 600;
  Store store = open(memory);
  Table table = store.create("t", {.rows = kRows, .dim = dim, .optimizer = optimizer, .init = Uniform{-1, 1}, .seed = 3});
  std::vector<float> weight = read_all(table);
  std::vector<float> sum(weight.size(), 0.5F);
  std::mt19937 random(static_cast<unsigned>(frames * 31 + dim));
  for (int round = 0; round < 60; ++round) {
    std::vector<std::int64_t> ids(random() % 40);
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % kRows);
    std::vector<float> rows(ids.size() * dim);
    for (auto& value : rows) value = static_cast<float>(random() % 1000) / 500 - 1;
    const auto at = [&](std::vector<float>& array, std::size_t i) {
      return array.data() + static_cast<std::size_t>(ids[i]) * dim;
    };
    switch (random() % 5) {
      case 0:
        scatter(table, ids, rows);
        for (std::size_t i = 0; i < ids.size(); ++i) std::copy_n(rows.data() + i * dim, dim, at(weight, i));
        break;
      case 1:
        scatter(table, ids, rows, "sum");
        for (std::size_t i = 0; i < ids.size(); ++i) std::copy_n(rows.data() + i * dim, dim, at(sum, i));
        for (float& value : sum) value = std::abs(value);
        table.write(0, kRows, std::as_bytes(std::span(sum)), "sum");
        break;
      case 2: {
        table.add(ids, std::as_bytes(std::span(rows)));
        std::map<std::int64_t, std::vector<float>> sums;
        for (std::size_t i = 0; i < ids.size(); ++i) {
          auto& row = sums.try_emplace(ids[i], std::vector<float>(dim)).first->second;
          for (std::uint64_t d = 0; d < dim; ++d) row[d] += rows[i * dim + d];
        }
        for (const auto& [id, row] : sums)
          for (std::uint64_t d = 0; d < dim; ++d) weight[static_cast<std::size_t>(id) * dim + d] += row[d];
        break;
      }
      case 3: {
        update(table, ids, rows);
        std::map<std::int64_t, std::vector<float>> grads;
        for (std::size_t i = 0; i < ids.size(); ++i) {
          auto& row = grads.try_emplace(ids[i], std::vector<float>(dim)).first->second;
          for (std::uint64_t d = 0; d < dim; ++d) row[d] += rows[i * dim + d];
        }
        for (const auto& [id, row] : grads)
          for (std::uint64_t d = 0; d < dim; ++d) {
            const std::size_t k = static_cast<std::size_t>(id) * dim + d;
            sum[k] += row[d] * row[d];
            weight[k] -= 0.1F * row[d] / (std::sqrt(sum[k]) + 1e-10F);
          }
        break;
      }
      default: {
        const std::uint64_t first = random() % kRows, count = random() % (kRows - first);
        std::vector<float> block(count * dim, static_cast<float>(round));
        table.write(first, count, std::as_bytes(std::span(block)));
        std::copy(block.begin(), block.end(), weight.begin() + static_cast<std::ptrdiff_t>(first * dim));
      }
    }
    if (round % 7 == 0) store.commit();
    std::vector<float> expected;
    for (std::size_t i = 0; i < ids.size(); ++i) expected.insert(expected.end(), at(weight, i), at(weight, i) + dim);
    const auto found = gather(table, ids);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 2e-6F) << round;
  }
  const auto close = [](const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 4e-6F) << i;
  };
  close(read_all(table), weight);
  close(read_all(table, "sum"), sum);
  EXPECT_EQ(table.verify().bad_pages, 0U);
  store.close();
  Store again = open(memory);
  close(read_all(again.table("t")), weight);
  close(gather(again.table("t"), range(0, kRows), "sum"), sum);
  EXPECT_EQ(again.table("t").verify().bad_pages, 0U);
}

INSTANTIATE_TEST_SUITE_P(Budgets, TableModelTest,
                         testing::Combine(testing::Values(1U, 2U, 5U, 64U), testing::Values(1U, 7U, 100U, 128U, 1500U)));

TEST_F(TableTest, EmptyBatchesChangeNothing) {
  Store store = open();
  Table table = store.create("t", {.rows = 4, .dim = 2, .optimizer = Sgd{}});
  EXPECT_TRUE(gather(table, {}).empty());
  scatter(table, {}, {});
  update(table, {}, {});
  EXPECT_EQ(table.step(), 0U);
  EXPECT_EQ(store.commit(), 0U);
}

TEST_F(TableTest, AnEmptyTableTakesNoIds) {
  Store store = open();
  Table table = store.create("t", {.rows = 0, .dim = 2});
  EXPECT_TRUE(gather(table, {}).empty());
  EXPECT_THROW(gather(table, {0}), RowIdError);
  table.resize(3);
  EXPECT_EQ(gather(table, {2}), (std::vector<float>{0, 0}));
}

TEST_F(TableTest, BadIdsAreNamedAndNothingIsChanged) {
  Store store = open();
  Table table = store.create("t", {.rows = 100, .dim = 2, .optimizer = Adagrad{}});
  for (const std::int64_t bad :
       {std::int64_t{100}, std::int64_t{-1}, std::int64_t{1} << 40, std::numeric_limits<std::int64_t>::min()}) {
    std::vector<std::int64_t> ids(1000, 7);
    ids[500] = bad;
    ids[700] = 12345;
    std::vector<float> rows(2000, 1.0F);
    const std::string text = "row id " + std::to_string(bad) + " at position 500 is out of range for table 't' with 100 rows";
    EXPECT_EQ(message_of<RowIdError>([&] { gather(table, ids); }), text);
    EXPECT_EQ(message_of<RowIdError>([&] { scatter(table, ids, rows); }), text);
    EXPECT_EQ(message_of<RowIdError>([&] { table.add(ids, std::as_bytes(std::span(rows))); }), text);
    EXPECT_EQ(message_of<RowIdError>([&] { update(table, ids, rows); }), text);
    EXPECT_EQ(message_of<RowIdError>([&] { table.prefetch(ids); }), text);
  }
  EXPECT_EQ(gather(table, {7}), (std::vector<float>{0, 0}));
  EXPECT_EQ(table.stats().dirty_pages, 0U);
}

TEST_F(TableTest, SizesThatDisagreeAreRefused) {
  Store store = open();
  Table table = store.create("t", {.rows = 100, .dim = 2, .optimizer = Sgd{}});
  const std::vector<float> three(3);
  EXPECT_NE(message_of<InvalidArgument>([&] {
              scatter(table, {1, 2}, three);
            }).find("2 ids, 12 bytes of rows"),
            std::string::npos);
  EXPECT_THROW(update(table, {1, 2}, three), InvalidArgument);
  EXPECT_THROW(table.write(99, 2, std::as_bytes(std::span(three))), InvalidArgument);
  std::vector<std::byte> wrong(7);
  EXPECT_THROW(table.gather(range(0, 1), wrong), InvalidArgument);
  EXPECT_THROW(table.update(range(0, 1), wrong, DType::kFloat64), DTypeError);
}

TEST_F(TableTest, ATableWithoutOptimizerIsNotUpdated) {
  Store store = open();
  Table table = store.create("t", {.rows = 4, .dim = 1});
  EXPECT_NE(message_of<InvalidArgument>([&] { update(table, {1}, {1.0F}); }).find("has no optimizer"), std::string::npos);
}

TEST_F(TableTest, LastOfRepeatedIdsWins) {
  for (const std::uint64_t memory : {std::uint64_t{9000}, std::uint64_t{1} << 30}) {
    Store store = open(memory);
    if (store.contains("t")) store.remove("t");
    Table table = store.create("t", {.rows = 5000, .dim = 128});
    std::vector<std::int64_t> ids(20'000);
    std::vector<float> rows(ids.size() * 128);
    std::map<std::int64_t, float> last;
    std::mt19937 random(5);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int64_t>(random() % 300) * 16;
      std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(i * 128), 128, static_cast<float>(i));
      last[ids[i]] = static_cast<float>(i);
    }
    scatter(table, ids, rows);
    for (const auto& [id, value] : last) ASSERT_EQ(gather(table, {id})[127], value);
    store.close();
  }
}

TEST_F(TableTest, AddsFromSeveralThreadsAreAllThere) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 1000, .dim = 1});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 50; ++i) {
        std::vector<std::int64_t> ids(500);
        for (auto& id : ids) id = static_cast<std::int64_t>(random() % 10) * 100;
        const std::vector<float> ones(500, 1.0F);
        table.add(ids, std::as_bytes(std::span(ones)));
        if (i % 10 == 0) (void)gather(table, ids);
      }
    });
  for (auto& thread : threads) thread.join();
  float total = 0;
  for (const float value : read_all(table)) total += value;
  EXPECT_EQ(total, 4 * 50 * 500);
}

// Whole pages, which are replaced without having been read: until then the file has the rows before.
TEST_F(TableTest, ScansSeeOfAScatterAllRowsOfAPageOrNone) {
  for (const std::uint64_t memory : {192ULL << 10, 4ULL << 20}) {
    SCOPED_TRACE(memory);
    Store store = open(memory);
    constexpr std::uint64_t kDim = 64, kPageRows = 16, kRows = 16 * kPageRows, kGroups = 8;  // a group: 16 pages
    Table table = store.create("t", {.rows = kRows * kGroups, .dim = kDim});
    ASSERT_EQ(table.geometry().rows_per_page, kPageRows);
    for (std::uint64_t group = 0; group < kGroups; ++group) {
      std::vector<std::int64_t> ids(kRows);
      std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(group * kRows));
      std::atomic<bool> stop{false};
      std::atomic<int> torn{0};
      std::thread reader([&] {
        std::vector<float> rows(kRows * kDim);
        while (!stop) {
          table.read(group * kRows, kRows, std::as_writable_bytes(std::span(rows)));
          for (std::uint64_t row = 0; row < kRows; ++row)
            if (rows[row * kDim] != rows[row / kPageRows * kPageRows * kDim]) ++torn;
        }
      });
      for (int i = 1; i <= 20; ++i) {
        const std::vector<float> values(kRows * kDim, static_cast<float>(i));
        table.scatter(ids, std::as_bytes(std::span(values)));
        // Pushes the group out, where it can be.
        std::vector<std::int64_t> others(kRows * 2);
        std::iota(others.begin(), others.end(), static_cast<std::int64_t>((group + 1) % (kGroups - 2) * kRows));
        (void)gather(table, others);
      }
      stop = true;
      reader.join();
      ASSERT_EQ(torn, 0);
    }
    store.remove("t");
    store.close();
  }
}

// Reads as slow as a disk's.
class SlowReads final : public FileOps {
 public:
  std::atomic<bool> slow{false};
  std::atomic<int> begun{0};
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    if (slow) {
      ++begun;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return FileOps::pread(fd, buffer, bytes, offset);
  }
};

TEST_F(TableTest, ChangesDoNotWaitForAWholeScan) {
  SlowReads ops;
  Store store = Store::open(path(), {.memory = 128 << 10, .threads = 2, .file_ops = &ops});  // steps of a page
  Table table = store.create("t", {.rows = 400, .dim = 1024});
  const std::vector<float> ones(400 * 1024, 1);
  table.write(0, 400, std::as_bytes(std::span(ones)));
  scatter(table, {0}, std::vector<float>(1024, 2));
  ops.slow = true;
  constexpr int kReads = 399;  // row 0 is in memory
  std::vector<float> rows;
  std::thread scan([&] { rows = read_all(table); });
  int changes = 0;  // that were done while the scan still had pages to read
  while (ops.begun < kReads) {
    const bool under_way = ops.begun > 0;
    scatter(table, {0}, std::vector<float>(1024, 3));
    if (under_way && ops.begun < kReads) ++changes;
  }
  scan.join();
  EXPECT_GE(changes, 5);
  EXPECT_TRUE(rows[0] == 2 || rows[0] == 3);
  for (std::size_t i = 1024; i < rows.size(); ++i) ASSERT_EQ(rows[i], 1) << i;
}

TEST_F(TableTest, AScanOrAWriteWithABadPageSaysSoAndTheNextOneWorks) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 400, .dim = 1024});
  const std::vector<float> ones(400 * 1024, 1);
  table.write(0, 400, std::as_bytes(std::span(ones)));
  store.commit();
  const auto at = static_cast<off_t>(table.geometry().offset_of(200));
  {
    std::fstream file(table.file(), std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(at);
    file.write("damage", 6);
  }
  EXPECT_THAT(message_of<CorruptError>([&] { (void)read_all(table); }), testing::HasSubstr("page 200 (rows 200 to 200)"));
  table.write(0, 400, std::as_bytes(std::span(ones)));
  EXPECT_EQ(read_all(table), ones);
}

TEST_F(TableTest, EveryDTypeKeepsItsBits) {
  Store store = open(1 << 20);
  std::mt19937 random(1);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                            DType::kInt32, DType::kInt64}) {
    for (const std::uint64_t dim : {1U, 3U, 17U, 300U}) {
      const std::string name = std::string(dtype_name(dtype)) + "-" + std::to_string(dim);
      Table table = store.create(name, {.rows = 200, .dim = dim, .dtype = dtype});
      const std::vector<std::int64_t> ids{199, 0, 64, 63};
      std::vector<std::byte> rows(4 * dim * item_size(dtype));
      for (auto& byte : rows) byte = static_cast<std::byte>(random());
      table.scatter(ids, rows);
      std::vector<std::byte> out(rows.size());
      table.gather(ids, out);
      EXPECT_EQ(out, rows) << name;
    }
  }
}

TEST_F(TableTest, ResizeKeepsRowsAndForgetsWhatWasCut) {
  for (const std::uint64_t dim : {3U, 128U}) {
    Store store = open(1 << 20);
    if (store.contains("t")) store.remove("t");
    Table table = store.create("t", {.rows = 1001, .dim = dim, .optimizer = Adagrad{}, .init = Normal{}, .seed = 4});
    Table fresh = store.contains("fresh")
                      ? (store.remove("fresh"), store.create("fresh", {.rows = 5000, .dim = dim, .init = Normal{}, .seed = 4}))
                      : store.create("fresh", {.rows = 5000, .dim = dim, .init = Normal{}, .seed = 4});
    const auto initial = read_all(fresh);
    const std::vector<float> sevens(1001 * dim, 7.0F);
    scatter(table, range(0, 1001), sevens);
    table.resize(500);
    EXPECT_EQ(table.rows(), 500U);
    EXPECT_THROW(gather(table, {500}), RowIdError);
    EXPECT_EQ(table.verify().bad_pages, 0U);
    table.resize(5000);
    auto expected = initial;
    std::fill_n(expected.begin(), 500 * dim, 7.0F);
    EXPECT_EQ(gather(table, range(0, 5000)), expected);
    EXPECT_EQ(table.verify().bad_pages, 0U);
    store.close();
    Store again = open(1 << 20);
    EXPECT_EQ(read_all(again.table("t")), expected);
    EXPECT_EQ(std::filesystem::file_size(path() / "t.npy"), again.table("t").geometry().file_bytes());
  }
}

TEST_F(TableTest, MaterializeWritesTheRest) {
  Store store = open(1 << 20);
  Table table = store.create("t", {.rows = 1000, .dim = 16, .init = Uniform{1, 2}});
  const auto before = read_all(table);
  table.materialize();
  EXPECT_EQ(table.written_pages(), table.geometry().pages());
  EXPECT_EQ(read_all(table), before);
  const VerifyReport report = table.verify();
  EXPECT_EQ(report.verified, report.pages);
}

TEST_F(TableTest, VerifyNamesTheRowsOfDamagedPages) {
  {
    Store store = open();
    store.create("t", {.rows = 100, .dim = 128}).materialize();
    store.close();
  }
  {
    std::fstream file(path() / "t.npy", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 50 * 512);
    file.put('x');
  }
  Store store = open(100'000'000, StoreOptions::Mode::kRead);
  const VerifyReport report = store.table("t").verify();
  ASSERT_EQ(report.bad_pages, 1U);
  EXPECT_EQ(report.bad[0].first_row, 48U);
  EXPECT_EQ(report.bad[0].last_row, 55U);
  EXPECT_THROW(read_all(open(100'000'000, StoreOptions::Mode::kRead).table("t")), CorruptError) << "scans verify too";
  EXPECT_THROW(gather(store.table("t"), {50}), CorruptError);
  EXPECT_EQ(gather(store.table("t"), {47})[0], 0.0F);
}

TEST_F(TableTest, OptimizerCanChangeItsHyperparametersOnly) {
  {
    Store store = open();
    Table table = store.create("t", {.rows = 2, .dim = 1, .optimizer = Sgd{.lr = 1}});
    update(table, {0}, {1.0F});
    table.set_optimizer(Sgd{.lr = 0.5});
    update(table, {0}, {1.0F});
    EXPECT_EQ(gather(table, {0}), (std::vector<float>{-1.5F}));
    EXPECT_THROW(table.set_optimizer(Adagrad{}), InvalidArgument);
    EXPECT_THROW(table.set_optimizer(Sgd{.lr = 1, .momentum = 0.9}), InvalidArgument);
    EXPECT_EQ(table.step(), 2U);
    store.close();
  }
  Store store = open();
  EXPECT_EQ(std::get<Sgd>(store.table("t").optimizer()).lr, 0.5);
  EXPECT_EQ(store.table("t").step(), 2U);
}

TEST_F(TableTest, PrefetchBringsPagesInAndIsNoUseOfBadIds) {
  Store store = open();
  Table table = store.create("t", {.rows = 10'000, .dim = 128});
  EXPECT_TRUE(table.prefetch(range(0, 4000)).wait());
  EXPECT_EQ(table.stats().resident_pages, 500U);
  const std::uint64_t misses = table.stats().misses;
  (void)gather(table, range(0, 4000));
  EXPECT_EQ(table.stats().misses, misses);
  table.prefetch(range(0, 10'000));
  table.resize(10);  // while it may be running
  EXPECT_EQ(gather(table, {9})[0], 0.0F);
  store.close();
  EXPECT_THROW(table.prefetch(range(0, 1)), ClosedError);
}

// A sparse table: `ids` far apart are written and read back.
void expect_rows_far_apart(Store store, const std::filesystem::path& path, const TableOptions& options,
                           const std::vector<std::int64_t>& ids) {
  const std::uint64_t memory = store.memory();
  Table table = store.create("t", options);
  const auto before = gather(table, ids);
  std::vector<float> rows(ids.size() * options.dim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  scatter(table, ids, rows);
  EXPECT_EQ(gather(table, ids), rows);
  EXPECT_NE(before, rows);
  store.close();
  Store again = Store::open(path, {.mode = StoreOptions::Mode::kReadWrite, .memory = memory});
  EXPECT_EQ(gather(again.table("t"), ids), rows);
  const std::int64_t last = ids.back();
  const std::vector<float> one(options.dim, 1.0F);
  again.table("t").add({&last, 1}, std::as_bytes(std::span(one)));
  EXPECT_EQ(gather(again.table("t"), {last})[0], rows[rows.size() - options.dim] + 1);
  struct stat status {};
  ASSERT_EQ(::stat((path / "t.npy").c_str(), &status), 0);
  EXPECT_LT(status.st_blocks * 512, 2 << 20);
}

TEST_F(TableTest, RowsPastTwoToThe32) {
  expect_rows_far_apart(open(8 << 20), path(),
                        {.rows = 1ULL << 33, .dim = 1, .optimizer = Adagrad{}, .init = Normal{}, .seed = 1},
                        {0, 1 << 23, (1LL << 31) - 1, 1LL << 31, (1LL << 32) - 1, 1LL << 32, (1LL << 33) - 1});
}

TEST_F(TableTest, RowsAroundElementTwoToThe31) {
  // Row 239,674 straddles the 2^31st element.
  expect_rows_far_apart(open(8 << 20), path(), {.rows = 262'144, .dim = 8960, .optimizer = Adagrad{}, .init = Uniform{}},
                        {239'673, 239'674, 239'675, 262'143});
}

// Fails one read of a page, later on.
class FailingRead final : public FileOps {
 public:
  std::atomic<int> left{1 << 30};
  ssize_t pread(int fd, void* buffer, std::size_t bytes, off_t offset) override {
    return bytes >= 4096 && left.fetch_sub(1) == 0 ? (errno = EIO, -1) : FileOps::pread(fd, buffer, bytes, offset);
  }
};

// A batch of more pages than there are frames is changed in passes. An error in a later one leaves a part.
class TornBatchTest : public TableTest {
 protected:
  static constexpr std::int64_t kRows = 400;  // a page each

  Store make(Durability durability) {
    return Store::open(path(),
                       {.memory = 256 << 10, .write_behind = false, .threads = 2, .durability = durability, .file_ops = &ops_});
  }
  // Every other row: neighbours would be one request.
  static std::vector<std::int64_t> some() {
    std::vector<std::int64_t> ids;
    for (std::int64_t id = 0; id < kRows; id += 2) ids.push_back(id);
    return ids;
  }
  // The message of an update that reads so many pages and no more.
  std::string tear(Table table, int pages) {
    ops_.left = pages;
    std::string message = message_of<Error>([&] { update(table, some(), std::vector<float>(some().size() * 1024, 1)); });
    ops_.left = 1 << 30;
    return message;
  }
  void fill(Store& store) {
    Table table = store.create("t", {.rows = kRows, .dim = 1024, .optimizer = Sgd{.lr = 1}});
    const std::vector<float> fives(kRows * 1024, 5);
    table.write(0, kRows, std::as_bytes(std::span(fives)));
    store.create("other", {.rows = 10, .dim = 1});
    store.commit();
    store.checkpoint();
  }

  FailingRead ops_;
};

TEST_F(TornBatchTest, IsNeverCommitted) {
  Store store = make(Durability::kCommit);
  fill(store);
  Table table = store.table("t");
  const std::uint64_t commit = store.commit_number();
  const std::string message = tear(table, 150);
  EXPECT_THAT(message, AllOf(HasSubstr("batch of table 't' was changed in part"), HasSubstr("Input/output error"),
                             HasSubstr("rows with ids below"), HasSubstr("no commits any more"),
                             HasSubstr(fmt::format("at its last commit ({})", commit))));
  // It says which rows it has changed.
  const auto first = std::stoll(message.substr(message.find("ids below ") + 10));
  EXPECT_GT(first, 0);
  EXPECT_LT(first, kRows);
  for (const std::int64_t id : some()) ASSERT_EQ(gather(table, {id})[0], id < first ? 4.0F : 5.0F) << id;
  // Nothing is written or committed any more, of no table.
  const auto refused = [&](const auto& call) { EXPECT_EQ(message_of<CorruptError>(call), message); };
  refused([&] { store.commit(); });
  refused([&] { scatter(table, {3}, std::vector<float>(1024, 1)); });
  refused([&] { update(table, some(), std::vector<float>(some().size() * 1024, 1)); });
  refused([&] { scatter(store.table("other"), {3}, {1}); });
  refused([&] { store.create("new", {.rows = 10, .dim = 1}); });
  refused([&] { store.close(); });
  store.abandon();
  Store again = make(Durability::kCommit);
  EXPECT_EQ(again.commit_number(), commit);
  EXPECT_EQ(test::read_all(again.table("t")), std::vector<float>(kRows * 1024, 5.0F));
  update(again.table("t"), some(), std::vector<float>(some().size() * 1024, 1));
  again.commit();
  for (const std::int64_t id : some()) ASSERT_EQ(gather(again.table("t"), {id})[0], 4.0F) << id;
}

TEST_F(TornBatchTest, AFailureOfTheFirstPassChangesNothing) {
  Store store = make(Durability::kCommit);
  fill(store);
  EXPECT_THAT(tear(store.table("t"), 3), AllOf(HasSubstr("Input/output error"), Not(HasSubstr("in part"))));
  EXPECT_EQ(test::read_all(store.table("t")), std::vector<float>(kRows * 1024, 5.0F));
  update(store.table("t"), some(), std::vector<float>(some().size() * 1024, 1));
  store.commit();
  EXPECT_EQ(gather(store.table("t"), {0})[0], 4.0F);
}

TEST_F(TornBatchTest, StaysWhereNoLogTakesItBackAndSaysSo) {
  Store store = make(Durability::kNone);
  fill(store);
  EXPECT_THAT(tear(store.table("t"), 150),
              AllOf(HasSubstr("changed in part"), HasSubstr("durability 'none' nothing takes that back")));
  store.commit();
  EXPECT_EQ(gather(store.table("t"), {0})[0], 4.0F);
  EXPECT_EQ(gather(store.table("t"), {kRows - 2})[0], 5.0F);
}

}  // namespace
}  // namespace embermap
