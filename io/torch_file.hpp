// What a torch.save() file holds beside the rows of its tensors.
#pragma once

#include <filesystem>

#include "io/torch_pickle.hpp"

namespace embermap {

// Tensors, and as scalars also what tensors of no dimension hold (a step). Nothing is executed. Throws as open_rows() does for
// such a file.
TorchContents read_torch_file(const std::filesystem::path& file);

}  // namespace embermap
