// Rows in files of any format, as streams: what import, export and convert are made of. Memory is bounded by the caller's blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "io/file.hpp"
#include "io/vocabulary.hpp"

namespace embermap {

class ByteSource;  // io/streams.hpp

// Where rows lie: a file, and the part of it that a selector names: "x.npy", "x.npy:field", "x.npz:member",
// "x.h5:/group/dataset", "x.h5:/dataset:field" (of a compound type), "x.safetensors:tensor", "x.pt:encoder.weight".
struct Location {
  enum class Format {
    kNpy,
    kNpz,
    kHdf5,
    kSafetensors,
    kTorch,
    kWord2vecText,
    kWord2vecBinary,
    kGlove,
    kFastTextBinary,
    kVecs,  // .fvecs, .bvecs, .ivecs: each row behind its dimension
    kBin,   // .fbin, .u8bin, .i8bin: rows and dimension, then the rows
    kRaw
  };
  std::filesystem::path file;
  std::string selector;
  Format format = Format::kNpy;
};

// "npz", "word2vec-text", ...: as --from and --to take it.
std::string_view format_name(Location::Format format);
// Throws InvalidArgument listing the names that exist.
Location::Format parse_format(std::string_view name);
// "npy, npz, ...", those that can be written or all.
std::string format_names(bool written);
// Whether WriteOptions::gzip means something there.
bool format_compresses(Location::Format format);
// Whether a selector names one of several things in such a file.
bool format_has_members(Location::Format format);
// Whether every row of such a file has a word (io/vocabulary.hpp).
bool format_has_words(Location::Format format);
// Whether a writer with a selector adds to what is in the file; else it replaces the file.
bool format_adds(Location::Format format);

struct LocationOptions {
  enum class Use { kRead, kWrite };
  std::optional<Location::Format> format = {};  // instead of what content and name tell
  Use use = Use::kRead;                         // kWrite: the content of a file that will be replaced tells nothing
};

// The format is `options.format`, else what the content of the file says for certain, else what the extension of its name says
// (known in any case), where the content may choose between formats that share one. The file is the whole text if that exists,
// else what stands before the last ':' with a known extension before it (before an earlier such ':' if only that file exists),
// else what stands before the last ':' if that is a file whose format is given or certain; the rest is the selector. Paths may
// contain ':' and any bytes but zero. Throws InvalidArgument where no format can be told, listing the extensions that are known;
// for a name that several formats to write share, with their names; and for nothing after the ':'. Throws IoError where a file
// that is to be read would have to tell its format, and is not there.
Location parse_location(std::string_view text, const LocationOptions& options = {});

// One array in a file, found out without reading its rows (but for GloVe, whose lines are counted).
struct Entry {
  std::string name;  // the selector that opens it; empty: the file holds nothing else
  std::vector<std::uint64_t> shape;
  std::string dtype;        // as the format calls it where a table cannot hold it: "complex64"
  std::uint64_t bytes = 0;  // of the array, not compressed
  std::string layout;       // "stored", "deflated", "chunked (64, 128), gzip", ...
  // What is noted beside it, as text: HDF5's attributes (numbers and texts of fixed length; of others their type).
  std::vector<std::pair<std::string, std::string>> attributes = {};
};

// What open_rows() could be asked for in this file, in the file's order, and what lies beside it; the rows of a format without
// members as one entry. Throws what opening would.
std::vector<Entry> list_entries(const std::filesystem::path& file, Location::Format format);

struct ReadOptions {
  // Takes ambiguous bytes (V2, opaque) as this; must otherwise equal the file's dtype (convert after reading).
  std::optional<DType> dtype = {};
  // HDF5: external raw files, virtual datasets and external links are read and followed, to files below the file's own folder.
  bool allow_external = false;
  bool follow_links = false;  // the same, wherever those files lie: for files that are trusted
  // Formats with words (format_has_words()): is given those of the rows that read() is asked for, by the thread that calls it,
  // before it returns. Empty: words are passed over.
  WordSink words = {};
  // How many columns; 0: as the file says. Raw files and empty .fvecs need it, GloVe may (where most of its words hold spaces);
  // other word vectors, .fvecs and .fbin are FormatError where they have others, and formats of arrays do not look at it.
  std::uint64_t dim = 0;
  std::uint64_t offset = 0;  // raw files: how many bytes stand before the first row
  unsigned threads = 0;      // that decompress HDF5's chunks; 0: what the process may use, at most 16
  // For numbers of rows. Set: integers that no table holds (int16, uint16, uint32, uint64) are read as well, as their bits in a
  // dtype of that width (RowReader::dtype()), and what they are is put here.
  struct Integers {
    bool other = false;  // than the dtype says
    bool is_signed = false;
    bool boolean = false;  // no numbers: truth values, read as 0 and 1
  };
  std::shared_ptr<Integers> integers = {};
};

// What rows do not show of the array they come from.
struct Remark {
  std::string text;    // a sentence, with the file and the array
  bool doubt = false;  // values may not be those that were once stored (a lossy filter), or never were (fill values)
};

// Rows 0 .. rows() - 1 of dim() elements. Not thread-safe. Throws IoError, FormatError, DTypeError naming the file and dataset.
class RowReader {
 public:
  virtual ~RowReader() = default;
  std::uint64_t rows() const noexcept { return rows_; }
  std::uint64_t dim() const noexcept { return dim_; }
  DType dtype() const noexcept { return dtype_; }  // native order; bool files are read as uint8 0 or 1
  virtual std::string description() const = 0;     // "x.h5:/v, chunked, gzip"
  // Rows [first, first + count), contiguous, to `out`. Quick in ascending order.
  virtual void read(std::uint64_t first, std::uint64_t count, std::byte* out) = 0;
  // How many rows make a good block (whole chunks, about a MiB or a few; at least 1).
  virtual std::uint64_t block_rows() const = 0;
  // For whoever copies rows to tell: a shape that is not (rows, dim), a lossy filter, chunks that were never written.
  virtual std::vector<Remark> remarks() const { return remarks_; }
  // Rows [first, first + count) will be read now, in ascending order. A reader may have a thread of its own read ahead from then
  // on, into at most `memory` bytes; it ends when the last of them is read, or others are. Returns the bytes taken.
  virtual std::uint64_t read_ahead(std::uint64_t first, std::uint64_t count, std::uint64_t memory) {
    (void)first, (void)count, (void)memory;
    return 0;
  }
  // Whether less than half of the rows' bytes take room on the disk: the others were never written, and read as zeros.
  virtual bool sparse() const { return false; }
  // How what was read ahead came: "direct", or "buffered" with the reason; empty where nothing was.
  virtual std::string how() const { return {}; }
  // Rows that are a file's bytes as they are, one behind the other from `begin` on: what gives them. It belongs to the reader.
  struct Plain {
    ByteSource* source = nullptr;  // nullptr: they are not
    std::uint64_t begin = 0;
  };
  virtual Plain plain() { return {}; }

