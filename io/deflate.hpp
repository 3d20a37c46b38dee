// Deflate in one piece, and the checksum of zip archives: by libdeflate where the build has it, which is about twice as quick,
// else by zlib. Inside io/ only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace embermap {

// CRC-32 of `bytes` behind bytes whose CRC-32 is `before` (0: none).
std::uint32_t crc32_of(std::uint32_t before, std::span<const std::byte> bytes);

// Packs to zlib's format, and back. Not thread-safe: one for each thread.
class ZlibCodec {
 public:
  ZlibCodec();
  ~ZlibCodec();
  ZlibCodec(const ZlibCodec&) = delete;
  ZlibCodec& operator=(const ZlibCodec&) = delete;

  // `out` becomes what was packed, at most out.size() bytes of it, and is cut to that; what follows the end of the stream is not
  // looked at. Returns what is wrong with it, or nothing. Any bytes may be given.
  std::string_view unpack(std::span<const std::byte> in, std::vector<std::byte>& out);
  // `out` becomes `in`, packed with this level, 0 to 9. Throws std::bad_alloc.
  void pack(std::span<const std::byte> in, unsigned level, std::vector<std::byte>& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "libdeflate 1.14" or "zlib 1.2.13": what packs and unpacks.
std::string_view deflate_library();

}  // namespace embermap
