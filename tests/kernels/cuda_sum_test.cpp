// add and step on the GPU against the CPU's add_rows and step_rows, bit for bit.
#include <array>

#include "base/half.hpp"
#include "kernels/batch.hpp"
#include "kernels/optimizer.hpp"
#include "kernels/rows.hpp"
#include "tests/kernels/cuda_test_support.hpp"

namespace embermap::test {
namespace {

constexpr std::array kDtypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64,
                                DType::kInt8,    DType::kUInt8,   DType::kInt32,    DType::kInt64};

// Elements of `dtype`: floats of very different sizes, so that every order of additions has its own result, some of them -0 and
// subnormal.
void fill(Random& random, DType dtype, std::byte* out, std::uint64_t count) {
  std::normal_distribution<double> normal;
  for (std::uint64_t i = 0; i < count; ++i) {
    std::byte* const at = out + i * item_size(dtype);
    if (!is_floating(dtype)) {
      const std::uint64_t word = random();
      std::memcpy(at, &word, item_size(dtype));
      continue;
    }
    const std::uint64_t kind = random() % 16;
    double value = normal(random) * std::ldexp(1.0, static_cast<int>(random() % 12) - 6);
    if (kind == 0) value = -0.0;
    if (kind == 1)
      value = dtype == DType::kFloat64 ? std::ldexp(normal(random), -1040)
                                       : std::ldexp(normal(random), dtype == DType::kFloat16 ? -20 : -135);
    if (dtype == DType::kFloat64) {
      std::memcpy(at, &value, sizeof value);
      continue;
    }
    const auto single = static_cast<float>(value);
    const Float16 half(single);
    const BFloat16 brain(single);
    if (dtype == DType::kFloat32) std::memcpy(at, &single, sizeof single);
    if (dtype == DType::kFloat16) std::memcpy(at, &half, sizeof half);
    if (dtype == DType::kBFloat16) std::memcpy(at, &brain, sizeof brain);
  }
}

// As training could leave it: means and sums of squares are not negative, whose roots would be NaN of other bits here and there.
void fill_state(Random& random, const StateField& field, DType dtype, std::byte* out, std::uint64_t count) {
  if (field.shape == StateShape::kCount) {
    const auto steps = static_cast<std::int32_t>(random() % 3 == 0 ? 0 : random() % 2000);
    std::memcpy(out, &steps, sizeof steps);
    return;
  }
  std::vector<std::byte> values(count * item_size(dtype));
  fill(random, dtype, values.data(), count);
  const bool either = field.name == "momentum_buffer" || field.name == "exp_avg" || field.name == "ax" || field.name == "prev";
  for (std::uint64_t i = 0; i < count && !either; ++i) values[(i + 1) * item_size(dtype) - 1] &= std::byte{0x7F};
  if (field.name == "grad_avg") std::fill(values.begin(), values.end(), std::byte{0});  // its square is below the mean of squares
  if (field.name == "mu_product") {                                                     // in (0, 1)
    const double product = 1.0 / static_cast<double>(2 + random() % 100);
    const auto single = static_cast<float>(product);
    if (dtype == DType::kFloat64)
      std::memcpy(values.data(), &product, sizeof product);
    else
      std::memcpy(values.data(), &single, sizeof single);
  }
  std::memcpy(out, values.data(), values.size());
}

class CudaSum : public GpuTest {
 protected:
  Batch cpu_batch(const std::vector<std::int64_t>& ids) {
    const std::vector<std::uint64_t> keys(ids.begin(), ids.end());
    return embermap::make_batch(keys, pool);
  }
  static std::vector<std::byte*> records(const Batch& batch, const SlabTable& table, std::vector<std::byte>& slab) {
    std::vector<std::byte*> out;
    for (const std::uint64_t key : batch.keys) out.push_back(slab.data() + table.record_offset(static_cast<std::int64_t>(key)));
    return out;
  }

