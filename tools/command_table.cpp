// embermap materialize, recover, resize, remove: one call each.
#include <fmt/format.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/vocabulary.hpp"
#include "store/store.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_store.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string path, rows;
  bool dry_run = false;
};

Store open_writable(const std::filesystem::path& path, const Common& common) {
  return Store::open(path, store_options(common, StoreOptions::Mode::kReadWrite));
}

void commit_what_there_is(Store& store) noexcept {
  try {
    store.close();
  } catch (const std::exception&) {  // the disk is full or failing: the error that led here is the one to tell
  }
}

int materialize(const Arguments& arguments, const Common& common) {
  const TablePath path = find_store_or_table(arguments.path);
  Store store = open_writable(path.store, common);
  Json tables = Json::array();
  std::string text, broken;
  for (const std::string& name : chosen_tables(store, path.table)) {
    std::optional<Table> table;
    try {
      table = store.table(name);
    } catch (const Error& error) {  // the others are written all the same
      tables.push_back(broken_table_json(name, error.what()));
      text += fmt::format("{}: {}\n", printable(name), error.what());
      broken += fmt::format("{}'{}': {}", broken.empty() ? "" : "; ", printable(name), error.what());
      continue;
    }
    const std::uint64_t before = table->written_pages();
    try {
      ProgressLine line("materialize " + name, table->geometry().page_bytes(), common.quiet);
      table->materialize(line.callback());
    } catch (...) {
      // The pages written so far hold the rows they always stood for: with them committed, the store is whole and the rest can
      // follow.
      commit_what_there_is(store);
      throw;
    }
    const std::uint64_t pages = table->written_pages() - before;
    tables.push_back(table_json(*table));
    tables.back()["pages_made"] = pages;
    text += fmt::format("{}: {} pages written, all {} are in the file\n", printable(name), grouped(pages),
                        grouped(table->geometry().pages()));
  }
  store.close();
  if (common.json)
    print_json({{"path", json_text(path.store.native())}, {"ok", broken.empty()}, {"tables", std::move(tables)}});
  else if (!common.quiet)
    print(text);
  if (!broken.empty()) throw CorruptError(fmt::format("{}: not materialised: {}", printable(path.store), broken));
  return kDone;
}

// What opening the store for writing would do, without doing it.
int plan(const std::filesystem::path& store, const Common& common) {
  const RecoveryPlan plan = plan_recovery(store, store_options(common, StoreOptions::Mode::kReadWrite).allow_adopted);
  Json pages = Json::object(), broken = Json::object();
  std::string text;
  for (const auto& [name, count] : plan.pages) {
    pages[name] = count;
    text += fmt::format("  {}: {} pages from the log\n", printable(name), grouped(count));
  }
  const bool nothing = text.empty();
  for (const auto& [name, why] : plan.broken) {
    broken[json_text(name)] = json_text(why);
    text += fmt::format("  {} cannot be opened: {}\n", printable(name), why);
  }
  const auto text_or_null = [](const std::string& why) { return why.empty() ? Json(nullptr) : Json(json_text(why)); };
  if (common.json) {
    print_json({{"path", json_text(store.native())},
                {"writer", plan.writer},
                {"unclean", plan.unclean},
                {"log_gone", text_or_null(plan.log_gone)},
                {"mixed", text_or_null(plan.mixed)},
                {"commit", plan.commit},
                {"log_bytes", plan.log_bytes},
                {"pages", std::move(pages)},
                {"broken", std::move(broken)}});
  } else if (!common.quiet) {
    const std::string what =
        plan.writer ? "a writer is at work; nothing to recover"
        : !plan.log_gone.empty()
            ? fmt::format(
                  "the redo log is gone or damaged, which had later commits: {}. Bring {} back from a copy to "
                  "have them; 'embermap recover' without --dry-run takes the tables as they are, "
                  "which may mix rows of several commits",
                  plan.log_gone, printable(store / "redo.log"))
        : !plan.mixed.empty()
            ? fmt::format("files of several moments: {}. Without --dry-run they are taken as they are", plan.mixed)
        : plan.unclean ? "a session without log ended without commit: tables would be taken as they are"
        : nothing      ? "nothing to recover"
                       : fmt::format("{} of commits in the log would go to the tables", format_size(plan.log_bytes));
    const std::string commit = plan.commit == 0 ? "before its first commit" : fmt::format("at commit {}", plan.commit);
    print(fmt::format("{}: {}; {}\n{}", printable(store), commit, what, text));
  }
  return kDone;
}

