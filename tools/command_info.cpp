// embermap info STORE | STORE/TABLE | FILE
#include <fmt/format.h>
#include <sys/stat.h>

#include <memory>

#include "base/error.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_file.hpp"
#include "tools/describe_store.hpp"
#include "tools/paths.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

// x.npy:field or x.h5:/dataset; nothing if the text is no such thing.
std::optional<Location> selected_part(const std::string& text) {
  try {
    Location location = parse_location(text);
    struct stat status {};
    if (!location.selector.empty() && stat(location.file.c_str(), &status) == 0) return location;
  } catch (const InvalidArgument&) {
  } catch (const IoError&) {  // no such file: it may be a table
  }
  return std::nullopt;
}

void show(const Common& common, const Json& description, const std::string& text) {
  if (common.json)
    print_json(description);
  else
    print(text);
}

int info(const std::string& path, const Common& common) {
  if (path.empty()) throw UsageError("an empty path names nothing");
  struct stat status {};
  const bool there = stat(path.c_str(), &status) == 0;
  if (!there && errno != ENOENT && errno != ENOTDIR) throw IoError(errno, "stat", path);
  if (there && !S_ISDIR(status.st_mode)) {
    require_regular_file(path);
    const Json description = describe_file(path, "");
    show(common, description, file_text(description));
    return kDone;
  }
  if (!there) {
    if (const auto part = selected_part(path)) {
      require_regular_file(part->file);
      const Json description = describe_file(part->file, part->selector);
      show(common, description, file_text(description));
      return kDone;
    }
  }
  TablePath found;
  try {
    found = find_store_or_table(path);
  } catch (const NotFound&) {
    throw IoError(ENOENT, "open", path);
  }
  if (found.table.empty()) {
    const Json description = describe_store(found.store, store_options(common, StoreOptions::Mode::kRead));
    show(common, description, store_text(description));
  } else {
    const Json description = describe_table(found.store, found.table, store_options(common, StoreOptions::Mode::kRead));
    show(common, description, table_text(description));
  }
  return kDone;
}

}  // namespace

void add_info(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("info", "Show what a store, a table or a file holds, without reading its rows");
  auto path = std::make_shared<std::string>();
  command->add_option("PATH", *path, "STORE, STORE/TABLE, or a file: x.npy, x.npy:field, x.h5:/path/to/dataset, x.pt, ...")
      ->required();
  add_store_options(*command, common);
  hide_options(*command, {"--durability", "--verify-reads", "--log-limit", "--policy"});  // no row is read
  finish_command(*command, common, chosen,
                 "  embermap info tables\n"
                 "  embermap info tables/items --json\n"
                 "  embermap info model.h5",
                 [path](const Common& c) { return info(*path, c); });
}

}  // namespace embermap::tools
