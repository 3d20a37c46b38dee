#include "io/rows.hpp"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include "io/npy.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using testing::bytes_of;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;

class RowsTest : public testing::FolderTest {
 protected:
  Location location(std::string_view text) const { return parse_location(at(text).string()); }

  // All rows, `step` at a time.
  template <class T>
  static std::vector<T> read_all(RowReader& reader, std::uint64_t step) {
    std::vector<T> out(reader.rows() * reader.dim());
    for (std::uint64_t row = 0; row < reader.rows(); row += step)
      reader.read(row, std::min(step, reader.rows() - row), reinterpret_cast<std::byte*>(out.data() + row * reader.dim()));
    return out;
  }

  // A file whose descr and order are as given; NpyHeader's own writer knows neither big-endian nor Fortran order.
  void make_npy(std::string_view name, std::string_view descr, std::string_view order, std::string_view shape,
                std::string_view data, std::string_view padding = "") const {
    const std::string body = "{'descr': " + std::string(descr) + ", 'fortran_order': " + std::string(order) +
                             ", 'shape': " + std::string(shape) + ", }" + std::string(padding) + "\n";
    std::string text = "\x93NUMPY\x01";
    text += '\0';
    text += static_cast<char>(body.size() & 0xFF);
    text += static_cast<char>(body.size() >> 8);
    make_file(at(name), text + body + std::string(data));
  }
};

std::vector<float> counting(std::size_t count) {
  std::vector<float> out(count);
  std::iota(out.begin(), out.end(), 0.0F);
  return out;
}

TEST_F(RowsTest, LocationsAreSplitAtTheLastColonThatCan) {
  using Format = Location::Format;
  const auto expect = [](std::string_view text, std::string_view file, std::string_view selector, Format format) {
    const Location location = parse_location(text);
    EXPECT_EQ(location.file, file) << text;
    EXPECT_EQ(location.selector, selector) << text;
    EXPECT_EQ(location.format, format) << text;
  };
  expect("x.npy", "x.npy", "", Format::kNpy);
  expect("X.NPY", "X.NPY", "", Format::kNpy);
  expect("a/x.npy:weight", "a/x.npy", "weight", Format::kNpy);
  expect("x.h5:/a/b", "x.h5", "/a/b", Format::kHdf5);
  expect("x.hdf5:a", "x.hdf5", "a", Format::kHdf5);
  expect("x.he5", "x.he5", "", Format::kHdf5);
  expect("x.h5:/ds:field", "x.h5", "/ds:field", Format::kHdf5);
  expect("a:b/x.npy", "a:b/x.npy", "", Format::kNpy);
  expect("a:b/x.npy:f", "a:b/x.npy", "f", Format::kNpy);
  expect("\xFF.npy:f", "\xFF.npy", "f", Format::kNpy);
  expect("a\n b.npy", "a\n b.npy", "", Format::kNpy);
}

TEST_F(RowsTest, LocationsThatExistAreTakenWhole) {
  std::filesystem::create_directory(at("d.h5:2"));
  make_file(at("d.h5:2/x.npy"), "");
  EXPECT_EQ(location("d.h5:2/x.npy").file, at("d.h5:2/x.npy"));
  EXPECT_EQ(location("d.h5:2/new.npy").file, at("d.h5:2/new.npy"));
  EXPECT_EQ(location("e.h5:2/new.npy").file, at("e.h5"));
  make_file(at("odd.npy:x.h5"), "");
  EXPECT_EQ(location("odd.npy:x.h5").file, at("odd.npy:x.h5"));
  make_file(at("y.h5"), "");
  EXPECT_EQ(location("y.h5:/a.npy:f").file, at("y.h5"));
}

TEST_F(RowsTest, UnknownExtensionsAreRefusedWithTheKnownOnes) {
  const LocationOptions writing{.format = {}, .use = LocationOptions::Use::kWrite};
  for (const std::string_view text : {"x.xyz", "x", "x.npy/", "x.xyz:npy", "", "x.npyz", "x.npy:", ":x"})
    EXPECT_THROW(parse_location(text, writing), InvalidArgument) << text;
  make_file(at("x.xyz"), "what is this");
  for (const LocationOptions& options : {LocationOptions{}, writing})
    EXPECT_THAT(error_of<InvalidArgument>([&] { parse_location(at("x.xyz").native(), options); }),
                HasSubstr(".npy, .npz, .h5, .hdf5, .he5"));
  // What is to be read has to be there before it can be of a format.
  for (const std::string_view text : {"y.xyz", "y", "y.npy/", "y.xyz:npy", "y.npyz"}) {
    const std::string path = at(text).string();
    const std::string error = error_of<IoError>([&] { parse_location(path); });
    EXPECT_THAT(error, AllOf(HasSubstr(path), HasSubstr("No such file"))) << text;
  }
  for (const std::string_view text : {"", "y.npy:"}) EXPECT_THROW(parse_location(text), InvalidArgument) << text;
  EXPECT_THROW(parse_location(std::string_view("x\0.npy", 6)), InvalidArgument);
}

