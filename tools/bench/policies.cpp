// Replacement policies compared: replays page traces of training and counts the misses of each policy.
//   embermap_policies --shape zipf1.05 --shape drift --rows-per-page 8 --batch 65536 --cache 0.1
//   embermap_policies --ids grams.npy --name 5-grams --json grams.json
// docs/replacement.md has the results and what was decided by them.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "io/file.hpp"
#include "io/npy.hpp"
#include "tools/bench/page_traces.hpp"
#include "tools/bench/replacement_policies.hpp"

namespace embermap::bench {
namespace {

using HoldKind = RecentHolds::Hold;

struct Hold {
  std::span<const std::uint32_t> pages;
  HoldKind kind;
};

// The holds a store makes for the batches. Batches of more than `most` pages run in passes, and nothing is prefetched for or
// during them.
//   gather    every batch once              update    gather, update
//   pipeline  gather, prefetch of the next batch, update
//   ahead     prefetch of the next batch, gather, update
std::vector<Hold> holds_of(const PageTrace& trace, const std::string& calls, std::uint64_t most) {
  std::vector<Hold> holds;
  const auto run = [&](std::uint64_t batch) {
    const auto pages = trace.batch(batch);
    for (std::uint64_t begin = 0; begin < pages.size(); begin += most)
      holds.push_back({pages.subspan(begin, std::min<std::uint64_t>(most, pages.size() - begin)),
                       begin == 0 ? HoldKind::kBatch : HoldKind::kNextPass});
  };
  const auto prefetch_after = [&](std::uint64_t batch) {
    if (batch + 1 == trace.batches()) return;
    const auto pages = trace.batch(batch + 1);
    if (pages.size() <= most && trace.batch(batch).size() <= most) holds.push_back({pages, HoldKind::kPrefetch});
  };
  for (std::uint64_t i = 0; i < trace.batches(); ++i) {
    if (calls == "ahead") prefetch_after(i);
    run(i);
    if (calls == "pipeline") prefetch_after(i);
    if (calls != "gather") run(i);
  }
  return holds;
}

// Misses in the holds from `first` on.
std::uint64_t replay(const PageTrace& trace, const std::vector<Hold>& holds, std::size_t first, std::uint32_t frames,
                     Policy& policy) {
  std::vector<std::uint32_t> frame_of(trace.pages, kNone), page_of(frames), stamp(frames, 0), missing;
  std::uint32_t filled = 0, now = 0;
  std::uint64_t misses = 0;
  for (const Hold& hold : holds) {
    ++now;
    missing.clear();
    policy.begin(hold.kind);
    for (std::size_t i = 0; i < hold.pages.size(); ++i) {
      if (i + 16 < hold.pages.size()) __builtin_prefetch(&frame_of[hold.pages[i + 16]]);
      const std::uint32_t frame = frame_of[hold.pages[i]];
      if (frame == kNone) {
        missing.push_back(hold.pages[i]);
        continue;
      }
      stamp[frame] = now;
      policy.used(frame);
    }
    if (now > first) misses += missing.size();
    const std::uint64_t room = frames - filled;
    policy.make_room(missing.size() > room ? missing.size() - room : 0);
    for (const std::uint32_t page : missing) {
      std::uint32_t frame = kNone;
      if (filled < frames) {
        frame = filled++;
      } else {
        frame = policy.victim({stamp.data(), now});
        if (frame >= frames || stamp[frame] == now) throw std::logic_error("a policy evicted a held page");
        frame_of[page_of[frame]] = kNone;
      }
      stamp[frame] = now;
      page_of[frame] = page;
      frame_of[page] = frame;
      policy.inserted(frame, page);
    }
  }
  return misses;
}

// Evicts what is needed again last: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
// Journal 1966. No policy misses less.
std::uint64_t replay_belady(const PageTrace& trace, const std::vector<Hold>& holds, std::size_t first, std::uint64_t frames) {
  const auto never = static_cast<std::uint32_t>(holds.size());
  std::vector<std::uint64_t> starts;
  std::uint64_t touches = 0;
  for (const Hold& hold : holds) {
    starts.push_back(touches);
    touches += hold.pages.size();
  }
  std::vector<std::uint32_t> next(touches), soonest(trace.pages, never);  // the hold that needs the page next
  for (std::size_t h = holds.size(); h-- > 0;)
    for (std::size_t i = 0; i < holds[h].pages.size(); ++i)
      next[starts[h] + i] = std::exchange(soonest[holds[h].pages[i]], static_cast<std::uint32_t>(h));
  std::vector<std::vector<std::uint32_t>> needed_at(holds.size() + 1);  // resident pages by that hold
  std::vector<bool> resident(trace.pages, false);
  std::uint64_t filled = 0, misses = 0;
  std::uint32_t farthest = 0;  // nothing is needed later
  for (std::size_t h = 0; h < holds.size(); ++h) {
    std::uint64_t missed = 0;
    for (const std::uint32_t page : holds[h].pages) missed += !resident[page];
    for (; filled + missed > frames; --filled) {
      while (needed_at[farthest].empty()) --farthest;
      resident[needed_at[farthest].back()] = false;
      needed_at[farthest].pop_back();
    }
    std::vector<std::uint32_t>().swap(needed_at[h]);
    for (std::size_t i = 0; i < holds[h].pages.size(); ++i) {
      const std::uint32_t at = next[starts[h] + i];
      resident[holds[h].pages[i]] = true;
      needed_at[at].push_back(holds[h].pages[i]);
      farthest = std::max(farthest, at);
    }
    filled += missed;
    if (h >= first) misses += missed;
  }
  return misses;
}

struct Contender {
  std::string name;
  std::function<std::unique_ptr<Policy>(std::uint32_t)> make;
};

Contender s3_fifo(std::string name, const S3Fifo::Options& options) {
  return {std::move(name), [=](std::uint32_t frames) { return std::make_unique<S3FifoPolicy>(frames, options); }};
}

// The first is what the others are measured against.
std::vector<Contender> contenders(const std::string& set) {
  constexpr RecentHolds::Options kPlain{.apart = 0, .guard = 0};  // as published: every use counts, nothing is guarded
  const auto sieve = [](std::string name, RecentHolds::Options recent) -> Contender {
    return {std::move(name), [=](std::uint32_t frames) { return std::make_unique<Sieve>(frames, recent); }};
  };
  const auto tiny_lfu = [](std::string name, double window, RecentHolds::Options recent) -> Contender {
    return {std::move(name), [=](std::uint32_t frames) { return std::make_unique<TinyLfu>(frames, recent, window); }};
  };
  constexpr S3Fifo::Options kPublished{.promote = 2, .recent = kPlain};
  std::vector<Contender> all{{"lru", [=](std::uint32_t frames) { return std::make_unique<Lru>(frames, kPlain); }}};
  if (set == "policies") {
    all.push_back(sieve("sieve", kPlain));
    all.push_back(s3_fifo("s3-fifo", kPublished));
    all.push_back(tiny_lfu("w-tinylfu", 0.01, kPlain));
    all.push_back(sieve("sieve+g", {}));
    all.push_back(s3_fifo("s3-fifo+g", {}));
    all.push_back(tiny_lfu("w-tinylfu+g", 0.01, {}));
    all.push_back({"store", [](std::uint32_t frames) { return std::make_unique<StorePolicy>(frames, Replacement::kS3Fifo); }});
  } else if (set == "apart") {
    for (const std::uint32_t guard : {0U, 4U})
      for (const std::uint32_t apart : {0U, 2U, 4U, 6U, 8U}) {
        if (apart > 4 && guard == 0) continue;
        const RecentHolds::Options recent{.apart = apart, .guard = guard};
        const std::string suffix = fmt::format("{} c{}", guard > 0 ? "+g" : "", apart);
        all.push_back(sieve("sieve" + suffix, recent));
        all.push_back(s3_fifo("s3-fifo" + suffix, {.promote = 1, .recent = recent}));
        all.push_back(s3_fifo("s3-fifo promote 2" + suffix, {.promote = 2, .recent = recent}));
        all.push_back(tiny_lfu("w-tinylfu" + suffix, 0.01, recent));
      }
  } else {
    all.push_back(s3_fifo("as is", {}));
    all.push_back(s3_fifo("small 5 %", {.small = 0.05, .recent = {}}));
    all.push_back(s3_fifo("small 25 %", {.small = 0.25, .recent = {}}));
    all.push_back(s3_fifo("remembered 50 %", {.remembered = 0.5, .recent = {}}));
    all.push_back(s3_fifo("remembered 200 %", {.remembered = 2, .recent = {}}));
    all.push_back(s3_fifo("limit 1", {.limit = 1, .recent = {}}));
    all.push_back(s3_fifo("limit 7", {.limit = 7, .recent = {}}));
    all.push_back(s3_fifo("guard 1", {.recent = {.guard = 1}}));
    all.push_back(s3_fifo("guard 2", {.recent = {.guard = 2}}));
    all.push_back(s3_fifo("guard share 25 %", {.recent = {.share = 0.25}}));
    all.push_back(s3_fifo("guard share 75 %", {.recent = {.share = 0.75}}));
    all.push_back(tiny_lfu("w-tinylfu+g 10 %", 0.1, {}));
  }
  return all;
}

struct Settings {
  std::vector<std::string> shapes = shape_names(), calls{"gather", "update", "pipeline", "ahead"}, policies;
  std::vector<std::uint64_t> rows_per_page{32, 8, 4, 1}, batches{4096, 65536};
  std::vector<double> caches{0.01, 0.1, 0.3};
  std::uint64_t rows = 2'000'000, count = 8'000'000, epochs = 1;
  std::string ids, name = "ids", set = "policies", json;
  double pass = 0.5;
  unsigned jobs = 1;
  bool belady = true, reads = false;
};

std::vector<std::int64_t> read_ids(const std::string& path) {
  const File file = File::open(path, File::Mode::kRead);
  const NpyHeader header = read_npy_header(file);
  if (header.descr != "<i8" || header.shape.size() != 1 || header.elements() == 0)
    throw std::runtime_error(fmt::format("{}: {} of shape {}; ids are <i8 in one dimension, at least one", path,
                                         header.dtype_text(), header.shape_text()));
  std::vector<std::int64_t> ids(header.elements());
  file.read(header.data_offset, std::as_writable_bytes(std::span(ids)));
  const auto bad = std::find_if(ids.begin(), ids.end(), [](std::int64_t id) { return id < 0; });
  if (bad != ids.end()) throw std::runtime_error(fmt::format("{}: element {} is {}, no id", path, bad - ids.begin(), *bad));
  return ids;
}

class Comparison {
 public:
  explicit Comparison(const Settings& settings) : settings_{settings}, contenders_{contenders(settings.set)} {
    if (!settings.policies.empty())
      std::erase_if(contenders_, [&](const Contender& contender) {
        return contender.name != "lru" &&
               std::find(settings.policies.begin(), settings.policies.end(), contender.name) == settings.policies.end();
      });
    fmt::print("{:<10} {:>4} {:>6} {:<9} {:>6} {:>9} {:>6} {:>7}", "trace", "rows", "batch", "calls", "cache", "frames", "passes",
               "lru");
    for (std::size_t i = 1; i < contenders_.size(); ++i) fmt::print(" {:>11}", contenders_[i].name);
    fmt::print("{}\n", settings_.belady ? "      belady" : "");
  }

