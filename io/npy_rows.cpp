#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/elements.hpp"
#include "io/formats.hpp"
#include "io/npy.hpp"
#include "io/streams.hpp"

namespace embermap {
namespace {

class NpyRowReader final : public RowReader {
 public:
  NpyRowReader(const std::filesystem::path& name, const std::string& field, std::uint64_t size,
               std::shared_ptr<ByteSource> source, const ReadOptions& options)
      : name_{name}, source_{std::move(source)}, header_{read_npy_header(name, size, [this](auto offset, auto out) {
          source_->read(offset, out);
        })} {
    where_ = printable(name);
    if (!field.empty()) where_ = fmt::format("{}:{}", where_, printable(field));

    std::uint64_t offset = header_.data_offset;
    std::string_view descr = header_.descr;
    std::vector<std::uint64_t> shape = header_.shape;
    std::vector<std::uint64_t> strides = dense_strides(shape, header_.item_bytes, header_.fortran_order);
    if (header_.fields.empty()) {
      if (!field.empty())
        throw NotFound(fmt::format("{}: there is no field '{}', the file is a plain array of {}", printable(name),
                                   printable(field), header_.dtype_text()));
    } else {
      const NpyField& found = find_field(field);
      offset += found.offset;
      descr = found.descr;
      shape.insert(shape.end(), found.shape.begin(), found.shape.end());
    }
    const ElementFormat element = element_of(descr, options);
    dtype_ = element.dtype;
    // Dimensions inside the record come behind those of the array, in C order whatever that of the array is.
    const std::vector<std::uint64_t> inside =
        dense_strides(std::span(shape).subspan(strides.size()), item_size(dtype_), /*fortran_order=*/false);
    strides.insert(strides.end(), inside.begin(), inside.end());
    const auto [rows, dim] = table_shape(name, field.empty() ? "" : printable(field) + " has ", shape);
    rows_ = rows;
    dim_ = dim;
    // A field of one number a record is a column, as whoever names it knows.
    if (field.empty() || shape.size() > 1) remark_on_shape(remarks_, where_, shape);
    strided_ = StridedRows([source = source_](std::uint64_t at, std::span<std::byte> out) { source->read(at, out); },
                           strided_layout(shape, strides, offset, element));
  }

  NpyRowReader(const NpyRowReader&) = delete;
  NpyRowReader& operator=(const NpyRowReader&) = delete;

  std::string description() const override {
    return fmt::format("{}, NPY {}.{}, {} {}{}", where_, header_.major, header_.minor, header_.dtype_text(), header_.shape_text(),
                       header_.fortran_order ? ", Fortran order" : "");
  }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    strided_.read(first, count, out);
  }

  std::uint64_t block_rows() const override { return strided_.block_rows(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    const auto [begin, end] = strided_.bytes_of(first, count);
    return source_->read_ahead(begin, end, memory);
  }
  bool sparse() const override { return source_->sparse(); }
  std::string how() const override { return source_->how(); }
  Plain plain() override {
    const std::optional<std::uint64_t> begin = strided_.plain_from();
    return begin ? Plain{source_.get(), *begin} : Plain{};
  }

 private:
  const NpyField& find_field(const std::string& wanted) const {
    if (wanted.empty())
      throw DTypeError(fmt::format("{} holds records {}: name the field to read, as in {}:{}", printable(name_),
                                   header_.dtype_text(), printable(name_), printable(header_.fields.front().name)));
    for (const NpyField& field : header_.fields)
      if (field.name == wanted) return field;
    throw NotFound(
        fmt::format("{}: there is no field '{}' in its records {}", printable(name_), printable(wanted), header_.dtype_text()));
  }

  ElementFormat element_of(std::string_view descr, const ReadOptions& options) const {
    ElementFormat element;
    element.swap = descr.starts_with('>');
    const std::string_view kind = descr.find_first_of("<>=|") == 0 ? descr.substr(1) : descr;
    if (kind == "V2") {
      if (options.dtype != DType::kBFloat16)
        throw DTypeError(fmt::format(
            "{} holds '{}', 2 bytes of unknown meaning a value; if they are bfloat16 (as ml_dtypes writes it), say so "
            "with dtype bfloat16",
            where_, printable(descr)));
      element.dtype = DType::kBFloat16;
      return element;
    }
    if (kind == "b1" || kind == "?") {
      element.dtype = DType::kUInt8;
      element.boolean = true;
      if (options.integers) options.integers->boolean = true;
    } else if (const std::optional<DType> native = dtype_of_npy_descr(kind)) {
      element.dtype = *native;
    } else if (options.integers && (kind == "i2" || kind == "u2" || kind == "u4" || kind == "u8")) {
      *options.integers = {true, kind.front() == 'i', false};
      return integer_bits(static_cast<std::uint64_t>(kind.back() - '0'), element.swap);
    } else {
      throw DTypeError(fmt::format("{} holds '{}', which a table cannot; it holds {}", where_, printable(descr), table_dtypes()));
    }
    check_requested_dtype(where_, element.dtype, options.dtype);
    return element;
  }

  std::filesystem::path name_;
  std::shared_ptr<ByteSource> source_;
  NpyHeader header_;
  std::string where_;
  StridedRows strided_;
};

class NpyRowWriter final : public RowWriter {
 public:
  NpyRowWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options)
      : temporary_{TemporaryFile::create(location.file, options.overwrite)},
        count_{printable(location.file), rows},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")} {
    const std::string header = format_npy_header(npy_descr(dtype), {}, 0, {rows, dim}, 0);
    bytes_ = checked_mul(rows, row_bytes_, "bytes of the array");
    const std::uint64_t end = checked_add(header.size(), bytes_, "bytes of the file");
    if (!options.sparse) temporary_.file().reserve(end);
    temporary_.file().write(0, header);
    out_.emplace(temporary_.file(), header.size(), options.sparse ? header.size() : UINT64_MAX);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    out_->write({rows, count * row_bytes_});
  }

