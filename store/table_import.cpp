#include "store/table_import.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <system_error>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/partial_rows.hpp"
#include "io/row_range.hpp"
#include "io/same_file.hpp"
#include "store/redo_log.hpp"

namespace embermap {
namespace {

Location part_of(const Location& source, const std::string& array) { return {source.file, array, source.format}; }

// ".STORE.TABLE" beside the store: the target of PartialRows.
std::filesystem::path partial_target(const std::filesystem::path& table) {
  std::filesystem::path store = std::filesystem::absolute(table.parent_path()).lexically_normal();
  if (!store.has_filename()) store = store.parent_path();
  return store.parent_path() / fmt::format("{}.{}", store.filename().native(), table.filename().native());
}

// Throws InvalidArgument for a field that is named twice.
void check_fields(const std::vector<FieldSource>& fields) {
  for (std::size_t i = 0; i < fields.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (fields[i].field == fields[j].field)
        throw InvalidArgument(fmt::format("the field '{}' is named twice", printable(fields[i].field)));
}

// `progress` of several parts, one after the other, as if they were one.
class Steps {
 public:
  Steps(const Progress& progress, std::uint64_t all) : progress_{progress}, all_{all} {}
  Progress step() {
    return [this](std::uint64_t done, std::uint64_t) {
      if (progress_) progress_(before_ + done, all_);
    };
  }
  void done(std::uint64_t rows) { before_ += rows; }

 private:
  const Progress& progress_;
  std::uint64_t all_, before_ = 0;
};

CopyResult result_of(const SelectedRows& rows, RowReader& reader, DType to) {
  return {.rows = reader.rows(),
          .dim = reader.dim(),
          .from = rows.from(),
          .to = to,
          .report = {},
          .vocabulary = {},
          .order = {},
          .resumed = 0,
          .remarks = reader.remarks()};
}

}  // namespace

void check_vocabulary_place(const std::filesystem::path& vocabulary, const std::filesystem::path& table) {
  if (vocabulary.empty() || vocabulary == "none" || same_file(vocabulary, vocabulary_beside(table))) return;
  check_outside_stores(vocabulary);
  // The store may be made only now.
  const std::filesystem::path folder = vocabulary.has_parent_path() ? vocabulary.parent_path() : std::filesystem::path(".");
  if (same_file(folder, table.parent_path()))
    throw InvalidArgument(fmt::format("{} would be in the own directory of the store {}; choose another place",
                                      printable(vocabulary), printable(table.parent_path())));
}

struct TableImport::Part {
  std::string field;
  RowOrigin origin;
  std::unique_ptr<SelectedRows> rows;
};

TableImport::~TableImport() = default;

TableImport::TableImport(const Location& source, const std::filesystem::path& table, const ImportOptions& options,
                         const TableOptions& into)
    : source_{source}, path_{table}, options_{options}, into_{into} {
  const bool has_words = format_has_words(source.format);
  check_companions(source.file, table, options.rows.order, has_words ? options.vocabulary : std::string{});
  if (has_words) check_vocabulary_place(options.vocabulary, table);
  // The vocabulary in the store is the table's: one that is there while the table is not was left behind.
  words_ = std::make_unique<WordTransfer>(WordTransfer::Options{.vocabulary = options.vocabulary,
                                                                .source_has_words = has_words,
                                                                .source = source.file,
                                                                .destination = table,
                                                                .overwrite = options.vocabulary.empty()});
  std::vector<FieldSource> fields = options.fields;
  if (fields.empty()) fields.push_back({"weight", source.selector});
  check_fields(fields);
  const auto weight = std::find_if(fields.begin(), fields.end(), [](const FieldSource& one) { return one.field == "weight"; });
  if (weight == fields.end()) throw InvalidArgument("a table needs its 'weight' among the fields, as in weight=NAME,sum");
  const std::uint64_t share = options.memory / 2 / fields.size();
  parts_.resize(fields.size());
  const auto open = [&](std::size_t i, std::optional<DType> to, const WordSink& sink) {
    parts_[i].field = fields[i].field;
    parts_[i].origin = file_origin(part_of(source, fields[i].array), to, options.reading);
    parts_[i].rows = std::make_unique<SelectedRows>(parts_[i].origin, options.rows, to, sink, share);
  };
  const auto place = static_cast<std::size_t>(weight - fields.begin());
  open(place, options.dtype, words_->sink());
  weight_ = &parts_[place];
  RowReader& reader = weight_->rows->reader();
  into_.rows = reader.rows();
  into_.dim = reader.dim();
  into_.dtype = options.dtype.value_or(weight_->rows->from());
  const Schema schema(into_.dim, into_.dtype, into_.optimizer);
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (i != place) open(i, schema.field(fields[i].field).dtype, {});
  for (const Part& part : parts_) results_.push_back(result_of(*part.rows, part.rows->reader(), schema.field(part.field).dtype));
}

void TableImport::read_resumably(const Progress& progress) {
  if (words_->sink())
    throw InvalidArgument(fmt::format(
        "{}: words are not kept for an import that is gone on with; leave them out (vocabulary none)", printable(source_.file)));
  if (parts_.size() > 1) throw InvalidArgument("an import of several fields cannot be gone on with");
  if (weight_->origin.several_files)
    throw InvalidArgument(
        fmt::format("{}: its rows may lie in other files; such an import cannot be gone on with", printable(source_.file)));
  // Rows are converted as they are kept, so that the report is of those rows.
  weight_->rows = std::make_unique<SelectedRows>(weight_->origin, options_.rows, std::nullopt, WordSink{}, options_.memory / 2);
  RowReader& reader = weight_->rows->reader();
  PartialRows::Copy copy{.of = weight_->origin.identity,
                         .rows = into_.rows,
                         .dim = into_.dim,
                         .from = weight_->rows->from(),
                         .dtype = into_.dtype,
                         .header = {}};
  copy.of.emplace("dtype", fmt::format("{} to {}", dtype_name(copy.from), dtype_name(copy.dtype)));
  copy.of.emplace("shape", fmt::format("{} x {}", copy.rows, copy.dim));
  copy.of.emplace("order", options_.rows.order.empty() ? std::string("none") : file_identity(options_.rows.order));
  if (options_.rows.first != 0 || options_.rows.end)
    copy.of.emplace("choice of rows",
                    fmt::format("{}:{}", options_.rows.first, options_.rows.end ? fmt::format("{}", *options_.rows.end) : ""));
  partial_ = std::make_unique<PartialRows>(partial_target(path_), copy, /*overwrite=*/false);
  results_.front().resumed = partial_->done();
  continue_partial(reader, *partial_, options_.memory / 2, progress);
  staged_ = partial_->reader();
}

namespace {

// What is left beside a table may be replaced with it, but a file that another table has adopted is that table.
void refuse_adopted(Store& store, const std::filesystem::path& place) {
  std::error_code ignored;
  if (!std::filesystem::exists(place, ignored)) return;
  for (const std::string& name : store.tables())
    if (same_file(store.table(name).file(), place))
      throw AlreadyExists(fmt::format("{} is the file of the table '{}': there is no place for the order of rows",
                                      printable(place), printable(name)));
}

}  // namespace

Table TableImport::run(Store& store, const std::string& name) {
  words_->begin(into_.rows, weight_->rows->all_rows());
  if (!options_.rows.order.empty()) {
    const std::filesystem::path place = order_beside(path_);
    if (store.contains(name + ".order"))
      throw AlreadyExists(fmt::format("{} is the table '{}': there is no place for the order of rows", printable(place),
                                      printable(name + ".order")));
    refuse_adopted(store, place);
    const auto order = RowOrder::open(options_.rows.order);
    inverse_ = std::make_unique<InverseOrder>(*order, weight_->rows->all_rows(), options_.rows.permutation, place,
                                              /*overwrite=*/true, options_.memory / 2);
  }
  Store::ImportedState state;
  for (const Part& part : parts_)
    if (&part != weight_) state.fields.emplace(part.field, &part.rows->reader());
  Table table = store.import(name, staged_ ? *staged_ : weight_->rows->reader(), into_, state, options_.progress);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    results_[i].report = parts_[i].rows->report();
    results_[i].remarks = parts_[i].rows->reader().remarks();
  }
  if (partial_) results_.front().report = partial_->report();
  for (CopyResult& result : results_) {
    result.vocabulary = words_->written();
    if (inverse_) result.order = inverse_->path();
  }
  try {
    if (options_.check) check(table);
  } catch (...) {
    store.remove(name);
    throw;
  }
  return table;
}

void TableImport::check(Table& table) {
  Steps steps(options_.progress, into_.rows * parts_.size());
  for (const Part& part : parts_) {
    const auto written = table_rows(table, part.field);
    SelectedRows again(part.origin, options_.rows, written->dtype(), WordSink{}, options_.memory / 4);
    check_written(again.reader(), *written, /*bits=*/true, fmt::format("{}:{}", path_.native(), part.field), options_.memory / 4,
                  steps.step());
    steps.done(into_.rows);
  }
}

void TableImport::finish() {
  if (inverse_) inverse_->finish();
  words_->finish();
  if (partial_) partial_->remove();
}

void TableImport::withdraw() noexcept {
  if (inverse_) inverse_->withdraw();
  words_->withdraw();
}

RowOrigin table_origin(const std::filesystem::path& path, std::uint64_t commit, const Table& table, const std::string& field) {
  RowOrigin out;
  out.open = [table, field](const WordSink&) { return table_rows(table, field); };
  out.file = path;
  struct stat status {};
  if (::stat(path.parent_path().c_str(), &status) == 0)
    out.identity.emplace("store", fmt::format("inode {} on {}, commit {}", status.st_ino, status.st_dev, commit));
  out.identity.emplace("table", fmt::format("{}:{}", path.filename().native(), field));
  out.identity.emplace("file of the table", file_identity(table.file()));  // another one of the same name may be there
  return out;
}

bool dtype_holds(DType to, DType from) noexcept {
  if (to == from || to == DType::kFloat64) return to == from || from != DType::kInt64;
  switch (from) {
    case DType::kInt8: return to != DType::kUInt8;
    case DType::kUInt8: return to != DType::kInt8;
    case DType::kInt32: return to == DType::kInt64;
    case DType::kFloat16:
    case DType::kBFloat16: return to == DType::kFloat32;
    default: return false;
  }
}

namespace {

// Rows that go to consecutive rows of a table.
class TableWriter final : public RowWriter {
 public:
  TableWriter(Table& table, std::string_view field, std::uint64_t at)
      : table_{table}, field_{field}, row_bytes_{table.schema().field(field).bytes}, at_{at} {}
  void write(std::uint64_t count, const std::byte* rows) override {
    table_.write(at_, count, {rows, count * row_bytes_}, field_);
    at_ += count;
  }
  void finish() override {}

