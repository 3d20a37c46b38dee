#include "io/hdf5.hpp"

#include <sys/wait.h>

#include <array>
#include <numeric>
#include <thread>

#include "io/rows.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using namespace hdf5;
using ::testing::AllOf;
using testing::bytes_of;
using ::testing::Each;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

std::vector<float> counting(std::size_t count) {
  std::vector<float> out(count);
  std::iota(out.begin(), out.end(), 0.0F);
  return out;
}

class Hdf5Test : public testing::FolderTest {
 protected:
  Location location(std::string_view text) const { return parse_location(at(text).string()); }
  std::unique_ptr<RowReader> open(std::string_view text, const ReadOptions& options = {}) const {
    return open_rows(location(text), options);
  }
  template <class E>
  std::string refuse(std::string_view text, const ReadOptions& options = {}) const {
    return error_of<E>([&] { open(text, options); });
  }

  // As other programs do it: the library's own locking.
  FileId create(std::string_view name) const {
    const PropertyId access{H5Pcreate(H5P_FILE_ACCESS)};
    H5Pset_libver_bounds(access.id(), H5F_LIBVER_EARLIEST, H5F_LIBVER_LATEST);
    return FileId{H5Fcreate(at(name).c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.id())};
  }

  // A dataset with what `set` puts into its creation properties; written unless `data` is null.
  static void make(const FileId& file, const char* path, hid_t type, const std::vector<hsize_t>& shape, const void* data,
                   const std::function<void(hid_t)>& set = {}, const std::vector<hsize_t>& largest = {}) {
    const PropertyId creation{H5Pcreate(H5P_DATASET_CREATE)}, links{H5Pcreate(H5P_LINK_CREATE)};
    H5Pset_create_intermediate_group(links.id(), 1);
    if (set) set(creation.id());
    const SpaceId space{
        H5Screate_simple(static_cast<int>(shape.size()), shape.data(), largest.empty() ? nullptr : largest.data())};
    const DatasetId dataset{H5Dcreate2(file.id(), path, type, space.id(), links.id(), creation.id(), H5P_DEFAULT)};
    ASSERT_TRUE(dataset);
    if (data != nullptr) {
      ASSERT_GE(H5Dwrite(dataset.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    }
  }
  static std::function<void(hid_t)> chunks(hsize_t rows, hsize_t columns, int gzip = -1) {
    return [=](hid_t creation) {
      const std::array<hsize_t, 2> chunk{rows, columns};
      H5Pset_chunk(creation, 2, chunk.data());
      if (gzip >= 0) H5Pset_deflate(creation, static_cast<unsigned>(gzip));
    };
  }

  template <class T>
  static std::vector<T> read_all(RowReader& reader, std::uint64_t step) {
    std::vector<T> out(reader.rows() * reader.dim());
    for (std::uint64_t row = 0; row < reader.rows(); row += step)
      reader.read(row, std::min(step, reader.rows() - row), reinterpret_cast<std::byte*>(out.data() + row * reader.dim()));
    return out;
  }
  template <class T>
  void write(std::string_view to, const std::vector<T>& data, std::uint64_t dim, DType dtype,
             const WriteOptions& options = {}) const {
    const auto writer = create_rows(location(to), data.size() / dim, dim, dtype, options);
    writer->write(data.size() / dim, reinterpret_cast<const std::byte*>(data.data()));
    writer->finish();
  }
};

TEST_F(Hdf5Test, EveryDtypeAndLayoutRoundTrips) {
  constexpr std::uint64_t kRows = 211, kDim = 13;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                            DType::kInt32, DType::kInt64})
    for (const int gzip : {-1, 0, 1, 9}) {
      std::vector<std::byte> data(kRows * kDim * item_size(dtype));
      for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + 3);
      const WriteOptions options{.overwrite = true, .gzip = gzip, .chunk_rows = gzip >= 0 ? 50U : 0U};
      const auto writer = create_rows(location("x.h5:/a/b"), kRows, kDim, dtype, options);
      const std::uint64_t row_bytes = kDim * item_size(dtype);
      for (std::uint64_t row = 0; row < kRows; row += 9)
        writer->write(std::min<std::uint64_t>(9, kRows - row), data.data() + row * row_bytes);
      writer->finish();
      const auto reader = open("x.h5");
      EXPECT_EQ(reader->dtype(), dtype);
      EXPECT_EQ(reader->rows(), kRows);
      EXPECT_EQ(reader->dim(), kDim);
      EXPECT_THAT(reader->description(), AllOf(HasSubstr("x.h5:/a/b"), HasSubstr(gzip < 0 ? "contiguous" : "gzip")));
      for (const std::uint64_t step : {std::uint64_t{1}, std::uint64_t{64}, kRows}) {
        std::vector<std::byte> back(data.size());
        for (std::uint64_t row = 0; row < kRows; row += step)
          reader->read(row, std::min(step, kRows - row), back.data() + row * row_bytes);
        ASSERT_EQ(back, data) << dtype_name(dtype) << " gzip " << gzip;
      }
      EXPECT_EQ(file_text(at("x.h5"))[8], '\0');  // the oldest superblock
    }
  EXPECT_THAT(names(), ElementsAre("x.h5"));
}

