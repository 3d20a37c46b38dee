// HDF5 files. The library is not made for damaged metadata, so an input describes a file that the library makes here: 1 byte for
// the selector and how it is read, 1 for the type of an element, 1 for the number of dimensions, 2 for each (extent and chunk), 1
// for the layout, 2 for the filters, 1 for the fill value, 1 for the place in the file, 1 for attributes; and then, chunk by
// chunk, what is put there: 1 byte for how, and for raw bytes 1 for the filters skipped, 2 for how many, and the bytes. What is
// whole must be read as it was written, and what is damaged in any pieces as the same, or refused.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "io/describe_hdf5.hpp"
#include "io/hdf5.hpp"
#include "io/hdf5_chunks.hpp"
#include "io/rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

using namespace hdf5;
using Bytes = std::vector<std::byte>;

constexpr H5Z_filter_t kLzf = 32000;
enum class Layout { kContiguous, kCompact, kChunked, kExternal, kVirtual };

struct Element {
  TypeId type;               // in the file
  std::uint64_t bytes = 0;   // of it
  std::uint64_t offset = 0;  // of the field that is read
  std::uint64_t values = 1;  // in the field
  DType dtype{};             // of these
  bool swap = false, bits = false, two_bytes = false;
  std::string field;
};

TypeId little_compound(Element& out) {
  const std::array<hsize_t, 1> three{3};
  const TypeId array{H5Tarray_create2(H5T_IEEE_F32LE, 1, three.data())};
  TypeId record{H5Tcreate(H5T_COMPOUND, 18)};
  H5Tinsert(record.id(), "a:b", 0, H5T_STD_I16LE);
  H5Tinsert(record.id(), "v", 2, array.id());
  H5Tinsert(record.id(), "a", 14, H5T_STD_I32BE);
  out.bytes = 18;
  return record;
}

Element element_of(std::uint64_t kind) {
  Element out;
  const auto plain = [&](hid_t type, DType dtype, bool swap) {
    out.type = TypeId{H5Tcopy(type)};
    out.dtype = dtype;
    out.swap = swap;
    out.bytes = item_size(dtype);
  };
  switch (kind % 12) {
    case 1: plain(H5T_IEEE_F64BE, DType::kFloat64, true); break;
    case 2: plain(H5T_STD_U8LE, DType::kUInt8, false); break;
    case 3: plain(H5T_STD_I64BE, DType::kInt64, true); break;
    case 4: plain(H5T_STD_I32LE, DType::kInt32, false); break;
    case 5:
    case 6:
      out.type = file_type(kind % 12 == 5 ? DType::kFloat16 : DType::kBFloat16);
      out.dtype = kind % 12 == 5 ? DType::kFloat16 : DType::kBFloat16;
      out.bytes = 2;
      break;
    case 7:
    case 8:
      out.type = little_compound(out);
      out.field = kind % 12 == 7 ? "v" : "a";
      out.offset = kind % 12 == 7 ? 2 : 14;
      out.values = kind % 12 == 7 ? 3 : 1;
      out.dtype = kind % 12 == 7 ? DType::kFloat32 : DType::kInt32;
      out.swap = kind % 12 == 8;
      break;
    case 9: {  // h5py's bool
      out.type = TypeId{H5Tenum_create(H5T_STD_I8LE)};
      const std::array<signed char, 2> values{0, 1};
      H5Tenum_insert(out.type.id(), "FALSE", values.data());
      H5Tenum_insert(out.type.id(), "TRUE", &values[1]);
      out.dtype = DType::kUInt8;
      out.bits = true;
      out.bytes = 1;
      break;
    }
    case 10:
      out.type = TypeId{H5Tcreate(H5T_OPAQUE, 2)};
      H5Tset_tag(out.type.id(), kind >= 128 ? "bfloat16" : "other");
      out.two_bytes = kind < 128;
      out.dtype = DType::kBFloat16;
      out.bytes = 2;
      break;
    case 11: {
      const std::array<hsize_t, 2> shape{2, 2};
      out.type = TypeId{H5Tarray_create2(H5T_STD_I8LE, 2, shape.data())};
      out.dtype = DType::kInt8;
      out.values = out.bytes = 4;
      break;
    }
    default: plain(H5T_IEEE_F32LE, DType::kFloat32, false); break;
  }
  return out;
}

