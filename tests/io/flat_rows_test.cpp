// .fvecs, .fbin and their kinds, raw files.
#include <cstring>
#include <numeric>

#include "io/formats.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;

template <class T>
std::string bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

class FlatRowsTest : public testing::FolderTest {
 protected:
  using Open = std::unique_ptr<RowReader> (*)(const Location&, const ReadOptions&);
  using Create = std::unique_ptr<RowWriter> (*)(const Location&, std::uint64_t, std::uint64_t, DType, const WriteOptions&);

  Location location(std::string_view name) const { return {at(name), ""}; }

  static std::string read(Open open, const Location& location, const ReadOptions& options = {}, std::uint64_t step = 1000) {
    const auto reader = open(location, options);
    const std::uint64_t row_bytes = reader->dim() * item_size(reader->dtype());
    std::string out(reader->rows() * row_bytes, '?');
    for (std::uint64_t row = 0; row < reader->rows(); row += step)
      reader->read(row, std::min(step, reader->rows() - row), reinterpret_cast<std::byte*>(out.data() + row * row_bytes));
    return out;
  }
  static void write(Create create, const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                    const std::string& data, std::uint64_t step) {
    const auto writer = create(location, rows, dim, dtype, {});
    const std::uint64_t row_bytes = dim * item_size(dtype);
    for (std::uint64_t row = 0; row < rows; row += step)
      writer->write(std::min(step, rows - row), reinterpret_cast<const std::byte*>(data.data() + row * row_bytes));
    writer->finish();
  }
};

