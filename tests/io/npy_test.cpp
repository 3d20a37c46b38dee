#include "io/npy.hpp"

#include <sys/mman.h>

#include <random>

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using ::testing::AnyOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::make_file;
using ::testing::Not;

constexpr std::string_view kPlain = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";

// A .npy file with this header text, `padding` spaces and a newline after it, and `data` zero bytes.
std::string npy(unsigned major, unsigned minor, std::string_view text, std::size_t padding, bool newline, std::size_t data) {
  std::string body(text);
  body.append(padding, ' ');
  if (newline) body += '\n';
  std::string out = "\x93NUMPY";
  out += static_cast<char>(major);
  out += static_cast<char>(minor);
  for (std::size_t i = 0; i < (major == 1 ? 2U : 4U); ++i) out += static_cast<char>(body.size() >> (8 * i) & 0xFF);
  return out + body + std::string(data, '\0');
}

class NpyHeaderTest : public testing::FolderTest {
 protected:
  NpyHeader read(std::string_view content) {
    std::filesystem::remove(at("x.npy"));  // cutting a file to nothing makes some file systems wait for the disk
    make_file(at("x.npy"), content);
    return read_npy_header(File::open(at("x.npy"), File::Mode::kRead));
  }
  NpyHeader read_text(std::string_view text, unsigned major = 1, std::size_t data = 1000) {
    return read(npy(major, 0, text, 7, true, data));
  }
  std::string refuse(std::string_view content) {
    const std::string text = error_of<FormatError>([&] { read(content); });
    EXPECT_THAT(text, HasSubstr("x.npy: "));
    return text;
  }
  std::string refuse_text(std::string_view text, unsigned major = 1) { return refuse(npy(major, 0, text, 7, true, 1000)); }
  static std::string with(std::string_view descr, std::string_view order, std::string_view shape) {
    return "{'descr': " + std::string(descr) + ", 'fortran_order': " + std::string(order) + ", 'shape': " + std::string(shape) +
           ", }";
  }
};

TEST_F(NpyHeaderTest, AllVersionsWithAnyPaddingAndWithoutNewline) {
  for (const unsigned major : {1U, 2U, 3U})
    for (const std::size_t padding : {0U, 1U, 9U, 1000U, 20000U})
      for (const bool newline : {true, false}) {
        const NpyHeader header = read(npy(major, 0, kPlain, padding, newline, 48));
        EXPECT_EQ(header.major, major);
        EXPECT_EQ(header.descr, "<f4");
        EXPECT_EQ(header.item_bytes, 4U);
        EXPECT_EQ(header.shape, (std::vector<std::uint64_t>{3, 4}));
        EXPECT_FALSE(header.fortran_order);
        EXPECT_EQ(header.data_offset, (major == 1 ? 10 : 12) + kPlain.size() + padding + (newline ? 1 : 0));
        EXPECT_EQ(header.elements(), 12U);
        EXPECT_EQ(header.data_bytes(), 48U);
      }
}

TEST_F(NpyHeaderTest, OtherVersionsAreRefusedByNumber) {
  EXPECT_THAT(refuse(npy(4, 0, kPlain, 0, true, 48)), HasSubstr("version 4.0"));
  EXPECT_THAT(refuse(npy(1, 1, kPlain, 0, true, 48)), HasSubstr("version 1.1"));
  EXPECT_THAT(refuse(npy(0, 0, kPlain, 0, true, 48)), HasSubstr("version 0.0"));
}

TEST_F(NpyHeaderTest, CutAtEveryLengthIsTruncated) {
  for (const unsigned major : {1U, 2U, 3U}) {
    const std::string whole = npy(major, 0, kPlain, 5, true, 48);
    const std::size_t header = whole.size() - 48;
    for (std::size_t length = 0; length < whole.size(); ++length)
      EXPECT_THAT(refuse(whole.substr(0, length)), HasSubstr(length < header ? "truncated header" : "truncated data"));
    read(whole);
    read(whole + "and trailing bytes");
  }
  EXPECT_THAT(refuse(npy(1, 0, kPlain, 5, true, 43)), HasSubstr("43 of 48 bytes"));
}

