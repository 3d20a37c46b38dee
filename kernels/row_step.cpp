#include <fmt/format.h>

#include "base/error.hpp"
#include "kernels/optimizer_step.hpp"
#include "kernels/row_walk.hpp"
#include "kernels/rows.hpp"

// Compiled without contraction (see optimizer_step.hpp) and with -fno-math-errno, without which no square root is vectorised.

namespace embermap {
namespace {

using detail::Groups;
using detail::kTileColumns;
using Kind = StepScalars::Kind;

// Weights of W, state and arithmetic in A, gradients of G.
template <class W>
using ArithmeticOf = typename detail::Arithmetic<W>::type;

// One step on `columns` elements with gradients of S, which is G (a single position) or A (their sum).
template <Kind kKind, class W, class S>
EMBERMAP_ALWAYS_INLINE inline void step_tile(const detail::StepConstants<ArithmeticOf<W>>& constants,
                                             const std::byte* __restrict gradients, std::byte* __restrict weights,
                                             std::byte* __restrict states, std::uint64_t columns) {
  using A = ArithmeticOf<W>;
  const detail::StepConstants<A> c = constants;
  for (std::uint64_t j = 0; j < columns; ++j) {
    A weight = detail::widen<A>(detail::load<W>(weights, j));
    A state{};
    if constexpr (kKind != Kind::kSgd) state = detail::load<A>(states, j);
    detail::step_element<kKind, A>(c, detail::widen<A>(detail::load<S>(gradients, j)), weight, state);
    detail::store(weights, j, detail::narrow<W>(weight));
    if constexpr (kKind != Kind::kSgd) detail::store(states, j, state);
  }
}

struct Step {
  std::byte* const* records;
  const Groups& groups;
  const RecordLayout& layout;
  const StepScalars& scalars;
  const std::byte* grads;
};

template <Kind kKind, class W, class G>
EMBERMAP_ALWAYS_INLINE inline void step_groups(const Step& step, std::uint64_t first, std::uint64_t last,
                                               std::uint64_t first_column, std::uint64_t last_column) {
  using A = ArithmeticOf<W>;
  const detail::StepConstants<A> constants(step.scalars);
  const std::uint64_t dim = step.layout.dim;
  const std::uint64_t state_offset = step.layout.state_offset[0];
  const std::uint64_t span = last_column - first_column;
  const std::uint64_t ahead = detail::prefetch_distance(dim * sizeof(W)) / 2;
  const Groups& groups = step.groups;
  const detail::PositionRows<G> gradients{step.grads, groups.positions, dim, groups.starts[last], ahead};
  alignas(64) A sums[kTileColumns];
  for (std::uint64_t group = first; group < last; ++group) {
    if (group + ahead < last) {
      const std::byte* const next = step.records[group + ahead];
      detail::prefetch(next + first_column * sizeof(W), span * sizeof(W));
      if constexpr (kKind != Kind::kSgd) detail::prefetch(next + state_offset + first_column * sizeof(A), span * sizeof(A));
    }
    std::byte* const record = step.records[group];
    const std::uint64_t begin = groups.starts[group];
    const std::uint64_t end = groups.starts[group + 1];
    if (end - begin == 1) {
      gradients.prefetch_after(begin, first_column, span);
      step_tile<kKind, W, G>(constants, gradients.at(begin, first_column), record + first_column * sizeof(W),
                             record + state_offset + first_column * sizeof(A), span);
      continue;
    }
    for (std::uint64_t column = first_column; column < last_column; column += kTileColumns) {
      const std::uint64_t columns = std::min(kTileColumns, last_column - column);
      detail::sum_rows<A, G>(sums, gradients, begin, end, column, columns);
      step_tile<kKind, W, A>(constants, reinterpret_cast<const std::byte*>(sums), record + column * sizeof(W),
                             record + state_offset + column * sizeof(A), columns);
    }
  }
}

template <Kind kKind, class W, class G>
void run(const Step& step, ThreadPool& pool) {
  // A position costs its gradient; the record's own bytes are the two positions more that for_groups adds.
  detail::for_groups(step.groups, step.layout.dim, sizeof(G), pool,
                     [&](std::uint64_t first, std::uint64_t last, std::uint64_t first_column, std::uint64_t last_column) {
                       with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
                         step_groups<kKind, W, G>(step, first, last, first_column, last_column);
                       });
                     });
}

template <class W, class G>
void run(const Step& step, ThreadPool& pool) {
  switch (step.scalars.kind) {
    case Kind::kSgd: return run<Kind::kSgd, W, G>(step, pool);
    case Kind::kSgdMomentum: return run<Kind::kSgdMomentum, W, G>(step, pool);
    case Kind::kAdagrad: return run<Kind::kAdagrad, W, G>(step, pool);
  }
}

}  // namespace

void step_rows(std::span<std::byte* const> records, const Batch& batch, std::uint64_t first, const RecordLayout& layout,
               const StepScalars& scalars, const std::byte* grads, DType grad_dtype, ThreadPool& pool) {
  const Groups groups = detail::groups_of(batch, first, records.size());
  if (scalars.kind != Kind::kSgd && layout.states == 0)
    throw InvalidArgument("the record has no state field for an optimizer that needs one");
  const Step step{records.data(), groups, layout, scalars, grads};
  switch (layout.dtype) {
    case DType::kFloat32:
      if (grad_dtype == DType::kFloat32) return run<float, float>(step, pool);
      break;
    case DType::kFloat64:
      if (grad_dtype == DType::kFloat64) return run<double, double>(step, pool);
      break;
    case DType::kFloat16:
      if (grad_dtype == DType::kFloat16) return run<Float16, Float16>(step, pool);
      if (grad_dtype == DType::kFloat32) return run<Float16, float>(step, pool);
      break;
    case DType::kBFloat16:
      if (grad_dtype == DType::kBFloat16) return run<BFloat16, BFloat16>(step, pool);
      if (grad_dtype == DType::kFloat32) return run<BFloat16, float>(step, pool);
      break;
    default: break;
  }
  throw DTypeError(fmt::format("gradients of {} for a table of {}", dtype_name(grad_dtype), dtype_name(layout.dtype)));
}

}  // namespace embermap
