#include "store/table_archive.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "io/array_file.hpp"
#include "io/compare.hpp"
#include "io/converting_reader.hpp"
#include "io/copy_file.hpp"
#include "io/same_file.hpp"
#include "io/small_rows.hpp"
#include "io/torch_file.hpp"
#include "store/manifest.hpp"
#include "store/table_import.hpp"

namespace embermap {
namespace {

constexpr const char* kSettings = "embermap";
constexpr const char* kVocabulary = "vocabulary";
constexpr std::uint64_t kMostSettings = 1U << 20;
constexpr double kMostWhole = 9007199254740992.0;  // up to here a double has every whole number

RowOrigin reads(std::function<std::unique_ptr<RowReader>()> open) {
  RowOrigin out;
  out.open = [open = std::move(open)](const WordSink&) { return open(); };
  out.in_turn = true;
  return out;
}

CopyOptions copy_options(const ArchiveOptions& options) {
  CopyOptions out;
  out.overwrite = options.overwrite;
  out.gzip = options.gzip;
  out.check = options.check;
  out.memory = options.memory;
  out.progress = options.progress;
  out.before_finish = options.before_finish;
  return out;
}

Location in_file(const Location& file, const std::string& name) { return {file.file, name, file.format}; }

std::string bytes_of(const Location& location, std::uint64_t most) {
  const auto reader = open_rows(location);
  if (reader->dtype() != DType::kUInt8 || reader->dim() != 1 || reader->rows() > most)
    throw FormatError(location.file, fmt::format("'{}' is {} x {} {}, no text of at most {} bytes", printable(location.selector),
                                                 reader->rows(), reader->dim(), dtype_name(reader->dtype()), most));
  std::string text(reader->rows(), '\0');
  reader->read(0, reader->rows(), reinterpret_cast<std::byte*>(text.data()));
  return text;
}

bool named(const Entry& entry, std::string_view name) {
  const std::string_view found = entry.name;
  return found == name || (found.starts_with('/') && found.substr(1) == name);
}

}  // namespace

void export_table(const Table& table, const Location& destination, const ArchiveOptions& options) {
  std::vector<RowOrigin> origins;
  std::vector<std::string> names;
  for (const Field& field : table.schema().fields()) {
    origins.push_back(reads([table, name = field.name] { return table_rows(table, name); }));
    names.push_back(field.name);
  }
  if (!options.vocabulary.empty()) {
    if (const std::uint64_t words = VocabularyReader(options.vocabulary).words(); words != table.rows())
      throw FormatError(options.vocabulary, fmt::format("has {} words for {} rows", words, table.rows()));
    origins.push_back(reads([file = options.vocabulary] { return std::make_unique<FileBytes>(file); }));
    names.emplace_back(kVocabulary);
  }
  origins.push_back(
      reads([text = table_settings_text(table)] { return std::make_unique<TextRows>("the settings of the table", text); }));
  names.emplace_back(kSettings);
  copy_arrays(origins, names, destination, copy_options(options));
}

bool is_table_archive(const Location& source) {
  if (!source.selector.empty() || !format_has_members(source.format)) return false;
  bool settings = false, weight = false;
  for (const Entry& entry : list_entries(source.file, source.format)) {
    settings = settings || named(entry, kSettings);
    weight = weight || named(entry, "weight");
  }
  return settings && weight;
}

Table import_table(Store& store, std::string_view name, const Location& source, const std::filesystem::path& vocabulary,
                   std::uint64_t memory, const Progress& progress) {
  const TableSettings settings = parse_table_settings(bytes_of(in_file(source, kSettings), kMostSettings), source.file);
  const TableOptions& made = settings.options;
  const Schema schema(made.dim, made.dtype, made.optimizer);
  std::vector<std::unique_ptr<RowReader>> readers;
  for (const Field& field : schema.fields()) {
    auto reader = open_rows_as(in_file(source, field.name), field.dtype);
    if (reader->rows() != made.rows || reader->dim() != field.elements || reader->dtype() != field.dtype)
      throw FormatError(source.file, fmt::format("'{}' is {} x {} {}; the table it was has {} x {} {}", printable(field.name),
                                                 reader->rows(), reader->dim(), dtype_name(reader->dtype()), made.rows,
                                                 field.elements, dtype_name(field.dtype)));
    readers.push_back(std::move(reader));
  }
  Store::ImportedState state{.fields = {}, .step = settings.step, .carried = settings.carried};
  for (std::size_t i = 1; i < readers.size(); ++i) state.fields.emplace(schema.fields()[i].name, readers[i].get());
  // The words appear together with the rows: complete before those, taken away again where they fail.
  std::optional<TemporaryFile> words;
  if (!vocabulary.empty()) {
    bool there = false;
    for (const Entry& entry : list_entries(source.file, source.format)) there = there || named(entry, kVocabulary);
    if (there) {
      const auto reader = open_rows(in_file(source, kVocabulary));
      if (reader->dtype() != DType::kUInt8 || reader->dim() != 1)
        throw FormatError(source.file, fmt::format("'{}' is no text", kVocabulary));
      const std::filesystem::path beside = store.path() / name;
      check_vocabulary_place(vocabulary, beside);
      // One that is there while the table is not was left behind.
      words = TemporaryFile::create(vocabulary, /*overwrite=*/same_file(vocabulary, vocabulary_beside(beside)));
      std::vector<std::byte> block(std::min<std::uint64_t>(std::max<std::uint64_t>(memory / 4, 4096), 1U << 20));
      for (std::uint64_t at = 0; at < reader->rows(); at += block.size()) {
        const std::uint64_t some = std::min<std::uint64_t>(block.size(), reader->rows() - at);
        reader->read(at, some, block.data());
        words->file().write(at, std::span(block).first(some));
      }
      if (const std::uint64_t count = VocabularyReader(words->file().path()).words(); count != made.rows)
        throw FormatError(source.file, fmt::format("'{}' has {} words for {} rows", kVocabulary, count, made.rows));
    }
  }
  Table table = store.import(name, *readers.front(), made, state, progress);
  if (words) {
    try {
      words->commit();
    } catch (...) {
      store.remove(name);
      throw;
    }
  }
  return table;
}

// --- torch.optim ---

namespace {

// Options of ours that torch has not, or that are not hyperparameters.
bool is_ours(std::string_view option) {
  return option == "step" || option == "clip_value" || option == "clip_row" || option == "stochastic_rounding" ||
         option == "initial_accumulator_value";
}

// The size of the next step that torch's ASGD keeps after `step` steps, the last of which had this rate.
double asgd_eta(const Asgd& asgd, double lr, std::uint64_t step) {
  return step == 0 ? asgd.lr : lr / std::pow(1 + asgd.lambd * lr * static_cast<double>(step), asgd.alpha);
}

// What torch has for each parameter beside state of its shape, after `step` steps.
std::vector<std::pair<std::string, double>> torch_scalars(const Table& table) {
  const std::uint64_t step = table.step();
  std::vector<std::pair<std::string, double>> out;
  const Optimizer optimizer = table.optimizer();
  if (std::holds_alternative<Sgd>(optimizer)) return out;
  out.emplace_back("step", static_cast<double>(step));
  if (std::holds_alternative<NAdam>(optimizer))
    out.emplace_back("mu_product", step_scalars(optimizer, step + 1, table.seed(), table.carried()).mu_product);
  if (const auto* asgd = std::get_if<Asgd>(&optimizer)) {
    const auto t = static_cast<double>(step);
    out.emplace_back("eta", asgd_eta(*asgd, table.carried().value_or(asgd->lr), step));
    out.emplace_back("mu", step == 0 ? 1 : 1 / std::max(1.0, t - asgd->t0));
  }
  return out;
}

TorchTree text_tree(std::string text) { return TorchTree{std::move(text)}; }

TorchTree option_tree(double value) { return TorchTree{value}; }
TorchTree option_tree(bool value) { return TorchTree{value}; }
TorchTree option_tree(const std::array<double, 2>& value) {
  return TorchTree{TorchTree::Tuple{{TorchTree{value[0]}, TorchTree{value[1]}}}};
}
template <class T>
TorchTree option_tree(const T&) {
  return TorchTree{};
}

void check_torch_kind(const Table& table) {
  const Optimizer optimizer = table.optimizer();
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(fmt::format("table '{}': {}", printable(table.name()), why));
  };
  if (std::holds_alternative<std::monostate>(optimizer)) refuse("it has no optimizer, so there is no state");
  if (std::holds_alternative<RowWiseAdagrad>(optimizer)) refuse("torch.optim has no rowwise_adagrad");
}

bool counts_rows(const Schema& schema) {
  return std::any_of(schema.fields().begin(), schema.fields().end(), [](const Field& field) { return field.name == "step"; });
}

// "name" of "state.3.name"; empty for others.
std::string_view state_name(std::string_view entry, std::string_view prefix) {
  return entry.size() > prefix.size() && entry.starts_with(prefix) && entry[prefix.size()] == '.'
             ? entry.substr(prefix.size() + 1)
             : std::string_view{};
}

class TorchState {
 public:
  // The file, or the dictionary in it that the selector names.
  explicit TorchState(const Location& source) : file_{source.file}, contents_{read_torch_file(source.file)} {
    if (!source.selector.empty()) {
      within_ = source.selector + ".";
      keep_within(contents_.scalars);
      keep_within(contents_.tensors);
    }
    for (const TorchScalar& scalar : contents_.scalars) scalars_.emplace(scalar.name, &scalar);
    for (const TorchTensor& tensor : contents_.tensors) tensors_.emplace(tensor.name, &tensor);
    bool groups = false;
    for (const TorchScalar& scalar : contents_.scalars) groups = groups || scalar.name.starts_with(kGroups);
    if (groups) return;
    const std::string what = source.selector.empty() ? "" : fmt::format("'{}' ", printable(source.selector));
    throw FormatError(file_,
                      fmt::format("{}is no state_dict of an optimizer: there are no param_groups in it{}", what, others()));
  }