TEST_F(NpyHeaderTest, ClaimedLengthIsNotTakenOnTrust) {
  EXPECT_THAT(refuse(std::string("\x93NUMPY\x02\x00\xF0\xFF\xFF\xFF", 12)), HasSubstr("truncated header"));
  // A file that is as large as it claims (sparse), but no header is.
  make_file(at("big.npy"), std::string("\x93NUMPY\x02\x00\xF0\xFF\xFF\x7F", 12));
  std::filesystem::resize_file(at("big.npy"), std::uint64_t{1} << 32);
  EXPECT_THAT(error_of<FormatError>([&] { read_npy_header(File::open(at("big.npy"), File::Mode::kRead)); }),
              HasSubstr("longer than the"));
}

TEST_F(NpyHeaderTest, KeysInAnyOrderAndAnyQuotes) {
  const NpyHeader header = read_text("  {\"shape\":( 3 ,4),\n'fortran_order':True , \"descr\":'>i8'}");
  EXPECT_TRUE(header.fortran_order);
  EXPECT_EQ(header.descr, ">i8");
  EXPECT_EQ(read_text(with("u'<f4'", "False", "()")).elements(), 1U);
  EXPECT_EQ(read_text(with("'<f4'", "False", "(7,)")).shape_text(), "(7,)");
}

TEST_F(NpyHeaderTest, ShapeHasToBeATupleOfNumbers) {
  for (const std::string_view shape : {"(12)", "[3, 4]", "12", "'3'", "None", "((12))", "{}"})
    EXPECT_THAT(refuse_text(with("'<f4'", "False", shape)), HasSubstr("shape is not a tuple"));
  EXPECT_THAT(refuse_text(with("'<f4'", "False", "(np.int64(3), 4)")), HasSubstr("NumPy scalar"));
  for (const std::string_view shape : {"(-3, 4)", "(3.0, 4)", "(True, 4)", "(None,)", "('3',)", "((3, 4),)", "(0x3, 4)",
                                       "(3_0, 4)", "(03, 4)", "(3 4)", "(,)", "(3, 4", "(3, 4]", "(3,, 4)"})
    refuse_text(with("'<f4'", "False", shape));
}

TEST_F(NpyHeaderTest, LongSuffixOfPython2InVersions1And2Only) {
  EXPECT_EQ(read_text(with("'<f4'", "False", "(3L, 4L)"), 1).elements(), 12U);
  EXPECT_EQ(read_text(with("'<f4'", "False", "(3L, 4L)"), 2).elements(), 12U);
  EXPECT_THAT(refuse_text(with("'<f4'", "False", "(3L, 4L)"), 3), HasSubstr("suffix L"));
}

TEST_F(NpyHeaderTest, SizesPast64BitsAreRefused) {
  for (const std::string_view shape : {"(4611686018427387904, 4)", "(9223372036854775808,)", "(18446744073709551616,)",
                                       "(99999999999999999999999,)", "(4294967296, 4294967296)", "(2305843009213693951,)"})
    EXPECT_THAT(refuse_text(with("'<f4'", "False", shape)), HasSubstr("past 64 bits"));
  EXPECT_EQ(read_text(with("'<f4'", "False", "(4611686018427387904, 0, 4611686018427387904)")).elements(), 0U);
}

