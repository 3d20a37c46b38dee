#include "store/moment.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "store/log_format.hpp"
#include "store/store.hpp"

namespace embermap {

Moment::Moment(const Manifest& in_file, const Manifest& manifest, std::uint64_t applied, std::uint64_t last) : last_{last} {
  for (const Manifest* const one : {&in_file, &manifest})
    for (const auto& [name, entry] : one->tables) {
      // The last change may be in the log alone; what the file had before that is known as well.
      std::uint64_t& least = least_[entry.id];
      least = std::max(least, entry.changed <= applied ? entry.changed : std::min(entry.settled, applied));
    }
}

void Moment::check(const std::filesystem::path& store, std::string_view name, const TableEntry& entry,
                   const PageLedger::Number& number) const {
  const auto known = least_.find(entry.id);
  const std::uint64_t least = known == least_.end() ? 0 : known->second;
  std::string what;
  if (!number.commit) {
    // It got its number before any manifest spoke of one.
    if (least == 0) return;
    what = fmt::format("has no number of a commit{}, and commit {} changed the table",
                       number.damaged ? " that matches its checksum" : "", least);
  } else if (*number.commit < least) {
    what = fmt::format("is of commit {}, and commit {} changed the table", *number.commit, least);
  } else if (*number.commit > last_) {
    what = fmt::format("is of commit {}, and the store is {}", *number.commit, at_commit(last_));
  } else {
    return;
  }
  throw MomentError(fmt::format(
      "{}: {}: it was brought back without the store's other files, or they without it. Bring all of them back from one copy; "
      "accept_unclean, or 'embermap recover', takes the tables as they are",
      printable(store / fmt::format("{}.pages", name)), what));
}

}  // namespace embermap