  // Misses of the second half of the holds, when memory is full; of all if `cold`.
  void add(const PageTrace& trace, const std::string& name, std::uint64_t rows_per_page, std::uint64_t batch, bool cold) {
    const std::vector<double> loop_cache{1 / 1.1};
    for (const std::string& calls : settings_.calls)
      for (const double cache : name == "loop" ? loop_cache : settings_.caches) {
        const auto frames = static_cast<std::uint32_t>(static_cast<double>(trace.pages) * cache);
        const auto most = static_cast<std::uint64_t>(settings_.pass * frames);
        if (most == 0) throw std::runtime_error(fmt::format("{}: a cache of {} pages is too small", name, frames));
        const std::vector<Hold> holds = holds_of(trace, calls, most);
        const std::size_t first = cold ? 0 : holds.size() / 2;
        std::uint64_t touches = 0, kinds = 0;
        for (std::size_t h = first; h < holds.size(); ++h) touches += holds[h].pages.size();
        for (const Hold& hold : holds) kinds += hold.kind != HoldKind::kNextPass;
        nlohmann::json result{{"trace", name},
                              {"rows_per_page", rows_per_page},
                              {"batch", batch},
                              {"calls", calls},
                              {"cache", cache},
                              {"frames", frames},
                              {"pages", trace.pages},
                              {"touches", touches},
                              {"passes", static_cast<double>(holds.size()) / static_cast<double>(kinds)}};
        std::uint64_t firsts = 0;  // touches of pages for the first time
        std::vector<bool> seen(trace.pages, false);
        for (std::size_t h = 0; h < holds.size() && settings_.reads; ++h)
          for (const std::uint32_t page : holds[h].pages) {
            firsts += h >= first && !seen[page];
            seen[page] = true;
          }
        for (const Contender& contender : contenders_)
          result["misses"][contender.name] = replay(trace, holds, first, frames, *contender.make(frames)) - firsts;
        if (settings_.belady) result["misses"]["belady"] = replay_belady(trace, holds, first, frames) - firsts;
        print(result);
      }
  }