// What a reader has to give of `count` elements.
Bytes as_read(const Element& element, const Bytes& stored, std::uint64_t count) {
  Bytes out;
  const std::uint64_t item = item_size(element.dtype);
  for (std::uint64_t i = 0; i < count * element.values; ++i) {
    const auto* const from = stored.data() + i / element.values * element.bytes + element.offset + i % element.values * item;
    Bytes one(from, from + item);
    if (element.swap) std::reverse(one.begin(), one.end());
    if (element.bits) one[0] = one[0] == std::byte{0} ? std::byte{0} : std::byte{1};
    out.insert(out.end(), one.begin(), one.end());
  }
  return out;
}

// As a program without a compressor would write it: 32 bytes at a time as they are.
Bytes plain_lzf(const Bytes& data) {
  Bytes out;
  for (std::size_t at = 0; at < data.size(); at += 32) {
    const std::size_t some = std::min<std::size_t>(32, data.size() - at);
    out.push_back(static_cast<std::byte>(some - 1));
    out.insert(out.end(), data.begin() + static_cast<std::ptrdiff_t>(at), data.begin() + static_cast<std::ptrdiff_t>(at + some));
  }
  return out;
}

struct Made {
  Element element;
  std::vector<hsize_t> extent, chunk;
  Layout layout = Layout::kContiguous;
  std::vector<std::uint64_t> filters;  // see set_filters
  bool ours = true;                    // all filters are
  bool lossless = true, whole = true;  // whole: nothing is damaged
  std::string group, path;
  Bytes stored;  // elements in their order
};

// A filter that can write LZF too, unlike ours, which is registered again by who reads.
class LzfForWriting {
 public:
  LzfForWriting() {
    H5Zunregister(kLzf);
    static const H5Z_class2_t filter{H5Z_CLASS_T_VERS, kLzf, 1, 1, "lzf", nullptr, nullptr, &pack};
    require(H5Zregister(&filter) >= 0, "no filter can be registered");
  }
  ~LzfForWriting() { require(H5Zunregister(kLzf) >= 0, "a filter that is still in use"); }
  LzfForWriting(const LzfForWriting&) = delete;
  LzfForWriting& operator=(const LzfForWriting&) = delete;

 private:
  static std::size_t pack(unsigned flags, std::size_t, const unsigned*, std::size_t bytes, std::size_t* capacity, void** buffer) {
    if ((flags & H5Z_FLAG_REVERSE) != 0) return 0;
    const auto* const in = static_cast<const std::byte*>(*buffer);
    const Bytes packed = plain_lzf(Bytes(in, in + bytes));
    void* const out = H5allocate_memory(packed.size(), false);
    std::memcpy(out, packed.data(), packed.size());
    H5free_memory(*buffer);
    *buffer = out;
    *capacity = packed.size();
    return packed.size();
  }
};

// Up to four filters. Those that the library applies alone are never given damaged bytes: they believe them.
void set_filters(hid_t creation, std::uint64_t filters, Made& made) {
  const H5T_class_t type = H5Tget_class(made.element.type.id());
  for (std::uint64_t rest = filters & 4095U; rest > 0; rest /= 8) {
    const std::uint64_t filter = rest % 8;
    herr_t set = -1;
    if (filter == 1) set = H5Pset_deflate(creation, static_cast<unsigned>(filters / 8 % 10));
    // The library completes the parameters of one of a kind only.
    const bool once = std::count(made.filters.begin(), made.filters.end(), filter) == 0;
    if (filter == 2 && once) set = H5Pset_shuffle(creation);
    if (filter == 3) set = H5Pset_fletcher32(creation);
    if (filter == 4) set = H5Pset_filter(creation, kLzf, H5Z_FLAG_OPTIONAL, 0, nullptr);
    if (filter == 5 && once && type == H5T_INTEGER) set = H5Pset_szip(creation, H5_SZIP_NN_OPTION_MASK, 8);
    const bool first = made.filters.empty();  // these pack the elements of a chunk, whatever was made of it before
    if (filter == 6 && first && type == H5T_INTEGER) set = H5Pset_nbit(creation);
    if (filter == 7 && first && type == H5T_INTEGER) set = H5Pset_scaleoffset(creation, H5Z_SO_INT, H5Z_SO_INT_MINBITS_DEFAULT);
    if (set < 0) continue;  // one that this library has not
    made.filters.push_back(filter);
    made.ours = made.ours && filter < 5;
  }
}

