#include "store/page_ledger.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
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
constexpr std::uint32_t kVersion = 1;
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

std::uint64_t sums_offset_for(std::uint64_t pages) {
  return kHeaderBytes + std::bit_ceil(std::max<std::uint64_t>(ceil_div(pages, 8), 4096));
}

}  // namespace

template <class T>
PageLedger::Zeroed<T> PageLedger::make_zeroed(std::uint64_t count) {
  auto* memory = static_cast<T*>(std::calloc(std::max<std::uint64_t>(count, 1), sizeof(T)));
  if (memory == nullptr) throw std::bad_alloc();
  return Zeroed<T>(memory);
}

PageLedger::PageLedger(File file, std::uint64_t pages, std::uint32_t flags)
    : file_{std::move(file)}, pages_{pages}, flags_{flags}, sums_offset_{sums_offset_for(pages)} {
  bits_ = make_zeroed<std::uint8_t>(bits_room());
  dirty_bits_.resize(bits_room() / kBlockBytes);
}

PageLedger::PageLedger(PageLedger&& other) noexcept
    : file_{std::move(other.file_)},
      pages_{other.pages_},
      flags_{other.flags_},
      sums_offset_{other.sums_offset_},
      bits_{std::move(other.bits_)},
      dirty_bits_{std::move(other.dirty_bits_)},
      sums_{std::move(other.sums_)},
      dirty_sums_{std::move(other.dirty_sums_)},
      pending_sums_{std::move(other.pending_sums_)} {}

std::uint64_t PageLedger::bits_room() const { return sums_offset_ - kHeaderBytes; }

void PageLedger::write_header(const File& file) const {
  const Header header = make_header(flags_, pages_, sums_offset_);
  file.write(0, std::as_bytes(std::span(&header, 1)));
}

PageLedger PageLedger::create(File file, std::uint64_t pages, bool adopted) {
  PageLedger ledger(std::move(file), pages, adopted ? kAdopted : 0);
  ledger.file_.resize(ledger.sums_offset_ + checksum_bytes(pages));
  ledger.write_header(ledger.file_);
  ledger.file_.sync();
  return ledger;
}

PageLedger PageLedger::open(File file) {
  Header header{};
  if (file.size() < kHeaderBytes)
    throw FormatError(file.path(), fmt::format("truncated page file: {} bytes, its header has {}", file.size(), kHeaderBytes));
  file.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    throw FormatError(file.path(), "not a page file: no magic at byte 0");
  if (header.version != kVersion)
    throw FormatError(file.path(),
                      fmt::format("page file of version {}; this embermap reads version {}", header.version, kVersion));
  if (header.checksum != header_checksum(header))
    throw FormatError(file.path(), "the page file's header does not match its checksum");
  // What the file could hold at most, before memory is taken for it.
  if (header.pages / 4 > file.size())
    throw FormatError(file.path(), fmt::format("truncated page file: {} bytes for {} pages", file.size(), header.pages));
  PageLedger ledger(std::move(file), header.pages, header.flags);
  if (header.sums_offset < ledger.sums_offset_ || !std::has_single_bit(header.sums_offset - kHeaderBytes))
    throw FormatError(ledger.file_.path(), fmt::format("the page file's checksums cannot begin at byte {}", header.sums_offset));
  const std::uint64_t need = checked_add(header.sums_offset, checksum_bytes(header.pages), "bytes of the page file");
  if (ledger.file_.size() < need)
    throw FormatError(ledger.file_.path(), fmt::format("truncated page file: {} of {} bytes", ledger.file_.size(), need));
  if (header.sums_offset != ledger.sums_offset_) {  // it once held more pages
    ledger.sums_offset_ = header.sums_offset;
    ledger.bits_ = make_zeroed<std::uint8_t>(ledger.bits_room());
    ledger.dirty_bits_.assign(ledger.bits_room() / kBlockBytes, false);
  }
  ledger.load_bits();
  return ledger;
}

void PageLedger::load_bits() {
  // Blocks of zeros are not copied: their memory stays untouched.
  std::vector<std::byte> block(1U << 20);
  const std::uint64_t bytes = ceil_div(pages_, 8);
  for (std::uint64_t at = 0; at < bytes; at += block.size()) {
    const auto piece = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - at));
    file_.read(kHeaderBytes + at, piece);
    for (std::uint64_t i = 0; i < piece.size(); i += kBlockBytes) {
      const auto part = piece.subspan(i, std::min<std::uint64_t>(kBlockBytes, piece.size() - i));
      if (std::any_of(part.begin(), part.end(), [](std::byte b) { return b != std::byte{0}; }))
        std::memcpy(bits_.get() + at + i, part.data(), part.size());
    }
  }
  // What stands behind the last page is nothing to count, nor to find when the table grows.
  if (pages_ % 8 != 0) bits_[pages_ / 8] = static_cast<std::uint8_t>(bits_[pages_ / 8] & ((1U << (pages_ % 8)) - 1));
}

bool PageLedger::written(std::uint64_t page) const {
  if ((flags_ & kAdopted) != 0) return true;
  const std::lock_guard lock(mutex_);
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
  const auto from = static_cast<off_t>(sums_offset_ + page * 4);
  const off_t data = ::lseek(file_.fd(), from, SEEK_DATA);
  if (data < 0) return errno == ENXIO ? next : page;  // nothing but a hole to the end; or no such question here
  return std::min(next, (static_cast<std::uint64_t>(data) - sums_offset_) / 4);
}

