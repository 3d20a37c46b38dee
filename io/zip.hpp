// Zip archives as .npz and torch's files are: members stored or deflated, zip64, read without trusting the archive.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/file.hpp"
#include "io/streams.hpp"

namespace embermap {

struct ZipMember {
  static constexpr std::uint16_t kStored = 0, kDeflated = 8;

  std::string name;  // its bytes in the archive
  std::uint16_t method = kStored;
  std::uint16_t flags = 0;
  std::uint32_t crc = 0;
  std::uint64_t packed_bytes = 0;   // in the file
  std::uint64_t bytes = 0;          // unpacked
  std::uint64_t header_offset = 0;  // of its local header, in the file
  // For a copy of the archive's directory: time, date and the rest that has no meaning here.
  std::uint16_t made_by = 0, needed = 0, time = 0, date = 0, internal = 0;
  std::uint32_t external = 0;
  std::string extra, comment;  // `extra` without zip64's part

  std::string method_text() const;  // "stored", "deflated", "bzip2"
};

// The directory of an archive. Throws FormatError for what is no zip archive, is cut short, spans several disks, or whose
// directory contradicts the file; members that lie over one another are refused too (zip bombs do). At most 16 Mi members and 1
// GiB of directory, all of which the file has to hold.
class ZipDirectory {
 public:
  explicit ZipDirectory(const File& file);

  const std::vector<ZipMember>& members() const noexcept { return members_; }  // as the directory lists them
  // The last member of that name, as Python's zipfile has it; nullptr if there is none.
  const ZipMember* find(std::string_view name) const;
  // Where the member's bytes begin: its local header is looked at. Throws FormatError for one that is encrypted or does not
  // match.
  std::uint64_t data_offset(const File& file, const ZipMember& member) const;
  // Where the space between members ends: the offset of the next member's header, or of the directory.
  std::uint64_t end_of(const ZipMember& member) const;
  std::uint64_t begin() const noexcept { return begin_; }           // of the directory in the file
  const std::string& comment() const noexcept { return comment_; }  // of the archive

 private:
  std::vector<ZipMember> members_;
  std::vector<std::uint64_t> starts_;  // of members, sorted
  std::uint64_t begin_ = 0;
  std::string comment_;
};

// The unpacked bytes of one member. Any range can be read; ascending ranges are quick, and of a deflated member a step back
// begins again at its start. Memory: 256 KiB for a deflated member. Where everything was read in ascending order, the checksum is
// compared at the end (unless `check` is false: torch can write files without).
class ZipMemberReader final : public ByteSource {
 public:
  // Keeps a reference to `file`. Throws FormatError (a method that is not known here, encrypted, sizes that contradict each
  // other).
  ZipMemberReader(const File& file, const ZipDirectory& directory, const ZipMember& member, bool check);
  ~ZipMemberReader() override;
  ZipMemberReader(const ZipMemberReader&) = delete;
  ZipMemberReader& operator=(const ZipMemberReader&) = delete;

  std::uint64_t size() const noexcept { return member_.bytes; }
  const ZipMember& member() const noexcept { return member_; }
  // Throws FormatError for a damaged member, or one that is not as long as the directory says; InvalidArgument outside of it.
  void read(std::uint64_t offset, std::span<std::byte> out) override;
  // Of a deflated member the packed bytes are read ahead, where reading begins at its start.
  std::uint64_t read_ahead(std::uint64_t begin, std::uint64_t end, std::uint64_t memory) override;
  std::span<const std::byte> view(std::uint64_t offset, std::uint64_t most) override;  // of a stored member
  std::string how() const override { return stream_.how(); }
  bool sparse() const override { return inflate_ == nullptr && stream_.sparse(); }

 private:
  struct Inflate;
  void inflate_to(std::span<std::byte> out);  // from position_ on
  void note(std::uint64_t offset, std::span<const std::byte> bytes);
  std::string where() const;

  const File& file_;
  StreamedFile stream_;
  ZipMember member_;
  bool check_;
  std::uint64_t data_offset_ = 0;
  std::unique_ptr<Inflate> inflate_;  // of a deflated one
  std::uint64_t checked_ = 0;         // bytes from the start whose checksum is known
  std::uint32_t crc_ = 0;
};

// Writes an archive: members copied from another one, members of one's own, the directory. The file is the caller's.
class ZipWriter {
 public:
  // Appends to `file` from byte `at` on.
  explicit ZipWriter(File& file, std::uint64_t at = 0);
  ~ZipWriter();
  ZipWriter(const ZipWriter&) = delete;
  ZipWriter& operator=(const ZipWriter&) = delete;

  // The member with its local header and packed bytes, as they are.
  void copy(const File& from, const ZipDirectory& directory, const ZipMember& member);

  // Begins a member. Its data begins at a multiple of `align` where it is stored. `level`: -1 stored, else that of deflate, which
  // is done by so many `threads` (0: what the process may use, at most 16) in pieces: equal bytes are packed equally by any
  // number of them. `bytes` as long as it will be.
  void begin(std::string_view name, std::uint64_t bytes, int level, std::uint64_t align, unsigned threads = 1);
  void write(std::span<const std::byte> bytes);
  void write_view(std::span<const std::byte> bytes);  // as StreamWriter has it
  // The bytes of the member that was begun are written behind (StreamWriter::write_behind). Nothing where it is deflated.
  std::uint64_t write_behind(std::uint64_t memory);
  const std::string& how() const noexcept { return how_; }
  const ZipMember& end();  // completes its local header

  void set_comment(std::string comment) { comment_ = std::move(comment); }  // of the archive; at most 65535 bytes

  // The directory. Nothing can be written afterwards.
  void finish();
  std::uint64_t position() const noexcept { return at_; }

 private:
  struct Deflate;
  void deflate_pending(bool last);
  void note(std::span<const std::byte> bytes);
  std::string local_header(const ZipMember& member, std::uint64_t padding) const;

  File& file_;
  std::uint64_t at_;
  std::vector<ZipMember> members_;
  std::string comment_;
  ZipMember current_;
  std::uint64_t padding_ = 0, written_ = 0;
  std::unique_ptr<Deflate> deflate_;
  std::unique_ptr<StreamWriter> stored_;  // what a stored member's bytes go through
  std::string how_;
};

// Whether a file begins as a zip archive with members does ("PK\3\4"), or is an empty one.
bool begins_like_zip(std::span<const std::byte> head);

}  // namespace embermap
