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

// How many threads norm a row best: eight columns each, or more of a wide one.
__host__ __device__ inline int norm_threads(int64_t cols) {
  const int64_t threads = (cols + 255) / 256 * 32;
  return static_cast<int>(threads < 1024 ? threads : 1024);
}

// The order in which the squares of a row are added, whichever kernel does it. Four neighbouring columns one
// after the other (square_of); those of 16 columns as (0 + 1) + (2 + 3); the same of four of these, which is
// a piece of 64 columns; pieces 4 i + j one after the other are chain j; chains as (0 + 1) + (2 + 3).
inline constexpr int kNormPiece = 64;
__device__ inline float square_of(const float4& x) {
  return fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, x.x * x.x)));
}
// A piece of 16 neighbouring lanes with four columns each, in each of them.
__device__ inline float piece_of_lanes(float sum) {
#pragma unroll
  for (int distance = 1; distance < kNormPiece / 4; distance *= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}
// Of `count` pieces, to chain threadIdx.x % 4.
__device__ inline float add_pieces(float chain, const float* pieces, int count) {
  for (int i = static_cast<int>(threadIdx.x) % 4; i < count; i += 4) chain += pieces[i];
  return chain;
}
// By whole warps; a sum of squares in every lane, of the chains that it and its neighbours have.
__device__ inline float add_chains(float chain) {
  chain += __shfl_xor_sync(kAllLanes, chain, 1);
  return chain + __shfl_xor_sync(kAllLanes, chain, 2);
}
__device__ inline float norm_factor(float squares, int64_t cols, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
}

// Columns c .. c + 3 of a row, zero beyond its end: by one load each, or where `vectors` (the row is aligned
// to 16 bytes, and cols a multiple of 4), by one.
__device__ inline float4 load_four(const float* row, int64_t c, int64_t cols) {
  float4 x = {0, 0, 0, 0};
  if (c < cols) x.x = row[c];
  if (c + 1 < cols) x.y = row[c + 1];
  if (c + 2 < cols) x.z = row[c + 2];
  if (c + 3 < cols) x.w = row[c + 3];
  return x;
}
__device__ inline float4 load_four(const float* row, int64_t c, int64_t cols, bool vectors) {
  if (vectors && c < cols) return *reinterpret_cast<const float4*>(row + c);
  return load_four(row, c, cols);
}
// Columns c and c + 1, likewise; `vectors`: c even, the row aligned, and cols even.
__device__ inline float2 load_two(const float* row, int64_t c, int64_t cols, bool vectors) {
  if (vectors && c < cols) return *reinterpret_cast<const float2*>(row + c);
  return {c < cols ? row[c] : 0.0f, c + 1 < cols ? row[c + 1] : 0.0f};
}
__device__ inline void store_two(float* row, int64_t c, int64_t cols, float2 x, bool vectors) {
  if (vectors && c < cols) {
    *reinterpret_cast<float2*>(row + c) = x;
    return;
  }
  if (c < cols) row[c] = x.x;
  if (c + 1 < cols) row[c + 1] = x.y;
}
__device__ inline void store_four(float* row, int64_t c, int64_t cols, const float4& x) {
  const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (c + i < cols) row[c + i] = values[i];
  }
}
__device__ inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
__device__ inline float4 times(const float4& a, const float4& b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
}
__device__ inline float4 times(const float4& a, float b) { return times(a, float4{b, b, b, b}); }

// rms_norm of a row, by a block, whatever its size: put(column, four values), of which those beyond the end
// are zero. A value is (x * weight) * factor. s_pieces: kNormPieces, which the block's threads may still read
// from the call before.
inline constexpr int kNormPieces = 512;  // of a pass: 2 KB, and rows up to 32768 columns are one
template <class Put>
__device__ inline void rms_norm_row(const float* row, const float* weight, int64_t cols, float eps,
                                    float* s_pieces, Put put) {
  constexpr int kFours = 2;  // of a thread at a time; the first ones, which may be all, are kept
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const bool vectors = cols % 4 == 0 && is_aligned(row) && is_aligned(weight);
  const int64_t fours = (cols + kNormPiece - 1) / kNormPiece * (kNormPiece / 4);
  auto column = [&](int64_t first, int j) { return (first + j * threads + thread) * 4; };
  float4 first_weighted[kFours];
  float chain = 0;
  constexpr int64_t kFoursOfPass = int64_t{kNormPieces} * kNormPiece / 4;
  for (int64_t pass = 0; pass < fours; pass += kFoursOfPass) {
    const int64_t end = min(fours, pass + kFoursOfPass);
    __syncthreads();
    for (int64_t first = pass; first < end; first += kFours * threads) {
      float4 x[kFours], w[kFours];
#pragma unroll
      for (int j = 0; j < kFours; ++j) x[j] = load_four(row, column(first, j), cols, vectors);
      if (first == 0) {
#pragma unroll
        for (int j = 0; j < kFours; ++j) w[j] = load_four(weight, column(first, j), cols, vectors);
#pragma unroll
        for (int j = 0; j < kFours; ++j) first_weighted[j] = times(x[j], w[j]);
      }
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const float sum = piece_of_lanes(square_of(x[j]));
        const int64_t four = first + j * threads + thread;
        if (four % (kNormPiece / 4) == 0 && four < end) s_pieces[(four - pass) / (kNormPiece / 4)] = sum;
      }
    }
    __syncthreads();
    chain = add_pieces(chain, s_pieces, static_cast<int>((end - pass) / (kNormPiece / 4)));
  }
  const float factor = norm_factor(add_chains(chain), cols, eps);
  for (int64_t first = 0; first < fours; first += kFours * threads) {
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int64_t c = column(first, j);
      if (first > 0)
        first_weighted[j] = times(load_four(row, c, cols, vectors), load_four(weight, c, cols, vectors));
      if (c < cols) put(c, times(first_weighted[j], factor));
    }
  }
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
