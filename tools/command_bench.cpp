// embermap bench [PATH]: what this disk gives, and what a table on it does.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "store/store.hpp"
#include "tools/arguments.hpp"
#include "tools/bare_disk.hpp"
#include "tools/bench_ids.hpp"
#include "tools/command.hpp"
#include "tools/console.hpp"
#include "tools/device_bench.hpp"
#include "tools/new_table.hpp"
#include "tools/paths.hpp"
#include "tools/progress.hpp"
#include "tools/store_options.hpp"
#include "tools/text.hpp"

namespace embermap::tools {
namespace {

struct Arguments {
  std::string path = ".", size = "2GiB", rows, dim = "128", dtype = "float32", page_size = "4KiB", ids = "uniform";
  std::string batch = "65536", seconds = "3", threads = "0", depth = "128", device;
  OptimizerArguments optimizer;
};

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// A folder of its own, gone at the end, however the command ends (but by SIGKILL).
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::filesystem::path& where) {
    std::string name = (where / "embermap-bench-XXXXXX").native();
    if (mkdtemp(name.data()) == nullptr) throw IoError(errno, "mkdtemp", where);
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Resident memory of this process: "VmRSS" now, "VmHWM" the most so far. 0 where the kernel does not say.
std::uint64_t resident(const std::string& field) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line))
    if (line.starts_with(field + ":")) return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) << 10;
  return 0;
}

// Writes what is dirty and drops the file from the page cache.
void forget_cache(const std::filesystem::path& path) {
  const File file = File::open(path, File::Mode::kRead);
  file.sync();
  (void)posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
}

// A measured part: what was done in how much time, and the table's counters of that time.
struct Part {
  double seconds = 0;
  std::uint64_t rows = 0, batches = 0, hits = 0, misses = 0, bytes = 0;

  double rows_per_second() const { return seconds > 0 ? static_cast<double>(rows) / seconds : 0; }
  double misses_per_second() const { return seconds > 0 ? static_cast<double>(misses) / seconds : 0; }
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
  double hit_rate() const { return hits + misses > 0 ? static_cast<double>(hits) / static_cast<double>(hits + misses) : 0; }
  Json json() const {
    return {{"rows_per_second", rows_per_second()},
            {"rows", rows},
            {"seconds", seconds},
            {"batches", batches},
            {"hit_rate", hit_rate()},
            {"misses_per_second", misses_per_second()}};
  }
};

Json rate_json(const DiskRate& rate) {
  return {{"per_second", rate.per_second()}, {"bytes_per_second", rate.bytes_per_second()},
          {"requests", rate.requests},       {"seconds", rate.seconds},
          {"engine", rate.engine},           {"direct", rate.direct}};
}

std::string mb_per_second(double rate) { return fmt::format("{:.0f} MB/s", rate / 1e6); }
std::string way(const DiskRate& rate) {
  return fmt::format("{}, {}", rate.engine, rate.direct ? "direct" : "through the page cache");
}

std::uint64_t rounded(double number) { return static_cast<std::uint64_t>(std::llround(number)); }
double share(double a, double b) { return b > 0 ? a / b : 0; }

// The table under test: its rows repeat one block, so that any row can be checked.
class Bench {
 public:
  Bench(const Arguments& arguments, const Common& common) : common_{common} {
    options_.dim = parse_count("--dim", arguments.dim);
    options_.dtype = parse_dtype_option("--dtype", arguments.dtype);
    options_.optimizer = arguments.optimizer.optimizer();
    options_.page_bytes = parse_size_option("--page-size", arguments.page_size);
    batch_ = parse_count("--batch", arguments.batch);
    if (batch_ == 0 || batch_ > (1U << 24)) throw UsageError("--batch: must be 1 to 16777216");
    seconds_ = parse_number("--seconds", arguments.seconds);
    if (seconds_ <= 0 || seconds_ > 3600) throw UsageError("--seconds: must be above 0, and at most 3600");
    const std::uint64_t threads = parse_count("--threads", arguments.threads);
    if (threads > 4096) throw UsageError("--threads: must be at most 4096");
    threads_ = static_cast<unsigned>(threads);
    const std::uint64_t depth = parse_count("--depth", arguments.depth);
    if (depth == 0 || depth > 4096) throw UsageError("--depth: must be 1 to 4096");
    depth_ = static_cast<unsigned>(depth);
    store_options_ = store_options(common, StoreOptions::Mode::kOpenOrCreate);
    store_options_.threads = threads_;
    const std::uint64_t size = parse_size_option("--size", arguments.size);
    options_.rows = 1;
    const Geometry one = check_table_options(options_);
    written_ = std::max<std::uint64_t>(1, size / one.stride);
    options_.rows = arguments.rows.empty() ? written_ : parse_count("--rows", arguments.rows);
    if (options_.rows == 0) throw UsageError("--rows: must be above 0");
    written_ = std::min(written_, options_.rows);
    geometry_ = check_table_options(options_);
    ids_text_ = arguments.ids;
    static_cast<void>(IdSource(ids_text_, written_, 1));  // wrong usage before anything is done
  }

