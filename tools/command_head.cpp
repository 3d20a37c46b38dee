// embermap head, embermap diff: looking at rows.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/compare.hpp"
#include "tools/any_rows.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"
#include "tools/progress.hpp"
#include "tools/text.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct HeadArguments {
  std::string source, from, source_dtype, count = "10";
  LayoutArguments layout;
  RangeArguments rows;
};

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Numbers in the fewest digits that mean the same value.
struct Element {
  std::string text;
  Json json;
};
Element element_of(DType dtype, const std::byte* at) {
  const auto real = [](auto value) -> Element {
    // JSON has no other numbers.
    return {fmt::format("{}", value), std::isfinite(value) ? Json(value) : Json(fmt::format("{}", value))};
  };
  const auto whole = [](auto value) -> Element { return {fmt::format("{}", value), Json(value)}; };
  switch (dtype) {
    case DType::kFloat32: return real(load<float>(at));
    case DType::kFloat64: return real(load<double>(at));
    case DType::kInt8: return whole(static_cast<int>(load<std::int8_t>(at)));
    case DType::kUInt8: return whole(static_cast<int>(load<std::uint8_t>(at)));
    case DType::kInt32: return whole(load<std::int32_t>(at));
    case DType::kInt64: return whole(load<std::int64_t>(at));
    default: {  // float16, bfloat16
      float wide = 0;
      ConversionReport ignored;
      convert_elements(dtype, at, DType::kFloat32, reinterpret_cast<std::byte*>(&wide), 1, ignored);
      return real(wide);
    }
  }
}

int head(const HeadArguments& arguments, const Common& common) {
  const std::uint64_t most = parse_count("-n", arguments.count);
  std::vector<std::string> words;
  ReadOptions options{.dtype = optional_dtype("--source-dtype", arguments.source_dtype),
                      .words = [&](std::uint64_t, std::string_view word) { words.emplace_back(word); }};
  AnyRows rows =
      open_any_rows("SRC", arguments.source, arguments.from, arguments.layout.options(options), common, common.memory / 2);
  const RowReader& reader = *rows.reader;
  const auto [first, count] = arguments.rows.given() ? arguments.rows.of(reader.rows())
                                                     : std::pair<std::uint64_t, std::uint64_t>{0, std::min(most, reader.rows())};
  const std::uint64_t item = item_size(reader.dtype());
  const std::uint64_t row_bytes = checked_mul(reader.dim(), item, "bytes of a row");
  if (row_bytes > common.memory)
    throw BudgetError(fmt::format("a row takes {} bytes, more than --memory {}", row_bytes, common.memory_text));
  const std::uint64_t block = std::max<std::uint64_t>(1, (1 << 20) / std::max<std::uint64_t>(1, row_bytes));
  std::vector<std::byte> buffer(std::min(block, std::max<std::uint64_t>(1, count)) * row_bytes);

  Json json{{"source", json_text(arguments.source)}, {"rows", reader.rows()}, {"dim", reader.dim()},
            {"dtype", dtype_name(reader.dtype())},   {"first", first},        {"values", Json::array()}};
  if (!common.json) print(fmt::format("{} x {} {}\n", grouped(reader.rows()), grouped(reader.dim()), dtype_name(reader.dtype())));
  for (std::uint64_t at = first; at < first + count;) {
    check_interrupt();
    const std::uint64_t some = std::min(block, first + count - at);
    words.clear();
    rows.reader->read(at, some, buffer.data());
    std::string text;
    for (std::uint64_t r = 0; r < some; ++r) {
      Json values = Json::array();
      std::string line = fmt::format("{}", at + r);
      if (words.size() == some) line += " " + printable(words[r]);
      line += ":";
      for (std::uint64_t c = 0; c < reader.dim(); ++c) {
        Element element = element_of(reader.dtype(), buffer.data() + r * row_bytes + c * item);
        if (common.json)
          values.push_back(std::move(element.json));
        else
          line += " " + element.text;
      }
      if (common.json) {
        json["values"].push_back(std::move(values));
        if (words.size() == some) json["words"].push_back(json_text(words[r]));
      }
      text += line + "\n";
    }
    if (!common.json) print(text);
    at += some;
  }
  if (common.json) print_json(json);
  return kDone;
}

// As cmp and diff have it: 1 is for rows that differ alone, 2 for all that keeps them from being compared.
constexpr int kDiffer = 1, kNotCompared = 2;

struct DiffArguments {
  std::string a, b, from, source_dtype;
  LayoutArguments layout;
  bool values = false;
};