TEST_F(Hdf5Test, ChunksOfAnyShapeAreReadInAnyStep) {
  const auto data = counting(1003 * 30);
  {
    const FileId file = create("x.h5");
    for (const auto& [rows, columns] : {std::pair<hsize_t, hsize_t>{64, 16}, {1, 30}, {1003, 30}, {1003, 1}, {7, 7}}) {
      const std::string name = std::to_string(rows) + "x" + std::to_string(columns);
      make(file, ("/plain" + name).c_str(), H5T_IEEE_F32LE, {1003, 30}, data.data(), chunks(rows, columns));
      make(file, ("/gzip" + name).c_str(), H5T_IEEE_F32LE, {1003, 30}, data.data(), chunks(rows, columns, 1));
    }
    make(file, "/larger", H5T_IEEE_F32LE, {1003, 30}, data.data(), chunks(4000, 64), {H5S_UNLIMITED, H5S_UNLIMITED});
    make(file, "/checked", H5T_IEEE_F32LE, {1003, 30}, data.data(), [](hid_t creation) {
      chunks(100, 30)(creation);
      H5Pset_shuffle(creation);
      H5Pset_fletcher32(creation);
    });
    make(file, "/compact", H5T_IEEE_F32LE, {1003, 3}, data.data(), [](hid_t creation) { H5Pset_layout(creation, H5D_COMPACT); });
  }
  for (const char* name : {"plain64x16", "gzip64x16", "plain1x30", "gzip1x30", "plain1003x30", "gzip1003x30", "plain1003x1",
                           "gzip1003x1", "plain7x7", "gzip7x7", "larger", "checked"}) {
    const auto reader = open(std::string("x.h5:") + name);
    for (const std::uint64_t step : {std::uint64_t{1003}, std::uint64_t{50}, reader->block_rows()})
      EXPECT_EQ(read_all<float>(*reader, step), data) << name;
  }
  EXPECT_EQ(read_all<float>(*open("x.h5:/compact"), 100), counting(1003 * 3));
}

TEST_F(Hdf5Test, ByteOrderAndTypesOfOtherWriters) {
  {
    const FileId file = create("x.h5");
    const std::vector<float> data = counting(12);
    const std::array<unsigned char, 4> number{0x00, 0x01, 0x03, 0x02};  // 66306
    make(file, "/be4", H5T_STD_I32BE, {1, 1}, number.data());
    std::string big;
    for (const float value : data) {
      std::array<char, 4> bytes{};
      std::memcpy(bytes.data(), &value, 4);
      big += std::string(bytes.rbegin(), bytes.rend());
    }
    make(file, "/bef", H5T_IEEE_F32BE, {3, 4}, big.data());
    make(file, "/befgz", H5T_IEEE_F32BE, {3, 4}, big.data(), chunks(2, 3, 4));
    const TypeId boolean{H5Tenum_create(H5T_STD_I8LE)};
    std::int8_t value = 0;
    H5Tenum_insert(boolean.id(), "FALSE", &value);
    value = 1;
    H5Tenum_insert(boolean.id(), "TRUE", &value);
    make(file, "/bool", boolean.id(), {2, 2}, "\0\1\1\0");
    const hsize_t four = 4;
    const TypeId array{H5Tarray_create2(H5T_IEEE_F32LE, 1, &four)};
    make(file, "/array", array.id(), {3}, data.data());
    const TypeId record{H5Tcreate(H5T_COMPOUND, 24)};
    H5Tinsert(record.id(), "id", 0, H5T_STD_I64LE);
    H5Tinsert(record.id(), "v", 8, array.id());
    std::string records;
    for (int i = 0; i < 3; ++i)
      records += std::string(8, '\x55') + bytes_of(std::vector<float>(data.begin() + i * 4, data.begin() + i * 4 + 4));
    make(file, "/record", record.id(), {3}, records.data());
    const TypeId tagged{H5Tcreate(H5T_OPAQUE, 2)};
    H5Tset_tag(tagged.id(), "bfloat16");
    make(file, "/tagged", tagged.id(), {1, 2}, "\x80\x3F\0\xC0");
    const TypeId untagged{H5Tcreate(H5T_OPAQUE, 2)};
    H5Tset_tag(untagged.id(), "");
    make(file, "/untagged", untagged.id(), {1, 2}, "\x80\x3F\0\xC0");
  }
  EXPECT_THAT(read_all<std::int32_t>(*open("x.h5:be4"), 1), ElementsAre(66306));
  EXPECT_EQ(read_all<float>(*open("x.h5:bef"), 1), counting(12));
  EXPECT_EQ(read_all<float>(*open("x.h5:befgz"), 3), counting(12));
  EXPECT_THAT(read_all<std::uint8_t>(*open("x.h5:bool"), 1), ElementsAre(0, 1, 1, 0));
  EXPECT_EQ(read_all<float>(*open("x.h5:array"), 2), counting(12));
  EXPECT_EQ(read_all<float>(*open("x.h5:/record:v"), 2), counting(12));
  EXPECT_THAT(refuse<DTypeError>("x.h5:/record"), AllOf(HasSubstr("id: int64"), HasSubstr("v: float32 (4,)")));
  EXPECT_THAT(refuse<NotFound>("x.h5:/record:w"), HasSubstr("'w'"));
  EXPECT_EQ(open("x.h5:/record:id")->rows(), 3U);
  EXPECT_EQ(open("x.h5:/record:id")->dim(), 1U);
  EXPECT_EQ(open("x.h5:tagged")->dtype(), DType::kBFloat16);
  EXPECT_THAT(refuse<DTypeError>("x.h5:untagged"), HasSubstr("bfloat16"));
  EXPECT_THAT(read_all<std::uint16_t>(*open("x.h5:untagged", {.dtype = DType::kBFloat16}), 1), ElementsAre(0x3F80, 0xC000));
  EXPECT_THAT(refuse<DTypeError>("x.h5:bef", {.dtype = DType::kFloat16}), AllOf(HasSubstr("float32"), HasSubstr("float16")));
}