TEST_F(RowsTest, TheContentOfAFileTellsItsFormatBeforeItsName) {
  using Format = Location::Format;
  const auto writer = create_rows(location("x.npy"), 0, 2, DType::kFloat32);
  writer->finish();
  std::filesystem::rename(at("x.npy"), at("x.h5"));
  EXPECT_EQ(location("x.h5").format, Format::kNpy);
  EXPECT_EQ(location("x.h5:f").format, Format::kNpy);
  EXPECT_EQ(open_rows(location("x.h5"))->dim(), 2U);
  // A file that will be replaced is what its new name says.
  const LocationOptions writing{.format = {}, .use = LocationOptions::Use::kWrite};
  EXPECT_EQ(parse_location(at("x.h5").native(), writing).format, Format::kHdf5);
  // Without a known extension, alone and with a selector.
  std::filesystem::rename(at("x.h5"), at("plain"));
  EXPECT_EQ(location("plain").format, Format::kNpy);
  const Location part = location("plain:f");
  EXPECT_EQ(part.format, Format::kNpy);
  EXPECT_EQ(part.file, at("plain"));
  EXPECT_EQ(part.selector, "f");
  EXPECT_THROW(parse_location(at("plain").native(), writing), InvalidArgument);
  // What is no file of any format is what its name says, and refused when it is read.
  make_file(at("text.npy"), "these are words, and not numbers at all");
  EXPECT_EQ(location("text.npy").format, Format::kNpy);
  make_file(at("words"), "these are words, and not numbers at all");
  EXPECT_THAT(error_of<InvalidArgument>([&] { location("words"); }), HasSubstr("neither its content nor its extension"));
}

TEST_F(RowsTest, AFormatThatIsNamedCounts) {
  using Format = Location::Format;
  make_file(at("words.npy"), "these are words");
  const LocationOptions hdf5{.format = Format::kHdf5};
  EXPECT_EQ(parse_location(at("words.npy").native(), hdf5).format, Format::kHdf5);
  const Location named = parse_location("new.dat:/a/b", hdf5);
  EXPECT_EQ(named.file, "new.dat");
  EXPECT_EQ(named.selector, "/a/b");
  EXPECT_EQ(parse_location("new.dat:a", {.format = Format::kNpy}).file, "new.dat:a");  // which has no parts to name
  EXPECT_EQ(parse_format("hdf5"), Format::kHdf5);
  EXPECT_EQ(format_name(Format::kNpy), "npy");
  EXPECT_THAT(error_of<InvalidArgument>([] { parse_format("HDF5"); }), HasSubstr("npy, "));
}

TEST_F(RowsTest, EntriesOfAFile) {
  create_rows(location("x.npy"), 0, 3, DType::kFloat16)->finish();
  const std::vector<Entry> plain = list_entries(at("x.npy"), Location::Format::kNpy);
  ASSERT_EQ(plain.size(), 1U);
  EXPECT_EQ(plain[0].name, "");
  EXPECT_THAT(plain[0].shape, ElementsAre(0, 3));
  EXPECT_EQ(plain[0].dtype, "float16");
  make_npy("r.npy", "[('id', '<i8'), ('v', '<f4', (2,))]", "False", "(2,)", std::string(32, 'x'));
  const std::vector<Entry> fields = list_entries(at("r.npy"), Location::Format::kNpy);
  ASSERT_EQ(fields.size(), 2U);
  EXPECT_EQ(fields[1].name, "v");
  EXPECT_THAT(fields[1].shape, ElementsAre(2, 2));
  EXPECT_EQ(fields[1].bytes, 16U);
  create_rows(location("x.h5:/g/v"), 0, 3, DType::kInt8)->finish();
  const std::vector<Entry> datasets = list_entries(at("x.h5"), Location::Format::kHdf5);
  ASSERT_EQ(datasets.size(), 1U);
  EXPECT_EQ(datasets[0].name, "/g/v");
  EXPECT_EQ(datasets[0].dtype, "int8");
}

