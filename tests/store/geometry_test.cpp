#include "store/geometry.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "store/schema.hpp"

namespace embermap {
namespace {

TEST(Geometry, PlainRowsOf512BytesFillPagesExactly) {
  const Geometry g = make_geometry(1000, 512, 4, false, 4096);
  EXPECT_EQ(g.stride, 512U);
  EXPECT_EQ(g.rows_per_page, 8U);
  EXPECT_EQ(g.page_bytes(), 4096U);
  EXPECT_EQ(g.pages(), 125U);
  EXPECT_EQ(g.offset_of(3), 4096U + 3 * 4096U);
  EXPECT_EQ(g.file_bytes(), 4096U + 512000U);
}

TEST(Geometry, LastPageIsCutAtTheLastRecord) {
  const Geometry g = make_geometry(17, 512, 4, false, 4096);
  EXPECT_EQ(g.pages(), 3U);
  EXPECT_EQ(g.rows_in(2), 1U);
  EXPECT_EQ(g.bytes_in(2), 512U);
  EXPECT_EQ(g.rows_in(3), 0U);
}

TEST(Geometry, NoRowsHaveNoPages) {
  const Geometry g = make_geometry(0, 512, 4, false, 4096);
  EXPECT_EQ(g.pages(), 0U);
  EXPECT_EQ(g.file_bytes(), 4096U);
}

TEST(Geometry, PlainRowsAreNeverPadded) {
  for (std::uint64_t record : {1U, 3U, 100U, 400U, 516U, 1200U, 4095U, 4097U, 65540U}) {
    const Geometry g = make_geometry(10, record, 1, false, 4096);
    EXPECT_EQ(g.stride, record);
    EXPECT_LE(g.page_bytes(), std::max<std::uint64_t>(record, 4096));
    EXPECT_GE(g.rows_per_page, 1U);
  }
}

TEST(Geometry, PaddedRecordsMakePagesOf512BytesWhereThatIsCheap) {
  for (std::uint64_t floats = 1; floats <= 20000; floats = floats * 9 / 8 + 1) {
    for (std::uint64_t option : {4096U, 65536U, 2097152U}) {
      const std::uint64_t record = floats * 4;
      const Geometry g = make_geometry(10, record, 4, true, option);
      EXPECT_GE(g.stride, record);
      EXPECT_LE((g.stride - record) * 8, record) << record;
      EXPECT_EQ(g.stride % 4, 0U);
      if (g.stride != record) {
        EXPECT_EQ(g.page_bytes() % 512, 0U) << record;
      }
      EXPECT_LE(g.page_bytes(), std::max(option, g.stride));
    }
  }
  EXPECT_EQ(make_geometry(10, 1000, 4, true, 4096).stride, 1024U);
  EXPECT_EQ(make_geometry(10, 1024, 4, true, 4096).rows_per_page, 4U);
}

TEST(Geometry, RecordLongerThanAPageHasAPageOfItsOwn) {
  const Geometry g = make_geometry(10, 131072, 4, true, 4096);
  EXPECT_EQ(g.rows_per_page, 1U);
  EXPECT_EQ(g.page_bytes(), 131072U);
}

TEST(Geometry, RowsPastTwoToThe32HaveTheirOwnBytes) {
  const Geometry g = make_geometry(1ULL << 33, 1024, 4, true, 4096);
  EXPECT_EQ(g.offset_of(g.page_of((1ULL << 33) - 1)) + g.slot_of((1ULL << 33) - 1) * 1024, 4096 + ((1ULL << 33) - 1) * 1024);
}

TEST(Geometry, RefusesWhatAFileCannotHold) {
  EXPECT_THROW(make_geometry(1ULL << 60, 512, 4, false, 4096), InvalidArgument);
  EXPECT_THROW(make_geometry(1ULL << 54, 512, 4, false, 4096), InvalidArgument);
  EXPECT_NO_THROW(make_geometry(1ULL << 53, 512, 4, false, 4096));
}

TEST(Geometry, RefusesOddPageSizes) {
  for (std::uint64_t bytes : {0U, 1U, 2048U, 4097U, 6144U, 4194304U})
    EXPECT_THROW(make_geometry(10, 512, 4, false, bytes), InvalidArgument) << bytes;
}

TEST(Schema, LaysFieldsOutAligned) {
  const Schema plain(3, DType::kFloat16, {});
  EXPECT_FALSE(plain.structured());
  EXPECT_EQ(plain.record_bytes(), 6U);
  const Schema trained(3, DType::kFloat16, Adagrad{.initial_accumulator_value = 0.5});
  ASSERT_EQ(trained.fields().size(), 2U);
  EXPECT_EQ(trained.fields()[1].name, "sum");
  EXPECT_EQ(trained.fields()[1].dtype, DType::kFloat32);
  EXPECT_EQ(trained.fields()[1].offset, 8U);
  EXPECT_EQ(trained.fields()[1].initial, 0.5);
  EXPECT_EQ(trained.record_bytes(), 20U);
  EXPECT_EQ(trained.alignment(), 4U);
  EXPECT_EQ(Schema(128, DType::kFloat32, Sgd{.momentum = 0.9}).fields()[1].name, "momentum_buffer");
  EXPECT_FALSE(Schema(128, DType::kFloat32, Sgd{}).structured());
}

TEST(Schema, RefusesWhatCannotBe) {
  EXPECT_THROW(Schema(0, DType::kFloat32, {}), InvalidArgument);
  EXPECT_THROW(Schema(1ULL << 40, DType::kFloat32, {}), InvalidArgument);
  EXPECT_THROW(Schema(4, DType::kInt32, Adagrad{}), DTypeError);
  EXPECT_THROW(Schema(4, DType::kFloat32, Adagrad{.lr = -1}), InvalidArgument);
  EXPECT_THROW(Schema(4, DType::kFloat32, {}).field("sum"), NotFound);
}

}  // namespace
}  // namespace embermap
