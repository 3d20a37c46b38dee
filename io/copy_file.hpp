// A copy of rows into a file with all that may be wanted of it: some rows, another order, another dtype, several threads, going
// on after an interruption, a look back. What convert and export are made of, in the shell and in Python.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/row_order.hpp"
#include "io/rows.hpp"
#include "io/vocabulary.hpp"

namespace embermap {

// Rows and where they come from.
struct RowOrigin {
  // Opens them; words go to `words`. Called once for each thread that reads, and once more to look back.
  std::function<std::unique_ptr<RowReader>(const WordSink& words)> open;
  bool has_words = false;
  bool in_turn = false;                              // cheap in ascending order from the start alone: one thread reads
  bool several_files = false;                        // that `identity` does not tell of: no copy of them is gone on with
  std::filesystem::path file;                        // beside which their vocabulary lies
  std::map<std::string, std::string> identity = {};  // of the rows: another one when they may have changed
};

// The rows of a file as they will become `to`; see open_rows_as().
RowOrigin file_origin(const Location& source, std::optional<DType> to, const ReadOptions& options);

// Which rows, and how they are read.
struct RowSelection {
  std::uint64_t first = 0;
  std::optional<std::uint64_t> end = {};  // not among them; nothing: all
  bool clamp = false;                     // rows that are not there are left out, as slices of Python do; else InvalidArgument
  std::filesystem::path order = {};       // a file of row numbers (io/row_order.hpp); empty: as they are. Not with first and end
  bool permutation = true;                // the order has to be one
  unsigned jobs = 1;                      // threads that read and convert
};

struct CopyOptions {
  std::optional<DType> dtype = {};  // nothing: as they are
  RowSelection rows = {};
  bool overwrite = false;
  int gzip = -1;
  std::string vocabulary = {};  // as WordTransfer::Options has it
  // Reads back what was written, and compares; `progress` is called once more for that, and what it throws leaves the new file.
  bool check = false;
  std::vector<std::pair<std::string, std::string>> attributes = {};  // see WriteOptions
  bool resume = false;  // goes on with a copy that was interrupted, and lets this one be gone on with
  std::uint64_t memory = 256ULL << 20;
  Progress progress = {};
  std::function<void(std::uint64_t row_bytes)> began = {};  // the rows are open, nothing is copied yet
  std::function<void()> before_finish = {};  // may throw to stop, when all rows are there and nothing has its name yet
};

struct CopyResult {
  std::uint64_t rows = 0, dim = 0;
  DType from = DType::kFloat32, to = DType::kFloat32;
  ConversionReport report;
  std::filesystem::path vocabulary = {}, order = {};  // what was written beside the rows; empty: nothing
  std::uint64_t resumed = 0;                          // rows that were there from before
  std::vector<Remark> remarks = {};                   // of the source
  std::string reading = {}, writing = {};             // how bytes came and went: RowReader::how(), RowWriter::how()
};

// Throws what reading, converting and writing throw; InvalidArgument (rows that are not there, options that contradict each
// other), CorruptError (check). On failure nothing is left, but with `resume` the rows so far (io/partial_rows.hpp). With an
// order the way back is kept in order_beside(destination.file).
CopyResult copy_file(const RowOrigin& origin, const Location& destination, const CopyOptions& options);

// The rows of an origin as they were selected, of one dtype, for whoever takes a reader.
class SelectedRows {
 public:
  // `words`: for those of the selected rows, in turn. `memory`: for buffers of its own.
  SelectedRows(const RowOrigin& origin, const RowSelection& selection, std::optional<DType> to, const WordSink& words,
               std::uint64_t memory);
  RowReader& reader() noexcept { return *reader_; }
  DType from() const noexcept { return from_; }                  // before the conversion
  std::uint64_t all_rows() const noexcept { return all_rows_; }  // of the origin
  ConversionReport report() const;

 private:
  std::unique_ptr<RowReader> reader_;
  std::vector<std::shared_ptr<ConversionReport>> reports_;
  DType from_ = DType::kFloat32;
  std::uint64_t all_rows_ = 0;
};

// Throws InvalidArgument where rows cannot be selected so from so many.
void check_selection(const RowSelection& selection, std::uint64_t rows);

// How a file that create_rows() wrote is opened to be compared: its array under the name that it got, with what it cannot tell.
std::unique_ptr<RowReader> open_written(const Location& destination, DType written, std::uint64_t dim);

// Throws CorruptError naming the first element that differs. `bits`: of text, values alone are compared.
// `progress` may throw to stop.
void check_written(RowReader& source, RowReader& written, bool bits, const std::string& destination, std::uint64_t memory,
                   const Progress& progress);

// What a copy reads must not be what it writes, and what it writes beside its rows needs files of its own: throws InvalidArgument
// naming the file, whatever names it has. `order` and `vocabulary` as RowSelection and CopyOptions have them; `destination`: the
// file of the rows, or STORE/TABLE. (Words alone are looked at by WordTransfer.)
void check_companions(const std::filesystem::path& source, const std::filesystem::path& destination,
                      const std::filesystem::path& order, const std::string& vocabulary);

// Throws InvalidArgument where `destination` is `source` itself, by whatever name, and would be read while it is made.
void check_not_source(const std::filesystem::path& source, const Location& destination);

}  // namespace embermap
