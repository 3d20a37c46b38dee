#include "nn/optimizers.hpp"

#include <torch/serialize/archive.h>

#include <array>
#include <string>

#include "nn/errors.hpp"

namespace embermap::nn {
namespace {

using detail::refuse;

// All that an optimizer says, as numbers.
struct Numbers {
  void operator()(std::string_view, double value, bool) { out.push_back(value); }
  void operator()(std::string_view, bool value, bool) { out.push_back(value ? 1 : 0); }
  void operator()(std::string_view, StepOf value, bool) { out.push_back(static_cast<double>(value)); }
  void operator()(std::string_view, const std::optional<double>& value, bool) {
    out.push_back(value ? 1 : 0);
    out.push_back(value.value_or(0));
  }
  void operator()(std::string_view, const std::array<double, 2>& pair, bool) { out.insert(out.end(), pair.begin(), pair.end()); }
  std::vector<double> out;
};

std::vector<double> numbers_of(const Optimizer& optimizer) {
  Numbers numbers;
  std::visit(
      [&](const auto& o) { visit_options(o, [&](auto name, const auto& value, bool said) { numbers(name, value, said); }); },
      optimizer);
  return std::move(numbers.out);
}

class Writer {
 public:
  explicit Writer(torch::serialize::OutputArchive& archive) : archive_{archive} {}
  void operator()(const char* name, double value, bool) const { archive_.write(name, c10::IValue(value)); }
  void operator()(const char* name, bool value, bool) const { archive_.write(name, c10::IValue(value)); }
  void operator()(const char* name, StepOf value, bool) const {
    archive_.write(name, c10::IValue(std::string(step_of_name(value))));
  }
  void operator()(const char* name, const std::optional<double>& value, bool) const {
    archive_.write(name, value ? c10::IValue(*value) : c10::IValue());
  }
  void operator()(const char* name, const std::array<double, 2>& pair, bool) const {
    archive_.write(name, c10::IValue(std::make_tuple(pair[0], pair[1])));
  }

 private:
  torch::serialize::OutputArchive& archive_;
};

class Reader {
 public:
  explicit Reader(torch::serialize::InputArchive& archive) : archive_{archive} {}
  void operator()(const char* name, double& value, bool) const { value = read(name).toDouble(); }
  void operator()(const char* name, bool& value, bool) const { value = read(name).toBool(); }
  void operator()(const char* name, StepOf& value, bool) const {
    const std::string text = read(name).toStringRef();
    const auto found = step_of_named(text);
    if (!found) refuse<c10::ValueError>("options: '", printable(text), "' is no way to count steps");
    value = *found;
  }
  void operator()(const char* name, std::optional<double>& value, bool) const {
    const c10::IValue found = read(name);
    value = found.isNone() ? std::nullopt : std::optional(found.toDouble());
  }
  void operator()(const char* name, std::array<double, 2>& pair, bool) const {
    const auto elements = read(name).toTuple()->elements();
    if (elements.size() != 2) refuse<c10::ValueError>("options: ", name, " has ", elements.size(), " numbers, not 2");
    pair = {elements[0].toDouble(), elements[1].toDouble()};
  }

 private:
  c10::IValue read(const char* name) const {
    c10::IValue value;
    archive_.read(name, value);
    return value;
  }
  torch::serialize::InputArchive& archive_;
};

template <class... All>
std::unique_ptr<TableOptimizerOptions> make_one_of(const Optimizer& optimizer) {
  std::unique_ptr<TableOptimizerOptions> out;
  const auto try_one = [&]<class Options>(const Options*) {
    if (const auto* values = std::get_if<typename Options::Kind>(&optimizer)) out = std::make_unique<Options>(*values);
  };
  (try_one(static_cast<const All*>(nullptr)), ...);
  return out;
}

}  // namespace

bool same_hyperparameters(const Optimizer& a, const Optimizer& b) {
  return a.index() == b.index() && numbers_of(a) == numbers_of(b);
}

std::unique_ptr<TableOptimizerOptions> make_options(const Optimizer& optimizer) {
  auto options =
      make_one_of<SGDOptions, AdagradOptions, RowWiseAdagradOptions, AdadeltaOptions, AdamOptions, AdamWOptions,
                  SparseAdamOptions, AdamaxOptions, NAdamOptions, RAdamOptions, ASGDOptions, RMSpropOptions, RpropOptions>(
          optimizer);
  if (!options) refuse<c10::ValueError>("there are no options for ", optimizer_name(optimizer));
  return options;
}

double TableOptimizerOptions::get_lr() const {
  return std::visit(
      [](const auto& o) {
        if constexpr (requires { o.lr; })
          return o.lr;
        else
          return 0.0;
      },
      optimizer());
}

void TableOptimizerOptions::set_lr(double lr) {
  Optimizer changed = optimizer();
  std::visit(
      [lr](auto& o) {
        if constexpr (requires { o.lr; }) o.lr = lr;
      },
      changed);
  set_optimizer(changed);
}

void TableOptimizerOptions::serialize(torch::serialize::OutputArchive& archive) const {
  const Optimizer values = optimizer();
  archive.write("kind", c10::IValue(std::string(optimizer_name(values))));
  std::visit([&](const auto& o) { visit_options(o, Writer(archive)); }, values);
}

void TableOptimizerOptions::serialize(torch::serialize::InputArchive& archive) {
  Optimizer values = optimizer();
  c10::IValue kind;
  archive.read("kind", kind);
  if (kind.toStringRef() != optimizer_name(values))
    refuse<c10::ValueError>("options of ", optimizer_name(values), " cannot be those of ", printable(kind.toStringRef()));
  std::visit([&](auto& o) { visit_options(o, Reader(archive)); }, values);
  set_optimizer(values);
}

}  // namespace embermap::nn
