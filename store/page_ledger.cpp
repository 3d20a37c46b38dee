#include "store/page_ledger.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/checked.hpp"
#include "io/checksum.hpp"

namespace embermap {
namespace {

constexpr std::uint64_t kHeaderBytes = 4096;
constexpr char kMagic[8] = {'E', 'M', 'B', 'P', 'A', 'G', 'E', 'S'};
constexpr std::uint32_t kVersion = 2;
constexpr std::uint32_t kVersionWithoutSectorChecksums = 1;
constexpr std::uint32_t kAdopted = 1;
constexpr std::size_t kMaxPending = (4U << 20) / 64;  // a map entry takes about 64 bytes

struct Header {
  char magic[8];
  std::uint32_t version, flags;
  std::uint64_t pages, sums_offset, checksum;
};
static_assert(sizeof(Header) == 40 && std::is_trivially_copyable_v<Header>);

std::uint64_t header_checksum(const Header& header) {
  return checksum64(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, checksum)));
}

// Of an adopted file, behind the header, in the same sector.
constexpr std::uint64_t kStampOffset = sizeof(Header);
struct StoredStamp {
  std::uint64_t bytes;
  std::int64_t modified_ns;
  std::uint64_t inode, checksum;
};
static_assert(sizeof(StoredStamp) == 32 && std::is_trivially_copyable_v<StoredStamp>);

std::uint64_t stamp_checksum(const StoredStamp& stamp) {
  return checksum64(std::as_bytes(std::span(&stamp, 1)).first(offsetof(StoredStamp, checksum)));
}

void write_stamp(const File& file, const std::optional<FileStamp>& stamp) {
  StoredStamp stored{};
  if (stamp) {
    stored = {stamp->bytes, stamp->modified_ns, stamp->inode, 0};
    stored.checksum = stamp_checksum(stored);
  }
  file.write(kStampOffset, std::as_bytes(std::span(&stored, 1)));
}

// Of every file, behind that.
constexpr std::uint64_t kCommitOffset = kStampOffset + sizeof(StoredStamp);
struct StoredCommit {
  std::uint64_t commit, checksum;
};
static_assert(kCommitOffset + sizeof(StoredCommit) <= 512);

std::uint64_t commit_checksum(const StoredCommit& stored) {
  return checksum64(std::as_bytes(std::span(&stored, 1)).first(offsetof(StoredCommit, checksum)));
}

void write_commit(const File& file, const std::optional<std::uint64_t>& commit) {
  StoredCommit stored{};
  if (commit) {
    stored.commit = *commit;
    stored.checksum = commit_checksum(stored);
  }
  file.write(kCommitOffset, std::as_bytes(std::span(&stored, 1)));
}

Header make_header(std::uint32_t flags, std::uint64_t pages, std::uint64_t sums_offset) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.flags = flags;
  header.pages = pages;
  header.sums_offset = sums_offset;
  header.checksum = header_checksum(header);
  return header;
}

bool only_zeros(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

bool is_writable(const File& file) {
  const int flags = ::fcntl(file.fd(), F_GETFL);
  return flags >= 0 && (flags & O_ACCMODE) == O_RDWR;
}

// Where the file has data, from `offset` on; nullopt if there is none. `offset` itself where the file system does not tell.
std::optional<std::uint64_t> next_data(const File& file, std::uint64_t offset) {
  const off_t data = ::lseek(file.fd(), static_cast<off_t>(offset), SEEK_DATA);
  if (data >= 0) return static_cast<std::uint64_t>(data);
  return errno == ENXIO ? std::nullopt : std::optional(offset);
}

}  // namespace

template <class T>
PageLedger::Zeroed<T> PageLedger::make_zeroed(std::uint64_t count) {
  auto* memory = static_cast<T*>(std::calloc(std::max<std::uint64_t>(count, 1), sizeof(T)));
  if (memory == nullptr) throw std::bad_alloc();
  return Zeroed<T>(memory);
}

PageLedger::PageLedger(File file, std::uint64_t pages, std::uint32_t flags, std::uint32_t version, std::uint64_t sums_offset)
    : file_{std::move(file)},
      pages_{pages},
      flags_{flags},
      content_{version == kVersion ? kContent : kSectorBytes},
      sums_offset_{sums_offset} {
  bits_ = make_zeroed<std::uint8_t>(bits_size());
  dirty_bits_.resize(ceil_div(bits_size(), kBlockBytes));
}

