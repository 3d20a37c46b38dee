// NumPy's archives: .npy members of a zip file.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/checked.hpp"
#include "base/error.hpp"
#include "base/size_text.hpp"
#include "io/addition.hpp"
#include "io/elements.hpp"
#include "io/formats.hpp"
#include "io/npy.hpp"
#include "io/zip.hpp"

namespace embermap {
namespace {

constexpr std::string_view kSuffix = ".npy";

// The name by which numpy.load() gives a member: without ".npy".
std::string array_name(const std::string& member) {
  return member.ends_with(kSuffix) ? member.substr(0, member.size() - kSuffix.size()) : member;
}

struct Archive {
  explicit Archive(const std::filesystem::path& path) : file{File::open(path, File::Mode::kRead)}, directory{check(file)} {}

  static const File& check(const File& file) {
    std::array<std::byte, 512> buffer;
    const auto head = std::span<const std::byte>(buffer).first(file.read_some(0, buffer));
    if (!begins_like_zip(head)) {
      const std::string what = looks_like(head);
      if (!what.empty()) throw FormatError(file.path(), fmt::format("is no NPZ archive; it looks like {}", what));
    }
    return file;
  }

  File file;
  ZipDirectory directory;
};

// A member's header, or why it has none that a table could use.
struct Found {
  std::string name;
  std::optional<NpyHeader> header;
  std::string error;
  std::string layout;
  std::uint64_t bytes = 0;
};

std::vector<Found> look_at(const Archive& archive) {
  std::vector<Found> out;
  for (const ZipMember& member : archive.directory.members()) {
    if (member.name.ends_with('/') || archive.directory.find(member.name) != &member) continue;
    Found found;
    found.name = array_name(member.name);
    found.layout = member.method_text();
    found.bytes = member.bytes;
    if (!member.name.ends_with(kSuffix)) {
      found.error = "bytes";
    } else {
      try {
        ZipMemberReader reader(archive.file, archive.directory, member, /*check=*/false);
        found.header = read_npy_header(archive.file.path() / member.name, reader.size(),
                                       [&](std::uint64_t offset, std::span<std::byte> part) { reader.read(offset, part); });
      } catch (const FormatError& error) {
        found.error = fmt::format("unreadable ({})", error.what());
      }
    }
    out.push_back(std::move(found));
  }
  return out;
}

bool numeric(const NpyHeader& header) {
  const std::string& d = header.descr;
  return dtype_of_npy_descr(d) || dtype_of_big_endian_npy_descr(d) || d == "|b1" || d == "<V2" || d == "|V2";
}

// The member and the field that a selector names; without one, the only array that a table could be.
std::pair<const ZipMember*, std::string> choose(const Archive& archive, const Location& location) {
  const ZipDirectory& directory = archive.directory;
  const auto member = [&](const std::string& name) {
    const ZipMember* const exact = directory.find(name + std::string(kSuffix));
    return exact != nullptr ? exact : directory.find(name);
  };
  const std::string& selector = location.selector;
  if (!selector.empty()) {
    if (const ZipMember* const found = member(selector)) return {found, {}};
    for (std::size_t colon = selector.rfind(':'); colon != std::string::npos && colon > 0; colon = selector.rfind(':', colon - 1))
      if (const ZipMember* const found = member(selector.substr(0, colon))) return {found, selector.substr(colon + 1)};
  }
  std::vector<Candidate> all;
  for (const Found& found : look_at(archive)) {
    Candidate& one = all.emplace_back();
    one.name = found.name;
    one.text =
        found.header ? fmt::format("{} {}", found.header->dtype_text(), found.header->shape_text()) : found.error.substr(0, 200);
    one.usable = found.header && numeric(*found.header);
    one.dimensions = found.header ? found.header->shape.size() : 0;
  }
  return {member(all[choose_array(location, "array", all)].name), {}};
}

class NpzRowWriter final : public RowWriter {
 public:
  NpzRowWriter(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype, const WriteOptions& options)
      : member_{array_name(location.selector.empty() ? "arr_0" : location.selector) + std::string(kSuffix)},
        overwrite_{options.overwrite},
        row_bytes_{checked_mul(dim, item_size(dtype), "bytes of a row")},
        addition_{location.file, fmt::format("'{}'", printable(array_name(member_))), !location.selector.empty(),
                  options.overwrite},
        count_{fmt::format("{}:{}", printable(location.file), printable(array_name(member_))), rows},
        zip_{addition_.file()} {
    const std::string header = format_npy_header(npy_descr(dtype), {}, 0, {rows, dim}, 0);
    const std::uint64_t bytes =
        checked_add(header.size(), checked_mul(rows, row_bytes_, "bytes of the array"), "bytes of the array");
    if (addition_.existing().is_open()) copy_others(addition_.existing(), zip_);
    if (options.gzip < 0) addition_.file().reserve(checked_add(zip_.position(), bytes, "bytes of the archive"));
    zip_.begin(member_, bytes, options.gzip, 64, options.threads);
    zip_.write(std::as_bytes(std::span(header)));
  }

