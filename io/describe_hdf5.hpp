// What an HDF5 file holds, found out from its headers alone: no data is read, no filter is run, no link to another file is
// followed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.hpp"

namespace embermap {

struct Hdf5Filter {
  int id = 0;              // as registered with the HDF Group: 1 gzip, 32001 blosc, ...
  std::string name;        // "gzip", "shuffle", ...; for others the name in the file, or "unknown"
  bool optional = false;   // chunks may have been stored without it
  bool available = false;  // to read
  bool lossy = false;
};

struct Hdf5Dataset {
  enum class Space { kSimple, kScalar, kNull };
  static constexpr std::uint64_t kUnlimited = UINT64_MAX;

  std::string path;              // "/group/name"
  std::string dtype;             // "float32", "big-endian float32", "variable-length string", "{id: int64, v: float32 (4,)}", ...
  std::optional<DType> element;  // what a table of it would hold, as it is or with its bytes swapped; nothing if it cannot
  std::vector<std::uint64_t> element_shape;  // of an array type: dtype "float32 (4,)" has {4}
  Space space = Space::kSimple;
  std::vector<std::uint64_t> shape;      // empty for scalar and null
  std::vector<std::uint64_t> max_shape;  // kUnlimited where it may grow without end
  std::string layout;                    // "contiguous", "compact", "chunked", "virtual", "external"
  std::vector<std::uint64_t> chunk;      // of a chunked one
  std::vector<Hdf5Filter> filters;
  std::vector<std::string> other_files;       // that hold its data (external, virtual), as written in the file
  std::uint64_t bytes = 0;                    // of all elements, not compressed
  std::optional<std::uint64_t> stored_bytes;  // taken in the file; nothing if the library does not say (virtual)
  // Name and value: numbers and texts of fixed length; of others the type, because reading them may run into damage.
  std::vector<std::pair<std::string, std::string>> attributes;

  // Rows of numbers: two dimensions, or one of a one-dimensional array type.
  bool is_rows() const noexcept { return element.has_value() && shape.size() + element_shape.size() == 2 && !shape.empty(); }
};

struct Hdf5Link {  // soft and external links, which are shown and not followed
  std::string path;
  std::string target;  // "/group/name", or "file.h5:/name"
};

struct Hdf5Contents {
  std::vector<Hdf5Dataset> datasets;  // sorted by path
  std::vector<Hdf5Link> links;
};

// True if the file begins like an HDF5 file (at byte 0, 512, 1024, 2048, ...). Throws IoError.
bool is_hdf5(const std::filesystem::path& file);

// Throws IoError (cannot be opened), LockedError (open for writing elsewhere), FormatError (no HDF5 file, incomplete, broken).
Hdf5Contents describe_hdf5(const std::filesystem::path& file);

}  // namespace embermap
