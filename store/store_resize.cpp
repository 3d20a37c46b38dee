// Tables that get more rows or fewer.
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "store/store_impl.hpp"

namespace embermap {

const TableEntry& Store::Impl::check_resizable(const TableImpl& table) const {
  const auto listed = manifest_.tables.find(table.name());
  if (const auto found = tables_.find(table.name()); found == tables_.end() || found->second.get() != &table)
    throw ClosedError(fmt::format("table '{}' was removed", printable(table.name())));
  if (listed->second.adopted)
    throw InvalidArgument(fmt::format("table '{}' uses {} in place; such a file is not resized", printable(table.name()),
                                      printable(*listed->second.adopted)));
  return listed->second;
}

// The steps of resize() and append() change files that the manifest describes. A crash in between is noticed as an unclean end;
// the files fit the manifest all the same, since they are never shorter than it says: it learns of fewer rows before, of more
// rows after. Either all is done, or an error says that nothing is: what fails after the commit is left to the next opening.

void Store::Impl::grow(TableImpl& table, std::uint64_t rows, const FillRows& fill) {
  const TableEntry& entry = check_resizable(table);
  make_geometry(rows, entry.geometry.stride, 1, false, entry.page_bytes);  // throws if a file cannot hold so many
  Manifest manifest = manifest_;
  manifest.tables.at(table.name()).geometry.rows = rows;
  const auto shares = plan(*core_, manifest.tables);

  const auto shares_before = plan(*core_, manifest_.tables);
  commit_still(/*even_unchanged=*/false);
  if (core_->log)
    grow_logged(table, rows, fill, shares, shares_before);
  else
    grow_in_place(table, rows, fill, shares, shares_before);
}

void Store::Impl::grow_in_place(TableImpl& table, std::uint64_t rows, const FillRows& fill, const Shares& shares,
                                const Shares& shares_before) {
  const std::uint64_t before = table.rows();
  auto last_checksum = table.last_checksum(before);
  core_->mark.set(core_->newest);
  try {
    table.grow(rows);
  } catch (...) {
    // All undone: the files are those of the commit again.
    if (!table.ahead()) core_->mark.clear();
    throw;
  }
  try {
    if (fill) fill();
    set_shares(shares);
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    if (has_committed(table)) return;
    try {
      last_checksum = table.last_checksum(before);  // the page may have been written for the first time
    } catch (const Error&) {
    }
    try {
      table.shrink(before, last_checksum);
      set_shares(shares_before);
      if (!table.ahead()) core_->mark.clear();
    } catch (const Error&) {
      // The table has its old rows. Files longer than the manifest says are cut when the store is opened; the mark is there.
    }
    throw;
  }
}

bool Store::Impl::has_committed(const TableImpl& table) {
  const auto there = [&]() -> std::optional<Manifest> {
    try {
      Manifest manifest = Manifest::load(core_->path);
      const auto listed = manifest.tables.find(table.name());
      if (listed == manifest.tables.end() || listed->second.geometry.rows != table.rows()) return std::nullopt;
      return manifest;
    } catch (const Error&) {
      return std::nullopt;
    }
  };
  auto manifest = there();
  if (!manifest) return false;
  // It was replaced before the call that failed, which was the sync of its directory.
  try {
    Manifest back = manifest_;
    back.revision = manifest->revision;
    replace_manifest(std::move(back));
    return false;
  } catch (const Error&) {
    manifest = there();
  }
  if (!manifest) return false;
  // It stays, so that is what counts. Should a loss of power bring the old one back, there is the mark.
  manifest_ = std::move(*manifest);
  core_->manifest_file.is_saved(manifest_.revision);
  core_->history.add({.number = manifest_.commit, .time = manifest_.time, .note = manifest_.note});
  core_->commit = manifest_.commit;
  for (const auto& [name, other] : tables_) other->mark_committed();
  return true;
}

void Store::Impl::grow_logged(TableImpl& table, std::uint64_t rows, const FillRows& fill, const Shares& shares,
                              const Shares& shares_before) {
  const std::uint64_t before = table.rows();
  core_->log->apply_all();
  bool prepared = false;
  try {
    table.grow(rows);
    if (fill) fill();
    set_shares(shares);
    prepared = true;
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    // A commit whose record could not be written may be on the disk all the same: the table stays as it has it.
    if (prepared && !core_->log->uncommitted(table.id())) throw;
    core_->log->roll_back();
    try {
      table.undo_grow(before, /*files=*/!core_->log->broken());
      set_shares(shares_before);
    } catch (const Error&) {
      // Files longer than the manifest says are cut when the store is opened.
    }
    throw;
  }
}

void Store::Impl::shrink(TableImpl& table, std::uint64_t rows) {
  const std::uint64_t before = table.rows();
  Manifest manifest = manifest_;
  manifest.tables.at(table.name()).geometry.rows = rows;
  const auto shares = plan(*core_, manifest.tables), shares_before = plan(*core_, manifest_.tables);
  commit_still(/*even_unchanged=*/false);
  if (core_->log)
    core_->log->apply_all();
  else
    core_->mark.set(core_->newest);
  const TableImpl::LastPage last = table.last_page(rows);
  bool prepared = false;
  try {
    table.cut(rows, last);
    set_shares(shares);
    prepared = true;
    commit_still(/*even_unchanged=*/true);
  } catch (...) {
    if (core_->log) {
      // As in grow_logged().
      if (prepared && !core_->log->uncommitted(table.id())) throw;
      core_->log->roll_back();
    }
    if (core_->log || !prepared || !has_committed(table)) {
      try {
        table.undo_cut(before, last);
        set_shares(shares_before);
        if (!core_->log && !table.ahead()) core_->mark.clear();
      } catch (const Error&) {
        // The table has its old rows. Where they were to be changed in place, the mark is there.
      }
      throw;
    }
  }
  // From here the table has so many rows, whatever happens to its files, which are longer: opening cuts them, too.
  try {
    if (core_->log) core_->log->apply_all();
    table.cut_files();
  } catch (const Error&) {
  }
}

void Store::Impl::resize(TableImpl& table, std::uint64_t rows) {
  const auto guard = lock();
  check_writable();
  const auto still = stand_still();
  const std::uint64_t before = check_resizable(table).geometry.rows;
  if (rows == before) return;
  if (rows > before) {
    grow(table, rows, {});
  } else {
    shrink(table, rows);
  }
}

std::uint64_t Store::Impl::append(TableImpl& table, std::span<const std::byte> rows) {
  const auto guard = lock();
  check_writable();
  const auto still = stand_still();
  const std::uint64_t before = check_resizable(table).geometry.rows;
  const std::uint64_t row_bytes = table.schema().fields()[0].bytes;
  if (rows.size() % row_bytes != 0)
    throw InvalidArgument(fmt::format("table '{}': {} bytes are no whole number of rows of {} bytes", printable(table.name()),
                                      rows.size(), row_bytes));
  if (rows.empty()) return before;
  grow(table, checked_add(before, rows.size() / row_bytes, "rows of the table"), [&] { table.fill(before, rows); });
  return before;
}

std::uint64_t Store::Impl::append(TableImpl& table, const Table::NewRows& rows, const Progress& progress) {
  const auto guard = lock();
  check_writable();
  const auto still = stand_still();
  const std::uint64_t before = check_resizable(table).geometry.rows;
  const std::string& weight = table.schema().fields()[0].name;
  const auto weights = rows.find(weight);
  if (weights == rows.end())
    throw InvalidArgument(fmt::format("table '{}': new rows need their '{}'", printable(table.name()), weight));
  const std::uint64_t count = weights->second->rows();
  for (const auto& [name, reader] : rows) {
    const Field& field = table.schema().field(name);
    if (reader->rows() != count || reader->dim() != field.elements || reader->dtype() != field.dtype)
      throw InvalidArgument(fmt::format("{}: {} x {} {} for '{}' of {} new rows of table '{}', which has {} x {}",
                                        reader->description(), reader->rows(), reader->dim(), dtype_name(reader->dtype()),
                                        printable(name), count, printable(table.name()), field.elements,
                                        dtype_name(field.dtype)));
  }
  if (count == 0) return before;
  grow(table, checked_add(before, count, "rows of the table"), [&] { table.fill(before, rows, progress); });
  return before;
}

}  // namespace embermap
