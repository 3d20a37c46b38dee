#include "base/error.hpp"

#include <gtest/gtest.h>

#include <cerrno>

namespace embermap {
namespace {

TEST(Printable, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(printable("items", 5), "items");
  EXPECT_EQ(printable("items", 4), "item...");
  EXPECT_EQ(printable("items", 0), "...");
  EXPECT_EQ(printable("", 0), "");
  const std::string text = "a\xE2\x82\xAC\xF0\x9F\x94\xA5z";  // 1, 3, 4 and 1 bytes
  for (const std::size_t most : {1U, 2U, 3U}) EXPECT_EQ(printable(text, most), "a...");
  for (const std::size_t most : {4U, 5U, 6U, 7U}) EXPECT_EQ(printable(text, most), "a\xE2\x82\xAC...");
  EXPECT_EQ(printable(text, 8), "a\xE2\x82\xAC\xF0\x9F\x94\xA5...");
  EXPECT_EQ(printable(text, 9), text);
  EXPECT_EQ(printable("\xFF\xFE\xFD", 2), "\\xff\\xfe...");
}

TEST(Printable, LeavesTextAlone) {
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable("items.npy"), "items.npy");
  EXPECT_EQ(printable("na\xC3\xAFve \xE2\x82\xAC \xF0\x9F\x94\xA5"), "na\xC3\xAFve \xE2\x82\xAC \xF0\x9F\x94\xA5");
  EXPECT_EQ(printable(std::string("text")), "text");
  EXPECT_EQ(printable(std::filesystem::path("dir/file")), "dir/file");
}

TEST(Printable, WritesControlCharactersAsHex) {
  EXPECT_EQ(printable("a\nb\tc\x1b[0m\x7f"), "a\\x0ab\\x09c\\x1b[0m\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
}

struct Bytes {
  const char* what;
  std::string bytes;
  std::string expected;
};
class NotUtf8 : public testing::TestWithParam<Bytes> {};
TEST_P(NotUtf8, IsWrittenAsHex) { EXPECT_EQ(printable(GetParam().bytes), GetParam().expected) << GetParam().what; }
INSTANTIATE_TEST_SUITE_P(
    Sequences, NotUtf8,
    testing::Values(Bytes{"lone continuation", "a\x80z", "a\\x80z"}, Bytes{"never a lead", "\xFF\xFE", "\\xff\\xfe"},
                    Bytes{"overlong slash", "\xC0\xAF", "\\xc0\\xaf"}, Bytes{"overlong three", "\xE0\x80\xAF", "\\xe0\\x80\\xaf"},
                    Bytes{"overlong four", "\xF0\x8F\xBF\xBF", "\\xf0\\x8f\\xbf\\xbf"},
                    Bytes{"surrogate", "\xED\xA0\x80", "\\xed\\xa0\\x80"},
                    Bytes{"beyond U+10FFFF", "\xF4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"}, Bytes{"cut off two", "x\xC3", "x\\xc3"},
                    Bytes{"cut off three", "x\xE2\x82", "x\\xe2\\x82"}, Bytes{"cut off four", "\xF0\x9F\x94", "\\xf0\\x9f\\x94"},
                    Bytes{"bad second", "\xC3(", "\\xc3("}, Bytes{"bad third", "\xE2\x82z", "\\xe2\\x82z"},
                    Bytes{"good after bad", "\xE2\xC3\xA9", "\\xe2\xC3\xA9"}));

TEST(Errors, ARowIdErrorNamesTableIdPositionAndRows) {
  const RowIdError error("items\n", -3, 17, 100);
  EXPECT_STREQ(error.what(), "row id -3 at position 17 is out of range for table 'items\\x0a' with 100 rows");
  EXPECT_EQ(error.id(), -3);
  EXPECT_EQ(error.position(), 17U);
}

TEST(Errors, AnIoErrorNamesCallFileRangeAndReason) {
  const IoError whole(EACCES, "open", "dir/items.npy");
  EXPECT_STREQ(whole.what(), "open dir/items.npy: Permission denied");
  EXPECT_EQ(whole.error_number(), EACCES);
  EXPECT_EQ(whole.file(), "dir/items.npy");
  const IoError range(EIO, "pread", "items.npy", 4096, 512);
  EXPECT_STREQ(range.what(), "pread items.npy [4096, +512): Input/output error");
}

TEST(Errors, AFormatErrorNamesTheFile) {
  EXPECT_STREQ(FormatError("a\xFF.npy", "truncated header").what(), "a\\xff.npy: truncated header");
}

TEST(Errors, AllAreErrorsAndCopyable) {
  const auto caught_as_error = [](const auto& error) {
    try {
      throw error;
    } catch (const Error& caught) {
      return std::string(caught.what()) == error.what();
    }
  };
  EXPECT_TRUE(caught_as_error(InvalidArgument("a")));
  EXPECT_TRUE(caught_as_error(DTypeError("b")));
  EXPECT_TRUE(caught_as_error(RowIdError("t", 1, 2, 3)));
  EXPECT_TRUE(caught_as_error(IoError(EIO, "read", "f")));
  EXPECT_TRUE(caught_as_error(CudaError("c")));
}

}  // namespace
}  // namespace embermap
