#include "io/rows.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/block_reader.hpp"
#include "io/convert.hpp"
#include "io/formats.hpp"
#include "io/streams.hpp"

namespace embermap {
namespace {

bool path_exists(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

std::string compressing_formats() {
  std::string out;
  for (const FormatInfo& info : formats())
    if (info.compresses) out += fmt::format("{}{}", out.empty() ? "" : ", ", info.name);
  return out;
}

// Files of columns, which only the Python package reads, through pyarrow.
void refuse_columns(std::string_view text, std::string_view path) {
  for (const std::string_view extension : {".parquet", ".pq", ".arrow", ".feather", ".ipc"}) {
    if (path.size() < extension.size()) continue;
    const std::string_view end = path.substr(path.size() - extension.size());
    if (!std::equal(end.begin(), end.end(), extension.begin(), [](unsigned char a, char b) { return std::tolower(a) == b; }))
      continue;
    throw InvalidArgument(
        fmt::format("'{}': Parquet and Arrow files are read and written by the Python package alone, with pyarrow (pip install "
                    "pyarrow): em.convert(src, dst), em.io.open(path)",
                    printable(text)));
  }
}

// Why a file that is to be read cannot be told the format of, where it is its being there.
void check_there(std::string_view text, const std::filesystem::path& file) {
  refuse_columns(text, file.native());
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) throw IoError(errno, "open", file);
}

[[noreturn]] void throw_unknown(std::string_view text, bool there) {
  refuse_columns(text, text);
  if (const std::size_t colon = text.rfind(':'); colon != std::string_view::npos) refuse_columns(text, text.substr(0, colon));
  std::string known;
  for (const FormatInfo& info : formats())
    for (const std::string_view extension : info.extensions)
      if (!extension.empty() && known.find(fmt::format("{},", extension)) == std::string::npos)
        known += fmt::format("{}, ", extension);
  known.resize(known.size() - 2);
  throw InvalidArgument(fmt::format("'{}': {} a format known here ({})", printable(text),
                                    there ? "neither its content nor its extension names" : "its extension does not name",
                                    known));
}

// By the name alone. Throws InvalidArgument where several formats share it.
Location::Format format_to_write(std::string_view text, std::string_view path) {
  const FormatInfo* const named = format_by_name(path);
  if (named == nullptr) throw_unknown(text, false);
  const std::string_view extension = extension_of(*named, path);
  std::string others;
  const FormatInfo* only = nullptr;
  std::size_t count = 0;
  for (const FormatInfo& info : formats()) {
    if (info.create == nullptr || extension_of(info, path) != extension) continue;
    // Nearly everything that reads word vectors from text wants the header; GloVe's format is written where it is named.
    if (info.format == Location::Format::kGlove && extension == ".txt") continue;
    if (info.format == Location::Format::kWord2vecText && extension == ".tsv") continue;  // tables of text have no counts
    only = &info;
    ++count;
    others += fmt::format("{}{}", others.empty() ? "" : ", ", info.name);
  }
  if (count > 1)
    throw InvalidArgument(fmt::format("'{}': several formats are called {}: say which one with --to (or format=): {}",
                                      printable(text), extension, others));
  return only == nullptr ? named->format : only->format;  // that it cannot be written is told when it is to be
}

}  // namespace

Location parse_location(std::string_view text, const LocationOptions& options) {
  using Use = LocationOptions::Use;
  if (text.empty()) throw InvalidArgument("an empty text names no file");
  if (text.find('\0') != std::string_view::npos)
    throw InvalidArgument(fmt::format("'{}' holds a zero byte, which no path can", printable(text)));
  const auto located = [&](std::string_view file, std::string_view selector) -> Location {
    Location location{std::filesystem::path(file), std::string(selector)};
    if (options.format) {
      location.format = *options.format;
    } else if (options.use == Use::kWrite) {
      location.format = format_to_write(text, file);
    } else if (const FormatInfo* info = format_by_content(location.file)) {
      location.format = info->format;
    } else if (const FormatInfo* named = format_by_name(file)) {
      location.format = named->format;
    } else {
      std::error_code ignored;
      if (const auto kind = std::filesystem::status(location.file, ignored).type();
          kind == std::filesystem::file_type::fifo || kind == std::filesystem::file_type::socket ||
          kind == std::filesystem::file_type::character || kind == std::filesystem::file_type::block)
        (void)File::open(location.file, File::Mode::kRead);  // says what it is
      check_there(text, location.file);
      throw_unknown(text, true);
    }
    return location;
  };
  if (path_exists(std::filesystem::path(text))) return located(text, {});

  std::optional<std::size_t> last;  // the last ':' that can
  for (std::size_t colon = text.rfind(':'); colon != std::string_view::npos && colon > 0; colon = text.rfind(':', colon - 1)) {
    const std::string_view before = text.substr(0, colon), after = text.substr(colon + 1);
    if (format_by_name(before) == nullptr) continue;
    // "dir.h5:2/new.npy": a path, if there is such a directory.
    const std::size_t slash = after.rfind('/');
    if (slash != std::string_view::npos && format_by_name(text) != nullptr) {
      std::error_code ignored;
      if (std::filesystem::is_directory(std::filesystem::path(text.substr(0, colon + 1 + slash)), ignored))
        return located(text, {});
    }
    if (after.empty()) throw InvalidArgument(fmt::format("'{}': nothing after the ':'", printable(text)));
    // "x.h5:/ds:field" and odd names: an existing file decides, else the last ':' that can.
    if (path_exists(std::filesystem::path(before))) return located(before, after);
    if (!last) last = colon;
  }
  if (last) return located(text.substr(0, *last), text.substr(*last + 1));
  // Names without a known extension: the file is there, or its format was named.
  const std::size_t colon = text.rfind(':');
  if (colon != std::string_view::npos && colon > 0 && colon + 1 < text.size() && format_by_name(text) == nullptr) {
    const std::string_view before = text.substr(0, colon), after = text.substr(colon + 1);
    const bool there = path_exists(std::filesystem::path(before));
    const bool named = options.format && format_has_members(*options.format);
    if (named || (there && (options.format || options.use == Use::kRead))) return located(before, after);
  }
  return located(text, {});
}

std::unique_ptr<RowReader> open_rows(const Location& location, const ReadOptions& options) {
  return format_info(location.format).open(location, options);
}

std::unique_ptr<RowReader> open_rows_as(const Location& location, std::optional<DType> to, const ReadOptions& options) {
  ReadOptions named = options;
  named.dtype = to;
  const bool text = location.format == Location::Format::kWord2vecText || location.format == Location::Format::kGlove;
  if (!options.dtype && to && (location.format == Location::Format::kRaw || text)) {
    // Numbers of text become what they are asked for: whole ones are read as such, beyond 2^53 too.
    if (text) named.dtype = !is_floating(*to) ? DType::kInt64 : to == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    return open_rows(location, named);
  }
  if (options.dtype || to != DType::kBFloat16) return open_rows(location, options);
  try {
    return open_rows(location, options);
  } catch (const DTypeError&) {
    std::unique_ptr<RowReader> reader;
    try {
      reader = open_rows(location, named);
    } catch (const DTypeError&) {  // the first reason is the one to tell
    }
    if (reader == nullptr) throw;
    return reader;
  }
}

std::unique_ptr<RowWriter> create_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                       const WriteOptions& options) {
  if (dim == 0) throw InvalidArgument(fmt::format("{}: a table needs at least one column", printable(location.file)));
  if (options.gzip < -1 || options.gzip > 9)
    throw InvalidArgument(
        fmt::format("{}: gzip level {} is not within 0 .. 9 (-1: no compression)", printable(location.file), options.gzip));
  checked_mul(checked_mul(rows, dim, "elements of the table"), item_size(dtype), "bytes of the table");
  const FormatInfo& format = format_info(location.format);
  if (format.create == nullptr)
    throw InvalidArgument(fmt::format("{}: {} files are only read here; these can be written: {}", printable(location.file),
                                      format.name, format_names(/*written=*/true)));
  if (options.gzip >= 0 && !format.compresses)
    throw InvalidArgument(fmt::format("{}: {} files are not compressed (gzip is for {})", printable(location.file), format.name,
                                      compressing_formats()));
  if (options.chunk_rows > 0 && location.format != Location::Format::kHdf5)
    throw InvalidArgument(fmt::format("{}: chunk_rows is for HDF5", printable(location.file)));
  return format.create(location, rows, dim, dtype, options);
}

