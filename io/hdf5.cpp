#include "io/hdf5.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <new>

#include "base/error.hpp"

namespace embermap::hdf5 {
namespace {

// A fork waits until no other thread is inside the library, or a child would wait for that thread, which it does not have, for
// ever.
std::recursive_mutex& library_mutex() {
  static std::recursive_mutex* const instance = [] {
    alignas(std::recursive_mutex) static std::byte storage[sizeof(std::recursive_mutex)];
    static std::recursive_mutex* const mutex = new (storage) std::recursive_mutex;
    ::pthread_atfork(
        [] { mutex->lock(); }, [] { mutex->unlock(); },
        [] { new (mutex) std::recursive_mutex; });  // its owner is a number that the child's only thread does not have
    return mutex;
  }();
  return *instance;
}

// The number after `key` in `text`.
std::optional<std::uint64_t> number_after(std::string_view text, std::string_view key) {
  const std::size_t at = text.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  std::uint64_t out = 0;
  const char* const begin = text.data() + at + key.size();
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), out);
  return error == std::errc{} && end != begin ? std::optional(out) : std::nullopt;
}

void set_locking(const PropertyId& access, bool lock) {
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  H5Pset_file_locking(access.id(), lock, /*ignore_when_disabled=*/true);
#else
  (void)access, (void)lock;  // this library is led by the environment alone
#endif
}

// Whether the file system can lock a file at all. Asked before the library tries: a file whose lock failed stays half open in it.
bool has_locks(const std::filesystem::path& path) {
  const File file = File::open(path, File::Mode::kRead);
  if (::flock(file.fd(), LOCK_SH | LOCK_NB) == 0) {
    ::flock(file.fd(), LOCK_UN);
    return true;
  }
  return errno != ENOLCK && errno != ENOSYS && errno != EOPNOTSUPP;
}

void check_signature(const std::filesystem::path& path) {
  const File file = File::open(path, File::Mode::kRead);
  if (file.size() == 0) throw FormatError(path, "the file is empty, no HDF5 file");
  if (has_signature(file)) {
    constexpr std::uint64_t kSmallest = 9;  // of the signature alone the library says nothing at all
    if (file.size() < kSmallest)
      throw FormatError(path, fmt::format("is incomplete: only {} bytes of an HDF5 file are there", file.size()));
    return;
  }
  std::array<std::byte, 512> head;
  const auto known = std::span(head).first(file.read_some(0, head));
  const std::string what = looks_like(known);
  throw FormatError(path, fmt::format("no HDF5 signature{}{}", what.empty() ? "" : "; it looks like ", what));
}

herr_t refuse_external_link(const char* /*parent_file*/, const char* /*parent_group*/, const char* /*child_file*/,
                            const char* /*child_object*/, unsigned* /*flags*/, hid_t /*fapl*/, void* /*data*/) {
  return -1;
}

std::string sized(std::string_view kind, std::size_t bytes) { return fmt::format("{}{}", kind, bytes * 8); }

// IEEE or bfloat16, by the places of its bits.
std::optional<DType> float_of(hid_t type) {
  std::size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0) return std::nullopt;
  const std::size_t bytes = H5Tget_size(type);
  if (H5Tget_precision(type) != bytes * 8 || H5Tget_offset(type) != 0 || H5Tget_norm(type) != H5T_NORM_IMPLIED || mantissa != 0 ||
      exponent != mantissa_bits || sign != exponent + exponent_bits || sign + 1 != bytes * 8 ||
      H5Tget_ebias(type) != (std::size_t{1} << (exponent_bits - 1)) - 1)
    return std::nullopt;
  if (bytes == 2 && exponent_bits == 5) return DType::kFloat16;
  if (bytes == 2 && exponent_bits == 8) return DType::kBFloat16;
  if (bytes == 4 && exponent_bits == 8) return DType::kFloat32;
  if (bytes == 8 && exponent_bits == 11) return DType::kFloat64;
  return std::nullopt;
}

