// Ids and gradients in GPU memory.
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include "kernels/cuda.hpp"
#include "nn/checkpoint.hpp"
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
    auto embedding = nn::Embedding(table);
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
  auto embedding = nn::Embedding(table);
  torch::Tensor some = some_ids(1000);
  some[77] = kRows;
  some[78] = -1;
  try {
    embedding->forward(some.to(gpu_));
    FAIL() << "no exception";
  } catch (const c10::IndexError& e) {
    EXPECT_THAT(e.what(), AllOf(HasSubstr("5000"), HasSubstr("77")));
  }
  EXPECT_TRUE(same(embedding->forward(ids({5}).to(gpu_)).detach().cpu(), weights(table).slice(0, 5, 6)));
}

TEST_F(CudaTest, TrainsWithTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    const Table on_gpu = make(kRows, kDim, Adagrad{.lr = 0.1}, dtype);
    const Table on_cpu = make(kRows, kDim, Adagrad{.lr = 0.1}, dtype);
    auto gpu_rows = nn::Embedding(on_gpu);
    auto cpu_rows = nn::Embedding(on_cpu);
    nn::TableOptimizer gpu_optimizer({gpu_rows});
    nn::TableOptimizer cpu_optimizer({cpu_rows});
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

TEST_F(CudaTest, EveryKindTrainsWithTheBitsOfTheCpu) {
  for (const char* name : {"sgd", "adagrad", "rowwise_adagrad", "adadelta", "adam", "adamw", "sparse_adam", "adamax", "nadam",
                           "radam", "asgd", "rmsprop", "rprop"}) {
    const Optimizer optimizer = *optimizer_named(name);
    nn::Embedding gpu_rows(make(kRows, kDim, optimizer));
    nn::Embedding cpu_rows(make(kRows, kDim, optimizer));
    nn::TableOptimizer gpu_optimizer({gpu_rows});
    nn::TableOptimizer cpu_optimizer({cpu_rows});
    for (int step = 0; step < 4; ++step) {
      // Of one look-up, whose rows the update takes from where they are; of two; without a look-up's rows having stayed.
      const torch::Tensor some = torch::cat({some_ids(3000), ids({7, 7, 7})});
      const torch::Tensor upstream = torch::randn({3003, kDim});
      gpu_optimizer.zero_grad();
      cpu_optimizer.zero_grad();
      for (int again = 0; again < 1 + step % 2; ++again) {
        gpu_rows->forward(some.to(gpu_)).backward(upstream.to(gpu_));
        cpu_rows->forward(some).backward(upstream);
      }
      gpu_optimizer.step();
      cpu_optimizer.step();
    }
    EXPECT_TRUE(same(weights(gpu_rows->table()), weights(cpu_rows->table()))) << name;
  }
}

TEST_F(CudaTest, AnUpdateSeesRowsThatChangedAfterTheirLookUp) {
  Table table = make(kRows, kDim, Sgd{.lr = 1});
  nn::Embedding embedding(table);
  nn::TableOptimizer optimizer({embedding});
  const torch::Tensor rows = embedding->forward(ids({3, 4}).to(gpu_));
  const torch::Tensor ones = torch::ones({1, kDim});
  const std::vector<std::int64_t> three{3};
  table.scatter(three, {static_cast<const std::byte*>(ones.const_data_ptr()), ones.nbytes()});
  rows.sum().backward();
  optimizer.step();
  EXPECT_TRUE(same(weights(table).slice(0, 3, 4), torch::zeros({1, kDim})));
  // A second step with the same gradients has nothing kept to take.
  optimizer.step();
  EXPECT_TRUE(same(weights(table).slice(0, 3, 4), -torch::ones({1, kDim})));
}

TEST_F(CudaTest, OptionsOfLookUpsAreThoseOfTheCpu) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  const torch::Tensor some = torch::cat({some_ids(300), ids({7, 7, 9})});
  const torch::Tensor upstream = torch::randn({303, kDim});
  for (const bool scaled : {false, true}) {
    nn::Embedding embedding(table, nn::EmbeddingOptions().padding_idx(7).scale_grad_by_freq(scaled));
    embedding->forward(some.to(gpu_)).backward(upstream.to(gpu_));
    const torch::Tensor on_gpu = embedding->grad().cpu().to_dense();
    embedding->zero_grad();
    embedding->forward(some).backward(upstream);
    EXPECT_TRUE(close(on_gpu, embedding->grad().to_dense(), 1e-5, 1e-5));
  }
  const Table other = make(kRows, kDim, Sgd{.lr = 1});
  nn::Embedding(table, nn::EmbeddingOptions().max_norm(2))->forward(some.to(gpu_));
  nn::Embedding(other, nn::EmbeddingOptions().max_norm(2))->forward(some);
  EXPECT_TRUE(close(weights(table), weights(other), 1e-5, 1e-6));
}

TEST_F(CudaTest, PaddedBagsAndMaximaAreThoseOfTheCpu) {
  const Table table = make(kRows, kDim);
  const torch::Tensor some = torch::cat({some_ids(300), ids({7, 7, 9})});
  const torch::Tensor starts = ids({0, 0, 100, 301, 303});
  for (const torch::nn::EmbeddingBagMode& mode :
       std::vector<torch::nn::EmbeddingBagMode>{torch::kSum, torch::kMean, torch::kMax}) {
    nn::EmbeddingBag bag(table, nn::EmbeddingBagOptions().mode(mode).padding_idx(7).include_last_offset(true));
    const torch::Tensor on_gpu = bag->forward(some.to(gpu_), starts.to(gpu_));
    on_gpu.sum().backward();
    const torch::Tensor grad = bag->grad().cpu().to_dense();
    bag->zero_grad();
    const torch::Tensor on_cpu = bag->forward(some, starts);
    on_cpu.sum().backward();
    EXPECT_TRUE(close(on_gpu.detach().cpu(), on_cpu.detach(), 1e-4, 1e-4));
    EXPECT_TRUE(close(grad, bag->grad().to_dense(), 1e-4, 1e-4));
  }
}

