// What embermap refuses of a caller's arguments, thrown as torch throws such things. Private to nn/.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <utility>

#include "base/error.hpp"

namespace embermap::nn::detail {

// Throws E, one of c10's errors, with these parts as its text. Without torch's C++ backtrace, which is for faults of the program
// and would come after the text in what().
template <class E, class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw E(c10::str(parts...));
}

// body(), whose errors about arguments become those that torch has for them: IndexError, TypeError, ValueError of c10, with the
// same text. Others (IoError, ClosedError, ReadOnlyError, ...) go through as they are.
template <class F>
decltype(auto) as_torch(F&& body) {
  try {
    return std::forward<F>(body)();
  } catch (const RowIdError& e) {
    throw c10::IndexError(e.what());
  } catch (const DTypeError& e) {
    throw c10::TypeError(e.what());
  } catch (const InvalidArgument& e) {
    throw c10::ValueError(e.what());
  }
}

}  // namespace embermap::nn::detail
