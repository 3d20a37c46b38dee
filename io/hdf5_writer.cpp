#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/formats.hpp"
#include "io/hdf5.hpp"
#include "io/hdf5_chunks.hpp"
#include "io/lock.hpp"
#include "io/streams.hpp"

namespace embermap {
namespace {

using namespace hdf5;

constexpr std::uint64_t kChunkBytes = 1_MiB;        // what a chunk is chosen to be
constexpr std::uint64_t kWidestChunk = 64_MiB;      // rows above this are cut into several chunks
constexpr std::uint64_t kLargestChunk = 4_GiB - 1;  // of the format
constexpr std::uint64_t kChunkRowLimit = 128_MiB;   // of rows that are cut
constexpr std::uint64_t kBatchBytes = 32_MiB;       // rows that are compressed together

// "/a/b" of "a/b". Throws InvalidArgument for names that could not be found again.
std::string dataset_path(const Location& location) {
  if (location.selector.empty()) return "/data";
  const std::string& text = location.selector;
  const auto refuse = [&](std::string_view why) {
    throw InvalidArgument(fmt::format("{}:{}: {}", printable(location.file), printable(text), why));
  };
  if (text.find(':') != std::string::npos) refuse("a field of a dataset cannot be written alone; leave the second ':' out");
  std::string path;
  for (std::size_t at = text.starts_with('/') ? 1 : 0; at <= text.size();) {
    const std::size_t end = std::min(text.find('/', at), text.size());
    const std::string part = text.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") refuse("no path of a dataset (each part needs a name, not '.' or '..')");
    path += '/';
    path += part;
    at = end + 1;
  }
  return path;
}

bool same_inode(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

// Whoever has a file open may change it in place; whoever adds a dataset as we do puts another file in its place.
bool unchanged(const struct stat& a, const struct stat& b) {
  return same_inode(a, b) && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec &&
         a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

std::optional<struct stat> status_of(const std::filesystem::path& file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) == 0) return status;
  if (errno == ENOENT) return std::nullopt;
  throw IoError(errno, "stat", file);
}

// The rows go into a copy of the file, which takes its place when it is complete. Others may do the same meanwhile: finish()
// finds out, and then copies the finished dataset into a copy of what is there by then.
class Hdf5RowWriter final : public RowWriter {
 public:
  // `existing`: the file is there, and everything in it but the dataset is kept.
  Hdf5RowWriter(const Location& location, const std::string& path, bool existing, std::uint64_t rows, std::uint64_t dim,
                DType dtype, const WriteOptions& options)
      : path_{path},
        adds_{!location.selector.empty()},
        overwrite_{options.overwrite},
        own_{TemporaryFile::create(location.file, existing || options.overwrite)},
        temporary_{&*own_},
        count_{fmt::format("{}:{}", printable(location.file), printable(path)), rows},
        dim_{dim},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")},
        type_{file_type(dtype)} {
    const Session quiet;
    if (existing)
      file_ = copy_of_target(*temporary_);
    else
      open_temporary(/*first=*/true);
    begin(rows, options, existing);
  }

  // One dataset of several in a temporary file of the caller's, who completes it: see create_hdf5_rows_in().
  Hdf5RowWriter(TemporaryFile& file, bool first, const std::string& path, std::uint64_t rows, std::uint64_t dim, DType dtype,
                const WriteOptions& options)
      : path_{path},
        adds_{true},
        overwrite_{false},
        temporary_{&file},
        count_{fmt::format("{}:{}", printable(file.target()), printable(path)), rows},
        dim_{dim},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")},
        type_{file_type(dtype)} {
    const Session quiet;
    open_temporary(first);
    if (!first) (void)check_place(file_);
    begin(rows, options, !first);
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    if (out_) return out_->write({rows, count * row_bytes_});
    while (count > 0) {
      if (pending_rows_ == 0 && count >= batch_rows_) {
        write_chunks(batch_rows_, rows);
        count -= batch_rows_;
        rows += batch_rows_ * row_bytes_;
        continue;
      }
      const std::uint64_t now = std::min(count, batch_rows_ - pending_rows_);
      pending_.insert(pending_.end(), rows, rows + now * row_bytes_);
      pending_rows_ += now;
      count -= now;
      rows += now * row_bytes_;
      if (pending_rows_ == batch_rows_) flush();
    }
  }

