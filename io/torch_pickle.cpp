#include "io/torch_pickle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/elements.hpp"

namespace embermap {
namespace {

using namespace std::string_view_literals;

constexpr std::size_t kMostValues = 4U << 20;
constexpr std::size_t kMostEntries = 1'000'000;  // that are walked through, shared ones each time
constexpr std::size_t kDeepest = 64;
constexpr std::size_t kMostDimensions = 64;
constexpr std::size_t kLongestName = 1U << 16;  // of a tensor

struct Known {
  std::string_view storage;  // "FloatStorage"; empty where torch has no such class
  std::string_view dtype;
  std::uint64_t bytes;
};

constexpr std::array kKnown{
    Known{"FloatStorage", "float32", 4},
    Known{"DoubleStorage", "float64", 8},
    Known{"HalfStorage", "float16", 2},
    Known{"BFloat16Storage", "bfloat16", 2},
    Known{"LongStorage", "int64", 8},
    Known{"IntStorage", "int32", 4},
    Known{"ShortStorage", "int16", 2},
    Known{"CharStorage", "int8", 1},
    Known{"ByteStorage", "uint8", 1},
    Known{"BoolStorage", "bool", 1},
    Known{"ComplexFloatStorage", "complex64", 8},
    Known{"ComplexDoubleStorage", "complex128", 16},
    Known{"QInt8Storage", "qint8", 1},
    Known{"QUInt8Storage", "quint8", 1},
    Known{"QInt32Storage", "qint32", 4},
    Known{"QUInt4x2Storage", "quint4x2", 1},
    Known{"QUInt2x4Storage", "quint2x4", 1},
    Known{"", "uint16", 2},
    Known{"", "uint32", 4},
    Known{"", "uint64", 8},
    Known{"", "complex32", 4},
    Known{"", "float8_e4m3fn", 1},
    Known{"", "float8_e5m2", 1},
    Known{"", "float8_e4m3fnuz", 1},
    Known{"", "float8_e5m2fnuz", 1},
    Known{"", "float8_e8m0fnu", 1},
    Known{"", "float4_e2m1fn_x2", 1},
};

enum class Kind : std::uint8_t {
  kNone,
  kBool,
  kInteger,
  kBigInteger,  // past 64 bits: never one that means something here
  kFloat,
  kText,
  kBytes,
  kTuple,
  kList,
  kDict,
  kSet,
  kGlobal,   // text: "module name"
  kStorage,  // text: its key; items: {dtype}; number: elements
  kTensor,   // number: place in the list of tensors
  kInert     // something that is allowed and means nothing here: torch.device
};

using Ref = std::uint32_t;

struct Node {
  Kind kind = Kind::kNone;
  std::int64_t number = 0;
  std::string text;
  std::vector<Ref> items;  // of a dict: keys and values in turn
};

std::string_view kind_text(Kind kind) {
  constexpr std::array kTexts{"None"sv,      "a truth value"sv, "a number"sv, "a number past 64 bits"sv, "a number"sv, "a text"sv,
                              "bytes"sv,     "a tuple"sv,       "a list"sv,   "a dictionary"sv,          "a set"sv,    "a name"sv,
                              "a storage"sv, "a tensor"sv,      "an object"sv};
  return kTexts[static_cast<std::size_t>(kind)];
}

class Machine {
 public:
  // With `partial`, more of `code` may follow: Ended where it is too short.
  Machine(const std::filesystem::path& file, std::span<const std::byte> code, bool partial = false)
      : file_{file}, code_{code}, partial_{partial} {}

  struct Ended {};

  // With `scalars`, also what is neither tensor nor container.
  TorchContents run(bool scalars) {
    want_scalars_ = scalars;
    collect(value());
    return {std::move(found_), std::move(scalars_)};
  }

  // The object of the pickle; `used()` bytes are its.
  Ref value() {
    for (;;) {
      const std::size_t place = at_;
      const unsigned op = byte();
      if (op == '.') break;
      if (!step(op)) fail(fmt::format("instruction 0x{:02x} at byte {} is not known here", op, place));
    }
    if (stack_.size() != 1 || !marks_.empty()) fail(fmt::format("{} values are left at its end, not one", stack_.size()));
    return stack_.back();
  }
  std::size_t used() const { return at_; }