  int run(const std::filesystem::path& where) {
    check_free_space(where, where, checked_add(checked_mul(written_, geometry_.stride, "table bytes"), 64_MiB, "disk needed"));
    const std::uint64_t before = resident("VmRSS");
    const ScratchFolder scratch(where);
    measure(scratch.path());
    json_["memory"] = {{"budget", common_.memory}, {"peak_resident", resident("VmHWM")}, {"resident_before", before}};
    facts_.add("memory", fmt::format("{} resident at most, {} before the store; its budget is {}", format_size(resident("VmHWM")),
                                     format_size(before), format_size(common_.memory)));
    if (common_.json)
      print_json(json_);
    else if (!common_.quiet)
      print(facts_.text());
    return kDone;
  }

 private:
  void measure(const std::filesystem::path& folder) {
    describe();
    const std::filesystem::path place = folder / "store";
    const auto write_rate = sequential_writes(folder / "bare.tmp", written_ * geometry_.stride, seconds_);
    {
      Store store = open(place);
      Table table = store.create("t", options_);
      make_block(table, folder / "values");
      fill(store, table, write_rate);
      check(table);
      store.close();
    }
    const std::filesystem::path file = place / "t.npy";
    forget_cache(file);
    const auto random_rate = random_reads(file, direct_page(), depth_, seconds_);
    const auto read_rate = sequential_reads(file, seconds_);
    json_["bare"] = {{"random_read", rate_json(random_rate)},
                     {"sequential_read", rate_json(read_rate)},
                     {"sequential_write", rate_json(write_rate)}};
    json_["bare"]["random_read"]["block"] = direct_page();
    json_["bare"]["random_read"]["depth"] = depth_;
    facts_.add("bare random", fmt::format("{} reads/s of {}, {} at a time ({})", grouped(rounded(random_rate.per_second())),
                                          format_size(direct_page()), depth_, way(random_rate)));
    facts_.add("bare in order", fmt::format("read {}, write {}", mb_per_second(read_rate.bytes_per_second()),
                                            mb_per_second(write_rate.bytes_per_second())));

    Store store = open(place);
    Table table = store.table("t");
    scan(table, file, read_rate);
    gather_cold(table, file, random_rate);
    gather_warm(table);
    update(store, table);
    overlap(table);
    const PageIoReport io = table.io_report();
    json_["page_io"] = {{"engine", std::string(io_engine_name(io.engine))},
                        {"direct_reads", io.direct_reads},
                        {"direct_writes", io.direct_writes},
                        {"fixed_buffers", io.fixed_buffers},
                        {"depth", io.depth},
                        {"note", json_text(io.note)}};
    facts_.add("page I/O", fmt::format("{}, {} at a time, {} reads, {} writes{}{}", io_engine_name(io.engine), io.depth,
                                       io.direct_reads ? "direct" : "buffered", io.direct_writes ? "direct" : "buffered",
                                       io.note.empty() ? "" : "; ", printable(io.note)));
    const TableStats stats = table.stats();
    json_["table"]["frames"] = stats.frames;
    json_["table"]["memory"] = stats.memory_bytes;
    store.abandon();  // nobody wants the rows
  }

  Store open(const std::filesystem::path& folder) const { return Store::open(folder, store_options_); }

