#include "io/npy.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <set>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"

namespace embermap {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
// Limits of our own on what a file may make us hold: text of the header, values in it (a field of a record takes about three),
// nesting.
constexpr std::uint64_t kLargestHeader = 16_MiB;
constexpr std::size_t kMostValues = 262144;
constexpr int kDeepest = 64;

// ---- text ----

std::optional<std::u32string> decode_utf8(std::string_view text) {
  std::u32string out;
  for (std::size_t at = 0; at < text.size();) {
    const auto lead = static_cast<unsigned char>(text[at]);
    const std::size_t length = lead < 0x80                    ? 1
                               : lead >= 0xC2 && lead <= 0xDF ? 2
                               : (lead & 0xF0) == 0xE0        ? 3
                               : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                              : 0;
    if (length == 0 || length > text.size() - at) return std::nullopt;
    char32_t code = length == 1 ? lead : lead & (0x7FU >> length);
    for (std::size_t i = 1; i < length; ++i) {
      const auto next = static_cast<unsigned char>(text[at + i]);
      if ((next & 0xC0) != 0x80) return std::nullopt;
      code = code << 6 | (next & 0x3FU);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    if (overlong || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return std::nullopt;
    out += code;
    at += length;
  }
  return out;
}

void append_utf8(std::string& out, char32_t code) {
  const auto byte = [&](char32_t value) { out += static_cast<char>(static_cast<unsigned char>(value)); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | code >> 6);
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3F));
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

// ---- Python literals ----

struct Value {
  enum class Kind { kNone, kBool, kInteger, kString, kTuple, kList, kDict };
  Kind kind = Kind::kNone;
  bool truth = false;        // kBool
  bool negative = false;     // kInteger
  std::uint64_t number = 0;  // kInteger: magnitude
  bool too_large = false;    // kInteger: magnitude past 64 bits
  std::string text;          // kString, UTF-8
  std::vector<Value> items;  // kTuple, kList; kDict: keys and values in turn
  std::size_t begin = 0, end = 0;
};

// Reads the subset of Python's literals that NumPy and its imitators write. Strict: nothing is guessed. Depth, number of values
// and text are bounded.
class LiteralParser {
 public:
  LiteralParser(const std::filesystem::path& file, std::string_view text, unsigned major)
      : file_{file}, text_{text}, major_{major} {}

  Value parse() {
    Value value = parse_value(0);
    skip_space();
    if (at_ < text_.size()) fail("there is more after the dictionary");
    return value;
  }

  std::string source(const Value& value) const {
    const std::string_view all = text_.substr(value.begin, value.end - value.begin);
    return printable(all, 80);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    throw FormatError(file_, fmt::format("NPY header: {} (at byte {} of the header text)", what, at_));
  }

  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\n\r\f\v", text_[at_]) != nullptr && text_[at_] != '\0') ++at_;
  }

  bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Value parse_value(int depth) {
    if (depth > kDeepest) fail(fmt::format("nested more than {} deep", kDeepest));
    if (++values_ > kMostValues) fail(fmt::format("more than {} values", kMostValues));
    skip_space();
    if (at_ >= text_.size()) fail("it ends too early");
    const std::size_t begin = at_;
    Value value;
    const char c = text_[at_];
    if (c == '(')
      value = parse_sequence(')', depth);
    else if (c == '[')
      value = parse_sequence(']', depth);
    else if (c == '{')
      value = parse_dict(depth);
    else if (c == '\'' || c == '"')
      value = parse_string();
    else if (c == '-' || c == '+' || (c >= '0' && c <= '9'))
      value = parse_integer();
    else
      value = parse_word();
    value.begin = begin;
    value.end = at_;
    return value;
  }

  Value parse_sequence(char close, int depth) {
    Value out;
    out.kind = close == ')' ? Value::Kind::kTuple : Value::Kind::kList;
    ++at_;
    bool comma = true;
    while (!take(close)) {
      if (!comma) fail(fmt::format("',' or '{}' expected", close));
      out.items.push_back(parse_value(depth + 1));
      comma = take(',');
    }
    // Parentheses around one value make no tuple in Python: the comma does.
    if (close == ')' && out.items.size() == 1 && !comma) {
      Value inner = std::move(out.items.front());
      return inner;
    }
    return out;
  }

  Value parse_dict(int depth) {
    Value out;
    out.kind = Value::Kind::kDict;
    ++at_;
    bool comma = true;
    while (!take('}')) {
      if (!comma) fail("',' or '}' expected");
      out.items.push_back(parse_value(depth + 1));
      if (!take(':')) fail("':' expected");
      out.items.push_back(parse_value(depth + 1));
      comma = take(',');
    }
    return out;
  }

  Value parse_integer() {
    Value out;
    out.kind = Value::Kind::kInteger;
    if (text_[at_] == '-' || text_[at_] == '+') out.negative = text_[at_++] == '-';
    const std::size_t digits = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      out.too_large = out.too_large || __builtin_mul_overflow(out.number, std::uint64_t{10}, &out.number) ||
                      __builtin_add_overflow(out.number, digit, &out.number);
      ++at_;
    }
    if (at_ == digits) fail("a number expected");
    if (at_ - digits > 1 && text_[digits] == '0' && (out.number != 0 || out.too_large)) fail("a number with leading zeros");
    if (at_ < text_.size() && text_[at_] == 'L') {
      // Python 2 wrote long integers so; its NumPy wrote versions 1.0 and 2.0 only.
      if (major_ >= 3) fail("the suffix L of Python 2 in a version 3.0 header");
      ++at_;
    }
    if (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '.' || c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) fail("a whole decimal number expected");
    }
    return out;
  }

  Value parse_word() {
    const auto is_word = [](char c) {
      return c == '_' || c == '.' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    };
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    Value out;
    if (word == "True" || word == "False") {
      out.kind = Value::Kind::kBool;
      out.truth = word == "True";
      return out;
    }
    if (word == "None") return out;
    // Python 2 wrote text as u'...'.
    if (word == "u" && at_ < text_.size() && (text_[at_] == '\'' || text_[at_] == '"')) return parse_string();
    at_ = begin;
    if (word.empty()) fail(fmt::format("unexpected character '{}'", printable(text_.substr(at_, 1))));
    if (word.starts_with("np.") || word.starts_with("numpy."))
      fail(fmt::format(
          "'{}' where a plain number belongs: the program that wrote the file put a NumPy scalar into the header; convert "
          "each dimension to int before writing",
          printable(word, 40)));
    fail(fmt::format("unexpected word '{}'", printable(word, 40)));
  }

  char32_t parse_hex(std::size_t digits) {
    char32_t code = 0;
    for (std::size_t i = 0; i < digits; ++i) {
      const char c = at_ < text_.size() ? text_[at_] : '\0';
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) fail("a hexadecimal digit expected");
      code = code << 4 | static_cast<char32_t>(digit);
      ++at_;
    }
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) fail("an escape that is no character");
    return code;
  }

  Value parse_string() {
    Value out;
    out.kind = Value::Kind::kString;
    const char quote = text_[at_++];
    for (;;) {
      if (at_ >= text_.size()) fail("a string without its closing quote");
      const char c = text_[at_++];
      if (c == quote) break;
      if (c == '\n' || c == '\r' || c == '\0') fail("a string that does not end on its line");
      if (c == '\\') {
        if (at_ >= text_.size()) fail("a string without its closing quote");
        switch (const char escape = text_[at_++]) {
          case '\\':
          case '\'':
          case '"': out.text += escape; break;
          case 'n': out.text += '\n'; break;
          case 'r': out.text += '\r'; break;
          case 't': out.text += '\t'; break;
          case 'x': append_utf8(out.text, parse_hex(2)); break;
          case 'u': append_utf8(out.text, parse_hex(4)); break;
          case 'U': append_utf8(out.text, parse_hex(8)); break;
          default: fail(fmt::format("unknown escape '\\{}'", printable(std::string_view(&escape, 1))));
        }
      } else if (major_ < 3) {
        append_utf8(out.text, static_cast<unsigned char>(c));  // Latin-1
      } else {
        out.text += c;  // UTF-8, checked before
      }
    }
    return out;
  }

  const std::filesystem::path& file_;
  std::string_view text_;
  unsigned major_;
  std::size_t at_ = 0;
  std::size_t values_ = 0;
};

