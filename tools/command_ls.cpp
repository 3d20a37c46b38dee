// embermap ls FILE
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>
#include <vector>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_file.hpp"
#include "tools/paths.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string file, from;
};

// Columns as wide as what stands in them; the name last, because it may be long.
std::string table_text(const std::vector<Entry>& entries) {
  std::vector<std::array<std::string, 5>> lines;
  std::array<std::size_t, 5> width{};
  for (const Entry& entry : entries) {
    lines.push_back({shape_text(Json(entry.shape)), printable(entry.dtype), format_size(entry.bytes), printable(entry.layout),
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

// Throws UsageError for a store, and for a table by its name: neither is a file.
void refuse_stores(const std::string& text) {
  const std::filesystem::path path(text);
  std::error_code ignored;
  const bool there = std::filesystem::exists(path, ignored);
  const std::filesystem::path store = there ? path : path.parent_path();
  if (!std::filesystem::is_directory(store, ignored) || !store_at(store)) return;
  throw UsageError(there ? fmt::format("'{}' is a store; 'embermap info' shows its tables", printable(text))
                         : fmt::format("'{}' is no file; 'embermap info' shows tables of a store", printable(text)));
}

int list(const Arguments& arguments, const Common& common) {
  const Location location = [&] {
    try {
      return parse_source("FILE", arguments.file, arguments.from);
    } catch (const UsageError&) {
      refuse_stores(arguments.file);
      throw;
    } catch (const IoError& error) {
      if (error.error_number() == ENOENT) refuse_stores(arguments.file);
      throw;
    }
  }();
  require_regular_file(location.file);
  const std::vector<Entry> entries =
      chosen_entries(location.file, list_entries(location.file, location.format), location.selector);
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