std::uint64_t PageLedger::sums_offset_for(std::uint64_t pages, std::uint32_t version) {
  const std::uint64_t content = version == kVersion ? kContent : kSectorBytes;
  const std::uint64_t sectors = ceil_div(ceil_div(pages, 8), content);
  return kHeaderBytes + std::bit_ceil(std::max<std::uint64_t>(sectors * kSectorBytes, 4096));
}

std::uint64_t PageLedger::file_bytes(std::uint64_t sums_offset, std::uint64_t pages, std::uint32_t version) {
  const std::uint64_t sums =
      version == kVersion ? ceil_div(checksum_bytes(pages), kContent) * kSectorBytes : checksum_bytes(pages);
  return checked_add(sums_offset, sums, "bytes of the page file");
}

PageLedger::PageLedger(PageLedger&& other) noexcept
    : file_{std::move(other.file_)},
      pages_{other.pages_},
      flags_{other.flags_},
      content_{other.content_},
      sums_offset_{other.sums_offset_},
      stamp_{other.stamp_},
      number_{other.number_},
      bad_bits_{std::move(other.bad_bits_)},
      bad_sums_{std::move(other.bad_sums_)},
      bits_{std::move(other.bits_)},
      dirty_bits_{std::move(other.dirty_bits_)},
      sums_{std::move(other.sums_)},
      dirty_sums_{std::move(other.dirty_sums_)},
      pending_sums_{std::move(other.pending_sums_)} {}

std::uint64_t PageLedger::bits_size() const { return (sums_offset_ - kHeaderBytes) / kSectorBytes * content_; }

void PageLedger::write_header(const File& file) const {
  const Header header = make_header(flags_, pages_, sums_offset_);
  file.write(0, std::as_bytes(std::span(&header, 1)));
}

PageLedger PageLedger::create(File file, std::uint64_t pages, bool adopted, std::optional<std::uint64_t> commit) {
  PageLedger ledger(std::move(file), pages, adopted ? kAdopted : 0, kVersion, sums_offset_for(pages, kVersion));
  ledger.file_.resize(file_bytes(ledger.sums_offset_, pages, kVersion));
  ledger.write_header(ledger.file_);
  if (commit) ledger.set_commit(*commit);
  ledger.file_.sync();
  return ledger;
}

PageLedger PageLedger::open(File file) {
  Header header{};
  const std::uint64_t size = file.size();
  if (size < kHeaderBytes)
    throw FormatError(file.path(), fmt::format("truncated page file: {} bytes, its header has {}", size, kHeaderBytes));
  file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    throw FormatError(file.path(), "not a page file: no magic at byte 0");
  if (header.version != kVersion && header.version != kVersionWithoutSectorChecksums)
    throw FormatError(file.path(), fmt::format("page file of version {}; this embermap reads versions {} and {}", header.version,
                                               kVersionWithoutSectorChecksums, kVersion));
  if (header.checksum != header_checksum(header))
    throw FormatError(file.path(), "the page file's header does not match its checksum");
  // What the file could hold at most, before memory is taken for it.
  if (header.pages > size / 4)
    throw FormatError(file.path(), fmt::format("truncated page file: {} bytes for {} pages", size, header.pages));
  if (header.sums_offset > size || header.sums_offset < sums_offset_for(header.pages, header.version) ||
      !std::has_single_bit(header.sums_offset - kHeaderBytes))
    throw FormatError(file.path(), fmt::format("the page file's checksums cannot begin at byte {}", header.sums_offset));
  const std::uint64_t need = file_bytes(header.sums_offset, header.pages, header.version);
  if (size < need) throw FormatError(file.path(), fmt::format("truncated page file: {} of {} bytes", size, need));
  const std::filesystem::path path = file.path();
  try {
    PageLedger ledger(std::move(file), header.pages, header.flags, header.version, header.sums_offset);
    ledger.load_bits();
    ledger.load_stamp();
    if (header.version != kVersion && is_writable(ledger.file_)) ledger.rewrite(header.pages);
    return ledger;
  } catch (const std::bad_alloc&) {
    throw FormatError(path, fmt::format("there is no memory for the bits of its {} pages", header.pages));
  }
}

// ---- sectors ----