int diff(const DiffArguments& arguments, const Common& common) {
  const std::optional<DType> named = optional_dtype("--source-dtype", arguments.source_dtype);
  // What files cannot tell is said of both sides, and taken where it is needed.
  const auto open = [&](const char* option, const std::string& text) {
    const auto with = [&](std::optional<DType> dtype) {
      return open_any_rows(option, text, arguments.from, arguments.layout.options({.dtype = dtype}), common, common.memory / 4);
    };
    if (!named) return with(std::nullopt);
    try {
      return with(named);
    } catch (const DTypeError&) {  // the file says another one, which is taken; or there is no sense in the one named
      try {
        return with(std::nullopt);
      } catch (const Error&) {
      }
      throw;
    }
  };
  AnyRows a = open("A", arguments.a);
  AnyRows b = open("B", arguments.b);
  RowDifference found;
  {
    ProgressLine line("diff", a.reader->dim() * item_size(a.reader->dtype()), common.quiet);
    found = compare_rows(*a.reader, *b.reader, !arguments.values, std::max<std::uint64_t>(common.memory / 4, 1), line.callback());
  }
  check_interrupt();
  if (common.json) {
    Json json{{"a", json_text(arguments.a)},
              {"b", json_text(arguments.b)},
              {"rows", found.rows},
              {"dim", a.reader->dim()},
              {"dtypes", {dtype_name(a.reader->dtype()), dtype_name(b.reader->dtype())}},
              {"same", found.same()},
              {"different_rows", found.different_rows},
              {"different_elements", found.elements}};
    if (!found.same()) {
      json["first"] = {{"row", found.first_row}, {"column", found.first_column}};
      json["largest"] = {{"difference", std::isfinite(found.largest) ? Json(found.largest) : Json("inf")},
                         {"row", found.largest_row},
                         {"column", found.largest_column}};
    }
    print_json(json);
  } else if (!common.quiet) {
    if (found.same())
      print(fmt::format("{} rows are the same\n", grouped(found.rows)));
    else
      print(fmt::format(
          "{} of {} rows differ, in {} elements; first at row {}, column {}; largest difference {} at row {}, column {}\n",
          grouped(found.different_rows), grouped(found.rows), grouped(found.elements), found.first_row, found.first_column,
          found.largest, found.largest_row, found.largest_column));
  }
  return found.same() ? kDone : kDiffer;
}

}  // namespace

void add_head(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("head", "Show rows of a file or table");
  auto arguments = std::make_shared<HeadArguments>();
  command->add_option("SRC", arguments->source, "FILE, FILE:NAME, STORE/TABLE or STORE/TABLE:field")->required();
  add_from_option(*command, arguments->from);
  command->add_option("-n", arguments->count, "How many rows, from the first on (default 10)")->type_name("N");
  arguments->rows.add_to(*command);
  command->add_option("--source-dtype", arguments->source_dtype, "What bytes of SRC are that it does not say: V2, opaque, raw")
      ->type_name("NAME");
  arguments->layout.add_to(*command);
  finish_command(*command, common, chosen,
                 "  embermap head tables/items -n 3\n"
                 "  embermap head glove.6B.100d.txt --rows 1000:1010 --json",
                 [arguments](const Common& c) { return head(*arguments, c); });
}

void add_diff(CLI::App& app, Common& common, Action& chosen) {
  auto* command =
      app.add_subcommand("diff",
                         "Compare the rows of two files or tables; exit code 0 if they are the same, 1 if they differ, 2 if they "
                         "could not be compared");
  auto arguments = std::make_shared<DiffArguments>();
  command->add_option("A", arguments->a, "FILE, FILE:NAME, STORE/TABLE or STORE/TABLE:field")->required();
  command->add_option("B", arguments->b, "The same, of any format and dtype")->required();
  add_from_option(*command, arguments->from);
  command->add_option("--source-dtype", arguments->source_dtype, "What bytes are that do not say it, of A, of B or of both")
      ->type_name("NAME");
  arguments->layout.add_to(*command);
  command->add_flag("--values", arguments->values,
                    "Compare values: -0 is 0, and one NaN is as good as another. Rows of two dtypes are always compared so");
  finish_command(*command, common, chosen,
                 "  embermap diff tables/items backup.npy\n"
                 "  embermap diff model.pt:encoder.weight model.safetensors:encoder.weight\n"
                 "  embermap diff tables/items items.raw --dim 128 --source-dtype float32",
                 [arguments](const Common& c) {
                   try {
                     return diff(*arguments, c);
                   } catch (const UsageError&) {
                     throw;
                   } catch (const std::exception& error) {
                     report_error(error.what());
                     return kNotCompared;
                   }
                 });
}

}  // namespace embermap::tools