TEST_F(NpyHeaderTest, StructuredWithSubArraysNestingTitlesAndPadding) {
  const NpyHeader header =
      read_text(with("[('id', '<i8'), ('', '|V3'), (('a title', 'v'), '>f4', (4,)), ('n', [('x', '<f2'), ('y', '|u1', 3)], "
                     "(2,)), ('z', '<f4', (4, 0, 4)), ('', "
                     "'|V1')]",
                     "False", "(2,)"));
  ASSERT_EQ(header.fields.size(), 4U);
  EXPECT_EQ(header.fields[1].name, "v");
  EXPECT_EQ(header.fields[1].offset, 11U);
  EXPECT_EQ(header.fields[1].bytes, 16U);
  EXPECT_EQ(header.fields[1].shape, (std::vector<std::uint64_t>{4}));
  EXPECT_EQ(header.fields[2].offset, 27U);
  EXPECT_EQ(header.fields[2].bytes, 10U);
  EXPECT_EQ(header.fields[3].bytes, 0U);
  EXPECT_EQ(header.item_bytes, 38U);
  EXPECT_THAT(header.dtype_text(), HasSubstr("id: <i8, v: >f4 (4,)"));
}

TEST_F(NpyHeaderTest, ObjectsAreRefusedWithoutAdviceToAllowThem) {
  for (const std::string_view descr :
       {"'|O'", "'O'", "'|O8'", "[('a', '|O'), ('v', '<f4')]", "[('a', [('b', 'O')])]", "[('a', '|O', (0,))]"}) {
    const std::string text = refuse_text(with(descr, "False", "(1,)"));
    EXPECT_THAT(text, HasSubstr("pickle"));
    EXPECT_THAT(text, Not(HasSubstr("allow")));
  }
}

TEST_F(NpyHeaderTest, UnknownDtypesAndKeysAreRefused) {
  for (const std::string_view descr :
       {"''", "'<'", "'f'", "'<f3'", "'<x4'", "'f4f'", "'<f99999999999999999999'", "4", "None", "[]", "('<f4', (2,))", "[('a',)]",
        "[('a', '<f4', (2,), 1)]", "[(1, '<f4')]", "[('a', '<f4'), ('a', '<f4')]", "['<f4']", "[('', '|V4')]",
        "[('a', '<f4', (-1,))]", "[('a', '|V999999999999999999', (99,))]"})
    refuse_text(with(descr, "False", "(1,)"));
  EXPECT_THAT(refuse_text("{'descr': '<f4', 'shape': (1,)}"), HasSubstr("'fortran_order' is missing"));
  EXPECT_THAT(refuse_text("{'descr': '<f4', 'shape': (1,), 'fortran_order': False, 'more': 1}"), HasSubstr("unknown key 'more'"));
  EXPECT_THAT(refuse_text("{'descr': '<f4', 'descr': '<f4', 'shape': (1,), 'fortran_order': False}"), HasSubstr("twice"));
  EXPECT_THAT(refuse_text(with("'<f4'", "0", "(1,)")), HasSubstr("fortran_order"));
  for (const std::string_view text :
       {"", "(1, 2)", "{'a'}", "{'descr': '<f4'", "{} {}", "__import__('os')", "{'descr': '<f4' + 'x'}", "{'descr': b'<f4'}"})
    refuse_text(text);
}

TEST_F(NpyHeaderTest, NestingAndNumberOfValuesAreBounded) {
  EXPECT_THAT(refuse_text(std::string(30000, '(')), HasSubstr("deep"));
  std::string many = "{'descr': '<f4', 'shape': (";
  for (int i = 0; i < 300000; ++i) many += "1,";
  EXPECT_THAT(refuse_text(many + "), 'fortran_order': False}", 2), HasSubstr("values"));
}

TEST_F(NpyHeaderTest, FourThousandFieldsAreRead) {
  std::string descr = "[";
  for (int i = 0; i < 4000; ++i) descr += "('f" + std::to_string(i) + "', '<f4'), ";
  const NpyHeader header = read(npy(2, 0, with(descr + "]", "False", "(3,)"), 0, true, 48000));
  EXPECT_EQ(header.fields.size(), 4000U);
  EXPECT_EQ(header.item_bytes, 16000U);
}

