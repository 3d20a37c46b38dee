// Trains word vectors that lie on disk: for each word the words beside it. Usage: train_embeddings FOLDER [DEVICE]
#include <torch/torch.h>
#include <embermap/base/size_text.hpp>
#include <embermap/nn/embedding.hpp>
#include <embermap/nn/table_optimizer.hpp>
#include <embermap/store/store.hpp>

#include <cstdio>
#include <cstdlib>

using namespace embermap::literals;

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: train_embeddings FOLDER [DEVICE]\n");
    return 2;
  }
  try {
    const int device = argc > 2 ? std::atoi(argv[2]) : -1;  // -1: no GPU
    const torch::Device where =
        device < 0 ? torch::Device(torch::kCPU) : torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(device));
    auto store = embermap::Store::open(argv[1], {.memory = 256_MiB, .device = device});

    // 10^8 rows: 25 GB of weights and as much optimizer state, of which the disk holds what was trained.
    const embermap::TableOptions options{.rows = 100'000'000,
                                         .dim = 64,
                                         .optimizer = embermap::Adagrad{.lr = 0.05},
                                         .init = embermap::Normal{.mean = 0, .std = 0.1},
                                         .seed = 1};
    embermap::nn::Embedding words(store.contains("words") ? store.table("words") : store.create("words", options));
    embermap::nn::Embedding contexts(store.contains("contexts") ? store.table("contexts") : store.create("contexts", options));
    torch::nn::Linear scale(64, 64);
    scale->to(where);

    embermap::nn::TableOptimizer rows({words, contexts});  // the rows' own optimizer
    torch::optim::Adam dense(scale->parameters(), 1e-3);
    torch::optim::StepLR decay(rows, /*step_size=*/50, /*gamma=*/0.5);  // schedulers know nothing of tables

    torch::manual_seed(0);
    float first = 0;
    float last = 0;
    for (int step = 0; step < 100; ++step) {
      const auto ids = torch::randint(500, {256}, torch::TensorOptions().dtype(torch::kInt64).device(where)) * 199'999;
      const auto beside = ids + 1;
      const auto others = torch::randint(100'000'000, {256}, ids.options());

      rows.zero_grad();
      dense.zero_grad();
      const auto center = scale(words->forward(ids));
      const auto near = (center * contexts->forward(beside)).sum(1);
      const auto far = (center * contexts->forward(others)).sum(1);
      const auto loss = -(torch::log_sigmoid(near) + torch::log_sigmoid(-far)).mean();
      loss.backward();  // the tables' gradients: 256 and 512 rows
      rows.step();      // one update of each table
      dense.step();
      decay.step();

      last = loss.item<float>();
      if (step == 0) first = last;
    }
    store.close();  // commits
    std::printf("loss %.3f -> %.3f\n", first, last);
    return last < first ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_embeddings: error: %s\n", e.what());
    return 1;
  }
}
