// What becomes of sums: activation, products of down, and the sum of a token's experts.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/moe_shared.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {

// What becomes of the sums of a task. Of token 4 n + q, weight rows g and g + 8 of both tiles.
__device__ inline void finish_gate_up(const MoeDecodeArgs& a, const Workspace& w, const RowBlock& block,
                                      int tile, int n, const float4& sums) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, row = n * kTokensOfTile + lane % 4;
  const int i = s.width_chunks() * 128;
  const PackedExpert& expert = a.experts[block.expert];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int column = tile * 16 + r * 8 + g;
    float gate = (r == 0 ? sums.x : sums.y) * (expert.gate_scale * kUnscale);
    float up = (r == 0 ? sums.z : sums.w) * (expert.up_scale * kUnscale);
    if (column < s.width) {
      if (expert.gate_bias != nullptr) gate += expert.gate_bias[column];
      if (expert.up_bias != nullptr) up += expert.up_bias[column];
    }
    if (row < block.count) {
      __nv_bfloat16* to = w.h + static_cast<int64_t>(block.first + row) * 2 * i + operand_place<32>(column);
      split(column < s.width ? activated(a.activation, gate, up) : 0.0f, to[0], to[i]);
    }
  }
}

__device__ inline void finish_down(const MoeDecodeArgs& a, const Workspace& w, const RowBlock& block,
                                   int tile, int n, const float4& sums) {
  const MoeShape& s = a.shape;
  const int lane = threadIdx.x % 32, g = lane / 4, row = n * kTokensOfTile + lane % 4;
  const int d = s.model_chunks() * 128;
  const PackedExpert& expert = a.experts[block.expert];
  const float values[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const int column = tile * 32 + v * 8 + g;
    float value = values[v] * (expert.down_scale * kUnscale);
    if (expert.down_bias != nullptr && column < s.model) value += expert.down_bias[column];
    if (row < block.count) w.partial[static_cast<int64_t>(block.first + row) * d + column] = value;
  }
}

// The finishers take turns, round after round of the multiprocessor.
template <int kBuffers>
__device__ inline void finish_run(const MoeDecodeArgs& a, const Workspace& w, const Run& run,
                                  const RowBlock& block, const Split& k, const float4* buffers,
                                  Ring<kBuffers>& in, int& turn) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tiles = (block.count + kTokensOfTile - 1) / kTokensOfTile;
  for (int task = 0; task < run.count; task += k.groups, in.advance()) {
    if (turn-- != 0) continue;
    turn = kFinishers - 1;
    const int tasks = min(k.groups, run.count - task);
    in.wait_full();
    for (int group = 0; group < tasks; ++group) {
      for (int n = 0; n < tiles; ++n) {
        const float4* from = buffers + ((in.place * kWarps + group * k.parts) * kMaxTiles + n) * 32 + lane;
        float4 sum = *from;
#pragma unroll 4
        for (int part = 1; part < k.parts; ++part) {  // the parts of K, in order
          const float4 more = from[part * kMaxTiles * 32];
          sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        if (run.down) {
          finish_down(a, w, block, run.tile + task + group, n, sum);
        } else {
          finish_gate_up(a, w, block, run.tile + task + group, n, sum);
        }
      }
    }
    warp_arrive(in.empty + in.place);
    __syncwarp();
    if (lane == 0) {
      const Counters counters = counters_at(a.counters);
      add_release(run.down ? counters.finished : counters.ready + run.block, static_cast<uint32_t>(tasks));
    }
  }
}

// By a warp: waits until all products of down are there. The last multiprocessor that knows it makes the
// counters zero: nobody asks them any more.
__device__ inline void wait_for_all(const MoeDecodeArgs& a, int blocks) {
  const Counters counters = counters_at(a.counters);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t all = static_cast<uint32_t>(blocks) * static_cast<uint32_t>(tiles_of(a.shape, true));
  uint32_t known = 0;
  if (lane == 0) {
    while (load_relaxed(counters.finished) < all) {
    }
  }
  meet(kFinishedBarrier, (kWarps + 1) * 32);
  if (lane == 0) known = add_release(counters.finished, 1) - all + 1;
  if (__shfl_sync(~0u, known, 0) != gridDim.x) return;
  for (int i = lane; i < blocks; i += 32) counters.ready[i] = 0;
  if (lane == 0) *counters.finished = 0;
}

// Once all products of down are there: a token's experts are added in the order of a.
__device__ inline void combine(const MoeDecodeArgs& a, const Workspace& w, const Groups& groups) {
  const MoeShape& s = a.shape;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int d = s.model_chunks() * 128;
  meet(kFinishedBarrier, (kWarps + 1) * 32);
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
    TakeShared shared(a, t, column);
    float4 sum = {0, 0, 0, 0};
    for (int first = 0; first < s.chosen; first += 8) {  // eight loads under way, added in order
      float4 part[8];
      float weight[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (first + c >= s.chosen) continue;
        const int64_t row = groups.grouped_row(t, first + c);
        weight[c] = groups.weight(t, first + c);
        part[c] = __ldcg(reinterpret_cast<const float4*>(w.partial + row * d + column));
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (first + c >= s.chosen) continue;
        sum.x += weight[c] * part[c].x, sum.y += weight[c] * part[c].y;
        sum.z += weight[c] * part[c].z, sum.w += weight[c] * part[c].w;
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
