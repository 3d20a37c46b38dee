// A store in a temporary directory, and a plain array beside it that says what a table must hold.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "store/store.hpp"

namespace embermap::test {

// Where files cost no disk: for tests that make thousands of them.
inline std::filesystem::path memory_folder() {
  const std::filesystem::path shared = "/dev/shm";
  return access(shared.c_str(), W_OK) == 0 ? shared : std::filesystem::temp_directory_path();
}

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "embermap-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

class StoreTest : public testing::Test {
 protected:
  TemporaryDirectory directory_;
  std::filesystem::path path() const { return directory_ / "store"; }
  Store open(std::uint64_t memory = 1U << 30, StoreOptions::Mode mode = StoreOptions::Mode::kOpenOrCreate) {
    return Store::open(path(), {.mode = mode, .memory = memory, .threads = 2});
  }
};

inline std::vector<float> gather(Table table, const std::vector<std::int64_t>& ids, std::string_view field = "weight") {
  std::vector<float> out(ids.size() * table.dim());
  table.gather(ids, std::as_writable_bytes(std::span(out)), field);
  return out;
}

inline std::vector<float> read_all(Table table, std::string_view field = "weight") {
  std::vector<float> out(table.rows() * table.dim());
  table.read(0, table.rows(), std::as_writable_bytes(std::span(out)), field);
  return out;
}

inline void scatter(Table table, const std::vector<std::int64_t>& ids, const std::vector<float>& rows,
                    std::string_view field = "weight") {
  table.scatter(ids, std::as_bytes(std::span(rows)), field);
}

inline void update(Table table, const std::vector<std::int64_t>& ids, const std::vector<float>& grads) {
  table.update(ids, std::as_bytes(std::span(grads)), DType::kFloat32);
}

inline std::vector<std::int64_t> range(std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = first; id < last; ++id) ids.push_back(id);
  return ids;
}

inline std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Everything in a directory, name -> content: to see that nothing changed.
inline std::map<std::string, std::string> snapshot(const std::filesystem::path& directory) {
  std::map<std::string, std::string> files;
  for (const auto& item : std::filesystem::recursive_directory_iterator(directory))
    if (item.is_regular_file()) files[item.path().lexically_relative(directory).string()] = file_text(item.path());
  return files;
}

// The message of the exception of type E that `call` throws; fails the test if it throws none or another.
template <class E, class F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another exception: " << other.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace embermap::test
