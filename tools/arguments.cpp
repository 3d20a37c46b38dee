#include "tools/arguments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "tools/command.hpp"

namespace embermap::tools {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Takes digits, with single underscores between them, off the front of `text`. Empty if there are none.
std::string take_digits(std::string_view& text) {
  std::string digits;
  std::size_t at = 0;
  while (at < text.size()) {
    if (is_digit(text[at])) {
      digits += text[at];
    } else if (text[at] != '_' || at == 0 || !is_digit(text[at - 1]) || at + 1 == text.size() || !is_digit(text[at + 1])) {
      break;
    }
    ++at;
  }
  text.remove_prefix(at);
  return digits;
}

// The whole number of `text`, or nothing.
std::optional<std::uint64_t> count_of(std::string_view text) {
  std::string digits = take_digits(text);
  if (digits.empty()) return std::nullopt;
  std::uint64_t zeros = 0;  // to append
  if (!text.empty()) {
    std::string fraction;
    if (text.front() == '.') {
      text.remove_prefix(1);
      fraction = take_digits(text);
      if (fraction.empty()) return std::nullopt;
    }
    if (text.empty() || (text.front() != 'e' && text.front() != 'E')) return std::nullopt;
    text.remove_prefix(1);
    if (!text.empty() && text.front() == '+') text.remove_prefix(1);
    const std::string exponent = take_digits(text);
    if (exponent.empty() || exponent.size() > 3 || !text.empty()) return std::nullopt;
    while (!fraction.empty() && fraction.back() == '0') fraction.pop_back();
    zeros = std::stoul(exponent);
    if (fraction.size() > zeros) return std::nullopt;
    zeros -= fraction.size();
    digits += fraction;
  }
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc{} || end != digits.data() + digits.size()) return std::nullopt;
  for (; zeros > 0 && value > 0; --zeros)
    if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return std::nullopt;
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

}  // namespace

std::uint64_t parse_count(std::string_view option, std::string_view text) {
  if (const auto value = count_of(text)) return *value;
  throw UsageError(
      fmt::format("{}: '{}' is not a whole number below 2^64; write 1000000, 1_000_000 or 1e6", option, printable(text)));
}

double parse_number(std::string_view option, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value))
    throw UsageError(fmt::format("{}: '{}' is not a finite number", option, printable(text)));
  return value;
}

std::uint64_t parse_size_option(std::string_view option, std::string_view text) {
  try {
    const std::uint64_t bytes = parse_size(text);
    if (bytes == 0) throw UsageError(fmt::format("{}: must be more than 0 bytes", option));
    return bytes;
  } catch (const InvalidArgument& error) {
    throw UsageError(fmt::format("{}: {}", option, error.what()));
  }
}

DType parse_dtype_option(std::string_view option, std::string_view text) {
  try {
    return parse_dtype(text);
  } catch (const DTypeError& error) {
    throw UsageError(fmt::format("{}: {}", option, error.what()));
  }
}

Initializer parse_initializer(std::string_view text) {
  const std::vector<std::string_view> parts = split(text, ':');
  const std::string_view kind = parts.front();
  const auto number = [&](std::size_t i) { return parse_number("--init", parts[i]); };
  if (kind == "zeros" && parts.size() == 1) return Zeros{};
  if (kind == "constant" && parts.size() == 2) return Constant{.value = number(1)};
  if (kind == "uniform" && parts.size() == 1) return Uniform{};
  if (kind == "uniform" && parts.size() == 3) return Uniform{.low = number(1), .high = number(2)};
  if (kind == "normal" && parts.size() == 1) return Normal{};
  if (kind == "normal" && parts.size() == 3) return Normal{.mean = number(1), .std = number(2)};
  throw UsageError(
      fmt::format("--init: '{}' is none of zeros, constant:VALUE, uniform:LOW:HIGH, normal:MEAN:STD", printable(text)));
}

std::string initializer_text(const Initializer& init) {
  struct Text {
    std::string operator()(const Zeros&) const { return "zeros"; }
    std::string operator()(const Constant& c) const { return fmt::format("constant:{}", c.value); }
    std::string operator()(const Uniform& u) const { return fmt::format("uniform:{}:{}", u.low, u.high); }
    std::string operator()(const Normal& n) const { return fmt::format("normal:{}:{}", n.mean, n.std); }
  };
  return std::visit(Text{}, init);
}

