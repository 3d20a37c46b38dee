// What tests of formats with words share: rows with their words, written and read by one format.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "io/formats.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap::testing {

struct WordVectors {
  std::vector<std::string> words;
  std::vector<float> numbers;
};

// All rows and words of a file, `step` rows at a time.
inline WordVectors read_word_vectors(std::unique_ptr<RowReader> (*open)(const Location&, const ReadOptions&),
                                     const std::filesystem::path& file, std::uint64_t step = 1'000'000,
                                     const std::string& selector = {}) {
  WordVectors out;
  ReadOptions options;
  options.words = [&](std::uint64_t row, std::string_view word) {
    EXPECT_EQ(row, out.words.size());
    out.words.emplace_back(word);
  };
  const auto reader = open(Location{file, selector}, options);
  EXPECT_EQ(reader->dtype(), DType::kFloat32);
  out.numbers.resize(reader->rows() * reader->dim());
  for (std::uint64_t row = 0; row < reader->rows(); row += step)
    reader->read(row, std::min(step, reader->rows() - row),
                 reinterpret_cast<std::byte*>(out.numbers.data() + row * reader->dim()));
  return out;
}

inline WordSource source_of(const std::vector<std::string>& words) {
  return [&words](std::uint64_t row, std::string& word) { word = words.at(row); };
}

template <class T>
const std::byte* raw(const std::vector<T>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

inline std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> out(values.size());
  if (!values.empty()) std::memcpy(out.data(), values.data(), values.size() * 4);
  return out;
}

}  // namespace embermap::testing
