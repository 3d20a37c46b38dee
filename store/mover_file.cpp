#include "store/mover_file.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/error.hpp"

namespace embermap {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::uint64_t kMostBytes = 1 << 20;     // of the file
constexpr std::uint64_t kMostThreads = 1024;      // of a kernel's block, and of the host
constexpr std::uint64_t kMostMeasurements = 256;  // of a device
constexpr int kMostDepth = 6;                     // of the file's objects and arrays

std::optional<std::uint64_t> number(const Json& object, const char* key, std::uint64_t most) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned()) return {};
  const auto value = found->get<std::uint64_t>();
  if (value > most) return {};
  return value;
}

std::optional<double> real(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return {};
  const auto value = found->get<double>();
  if (!std::isfinite(value) || value < 0) return {};
  return value;
}

std::optional<MoverMeasurement> measurement(const Json& json) {
  constexpr std::uint64_t kAny = ~std::uint64_t{0};
  if (!json.is_object()) return {};
  const auto direction = json.find("direction");
  const auto rows = number(json, "rows", kAny);
  const auto row_bytes = number(json, "row_bytes", kAny);
  const auto pool_bytes = number(json, "pool_bytes", kAny);
  const auto threads = number(json, "threads", kMostThreads);
  const auto ways = json.find("ways");
  if (direction == json.end() || !(*direction == "fetch" || *direction == "write_back") || !rows || !row_bytes || !pool_bytes ||
      !threads || ways == json.end() || !ways->is_array())
    return {};
  MoverMeasurement out{.of = {*direction == "fetch", *rows, *row_bytes, *pool_bytes, static_cast<unsigned>(*threads)},
                       .rates = {}};
  const std::vector<MoverWay> known = mover_ways(out.of.threads);
  for (const Json& way : *ways) {
    if (!way.is_object()) return {};
    const auto blocks = number(way, "blocks", kMostThreads);
    const auto block_threads = number(way, "block_threads", kMostThreads);
    const auto host_threads = number(way, "host_threads", kMostThreads);
    const auto rate = real(way, "bytes_per_second");
    const auto share = real(way, "thread_share");
    if (!blocks || !block_threads || !host_threads || !rate || !share || *share > 1) return {};
    const MoverWay one{static_cast<unsigned>(*blocks), static_cast<unsigned>(*block_threads),
                       static_cast<unsigned>(*host_threads)};
    // Nothing is launched that this version does not know.
    if (std::find(known.begin(), known.end(), one) != known.end()) out.rates.push_back({one, *rate, *share});
  }
  if (out.rates.empty()) return {};
  return out;
}

// The devices of the file; an empty object where it is not one of ours.
Json devices(const std::filesystem::path& store, FileOps& ops) {
  try {
    // What nests deeper than ours is left out: copying it takes stack.
    const auto keep = [](int depth, Json::parse_event_t, Json&) { return depth <= kMostDepth; };
    const Json json = Json::parse(read_text(store / kMoverFile, kMostBytes, ops), keep, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("version") || json["version"] != kVersion || !json.contains("devices") ||
        !json["devices"].is_object())
      return Json::object();
    return json["devices"];
  } catch (const Error&) {
    return Json::object();
  }
}

}  // namespace

std::vector<MoverMeasurement> read_movers(const std::filesystem::path& store, const std::string& device, FileOps& ops) {
  const Json all = devices(store, ops);
  std::vector<MoverMeasurement> out;
  if (!all.contains(device) || !all[device].is_array() || all[device].size() > kMostMeasurements) return out;
  for (const Json& json : all[device])
    if (auto one = measurement(json)) out.push_back(std::move(*one));
  return out;
}

void write_movers(const std::filesystem::path& store, const std::string& device, const std::vector<MoverMeasurement>& measured,
                  FileOps& ops) {
  Json list = Json::array();
  // The newest, where there are too many.
  const std::size_t left_out = measured.size() - std::min<std::size_t>(measured.size(), kMostMeasurements);
  for (const MoverMeasurement& one : std::span(measured).subspan(left_out)) {
    Json ways = Json::array();
    for (const MoverRate& rate : one.rates)
      ways.push_back({{"blocks", rate.way.blocks},
                      {"block_threads", rate.way.block_threads},
                      {"host_threads", rate.way.host_threads},
                      {"bytes_per_second", std::round(rate.bytes_per_second)},
                      {"thread_share", rate.thread_share}});
    list.push_back({{"direction", one.of.fetch ? "fetch" : "write_back"},
                    {"rows", one.of.rows},
                    {"row_bytes", one.of.row_bytes},
                    {"pool_bytes", one.of.pool_bytes},
                    {"threads", one.of.threads},
                    {"ways", std::move(ways)}});
  }
  Json all = devices(store, ops);
  all[device] = std::move(list);
  const Json json{{"version", kVersion}, {"devices", std::move(all)}};
  replace_file(store / kMoverFile, json.dump(1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n", ops);
}

}  // namespace embermap
