#include "tools/store_options.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "tools/arguments.hpp"

namespace embermap::tools {

void add_store_options(CLI::App& command, Common& common) {
  const std::string group = "Disk and memory";
  command
      .add_option("--io", common.io, "How pages are read and written: auto (default: a short probe), io_uring, threads, cached")
      ->type_name("NAME")
      ->group(group);
  CLI::Option* const direct =
      command
          .add_flag_callback(
              "--direct", [&common] { common.direct = true; }, "Past the page cache (default: where the file system allows it)")
          ->group(group);
  command
      .add_flag_callback(
          "--no-direct", [&common] { common.direct = false; }, "Through the page cache")
      ->excludes(direct)
      ->group(group);
  command
      .add_option("--durability", common.durability,
                  "commit (default): all tables at the last commit after a crash; none: faster, for what can be made again")
      ->type_name("NAME")
      ->group(group);
  command
      .add_option(
          "--verify-reads", common.verify,
          "Which pages are compared with their checksums as they are read: memory (default): of tables whose checksums fit in "
          "memory; read: all, with a second read")
      ->type_name("NAME")
      ->group(group);
  command
      .add_option("--log-limit", common.log_limit,
                  "Most bytes of redo log (default: 64 times the memory, 128MiB to 16GiB, or 4 times where that is more)")
      ->type_name("SIZE")
      ->group(group);
  command
      .add_flag("--allow-adopted", common.allow_adopted,
                "Open the files outside the store that it names, though it was copied or unpacked since they were adopted, or is "
                "another user's")
      ->group(group);
  command.add_option("--policy", common.policy, "Which pages stay in memory: lru (default), s3fifo")
      ->type_name("NAME")
      ->group(group);
}

void hide_options(CLI::App& command, std::initializer_list<const char*> names) {
  for (const char* const name : names) command.get_option(name)->group("");
}

StoreOptions store_options(const Common& common, StoreOptions::Mode mode) {
  StoreOptions options{.mode = mode, .memory = common.memory};
  try {
    if (common.io != "auto") options.io = parse_io_engine(common.io);
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("--io: {}, or auto", error.what()));
  }
  const auto policy = parse_replacement(common.policy);
  if (!policy) throw UsageError(fmt::format("--policy: '{}' is none of lru, s3fifo", printable(common.policy)));
  options.replacement = *policy;
  try {
    options.durability = parse_durability(common.durability);
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("--durability: {}", error.what()));
  }
  try {
    options.verify = parse_verify(common.verify);
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("--verify-reads: {}", error.what()));
  }
  if (!common.log_limit.empty()) options.log_limit = parse_size_option("--log-limit", common.log_limit);
  options.direct = common.direct;
  if (common.allow_adopted) options.allow_adopted = true;
  return options;
}

}  // namespace embermap::tools
