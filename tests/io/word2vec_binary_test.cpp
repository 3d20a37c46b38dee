// word2vec's binary format and fastText's models.
#include <fmt/format.h>

#include <cmath>
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
using testing::raw;
using testing::read_word_vectors;
using testing::source_of;

using Words = std::vector<std::string>;
using Numbers = std::vector<float>;

template <class T>
std::string bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string bytes(const Numbers& numbers) { return testing::bytes_of(numbers); }

class Word2vecBinaryTest : public testing::FolderTest {
 protected:
  testing::WordVectors read(std::string_view content, std::uint64_t step = 100) {
    make_file(at("v.bin"), content);
    return read_word_vectors(open_word2vec_binary_rows, at("v.bin"), step);
  }
  std::string error(std::string_view content) {
    return error_of<FormatError>([&] { read(content); });
  }
};

TEST_F(Word2vecBinaryTest, RowsWithAndWithoutNewlinesBehindThem) {
  const Numbers a{1, 2}, b{-0.5F, 3}, c{10, 13};  // the bytes of no number are all printable
  for (const std::string newline : {"", "\n"})
    for (const std::uint64_t step : {1U, 2U, 100U}) {
      const auto got = read("3 2\nthe " + bytes(a) + newline + "\xFFz " + bytes(b) + newline + " " + bytes(c) + newline, step);
      EXPECT_THAT(got.words, ElementsAre("the", "\xFFz", ""));
      EXPECT_EQ(got.numbers, (Numbers{1, 2, -0.5F, 3, 10, 13}));
    }
  // 2.5782e-9 is "\n\n1 " and so on: newlines and spaces inside numbers are numbers.
  Numbers odd(2);
  std::memcpy(odd.data(), "\n \n\n \n\n ", 8);
  EXPECT_EQ(bits_of(read("1 2\nw " + bytes(odd)).numbers), bits_of(odd));
  EXPECT_TRUE(read("0 2\n").words.empty());
}

