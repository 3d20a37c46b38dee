#include "io/copy_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/thread_pool.hpp"
#include "io/compare.hpp"
#include "io/convert.hpp"
#include "io/converting_reader.hpp"
#include "io/elements.hpp"
#include "io/partial_rows.hpp"
#include "io/row_range.hpp"
#include "io/same_file.hpp"

namespace embermap {
namespace {

// The same rows from several readers, each of which reads a part of what is asked for on a thread of its own.
class ParallelReader final : public RowReader {
 public:
  explicit ParallelReader(std::vector<std::unique_ptr<RowReader>> readers)
      : readers_{std::move(readers)}, threads_{static_cast<unsigned>(readers_.size())} {
    rows_ = readers_.front()->rows();
    dim_ = readers_.front()->dim();
    dtype_ = readers_.front()->dtype();
    for (const auto& reader : readers_)
      if (reader->rows() != rows_ || reader->dim() != dim_ || reader->dtype() != dtype_)
        throw FormatError(readers_.front()->description(), "changed while it was opened");
  }
  std::string description() const override { return readers_.front()->description(); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    const std::uint64_t unit = readers_.front()->block_rows();
    // Whole blocks of the readers, so that none is read twice.
    const std::uint64_t piece = ceil_div(ceil_div(count, readers_.size()), unit) * unit;
    threads_.parallel_for(readers_.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i) {
        const std::uint64_t at = std::min(count, i * piece), some = std::min(piece, count - at);
        if (some > 0) readers_[i]->read(first + at, some, out + at * row_bytes);
      }
    });
  }
  std::uint64_t block_rows() const override { return readers_.front()->block_rows() * readers_.size(); }
  std::vector<Remark> remarks() const override { return readers_.front()->remarks(); }
  bool sparse() const override { return readers_.front()->sparse(); }

 private:
  std::vector<std::unique_ptr<RowReader>> readers_;
  ThreadPool threads_;
};

// A half of the memory for copying, or more, up to all of it, where a single row takes that: an error then names what was given.
std::uint64_t copy_memory(const RowReader& reader, DType to, std::uint64_t memory) {
  const std::uint64_t row = checked_mul(reader.dim(), item_size(reader.dtype()) + item_size(to), "bytes of a row");
  return std::max(memory / 2, std::min(memory, row));
}

// Numbers of an order one by one, in turn.
std::function<std::uint64_t(std::uint64_t)> numbers_of(const std::filesystem::path& order) {
  struct State {
    std::unique_ptr<RowOrder> order;
    std::vector<std::uint64_t> block;
    std::uint64_t first = 0;
  };
  const auto state = std::make_shared<State>();
  state->order = RowOrder::open(order);
  return [state](std::uint64_t row) {
    if (row < state->first || row - state->first >= state->block.size()) {
      constexpr std::uint64_t kBlock = 4096;
      state->block.resize(std::min(kBlock, state->order->size() - row));
      state->order->read(row, state->block);
      state->first = row;
    }
    return state->block[row - state->first];
  };
}

bool selects(const RowSelection& rows) { return rows.first != 0 || rows.end.has_value(); }

std::string selection_text(const RowSelection& rows) {
  if (!rows.order.empty()) return fmt::format("order, {}", file_identity(parse_location(rows.order.native()).file));
  return fmt::format("{}:{}", rows.first, rows.end ? fmt::format("{}", *rows.end) : "");
}

// What has to be the same again for rows that are there to be the rows that would be copied.
PartialRows::Copy copy_of(const RowOrigin& origin, const Location& destination, const CopyOptions& options,
                          const RowReader& reader, DType to) {
  PartialRows::Copy copy{
      .of = origin.identity, .rows = reader.rows(), .dim = reader.dim(), .from = reader.dtype(), .dtype = to, .header = {}};
  copy.of.emplace("choice of rows", selection_text(options.rows));
  copy.of.emplace("shape", fmt::format("{} x {}", reader.rows(), reader.dim()));
  copy.of.emplace("dtype", fmt::format("{} to {}", dtype_name(reader.dtype()), dtype_name(to)));
  copy.of.emplace("format", std::string(format_name(destination.format)));
  copy.of.emplace("name in the file", destination.selector);
  return copy;
}

}  // namespace

RowOrigin file_origin(const Location& source, std::optional<DType> to, const ReadOptions& options) {
  RowOrigin out;
  out.has_words = format_has_words(source.format);
  // A step back in text costs much, and text is parsed by all threads anyway; a deflated member begins again at its start.
  out.in_turn = out.has_words || source.format == Location::Format::kNpz;
  out.file = source.file;
  out.several_files = options.allow_external || source.file.native().ends_with(".index.json");
  out.open = [=](const WordSink& words) {
    ReadOptions reading = options;
    reading.words = words;
    return open_rows_as(source, to, reading);
  };
  const auto file = source.file;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(file, ignored)) out.identity.emplace("source", file_identity(file));
  out.identity.emplace("array of the source", source.selector);
  if (options.dim != 0) out.identity.emplace("dim", fmt::format("{}", options.dim));
  if (options.offset != 0) out.identity.emplace("offset", fmt::format("{}", options.offset));
  return out;
}