std::string filter_name(H5Z_filter_t filter, std::string_view stored) {
  struct Known {
    H5Z_filter_t filter;
    std::string_view name;
  };
  constexpr std::array kKnown{Known{H5Z_FILTER_DEFLATE, "gzip"},
                              Known{H5Z_FILTER_SHUFFLE, "shuffle"},
                              Known{H5Z_FILTER_FLETCHER32, "fletcher32"},
                              Known{H5Z_FILTER_SZIP, "szip"},
                              Known{H5Z_FILTER_NBIT, "nbit"},
                              Known{H5Z_FILTER_SCALEOFFSET, "scaleoffset"},
                              Known{307, "bzip2"},
                              Known{32000, "lzf"},
                              Known{32001, "blosc"},
                              Known{32004, "lz4"},
                              Known{32008, "bitshuffle"},
                              Known{32013, "zfp"},
                              Known{32015, "zstd"},
                              Known{32017, "sz"},
                              Known{32026, "blosc2"}};
  for (const Known& known : kKnown)
    if (known.filter == filter) return std::string(known.name);
  return stored.empty() ? "unknown" : printable(stored.substr(0, stored.find(';')));
}

// h5py and others store truth values as an enumeration of 0 and 1.
bool is_boolean(hid_t type) {
  if (H5Tget_size(type) != 1 || H5Tget_nmembers(type) != 2) return false;
  for (unsigned i = 0; i < 2; ++i) {
    std::array<signed char, 8> value{};
    char* const name = H5Tget_member_name(type, i);
    const bool matches =
        name != nullptr && H5Tget_member_value(type, i, value.data()) >= 0 &&
        ((std::strcmp(name, "FALSE") == 0 && value[0] == 0) || (std::strcmp(name, "TRUE") == 0 && value[0] == 1));
    H5free_memory(name);
    if (!matches) return false;
  }
  return true;
}

}  // namespace

// A library that is safe for threads lets one of them in at a time as well, by a lock that a fork does not know.
Session::Session() : lock_{library_mutex()} {
  H5Eget_auto2(H5E_DEFAULT, &print_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Session::~Session() { H5Eset_auto2(H5E_DEFAULT, print_, data_); }

LastError last_error() {
  LastError out;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned n, const H5E_error2_t* entry, void* data) -> herr_t {
        auto& error = *static_cast<LastError*>(data);
        const std::string_view text = entry->desc != nullptr ? entry->desc : "";
        if (n < 8 && !text.empty()) error.text += fmt::format("{}{}", error.text.empty() ? "" : "; ", printable(text, 400));
        if (const auto number = number_after(text, "errno = "); number && error.error_number == 0)
          error.error_number = static_cast<int>(*number);
        return 0;
      },
      &out);
  if (out.text.empty()) out.text = "the library gives no reason";
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  out.text += fmt::format(" (HDF5 {}.{}.{})", major, minor, release);
  return out;
}

namespace {

[[noreturn]] void throw_error(const LastError& error, const std::filesystem::path& file, std::string_view what) {
  if (error.error_number != 0) throw IoError(error.error_number, fmt::format("{} in", what), file);
  throw FormatError(file, fmt::format("{}: {}", what, error.text));
}

}  // namespace

void throw_last(const std::filesystem::path& file, std::string_view what) { throw_error(last_error(), file, what); }

bool has_signature(const File& file) {
  constexpr std::string_view kSignature{"\x89HDF\r\n\x1a\n", 8};
  const std::uint64_t size = file.size();
  for (std::uint64_t at = 0; at < size && at < std::uint64_t{1} << 62; at = at == 0 ? 512 : at * 2) {
    std::array<std::byte, kSignature.size()> found{};
    if (file.read_some(at, found) == found.size() && std::memcmp(found.data(), kSignature.data(), found.size()) == 0) return true;
  }
  return false;
}

