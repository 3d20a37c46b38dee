// The memory of a table's frames: one anonymous mapping, touched once and then never moved, so that it can be registered with
// CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/thread_pool.hpp"

namespace embermap {

// Aligned to 2 MiB from 2 MiB up and advised to use huge pages; prefaulted by the pool's threads. Not inherited by fork() (a
// child that reads it faults instead of copying pinned memory). Throws std::bad_alloc if the system refuses the mapping.
class Slab {
 public:
  Slab() = default;
  Slab(std::uint64_t bytes, ThreadPool& pool);
  Slab(Slab&& other) noexcept;
  Slab& operator=(Slab&& other) noexcept;
  ~Slab();

  std::byte* data() const noexcept { return data_; }
  std::uint64_t bytes() const noexcept { return bytes_; }
  // Whether most of it lies on huge pages (asked from the kernel when it was made).
  bool huge_pages() const noexcept { return huge_pages_; }

 private:
  void release() noexcept;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  bool huge_pages_ = false;
};

}  // namespace embermap
