// Tables whose rows, elements and bytes go past 2^31 and 2^32, on sparse files: every path that takes a row number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <numeric>

#include "io/npy.hpp"
#include "io/rows.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::StoreTest;

std::uint64_t disk_bytes(const std::filesystem::path& directory) {
  std::uint64_t bytes = 0;
  for (const auto& item : std::filesystem::directory_iterator(directory)) {
    struct stat status {};
    if (::stat(item.path().c_str(), &status) == 0) bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;
  }
  return bytes;
}

class LargeTest : public StoreTest {};

TEST_F(LargeTest, ATerabyteOfInitialRowsTakesNoDisk) {
  {
    Store store = open(64 << 20);
    Table table = store.create("t", {.rows = 1'000'000'000, .dim = 128, .optimizer = Adagrad{}, .init = Normal{}, .seed = 1});
    EXPECT_GE(std::filesystem::file_size(table.file()), 1'000'000'000'000U);
    EXPECT_LT(disk_bytes(path()), 10U << 20);
    store.close();
  }
  Store again = open(64 << 20, StoreOptions::Mode::kReadWrite);
  EXPECT_EQ(test::gather(again.table("t"), {999'999'999}).size(), 128U);
  EXPECT_LT(disk_bytes(path()), 10U << 20);
}

struct Shape {
  const char* name;
  std::uint64_t rows, dim;
  DType dtype;
  Optimizer optimizer;
  std::uint64_t memory;
};

void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

// The operations of a table with one row as the unit, whatever its dtype: a row's bytes are those of `row_of(seed)`.
class LargeTableTest : public StoreTest, public testing::WithParamInterface<Shape> {
 protected:
  std::uint64_t row_bytes() const { return GetParam().dim * item_size(GetParam().dtype); }
  // Small whole numbers, in bytes of the dtype.
  std::vector<std::byte> rows_of(std::uint64_t count, unsigned seed) const {
    std::vector<std::byte> out(count * row_bytes());
    const bool is_float = GetParam().dtype == DType::kFloat32;
    for (std::uint64_t i = 0; i < count * GetParam().dim; ++i) {
      const auto value = static_cast<int>((seed + i * 7) % 100);
      const auto number = static_cast<float>(value);
      if (is_float)
        std::memcpy(out.data() + i * 4, &number, 4);
      else
        out[i] = static_cast<std::byte>(value);
    }
    return out;
  }
  std::vector<std::byte> gather(Table table, const std::vector<std::int64_t>& ids, std::string_view field = "weight") const {
    std::vector<std::byte> out(ids.size() * row_bytes());
    table.gather(ids, out, field);
    return out;
  }
  std::vector<std::byte> read(Table table, std::uint64_t first, std::uint64_t count) const {
    std::vector<std::byte> out(count * row_bytes());
    table.read(first, count, out);
    return out;
  }
  // Rows on both sides of every power that a type may end at, in rows, elements and bytes, and the last row.
  std::vector<std::int64_t> edges() const {
    std::vector<std::int64_t> ids;
    const auto stride = static_cast<double>(row_bytes());
    for (const double at : {0.0, 0x1p31, 0x1p32, 0x1p31 / static_cast<double>(GetParam().dim),
                            0x1p32 / static_cast<double>(GetParam().dim), 0x1p31 / stride, 0x1p32 / stride, 0x1p40 / stride / 4})
      for (std::int64_t id = static_cast<std::int64_t>(at) - 2; id < static_cast<std::int64_t>(at) + 3; ++id)
        if (id >= 0 && id < static_cast<std::int64_t>(GetParam().rows)) ids.push_back(id);
    ids.push_back(static_cast<std::int64_t>(GetParam().rows) - 1);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }
  Table create(Store& store) const {
    const Shape& shape = GetParam();
    return store.create(
        "t", {.rows = shape.rows, .dim = shape.dim, .dtype = shape.dtype, .optimizer = shape.optimizer, .init = Constant{3}});
  }
};

TEST_P(LargeTableTest, RowsByIdAreTheirOwn) {
  const auto ids = edges();
  const auto rows = rows_of(ids.size(), 1);
  std::vector<std::byte> after;
  {
    Store store = open(GetParam().memory);
    Table table = create(store);
    EXPECT_EQ(gather(table, ids), gather(table, std::vector<std::int64_t>(ids.size(), 5))) << "all are initial";
    table.scatter(ids, rows);
    EXPECT_EQ(gather(table, ids), rows);
    table.add(ids, rows);
    EXPECT_NE(gather(table, ids), rows);
    if (!std::holds_alternative<std::monostate>(GetParam().optimizer)) {
      table.update(ids, rows, GetParam().dtype);
      EXPECT_NE(gather(table, ids, "sum"), gather(table, std::vector<std::int64_t>(ids.size(), 10), "sum"));
    }
    after = gather(table, ids);
    EXPECT_THROW(gather(table, {static_cast<std::int64_t>(GetParam().rows)}), RowIdError);
    table.prefetch(ids);
    store.close();
  }
  Store again = open(GetParam().memory);
  Table table = again.table("t");
  EXPECT_EQ(gather(table, ids), after);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = std::span(after).subspan(i * row_bytes(), row_bytes());
    EXPECT_TRUE(std::ranges::equal(read(table, static_cast<std::uint64_t>(ids[i]), 1), row)) << ids[i];
  }
  table.prefetch(ids);
  const VerifyReport report = table.verify();
  EXPECT_EQ(report.bad_pages, 0U);
  EXPECT_GT(report.verified, 0U);
  EXPECT_EQ(report.verified, report.written);
  EXPECT_LT(disk_bytes(path()), 16U << 20);
}

TEST_P(LargeTableTest, RangesOfRowsAreTheirOwn) {
  Store store = open(GetParam().memory);
  Table table = create(store);
  constexpr std::uint64_t kCount = 9;
  unsigned seed = 2;
  for (const std::int64_t edge : edges()) {
    const std::uint64_t first = std::min(static_cast<std::uint64_t>(std::max<std::int64_t>(edge - 4, 0)), table.rows() - kCount);
    const auto rows = rows_of(kCount, ++seed);
    table.write(first, kCount, rows);
    EXPECT_EQ(read(table, first, kCount), rows) << first;
    std::vector<std::int64_t> ids(kCount);
    std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(first));
    EXPECT_EQ(gather(table, ids), rows) << first;
    std::vector<std::byte> out(rows.size());
    table_rows(table)->read(first, kCount, out.data());  // as an export does
    EXPECT_EQ(out, rows) << first;
  }
  EXPECT_THROW(read(table, table.rows() - 1, 2), InvalidArgument);
  EXPECT_THROW(table.read(~std::uint64_t{0}, 2, {}), InvalidArgument);
}

