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
void group_keys(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, std::uint64_t rows_per_page,
                const IdGroups& groups, GroupHeader* header, PageEntry* entries, const MemoryPool& pool, cudaStream_t stream,
                const std::function<void()>& looked) {
  const device::PageOf page_of{rows_per_page, std::has_single_bit(rows_per_page) ? std::countr_zero(rows_per_page) : -1};
  const int key_bits = std::clamp(static_cast<int>(std::bit_width(rows - (rows != 0))), 1, static_cast<int>(sizeof(Key) * 8));

  const auto few = [&](auto* kernel, const char* name) {
    launch(name, kernel, 1, kFewThreads, stream, ids, count, rows, key_bits, page_of, groups, header, entries);
  };
  static_assert(kOneBlock == kFewThreads * kFewItems);
  if (count <= kFewThreads * kFewestItems) return few(device::group_few<Key, kFewThreads, kFewestItems>, "group_few");
  if (count <= kOneBlock) return few(device::group_few<Key, kFewThreads, kFewItems>, "group_few");

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
         reinterpret_cast<unsigned long long*>(&header->bad_position));
  if (looked) looked();
  // The sort is stable: positions ascend within a group.
  EMBERMAP_CUDA(cub::DeviceRadixSort::SortPairs(temporary, sort_bytes, keys, positions, count, 0, key_bits, stream));
  EMBERMAP_CUDA(cub::DeviceScan::InclusiveSum(temporary, scan_bytes, flags(keys.Current()), counts, count, stream));
  launch("write_groups", device::write_groups<Key>, blocks, kThreads, stream, keys.Current(), positions.Current(), counts, count,
         page_of, groups, header, entries);
}

}  // namespace

void group_ids(const std::int64_t* ids, std::uint32_t count, std::uint64_t rows, std::uint64_t rows_per_page,
               const IdGroups& groups, GroupHeader* header, PageEntry* entries, const MemoryPool& pool, cudaStream_t stream,
               const std::function<void()>& looked) {
  if (!wide_keys(rows))
    group_keys<std::uint32_t>(ids, count, rows, rows_per_page, groups, header, entries, pool, stream, looked);
  else
    group_keys<std::uint64_t>(ids, count, rows, rows_per_page, groups, header, entries, pool, stream, looked);
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