  // Nothing for what is no whole number.
  std::optional<std::int64_t> whole_number(Ref ref) const {
    return node(ref).kind == Kind::kInteger ? std::optional(node(ref).number) : std::nullopt;
  }
  std::vector<std::string> texts(Ref ref) const {
    if (node(ref).kind != Kind::kList) fail(fmt::format("the list of storages is {}", kind_text(node(ref).kind)));
    std::vector<std::string> out;
    for (const Ref item : node(ref).items) {
      if (node(item).kind != Kind::kText) fail(fmt::format("the key of a storage is {}", kind_text(node(item).kind)));
      out.push_back(node(item).text);
    }
    return out;
  }
  // Storages that were named, by key.
  const std::unordered_map<std::string, LegacyTorch::Storage>& storages() const { return storages_; }

 private:
  [[noreturn]] void fail(std::string_view what) const { throw FormatError(file_, fmt::format("torch pickle: {}", what)); }
  [[noreturn]] void refuse(const Node& global, std::string_view does) const {
    std::string name = global.text;
    std::replace(name.begin(), name.end(), ' ', '.');
    fail(fmt::format(
        "it {} '{}', which is not read here (tensors, numbers, texts, and dictionaries, lists and tuples of them are; "
        "nothing is executed). Save the state_dict alone, or its tensors as safetensors",
        does, printable(name, 200)));
  }

  // ---- bytes ----

  std::span<const std::byte> take(std::uint64_t bytes) {
    if (bytes > code_.size() - at_ && partial_) throw Ended{};
    if (bytes > code_.size() - at_) fail(fmt::format("it ends inside a value of {} bytes at byte {} (truncated?)", bytes, at_));
    const auto out = code_.subspan(at_, bytes);
    at_ += bytes;
    return out;
  }
  unsigned byte() { return std::to_integer<unsigned>(take(1)[0]); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t out = 0;
    const auto from = take(bytes);
    for (std::size_t i = bytes; i-- > 0;) out = out << 8 | std::to_integer<std::uint64_t>(from[i]);
    return out;
  }
  std::uint64_t big_endian(std::size_t bytes) {
    std::uint64_t out = 0;
    for (const std::byte one : take(bytes)) out = out << 8 | std::to_integer<std::uint64_t>(one);
    return out;
  }
  std::string text(std::uint64_t bytes) {
    const auto from = take(bytes);
    return {reinterpret_cast<const char*>(from.data()), from.size()};
  }
  std::string line() {
    const auto rest = code_.subspan(at_);
    const auto end = std::find(rest.begin(), rest.end(), std::byte{'\n'});
    if (end == rest.end() && rest.size() <= 1000 && partial_) throw Ended{};
    if (end == rest.end() || end - rest.begin() > 1000) fail(fmt::format("no name ends behind byte {}", at_));
    std::string out = text(static_cast<std::uint64_t>(end - rest.begin()));
    ++at_;
    return out;
  }

  // ---- values ----

  Ref make(Kind kind, std::int64_t number = 0, std::string text = {}, std::vector<Ref> items = {}) {
    if (nodes_.size() == kMostValues) fail(fmt::format("more than {} values", kMostValues));
    nodes_.push_back({kind, number, std::move(text), std::move(items)});
    return static_cast<Ref>(nodes_.size() - 1);
  }
  void push(Ref value) {
    if (stack_.size() == kMostValues) fail(fmt::format("more than {} values on its stack", kMostValues));
    stack_.push_back(value);
  }
  Ref pop() {
    if (stack_.size() <= floor()) fail(fmt::format("a value is missing before byte {}", at_));
    const Ref out = stack_.back();
    stack_.pop_back();
    return out;
  }
  Ref top() const {
    if (stack_.size() <= floor()) fail(fmt::format("a value is missing before byte {}", at_));
    return stack_.back();
  }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::vector<Ref> pop_to_mark() {
    if (marks_.empty()) fail(fmt::format("a mark is missing before byte {}", at_));
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Ref> out(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return out;
  }
  const Node& node(Ref ref) const { return nodes_[ref]; }

  void put(std::uint64_t slot) { memo_[slot] = top(); }
  void get(std::uint64_t slot) {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) fail(fmt::format("nothing was kept in slot {}", slot));
    push(found->second);
  }

