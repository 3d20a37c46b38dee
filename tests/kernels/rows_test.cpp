#include "kernels/rows.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#include "base/half.hpp"
#include "base/vector_dispatch.hpp"

namespace embermap {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::uint64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::uint32_t> permutation(std::uint64_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

// Lowers the vector level while it lives.
class AtLevel {
 public:
  explicit AtLevel(VectorLevel level) : before_{detail::vector_level().exchange(level)} {}
  ~AtLevel() { detail::vector_level() = before_; }
  AtLevel(const AtLevel&) = delete;
  AtLevel& operator=(const AtLevel&) = delete;

 private:
  VectorLevel before_;
};

std::vector<VectorLevel> levels() {
  std::vector<VectorLevel> all{VectorLevel::kBaseline};
  const VectorLevel best = detail::detect_vector_level();
  if (best >= VectorLevel::kAvx2) all.push_back(VectorLevel::kAvx2);
  if (best >= VectorLevel::kAvx512) all.push_back(VectorLevel::kAvx512);
  return all;
}

// --- gather, scatter ---

class RowBytes : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Widths, RowBytes,
                         testing::Values(1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 512,
                                         516, 1023, 1024, 1025, 1028, 1204, 4096, 4100, 70000));

TEST_P(RowBytes, AreGatheredAndScatteredAtEveryAlignment) {
  const std::uint64_t width = GetParam();
  const std::uint64_t table_rows = 50;
  const std::uint64_t count = width > 10000 ? 9 : 333;
  for (const unsigned threads : {1U, 3U}) {
    ThreadPool pool(threads);
    for (const std::uint64_t shift : {0U, 1U, 2U, 8U, 16U}) {
      Bytes table = random_bytes(table_rows * width + shift, width);
      std::vector<const std::byte*> rows;
      std::mt19937_64 random(width + shift);
      for (std::uint64_t i = 0; i < count; ++i) rows.push_back(table.data() + shift + random() % table_rows * width);

      Bytes expected(count * width + 2 * shift + 64, std::byte{0xEE});
      for (std::uint64_t i = 0; i < count; ++i) std::memcpy(expected.data() + shift + i * width, rows[i], width);
      Bytes out(expected.size(), std::byte{0xEE});
      gather_rows(rows, width, out.data() + shift, pool);
      ASSERT_TRUE(out == expected) << "gather_rows, shift " << shift;

      const std::vector<std::uint32_t> places = permutation(count, width);
      std::fill(expected.begin(), expected.end(), std::byte{0xEE});
      std::fill(out.begin(), out.end(), std::byte{0xEE});
      for (std::uint64_t i = 0; i < count; ++i) std::memcpy(expected.data() + shift + places[i] * width, rows[i], width);
      gather_rows_to(rows, places, width, out.data() + shift, pool);
      ASSERT_TRUE(out == expected) << "gather_rows_to, shift " << shift;

      const std::uint64_t written = std::min(count, table_rows);
      std::vector<std::byte*> targets;
      for (const std::uint32_t row : permutation(table_rows, width + 1)) targets.push_back(table.data() + shift + row * width);
      targets.resize(written);
      std::vector<std::uint32_t> sources;
      for (std::uint64_t i = 0; i < written; ++i)
        sources.push_back(static_cast<std::uint32_t>(random() % count));  // a source may serve twice
      Bytes expected_table = table;
      for (std::uint64_t i = 0; i < written; ++i)
        std::memcpy(expected_table.data() + (targets[i] - table.data()), out.data() + shift + sources[i] * width, width);
      scatter_rows(targets, sources, width, out.data() + shift, pool);
      ASSERT_TRUE(table == expected_table) << "scatter_rows, shift " << shift;
    }
  }
}

class RowCount : public testing::TestWithParam<std::uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Edges, RowCount,
                         testing::Values(0, 1, 2, 7, 8, 9, 31, 32, 33, 255, 256, 257, 65535, 65536, 65537, 70000));

TEST_P(RowCount, AreGathered) {
  constexpr std::uint64_t kWidth = 12;
  const Bytes table = random_bytes(100 * kWidth, 1);
  ThreadPool pool(4);
  std::vector<const std::byte*> rows;
  for (std::uint64_t i = 0; i < GetParam(); ++i) rows.push_back(table.data() + i * 37 % 100 * kWidth);
  Bytes out(GetParam() * kWidth + 1, std::byte{0x55});
  gather_rows(rows, kWidth, out.data(), pool);
  for (std::uint64_t i = 0; i < GetParam(); ++i) ASSERT_EQ(std::memcmp(out.data() + i * kWidth, rows[i], kWidth), 0) << i;
  EXPECT_EQ(out.back(), std::byte{0x55});
}