void check_selection(const RowSelection& selection, std::uint64_t rows) {
  if (selection.jobs == 0 || selection.jobs > 256)
    throw InvalidArgument(fmt::format("{} jobs: 1 to 256 threads can read", selection.jobs));
  if (!selection.order.empty() && selects(selection))
    throw InvalidArgument("an order names the rows; a range of them cannot be given too");
  if (selection.clamp) return;
  if (selection.first > rows || selection.end.value_or(rows) > rows)
    throw InvalidArgument(
        fmt::format("rows {}:{} of {}", selection.first, selection.end ? fmt::format("{}", *selection.end) : "", rows));
  if (selection.end && *selection.end < selection.first)
    throw InvalidArgument(fmt::format("rows {}:{} end before they begin", selection.first, *selection.end));
}

SelectedRows::SelectedRows(const RowOrigin& origin, const RowSelection& selection, std::optional<DType> to, const WordSink& words,
                           std::uint64_t memory) {
  const unsigned jobs = words || origin.in_turn ? 1 : std::max(1U, selection.jobs);
  std::vector<std::unique_ptr<RowReader>> readers;
  for (unsigned i = 0; i < jobs; ++i) {
    const auto exchange = std::make_shared<OrderedReader::Words>();
    WordSink sink = words;
    if (words && !selection.order.empty()) {
      exchange->sink = words;
      sink = [exchange](std::uint64_t row, std::string_view word) { exchange->read.emplace_back(row, word); };
    } else if (words && selection.first != 0) {
      sink = [words, first = selection.first](std::uint64_t row, std::string_view word) { words(row - first, word); };
    }
    std::unique_ptr<RowReader> reader = origin.open(sink);
    if (i == 0) {
      all_rows_ = reader->rows();
      from_ = reader->dtype();
      check_selection(selection, all_rows_);
    }
    if (!selection.order.empty()) {
      reader = std::make_unique<OrderedReader>(std::move(reader), RowOrder::open(selection.order), memory / 2 / jobs,
                                               words ? exchange : nullptr);
    } else if (selects(selection)) {
      const std::uint64_t end = std::min(selection.end.value_or(all_rows_), all_rows_);
      const std::uint64_t first = std::min(selection.first, end);
      reader = std::make_unique<RangeReader>(std::move(reader), first, end - first);
    }
    if (to && *to != reader->dtype()) {
      auto converting = std::make_unique<ConvertingReader>(std::move(reader), *to, memory / 2 / jobs);
      reports_.push_back(converting->shared_report());
      reader = std::move(converting);
    }
    readers.push_back(std::move(reader));
  }
  reader_ = jobs == 1 ? std::move(readers.front()) : std::make_unique<ParallelReader>(std::move(readers));
}

ConversionReport SelectedRows::report() const {
  ConversionReport out;
  for (const auto& one : reports_) {
    out.became_infinite += one->became_infinite;
    out.became_zero += one->became_zero;
  }
  return out;
}

std::unique_ptr<RowReader> open_written(const Location& destination, DType written, std::uint64_t dim) {
  Location location = destination;
  // Names that writers give where none was given.
  if (location.selector.empty() && location.format == Location::Format::kHdf5) location.selector = "/data";
  ReadOptions reading{.dtype = written, .dim = dim};
  if (format_has_words(location.format)) {
    // Text has numbers, and no dtype: whole ones are read as such, what was written as float32 is that again.
    const bool text = location.format != Location::Format::kWord2vecBinary;
    reading.dtype =
        !text || is_floating(written) ? (text && written == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32) : DType::kInt64;
  } else if (location.format != Location::Format::kRaw && written != DType::kBFloat16) {
    reading.dtype.reset();  // the file says it
  }
  if (location.format == Location::Format::kNpy || format_has_members(location.format)) reading.dim = 0;
  return open_rows(location, reading);
}

void check_written(RowReader& source, RowReader& written, bool bits, const std::string& destination, std::uint64_t memory,
                   const Progress& progress) {
  const RowDifference found = compare_rows(source, written, bits, memory, progress);
  if (!found.same())
    throw CorruptError(
        fmt::format("{}: read back, {} elements in {} rows are not what was written; the first is row {}, column {}",
                    printable(destination), found.elements, found.different_rows, found.first_row, found.first_column));
}

void check_not_source(const std::filesystem::path& source, const Location& destination) {
  if (same_file(source, destination.file))
    throw InvalidArgument(fmt::format("{} is both source and destination", printable(destination.file)));
}

void check_companions(const std::filesystem::path& source, const std::filesystem::path& destination,
                      const std::filesystem::path& order_text, const std::string& vocabulary) {
  if (order_text.empty()) return;  // else what words are is WordTransfer's
  const std::filesystem::path order = parse_location(order_text.native()).file;
  const std::filesystem::path back = order_beside(destination);
  for (const std::filesystem::path& read : {source, order})
    if (same_file(back, read))
      throw InvalidArgument(fmt::format("{}, where the way back goes, is what the copy reads", printable(back)));
  if (same_file(destination, order))
    throw InvalidArgument(fmt::format("{} is the order, and would be replaced by the rows", printable(order)));
  if (vocabulary.empty() || vocabulary == "none") return;
  if (same_file(vocabulary, order))
    throw InvalidArgument(fmt::format("{} is the order; words need a file of their own", printable(order)));
  if (same_file(vocabulary, back))
    throw InvalidArgument(fmt::format("{}, where the way back goes, is the vocabulary", printable(back)));
}

