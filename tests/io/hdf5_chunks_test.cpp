#include "io/hdf5_chunks.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>

#include "io/describe_hdf5.hpp"
#include "io/rows.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using namespace hdf5;
using ::testing::AllOf;
using testing::bytes_of;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;
using ::testing::Pair;

using Filter = ChunkLayout::Filter;

std::vector<std::byte> noise(std::size_t bytes, unsigned seed, unsigned values = 256) {
  std::mt19937 random(seed);
  std::vector<std::byte> out(bytes);
  for (std::byte& b : out) b = static_cast<std::byte>(random() % values);
  return out;
}

class Hdf5ChunksTest : public testing::FolderTest {
 protected:
  Location location(std::string_view text) const { return parse_location(at(text).string()); }
  static FileId create(const std::filesystem::path& path) {
    return FileId{H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)};
  }
  // A dataset with `set` put into its creation properties; written unless `data` is null.
  static void make(const FileId& file, const char* path, hid_t type, const std::vector<hsize_t>& shape, const void* data,
                   const std::function<void(hid_t)>& set, const std::vector<hsize_t>& largest = {}) {
    const PropertyId creation{H5Pcreate(H5P_DATASET_CREATE)};
    set(creation.id());
    const SpaceId space{
        H5Screate_simple(static_cast<int>(shape.size()), shape.data(), largest.empty() ? nullptr : largest.data())};
    const DatasetId dataset{H5Dcreate2(file.id(), path, type, space.id(), H5P_DEFAULT, creation.id(), H5P_DEFAULT)};
    ASSERT_TRUE(dataset);
    if (data != nullptr) {
      ASSERT_GE(H5Dwrite(dataset.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), 0);
    }
  }
  static std::vector<std::byte> read_all(RowReader& reader, std::uint64_t step) {
    const std::uint64_t row = reader.dim() * item_size(reader.dtype());
    std::vector<std::byte> out(reader.rows() * row);
    for (std::uint64_t at = 0; at < reader.rows(); at += step)
      reader.read(at, std::min(step, reader.rows() - at), out.data() + at * row);
    return out;
  }
};

TEST_F(Hdf5ChunksTest, ChunksOfAnyShapeAndFilterAreReadAsTheLibraryWroteThem) {
  struct Shape {
    std::vector<hsize_t> extent, chunk;
  };
  const std::vector<Shape> shapes{
      {{1000}, {64}},          {{1000}, {1000}},        {{97, 13}, {10, 13}},        {{97, 13}, {10, 4}},
      {{97, 13}, {1, 13}},     {{97, 13}, {97, 1}},     {{1, 13}, {1, 5}},           {{64, 8}, {32, 8}},
      {{21, 5, 6}, {4, 2, 6}}, {{21, 5, 6}, {4, 5, 4}}, {{9, 3, 4, 5}, {2, 3, 2, 5}}};
  const std::vector<std::pair<std::string_view, std::function<void(hid_t)>>> pipelines{
      {"none", [](hid_t) {}},
      {"gzip", [](hid_t p) { H5Pset_deflate(p, 4); }},
      {"shuffle, gzip", [](hid_t p) { H5Pset_shuffle(p), H5Pset_deflate(p, 1); }},
      {"shuffle, gzip, fletcher32", [](hid_t p) { H5Pset_shuffle(p), H5Pset_deflate(p, 9), H5Pset_fletcher32(p); }},
      {"fletcher32, shuffle, gzip", [](hid_t p) { H5Pset_fletcher32(p), H5Pset_shuffle(p), H5Pset_deflate(p, 1); }},
      // Of noise the first makes more than the chunk was.
      {"gzip, gzip", [](hid_t p) { H5Pset_deflate(p, 0), H5Pset_deflate(p, 1); }},
      {"gzip, shuffle, gzip, fletcher32, gzip",
       [](hid_t p) {
         H5Pset_deflate(p, 1), H5Pset_shuffle(p), H5Pset_deflate(p, 9), H5Pset_fletcher32(p), H5Pset_deflate(p, 1);
       }},
      {"fletcher32", [](hid_t p) { H5Pset_fletcher32(p); }}};
  unsigned seed = 0;
  for (const hid_t type : {H5T_STD_I8LE, H5T_IEEE_F32LE, H5T_IEEE_F64LE})
    for (const Shape& shape : shapes)
      for (const auto& [name, set] : pipelines) {
        ++seed;
        std::size_t elements = 1;
        for (const hsize_t extent : shape.extent) elements *= extent;
        const std::vector<std::byte> data = noise(elements * H5Tget_size(type), seed, seed % 2 == 0 ? 256 : 3);
        {
          const FileId file = create(at("x.h5"));
          make(file, "v", type, shape.extent, data.data(), [&, &set = set](hid_t creation) {
            H5Pset_chunk(creation, static_cast<int>(shape.chunk.size()), shape.chunk.data());
            set(creation);
          });
        }
        for (const unsigned threads : {1U, 3U})
          for (const std::uint64_t step : {1U, 7U, 10U, 1000U}) {
            const auto reader = open_rows(location("x.h5:v"), {.threads = threads});
            ASSERT_TRUE(read_all(*reader, step) == data)
                << name << ' ' << ::testing::PrintToString(shape.extent) << ::testing::PrintToString(shape.chunk) << ' ' << step;
          }
      }
}

