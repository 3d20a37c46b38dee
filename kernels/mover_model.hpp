// Which way rows cross the link between host and device fastest: what was measured on this machine, and the choice made by it.
// Plain C++: it works, and is tested, without a device.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace embermap {

// One way of moving rows: by a kernel of so many blocks that reads and writes the frames itself (zero-copy), by threads of the
// host that copy rows to and from pinned chunks for a DMA stream, or by both at once.
struct MoverWay {
  unsigned blocks = 0;  // 0: no kernel
  unsigned block_threads = 0;
  unsigned host_threads = 0;  // 0: none
  bool operator==(const MoverWay&) const = default;
};

// What is moved.
struct MoverCase {
  bool fetch = true;             // to the device; false: back
  std::uint64_t rows = 0;        // distinct rows of the batch
  std::uint64_t row_bytes = 0;   // of each that are moved
  std::uint64_t pool_bytes = 0;  // among which they lie
  unsigned threads = 0;          // that the host has for it
  bool operator==(const MoverCase&) const = default;
};

// How fast a way was in a case.
struct MoverRate {
  MoverWay way;
  double bytes_per_second = 0;
  double thread_share = 0;  // of the rows that host threads moved
  bool operator==(const MoverRate&) const = default;
};
struct MoverMeasurement {
  MoverCase of;
  std::vector<MoverRate> rates;
  bool operator==(const MoverMeasurement&) const = default;
};

// More threads take from each other and from the kernel.
inline constexpr unsigned kMostMoverThreads = 8;

// The ways that are tried where the host has `threads` threads. Kernels of few blocks leave most of a device to others; more of
// them are faster where a batch's rows lie close together.
std::vector<MoverWay> mover_ways(unsigned threads);

// Thread-safe.
class MoverModel {
 public:
  // The fastest way in the measured case that is most like this one, or of several that are about as fast the one with the fewest
  // blocks: a multiprocessor that moves rows computes nothing. Without any measurement for as many threads a choice that is
  // good on the machines that we know: a kernel for few bytes, both movers for more.
  MoverRate choose(const MoverCase& of) const;
  // The same among the ways that need no threads of the host.
  MoverRate choose_kernel(const MoverCase& of) const;
  // Whether something like it was measured: rows of about this length in a pool of about this size.
  bool knows(const MoverCase& of) const;
  // Replaces measurements of the same case.
  void add(std::vector<MoverMeasurement> measured);
  std::vector<MoverMeasurement> measurements() const;
  void clear();

 private:
  // Of the nearest case, the way that is chosen among those that `may` accepts; none without a case.
  template <class May>
  std::optional<MoverRate> fastest(const MoverCase& of, const May& may) const;
  mutable std::mutex mutex_;
  std::vector<MoverMeasurement> measured_;
};

}  // namespace embermap