std::uint64_t PageLedger::next_marked(std::uint64_t page) const {
  const std::lock_guard lock(mutex_);
  if (page >= pages_ || (flags_ & kAdopted) != 0) return std::min(page, pages_);
  return std::min(next_written(page), next_checksum(page));
}

void PageLedger::record(std::uint64_t page, std::uint32_t checksum) {
  const std::lock_guard lock(mutex_);
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
  auto sums = make_zeroed<std::uint32_t>(pages_);
  std::vector<std::uint32_t> block((1U << 20) / 4);
  for (std::uint64_t at = 0; at < pages_; at += block.size()) {
    const auto piece = std::span(block).first(std::min<std::uint64_t>(block.size(), pages_ - at));
    file_.read(sums_offset_ + at * 4, std::as_writable_bytes(piece));
    for (std::uint64_t i = 0; i < piece.size(); i += kBlockSums) {  // as in load_bits
      const auto part = piece.subspan(i, std::min<std::uint64_t>(kBlockSums, piece.size() - i));
      if (std::any_of(part.begin(), part.end(), [](std::uint32_t sum) { return sum != 0; }))
        std::memcpy(sums.get() + at + i, part.data(), part.size_bytes());
    }
  }
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
    return;
  }
  file_.read(sums_offset_ + first * 4, std::as_writable_bytes(out));
  for (auto at = pending_sums_.lower_bound(first); at != pending_sums_.end() && at->first < first + out.size(); ++at)
    out[at->first - first] = at->second;
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
  if (sums_) {
    for (const auto& [block, dirty] : dirty_sums_) {
      const std::uint64_t first = block * kBlockSums;
      const std::uint64_t count = std::min(kBlockSums, pages_ - first);
      file_.write(sums_offset_ + first * 4, std::as_bytes(std::span(sums_.get() + first, count)));
    }
    dirty_sums_.clear();
  }
  for (auto at = pending_sums_.begin(); at != pending_sums_.end();) {
    std::uint32_t run[kBlockSums];
    const std::uint64_t first = at->first;
    std::uint64_t count = 0;
    for (; at != pending_sums_.end() && count < kBlockSums && at->first == first + count; ++at) run[count++] = at->second;
    file_.write(sums_offset_ + first * 4, std::as_bytes(std::span(run, count)));
  }
  pending_sums_.clear();
  for (std::uint64_t block = 0; block < dirty_bits_.size(); ++block) {
    if (!dirty_bits_[block]) continue;
    file_.write(kHeaderBytes + block * kBlockBytes, std::as_bytes(std::span(bits_.get() + block * kBlockBytes, kBlockBytes)));
    dirty_bits_[block] = false;
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
  if (sums_offset_for(pages) <= sums_offset_) {
    flush_locked();
    // The header never promises more pages than the file has room for, on the disk as well: each step is durable before the next.
    // What is cut off is gone for good, also when it comes back.
    if (pages > old_pages) {
      file_.resize(sums_offset_ + checksum_bytes(pages));
      file_.sync();
    }
    pages_ = pages;
    write_header(file_);
    file_.sync();
    if (pages < old_pages) {
      file_.resize(sums_offset_ + checksum_bytes(pages));
      file_.sync();
    }
  } else {
    Header header = make_header(flags_, pages, sums_offset_for(pages));
    const std::uint64_t room = header.sums_offset - kHeaderBytes;
    TemporaryFile temporary = TemporaryFile::create(file_.path(), /*overwrite=*/true, file_.ops());
    temporary.file().resize(header.sums_offset + checksum_bytes(pages));
    auto bits = make_zeroed<std::uint8_t>(room);
    std::memcpy(bits.get(), bits_.get(), bits_room());
    std::vector<std::byte> block(1U << 20);
    const auto copy = [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {  // holes stay holes
      for (std::uint64_t at = 0; at < bytes; at += block.size()) {
        // Where the file system knows its holes they are passed over, not read.
        const off_t data = ::lseek(file_.fd(), static_cast<off_t>(from + at), SEEK_DATA);
        if (data < 0 && errno == ENXIO) break;
        if (data > 0) at = static_cast<std::uint64_t>(data) - from;
        if (at >= bytes) break;
        const auto piece = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - at));
        file_.read(from + at, piece);
        if (std::any_of(piece.begin(), piece.end(), [](std::byte b) { return b != std::byte{0}; }))
          temporary.file().write(to + at, piece);
      }
    };
    copy(kHeaderBytes, kHeaderBytes, bits_room());
    copy(sums_offset_, header.sums_offset, checksum_bytes(old_pages));
    temporary.file().write(0, std::as_bytes(std::span(&header, 1)));
    file_ = temporary.commit();
    pages_ = pages;
    sums_offset_ = header.sums_offset;
    bits_ = std::move(bits);
    dirty_bits_.assign(room / kBlockBytes, false);
  }
  if (sums_) {
    auto sums = make_zeroed<std::uint32_t>(pages);
    std::memcpy(sums.get(), sums_.get(), checksum_bytes(std::min(old_pages, pages)));
    sums_ = std::move(sums);
  }
}

void PageLedger::close() {
  const std::lock_guard lock(mutex_);
  file_.close();
}

}  // namespace embermap
