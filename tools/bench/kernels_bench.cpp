// The CPU kernels against plain loops on the same threads: rows of random places of a table larger than the caches.
//   embermap_bench --benchmark_filter=kernels/
// Every benchmark checks its result before it is timed. Bytes per second count what a caller gets (gather: the rows once; step:
// gradients read, records read and written), so that 'memcpy loop' and ours can be read side by side.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/batch.hpp"
#include "kernels/rows.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kTableBytes = std::uint64_t{2} << 30;

// One table for all benchmarks, on huge pages, every word its own place.
std::byte* table() {
  static std::byte* const bytes = [] {
    void* const map = mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) std::abort();
    (void)madvise(map, kTableBytes, MADV_HUGEPAGE);
    auto* const floats = static_cast<float*>(map);
    for (std::uint64_t i = 0; i < kTableBytes / sizeof(float); ++i) floats[i] = static_cast<float>(i % 1021) * 0.5F;
    return static_cast<std::byte*>(map);
  }();
  return bytes;
}

std::vector<std::uint64_t> random_ids(std::uint64_t count, std::uint64_t rows) {
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> ids(count);
  for (std::uint64_t& id : ids) id = random() % rows;
  return ids;
}

struct Gather {
  std::uint64_t row_bytes, count;
  std::vector<const std::byte*> rows;
  std::vector<std::byte> out;

  explicit Gather(const benchmark::State& state)
      : row_bytes{static_cast<std::uint64_t>(state.range(0))},
        count{(static_cast<std::uint64_t>(state.range(1)) << 20) / row_bytes},
        out(count * row_bytes) {
    for (const std::uint64_t id : random_ids(count, kTableBytes / row_bytes)) rows.push_back(table() + id * row_bytes);
  }
  bool right() const {
    for (std::uint64_t i = 0; i < count; ++i)
      if (std::memcmp(out.data() + i * row_bytes, rows[i], row_bytes) != 0) return false;
    return true;
  }
};

void finish(benchmark::State& state, std::uint64_t bytes) {
  state.SetBytesProcessed(static_cast<std::int64_t>(static_cast<std::uint64_t>(state.iterations()) * bytes));
}

void gather_by_memcpy(benchmark::State& state) {
  Gather fixture(state);
  ThreadPool pool(static_cast<unsigned>(state.range(2)));
  const auto run = [&] {
    pool.parallel_for(fixture.count, 128, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t i = begin; i < end; ++i)
        std::memcpy(fixture.out.data() + i * fixture.row_bytes, fixture.rows[i], fixture.row_bytes);
    });
  };
  run();
  if (!fixture.right()) return state.SkipWithError("wrong rows: a time would mean nothing");
  for (auto _ : state) run();
  finish(state, fixture.out.size());
}

void gather(benchmark::State& state) {
  Gather fixture(state);
  ThreadPool pool(static_cast<unsigned>(state.range(2)));
  gather_rows(fixture.rows, fixture.row_bytes, fixture.out.data(), pool);
  if (!fixture.right()) return state.SkipWithError("wrong rows: a time would mean nothing");
  for (auto _ : state) gather_rows(fixture.rows, fixture.row_bytes, fixture.out.data(), pool);
  finish(state, fixture.out.size());
}

void scatter(benchmark::State& state) {
  Gather fixture(state);
  ThreadPool pool(static_cast<unsigned>(state.range(2)));
  gather_rows(fixture.rows, fixture.row_bytes, fixture.out.data(), pool);
  // Distinct rows, and written with what they hold: the table stays the same for whoever comes next.
  std::vector<std::byte*> targets;
  std::vector<std::uint32_t> sources(fixture.count);
  for (std::uint64_t i = 0; i < fixture.count; ++i) sources[i] = static_cast<std::uint32_t>(i);
  std::sort(sources.begin(), sources.end(), [&](std::uint32_t a, std::uint32_t b) { return fixture.rows[a] < fixture.rows[b]; });
  sources.erase(std::unique(sources.begin(), sources.end(),
                            [&](std::uint32_t a, std::uint32_t b) { return fixture.rows[a] == fixture.rows[b]; }),
                sources.end());
  for (const std::uint32_t source : sources) targets.push_back(table() + (fixture.rows[source] - table()));
  scatter_rows(targets, sources, fixture.row_bytes, fixture.out.data(), pool);
  if (!fixture.right()) return state.SkipWithError("wrong rows: a time would mean nothing");
  for (auto _ : state) scatter_rows(targets, sources, fixture.row_bytes, fixture.out.data(), pool);
  finish(state, targets.size() * fixture.row_bytes);
}