  const TorchTensor* tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
  }
  std::optional<double> number(const std::string& name) const {
    const auto found = scalars_.find(name);
    if (found == scalars_.end()) return std::nullopt;
    if (const auto* real = std::get_if<double>(&found->second->value)) return *real;
    if (const auto* whole = std::get_if<std::int64_t>(&found->second->value)) return static_cast<double>(*whole);
    return std::nullopt;
  }
  std::optional<bool> truth(const std::string& name) const {
    const auto found = scalars_.find(name);
    if (found == scalars_.end()) return std::nullopt;
    const auto* value = std::get_if<bool>(&found->second->value);
    return value == nullptr ? std::nullopt : std::optional(*value);
  }

  // Numbers of parameters, in order.
  std::vector<std::uint64_t> parameters() const {
    std::vector<std::uint64_t> out;
    for (std::uint64_t group = 0; has_group(group); ++group)
      for (std::uint64_t place = 0; const auto id = parameter(group, place); ++place) out.push_back(*id);
    return out;
  }
  std::uint64_t group_of(std::uint64_t wanted) const {
    for (std::uint64_t group = 0; has_group(group); ++group)
      for (std::uint64_t place = 0; const auto id = parameter(group, place); ++place)
        if (*id == wanted) return group;
    throw NotFound(fmt::format("{}: parameter {} is in none of its param_groups", printable(file_), wanted));
  }

