// All of a table in one file: rows, every state of its optimizer, its vocabulary, and what it was made with. And a table's state
// as torch.optim keeps it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/rows.hpp"
#include "store/store.hpp"
#include "store/table.hpp"

namespace embermap {

struct ArchiveOptions {
  bool overwrite = false;
  int gzip = -1;                          // npz, HDF5
  bool check = false;                     // reads back what was written, and compares
  std::filesystem::path vocabulary = {};  // of the table's rows, goes along; empty: none
  std::uint64_t memory = 256ULL << 20;    // for buffers
  Progress progress = {};                 // rows
  std::function<void()> before_finish = {};
};

// A new file of format npz, hdf5, safetensors or torch, whose arrays are the table's fields under their names, "vocabulary" (its
// bytes, as uint8) where there is one, and "embermap": JSON, as uint8, that says rows, dtype, optimizer with its options, steps,
// seed, initial values and page size. Throws as create_arrays(), table_rows().
void export_table(const Table& table, const Location& destination, const ArchiveOptions& options);

// Whether a file has those arrays, by its list of arrays. Throws what listing throws.
bool is_table_archive(const Location& source);

// The table again, equal to the one exported, with its vocabulary in `vocabulary` (empty: it is left out). What the file says is
// not trusted. Throws FormatError naming what is missing or does not fit; as Store::import. On failure nothing is left.
Table import_table(Store& store, std::string_view name, const Location& source, const std::filesystem::path& vocabulary,
                   std::uint64_t memory, const Progress& progress);

// --- torch.optim ---

struct TorchStateReport {
  std::string parameter;            // "state.0"
  std::vector<std::string> fields;  // that were taken
  std::uint64_t step = 0;
};

// A file of torch.save(optimizer.state_dict()) with the table as its only parameter, number 0: state with torch's names and
// shapes, param_groups with torch's options. torch.load(weights_only=True) reads it, and an optimizer of the same kind takes it
// with load_state_dict(). Throws InvalidArgument where the table has no optimizer of torch's (none, rowwise_adagrad) or each row
// counts its own steps.
void export_torch_state(const Table& table, const Location& destination, const ArchiveOptions& options);

// The state of one parameter of such a file onto a table of an optimizer of the same kind: all state fields, the steps, and
// hyperparameters from the parameter's group. A selector names the dictionary in the file that is the state, as "optimizer" in a
// checkpoint of a model and its optimizer. `parameter` is its number in the file; nothing: the only one whose state fits.
// Everything is looked at before the first row is written; commits nothing. Throws NotFound, FormatError, InvalidArgument (state
// that the table has not or the file has not, shapes, options of another optimizer).
TorchStateReport import_torch_state(Table& table, const Location& source, std::optional<std::uint64_t> parameter,
                                    std::uint64_t memory, const Progress& progress);

}  // namespace embermap