  void tuple(std::size_t count) {
    std::vector<Ref> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    push(make(Kind::kTuple, 0, {}, std::move(items)));
  }

  // Adds to the container below. What is added to is a list, dict or set of this pickle's; anything else would be a call.
  void extend(Kind kind, const std::vector<Ref>& items) {
    Node& target = nodes_[top()];
    if (target.kind != kind) fail(fmt::format("something is added to {}, as to {}", kind_text(target.kind), kind_text(kind)));
    if (kind == Kind::kDict && items.size() % 2 != 0) fail("a key without its value");
    held_ += items.size();
    if (held_ > 2 * kMostValues) fail(fmt::format("more than {} entries", 2 * kMostValues));
    target.items.insert(target.items.end(), items.begin(), items.end());
  }

  void long_integer(std::uint64_t bytes) {
    const auto from = take(bytes);
    std::size_t used = from.size();
    const bool negative = used > 0 && (from[used - 1] & std::byte{0x80}) != std::byte{0};
    const std::byte filling = negative ? std::byte{0xFF} : std::byte{0};
    while (used > 8 && from[used - 1] == filling) --used;
    if (used > 8) return push(make(Kind::kBigInteger));
    std::uint64_t value = negative ? ~std::uint64_t{0} : 0;
    for (std::size_t i = used; i-- > 0;) value = value << 8 | std::to_integer<std::uint64_t>(from[i]);
    if (used == 8 && negative != ((value >> 63) != 0)) return push(make(Kind::kBigInteger));
    push(make(Kind::kInteger, static_cast<std::int64_t>(value)));
  }

  bool step(unsigned op) {
    switch (op) {
      case 0x80: {
        const unsigned protocol = byte();
        if (protocol < 2 || protocol > 5) fail(fmt::format("protocol {} is not known here (2 to 5 are)", protocol));
        return true;
      }
      case 0x95: take(8); return true;  // a frame: only says where to read ahead
      case '(':
        if (marks_.size() == kMostValues) fail(fmt::format("more than {} marks", kMostValues));
        marks_.push_back(stack_.size());
        return true;
      case '0':
        if (stack_.size() > floor())
          stack_.pop_back();
        else
          pop_to_mark();
        return true;
      case '1': pop_to_mark(); return true;
      case '2': push(top()); return true;
      case 'N': push(make(Kind::kNone)); return true;
      case 0x88: push(make(Kind::kBool, 1)); return true;
      case 0x89: push(make(Kind::kBool, 0)); return true;
      case 'J': push(make(Kind::kInteger, static_cast<std::int32_t>(static_cast<std::uint32_t>(number(4))))); return true;
      case 'K': push(make(Kind::kInteger, static_cast<std::int64_t>(number(1)))); return true;
      case 'M': push(make(Kind::kInteger, static_cast<std::int64_t>(number(2)))); return true;
      case 0x8a: long_integer(number(1)); return true;
      case 0x8b: long_integer(number(4)); return true;
      case 'G':
        push(make(Kind::kFloat, static_cast<std::int64_t>(big_endian(8))));  // the bits
        return true;
      case 'X': push(make(Kind::kText, 0, text(number(4)))); return true;
      case 0x8c: push(make(Kind::kText, 0, text(number(1)))); return true;
      case 0x8d: push(make(Kind::kText, 0, text(number(8)))); return true;
      case 'T':  // texts of Python 2
        push(make(Kind::kText, 0, text(number(4))));
        return true;
      case 'U': push(make(Kind::kText, 0, text(number(1)))); return true;
      case 'B':
        take(number(4));
        push(make(Kind::kBytes));
        return true;
      case 'C':
        take(number(1));
        push(make(Kind::kBytes));
        return true;
      case 0x8e:
      case 0x96:
        take(number(8));
        push(make(Kind::kBytes));
        return true;
      case ')': push(make(Kind::kTuple)); return true;
      case 0x85: tuple(1); return true;
      case 0x86: tuple(2); return true;
      case 0x87: tuple(3); return true;
      case 't': {
        auto items = pop_to_mark();
        push(make(Kind::kTuple, 0, {}, std::move(items)));
        return true;
      }
      case ']': push(make(Kind::kList)); return true;
      case 'l': {
        auto items = pop_to_mark();
        push(make(Kind::kList, 0, {}, std::move(items)));
        return true;
      }
      case '}': push(make(Kind::kDict)); return true;
      case 'd': {
        auto items = pop_to_mark();
        if (items.size() % 2 != 0) fail("a key without its value");
        push(make(Kind::kDict, 0, {}, std::move(items)));
        return true;
      }
      case 0x8f: push(make(Kind::kSet)); return true;
      case 0x91:
        pop_to_mark();
        push(make(Kind::kSet));
        return true;
      case 0x90: extend(Kind::kSet, pop_to_mark()); return true;
      case 'a': {
        const Ref item = pop();
        extend(Kind::kList, {item});
        return true;
      }
      case 'e': extend(Kind::kList, pop_to_mark()); return true;
      case 's': {
        const Ref value = pop(), key = pop();
        extend(Kind::kDict, {key, value});
        return true;
      }
      case 'u': extend(Kind::kDict, pop_to_mark()); return true;
      case 'c': {
        const std::string module = line(), name = line();
        global(module, name);
        return true;
      }
      case 0x93: {
        const Ref name = pop(), module = pop();
        if (node(name).kind != Kind::kText || node(module).kind != Kind::kText) fail("a global name that is no text");
        global(node(module).text, node(name).text);
        return true;
      }
      case 'R': {
        const Ref arguments = pop(), function = pop();
        push(call(node(function), node(arguments)));
        return true;
      }
      case 0x81: {
        const Ref arguments = pop(), function = pop();
        push(call(node(function), node(arguments)));
        return true;
      }
      case 'b': build(); return true;
      case 'h': get(number(1)); return true;
      case 'j': get(number(4)); return true;
      case 'q': put(number(1)); return true;
      case 'r': put(number(4)); return true;
      case 0x94: put(memo_.size()); return true;
      case 'Q': persistent(); return true;
      default: return false;
    }
  }

