// Rows of x on their way into tile_gemm: as two bfloat16 parts, in units of 64 columns of kTokens rows, [2
// parts][4 steps][2][tokens][16 bytes], columns as in linear_tiles.cuh.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear_tiles.cuh"

namespace nibble::cuda {

inline constexpr int kNormRows = 4, kNormThreads = 1024;  // of a block

// A lane's four pairs of columns, of row threadIdx.x % 4 and slot threadIdx.x / 4 % 8 (a step's eight) of a
// unit: a warp reads and writes 64 neighbouring bytes of each row, or slot.
template <TileKind kKind>
__device__ inline int slot_column(int unit, int q) {
  using T = Tiles<kKind>;
  const int slot = static_cast<int>(threadIdx.x) / 4 % 8;
  return unit / T::kParts * T::kColumns + step_column<kKind>(q, unit % T::kParts, slot / 2) + slot % 2 * 2;
}
template <int kTokens>
__device__ inline void put_slot(const TileLinear& p, int units, int row, int unit, const float2 (&x)[4]) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) split(x[q].x, x[q].y, high[q], low[q]);
  const int slot = static_cast<int>(threadIdx.x) / 4 % 8;
  uint4* at = static_cast<uint4*>(p.workspace) +
              ((static_cast<int64_t>(row / kTokens) * units + unit) * 16 + slot) * kTokens + row % kTokens;
  at[0] = {high[0], high[1], high[2], high[3]};
  at[8 * kTokens] = {low[0], low[1], low[2], low[3]};
}

// x, or the activation of x and up: a block a unit of 32 rows.
template <TileKind kKind, int kTokens>
__global__ void split_rows(const __grid_constant__ TileLinear p, int units) {
  after_kernel_before();
  const int unit = blockIdx.x, rows = static_cast<int>(p.rows);
  const int row = static_cast<int>(blockIdx.y * 32 + threadIdx.x / 32 * 4 + threadIdx.x % 4);
  if (row >= (rows + kTokens - 1) / kTokens * kTokens) return;
  float2 x[4] = {};
  if (row < rows) {
    auto load = [&](const float* from, float2(&to)[4]) {
      const bool vectors = p.k % 2 == 0 && is_aligned(from);
#pragma unroll
      for (int q = 0; q < 4; ++q) to[q] = load_two(from, slot_column<kKind>(unit, q), p.k, vectors);
    };
    load(p.x + row * p.x_stride, x);
    if (p.prepare == Prepare::kGlu) {
      float2 up[4];
      load(p.up + row * p.up_stride, up);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int c = slot_column<kKind>(unit, q);
        x[q].x = c < p.k ? activated(p.activation, x[q].x, up[q].x) : 0.0f;
        x[q].y = c + 1 < p.k ? activated(p.activation, x[q].y, up[q].y) : 0.0f;
      }
    }
  }
  put_slot<kTokens>(p, units, row, unit, x);
}

// The norm of x: blocks (kNormRows rows, a share of the columns), each of which adds up all squares, in the
// order of rms_norm_row.
template <TileKind kKind, int kTokens>
__global__ void __launch_bounds__(kNormThreads)
    norm_and_split_rows(const __grid_constant__ TileLinear p, int units) {
  after_kernel_before();
  constexpr int kOfRow = kNormThreads / kNormRows, kFours = 4;
  __shared__ float s_pieces[kNormRows][kNormPieces + 4];  // chains of all rows in banks of their own
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, rows = static_cast<int>(p.rows);
  const int first_row = static_cast<int>(blockIdx.x) * kNormRows;
  float chain = 0;  // lane % 4 of row lane / 4 % 4
  for (int64_t pass = 0; pass < p.k; pass += kNormPieces * kNormPiece) {
    const int64_t end = min(p.k, pass + kNormPieces * kNormPiece);
    const int pieces = static_cast<int>((end - pass + kNormPiece - 1) / kNormPiece);
    const int row = min(first_row + thread / kOfRow, rows - 1);
    const float* const x = p.x + row * p.x_stride;
    const bool vectors = p.k % 4 == 0 && is_aligned(x);
    __syncthreads();
    for (int first = 0; first < pieces; first += kFours * kOfRow * 4 / kNormPiece) {
      auto piece = [&](int j) { return first + (j * kOfRow + thread % kOfRow) * 4 / kNormPiece; };
      float4 fours[kFours];
#pragma unroll
      for (int j = 0; j < kFours; ++j)
        fours[j] = load_four(x, pass + piece(j) * kNormPiece + thread % 16 * 4, p.k, vectors);
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const float sum = piece_of_lanes(square_of(fours[j]));
        if (thread % 16 == 0 && piece(j) < pieces) s_pieces[thread / kOfRow][piece(j)] = sum;
      }
    }
    __syncthreads();
    chain = add_pieces(chain, s_pieces[lane / 4 % kNormRows], pieces);
  }
  const float factor =
      __shfl_sync(kAllLanes, norm_factor(add_chains(chain), p.k, p.eps), lane % kNormRows * 4);

  const int row = first_row + lane % kNormRows;
  const float* const x = p.x + row * p.x_stride;
  float* const normed = p.normed + row * p.normed_stride;
  const bool vectors = p.k % 2 == 0 && is_aligned(x) && is_aligned(p.norm) && is_aligned(normed);
  for (int unit = static_cast<int>(blockIdx.y) * (kNormThreads / 32) + thread / 32; unit < units;
       unit += static_cast<int>(gridDim.y) * (kNormThreads / 32)) {
    float2 values[4] = {};
    if (row < rows) {
      float2 weights[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        values[q] = load_two(x, slot_column<kKind>(unit, q), p.k, vectors);
        weights[q] = load_two(p.norm, slot_column<kKind>(unit, q), p.k, vectors);
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float2& v = values[q];
        v = {v.x * weights[q].x * factor, v.y * weights[q].y * factor};
        store_two(normed, slot_column<kKind>(unit, q), p.k, v, vectors);
      }
    }
    put_slot<kTokens>(p, units, row, unit, values);
  }
}

}  // namespace nibble::cuda