  // Ranges of misses relative to LRU.
  void summarize() const {
    fmt::print(
        "\nMisses relative to LRU, where batches fit into half of memory: best, median, worst; cases at most 0.95, of all\n");
    const auto range = [&](const char* title, double least_gain) {
      fmt::print("{}\n", title);
      for (std::size_t i = 1; i < contenders_.size(); ++i) {
        std::vector<double> ratios;
        for (const auto& result : results_) {
          if (result["passes"].get<double>() > 1.001) continue;
          if (settings_.belady && ratio(result, "belady") > 1 - least_gain) continue;
          ratios.push_back(ratio(result, contenders_[i].name));
        }
        if (ratios.empty()) continue;
        std::sort(ratios.begin(), ratios.end());
        const auto good = std::upper_bound(ratios.begin(), ratios.end(), 0.95) - ratios.begin();
        fmt::print("  {:<24} {:.3f} {:.3f} {:.3f}  {} of {}\n", contenders_[i].name, ratios.front(), ratios[ratios.size() / 2],
                   ratios.back(), good, ratios.size());
      }
    };
    range("all traces", -1);
    if (settings_.belady) range("traces where the best possible is at most 0.9", 0.1);
  }
  const nlohmann::json& results() const noexcept { return results_; }

 private:
  static double ratio(const nlohmann::json& result, const std::string& name) {
    return result["misses"][name].get<double>() / result["misses"]["lru"].get<double>();
  }
  void print(const nlohmann::json& result) {
    const std::lock_guard lock(mutex_);
    results_.push_back(result);
    fmt::print("{:<10} {:>4} {:>6} {:<9} {:>6.3g} {:>9} {:>6.2f} {:>7.4f}", result["trace"].get<std::string>(),
               result["rows_per_page"].get<std::uint64_t>(), result["batch"].get<std::uint64_t>(),
               result["calls"].get<std::string>(), result["cache"].get<double>(), result["frames"].get<std::uint64_t>(),
               result["passes"].get<double>(), result["misses"]["lru"].get<double>() / result["touches"].get<double>());
    for (std::size_t i = 1; i < contenders_.size(); ++i) fmt::print(" {:>11.3f}", ratio(result, contenders_[i].name));
    if (settings_.belady) fmt::print(" {:>11.3f}", ratio(result, "belady"));
    fmt::print("\n");
    std::fflush(stdout);
  }

