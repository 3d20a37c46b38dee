#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#include "base/philox.hpp"
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

// --- SGD and Adagrad as most tables have them: one pass from the gradients to the records --------------------------------------

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
    A none{};
    if constexpr (kKind != Kind::kSgd) state = detail::load<A>(states, j);
    detail::step_element<kKind, A>(c, detail::widen<A>(detail::load<S>(gradients, j)), weight, state, none, none);
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
  const std::uint64_t* keys;  // the groups' rows
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

bool is_plain(const StepScalars& s) {
  const bool kind = s.kind == Kind::kSgd || s.kind == Kind::kSgdMomentum || s.kind == Kind::kAdagrad;
  return kind && !s.maximize && s.clip_value == 0 && !s.stochastic_rounding && !s.whole_rows();
}

// --- Every optimizer, with every option: sums of gradients first, then a step on a tile of them
// -----------------------------------

// One step on `columns` elements; weights and gradients of A, `states` at their first column.
template <class A>
using TileStep = void (*)(const detail::StepConstants<A>& constants, const A* gradients, std::byte* weights,
                          const std::array<std::byte*, 3>& states, std::uint64_t columns);

template <Kind kKind, class A>
void step_sums(const detail::StepConstants<A>& constants, const A* __restrict gradients, std::byte* __restrict weights,
               const std::array<std::byte*, 3>& states, std::uint64_t columns) {
  constexpr int kStates = detail::element_states_of(kKind);
  with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
    const detail::StepConstants<A> c = constants;
    std::byte* __restrict const first = states[0];
    std::byte* __restrict const second = states[1];
    std::byte* __restrict const third = states[2];
    for (std::uint64_t j = 0; j < columns; ++j) {
      A weight = detail::load<A>(weights, j);
      A state[3] = {};
      if constexpr (kStates > 0) state[0] = detail::load<A>(first, j);
      if constexpr (kStates > 1) state[1] = detail::load<A>(second, j);
      if constexpr (kStates > 2) state[2] = detail::load<A>(third, j);
      detail::step_element<kKind, A>(c, gradients[j], weight, state[0], state[1], state[2]);
      detail::store(weights, j, weight);
      if constexpr (kStates > 0) detail::store(first, j, state[0]);
      if constexpr (kStates > 1) detail::store(second, j, state[1]);
      if constexpr (kStates > 2) detail::store(third, j, state[2]);
    }
  });
}

template <class A>
TileStep<A> tile_step(Kind kind) {
  switch (kind) {
    case Kind::kSgd: return step_sums<Kind::kSgd, A>;
    case Kind::kSgdMomentum: return step_sums<Kind::kSgdMomentum, A>;
    case Kind::kAdagrad: return step_sums<Kind::kAdagrad, A>;
    case Kind::kRowWiseAdagrad: return step_sums<Kind::kRowWiseAdagrad, A>;
    case Kind::kAdadelta: return step_sums<Kind::kAdadelta, A>;
    case Kind::kAdam: return step_sums<Kind::kAdam, A>;
    case Kind::kAdamAmsgrad: return step_sums<Kind::kAdamAmsgrad, A>;
    case Kind::kAdamax: return step_sums<Kind::kAdamax, A>;
    case Kind::kNAdam: return step_sums<Kind::kNAdam, A>;
    case Kind::kRAdam: return step_sums<Kind::kRAdam, A>;
    case Kind::kAsgd: return step_sums<Kind::kAsgd, A>;
    case Kind::kRmsProp: return step_sums<Kind::kRmsProp, A>;
    case Kind::kRmsPropMomentum: return step_sums<Kind::kRmsPropMomentum, A>;
    case Kind::kRmsPropCentered: return step_sums<Kind::kRmsPropCentered, A>;
    case Kind::kRmsPropCenteredMomentum: return step_sums<Kind::kRmsPropCenteredMomentum, A>;
    case Kind::kRprop: return step_sums<Kind::kRprop, A>;
  }
  return nullptr;
}

