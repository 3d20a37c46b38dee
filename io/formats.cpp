#include "io/formats.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {
namespace {

using Format = Location::Format;

// The registry, a line each. The order is that in which names and contents are tried and listed.
// clang-format off
constexpr std::array kFormats{
    FormatInfo{Format::kNpy, "npy", {".npy"}, false, false, &fit_npy, &open_npy_rows, &create_npy_rows, &list_npy},
    FormatInfo{Format::kNpz, "npz", {".npz"}, true, true, &fit_npz, &open_npz_rows, &create_npz_rows, &list_npz, true},
    FormatInfo{Format::kHdf5, "hdf5", {".h5", ".hdf5", ".he5"}, true, true, &fit_hdf5, &open_hdf5_rows, &create_hdf5_rows, &list_hdf5, true},
    FormatInfo{Format::kSafetensors, "safetensors", {".safetensors", ".safetensors.index.json"}, true, false, &fit_safetensors, &open_safetensors_rows, &create_safetensors_rows, &list_safetensors, true},
    FormatInfo{Format::kTorch, "torch", {".pt", ".pth", ".bin", ".ckpt"}, true, false, &fit_torch, &open_torch_rows, &create_torch_rows, &list_torch},
    FormatInfo{Format::kFastTextBinary, "fasttext", {".bin", ".ftz"}, true, false, &fit_fasttext, &open_fasttext_rows, nullptr, &list_fasttext, false, true},
    FormatInfo{Format::kWord2vecText, "word2vec-text", {".vec", ".txt", ".tsv"}, false, false, &fit_word2vec_text, &open_word2vec_text_rows, &create_word2vec_text_rows, nullptr, false, true},
    FormatInfo{Format::kGlove, "glove", {".glove", ".glove.txt", ".txt", ".tsv"}, false, false, &fit_glove, &open_glove_rows, &create_glove_rows, nullptr, false, true},
    FormatInfo{Format::kWord2vecBinary, "word2vec-binary", {".w2v", ".bin"}, false, false, &fit_word2vec_binary, &open_word2vec_binary_rows, &create_word2vec_binary_rows, nullptr, false, true},
    FormatInfo{Format::kVecs, "vecs", {".fvecs", ".bvecs", ".ivecs"}, false, false, nullptr, &open_vecs_rows, &create_vecs_rows, nullptr},
    FormatInfo{Format::kBin, "bin", {".fbin", ".u8bin", ".i8bin", ".ibin", ".f16bin"}, false, false, nullptr, &open_bin_rows, &create_bin_rows, nullptr},
    FormatInfo{Format::kRaw, "raw", {".raw"}, false, false, nullptr, &open_raw_rows, &create_raw_rows, nullptr},
};
// clang-format on

std::size_t edit_distance(std::string_view a, std::string_view b) {
  a = a.substr(0, 256);
  b = b.substr(0, 256);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j)
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0U : 1U)}));
  }
  return row.back();
}

// "a: float32 (2, 4); words: ...", those named most like `wanted` first.
std::string candidates_text(std::vector<const Candidate*> found, std::string_view wanted) {
  if (found.empty()) return "nothing";
  constexpr std::size_t kCompared = 20000;
  if (!wanted.empty() && found.size() <= kCompared) {
    std::vector<std::pair<std::size_t, const Candidate*>> ranked;
    for (const Candidate* one : found) ranked.emplace_back(edit_distance(one->name, wanted), one);
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (std::size_t i = 0; i < found.size(); ++i) found[i] = ranked[i].second;
  }
  std::string out;
  constexpr std::size_t kShown = 12;
  for (std::size_t i = 0; i < std::min(found.size(), kShown); ++i)
    out += fmt::format("{}{}: {}", i > 0 ? "; " : "", printable(found[i]->name), found[i]->text);
  if (found.size() > kShown) out += fmt::format("; ... {} more", found.size() - kShown);
  return out;
}

}  // namespace

std::size_t choose_array(const Location& location, std::string_view what, std::span<const Candidate> all) {
  const auto of = [&](const auto& wanted) {
    std::vector<const Candidate*> out;
    for (const Candidate& one : all)
      if (wanted(one)) out.push_back(&one);
    return out;
  };
  const auto everything = of([](const Candidate&) { return true; });
  if (!location.selector.empty()) {
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].name == location.selector) return i;
    throw NotFound(fmt::format("{}: there is no {} '{}'; it holds {}", printable(location.file), what,
                               printable(location.selector), candidates_text(everything, location.selector)));
  }
  if (all.size() == 1) return 0;
  for (const std::size_t least : {2U, 1U}) {
    const auto tables = of([&](const Candidate& one) { return one.usable && one.dimensions >= least; });
    if (tables.size() == 1) return static_cast<std::size_t>(tables.front() - all.data());
    if (tables.size() > 1)
      throw InvalidArgument(fmt::format("{}: {} {}s could be meant; name one, as in {}:{}. It holds {}", printable(location.file),
                                        tables.size(), what, printable(location.file), printable(tables.front()->name),
                                        candidates_text(tables, "")));
  }
  throw NotFound(fmt::format("{}: there is no {} of numbers in it; it holds {}", printable(location.file), what,
                             candidates_text(everything, "")));
}

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
bool format_adds(Location::Format format) { return format_info(format).adds; }

bool format_has_words(Location::Format format) { return format_info(format).words; }

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

void check_name(const Location& location) {
  try {
    (void)nlohmann::json(location.selector).dump();
  } catch (const nlohmann::json::exception&) {
    throw InvalidArgument(fmt::format("{}: '{}' is not UTF-8, which names in {} files are", printable(location.file),
                                      printable(location.selector), format_name(location.format)));
  }
}

}  // namespace embermap