TEST_F(NpyHeaderTest, FieldNamesInLatin1AndUtf8) {
  EXPECT_EQ(read_text(with("[('\xE9', '<f4')]", "False", "(1,)"), 1).fields[0].name, "\xC3\xA9");
  EXPECT_EQ(read_text(with("[('\xC3\xA9', '<f4')]", "False", "(1,)"), 3).fields[0].name, "\xC3\xA9");
  EXPECT_EQ(read_text(with(R"([('a\'\x62\u0063\\', '<f4')])", "False", "(1,)"), 1).fields[0].name, "a'bc\\");
  EXPECT_THAT(refuse_text(with("[('\xE9', '<f4')]", "False", "(1,)"), 3), HasSubstr("not UTF-8"));
}

TEST_F(NpyHeaderTest, OtherFilesAreCalledByTheirName) {
  EXPECT_THAT(refuse(""), HasSubstr("no NPY magic at byte 0: the file is empty"));
  EXPECT_THAT(refuse("version https://git-lfs.github.com/spec/v1\n"), HasSubstr("git-lfs"));
  EXPECT_THAT(refuse("\n<!DOCTYPE HTML>\n<html>"), HasSubstr("HTML"));
  EXPECT_THAT(refuse("\x1f\x8b\x08 rest"), HasSubstr("gzip"));
  EXPECT_THAT(refuse("PK\x03\x04 rest"), HasSubstr("zip"));
  EXPECT_THAT(refuse("\x80\x04\x95 rest"), HasSubstr("pickle"));
  EXPECT_THAT(refuse("\x89HDF\r\n\x1a\n rest"), HasSubstr("HDF5"));
  const std::string raw = refuse(testing::bytes_of(std::vector<float>{0, 1, -2.5F, 1e-3F, 7, 8, 9, 10, 11, 12, 13, 14}));
  EXPECT_THAT(raw, HasSubstr("no NPY magic at byte 0"));
  EXPECT_THAT(raw, HasSubstr("48 bytes"));
}

TEST_F(NpyHeaderTest, SurvivesMutations) {
  // Every mutation either reads as something that fits the file, or is refused by FormatError; the sanitizers watch the rest.
  const std::vector<std::string> seeds{
      npy(1, 0, kPlain, 5, true, 48),
      npy(2, 0, with("[('id', '<i8'), ('', '|V4'), ('v', '>f4', (4,))]", "True", "(2L,)"), 5, true, 60),
      npy(3, 0, with("[(('t', '\xC3\xA9'), [('x', '<M8[ns]'), ('y', '|b1', (2, 2))])]", "False", "(2, 1)"), 5, true, 24)};
  std::mt19937 random(1);
  const std::string_view alphabet = "'\"()[]{}:,\\ \n\0L019-+.xuTFNOV<>=|\x80\xFF";
  const int memory = ::memfd_create("npy", MFD_CLOEXEC);
  ASSERT_GE(memory, 0);
  const File file = File::open("/proc/self/fd/" + std::to_string(memory), File::Mode::kReadWrite);
  int read_well = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string content = seeds[static_cast<std::size_t>(i) % seeds.size()];
    for (auto change = 1 + random() % 3; change > 0; --change) {
      const std::size_t place = random() % content.size();
      switch (random() % 4) {
        case 0: content[place] = static_cast<char>(random()); break;
        case 1: content[place] = alphabet[random() % alphabet.size()]; break;
        case 2: content.insert(place, 1, alphabet[random() % alphabet.size()]); break;
        default: content.erase(place, 1 + random() % 4); break;
      }
      if (content.empty()) content = "x";
    }
    file.resize(content.size());
    file.write(0, content);
    try {
      const NpyHeader header = read_npy_header(file);
      ASSERT_LE(header.data_offset + header.data_bytes(), content.size());
      for (const NpyField& field : header.fields) ASSERT_LE(field.offset + field.bytes, header.item_bytes);
      ++read_well;
    } catch (const FormatError&) {
    }
  }
  ::close(memory);
  EXPECT_GT(read_well, 1000);  // else the mutations test nothing but the magic
}

