// A file made anew beside one that it replaces, with something added to what that one holds.
#pragma once

#include <sys/stat.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/file.hpp"

namespace embermap {

// Holds the temporary file, and the file that was there if something is to be added to it. Others may do the same meanwhile:
// finish() finds out, and has what is there by then copied once more, so that none undoes what another did.
class Addition {
 public:
  // `adds`: what `file` holds, if it exists, is kept. Else it must not exist, unless `overwrite` is true. `what` names the part
  // that is added, for messages. Throws as TemporaryFile::create does.
  Addition(const std::filesystem::path& file, std::string what, bool adds, bool overwrite);

  // The file that is there; not open if there was none.
  const File& existing() const noexcept { return existing_; }
  File& file() noexcept { return temporary_.file(); }
  const std::filesystem::path& target() const noexcept { return temporary_.target(); }

  // Puts the added part, out of `ours` (complete, under its temporary name), and all of `theirs` but that part into the empty
  // `to`. Throws AlreadyExists where the part may not be replaced.
  using Merge = std::function<void(const File& theirs, File& ours, File& to)>;
  // Syncs and renames. Throws NotFound if the file that was there is gone, AlreadyExists if one came where none was (and nothing
  // is added), IoError.
  void finish(const Merge& merge);

 private:
  bool changed() const;
  void open_existing();

  std::string what_;
  bool adds_;
  File existing_;
  struct stat status_ {};  // of `existing_` when it was opened
  TemporaryFile temporary_;
};

// Writes bytes to a file from `at` on; small ones are gathered.
class Appender {
 public:
  explicit Appender(std::uint64_t at) : at_{at} {}
  void write(const File& file, std::span<const std::byte> bytes);
  void flush(const File& file);
  std::uint64_t position() const noexcept { return at_ + pending_.size(); }

 private:
  std::uint64_t at_;
  std::vector<std::byte> pending_;
};

// Copies a range between files, with a buffer of 4 MiB.
void copy_range(const File& from, std::uint64_t offset, std::uint64_t bytes, const File& to, std::uint64_t at);

}  // namespace embermap