 private:
  Table& table_;
  std::string field_;
  std::uint64_t row_bytes_, at_;
};

// Rows that are looked at, and kept where they fit.
class Looked final : public RowWriter {
 public:
  Looked(std::uint64_t row_bytes, bool keep) : row_bytes_{row_bytes}, keep_{keep} {}
  void write(std::uint64_t count, const std::byte* rows) override {
    if (keep_) kept.insert(kept.end(), rows, rows + count * row_bytes_);
  }
  void finish() override {}
  std::vector<std::byte> kept;

 private:
  std::uint64_t row_bytes_;
  bool keep_;
};

// The words of rows that go into a table: compared with those that it has, or added to them.
class IntoWords {
 public:
  IntoWords(const Table& table, const std::filesystem::path& beside, const Location& source, const IntoOptions& options)
      : table_{table}, source_{source}, at_{options.append ? table.rows() : options.at.value_or(0)} {
    const bool has_words = format_has_words(source.format), none = options.vocabulary == "none";
    const std::filesystem::path own = vocabulary_beside(beside);
    std::error_code ignored;
    const bool kept = std::filesystem::exists(own, ignored);
    if (none) return;
    if (!has_words) {
      if (options.append && kept) {
        if (options.vocabulary.empty())
          throw InvalidArgument(
              fmt::format("table '{}' has a vocabulary, {}, and {} no words for it: name a vocabulary of the new rows, or none, "
                          "which leaves it as it is",
                          printable(table.name()), printable(own), printable(source.file)));
        new_words_ = std::make_unique<VocabularyReader>(options.vocabulary);
        file_ = own;
      } else if (!options.vocabulary.empty()) {
        throw InvalidArgument(fmt::format("a vocabulary, {}, is of no use: {} has no words{}", printable(options.vocabulary),
                                          printable(source.file), options.append ? ", and the table none" : ""));
      }
    } else {
      file_ = options.vocabulary.empty() ? own : std::filesystem::path(options.vocabulary);
      if (same_file(file_, source.file))
        throw InvalidArgument(fmt::format("{} holds the rows; words need a file of their own", printable(file_)));
      if (!std::filesystem::exists(file_, ignored) && !(options.append && table.rows() == 0))
        throw NotFound(
            fmt::format("{} has words, and {}, the words of table '{}', is not there: name a vocabulary, or none, which leaves "
                        "words out",
                        printable(source.file), printable(file_), printable(table.name())));
    }
    if (file_.empty()) return;
    if (options.append) check_vocabulary_place(file_, beside);
    if (std::filesystem::exists(file_, ignored)) {
      there_ = std::make_unique<VocabularyReader>(file_);
      if (there_->words() != table.rows())
        throw FormatError(file_, fmt::format("has {} words for {} rows", there_->words(), table.rows()));
    }
    if (options.append) adds_ = true;
  }

