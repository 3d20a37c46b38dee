// embermap import SRC STORE/TABLE
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <system_error>

#include "base/error.hpp"
#include "io/copy_file.hpp"
#include "io/row_order.hpp"
#include "io/vocabulary.hpp"
#include "store/store.hpp"
#include "store/table_archive.hpp"
#include "store/table_import.hpp"
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
  std::string source, table, fields, dtype, vocabulary, parameter, page_size;
  SourceArguments input;
  SelectionArguments rows;
  OptimizerArguments optimizer;
  std::string at;
  bool in_place = false, read_only = false, all = false, optimizer_state = false, check = false, resume = false;
  bool into = false, append = false;
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

// What can be done about a table that is there.
constexpr std::string_view kOrInto = ", or take the rows onto it with --into";

void refuse_page_size(const Arguments& arguments, std::string_view why) {
  if (!arguments.page_size.empty()) throw UsageError(fmt::format("--page-size: {}", why));
}

Json result_json(const Common& common, const TablePath& path, const Table& table) {
  Json json{{"table", table_json(table)}};
  json["table"]["store"] = json_text(path.store.native());
  json["memory"] = common.memory;
  return json;
}

int adopt(const Arguments& arguments, const Common& common, const Location& source, const TablePath& path) {
  if (!arguments.vocabulary.empty()) throw UsageError("--vocab: a .npy file, used in place, has no words");
  refuse_page_size(arguments, "--in-place leaves the file as it is, and its pages are chosen by its rows");
  if (source.format != Location::Format::kNpy) throw UsageError("--in-place takes a .npy file; others are imported as a copy");
  if (!source.selector.empty()) throw UsageError("--in-place takes a whole .npy file, not a field of one");
  if (!std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--in-place leaves the file as it is, so there is no place for the state of an optimizer");
  if (const RowSelection rows = arguments.rows.selection(true); !rows.order.empty() || rows.first != 0 || rows.end)
    throw UsageError("--in-place leaves the file as it is; --rows and --order are for a copy of it");
  std::optional<DType> dtype = optional_dtype("--dtype", arguments.dtype);
  if (const auto named = arguments.input.dtype()) dtype = named;
  require_regular_file(source.file);

  const auto begin = std::chrono::steady_clock::now();
  NewTable destination(path, store_options(common, StoreOptions::Mode::kOpenOrCreate), kOrInto);
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
  refuse_page_size(arguments, "SRC says what the table was made with");
  const RowSelection rows = arguments.rows.selection(true);
  if (!arguments.dtype.empty() || !rows.order.empty() || rows.first != 0 || rows.end || arguments.resume)
    throw UsageError("--all makes the table as it was: not with --dtype, --rows, --order or --resume");
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

// What is changed of a table: so many pages, each so often.
struct Change {
  std::uint64_t pages, times;
};

// The store, with room in its log for all of a change: one commit has it, or it is given up.
Store open_for_one_commit(const Common& common, const TablePath& path, const std::function<Change(const Table&)>& change_of) {
  StoreOptions opening = store_options(common, StoreOptions::Mode::kReadWrite);
  opening.memory /= 2;
  opening.autocommit = false;
  Store store = Store::open(path.store, opening);
  const Table table = store.table(path.table);
  const Geometry geometry = table.geometry();
  const auto [pages, times] = change_of(table);
  opening = one_commit_options(opening, geometry, pages, times, common.memory / 4);
  if (opening.memory == store.memory() && opening.log_limit == 0) return store;
  store.close();
  return Store::open(path.store, opening);
}

// State of torch.optim onto a table that is there.
int import_state(const Arguments& arguments, const Common& common, const Location& source, const TablePath& path) {
  if (!arguments.fields.empty() || !arguments.dtype.empty() || !arguments.vocabulary.empty() || arguments.all ||
      arguments.resume || !arguments.rows.selection(true).order.empty() || arguments.rows.some() ||
      !std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--optimizer-state takes state onto a table that is there, as it is in SRC: only --param goes with it");
  refuse_page_size(arguments, "the table has what it was made with");
  if (source.format != Location::Format::kTorch)
    throw UsageError(fmt::format("--optimizer-state: SRC is {}, not a file of torch.save(optimizer.state_dict())",
                                 format_name(source.format)));
  std::optional<std::uint64_t> parameter;
  if (!arguments.parameter.empty()) parameter = parse_count("--param", arguments.parameter);
  const auto begin = std::chrono::steady_clock::now();
  Store store = open_for_one_commit(common, path, [](const Table& table) {
    return Change{table.geometry().pages(), table.schema().fields().size()};
  });
  Table table = store.table(path.table);
  TorchStateReport report;
  try {
    ProgressLine line("import " + path.table, table.dim() * item_size(table.dtype()), common.quiet);
    report = import_torch_state(table, source, parameter, common.memory / 2, line.callback());
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

// The fields of the table, for what is printed of them.
std::vector<NamedField> own_names(std::vector<NamedField> fields) {
  for (NamedField& one : fields) one.name = one.field;
  return fields;
}

// How many rows of `source`, to its end, go into a table.
std::uint64_t rows_of(const Table& table, const Location& source, const IntoOptions& options) {
  if (!options.rows.order.empty()) return RowOrder::open(options.rows.order)->size();
  Location array = source;
  if (!options.fields.empty()) array.selector = options.fields.front().array;
  std::optional<DType> to = options.dtype;
  if (source.format != Location::Format::kRaw)
    to = table.schema().field(options.fields.empty() ? options.field : options.fields.front().field).dtype;
  const std::uint64_t rows = file_origin(array, to, options.reading).open({})->rows();
  return rows - std::min(rows, options.rows.first);
}

// Rows onto a table that is there.
int import_into(const Arguments& arguments, const Common& common, const std::vector<NamedField>& fields) {
  const TablePath path = parse_table_path(arguments.table, /*with_field=*/true);
  if (arguments.resume) throw UsageError("--resume: an import --into is one commit; it has nothing to go on with");
  if (common.durability != "commit") throw UsageError("--into is all or nothing; that takes --durability commit");
  if (!std::holds_alternative<std::monostate>(arguments.optimizer.optimizer()))
    throw UsageError("--optimizer: the table has what it was made with");
  refuse_page_size(arguments, "the table has what it was made with");
  if (arguments.append && !arguments.at.empty()) throw UsageError("--at names a place, --append the end; choose one");
  if (path.field != "weight" && !fields.empty())
    throw UsageError(fmt::format("TABLE names the field '{}' and --field others", printable(path.field)));
  const Location source = arguments.input.location(arguments.source);
  if (!fields.empty() && !source.selector.empty())
    throw UsageError(
        fmt::format("SRC names '{}' and --field names '{}'", printable(source.selector), printable(arguments.fields)));
  require_regular_file(source.file);
  check_source_is_whole(source, common.memory / 4);

  IntoOptions options;
  options.reading = arguments.input.options(source);
  for (const NamedField& one : fields) options.fields.push_back({one.field, one.name});
  options.field = path.field;
  options.dtype = optional_dtype("--dtype", arguments.dtype);
  options.rows = arguments.rows.selection(/*permutation=*/false);
  options.vocabulary = arguments.vocabulary;
  options.check = arguments.check;
  options.memory = common.memory / 4;
  if (!arguments.at.empty()) options.at = parse_count("--at", arguments.at);
  options.append = arguments.append;
  options.look_first = false;  // what fails is given up
  const auto begin = std::chrono::steady_clock::now();
  Store store = open_for_one_commit(common, path, [&](const Table& table) {
    const Geometry geometry = table.geometry();
    std::uint64_t pages = 1;  // rows that are added take the last of the old pages; new ones are not in the log
    if (!options.append && geometry.rows > 0) {
      const std::uint64_t first = std::min(options.at.value_or(0), geometry.rows - 1);
      std::uint64_t count = geometry.rows - first;
      if (options.rows.end)
        count = std::min(count, *options.rows.end - options.rows.first);
      else if (options.at)  // without a place there have to be as many rows as the table has
        count = std::min(count, rows_of(table, source, options));
      pages = count == 0 ? 0 : geometry.page_of(first + count - 1) - geometry.page_of(first) + 1;
    }
    return Change{pages, std::max<std::size_t>(1, fields.size())};
  });
  Table table = store.table(path.table);
  const std::uint64_t first_row = options.append ? table.rows() : options.at.value_or(0);
  std::vector<CopyResult> copied;
  Json extra;
  try {
    {
      ProgressLine line("import " + path.table, table.dim() * item_size(table.dtype()), common.quiet);
      options.progress = line.callback();
      copied = embermap::import_into(store, table, source, options);
    }
    if (!options.append) check_interrupt();  // what was added is committed
    store.commit();
    extra = result_json(common, path, table);
    store.close();
  } catch (...) {
    store.abandon();
    throw;
  }
  extra["into"] = true;
  extra["first_row"] = first_row;
  print_transfers(common, arguments.source, path.text(), copied, own_names(fields), options.check, seconds_since(begin), extra);
  if (const std::uint64_t rows = copied.front().rows; !common.json && !common.quiet && rows > 0)
    print(rows == 1 ? fmt::format("row {} of {}\n", first_row, printable(path.text()))
                    : fmt::format("rows {}..{} of {}\n", first_row, first_row + rows - 1, printable(path.text())));
  return kDone;
}

int import(const Arguments& arguments, const Common& common) {
  std::vector<NamedField> fields = arguments.fields.empty() ? std::vector<NamedField>{} : parse_fields(arguments.fields);
  // What is said of one array is said of the weight, if it is there.
  std::stable_partition(fields.begin(), fields.end(), [](const NamedField& one) { return one.field == "weight"; });
  if (arguments.into) {
    if (arguments.in_place || arguments.read_only || arguments.all || arguments.optimizer_state || !arguments.parameter.empty())
      throw UsageError("--into takes rows onto a table that is there: not with --in-place, --all or --optimizer-state");
    return import_into(arguments, common, fields);
  }
  if (!arguments.at.empty() || arguments.append) throw UsageError("--at and --append need --into");
  const TablePath path = parse_table_path(arguments.table);
  const Location source = source_location(arguments, fields);
  const std::optional<DType> to = optional_dtype("--dtype", arguments.dtype);
  const RowSelection selection = arguments.rows.selection(/*permutation=*/true);
  TableOptions options;
  options.optimizer = arguments.optimizer.optimizer();
  if (!arguments.page_size.empty()) options.page_bytes = parse_size_option("--page-size", arguments.page_size);
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
  if (arguments.resume && (fields.size() > 1 || (format_has_words(source.format) && arguments.vocabulary != "none")))
    throw UsageError(fields.size() > 1
                         ? "--resume is for one field"
                         : "--resume: words are not kept for an import that is gone on with; --vocab none leaves them out");
  if (fields.size() > 1 &&
      std::none_of(fields.begin(), fields.end(), [](const NamedField& one) { return one.field == "weight"; }))
    throw UsageError("--field: a table needs its 'weight' among the fields, as in weight=NAME,sum");
  ImportOptions importing;
  importing.reading = arguments.input.options(source);
  if (fields.size() > 1)
    for (const NamedField& one : fields) importing.fields.push_back({one.field, one.name});
  importing.dtype = to;
  importing.rows = selection;
  importing.vocabulary = arguments.vocabulary;
  importing.check = arguments.check;
  importing.memory = common.memory / 2;
  std::optional<ProgressLine> line;
  importing.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (line) line->callback()(done, total);
  };
  std::optional<TableImport> job(std::in_place, source, path.store / path.table, importing, options);
  const Geometry geometry = check_table_options(job->table());
  const std::uint64_t row_bytes = job->table().dim * item_size(job->table().dtype);
  if (arguments.resume) {
    if (store_at(path.store) && Store::open(path.store, store_options(common, StoreOptions::Mode::kRead)).contains(path.table))
      throw AlreadyExists(fmt::format("{} already exists; 'embermap remove' it first{}", printable(path.text()), kOrInto));
    ProgressLine reading("read " + path.table, row_bytes, common.quiet);
    job->read_resumably(reading.callback());
  }

  StoreOptions opening = store_options(common, StoreOptions::Mode::kOpenOrCreate);
  opening.memory /= 2;
  NewTable destination(path, opening, kOrInto);
  check_free_space(path.store, path.store / (path.table + ".npy"), geometry.file_bytes());
  // Half of a vocabulary in the store's directory goes before that does, where this fails; so does an order of rows.
  const std::unique_ptr<std::optional<TableImport>, void (*)(std::optional<TableImport>*)> job_end(
      &job, [](std::optional<TableImport>* one) { one->reset(); });
  Json extra;
  line.emplace("import " + path.table, row_bytes, common.quiet);
  extra = result_json(common, path, job->run(destination.store(), path.table));
  line.reset();
  extra["in_place"] = false;
  try {
    job->finish();
    destination.keep();
  } catch (...) {
    job->withdraw();
    throw;
  }
  print_transfers(common, arguments.source, path.text(), job->results(),
                  fields.size() > 1 ? own_names(fields) : std::vector<NamedField>{}, arguments.check, seconds_since(begin),
                  extra);
  return kDone;
}

}  // namespace

void add_import(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand(
      "import", "Make a table from the rows of a file, or take rows or state of an optimizer onto one that is there");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SRC", arguments->source, kSourceHelp)->required();
  command
      ->add_option("TABLE", arguments->table,
                   "STORE/TABLE, which must not exist (but with --into and --optimizer-state); the store is made if it is not "
                   "there")
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
  command
      ->add_flag("--into", arguments->into,
                 "TABLE is there: rows of SRC take the place of its rows, as one commit or not at all; columns have to be as "
                 "many, --dtype has to name the table's where it does not hold all values of SRC's. STORE/TABLE:field: state of "
                 "the optimizer; what is not named stays as it is")
      ->group("Into a table that is there");
  command->add_option("--at", arguments->at, "The first row that is replaced (default: all are, and SRC has as many)")
      ->type_name("ROW")
      ->group("Into a table that is there");
  command
      ->add_flag("--append", arguments->append,
                 "Rows of SRC become new ones at the end. They are committed before --check looks at them, and taken away again "
                 "if it finds others")
      ->group("Into a table that is there");
  command->add_flag(
      "--optimizer-state", arguments->optimizer_state,
      "SRC is torch.save(optimizer.state_dict()), or x.pt:NAME for one in a checkpoint: its state, steps and options "
      "go onto TABLE, which is there and has an optimizer of that kind");
  command->add_option("--param", arguments->parameter, "With --optimizer-state: the number of the parameter, where several fit")
      ->type_name("N");
  command->add_flag("--in-place", arguments->in_place, "Use the .npy file where it is instead of a copy; training writes to it");
  command->add_flag("--read-only", arguments->read_only, "With --in-place: never write to the file");
  command->add_flag("--check", arguments->check, "Read the table back, all of its fields that come from SRC, and compare");
  command->add_flag("--resume", arguments->resume,
                    "Go on with an import that was interrupted, and keep what is done if this one is: .STORE.TABLE.resume and "
                    ".STORE.TABLE.resume.json beside STORE, as long as it is not complete");
  arguments->rows.add_to(
      *command,
      "Row i of the table is row FILE[i] of SRC: integers in any format, .txt too, with each row once; the way "
      "back goes to STORE/TABLE.order.npy. With --into: any rows, and no way back");
  add_vocabulary_option(*command, arguments->vocabulary,
                        "Where the words of SRC are written, one a line (default STORE/TABLE.vocab.txt); 'none': nowhere. With "
                        "--into: the words that the rows of SRC have to have, or are added to");
  arguments->optimizer.add_to(*command);
  add_store_options(*command, common);
  finish_command(*command, common, chosen,
                 "  embermap import vectors.npy tables/items --optimizer adagrad --lr 0.05\n"
                 "  embermap import model.h5:/embeddings/words tables/words --dtype float16\n"
                 "  embermap import glove.6B.100d.txt tables/glove\n"
                 "  embermap import new.npy tables/items --into --at 5000\n"
                 "  embermap import new.npy tables/items --into --append\n"
                 "  embermap import state.npy tables/items:sum --into\n"
                 "  embermap import huge.npy tables/huge --in-place --read-only",
                 [arguments](const Common& c) {
                   try {
                     return import(*arguments, c);
                   } catch (const BudgetError& error) {  // what it names is a part of what was given
                     throw BudgetError(fmt::format("{} (of --memory {}, half is for hot pages and the rest for buffers)",
                                                   error.what(), c.memory_text));
                   }
                 });
}

}  // namespace embermap::tools