 protected:
  std::uint64_t rows_ = 0, dim_ = 0;
  DType dtype_ = DType::kFloat32;
  std::vector<Remark> remarks_;
};

// Opens an array, or the field named by the selector of a structured one: its first dimension is rows, all others together are
// columns (one for an array of one dimension). A single value is refused, and zero columns too (FormatError with the shape).
// Either byte order and Fortran order are read; bytes of a bool other than 0 are 1. Without a selector the only array is taken,
// or the only numeric one of two dimensions or more (HDF5: of two, else of more); several are InvalidArgument that lists them. A
// name that is not there is NotFound with what is; records without a field named are DTypeError with the fields. HDF5: filters
// that are missing are named before anything is read (LZF is read by us); rows never written are the fill value; soft links are
// followed, links into other files only as ReadOptions says. A dataset that declares more than 1 GiB and stores less than a byte
// for every 1100 of it is refused. At most 128 MiB of chunks are kept between reads, or one chunk if that is larger. A file open
// for writing elsewhere is LockedError. Of torch's files no pickle is executed (io/torch_pickle.hpp).
std::unique_ptr<RowReader> open_rows(const Location& location, const ReadOptions& options = {});

// open_rows() for rows that will become `to` (nothing: as they are). Where only a dtype makes sense of the bytes (V2, opaque) and
// `options` names none, a `to` of bfloat16 names it. A `to` names the dtype of raw files, and a `to` of float64 has numbers of
// text read as such, where `options` names none. Rows that bfloat16 does not explain either are the first DTypeError.
std::unique_ptr<RowReader> open_rows_as(const Location& location, std::optional<DType> to, const ReadOptions& options = {});

struct WriteOptions {
  bool overwrite = false;        // of the file; of one array where a selector names it in a file that exists (format_adds())
  int gzip = -1;                 // HDF5 (with shuffle), npz: level 0 - 9; -1 without compression
  std::uint64_t chunk_rows = 0;  // HDF5 with gzip: 0 chooses about a MiB; at most the rows there are and 4 GiB
  // Most rows are zeros that need no room on the disk (RowReader::sparse()): none is reserved, and blocks of zeros stay holes,
  // where the format has the rows as they are.
  bool sparse = false;
  // HDF5: attributes of the dataset, name and text; a text that is a whole number becomes an int64. Other formats have no place
  // for them, and pass them over.
  std::vector<std::pair<std::string, std::string>> attributes = {};
  unsigned threads = 0;  // that compress; 0: what the process may use, at most 16
  // Formats with words: where they come from, called by the thread that calls write(). They need it.
  WordSource words = {};
};

// Takes rows in order into a temporary file; finish() completes it under its name. Without finish() nothing is left behind. Not
// thread-safe. Throws IoError naming the file.
class RowWriter {
 public:
  virtual ~RowWriter() = default;
  virtual void write(std::uint64_t count, const std::byte* rows) = 0;
  virtual void finish() = 0;  // throws if fewer rows were written than promised
  // A writer may have a thread of its own write from then on, out of at most `memory` bytes; what it throws is thrown by the next
  // write() or by finish(). To be called before rows are written. Returns the bytes taken.
  virtual std::uint64_t write_behind(std::uint64_t memory) {
    (void)memory;
    return 0;
  }
  // As RowReader::how().
  virtual std::string how() const { return {}; }
  // Whether rows become the file's bytes as they are, one behind the other: their bytes may then come in pieces of any length by
  // write_bytes(), instead of by write(). write_bytes() does not keep the memory; see StreamWriter::write_view().
  virtual bool takes_bytes() const { return false; }
  virtual void write_bytes(std::span<const std::byte> bytes);  // throws InvalidArgument unless takes_bytes()
};

// Throws AlreadyExists, InvalidArgument (dim 0, sizes past 64 bits, a format that cannot be written, options of another format,
// no words for one that has them), DTypeError (rows that the format does not hold), IoError (a disk too small at once, where the
// file system can tell). HDF5, npz and safetensors with a selector, and a file that exists: the array is put into a copy of that
// file, which replaces it in finish(); everything else is kept, also what others put into the file meanwhile (several writers may
// add to one file at once, in any threads and processes). Without one, a new file: its array is "/data" in HDF5, "arr_0" in npz,
// "weight" in safetensors and torch. HDF5: groups on the way are made, and the space of a dataset that was replaced may stay
// unused; files are of HDF5's oldest format; bfloat16 is a float type of 2 bytes.
std::unique_ptr<RowWriter> create_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                       const WriteOptions& options = {});

