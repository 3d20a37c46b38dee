#include "store/hot_pages.hpp"

#include "base/checked.hpp"
#include "store/evicting_pages.hpp"
#include "store/whole_pages.hpp"

namespace embermap {

HotPages::HotPages(PageFile& file, std::uint64_t frames, ThreadPool& compute, bool whole)
    : file_{file},
      compute_{compute},
      page_bytes_{file.geometry().page_bytes()},
      frame_count_{frames},
      whole_{whole},
      slab_{checked_mul(frames, file.geometry().page_bytes(), "bytes of the slab"), compute} {}

std::unique_ptr<HotPages> make_hot_pages(PageFile& file, std::uint64_t frames, ThreadPool& compute, Worker* cleaner,
                                         Replacement replacement) {
  if (frames >= file.geometry().pages()) return std::make_unique<WholePages>(file, compute);
  return std::make_unique<EvictingPages>(file, frames, compute, cleaner, replacement);
}

std::uint64_t frame_overhead(Replacement replacement) noexcept {
  return EvictingPages::kFrameOverhead + ReplacementPolicy::bytes_per_frame(replacement);
}

std::uint64_t frames_overhead(std::uint64_t frames, std::uint64_t pages, Replacement replacement) noexcept {
  return frames * (frames >= pages ? WholePages::kFrameOverhead : frame_overhead(replacement));
}

}  // namespace embermap
