#include "tools/transfer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/convert.hpp"
#include "tools/arguments.hpp"
#include "tools/console.hpp"

namespace embermap::tools {

std::unique_ptr<RowReader> open_source(const Location& location, std::optional<DType> to, std::optional<DType> as,
                                       bool allow_external) {
  const auto open_as = [&](std::optional<DType> dtype) {
    return open_rows(location, ReadOptions{.dtype = dtype, .allow_external = allow_external});
  };
  if (as.has_value() || to != DType::kBFloat16) return open_as(as);
  try {
    return open_as({});
  } catch (const DTypeError&) {
    // The bytes may be bfloat16 that the file cannot name. If they are not, the first reason is the one to tell.
    std::unique_ptr<RowReader> reader;
    try {
      reader = open_as(to);
    } catch (const DTypeError&) {
    }
    if (reader == nullptr) throw;
    return reader;
  }
}

ConvertingReader::ConvertingReader(RowReader& source, DType to, std::uint64_t memory) : source_{source} {
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
    const std::uint64_t good = try_convert_elements(source_.dtype(), buffer_.data(), dtype_,
                                                    out + done * dim_ * item_size(dtype_), piece * dim_, report_);
    if (good < piece * dim_)
      throw DTypeError(
          fmt::format("{}: {} (row {}, column {})", source_.description(),
                      conversion_failure(source_.dtype(), buffer_.data() + good * item_size(source_.dtype()), dtype_),
                      first + done + good / dim_, good % dim_));
    done += piece;
  }
}

void DestinationArguments::add_to(CLI::App& command) {
  command.add_option("--gzip", gzip_, "HDF5: compress with this level, 0 to 9 (default: contiguous, not compressed)")
      ->type_name("LEVEL");
  command.add_flag("--overwrite", overwrite_, "Replace DST if it exists (HDF5: the dataset named), when the new one is complete");
}

WriteOptions DestinationArguments::options(const Location& destination) const {
  WriteOptions options{.overwrite = overwrite_};
  if (gzip_.empty()) return options;
  if (destination.format != Location::Format::kHdf5) throw UsageError("--gzip needs an HDF5 file as DST");
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
    json.update(extra);
    print_json(json);
  } else if (!common.quiet) {
    print(fmt::format("{}: {} x {} {}\n", printable(result.destination), grouped(result.rows), grouped(result.dim),
                      dtype_name(result.to)));
  }
}

}  // namespace embermap::tools