void RowCount::add(std::uint64_t count) {
  if (finished_) throw InvalidArgument(fmt::format("{} is finished: no more rows can be written", where_));
  if (count > rows_ - done_)
    throw InvalidArgument(fmt::format("{}: {} rows were promised, {} more come after {}", where_, rows_, count, done_));
  done_ += count;
}

void RowCount::add_bytes(std::uint64_t bytes, std::uint64_t row_bytes) {
  const std::uint64_t all = part_ + bytes;
  add(all / row_bytes);
  part_ = all % row_bytes;
  if (part_ > 0 && done_ == rows_) add(1);  // throws
}

void RowCount::finish() {
  if (finished_) throw InvalidArgument(fmt::format("{} is finished already", where_));
  if (done_ != rows_)
    throw InvalidArgument(fmt::format("{}: only {} of the {} rows promised were written", where_, done_, rows_));
  finished_ = true;
}

namespace {

constexpr std::uint64_t kMostStream = 32_MiB;

// Rows that are read ahead, as bytes, from `from` on; nothing in between holds them. False, with no byte copied, where the reader
// has none to show.
bool copy_bytes(RowReader& reader, RowReader::Plain from, RowWriter& writer, const Progress& progress) {
  const std::uint64_t row_bytes = reader.dim() * item_size(reader.dtype()), end = from.begin + reader.rows() * row_bytes;
  for (std::uint64_t at = from.begin; at < end;) {
    const std::span<const std::byte> piece = from.source->view(at, end - at);
    if (piece.empty()) {
      if (at == from.begin) return false;
      throw IoError(EIO, "read", reader.description());  // what was ahead is no longer: a forked child
    }
    writer.write_bytes(piece);
    at += piece.size();
    if (progress) progress((at - from.begin) / row_bytes, reader.rows());
  }
  return true;
}

}  // namespace

