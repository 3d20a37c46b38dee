// A store in a folder of its own for each test, and torch's view of its tables.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "nn/table_module.hpp"
#include "store/store.hpp"

namespace embermap {

using nn::torch_dtype;

class TableTest : public testing::Test {
 protected:
  TableTest() {
    std::string pattern = (std::filesystem::path(testing::TempDir()) / "embermap-nn-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
    folder_ = pattern;
    torch::manual_seed(1);
  }
  ~TableTest() override {
    store_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  Store& store() {
    if (!store_) store_ = Store::open(folder_ / "store", {.memory = 64ULL << 20, .device = device_});
    return *store_;
  }
  // Commits, and opens the store again for reading.
  void reopen_for_reading() {
    if (store_) store_->close();
    store_ = Store::open(folder_ / "store", {.mode = StoreOptions::Mode::kRead, .memory = 64ULL << 20});
  }

  // A table with normal rows (integers: 0, 1, 2, ... by element, modulo 100).
  Table make(std::uint64_t rows, std::uint64_t dim, const Optimizer& optimizer = Sgd{.lr = 0.5}, DType dtype = DType::kFloat32) {
    const std::string name = "table" + std::to_string(made_++);
    const bool random = is_floating(dtype);
    Table table = store().create(name, {.rows = rows,
                                        .dim = dim,
                                        .dtype = dtype,
                                        .optimizer = optimizer,
                                        .init = random ? Initializer(Normal{.mean = 0, .std = 1}) : Initializer(Zeros{}),
                                        .seed = 7});
    if (!random) {
      const auto shape = std::vector<std::int64_t>{static_cast<std::int64_t>(rows), static_cast<std::int64_t>(dim)};
      const torch::Tensor values =
          torch::arange(shape[0] * shape[1], torch::kInt64).remainder(100).to(torch_dtype(dtype)).contiguous();
      table.write(0, rows, {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
    }
    return table;
  }

  // All rows, as a tensor of its own.
  static torch::Tensor weights(Table table, const char* field = "weight", std::optional<torch::ScalarType> dtype = {}) {
    torch::Tensor out = torch::empty({static_cast<std::int64_t>(table.rows()), static_cast<std::int64_t>(table.dim())},
                                     dtype.value_or(torch_dtype(table.dtype())));
    std::vector<std::int64_t> ids(table.rows());
    std::iota(ids.begin(), ids.end(), 0);
    table.gather(ids, {static_cast<std::byte*>(out.data_ptr()), out.nbytes()}, field);
    return out;
  }

  // By central differences of `loss` in each element of a float64 table; the rows are as before after it.
  template <class Loss>
  static torch::Tensor numeric_gradient(Table table, const Loss& loss) {
    const torch::NoGradGuard no_grad;
    constexpr double kStep = 1e-6;
    const torch::Tensor all = weights(table);
    torch::Tensor out = torch::zeros_like(all);
    const auto with = [&](std::int64_t row, std::int64_t column, double change) {
      const torch::Tensor moved = all[row].clone();
      moved[column] += change;
      const std::vector<std::int64_t> where{row};
      table.scatter(where, {static_cast<const std::byte*>(moved.const_data_ptr()), moved.nbytes()});
      return loss();
    };
    for (std::int64_t row = 0; row < all.size(0); ++row) {
      for (std::int64_t column = 0; column < all.size(1); ++column) {
        const double up = with(row, column, kStep);
        out[row][column] = (up - with(row, column, -kStep)) / (2 * kStep);
      }
      with(row, 0, 0);
    }
    return out;
  }

  static torch::Tensor ids(std::vector<std::int64_t> values) { return torch::tensor(values, torch::kInt64); }

  std::filesystem::path folder_;
  int device_ = -1;
  std::optional<Store> store_;
  int made_ = 0;
};

// The name of a test that has a dtype for its parameter.
inline std::string named_by_dtype(const testing::TestParamInfo<DType>& test) { return std::string(dtype_name(test.param)); }

// The text of the exception of type E that `body` throws; a failure if it throws nothing or something else.
template <class E, class Body>
std::string text_of(const Body& body) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another exception: " << e.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

// Equal shape, dtype and bits.
inline testing::AssertionResult same(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes())
    return testing::AssertionFailure() << a.dtype() << a.sizes() << " against " << b.dtype() << b.sizes();
  if (torch::equal(a.cpu(), b.cpu())) return testing::AssertionSuccess();
  return testing::AssertionFailure() << a << "\nagainst\n" << b;
}

inline testing::AssertionResult close(const torch::Tensor& a, const torch::Tensor& b, double rtol, double atol) {
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes())
    return testing::AssertionFailure() << a.dtype() << a.sizes() << " against " << b.dtype() << b.sizes();
  if (torch::allclose(a.cpu(), b.cpu(), rtol, atol)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "largest difference " << (a.cpu() - b.cpu()).abs().max().item<double>() << "\n"
                                     << a << "\nagainst\n"
                                     << b;
}

}  // namespace embermap