bool PageLedger::matches(const Region& region, std::uint64_t sector, std::span<const std::byte> whole) const {
  if (content_ != kContent) return true;
  std::uint32_t recorded = 0;
  std::memcpy(&recorded, whole.data() + kContent, sizeof recorded);
  return recorded == sector_checksum(whole.first(kContent), region.offset / kSectorBytes + sector);
}

void PageLedger::read_checksums_of(std::span<const std::uint64_t> pages, std::span<std::uint32_t> out, ThreadPool& io) const {
  const Region region = sums_region();
  // Where the pages of each sector begin.
  std::vector<std::uint64_t> begins;
  for (std::uint64_t i = 0; i < pages.size(); ++i)
    if (i == 0 || pages[i] / pages_of_sums() != pages[i - 1] / pages_of_sums()) begins.push_back(i);
  io.parallel_for(begins.size(), 1, [&](std::uint64_t begin, std::uint64_t end) {
    std::array<std::byte, kSectorBytes> buffer;
    for (std::uint64_t group = begin; group < end; ++group) {
      const std::uint64_t first = begins[group], last = group + 1 < begins.size() ? begins[group + 1] : pages.size();
      const std::uint64_t sector = pages[first] / pages_of_sums();
      const auto read = [&] {
        const std::uint64_t got = file_.read_some(region.offset + sector * kSectorBytes, buffer);
        std::memset(buffer.data() + got, 0, buffer.size() - got);
        return matches(region, sector, buffer);
      };
      if (!read()) {
        // It may have been written at that moment, which is done with the lock taken.
        const std::lock_guard lock(mutex_);
        if (!read()) {
          bad_sums_.insert(sector);
          throw_damaged(region, sector, pages_of_sums());
        }
      }
      for (std::uint64_t i = first; i < last; ++i)
        std::memcpy(&out[i], buffer.data() + pages[i] % pages_of_sums() * sizeof(std::uint32_t), sizeof(std::uint32_t));
    }
  });
  // Memory of the page cache counts: it keeps 4 KiB of each of these.
  constexpr std::uint64_t kMostCached = 4096;
  const std::uint64_t before = sums_read_.fetch_add(begins.size(), std::memory_order_relaxed);
  if (before / kMostCached != (before + begins.size()) / kMostCached)
    (void)::posix_fadvise(file_.fd(), static_cast<off_t>(sums_offset_), 0, POSIX_FADV_DONTNEED);
}

void PageLedger::read_sectors(const Region& region, std::uint64_t first, std::uint64_t count, std::byte* out) const {
  constexpr std::uint64_t kTogether = 2048;
  std::vector<std::byte> buffer(std::min(count, kTogether) * kSectorBytes);
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t some = std::min(count - done, kTogether);
    const std::uint64_t offset = region.offset + (first + done) * kSectorBytes;
    const auto piece = std::span(buffer).first(some * kSectorBytes);
    // Version 1 ends inside a sector.
    const std::uint64_t got = file_.read_some(offset, piece);
    std::memset(piece.data() + got, 0, piece.size() - got);
    for (std::uint64_t i = 0; i < some; ++i) {
      const std::uint64_t sector = first + done + i;
      const auto whole = piece.subspan(i * kSectorBytes, kSectorBytes);
      if (!matches(region, sector, whole)) {
        // Another process may have been writing it: once more.
        file_.read_some(region.offset + sector * kSectorBytes, whole);
        if (!matches(region, sector, whole)) region.bad.insert(sector);
      }
      const auto content = whole.first(content_);
      // Zeros are not copied: memory that nobody touched stays so.
      if (!only_zeros(content)) std::memcpy(out + (done + i) * content_, content.data(), content.size());
    }
    done += some;
  }
}

void PageLedger::write_sectors(const File& file, std::uint64_t offset, std::uint64_t first, std::span<const std::byte> content) {
  std::vector<std::byte> buffer(ceil_div(content.size(), kContent) * kSectorBytes);
  for (std::uint64_t at = 0, sector = 0; at < content.size(); at += kContent, ++sector) {
    const auto piece = content.subspan(at, std::min<std::uint64_t>(kContent, content.size() - at));
    const auto whole = std::span(buffer).subspan(sector * kSectorBytes, kSectorBytes);
    std::memcpy(whole.data(), piece.data(), piece.size());
    const std::uint32_t sum = sector_checksum(whole.first(kContent), offset / kSectorBytes + first + sector);
    std::memcpy(whole.data() + kContent, &sum, sizeof sum);
  }
  file.write(offset + first * kSectorBytes, buffer);
}

