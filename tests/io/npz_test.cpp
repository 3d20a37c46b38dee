#include <cstring>
#include <numeric>
#include <thread>

#include "io/rows.hpp"
#include "io/zip.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;

constexpr LocationOptions kWriting{.format = {}, .use = LocationOptions::Use::kWrite};

class NpzTest : public testing::FolderTest {
 protected:
  Location source(std::string_view text) const { return parse_location(at(text).string()); }
  Location destination(std::string_view text) const { return parse_location(at(text).string(), kWriting); }

  void write(std::string_view text, const std::vector<float>& values, std::uint64_t dim, const WriteOptions& options = {}) const {
    const auto writer = create_rows(destination(text), values.size() / dim, dim, DType::kFloat32, options);
    writer->write(values.size() / dim, reinterpret_cast<const std::byte*>(values.data()));
    writer->finish();
  }

  std::vector<float> read(std::string_view text) const {
    const auto reader = open_rows(source(text));
    std::vector<float> out(reader->rows() * reader->dim());
    reader->read(0, reader->rows(), reinterpret_cast<std::byte*>(out.data()));
    return out;
  }

  void make_zip(std::string_view name, const std::vector<std::pair<std::string, std::string>>& members, int level = -1) const {
    File file = File::open(at(name), File::Mode::kCreateNew);
    ZipWriter zip(file);
    for (const auto& [member, data] : members) {
      zip.begin(member, data.size(), level, 1);
      zip.write(std::as_bytes(std::span(data)));
      zip.end();
    }
    zip.finish();
  }

  // Flips a bit of one byte.
  void damage(std::string_view name, std::size_t place) const {
    std::string text = file_text(at(name));
    text.at(place) = static_cast<char>(text[place] ^ 0x10);
    make_file(at(name), text);
  }
};

std::vector<float> counting(std::size_t count) {
  std::vector<float> out(count);
  std::iota(out.begin(), out.end(), 0.0F);
  return out;
}

TEST_F(NpzTest, RoundTripsStoredAndDeflated) {
  const std::vector<float> values = counting(200000);
  for (const int gzip : {-1, 0, 1, 9}) {
    write("x.npz:v", values, 8, {.overwrite = true, .gzip = gzip});
    EXPECT_EQ(read("x.npz:v"), values) << gzip;
    EXPECT_EQ(read("x.npz:v.npy"), values) << gzip;
    EXPECT_EQ(read("x.npz"), values) << gzip;
  }
  EXPECT_LT(std::filesystem::file_size(at("x.npz")), values.size() * 4);
}

TEST_F(NpzTest, EmptyTables) {
  for (const int gzip : {-1, 6}) {
    write("e.npz", {}, 3, {.overwrite = true, .gzip = gzip});
    const auto reader = open_rows(source("e.npz"));
    EXPECT_EQ(reader->rows(), 0U);
    EXPECT_EQ(reader->dim(), 3U);
  }
}

TEST_F(NpzTest, DeflatedRowsInAnyOrder) {
  const std::vector<float> values = counting(300000);
  write("x.npz", values, 3, {.gzip = 6});
  const auto reader = open_rows(source("x.npz"));
  for (const std::uint64_t row : {0U, 99999U, 50000U, 50001U, 7U, 7U}) {
    std::vector<float> out(3);
    reader->read(row, 1, reinterpret_cast<std::byte*>(out.data()));
    const auto first = static_cast<float>(row * 3);
    EXPECT_THAT(out, ElementsAre(first, first + 1, first + 2)) << row;
  }
}

TEST_F(NpzTest, AMemberIsAddedAndReplacedBesideTheOthers) {
  write("x.npz:a", counting(12), 3);
  write("x.npz:b", counting(8), 2, {.gzip = 6});
  EXPECT_EQ(read("x.npz:a"), counting(12));
  EXPECT_EQ(read("x.npz:b"), counting(8));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.npz:a", counting(2), 1); }), HasSubstr("x.npz:a already exists"));
  write("x.npz:a", counting(2), 1, {.overwrite = true});
  EXPECT_EQ(read("x.npz:a"), counting(2));
  EXPECT_EQ(read("x.npz:b"), counting(8));
  const std::vector<Entry> entries = list_entries(at("x.npz"), Location::Format::kNpz);
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(entries[0].name, "b");
  EXPECT_EQ(entries[0].layout, "deflated");
  EXPECT_EQ(entries[1].name, "a");
  EXPECT_THAT(entries[1].shape, ElementsAre(2, 1));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.npz", counting(2), 1); }), HasSubstr("x.npz"));
  EXPECT_THAT(names(), ElementsAre("x.npz"));
}

TEST_F(NpzTest, SeveralWritersOfOneFileKeepWhatTheOthersDid) {
  constexpr int kWriters = 6;
  std::vector<std::thread> threads;
  for (int i = 0; i < kWriters; ++i)
    threads.emplace_back([&, i] { write("x.npz:m" + std::to_string(i), counting(static_cast<std::size_t>(i) + 1), 1); });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kWriters; ++i) EXPECT_EQ(read("x.npz:m" + std::to_string(i)), counting(static_cast<std::size_t>(i) + 1));
}

TEST_F(NpzTest, WriterWithoutFinishLeavesEverythingAsItWas) {
  write("x.npz:a", counting(12), 3);
  const std::string before = file_text(at("x.npz"));
  {
    const auto writer = create_rows(destination("x.npz:b"), 2, 2, DType::kFloat32, {});
    const std::vector<float> row{1, 2};
    writer->write(1, reinterpret_cast<const std::byte*>(row.data()));
    EXPECT_THROW(writer->finish(), InvalidArgument);
  }
  EXPECT_EQ(file_text(at("x.npz")), before);
  EXPECT_THAT(names(), ElementsAre("x.npz"));
}

