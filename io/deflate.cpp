#include "io/deflate.hpp"

#include <zlib.h>

#include <algorithm>
#include <new>

#include "base/size_text.hpp"

#if EMBERMAP_HAS_LIBDEFLATE
#include <libdeflate.h>
#endif

namespace embermap {

#if EMBERMAP_HAS_LIBDEFLATE

struct ZlibCodec::State {
  libdeflate_decompressor* unpacking = nullptr;
  libdeflate_compressor* packing = nullptr;
  unsigned level = 0;  // of packing

  State() = default;
  ~State() {
    libdeflate_free_decompressor(unpacking);  // of nothing does nothing
    libdeflate_free_compressor(packing);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

std::uint32_t crc32_of(std::uint32_t before, std::span<const std::byte> bytes) {
  return bytes.empty() ? before : libdeflate_crc32(before, bytes.data(), bytes.size());
}

std::string_view ZlibCodec::unpack(std::span<const std::byte> in, std::vector<std::byte>& out) {
  if (state_->unpacking == nullptr) state_->unpacking = libdeflate_alloc_decompressor();
  if (state_->unpacking == nullptr) throw std::bad_alloc();
  std::size_t bytes = 0;
  switch (libdeflate_zlib_decompress(state_->unpacking, in.data(), in.size(), out.data(), out.size(), &bytes)) {
    case LIBDEFLATE_SUCCESS: break;
    case LIBDEFLATE_INSUFFICIENT_SPACE: return "is more than a chunk";
    default: return "is broken, or ends early";
  }
  out.resize(bytes);
  return {};
}

void ZlibCodec::pack(std::span<const std::byte> in, unsigned level, std::vector<std::byte>& out) {
  if (state_->packing == nullptr || state_->level != level) {
    libdeflate_free_compressor(state_->packing);
    state_->packing = libdeflate_alloc_compressor(static_cast<int>(level));
    state_->level = level;
  }
  if (state_->packing == nullptr) throw std::bad_alloc();
  out.resize(libdeflate_zlib_compress_bound(state_->packing, in.size()));
  const std::size_t bytes = libdeflate_zlib_compress(state_->packing, in.data(), in.size(), out.data(), out.size());
  if (bytes == 0) throw std::bad_alloc();  // there is room for any output
  out.resize(bytes);
}

std::string_view deflate_library() { return "libdeflate " LIBDEFLATE_VERSION_STRING; }

#else

struct ZlibCodec::State {};

std::uint32_t crc32_of(std::uint32_t before, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto now = bytes.first(std::min<std::size_t>(bytes.size(), 1_GiB));
    before = static_cast<std::uint32_t>(crc32(before, reinterpret_cast<const Bytef*>(now.data()), static_cast<uInt>(now.size())));
    bytes = bytes.subspan(now.size());
  }
  return before;
}

std::string_view ZlibCodec::unpack(std::span<const std::byte> in, std::vector<std::byte>& out) {
  uLongf bytes = out.size();
  switch (::uncompress(reinterpret_cast<Bytef*>(out.data()), &bytes, reinterpret_cast<const Bytef*>(in.data()), in.size())) {
    case Z_OK: break;
    case Z_MEM_ERROR: throw std::bad_alloc();
    case Z_BUF_ERROR: return "ends early, or is more than a chunk";
    default: return "is broken";
  }
  out.resize(bytes);
  return {};
}

void ZlibCodec::pack(std::span<const std::byte> in, unsigned level, std::vector<std::byte>& out) {
  out.resize(::compressBound(in.size()));
  uLongf bytes = out.size();
  if (::compress2(reinterpret_cast<Bytef*>(out.data()), &bytes, reinterpret_cast<const Bytef*>(in.data()), in.size(),
                  static_cast<int>(level)) != Z_OK)
    throw std::bad_alloc();  // there is room for any output
  out.resize(bytes);
}

std::string_view deflate_library() { return "zlib " ZLIB_VERSION; }

#endif

ZlibCodec::ZlibCodec() : state_{std::make_unique<State>()} {}
ZlibCodec::~ZlibCodec() = default;

}  // namespace embermap
