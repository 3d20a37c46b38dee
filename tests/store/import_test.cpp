// Tables from files: copied (import) and used in place (adopt).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/npy.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap {
namespace {

using test::gather;
using test::message_of;
using test::range;
using test::read_all;
using test::scatter;
using test::snapshot;
using test::StoreTest;
using testing::HasSubstr;

class ImportTest : public StoreTest {
 protected:
  // A float32 .npy of rows x dim, element i = i, with its data at `offset` (0: where NumPy would put it).
  std::filesystem::path make_npy(std::string_view name, std::uint64_t rows, std::uint64_t dim, std::uint64_t offset = 0,
                                 std::string descr = "<f4") {
    std::vector<float> data(rows * dim);
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
    std::string text = format_npy_header(descr, {}, 0, {rows, dim}, offset);
    text.append(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(float));
    test::write_text(directory_ / name, text);
    return directory_ / name;
  }
  std::unique_ptr<RowReader> reader(const std::filesystem::path& file) { return open_rows(parse_location(file.native())); }
};

TEST_F(ImportTest, ImportedRowsAreThoseOfTheFile) {
  const auto file = make_npy("a.npy", 2003, 33);
  Store store = open(1 << 20);
  std::uint64_t last = 0;
  Table table = store.import("t", *reader(file), {.optimizer = Adagrad{.initial_accumulator_value = 0.5}},
                             [&](std::uint64_t done, std::uint64_t total) {
                               EXPECT_EQ(total, 2003U);
                               last = done;
                             });
  EXPECT_EQ(last, 2003U);
  const auto rows = read_all(table);
  for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows[i], static_cast<float>(i));
  EXPECT_EQ(gather(table, {2002}, "sum"), std::vector<float>(33, 0.5F));
  EXPECT_EQ(table.written_pages(), table.geometry().pages());
  EXPECT_EQ(table.verify().verified, table.geometry().pages());
  EXPECT_FALSE(table.adopted());
}

TEST_F(ImportTest, ConvertsOnTheWay) {
  const auto file = make_npy("a.npy", 100, 3);
  Store store = open(1 << 20);
  Table table = store.import("t", *reader(file), {.dtype = DType::kFloat64});
  std::vector<double> row(3);
  const std::vector<std::int64_t> ids{99};
  table.gather(ids, std::as_writable_bytes(std::span(row)));
  EXPECT_EQ(row, (std::vector<double>{297, 298, 299}));
}

TEST_F(ImportTest, AnImportThatFailsLeavesNothing) {
  const auto file = make_npy("a.npy", 100'000, 16);
  Store store = open(1 << 20);
  store.create("kept", {.rows = 1, .dim = 1});
  const auto before = snapshot(path());
  int calls = 0;
  EXPECT_THROW(store.import("t", *reader(file), {},
                            [&](std::uint64_t, std::uint64_t) {
                              if (++calls == 2) throw std::runtime_error("stop");
                            }),
               std::runtime_error);
  EXPECT_EQ(snapshot(path()), before);
  EXPECT_FALSE(store.contains("t"));
  store.import("t", *reader(file), {});
}

TEST_F(ImportTest, ImportsATableOfNoRows) {
  const auto file = make_npy("a.npy", 0, 5);
  Store store = open(1 << 20);
  EXPECT_EQ(store.import("t", *reader(file), {}).rows(), 0U);
}

TEST_F(ImportTest, AdoptedFilesAreUsedWhereTheyAre) {
  for (const std::uint64_t offset : {0U, 81U, 1000U, 4096U}) {
    const auto file = make_npy("a.npy", 777, 5, offset);
    const std::string before = test::file_text(file);
    Store store = open(20'000);
    Table table = store.adopt("t", file);
    EXPECT_TRUE(table.adopted());
    EXPECT_TRUE(table.writable());
    const auto rows = gather(table, range(0, 777));
    for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows[i], static_cast<float>(i));
    EXPECT_EQ(test::file_text(file), before);
    scatter(table, {776}, {1, 2, 3, 4, 5});
    store.close();
    const std::string after = test::file_text(file);
    EXPECT_EQ(after.size(), before.size());
    EXPECT_EQ(after.substr(0, before.size() - 20), before.substr(0, before.size() - 20));
    Store again = open(20'000);
    EXPECT_EQ(gather(again.table("t"), {776}), (std::vector<float>{1, 2, 3, 4, 5}));
    EXPECT_THROW(again.table("t").resize(3), InvalidArgument);
    again.remove("t");
    EXPECT_TRUE(std::filesystem::exists(file));
    EXPECT_FALSE(std::filesystem::exists(path() / "t.npy"));
  }
}

TEST_F(ImportTest, AdoptedReadOnlyFilesRefuseWrites) {
  const auto file = make_npy("a.npy", 10, 2);
  Store store = open(1 << 20);
  Table table = store.adopt("t", file, /*writable=*/false);
  EXPECT_FALSE(table.writable());
  EXPECT_THAT(message_of<ReadOnlyError>([&] { scatter(table, {1}, {0, 0}); }), HasSubstr("a.npy"));
  EXPECT_EQ(gather(table, {1}), (std::vector<float>{2, 3}));
}

TEST_F(ImportTest, WhatCannotBeUsedInPlaceIsRefused) {
  Store store = open(1 << 20);
  const auto before = snapshot(path());
  const auto refused = [&](const std::filesystem::path& file) {
    std::string message;
    try {
      store.adopt("t", file);
      ADD_FAILURE() << file;
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_EQ(snapshot(path()), before);
    return message;
  };
  EXPECT_THAT(refused(make_npy("u4.npy", 4, 2, 0, "<u4")), HasSubstr("<u4"));
  EXPECT_THAT(refused(directory_ / "missing.npy"), HasSubstr("missing.npy"));
  test::write_text(directory_ / "short.npy", test::file_text(make_npy("a.npy", 100, 2)).substr(0, 500));
  EXPECT_THAT(refused(directory_ / "short.npy"), HasSubstr("truncated"));
  test::write_text(directory_ / "one.npy", format_npy_header("<f4", {}, 0, {8}, 0) + std::string(32, '\0'));
  EXPECT_THAT(refused(directory_ / "one.npy"), HasSubstr("(8,)"));
  const auto file = make_npy("a.npy", 10, 2);
  store.adopt("first", file);
  EXPECT_THROW(store.adopt("second", file), AlreadyExists);
}

TEST_F(ImportTest, AnAdoptedFileThatChangedShapeIsRefusedOnOpen) {
  const auto file = make_npy("a.npy", 10, 2);
  open(1 << 20).adopt("t", file);
  make_npy("a.npy", 11, 2);
  EXPECT_THAT(message_of<FormatError>([&] { open(1 << 20).table("t"); }), HasSubstr("a.npy"));
}

}  // namespace
}  // namespace embermap
