// What kernels share: sums in a fixed order, and the functions of one number that several operations need.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/activation.h"
#include "ops/kv_view.h"
#include "ops/op_args.h"

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

// The same over the first `threads` of the block (a multiple of a warp), by every thread of it. `s_warps` has
// a place for each warp.
template <class Combine>
__device__ float block_combine(float of_warp, float* s_warps, unsigned threads, Combine combine) {
  __syncthreads();  // s_warps may still be read by the call before
  if (threadIdx.x % kWarp == 0) s_warps[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  float result = s_warps[0];
  for (unsigned w = 1; w < threads / kWarp; ++w) result = combine(result, s_warps[w]);
  return result;
}
__device__ inline float block_sum(float value, float* s_warps, unsigned threads) {
  return block_combine(warp_sum(value), s_warps, threads, [](float a, float b) { return a + b; });
}
__device__ inline float block_sum(float value, float* s_warps) {
  return block_sum(value, s_warps, blockDim.x);
}
__device__ inline float block_max(float value, float* s_warps) {
  return block_combine(warp_max(value), s_warps, blockDim.x, [](float a, float b) { return fmaxf(a, b); });
}

// The first `threads` of a block go through `cols` columns: of each thread kBatch at a time, whose loads are
// then on their way together. Some are beyond the end.
inline constexpr int kBatch = 8;
template <class Visit>
__device__ inline void for_batches(int64_t cols, int threads, Visit visit) {
  if (static_cast<int>(threadIdx.x) >= threads) return;
  for (int64_t first = threadIdx.x; first < cols; first += int64_t{kBatch} * threads) {
    int64_t columns[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) columns[j] = first + int64_t{j} * threads;
    visit(columns);
  }
}

// How many threads norm a row: so many at least that they add up at most 16 terms each of rows up to 8192.
inline constexpr int kWideNormThreads = 512;
__host__ __device__ inline int norm_threads(int64_t cols) {
  return cols <= 256 ? 32 : cols <= 1024 ? 128 : kWideNormThreads;
}
// rms_norm of a row, by a block of norm_threads(cols) or more: put(column, value). The sum's order is the
// same whichever kernel does it.
template <class Put>
__device__ inline void rms_norm_row(const float* row, const float* weight, int64_t cols, float eps,
                                    float* s_warps, Put put) {
  const int threads = norm_threads(cols);
  float sum = 0, first_x[kBatch] = {}, first_weight[kBatch] = {};  // a thread's first batch, which may be all
  auto load = [&](const float* from, const auto& columns, float(&to)[kBatch]) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) to[j] = columns[j] < cols ? from[columns[j]] : 0.0f;
  };
  for_batches(cols, threads, [&](const auto& columns) {
    float x[kBatch];
    load(row, columns, x);
    if (columns[0] < threads) {
      load(weight, columns, first_weight);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) first_x[j] = x[j];
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) sum = fmaf(x[j], x[j], sum);
  });
  sum = block_sum(sum, s_warps, static_cast<unsigned>(threads));
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(cols) + eps);
  for_batches(cols, threads, [&](const auto& columns) {
    if (columns[0] >= threads) load(row, columns, first_x), load(weight, columns, first_weight);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (columns[j] < cols) put(columns[j], first_x[j] * factor * first_weight[j]);
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

// Of an output gate, one for each output: in float32, whose functions are within two units of it.
__device__ inline float gate_factor(OutputGate kind, float gate) {
  if (kind == OutputGate::kSigmoidElement) return 1.0f / (1.0f + expf(-gate));
  return gate > 20 ? gate : log1pf(expf(gate));
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