FileId open_for_reading(const std::filesystem::path& file) {
  check_signature(file);
  const bool lock = has_locks(file);
  const Session quiet;
  const PropertyId access{H5Pcreate(H5P_FILE_ACCESS)};  // kept: closing it would clear the library's messages
  set_locking(access, lock);
  FileId out{H5Fopen(file.c_str(), H5F_ACC_RDONLY, access.id())};
  if (out) return out;
  const LastError error = last_error();
  if (error.text.find("unable to lock file") != std::string::npos) {
    if (error.error_number == EAGAIN || error.error_number == EACCES)
      throw LockedError(fmt::format("{} is open for writing in another process (or handle); it can be read when that is closed",
                                    printable(file)));
    const bool no_locks = error.error_number == ENOLCK || error.error_number == ENOSYS || error.error_number == EOPNOTSUPP;
    if (no_locks)
      throw IoError(error.error_number, "lock (the file system has no locks, HDF5_USE_FILE_LOCKING demands one)", file);
  }
  if (error.text.find("already open for write") != std::string::npos ||
      error.text.find("already open for SWMR") != std::string::npos)
    throw FormatError(file,
                      fmt::format("is marked as open for writing: a writer has it open (SWMR), or one ended without closing it "
                                  "and the file may be incomplete ('h5clear -s' removes the mark): {}",
                                  error.text));
  if (error.text.find("truncated file") != std::string::npos) {
    const auto there = number_after(error.text, "eof = ");
    auto stored = number_after(error.text, "stored_eof = ");
    if (!stored) stored = number_after(error.text, "stored_eoa = ");
    if (there && stored)
      throw FormatError(
          file, fmt::format("is incomplete: truncated, {} of {} bytes are there (HDF5: {})", *there, *stored, error.text));
    throw FormatError(file, fmt::format("is incomplete (truncated): {}", error.text));
  }
  throw_error(error, file, "cannot open");  // asking for it again gives nothing
}

PropertyId writing_access() {
  PropertyId out{H5Pcreate(H5P_FILE_ACCESS)};
  H5Pset_libver_bounds(out.id(), H5F_LIBVER_EARLIEST, H5F_LIBVER_LATEST);
  set_locking(out, false);
  return out;
}

PropertyId link_access(hid_t of) {
  PropertyId out{H5Pcreate(of)};
  H5Pset_elink_cb(out.id(), &refuse_external_link, nullptr);
  return out;
}

ObjectKind object_at(hid_t file, const std::filesystem::path& name, const std::string& path) {
  const Session quiet;
  const PropertyId access = link_access(H5P_LINK_ACCESS);
  // Link by link: the library answers for a missing group on the way with an error, and would follow a link into another file.
  for (std::size_t at = path.find_first_not_of('/'); at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string prefix = path.substr(0, end);
    if (H5Lexists(file, prefix.c_str(), access.id()) <= 0) return ObjectKind::kNone;
    H5L_info_t link;
    if (H5Lget_info(file, prefix.c_str(), &link, access.id()) < 0)
      throw_last(name, fmt::format("cannot look up {}", printable(prefix)));
    if (link.type == H5L_TYPE_EXTERNAL) {
      std::string value(link.u.val_size, '\0');
      const char *target = nullptr, *object = nullptr;
      unsigned flags = 0;
      if (H5Lget_val(file, prefix.c_str(), value.data(), value.size(), access.id()) < 0 ||
          H5Lunpack_elink_val(value.data(), value.size(), &flags, &target, &object) < 0)
        target = "?";
      throw FormatError(name, fmt::format("{} is an external link to {}; links into other files are not followed",
                                          printable(prefix), printable(std::string_view(target))));
    }
    if (H5Oexists_by_name(file, prefix.c_str(), access.id()) <= 0) {
      if (link.type != H5L_TYPE_SOFT) throw_last(name, fmt::format("cannot open {}", printable(prefix)));
      std::string value(link.u.val_size, '\0');
      if (H5Lget_val(file, prefix.c_str(), value.data(), value.size(), access.id()) < 0) value.assign(1, '?');
      throw NotFound(fmt::format(
          "{}: {} is a soft link to {}, which cannot be reached inside the file (links into other files are not followed)",
          printable(name), printable(prefix), printable(std::string_view(value.c_str()))));
    }
    at = path.find_first_not_of('/', end);
  }
  const ObjectId object{H5Oopen(file, path.empty() ? "/" : path.c_str(), access.id())};
  if (!object) throw_last(name, fmt::format("cannot open {}", printable(path)));
  switch (H5Iget_type(object.id())) {
    case H5I_GROUP: return ObjectKind::kGroup;
    case H5I_DATASET: return ObjectKind::kDataset;
    default: return ObjectKind::kOther;
  }
}