TEST_F(RowsTest, NpyRoundTripOfEveryDtype) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                            DType::kInt32, DType::kInt64}) {
    constexpr std::uint64_t kRows = 101, kDim = 7;
    std::vector<std::byte> data(kRows * kDim * item_size(dtype));
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + 3);
    const auto writer = create_rows(location("x.npy"), kRows, kDim, dtype, {.overwrite = true});
    const std::uint64_t row_bytes = kDim * item_size(dtype);
    for (std::uint64_t row = 0; row < kRows; row += 10)
      writer->write(std::min<std::uint64_t>(10, kRows - row), data.data() + row * row_bytes);
    writer->finish();
    ReadOptions options;
    options.dtype = dtype;
    const auto reader = open_rows(location("x.npy"), options);
    EXPECT_EQ(reader->rows(), kRows);
    EXPECT_EQ(reader->dim(), kDim);
    EXPECT_EQ(reader->dtype(), dtype);
    EXPECT_EQ(read_npy_header(File::open(at("x.npy"), File::Mode::kRead)).data_offset % 64, 0U);
    std::vector<std::byte> back(data.size());
    reader->read(0, kRows, back.data());
    EXPECT_EQ(back, data);
  }
}

TEST_F(RowsTest, WriterWithoutFinishLeavesNothing) {
  {
    const auto writer = create_rows(location("x.npy"), 2, 3, DType::kFloat32);
    const auto data = counting(9);
    writer->write(1, reinterpret_cast<const std::byte*>(data.data()));
    EXPECT_THAT(error_of<InvalidArgument>([&] { writer->finish(); }), HasSubstr("only 1 of the 2 rows"));
    EXPECT_THAT(error_of<InvalidArgument>([&] { writer->write(2, reinterpret_cast<const std::byte*>(data.data())); }),
                HasSubstr("2 rows were promised"));
  }
  EXPECT_THAT(names(), IsEmpty());
  make_file(at("x.npy"), "old");
  EXPECT_THROW(create_rows(location("x.npy"), 1, 1, DType::kFloat32), AlreadyExists);
  { const auto writer = create_rows(location("x.npy"), 1, 1, DType::kFloat32, {.overwrite = true}); }
  EXPECT_EQ(file_text(at("x.npy")), "old");
}

TEST_F(RowsTest, TablesThatCannotBeAreRefusedBeforeAnythingIsMade) {
  EXPECT_THROW(create_rows(location("x.npy"), 1, 0, DType::kFloat32), InvalidArgument);
  EXPECT_THROW(create_rows(location("x.npy"), std::uint64_t{1} << 40, std::uint64_t{1} << 40, DType::kFloat32), InvalidArgument);
  EXPECT_THROW(create_rows(location("x.npy:f"), 1, 1, DType::kFloat32), InvalidArgument);
  EXPECT_THROW(create_rows(location("x.npy"), 1, 1, DType::kFloat32, {.gzip = 4}), InvalidArgument);
  EXPECT_THROW(create_rows(location("x.h5"), 1, 1, DType::kFloat32, {.gzip = 10}), InvalidArgument);
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(RowsTest, DiskTooSmallIsNoticedBeforeTheWork) {
  // More than any file may have.
  EXPECT_THROW(create_rows(location("x.npy"), std::uint64_t{1} << 58, 8, DType::kFloat32), Error);
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(RowsTest, EmptyTables) {
  create_rows(location("x.npy"), 0, 300, DType::kFloat32)->finish();
  const auto reader = open_rows(location("x.npy"));
  EXPECT_EQ(reader->rows(), 0U);
  EXPECT_EQ(reader->dim(), 300U);
  reader->read(0, 0, nullptr);
  EXPECT_GE(reader->block_rows(), 1U);
  EXPECT_THROW(reader->read(0, 1, nullptr), InvalidArgument);
  make_npy("z.npy", "'<f4'", "False", "(300, 0)", "");
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("z.npy")); }), HasSubstr("(300, 0)"));
}

TEST_F(RowsTest, ShapesWithoutRowsOrColumnsAreRefusedWithTheirShape) {
  for (const std::string_view shape : {"()", "(3, 0)", "(3, 4, 0)", "(0, 3037000500, 0, 9)"}) {
    make_npy("s.npy", "'<f4'", "False", shape, std::string(48, '\0'));
    EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("s.npy")); }),
                AllOf(HasSubstr("s.npy"), HasSubstr(std::string(shape))));
  }
  make_npy("s.npy", "'<f4'", "False", "(0, 4294967296, 4294967296)", "");
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("s.npy")); }), HasSubstr("columns are past 64 bits"));
}

