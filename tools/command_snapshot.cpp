// embermap snapshot STORE DESTINATION
#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string store, destination;
};

int snapshot(const Arguments& arguments, const Common& common) {
  const TablePath path = find_store_or_table(arguments.store);
  if (!path.table.empty())
    throw UsageError(fmt::format("{} is a table: a snapshot is one of a whole store", printable(arguments.store)));
  if (arguments.destination.empty()) throw UsageError("an empty path names nothing");
  Store store = Store::open(path.store, store_options(common, StoreOptions::Mode::kRead));
  SnapshotReport report;
  {
    ProgressLine line("snapshot", 1, common.quiet);
    report = store.snapshot(arguments.destination, line.callback());
  }
  if (common.json)
    print_json({{"kind", "snapshot"},
                {"path", json_text(arguments.destination)},
                {"commit", report.commit.number},
                {"time", report.commit.time.empty() ? Json() : Json(json_text(report.commit.time))},
                {"note", report.commit.note.empty() ? Json() : Json::parse(report.commit.note)},
                {"pages", report.pages},
                {"copied_pages", report.copied_pages},
                {"copied_bytes", report.copied_bytes},
                {"cloned_tables", report.cloned_tables},
                {"rounds", report.rounds}});
  else if (!common.quiet)
    print(fmt::format("{}: commit {} of {}, {} pages, {} copied\n", printable(arguments.destination),
                      grouped(report.commit.number), printable(path.store), grouped(report.pages),
                      format_size(report.copied_bytes)));
  return kDone;
}

}  // namespace

void add_snapshot(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand(
      "snapshot",
      "Copy a store at its last commit, also while another process trains; run again, it goes on where it was stopped");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("STORE", arguments->store, "The store")->required();
  command->add_option("DESTINATION", arguments->destination, "A directory that is not there or empty, or a half-done snapshot")
      ->required();
  add_store_options(*command, common);
  hide_options(*command, {"--durability", "--log-limit", "--policy", "--verify-reads"});
  finish_command(*command, common, chosen,
                 "  embermap snapshot tables /backup/tables-monday\n"
                 "  embermap snapshot tables copy --json",
                 [arguments](const Common& c) { return snapshot(*arguments, c); });
}

}  // namespace embermap::tools
