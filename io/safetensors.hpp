// The header of a safetensors file, read without trusting it and written as the library writes it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "io/elements.hpp"
#include "io/file.hpp"

namespace embermap {

struct SafeTensor {
  std::string name;
  std::string dtype;  // "F32", "BF16", ... as the file has it
  std::vector<std::uint64_t> shape;
  std::uint64_t begin = 0, end = 0;  // from where the data begins

  std::optional<ElementFormat> element() const;  // what a table takes it as; nothing for a dtype that it cannot hold
  std::string dtype_text() const;                // "float32", "float8_e4m3fn"; the file's own name for one that is not known
};

struct SafetensorsHeader {
  static constexpr std::uint64_t kLargest = 100'000'000;  // bytes of a header, as the library has it

  std::vector<SafeTensor> tensors;              // by their place in the file
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::uint64_t data_offset = 0;
};

// Throws FormatError: no or a truncated header, one of more than 100 MB, JSON that is none or nested too deeply, names that are
// there twice, tensors that lie outside of the file or over one another, leave holes or bytes behind them, or whose shape and
// dtype do not give their length (for dtypes that are known).
SafetensorsHeader read_safetensors_header(const File& file);

// The bytes before the data: tensors with `shape` and `dtype`, in the order in which they will lie: those with the widest
// elements first, then by name, so that each begins at a multiple of its element's size. `begin` and `end` are set. Throws
// InvalidArgument for a header past 100 MB.
std::string format_safetensors_header(std::vector<SafeTensor>& tensors, const std::map<std::string, std::string>& metadata);

// "F32" for kFloat32.
std::string_view safetensors_dtype(DType dtype);

// Tensor names and the files that hold them, of "x.safetensors.index.json". Throws FormatError (no such index; a file that is not
// named alone, so that it might lie in another folder), IoError.
std::map<std::string, std::string> read_safetensors_index(const std::filesystem::path& file);

}  // namespace embermap