  void check_add(DType dtype, std::uint64_t dim, const std::vector<std::int64_t>& ids, std::uint64_t rows, Random& random,
                 std::uint64_t in_offset = 0) {
    SCOPED_TRACE(testing::Message() << "add " << dtype_name(dtype) << " x " << dim << ", " << ids.size() << " ids, input at "
                                    << in_offset);
    const std::uint64_t row_bytes = dim * item_size(dtype);
    SlabTable table(random, {.rows = rows, .rows_per_page = 4, .stride = row_bytes});
    for (std::uint64_t row = 0; row < rows; ++row) fill(random, dtype, table.record(static_cast<std::int64_t>(row)), dim);
    std::vector<std::byte> in(in_offset + ids.size() * row_bytes);
    fill(random, dtype, in.data() + in_offset, ids.size() * dim);
    std::vector<std::byte> expected = table.content();
    const Batch batch = cpu_batch(ids);
    add_rows(records(batch, table, expected), batch, 0, dim, dtype, in.data() + in_offset, pool);

    const PinnedRange pinned(table.slab(), table.bytes());
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    const DeviceArray<std::int64_t> device(ids);
    const DeviceArray<std::byte> device_in(in);
    const auto on_gpu = engine->make_batch(device.data(), ids.size(), rows, 4, "t", stream);
    fetch_all(*engine, *on_gpu, table, true, 0, row_bytes, pool, stream);
    engine->add(*on_gpu, dim, dtype, device_in.data() + in_offset, stream);
    write_back_all(*engine, *on_gpu, table, true, pool, stream);
    engine->wait(stream);
    ASSERT_EQ(first_difference(table.content(), expected), -1);
  }

