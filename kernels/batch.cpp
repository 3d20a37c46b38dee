#include "kernels/batch.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <limits>
#include <new>

#include "base/checked.hpp"
#include "base/error.hpp"

namespace embermap {
namespace {

// A key and where it stood. Keys that differ in at most 32 neighbouring bits, which row ids nearly always do, travel as those
// bits and the position in one 64-bit word; others as they are.
struct Packed {
  std::uint64_t word;
  std::uint64_t key() const { return word >> 32; }
  std::uint32_t position() const { return static_cast<std::uint32_t>(word); }
};
struct Wide {
  std::uint64_t bits;
  std::uint32_t place;
  std::uint64_t key() const { return bits; }
  std::uint32_t position() const { return place; }
};

constexpr unsigned kMaxDigitBits = 11;      // 2048 counters: 16 KiB, and as many open lines as a core keeps track of
constexpr std::uint64_t kMinChunk = 32768;  // ids a thread must have for a share of the sort to be worth waking it

// Memory fresh from the system costs a fault for every 4 KiB first touched: for a million ids that is four times the work of
// sorting them. Huge pages take 512 times fewer. A hint: where it is refused, everything works as before.
constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
void prefer_huge_pages(void* begin, std::uint64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t first = round_up(address, kHugePage);
  const std::uintptr_t last = (address + bytes) / kHugePage * kHugePage;
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

template <class T>
void resize_on_huge_pages(std::vector<T>& vector, std::uint64_t size) {
  vector.reserve(size);
  prefer_huge_pages(vector.data(), size * sizeof(T));
  vector.resize(size);
}

// Uninitialised room for `count` items that need neither constructor nor destructor.
template <class Item>
class Scratch {
 public:
  explicit Scratch(std::uint64_t count)
      : alignment_{count * sizeof(Item) < kHugePage ? std::align_val_t{64} : std::align_val_t{kHugePage}},
        items_{static_cast<Item*>(::operator new(count * sizeof(Item), alignment_))} {
    prefer_huge_pages(items_, count * sizeof(Item));
  }
  ~Scratch() { ::operator delete(items_, alignment_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Item* data() { return items_; }

 private:
  std::align_val_t alignment_;
  Item* items_;
};

// How the sequence is cut for the threads. The result does not depend on it.
struct Chunks {
  std::uint64_t count = 1, length = 0;
  Chunks(std::uint64_t n, unsigned threads)
      : count{std::clamp<std::uint64_t>(n / kMinChunk, 1, threads)}, length{ceil_div(n, count)} {}
};

// body(chunk, begin, end) for each chunk of [0, n), in parallel.
template <class Body>
void for_chunks(const Chunks& chunks, std::uint64_t n, ThreadPool& pool, const Body& body) {
  pool.parallel_for(chunks.count, 1, [&](std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t chunk = first; chunk < last; ++chunk)
      body(chunk, std::min(n, chunk * chunks.length), std::min(n, (chunk + 1) * chunks.length));
  });
}

// The bits in which the keys differ: [low, low + width).
struct BitWindow {
  unsigned low = 0, width = 0;
};

struct Survey {
  std::uint64_t differing = 0;
  bool ascending = true;
};

Survey survey(std::span<const std::uint64_t> keys, const Chunks& chunks, ThreadPool& pool) {
  std::vector<Survey> found(chunks.count);
  for_chunks(chunks, keys.size(), pool, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
    std::uint64_t differing = 0;
    std::uint64_t descents = 0;
    std::uint64_t before = keys[begin == 0 ? 0 : begin - 1];
    for (std::uint64_t i = begin; i < end; ++i) {
      differing |= keys[i] ^ keys[0];
      descents += std::uint64_t{keys[i] < before};
      before = keys[i];
    }
    found[chunk] = {differing, descents == 0};
  });
  Survey all;
  for (const Survey& part : found) {
    all.differing |= part.differing;
    all.ascending = all.ascending && part.ascending;
  }
  return all;
}

// Stable sort of `from` by bits [low, low + width) of the key; `to` is scratch of the same length. Returns whichever holds the
// result.
template <class Item>
Item* radix_sort(Item* from, Item* to, std::uint64_t n, BitWindow window, const Chunks& chunks, ThreadPool& pool) {
  const unsigned most = n < 4096 ? 8 : kMaxDigitBits;
  const unsigned passes = (window.width + most - 1) / most;
  const unsigned bits = (window.width + passes - 1) / passes;
  const std::uint64_t buckets = std::uint64_t{1} << bits;
  std::vector<std::uint64_t> counters(chunks.count * buckets);
  for (unsigned pass = 0; pass < passes; ++pass) {
    const unsigned shift = window.low + pass * bits;
    const auto digit = [&](const Item& item) { return (item.key() >> shift) & (buckets - 1); };
    std::fill(counters.begin(), counters.end(), 0);
    for_chunks(chunks, n, pool, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
      std::uint64_t* const mine = counters.data() + chunk * buckets;
      for (std::uint64_t i = begin; i < end; ++i) ++mine[digit(from[i])];
    });
    std::uint64_t sum = 0;
    bool one_bucket = false;
    for (std::uint64_t bucket = 0; bucket < buckets; ++bucket) {
      const std::uint64_t before = sum;
      for (std::uint64_t chunk = 0; chunk < chunks.count; ++chunk) {
        const std::uint64_t here = counters[chunk * buckets + bucket];
        counters[chunk * buckets + bucket] = sum;
        sum += here;
      }
      one_bucket = one_bucket || sum - before == n;
    }
    if (one_bucket) continue;  // all keys agree in this digit
    for_chunks(chunks, n, pool, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
      std::uint64_t* const mine = counters.data() + chunk * buckets;
      for (std::uint64_t i = begin; i < end; ++i) to[mine[digit(from[i])]++] = from[i];
    });
    std::swap(from, to);
  }
  return from;
}

// Groups n sorted items. sort_key(i) orders as the keys do, key(i) and position(i) are what the batch gets.
template <class SortKey, class Key, class Position>
Batch group(std::uint64_t n, const Chunks& chunks, ThreadPool& pool, const SortKey& sort_key, const Key& key,
            const Position& position) {
  Batch batch;
  resize_on_huge_pages(batch.positions, n);
  const auto begins = [&](std::uint64_t i) { return i == 0 || sort_key(i) != sort_key(i - 1); };
  std::vector<std::uint64_t> groups(chunks.count);
  for_chunks(chunks, n, pool, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
    std::uint64_t count = 0;
    for (std::uint64_t i = begin; i < end; ++i) {
      count += std::uint64_t{begins(i)};
      batch.positions[i] = position(i);
    }
    groups[chunk] = count;
  });
  std::uint64_t distinct = 0;
  for (std::uint64_t& count : groups) {
    const std::uint64_t before = distinct;
    distinct += count;
    count = before;
  }
  resize_on_huge_pages(batch.keys, distinct);
  resize_on_huge_pages(batch.starts, distinct + 1);
  for_chunks(chunks, n, pool, [&](std::uint64_t chunk, std::uint64_t begin, std::uint64_t end) {
    std::uint64_t at = groups[chunk];
    for (std::uint64_t i = begin; i < end; ++i) {
      if (!begins(i)) continue;
      batch.keys[at] = key(i);
      batch.starts[at] = static_cast<std::uint32_t>(i);
      ++at;
    }
  });
  batch.starts[distinct] = static_cast<std::uint32_t>(n);
  return batch;
}

