// Names for what happens when, for profilers (NVTX: Nsight Systems, torch.profiler with emit_nvtx).
#pragma once

namespace embermap {

// A range on the calling thread, which has to end it as well, as long as this lives, under a name such as "embermap: fetch".
// Ranges nest. Costs some nanoseconds where no profiler is attached, and nothing in a build without CUDA. `name` must be a string
// literal.
class ProfileRange {
 public:
  explicit ProfileRange(const char* name) noexcept;
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace embermap