TEST_F(Hdf5Test, WhatIsNoTableIsRefusedWithWhatItIs) {
  {
    const FileId file = create("x.h5");
    const TypeId text{H5Tcopy(H5T_C_S1)};
    H5Tset_size(text.id(), H5T_VARIABLE);
    const std::array<const char*, 2> words{"w\xC3\xB6rd", ""};
    make(file, "/words", text.id(), {2}, words.data());
    make(file, "/vectors", H5T_IEEE_F32LE, {2, 4}, counting(8).data());
    const TypeId rows{H5Tvlen_create(H5T_IEEE_F32LE)};
    make(file, "/ragged", rows.id(), {2}, nullptr);
    make(file, "/u2", H5T_STD_U16LE, {2, 4}, nullptr);
    make(file, "/i2", H5T_STD_I16LE, {2, 4}, nullptr);
    make(file, "/one", H5T_IEEE_F32LE, {3}, nullptr);
    make(file, "/three", H5T_IEEE_F32LE, {2, 3, 4}, nullptr);
    make(file, "/narrow", H5T_IEEE_F32LE, {24, 0}, nullptr);
    for (const auto& [name, kind] : {std::pair{"/scalar", H5S_SCALAR}, {"/null", H5S_NULL}}) {
      const SpaceId space{H5Screate(kind)};
      const DatasetId dataset{H5Dcreate2(file.id(), name, H5T_IEEE_F32LE, space.id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)};
      ASSERT_TRUE(dataset);
    }
  }
  EXPECT_EQ(read_all<float>(*open("x.h5"), 2), counting(8));  // the only one that could be meant
  EXPECT_THAT(refuse<DTypeError>("x.h5:words"), HasSubstr("string"));
  EXPECT_THAT(refuse<DTypeError>("x.h5:ragged"), HasSubstr("variable-length"));
  EXPECT_THAT(refuse<DTypeError>("x.h5:u2"), AllOf(HasSubstr("uint16"), HasSubstr("float32, float16")));
  EXPECT_THAT(refuse<DTypeError>("x.h5:i2"), HasSubstr("int16"));
  EXPECT_EQ(open("x.h5:one")->dim(), 1U);
  EXPECT_EQ(open("x.h5:three")->dim(), 12U);
  EXPECT_THAT(refuse<FormatError>("x.h5:narrow"), HasSubstr("(24, 0)"));
  EXPECT_THAT(refuse<FormatError>("x.h5:scalar"), HasSubstr("one value"));
  EXPECT_THAT(refuse<FormatError>("x.h5:null"), HasSubstr("no data"));
}

TEST_F(Hdf5Test, NamesAreFoundOrTheCandidatesListed) {
  {
    const FileId file = create("x.h5");
    make(file, "/g/sub/x", H5T_IEEE_F32LE, {1, 2}, counting(2).data());
    make(file, "/a:b", H5T_IEEE_F32LE, {1, 3}, counting(3).data());
    H5Lcreate_soft("/g/sub/x", file.id(), "/soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/g", file.id(), "/g/loop", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/none", file.id(), "/dangling", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("other.h5", "/data", file.id(), "/outside", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/outside", file.id(), "/indirect", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_hard(file.id(), "/g", file.id(), "/again", H5P_DEFAULT, H5P_DEFAULT);
  }
  write("other.h5", counting(4), 2, DType::kFloat32);
  for (const char* name : {"/g/sub/x", "g/sub/x", "soft", "g/loop/loop/sub/x", "/again/sub/x"})
    EXPECT_EQ(open(std::string("x.h5:") + name)->dim(), 2U) << name;
  EXPECT_EQ(open("x.h5:a:b")->dim(), 3U);
  EXPECT_THAT(refuse<NotFound>("x.h5:/g/sub/y"), AllOf(HasSubstr("nothing at /g/sub/y"), HasSubstr("/sub/x: float32 (1, 2)")));
  EXPECT_THAT(refuse<NotFound>("x.h5:/g/sub/x/deeper"), HasSubstr("nothing at"));
  EXPECT_THAT(refuse<NotFound>("x.h5:/g"), HasSubstr("group"));
  EXPECT_THAT(refuse<NotFound>("x.h5:dangling"), HasSubstr("/none"));
  EXPECT_THAT(refuse<FormatError>("x.h5:outside"), AllOf(HasSubstr("external link"), HasSubstr("other.h5")));
  EXPECT_THAT(refuse<FormatError>("x.h5:outside/x"), HasSubstr("external link"));
  EXPECT_THAT(refuse<FormatError>("x.h5:indirect"), AllOf(HasSubstr("external link"), HasSubstr("other.h5")));
  EXPECT_THAT(refuse<InvalidArgument>("x.h5"),
              AllOf(HasSubstr("2 datasets could be meant"), HasSubstr("/a:b: float32 (1, 3)"), Not(HasSubstr("/soft"))));
}

TEST_F(Hdf5Test, HolesReadAsTheFillValueAndOldRowsDoNotComeBack) {
  {
    const FileId file = create("x.h5");
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto fill = [&](hid_t creation) {
      chunks(2, 4)(creation);
      H5Pset_fill_value(creation, H5T_NATIVE_FLOAT, &nan);
    };
    make(file, "/holes", H5T_IEEE_F32LE, {2, 4}, counting(8).data(), fill, {H5S_UNLIMITED, 4});
    make(file, "/shrunk", H5T_IEEE_F32LE, {4, 4}, counting(16).data(), chunks(3, 3), {H5S_UNLIMITED, H5S_UNLIMITED});
    const std::array<hsize_t, 2> six{6, 4}, two{2, 4}, four{4, 4};
    const DatasetId holes{H5Dopen2(file.id(), "/holes", H5P_DEFAULT)}, shrunk{H5Dopen2(file.id(), "/shrunk", H5P_DEFAULT)};
    H5Dset_extent(holes.id(), six.data());
    H5Dset_extent(shrunk.id(), two.data());
    H5Dset_extent(shrunk.id(), four.data());
    make(file, "/never", H5T_IEEE_F32LE, {3, 2}, nullptr, [](hid_t creation) {
      chunks(2, 2)(creation);
      H5Pset_fill_value(creation, H5I_INVALID_HID, nullptr);  // undefined: what is read would be whatever the buffer held
    });
    const DatasetId never{H5Dopen2(file.id(), "/never", H5P_DEFAULT)};
    const std::array<hsize_t, 2> origin{0, 0}, block{2, 2};
    const SpaceId memory{H5Screate_simple(2, block.data(), nullptr)}, space{H5Dget_space(never.id())};
    H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, origin.data(), nullptr, block.data(), nullptr);
    ASSERT_GE(H5Dwrite(never.id(), H5T_NATIVE_FLOAT, memory.id(), space.id(), H5P_DEFAULT, counting(4).data()), 0);
  }
  const auto holes = open("x.h5:holes");
  const auto values = read_all<float>(*holes, 6);
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_TRUE(i < 8 ? values[i] == static_cast<float>(i) : std::isnan(values[i])) << i;
  EXPECT_THAT(holes->description(), HasSubstr("2 of 3 chunks never written"));
  const auto shrunk = read_all<float>(*open("x.h5:shrunk"), 4);
  EXPECT_THAT(std::vector<float>(shrunk.begin() + 8, shrunk.end()), Each(0.0F));
  std::vector<float> out(6, 77);
  open("x.h5:never")->read(0, 3, reinterpret_cast<std::byte*>(out.data()));
  EXPECT_THAT(out, ElementsAre(0, 1, 2, 3, 0, 0));
}