  // ---- names ----

  static const Known* storage_class(std::string_view name) {
    const auto found =
        std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return !one.storage.empty() && one.storage == name; });
    return found == kKnown.end() ? nullptr : &*found;
  }
  static const Known* dtype(std::string_view name) {
    const auto found = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.dtype == name; });
    return found == kKnown.end() ? nullptr : &*found;
  }

  void global(const std::string& module, const std::string& name) {
    const std::string full = fmt::format("{} {}", module, name);
    constexpr std::array kAllowed{"collections OrderedDict"sv,
                                  "torch._utils _rebuild_tensor"sv,
                                  "torch._utils _rebuild_tensor_v2"sv,
                                  "torch._utils _rebuild_tensor_v3"sv,
                                  "torch._utils _rebuild_parameter"sv,
                                  "torch._utils _rebuild_parameter_with_state"sv,
                                  "torch Size"sv,
                                  "torch device"sv,
                                  "torch.storage UntypedStorage"sv,
                                  "torch UntypedStorage"sv,
                                  "_codecs encode"sv,
                                  "builtins set"sv,
                                  "__builtin__ set"sv};
    const bool allowed = std::find(kAllowed.begin(), kAllowed.end(), full) != kAllowed.end() ||
                         (module == "torch" && (storage_class(name) != nullptr || dtype(name) != nullptr));
    Node out{Kind::kGlobal, 0, full, {}};
    if (!allowed) refuse(out, "names");
    push(make(Kind::kGlobal, 0, full));
  }

  // What calling a known name with these arguments gives; nothing is called.
  Ref call(const Node& function, const Node& arguments) {
    if (function.kind != Kind::kGlobal) fail(fmt::format("{} is called", kind_text(function.kind)));
    if (arguments.kind != Kind::kTuple)
      fail(fmt::format("'{}' is called with {}", printable(function.text), kind_text(arguments.kind)));
    const std::string_view name = function.text;
    const std::vector<Ref>& given = arguments.items;
    const auto need = [&](std::size_t least) {
      if (given.size() < least)
        fail(fmt::format("'{}' is called with {} arguments, {} are needed", printable(name), given.size(), least));
    };
    // What a tensor is beside its bytes: negated or conjugated when it is used.
    const auto plain = [&](const auto& args, std::size_t at) {
      if (args.size() <= at) return;
      const Node& more = node(args[at]);
      if (more.kind != Kind::kNone && !(more.kind == Kind::kDict && more.items.empty()))
        fail("a tensor that is negated or conjugated when it is used; save tensor.resolve_neg().resolve_conj() instead");
    };
    if (name == "collections OrderedDict") {
      if (given.empty()) return make(Kind::kDict);
      const Node& pairs = node(given[0]);  // of Python 2: a list of pairs
      if (given.size() != 1 || pairs.kind != Kind::kList) refuse(function, "calls");
      std::vector<Ref> items;
      for (const Ref pair : pairs.items) {
        const Node& entry = node(pair);
        if ((entry.kind != Kind::kList && entry.kind != Kind::kTuple) || entry.items.size() != 2)
          fail("an OrderedDict of no pairs");
        items.insert(items.end(), entry.items.begin(), entry.items.end());
      }
      held_ += items.size();
      if (held_ > 2 * kMostValues) fail(fmt::format("more than {} entries", 2 * kMostValues));
      return make(Kind::kDict, 0, {}, std::move(items));
    }
    if (name == "torch._utils _rebuild_tensor" || name == "torch._utils _rebuild_tensor_v2") {
      need(4);
      plain(given, 6);
      return tensor(given, {});
    }
    if (name == "torch._utils _rebuild_tensor_v3") {
      need(7);
      const Node& type = node(given[6]);
      if (type.kind != Kind::kGlobal || !type.text.starts_with("torch ") ||
          dtype(std::string_view(type.text).substr(6)) == nullptr)
        fail(fmt::format("a tensor whose dtype is {}", kind_text(type.kind)));
      plain(given, 7);
      return tensor(given, std::string_view(type.text).substr(6));
    }
    if (name == "torch._utils _rebuild_parameter" || name == "torch._utils _rebuild_parameter_with_state") {
      need(1);
      if (node(given[0]).kind != Kind::kTensor) fail(fmt::format("a parameter made of {}", kind_text(node(given[0]).kind)));
      return given[0];
    }
    if (name == "torch Size") {
      need(1);
      const Node& sizes = node(given[0]);
      if (sizes.kind != Kind::kTuple && sizes.kind != Kind::kList) fail("a torch.Size of no tuple");
      held_ += sizes.items.size();
      if (held_ > 2 * kMostValues) fail(fmt::format("more than {} entries", 2 * kMostValues));
      return make(Kind::kTuple, 0, {}, sizes.items);
    }
    if (name == "_codecs encode") return make(Kind::kBytes);
    if (name == "torch device") return make(Kind::kInert);
    if (name == "builtins set" || name == "__builtin__ set") return make(Kind::kSet);
    refuse(function, "calls");
  }

  // The state of an object. A state_dict carries its _metadata so; it means nothing for the tensors.
  void build() {
    pop();
    const Node& target = node(top());
    if (target.kind != Kind::kDict && target.kind != Kind::kTensor)
      fail(fmt::format("{} is given a state", kind_text(target.kind)));
  }

  // ('storage', class, key, location, elements)
  void persistent() {
    const Node& id = node(pop());
    if (id.kind != Kind::kTuple || id.items.size() < 5 || node(id.items[0]).kind != Kind::kText ||
        node(id.items[0]).text != "storage")
      fail("a persistent id that names no storage");
    const Node &type = node(id.items[1]), &key = node(id.items[2]), &elements = node(id.items[4]);
    if (type.kind != Kind::kGlobal || key.kind != Kind::kText || elements.kind != Kind::kInteger || elements.number < 0)
      fail("a storage without class, key or size");
    if (key.text.empty() || key.text.find('/') != std::string::npos)
      fail(fmt::format("a storage called '{}'", printable(key.text.substr(0, 80))));
    std::string dtype_name = "uint8";
    if (!type.text.ends_with(" UntypedStorage")) {
      const Known* const known = type.text.starts_with("torch ") ? storage_class(std::string_view(type.text).substr(6)) : nullptr;
      if (known == nullptr) refuse(type, "has a storage of");
      dtype_name = known->dtype;
    }
    if (id.items.size() > 5 && node(id.items[5]).kind != Kind::kNone)
      fail("a storage that is a part of another one; load the file with torch and torch.save() it again");
    storages_.insert_or_assign(
        key.text, LegacyTorch::Storage{key.text, static_cast<std::uint64_t>(elements.number), torch_item_size(dtype_name)});
    const Ref dtype_ref = make(Kind::kText, 0, std::move(dtype_name));
    push(make(Kind::kStorage, elements.number, key.text, {dtype_ref}));
  }

  std::vector<std::uint64_t> counts(const Node& from, std::string_view what) const {
    if (from.kind != Kind::kTuple && from.kind != Kind::kList)
      fail(fmt::format("the {} of a tensor is {}", what, kind_text(from.kind)));
    if (from.items.size() > kMostDimensions) fail(fmt::format("a tensor of {} dimensions", from.items.size()));
    std::vector<std::uint64_t> out;
    for (const Ref ref : from.items) {
      const Node& one = node(ref);
      if (one.kind != Kind::kInteger || one.number < 0)
        fail(fmt::format("the {} of a tensor holds no whole number of 0 or more", what));
      out.push_back(static_cast<std::uint64_t>(one.number));
    }
    return out;
  }

  // (storage, offset, size, stride, ...); `dtype` where the storage has none of its own.
  Ref tensor(const std::vector<Ref>& given, std::string_view of) {
    const Node& storage = node(given[0]);
    if (storage.kind != Kind::kStorage) fail(fmt::format("a tensor over {}, not over a storage", kind_text(storage.kind)));
    TorchTensor out;
    out.dtype = of.empty() ? node(storage.items[0]).text : std::string(of);
    out.storage = storage.text;
    out.storage_elements = static_cast<std::uint64_t>(storage.number);
    if (!of.empty())
      out.storage_elements = out.storage_elements * torch_item_size(node(storage.items[0]).text) / torch_item_size(of);
    const Node& offset = node(given[1]);
    if (offset.kind != Kind::kInteger || offset.number < 0) fail("the offset of a tensor is no whole number of 0 or more");
    out.offset = static_cast<std::uint64_t>(offset.number);
    out.shape = counts(node(given[2]), "size");
    out.strides = counts(node(given[3]), "stride");
    if (out.shape.size() != out.strides.size())
      fail(fmt::format("a tensor with {} sizes and {} strides", out.shape.size(), out.strides.size()));
    const bool empty = std::find(out.shape.begin(), out.shape.end(), 0) != out.shape.end();
    std::uint64_t last = out.offset;
    bool overflow = false;
    for (std::size_t i = 0; !empty && i < out.shape.size(); ++i) {
      std::uint64_t reach = 0;
      overflow = overflow || __builtin_mul_overflow(out.shape[i] - 1, out.strides[i], &reach) ||
                 __builtin_add_overflow(last, reach, &last);
    }
    if (!empty && (overflow || last >= out.storage_elements))
      fail(fmt::format("a tensor of size {}, strides {} and offset {} leaves its storage of {} elements",
                       shape_to_text(out.shape), shape_to_text(out.strides), out.offset, out.storage_elements));
    tensors_.push_back(std::move(out));
    return make(Kind::kTensor, static_cast<std::int64_t>(tensors_.size() - 1));
  }

  // ---- what was saved ----

  void collect(Ref root) {
    struct Level {
      Ref container;
      std::size_t next;
      std::size_t name_bytes;  // of the name so far
    };
    std::string name;
    const auto take_tensor = [&](const Node& value) {
      TorchTensor out = tensors_[static_cast<std::size_t>(value.number)];
      out.name = name;
      found_.push_back(std::move(out));
    };
    const auto take_scalar = [&](const Node& value) {
      TorchScalar out{name, {}};
      if (value.kind == Kind::kBool)
        out.value = value.number != 0;
      else if (value.kind == Kind::kInteger)
        out.value = value.number;
      else if (value.kind == Kind::kFloat)
        out.value = std::bit_cast<double>(value.number);
      else if (value.kind == Kind::kText)
        out.value = value.text;
      else if (value.kind != Kind::kNone)
        return;
      scalars_.push_back(std::move(out));
    };
    const auto container = [](const Node& value) {
      return value.kind == Kind::kDict || value.kind == Kind::kList || value.kind == Kind::kTuple;
    };
    if (node(root).kind == Kind::kTensor) return take_tensor(node(root));
    if (!container(node(root))) return;
    std::vector<Level> levels{{root, 0, 0}};
    std::size_t entries = 0;
    while (!levels.empty()) {
      Level& level = levels.back();
      const Node& holder = node(level.container);
      const std::size_t stride = holder.kind == Kind::kDict ? 2 : 1;
      if (level.next * stride >= holder.items.size()) {
        levels.pop_back();
        continue;
      }
      if (++entries > kMostEntries) fail(fmt::format("more than {} entries", kMostEntries));
      const std::size_t index = level.next++;
      const Node& value = node(holder.items[index * stride + stride - 1]);
      if (value.kind != Kind::kTensor && !container(value) && !want_scalars_) continue;
      name.resize(level.name_bytes);
      if (levels.size() > 1) name += '.';
      if (holder.kind == Kind::kDict) {
        const Node& key = node(holder.items[index * 2]);
        if (key.kind == Kind::kText)
          name += key.text;
        else if (key.kind == Kind::kInteger)
          name += fmt::format("{}", key.number);
        else
          name += fmt::format("<{}>", kind_text(key.kind));
      } else {
        name += fmt::format("{}", index);
      }
      if (name.size() > kLongestName) fail(fmt::format("a name of more than {} bytes", kLongestName));
      names_bytes_ += name.size();
      if (names_bytes_ > kMostNameBytes) fail(fmt::format("names of more than {} bytes in all", kMostNameBytes));
      if (value.kind == Kind::kTensor) {
        take_tensor(value);
      } else if (!container(value)) {
        take_scalar(value);
      } else {
        if (levels.size() == kDeepest) fail(fmt::format("nested more than {} deep", kDeepest));
        levels.push_back({holder.items[index * stride + stride - 1], 0, name.size()});
      }
    }
  }

  static constexpr std::uint64_t kMostNameBytes = 256U << 20;

  const std::filesystem::path& file_;
  std::span<const std::byte> code_;
  bool partial_;
  std::size_t at_ = 0;
  std::deque<Node> nodes_;  // references stay good while others are made
  std::vector<Ref> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Ref> memo_;
  std::vector<TorchTensor> tensors_, found_;
  std::unordered_map<std::string, LegacyTorch::Storage> storages_;
  bool want_scalars_ = false;
  std::vector<TorchScalar> scalars_;
  std::uint64_t held_ = 0, names_bytes_ = 0;
};

