#include "io/describe_hdf5.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "io/file.hpp"
#include "io/hdf5.hpp"

namespace embermap {
namespace {

using hdf5::AttributeId;
using hdf5::DatasetId;
using hdf5::FileId;
using hdf5::ObjectId;
using hdf5::PropertyId;
using hdf5::SpaceId;
using hdf5::TypeId;

void describe_layout(hid_t properties, Hdf5Dataset& out) {
  switch (H5Pget_layout(properties)) {
    case H5D_COMPACT: out.layout = "compact"; break;
    case H5D_CONTIGUOUS: out.layout = "contiguous"; break;
    case H5D_CHUNKED: {
      out.layout = "chunked";
      std::array<hsize_t, H5S_MAX_RANK> chunk{};
      const int rank = H5Pget_chunk(properties, H5S_MAX_RANK, chunk.data());
      if (rank > 0) out.chunk.assign(chunk.begin(), chunk.begin() + rank);
      break;
    }
    case H5D_VIRTUAL: {
      out.layout = "virtual";
      std::size_t mappings = 0;
      H5Pget_virtual_count(properties, &mappings);
      for (std::size_t i = 0; i < mappings; ++i) {
        const ssize_t length = H5Pget_virtual_filename(properties, i, nullptr, 0);
        if (length <= 0) continue;
        std::string name(static_cast<std::size_t>(length) + 1, '\0');
        H5Pget_virtual_filename(properties, i, name.data(), name.size());
        name.resize(static_cast<std::size_t>(length));
        if (std::find(out.other_files.begin(), out.other_files.end(), name) == out.other_files.end())
          out.other_files.push_back(std::move(name));
      }
      break;
    }
    default: out.layout = "unknown"; break;
  }
  const int externals = H5Pget_external_count(properties);
  for (int i = 0; i < externals; ++i) {
    out.layout = "external";
    std::array<char, 4097> name{};
    off_t offset = 0;
    hsize_t bytes = 0;
    if (H5Pget_external(properties, static_cast<unsigned>(i), name.size() - 1, name.data(), &offset, &bytes) >= 0)
      out.other_files.emplace_back(name.data());
  }
  out.filters = hdf5::filters_of(properties);
}

std::string attribute_text(hid_t attribute) {
  constexpr std::size_t kLongest = 4096;
  const TypeId type{H5Aget_type(attribute)};
  const SpaceId space{H5Aget_space(attribute)};
  if (!type || !space) return "unreadable";
  const bool scalar = H5Sget_simple_extent_npoints(space.id()) == 1;
  const std::size_t bytes = H5Tget_size(type.id());
  const H5T_class_t kind = H5Tget_class(type.id());
  if (scalar && kind == H5T_STRING && H5Tis_variable_str(type.id()) <= 0 && bytes <= kLongest) {
    std::string text(bytes + 1, '\0');
    const TypeId memory{H5Tcopy(type.id())};
    if (H5Aread(attribute, memory.id(), text.data()) >= 0) return text.substr(0, text.find('\0'));
  } else if (scalar && kind == H5T_INTEGER && bytes <= 8) {
    std::int64_t value = 0;
    if (H5Tget_sign(type.id()) == H5T_SGN_2 && H5Aread(attribute, H5T_NATIVE_INT64, &value) >= 0) return fmt::format("{}", value);
    std::uint64_t whole = 0;
    if (H5Tget_sign(type.id()) == H5T_SGN_NONE && H5Aread(attribute, H5T_NATIVE_UINT64, &whole) >= 0)
      return fmt::format("{}", whole);
  } else if (scalar && kind == H5T_FLOAT && bytes <= 8) {
    double value = 0;
    if (H5Aread(attribute, H5T_NATIVE_DOUBLE, &value) >= 0) return fmt::format("{}", value);
  }
  return fmt::format("{}{}", hdf5::describe_type(type.id()).text, scalar ? "" : ", several values");
}

void describe_attributes(hid_t dataset, Hdf5Dataset& out) {
  constexpr std::size_t kMost = 100;
  std::vector<std::string> names;
  hsize_t index = 0;
  H5Aiterate2(
      dataset, H5_INDEX_NAME, H5_ITER_INC, &index,
      [](hid_t, const char* name, const H5A_info_t*, void* data) -> herr_t {
        auto& list = *static_cast<std::vector<std::string>*>(data);
        list.emplace_back(name);
        return list.size() < kMost ? 0 : 1;
      },
      &names);
  for (const std::string& name : names) {
    const AttributeId attribute{H5Aopen(dataset, name.c_str(), H5P_DEFAULT)};
    out.attributes.emplace_back(name, attribute ? attribute_text(attribute.id()) : "unreadable");
  }
}

Hdf5Dataset describe_dataset(const std::filesystem::path& file, hid_t file_id, const std::string& path) {
  const DatasetId dataset{H5Dopen2(file_id, path.c_str(), hdf5::link_access(H5P_DATASET_ACCESS).id())};
  const TypeId type{dataset ? H5Dget_type(dataset.id()) : H5I_INVALID_HID};
  const PropertyId properties{type ? H5Dget_create_plist(dataset.id()) : H5I_INVALID_HID};
  const SpaceId space{properties ? H5Dget_space(dataset.id()) : H5I_INVALID_HID};
  if (!space) hdf5::throw_last(file, fmt::format("cannot open {}", printable(path)));

  Hdf5Dataset out;
  out.path = path;
  hdf5::ElementType element = hdf5::describe_type(type.id());
  out.dtype = std::move(element.text);
  if (element.element) out.element = element.element->dtype;
  out.element_shape = std::move(element.array);
  switch (H5Sget_simple_extent_type(space.id())) {
    case H5S_SCALAR: out.space = Hdf5Dataset::Space::kScalar; break;
    case H5S_NULL: out.space = Hdf5Dataset::Space::kNull; break;
    default: {
      std::array<hsize_t, H5S_MAX_RANK> shape{}, most{};
      const int rank = H5Sget_simple_extent_dims(space.id(), shape.data(), most.data());
      if (rank < 0) hdf5::throw_last(file, fmt::format("cannot read the shape of {}", printable(path)));
      out.shape.assign(shape.begin(), shape.begin() + rank);
      for (const hsize_t dim : std::span(most.data(), static_cast<std::size_t>(rank)))
        out.max_shape.push_back(dim == H5S_UNLIMITED ? Hdf5Dataset::kUnlimited : dim);
    }
  }
  const hssize_t points = H5Sget_simple_extent_npoints(space.id());
  // A shape past 64 bits is for whoever reads it to refuse.
  if (points > 0 && __builtin_mul_overflow(static_cast<std::uint64_t>(points), H5Tget_size(type.id()), &out.bytes))
    out.bytes = UINT64_MAX;
  describe_layout(properties.id(), out);
  describe_attributes(dataset.id(), out);
  if (out.layout != "virtual") out.stored_bytes = H5Dget_storage_size(dataset.id());
  return out;
}

struct Found {
  std::vector<std::string> datasets;
  std::vector<Hdf5Link> links;
  std::exception_ptr error;  // exceptions do not cross the library's C frames
};

herr_t visit_link(hid_t group, const char* name, const H5L_info_t* info, void* data) {
  auto& found = *static_cast<Found*>(data);
  try {
    const std::string path = std::string("/") + name;
    if (info->type == H5L_TYPE_HARD) {
      const ObjectId object{H5Oopen(group, name, H5P_DEFAULT)};
      if (!object) return -1;
      if (H5Iget_type(object.id()) == H5I_DATASET) found.datasets.push_back(path);
      return 0;
    }
    std::vector<char> value(info->u.val_size + 1, '\0');
    if (H5Lget_val(group, name, value.data(), info->u.val_size, H5P_DEFAULT) < 0) return -1;
    std::string target = value.data();
    if (info->type == H5L_TYPE_EXTERNAL) {
      const char *other = nullptr, *object = nullptr;
      unsigned flags = 0;
      if (H5Lunpack_elink_val(value.data(), info->u.val_size, &flags, &other, &object) < 0) return -1;
      target = fmt::format("{}:{}", other, object);
    }
    found.links.push_back({path, std::move(target)});
    return 0;
  } catch (...) {
    found.error = std::current_exception();
    return -1;
  }
}

}  // namespace

bool is_hdf5(const std::filesystem::path& file) { return hdf5::has_signature(File::open(file, File::Mode::kRead)); }

Hdf5Contents describe_hdf5(const std::filesystem::path& file) {
  const FileId opened = hdf5::open_for_reading(file);
  hdf5::register_lzf();
  const hdf5::Session quiet;
  Found found;
  if (H5Lvisit_by_name(opened.id(), "/", H5_INDEX_NAME, H5_ITER_INC, visit_link, &found, H5P_DEFAULT) < 0) {
    if (found.error) std::rethrow_exception(found.error);
    hdf5::throw_last(file, "cannot list the datasets");
  }
  std::sort(found.datasets.begin(), found.datasets.end());
  Hdf5Contents contents;
  contents.links = std::move(found.links);
  for (const std::string& path : found.datasets) contents.datasets.push_back(describe_dataset(file, opened.id(), path));
  return contents;
}

}  // namespace embermap
