// embermap commits STORE
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_store.hpp"
#include "tools/paths.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

Json commits_json(const std::vector<CommitInfo>& commits) {
  Json json = Json::array();
  for (const CommitInfo& commit : commits)
    json.push_back({{"commit", commit.number},
                    {"time", commit.time.empty() ? Json() : Json(json_text(commit.time))},
                    {"note", commit.note.empty() ? Json() : Json::parse(commit.note)}});
  return json;
}

std::string commits_text(const std::vector<CommitInfo>& commits) {
  if (commits.empty()) return fmt::format("{}\n", kNoCommit);
  const std::size_t width = grouped(commits.back().number).size();
  std::string text;
  for (const CommitInfo& commit : commits) {
    text +=
        fmt::format("{:>{}}  {}", grouped(commit.number), width, commit.time.empty() ? "time not known" : printable(commit.time));
    if (!commit.note.empty()) text += "  " + printable(commit.note);
    text += "\n";
  }
  return text;
}

int commits(const std::string& path, const Common& common) {
  const TablePath found = find_store_or_table(path);
  if (!found.table.empty()) throw UsageError(fmt::format("{} is a table: commits are those of its store", printable(path)));
  const std::vector<CommitInfo> list = commits_of(found.store, store_options(common, StoreOptions::Mode::kRead));
  if (common.json)
    print_json({{"kind", "commits"}, {"path", json_text(found.store.native())}, {"commits", commits_json(list)}});
  else
    print(commits_text(list));
  return kDone;
}

}  // namespace

void add_commits(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("commits", "List the last commits of a store, at most 1000, with their times and notes");
  auto path = std::make_shared<std::string>();
  command->add_option("STORE", *path, "The store")->required();
  finish_command(*command, common, chosen,
                 "  embermap commits tables\n"
                 "  embermap commits tables --json",
                 [path](const Common& c) { return commits(*path, c); });
}

}  // namespace embermap::tools
