// Who does what in the kernel of moe_decode(), and when.
//
// Of a task (two tiles of 16 weight rows times the rows of a block) the chunks of K are cut over warps, each
// of which keeps its slice of the rows, both parts, in registers over all tasks of a run. The loader asks the
// copy engine for the weights of task after task; the warps hand their sums to the finishers, who add them in
// the order of K and hand on h, or the products of down, while the others go on.
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
// Barriers of some warps of the block, by number: the multiplying warps are done with h, which the loader's
// waits for; the finishers have made weights of scores, which the multiplying ones wait for.
inline constexpr int kDoneBarrier = 1, kDoneThreads = (kWarps + 1) * 32;
inline constexpr int kWeightsBarrier = 2, kWeightsThreads = (kWarps + kFinishers) * 32;

// Hands on a word (struct Handed). No product makes a NaN of all ones; who brought one gets another.
__device__ inline void hand(uint32_t* to, uint32_t word) { store_relaxed(to, max(~word, 1u)); }

// By a warp: in each lane, words that are handed on, once all are there. For each bit i of `missing`, four of
// them from bytes(i) behind row(i); zero for the other bits.
template <int kCount, class Row, class Bytes>
__device__ inline void take(uint32_t missing, Row row, Bytes bytes, uint32_t (&words)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (uint32_t& word : words[i]) word = (missing >> i & 1) != 0 ? 0 : ~0u;
  }
  while (__any_sync(~0u, missing != 0)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_relaxed_if((missing >> i & 1) != 0, row(i), bytes(i), words[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t(&w)[4] = words[i];
      if (w[0] != 0 && w[1] != 0 && w[2] != 0 && w[3] != 0) missing &= ~(1u << i);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (uint32_t& word : words[i]) word = ~word;
  }
}

// Neighbouring tasks of one row block: `count` pairs of weight tiles, from `tile` on.
struct Run {
  bool down;
  int block, tile, count;
};

// The runs of this multiprocessor: its share of gate and up, then of down. Of down, those of its first block
// come last: that block is shared with the multiprocessor before, which was at its part of it only now.
struct Runs {
  const Groups& groups;
  int segment = -1;
  Place at = {}, end = {};

  // From `place` to the end of its block, or of the share.
  __device__ Place block_end(Place place) const {
    return place.block == end.block ? end : Place{place.block + 1, 0};
  }
  __device__ bool next(const MoeShape& s, Run& run) {
    while (at.block == end.block && at.tile == end.tile) {
      if (++segment == 3) return false;
      at = groups.share(segment > 0, 0), end = groups.share(segment > 0, 1);
      const Place own = at.tile == 0 ? at : block_end(at);
      if (segment == 1) at = own;
      if (segment == 2) end = own;
    }
    const Place to = block_end(at);
    run = {segment > 0, at.block, at.tile,
           (to.block == at.block ? to.tile : tiles_of(s, segment > 0)) - at.tile};
    at = to;
    return true;
  }
};

// How K is cut over the warps: warp p of a group takes chunks p, p + parts, ... It depends on K alone.
struct Split {
  int chunks, log_parts = 0, parts, groups, rows;  // rows: chunks of a warp, a multiple of kHeld
  __device__ Split(const MoeShape& s, bool down) : chunks(down ? s.width_chunks() : s.model_chunks()) {
    while (1 << log_parts < kWarps && chunks > kHeld << log_parts) ++log_parts;
    parts = 1 << log_parts;
    groups = kWarps >> log_parts;
    rows = ((chunks + (kHeld << log_parts) - 1) >> log_parts) / kHeld * kHeld;
  }
  // Which tasks of a round a warp works on, and what it has of K.
  __device__ int group(int warp) const { return warp >> log_parts; }
  __device__ int part(int warp) const { return warp & (parts - 1); }
  __device__ int chunks_of(int part) const { return (chunks - part + parts - 1) >> log_parts; }
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
template <TileKind kKind, bool kRoomy>
struct SharedLayout {
  static constexpr int kStages = kRoomy ? 2 * kHeld : kHeld, kBuffers = kRoomy ? 5 : 3;
  static constexpr bool kGroups = kRoomy;
  static constexpr int kStageBytes = kWarps * chunk_bytes(kKind);
  static constexpr int kBufferBytes = kWarps * kMaxTiles * 32 * 16;
  static constexpr int kSums = kStages * kStageBytes, kSumsBytes = kBuffers * kBufferBytes;
  static constexpr int kBarrierBytes = 2 * (kStages + kBuffers) * 8;
  static constexpr int kFewBytes = kGroups ? static_cast<int>(sizeof(FewRows)) : 0;
  // Few rows of x that fit are split by warps that do not route.
  static constexpr int kFewX = kSums + kSumsBytes;
  static constexpr int kFewXBytes =
      kRoomy ? (kMaxSharedBytes - kFewX - kBarrierBytes - kFewBytes) / 128 * 128 : 0;
  static constexpr int kBarriers = kFewX + kFewXBytes, kFewRows = kBarriers + kBarrierBytes;
  static constexpr int kBytes = kFewRows + kFewBytes;
  // Else a finisher could take a buffer for full that is not yet, but was not empty either.
  static_assert(kBuffers >= kFinishers);
};

}  // namespace nibble::cuda
