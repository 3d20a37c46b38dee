#include "io/hdf5_chunks.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"

namespace embermap::hdf5 {
namespace {

using Filter = ChunkLayout::Filter;

constexpr std::uint64_t kLargestChunk = 4_GiB - 1;  // of the format
constexpr std::uint64_t kThreadMemory = 128_MiB;    // of all threads: a chunk as stored, and unpacked twice
constexpr std::uint64_t kGoodBytes = 4_MiB;
constexpr std::uint64_t kLargestGoodBytes = 32_MiB;
constexpr H5Z_filter_t kLzf = 32000;

// Item by item from the planes of their first bytes, second bytes, ... What is left behind the last whole item stays.
template <std::size_t kItem>
void unshuffle_items(const unsigned char* in, unsigned char* out, std::size_t items) {
  for (std::size_t i = 0; i < items; ++i)
    for (std::size_t b = 0; b < kItem; ++b) out[i * kItem + b] = in[b * items + i];
}
template <std::size_t kItem>
void shuffle_items(const unsigned char* in, unsigned char* out, std::size_t items) {
  for (std::size_t i = 0; i < items; ++i)
    for (std::size_t b = 0; b < kItem; ++b) out[b * items + i] = in[i * kItem + b];
}

void shuffle(std::span<const std::byte> from, std::span<std::byte> to, std::size_t item, bool reverse) {
  const auto* const in = reinterpret_cast<const unsigned char*>(from.data());
  auto* const out = reinterpret_cast<unsigned char*>(to.data());
  const std::size_t items = from.size() / item;
  switch (item) {
    case 2: reverse ? unshuffle_items<2>(in, out, items) : shuffle_items<2>(in, out, items); break;
    case 4: reverse ? unshuffle_items<4>(in, out, items) : shuffle_items<4>(in, out, items); break;
    case 8: reverse ? unshuffle_items<8>(in, out, items) : shuffle_items<8>(in, out, items); break;
    default:
      for (std::size_t i = 0; i < items; ++i)
        for (std::size_t b = 0; b < item; ++b) {
          if (reverse)
            out[i * item + b] = in[b * items + i];
          else
            out[b * items + i] = in[i * item + b];
        }
  }
  std::copy(from.begin() + static_cast<std::ptrdiff_t>(items * item), from.end(),
            to.begin() + static_cast<std::ptrdiff_t>(items * item));
}

// Versions of the library before 1.6.3 stored it with the bytes of each half turned around.
bool is_checksum(std::uint32_t sum, std::uint32_t stored) {
  const std::uint32_t turned = (stored & 0x00FF00FFU) << 8 | (stored & 0xFF00FF00U) >> 8;
  return sum == stored || sum == turned;
}

struct FilterParameters {
  H5Z_filter_t id = 0;
  unsigned flags = 0;
  std::size_t count = 0;
  std::array<unsigned, 32> values{};
};

FilterParameters filter_parameters(hid_t creation, unsigned index) {
  FilterParameters out;
  out.count = out.values.size();
  out.id = H5Pget_filter2(creation, index, &out.flags, &out.count, out.values.data(), 0, nullptr, nullptr);
  return out;
}

// The most bytes that a filter makes of so many: what it cannot pack it may store, and say so.
std::uint64_t most_behind(H5Z_filter_t filter, std::uint64_t bytes) {
  switch (filter) {
    case H5Z_FILTER_SHUFFLE: return bytes;
    case H5Z_FILTER_FLETCHER32: return bytes + 4;
    case kLzf: return bytes + bytes / 32 + 1;
    default: return bytes + bytes / 500 + 64;  // zlib's bound is less, and so is that of the library's own filters
  }
}
H5Z_filter_t id_of(Filter::Kind kind) {
  switch (kind) {
    case Filter::Kind::kShuffle: return H5Z_FILTER_SHUFFLE;
    case Filter::Kind::kFletcher32: return H5Z_FILTER_FLETCHER32;
    case Filter::Kind::kLzf: return kLzf;
    case Filter::Kind::kDeflate: break;
  }
  return H5Z_FILTER_DEFLATE;
}

// What of a filter's parameters contradicts the chunks they are for.
std::string contradiction(const FilterParameters& filter, const ChunkLayout& layout) {
  const auto& v = filter.values;
  const std::uint64_t elements = layout.chunk_bytes / layout.record_bytes;
  switch (filter.id) {
    case H5Z_FILTER_SHUFFLE:
      if (filter.count < 1 || v[0] == 0 || v[0] > layout.chunk_bytes)
        return fmt::format("shuffle has items of {} bytes, chunks have {}", filter.count < 1 ? 0 : v[0], layout.chunk_bytes);
      break;
    case kLzf:
      if (filter.count >= 3 && v[2] != 0 && v[2] != layout.chunk_bytes)
        return fmt::format("lzf has chunks of {} bytes, they have {}", v[2], layout.chunk_bytes);
      break;
    case H5Z_FILTER_SZIP:
      if (filter.count != 4) return fmt::format("szip has {} parameters, it needs 4", filter.count);
      if (v[1] < 2 || v[1] > 32 || v[1] % 2 != 0) return fmt::format("szip has blocks of {} elements (2 to 32, even)", v[1]);
      if (v[2] == 0 || v[2] > 64 || (v[2] + 7) / 8 > layout.record_bytes)
        return fmt::format("szip has elements of {} bits, they have {}", v[2], layout.record_bytes * 8);
      if (v[3] < v[1] || v[3] > 128 * v[1] || v[3] > 4096)
        return fmt::format("szip has lines of {} elements for blocks of {}", v[3], v[1]);
      break;
    case H5Z_FILTER_NBIT:
      if (filter.count >= 3 && v[1] != 0 && v[0] == filter.count && v[2] == elements) break;  // it leaves such a type alone
      if (filter.count < 5 || v[0] != filter.count || v[2] != elements)
        return fmt::format("nbit has {} parameters for {} elements, chunks have {}", filter.count, v[2], elements);
      break;
    case H5Z_FILTER_SCALEOFFSET:
      if (filter.count != 20 || v[2] != elements || v[4] != layout.record_bytes)
        return fmt::format("scaleoffset has {} parameters for {} elements of {} bytes, chunks have {} of {}", filter.count, v[2],
                           v[4], elements, layout.record_bytes);
      break;
    default: break;
  }
  return {};
}

}  // namespace

unsigned chunk_threads(unsigned wanted) {
  constexpr unsigned kMost = 16;
  if (wanted > 0) return std::min(wanted, ThreadPool::kMaxThreads);
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::clamp(std::thread::hardware_concurrency(), 1U, kMost);
  return std::clamp(static_cast<unsigned>(CPU_COUNT(&set)), 1U, kMost);
}

std::uint32_t fletcher32(std::span<const std::byte> bytes) {
  std::uint32_t sum1 = 0, sum2 = 0;
  const std::byte* at = bytes.data();
  const auto fold = [](std::uint32_t sum) { return (sum & 0xFFFFU) + (sum >> 16); };
  for (std::size_t words = bytes.size() / 2; words > 0;) {
    std::size_t now = std::min<std::size_t>(words, 360);  // so many cannot overflow 32 bits
    words -= now;
    for (; now > 0; --now, at += 2) {
      sum1 += std::to_integer<std::uint32_t>(at[0]) << 8 | std::to_integer<std::uint32_t>(at[1]);
      sum2 += sum1;
    }
    sum1 = fold(sum1);
    sum2 = fold(sum2);
  }
  if (bytes.size() % 2 != 0) {
    sum1 += std::to_integer<std::uint32_t>(*at) << 8;
    sum2 += sum1;
    sum1 = fold(sum1);
    sum2 = fold(sum2);
  }
  return fold(sum2) << 16 | fold(sum1);
}

ChunkLayout chunk_layout(hid_t creation, const std::vector<std::uint64_t>& extent, const std::vector<std::uint64_t>& largest,
                         std::uint64_t record_bytes, const std::filesystem::path& file, const std::string& dataset) {
  ChunkLayout out;
  out.extent = extent;
  out.record_bytes = record_bytes;
  std::array<hsize_t, H5S_MAX_RANK> dims{};
  const int rank = H5Pget_chunk(creation, H5S_MAX_RANK, dims.data());
  if (rank < 1 || static_cast<std::size_t>(rank) != extent.size())
    throw_last(file, fmt::format("cannot read the chunks of {}", printable(dataset)));
  out.chunk.assign(dims.begin(), dims.begin() + rank);
  const auto refuse = [&](std::string_view why) {
    throw FormatError(file, fmt::format("{} is damaged: {}", printable(dataset), why));
  };
  out.chunk_bytes = record_bytes;
  for (std::size_t i = 0; i < extent.size(); ++i) {
    if (out.chunk[i] == 0 || record_bytes == 0 || __builtin_mul_overflow(out.chunk_bytes, out.chunk[i], &out.chunk_bytes) ||
        out.chunk_bytes > kLargestChunk)
      refuse(fmt::format("chunks {} of elements of {} bytes", shape_to_text(out.chunk), record_bytes));
    if (largest[i] != H5S_UNLIMITED && out.chunk[i] > std::max<std::uint64_t>(1, largest[i]))
      refuse(fmt::format("chunks {} are larger than it may ever be, {}", shape_to_text(out.chunk), shape_to_text(largest)));
    if (i > 0) out.chunks_a_row = checked_mul(out.chunks_a_row, ceil_div(extent[i], out.chunk[i]), dataset);
  }
  const int count = H5Pget_nfilters(creation);
  if (count < 0) throw_last(file, fmt::format("cannot read the filters of {}", printable(dataset)));
  out.known = true;
  std::uint64_t bytes = out.chunk_bytes;  // that a filter is given; the most where filters before it may pack
  bool exact = true;
  for (int i = 0; i < count; ++i) {
    const FilterParameters filter = filter_parameters(creation, static_cast<unsigned>(i));
    if (const std::string why = contradiction(filter, out); !why.empty()) refuse(why);
    if (filter.id == H5Z_FILTER_SZIP) {
      out.szip = static_cast<unsigned>(i);
      out.szip_bytes = bytes;
      out.szip_exact = exact;
    } else if (filter.id != H5Z_FILTER_FLETCHER32) {
      out.szip.reset();
    }
    bytes = most_behind(filter.id, bytes);
    exact = exact && (filter.id == H5Z_FILTER_SHUFFLE || filter.id == H5Z_FILTER_FLETCHER32);
    switch (filter.id) {
      case H5Z_FILTER_DEFLATE:
        out.filters.push_back({Filter::Kind::kDeflate, filter.count > 0 ? std::min(filter.values[0], 9U) : 6});
        break;
      case H5Z_FILTER_SHUFFLE: out.filters.push_back({Filter::Kind::kShuffle, filter.values[0]}); break;
      case H5Z_FILTER_FLETCHER32: out.filters.push_back({Filter::Kind::kFletcher32, 0}); break;
      case kLzf: out.filters.push_back({Filter::Kind::kLzf, 0}); break;
      default: out.known = false; break;
    }
  }
  return out;
}

namespace {

// Where the index-th chunk begins, counted along the last dimension first from chunk row `chunk_row` on.
void set_origin(const ChunkLayout& layout, std::uint64_t chunk_row, std::uint64_t index, std::vector<std::uint64_t>& origin) {
  for (std::size_t i = origin.size(); i-- > 1;) {
    const std::uint64_t along = ceil_div(layout.extent[i], layout.chunk[i]);
    origin[i] = index % along * layout.chunk[i];
    index /= along;
  }
  origin[0] = (chunk_row + index) * layout.chunk[0];
}

std::string chunk_text(const std::string& path, const std::vector<std::uint64_t>& origin) {
  return fmt::format("{}: the chunk at {}", printable(path), shape_to_text(origin));
}

// A chunk without filters. H5Dread_chunk() writes as many bytes as the file says that are stored, and for such a dataset nothing
// tells how many that are: H5Dget_chunk_storage_size() answers with what a chunk has. H5Dread() takes what belongs there.
void read_plain_chunk(const ChunkLayout& layout, hid_t dataset, const std::vector<std::uint64_t>& origin,
                      const std::filesystem::path& file, const std::string& path, std::vector<std::byte>& data) {
  std::vector<hsize_t> shape(layout.chunk.begin(), layout.chunk.end()), start(origin.begin(), origin.end()), count(shape);
  for (std::size_t i = 0; i < count.size(); ++i) count[i] = std::min<hsize_t>(count[i], layout.extent[i] - origin[i]);
  const std::vector<hsize_t> zero(shape.size(), 0);
  data.resize(layout.chunk_bytes);  // what lies outside of the dataset is nobody's
  const TypeId type{H5Dget_type(dataset)};
  const SpaceId from{H5Dget_space(dataset)}, to{H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr)};
  if (!type || !from || !to || H5Sselect_hyperslab(from.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr) < 0 ||
      H5Sselect_hyperslab(to.id(), H5S_SELECT_SET, zero.data(), nullptr, count.data(), nullptr) < 0 ||
      H5Dread(dataset, type.id(), to.id(), from.id(), H5P_DEFAULT, data.data()) < 0)
    throw_last(file, fmt::format("cannot read {}", chunk_text(path, origin)));
}

// The bytes of a chunk as stored, in a Session of the caller's; false if it was never written.
bool read_chunk(const ChunkLayout& layout, hid_t dataset, const std::vector<std::uint64_t>& origin,
                const std::filesystem::path& file, const std::string& path, std::vector<std::byte>& data,
                std::uint32_t& skipped) {
  const std::vector<hsize_t> at(origin.begin(), origin.end());
  hsize_t bytes = 0;
  if (H5Dget_chunk_storage_size(dataset, at.data(), &bytes) < 0) {
    // Some versions have an error for what was never written, others no bytes.
    if (last_error().text.find("storage is not allocated") != std::string::npos) return false;
    throw_last(file, fmt::format("cannot find {}", chunk_text(path, origin)));
  }
  if (bytes == 0) return false;
  if (layout.known && layout.filters.empty()) {
    read_plain_chunk(layout, dataset, origin, file, path, data);
    return true;
  }
  // No filter makes more of a chunk than this: what says so is damaged, and would take memory for nothing.
  if (bytes > 2 * layout.chunk_bytes + 64_KiB)
    throw FormatError(
        file, fmt::format("{} is damaged: {} bytes are stored for {}", chunk_text(path, origin), bytes, layout.chunk_bytes));
  data.resize(bytes);
  if (H5Dread_chunk(dataset, H5P_DEFAULT, at.data(), &skipped, data.data()) < 0)
    throw_last(file, fmt::format("cannot read {}", chunk_text(path, origin)));
  return true;
}

}  // namespace

