// embermap convert SRC DST
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <utility>

#include "tools/any_rows.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string source, destination, from, to, dtype, source_dtype, vocabulary;
  LayoutArguments layout;
  DestinationArguments output;
  RangeArguments rows;
  bool allow_external = false, check = false;
};

int convert(const Arguments& arguments, const Common& common) {
  const Location source = parse_source("SRC", arguments.source, arguments.from);
  const Location destination = parse_destination("DST", arguments.destination, arguments.to);
  WriteOptions options = arguments.output.options(destination);
  std::optional<DType> to, as;
  if (!arguments.dtype.empty()) to = parse_dtype_option("--dtype", arguments.dtype);
  if (!arguments.source_dtype.empty()) as = parse_dtype_option("--source-dtype", arguments.source_dtype);

  const auto begin = std::chrono::steady_clock::now();
  require_regular_file(source.file);
  check_destination(destination, source.file, options.overwrite);
  check_source_is_whole(source, common.memory / 4);
  check_vocabulary_option(arguments.vocabulary, format_has_words(source.format) || format_has_words(destination.format));
  WordTransfer words({.vocabulary = arguments.vocabulary,
                      .source_has_words = format_has_words(source.format),
                      .destination_has_words = format_has_words(destination.format),
                      .source = source.file,
                      .destination = destination.file,
                      .overwrite = options.overwrite});
  const bool own_words = format_has_words(source.format);
  if (arguments.rows.given() && format_has_words(destination.format) && !own_words && arguments.vocabulary != "none")
    throw UsageError("--rows: a vocabulary is of all rows; --vocab none gives them their numbers");
  ReadOptions reading{.dtype = as, .allow_external = arguments.allow_external, .words = words.sink()};
  arguments.layout.set(reading, source);
  options.words = words.source();
  std::uint64_t first = 0;  // of the rows
  if (arguments.rows.given() && reading.words)
    reading.words = [&first, sink = std::move(reading.words)](std::uint64_t row, std::string_view word) {
      sink(row - first, word);
    };
  std::unique_ptr<RowReader> reader = open_rows_as(source, to, reading);
  first = arguments.rows.of(reader->rows()).first;
  reader = arguments.rows.apply(std::move(reader));
  words.begin(reader->rows());
  TransferResult result{.source = arguments.source,
                        .destination = arguments.destination,
                        .rows = reader->rows(),
                        .dim = reader->dim(),
                        .from = reader->dtype(),
                        .to = to.value_or(reader->dtype()),
                        .report = {},
                        .seconds = 0,
                        .remarks = reader->remarks()};
  std::pair<std::string, std::string> io;
  {
    options.sparse = reader->sparse();
    options.attributes = {{"source", arguments.source}, {"source_dtype", std::string(dtype_name(result.from))}};
    const std::unique_ptr<RowWriter> writer = create_rows(destination, result.rows, result.dim, result.to, options);
    ProgressLine line("convert", result.dim * item_size(result.to), common.quiet);
    result.report = copy_rows(*reader, *writer, result.to, copy_memory(*reader, result.to, common.memory, 2), line.callback());
    check_interrupt();
    io = {reader->how(), writer->how()};
    words.finish();
    try {
      writer->finish();
    } catch (...) {
      words.withdraw();
      throw;
    }
  }
  if (arguments.check) {
    ReadOptions again = reading;
    again.words = {};
    const std::unique_ptr<RowReader> before = arguments.rows.apply(open_rows_as(source, to, again));
    ReadOptions back{.dtype = result.to, .dim = result.dim};
    const std::unique_ptr<RowReader> after = open_written(destination, back);
    check_written(*before, *after, result.to, !format_has_words(destination.format), arguments.destination, common.memory);
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  Json extra = vocabulary_json(words);
  if (arguments.check) extra["checked"] = true;
  extra["reading"] = io.first;
  extra["writing"] = io.second;
  print_transfer(common, result, extra);
  return kDone;
}

}  // namespace

void add_convert(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("convert", "Copy rows from file to file, without a store");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SRC", arguments->source, kSourceHelp)->required();
  command->add_option("DST", arguments->destination, kDestinationHelp)->required();
  add_from_option(*command, arguments->from);
  add_to_option(*command, arguments->to);
  command
      ->add_option("--dtype", arguments->dtype, "Convert the rows (nearest even); bfloat16 also names bytes the file cannot name")
      ->type_name("NAME");
  command->add_option("--source-dtype", arguments->source_dtype, "What bytes of SRC are that it does not say: V2, opaque, raw")
      ->type_name("NAME");
  arguments->layout.add_to(*command);
  add_vocabulary_option(*command, arguments->vocabulary,
                        "The words of the rows, one a line: written for SRC with words, read for DST with words alone (default "
                        "SRC.vocab.txt or DST.vocab.txt); 'none': not written, or the numbers of the rows");
  arguments->output.add_to(*command);
  arguments->rows.add_to(*command);
  command->add_flag("--check", arguments->check, "Read DST back and compare it with SRC");
  command->add_flag("--allow-external", arguments->allow_external,
                    "Read HDF5 datasets whose bytes lie in other files, below the folder of SRC");
  finish_command(*command, common, chosen,
                 "  embermap convert vectors.npy vectors.h5:/vectors --gzip 4\n"
                 "  embermap convert model.h5:/embeddings/words words.npy --dtype float16\n"
                 "  embermap convert model.pt:encoder.weight weight.safetensors\n"
                 "  embermap convert tables/items.npy:weight weight.npy\n"
                 "  embermap convert glove.6B.100d.txt vectors.npy\n"
                 "  embermap convert vectors.npy vectors.bin --to word2vec-binary --vocab words.txt\n"
                 "  embermap convert vectors.raw vectors.npy --source-dtype float32 --dim 128",
                 [arguments](const Common& c) { return convert(*arguments, c); });
}

}  // namespace embermap::tools
