// One loop, compiled for several vector widths, chosen when the program runs. The project is built for baseline x86-64; hot loops
// are compiled once more for AVX2 and AVX-512. A plain if, not an ifunc (target_clones): it works for templates, with clang, and
// under the sanitizers. Loops that use only IEEE operations, compiled without contraction to fused multiply-add, give the same
// bits on every level.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDACC__)
#define EMBERMAP_VECTOR_LEVELS 1
#else
#define EMBERMAP_VECTOR_LEVELS 0
#endif

// For everything called inside with_widest_vectors: what is not inlined keeps the baseline's instructions.
#define EMBERMAP_ALWAYS_INLINE __attribute__((always_inline))

namespace embermap {

enum class VectorLevel : std::uint8_t { kBaseline, kAvx2, kAvx512 };

namespace detail {

inline VectorLevel detect_vector_level() noexcept {
#if EMBERMAP_VECTOR_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    return VectorLevel::kAvx512;
  if (__builtin_cpu_supports("avx2")) return VectorLevel::kAvx2;
#endif
  return VectorLevel::kBaseline;
}

// The level in use. Tests lower it to compare the levels; nothing else writes it.
inline std::atomic<VectorLevel>& vector_level() noexcept {
  static std::atomic<VectorLevel> level{detect_vector_level()};
  return level;
}

#if EMBERMAP_VECTOR_LEVELS
template <class Body>
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"), noinline)) void run_avx512(const Body& body) {
  body();
}
template <class Body>
__attribute__((target("avx2"), noinline)) void run_avx2(const Body& body) {
  body();
}
#endif

}  // namespace detail

// Calls body(), compiled for the widest vectors this machine has. `body` is a lambda marked EMBERMAP_ALWAYS_INLINE:
//   with_widest_vectors([&]() EMBERMAP_ALWAYS_INLINE { for (...) ... });
template <class Body>
void with_widest_vectors(const Body& body) {
#if EMBERMAP_VECTOR_LEVELS
  switch (detail::vector_level().load(std::memory_order_relaxed)) {
    case VectorLevel::kAvx512: return detail::run_avx512(body);
    case VectorLevel::kAvx2: return detail::run_avx2(body);
    case VectorLevel::kBaseline: break;
  }
#endif
  body();
}

}  // namespace embermap
