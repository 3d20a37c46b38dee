#include "io/elements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "base/vector_dispatch.hpp"
#include "io/rows.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kBufferBytes = 16_MiB;

template <class Word>
EMBERMAP_ALWAYS_INLINE inline Word swapped(Word word) {
  if constexpr (sizeof(Word) == 2)
    return __builtin_bswap16(word);
  else if constexpr (sizeof(Word) == 4)
    return __builtin_bswap32(word);
  else
    return __builtin_bswap64(word);
}

template <class Word>
void swap_words(const std::byte* in, std::byte* out, std::uint64_t count) {
  with_widest_vectors([=]() EMBERMAP_ALWAYS_INLINE {
    for (std::uint64_t i = 0; i < count; ++i) {
      Word word;
      std::memcpy(&word, in + i * sizeof(Word), sizeof(Word));
      word = swapped(word);
      std::memcpy(out + i * sizeof(Word), &word, sizeof(Word));
    }
  });
}

template <std::size_t kItem>
void pick_items(const std::byte* in, std::uint64_t count, std::uint64_t stride, std::byte* out, std::uint64_t out_stride) {
  for (std::uint64_t i = 0; i < count; ++i) std::memcpy(out + i * out_stride, in + i * stride, kItem);
}

// Copies `count` items that lie `stride` apart to places `out_stride` apart.
void pick(const std::byte* in, std::uint64_t count, std::uint64_t item, std::uint64_t stride, std::byte* out,
          std::uint64_t out_stride) {
  switch (item) {
    case 1: return pick_items<1>(in, count, stride, out, out_stride);
    case 2: return pick_items<2>(in, count, stride, out, out_stride);
    case 4: return pick_items<4>(in, count, stride, out, out_stride);
    case 8: return pick_items<8>(in, count, stride, out, out_stride);
    default:
      for (std::uint64_t i = 0; i < count; ++i) std::memcpy(out + i * out_stride, in + i * stride, item);
  }
}

}  // namespace

ElementFormat integer_bits(std::uint64_t bytes, bool swap) {
  return {bytes == 2 ? DType::kFloat16 : bytes == 4 ? DType::kInt32 : DType::kInt64, swap, false};
}

std::optional<NamedInteger> integer_named(std::string_view name, bool swap) {
  if (name == "int16") return NamedInteger{integer_bits(2, swap), true};
  if (name == "uint16") return NamedInteger{integer_bits(2, swap), false};
  if (name == "uint32") return NamedInteger{integer_bits(4, swap), false};
  if (name == "uint64") return NamedInteger{integer_bits(8, swap), false};
  return std::nullopt;
}

void decode_elements(const ElementFormat& format, std::byte* data, std::uint64_t count) {
  if (format.boolean)
    for (std::uint64_t i = 0; i < count; ++i) data[i] = data[i] == std::byte{0} ? std::byte{0} : std::byte{1};
  if (format.swap) swap_elements(data, data, count, item_size(format.dtype));
}

void swap_elements(const std::byte* in, std::byte* out, std::uint64_t count, std::uint64_t item) {
  switch (item) {
    case 2: return swap_words<std::uint16_t>(in, out, count);
    case 4: return swap_words<std::uint32_t>(in, out, count);
    case 8: return swap_words<std::uint64_t>(in, out, count);
    default:
      if (in != out) std::memcpy(out, in, count * item);
  }
}

std::string table_dtypes() {
  std::string out;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                            DType::kInt32, DType::kInt64}) {
    out += out.empty() ? "" : ", ";
    out += dtype_name(dtype);
  }
  return out + " (bool is read as uint8)";
}

std::string shape_to_text(std::span<const std::uint64_t> shape) {
  std::string out = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) out += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  out += shape.size() == 1 ? ",)" : ")";
  return out;
}

void check_requested_dtype(std::string_view where, DType found, const std::optional<DType>& requested) {
  if (requested && *requested != found)
    throw DTypeError(fmt::format("{} holds {}, not {}: it cannot be taken as that, only converted after reading", where,
                                 dtype_name(found), dtype_name(*requested)));
}

void check_row_range(std::string_view where, std::uint64_t first, std::uint64_t count, std::uint64_t rows) {
  if (first > rows || count > rows - first)
    throw InvalidArgument(fmt::format("{}: rows [{}, +{}) are not within its {} rows", where, first, count, rows));
}

