// The warps that multiply.
#pragma once

#include <type_traits>

#include "ops/cuda/moe_layer.cuh"
#include "ops/cuda/tile_decode.cuh"

namespace nibble::cuda {

// The operands of a chunk: its 128 columns of this lane's token and part, of each tile of tokens. A column
// without a row (null) stays zero.
template <int kTiles>
__device__ inline void load_operands(const void* const (&rows)[kTiles], int chunk,
                                     uint32_t (&b)[kTiles][16]) {
  const int place = chunk * kChunkColumns + static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (rows[n] == nullptr) continue;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const auto* at = static_cast<const __nv_bfloat16*>(rows[n]) + place + v * 32;
      const uint4 bits = *reinterpret_cast<const uint4*>(at);
      b[n][4 * v] = bits.x, b[n][4 * v + 1] = bits.y, b[n][4 * v + 2] = bits.z, b[n][4 * v + 3] = bits.w;
    }
  }
}

// The same of rows of `columns` floats (a multiple of four, aligned to 16 bytes) that are split only here:
// both lanes of a token take all of their columns, and keep one part. (Shuffles that spare half of the loads
// are three times the code, and save 0.3% at one row.)
template <TileKind kKind, int kTiles>
__device__ inline void load_floats(const void* const (&rows)[kTiles], int columns, int chunk,
                                   uint32_t (&b)[kTiles][16]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = chunk * kChunkColumns + word_column(kKind, lane % 4, 0);
  const bool is_low = lane / 4 % 2 != 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (rows[n] == nullptr) continue;
    float4 x[8];
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int place = word_column(kKind, 0, v / 2) + v % 2 * 4;
      x[v] = begin + place < columns ? static_cast<const float4*>(rows[n])[begin / 4 + place / 4] : float4{};
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      uint32_t high[2], low[2];
      split(x[v].x, x[v].y, high[0], low[0]);
      split(x[v].z, x[v].w, high[1], low[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) b[n][2 * v + i] = is_low ? low[i] : high[i];
    }
  }
}

// What a lane needs of a chunk.
template <TileKind kKind>
struct Codes {
  uint4 codes[2][2];  // [tile][half]
  std::conditional_t<kKind == TileKind::kQ4, BlockScales, uint32_t> scales[2];
};
template <TileKind kKind>
__device__ inline Codes<kKind> load_codes(const uint8_t* chunk) {
  const int lane = threadIdx.x % 32;
  constexpr int kBlock = block_columns(kKind), kScales = 32 / kBlock;  // of a row
  Codes<kKind> c;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kKind) + lane * 2 * kScales;
    if constexpr (kKind == TileKind::kQ4) {
      c.scales[tile] = load_block_scales(chunk, tile, lane);
    } else if constexpr (kBlock == 16) {
      c.scales[tile] = *reinterpret_cast<const uint32_t*>(at);
    } else {
      c.scales[tile] = *reinterpret_cast<const uint16_t*>(at);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      c.codes[tile][half] =
          *reinterpret_cast<const uint4*>(chunk + tile * kTileCodeBytes + half * 512 + lane * 16);
    }
  }
  return c;
}

// Of both halves of a tile's rows, for each part of a chunk. (Of q4 none: they go on sums.)
struct Scales {
  uint32_t of[2][2];  // [part][tile]
};
template <TileKind kKind>
__device__ inline Scales scales_of(const Codes<kKind>& c) {
  Scales s = {};
  if constexpr (kKind != TileKind::kQ4) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        s.of[part][tile] = scale_pair<block_columns(kKind)>(c.scales[tile], part);
    }
  }
  return s;
}
// Word v of both halves of a tile, which is two products deep.
template <TileKind kKind>
__device__ inline void decode_word(const Codes<kKind>& c, const Scales& scales, int v, int tile,
                                   uint32_t (&weights)[2][4]) {  // [half]
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& words = c.codes[tile][half];
    uint32_t pairs[4];
    decode<kKind>(v == 0 ? words.x : v == 1 ? words.y : v == 2 ? words.z : words.w, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      weights[half][p] =
          kKind == TileKind::kQ4 ? pairs[p] : mul_bf16x2_half(pairs[p], scales.of[v / 2][tile], half != 0);
    }
  }
}

// How many sums a lane has of a tile and tokens' tile: of rows g and g + 8, high and low parts of a token.
// Where block scales go on sums (q4) both parts are one: of a block, (high + low) times its scale is added.
template <TileKind kKind>
inline constexpr int kSums = kKind == TileKind::kQ4 ? 2 : 4;
template <TileKind kKind>
__device__ inline float both_parts(const float (&sums)[kSums<kKind>], int half) {
  if constexpr (kSums<kKind> == 2) return sums[half];
  return sums[2 * half] + sums[2 * half + 1];
}
// products: of a block, (high, low) of row g, then of row g + 8, of some tokens.
template <int kCount>
__device__ inline void add_both_parts(const BlockScales& scales, int block, const float* products,
                                      float* sums) {
  const float2 scale = scales.of(block);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    sums[i] = fmaf(products[2 * i] + products[2 * i + 1], i % 2 == 0 ? scale.x : scale.y, sums[i]);
}