ElementType describe_type(hid_t type) {
  ElementType out;
  const std::size_t bytes = H5Tget_size(type);
  const H5T_order_t order = H5Tget_order(type);
  const bool swap = order == H5T_ORDER_BE && bytes > 1;
  const auto is = [&](DType dtype) {
    out.element = ElementFormat{dtype, swap, false};
    out.text = fmt::format("{}{}", swap ? "big-endian " : "", dtype_name(dtype));
  };
  switch (H5Tget_class(type)) {
    case H5T_INTEGER: {
      const bool is_signed = H5Tget_sign(type) == H5T_SGN_2;
      out.text = sized(is_signed ? "int" : "uint", bytes);
      const bool whole = H5Tget_precision(type) == bytes * 8 && H5Tget_offset(type) == 0;
      if (!whole || (order != H5T_ORDER_LE && order != H5T_ORDER_BE)) {
        out.text += fmt::format(" with {} bits in use", H5Tget_precision(type));
      } else if (bytes == 1) {
        is(is_signed ? DType::kInt8 : DType::kUInt8);
      } else if (is_signed && bytes == 4) {
        is(DType::kInt32);
      } else if (is_signed && bytes == 8) {
        is(DType::kInt64);
      } else if (bytes == 2 || bytes == 4 || bytes == 8) {
        out.integer = integer_bits(bytes, swap);
        out.is_signed = is_signed;
      }
      break;
    }
    case H5T_FLOAT: {
      const std::optional<DType> dtype = order == H5T_ORDER_LE || order == H5T_ORDER_BE ? float_of(type) : std::nullopt;
      if (dtype)
        is(*dtype);
      else
        out.text = sized("unusual float", bytes);
      break;
    }
    case H5T_ENUM:
      if (is_boolean(type)) {
        out.element = ElementFormat{DType::kUInt8, false, true};
        out.text = "bool";
      } else {
        out.text = "enumeration";
      }
      break;
    case H5T_OPAQUE: {
      char* const tag = H5Tget_tag(type);
      const std::string text = tag != nullptr ? tag : "";
      H5free_memory(tag);
      out.text = fmt::format("opaque, {} bytes, tag '{}'", bytes, printable(text));
      if (bytes == 2 && text == "bfloat16")
        is(DType::kBFloat16);
      else
        out.two_bytes = bytes == 2;
      break;
    }
    case H5T_ARRAY: {
      const TypeId base{H5Tget_super(type)};
      const int rank = H5Tget_array_ndims(type);
      std::array<hsize_t, H5S_MAX_RANK> dims{};
      if (!base || rank < 1 || rank > H5S_MAX_RANK || H5Tget_array_dims2(type, dims.data()) < 0) {
        out.text = "array of an unreadable type";
        break;
      }
      out = describe_type(base.id());
      if (!out.array.empty()) out.element.reset();  // arrays of arrays
      out.array.assign(dims.begin(), dims.begin() + rank);
      out.compound = false;
      out.text = fmt::format("{} {}", out.text, shape_to_text(out.array));
      break;
    }
    case H5T_COMPOUND: {
      out.compound = true;
      out.text.assign(1, '{');
      const int members = H5Tget_nmembers(type);
      constexpr int kShown = 20;
      for (int i = 0; i < std::min(members, kShown); ++i) {
        char* const name = H5Tget_member_name(type, static_cast<unsigned>(i));
        const TypeId member{H5Tget_member_type(type, static_cast<unsigned>(i))};
        out.text += fmt::format("{}{}: {}", i > 0 ? ", " : "", printable(std::string_view(name != nullptr ? name : "?")),
                                H5Tget_class(member.id()) == H5T_COMPOUND ? "{...}" : describe_type(member.id()).text);
        H5free_memory(name);
      }
      out.text += members > kShown ? fmt::format(", ... {} more}}", members - kShown) : "}";
      break;
    }
    case H5T_STRING: out.text = H5Tis_variable_str(type) > 0 ? "variable-length string" : "string"; break;
    case H5T_VLEN: out.text = "variable-length rows"; break;
    case H5T_BITFIELD: out.text = sized("bitfield", bytes); break;
    case H5T_REFERENCE: out.text = "reference"; break;
    case H5T_TIME: out.text = "time"; break;
    default: out.text = "unknown type"; break;
  }
  return out;
}