CopyResult copy_file(const RowOrigin& origin, const Location& destination, const CopyOptions& options) {
  const RowSelection& selection = options.rows;
  check_companions(origin.file, destination.file, selection.order, options.vocabulary);
  if (options.resume && origin.several_files)
    throw InvalidArgument(
        fmt::format("{}: its rows may lie in other files; such a copy cannot be gone on with", printable(origin.file)));
  const bool words_out = format_has_words(destination.format);
  const bool ordered = !selection.order.empty();
  WordTransfer::Options of_words{.vocabulary = options.vocabulary,
                                 .source_has_words = origin.has_words,
                                 .destination_has_words = words_out,
                                 .source = origin.file,
                                 .destination = destination.file,
                                 .overwrite = options.overwrite};
  if (ordered)
    of_words.source_row = numbers_of(selection.order);
  else if (selection.first != 0)
    of_words.source_row = [first = selection.first](std::uint64_t row) { return first + row; };
  WordTransfer words(of_words);
  const WordSink sink = words.sink();
  if (options.resume && sink)
    throw InvalidArgument(fmt::format("{}: words are not kept for a copy that is gone on with; leave them out (vocabulary none)",
                                      printable(origin.file)));

  // Threads convert what they read; a copy that may be gone on with does it as it writes, so that its report is of those rows.
  const bool early = selection.jobs > 1 && !options.resume;
  std::optional<SelectedRows> rows(std::in_place, origin, selection, early ? options.dtype : std::nullopt, sink,
                                   options.memory / 2);
  RowReader& reader = rows->reader();
  CopyResult result{.rows = reader.rows(),
                    .dim = reader.dim(),
                    .from = rows->from(),
                    .to = options.dtype.value_or(rows->from()),
                    .report = {},
                    .vocabulary = {},
                    .order = {},
                    .resumed = 0};
  if (options.began) options.began(result.dim * item_size(result.to));
  words.begin(result.rows, rows->all_rows());
  std::optional<InverseOrder> inverse;
  if (ordered) {
    const auto order = RowOrder::open(selection.order);
    inverse.emplace(*order, rows->all_rows(), selection.permutation, order_beside(destination.file), options.overwrite,
                    options.memory / 4);
    result.order = inverse->path();
  }
  WriteOptions writing{.overwrite = options.overwrite, .gzip = options.gzip, .words = words.source()};
  writing.sparse = reader.sparse();
  writing.attributes = options.attributes;
  writing.attributes.emplace_back("source_dtype", dtype_name(result.from));
  const auto create = [&] { return create_rows(destination, result.rows, result.dim, result.to, writing); };
  const auto complete = [&](RowWriter& writer) {
    if (options.before_finish) options.before_finish();
    try {
      if (inverse) inverse->finish();
      words.finish();
      writer.finish();
    } catch (...) {
      if (inverse) inverse->withdraw();
      words.withdraw();
      throw;
    }
  };
  const std::uint64_t memory = copy_memory(reader, result.to, options.memory);
  if (options.resume) {
    PartialRows::Copy copy = copy_of(origin, destination, options, reader, result.to);
    const auto header = options.gzip < 0 ? plain_header(destination, result.rows, result.dim, result.to) : std::nullopt;
    if (header) copy.header = *header;
    // What cannot be written is known before anything is read.
    const std::unique_ptr<RowWriter> writer = header ? nullptr : create();
    const bool adds = format_adds(destination.format) && !destination.selector.empty();
    PartialRows partial(destination.file, copy, options.overwrite || adds);
    result.resumed = partial.done();
    continue_partial(reader, partial, memory, options.progress);
    result.report = partial.report();
    if (writer) {
      const std::unique_ptr<RowReader> there = partial.reader();
      copy_rows(*there, *writer, result.to, memory, options.progress);
      complete(*writer);
      partial.remove();
    } else {
      complete(partial);
    }
  } else {
    const std::unique_ptr<RowWriter> writer = create();
    result.report = copy_rows(reader, *writer, result.to, memory, options.progress);
    if (early) result.report = rows->report();
    result.reading = reader.how();
    result.writing = writer->how();
    complete(*writer);
  }
  result.vocabulary = words.written();
  result.remarks = reader.remarks();  // also of what was found in the rows
  if (options.check) {
    rows.emplace(origin, selection, options.dtype, WordSink{}, options.memory / 4);
    const std::unique_ptr<RowReader> after = open_written(destination, result.to, result.dim);
    check_written(rows->reader(), *after, !words_out, destination.file.native(), options.memory / 2, options.progress);
  }
  return result;
}

}  // namespace embermap