  void describe() {
    const std::uint64_t bytes = checked_mul(options_.rows, geometry_.stride, "table bytes");
    json_["table"] = {{"rows", options_.rows},
                      {"dim", options_.dim},
                      {"dtype", std::string(dtype_name(options_.dtype))},
                      {"record_bytes", geometry_.stride},
                      {"page_bytes", geometry_.page_bytes()},
                      {"bytes", bytes},
                      {"written_rows", written_}};
    json_["settings"] = {{"ids", ids_text_}, {"batch", batch_}, {"seconds", seconds_}, {"threads", threads_}};
    std::string written;
    if (written_ < options_.rows) written = fmt::format(", of which {} rows are written and used", grouped(written_));
    facts_.add("table",
               fmt::format("{} x {} {}, {} of records in pages of {}{}", grouped(options_.rows), options_.dim,
                           dtype_name(options_.dtype), format_size(bytes), format_size(geometry_.page_bytes()), written));
    facts_.add("ids", fmt::format("{}, {} in a batch", ids_text_, grouped(batch_)));
  }

  // Random reads of the table's page, rounded up to what direct I/O can read.
  std::uint64_t direct_page() const { return std::max<std::uint64_t>(512, (geometry_.page_bytes() + 511) / 512 * 512); }

  std::uint64_t row_bytes() const { return options_.dim * item_size(options_.dtype); }

  // Values of a table of its own kind, so that every dtype has some.
  void make_block(Table& table, const std::filesystem::path& folder) {
    block_rows_ = std::clamp<std::uint64_t>(16_MiB / row_bytes(), 1, written_);
    block_.resize(block_rows_ * row_bytes());
    table.read(0, block_rows_, block_);  // initial rows: zeros
    if (is_floating(options_.dtype)) {
      Store helper = Store::open(folder, StoreOptions{.memory = 16_MiB});
      TableOptions options;
      options.rows = block_rows_;
      options.dim = options_.dim;
      options.dtype = options_.dtype;
      options.init = Uniform{-1, 1};
      helper.create("v", options).read(0, block_rows_, block_);
      helper.close();
    } else {
      std::mt19937_64 random(1);
      for (std::byte& byte : block_) byte = static_cast<std::byte>(random() >> 56);
    }
  }

  void fill(Store& store, Table& table, const DiskRate& disk) {
    ProgressLine line("write", geometry_.stride, common_.quiet || common_.json);
    const Progress progress = line.callback();
    Part part;
    const Clock::time_point begin = Clock::now();
    for (std::uint64_t first = 0; first < written_; first += block_rows_) {
      const std::uint64_t count = std::min(block_rows_, written_ - first);
      table.write(first, count, std::span(block_).first(count * row_bytes()));
      progress(first + count, written_);
    }
    store.commit();
    part.seconds = since(begin);
    part.rows = written_;
    part.bytes = written_ * geometry_.stride;
    report_in_order("bulk_write", "bulk write", part, disk);
  }

  void report_in_order(const char* key, const char* name, const Part& part, const DiskRate& disk) {
    const double of_disk = share(part.bytes_per_second(), disk.bytes_per_second());
    json_[key] = {{"bytes_per_second", part.bytes_per_second()},
                  {"rows_per_second", part.rows_per_second()},
                  {"bytes", part.bytes},
                  {"seconds", part.seconds},
                  {"share_of_bare", of_disk}};
    facts_.add(name, fmt::format("{}, {:.2f} of the bare disk", mb_per_second(part.bytes_per_second()), of_disk));
  }

  // Before anything is timed: rows by id, with repeats, are what was written.
  void check(Table& table) {
    IdSource source(ids_text_, written_, 99);
    std::vector<std::int64_t> ids = source.draw(std::min<std::uint64_t>(batch_, 4096));
    ids.push_back(static_cast<std::int64_t>(written_ - 1));
    ids.push_back(ids.front());
    std::vector<std::byte> rows(ids.size() * row_bytes());
    table.gather(ids, rows);
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (std::memcmp(rows.data() + i * row_bytes(),
                      block_.data() + static_cast<std::uint64_t>(ids[i]) % block_rows_ * row_bytes(), row_bytes()) != 0)
        throw CorruptError(fmt::format("row {} is not what was written: a time would mean nothing", ids[i]));
  }

