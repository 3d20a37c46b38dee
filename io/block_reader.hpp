// The next block of a copy is read while the one before is written. Inside the library only: nothing that is installed includes
// this.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace embermap {

// Blocks 0, 1, ... of a copy, in turn. With `ahead`, a thread of its own reads the next one while the caller has one; where the
// system starts no thread, next() reads.
class BlockReader {
 public:
  using Read = std::function<const std::byte*(std::uint64_t index)>;  // index - 2 is not in use any more when it is called

  BlockReader(std::uint64_t count, bool ahead, Read read) : count_{count}, read_{std::move(read)} {
    if (!ahead) return;
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
    }
  }
  // Waits for the block that is being read.
  ~BlockReader() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  // The next block; the one before is given back. Throws what reading it threw. At most `count` calls.
  const std::byte* next() {
    if (!thread_.joinable()) return read_(given_++);
    std::unique_lock lock(mutex_);
    const std::uint64_t index = given_++;
    changed_.notify_all();
    changed_.wait(lock, [&] { return read_count_ > index || error_ != nullptr; });
    if (read_count_ <= index) std::rethrow_exception(error_);
    return blocks_[index % 2];
  }

 private:
  void work() noexcept {
    for (std::uint64_t index = 0; index < count_; ++index) {
      {
        std::unique_lock lock(mutex_);
        // The caller has block given_ - 1, so there is room for block given_.
        changed_.wait(lock, [&] { return stop_ || index <= given_; });
        if (stop_) return;
      }
      const std::byte* block = nullptr;
      std::exception_ptr error;
      try {
        block = read_(index);
      } catch (...) {
        error = std::current_exception();
      }
      {
        const std::lock_guard lock(mutex_);
        blocks_[index % 2] = block;
        error_ = error;
        if (error == nullptr) ++read_count_;
      }
      changed_.notify_all();
      if (error != nullptr) return;
    }
  }

  const std::uint64_t count_;
  const Read read_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t given_ = 0;       // blocks the caller asked for
  std::uint64_t read_count_ = 0;  // blocks read
  std::array<const std::byte*, 2> blocks_{};
  std::exception_ptr error_;  // of block read_count_
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace embermap