void RowWriter::write_bytes(std::span<const std::byte>) { throw InvalidArgument("this writer takes rows, not their bytes"); }

ConversionReport copy_rows(RowReader& reader, RowWriter& writer, DType to, std::uint64_t memory, const Progress& progress) {
  ConversionReport report;
  const std::uint64_t rows = reader.rows(), dim = reader.dim();
  const DType from = reader.dtype();
  const bool convert = from != to;
  const std::uint64_t in_bytes = checked_mul(dim, item_size(from), "bytes of a row");
  const std::uint64_t out_bytes = checked_mul(dim, item_size(to), "bytes of a row");
  const std::uint64_t in_turn = convert ? checked_add(in_bytes, out_bytes, "bytes of a row") : in_bytes;  // one block
  const std::uint64_t at_once = checked_add(in_turn, out_bytes, "bytes of a row");                        // two
  if (memory < in_turn)
    throw BudgetError(fmt::format("{}: one row takes {} to copy, more than the {} of memory given", reader.description(),
                                  format_size(in_turn), format_size(memory)));
  // As much as the reader likes, in whole blocks of it if the memory allows.
  const std::uint64_t unit = std::max<std::uint64_t>(1, reader.block_rows());
  // A quarter each for what is read ahead and written behind, where two blocks have room in the rest.
  const std::uint64_t stream = std::min(memory / 4, kMostStream);
  if (at_once <= memory / 2 / unit) {
    const std::uint64_t read_ahead = reader.read_ahead(0, rows, stream);
    memory -= read_ahead;
    memory -= writer.write_behind(stream);
    if (!convert && read_ahead > 0 && writer.takes_bytes())
      if (const RowReader::Plain rows_there = reader.plain();
          rows_there.source != nullptr && copy_bytes(reader, rows_there, writer, progress))
        return report;
  }
  const auto block_rows = [&](std::uint64_t per_row) {
    std::uint64_t block = memory / per_row;
    if (block > unit)
      block = std::max<std::uint64_t>(1, std::min(block, std::max<std::uint64_t>(8_MiB / in_turn, unit)) / unit) * unit;
    return std::max<std::uint64_t>(1, std::min(block, rows));
  };
  // Smaller blocks than the reader likes would cost it more than reading ahead gains.
  const bool ahead = memory / at_once >= unit && block_rows(at_once) < rows;
  const std::uint64_t block = block_rows(ahead ? at_once : in_turn);

  const auto input = convert ? std::make_unique_for_overwrite<std::byte[]>(block * in_bytes) : nullptr;
  const auto output = std::make_unique_for_overwrite<std::byte[]>((ahead ? 2 : 1) * block * out_bytes);
  const auto rows_of = [&](std::uint64_t index) { return std::min(block, rows - index * block); };
  BlockReader blocks(ceil_div(rows, block), ahead, [&](std::uint64_t index) -> const std::byte* {
    const std::uint64_t first = index * block, count = rows_of(index);
    std::byte* const out = output.get() + (ahead ? index % 2 : 0) * block * out_bytes;
    reader.read(first, count, convert ? input.get() : out);
    if (convert) convert_rows(reader, first, count, input.get(), to, out, report);
    return out;
  });
  for (std::uint64_t index = 0, done = 0; done < rows; ++index) {
    const std::uint64_t count = rows_of(index);
    writer.write(count, blocks.next());
    done += count;
    if (progress) progress(done, rows);
  }
  if (rows == 0 && progress) progress(0, 0);
  return report;
}

}  // namespace embermap
