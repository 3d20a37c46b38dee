#include "io/array_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/addition.hpp"
#include "io/formats.hpp"
#include "io/hdf5.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"
#include "io/zip.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kAlign = 64;  // of members

// What formats have in common: arrays come one after the other, and their rows in turn.
class ArraysInTurn : public ArrayFileWriter {
 public:
  ArraysInTurn(const Location& location, std::vector<ArrayShape> arrays, const WriteOptions& options)
      : arrays_{std::move(arrays)}, options_{options}, file_{location.file} {
    for (std::size_t i = 0; i < arrays_.size(); ++i) order_.push_back(i);
  }

  RowWriter& next() override {
    if (array_ && !array_->complete) throw InvalidArgument(fmt::format("{} is not complete", array_->where));
    if (at_ == order_.size()) throw InvalidArgument(fmt::format("{}: there are no more arrays", printable(file_)));
    const ArrayShape& shape = arrays_[order_[at_++]];
    begin(shape);
    array_ = std::make_unique<Array>(*this, shape);
    return *array_;
  }

  void finish() override {
    if (at_ != order_.size() || (array_ && !array_->complete))
      throw InvalidArgument(fmt::format("{}: not all of its {} arrays were written", printable(file_), order_.size()));
    complete();
  }

 protected:
  virtual void begin(const ArrayShape& array) = 0;
  virtual void write(std::uint64_t rows, std::span<const std::byte> bytes) = 0;
  virtual void end() = 0;
  virtual void complete() = 0;

  static std::uint64_t bytes_of(const ArrayShape& array) {
    return checked_mul(checked_mul(array.rows, array.dim, "elements"), item_size(array.dtype), "bytes of an array");
  }
  std::uint64_t all_bytes() const {
    std::uint64_t sum = 0;
    for (const ArrayShape& array : arrays_) sum = checked_add(sum, bytes_of(array), "bytes of the arrays");
    return sum;
  }

  std::vector<ArrayShape> arrays_;
  WriteOptions options_;
  std::filesystem::path file_;

 private:
  struct Array final : RowWriter {
    Array(ArraysInTurn& of, const ArrayShape& shape)
        : file{of},
          where{fmt::format("{}:{}", printable(of.file_), printable(shape.name))},
          count{where, shape.rows},
          row_bytes{shape.dim * item_size(shape.dtype)} {}
    void write(std::uint64_t rows, const std::byte* from) override {
      count.add(rows);
      file.write(rows, {from, rows * row_bytes});
    }
    void finish() override {
      count.finish();
      file.end();
      complete = true;
    }
    ArraysInTurn& file;
    std::string where;
    RowCount count;
    std::uint64_t row_bytes;
    bool complete = false;
  };
  std::size_t at_ = 0;
  std::unique_ptr<Array> array_;
};

class NpzArrays final : public ArraysInTurn {
 public:
  NpzArrays(const Location& location, const std::vector<ArrayShape>& arrays, const WriteOptions& options)
      : ArraysInTurn{location, arrays, options},
        temporary_{TemporaryFile::create(location.file, options.overwrite)},
        zip_{temporary_.file()} {
    if (options.gzip < 0) temporary_.file().reserve(all_bytes());
  }

 private:
  void begin(const ArrayShape& array) override {
    const std::string header = format_npy_header(npy_descr(array.dtype), {}, 0, {array.rows, array.dim}, 0);
    zip_.begin(array.name + ".npy", checked_add(header.size(), bytes_of(array), "bytes of an array"), options_.gzip, kAlign,
               options_.threads);
    zip_.write(std::as_bytes(std::span(header)));
  }
  void write(std::uint64_t, std::span<const std::byte> bytes) override { zip_.write(bytes); }
  void end() override { zip_.end(); }
  void complete() override {
    zip_.finish();
    temporary_.commit();
  }

  TemporaryFile temporary_;
  ZipWriter zip_;
};

class SafetensorsArrays final : public ArraysInTurn {
 public:
  SafetensorsArrays(const Location& location, const std::vector<ArrayShape>& arrays, const WriteOptions& options)
      : ArraysInTurn{location, arrays, options}, temporary_{TemporaryFile::create(location.file, options.overwrite)}, out_{0} {
    std::vector<SafeTensor> tensors;
    for (const ArrayShape& array : arrays) {
      if (array.name == "__metadata__")
        throw InvalidArgument(fmt::format("{}: no tensor can be called '__metadata__'", printable(location.file)));
      tensors.push_back({array.name, std::string(safetensors_dtype(array.dtype)), {array.rows, array.dim}, 0, bytes_of(array)});
    }
    const std::string header = format_safetensors_header(tensors, {{"format", "pt"}});
    order_.clear();
    for (const SafeTensor& tensor : tensors)
      order_.push_back(static_cast<std::size_t>(
          std::find_if(arrays.begin(), arrays.end(), [&](const ArrayShape& array) { return array.name == tensor.name; }) -
          arrays.begin()));
    temporary_.file().reserve(checked_add(header.size(), all_bytes(), "bytes of the file"));
    out_.write(temporary_.file(), std::as_bytes(std::span(header)));
  }