namespace {

// An option as it is named in messages, and its text.
struct Given {
  std::string shown;
  std::string name;
  std::string text;
};

// Splits NAME:OPTION=VALUE,...; the options go to `given`.
std::string split_optimizer(const std::string& text, std::vector<Given>& given) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos) return text;
  std::size_t begin = colon + 1;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string option = text.substr(begin, end - begin);
    const std::size_t equals = option.find('=');
    if (equals == std::string::npos || equals == 0)
      throw UsageError(fmt::format("--optimizer: '{}' is not of the form OPTION=VALUE", printable(option)));
    given.push_back({fmt::format("--optimizer: {}", printable(option.substr(0, equals))), option.substr(0, equals),
                     option.substr(equals + 1)});
    begin = end + 1;
  }
  return text.substr(0, colon);
}

void parse_option(const Given& given, double& value) { value = parse_number(given.shown, given.text); }
void parse_option(const Given& given, std::optional<double>& value) {
  if (given.text == "none") return value.reset();
  value = parse_number(given.shown, given.text);
}
void parse_option(const Given& given, bool& value) {
  if (given.text != "true" && given.text != "false")
    throw UsageError(fmt::format("{}: '{}' is neither true nor false", given.shown, printable(given.text)));
  value = given.text == "true";
}
void parse_option(const Given& given, std::array<double, 2>& value) {
  const std::size_t colon = given.text.find(':');
  if (colon == std::string::npos)
    throw UsageError(fmt::format("{}: '{}' is not of the form X:Y", given.shown, printable(given.text)));
  value = {parse_number(given.shown, given.text.substr(0, colon)), parse_number(given.shown, given.text.substr(colon + 1))};
}
void parse_option(const Given& given, StepOf& value) {
  const std::optional<StepOf> step = step_of_named(given.text);
  if (!step) throw UsageError(fmt::format("{}: '{}' is neither global nor row", given.shown, printable(given.text)));
  value = *step;
}

}  // namespace

void OptimizerArguments::add_to(CLI::App& command) {
  const std::string group = "Optimizer";
  command
      .add_option("--optimizer", text_,
                  "What the table is trained with: none (default), or one of " + optimizer_names() +
                      ", with any options of embermap.optim behind it: adam:lr=0.001,betas=0.9:0.99,amsgrad=true,step=row")
      ->type_name("NAME[:OPTION=VALUE,...]")
      ->group(group);
  const auto number = [&](const char* name, std::optional<std::string>& value, const char* help) {
    command.add_option(name, value, help)->type_name("X")->group(group);
  };
  number("--lr", lr_, "Learning rate (default: torch's, such as 0.001 for sgd and adam, 0.01 for adagrad)");
  number("--momentum", momentum_, "sgd, rmsprop: momentum, kept for each row if it is not 0");
  command.add_flag("--nesterov", nesterov_, "sgd: Nesterov momentum")->group(group);
  number("--weight-decay", weight_decay_, "Weight decay (default 0; adamw 0.01)");
  number("--lr-decay", lr_decay_, "adagrad, rowwise_adagrad: decay of the learning rate (default 0)");
  number("--eps", eps_, "Added where it is divided (default: torch's, such as 1e-10 for adagrad)");
  number("--initial-accumulator-value", initial_accumulator_value_,
         "adagrad, rowwise_adagrad: where the sum of squares begins (default 0)");
}

Optimizer OptimizerArguments::optimizer() const {
  std::vector<Given> given;
  const std::string name = split_optimizer(text_, given);
  const auto take = [&](const char* option, const char* field, const std::optional<std::string>& value) {
    if (value) given.push_back({option, field, *value});
  };
  take("--lr", "lr", lr_);
  take("--momentum", "momentum", momentum_);
  take("--weight-decay", "weight_decay", weight_decay_);
  take("--lr-decay", "lr_decay", lr_decay_);
  take("--eps", "eps", eps_);
  take("--initial-accumulator-value", "initial_accumulator_value", initial_accumulator_value_);
  if (nesterov_) given.push_back({"--nesterov", "nesterov", "true"});

  std::optional<Optimizer> optimizer = optimizer_named(name);
  if (!optimizer) throw UsageError(fmt::format("--optimizer: '{}' is none of none, {}", printable(name), optimizer_names()));
  if (!given.empty() && std::holds_alternative<std::monostate>(*optimizer))
    throw UsageError(fmt::format("{} needs --optimizer", given.front().shown));
  for (std::size_t i = 0; i < given.size(); ++i) {
    for (std::size_t before = 0; before < i; ++before)
      if (given[before].name == given[i].name) throw UsageError(fmt::format("{} is given twice", given[i].shown));
    bool known = false;
    std::visit(
        [&](auto& o) {
          visit_options(o, [&](const char* field, auto& value, bool) {
            if (given[i].name != field) return;
            parse_option(given[i], value);
            known = true;
          });
        },
        *optimizer);
    if (!known) throw UsageError(fmt::format("{} is not an option of the optimizer {}", given[i].shown, name));
  }
  try {
    check_optimizer(*optimizer);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }
  return *optimizer;
}

}  // namespace embermap::tools
