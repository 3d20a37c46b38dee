// Small JSON of a store that is not the manifest: 1 byte for what it is; the settings of a table that a file holds all of, the
// note of a commit, or how fast rows crossed a link.
#include <string>

#include "base/error.hpp"
#include "store/manifest.hpp"
#include "store/mover_file.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::uint64_t kind = taker.number(1) % 3;
  const auto rest = taker.piece(input.size());
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), rest.size());
  if (kind == 0) {
    const TableSettings settings = parse_table_settings(text, "x.npz");
    require(settings.options.dim > 0, "a table without columns");
  } else if (kind == 1) {
    const std::string note = note_text(text);
    require(note_text(note) == note && note.find('\n') == std::string::npos, "a note that is another one once kept");
  } else {
    folder().make(kMoverFile, rest);
    FileOps& ops = FileOps::system();
    const auto measured = read_movers(folder().path(), "a device", ops);
    for (const MoverMeasurement& one : measured) require(!one.rates.empty(), "a measurement of nothing");
    write_movers(folder().path(), "another", measured, ops);
    require(read_movers(folder().path(), "a device", ops) == measured, "a device that is lost when another is written");
    require(read_movers(folder().path(), "another", ops).size() == measured.size(), "a measurement that is not written");
  }
}

}  // namespace embermap::fuzz
