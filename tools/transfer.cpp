#include "tools/transfer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "base/size_text.hpp"
#include "io/convert.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"

namespace embermap::tools {

ConvertingReader::ConvertingReader(RowReader& source, DType to, std::uint64_t memory)
    : source_{source}, ahead_{std::min<std::uint64_t>(memory / 2, 32_MiB)} {
  memory -= ahead_;
  rows_ = source.rows();
  dim_ = source.dim();
  dtype_ = to;
  const std::uint64_t row_bytes = checked_mul(dim_, item_size(source.dtype()), "bytes of a row");
  piece_rows_ = std::clamp<std::uint64_t>(source.block_rows(), 1,
                                          std::max<std::uint64_t>(1, memory / std::max<std::uint64_t>(1, row_bytes)));
}

void ConvertingReader::read(std::uint64_t first, std::uint64_t count, std::byte* out) {
  if (source_.dtype() == dtype_) return source_.read(first, count, out);
  const std::uint64_t row_bytes = dim_ * item_size(source_.dtype());
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t piece = std::min(piece_rows_, count - done);
    buffer_.resize(std::max<std::size_t>(buffer_.size(), piece * row_bytes));
    source_.read(first + done, piece, buffer_.data());
    convert_rows(source_, first + done, piece, buffer_.data(), dtype_, out + done * dim_ * item_size(dtype_), report_);
    done += piece;
  }
}

std::uint64_t copy_memory(const RowReader& reader, DType to, std::uint64_t memory, std::uint64_t share) {
  const std::uint64_t row = checked_mul(reader.dim(), item_size(reader.dtype()) + item_size(to), "bytes of a row");
  return std::max(memory / share, std::min(memory, row));
}

void add_from_option(CLI::App& command, std::string& format) {
  command
      .add_option("--from", format,
                  fmt::format("Format of what is read, where its content and name do not tell: {}", format_names(false)))
      ->type_name("FORMAT");
}

void add_to_option(CLI::App& command, std::string& format) {
  command
      .add_option("--to", format, fmt::format("Format of what is written, where its name does not tell: {}", format_names(true)))
      ->type_name("FORMAT");
}

void LayoutArguments::add_to(CLI::App& command) {
  command.add_option("--dim", dim_, "Columns of SRC where its format does not tell them: raw, glove, an empty .fvecs")
      ->type_name("D");
  command.add_option("--offset", offset_, "Bytes before the first row of a raw SRC")->type_name("BYTES");
  command.add_flag("--follow-links", follow_links_,
                   "HDF5: as --allow-external, with external links too, wherever their files lie: for an SRC that is trusted");
}

void LayoutArguments::set(ReadOptions& options, const Location& source) const {
  if (!offset_.empty() && source.format != Location::Format::kRaw)
    throw UsageError(fmt::format("--offset is for raw files; SRC is {}", format_name(source.format)));
  if (!dim_.empty() && (source.format == Location::Format::kNpy || format_has_members(source.format)))
    throw UsageError(fmt::format("--dim: {} files tell how many columns there are", format_name(source.format)));
  if (!dim_.empty()) options.dim = parse_count("--dim", dim_);
  if (!dim_.empty() && options.dim == 0) throw UsageError("--dim: a table needs at least one column");
  if (!offset_.empty()) options.offset = parse_count("--offset", offset_);
  options.follow_links = follow_links_;
}

ReadOptions LayoutArguments::options(ReadOptions options) const {
  if (!dim_.empty()) options.dim = parse_count("--dim", dim_);
  if (!offset_.empty()) options.offset = parse_count("--offset", offset_);
  options.follow_links = follow_links_;
  return options;
}

void add_vocabulary_option(CLI::App& command, std::string& vocabulary, const char* help) {
  command.add_option("--vocab", vocabulary, help)->type_name("FILE");
}

void check_vocabulary_option(const std::string& vocabulary, bool words) {
  if (!vocabulary.empty() && !words)
    throw UsageError("--vocab is for formats with words: word2vec-text, word2vec-binary, glove, fasttext");
}

Json vocabulary_json(const WordTransfer& words) {
  if (words.written().empty()) return Json::object();
  return {{"vocabulary", json_text(words.written().native())}};
}

void DestinationArguments::add_to(CLI::App& command) {
  command.add_option("--gzip", gzip_, "HDF5, npz: compress with this level, 0 to 9 (default: not compressed)")
      ->type_name("LEVEL");
  command.add_flag("--overwrite", overwrite_,
                   "Replace DST if it exists (the dataset, member or tensor named), when the new one is complete");
}

WriteOptions DestinationArguments::options(const Location& destination) const {
  WriteOptions options{.overwrite = overwrite_};
  if (gzip_.empty()) return options;
  if (!format_compresses(destination.format))
    throw UsageError(fmt::format("--gzip: {} files are not compressed here", format_name(destination.format)));
  const std::uint64_t level = parse_count("--gzip", gzip_);
  if (level > 9) throw UsageError(fmt::format("--gzip: level {} is not in 0 to 9", level));
  options.gzip = static_cast<int>(level);
  return options;
}

void print_transfer(const Common& common, const TransferResult& result, const Json& extra) {
  const auto [infinite, zero] = result.report;
  if (infinite != 0 || zero != 0)
    warn(fmt::format("from {} to {} {} values became infinite and {} became zero", dtype_name(result.from), dtype_name(result.to),
                     grouped(infinite), grouped(zero)));
  for (const Remark& remark : result.remarks)
    if (remark.doubt) warn(remark.text);
  if (common.json) {
    Json json{{"source", json_text(result.source)},
              {"destination", json_text(result.destination)},
              {"rows", result.rows},
              {"dim", result.dim},
              {"source_dtype", dtype_name(result.from)},
              {"dtype", dtype_name(result.to)},
              {"became_infinite", infinite},
              {"became_zero", zero},
              {"seconds", result.seconds}};
    for (const Remark& remark : result.remarks) json["remarks"].push_back(json_text(remark.text));
    json.update(extra);
    print_json(json);
  } else if (!common.quiet) {
    print(fmt::format("{}: {} x {} {}\n", printable(result.destination), grouped(result.rows), grouped(result.dim),
                      dtype_name(result.to)));
    for (const Remark& remark : result.remarks)
      if (!remark.doubt) print(remark.text + "\n");
  }
}

}  // namespace embermap::tools