void PageLedger::write_block(const Region& region, std::uint64_t block, std::span<const std::byte> content) const {
  const std::uint64_t first = block * kBlockSectors;
  const auto bad = region.bad.lower_bound(first);
  if (bad == region.bad.end() || *bad >= first + kBlockSectors) return write_sectors(file_, region.offset, first, content);
  for (std::uint64_t sector = first; !content.empty(); ++sector) {
    const auto piece = content.first(std::min<std::uint64_t>(kContent, content.size()));
    content = content.subspan(piece.size());
    if (!region.bad.contains(sector)) write_sectors(file_, region.offset, sector, piece);
  }
}

void PageLedger::throw_damaged(const Region& region, std::uint64_t sector, std::uint64_t pages_each) const {
  const std::uint64_t first = sector * pages_each;
  throw CorruptError(fmt::format(
      "{}: bytes [{}, +{}) do not match their checksum; they tell {} of pages {} to {}. 'embermap verify' shows what is damaged",
      printable(file_.path()), region.offset + sector * kSectorBytes, kSectorBytes,
      &region.bad == &bad_bits_ ? "which were written" : "the checksums", first, std::min(first + pages_each, pages_) - 1));
}

void PageLedger::check_bit(std::uint64_t page) const {
  if (!bad_bits_.empty() && bad_bits_.contains(page / pages_of_bits()))
    throw_damaged(bits_region(), page / pages_of_bits(), pages_of_bits());
}

void PageLedger::check_sum(std::uint64_t page) const {
  if (!bad_sums_.empty() && bad_sums_.contains(page / pages_of_sums()))
    throw_damaged(sums_region(), page / pages_of_sums(), pages_of_sums());
}

void PageLedger::load_bits() {
  const std::uint64_t end = ceil_div(ceil_div(pages_, 8), content_);
  constexpr std::uint64_t kTogether = 2048;
  for (std::uint64_t sector = 0; sector < end; sector += kTogether) {
    const auto data = next_data(file_, kHeaderBytes + sector * kSectorBytes);
    if (!data) break;
    sector = (*data - kHeaderBytes) / kSectorBytes;
    if (sector >= end) break;
    read_sectors(bits_region(), sector, std::min(kTogether, end - sector),
                 reinterpret_cast<std::byte*>(bits_.get()) + sector * content_);
  }
  // What stands behind the last page is nothing to count, nor to find when the table grows.
  if (pages_ % 8 != 0) bits_[pages_ / 8] = static_cast<std::uint8_t>(bits_[pages_ / 8] & ((1U << (pages_ % 8)) - 1));
  const std::uint64_t used = ceil_div(pages_, 8);
  std::memset(bits_.get() + used, 0, std::min(end * content_, bits_size()) - used);
}

void PageLedger::load_stamp() {
  StoredStamp stored{};
  file_.read(kStampOffset, std::as_writable_bytes(std::span(&stored, 1)));
  if (adopted() && stored.checksum == stamp_checksum(stored)) stamp_ = {stored.bytes, stored.modified_ns, stored.inode};
  number_ = read_number(file_);
}

PageLedger::Number PageLedger::read_number(const File& file) {
  char magic[sizeof kMagic];
  file.read(0, std::as_writable_bytes(std::span(magic)));
  if (std::memcmp(magic, kMagic, sizeof kMagic) != 0) throw FormatError(file.path(), "not a page file: no magic at byte 0");
  // A writer in another process may be writing it: once more then.
  constexpr int kMostReads = 3;
  for (int reads = 0; reads < kMostReads; ++reads) {
    StoredCommit stored{};
    file.read(kCommitOffset, std::as_writable_bytes(std::span(&stored, 1)));
    if (stored.commit == 0 && stored.checksum == 0) return {};
    if (stored.checksum == commit_checksum(stored)) return {.commit = stored.commit};
  }
  return {.commit = std::nullopt, .damaged = true};
}

PageLedger::Number PageLedger::number() const {
  const std::lock_guard lock(mutex_);
  return number_;
}