  void write(std::uint64_t count, const std::byte* rows) override {
    count_.add(count);
    zip_.write({rows, count * row_bytes_});
  }

  void finish() override {
    count_.finish();
    zip_.end();
    zip_.finish();
    addition_.finish([&](const File& theirs, File& ours, File& to) {
      ZipWriter merged(to);
      copy_others(theirs, merged);
      const ZipDirectory directory(ours);
      merged.copy(ours, directory, *directory.find(member_));
      merged.finish();
    });
  }

  bool takes_bytes() const override { return true; }
  void write_bytes(std::span<const std::byte> bytes) override {
    count_.add_bytes(bytes.size(), row_bytes_);
    zip_.write_view(bytes);
  }
  std::uint64_t write_behind(std::uint64_t memory) override { return zip_.write_behind(memory); }
  std::string how() const override { return zip_.how(); }

 private:
  void copy_others(const File& from, ZipWriter& to) const {
    const ZipDirectory directory(from);
    to.set_comment(directory.comment());
    for (const ZipMember& member : directory.members()) {
      if (member.name != member_) {
        to.copy(from, directory, member);
      } else if (!overwrite_) {
        throw AlreadyExists(fmt::format("{}:{} already exists", printable(addition_.target()), printable(array_name(member_))));
      }
    }
  }

  std::string member_;
  bool overwrite_;
  std::uint64_t row_bytes_;
  Addition addition_;
  RowCount count_;
  ZipWriter zip_;
};

}  // namespace

Fit fit_npz(const File& file, std::span<const std::byte> head) {
  if (!begins_like_zip(head)) return Fit::kNo;
  const ZipDirectory directory(file);
  const auto& members = directory.members();
  return !members.empty() &&
                 std::all_of(members.begin(), members.end(), [](const ZipMember& m) { return m.name.ends_with(kSuffix); })
             ? Fit::kCertain
             : Fit::kPossible;
}

std::vector<Entry> list_npz(const std::filesystem::path& path) {
  const Archive archive(path);
  std::vector<Entry> out;
  for (const Found& found : look_at(archive)) {
    if (!found.header) {
      out.push_back(Entry{found.name, {found.bytes}, found.error, found.bytes, found.layout});
      continue;
    }
    for (Entry& entry : npy_entries(*found.header, found.name, found.layout)) out.push_back(std::move(entry));
  }
  return out;
}

std::unique_ptr<RowReader> open_npz_rows(const Location& location, const ReadOptions& options) {
  const auto archive = std::make_shared<Archive>(location.file);
  const auto [member, field] = choose(*archive, location);
  // The archive lives as long as what reads from it.
  struct Source {
    std::shared_ptr<Archive> archive;
    ZipMemberReader reader;
  };
  const auto source = std::shared_ptr<Source>(new Source{archive, {archive->file, archive->directory, *member, /*check=*/true}});
  const std::filesystem::path name(fmt::format("{}:{}", location.file.native(), array_name(member->name)));
  return open_npy_array(name, field, source->reader.size(), std::shared_ptr<ByteSource>(source, &source->reader), options);
}

std::unique_ptr<RowWriter> create_npz_rows(const Location& location, std::uint64_t rows, std::uint64_t dim, DType dtype,
                                           const WriteOptions& options) {
  check_name(location);
  return std::make_unique<NpzRowWriter>(location, rows, dim, dtype, options);
}

}  // namespace embermap