  WordSink sink() {
    if (!format_has_words(source_.format) || file_.empty()) return {};
    if (adds_) return [this](std::uint64_t row, std::string_view word) { writer_->add(at_ + row, word); };
    return [this](std::uint64_t row, std::string_view word) {
      there_->find(at_ + row, word_);
      if (word_ != word)
        throw InvalidArgument(fmt::format(
            "{}: row {} is '{}'; row {} of table '{}' is '{}' in {} (vocabulary none leaves words out)", printable(source_.file),
            row, printable(word), at_ + row, printable(table_.name()), printable(word_), printable(file_)));
    };
  }

  // Before rows are read. `all`: rows of the source, `rows`: of them that are selected.
  void begin(std::uint64_t rows, std::uint64_t all, const RowSelection& selection) {
    if (!adds_) return;
    writer_ = std::make_unique<VocabularyWriter>(file_, /*overwrite=*/true);
    rows_ = at_ + rows;
    std::string word;
    for (std::uint64_t row = 0; row < at_; ++row) {
      there_->read(row, word);
      writer_->add(row, word);
    }
    if (!new_words_) return;
    if (new_words_->words() != all)
      throw FormatError(new_words_->path(), fmt::format("has {} words for {} rows", new_words_->words(), all));
    std::unique_ptr<RowOrder> order;
    if (!selection.order.empty()) order = RowOrder::open(selection.order);
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::uint64_t number = selection.first + row;
      if (order) order->read(row, {&number, 1});
      new_words_->find(number, word);
      writer_->add(at_ + row, word);
    }
  }
  void finish() {
    if (!writer_) return;
    writer_->finish(rows_);
    finished_ = true;
  }
  // The words as they were before finish().
  void withdraw() {
    if (!finished_) return;
    if (!there_) {
      std::error_code ignored;
      std::filesystem::remove(file_, ignored);
      return;
    }
    VocabularyWriter before(file_, /*overwrite=*/true);
    for (std::uint64_t row = 0; row < at_; ++row) {
      there_->find(row, word_);  // of the file that was there, which has lost its name
      before.add(row, word_);
    }
    before.finish(at_);
  }
  std::filesystem::path written() const { return adds_ ? file_ : std::filesystem::path{}; }