void PageLedger::set_commit(std::uint64_t commit) {
  const std::lock_guard lock(mutex_);
  write_commit(file_, commit);
  number_ = {.commit = commit};
}

std::optional<FileStamp> PageLedger::stamp() const {
  const std::lock_guard lock(mutex_);
  return stamp_;
}

void PageLedger::set_stamp(const std::optional<FileStamp>& stamp) {
  const std::lock_guard lock(mutex_);
  write_stamp(file_, stamp);
  stamp_ = stamp;
}

void PageLedger::forget_stamp() {
  const std::lock_guard lock(mutex_);
  stamp_.reset();
}

void PageLedger::load_sums(std::uint64_t first, std::span<std::uint32_t> out) const {
  if (out.empty()) return;
  const std::uint64_t begin = first / pages_of_sums(), end = ceil_div(first + out.size(), pages_of_sums());
  std::vector<std::uint32_t> sums((end - begin) * pages_of_sums());
  read_sectors(sums_region(), begin, end - begin, reinterpret_cast<std::byte*>(sums.data()));
  std::memcpy(out.data(), sums.data() + (first - begin * pages_of_sums()), out.size_bytes());
}

bool PageLedger::written(std::uint64_t page) const {
  if ((flags_ & kAdopted) != 0) return true;
  const std::lock_guard lock(mutex_);
  check_bit(page);
  return (bits_[page / 8] >> (page % 8) & 1U) != 0;
}

std::uint64_t PageLedger::count_written() const {
  if ((flags_ & kAdopted) != 0) return pages_;
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  for (std::uint64_t i = 0; i < ceil_div(pages_, 8); ++i) count += static_cast<std::uint64_t>(std::popcount(bits_[i]));
  return count;
}

std::uint64_t PageLedger::next_written(std::uint64_t page) const {
  for (; page < pages_ && page % 64 != 0; ++page)
    if ((bits_[page / 8] >> (page % 8) & 1U) != 0) return page;
  if (page >= pages_) return pages_;
  const std::uint64_t bytes = ceil_div(pages_, 8);
  std::uint64_t at = page / 8;
  for (std::uint64_t word = 0; at + 8 <= bytes; at += 8) {
    std::memcpy(&word, bits_.get() + at, 8);
    if (word != 0) return std::min(pages_, at * 8 + static_cast<std::uint64_t>(std::countr_zero(word)));
  }
  for (page = std::max(page, at * 8); page < pages_; ++page)  // never back: the table may end inside a byte
    if ((bits_[page / 8] >> (page % 8) & 1U) != 0) return page;
  return pages_;
}

std::uint64_t PageLedger::next_checksum(std::uint64_t page) const {
  std::uint64_t next = pages_;
  if (const auto at = pending_sums_.lower_bound(page); at != pending_sums_.end()) next = std::min(next, at->first);
  if (const auto at = dirty_sums_.lower_bound(page / kBlockSums); at != dirty_sums_.end())
    next = std::min(next, std::max(page, at->first * kBlockSums));
  const auto data = next_data(file_, sums_offset_ + page / pages_of_sums() * kSectorBytes);
  if (!data) return next;  // nothing but a hole to the end
  return std::min(next, std::max(page, (*data - sums_offset_) / kSectorBytes * pages_of_sums()));
}

std::uint64_t PageLedger::next_marked(std::uint64_t page) const {
  const std::lock_guard lock(mutex_);
  if (page >= pages_ || (flags_ & kAdopted) != 0) return std::min(page, pages_);
  return std::min(next_written(page), next_checksum(page));
}

void PageLedger::record(std::uint64_t page, std::uint32_t checksum) {
  const std::lock_guard lock(mutex_);
  // The sector is written as a whole: what else stood in it would be lost.
  check_bit(page);
  check_sum(page);
  bits_[page / 8] = static_cast<std::uint8_t>(bits_[page / 8] | 1U << (page % 8));
  dirty_bits_[page / 8 / kBlockBytes] = true;
  if (sums_) {
    sums_[page] = checksum;
    dirty_sums_[page / kBlockSums] = true;
  } else {
    pending_sums_[page] = checksum;
    if (pending_sums_.size() > kMaxPending) flush_locked();
  }
}

