#include "kernels/cuda/group_ids.hpp"

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <string>

#include "kernels/cuda/runtime.hpp"
#include "kernels/device/group_ids.cuh"
#include "kernels/device/launch.cuh"

namespace embermap::gpu {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocksPerMultiprocessor = 8;
constexpr int kFewThreads = 256;  // of the block that groups few ids, each with as many as this or
constexpr int kFewItems = 8;
constexpr int kFewestItems = 1;

template <class Key>
cudaLaunchConfig_t cluster_config(unsigned blocks, std::uint32_t tile, cudaLaunchAttribute& attribute, cudaStream_t stream) {
  attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(device::kClusterThreads);
  config.dynamicSmemBytes = device::ClusterMemory<Key>::bytes(tile);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

// Of the current device, which gets ready for clusters of as many.
template <class Key>
unsigned most_cluster_blocks(int device) {
  int major = 0;
  int shared = 0;
  EMBERMAP_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  EMBERMAP_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  cudaFuncAttributes attributes{};
  EMBERMAP_CUDA(cudaFuncGetAttributes(&attributes, device::group_by_cluster<Key>));
  constexpr std::uint32_t kTile = device::kClusterThreads * device::kClusterItems;
  const std::uint64_t bytes = device::ClusterMemory<Key>::bytes(kTile);
  // Code for older devices runs on newer ones, without clusters.
  if (major < 9 || attributes.ptxVersion < 90 || bytes + attributes.sharedSizeBytes > static_cast<std::uint64_t>(shared))
    return 0;
  EMBERMAP_CUDA(
      cudaFuncSetAttribute(device::group_by_cluster<Key>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  EMBERMAP_CUDA(cudaFuncSetAttribute(device::group_by_cluster<Key>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (const unsigned blocks : {16U, 8U}) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = cluster_config<Key>(blocks, kTile, attribute, nullptr);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, device::group_by_cluster<Key>, &config) != cudaSuccess)
      (void)cudaGetLastError();
    else if (clusters > 0)
      return blocks;
  }
  return 0;
}

// Blocks of the cluster for `count` ids, and how many each thread has: few blocks have to wait for each other less.
struct ClusterShape {
  unsigned blocks = 0;  // 0: too many ids
  std::uint32_t items_log2 = 0;
};
ClusterShape cluster_shape(std::uint32_t count, unsigned most) {
  for (const unsigned blocks : {4U, 8U, 16U})
    for (std::uint32_t log2 = 0; blocks <= most && (device::kClusterItems >> log2) != 0; ++log2)
      if (count <= blocks * (device::kClusterThreads << log2) && (log2 <= 1 || blocks == most)) return {blocks, log2};
  return {};
}

template <class Key>
void group_keys(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, std::uint64_t rows_per_page,
                const IdGroups& groups, GroupHeader* header, PageEntry* entries, GroupReport* report, bool shows_keys,
                unsigned most_blocks, const MemoryPool& pool, cudaStream_t stream, const std::function<void()>& looked) {
  const device::PageOf page_of{rows_per_page, std::has_single_bit(rows_per_page) ? std::countr_zero(rows_per_page) : -1};
  const int key_bits = std::clamp(static_cast<int>(std::bit_width(rows - (rows != 0))), 1, static_cast<int>(sizeof(Key) * 8));

  const auto few = [&](auto* kernel, const char* name) {
    launch(name, kernel, 1, kFewThreads, stream, ids, count, rows, key_bits, page_of, groups, header, entries, report,
           shows_keys);
  };
  static_assert(kOneBlock == kFewThreads * kFewItems);
  if (count <= kFewThreads * kFewestItems) return few(device::group_few<Key, kFewThreads, kFewestItems>, "group_few");
  if (count <= kOneBlock) return few(device::group_few<Key, kFewThreads, kFewItems>, "group_few");
  if (const ClusterShape shape = cluster_shape(count, most_blocks); shape.blocks != 0) {
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config =
        cluster_config<Key>(shape.blocks, device::kClusterThreads << shape.items_log2, attribute, stream);
    check(cudaLaunchKernelEx(&config, device::group_by_cluster<Key>, ids, count, rows, key_bits, shape.items_log2, page_of,
                             groups, header, entries, report, shows_keys),
          "group_by_cluster");
    return;
  }

  Layout layout;
  const std::uint64_t keys_at[2] = {layout.add(count, sizeof(Key)), layout.add(count, sizeof(Key))};
  const std::uint64_t positions_at[2] = {layout.add(count, sizeof(std::uint32_t)), layout.add(count, sizeof(std::uint32_t))};
  const std::uint64_t counts_at = layout.add(count, sizeof(std::uint64_t));
  std::size_t sort_bytes = 0;
  {
    cub::DoubleBuffer<Key> keys(nullptr, nullptr);
    cub::DoubleBuffer<std::uint32_t> positions(nullptr, nullptr);
    EMBERMAP_CUDA(cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, keys, positions, count, 0, key_bits, stream));
  }
  const auto flags = [&](const Key* keys) {
    return thrust::make_transform_iterator(thrust::make_counting_iterator(std::uint32_t{0}),
                                           device::HeadFlags<Key>{keys, page_of});
  };
  std::size_t scan_bytes = 0;
  EMBERMAP_CUDA(
      cub::DeviceScan::InclusiveSum(nullptr, scan_bytes, flags(nullptr), static_cast<std::uint64_t*>(nullptr), count, stream));
  const std::uint64_t temporary_at = layout.add(std::max(sort_bytes, scan_bytes), 1);
  const DeviceBuffer scratch(pool, layout.bytes(), stream);

  cub::DoubleBuffer<Key> keys(scratch.at<Key>(keys_at[0]), scratch.at<Key>(keys_at[1]));
  cub::DoubleBuffer<std::uint32_t> positions(scratch.at<std::uint32_t>(positions_at[0]),
                                             scratch.at<std::uint32_t>(positions_at[1]));
  auto* const counts = scratch.at<std::uint64_t>(counts_at);
  void* const temporary = scratch.at<std::byte>(temporary_at);

  static_assert(sizeof(unsigned long long) == sizeof header->bad_position);
  EMBERMAP_CUDA(cudaMemsetAsync(&header->bad_position, 0xFF, sizeof header->bad_position, stream));
  const std::uint64_t blocks = grid(count, kThreads, kBlocksPerMultiprocessor);
  launch("load_ids", device::load_ids<Key>, blocks, kThreads, stream, ids, count, rows, keys.Current(), positions.Current(),
         reinterpret_cast<unsigned long long*>(&header->bad_position), groups.claims);
  if (looked) looked();
  // The sort is stable: positions ascend within a group.
  EMBERMAP_CUDA(cub::DeviceRadixSort::SortPairs(temporary, sort_bytes, keys, positions, count, 0, key_bits, stream));
  EMBERMAP_CUDA(cub::DeviceScan::InclusiveSum(temporary, scan_bytes, flags(keys.Current()), counts, count, stream));
  launch("write_groups", device::write_groups<Key>, blocks, kThreads, stream, keys.Current(), positions.Current(), counts, count,
         page_of, groups, header, entries);
}

}  // namespace

void group_ids(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, std::uint64_t rows_per_page,
               const IdGroups& groups, GroupHeader* header, PageEntry* entries, GroupReport* report, bool shows_keys,
               const GroupLimits& limits, const MemoryPool& pool, cudaStream_t stream, const std::function<void()>& looked) {
  if (!wide_keys(rows))
    group_keys<std::uint32_t>(ids, count, rows, rows_per_page, groups, header, entries, report, shows_keys, limits.narrow_blocks,
                              pool, stream, looked);
  else
    group_keys<std::uint64_t>(ids, count, rows, rows_per_page, groups, header, entries, report, shows_keys, limits.wide_blocks,
                              pool, stream, looked);
}

GroupLimits group_limits(int device) {
  return {most_cluster_blocks<std::uint32_t>(device), most_cluster_blocks<std::uint64_t>(device)};
}

bool reports(std::uint32_t count, std::uint64_t rows, const GroupLimits& limits) {
  return count <= kOneBlock || cluster_shape(count, wide_keys(rows) ? limits.wide_blocks : limits.narrow_blocks).blocks != 0;
}

void count_pages(const std::int64_t* ids, std::uint64_t count, std::uint64_t rows, std::uint64_t rows_per_page,
                 std::uint32_t* bits, unsigned long long* pages, cudaStream_t stream) {
  if (count == 0) return;
  const device::PageOf page_of{rows_per_page, std::has_single_bit(rows_per_page) ? std::countr_zero(rows_per_page) : -1};
  launch("count_pages", device::count_pages, grid(count, kThreads, kBlocksPerMultiprocessor), kThreads, stream, ids, count, rows,
         page_of, bits, pages);
}

void check_kernels_run(int device) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, device::load_ids<std::uint32_t>);
  if (error == cudaSuccess) return;
  cudaDeviceProp properties{};
  EMBERMAP_CUDA(cudaGetDeviceProperties(&properties, device));
  check(error, "this build has no kernels for CUDA device " + std::to_string(device) + " (" + properties.name +
                   ", compute capability " + std::to_string(properties.major) + "." + std::to_string(properties.minor) + ")");
}

}  // namespace embermap::gpu