  const Settings& settings_;
  std::vector<Contender> contenders_;
  std::mutex mutex_;
  nlohmann::json results_ = nlohmann::json::array();
};

void run(const Settings& settings) {
  Comparison comparison(settings);
  std::vector<std::function<void()>> tasks;
  std::vector<std::int64_t> ids;
  if (!settings.ids.empty()) ids = read_ids(settings.ids);
  for (const std::uint64_t rows_per_page : settings.rows_per_page)
    for (const std::uint64_t batch : settings.batches) {
      if (!ids.empty())
        tasks.emplace_back([&, rows_per_page, batch] {
          comparison.add(make_trace(ids, rows_per_page, batch, settings.epochs), settings.name, rows_per_page, batch, true);
        });
      else
        for (const std::string& shape : settings.shapes)
          tasks.emplace_back([&, rows_per_page, batch, shape] {
            const PageTrace trace = make_trace({shape, settings.rows, rows_per_page, settings.count, batch});
            comparison.add(trace, shape, rows_per_page, batch, false);
          });
    }
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks.size(); i = next++) {
      try {
        tasks[i]();
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = tasks.size();
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    for (unsigned i = 1; i < settings.jobs; ++i) threads.emplace_back(work);
    work();
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  comparison.summarize();
  if (!ids.empty())
    for (const std::uint64_t rows_per_page : settings.rows_per_page)
      fmt::print("{} rows a page: {:.2f} % of the pages are touched by one id only\n", rows_per_page,
                 100 * pages_seen_once(ids, rows_per_page));
  if (!settings.json.empty()) {
    std::ofstream file(settings.json);
    file << comparison.results().dump(1) << "\n";
    if (!file.flush()) throw std::runtime_error(settings.json + ": cannot write");
  }
}

}  // namespace
}  // namespace embermap::bench

int main(int argc, char** argv) {
  embermap::bench::Settings settings;
  CLI::App app{"Misses of replacement policies on page traces of training, relative to LRU."};
  app.add_option("--shape", settings.shapes, "Shapes of made-up ids")->check(CLI::IsMember(embermap::bench::shape_names()));
  app.add_option("--rows", settings.rows, "Rows of the table that made-up ids are of")->capture_default_str();
  app.add_option("--count", settings.count, "Made-up ids")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--ids", settings.ids, "Instead: a .npy file of int64 ids")->check(CLI::ExistingFile);
  app.add_option("--name", settings.name, "What to call the ids of the file");
  app.add_option("--epochs", settings.epochs, "How often to go through the file")->check(CLI::PositiveNumber);
  app.add_option("--rows-per-page", settings.rows_per_page, "Rows a page")->check(CLI::PositiveNumber);
  app.add_option("--batch", settings.batches, "Ids a batch")->check(CLI::PositiveNumber);
  app.add_option("--calls", settings.calls, "What is done with a batch")
      ->check(CLI::IsMember({"gather", "update", "pipeline", "ahead"}));
  app.add_option("--cache", settings.caches, "Share of the pages that fit in memory")->check(CLI::Range(0.0001, 0.99));
  app.add_option("--pass", settings.pass, "Share of memory that a pass may take")->check(CLI::Range(0.01, 1.0));
  app.add_option("--set", settings.set,
                 "Policies: those compared, one for each distance of uses that count, or S3-FIFO's constants")
      ->check(CLI::IsMember({"policies", "apart", "constants"}))
      ->capture_default_str();
  app.add_option("--policy", settings.policies, "Of the set, only these, by their names in the table, and lru");
  app.add_option("--jobs", settings.jobs, "Threads")->check(CLI::Range(1, 256));
  app.add_option("--json", settings.json, "Write the counts to this file");
  app.add_flag("--reads", settings.reads, "Leave out misses of pages never touched before: a page never written is not read");
  app.add_flag("!--no-belady", settings.belady, "Leave the bound out");
  CLI11_PARSE(app, argc, argv);
  try {
    embermap::bench::run(settings);
  } catch (const std::exception& error) {
    fmt::print(stderr, "embermap_policies: {}\n", error.what());
    return 1;
  }
}
