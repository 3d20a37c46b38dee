#include "io/safetensors.hpp"

#include <numeric>
#include <thread>

#include "io/rows.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using testing::make_file;

class SafetensorsTest : public testing::FolderTest {
 protected:
  Location location(std::string_view text) const {
    return parse_location(at(text).string(), {.format = Location::Format::kSafetensors});
  }

  void write(std::string_view text, const std::vector<float>& values, std::uint64_t dim, const WriteOptions& options = {}) const {
    const auto writer = create_rows(location(text), values.size() / dim, dim, DType::kFloat32, options);
    writer->write(values.size() / dim, reinterpret_cast<const std::byte*>(values.data()));
    writer->finish();
  }

  std::vector<float> read(std::string_view text) const {
    const auto reader = open_rows(location(text));
    std::vector<float> out(reader->rows() * reader->dim());
    reader->read(0, reader->rows(), reinterpret_cast<std::byte*>(out.data()));
    return out;
  }
};

std::vector<float> counting(std::size_t count) {
  std::vector<float> out(count);
  std::iota(out.begin(), out.end(), 0.0F);
  return out;
}

TEST_F(SafetensorsTest, TensorsAreAddedAndReplaced) {
  write("x.safetensors:b", counting(12), 3);
  write("x.safetensors:a", counting(600000), 2);
  EXPECT_EQ(read("x.safetensors:b"), counting(12));
  EXPECT_EQ(read("x.safetensors:a"), counting(600000));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.safetensors:a", counting(4), 2); }), HasSubstr(":a already exists"));
  write("x.safetensors:a", counting(4), 2, {.overwrite = true});
  EXPECT_EQ(read("x.safetensors:a"), counting(4));
  EXPECT_EQ(read("x.safetensors:b"), counting(12));
  EXPECT_THAT(error_of<AlreadyExists>([&] { write("x.safetensors", counting(4), 2); }), HasSubstr("x.safetensors"));
  const SafetensorsHeader header = read_safetensors_header(File::open(at("x.safetensors"), File::Mode::kRead));
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(header.data_offset % 8, 0U);
  EXPECT_THAT(names(), ElementsAre("x.safetensors"));
}

TEST_F(SafetensorsTest, SeveralWritersOfOneFileKeepWhatTheOthersDid) {
  constexpr std::size_t kWriters = 6;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kWriters; ++i)
    threads.emplace_back([&, i] { write("x.safetensors:t" + std::to_string(i), counting(i + 1), 1); });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < kWriters; ++i) EXPECT_EQ(read("x.safetensors:t" + std::to_string(i)), counting(i + 1));
}

TEST_F(SafetensorsTest, WriterWithoutFinishLeavesEverythingAsItWas) {
  write("x.safetensors:a", counting(12), 3);
  const std::string before = file_text(at("x.safetensors"));
  {
    const auto writer = create_rows(location("x.safetensors:b"), 2, 2, DType::kFloat32, {});
    EXPECT_THROW(writer->finish(), InvalidArgument);
  }
  EXPECT_EQ(file_text(at("x.safetensors")), before);
  EXPECT_THAT(names(), ElementsAre("x.safetensors"));
}

TEST_F(SafetensorsTest, EveryCutAndEveryFlippedByteOfTheHeaderIsAnErrorOrReads) {
  write("x.safetensors:a", counting(12), 3);
  const std::string text = file_text(at("x.safetensors"));
  for (std::size_t size = 0; size < text.size(); ++size) {
    make_file(at("y.safetensors"), text.substr(0, size));
    EXPECT_THROW(read("y.safetensors:a"), Error) << size;
  }
  for (std::size_t place = 0; place < text.size() - 48; ++place)
    for (const char flip : {'\x01', '\x20', '\x7f'}) {
      std::string changed = text;
      changed[place] = static_cast<char>(changed[place] ^ flip);
      make_file(at("y.safetensors"), changed);
      try {
        EXPECT_LE(read("y.safetensors:a").size(), 24U) << place;
      } catch (const Error&) {
      }
    }
}

TEST_F(SafetensorsTest, ALengthIsNotBelievedBeforeItIsThere) {
  make_file(at("x.safetensors"), std::string("\xff\xff\xff\x04\0\0\0\0{\"a\"", 12));
  EXPECT_THAT(error_of<FormatError>([&] { read("x.safetensors:a"); }), AllOf(HasSubstr("truncated"), HasSubstr("4 are there")));
  make_file(at("x.safetensors"), std::string("\xff\xff\xff\xff\xff\xff\xff\xff{\"a\"", 12));
  EXPECT_THAT(error_of<FormatError>([&] { read("x.safetensors:a"); }), HasSubstr("100000000"));
}

TEST_F(SafetensorsTest, NamesThatCannotBeWritten) {
  EXPECT_THROW(write("x.safetensors:__metadata__", counting(2), 1), InvalidArgument);
  EXPECT_THAT(error_of<InvalidArgument>([&] { write("x.safetensors:\xff", counting(2), 1); }), HasSubstr("not UTF-8"));
  EXPECT_THROW(write("x.safetensors.index.json:a", counting(2), 1), InvalidArgument);
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace embermap
