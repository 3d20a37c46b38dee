// Values as they are written on the command line. All functions throw UsageError naming the option and the text.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.hpp"
#include "kernels/optimizer.hpp"
#include "store/initializer.hpp"

namespace embermap::tools {

// "1000000", "1_000_000", "1e9", "1.5e9": a whole number below 2^64, exactly.
std::uint64_t parse_count(std::string_view option, std::string_view text);

// A finite decimal number.
double parse_number(std::string_view option, std::string_view text);

// "64MiB" and the like (base/size_text.hpp); not 0.
std::uint64_t parse_size_option(std::string_view option, std::string_view text);

DType parse_dtype_option(std::string_view option, std::string_view text);

// "zeros", "constant:VALUE", "uniform:LOW:HIGH", "normal:MEAN:STD"; "uniform" and "normal" alone mean 0:1.
Initializer parse_initializer(std::string_view text);
std::string initializer_text(const Initializer& init);  // the other way

// --optimizer NAME[:OPTION=VALUE,...] and options of their own for what is needed most. One that the chosen optimizer does not
// have is refused, never ignored, and so is one that is given twice.
class OptimizerArguments {
 public:
  void add_to(CLI::App& command);
  Optimizer optimizer() const;

 private:
  std::string text_ = "none";
  std::optional<std::string> lr_, momentum_, weight_decay_, lr_decay_, eps_, initial_accumulator_value_;
  bool nesterov_ = false;
};

}  // namespace embermap::tools
