// HDF5's C API under small handles, with errors as exceptions. Inside io/ only: nothing that is installed includes this.
#pragma once

// The oldest API whose functions all versions from 1.10 to 2.0 still have; Debian's packages choose it as well.
#if !defined(H5_USE_18_API) && !defined(H5_USE_110_API)
#define H5_USE_18_API 1
#endif
#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/describe_hdf5.hpp"
#include "io/elements.hpp"
#include "io/file.hpp"
#include "io/rows.hpp"

namespace embermap::hdf5 {

// For the time of one call into the library: its error printing is off (and afterwards as it was), and all of embermap's calls
// exclude each other. A fork waits for the one that is on its way, so that children can use the library. Functions here that take
// or return identifiers, and last_error(), are called inside a Session of the caller's; Handle::close, open_for_reading,
// object_at, file_type and register_lzf have their own.
class Session {
 public:
  Session();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* data_ = nullptr;
};

// Owns one identifier.
template <herr_t (*kClose)(hid_t)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(hid_t id) noexcept : id_{id} {}
  Handle(Handle&& other) noexcept : id_{std::exchange(other.id_, H5I_INVALID_HID)} {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      close();
      id_ = std::exchange(other.id_, H5I_INVALID_HID);
    }
    return *this;
  }
  ~Handle() { close(); }

  explicit operator bool() const noexcept { return id_ >= 0; }
  hid_t id() const noexcept { return id_; }
  // Returns whether the library could close it (and write what it still held).
  bool close() noexcept {
    if (id_ < 0) return true;
    const Session quiet;
    return kClose(std::exchange(id_, H5I_INVALID_HID)) >= 0;
  }

 private:
  hid_t id_ = H5I_INVALID_HID;
};

using FileId = Handle<&H5Fclose>;
using GroupId = Handle<&H5Gclose>;
using ObjectId = Handle<&H5Oclose>;
using DatasetId = Handle<&H5Dclose>;
using AttributeId = Handle<&H5Aclose>;
using SpaceId = Handle<&H5Sclose>;
using TypeId = Handle<&H5Tclose>;
using PropertyId = Handle<&H5Pclose>;

// What the library said last: the innermost messages, and errno where a system call failed (0: none did).
struct LastError {
  std::string text;  // all messages, innermost first, with the library's version
  int error_number = 0;
};
LastError last_error();

// Throws IoError if a system call was the cause, else FormatError: "x.h5: cannot read /v: filter returned failure ...
// (HDF5 1.10.8)".
[[noreturn]] void throw_last(const std::filesystem::path& file, std::string_view what);

// The signature stands at byte 0, or at 512, 1024, 2048, ... behind a user block. Does not enter the library. Throws IoError.
bool has_signature(const File& file);

// Opens a file for reading, without links out of it. Where the file system has no locks it is read without one.
// Throws IoError, LockedError (open for writing in another process), FormatError (no HDF5 file and what it looks like, not closed
// by its writer, incomplete with the bytes there are and should be).
FileId open_for_reading(const std::filesystem::path& file);

// Of a file under a temporary name, which nobody else knows: the oldest format that can hold the data, no lock (the file system
// may have none).
PropertyId writing_access();

// Access properties of links (or of datasets: `of` = H5P_DATASET_ACCESS) that refuse to follow external links.
PropertyId link_access(hid_t of);

// What stands at `path` ("/a/b", "a/b") in an open file. External links on the way are refused with FormatError.
enum class ObjectKind { kNone, kGroup, kDataset, kOther };
ObjectKind object_at(hid_t file, const std::filesystem::path& name, const std::string& path);

// The type of an element, as far as tables are concerned.
struct ElementType {
  std::optional<ElementFormat> element;  // of the base type; empty: not one that a table can hold
  std::optional<ElementFormat> integer;  // the bits of an integer that a table does not hold, for ReadOptions::integers
  bool is_signed = false;                // of that
  bool two_bytes = false;                // opaque, 2 bytes, not tagged: bfloat16 if the caller says so
  std::vector<std::uint64_t> array;      // of an array type
  bool compound = false;
  std::string text;  // "float32", "big-endian float64", "string", "{id: int64, v: float32 (4,)}"
};
ElementType describe_type(hid_t type);

// float16 and bfloat16 too, little-endian.
TypeId file_type(DType dtype);

// The filters of a dataset's creation properties, in the order in which they are applied when writing.
std::vector<Hdf5Filter> filters_of(hid_t creation);

// Makes datasets compressed with LZF (filter 32000, h5py's) readable, if the library cannot do so already.
void register_lzf();

}  // namespace embermap::hdf5

namespace embermap {

// As create_hdf5_rows(), into a file under a temporary name that its owner completes when all datasets are in it; `first`: it is
// new. One writer at a time, and `file` outlives it.
std::unique_ptr<RowWriter> create_hdf5_rows_in(TemporaryFile& file, bool first, const std::string& name, std::uint64_t rows,
                                               std::uint64_t dim, DType dtype, const WriteOptions& options);

}  // namespace embermap
