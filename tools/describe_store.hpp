// What `embermap info` says about stores and tables.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "store/store.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

// {"kind": "store", "path", "commit", "time", "note", "writer", "uncommitted", "unclean", "tables": [...]}. Opens read-only, also
// beside a writer, and reads no rows; the probe that chooses how a file would be read may read some dozen pages.
Json describe_store(const std::filesystem::path& path, const StoreOptions& options);

// {"kind": "table", "name", "rows", ...} with the same facts about the store.
Json describe_table(const std::filesystem::path& store, const std::string& name, const StoreOptions& options);

// What is said of the commits of a store that has none.
inline constexpr std::string_view kNoCommit = "none yet";
// Store::commits(), opened as above.
std::vector<CommitInfo> commits_of(const std::filesystem::path& store, const StoreOptions& options);

// One table of an open store.
Json table_json(const Table& table);

// {"kind": "table", "name", "error"}: a table that does not open, or whose files turn out to be broken.
Json broken_table_json(const std::string& name, const std::string& error);

// The tables that a command goes through: the one named (NotFound if the store has none of that name), or all of them.
std::vector<std::string> chosen_tables(Store& store, const std::string& name);

// For people: aligned lines.
std::string store_text(const Json& description);
std::string table_text(const Json& description);

// The facts of a table in one line: "1,000,000 x 128 float32, adagrad".
std::string table_line(const Json& table);

}  // namespace embermap::tools
