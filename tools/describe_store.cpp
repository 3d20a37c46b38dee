#include "tools/describe_store.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "io/file.hpp"
#include "io/lock.hpp"
#include "store/manifest.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/text.hpp"

namespace embermap::tools {
namespace {

// Who holds the store's writer lock: {"held": bool, "process": pid or null, "host": text or null}, or null if that cannot be
// found out.
Json writer_json(const std::filesystem::path& store) {
  const std::filesystem::path path = store / "LOCK";
  const std::optional<bool> taken = WriterLock::is_taken(path);
  if (!taken) return nullptr;
  Json writer{{"held", *taken}, {"process", nullptr}, {"host", nullptr}};
  if (!*taken) return writer;
  try {
    const std::string text = read_text(path, 4096);  // "pid host\n", written after the lock was taken
    std::uint64_t pid = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), pid);
    if (error == std::errc{} && pid > 0 && text.back() == '\n') {
      writer["process"] = pid;
      const std::string_view rest(end, static_cast<std::size_t>(text.data() + text.size() - 1 - end));
      if (rest.starts_with(' ') && rest.size() > 1) writer["host"] = json_text(rest.substr(1));
    }
  } catch (const Error&) {  // the lock alone says enough
  }
  return writer;
}

Json size_json(const std::filesystem::path& file) {
  struct stat status {};
  if (stat(file.c_str(), &status) != 0) return {{"file_bytes", nullptr}, {"allocated_bytes", nullptr}};
  return {{"file_bytes", static_cast<std::uint64_t>(status.st_size)},
          {"allocated_bytes", static_cast<std::uint64_t>(status.st_blocks) * 512}};
}

Json initializer_json(const Initializer& init) {
  struct Describe {
    Json operator()(const Zeros&) const { return {{"kind", "zeros"}}; }
    Json operator()(const Constant& c) const { return {{"kind", "constant"}, {"value", c.value}}; }
    Json operator()(const Uniform& u) const { return {{"kind", "uniform"}, {"low", u.low}, {"high", u.high}}; }
    Json operator()(const Normal& n) const { return {{"kind", "normal"}, {"mean", n.mean}, {"std", n.std}}; }
  };
  Json json = std::visit(Describe{}, init);
  json["text"] = initializer_text(init);
  return json;
}

Json counters_json(const TableCounters& c) {
  return {{"hits", c.hits},
          {"misses", c.misses},
          {"evictions", c.evictions},
          {"write_backs", c.write_backs},
          {"bytes_read", c.bytes_read},
          {"bytes_written", c.bytes_written},
          {"commits", c.commits}};
}

Json io_json(const PageIoReport& report) {
  return {{"engine", io_engine_name(report.engine)},
          {"direct_reads", report.direct_reads},
          {"direct_writes", report.direct_writes},
          {"note", json_text(report.note)}};
}

// "io_uring, direct" or "threads, through the page cache (io_uring_setup: Operation not permitted)".
std::string io_text(const Json& io) {
  const bool reads = io["direct_reads"].get<bool>(), writes = io["direct_writes"].get<bool>();
  std::string text = io["engine"].get<std::string>();
  text += reads && writes ? ", direct" : reads ? ", reads direct" : ", through the page cache";
  if (const auto note = io["note"].get<std::string>(); !note.empty()) text += fmt::format(" ({})", note);
  return text;
}

// "0 %", "< 0.01 %", "12.34 %", "100 %": all only if it is all.
std::string percent_text(double fraction) {
  const double percent = fraction * 100;
  if (percent > 0 && percent < 0.01) return "< 0.01 %";
  if (percent < 100 && percent > 99.99) return "> 99.99 %";
  return fmt::format("{:.4g} %", percent);
}

std::string counters_text(const Json& c) {
  const auto number = [&](const char* key) { return c[key].get<std::uint64_t>(); };
  return fmt::format("{} hits, {} misses, {} evictions, {} write-backs; {} read, {} written; {} commit{}",
                     grouped(number("hits")), grouped(number("misses")), grouped(number("evictions")),
                     grouped(number("write_backs")), format_size(number("bytes_read")), format_size(number("bytes_written")),
                     grouped(number("commits")), number("commits") == 1 ? "" : "s");
}

// A store opened to be looked at.
struct Opened {
  Store store;
  bool uncommitted;  // pages were written after the last commit
};

