// What a record is made of.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.hpp"
#include "kernels/optimizer.hpp"

namespace embermap {

struct Field {
  std::string name;  // "weight", then the state fields under torch's names
  DType dtype = DType::kFloat32;
  std::uint64_t offset = 0;    // in the record, bytes
  std::uint64_t bytes = 0;     // of its elements
  double initial = 0;          // of state fields
  std::uint64_t elements = 0;  // dim, or 1 of a state field with one number a row
};

// |weight|state 0|state 1|...|padding to the stride|      offsets are multiples of the field's item size. Where a field has one
// element a row and all others are multiples of 16 bytes, so are records: kernels load 16 bytes at a time.
class Schema {
 public:
  // Throws InvalidArgument (dim 0 or above 2^31, bad hyperparameters) or DTypeError (an optimizer on an integer table, stochastic
  // rounding of rows that are not float16 or bfloat16).
  Schema(std::uint64_t dim, DType dtype, const Optimizer& optimizer);

  std::uint64_t dim() const noexcept { return dim_; }
  DType dtype() const noexcept { return dtype_; }
  const std::vector<Field>& fields() const noexcept { return fields_; }
  bool structured() const noexcept { return fields_.size() > 1; }
  std::uint64_t record_bytes() const noexcept { return record_bytes_; }  // without the stride's padding
  std::uint64_t alignment() const noexcept { return alignment_; }        // the largest item size, or 16
  // Throws NotFound listing the fields.
  const Field& field(std::string_view name) const;
  RecordLayout layout(std::uint64_t stride) const;

 private:
  std::uint64_t dim_;
  DType dtype_;
  std::vector<Field> fields_;
  std::uint64_t record_bytes_ = 0;
  std::uint64_t alignment_ = 1;
};

}  // namespace embermap
