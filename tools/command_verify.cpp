// embermap verify STORE[/TABLE]
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_store.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string path, backup;
  bool accept_unclean = false, accept = false;
};

Json ranges_json(const std::vector<PageRange>& ranges) {
  Json json = Json::array();
  for (const PageRange& range : ranges)
    json.push_back({{"page", range.page}, {"pages", range.pages}, {"first_row", range.first_row}, {"last_row", range.last_row}});
  return json;
}

Json report_json(const std::string& name, const VerifyReport& report) {
  return {{"name", json_text(name)},           {"pages", report.pages},         {"written_pages", report.written},
          {"verified_pages", report.verified}, {"bad_pages", report.bad_pages}, {"bad", ranges_json(report.bad)}};
}

// "12-23, 96-107": the rows of the first `most` ranges, which have `pages` pages in all.
std::string row_ranges(const std::vector<PageRange>& ranges, std::size_t most, std::uint64_t pages) {
  std::string text;
  for (std::size_t i = 0; i < std::min(ranges.size(), most); ++i) {
    text += fmt::format("{}{}-{}", text.empty() ? "" : ", ", ranges[i].first_row, ranges[i].last_row);
    pages -= ranges[i].pages;
  }
  return text + (pages > 0 ? ", ..." : "");
}

std::string pages_text(std::uint64_t pages) { return fmt::format("{} {}", grouped(pages), pages == 1 ? "page" : "pages"); }

// Takes what is there.
void accept(Store& store, const std::string& name, const Common& common) {
  Table table = store.table(name);
  const VerifyReport before = table.verify();
  ProgressLine line("accept " + name, table.geometry().page_bytes(), common.quiet);
  table.accept(line.callback());
  if (common.quiet || common.json) return;
  // Pages of an adopted file may have none: nothing of them could match.
  const std::uint64_t unknown = table.adopted() ? before.written - before.verified : 0;
  if (before.bad_pages > 0)
    print(fmt::format("{}: {} accepted that did not match: rows {}\n", printable(name), pages_text(before.bad_pages),
                      row_ranges(before.bad, before.bad.size(), before.bad_pages)));
  if (unknown > 0) print(fmt::format("{}: {} accepted that had no checksum\n", printable(name), pages_text(unknown)));
  if (before.bad_pages == 0 && unknown == 0)
    print(fmt::format("{}: all {} match, nothing to accept\n", printable(name), pages_text(before.verified)));
}

void repair(Store& store, Store& backup, const std::string& name, const std::string& backup_name, const Common& common) {
  Table table = store.table(name);
  ProgressLine line("repair " + name, table.geometry().page_bytes(), common.quiet);
  const RepairReport report = table.repair_from(backup.table(backup_name), line.callback());
  if (!common.quiet && !common.json)
    print(fmt::format(
        "{}: {} bad, {} repaired{}\n", printable(name), pages_text(report.bad_pages), grouped(report.repaired_pages),
        report.repaired.empty() ? "" : ": rows " + row_ranges(report.repaired, report.repaired.size(), report.repaired_pages)));
}

// --accept and --repair-from; what is bad afterwards is seen by verifying.
void change(const TablePath& path, const Arguments& arguments, const Common& common) {
  if (arguments.accept && !arguments.backup.empty())
    throw UsageError("--accept takes pages as they are and --repair-from those of a backup: choose one");
  StoreOptions options = store_options(common, StoreOptions::Mode::kReadWrite);
  options.accept_changed = true;
  Store store = Store::open(path.store, options);
  std::optional<Store> backup;
  std::string backup_table;
  if (!arguments.backup.empty()) {
    const TablePath from = find_store_or_table(arguments.backup);
    if (!from.table.empty() && path.table.empty())
      throw UsageError(fmt::format("--repair-from {} is one table, {} a store", printable(from.text()), printable(path.text())));
    backup_table = from.table;
    backup.emplace(Store::open(from.store, store_options(common, StoreOptions::Mode::kRead)));
  }
  for (const std::string& name : chosen_tables(store, path.table)) {
    if (arguments.accept)
      accept(store, name, common);
    else if (!backup_table.empty() || path.table == name || backup->contains(name))
      repair(store, *backup, name, backup_table.empty() ? name : backup_table, common);
  }
  store.close();
}

