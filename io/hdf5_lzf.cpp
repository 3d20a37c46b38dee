// The decoder of LZF (Marc Lehmann's format), the fast compression that h5py offers under HDF5's filter number 32000.
#include <cstring>

#include "io/hdf5.hpp"
#include "io/hdf5_chunks.hpp"

namespace embermap::hdf5 {
namespace {

constexpr H5Z_filter_t kLzf = 32000;
constexpr std::size_t kLargestChunk = std::size_t{1} << 32;

enum class Decoded { kDone, kOutputFull, kBroken };

// A control byte below 32: that many bytes + 1 follow as they are. Else its upper three bits are the length - 2 of a copy (7: a
// byte to add follows) and its lower five the upper bits of how far back it begins.
Decoded decode(const unsigned char* in, std::size_t in_bytes, unsigned char* out, std::size_t capacity, std::size_t& written) {
  std::size_t at = 0;
  written = 0;
  while (at < in_bytes) {
    const std::size_t control = in[at++];
    if (control < 32) {
      const std::size_t length = control + 1;
      if (length > in_bytes - at) return Decoded::kBroken;
      if (length > capacity - written) return Decoded::kOutputFull;
      std::memcpy(out + written, in + at, length);
      at += length;
      written += length;
      continue;
    }
    std::size_t length = control >> 5;
    if (length == 7) {
      if (at == in_bytes) return Decoded::kBroken;
      length += in[at++];
    }
    length += 2;
    if (at == in_bytes) return Decoded::kBroken;
    const std::size_t back = ((control & 31) << 8 | in[at++]) + 1;
    if (back > written) return Decoded::kBroken;
    if (length > capacity - written) return Decoded::kOutputFull;
    for (std::size_t i = 0; i < length; ++i, ++written) out[written] = out[written - back];  // may overlap what it writes
  }
  return Decoded::kDone;
}

std::size_t lzf_filter(unsigned flags, std::size_t parameters, const unsigned* values, std::size_t bytes,
                       std::size_t* buffer_bytes, void** buffer) {
  if ((flags & H5Z_FLAG_REVERSE) == 0) return 0;  // reading only
  // h5py stores the size of a whole chunk as its third parameter.
  std::size_t capacity = parameters >= 3 && values[2] != 0 ? values[2] : *buffer_bytes * 2;
  for (; capacity <= kLargestChunk; capacity *= 2) {
    void* const out = H5allocate_memory(capacity, false);
    if (out == nullptr) return 0;
    std::size_t written = 0;
    const Decoded result =
        decode(static_cast<const unsigned char*>(*buffer), bytes, static_cast<unsigned char*>(out), capacity, written);
    if (result == Decoded::kDone && written > 0) {
      H5free_memory(*buffer);
      *buffer = out;
      *buffer_bytes = capacity;
      return written;
    }
    H5free_memory(out);
    if (result != Decoded::kOutputFull) return 0;
  }
  return 0;
}

}  // namespace

std::optional<std::size_t> decode_lzf(std::span<const std::byte> in, std::span<std::byte> out) {
  std::size_t written = 0;
  const Decoded result = decode(reinterpret_cast<const unsigned char*>(in.data()), in.size(),
                                reinterpret_cast<unsigned char*>(out.data()), out.size(), written);
  return result == Decoded::kDone ? std::optional(written) : std::nullopt;
}

void register_lzf() {
  const Session quiet;
  if (H5Zfilter_avail(kLzf) > 0) return;
  static const H5Z_class2_t filter{H5Z_CLASS_T_VERS, kLzf, 0, 1, "lzf", nullptr, nullptr, &lzf_filter};
  H5Zregister(&filter);
}

}  // namespace embermap::hdf5
