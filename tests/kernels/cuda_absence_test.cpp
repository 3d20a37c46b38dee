// What the CUDA side does on a machine that has no GPU (or in a build without CUDA). With a GPU these tests check the opposite.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "kernels/cuda.hpp"

namespace embermap {
namespace {

using testing::HasSubstr;

TEST(CudaAbsence, IsExplainedExactlyWhenThereIsNoDevice) {
  EXPECT_EQ(cuda_absence().empty(), cuda_devices() > 0) << cuda_absence();
}

TEST(CudaAbsence, AskingTwiceGivesTheSameAnswer) {
  const int devices = cuda_devices();
  const std::string absence = cuda_absence();
  EXPECT_EQ(cuda_devices(), devices);
  EXPECT_EQ(cuda_absence(), absence);
}

TEST(CudaAbsence, EngineNamesTheDeviceAndTheReason) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device";
  try {
    (void)CudaEngine::create(0);
    FAIL() << "an engine without a device";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), HasSubstr("CUDA device 0"));
    EXPECT_THAT(error.what(), HasSubstr(cuda_absence()));
  }
}

TEST(CudaAbsence, EngineOfADeviceThatDoesNotExistIsRefused) {
  EXPECT_THROW((void)CudaEngine::create(-1), CudaError);
  try {
    (void)CudaEngine::create(1000);
    FAIL() << "an engine of device 1000";
  } catch (const CudaError& error) {
    EXPECT_THAT(error.what(), HasSubstr("1000"));
  }
}

TEST(CudaAbsence, PinnedRangeSaysWhyItIsNotRegistered) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is a CUDA device";
  std::vector<std::byte> memory(1 << 20);
  PinnedRange range(memory.data(), memory.size());
  EXPECT_FALSE(range.registered());
  EXPECT_THAT(range.error(), HasSubstr("1.00 MiB of pinned host memory"));
  EXPECT_THAT(range.error(), HasSubstr(cuda_absence()));

  const PinnedRange reading = PinnedRange::read_only(memory.data(), memory.size(), 0);
  EXPECT_FALSE(reading.registered());
  EXPECT_EQ(reading.error(), range.error());

  PinnedRange moved(std::move(range));
  EXPECT_FALSE(moved.registered());
  EXPECT_THAT(moved.error(), HasSubstr("pinned host memory"));
  PinnedRange assigned;
  EXPECT_TRUE(assigned.error().empty());
  assigned = std::move(moved);
  EXPECT_THAT(assigned.error(), HasSubstr("pinned host memory"));
}

}  // namespace
}  // namespace embermap
