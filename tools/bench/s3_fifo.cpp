#include "tools/bench/s3_fifo.hpp"

#include <algorithm>

namespace embermap::bench {
namespace {

std::uint32_t hash_of(std::uint64_t page) noexcept {
  page = (page ^ (page >> 32)) * 0x9E3779B97F4A7C15ULL;
  return static_cast<std::uint32_t>(((page ^ (page >> 29)) * 0xBF58476D1CE4E5B9ULL) >> 32);
}

std::uint64_t share_of(std::uint64_t frames, double share) noexcept {
  return static_cast<std::uint64_t>(static_cast<double>(frames) * share);
}

}  // namespace

// A quarter more than are remembered: buckets do not fill evenly.
std::uint64_t S3Fifo::Memory::slots(std::uint64_t reach) noexcept { return (reach + reach / 4 + kBucket) / kBucket * kBucket; }

std::span<S3Fifo::Memory::Slot> S3Fifo::Memory::bucket(std::uint32_t hash) noexcept {
  return {slots_.data() + (hash * (slots_.size() / kBucket) >> 32) * kBucket, kBucket};
}

void S3Fifo::Memory::add(std::uint32_t hash) noexcept {
  if (++now_ == 0) now_ = 1;
  Slot* oldest = nullptr;
  for (Slot& slot : bucket(hash)) {
    if (slot.time == 0) {
      oldest = &slot;
      break;
    }
    if (oldest == nullptr || now_ - slot.time > now_ - oldest->time) oldest = &slot;
  }
  *oldest = {hash, now_};
}

bool S3Fifo::Memory::take(std::uint32_t hash) noexcept {
  for (Slot& slot : bucket(hash)) {
    if (slot.time == 0 || slot.hash != hash) continue;
    const bool fresh = now_ - slot.time < reach_;
    slot.time = 0;
    return fresh;
  }
  return false;
}

S3Fifo::S3Fifo(std::uint64_t frames, const Options& options)
    : options_{options},
      recent_{frames, options.recent},
      frames_(frames),
      small_frames_{std::max<std::uint64_t>(1, share_of(frames, options.small))},
      memory_{share_of(frames, options.remembered)} {}

std::uint64_t S3Fifo::memory_bytes(std::uint64_t frames, const Options& options) noexcept {
  return frames * (sizeof(Frame) + RecentHolds::kFrameBytes) +
         Memory::slots(share_of(frames, options.remembered)) * sizeof(Memory::Slot);
}

void S3Fifo::push(std::uint32_t index, Place place) noexcept {
  Queue& to = queue(place);
  Frame& frame = frames_[index];
  frame.place = place;
  frame.newer = kNone;
  frame.older = to.newest;
  (to.newest == kNone ? to.oldest : frames_[to.newest].newer) = index;
  to.newest = index;
  ++to.size;
}

void S3Fifo::unlink(std::uint32_t index) noexcept {
  const Frame& frame = frames_[index];
  Queue& from = queue(frame.place);
  (frame.newer == kNone ? from.newest : frames_[frame.newer].older) = frame.older;
  (frame.older == kNone ? from.oldest : frames_[frame.older].newer) = frame.newer;
  --from.size;
}

void S3Fifo::begin(Hold hold) noexcept {
  recent_.begin(hold);
  look_again();
}

void S3Fifo::used(std::uint32_t index) noexcept {
  if (!recent_.used(index)) return;
  std::uint8_t& uses = frames_[index].uses;
  if (uses < options_.limit) ++uses;
}

void S3Fifo::make_room(std::uint64_t victims) noexcept {
  recent_.make_room(victims);
  look_again();
}

void S3Fifo::inserted(std::uint32_t index, std::uint64_t page) noexcept {
  recent_.inserted(index);
  frames_[index].page_hash = hash_of(page);
  frames_[index].uses = 0;
  push(index, memory_.take(frames_[index].page_hash) ? Place::kMain : Place::kSmall);
}

void S3Fifo::removed(std::uint32_t index) noexcept {
  unlink(index);
  frames_[index].place = Place::kOut;
  recent_.removed(index);
}

}  // namespace embermap::bench