TEST_F(RowsTest, RowsAreTheFirstOfAnyDimensions) {
  const auto expect = [&](std::string_view shape, std::uint64_t rows, std::uint64_t dim) {
    make_npy("s.npy", "'<f4'", "False", shape, bytes_of(counting(rows * dim)));
    const auto reader = open_rows(location("s.npy"));
    EXPECT_EQ(reader->rows(), rows) << shape;
    EXPECT_EQ(reader->dim(), dim) << shape;
    ASSERT_EQ(reader->remarks().size(), 1U) << shape;
    EXPECT_THAT(reader->remarks()[0].text,
                AllOf(HasSubstr("s.npy"), HasSubstr(fmt::format("{} rows of", rows)), HasSubstr(shape)));
    EXPECT_FALSE(reader->remarks()[0].doubt);
    for (const std::uint64_t step : {1U, 2U, 1000U}) EXPECT_EQ(read_all<float>(*reader, step), counting(rows * dim)) << shape;
  };
  expect("(3,)", 3, 1);
  expect("(0,)", 0, 1);
  expect("(3, 4, 1)", 3, 4);
  expect("(1, 3, 4)", 1, 12);
  expect("(7, 2, 3, 5)", 7, 30);
}

// Element (r, i, j, ...) of an array in Fortran order holds its place in C order.
TEST_F(RowsTest, FortranOrderOfManyDimensions) {
  for (const std::vector<std::uint64_t>& shape :
       {std::vector<std::uint64_t>{5}, {5, 3, 4}, {1, 3, 4}, {3, 1, 4}, {2001, 3, 2, 7}, {3, 200, 1, 90}}) {
    std::uint64_t elements = 1;
    for (const std::uint64_t extent : shape) elements *= extent;
    std::vector<float> data(elements);
    for (std::uint64_t at = 0; at < elements; ++at) {
      std::uint64_t rest = at, place = 0, stride = elements;
      std::vector<std::uint64_t> index;
      for (const std::uint64_t extent : shape) {
        index.push_back(rest % extent);
        rest /= extent;
      }
      for (std::size_t i = 0; i < shape.size(); ++i) place += index[i] * (stride /= shape[i]);
      data[at] = static_cast<float>(place);
    }
    std::string text = "(";
    for (const std::uint64_t extent : shape) text += std::to_string(extent) + ",";
    make_npy("f.npy", "'<f4'", "True", text + ")", bytes_of(data));
    const auto reader = open_rows(location("f.npy"));
    for (const std::uint64_t step : {std::uint64_t{1}, std::uint64_t{7}, reader->rows()})
      EXPECT_EQ(read_all<float>(*reader, step), counting(elements)) << text << " by " << step;
  }
}

TEST_F(RowsTest, FortranOrderIsTransposed) {
  for (const auto& [rows, dim] : {std::pair{3U, 4U}, {1U, 9U}, {9U, 1U}, {1U, 1U}, {1000U, 33U}, {70001U, 5U}, {5U, 3000U}}) {
    std::vector<float> by_column(rows * dim);
    for (std::size_t c = 0; c < dim; ++c)
      for (std::size_t r = 0; r < rows; ++r) by_column[c * rows + r] = static_cast<float>(r * dim + c);
    make_npy("f.npy", "'<f4'", "True", "(" + std::to_string(rows) + ", " + std::to_string(dim) + ")", bytes_of(by_column));
    const auto reader = open_rows(location("f.npy"));
    for (const std::uint64_t step : {std::uint64_t{7}, std::uint64_t{1024}, reader->block_rows()}) {
      if (rows > 10000 && step == 7) continue;
      EXPECT_EQ(read_all<float>(*reader, step), counting(rows * dim)) << rows << " x " << dim;
    }
  }
}

TEST_F(RowsTest, BigEndianIsSwappedInBothOrders) {
  make_npy("b.npy", "'>i4'", "False", "(2, 2)", std::string("\0\0\0\1\0\0\0\2\0\1\x03\x02\xFF\xFF\xFF\xFF", 16), "  ");
  EXPECT_THAT(read_all<std::int32_t>(*open_rows(location("b.npy")), 1), ElementsAre(1, 2, 66306, -1));
  make_npy("b.npy", "'>i8'", "True", "(2, 2)",
           std::string("\0\0\0\0\0\0\0\1", 8) + std::string("\0\0\0\0\0\0\0\2", 8) + std::string("\0\0\0\0\0\0\0\3", 8) +
               std::string("\0\0\0\0\0\0\0\4", 8));
  EXPECT_THAT(read_all<std::int64_t>(*open_rows(location("b.npy")), 2), ElementsAre(1, 3, 2, 4));
  make_npy("b.npy", "'>f2'", "False", "(1, 2)", std::string("\x3C\0\xC0\0", 4));
  EXPECT_THAT(read_all<std::uint16_t>(*open_rows(location("b.npy")), 1), ElementsAre(0x3C00, 0xC000));
}

