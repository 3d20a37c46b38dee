#include "tools/describe_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/describe_hdf5.hpp"
#include "io/file.hpp"
#include "io/npy.hpp"
#include "io/rows.hpp"
#include "tools/console.hpp"
#include "tools/text.hpp"

namespace embermap::tools {
namespace {

void add_sizes(Json& json, const struct stat& status) {
  json["file_bytes"] = static_cast<std::uint64_t>(status.st_size);
  json["allocated_bytes"] = static_cast<std::uint64_t>(status.st_blocks) * 512;
}

std::string sizes_text(const Json& d) {
  return fmt::format("{}, on disk {}", format_size(d["file_bytes"].get<std::uint64_t>()),
                     format_size(d["allocated_bytes"].get<std::uint64_t>()));
}

// "float32" for what a table may hold, else what NumPy calls it: ">f4", "|V2".
std::string npy_dtype_name(const std::string& descr) {
  const auto dtype = dtype_of_npy_descr(descr);
  return dtype ? std::string(dtype_name(*dtype)) : descr;
}

// Why `embermap import --in-place` cannot take the file; nothing if it can.
std::optional<std::string> in_place_obstacle(const NpyHeader& header) {
  if (!header.fields.empty()) return "it is structured";
  if (header.shape.size() != 2) return fmt::format("it has {} dimensions, a table has 2", header.shape.size());
  if (header.fortran_order && header.shape[0] > 1 && header.shape[1] > 1) return "it is in Fortran order";
  if (header.shape[1] == 0) return "its rows have no elements";
  if (header.descr == "<V2" || header.descr == "|V2") return std::nullopt;  // with --dtype bfloat16
  if (!dtype_of_npy_descr(header.descr) && !dtype_of_big_endian_npy_descr(header.descr))
    return fmt::format("its dtype {} is not one of a table's", header.descr);
  return std::nullopt;
}

Json describe_npy(const std::filesystem::path& path, const File& file, const std::string& selector) {
  const NpyHeader header = read_npy_header(file);
  Json json{{"kind", "npy"}, {"path", json_text(path.native())}, {"version", fmt::format("{}.{}", header.major, header.minor)}};
  json["dtype"] = header.fields.empty() ? Json(npy_dtype_name(header.descr)) : Json("structured");
  json["descr"] = header.fields.empty() ? Json(json_text(header.descr)) : Json(nullptr);
  Json fields = Json::array();
  for (const NpyField& field : header.fields) {
    if (!selector.empty() && field.name != selector) continue;
    fields.push_back({{"name", json_text(field.name)},
                      {"dtype", npy_dtype_name(field.descr)},
                      {"descr", json_text(field.descr)},
                      {"shape", field.shape},
                      {"offset", field.offset},
                      {"bytes", field.bytes}});
  }
  if (!selector.empty() && fields.empty())
    throw NotFound(fmt::format("{}: there is no field '{}' in {}", printable(path), printable(selector), header.dtype_text()));
  json["fields"] = std::move(fields);
  json["shape"] = header.shape;
  json["fortran_order"] = header.fortran_order;
  json["item_bytes"] = header.item_bytes;
  json["data_offset"] = header.data_offset;
  json["data_bytes"] = header.data_bytes();
  add_sizes(json, file.status());
  const auto obstacle = in_place_obstacle(header);
  json["in_place"] = !obstacle.has_value();
  json["in_place_obstacle"] = obstacle ? Json(json_text(*obstacle)) : Json(nullptr);
  return json;
}

Json dataset_json(const Hdf5Dataset& d) {
  Json filters = Json::array();
  for (const Hdf5Filter& f : d.filters)
    filters.push_back(
        {{"id", f.id}, {"name", json_text(f.name)}, {"optional", f.optional}, {"available", f.available}, {"lossy", f.lossy}});
  Json most = Json::array();
  for (const std::uint64_t dim : d.max_shape) most.push_back(dim == Hdf5Dataset::kUnlimited ? Json(nullptr) : Json(dim));
  Json others = Json::array();
  for (const std::string& other : d.other_files) others.push_back(json_text(other));
  constexpr std::array<const char*, 3> kSpaces{"simple", "scalar", "null"};
  return {{"path", json_text(d.path)},
          {"dtype", json_text(d.dtype)},
          {"shape", d.space == Hdf5Dataset::Space::kNull ? Json(nullptr) : Json(d.shape)},
          {"element_shape", d.element_shape},
          {"max_shape", std::move(most)},
          {"space", kSpaces[static_cast<std::size_t>(d.space)]},
          {"layout", d.layout},
          {"chunk", d.chunk.empty() ? Json(nullptr) : Json(d.chunk)},
          {"filters", std::move(filters)},
          {"other_files", std::move(others)},
          {"stored_bytes", d.stored_bytes ? Json(*d.stored_bytes) : Json(nullptr)},
          {"rows", d.is_rows()}};
}

Json describe_hdf5_file(const std::filesystem::path& path, const File& file, const std::string& selector) {
  const Hdf5Contents contents = describe_hdf5(path);
  const std::string wanted = selector.empty() || selector.starts_with('/') ? selector : "/" + selector;
  Json json{{"kind", "hdf5"}, {"path", json_text(path.native())}};
  add_sizes(json, file.status());
  Json datasets = Json::array();
  std::vector<std::string> names;
  for (const Hdf5Dataset& dataset : contents.datasets) {
    names.push_back(printable(dataset.path));
    if (wanted.empty() || dataset.path == wanted) datasets.push_back(dataset_json(dataset));
  }
  if (!wanted.empty() && datasets.empty())
    throw NotFound(fmt::format("{}: there is no dataset '{}'; it has {}", printable(path), printable(wanted),
                               names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
  Json links = Json::array();
  if (wanted.empty())
    for (const Hdf5Link& link : contents.links)
      links.push_back({{"path", json_text(link.path)}, {"target", json_text(link.target)}});
  json["datasets"] = std::move(datasets);
  json["links"] = std::move(links);
  return json;
}

std::string npy_text(const Json& d) {
  Facts facts;
  facts.add("npy", printable(d["path"].get<std::string>()));
  facts.add("version", d["version"].get<std::string>());
  facts.add("dtype",
            d["dtype"].get<std::string>() +
                (d["descr"].is_null() || d["descr"] == d["dtype"] ? "" : fmt::format(" ({})", d["descr"].get<std::string>())));
  for (const Json& field : d["fields"])
    facts.add("  field",
              fmt::format("{}: {}{} at byte {}", printable(field["name"].get<std::string>()), field["dtype"].get<std::string>(),
                          field["shape"].empty() ? "" : " " + shape_text(field["shape"]), field["offset"].get<std::uint64_t>()));
  facts.add("shape", shape_text(d["shape"]) + (d["fortran_order"].get<bool>() ? ", Fortran order" : ""));
  facts.add("data", fmt::format("{} at byte {}", format_size(d["data_bytes"].get<std::uint64_t>()),
                                grouped(d["data_offset"].get<std::uint64_t>())));
  facts.add("size", sizes_text(d));
  facts.add("in place", d["in_place"].get<bool>() ? "yes" : "no: " + d["in_place_obstacle"].get<std::string>());
  return facts.text();
}

std::string hdf5_text(const Json& d) {
  Facts facts;
  facts.add("hdf5", printable(d["path"].get<std::string>()));
  facts.add("size", sizes_text(d));
  facts.add("datasets", grouped(d["datasets"].size()));
  std::string text = facts.text();
  for (const Json& dataset : d["datasets"]) {
    Facts of_dataset;
    of_dataset.add("dataset", printable(dataset["path"].get<std::string>()));
    of_dataset.add("shape",
                   dataset["space"] == "simple"
                       ? shape_text(dataset["shape"]) +
                             (dataset["max_shape"] == dataset["shape"] ? "" : ", at most " + shape_text(dataset["max_shape"]))
                       : dataset["space"].get<std::string>());
    of_dataset.add("dtype", printable(dataset["dtype"].get<std::string>()));
    of_dataset.add("layout", dataset["layout"].get<std::string>() +
                                 (dataset["chunk"].is_null() ? "" : " in chunks of " + shape_text(dataset["chunk"])));
    std::string filters;
    for (const Json& filter : dataset["filters"])
      filters += fmt::format("{}{} ({}{}{})", filters.empty() ? "" : ", ", printable(filter["name"].get<std::string>()),
                             filter["id"].get<int>(), filter["lossy"].get<bool>() ? ", lossy" : "",
                             filter["available"].get<bool>() ? "" : ", not available");
    if (!filters.empty()) of_dataset.add("filters", filters);
    for (const Json& other : dataset["other_files"]) of_dataset.add("data in", printable(other.get<std::string>()));
    if (!dataset["stored_bytes"].is_null()) of_dataset.add("stored", format_size(dataset["stored_bytes"].get<std::uint64_t>()));
    text += "\n" + of_dataset.text();
  }
  for (const Json& link : d["links"])
    text += fmt::format("\nlink          {} -> {} (not followed)", printable(link["path"].get<std::string>()),
                        printable(link["target"].get<std::string>()));
  return d["links"].empty() ? text : text + "\n";
}

Json describe_other(const std::filesystem::path& path, const File& file, const std::string& selector) {
  Location::Format format{};
  try {
    format = parse_location(path.native()).format;
  } catch (const InvalidArgument&) {
    throw FormatError(path, fmt::format("is of no format known here (by its content and its name): {}", format_names(false)));
  }
  Json json{{"kind", format_name(format)}, {"path", json_text(path.native())}};
  add_sizes(json, file.status());
  Json entries = Json::array();
  for (const Entry& entry : chosen_entries(path, list_entries(path, format), selector)) entries.push_back(entry_json(entry));
  json["entries"] = std::move(entries);
  return json;
}

std::string other_text(const Json& d) {
  Facts facts;
  facts.add(d["kind"].get<std::string>(), printable(d["path"].get<std::string>()));
  facts.add("size", sizes_text(d));
  facts.add("arrays", grouped(d["entries"].size()));
  std::string text = facts.text();
  for (const Json& entry : d["entries"]) {
    Facts of_entry;
    of_entry.add("array", printable(entry["name"].get<std::string>()));
    of_entry.add("shape", shape_text(entry["shape"]));
    of_entry.add("dtype", printable(entry["dtype"].get<std::string>()));
    of_entry.add("layout", printable(entry["layout"].get<std::string>()));
    of_entry.add("data", format_size(entry["bytes"].get<std::uint64_t>()));
    text += "\n" + of_entry.text();
  }
  return text;
}

}  // namespace

std::string shape_text(const Json& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text += (i == 0 ? "" : ", ") + (shape[i].is_null() ? std::string("unlimited") : grouped(shape[i].get<std::uint64_t>()));
  return text + (shape.size() == 1 ? ",)" : ")");
}

Json entry_json(const Entry& entry) {
  Json json{{"name", json_text(entry.name)},
            {"shape", entry.shape},
            {"dtype", json_text(entry.dtype)},
            {"bytes", entry.bytes},
            {"layout", json_text(entry.layout)}};
  for (const auto& [name, value] : entry.attributes) json["attributes"][printable(name)] = json_text(value);
  return json;
}

std::vector<Entry> chosen_entries(const std::filesystem::path& file, std::vector<Entry> entries, const std::string& selector) {
  if (selector.empty()) return entries;
  std::erase_if(entries, [&](const Entry& entry) { return entry.name != selector && entry.name != "/" + selector; });
  if (entries.empty())
    throw NotFound(fmt::format("{}: there is nothing called '{}' in it ('embermap ls {}' shows what is)", printable(file),
                               printable(selector), printable(file)));
  return entries;
}

Json describe_file(const std::filesystem::path& path, const std::string& selector) {
  const File file = File::open(path, File::Mode::kRead);
  std::array<std::byte, 6> magic{};
  const std::uint64_t got = file.read_some(0, magic);
  const std::string extension = path.extension().native();
  const bool npy = got == magic.size() && std::memcmp(magic.data(), "\x93NUMPY", 6) == 0;
  if (npy || extension == ".npy") return describe_npy(path, file, selector);  // for a broken one, the reader says what is wrong
  if (is_hdf5(path)) return describe_hdf5_file(path, file, selector);
  if (got == 0) throw FormatError(path, "is empty");
  return describe_other(path, file, selector);
}

std::string file_text(const Json& description) {
  if (description["kind"] == "npy") return npy_text(description);
  return description["kind"] == "hdf5" ? hdf5_text(description) : other_text(description);
}

}  // namespace embermap::tools
