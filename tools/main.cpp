// The `embermap` command: parses the command line, runs the chosen command, turns whatever happens into one line and an exit
// code.
#include <fmt/format.h>
#include <malloc.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "io/rows.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"

namespace embermap::tools {

void finish_command(CLI::App& command, Common& common, Action& chosen, const std::string& examples, Action action) {
  command.add_option("--memory", common.memory_text, "Most memory for buffers and hot pages (default 256MiB)")->type_name("SIZE");
  command.add_flag("--json", common.json, "Print one JSON object on standard output");
  command.add_flag("--quiet,-q", common.quiet, "No progress and no result line; warnings and errors stay");
  command.footer("Examples:\n" + examples);
  command.callback([&chosen, action = std::move(action)] { chosen = action; });
}

namespace {

constexpr const char* kOverview =
    R"(Tables of embeddings larger than memory, in .npy files: made, inspected, and turned from and into files of other programs.

Paths: a table is STORE/TABLE (a directory and a name); rows of other programs are x.npy, x.npy:field,
x.h5:/path/to/dataset and the like (`embermap ls FILE`).)";

std::string help_hint(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "embermap --help" : fmt::format("embermap {} --help", chosen.front()->get_name());
}

// What is wrong with the command line, where the parser would say it badly: a word that is no command is only "a subcommand is
// required" to it, and it lists unexpected arguments from the last to the first.
std::string usage_text(const CLI::App& app, const CLI::ParseError& error) {
  const auto chosen = app.get_subcommands();
  const std::vector<std::string> unexpected = app.remaining(/*recurse=*/true);
  if (chosen.empty() && !unexpected.empty() && !unexpected.front().starts_with('-'))
    return fmt::format("unknown command '{}'", printable(unexpected.front()));
  if (dynamic_cast<const CLI::ExtrasError*>(&error) == nullptr || unexpected.empty()) return error.what();
  std::string text = unexpected.size() == 1 ? "unexpected argument" : "unexpected arguments";
  for (const std::string& argument : unexpected) text += fmt::format(" '{}'", printable(argument));
  return text;
}

int run(int argc, char** argv) {
  CLI::App app(kOverview, "embermap");
  app.set_version_flag("--version", "embermap " EMBERMAP_VERSION);
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + signal when stopped; of diff 1 differ, 2 failed.\n'embermap COMMAND "
      "--help' shows a command's "
      "options.");
  Common common;
  Action action;
  add_create(app, common, action);
  add_info(app, common, action);
  add_ls(app, common, action);
  add_head(app, common, action);
  add_diff(app, common, action);
  add_commits(app, common, action);
  add_import(app, common, action);
  add_export(app, common, action);
  add_convert(app, common, action);
  add_verify(app, common, action);
  add_materialize(app, common, action);
  add_recover(app, common, action);
  add_resize(app, common, action);
  add_remove(app, common, action);
  add_snapshot(app, common, action);
  add_bench(app, common, action);

  try {
    try {
      app.parse(argc, argv);
      common.memory = parse_size_option("--memory", common.memory_text);
      // Not found out after an hour of work.
      if (!can_print() && (common.json || !common.quiet)) throw IoError(EBADF, "write", "standard output");
      return action(common);
    } catch (const CLI::CallForHelp&) {
      const auto chosen = app.get_subcommands();
      print(chosen.empty() ? app.help() : chosen.front()->help("embermap"));
      return kDone;
    } catch (const CLI::CallForVersion& version) {
      print(fmt::format("{}\n", version.what()));
      return kDone;
    } catch (const CLI::ParseError& error) {
      throw UsageError(usage_text(app, error));
    } catch (const CLI::Error& error) {
      throw UsageError(error.what());
    }
  } catch (const UsageError& error) {
    report_error(fmt::format("{} (see '{}')", error.what(), help_hint(app)));
    return kWrongUsage;
  } catch (const Interrupted& interrupted) {
    report_error(fmt::format("stopped by {}", interrupted.signal == SIGINT    ? "SIGINT"
                                              : interrupted.signal == SIGTERM ? "SIGTERM"
                                                                              : "SIGHUP"));
    return 128 + interrupted.signal;
  } catch (const std::bad_alloc&) {
    report_error(fmt::format("out of memory (--memory {})", common.memory_text));
  } catch (const std::filesystem::filesystem_error& error) {
    report_error(fmt::format("{}: {}", printable(error.path1()), error.code().message()));
  } catch (const std::exception& error) {
    report_error(error.what());
  }
  return kFailed;
}

}  // namespace
}  // namespace embermap::tools

// NOLINTNEXTLINE(bugprone-exception-escape): nothing but memory can fail before run() catches
namespace {

// Each thread that allocates would get an arena of its own, 64 MiB of addresses of which it uses little: under `ulimit -v` they
// would be missing for what is used.
void spare_addresses() {
  struct rlimit limit {};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) ::mallopt(M_ARENA_MAX, 1);
}

}  // namespace

int main(int argc, char** argv) {
  spare_addresses();
  embermap::tools::claim_standard_descriptors();
  embermap::tools::catch_signals();
  embermap::leave_hdf5_at_exit();
  return embermap::tools::run(argc, argv);
}