TEST_F(RowsTest, BoolHasTwoValues) {
  make_npy("b.npy", "'|b1'", "False", "(2, 2)", std::string("\0\1\2\xFF", 4));
  const auto reader = open_rows(location("b.npy"));
  EXPECT_EQ(reader->dtype(), DType::kUInt8);
  EXPECT_THAT(read_all<std::uint8_t>(*reader, 1), ElementsAre(0, 1, 1, 1));
}

TEST_F(RowsTest, DtypesThatATableCannotHoldAreRefused) {
  for (const std::string_view descr :
       {"'<u2'", "'<i2'", "'<u4'", "'<u8'", "'<c8'", "'<M8[s]'", "'<U1'", "'|S4'", "'<f16'", "'|V3'"}) {
    make_npy("d.npy", descr, "False", "(1, 1)", std::string(16, '\0'));
    EXPECT_THAT(error_of<DTypeError>([&] { open_rows(location("d.npy")); }),
                AllOf(HasSubstr("d.npy"), HasSubstr("float32, float16")));
  }
  make_npy("d.npy", "'<V2'", "False", "(1, 2)", std::string("\x80\x3F\0\xC0", 4));
  EXPECT_THAT(error_of<DTypeError>([&] { open_rows(location("d.npy")); }), HasSubstr("bfloat16"));
  EXPECT_EQ(open_rows(location("d.npy"), {.dtype = DType::kBFloat16})->dtype(), DType::kBFloat16);
  make_npy("d.npy", "'<f4'", "False", "(1, 2)", std::string(8, '\0'));
  EXPECT_THAT(error_of<DTypeError>([&] { open_rows(location("d.npy"), {.dtype = DType::kFloat16}); }),
              AllOf(HasSubstr("float32"), HasSubstr("float16")));
}

TEST_F(RowsTest, FieldOfATableFileIsReadBySelector) {
  // As a trained table lies on disk: data at byte 4096, records padded to 32 bytes.
  const std::vector<NpyField> fields{{"weight", "<f4", {3}, 0, 12}, {"sum", "<f4", {3}, 12, 12}};
  std::string text = format_npy_header("", fields, 32, {5}, 4096);
  for (int row = 0; row < 5; ++row) {
    std::vector<float> record(8, -1);
    for (int i = 0; i < 3; ++i) {
      record[static_cast<std::size_t>(i)] = static_cast<float>(row * 3 + i);
      record[static_cast<std::size_t>(3 + i)] = static_cast<float>(100 + row * 3 + i);
    }
    text += bytes_of(record);
  }
  make_file(at("items.npy"), text);
  EXPECT_EQ(read_all<float>(*open_rows(location("items.npy:weight")), 2), counting(15));
  const auto sums = read_all<float>(*open_rows(location("items.npy:sum")), 5);
  EXPECT_EQ(sums.front(), 100);
  EXPECT_EQ(sums.back(), 114);
  EXPECT_THAT(error_of<DTypeError>([&] { open_rows(location("items.npy")); }),
              AllOf(HasSubstr("weight: <f4 (3,)"), HasSubstr("sum")));
  EXPECT_THAT(error_of<NotFound>([&] { open_rows(location("items.npy:step")); }),
              AllOf(HasSubstr("'step'"), HasSubstr("weight")));
  make_npy("plain.npy", "'<f4'", "False", "(1, 1)", std::string(4, '\0'));
  EXPECT_THROW(open_rows(location("plain.npy:weight")), NotFound);
}

TEST_F(RowsTest, ScalarFieldOfATwoDimensionalArrayOfRecords) {
  std::string data, by_column;
  for (int i = 0; i < 12; ++i) data += '\x7F' + bytes_of(std::vector<float>{static_cast<float>(i)});
  for (int c = 0; c < 4; ++c)
    for (int r = 0; r < 3; ++r) by_column += '\x7F' + bytes_of(std::vector<float>{static_cast<float>(r * 4 + c)});
  make_npy("c.npy", "[('k', '|i1'), ('x', '<f4')]", "False", "(3, 4)", data);
  make_npy("f.npy", "[('k', '|i1'), ('x', '<f4')]", "True", "(3, 4)", by_column);
  EXPECT_EQ(read_all<float>(*open_rows(location("c.npy:x")), 2), counting(12));
  EXPECT_EQ(read_all<float>(*open_rows(location("f.npy:x")), 2), counting(12));
}

