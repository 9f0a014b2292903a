// Queries, keys and values on their way into attention: a warp a head, whose elements stay in shared memory
// between norm, rotation and where they go. Bytes: each element once read and once written.
#pragma once

#include "ops/cuda/common.cuh"

namespace nibble::cuda {

// What a lane needs of a head's first columns, asked for together: all of it up to kAhead * kWarp columns.
struct HeadAhead {
  static constexpr int kAhead = 4;
  float x[kAhead] = {}, weight[kAhead] = {}, turn[kAhead] = {};  // the latter: cosine and sine in turn

  HeadAhead() = default;
  __device__ HeadAhead(const PrepareAttendArgs& p, int64_t t, const float* from, const float* norm) {
    const auto dim = static_cast<int>(p.kv.head_dim), half = static_cast<int>(p.rope_table.cols) / 2;
    const float* table = p.rope_table.data + t * p.rope_table.stride;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int lane = static_cast<int>(threadIdx.x % kWarp), c = lane + j * kWarp, i = lane + j / 2 * kWarp;
      if (c < dim) x[j] = from[c];
      if (norm != nullptr && c < dim) weight[j] = norm[c];
      if (i < half) turn[j] = table[j % 2 * half + i];
    }
  }
};

// s_x [K] = the normed (norm null: not) and rotated head `from` [K] of row t, by a warp.
__device__ inline void prepare_head(const PrepareAttendArgs& p, int64_t t, const float* from,
                                    const float* norm, const HeadAhead& ahead, float* s_x) {
  constexpr int kAhead = HeadAhead::kAhead;
  const auto dim = static_cast<int>(p.kv.head_dim);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  float square = 0;
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    const int c = lane + j * kWarp;
    if (c < dim) s_x[c] = ahead.x[j];
    square = fmaf(ahead.x[j], ahead.x[j], square);
  }
#pragma unroll 4
  for (int c = lane + kAhead * kWarp; c < dim; c += kWarp) {
    const float value = from[c];
    s_x[c] = value;
    square = fmaf(value, value, square);
  }
  if (norm != nullptr) {
    const float factor = 1.0f / sqrtf(warp_sum(square) / static_cast<float>(dim) + p.eps);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int c = lane + j * kWarp;
      if (c < dim) s_x[c] = ahead.x[j] * factor * ahead.weight[j];
    }
    for (int c = lane + kAhead * kWarp; c < dim; c += kWarp) s_x[c] = s_x[c] * factor * norm[c];
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
  for (int j = 0; j < kAhead; j += 2) {
    const int i = lane + j / 2 * kWarp;
    if (i < half) turn(i, ahead.turn[j], ahead.turn[j + 1]);
  }
  for (int i = lane + kAhead / 2 * kWarp; i < half; i += kWarp) turn(i, table[i], table[half + i]);
  __syncwarp();
}

}  // namespace nibble::cuda
