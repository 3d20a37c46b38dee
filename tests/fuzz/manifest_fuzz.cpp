// embermap.json.
#include "store/manifest.hpp"

#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  folder().make(kManifestName, input).close();
  const Manifest manifest = Manifest::load(folder().path());
  for (const auto& [name, entry] : manifest.tables) {
    require(name.find('/') == std::string::npos && name.find('\0') == std::string::npos && name.front() != '.',
            "a table whose files lie outside the store");
    const Geometry& g = entry.geometry;
    require(g.rows_per_page > 0 && g.stride > 0 && g.file_bytes() >= g.data_offset, "a geometry that cannot be");
    require(g.rows == 0 || (g.pages() - 1) * g.rows_per_page < g.rows, "pages behind the last row");
    require(!entry.adopted || entry.adopted->is_absolute(), "an adopted file by a relative path");
  }
  // What was read is written as the same.
  const std::string text = manifest.text();
  require(Manifest::parse(text, kManifestName).text() == text, "a manifest that reads as another one once written");
}

}  // namespace embermap::fuzz