// Outputs above 32 MiB are written past the caches: whole, in place, and nothing beside them.
TEST(Rows, LargeOutputsAreTheSame) {
  constexpr std::uint64_t kTotal = std::uint64_t{34} << 20;
  const Bytes table = random_bytes(1024 * 1000, 5);
  ThreadPool pool(3);
  for (const std::uint64_t width : {48U, 80U, 512U, 1024U}) {
    const std::uint64_t count = kTotal / width;
    std::vector<const std::byte*> rows(count);
    std::mt19937_64 random(width);
    for (auto& row : rows) row = table.data() + random() % (table.size() - width);
    const std::vector<std::uint32_t> places = permutation(count, 3);
    for (const std::uint64_t shift : {0U, 16U, 1U}) {
      Bytes room(count * width + 192, std::byte{0xEE});
      std::byte* const out = room.data() + (64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64) + shift;
      gather_rows(rows, width, out, pool);
      for (std::uint64_t i = 0; i < count; ++i)
        ASSERT_EQ(std::memcmp(out + i * width, rows[i], width), 0) << width << " + " << shift << ": " << i;
      EXPECT_EQ(out[-1], std::byte{0xEE});
      EXPECT_EQ(out[count * width], std::byte{0xEE});

      gather_rows_to(rows, places, width, out, pool);
      for (std::uint64_t i = 0; i < count; ++i)
        ASSERT_EQ(std::memcmp(out + places[i] * width, rows[i], width), 0) << width << ": " << i;
      EXPECT_EQ(out[-1], std::byte{0xEE});
      EXPECT_EQ(out[count * width], std::byte{0xEE});

      std::vector<std::byte*> targets(count);
      for (std::uint64_t i = 0; i < count; ++i) targets[i] = out + i * width;
      std::vector<std::uint32_t> sources(count);
      for (std::uint64_t i = 0; i < count; ++i) sources[i] = static_cast<std::uint32_t>(i * 7 % (table.size() / width));
      scatter_rows(targets, sources, width, table.data(), pool);
      for (std::uint64_t i = 0; i < count; ++i)
        ASSERT_EQ(std::memcmp(targets[i], table.data() + sources[i] * width, width), 0) << width << ": " << i;
      EXPECT_EQ(out[-1], std::byte{0xEE});
      EXPECT_EQ(out[count * width], std::byte{0xEE});
    }
  }
}

TEST(Rows, OffsetsAreWiderThan32Bits) {
  constexpr std::uint64_t kWidth = 8960 * 4;
  constexpr std::uint64_t kRows = 262144;
  void* const map = mmap(nullptr, kRows * kWidth, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(map, MAP_FAILED);
  auto* const table = static_cast<std::byte*>(map);
  const std::vector<std::uint32_t> ids{239673, 239674, 239675, 262143};
  ThreadPool pool(2);
  const Bytes in = random_bytes(ids.size() * kWidth, 9);
  std::vector<const std::byte*> rows;
  for (std::size_t i = 0; i < ids.size(); ++i) rows.push_back(in.data() + i * kWidth);
  gather_rows_to(rows, ids, kWidth, table, pool);
  for (std::size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(std::memcmp(table + ids[i] * kWidth, rows[i], kWidth), 0);
  Bytes back(in.size());
  std::vector<std::byte*> targets;
  for (std::size_t i = 0; i < ids.size(); ++i) targets.push_back(back.data() + i * kWidth);
  scatter_rows(targets, ids, kWidth, table, pool);
  EXPECT_TRUE(back == in);

  // The rows of a sum and of a step, found by position.
  const Batch batch{{7}, {239674, 262143}, {0, 2}};
  auto* const float_rows = reinterpret_cast<float*>(table);
  for (std::uint64_t j = 0; j < 8960; ++j) {
    float_rows[239674ULL * 8960 + j] = 1.0F;
    float_rows[262143ULL * 8960 + j] = 2.5F;
  }
  std::vector<float> row(8960, 10.0F);
  std::byte* const address = reinterpret_cast<std::byte*>(row.data());
  add_rows(std::span(&address, 1), batch, 0, 8960, DType::kFloat32, table, pool);
  EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](float value) { return value == 13.5F; }));
  const StepScalars scalars{.lr = 2.0};
  step_rows(std::span(&address, 1), batch, 0, RecordLayout{8960, kWidth, DType::kFloat32, 0, {}}, scalars, table, DType::kFloat32,
            pool);
  EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](float value) { return value == 6.5F; }));

  // The same bytes as a table of bytes: element numbers above 2^32.
  std::vector<std::uint8_t> sum(kWidth, 0);
  std::byte* const sum_address = reinterpret_cast<std::byte*>(sum.data());
  add_rows(std::span(&sum_address, 1), batch, 0, kWidth, DType::kUInt8, table, pool);
  for (std::uint64_t j = 0; j < kWidth; ++j) {
    const auto byte = [&](std::uint64_t row_number) { return static_cast<unsigned>(table[row_number * kWidth + j]); };
    ASSERT_EQ(sum[j], (byte(239674) + byte(262143)) % 256) << j;
  }
  munmap(map, kRows * kWidth);
}