TEST_F(Hdf5Test, EmptyTables) {
  for (const int gzip : {-1, 4}) {
    create_rows(location("z.h5"), 0, 300, DType::kFloat32, {.overwrite = true, .gzip = gzip})->finish();
    const auto reader = open("z.h5");
    EXPECT_EQ(reader->rows(), 0U);
    EXPECT_EQ(reader->dim(), 300U);
    reader->read(0, 0, nullptr);
  }
}

TEST_F(Hdf5Test, DeclaredTerabytesWithNothingStoredAreRefused) {
  {
    const FileId file = create("x.h5");
    make(file, "/chunked", H5T_IEEE_F32LE, {hsize_t{1} << 40, 4}, nullptr, chunks(1024, 4, 4));
    make(file, "/contiguous", H5T_IEEE_F32LE, {1 << 18, 4000}, nullptr,
         [](hid_t creation) { H5Pset_alloc_time(creation, H5D_ALLOC_TIME_LATE); });
    make(file, "/small", H5T_IEEE_F32LE, {1 << 10, 4}, nullptr);
    make(file, "/overflow", H5T_IEEE_F32LE, {hsize_t{1} << 40, hsize_t{1} << 30}, nullptr, chunks(1024, 1024, 4));
  }
  EXPECT_LT(std::filesystem::file_size(at("x.h5")), 100000U);
  EXPECT_THAT(refuse<FormatError>("x.h5:chunked"), AllOf(HasSubstr("16.00 TiB"), HasSubstr("only 0 B are stored")));
  EXPECT_THAT(refuse<FormatError>("x.h5:contiguous"), HasSubstr("not believed"));
  EXPECT_EQ(open("x.h5:small")->rows(), 1024U);
  EXPECT_THROW(open("x.h5:overflow"), Error);
}

TEST_F(Hdf5Test, MissingFiltersAreNamedBeforeReading) {
  // Filters that any library can be told of when writing: an identity under numbers that are not registered when the file is
  // read.
  const auto identity = [](unsigned, std::size_t, const unsigned*, std::size_t bytes, std::size_t*, void**) { return bytes; };
  const auto nothing = [](unsigned flags, std::size_t, const unsigned*, std::size_t bytes, std::size_t*, void**) -> std::size_t {
    return (flags & H5Z_FLAG_REVERSE) != 0 ? bytes : 0;  // fails for every chunk, so an optional one is left out
  };
  const std::array<H5Z_class2_t, 2> filters{H5Z_class2_t{H5Z_CLASS_T_VERS, 32015, 1, 1, "zstd", nullptr, nullptr, +identity},
                                            H5Z_class2_t{H5Z_CLASS_T_VERS, 32001, 1, 1, "blosc", nullptr, nullptr, +nothing}};
  for (const H5Z_class2_t& filter : filters) ASSERT_GE(H5Zregister(&filter), 0);
  {
    const FileId file = create("x.h5");
    const auto with = [](H5Z_filter_t filter, unsigned flags) {
      return [=](hid_t creation) {
        chunks(2, 4)(creation);
        H5Pset_shuffle(creation);
        H5Pset_filter(creation, filter, flags, 0, nullptr);
      };
    };
    make(file, "/mandatory", H5T_IEEE_F32LE, {3, 4}, counting(12).data(), with(32015, H5Z_FLAG_MANDATORY));
    make(file, "/used", H5T_IEEE_F32LE, {3, 4}, counting(12).data(), with(32015, H5Z_FLAG_OPTIONAL));
    make(file, "/skipped", H5T_IEEE_F32LE, {3, 4}, counting(12).data(), with(32001, H5Z_FLAG_OPTIONAL));
  }
  for (const H5Z_class2_t& filter : filters) ASSERT_GE(H5Zunregister(filter.id), 0);
  for (const char* name : {"x.h5:mandatory", "x.h5:used"})
    EXPECT_THAT(refuse<FormatError>(name), AllOf(HasSubstr("needs filter 32015 (zstd)"), HasSubstr("2 shuffle, 32015 zstd")));
  const auto reader = open("x.h5:skipped");
  EXPECT_EQ(read_all<float>(*reader, 3), counting(12));
  EXPECT_THAT(reader->description(), HasSubstr("blosc (filter 32001, not available here)"));
}