Bytes pattern(std::uint64_t bytes, std::uint64_t seed) {
  Bytes out(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>((i * 7 + seed + i / 64) & 0xFF);
  return out;
}

std::uint64_t count_of(const std::vector<hsize_t>& shape) {
  std::uint64_t out = 1;
  for (const hsize_t extent : shape) out *= extent;
  return out;
}

// The elements of one chunk out of `stored`; what lies outside of the dataset is zero.
template <class Each>
void each_of_chunk(const Made& made, const std::vector<hsize_t>& origin, Each each) {
  std::vector<hsize_t> index(origin.size(), 0);
  const std::uint64_t elements = count_of(made.chunk);
  for (std::uint64_t i = 0; i < elements; ++i) {
    std::uint64_t rest = i, place = 0;
    bool inside = true;
    for (std::size_t d = origin.size(); d-- > 0;) {
      index[d] = origin[d] + rest % made.chunk[d];
      rest /= made.chunk[d];
      inside = inside && index[d] < made.extent[d];
    }
    for (std::size_t d = 0; d < origin.size(); ++d) place = place * made.extent[d] + index[d];
    if (inside) each(i, place);
  }
}

// Puts one chunk there as bytes. With `known`, those that the filters would make of it.
void put_chunk(hid_t dataset, Made& made, const std::vector<hsize_t>& origin, Taker& taker) {
  const std::uint64_t how = taker.number(1) % 8;
  const std::uint64_t bytes = count_of(made.chunk) * made.element.bytes;
  if (how < 3 || !made.ours) return;  // as it was written; or never
  if (how == 3) {                     // as another writer would have it: packed by us, checksums too
    Bytes data(bytes);
    each_of_chunk(made, origin, [&](std::uint64_t from, std::uint64_t to) {
      std::memcpy(data.data() + from * made.element.bytes, made.stored.data() + to * made.element.bytes, made.element.bytes);
    });
    for (const std::uint64_t filter : made.filters) {
      ChunkLayout layout;
      layout.chunk_bytes = bytes;
      ChunkScratch scratch;
      layout.filters = {{ChunkLayout::Filter::Kind::kShuffle, static_cast<unsigned>(made.element.bytes)}};
      if (filter == 1) layout.filters[0] = {ChunkLayout::Filter::Kind::kDeflate, 1};
      unsigned skipped = 0;
      if (filter <= 2) skipped = pack_chunk(layout, data, scratch);
      if (skipped != 0) return;  // nothing became smaller: the mask is another one
      if (filter == 4) data = plain_lzf(data);
      if (filter == 3)
        for (unsigned b = 0, sum = fletcher32(data); b < 4; ++b) data.push_back(static_cast<std::byte>(sum >> (8 * b)));
    }
    if (H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, origin.data(), data.size(), data.data()) < 0) made.whole = false;
    return;
  }
  const auto skipped = static_cast<std::uint32_t>(taker.number(1));
  const auto raw = taker.piece(1 + taker.number(2) % 2048);
  if (raw.empty()) return;
  made.whole = false;
  H5Dwrite_chunk(dataset, H5P_DEFAULT, skipped, origin.data(), raw.size(), raw.data());
}

void make_attributes(hid_t dataset, std::uint64_t kinds) {
  const SpaceId one{H5Screate(H5S_SCALAR)};
  const std::array<hsize_t, 1> three{3};
  const SpaceId several{H5Screate_simple(1, three.data(), nullptr)};
  const TypeId text{H5Tcopy(H5T_C_S1)}, any{H5Tcopy(H5T_C_S1)};
  H5Tset_size(text.id(), 7);
  H5Tset_size(any.id(), H5T_VARIABLE);
  struct One {
    const char* name;
    hid_t type, space;
  };
  const std::array all{One{"text", text.id(), one.id()},       One{"any", any.id(), one.id()},
                       One{"number", H5T_STD_I16BE, one.id()}, One{"large", H5T_STD_U64LE, one.id()},
                       One{"real", H5T_IEEE_F32BE, one.id()},  One{"list", H5T_STD_I8LE, several.id()}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    if ((kinds >> i & 1U) == 0) continue;
    const AttributeId attribute{H5Acreate2(dataset, all[i].name, all[i].type, all[i].space, H5P_DEFAULT, H5P_DEFAULT)};
    const std::array<std::uint64_t, 4> value{0x2D2D2D2D2D2D2D2DU, kinds, kinds, kinds};
    const std::array<const char*, 1> pointer{"word"};
    const void* const data = i == 1 ? static_cast<const void*>(pointer.data()) : value.data();
    H5Awrite(attribute.id(), all[i].type, data);
  }
}

