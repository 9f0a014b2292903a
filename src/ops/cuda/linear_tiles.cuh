// What the kernels of products with tiles share: how they are read, and the order of K.
#pragma once

#include <cstdint>

#include "ops/cuda/bf16_in_12.cuh"
#include "ops/cuda/common.cuh"
#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/primitives.cuh"
#include "ops/cuda/tile_decode.cuh"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {

// kBF16, kBF16In12: a chunk has 64 columns, where the 16 columns of product m16n8k16 number `step` are, for q
// = 0..3, 16 q + 4 step + 0..3. kBF16: [2 tiles][2 halves][4 steps][2][8 rows][16 bytes], the first two
// columns of each q in the first 16 bytes, the others in the second. So 8 rows of 16 bytes are what ldmatrix
// and wgmma read at once. kBF16In12: bf16_in_12.cuh. The 4-bit formats are those of moe_tiles.h, with 128
// columns, of which a lane's words 0 and 1 are part 0.
//
// visit<TileKind>():
template <class Visit>
auto with_kind(TileKind kind, Visit visit) {
  switch (kind) {
    case TileKind::kBF16:
      return visit.template operator()<TileKind::kBF16>();
    case TileKind::kBF16In12:
      return visit.template operator()<TileKind::kBF16In12>();
    case TileKind::kNvfp4:
      return visit.template operator()<TileKind::kNvfp4>();
    case TileKind::kMxfp4:
      return visit.template operator()<TileKind::kMxfp4>();
    case TileKind::kQ4:
      break;
  }
  return visit.template operator()<TileKind::kQ4>();
}

template <TileKind kKind>
struct Tiles {
  static constexpr bool kIsBF16 = is_bf16(kKind);
  // Block scales go on sums: what load_tile gives is weights without them.
  static constexpr bool kScalesSums = kKind == TileKind::kQ4;
  static constexpr int kBlock = block_columns(kKind);
  static constexpr int kParts = kIsBF16 ? 1 : 2;  // of 64 columns
  static constexpr int kColumns = 64 * kParts;
  static constexpr int kBytes = kKind == TileKind::kBF16       ? 4096
                                : kKind == TileKind::kBF16In12 ? bf16_in_12::kBytes
                                                               : chunk_bytes(kKind);
};
inline constexpr int kTaskRows = 2 * kTileRows;  // of a chunk
inline constexpr int kBF16StepBytes = 256, kBF16HalfBytes = 4 * kBF16StepBytes;

// The order of every sum: K is cut in 16 ranges. In a range, each step of 16 columns adds the products of the
// rows' high parts, then those of their low parts, from 0; four ranges after the other make a group, four
// groups after the other the sum. With kScalesSums the two steps of a block are added from 0, and the range
// adds block after block, times its scale (add_block).
inline constexpr int kRanges = 16, kGroups = 4, kRangesOfGroup = kRanges / kGroups;
__device__ inline int range_begin(int range, int chunks) { return range * chunks / kRanges; }

// Of the ranges' sums, `step` from each other.
__device__ inline float sum_of_ranges(const float* of_range, int step) {
  float sum = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float of_group = 0;
#pragma unroll
    for (int i = 0; i < kRangesOfGroup; ++i) of_group += of_range[(group * kRangesOfGroup + i) * step];
    sum += of_group;
  }
  return sum;
}

// The first of lane q's four columns of step `step` of part `part`, in the chunk.
template <TileKind kKind>
__device__ inline int step_column(int q, int part, int step) {
  if constexpr (is_bf16(kKind)) return q * 16 + step * 4;
  return word_column(kKind, q, part * 2 + step / 2) + step % 2 * 4;
}

