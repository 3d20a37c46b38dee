// Files of torch.save(): 1 byte for how the input is a file. As it is; or the pieces of an archive, which the target puts
// together so that mutations get past its directory: a byte for its members, 2 bytes of length and the bytes of the pickle, of
// storage "0" and of storage "1"; or the pickles of a file without an archive (2 bytes of length) and the storages behind them,
// with the number of elements that these pickles ask for.
#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "io/rows.hpp"
#include "io/torch_file.hpp"
#include "io/torch_pickle.hpp"
#include "io/zip.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

constexpr std::uint64_t kMostBytes = 1 << 16;

std::filesystem::path make_archive(Taker& taker) {
  const std::uint64_t kind = taker.number(1);
  File file = folder().make("x.pt", {});
  ZipWriter zip(file);
  const auto add = [&](std::string_view name, std::span<const std::byte> bytes, int level) {
    zip.begin(name, bytes.size(), level, 64);
    zip.write(bytes);
    zip.end();
  };
  const auto text = [&](std::string_view name, std::string_view content) { add(name, std::as_bytes(std::span(content)), -1); };
  add("x/data.pkl", taker.piece(taker.number(2)), (kind & 1U) != 0 ? 6 : -1);
  if ((kind & 6U) != 0) text("x/byteorder", (kind & 2U) != 0 ? "little" : "big");
  for (const char* name : {"x/data/0", "x/data/1"}) add(name, taker.piece(taker.number(2)), (kind & 8U) != 0 ? 1 : -1);
  if ((kind & 16U) != 0) text("x/constants.pkl", "none");
  if ((kind & 32U) != 0) text("x/data.pkl", "twice");
  zip.finish();
  return file.path();
}

std::filesystem::path make_legacy(Taker& taker) {
  const auto pickles = taker.piece(taker.number(2));
  std::vector<std::byte> content(pickles.begin(), pickles.end());
  const auto put = [&](std::uint64_t number) {
    for (unsigned b = 0; b < 8; ++b) content.push_back(static_cast<std::byte>(number >> (8 * b) & 0xFF));
  };
  if (const auto found = read_legacy_torch("x.pt", content, /*whole=*/true)) {
    content.resize(std::min<std::size_t>(content.size(), found->data));
    for (const LegacyTorch::Storage& storage : found->storages) {
      const std::uint64_t change = taker.number(1);
      put(storage.elements + (change == 255 ? 1 : 0));
      std::uint64_t bytes = 0;
      if (__builtin_mul_overflow(storage.elements, storage.item_bytes, &bytes) || bytes > 4096) break;
      for (std::uint64_t i = 0; i < bytes; ++i) content.push_back(static_cast<std::byte>(i + change));
    }
  }
  return folder().make("x.pt", content).path();
}

std::vector<std::byte> read_by(RowReader& reader, std::uint64_t step) {
  const std::uint64_t row_bytes = reader.dim() * item_size(reader.dtype());
  std::vector<std::byte> out(reader.rows() * row_bytes);
  for (std::uint64_t row = 0; row < reader.rows(); row += step)
    reader.read(row, std::min(step, reader.rows() - row), out.data() + row * row_bytes);
  return out;
}

void read_rows(const std::filesystem::path& file, const Entry& entry) {
  try {
    const auto reader = open_rows(Location{file, entry.name, Location::Format::kTorch});
    require(reader->dim() > 0 && reader->block_rows() > 0, "rows without columns");
    std::uint64_t bytes = 0, elements = 1;
    for (const std::uint64_t extent : entry.shape)
      if (__builtin_mul_overflow(elements, extent, &elements)) elements = UINT64_MAX;
    if (__builtin_mul_overflow(reader->rows(), reader->dim() * item_size(reader->dtype()), &bytes) || bytes > kMostBytes) return;
    require(reader->rows() * reader->dim() == elements, "another number of elements than is listed");
    const std::vector<std::byte> all = read_by(*reader, std::max<std::uint64_t>(1, reader->rows()));
    require(read_by(*reader, 1) == all && read_by(*reader, 3) == all, "other rows in pieces");
  } catch (const Error&) {
  }
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  Taker taker(input);
  const std::uint64_t kind = taker.number(1) % 4;
  const std::filesystem::path file = kind == 0   ? folder().make("x.pt", taker.piece(input.size())).path()
                                     : kind == 3 ? make_legacy(taker)
                                                 : make_archive(taker);
  (void)parse_location(file.native());
  const std::vector<Entry> entries = list_entries(file, Location::Format::kTorch);
  for (std::size_t i = 0; i < std::min<std::size_t>(entries.size(), 8); ++i) read_rows(file, entries[i]);
  const TorchContents contents = read_torch_file(file);
  require(contents.tensors.size() == entries.size(), "other tensors with scalars than without");
}

}  // namespace embermap::fuzz
