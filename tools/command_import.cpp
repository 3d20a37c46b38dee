// embermap import SRC STORE/TABLE
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/describe_store.hpp"
#include "tools/new_table.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string source, table, from, field, dtype, source_dtype, vocabulary, page_size = "4KiB";
  LayoutArguments layout;
  OptimizerArguments optimizer;
  bool in_place = false, read_only = false, allow_external = false;
};

std::optional<DType> optional_dtype(std::string_view option, const std::string& text) {
  if (text.empty()) return std::nullopt;
  return parse_dtype_option(option, text);
}

Location source_location(const Arguments& arguments) {
  Location source = parse_source("SRC", arguments.source, arguments.from);
  if (arguments.field.empty()) return source;
  if (!source.selector.empty() && source.selector != arguments.field)
    throw UsageError(
        fmt::format("SRC names '{}' and --field names '{}'", printable(source.selector), printable(arguments.field)));
  source.selector = arguments.field;
  return source;
}

Json result_json(const Common& common, const TablePath& path, const Table& table) {
  Json json{{"table", table_json(table)}};
  json["table"]["store"] = json_text(path.store.native());
  json["memory"] = common.memory;
  return json;
}

int adopt(const Arguments& arguments, const Common& common, const Location& source, const TablePath& path) {
  if (!arguments.vocabulary.empty()) throw UsageError("--vocab: a .npy file, used in place, has no words");
  if (source.format != Location::Format::kNpy) throw UsageError("--in-place takes a .npy file; others are imported as a copy");
  if (!source.selector.empty()) throw UsageError("--in-place takes a whole .npy file, not a field of one");
  if (!std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--in-place leaves the file as it is, so there is no place for the state of an optimizer");
  std::optional<DType> dtype = optional_dtype("--dtype", arguments.dtype);
  if (const auto named = optional_dtype("--source-dtype", arguments.source_dtype)) dtype = named;
  require_regular_file(source.file);

  const auto begin = std::chrono::steady_clock::now();
  NewTable destination(path, store_options(common, StoreOptions::Mode::kOpenOrCreate));
  const Table table = destination.store().adopt(path.table, source.file, !arguments.read_only, dtype);
  TransferResult result{.source = arguments.source,
                        .destination = path.text(),
                        .rows = table.rows(),
                        .dim = table.dim(),
                        .from = table.dtype(),
                        .to = table.dtype(),
                        .report = {},
                        .seconds = 0};
  Json extra = result_json(common, path, table);
  extra["in_place"] = true;
  extra["writable"] = table.writable();
  destination.keep();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print_transfer(common, result, extra);
  return kDone;
}

int import(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.table);
  const Location source = source_location(arguments);
  const std::optional<DType> to = optional_dtype("--dtype", arguments.dtype);
  const std::optional<DType> as = optional_dtype("--source-dtype", arguments.source_dtype);
  TableOptions options;
  options.optimizer = arguments.optimizer.optimizer();
  options.page_bytes = parse_size_option("--page-size", arguments.page_size);
  if (arguments.in_place) return adopt(arguments, common, source, path);
  if (arguments.read_only) throw UsageError("--read-only needs --in-place");

  const auto begin = std::chrono::steady_clock::now();
  require_regular_file(source.file);
  check_source_is_whole(source, common.memory / 4);
  check_vocabulary_option(arguments.vocabulary, format_has_words(source.format));
  // The vocabulary in the store is the table's: one that is there while the table is not was left behind.
  const WordTransfer::Options of_words{.vocabulary = arguments.vocabulary,
                                       .source_has_words = format_has_words(source.format),
                                       .source = source.file,
                                       .destination = path.store / path.table,
                                       .overwrite = arguments.vocabulary.empty()};
  std::optional<WordTransfer> words(std::in_place, of_words);
  ReadOptions reading{.dtype = as, .allow_external = arguments.allow_external, .words = words->sink()};
  arguments.layout.set(reading, source);
  const std::unique_ptr<RowReader> reader = open_rows_as(source, to, reading);
  options.rows = reader->rows();
  options.dim = reader->dim();
  options.dtype = to.value_or(reader->dtype());
  const Geometry geometry = check_table_options(options);
  ConvertingReader converted(*reader, options.dtype, common.memory / 4);
  TransferResult result{.source = arguments.source,
                        .destination = path.text(),
                        .rows = reader->rows(),
                        .dim = reader->dim(),
                        .from = reader->dtype(),
                        .to = options.dtype,
                        .report = {},
                        .seconds = 0,
                        .remarks = reader->remarks()};

  StoreOptions opening = store_options(common, StoreOptions::Mode::kOpenOrCreate);
  opening.memory /= 2;
  NewTable destination(path, opening);
  check_free_space(path.store, path.store / (path.table + ".npy"), geometry.file_bytes());
  // Half of a vocabulary in the store's directory goes before that does, where this fails.
  const std::unique_ptr<std::optional<WordTransfer>, void (*)(std::optional<WordTransfer>*)> words_end(
      &words, [](std::optional<WordTransfer>* w) { w->reset(); });
  words->begin(reader->rows());
  Json extra;
  {
    ProgressLine line("import " + path.table, reader->dim() * item_size(options.dtype), common.quiet);
    const Table table = destination.store().import(path.table, converted, options, line.callback());
    extra = result_json(common, path, table);
  }
  extra["in_place"] = false;
  extra.update(vocabulary_json(*words));
  result.report = converted.report();
  words->finish();
  try {
    destination.keep();
  } catch (...) {
    words->withdraw();
    throw;
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print_transfer(common, result, extra);
  return kDone;
}

}  // namespace

void add_import(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("import", "Make a table from the rows of a file");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SRC", arguments->source, kSourceHelp)->required();
  command->add_option("TABLE", arguments->table, "STORE/TABLE, which must not exist; the store is made if it is not there")
      ->required();
  add_from_option(*command, arguments->from);
  command->add_option("--field", arguments->field, "The field of a structured SRC, as x.npy:field")->type_name("NAME");
  command
      ->add_option("--dtype", arguments->dtype, "Convert the rows (nearest even); bfloat16 also names bytes the file cannot name")
      ->type_name("NAME");
  command->add_option("--source-dtype", arguments->source_dtype, "What bytes of SRC are that it does not say: V2, opaque, raw")
      ->type_name("NAME");
  command->add_option("--page-size", arguments->page_size, "Unit of disk access: a power of two from 4KiB (default) to 2MiB")
      ->type_name("SIZE");
  command->add_flag("--in-place", arguments->in_place, "Use the .npy file where it is instead of a copy; training writes to it");
  command->add_flag("--read-only", arguments->read_only, "With --in-place: never write to the file");
  command->add_flag("--allow-external", arguments->allow_external,
                    "Read HDF5 datasets whose bytes lie in other files, below the folder of SRC");
  arguments->layout.add_to(*command);
  add_vocabulary_option(*command, arguments->vocabulary,
                        "Where the words of SRC are written, one a line (default STORE/TABLE.vocab.txt); 'none': nowhere");
  arguments->optimizer.add_to(*command);
  add_store_options(*command, common);
  finish_command(*command, common, chosen,
                 "  embermap import vectors.npy tables/items --optimizer adagrad --lr 0.05\n"
                 "  embermap import model.h5:/embeddings/words tables/words --dtype float16\n"
                 "  embermap import glove.6B.100d.txt tables/glove\n"
                 "  embermap import huge.npy tables/huge --in-place --read-only",
                 [arguments](const Common& c) { return import(*arguments, c); });
}

}  // namespace embermap::tools
