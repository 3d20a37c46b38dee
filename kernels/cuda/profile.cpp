#include "kernels/profile.hpp"

#include <nvtx3/nvToolsExt.h>

namespace embermap {

ProfileRange::ProfileRange(const char* name) noexcept { (void)nvtxRangePushA(name); }

ProfileRange::~ProfileRange() { (void)nvtxRangePop(); }

}  // namespace embermap