// The operands of one tile's four steps.
template <TileKind kKind>
__device__ inline void load_tile(const uint8_t* chunk, int tile, int lane, int part, uint32_t (&a)[4][4]) {
  using T = Tiles<kKind>;
  if constexpr (kKind == TileKind::kBF16) {
    const uint8_t* at = chunk + (tile * 2 + lane / 8 % 2) * kBF16HalfBytes + lane / 16 * 128 + lane % 8 * 16;
#pragma unroll
    for (int step = 0; step < 4; ++step) load_matrices(at + step * kBF16StepBytes, a[step]);
  } else if constexpr (kKind == TileKind::kBF16In12) {
    bf16_in_12::load_tile(chunk, tile, lane, a);
  } else {
    uint32_t both = 0;
    if constexpr (!T::kScalesSums) {
      constexpr int kScaleBytes = 2 * 32 / T::kBlock;
      const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kKind) + lane * kScaleBytes;
      uint32_t scales;
      if constexpr (kScaleBytes == 4) {
        scales = *reinterpret_cast<const uint32_t*>(at);
      } else {
        scales = *reinterpret_cast<const uint16_t*>(at);
      }
      both = scale_pair<T::kBlock>(scales, part);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 words =
          *reinterpret_cast<const uint2*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16 + part * 8);
      const uint32_t scale = half == 0 ? low_twice(both) : high_twice(both);
      uint32_t pairs[2][4];
      decode<kKind>(words.x, pairs[0]);
      decode<kKind>(words.y, pairs[1]);
#pragma unroll
      for (int p = 0; p < 8; ++p) {
        const uint32_t pair = pairs[p / 4][p % 4];
        a[p / 2][p % 2 * 2 + half] = T::kScalesSums ? pair : mul_bf16x2(pair, scale);
      }
    }
  }
}

// kCount sums of a range += those of block `block` of a chunk, times its scales. Sum i is of row g, and if i
// / 2 is odd, of row g + 8.
template <int kCount>
__device__ inline void add_block(const BlockScales& scales, int block, const float* of_block, float* sums) {
  const float2 scale = scales.of(block);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = fmaf(of_block[i], i / 2 % 2 == 0 ? scale.x : scale.y, sums[i]);
}

// Sixteen columns of this lane's row of x, those of a part.
struct RowPiece {
  float4 x[4];
};
// row null: zeros. vectors: aligned, and all columns are there.
// column: of the row, where the part begins for this lane.
template <TileKind kKind>
__device__ inline RowPiece load_piece(const float* row, int column, int k, bool vectors) {
  RowPiece piece = {};
  if (row == nullptr) return piece;
  row += column;
  auto place = [](int v) { return step_column<kKind>(0, 0, v); };
  if (vectors) {
#pragma unroll
    for (int v = 0; v < 4; ++v) piece.x[v] = reinterpret_cast<const float4*>(row)[place(v) / 4];
    return piece;
  }
#pragma unroll
  for (int v = 0; v < 4; ++v) piece.x[v] = load_four(row, place(v), k - column, false);
  return piece;
}
// Four columns as two pairs of the high parts, then of the low.
__device__ inline uint4 split(const float4& x) {
  uint4 parts;
  split(x.x, x.y, parts.x, parts.z);
  split(x.z, x.w, parts.y, parts.w);
  return parts;
}
// Sixteen columns as eight pairs of each part.
struct SplitPiece {
  uint4 x[4];
};
__device__ inline void split_piece(const SplitPiece& piece, uint32_t (&high)[8], uint32_t (&low)[8]) {
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    high[2 * v] = piece.x[v].x, high[2 * v + 1] = piece.x[v].y;
    low[2 * v] = piece.x[v].z, low[2 * v + 1] = piece.x[v].w;
  }
}
__device__ inline void split_piece(const RowPiece& piece, uint32_t (&high)[8], uint32_t (&low)[8]) {
  split_piece(SplitPiece{split(piece.x[0]), split(piece.x[1]), split(piece.x[2]), split(piece.x[3])}, high,
              low);
}

// A sum, times the scale of its matrix.
template <TileKind kKind>
__device__ inline float scaled(float sum, float scale) {
  return sum * (scale * unscale(kKind));
}

// before: what stands at the output, if the product is added to it.
template <TileKind kKind>
__device__ inline void finish(float sum, const TileProduct& product, int64_t row, int64_t n, float before) {
  sum = scaled<kKind>(sum, product.scale);
  if (product.bias != nullptr) sum += product.bias[n];
  product.out[row * product.out_stride + n] = product.adds ? before + sum : sum;
}

// Which matrix a tile of `rows` weight rows is of, and which of its tiles it is.
struct TilePlace {
  const TileProduct& product;
  int tile;
};
__device__ inline TilePlace tile_place(const TileLinear& p, int tile, int rows) {
  for (int i = 0;; ++i) {
    const int tiles = static_cast<int>((p.products[i].n + rows - 1) / rows);
    if (tile < tiles) return {p.products[i], tile};
    tile -= tiles;
  }
}
inline int tile_count(const TileLinear& p, int rows) {
  int64_t count = 0;
  for (int i = 0; i < p.count; ++i) count += (p.products[i].n + rows - 1) / rows;
  return static_cast<int>(count);
}

}  // namespace nibble::cuda
