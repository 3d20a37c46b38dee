// torch.save() files: zip archives of a pickle and the storages of its tensors, or, before torch 1.6, the same without an
// archive.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/addition.hpp"
#include "io/elements.hpp"
#include "io/formats.hpp"
#include "io/streams.hpp"
#include "io/torch_file.hpp"
#include "io/torch_pickle.hpp"
#include "io/zip.hpp"

namespace embermap {
namespace {

using namespace std::string_view_literals;

constexpr std::uint64_t kLargestPickle = 256_MiB;
constexpr std::string_view kPickle = "/data.pkl";
// A long integer that files of torch before 1.6 begin with, as pickle writes it behind the protocol's number and a frame.
constexpr std::string_view kLegacyMagic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv;

bool starts_with(std::span<const std::byte> head, std::string_view magic) {
  return head.size() >= magic.size() && std::equal(magic.begin(), magic.end(), head.begin(), [](char a, std::byte b) {
           return static_cast<unsigned char>(a) == std::to_integer<unsigned char>(b);
         });
}

bool begins_like_legacy(std::span<const std::byte> head) {
  if (!starts_with(head, "\x80")) return false;
  constexpr std::size_t kProtocol = 2, kFrame = 9;
  for (const std::size_t place : {kProtocol, kProtocol + kFrame})
    if (head.size() >= place && starts_with(head.subspan(place), kLegacyMagic)) return true;
  return false;
}

// The folder in the archive that all records of torch lie in; nothing if it is no archive of torch's.
std::optional<std::string> prefix_of(const ZipDirectory& directory) {
  for (const ZipMember& member : directory.members()) {
    if (!member.name.ends_with(kPickle)) continue;
    const std::string prefix = member.name.substr(0, member.name.size() - kPickle.size());
    if (!prefix.empty() && prefix.find('/') == std::string::npos) return prefix;
  }
  return std::nullopt;
}

// Where the elements of a storage lie: a member of the archive, or bytes of the file.
struct StoragePlace {
  const ZipMember* member = nullptr;
  std::uint64_t offset = 0, bytes = 0;
};

struct Archive {
  explicit Archive(const std::filesystem::path& path, bool with_scalars = false) : file{File::open(path, File::Mode::kRead)} {
    std::array<std::byte, 512> buffer;
    const auto head = std::span<const std::byte>(buffer).first(file.read_some(0, buffer));
    if (begins_like_legacy(head)) {
      read_legacy(with_scalars);
      return;
    }
    if (!begins_like_zip(head)) {
      const std::string what = looks_like(head);
      throw FormatError(path, fmt::format("is no file of torch.save(){}{}", what.empty() ? "" : "; it looks like ", what));
    }
    directory.emplace(file);
    const auto found = prefix_of(*directory);
    if (!found) throw FormatError(path, "is no file of torch.save(): there is no data.pkl in it");
    prefix = *found;
    if (directory->find(prefix + "/constants.pkl") != nullptr)
      throw FormatError(path,
                        "is a TorchScript program, which is not read here; save the state_dict of the model with torch.save()");
    if (const ZipMember* const order = directory->find(prefix + "/byteorder")) {
      const std::string text = record(*order, 16);
      if (text != "little" && text != "big")
        throw FormatError(path, fmt::format("its byte order is '{}', neither 'little' nor 'big'", printable(text)));
      swap = text == "big";
    }
    const std::string pickle = record(*directory->find(prefix + std::string(kPickle)), kLargestPickle);
    TorchContents contents;
    if (with_scalars)
      contents = read_torch_contents(path, std::as_bytes(std::span(pickle)));
    else
      contents.tensors = read_torch_pickle(path, std::as_bytes(std::span(pickle)));
    tensors = std::move(contents.tensors);
    scalars = std::move(contents.scalars);
  }

  std::string record(const ZipMember& member, std::uint64_t most) const {
    if (member.bytes > most)
      throw FormatError(file.path(), fmt::format("its '{}' has {} bytes, more than the {} accepted", printable(member.name),
                                                 member.bytes, most));
    ZipMemberReader reader(file, *directory, member, /*check=*/false);
    // By pieces: what a small deflated member says of its size is not believed before it is there.
    std::string out;
    while (out.size() < member.bytes) {
      const std::size_t at = out.size();
      out.resize(std::min<std::uint64_t>(member.bytes, at + 4_MiB));
      reader.read(at, std::as_writable_bytes(std::span(out)).subspan(at));
    }
    return out;
  }