 private:
  const Table& table_;
  const Location& source_;
  std::uint64_t at_, rows_ = 0;
  bool adds_ = false, finished_ = false;
  std::filesystem::path file_;
  std::unique_ptr<VocabularyReader> there_, new_words_;
  std::unique_ptr<VocabularyWriter> writer_;
  std::string word_;
};

struct IntoPart {
  const Field* field = nullptr;
  RowOrigin origin;
  std::unique_ptr<SelectedRows> rows;
};

void check_into(const Table& table, const IntoPart& part, const IntoOptions& options) {
  RowReader& reader = part.rows->reader();
  const Field& field = *part.field;
  if (reader.dim() != field.elements)
    throw InvalidArgument(fmt::format("{} has {} columns, '{}' of table '{}' has {}", reader.description(), reader.dim(),
                                      printable(field.name), printable(table.name()), field.elements));
  const DType from = part.rows->from();
  if (!dtype_holds(field.dtype, from) && options.dtype != field.dtype)
    throw DTypeError(fmt::format(
        "{} holds {}, '{}' of table '{}' {}, which does not hold all of its values; dtype {} converts them", reader.description(),
        dtype_name(from), printable(field.name), printable(table.name()), dtype_name(field.dtype), dtype_name(field.dtype)));
}

}  // namespace

