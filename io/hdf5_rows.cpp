#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <system_error>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/formats.hpp"
#include "io/hdf5.hpp"
#include "io/hdf5_chunks.hpp"
#include "io/streams.hpp"

namespace embermap {
namespace {

using namespace hdf5;

// A chunk row is all chunks that hold one row. Up to this many bytes of them are kept decompressed between reads; a chunk row
// that is larger is read in slabs of so many bytes (each of its chunks is then decompressed once a slab). One single chunk larger
// than this is kept whole: the library holds it whole in order to decompress it anyway.
constexpr std::uint64_t kChunkRowLimit = 128_MiB;
// A dataset that declares more than kTrusted bytes and stores less than one byte for kInflation of them is not believed: deflate
// reaches 1032 : 1.
constexpr std::uint64_t kTrusted = 1_GiB;
constexpr std::uint64_t kInflation = 1100;
constexpr int kDeepest = 32;                  // groups within groups; virtual datasets of virtual datasets; links of links
constexpr std::size_t kMostObjects = 100000;  // looked at for a dataset when none is named

std::string with_slash(const std::string& path) { return path.starts_with('/') ? path : fmt::format("/{}", path); }

// ---- what is in a file ----

struct Found {
  std::string path;
  std::string text;      // "float32 (1003, 300)"
  bool numeric = false;  // rows that a table can hold
  std::size_t dimensions = 0;
  bool unreadable = false;
};

std::vector<std::uint64_t> extent_of(hid_t space) {
  const int rank = H5Sget_simple_extent_ndims(space);
  std::array<hsize_t, H5S_MAX_RANK> dims{};
  if (rank < 0 || rank > H5S_MAX_RANK || H5Sget_simple_extent_dims(space, dims.data(), nullptr) < 0) return {};
  return {dims.begin(), dims.begin() + rank};
}

class Listing {
 public:
  // All datasets of the file, by name order. Only hard links are followed: nothing is listed twice, and no cycle is.
  static std::vector<Found> of(hid_t file, const ReadOptions& options) {
    Listing out{options};
    const GroupId root{H5Gopen2(file, "/", H5P_DEFAULT)};
    if (root) out.visit(root.id(), "", 0);
    return std::move(out.found_);
  }

 private:
  explicit Listing(const ReadOptions& options) : options_{options} {}

  void visit(hid_t group, const std::string& prefix, int depth) {
    H5O_info_t info;
    if (depth > kDeepest || H5Oget_info(group, &info) < 0 || !visited_.insert(info.addr).second) return;
    std::vector<std::string> names;
    hsize_t index = 0;
    H5Literate(
        group, H5_INDEX_NAME, H5_ITER_INC, &index,
        [](hid_t, const char* name, const H5L_info_t* link, void* data) -> herr_t {
          auto& list = *static_cast<std::vector<std::string>*>(data);
          if (link->type == H5L_TYPE_HARD) list.emplace_back(name);
          return list.size() < kMostObjects ? 0 : 1;
        },
        &names);
    const PropertyId access = link_access(H5P_LINK_ACCESS);
    for (const std::string& name : names) {
      if (++looked_at_ > kMostObjects) return;
      const ObjectId object{H5Oopen(group, name.c_str(), access.id())};
      const std::string path = fmt::format("{}/{}", prefix, name);
      if (!object) {
        found_.push_back({path, fmt::format("cannot be opened: {}", last_error().text), false, true});
        continue;
      }
      const H5I_type_t kind = H5Iget_type(object.id());
      if (kind == H5I_GROUP) visit(object.id(), path, depth + 1);
      if (kind == H5I_DATASET) add(object.id(), path);
    }
  }

  void add(hid_t dataset, const std::string& path) {
    const TypeId type{H5Dget_type(dataset)};
    const SpaceId space{H5Dget_space(dataset)};
    if (!type || !space) return;
    const ElementType element = describe_type(type.id());
    std::vector<std::uint64_t> shape = extent_of(space.id());
    const bool simple = H5Sget_simple_extent_type(space.id()) == H5S_SIMPLE;
    Found found;
    found.path = path;
    found.text = fmt::format("{} {}", element.text, simple ? shape_to_text(shape) : "without data");
    shape.insert(shape.end(), element.array.begin(), element.array.end());
    const bool numeric =
        element.element || (element.two_bytes && options_.dtype == DType::kBFloat16) || (element.integer && options_.integers);
    found.numeric = simple && numeric && !shape.empty() && std::find(shape.begin() + 1, shape.end(), 0U) == shape.end();
    found.dimensions = shape.size();
    found_.push_back(std::move(found));
  }

  const ReadOptions& options_;
  std::vector<Found> found_;
  std::set<haddr_t> visited_;
  std::size_t looked_at_ = 0;
};

std::size_t edit_distance(std::string_view a, std::string_view b) {
  a = a.substr(0, 256);
  b = b.substr(0, 256);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j)
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0U : 1U)}));
  }
  return row.back();
}