  // Why the state of a parameter is not a table's; empty: it is.
  std::string obstacle(std::uint64_t parameter, const Table& table) const {
    const std::string prefix = fmt::format("state.{}", parameter);
    const Schema& schema = table.schema();
    const bool per_row = counts_rows(schema);
    for (std::size_t i = 1; i < schema.fields().size(); ++i) {
      const Field& field = schema.fields()[i];
      if (field.elements == 1 && per_row && (field.name == "step" || field.name == "mu_product")) {
        if (!number(prefix + "." + field.name)) return fmt::format("there is no '{}.{}'", prefix, field.name);
        continue;
      }
      const TorchTensor* const found = tensor(prefix + "." + field.name);
      if (found == nullptr) return fmt::format("there is no '{}.{}'", prefix, field.name);
      if (found->shape != std::vector<std::uint64_t>{table.rows(), field.elements})
        return fmt::format("'{}.{}' has the shape {}, the table's is ({}, {})", prefix, field.name, shape_to_text(found->shape),
                           table.rows(), field.elements);
    }
    for (const TorchTensor& one : contents_.tensors) {
      const std::string_view name = state_name(one.name, prefix);
      if (name.empty() || one.shape.empty()) continue;
      const auto& fields = schema.fields();
      if (std::none_of(fields.begin() + 1, fields.end(), [&](const Field& field) { return field.name == name; }))
        return fmt::format("the table's optimizer, {}, keeps no '{}'", optimizer_name(table.optimizer()), printable(name));
    }
    if (!std::holds_alternative<Sgd>(table.optimizer()) && !number(prefix + ".step"))
      return fmt::format("there is no '{}.step'", prefix);
    return {};
  }

