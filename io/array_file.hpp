// A new file of several arrays, made as one: all of them appear under its name, or none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/copy_file.hpp"
#include "io/rows.hpp"
#include "io/torch_pickle.hpp"

namespace embermap {

struct ArrayShape {
  std::string name;
  std::uint64_t rows = 0, dim = 0;
  DType dtype = DType::kFloat32;
  std::vector<std::pair<std::string, std::string>> attributes = {};  // as WriteOptions has them
};

// Not thread-safe. Without finish() nothing is left behind.
class ArrayFileWriter {
 public:
  virtual ~ArrayFileWriter() = default;
  // In which arrays have to be written, by their places in what create_arrays() was given.
  const std::vector<std::size_t>& order() const noexcept { return order_; }
  // The next of them: takes its rows, and then finish() of its own. Valid until the next call.
  virtual RowWriter& next() = 0;
  // Under its name. Throws InvalidArgument unless all arrays are complete.
  virtual void finish() = 0;

 protected:
  std::vector<std::size_t> order_;
};

// `location` has no selector, its format is npz, hdf5, safetensors or torch. Throws as create_rows(); InvalidArgument for another
// format, a selector, no array, or a name that is there twice. The file replaces another one as a whole, with `overwrite`.
std::unique_ptr<ArrayFileWriter> create_arrays(const Location& location, const std::vector<ArrayShape>& arrays,
                                               const WriteOptions& options);

// The same for torch with what stands around the tensors: a TorchTree::Tensor of `tree` names an array by its place.
std::unique_ptr<ArrayFileWriter> create_torch_arrays(const Location& location, const std::vector<ArrayShape>& arrays,
                                                     const TorchTree& tree, const WriteOptions& options);

// Copies the selected rows of each origin into an array of its own of a new file. `names` are theirs. Of the options,
// `vocabulary` and `resume` are not for several (InvalidArgument). Results are in the order of the origins.
std::vector<CopyResult> copy_arrays(const std::vector<RowOrigin>& origins, const std::vector<std::string>& names,
                                    const Location& destination, const CopyOptions& options);

}  // namespace embermap
