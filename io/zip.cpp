#include "io/zip.hpp"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "base/error.hpp"
#include "base/size_text.hpp"
#include "base/thread_pool.hpp"
#include "io/addition.hpp"
#include "io/deflate.hpp"

namespace embermap {
namespace {

constexpr std::uint32_t kLocalMagic = 0x04034b50, kEntryMagic = 0x02014b50, kEndMagic = 0x06054b50;
constexpr std::uint32_t kEnd64Magic = 0x06064b50, kLocator64Magic = 0x07064b50;
constexpr std::size_t kLocalBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr std::uint32_t k32 = 0xFFFFFFFF;
constexpr std::uint16_t k16 = 0xFFFF;
constexpr std::uint16_t kZip64Extra = 0x0001, kPaddingExtra = 0xD935;  // the latter as zipalign's
constexpr std::uint16_t kEncrypted = 0x0001, kUtf8 = 0x0800;
constexpr std::uint64_t kLargestDirectory = 1_GiB;
constexpr std::uint64_t kMostMembers = 16ULL << 20;
constexpr std::uint64_t kBlock = 256_KiB;

std::uint64_t number(std::span<const std::byte> from, std::size_t at, std::size_t bytes) {
  std::uint64_t out = 0;
  for (std::size_t i = bytes; i-- > 0;) out = out << 8 | std::to_integer<std::uint64_t>(from[at + i]);
  return out;
}
std::uint16_t u16(std::span<const std::byte> from, std::size_t at) { return static_cast<std::uint16_t>(number(from, at, 2)); }
std::uint32_t u32(std::span<const std::byte> from, std::size_t at) { return static_cast<std::uint32_t>(number(from, at, 4)); }
std::uint64_t u64(std::span<const std::byte> from, std::size_t at) { return number(from, at, 8); }

template <class T>
void put(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i) & 0xFF);
}

std::string_view text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

[[noreturn]] void fail(const File& file, std::string_view what) {
  throw FormatError(file.path(), fmt::format("zip archive: {}", what));
}

// Where the directory is, by the record at the end of the file.
struct End {
  std::uint64_t members = 0, bytes = 0, offset = 0;  // as written: `offset` from where the archive begins
  std::uint64_t at = 0;                              // of this record, or of zip64's before it
  std::string comment;
};

End find_end(const File& file) {
  const std::uint64_t size = file.size();
  if (size < kEndBytes) fail(file, fmt::format("{} bytes are too few for one", size));
  const std::uint64_t tail = std::min<std::uint64_t>(size, kEndBytes + 0xFFFF);
  std::vector<std::byte> buffer(tail);
  file.read(size - tail, buffer);
  // The last record whose comment ends where the file does, else the last at all (bytes were added behind it).
  std::optional<std::size_t> found;
  for (std::size_t at = tail - kEndBytes + 1; at-- > 0;) {
    if (u32(buffer, at) != kEndMagic) continue;
    if (at + kEndBytes + u16(buffer, at + 20) == tail) {
      found = at;
      break;
    }
    if (!found) found = at;
  }
  if (!found) fail(file, "its directory at the end is missing (truncated?)");
  const auto record = std::span<const std::byte>(buffer).subspan(*found);
  End end;
  end.at = size - tail + *found;
  end.comment = text_of(record.subspan(kEndBytes, std::min<std::size_t>(u16(record, 20), record.size() - kEndBytes)));
  const std::uint16_t disk = u16(record, 4), first_disk = u16(record, 6);
  end.members = u16(record, 10);
  end.bytes = u32(record, 12);
  end.offset = u32(record, 16);
  const bool needs64 = end.members == k16 || end.bytes == k32 || end.offset == k32;
  bool has64 = false;
  if (end.at >= kLocator64Bytes) {
    std::array<std::byte, kLocator64Bytes> locator;
    file.read(end.at - kLocator64Bytes, locator);
    if (u32(locator, 0) == kLocator64Magic) {
      // Written right before its locator; what the locator says is off where something stands before the archive.
      const std::uint64_t named = u64(locator, 8);
      const std::uint64_t beside = end.at - kLocator64Bytes - std::min<std::uint64_t>(end.at - kLocator64Bytes, kEnd64Bytes);
      for (const std::uint64_t at : {named, beside}) {
        if (at > end.at - kLocator64Bytes || end.at - kLocator64Bytes - at < kEnd64Bytes) continue;
        std::array<std::byte, kEnd64Bytes> end64;
        file.read(at, end64);
        if (u32(end64, 0) != kEnd64Magic) continue;
        if (u32(end64, 16) != 0 || u32(end64, 20) != 0) fail(file, "it spans several disks, which is not read here");
        end.members = u64(end64, 32);
        end.bytes = u64(end64, 40);
        end.offset = u64(end64, 48);
        end.at = at;
        has64 = true;
        break;
      }
    }
  }
  if (needs64 && !has64 && (end.bytes == k32 || end.offset == k32)) fail(file, "its zip64 directory is missing");
  if (!has64 && (disk != 0 || first_disk != 0)) fail(file, "it spans several disks, which is not read here");
  return end;
}

}  // namespace