// ---- dtypes ----

struct ScalarType {
  char kind = 0;
  std::uint64_t bytes = 0;
};

// Other programs than NumPy write dtypes by name, and NumPy reads them: "float32" -> "<f4". Anything else stays as it is.
std::string_view code_of_name(std::string_view descr) {
  struct Name {
    std::string_view name, code;
  };
  constexpr std::array kNames{Name{"float16", "<f2"},   Name{"half", "<f2"},       Name{"float32", "<f4"}, Name{"single", "<f4"},
                              Name{"float64", "<f8"},   Name{"double", "<f8"},     Name{"float", "<f8"},   Name{"int8", "|i1"},
                              Name{"int16", "<i2"},     Name{"int32", "<i4"},      Name{"int64", "<i8"},   Name{"uint8", "|u1"},
                              Name{"uint16", "<u2"},    Name{"uint32", "<u4"},     Name{"uint64", "<u8"},  Name{"bool", "|b1"},
                              Name{"complex64", "<c8"}, Name{"complex128", "<c16"}};
  for (const Name& one : kNames)
    if (one.name == descr) return one.code;
  return descr;
}

// "<f4" -> {f, 4}. nullopt if it is none of NumPy's.
std::optional<ScalarType> parse_scalar(std::string_view descr) {
  if (!descr.empty() && std::string_view("<>=|").find(descr.front()) != std::string_view::npos) descr.remove_prefix(1);
  if (descr.empty()) return std::nullopt;
  const char kind = descr.front();
  descr.remove_prefix(1);
  if (kind == '?' && descr.empty()) return ScalarType{'b', 1};
  if (std::string_view("biufcVSaUOmM").find(kind) == std::string_view::npos) return std::nullopt;
  if (kind == 'O' && descr.empty()) return ScalarType{'O', 8};
  std::uint64_t number = 0;
  std::size_t digits = 0;
  while (digits < descr.size() && descr[digits] >= '0' && descr[digits] <= '9') {
    if (digits == 18) return std::nullopt;
    number = number * 10 + static_cast<std::uint64_t>(descr[digits++] - '0');
  }
  if (digits == 0) return std::nullopt;
  const std::string_view rest = descr.substr(digits);
  if (kind == 'm' || kind == 'M') {
    const bool unit =
        rest.empty() || (rest.size() > 2 && rest.front() == '[' && rest.back() == ']' &&
                         std::all_of(rest.begin() + 1, rest.end() - 1, [](char c) {
                           return c == '/' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
                         }));
    return number == 8 && unit ? std::optional(ScalarType{kind, 8}) : std::nullopt;
  }
  if (!rest.empty()) return std::nullopt;
  const auto one_of = [&](std::initializer_list<std::uint64_t> sizes) {
    return std::find(sizes.begin(), sizes.end(), number) != sizes.end() ? std::optional(ScalarType{kind, number}) : std::nullopt;
  };
  switch (kind) {
    case 'b': return one_of({1});
    case 'i':
    case 'u': return one_of({1, 2, 4, 8});
    case 'f': return one_of({1, 2, 4, 8, 12, 16});
    case 'c': return one_of({8, 16, 24, 32});
    case 'U': return ScalarType{'U', number * 4};
    case 'a': return ScalarType{'S', number};
    default: return ScalarType{kind, number};
  }
}

