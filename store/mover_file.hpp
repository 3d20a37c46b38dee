// cuda.json in a store's directory: how fast rows crossed the link there, so that it need not be measured again. A cache: whoever
// deletes it loses a second. Private to store/.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.hpp"
#include "kernels/mover_model.hpp"

namespace embermap {

inline constexpr std::string_view kMoverFile = "cuda.json";

// What the file says of a device; nothing where there is no file, or one that is not of this form: it is measured anew then.
std::vector<MoverMeasurement> read_movers(const std::filesystem::path& store, const std::string& device, FileOps& ops);
// Replaces what it says of the device. Throws IoError.
void write_movers(const std::filesystem::path& store, const std::string& device, const std::vector<MoverMeasurement>& measured,
                  FileOps& ops);

}  // namespace embermap
