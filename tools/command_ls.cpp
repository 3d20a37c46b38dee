// embermap ls FILE
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string file, from;
};

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string out = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i == 0 ? "" : ", ") + grouped(shape[i]);
  return out + (shape.size() == 1 ? ",)" : ")");
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

// Columns as wide as what stands in them; the name last, because it may be long.
std::string table_text(const std::vector<Entry>& entries) {
  std::vector<std::array<std::string, 5>> lines;
  std::array<std::size_t, 5> width{};
  for (const Entry& entry : entries) {
    lines.push_back({shape_text(entry.shape), printable(entry.dtype), format_size(entry.bytes), printable(entry.layout),
                     printable(entry.name)});
    for (std::size_t i = 0; i < width.size(); ++i) width[i] = std::max(width[i], lines.back()[i].size());
  }
  std::string out;
  for (std::size_t at = 0; at < lines.size(); ++at) {
    std::string text;
    for (std::size_t i = 0; i < width.size(); ++i) text += fmt::format("{:<{}}  ", lines[at][i], width[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
    for (const auto& [name, value] : entries[at].attributes)
      out += fmt::format("    {} = {}\n", printable(name), printable(value));
  }
  return out;
}

int list(const Arguments& arguments, const Common& common) {
  const Location location = parse_source("FILE", arguments.file, arguments.from);
  require_regular_file(location.file);
  std::vector<Entry> entries = list_entries(location.file, location.format);
  if (!location.selector.empty()) {
    std::erase_if(entries,
                  [&](const Entry& entry) { return entry.name != location.selector && entry.name != "/" + location.selector; });
    if (entries.empty())
      throw NotFound(fmt::format("{}: there is nothing called '{}' in it ('embermap ls {}' shows what is)",
                                 printable(location.file), printable(location.selector), printable(location.file)));
  }
  if (common.json) {
    Json list = Json::array();
    for (const Entry& entry : entries) list.push_back(entry_json(entry));
    print_json(
        {{"path", json_text(location.file.native())}, {"format", format_name(location.format)}, {"entries", std::move(list)}});
  } else {
    print(table_text(entries));
  }
  return kDone;
}

}  // namespace

void add_ls(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("ls", "List the arrays in a file: shape, dtype, bytes, layout, name");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("FILE", arguments->file, "A file of any format that can be read, or FILE:NAME for one array of it")
      ->required();
  add_from_option(*command, arguments->from);
  finish_command(*command, common, chosen,
                 "  embermap ls model.pt\n"
                 "  embermap ls model.h5:/embeddings/words\n"
                 "  embermap ls vectors.npz --json",
                 [arguments](const Common& c) { return list(*arguments, c); });
}

}  // namespace embermap::tools
