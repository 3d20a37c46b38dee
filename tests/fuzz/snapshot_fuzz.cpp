// What an interrupted snapshot leaves: 1 byte for what is there beside it, then SNAPSHOT, where "INODE" and "BORN" stand for the
// store's own. A snapshot that goes on from there has the store's rows.
#include <string>
#include <vector>

#include "base/error.hpp"
#include "store/adoption.hpp"
#include "store/snapshot.hpp"
#include "store/store.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kRows = 300, kDim = 4;

std::vector<float> rows_of(Store& store) {
  std::vector<float> out(kRows * kDim);
  store.table("t").read(0, kRows, std::as_writable_bytes(std::span(out)));
  return out;
}

// Closed at the end of the program, while the folder is there.
struct Source {
  Source() : store{Store::open(folder().path() / "s", {.memory = 1 << 20, .threads = 1, .autocommit = false})} {
    Table table = store.create("t", {.rows = kRows, .dim = kDim});
    std::vector<float> values(kRows * kDim);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    table.write(0, kRows, std::as_bytes(std::span(values)));
    store.commit();
    store.checkpoint();
  }
  Store store;
};

void replace(std::string& text, std::string_view from, std::uint64_t to) {
  if (const std::size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), std::to_string(to));
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  static Source source;
  Taker taker(input);
  const std::uint64_t kind = taker.number(1);
  const auto rest = taker.piece(input.size());
  std::string marker(reinterpret_cast<const char*>(rest.data()), rest.size());
  const StoreHome home = home_of(source.store.path());
  replace(marker, "INODE", home.inode);
  replace(marker, "BORN", home.born_ns);
  const std::filesystem::path copy = folder().path() / "d";
  std::filesystem::remove_all(copy);
  std::filesystem::create_directory(copy);
  folder().make("d/" + std::string(kSnapshotName), std::as_bytes(std::span(marker)));
  if ((kind & 1U) != 0) folder().make("d/t.npy", rest);
  if ((kind & 2U) != 0) folder().make("d/t.pages", rest);
  if ((kind & 4U) != 0) folder().make("d/other.npy", rest);
  source.store.snapshot(copy);
  require(!std::filesystem::exists(copy / kSnapshotName), "a marker that stays");
  Store made = Store::open(copy, {.mode = StoreOptions::Mode::kRead, .memory = 1 << 20, .threads = 1});
  require(made.tables().size() == 1 && rows_of(made) == rows_of(source.store), "a snapshot with other rows");
}

}  // namespace embermap::fuzz