Opened open_within(const std::filesystem::path& path, StoreOptions options) {
  options.threads = 1;
  try {
    return {Store::open(path, options), false};
  } catch (const MomentError&) {  // who looks at what was brought back must see it
    throw;
  } catch (const CorruptError&) {  // the tables may mix commits: no reason not to describe them
    options.accept_unclean = true;
    return {Store::open(path, options), true};
  }
}

// No row is read, so that a budget too small for rows is none of the caller's business: the smallest that opens the store is
// taken.
Opened open_to_look(const std::filesystem::path& path, StoreOptions options) {
  for (;; options.memory *= 2) {
    try {
      return open_within(path, options);
    } catch (const BudgetError&) {
      if (options.memory > std::numeric_limits<std::uint64_t>::max() / 2) throw;
    }
  }
}

Json note_json(const CommitInfo& commit) { return commit.note.empty() ? Json() : Json::parse(commit.note); }

Json store_facts(const std::filesystem::path& path, const Opened& opened) {
  const Json writer = writer_json(path);
  const bool at_work = writer.is_object() && writer["held"].get<bool>();
  const CommitInfo commit = opened.store.last_commit();
  return {{"commit", commit.number},           {"time", commit.time.empty() ? Json() : Json(json_text(commit.time))},
          {"note", note_json(commit)},         {"writer", writer},
          {"uncommitted", opened.uncommitted}, {"unclean", opened.uncommitted && !at_work}};
}

std::string writer_text(const Json& writer) {
  if (writer.is_null()) return "not known";
  if (!writer["held"].get<bool>()) return "none";
  if (writer["process"].is_null()) return "another process";
  const std::string host = writer["host"].is_null() ? "" : " on host " + printable(writer["host"].get<std::string>());
  return fmt::format("process {}{}", writer["process"].get<std::uint64_t>(), host);
}

void add_store_facts(Facts& facts, const Json& d) {
  const std::string time = d["time"].is_null() ? "" : ", " + printable(d["time"].get<std::string>());
  const auto commit = d["commit"].get<std::uint64_t>();
  facts.add("commit", (commit == 0 ? std::string(kNoCommit) : grouped(commit)) + time);
  if (!d["note"].is_null()) facts.add("note", printable(d["note"].dump()));
  facts.add("writer", writer_text(d["writer"]));
  if (d["unclean"].get<bool>())
    facts.add("unclean end", "rows may mix the last commit and later ones; 'embermap recover' accepts them");
  else if (d["uncommitted"].get<bool>())
    facts.add("uncommitted", "pages of the writer at work");
}

void add_table_facts(Facts& facts, const Json& t) {
  facts.add("rows x dim",
            fmt::format("{} x {}", grouped(t["rows"].get<std::uint64_t>()), grouped(t["dim"].get<std::uint64_t>())));
  facts.add("dtype", t["dtype"].get<std::string>());
  std::string optimizer;
  for (const auto& [key, value] : t["optimizer"].items())
    optimizer += key == "name" ? value.get<std::string>() : fmt::format(" {}={}", key, value.dump());
  facts.add("optimizer", optimizer);
  if (t["fields"].size() > 1) {
    std::string fields;
    for (const Json& field : t["fields"])
      fields +=
          fmt::format("{}{} {}", fields.empty() ? "" : ", ", field["name"].get<std::string>(), field["dtype"].get<std::string>());
    facts.add("fields", fields);
  }
  if (!t["adopted"].get<bool>())
    facts.add("initial rows", fmt::format("{}, seed {}", t["init"]["text"].get<std::string>(), t["seed"].get<std::uint64_t>()));
  facts.add("step", grouped(t["step"].get<std::uint64_t>()));
  facts.add("page", fmt::format("{}, {} rows of {} bytes", format_size(t["page_bytes"].get<std::uint64_t>()),
                                grouped(t["rows_per_page"].get<std::uint64_t>()), grouped(t["stride"].get<std::uint64_t>())));
  facts.add("written", fmt::format("{} of {} pages ({})", grouped(t["written_pages"].get<std::uint64_t>()),
                                   grouped(t["pages"].get<std::uint64_t>()), percent_text(t["materialised"].get<double>())));
  facts.add("so far", counters_text(t["counters"]));
  if (!t["memory"].is_null()) facts.add("memory", format_size(t["memory"].get<std::uint64_t>()));
  facts.add("i/o", io_text(t["io"]));
  if (t["byte_order"] != "little") facts.add("byte order", t["byte_order"].get<std::string>() + "-endian in the file");
  facts.add("file", printable(t["file"].get<std::string>()) + (t["adopted"].get<bool>() ? " (used in place)" : ""));
  if (!t["file_bytes"].is_null())
    facts.add("size", fmt::format("{}, on disk {}", format_size(t["file_bytes"].get<std::uint64_t>()),
                                  format_size(t["allocated_bytes"].get<std::uint64_t>())));
}

}  // namespace