  void finish() override {
    count_.finish();
    out_->flush();
    temporary_.commit();
  }

  bool takes_bytes() const override { return true; }
  void write_bytes(std::span<const std::byte> bytes) override {
    count_.add_bytes(bytes.size(), row_bytes_);
    out_->write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return out_->write_behind(bytes_, memory); }
  std::string how() const override { return out_->how(); }

 private:
  TemporaryFile temporary_;
  RowCount count_;
  std::uint64_t row_bytes_, bytes_ = 0;
  std::optional<StreamWriter> out_;
};

}  // namespace

Fit fit_npy(const File&, std::span<const std::byte> head) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  return head.size() >= kMagic.size() && std::memcmp(head.data(), kMagic.data(), kMagic.size()) == 0 ? Fit::kCertain : Fit::kNo;
}

std::vector<Entry> npy_entries(const NpyHeader& header, const std::string& prefix, std::string_view layout) {
  const auto dtype_of = [](const std::string& descr) {
    const auto dtype = dtype_of_npy_descr(descr);
    return dtype ? std::string(dtype_name(*dtype)) : descr;
  };
  const std::string_view order = header.fortran_order ? ", Fortran order" : "";
  if (header.fields.empty())
    return {Entry{prefix, header.shape, dtype_of(header.descr), header.data_bytes(), fmt::format("{}{}", layout, order)}};
  std::vector<Entry> out;
  for (const NpyField& field : header.fields) {
    Entry entry{prefix.empty() ? field.name : fmt::format("{}:{}", prefix, field.name), header.shape, dtype_of(field.descr),
                checked_mul(header.elements(), field.bytes, "bytes of a field"),
                fmt::format("{}, field at byte {} of records of {}{}", layout, field.offset, header.item_bytes, order)};
    entry.shape.insert(entry.shape.end(), field.shape.begin(), field.shape.end());
    out.push_back(std::move(entry));
  }
  return out;
}

std::vector<Entry> list_npy(const std::filesystem::path& path) {
  return npy_entries(read_npy_header(File::open(path, File::Mode::kRead)), {}, "contiguous");
}

std::unique_ptr<RowReader> open_npy_array(const std::filesystem::path& name, const std::string& field, std::uint64_t size,
                                          std::shared_ptr<ByteSource> source, const ReadOptions& options) {
  return std::make_unique<NpyRowReader>(name, field, size, std::move(source), options);
}

std::unique_ptr<RowReader> open_npy_rows(const Location& location, const ReadOptions& options) {
  auto file = std::make_shared<StreamedFile>(File::open(location.file, File::Mode::kRead));
  const std::uint64_t size = file->file().size();
  return open_npy_array(location.file, location.selector, size, std::move(file), options);
}

std::unique_ptr<RowWriter> create_npy_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options) {
  if (!location.selector.empty())
    throw InvalidArgument(fmt::format("{}:{}: a field of a .npy file cannot be written alone; leave '{}' out",
                                      printable(location.file), printable(location.selector), printable(location.selector)));
  return std::make_unique<NpyRowWriter>(location, rows, dim, dtype, options);
}

}  // namespace embermap
