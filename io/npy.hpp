// The header of a .npy file (NumPy's format 1.0, 2.0, 3.0), read without trusting it and written so that NumPy reads it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "io/file.hpp"

namespace embermap {

// One field of a structured dtype. Padding appears in NumPy's descr as unnamed void fields; it is not listed, only counted in
// offsets.
struct NpyField {
  std::string name;
  std::string descr;                 // "<f4"
  std::vector<std::uint64_t> shape;  // of the sub-array, empty for a scalar
  std::uint64_t offset = 0;          // in the element, bytes
  std::uint64_t bytes = 0;
};

struct NpyHeader {
  unsigned major = 1, minor = 0;
  std::string descr;             // "<f4"; empty if structured
  std::vector<NpyField> fields;  // empty if plain
  std::uint64_t item_bytes = 0;  // one element (record)
  bool fortran_order = false;
  std::vector<std::uint64_t> shape;
  std::uint64_t data_offset = 0;

  std::uint64_t elements() const;    // product of the shape, checked when read
  std::uint64_t data_bytes() const;  // elements x item_bytes, checked when read
  std::string dtype_text() const;    // for messages: "<f4" or "{weight: <f4 (128,), sum: <f4 (128,)}"
  std::string shape_text() const;    // "(3, 4)"
};

// Throws FormatError naming the file and what is wrong: no magic (and what the file looks like instead), unknown version by
// number, truncated header or data, a header length past the end of the file (nothing is allocated from it), a shape that is no
// tuple, object dtype (never unpickled), sizes past 64 bits. The Python 2 suffix (3L) is read in versions 1 and 2. Trailing bytes
// after the data are accepted.
NpyHeader read_npy_header(const File& file);
// The same for `size` bytes that `read` gives; `name` names them in errors. No range is read twice, and none before one that was.
NpyHeader read_npy_header(const std::filesystem::path& name, std::uint64_t size, const ReadBytes& read);

// A header of the lowest version that can hold it. `shape` and either `descr` or `fields` are written as given. Data begins at
// byte `data_offset` if that is not 0 (padded with spaces; InvalidArgument if it does not fit), else at the next multiple of 64.
// `item_bytes` (0: end of the last field) beyond the last field becomes an unnamed void field, as NumPy writes padding.
std::string format_npy_header(std::string_view descr, const std::vector<NpyField>& fields, std::uint64_t item_bytes,
                              const std::vector<std::uint64_t>& shape, std::uint64_t data_offset);

}  // namespace embermap