TEST_F(RowsTest, FarRowsOfALargeSparseFile) {
  const std::string header = format_npy_header("<f4", {}, 0, {33554433, 64}, 0);
  make_file(at("big.npy"), header);
  std::filesystem::resize_file(at("big.npy"), header.size() + std::uint64_t{33554433} * 256);
  {
    const File file = File::open(at("big.npy"), File::Mode::kReadWrite);
    for (const std::uint64_t row : {0U, 16777216U, 33554431U, 33554432U})
      file.write(header.size() + row * 256, bytes_of(std::vector<float>{static_cast<float>(row)}));
  }
  const auto reader = open_rows(location("big.npy"));
  std::vector<float> row(64);
  for (const std::uint64_t id : {0U, 16777216U, 33554431U, 33554432U}) {
    reader->read(id, 1, reinterpret_cast<std::byte*>(row.data()));
    EXPECT_EQ(row[0], static_cast<float>(id));
    EXPECT_EQ(row[1], 0);
  }
  EXPECT_THROW(reader->read(33554432, 2, nullptr), InvalidArgument);
}

TEST_F(RowsTest, InputIsNeverChanged) {
  make_npy("t.npy", "'<f4'", "False", "(100, 8)", std::string(1000, 'a'));
  const std::string before = file_text(at("t.npy"));
  const auto time = std::filesystem::last_write_time(at("t.npy"));
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("t.npy")); }), HasSubstr("1000 of 3200 bytes"));
  EXPECT_EQ(file_text(at("t.npy")), before);
  EXPECT_EQ(std::filesystem::last_write_time(at("t.npy")), time);
}

TEST_F(RowsTest, CopyConvertsInBlocksWithinTheMemoryAndReportsProgress) {
  const auto data = counting(1000 * 5);
  make_npy("in.npy", "'<f4'", "False", "(1000, 5)", bytes_of(data));
  const auto reader = open_rows(location("in.npy"));
  std::vector<std::uint64_t> done;
  const auto writer = create_rows(location("out.npy"), 1000, 5, DType::kInt32);
  const ConversionReport report =
      copy_rows(*reader, *writer, DType::kInt32, 300 * 40, [&](std::uint64_t now, std::uint64_t total) {
        EXPECT_EQ(total, 1000U);
        done.push_back(now);
      });
  writer->finish();
  EXPECT_THAT(done, ElementsAre(300, 600, 900, 1000));
  EXPECT_EQ(report.became_zero, 0U);
  const auto out = read_all<std::int32_t>(*open_rows(location("out.npy")), 1000);
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], static_cast<std::int32_t>(i));

  EXPECT_THAT(error_of<BudgetError>([&] { copy_rows(*reader, *writer, DType::kInt32, 39, {}); }), HasSubstr("40 B"));
}

TEST_F(RowsTest, CopyNamesRowAndColumnOfAValueThatDoesNotFit) {
  auto data = counting(1000 * 5);
  data[777 * 5 + 3] = 0.5F;
  make_npy("in.npy", "'<f4'", "False", "(1000, 5)", bytes_of(data));
  const auto reader = open_rows(location("in.npy"));
  const auto writer = create_rows(location("out.npy"), 1000, 5, DType::kInt32);
  EXPECT_THAT(error_of<DTypeError>([&] { copy_rows(*reader, *writer, DType::kInt32, 300 * 40, {}); }),
              AllOf(HasSubstr("in.npy"), HasSubstr("row 777, column 3"), HasSubstr("0.5")));
}

TEST_F(RowsTest, ProgressMayStopTheCopy) {
  make_npy("in.npy", "'<f4'", "False", "(10, 1)", std::string(40, '\0'));
  struct Stop {};
  {
    const auto reader = open_rows(location("in.npy"));
    const auto writer = create_rows(location("out.npy"), 10, 1, DType::kFloat32);
    EXPECT_THROW(copy_rows(*reader, *writer, DType::kFloat32, 8, [](std::uint64_t, std::uint64_t) { throw Stop(); }), Stop);
  }
  EXPECT_THAT(names(), ElementsAre("in.npy"));
}

// Rows 0, 1, 2, ... (or as `value` says), read and written in memory, in blocks of `unit`; says which thread came for them, and
// whether reader and writer were at work together.
struct Work {
  std::atomic<bool> reading{false}, writing{false}, together{false};
  bool slow = false;                     // both sides wait a while for each other
  std::vector<std::thread::id> readers;  // one a block
  std::uint64_t largest = 0;             // rows of a block