  // `gap`: bytes between weight and state, so that fields lie at alignments of their own; `tail`: behind the state.
  void check_step(const Optimizer& optimizer, DType dtype, DType grad_dtype, std::uint64_t dim,
                  const std::vector<std::int64_t>& ids, std::uint64_t rows, Random& random, std::uint64_t gap = 0,
                  std::uint64_t tail = 0, std::uint64_t grad_offset = 0) {
    SCOPED_TRACE(testing::Message() << optimizer_name(optimizer) << " on " << dtype_name(dtype) << " x " << dim << ", gradients "
                                    << dtype_name(grad_dtype) << " at " << grad_offset << ", " << ids.size() << " ids, gap "
                                    << gap << ", tail " << tail);
    const std::vector<StateField> states = state_fields(optimizer);
    const DType state = state_dtype(dtype);
    RecordLayout layout{.dim = dim, .dtype = dtype, .states = static_cast<std::uint32_t>(states.size())};
    std::uint64_t bytes = dim * item_size(dtype);
    const std::uint64_t longest = states.empty() ? item_size(dtype) : item_size(state);
    for (std::size_t i = 0; i < states.size(); ++i) {
      const std::uint64_t item = states[i].shape == StateShape::kCount ? 4 : item_size(state);
      layout.state_offset[i] = round_up(bytes, item) + (i == 0 ? gap : 0);
      bytes = layout.state_offset[i] + (states[i].shape == StateShape::kElements ? dim : 1) * item;
    }
    bytes = round_up(bytes, longest);
    layout.stride = bytes + tail;
    SlabTable table(random, {.rows = rows, .rows_per_page = 4, .stride = layout.stride});
    for (std::uint64_t row = 0; row < rows; ++row) {
      std::byte* const record = table.record(static_cast<std::int64_t>(row));
      fill(random, dtype, record, dim);
      for (std::size_t i = 0; i < states.size(); ++i)
        fill_state(random, states[i], state, record + layout.state_offset[i], states[i].shape == StateShape::kElements ? dim : 1);
    }
    std::vector<std::byte> grads(grad_offset + ids.size() * dim * item_size(grad_dtype));
    fill(random, grad_dtype, grads.data() + grad_offset, ids.size() * dim);
    const StepScalars scalars = step_scalars(optimizer, 3, 0x123456789ABCDEFULL);
    std::vector<std::byte> expected = table.content();
    const Batch batch = cpu_batch(ids);
    step_rows(records(batch, table, expected), batch, 0, layout, scalars, grads.data() + grad_offset, grad_dtype, pool);

    const PinnedRange pinned(table.slab(), table.bytes());
    ASSERT_TRUE(pinned.registered()) << pinned.error();
    const DeviceArray<std::int64_t> device(ids);
    const DeviceArray<std::byte> device_grads(grads);
    const auto on_gpu = engine->make_batch(device.data(), ids.size(), rows, 4, "t", stream);
    fetch_all(*engine, *on_gpu, table, true, 0, bytes, pool, stream);
    engine->step(*on_gpu, layout, scalars, device_grads.data() + grad_offset, grad_dtype, stream);
    write_back_all(*engine, *on_gpu, table, true, pool, stream);
    engine->wait(stream);
    ASSERT_EQ(first_difference(table.content(), expected), -1);
  }
};

const std::array<Optimizer, 5> kOptimizers = {
    Optimizer{Sgd{.lr = 0.05}}, Optimizer{Sgd{.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01}},
    Optimizer{Sgd{.lr = 0.05, .momentum = 0.9, .nesterov = true}},
    Optimizer{Adagrad{.lr = 0.05, .lr_decay = 0.001, .weight_decay = 0.001}}, Optimizer{Adagrad{.lr = 0.1, .eps = 1e-8}}};

// Every kind, and every option that changes what is computed.
std::vector<Optimizer> all_optimizers() {
  constexpr StepOf kRow = StepOf::kRow;
  const RowOptions clipped{.clip_value = 2.0, .clip_row = 5.0};
  return {Sgd{.lr = 0.05, .maximize = true, .row = {.clip_value = 0.5}},
          Sgd{.lr = 0.05, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.01},
          Sgd{.lr = 0.05, .momentum = 0.9, .dampening = 0.25, .step = kRow, .row = clipped},
          Adagrad{.lr = 0.05, .lr_decay = 0.1, .weight_decay = 0.01, .step = kRow},
          Adagrad{.lr = 0.05, .row = {.clip_row = 3.0}},
          RowWiseAdagrad{.lr = 0.05, .lr_decay = 0.1, .eps = 1e-8},
          RowWiseAdagrad{.lr = 0.05, .lr_decay = 0.1, .weight_decay = 0.1, .step = kRow, .row = clipped},
          Adadelta{.weight_decay = 0.01},
          Adadelta{.row = clipped},
          Adam{.weight_decay = 0.01},
          Adam{.amsgrad = true, .decoupled_weight_decay = true, .row = {.clip_value = 1.0}},
          Adam{.betas = {0.3, 0.9}, .amsgrad = true, .step = kRow},
          AdamW{},
          AdamW{.maximize = true, .step = kRow, .row = clipped},
          SparseAdam{},
          SparseAdam{.step = kRow},
          Adamax{.weight_decay = 0.01},
          Adamax{.step = kRow},
          NAdam{.weight_decay = 0.01},
          NAdam{.decoupled_weight_decay = true, .step = kRow},
          RAdam{.weight_decay = 0.01},
          RAdam{.decoupled_weight_decay = true, .step = kRow},
          Asgd{.lambd = 0.01, .t0 = 1},
          Asgd{.lambd = 0.01, .t0 = 10, .step = kRow},
          RmsProp{.weight_decay = 0.01},
          RmsProp{.momentum = 0.9, .row = {.clip_row = 1.0}},
          RmsProp{.eps = 1e-2, .centered = true},
          RmsProp{.eps = 1e-2, .momentum = 0.9, .centered = true},
          Rprop{},
          Rprop{.maximize = true, .row = clipped}};
}

Optimizer rounding_by_chance(Optimizer optimizer) {
  std::visit(
      [](auto& o) {
        if constexpr (requires { o.row; }) o.row.stochastic_rounding = true;
      },
      optimizer);
  return optimizer;
}

std::vector<DType> gradients_of(DType dtype) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return {dtype, DType::kFloat32};
  return {dtype};
}

