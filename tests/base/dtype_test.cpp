#include "base/dtype.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"

namespace embermap {
namespace {

struct Row {
  DType dtype;
  const char* name;
  const char* descr;
  std::uint64_t size;
  bool floating;
};
constexpr Row kRows[] = {
    {DType::kFloat32, "float32", "<f4", 4, true},   {DType::kFloat16, "float16", "<f2", 2, true},
    {DType::kBFloat16, "bfloat16", "<V2", 2, true}, {DType::kFloat64, "float64", "<f8", 8, true},
    {DType::kInt8, "int8", "|i1", 1, false},        {DType::kUInt8, "uint8", "|u1", 1, false},
    {DType::kInt32, "int32", "<i4", 4, false},      {DType::kInt64, "int64", "<i8", 8, false},
};

TEST(DType, EachHasItsNameDescrAndSize) {
  for (const Row& row : kRows) {
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(npy_descr(row.dtype), row.descr);
    EXPECT_EQ(item_size(row.dtype), row.size);
    EXPECT_EQ(is_floating(row.dtype), row.floating);
    EXPECT_EQ(parse_dtype(row.name), row.dtype);
  }
}

TEST(DType, ReadsItsOwnDescrButBFloat16) {
  for (const Row& row : kRows) {
    const auto read = dtype_of_npy_descr(row.descr);
    if (row.dtype == DType::kBFloat16)
      EXPECT_EQ(read, std::nullopt);  // two opaque bytes may be anything
    else
      EXPECT_EQ(read, row.dtype);
  }
}

TEST(DType, ReadsNativeOrderHoweverItIsWritten) {
  EXPECT_EQ(dtype_of_npy_descr("=f4"), DType::kFloat32);
  EXPECT_EQ(dtype_of_npy_descr("f4"), DType::kFloat32);
  EXPECT_EQ(dtype_of_npy_descr("i8"), DType::kInt64);
  EXPECT_EQ(dtype_of_npy_descr("<i1"), DType::kInt8);
  EXPECT_EQ(dtype_of_npy_descr(">u1"), DType::kUInt8);
  EXPECT_EQ(dtype_of_npy_descr("u1"), DType::kUInt8);
}

TEST(DType, RefusesForeignDescrs) {
  for (const char* descr : {"", "<", ">f4", ">i8", "|f4", "<u2", "<u4", "<c8", "<M8[s]", "<U5", "|S3", "<f16", "|O", "|V2", "<V2",
                            "|b1", "f4 ", "ff4"})
    EXPECT_EQ(dtype_of_npy_descr(descr), std::nullopt) << descr;
}

TEST(DType, AnUnknownNameIsRefusedWithTheListOfNames) {
  try {
    parse_dtype("uint16");
    FAIL() << "accepted";
  } catch (const DTypeError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("'uint16'"));
    for (const Row& row : kRows) EXPECT_THAT(error.what(), testing::HasSubstr(row.name));
  }
  EXPECT_THROW(parse_dtype(""), DTypeError);
  EXPECT_THROW(parse_dtype("Float32"), DTypeError);
}

}  // namespace
}  // namespace embermap