// Behind a filter that packs, szip is given fewer bytes than a chunk has, or a few more.
TEST_F(Hdf5ChunksTest, SzipBehindOtherFiltersIsRead) {
  if (H5Zfilter_avail(H5Z_FILTER_SZIP) <= 0) GTEST_SKIP() << "this HDF5 has no szip";
  unsigned config = 0;
  if (H5Zget_filter_info(H5Z_FILTER_SZIP, &config) < 0 || (config & H5Z_FILTER_CONFIG_ENCODE_ENABLED) == 0)
    GTEST_SKIP() << "this HDF5 cannot write szip";
  const auto szip = [](hid_t p) { H5Pset_szip(p, H5_SZIP_NN_OPTION_MASK, 8); };
  const std::vector<std::pair<std::string_view, std::function<void(hid_t)>>> pipelines{
      {"gzip, szip", [&](hid_t p) { H5Pset_deflate(p, 1), szip(p); }},
      {"nbit, szip, fletcher32", [&](hid_t p) { H5Pset_nbit(p), szip(p), H5Pset_fletcher32(p); }},
      {"shuffle, fletcher32, szip", [&](hid_t p) { H5Pset_shuffle(p), H5Pset_fletcher32(p), szip(p); }}};
  for (const auto& [name, set] : pipelines)
    for (const unsigned values : {3U, 256U}) {
      const std::vector<std::byte> data = noise(96 * 8, values, values);
      {
        const FileId file = create(at("x.h5"));
        make(file, "v", H5T_STD_U8LE, {96, 8}, data.data(), [&, &put = set](hid_t creation) {
          const std::array<hsize_t, 2> chunk{32, 8};
          H5Pset_chunk(creation, 2, chunk.data());
          put(creation);
        });
      }
      for (const std::uint64_t step : {7U, 96U})
        EXPECT_TRUE(read_all(*open_rows(location("x.h5:v")), step) == data) << name << ' ' << values;
    }
}