TEST_F(Word2vecBinaryTest, FilesThatDoNotMatchTheirHeaderAreRefused) {
  const std::string row = "w " + bytes(Numbers{1, 2}) + "\n";
  EXPECT_THAT(error("2 2\n" + row + row + row), AllOf(HasSubstr("says it has 2 rows"), HasSubstr("11 bytes follow")));
  EXPECT_THAT(error("3 2\n" + row + row + row.substr(0, 9)), AllOf(HasSubstr("3 rows"), HasSubstr("9 bytes behind row 1")));
  EXPECT_THAT(error("0 2\n" + row), HasSubstr("11 bytes follow"));
  EXPECT_THAT(error("9 2\n" + row), HasSubstr("can hold"));
  EXPECT_THAT(error("1 18446744073709551615\n" + row), HasSubstr("can hold"));
  EXPECT_THAT(error("1 0\n" + row), HasSubstr("no columns"));
  EXPECT_THAT(error("x 2\n" + row), HasSubstr("does not begin"));
  EXPECT_THAT(error(""), HasSubstr("is empty"));
  EXPECT_THAT(error("1 2\n" + std::string(100'000, 'w')), HasSubstr("has no end"));
  EXPECT_THAT(error("9 2\n" + row), HasSubstr("at most 1"));
  // A row that lost or gained bytes shifts all behind it.
  const std::string rows = row + row, four = "4 2\n";
  EXPECT_THAT(error(four + rows + row.substr(0, 7) + row.substr(8) + row + "xx"),
              AllOf(HasSubstr("row 2 does not end with a newline at byte 36"), HasSubstr("missing, or too many")));
  EXPECT_THAT(error(four + rows + "w  " + row.substr(2) + row), HasSubstr("row 2 does not end with a newline"));
  const std::string bare = "w " + bytes(Numbers{1, 2});
  EXPECT_THAT(error("4 2\n" + bare + bare.substr(0, 5) + bare.substr(8) + bare + bare + "xxx"), HasSubstr("holds a zero byte"));
  make_file(at("v.bin"), "1 2\n" + row);
  EXPECT_THROW(open_word2vec_binary_rows({at("v.bin"), ""}, {.dtype = DType::kFloat64}), DTypeError);
  EXPECT_THROW(open_word2vec_binary_rows({at("v.bin"), "x"}, {}), NotFound);
}

TEST_F(Word2vecBinaryTest, RoundTripsAreExactAndRowsComeInAnyOrder) {
  constexpr std::uint64_t kRows = 60'000, kDim = 24;
  std::mt19937 random(3);
  Numbers numbers(kRows * kDim);
  for (float& number : numbers) {
    const auto bits = static_cast<std::uint32_t>(random());
    std::memcpy(&number, &bits, 4);
  }
  Words words;
  for (std::uint64_t i = 0; i < kRows; ++i) words.push_back(i == 9 ? "" : fmt::format("w\xE9{}", i / 2));
  const auto writer = create_word2vec_binary_rows({at("o.bin"), ""}, kRows, kDim, DType::kFloat32, {.words = source_of(words)});
  for (std::uint64_t row = 0; row < kRows; row += 7001)
    writer->write(std::min<std::uint64_t>(7001, kRows - row), raw(numbers) + row * kDim * 4);
  writer->finish();
  const auto got = read_word_vectors(open_word2vec_binary_rows, at("o.bin"), 4097);
  EXPECT_EQ(got.words, words);
  EXPECT_EQ(bits_of(got.numbers), bits_of(numbers));

  const auto reader = open_word2vec_binary_rows({at("o.bin"), ""}, {});
  for (int i = 0; i < 60; ++i) {
    const std::uint64_t first = random() % kRows, count = std::min<std::uint64_t>(random() % 3000, kRows - first);
    Numbers rows(count * kDim);
    reader->read(first, count, reinterpret_cast<std::byte*>(rows.data()));
    ASSERT_TRUE(rows.empty() || std::memcmp(rows.data(), numbers.data() + first * kDim, rows.size() * 4) == 0) << first;
  }
}

TEST_F(Word2vecBinaryTest, WordsThatCouldNotBeReadAgainAreRefused) {
  const Numbers row{1, 2};
  for (const std::string_view word : {"a b", "a\n"}) {
    const Words words{std::string(word)};
    const auto writer = create_word2vec_binary_rows({at("o.bin"), ""}, 1, 2, DType::kFloat32, {.words = source_of(words)});
    EXPECT_THAT(error_of<FormatError>([&] { writer->write(1, raw(row)); }), HasSubstr("of row 0 holds a "));
  }
  EXPECT_THROW(create_word2vec_binary_rows({at("o.bin"), ""}, 1, 2, DType::kFloat32, {}), InvalidArgument);
  EXPECT_THROW(create_word2vec_binary_rows({at("o.bin"), ""}, 1, 2, DType::kFloat16, {}), DTypeError);
  EXPECT_THAT(names(), IsEmpty());
}

// A model as fastText writes it; tests change what they need.
struct Model {
  std::int32_t magic = 793712314, version = 12, dim = 2, loss = 2, kind = 2, bucket = 3, maxn = 6;
  std::int32_t size = 3, words = 3, labels = 0;
  std::int64_t pruned = -1;
  std::string entries = entry("</s>", 0) + entry("caf\xC3\xA9", 0) + entry("\xFF", 0);
  std::string input_head = quantized(false) + bytes(std::int64_t{6}) + bytes(std::int64_t{2});
  Numbers input{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  std::string output_head = quantized(false) + bytes(std::int64_t{3}) + bytes(std::int64_t{2});
  Numbers output{20, 21, 22, 23, 24, 25};

  static std::string entry(std::string_view word, char type) {
    return std::string(word) + '\0' + bytes(std::int64_t{5}) + std::string(1, type);
  }
  static std::string quantized(bool yes) { return std::string(1, yes ? '\1' : '\0'); }
  std::string text() const {
    std::string out = bytes(magic) + bytes(version);
    for (const std::int32_t argument : {dim, 5, 5, 5, 5, 1, loss, kind, bucket, 3, maxn, 100}) out += bytes(argument);
    out += bytes(1e-4) + bytes(size) + bytes(words) + bytes(labels) + bytes(std::int64_t{99}) + bytes(pruned) + entries;
    return out + input_head + bytes(input) + output_head + bytes(output);
  }
};

class FastTextTest : public testing::FolderTest {
 protected:
  testing::WordVectors read(const std::string& content, const std::string& selector = {}, std::uint64_t step = 100) {
    make_file(at("m.bin"), content);
    return read_word_vectors(open_fasttext_rows, at("m.bin"), step, selector);
  }
  std::string error(const std::string& content, const std::string& selector = {}) {
    return error_of<FormatError>([&] { read(content, selector); });
  }
};

TEST_F(FastTextTest, WordsAndBucketsOfTheInputMatrix) {
  for (const std::int32_t version : {11, 12})
    for (const std::string selector : {"", "input"})
      for (const std::uint64_t step : {1U, 2U, 100U}) {
        Model model;
        model.version = version;
        const auto got = read(model.text(), selector, step);
        EXPECT_THAT(got.words, ElementsAre("</s>", "caf\xC3\xA9", "\xFF", "__bucket_0__", "__bucket_1__", "__bucket_2__"));
        EXPECT_EQ(got.numbers, model.input);
      }
}

TEST_F(FastTextTest, TheOutputMatrixIsNamedByWordsOrLabels) {
  Model model;
  const auto got = read(model.text(), "output");
  EXPECT_THAT(got.words, ElementsAre("</s>", "caf\xC3\xA9", "\xFF"));
  EXPECT_EQ(got.numbers, model.output);

  model.kind = 3;
  model.size = 5;
  model.labels = 2;
  model.entries += Model::entry("__label__a", 1) + Model::entry("__label__b", 1);
  model.output_head = Model::quantized(false) + bytes(std::int64_t{2}) + bytes(std::int64_t{2});
  model.output.resize(4);
  EXPECT_THAT(read(model.text(), "output").words, ElementsAre("__label__a", "__label__b"));
  EXPECT_EQ(read(model.text()).words.size(), 6U);
  model.loss = 1;
  EXPECT_THAT(read(model.text(), "output").words, ElementsAre("__node_0__", "__node_1__"));
  EXPECT_THROW(read(model.text(), "nothing"), NotFound);
}

// The n-grams of "<ab>" of three characters, hashed by hand: "<ab" and "ab>".
TEST_F(FastTextTest, VectorsOfWordsAreMeansWithTheirNGrams) {
  const auto bucket = [](std::string_view ngram) {
    std::uint32_t hash = 2166136261U;
    for (const char c : ngram) hash = (hash ^ static_cast<std::uint32_t>(static_cast<std::int8_t>(c))) * 16777619U;
    return hash % 1000;
  };
  Model model;
  model.bucket = 1000;
  model.maxn = 3;
  model.entries = Model::entry("</s>", 0) + Model::entry("ab", 0) + Model::entry("\xC3\xA9", 0);
  model.input_head = Model::quantized(false) + bytes(std::int64_t{1003}) + bytes(std::int64_t{2});
  model.input.assign(2006, 0);
  for (std::size_t i = 0; i < model.input.size(); ++i) model.input[i] = static_cast<float>(i * i % 101) / 8;
  const auto expect = [&](std::size_t row, std::initializer_list<std::string_view> ngrams) {
    Numbers out{model.input[2 * row], model.input[2 * row + 1]};
    for (const std::string_view ngram : ngrams)
      for (std::size_t c = 0; c < 2; ++c) out[c] += model.input[2 * (3 + bucket(ngram)) + c];
    for (float& number : out) number *= static_cast<float>(1.0 / static_cast<double>(1 + ngrams.size()));
    return out;
  };
  const auto got = read(model.text(), "words");
  EXPECT_THAT(got.words, ElementsAre("</s>", "ab", "\xC3\xA9"));
  Numbers wanted = expect(0, {});
  for (const Numbers& more : {expect(1, {"<ab", "ab>"}), expect(2, {"<\xC3\xA9>"})})
    wanted.insert(wanted.end(), more.begin(), more.end());
  EXPECT_EQ(got.numbers, wanted);
  model.maxn = 0;
  EXPECT_EQ(read(model.text(), "words").numbers, (Numbers(model.input.begin(), model.input.begin() + 6)));
}

TEST_F(FastTextTest, WordsAreFoundInAnyOrderOfRows) {
  make_file(at("m.bin"), Model().text());
  std::vector<std::string> words;
  const auto reader =
      open_fasttext_rows({at("m.bin"), ""}, {.words = [&](std::uint64_t, std::string_view w) { words.emplace_back(w); }});
  Numbers row(2);
  for (const std::uint64_t i : {2U, 0U, 1U, 5U, 2U}) reader->read(i, 1, reinterpret_cast<std::byte*>(row.data()));
  EXPECT_THAT(words, ElementsAre("\xFF", "</s>", "caf\xC3\xA9", "__bucket_2__", "\xFF"));
}

TEST_F(FastTextTest, WhatIsNoModelOrABrokenOneIsRefused) {
  const auto broken = [&](auto change) {
    Model model;
    change(model);
    return error(model.text());
  };
  EXPECT_THAT(broken([](Model& m) { m.magic = 1; }), HasSubstr("does not begin"));
  EXPECT_THAT(broken([](Model& m) { m.version = 13; }), HasSubstr("version 13; 11 and 12"));
  EXPECT_THAT(broken([](Model& m) { m.dim = 0; }), HasSubstr("0 numbers"));
  EXPECT_THAT(broken([](Model& m) { m.dim = 3; }),
              HasSubstr("input matrix is 6 x 2, where its arguments and dictionary make 6 x 3"));
  EXPECT_THAT(broken([](Model& m) { m.bucket = 4; }), HasSubstr("make 7 x 2"));
  EXPECT_THAT(broken([](Model& m) { m.bucket = -1; }), HasSubstr("-1 buckets"));
  EXPECT_THAT(broken([](Model& m) { m.size = 4; }), HasSubstr("4 entries, 3 words and 0 labels"));
  EXPECT_THAT(broken([](Model& m) { m.words = -1, m.size = -1; }), HasSubstr("-1 words"));
  EXPECT_THAT(broken([](Model& m) { m.size = m.words = 2'000'000'000; }), HasSubstr("entry 3 "));
  EXPECT_THAT(broken([](Model& m) { m.pruned = 7; }), HasSubstr("pruned"));
  EXPECT_THAT(broken([](Model& m) { m.entries.back() = 1; }), HasSubstr("entry 2 of its dictionary is of type 1"));
  EXPECT_THAT(broken([](Model& m) { m.entries.insert(1, 100'000, 'x'); }), HasSubstr("entry 0"));
  EXPECT_THAT(broken([](Model& m) { m.input_head[0] = 1; }), AllOf(HasSubstr("quantized"), HasSubstr(".ftz")));
  EXPECT_THAT(broken([](Model& m) { m.input_head[15] = -1; }), HasSubstr("input matrix"));
  Model quantized_output;
  quantized_output.output_head[0] = 1;
  EXPECT_THAT(error(quantized_output.text(), "output"), HasSubstr("its output matrix is"));
  EXPECT_EQ(read(quantized_output.text()).words.size(), 6U);
  // Cut anywhere before the end of the input matrix, it is an error and nothing worse.
  const Model model;
  const std::string whole = model.text();
  const std::size_t end = whole.size() - bytes(model.output).size() - model.output_head.size();
  for (std::size_t size = 0; size < end; ++size) EXPECT_THAT(error(whole.substr(0, size)), HasSubstr("m.bin")) << size;
  EXPECT_EQ(read(whole.substr(0, end)).numbers, model.input);
}

}  // namespace
}  // namespace embermap