  // What the table's next step takes over from the last one, after `step` steps with these options, as the file's "mu_product" or
  // "eta" has it. Where options were always these, nothing: that is exact, and torch keeps 24 bits.
  std::optional<double> carried(const std::string& prefix, const Optimizer& optimizer, std::uint64_t step) const {
    const auto said = [&](const char* name, double always) -> std::optional<double> {
      const auto found = number(prefix + "." + name);
      if (!found) throw FormatError(file_, fmt::format("there is no '{}.{}'", prefix, name));
      if (!std::isfinite(*found) || *found < 0)
        throw FormatError(file_, fmt::format("'{}.{}' is {}, no number of at least 0", prefix, name, *found));
      constexpr double kNear = 1e-5;  // products of float32 drift
      return std::abs(*found - always) <= kNear * always ? std::nullopt : found;
    };
    if (step == 0) return std::nullopt;
    if (const auto* nadam = std::get_if<NAdam>(&optimizer); nadam != nullptr && nadam->step == StepOf::kGlobal)
      return said("mu_product", step_scalars(optimizer, step + 1).mu_product);
    const auto* const asgd = std::get_if<Asgd>(&optimizer);
    if (asgd == nullptr) return std::nullopt;
    const auto eta = said("eta", asgd_eta(*asgd, asgd->lr, step));
    if (!eta || *eta == 0) return eta;
    // The rate that this size was made of: larger, as far as sizes grow with rates.
    double low = *eta, high = low;
    for (int i = 0; i < 1100 && asgd_eta(*asgd, high, step) < *eta; ++i) high *= 2;
    if (!std::isfinite(high) || asgd_eta(*asgd, high, step) < *eta)
      throw FormatError(file_, fmt::format("'{}.eta' is {}, which no rate gives after {} steps", prefix, *eta, step));
    for (int i = 0; i < 200; ++i) {
      const double middle = low + (high - low) / 2;
      (asgd_eta(*asgd, middle, step) < *eta ? low : high) = middle;
    }
    return high;
  }

  // The table's optimizer with the options of a group. Throws InvalidArgument for a group of another optimizer.
  Optimizer options(std::uint64_t group, const Optimizer& ours) const {
    Optimizer out = ours;
    const bool rprop = std::holds_alternative<Rprop>(ours);
    std::visit(
        [&](auto& o) {
          visit_options(o, [&]<class T>(const char* option, T& value, bool) {
            if (is_ours(option) || (rprop && std::string_view(option) == "lr")) return;
            const std::string name = fmt::format("param_groups.{}.{}", group, option);
            const auto missing = [&] {
              throw InvalidArgument(fmt::format("{}: it is the state of another optimizer than {}: its param_groups have no '{}'",
                                                printable(file_), optimizer_name(ours), option));
            };
            if constexpr (std::is_same_v<T, double>) {
              if (const auto found = number(name))
                value = *found;
              else if (std::string_view(option) != "lr_decay")
                missing();
            } else if constexpr (std::is_same_v<T, bool>) {
              // Torch has them since some version; without one it is as it was.
              if (const auto found = truth(name)) value = *found;
            } else if constexpr (std::is_same_v<T, std::array<double, 2>>) {
              const auto first = number(name + ".0"), second = number(name + ".1");
              if (!first || !second) missing();
              value = {first.value_or(0), second.value_or(0)};
            }
          });
        },
        out);
    if (std::holds_alternative<AdamW>(ours) &&
        truth(fmt::format("param_groups.{}.decoupled_weight_decay", group)).value_or(true) == false)
      throw InvalidArgument(
          fmt::format("{}: it is the state of Adam, whose weight decay is not decoupled; the table has adamw", printable(file_)));
    return out;
  }

  // Where a tensor of the state is in the file.
  Location location(const std::string& name) const { return {file_, within_ + name, Location::Format::kTorch}; }

 private:
  static constexpr std::string_view kGroups = "param_groups.";

