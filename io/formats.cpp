#include "io/formats.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <system_error>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {
namespace {

using Format = Location::Format;

// The registry. The order is that in which names and contents are tried and listed.
constexpr std::array kFormats{
    FormatInfo{Format::kNpy, "npy", {".npy"}, false, false, &fit_npy, &open_npy_rows, &create_npy_rows, &list_npy},
    FormatInfo{
        Format::kHdf5, "hdf5", {".h5", ".hdf5", ".he5"}, true, true, &fit_hdf5, &open_hdf5_rows, &create_hdf5_rows, &list_hdf5},
    FormatInfo{Format::kFastTextBinary,
               "fasttext",
               {".bin", ".ftz"},
               false,
               false,
               &fit_fasttext,
               &open_fasttext_rows,
               nullptr,
               &list_fasttext},
    FormatInfo{Format::kWord2vecText,
               "word2vec-text",
               {".vec", ".txt"},
               false,
               false,
               &fit_word2vec_text,
               &open_word2vec_text_rows,
               &create_word2vec_text_rows,
               nullptr},
    FormatInfo{Format::kGlove,
               "glove",
               {".glove", ".glove.txt", ".txt"},
               false,
               false,
               &fit_glove,
               &open_glove_rows,
               &create_glove_rows,
               nullptr},
    FormatInfo{Format::kWord2vecBinary,
               "word2vec-binary",
               {".w2v", ".bin"},
               false,
               false,
               &fit_word2vec_binary,
               &open_word2vec_binary_rows,
               &create_word2vec_binary_rows,
               nullptr},
    FormatInfo{Format::kVecs,
               "vecs",
               {".fvecs", ".bvecs", ".ivecs"},
               false,
               false,
               nullptr,
               &open_vecs_rows,
               &create_vecs_rows,
               nullptr},
    FormatInfo{Format::kBin,
               "bin",
               {".fbin", ".u8bin", ".i8bin", ".ibin", ".f16bin"},
               false,
               false,
               nullptr,
               &open_bin_rows,
               &create_bin_rows,
               nullptr},
    FormatInfo{Format::kRaw, "raw", {".raw"}, false, false, nullptr, &open_raw_rows, &create_raw_rows, nullptr},
};

}  // namespace

std::span<const FormatInfo> formats() { return kFormats; }

const FormatInfo& format_info(Location::Format format) {
  for (const FormatInfo& info : kFormats)
    if (info.format == format) return info;
  throw InvalidArgument(fmt::format("format {} is not known in this build; these are: {}", static_cast<int>(format),
                                    format_names(/*written=*/false)));
}

std::string_view extension_of(const FormatInfo& info, std::string_view path) {
  std::string_view longest;
  for (const std::string_view extension : info.extensions) {
    if (extension.size() <= longest.size() || path.size() < extension.size()) continue;
    const std::string_view end = path.substr(path.size() - extension.size());
    if (std::equal(end.begin(), end.end(), extension.begin(), [](unsigned char a, char b) { return std::tolower(a) == b; }))
      longest = extension;
  }
  return longest;
}

const FormatInfo* format_by_name(std::string_view path) {
  const FormatInfo* best = nullptr;
  std::size_t longest = 0;
  for (const FormatInfo& info : kFormats) {
    const std::size_t length = extension_of(info, path).size();
    if (length > longest) {
      best = &info;
      longest = length;
    }
  }
  return best;
}

const FormatInfo* format_by_content(const std::filesystem::path& path) {
  std::error_code error;
  const FormatInfo* const named = format_by_name(path.native());
  if (!std::filesystem::is_regular_file(path, error)) return named;
  std::array<std::byte, FormatInfo::kHeadBytes> buffer;
  std::span<const std::byte> head;
  File file;
  try {
    file = File::open(path, File::Mode::kRead);
    head = std::span(buffer).first(file.read_some(0, buffer));
  } catch (const Error&) {
    return named;  // whoever opens it for its rows is told why it cannot be
  }
  const std::string_view extension = named == nullptr ? std::string_view{} : extension_of(*named, path.native());
  const FormatInfo* possible = nullptr;
  for (const FormatInfo& info : kFormats) {
    Fit fit = Fit::kPossible;
    try {
      if (info.fit != nullptr) fit = info.fit(file, head);
    } catch (const Error&) {
      fit = Fit::kNo;
    }
    if (fit == Fit::kCertain) return &info;
    const bool its_name = !extension.empty() && extension_of(info, path.native()) == extension;
    if (fit == Fit::kPossible && its_name && possible == nullptr) possible = &info;
  }
  return possible != nullptr ? possible : named;
}

std::string_view format_name(Location::Format format) { return format_info(format).name; }

Location::Format parse_format(std::string_view name) {
  for (const FormatInfo& info : kFormats)
    if (info.name == name) return info.format;
  throw InvalidArgument(fmt::format("there is no format '{}'; there are {}", printable(name), format_names(/*written=*/false)));
}

std::string format_names(bool written) {
  std::string out;
  for (const FormatInfo& info : kFormats)
    if (!written || info.create != nullptr) out += fmt::format("{}{}", out.empty() ? "" : ", ", info.name);
  return out;
}

bool format_compresses(Location::Format format) { return format_info(format).compresses; }
bool format_has_members(Location::Format format) { return format_info(format).members; }

bool format_has_words(Location::Format format) {
  return format == Format::kWord2vecText || format == Format::kGlove || format == Format::kWord2vecBinary ||
         format == Format::kFastTextBinary;
}

std::vector<Entry> list_entries(const std::filesystem::path& file, Location::Format format) {
  const FormatInfo& info = format_info(format);
  if (info.list != nullptr) return info.list(file);
  const auto reader = info.open(Location{file, {}, format}, {});
  Entry entry;
  entry.shape = {reader->rows(), reader->dim()};
  entry.dtype = dtype_name(reader->dtype());
  entry.bytes = checked_mul(checked_mul(reader->rows(), reader->dim(), "elements"), item_size(reader->dtype()), "bytes");
  entry.layout = info.name;
  return {entry};
}

}  // namespace embermap
