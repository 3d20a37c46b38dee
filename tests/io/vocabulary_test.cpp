#include "io/vocabulary.hpp"

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;

using Words = std::vector<std::string>;

class VocabularyTest : public testing::FolderTest {
 protected:
  Words read(std::string_view content) {
    make_file(at("v.txt"), content);
    VocabularyReader reader(at("v.txt"));
    Words out(reader.words());
    for (std::uint64_t row = 0; row < out.size(); ++row) reader.read(row, out[row]);
    return out;
  }
};

TEST_F(VocabularyTest, WordsOneALine) {
  EXPECT_THAT(read("a\nb c\n\xFF\n\n"), ElementsAre("a", "b c", "\xFF", ""));
  EXPECT_THAT(read("a\nb"), ElementsAre("a", "b"));
  EXPECT_THAT(read("a\r\nb\r\n\r\nc"), ElementsAre("a", "b", "", "c"));
  EXPECT_THAT(read("a\nb\r\n"), ElementsAre("a", "b\r"));
  EXPECT_THAT(read("\n"), ElementsAre(""));
  EXPECT_THAT(read("\r\n"), ElementsAre(""));
  EXPECT_THAT(read(""), IsEmpty());
  EXPECT_THAT(error_of<FormatError>([&] { read("a\n" + std::string(70'000, 'x')); }), HasSubstr("line 2 is longer than"));
}

TEST_F(VocabularyTest, WordsAreWrittenAsTheyAre) {
  Words words{"a", "", "b\r", "c d", "\xFF\xFE", "a"};
  for (int i = 0; i < 300'000; ++i)
    words.push_back("word" + std::to_string(i) + std::string(static_cast<std::size_t>(i % 7), 'z'));
  words.push_back("");
  VocabularyWriter writer(at("v.txt"), false);
  for (std::uint64_t row = 0; row < words.size(); ++row) writer.add(row, words[row]);
  writer.add(3, "again");  // a reader that went back
  writer.finish(words.size());
  VocabularyReader reader(at("v.txt"));
  ASSERT_EQ(reader.words(), words.size());
  std::string word;
  for (int twice = 0; twice < 2; ++twice)
    for (std::uint64_t row = 0; row < words.size(); ++row) {
      reader.read(row, word);
      ASSERT_EQ(word, words[row]);
    }
  EXPECT_THAT(error_of<FormatError>([&] { reader.read(words.size(), word); }), HasSubstr("there is none for row 300007"));
  EXPECT_THROW(reader.read(5, word), InvalidArgument);
  EXPECT_THROW(VocabularyWriter(at("v.txt"), false), AlreadyExists);
}

TEST_F(VocabularyTest, WordsThatNoLineCanHoldAreRefused) {
  {
    VocabularyWriter writer(at("v.txt"), false);
    EXPECT_THAT(error_of<FormatError>([&] { writer.add(0, "a\r"); }), HasSubstr("carriage return"));
    writer.add(0, "a");
    EXPECT_THAT(error_of<FormatError>([&] { writer.add(1, "b\nc"); }), HasSubstr("of row 1 holds a newline"));
    EXPECT_THROW(writer.add(2, "c"), InvalidArgument);
    EXPECT_THAT(error_of<InvalidArgument>([&] { writer.finish(2); }), HasSubstr("1 words for 2 rows"));
  }
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(VocabularyTest, QueuesHandWordsOnInTheirOrder) {
  WordQueue queue;
  std::string word;
  EXPECT_THROW(queue.take(0, word), InvalidArgument);
  for (std::uint64_t row = 0; row < 5; ++row) queue.add(row, std::to_string(row));
  queue.add(2, "again");
  for (std::uint64_t row = 0; row < 5; ++row) {
    queue.take(row, word);
    EXPECT_EQ(word, std::to_string(row));
  }
  EXPECT_THROW(queue.take(5, word), InvalidArgument);
  EXPECT_THROW(queue.add(6, "x"), InvalidArgument);
}

}  // namespace
}  // namespace embermap
