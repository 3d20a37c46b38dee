// Memory for direct I/O: begins at a multiple of 4 KiB, which every file system takes, and is a multiple of it long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

#include "base/checked.hpp"

namespace embermap {

// Owns `size()` bytes, not initialised; what lies between size() and room() may be overwritten as well. Throws std::bad_alloc.
class AlignedBuffer {
 public:
  static constexpr std::uint64_t kAlignment = 4096;

  AlignedBuffer() = default;
  explicit AlignedBuffer(std::uint64_t bytes) : bytes_{bytes} {
    if (bytes == 0) return;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, room())));
    if (!memory_) throw std::bad_alloc();
  }

  std::byte* data() const noexcept { return memory_.get(); }
  std::uint64_t size() const noexcept { return bytes_; }
  std::uint64_t room() const { return round_up(bytes_, kAlignment); }
  std::span<std::byte> span() const noexcept { return {memory_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::uint64_t bytes_ = 0;
};

}  // namespace embermap