  // A file without an archive: pickles, then the storages.
  void read_legacy(bool with_scalars) {
    const std::uint64_t size = file.size();
    std::optional<LegacyTorch> found;
    std::vector<std::byte> head;
    for (std::uint64_t most = 64_KiB; !found; most *= 8) {  // pickles are small, and nothing tells how small
      if (most > 8 * kLargestPickle)
        throw FormatError(file.path(), fmt::format("its pickles have more than the {} bytes accepted", kLargestPickle));
      const std::uint64_t bytes = std::min({size, most, kLargestPickle});
      const std::uint64_t held = head.size();
      head.resize(bytes);
      file.read(held, std::span(head).subspan(held));
      found = read_legacy_torch(file.path(), head, bytes == size, with_scalars);
    }
    tensors = std::move(found->tensors);
    scalars = std::move(found->scalars);
    std::uint64_t at = found->data;
    for (const LegacyTorch::Storage& storage : found->storages) {
      std::array<std::byte, 8> number{};
      if (size - at < number.size())
        throw FormatError(file.path(), fmt::format("truncated: the storage '{}' was to begin at byte {} of {}",
                                                   printable(storage.key), at, size));
      file.read(at, number);
      at += number.size();
      std::uint64_t elements = 0, bytes = 0;
      for (std::size_t i = number.size(); i-- > 0;) elements = elements << 8 | std::to_integer<std::uint64_t>(number[i]);
      if (elements != storage.elements)
        throw FormatError(file.path(), fmt::format("the storage '{}' at byte {} has {} elements, its tensors say {}",
                                                   printable(storage.key), at, elements, storage.elements));
      if (__builtin_mul_overflow(elements, storage.item_bytes, &bytes) || bytes > size - at)
        throw FormatError(file.path(), fmt::format("truncated: the storage '{}' has {} elements of {} bytes from byte {} on; the "
                                                   "file has {} bytes",
                                                   printable(storage.key), elements, storage.item_bytes, at, size));
      places.insert_or_assign(storage.key, StoragePlace{nullptr, at, bytes});
      at += bytes;
    }
  }

  std::optional<StoragePlace> storage(const TorchTensor& tensor) const {
    if (!directory) {
      const auto found = places.find(tensor.storage);
      return found == places.end() ? std::nullopt : std::optional(found->second);
    }
    const ZipMember* const member = directory->find(fmt::format("{}/data/{}", prefix, tensor.storage));
    if (member == nullptr) return std::nullopt;
    return StoragePlace{member, 0, member->bytes};
  }

  File file;
  std::optional<ZipDirectory> directory;            // nothing: a file without an archive
  std::map<std::string, StoragePlace> places = {};  // of such a file
  std::string prefix;
  bool swap = false;
  std::vector<TorchTensor> tensors;
  std::vector<TorchScalar> scalars;
};

std::optional<ElementFormat> element_of(const TorchTensor& tensor, bool swap) {
  if (tensor.dtype == "bool") return ElementFormat{DType::kUInt8, false, true};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kUInt8,
                            DType::kInt32, DType::kInt64})
    if (dtype_name(dtype) == tensor.dtype) return ElementFormat{dtype, swap && item_size(dtype) > 1, false};
  return std::nullopt;
}

std::string layout_of(const Archive& archive, const TorchTensor& tensor) {
  std::string out;
  const auto dense = dense_strides(tensor.shape, 1, /*fortran_order=*/false);
  bool contiguous = true;
  for (std::size_t i = 0; i < dense.size(); ++i)
    contiguous = contiguous && (tensor.shape[i] <= 1 || tensor.strides[i] == dense[i]);
  out = contiguous ? "contiguous" : fmt::format("strides {}", shape_to_text(tensor.strides));
  if (const auto place = archive.storage(tensor);
      place && place->member != nullptr && place->member->method != ZipMember::kStored)
    out += fmt::format(", {}", place->member->method_text());
  if (archive.swap) out += ", big-endian";
  return out;
}

std::uint64_t bytes_of(const TorchTensor& tensor) {
  std::uint64_t out = torch_item_size(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape)
    if (extent == 0) return 0;
  for (const std::uint64_t extent : tensor.shape)
    if (__builtin_mul_overflow(out, extent, &out)) return UINT64_MAX;  // expanded: strides of 0
  return out;
}