int recover(const Arguments& arguments, const Common& common) {
  const TablePath path = find_store_or_table(arguments.path);
  if (!path.table.empty())
    throw UsageError(fmt::format("{} is a table; a store is recovered as a whole", printable(path.text())));
  if (arguments.dry_run) return plan(path.store, common);
  StoreOptions options = store_options(common, StoreOptions::Mode::kReadWrite);
  ProgressLine line("recover", kMinPageBytes, common.quiet);
  std::uint64_t pages = 0;
  options.recovery = [&, show = line.callback()](std::uint64_t done, std::uint64_t total) {
    pages = total;
    if (show) show(done, total);
  };
  std::optional<std::string> reason;
  std::optional<Store> store;
  try {
    store.emplace(Store::open(path.store, options));
  } catch (const CorruptError& error) {
    reason = error.what();
    options.accept_unclean = true;
    store.emplace(Store::open(path.store, options));
  }
  const std::uint64_t commit = store->commit_number();
  const std::filesystem::path aside = store->damaged_log();
  store->close();
  if (common.json)
    print_json({{"path", json_text(path.store.native())},
                {"recovered", reason.has_value() || pages != 0},
                {"reason", reason ? Json(json_text(*reason)) : Json(nullptr)},
                {"damaged_log", aside.empty() ? Json(nullptr) : Json(json_text(aside.native()))},
                {"pages", pages},
                {"commit", commit}});
  else if (!common.quiet)
    print(fmt::format("{}: {}\n", printable(path.store),
                      reason       ? fmt::format("took the tables as they were: {}{}", *reason,
                                           aside.empty() ? "" : fmt::format("; it is kept as {}", printable(aside)))
                            : pages != 0 ? fmt::format("at commit {}; {} pages went from the log to the tables", commit, grouped(pages))
                                   : "nothing to recover"));
  return kDone;
}

int resize(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.path);
  const std::uint64_t rows = parse_count("--rows", arguments.rows);
  Store store = open_writable(path.store, common);
  Table table = store.table(path.table);
  const std::uint64_t before = table.rows();
  table.resize(rows);
  Json json = table_json(table);
  json["store"] = json_text(path.store.native());
  json["rows_before"] = before;
  store.close();
  if (common.json)
    print_json(json);
  else if (!common.quiet)
    print(fmt::format("{}: {} rows, before {}\n", printable(path.text()), grouped(rows), grouped(before)));
  return kDone;
}

int remove(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.path);
  Store store = open_writable(path.store, common);
  chosen_tables(store, path.table);
  Json json{{"name", json_text(path.table)}, {"store", json_text(path.store.native())}};
  std::string what;
  try {
    const Table table = store.table(path.table);
    json.update({{"rows", table.rows()},
                 {"dim", table.dim()},
                 {"file", json_text(table.file().native())},
                 {"file_kept", table.adopted()},
                 {"error", nullptr}});
    if (table.adopted()) what = fmt::format("; its file {} stays", printable(table.file()));
  } catch (const Error& error) {  // a broken table can be removed, but not described
    for (const char* unknown : {"rows", "dim", "file", "file_kept"}) json[unknown] = nullptr;
    json["error"] = json_text(error.what());
    what = fmt::format("; it was broken: {}", error.what());
  }
  store.remove(path.table);
  store.close();
  // The words of its rows, which an import has put beside it.
  const std::filesystem::path vocabulary = vocabulary_beside(path.store / path.table);
  if (unlink(vocabulary.c_str()) != 0 && errno != ENOENT) throw IoError(errno, "unlink", vocabulary);
  if (common.json)
    print_json(json);
  else if (!common.quiet)
    print(fmt::format("{}: removed{}\n", printable(path.text()), what));
  return kDone;
}

void add_command(CLI::App& app, Common& common, Action& chosen, const std::string& name, const std::string& help,
                 const std::string& path_help, const std::string& examples, const std::shared_ptr<Arguments>& arguments,
                 int (*run)(const Arguments&, const Common&), const std::function<void(CLI::App&)>& add_options = nullptr) {
  auto* command = app.add_subcommand(name, help);
  command->add_option("PATH", arguments->path, path_help)->required();
  if (add_options) add_options(*command);
  add_store_options(*command, common);
  finish_command(*command, common, chosen, examples, [arguments, run](const Common& c) { return run(*arguments, c); });
}

}  // namespace

void add_materialize(CLI::App& app, Common& common, Action& chosen) {
  add_command(app, common, chosen, "materialize", "Write initial rows out, so that the .npy alone holds all rows",
              "STORE (all tables) or STORE/TABLE", "  embermap materialize tables/items", std::make_shared<Arguments>(),
              materialize);
}

void add_recover(CLI::App& app, Common& common, Action& chosen) {
  auto arguments = std::make_shared<Arguments>();
  const auto add_dry_run = [&](CLI::App& command) {
    command.add_flag("--dry-run", arguments->dry_run, "Tell what would be done, and change nothing");
  };
  add_command(
      app, common, chosen, "recover",
      "Do now what opening a store does after a crash: apply the commits in its log. A store without log whose last session "
      "ended without commit is taken as it is: its rows may mix the last commit and later ones",
      "STORE", "  embermap recover --dry-run tables\n  embermap recover tables", arguments, recover, add_dry_run);
}

void add_resize(CLI::App& app, Common& common, Action& chosen) {
  auto arguments = std::make_shared<Arguments>();
  const auto add_rows = [&](CLI::App& command) {
    command.add_option("--rows", arguments->rows, "The new number of rows")->required()->type_name("N");
  };
  add_command(app, common, chosen, "resize", "Change the number of rows; rows beyond the new end are gone for good",
              "STORE/TABLE", "  embermap resize tables/items --rows 2e9", arguments, resize, add_rows);
}

void add_remove(CLI::App& app, Common& common, Action& chosen) {
  add_command(app, common, chosen, "remove", "Delete a table and its files, its vocabulary too; a file used in place stays",
              "STORE/TABLE", "  embermap remove tables/items", std::make_shared<Arguments>(), remove);
}

}  // namespace embermap::tools
