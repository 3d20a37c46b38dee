// Gathers from the table's own file, mapped (Pin::kMapping).
#include <fmt/format.h>

#include <cstdio>

#include "kernels/rows.hpp"
#include "store/table_impl.hpp"

namespace embermap {

MappedTable* TableImpl::mapped() {
  if (core_->pin != Pin::kMapping) return nullptr;
  const std::lock_guard lock(mapped_mutex_);
  if (mapped_) return mapped_.get();
  const auto refuse = [&](std::string_view why) {
    return InvalidArgument(
        fmt::format("table '{}' cannot be read from the mapping of {}: {}; or open the store without pin 'mapping'",
                    printable(name_), printable(data_path()), why));
  };
  if (entry_.big_endian)
    throw refuse("its elements have the other byte order, and are not swapped there. Import it into a store");
  if (const std::uint64_t missing = pages_not_written(*file_); missing != 0)
    throw refuse(
        fmt::format("{} of {} pages were never written, and the file has no rows there. 'embermap materialize {}' writes them",
                    missing, entry_.geometry.pages(), printable(core_->path / name_)));
  // A writer may have cut the file since.
  core_->logged->reading([&] { mapped_ = std::make_unique<MappedTable>(*file_, *core_->logged, entry_.id); });
  return mapped_.get();
}

void TableImpl::keep_mapping() {
  const std::lock_guard lock(mapped_mutex_);
  if (mapped_ && !mapped_->keep(*file_, *core_->logged, entry_.id)) mapped_.reset();
}

void TableImpl::end_mapping() noexcept {
  const std::lock_guard lock(mapped_mutex_);
  mapped_.reset();
}

void TableImpl::read_mapped(const MappedTable& mapped, const std::function<void()>& body) {
  mapped.guard();
  core_->logged->reading([&] {
    body();
    mapped.check(*file_);
  });
}

bool TableImpl::gather_mapped(std::span<const std::uint64_t> ids, std::byte* out, const Field& field) {
  const MappedTable* const mapping = mapped();
  if (mapping == nullptr || !mapping->has_rows(ids)) return false;
  read_mapped(*mapping, [&] {
    mapping->will_need(ids);
    gather_rows(mapping->rows() + field.offset, entry_.geometry.stride, ids, field.bytes, out, core_->compute);
  });
  rows_mapped_ += ids.size();
  return true;
}

bool TableImpl::gather_mapped_device(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, const Field& field,
                                     CudaStream stream) {
  CudaEngine& engine = core_->engine(device);
  const auto lock = side_by_side();
  MappedTable* const mapping = mapped();
  const auto batch = engine.make_batch(ids, count, entry_.geometry.rows, entry_.geometry.rows_per_page, name_, stream);
  if (count == 0) return true;
  if (!mapping->has(batch->pages)) return false;
  mapping->pin(device, core_->io);
  if (!mapping->registered() && !core_->pin_warned.exchange(true))
    std::fprintf(stderr, "embermap: warning: %s; rows travel through pageable copies\n", mapping->error().c_str());
  const FrameSource source = mapping->source();
  read_mapped(*mapping, [&] {
    try {
      for (std::uint64_t first = 0; first < batch->pages.size();) {
        const PageFrames some = frames_of_pages(source, std::span(batch->pages).subspan(first));
        engine.fetch(*batch, some.source, first, some.frames, field.offset, field.bytes, core_->movers(), stream);
        first += some.frames.size();
      }
    } catch (...) {
      // The mapping must not end while a kernel may still use it.
      try {
        engine.wait(stream);
      } catch (const CudaError&) {
        // the first error is the one to report
      }
      throw;
    }
    engine.wait(stream);
  });
  engine.expand(*batch, out, stream);
  rows_gathered_ += count;
  rows_mapped_ += count;
  return true;
}

}  // namespace embermap
