// Tables made of tensors, for from_pretrained(). Private to nn/.
#pragma once

#include "nn/errors.hpp"
#include "nn/table_module.hpp"

namespace embermap::nn {

// A new table of the store with these rows, (rows, dim), of their dtype. Throws c10::ValueError (shape), c10::TypeError, and what
// Store::import throws.
Table create_from_tensor(Store& store, std::string_view name, const torch::Tensor& rows, const Optimizer& optimizer);

// A module over such a table. Where its options are refused no table is left.
template <class Module, class Options>
Module over_new_table(Store& store, std::string_view name, const torch::Tensor& rows, const Optimizer& optimizer, bool freeze,
                      const Options& options) {
  if (!freeze && std::holds_alternative<std::monostate>(optimizer))
    detail::refuse<c10::ValueError>("table '", printable(name), "': rows that are not frozen need an optimizer");
  const Table table = create_from_tensor(store, name, rows, optimizer);
  try {
    Module module(table, options);
    if (freeze) module->anchor().requires_grad_(false);
    return module;
  } catch (...) {
    store.remove(name);
    throw;
  }
}

}  // namespace embermap::nn
