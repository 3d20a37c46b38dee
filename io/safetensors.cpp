#include "io/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.hpp"
#include "base/size_text.hpp"

namespace embermap {
namespace {

struct Known {
  std::string_view name, text;
  std::uint64_t bits;
  std::optional<DType> dtype;
  bool boolean = false;
};

constexpr std::array kKnown{
    Known{"F64", "float64", 64, DType::kFloat64},
    Known{"F32", "float32", 32, DType::kFloat32},
    Known{"F16", "float16", 16, DType::kFloat16},
    Known{"BF16", "bfloat16", 16, DType::kBFloat16},
    Known{"I64", "int64", 64, DType::kInt64},
    Known{"I32", "int32", 32, DType::kInt32},
    Known{"I8", "int8", 8, DType::kInt8},
    Known{"U8", "uint8", 8, DType::kUInt8},
    Known{"BOOL", "bool", 8, DType::kUInt8, true},
    Known{"I16", "int16", 16, std::nullopt},
    Known{"U16", "uint16", 16, std::nullopt},
    Known{"U32", "uint32", 32, std::nullopt},
    Known{"U64", "uint64", 64, std::nullopt},
    Known{"C64", "complex64", 64, std::nullopt},
    Known{"F8_E4M3", "float8_e4m3fn", 8, std::nullopt},
    Known{"F8_E5M2", "float8_e5m2", 8, std::nullopt},
    Known{"F8_E8M0", "float8_e8m0fnu", 8, std::nullopt},
    Known{"F8_E4M3FNUZ", "float8_e4m3fnuz", 8, std::nullopt},
    Known{"F8_E5M2FNUZ", "float8_e5m2fnuz", 8, std::nullopt},
    Known{"F6_E2M3", "float6_e2m3fn", 6, std::nullopt},
    Known{"F6_E3M2", "float6_e3m2fn", 6, std::nullopt},
    Known{"F4", "float4_e2m1fn", 4, std::nullopt},
};

const Known* known(std::string_view name) {
  const auto found = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.name == name; });
  return found == kKnown.end() ? nullptr : &*found;
}

// Keeps what a header says and nothing else: what the text could make us hold is as long as the text.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::filesystem::path& file, SafetensorsHeader& header) : file_{file}, header_{header} {}

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a truth value"); }
  bool number_integer(number_integer_t number) override { return value(fmt::format("{}", number)); }
  bool number_float(number_float_t, const string_t& text) override { return value(text); }
  bool binary(binary_t&) override { return value("bytes"); }
  bool number_unsigned(number_unsigned_t number) override {
    if (depth_ == 3 && where_ == Where::kShape) {
      if (tensor().shape.size() == kMostDimensions)
        fail(fmt::format("'{}' has more than {} dimensions", name(), kMostDimensions));
      tensor().shape.push_back(number);
      return true;
    }
    if (depth_ == 3 && where_ == Where::kOffsets) {
      if (offsets_ == 2) fail(fmt::format("'{}' has more than two data_offsets", name()));
      (offsets_++ == 0 ? tensor().begin : tensor().end) = number;
      return true;
    }
    return value(fmt::format("{}", number));
  }
  bool string(string_t& text) override {
    if (depth_ == 2 && where_ == Where::kMetadata) {
      header_.metadata[key_] = std::move(text);
      return true;
    }
    if (depth_ == 2 && where_ == Where::kDtype) {
      tensor().dtype = std::move(text);
      return true;
    }
    return value(fmt::format("'{}'", printable(text, 80)));
  }
  bool start_object(std::size_t) override {
    enter();
    if (depth_ == 2) {
      if (in_metadata_) {
        where_ = Where::kMetadata;
      } else {
        has_dtype_ = has_shape_ = has_offsets_ = false;
        where_ = Where::kNone;
      }
    } else if (depth_ > 2) {
      skip("an object");
    }
    return true;
  }
  bool key(string_t& key) override {
    if (depth_ == 1) {
      in_metadata_ = key == "__metadata__";
      where_ = Where::kNone;
      if (in_metadata_) {
        if (std::exchange(has_metadata_, true)) fail("'__metadata__' is there twice");
      } else {
        header_.tensors.emplace_back().name = std::move(key);
      }
    } else if (depth_ == 2 && in_metadata_) {
      if (header_.metadata.contains(key)) fail(fmt::format("'{}' is twice in its metadata", printable(key, 80)));
      key_ = std::move(key);
    } else if (depth_ == 2) {
      bool* const seen = key == "dtype"          ? &has_dtype_
                         : key == "shape"        ? &has_shape_
                         : key == "data_offsets" ? &has_offsets_
                                                 : nullptr;
      where_ = key == "dtype"          ? Where::kDtype
               : key == "shape"        ? Where::kShape
               : key == "data_offsets" ? Where::kOffsets
                                       : Where::kOther;
      if (seen != nullptr && std::exchange(*seen, true)) fail(fmt::format("'{}' has '{}' twice", name(), key));
      offsets_ = 0;
    }
    return true;
  }
  bool end_object() override {
    if (depth_ == 2 && !in_metadata_ && (!has_dtype_ || !has_shape_ || !has_offsets_))
      fail(fmt::format("'{}' has no {}", name(), !has_dtype_ ? "dtype" : !has_shape_ ? "shape" : "data_offsets"));
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    enter();
    if (depth_ != 3 || (where_ != Where::kShape && where_ != Where::kOffsets)) skip("an array");
    return true;
  }
  bool end_array() override {
    if (depth_ == 3 && where_ == Where::kOffsets && offsets_ != 2)
      fail(fmt::format("'{}' does not have two data_offsets", name()));
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override {
    // What the parser says begins with its own number of the error.
    std::string_view text = error.what();
    if (const std::size_t end = text.find("] "); end != std::string_view::npos) text.remove_prefix(end + 2);
    fail(fmt::format("it is no JSON, at byte {}: {}", position, printable(text, 200)));
  }

  [[noreturn]] void fail(std::string_view what) const { throw FormatError(file_, fmt::format("safetensors header: {}", what)); }

 private:
  enum class Where { kNone, kMetadata, kDtype, kShape, kOffsets, kOther };
  static constexpr std::size_t kDeepest = 64, kMostDimensions = 64;

  SafeTensor& tensor() { return header_.tensors.back(); }
  std::string name() const { return printable(header_.tensors.back().name.substr(0, 200)); }

  void enter() {
    if (++depth_ > kDeepest) fail(fmt::format("nested more than {} deep", kDeepest));
  }
  void skip(std::string_view what) {
    if (depth_ == 1 || where_ != Where::kOther) value(what);
  }
  // A value that nothing asked for: of a key that is not known here, or an error.
  bool value(std::string_view what) const {
    if (depth_ == 0) fail(fmt::format("it is {}, no object", what));
    if (depth_ == 1 || (depth_ == 2 && where_ == Where::kNone))
      fail(fmt::format("'{}' is {}, no description of a tensor", in_metadata_ ? "__metadata__" : name(), what));
    if (in_metadata_) fail(fmt::format("its metadata '{}' is {}, no text", printable(key_, 80), what));
    if (where_ == Where::kDtype) fail(fmt::format("the dtype of '{}' is {}, no text", name(), what));
    if (where_ == Where::kShape || where_ == Where::kOffsets)
      fail(fmt::format("the {} of '{}' holds {}, not whole numbers of 0 or more",
                       where_ == Where::kShape ? "shape" : "data_offsets", name(), what));
    return true;
  }

  const std::filesystem::path& file_;
  SafetensorsHeader& header_;
  std::size_t depth_ = 0, offsets_ = 0;
  Where where_ = Where::kNone;
  bool in_metadata_ = false, has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string key_;
};

