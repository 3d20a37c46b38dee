// What the commands of the `embermap` tool have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/size_text.hpp"

namespace embermap::tools {

using Json = nlohmann::ordered_json;  // keys in the order in which they are written

// The exit codes of the tool; a signal exits with 128 + its number, as a shell would report it.
inline constexpr int kDone = 0, kFailed = 1, kWrongUsage = 2;

// A command line that cannot be meant: exit 2. Everything else that is thrown exits with 1.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Options every command has.
struct Common {
  bool json = false;
  bool quiet = false;
  std::string memory_text = "256MiB";
  std::uint64_t memory = 256_MiB;  // bounds buffers and hot pages; set from memory_text when the command runs
  std::string io = "auto", policy = "lru", durability = "commit", verify = "memory";
  std::string log_limit;  // empty: by the memory
  std::optional<bool> direct = {};
  bool allow_adopted = false;
};

// The command that was chosen: runs after the whole command line was parsed, returns the exit code.
using Action = std::function<int(const Common&)>;

// Adds --memory, --json, --quiet, the examples below the help, and makes `action` the chosen one when the command is given.
void finish_command(CLI::App& command, Common& common, Action& chosen, const std::string& examples, Action action);

void add_create(CLI::App& app, Common& common, Action& chosen);
void add_commits(CLI::App& app, Common& common, Action& chosen);
void add_diff(CLI::App& app, Common& common, Action& chosen);
void add_head(CLI::App& app, Common& common, Action& chosen);
void add_info(CLI::App& app, Common& common, Action& chosen);
void add_ls(CLI::App& app, Common& common, Action& chosen);
void add_import(CLI::App& app, Common& common, Action& chosen);
void add_export(CLI::App& app, Common& common, Action& chosen);
void add_convert(CLI::App& app, Common& common, Action& chosen);
void add_verify(CLI::App& app, Common& common, Action& chosen);
void add_materialize(CLI::App& app, Common& common, Action& chosen);
void add_recover(CLI::App& app, Common& common, Action& chosen);
void add_resize(CLI::App& app, Common& common, Action& chosen);
void add_remove(CLI::App& app, Common& common, Action& chosen);
void add_snapshot(CLI::App& app, Common& common, Action& chosen);
void add_bench(CLI::App& app, Common& common, Action& chosen);

}  // namespace embermap::tools