TEST_F(Hdf5Test, LzfIsDecodedAndBrokenLzfIsAnError) {
  // "abc" as it is, then a copy of 9 bytes from 3 back: abc abc abc abc. A chunk as another writer stores it.
  const std::string good(
      "\x02"
      "abc\xE0\x00\x02",
      7);
  const auto store_chunk = [&](std::string_view bytes) {
    const FileId file = create("x.h5");
    make(file, "/x", H5T_STD_I8LE, {3, 4}, nullptr, [](hid_t creation) {
      chunks(3, 4)(creation);
      const std::array<unsigned, 3> values{4, 0x0105, 12};
      H5Pset_filter(creation, 32000, H5Z_FLAG_OPTIONAL, values.size(), values.data());
    });
    const DatasetId dataset{H5Dopen2(file.id(), "/x", H5P_DEFAULT)};
    const std::array<hsize_t, 2> origin{0, 0};
    ASSERT_GE(H5Dwrite_chunk(dataset.id(), H5P_DEFAULT, 0, origin.data(), bytes.size(), bytes.data()), 0);
  };
  const auto store = [&](std::string_view bytes) {
    // To create such a dataset an encoder is needed; ours only reads.
    const H5Z_class2_t encoder{
        H5Z_CLASS_T_VERS,
        32000,
        1,
        1,
        "lzf",
        nullptr,
        nullptr,
        [](unsigned, std::size_t, const unsigned*, std::size_t size, std::size_t*, void**) { return size; }};
    ASSERT_GE(H5Zregister(&encoder), 0);
    store_chunk(bytes);
    ASSERT_GE(H5Zunregister(32000), 0);
  };
  store(good);
  {
    const auto reader = open("x.h5");
    EXPECT_EQ(read_all<char>(*reader, 3), std::vector<char>({'a', 'b', 'c', 'a', 'b', 'c', 'a', 'b', 'c', 'a', 'b', 'c'}));
    EXPECT_THAT(reader->description(), HasSubstr("lzf"));
  }
  for (const std::string_view broken : {std::string_view("\x20", 1),
                                        std::string_view("\x05"
                                                         "ab",
                                                         3),
                                        std::string_view("\x00"
                                                         "a\x20\x05",
                                                         4),
                                        std::string_view("\xE0", 1)}) {
    store(broken);
    std::array<std::byte, 12> out{};
    EXPECT_THROW(open("x.h5")->read(0, 3, out.data()), Error);
  }
}

TEST_F(Hdf5Test, LossyFilterIsSaid) {
  {
    const FileId file = create("x.h5");
    make(file, "/x", H5T_IEEE_F32LE, {3, 4}, counting(12).data(), [](hid_t creation) {
      chunks(3, 4)(creation);
      H5Pset_scaleoffset(creation, H5Z_SO_FLOAT_DSCALE, 2);
    });
  }
  const auto reader = open("x.h5");
  EXPECT_THAT(reader->description(), HasSubstr("lossy"));
  ASSERT_EQ(reader->remarks().size(), 1U);
  EXPECT_TRUE(reader->remarks()[0].doubt);
  EXPECT_THAT(reader->remarks()[0].text, AllOf(HasSubstr("x.h5:/x"), HasSubstr("lossy filter, scaleoffset")));
}

TEST_F(Hdf5Test, ExternalFilesOnlyIfAllowedBelowTheFolderAndWhole) {
  std::filesystem::create_directories(at("d/in"));
  const std::string data = bytes_of(counting(12));
  make_file(at("d/in/raw"), "xx" + data.substr(0, 20));
  make_file(at("d/rest"), data.substr(20));
  make_file(at("secret"), data);
  std::filesystem::create_symlink(at("secret"), at("d/link"));
  const auto external = [&](const char* name, const std::vector<std::tuple<std::string, off_t, hsize_t>>& parts) {
    const FileId file = create(name);
    make(file, "/x", H5T_IEEE_F32LE, {3, 4}, nullptr, [&](hid_t creation) {
      for (const auto& [path, offset, bytes] : parts) H5Pset_external(creation, path.c_str(), offset, bytes);
    });
  };
  const ReadOptions allow{.dtype = {}, .allow_external = true};
  external("d/e.h5", {{"in/raw", 2, 20}, {"rest", 0, H5F_UNLIMITED}});
  EXPECT_THAT(refuse<FormatError>("d/e.h5"), HasSubstr("external files"));
  EXPECT_EQ(read_all<float>(*open("d/e.h5", allow), 1), counting(12));
  make_file(at("d/rest"), data.substr(20, 10));
  EXPECT_THAT(refuse<FormatError>("d/e.h5", allow), AllOf(HasSubstr("rest"), HasSubstr("truncated: 10 of 28 bytes")));
  std::filesystem::remove(at("d/rest"));
  EXPECT_THAT(refuse<IoError>("d/e.h5", allow), HasSubstr("No such file"));
  for (const std::string& path : {std::string("../secret"), at("secret").string(), std::string("link"),
                                  std::string("in/../../secret"), std::string("/etc/passwd")}) {
    external("d/e.h5", {{path, 0, 48}});
    EXPECT_THAT(refuse<FormatError>("d/e.h5", allow), HasSubstr("not below the file's own folder")) << path;
  }
}

