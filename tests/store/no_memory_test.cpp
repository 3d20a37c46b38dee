// Memory runs out at every place of a call where it can: the call fails, and all that come after it work.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <vector>

#include "store/evicting_pages.hpp"
#include "store/whole_pages.hpp"
#include "store/worker.hpp"
#include "tests/store/store_fixture.hpp"

namespace {
thread_local long allocations_left = -1;  // of this thread; negative: no end to them

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, 16); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return allocate(bytes, static_cast<std::size_t>(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace embermap {
namespace {

class NoMemory : public testing::TestWithParam<std::uint64_t> {};

TEST_P(NoMemory, LeavesNoPageThatOthersWaitFor) {
  const std::uint64_t frames = GetParam();
  const test::TemporaryDirectory directory;
  ThreadPool pool(1), io(1);
  const Schema schema(1024, DType::kFloat32, {});
  const Geometry geometry = make_geometry(64, 4096, 4, false, 4096);
  File data = File::open(directory / "t.npy", File::Mode::kCreateNew);
  data.resize(geometry.file_bytes());
  PageFile file("t", std::move(data), PageLedger::create(File::open(directory / "t.pages", File::Mode::kCreateNew), 64, false),
                schema, geometry, Constant{3}, 0, pool, io, [] {}, {.io = {.engine = IoEngine::kThreads, .direct = false}});
  Worker cleaner;
  int failures = 0;
  for (const bool replaced : {false, true}) {
    bool succeeded = false;
    for (long left = 0; !succeeded; ++left) {
      ASSERT_LT(left, 1000);
      const auto hot = make_hot_pages(file, frames, pool, &cleaner, Replacement::kLru);
      std::vector<std::uint64_t> first{0, 1, 2, 3}, second{2, 3, 4, 5, 6};
      std::vector<std::uint32_t> places(first.size()), more(second.size());
      const std::vector<std::uint8_t> flags(second.size(), replaced ? 1 : 0);
      (void)hot->hold(first, places, Access::kWrite);
      try {
        allocations_left = left;
        auto hold = hot->hold(second, more, Access::kWrite, flags);
        allocations_left = -1;
        ASSERT_TRUE(hold.has_value());
        hold->replaced();
        succeeded = true;
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
        ++failures;
      }
      // None is left as being read by somebody.
      const auto hold = hot->hold(second, more, Access::kWrite);
      ASSERT_TRUE(hold.has_value());
      EXPECT_LE(hot->counts().resident, std::min<std::uint64_t>(frames, 7));
      EXPECT_LE(hot->counts().dirty, hot->counts().resident);
    }
  }
  EXPECT_GT(failures, 10);
}

INSTANTIATE_TEST_SUITE_P(Frames, NoMemory, testing::Values(5, 16, 64));  // evicting, with room, a frame for every page

}  // namespace
}  // namespace embermap
