// embermap._core: the C++ interface as Python sees it, without conveniences. Host arrays come as flat int64 ids and flat bytes,
// device memory as addresses; dtypes by name. What ids and values may be, shapes and results are the business of the Python files
// beside it.
//
// Every call that takes a lock of the store or of a table, or can wait in another way, releases the GIL: the lock's holder may be
// waiting for the GIL, to call a progress callback. Only those callbacks take it again, and look for signals, so that Ctrl-C ends
// a long call. A call without a callback does without the GIL until it is over.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/array_file.hpp"
#include "io/copy_file.hpp"
#include "io/rows.hpp"
#include "kernels/cuda.hpp"
#include "python/gil.hpp"
#include "store/store.hpp"
#include "store/table.hpp"
#include "store/table_archive.hpp"
#include "store/table_file.hpp"
#include "store/table_import.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace embermap::python {

// An optimizer is (name, options) to Python, None where there is none; the classes are Python's.
struct AnyOptimizer {
  Optimizer value = {};
};

}  // namespace embermap::python

namespace nanobind::detail {

template <>
struct type_caster<embermap::python::AnyOptimizer> {
  NB_TYPE_CASTER(embermap::python::AnyOptimizer, const_name("tuple[str, dict[str, typing.Any]]"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    value.value = std::monostate{};
    if (source.is_none()) return true;
    try {
      const auto [name, options] = cast<std::pair<std::string, dict>>(source);
      const std::optional<embermap::Optimizer> known = embermap::optimizer_named(name);
      if (!known) return false;
      value.value = *known;
      std::visit(
          [&, &all = options](auto& o) {
            embermap::visit_options(o, [&]<class T>(const char* option, T& target, bool) {
              const object given = all[option];
              if constexpr (std::is_same_v<T, embermap::StepOf>)
                target = embermap::step_of_named(cast<std::string>(given)).value();
              else if constexpr (std::is_same_v<T, std::array<double, 2>>)
                target = {cast<double>(given[0]), cast<double>(given[1])};
              else
                target = cast<T>(given);
            });
          },
          value.value);
      return true;
    } catch (const std::exception&) {  // not made by embermap.optim
      PyErr_Clear();
      return false;
    }
  }

  static handle from_cpp(const embermap::python::AnyOptimizer& given_optimizer, rv_policy, cleanup_list*) noexcept {
    const embermap::Optimizer& optimizer = given_optimizer.value;
    dict options;
    std::visit(
        [&](const auto& o) {
          embermap::visit_options(o, [&]<class T>(const char* option, const T& given, bool) {
            if constexpr (std::is_same_v<T, embermap::StepOf>)
              options[option] = std::string(embermap::step_of_name(given));
            else if constexpr (std::is_same_v<T, std::array<double, 2>>)
              options[option] = nanobind::make_tuple(given[0], given[1]);
            else
              options[option] = given;
          });
        },
        optimizer);
    return nanobind::make_tuple(std::string(embermap::optimizer_name(optimizer)), options).release();
  }
};

}  // namespace nanobind::detail

namespace embermap::python {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Dtype = std::optional<std::string_view>;

using Report = nb::typed<nb::dict, nb::str, nb::any>;

constexpr std::uint64_t kTransferBytes = 32ULL << 20;  // buffers of import and export

std::span<const std::int64_t> ids_of(const Ids& ids) { return {ids.data(), ids.size()}; }
std::span<const std::byte> bytes_of(const Bytes& bytes) {
  return std::as_bytes(std::span<const std::uint8_t>{bytes.data(), bytes.size()});
}
std::span<std::byte> bytes_of(const WritableBytes& bytes) {
  return std::as_writable_bytes(std::span<std::uint8_t>{bytes.data(), bytes.size()});
}
std::optional<DType> dtype_of(const Dtype& name) { return name ? std::optional{parse_dtype(*name)} : std::nullopt; }

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Ctrl-C stops a call also where nobody wants to be told of its progress. `callback` must outlive what is returned.
Progress progress_of(const nb::object& callback) {
  if (callback.is_none())
    return [](std::uint64_t, std::uint64_t) {
      const WithGil gil;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    };
  return [&callback](std::uint64_t done, std::uint64_t total) {
    const WithGil gil;
    or_sleep([&] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      callback(done, total);
    });
  };
}

// --- errors ---------------------------------------------------------------------------------------------------------

nb::object text_of(std::string_view text) {
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

void raise(const nb::object& error) { PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr()); }

void raise(nb::handle type, const std::exception& error) { raise(type(text_of(error.what()))); }

void raise_ours(const char* name, const std::exception& error) {
  raise(nb::module_::import_("embermap._errors").attr(name), error);
}

void raise_with_number(nb::handle type, int number, const std::exception& error) {
  const nb::object raised = type(text_of(error.what()));
  raised.attr("errno") = number;
  raise(raised);
}

// OSError picks its subclass by errno and prints the file name itself, so the name is taken out of the text.
void raise_io(const IoError& error) {
  std::string text = error.what();
  const std::string name = " " + printable(error.file());
  if (const auto at = text.find(name); at != std::string::npos) text.erase(at, name.size());
  const std::string& file = error.file().native();
  const nb::object path = nb::steal(PyUnicode_DecodeFSDefaultAndSize(file.data(), static_cast<Py_ssize_t>(file.size())));
  raise(nb::handle(PyExc_OSError)(error.error_number(), text_of(text), path));
}

void translate_now(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const RowIdError& error) {
    const nb::object raised = nb::module_::import_("embermap._errors").attr("RowIdError")(text_of(error.what()));
    raised.attr("id") = error.id();
    raised.attr("position") = error.position();
    raise(raised);
  } catch (const IoError& error) {
    raise_io(error);
  } catch (const DTypeError& error) {
    raise(PyExc_TypeError, error);
  } catch (const NotFound& error) {
    raise_ours("NotFoundError", error);
  } catch (const AlreadyExists& error) {
    raise_with_number(PyExc_FileExistsError, EEXIST, error);
  } catch (const FormatError& error) {
    raise_ours("FormatError", error);
  } catch (const CorruptError& error) {
    raise_ours("CorruptError", error);
  } catch (const LockedError& error) {
    raise_ours("LockedError", error);
  } catch (const StaleError& error) {
    raise_ours("StaleError", error);
  } catch (const LogFullError& error) {
    raise_ours("LogFullError", error);
  } catch (const ReadOnlyError& error) {
    raise_with_number(PyExc_PermissionError, EROFS, error);
  } catch (const BudgetError& error) {
    raise_ours("BudgetError", error);
  } catch (const CudaError& error) {
    raise_ours("CudaError", error);
  } catch (const InvalidArgument& error) {
    raise(PyExc_ValueError, error);
  } catch (const ClosedError& error) {
    raise(PyExc_ValueError, error);
  } catch (const Error& error) {
    raise(PyExc_RuntimeError, error);
  }
}

