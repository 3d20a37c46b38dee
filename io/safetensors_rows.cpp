#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/addition.hpp"
#include "io/elements.hpp"
#include "io/formats.hpp"
#include "io/safetensors.hpp"
#include "io/streams.hpp"

namespace embermap {
namespace {

constexpr std::string_view kIndexExtension = ".safetensors.index.json";

bool is_index(const File& file) {
  std::array<std::byte, 1> first{};
  return file.read_some(0, first) == 1 && first[0] == std::byte{'{'};
}

bool named_like_index(const std::filesystem::path& path) { return path.native().ends_with(kIndexExtension); }

std::filesystem::path beside(const std::filesystem::path& index, const std::string& shard) { return index.parent_path() / shard; }

Candidate candidate(const SafeTensor& tensor) {
  return {tensor.name, fmt::format("{} {}", tensor.dtype_text(), shape_to_text(tensor.shape)), tensor.element().has_value(),
          tensor.shape.size()};
}

class SafetensorsRowReader final : public RowReader {
 public:
  SafetensorsRowReader(File file, const SafetensorsHeader& header, const SafeTensor& tensor, const std::filesystem::path& named,
                       const ReadOptions& options)
      : stream_{std::move(file)} {
    const std::filesystem::path& path = stream_.file().path();
    where_ = fmt::format("{}:{}", printable(named), printable(tensor.name));
    text_ = fmt::format("{}{}, safetensors, {} {}", where_, named == path ? "" : fmt::format(" in {}", printable(path)),
                        tensor.dtype_text(), shape_to_text(tensor.shape));
    std::optional<ElementFormat> element = tensor.element();
    if (const auto integer = integer_named(tensor.dtype_text(), /*swap=*/false); integer && !element && options.integers) {
      *options.integers = {true, integer->is_signed, false};
      element = integer->bits;
    } else if (element && options.integers) {
      options.integers->boolean = element->boolean;
    }
    if (!element)
      throw DTypeError(
          fmt::format("{} holds {}, which a table cannot; it holds {}", where_, tensor.dtype_text(), table_dtypes()));
    check_requested_dtype(where_, element->dtype, options.dtype);
    const auto [rows, dim] = table_shape(path, fmt::format("{} has ", printable(tensor.name)), tensor.shape);
    rows_ = rows;
    dim_ = dim;
    dtype_ = element->dtype;
    remark_on_shape(remarks_, where_, tensor.shape);
    const auto strides = dense_strides(tensor.shape, item_size(dtype_), /*fortran_order=*/false);
    strided_ = StridedRows([this](std::uint64_t offset, std::span<std::byte> out) { stream_.read(offset, out); },
                           strided_layout(tensor.shape, strides, header.data_offset + tensor.begin, *element));
  }
  SafetensorsRowReader(const SafetensorsRowReader&) = delete;
  SafetensorsRowReader& operator=(const SafetensorsRowReader&) = delete;

