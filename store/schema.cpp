#include "store/schema.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.hpp"

namespace embermap {

Schema::Schema(std::uint64_t dim, DType dtype, const Optimizer& optimizer) : dim_{dim}, dtype_{dtype} {
  constexpr std::uint64_t kMaxDim = 1ULL << 31;
  if (dim == 0 || dim > kMaxDim) throw InvalidArgument(fmt::format("dim {} is not in [1, {}]", dim, kMaxDim));
  check_optimizer(optimizer);
  if (!is_floating(dtype) && !std::holds_alternative<std::monostate>(optimizer))
    throw DTypeError(fmt::format("optimizer '{}' needs floating rows, not {}", optimizer_name(optimizer), dtype_name(dtype)));
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  std::visit(
      [&](const auto& o) {
        if constexpr (requires { o.row; })
          if (o.row.stochastic_rounding && !half)
            throw DTypeError(fmt::format("optimizer '{}': stochastic_rounding is for float16 and bfloat16 rows, not {}",
                                         optimizer_name(optimizer), dtype_name(dtype)));
      },
      optimizer);
  bool wide = true;  // all fields of dim elements are multiples of kWide bytes
  bool narrow = false;
  constexpr std::uint64_t kWide = 16;
  const auto add = [&](std::string name, DType type, std::uint64_t elements, double initial) {
    const std::uint64_t offset = round_up(record_bytes_, item_size(type));
    fields_.push_back({std::move(name), type, offset, elements * item_size(type), initial, elements});
    record_bytes_ = offset + fields_.back().bytes;
    alignment_ = std::max(alignment_, item_size(type));
  };
  const auto add_row = [&](std::string name, DType type, double initial) {
    wide = wide && dim * item_size(type) % kWide == 0;
    add(std::move(name), type, dim, initial);
  };
  add_row("weight", dtype, 0);
  for (const StateField& state : state_fields(optimizer)) {
    const DType type = state.shape == StateShape::kCount ? DType::kInt32 : state_dtype(dtype);
    if (state.shape == StateShape::kElements) {
      add_row(std::string(state.name), type, state.initial);
    } else {
      narrow = true;
      add(std::string(state.name), type, 1, state.initial);
    }
  }
  if (wide && narrow) alignment_ = kWide;
  record_bytes_ = round_up(record_bytes_, alignment_);
}

const Field& Schema::field(std::string_view name) const {
  std::string names;
  for (const Field& field : fields_) {
    if (field.name == name) return field;
    if (!names.empty()) names += ", ";
    names += field.name;
  }
  throw NotFound(fmt::format("no field '{}'; the record has {}", printable(name), names));
}

RecordLayout Schema::layout(std::uint64_t stride) const {
  RecordLayout layout{.dim = dim_, .stride = stride, .dtype = dtype_, .states = static_cast<std::uint32_t>(fields_.size() - 1)};
  for (std::size_t i = 1; i < fields_.size(); ++i) layout.state_offset[i - 1] = fields_[i].offset;
  return layout;
}

}  // namespace embermap