  // Leaves what lies in the dictionary that was named, under the names that it has there.
  template <class T>
  void keep_within(std::vector<T>& all) const {
    std::erase_if(all, [this](const T& one) { return !one.name.starts_with(within_); });
    for (T& one : all) one.name.erase(0, within_.size());
  }
  // For an error: the dictionaries further inside that are state_dicts of optimizers.
  std::string others() const {
    constexpr std::size_t kMost = 8;
    std::set<std::string> found;
    for (const TorchScalar& scalar : contents_.scalars)
      if (const auto at = scalar.name.find(fmt::format(".{}", kGroups)); at != std::string::npos && found.size() < kMost)
        found.insert(fmt::format("{}:{}", printable(file_), printable(within_ + scalar.name.substr(0, at))));
    return found.empty() ? "" : fmt::format("; there are in {}", fmt::join(found, ", "));
  }
  // A group may have no parameters.
  bool has_group(std::uint64_t group) const {
    const std::string prefix = fmt::format("param_groups.{}.", group);
    const auto first = scalars_.lower_bound(prefix);
    return first != scalars_.end() && first->first.starts_with(prefix);
  }
  // The number that stands there; nothing behind the last one.
  std::optional<std::uint64_t> parameter(std::uint64_t group, std::uint64_t place) const {
    const std::string name = fmt::format("param_groups.{}.params.{}", group, place);
    const std::optional<double> id = number(name);
    if (!id) return std::nullopt;
    if (!(*id >= 0) || *id > kMostWhole || std::trunc(*id) != *id)
      throw FormatError(file_, fmt::format("'{}' is {}, no number of a parameter", name, *id));
    return static_cast<std::uint64_t>(*id);
  }

  std::filesystem::path file_;
  std::string within_;  // in front of the names in the file: "optimizer."
  TorchContents contents_;
  std::map<std::string, const TorchScalar*> scalars_;
  std::map<std::string, const TorchTensor*> tensors_;
};

}  // namespace

void export_torch_state(const Table& table, const Location& destination, const ArchiveOptions& options) {
  check_torch_kind(table);
  const Schema& schema = table.schema();
  if (counts_rows(schema))
    throw InvalidArgument(
        fmt::format("table '{}': each row counts its own steps (step=row); torch.optim has one step for a "
                    "parameter",
                    printable(table.name())));
  if (destination.format != Location::Format::kTorch || !destination.selector.empty())
    throw InvalidArgument(
        fmt::format("{}: the state_dict of an optimizer is a file of torch, as in optimizer.pt", printable(destination.file)));
  std::vector<ArrayShape> arrays;
  TorchTree::Dict state;
  std::vector<std::pair<std::string, double>> numbers = torch_scalars(table);
  // Torch keeps them as tensors of no dimension, in float32.
  for (const auto& [name, value] : numbers) {
    (void)value;
    state.emplace_back(text_tree(name), TorchTree{TorchTree::Tensor{arrays.size(), DType::kFloat32, {}}});
    arrays.push_back({name, 1, 1, DType::kFloat32});
  }
  for (std::size_t i = 1; i < schema.fields().size(); ++i) {
    const Field& field = schema.fields()[i];
    state.emplace_back(text_tree(field.name),
                       TorchTree{TorchTree::Tensor{arrays.size(), field.dtype, {table.rows(), field.elements}}});
    arrays.push_back({field.name, table.rows(), field.elements, field.dtype});
  }
  TorchTree::Dict group;
  std::visit(
      [&](const auto& o) {
        visit_options(o, [&](const char* option, const auto& value, bool) {
          if (!is_ours(option)) group.emplace_back(text_tree(option), option_tree(value));
        });
      },
      table.optimizer());
  if (std::holds_alternative<AdamW>(table.optimizer())) group.emplace_back(text_tree("decoupled_weight_decay"), TorchTree{true});
  for (const char* flag : {"foreach", "capturable", "differentiable", "fused"})  // how torch computes: its defaults
    group.emplace_back(text_tree(flag),
                       std::string_view(flag) == "foreach" || std::string_view(flag) == "fused" ? TorchTree{} : TorchTree{false});
  group.emplace_back(text_tree("params"), TorchTree{TorchTree::List{TorchTree{std::int64_t{0}}}});
  TorchTree::Dict states;
  if (!state.empty()) states.emplace_back(TorchTree{std::int64_t{0}}, TorchTree{std::move(state)});
  TorchTree::Dict all;
  all.emplace_back(text_tree("state"), TorchTree{std::move(states)});
  all.emplace_back(text_tree("param_groups"), TorchTree{TorchTree::List{TorchTree{std::move(group)}}});

  const auto writer =
      create_torch_arrays(destination, arrays, TorchTree{std::move(all)}, {.overwrite = options.overwrite, .words = {}});
  for (const std::size_t i : writer->order()) {
    RowWriter& out = writer->next();
    if (i < numbers.size()) {
      const auto value = static_cast<float>(numbers[i].second);
      out.write(1, reinterpret_cast<const std::byte*>(&value));
    } else {
      const auto reader = table_rows(table, arrays[i].name);
      copy_rows(*reader, out, reader->dtype(), options.memory / 2, options.progress);
    }
    out.finish();
  }
  if (options.before_finish) options.before_finish();
  writer->finish();
}