std::vector<std::uint64_t> dense_strides(std::span<const std::uint64_t> shape, std::uint64_t item, bool fortran_order) {
  std::vector<std::uint64_t> out(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const std::size_t at = fortran_order ? i : shape.size() - 1 - i;
    out[at] = item;
    if (shape[at] != 0) item *= shape[at];
  }
  return out;
}

TableShape table_shape(const std::filesystem::path& file, std::string_view what, std::span<const std::uint64_t> shape) {
  if (shape.empty()) throw FormatError(file, fmt::format("{}shape (): one value is no table, which has rows", what));
  TableShape out{shape[0], 1};
  for (const std::uint64_t extent : shape.subspan(1))
    if (extent == 0)
      throw FormatError(file, fmt::format("{}shape {}: a table needs at least one column", what, shape_to_text(shape)));
  for (const std::uint64_t extent : shape.subspan(1))
    if (__builtin_mul_overflow(out.dim, extent, &out.dim))
      throw FormatError(file, fmt::format("{}shape {}: its columns are past 64 bits", what, shape_to_text(shape)));
  return out;
}

void remark_on_shape(std::vector<Remark>& remarks, std::string_view where, std::span<const std::uint64_t> shape) {
  if (shape.size() == 2 || shape.empty()) return;
  std::uint64_t dim = 1;
  for (const std::uint64_t extent : shape.subspan(1)) dim *= extent;  // as table_shape() has checked
  remarks.push_back({fmt::format("{} has shape {}: read as {} rows of {}", where, shape_to_text(shape), shape[0],
                                 dim == 1 ? "one column" : fmt::format("{} columns", dim))});
}

StridedLayout strided_layout(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> strides, std::uint64_t offset,
                             const ElementFormat& element) {
  StridedLayout out;
  out.rows = shape[0];
  out.row_stride = strides[0];
  out.offset = offset;
  out.element = element;
  out.item = item_size(element.dtype);
  out.dim = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) {
    out.dim *= shape[i];
    if (shape[i] == 1) continue;
    // Dimensions that follow each other without a gap are one.
    if (!out.inner.empty() && out.inner.back().stride == shape[i] * strides[i])
      out.inner.back() = {out.inner.back().extent * shape[i], strides[i]};
    else
      out.inner.push_back({shape[i], strides[i]});
  }
  if (!out.inner.empty() && out.inner.back().stride == out.item) {
    out.item *= out.inner.back().extent;
    out.inner.pop_back();
  }
  return out;
}

StridedRows::StridedRows(ReadBytes source, StridedLayout layout) : source_{std::move(source)}, layout_{std::move(layout)} {
  span_ = layout_.item;
  for (const StridedLayout::Dimension& dimension : layout_.inner) {
    items_ *= dimension.extent;
    if (dimension.extent > 0) span_ += (dimension.extent - 1) * dimension.stride;
  }
}

std::span<std::byte> StridedRows::buffer(std::uint64_t bytes) {
  if (buffer_.size() < bytes) buffer_.resize(bytes);
  return std::span(buffer_).first(bytes);
}

// Whether the elements of a column lie closer together than those of a row (Fortran order), so that rows in between would be read
// again and again.
bool StridedRows::by_column() const { return !layout_.inner.empty() && layout_.rows > 1 && layout_.row_stride < span_; }

void StridedRows::read(std::uint64_t first, std::uint64_t count, std::byte* out) {
  if (count == 0) return;
  const StridedLayout& at = layout_;
  const std::uint64_t offset = at.offset + first * at.row_stride;
  if (at.inner.empty() && (at.rows == 1 || at.row_stride == at.item))
    source_(offset, {out, count * at.item});
  else if (at.inner.empty())
    read_strided(offset, count, at.item, at.row_stride, out);
  else if (at.inner.size() == 1 && (at.rows == 1 || at.row_stride == items_ * at.inner[0].stride))
    read_strided(offset, count * items_, at.item, at.inner[0].stride, out);
  else if (by_column())
    read_columns(first, count, out);
  else
    read_rows(first, count, out);
  decode_elements(at.element, out, count * at.dim);
}

