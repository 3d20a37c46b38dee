#include "io/partial_rows.hpp"

#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/convert.hpp"
#include "io/elements.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace embermap {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kSaveBytes = 64_MiB;
constexpr std::uint64_t kMostRecord = 4_MiB;
constexpr std::string_view kFormat = "embermap resume";

// Paths are bytes, JSON is UTF-8.
std::string text_of(std::string_view bytes) { return printable(bytes); }

class PartialReader final : public RowReader {
 public:
  PartialReader(const File& file, std::uint64_t offset, std::uint64_t rows, std::uint64_t dim, DType dtype)
      : file_{file}, offset_{offset} {
    rows_ = rows;
    dim_ = dim;
    dtype_ = dtype;
  }
  std::string description() const override { return printable(file_.path()); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    check_row_range(description(), first, count, rows_);
    const std::uint64_t row = dim_ * item_size(dtype_);
    file_.read(offset_ + first * row, {out, count * row});
  }
  std::uint64_t block_rows() const override { return std::max<std::uint64_t>(1, 4_MiB / (dim_ * item_size(dtype_))); }

 private:
  const File& file_;
  std::uint64_t offset_;
};

// The rows of a reader from one on.
class RestReader final : public RowReader {
 public:
  RestReader(RowReader& source, std::uint64_t first) : source_{source}, first_{first} {
    rows_ = source.rows() - first;
    dim_ = source.dim();
    dtype_ = source.dtype();
  }
  std::string description() const override { return source_.description(); }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override { source_.read(first_ + first, count, out); }
  std::uint64_t block_rows() const override { return source_.block_rows(); }

 private:
  RowReader& source_;
  std::uint64_t first_;
};

std::filesystem::path beside(const std::filesystem::path& target, std::string_view ending) {
  return target.parent_path() / ("." + target.filename().native() + std::string(ending));
}

// What a symbolic link leads to is what is replaced.
std::filesystem::path resolved(const std::filesystem::path& target) {
  std::error_code error;
  if (!std::filesystem::is_symlink(target, error)) return target;
  const std::filesystem::path path = std::filesystem::weakly_canonical(target, error);
  return error ? target : path;
}

File open_partial(const std::filesystem::path& path, bool& created) {
  created = true;
  try {
    return File::open(path, File::Mode::kCreateNew);
  } catch (const AlreadyExists&) {
    created = false;
    // Somebody else may have put another file's name here, in a directory that others write to: it would be overwritten.
    struct stat there {};
    if (::lstat(path.c_str(), &there) == 0 && (S_ISLNK(there.st_mode) || (S_ISREG(there.st_mode) && there.st_nlink > 1)))
      throw FormatError(path, fmt::format("is {}, not the rows of a copy to go on with; remove it to begin again",
                                          S_ISLNK(there.st_mode) ? "a symbolic link" : "a file that has other names too"));
    return File::open(path, File::Mode::kReadWrite);
  }
}

}  // namespace

std::filesystem::path PartialRows::rows_path(const std::filesystem::path& target) { return beside(resolved(target), ".resume"); }
std::filesystem::path PartialRows::record_path(const std::filesystem::path& target) {
  return beside(resolved(target), ".resume.json");
}

PartialRows::PartialRows(const std::filesystem::path& target, const Copy& copy, bool overwrite)
    : target_{resolved(target)},
      rows_path_{rows_path(target)},
      record_path_{record_path(target)},
      copy_{copy},
      overwrite_{overwrite},
      row_bytes_{checked_mul(copy.dim, item_size(copy.dtype), "bytes of a row")} {
  { (void)TemporaryFile::create(target, overwrite); }  // whether the target may be written is known before the rows are
  bool created = false;
  for (;;) {
    file_ = open_partial(rows_path_, created);
    if (::flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK)
        throw LockedError(
            fmt::format("{} is being written by another process, which makes {}", printable(rows_path_), printable(target)));
      throw IoError(errno, "flock", rows_path_);
    }
    // Between the two another process may have finished the file, which then is the target, or removed it.
    const struct stat ours = file_.status();
    struct stat there {};
    if (::lstat(rows_path_.c_str(), &there) == 0 && there.st_ino == ours.st_ino && there.st_dev == ours.st_dev) break;
  }
  if (!overwrite_) (void)TemporaryFile::create(target, /*overwrite=*/false);  // nor has it appeared meanwhile
  // A record without rows: whoever wrote it ended when these had the target's name already.
  if (created) file_.ops().unlink(record_path_.c_str());
  const std::uint64_t all =
      checked_add(copy_.header.size(), checked_mul(copy_.rows, row_bytes_, "bytes of the rows"), "bytes of the file");
  std::error_code ignored;
  if (std::filesystem::exists(record_path_, ignored)) {
    const auto broken = [&](std::string_view why) {
      return FormatError(record_path_, fmt::format("{}; remove it and {} to begin again", why, printable(rows_path_)));
    };
    const Json record = Json::parse(read_text(record_path_, kMostRecord), nullptr, /*allow_exceptions=*/false);
    const auto number = [&](const char* key) {
      if (!record.contains(key) || !record[key].is_number_unsigned()) throw broken(fmt::format("has no number '{}'", key));
      return record[key].get<std::uint64_t>();
    };
    if (!record.is_object() || !record.contains("format") || record["format"] != kFormat || !record.contains("of") ||
        !record["of"].is_object())
      throw broken("is no record of a copy to go on with");
    for (const auto& [key, now] : copy_.of) {
      const auto& of = record["of"];
      const std::string before = of.contains(key) && of[key].is_string() ? of[key].get<std::string>() : std::string();
      if (before != text_of(now))
        throw InvalidArgument(fmt::format(
            "{}: the copy that was interrupted had another {}: '{}', it is '{}' now; remove {} and "
            "{} to begin again",
            printable(target), key, printable(before), printable(now), printable(rows_path_), printable(record_path_)));
    }
    done_ = number("done");
    report_.became_infinite = number("became_infinite");
    report_.became_zero = number("became_zero");
    if (done_ > copy_.rows || file_.size() < copy_.header.size() + done_ * row_bytes_)
      throw broken(fmt::format("says that {} of {} rows are there, {} has {} bytes", done_, copy_.rows, printable(rows_path_),
                               file_.size()));
    saved_ = done_;
  } else {
    file_.resize(0);
    try {
      file_.reserve(all);
    } catch (...) {  // nothing is there that could be gone on with
      remove();
      throw;
    }
    file_.write(0, copy_.header);
  }
  file_.resize(copy_.header.size() + done_ * row_bytes_);
}

