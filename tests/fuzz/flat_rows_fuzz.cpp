// .fvecs, .fbin and their kinds, and raw files.
#include <array>
#include <vector>

#include "base/error.hpp"
#include "io/formats.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace embermap::fuzz {

void fuzz_one(std::span<const std::byte> input) {
  struct Kind {
    const char* name;
    std::unique_ptr<RowReader> (*open)(const Location&, const ReadOptions&);
    std::unique_ptr<RowWriter> (*create)(const Location&, std::uint64_t, std::uint64_t, DType, const WriteOptions&);
  };
  static constexpr std::array kKinds{
      Kind{"t.fvecs", open_vecs_rows, create_vecs_rows}, Kind{"t.bvecs", open_vecs_rows, create_vecs_rows},
      Kind{"t.u8bin", open_bin_rows, create_bin_rows}, Kind{"t.fbin", open_bin_rows, create_bin_rows},
      Kind{"t.raw", open_raw_rows, create_raw_rows}};
  Taker taker(input);
  const Kind& kind = kKinds[taker.number(1) % kKinds.size()];
  ReadOptions options;
  if (kind.open == open_raw_rows) {
    options.dtype = static_cast<DType>(taker.number(1) % 8);
    options.dim = taker.number(8);
    options.offset = taker.number(1);
  }
  const auto content = taker.piece(input.size());
  const File file = folder().make(kind.name, content);
  const auto reader = kind.open(Location{file.path(), ""}, options);
  const std::uint64_t row_bytes = reader->dim() * item_size(reader->dtype());
  require(reader->rows() == 0 || row_bytes <= file.size() / reader->rows(), "more rows than bytes");
  std::vector<std::byte> rows(reader->rows() == 0 ? 0 : reader->rows() * row_bytes);
  reader->read(0, reader->rows(), rows.data());
  if (options.offset != 0 || reader->rows() == 0) return;
  // A file that is read without a complaint is what is written of its rows.
  const std::filesystem::path copy = folder().path() / (std::string("copy") + file.path().extension().string());
  const auto writer = kind.create(Location{copy, ""}, reader->rows(), reader->dim(), reader->dtype(), {.overwrite = true});
  writer->write(reader->rows(), rows.data());
  writer->finish();
  const File written = File::open(copy, File::Mode::kRead);
  std::vector<std::byte> again(content.size());
  require(written.size() == content.size(), "a file of another size");
  written.read(0, again);
  require(std::equal(again.begin(), again.end(), content.begin()), "another file");
}

}  // namespace embermap::fuzz
