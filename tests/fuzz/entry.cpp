// libFuzzer's name for a target.
#include "base/error.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    embermap::fuzz::fuzz_one(std::as_bytes(std::span(data, size)));
  } catch (const embermap::Error& refused) {
    embermap::fuzz::require(std::string_view(refused.what()).size() < 10'000, "an error of more than 10000 bytes");
  }
  return 0;
}