// Reads descr, fields and shape out of the parsed header.
class HeaderReader {
 public:
  HeaderReader(const std::filesystem::path& file, const LiteralParser& parser) : file_{file}, parser_{parser} {}

  void read(const Value& dict, NpyHeader& header) const {
    if (dict.kind != Value::Kind::kDict) fail("it is not a dictionary");
    const Value* descr = nullptr;
    const Value* order = nullptr;
    const Value* shape = nullptr;
    for (std::size_t i = 0; i < dict.items.size(); i += 2) {
      const Value& key = dict.items[i];
      const Value*& slot = key.text == "descr" ? descr : key.text == "fortran_order" ? order : shape;
      if (key.kind != Value::Kind::kString || (key.text != "descr" && key.text != "fortran_order" && key.text != "shape"))
        fail(fmt::format("unknown key {}", parser_.source(key)));
      if (slot != nullptr) fail(fmt::format("key '{}' twice", key.text));
      slot = &dict.items[i + 1];
    }
    for (const auto& [value, name] : {std::pair{descr, "descr"}, std::pair{order, "fortran_order"}, std::pair{shape, "shape"}})
      if (value == nullptr) fail(fmt::format("key '{}' is missing", name));

    if (order->kind != Value::Kind::kBool) fail(fmt::format("fortran_order is not True or False: {}", parser_.source(*order)));
    header.fortran_order = order->truth;
    header.shape = read_shape(*shape, "shape");
    read_descr(*descr, header);
    std::uint64_t elements = 1, bytes = 0;
    const bool empty = std::find(header.shape.begin(), header.shape.end(), 0) != header.shape.end();
    for (const std::uint64_t length : header.shape)
      if (!empty && __builtin_mul_overflow(elements, length, &elements)) fail_size(header);
    if (__builtin_mul_overflow(empty ? 0 : elements, header.item_bytes, &bytes) ||
        bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - header.data_offset)
      fail_size(header);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const { throw FormatError(file_, fmt::format("NPY header: {}", what)); }
  [[noreturn]] void fail_size(const NpyHeader& header) const {
    fail(fmt::format("shape {} of {}-byte elements is past 64 bits", header.shape_text(), header.item_bytes));
  }

  std::uint64_t read_length(const Value& value, std::string_view what) const {
    if (value.kind != Value::Kind::kInteger || value.negative)
      fail(fmt::format("{} holds {}, not a whole number of 0 or more", what, parser_.source(value)));
    if (value.too_large || value.number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      fail(fmt::format("{} holds {}, past 64 bits", what, parser_.source(value)));
    return value.number;
  }

  std::vector<std::uint64_t> read_shape(const Value& value, std::string_view what) const {
    if (value.kind != Value::Kind::kTuple) fail(fmt::format("{} is not a tuple: {}", what, parser_.source(value)));
    std::vector<std::uint64_t> out;
    for (const Value& item : value.items) out.push_back(read_length(item, what));
    return out;
  }

  ScalarType scalar(const Value& descr) const {
    const std::optional<ScalarType> type = parse_scalar(code_of_name(descr.text));
    if (!type) fail(fmt::format("descr '{}' is no dtype known here", printable(descr.text.substr(0, 80))));
    if (type->kind == 'O')
      fail(
          "it holds Python objects, that is a pickle; embermap runs no pickles. Save the numbers as a plain numeric array "
          "instead");
    return *type;
  }

  // Bytes of a dtype anywhere in descr.
  std::uint64_t type_bytes(const Value& descr) const {
    if (descr.kind == Value::Kind::kString) return scalar(descr).bytes;
    if (descr.kind == Value::Kind::kList) {
      std::uint64_t total = 0;
      for (const Value& field : descr.items) add(total, read_field(field, 0).first.bytes);
      return total;
    }
    if (descr.kind == Value::Kind::kTuple && descr.items.size() == 2)
      return multiply(type_bytes(descr.items[0]), sub_array(descr.items[1]));
    fail(fmt::format("descr holds {}, which is no dtype", parser_.source(descr)));
  }

  std::vector<std::uint64_t> sub_array(const Value& value) const {
    if (value.kind == Value::Kind::kInteger) return {read_length(value, "a sub-array's shape")};
    return read_shape(value, "a sub-array's shape");
  }

  std::uint64_t multiply(std::uint64_t bytes, const std::vector<std::uint64_t>& shape) const {
    for (const std::uint64_t length : shape)
      if (length == 0) return 0;
    for (const std::uint64_t length : shape)
      if (__builtin_mul_overflow(bytes, length, &bytes)) fail("a sub-array is past 64 bits");
    return bytes;
  }

  void add(std::uint64_t& total, std::uint64_t bytes) const {
    if (__builtin_add_overflow(total, bytes, &total)) fail("the record is past 64 bits");
  }

  // The field and whether it is padding: ('', '|V4').
  std::pair<NpyField, bool> read_field(const Value& value, std::uint64_t offset) const {
    if (value.kind != Value::Kind::kTuple || value.items.size() < 2 || value.items.size() > 3)
      fail(fmt::format("descr holds {}, which is no field (name, dtype) or (name, dtype, shape)", parser_.source(value)));
    const Value* name = &value.items[0];
    if (name->kind == Value::Kind::kTuple && name->items.size() == 2) name = &name->items[1];  // (title, name)
    if (name->kind != Value::Kind::kString) fail(fmt::format("a field is named {}, not by a string", parser_.source(*name)));
    const Value& type = value.items[1];
    NpyField field;
    field.name = name->text;
    field.offset = offset;
    field.descr = type.kind == Value::Kind::kString ? std::string(code_of_name(type.text)) : parser_.source(type);
    if (value.items.size() == 3) field.shape = sub_array(value.items[2]);
    field.bytes = multiply(type_bytes(type), field.shape);
    const bool padding = field.name.empty() && type.kind == Value::Kind::kString && scalar(type).kind == 'V';
    return {std::move(field), padding};
  }

  void read_descr(const Value& descr, NpyHeader& header) const {
    if (descr.kind == Value::Kind::kString) {
      header.descr = code_of_name(descr.text);
      header.item_bytes = scalar(descr).bytes;
      return;
    }
    if (descr.kind != Value::Kind::kList)
      fail(fmt::format("descr is {}, neither a dtype nor a list of fields", parser_.source(descr)));
    std::set<std::string> names;
    for (const Value& item : descr.items) {
      auto [field, padding] = read_field(item, header.item_bytes);
      add(header.item_bytes, field.bytes);
      if (padding) continue;
      if (!names.insert(field.name).second) fail(fmt::format("field '{}' twice", printable(field.name)));
      header.fields.push_back(std::move(field));
    }
    if (header.fields.empty()) fail("a record without fields");
  }

  const std::filesystem::path& file_;
  const LiteralParser& parser_;
};

std::string not_npy(std::span<const std::byte> known, std::uint64_t size) {
  if (size == 0) return "no NPY magic at byte 0: the file is empty (truncated header)";
  std::string text = "no NPY magic at byte 0";
  const std::string what = looks_like(known);
  if (!what.empty()) return text + ": it looks like " + what;
  text += fmt::format(". If its {} bytes are bare numbers without a header", size);
  if (size % 4 == 0) text += fmt::format(" ({} of 4 bytes)", size / 4);
  return text + ", say what they are: --from raw --source-dtype DTYPE --dim COLUMNS, in Python format=\"raw\", dtype= and dim=";
}

// 'name' with Python's escapes. ASCII unless `raw`, which keeps other characters as they are.
std::string quoted(const std::u32string& name) {
  std::string out = "'";
  for (const char32_t c : name) {
    if (c == '\'' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || (c >= 0x7F && c < 0xA0)) {
      out += fmt::format("\\x{:02x}", static_cast<std::uint32_t>(c));
    } else {
      append_utf8(out, c);
    }
  }
  return out + "'";
}

std::string to_latin1(std::string_view utf8) {
  std::string out;
  const std::optional<std::u32string> decoded = decode_utf8(utf8);
  for (const char32_t c : *decoded) out += static_cast<char>(static_cast<unsigned char>(c));
  return out;
}

}  // namespace

std::uint64_t NpyHeader::elements() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t out = 1;
  for (const std::uint64_t length : shape) out = checked_mul(out, length, "elements of an NPY array");
  return out;
}