// "/v: float32 (2, 4); /words: string (2,)", those named most like `wanted` first.
std::string list_text(std::vector<Found> found, std::string_view wanted) {
  if (found.empty()) return "no datasets";
  if (!wanted.empty())
    std::stable_sort(found.begin(), found.end(), [&](const Found& a, const Found& b) {
      return edit_distance(a.path, wanted) < edit_distance(b.path, wanted);
    });
  std::string out;
  constexpr std::size_t kShown = 12;
  for (std::size_t i = 0; i < std::min(found.size(), kShown); ++i)
    out += fmt::format("{}{}: {}", i > 0 ? "; " : "", printable(found[i].path), found[i].text);
  if (found.size() > kShown) out += fmt::format("; ... {} more", found.size() - kShown);
  return out;
}

// ---- other files that a dataset may lie in ----

// Resolves a name found in `file`; it must lie in that file's folder or below, links followed, unless it may lie `anywhere`.
std::filesystem::path file_below(const std::filesystem::path& file, const std::string& dataset, const std::filesystem::path& name,
                                 bool anywhere) {
  std::error_code error;
  const std::filesystem::path parent = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
  const std::filesystem::path folder = std::filesystem::canonical(parent, error);
  if (error) throw IoError(error.value(), "realpath", parent);
  const std::filesystem::path named = name.is_absolute() ? name : folder / name;
  std::filesystem::path real = std::filesystem::weakly_canonical(named, error);
  if (error) throw IoError(error.value(), "realpath", named);
  if (anywhere) return real;
  const auto [mismatch, rest] = std::mismatch(folder.begin(), folder.end(), real.begin(), real.end());
  if (mismatch != folder.end())
    throw FormatError(file, fmt::format("{} lies in {}, which is not below the file's own folder; it is not read (follow_links "
                                        "does, for files that are trusted)",
                                        printable(dataset), printable(name)));
  return real;
}

// A dataset in raw files (H5Pset_external): read by us, because the library takes zeros for what a short file lacks.
class ExternalFiles {
 public:
  ExternalFiles(hid_t creation, const std::filesystem::path& file, const std::string& dataset, std::uint64_t bytes,
                bool anywhere) {
    const int count = H5Pget_external_count(creation);
    std::uint64_t covered = 0;
    for (int i = 0; i < count && covered < bytes; ++i) {
      std::array<char, 4097> name{};
      off_t offset = 0;
      hsize_t size = 0;
      if (H5Pget_external(creation, static_cast<unsigned>(i), name.size() - 1, name.data(), &offset, &size) < 0 || offset < 0)
        throw_last(file, fmt::format("cannot read the external files of {}", printable(dataset)));
      const std::filesystem::path path = file_below(file, dataset, name.data(), anywhere);
      Part part{File::open(path, File::Mode::kRead), static_cast<std::uint64_t>(offset), covered,
                std::min<std::uint64_t>(size, bytes - covered)};
      const std::uint64_t there = part.file.size() < part.offset ? 0 : part.file.size() - part.offset;
      if (there < part.bytes)
        throw FormatError(path, fmt::format("truncated: {} of {} bytes of {} in {} are there (from byte {})", there, part.bytes,
                                            printable(dataset), printable(file), part.offset));
      covered += part.bytes;
      parts_.push_back(std::move(part));
    }
    if (covered < bytes)
      throw FormatError(
          file, fmt::format("truncated: the external files of {} hold {} of {} bytes", printable(dataset), covered, bytes));
  }

  void read(std::uint64_t offset, std::span<std::byte> out) const {
    for (const Part& part : parts_) {
      if (out.empty()) return;
      if (offset >= part.begin + part.bytes) continue;
      const std::uint64_t inside = offset - part.begin;
      const std::uint64_t now = std::min<std::uint64_t>(part.bytes - inside, out.size());
      part.file.read(part.offset + inside, out.first(now));
      offset += now;
      out = out.subspan(now);
    }
  }

 private:
  struct Part {
    File file;
    std::uint64_t offset;  // in that file
    std::uint64_t begin;   // in the dataset
    std::uint64_t bytes;
  };
  std::vector<Part> parts_;
};

