// fastText's models (.bin, versions 11 and 12): arguments, dictionary, input matrix, output matrix. Nothing in them is trusted.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"
#include "io/file_stream.hpp"
#include "io/formats.hpp"

namespace embermap {
namespace {

constexpr std::int32_t kMagic = 793712314;
constexpr std::int32_t kHierarchicalSoftmax = 1, kSupervised = 3;
constexpr std::size_t kLongestWord = VocabularyReader::kLongestWord;

// What of a model's beginning matters for its rows.
struct Model {
  std::int32_t version = 0, dim = 0, loss = 0, kind = 0, bucket = 0, minn = 0, maxn = 0;
  std::uint64_t words = 0, labels = 0;
  std::uint64_t words_offset = 0;  // of the first entry of the dictionary; words come before labels
  std::uint64_t labels_offset = 0;
  std::uint64_t input_offset = 0;  // of the byte that says whether the input matrix is quantized
};

class Parser {
 public:
  Parser(const File& file) : file_{file}, stream_{file, 0, file.size()} {}

  Model model() {
    Model model;
    if (stream_.left() < 4 || number<std::int32_t>("magic number") != kMagic) {
      stream_.seek(0);
      const auto head = stream_.peek(64);
      const std::string like = looks_like(head.first(std::min<std::size_t>(64, head.size())));
      fail(fmt::format("does not begin as a fastText model does{}", stream_.left() == 0 ? ": it is empty"
                                                                    : like.empty()      ? ""
                                                                                   : fmt::format(" (it looks like {})", like)));
    }
    model.version = number<std::int32_t>("version");
    if (model.version != 11 && model.version != 12)
      fail(fmt::format("is a fastText model of version {}; 11 and 12 can be read", model.version));
    std::array<std::int32_t, 12> arguments{};
    for (std::int32_t& argument : arguments) argument = number<std::int32_t>("arguments");
    number<double>("arguments");
    model.dim = arguments[0];
    model.loss = arguments[6];
    model.kind = arguments[7];
    model.bucket = arguments[8];
    model.minn = arguments[9];
    model.maxn = model.version == 11 && model.kind == kSupervised ? 0 : arguments[10];  // as fastText reads old classifiers
    if (model.dim <= 0) fail(fmt::format("says its vectors have {} numbers", model.dim));
    if (model.bucket < 0) fail(fmt::format("says it has {} buckets of n-grams", model.bucket));

    const auto size = number<std::int32_t>("dictionary");
    const auto words = number<std::int32_t>("dictionary");
    const auto labels = number<std::int32_t>("dictionary");
    number<std::int64_t>("dictionary");  // tokens of the text
    const auto pruned = number<std::int64_t>("dictionary");
    if (words < 0 || labels < 0 || std::int64_t{words} + labels != size)
      fail(fmt::format("says its dictionary has {} entries, {} words and {} labels", size, words, labels));
    if (pruned > 0)
      fail("has a pruned dictionary, as quantized models do; their rows are not stored: use the model it was made from");
    model.words = static_cast<std::uint64_t>(words);
    model.labels = static_cast<std::uint64_t>(labels);
    model.words_offset = stream_.position();
    for (std::uint64_t i = 0; i < model.words + model.labels; ++i) {
      if (i == model.words) model.labels_offset = stream_.position();
      const auto word = stream_.take_until('\0', kLongestWord + 1);
      if (!word)
        fail(stream_.left() > kLongestWord ? fmt::format("entry {} of its dictionary, from byte {} on, has no end within {}", i,
                                                         stream_.position(), format_size(kLongestWord))
                                           : fmt::format("ends in entry {} of the {} of its dictionary", i, size));
      number<std::int64_t>("dictionary");  // how often it occurs
      const int type = number<std::int8_t>("dictionary");
      if (type != (i < model.words ? 0 : 1))
        fail(fmt::format("entry {} of its dictionary is of type {}; the first {} are words (0), the others labels (1)", i, type,
                         words));
    }
    model.input_offset = stream_.position();
    return model;
  }