// The sum of square(j) over `columns`, in the order of optimizer_step.hpp.
template <class Square>
EMBERMAP_ALWAYS_INLINE inline double sum_of_squares(std::uint64_t columns, const Square& square) {
  constexpr std::uint64_t kLanes = detail::kSquareLanes;
  alignas(64) double lanes[kLanes] = {};
  std::uint64_t j = 0;
  for (; columns - j >= kLanes; j += kLanes)
    for (std::uint64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += square(j + lane);
  for (std::uint64_t lane = 0; j + lane < columns; ++lane) lanes[lane] += square(j + lane);
  for (std::uint64_t half = kLanes / 2; half > 0; half /= 2)
    for (std::uint64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

template <class T>
T load_at(const std::byte* at) {
  return detail::load<T>(at, 0);
}

template <class W, class G>
class GeneralStep {
 public:
  using A = ArithmeticOf<W>;

  explicit GeneralStep(const Step& step)
      : step_{step},
        constants_{step.scalars},
        tile_{tile_step<A>(step.scalars.kind)},
        clip_value_{static_cast<A>(step.scalars.clip_value)},
        element_states_{element_states(step.scalars.kind)} {}

  // Columns [first_column, last_column) of a group, none of which needs the others.
  void columns(std::uint64_t group, std::uint64_t first_column, std::uint64_t last_column) const {
    alignas(64) A sums[kTileColumns];
    for (std::uint64_t column = first_column; column < last_column; column += kTileColumns) {
      const std::uint64_t some = std::min(kTileColumns, last_column - column);
      sum(group, column, some, sums);
      apply(constants_, group, column, some, sums);
    }
  }

  // All columns of a group, whose sums `row` has room for.
  void whole_row(std::uint64_t group, std::vector<A>& row) const {
    sum_columns(group, 0, row.size(), row.data());
    finish_row(group, row);
  }

  void sum_columns(std::uint64_t group, std::uint64_t first_column, std::uint64_t last_column, A* row) const {
    for (std::uint64_t column = first_column; column < last_column; column += kTileColumns)
      sum(group, column, std::min(kTileColumns, last_column - column), row + column);
  }

  // The step once the row's sums are there.
  void finish_row(std::uint64_t group, std::vector<A>& row) const {
    const StepScalars& scalars = step_.scalars;
    const std::uint64_t dim = row.size();
    A* const gradients = row.data();
    std::byte* const record = step_.records[group];
    if (scalars.clip_row != 0) {
      const double squares = squares_of(gradients, dim);
      if (const double factor = detail::clip_factor(squares, scalars.clip_row); factor != 1)
        for (std::uint64_t j = 0; j < dim; ++j) gradients[j] *= static_cast<A>(factor);
    }
    detail::StepConstants<A> constants = constants_;
    if (scalars.per_row) constants = constants_of(record);
    if (scalars.kind == Kind::kRowWiseAdagrad) {
      if (scalars.weight_decay != 0) {  // part of the gradient whose squares are taken
        for (std::uint64_t j = 0; j < dim; ++j)
          gradients[j] = gradients[j] + constants.weight_decay * detail::widen<A>(detail::load<W>(record, j));
        constants.weight_decay = 0;
      }
      std::byte* const place = record + step_.layout.state_offset[0];
      const A sum = load_at<A>(place) + static_cast<A>(squares_of(gradients, dim) / static_cast<double>(dim));
      detail::store(place, 0, sum);
      constants.root = std::sqrt(sum) + constants.eps;
    }
    for (std::uint64_t column = 0; column < dim; column += kTileColumns)
      apply(constants, group, column, std::min(kTileColumns, dim - column), gradients + column);
  }

  void prefetch(std::uint64_t group) const {
    const RecordLayout& layout = step_.layout;
    detail::prefetch(step_.records[group], layout.dim * sizeof(W));
    for (std::uint32_t state = 0; state < element_states_; ++state)
      detail::prefetch(step_.records[group] + layout.state_offset[state], layout.dim * sizeof(A));
  }

 private:
  static double squares_of(const A* gradients, std::uint64_t columns) {
    double squares = 0;
    with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
      squares = sum_of_squares(columns, [gradients](std::uint64_t j) EMBERMAP_ALWAYS_INLINE {
        const auto value = static_cast<double>(gradients[j]);
        return value * value;
      });
    });
    return squares;
  }

  void sum(std::uint64_t group, std::uint64_t column, std::uint64_t columns, A* sums) const {
    const Groups& groups = step_.groups;
    const std::uint64_t ahead = detail::prefetch_distance(step_.layout.dim * sizeof(W)) / 2;
    const detail::PositionRows<G> gradients{step_.grads, groups.positions, step_.layout.dim, groups.starts[groups.count], ahead};
    const bool maximize = step_.scalars.maximize;
    with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
      detail::sum_rows<A, G>(sums, gradients, groups.starts[group], groups.starts[group + 1], column, columns);
      if (maximize || clip_value_ != A{0})
        for (std::uint64_t j = 0; j < columns; ++j) sums[j] = detail::prepared(sums[j], clip_value_, maximize);
    });
  }

  // Of the row's own step, which is counted here.
  detail::StepConstants<A> constants_of(std::byte* record) const {
    std::byte* const count = record + step_.layout.state_offset[all_states(step_.scalars) - (is_nadam() ? 2 : 1)];
    const auto taken = load_at<std::int32_t>(count);
    const std::int32_t now = detail::next_step(taken);
    detail::store(count, 0, now);
    if (!is_nadam()) return {step_.scalars, static_cast<std::uint64_t>(now), 1};
    std::byte* const place = record + step_.layout.state_offset[all_states(step_.scalars) - 1];
    const auto before = static_cast<double>(load_at<A>(place));
    detail::store(place, 0, static_cast<A>(before * detail::nadam_mu(step_.scalars, static_cast<std::uint64_t>(now))));
    return {step_.scalars, static_cast<std::uint64_t>(now), before};
  }
  bool is_nadam() const { return step_.scalars.kind == Kind::kNAdam; }

  void apply(const detail::StepConstants<A>& constants, std::uint64_t group, std::uint64_t column, std::uint64_t columns,
             const A* gradients) const {
    std::byte* const record = step_.records[group];
    std::byte* const weights = record + column * sizeof(W);
    std::array<std::byte*, 3> states{};
    for (std::uint32_t state = 0; state < element_states_; ++state)
      states[state] = record + step_.layout.state_offset[state] + column * sizeof(A);
    if constexpr (std::is_same_v<W, A>) {
      tile_(constants, gradients, weights, states, columns);
    } else {
      alignas(64) A wide[kTileColumns];
      with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
        for (std::uint64_t j = 0; j < columns; ++j) wide[j] = detail::widen<A>(detail::load<W>(weights, j));
      });
      tile_(constants, gradients, reinterpret_cast<std::byte*>(wide), states, columns);
      if (step_.scalars.stochastic_rounding) return store_by_chance(group, column, columns, wide);
      with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE {
        for (std::uint64_t j = 0; j < columns; ++j) detail::store(weights, j, detail::narrow<W>(wide[j]));
      });
    }
  }

  // `column` is a multiple of 4.
  void store_by_chance(std::uint64_t group, std::uint64_t column, std::uint64_t columns, const A* wide) const
      requires(!std::is_same_v<W, A>) {
    static_assert(detail::kPhiloxBlocks * 4 == kTileColumns);
    std::byte* const weights = step_.records[group] + column * sizeof(W);
    const std::uint64_t row = step_.keys[group];
    detail::PhiloxBlocks blocks;
    for (std::size_t block = 0; block < detail::kPhiloxBlocks; ++block) {
      std::uint32_t word[4];
      detail::rounding_counter(step_.scalars, row, column / 4 + block, word);
      for (std::size_t w = 0; w < 4; ++w) blocks.word[w][block] = word[w];
    }
    with_widest_vectors(
        [&]() EMBERMAP_ALWAYS_INLINE { detail::philox(blocks, detail::kPhiloxBlocks, detail::rounding_key(step_.scalars)); });
    for (std::uint64_t j = 0; j < columns; ++j)
      detail::store(weights, j, detail::round_by_chance<W>(wide[j], blocks.word[j % 4][j / 4]));
  }

  const Step& step_;
  const detail::StepConstants<A> constants_;
  const TileStep<A> tile_;
  const A clip_value_;
  const std::uint32_t element_states_;
};