void check_tensors(const HeaderReader& reader, SafetensorsHeader& header, std::uint64_t data_bytes) {
  auto& tensors = header.tensors;
  std::vector<std::string_view> names;
  for (const SafeTensor& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    reader.fail(fmt::format("'{}' is there twice", printable(*twice)));
  std::stable_sort(tensors.begin(), tensors.end(), [](const SafeTensor& a, const SafeTensor& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  std::uint64_t at = 0;
  for (const SafeTensor& tensor : tensors) {
    const std::string name = printable(tensor.name);
    if (tensor.end < tensor.begin)
      reader.fail(fmt::format("'{}' ends at byte {}, before its begin at {}", name, tensor.end, tensor.begin));
    if (tensor.end > data_bytes)
      reader.fail(fmt::format("'{}' lies in bytes {} to {} of the data, but only {} are there (truncated?)", name, tensor.begin,
                              tensor.end, data_bytes));
    if (tensor.begin < at)
      reader.fail(fmt::format("'{}' begins at byte {} of the data, inside the one before it", name, tensor.begin));
    if (tensor.begin > at) reader.fail(fmt::format("bytes {} to {} of the data belong to no tensor", at, tensor.begin));
    at = tensor.end;
    const Known* const type = known(tensor.dtype);
    std::uint64_t bits = type == nullptr ? 0 : type->bits;
    bool overflow = false;
    const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
    for (const std::uint64_t extent : tensor.shape)
      overflow = overflow || (!empty && __builtin_mul_overflow(bits, extent, &bits));
    const std::uint64_t bytes = empty ? 0 : bits / 8;
    if (type != nullptr && (overflow || (!empty && bits % 8 != 0) || bytes != tensor.end - tensor.begin))
      reader.fail(
          fmt::format("'{}' of {} {} has {} bytes", name, tensor.dtype, shape_to_text(tensor.shape), tensor.end - tensor.begin));
  }
  if (at != data_bytes) reader.fail(fmt::format("its tensors end at byte {} of the data, which has {}", at, data_bytes));
}

// A JSON text: "..." with what must be escaped escaped. Bytes that are not UTF-8 are refused.
std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument(fmt::format("'{}' is not UTF-8, which names in safetensors files are", printable(text)));
  }
}

}  // namespace