TEST_P(LargeTableTest, ResizeKeepsRowsOnBothSides) {
  const auto ids = edges();
  const auto rows = rows_of(ids.size(), 1);
  Store store = open(GetParam().memory + (GetParam().memory >> 3));
  Table table = create(store);
  const auto initial = gather(table, {7});
  table.scatter(ids, rows);
  const std::uint64_t cut = static_cast<std::uint64_t>(ids[ids.size() / 2]) + 1;
  table.resize(cut);
  EXPECT_THROW(gather(table, {static_cast<std::int64_t>(cut)}), RowIdError);
  table.resize(GetParam().rows + 1000);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = std::span(rows).subspan(i * row_bytes(), row_bytes());
    EXPECT_TRUE(std::ranges::equal(gather(table, {ids[i]}),
                                   static_cast<std::uint64_t>(ids[i]) < cut ? row : std::span<const std::byte>(initial)))
        << ids[i];
  }
  EXPECT_EQ(gather(table, {static_cast<std::int64_t>(GetParam().rows) + 999}), initial);
  EXPECT_EQ(table.verify().bad_pages, 0U);
}

INSTANTIATE_TEST_SUITE_P(Shapes, LargeTableTest,
                         testing::Values(Shape{"Billion", 1'000'000'000, 128, DType::kFloat32, Adagrad{}, 64 << 20},
                                         Shape{"RowsPast32Bits", 1ULL << 33, 1, DType::kFloat32, Adagrad{}, 8 << 20},
                                         Shape{"OddBytesPast32Bits", (1ULL << 32) + 12'345, 3, DType::kInt8, {}, 4 << 20},
                                         Shape{"LongRows", 300'000, 16'384, DType::kFloat32, Adagrad{}, 8 << 20}),
                         [](const auto& instance) { return instance.param.name; });

TEST_F(LargeTest, AnAdoptedFileIsUsedOnBothSidesOfTwoToThe32) {
  constexpr std::uint64_t kRows = (1ULL << 32) + 77;
  const auto file = directory_ / "a.npy";
  {
    const std::string header = format_npy_header("|i1", {}, 0, {kRows, 1}, 128);
    test::write_text(file, header);
    std::filesystem::resize_file(file, header.size() + kRows);
  }
  const std::vector<std::int64_t> ids{0, (1LL << 31) - 1, 1LL << 31, (1LL << 32) - 1, 1LL << 32, kRows - 1};
  const std::vector<std::byte> rows{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}, std::byte{5}, std::byte{6}};
  {
    Store store = open(8 << 20);
    store.adopt("t", file).scatter(ids, rows);
    store.close();
  }
  Store store = open(8 << 20);
  std::vector<std::byte> out(ids.size());
  store.table("t").gather(ids, out);
  EXPECT_EQ(out, rows);
  // As imports, exports and conversions read it.
  const auto reader = open_rows(parse_location(file.native()));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    std::byte row{};
    reader->read(static_cast<std::uint64_t>(ids[i]), 1, &row);
    EXPECT_EQ(row, rows[i]) << ids[i];
  }
  EXPECT_LT(disk_bytes(directory_.path()), 1U << 20);
}

}  // namespace
}  // namespace embermap