  void scan(Table& table, const std::filesystem::path& file, const DiskRate& disk) {
    forget_cache(file);
    std::vector<std::byte> rows(block_rows_ * row_bytes());
    Part part;
    const Clock::time_point begin = Clock::now();
    for (std::uint64_t first = 0; first < written_ && since(begin) < seconds_; first += block_rows_) {
      check_interrupt();
      const std::uint64_t count = std::min(block_rows_, written_ - first);
      table.read(first, count, std::span(rows).first(count * row_bytes()));
      part.rows += count;
    }
    part.seconds = since(begin);
    part.bytes = part.rows * geometry_.stride;
    report_in_order("scan", "scan", part, disk);
  }

  // Batches until the time is over; only the calls are timed.
  template <typename Call>
  Part timed(Table& table, IdSource& source, double seconds, Call call) {
    const TableStats before = table.stats();
    Part part;
    do {
      check_interrupt();
      const std::vector<std::int64_t> ids = source.draw(batch_);
      const Clock::time_point begin = Clock::now();
      call(ids);
      part.seconds += since(begin);
      part.rows += ids.size();
      ++part.batches;
    } while (part.seconds < seconds);
    const TableStats after = table.stats();
    part.hits = after.hits - before.hits;
    part.misses = after.misses - before.misses;
    return part;
  }

  void gather_cold(Table& table, const std::filesystem::path& file, const DiskRate& disk) {
    forget_cache(file);
    IdSource source(ids_text_, written_, 1);
    std::vector<std::byte> rows(batch_ * row_bytes());
    // One row, so that the frames are there; then while frames are empty, or one batch at least.
    const std::vector<std::int64_t> one{0};
    table.gather(one, std::span(rows).first(row_bytes()));
    const TableStats start = table.stats();
    Part all;
    do {
      const Part part = timed(table, source, 0, [&](const auto& ids) { table.gather(ids, rows); });
      all.seconds += part.seconds;
      all.rows += part.rows;
      all.batches += part.batches;
      all.hits += part.hits;
      all.misses += part.misses;
    } while (all.seconds < seconds_ && table.stats().evictions == start.evictions);
    // Pages of a batch are read in the order of the file, and neighbours in one request: where a batch has many of them, pages
    // come faster than the bare disk reads single ones.
    const double requests =
        all.seconds > 0 ? static_cast<double>(table.stats().read_requests - start.read_requests) / all.seconds : 0;
    json_["gather_cold"] = all.json();
    json_["gather_cold"]["share_of_bare"] = share(all.misses_per_second(), disk.per_second());
    json_["gather_cold"]["requests_per_second"] = requests;
    facts_.add(
        "gather, cold",
        fmt::format("{} rows/s; {} pages/s read, {:.2f} of the bare disk; neighbours in one request: {} requests/s, {:.2f}",
                    grouped(rounded(all.rows_per_second())), grouped(rounded(all.misses_per_second())),
                    share(all.misses_per_second(), disk.per_second()), grouped(rounded(requests)),
                    share(requests, disk.per_second())));
  }

  void gather_warm(Table& table) {
    IdSource source(ids_text_, written_, 2);
    std::vector<std::byte> rows(batch_ * row_bytes());
    const auto gather = [&](const auto& ids) { table.gather(ids, rows); };
    // Until every frame has a page, or all pages have a frame; twice the time at most.
    timed(table, source, 2 * seconds_, [&](const auto& ids) { gather(ids); });
    const Part part = timed(table, source, seconds_, gather);
    json_["gather_warm"] = part.json();
    facts_.add("gather, warm", fmt::format("{} rows/s; {:.1f} % of pages found in memory",
                                           grouped(rounded(part.rows_per_second())), 100 * part.hit_rate()));
  }

  void update(Store& store, Table& table) {
    IdSource source(ids_text_, written_, 3);
    const bool trained = !std::holds_alternative<std::monostate>(options_.optimizer);
    const std::vector<std::byte> grads = trained ? gradients() : std::vector<std::byte>(batch_ * row_bytes());
    const DType dtype = grad_dtype();
    const auto call = [&](const auto& ids) {
      if (trained)
        table.update(ids, grads, dtype);
      else
        table.add(ids, grads);
    };
    timed(table, source, seconds_, call);  // so that pages are written from the beginning
    const Part part = timed(table, source, seconds_, call);
    const Clock::time_point begin = Clock::now();
    store.commit();
    const double commit = since(begin);
    json_["update"] = part.json();
    json_["update"]["optimizer"] = trained;
    json_["update"]["commit_seconds"] = commit;
    facts_.add(trained ? "update" : "add", fmt::format("{} rows/s; {:.1f} % of pages found in memory; commit {:.2f} s",
                                                       grouped(rounded(part.rows_per_second())), 100 * part.hit_rate(), commit));
  }