void PageLedger::keep_checksums() {
  const std::lock_guard lock(mutex_);
  if (sums_) return;
  flush_locked();
  // To the end of the last sector: it is read and written whole.
  const std::uint64_t sectors = ceil_div(pages_, pages_of_sums());
  auto sums = make_zeroed<std::uint32_t>(sectors * pages_of_sums());
  constexpr std::uint64_t kTogether = 2048;
  for (std::uint64_t sector = 0; sector < sectors; sector += kTogether) {
    const auto data = next_data(file_, sums_offset_ + sector * kSectorBytes);
    if (!data) break;
    sector = (*data - sums_offset_) / kSectorBytes;
    if (sector >= sectors) break;
    read_sectors(sums_region(), sector, std::min(kTogether, sectors - sector),
                 reinterpret_cast<std::byte*>(sums.get() + sector * pages_of_sums()));
  }
  std::memset(sums.get() + pages_, 0, (sectors * pages_of_sums() - pages_) * 4);
  sums_ = std::move(sums);
}

void PageLedger::drop_checksums() {
  const std::lock_guard lock(mutex_);
  if (!sums_) return;
  flush_locked();
  sums_.reset();
}

std::uint64_t PageLedger::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return bits_bytes(pages_) + (sums_ ? checksum_bytes(pages_) : 0);
}

std::optional<std::uint32_t> PageLedger::checksum(std::uint64_t page) const {
  const std::lock_guard lock(mutex_);
  std::uint32_t sum = 0;
  if (sums_) {
    check_sum(page);
    sum = sums_[page];
  } else if (const auto found = pending_sums_.find(page); found != pending_sums_.end()) {
    sum = found->second;
  }
  return sum == 0 ? std::nullopt : std::optional(sum);
}

void PageLedger::read_checksums(std::uint64_t first, std::span<std::uint32_t> out) const {
  const std::lock_guard lock(mutex_);
  if (sums_) {
    std::memcpy(out.data(), sums_.get() + first, out.size_bytes());
  } else {
    load_sums(first, out);
    for (auto at = pending_sums_.lower_bound(first); at != pending_sums_.end() && at->first < first + out.size(); ++at)
      out[at->first - first] = at->second;
  }
  const auto bad = bad_sums_.lower_bound(first / pages_of_sums());
  if (bad != bad_sums_.end() && *bad * pages_of_sums() < first + out.size()) throw_damaged(sums_region(), *bad, pages_of_sums());
}

void PageLedger::read_marks(std::uint64_t first, std::span<PageMark> out) const {
  std::vector<std::uint32_t> sums(out.size());
  try {
    read_checksums(first, sums);
  } catch (const CorruptError&) {  // `sums` is filled all the same; what of it is damaged is known now
  }
  const std::lock_guard lock(mutex_);
  for (std::uint64_t i = 0; i < out.size(); ++i) {
    const std::uint64_t page = first + i;
    out[i] = {.written = adopted() || (bits_[page / 8] >> (page % 8) & 1U) != 0,
              .checksum = sums[i],
              .damaged = bad_bits_.contains(page / pages_of_bits()) || bad_sums_.contains(page / pages_of_sums())};
  }
}

void PageLedger::forget_damage() {
  const std::lock_guard lock(mutex_);
  flush_locked();
  // All that is damaged, which so far is known of the sectors that were read.
  std::vector<std::uint32_t> block(kBlockSums);
  for (std::uint64_t first = next_checksum(0); first < pages_; first = next_checksum(first + block.size())) {
    first = first / kBlockSums * kBlockSums;
    load_sums(first, std::span(block).first(std::min(kBlockSums, pages_ - first)));
  }
  for (const std::uint64_t sector : bad_bits_) {
    const std::uint64_t first = sector * pages_of_bits();
    std::vector<std::uint32_t> sums(std::min(pages_of_bits(), pages_ - first));
    load_sums(first, sums);
    dirty_bits_[sector / kBlockSectors] = true;
    const auto bad = bad_sums_.lower_bound(first / pages_of_sums());
    if (bad != bad_sums_.end() && *bad * pages_of_sums() < first + sums.size()) continue;
    std::memset(bits_.get() + sector * content_, 0, content_);
    for (std::uint64_t i = 0; i < sums.size(); ++i)
      if (sums[i] != 0) bits_[(first + i) / 8] = static_cast<std::uint8_t>(bits_[(first + i) / 8] | 1U << ((first + i) % 8));
  }
  const std::vector<std::byte> nothing(kContent);
  for (const std::uint64_t sector : bad_sums_) {
    if (sums_) std::memset(sums_.get() + sector * pages_of_sums(), 0, kContent);
    write_sectors(file_, sums_offset_, sector, nothing);
  }
  bad_bits_.clear();
  bad_sums_.clear();
}