  bool takes_bytes() const override { return out_.has_value(); }
  void write_bytes(std::span<const std::byte> bytes) override {
    if (!out_) return RowWriter::write_bytes(bytes);
    count_.add_bytes(bytes.size(), row_bytes_);
    out_->write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return out_ ? out_->write_behind(bytes_, memory) : 0; }
  std::string how() const override { return out_ ? out_->how() : std::string(); }

  void finish() override {
    count_.finish();
    flush();
    {
      const Session quiet;
      if (H5Fflush(file_.id(), H5F_SCOPE_LOCAL) < 0 || !dataset_.close() || !file_.close()) fail("cannot finish");
    }
    if (!own_) return;          // the caller's
    temporary_->file().sync();  // the long part of commit(), before others have to wait
    // Taken outside of a Session: its holder may need one. Not taken before: rows come as slowly as the caller likes, and may
    // come to several writers of one file in turn.
    const FolderLock alone(temporary_->target());
    constexpr int kAttempts = 100;
    for (int attempt = 0; adds_ && target_changed(); ++attempt) {
      if (attempt == kAttempts)
        throw AlreadyExists(
            fmt::format("{} was changed by someone else again and again while {} was written; it is left as it is now",
                        printable(temporary_->target()), printable(path_)));
      move_into_copy_of_target();
    }
    temporary_->commit();
  }

 private:
  void open_temporary(bool first) {
    const PropertyId access = writing_access();
    const char* const name = temporary_->file().path().c_str();
    file_ = FileId{first ? H5Fcreate(name, H5F_ACC_TRUNC, H5P_DEFAULT, access.id()) : H5Fopen(name, H5F_ACC_RDWR, access.id())};
    if (!file_) throw_last(temporary_->target(), "cannot create");
  }

  void begin(std::uint64_t rows, const WriteOptions& options, bool existing) {
    create_dataset(rows, options);
    for (const auto& [name, value] : options.attributes) write_attribute(name, value);
    if (!layout_.chunk.empty() || rows == 0) return;
    // Rows in one piece go past the library, to the place that it has given them.
    bytes_ = rows * row_bytes_;
    const haddr_t begin = H5Dget_offset(dataset_.id());
    if (begin == HADDR_UNDEF) fail("cannot find the place of");
    out_.emplace(temporary_->file(), begin, options.sparse && !existing ? begin : UINT64_MAX);
  }

  [[noreturn]] void fail(std::string_view what) const {
    throw_last(temporary_->target(), fmt::format("{} {}", what, printable(path_)));
  }

  // Whether the file is another one than was copied, or one was made where none was.
  bool target_changed() const {
    const auto now = status_of(temporary_->target());
    if (!source_.is_open()) return now.has_value();
    if (!now)
      throw NotFound(
          fmt::format("{} was removed by someone else while {} was written", printable(temporary_->target()), printable(path_)));
    return !unchanged(*now, source_status_);
  }

  // Throws unless the dataset may be put into the open file `old`. Returns whether it replaces one.
  bool check_place(const FileId& old) const {
    const std::filesystem::path& target = temporary_->target();
    for (std::size_t slash = path_.find('/', 1); slash != std::string::npos; slash = path_.find('/', slash + 1)) {
      const std::string group = path_.substr(0, slash);
      const ObjectKind kind = object_at(old.id(), target, group);
      if (kind == ObjectKind::kNone) break;
      if (kind != ObjectKind::kGroup)
        throw InvalidArgument(fmt::format("{}:{}: {} is no group, so nothing can be put into it", printable(target),
                                          printable(path_), printable(group)));
    }
    const ObjectKind kind = object_at(old.id(), target, path_);
    if (kind == ObjectKind::kDataset && !overwrite_)
      throw AlreadyExists(fmt::format("{}:{} already exists", printable(target), printable(path_)));
    if (kind == ObjectKind::kGroup || kind == ObjectKind::kOther)
      throw AlreadyExists(
          fmt::format("{}:{} already exists and is no dataset; it is not replaced", printable(target), printable(path_)));
    return kind == ObjectKind::kDataset;
  }