// Exceptions are made by Python code, in which a thread may lose the GIL.
void translate(const std::exception_ptr& thrown, void*) {
  or_sleep([&] { translate_now(thrown); });
}

// --- store ----------------------------------------------------------------------------------------------------------

Store open_store(const std::filesystem::path& path, std::string_view mode, std::uint64_t memory, int device, unsigned threads,
                 bool accept_unclean, std::string_view io, std::optional<bool> direct, std::string_view policy,
                 std::string_view durability, std::uint64_t log_limit, bool autocommit, std::optional<bool> allow_adopted,
                 std::string_view pin, bool accept_changed, std::string_view verify) {
  StoreOptions options;
  if (mode == "a") {
    options.mode = StoreOptions::Mode::kOpenOrCreate;
  } else if (mode == "r+") {
    options.mode = StoreOptions::Mode::kReadWrite;
  } else if (mode == "r") {
    options.mode = StoreOptions::Mode::kRead;
  } else {
    throw InvalidArgument("mode '" + std::string(mode) + "' is not one of 'a', 'r+', 'r'");
  }
  options.memory = memory;
  options.device = device;
  options.threads = threads;
  options.accept_unclean = accept_unclean;
  if (io != "auto") options.io = parse_io_engine(io);
  options.direct = direct;
  options.allow_adopted = allow_adopted;
  options.accept_changed = accept_changed;
  const std::optional<Replacement> replacement = parse_replacement(policy);
  if (!replacement) throw InvalidArgument("policy '" + printable(policy) + "' is not one of 'lru', 's3fifo'");
  options.replacement = *replacement;
  options.durability = parse_durability(durability);
  options.verify = parse_verify(verify);
  options.log_limit = log_limit;
  options.autocommit = autocommit;
  options.pin = parse_pin(pin);
  const WithoutGil release;
  return Store::open(path, options);
}

Table create_table(Store& store, std::string_view name, std::uint64_t rows, std::uint64_t dim, std::string_view dtype,
                   const AnyOptimizer& optimizer, const Initializer& init, std::uint64_t seed, std::uint64_t page_bytes,
                   std::uint64_t memory) {
  const TableOptions options{.rows = rows,
                             .dim = dim,
                             .dtype = parse_dtype(dtype),
                             .optimizer = optimizer.value,
                             .init = init,
                             .seed = seed,
                             .page_bytes = page_bytes,
                             .memory = memory};
  const WithoutGil release;
  return store.create(name, options);
}

// What a `format` of Python's names, for parse_location().
LocationOptions location_options(const std::optional<std::string>& format, LocationOptions::Use use) {
  return {.format = format ? std::optional(parse_format(*format)) : std::nullopt, .use = use};
}

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

nb::list texts_of(const std::vector<Remark>& remarks) {
  nb::list out;
  for (const Remark& remark : remarks) out.append(text_of(std::string_view(remark.text)));
  return out;
}

// The path of a file as Python has it: bytes that are no text come back as they were.
nb::object path_of(const std::filesystem::path& path) {
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.c_str(), static_cast<Py_ssize_t>(path.native().size())));
}

// What em.convert() returns.
Report copy_report(const CopyResult& copied) {
  Report out;
  out["rows"] = copied.rows;
  out["dim"] = copied.dim;
  out["source_dtype"] = std::string(dtype_name(copied.from));
  out["dtype"] = std::string(dtype_name(copied.to));
  out["became_infinite"] = copied.report.became_infinite;
  out["became_zero"] = copied.report.became_zero;
  if (!copied.vocabulary.empty()) out["vocabulary"] = path_of(copied.vocabulary);
  if (!copied.order.empty()) out["order"] = path_of(copied.order);
  if (copied.resumed != 0) out["resumed_rows"] = copied.resumed;
  out["remarks"] = texts_of(copied.remarks);
  return out;
}

// Names of arrays, or fields, and what they are of.
using Pairs = std::vector<std::pair<std::string, std::string>>;

// The first, and where `fields` names them, each.
Report copy_reports(const std::vector<CopyResult>& copied, const Pairs& fields) {
  Report out = copy_report(copied.front());
  if (fields.empty()) return out;
  nb::dict all;
  for (std::size_t i = 0; i < copied.size(); ++i) all[fields[i].first.c_str()] = copy_report(copied[i]);
  out["fields"] = all;
  return out;
}

// (source_dtype, allow_external, follow_links, format, dim, offset): how a file is read.
using Reading = std::tuple<std::optional<std::string>, bool, bool, std::optional<std::string>, std::uint64_t, std::uint64_t>;
// (first, end, order, jobs): which rows; end 2^64 - 1: all.
using Selection = std::tuple<std::uint64_t, std::uint64_t, nb::bytes, unsigned>;

// `fields`: those that are named apart, and then not in `text`.
Location source_of(const nb::bytes& text, const Reading& reading, const Pairs& fields = {}) {
  Location location = parse_location(text_of(text), location_options(std::get<3>(reading), LocationOptions::Use::kRead));
  if (!fields.empty() && !location.selector.empty())
    throw InvalidArgument(fmt::format("src names '{}'; fields name what is taken", printable(location.selector)));
  return location;
}

ReadOptions reading_of(const Reading& reading) {
  const auto& [dtype, allow_external, follow_links, format, dim, offset] = reading;
  return {.dtype = dtype ? std::optional(parse_dtype(*dtype)) : std::nullopt,
          .allow_external = allow_external,
          .follow_links = follow_links,
          .words = {},
          .dim = dim,
          .offset = offset};
}

RowSelection selection_of(const Selection& selection, bool permutation) {
  const auto& [first, end, order, jobs] = selection;
  RowSelection out{
      .first = first, .end = std::nullopt, .clamp = true, .order = text_of(order), .permutation = permutation, .jobs = jobs};
  if (end != std::numeric_limits<std::uint64_t>::max()) out.end = end;
  return out;
}

void set_import(ImportOptions& options, const Reading& reading, const Selection& selection, const Pairs& fields,
                const Dtype& dtype, const nb::bytes& vocabulary, bool check, const nb::object& callback, bool permutation) {
  options.reading = reading_of(reading);
  for (const auto& [field, array] : fields) options.fields.push_back({field, array});
  options.dtype = dtype_of(dtype);
  options.rows = selection_of(selection, permutation);
  options.vocabulary = text_of(vocabulary);
  options.check = check;
  options.memory = 2 * kTransferBytes;
  options.progress = progress_of(callback);
}

