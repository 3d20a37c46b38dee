#include "io/file_stream.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

namespace embermap {

std::span<const std::byte> FileStream::peek(std::size_t least) {
  const std::size_t wanted = static_cast<std::size_t>(std::min<std::uint64_t>(least, left()));
  if (buffered() < wanted) {
    if (begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
      filled_ -= begin_;
      begin_ = 0;
    }
    // A small file takes no large buffer, and no length is taken on the caller's word: `wanted` bytes are there.
    const auto room = static_cast<std::size_t>(std::min<std::uint64_t>(std::max(kBlockBytes, wanted), left()));
    if (buffer_.size() < room) buffer_.resize(room);
    const std::uint64_t from = position_ + filled_;
    const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(buffer_.size() - filled_, end_ - from));
    file_->read(from, {buffer_.data() + filled_, bytes});
    filled_ += bytes;
    // The disk works on the next block while this one is used. A hint: where it is not taken, nothing is lost.
    if (from + bytes < end_)
      static_cast<void>(::posix_fadvise(file_->fd(), static_cast<off_t>(from + bytes), kBlockBytes, POSIX_FADV_WILLNEED));
  }
  return {buffer_.data() + begin_, buffered()};
}

std::string_view FileStream::peek_text(std::size_t least) {
  const std::span<const std::byte> bytes = peek(least);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void FileStream::skip(std::uint64_t bytes) {
  const auto here = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, buffered()));
  begin_ += here;
  position_ += bytes;
  if (here < bytes) begin_ = filled_ = 0;
}

void FileStream::seek(std::uint64_t position) {
  if (position >= position_ && position - position_ <= buffered()) return skip(position - position_);
  position_ = position;
  begin_ = filled_ = 0;
}

void FileStream::take(std::span<std::byte> out) {
  const std::size_t here = std::min(out.size(), buffered());
  if (here > 0) std::memcpy(out.data(), buffer_.data() + begin_, here);
  skip(here);
  out = out.subspan(here);
  if (out.size() >= kBlockBytes / 4) {
    file_->read(position_, out);
    skip(out.size());
  } else if (!out.empty()) {
    std::memcpy(out.data(), peek(out.size()).data(), out.size());
    skip(out.size());
  }
}

std::optional<std::string_view> FileStream::take_until(char mark, std::size_t most) {
  std::size_t searched = 0;
  for (std::size_t wanted = 1; searched < most; wanted = std::min(most, searched + std::max<std::size_t>(searched, 4096))) {
    const std::string_view text = peek_text(wanted).substr(0, most);
    const std::size_t found = text.find(mark, searched);
    if (found != std::string_view::npos) {
      skip(found + 1);
      return text.substr(0, found);
    }
    if (text.size() <= searched) break;  // the end of the file
    searched = text.size();
  }
  return std::nullopt;
}

}  // namespace embermap
