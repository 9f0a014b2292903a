// Rows of x on their way into tile_gemm: as two bfloat16 parts, in units of 64 columns of kTokens rows, [2
// parts][4 steps][2][tokens][16 bytes], columns as in linear_tiles.cuh.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/linear_tiles.cuh"

namespace nibble::cuda {

// x, or the activation of x and up.
template <TileKind kKind, int kTokens>
__global__ void split_rows(const __grid_constant__ TileLinear p, int units) {
  using T = Tiles<kKind>;
  after_kernel_before();
  const int unit = blockIdx.x, slot = threadIdx.x % 8, step = slot / 2, eight = slot % 2;
  const int row = blockIdx.y * 32 + threadIdx.x / 8, rows = static_cast<int>(p.rows);
  if (row >= (rows + kTokens - 1) / kTokens * kTokens) return;
  uint32_t high[4] = {}, low[4] = {};
  if (row < rows) {
    const float* x = p.x + row * p.x_stride;
    const float* up = p.up + row * p.up_stride;
    auto value = [&](int c) {
      if (c >= p.k) return 0.0f;
      return p.prepare == Prepare::kGlu ? activated(p.activation, x[c], up[c]) : x[c];
    };
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int c =
          unit / T::kParts * T::kColumns + step_column<kKind>(q, unit % T::kParts, step) + 2 * eight;
      split(value(c), value(c + 1), high[q], low[q]);
    }
  }
  uint4* at = static_cast<uint4*>(p.workspace) +
              ((static_cast<int64_t>(row / kTokens) * units + unit) * 16 + slot) * kTokens + row % kTokens;
  at[0] = {high[0], high[1], high[2], high[3]};
  at[8 * kTokens] = {low[0], low[1], low[2], low[3]};
}

// The norm of x, a block a row.
template <TileKind kKind, int kTokens>
__global__ void norm_and_split_rows(const __grid_constant__ TileLinear p, int units) {
  using T = Tiles<kKind>;
  after_kernel_before();
  __shared__ float s_pieces[kNormPieces];
  const int row = blockIdx.x, columns = units * 64;
  // Four columns are a step of lane q: two pairs of each part.
  auto put = [&](int64_t column, const float4& x) {
    const auto c = static_cast<int>(column);
    const int unit = c / T::kColumns * T::kParts + c / 16 % T::kParts, q = c % T::kColumns / (16 * T::kParts);
    uint32_t* const at =
        static_cast<uint32_t*>(p.workspace) +
        (((static_cast<int64_t>(row / kTokens) * units + unit) * 16 + c % 16 / 4 * 2) * kTokens +
         row % kTokens) *
            4 +
        q;
    split(x.x, x.y, at[0], at[8 * kTokens * 4]);
    split(x.z, x.w, at[kTokens * 4], at[9 * kTokens * 4]);
  };
  const bool is_row = row < p.rows;
  if (is_row) {
    float* normed = p.normed + row * p.normed_stride;
    rms_norm_row(p.x + row * p.x_stride, p.norm, p.k, p.eps, s_pieces, [&](int64_t column, const float4& x) {
      store_four(normed, column, p.k, x);
      put(column, x);
    });
  }
  const int first = is_row ? (static_cast<int>(p.k) + 3) / 4 * 4 : 0;
  for (int c = first + static_cast<int>(threadIdx.x) * 4; c < columns; c += static_cast<int>(blockDim.x) * 4)
    put(c, {0, 0, 0, 0});
}

}  // namespace nibble::cuda
