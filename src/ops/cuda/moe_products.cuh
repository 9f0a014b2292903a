// The warps that multiply.
#pragma once

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
template <int kTiles>
__device__ inline void load_floats(const void* const (&rows)[kTiles], int columns, int chunk,
                                   uint32_t (&b)[kTiles][16]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, begin = chunk * kChunkColumns + lane % 4 * 32;
  const bool is_low = lane / 4 % 2 != 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (rows[n] == nullptr) continue;
    float4 x[8];
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      x[v] = begin + 4 * v < columns ? static_cast<const float4*>(rows[n])[begin / 4 + v] : float4{};
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
struct Codes {
  uint4 codes[2][2];  // [tile][half]
  uint32_t scales[2];
};
template <int kBlock>
__device__ inline Codes load_codes(const uint8_t* chunk) {
  const int lane = threadIdx.x % 32;
  constexpr int kScales = 32 / kBlock;  // of a row
  Codes c;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const uint8_t* at = chunk + 2 * kTileCodeBytes + tile * tile_scale_bytes(kBlock) + lane * 2 * kScales;
    if constexpr (kBlock == 16) {
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

// Of both halves of a tile's rows, for each part of a chunk.
struct Scales {
  uint32_t of[2][2];  // [part][tile]
};
template <int kBlock>
__device__ inline Scales scales_of(const Codes& c) {
  Scales s;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) s.of[part][tile] = scale_pair<kBlock>(c.scales[tile], part);
  }
  return s;
}
// Word v of both halves, which is two products deep. Both tiles' are decoded before their products, so that
// the registers of a product are not written to again right behind it.
__device__ inline void decode_word(const Codes& c, const Scales& scales, int v,
                                   uint32_t (&weights)[2][2][4]) {  // [tile][half]
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4& words = c.codes[tile][half];
      uint32_t pairs[4];
      decode(v == 0 ? words.x : v == 1 ? words.y : v == 2 ? words.z : words.w, pairs);
#pragma unroll
      for (int p = 0; p < 4; ++p)
        weights[tile][half][p] = mul_bf16x2_half(pairs[p], scales.of[v / 2][tile], half != 0);
    }
  }
}

// sums[tile][n] += the products of a chunk.
template <int kBlock, int kTiles>
__device__ inline void multiply(const Codes& c, const uint32_t (&b)[kTiles][16],
                                float (&sums)[2][kTiles][4]) {
  const Scales scales = scales_of<kBlock>(c);
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    uint32_t weights[2][2][4];
    decode_word(c, scales, v, weights);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const auto& w = weights[tile];
          mma_bf16(sums[tile][n], w[0][2 * m], w[1][2 * m], w[0][2 * m + 1], w[1][2 * m + 1],
                   b[n][v * 4 + 2 * m], b[n][v * 4 + 2 * m + 1]);
        }
      }
    }
  }
}

template <int kBlock, int kTiles, int kStages, int kBuffers>
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
      rows[n] = groups.are_few ? static_cast<const void*>(a.x + t * a.x_stride) : w.x + (t * 2 + g % 2) * d;
    }
  }
  const bool are_floats = groups.are_few && !run.down;
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
        load_floats<kTiles>(rows, a.shape.model, chunk, b[c]);
      } else {
        load_operands<kTiles>(rows, chunk, b[c]);
      }
    }
  };
  for (int task = group; task < run.count + group; task += k.groups) {
    const int mine = task < run.count ? own_rows : 0;
    float sums[2][kTiles][4] = {};
    for (int row = 0; row < k.rows; row += kHeld) {
      if (k.rows > kHeld || task == group) load(row);
      // Stage c from here on holds chunk c of these.
      const uint8_t* const first = stages + (ring.place * kWarps + warp) * chunk_bytes(kBlock);
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        barrier_wait(ring.full + ring.place + c, ring.parity);
        if (row + c < mine) {
          const Codes codes = load_codes<kBlock>(first + c * kWarps * chunk_bytes(kBlock));
          multiply<kBlock, kTiles>(codes, b[c], sums);
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
    for (int n = 0; n < kTiles; ++n) {  // both parts of a token are neighbours
      const float *first = sums[0][n], *second = sums[1][n];
      to[n * 32] = {first[0] + first[1], first[2] + first[3], second[0] + second[1], second[2] + second[3]};
    }
    warp_arrive(out.full + out.place);
    out.advance();
  }
}

}  // namespace nibble::cuda
