// embermap export STORE/TABLE[:field] DST
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/any_rows.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string table, destination, to, dtype, vocabulary;
  DestinationArguments output;
  RangeArguments rows;
  bool accept_unclean = false, check = false;
};

// Half of the memory is for hot pages. Where a store needs more to be opened it gets all: what its error names is then what the
// user gave.
Store open_within(const std::filesystem::path& path, const Common& common, bool accept_unclean) {
  StoreOptions options = store_options(common, StoreOptions::Mode::kRead);
  options.memory = common.memory / 2;
  options.accept_unclean = accept_unclean;
  try {
    return Store::open(path, options);
  } catch (const BudgetError&) {
    options.memory = common.memory;
    return Store::open(path, options);
  }
}

int export_table(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.table, /*with_field=*/true);
  const Location destination = parse_destination("DST", arguments.destination, arguments.to);
  WriteOptions options = arguments.output.options(destination);
  std::optional<DType> to;
  if (!arguments.dtype.empty()) to = parse_dtype_option("--dtype", arguments.dtype);

  const auto begin = std::chrono::steady_clock::now();
  Store store = open_within(path.store, common, arguments.accept_unclean);
  const Table table = store.table(path.table);
  if (same_file(table.file(), destination.file))
    throw InvalidArgument(fmt::format("{} is the file of the table {} itself; it is not replaced", printable(destination.file),
                                      printable(path.text())));
  check_destination(destination, {}, options.overwrite);
  const std::unique_ptr<RowReader> reader = arguments.rows.apply(table_rows(table, path.field));
  if (arguments.rows.given() && format_has_words(destination.format) && arguments.vocabulary != "none")
    throw UsageError("--rows: a vocabulary is of all rows; --vocab none gives them their numbers");
  check_vocabulary_option(arguments.vocabulary, format_has_words(destination.format));
  WordTransfer words({.vocabulary = arguments.vocabulary,
                      .destination_has_words = format_has_words(destination.format),
                      .source = path.store / path.table,
                      .destination = destination.file});
  words.begin(reader->rows());
  options.words = words.source();
  TransferResult result{.source = arguments.table,
                        .destination = arguments.destination,
                        .rows = reader->rows(),
                        .dim = reader->dim(),
                        .from = reader->dtype(),
                        .to = to.value_or(reader->dtype()),
                        .report = {},
                        .seconds = 0};
  {
    options.attributes = {{"source", arguments.table},
                          {"source_dtype", std::string(dtype_name(result.from))},
                          {"commit", fmt::format("{}", store.commit_number())}};
    const std::unique_ptr<RowWriter> writer = create_rows(destination, result.rows, result.dim, result.to, options);
    ProgressLine line("export " + path.table, result.dim * item_size(result.to), common.quiet);
    result.report = copy_rows(*reader, *writer, result.to, copy_memory(*reader, result.to, common.memory, 4), line.callback());
    check_interrupt();
    writer->finish();
  }
  if (arguments.check) {
    const std::unique_ptr<RowReader> before = arguments.rows.apply(table_rows(table, path.field));
    const std::unique_ptr<RowReader> after = open_written(destination, {.dtype = result.to, .dim = result.dim});
    check_written(*before, *after, result.to, !format_has_words(destination.format), arguments.destination, common.memory / 2);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Json extra{{"field", json_text(path.field)}, {"commit", store.commit_number()}};
  if (arguments.check) extra["checked"] = true;
  print_transfer(common, result, extra);
  return kDone;
}

}  // namespace

void add_export(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("export", "Write the rows of a table, or of one field of it, to a file");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("TABLE", arguments->table, "STORE/TABLE, or STORE/TABLE:field for the state of its optimizer")->required();
  command->add_option("DST", arguments->destination, kDestinationHelp)->required();
  add_to_option(*command, arguments->to);
  command->add_option("--dtype", arguments->dtype, "Convert the rows (nearest even)")->type_name("NAME");
  add_vocabulary_option(*command, arguments->vocabulary,
                        "The words of the rows for a DST with words, one a line (default STORE/TABLE.vocab.txt); 'none': the "
                        "numbers of the rows");
  arguments->output.add_to(*command);
  arguments->rows.add_to(*command);
  command->add_flag("--check", arguments->check, "Read DST back and compare it with the table");
  command->add_flag("--accept-unclean", arguments->accept_unclean,
                    "Take rows as they are after a session that ended without commit");
  add_store_options(*command, common);
  hide_options(*command, {"--durability", "--log-limit", "--policy"});  // rows are read once, in order
  finish_command(*command, common, chosen,
                 "  embermap export tables/items items.npy\n"
                 "  embermap export tables/items:sum state.h5:/items/sum --gzip 4\n"
                 "  embermap export tables/items small.npy --dtype float16 --overwrite\n"
                 "  embermap export tables/items model.safetensors:items\n"
                 "  embermap export tables/words words.vec --vocab words.txt",
                 [arguments](const Common& c) { return export_table(*arguments, c); });
}

}  // namespace embermap::tools