std::vector<CopyResult> import_into(const Store& store, Table& table, const Location& source, const IntoOptions& options) {
  const std::filesystem::path beside = store.path() / table.name();
  if (options.append && options.at) throw InvalidArgument("rows go to a place (at) or to the end (append), not both");
  if (!table.writable()) throw ReadOnlyError(fmt::format("table '{}' cannot be written", printable(table.name())));
  for (const char* const suffix : {".npy", ".pages"})
    if (same_file(source.file, beside.native() + suffix))
      throw InvalidArgument(fmt::format("{} is a file of the table itself", printable(source.file)));
  if (same_file(source.file, table.file()))
    throw InvalidArgument(fmt::format("{} is the file of the table itself", printable(source.file)));
  const Schema& schema = table.schema();
  std::vector<FieldSource> fields = options.fields;
  if (fields.empty()) fields.push_back({options.field, source.selector});
  const auto has = [&](std::string_view name) {
    return std::any_of(fields.begin(), fields.end(), [&](const FieldSource& one) { return one.field == name; });
  };
  check_fields(fields);
  for (const FieldSource& one : fields) (void)schema.field(one.field);
  if (options.append && !has("weight"))
    throw InvalidArgument(fmt::format("table '{}': new rows need their 'weight'", printable(table.name())));
  if (options.dtype && std::none_of(fields.begin(), fields.end(),
                                    [&](const FieldSource& one) { return schema.field(one.field).dtype == *options.dtype; }))
    throw InvalidArgument(fmt::format("dtype {}: '{}' of table '{}' is {}", dtype_name(*options.dtype),
                                      printable(fields.front().field), printable(table.name()),
                                      dtype_name(schema.field(fields.front().field).dtype)));

  IntoWords words(table, beside, source, options);
  std::vector<IntoPart> parts;
  std::vector<CopyResult> results;
  const std::uint64_t share = options.memory / 4 / fields.size();
  WordSink sink = words.sink();
  for (const FieldSource& one : fields) {
    const Field& field = schema.field(one.field);
    // What raw bytes are has to be said; other files say it, or leave it to be asked for.
    std::optional<DType> as = field.dtype;
    if (source.format == Location::Format::kRaw) as = options.dtype;
    IntoPart part{.field = &field, .origin = file_origin(part_of(source, one.array), as, options.reading), .rows = nullptr};
    part.rows = std::make_unique<SelectedRows>(part.origin, options.rows, field.dtype, std::exchange(sink, {}), share);
    check_into(table, part, options);
    results.push_back(result_of(*part.rows, part.rows->reader(), field.dtype));
    results.back().vocabulary = words.written();
    if (const DType from = part.rows->from(); !dtype_holds(field.dtype, from) && is_floating(field.dtype))
      results.back().remarks.push_back({fmt::format("{}: {} became {}, rounded to nearest even",
                                                    part.rows->reader().description(), dtype_name(from), dtype_name(field.dtype)),
                                        /*doubt=*/false});
    parts.push_back(std::move(part));
  }
  const std::uint64_t rows = results.front().rows, before = table.rows();
  for (std::size_t i = 1; i < parts.size(); ++i)
    if (results[i].rows != rows)
      throw InvalidArgument(fmt::format("{}: {} rows for '{}' and {} for '{}'", printable(source.file), rows,
                                        printable(fields[0].field), results[i].rows, printable(fields[i].field)));
  if (!options.append && !options.at && rows != before)
    throw InvalidArgument(
        fmt::format("{}: {} rows for table '{}' with {}: say where they go (at), or that they are added (append)",
                    parts.front().rows->reader().description(), rows, printable(table.name()), before));
  std::uint64_t at = options.append ? before : options.at.value_or(0);
  if (!options.append && (at > before || rows > before - at))
    throw InvalidArgument(fmt::format("{} rows at row {} reach past the end of table '{}' with {} rows (append adds rows)", rows,
                                      at, printable(table.name()), before));
  words.begin(rows, parts.front().rows->all_rows(), options.rows);
  if (rows == 0) return results;

  const std::uint64_t all = rows * parts.size();
  std::vector<Looked> looked;
  const auto keep_reports = [&] {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      results[i].report = parts[i].rows->report();
      for (Remark& remark : parts[i].rows->reader().remarks())
        if (std::none_of(results[i].remarks.begin(), results[i].remarks.end(),
                         [&](const Remark& one) { return one.text == remark.text; }))
          results[i].remarks.push_back(std::move(remark));
    }
  };
  if (options.append) {
    Table::NewRows readers;
    for (const IntoPart& part : parts) readers.emplace(part.field->name, &part.rows->reader());
    at = table.append_rows(readers, options.progress);
    keep_reports();
  } else {
    std::uint64_t bytes = 0;
    for (const IntoPart& part : parts) bytes += rows * part.field->bytes;
    const bool keep = options.look_first && bytes <= options.memory / 2;
    const bool twice = options.look_first && !keep;
    Steps steps(options.progress, twice ? 2 * all : all);
    if (options.look_first) {
      for (const IntoPart& part : parts) {
        RowReader& reader = part.rows->reader();
        looked.emplace_back(part.field->bytes, keep);
        if (keep) looked.back().kept.reserve(rows * part.field->bytes);
        copy_rows(reader, looked.back(), reader.dtype(), std::max(options.memory / 4, part.field->bytes), steps.step());
        steps.done(rows);
      }
      keep_reports();
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      RowReader& reader = parts[i].rows->reader();
      if (keep) {
        table.write(at, rows, looked[i].kept, parts[i].field->name);
        continue;
      }
      TableWriter writer(table, parts[i].field->name, at);
      copy_rows(reader, writer, reader.dtype(), std::max(options.memory / 4, parts[i].field->bytes), steps.step());
      steps.done(rows);
    }
    if (!options.look_first) keep_reports();
  }
  try {
    if (at != before && options.append && !words.written().empty())
      throw InvalidArgument(
          fmt::format("rows were added to table '{}' while words were: those would be of other rows", printable(table.name())));
    words.finish();  // at once: a crash that came before it would leave rows without words
    if (options.check) {
      Steps steps(options.progress, all);
      for (const IntoPart& part : parts) {
        SelectedRows again(part.origin, options.rows, part.field->dtype, WordSink{}, share);
        RangeReader written(table_rows(table, part.field->name), at, rows);
        check_written(again.reader(), written, /*bits=*/true, fmt::format("{}:{}", beside.native(), part.field->name),
                      options.memory / 4, steps.step());
        steps.done(rows);
      }
    }
  } catch (...) {
    // Rows that somebody else has added behind them since are not ours to take away, and have their numbers.
    if (options.append && table.rows() == at + rows) {
      table.resize(at);
      words.withdraw();
    }
    throw;
  }
  return results;
}

StoreOptions one_commit_options(StoreOptions options, const Geometry& geometry, std::uint64_t pages, std::uint64_t times,
                                std::uint64_t memory) {
  options.autocommit = false;
  if (options.durability == Durability::kNone || options.log_limit != 0) return options;
  // Pages at the seams of blocks are written twice; a record has a header of its own.
  const std::uint64_t some = checked_add(pages, pages / 8 + 1024, "pages of a commit");
  const std::uint64_t index = RedoLog::memory_for(2 * some);
  if (index / 2 > memory)
    throw BudgetError(
        fmt::format("{} pages to be changed as one: the redo log's index of them takes {}; {} of memory would do, or "
                    "rows in several parts",
                    pages, format_size(index / 2), format_size(checked_mul(index, 2, "memory"))));
  const std::uint64_t bytes = checked_mul(checked_mul(some, geometry.page_bytes() + 64, "bytes of a commit"), 2 * times, "bytes");
  // The budget is what the log goes by; pages past the hot ones take none of it.
  options.memory = std::max(options.memory, checked_mul(index, 8, "memory"));
  options.log_limit = std::max(bytes, std::uint64_t{128} << 20);
  return options;
}

}  // namespace embermap