TEST_F(NpzTest, WhatIsNotThereIsNamedWithWhatIs) {
  write("x.npz:a", counting(12), 3);
  write("x.npz:b", counting(12), 3);
  EXPECT_THAT(error_of<NotFound>([&] { open_rows(source("x.npz:c")); }),
              AllOf(HasSubstr("no array 'c'"), HasSubstr("a: <f4 (4, 3)")));
  EXPECT_THAT(error_of<InvalidArgument>([&] { open_rows(source("x.npz")); }), HasSubstr("2 arrays could be meant"));
  EXPECT_THAT(error_of<NotFound>([&] { open_rows(source("x.npz:a:f")); }), HasSubstr("no field 'f'"));
  make_zip("empty.npz", {});
  EXPECT_THAT(error_of<NotFound>([&] { open_rows(source("empty.npz")); }), HasSubstr("it holds nothing"));
  make_zip("bytes.npz", {{"readme.txt", "words"}});
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(source("bytes.npz")); }), HasSubstr("no NPY magic"));
}

TEST_F(NpzTest, OtherMethodsAndEncryptionAreNamed) {
  write("x.npz:a", counting(12), 3);
  const std::string text = file_text(at("x.npz"));
  const std::size_t entry = text.rfind("PK\x01\x02");
  const auto with = [&](std::size_t local, std::size_t central, char value) {
    std::string changed = text;
    changed[local] = value;
    changed[entry + central] = value;
    make_file(at("y.npz"), changed);
    return error_of<FormatError>([&] { open_rows(source("y.npz:a")); });
  };
  EXPECT_THAT(with(8, 10, 12), HasSubstr("bzip2"));
  EXPECT_THAT(with(8, 10, 93), HasSubstr("zstd"));
  EXPECT_THAT(with(6, 8, 1), HasSubstr("encrypted"));
}

TEST_F(NpzTest, DamagedMembersAreFoundWhenTheyAreRead) {
  const std::vector<float> values = counting(30000);
  for (const int gzip : {-1, 6}) {
    write("x.npz", values, 3, {.overwrite = true, .gzip = gzip});
    damage("x.npz", std::filesystem::file_size(at("x.npz")) / 2);
    EXPECT_THAT(error_of<FormatError>([&] { read("x.npz"); }), HasSubstr("damaged")) << gzip;
  }
}

TEST_F(NpzTest, EveryCutAndEveryFlippedByteIsAnErrorOrTheSameRows) {
  for (const int gzip : {-1, 6}) {
    write("x.npz:a", counting(12), 3, {.overwrite = true, .gzip = gzip});
    const std::string text = file_text(at("x.npz"));
    for (std::size_t size = 0; size < text.size(); ++size) {
      make_file(at("y.npz"), text.substr(0, size));
      EXPECT_THROW(read("y.npz:a"), Error) << size;
    }
    for (std::size_t place = 0; place < text.size(); ++place) {
      std::string changed = text;
      changed[place] = static_cast<char>(changed[place] ^ 0x41);
      make_file(at("y.npz"), changed);
      try {
        EXPECT_EQ(read("y.npz:a"), counting(12)) << place;
      } catch (const Error&) {
      }
    }
  }
}

TEST_F(NpzTest, MembersThatLieOverOneAnotherAreRefused) {
  make_zip("x.npz", {{"a.npy", std::string(100, 'a')}, {"b.npy", std::string(100, 'b')}});
  std::string text = file_text(at("x.npz"));
  const std::size_t second = text.rfind("PK\x01\x02");
  std::memset(text.data() + second + 42, 0, 4);  // the offset of the second is that of the first
  make_file(at("y.npz"), text);
  EXPECT_THAT(error_of<FormatError>([&] { open_rows(source("y.npz:a")); }), HasSubstr("lie over one another"));
}

TEST_F(NpzTest, BytesBeforeAndBehindTheArchiveDoNotMatter) {
  write("x.npz:a", counting(12), 3);
  make_file(at("y.npz"), "#!/bin/sh\n" + file_text(at("x.npz")));
  EXPECT_EQ(read("y.npz:a"), counting(12));
  make_file(at("z.npz"), file_text(at("x.npz")) + "more");
  EXPECT_EQ(read("z.npz:a"), counting(12));
}

TEST_F(NpzTest, SizesPast32BitsAreZip64) {
  // A sparse file: 5 GiB of zeros take no disk, the members behind them have offsets past 32 bits.
  {
    File file = File::open(at("big.npz"), File::Mode::kCreateNew);
    ZipWriter zip(file, 5ULL << 30);
    zip.begin("small.npy", 8, -1, 1);
    zip.write(std::as_bytes(std::span(std::string_view("12345678"))));
    zip.end();
    zip.finish();
  }
  const File file = File::open(at("big.npz"), File::Mode::kRead);
  const ZipDirectory directory(file);
  ASSERT_EQ(directory.members().size(), 1U);
  EXPECT_EQ(directory.members()[0].header_offset, 5ULL << 30);
  ZipMemberReader reader(file, directory, directory.members()[0], true);
  std::string text(8, '\0');
  reader.read(0, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "12345678");
}

}  // namespace
}  // namespace embermap