// Looks at everything that a virtual dataset reads from: files below the folder of `file`, present, neither external nor virtual
// in a circle. Returns the bytes they store.
std::uint64_t check_virtual(hid_t creation, hid_t open_file, const std::filesystem::path& file, const std::string& dataset,
                            bool anywhere, int depth) {
  if (depth > kDeepest)
    throw FormatError(file, fmt::format("{}: virtual datasets nested more than {} deep", printable(dataset), kDeepest));
  std::size_t count = 0;
  if (H5Pget_virtual_count(creation, &count) < 0)
    throw_last(file, fmt::format("cannot read the sources of {}", printable(dataset)));
  std::uint64_t stored = 0;
  std::set<std::pair<std::string, std::string>> seen;
  for (std::size_t i = 0; i < count; ++i) {
    const auto text = [&](auto get) {
      const ssize_t length = get(creation, i, nullptr, 0);
      if (length < 0) throw_last(file, fmt::format("cannot read the sources of {}", printable(dataset)));
      std::string out(static_cast<std::size_t>(length) + 1, '\0');
      get(creation, i, out.data(), out.size());
      out.pop_back();
      return out;
    };
    const std::string source_file = text(&H5Pget_virtual_filename), source_path = text(&H5Pget_virtual_dsetname);
    if (source_file.find('%') != std::string::npos || source_path.find('%') != std::string::npos)
      throw FormatError(file, fmt::format("{} is virtual over a pattern of names ('{}', '{}'), which is not read here",
                                          printable(dataset), printable(source_file), printable(source_path)));
    if (!seen.emplace(source_file, source_path).second) continue;
    std::filesystem::path path = file;
    FileId opened;
    hid_t source = open_file;
    if (source_file != ".") {
      path = file_below(file, dataset, source_file, anywhere);
      opened = open_for_reading(path);
      source = opened.id();
    }
    if (object_at(source, path, source_path) != ObjectKind::kDataset)
      throw FormatError(file, fmt::format("{} is virtual over {}:{}, which is not there", printable(dataset), printable(path),
                                          printable(source_path)));
    const PropertyId access = link_access(H5P_DATASET_ACCESS);
    const DatasetId from{H5Dopen2(source, source_path.c_str(), access.id())};
    const PropertyId from_creation{from ? H5Dget_create_plist(from.id()) : H5I_INVALID_HID};
    if (!from_creation) throw_last(path, fmt::format("cannot open {}", printable(source_path)));
    if (H5Pget_layout(from_creation.id()) == H5D_VIRTUAL) {
      stored += check_virtual(from_creation.id(), source, path, source_path, anywhere, depth + 1);
    } else {
      if (H5Pget_external_count(from_creation.id()) > 0)
        throw FormatError(file, fmt::format("{} is virtual over {}:{}, which lies in external files; that is not read here",
                                            printable(dataset), printable(path), printable(source_path)));
      for (const Hdf5Filter& filter : filters_of(from_creation.id()))
        if (!filter.available && !filter.optional)
          throw FormatError(path, fmt::format("{} needs filter {} ({}), which is not available here", printable(source_path),
                                              filter.id, filter.name));
      stored += H5Dget_storage_size(from.id());
    }
  }
  return stored;
}

// ---- links into other files ----

struct ExternalLink {
  std::string at, file, object, rest;  // `rest`: what of the path comes behind it
};

// The first external link on the way to `path` in an open file, if there is one; also behind soft links on that way.
std::optional<ExternalLink> external_link_on(hid_t file, const std::string& path, int depth = 0) {
  if (depth == kDeepest) return std::nullopt;
  const Session quiet;
  const PropertyId access = link_access(H5P_LINK_ACCESS);
  for (std::size_t at = path.find_first_not_of('/'); at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string prefix = path.substr(0, end);
    H5L_info_t link;
    if (H5Lexists(file, prefix.c_str(), access.id()) <= 0 || H5Lget_info(file, prefix.c_str(), &link, access.id()) < 0)
      return std::nullopt;
    if (link.type == H5L_TYPE_EXTERNAL) {
      std::string value(link.u.val_size, '\0');
      const char *target = nullptr, *object = nullptr;
      unsigned flags = 0;
      if (H5Lget_val(file, prefix.c_str(), value.data(), value.size(), access.id()) < 0 ||
          H5Lunpack_elink_val(value.data(), value.size(), &flags, &target, &object) < 0)
        return std::nullopt;
      return ExternalLink{prefix, target, object, path.substr(end)};
    }
    if (H5Oexists_by_name(file, prefix.c_str(), access.id()) <= 0) {
      if (link.type != H5L_TYPE_SOFT) return std::nullopt;
      std::string value(link.u.val_size, '\0');
      if (value.empty() || H5Lget_val(file, prefix.c_str(), value.data(), value.size(), access.id()) < 0) return std::nullopt;
      const std::string target(value.c_str());
      // Seen from the group that the link is in.
      const std::string resolved = target.starts_with('/') ? target : prefix.substr(0, prefix.rfind('/') + 1) + target;
      return external_link_on(file, with_slash(resolved) + path.substr(end), depth + 1);
    }
    at = path.find_first_not_of('/', end);
  }
  return std::nullopt;
}

// ---- the reader ----