  std::string description() const override { return text_; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    strided_.read(first, count, out);
  }
  std::uint64_t block_rows() const override { return strided_.block_rows(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    const auto [begin, end] = strided_.bytes_of(first, count);
    return stream_.read_ahead(begin, end, memory);
  }
  bool sparse() const override { return stream_.sparse(); }
  std::string how() const override { return stream_.how(); }
  Plain plain() override {
    const std::optional<std::uint64_t> begin = strided_.plain_from();
    return begin ? Plain{&stream_, *begin} : Plain{};
  }

 private:
  StreamedFile stream_;
  std::string where_, text_;
  StridedRows strided_;
};

// All tensors of one file, or of the files that an index names.
struct Shard {
  std::filesystem::path path;
  SafetensorsHeader header;
};

std::vector<Shard> all_shards(const std::filesystem::path& index, const std::map<std::string, std::string>& files) {
  std::vector<std::string> names;
  for (const auto& [tensor, file] : files) names.push_back(file);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::vector<Shard> out;
  for (const std::string& name : names) {
    Shard& shard = out.emplace_back();
    shard.path = beside(index, name);
    shard.header = read_safetensors_header(File::open(shard.path, File::Mode::kRead));
  }
  return out;
}

const SafeTensor& find_tensor(const SafetensorsHeader& header, const Location& location) {
  std::vector<Candidate> all;
  for (const SafeTensor& tensor : header.tensors) all.push_back(candidate(tensor));
  return header.tensors[choose_array(location, "tensor", all)];
}

// A tensor of a sharded one: its file is opened alone, unless all have to be looked at to choose.
std::unique_ptr<RowReader> open_sharded(const Location& location, const ReadOptions& options) {
  const std::map<std::string, std::string> files = read_safetensors_index(location.file);
  std::string name = location.selector;
  if (!files.contains(name)) {
    std::vector<Candidate> all;
    for (const Shard& shard : all_shards(location.file, files))
      for (const SafeTensor& tensor : shard.header.tensors)
        if (files.contains(tensor.name)) all.push_back(candidate(tensor));
    name = all[choose_array(location, "tensor", all)].name;
  }
  const std::filesystem::path path = beside(location.file, files.at(name));
  File file = File::open(path, File::Mode::kRead);
  const SafetensorsHeader header = read_safetensors_header(file);
  const auto found =
      std::find_if(header.tensors.begin(), header.tensors.end(), [&](const SafeTensor& t) { return t.name == name; });
  if (found == header.tensors.end())
    throw FormatError(location.file, fmt::format("says that '{}' is in {}, where it is not", printable(name), printable(path)));
  return std::make_unique<SafetensorsRowReader>(std::move(file), header, *found, location.file, options);
}

// The rows go into a new file that has everything else of the old one. All sizes are known before the first row comes, so the
// header and the tensors that stay are written first.
class SafetensorsRowWriter final : public RowWriter {
 public:
  SafetensorsRowWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options)
      : overwrite_{options.overwrite},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")},
        addition_{location.file, fmt::format("'{}'", printable(name_of(location))), !location.selector.empty(),
                  options.overwrite},
        count_{fmt::format("{}:{}", printable(location.file), printable(name_of(location))), rows},
        tensor_{name_of(location),
                std::string(safetensors_dtype(dtype)),
                {rows, dim},
                0,
                checked_mul(rows, row_bytes_, "bytes of the tensor")},
        bytes_{tensor_.end},
        sparse_{options.sparse} {
    const std::uint64_t at = merge(addition_.existing(), addition_.file());
    out_.emplace(addition_.file(), at, sparse_ ? at : UINT64_MAX);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    out_->write({rows, count * row_bytes_});
  }

  void finish() override {
    count_.finish();
    out_->flush();
    addition_.finish([&](const File& theirs, File& ours, File& to) {
      const SafetensorsHeader header = read_safetensors_header(ours);
      const auto mine = std::find_if(header.tensors.begin(), header.tensors.end(),
                                     [&](const SafeTensor& tensor) { return tensor.name == tensor_.name; });
      const std::uint64_t at = merge(theirs, to);
      copy_range(ours, header.data_offset + mine->begin, mine->end - mine->begin, to, at);
    });
  }

  bool takes_bytes() const override { return true; }
  void write_bytes(std::span<const std::byte> bytes) override {
    count_.add_bytes(bytes.size(), row_bytes_);
    out_->write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return out_->write_behind(bytes_, memory); }
  std::string how() const override { return out_->how(); }

 private:
  static std::string name_of(const Location& location) { return location.selector.empty() ? "weight" : location.selector; }

  // Writes all of `theirs` (if that is open) but our tensor, with room for ours. Returns where that is.
  std::uint64_t merge(const File& theirs, File& to) const {
    SafetensorsHeader old;
    if (theirs.is_open())
      old = read_safetensors_header(theirs);
    else
      old.metadata.emplace("format", "pt");  // what torch's users need to be told
    std::vector<SafeTensor> tensors;
    for (const SafeTensor& tensor : old.tensors) {
      if (tensor.name != tensor_.name)
        tensors.push_back(tensor);
      else if (!overwrite_)
        throw AlreadyExists(fmt::format("{}:{} already exists", printable(addition_.target()), printable(tensor_.name)));
    }
    tensors.push_back(tensor_);
    const std::string header = format_safetensors_header(tensors, old.metadata);
    const std::uint64_t end = checked_add(header.size(), tensors.back().end, "bytes of the file");
    if (!sparse_) to.reserve(end);
    to.resize(end);  // an empty tensor at the end has nothing to write
    to.write(0, header);
    std::uint64_t ours = 0;
    for (const SafeTensor& tensor : tensors) {
      if (tensor.name == tensor_.name) {
        ours = header.size() + tensor.begin;
        continue;
      }
      const auto from =
          std::find_if(old.tensors.begin(), old.tensors.end(), [&](const SafeTensor& t) { return t.name == tensor.name; });
      copy_range(theirs, old.data_offset + from->begin, tensor.end - tensor.begin, to, header.size() + tensor.begin);
    }
    return ours;
  }