  void meet(const std::atomic<bool>& other) {
    for (int i = 0; i < 200 && slow && !other; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (other) together = true;
  }
};

class CountingReader final : public RowReader {
 public:
  CountingReader(Work& work, std::uint64_t rows, std::uint64_t unit) : work_{work}, unit_{unit} {
    rows_ = rows;
    dim_ = 1;
  }
  std::string description() const override { return "numbers"; }
  std::uint64_t block_rows() const override { return unit_; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    work_.reading = true;
    work_.readers.push_back(std::this_thread::get_id());
    work_.largest = std::max(work_.largest, count);
    if (fails_at >= first && fails_at < first + count) throw IoError(EIO, "read", "numbers");
    for (std::uint64_t i = 0; i < count; ++i) {
      const float value = first + i == half_at ? 0.5F : static_cast<float>(first + i);
      std::memcpy(out + 4 * i, &value, 4);
    }
    work_.meet(work_.writing);
    work_.reading = false;
  }
  std::uint64_t fails_at = UINT64_MAX, half_at = UINT64_MAX;

 private:
  Work& work_;
  std::uint64_t unit_;
};

class CollectingWriter final : public RowWriter {
 public:
  explicit CollectingWriter(Work& work) : work_{work} {}
  void write(std::uint64_t count, const std::byte* rows) override {
    work_.writing = true;
    threads.push_back(std::this_thread::get_id());
    if (fails_at < count_ + count) throw IoError(ENOSPC, "write", "collected");
    count_ += count;
    work_.meet(work_.reading);
    bytes.insert(bytes.end(), rows, rows + count * 4);
    work_.writing = false;
  }
  void finish() override {}
  std::vector<std::byte> bytes;
  std::vector<std::thread::id> threads;
  std::uint64_t fails_at = UINT64_MAX;

