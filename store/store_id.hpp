// The number that a store is made with. Its redo log has it as well, so that another store's is not taken for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace embermap {

struct StoreId {
  std::uint64_t high = 0, low = 0;  // both 0: not known
  bool operator==(const StoreId&) const = default;
  bool known() const noexcept { return high != 0 || low != 0; }
  std::string text() const;                                    // 32 hexadecimal digits
  static std::optional<StoreId> parse(std::string_view text);  // nullopt: that is none
  static StoreId random();                                     // from the system
};

}  // namespace embermap