class TorchRowReader final : public RowReader {
 public:
  TorchRowReader(std::unique_ptr<Archive> archive, std::size_t index, const Location& location, const ReadOptions& options)
      : archive_{std::move(archive)} {
    const TorchTensor& tensor = archive_->tensors[index];
    where_ =
        tensor.name.empty() ? printable(location.file) : fmt::format("{}:{}", printable(location.file), printable(tensor.name));
    text_ = fmt::format("{}, torch, {} {}, {}", where_, tensor.dtype, shape_to_text(tensor.shape), layout_of(*archive_, tensor));
    std::optional<ElementFormat> element = element_of(tensor, archive_->swap);
    if (const auto integer = integer_named(tensor.dtype, archive_->swap); integer && !element && options.integers) {
      *options.integers = {true, integer->is_signed, false};
      element = integer->bits;
    } else if (element && options.integers) {
      options.integers->boolean = element->boolean;
    }
    if (!element)
      throw DTypeError(fmt::format("{} holds {}, which a table cannot; it holds {}", where_, tensor.dtype, table_dtypes()));
    check_requested_dtype(where_, element->dtype, options.dtype);
    const auto [rows, dim] =
        table_shape(location.file, tensor.name.empty() ? "" : fmt::format("{} has ", printable(tensor.name)), tensor.shape);
    rows_ = rows;
    dim_ = dim;
    dtype_ = element->dtype;
    remark_on_shape(remarks_, where_, tensor.shape);
    const std::optional<StoragePlace> place = archive_->storage(tensor);
    if (!place)
      throw FormatError(location.file,
                        fmt::format("the storage '{}' of '{}' is not in it", printable(tensor.storage), printable(tensor.name)));
    const std::uint64_t item = item_size(dtype_);
    if (tensor.storage_elements > place->bytes / item)
      throw FormatError(location.file, fmt::format("the storage '{}' of '{}' has {} bytes, not {} elements of {} bytes",
                                                   printable(tensor.storage), printable(tensor.name), place->bytes,
                                                   tensor.storage_elements, item));
    ReadBytes source;
    if (place->member == nullptr) {
      plain_ = std::make_unique<StreamedFile>(archive_->file);
      source = [this, begin = place->offset](std::uint64_t offset, std::span<std::byte> out) {
        plain_->read(begin + offset, out);
      };
      storage_begin_ = place->offset;
    } else {
      // torch can be told to leave checksums out, and does not look at them itself.
      reader_ = std::make_unique<ZipMemberReader>(archive_->file, *archive_->directory, *place->member, /*check=*/false);
      source = [this](std::uint64_t offset, std::span<std::byte> out) { reader_->read(offset, out); };
    }
    // All elements lie in the storage (checked when the pickle was read), and that in the file: no product is past 64 bits, but
    // for strides that are never taken.
    std::vector<std::uint64_t> strides;
    for (std::size_t i = 0; i < tensor.shape.size(); ++i)
      strides.push_back(tensor.shape[i] <= 1 ? item : tensor.strides[i] * item);
    strided_ = StridedRows(std::move(source), strided_layout(tensor.shape, strides, tensor.offset * item, *element));
  }
  TorchRowReader(const TorchRowReader&) = delete;
  TorchRowReader& operator=(const TorchRowReader&) = delete;

  std::string description() const override { return text_; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    strided_.read(first, count, out);
  }
  std::uint64_t block_rows() const override { return strided_.block_rows(); }
  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    const auto [begin, end] = strided_.bytes_of(first, count);
    if (reader_) return reader_->read_ahead(begin, end, memory);
    return plain_->read_ahead(storage_begin_ + begin, storage_begin_ + end, memory);
  }
  bool sparse() const override { return reader_ ? reader_->sparse() : plain_->sparse(); }
  std::string how() const override { return reader_ ? reader_->how() : plain_->how(); }
  Plain plain() override {
    const std::optional<std::uint64_t> begin = strided_.plain_from();
    if (!begin) return {};
    return reader_ ? Plain{reader_.get(), *begin} : Plain{plain_.get(), storage_begin_ + *begin};
  }

 private:
  std::unique_ptr<Archive> archive_;
  // One of these: the storage is a member of an archive, or lies in the file from `storage_begin_` on.
  std::unique_ptr<ZipMemberReader> reader_;
  std::unique_ptr<StreamedFile> plain_;
  std::uint64_t storage_begin_ = 0;
  std::string where_, text_;
  StridedRows strided_;
};

