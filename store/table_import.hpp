// Rows of files into tables: a new one, or one that is there. What import is made of, in the shell and in Python.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/copy_file.hpp"
#include "io/row_order.hpp"
#include "io/rows.hpp"
#include "io/vocabulary.hpp"
#include "store/store.hpp"
#include "store/table.hpp"

namespace embermap {

class PartialRows;

// A field of a table, and the array of a file that it comes from.
struct FieldSource {
  std::string field, array;
};

struct ImportOptions {
  ReadOptions reading = {};              // of every array
  std::vector<FieldSource> fields = {};  // several arrays of the file; empty: the one that the location names
  std::optional<DType> dtype = {};       // that rows are converted to
  RowSelection rows = {};                // which of the file's rows
  std::string vocabulary = {};           // as WordTransfer::Options has it
  bool check = false;                    // reads every field back, and compares; `progress` is called once more for it
  std::uint64_t memory = 64ULL << 20;    // for buffers
  Progress progress = {};                // rows
};

// A table that is made of rows of a file. First everything is opened and looked at, then the table is made; its vocabulary and
// the way back of an order come with finish(). Not thread-safe.
class TableImport {
 public:
  // `table`: STORE/TABLE, beside which words and the way back go. Of `into`, optimizer, page_bytes and memory are looked at.
  // Makes nothing. Throws what reading throws; InvalidArgument (fields without the weight, a vocabulary in the own directory of a
  // store that is not the table's, files that are each other), NotFound (a field that the table would not have).
  TableImport(const Location& source, const std::filesystem::path& table, const ImportOptions& options, const TableOptions& into);
  ~TableImport();

  const TableOptions& table() const noexcept { return into_; }  // with rows, dim and dtype
  // Goes on with rows that an interrupted import has left in .STORE.TABLE.resume beside the store, and keeps them there until
  // finish(). Throws InvalidArgument for words or several fields, which are not kept.
  void read_resumably(const Progress& progress);
  // Makes the table, and checks it. On failure nothing is left of it.
  Table run(Store& store, const std::string& name);
  // Words and the way back under their names. withdraw() takes them away again, where what comes after it fails.
  void finish();
  void withdraw() noexcept;
  // Of each field, in the order of ImportOptions::fields, or of the weight.
  const std::vector<CopyResult>& results() const noexcept { return results_; }

 private:
  struct Part;  // a field and its rows
  void check(Table& table);

  Location source_;
  std::filesystem::path path_;
  ImportOptions options_;
  TableOptions into_;
  std::unique_ptr<WordTransfer> words_;
  std::vector<Part> parts_;
  Part* weight_ = nullptr;
  std::unique_ptr<PartialRows> partial_;
  std::unique_ptr<RowReader> staged_;
  std::unique_ptr<InverseOrder> inverse_;
  std::vector<CopyResult> results_;
};

struct IntoOptions : ImportOptions {
  std::string field = "weight";          // that rows go to, where `fields` names none
  std::optional<std::uint64_t> at = {};  // the first row that is replaced; nothing: all are, and there are as many
  bool append = false;                   // the rows become new ones at the table's end
  // All rows are read, converted and compared with the vocabulary before the first one changes the table: for a caller that
  // cannot give up what was written. Those that fit half of the memory are read once, others twice.
  bool look_first = true;
};

// Rows of a file instead of rows of a table that is there; other fields stay as they are. Columns have to be as many. Rows of
// another dtype are converted where the table's holds all of their values, others only if `dtype` is the table's (DTypeError).
// Words of the rows have to be those that the table's vocabulary has (`vocabulary`, or STORE/TABLE.vocab.txt; "none": are not
// looked at). With `append` words are added to that vocabulary; a table that has one needs them, from the file or a `vocabulary`
// of the new rows, or "none". An order may name any rows, and no way back is kept.
// Commits nothing, but that `append` commits, as Table::append does, and leaves the table as it was when it fails (unless another
// thread has added rows behind them meanwhile).
std::vector<CopyResult> import_into(const Store& store, Table& table, const Location& source, const IntoOptions& options);

// A field of a table, STORE/TABLE, as an origin of rows; the same as long as its store is at this commit, for a copy that may be
// gone on with. Of a writer, whose rows change without a commit, no such copy can be.
RowOrigin table_origin(const std::filesystem::path& path, std::uint64_t commit, const Table& table, const std::string& field);

// Words may lie in a store's own directory in one place only, beside `table`, STORE/TABLE, with which they go: throws
// InvalidArgument for a vocabulary in another.
void check_vocabulary_place(const std::filesystem::path& vocabulary, const std::filesystem::path& table);

// Whether every value of `from` is one of `to`.
bool dtype_holds(DType to, DType from) noexcept;

// The same options with a redo log that holds `pages` pages of a table, each changed `times` times, in one commit, so that a
// writer without autocommit can give up all of it. An own limit is kept. `memory`: what may be taken for the log's index. Throws
// BudgetError naming what would do.
StoreOptions one_commit_options(StoreOptions options, const Geometry& geometry, std::uint64_t pages, std::uint64_t times,
                                std::uint64_t memory);

}  // namespace embermap