TEST_F(FlatRowsTest, RoundTripsOfEveryKind) {
  struct Kind {
    std::string name;
    DType dtype;
    Open open;
    Create create;
    std::uint64_t header, prefix;
  };
  const std::vector<Kind> kinds{{"x.fvecs", DType::kFloat32, open_vecs_rows, create_vecs_rows, 0, 4},
                                {"x.BVECS", DType::kUInt8, open_vecs_rows, create_vecs_rows, 0, 4},
                                {"x.ivecs", DType::kInt32, open_vecs_rows, create_vecs_rows, 0, 4},
                                {"x.fbin", DType::kFloat32, open_bin_rows, create_bin_rows, 8, 0},
                                {"x.u8bin", DType::kUInt8, open_bin_rows, create_bin_rows, 8, 0},
                                {"x.i8bin", DType::kInt8, open_bin_rows, create_bin_rows, 8, 0},
                                {"x.ibin", DType::kInt32, open_bin_rows, create_bin_rows, 8, 0},
                                {"x.f16bin", DType::kFloat16, open_bin_rows, create_bin_rows, 8, 0},
                                {"x.raw", DType::kBFloat16, open_raw_rows, create_raw_rows, 0, 0},
                                {"y.dat", DType::kFloat64, open_raw_rows, create_raw_rows, 0, 0}};
  for (const Kind& kind : kinds)
    for (const auto& [rows, dim] : {std::pair<std::uint64_t, std::uint64_t>{1, 1}, {1003, 7}, {3, 400'000}}) {
      std::string data(rows * dim * item_size(kind.dtype), '\0');
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 131 + i / 256);
      ReadOptions options;
      if (kind.header + kind.prefix == 0) options = {.dtype = kind.dtype, .dim = dim};
      for (const std::uint64_t step : {rows, std::uint64_t{10}}) {
        write(kind.create, location(kind.name), rows, dim, kind.dtype, data, step);
        EXPECT_EQ(std::filesystem::file_size(at(kind.name)), kind.header + rows * kind.prefix + data.size()) << kind.name;
        EXPECT_TRUE(read(kind.open, location(kind.name), options, step) == data) << kind.name << rows << ' ' << step;
        std::filesystem::remove(at(kind.name));
      }
    }
}

TEST_F(FlatRowsTest, VecsHaveTheirDimensionBeforeEachRow) {
  const std::string row = bytes(std::int32_t{2}) + bytes(1.5F) + bytes(-2.0F);
  make_file(at("x.fvecs"), row + row);
  EXPECT_EQ(read(open_vecs_rows, location("x.fvecs")), bytes(1.5F) + bytes(-2.0F) + bytes(1.5F) + bytes(-2.0F));
  const std::string data = bytes(1.5F) + bytes(-2.0F) + bytes(1.5F) + bytes(-2.0F);
  write(create_vecs_rows, location("y.fvecs"), 2, 2, DType::kFloat32, data, 2);
  EXPECT_EQ(file_text(at("y.fvecs")), row + row);
  write(create_bin_rows, location("y.fbin"), 2, 2, DType::kFloat32, data, 1);
  EXPECT_EQ(file_text(at("y.fbin")), bytes(2) + bytes(2) + data);
}

TEST_F(FlatRowsTest, BrokenVecsAreRefused) {
  const std::string row = bytes(std::int32_t{2}) + bytes(1.5F) + bytes(-2.0F);
  const auto error = [&](const std::string& content) {
    make_file(at("x.fvecs"), content);
    return error_of<FormatError>([&] { read(open_vecs_rows, location("x.fvecs")); });
  };
  EXPECT_THAT(error(row + row + "abc"), AllOf(HasSubstr("27 bytes"), HasSubstr("2 rows of 12 bytes"), HasSubstr("3 bytes more")));
  EXPECT_THAT(error(row + bytes(3) + row.substr(4)),
              AllOf(HasSubstr("row 1 says it has 3 elements (byte 12)"), HasSubstr("row 0 has 2")));
  EXPECT_THAT(error(row + bytes(-2) + row.substr(4)), HasSubstr("-2"));
  EXPECT_THAT(error(bytes(0)), HasSubstr("0 elements"));
  EXPECT_THAT(error(bytes(-1) + row), HasSubstr("-1 elements"));
  EXPECT_THAT(error(bytes(0x7FFFFFFF) + row), HasSubstr("the file has 16"));
  EXPECT_THAT(error("abc"), HasSubstr("3 bytes"));
  EXPECT_THAT(error(""), HasSubstr("empty"));
  EXPECT_EQ(open_vecs_rows(location("x.fvecs"), {.dim = 5})->dim(), 5U);
  make_file(at("x.fvecs"), row);
  EXPECT_THROW(open_vecs_rows(location("x.fvecs"), {.dtype = DType::kUInt8}), DTypeError);
  EXPECT_THROW(open_vecs_rows(location("x.fvecs"), {.dim = 3}), FormatError);
  EXPECT_THROW(open_vecs_rows({at("x.fvecs"), "a"}, {}), NotFound);
  make_file(at("x.vecs"), row);
  EXPECT_THROW(open_vecs_rows(location("x.vecs"), {}), DTypeError);
  EXPECT_EQ(open_vecs_rows(location("x.vecs"), {.dtype = DType::kFloat32})->rows(), 1U);
}

TEST_F(FlatRowsTest, BrokenBinsAreRefused) {
  const auto error = [&](const std::string& content) {
    make_file(at("x.u8bin"), content);
    return error_of<FormatError>([&] { read(open_bin_rows, location("x.u8bin")); });
  };
  EXPECT_THAT(error(bytes(2) + bytes(3) + "abcde"), AllOf(HasSubstr("2 rows of 3 uint8"), HasSubstr("it has 13 bytes")));
  EXPECT_THAT(error(bytes(2) + bytes(3) + "abcdefg"), HasSubstr("1 bytes follow, which would be 2 rows and 1 bytes"));
  EXPECT_THAT(error(bytes(9) + bytes(3) + "abcdef"), HasSubstr("which would be 2 rows"));
  EXPECT_THAT(error(bytes(0xFFFFFFFF) + bytes(0xFFFFFFFF) + "abc"), HasSubstr("4294967295 rows"));
  EXPECT_THAT(error(bytes(2) + bytes(0)), HasSubstr("no columns"));
  EXPECT_THAT(error("1234567"), HasSubstr("7 bytes"));
  make_file(at("x.u8bin"), bytes(0) + bytes(3));
  EXPECT_EQ(open_bin_rows(location("x.u8bin"), {})->rows(), 0U);
}

TEST_F(FlatRowsTest, RawFilesAreWhatOneSays) {
  make_file(at("x.raw"), "headabcdefg");
  EXPECT_EQ(read(open_raw_rows, location("x.raw"), {.dtype = DType::kInt8, .dim = 7, .offset = 4}), "abcdefg");
  EXPECT_THAT(error_of<FormatError>([&] { open_raw_rows(location("x.raw"), {.dtype = DType::kInt8, .dim = 3, .offset = 4}); }),
              AllOf(HasSubstr("7 bytes from byte 4 on"), HasSubstr("2 rows of 3 bytes"), HasSubstr("1 bytes more")));
  EXPECT_THAT(error_of<FormatError>([&] { open_raw_rows(location("x.raw"), {.dtype = DType::kInt8, .dim = 3, .offset = 12}); }),
              HasSubstr("begin at byte 12"));
  EXPECT_EQ(open_raw_rows(location("x.raw"), {.dtype = DType::kInt8, .dim = 3, .offset = 11})->rows(), 0U);
  EXPECT_THAT(error_of<InvalidArgument>([&] { open_raw_rows(location("x.raw"), {}); }), HasSubstr("dtype and its dim"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { open_raw_rows(location("x.raw"), {.dtype = DType::kInt8}); }), HasSubstr("dim"));
  EXPECT_THROW(open_raw_rows(location("x.raw"), {.dtype = DType::kInt64, .dim = std::uint64_t{1} << 62}), InvalidArgument);
}

TEST_F(FlatRowsTest, WhatTheFormatCannotHoldIsRefusedBeforeAnythingIsMade) {
  EXPECT_THAT(error_of<DTypeError>([&] { create_bin_rows(location("x.u8bin"), 1, 1, DType::kFloat32, {}); }),
              AllOf(HasSubstr("uint8"), HasSubstr("float32")));
  EXPECT_THROW(create_vecs_rows(location("x.fvecs"), 1, 1, DType::kFloat64, {}), DTypeError);
  EXPECT_THROW(create_vecs_rows(location("x.bvecs"), 1, std::uint64_t{1} << 31, DType::kUInt8, {}), InvalidArgument);
  EXPECT_THROW(create_bin_rows(location("x.u8bin"), std::uint64_t{1} << 32, 1, DType::kUInt8, {}), InvalidArgument);
  EXPECT_THROW(create_raw_rows({at("x.raw"), "a"}, 1, 1, DType::kUInt8, {}), InvalidArgument);
  { const auto writer = create_bin_rows(location("x.fbin"), 2, 1, DType::kFloat32, {}); }
  EXPECT_THAT(names(), IsEmpty());
}

}  // namespace
}  // namespace embermap
