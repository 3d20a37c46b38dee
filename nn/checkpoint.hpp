// A model without its rows in a file, together with the commits of its tables that it belongs to.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "store/store.hpp"

namespace embermap::nn {

// What save() wrote, or load() found.
struct Checkpoint {
  std::vector<std::uint64_t> commits;  // of the stores, in the order they were given
  std::string note;                    // JSON of the object that save() was given; empty: none
};

struct SaveOptions {
  // Of torch or of tables; their archives go to the file, in this order.
  std::vector<const torch::optim::Optimizer*> optimizers = {};
  std::string note = {};  // JSON text of an object, part of the commits and of the file, as for Store::commit()
};

struct LoadOptions {
  std::vector<torch::optim::Optimizer*> optimizers = {};  // as for save(); empty leaves what the file has of them
  bool strict = true;                                     // false: parameters that only one side has are left alone
  bool rng = false;                                       // sets torch's random numbers to what they were
};

//   embermap::nn::save(*model, "model.pt", {store}, {.optimizers = {&rows, &dense}, .note = R"({"step": 100})"});
// Commits `stores`, in which all tables of the model must be, and writes the rest of the model to a file: they belong together.
// Whatever happens meanwhile, load() finds the last commit and the file of that commit: the file is complete, under another name
// ("FILE.next"), before the commit, and gets its own after it. So a run that is killed goes on from the last save(), if nothing
// has committed since: the store does by itself where its redo log is full, unless it was opened with autocommit = false or a
// larger log_limit. That is for one store; a crash between the commits of several leaves them at different moments, which load()
// says.
//
// The file holds parameters and buffers by name, on the host. It is that of Python's embermap.torch.save:
// torch.load(path, weights_only=True) and embermap.torch.load read it, and load() here reads theirs, but for the states of
// torch's optimizers, which C++ and Python keep in different ways: asking for the other's is an error.
//
// Throws c10::ValueError (no store, a table of the model in none of them, a note that is none), ReadOnlyError (a store open
// read-only), c10::NotImplementedError (a parameter that is not dense), IoError. The last commit and its file are then still
// together. Not for several threads with the same model or file.
Checkpoint save(const torch::nn::Module& model, const std::filesystem::path& file, std::vector<Store> stores,
                const SaveOptions& options = {});

// Brings a model, and what save() was given with it, to what the file has. The stores, in the order of save(), must be open at
// the commit of the file, for writing or read-only. A store that has gone on cannot go back: a snapshot (Store::snapshot) keeps
// what may be wanted again.
//
// Throws NotFound (no file), c10::ValueError (a store at another commit, changes since it, another model or other optimizers;
// nothing has been changed then), FormatError (no such file), IoError. Of a file that is not trusted nothing is executed.
Checkpoint load(torch::nn::Module& model, const std::filesystem::path& file, std::vector<Store> stores,
                const LoadOptions& options = {});

}  // namespace embermap::nn
