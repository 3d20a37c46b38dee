// Tables on this machine's CPU and disk. Each benchmark checks what it does before it times it, and reports bytes of rows per
// second.
//
// Axes: ids in a batch, dim (float32). "Hot": the budget holds every page. "Resident": nearly every one, and all asked for.
// "Cold": it holds a tenth of them and ids are uniform, so that nearly every page is read; "in order" and "scan" go through all
// rows. Reads are direct where the file system allows it. The store lies under TMPDIR (else /tmp): name a folder on the disk that
// is meant.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "store/store.hpp"

namespace {

using embermap::DType;
using namespace embermap::literals;

constexpr std::uint64_t kTableBytes = 256_MiB;  // of weights

// A folder of its own, gone at the end.
class ScratchStore {
 public:
  ScratchStore() : path_{std::filesystem::temp_directory_path() / ("embermap-bench-" + std::to_string(getpid()))} {}
  ~ScratchStore() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchStore(const ScratchStore&) = delete;
  ScratchStore& operator=(const ScratchStore&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::vector<std::int64_t> random_ids(std::uint64_t count, std::uint64_t rows, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<std::int64_t> any(0, static_cast<std::int64_t>(rows) - 1);
  std::vector<std::int64_t> ids(count);
  for (auto& id : ids) id = any(random);
  return ids;
}

struct Axes {
  std::uint64_t ids, dim, rows;
  explicit Axes(const benchmark::State& state)
      : ids{static_cast<std::uint64_t>(state.range(0))},
        dim{static_cast<std::uint64_t>(state.range(1))},
        rows{kTableBytes / (dim * 4)} {}
  std::int64_t batch_bytes() const { return static_cast<std::int64_t>(ids * dim * 4); }
};

// Row r holds r, r + 1, ... (mod 4096), exact in float32; scattered in runs, which also writes every page.
void fill(embermap::Table& table) {
  constexpr std::uint64_t kRun = 4096;
  std::vector<float> rows(kRun * table.dim());
  for (std::uint64_t first = 0; first < table.rows(); first += kRun) {
    const std::uint64_t count = std::min(kRun, table.rows() - first);
    for (std::uint64_t i = 0; i < count; ++i)
      for (std::uint64_t c = 0; c < table.dim(); ++c) rows[i * table.dim() + c] = static_cast<float>((first + i + c) % 4096);
    table.write(first, count, std::as_bytes(std::span(rows).first(count * table.dim())));
  }
}

bool holds(const std::vector<std::int64_t>& ids, std::uint64_t dim, const std::vector<float>& rows) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    for (std::uint64_t c = 0; c < dim; ++c)
      if (rows[i * dim + c] != static_cast<float>((static_cast<std::uint64_t>(ids[i]) + c) % 4096)) return false;
  return true;
}

// A table of known rows, most of them in the file alone where `memory` is small.
embermap::Table filled_table(embermap::Store& store, const Axes& axes, const embermap::Optimizer& optimizer = {}) {
  auto table = store.create("t", {.rows = axes.rows, .dim = axes.dim, .optimizer = optimizer});
  fill(table);
  store.commit();
  return table;
}

void gather(benchmark::State& state, std::uint64_t memory) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = memory});
  auto table = filled_table(store, axes);
  std::vector<float> out(axes.ids * axes.dim);
  const auto bytes = std::as_writable_bytes(std::span(out));
  // Different ids each time: a repeated batch would be in the processor's cache.
  std::vector<std::vector<std::int64_t>> batches;
  for (std::uint64_t seed = 0; seed < 8; ++seed) batches.push_back(random_ids(axes.ids, axes.rows, seed));
  for (const auto& ids : batches) {
    table.gather(ids, bytes);
    if (!holds(ids, axes.dim, out)) return state.SkipWithError("wrong rows: a time would mean nothing");
  }
  const auto before = table.stats();
  std::size_t next = 0;
  for (auto _ : state) table.gather(batches[next++ % batches.size()], bytes);
  const auto after = table.stats();
  const auto wanted = static_cast<double>(after.hits - before.hits + after.misses - before.misses);
  state.SetBytesProcessed(state.iterations() * axes.batch_bytes());
  state.counters["page_hits"] = static_cast<double>(after.hits - before.hits) / std::max(wanted, 1.0);
}

