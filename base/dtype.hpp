// The element types a table may hold. Little-endian, as on every machine embermap runs on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace embermap {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt8, kUInt8, kInt32, kInt64 };

constexpr std::uint64_t item_size(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8: return 1;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

// Floating types can be trained.
constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat64;
}

// "float32", "bfloat16", ... as NumPy and torch call them.
std::string_view dtype_name(DType dtype);

// The dtype called `name`; throws DTypeError listing the names that exist.
DType parse_dtype(std::string_view name);

// How NumPy writes the dtype in a .npy header: "<f4", "|i1", ...; bfloat16 is "<V2", as ml_dtypes writes it.
std::string_view npy_descr(DType dtype);

// The native dtype of a .npy descr. "<V2" is ambiguous and not taken for bfloat16 here: the caller has to know.
std::optional<DType> dtype_of_npy_descr(std::string_view descr);

// The dtype of a .npy descr whose elements are of several bytes, the highest first: ">f4", ">i8".
std::optional<DType> dtype_of_big_endian_npy_descr(std::string_view descr);

}  // namespace embermap
