// What the fuzz targets share. A target is a file NAME_fuzz.cpp that defines fuzz_one(), a folder corpus/NAME of small seeds, and
// its line in CMakeLists.txt. It runs under libFuzzer (`make fuzz`), and as an ordinary test over its corpus and mutations of it.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "io/file.hpp"

namespace embermap::fuzz {

// Handles one input. An Error (bad input that was refused) is caught by the caller; any other exception, a call of require() that
// fails, or a finding of a sanitizer is a bug.
void fuzz_one(std::span<const std::byte> input);

// What must hold for every input.
inline void require(bool condition, std::string_view what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

// A folder for this process's inputs, in memory where there is /dev/shm; removed at the end.
class Folder {
 public:
  Folder() {
    std::error_code error;
    const std::filesystem::path shared = "/dev/shm";
    const auto parent = std::filesystem::is_directory(shared, error) ? shared : std::filesystem::temp_directory_path();
    std::string name = parent / "embermap-fuzz-XXXXXX";
    require(::mkdtemp(name.data()) != nullptr, "no temporary folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  // A new file with this content, in place of one of the same name.
  File make(std::string_view name, std::span<const std::byte> content) const {
    const std::filesystem::path file = path_ / name;
    ::unlink(file.c_str());
    File out = File::open(file, File::Mode::kCreateNew);
    out.write(0, content);
    return out;
  }

 private:
  std::filesystem::path path_;
};

// Made when first used.
inline const Folder& folder() {
  static const Folder instance;
  return instance;
}

// Takes numbers and pieces off the front of an input; zeros once it is used up.
class Taker {
 public:
  explicit Taker(std::span<const std::byte> input) : rest_{input} {}
  bool empty() const noexcept { return rest_.empty(); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t out = 0;
    std::size_t shift = 0;
    for (const std::byte b : piece(bytes)) {
      out |= std::to_integer<std::uint64_t>(b) << shift;
      shift += 8;
    }
    return out;
  }
  std::span<const std::byte> piece(std::size_t most) {
    const auto out = rest_.first(most < rest_.size() ? most : rest_.size());
    rest_ = rest_.subspan(out.size());
    return out;
  }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace embermap::fuzz