  // The matrix whose "quantized" byte is at `offset`.
  struct Matrix {
    std::uint64_t rows, dim, data, end;  // offsets of its numbers and of what follows
  };
  Matrix matrix(std::uint64_t offset, std::string_view name, std::uint64_t rows, std::uint64_t dim) {
    stream_.seek(offset);
    if (number<std::uint8_t>(name) != 0)
      fail(fmt::format(
          "is quantized (its {} is, as in .ftz files): its rows are codes, not numbers; use the model it was made from", name));
    const auto m = number<std::int64_t>(name), n = number<std::int64_t>(name);
    if (n < 0 || m < 0 || static_cast<std::uint64_t>(m) != rows || static_cast<std::uint64_t>(n) != dim)
      fail(fmt::format("says its {} is {} x {}, where its arguments and dictionary make {} x {}", name, m, n, rows, dim));
    std::uint64_t bytes = 0;
    const bool overflow = __builtin_mul_overflow(rows * 4, dim, &bytes);  // both are below 2^33
    if (overflow || bytes > stream_.left())
      fail(fmt::format("says its {} is {} x {} float32 from byte {} on, and has {} bytes there", name, m, n, stream_.position(),
                       stream_.left()));
    return {rows, dim, stream_.position(), stream_.position() + bytes};
  }

 private:
  template <class T>
  T number(std::string_view what) {
    if (stream_.left() < sizeof(T)) fail(fmt::format("ends in its {}: it has {} bytes", what, file_.size()));
    T out;
    stream_.take(std::as_writable_bytes(std::span(&out, 1)));
    return out;
  }
  [[noreturn]] void fail(const std::string& what) const { throw FormatError(file_.path(), what); }

  const File& file_;
  FileStream stream_;
};

// The words of rows in ascending order, from the dictionary, which was checked when the file was opened.
class DictionaryWords {
 public:
  DictionaryWords(const File& file, std::uint64_t begin, std::uint64_t end)
      : file_{file}, begin_{begin}, stream_{file, begin, end} {}

  // Valid until the next call.
  std::string_view word(std::uint64_t entry) {
    if (entry < next_) {
      stream_.seek(begin_);
      next_ = 0;
    }
    std::optional<std::string_view> word;
    for (; next_ <= entry; ++next_) {
      word = stream_.take_until('\0', kLongestWord + 1);
      if (!word || stream_.left() < kBehind) throw FormatError(file_.path(), "changed while it was read");
      if (next_ < entry) stream_.skip(kBehind);
    }
    word_ = *word;
    stream_.skip(kBehind);
    return word_;
  }

 private:
  static constexpr std::uint64_t kBehind = 9;  // count and type
  const File& file_;
  std::uint64_t begin_;
  FileStream stream_;
  std::uint64_t next_ = 0;
  std::string word_;
};

// The buckets of a word's n-grams of characters, as fastText finds them: the word between '<' and '>', characters of UTF-8.
std::vector<std::uint64_t> ngram_buckets(std::string_view text, const Model& model) {
  std::vector<std::uint64_t> out;
  if (text == "</s>" || model.bucket <= 0) return out;  // the end of a sentence has none
  const auto goes_on = [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; };
  const std::string word = fmt::format("<{}>", text);
  for (std::size_t begin = 0; begin < word.size(); ++begin) {
    if (goes_on(word[begin])) continue;
    std::uint32_t hash = 2166136261U;
    std::size_t end = begin;
    for (std::int32_t n = 1; end < word.size() && n <= model.maxn; ++n) {
      do {
        // The sign of a byte is part of the hash.
        hash = (hash ^ static_cast<std::uint32_t>(static_cast<std::int8_t>(word[end++]))) * 16777619U;
      } while (end < word.size() && goes_on(word[end]));
      const bool only_a_border = n == 1 && (begin == 0 || end == word.size());
      if (n >= model.minn && !only_a_border) out.push_back(hash % static_cast<std::uint32_t>(model.bucket));
    }
  }
  return out;
}

class FastTextReader final : public RowReader {
 public:
  FastTextReader(const Location& location, const ReadOptions& options)
      : file_{File::open(location.file, File::Mode::kRead)}, where_{printable(location.file)}, words_{options.words} {
    Parser parser(file_);
    model_ = parser.model();
    dim_ = static_cast<std::uint64_t>(model_.dim);
    dtype_ = DType::kFloat32;
    check_requested_dtype(where_, dtype_, options.dtype);
    const std::uint64_t inputs = model_.words + static_cast<std::uint64_t>(model_.bucket);
    const Parser::Matrix input = parser.matrix(model_.input_offset, "input matrix", inputs, dim_);
    data_ = input.data;
    named_ = model_.words;
    bool labels = false;
    if (location.selector.empty() || location.selector == "input") {
      part_ = Part::kInput;
      rows_ = inputs;
    } else if (location.selector == "words") {
      part_ = Part::kWords;
      rows_ = model_.words;
    } else if (location.selector == "output") {
      part_ = Part::kOutput;
      labels = model_.kind == kSupervised;
      rows_ = labels ? model_.labels : model_.words;
      data_ = parser.matrix(input.end, "output matrix", rows_, dim_).data;
      // With hierarchical softmax the rows of the output are inner nodes of a tree, which no word names.
      named_ = model_.loss == kHierarchicalSoftmax ? 0 : rows_;
    } else {
      throw NotFound(fmt::format(
          "{}: there is no '{}' in a fastText model; it has 'input' (words and buckets of n-grams, what is read where nothing is "
          "named), 'words' (vectors of the words, with their n-grams) and 'output'",
          where_, printable(location.selector)));
    }
    if (options.dim != 0 && options.dim != dim_)
      throw FormatError(location.file, fmt::format("its rows have {} columns, not {}", dim_, options.dim));
    dictionary_.emplace(file_, labels ? model_.labels_offset : model_.words_offset, model_.input_offset);
  }
  FastTextReader(const FastTextReader&) = delete;
  FastTextReader& operator=(const FastTextReader&) = delete;

