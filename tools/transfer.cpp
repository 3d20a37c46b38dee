#include "tools/transfer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"

namespace embermap::tools {

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

void SourceArguments::add_to(CLI::App& command) {
  add_from_option(command, from_);
  command.add_option("--source-dtype", source_dtype_, "What bytes of SRC are that it does not say: V2, opaque, raw")
      ->type_name("NAME");
  layout_.add_to(command);
  command.add_flag("--allow-external", allow_external_,
                   "Read HDF5 datasets whose bytes lie in other files, below the folder of SRC");
}

std::optional<DType> SourceArguments::dtype() const { return optional_dtype("--source-dtype", source_dtype_); }

ReadOptions SourceArguments::options(const Location& source) const {
  ReadOptions out{.dtype = dtype(), .allow_external = allow_external_, .words = {}};
  layout_.set(out, source);
  return out;
}

void SelectionArguments::add_to(CLI::App& command, const char* order_help, bool with_rows) {
  if (with_rows) rows_.add_to(command);
  command.add_option("--order", order_, order_help)->type_name("FILE");
  command
      .add_option("--jobs", jobs_,
                  "Threads that read and convert rows (default 1, beside one that writes); formats with words, "
                  "which are parsed by all, and npz have one")
      ->type_name("N");
}

RowSelection SelectionArguments::selection(bool permutation) const {
  RowSelection out = rows_.selection();
  out.order = order_;
  out.permutation = permutation;
  if (!order_.empty() && rows_.given()) throw UsageError("--order names the rows; --rows cannot be given too");
  if (!jobs_.empty()) {
    const std::uint64_t jobs = parse_count("--jobs", jobs_);
    if (jobs == 0 || jobs > 256) throw UsageError(fmt::format("--jobs: {} is not within 1 to 256", jobs));
    out.jobs = static_cast<unsigned>(jobs);
  }
  return out;
}

std::vector<NamedField> parse_fields(const std::string& text) {
  std::vector<NamedField> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const std::size_t equals = part.find('=');
    NamedField one{part.substr(0, equals), equals == std::string::npos ? part : part.substr(equals + 1)};
    if (one.field.empty() || one.name.empty())
      throw UsageError(fmt::format("--field: '{}' is no list of names, as in a,b or a=NAME,b", printable(text)));
    for (const NamedField& other : out)
      if (other.field == one.field) throw UsageError(fmt::format("--field: '{}' is named twice", printable(one.field)));
    out.push_back(std::move(one));
    begin = end + 1;
  }
  return out;
}

std::optional<DType> optional_dtype(std::string_view option, const std::string& text) {
  if (text.empty()) return std::nullopt;
  return parse_dtype_option(option, text);
}

void add_dtype_option(CLI::App& command, std::string& dtype, bool names_bytes) {
  command
      .add_option("--dtype", dtype,
                  std::string("Convert the rows (nearest even)") +
                      (names_bytes ? "; bfloat16 also names bytes the file cannot name" : ""))
      ->type_name("NAME");
}

void DestinationArguments::add_to(CLI::App& command) {
  command.add_option("--gzip", gzip_, "HDF5, npz: compress with this level, 0 to 9 (default: not compressed)")
      ->type_name("LEVEL");
  command.add_flag("--overwrite,--force", overwrite_,
                   "Replace DST if it exists (the dataset, member or tensor named), when the new one is complete");
  command.add_flag("--check", check_, "Read DST back and compare it with the rows it was made of");
  command.add_flag("--resume", resume_,
                   "Go on with a copy to DST that was interrupted, and keep what is done if this one is: .DST.resume and "
                   ".DST.resume.json beside DST, as long as it is not complete");
}

void DestinationArguments::set(CopyOptions& options, const Location& destination) const {
  options.overwrite = overwrite_;
  options.check = check_;
  options.resume = resume_;
  if (gzip_.empty()) return;
  if (!format_compresses(destination.format))
    throw UsageError(fmt::format("--gzip: {} files are not compressed here", format_name(destination.format)));
  const std::uint64_t level = parse_count("--gzip", gzip_);
  if (level > 9) throw UsageError(fmt::format("--gzip: level {} is not in 0 to 9", level));
  options.gzip = static_cast<int>(level);
}

namespace {

std::vector<std::pair<std::string, std::filesystem::path>> written_beside(const CopyResult& copied) {
  std::vector<std::pair<std::string, std::filesystem::path>> out;
  if (!copied.vocabulary.empty()) out.emplace_back("words", copied.vocabulary);
  if (!copied.order.empty()) out.emplace_back("the way back", copied.order);
  return out;
}

}  // namespace

TransferResult transfer_result(const std::string& source, const std::string& destination, const CopyResult& copied,
                               double seconds) {
  return {.source = source,
          .destination = destination,
          .rows = copied.rows,
          .dim = copied.dim,
          .from = copied.from,
          .to = copied.to,
          .report = copied.report,
          .seconds = seconds,
          .remarks = copied.remarks,
          .written = written_beside(copied)};
}

Json copy_json(const CopyResult& copied, bool checked) {
  Json json = Json::object();
  if (!copied.vocabulary.empty()) json["vocabulary"] = json_text(copied.vocabulary.native());
  if (!copied.order.empty()) json["order"] = json_text(copied.order.native());
  if (copied.resumed != 0) json["resumed_rows"] = copied.resumed;
  if (checked) json["checked"] = true;
  if (!copied.reading.empty()) json["reading"] = copied.reading;
  if (!copied.writing.empty()) json["writing"] = copied.writing;
  return json;
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
    for (const auto& [what, file] : result.written) print(fmt::format("{} in {}\n", what, printable(file)));
    for (const Remark& remark : result.remarks)
      if (!remark.doubt) print(remark.text + "\n");
  }
}

void print_transfers(const Common& common, const std::string& source, const std::string& destination,
                     const std::vector<CopyResult>& copied, const std::vector<NamedField>& fields, bool checked, double seconds,
                     const Json& extra) {
  TransferResult result = transfer_result(source, destination, copied.front(), seconds);
  Json more = extra;
  more.update(copy_json(copied.front(), checked));
  if (!fields.empty()) {
    more["fields"] = Json::array();
    for (std::size_t i = 0; i < copied.size(); ++i) {
      more["fields"].push_back({{"name", json_text(fields[i].name)},
                                {"rows", copied[i].rows},
                                {"dim", copied[i].dim},
                                {"dtype", dtype_name(copied[i].to)}});
      if (i == 0) continue;
      result.report.became_infinite += copied[i].report.became_infinite;
      result.report.became_zero += copied[i].report.became_zero;
      for (const Remark& remark : copied[i].remarks)
        if (std::none_of(result.remarks.begin(), result.remarks.end(),
                         [&](const Remark& one) { return one.text == remark.text; }))
          result.remarks.push_back(remark);
    }
  }
  print_transfer(common, result, more);
}

}  // namespace embermap::tools
