// embermap create STORE/TABLE --rows N --dim D
#include <fmt/format.h>

#include <memory>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_store.hpp"
#include "tools/new_table.hpp"
#include "tools/paths.hpp"
#include "tools/store_options.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string table, rows, dim, dtype = "float32", init = "zeros", seed = "0", page_size = "4KiB", memory;
  OptimizerArguments optimizer;
};

int create(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.table);
  TableOptions options;
  options.rows = parse_count("--rows", arguments.rows);
  options.dim = parse_count("--dim", arguments.dim);
  options.dtype = parse_dtype_option("--dtype", arguments.dtype);
  options.optimizer = arguments.optimizer.optimizer();
  options.init = parse_initializer(arguments.init);
  options.seed = parse_count("--seed", arguments.seed);
  options.page_bytes = parse_size_option("--page-size", arguments.page_size);
  if (!arguments.memory.empty()) options.memory = parse_size_option("--table-memory", arguments.memory);
  check_table_options(options);

  NewTable destination(path, store_options(common, StoreOptions::Mode::kOpenOrCreate));
  const Table table = destination.store().create(path.table, options);
  Json json = table_json(table);
  json["store"] = json_text(path.store.native());
  destination.keep();
  json["commit"] = destination.store().commit_number();
  if (common.json)
    print_json(json);
  else if (!common.quiet)
    print(fmt::format("{}: {}\n", printable(path.text()), table_line(json)));
  return kDone;
}

}  // namespace

void add_create(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("create", "Make a table of initial rows, and the store if it is not there");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("TABLE", arguments->table, "STORE/TABLE; the directory above STORE must exist")->required();
  command->add_option("--rows", arguments->rows, "Number of rows: 1000000, 1_000_000 or 1e6")->required()->type_name("N");
  command->add_option("--dim", arguments->dim, "Elements of a row")->required()->type_name("D");
  command->add_option("--dtype", arguments->dtype, "float32 (default), float16, bfloat16, float64, int8, uint8, int32, int64")
      ->type_name("NAME");
  command
      ->add_option("--init", arguments->init,
                   "What rows hold until they are written: zeros (default), constant:VALUE, uniform:LOW:HIGH, normal:MEAN:STD")
      ->type_name("KIND");
  command->add_option("--seed", arguments->seed, "Seed of uniform and normal (default 0)")->type_name("N");
  command->add_option("--page-size", arguments->page_size, "Unit of disk access: a power of two from 4KiB (default) to 2MiB")
      ->type_name("SIZE");
  command->add_option("--table-memory", arguments->memory, "What the table takes of a store's memory (default: by its size)")
      ->type_name("SIZE");
  arguments->optimizer.add_to(*command);
  add_store_options(*command, common);
  finish_command(
      *command, common, chosen,
      "  embermap create tables/items --rows 1e9 --dim 128 --optimizer adagrad --lr 0.05 --init normal:0:0.02 --seed 1\n"
      "  embermap create ./counts --rows 1_000_000 --dim 4 --dtype int64",
      [arguments](const Common& c) { return create(*arguments, c); });
}

}  // namespace embermap::tools