TypeId file_type(DType dtype) {
  const Session quiet;  // the names of the library's types call into it as well
  const auto half = [](std::size_t exponent_bits, std::size_t mantissa_bits) {
    TypeId out{H5Tcopy(H5T_IEEE_F32LE)};
    H5Tset_fields(out.id(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
    H5Tset_size(out.id(), 2);
    H5Tset_ebias(out.id(), (std::size_t{1} << (exponent_bits - 1)) - 1);
    return out;
  };
  switch (dtype) {
    case DType::kFloat16: return half(5, 10);
    case DType::kBFloat16: return half(8, 7);
    case DType::kFloat64: return TypeId{H5Tcopy(H5T_IEEE_F64LE)};
    case DType::kInt8: return TypeId{H5Tcopy(H5T_STD_I8LE)};
    case DType::kUInt8: return TypeId{H5Tcopy(H5T_STD_U8LE)};
    case DType::kInt32: return TypeId{H5Tcopy(H5T_STD_I32LE)};
    case DType::kInt64: return TypeId{H5Tcopy(H5T_STD_I64LE)};
    case DType::kFloat32: break;
  }
  return TypeId{H5Tcopy(H5T_IEEE_F32LE)};
}

std::vector<Hdf5Filter> filters_of(hid_t creation) {
  std::vector<Hdf5Filter> out;
  const int count = std::max(0, H5Pget_nfilters(creation));
  for (int i = 0; i < count; ++i) {
    Hdf5Filter filter;
    unsigned flags = 0, config = 0;
    std::size_t values = 0;
    std::array<char, 256> name{};
    filter.id =
        H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &values, nullptr, name.size() - 1, name.data(), &config);
    filter.name = filter_name(filter.id, name.data());
    filter.optional = (flags & H5Z_FLAG_OPTIONAL) != 0;
    filter.available = H5Zfilter_avail(filter.id) > 0;
    if (filter.available && filter.id == H5Z_FILTER_SZIP)  // a library may be able to do neither, or only to read
      filter.available = H5Zget_filter_info(filter.id, &config) >= 0 && (config & H5Z_FILTER_CONFIG_DECODE_ENABLED) != 0;
    filter.lossy = filter.id == H5Z_FILTER_SCALEOFFSET;
    out.push_back(std::move(filter));
  }
  return out;
}

}  // namespace embermap::hdf5

namespace embermap {

void leave_hdf5_at_exit() noexcept { H5dont_atexit(); }

}  // namespace embermap
