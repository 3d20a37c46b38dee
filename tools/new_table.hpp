// A store in which a command makes a table, put back as it was when the command fails.
#pragma once

#include <optional>
#include <string_view>

#include "store/store.hpp"
#include "tools/paths.hpp"

namespace embermap::tools {

// How the table will lie in its file. Throws UsageError if none can be made with these options: found out before anything is made
// on disk.
Geometry check_table_options(const TableOptions& options);

// Opens the store of `path` for writing, making it if it is not there. Unless keep() is called the destructor removes the store
// again if this made it; a table that could not be completed is removed by the store itself.
class NewTable {
 public:
  // Throws AlreadyExists if the store has the table, or if STORE is something else than a store or an empty directory; whatever
  // Store::open throws.
  // `otherwise`: what else can be done about a table that is there, for the error.
  NewTable(const TablePath& path, const StoreOptions& options, std::string_view otherwise = {});
  ~NewTable();
  NewTable(const NewTable&) = delete;
  NewTable& operator=(const NewTable&) = delete;

  Store& store() { return *store_; }
  void keep();  // commits and closes the store

 private:
  void undo() noexcept;

  TablePath path_;
  bool made_directory_ = false, made_store_ = false, kept_ = false;
  bool empty_place_ = false;  // no table of the name was there
  std::optional<Store> store_;
};

}  // namespace embermap::tools