void check_szip_chunks(const ChunkLayout& layout, hid_t dataset, std::uint64_t first, std::uint64_t count,
                       const std::filesystem::path& file, const std::string& path) {
  if (!layout.szip || count == 0) return;
  const std::uint64_t chunk_row = first / layout.chunk[0];
  const std::uint64_t chunks = checked_mul(ceil_div(first + count, layout.chunk[0]) - chunk_row, layout.chunks_a_row, path);
  std::vector<std::uint64_t> origin(layout.extent.size());
  std::vector<std::byte> data;
  for (std::uint64_t index = 0; index < chunks; ++index) {
    std::uint32_t skipped = 0, bytes = 0;
    set_origin(layout, chunk_row, index, origin);
    if (!read_chunk(layout, dataset, origin, file, path, data, skipped) || (skipped >> *layout.szip & 1U) != 0) continue;
    if (data.size() >= sizeof bytes) std::memcpy(&bytes, data.data(), sizeof bytes);
    if (layout.szip_exact ? bytes != layout.szip_bytes : bytes > layout.szip_bytes)
      throw FormatError(
          file, fmt::format("{} is damaged: szip says that it was made of {} bytes, a chunk has {}{}", chunk_text(path, origin),
                            bytes, layout.szip_exact ? "" : "at most ", layout.szip_bytes));
  }
}