TEST_F(Hdf5ChunksTest, ChunksThatWereNeverWrittenAreTheFillValue) {
  const float fill = 2.5F;
  {
    const FileId file = create(at("x.h5"));
    make(file, "v", H5T_IEEE_F32LE, {10, 3}, nullptr, [&](hid_t creation) {
      const std::array<hsize_t, 2> chunk{4, 2};
      H5Pset_chunk(creation, 2, chunk.data());
      H5Pset_deflate(creation, 1);
      H5Pset_fill_value(creation, H5T_NATIVE_FLOAT, &fill);
    });
    const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
    const SpaceId space{H5Dget_space(dataset.id())};
    const std::array<hsize_t, 2> start{4, 0}, count{1, 1};
    H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr);
    const SpaceId memory{H5Screate_simple(2, count.data(), nullptr)};
    const float one = 1;
    ASSERT_GE(H5Dwrite(dataset.id(), H5T_NATIVE_FLOAT, memory.id(), space.id(), H5P_DEFAULT, &one), 0);
  }
  std::vector<float> expected(30, fill);
  expected[12] = 1;
  const auto reader = open_rows(location("x.h5"));
  for (const std::uint64_t step : {1U, 4U, 10U}) {
    const auto bytes = read_all(*reader, step);
    EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
  }
}