TEST_F(CudaTest, AModelOnTheGpuResumesToTheSameBits) {
  struct Model : torch::nn::Module {
    explicit Model(const Table& table)
        : embedding{register_module("embedding", nn::Embedding(table))},
          linear{register_module("linear", torch::nn::Linear(kDim, 3))} {}
    nn::Embedding embedding;
    torch::nn::Linear linear;
  };
  const auto train = [&](Model& model, nn::TableOptimizer& rows, torch::optim::Optimizer& dense) {
    for (int step = 0; step < 4; ++step) {
      rows.zero_grad();
      dense.zero_grad();
      const torch::Tensor some = torch::randint(0, kRows, {500}, torch::TensorOptions(torch::kInt64).device(gpu_));
      (model.linear->forward(model.embedding->forward(some)) + torch::randn({500, 3}, gpu_)).pow(2).mean().backward();
      rows.step();
      dense.step();
    }
  };
  const Table table = make(kRows, kDim, Adam{.lr = 0.01});
  torch::Tensor unbroken;
  torch::Tensor unbroken_weight;
  {
    Model model(table);
    model.to(gpu_);
    EXPECT_TRUE(model.embedding->anchor().is_cuda());
    nn::TableOptimizer rows(nn::table_parameters(model));
    torch::optim::Adam dense(nn::dense_parameters(model));
    train(model, rows, dense);
    nn::save(model, folder_ / "model.pt", {store()}, {.optimizers = {&rows, &dense}});
    train(model, rows, dense);
    unbroken = weights(table);
    unbroken_weight = model.linear->weight.detach().cpu();
  }
  store().abandon();
  store_.reset();
  Model model(store().table("table0"));
  model.to(gpu_);
  nn::TableOptimizer rows(nn::table_parameters(model));
  torch::optim::Adam dense(nn::dense_parameters(model));
  nn::load(model, folder_ / "model.pt", {store()}, {.optimizers = {&rows, &dense}, .rng = true});
  EXPECT_TRUE(model.linear->weight.is_cuda());
  train(model, rows, dense);
  EXPECT_TRUE(same(model.linear->weight.detach().cpu(), unbroken_weight));
  EXPECT_TRUE(same(weights(model.embedding->table()), unbroken));
}

TEST_F(CudaTest, WorksInTheOrderOfTorchsStreams) {
  const Table table = make(kRows, kDim, Sgd{.lr = 1});
  torch::Tensor expected = weights(table);
  auto embedding = nn::Embedding(table);
  nn::TableOptimizer optimizer({embedding});
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
  auto embedding = nn::Embedding(table);
  nn::TableOptimizer optimizer({embedding});
  embedding->forward(ids({1, 2}).to(gpu_)).sum().backward();
  embedding->forward(ids({2, 3})).sum().backward();
  optimizer.step();
  EXPECT_EQ(table.step(), 1U);
  EXPECT_TRUE(
      close(weights(table).slice(0, 1, 4), before.slice(0, 1, 4) - torch::tensor({1.0F, 2.0F, 1.0F}).unsqueeze(1), 1e-6, 1e-6));
}

TEST_F(CudaTest, BagsAreThoseOfTheCpu) {
  const Table table = make(kRows, kDim);
  auto bag = nn::EmbeddingBag(table, nn::EmbeddingBagOptions().mode(torch::kSum));
  const torch::Tensor some = some_ids(500);
  const torch::Tensor starts = ids({0, 0, 100, 499, 500});
  const torch::Tensor scale = torch::randn({500});
  const torch::Tensor on_gpu = bag->forward(some.to(gpu_), starts.to(gpu_), scale.to(gpu_));
  EXPECT_TRUE(close(on_gpu.detach().cpu(), bag->forward(some, starts, scale).detach(), 1e-4, 1e-4));
  EXPECT_TRUE(same(bag->forward(ids({}).to(gpu_), ids({0, 0}).to(gpu_)).detach().cpu(), torch::zeros({2, kDim})));
  EXPECT_TRUE(same(bag->forward(torch::empty({2, 0}, torch::kInt64).to(gpu_)).detach().cpu(), torch::zeros({2, kDim})));
  on_gpu.sum().backward();
  const torch::Tensor before = weights(table);
  nn::TableOptimizer({bag}).step();
  const torch::Tensor expected = before.index_add(0, some, -0.5 * scale.unsqueeze(1).expand({500, kDim}));
  EXPECT_TRUE(close(weights(table), expected, 1e-4, 1e-4));
}

TEST_F(CudaTest, RefusesTensorsOnDifferentDevices) {
  auto bag = nn::EmbeddingBag(make(kRows, kDim), nn::EmbeddingBagOptions().mode(torch::kSum));
  const torch::Tensor some = ids({1, 2});
  EXPECT_THAT(text_of<c10::ValueError>([&] { bag->forward(some.to(gpu_), ids({0})); }),
              AllOf(HasSubstr("offsets are on cpu"), HasSubstr("ids on cuda:0")));
  EXPECT_THAT(text_of<c10::ValueError>([&] { bag->forward(some, ids({0}), torch::ones({2}, gpu_)); }),
              AllOf(HasSubstr("weights are on cuda:0"), HasSubstr("ids on cpu")));
}

}  // namespace
}  // namespace embermap
