#include "base/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <system_error>

namespace embermap {
namespace {

std::string io_text(int error_number, std::string_view call, const std::filesystem::path& file) {
  return fmt::format("{} {}: {}", call, printable(file), std::generic_category().message(error_number));
}

// Length of the UTF-8 sequence that starts at text[at], or 0 where there is none (RFC 3629: no surrogates, no overlong forms).
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xC2 && lead <= 0xDF   ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  const unsigned char second = byte(at + 1);
  if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) || (lead == 0xF0 && second < 0x90) ||
      (lead == 0xF4 && second > 0x8F))
    return 0;
  return length;
}

}  // namespace

RowIdError::RowIdError(std::string_view table, std::int64_t id, std::uint64_t position, std::uint64_t rows)
    : Error(fmt::format("row id {} at position {} is out of range for table '{}' with {} rows", id, position, printable(table),
                        rows)),
      id_{id},
      position_{position} {}

FormatError::FormatError(const std::filesystem::path& file, std::string_view what)
    : Error(fmt::format("{}: {}", printable(file), what)) {}

IoError::IoError(int error_number, std::string_view call, const std::filesystem::path& file)
    : Error(io_text(error_number, call, file)), error_number_{error_number}, file_{file} {}

IoError::IoError(int error_number, std::string_view call, const std::filesystem::path& file, std::uint64_t offset,
                 std::uint64_t bytes)
    : Error(fmt::format("{} {} [{}, +{}): {}", call, printable(file), offset, bytes,
                        std::generic_category().message(error_number))),
      error_number_{error_number},
      file_{file} {}

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const std::size_t length = utf8_length(text, at);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
      ++at;
    } else {
      out.append(text, at, length);
      at += length;
    }
  }
  return out;
}

std::string printable(std::string_view text, std::size_t most) {
  if (text.size() <= most) return printable(text);
  // At most three bytes of a character lie before the cut, if one is cut.
  std::size_t end = most;
  for (std::size_t at = most - std::min<std::size_t>(most, 3); at < most; ++at)
    if (const std::size_t length = utf8_length(text, at); length > most - at) end = std::min(end, at);
  return printable(text.substr(0, end)) + "...";
}

}  // namespace embermap