TEST(Rows, NoRowsAndNoBytesAreNothing) {
  ThreadPool pool(2);
  std::byte byte{0x11};
  gather_rows({}, 16, &byte, pool);
  gather_rows_to({}, {}, 16, &byte, pool);
  scatter_rows({}, {}, 16, &byte, pool);
  const std::byte* const row = &byte;
  gather_rows(std::span(&row, 1), 0, nullptr, pool);
  const Batch none = make_batch({}, pool);
  add_rows({}, none, 0, 4, DType::kFloat32, nullptr, pool);
  step_rows({}, none, 0, RecordLayout{4, 16, DType::kFloat32, 0, {}}, StepScalars{}, nullptr, DType::kFloat32, pool);
  EXPECT_EQ(byte, std::byte{0x11});
}

TEST(Rows, CountsThatDisagreeAreRefused) {
  ThreadPool pool(1);
  std::byte bytes[8]{};
  std::byte* const rows[] = {bytes, bytes + 4};
  const std::byte* const const_rows[] = {bytes, bytes + 4};
  const std::uint32_t one[] = {0};
  EXPECT_THROW(gather_rows_to(const_rows, one, 4, bytes, pool), InvalidArgument);
  EXPECT_THROW(scatter_rows(rows, one, 4, bytes, pool), InvalidArgument);
  const Batch batch = make_batch(std::vector<std::uint64_t>{1, 2}, pool);
  EXPECT_THROW(add_rows(rows, batch, 1, 1, DType::kFloat32, bytes, pool), InvalidArgument);
  EXPECT_THROW(add_rows(rows, batch, 3, 1, DType::kFloat32, bytes, pool), InvalidArgument);
}

// --- add, step: against loops that say what the header says ---

struct NaiveSum {
  template <class A, class T>
  static A of(const std::vector<T>& in, const Batch& batch, std::uint64_t group, std::uint64_t dim, std::uint64_t column) {
    A sum{};
    for (std::uint32_t k = batch.starts[group]; k < batch.starts[group + 1]; ++k) {
      const A addend = static_cast<A>(in[batch.positions[k] * dim + column]);
      sum = k == batch.starts[group] ? addend : static_cast<A>(sum + addend);
    }
    return sum;
  }
};

template <class T>
struct Of;
template <>
struct Of<float> {
  static constexpr DType dtype = DType::kFloat32;
  using sum = float;
};
template <>
struct Of<double> {
  static constexpr DType dtype = DType::kFloat64;
  using sum = double;
};
template <>
struct Of<Float16> {
  static constexpr DType dtype = DType::kFloat16;
  using sum = float;
};
template <>
struct Of<BFloat16> {
  static constexpr DType dtype = DType::kBFloat16;
  using sum = float;
};
template <>
struct Of<std::int8_t> {
  static constexpr DType dtype = DType::kInt8;
  using sum = std::uint8_t;
};
template <>
struct Of<std::uint8_t> {
  static constexpr DType dtype = DType::kUInt8;
  using sum = std::uint8_t;
};
template <>
struct Of<std::int32_t> {
  static constexpr DType dtype = DType::kInt32;
  using sum = std::uint32_t;
};
template <>
struct Of<std::int64_t> {
  static constexpr DType dtype = DType::kInt64;
  using sum = std::uint64_t;
};

