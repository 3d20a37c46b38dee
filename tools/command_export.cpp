// embermap export STORE/TABLE[:field] DST
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <system_error>

#include "base/error.hpp"
#include "io/array_file.hpp"
#include "io/copy_file.hpp"
#include "io/same_file.hpp"
#include "io/vocabulary.hpp"
#include "store/store.hpp"
#include "store/table_archive.hpp"
#include "store/table_import.hpp"
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
  std::string table, destination, to, dtype, vocabulary, fields;
  SelectionArguments rows;
  DestinationArguments output;
  bool accept_unclean = false, all = false, optimizer_state = false;
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

// Everything of a table, or what torch.optim keeps of it.
int export_whole(const Arguments& arguments, const Common& common, const TablePath& path, const Store& store, const Table& table,
                 const Location& destination, const CopyOptions& options, std::chrono::steady_clock::time_point begin) {
  const char* const flag = arguments.all ? "--all" : "--optimizer-state";
  if (arguments.all && arguments.optimizer_state) throw UsageError("--all and --optimizer-state are two ways; choose one");
  if (path.field != "weight" || !arguments.fields.empty())
    throw UsageError(fmt::format("{} exports all fields; name none", flag));
  if (arguments.optimizer_state && options.check) throw UsageError("--check is not for --optimizer-state");
  if (options.dtype || !options.rows.order.empty() || options.rows.first != 0 || options.rows.end || options.resume)
    throw UsageError(fmt::format("{} exports the table as it is: not with --dtype, --rows, --order or --resume", flag));
  ArchiveOptions whole{.overwrite = options.overwrite,
                       .gzip = options.gzip,
                       .check = options.check,
                       .vocabulary = {},
                       .memory = common.memory / 2,
                       .progress = {},
                       .before_finish = check_interrupt};
  const std::filesystem::path words = vocabulary_beside(path.store / path.table);
  std::error_code ignored;
  if (arguments.all && arguments.vocabulary != "none") {
    if (!arguments.vocabulary.empty())
      whole.vocabulary = arguments.vocabulary;
    else if (std::filesystem::exists(words, ignored))
      whole.vocabulary = words;
  } else if (!arguments.all && !arguments.vocabulary.empty()) {
    throw UsageError("--vocab: the state of an optimizer has no words");
  }
  {
    ProgressLine line("export " + path.table, table.dim() * item_size(table.dtype()), common.quiet);
    whole.progress = line.callback();
    if (arguments.all)
      export_table(table, destination, whole);
    else
      export_torch_state(table, destination, whole);
  }
  const TransferResult result{.source = arguments.table,
                              .destination = arguments.destination,
                              .rows = table.rows(),
                              .dim = table.dim(),
                              .from = table.dtype(),
                              .to = table.dtype(),
                              .report = {},
                              .seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
  Json fields = Json::array();
  for (const Field& field : table.schema().fields())
    if (arguments.all || field.name != "weight") fields.push_back(field.name);
  Json extra{{"fields", std::move(fields)}, {"step", table.step()}, {"commit", store.commit_number()}};
  if (!whole.vocabulary.empty()) extra["vocabulary"] = json_text(whole.vocabulary.native());
  if (options.check) extra["checked"] = true;
  print_transfer(common, result, extra);
  return kDone;
}

int export_rows(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.table, /*with_field=*/true);
  const Location destination = parse_destination("DST", arguments.destination, arguments.to);
  CopyOptions options;
  options.dtype = optional_dtype("--dtype", arguments.dtype);
  options.rows = arguments.rows.selection(/*permutation=*/false);
  options.vocabulary = arguments.vocabulary;
  options.memory = common.memory / 2;
  arguments.output.set(options, destination);
  const bool whole = arguments.all || arguments.optimizer_state;
  const bool several = !arguments.fields.empty();
  std::vector<NamedField> fields;
  if (several) {
    if (path.field != "weight")
      throw UsageError(fmt::format("TABLE names the field '{}' and --field others", printable(path.field)));
    fields = parse_fields(arguments.fields);
  }

  const auto begin = std::chrono::steady_clock::now();
  Store store = open_within(path.store, common, arguments.accept_unclean);
  const Table table = store.table(path.table);
  if (same_file(table.file(), destination.file))
    throw InvalidArgument(fmt::format("{} is the file of the table {} itself; it is not replaced", printable(destination.file),
                                      printable(path.text())));
  check_destination(destination, {}, options.overwrite, whole || fields.size() > 1);
  if (whole) return export_whole(arguments, common, path, store, table, destination, options, begin);
  check_vocabulary_option(arguments.vocabulary, format_has_words(destination.format));
  options.attributes = {{"source", arguments.table}, {"commit", fmt::format("{}", store.commit_number())}};
  std::optional<ProgressLine> line;
  options.began = [&](std::uint64_t row_bytes) { line.emplace("export " + path.table, row_bytes, common.quiet); };
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (line) line->callback()(done, total);
  };
  options.before_finish = check_interrupt;
  std::vector<CopyResult> copied;
  if (fields.size() > 1) {
    std::vector<RowOrigin> origins;
    std::vector<std::string> names;
    for (const NamedField& one : fields) {
      origins.push_back(table_origin(path.store / path.table, store.commit_number(), table, one.field));
      names.push_back(one.name);
    }
    copied = copy_arrays(origins, names, destination, options);
  } else {
    const std::string field = several ? fields.front().field : path.field;
    copied.push_back(copy_file(table_origin(path.store / path.table, store.commit_number(), table, field), destination, options));
  }
  line.reset();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Json extra{{"field", json_text(several ? fields.front().field : path.field)}, {"commit", store.commit_number()}};
  print_transfers(common, arguments.table, arguments.destination, copied, fields.size() > 1 ? fields : std::vector<NamedField>{},
                  options.check, seconds, extra);
  return kDone;
}

}  // namespace

