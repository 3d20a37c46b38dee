// The formats behind open_rows(), create_rows() and list_entries(). A format is a file pair with its readers and writers, which
// declares its functions here, and a line of the registry in formats.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "io/npy.hpp"
#include "io/rows.hpp"
#include "io/streams.hpp"

namespace embermap {

// What the content of a file says about its format.
enum class Fit {
  kNo,
  kPossible,  // text, or numbers without a mark: its name decides, and this only between formats of the same extension
  kCertain    // a mark that files of other formats do not have
};

struct FormatInfo {
  // The first bytes of a file that `fit` is given, or all of it.
  static constexpr std::size_t kHeadBytes = 4096;

  Location::Format format;
  std::string_view name;                                          // of --from and --to
  std::array<std::string_view, 6> extensions;                     // lower case, with the dot; the first names it in messages
  bool members;                                                   // a selector names one of several things in a file
  bool compresses;                                                // WriteOptions::gzip means something
  Fit (*fit)(const File& file, std::span<const std::byte> head);  // nullptr: kPossible. May read more of the file; may throw
  std::unique_ptr<RowReader> (*open)(const Location& location, const ReadOptions& options);
  // nullptr: cannot be written. Sizes and dim are checked before (see create_rows).
  std::unique_ptr<RowWriter> (*create)(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                       const WriteOptions& options);
  std::vector<Entry> (*list)(const std::filesystem::path& file);  // nullptr: one array, described by what `open` finds
  bool adds = false;                                              // see format_adds()
  bool words = false;                                             // every row has one: see format_has_words()
};

// All formats, those whose names are tried first first.
std::span<const FormatInfo> formats();
// Throws InvalidArgument for one that this build cannot read.
const FormatInfo& format_info(Location::Format format);
// The longest of its extensions that `path` ends with, in any case; empty if there is none.
std::string_view extension_of(const FormatInfo& info, std::string_view path);
// The first format with the longest extension that `path` ends with; nullptr if there is none.
const FormatInfo* format_by_name(std::string_view path);
// The format of a file that is there, see parse_location(); nullptr: neither content nor name tell, or it cannot be opened.
const FormatInfo* format_by_content(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_npy_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_npy_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options);
Fit fit_npy(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_npy(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_hdf5_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_hdf5_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                            const WriteOptions& options);
Fit fit_hdf5(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_hdf5(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_npz_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_npz_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options);
Fit fit_npz(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_npz(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_safetensors_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_safetensors_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                                   const WriteOptions& options);
Fit fit_safetensors(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_safetensors(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_torch_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_torch_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                             const WriteOptions& options);
Fit fit_torch(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_torch(const std::filesystem::path& file);

// An array in NumPy's format of `size` bytes that `read` gives (and keeps alive); `name` names them in errors.
std::unique_ptr<RowReader> open_npy_array(const std::filesystem::path& name, const std::string& field, std::uint64_t size,
                                          std::shared_ptr<ByteSource> source, const ReadOptions& options);
// It as entries: `prefix`, or one "prefix:field" for each field.
std::vector<Entry> npy_entries(const NpyHeader& header, const std::string& prefix, std::string_view layout);

std::unique_ptr<RowReader> open_word2vec_text_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_word2vec_text_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                                     const WriteOptions& options);
Fit fit_word2vec_text(const File& file, std::span<const std::byte> head);

std::unique_ptr<RowReader> open_glove_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_glove_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                             const WriteOptions& options);
Fit fit_glove(const File& file, std::span<const std::byte> head);

std::unique_ptr<RowReader> open_word2vec_binary_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_word2vec_binary_rows(const Location& location, std::uint64_t rows, std::uint64_t dim,
                                                       DType dtype, const WriteOptions& options);
Fit fit_word2vec_binary(const File& file, std::span<const std::byte> head);

std::unique_ptr<RowReader> open_fasttext_rows(const Location& location, const ReadOptions& options);
Fit fit_fasttext(const File& file, std::span<const std::byte> head);
std::vector<Entry> list_fasttext(const std::filesystem::path& file);

std::unique_ptr<RowReader> open_vecs_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_vecs_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                            const WriteOptions& options);

std::unique_ptr<RowReader> open_bin_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_bin_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options);

std::unique_ptr<RowReader> open_raw_rows(const Location& location, const ReadOptions& options);
std::unique_ptr<RowWriter> create_raw_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options);

// One of the arrays that a selector may mean.
struct Candidate {
  std::string name;
  std::string text;     // "float32 (3, 4)", for messages
  bool usable = false;  // its elements are ones that a table can hold
  std::size_t dimensions = 0;
};

// Which of them `selector` names; the only one, or the only usable one with two dimensions or more (else with one) if it is
// empty. Throws NotFound (with those whose names are most like it first) and InvalidArgument (several could be meant). `what`
// they are: "tensor".
std::size_t choose_array(const Location& location, std::string_view what, std::span<const Candidate> all);

// Throws InvalidArgument unless a name that a writer is to give is UTF-8, which readers of such files take it for.
void check_name(const Location& location);

// Counts rows for a writer: throws InvalidArgument for more than promised, or at the end for fewer.
class RowCount {
 public:
  RowCount(std::string where, std::uint64_t rows) : where_{std::move(where)}, rows_{rows} {}
  std::uint64_t done() const noexcept { return done_; }
  void add(std::uint64_t count);
  void add_bytes(std::uint64_t bytes, std::uint64_t row_bytes);  // of rows, in pieces of any length
  void finish();

 private:
  std::string where_;
  std::uint64_t rows_;
  std::uint64_t done_ = 0;
  std::uint64_t part_ = 0;  // bytes of a row that is not whole yet
  bool finished_ = false;
};

}  // namespace embermap