// Memory of a store that is opened to ask it of a table's file.
constexpr std::uint64_t kToLook = 64ULL << 20;

// (table, what em.convert() returns)
nb::tuple import_file(Store& store, const std::string& name, const nb::bytes& source, const Dtype& dtype, const Reading& reading,
                      const Selection& selection, const Pairs& fields, const AnyOptimizer& optimizer, std::uint64_t page_bytes,
                      std::uint64_t memory, const nb::bytes& vocabulary, const nb::bytes& beside, bool check, bool resume,
                      const nb::object& callback) {
  const Location location = source_of(source, reading, fields);
  ImportOptions options;
  set_import(options, reading, selection, fields, dtype, vocabulary, check, callback, /*permutation=*/true);
  TableOptions into;
  into.optimizer = optimizer.value;
  into.page_bytes = page_bytes;
  into.memory = memory;
  const std::string table_path = text_of(beside);
  std::vector<CopyResult> copied;
  const auto run = [&] {
    const WithoutGil release;
    const std::vector<Remark> remarks = check_table_file(location, kToLook);
    TableImport job(location, table_path, options, into);
    if (resume) {
      if (store.contains(name)) throw AlreadyExists(fmt::format("table '{}' already exists", printable(name)));
      job.read_resumably(options.progress);
    }
    Table table = job.run(store, name);
    try {
      job.finish();
    } catch (...) {
      job.withdraw();
      store.remove(name);
      throw;
    }
    copied = job.results();
    copied.front().remarks.insert(copied.front().remarks.end(), remarks.begin(), remarks.end());
    return table;
  };
  Table table = run();
  return nb::make_tuple(std::move(table), copy_reports(copied, fields));
}

// Rows onto a table that is there; `at`: nothing: all of them.
Report import_rows(Store& store, Table& table, const nb::bytes& source, const Dtype& dtype, const Reading& reading,
                   const Selection& selection, const Pairs& fields, const std::string& field, std::optional<std::uint64_t> at,
                   bool append, const nb::bytes& vocabulary, bool check, const nb::object& callback) {
  const Location location = source_of(source, reading, fields);
  IntoOptions options;
  set_import(options, reading, selection, fields, dtype, vocabulary, check, callback, /*permutation=*/false);
  options.field = field;
  options.at = at;
  options.append = append;
  std::vector<CopyResult> copied;
  {
    const WithoutGil release;
    const std::vector<Remark> remarks = check_table_file(location, kToLook);
    copied = import_into(store, table, location, options);
    copied.front().remarks.insert(copied.front().remarks.end(), remarks.begin(), remarks.end());
  }
  return copy_reports(copied, fields);
}

// --- table ----------------------------------------------------------------------------------------------------------

// Fields of a table to a file; with `fields`, (name in the file, field), several into one new file. `commit`: for attributes.
Report export_rows(Table& table, const nb::bytes& destination, const std::string& field, const Pairs& fields,
                   const Selection& selection, bool overwrite, const Dtype& dtype, std::optional<int> gzip,
                   const std::optional<std::string>& format, const nb::bytes& vocabulary, const nb::bytes& beside,
                   std::uint64_t commit, bool check, bool resume, const nb::object& callback) {
  const Location location =
      parse_location({destination.c_str(), destination.size()}, location_options(format, LocationOptions::Use::kWrite));
  const std::string table_path = text_of(beside);
  CopyOptions options;
  options.dtype = dtype_of(dtype);
  options.rows = selection_of(selection, /*permutation=*/false);
  options.overwrite = overwrite;
  options.gzip = gzip.value_or(-1);
  options.vocabulary = text_of(vocabulary);
  options.check = check;
  options.resume = resume;
  options.memory = 2 * kTransferBytes;
  options.progress = progress_of(callback);
  options.attributes = {{"source", table_path}, {"commit", fmt::format("{}", commit)}};
  std::vector<CopyResult> copied;
  {
    const WithoutGil release;
    check_outside_stores(location.file);
    const auto origin_of = [&](const std::string& one) { return table_origin(table_path, commit, table, one); };
    if (fields.empty()) {
      copied.push_back(copy_file(origin_of(field), location, options));
    } else {
      std::vector<RowOrigin> origins;
      std::vector<std::string> names;
      for (const auto& [name, of] : fields) {
        origins.push_back(origin_of(of));
        names.push_back(name);
      }
      copied = copy_arrays(origins, names, location, options);
    }
  }
  return copy_reports(copied, fields);
}

// All of a table, or what torch.optim keeps of it.
void export_all(const Table& table, const nb::bytes& destination, const std::optional<std::string>& format, bool optimizer_state,
                bool overwrite, std::optional<int> gzip, bool check, const nb::bytes& vocabulary, const nb::object& callback) {
  const Location location = parse_location(text_of(destination), location_options(format, LocationOptions::Use::kWrite));
  ArchiveOptions options{.overwrite = overwrite,
                         .gzip = gzip.value_or(-1),
                         .check = check,
                         .vocabulary = text_of(vocabulary),
                         .memory = kTransferBytes,
                         .progress = progress_of(callback),
                         .before_finish = {}};
  const WithoutGil release;
  check_outside_stores(location.file);
  if (optimizer_state)
    export_torch_state(table, location, options);
  else
    export_table(table, location, options);
}

Table import_all(Store& store, std::string_view name, const nb::bytes& source, const std::optional<std::string>& format,
                 const nb::bytes& vocabulary, const nb::object& callback) {
  const Location location = parse_location(text_of(source), location_options(format, LocationOptions::Use::kRead));
  const std::string words = text_of(vocabulary);
  const Progress progress = progress_of(callback);
  const WithoutGil release;
  return import_table(store, name, location, words, kTransferBytes, progress);
}

// (parameter, fields, step)
nb::tuple import_optimizer_state(Table& table, const nb::bytes& source, std::optional<std::uint64_t> parameter,
                                 const nb::object& callback) {
  const Location location = parse_location(text_of(source), location_options("torch", LocationOptions::Use::kRead));
  TorchStateReport report;
  {
    const Progress progress = progress_of(callback);
    const WithoutGil release;
    report = import_torch_state(table, location, parameter, kTransferBytes, progress);
  }
  return nb::make_tuple(report.parameter, nb::cast(report.fields), report.step);
}

