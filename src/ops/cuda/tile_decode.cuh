// From the words of a chunk (moe_tiles.h) to the operands of a product.
#pragma once

#include <cstdint>

#include "ops/cuda/primitives.cuh"

namespace nibble::cuda {

// Eight codes of a row as four pairs of bfloat16, times 2^-126.
__device__ inline void decode(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  pairs[0] = word & kMask;
  pairs[1] = rotate_right(word, 3) & kMask;
  pairs[2] = rotate_right(word, 6) & kMask;
  // Sign, exponent and mantissa of the fourth pair go to three different distances; the copies do not meet.
  pairs[3] = ((word & 0x001B001Bu) * ((1u << 12) + (1u << 7) + (1u << 2))) & kMask;
}

// What the scales below leave to be done on the float32 sum: a weight comes out of the decoding times 2^-7.
constexpr float kUnscale = 128.0f;

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

// Where column c of a row of operands stands, of chunks in which a lane has kOfLane columns: of every lane's
// columns the first eight, then the second ..., so that the four lanes that share a row load 64 neighbouring
// bytes at a time.
template <int kOfLane>
__device__ inline int operand_place(int c) {
  constexpr int kChunk = 4 * kOfLane;
  return c / kChunk * kChunk + c % kOfLane / 8 * 32 + c % kChunk / kOfLane * 8 + c % 8;
}

}  // namespace nibble::cuda