template <class T>
std::vector<T> random_values(std::uint64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> values(count);
  for (T& value : values) {
    if constexpr (std::is_integral_v<T>)
      value = static_cast<T>(random());
    else
      value = static_cast<T>(static_cast<float>(std::normal_distribution<double>()(random)));
  }
  return values;
}

// A batch with `groups` distinct keys; some are drawn often, `heavy` of the ids are all the same one.
Batch some_batch(std::uint64_t count, std::uint64_t groups, std::uint64_t heavy, ThreadPool& pool) {
  std::mt19937_64 random(count * 31 + groups);
  std::vector<std::uint64_t> keys(count);
  for (std::uint64_t& key : keys) key = std::min(random() % groups, random() % groups);
  for (std::uint64_t i = 0; i < heavy; ++i) keys[random() % count] = groups / 2;
  return make_batch(keys, pool);
}

const std::byte* bytes_of(const auto& vector) { return reinterpret_cast<const std::byte*>(vector.data()); }

template <class T>
class AddRows : public testing::Test {};
using AllTypes = testing::Types<float, double, Float16, BFloat16, std::int8_t, std::uint8_t, std::int32_t, std::int64_t>;
TYPED_TEST_SUITE(AddRows, AllTypes);

TYPED_TEST(AddRows, SumsInOrderOfPositionAndRoundsOnce) {
  using T = TypeParam;
  using A = typename Of<T>::sum;
  for (const std::uint64_t dim : {1U, 2U, 3U, 7U, 16U, 17U, 100U, 256U, 257U, 301U}) {
    ThreadPool one(1);
    const std::uint64_t count = 700;
    const Batch batch = some_batch(count, 200, 100, one);
    const std::vector<T> in = random_values<T>(count * dim, dim);
    const std::vector<T> before = random_values<T>(batch.distinct() * dim, dim + 1);
    std::vector<T> expected = before;
    for (std::uint64_t u = 0; u < batch.distinct(); ++u)
      for (std::uint64_t j = 0; j < dim; ++j)
        expected[u * dim + j] =
            static_cast<T>(static_cast<A>(static_cast<A>(before[u * dim + j]) + NaiveSum::of<A>(in, batch, u, dim, j)));
    for (const VectorLevel level : levels())
      for (const unsigned threads : {1U, 5U})
        for (const std::uint64_t shift : {0U, 1U}) {  // rows and input may lie anywhere
          const AtLevel at(level);
          ThreadPool pool(threads);
          const std::uint64_t row_bytes = dim * sizeof(T);
          Bytes table(batch.distinct() * row_bytes + shift);
          std::memcpy(table.data() + shift, before.data(), table.size() - shift);
          Bytes moved(in.size() * sizeof(T) + shift);
          std::memcpy(moved.data() + shift, in.data(), moved.size() - shift);
          std::vector<std::byte*> rows;
          for (std::uint64_t u = 0; u < batch.distinct(); ++u) rows.push_back(table.data() + shift + u * row_bytes);
          // In two stretches, as a batch that does not fit its frames.
          const std::uint64_t half = batch.distinct() / 2;
          add_rows(std::span(rows).first(half), batch, 0, dim, Of<T>::dtype, moved.data() + shift, pool);
          add_rows(std::span(rows).subspan(half), batch, half, dim, Of<T>::dtype, moved.data() + shift, pool);
          ASSERT_EQ(std::memcmp(table.data() + shift, expected.data(), table.size() - shift), 0)
              << "dim " << dim << ", level " << int(level) << ", threads " << threads << ", shift " << shift;
        }
  }
}

TEST(AddRowsTo, OneRow100000TimesCountsExactly) {
  for (const unsigned threads : {1U, 2U, 4U}) {
    ThreadPool pool(threads);
    constexpr std::uint64_t kDim = 67;
    const Batch batch = make_batch(std::vector<std::uint64_t>(100000, 5), pool);
    const std::vector<float> ones(100000 * kDim, 1.0F);
    std::vector<float> row(kDim, 0.0F);
    std::byte* const address = reinterpret_cast<std::byte*>(row.data());
    add_rows(std::span(&address, 1), batch, 0, kDim, DType::kFloat32, bytes_of(ones), pool);
    EXPECT_THAT(row, testing::Each(100000.0F));
  }
}

