#include "tools/new_table.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "tools/command.hpp"

namespace embermap::tools {

Geometry check_table_options(const TableOptions& options) {
  try {
    const Schema schema(options.dim, options.dtype, options.optimizer);
    check_initializer(options.init, options.dtype);
    return make_geometry(options.rows, schema.record_bytes(), schema.alignment(), schema.structured(), options.page_bytes);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  } catch (const DTypeError& error) {
    throw UsageError(error.what());
  }
}

NewTable::NewTable(const TablePath& path, const StoreOptions& options, std::string_view otherwise) : path_{path} {
  struct stat status {};
  const bool there = lstat(path.store.c_str(), &status) == 0;
  if (!there && errno != ENOENT) throw IoError(errno, "open", path.store);
  made_directory_ = !there;
  made_store_ = !store_at(path.store);
  if (made_store_)
    if (const auto outer = store_around(path.store); !outer.empty())
      throw InvalidArgument(fmt::format("{} would be a store in the own directory of the store {}; choose another place",
                                        printable(path.store), printable(outer)));
  try {
    store_.emplace(Store::open(path.store, options));
    if (store_->contains(path.table))
      throw AlreadyExists(fmt::format("{} already exists; 'embermap remove' it first{}", printable(path.text()), otherwise));
  } catch (...) {
    undo();
    throw;
  }
  empty_place_ = true;
}

NewTable::~NewTable() {
  if (!kept_) undo();
}

void NewTable::keep() {
  store_->commit();
  kept_ = true;
  store_->close();
}

void NewTable::undo() noexcept {
  try {
    if (empty_place_ && store_->contains(path_.table)) store_->remove(path_.table);
    // While the lock is still held: nobody else can have put a table in.
    if (store_ && made_store_ && store_->tables().empty())
      for (const char* name : {"embermap.json", "redo.log", "UNCOMMITTED", "LOCK"}) unlink((path_.store / name).c_str());
  } catch (const std::exception&) {  // the store stays as it is
  }
  if (made_directory_) rmdir(path_.store.c_str());  // does nothing where something is left in it
  if (store_) store_->abandon();
}

}  // namespace embermap::tools
