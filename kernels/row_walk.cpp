#include "kernels/row_walk.hpp"

#include <fmt/format.h>

#include "base/error.hpp"

namespace embermap::detail {

Groups groups_of(const Batch& batch, std::uint64_t first, std::uint64_t count) {
  if (first > batch.distinct() || count > batch.distinct() - first)
    throw InvalidArgument(fmt::format("{} rows for groups from {} of a batch with {}", count, first, batch.distinct()));
  return {batch.positions.data(), batch.starts.data() + first, count};
}

}  // namespace embermap::detail