std::string ZipMember::method_text() const {
  switch (method) {
    case kStored: return "stored";
    case kDeflated: return "deflated";
    case 9: return "deflate64";
    case 12: return "bzip2";
    case 14: return "lzma";
    case 93: return "zstd";
    case 95: return "xz";
    default: return fmt::format("method {}", method);
  }
}

ZipDirectory::ZipDirectory(const File& file) {
  const End end = find_end(file);
  if (end.bytes > end.at) fail(file, fmt::format("its directory of {} bytes does not fit before byte {}", end.bytes, end.at));
  if (end.bytes > kLargestDirectory || end.members > kMostMembers)
    fail(file, fmt::format("its directory of {} members and {} is larger than what is accepted ({}, {})", end.members,
                           format_size(end.bytes), kMostMembers, format_size(kLargestDirectory)));
  if (end.members > end.bytes / kEntryBytes)
    fail(file, fmt::format("{} members do not fit into a directory of {} bytes", end.members, end.bytes));
  begin_ = end.at - end.bytes;
  comment_ = end.comment;
  // Bytes before the archive move all of its offsets.
  if (end.offset > begin_) fail(file, fmt::format("its directory at byte {} is said to be at {}", begin_, end.offset));
  const std::uint64_t before = begin_ - end.offset;

  std::vector<std::byte> directory(end.bytes);
  file.read(begin_, directory);
  members_.reserve(end.members);
  std::span<const std::byte> rest = directory;
  for (std::uint64_t i = 0; i < end.members; ++i) {
    if (rest.size() < kEntryBytes || u32(rest, 0) != kEntryMagic)
      fail(file, fmt::format("entry {} of its directory is broken", i));
    ZipMember m;
    m.made_by = u16(rest, 4);
    m.needed = u16(rest, 6);
    m.flags = u16(rest, 8);
    m.method = u16(rest, 10);
    m.time = u16(rest, 12);
    m.date = u16(rest, 14);
    m.crc = u32(rest, 16);
    m.packed_bytes = u32(rest, 20);
    m.bytes = u32(rest, 24);
    const std::size_t name = u16(rest, 28), extra = u16(rest, 30), comment = u16(rest, 32);
    std::uint32_t disk = u16(rest, 34);
    m.internal = u16(rest, 36);
    m.external = u32(rest, 38);
    m.header_offset = u32(rest, 42);
    rest = rest.subspan(kEntryBytes);
    if (rest.size() < name + extra + comment) fail(file, fmt::format("entry {} of its directory is cut short", i));
    m.name = text_of(rest.first(name));
    std::span<const std::byte> extras = rest.subspan(name, extra);
    m.comment = text_of(rest.subspan(name + extra, comment));
    rest = rest.subspan(name + extra + comment);
    while (extras.size() >= 4) {
      const std::uint16_t id = u16(extras, 0);
      const std::size_t length = u16(extras, 2);
      if (length > extras.size() - 4) break;  // as other readers: what follows means nothing
      if (id == kZip64Extra) {
        std::span<const std::byte> values = extras.subspan(4, length);
        const auto take = [&](std::uint64_t& value) {
          if (value != k32) return;
          if (values.size() < 8) fail(file, fmt::format("the zip64 sizes of '{}' are missing", printable(m.name)));
          value = u64(values, 0);
          values = values.subspan(8);
        };
        take(m.bytes);
        take(m.packed_bytes);
        take(m.header_offset);
        if (disk == k16 && values.size() >= 4) disk = u32(values, 0);
      } else {
        m.extra += text_of(extras.first(4 + length));
      }
      extras = extras.subspan(4 + length);
    }
    if (disk != 0) fail(file, fmt::format("'{}' lies on another disk, which is not read here", printable(m.name)));
    if (__builtin_add_overflow(m.header_offset, before, &m.header_offset) || m.header_offset > begin_ ||
        begin_ - m.header_offset < kLocalBytes || m.packed_bytes > begin_ - m.header_offset - kLocalBytes)
      fail(file, fmt::format("'{}' with {} bytes at byte {} does not fit before its directory", printable(m.name), m.packed_bytes,
                             m.header_offset));
    members_.push_back(std::move(m));
  }
  std::vector<const ZipMember*> sorted;
  for (const ZipMember& member : members_) sorted.push_back(&member);
  std::sort(sorted.begin(), sorted.end(),
            [](const ZipMember* a, const ZipMember* b) { return a->header_offset < b->header_offset; });
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    starts_.push_back(sorted[i]->header_offset);
    if (i > 0 && sorted[i]->header_offset - sorted[i - 1]->header_offset < kLocalBytes + sorted[i - 1]->packed_bytes)
      fail(file, fmt::format("'{}' and '{}' lie over one another", printable(sorted[i - 1]->name), printable(sorted[i]->name)));
  }
}