nb::dict device_report(const DeviceStats& s) {
  nb::list measured;
  for (const MoverMeasurement& one : s.measured)
    for (const MoverRate& rate : one.rates) {
      nb::dict entry;
      entry["direction"] = one.of.fetch ? "fetch" : "write_back";
      entry["rows"] = one.of.rows;
      entry["row_bytes"] = one.of.row_bytes;
      entry["pool_bytes"] = one.of.pool_bytes;
      entry["threads"] = one.of.threads;
      entry["kernel_blocks"] = rate.way.blocks;
      entry["host_threads"] = rate.way.host_threads;
      entry["bytes_per_second"] = rate.bytes_per_second;
      measured.append(entry);
    }
  nb::dict out;
  out["device"] = s.device_name;
  out["transfers"] = s.transfers;
  out["kernel_rows"] = s.kernel_rows;
  out["thread_rows"] = s.thread_rows;
  out["pageable_rows"] = s.pageable_rows;
  out["bytes"] = s.bytes;
  out["seconds"] = s.seconds;
  out["measured"] = measured;
  return out;
}

Report stats_of(const Table& table) {
  TableStats s;
  PageIoReport io;
  DeviceStats d;
  {
    const WithoutGil release;
    s = table.stats();
    d = table.device_stats();
    io = table.io_report();
  }
  Report out;
  out["hits"] = s.hits;
  out["misses"] = s.misses;
  out["evictions"] = s.evictions;
  out["write_backs"] = s.write_backs;
  out["pages_read"] = s.pages_read;
  out["pages_generated"] = s.pages_generated;
  out["bytes_read"] = s.bytes_read;
  out["bytes_written"] = s.bytes_written;
  out["read_requests"] = s.read_requests;
  out["write_requests"] = s.write_requests;
  out["seconds_waiting"] = s.seconds_waiting;
  out["rows_gathered"] = s.rows_gathered;
  out["rows_written"] = s.rows_written;
  out["frames"] = s.frames;
  out["page_bytes"] = s.page_bytes;
  out["resident_pages"] = s.resident_pages;
  out["dirty_pages"] = s.dirty_pages;
  out["memory_bytes"] = s.memory_bytes;
  out["huge_pages"] = s.huge_pages;
  out["registered"] = s.registered || s.mapping_registered;
  out["pinned"] = s.mapping_registered ? std::optional<std::string_view>(pin_name(Pin::kMapping))
                  : s.registered       ? std::optional<std::string_view>(pin_name(Pin::kFrames))
                                       : std::nullopt;
  out["mapped_bytes"] = s.mapped_bytes;
  out["rows_mapped"] = s.rows_mapped;
  out["whole"] = s.whole;
  out["io_engine"] = io_engine_name(io.engine);
  out["direct_reads"] = io.direct_reads;
  out["direct_writes"] = io.direct_writes;
  out["io_memory_bytes"] = io.memory_bytes;
  out["io_note"] = io.note;
  if (d.device >= 0) out["cuda"] = device_report(d);
  return out;
}

Report counters_of(const Table& table) {
  TableCounters c;
  {
    const WithoutGil release;
    c = table.counters();
  }
  Report out;
  out["hits"] = c.hits;
  out["misses"] = c.misses;
  out["evictions"] = c.evictions;
  out["write_backs"] = c.write_backs;
  out["bytes_read"] = c.bytes_read;
  out["bytes_written"] = c.bytes_written;
  out["commits"] = c.commits;
  return out;
}