TEST_F(Hdf5ChunksTest, WhatWePackTheLibraryUnpacks) {
  unsigned seed = 0;
  for (const DType dtype : {DType::kUInt8, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    for (const std::uint64_t rows : {1U, 31U, 32U, 33U, 1000U})
      for (const int gzip : {0, 1, 9})
        for (const std::uint64_t step : {1U, 64U, 1000U}) {
          constexpr std::uint64_t kDim = 5;
          const std::uint64_t row_bytes = kDim * item_size(dtype);
          ++seed;
          const std::vector<std::byte> data = noise(rows * row_bytes, seed, seed % 2 == 0 ? 256 : 3);
          const auto writer = create_rows(location("x.h5:v"), rows, kDim, dtype,
                                          {.overwrite = true, .gzip = gzip, .chunk_rows = 32, .threads = 1 + seed % 3});
          for (std::uint64_t at = 0; at < rows; at += step)
            writer->write(std::min(step, rows - at), data.data() + at * row_bytes);
          writer->finish();
          std::vector<std::byte> back(data.size());
          const FileId file{H5Fopen(at("x.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)};
          const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
          const TypeId type{H5Dget_type(dataset.id())};
          ASSERT_GE(H5Dread(dataset.id(), type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data()), 0);
          ASSERT_TRUE(back == data) << dtype_name(dtype) << ' ' << rows << ' ' << gzip << ' ' << step;
        }
}

TEST_F(Hdf5ChunksTest, EqualRowsMakeEqualFilesWhateverTheThreads) {
  const std::vector<std::byte> data = noise(100'000 * 16, 1, 5);
  std::string first;
  for (const unsigned threads : {1U, 2U, 4U}) {
    const auto writer =
        create_rows(location("x.h5"), 100'000, 4, DType::kFloat32, {.overwrite = true, .gzip = 3, .threads = threads});
    writer->write(100'000, data.data());
    writer->finish();
    if (first.empty()) first = file_text(at("x.h5"));
    EXPECT_TRUE(file_text(at("x.h5")) == first) << threads;
  }
}

// A dataset of one chunk, stored as given.
TEST_F(Hdf5ChunksTest, DamagedChunksAreNamed) {
  const auto refuse = [&](const std::vector<std::byte>& stored, unsigned skipped, const std::function<void(hid_t)>& set,
                          hsize_t rows = 4) {
    {
      const FileId file = create(at("x.h5"));
      make(file, "v", H5T_IEEE_F32LE, {rows, 8}, nullptr, [&](hid_t creation) {
        const std::array<hsize_t, 2> chunk{rows, 8};
        H5Pset_chunk(creation, 2, chunk.data());
        set(creation);
      });
      const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
      const std::array<hsize_t, 2> origin{0, 0};
      EXPECT_GE(H5Dwrite_chunk(dataset.id(), H5P_DEFAULT, skipped, origin.data(), stored.size(), stored.data()), 0);
    }
    const auto reader = open_rows(location("x.h5"));
    std::vector<std::byte> out(rows * 32);
    const std::string text = error_of<FormatError>([&] { reader->read(0, rows, out.data()); });
    EXPECT_THAT(text, AllOf(HasSubstr("x.h5"), HasSubstr("/v: the chunk at (0, 0)")));
    return text;
  };
  const auto gzip = [](hid_t p) { H5Pset_deflate(p, 4); };
  const auto sum = [](hid_t p) { H5Pset_fletcher32(p); };
  EXPECT_THAT(refuse(noise(50, 1), 0, gzip), HasSubstr("deflated data is broken"));
  EXPECT_THAT(refuse(noise(50, 1), 1, gzip), HasSubstr("unpacks to 50 bytes, a chunk has 128"));
  EXPECT_THAT(refuse(noise(300'000, 1), 0, gzip, 2048), HasSubstr("300000 bytes are stored for 65536"));
  EXPECT_THAT(refuse(noise(132, 1), 0, sum), HasSubstr("checksum"));
  EXPECT_THAT(refuse(noise(3, 1), 0, sum), HasSubstr("too few"));
  // Good deflated data of a longer and of a shorter chunk.
  for (const std::uint64_t rows : {3U, 5U}) {
    ChunkLayout other;
    other.chunk_bytes = rows * 32;
    other.filters = {{Filter::Kind::kDeflate, 6}};
    std::vector<std::byte> data(rows * 32, std::byte{7});
    ChunkScratch scratch;
    EXPECT_EQ(pack_chunk(other, data, scratch), 0U);
    EXPECT_THAT(refuse(data, 0, gzip), HasSubstr(rows < 4 ? "unpacks to 96 bytes" : "more than a chunk"));
  }
}

// Without filters nothing tells how many bytes of a chunk a file says are stored: it must not matter.
TEST_F(Hdf5ChunksTest, ChunksWithoutFiltersTakeNoMoreThanAChunkHas) {
  for (const std::size_t stored : {std::size_t{1} << 20, std::size_t{128}}) {
    const std::vector<std::byte> junk = noise(stored, 1), rest = noise(128, 2);
    {
      const FileId file = create(at("x.h5"));
      make(file, "v", H5T_IEEE_F32LE, {8, 8}, nullptr, [](hid_t creation) {
        const std::array<hsize_t, 2> chunk{4, 8};
        H5Pset_chunk(creation, 2, chunk.data());
      });
      const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
      const std::array<hsize_t, 2> first{0, 0}, second{4, 0};
      EXPECT_GE(H5Dwrite_chunk(dataset.id(), H5P_DEFAULT, 0, first.data(), junk.size(), junk.data()), 0);
      EXPECT_GE(H5Dwrite_chunk(dataset.id(), H5P_DEFAULT, 0, second.data(), rest.size(), rest.data()), 0);
    }
    std::vector<std::byte> expected(junk.begin(), junk.begin() + 128);
    expected.insert(expected.end(), rest.begin(), rest.end());
    for (const std::uint64_t step : {1U, 3U, 8U})
      for (const unsigned threads : {1U, 2U}) {
        const auto reader = open_rows(location("x.h5:v"), {.threads = threads});
        EXPECT_TRUE(read_all(*reader, step) == expected) << stored << ' ' << step;
      }
  }
}

TEST(Hdf5Chunk, PackingAndBackIsTheSameForAnyItem) {
  for (const unsigned item : {1U, 2U, 3U, 4U, 7U, 8U, 16U})
    for (const std::size_t bytes : {1U, 15U, 16U, 17U, 1000U, 65536U}) {
      ChunkLayout layout;
      layout.chunk_bytes = bytes;
      layout.filters = {{Filter::Kind::kShuffle, item}, {Filter::Kind::kDeflate, 6}};
      const std::vector<std::byte> data = noise(bytes, item, 3);
      std::vector<std::byte> packed = data;
      ChunkScratch scratch;
      const unsigned skipped = pack_chunk(layout, packed, scratch);
      EXPECT_LE(packed.size(), data.size());
      EXPECT_EQ(unpack_chunk(layout, skipped, packed, scratch), "");
      ASSERT_TRUE(packed == data) << item << ' ' << bytes;
    }
}

TEST(Hdf5Chunk, JunkOfAnyKindIsRefusedOrRead) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    ChunkLayout layout;
    layout.chunk_bytes = 64;
    constexpr std::array kKinds{Filter::Kind::kLzf, Filter::Kind::kShuffle, Filter::Kind::kDeflate, Filter::Kind::kFletcher32};
    for (unsigned i = 0; i <= seed % 3; ++i) layout.filters.push_back({kKinds[(seed / 3 + i * 7) % 4], 1 + seed % 9});
    std::vector<std::byte> data = noise(seed % 100, seed);
    ChunkScratch scratch;
    if (unpack_chunk(layout, seed % 8, data, scratch).empty()) {
      EXPECT_EQ(data.size(), 64U);
    }
  }
}

// The bytes of a layout as the library has written them, found in the file and changed.
TEST_F(Hdf5ChunksTest, LayoutsThatContradictTheFileAreNamedBeforeTheLibraryActsOnThem) {
  const auto data = noise(30 * 7 * 4, 1);
  const auto le32 = [](std::uint64_t value) { return std::string(reinterpret_cast<const char*>(&value), 4); };
  const auto change = [&](const std::string& from, const std::string& to) {
    std::string text = file_text(at("x.h5"));
    const std::size_t found = text.find(from);
    ASSERT_NE(found, std::string::npos);
    ASSERT_EQ(text.find(from, found + 1), std::string::npos);
    make_file(at("x.h5"), text.replace(found, to.size(), to));
  };
  const auto make_chunked = [&] {
    const FileId file = create(at("x.h5"));
    make(file, "v", H5T_IEEE_F32LE, {30, 7}, data.data(), [](hid_t creation) {
      const std::array<hsize_t, 2> chunk{13, 5};
      H5Pset_chunk(creation, 2, chunk.data());
      H5Pset_shuffle(creation);
      H5Pset_deflate(creation, 1);
    });
  };
  const std::string chunk = le32(13) + le32(5) + le32(4);
  make_chunked();
  change(chunk, le32(13) + le32(9));
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("x.h5")); }), HasSubstr("(13, 9)"));

  // Rows in the header, fewer than the shape says.
  {
    const FileId file = create(at("x.h5"));
    make(file, "v", H5T_IEEE_F32LE, {30, 7}, data.data(), [](hid_t creation) { H5Pset_layout(creation, H5D_COMPACT); });
  }
  change(std::string("\x03\x00\x48\x03", 4), std::string("\x03\x00\x44\x03", 4));  // 840 bytes, and 836
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("x.h5")); }), HasSubstr("/v"));

  // Rows in one piece that would lie behind the end of the file.
  std::uint64_t begin = 0;
  {
    const FileId file = create(at("x.h5"));
    make(file, "v", H5T_IEEE_F32LE, {30, 7}, data.data(), [](hid_t) {});
    const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
    begin = H5Dget_offset(dataset.id());
  }
  const auto le64 = [](std::uint64_t value) { return std::string(reinterpret_cast<const char*>(&value), 8); };
  const std::uint64_t behind = begin + 100, bytes = 30 * 7 * 4;
  change(le64(begin) + le64(bytes), le64(behind) + le64(bytes));
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(location("x.h5")); }),
              HasSubstr("truncated: /v has 840 bytes from byte " + std::to_string(behind) + " on"));
}