TEST(AddRowsTo, HalfPrecisionSumsDoNotStall) {
  ThreadPool pool(2);
  const Batch batch =
      make_batch(std::vector<std::uint64_t>(4096, 0), pool);  // in float16 steps of 1 end at 2048, in bfloat16 at 256
  const std::vector<Float16> ones(4096, Float16(1.0F));
  Float16 row(0.0F);
  std::byte* address = reinterpret_cast<std::byte*>(&row);
  add_rows(std::span(&address, 1), batch, 0, 1, DType::kFloat16, bytes_of(ones), pool);
  EXPECT_EQ(static_cast<float>(row), 4096.0F);
  const std::vector<BFloat16> brain_ones(4096, BFloat16(1.0F));
  BFloat16 brain(0.0F);
  address = reinterpret_cast<std::byte*>(&brain);
  add_rows(std::span(&address, 1), batch, 0, 1, DType::kBFloat16, bytes_of(brain_ones), pool);
  EXPECT_EQ(static_cast<float>(brain), 4096.0F);
}

TEST(AddRowsTo, IntegersWrap) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{3, 3}, pool);
  const std::vector<std::int8_t> in{100, 100};
  std::int8_t row = 100;
  std::byte* address = reinterpret_cast<std::byte*>(&row);
  add_rows(std::span(&address, 1), batch, 0, 1, DType::kInt8, bytes_of(in), pool);
  EXPECT_EQ(row, 44);  // 300 - 256
  const std::vector<std::int64_t> large{std::numeric_limits<std::int64_t>::max(), 1};
  std::int64_t wide = 5;
  address = reinterpret_cast<std::byte*>(&wide);
  add_rows(std::span(&address, 1), batch, 0, 1, DType::kInt64, bytes_of(large), pool);
  EXPECT_EQ(wide, std::numeric_limits<std::int64_t>::min() + 5);
}

TEST(AddRowsTo, ASumBeginsWithItsFirstAddend) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{0}, pool);
  const std::vector<float> in{-0.0F};
  float row = -0.0F;
  std::byte* const address = reinterpret_cast<std::byte*>(&row);
  add_rows(std::span(&address, 1), batch, 0, 1, DType::kFloat32, bytes_of(in), pool);
  EXPECT_TRUE(std::signbit(row));
}

template <class W, class G>
struct Pair {
  using Weight = W;
  using Gradient = G;
};
template <class P>
class StepRows : public testing::Test {};
using Pairs = testing::Types<Pair<float, float>, Pair<double, double>, Pair<Float16, Float16>, Pair<Float16, float>,
                             Pair<BFloat16, BFloat16>, Pair<BFloat16, float>>;
TYPED_TEST_SUITE(StepRows, Pairs);

template <class A>
void naive_step(const StepScalars& s, A gradient, A& weight, A& state) {
  const A lr = static_cast<A>(s.lr);
  const A momentum = static_cast<A>(s.momentum);
  if (s.weight_decay != 0) gradient = gradient + static_cast<A>(s.weight_decay) * weight;
  if (s.kind == StepScalars::Kind::kAdagrad) {
    state = state + gradient * gradient;
    weight = weight - lr * gradient / (std::sqrt(state) + static_cast<A>(s.eps));
    return;
  }
  A direction = gradient;
  if (s.kind == StepScalars::Kind::kSgdMomentum) {
    state = momentum * state + gradient;
    direction = s.nesterov ? gradient + momentum * state : state;
  }
  weight = weight - lr * direction;
}