  DType grad_dtype() const { return options_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  std::vector<std::byte> gradients() const {
    const auto as_bytes = [&](auto value) {
      std::vector<std::byte> bytes(batch_ * options_.dim * sizeof value);
      for (std::size_t at = 0; at < bytes.size(); at += sizeof value) std::memcpy(bytes.data() + at, &value, sizeof value);
      return bytes;
    };
    return grad_dtype() == DType::kFloat64 ? as_bytes(0.01) : as_bytes(0.01F);
  }

  // A loop whose computing, a fixed amount of work on one core, takes as long as its reads, with the next batch prefetched.
  void overlap(Table& table) {
    IdSource source(ids_text_, written_, 4);
    // A batch's pages fit the half of the frames that prefetch may fill.
    const std::uint64_t frames = std::max<std::uint64_t>(table.stats().frames, 4);
    const std::uint64_t count = std::clamp<std::uint64_t>(frames / 4, 1, batch_);
    std::vector<std::byte> rows(count * row_bytes());
    constexpr int kBatches = 8;
    const auto draw = [&] { return source.draw(count); };
    std::vector<std::vector<std::int64_t>> batches;
    for (int i = 0; i < 2 * kBatches + 1; ++i) batches.push_back(draw());

    const Clock::time_point reads_begin = Clock::now();
    for (int i = 0; i < kBatches; ++i) {
      check_interrupt();
      table.gather(batches[static_cast<std::size_t>(i)], rows);
    }
    const double reads = since(reads_begin);

    double value = 0.5;
    const auto work = [&](std::uint64_t units) {
      for (std::uint64_t unit = 0; unit < units; ++unit)
        for (int i = 0; i < 1000; ++i) value = std::sin(value) + 1e-3;
    };
    std::uint64_t units = 0;
    const Clock::time_point trial = Clock::now();
    while (since(trial) < std::max(0.1, reads / kBatches)) work(1), ++units;
    const auto per_batch = static_cast<std::uint64_t>(static_cast<double>(units) * reads / kBatches / since(trial)) + 1;

    const Clock::time_point alone_begin = Clock::now();
    for (int i = 0; i < kBatches; ++i) {
      check_interrupt();
      work(per_batch);
    }
    const double alone = since(alone_begin);
    table.prefetch(batches[kBatches]);
    work(per_batch);
    const Clock::time_point loop_begin = Clock::now();
    for (std::size_t i = kBatches; i < 2 * kBatches; ++i) {
      check_interrupt();
      table.gather(batches[i], rows);
      table.prefetch(batches[i + 1]);
      work(per_batch);
    }
    const double loop = since(loop_begin);
    json_["prefetch"] = {{"batch", count},
                         {"reads_seconds", reads},
                         {"compute_seconds", alone},
                         {"loop_seconds", loop},
                         {"share_of_compute", share(alone, loop)},
                         {"checksum_of_work", value}};
    facts_.add("prefetch",
               fmt::format("a loop that computes as long as it reads runs at {:.2f} of computing alone", share(alone, loop)));
  }

  Common common_;
  StoreOptions store_options_;
  TableOptions options_;
  Geometry geometry_;
  std::string ids_text_;
  std::uint64_t batch_ = 0, written_ = 0, block_rows_ = 0;
  double seconds_ = 0;
  unsigned threads_ = 0, depth_ = 0;
  std::vector<std::byte> block_;
  Json json_;
  Facts facts_;
};

// A file is only read: what the disk below it gives.
int bench_file(const std::filesystem::path& file, const Arguments& arguments, const Common& common) {
  require_regular_file(file);
  const double seconds = parse_number("--seconds", arguments.seconds);
  const std::uint64_t block = parse_size_option("--page-size", arguments.page_size);
  const std::uint64_t depth = parse_count("--depth", arguments.depth);
  if (seconds <= 0 || seconds > 3600) throw UsageError("--seconds: must be above 0, and at most 3600");
  if (depth == 0 || depth > 4096) throw UsageError("--depth: must be 1 to 4096");
  if (block % 512 != 0) throw UsageError("--page-size: must be a multiple of 512 bytes");
  const DiskRate random = random_reads(file, block, static_cast<unsigned>(depth), seconds);
  const DiskRate in_order = sequential_reads(file, seconds);
  Json json{{"path", json_text(file.native())},
            {"bare", {{"random_read", rate_json(random)}, {"sequential_read", rate_json(in_order)}}}};
  json["bare"]["random_read"]["block"] = block;
  json["bare"]["random_read"]["depth"] = depth;
  Facts facts;
  facts.add("bare random", fmt::format("{} reads/s of {}, {} at a time ({})", grouped(rounded(random.per_second())),
                                       format_size(block), depth, way(random)));
  facts.add("bare in order", fmt::format("read {} ({})", mb_per_second(in_order.bytes_per_second()), way(in_order)));
  if (common.json)
    print_json(json);
  else if (!common.quiet)
    print(facts.text());
  return kDone;
}

int bench(const Arguments& arguments, const Common& common) {
  if (!arguments.device.empty())
    return bench_device({.device = parse_device_option(arguments.device),
                         .pool_bytes = parse_size_option("--size", arguments.size),
                         .row_bytes = checked_mul(parse_count("--dim", arguments.dim),
                                                  item_size(parse_dtype_option("--dtype", arguments.dtype)), "bytes of a row"),
                         .batch = parse_count("--batch", arguments.batch),
                         .threads = static_cast<unsigned>(parse_count("--threads", arguments.threads))},
                        common);
  const std::filesystem::path where = arguments.path;
  std::error_code error;
  const auto kind = std::filesystem::status(where, error).type();
  if (kind == std::filesystem::file_type::not_found)
    throw NotFound(fmt::format("{}: no such file or directory", printable(where)));
  if (kind != std::filesystem::file_type::directory) return bench_file(where, arguments, common);
  return Bench(arguments, common).run(where);
}

}  // namespace