Json table_json(const Table& table) {
  const Geometry geometry = table.geometry();
  const std::uint64_t written = table.written_pages();
  Json fields = Json::array();
  for (const Field& field : table.schema().fields())
    fields.push_back(
        {{"name", field.name}, {"dtype", dtype_name(field.dtype)}, {"offset", field.offset}, {"bytes", field.bytes}});
  Json json{{"kind", "table"},
            {"name", json_text(table.name())},
            {"file", json_text(table.file().native())},
            {"rows", table.rows()},
            {"dim", table.dim()},
            {"dtype", dtype_name(table.dtype())},
            {"fields", std::move(fields)},
            {"optimizer", optimizer_json(table.optimizer())},
            {"init", initializer_json(table.initializer())},
            {"seed", table.seed()},
            {"step", table.step()},
            {"page_bytes", geometry.page_bytes()},
            {"rows_per_page", geometry.rows_per_page},
            {"record_bytes", table.schema().record_bytes()},
            {"stride", geometry.stride},
            {"data_offset", geometry.data_offset},
            {"pages", geometry.pages()},
            {"written_pages", written},
            {"materialised", geometry.pages() == 0 ? 1.0 : static_cast<double>(written) / static_cast<double>(geometry.pages())},
            {"adopted", table.adopted()},
            {"byte_order", table.big_endian() ? "big" : "little"},
            {"memory", table.memory() == 0 ? Json(nullptr) : Json(table.memory())},
            {"counters", counters_json(table.counters())},
            {"io", io_json(table.io_report())}};
  json.update(size_json(table.file()));
  return json;
}

Json broken_table_json(const std::string& name, const std::string& error) {
  return {{"kind", "table"}, {"name", json_text(name)}, {"error", json_text(error)}};
}

std::vector<std::string> chosen_tables(Store& store, const std::string& name) {
  if (name.empty()) return store.tables();
  if (!store.contains(name)) store.table(name);  // says which there are
  return {name};
}

Json describe_store(const std::filesystem::path& path, const StoreOptions& options) {
  Opened opened = open_to_look(path, options);
  Json tables = Json::array();
  for (const std::string& name : opened.store.tables()) {
    try {
      tables.push_back(table_json(opened.store.table(name)));
    } catch (const Error& broken) {  // the others are described all the same
      tables.push_back(broken_table_json(name, broken.what()));
    }
  }
  Json json{{"kind", "store"}, {"path", json_text(path.native())}};
  json.update(store_facts(path, opened));
  json["tables"] = std::move(tables);
  return json;
}

std::vector<CommitInfo> commits_of(const std::filesystem::path& store, const StoreOptions& options) {
  return open_to_look(store, options).store.commits();
}

Json describe_table(const std::filesystem::path& store, const std::string& name, const StoreOptions& options) {
  Opened opened = open_to_look(store, options);
  Json json = table_json(opened.store.table(name));
  json["store"] = json_text(store.native());
  json.update(store_facts(store, opened));
  return json;
}

std::string table_line(const Json& t) {
  return fmt::format("{} x {} {}, {}", grouped(t["rows"].get<std::uint64_t>()), grouped(t["dim"].get<std::uint64_t>()),
                     t["dtype"].get<std::string>(),
                     t["optimizer"]["name"] == "none" ? "no optimizer" : t["optimizer"]["name"].get<std::string>());
}

std::string store_text(const Json& d) {
  Facts facts;
  facts.add("store", printable(d["path"].get<std::string>()));
  add_store_facts(facts, d);
  facts.add("tables", grouped(d["tables"].size()));
  std::string text = facts.text();
  for (const Json& table : d["tables"]) {
    Facts of_table;
    of_table.add("table", printable(table["name"].get<std::string>()));
    if (table.contains("error"))
      of_table.add("broken", table["error"].get<std::string>());
    else
      add_table_facts(of_table, table);
    text += "\n" + of_table.text();
  }
  return text;
}

std::string table_text(const Json& d) {
  Facts facts;
  facts.add("table", printable(d["name"].get<std::string>()));
  facts.add("store", printable(d["store"].get<std::string>()));
  add_store_facts(facts, d);
  add_table_facts(facts, d);
  return facts.text();
}

}  // namespace embermap::tools