 private:
  void begin(const ArrayShape&) override {}
  void write(std::uint64_t, std::span<const std::byte> bytes) override { out_.write(temporary_.file(), bytes); }
  void end() override {}
  void complete() override {
    out_.flush(temporary_.file());
    temporary_.commit();
  }

  TemporaryFile temporary_;
  Appender out_;
};

class TorchArrays final : public ArraysInTurn {
 public:
  TorchArrays(const Location& location, const std::vector<ArrayShape>& arrays, const TorchTree& tree, const WriteOptions& options)
      : ArraysInTurn{location, arrays, options},
        temporary_{TemporaryFile::create(location.file, options.overwrite)},
        zip_{temporary_.file()} {
    temporary_.file().reserve(all_bytes());
    add("archive/data.pkl", format_torch_pickle(tree));
    add("archive/byteorder", "little");
  }

 private:
  void add(std::string_view name, std::string_view text) {
    zip_.begin(name, text.size(), /*level=*/-1, kAlign);
    zip_.write(std::as_bytes(std::span(text)));
    zip_.end();
  }
  void begin(const ArrayShape& array) override {
    zip_.begin(fmt::format("archive/data/{}", number_++), bytes_of(array), /*level=*/-1, kAlign);
  }
  void write(std::uint64_t, std::span<const std::byte> bytes) override { zip_.write(bytes); }
  void end() override { zip_.end(); }
  void complete() override {
    add("archive/version", "3\n");
    zip_.finish();
    temporary_.commit();
  }

  TemporaryFile temporary_;
  ZipWriter zip_;
  std::uint64_t number_ = 0;
};

class Hdf5Arrays final : public ArraysInTurn {
 public:
  Hdf5Arrays(const Location& location, const std::vector<ArrayShape>& arrays, const WriteOptions& options)
      : ArraysInTurn{location, arrays, options}, temporary_{TemporaryFile::create(location.file, options.overwrite)} {}

 private:
  void begin(const ArrayShape& array) override {
    WriteOptions options = options_;
    options.attributes = array.attributes;
    writer_ = create_hdf5_rows_in(temporary_, first_, array.name, array.rows, array.dim, array.dtype, options);
    first_ = false;
  }
  void write(std::uint64_t rows, std::span<const std::byte> bytes) override { writer_->write(rows, bytes.data()); }
  void end() override {
    writer_->finish();
    writer_.reset();
  }
  void complete() override { temporary_.commit(); }

  TemporaryFile temporary_;
  bool first_ = true;
  std::unique_ptr<RowWriter> writer_;
};

void check_arrays(const Location& location, const std::vector<ArrayShape>& arrays, const WriteOptions& options) {
  const FormatInfo& format = format_info(location.format);
  if (!location.selector.empty())
    throw InvalidArgument(fmt::format("{}:{}: several arrays make a file of their own; leave '{}' out", printable(location.file),
                                      printable(location.selector), printable(location.selector)));
  if (options.gzip >= 0 && !format.compresses)
    throw InvalidArgument(fmt::format("{}: {} files are not compressed", printable(location.file), format.name));
  if (arrays.empty()) throw InvalidArgument(fmt::format("{}: no array to write", printable(location.file)));
  std::set<std::string> names;
  for (const ArrayShape& array : arrays) {
    check_name(Location{location.file, array.name, location.format});
    if (array.name.empty()) throw InvalidArgument(fmt::format("{}: an array without a name", printable(location.file)));
    if (!names.insert(array.name).second)
      throw InvalidArgument(fmt::format("{}: two arrays are called '{}'", printable(location.file), printable(array.name)));
    if (array.dim == 0)
      throw InvalidArgument(fmt::format("{}:{}: rows without columns", printable(location.file), printable(array.name)));
  }
}

}  // namespace

std::unique_ptr<ArrayFileWriter> create_torch_arrays(const Location& location, const std::vector<ArrayShape>& arrays,
                                                     const TorchTree& tree, const WriteOptions& options) {
  return std::make_unique<TorchArrays>(location, arrays, tree, options);
}

