#include "store/table.hpp"

#include "store/store_impl.hpp"
#include "store/table_impl.hpp"

namespace embermap {

Table::Table(std::shared_ptr<TableImpl> impl) : impl_{std::move(impl)} {}

const std::string& Table::name() const { return impl_->name(); }
std::filesystem::path Table::file() const { return impl_->data_path(); }
std::uint64_t Table::rows() const { return impl_->entry().geometry.rows; }
std::uint64_t Table::dim() const { return impl_->schema().dim(); }
DType Table::dtype() const { return impl_->schema().dtype(); }
const Schema& Table::schema() const { return impl_->schema(); }
Geometry Table::geometry() const { return impl_->entry().geometry; }
Optimizer Table::optimizer() const { return impl_->entry().optimizer; }
Initializer Table::initializer() const { return impl_->entry().init; }
std::uint64_t Table::seed() const { return impl_->entry().seed; }
std::uint64_t Table::page_bytes_option() const { return impl_->entry().page_bytes; }
std::uint64_t Table::memory() const { return impl_->entry().memory; }
std::uint64_t Table::step() const { return impl_->step(); }
std::uint64_t Table::optimizer_version() const { return impl_->optimizer_version(); }
bool Table::writable() const { return impl_->writable(); }
bool Table::big_endian() const { return impl_->entry().big_endian; }
bool Table::adopted() const { return impl_->entry().adopted.has_value(); }
void Table::set_optimizer(const Optimizer& optimizer) { impl_->set_optimizer(optimizer); }
std::optional<double> Table::carried() const { return impl_->carried(); }
void Table::set_step(std::uint64_t step, std::optional<double> carried) { impl_->set_step(step, carried); }

void Table::gather(std::span<const std::int64_t> ids, std::span<std::byte> out, std::string_view field) {
  impl_->gather(ids, out, field);
}
void Table::scatter(std::span<const std::int64_t> ids, std::span<const std::byte> rows, std::string_view field) {
  impl_->scatter(ids, rows, field);
}
void Table::add(std::span<const std::int64_t> ids, std::span<const std::byte> rows) { impl_->add(ids, rows); }
void Table::update(std::span<const std::int64_t> ids, std::span<const std::byte> grads, DType grad_dtype,
                   std::optional<double> lr) {
  impl_->update(ids, grads, grad_dtype, lr);
}
Prefetch Table::prefetch(std::span<const std::int64_t> ids) { return impl_->prefetch(ids); }

void Table::gather(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, std::string_view field,
                   CudaStream stream) {
  impl_->gather_device(device, ids, count, out, field, stream);
}
void Table::scatter(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, std::string_view field,
                    CudaStream stream) {
  impl_->scatter_device(device, ids, count, rows, field, stream);
}
void Table::add(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* rows, CudaStream stream) {
  impl_->add_device(device, ids, count, rows, stream);
}
void Table::update(int device, const std::int64_t* ids, std::uint64_t count, const std::byte* grads, DType grad_dtype,
                   CudaStream stream, std::optional<double> lr, const WorkingSet* from) {
  if (from != nullptr && impl_->update_kept(*from, count, grads, grad_dtype, stream, lr)) return;
  impl_->update_device(device, ids, count, grads, grad_dtype, stream, lr);
}
Prefetch Table::prefetch_pages(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  return impl_->prefetch_pages(device, ids, count, stream);
}
WorkingSet Table::prefetch(int device, const std::int64_t* ids, std::uint64_t count, CudaStream stream) {
  return impl_->prefetch_device(device, ids, count, stream);
}
bool Table::gather_prefetched(WorkingSet& ahead, std::uint64_t count, std::byte* out, CudaStream stream) {
  return impl_->gather_prefetched(ahead, count, out, stream);
}
bool Table::update_kept(const WorkingSet& from, std::uint64_t count, const std::byte* grads, DType grad_dtype, CudaStream stream,
                        std::optional<double> lr) {
  return impl_->update_kept(from, count, grads, grad_dtype, stream, lr);
}
WorkingSet Table::gather_working_set(int device, const std::int64_t* ids, std::uint64_t count, std::byte* out, CudaStream stream,
                                     bool check_later) {
  return impl_->gather_working_set(device, ids, count, out, stream, check_later);
}

void Table::read(std::uint64_t first, std::uint64_t count, std::span<std::byte> out, std::string_view field) {
  impl_->read(first, count, out, field);
}
void Table::write(std::uint64_t first, std::uint64_t count, std::span<const std::byte> rows, std::string_view field) {
  impl_->write(first, count, rows, field);
}

std::uint64_t Table::append(std::span<const std::byte> rows) { return Store::Impl::of(*impl_->core())->append(*impl_, rows); }
std::uint64_t Table::append_rows(const NewRows& rows, const Progress& progress) {
  return Store::Impl::of(*impl_->core())->append(*impl_, rows, progress);
}
void Table::set_memory(std::uint64_t bytes) { Store::Impl::of(*impl_->core())->set_memory(*impl_, bytes); }
void Table::resize(std::uint64_t rows) { Store::Impl::of(*impl_->core())->resize(*impl_, rows); }
void Table::materialize(const Progress& progress) { Store::Impl::of(*impl_->core())->materialize(*impl_, progress); }
VerifyReport Table::verify(const Progress& progress) { return impl_->verify(progress); }
void Table::accept(const Progress& progress) { impl_->accept(progress); }
RepairReport Table::repair_from(const Table& backup, const Progress& progress) {
  return impl_->repair_from(*backup.impl_, progress);
}
std::uint64_t Table::written_pages() const { return impl_->written_pages(); }
PageIoReport Table::io_report() const { return impl_->io_report(); }
DeviceStats Table::device_stats() const { return impl_->device_stats(); }
TableCounters Table::counters() const { return impl_->counters(); }
TableStats Table::stats() const { return impl_->stats(); }

}  // namespace embermap