std::optional<ElementFormat> SafeTensor::element() const {
  const Known* const type = known(dtype);
  if (type == nullptr || !type->dtype) return std::nullopt;
  return ElementFormat{*type->dtype, /*swap=*/false, type->boolean};
}

std::string SafeTensor::dtype_text() const {
  const Known* const type = known(dtype);
  return type == nullptr ? printable(dtype) : std::string(type->text);
}

SafetensorsHeader read_safetensors_header(const File& file) {
  const std::filesystem::path& path = file.path();
  const std::uint64_t size = file.size();
  std::array<std::byte, 512> buffer;
  const auto head = std::span<const std::byte>(buffer).first(file.read_some(0, buffer));
  if (head.size() < 8) throw FormatError(path, fmt::format("truncated: {} bytes are no safetensors file", size));
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(head[i]);
  const bool object = head.size() > 8 && head[8] == std::byte{'{'};
  if (!object || length > SafetensorsHeader::kLargest) {
    const std::string what = looks_like(head);
    if (!what.empty() && what != "a safetensors file")
      throw FormatError(path, fmt::format("is no safetensors file; it looks like {}", what));
  }
  if (length > SafetensorsHeader::kLargest)
    throw FormatError(path, fmt::format("safetensors header: {} bytes are more than the {} of the format", length,
                                        SafetensorsHeader::kLargest));
  if (length > size - 8)
    throw FormatError(path, fmt::format("truncated: its safetensors header has {} bytes, {} are there", length, size - 8));
  if (!object) throw FormatError(path, "safetensors header: it does not begin with '{'");
  std::string text(length, '\0');
  file.read(8, std::as_writable_bytes(std::span(text)));
  SafetensorsHeader header;
  header.data_offset = 8 + length;
  HeaderReader reader(path, header);
  nlohmann::json::sax_parse(text, &reader);
  check_tensors(reader, header, size - header.data_offset);
  return header;
}

std::string_view safetensors_dtype(DType dtype) {
  const auto found = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.dtype == dtype; });
  return found->name;
}

std::string format_safetensors_header(std::vector<SafeTensor>& tensors, const std::map<std::string, std::string>& metadata) {
  const auto bits = [](const SafeTensor& tensor) {
    const Known* const type = known(tensor.dtype);
    return type == nullptr ? 0 : type->bits;
  };
  std::sort(tensors.begin(), tensors.end(),
            [&](const SafeTensor& a, const SafeTensor& b) { return bits(a) != bits(b) ? bits(a) > bits(b) : a.name < b.name; });
  std::uint64_t at = 0;
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) text += fmt::format("{}:{},", json_text(key), json_text(value));
    text.back() = '}';
    text += ',';
  }
  for (SafeTensor& tensor : tensors) {
    const std::uint64_t bytes = tensor.end - tensor.begin;
    tensor.begin = at;
    if (__builtin_add_overflow(at, bytes, &at)) throw InvalidArgument("the bytes of the tensors are past 64 bits");
    tensor.end = at;
    std::string shape;
    for (const std::uint64_t extent : tensor.shape) shape += fmt::format("{}{}", shape.empty() ? "" : ",", extent);
    text += fmt::format("{}:{{\"dtype\":{},\"shape\":[{}],\"data_offsets\":[{},{}]}},", json_text(tensor.name),
                        json_text(tensor.dtype), shape, tensor.begin, tensor.end);
  }
  if (text.size() > 1)
    text.back() = '}';
  else
    text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > SafetensorsHeader::kLargest)
    throw InvalidArgument(fmt::format("a safetensors header of {} bytes is more than the {} of the format", text.size(),
                                      SafetensorsHeader::kLargest));
  std::string out;
  for (std::size_t i = 0; i < 8; ++i) out += static_cast<char>(text.size() >> (8 * i) & 0xFF);
  return out + text;
}

std::map<std::string, std::string> read_safetensors_index(const std::filesystem::path& file) {
  const std::string text = read_text(file, SafetensorsHeader::kLargest);
  const auto fail = [&](std::string_view what) { throw FormatError(file, fmt::format("safetensors index: {}", what)); };
  constexpr int kDeepest = 64;
  bool deep = false;
  const auto json = nlohmann::json::parse(
      text,
      [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
        deep = deep || depth > kDeepest;
        return !deep;
      },
      /*allow_exceptions=*/false);
  if (deep) fail(fmt::format("nested more than {} deep", kDeepest));
  if (json.is_discarded()) fail("it is no JSON");
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) fail("it has no 'weight_map'");
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : json["weight_map"].items()) {
    if (!value.is_string()) fail(fmt::format("the file of '{}' is no text", printable(name)));
    const std::string shard = value.get<std::string>();
    if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos ||
        shard.find('\0') != std::string::npos)
      fail(
          fmt::format("'{}' lies in '{}', which is no file beside the index; it is not read", printable(name), printable(shard)));
    out.emplace(name, shard);
  }
  return out;
}

}  // namespace embermap
