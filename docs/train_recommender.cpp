// Trains a recommender whose tables lie on disk, and goes on where it was killed. Usage: train_recommender FOLDER [STEPS
// [DEVICE]]
#include <torch/torch.h>
#include <embermap/base/size_text.hpp>
#include <embermap/nn/checkpoint.hpp>
#include <embermap/nn/embedding_collection.hpp>
#include <embermap/nn/optimizers.hpp>
#include <embermap/store/store.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

namespace nn = embermap::nn;
using namespace embermap::literals;

constexpr std::int64_t kUsers = 10'000'000;  // 2.6 GB of weights, and twice that of Adam's state: the disk holds what was trained
constexpr std::int64_t kItems = 1'000'000;
constexpr std::int64_t kDim = 64;

// A table of the store, made when the store is.
embermap::Table table_of(embermap::Store& store, const char* name, std::int64_t rows, const embermap::Optimizer& optimizer) {
  if (store.contains(name)) return store.table(name);
  return store.create(name, {.rows = static_cast<std::uint64_t>(rows),
                             .dim = kDim,
                             .optimizer = optimizer,
                             .init = embermap::Normal{.mean = 0, .std = 0.1},
                             .seed = 1});
}

// Whether a user will like an item, from the user, the item, and the items the user has had.
struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(embermap::Store& store) {
    const auto users = table_of(store, "users", kUsers, nn::AdamOptions(0.01));
    const auto items = table_of(store, "items", kItems, nn::AdagradOptions(0.05));
    const nn::EmbeddingBag history(items, nn::EmbeddingBagOptions().mode(torch::kMean));  // the same rows, in bags
    tables = register_module("tables", nn::EmbeddingCollection(nn::EmbeddingCollectionImpl::Modules{
                                           {"user", users}, {"item", items}, {"history", history}}));
    top = register_module("top",
                          torch::nn::Sequential(torch::nn::Linear(3 * kDim, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1)));
  }
  torch::Tensor forward(const nn::EmbeddingCollectionImpl::Batch& batch) {
    const auto rows = tables->forward(batch);
    return top->forward(torch::cat({rows["user"], rows["item"], rows["history"]}, 1)).squeeze(1);
  }
  nn::EmbeddingCollection tables = nullptr;
  torch::nn::Sequential top = nullptr;
};
TORCH_MODULE(Model);

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: train_recommender FOLDER [STEPS [DEVICE]]\n");
    return 2;
  }
  try {
    const std::filesystem::path folder = argv[1];
    const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 200;
    const int device = argc > 3 ? std::atoi(argv[3]) : -1;  // -1: no GPU
    const torch::Device where =
        device < 0 ? torch::Device(torch::kCPU) : torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(device));
    // Without autocommit only save() commits, so that a run that is killed can go on from what it saved.
    auto store = embermap::Store::open(folder / "store", {.memory = 256_MiB, .device = device, .autocommit = false});
    torch::manual_seed(0);
    Model model(store);
    model->to(where);
    nn::TableOptimizer rows(nn::table_parameters(*model));  // each table's own optimizer
    torch::optim::AdamW dense(nn::dense_parameters(*model), torch::optim::AdamWOptions(1e-3));

    const std::filesystem::path file = folder / "model.pt";
    if (!store.last_commit().note.empty()) {  // by save()
      const auto found = nn::load(*model, file, {store}, {.optimizers = {&rows, &dense}, .rng = true});
      std::printf("goes on at commit %llu\n", static_cast<unsigned long long>(found.commits[0]));
    }

    const auto ids = torch::TensorOptions().dtype(torch::kInt64).device(where);
    for (auto step = static_cast<std::int64_t>(store.table("items").step()); step < steps; ++step) {
      // Users like items whose number has the same remainder.
      const auto user = torch::randint(1'000, {128}, ids) * 9'973;
      const auto item = torch::randint(1'000, {128}, ids) * 997;
      const auto history = torch::randint(1'000, {128 * 5}, ids) * 997;
      const auto liked = (user.remainder(4) == item.remainder(4)).to(torch::kFloat32);

      rows.zero_grad();
      dense.zero_grad();
      rows.set_lr(0.05 / (1.0 + 0.002 * static_cast<double>(step)));  // a rate that follows from the step needs no state
      const auto score =
          model->forward({{"user", user}, {"item", item}, {"history", {history, torch::arange(0, 128 * 5, 5, ids)}}});
      const auto loss = torch::binary_cross_entropy_with_logits(score, liked);
      loss.backward();
      rows.step();  // one update of each table: `items` has the gradients of item and history
      dense.step();

      if ((step + 1) % 20 == 0 || step + 1 == steps) {
        const auto saved =
            nn::save(*model, file, {store}, {.optimizers = {&rows, &dense}});  // rows, state and the rest: one moment
        std::printf("step %lld, commit %llu, loss %.4f\n", static_cast<long long>(step + 1),
                    static_cast<unsigned long long>(saved.commits[0]), loss.item<double>());
        std::fflush(stdout);
      }
    }
    store.close();
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_recommender: error: %s\n", e.what());
    return 1;
  }
}
