// Of which moment a store's files are. Whoever opens a store, for reading or writing, copies it, or tells what opening it would
// do, asks here whether its files belong together. Private to store/; docs/durability.md says why what is asked for is always so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string_view>

#include "base/error.hpp"
#include "store/manifest.hpp"
#include "store/page_ledger.hpp"

namespace embermap {

// What a store's log and manifest say of which commit each table's page file can be.
class Moment {
 public:
  Moment() = default;
  // `in_file`: what embermap.json says; `manifest`: what counts, that or the one of the log's last commit. All commits up to
  // `applied` are in the tables' files, and there is none after `last`.
  Moment(const Manifest& in_file, const Manifest& manifest, std::uint64_t applied, std::uint64_t last);
  // Of a store whose files have all commits: without a log, or with one that is applied.
  static Moment settled(const Manifest& manifest) { return {manifest, manifest, manifest.commit, manifest.commit}; }

  // Throws MomentError where the page file of a table cannot be of this moment. Only for what was read while nothing was being
  // applied, or what a look at the log's header afterwards says to be of one moment.
  void check(const std::filesystem::path& store, std::string_view name, const TableEntry& entry,
             const PageLedger::Number& number) const;

 private:
  std::map<std::uint32_t, std::uint64_t> least_;  // by a table's id: what its page file has at least
  std::uint64_t last_ = 0;
};

}  // namespace embermap