Made make(Taker& taker, const std::filesystem::path& file) {
  const Session quiet;
  const LzfForWriting lzf;
  Made made;
  made.element = element_of(taker.number(1));
  const std::uint64_t rank = 1 + taker.number(1) % 3;
  bool chunks = true;
  std::vector<hsize_t> largest;
  for (std::uint64_t i = 0; i < rank; ++i) {
    const std::uint64_t extent = taker.number(1), chunk = taker.number(1);
    made.extent.push_back(extent % 24);
    largest.push_back(extent >= 200 ? H5S_UNLIMITED : extent % 24);
    made.chunk.push_back(1 + chunk % (extent >= 200 ? 32 : std::max<std::uint64_t>(1, extent % 24)));
    chunks = chunks && (largest.back() > 0);
  }
  made.layout = static_cast<Layout>(taker.number(1) % 5);
  if (made.layout != Layout::kChunked) largest = made.extent;
  const std::uint64_t filters = taker.number(2), fill = taker.number(1), place = taker.number(1);
  const std::uint64_t attributes = taker.number(1);
  made.group = std::array{"/", "/a:v/b/", "/data.h5:", "/é/"}[place % 4];
  made.path = made.group + std::array{"v", "x:v", "d.h5", "weight"}[place / 4 % 4];

  const FileId out{H5Fcreate(file.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, place >= 128 ? writing_access().id() : H5P_DEFAULT)};
  require(static_cast<bool>(out), "the library makes no file");
  const PropertyId creation{H5Pcreate(H5P_DATASET_CREATE)}, links{H5Pcreate(H5P_LINK_CREATE)};
  H5Pset_create_intermediate_group(links.id(), 1);
  const std::uint64_t bytes = count_of(made.extent) * made.element.bytes;
  const SpaceId space{H5Screate_simple(static_cast<int>(rank), made.extent.data(), largest.data())};
  made.stored = pattern(bytes, filters);
  if (made.element.bits)
    for (std::byte& b : made.stored) b &= std::byte{1};
  bool written = fill % 4 != 3;
  if (fill % 4 == 1) H5Pset_fill_value(creation.id(), made.element.type.id(), pattern(made.element.bytes, 0).data());
  if (fill % 4 == 2) H5Pset_fill_time(creation.id(), H5D_FILL_TIME_NEVER);
  switch (made.layout) {
    case Layout::kContiguous: break;
    case Layout::kCompact: H5Pset_layout(creation.id(), H5D_COMPACT); break;
    case Layout::kChunked:
      H5Pset_chunk(creation.id(), static_cast<int>(rank), made.chunk.data());
      set_filters(creation.id(), filters, made);
      break;
    case Layout::kExternal: {
      const std::uint64_t missing = fill % 8 == 7 ? 1 : 0;
      Bytes raw(3);
      raw.insert(raw.end(), made.stored.begin(), made.stored.end());
      if (missing > 0 && bytes > 0) raw.pop_back(), made.whole = false;
      folder().make("raw", raw);
      H5Pset_external(creation.id(), "raw", 3, std::max<std::uint64_t>(1, bytes));
      written = false;
      break;
    }
    case Layout::kVirtual: {
      const DatasetId source{
          H5Dcreate2(out.id(), "source", made.element.type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)};
      if (bytes > 0 && H5Dwrite(source.id(), made.element.type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, made.stored.data()) < 0)
        made.whole = false;
      H5Pset_virtual(creation.id(), space.id(), ".", fill % 8 == 7 ? "/gone" : "/source", space.id());
      written = false;
      break;
    }
  }
  const DatasetId dataset{
      H5Dcreate2(out.id(), made.path.c_str(), made.element.type.id(), space.id(), links.id(), creation.id(), H5P_DEFAULT)};
  if (!dataset) throw InvalidArgument("the library does not make it");  // too large for a header, chunks past the extent
  make_attributes(dataset.id(), attributes);
  if (attributes >= 64) H5Lcreate_soft(made.path.c_str(), out.id(), "soft", H5P_DEFAULT, H5P_DEFAULT);
  if (attributes >= 192) H5Lcreate_external("other.h5", "/x", out.id(), "elsewhere", H5P_DEFAULT, H5P_DEFAULT);
  if (written && bytes > 0 &&
      H5Dwrite(dataset.id(), made.element.type.id(), H5S_ALL, H5S_ALL, H5P_DEFAULT, made.stored.data()) < 0)
    throw InvalidArgument("the library does not write it");
  // What was never written is the fill value.
  const bool never = !written && made.layout != Layout::kExternal && made.layout != Layout::kVirtual;
  if (never) {
    Bytes value(made.element.bytes);
    if (fill % 4 == 1) value = pattern(made.element.bytes, 0);
    for (std::uint64_t i = 0; i < bytes; ++i) made.stored[i] = value[i % made.element.bytes];
  }
  if (made.layout == Layout::kVirtual && fill % 8 == 7) made.whole = false;
  if (made.layout != Layout::kChunked || bytes == 0) return made;
  std::vector<hsize_t> origin(rank, 0);
  for (int chunk = 0; chunk < 64 && !taker.empty(); ++chunk) {
    put_chunk(dataset.id(), made, origin, taker);
    std::size_t d = rank;
    while (d > 0) {
      --d;
      origin[d] += made.chunk[d];
      if (origin[d] < made.extent[d]) break;
      origin[d] = 0;
      if (d == 0) return made;
    }
  }
  return made;
}

