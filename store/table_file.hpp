// A table's own .npy, read as a file of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "io/rows.hpp"

namespace embermap {

// The directory of the store that `file` is a file of, links followed; empty if it is of none.
std::filesystem::path store_of(const std::filesystem::path& file);

// Throws FormatError if `source` is the file of a table, in its store's directory, and has not the rows that the table has at its
// last commit: pages that were never written and whose initial rows are not what the file's holes read as, or pages that are
// still in the redo log. The store is opened for reading, with `memory`, to find out; where it cannot be, the file may be all
// that is left of it, and what is returned says so. A writer at work may change the file afterwards.
std::vector<Remark> check_table_file(const Location& source, std::uint64_t memory);

}  // namespace embermap