class Hdf5RowReader final : public RowReader {
 public:
  Hdf5RowReader(const Location& location, const ReadOptions& options) : location_{location.file} {
    register_lzf();
    const Session quiet;
    file_ = open_for_reading(location_);
    allows_ = options.allow_external || options.follow_links;
    anywhere_ = options.follow_links;
    find(location.selector, options);
    where_ = fmt::format("{}:{}{}{}", printable(location_), printable(path_), field_.empty() ? "" : ":", printable(field_));

    DatasetId dataset = open(PropertyId());
    const PropertyId creation{H5Dget_create_plist(dataset.id())};
    type_ = TypeId{H5Dget_type(dataset.id())};
    const SpaceId space{H5Dget_space(dataset.id())};
    if (!creation || !type_ || !space) throw_last(location_, fmt::format("cannot open {}", printable(path_)));
    take_type(options);
    take_shape(space.id());
    dtype_ = element_.dtype;
    layout_text_ = layout_text(creation.id());
    check_filters(dataset.id(), creation.id());

    std::uint64_t declared = record_bytes_;
    for (const std::uint64_t extent : extent_) declared = checked_mul(declared, extent, where_);
    const bool external = H5Pget_external_count(creation.id()) > 0;
    const bool is_virtual = H5Pget_layout(creation.id()) == H5D_VIRTUAL;
    if ((external || is_virtual) && !allows_)
      throw FormatError(
          location_,
          fmt::format("{} is {}; reading other files through it has to be allowed (allow_external, files below its own "
                      "folder only)",
                      printable(path_), external ? "stored in external files" : "a virtual dataset over others"));
    if (external) {
      open_external(creation.id());
      return;
    }
    std::uint64_t stored = 0;
    if (is_virtual)
      stored = check_virtual(creation.id(), file_.id(), location_, path_, anywhere_, 0);
    else if (declared > kTrusted)
      stored = H5Dget_storage_size(dataset.id());
    if (declared > kTrusted && stored < declared / kInflation)
      throw FormatError(
          location_,
          fmt::format("{} declares {} ({} x {} {}), but only {} are stored: such a dataset is not believed (above {}, at "
                      "least one byte for {} declared is demanded)",
                      printable(path_), format_size(declared), rows_, dim_, dtype_name(dtype_), format_size(stored),
                      format_size(kTrusted), kInflation));

    H5D_fill_value_t fill = H5D_FILL_VALUE_DEFAULT;
    H5D_fill_time_t fill_time = H5D_FILL_TIME_IFSET;
    clear_first_ = H5Pfill_value_defined(creation.id(), &fill) < 0 || fill == H5D_FILL_VALUE_UNDEFINED ||
                   H5Pget_fill_time(creation.id(), &fill_time) < 0 || fill_time == H5D_FILL_TIME_NEVER;
    check_storage(dataset.id(), creation.id(), declared);
    if (open_contiguous(dataset.id(), creation.id(), declared)) return;
    PropertyId access = link_access(H5P_DATASET_ACCESS);
    plan_chunks(creation.id(), space.id(), access.id());
    if (is_virtual) {
      std::error_code error;
      const auto folder =
          std::filesystem::canonical(location_.has_parent_path() ? location_.parent_path() : std::filesystem::path("."), error);
      if (!error) H5Pset_virtual_prefix(access.id(), folder.c_str());
    }
    contiguous_ = H5Pget_layout(creation.id()) == H5D_CONTIGUOUS;
    // A dataset that is open already keeps its chunk cache: closed before it is opened with its own.
    dataset.close();
    dataset_ = open(std::move(access));
    if (layout_ && layout_->known && layout_->chunk_bytes <= kChunkRowLimit) {
      std::vector<std::byte> value(record_bytes_);
      if (!clear_first_ && H5Pget_fill_value(creation.id(), type_.id(), value.data()) < 0)
        throw_last(location_, fmt::format("cannot read the fill value of {}", printable(path_)));
      chunks_ = std::make_unique<ChunkReader>(location_, path_, dataset_.id(), std::move(*layout_), std::move(value),
                                              ChunkReader::Field{field_offset_, field_bytes()}, options.threads);
    }
  }

  std::string description() const override {
    const std::string never = never_written();
    return fmt::format("{}, {} {}, {}{}{}", where_, type_text_, shape_to_text(shape_), layout_text_, never.empty() ? "" : ", ",
                       never);
  }

