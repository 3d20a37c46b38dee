// embermap.json: what tables a store has. Small, human-readable, replaced as a whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/dtype.hpp"
#include "io/file.hpp"
#include "kernels/optimizer.hpp"
#include "store/adoption.hpp"
#include "store/geometry.hpp"
#include "store/initializer.hpp"
#include "store/schema.hpp"
#include "store/store_id.hpp"
#include "store/table.hpp"

namespace embermap {

inline constexpr std::string_view kManifestName = "embermap.json";
inline constexpr std::uint64_t kFormatVersion = 2;

struct TableEntry {
  std::uint32_t id = 0;  // the table's in the redo log; never given to another one
  std::uint64_t dim = 0;
  DType dtype = DType::kFloat32;
  Optimizer optimizer = {};
  Initializer init = Zeros{};
  std::uint64_t seed = 0;
  std::uint64_t page_bytes = kMinPageBytes;  // the option, not the page's real size
  Geometry geometry;
  std::uint64_t step = 0;
  std::optional<double> carried;                 // into the next step: see carried_on()
  std::uint64_t changed = 0;                     // the last commit that changed its pages; 0: not known
  std::uint64_t settled = 0;                     // what NAME.pages had when this was written, at least, as a commit; 0: not known
  std::uint64_t memory = 0;                      // bytes of the store's budget; 0: by size
  TableCounters counters;                        // up to the commit
  std::optional<std::filesystem::path> adopted;  // the foreign file, absolute
  StoreHome adopted_in;                          // all 0: not known
  bool adopted_writable = false;
  bool big_endian = false;  // the foreign file's elements have their highest byte first
};

struct Manifest {
  std::uint64_t commit = 0;
  std::uint64_t revision =
      0;             // grows with every manifest that is written, to its file or into the redo log: the higher one counts
  StoreId store_id;  // not known in one of before
  std::uint32_t next_id = 1;
  std::string time;  // of the commit, "2031-05-06T07:08:09.123Z"; empty: not known
  std::string note;  // of the commit, as note_text() gives it; empty: none
  std::map<std::string, TableEntry, std::less<>> tables;
  // The redo log has had commits since the store was last closed: where its file is not there, it was taken away.
  bool log = false;
  // Names of files in the store of tables that are being created or removed: what a crash leaves of them belongs to nobody.
  std::set<std::string, std::less<>> unfinished;

  // Throws NotFound (no manifest there), FormatError naming the file and key: not JSON, another format, a newer version, wrong
  // types, a geometry that cannot be, a checksum that does not match (none is accepted). Nothing in it is trusted.
  static Manifest load(const std::filesystem::path& store);
  // The same for the text of the file; `file` is for messages.
  static Manifest parse(std::string_view text, const std::filesystem::path& file);
  std::string text() const;
  // Atomic and durable.
  void save(const std::filesystem::path& store, FileOps& ops) const;
};

// {"name": "adam", "lr": 0.001, ...}: options that have no default are left out where they are not set. {"name": "none"}.
nlohmann::ordered_json optimizer_json(const Optimizer& optimizer);

// What a table was made with and the steps of its optimizer, as JSON, for files that hold all of a table
// (store/table_archive.hpp). Nothing in the text is trusted: FormatError naming `file` and the key, DTypeError, InvalidArgument.
struct TableSettings {
  TableOptions options;
  std::uint64_t step = 0;
  std::optional<double> carried = {};
};
std::string table_settings_text(const Table& table);
TableSettings parse_table_settings(std::string_view text, const std::filesystem::path& file);

// The text of a note as it is kept: one line, keys in order. Throws InvalidArgument for what Store::commit() does not take.
std::string note_text(std::string_view json);

// Now, as Manifest::time has it.
std::string utc_now();

// Throws InvalidArgument naming the rule: see Store::create.
void check_table_name(std::string_view name);

}  // namespace embermap
