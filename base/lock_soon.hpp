// Taking a mutex that is held for a moment only.
#pragma once

#include <mutex>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace embermap {

// Locks as lock.lock(), but tries for a fraction of a millisecond before it goes to sleep. Sixteen threads that end the same work
// want the same mutex together, and each one that sleeps costs whoever wakes it a call to the system, and itself tens of
// microseconds.
inline void lock_soon(std::unique_lock<std::mutex>& lock) {
  for (int tries = 0; tries < 500; ++tries) {
    if (lock.try_lock()) return;
#if defined(__SSE2__)
    for (int i = 0; i < 8; ++i) _mm_pause();
#endif
  }
  lock.lock();
}

}  // namespace embermap