std::uint64_t NpyHeader::data_bytes() const { return checked_mul(elements(), item_bytes, "bytes of an NPY array"); }

std::string NpyHeader::dtype_text() const {
  if (fields.empty()) return printable(descr);
  std::string out = "{";
  constexpr std::size_t kShown = 20;
  for (std::size_t i = 0; i < std::min(fields.size(), kShown); ++i) {
    const NpyField& field = fields[i];
    out += fmt::format("{}{}: {}", i > 0 ? ", " : "", printable(field.name), printable(field.descr));
    if (!field.shape.empty()) out += fmt::format(" {}", shape_to_text(field.shape));
  }
  if (fields.size() > kShown) out += fmt::format(", ... {} more", fields.size() - kShown);
  return out + "}";
}

std::string NpyHeader::shape_text() const { return shape_to_text(shape); }

NpyHeader read_npy_header(const File& file) {
  return read_npy_header(file.path(), file.size(),
                         [&](std::uint64_t offset, std::span<std::byte> out) { file.read(offset, out); });
}

NpyHeader read_npy_header(const std::filesystem::path& path, std::uint64_t size, const ReadBytes& read) {
  // Read once, in ascending order: what comes out of a compressed stream comes in no other.
  std::array<std::byte, 512> buffer;
  const auto prefix = std::span<const std::byte>(buffer).first(std::min<std::uint64_t>(size, buffer.size()));
  const std::uint64_t got = prefix.size();
  if (got > 0) read(0, std::span(buffer).first(got));
  const auto byte = [&](std::size_t i) { return std::to_integer<unsigned>(prefix[i]); };
  if (got == 0 || std::memcmp(prefix.data(), kMagic.data(), std::min<std::size_t>(got, kMagic.size())) != 0)
    throw FormatError(path, not_npy(prefix, size));
  const auto truncated = [&](std::uint64_t needed) {
    return FormatError(path, fmt::format("truncated header: {} bytes, the header needs {}", size, needed));
  };
  if (got < 8) throw truncated(10);
  NpyHeader header;
  header.major = byte(6);
  header.minor = byte(7);
  if (header.minor != 0 || header.major < 1 || header.major > 3)
    throw FormatError(path,
                      fmt::format("NPY version {}.{} is not known here (1.0, 2.0 and 3.0 are)", header.major, header.minor));
  const std::uint64_t start = header.major == 1 ? 10 : 12;
  if (got < start) throw truncated(start);
  const std::uint64_t length = header.major == 1
                                   ? byte(8) | byte(9) << 8
                                   : byte(8) | byte(9) << 8 | byte(10) << 16 | static_cast<std::uint64_t>(byte(11)) << 24;
  header.data_offset = start + length;
  if (header.data_offset > size) throw truncated(header.data_offset);
  if (length > kLargestHeader)
    throw FormatError(path, fmt::format("its NPY header of {} bytes is longer than the {} accepted", length, kLargestHeader));

  std::string text(length, '\0');
  const std::size_t here = std::min<std::uint64_t>(length, got - start);
  std::memcpy(text.data(), prefix.data() + start, here);
  if (here < length) read(start + here, std::as_writable_bytes(std::span(text)).subspan(here));
  if (header.major == 3 && !decode_utf8(text)) throw FormatError(path, "NPY header: version 3.0, but not UTF-8");
  LiteralParser parser(path, text, header.major);
  const Value value = parser.parse();
  HeaderReader(path, parser).read(value, header);

  const std::uint64_t held = size - header.data_offset;
  if (held < header.data_bytes())
    throw FormatError(path, fmt::format("truncated data: {} of {} bytes are there (dtype {}, shape {})", held,
                                        header.data_bytes(), header.dtype_text(), header.shape_text()));
  return header;
}