void batch(benchmark::State& state) {
  ThreadPool pool(static_cast<unsigned>(state.range(2)));
  const std::vector<std::uint64_t> ids =
      random_ids(static_cast<std::uint64_t>(state.range(0)), std::uint64_t{1} << state.range(1));
  const Batch made = make_batch(ids, pool);
  for (std::uint64_t u = 0; u < made.distinct(); ++u)
    for (std::uint32_t k = made.starts[u]; k < made.starts[u + 1]; ++k)
      if (ids[made.positions[k]] != made.keys[u]) return state.SkipWithError("wrong groups: a time would mean nothing");
  for (auto _ : state) benchmark::DoNotOptimize(make_batch(ids, pool));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

// Adagrad on float32 rows of state.range(0) elements; state.range(1) ids, of which a row has range(2) on average.
void adagrad_step(benchmark::State& state) {
  const auto dim = static_cast<std::uint64_t>(state.range(0));
  const auto count = static_cast<std::uint64_t>(state.range(1));
  ThreadPool pool(static_cast<unsigned>(state.range(3)));
  RecordLayout layout{.dim = dim, .stride = dim * 8, .dtype = DType::kFloat32, .states = 1};
  layout.state_offset[0] = dim * 4;
  const std::uint64_t rows = kTableBytes / layout.stride;
  const std::vector<std::uint64_t> ids =
      random_ids(count, state.range(2) == 1 ? rows : count / static_cast<std::uint64_t>(state.range(2)));
  const Batch made = make_batch(ids, pool);
  std::vector<std::byte*> records;
  for (const std::uint64_t key : made.keys) records.push_back(table() + key * layout.stride);
  const std::vector<float> grads(count * dim, 0.25F);
  const StepScalars scalars{.kind = StepScalars::Kind::kAdagrad, .lr = 1e-3, .eps = 1e-10};

  float weight = 0;
  float sum = 0;
  std::memcpy(&weight, records[0], 4);
  std::memcpy(&sum, records[0] + layout.state_offset[0], 4);
  const float gradient = 0.25F * static_cast<float>(made.starts[1] - made.starts[0]);
  const auto step = [&] {
    step_rows(records, made, 0, layout, scalars, reinterpret_cast<const std::byte*>(grads.data()), DType::kFloat32, pool);
  };
  step();
  const float expected = weight - 1e-3F * gradient / (std::sqrt(sum + gradient * gradient) + 1e-10F);
  std::memcpy(&weight, records[0], 4);
  if (std::abs(weight - expected) > 1e-6F * std::max(1.0F, std::abs(expected)))
    return state.SkipWithError("wrong weights: a time would mean nothing");
  for (auto _ : state) step();
  finish(state, count * dim * 4 + 2 * records.size() * layout.stride);
}

// Arguments: bytes of a row, MiB of output, threads.
BENCHMARK(gather_by_memcpy)
    ->Name("kernels/gather_by_memcpy")
    ->ArgsProduct({{64, 512, 1200, 4096}, {1, 64}, {1, 2}})
    ->ArgNames({"row_bytes", "MiB", "threads"})
    ->UseRealTime();
BENCHMARK(gather)
    ->Name("kernels/gather")
    ->ArgsProduct({{64, 512, 1200, 4096}, {1, 64}, {1, 2}})
    ->ArgNames({"row_bytes", "MiB", "threads"})
    ->UseRealTime();
BENCHMARK(scatter)
    ->Name("kernels/scatter")
    ->ArgsProduct({{64, 512, 1200, 4096}, {1, 64}, {1, 2}})
    ->ArgNames({"row_bytes", "MiB", "threads"})
    ->UseRealTime();
BENCHMARK(batch)
    ->Name("kernels/batch")
    ->ArgsProduct({{4096, 131072, 1048576}, {20, 30, 62}, {1, 2}})
    ->ArgNames({"ids", "id_bits", "threads"})
    ->UseRealTime();
BENCHMARK(adagrad_step)
    ->Name("kernels/adagrad_step")
    ->ArgsProduct({{16, 128}, {131072}, {1, 4}, {1, 2}})
    ->ArgNames({"dim", "ids", "ids_per_row", "threads"})
    ->UseRealTime();

}  // namespace
}  // namespace embermap
