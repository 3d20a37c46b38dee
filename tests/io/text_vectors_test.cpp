#include "io/text_vectors.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/io/word_vectors.hpp"

namespace embermap {
namespace {

using ::testing::AllOf;
using testing::bits_of;
using ::testing::ElementsAre;
using testing::error_of;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::make_file;
using ::testing::Not;
using testing::raw;
using testing::read_word_vectors;
using testing::source_of;

using Words = std::vector<std::string>;
using Numbers = std::vector<float>;

class TextVectorsTest : public testing::FolderTest {
 protected:
  testing::WordVectors word2vec(std::string_view text, std::uint64_t step = 100) {
    make_file(at("v.vec"), text);
    return read_word_vectors(open_word2vec_text_rows, at("v.vec"), step);
  }
  testing::WordVectors glove(std::string_view text, std::uint64_t step = 100) {
    make_file(at("g.txt"), text);
    return read_word_vectors(open_glove_rows, at("g.txt"), step);
  }
  std::string word2vec_error(std::string_view text) {
    return error_of<FormatError>([&] { word2vec(text); });
  }
  std::string glove_error(std::string_view text) {
    return error_of<FormatError>([&] { glove(text); });
  }
};

TEST_F(TextVectorsTest, Word2vecTextIsReadAsItIsWritten) {
  for (const std::uint64_t step : {1U, 2U, 3U, 100U}) {
    const auto got = word2vec("3 2\nthe 0.5 -1\nof 1e-3 +2\n</s> nan inf\n", step);
    EXPECT_THAT(got.words, ElementsAre("the", "of", "</s>"));
    EXPECT_EQ((Numbers{got.numbers.begin(), got.numbers.begin() + 4}), (Numbers{0.5F, -1, 1e-3F, 2}));
    EXPECT_TRUE(std::isnan(got.numbers[4]));
    EXPECT_EQ(got.numbers[5], std::numeric_limits<float>::infinity());
  }
}

TEST_F(TextVectorsTest, LineEndsAndBlanksOfAllKindsAreRead) {
  for (const std::string_view text :
       {"2 2\na 1 2\nb 3 4\n", "2 2\na 1 2\nb 3 4", "2 2\r\na 1 2\r\nb 3 4\r\n", "2 2 \na 1 2 \nb 3 4 \n",
        "2 2\na 1 2 \r\nb 3 4\t", "  2\t2  \na\t1\t2\nb  3   4\n\n \r\n\n",
        "\xEF\xBB\xBF"
        "2 2\na 1 2\nb 3 4\n"}) {
    const auto got = word2vec(text);
    EXPECT_THAT(got.words, ElementsAre("a", "b")) << text;
    EXPECT_EQ(got.numbers, (Numbers{1, 2, 3, 4})) << text;
  }
}

TEST_F(TextVectorsTest, WordsAreBytes) {
  const auto got = word2vec("5 1\n\xFF\xC3 1\na\xC2\xA0z 2\n 3\nsame 4\nsame 5\n");
  EXPECT_THAT(got.words, ElementsAre("\xFF\xC3", "a\xC2\xA0z", "", "same", "same"));
  EXPECT_EQ(got.numbers, (Numbers{1, 2, 3, 4, 5}));
}

TEST_F(TextVectorsTest, WordsOfGloveMayHoldSpaces) {
  const auto got = glove("the 1 2\n. . . 3 4\nat name@host 5 6\n 7 8\n1 9 10\n");
  EXPECT_THAT(got.words, ElementsAre("the", ". . .", "at name@host", "", "1"));
  EXPECT_EQ(got.numbers, (Numbers{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  // One blank separates a word from its numbers, and what stands before that is the word; but where columns are aligned.
  EXPECT_THAT(glove("  1 2\n\t 3 4\na  5 6\n b 7 8\nc   9   1\n   1 2\n").words, ElementsAre(" ", "\t", "a ", " b", "c", "  "));
  EXPECT_THAT(glove("a b 1 2\nc d 3 4\n").words, ElementsAre("a b", "c d"));
  // Most lines decide how many numbers a row has, not the first.
  EXPECT_THAT(glove(". . . 3 4\na 1 2\nb 1 2\n").words, ElementsAre(". . .", "a", "b"));
}

TEST_F(TextVectorsTest, WrongNumbersOfColumnsAreNamedWithTheirLine) {
  EXPECT_THAT(word2vec_error("3 2\na 1 2\nb 3\nc 1 2\n"),
              AllOf(HasSubstr("v.vec"), HasSubstr("line 3 has 1 numbers, 2 are expected")));
  EXPECT_THAT(word2vec_error("2 2\na 1 2\nb 3 4 5\n"), HasSubstr("line 3 has 3 numbers, 2 are expected: 'b 3 4 5'"));
  EXPECT_THAT(word2vec_error("2 2\na 1 2\n\nb 3 4\n"), HasSubstr("line 3 is empty"));
  EXPECT_THAT(glove_error("a 1 2\nb 3 4\nc 5\nd 6 7\n"), HasSubstr("line 3 has 1 numbers, 2 are expected"));
  EXPECT_THAT(glove_error("a 1 2\nb 3 4\nc 5 6 7\n"), HasSubstr("line 3 has 3 numbers, 2 are expected"));
  EXPECT_THAT(glove_error("a 0,5 0,25 1\nb 0,5 0,75 2\n"), HasSubstr("line 1 column 1: '0,25' is no number"));
  EXPECT_THAT(glove_error("alone\n"), HasSubstr("line 1 has no numbers"));
}

TEST_F(TextVectorsTest, WhatIsNoNumberIsNamedWithLineAndColumn) {
  EXPECT_THAT(word2vec_error("2 3\na 1 2 3\nb 4 5x 6\n"), HasSubstr("line 3 column 1: '5x' is no number"));
  EXPECT_THAT(word2vec_error("1 2\na 1 0x2\n"), HasSubstr("'0x2' is no number"));
  EXPECT_THAT(word2vec_error("1 2\na 1 --2\n"), HasSubstr("'--2' is no number"));
  EXPECT_THAT(word2vec_error("1 2\na 1 +-2\n"), HasSubstr("'+-2' is no number"));
  EXPECT_THAT(word2vec_error("1 2\na 1 1e39\n"), HasSubstr("'1e39' is more than float32 can hold"));
  EXPECT_THAT(word2vec_error("1 1\na 1,5\n"), HasSubstr("'1,5' is no number"));
  for (const std::string_view number :
       {"1e9223372036854775807", "0.1e9223372036854775808", "1e99999999999999999999", "123456e38"})
    EXPECT_THAT(word2vec_error(fmt::format("1 1\na {}\n", number)), HasSubstr("more than float32")) << number;
  // The first of many, whatever the thread.
  std::string text = "5000 2\n";
  for (int i = 0; i < 5000; ++i) text += i > 3000 ? "w 1 x\n" : "w 1 2\n";
  EXPECT_THAT(word2vec_error(text), HasSubstr("line 3003 column 1"));
}

TEST_F(TextVectorsTest, NumbersTooSmallAreRounded) {
  const auto got =
      word2vec("1 6\na 1e-50 -1e-400 1e-45 0.00000000000000000000000000000000000000000000000000001 -0 1.17549429e-38\n");
  EXPECT_EQ(bits_of(got.numbers), (std::vector<std::uint32_t>{0, 0x80000000U, 1, 0, 0x80000000U, 0x7FFFFF + 1U}));
}

TEST_F(TextVectorsTest, NumbersOfManyDigitsAreWhatTheyAre) {
  const std::string zeros(400, '0');
  const auto got =
      word2vec("1 4\na 0.00001e-9223372036854775808 -1e-99999999999999999999 0." + zeros + "1e401 1" + zeros + "e-400\n");
  EXPECT_EQ(bits_of(got.numbers), bits_of({0.0F, -0.0F, 1.0F, 1.0F}));
}

TEST_F(TextVectorsTest, HeadersThatDoNotMatchAreRefused) {
  EXPECT_THAT(word2vec_error("3 2\na 1 2\nb 3 4\n"), AllOf(HasSubstr("has 2 rows"), HasSubstr("says 3")));
  EXPECT_THAT(word2vec_error("1 2\na 1 2\nb 3 4\n"), AllOf(HasSubstr("says 1 rows"), HasSubstr("line 3")));
  EXPECT_THAT(word2vec_error("0 2\na 1 2\n"), HasSubstr("says 0 rows"));
  EXPECT_THAT(word2vec_error("a 1 2\nb 3 4\n"), HasSubstr("line 1 is no header"));
  EXPECT_THAT(word2vec_error("2 0\na\nb\n"), HasSubstr("no columns"));
  EXPECT_THAT(word2vec_error("1000000000000 2\na 1 2\n"), HasSubstr("can hold"));
  EXPECT_THAT(word2vec_error("1 18446744073709551615\na 1 2\n"), HasSubstr("can hold"));
  EXPECT_THAT(word2vec_error("18446744073709551616 2\na 1 2\n"), HasSubstr("no header"));
  // A first line that would do as a row of one number.
  for (const std::string_view text :
       {"7 9\na 1\nb 2\n", "3 1\na 1\nb 2\n", "1 1\na 1\nb 2\n", "2 2\na 1\nb 2\n", " 1 2\na 1 2\nb 3 4\n"})
    EXPECT_THAT(word2vec_error(text), HasSubstr("is a row, name the format: glove")) << text;
  EXPECT_THAT(word2vec_error("3 2\na 1 2\nb 3 4\n"), Not(HasSubstr("glove")));
  EXPECT_THAT(word2vec_error(""), HasSubstr("is empty"));
  EXPECT_THAT(word2vec_error("\n \r\n"), HasSubstr("blanks"));
  EXPECT_THAT(word2vec_error("\x1f\x8b\x08 gzipped"), HasSubstr("gzip"));
  EXPECT_TRUE(word2vec("0 7\n").words.empty());
}

TEST_F(TextVectorsTest, BinaryFilesAreNotTakenForText) {
  EXPECT_THAT(word2vec_error(std::string_view("1 2\na \0\0\0\0\0\0\0\0\n", 14)), HasSubstr("zero byte"));
}

// Long files: several blocks, rows in any order.
TEST_F(TextVectorsTest, RowsInAnyOrder) {
  constexpr std::uint64_t kRows = 200'000, kDim = 4;
  std::string text;
  for (std::uint64_t row = 0; row < kRows; ++row) text += fmt::format("word{} {} {} {} {}\n", row, row, row + 1, 0.5, "-3.25");
  make_file(at("g.txt"), text);
  make_file(at("v.vec"), fmt::format("{} {}\n", kRows, kDim) + text);
  for (const bool header : {false, true}) {
    std::vector<std::pair<std::uint64_t, std::string>> words;
    ReadOptions options;
    options.words = [&](std::uint64_t row, std::string_view word) { words.emplace_back(row, word); };
    const auto reader =
        header ? open_word2vec_text_rows({at("v.vec"), ""}, options) : open_glove_rows({at("g.txt"), ""}, options);
    ASSERT_EQ(reader->rows(), kRows);
    ASSERT_EQ(reader->dim(), kDim);
    std::mt19937_64 random(1);
    for (int i = 0; i < 60; ++i) {
      const std::uint64_t first = i == 7 ? 0 : random() % kRows, count = std::min<std::uint64_t>(random() % 3000, kRows - first);
      Numbers rows(count * kDim);
      words.clear();
      reader->read(first, count, reinterpret_cast<std::byte*>(rows.data()));
      ASSERT_EQ(words.size(), count);
      for (std::uint64_t r = 0; r < count; ++r) {
        ASSERT_EQ(rows[r * kDim], static_cast<float>(first + r));
        ASSERT_EQ(rows[r * kDim + 3], -3.25F);
        ASSERT_EQ(words[r], std::pair(first + r, fmt::format("word{}", first + r)));
      }
    }
    EXPECT_THROW(reader->read(kRows - 1, 2, nullptr), InvalidArgument);
  }
}

TEST_F(TextVectorsTest, LinesLongerThanABlock) {
  constexpr std::uint64_t kDim = 600'000;  // 4.6 MB of text a row
  for (const bool header : {false, true}) {
    std::string text = header ? fmt::format("2 {}\n", kDim) : "";
    for (int row = 0; row < 2; ++row) {
      text += "w";
      for (std::uint64_t c = 0; c < kDim; ++c) text += fmt::format(" {}.125", (c * 7 + static_cast<std::uint64_t>(row)) % 100);
      text += "\n";
    }
    const auto got = header ? word2vec(text, 1) : glove(text, 1);
    ASSERT_EQ(got.numbers.size(), 2 * kDim);
    for (std::uint64_t i = 0; i < got.numbers.size(); i += 997)
      ASSERT_EQ(got.numbers[i], static_cast<float>((i % kDim * 7 + i / kDim) % 100) + 0.125F);
  }
  make_file(at("g.txt"), std::string(70U << 20, 'x'));
  EXPECT_THAT(error_of<FormatError>([&] { open_glove_rows({at("g.txt"), ""}, {}); }), HasSubstr("line 1 is longer than"));
}

// Every bit of float32 comes back, but for the payload of NaN.
TEST_F(TextVectorsTest, RoundTripsAreExact) {
  constexpr std::uint64_t kRows = 20'000, kDim = 13;
  std::mt19937 random(3);
  Numbers numbers(kRows * kDim);
  Words words(kRows);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    std::memcpy(&numbers[i], &bits, 4);
    if (std::isnan(numbers[i])) numbers[i] = std::numeric_limits<float>::quiet_NaN();
  }
  numbers[0] = -0.0F;
  numbers[1] = -std::numeric_limits<float>::infinity();
  numbers[2] = std::numeric_limits<float>::denorm_min();
  numbers[3] = std::numeric_limits<float>::max();
  for (std::uint64_t i = 0; i < kRows; ++i) words[i] = i == 5 ? "" : i % 7 == 0 ? "same" : fmt::format("w\xC3\xA9{}", i);
  const std::string number_rows = fmt::format("{} {}\n", kRows, kDim);
  for (const bool header : {false, true}) {
    words[6] = header ? "tab" : ". . .";
    const auto create = header ? create_word2vec_text_rows : create_glove_rows;
    const Location to{at("out.txt"), ""};
    const auto writer = create(to, kRows, kDim, DType::kFloat32, {.overwrite = true, .words = source_of(words)});
    for (std::uint64_t row = 0; row < kRows; row += 1999)
      writer->write(std::min<std::uint64_t>(1999, kRows - row), raw(numbers) + row * kDim * 4);
    writer->finish();
    EXPECT_EQ(file_text(to.file).starts_with(number_rows), header);
    const auto got = read_word_vectors(header ? open_word2vec_text_rows : open_glove_rows, to.file, 777);
    EXPECT_EQ(got.words, words);
    EXPECT_EQ(bits_of(got.numbers), bits_of(numbers));
  }
}

TEST_F(TextVectorsTest, NumbersAreWrittenShortest) {
  const Numbers numbers{0.1F, -2, 1e-5F, 3.4028235e38F, 16777216};
  const Words words{"w"};
  const auto writer = create_word2vec_text_rows({at("o.txt"), ""}, 1, 5, DType::kFloat32, {.words = source_of(words)});
  writer->write(1, raw(numbers));
  writer->finish();
  EXPECT_EQ(file_text(at("o.txt")), "1 5\nw 0.1 -2 1e-05 3.4028235e+38 16777216\n");
  const std::vector<std::int64_t> ints{-1, 9'007'199'254'740'993};
  const auto other = create_glove_rows({at("i.txt"), ""}, 1, 2, DType::kInt64, {.words = source_of(words)});
  other->write(1, raw(ints));
  other->finish();
  EXPECT_EQ(file_text(at("i.txt")), "w -1 9007199254740993\n");
}

TEST_F(TextVectorsTest, Float64IsReadWhereItIsAskedFor) {
  make_file(at("v.vec"), "1 2\na 0.1 1e300\n");
  const auto reader = open_word2vec_text_rows({at("v.vec"), ""}, {.dtype = DType::kFloat64});
  EXPECT_EQ(reader->dtype(), DType::kFloat64);
  std::vector<double> row(2);
  reader->read(0, 1, reinterpret_cast<std::byte*>(row.data()));
  EXPECT_EQ(row, (std::vector<double>{0.1, 1e300}));
  EXPECT_THROW(open_word2vec_text_rows({at("v.vec"), ""}, {.dtype = DType::kInt8}), DTypeError);
  EXPECT_THROW(open_word2vec_text_rows({at("v.vec"), ""}, {.dim = 3}), FormatError);
  EXPECT_THROW(open_word2vec_text_rows({at("v.vec"), "x"}, {}), NotFound);
}

TEST_F(TextVectorsTest, WordsThatCouldNotBeReadAgainAreRefused) {
  const Numbers row{1, 2};
  const auto error = [&](bool header, const std::string& word) {
    const Words words{word};
    return error_of<FormatError>([&] {
      const auto writer = (header ? create_word2vec_text_rows : create_glove_rows)({at("o.txt"), ""}, 1, 2, DType::kFloat32,
                                                                                   {.words = source_of(words)});
      writer->write(1, raw(row));
    });
  };
  EXPECT_THAT(error(true, "a b"), AllOf(HasSubstr("'a b' of row 0"), HasSubstr("holds a space")));
  EXPECT_THAT(error(true, "a\nb"), HasSubstr("holds a newline"));
  EXPECT_THAT(error(false, "a\nb"), HasSubstr("holds a newline"));
  EXPECT_THAT(error(false, "a 1"), HasSubstr("ends with numbers"));
  EXPECT_THAT(error(false, std::string(100'000, 'x')), HasSubstr("100000 bytes"));
  EXPECT_THAT(names(), IsEmpty());
  EXPECT_THAT(error_of<InvalidArgument>([&] {
                create_glove_rows({at("o.txt"), ""}, 1, 2, DType::kFloat32, {});
              }),
              HasSubstr("there are none"));
}

TEST_F(TextVectorsTest, MisalignedMemoryIsFilled) {
  make_file(at("v.vec"), "2 2\na 1 2\nb 3 4\n");
  std::vector<std::byte> memory(17);
  open_word2vec_text_rows({at("v.vec"), ""}, {})->read(0, 2, memory.data() + 1);
  Numbers got(4);
  std::memcpy(got.data(), memory.data() + 1, 16);
  EXPECT_EQ(got, (Numbers{1, 2, 3, 4}));
}

}  // namespace
}  // namespace embermap
