// The bytes of one chunk of an HDF5 dataset, as our own threads unpack them: 1 byte for the element, 2 for the chunk's size, 1
// for the filters that were skipped, 1 for how many filters there are, 1 for each, then the bytes as stored.
#include <algorithm>
#include <array>
#include <vector>

#include "io/hdf5_chunks.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {
namespace {

using hdf5::ChunkLayout;
using Filter = ChunkLayout::Filter;

// LZF byte by byte, as its description has it and slowly: what decode_lzf() is compared with.
std::optional<std::vector<std::byte>> plain_lzf(std::span<const std::byte> in, std::size_t most) {
  std::vector<std::byte> out;
  std::size_t at = 0;
  const auto next = [&]() -> std::optional<std::size_t> {
    if (at == in.size()) return std::nullopt;
    return std::to_integer<std::size_t>(in[at++]);
  };
  while (at < in.size()) {
    const std::size_t control = *next();
    if (control < 32) {
      for (std::size_t i = 0; i <= control; ++i) {
        const auto byte = next();
        if (!byte) return std::nullopt;
        out.push_back(static_cast<std::byte>(*byte));
      }
    } else {
      std::size_t length = control / 32 + 2;
      if (length == 9) {
        const auto more = next();
        if (!more) return std::nullopt;
        length += *more;
      }
      const auto low = next();
      if (!low) return std::nullopt;
      const std::size_t back = control % 32 * 256 + *low + 1;
      if (back > out.size()) return std::nullopt;
      for (std::size_t i = 0; i < length; ++i) out.push_back(out[out.size() - back]);
    }
    if (out.size() > most) return std::nullopt;
  }
  return out;
}

void check_lzf(std::span<const std::byte> in, std::size_t most) {
  std::vector<std::byte> out(most);
  const auto bytes = hdf5::decode_lzf(in, out);
  const auto plain = plain_lzf(in, most);
  require(bytes.has_value() == plain.has_value(), "lzf that one decoder takes and the other does not");
  if (!bytes) return;
  require(*bytes == plain->size() && std::equal(plain->begin(), plain->end(), out.begin()), "other bytes of lzf");
}

}  // namespace

void fuzz_one(std::span<const std::byte> input) {
  constexpr std::array kKinds{Filter::Kind::kDeflate, Filter::Kind::kShuffle, Filter::Kind::kFletcher32, Filter::Kind::kLzf};
  Taker taker(input);
  ChunkLayout layout;
  layout.record_bytes = 1 + taker.number(1) % 16;
  layout.chunk_bytes = layout.record_bytes * (1 + taker.number(2) % 512);
  layout.known = true;
  const auto skipped = static_cast<unsigned>(taker.number(1));
  for (std::uint64_t count = taker.number(1) % 7; count > 0; --count) {
    const std::uint64_t filter = taker.number(1);
    // As the library's parameters may have it: an item is at most the chunk.
    const auto value = static_cast<unsigned>(std::min<std::uint64_t>(1 + filter / 4, layout.chunk_bytes));
    layout.filters.push_back({kKinds[filter % kKinds.size()], value});
  }
  const auto stored = taker.piece(input.size());
  check_lzf(stored, layout.chunk_bytes);

  std::vector<std::byte> data(stored.begin(), stored.end());
  hdf5::ChunkScratch scratch, used;
  const std::string why = hdf5::unpack_chunk(layout, skipped, data, scratch);
  require(!why.empty() || data.size() == layout.chunk_bytes, "a chunk of another size");
  require(why.size() < 200, "a long reason");
  std::vector<std::byte> again(stored.begin(), stored.end());
  used.bytes = data;
  require(hdf5::unpack_chunk(layout, skipped, again, used) == why, "what memory held before makes a difference");

  // What we pack is unpacked as the same, and its checksum holds.
  std::erase_if(layout.filters, [](const Filter& filter) {
    return filter.kind == Filter::Kind::kFletcher32 || filter.kind == Filter::Kind::kLzf;
  });
  for (Filter& filter : layout.filters)
    if (filter.kind == Filter::Kind::kDeflate) filter.value = std::min(filter.value, 9U);
  std::vector<std::byte> chunk(layout.chunk_bytes);
  for (std::size_t i = 0; i < chunk.size() && !stored.empty(); ++i) chunk[i] = stored[i % stored.size()];
  std::vector<std::byte> packed = chunk;
  const unsigned left_out = hdf5::pack_chunk(layout, packed, scratch);
  require(packed.size() <= chunk.size(), "a packed chunk that is larger");
  layout.filters.push_back({Filter::Kind::kFletcher32, 0});
  const std::uint32_t sum = hdf5::fletcher32(packed);
  for (unsigned b = 0; b < 4; ++b) packed.push_back(static_cast<std::byte>(sum >> (8 * b)));
  require(hdf5::unpack_chunk(layout, left_out, packed, scratch).empty() && packed == chunk, "another chunk once packed");
}

}  // namespace embermap::fuzz