TEST_F(CudaSum, AddGivesTheBitsOfTheCpuForAllTypesAndWidths) {
  Random random(1);
  for (const DType dtype : kDtypes)
    for (const std::uint64_t dim : Values{1, 2, 3, 4, 5, 7, 17, 31, 32, 33, 100, 128, 257, 300, 301}) {
      check_add(dtype, dim, random_ids(random, 400, 120), 200, random);
      if (HasFatalFailure()) return;
    }
}

TEST_F(CudaSum, StepGivesTheBitsOfTheCpuForAllTypesAndWidths) {
  Random random(2);
  for (const Optimizer& optimizer : kOptimizers)
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64})
      for (const DType grad_dtype : gradients_of(dtype))
        for (const std::uint64_t dim : Values{1, 3, 4, 8, 17, 32, 33, 128, 300, 301}) {
          check_step(optimizer, dtype, grad_dtype, dim, random_ids(random, 300, 90), 150, random);
          if (HasFatalFailure()) return;
        }
}

TEST_F(CudaSum, EveryOptimizerGivesTheBitsOfTheCpu) {
  Random random(22);
  std::vector<std::int64_t> ids = random_ids(random, 200, 90);
  ids.insert(ids.end(), 700, 3);  // left to a block
  for (const Optimizer& optimizer : all_optimizers())
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64})
      for (const DType grad_dtype : gradients_of(dtype))
        for (const std::uint64_t dim : Values{1, 4, 17, 32, 128, 301}) {
          check_step(optimizer, dtype, grad_dtype, dim, ids, 100, random);
          if (dtype == DType::kFloat16 || dtype == DType::kBFloat16)
            check_step(rounding_by_chance(optimizer), dtype, grad_dtype, dim, ids, 100, random);
          if (HasFatalFailure()) return;
        }
}

