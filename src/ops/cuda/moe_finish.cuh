// What becomes of sums: activation, products of down, and the sum of a token's experts.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/moe_shared.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {

// What finishing the tasks of a run takes, made or loaded ahead of their sums.
struct Finish {
  int rows;      // of the block
  uint32_t* to;  // what becomes of its first row's sums
  // Of gate and up, or of down.
  float first_scale, second_scale = 0;
  const float *first_bias, *second_bias = nullptr;

  // unscale: that of the tiles.
  __device__ Finish(const MoeDecodeArgs& a, const Handed& handed, const Run& run, const RowBlock& block,
                    float unscale)
      : rows(block.count) {
    const PackedExpert& expert = a.experts[block.expert];
    if (run.down) {
      to = handed.partial + int64_t{block.first} * a.shape.model_chunks() * 128;
      first_scale = expert.down_scale * unscale;
      first_bias = expert.down_bias;
    } else {
      to = handed.h + int64_t{block.first} * a.shape.width_chunks() * 128;
      first_scale = expert.gate_scale * unscale, second_scale = expert.up_scale * unscale;
      first_bias = expert.gate_bias, second_bias = expert.up_bias;
    }
  }
};

// The sums of a task, from those that the warps left: the parts of K in their order.
__device__ inline float4 sum_of_parts(const float4* from, int parts) {
  float4 sum = *from;
#pragma unroll 4
  for (int p = 1; p < parts; ++p) {
    const float4 part = from[p * kMaxTiles * 32];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  return sum;
}

// A lane of the warps that multiplied had, of token 4 n + q, weight rows g and g + 8 of both tiles. Where
// there are no tokens for half of the lanes, those take over the rows g + 8.
template <TileKind kKind>
__device__ inline void finish_gate_up(const MoeDecodeArgs& a, const Finish& f, int tile, int n,
                                      const float4* parts_of_warps, int parts) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool takes_over = f.rows - n * kTokensOfTile <= 2;
  const int token = takes_over ? q % 2 : q, row = n * kTokensOfTile + token;
  const float4 sums = sum_of_parts(parts_of_warps + g * 4 + token, parts);
#pragma unroll 1
  for (int half = 0; half < (takes_over ? 1 : 2); ++half) {
    const int r = takes_over ? q / 2 : half, column = tile * 16 + r * 8 + g;
    float gate = (r == 0 ? sums.x : sums.y) * f.first_scale, up = (r == 0 ? sums.z : sums.w) * f.second_scale;
    __nv_bfloat162 parts_of_h = {};
    if (row < f.rows && column < s.width) {
      if (f.first_bias != nullptr) gate += f.first_bias[column];
      if (f.second_bias != nullptr) up += f.second_bias[column];
      split(activated(a.activation, gate, up), parts_of_h.x, parts_of_h.y);
    }
    // A word is a part of two neighbouring columns: the lane of the first makes that of the high parts.
    const uint32_t own = *reinterpret_cast<const uint32_t*>(&parts_of_h);
    const uint32_t other = __shfl_xor_sync(~0u, own, 4);
    const int part = g % 2, words = s.width_chunks() * 64;
    const uint32_t word = part == 0 ? __byte_perm(own, other, 0x5410) : __byte_perm(other, own, 0x7632);
    if (row < f.rows) hand(f.to + (row * 2 + part) * words + operand_place(kKind, column) / 2, word);
  }
}

__device__ inline void finish_down(const MoeDecodeArgs& a, const Finish& f, int tile, int n,
                                   const float4* parts_of_warps, int parts) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, first = tile * 32 + lane / 4, row = n * kTokensOfTile + lane % 4;
  const float4 sums = sum_of_parts(parts_of_warps + lane, parts);
  float values[4] = {sums.x * f.first_scale, sums.y * f.first_scale, sums.z * f.first_scale,
                     sums.w * f.first_scale};
  if (row >= f.rows) return;
  if (f.first_bias != nullptr) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      if (first + v * 8 < s.model) values[v] += f.first_bias[first + v * 8];
    }
  }
  uint32_t* const to = f.to + row * s.model_chunks() * 128 + first;
#pragma unroll
  for (int v = 0; v < 4; ++v) hand(to + v * 8, __float_as_uint(values[v]));
}

