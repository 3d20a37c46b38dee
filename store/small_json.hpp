// JSON of a store's own small files. Private to store/.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace embermap {

// The value; nothing where the text is no JSON, or has objects and arrays more than `deepest` in one another: to copy, compare or
// write such a value takes stack.
inline std::optional<nlohmann::json> parse_small_json(std::string_view text, int deepest) {
  bool deeper = false;
  const auto keep = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json&) {
    using Event = nlohmann::json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= deepest) deeper = true;
    return !deeper;
  };
  nlohmann::json json = nlohmann::json::parse(text, keep, /*allow_exceptions=*/false);
  if (deeper || json.is_discarded()) return std::nullopt;
  return json;
}

}  // namespace embermap