// ---- writing ----

void put_number(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

void put_text(std::string& out, std::string_view text) {
  out += 'X';
  put_number(out, text.size(), 4);
  out += text;
}

void put_integer(std::string& out, std::int64_t value) {
  if (value >= 0 && value < 256) {
    out += 'K';
    put_number(out, static_cast<std::uint64_t>(value), 1);
  } else if (value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max()) {
    out += 'J';
    put_number(out, static_cast<std::uint64_t>(value), 4);
  } else {
    out += "\x8a\x08"sv;
    put_number(out, static_cast<std::uint64_t>(value), 8);
  }
}

void put_count(std::string& out, std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    throw InvalidArgument(fmt::format("a tensor with a size of {}", value));
  put_integer(out, static_cast<std::int64_t>(value));
}

void put_counts(std::string& out, const std::vector<std::uint64_t>& values) {
  out += '(';
  for (const std::uint64_t value : values) put_count(out, value);
  out += 't';
}

void put_tensor(std::string& out, const TorchTree::Tensor& tensor) {
  const auto known =
      std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.dtype == dtype_name(tensor.dtype); });
  std::uint64_t elements = 1;
  std::vector<std::uint64_t> strides(tensor.shape.size());
  for (std::size_t i = tensor.shape.size(); i-- > 0;) {
    strides[i] = std::max<std::uint64_t>(elements, 1);
    elements = checked_mul(elements, tensor.shape[i], "elements of a tensor");
  }
  out += "ctorch._utils\n_rebuild_tensor_v2\n(("sv;
  put_text(out, "storage");
  out += fmt::format("ctorch\n{}\n", known->storage);
  put_text(out, fmt::format("{}", tensor.storage));
  put_text(out, "cpu");
  put_count(out, elements);
  out += "tQ"sv;
  put_integer(out, 0);
  put_counts(out, tensor.shape);
  put_counts(out, strides);
  out +=
      "\x89"
      "ccollections\nOrderedDict\n)RtR"sv;
}