std::string format_npy_header(std::string_view descr, const std::vector<NpyField>& fields, std::uint64_t item_bytes,
                              const std::vector<std::uint64_t>& shape, std::uint64_t data_offset) {
  const auto scalar_of = [](std::string_view text) {
    const std::optional<ScalarType> type = parse_scalar(text);
    if (!type || type->kind == 'O')
      throw InvalidArgument(fmt::format("NPY header: dtype '{}' cannot be written", printable(text)));
    return *type;
  };
  if (descr.empty() == fields.empty()) throw InvalidArgument("NPY header: either a descr or fields are needed");

  bool latin1 = true;
  std::string dtype;
  if (!descr.empty()) {
    const std::uint64_t bytes = scalar_of(descr).bytes;
    if (item_bytes != 0 && item_bytes != bytes)
      throw InvalidArgument(fmt::format("NPY header: '{}' has {} bytes, not {}", printable(descr), bytes, item_bytes));
    dtype = fmt::format("'{}'", descr);
  } else {
    std::set<std::string_view> names;
    std::uint64_t end = 0;
    const auto pad_to = [&](std::uint64_t offset) {
      if (offset > end) dtype += fmt::format("('', '|V{}'), ", offset - end);
      end = offset;
    };
    for (const NpyField& field : fields) {
      const std::optional<std::u32string> name = decode_utf8(field.name);
      if (!name || name->empty() || !names.insert(field.name).second)
        throw InvalidArgument(
            fmt::format("NPY header: a field cannot be named '{}' (empty, not UTF-8, or twice)", printable(field.name)));
      latin1 = latin1 && std::all_of(name->begin(), name->end(), [](char32_t c) { return c < 0x100; });
      std::uint64_t bytes = scalar_of(field.descr).bytes;
      for (const std::uint64_t length : field.shape) bytes = checked_mul(bytes, length, "NPY header: bytes of a field");
      if (field.bytes != bytes || field.offset < end)
        throw InvalidArgument(fmt::format(
            "NPY header: field '{}' at offset {} with {} bytes does not fit ('{}' {} takes {}; bytes before {} are taken)",
            printable(field.name), field.offset, field.bytes, printable(field.descr), shape_to_text(field.shape), bytes, end));
      pad_to(field.offset);
      dtype += fmt::format("({}, '{}'", quoted(*name), field.descr);
      if (!field.shape.empty()) dtype += fmt::format(", {}", shape_to_text(field.shape));
      dtype += "), ";
      end = checked_add(end, bytes, "NPY header: bytes of a record");
    }
    if (item_bytes != 0) {
      if (item_bytes < end)
        throw InvalidArgument(fmt::format("NPY header: fields end at byte {} of a record of {}", end, item_bytes));
      pad_to(item_bytes);
    }
    dtype = fmt::format("[{}]", std::string_view(dtype).substr(0, dtype.size() - 2));
  }
  std::string text = fmt::format("{{'descr': {}, 'fortran_order': False, 'shape': {}, }}", dtype, shape_to_text(shape));
  if (latin1) text = to_latin1(text);

  // The text ends in a newline; spaces before it fill up to where the data begins.
  const auto whole = [&](std::uint64_t prefix) {
    const std::uint64_t least = prefix + text.size() + 1;
    if (data_offset == 0) return round_up(least, 64);
    if (data_offset < least)
      throw InvalidArgument(fmt::format("NPY header: {} bytes are needed, the data is to begin at byte {}", least, data_offset));
    return data_offset;
  };
  unsigned major = latin1 ? 1 : 3;
  if (major == 1 && whole(10) - 10 > 65535) major = 2;
  const std::uint64_t prefix = major == 1 ? 10 : 12;
  const std::uint64_t total = whole(prefix);
  const std::uint64_t length = total - prefix;
  if (length > kLargestHeader)
    throw InvalidArgument(fmt::format("NPY header: {} bytes are more than the {} accepted", length, kLargestHeader));
  std::string out(kMagic);
  out += static_cast<char>(major);
  out += '\0';
  for (std::uint64_t i = 0; i < prefix - 8; ++i) out += static_cast<char>(length >> (8 * i) & 0xFF);
  out += text;
  out.append(total - out.size() - 1, ' ');
  out += '\n';
  return out;
}

}  // namespace embermap
