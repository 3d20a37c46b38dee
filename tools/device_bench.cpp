#include "tools/device_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "base/thread_pool.hpp"
#include "kernels/cuda.hpp"
#include "tools/console.hpp"
#include "tools/text.hpp"

namespace embermap::tools {
namespace {

constexpr std::uint64_t kPageBytes = 4096;

std::string gb_per_second(double rate) { return fmt::format("{:.1f} GB/s", rate / 1e9); }

std::string text_of(const MoverWay& way) {
  const std::string kernel = fmt::format("a kernel of {} blocks of {}", way.blocks, way.block_threads);
  const std::string threads = fmt::format("{} thread{}", way.host_threads, way.host_threads == 1 ? "" : "s");
  if (way.host_threads == 0) return kernel;
  if (way.blocks == 0) return threads + " and DMA";
  return kernel + ", " + threads + " and DMA";
}

Json json_of(const MoverWay& way) {
  return {{"kernel_blocks", way.blocks}, {"block_threads", way.block_threads}, {"host_threads", way.host_threads}};
}

const MoverRate* best_of(const MoverMeasurement& measured, bool kernel, bool threads) {
  const MoverRate* best = nullptr;
  for (const MoverRate& rate : measured.rates)
    if ((rate.way.blocks != 0) == kernel && (rate.way.host_threads != 0) == threads &&
        (best == nullptr || rate.bytes_per_second > best->bytes_per_second))
      best = &rate;
  return best;
}

}  // namespace

int parse_device_option(const std::string& text) {
  std::string_view number = text;
  if (text == "cuda") return 0;
  if (number.starts_with("cuda:")) number.remove_prefix(5);
  int device = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), device);
  if (error != std::errc{} || end != number.data() + number.size() || device < 0)
    throw UsageError(fmt::format("--device: '{}' is neither cuda nor cuda:NUMBER", text));
  return device;
}

int bench_device(const DeviceBenchArguments& arguments, const Common& common) {
  if (arguments.row_bytes == 0) throw UsageError("--dim: rows of 0 bytes");
  const auto engine = CudaEngine::create(arguments.device);
  ThreadPool all(arguments.threads);
  ThreadPool pool(std::min(all.threads(), kMostMoverThreads));

  // Rows as in a table that is in memory as a whole.
  const std::uint64_t rows_per_page = std::max<std::uint64_t>(1, kPageBytes / arguments.row_bytes);
  const std::uint64_t page_bytes = std::max(kPageBytes, arguments.row_bytes);
  const std::uint64_t pages = arguments.pool_bytes / page_bytes;
  if (pages == 0) throw UsageError(fmt::format("--size: {} holds no row of {} bytes", arguments.pool_bytes, arguments.row_bytes));
  AlignedBuffer memory(pages * page_bytes);
  std::fill(memory.data(), memory.data() + memory.size(), std::byte{1});  // no page of the system's is shared
  const PinnedRange pinned(memory.data(), memory.size());
  if (!pinned.registered()) throw CudaError(pinned.error());
  const FrameSource source{.slab = memory.data(),
                           .registered = true,
                           .page_bytes = page_bytes,
                           .rows_per_page = rows_per_page,
                           .stride = arguments.row_bytes,
                           .whole = true,
                           .slab_bytes = memory.size()};
  const double limits[2] = {engine->link_rate(/*to_device=*/false), engine->link_rate(/*to_device=*/true)};
  engine->calibrate(source, pages * rows_per_page, 0, arguments.row_bytes, /*both_ways=*/true, pool);

  Json json{{"device", engine->device_name()},
            {"pool_bytes", memory.size()},
            {"row_bytes", arguments.row_bytes},
            {"threads", pool.threads()},
            {"link", {{"to_device", limits[1]}, {"to_host", limits[0]}}},
            {"measured", Json::array()}};
  Facts facts;
  facts.add("device", engine->device_name());
  facts.add("rows", fmt::format("{} of {} bytes in {} of registered memory; {} threads", grouped(pages * rows_per_page),
                                arguments.row_bytes, format_size(memory.size()), pool.threads()));
  facts.add("link", fmt::format("{} to the device, {} back: a plain copy of pinned memory", gb_per_second(limits[1]),
                                gb_per_second(limits[0])));
  for (const MoverMeasurement& measured : engine->model().measurements()) {
    const double limit = limits[measured.of.fetch ? 1 : 0];
    std::string line;
    for (const auto& [name, kernel, threads] :
         {std::tuple{"kernel", true, false}, {"threads", false, true}, {"both", true, true}})
      if (const MoverRate* const best = best_of(measured, kernel, threads))
        line += fmt::format("{}{} {}", line.empty() ? "" : ", ", name, gb_per_second(best->bytes_per_second));
    const MoverRate choice = engine->model().choose(measured.of);
    facts.add(fmt::format("{} {}", measured.of.fetch ? "fetch" : "write back", grouped(measured.of.rows)),
              fmt::format("{}; best {:.2f} of the link", line, limit > 0 ? choice.bytes_per_second / limit : 0));
    Json rates = Json::array();
    for (const MoverRate& rate : measured.rates) {
      Json one = json_of(rate.way);
      one["bytes_per_second"] = rate.bytes_per_second;
      one["share_of_link"] = limit > 0 ? rate.bytes_per_second / limit : 0;
      one["thread_share"] = rate.thread_share;
      rates.push_back(std::move(one));
    }
    json["measured"].push_back(
        {{"direction", measured.of.fetch ? "fetch" : "write_back"}, {"rows", measured.of.rows}, {"ways", std::move(rates)}});
  }
  for (const bool fetch : {true, false}) {
    const MoverRate choice = engine->model().choose({.fetch = fetch,
                                                     .rows = arguments.batch,
                                                     .row_bytes = arguments.row_bytes,
                                                     .pool_bytes = memory.size(),
                                                     .threads = pool.threads()});
    facts.add(fetch ? "chosen to fetch" : "chosen to write back",
              fmt::format("{}, for batches of {}", text_of(choice.way), grouped(arguments.batch)));
    json["chosen"][fetch ? "fetch" : "write_back"] = json_of(choice.way);
  }
  json["chosen"]["batch"] = arguments.batch;
  if (common.json)
    print_json(json);
  else if (!common.quiet)
    print(facts.text());
  return kDone;
}

}  // namespace embermap::tools
