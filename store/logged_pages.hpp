// Pages that are newer in the redo log than in their table's file, as those see it who read pages.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "io/page_io.hpp"
#include "store/log_index.hpp"

namespace embermap {

// Thread safety: all members may be called from several threads.
class LoggedPages {
 public:
  virtual ~LoggedPages() = default;
  // There are none: find() would find nothing.
  virtual bool empty() const noexcept = 0;
  // Runs `body`, which may find() and read(): until it ends, what it finds stays where it is. Runs it once more where that could
  // not be kept up.
  virtual void reading(const std::function<void()>& body) = 0;
  // The newest version of a page, of many pages (not there(): the file has it).
  virtual std::optional<LoggedVersion> find(std::uint32_t table, std::uint64_t page) const = 0;
  virtual void find(std::uint32_t table, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const = 0;
  // Reads the log as PageIo::read() does.
  virtual std::uint64_t read(std::span<const IoPiece> pieces, const PageIo::Done& done) = 0;
  // How the log is read; null: there is none. Only while reading() runs.
  virtual PageIo* io() noexcept = 0;
  // All pages of a table, in no order.
  virtual void for_each(std::uint32_t table, const std::function<void(std::uint64_t, const LoggedVersion&)>& body) const = 0;
  // Of a reader: what the tables' files were when it looked. Another look with the same result has found the same files, of whose
  // committed pages nothing was written in between; empty: nothing is known.
  virtual std::vector<std::uint64_t> files_known() const { return {}; }
};

}  // namespace embermap
