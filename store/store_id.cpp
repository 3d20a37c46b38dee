#include "store/store_id.hpp"

#include <fmt/format.h>

#include <charconv>
#include <random>

namespace embermap {

std::string StoreId::text() const { return fmt::format("{:016x}{:016x}", high, low); }

std::optional<StoreId> StoreId::parse(std::string_view text) {
  StoreId id;
  if (text.size() != 32) return std::nullopt;
  for (auto* const half : {&id.high, &id.low}) {
    const auto [end, problem] = std::from_chars(text.data(), text.data() + 16, *half, 16);
    if (problem != std::errc{} || end != text.data() + 16) return std::nullopt;
    text.remove_prefix(16);
  }
  return id.known() ? std::optional(id) : std::nullopt;
}

StoreId StoreId::random() {
  std::random_device device;
  const auto word = [&] { return static_cast<std::uint64_t>(device()) << 32 | device(); };
  StoreId id{word(), word()};
  if (!id.known()) id.low = 1;
  return id;
}

}  // namespace embermap
