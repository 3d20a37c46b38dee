// Ids and gradients in GPU memory.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include "kernels/cuda.hpp"
#include "nn/embedding.hpp"
#include "nn/embedding_bag.hpp"
#include "nn/table_optimizer.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr std::int64_t kRows = 5000;
constexpr std::int64_t kDim = 33;

class CudaTest : public TableTest {
 protected:
  void SetUp() override {
    const std::string absence = !torch::cuda::is_available() ? "torch sees no CUDA device"
                                : cuda_devices() == 0        ? cuda_absence()
                                                             : "";
    if (absence.empty()) {
      device_ = 0;
      return;
    }
    const char* required = std::getenv("EMBERMAP_REQUIRE_GPU");
    if (required != nullptr && *required != '\0') FAIL() << "EMBERMAP_REQUIRE_GPU is set, but " << absence;
    GTEST_SKIP() << absence;
  }

  static c10::Stream new_stream() {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(torch::Device(torch::kCUDA, 0));
  }
  static torch::Tensor some_ids(std::int64_t n) { return torch::randint(0, kRows, {n}, torch::kInt64); }

  const torch::Device gpu_{torch::kCUDA, 0};
};

TEST_F(CudaTest, RowsLieWhereTheIdsDo) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64, DType::kInt8, DType::kInt64}) {
    const Table table = make(kRows, kDim, {}, dtype);
    const auto embedding = std::make_shared<Embedding>(table);
    const torch::Tensor all = weights(table);
    for (const std::int64_t n : {0, 1, 31, 33, 4097}) {
      const torch::Tensor some = some_ids(n);
      const torch::Tensor rows = embedding->forward(some.to(gpu_));
      EXPECT_EQ(rows.device(), gpu_);
      EXPECT_TRUE(same(rows.cpu(), torch::embedding(all, some))) << dtype_name(dtype) << ", " << n << " ids";
    }
    const torch::Tensor narrow = torch::tensor({3, 0, 7}, torch::kInt32).view({1, 3});
    EXPECT_TRUE(same(embedding->forward(narrow.to(gpu_)).cpu(), torch::embedding(all, narrow)));
  }
}

TEST_F(CudaTest, RefusesABadIdAndGoesOn) {
  const Table table = make(kRows, kDim);
  const auto embedding = std::make_shared<Embedding>(table);
  torch::Tensor some = some_ids(1000);
  some[77] = kRows;
  some[78] = -1;
  try {
    embedding->forward(some.to(gpu_));
    FAIL() << "no exception";
  } catch (const RowIdError& e) {
    EXPECT_EQ(e.id(), kRows);
    EXPECT_EQ(e.position(), 77U);
  }
  EXPECT_TRUE(same(embedding->forward(ids({5}).to(gpu_)).detach().cpu(), weights(table).slice(0, 5, 6)));
}

TEST_F(CudaTest, TrainsWithTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    const Table on_gpu = make(kRows, kDim, Adagrad{.lr = 0.1}, dtype);
    const Table on_cpu = make(kRows, kDim, Adagrad{.lr = 0.1}, dtype);
    const auto gpu_rows = std::make_shared<Embedding>(on_gpu);
    const auto cpu_rows = std::make_shared<Embedding>(on_cpu);
    TableOptimizer gpu_optimizer({gpu_rows});
    TableOptimizer cpu_optimizer({cpu_rows});
    for (int step = 0; step < 5; ++step) {
      const torch::Tensor some = torch::cat({some_ids(3000), ids({7, 7, 7})});
      const torch::Tensor upstream = torch::randn({3003, kDim}).to(torch_dtype(dtype));
      gpu_optimizer.zero_grad();
      cpu_optimizer.zero_grad();
      gpu_rows->forward(some.to(gpu_)).backward(upstream.to(gpu_));
      cpu_rows->forward(some).backward(upstream);
      gpu_optimizer.step();
      cpu_optimizer.step();
    }
    EXPECT_TRUE(same(weights(on_gpu), weights(on_cpu))) << dtype_name(dtype);
  }
}

