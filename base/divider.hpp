// Division of 64-bit numbers by a divisor that stays the same: a multiplication instead of the processor's division.
#pragma once

#include <bit>
#include <cstdint>

namespace embermap {

// quotient(n) == n / divisor for all n < 2^63 (row numbers and file offsets are); divisor > 0.
// With s = ceil(log2 divisor) and m = ceil(2^(63 + s) / divisor) < 2^64, m = (2^(63 + s) + e) / divisor with e < divisor <= 2^s,
// and n * m / 2^(63 + s) = n / divisor + n * e / (divisor * 2^(63 + s)), where the last term is less than 1 / divisor. (Granlund
// and Montgomery, Division by invariant integers using multiplication, 1994, theorem 4.2.)
class Divider {
 public:
  explicit Divider(std::uint64_t divisor) noexcept
      : shift_{divisor <= 1 ? 0 : static_cast<unsigned>(64 - std::countl_zero(divisor - 1))} {
    multiplier_ = static_cast<std::uint64_t>(((Wide{1} << (63 + shift_)) + divisor - 1) / divisor);
  }
  std::uint64_t quotient(std::uint64_t n) const noexcept {
    return static_cast<std::uint64_t>((Wide{n} * multiplier_) >> 63) >> shift_;
  }

 private:
  __extension__ using Wide = unsigned __int128;  // GCC and Clang have it on every 64-bit machine
  unsigned shift_;
  std::uint64_t multiplier_;
};

}  // namespace embermap
