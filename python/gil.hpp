// The GIL, given up for a call and taken again for a callback, by threads that may outlive the interpreter.
//
// A daemon thread that wants the GIL when the interpreter has begun to end never gets it. Python up to 3.13 ends it by
// pthread_exit, which unwinds through C++ frames that let nothing out: std::terminate, and the process aborts in the middle of
// its ordinary end. Later ones have it sleep until the process is gone, and so do the classes here.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <exception>

namespace embermap::python {

// What a callback of a call throws when there is no interpreter any more to run it: the call ends, with all of its locks let go,
// and its thread sleeps where it would take the GIL back. Nobody ever sees this.
class InterpreterEnds final : public std::exception {
 public:
  const char* what() const noexcept override { return "the Python interpreter ends"; }
};

// Runs what takes the GIL, or may lose it: where Python would end the thread, it sleeps.
template <class Body>
auto or_sleep(const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    for (;;) ::pause();  // leaving this block would abort
  }
}

// Without the GIL as long as it lives.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_{PyEval_SaveThread()} {}
  ~WithoutGil() {
    or_sleep([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

// With the GIL as long as it lives. Throws InterpreterEnds.
class WithGil {
 public:
  WithGil() {
    // The thread that ends the interpreter has the GIL whenever it wants, also for what runs while objects are destroyed.
    if (is_ending() && ::gettid() != ::getpid()) throw InterpreterEnds();
    state_ = or_sleep([] { return PyGILState_Ensure(); });
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  static bool is_ending() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }
  PyGILState_STATE state_{};
};

}  // namespace embermap::python
