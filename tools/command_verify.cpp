// embermap verify STORE[/TABLE]
#include <fmt/format.h>

#include <memory>
#include <string>

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
  std::string path;
  bool accept_unclean = false;
};

Json report_json(const std::string& name, const VerifyReport& report) {
  Json bad = Json::array();
  for (const auto& range : report.bad)
    bad.push_back({{"page", range.page}, {"first_row", range.first_row}, {"last_row", range.last_row}});
  return {{"name", json_text(name)},           {"pages", report.pages},         {"written_pages", report.written},
          {"verified_pages", report.verified}, {"bad_pages", report.bad_pages}, {"bad", std::move(bad)}};
}

// "12-23, 96-107": rows of neighbouring bad pages as one range; the first `most` of them.
std::string row_ranges(const VerifyReport& report, std::size_t most) {
  std::string text;
  std::size_t i = 0;
  for (std::size_t shown = 0; i < report.bad.size() && shown < most; ++shown) {
    std::size_t last = i;
    while (last + 1 < report.bad.size() && report.bad[last + 1].first_row == report.bad[last].last_row + 1) ++last;
    text += fmt::format("{}{}-{}", text.empty() ? "" : ", ", report.bad[i].first_row, report.bad[last].last_row);
    i = last + 1;
  }
  if (i < report.bad_pages) text += ", ...";
  return text;
}

int verify(const Arguments& arguments, const Common& common) {
  const TablePath path = find_store_or_table(arguments.path);
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
    text += fmt::format("{}: bad rows {}\n", printable(name), row_ranges(report, report.bad.size()));
    bad_pages += report.bad_pages;
    bad_tables += fmt::format("{}'{}' rows {}", bad_tables.empty() ? "" : "; ", printable(name), row_ranges(report, 10));
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
  add_store_options(*command, common);
  finish_command(*command, common, chosen,
                 "  embermap verify tables\n"
                 "  embermap verify tables/items --json",
                 [arguments](const Common& c) { return verify(*arguments, c); });
}

}  // namespace embermap::tools
