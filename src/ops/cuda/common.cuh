// What kernels share: sums in a fixed order, and the functions of one number that several operations need.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/activation.h"
#include "ops/kv_view.h"

namespace nibble::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// The sum over the warp in every lane, by a fixed tree.
__device__ inline float warp_sum(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}
__device__ inline float warp_max(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// The same over the block, by every thread of it. `s_warps` has a place for each warp.
template <class Combine>
__device__ float block_combine(float of_warp, float* s_warps, Combine combine) {
  __syncthreads();  // s_warps may still be read by the call before
  if (threadIdx.x % kWarp == 0) s_warps[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  float result = s_warps[0];
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) result = combine(result, s_warps[w]);
  return result;
}
__device__ inline float block_sum(float value, float* s_warps) {
  return block_combine(warp_sum(value), s_warps, [](float a, float b) { return a + b; });
}
__device__ inline float block_max(float value, float* s_warps) {
  return block_combine(warp_max(value), s_warps, [](float a, float b) { return fmaxf(a, b); });
}

// A block goes through `cols` columns: of each thread kBatch at a time, whose loads are then on their way
// together. Some are beyond the end.
inline constexpr int kBatch = 8;
template <class Visit>
__device__ inline void for_batches(int64_t cols, Visit visit) {
  for (int64_t first = threadIdx.x; first < cols; first += int64_t{kBatch} * blockDim.x) {
    int64_t columns[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) columns[j] = first + int64_t{j} * blockDim.x;
    visit(columns);
  }
}

// How many threads norm a row: so many at least that they add up at most 16 terms each of rows up to 8192.
inline constexpr int kWideNormThreads = 512;
__host__ __device__ inline int norm_threads(int64_t cols) {
  return cols <= 256 ? 32 : cols <= 1024 ? 128 : kWideNormThreads;
}
// The factor that rms_norm gives a row, by a block of norm_threads(cols): in a fixed order, whichever kernel
// does it.
__device__ inline float rms_factor(const float* row, int64_t cols, float eps, float* s_warps) {
  float sum = 0;
  for_batches(cols, [&](const auto& columns) {
    float x[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) x[j] = columns[j] < cols ? row[columns[j]] : 0.0f;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum = fmaf(x[j], x[j], sum);
  });
  return 1.0f / sqrtf(block_sum(sum, s_warps) / static_cast<float>(cols) + eps);
}
// to[c] = x[c] * factor * weight[c], by a block.
__device__ inline void rms_scale(const float* x, const float* weight, float factor, int64_t cols, float* to) {
  for_batches(cols, [&](const auto& columns) {
    float value[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      value[j] = columns[j] < cols ? x[columns[j]] * factor * weight[columns[j]] : 0.0f;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (columns[j] < cols) to[columns[j]] = value[j];
    }
  });
}

// Through float64, so that the result is the rounded one: the host's float functions are within a unit of it.
// For operations with few of them; attention takes expf.
__device__ inline float exp_exactly(float x) { return static_cast<float>(exp(static_cast<double>(x))); }
__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + exp_exactly(-x)); }
__device__ inline float softplus(float x) {
  return x > 20 ? x : static_cast<float>(log1p(exp(static_cast<double>(x))));
}

__device__ inline float activated(const ActivationSpec& spec, float gate, float up) {
  if (spec.kind != ActivationSpec::kSilu) {
    // As std::min and std::clamp treat NaN: it stays.
    gate = spec.limit < gate ? spec.limit : gate;
    up = up < -spec.limit ? -spec.limit : spec.limit < up ? spec.limit : up;
  }
  if (spec.kind == ActivationSpec::kGptOss)
    return gate / (1.0f + exp_exactly(-spec.alpha * gate)) * (up + 1.0f);
  return gate / (1.0f + exp_exactly(-gate)) * up;
}

// A number whose order is that of the scores: both zeros are the same, and NaN is minus infinity. Never 0.
__device__ inline uint32_t ordered(float score) {
  if (isnan(score)) score = -INFINITY;
  const uint32_t bits = score == 0.0f ? 0u : __float_as_uint(score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Where the token at `position` has its vector of head g, in vectors. Positions and pages are below 2^31, and
// division of 64 bits takes several times as long.
__device__ inline int64_t token_index(const KvView& kv, int32_t slot, int32_t position, int64_t g) {
  const auto at = static_cast<uint32_t>(position), tokens = static_cast<uint32_t>(kv.page_tokens);
  const int64_t page = kv.table[slot * kv.table_pages + at / tokens % static_cast<uint32_t>(kv.table_pages)];
  return (page * kv.kv_heads + g) * kv.page_tokens + at % tokens;
}

}  // namespace nibble::cuda