const ZipMember* ZipDirectory::find(std::string_view name) const {
  for (auto member = members_.rbegin(); member != members_.rend(); ++member)
    if (member->name == name) return &*member;
  return nullptr;
}

std::uint64_t ZipDirectory::end_of(const ZipMember& member) const {
  const auto next = std::upper_bound(starts_.begin(), starts_.end(), member.header_offset);
  return next == starts_.end() ? begin_ : *next;
}

std::uint64_t ZipDirectory::data_offset(const File& file, const ZipMember& member) const {
  std::array<std::byte, kLocalBytes> header;
  file.read(member.header_offset, header);
  const std::string name = printable(member.name);
  if (u32(header, 0) != kLocalMagic) fail(file, fmt::format("there is no header of '{}' at byte {}", name, member.header_offset));
  if (((u16(header, 6) | member.flags) & kEncrypted) != 0)
    fail(file, fmt::format("'{}' is encrypted, which is not read here", name));
  if (u16(header, 8) != member.method) fail(file, fmt::format("the header of '{}' contradicts the directory", name));
  const std::uint64_t offset = member.header_offset + kLocalBytes + u16(header, 26) + u16(header, 28);
  const std::uint64_t end = end_of(member);
  if (offset > end || member.packed_bytes > end - offset)
    fail(file,
         fmt::format("the {} bytes of '{}' from byte {} do not end before byte {}", member.packed_bytes, name, offset, end));
  if (u16(header, 26) != member.name.size()) fail(file, fmt::format("the header of '{}' has another name", name));
  std::string local(member.name.size(), '\0');
  file.read(member.header_offset + kLocalBytes, std::as_writable_bytes(std::span(local)));
  if (local != member.name) fail(file, fmt::format("the header of '{}' is that of '{}'", name, printable(local)));
  return offset;
}

// ---- reading a member ----

struct ZipMemberReader::Inflate {
  z_stream stream{};
  std::vector<std::byte> input = std::vector<std::byte>(kBlock);
  std::vector<std::byte> skipped;
  std::uint64_t read = 0;      // packed bytes taken from the file
  std::uint64_t position = 0;  // unpacked bytes given
  bool ended = false;

  Inflate() {
    if (inflateInit2(&stream, -15) != Z_OK) throw std::bad_alloc();
  }
  ~Inflate() { inflateEnd(&stream); }
  Inflate(const Inflate&) = delete;
  Inflate& operator=(const Inflate&) = delete;

  void restart() {
    inflateReset(&stream);
    stream.avail_in = 0;
    read = position = 0;
    ended = false;
  }
};