PartialRows::~PartialRows() = default;

void PartialRows::write(std::uint64_t count, const std::byte* rows) {
  if (count > copy_.rows - done_)
    throw InvalidArgument(
        fmt::format("{}: {} rows were promised, {} more come after {}", printable(target_), copy_.rows, count, done_));
  if (copy_.from != copy_.dtype) {
    converted_.resize(std::max<std::size_t>(converted_.size(), count * row_bytes_));
    const std::uint64_t good = try_convert_elements(copy_.from, rows, copy_.dtype, converted_.data(), count * copy_.dim, report_);
    if (good < count * copy_.dim)
      throw DTypeError(fmt::format("{}: {} (row {}, column {})", printable(target_),
                                   conversion_failure(copy_.from, rows + good * item_size(copy_.from), copy_.dtype),
                                   done_ + good / copy_.dim, good % copy_.dim));
    rows = converted_.data();
  }
  file_.write(copy_.header.size() + done_ * row_bytes_, {rows, count * row_bytes_});
  done_ += count;
  if ((done_ - saved_) * row_bytes_ >= kSaveBytes) save();
}

void PartialRows::save() {
  file_.sync();
  Json record{{"format", kFormat}, {"of", Json::object()}, {"rows", copy_.rows}, {"done", done_}};
  for (const auto& [key, value] : copy_.of) record["of"][key] = text_of(value);
  record["became_infinite"] = report_.became_infinite;
  record["became_zero"] = report_.became_zero;
  replace_file(record_path_, record.dump(1) + "\n");
  saved_ = done_;
}

std::unique_ptr<RowReader> PartialRows::reader() const {
  return std::make_unique<PartialReader>(file_, copy_.header.size(), done_, copy_.dim, copy_.dtype);
}

void PartialRows::finish() {
  if (done_ != copy_.rows)
    throw InvalidArgument(fmt::format("{}: only {} of the {} rows promised were written", printable(target_), done_, copy_.rows));
  file_.sync();
  struct stat status {};
  if (overwrite_ && ::stat(target_.c_str(), &status) == 0) {
    // As TemporaryFile does: who may read the old file may read the new one.
    (void)!::fchown(file_.fd(), status.st_uid, status.st_gid);
    (void)!::fchmod(file_.fd(), status.st_mode & 07777U);
  }
  FileOps& ops = file_.ops();
  const int result =
      overwrite_ ? ops.rename(rows_path_.c_str(), target_.c_str()) : ops.rename_new(rows_path_.c_str(), target_.c_str());
  if (result != 0) {
    if (errno == EEXIST)
      throw AlreadyExists(fmt::format("{} already exists (made by someone else meanwhile)", printable(target_)));
    throw IoError(errno, "rename", target_);
  }
  ops.unlink(record_path_.c_str());
  sync_directory(target_.parent_path(), ops);
}

void PartialRows::remove() noexcept {
  file_.ops().unlink(record_path_.c_str());  // first: rows without a record count as none
  file_.ops().unlink(rows_path_.c_str());
}

void continue_partial(RowReader& reader, PartialRows& partial, std::uint64_t memory, const Progress& progress) {
  const std::uint64_t before = partial.done();
  RestReader rest(reader, before);
  try {
    copy_rows(rest, partial, reader.dtype(), memory, [&](std::uint64_t done, std::uint64_t total) {
      if (progress) progress(before + done, before + total);
    });
    partial.save();
  } catch (...) {
    try {
      if (partial.done() > 0)
        partial.save();
      else
        partial.remove();
    } catch (const std::exception&) {  // a full disk, perhaps: what was saved before is what is gone on with
    }
    throw;
  }
}

std::string file_identity(const std::filesystem::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) throw IoError(errno, "stat", file);
  return fmt::format("{} bytes, changed at {}.{:09}, inode {} on {}", status.st_size, status.st_mtim.tv_sec,
                     status.st_mtim.tv_nsec, status.st_ino, status.st_dev);
}

std::optional<std::string> plain_header(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype) {
  if (!location.selector.empty() || location.file.native().ends_with(".index.json")) return std::nullopt;
  if (location.format == Location::Format::kRaw) return std::string();
  if (location.format == Location::Format::kNpy) return format_npy_header(npy_descr(dtype), {}, 0, {rows, dim}, 0);
  if (location.format == Location::Format::kSafetensors) {
    std::vector<SafeTensor> tensors{{"weight",
                                     std::string(safetensors_dtype(dtype)),
                                     {rows, dim},
                                     0,
                                     checked_mul(checked_mul(rows, dim, "elements"), item_size(dtype), "bytes of the tensor")}};
    return format_safetensors_header(tensors, {{"format", "pt"}});
  }
  return std::nullopt;
}

}  // namespace embermap