  bool overwrite_;
  std::uint64_t row_bytes_;
  Addition addition_;
  RowCount count_;
  SafeTensor tensor_;
  std::uint64_t bytes_;
  bool sparse_;
  std::optional<StreamWriter> out_;
};

}  // namespace

Fit fit_safetensors(const File& file, std::span<const std::byte> head) {
  if (head.size() < 10) return Fit::kNo;
  if (head[0] == std::byte{'{'} && head[7] != std::byte{0}) return named_like_index(file.path()) ? Fit::kCertain : Fit::kNo;
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(head[i]);
  const auto next = std::to_integer<char>(head[9]);
  const bool object =
      head[8] == std::byte{'{'} && (next == '"' || next == '}' || next == ' ' || next == '\n' || next == '\r' || next == '\t');
  return object && length <= SafetensorsHeader::kLargest && length <= file.size() - 8 ? Fit::kCertain : Fit::kNo;
}

std::vector<Entry> list_safetensors(const std::filesystem::path& path) {
  std::vector<Entry> out;
  const auto add = [&](const SafetensorsHeader& header, const std::string& layout, const auto& wanted) {
    for (const SafeTensor& tensor : header.tensors)
      if (wanted(tensor.name)) out.push_back({tensor.name, tensor.shape, tensor.dtype_text(), tensor.end - tensor.begin, layout});
  };
  const File file = File::open(path, File::Mode::kRead);
  if (is_index(file)) {
    const auto files = read_safetensors_index(path);
    const std::vector<Shard> shards = all_shards(path, files);
    for (const auto& [name, shard_name] : files) {
      const auto shard = std::find_if(shards.begin(), shards.end(),
                                      [&, &wanted = shard_name](const Shard& one) { return one.path == beside(path, wanted); });
      const auto& tensors = shard->header.tensors;
      if (std::none_of(tensors.begin(), tensors.end(),
                       [&wanted = name](const SafeTensor& tensor) { return tensor.name == wanted; }))
        throw FormatError(path, fmt::format("says that '{}' is in {}, where it is not", printable(name), printable(shard->path)));
    }
    for (const Shard& shard : shards)
      add(shard.header, fmt::format("in {}", shard.path.filename().native()), [&](const std::string& name) {
        const auto found = files.find(name);
        return found != files.end() && beside(path, found->second) == shard.path;
      });
  } else {
    add(read_safetensors_header(file), "contiguous", [](const std::string&) { return true; });
  }
  return out;
}

std::unique_ptr<RowReader> open_safetensors_rows(const Location& location, const ReadOptions& options) {
  File file = File::open(location.file, File::Mode::kRead);
  if (is_index(file)) return open_sharded(location, options);
  const SafetensorsHeader header = read_safetensors_header(file);
  const SafeTensor& tensor = find_tensor(header, location);
  return std::make_unique<SafetensorsRowReader>(std::move(file), header, tensor, location.file, options);
}

std::unique_ptr<RowWriter> create_safetensors_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                                   const WriteOptions& options) {
  if (named_like_index(location.file))
    throw InvalidArgument(fmt::format("{}: an index of several files is only read; name the file to write, as in x.safetensors",
                                      printable(location.file)));
  if (location.selector == "__metadata__")
    throw InvalidArgument(fmt::format("{}: no tensor can be called '__metadata__'", printable(location.file)));
  return std::make_unique<SafetensorsRowWriter>(location, rows, dim, dtype, options);
}

}  // namespace embermap