 private:
  Work& work_;
  std::uint64_t count_ = 0;
};

TEST(CopyRows, TheNextBlockIsReadWhileOneIsWritten) {
  Work work;
  CountingReader reader(work, 10'007, 1000);
  work.slow = true;
  CollectingWriter writer(work);
  std::vector<std::uint64_t> done;
  std::vector<std::thread::id> told;
  copy_rows(reader, writer, DType::kFloat32, 2 * 4 * 1000, [&](std::uint64_t now, std::uint64_t total) {
    EXPECT_EQ(total, 10'007U);
    done.push_back(now);
    told.push_back(std::this_thread::get_id());
  });
  EXPECT_THAT(done, ElementsAre(1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10'000, 10'007));
  EXPECT_THAT(told, ::testing::Each(std::this_thread::get_id()));
  EXPECT_THAT(writer.threads, ::testing::Each(std::this_thread::get_id()));
  EXPECT_THAT(work.readers, ::testing::Each(::testing::AllOf(::testing::Ne(std::this_thread::get_id()), work.readers.front())));
  EXPECT_TRUE(work.together);
  ASSERT_EQ(writer.bytes.size(), 4U * 10'007);
  for (std::uint64_t i = 0; i < 10'007; ++i) {
    float value = 0;
    std::memcpy(&value, writer.bytes.data() + 4 * i, 4);
    ASSERT_EQ(value, static_cast<float>(i));
  }
}

TEST(CopyRows, BlocksStayWithinTheMemory) {
  struct Case {
    std::uint64_t memory, block;
    bool ahead;
  };
  // float32: 4 bytes a row in, as int64 8 out. Two blocks take 8, or 4 + 2 * 8; where they are not of 1000 rows, one at a time.
  for (const auto& [memory, block, ahead] : {Case{8000, 1000, true}, Case{7999, 1000, false}, Case{4000, 1000, false},
                                             Case{3999, 999, false}, Case{15'999, 1000, true}, Case{16'000, 2000, true}}) {
    Work work;
    CountingReader reader(work, 10'000, 1000);
    CollectingWriter writer(work);
    copy_rows(reader, writer, DType::kFloat32, memory, {});
    EXPECT_EQ(work.largest, block) << memory;
    EXPECT_EQ(work.readers.front() != std::this_thread::get_id(), ahead) << memory;
  }
  for (const auto& [memory, block, ahead] :
       {Case{20'000, 1000, true}, Case{19'999, 1000, false}, Case{12'000, 1000, false}, Case{11'999, 999, false}}) {
    Work work;
    CountingReader reader(work, 10'000, 1000);
    CollectingWriter writer(work);
    copy_rows(reader, writer, DType::kInt64, memory, {});
    EXPECT_EQ(work.largest, block) << memory;
    EXPECT_EQ(work.readers.front() != std::this_thread::get_id(), ahead) << memory;
  }
}

TEST(CopyRows, ErrorsOfEitherSideEndTheCopyWithTheRowsBeforeThem) {
  for (const std::uint64_t at : {0U, 999U, 1000U, 5500U, 9999U}) {
    Work work;
    CountingReader reader(work, 10'000, 1000);
    CollectingWriter writer(work);
    std::uint64_t done = 0;
    const Progress progress = [&](std::uint64_t now, std::uint64_t) { done = now; };
    const auto copy = [&](DType to) { copy_rows(reader, writer, to, 20'000, progress); };
    reader.fails_at = at;
    EXPECT_THAT(error_of<IoError>([&] { copy(DType::kFloat32); }), HasSubstr("numbers")) << at;
    EXPECT_LE(done, at);
    EXPECT_EQ(writer.bytes.size(), 4 * done);
    EXPECT_GT(done + 2000, at) << "rows before the error were not written";

    reader.fails_at = UINT64_MAX;
    reader.half_at = at;
    EXPECT_THAT(error_of<DTypeError>([&] { copy(DType::kInt32); }), HasSubstr("row " + std::to_string(at) + ", column 0"));

    reader.half_at = UINT64_MAX;
    CollectingWriter full(work);
    full.fails_at = at;
    reader.fails_at = at + 1000;  // read ahead
    EXPECT_THAT(error_of<IoError>([&] { copy_rows(reader, full, DType::kFloat32, 8000, {}); }), HasSubstr("collected"));
    EXPECT_EQ(full.bytes.size(), at / 1000 * 4000);
  }
}

TEST(CopyRows, ProgressStopsACopyThatReadsAhead) {
  struct Stop {};
  Work work;
  CountingReader reader(work, 10'000, 1000);
  CollectingWriter writer(work);
  EXPECT_THROW(copy_rows(reader, writer, DType::kFloat32, 8000,
                         [](std::uint64_t done, std::uint64_t) {
                           if (done == 3000) throw Stop();
                         }),
               Stop);
  EXPECT_EQ(writer.bytes.size(), 4U * 3000);
  EXPECT_LE(work.readers.size(), 4U);
}

TEST_F(RowsTest, RowsOpenedAsTheirNewDtype) {
  make_npy("raw.npy", "'|V2'", "False", "(1, 2)", std::string_view("\x80\x3f\x00\x40", 4));
  make_npy("f.npy", "'<f4'", "False", "(1, 1)", std::string(4, '\0'));
  make_npy("u.npy", "'<u4'", "False", "(1, 1)", std::string(4, '\0'));
  EXPECT_EQ(open_rows_as(location("raw.npy"), DType::kBFloat16)->dtype(), DType::kBFloat16);
  EXPECT_EQ(open_rows_as(location("raw.npy"), DType::kFloat32, {.dtype = DType::kBFloat16})->dtype(), DType::kBFloat16);
  EXPECT_EQ(open_rows_as(location("f.npy"), DType::kBFloat16)->dtype(), DType::kFloat32);
  EXPECT_EQ(open_rows_as(location("f.npy"), {})->dtype(), DType::kFloat32);
  for (const std::optional<DType> to : {std::optional<DType>(), std::optional(DType::kFloat32)})
    EXPECT_THAT(error_of<DTypeError>([&] { open_rows_as(location("raw.npy"), to); }), HasSubstr("say so"));
  EXPECT_THROW(open_rows_as(location("f.npy"), DType::kBFloat16, {.dtype = DType::kBFloat16}), DTypeError);
  EXPECT_THAT(error_of<DTypeError>([&] { open_rows_as(location("u.npy"), DType::kBFloat16); }), HasSubstr("u4"));
}

TEST_F(RowsTest, CopyOverItsOwnSource) {
  make_npy("x.npy", "'<f4'", "True", "(2, 3)", bytes_of(std::vector<float>{0, 3, 1, 4, 2, 5}));
  std::filesystem::create_symlink("x.npy", at("link.npy"));
  const auto reader = open_rows(location("x.npy"));
  const auto writer = create_rows(location("link.npy"), 2, 3, DType::kFloat32, {.overwrite = true});
  copy_rows(*reader, *writer, DType::kFloat32, 12, {});
  writer->finish();
  EXPECT_EQ(read_all<float>(*open_rows(location("x.npy")), 2), counting(6));
  EXPECT_TRUE(std::filesystem::is_symlink(at("link.npy")));
}

}  // namespace
}  // namespace embermap
