// From the words of a chunk (moe_tiles.h) to the operands of a product.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "ops/cuda/moe_tiles.h"
#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

// Eight codes of a row as four pairs of bfloat16: e2m1 times 2^-126, those of q4 times 1/64.
template <TileKind kKind>
__device__ inline void decode(uint32_t word, uint32_t (&pairs)[4]) {
  if constexpr (kKind == TileKind::kQ4) {
    // Codes + 8 stand in the last bits of subnormal numbers: what is 2^-133 there becomes 1/64.
    constexpr uint32_t kTo = 0x7F007F00u, kMinus8 = 0xBE00BE00u;  // 2^127, -8 / 64
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = fma_bf16x2(word >> (4 * p) & 0x000F000Fu, kTo, kMinus8);
    return;
  }
  constexpr uint32_t kMask = 0x81C081C0u;
  pairs[0] = word & kMask;
  pairs[1] = rotate_right(word, 3) & kMask;
  pairs[2] = rotate_right(word, 6) & kMask;
  // Sign, exponent and mantissa of the fourth pair go to three different distances; the copies do not meet.
  pairs[3] = ((word & 0x001B001Bu) * ((1u << 12) + (1u << 7) + (1u << 2))) & kMask;
}

// What decoding leaves to be done on the float32 sum: with the scales below a weight comes out times 2^-7.
__device__ constexpr float unscale(TileKind kind) {
  return is_bf16(kind) ? 1.0f : kind == TileKind::kQ4 ? 64.0f : 128.0f;
}

// One of two of different types.
template <bool kFirst, class First, class Second>
__device__ inline auto& first_if(First& first, Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// The block scales of a lane's rows g and g + 8 in a chunk of q4.
struct BlockScales {
  uint4 words;
  __device__ float2 of(int block) const {
    const uint32_t both = block == 0 ? words.x : block == 1 ? words.y : block == 2 ? words.z : words.w;
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
  }
};
__device__ inline BlockScales load_block_scales(const uint8_t* chunk, int tile, int lane) {
  return {*reinterpret_cast<const uint4*>(chunk + 2 * kTileCodeBytes +
                                          tile * tile_scale_bytes(TileKind::kQ4) + lane / 4 * 16)};
}

// The block scales of a lane's two rows (first the low, then the high half) as bfloat16 times 2^119.
// `scales`: what the chunk holds for the lane; part: which half of its 32 columns.
template <int kBlock>
__device__ inline uint32_t scale_pair(uint32_t scales, int part) {
  if constexpr (kBlock == 16) {
    const uint32_t bytes = part == 0 ? scales & 0x00FF00FFu : __byte_perm(scales, 0, 0x4341);
    return bytes * 16 + 0x76007600u;  // place_scale's exponent bias, 10, against bfloat16's
  } else {
    return __byte_perm(scales, 0, 0x4140) * 128 + 0x3B803B80u;  // exponent + 119
  }
}

// The two bfloat16 numbers that a float goes in as the sum of. The difference is that of the float as
// rounded, also where it is a product, which the compiler could take into the subtraction.
__device__ inline void split(float value, __nv_bfloat16& high, __nv_bfloat16& low) {
  high = __float2bfloat16_rn(value);
  low = __float2bfloat16_rn(__fsub_rn(value, __bfloat162float(high)));
}

// The same of two floats, as pairs.
__device__ inline void split(float x, float y, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  high = *reinterpret_cast<const uint32_t*>(&h);
  const __nv_bfloat162 l = __floats2bfloat162_rn(__fsub_rn(x, __uint_as_float(high << 16)),
                                                 __fsub_rn(y, __uint_as_float(high & 0xFFFF0000u)));
  low = *reinterpret_cast<const uint32_t*>(&l);
}

// Where column c of a row of operands stands: word after word of the four lanes that share a row, so that
// they load 64 neighbouring bytes at a time.
__device__ inline int operand_place(TileKind kind, int c) {
  if (kind == TileKind::kQ4) return c;
  return c / kChunkColumns * kChunkColumns + c % 32 / 8 * 32 + c % kChunkColumns / 32 * 8 + c % 8;
}

}  // namespace nibble::cuda