void add_bench(CLI::App& app, Common& common, Action& chosen) {
  auto* command = app.add_subcommand("bench", "Measure this disk, and a table of a given shape on it");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("PATH", arguments->path,
                      "A directory, in which a table is made and removed again (default .), or a file, which is only read: what "
                      "the disk gives, with no table");
  const auto option = [&](const char* name, std::string& value, const char* help, const char* type) {
    command->add_option(name, value, help)->type_name(type);
  };
  option("--size", arguments->size, "Bytes of records that are written (default 2GiB); more than --memory, to be of use", "SIZE");
  option("--rows", arguments->rows, "Rows of the table, if more than --size has: they take no disk, and are not used", "N");
  option("--dim", arguments->dim, "Elements of a row (default 128)", "D");
  option("--dtype", arguments->dtype, "float32 (default), float16, bfloat16, float64, int8, ...", "NAME");
  option("--page-size", arguments->page_size, "Unit of disk access: a power of two from 4KiB (default) to 2MiB", "SIZE");
  option("--ids", arguments->ids, "How rows are chosen: uniform (default) or zipf:EXPONENT, hot rows anywhere in the table",
         "KIND");
  option("--batch", arguments->batch, "Ids in a batch (default 65536)", "N");
  option("--seconds", arguments->seconds, "Time of each part, of ten or so (default 3)", "X");
  option("--threads", arguments->threads, "For copies and steps (default: what the process may use, at most 16)", "N");
  option("--depth", arguments->depth, "Reads in flight when the bare disk is measured (default 128)", "N");
  option(
      "--device", arguments->device,
      "cuda, cuda:1, ...: measures how rows of --dim and --dtype cross the link to that device, from --size of memory; no disk, "
      "no table",
      "DEVICE");
  arguments->optimizer.add_to(*command);
  add_store_options(*command, common);
  finish_command(*command, common, chosen,
                 "  embermap bench /data --size 8GiB --memory 800MiB --ids zipf:1.05 --optimizer adagrad\n"
                 "  embermap bench /data/tables/items.npy\n"
                 "  embermap bench --device cuda --size 8GiB --dim 128",
                 [arguments](const Common& c) { return bench(*arguments, c); });
}

}  // namespace embermap::tools