// All that is asked for is in memory, but not all of the table: pages have to be looked up.
void gather_resident(benchmark::State& state) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = kTableBytes});
  auto table = filled_table(store, axes);
  const std::uint64_t asked = axes.rows * 9 / 10;
  std::vector<float> out(axes.ids * axes.dim);
  const auto bytes = std::as_writable_bytes(std::span(out));
  for (std::uint64_t first = 0; first < asked; first += axes.ids) {
    std::vector<std::int64_t> ids(std::min(axes.ids, asked - first));
    std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(first));
    table.gather(ids, bytes.first(ids.size() * axes.dim * 4));
  }
  std::vector<std::vector<std::int64_t>> batches;
  for (std::uint64_t seed = 0; seed < 8; ++seed) batches.push_back(random_ids(axes.ids, asked, seed));
  for (const auto& ids : batches) {
    table.gather(ids, bytes);
    if (!holds(ids, axes.dim, out)) return state.SkipWithError("wrong rows: a time would mean nothing");
  }
  const auto before = table.stats();
  std::size_t next = 0;
  for (auto _ : state) table.gather(batches[next++ % batches.size()], bytes);
  if (table.stats().misses != before.misses || before.whole) return state.SkipWithError("not what is meant");
  state.SetBytesProcessed(state.iterations() * axes.batch_bytes());
}

void gather_hot(benchmark::State& state) { gather(state, 2 * kTableBytes); }
void gather_cold(benchmark::State& state) { gather(state, kTableBytes / 10); }

void update_adagrad(benchmark::State& state, std::uint64_t memory) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = memory});
  auto table = store.create("t", {.rows = axes.rows, .dim = axes.dim, .optimizer = embermap::Adagrad{.lr = 0.5, .eps = 0}});
  const std::vector<float> grads(axes.ids * axes.dim, 1.0F);
  const auto bytes = std::as_bytes(std::span(grads));
  std::vector<std::vector<std::int64_t>> batches;
  for (std::uint64_t seed = 0; seed < 8; ++seed) batches.push_back(random_ids(axes.ids, axes.rows, seed));
  // The first step of a row with gradient g is -lr * g / sqrt(g * g): -lr, however often the row was named.
  table.update(batches[0], bytes, DType::kFloat32);
  std::vector<float> out(axes.ids * axes.dim);
  table.gather(batches[0], std::as_writable_bytes(std::span(out)));
  for (const float value : out)
    if (value != -0.5F) return state.SkipWithError("wrong step: a time would mean nothing");
  for (const auto& ids : batches) table.update(ids, bytes, DType::kFloat32);
  std::size_t next = 0;
  for (auto _ : state) table.update(batches[next++ % batches.size()], bytes, DType::kFloat32);
  state.SetBytesProcessed(state.iterations() * axes.batch_bytes());
}

// Records take twice the weights.
void update_adagrad_hot(benchmark::State& state) { update_adagrad(state, 4 * kTableBytes); }
void update_adagrad_cold(benchmark::State& state) { update_adagrad(state, kTableBytes / 10); }

// All rows in order, a MiB of them at a time: past the hot pages (read), and through them (scatter, with the commit at the end).
constexpr std::uint64_t kRunBytes = 1_MiB;