  std::string description() const override {
    constexpr std::array<const char*, 3> kParts{"input matrix", "vectors of words", "output matrix"};
    return fmt::format("{}, fastText {} {}, {}, {} rows of {} numbers", where_, model_.version,
                       model_.kind == kSupervised ? "classifier" : "vectors", kParts[static_cast<std::size_t>(part_)], rows_,
                       dim_);
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, 4_MiB / (4 * dim_)); }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    if (part_ != Part::kWords) file_.read(data_ + first * 4 * dim_, {out, count * 4 * dim_});
    if (part_ != Part::kWords && !words_) return;
    for (std::uint64_t row = first; row < first + count; ++row) {
      if (row >= named_) {
        words_(row, fmt::format("{}{}__", part_ == Part::kOutput ? "__node_" : "__bucket_", row - named_));
        continue;
      }
      const std::string_view word = dictionary_->word(row);
      if (part_ == Part::kWords) average(row, word, out + (row - first) * 4 * dim_);
      if (words_) words_(row, word);
    }
  }

 private:
  enum class Part : std::uint8_t { kInput, kWords, kOutput };

  // The mean of a word's row and those of its n-grams, summed in fastText's order and in float32 as there: the same bits.
  void average(std::uint64_t row, std::string_view word, std::byte* out) {
    sum_.assign(dim_, 0.0F);
    row_.resize(dim_);
    const auto add = [&](std::uint64_t id) {
      file_.read(data_ + id * 4 * dim_, std::as_writable_bytes(std::span(row_)));
      for (std::uint64_t c = 0; c < dim_; ++c) sum_[c] += row_[c];
    };
    add(row);
    const std::vector<std::uint64_t> buckets = ngram_buckets(word, model_);
    for (const std::uint64_t bucket : buckets) add(model_.words + bucket);
    const auto share = static_cast<float>(1.0 / static_cast<double>(buckets.size() + 1));
    for (float& number : sum_) number *= share;
    std::memcpy(out, sum_.data(), 4 * dim_);
  }

  File file_;
  std::string where_;
  WordSink words_;
  Model model_;
  Part part_ = Part::kInput;
  std::uint64_t data_ = 0;
  std::uint64_t named_ = 0;  // rows that have a word of their own
  std::optional<DictionaryWords> dictionary_;
  std::vector<float> sum_, row_;
};

}  // namespace

Fit fit_fasttext(const File&, std::span<const std::byte> head) {
  std::int32_t magic = 0;
  if (head.size() < 8) return Fit::kNo;
  std::memcpy(&magic, head.data(), sizeof magic);
  return magic == kMagic ? Fit::kCertain : Fit::kNo;
}

std::vector<Entry> list_fasttext(const std::filesystem::path& file) {
  std::vector<Entry> out;
  for (const std::string name : {"input", "words", "output"}) {
    const FastTextReader reader(Location{file, name, Location::Format::kFastTextBinary}, {});
    out.push_back({.name = name,
                   .shape = {reader.rows(), reader.dim()},
                   .dtype = std::string(dtype_name(reader.dtype())),
                   .bytes = reader.rows() * reader.dim() * 4,
                   .layout = name == "words" ? "means of rows of input" : "contiguous"});
  }
  return out;
}

std::unique_ptr<RowReader> open_fasttext_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<FastTextReader>(location, options);
}

}  // namespace embermap