void PageLedger::write_out() {
  const std::lock_guard lock(mutex_);
  flush_locked();
}

void PageLedger::sync() {
  const std::lock_guard lock(mutex_);
  file_.sync();
}

bool PageLedger::keeps_checksums() const {
  const std::lock_guard lock(mutex_);
  return sums_ != nullptr;
}

bool PageLedger::adopted() const noexcept { return (flags_ & kAdopted) != 0; }

void PageLedger::forget_unwritten() {
  if (adopted()) return;
  std::vector<std::uint32_t> block(kBlockSums);
  for (std::uint64_t first = next_marked(0); first < pages_; first = next_marked(first + kBlockSums)) {
    const auto piece = std::span(block).first(std::min(kBlockSums, pages_ - first));
    read_checksums(first, piece);
    const std::lock_guard lock(mutex_);
    for (std::uint64_t i = 0; i < piece.size(); ++i) {
      const std::uint64_t page = first + i;
      if (piece[i] == 0 || (bits_[page / 8] >> (page % 8) & 1U) != 0) continue;
      if (sums_) {
        sums_[page] = 0;
        dirty_sums_[page / kBlockSums] = true;
      } else {
        pending_sums_[page] = 0;
      }
    }
  }
}

void PageLedger::flush_locked() {
  // Checksums before bits: a page must not count as written before its checksum could be there.
  const auto bytes = [](const auto* begin, std::uint64_t count) { return std::as_bytes(std::span(begin, count)); };
  if (sums_) {
    for (const auto& [block, dirty] : dirty_sums_) {
      const std::uint64_t first = block * kBlockSums;
      const std::uint64_t count = std::min(kBlockSums, pages_ - first);
      write_block(sums_region(), block, bytes(sums_.get() + first, count));
    }
    dirty_sums_.clear();
  }
  flush_pending();
  for (std::uint64_t block = 0; block < dirty_bits_.size(); ++block) {
    if (!dirty_bits_[block]) continue;
    write_block(bits_region(), block, bytes(bits_.get() + block * kBlockBytes, kBlockBytes));
    dirty_bits_[block] = false;
  }
}

void PageLedger::flush_pending() {
  std::vector<std::uint32_t> sums(kBlockSums);
  while (!pending_sums_.empty()) {
    const std::uint64_t block = pending_sums_.begin()->first / kBlockSums;
    const std::uint64_t first = block * kBlockSums;
    const auto piece = std::span(sums).first(std::min(kBlockSums, pages_ - first));
    load_sums(first, piece);
    const auto end = pending_sums_.lower_bound(first + piece.size());
    for (auto at = pending_sums_.begin(); at != end; ++at) {
      check_sum(at->first);
      sums[at->first - first] = at->second;
    }
    // Only the sectors that change: a damaged one beside them stays as it is.
    for (std::uint64_t sector = 0, done = 0; done < piece.size(); ++sector, done += kContent / 4) {
      const auto part = piece.subspan(done, std::min<std::uint64_t>(kContent / 4, piece.size() - done));
      const auto at = pending_sums_.lower_bound(first + done);
      if (at == pending_sums_.end() || at->first >= first + done + part.size()) continue;
      write_sectors(file_, sums_offset_, block * kBlockSectors + sector, std::as_bytes(part));
    }
    pending_sums_.erase(pending_sums_.begin(), end);
  }
}