TEST_F(CudaSum, WideRows) {
  Random random(3);
  for (const std::uint64_t dim : Values{1919, 4096, 65'537, 100'000}) {
    const std::vector<std::int64_t> ids = {2, 0, 2, 2, 3};
    for (const DType dtype : {DType::kUInt8, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      check_add(dtype, dim, ids, 5, random);
      if (HasFatalFailure()) return;
    }
    check_step(kOptimizers[3], DType::kFloat32, DType::kFloat32, dim, ids, 5, random);
    check_step(kOptimizers[1], DType::kBFloat16, DType::kFloat32, dim, ids, 5, random);
    check_step(AdamW{.step = StepOf::kRow, .row = {.clip_row = 3.0}}, DType::kFloat32, DType::kFloat32, dim, ids, 5, random);
    if (HasFatalFailure()) return;
  }
}

// Groups around the sizes where loads are batched, where a block takes over from a warp, and where its stages end.
TEST_F(CudaSum, GroupsOfEverySize) {
  Random random(4);
  for (const std::uint64_t size :
       Values{1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 512, 513, 1000, 4097}) {
    std::vector<std::int64_t> ids = random_ids(random, 100, 40);
    for (std::uint64_t row = 50; row < 56; ++row) ids.insert(ids.end(), size + row % 3, static_cast<std::int64_t>(row));
    std::shuffle(ids.begin(), ids.end(), random);
    for (const std::uint64_t dim : Values{1, 8, 31, 32, 33, 65}) {
      check_add(DType::kFloat32, dim, ids, 60, random);
      check_add(DType::kFloat64, dim, ids, 60, random);
      check_add(DType::kInt8, dim, ids, 60, random);
      check_step(kOptimizers[3], DType::kFloat16, DType::kFloat16, dim, ids, 60, random);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaSum, AHundredThousandPositionsOfOneRow) {
  Random random(5);
  std::vector<std::int64_t> ids(100'000, 5);
  check_add(DType::kFloat32, 3, ids, 8, random);
  for (std::uint64_t i = 0; i < ids.size(); i += 100) ids[i] = static_cast<std::int64_t>(i / 100 % 8);
  check_add(DType::kFloat32, 40, ids, 8, random);
  check_add(DType::kFloat16, 40, ids, 8, random);
  check_step(kOptimizers[2], DType::kFloat64, DType::kFloat64, 5, ids, 8, random);

  // Ones add up to their number.
  SlabTable table(random, {.rows = 8, .rows_per_page = 4, .stride = 4});
  std::memset(table.slab(), 0, table.bytes());
  const PinnedRange pinned(table.slab(), table.bytes());
  const std::vector<std::int64_t> fives(100'000, 5);
  const DeviceArray<std::int64_t> device(fives);
  const DeviceArray<float> ones(std::vector<float>(fives.size(), 1.0F));
  const auto batch = engine->make_batch(device.data(), fives.size(), 8, 4, "t", stream);
  fetch_all(*engine, *batch, table, pinned.registered(), 0, 4, pool, stream);
  engine->add(*batch, 1, DType::kFloat32, reinterpret_cast<const std::byte*>(ones.data()), stream);
  write_back_all(*engine, *batch, table, pinned.registered(), pool, stream);
  engine->wait(stream);
  float sum = 0;
  std::memcpy(&sum, table.record(5), sizeof sum);
  EXPECT_EQ(sum, 100'000.0F);
}

TEST_F(CudaSum, MinusZeroStaysMinusZero) {
  SlabTable table(*std::make_unique<Random>(6), {.rows = 1, .rows_per_page = 1, .stride = 4});
  const PinnedRange pinned(table.slab(), table.bytes());
  for (const std::uint64_t positions : Values{1, 5, 9, 400}) {
    const float minus_zero = -0.0F;
    std::memcpy(table.record(0), &minus_zero, sizeof minus_zero);
    const DeviceArray<std::int64_t> device(std::vector<std::int64_t>(positions, 0));
    const DeviceArray<float> in(std::vector<float>(positions, minus_zero));
    const auto batch = engine->make_batch(device.data(), positions, 1, 1, "t", stream);
    fetch_all(*engine, *batch, table, pinned.registered(), 0, 4, pool, stream);
    engine->add(*batch, 1, DType::kFloat32, reinterpret_cast<const std::byte*>(in.data()), stream);
    write_back_all(*engine, *batch, table, pinned.registered(), pool, stream);
    engine->wait(stream);
    EXPECT_EQ(std::memcmp(table.record(0), &minus_zero, sizeof minus_zero), 0) << positions << " positions";
  }
}

TEST_F(CudaSum, FieldsAndInputsAtEveryAlignment) {
  Random random(7);
  const std::vector<std::int64_t> ids = random_ids(random, 500, 60);
  for (const std::uint64_t dim : Values{4, 8, 12, 128}) {
    for (const std::uint64_t offset : Values{1, 2, 4, 8, 12}) {
      check_add(DType::kFloat32, dim, ids, 60, random, offset);
      check_add(DType::kFloat16, dim, ids, 60, random, offset);
      check_step(kOptimizers[3], DType::kFloat16, DType::kFloat32, dim, ids, 60, random, 0, 0, offset);
      if (HasFatalFailure()) return;
    }
    for (const std::uint64_t gap : Values{0, 4, 8, 16})
      for (const std::uint64_t tail : Values{0, 4, 8, 12, 100}) {
        check_step(kOptimizers[3], DType::kFloat32, DType::kFloat32, dim, ids, 60, random, gap, tail);
        check_step(kOptimizers[1], DType::kFloat16, DType::kFloat32, dim, ids, 60, random, gap, tail);
        if (HasFatalFailure()) return;
      }
  }
}

TEST_F(CudaSum, ManyRowsAndIds) {
  Random random(8);
  std::vector<std::int64_t> ids = random_ids(random, 70'001, 30'000);
  for (std::uint64_t i = 0; i < ids.size(); i += 3) ids[i] = static_cast<std::int64_t>(random() % 20);  // hot rows
  check_add(DType::kFloat32, 16, ids, 30'000, random);
  check_step(kOptimizers[3], DType::kFloat32, DType::kFloat32, 16, ids, 30'000, random);
}

}  // namespace
}  // namespace embermap::test