std::unique_ptr<ArrayFileWriter> create_arrays(const Location& location, const std::vector<ArrayShape>& arrays,
                                               const WriteOptions& options) {
  check_arrays(location, arrays, options);
  switch (location.format) {
    case Location::Format::kNpz: return std::make_unique<NpzArrays>(location, arrays, options);
    case Location::Format::kHdf5: return std::make_unique<Hdf5Arrays>(location, arrays, options);
    case Location::Format::kSafetensors: return std::make_unique<SafetensorsArrays>(location, arrays, options);
    case Location::Format::kTorch: {
      TorchTree::Dict dict;
      for (std::size_t i = 0; i < arrays.size(); ++i)
        dict.emplace_back(TorchTree{arrays[i].name},
                          TorchTree{TorchTree::Tensor{i, arrays[i].dtype, {arrays[i].rows, arrays[i].dim}}});
      return create_torch_arrays(location, arrays, TorchTree{std::move(dict)}, options);
    }
    default: break;
  }
  throw InvalidArgument(fmt::format("{}: a {} file holds one array; several go to npz, hdf5, safetensors or torch",
                                    printable(location.file), format_name(location.format)));
}

std::vector<CopyResult> copy_arrays(const std::vector<RowOrigin>& origins, const std::vector<std::string>& names,
                                    const Location& destination, const CopyOptions& options) {
  if (options.resume) throw InvalidArgument("a copy of several arrays cannot be gone on with; copy them one by one");
  if (!options.vocabulary.empty() && options.vocabulary != "none")
    throw InvalidArgument("a copy of several arrays takes no words along");
  for (const RowOrigin& origin : origins) check_companions(origin.file, destination.file, options.rows.order, {});
  std::vector<std::unique_ptr<SelectedRows>> rows;
  std::vector<ArrayShape> arrays;
  std::vector<CopyResult> results;
  std::uint64_t all = 0;
  const std::uint64_t share = options.memory / 2 / std::max<std::size_t>(1, origins.size());
  for (std::size_t i = 0; i < origins.size(); ++i) {
    rows.push_back(std::make_unique<SelectedRows>(origins[i], options.rows, options.dtype, WordSink{}, share));
    const RowReader& reader = rows.back()->reader();
    arrays.push_back({names[i], reader.rows(), reader.dim(), reader.dtype(), options.attributes});
    arrays.back().attributes.emplace_back("source_dtype", dtype_name(rows.back()->from()));
    results.push_back({.rows = reader.rows(),
                       .dim = reader.dim(),
                       .from = rows.back()->from(),
                       .to = reader.dtype(),
                       .report = {},
                       .vocabulary = {},
                       .order = {},
                       .resumed = 0,
                       .remarks = reader.remarks()});
    all += reader.rows();
  }
  std::optional<InverseOrder> inverse;
  if (!options.rows.order.empty()) {
    const auto order = RowOrder::open(options.rows.order);
    inverse.emplace(*order, rows.front()->all_rows(), options.rows.permutation, order_beside(destination.file), options.overwrite,
                    options.memory / 4);
    for (CopyResult& result : results) result.order = inverse->path();
  }
  const auto writer = create_arrays(destination, arrays, {.overwrite = options.overwrite, .gzip = options.gzip, .words = {}});
  if (options.began) options.began(arrays.front().dim * item_size(arrays.front().dtype));
  std::uint64_t before = 0;
  for (const std::size_t i : writer->order()) {
    RowReader& reader = rows[i]->reader();
    RowWriter& out = writer->next();
    copy_rows(reader, out, reader.dtype(), std::max(options.memory / 2, reader.dim() * item_size(reader.dtype())),
              [&](std::uint64_t done, std::uint64_t) {
                if (options.progress) options.progress(before + done, all);
              });
    out.finish();
    results[i].report = rows[i]->report();
    results[i].remarks = reader.remarks();
    before += reader.rows();
  }
  if (options.before_finish) options.before_finish();
  try {
    if (inverse) inverse->finish();
    writer->finish();
  } catch (...) {
    if (inverse) inverse->withdraw();
    throw;
  }
  before = 0;
  if (options.check)
    for (std::size_t i = 0; i < origins.size(); ++i) {
      SelectedRows again(origins[i], options.rows, options.dtype, WordSink{}, options.memory / 4);
      const Location one{destination.file, names[i], destination.format};
      check_written(again.reader(), *open_written(one, results[i].to, results[i].dim), /*bits=*/true,
                    fmt::format("{}:{}", destination.file.native(), names[i]), options.memory / 2,
                    [&](std::uint64_t done, std::uint64_t) {
                      if (options.progress) options.progress(before + done, all);
                    });
      before += results[i].rows;
    }
  return results;
}

}  // namespace embermap