// Waits in pieces, so that Ctrl-C is heard.
bool wait_for(const Prefetch& prefetch, std::optional<double> timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::nanoseconds kPiece = std::chrono::milliseconds(50);
  constexpr double kForever = 1e9;  // seconds; what is more would overflow
  std::optional<Clock::time_point> end;
  if (timeout && *timeout < kForever)
    end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::max(*timeout, 0.0)));
  for (;;) {
    const auto left = end ? std::max(*end - Clock::now(), Clock::duration::zero()) : kPiece;
    bool ended = false;
    {
      const WithoutGil release;
      ended = prefetch.wait(std::min<std::chrono::nanoseconds>(left, kPiece));
    }
    if (ended) return true;
    if (end && Clock::now() >= *end) return false;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

nb::list ranges_of(const std::vector<PageRange>& ranges) {
  nb::list out;
  for (const PageRange& range : ranges) {
    nb::dict entry;
    entry["page"] = range.page;
    entry["pages"] = range.pages;
    entry["first_row"] = range.first_row;
    entry["last_row"] = range.last_row;
    out.append(entry);
  }
  return out;
}

void accept(Table& table, const nb::object& callback) {
  const Progress progress = progress_of(callback);
  const WithoutGil release;
  table.accept(progress);
}

Report repair_from(Table& table, const Table& backup, const nb::object& callback) {
  RepairReport report;
  {
    const Progress progress = progress_of(callback);
    const WithoutGil release;
    report = table.repair_from(backup, progress);
  }
  Report out;
  out["bad_pages"] = report.bad_pages;
  out["repaired_pages"] = report.repaired_pages;
  out["repaired"] = ranges_of(report.repaired);
  out["left"] = ranges_of(report.left);
  return out;
}

Report verify(Table& table, const nb::object& callback) {
  VerifyReport report;
  {
    const Progress progress = progress_of(callback);
    const WithoutGil release;
    report = table.verify(progress);
  }
  const nb::list bad = ranges_of(report.bad);
  Report out;
  out["pages"] = report.pages;
  out["written"] = report.written;
  out["verified"] = report.verified;
  out["bad_pages"] = report.bad_pages;
  out["bad"] = bad;
  return out;
}

// --- module ---------------------------------------------------------------------------------------------------------

void bind_options(nb::module_& m) {
  nb::class_<Zeros>(m, "Zeros").def(nb::init<>());
  nb::class_<Constant>(m, "Constant")
      .def(
          "__init__", [](Constant* self, double value) { new (self) Constant{value}; }, "value"_a)
      .def_ro("value", &Constant::value);
  nb::class_<Uniform>(m, "Uniform")
      .def(
          "__init__",
          [](Uniform* self, double low, double high) {
            new (self) Uniform{low, high};
          },
          "low"_a, "high"_a)
      .def_ro("low", &Uniform::low)
      .def_ro("high", &Uniform::high);
  nb::class_<Normal>(m, "Normal")
      .def(
          "__init__",
          [](Normal* self, double mean, double std) {
            new (self) Normal{mean, std};
          },
          "mean"_a, "std"_a)
      .def_ro("mean", &Normal::mean)
      .def_ro("std", &Normal::std);
  m.def(
      "check_optimizer", [](const AnyOptimizer& optimizer) { check_optimizer(optimizer.value); }, "optimizer"_a.none());
}

void bind_table(nb::module_& m) {
  using Release = nb::call_guard<WithoutGil>;
  nb::class_<Prefetch>(m, "Prefetch")
      .def("cancel", &Prefetch::cancel, Release())
      .def("wait", &wait_for, "timeout"_a.none())
      .def("done", &Prefetch::done, Release());
  nb::class_<WorkingSet>(m, "WorkingSet")
      .def("__bool__", [](const WorkingSet& set) { return static_cast<bool>(set); })
      .def("check", &WorkingSet::check, Release())
      .def(
          "ids",
          [](const WorkingSet& set, std::uintptr_t out, std::uintptr_t stream) {
            set.ids(pointer<std::int64_t>(out), {pointer<void>(stream)});
          },
          "out"_a, "stream"_a, Release());
  nb::class_<Table>(m, "Table")
      .def_prop_ro("name", [](const Table& t) { return std::string(t.name()); })
      .def_prop_ro("file", &Table::file, Release())
      .def_prop_ro("rows", &Table::rows, Release())
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("dtype", [](const Table& t) { return std::string(dtype_name(t.dtype())); })
      .def_prop_ro("seed", &Table::seed, Release())
      .def_prop_ro("page_bytes_option", &Table::page_bytes_option, Release())
      .def_prop_ro("memory", &Table::memory, Release())
      .def("set_memory", &Table::set_memory, "memory"_a, Release())
      .def_prop_ro("step", &Table::step, Release())
      .def_prop_ro("optimizer_version", &Table::optimizer_version, Release())
      .def_prop_ro("writable", &Table::writable)
      .def_prop_ro("adopted", &Table::adopted, Release())
      .def_prop_ro("written_pages", &Table::written_pages, Release())
      .def(
          "optimizer",
          [](const Table& t) -> std::optional<AnyOptimizer> {
            AnyOptimizer optimizer{t.optimizer()};
            if (std::holds_alternative<std::monostate>(optimizer.value)) return std::nullopt;
            return optimizer;
          },
          Release())
      .def(
          "set_optimizer", [](Table& t, const AnyOptimizer& optimizer) { t.set_optimizer(optimizer.value); },
          "optimizer"_a.none(), Release())
      .def("initializer", &Table::initializer, Release())
      .def("fields",
           [](const Table& t) {
             std::vector<std::pair<std::string, std::string>> out;
             for (const Field& field : t.schema().fields()) out.emplace_back(field.name, dtype_name(field.dtype));
             return out;
           })
      .def(
          "field_dtype",
          [](const Table& t, std::string_view field) { return std::string(dtype_name(t.schema().field(field).dtype)); },
          "field"_a)
      .def(
          "field_elements", [](const Table& t, std::string_view field) { return t.schema().field(field).elements; }, "field"_a)
      .def(
          "gather",
          [](Table& t, const Ids& ids, const WritableBytes& out, std::string_view field) {
            t.gather(ids_of(ids), bytes_of(out), field);
          },
          "ids"_a.noconvert(), "out"_a.noconvert(), "field"_a, Release())
      .def(
          "scatter",
          [](Table& t, const Ids& ids, const Bytes& rows, std::string_view field) {
            t.scatter(ids_of(ids), bytes_of(rows), field);
          },
          "ids"_a.noconvert(), "rows"_a.noconvert(), "field"_a, Release())
      .def(
          "add", [](Table& t, const Ids& ids, const Bytes& rows) { t.add(ids_of(ids), bytes_of(rows)); }, "ids"_a.noconvert(),
          "rows"_a.noconvert(), Release())
      .def(
          "update",
          [](Table& t, const Ids& ids, const Bytes& grads, std::string_view grad_dtype, std::optional<double> lr) {
            t.update(ids_of(ids), bytes_of(grads), parse_dtype(grad_dtype), lr);
          },
          "ids"_a.noconvert(), "grads"_a.noconvert(), "grad_dtype"_a, "lr"_a.none(), Release())
      .def(
          "prefetch", [](Table& t, const Ids& ids) { return t.prefetch(ids_of(ids)); }, "ids"_a.noconvert(), Release())
      .def(
          "gather_device",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t out, std::string_view field,
             std::uintptr_t stream) {
            t.gather(device, pointer<const std::int64_t>(ids), count, pointer<std::byte>(out), field, {pointer<void>(stream)});
          },
          "device"_a, "ids"_a, "count"_a, "out"_a, "field"_a, "stream"_a, Release())
      .def(
          "scatter_device",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t rows, std::string_view field,
             std::uintptr_t stream) {
            t.scatter(device, pointer<const std::int64_t>(ids), count, pointer<const std::byte>(rows), field,
                      {pointer<void>(stream)});
          },
          "device"_a, "ids"_a, "count"_a, "rows"_a, "field"_a, "stream"_a, Release())
      .def(
          "add_device",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t rows, std::uintptr_t stream) {
            t.add(device, pointer<const std::int64_t>(ids), count, pointer<const std::byte>(rows), {pointer<void>(stream)});
          },
          "device"_a, "ids"_a, "count"_a, "rows"_a, "stream"_a, Release())
      .def(
          "update_device",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t grads, std::string_view grad_dtype,
             std::uintptr_t stream, std::optional<double> lr) {
            t.update(device, pointer<const std::int64_t>(ids), count, pointer<const std::byte>(grads), parse_dtype(grad_dtype),
                     {pointer<void>(stream)}, lr);
          },
          "device"_a, "ids"_a, "count"_a, "grads"_a, "grad_dtype"_a, "stream"_a, "lr"_a.none(), Release())
      .def(
          "prefetch_pages",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t stream) {
            return t.prefetch_pages(device, pointer<const std::int64_t>(ids), count, {pointer<void>(stream)});
          },
          "device"_a, "ids"_a, "count"_a, "stream"_a, Release())
      .def(
          "prefetch_device",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t stream) {
            return t.prefetch(device, pointer<const std::int64_t>(ids), count, {pointer<void>(stream)});
          },
          "device"_a, "ids"_a, "count"_a, "stream"_a, Release())
      .def(
          "gather_prefetched",
          [](Table& t, WorkingSet& ahead, std::uint64_t count, std::uintptr_t out, std::uintptr_t stream) {
            return t.gather_prefetched(ahead, count, pointer<std::byte>(out), {pointer<void>(stream)});
          },
          "ahead"_a, "count"_a, "out"_a, "stream"_a, Release())
      .def(
          "update_kept",
          [](Table& t, const WorkingSet& from, std::uint64_t count, std::uintptr_t grads, std::string_view grad_dtype,
             std::uintptr_t stream) {
            return t.update_kept(from, count, pointer<const std::byte>(grads), parse_dtype(grad_dtype), {pointer<void>(stream)});
          },
          "working_set"_a, "count"_a, "grads"_a, "grad_dtype"_a, "stream"_a, Release())
      .def(
          "gather_working_set",
          [](Table& t, int device, std::uintptr_t ids, std::uint64_t count, std::uintptr_t out, std::uintptr_t stream,
             bool check_later) {
            return t.gather_working_set(device, pointer<const std::int64_t>(ids), count, pointer<std::byte>(out),
                                        {pointer<void>(stream)}, check_later);
          },
          "device"_a, "ids"_a, "count"_a, "out"_a, "stream"_a, "check_later"_a = false, Release())
      .def(
          "read",
          [](Table& t, std::uint64_t first, std::uint64_t count, const WritableBytes& out, std::string_view field) {
            t.read(first, count, bytes_of(out), field);
          },
          "first"_a, "count"_a, "out"_a.noconvert(), "field"_a, Release())
      .def(
          "write",
          [](Table& t, std::uint64_t first, std::uint64_t count, const Bytes& rows, std::string_view field) {
            t.write(first, count, bytes_of(rows), field);
          },
          "first"_a, "count"_a, "rows"_a.noconvert(), "field"_a, Release())
      .def(
          "append", [](Table& t, const Bytes& rows) { return t.append(bytes_of(rows)); }, "rows"_a.noconvert(), Release())
      .def("resize", &Table::resize, "rows"_a, Release())
      .def(
          "materialize",
          [](Table& t, const nb::object& callback) {
            const Progress progress = progress_of(callback);
            const WithoutGil release;
            t.materialize(progress);
          },
          "progress"_a.none())
      .def("verify", &verify, "progress"_a.none())
      .def("accept", &accept, "progress"_a.none())
      .def("repair_from", &repair_from, "backup"_a, "progress"_a.none())
      .def("export", &export_rows, "destination"_a, "field"_a, "fields"_a, "selection"_a, "overwrite"_a, "dtype"_a.none(),
           "gzip"_a.none(), "format"_a.none(), "vocabulary"_a, "beside"_a, "commit"_a, "check"_a, "resume"_a, "progress"_a.none())
      .def("export_all", &export_all, "destination"_a, "format"_a.none(), "optimizer_state"_a, "overwrite"_a, "gzip"_a.none(),
           "check"_a, "vocabulary"_a, "progress"_a.none())
      .def(
          "import_optimizer_state", &import_optimizer_state, "source"_a, "parameter"_a.none(), "progress"_a.none(),
          nb::sig("def import_optimizer_state(self, source: bytes, parameter: int | None, progress: object | None) -> tuple[str, "
                  "list[str], int]"))
      .def("stats", &stats_of)
      .def("counters", &counters_of);
}

