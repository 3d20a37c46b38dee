// embermap convert SRC DST
#include <fmt/format.h>

#include <chrono>
#include <memory>

#include "base/error.hpp"
#include "io/array_file.hpp"
#include "io/copy_file.hpp"
#include "store/store.hpp"
#include "tools/arguments.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/transfer.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string source, destination, to, dtype, vocabulary, fields;
  SourceArguments input;
  SelectionArguments rows;
  DestinationArguments output;
};

// Several arrays of SRC, each under its name, into one new file.
std::vector<CopyResult> convert_fields(const Arguments& arguments, const Location& source, const Location& destination,
                                       const CopyOptions& options) {
  if (!source.selector.empty())
    throw UsageError(fmt::format("SRC names '{}'; --field names what is copied", printable(source.selector)));
  std::vector<RowOrigin> origins;
  std::vector<std::string> names;
  for (const NamedField& one : parse_fields(arguments.fields)) {
    const Location part{source.file, one.name, source.format};
    origins.push_back(file_origin(part, options.dtype, arguments.input.options(part)));
    names.push_back(one.field);
  }
  return copy_arrays(origins, names, destination, options);
}

int convert(const Arguments& arguments, const Common& common) {
  const Location source = arguments.input.location(arguments.source);
  const Location destination = parse_destination("DST", arguments.destination, arguments.to);
  const bool several = !arguments.fields.empty();
  CopyOptions options;
  options.dtype = optional_dtype("--dtype", arguments.dtype);
  options.rows = arguments.rows.selection(/*permutation=*/true);
  options.vocabulary = arguments.vocabulary;
  options.memory = common.memory;
  options.attributes = {{"source", arguments.source}};
  arguments.output.set(options, destination);
  const ReadOptions reading = arguments.input.options(source);

  const auto begin = std::chrono::steady_clock::now();
  require_regular_file(source.file);
  check_destination(destination, source.file, options.overwrite, several);
  check_source_is_whole(source, common.memory / 4);
  check_vocabulary_option(arguments.vocabulary, format_has_words(source.format) || format_has_words(destination.format));
  if (format_has_words(source.format) && !arguments.vocabulary.empty() && arguments.vocabulary != "none")
    check_outside_stores(arguments.vocabulary);
  std::optional<ProgressLine> line;
  options.began = [&](std::uint64_t row_bytes) { line.emplace("convert", row_bytes, common.quiet); };
  options.progress = [&](std::uint64_t done, std::uint64_t total) {
    if (line) line->callback()(done, total);
  };
  options.before_finish = check_interrupt;
  std::vector<CopyResult> copied;
  if (several)
    copied = convert_fields(arguments, source, destination, options);
  else
    copied.push_back(copy_file(file_origin(source, options.dtype, reading), destination, options));
  line.reset();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::vector<NamedField> fields;
  if (several)
    for (const NamedField& one : parse_fields(arguments.fields)) fields.push_back({one.field, one.field});
  print_transfers(common, arguments.source, arguments.destination, copied, fields, options.check, seconds);
  return kDone;
}

}  // namespace

void add_convert(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("convert", "Copy rows from file to file, without a store");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("SRC", arguments->source, kSourceHelp)->required();
  command->add_option("DST", arguments->destination, kDestinationHelp)->required();
  arguments->input.add_to(*command);
  add_to_option(*command, arguments->to);
  add_dtype_option(*command, arguments->dtype, /*names_bytes=*/true);
  command
      ->add_option("--field", arguments->fields,
                   "Copy these arrays or fields of SRC into one new DST (npz, hdf5, safetensors, torch), under their names or as "
                   "NEW=NAME")
      ->type_name("A,B,...");
  add_vocabulary_option(*command, arguments->vocabulary,
                        "The words of the rows, one a line: written for SRC with words, read for DST with words alone (default "
                        "SRC.vocab.txt or DST.vocab.txt); 'none': not written, or the numbers of the rows");
  arguments->output.add_to(*command);
  arguments->rows.add_to(*command,
                         "Row i of DST is row FILE[i] of SRC: integers in any format, .txt too, with each row once; the way "
                         "back goes to DST.order.npy");
  finish_command(*command, common, chosen,
                 "  embermap convert vectors.npy vectors.h5:/vectors --gzip 4\n"
                 "  embermap convert model.h5:/embeddings/words words.npy --dtype float16\n"
                 "  embermap convert model.pt:encoder.weight weight.safetensors\n"
                 "  embermap convert tables/items.npy:weight weight.npy\n"
                 "  embermap convert tables/items.npy items.npz --field weight,sum\n"
                 "  embermap convert vectors.npy by_frequency.npy --order order.npy\n"
                 "  embermap convert glove.6B.100d.txt vectors.npy\n"
                 "  embermap convert vectors.npy vectors.bin --to word2vec-binary --vocab words.txt\n"
                 "  embermap convert vectors.raw vectors.npy --source-dtype float32 --dim 128",
                 [arguments](const Common& c) { return convert(*arguments, c); });
}

}  // namespace embermap::tools