TEST_F(Hdf5Test, VirtualDatasetsOnlyIfAllowedAndBelowTheFolder) {
  std::filesystem::create_directory(at("d"));
  write("d/source.h5", counting(12), 4, DType::kFloat32);
  write("outside.h5", counting(12), 4, DType::kFloat32);
  const auto make_virtual = [&](const std::vector<std::string>& sources) {
    const FileId file = create("d/v.h5");
    make(file, "/data", H5T_IEEE_F32LE, {3, 4}, counting(12).data());
    make(file, "/v", H5T_IEEE_F32LE, {3, 4}, nullptr, [&](hid_t creation) {
      const std::array<hsize_t, 2> shape{3, 4};
      const SpaceId space{H5Screate_simple(2, shape.data(), nullptr)};
      H5Pset_layout(creation, H5D_VIRTUAL);
      for (const std::string& source : sources) H5Pset_virtual(creation, space.id(), source.c_str(), "/data", space.id());
    });
  };
  const ReadOptions allow{.dtype = {}, .allow_external = true};
  for (const char* source : {"source.h5", ".", "./v.h5", "v.h5"}) {
    make_virtual({source});
    EXPECT_THAT(refuse<FormatError>("d/v.h5:v"), HasSubstr("virtual"));
    EXPECT_EQ(read_all<float>(*open("d/v.h5:v", allow), 2), counting(12)) << source;
  }
  make_virtual({});
  EXPECT_THAT(read_all<float>(*open("d/v.h5:v", allow), 3), Each(0.0F));
  make_virtual({"none.h5"});
  EXPECT_THAT(refuse<IoError>("d/v.h5:v", allow), HasSubstr("none.h5"));
  for (const std::string& source : {std::string("../outside.h5"), at("outside.h5").string()}) {
    make_virtual({source});
    EXPECT_THAT(refuse<FormatError>("d/v.h5:v", allow), HasSubstr("not below the file's own folder"));
  }
}

TEST_F(Hdf5Test, FilesOpenForWritingElsewhereAreLocked) {
  std::array<int, 2> ready{}, done{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  ASSERT_EQ(::pipe(done.data()), 0);
  const pid_t child = ::fork();
  char signal = 'x';
  if (child == 0) {
    {
      const FileId file = create("x.h5");
      make(file, "/x", H5T_IEEE_F32LE, {1, 2}, counting(2).data());
      H5Fflush(file.id(), H5F_SCOPE_LOCAL);
      if (::write(ready[1], &signal, 1) != 1 || ::read(done[0], &signal, 1) != 1) ::_exit(1);
    }
    ::_exit(0);
  }
  ASSERT_EQ(::read(ready[0], &signal, 1), 1);
  EXPECT_THAT(refuse<LockedError>("x.h5"), HasSubstr("open for writing in another process"));
  EXPECT_THAT(error_of<LockedError>([&] { create_rows(location("x.h5:/y"), 1, 1, DType::kFloat32); }),
              HasSubstr("another process"));
  ASSERT_EQ(::write(done[1], &signal, 1), 1);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(open("x.h5")->dim(), 2U);
  for (const int fd : {ready[0], ready[1], done[0], done[1]}) ::close(fd);
}

TEST_F(Hdf5Test, BrokenFilesSayWhatIsWrong) {
  write("x.h5", counting(1000), 10, DType::kFloat32);
  const std::string whole = file_text(at("x.h5"));
  make_file(at("cut.h5"), whole.substr(0, whole.size() - 100));
  EXPECT_THAT(refuse<FormatError>("cut.h5"),
              AllOf(HasSubstr("incomplete"),
                    HasSubstr(std::to_string(whole.size() - 100) + " of " + std::to_string(whole.size()) + " bytes")));
  make_file(at("junk.h5"), whole + std::string(400, 'j'));
  EXPECT_EQ(read_all<float>(*open("junk.h5"), 100), counting(1000));
  make_file(at("empty.h5"), "");
  EXPECT_THAT(refuse<FormatError>("empty.h5"), HasSubstr("empty"));
  make_file(at("npy.h5"), "\x93NUMPY\x01");  // which is what its content says
  EXPECT_THAT(refuse<FormatError>("npy.h5"), HasSubstr("truncated header"));
  make_file(at("zip.h5"), "\x1f\x8b and so on");
  EXPECT_THAT(refuse<FormatError>("zip.h5"), AllOf(HasSubstr("no HDF5 signature"), HasSubstr("gzip")));
  EXPECT_THAT(refuse<IoError>("none.h5"), HasSubstr("No such file"));
  std::filesystem::create_directory(at("dir.h5"));
  EXPECT_THAT(refuse<IoError>("dir.h5"), HasSubstr("Is a directory"));
  for (std::size_t length = 0; length < 2048; length += 61) {
    make_file(at("cut" + std::to_string(length) + ".h5"), whole.substr(0, length));
    EXPECT_THROW(open("cut" + std::to_string(length) + ".h5"), FormatError);
  }
}

TEST_F(Hdf5Test, ErrorsOfTheLibraryAreNotPrintedAndItsSettingIsKept) {
  make_file(at("x.h5"), "\x89HDF\r\n\x1a\n rubbish");
  H5E_auto2_t before = nullptr, after = nullptr;
  void* data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &data);
  ::testing::internal::CaptureStderr();
  EXPECT_THAT(refuse<FormatError>("x.h5"), HasSubstr("HDF5 " + std::to_string(H5_VERS_MAJOR)));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  H5Eget_auto2(H5E_DEFAULT, &after, &data);
  EXPECT_EQ(before, after);
}