void put_value(std::string& out, const TorchTree& tree, bool outermost) {
  struct Put {
    std::string& out;
    bool outermost;
    void operator()(std::monostate) const { out += 'N'; }
    void operator()(bool value) const { out += value ? '\x88' : '\x89'; }
    void operator()(std::int64_t value) const { put_integer(out, value); }
    void operator()(double value) const {
      out += 'G';
      const auto bits = std::bit_cast<std::uint64_t>(value);
      for (std::size_t i = 8; i-- > 0;) out += static_cast<char>(bits >> (8 * i) & 0xFF);
    }
    void operator()(const std::string& value) const { put_text(out, value); }
    void operator()(const TorchTree::Tensor& value) const { put_tensor(out, value); }
    void operator()(const TorchTree::Dict& value) const {
      out += outermost ? "ccollections\nOrderedDict\n)R"sv : "}"sv;
      for (const auto& [key, item] : value) {
        put_value(out, key, false);
        put_value(out, item, false);
        out += 's';
      }
    }
    void operator()(const TorchTree::List& value) const {
      out += ']';
      for (const TorchTree& item : value) {
        put_value(out, item, false);
        out += 'a';
      }
    }
    void operator()(const TorchTree::Tuple& value) const {
      out += '(';
      for (const TorchTree& item : value.items) put_value(out, item, false);
      out += 't';
    }
  };
  std::visit(Put{out, outermost}, tree.value);
}

}  // namespace