std::string unpack_chunk(const ChunkLayout& layout, unsigned skipped, std::vector<std::byte>& data, ChunkScratch& memory) {
  std::vector<std::byte>& scratch = memory.bytes;
  for (std::size_t i = layout.filters.size(); i-- > 0;) {
    if (i < 32 && (skipped >> i & 1U) != 0) continue;
    std::uint64_t most = layout.chunk_bytes;  // that this filter was given
    for (std::size_t before = 0; before < i; ++before) most = most_behind(id_of(layout.filters[before].kind), most);
    const Filter& filter = layout.filters[i];
    switch (filter.kind) {
      case Filter::Kind::kDeflate: {
        scratch.resize(most);
        if (const std::string_view why = memory.deflate.unpack(data, scratch); !why.empty())
          return fmt::format("its deflated data {}", why);
        std::swap(data, scratch);
        break;
      }
      case Filter::Kind::kLzf: {
        scratch.resize(most);
        const auto bytes = decode_lzf(data, scratch);
        if (!bytes) return "its lzf data is broken, or is more than a chunk";
        scratch.resize(*bytes);
        std::swap(data, scratch);
        break;
      }
      case Filter::Kind::kShuffle:
        if (filter.value > 1) {
          scratch.resize(data.size());
          shuffle(data, scratch, filter.value, /*reverse=*/true);
          std::swap(data, scratch);
        }
        break;
      case Filter::Kind::kFletcher32: {
        if (data.size() < 4) return fmt::format("it has {} bytes, too few for a checksum", data.size());
        const auto body = std::span<const std::byte>(data).first(data.size() - 4);
        std::uint32_t stored = 0;
        for (std::size_t b = 4; b-- > 0;) stored = stored << 8 | std::to_integer<std::uint32_t>(data[body.size() + b]);
        if (const std::uint32_t sum = fletcher32(body); !is_checksum(sum, stored))
          return fmt::format("its checksum is {:08x}, not {:08x}", sum, stored);
        data.resize(data.size() - 4);
        break;
      }
    }
  }
  if (data.size() != layout.chunk_bytes)
    return fmt::format("it unpacks to {} bytes, a chunk has {}", data.size(), layout.chunk_bytes);
  return {};
}