void StridedRows::read_strided(std::uint64_t offset, std::uint64_t count, std::uint64_t item, std::uint64_t stride,
                               std::byte* out) {
  // What lies between is read along, unless it is so much that many small reads cost less.
  const bool sparse = stride >= 256_KiB && stride / 16 >= item;
  const std::uint64_t per_read = sparse ? 1 : std::max<std::uint64_t>(1, kBufferBytes / 4 / std::max(stride, item));
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t now = std::min(per_read, count - done);
    if (now == 1) {
      source_(offset + done * stride, {out + done * item, item});
    } else {
      const auto block = buffer((now - 1) * stride + item);
      source_(offset + done * stride, block);
      pick(block.data(), now, item, stride, out + done * item, item);
    }
    done += now;
  }
}

namespace {

// Calls use(place of the run in the row, first item of it) for each run of items along the last dimension, in C order.
template <class Use>
void for_each_run(const std::vector<StridedLayout::Dimension>& inner, Use use) {
  std::vector<std::uint64_t> index(inner.size() - 1);
  std::uint64_t place = 0;
  for (std::uint64_t item = 0;; item += inner.back().extent) {
    use(place, item);
    std::size_t at = index.size();
    while (at-- > 0) {
      place += inner[at].stride;
      if (++index[at] < inner[at].extent) break;
      place -= inner[at].extent * inner[at].stride;
      index[at] = 0;
    }
    if (at == static_cast<std::size_t>(-1)) return;
  }
}

}  // namespace

// Whole rows with what lies between their items, several at once where they are short.
void StridedRows::read_rows(std::uint64_t first, std::uint64_t count, std::byte* out) {
  const StridedLayout& at = layout_;
  const StridedLayout::Dimension last = at.inner.back();
  const std::uint64_t row_bytes = items_ * at.item;
  const std::uint64_t offset = at.offset + first * at.row_stride;
  const bool apart = span_ > kBufferBytes / 4 || (span_ >= 256_KiB && span_ / 16 >= row_bytes);
  if (apart) {
    for (std::uint64_t row = 0; row < count; ++row)
      for_each_run(at.inner, [&](std::uint64_t place, std::uint64_t item) {
        read_strided(offset + row * at.row_stride + place, last.extent, at.item, last.stride,
                     out + row * row_bytes + item * at.item);
      });
    return;
  }
  const std::uint64_t per_read = std::max<std::uint64_t>(1, kBufferBytes / 4 / std::max(at.row_stride, span_));
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t now = std::min(per_read, count - done);
    const auto block = buffer((now - 1) * at.row_stride + span_);
    source_(offset + done * at.row_stride, block);
    for (std::uint64_t row = 0; row < now; ++row)
      for_each_run(at.inner, [&](std::uint64_t place, std::uint64_t item) {
        pick(block.data() + row * at.row_stride + place, last.extent, at.item, last.stride,
             out + (done + row) * row_bytes + item * at.item, at.item);
      });
    done += now;
  }
}

// Column by column in slices of many rows. Several columns are held at once, so that a row's part is written in one place, not
// element by element all over the block.
void StridedRows::read_columns(std::uint64_t first, std::uint64_t count, std::byte* out) {
  const StridedLayout& at = layout_;
  const StridedLayout::Dimension last = at.inner.back();
  const std::uint64_t row_bytes = items_ * at.item;
  const std::uint64_t columns_at_once = std::clamp<std::uint64_t>(64 / at.item, 1, last.extent);
  const std::uint64_t rows_at_once =
      std::max<std::uint64_t>(1, kBufferBytes / (columns_at_once * std::max(at.row_stride, at.item)));
  constexpr std::uint64_t kTileRows = 1024;  // of one tile: stays in the first-level caches while its columns go by
  for (std::uint64_t row = 0; row < count; row += rows_at_once) {
    const std::uint64_t rows = std::min(rows_at_once, count - row);
    const std::uint64_t slice = (rows - 1) * at.row_stride + at.item;
    for_each_run(at.inner, [&](std::uint64_t place, std::uint64_t item) {
      for (std::uint64_t column = 0; column < last.extent; column += columns_at_once) {
        const std::uint64_t columns = std::min(columns_at_once, last.extent - column);
        const auto block = buffer(columns * slice);
        for (std::uint64_t c = 0; c < columns; ++c)
          source_(at.offset + (first + row) * at.row_stride + place + (column + c) * last.stride,
                  block.subspan(c * slice, slice));
        for (std::uint64_t tile = 0; tile < rows; tile += kTileRows)
          for (std::uint64_t c = 0; c < columns; ++c)
            pick(block.data() + c * slice + tile * at.row_stride, std::min(kTileRows, rows - tile), at.item, at.row_stride,
                 out + (row + tile) * row_bytes + (item + column + c) * at.item, row_bytes);
      }
    });
  }
}