TEST_F(Hdf5ChunksTest, FiltersWhoseParametersContradictTheChunkAreNamed) {
  const auto layout = [&](H5Z_filter_t filter, std::vector<unsigned> values) {
    const PropertyId creation{H5Pcreate(H5P_DATASET_CREATE)};
    const std::array<hsize_t, 2> chunk{4, 8};
    H5Pset_chunk(creation.id(), 2, chunk.data());
    EXPECT_GE(H5Pset_filter(creation.id(), filter, H5Z_FLAG_OPTIONAL, values.size(), values.data()), 0);
    return chunk_layout(creation.id(), {8, 8}, {8, 8}, 4, "x.h5", "/v");
  };
  const auto refuse = [&](H5Z_filter_t filter, const std::vector<unsigned>& values) {
    const std::string text = error_of<FormatError>([&] { layout(filter, values); });
    EXPECT_THAT(text, HasSubstr("x.h5: /v is damaged: "));
    return text;
  };
  register_lzf();
  layout(32000, {4, 0x0105, 128});
  EXPECT_THAT(refuse(32000, {4, 0x0105, 127}), HasSubstr("lzf has chunks of 127 bytes, they have 128"));
  EXPECT_EQ(layout(H5Z_FILTER_SHUFFLE, {4}).filters.at(0).value, 4U);
  EXPECT_THAT(refuse(H5Z_FILTER_SHUFFLE, {0}), HasSubstr("items of 0 bytes"));
  EXPECT_THAT(refuse(H5Z_FILTER_SHUFFLE, {}), HasSubstr("items of 0 bytes"));
  EXPECT_THAT(refuse(H5Z_FILTER_SHUFFLE, {129}), HasSubstr("items of 129 bytes, chunks have 128"));
  EXPECT_EQ(layout(H5Z_FILTER_SZIP, {141, 8, 32, 8}).szip, 0U);
  EXPECT_THAT(refuse(H5Z_FILTER_SZIP, {141, 8, 32}), HasSubstr("szip has 3 parameters"));
  EXPECT_THAT(refuse(H5Z_FILTER_SZIP, {141, 7, 32, 8}), HasSubstr("blocks of 7"));
  EXPECT_THAT(refuse(H5Z_FILTER_SZIP, {141, 8, 64, 8}), HasSubstr("64 bits, they have 32"));
  EXPECT_THAT(refuse(H5Z_FILTER_SZIP, {141, 8, 32, 1 << 20}), HasSubstr("lines of 1048576"));
  EXPECT_THAT(refuse(H5Z_FILTER_NBIT, {4, 0, 32, 1}), HasSubstr("nbit"));
  EXPECT_THAT(refuse(H5Z_FILTER_NBIT, {8, 0, 33, 1, 4, 0, 17, 3}), HasSubstr("33 elements, chunks have 32"));
  EXPECT_THAT(refuse(H5Z_FILTER_SCALEOFFSET, std::vector<unsigned>(20, 4)), HasSubstr("scaleoffset"));
}