unsigned pack_chunk(const ChunkLayout& layout, std::vector<std::byte>& data, ChunkScratch& memory) {
  std::vector<std::byte>& scratch = memory.bytes;
  unsigned skipped = 0;
  for (std::size_t i = 0; i < layout.filters.size(); ++i) {
    const Filter& filter = layout.filters[i];
    if (filter.kind == Filter::Kind::kShuffle && filter.value > 1) {
      scratch.resize(data.size());
      shuffle(data, scratch, filter.value, /*reverse=*/false);
      std::swap(data, scratch);
    } else if (filter.kind == Filter::Kind::kDeflate) {
      memory.deflate.pack(data, filter.value, scratch);
      if (scratch.size() >= data.size()) {
        skipped |= 1U << i;
        continue;
      }
      std::swap(data, scratch);
    }
  }
  return skipped;
}

ChunkReader::ChunkReader(const std::filesystem::path& file, const std::string& path, hid_t dataset, ChunkLayout layout,
                         std::vector<std::byte> fill, Field field, unsigned threads)
    : file_{file}, path_{path}, dataset_{dataset}, layout_{std::move(layout)}, fill_{std::move(fill)}, field_{field} {
  for (std::size_t i = 1; i < layout_.extent.size(); ++i) row_records_ *= layout_.extent[i];
  const std::uint64_t most = std::max<std::uint64_t>(1, kThreadMemory / (3 * layout_.chunk_bytes));
  threads_ = static_cast<unsigned>(std::min<std::uint64_t>(chunk_threads(threads), most));
}

