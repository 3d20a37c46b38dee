// A copy of a store at its last commit, taken while its writer goes on. Private to store/.
//
// The destination is a directory that becomes a store at the end, when embermap.json is put there. Until then the file SNAPSHOT
// says of which store it is a half, and which of its tables it has begun: running it again goes on from there.
//
//  {"format": "embermap snapshot", "version": 1, "inode": 12, "born_ns": 34, "tables": {"items": 1}}
//
// A table's pages are copied past what the redo log has of them: table file and log together are the last commit. A writer that
// goes on moves the files on, at some time past that commit. Then it is looked for the commit that is the last one now, and what
// differs from what was copied, by the checksums on both sides, is copied as well; and once more, until all is of one commit. In
// the writer's own process the last round keeps the log from being applied, so that there are few.
//
// What the destination's page file says of a page is true at any time, after a loss of power as well: a page that is overwritten
// is forgotten there first, and one that was written is told of when it is durable.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>

#include "store/page_ledger.hpp"
#include "store/store.hpp"
#include "store/store_core.hpp"

namespace embermap {

inline constexpr std::string_view kSnapshotName = "SNAPSHOT";

struct SnapshotSource {
  StoreCore& core;
  // Keeps the log from being applied while the result lives; empty: not to be had, the writer is another process, or there is
  // none.
  std::function<RedoLog::Pause()> pause;
  // Throws where the file that a table has adopted may not be opened.
  std::function<void(const std::string&, const TableEntry&)> check_adopted;
  // Throws where others changed it.
  std::function<void(const std::string&, const TableEntry&, const File&, const PageLedger&)> check_unchanged;
  bool alone = false;  // nobody changes the store meanwhile
};

// Throws AlreadyExists, InvalidArgument (a destination inside of the store), StaleError (the writer was too fast), IoError,
// CorruptError, FormatError. What was copied then stays, to be gone on from.
SnapshotReport take_snapshot(const SnapshotSource& source, const std::filesystem::path& destination, const Progress& progress);

}  // namespace embermap