TEST_F(Hdf5ChunksTest, WhatSzipSaysOfAChunkIsComparedWithIt) {
  if (H5Zfilter_avail(H5Z_FILTER_SZIP) <= 0) GTEST_SKIP() << "this library has no szip";
  const auto data = noise(64 * 16, 3, 4);
  const auto set = [](hid_t creation) {
    const std::array<hsize_t, 2> chunk{32, 16};
    H5Pset_chunk(creation, 2, chunk.data());
    H5Pset_szip(creation, H5_SZIP_NN_OPTION_MASK, 16);
  };
  {
    const FileId file = create(at("x.h5"));
    make(file, "v", H5T_STD_U8LE, {64, 16}, data.data(), set);
  }
  EXPECT_TRUE(read_all(*open_rows(location("x.h5")), 64) == data);
  for (const std::uint32_t bytes : {511U, 513U, 0xFFFFFFFFU}) {
    {
      const FileId file = create(at("x.h5"));
      make(file, "v", H5T_STD_U8LE, {64, 16}, data.data(), set);
      const DatasetId dataset{H5Dopen2(file.id(), "v", H5P_DEFAULT)};
      std::vector<std::byte> stored(600);
      std::memcpy(stored.data(), &bytes, 4);
      const std::array<hsize_t, 2> second{32, 0};
      ASSERT_GE(H5Dwrite_chunk(dataset.id(), H5P_DEFAULT, 0, second.data(), stored.size(), stored.data()), 0);
    }
    const auto reader = open_rows(location("x.h5"));
    std::vector<std::byte> out(64 * 16);
    reader->read(0, 32, out.data());
    EXPECT_THAT(error_of<FormatError>([&] { reader->read(32, 1, out.data()); }),
                AllOf(HasSubstr("the chunk at (32, 0) is damaged"), HasSubstr("szip says"), HasSubstr(std::to_string(bytes))));
  }
}