// sums[tile][n] += the products of a chunk. Both tiles' words are decoded before their products, so that the
// registers of a product are not written to again right behind it.
template <TileKind kKind, int kTiles>
__device__ inline void multiply(const Codes<kKind>& c, const uint32_t (&b)[kTiles][16],
                                float (&sums)[2][kTiles][kSums<kKind>]) {
  const Scales scales = scales_of<kKind>(c);
  uint32_t weights[2][2][4];
  auto multiply_tile = [&](int v, int m, int n, int tile, float(&to)[4]) {
    const auto& w = weights[tile];
    mma_bf16(to, w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1], b[n][v * 4 + 2 * m],
             b[n][v * 4 + 2 * m + 1]);
  };
  if constexpr (kKind == TileKind::kQ4) {
    // While a tile's products of a block run, those of the other are added up.
    float of_block[2][kTiles][4];
    auto add_up = [&](int tile, int v) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) add_both_parts<2>(c.scales[tile], v, of_block[tile][n], sums[tile][n]);
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int v = i / 2, tile = i % 2;
      decode_word<kKind>(c, scales, v, tile, weights[tile]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          float(&to)[4] = of_block[tile][n];
          if (m == 0) to[0] = to[1] = to[2] = to[3] = 0;
          multiply_tile(v, m, n, tile, to);
        }
      }
      if (i > 0) add_up(1 - tile, (i - 1) / 2);
    }
    add_up(1, 3);
  } else {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) decode_word<kKind>(c, scales, v, tile, weights[tile]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) multiply_tile(v, m, n, tile, sums[tile][n]);
        }
      }
    }
  }
}

template <TileKind kKind, int kTiles, int kStages, int kBuffers>
__device__ inline void multiply_run(const MoeDecodeArgs& a, const Workspace& w, const Handed& handed,
                                    const Groups& groups, const Run& run, const RowBlock& block,
                                    const Split& k, const uint8_t* stages, Ring<kStages>& ring,
                                    float4* buffers, Ring<kBuffers>& out) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4;
  const int group = k.group(warp), part = k.part(warp), own_rows = k.chunks_of(part);
  const int d = a.shape.model_chunks() * 128;
  const void* rows[kTiles];  // of this lane's token (and part, where it is split); null: no such row
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * kTokensOfTile + g / 2;
    rows[n] = nullptr;
    if (row >= block.count) continue;
    if (run.down) {
      rows[n] = handed.h + ((block.first + row) * int64_t{2} + g % 2) * a.shape.width_chunks() * 64;
    } else {
      const int64_t t = groups.row_token(block.first + row);
      rows[n] = groups.are_few && groups.few_x == nullptr
                    ? static_cast<const void*>(a.x + t * a.x_stride)
                    : (groups.are_few ? groups.few_x : w.x) + (t * 2 + g % 2) * d;
    }
  }
  const bool are_floats = groups.are_few && groups.few_x == nullptr && !run.down;
  uint32_t b[kHeld][kTiles][16] = {};
  auto load = [&](int row) {
    if (run.down) {
      uint32_t missing = 0;  // a bit for each 16 bytes of the operands
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if ((row + c) * k.parts + part < k.chunks && rows[n] != nullptr)
            missing |= 15u << (c * kTiles + n) * 4;
        }
      }
      auto from = [&](int i) { return static_cast<const uint32_t*>(rows[i / 4 % kTiles]); };
      auto bytes = [&](int i) {
        const int chunk = (row + i / (4 * kTiles)) * k.parts + part;
        return static_cast<uint32_t>(chunk * kChunkColumns * 2 + lane % 4 * 16 + i % 4 * 64);
      };
      return take(missing, from, bytes, reinterpret_cast<uint32_t(&)[kHeld * kTiles * 4][4]>(b));
    }
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      const int chunk = (row + c) * k.parts + part;
      if (chunk >= k.chunks) continue;
      if (are_floats) {
        load_floats<kKind>(rows, a.shape.model, chunk, b[c]);
      } else {
        load_operands<kTiles>(rows, chunk, b[c]);
      }
    }
  };
  for (int task = group; task < run.count + group; task += k.groups) {
    const int mine = task < run.count ? own_rows : 0;
    float sums[2][kTiles][kSums<kKind>] = {};
    for (int row = 0; row < k.rows; row += kHeld) {
      if (k.rows > kHeld || task == group) load(row);
      // Stage c from here on holds chunk c of these.
      const uint8_t* const first = stages + (ring.place * kWarps + warp) * chunk_bytes(kKind);
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        barrier_wait(ring.full + ring.place + c, ring.parity);
        if (row + c < mine) {
          const Codes<kKind> codes = load_codes<kKind>(first + c * kWarps * chunk_bytes(kKind));
          multiply<kKind, kTiles>(codes, b[c], sums);
        }
        // Behind the products, which cannot be issued before the codes are in registers: right behind the
        // loads a copy can overtake them (docs/lab/2026-11-30-products-on-the-gpu.md).
        warp_arrive(ring.empty + ring.place + c);
      }
      ring.advance(kHeld);
    }
    out.wait_empty();
    float4* const to = buffers + (out.place * kWarps + warp) * kMaxTiles * 32 + lane;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const auto &first = sums[0][n], &second = sums[1][n];
      to[n * 32] = {both_parts<kKind>(first, 0), both_parts<kKind>(first, 1), both_parts<kKind>(second, 0),
                    both_parts<kKind>(second, 1)};
    }
    warp_arrive(out.full + out.place);
    out.advance();
  }
}

}  // namespace nibble::cuda