TEST_F(NpyHeaderTest, WrittenHeadersReadBack) {
  const std::vector<NpyField> fields{
      {"weight", "<f4", {128}, 0, 512}, {"step", "<i4", {}, 520, 4}, {"it's \\ \xC3\xA9", "<V2", {3}, 524, 6}};
  const std::string text = format_npy_header("", fields, 1024, {7}, 4096);
  EXPECT_EQ(text.size(), 4096U);
  EXPECT_EQ(text[6], 1);
  EXPECT_EQ(text.back(), '\n');
  EXPECT_THAT(text, HasSubstr("('', '|V8')"));
  EXPECT_THAT(text, HasSubstr("('', '|V494')"));
  const NpyHeader header = read(text + std::string(7 * 1024, '\0'));
  EXPECT_EQ(header.data_offset, 4096U);
  EXPECT_EQ(header.item_bytes, 1024U);
  ASSERT_EQ(header.fields.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(header.fields[i].name, fields[i].name);
    EXPECT_EQ(header.fields[i].offset, fields[i].offset);
    EXPECT_EQ(header.fields[i].shape, fields[i].shape);
  }
}

TEST_F(NpyHeaderTest, LowestVersionAndAlignment) {
  // Byte for byte what numpy.save writes.
  std::string expected = "\x93NUMPY\x01";
  expected += std::string("\0\x76\0", 3) + std::string(kPlain);
  expected.append(127 - expected.size(), ' ');
  EXPECT_EQ(format_npy_header("<f4", {}, 0, {3, 4}, 0), expected + "\n");
  std::vector<NpyField> many;
  for (std::uint64_t i = 0; i < 4000; ++i) many.push_back({"field" + std::to_string(i), "<f4", {}, i * 4, 4});
  const std::string large = format_npy_header("", many, 0, {1}, 0);
  EXPECT_EQ(large[6], 2);
  EXPECT_EQ(large.size() % 64, 0U);
  EXPECT_EQ(read(large + std::string(16000, '\0')).fields.size(), 4000U);
  const std::string unicode = format_npy_header("", {{"\xE8\xA1\x8C", "<f4", {}, 0, 4}}, 0, {1}, 0);
  EXPECT_EQ(unicode[6], 3);
  EXPECT_EQ(read(unicode + std::string(4, '\0')).fields[0].name, "\xE8\xA1\x8C");
  EXPECT_THAT(format_npy_header("<f4", {}, 0, {7}, 0), HasSubstr("(7,)"));
  for (const std::uint64_t offset :
       {std::uint64_t{128}, std::uint64_t{4096}, std::uint64_t{65545}, std::uint64_t{65546}, std::uint64_t{100000}})
    EXPECT_EQ(read(format_npy_header("|u1", {}, 0, {0, 3}, offset)).data_offset, offset);
}

TEST_F(NpyHeaderTest, HeadersThatCannotBeAreRefused) {
  EXPECT_THROW(format_npy_header("", {}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("<f4", {{"a", "<f4", {}, 0, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("|O", {}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("<f4", {}, 8, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("<f4", {}, 0, {3, 4}, 64), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"", "<f4", {}, 0, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"\xFF", "<f4", {}, 0, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"a", "<f4", {}, 0, 4}, {"a", "<f4", {}, 4, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"a", "<f4", {}, 0, 4}, {"b", "<f4", {}, 2, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"a", "<f4", {2}, 0, 4}}, 0, {1}, 0), InvalidArgument);
  EXPECT_THROW(format_npy_header("", {{"a", "<f4", {}, 0, 4}}, 3, {1}, 0), InvalidArgument);
}

}  // namespace
}  // namespace embermap