// Takes the HDF5 library out of the process's exit, where it would close what could not be closed before (a file whose disk is
// full) and crash. For programs, to be called before anything here is: all handles of ours are closed long before exit. Other
// users of the same library in the process then have to close theirs too, as h5py does.
void leave_hdf5_at_exit() noexcept;

// What a narrowing conversion did to the values, to be reported.
struct ConversionReport {
  std::uint64_t became_infinite = 0;
  std::uint64_t became_zero = 0;
};

// in: `count` elements of `from`; out: as many of `to`; may not overlap. Floats round to nearest even; float to integer demands
// whole values in range, integer to narrower integer values in range, else DTypeError naming the first value and its index
// (nothing is wrapped).
void convert_elements(DType from, const std::byte* in, DType to, std::byte* out, std::uint64_t count, ConversionReport& report);

// Called with rows done so far and in all; may throw to stop.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// Copies all rows, converting to `to`, with buffers of at most `memory` bytes (BudgetError if a single row takes more). Where
// they hold two blocks of the reader's, a thread of this call's own reads (and converts) the next block while the caller's writes
// one: `reader` and `writer` then run at the same time, each on one thread, and must not share anything that is not safe for
// that. Where there is room for that as well, they read ahead and write behind (see there), out of the same memory; rows that are
// the same bytes in both files then go from the one to the other without a buffer in between. `progress` is called by the
// caller's thread. What any of them throws ends the copy when the block being read is read, and is rethrown; where
// both fail, the earlier rows' error. The caller finishes the writer. A value that does not fit is DTypeError with its row and
// column.
ConversionReport copy_rows(RowReader& reader, RowWriter& writer, DType to, std::uint64_t memory, const Progress& progress);

}  // namespace embermap