template <class Item, class Make, class Restore>
Batch sort_and_group(std::uint64_t n, BitWindow window, const Chunks& chunks, ThreadPool& pool, const Make& make,
                     const Restore& restore) {
  Scratch<Item> room(2 * n);
  Item* const items = room.data();
  for_chunks(chunks, n, pool, [&](std::uint64_t, std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t i = begin; i < end; ++i) items[i] = make(i);
  });
  const Item* const sorted = radix_sort(items, items + n, n, window, chunks, pool);
  return group(
      n, chunks, pool, [&](std::uint64_t i) { return sorted[i].key(); }, [&](std::uint64_t i) { return restore(sorted[i]); },
      [&](std::uint64_t i) { return sorted[i].position(); });
}

}  // namespace

Batch make_batch(std::span<const std::uint64_t> keys, ThreadPool& pool) {
  const std::uint64_t n = keys.size();
  if (n > kMaxBatch) throw InvalidArgument(fmt::format("{} ids in one batch: at most {}", n, kMaxBatch));
  if (n == 0) return Batch{{}, {}, {0}};
  const Chunks chunks(n, pool.threads());
  const Survey seen = survey(keys, chunks, pool);
  if (seen.ascending) {
    const auto key = [&](std::uint64_t i) { return keys[i]; };
    return group(n, chunks, pool, key, key, [](std::uint64_t i) { return static_cast<std::uint32_t>(i); });
  }
  const auto low = static_cast<unsigned>(std::countr_zero(seen.differing));
  const BitWindow window{low, 64 - static_cast<unsigned>(std::countl_zero(seen.differing)) - low};
  if (window.width > 32)
    return sort_and_group<Wide>(
        n, window, chunks, pool,
        [&](std::uint64_t i) {
          return Wide{keys[i], static_cast<std::uint32_t>(i)};
        },
        [](const Wide& item) { return item.bits; });
  const std::uint64_t mask = (std::uint64_t{1} << window.width) - 1;
  const std::uint64_t common = keys[0] & ~(mask << low);
  return sort_and_group<Packed>(
      n, {0, window.width}, chunks, pool, [&](std::uint64_t i) { return Packed{(((keys[i] >> low) & mask) << 32) | i}; },
      [=](const Packed& item) { return common | (item.key() << low); });
}