StridedRows::Bytes StridedRows::bytes_of(std::uint64_t first, std::uint64_t count) const {
  // Rows that lie over one another, or whose columns lie apart, are read in another order, or with large gaps.
  if (count == 0 || by_column() || (layout_.rows > 1 && layout_.row_stride < span_) || span_ > kBufferBytes / 4 ||
      layout_.row_stride > kBufferBytes / 4)
    return {};
  const std::uint64_t begin = layout_.offset + first * layout_.row_stride;
  return {begin, begin + (count - 1) * layout_.row_stride + span_};
}

std::optional<std::uint64_t> StridedRows::plain_from() const {
  const bool together = layout_.inner.empty() && (layout_.rows == 1 || layout_.row_stride == layout_.item);
  if (!together || layout_.element.swap || layout_.element.boolean) return std::nullopt;
  return layout_.offset;
}

std::uint64_t StridedRows::block_rows() const {
  // A block of a Fortran file costs one read a column: larger blocks, longer reads.
  return std::max<std::uint64_t>(1, (by_column() ? 32_MiB : 4_MiB) / (items_ * layout_.item));
}

std::string looks_like(std::span<const std::byte> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  using namespace std::string_view_literals;
  struct Known {
    std::string_view magic, what;
  };
  constexpr std::array kKnown{
      Known{"\x93NUMPY"sv, "a NumPy array (.npy)"},
      Known{"\x89HDF\r\n\x1a\n"sv, "an HDF5 file (.h5)"},
      Known{"version https://git-lfs"sv, "a git-lfs pointer, not the file itself ('git lfs pull' fetches it)"},
      Known{"\x1f\x8b"sv, "a gzip file (decompress it first)"},
      Known{"PK\x03\x04"sv, "a zip archive (such as .npz or .pt)"},
      Known{"PK\x05\x06"sv, "an empty zip archive"},
      Known{"\x28\xb5\x2f\xfd"sv, "a zstd file (decompress it first)"},
      Known{"\xfd"
            "7zXZ\0"sv,
            "an xz file (decompress it first)"},
      Known{"BZh"sv, "a bzip2 file (decompress it first)"},
      Known{"GGUF"sv, "a GGUF file"},
      Known{"PAR1"sv, "a Parquet file"},
      Known{"ARROW1"sv, "an Arrow file"},
  };
  for (const Known& known : kKnown)
    if (text.starts_with(known.magic)) return std::string(known.what);
  if (text.size() >= 2 && text[0] == '\x80' && text[1] >= 2 && text[1] <= 5) return "a Python pickle (embermap runs no pickles)";
  if (text.size() >= 10 && text[8] == '{' && text[9] == '"' && text.substr(3, 5) == "\0\0\0\0\0"sv) return "a safetensors file";
  std::string_view rest = text;
  if (rest.starts_with("\xEF\xBB\xBF")) rest.remove_prefix(3);
  while (!rest.empty() && std::isspace(static_cast<unsigned char>(rest.front())) != 0) rest.remove_prefix(1);
  std::string start(rest.substr(0, 14));
  std::transform(start.begin(), start.end(), start.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (start.starts_with("<!doctype html") || start.starts_with("<html") || start.starts_with("<head"))
    return "an HTML page (was the download a login or error page?)";
  if (start.starts_with("<?xml") || start.starts_with("<")) return "an XML or HTML document";
  if (start.starts_with("{") || start.starts_with("[")) return "JSON";
  const bool is_text = !rest.empty() && std::all_of(rest.begin(), rest.end(), [](unsigned char c) {
    return (c >= 0x20 && c != 0x7F) || c == '\n' || c == '\r' || c == '\t';
  });
  if (is_text && head.size() >= 16) return "text";
  return {};
}

}  // namespace embermap
