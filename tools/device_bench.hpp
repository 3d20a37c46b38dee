// embermap bench --device: how rows cross the link between host and device.
#pragma once

#include <cstdint>
#include <string>

#include "tools/command.hpp"

namespace embermap::tools {

struct DeviceBenchArguments {
  int device = 0;
  std::uint64_t pool_bytes = 0;  // of registered memory that the rows lie in
  std::uint64_t row_bytes = 0;
  std::uint64_t batch = 0;  // rows; the choice is shown for batches of this size
  unsigned threads = 0;     // 0: what the process may use, at most 16
};

// "cuda" is 0, "cuda:1" and "1" are 1. Throws UsageError for any other text.
int parse_device_option(const std::string& text);

// Prints what a plain copy of pinned memory reaches, what each way of moving rows does in batches of several sizes, and which
// a store would choose. Needs pool_bytes of memory, and up to 3 GiB of the device's. Returns the exit status. Throws UsageError
// (rows of no bytes, a pool that holds none), CudaError where there is no device.
int bench_device(const DeviceBenchArguments& arguments, const Common& common);

}  // namespace embermap::tools
