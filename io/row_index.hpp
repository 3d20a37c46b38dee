// Where in a file some of its rows begin: for formats whose rows have no fixed length.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace embermap {

// Takes 1 MiB at most: a table of any size has at most 64 Ki places, a power of two times 1024 rows apart or further.
class RowIndex {
 public:
  struct Place {
    std::uint64_t row, offset;
  };

  // Rows as they are met; most of them, and those before the last place, are passed over.
  void add(std::uint64_t row, std::uint64_t offset) {
    if (!places_.empty() && row < places_.back().row + step_) return;
    if (places_.size() == kMost) {
      for (std::size_t i = 0; i < kMost / 2; ++i) places_[i] = places_[2 * i];
      places_.resize(kMost / 2);
      step_ *= 2;
    }
    places_.push_back({row, offset});
  }

  // The last place at or before a row. Row 0 must have been added.
  Place before(std::uint64_t row) const {
    const auto behind =
        std::upper_bound(places_.begin(), places_.end(), row, [](std::uint64_t r, const Place& place) { return r < place.row; });
    return *(behind - 1);
  }

 private:
  static constexpr std::size_t kMost = 1U << 16;
  std::vector<Place> places_;
  std::uint64_t step_ = 1024;
};

}  // namespace embermap