Report take_snapshot(Store& store, const std::filesystem::path& destination, const nb::object& callback) {
  SnapshotReport report;
  {
    const Progress progress = progress_of(callback);
    const WithoutGil release;
    report = store.snapshot(destination, progress);
  }
  Report out;
  out["commit"] = report.commit.number;
  out["pages"] = report.pages;
  out["copied_pages"] = report.copied_pages;
  out["copied_bytes"] = report.copied_bytes;
  out["cloned_tables"] = report.cloned_tables;
  out["rounds"] = report.rounds;
  return out;
}

void bind_store(nb::module_& m) {
  using Release = nb::call_guard<WithoutGil>;
  nb::class_<Store>(m, "Store")
      .def_static(
          "open", &open_store,
          nb::sig(
              "def open(path: str | os.PathLike[str], mode: str, memory: int, device: int, threads: int, accept_unclean: bool, "
              "io: str, direct: bool | None, policy: str, durability: str, log_limit: int, autocommit: bool, allow_adopted: bool "
              "| None, pin: str, accept_changed: bool, verify: str) -> Store"),
          "path"_a, "mode"_a, "memory"_a, "device"_a, "threads"_a, "accept_unclean"_a, "io"_a, "direct"_a.none(), "policy"_a,
          "durability"_a, "log_limit"_a, "autocommit"_a, "allow_adopted"_a.none(), "pin"_a, "accept_changed"_a, "verify"_a)
      .def_prop_ro("path", &Store::path)
      .def_prop_ro("writable", &Store::writable)
      .def_prop_ro("commit_number", &Store::commit_number)
      .def_prop_ro("memory", &Store::memory)
      .def_prop_ro("device", &Store::device)
      .def_prop_ro("closed", &Store::closed)
      .def("create", &create_table, "name"_a, "rows"_a, "dim"_a, "dtype"_a, "optimizer"_a.none(), "init"_a, "seed"_a,
           "page_bytes"_a, "memory"_a)
      .def("import_file", &import_file,
           nb::sig("def import_file(self, name: str, source: bytes, dtype: str | None, reading: tuple[str | None, bool, bool, "
                   "str | None, int, int], selection: tuple[int, int, bytes, int], fields: Sequence[tuple[str, str]], optimizer: "
                   "tuple[str, dict[str, Any]] | None, page_bytes: int, memory: int, vocabulary: bytes, beside: bytes, check: "
                   "bool, resume: bool, progress: object | None) -> tuple[Table, dict[str, Any]]"),
           "name"_a, "source"_a, "dtype"_a.none(), "reading"_a, "selection"_a, "fields"_a, "optimizer"_a.none(), "page_bytes"_a,
           "memory"_a, "vocabulary"_a, "beside"_a, "check"_a, "resume"_a, "progress"_a.none())
      .def("import_rows", &import_rows, "table"_a, "source"_a, "dtype"_a.none(), "reading"_a, "selection"_a, "fields"_a,
           "field"_a, "at"_a.none(), "append"_a, "vocabulary"_a, "check"_a, "progress"_a.none())
      .def("import_all", &import_all, "name"_a, "source"_a, "format"_a.none(), "vocabulary"_a, "progress"_a.none())
      .def(
          "adopt",
          [](Store& s, std::string_view name, const std::filesystem::path& file, bool writable, const Dtype& dtype) {
            const std::optional<DType> wanted = dtype_of(dtype);
            const WithoutGil release;
            return s.adopt(name, file, writable, wanted);
          },
          nb::sig("def adopt(self, name: str, file: str | os.PathLike[str], writable: bool, dtype: str | None) -> Table"),
          "name"_a, "file"_a, "writable"_a, "dtype"_a.none())
      .def("table", &Store::table, "name"_a, Release())
      .def("contains", &Store::contains, "name"_a, Release())
      .def("tables", &Store::tables, Release())
      .def("remove", &Store::remove, "name"_a, Release())
      .def("commit", &Store::commit, "note"_a, Release())
      .def(
          "note", [](const Store& store) { return store.last_commit().note; }, Release())
      .def(
          "commits",
          [](const Store& store) {
            std::vector<CommitInfo> commits;
            {
              const WithoutGil release;
              commits = store.commits();
            }
            nb::list list;
            for (const CommitInfo& commit : commits) list.append(nb::make_tuple(commit.number, commit.time, commit.note));
            return list;
          },
          nb::sig("def commits(self) -> list[tuple[int, str, str]]"))
      .def("checkpoint", &Store::checkpoint, Release())
      .def("recalibrate", &Store::recalibrate, Release())
      .def("snapshot", &take_snapshot, "destination"_a, "progress"_a.none(),
           nb::sig("def snapshot(self, destination: str | os.PathLike[str], progress: object | None) -> "
                   "dict[str, int]"))
      .def("refresh", &Store::refresh, Release())
      .def(
          "log_stats",
          [](const Store& store) {
            LogStats stats;
            {
              const WithoutGil release;
              stats = store.log_stats();
            }
            nb::dict dict;
            dict["limit"] = stats.limit;
            dict["bytes"] = stats.bytes;
            dict["pages"] = stats.pages;
            dict["memory_bytes"] = stats.memory_bytes;
            dict["appended_bytes"] = stats.appended_bytes;
            dict["applied_pages"] = stats.applied_pages;
            return dict;
          },
          nb::sig("def log_stats(self) -> dict[str, int]"))
      .def("close", &Store::close, Release())
      .def("abandon", &Store::abandon, Release())
      .def("forget_after_fork", &Store::forget_after_fork);
}

