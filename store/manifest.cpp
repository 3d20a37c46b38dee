#include "store/manifest.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cmath>
#include <ctime>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "io/checksum.hpp"

namespace embermap {
namespace {

using Json = nlohmann::ordered_json;  // written in our order
using ReadJson = nlohmann::json;      // looked up by key in a time that many keys do not change

constexpr std::uint64_t kMaxManifest = 64ULL << 20;
constexpr std::size_t kDeepest = 16;  // nesting: ours is four deep
constexpr std::size_t kDeepestNote = 12;
constexpr std::size_t kMaxNote = 64U << 10;
constexpr std::size_t kMaxTime = 40;
constexpr std::string_view kFormatName = "embermap";
constexpr std::string_view kSettingsName = "embermap table";  // beside the rows of a table that were exported with all of it
constexpr std::string_view kChecksumKey = "\"checksum\"";     // of the manifest itself: its last key

bool is_utf8(std::string_view text) {
  try {
    (void)Json(std::string(text)).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

Json optimizer_or_null(const Optimizer& optimizer) {
  return std::holds_alternative<std::monostate>(optimizer) ? Json(nullptr) : optimizer_json(optimizer);
}

Json init_json(const Initializer& init) {
  if (const auto* constant = std::get_if<Constant>(&init)) return {{"name", "constant"}, {"value", constant->value}};
  if (const auto* uniform = std::get_if<Uniform>(&init))
    return {{"name", "uniform"}, {"low", uniform->low}, {"high", uniform->high}};
  if (const auto* normal = std::get_if<Normal>(&init)) return {{"name", "normal"}, {"mean", normal->mean}, {"std", normal->std}};
  return {{"name", "zeros"}};
}

std::string checksum_text(std::string_view text) { return fmt::format("{:016x}", checksum64(std::as_bytes(std::span(text)))); }

// Any bytes may stand in a path, but only UTF-8 in JSON.
Json path_json(const std::filesystem::path& path) {
  if (is_utf8(path.native())) return path.native();
  std::string hex;
  for (const char c : path.native()) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return {{"hex", hex}};
}

std::array<std::pair<const char*, std::uint64_t*>, 7> counter_keys(TableCounters& counters) {
  return {{{"hits", &counters.hits},
           {"misses", &counters.misses},
           {"evictions", &counters.evictions},
           {"write_backs", &counters.write_backs},
           {"bytes_read", &counters.bytes_read},
           {"bytes_written", &counters.bytes_written},
           {"commits", &counters.commits}}};
}

// A value for a message: no more of it than a line.
std::string shown(const ReadJson& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  return printable(value.dump(), 80);
}

// Looks at a text's nesting and keys before values are made of it. Refuses what no writer of ours makes and readers disagree
// about: a key twice in one object. (A callback of the parser that makes values would do, in a time that grows with the square.)
class JsonCheck {
 public:
  explicit JsonCheck(const std::filesystem::path& file, std::string_view what = "the manifest", std::size_t deepest = kDeepest)
      : file_{file}, what_{what}, deepest_{deepest} {}

  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(std::int64_t) { return true; }
  bool number_unsigned(std::uint64_t) { return true; }
  bool number_float(double, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(ReadJson::binary_t&) { return true; }
  bool start_object(std::size_t) { return open(); }
  bool end_object() { return close(); }
  bool start_array(std::size_t) { return open(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if (!keys_.back().insert(name).second)
      throw FormatError(file_, fmt::format("{} has the key '{}' twice in one object", what_, printable(name, 200)));
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const ReadJson::exception&) { return false; }

 private:
  bool open() {
    if (keys_.size() == deepest_) throw FormatError(file_, fmt::format("{} is nested more than {} deep", what_, deepest_));
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::filesystem::path& file_;
  const std::string_view what_;
  const std::size_t deepest_;
  std::vector<std::set<std::string, std::less<>>> keys_;  // of what is open
};

// The same for a note, which has to come back as it was given: a whole number that is none of 64 bits would not.
class NoteCheck : public JsonCheck {
 public:
  using JsonCheck::JsonCheck;
  bool key(std::string& name) {
    key_ = name;
    return JsonCheck::key(name);
  }
  bool number_float(double, const std::string& text) {
    if (text.find_first_of(".eE") != std::string::npos) return true;
    throw InvalidArgument(
        fmt::format("note: '{}' has {}, a whole number that 64 bits do not hold", printable(key_), printable(text, 80)));
  }

 private:
  std::string key_;
};

ReadJson parse_json(std::string_view text, const std::filesystem::path& file, std::string_view what = "the manifest") {
  JsonCheck check(file, what);
  if (!ReadJson::sax_parse(text, &check))
    throw FormatError(file, text.empty() ? fmt::format("{} is empty", what) : fmt::format("{} is not valid JSON", what));
  return ReadJson::parse(text);
}

// Reads one object, key by key, each with its type; every error names file and key.
class Reader {
 public:
  Reader(const std::filesystem::path& file, const ReadJson& object, std::string where)
      : file_{file}, object_{object}, where_{std::move(where)} {
    if (!object.is_object()) fail("is not an object");
  }

  [[noreturn]] void fail(std::string_view what) const { throw FormatError(file_, fmt::format("{} {}", where_, what)); }

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  const ReadJson& at(const char* key) const {
    if (!object_.contains(key)) fail(fmt::format("has no '{}'", key));
    return object_.at(key);
  }
  std::uint64_t integer(const char* key) const {
    const ReadJson& value = at(key);
    if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<std::int64_t>() < 0))
      fail(fmt::format("has a '{}' that is no whole number from 0: {}", key, shown(value)));
    return value.get<std::uint64_t>();
  }
  double number(const char* key) const {
    const ReadJson& value = at(key);
    if (!value.is_number()) fail(fmt::format("has a '{}' that is no number: {}", key, shown(value)));
    return value.get<double>();
  }
  bool boolean(const char* key) const {
    const ReadJson& value = at(key);
    if (!value.is_boolean()) fail(fmt::format("has a '{}' that is neither true nor false: {}", key, shown(value)));
    return value.get<bool>();
  }
  std::string text(const char* key) const {
    const ReadJson& value = at(key);
    if (!value.is_string()) fail(fmt::format("has a '{}' that is no text: {}", key, shown(value)));
    return value.get<std::string>();
  }
  Reader object(const char* key) const { return {file_, at(key), fmt::format("{}, '{}',", where_, key)}; }
  // An absolute path.
  std::filesystem::path path(const char* key) const {
    std::string text = path_text(key);
    if (text.find('\0') != std::string::npos || !std::filesystem::path(text).is_absolute())
      fail(fmt::format("has a '{}' that is no absolute path: {}", key, printable(text, 200)));
    return text;
  }

 private:
  std::string path_text(const char* key) const {
    const ReadJson& value = at(key);
    if (value.is_string()) return value.get<std::string>();
    const std::string hex = object(key).text("hex");
    if (hex.size() % 2 != 0) fail(fmt::format("has a '{}' that is no hexadecimal text", key));
    std::string bytes;
    for (std::size_t i = 0; i < hex.size(); i += 2) {
      const auto digit = [&](char c) -> unsigned {
        if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
        if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
        fail(fmt::format("has a '{}' that is no hexadecimal text", key));
      };
      bytes += static_cast<char>(digit(hex[i]) << 4 | digit(hex[i + 1]));
    }
    return bytes;
  }

  const std::filesystem::path& file_;
  const ReadJson& object_;
  std::string where_;
};

void read_option(const Reader& reader, const char* name, double& value) { value = reader.number(name); }
void read_option(const Reader& reader, const char* name, bool& value) { value = reader.boolean(name); }
void read_option(const Reader& reader, const char* name, std::optional<double>& value) { value = reader.number(name); }
void read_option(const Reader& reader, const char* name, std::array<double, 2>& value) {
  const ReadJson& pair = reader.at(name);
  if (!pair.is_array() || pair.size() != 2 || !pair[0].is_number() || !pair[1].is_number())
    reader.fail(fmt::format("has '{}' that are not two numbers: {}", name, shown(pair)));
  value = {pair[0].get<double>(), pair[1].get<double>()};
}
void read_option(const Reader& reader, const char* name, StepOf& value) {
  const std::string text = reader.text(name);
  const std::optional<StepOf> step = step_of_named(text);
  if (!step) reader.fail(fmt::format("has the {} '{}', which is neither 'global' nor 'row'", name, printable(text, 80)));
  value = *step;
}

Optimizer read_optimizer(const Reader& reader) {
  const std::string name = reader.text("name");
  std::optional<Optimizer> optimizer = optimizer_named(name);
  if (!optimizer || std::holds_alternative<std::monostate>(*optimizer))
    reader.fail(fmt::format("is '{}', which this embermap does not know", printable(name, 80)));
  std::visit(
      [&](auto& o) {
        visit_options(o, [&](const char* option, auto& value, bool said) {
          if (said || reader.has(option)) read_option(reader, option, value);
        });
      },
      *optimizer);
  return *optimizer;
}

Initializer read_init(const Reader& reader) {
  const std::string name = reader.text("name");
  if (name == "zeros") return Zeros{};
  if (name == "constant") return Constant{reader.number("value")};
  if (name == "uniform") return Uniform{reader.number("low"), reader.number("high")};
  if (name == "normal") return Normal{reader.number("mean"), reader.number("std")};
  reader.fail(fmt::format("is '{}', which this embermap does not know", printable(name, 80)));
}

// Only what could be a table's: whoever opens the store removes these files.
std::set<std::string, std::less<>> read_unfinished(const Reader& reader) {
  std::set<std::string, std::less<>> files;
  const Json& names = reader.at("unfinished");
  if (!names.is_array()) reader.fail("has 'unfinished' that is no array");
  for (const Json& value : names) {
    const std::string file = value.is_string() ? value.get<std::string>() : std::string();
    // Longer ones first: "x.order.npy" is the order of a table "x", or the file of one "x.order".
    std::string_view table = file;
    for (const std::string_view ending : {".vocab.txt", ".order.npy", ".npy", ".pages"})
      if (table.size() == file.size() && table.ends_with(ending)) table.remove_suffix(ending.size());
    if (table.size() == file.size())
      reader.fail(fmt::format("has '{}' in 'unfinished', which is no file of a table", printable(file, 200)));
    try {
      check_table_name(table);
    } catch (const InvalidArgument& problem) {
      reader.fail(fmt::format("cannot be: in 'unfinished', {}", problem.what()));
    }
    files.insert(file);
  }
  return files;
}

// What a table was made with, and its steps.
template <class Options>  // TableOptions or TableEntry
std::uint64_t read_settings(const Reader& reader, Options& options) {
  options.dim = reader.integer("dim");
  options.dtype = parse_dtype(reader.text("dtype"));
  if (reader.has("optimizer")) options.optimizer = read_optimizer(reader.object("optimizer"));
  options.init = read_init(reader.object("init"));
  options.seed = reader.integer("seed");
  options.page_bytes = reader.integer("page_bytes");
  return reader.integer("step");
}

std::optional<double> read_carried(const Reader& reader) {
  if (!reader.has("carried")) return std::nullopt;
  const double carried = reader.number("carried");
  if (!std::isfinite(carried) || carried < 0)
    reader.fail(fmt::format("has a 'carried' that is no number of at least 0: {}", carried));
  return carried;
}

TableEntry read_table(const Reader& reader) {
  TableEntry entry;
  entry.step = read_settings(reader, entry);
  entry.carried = read_carried(reader);
  entry.geometry = {.rows = reader.integer("rows"),
                    .stride = reader.integer("stride"),
                    .rows_per_page = reader.integer("rows_per_page"),
                    .data_offset = reader.integer("data_offset")};
  if (reader.has("adopted")) {
    entry.adopted = reader.path("adopted");
    entry.adopted_writable = reader.boolean("adopted_writable");
    if (reader.has("adopted_in")) {
      const Reader home = reader.object("adopted_in");
      entry.adopted_in = {.inode = home.integer("inode"), .born_ns = home.integer("born_ns")};
    }
  }
  if (reader.has("byte_order")) {
    const std::string order = reader.text("byte_order");
    if (order != "little" && order != "big") reader.fail(fmt::format("has the byte_order '{}'", printable(order, 80)));
    entry.big_endian = order == "big";
    if (entry.big_endian && (!entry.adopted || item_size(entry.dtype) == 1 || entry.dtype == DType::kBFloat16))
      reader.fail(
          fmt::format("cannot have the byte_order 'big': that is for adopted files, and not for {}", dtype_name(entry.dtype)));
  }

  if (reader.has("changed")) entry.changed = reader.integer("changed");
  if (reader.has("settled")) entry.settled = reader.integer("settled");
  if (reader.has("memory")) entry.memory = reader.integer("memory");
  if (reader.has("counters")) {
    const Reader counters = reader.object("counters");
    for (const auto& [key, value] : counter_keys(entry.counters)) *value = counters.has(key) ? counters.integer(key) : 0;
  }

  const Schema schema(entry.dim, entry.dtype, entry.optimizer);
  check_initializer(entry.init, entry.dtype);
  const Geometry& g = entry.geometry;
  const std::string text = "bytes of the table";
  if (g.stride < schema.record_bytes() || g.stride % schema.alignment() != 0 ||
      (!schema.structured() && g.stride != schema.record_bytes()))
    reader.fail(fmt::format("has a stride of {} bytes for records of {}", g.stride, schema.record_bytes()));
  if (g.rows_per_page == 0 || checked_mul(g.rows_per_page, g.stride, text) > std::max(kMaxPageBytes, g.stride))
    reader.fail(fmt::format("has pages of {} rows of {} bytes", g.rows_per_page, g.stride));
  // What a table's page size and record make of it, and nothing else: with other numbers pages would be taken for others.
  const Geometry made = make_geometry(g.rows, schema.record_bytes(), schema.alignment(), schema.structured(), entry.page_bytes);
  if (g.stride != made.stride || g.rows_per_page != made.rows_per_page)
    reader.fail(fmt::format("has pages of {} rows of {} bytes; its records make {} of {}", g.rows_per_page, g.stride,
                            made.rows_per_page, made.stride));
  if (!entry.adopted && g.data_offset != kDataOffset) reader.fail(fmt::format("has its data at byte {}", g.data_offset));
  const std::uint64_t end =
      checked_add(checked_add(checked_mul(g.rows, g.stride, text), g.data_offset, text), g.page_bytes(), text);
  if (end > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    reader.fail(fmt::format("has {} rows of {} bytes, more than a file can hold", g.rows, g.stride));
  return entry;
}

}  // namespace

Manifest Manifest::load(const std::filesystem::path& store) {
  const std::filesystem::path file = store / kManifestName;
  std::error_code error;
  if (!std::filesystem::exists(file, error)) {
    if (error) throw IoError(error.value(), "stat", file);
    if (!std::filesystem::exists(store, error)) throw NotFound(fmt::format("no store at {}", printable(store)));
    throw NotFound(fmt::format("{} is not a store: it has no {}", printable(store), kManifestName));
  }
  return parse(read_text(file, kMaxManifest), file);
}

Manifest Manifest::parse(std::string_view text, const std::filesystem::path& file) {
  const ReadJson json = parse_json(text, file);
  const Reader top(file, json, "the manifest");
  if (!top.has("format") || top.text("format") != kFormatName) top.fail("is not of the format 'embermap'");
  const std::uint64_t version = top.integer("version");
  if (version > kFormatVersion)
    throw FormatError(file,
                      fmt::format("store format version {} is newer than this embermap reads ({})", version, kFormatVersion));
  if (version == 0) top.fail("has version 0");
  // Absent is accepted: that is how a manifest is changed by hand.
  if (top.has("checksum") && top.text("checksum") != checksum_text(text.substr(0, text.rfind(kChecksumKey))))
    throw FormatError(file,
                      "the manifest does not match its checksum: it was damaged, or changed by something other than embermap. To "
                      "accept it as it is, remove its last key, \"checksum\"");
  Manifest manifest;
  manifest.commit = top.integer("commit");
  if (manifest.commit >= 1ULL << 63) top.fail(fmt::format("has an impossible 'commit': {}", manifest.commit));
  if (top.has("time")) manifest.time = top.text("time");
  if (manifest.time.size() > kMaxTime) top.fail(fmt::format("has a 'time' of {} bytes", manifest.time.size()));
  if (top.has("note")) {
    if (!top.at("note").is_object()) top.fail(fmt::format("has a 'note' that is no object: {}", shown(top.at("note"))));
    manifest.note = top.at("note").dump();
  }
  if (top.has("store_id")) {
    const auto store = StoreId::parse(top.text("store_id"));
    if (!store) top.fail(fmt::format("has a 'store_id' that is not 32 hexadecimal digits: {}", shown(top.at("store_id"))));
    manifest.store_id = *store;
  }
  if (top.has("log")) manifest.log = top.boolean("log");
  // Version 1 had neither revisions nor numbers of tables.
  if (version > 1) {
    manifest.revision = top.integer("revision");
    const std::uint64_t next = top.integer("next_id");
    if (next == 0 || next >= 1ULL << 32) top.fail(fmt::format("has an impossible 'next_id': {}", next));
    manifest.next_id = static_cast<std::uint32_t>(next);
  }
  std::set<std::uint32_t> ids;
  if (top.has("unfinished")) manifest.unfinished = read_unfinished(top);
  const ReadJson& tables = top.at("tables");
  if (!tables.is_object()) top.fail("has 'tables' that are no object");
  for (const auto& [name, value] : tables.items()) {
    const Reader reader(file, value, fmt::format("table '{}'", printable(name, 200)));
    try {
      check_table_name(name);
      TableEntry entry = read_table(reader);
      const std::uint64_t id = version > 1 ? reader.integer("id") : manifest.next_id++;
      if (id == 0 || id >= manifest.next_id || !ids.insert(static_cast<std::uint32_t>(id)).second)
        reader.fail(fmt::format("has the id {}, which is another table's, or is not below 'next_id'", id));
      entry.id = static_cast<std::uint32_t>(id);
      manifest.tables.emplace(name, std::move(entry));
    } catch (const FormatError&) {
      throw;
    } catch (const Error& problem) {
      reader.fail(fmt::format("cannot be: {}", problem.what()));
    }
  }
  return manifest;
}

std::string Manifest::text() const {
  Json json{{"format", kFormatName}, {"version", kFormatVersion}, {"commit", commit}};
  if (!time.empty()) json["time"] = time;
  if (!note.empty()) json["note"] = Json::parse(note);
  if (store_id.known()) json["store_id"] = store_id.text();
  json["revision"] = revision;
  if (log) json["log"] = true;
  json["next_id"] = next_id;
  json["tables"] = Json::object();
  auto& listed = json["tables"].get_ref<Json::object_t&>();
  for (const auto& [name, entry] : tables) {
    // Appended as they come: no name is there twice, and looking for it would take longer with each table.
    Json& table = listed.emplace_back(name, Json::object()).second;
    table = {{"id", entry.id},
             {"rows", entry.geometry.rows},
             {"dim", entry.dim},
             {"dtype", dtype_name(entry.dtype)},
             {"optimizer", optimizer_or_null(entry.optimizer)},
             {"init", init_json(entry.init)},
             {"seed", entry.seed},
             {"step", entry.step},
             {"page_bytes", entry.page_bytes},
             {"stride", entry.geometry.stride},
             {"rows_per_page", entry.geometry.rows_per_page},
             {"data_offset", entry.geometry.data_offset}};
    if (entry.carried) table["carried"] = *entry.carried;
    if (entry.changed != 0) table["changed"] = entry.changed;
    if (entry.settled != 0) table["settled"] = entry.settled;
    if (entry.memory != 0) table["memory"] = entry.memory;
    TableCounters counters = entry.counters;
    if (counters != TableCounters{})
      for (const auto& [key, value] : counter_keys(counters)) table["counters"][key] = *value;
    if (entry.adopted) {
      table["adopted"] = path_json(*entry.adopted);
      table["adopted_writable"] = entry.adopted_writable;
      table["adopted_in"] = {{"inode", entry.adopted_in.inode}, {"born_ns", entry.adopted_in.born_ns}};
      if (entry.big_endian) table["byte_order"] = "big";
    }
  }
  if (!unfinished.empty()) json["unfinished"] = unfinished;
  std::string text = json.dump(2);
  text.resize(text.size() - 2);  // without the closing line
  text += ",\n  ";
  return text + fmt::format("{}: \"{}\"\n}}\n", kChecksumKey, checksum_text(text));
}

Json optimizer_json(const Optimizer& optimizer) {
  Json json{{"name", optimizer_name(optimizer)}};
  std::visit(
      [&](const auto& o) {
        visit_options(o, [&]<class T>(const char* name, const T& value, bool said) {
          if (!said && is_unset(value)) return;
          if constexpr (std::is_same_v<T, StepOf>)
            json[name] = step_of_name(value);
          else if constexpr (std::is_same_v<T, std::optional<double>>)
            json[name] = value ? Json(*value) : Json(nullptr);
          else
            json[name] = value;
        });
      },
      optimizer);
  return json;
}

std::string table_settings_text(const Table& table) {
  Json json{{"format", kSettingsName},
            {"version", 1},
            {"rows", table.rows()},
            {"dim", table.dim()},
            {"dtype", dtype_name(table.dtype())},
            {"optimizer", optimizer_or_null(table.optimizer())},
            {"init", init_json(table.initializer())},
            {"seed", table.seed()},
            {"step", table.step()},
            {"page_bytes", table.page_bytes_option()},
            {"memory", table.memory()}};
  if (const std::optional<double> carried = table.carried()) json["carried"] = *carried;
  return json.dump(1) + "\n";
}

TableSettings parse_table_settings(std::string_view text, const std::filesystem::path& file) {
  const ReadJson json = parse_json(text, file, "'embermap'");
  const Reader reader(file, json, "'embermap'");
  if (!reader.has("format") || reader.text("format") != kSettingsName)
    reader.fail(fmt::format("is not of the format '{}'", kSettingsName));
  if (reader.integer("version") != 1)
    reader.fail(fmt::format("has version {}, which this embermap does not read", reader.integer("version")));
  TableSettings out;
  out.options.rows = reader.integer("rows");
  out.step = read_settings(reader, out.options);
  out.carried = read_carried(reader);
  if (reader.has("memory")) out.options.memory = reader.integer("memory");
  check_initializer(out.options.init, out.options.dtype);
  return out;
}

void Manifest::save(const std::filesystem::path& store, FileOps& ops) const { replace_file(store / kManifestName, text(), ops); }

std::string note_text(std::string_view text) {
  if (text.size() > kMaxNote)
    throw InvalidArgument(fmt::format("a note of {} bytes of JSON; a commit has room for {}", text.size(), kMaxNote));
  const std::filesystem::path place = "note";
  NoteCheck check(place, "it", kDeepestNote);
  try {
    if (!ReadJson::sax_parse(text, &check)) throw FormatError(place, "is not valid JSON");
  } catch (const FormatError& problem) {
    throw InvalidArgument(problem.what());
  }
  const ReadJson json = ReadJson::parse(text);
  if (!json.is_object()) throw InvalidArgument(fmt::format("note: is no JSON object: {}", shown(json)));
  std::string kept = json.dump();
  if (kept.size() > kMaxNote)
    throw InvalidArgument(fmt::format("a note of {} bytes of JSON; a commit has room for {}", kept.size(), kMaxNote));
  return kept;
}

std::string utc_now() {
  const auto now = std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday,
                     parts.tm_hour, parts.tm_min, parts.tm_sec, (now.time_since_epoch().count() % 1000 + 1000) % 1000);
}

void check_table_name(std::string_view name) {
  const auto fail = [&](std::string_view why) {
    return InvalidArgument(fmt::format("'{}' cannot name a table: {}", printable(name, 200), why));
  };
  if (name.empty()) throw fail("it is empty");
  if (name.size() > 200) throw fail("it is longer than 200 bytes");
  if (name.front() == '.' || name.front() == '-') throw fail("it begins with '.' or '-'");
  if (!is_utf8(name)) throw fail("it is not UTF-8");
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
    if (!plain && c != '_' && c != '-' && c != '.' && byte < 0x80)
      throw fail(fmt::format("it has a '{}'; letters, digits, '_', '-', '.' may stand in it", printable(std::string(1, c))));
  }
}

}  // namespace embermap
