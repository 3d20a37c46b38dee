#include "store/manifest.hpp"

#include <fmt/format.h>

#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

using embermap::testing::error_of;
using ::testing::HasSubstr;

const std::string kTable =
    R"({"rows": 100, "dim": 8, "dtype": "float32", "optimizer": null, "init": {"name": "zeros"}, "seed": 1, "step": 0,
        "page_bytes": 4096, "stride": 32, "rows_per_page": 128, "data_offset": 4096)";

std::string with_tables(const std::string& tables) {
  return fmt::format(R"({{"format": "embermap", "version": 1, "commit": 3, "tables": {{{}}}}})", tables);
}

std::string refusal(const std::string& text) {
  return error_of<FormatError>([&] { Manifest::parse(text, "embermap.json"); });
}

TEST(Manifest, WhatIsWrittenIsReadAsTheSame) {
  const Manifest manifest = Manifest::parse(with_tables("\"b\": " + kTable + "}, \"a\": " + kTable + "}"), "embermap.json");
  ASSERT_EQ(manifest.tables.size(), 2U);
  EXPECT_EQ(manifest.tables.at("a").geometry.rows, 100U);
  EXPECT_EQ(Manifest::parse(manifest.text(), "embermap.json").text(), manifest.text());
}

TEST(Manifest, AChangedByteIsNoticedAndAMissingChecksumIsNot) {
  const std::string text = Manifest::parse(with_tables("\"a\": " + kTable + "}"), "embermap.json").text();
  std::string changed = text;
  changed.replace(changed.find("\"rows\": 100"), 11, "\"rows\": 101");
  EXPECT_THAT(refusal(changed), HasSubstr("does not match its checksum"));
  std::string accepted = changed.substr(0, changed.rfind("\"checksum\""));
  accepted = accepted.substr(0, accepted.rfind(',')) + "}";
  EXPECT_EQ(Manifest::parse(accepted, "embermap.json").tables.at("a").geometry.rows, 101U);
}

TEST(Manifest, ReadsManyTablesInATimeThatGrowsWithTheirNumber) {
  // Found by their names one after another, so many would take minutes.
  std::string tables;
  for (int i = 0; i < 30'000; ++i) tables += fmt::format("{}\"t{}\": {}}}", i == 0 ? "" : ",", i, kTable);
  const Manifest manifest = Manifest::parse(with_tables(tables), "embermap.json");
  EXPECT_EQ(manifest.tables.size(), 30'000U);
  EXPECT_EQ(Manifest::parse(manifest.text(), "embermap.json").tables.size(), 30'000U);
}

TEST(Manifest, RefusesNestingThatOursDoesNotHave) {
  const std::string deep = std::string(5'000'000, '[') + std::string(5'000'000, ']');
  EXPECT_THAT(refusal(R"({"commit": )" + deep + "}"), HasSubstr("nested more than 16 deep"));
}

TEST(Manifest, RefusesAKeyTwice) {
  EXPECT_THAT(refusal(R"({"format": "embermap", "version": 1, "commit": 3, "commit": 4, "tables": {}})"),
              HasSubstr("the key 'commit' twice"));
  EXPECT_THAT(refusal(with_tables("\"a\": " + kTable + "}, \"a\": " + kTable + "}")), HasSubstr("the key 'a' twice"));
}

TEST(Manifest, RefusesNamesThatWouldLeaveTheStore) {
  for (const char* name : {"../a", "a/b", "/a", ".", "..", "", "a\\u0000b", ".hidden", "-rf"})
    EXPECT_THAT(refusal(with_tables(fmt::format("\"{}\": {}}}", name, kTable))), HasSubstr("cannot name a table")) << name;
}

TEST(Manifest, RefusalsShowTheBeginningOfALongName) {
  for (const std::string& name : {std::string(20'000, 'y'), std::string(20'000, '\x7F'), "no/" + std::string(20'000, 'y')}) {
    const std::string text = refusal(with_tables(fmt::format("\"{}\": {}}}", name, kTable)));
    EXPECT_THAT(text, HasSubstr("cannot name a table"));
    EXPECT_LT(text.size(), 3'000U);
  }
}

TEST(Manifest, RefusesWhatIsNoNumber) {
  for (const char* text : {"NaN", "Infinity", "1e999", "\"\xff\"", "01", "0x10"})
    EXPECT_THAT(refusal(fmt::format(R"({{"format": "embermap", "version": 1, "commit": {}, "tables": {{}}}})", text)),
                HasSubstr("not valid JSON"))
        << text;
  for (const char* text : {"-1", "1.5", "18446744073709551616", "9223372036854775808", "[0]", "null"})
    EXPECT_THAT(refusal(fmt::format(R"({{"format": "embermap", "version": 1, "commit": {}, "tables": {{}}}})", text)),
                HasSubstr("commit"))
        << text;
}

TEST(Manifest, WhatStepsCarryOnIsKept) {
  const auto with = [](const char* value) { return with_tables(fmt::format("\"a\": {}, \"carried\": {}}}", kTable, value)); };
  const Manifest manifest = Manifest::parse(with("0.1"), "embermap.json");
  EXPECT_EQ(manifest.tables.at("a").carried, 0.1);
  EXPECT_EQ(Manifest::parse(manifest.text(), "embermap.json").tables.at("a").carried, 0.1);
  EXPECT_FALSE(Manifest::parse(with_tables("\"a\": " + kTable + "}"), "embermap.json").tables.at("a").carried);
  for (const char* value : {"-0.5", "true", "\"1\"", "[1]"}) EXPECT_THAT(refusal(with(value)), HasSubstr("'carried'")) << value;
}

TEST(Manifest, ErrorsStayShortWhateverTheValue) {
  EXPECT_LT(refusal(fmt::format(R"({{"format": "embermap", "version": 1, "commit": "{}"}})", std::string(1'000'000, 'x'))).size(),
            1000U);
  EXPECT_LT(refusal(with_tables(fmt::format("\"a\": {}, \"x\": 1, \"memory\": [{}1]}}", kTable, std::string(10, ' ')))).size(),
            1000U);
}

TEST(Manifest, RefusesAdoptedFilesByNoAbsolutePath) {
  for (const char* path :
       {"\"w.npy\"", "\"../w.npy\"", "\"\"", "\"/a\\u0000b\"", R"({"hex": "2f6"})", R"({"hex": "61"})", R"({"hex": "2F"})"})
    EXPECT_THAT(refusal(with_tables(fmt::format("\"a\": {}, \"adopted\": {}, \"adopted_writable\": true}}", kTable, path))),
                HasSubstr("'adopted'"))
        << path;
}

}  // namespace
}  // namespace embermap