class TorchRowWriter final : public RowWriter {
 public:
  TorchRowWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options)
      : temporary_{TemporaryFile::create(location.file, options.overwrite)},
        count_{printable(location.file), rows},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")},
        zip_{temporary_.file()} {
    const std::uint64_t bytes = checked_mul(rows, row_bytes_, "bytes of the tensor");
    temporary_.file().reserve(bytes);
    add("archive/data.pkl", format_torch_pickle(TorchTree{
                                TorchTree::Dict{{TorchTree{location.selector.empty() ? std::string("weight") : location.selector},
                                                 TorchTree{TorchTree::Tensor{0, dtype, {rows, dim}}}}}}));
    add("archive/byteorder", "little");
    zip_.begin("archive/data/0", bytes, /*level=*/-1, kAlign);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    zip_.write({rows, count * row_bytes_});
  }
  bool takes_bytes() const override { return true; }
  void write_bytes(std::span<const std::byte> bytes) override {
    count_.add_bytes(bytes.size(), row_bytes_);
    zip_.write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return zip_.write_behind(memory); }
  std::string how() const override { return zip_.how(); }

  void finish() override {
    count_.finish();
    zip_.end();
    add("archive/version", "3\n");
    zip_.finish();
    temporary_.commit();
  }

 private:
  static constexpr std::uint64_t kAlign = 64;  // of records, as torch's own files have it

  void add(std::string_view name, std::string_view text) {
    zip_.begin(name, text.size(), /*level=*/-1, kAlign);
    zip_.write(std::as_bytes(std::span(text)));
    zip_.end();
  }

  TemporaryFile temporary_;
  RowCount count_;
  std::uint64_t row_bytes_;
  ZipWriter zip_;
};

}  // namespace

Fit fit_torch(const File& file, std::span<const std::byte> head) {
  if (begins_like_legacy(head)) return Fit::kCertain;
  return begins_like_zip(head) && prefix_of(ZipDirectory(file)) ? Fit::kCertain : Fit::kNo;
}

std::vector<Entry> list_torch(const std::filesystem::path& path) {
  const Archive archive(path);
  std::vector<Entry> out;
  for (const TorchTensor& tensor : archive.tensors)
    out.push_back({tensor.name, tensor.shape, tensor.dtype, bytes_of(tensor), layout_of(archive, tensor)});
  return out;
}

TorchContents read_torch_file(const std::filesystem::path& path) {
  Archive archive(path, /*with_scalars=*/true);
  for (const TorchTensor& tensor : archive.tensors) {
    if (!tensor.shape.empty()) continue;
    const std::optional<ElementFormat> element = element_of(tensor, archive.swap);
    const std::optional<StoragePlace> place = archive.storage(tensor);
    if (!element || !place) continue;
    const std::uint64_t item = item_size(element->dtype);
    if (tensor.offset >= place->bytes / item)
      throw FormatError(
          path, fmt::format("the storage '{}' of '{}' has {} bytes, not {} elements of {} bytes", printable(tensor.storage),
                            printable(tensor.name), place->bytes, tensor.storage_elements, item));
    std::array<std::byte, 8> bytes{};
    const auto value = std::span(bytes).first(item);
    if (place->member != nullptr)
      ZipMemberReader(archive.file, *archive.directory, *place->member, /*check=*/false).read(tensor.offset * item, value);
    else
      archive.file.read(place->offset + tensor.offset * item, value);
    if (element->swap) std::reverse(value.begin(), value.end());
    TorchScalar scalar{tensor.name, {}};
    ConversionReport ignored;
    if (is_floating(element->dtype)) {
      double number = 0;
      convert_elements(element->dtype, bytes.data(), DType::kFloat64, reinterpret_cast<std::byte*>(&number), 1, ignored);
      scalar.value = number;
    } else {
      std::int64_t number = 0;
      convert_elements(element->dtype, bytes.data(), DType::kInt64, reinterpret_cast<std::byte*>(&number), 1, ignored);
      scalar.value = number;
    }
    archive.scalars.push_back(std::move(scalar));
  }
  return {std::move(archive.tensors), std::move(archive.scalars)};
}

std::unique_ptr<RowReader> open_torch_rows(const Location& location, const ReadOptions& options) {
  auto archive = std::make_unique<Archive>(location.file);
  std::vector<Candidate> all;
  for (const TorchTensor& tensor : archive->tensors)
    all.push_back({tensor.name, fmt::format("{} {}", tensor.dtype, shape_to_text(tensor.shape)),
                   element_of(tensor, archive->swap).has_value(), tensor.shape.size()});
  const std::size_t chosen = choose_array(location, "tensor", all);
  if (std::count_if(all.begin(), all.end(), [&](const Candidate& one) { return one.name == all[chosen].name; }) > 1)
    throw InvalidArgument(fmt::format("{}: several tensors are called '{}' there, in dictionaries within dictionaries",
                                      printable(location.file), printable(all[chosen].name)));
  return std::make_unique<TorchRowReader>(std::move(archive), chosen, location, options);
}

std::unique_ptr<RowWriter> create_torch_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                             const WriteOptions& options) {
  check_name(location);
  return std::make_unique<TorchRowWriter>(location, rows, dim, dtype, options);
}

}  // namespace embermap