  std::vector<Remark> remarks() const override {
    std::vector<Remark> out = remarks_;
    if (const std::string never = never_written(); !never.empty())
      out.push_back({fmt::format("{}: {}", where_, never), /*doubt=*/true});
    return out;
  }

  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(where_, first, count, rows_);
    if (external_ || stream_) return flat_rows_.read(first, count, out);
    if (slab_rows_ == 0 && !chunks_) return read_dataset(first, count, out);
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    const std::uint64_t unit = slab_rows_ > 0 ? slab_rows_ : chunk_rows_;
    while (count > 0) {
      std::uint64_t now = 0;
      if (first >= slab_first_ && first - slab_first_ < slab_held_) {
        now = std::min(count, slab_first_ + slab_held_ - first);
        std::memcpy(out, slab_.data() + (first - slab_first_) * row_bytes, now * row_bytes);
      } else if (slab_rows_ == 0 && first % unit == 0 && count >= std::min(unit, rows_ - first)) {
        // Whole chunk rows go where they are wanted.
        now = first + count == rows_ ? count : count / unit * unit;
        read_dataset(first, now, out);
      } else {
        const std::uint64_t begin = slab_rows_ > 0 ? first : first / unit * unit;
        const std::uint64_t held = std::min(unit, rows_ - begin);
        slab_held_ = 0;
        slab_.resize(unit * row_bytes);
        read_dataset(begin, held, slab_.data());
        slab_first_ = begin;
        slab_held_ = held;
      }
      first += now;
      count -= now;
      out += now * row_bytes;
    }
  }

  std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) override {
    if (!stream_) return 0;
    const auto [begin, end] = flat_rows_.bytes_of(first, count);
    return stream_->read_ahead(begin, end, memory);
  }
  bool sparse() const override { return stream_ && stream_->sparse(); }
  std::string how() const override { return stream_ ? stream_->how() : std::string(); }
  Plain plain() override {
    const std::optional<std::uint64_t> begin = stream_ ? flat_rows_.plain_from() : std::nullopt;
    return begin ? Plain{stream_.get(), *begin} : Plain{};
  }

  std::uint64_t block_rows() const override {
    if (external_ || stream_) return flat_rows_.block_rows();
    const std::uint64_t row_bytes = dim_ * item_size(dtype_);
    const std::uint64_t some = std::max<std::uint64_t>(1, 4_MiB / row_bytes);
    if (slab_rows_ > 0 || chunk_rows_ == 0) return some;
    if (chunks_) return chunks_->good_rows();
    // Whole chunk rows, unless they are so large that blocks inside the cached chunk row do as well.
    if (chunk_rows_ > 64_MiB / row_bytes) return std::min(some, chunk_rows_);
    return some <= chunk_rows_ ? chunk_rows_ : some / chunk_rows_ * chunk_rows_;
  }

 private:
  DatasetId open(PropertyId access) const {
    if (!access) access = link_access(H5P_DATASET_ACCESS);
    DatasetId out{H5Dopen2(file_.id(), path_.c_str(), access.id())};
    if (!out) throw_last(location_, fmt::format("cannot open {}", printable(path_)));
    return out;
  }

  // "3 of 12 chunks never written (read as the fill value)", or nothing. Asks the file's index of chunks, all of it.
  std::string never_written() const {
    const Session quiet;
    const SpaceId space{dataset_ ? H5Dget_space(dataset_.id()) : H5I_INVALID_HID};  // 1.10.8 does not take H5S_ALL for it
    if (!space || rows_ == 0) return {};
    if (contiguous_) return H5Dget_storage_size(dataset_.id()) == 0 ? "none of it was ever written (read as the fill value)" : "";
    hsize_t written = 0;
    if (chunk_count_ == 0 || H5Dget_num_chunks(dataset_.id(), space.id(), &written) < 0 || written >= chunk_count_) return {};
    return fmt::format("{} of {} chunks never written (read as the fill value)", chunk_count_ - written, chunk_count_);
  }

  // What stands at `path`, which becomes where that is: external links are followed where they may be, and file_ and location_
  // are then those of the other file.
  ObjectKind look_up(std::string& path) {
    if (!allows_) {
      try {
        return object_at(file_.id(), location_, path);
      } catch (const Error&) {
        if (!external_link_on(file_.id(), path)) throw;
        throw FormatError(location_, fmt::format("{} is an external link to {}; reading other files through it has to be allowed "
                                                 "(allow_external, files below its own folder only; follow_links, any)",
                                                 printable(external_link_on(file_.id(), path)->at),
                                                 printable(external_link_on(file_.id(), path)->file)));
      }
    }
    for (int depth = 0;; ++depth) {
      const std::optional<ExternalLink> link = external_link_on(file_.id(), path);
      if (!link) return object_at(file_.id(), location_, path);
      if (depth == kDeepest)
        throw FormatError(location_, fmt::format("{}: external links lead from file to file more than {} times",
                                                 printable(link->at), kDeepest));
      const std::filesystem::path target = file_below(location_, link->at, link->file, anywhere_);
      file_ = open_for_reading(target);
      location_ = target;
      path = with_slash(link->object);
      if (path.ends_with('/') && !link->rest.empty()) path.pop_back();
      path += link->rest;
    }
  }

  // Sets path_ and field_.
  void find(const std::string& selector, const ReadOptions& options) {
    if (selector.empty()) {
      const std::vector<Found> found = Listing::of(file_.id(), options);
      std::vector<Found> tables;
      const auto take = [&](auto wanted) {
        if (tables.empty())
          std::copy_if(found.begin(), found.end(), std::back_inserter(tables),
                       [&](const Found& one) { return one.numeric && wanted(one); });
      };
      take([](const Found& one) { return one.dimensions == 2; });
      take([](const Found& one) { return one.dimensions > 2; });
      take([&](const Found&) { return found.size() == 1; });
      const auto unreadable = std::find_if(found.begin(), found.end(), [](const Found& one) { return one.unreadable; });
      if (tables.empty() && unreadable != found.end())
        throw FormatError(location_, fmt::format("{} {}", printable(unreadable->path), unreadable->text));
      if (tables.size() == 1) {
        path_ = tables.front().path;
        return;
      }
      if (tables.empty())
        throw NotFound(fmt::format("{}: there is no numeric dataset of two dimensions or more in it; it holds {}",
                                   printable(location_), list_text(found, "")));
      throw InvalidArgument(fmt::format("{}: {} datasets could be meant; name one, as in {}:{}. It holds {}",
                                        printable(location_), tables.size(), printable(location_), printable(tables.front().path),
                                        list_text(tables, "")));
    }
    std::string path = with_slash(selector);
    ObjectKind kind = look_up(path);
    // "/rec:c:d": names of datasets may hold ':' as well, so the longest that is there counts.
    for (std::size_t colon = selector.rfind(':'); kind == ObjectKind::kNone && colon != std::string::npos && colon > 0;
         colon = selector.rfind(':', colon - 1)) {
      std::string before = with_slash(selector.substr(0, colon));
      kind = look_up(before);
      if (kind == ObjectKind::kNone) continue;
      path = before;
      field_ = selector.substr(colon + 1);
    }
    path_ = path;
    if (kind == ObjectKind::kDataset) return;
    const std::string_view what = kind == ObjectKind::kNone    ? "there is nothing at"
                                  : kind == ObjectKind::kGroup ? "there is a group, no dataset, at"
                                                               : "there is no dataset at";
    throw NotFound(fmt::format("{}: {} {}; it holds {}", printable(location_), what, printable(path),
                               list_text(Listing::of(file_.id(), options), path)));
  }

  // Sets element_, type_ in the file, memory_type_, record_bytes_, field_offset_ and the dimensions inside an element.
  void take_type(const ReadOptions& options) {
    ElementType type = describe_type(type_.id());
    record_bytes_ = H5Tget_size(type_.id());
    if (type.compound) {
      if (field_.empty())
        throw DTypeError(fmt::format("{} holds records {}: name the field to read, as in {}:FIELD", where_, type.text, where_));
      take_field(type_.id(), field_, type);
    } else {
      if (!field_.empty())
        throw NotFound(fmt::format("{}:{}: there is no field '{}', it holds {}", printable(location_), printable(path_),
                                   printable(field_), type.text));
      // The memory type is the file's own: the library moves bytes and converts no value.
      memory_type_ = TypeId{H5Tcopy(type_.id())};
    }
    type_text_ = type.text;
    inner_ = type.array;
    if (options.integers && type.integer) {
      *options.integers = {true, type.is_signed, false};
      element_ = *type.integer;
    } else if (type.element) {
      element_ = *type.element;
      if (options.integers) options.integers->boolean = element_.boolean;
      check_requested_dtype(where_, element_.dtype, options.dtype);
    } else if (type.two_bytes && options.dtype == DType::kBFloat16) {
      element_ = ElementFormat{DType::kBFloat16, false, false};
    } else if (type.two_bytes) {
      throw DTypeError(fmt::format("{} holds {}: bytes of unknown meaning; if they are bfloat16, say so with dtype bfloat16",
                                   where_, type.text));
    } else {
      throw DTypeError(fmt::format("{} holds {}, which a table cannot; it holds {}", where_, type.text, table_dtypes()));
    }
  }

  // Sets memory_type_, field_offset_ and `type` to those of the field that `name` names in records: "c", or "c:d" where c is
  // records itself. Names may hold ':', so the longest that is there counts.
  void take_field(hid_t records, std::string_view name, ElementType& type) {
    std::string first(name);
    int index = H5Tget_member_index(records, first.c_str());
    for (std::size_t colon = name.rfind(':'); index < 0 && colon != std::string_view::npos && colon > 0;
         colon = name.rfind(':', colon - 1)) {
      first = name.substr(0, colon);
      index = H5Tget_member_index(records, first.c_str());
    }
    if (index < 0)
      throw NotFound(fmt::format("{}:{}: there is no field '{}' in its records {}", printable(location_), printable(path_),
                                 printable(name), describe_type(records).text));
    const TypeId member{H5Tget_member_type(records, static_cast<unsigned>(index))};
    if (!member) throw_last(location_, fmt::format("cannot read the type of {}", printable(path_)));
    field_offset_ += H5Tget_member_offset(records, static_cast<unsigned>(index));
    type = describe_type(member.id());
    const std::string_view rest = name.substr(std::min(name.size(), first.size() + 1));
    if (type.compound && rest.empty())
      throw DTypeError(fmt::format("{} holds records {}, which a table cannot: name a field of them, as in {}:FIELD", where_,
                                   type.text, where_));
    if (!type.compound && !rest.empty())
      throw NotFound(fmt::format("{}:{}: there is no field '{}' in '{}', it holds {}", printable(location_), printable(path_),
                                 printable(rest), printable(first), type.text));
    if (type.compound)
      take_field(member.id(), rest, type);
    else
      memory_type_ = TypeId{H5Tcopy(member.id())};
    // From the inside out: the library finds fields by their names.
    TypeId around{memory_type_ ? H5Tcreate(H5T_COMPOUND, H5Tget_size(memory_type_.id())) : H5I_INVALID_HID};
    if (!around || H5Tinsert(around.id(), first.c_str(), 0, memory_type_.id()) < 0)
      throw_last(location_, fmt::format("cannot read the type of {}", printable(path_)));
    memory_type_ = std::move(around);
  }

  std::uint64_t field_bytes() const {
    std::uint64_t out = item_size(dtype_);
    for (const std::uint64_t extent : inner_) out = checked_mul(out, extent, where_);
    return out;
  }

  // What of a damaged header can be seen before the library acts on it.
  void check_storage(hid_t dataset, hid_t creation, std::uint64_t declared) const {
    if (field_offset_ > record_bytes_ || field_bytes() > record_bytes_ - field_offset_)
      throw FormatError(location_, fmt::format("{} is damaged: a field of {} bytes at byte {} of records of {}", printable(path_),
                                               field_bytes(), field_offset_, record_bytes_));
    if (H5Pget_layout(creation) != H5D_COMPACT) return;
    const std::uint64_t stored = H5Dget_storage_size(dataset), size = File::open(location_, File::Mode::kRead).size();
    if (stored != declared || stored > size)
      throw FormatError(location_, fmt::format("{} is damaged: {} bytes are stored in its header for shape {}, which takes {}",
                                               printable(path_), stored, shape_to_text(shape_), declared));
  }

  // Rows that lie in one piece are read past the library. False where they do not, or were never written.
  bool open_contiguous(hid_t dataset, hid_t creation, std::uint64_t declared) {
    if (H5Pget_layout(creation) != H5D_CONTIGUOUS || declared == 0) return false;
    const haddr_t begin = H5Dget_offset(dataset);
    if (begin == HADDR_UNDEF) return false;
    auto stream = std::make_unique<StreamedFile>(File::open(location_, File::Mode::kRead));
    const std::uint64_t size = stream->file().size();
    if (begin > size || declared > size - begin)
      throw FormatError(location_, fmt::format("truncated: {} has {} bytes from byte {} on, the file has {}", printable(path_),
                                               declared, begin, size));
    flat_rows_ = StridedRows([file = stream.get()](std::uint64_t offset, std::span<std::byte> out) { file->read(offset, out); },
                             flat_layout(begin));
    stream_ = std::move(stream);
    return true;
  }

  // Of elements that lie one behind the other from byte `begin` on.
  StridedLayout flat_layout(std::uint64_t begin) const {
    std::vector<std::uint64_t> strides = dense_strides(extent_, record_bytes_, /*fortran_order=*/false);
    const std::vector<std::uint64_t> inside = dense_strides(inner_, item_size(dtype_), /*fortran_order=*/false);
    strides.insert(strides.end(), inside.begin(), inside.end());
    return strided_layout(shape_, strides, begin + field_offset_, element_);
  }

  void take_shape(hid_t space) {
    switch (H5Sget_simple_extent_type(space)) {
      case H5S_NULL:
        throw FormatError(
            location_, fmt::format("{} has no data at all (a null dataspace); a table needs two dimensions", printable(path_)));
      case H5S_SCALAR:
        throw FormatError(location_, fmt::format("{} is one value (shape {}); a table needs two dimensions", printable(path_),
                                                 shape_to_text(inner_)));
      default: break;
    }
    extent_ = extent_of(space);
    shape_ = extent_;
    shape_.insert(shape_.end(), inner_.begin(), inner_.end());
    const auto [rows, dim] = table_shape(location_, fmt::format("{} has ", printable(path_)), shape_);
    rows_ = rows;
    dim_ = dim;
    if (field_.empty() || shape_.size() > 1) remark_on_shape(remarks_, where_, shape_);
  }

  std::string layout_text(hid_t creation) {
    std::string out;
    switch (H5Pget_layout(creation)) {
      case H5D_COMPACT: out = "compact"; break;
      case H5D_CONTIGUOUS: out = H5Pget_external_count(creation) > 0 ? "in external files" : "contiguous"; break;
      case H5D_CHUNKED: {
        std::array<hsize_t, H5S_MAX_RANK> dims{};
        const int rank = H5Pget_chunk(creation, H5S_MAX_RANK, dims.data());
        const std::vector<std::uint64_t> chunk(dims.begin(), dims.begin() + std::max(0, rank));
        out = fmt::format("chunked {}", shape_to_text(chunk));
        break;
      }
      case H5D_VIRTUAL: out = "virtual"; break;
      default: out = "unknown layout"; break;
    }
    for (const Hdf5Filter& filter : filters_of(creation)) {
      out += fmt::format(", {}", filter.name);
      if (filter.lossy && is_floating(dtype_)) {
        out += " (lossy, and NaN is not kept)";
        remarks_.push_back({fmt::format("{} went through a lossy filter, {}: values are not those that were written, and NaN is "
                                        "not kept",
                                        where_, filter.name),
                            /*doubt=*/true});
      }
      if (!filter.available) out += fmt::format(" (filter {}, not available here)", filter.id);
    }
    return out;
  }

  void check_filters(hid_t dataset, hid_t creation) const {
    const std::vector<Hdf5Filter> filters = filters_of(creation);
    for (std::size_t i = 0; i < filters.size(); ++i) {
      if (filters[i].available) continue;
      // A filter that may be left out was perhaps left out: the first chunk tells. A later chunk that did use it fails when read.
      unsigned skipped = 0;
      haddr_t address = HADDR_UNDEF;
      hsize_t bytes = 0;
      const std::array<hsize_t, H5S_MAX_RANK> origin{};
      const bool known =
          filters[i].optional && rows_ > 0 && H5Dget_chunk_info_by_coord(dataset, origin.data(), &skipped, &address, &bytes) >= 0;
      if (filters[i].optional && (!known || address == HADDR_UNDEF || (skipped >> i & 1) != 0)) continue;
      std::string all;
      for (const Hdf5Filter& filter : filters) all += fmt::format("{}{} {}", all.empty() ? "" : ", ", filter.id, filter.name);
      throw FormatError(location_, fmt::format("{} needs filter {} ({}), which is not available here (its filters: {})",
                                               printable(path_), filters[i].id, filters[i].name, all));
    }
  }

  void open_external(hid_t creation) {
    std::uint64_t bytes = record_bytes_;
    for (const std::uint64_t extent : extent_) bytes = checked_mul(bytes, extent, where_);
    external_ = std::make_unique<ExternalFiles>(creation, location_, path_, bytes, anywhere_);
    flat_rows_ = StridedRows(
        [files = external_.get()](std::uint64_t offset, std::span<std::byte> out) { files->read(offset, out); }, flat_layout(0));
  }

  // Decides what is cached between reads, see kChunkRowLimit.
  void plan_chunks(hid_t creation, hid_t space, hid_t access) {
    if (H5Pget_layout(creation) != H5D_CHUNKED) return;
    std::array<hsize_t, H5S_MAX_RANK> largest{};
    if (H5Sget_simple_extent_dims(space, nullptr, largest.data()) != static_cast<int>(extent_.size()))
      throw_last(location_, fmt::format("cannot read the shape of {}", printable(path_)));
    layout_ = chunk_layout(creation, extent_, {largest.begin(), largest.begin() + static_cast<std::ptrdiff_t>(extent_.size())},
                           record_bytes_, location_, path_);
    chunk_rows_ = layout_->chunk[0];
    const std::uint64_t chunks_a_row = layout_->chunks_a_row, chunk_bytes = layout_->chunk_bytes;
    chunk_count_ = checked_mul(ceil_div(rows_, chunk_rows_), chunks_a_row, where_);
    const bool filtered = H5Pget_nfilters(creation) > 0;
    const auto cache = [&](std::uint64_t bytes) {
      // Ten slots a chunk that is to stay, so that two chunks seldom want the same one.
      const std::uint64_t slots =
          bytes == 0 ? 0 : std::min<std::uint64_t>(std::max<std::uint64_t>(521, chunks_a_row * 10 + 1), 1000003);
      H5Pset_chunk_cache(access, slots, bytes, /*w0=*/1.0);
    };
    if (!filtered) {
      // Rows of an unfiltered chunk are read from where they lie; what is cached has as many bytes as the file says, not as a
      // chunk has.
      cache(0);
      if (chunks_a_row > 1 && chunk_bytes > kChunkRowLimit / chunks_a_row) slab_rows_ = rows_in_a_slab();
    } else if (chunks_a_row == 1) {
      cache(chunk_bytes);
    } else if (chunk_bytes <= kChunkRowLimit / chunks_a_row) {
      cache(chunk_bytes * chunks_a_row);
    } else {
      cache(0);
      slab_rows_ = rows_in_a_slab();
    }
  }
  std::uint64_t rows_in_a_slab() const {
    return std::min(rows_, std::max<std::uint64_t>(1, kChunkRowLimit / (dim_ * item_size(dtype_))));
  }

  void read_dataset(std::uint64_t first, std::uint64_t count, std::byte* out) {
    if (count == 0) return;
    const std::uint64_t elements = count * dim_;
    if (chunks_) {  // not inside of a Session: its threads need their own
      chunks_->read(first, count, out);
      return decode_elements(element_, out, elements);
    }
    const Session quiet;
    if (layout_) check_szip_chunks(*layout_, dataset_.id(), first, count, location_, path_);
    if (clear_first_) std::memset(out, 0, elements * item_size(dtype_));
    std::vector<hsize_t> start(extent_.size(), 0), block(extent_.begin(), extent_.end());
    start[0] = first;
    block[0] = count;
    const SpaceId memory{H5Screate_simple(static_cast<int>(block.size()), block.data(), nullptr)};
    const SpaceId space{H5Dget_space(dataset_.id())};
    if (!memory || !space || H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, block.data(), nullptr) < 0 ||
        H5Dread(dataset_.id(), memory_type_.id(), memory.id(), space.id(), H5P_DEFAULT, out) < 0)
      throw_last(location_, fmt::format("cannot read rows [{}, +{}) of {}", first, count, printable(path_)));
    decode_elements(element_, out, elements);
  }

  std::filesystem::path location_;
  std::string path_, field_;
  std::string where_, type_text_, layout_text_;
  FileId file_;
  DatasetId dataset_;
  TypeId type_, memory_type_;
  ElementFormat element_;
  std::uint64_t record_bytes_ = 0, field_offset_ = 0;
  std::vector<std::uint64_t> inner_;   // dimensions of an array-typed element
  std::vector<std::uint64_t> extent_;  // of the dataspace
  std::vector<std::uint64_t> shape_;   // both
  std::uint64_t chunk_rows_ = 0, chunk_count_ = 0;
  bool clear_first_ = false;
  bool contiguous_ = false;
  bool allows_ = false, anywhere_ = false;  // other files below the folder; wherever they are
  std::unique_ptr<ExternalFiles> external_;
  std::unique_ptr<StreamedFile> stream_;  // of rows in one piece
  StridedRows flat_rows_;                 // out of either
  std::optional<ChunkLayout> layout_;     // until chunks_ has it
  std::unique_ptr<ChunkReader> chunks_;   // of chunks whose filters are all known
  std::uint64_t slab_rows_ = 0, slab_first_ = 0, slab_held_ = 0;
  std::vector<std::byte> slab_;
};

}  // namespace

Fit fit_hdf5(const File& file, std::span<const std::byte>) { return has_signature(file) ? Fit::kCertain : Fit::kNo; }

std::vector<Entry> list_hdf5(const std::filesystem::path& path) {
  std::vector<Entry> out;
  for (const Hdf5Dataset& dataset : describe_hdf5(path).datasets) {
    Entry entry;
    entry.name = dataset.path;
    entry.shape = dataset.shape;
    entry.dtype = dataset.dtype;
    entry.bytes = dataset.bytes;
    entry.layout = dataset.space == Hdf5Dataset::Space::kNull ? "no data" : dataset.layout;
    entry.attributes = dataset.attributes;
    if (!dataset.chunk.empty()) entry.layout += fmt::format(" {}", shape_to_text(dataset.chunk));
    for (const Hdf5Filter& filter : dataset.filters) entry.layout += fmt::format(", {}", filter.name);
    out.push_back(std::move(entry));
  }
  return out;
}

std::unique_ptr<RowReader> open_hdf5_rows(const Location& location, const ReadOptions& options) {
  return std::make_unique<Hdf5RowReader>(location, options);
}

}  // namespace embermap