// --- files --------------------------------------------------------------------------------------------------------------------

// Rows of a file, for embermap.io. One call at a time: Python's lock keeps others out, but not while rows are read.
class FileRows {
 public:
  FileRows(const nb::bytes& source, const Reading& reading) {
    const Location location = source_of(source, reading);
    const ReadOptions options = reading_of(reading);
    const WithoutGil release;
    reader_ = open_rows(location, options);
    of_store_ = check_table_file(location, kToLook);
  }
  // A forked child leaves the file alone: closing it there would end locks that its parent holds.
  ~FileRows() {
    if (getpid() != process_) (void)reader_.release();
  }
  FileRows(const FileRows&) = delete;
  FileRows& operator=(const FileRows&) = delete;
  std::uint64_t rows() const { return open().rows(); }
  std::uint64_t dim() const { return open().dim(); }
  std::string dtype() const { return std::string(dtype_name(open().dtype())); }
  std::uint64_t block_rows() const { return open().block_rows(); }
  std::string description() const { return open().description(); }
  nb::list remarks() {
    std::vector<Remark> found;
    {
      const WithoutGil release;
      const std::lock_guard lock(mutex_);
      found = open().remarks();
      found.insert(found.end(), of_store_.begin(), of_store_.end());
    }
    return texts_of(found);
  }
  void read(std::uint64_t first, std::uint64_t count, const WritableBytes& out) {
    const std::span<std::byte> to = bytes_of(out);
    const WithoutGil release;
    const std::lock_guard lock(mutex_);
    RowReader& reader = open();
    if (first > reader.rows() || count > reader.rows() - first ||
        to.size() != checked_mul(checked_mul(count, reader.dim(), "rows"), item_size(reader.dtype()), "rows"))
      throw InvalidArgument(fmt::format("rows {} to {} of {}", first, first + count, reader.rows()));
    reader.read(first, count, to.data());
  }
  void close() {
    const WithoutGil release;
    const std::lock_guard lock(mutex_);
    reader_.reset();
  }

 private:
  RowReader& open() const {
    if (!reader_) throw ClosedError("the file is closed");
    return *reader_;
  }
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::vector<Remark> of_store_;
  std::unique_ptr<RowReader> reader_;
};

nb::list list_file(const nb::bytes& file, const std::optional<std::string>& format) {
  const Location location = parse_location(text_of(file), location_options(format, LocationOptions::Use::kRead));
  std::vector<Entry> entries;
  {
    const WithoutGil release;
    entries = list_entries(location.file, location.format);
  }
  nb::list out;
  for (const Entry& entry : entries)
    out.append(
        nb::make_tuple(nb::steal(PyUnicode_DecodeFSDefaultAndSize(entry.name.data(), static_cast<Py_ssize_t>(entry.name.size()))),
                       nb::tuple(nb::cast(entry.shape)), text_of(std::string_view(entry.dtype)), entry.bytes,
                       text_of(std::string_view(entry.layout))));
  return out;
}

// Rows of a file to another one. With `fields`, these arrays of it into one file.
Report convert_file(const nb::bytes& source_text, const nb::bytes& destination_text, const Dtype& dtype, const Reading& reading,
                    const Selection& selection, const Pairs& fields, bool overwrite, std::optional<int> gzip,
                    const std::optional<std::string>& to_format, const nb::bytes& vocabulary, bool check, bool resume,
                    std::uint64_t memory, const nb::object& callback) {
  const Location source = source_of(source_text, reading);
  const Location destination =
      parse_location(text_of(destination_text), location_options(to_format, LocationOptions::Use::kWrite));
  CopyOptions options;
  options.rows = selection_of(selection, /*permutation=*/true);
  options.overwrite = overwrite;
  options.gzip = gzip.value_or(-1);
  options.vocabulary = text_of(vocabulary);
  options.check = check;
  options.resume = resume;
  options.memory = memory;
  options.dtype = dtype_of(dtype);
  const ReadOptions how = reading_of(reading);
  options.progress = progress_of(callback);
  std::vector<CopyResult> copied;
  {
    const WithoutGil release;
    check_not_source(source.file, destination);
    check_outside_stores(destination.file);
    const std::vector<Remark> remarks = check_table_file(source, kToLook);
    if (format_has_words(source.format) && !options.vocabulary.empty() && options.vocabulary != "none")
      check_outside_stores(options.vocabulary);
    if (fields.empty()) {
      copied.push_back(copy_file(file_origin(source, options.dtype, how), destination, options));
    } else {
      if (!source.selector.empty())
        throw InvalidArgument(fmt::format("src names '{}'; fields name what is copied", printable(source.selector)));
      std::vector<RowOrigin> origins;
      std::vector<std::string> names;
      for (const auto& [name, of] : fields) {
        origins.push_back(file_origin(Location{source.file, of, source.format}, options.dtype, how));
        names.push_back(name);
      }
      copied = copy_arrays(origins, names, destination, options);
    }
    copied.front().remarks.insert(copied.front().remarks.end(), remarks.begin(), remarks.end());
  }
  return copy_reports(copied, fields);
}