void add_export(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("export", "Write the rows of a table, or fields of it, or all of it, to a file");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("TABLE", arguments->table, "STORE/TABLE, or STORE/TABLE:field for the state of its optimizer")->required();
  command->add_option("DST", arguments->destination, kDestinationHelp)->required();
  add_to_option(*command, arguments->to);
  add_dtype_option(*command, arguments->dtype, /*names_bytes=*/false);
  command
      ->add_option("--field", arguments->fields,
                   "These fields, weight or state of the optimizer; several into one new DST (npz, hdf5, safetensors, torch), "
                   "each an array of its name, or of NAME for FIELD=NAME")
      ->type_name("A,B,...");
  command->add_flag(
      "--all", arguments->all,
      "Rows, all state of the optimizer with its options and steps, and the vocabulary into one new DST (npz, hdf5, "
      "safetensors, torch), of which 'embermap import --all' makes the table again");
  command->add_flag("--optimizer-state", arguments->optimizer_state,
                    "What torch.optim's optimizer of this kind keeps, as torch.save(optimizer.state_dict()) writes it, the table "
                    "its parameter 0");
  add_vocabulary_option(*command, arguments->vocabulary,
                        "The words of the rows for a DST with words, one a line (default STORE/TABLE.vocab.txt); 'none': the "
                        "numbers of the rows");
  arguments->output.add_to(*command);
  arguments->rows.add_to(*command,
                         "Row i of DST is row FILE[i] of the table: integers in any format, .txt too, any rows in any order; the "
                         "place of each row of the table goes to DST.order.npy, -1 for none");
  command->add_flag("--accept-unclean", arguments->accept_unclean,
                    "Take rows as they are after a session that ended without commit");
  add_store_options(*command, common);
  hide_options(*command, {"--durability", "--log-limit", "--policy"});  // rows are read once, in order
  finish_command(*command, common, chosen,
                 "  embermap export tables/items items.npy\n"
                 "  embermap export tables/items:sum state.h5:/items/sum --gzip 4\n"
                 "  embermap export tables/items items.npz --field weight,sum\n"
                 "  embermap export tables/items items.safetensors --all\n"
                 "  embermap export tables/items optimizer.pt --optimizer-state\n"
                 "  embermap export tables/items small.npy --dtype float16 --overwrite\n"
                 "  embermap export tables/words words.vec --vocab words.txt",
                 [arguments](const Common& c) { return export_rows(*arguments, c); });
}

}  // namespace embermap::tools