std::vector<StepScalars> all_scalars() {
  using Kind = StepScalars::Kind;
  return {{.kind = Kind::kSgd, .lr = 0.1},
          {.kind = Kind::kSgd, .lr = 0.1, .weight_decay = 0.01},
          {.kind = Kind::kSgdMomentum, .lr = 0.1, .momentum = 0.9},
          {.kind = Kind::kSgdMomentum, .nesterov = true, .lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
          {.kind = Kind::kAdagrad, .lr = 0.1, .eps = 1e-10},
          {.kind = Kind::kAdagrad, .lr = 0.1, .weight_decay = 0.01, .eps = 1e-3}};
}

// A multiplication and an addition that were fused would show here: the loops above, compiled for baseline x86-64, cannot fuse
// them.
TYPED_TEST(StepRows, EqualTheFormulaBitForBitOnEveryVectorWidthAndNumberOfThreads) {
  using W = typename TypeParam::Weight;
  using G = typename TypeParam::Gradient;
  using A = std::conditional_t<std::is_same_v<W, double>, double, float>;
  for (const std::uint64_t dim : {1U, 3U, 16U, 17U, 100U, 257U, 300U}) {
    ThreadPool one(1);
    const std::uint64_t count = 500;
    const Batch batch = some_batch(count, 150, 80, one);
    const std::vector<G> grads = random_values<G>(count * dim, dim);
    RecordLayout layout{.dim = dim, .dtype = Of<W>::dtype, .states = 1};
    layout.state_offset[0] = (dim * sizeof(W) + sizeof(A) - 1) / sizeof(A) * sizeof(A);
    layout.stride = layout.state_offset[0] + dim * sizeof(A) + sizeof(A);
    Bytes before(batch.distinct() * layout.stride, std::byte{0xEE});
    const std::vector<W> weights = random_values<W>(batch.distinct() * dim, dim + 1);
    const std::vector<A> states = random_values<A>(batch.distinct() * dim, dim + 2);
    for (std::uint64_t u = 0; u < batch.distinct(); ++u)
      for (std::uint64_t j = 0; j < dim; ++j) {
        const A state = std::abs(states[u * dim + j]);
        std::memcpy(before.data() + u * layout.stride + j * sizeof(W), &weights[u * dim + j], sizeof(W));
        std::memcpy(before.data() + u * layout.stride + layout.state_offset[0] + j * sizeof(A), &state, sizeof(A));
      }
    for (const StepScalars& scalars : all_scalars()) {
      Bytes expected = before;
      for (std::uint64_t u = 0; u < batch.distinct(); ++u)
        for (std::uint64_t j = 0; j < dim; ++j) {
          std::byte* const weight_at = expected.data() + u * layout.stride + j * sizeof(W);
          std::byte* const state_at = expected.data() + u * layout.stride + layout.state_offset[0] + j * sizeof(A);
          A weight = static_cast<A>(weights[u * dim + j]);
          A state;
          std::memcpy(&state, state_at, sizeof state);
          naive_step<A>(scalars, NaiveSum::of<A>(grads, batch, u, dim, j), weight, state);
          const W rounded(weight);
          std::memcpy(weight_at, &rounded, sizeof rounded);
          if (scalars.kind != StepScalars::Kind::kSgd) std::memcpy(state_at, &state, sizeof state);
        }
      for (const VectorLevel level : levels())
        for (const unsigned threads : {1U, 4U}) {
          const AtLevel at(level);
          ThreadPool pool(threads);
          Bytes table = before;
          std::vector<std::byte*> records;
          for (std::uint64_t u = 0; u < batch.distinct(); ++u) records.push_back(table.data() + u * layout.stride);
          const std::uint64_t half = batch.distinct() / 3;
          step_rows(std::span(records).first(half), batch, 0, layout, scalars, bytes_of(grads), Of<G>::dtype, pool);
          step_rows(std::span(records).subspan(half), batch, half, layout, scalars, bytes_of(grads), Of<G>::dtype, pool);
          ASSERT_TRUE(table == expected) << "dim " << dim << ", kind " << int(scalars.kind) << ", level " << int(level)
                                         << ", threads " << threads;
        }
    }
  }
}

// Long groups are cut by columns among the threads: same bits.
TEST(StepRowsOf, PopularRowsGiveTheSameBitsOnEveryNumberOfThreads) {
  constexpr std::uint64_t kDim = 129;
  ThreadPool one(1);
  const std::uint64_t count = 20000;
  std::vector<std::uint64_t> keys(count);
  for (std::uint64_t i = 0; i < count; ++i) keys[i] = i % 3 == 0 ? 7 : i % 3 == 1 ? 11 : i;
  const Batch batch = make_batch(keys, one);
  const std::vector<float> grads = random_values<float>(count * kDim, 4);
  RecordLayout layout{.dim = kDim, .stride = 2 * kDim * 4, .dtype = DType::kFloat32, .states = 1};
  layout.state_offset[0] = kDim * 4;
  const StepScalars scalars{.kind = StepScalars::Kind::kAdagrad, .lr = 0.1, .eps = 1e-10};
  const std::vector<float> before = random_values<float>(batch.distinct() * 2 * kDim, 6);
  std::vector<float> expected;
  for (const unsigned threads : {1U, 2U, 3U, 8U}) {
    ThreadPool pool(threads);
    std::vector<float> table = before;
    for (float& value : table) value = std::abs(value);
    std::vector<std::byte*> records;
    for (std::uint64_t u = 0; u < batch.distinct(); ++u)
      records.push_back(reinterpret_cast<std::byte*>(table.data() + u * 2 * kDim));
    step_rows(records, batch, 0, layout, scalars, bytes_of(grads), DType::kFloat32, pool);
    if (expected.empty()) {
      expected = table;
      for (const std::uint64_t u : {std::uint64_t{0}, batch.distinct() / 2}) {  // and they are the right ones
        float weight = std::abs(before[u * 2 * kDim + 128]);
        float state = std::abs(before[u * 2 * kDim + kDim + 128]);
        naive_step<float>(scalars, NaiveSum::of<float>(grads, batch, u, kDim, 128), weight, state);
        EXPECT_EQ(table[u * 2 * kDim + 128], weight);
        EXPECT_EQ(table[u * 2 * kDim + kDim + 128], state);
      }
    }
    ASSERT_EQ(std::memcmp(table.data(), expected.data(), table.size() * sizeof(float)), 0) << threads << " threads";
  }
}

TEST(StepRowsOf, OtherGradientTypesAreRefusedNamingBoth) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{0}, pool);
  double room[4] = {};
  std::byte* const record = reinterpret_cast<std::byte*>(room);
  const DType all[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                       DType::kInt8,    DType::kUInt8,   DType::kInt32,    DType::kInt64};
  int accepted = 0;
  for (const DType weight : all)
    for (const DType grad : all) {
      const RecordLayout layout{.dim = 1, .stride = 16, .dtype = weight};
      const auto step = [&] { step_rows(std::span(&record, 1), batch, 0, layout, StepScalars{}, record, grad, pool); };
      if (is_floating(weight) && (grad == weight || (grad == DType::kFloat32 && item_size(weight) == 2))) {
        step();
        ++accepted;
        continue;
      }
      try {
        step();
        ADD_FAILURE() << dtype_name(weight) << " took " << dtype_name(grad);
      } catch (const DTypeError& error) {
        EXPECT_THAT(error.what(), testing::HasSubstr(std::string(dtype_name(weight))));
        EXPECT_THAT(error.what(), testing::HasSubstr(std::string(dtype_name(grad))));
      }
    }
  EXPECT_EQ(accepted, 6);
}