template <class W, class G>
void run_general(const Step& step, ThreadPool& pool) {
  using A = ArithmeticOf<W>;
  const GeneralStep<W, G> general(step);
  const std::uint64_t dim = step.layout.dim;
  const std::uint64_t ahead = detail::prefetch_distance(dim * sizeof(W)) / 2;
  if (!step.scalars.whole_rows())
    return detail::for_groups(
        step.groups, dim, sizeof(G), pool,
        [&](std::uint64_t first, std::uint64_t last, std::uint64_t first_column, std::uint64_t last_column) {
          for (std::uint64_t group = first; group < last; ++group) {
            if (group + ahead < last) general.prefetch(group + ahead);
            general.columns(group, first_column, last_column);
          }
        });
  detail::for_groups(
      step.groups, dim, sizeof(G), pool,
      [&](std::uint64_t first, std::uint64_t last, std::uint64_t, std::uint64_t) {
        std::vector<A> row(dim);
        for (std::uint64_t group = first; group < last; ++group) {
          if (group + ahead < last) general.prefetch(group + ahead);
          general.whole_row(group, row);
        }
      },
      [&](std::uint64_t group, const auto& for_columns) {
        std::vector<A> row(dim);
        for_columns([&](std::uint64_t first_column, std::uint64_t last_column) {
          general.sum_columns(group, first_column, last_column, row.data());
        });
        general.finish_row(group, row);
      });
}

template <class W, class G>
void run(const Step& step, ThreadPool& pool) {
  if (!is_plain(step.scalars)) return run_general<W, G>(step, pool);
  switch (step.scalars.kind) {
    case Kind::kSgdMomentum: return run<Kind::kSgdMomentum, W, G>(step, pool);
    case Kind::kAdagrad: return run<Kind::kAdagrad, W, G>(step, pool);
    default: return run<Kind::kSgd, W, G>(step, pool);
  }
}

}  // namespace

void step_rows(std::span<std::byte* const> records, const Batch& batch, std::uint64_t first, const RecordLayout& layout,
               const StepScalars& scalars, const std::byte* grads, DType grad_dtype, ThreadPool& pool) {
  const Groups groups = detail::groups_of(batch, first, records.size());
  if (layout.states < all_states(scalars))
    throw InvalidArgument(
        fmt::format("the record has {} state fields for an optimizer that needs {}", layout.states, all_states(scalars)));
  if (scalars.stochastic_rounding && layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16)
    throw DTypeError(fmt::format("stochastic rounding of rows of {}", dtype_name(layout.dtype)));
  const Step step{records.data(), groups, layout, scalars, grads, batch.keys.data() + first};
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