std::uint64_t ChunkReader::good_rows() const {
  const std::uint64_t row_bytes = std::max<std::uint64_t>(1, row_records_ * field_.bytes);
  const std::uint64_t wanted = std::clamp(2 * threads_ * layout_.chunk_bytes, kGoodBytes, kLargestGoodBytes) / row_bytes;
  return std::max<std::uint64_t>(1, wanted / layout_.chunk[0]) * layout_.chunk[0];
}

// The chunk unpacked in memory.data; false if it was never written.
bool ChunkReader::load(const std::vector<std::uint64_t>& origin, Memory& memory) const {
  std::uint32_t skipped = 0;
  {
    const Session quiet;
    if (!read_chunk(layout_, dataset_, origin, file_, path_, memory.data, skipped)) return false;
  }
  if (const std::string why = unpack_chunk(layout_, skipped, memory.data, memory.scratch); !why.empty())
    throw FormatError(file_, fmt::format("{} is damaged: {}", chunk_text(path_, origin), why));
  return true;
}

// Copies what of [first, first + count) lies in a chunk; `chunk` is nullptr for one that was never written.
void ChunkReader::place(const std::vector<std::uint64_t>& origin, const std::byte* chunk, std::uint64_t first,
                        std::uint64_t count, std::byte* out) const {
  const std::vector<std::uint64_t>& extent = layout_.extent;
  const std::size_t rank = extent.size();
  std::vector<std::uint64_t> begin(rank, 0), size(rank);  // inside the chunk
  for (std::size_t i = 0; i < rank; ++i) size[i] = std::min(layout_.chunk[i], extent[i] - origin[i]);
  const std::uint64_t first_here = std::max(first, origin[0]);
  const std::uint64_t end_here = std::min(first + count, origin[0] + size[0]);
  begin[0] = first_here - origin[0];
  size[0] = end_here - first_here;

  // Dimensions from `solid` on are whole in the chunk and in the dataset: their elements lie in one run on both sides.
  std::size_t solid = rank - 1;
  while (solid > 0 && layout_.chunk[solid] == extent[solid]) --solid;
  std::vector<std::uint64_t> from_stride(rank, 1), to_stride(rank, 1);  // in elements
  for (std::size_t i = rank - 1; i-- > 0;) {
    from_stride[i] = from_stride[i + 1] * layout_.chunk[i + 1];
    to_stride[i] = to_stride[i + 1] * extent[i + 1];
  }
  std::uint64_t run = size[solid];
  for (std::size_t i = solid + 1; i < rank; ++i) run *= size[i];
  std::uint64_t from = begin[0] * from_stride[0], to = (first_here - first) * to_stride[0];
  for (std::size_t i = 1; i < rank; ++i) to += origin[i] * to_stride[i];
  const bool whole = field_.offset == 0 && field_.bytes == layout_.record_bytes;
  std::vector<std::uint64_t> index(rank, 0);
  for (;;) {
    std::byte* const target = out + to * field_.bytes;
    if (chunk != nullptr && whole) {
      std::memcpy(target, chunk + from * layout_.record_bytes, run * layout_.record_bytes);
    } else {
      for (std::uint64_t i = 0; i < run; ++i) {
        const std::byte* const record = chunk != nullptr ? chunk + (from + i) * layout_.record_bytes : fill_.data();
        std::memcpy(target + i * field_.bytes, record + field_.offset, field_.bytes);
      }
    }
    std::size_t at = solid;
    while (at > 0) {
      --at;
      from += from_stride[at];
      to += to_stride[at];
      if (++index[at] < size[at]) break;
      from -= size[at] * from_stride[at];
      to -= size[at] * to_stride[at];
      index[at] = 0;
      if (at == 0) return;
    }
    if (solid == 0) return;
  }
}

void ChunkReader::read(std::uint64_t first, std::uint64_t count, std::byte* out) {
  if (count == 0) return;
  const std::uint64_t chunk_row = first / layout_.chunk[0];
  const std::uint64_t chunk_rows = ceil_div(first + count, layout_.chunk[0]) - chunk_row;
  const std::uint64_t chunks = checked_mul(chunk_rows, layout_.chunks_a_row, path_);
  const auto work = [&](std::uint64_t begin, std::uint64_t end) {
    Memory memory;
    std::vector<std::uint64_t> origin(layout_.extent.size());
    for (std::uint64_t index = begin; index < end; ++index) {
      set_origin(layout_, chunk_row, index, origin);
      const bool there = load(origin, memory);
      place(origin, there ? memory.data.data() : nullptr, first, count, out);
    }
  };
  if (chunks == 1 || threads_ == 1) return work(0, chunks);
  if (!pool_) pool_ = std::make_unique<ThreadPool>(threads_);
  pool_->parallel_for(chunks, std::max<std::uint64_t>(1, 256_KiB / layout_.chunk_bytes), work);
}

}  // namespace embermap::hdf5