TEST(StepRowsOf, AnOptimizerWithStateNeedsAStateField) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{0}, pool);
  float room[4] = {};
  std::byte* const record = reinterpret_cast<std::byte*>(room);
  const RecordLayout layout{.dim = 1, .stride = 4, .dtype = DType::kFloat32};
  EXPECT_THROW(step_rows(std::span(&record, 1), batch, 0, layout, StepScalars{.kind = StepScalars::Kind::kAdagrad}, record,
                         DType::kFloat32, pool),
               InvalidArgument);
}

// A step on a half-precision row is computed in float and rounded once; its state does not lose what the row cannot hold.
TEST(StepRowsOf, StateOfHalfRowsKeepsGrowing) {
  ThreadPool pool(1);
  const Batch batch = make_batch(std::vector<std::uint64_t>{0}, pool);
  struct Record {
    Float16 weight;
    std::uint16_t padding;
    float sum;
  } record{Float16(1.0F), 0, 2048.0F};
  std::byte* const address = reinterpret_cast<std::byte*>(&record);
  RecordLayout layout{.dim = 1, .stride = sizeof(Record), .dtype = DType::kFloat16, .states = 1};
  layout.state_offset[0] = 4;
  const std::vector<Float16> grads{Float16(1.0F)};
  for (int i = 0; i < 10; ++i)
    step_rows(std::span(&address, 1), batch, 0, layout, StepScalars{.kind = StepScalars::Kind::kAdagrad, .lr = 0.1},
              bytes_of(grads), DType::kFloat16, pool);
  EXPECT_EQ(record.sum, 2058.0F);
}

}  // namespace
}  // namespace embermap
