// The bytes of a part of a file in ascending order, through one buffer: for formats whose rows have no fixed length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/size_text.hpp"
#include "io/file.hpp"

namespace embermap {

// Keeps a reference to the file. Not thread-safe. Throws IoError, and FormatError where the file is shorter than `end` meanwhile.
class FileStream {
 public:
  static constexpr std::size_t kBlockBytes = 4_MiB;  // read at once; the buffer is larger only where peek() is asked for more

  // The bytes [begin, end) of the file.
  FileStream(const File& file, std::uint64_t begin, std::uint64_t end) : file_{&file}, position_{begin}, end_{end} {}

  std::uint64_t position() const noexcept { return position_; }  // of the next byte
  std::uint64_t end() const noexcept { return end_; }
  std::uint64_t left() const noexcept { return end_ - position_; }

  // The next bytes: at least `least` of them, or all that are left. Valid until the next call of a member that is not const.
  std::span<const std::byte> peek(std::size_t least);
  std::string_view peek_text(std::size_t least);
  // Passes over bytes; those that are not in the buffer are not read. At most left().
  void skip(std::uint64_t bytes);
  // Anywhere in [0, end].
  void seek(std::uint64_t position);
  // Copies the next bytes and passes over them; large ones do not come by the buffer. At most left().
  void take(std::span<std::byte> out);
  // The bytes before the next `mark`, which is passed over as well; nothing, and no move, where there is none within `most`
  // bytes.
  std::optional<std::string_view> take_until(char mark, std::size_t most);

 private:
  std::size_t buffered() const noexcept { return filled_ - begin_; }

  const File* file_;
  std::uint64_t position_, end_;
  std::vector<std::byte> buffer_;  // [begin_, filled_) are the bytes from position_ on
  std::size_t begin_ = 0, filled_ = 0;
};

}  // namespace embermap