TorchStateReport import_torch_state(Table& table, const Location& source, std::optional<std::uint64_t> parameter,
                                    std::uint64_t memory, const Progress& progress) {
  check_torch_kind(table);
  const TorchState state(source);
  const std::filesystem::path& file = source.file;
  const std::vector<std::uint64_t> all = state.parameters();
  if (parameter) {
    if (std::find(all.begin(), all.end(), *parameter) == all.end())
      throw NotFound(fmt::format("{}: there is no parameter {}; it has {}", printable(file), *parameter, fmt::join(all, ", ")));
    if (const std::string why = state.obstacle(*parameter, table); !why.empty())
      throw InvalidArgument(
          fmt::format("{}: parameter {} is not of table '{}': {}", printable(file), *parameter, printable(table.name()), why));
  } else {
    std::vector<std::uint64_t> fit;
    std::string why;
    for (const std::uint64_t one : all) {
      const std::string obstacle = state.obstacle(one, table);
      if (obstacle.empty()) fit.push_back(one);
      if (!obstacle.empty() && why.empty()) why = obstacle;
    }
    if (fit.empty())
      throw InvalidArgument(fmt::format("{}: none of its {} parameters has state that fits table '{}'{}", printable(file),
                                        all.size(), printable(table.name()), why.empty() ? "" : ": " + why));
    if (fit.size() > 1)
      throw InvalidArgument(
          fmt::format("{}: the state of several parameters fits table '{}': {}; name one with --param (or parameter=)",
                      printable(file), printable(table.name()), fmt::join(fit, ", ")));
    parameter = fit.front();
  }
  TorchStateReport report{.parameter = fmt::format("state.{}", *parameter), .fields = {}, .step = table.step()};
  const Optimizer optimizer = state.options(state.group_of(*parameter), table.optimizer());
  check_optimizer(optimizer);
  const std::optional<double> step = state.number(report.parameter + ".step");
  if (step) {
    if (!(*step >= 0) || *step > kMostWhole || std::trunc(*step) != *step)
      throw FormatError(file, fmt::format("'{}.step' is {}, no number of steps", report.parameter, *step));
    report.step = static_cast<std::uint64_t>(*step);
  }
  const std::optional<double> carried = step ? state.carried(report.parameter, optimizer, report.step) : std::nullopt;
  const Schema& schema = table.schema();
  const bool per_row = counts_rows(schema);
  const std::uint64_t rows = table.rows(), fields = schema.fields().size() - 1;
  for (std::size_t i = 1; i < schema.fields().size(); ++i) {
    const Field& field = schema.fields()[i];
    report.fields.push_back(field.name);
    const std::string name = report.parameter + "." + field.name;
    const bool one_value = per_row && field.elements == 1 && (field.name == "step" || field.name == "mu_product");
    std::unique_ptr<RowReader> reader;
    std::vector<std::byte> value(field.bytes);
    if (one_value) {
      const double number = *state.number(name);
      ConversionReport ignored;
      convert_elements(DType::kFloat64, reinterpret_cast<const std::byte*>(&number), field.dtype, value.data(), 1, ignored);
    } else {
      reader = std::make_unique<ConvertingReader>(open_rows(state.location(name)), field.dtype, memory / 4);
    }
    const std::uint64_t block = std::clamp<std::uint64_t>(memory / 4 / field.bytes, 1, std::max<std::uint64_t>(rows, 1));
    std::vector<std::byte> buffer(std::min(block, rows) * field.bytes);
    for (std::uint64_t first = 0; first < rows; first += block) {
      const std::uint64_t count = std::min(block, rows - first);
      if (reader)
        reader->read(first, count, buffer.data());
      else
        for (std::uint64_t row = 0; row < count; ++row)
          std::copy(value.begin(), value.end(), buffer.begin() + static_cast<std::ptrdiff_t>(row * field.bytes));
      table.write(first, count, std::span(buffer).first(count * field.bytes), field.name);
      if (progress) progress((i - 1) * rows + first + count, fields * rows);
    }
  }
  table.set_optimizer(optimizer);
  if (step) table.set_step(report.step, carried);
  return report;
}

}  // namespace embermap
