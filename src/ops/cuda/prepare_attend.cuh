// Queries, keys and values on their way into attention: a warp a head, whose elements stay in shared memory
// between norm, rotation and where they go. Bytes: each element once read and once written.
#pragma once

#include "ops/cuda/common.cuh"

namespace nibble::cuda {

// s_x [K] = the normed (weight null: not) and rotated head x [K] of row t, by a warp.
__device__ inline void prepare_head(const PrepareAttendArgs& p, int64_t t, const float* x,
                                    const float* weight, float* s_x) {
  const auto dim = static_cast<int>(p.kv.head_dim);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int half = static_cast<int>(p.rope_table.cols) / 2;
  const float* table = p.rope_table.data + t * p.rope_table.stride;
  // What the first columns need is asked for at once, and of the others kAhead a lane together.
  constexpr int kAhead = 4;
  float first_weight[kAhead] = {}, first_turn[kAhead] = {};  // the latter: cosine and sine in turn
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    const int c = lane + j * kWarp, i = lane + j / 2 * kWarp;
    if (weight != nullptr && c < dim) first_weight[j] = weight[c];
    if (i < half) first_turn[j] = table[j % 2 * half + i];
  }
  float square = 0;
  for (int first = lane; first < dim; first += kAhead * kWarp) {
    float value[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) value[j] = first + j * kWarp < dim ? x[first + j * kWarp] : 0.0f;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j * kWarp >= dim) break;
      s_x[first + j * kWarp] = value[j];
      square = fmaf(value[j], value[j], square);
    }
  }
  if (weight != nullptr) {
    const float factor = 1.0f / sqrtf(warp_sum(square) / static_cast<float>(dim) + p.eps);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int c = lane + j * kWarp;
      if (c < dim) s_x[c] = s_x[c] * factor * first_weight[j];
    }
    for (int c = lane + kAhead * kWarp; c < dim; c += kWarp) s_x[c] = s_x[c] * factor * weight[c];
  }
  __syncwarp();
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
    if (i < half) turn(i, first_turn[j], first_turn[j + 1]);
  }
  for (int i = lane + kAhead / 2 * kWarp; i < half; i += kWarp) turn(i, table[i], table[half + i]);
  __syncwarp();
}

}  // namespace nibble::cuda
