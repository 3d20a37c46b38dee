// Chunks of HDF5 datasets, packed and unpacked by several threads past the library's lock: the library only moves their bytes.
// Inside io/ only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "io/deflate.hpp"
#include "io/hdf5.hpp"

namespace embermap::hdf5 {

// How a dataset is cut into chunks, and what they go through. Ranks of `extent` and `chunk` are equal and at least 1.
struct ChunkLayout {
  struct Filter {
    enum class Kind { kDeflate, kShuffle, kFletcher32, kLzf };
    Kind kind = Kind::kDeflate;
    unsigned value = 0;  // kShuffle: bytes of an item; kDeflate: level
  };
  std::vector<std::uint64_t> extent, chunk;
  std::uint64_t record_bytes = 0;  // of an element
  std::vector<Filter> filters;     // in the order of writing
  std::uint64_t chunk_bytes = 0;   // of a whole one, unpacked
  std::uint64_t chunks_a_row = 1;  // that hold one row
  bool known = false;              // all filters are ours; else `filters` is not filled
  // The filter szip, where what it made is what is stored (but for checksums), and how much it was made of: a chunk then begins
  // with that number, which the library believes.
  std::optional<unsigned> szip;
  std::uint64_t szip_bytes = 0;
  bool szip_exact = true;  // else that much at most: filters before it pack
};

// What a thread that packs or unpacks chunks keeps from one to the next.
struct ChunkScratch {
  std::vector<std::byte> bytes;
  ZlibCodec deflate;
};

// Reads it from a dataset's creation properties, and looks at what can be seen of damage before the library does: chunks of no
// element or past 4 GiB, chunks larger than a fixed extent, parameters of filters that contradict the chunk. Throws FormatError
// naming `file` and `dataset`.
ChunkLayout chunk_layout(hid_t creation, const std::vector<std::uint64_t>& extent, const std::vector<std::uint64_t>& largest,
                         std::uint64_t record_bytes, const std::filesystem::path& file, const std::string& dataset);

// Looks at what chunks packed by szip say of themselves, those that hold rows [first, first + count). To be called inside of a
// Session, before the library unpacks them. Throws FormatError.
void check_szip_chunks(const ChunkLayout& layout, hid_t dataset, std::uint64_t first, std::uint64_t count,
                       const std::filesystem::path& file, const std::string& path);

// Undoes the filters of one chunk, those in `skipped` (bit i: filter i) left out. `data` is the chunk as stored, and afterwards
// layout.chunk_bytes bytes. Returns what is wrong with it, or nothing. Any bytes may be given.
std::string unpack_chunk(const ChunkLayout& layout, unsigned skipped, std::vector<std::byte>& data, ChunkScratch& scratch);
// The other way, for deflate and shuffle. `data` has layout.chunk_bytes bytes. Returns the filters that were left out, because
// they made nothing smaller.
unsigned pack_chunk(const ChunkLayout& layout, std::vector<std::byte>& data, ChunkScratch& scratch);

// Fletcher's checksum as HDF5 has it.
std::uint32_t fletcher32(std::span<const std::byte> bytes);
// Decodes LZF. Nothing where `in` is broken or does not fit into `out`; else how many bytes it was.
std::optional<std::size_t> decode_lzf(std::span<const std::byte> in, std::span<std::byte> out);

// How many threads work on chunks where `wanted` are: 0 for what the process may use, at most 16.
unsigned chunk_threads(unsigned wanted);

// Reads rows of a dataset whose filters are all known. Not thread-safe; works with threads of its own, and must not be called
// inside of a Session.
class ChunkReader {
 public:
  struct Field {
    std::uint64_t offset = 0, bytes = 0;  // of each element: what is read
  };
  // Keeps `dataset` (open while this lives). `fill`: an element that was never written,
  // record_bytes long. `threads`: 0 for what the process may use.
  ChunkReader(const std::filesystem::path& file, const std::string& path, hid_t dataset, ChunkLayout layout,
              std::vector<std::byte> fill, Field field, unsigned threads);
  // Rows [first, first + count), their fields one behind the other.
  void read(std::uint64_t first, std::uint64_t count, std::byte* out);
  // How many rows give all threads something to do.
  std::uint64_t good_rows() const;

 private:
  struct Memory {
    std::vector<std::byte> data;
    ChunkScratch scratch;
  };
  bool load(const std::vector<std::uint64_t>& origin, Memory& memory) const;
  void place(const std::vector<std::uint64_t>& origin, const std::byte* chunk, std::uint64_t first, std::uint64_t count,
             std::byte* out) const;

  std::filesystem::path file_;
  std::string path_;
  hid_t dataset_;
  ChunkLayout layout_;
  std::vector<std::byte> fill_;
  Field field_;
  std::uint64_t row_records_ = 1;
  unsigned threads_;
  std::unique_ptr<ThreadPool> pool_;
};

}  // namespace embermap::hdf5
