// embermap import SRC STORE/TABLE
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <system_error>

#include "base/error.hpp"
#include "io/copy_file.hpp"
#include "io/partial_rows.hpp"
#include "io/row_order.hpp"
#include "io/vocabulary.hpp"
#include "store/store.hpp"
#include "store/table_archive.hpp"
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
  std::string source, table, fields, dtype, vocabulary, parameter, page_size = "4KiB";
  SourceArguments input;
  SelectionArguments rows;
  OptimizerArguments optimizer;
  bool in_place = false, read_only = false, all = false, optimizer_state = false, check = false, resume = false;
};

// SRC, with the only field that --field names.
Location source_location(const Arguments& arguments, const std::vector<NamedField>& fields) {
  Location source = arguments.input.location(arguments.source);
  if (fields.empty()) return source;
  if (!source.selector.empty() && (fields.size() > 1 || source.selector != fields.front().name))
    throw UsageError(
        fmt::format("SRC names '{}' and --field names '{}'", printable(source.selector), printable(arguments.fields)));
  if (fields.size() == 1) source.selector = fields.front().name;
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
  if (arguments.rows.selection(true).order != "")
    throw UsageError("--in-place leaves the file as it is; --order is for a copy of it");
  std::optional<DType> dtype = optional_dtype("--dtype", arguments.dtype);
  if (const auto named = arguments.input.dtype()) dtype = named;
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

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TransferResult result_of(const Arguments& arguments, const TablePath& path, const Table& table) {
  return {.source = arguments.source,
          .destination = path.text(),
          .rows = table.rows(),
          .dim = table.dim(),
          .from = table.dtype(),
          .to = table.dtype(),
          .report = {},
          .seconds = 0};
}

// A table that `embermap export --all` wrote.
int import_whole(const Arguments& arguments, const Common& common, const Location& source, const TablePath& path) {
  if (!arguments.fields.empty() || !source.selector.empty()) throw UsageError("--all imports all fields; name none");
  if (!std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--optimizer: SRC says what the table was trained with");
  const RowSelection rows = arguments.rows.selection(true);
  if (!arguments.dtype.empty() || !rows.order.empty() || arguments.resume)
    throw UsageError("--all makes the table as it was: not with --dtype, --order or --resume");
  if (!arguments.vocabulary.empty() && arguments.vocabulary != "none")
    throw UsageError("--vocab: the words are in SRC; 'none' leaves them out");
  const auto begin = std::chrono::steady_clock::now();
  StoreOptions opening = store_options(common, StoreOptions::Mode::kOpenOrCreate);
  opening.memory /= 2;
  NewTable destination(path, opening);
  const std::filesystem::path words =
      arguments.vocabulary == "none" ? std::filesystem::path{} : vocabulary_beside(path.store / path.table);
  Json extra;
  TransferResult result;
  {
    ProgressLine line("import " + path.table, 0, common.quiet);
    const Table table = import_table(destination.store(), path.table, source, words, common.memory / 2, line.callback());
    extra = result_json(common, path, table);
    result = result_of(arguments, path, table);
  }
  extra["in_place"] = false;
  extra["all"] = true;
  std::error_code ignored;
  if (!words.empty() && std::filesystem::exists(words, ignored)) extra["vocabulary"] = json_text(words.native());
  try {
    destination.keep();
  } catch (...) {
    if (!words.empty()) std::filesystem::remove(words, ignored);
    throw;
  }
  result.seconds = seconds_since(begin);
  print_transfer(common, result, extra);
  return kDone;
}

// State of torch.optim onto a table that is there.
int import_state(const Arguments& arguments, const Common& common, const Location& source, const TablePath& path) {
  if (!arguments.fields.empty() || !source.selector.empty() || !arguments.dtype.empty() || !arguments.vocabulary.empty() ||
      arguments.all || arguments.resume || !arguments.rows.selection(true).order.empty() ||
      !std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--optimizer-state takes state onto a table that is there, as it is in SRC: only --param goes with it");
  if (source.format != Location::Format::kTorch)
    throw UsageError(fmt::format("--optimizer-state: SRC is {}, not a file of torch.save(optimizer.state_dict())",
                                 format_name(source.format)));
  std::optional<std::uint64_t> parameter;
  if (!arguments.parameter.empty()) parameter = parse_count("--param", arguments.parameter);
  const auto begin = std::chrono::steady_clock::now();
  StoreOptions opening = store_options(common, StoreOptions::Mode::kReadWrite);
  opening.memory /= 2;
  opening.autocommit = false;  // all of it, or nothing
  Store store = Store::open(path.store, opening);
  Table table = store.table(path.table);
  TorchStateReport report;
  try {
    ProgressLine line("import " + path.table, table.dim() * item_size(table.dtype()), common.quiet);
    report = import_torch_state(table, source.file, parameter, common.memory / 2, line.callback());
    check_interrupt();
    store.commit();
  } catch (...) {
    store.abandon();
    throw;
  }
  Json extra = result_json(common, path, table);
  extra["parameter"] = json_text(report.parameter);
  extra["fields"] = report.fields;
  extra["step"] = report.step;
  TransferResult result = result_of(arguments, path, table);
  store.close();
  result.seconds = seconds_since(begin);
  print_transfer(common, result, extra);
  return kDone;
}

// The rows, converted, as far as an interrupted import came: ".STORE.TABLE.resume" beside the store.
std::filesystem::path partial_target(const TablePath& path) {
  std::filesystem::path store = std::filesystem::absolute(path.store).lexically_normal();
  if (!store.has_filename()) store = store.parent_path();
  return store.parent_path() / fmt::format("{}.{}", store.filename().native(), path.table);
}

int import(const Arguments& arguments, const Common& common) {
  const TablePath path = parse_table_path(arguments.table);
  const std::vector<NamedField> fields = arguments.fields.empty() ? std::vector<NamedField>{} : parse_fields(arguments.fields);
  const Location source = source_location(arguments, fields);
  const std::optional<DType> to = optional_dtype("--dtype", arguments.dtype);
  const RowSelection selection = arguments.rows.selection(/*permutation=*/true);
  TableOptions options;
  options.optimizer = arguments.optimizer.optimizer();
  options.page_bytes = parse_size_option("--page-size", arguments.page_size);
  if (arguments.in_place) return adopt(arguments, common, source, path);
  if (arguments.read_only) throw UsageError("--read-only needs --in-place");
  if (!arguments.parameter.empty() && !arguments.optimizer_state) throw UsageError("--param needs --optimizer-state");
  require_regular_file(source.file);
  if (arguments.optimizer_state) return import_state(arguments, common, source, path);
  if (arguments.all) {
    if (!is_table_archive(source))
      throw FormatError(source.file,
                        "holds no table that 'embermap export --all' wrote: that has arrays 'weight' and 'embermap'");
    return import_whole(arguments, common, source, path);
  }
  if (fields.empty() && std::holds_alternative<std::monostate>(options.optimizer) && is_table_archive(source))
    return import_whole(arguments, common, source, path);

  const auto begin = std::chrono::steady_clock::now();
  check_source_is_whole(source, common.memory / 4);
  check_vocabulary_option(arguments.vocabulary, format_has_words(source.format));
  // The vocabulary in the store is the table's: one that is there while the table is not was left behind.
  const WordTransfer::Options of_words{.vocabulary = arguments.vocabulary,
                                       .source_has_words = format_has_words(source.format),
                                       .source = source.file,
                                       .destination = path.store / path.table,
                                       .overwrite = arguments.vocabulary.empty()};
  std::optional<WordTransfer> words(std::in_place, of_words);
  const WordSink sink = words->sink();
  if (arguments.resume && (sink || fields.size() > 1))
    throw UsageError(sink ? "--resume: words are not kept for an import that is gone on with; --vocab none leaves them out"
                          : "--resume is for one field");

  const auto origin_of = [&](const Location& part) { return file_origin(part, to, arguments.input.options(part)); };
  Location weight = source;
  if (fields.size() > 1) {
    const auto found = std::find_if(fields.begin(), fields.end(), [](const NamedField& one) { return one.field == "weight"; });
    if (found == fields.end()) throw UsageError("--field: a table needs its 'weight' among the fields, as in weight=NAME,sum");
    weight.selector = found->name;
  }
  const RowOrigin origin = origin_of(weight);
  std::optional<SelectedRows> rows(std::in_place, origin, selection, arguments.resume ? std::nullopt : to, sink,
                                   common.memory / 4);
  RowReader* reader = &rows->reader();
  options.rows = reader->rows();
  options.dim = reader->dim();
  options.dtype = to.value_or(rows->from());
  const Geometry geometry = check_table_options(options);
  const Schema schema(options.dim, options.dtype, options.optimizer);
  Store::ImportedState state;
  std::vector<std::unique_ptr<SelectedRows>> states;
  for (const NamedField& one : fields) {
    if (fields.size() == 1 || one.field == "weight") continue;
    const Field& field = schema.field(one.field);
    Location part = source;
    part.selector = one.name;
    states.push_back(std::make_unique<SelectedRows>(file_origin(part, field.dtype, arguments.input.options(part)), selection,
                                                    field.dtype, WordSink{}, common.memory / 8 / fields.size()));
    state.fields.emplace(one.field, &states.back()->reader());
  }
  TransferResult result{.source = arguments.source,
                        .destination = path.text(),
                        .rows = options.rows,
                        .dim = options.dim,
                        .from = rows->from(),
                        .to = options.dtype,
                        .report = {},
                        .seconds = 0,
                        .remarks = reader->remarks()};

  std::optional<PartialRows> partial;
  std::unique_ptr<RowReader> staged;
  std::uint64_t resumed = 0;
  if (arguments.resume) {
    if (store_at(path.store) && Store::open(path.store, store_options(common, StoreOptions::Mode::kRead)).contains(path.table))
      throw AlreadyExists(fmt::format("{} already exists; 'embermap remove' it first", printable(path.text())));
    PartialRows::Copy copy{.of = origin.identity,
                           .rows = options.rows,
                           .dim = options.dim,
                           .from = rows->from(),
                           .dtype = options.dtype,
                           .header = {}};
    copy.of.emplace("dtype", fmt::format("{} to {}", dtype_name(copy.from), dtype_name(copy.dtype)));
    copy.of.emplace("shape", fmt::format("{} x {}", copy.rows, copy.dim));
    copy.of.emplace("order", selection.order.empty() ? std::string("none") : file_identity(selection.order));
    partial.emplace(partial_target(path), copy, /*overwrite=*/false);
    resumed = partial->done();
    ProgressLine line("read " + path.table, options.dim * item_size(options.dtype), common.quiet);
    continue_partial(*reader, *partial, common.memory / 4, line.callback());
    staged = partial->reader();
    reader = staged.get();
  }

  StoreOptions opening = store_options(common, StoreOptions::Mode::kOpenOrCreate);
  opening.memory /= 2;
  NewTable destination(path, opening);
  check_free_space(path.store, path.store / (path.table + ".npy"), geometry.file_bytes());
  // Half of a vocabulary in the store's directory goes before that does, where this fails; so does an order of rows.
  std::optional<InverseOrder> inverse;
  const std::unique_ptr<std::optional<WordTransfer>, void (*)(std::optional<WordTransfer>*)> words_end(
      &words, [](std::optional<WordTransfer>* w) { w->reset(); });
  const std::unique_ptr<std::optional<InverseOrder>, void (*)(std::optional<InverseOrder>*)> inverse_end(
      &inverse, [](std::optional<InverseOrder>* i) { i->reset(); });
  words->begin(options.rows, rows->all_rows());
  if (!selection.order.empty()) {
    const std::filesystem::path place = order_beside(path.store / path.table);
    if (destination.store().contains(path.table + ".order"))
      throw AlreadyExists(fmt::format("{} is the table '{}': there is no place for the order of rows", printable(place),
                                      printable(path.table + ".order")));
    const auto order = RowOrder::open(selection.order);
    inverse.emplace(*order, rows->all_rows(), /*permutation=*/true, place, /*overwrite=*/true, common.memory / 8);
  }
  Json extra;
  {
    ProgressLine line("import " + path.table, options.dim * item_size(options.dtype), common.quiet);
    const Table table = destination.store().import(path.table, *reader, options, state, line.callback());
    if (arguments.check) check_written(*reader, *table_rows(table), /*bits=*/true, path.text(), common.memory / 8);
    extra = result_json(common, path, table);
  }
  extra["in_place"] = false;
  if (arguments.check) extra["checked"] = true;
  if (!words->written().empty()) extra["vocabulary"] = json_text(words->written().native());
  if (inverse) extra["order"] = json_text(inverse->path().native());
  if (resumed != 0) extra["resumed_rows"] = resumed;
  if (fields.size() > 1)
    for (const NamedField& one : fields) extra["fields"].push_back(json_text(one.field));
  result.report = partial ? partial->report() : rows->report();
  try {
    if (inverse) inverse->finish();
    words->finish();
    destination.keep();
  } catch (...) {
    if (inverse) inverse->withdraw();
    words->withdraw();
    throw;
  }
  if (partial) partial->remove();
  result.seconds = seconds_since(begin);
  print_transfer(common, result, extra);
  return kDone;
}

}  // namespace

void add_import(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("import", "Make a table from the rows of a file, or take state of an optimizer onto one");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SRC", arguments->source, kSourceHelp)->required();
  command
      ->add_option("TABLE", arguments->table,
                   "STORE/TABLE, which must not exist (but with --optimizer-state); the store is made if it is not there")
      ->required();
  arguments->input.add_to(*command);
  command
      ->add_option("--field", arguments->fields,
                   "The field of a structured SRC, as x.npy:field; several: the weight and the state of the optimizer, each from "
                   "the array of its name, or of NAME for FIELD=NAME")
      ->type_name("A,B,...");
  add_dtype_option(*command, arguments->dtype, /*names_bytes=*/true);
  command->add_option("--page-size", arguments->page_size, "Unit of disk access: a power of two from 4KiB (default) to 2MiB")
      ->type_name("SIZE");
  command->add_flag("--all", arguments->all,
                    "SRC is what 'embermap export --all' wrote: the table as it was, with state, steps and vocabulary (taken so "
                    "by itself where SRC is seen to be one)");
  command->add_flag("--optimizer-state", arguments->optimizer_state,
                    "SRC is torch.save(optimizer.state_dict()): its state, steps and options go onto TABLE, which is there and "
                    "has an optimizer of that kind");
  command->add_option("--param", arguments->parameter, "With --optimizer-state: the number of the parameter, where several fit")
      ->type_name("N");
  command->add_flag("--in-place", arguments->in_place, "Use the .npy file where it is instead of a copy; training writes to it");
  command->add_flag("--read-only", arguments->read_only, "With --in-place: never write to the file");
  command->add_flag("--check", arguments->check, "Read the table back and compare it with SRC");
  command->add_flag("--resume", arguments->resume,
                    "Go on with an import that was interrupted, and keep what is done if this one is: .STORE.TABLE.resume and "
                    ".STORE.TABLE.resume.json beside STORE, as long as it is not complete");
  arguments->rows.add_to(
      *command,
      "Row i of the table is row FILE[i] of SRC: integers in any format, .txt too, with each row once; the way "
      "back goes to STORE/TABLE.order.npy",
      /*with_rows=*/false);
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
