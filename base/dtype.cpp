#include "base/dtype.hpp"

#include <fmt/format.h>

#include <array>

#include "base/error.hpp"

namespace embermap {
namespace {

struct Entry {
  DType dtype;
  std::string_view name;
  std::string_view descr;
};

constexpr std::array<Entry, 8> kEntries{{
    {DType::kFloat32, "float32", "<f4"},
    {DType::kFloat16, "float16", "<f2"},
    {DType::kBFloat16, "bfloat16", "<V2"},
    {DType::kFloat64, "float64", "<f8"},
    {DType::kInt8, "int8", "|i1"},
    {DType::kUInt8, "uint8", "|u1"},
    {DType::kInt32, "int32", "<i4"},
    {DType::kInt64, "int64", "<i8"},
}};

}  // namespace

std::string_view dtype_name(DType dtype) { return kEntries[static_cast<std::size_t>(dtype)].name; }

std::string_view npy_descr(DType dtype) { return kEntries[static_cast<std::size_t>(dtype)].descr; }

DType parse_dtype(std::string_view name) {
  std::string names;
  for (const Entry& entry : kEntries) {
    if (entry.name == name) return entry.dtype;
    names += names.empty() ? "" : ", ";
    names += entry.name;
  }
  throw DTypeError(fmt::format("dtype '{}' is not one a table can hold; it holds {}", printable(name), names));
}

std::optional<DType> dtype_of_npy_descr(std::string_view descr) {
  // '=' and no sign mean native order; NumPy reads both. One-byte types have no order, and any sign is accepted.
  if (descr.empty()) return std::nullopt;
  const char order = descr.front();
  const bool signed_order = order == '<' || order == '=' || order == '|' || order == '>';
  const std::string_view kind = signed_order ? descr.substr(1) : descr;
  if (kind == "i1") return DType::kInt8;
  if (kind == "u1") return DType::kUInt8;
  if (order == '>' || order == '|') return std::nullopt;
  for (const Entry& entry : kEntries)
    if (entry.dtype != DType::kBFloat16 && entry.descr.substr(1) == kind) return entry.dtype;
  return std::nullopt;
}

std::optional<DType> dtype_of_big_endian_npy_descr(std::string_view descr) {
  if (!descr.starts_with('>')) return std::nullopt;
  const auto dtype = dtype_of_npy_descr(descr.substr(1));
  return dtype && item_size(*dtype) > 1 ? dtype : std::nullopt;
}

}  // namespace embermap