ZipMemberReader::ZipMemberReader(const File& file, const ZipDirectory& directory, const ZipMember& member, bool check)
    : file_{file}, stream_{file}, member_{member}, check_{check}, data_offset_{directory.data_offset(file, member)} {
  if (member.method == ZipMember::kStored) {
    if (member.bytes != member.packed_bytes)
      fail(file, fmt::format("'{}' is stored, but {} bytes are said to be {}", printable(member.name), member.packed_bytes,
                             member.bytes));
  } else if (member.method == ZipMember::kDeflated) {
    inflate_ = std::make_unique<Inflate>();
  } else {
    fail(file, fmt::format("'{}' is compressed with {}, which is not read here (stored and deflated are)", printable(member.name),
                           member.method_text()));
  }
}

ZipMemberReader::~ZipMemberReader() = default;

std::string ZipMemberReader::where() const { return fmt::format("'{}'", printable(member_.name)); }

void ZipMemberReader::read(std::uint64_t offset, std::span<std::byte> out) {
  if (offset > member_.bytes || out.size() > member_.bytes - offset)
    throw FormatError(file_.path(), fmt::format("zip archive: '{}' is truncated: bytes [{}, +{}) are not within its {}",
                                                printable(member_.name), offset, out.size(), member_.bytes));
  if (inflate_ == nullptr) {
    stream_.read(data_offset_ + offset, out);
    note(offset, out);
    return;
  }
  Inflate& z = *inflate_;
  if (offset < z.position) z.restart();
  if (offset > z.position) {
    z.skipped.resize(kBlock);
    while (z.position < offset) inflate_to(std::span(z.skipped).first(std::min<std::uint64_t>(kBlock, offset - z.position)));
  }
  inflate_to(out);
}

std::span<const std::byte> ZipMemberReader::view(std::uint64_t offset, std::uint64_t most) {
  if (inflate_ != nullptr || offset >= member_.bytes) return {};
  const std::span<const std::byte> out = stream_.view(data_offset_ + offset, std::min(most, member_.bytes - offset));
  note(offset, out);
  return out;
}

std::uint64_t ZipMemberReader::read_ahead(std::uint64_t begin, std::uint64_t end, std::uint64_t memory) {
  if (inflate_ != nullptr)
    return begin > inflate_->position || inflate_->read > 0
               ? 0
               : stream_.read_ahead(data_offset_, data_offset_ + member_.packed_bytes, memory);
  end = std::min(end, member_.bytes);
  return begin < end ? stream_.read_ahead(data_offset_ + begin, data_offset_ + end, memory) : 0;
}

void ZipMemberReader::inflate_to(std::span<std::byte> out) {
  Inflate& z = *inflate_;
  const std::uint64_t begin = z.position;
  const std::span<std::byte> all = out;
  const auto damaged = [&](std::string_view why) {
    fail(file_, fmt::format("{} is damaged: {} (unpacked byte {} of {})", where(), why, z.position, member_.bytes));
  };
  // With the last byte the end of the stream has to come as well.
  const auto wanted = [&] { return !out.empty() || (z.position == member_.bytes && !z.ended); };
  std::byte beyond{};
  while (wanted()) {
    if (z.ended) damaged("its stream ends too early");
    if (z.stream.avail_in == 0 && z.read < member_.packed_bytes) {
      const auto block = std::span(z.input).first(std::min<std::uint64_t>(z.input.size(), member_.packed_bytes - z.read));
      stream_.read(data_offset_ + z.read, block);
      z.read += block.size();
      z.stream.next_in = reinterpret_cast<Bytef*>(block.data());
      z.stream.avail_in = static_cast<uInt>(block.size());
    }
    const bool at_end = out.empty();
    const std::size_t room = at_end ? 1 : std::min<std::size_t>(out.size(), 1_GiB);
    z.stream.next_out = reinterpret_cast<Bytef*>(at_end ? &beyond : out.data());
    z.stream.avail_out = static_cast<uInt>(room);
    const int result = ::inflate(&z.stream, Z_NO_FLUSH);
    const std::size_t made = room - z.stream.avail_out;
    if (at_end && made > 0) damaged("it goes on after its end");
    z.position += made;
    out = out.subspan(made);
    if (result == Z_STREAM_END) {
      z.ended = true;
    } else if (result == Z_BUF_ERROR || (result == Z_OK && made == 0 && z.stream.avail_in == 0)) {
      if (z.read == member_.packed_bytes && z.stream.avail_in == 0) damaged("its packed bytes end too early");
    } else if (result == Z_MEM_ERROR) {
      throw std::bad_alloc();
    } else if (result != Z_OK) {
      damaged(z.stream.msg != nullptr ? z.stream.msg : "no deflate stream");
    }
  }
  note(begin, all);
}

