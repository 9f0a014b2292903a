// Who does what in the kernel of moe_decode(), and when.
//
// Of a task (two tiles of 16 weight rows times the rows of a block) the chunks of K are cut over warps, each
// of which keeps its slice of the rows, both parts, in registers over all tasks of a run. The loader asks the
// copy engine for the weights of task after task; the warps hand their sums to the finishers, who add them in
// the order of K and write h, or the products of down, while the others go on. What waits long (stores that
// must be seen before a counter) is thus in nobody's way.
#pragma once

#include "ops/cuda/moe_few.cuh"
#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

// The warps that multiply are two warp groups; the loader and the finishers are a third. Fewer of the former
// with more registers each, for the operands of x; two on a scheduler are enough to keep it busy.
inline constexpr int kWarps = 8;
inline constexpr int kLoader = kWarps, kFinishers = 3;
inline constexpr int kThreads = (kWarps + 1 + kFinishers) * 32;
// Of a thread, who starts with 65536 / kThreads, rounded down to 168.
inline constexpr int kMultiplyRegisters = 216, kOtherRegisters = 72;
// Chunks of a warp whose operands stay in registers: 128 of them with two tiles of tokens.
inline constexpr int kHeld = 4;
// Barriers of some warps of the block, by number.
inline constexpr int kReadyBarrier = 1, kFinishedBarrier = 2;

// Neighbouring tasks of one row block: `count` pairs of weight tiles, from `tile` on.
struct Run {
  bool down;
  int block, tile, count;
};

// The runs of this multiprocessor: its share of gate and up, then of down. Of down, those of its first block
// come last: that block is shared with the multiprocessor before, which was at its part of it only now.
struct Runs {
  const Groups& groups;
  int segment = -1, at = 0, end = 0;

  __device__ bool next(const MoeShape& s, Run& run) {
    while (at == end) {
      if (++segment == 3) return false;
      at = groups.share(segment > 0, 0), end = groups.share(segment > 0, 1);
      const int tiles = tiles_of(s, segment > 0), middle = min(end, (at + tiles - 1) / tiles * tiles);
      if (segment == 1) at = middle;
      if (segment == 2) end = middle;
    }
    const int tiles = tiles_of(s, segment > 0);
    run = {segment > 0, at / tiles, at % tiles, 0};
    run.count = min(end - at, tiles - run.tile);
    at += run.count;
    return true;
  }
};

// How K is cut over the warps: warp p of a group takes chunks p, p + parts, ... It depends on K alone.
struct Split {
  int chunks, parts = 1, groups, rows;  // rows: chunks of a warp, a multiple of kHeld
  __device__ Split(const MoeShape& s, bool down) : chunks(down ? s.width_chunks() : s.model_chunks()) {
    while (parts < kWarps && chunks > parts * kHeld) parts *= 2;
    groups = kWarps / parts;
    rows = (chunks + parts * kHeld - 1) / (parts * kHeld) * kHeld;
  }
};

// A ring of kCount places in shared memory between producers and consumers.
template <int kCount>
struct Ring {
  uint64_t *full, *empty;  // [kCount]
  int place = 0;
  uint32_t parity = 0;
  __device__ void wait_full() const { barrier_wait(full + place, parity); }
  __device__ void wait_empty() const { barrier_wait(empty + place, parity ^ 1); }
  // REQUIRES a divisor of kCount.
  __device__ void advance(int places = 1) {
    place += places;
    if (place == kCount) place = 0, parity ^= 1;
  }
};

// Dynamic shared memory. A stage: a chunk of each warp; there is one for each chunk that a warp holds, or
// two, so that all weights of down are under way when its rows are there. A buffer: the sums of a round of
// tasks. Where it has no room for many, few rows are not grouped here.
template <int kBlock, bool kRoomy>
struct SharedLayout {
  static constexpr int kStages = kRoomy ? 2 * kHeld : kHeld, kBuffers = kRoomy ? 8 : 3;
  static constexpr bool kGroups = kRoomy;
  static constexpr int kStageBytes = kWarps * chunk_bytes(kBlock);
  static constexpr int kBufferBytes = kWarps * kMaxTiles * 32 * 16;
  static constexpr int kSums = kStages * kStageBytes, kSumsBytes = kBuffers * kBufferBytes;
  static constexpr int kBarriers = kSums + kSumsBytes;
  static constexpr int kFewRows = kBarriers + 2 * (kStages + kBuffers) * 8;
  static constexpr int kBytes = kFewRows + (kGroups ? static_cast<int>(sizeof(FewRows)) : 0);
  // Else a finisher could take a buffer for full that is not yet, but was not empty either.
  static_assert(kBuffers >= kFinishers);
};

}  // namespace nibble::cuda
