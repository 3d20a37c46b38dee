// Runs a target over the files of its corpus and seeded random mutations of them, with any compiler: NAME_replay CORPUS [RUNS
// [SEED]]. An input that ends the program is left as crash-NAME in the working directory.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <random>
#include <vector>

#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;

// No input is larger than some KiB: whoever asks for more than this takes a length on an input's word.
constexpr std::size_t kMostMemory = 64U << 20;
constexpr std::size_t kLongestInput = 1U << 16;

const Input* running = nullptr;
char crash_file[256];

// Leaves the input behind. Only calls that a signal handler may make.
void save_input(int signal) {
  if (std::FILE* out = running != nullptr ? std::fopen(crash_file, "wb") : nullptr; out != nullptr) {
    std::fwrite(running->data(), 1, running->size(), out);
    std::fclose(out);
    std::fprintf(stderr, "fuzz: the input is in %s\n", crash_file);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Mutator {
 public:
  Mutator(const std::vector<Input>& corpus, std::uint64_t seed) : corpus_{corpus}, random_{seed} {}

  Input next() {
    Input out = any();
    for (std::uint64_t i = below(6) + 1; i > 0; --i) mutate(out);
    out.resize(std::min(out.size(), kLongestInput));
    return out;
  }

 private:
  std::uint64_t below(std::uint64_t end) { return end == 0 ? 0 : random_() % end; }
  const Input& any() { return corpus_[below(corpus_.size())]; }
  static auto at(std::uint64_t place) { return static_cast<std::ptrdiff_t>(place); }

  void mutate(Input& out) {
    const std::uint64_t place = below(out.size());
    switch (below(8)) {
      case 0:  // a bit
        if (!out.empty()) out[place] = static_cast<std::uint8_t>(out[place] ^ (1U << below(8)));
        break;
      case 1:  // a byte
        if (!out.empty()) out[place] = static_cast<std::uint8_t>(random_());
        break;
      case 2:  // the end is missing
        out.resize(place);
        break;
      case 3: {  // a piece of another one, over what is there or between
        const Input& other = any();
        const std::uint64_t from = below(other.size());
        const std::uint64_t count = std::min<std::uint64_t>(other.size() - from, below(64) + 1);
        if (below(2) == 0)
          out.erase(out.begin() + at(place), out.begin() + at(std::min<std::uint64_t>(out.size(), place + count)));
        out.insert(out.begin() + at(place), other.begin() + at(from), other.begin() + at(from + count));
        break;
      }
      case 4: write_length(out, place); break;
      case 5: {  // a piece of it again
        const std::uint64_t count = std::min<std::uint64_t>(out.size() - place, below(64) + 1);
        const Input piece(out.begin() + at(place), out.begin() + at(place + count));
        for (std::uint64_t i = below(20) + 1; i > 0; --i) out.insert(out.begin() + at(place), piece.begin(), piece.end());
        break;
      }
      case 6:  // a piece is missing
        out.erase(out.begin() + at(place), out.begin() + at(std::min<std::uint64_t>(out.size(), place + below(32))));
        break;
      default: write_digits(out, place); break;
    }
  }

  // A number of 1 to 8 bytes as lengths and counts go wrong: about 0, about a power of two, about the end of its range.
  void write_length(Input& out, std::uint64_t place) {
    const std::uint64_t bytes = 1ULL << below(4);
    const std::uint64_t value = (below(2) == 0 ? 0 : 1ULL << below(64)) + below(3) - 1;
    for (std::uint64_t i = 0; i < bytes && place + i < out.size(); ++i)
      out[place + i] = static_cast<std::uint8_t>(value >> (8 * i));
  }

  // The same where numbers are text.
  void write_digits(Input& out, std::uint64_t place) {
    const auto digit = [](std::uint8_t c) { return c >= '0' && c <= '9'; };
    std::uint64_t begin = place;
    while (begin < out.size() && !digit(out[begin])) ++begin;
    std::uint64_t end = begin;
    while (end < out.size() && digit(out[end])) ++end;
    static constexpr std::string_view kNumbers[] = {"0",
                                                    "1",
                                                    "-1",
                                                    "2147483648",
                                                    "4294967296",
                                                    "9223372036854775807",
                                                    "9223372036854775808",
                                                    "18446744073709551615",
                                                    "18446744073709551616",
                                                    "1e308",
                                                    "1e999",
                                                    "0.5",
                                                    "4611686018427387904"};
    const std::string_view number = kNumbers[below(std::size(kNumbers))];
    out.erase(out.begin() + at(begin), out.begin() + at(end));
    out.insert(out.begin() + at(begin), number.begin(), number.end());
  }

  const std::vector<Input>& corpus_;
  std::mt19937_64 random_;
};

void run(const Input& input) {
  running = &input;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  running = nullptr;
}

}  // namespace

// Every allocation of the target comes by here.
void* operator new(std::size_t bytes) {
  if (bytes > kMostMemory) {
    std::fprintf(stderr, "fuzz: %zu bytes of memory for a small input\n", bytes);
    std::abort();
  }
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s CORPUS [RUNS [SEED]]\n", arguments[0]);
    return 2;
  }
  const std::filesystem::path program(arguments[0]);
  std::snprintf(crash_file, sizeof crash_file, "crash-%s", program.filename().c_str());
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, save_input);

  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());  // the same mutations everywhere
  std::vector<Input> corpus;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    run(corpus.back());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no inputs in %s\n", arguments[0], arguments[1]);
    return 1;
  }
  const std::uint64_t runs = count > 2 ? std::stoull(arguments[2]) : 0;
  Mutator mutator(corpus, count > 3 ? std::stoull(arguments[3]) : 1);
  for (std::uint64_t i = 0; i < runs; ++i) run(mutator.next());
  std::printf("%zu inputs and %llu mutations\n", corpus.size(), static_cast<unsigned long long>(runs));
  return 0;
}