void ZipMemberReader::note(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (!check_ || offset > checked_ || bytes.size() <= checked_ - offset) return;
  crc_ = crc32_of(crc_, bytes.subspan(checked_ - offset));
  checked_ = offset + bytes.size();
  if (checked_ == member_.bytes && crc_ != member_.crc)
    fail(file_, fmt::format("{} is damaged: its checksum is {:08x}, not {:08x}", where(), crc_, member_.crc));
}

// ---- writing ----

// Bytes are deflated in pieces, several at a time: each begins with the window that the bytes before it leave, as one stream
// would have it, and ends with a whole byte, so that the pieces behind one another are one stream.
struct ZipWriter::Deflate {
  static constexpr std::size_t kPiece = 512_KiB, kWindow = 32_KiB;

  int level;
  ThreadPool pool;
  std::size_t together;            // pieces
  std::vector<std::byte> pending;  // the window, and what is not packed yet
  std::size_t window = 0;          // bytes of it that are there
  std::vector<std::vector<std::byte>> packed;

  Deflate(int wanted, unsigned threads)
      : level{wanted}, pool{threads}, together{std::size_t{2} * pool.threads()}, packed(together) {
    pending.reserve(kWindow + together * kPiece);
  }
  Deflate(const Deflate&) = delete;
  Deflate& operator=(const Deflate&) = delete;

  // Bytes [begin, end) of `pending`.
  void pack(std::size_t begin, std::size_t end, bool last, std::vector<std::byte>& out) const {
    z_stream z{};
    if (deflateInit2(&z, level, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY) != Z_OK) throw std::bad_alloc();
    const std::unique_ptr<z_stream, int (*)(z_stream*)> ends(&z, [](z_stream* one) { return deflateEnd(one); });
    const std::size_t before = std::min(begin, kWindow);
    if (before > 0)
      deflateSetDictionary(&z, reinterpret_cast<const Bytef*>(pending.data() + begin - before), static_cast<uInt>(before));
    out.resize(deflateBound(&z, static_cast<uLong>(end - begin)) + 64);  // and the empty block that ends it
    // zlib's interface has no const.
    z.next_in = reinterpret_cast<Bytef*>(
        const_cast<std::byte*>(pending.data() + begin));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    z.avail_in = static_cast<uInt>(end - begin);
    for (std::size_t made = 0;;) {
      z.next_out = reinterpret_cast<Bytef*>(out.data() + made);
      z.avail_out = static_cast<uInt>(out.size() - made);
      const int result = ::deflate(&z, last ? Z_FINISH : Z_SYNC_FLUSH);
      made = out.size() - z.avail_out;
      if (z.avail_out > 0 && (!last || result == Z_STREAM_END)) {
        out.resize(made);
        return;
      }
      out.resize(2 * out.size());
    }
  }
};

ZipWriter::ZipWriter(File& file, std::uint64_t at) : file_{file}, at_{at} {}
ZipWriter::~ZipWriter() = default;

void ZipWriter::copy(const File& from, const ZipDirectory& directory, const ZipMember& member) {
  ZipMember copied = member;
  copied.header_offset = at_;
  const std::uint64_t bytes = directory.end_of(member) - member.header_offset;
  copy_range(from, member.header_offset, bytes, file_, at_);
  at_ += bytes;
  members_.push_back(std::move(copied));
}