// A file that takes rows from Python.
class FileWriter {
 public:
  FileWriter(const nb::bytes& destination, std::uint64_t rows, std::uint64_t dim, std::string_view dtype, bool overwrite,
             std::optional<int> gzip, const std::optional<std::string>& format, const nb::bytes& vocabulary)
      : row_bytes_{checked_mul(dim, item_size(parse_dtype(dtype)), "bytes of a row")} {
    const Location location = parse_location(text_of(destination), location_options(format, LocationOptions::Use::kWrite));
    const DType type = parse_dtype(dtype);
    const std::string named = text_of(vocabulary);
    const WithoutGil release;
    check_outside_stores(location.file);
    words_ = std::make_unique<WordTransfer>(WordTransfer::Options{.vocabulary = named,
                                                                  .destination_has_words = format_has_words(location.format),
                                                                  .source = location.file,
                                                                  .destination = location.file,
                                                                  .overwrite = overwrite});
    words_->begin(rows);
    writer_ =
        create_rows(location, rows, dim, type, {.overwrite = overwrite, .gzip = gzip.value_or(-1), .words = words_->source()});
  }
  void write(const Bytes& rows) {
    const std::span<const std::byte> bytes = bytes_of(rows);
    const WithoutGil release;
    if (!writer_) throw ClosedError("the file is closed");
    if (bytes.size() % row_bytes_ != 0)
      throw InvalidArgument(fmt::format("{} bytes are no rows of {}", bytes.size(), row_bytes_));
    writer_->write(bytes.size() / row_bytes_, bytes.data());
  }
  void finish() {
    const WithoutGil release;
    if (!writer_) throw ClosedError("the file is closed");
    writer_->finish();
    writer_.reset();
  }
  void close() {
    const WithoutGil release;
    writer_.reset();
  }

 private:
  std::uint64_t row_bytes_;
  std::unique_ptr<WordTransfer> words_;
  std::unique_ptr<RowWriter> writer_;
};

// (count of values converted) elements of one dtype as another, for files that Python reads itself. Returns (infinite, zero).
std::pair<std::uint64_t, std::uint64_t> convert_bytes(const Bytes& in, std::string_view from, const WritableBytes& out,
                                                      std::string_view to) {
  const DType source = parse_dtype(from), target = parse_dtype(to);
  const std::uint64_t count = in.size() / item_size(source);
  if (in.size() % item_size(source) != 0 || out.size() != count * item_size(target))
    throw InvalidArgument(fmt::format("{} bytes of {} do not become {} of {}", in.size(), from, out.size(), to));
  ConversionReport report;
  {
    const WithoutGil release;
    convert_elements(source, bytes_of(in).data(), target, bytes_of(out).data(), count, report);
  }
  return {report.became_infinite, report.became_zero};
}

void bind_files(nb::module_& m) {
  nb::class_<FileRows>(m, "FileRows")
      .def(nb::init<const nb::bytes&, const Reading&>(), "source"_a, "reading"_a)
      .def_prop_ro("rows", &FileRows::rows)
      .def_prop_ro("dim", &FileRows::dim)
      .def_prop_ro("dtype", &FileRows::dtype)
      .def_prop_ro("block_rows", &FileRows::block_rows)
      .def_prop_ro("description", &FileRows::description)
      .def_prop_ro("remarks", &FileRows::remarks, nb::sig("def remarks(self) -> list[str]"))
      .def("read", &FileRows::read, "first"_a, "count"_a, "out"_a.noconvert())
      .def("close", &FileRows::close);
  m.def("list_file", &list_file,
        nb::sig("def list_file(file: bytes, format: str | None) -> list[tuple[str, tuple[int, ...], str, int, str]]"), "file"_a,
        "format"_a.none());
  m.def("convert_file", &convert_file, "source"_a, "destination"_a, "dtype"_a.none(), "reading"_a, "selection"_a, "fields"_a,
        "overwrite"_a, "gzip"_a.none(), "destination_format"_a.none(), "vocabulary"_a, "check"_a, "resume"_a, "memory"_a,
        "progress"_a.none());
  nb::class_<FileWriter>(m, "FileWriter")
      .def(nb::init<const nb::bytes&, std::uint64_t, std::uint64_t, std::string_view, bool, std::optional<int>,
                    const std::optional<std::string>&, const nb::bytes&>(),
           "destination"_a, "rows"_a, "dim"_a, "dtype"_a, "overwrite"_a, "gzip"_a.none(), "format"_a.none(), "vocabulary"_a)
      .def("write", &FileWriter::write, "rows"_a.noconvert())
      .def("finish", &FileWriter::finish)
      .def("close", &FileWriter::close);
  m.def("convert_bytes", &convert_bytes, "source"_a.noconvert(), "source_dtype"_a, "out"_a.noconvert(), "dtype"_a);
}

NB_MODULE(_core, m) {
  leave_hdf5_at_exit();
  // At the end of a process an open store is simply dropped: that is not a leak to report.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);

  m.def("version", [] { return EMBERMAP_VERSION; });
  using Release = nb::call_guard<WithoutGil>;
  m.def("cuda_devices", &cuda_devices, Release());
  m.def("cuda_absence", &cuda_absence, Release());
  m.def("parse_size", &parse_size, "text"_a);
  m.def("format_size", &format_size, "bytes"_a);
  m.def(
      "location_file",
      [](const nb::bytes& location, const std::optional<std::string>& format, bool read) {
        const auto use = read ? LocationOptions::Use::kRead : LocationOptions::Use::kWrite;
        return parse_location({location.c_str(), location.size()}, location_options(format, use)).file;
      },
      "location"_a, "format"_a.none(), "read"_a = false);
  m.def(
      "has_words",
      [](const nb::bytes& location, const std::optional<std::string>& format) {
        return format_has_words(
            parse_location({location.c_str(), location.size()}, location_options(format, LocationOptions::Use::kWrite)).format);
      },
      "location"_a, "format"_a.none());
  m.def("is_store", &is_store, nb::sig("def is_store(path: str | os.PathLike[str]) -> bool"), "path"_a, Release());
  bind_options(m);
  bind_files(m);
  bind_table(m);
  bind_store(m);
}

}  // namespace
}  // namespace embermap::python