// Rows by so many at a time, from wherever, or nothing where they are refused.
std::optional<Bytes> read(const Location& location, const ReadOptions& options, std::uint64_t step) {
  try {
    const auto reader = open_rows(location, options);
    require(reader->dim() > 0 && reader->block_rows() > 0, "rows without columns");
    const std::uint64_t row = reader->dim() * item_size(reader->dtype());
    Bytes out(reader->rows() * row);
    for (std::uint64_t at = 0; at < reader->rows(); at += step)
      reader->read(at, std::min(step, reader->rows() - at), out.data() + at * row);
    require(!reader->description().empty(), "no description");
    for (const Remark& remark : reader->remarks()) require(!remark.text.empty(), "a remark without words");
    return out;
  } catch (const FormatError&) {
    return std::nullopt;
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::uint64_t selector = taker.number(1);
  const std::filesystem::path file = folder().path() / "x.h5";
  const Made made = make(taker, file);
  ReadOptions options;
  options.allow_external = made.layout == Layout::kExternal || made.layout == Layout::kVirtual;
  options.threads = 1 + static_cast<unsigned>(selector >> 6 & 1U);
  if (made.element.two_bytes && (selector & 32U) != 0) options.dtype = DType::kBFloat16;

  const Hdf5Contents contents = describe_hdf5(file);
  const auto found = std::find_if(contents.datasets.begin(), contents.datasets.end(),
                                  [&](const Hdf5Dataset& dataset) { return dataset.path == made.path; });
  require(found != contents.datasets.end(), "a dataset that is not listed");
  require(found->shape.size() == made.extent.size() && std::equal(found->shape.begin(), found->shape.end(), made.extent.begin()),
          "another shape");
  require(list_entries(file, Location::Format::kHdf5).size() == contents.datasets.size(), "other entries than datasets");

  Location location{file, "", Location::Format::kHdf5};
  if (selector % 4 == 1) location.selector = made.path + (made.element.field.empty() ? "" : ":" + made.element.field);
  if (selector % 4 == 2) location.selector = made.path.substr(1) + ":no:such";
  if (selector % 4 == 3) location.selector = "soft";
  const auto all = read(location, options, 1U << 20);
  const auto single = read(location, options, 1);
  const auto some = read(location, options, 5);
  require(all == single && all == some, "rows that depend on how many are read at a time");
  if (!made.whole || selector % 4 != 1 || (made.element.two_bytes && !options.dtype)) return;
  bool columns = true;
  for (std::size_t i = 1; i < made.extent.size(); ++i) columns = columns && made.extent[i] > 0;
  if (!columns) return;  // no table
  require(all.has_value(), "a whole file that is refused");
  require(*all == as_read(made.element, made.stored, count_of(made.extent)), "other rows than were written");
}

}  // namespace embermap::fuzz