std::string ZipWriter::local_header(const ZipMember& m, std::uint64_t padding) const {
  std::string out;
  put(out, kLocalMagic);
  put(out, m.needed);
  put(out, m.flags);
  put(out, m.method);
  put(out, m.time);
  put(out, m.date);
  put(out, m.crc);
  put(out, k32);
  put(out, k32);
  put(out, static_cast<std::uint16_t>(m.name.size()));
  put(out, static_cast<std::uint16_t>(20 + padding));
  out += m.name;
  put(out, kZip64Extra);
  put(out, std::uint16_t{16});
  put(out, m.bytes);
  put(out, m.packed_bytes);
  if (padding > 0) {
    put(out, kPaddingExtra);
    put(out, static_cast<std::uint16_t>(padding - 4));
    out.append(padding - 4, '\0');
  }
  return out;
}

void ZipWriter::begin(std::string_view name, std::uint64_t bytes, int level, std::uint64_t align, unsigned threads) {
  if (name.empty() || name.size() > 0xFFFF)
    throw InvalidArgument(fmt::format("{}: a member's name has 1 to 65535 bytes, not {}", printable(file_.path()), name.size()));
  current_ = {};
  current_.name = name;
  current_.method = level < 0 ? ZipMember::kStored : ZipMember::kDeflated;
  const bool ascii = std::all_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  current_.flags = ascii ? std::uint16_t{0} : kUtf8;
  current_.bytes = bytes;
  current_.header_offset = at_;
  current_.made_by = 3 << 8 | 45;  // Unix, 4.5: zip64
  current_.needed = 45;
  current_.date = 1 << 5 | 1;  // 1980-01-01, as numpy.savez: equal arrays make equal files
  current_.external = 0600U << 16;
  padding_ = 0;
  if (level < 0 && align > 1) {
    const std::uint64_t start = at_ + local_header(current_, 0).size();
    padding_ = (align - start % align) % align;
    while (padding_ > 0 && padding_ < 4) padding_ += align;
  }
  const std::string header = local_header(current_, padding_);  // with sizes and checksum to come
  file_.write(at_, header);
  at_ += header.size();
  written_ = 0;
  deflate_ = level < 0 ? nullptr : std::make_unique<Deflate>(level, threads);
  stored_ = level < 0 ? std::make_unique<StreamWriter>(file_, at_) : nullptr;
}

// Before they go anywhere.
void ZipWriter::note(std::span<const std::byte> bytes) {
  current_.crc = crc32_of(current_.crc, bytes);
  written_ += bytes.size();
  if (stored_ == nullptr) return;
  at_ += bytes.size();
  current_.packed_bytes += bytes.size();
}

void ZipWriter::write(std::span<const std::byte> bytes) {
  note(bytes);
  if (stored_ != nullptr) return stored_->write(bytes);
  Deflate& d = *deflate_;
  const std::size_t most = d.together * Deflate::kPiece;
  while (!bytes.empty()) {
    const std::size_t now = std::min(bytes.size(), d.window + most - d.pending.size());
    d.pending.insert(d.pending.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(now));
    bytes = bytes.subspan(now);
    if (d.pending.size() == d.window + most) deflate_pending(/*last=*/false);
  }
}

void ZipWriter::write_view(std::span<const std::byte> bytes) {
  if (stored_ == nullptr) return write(bytes);
  note(bytes);
  stored_->write_view(bytes);
}

std::uint64_t ZipWriter::write_behind(std::uint64_t memory) {
  if (stored_ == nullptr) return 0;
  const std::uint64_t taken = stored_->write_behind(current_.bytes - written_, memory);
  how_ = stored_->how();
  return taken;
}

void ZipWriter::deflate_pending(bool last) {
  Deflate& d = *deflate_;
  const std::size_t bytes = d.pending.size() - d.window;
  const std::size_t pieces = std::max<std::size_t>(last ? 1 : 0, (bytes + Deflate::kPiece - 1) / Deflate::kPiece);
  d.pool.parallel_for(pieces, 1, [&](std::uint64_t first, std::uint64_t end) {
    for (std::uint64_t i = first; i < end; ++i) {
      const std::size_t begin = d.window + i * Deflate::kPiece;
      d.pack(begin, std::min(begin + Deflate::kPiece, d.pending.size()), last && i + 1 == pieces, d.packed[i]);
    }
  });
  for (std::size_t i = 0; i < pieces; ++i) {
    file_.write(at_, d.packed[i]);
    at_ += d.packed[i].size();
    current_.packed_bytes += d.packed[i].size();
  }
  const std::size_t keep = std::min(d.pending.size(), Deflate::kWindow);
  d.pending.erase(d.pending.begin(), d.pending.end() - static_cast<std::ptrdiff_t>(keep));
  d.window = keep;
}

