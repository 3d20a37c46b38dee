// Random row ids as `embermap bench` draws them.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace embermap::tools {

// How ids are distributed: "uniform", or "zipf:EXPONENT" with the ranks spread over the rows by a fixed pseudo-random bijection,
// so that rows in constant use lie anywhere in the table.
class IdSource {
 public:
  // Ids in [0, rows), rows > 0. Throws UsageError for a text that is neither.
  IdSource(std::string_view text, std::uint64_t rows, std::uint64_t seed);

  std::vector<std::int64_t> draw(std::uint64_t count);

 private:
  std::uint64_t zipf_rank();
  std::uint64_t place_of(std::uint64_t rank) const;

  std::uint64_t rows_;
  double exponent_ = 0;  // 0: uniform
  double low_ = 0, high_ = 0;
  unsigned half_bits_ = 1;
  std::mt19937_64 random_;
};

}  // namespace embermap::tools