TEST_F(Hdf5Test, SeveralTablesGoIntoOneFileAndTheOthersStay) {
  write("x.h5:/a/one", counting(6), 2, DType::kFloat32);
  write("x.h5:/a/two", counting(9), 3, DType::kFloat32, {.gzip = 4});
  write("x.h5:three", std::vector<std::int8_t>{1, 2}, 1, DType::kInt8);
  const std::string before = file_text(at("x.h5"));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.h5:/a/two", counting(3), 3, DType::kFloat32); }),
              HasSubstr("x.h5:/a/two already exists"));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.h5:/a", counting(3), 3, DType::kFloat32, {.overwrite = true}); }),
              HasSubstr("no dataset"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { write("x.h5:/three/below", counting(3), 3, DType::kFloat32); }),
              HasSubstr("no group"));
  EXPECT_THROW(write("x.h5", counting(3), 3, DType::kFloat32), AlreadyExists);
  for (const char* name : {"x.h5:a//b", "x.h5:a/../b", "x.h5:./b", "x.h5:/", "x.h5:a:b"})
    EXPECT_THROW(write(name, counting(3), 3, DType::kFloat32), InvalidArgument) << name;
  {
    const auto writer = create_rows(location("x.h5:/a/four"), 3, 3, DType::kFloat32);
    writer->write(1, reinterpret_cast<const std::byte*>(counting(3).data()));
  }
  EXPECT_EQ(file_text(at("x.h5")), before);
  write("x.h5:/a/two", counting(12), 4, DType::kFloat32, {.overwrite = true});
  EXPECT_EQ(read_all<float>(*open("x.h5:a/one"), 3), counting(6));
  EXPECT_EQ(read_all<float>(*open("x.h5:a/two"), 3), counting(12));
  EXPECT_THAT(read_all<std::int8_t>(*open("x.h5:three"), 1), ElementsAre(1, 2));
  write("x.h5", counting(3), 3, DType::kFloat32, {.overwrite = true});  // without a selector the whole file is replaced
  EXPECT_EQ(read_all<float>(*open("x.h5:/data"), 1), counting(3));
  EXPECT_THAT(names(), ElementsAre("x.h5"));
}

TEST_F(Hdf5Test, WhatOthersPutIntoTheFileMeanwhileIsKept) {
  write("x.h5:/one", counting(6), 2, DType::kFloat32);
  const auto two = create_rows(location("x.h5:/g/two"), 1, 3, DType::kFloat32, {.gzip = 1});
  const auto empty = create_rows(location("x.h5:/g/empty"), 0, 3, DType::kFloat32);
  two->write(1, reinterpret_cast<const std::byte*>(counting(3).data()));
  write("x.h5:/three", counting(4), 4, DType::kFloat32);  // another file under the name
  {
    const FileId file{H5Fopen(at("x.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT)};  // in place, by another program
    make(file, "/four", H5T_IEEE_F32LE, {2, 2}, counting(4).data());
  }
  two->finish();
  empty->finish();
  EXPECT_EQ(read_all<float>(*open("x.h5:/one"), 3), counting(6));
  EXPECT_EQ(read_all<float>(*open("x.h5:/g/two"), 1), counting(3));
  EXPECT_THAT(open("x.h5:/g/two")->description(), HasSubstr("gzip"));
  EXPECT_EQ(open("x.h5:/g/empty")->rows(), 0U);
  EXPECT_EQ(read_all<float>(*open("x.h5:/three"), 1), counting(4));
  EXPECT_EQ(read_all<float>(*open("x.h5:/four"), 2), counting(4));
  EXPECT_THAT(names(), ElementsAre("x.h5"));
}

TEST_F(Hdf5Test, FileMadeMeanwhileIsAddedToUnlessTheWholeFileWasMeant) {
  for (const bool overwrite : {false, true}) {
    const auto part = create_rows(location("x.h5:/part"), 1, 3, DType::kFloat32, {.overwrite = overwrite});
    const auto whole = create_rows(location("x.h5"), 1, 3, DType::kFloat32);
    for (const auto* writer : {&part, &whole}) (*writer)->write(1, reinterpret_cast<const std::byte*>(counting(3).data()));
    write("x.h5:/first", counting(4), 4, DType::kFloat32);
    part->finish();
    EXPECT_THROW(whole->finish(), AlreadyExists);
    EXPECT_EQ(read_all<float>(*open("x.h5:/first"), 1), counting(4));
    EXPECT_EQ(read_all<float>(*open("x.h5:/part"), 1), counting(3));
    std::filesystem::remove(at("x.h5"));
  }
}

TEST_F(Hdf5Test, DatasetMadeMeanwhileIsReplacedOnlyWithOverwrite) {
  write("x.h5:/one", counting(6), 2, DType::kFloat32);
  const auto keep = create_rows(location("x.h5:/v"), 1, 3, DType::kFloat32);
  const auto replace = create_rows(location("x.h5:/v"), 1, 3, DType::kFloat32, {.overwrite = true});
  for (const auto* writer : {&keep, &replace}) (*writer)->write(1, reinterpret_cast<const std::byte*>(counting(3).data()));
  write("x.h5:/v", counting(4), 4, DType::kFloat32);
  EXPECT_THROW(keep->finish(), AlreadyExists);
  EXPECT_EQ(open("x.h5:/v")->dim(), 4U);
  replace->finish();
  EXPECT_EQ(open("x.h5:/v")->dim(), 3U);
  EXPECT_EQ(open("x.h5:/one")->dim(), 2U);
}

TEST_F(Hdf5Test, FileRemovedMeanwhileIsNotMadeAgain) {
  write("x.h5:/one", counting(6), 2, DType::kFloat32);
  const auto writer = create_rows(location("x.h5:/two"), 0, 3, DType::kFloat32);
  std::filesystem::remove(at("x.h5"));
  EXPECT_THAT(error_of<NotFound>([&] { writer->finish(); }), HasSubstr("removed by someone else"));
}

TEST_F(Hdf5Test, ThreadsAddToOneFileAtOnceWhileItIsBeingRead) {
  write("x.h5:/one", counting(6), 2, DType::kFloat32);
  const auto reader = open("x.h5:/one");  // has it locked as HDF5 locks
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&, t] { write("x.h5:/d" + std::to_string(t), counting(6), 2, DType::kFloat32); });
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 8; ++t) EXPECT_EQ(read_all<float>(*open("x.h5:/d" + std::to_string(t)), 3), counting(6));
  EXPECT_EQ(read_all<float>(*reader, 3), counting(6));
}