const ZipMember& ZipWriter::end() {
  if (deflate_ != nullptr) deflate_pending(/*last=*/true);
  deflate_.reset();
  if (stored_ != nullptr) stored_->flush();
  stored_.reset();
  if (written_ != current_.bytes)
    throw InvalidArgument(fmt::format("{}: {} bytes of '{}' were written, {} were promised", printable(file_.path()), written_,
                                      printable(current_.name), current_.bytes));
  file_.write(current_.header_offset, local_header(current_, padding_));
  members_.push_back(current_);
  return members_.back();
}

void ZipWriter::finish() {
  const std::uint64_t begin = at_;
  std::string out;
  const auto flush = [&] {
    file_.write(at_, out);
    at_ += out.size();
    out.clear();
  };
  for (const ZipMember& m : members_) {
    std::string extra;
    const auto small = [&](std::uint64_t value) {
      if (value < k32) return static_cast<std::uint32_t>(value);
      put(extra, value);
      return k32;
    };
    const std::uint32_t bytes = small(m.bytes), packed = small(m.packed_bytes), offset = small(m.header_offset);
    std::string zip64;
    if (!extra.empty()) {
      put(zip64, kZip64Extra);
      put(zip64, static_cast<std::uint16_t>(extra.size()));
      zip64 += extra;
    }
    zip64 += m.extra;
    if (zip64.size() > 0xFFFF) fail(file_, fmt::format("the extra fields of '{}' are too long to be copied", printable(m.name)));
    put(out, kEntryMagic);
    put(out, m.made_by);
    put(out, extra.empty() ? m.needed : std::max<std::uint16_t>(m.needed, 45));
    put(out, m.flags);
    put(out, m.method);
    put(out, m.time);
    put(out, m.date);
    put(out, m.crc);
    put(out, packed);
    put(out, bytes);
    put(out, static_cast<std::uint16_t>(m.name.size()));
    put(out, static_cast<std::uint16_t>(zip64.size()));
    put(out, static_cast<std::uint16_t>(m.comment.size()));
    put(out, std::uint16_t{0});
    put(out, m.internal);
    put(out, m.external);
    put(out, offset);
    out += m.name;
    out += zip64;
    out += m.comment;
    if (out.size() > 1_MiB) flush();
  }
  flush();
  const std::uint64_t bytes = at_ - begin, members = members_.size();
  if (members >= k16 || bytes >= k32 || begin >= k32) {
    const std::uint64_t at = at_;
    put(out, kEnd64Magic);
    put(out, std::uint64_t{kEnd64Bytes - 12});
    put(out, std::uint16_t{3 << 8 | 45});
    put(out, std::uint16_t{45});
    put(out, std::uint32_t{0});
    put(out, std::uint32_t{0});
    put(out, members);
    put(out, members);
    put(out, bytes);
    put(out, begin);
    put(out, kLocator64Magic);
    put(out, std::uint32_t{0});
    put(out, at);
    put(out, std::uint32_t{1});
  }
  put(out, kEndMagic);
  put(out, std::uint16_t{0});
  put(out, std::uint16_t{0});
  put(out, static_cast<std::uint16_t>(std::min<std::uint64_t>(members, k16)));
  put(out, static_cast<std::uint16_t>(std::min<std::uint64_t>(members, k16)));
  put(out, static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes, k32)));
  put(out, static_cast<std::uint32_t>(std::min<std::uint64_t>(begin, k32)));
  put(out, static_cast<std::uint16_t>(comment_.size()));
  out += comment_;
  flush();
}

bool begins_like_zip(std::span<const std::byte> head) {
  return head.size() >= 4 && (u32(head, 0) == kLocalMagic || u32(head, 0) == kEndMagic);
}

}  // namespace embermap