// The finishers take turns, round after round of the multiprocessor.
template <TileKind kKind, bool kDown, int kBuffers>
__device__ inline void finish_run(const MoeDecodeArgs& a, const Finish& f, const Run& run, const Split& k,
                                  const float4* buffers, Ring<kBuffers>& in, int& turn) {
  const int tiles = (f.rows + kTokensOfTile - 1) / kTokensOfTile;
  for (int task = 0; task < run.count; task += k.groups, in.advance()) {
    if (turn-- != 0) continue;
    turn = kFinishers - 1;
    in.wait_full();
    const float4* of_group = buffers + in.place * kWarps * kMaxTiles * 32;
    for (int at = task; at < min(task + k.groups, run.count); ++at, of_group += k.parts * kMaxTiles * 32) {
      for (int n = 0; n < tiles; ++n) {
        if constexpr (kDown) {
          finish_down(a, f, run.tile + at, n, of_group + n * 32, k.parts);
        } else {
          finish_gate_up<kKind>(a, f, run.tile + at, n, of_group + n * 32, k.parts);
        }
      }
    }
    warp_arrive(in.empty + in.place);
  }
}

// By a warp: makes h zero again, each multiprocessor some of it, once all have what they need of it. They
// count without a fence: what they loaded has come before they count, so no store that follows can meet it.
__device__ inline void clear_h(const MoeDecodeArgs& a, const Handed& handed) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  meet(kDoneBarrier, kDoneThreads);
  if (lane == 0) {
    count_up_to(handed.done, gridDim.x);
    // The next count begins in the next launch, when this one is over.
    while (load_relaxed(handed.done) != 0) {
    }
  }
  __syncwarp();
  const int64_t fours = static_cast<int64_t>(a.tokens) * a.shape.chosen * a.shape.width_chunks() * 32;
  for (int64_t i = int64_t{blockIdx.x} * 32 + lane; i < fours; i += int64_t{gridDim.x} * 32)
    reinterpret_cast<uint4*>(handed.h)[i] = {0, 0, 0, 0};
}

// A token's experts are added in the order of a, as soon as their products are there; those are zero again
// afterwards, for nobody else reads them.
__device__ inline void combine(const MoeDecodeArgs& a, const Handed& handed, const Groups& groups) {
  const MoeShape& s = a.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int d = s.model_chunks() * 128;
  // In 32 bits, whose division takes a fraction of the time of 64.
  const int of_token = d / 128, pieces = a.tokens * of_token, step = static_cast<int>(gridDim.x) * kWarps;
  for (int piece = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); piece < pieces;
       piece += step) {
    const int64_t t = piece / of_token;
    const int column = piece % of_token * 128 + lane * 4;
    float* const out = a.out + t * a.out_stride + column;
    float before[4];  // asked for together with the products
#pragma unroll
    for (int v = 0; v < 4; ++v) before[v] = a.adds && column + v < s.model ? out[v] : 0.0f;
    TakeShared shared(a, handed, t, column);
    float4 sum = {0, 0, 0, 0};
    for (int first = 0; first < s.chosen; first += 8) {  // eight loads under way, added in order
      uint32_t* from[8] = {};
      float weight[8] = {};
      const int count = min(s.chosen - first, 8);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (c >= count) continue;
        from[c] = handed.partial + groups.grouped_row(t, first + c) * d + column;
        weight[c] = groups.weight(t, first + c);
      }
      uint32_t parts[8][4];
      take((1u << count) - 1, [&](int c) { return from[c]; }, [](int) { return 0u; }, parts);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (c >= count) continue;
        *reinterpret_cast<uint4*>(from[c]) = {0, 0, 0, 0};
        sum.x += weight[c] * __uint_as_float(parts[c][0]), sum.y += weight[c] * __uint_as_float(parts[c][1]);
        sum.z += weight[c] * __uint_as_float(parts[c][2]), sum.w += weight[c] * __uint_as_float(parts[c][3]);
      }
    }
    float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int v = 0; v < 4; ++v) sums[v] = a.adds ? before[v] + sums[v] : sums[v];
    shared.add_to(sums);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      if (column + v < s.model) out[v] = sums[v];
    }
  }
}

}  // namespace nibble::cuda
