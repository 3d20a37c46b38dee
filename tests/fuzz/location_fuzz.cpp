// What names rows in a file: 1 byte for the use and the format that is given, then the text, "x.h5:/path/to/dataset". Files of
// some names are there.
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "io/rows.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  static const bool made = [] {
    for (const char* name : {"x.npy", "x.h5", "a:b.npz", "x.h5:y", "plain"}) folder().make(name, {});
    return true;
  }();
  require(made, "no folder");
  Taker taker(input);
  const auto kind = taker.number(1);
  const auto bytes = taker.piece(input.size());
  const std::string text =
      folder().path().native() + '/' + std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  LocationOptions options;
  options.use = (kind & 1U) != 0 ? LocationOptions::Use::kWrite : LocationOptions::Use::kRead;
  constexpr std::array kFormats{Location::Format::kNpy, Location::Format::kNpz, Location::Format::kHdf5, Location::Format::kRaw};
  if ((kind & 2U) != 0) options.format = kFormats[kind >> 2 & 3U];
  const Location found = parse_location(text, options);
  // The file and the selector are the text, whatever is in it.
  const std::string whole = found.selector.empty() ? found.file.native() : found.file.native() + ':' + found.selector;
  require(whole == text, "a location that is not what was given");
  require(!found.file.empty(), "no file");
  require(!options.format || found.format == *options.format, "another format than was given");
}

}  // namespace embermap::fuzz