std::uint64_t torch_item_size(std::string_view dtype) {
  for (const Known& known : kKnown)
    if (known.dtype == dtype) return known.bytes;
  return 0;
}

std::vector<TorchTensor> read_torch_pickle(const std::filesystem::path& file, std::span<const std::byte> pickle) {
  return Machine(file, pickle).run(/*scalars=*/false).tensors;
}

std::optional<LegacyTorch> read_legacy_torch(const std::filesystem::path& file, std::span<const std::byte> head, bool whole,
                                             bool scalars) {
  LegacyTorch out;
  const auto rest = [&] { return head.subspan(out.data); };
  try {
    Machine magic(file, rest(), !whole);
    magic.value();  // whoever calls has looked at it
    out.data += magic.used();
    Machine version(file, rest(), !whole);
    constexpr std::int64_t kVersion = 1001;
    if (const auto number = version.whole_number(version.value()); number != kVersion)
      throw FormatError(file, fmt::format("is a file of torch before 1.6 of version {}, which is not known here ({} is)",
                                          number ? fmt::format("{}", *number) : "'none'", kVersion));
    out.data += version.used();
    Machine system(file, rest(), !whole);  // byte order and widths of the writer, which mean nothing for the file
    system.value();
    out.data += system.used();
    Machine saved(file, rest(), !whole);
    TorchContents contents = saved.run(scalars);
    out.tensors = std::move(contents.tensors);
    out.scalars = std::move(contents.scalars);
    out.data += saved.used();
    Machine list(file, rest(), !whole);
    for (const std::string& key : list.texts(list.value())) {
      const auto named = saved.storages().find(key);
      if (named == saved.storages().end())
        throw FormatError(file, fmt::format("torch pickle: a storage '{}' that no tensor has", printable(key, 80)));
      out.storages.push_back(named->second);
    }
    out.data += list.used();
  } catch (const Machine::Ended&) {
    return std::nullopt;
  }
  return out;
}

TorchContents read_torch_contents(const std::filesystem::path& file, std::span<const std::byte> pickle) {
  return Machine(file, pickle).run(/*scalars=*/true);
}

std::string format_torch_pickle(const TorchTree& tree) {
  std::string out = "\x80\x02";
  put_value(out, tree, /*outermost=*/true);
  return out + '.';
}

}  // namespace embermap