void PageLedger::resize(std::uint64_t pages) {
  const std::lock_guard lock(mutex_);
  flush_locked();
  // Bits past the end are zero, so that pages that come back are pages never written.
  for (std::uint64_t page = pages; page < pages_; ++page) {
    if (page % 8 == 0 && bits_[page / 8] == 0) {
      page += 7;
      continue;
    }
    bits_[page / 8] = static_cast<std::uint8_t>(bits_[page / 8] & ~(1U << (page % 8)));
    dirty_bits_[page / 8 / kBlockBytes] = true;
  }
  const std::uint64_t old_pages = pages_;
  if (sums_offset_for(pages, kVersion) <= sums_offset_) {
    flush_locked();
    clear_behind(std::min(pages, old_pages));
    const std::uint64_t bytes = file_bytes(sums_offset_, pages, kVersion);
    // The header never promises more pages than the file has room for, on the disk as well: each step is durable before the next.
    // What is cut off is gone for good, also when it comes back.
    if (pages > old_pages) {
      file_.resize(bytes);
      file_.sync();
    }
    pages_ = pages;
    write_header(file_);
    file_.sync();
    if (pages < old_pages) {
      file_.resize(bytes);
      file_.sync();
    }
    bad_bits_.erase(bad_bits_.lower_bound(ceil_div(pages, pages_of_bits())), bad_bits_.end());
    bad_sums_.erase(bad_sums_.lower_bound(ceil_div(pages, pages_of_sums())), bad_sums_.end());
  } else {
    rewrite(pages);
  }
  if (sums_) {
    auto sums = make_zeroed<std::uint32_t>(ceil_div(pages, pages_of_sums()) * pages_of_sums());
    std::memcpy(sums.get(), sums_.get(), checksum_bytes(std::min(old_pages, pages)));
    sums_ = std::move(sums);
  }
}

void PageLedger::clear_behind(std::uint64_t pages) {
  const std::uint64_t sector = pages / pages_of_sums(), kept = pages % pages_of_sums();
  if (kept == 0) return;
  std::vector<std::uint32_t> sums(pages_of_sums());
  read_sectors(sums_region(), sector, 1, reinterpret_cast<std::byte*>(sums.data()));
  check_sum(pages - 1);
  if (only_zeros(std::as_bytes(std::span(sums).subspan(kept)))) return;
  write_sectors(file_, sums_offset_, sector, std::as_bytes(std::span(sums).first(kept)));
}

void PageLedger::rewrite(std::uint64_t pages) {
  const Header header = make_header(flags_, pages, sums_offset_for(std::max(pages, pages_), kVersion));
  if (!bad_bits_.empty()) throw_damaged(bits_region(), *bad_bits_.begin(), pages_of_bits());
  TemporaryFile temporary = TemporaryFile::create(file_.path(), /*overwrite=*/true, file_.ops());
  const File& file = temporary.file();
  file.resize(file_bytes(header.sums_offset, pages, kVersion));
  const std::uint64_t size = (header.sums_offset - kHeaderBytes) / kSectorBytes * kContent;
  auto bits = make_zeroed<std::uint8_t>(size);
  const std::uint64_t used = ceil_div(std::min(pages, pages_), 8);
  for (std::uint64_t at = 0; at < used; at += kBlockBytes) {  // holes stay holes
    const auto piece = std::span(bits_.get() + at, std::min(kBlockBytes, used - at));
    if (only_zeros(std::as_bytes(piece))) continue;
    std::memcpy(bits.get() + at, piece.data(), piece.size());
    write_sectors(file, kHeaderBytes, at / kContent, std::as_bytes(piece));
  }
  std::vector<std::uint32_t> sums(64 * kBlockSums);
  const std::uint64_t end = std::min(pages, pages_);
  for (std::uint64_t first = next_checksum(0); first < end; first = next_checksum(first + sums.size())) {
    first = first / kBlockSums * kBlockSums;
    const auto piece = std::span(sums).first(std::min<std::uint64_t>(sums.size(), end - first));
    load_sums(first, piece);
    if (!bad_sums_.empty()) throw_damaged(sums_region(), *bad_sums_.begin(), pages_of_sums());
    for (std::uint64_t at = 0; at < piece.size(); at += kBlockSums) {
      const auto block = std::as_bytes(piece.subspan(at, std::min<std::uint64_t>(kBlockSums, piece.size() - at)));
      if (!only_zeros(block)) write_sectors(file, header.sums_offset, (first + at) / (kContent / 4), block);
    }
  }
  file.write(0, std::as_bytes(std::span(&header, 1)));
  write_stamp(file, stamp_);
  write_commit(file, number_.commit);
  file_ = temporary.commit();
  pages_ = pages;
  content_ = kContent;
  sums_offset_ = header.sums_offset;
  bits_ = std::move(bits);
  dirty_bits_.assign(size / kBlockBytes, false);
}

void PageLedger::close() {
  const std::lock_guard lock(mutex_);
  file_.close();
}

}  // namespace embermap
