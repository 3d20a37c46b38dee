// Makes a table in the folder given, trains two rows, and reads them back from a second session.
#include <embermap/store/store.hpp>

#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

int main(int argc, char** argv) {
  using namespace embermap::literals;
  if (argc != 2) {
    std::fprintf(stderr, "usage: consumer FOLDER\n");
    return 2;
  }
  const std::vector<std::int64_t> ids{7, 999'999'999, 7};
  const std::vector<float> grads(ids.size() * 8, 0.5F);
  {
    auto store = embermap::Store::open(argv[1], {.memory = 16_MiB});
    auto items = store.create("items", {.rows = 1'000'000'000, .dim = 8, .optimizer = embermap::Sgd{.lr = 0.25}});
    items.update(ids, std::as_bytes(std::span(grads)), embermap::DType::kFloat32);
    store.close();
  }
  auto store = embermap::Store::open(argv[1], {.mode = embermap::StoreOptions::Mode::kRead, .memory = 16_MiB});
  auto items = store.table("items");
  std::vector<float> rows(ids.size() * 8);
  items.gather(ids, std::as_writable_bytes(std::span(rows)));
  // Row 7 was asked for twice: its gradients are summed before the one step.
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float expected = ids[i / 8] == 7 ? -0.25F : -0.125F;
    if (rows[i] != expected) {
      std::fprintf(stderr, "element %zu is %g, not %g\n", i, static_cast<double>(rows[i]), static_cast<double>(expected));
      return 1;
    }
  }
  std::printf("%llu rows, commit %llu\n", static_cast<unsigned long long>(items.rows()),
              static_cast<unsigned long long>(store.commit_number()));
  return 0;
}