TEST_F(Hdf5ChunksTest, FieldsWithinFieldsAreFoundOrRefused) {
  struct Inner {
    float d;
    std::int32_t e;
  };
  struct Record {
    double a;
    Inner c;
  };
  const TypeId inner{H5Tcreate(H5T_COMPOUND, sizeof(Inner))}, record{H5Tcreate(H5T_COMPOUND, sizeof(Record))};
  H5Tinsert(inner.id(), "d", offsetof(Inner, d), H5T_IEEE_F32LE);
  H5Tinsert(inner.id(), "e", offsetof(Inner, e), H5T_STD_I32LE);
  H5Tinsert(record.id(), "a", offsetof(Record, a), H5T_IEEE_F64LE);
  H5Tinsert(record.id(), "c", offsetof(Record, c), inner.id());
  std::vector<Record> records(20);
  for (int i = 0; i < 20; ++i) records[static_cast<std::size_t>(i)] = {i * 1.5, {static_cast<float>(i), -i}};
  for (const bool chunked : {false, true}) {
    {
      const FileId file = create(at("x.h5"));
      make(file, "rec", record.id(), {20}, records.data(), [&](hid_t creation) {
        const hsize_t chunk = 6;
        if (chunked) H5Pset_chunk(creation, 1, &chunk), H5Pset_deflate(creation, 1);
      });
    }
    std::vector<std::int32_t> e(20);
    open_rows(location("x.h5:/rec:c:e"))->read(0, 20, reinterpret_cast<std::byte*>(e.data()));
    std::vector<float> d(20);
    open_rows(location("x.h5:/rec:c:d"))->read(0, 20, reinterpret_cast<std::byte*>(d.data()));
    std::vector<double> a(20);
    open_rows(location("x.h5:/rec:a"))->read(0, 20, reinterpret_cast<std::byte*>(a.data()));
    for (std::size_t i = 0; i < 20; ++i) {
      ASSERT_EQ(e[i], -static_cast<int>(i));
      ASSERT_EQ(d[i], static_cast<float>(i));
      ASSERT_EQ(a[i], static_cast<double>(i) * 1.5);
    }
    EXPECT_THAT(error_of<DTypeError>([&] { open_rows(location("x.h5:/rec:c")); }), HasSubstr("name a field of them"));
    EXPECT_THAT(error_of<NotFound>([&] { open_rows(location("x.h5:/rec:c:x")); }), HasSubstr("no field 'x'"));
    EXPECT_THAT(error_of<NotFound>([&] { open_rows(location("x.h5:/rec:a:x")); }), HasSubstr("no field 'x' in 'a'"));
  }
}