std::optional<std::uint64_t> first_bad_id(std::span<const std::int64_t> ids, std::uint64_t rows) noexcept {
  constexpr std::uint64_t kBlock = 512;
  // An id is bad if it is negative or last - id is, `last` being rows - 1 (-1 for an empty table): one sign bit, no branch.
  const std::uint64_t last = std::min(rows, std::uint64_t{1} << 63) - 1;
  const auto badness = [&](std::int64_t id) { return static_cast<std::uint64_t>(id) | (last - static_cast<std::uint64_t>(id)); };
  for (std::uint64_t at = 0; at < ids.size(); at += kBlock) {
    const std::uint64_t stop = std::min<std::uint64_t>(ids.size(), at + kBlock);
    std::uint64_t bad = 0;
    for (std::uint64_t i = at; i < stop; ++i) bad |= badness(ids[i]);
    if ((bad >> 63) == 0) continue;
    while ((badness(ids[at]) >> 63) == 0) ++at;
    return at;
  }
  return {};
}

std::optional<std::uint64_t> first_bad_id(std::span<const std::int64_t> ids, std::uint64_t rows, ThreadPool& pool) {
  constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
  std::atomic<std::uint64_t> first{kNone};
  pool.parallel_for(ids.size(), 16384, [&](std::uint64_t begin, std::uint64_t end) {
    if (begin >= first.load(std::memory_order_relaxed)) return;
    if (const auto bad = first_bad_id(ids.subspan(begin, end - begin), rows)) keep_least(first, begin + *bad);
  });
  const std::uint64_t found = first.load();
  return found == kNone ? std::nullopt : std::optional{found};
}

void keep_least(std::atomic<std::uint64_t>& least, std::uint64_t value) noexcept {
  std::uint64_t best = least.load();
  while (value < best && !least.compare_exchange_weak(best, value)) {
  }
}

}  // namespace embermap