void scan(benchmark::State& state) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = kTableBytes / 10});
  auto table = filled_table(store, axes);
  const std::uint64_t run = std::min(kRunBytes / (axes.dim * 4), axes.rows);
  std::vector<float> out(run * axes.dim);
  const auto read = [&](std::uint64_t first) {
    const std::uint64_t count = std::min(run, axes.rows - first);
    table.read(first, count, std::as_writable_bytes(std::span(out).first(count * axes.dim)));
  };
  const std::uint64_t middle = axes.rows / 2;
  std::vector<std::int64_t> ids(std::min(run, axes.rows - middle));
  std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(middle));
  read(middle);
  if (!holds(ids, axes.dim, out)) return state.SkipWithError("wrong rows: a time would mean nothing");
  for (auto _ : state)
    for (std::uint64_t first = 0; first < axes.rows; first += run) read(first);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kTableBytes));
}

void scatter_in_order(benchmark::State& state) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = kTableBytes / 10});
  auto table = store.create("t", {.rows = axes.rows, .dim = axes.dim});
  const std::uint64_t run = std::min(kRunBytes / (axes.dim * 4), axes.rows);
  const std::vector<float> rows(run * axes.dim, 0.5F);
  std::vector<std::int64_t> ids(run);
  for (auto _ : state) {
    for (std::uint64_t first = 0; first + run <= axes.rows; first += run) {
      std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(first));
      table.scatter(ids, std::as_bytes(std::span(rows)));
    }
    store.commit();
  }
  std::vector<float> out(rows.size());
  table.gather(ids, std::as_writable_bytes(std::span(out)));
  if (out != rows) return state.SkipWithError("wrong rows: the times mean nothing");
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(axes.rows / run * run * axes.dim * 4));
}

// What a gather takes whose pages were prefetched before, and waited for: the reads, without the waiting.
void gather_prefetched(benchmark::State& state) {
  const Axes axes(state);
  const ScratchStore scratch;
  auto store = embermap::Store::open(scratch.path(), {.memory = kTableBytes / 2});
  auto table = filled_table(store, axes);
  std::vector<float> out(axes.ids * axes.dim);
  const auto bytes = std::as_writable_bytes(std::span(out));
  std::uint64_t seed = 0;
  std::vector<std::int64_t> ids;
  for (auto _ : state) {
    state.PauseTiming();
    ids = random_ids(axes.ids, axes.rows, ++seed);
    table.prefetch(ids).wait();
    state.ResumeTiming();
    table.gather(ids, bytes);
  }
  if (!holds(ids, axes.dim, out)) return state.SkipWithError("wrong rows: the times mean nothing");
  state.SetBytesProcessed(state.iterations() * axes.batch_bytes());
}

void create_billion_rows(benchmark::State& state) {
  for (auto _ : state) {
    const ScratchStore scratch;
    auto store = embermap::Store::open(scratch.path());
    auto table = store.create("t", {.rows = 1'000'000'000, .dim = 128, .init = embermap::Normal{0, 0.02}});
    store.close();
  }
}

const std::vector<std::vector<std::int64_t>> kAxes{{1'024, 131'072}, {16, 128}};
BENCHMARK(gather_hot)->Name("tables/gather_hot")->ArgsProduct(kAxes)->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(gather_resident)->Name("tables/gather_resident")->ArgsProduct(kAxes)->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(gather_cold)->Name("tables/gather_cold")->ArgsProduct(kAxes)->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(update_adagrad_hot)->Name("tables/update_adagrad_hot")->ArgsProduct(kAxes)->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(update_adagrad_cold)->Name("tables/update_adagrad_cold")->ArgsProduct(kAxes)->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(gather_prefetched)->Name("tables/gather_prefetched")->Args({8'192, 128})->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(scan)->Name("tables/scan")->Args({0, 16})->Args({0, 128})->ArgNames({"ids", "dim"})->UseRealTime();
BENCHMARK(scatter_in_order)
    ->Name("tables/scatter_in_order")
    ->Args({0, 16})
    ->Args({0, 128})
    ->ArgNames({"ids", "dim"})
    ->UseRealTime();
BENCHMARK(create_billion_rows)->Name("tables/create_billion_rows")->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