TEST_F(Hdf5ChunksTest, ExternalLinksOnlyAsAllowed) {
  std::filesystem::create_directories(at("d/in"));
  const std::vector<float> data{1, 2, 3, 4};
  const auto make_target = [&](const char* name) {
    const FileId file = create(at(name));
    make(file, "v", H5T_IEEE_F32LE, {2, 2}, data.data(), [](hid_t) {});
  };
  make_target("d/in/below.h5");
  make_target("outside.h5");
  {
    const FileId file = create(at("d/x.h5"));
    H5Lcreate_external("in/below.h5", "/v", file.id(), "below", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("in/below.h5", "/", file.id(), "group", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("../outside.h5", "/v", file.id(), "outside", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external(at("outside.h5").c_str(), "/v", file.id(), "absolute", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("x.h5", "/circle", file.id(), "circle", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_external("none.h5", "/v", file.id(), "nowhere", H5P_DEFAULT, H5P_DEFAULT);
  }
  const auto open = [&](std::string_view name, const ReadOptions& options) {
    const auto reader = open_rows(location("d/x.h5:/" + std::string(name)), options);
    std::vector<float> out(4);
    reader->read(0, 2, reinterpret_cast<std::byte*>(out.data()));
    EXPECT_EQ(out, data);
  };
  const ReadOptions below{.allow_external = true}, any{.follow_links = true};
  for (const auto* const name : {"below", "group/v", "outside", "absolute"})
    EXPECT_THAT(error_of<FormatError>([&] { open(name, {}); }), AllOf(HasSubstr("external link"), HasSubstr("follow_links")));
  open("below", below);
  open("group/v", below);
  for (const auto* const name : {"outside", "absolute"}) {
    EXPECT_THAT(error_of<FormatError>([&] { open(name, below); }), HasSubstr("not below the file's own folder"));
    open(name, any);
  }
  open("below", any);
  EXPECT_THAT(error_of<FormatError>([&] { open("circle", any); }), HasSubstr("more than 32 times"));
  EXPECT_THAT(error_of<IoError>([&] { open("nowhere", any); }), HasSubstr("none.h5"));
  EXPECT_THAT(error_of<NotFound>([&] { open("group/w", any); }), HasSubstr("nothing at /w"));
}

TEST_F(Hdf5ChunksTest, AttributesAreWrittenAndListed) {
  const std::vector<float> data(6);
  for (const int gzip : {-1, 1}) {
    const auto writer =
        create_rows(location("x.h5"), 2, 3, DType::kFloat32,
                    {.overwrite = true,
                     .gzip = gzip,
                     .attributes = {{"source", "\xC3\xA4 b.npy"}, {"commit", "12"}, {"empty", ""}, {"mixed", "12a"}}});
    writer->write(2, reinterpret_cast<const std::byte*>(data.data()));
    writer->finish();
    EXPECT_THAT(list_entries(at("x.h5"), Location::Format::kHdf5).at(0).attributes,
                ElementsAre(Pair("commit", "12"), Pair("empty", ""), Pair("mixed", "12a"), Pair("source", "\xC3\xA4 b.npy")));
  }
  EXPECT_THAT(error_of<InvalidArgument>([&] {
                create_rows(location("y.h5"), 2, 3, DType::kFloat32, {.attributes = {{"long", std::string(70000, 'a')}}});
              }),
              HasSubstr("70000 bytes"));
  EXPECT_THAT(names(), ElementsAre("x.h5"));
}

// More rows than are written by the caller, in one piece, in a file that has other things already.
TEST_F(Hdf5ChunksTest, LargeRowsInOnePieceGoPastTheLibrary) {
  constexpr std::uint64_t kRows = 300'007, kDim = 16;
  const std::vector<std::byte> data = noise(kRows * kDim * 4, 5);
  for (const auto* const name : {"x.h5:a", "x.h5:b"}) {
    const auto writer = create_rows(location(name), kRows, kDim, DType::kFloat32);
    EXPECT_LE(writer->write_behind(8 << 20), 8U << 20);
    for (std::uint64_t row = 0; row < kRows; row += 9999)
      writer->write(std::min<std::uint64_t>(9999, kRows - row), data.data() + row * kDim * 4);
    writer->finish();
  }
  for (const auto* const name : {"x.h5:a", "x.h5:b"}) {
    const auto reader = open_rows(location(name));
    reader->read_ahead(0, kRows, 8 << 20);
    EXPECT_TRUE(read_all(*reader, 10'000) == data);
    const FileId file{H5Fopen(at("x.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)};
    const DatasetId dataset{H5Dopen2(file.id(), name + 5, H5P_DEFAULT)};
    std::vector<std::byte> back(data.size());
    ASSERT_GE(H5Dread(dataset.id(), H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, back.data()), 0);
    EXPECT_TRUE(back == data);
  }
}

}  // namespace
}  // namespace embermap
