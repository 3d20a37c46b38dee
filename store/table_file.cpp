#include "store/table_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <system_error>
#include <variant>

#include "base/error.hpp"
#include "store/store.hpp"
#include "store/table.hpp"

namespace embermap {

std::filesystem::path store_of(const std::filesystem::path& file) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(file, error);
  if (error) return {};
  const std::filesystem::path store = real.parent_path();
  if (!is_store(store)) return {};
  const std::string name = real.filename().native();
  const bool table =
      real.extension() == ".npy" && std::filesystem::exists(std::filesystem::path(real).replace_extension(".pages"), error);
  return table || name == "embermap.json" || name == "LOCK" || real.extension() == ".pages" ? store : std::filesystem::path{};
}

std::vector<Remark> check_table_file(const Location& source, std::uint64_t memory) {
  if (source.format != Location::Format::kNpy) return {};
  const std::filesystem::path path = store_of(source.file);
  if (path.empty()) return {};
  const std::string name = std::filesystem::canonical(source.file).stem().native();
  std::uint64_t missing = 0, logged = 0, pages = 0;
  try {
    Store store = Store::open(path, StoreOptions{.mode = StoreOptions::Mode::kRead, .memory = memory, .threads = 1});
    if (!store.contains(name)) return {};
    const Table table = store.table(name);
    const std::string field = source.selector.empty() ? "weight" : source.selector;
    const auto& fields = table.schema().fields();
    const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.name == field; });
    if (found == fields.end()) return {};  // refused when it is opened
    const bool holes_are_right = field == "weight" ? std::holds_alternative<Zeros>(table.initializer()) : found->initial == 0;
    pages = table.geometry().pages();
    const RecoveryPlan plan = plan_recovery(path);
    if (const auto found_pages = plan.pages.find(name); found_pages != plan.pages.end()) logged = found_pages->second;
    if (!holes_are_right) missing = pages - table.written_pages();
  } catch (const Error& error) {
    return {{fmt::format("{} is taken as it is, its store cannot be asked for rows that are not in the file: {}",
                         printable(source.file), error.what()),
             /*doubt=*/true}};
  }
  if (missing != 0)
    throw FormatError(
        source.file,
        fmt::format("is the table '{}' of a store and {} of its {} pages were never written: their initial rows are not in "
                    "the file; use 'embermap export' on the table, or 'embermap materialize' first",
                    printable(name), missing, pages));
  if (logged != 0)
    throw FormatError(source.file,
                      fmt::format("is the table '{}' of a store and {} of its pages are in the store's redo log, and not yet in "
                                  "the file; use 'embermap export' on the table, or 'embermap recover' on the store first",
                                  printable(name), logged));
  return {};
}

}  // namespace embermap
