// Queries, keys and values on their way into attention: a warp a head, whose elements stay in shared memory
// between norm, rotation and where they go. Bytes: each element once read and once written.
#pragma once

#include "ops/cuda/common.cuh"

namespace nibble::cuda {

// What a lane needs of a head's first 128 columns, four beside each other, and of its rotation, asked for
// together.
struct HeadAhead {
  static constexpr int kTurns = 2;  // of a lane
  float4 x = {}, weight = {};
  float cosine[kTurns] = {}, sine[kTurns] = {};
  bool vectors = false;

  HeadAhead() = default;
  __device__ HeadAhead(const PrepareAttendArgs& p, int64_t t, const float* from, const float* norm) {
    const int64_t dim = p.kv.head_dim;
    const int lane = static_cast<int>(threadIdx.x % kWarp), half = static_cast<int>(p.rope_table.cols) / 2;
    const float* table = p.rope_table.data + t * p.rope_table.stride;
    vectors = dim % 4 == 0 && is_aligned(from) && is_aligned(norm);
    x = load_four(from, lane * 4, dim, vectors);
    if (norm != nullptr) weight = load_four(norm, lane * 4, dim, vectors);
#pragma unroll
    for (int j = 0; j < kTurns; ++j) {
      const int i = lane + j * kWarp;
      if (i < half) cosine[j] = table[i], sine[j] = table[half + i];
    }
  }
};

// s_x [K] = the normed (norm null: not) and rotated head `from` [K] of row t, by a warp.
__device__ inline void prepare_head(const PrepareAttendArgs& p, int64_t t, const float* from,
                                    const float* norm, const HeadAhead& ahead, float* s_x) {
  const auto dim = static_cast<int>(p.kv.head_dim);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  // In the order of rms_norm_row: each half of the warp has a piece of every 128 columns, which are of its
  // first and of its second chain in turn.
  constexpr int kColumns = 4 * kWarp;
  float chains[2] = {};
  float4 weighted = ahead.x;
#pragma unroll 1
  for (int first = 0, turn = 0; first < dim; first += kColumns, turn ^= 1) {
    const int c = first + lane * 4;
    float4 x = first == 0 ? ahead.x : load_four(from, c, dim, ahead.vectors);
    chains[turn] += piece_of_lanes(square_of(x));
    if (norm != nullptr) x = times(x, first == 0 ? ahead.weight : load_four(norm, c, dim, ahead.vectors));
    if (first == 0) weighted = x;
    if (first > 0 || norm == nullptr) store_four(s_x, c, dim, x);
  }
  if (norm != nullptr) {
    float squares = 0;
#pragma unroll
    for (float chain : chains) squares += chain + __shfl_xor_sync(kAllLanes, chain, kWarp / 2);
    const float factor = norm_factor(squares, dim, p.eps);
    store_four(s_x, lane * 4, dim, times(weighted, factor));
#pragma unroll 1
    for (int c = kColumns + lane * 4; c < dim; c += kColumns) {
#pragma unroll 1
      for (int i = c; i < min(c + 4, dim); ++i) s_x[i] *= factor;
    }
  }
  __syncwarp();
  const int half = static_cast<int>(p.rope_table.cols) / 2;
  const float* table = p.rope_table.data + t * p.rope_table.stride;
  const bool halves = p.rope_style == RopeStyle::kHalves;
  const int step = halves ? 1 : 2, partner = halves ? half : 1;
  auto turn = [&](int i, float cosine, float sine) {
    float* first = s_x + i * step;
    const float a = first[0], b = first[partner];
    first[0] = a * cosine - b * sine;
    first[partner] = b * cosine + a * sine;
  };
#pragma unroll
  for (int j = 0; j < HeadAhead::kTurns; ++j) {
    const int i = lane + j * kWarp;
    if (i < half) turn(i, ahead.cosine[j], ahead.sine[j]);
  }
#pragma unroll 1
  for (int i = lane + HeadAhead::kTurns * kWarp; i < half; i += kWarp) turn(i, table[i], table[half + i]);
  __syncwarp();
}

}  // namespace nibble::cuda