int verify(const Arguments& arguments, const Common& common) {
  const TablePath path = find_store_or_table(arguments.path);
  if (arguments.accept || !arguments.backup.empty()) change(path, arguments, common);
  StoreOptions options = store_options(common, StoreOptions::Mode::kRead);
  options.accept_unclean = arguments.accept_unclean;
  Store store = Store::open(path.store, options);
  Json tables = Json::array();
  std::string text;
  std::uint64_t bad_pages = 0;
  std::string bad_tables, broken_tables;
  for (const std::string& name : chosen_tables(store, path.table)) {
    VerifyReport report;
    try {
      Table table = store.table(name);
      ProgressLine line("verify " + name, table.geometry().page_bytes(), common.quiet);
      report = table.verify(line.callback());
    } catch (const Error& error) {  // the others are verified all the same
      tables.push_back(broken_table_json(name, error.what()));
      text += fmt::format("{}: {}\n", printable(name), error.what());
      broken_tables += fmt::format("{}'{}': {}", broken_tables.empty() ? "" : "; ", printable(name), error.what());
      continue;
    }
    tables.push_back(report_json(name, report));
    text += fmt::format("{}: {} of {} pages written, {} verified, {} bad\n", printable(name), grouped(report.written),
                        grouped(report.pages), grouped(report.verified), grouped(report.bad_pages));
    if (report.bad_pages == 0) continue;
    text += fmt::format("{}: bad rows {}\n", printable(name), row_ranges(report.bad, report.bad.size(), report.bad_pages));
    bad_pages += report.bad_pages;
    bad_tables += fmt::format("{}'{}' rows {}", bad_tables.empty() ? "" : "; ", printable(name),
                              row_ranges(report.bad, 10, report.bad_pages));
  }
  const bool ok = bad_pages == 0 && broken_tables.empty();
  if (common.json)
    print_json({{"path", json_text(path.store.native())},
                {"commit", store.commit_number()},
                {"ok", ok},
                {"bad_pages", bad_pages},
                {"tables", std::move(tables)}});
  else if (!common.quiet)
    print(text);
  if (ok) return kDone;
  std::string summary = printable(path.store);
  if (bad_pages > 0) summary += fmt::format(": {} bad {}: {}", grouped(bad_pages), bad_pages == 1 ? "page" : "pages", bad_tables);
  if (!broken_tables.empty()) summary += fmt::format(": not verified: {}", broken_tables);
  throw CorruptError(summary);
}

}  // namespace

void add_verify(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("verify", "Compare every written page with its checksum; exit 1 if one is bad");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("PATH", arguments->path, "STORE (all tables) or STORE/TABLE")->required();
  command->add_flag("--accept-unclean", arguments->accept_unclean, "Look at tables after a session that ended without commit");
  command->add_flag("--accept", arguments->accept,
                    "First take every page as it is, damaged or not: for files that NumPy or another program changed on purpose, "
                    "adopted ones among them, which are not opened otherwise");
  command
      ->add_option(
          "--repair-from", arguments->backup,
          "First replace bad pages by those of this store (or table) that have the checksum recorded here; nothing else is "
          "changed")
      ->type_name("STORE[/TABLE]");
  add_store_options(*command, common);
  hide_options(*command, {"--policy", "--verify-reads"});  // every page is read once, and compared
  finish_command(*command, common, chosen,
                 "  embermap verify tables\n"
                 "  embermap verify tables/items --json\n"
                 "  embermap verify tables --repair-from /backup/tables",
                 [arguments](const Common& c) { return verify(*arguments, c); });
}

}  // namespace embermap::tools
