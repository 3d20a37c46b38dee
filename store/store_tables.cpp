// Tables that come into a store, and those that go.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/aligned_buffer.hpp"
#include "base/checked.hpp"
#include "base/error.hpp"
#include "io/block_reader.hpp"
#include "io/convert.hpp"
#include "io/npy.hpp"
#include "io/row_order.hpp"
#include "io/vocabulary.hpp"
#include "store/store_impl.hpp"

namespace embermap {

void Store::Impl::check_new(std::string_view name) const {
  check_table_name(name);
  if (manifest_.tables.contains(name))
    throw AlreadyExists(fmt::format("store {} has a table '{}' already", printable(core_->path), printable(name)));
  for (const auto& file : {data_path(name), pages_path(name)})
    if (is_there(file))
      throw AlreadyExists(
          fmt::format("{} exists but belongs to no table of the store; remove it or choose another name", printable(file)));
}

TableEntry Store::Impl::new_entry(std::string_view name, const TableOptions& options) const {
  check_new(name);
  const Schema schema(options.dim, options.dtype, options.optimizer);
  check_initializer(options.init, options.dtype);
  TableEntry entry;
  entry.id = manifest_.next_id;
  entry.dim = options.dim;
  entry.dtype = options.dtype;
  entry.optimizer = options.optimizer;
  entry.init = options.init;
  entry.seed = options.seed;
  entry.page_bytes = options.page_bytes;
  entry.memory = options.memory;
  entry.geometry =
      make_geometry(options.rows, schema.record_bytes(), schema.alignment(), schema.structured(), options.page_bytes);
  check_budget(name, entry);
  return entry;
}

void Store::Impl::check_budget(std::string_view name, const TableEntry& entry) const {
  auto entries = manifest_.tables;
  entries.emplace(name, entry);
  (void)plan(*core_, entries);
}

Store::Impl::NewFiles Store::Impl::new_files(std::string_view name, const TableEntry& entry) const {
  NewFiles files{TemporaryFile::create(data_path(name), /*overwrite=*/false, core_->ops),
                 TemporaryFile::create(pages_path(name), /*overwrite=*/false, core_->ops)};
  files.data.file().write(0, table_header(Schema(entry.dim, entry.dtype, entry.optimizer), entry.geometry));
  files.data.file().resize(entry.geometry.file_bytes());
  return files;
}

std::uint64_t Store::Impl::settled_commit() const { return core_->log ? core_->log->applied() : manifest_.commit; }

std::vector<std::string> Store::Impl::names_beside(std::string_view table) {
  return {vocabulary_beside(table).native(), order_beside(table).native()};
}

std::set<std::string, std::less<>> Store::Impl::files_of(std::string_view name, bool adopted) {
  std::set<std::string, std::less<>> files{fmt::format("{}.pages", name)};
  if (!adopted) files.insert(fmt::format("{}.npy", name));
  return files;
}

void Store::Impl::announce(std::string_view name, bool adopted) {
  ++manifest_.revision;
  Manifest manifest = manifest_;
  manifest.unfinished.merge(files_of(name, adopted));
  core_->manifest_file.save(manifest);
}

void Store::Impl::withdraw() noexcept {
  try {
    replace_manifest(manifest_);
  } catch (const std::exception&) {  // the next commit does
  }
}

void Store::Impl::remove_unfinished() {
  for (const std::string& name : manifest_.unfinished) {
    const std::filesystem::path file = core_->path / name;
    bool used = false;  // an adopted file may lie in the store's directory
    for (const auto& [table, entry] : manifest_.tables)
      used = used || files_of(table, entry.adopted.has_value()).contains(name) || entry.adopted == file;
    if (!used && core_->ops.unlink(file.c_str()) != 0 && errno != ENOENT) throw IoError(errno, "unlink", file);
  }
  sync_directory(core_->path, core_->ops);
  manifest_.unfinished.clear();
}

Table Store::Impl::complete(const std::string& name, const TableEntry& entry, NewFiles files) {
  announce(name, /*adopted=*/false);
  try {
    files.data.commit();
  } catch (const AlreadyExists&) {
    withdraw();
    throw;  // theirs, not ours to remove
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
  try {
    files.pages.commit();
  } catch (const AlreadyExists&) {  // someone made NAME.pages meanwhile: theirs stays, ours goes
    core_->ops.unlink(data_path(name).c_str());
    withdraw();
    throw;
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
  try {
    return add(name, entry);
  } catch (...) {
    discard(name, /*adopted=*/false);
    throw;
  }
}

void Store::Impl::discard(std::string_view name, bool adopted) noexcept {
  try {
    // The manifest may have been replaced before the call that failed. As long as it lists the table, its files stay.
    if (Manifest::load(core_->path).tables.contains(name)) announce(name, adopted);
    if (!adopted) core_->ops.unlink(data_path(name).c_str());
    core_->ops.unlink(pages_path(name).c_str());
    sync_directory(core_->path, core_->ops);
    withdraw();
  } catch (const std::exception&) {
    // The table is whole and listed, or a file is left that create() will name: nothing is lost either way.
  }
}

Table Store::Impl::create(std::string_view name, const TableOptions& options) {
  const auto guard = lock();
  check_writable();
  const TableEntry entry = new_entry(name, options);
  NewFiles files = new_files(name, entry);
  PageLedger::create(files.open_pages(), entry.geometry.pages(), /*adopted=*/false, settled_commit());
  return complete(std::string(name), entry, std::move(files));
}

Table Store::Impl::add(const std::string& name, const TableEntry& entry) {
  Manifest manifest = manifest_;
  if (manifest.next_id == ~0U) throw InvalidArgument("a store can number no more tables");
  ++manifest.next_id;
  manifest.tables.emplace(name, entry);
  for (const std::string& file : files_of(name, entry.adopted.has_value())) manifest.unfinished.erase(file);
  for (const std::string& file : names_beside(name)) manifest.unfinished.erase(file);  // they are the new one's by now
  const auto shares = plan(*core_, manifest.tables);
  moment_ = Moment::settled(manifest_);
  auto table = open_table(name, entry);
  try {
    apply(shares);  // the others make room; their dirty pages may have to be written, which can fail
    table->set_share(shares.at(name));
    replace_manifest(std::move(manifest));
    tables_.emplace(name, table);
  } catch (...) {
    table->close(/*removed=*/true);  // the log knows it
    try {
      apply(plan(*core_, manifest_.tables));
    } catch (const std::exception&) {
      // The others go on with less memory.
    }
    throw;
  }
  return Table(std::move(table));
}

namespace {

void check_imported_state(const Schema& schema, std::uint64_t table_rows, const Store::ImportedState& state) {
  for (const auto& [name, rows] : state.fields) {
    const Field& field = schema.field(name);
    if (&field == &schema.fields().front())
      throw InvalidArgument(fmt::format("'{}' is the weight, no state of the optimizer", printable(name)));
    if (rows->rows() != table_rows || rows->dim() != field.elements || rows->dtype() != field.dtype)
      throw InvalidArgument(fmt::format("{}: {} x {} {} for the state '{}', which has {} x {} {}", rows->description(),
                                        rows->rows(), rows->dim(), dtype_name(rows->dtype()), printable(name), table_rows,
                                        field.elements, dtype_name(field.dtype)));
  }
}

}  // namespace

Table Store::Impl::import(std::string_view name, RowReader& reader, TableOptions options, const ImportedState& state,
                          const Progress& progress, ConversionReport* report) {
  const auto guard = lock();
  check_writable();
  options.rows = reader.rows();
  options.dim = reader.dim();
  TableEntry entry = new_entry(name, options);
  entry.step = state.step;
  entry.carried = state.carried;
  const Geometry& geometry = entry.geometry;
  const Schema schema(entry.dim, entry.dtype, entry.optimizer);
  check_imported_state(schema, reader.rows(), state);
  check_free_space(core_->path, data_path(name), geometry.file_bytes());  // all of it will be written
  NewFiles files = new_files(name, entry);
  PageFile file(std::string(name), files.open_data(),
                PageLedger::create(files.open_pages(), geometry.pages(), /*adopted=*/false, settled_commit()), schema, geometry,
                entry.init, entry.seed, core_->compute, core_->io, [] {}, {.io = core_->page_io});

  const std::uint64_t source_row = options.dim * item_size(reader.dtype());
  const std::uint64_t weight = schema.fields()[0].bytes;
  // Rows are in flight as the reader gives them, converted (twice), and in pages.
  const std::uint64_t import_bytes = core_->transfer_bytes() / 4;
  // Whole pages, and whole blocks of the reader where those are not much larger.
  const std::uint64_t page_rows_bytes = std::max(geometry.page_bytes(), source_row * geometry.rows_per_page);
  std::uint64_t block_pages = std::max<std::uint64_t>(1, import_bytes / page_rows_bytes);
  if (reader.block_rows() <= 4 * import_bytes / source_row)
    block_pages = std::max(block_pages, ceil_div(reader.block_rows(), geometry.rows_per_page));
  const std::uint64_t block_rows = std::min(block_pages * geometry.rows_per_page, std::max<std::uint64_t>(geometry.rows, 1));
  // While one block goes to its pages, the next one is read and converted, and the one after that comes from the disk.
  reader.read_ahead(0, geometry.rows, std::min<std::uint64_t>(import_bytes, 32U << 20));
  const bool converts = reader.dtype() != options.dtype;
  std::vector<std::byte> source(converts ? block_rows * source_row : 0), rows(2 * block_rows * weight);
  std::vector<std::byte> states;
  const AlignedBuffer memory(ceil_div(block_rows, geometry.rows_per_page) * geometry.page_bytes());
  std::vector<PageBuffer> buffers;
  ConversionReport ignored;
  ConversionReport& counted = report != nullptr ? *report : ignored;
  BlockReader blocks(ceil_div(geometry.rows, block_rows), geometry.rows > block_rows, [&](std::uint64_t index) {
    const std::uint64_t first = index * block_rows, count = std::min(block_rows, geometry.rows - first);
    std::byte* const out = rows.data() + index % 2 * block_rows * weight;
    reader.read(first, count, converts ? source.data() : out);
    if (converts) convert_rows(reader, first, count, source.data(), options.dtype, out, counted);
    return out;
  });
  core_->report(progress, 0, geometry.rows);
  for (std::uint64_t first = 0; first < geometry.rows; first += block_rows) {
    const std::uint64_t count = std::min(block_rows, geometry.rows - first);
    const std::byte* const weights = blocks.next();
    if (schema.structured()) file.generate_states(count, memory.data());
    for (const auto& [name_of_field, of_field] : state.fields) {
      const Field& field = schema.field(name_of_field);
      states.resize(std::max<std::size_t>(states.size(), count * field.bytes));
      of_field->read(first, count, states.data());
      for (std::uint64_t row = 0; row < count; ++row)
        std::memcpy(memory.data() + row * geometry.stride + field.offset, states.data() + row * field.bytes, field.bytes);
    }
    core_->compute.parallel_for(count, std::max<std::uint64_t>(1, (256U << 10) / geometry.stride),
                                [&](std::uint64_t begin, std::uint64_t end) {
                                  for (std::uint64_t row = begin; row < end; ++row)
                                    std::memcpy(memory.data() + row * geometry.stride, weights + row * weight, weight);
                                });
    buffers.clear();
    for (std::uint64_t row = 0; row < count; row += geometry.rows_per_page)
      buffers.push_back({geometry.page_of(first + row), memory.data() + row * geometry.stride});
    file.write(buffers);
    core_->report(progress, first + count, geometry.rows);
  }
  file.sync();
  file.close();
  return complete(std::string(name), entry, std::move(files));
}

namespace {

// Throws InvalidArgument for the file of another store's table: what it has of rows is in that store's log and page file as well,
// and its writer knows of no other.
void check_no_table_file(const std::filesystem::path& store, const std::filesystem::path& file) {
  const std::filesystem::path around = store_around(file);
  std::error_code error;
  if (around.empty() || std::filesystem::equivalent(around, store, error)) return;
  std::map<std::string, TableEntry, std::less<>> tables;
  try {
    tables = Manifest::load(around).tables;
  } catch (const Error&) {  // no store that anybody can open
    return;
  }
  for (const auto& [name, entry] : tables)
    if (!entry.adopted && std::filesystem::equivalent(around / (name + ".npy"), file, error))
      throw InvalidArgument(
          fmt::format("{} belongs to table '{}' of the store {}, which alone may use it; open that store, or import the table",
                      printable(file), printable(name), printable(around)));
}

}  // namespace

Table Store::Impl::adopt(std::string_view name_view, const std::filesystem::path& file, bool writable,
                         std::optional<DType> dtype) {
  const std::string name(name_view);
  const auto guard = lock();
  check_writable();
  check_table_name(name);
  if (manifest_.tables.contains(name))
    throw AlreadyExists(fmt::format("store {} has a table '{}' already", printable(core_->path), printable(name)));
  if (is_there(pages_path(name)))
    throw AlreadyExists(fmt::format("{} exists but belongs to no table of the store; remove it or choose another name",
                                    printable(pages_path(name))));
  std::error_code error;
  const std::filesystem::path path = std::filesystem::canonical(file, error);
  if (error) throw IoError(error.value(), "open", file);
  for (const auto& [other, known] : manifest_.tables)
    if ((known.adopted && std::filesystem::equivalent(*known.adopted, path, error)) ||
        (!known.adopted && std::filesystem::equivalent(data_path(other), path, error)))
      throw AlreadyExists(fmt::format("{} is the file of table '{}' already", printable(path), printable(other)));
  check_no_table_file(core_->path, path);

  const File data = File::open(path, File::Mode::kRead, core_->ops);
  const FileStamp stamp = stamp_of(data);  // before anything of it is read
  const NpyHeader header = read_npy_header(data);
  const auto refuse = [&](std::string_view why) {
    return FormatError(path, fmt::format("shape {}, dtype {} cannot be used in place: {}; import it instead", header.shape_text(),
                                         header.dtype_text(), why));
  };
  if (!header.fields.empty()) throw refuse("the elements are structured");
  if (header.shape.size() != 2) throw refuse("a table has two dimensions");
  if (header.shape[1] == 0) throw refuse("a table has at least one column");
  if (header.fortran_order && header.shape[0] > 1 && header.shape[1] > 1) throw refuse("it is in Fortran order");
  std::optional<DType> found = dtype_of_npy_descr(header.descr);
  const bool big_endian = !found && (found = dtype_of_big_endian_npy_descr(header.descr)).has_value();
  if (!found && dtype == DType::kBFloat16 && header.item_bytes == 2 && header.descr.find('V') != std::string::npos) found = dtype;
  if (!found)
    throw refuse(header.descr.find('V') != std::string::npos ? "raw bytes have no type (say bfloat16 if they are that)"
                                                             : "a table cannot hold this dtype");
  if (dtype && *dtype != *found) throw refuse(fmt::format("it is not {}", dtype_name(*dtype)));

  TableEntry entry;
  entry.id = manifest_.next_id;
  entry.dim = header.shape[1];
  entry.dtype = *found;
  const Schema schema(entry.dim, entry.dtype, {});
  entry.geometry = make_geometry(header.shape[0], schema.record_bytes(), schema.alignment(), false, entry.page_bytes);
  entry.geometry.data_offset = header.data_offset;
  entry.big_endian = big_endian;
  entry.adopted = path;
  entry.adopted_in = home_of(core_->path);
  entry.adopted_writable = writable && ::access(path.c_str(), W_OK) == 0;
  check_budget(name, entry);
  TemporaryFile pages = TemporaryFile::create(pages_path(name), /*overwrite=*/false, core_->ops);
  PageLedger::create(File::open(pages.file().path(), File::Mode::kReadWrite, core_->ops), entry.geometry.pages(), true,
                     settled_commit())
      .set_stamp(stamp);
  announce(name, /*adopted=*/true);
  try {
    pages.commit();
  } catch (const AlreadyExists&) {
    withdraw();
    throw;  // theirs
  } catch (...) {
    discard(name, /*adopted=*/true);
    throw;
  }
  try {
    return add(name, entry);
  } catch (...) {
    discard(name, /*adopted=*/true);
    throw;
  }
}

void Store::Impl::remove(std::string_view name) {
  const auto guard = lock();
  check_writable();
  const auto listed = manifest_.tables.find(name);
  if (listed == manifest_.tables.end())
    throw NotFound(fmt::format("store {} has no table '{}'", printable(core_->path), printable(name)));
  const bool adopted = listed->second.adopted.has_value();
  // Out of the manifest first: a crash in between leaves files that are to be removed, not a table without files.
  Manifest manifest = manifest_;
  manifest.unfinished.merge(files_of(name, adopted));
  // What an import has put beside it. NAME.order.npy may be a table's own file, of one called NAME.order.
  for (const std::string& file : names_beside(name))
    if (is_there(core_->path / file)) manifest.unfinished.insert(file);
  manifest.tables.erase(listed->first);
  replace_manifest(std::move(manifest));
  if (const auto found = tables_.find(name); found != tables_.end()) {
    found->second->close(/*removed=*/true);
    tables_.erase(found);
  }
  if (const auto found = broken_.find(name); found != broken_.end()) broken_.erase(found);
  remove_unfinished();
  replace_manifest(manifest_);
  apply(plan(*core_, manifest_.tables));
}

}  // namespace embermap
