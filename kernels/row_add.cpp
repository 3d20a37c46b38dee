#include "kernels/row_walk.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

using detail::Groups;
using detail::kTileColumns;

// What elements of T are summed in: integers modulo 2^n.
template <class T>
struct Sum {
  using type = std::conditional_t<kIsHalf<T>, float, T>;
};

// T is float, double, a 16-bit float or an unsigned integer (two's complement makes signed ones the same).
template <class T>
EMBERMAP_ALWAYS_INLINE inline void add_groups(std::byte* const* rows, const Groups& groups, std::uint64_t first,
                                              std::uint64_t last, std::uint64_t first_column, std::uint64_t last_column,
                                              std::uint64_t dim, const std::byte* in) {
  using A = typename Sum<T>::type;
  alignas(64) A sums[kTileColumns];
  const std::uint64_t ahead = detail::prefetch_distance(dim * sizeof(T)) / 2;
  const detail::PositionRows<T> addends{in, groups.positions, dim, groups.starts[last], ahead};
  for (std::uint64_t group = first; group < last; ++group) {
    if (group + ahead < last)
      detail::prefetch(rows[group + ahead] + first_column * sizeof(T), (last_column - first_column) * sizeof(T));
    for (std::uint64_t column = first_column; column < last_column; column += kTileColumns) {
      const std::uint64_t columns = std::min(kTileColumns, last_column - column);
      detail::sum_rows<A, T>(sums, addends, groups.starts[group], groups.starts[group + 1], column, columns);
      std::byte* __restrict row = rows[group] + column * sizeof(T);
      for (std::uint64_t j = 0; j < columns; ++j)
        detail::store(row, j, detail::narrow<T>(static_cast<A>(detail::widen<A>(detail::load<T>(row, j)) + sums[j])));
    }
  }
}

template <class T>
void add(std::span<std::byte* const> rows, const Groups& groups, std::uint64_t dim, const std::byte* in, ThreadPool& pool) {
  detail::for_groups(groups, dim, sizeof(T), pool,
                     [&](std::uint64_t first, std::uint64_t last, std::uint64_t first_column, std::uint64_t last_column) {
                       with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
                         add_groups<T>(rows.data(), groups, first, last, first_column, last_column, dim, in);
                       });
                     });
}

}  // namespace

void add_rows(std::span<std::byte* const> rows, const Batch& batch, std::uint64_t first, std::uint64_t dim, DType dtype,
              const std::byte* in, ThreadPool& pool) {
  const Groups groups = detail::groups_of(batch, first, rows.size());
  switch (dtype) {
    case DType::kFloat32: return add<float>(rows, groups, dim, in, pool);
    case DType::kFloat16: return add<Float16>(rows, groups, dim, in, pool);
    case DType::kBFloat16: return add<BFloat16>(rows, groups, dim, in, pool);
    case DType::kFloat64: return add<double>(rows, groups, dim, in, pool);
    case DType::kInt8:
    case DType::kUInt8: return add<std::uint8_t>(rows, groups, dim, in, pool);
    case DType::kInt32: return add<std::uint32_t>(rows, groups, dim, in, pool);
    case DType::kInt64: return add<std::uint64_t>(rows, groups, dim, in, pool);
  }
}

}  // namespace embermap