TEST_F(CudaTest, WorksInTheOrderOfTorchsStreams) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  torch::Tensor expected = weights(table);
  const auto embedding = std::make_shared<Embedding>(table);
  TableOptimizer optimizer({embedding});
  const torch::Tensor busy = torch::randn({2048, 2048}, gpu_);
  const c10::Stream side = new_stream();
  for (int step = 0; step < 5; ++step) {
    const torch::Tensor some = some_ids(2000);
    torch::Tensor loss;
    {
      const c10::StreamGuard on_side(side);
      // The ids, and later the gradients, come late on this stream.
      torch::Tensor late = busy;
      for (int i = 0; i < 10; ++i) late = late.mm(busy).mul_(1e-3);
      const torch::Tensor zero = late.sum().mul(0).nan_to_num(0, 0, 0);
      const torch::Tensor rows = embedding->forward((some.to(gpu_) + zero.to(torch::kInt64)));
      torch::Tensor scale = busy;
      for (int i = 0; i < 10; ++i) scale = scale.mm(busy).mul_(1e-3);
      loss = (rows * (scale.sum().mul(0).nan_to_num(0, 0, 0) + 1)).sum();
    }
    optimizer.zero_grad();
    loss.backward();   // runs on the side stream
    optimizer.step();  // on the default stream
    expected = expected.index_add(0, some, -torch::ones({2000, kDim}));
    ASSERT_TRUE(close(weights(table), expected, 1e-5, 1e-5)) << "step " << step;
  }
}

TEST_F(CudaTest, GradientsFromBothDevicesAreOneStep) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  const torch::Tensor before = weights(table);
  const auto embedding = std::make_shared<Embedding>(table);
  TableOptimizer optimizer({embedding});
  embedding->forward(ids({1, 2}).to(gpu_)).sum().backward();
  embedding->forward(ids({2, 3})).sum().backward();
  optimizer.step();
  EXPECT_EQ(table.step(), 1U);
  EXPECT_TRUE(
      close(weights(table).slice(0, 1, 4), before.slice(0, 1, 4) - torch::tensor({1.0F, 2.0F, 1.0F}).unsqueeze(1), 1e-6, 1e-6));
}

TEST_F(CudaTest, BagsAreThoseOfTheCpu) {
  const Table table = make(kRows, kDim);
  const auto bag = std::make_shared<EmbeddingBag>(table, EmbeddingBagOptions{.mode = EmbeddingBagOptions::Mode::kSum});
  const torch::Tensor some = some_ids(500);
  const torch::Tensor starts = ids({0, 0, 100, 499, 500});
  const torch::Tensor scale = torch::randn({500});
  const torch::Tensor on_gpu = bag->forward(some.to(gpu_), starts.to(gpu_), scale.to(gpu_));
  EXPECT_TRUE(close(on_gpu.detach().cpu(), bag->forward(some, starts, scale).detach(), 1e-4, 1e-4));
  EXPECT_TRUE(same(bag->forward(ids({}).to(gpu_), ids({0, 0}).to(gpu_)).detach().cpu(), torch::zeros({2, kDim})));
  EXPECT_TRUE(same(bag->forward(torch::empty({2, 0}, torch::kInt64).to(gpu_)).detach().cpu(), torch::zeros({2, kDim})));
  on_gpu.sum().backward();
  const torch::Tensor before = weights(table);
  TableOptimizer({bag}).step();
  const torch::Tensor expected = before.index_add(0, some, -0.5 * scale.unsqueeze(1).expand({500, kDim}));
  EXPECT_TRUE(close(weights(table), expected, 1e-4, 1e-4));
}

TEST_F(CudaTest, RefusesTensorsOnDifferentDevices) {
  const auto bag =
      std::make_shared<EmbeddingBag>(make(kRows, kDim), EmbeddingBagOptions{.mode = EmbeddingBagOptions::Mode::kSum});
  const torch::Tensor some = ids({1, 2});
  EXPECT_THAT(text_of<InvalidArgument>([&] { bag->forward(some.to(gpu_), ids({0})); }),
              AllOf(HasSubstr("offsets are on cpu"), HasSubstr("ids on cuda:0")));
  EXPECT_THAT(text_of<InvalidArgument>([&] { bag->forward(some, ids({0}), torch::ones({2}, gpu_)); }),
              AllOf(HasSubstr("weights are on cuda:0"), HasSubstr("ids on cpu")));
}

}  // namespace
}  // namespace embermap