  // Copies the file that is there into `copy` and opens that, without a dataset in the place of ours. Remembers which file it
  // was.
  FileId copy_of_target(TemporaryFile& copy) {
    const std::filesystem::path& target = temporary_->target();
    bool replaces = false;
    for (;;) {
      source_ = File::open(target, File::Mode::kRead);
      const FileId old = open_for_reading(target);  // its lock keeps other programs from writing while it is copied
      source_status_ = source_.status();
      const auto now = status_of(target);
      if (now && !same_inode(*now, source_status_)) continue;  // replaced between the two: each may have opened another file
      replaces = check_place(old);
      const auto size = static_cast<std::uint64_t>(source_status_.st_size);
      copy.file().reserve(size);
      std::vector<std::byte> block(std::min<std::uint64_t>(4_MiB, size));
      for (std::uint64_t at = 0; at < size; at += block.size()) {
        const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), size - at));
        source_.read(at, part);
        copy.file().write(at, part);
      }
      break;
    }
    const PropertyId access = writing_access();
    FileId out{H5Fopen(copy.file().path().c_str(), H5F_ACC_RDWR, access.id())};
    if (!out) throw_last(target, "cannot open the copy of");
    const PropertyId links = link_access(H5P_LINK_ACCESS);
    if (replaces && H5Ldelete(out.id(), path_.c_str(), links.id()) < 0) fail("cannot replace");
    return out;
  }

  // The finished dataset, out of our file into a copy of the one that is there now, which becomes ours.
  void move_into_copy_of_target() {
    TemporaryFile newer = TemporaryFile::create(temporary_->target(), /*overwrite=*/true);
    {
      const Session quiet;
      FileId to = copy_of_target(newer);
      const PropertyId access = writing_access(), links{H5Pcreate(H5P_LINK_CREATE)};
      FileId from{H5Fopen(temporary_->file().path().c_str(), H5F_ACC_RDONLY, access.id())};
      if (!from || !links || H5Pset_create_intermediate_group(links.id(), 1) < 0 ||
          H5Ocopy(from.id(), path_.c_str(), to.id(), path_.c_str(), H5P_DEFAULT, links.id()) < 0 ||
          H5Fflush(to.id(), H5F_SCOPE_LOCAL) < 0 || !to.close() || !from.close())
        fail("cannot copy");
    }
    own_ = std::move(newer);
    temporary_ = &*own_;
  }

  void create_dataset(std::uint64_t rows, const WriteOptions& options) {
    const PropertyId creation{H5Pcreate(H5P_DATASET_CREATE)};
    const PropertyId links{H5Pcreate(H5P_LINK_CREATE)};
    PropertyId access = link_access(H5P_DATASET_ACCESS);
    if (!creation || !links || H5Pset_create_intermediate_group(links.id(), 1) < 0 ||
        H5Pset_obj_track_times(creation.id(), false) < 0)
      fail("cannot create");
    if (options.gzip >= 0 && rows > 0) {  // a chunk may not be larger than the dataset, so an empty one has none
      const std::uint64_t element = row_bytes_ / dim_;
      const std::uint64_t columns = row_bytes_ <= kWidestChunk ? dim_ : std::min(dim_, 16_MiB / element);
      const std::uint64_t chunk_row = columns * element;
      std::uint64_t most = kLargestChunk / chunk_row;
      if (columns < dim_) most = std::max<std::uint64_t>(1, std::min(most, kChunkRowLimit / row_bytes_));
      const std::uint64_t wanted =
          options.chunk_rows > 0 ? options.chunk_rows : std::max<std::uint64_t>(1, kChunkBytes / chunk_row);
      const std::array<hsize_t, 2> chunk{std::min({wanted, rows, most}), columns};
      const std::uint64_t chunks_a_row = ceil_div(dim_, columns);
      layout_.extent = {rows, dim_};
      layout_.chunk = {chunk[0], chunk[1]};
      layout_.record_bytes = element;
      layout_.chunk_bytes = chunk[0] * chunk[1] * element;
      layout_.chunks_a_row = chunks_a_row;
      layout_.filters = {{ChunkLayout::Filter::Kind::kDeflate, static_cast<unsigned>(options.gzip)}};
      if (element > 1)
        layout_.filters.insert(layout_.filters.begin(), {ChunkLayout::Filter::Kind::kShuffle, static_cast<unsigned>(element)});
      const std::uint64_t chunk_row_bytes = chunk[0] * row_bytes_;
      threads_ = chunk_threads(options.threads);
      const std::uint64_t together = std::clamp<std::uint64_t>(kBatchBytes / chunk_row_bytes, 1, 4 * std::uint64_t{threads_});
      batch_rows_ = chunk[0] * together;
      if (H5Pset_chunk(creation.id(), 2, chunk.data()) < 0 || (element > 1 && H5Pset_shuffle(creation.id()) < 0) ||
          H5Pset_deflate(creation.id(), static_cast<unsigned>(options.gzip)) < 0 ||
          H5Pset_chunk_cache(access.id(), 0, 0, 1.0) < 0)
        fail("cannot create");
    } else {
      const std::uint64_t end =
          checked_add(temporary_->file().size(), checked_mul(rows, row_bytes_, "bytes of the table"), "bytes of the file");
      if (!options.sparse) temporary_->file().reserve(end);
      if (H5Pset_layout(creation.id(), H5D_CONTIGUOUS) < 0 || H5Pset_alloc_time(creation.id(), H5D_ALLOC_TIME_EARLY) < 0 ||
          H5Pset_fill_time(creation.id(), H5D_FILL_TIME_NEVER) < 0)
        fail("cannot create");
    }
    const std::array<hsize_t, 2> extent{rows, dim_};
    space_ = SpaceId{H5Screate_simple(2, extent.data(), nullptr)};
    dataset_ = DatasetId{H5Dcreate2(file_.id(), path_.c_str(), type_.id(), space_.id(), links.id(), creation.id(), access.id())};
    if (!dataset_) fail("cannot create");
  }

  void write_attribute(const std::string& name, const std::string& value) const {
    constexpr std::size_t kLongest = 60000;  // an attribute lies in a header of at most 64 KiB
    if (name.empty() || value.size() > kLongest)
      throw InvalidArgument(fmt::format("{}:{}: an attribute '{}' of {} bytes cannot be written (at most {})",
                                        printable(temporary_->target()), printable(path_), printable(name), value.size(),
                                        kLongest));
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    const bool whole = !value.empty() && error == std::errc() && end == value.data() + value.size();
    const SpaceId one{H5Screate(H5S_SCALAR)};
    const TypeId type{H5Tcopy(whole ? H5T_STD_I64LE : H5T_C_S1)};
    if (!whole && (H5Tset_size(type.id(), std::max<std::size_t>(1, value.size())) < 0 ||
                   H5Tset_strpad(type.id(), H5T_STR_NULLPAD) < 0 || H5Tset_cset(type.id(), H5T_CSET_UTF8) < 0))
      fail("cannot write an attribute of");
    const AttributeId attribute{H5Acreate2(dataset_.id(), name.c_str(), type.id(), one.id(), H5P_DEFAULT, H5P_DEFAULT)};
    const void* const data = whole ? static_cast<const void*>(&number) : value.c_str();
    if (!attribute || H5Awrite(attribute.id(), whole ? H5T_NATIVE_INT64 : type.id(), data) < 0)
      fail("cannot write an attribute of");
  }

  void flush() {
    if (out_) out_->flush();
    if (pending_rows_ == 0) return;
    write_chunks(pending_rows_, pending_.data());
    pending_.clear();
    pending_rows_ = 0;
  }

  // Whole chunk rows, or all rows that are left. Compressed by several threads, written in order, so that equal rows make equal
  // files.
  void write_chunks(std::uint64_t count, const std::byte* rows) {
    struct Packed {
      std::vector<std::byte> bytes;
      unsigned skipped = 0;
    };
    const std::uint64_t element = layout_.record_bytes, chunk_rows = layout_.chunk[0], columns = layout_.chunk[1];
    std::vector<Packed> packed(ceil_div(count, chunk_rows) * layout_.chunks_a_row);
    const auto pack = [&](std::uint64_t begin, std::uint64_t end) {
      ChunkScratch scratch;
      for (std::uint64_t index = begin; index < end; ++index) {
        const std::uint64_t row = index / layout_.chunks_a_row * chunk_rows, column = index % layout_.chunks_a_row * columns;
        const std::uint64_t rows_here = std::min(chunk_rows, count - row), bytes = std::min(columns, dim_ - column) * element;
        // What reaches beyond the dataset is zero, as the library has it.
        Packed& out = packed[index];
        out.bytes.assign(layout_.chunk_bytes, std::byte{0});
        for (std::uint64_t i = 0; i < rows_here; ++i)
          std::memcpy(out.bytes.data() + i * columns * element, rows + (row + i) * row_bytes_ + column * element, bytes);
        out.skipped = pack_chunk(layout_, out.bytes, scratch);
      }
    };
    if (threads_ > 1 && packed.size() > 1) {
      if (!pool_) pool_ = std::make_unique<ThreadPool>(threads_);
      pool_->parallel_for(packed.size(), 1, pack);
    } else {
      pack(0, packed.size());
    }
    const Session quiet;
    for (std::uint64_t index = 0; index < packed.size(); ++index) {
      const std::array<hsize_t, 2> at{written_ + index / layout_.chunks_a_row * chunk_rows,
                                      index % layout_.chunks_a_row * columns};
      if (H5Dwrite_chunk(dataset_.id(), H5P_DEFAULT, packed[index].skipped, at.data(), packed[index].bytes.size(),
                         packed[index].bytes.data()) < 0)
        fail(fmt::format("cannot write rows [{}, +{}) of", at[0], std::min(chunk_rows, count)));
    }
    written_ += count;
  }

  std::string path_;
  bool adds_, overwrite_;  // adds_: to what is in the file; else the file is ours alone
  File source_;            // the file that was copied, if there was one to add to
  struct stat source_status_ {};
  std::optional<TemporaryFile> own_;  // before the handles: they have to be closed when it is removed
  TemporaryFile* temporary_;          // that, or the caller's
  RowCount count_;
  std::uint64_t dim_, row_bytes_;
  FileId file_;
  TypeId type_;
  SpaceId space_;
  DatasetId dataset_;
  std::uint64_t bytes_ = 0;
  std::optional<StreamWriter> out_;  // of rows in one piece
  ChunkLayout layout_;               // of compressed ones
  std::uint64_t batch_rows_ = 0;     // whole chunk rows that are compressed together
  unsigned threads_ = 1;
  std::unique_ptr<ThreadPool> pool_;
  std::uint64_t written_ = 0;  // rows in chunks
  std::vector<std::byte> pending_;
  std::uint64_t pending_rows_ = 0;
};

}  // namespace

std::unique_ptr<RowWriter> create_hdf5_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                            const WriteOptions& options) {
  if (options.chunk_rows > 0 && options.gzip < 0)
    throw InvalidArgument(fmt::format("{}: chunk_rows is for compressed datasets; give a gzip level", printable(location.file)));
  const std::string path = dataset_path(location);
  std::error_code ignored;
  const auto there = [&] { return !location.selector.empty() && std::filesystem::is_regular_file(location.file, ignored); };
  const auto create = [&](bool existing) {
    return std::make_unique<Hdf5RowWriter>(location, path, existing, rows, dim, dtype, options);
  };
  if (there()) return create(true);
  try {
    return create(false);
  } catch (const AlreadyExists&) {
    if (!there()) throw;
  }
  return create(true);  // made by someone else just now
}

std::unique_ptr<RowWriter> create_hdf5_rows_in(TemporaryFile& file, bool first, const std::string& name, std::uint64_t rows,
                                               std::uint64_t dim, DType dtype, const WriteOptions& options) {
  const std::string path = dataset_path(Location{file.target(), name, Location::Format::kHdf5});
  return std::make_unique<Hdf5RowWriter>(file, first, path, rows, dim, dtype, options);
}

}  // namespace embermap