TEST_F(Hdf5Test, FileOfASignatureAloneIsCalledIncomplete) {
  make_file(at("x.h5"), std::string_view("\x89HDF\r\n\x1a\n", 8));
  EXPECT_THAT(refuse<FormatError>("x.h5:/v"), HasSubstr("incomplete: only 8 bytes"));
}

TEST_F(Hdf5Test, WhatIsNoHdf5FileIsNotAddedTo) {
  make_file(at("x.h5"), "precious text of someone");
  EXPECT_THROW(write("x.h5:/a", counting(3), 3, DType::kFloat32, {.overwrite = true}), FormatError);
  EXPECT_EQ(file_text(at("x.h5")), "precious text of someone");
  EXPECT_THAT(names(), ElementsAre("x.h5"));
}

TEST_F(Hdf5Test, ChunksAreChosenWithinTheFormatsLimits) {
  write("x.h5:/capped", counting(12), 4, DType::kFloat32, {.gzip = 4, .chunk_rows = 64});
  EXPECT_THAT(open("x.h5:/capped")->description(), HasSubstr("chunked (3, 4)"));
  write("x.h5:/wide", std::vector<double>(3 * 65536), 65536, DType::kFloat64, {.gzip = 1});
  EXPECT_THAT(open("x.h5:/wide")->description(), HasSubstr("chunked (2, 65536)"));
  write("x.h5:/thin", std::vector<std::uint8_t>(3000000), 1, DType::kUInt8, {.gzip = 1});
  EXPECT_THAT(open("x.h5:/thin")->description(), HasSubstr("chunked (1048576, 1)"));
  EXPECT_THROW(write("x.h5:/bad", counting(12), 4, DType::kFloat32, {.chunk_rows = 64}), InvalidArgument);
  // A row of 8 GiB, and a chunk that would be 8 GiB, only created.
  { const auto writer = create_rows(location("y.h5"), 2, std::uint64_t{1} << 31, DType::kFloat32, {.gzip = 1}); }
  { const auto writer = create_rows(location("y.h5"), 1 << 20, 2048, DType::kFloat32, {.gzip = 1, .chunk_rows = 1 << 20}); }
}

TEST_F(Hdf5Test, OddPathsWork) {
  for (const char* name : {"with space.h5", "\xD1\x82.h5", "\xFF\xFE.h5", "new\nline.h5", "100%.h5"}) {
    write(name, counting(3), 3, DType::kFloat32);
    EXPECT_EQ(read_all<float>(*open(name), 1), counting(3)) << name;
  }
}

TEST_F(Hdf5Test, SlabsServeChunkRowsAboveTheLimit) {
  // Chunks of one column and all rows: a chunk row is the whole dataset of 144 MB, above what is cached between reads.
  constexpr hsize_t kRows = 600000, kDim = 60;
  {
    const FileId file = create("x.h5");
    make(file, "/x", H5T_STD_I32LE, {kRows, kDim}, nullptr, chunks(kRows, 1, 0));
    const DatasetId dataset{H5Dopen2(file.id(), "/x", H5P_DEFAULT)};
    std::vector<std::int32_t> column(kRows);
    for (hsize_t c = 0; c < kDim; ++c) {
      for (hsize_t r = 0; r < kRows; ++r) column[r] = static_cast<std::int32_t>(r * kDim + c);
      const std::array<hsize_t, 2> start{0, c}, block{kRows, 1};
      const SpaceId memory{H5Screate_simple(2, block.data(), nullptr)}, space{H5Dget_space(dataset.id())};
      H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, block.data(), nullptr);
      ASSERT_GE(H5Dwrite(dataset.id(), H5T_STD_I32LE, memory.id(), space.id(), H5P_DEFAULT, column.data()), 0);
    }
  }
  const auto reader = open("x.h5");
  const std::uint64_t step = reader->block_rows();
  EXPECT_LE(step * kDim * 4, std::uint64_t{32} << 20);
  std::vector<std::int32_t> rows(step * kDim);
  for (std::uint64_t row = 0; row < kRows; row += step) {
    const std::uint64_t now = std::min<std::uint64_t>(step, kRows - row);
    reader->read(row, now, reinterpret_cast<std::byte*>(rows.data()));
    for (std::uint64_t i = 0; i < now * kDim; ++i) ASSERT_EQ(rows[i], static_cast<std::int32_t>(row * kDim + i));
  }
  reader->read(5, 1, reinterpret_cast<std::byte*>(rows.data()));  // and back again
  EXPECT_EQ(rows[0], 300);
}

}  // namespace
}  // namespace embermap
