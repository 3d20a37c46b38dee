#include "store/store.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "store/store_impl.hpp"

namespace embermap {

std::string_view durability_name(Durability durability) { return durability == Durability::kCommit ? "commit" : "none"; }

std::string_view verify_name(Verify verify) { return verify == Verify::kRead ? "read" : "memory"; }

Verify parse_verify(std::string_view name) {
  for (const Verify verify : {Verify::kMemory, Verify::kRead})
    if (name == verify_name(verify)) return verify;
  throw InvalidArgument(fmt::format("there is no verify '{}'; there are memory and read", printable(name)));
}

Durability parse_durability(std::string_view name) {
  if (name == "commit") return Durability::kCommit;
  if (name == "none") return Durability::kNone;
  throw InvalidArgument(fmt::format("there is no durability '{}'; there are commit and none", printable(name)));
}

std::string_view pin_name(Pin pin) { return pin == Pin::kMapping ? "mapping" : "frames"; }

Pin parse_pin(std::string_view name) {
  if (name == "frames") return Pin::kFrames;
  if (name == "mapping") return Pin::kMapping;
  throw InvalidArgument(fmt::format("there is no pin '{}'; there are frames and mapping", printable(name)));
}

Store Store::open(const std::filesystem::path& path, const StoreOptions& options) { return Store(Impl::open(path, options)); }

const std::filesystem::path& Store::path() const { return impl_->core()->path; }
bool Store::writable() const { return impl_->core()->writable; }
std::uint64_t Store::commit_number() const { return impl_->core()->commit.load(); }
std::uint64_t Store::memory() const { return impl_->core()->memory; }
LogStats Store::log_stats() const { return impl_->log_stats(); }
const std::filesystem::path& Store::damaged_log() const { return impl_->core()->damaged_log; }
int Store::device() const { return impl_->core()->device; }

Table Store::create(std::string_view name, const TableOptions& options) { return impl_->create(name, options); }
Table Store::import(std::string_view name, RowReader& reader, TableOptions options, const Progress& progress,
                    ConversionReport* report) {
  return impl_->import(name, reader, std::move(options), {}, progress, report);
}
Table Store::import(std::string_view name, RowReader& reader, TableOptions options, const ImportedState& state,
                    const Progress& progress, ConversionReport* report) {
  return impl_->import(name, reader, std::move(options), state, progress, report);
}
Table Store::adopt(std::string_view name, const std::filesystem::path& file, bool writable, std::optional<DType> dtype) {
  return impl_->adopt(name, file, writable, dtype);
}
Table Store::table(std::string_view name) { return impl_->table(name); }
bool Store::contains(std::string_view name) const { return impl_->contains(name); }
std::vector<std::string> Store::tables() const { return impl_->names(); }
void Store::remove(std::string_view name) { impl_->remove(name); }
std::uint64_t Store::commit(std::string_view note) { return impl_->commit(note); }
CommitInfo Store::last_commit() const { return impl_->last_commit(); }
std::vector<CommitInfo> Store::commits() const { return impl_->commits(); }
void Store::recalibrate() { impl_->core()->forget_measurements(); }
void Store::checkpoint() { impl_->checkpoint(); }
std::uint64_t Store::refresh() { return impl_->refresh(); }
SnapshotReport Store::snapshot(const std::filesystem::path& destination, const Progress& progress) {
  return impl_->snapshot(destination, progress);
}
void Store::close() { impl_->close(); }
void Store::abandon() noexcept { impl_->abandon(); }
void Store::forget_after_fork() noexcept { impl_->forget_after_fork(); }
bool Store::closed() const noexcept { return impl_->core()->closed.load(); }

bool is_store(const std::filesystem::path& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path / kManifestName, error);
}

std::filesystem::path store_around(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path file = path;
  for (int links = 0; links < 40 && std::filesystem::is_symlink(file, error); ++links)  // also one that leads to nothing
    file = file.parent_path() / std::filesystem::read_symlink(file, error);
  const std::filesystem::path folder =
      std::filesystem::canonical(file.has_parent_path() ? file.parent_path() : std::filesystem::path("."), error);
  return !error && is_store(folder) ? folder : std::filesystem::path{};
}

void check_outside_stores(const std::filesystem::path& file) {
  if (const auto store = store_around(file); !store.empty())
    throw InvalidArgument(
        fmt::format("{} is in the own directory of the store {}; choose another place", printable(file), printable(store)));
}

namespace {

class TableRows final : public RowReader {
 public:
  TableRows(Table table, std::string_view field) : table_{std::move(table)}, field_{table_.schema().field(field)} {
    rows_ = table_.rows();
    dim_ = field_.elements;
    dtype_ = field_.dtype;
  }
  std::string description() const override { return "table " + printable(table_.name()) + ", field " + field_.name; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    table_.read(first, count, {out, count * field_.bytes}, field_.name);
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, (4U << 20) / field_.bytes); }

 private:
  Table table_;
  Field field_;
};

}  // namespace

std::unique_ptr<RowReader> table_rows(Table table, std::string_view field) {
  return std::make_unique<TableRows>(std::move(table), field);
}

}  // namespace embermap
