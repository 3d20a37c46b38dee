// Large parts of files in ascending order, with the disk at work while the caller is: read ahead and written behind by a thread
// of their own, past the page cache where the file system allows it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/file.hpp"

namespace embermap {

// Bytes that are read, anywhere and quickly in ascending order. Not thread-safe.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills `out` from `offset` on, as File::read.
  virtual void read(std::uint64_t offset, std::span<std::byte> out) = 0;
  // The bytes [begin, end) will be read now, in ascending order (gaps may be left out), and may be read ahead out of at most
  // `memory` bytes. Returns the bytes of memory taken: 0 where nothing is read ahead.
  virtual std::uint64_t read_ahead(std::uint64_t begin, std::uint64_t end, std::uint64_t memory) = 0;
  // The bytes from `offset` on where they lie in memory of this object's own, at least one and at most `most` of them, as long as
  // nothing else of it is called. Empty where they do not, as while nothing is read ahead: read() has them.
  virtual std::span<const std::byte> view(std::uint64_t offset, std::uint64_t most) {
    (void)offset, (void)most;
    return {};
  }
  // "direct"; "buffered" with the reason; empty while nothing was read ahead.
  virtual std::string how() const = 0;
  // Whether less than half of the bytes take room on the disk.
  virtual bool sparse() const = 0;
};

// A file that is read. What is ahead is read by a thread of this object's own, until it was read or read() goes elsewhere; what
// is in the page cache is taken from there. In a forked child nothing is ahead, and reading goes on.
class StreamedFile final : public ByteSource {
 public:
  explicit StreamedFile(File&& file);
  explicit StreamedFile(const File& file);  // keeps a reference
  ~StreamedFile() override;
  StreamedFile(const StreamedFile&) = delete;
  StreamedFile& operator=(const StreamedFile&) = delete;

  const File& file() const noexcept { return file_; }
  void read(std::uint64_t offset, std::span<std::byte> out) override;
  std::uint64_t read_ahead(std::uint64_t begin, std::uint64_t end, std::uint64_t memory) override;
  std::span<const std::byte> view(std::uint64_t offset, std::uint64_t most) override;
  std::string how() const override { return how_; }
  bool sparse() const override;

 private:
  class Ahead;
  void leave() noexcept;

  File own_;
  const File& file_;
  std::unique_ptr<Ahead> ahead_;
  std::string how_;
};

// Bytes appended to a file that is written. Not thread-safe. Errors of the thread that writes behind are thrown by the next call.
class StreamWriter {
 public:
  // Keeps a reference to `file`; bytes go to it from `at` on. From `zero_from` on the file is known to be all zero: blocks of
  // zeros are not written there, so that holes stay holes.
  StreamWriter(const File& file, std::uint64_t at, std::uint64_t zero_from = UINT64_MAX);
  ~StreamWriter();  // what was not flushed may be written or not
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  // `bytes` will come: from now on they are written by a thread of this object's own, out of a ring of blocks of at most `memory`
  // bytes. To be called before anything is written. Returns the bytes of memory taken, or 0.
  std::uint64_t write_behind(std::uint64_t bytes, std::uint64_t memory);
  void write(std::span<const std::byte> bytes);
  // write(), for bytes whose place in memory may fit theirs in the file (ByteSource::view): direct I/O then takes them from
  // there, and is done when this returns. The memory is the caller's again in any case.
  void write_view(std::span<const std::byte> bytes);
  // When it returns all bytes are in the file. More may be written then.
  void flush();
  std::uint64_t position() const noexcept { return at_; }  // of the next byte
  const std::string& how() const noexcept { return how_; }

 private:
  class Behind;
  void put(std::uint64_t at, std::span<const std::byte> bytes) const;

  const File& file_;
  std::uint64_t at_;
  std::uint64_t zero_from_;
  std::vector<std::byte> pending_;
  std::unique_ptr<Behind> behind_;
  std::string how_;
};

}  // namespace embermap
