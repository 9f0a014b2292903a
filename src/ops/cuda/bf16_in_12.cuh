// BF16 weights in 12 bits, without loss: what a chunk of 32 rows x 64 columns holds then, one place for every
// shift. Trained weights of a chunk have few exponents: all but about one in ten thousand lie in a window of
// 16. A weight is its sign, its mantissa and four bits of exponent above the chunk's base; one outside of
// the window is an exception, whose bfloat16 stands in a list behind the words.
//
//   words       [2 tiles][2][32 lanes]: of two steps of m16n8k16, 2 x 3 words; four in [32][16 bytes],
//               then two in [32][8 bytes]
//   base        the first exponent of the window where a pair of bfloat16 has it, in both
//   ends        of the exceptions of each [2 tiles][2], in the list, a byte each
//   exceptions  [kMaxExceptions]
//
// The three words of a step hold a lane's four operands (pairs of bfloat16, columns as in linear_tiles.cuh):
// word i has operand i in place, with the four bits of exponent for the eight, and in the bits that are left
// (14 to 11 of each half) a third of operand 3: exponent; upper mantissa; sign and lower mantissa.
#pragma once

#include <cstdint>

#include "ops/cuda/moe_tiles.h"

namespace nibble::cuda::bf16_in_12 {

inline constexpr int kWindow = 16;  // exponents
inline constexpr int kTwoStepsBytes = 32 * 24, kWordBytes = 4 * kTwoStepsBytes;
// More of them in a chunk, and the matrix is not brought into this form. The most that one of the 4026 chunks
// of the demo model's trained weights has is 3; 14% have any.
inline constexpr uint32_t kMaxExceptions = 14;
inline constexpr int kBytes = kWordBytes + 8 + 4 * static_cast<int>(kMaxExceptions);
static_assert(kBytes % 16 == 0);  // bulk copies

// Where word `word` (0..5) of a lane's two steps stands among their bytes.
__device__ constexpr int word_place(int lane, int word) {
  return word < 4 ? lane * 16 + word * 4 : 512 + lane * 8 + (word - 4) * 4;
}

inline constexpr uint32_t kCode = 0x07800780, kUpper = 0x00780078, kLower = 0x00070007, kSign = 0x80008000;

// Operands, whose exponents are of four bits, to the words of a step.
__device__ inline void pack(const uint32_t (&operands)[4], uint32_t (&words)[3]) {
  const uint32_t last = operands[3];
  words[0] = operands[0] | (last & kCode) << 4;
  words[1] = operands[1] | (last & kUpper) << 8;
  words[2] = operands[2] | (last & kLower) << 11 | (last & kSign) >> 1;
}
__device__ inline void unpack(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t base, uint32_t (&operands)[4]) {
  constexpr uint32_t kOwn = kCode | kUpper | kLower | kSign;
  operands[0] = (w0 & kOwn) + base;
  operands[1] = (w1 & kOwn) + base;
  operands[2] = (w2 & kOwn) + base;
  operands[3] = ((w0 >> 4 & kCode) | (w1 >> 8 & kUpper) | (w2 >> 11 & kLower) | (w2 << 1 & kSign)) + base;
}

// A weight outside of the window: its bits; lane, operand (of eight of two steps) and half of that.
__device__ constexpr uint32_t exception(uint32_t bits, int lane, int operand, int half) {
  return bits | lane << 16 | operand << 21 | half << 24;
}

// Of two steps, words and, once they are there, operands: steps 2 `pair` and 2 `pair` + 1 of a tile.
struct TwoSteps {
  uint4 four;
  uint2 two, base_ends;
};
__device__ inline TwoSteps load_two_steps(const uint8_t* chunk, int tile, int pair, int lane) {
  const uint8_t* const at = chunk + (tile * 2 + pair) * kTwoStepsBytes;
  return {*reinterpret_cast<const uint4*>(at + word_place(lane, 0)),
          *reinterpret_cast<const uint2*>(at + word_place(lane, 4)),
          *reinterpret_cast<const uint2*>(chunk + kWordBytes)};
}
__device__ inline void unpack(const TwoSteps& words, uint32_t (&a)[2][4]) {
  unpack(words.four.x, words.four.y, words.four.z, words.base_ends.x, a[0]);
  unpack(words.four.w, words.two.x, words.two.y, words.base_ends.x, a[1]);
}
// Where `ends` is not 0. (A chunk that was never written may say anything.)
__device__ inline void put_exceptions(const uint8_t* chunk, uint32_t ends, int tile, int pair, int lane,
                                      uint32_t (&a)[2][4]) {
  const auto* const exceptions = reinterpret_cast<const uint32_t*>(chunk + kWordBytes + 8);
  const int group = tile * 2 + pair;
  const uint32_t end = min(ends >> (8 * group) & 255, kMaxExceptions);
#pragma unroll 1
  for (uint32_t i = group == 0 ? 0 : ends >> (8 * group - 8) & 255; i < end; ++i) {
    const uint32_t e = exceptions[i], place = (e >> 16 & 31) == static_cast<uint32_t>(lane) ? e >> 21 & 7 : 8;
    const uint32_t bytes = e >> 24 == 0 ? 0x3254 : 0x5410;
    // All of them, or the compiler keeps operands in memory.
#pragma unroll
    for (uint32_t operand = 0; operand < 8; ++operand) {
      uint32_t& pair_of = a[operand / 4][operand % 4];
      pair_of = __byte_perm(pair_of, e, operand == place ? bytes : 0x3210);
    }
  }
}

// The operands of a tile's four steps.
__device__ inline void load_tile(const uint8_t* chunk, int tile, int lane, uint32_t (&a)[4][4]) {
  const TwoSteps words[2] = {load_two_steps(chunk, tile, 0, lane), load_two_steps(chunk, tile, 1, lane)};
  auto& steps = reinterpret_cast<uint32_t(&)[2][2][4]>(a);
  unpack(words[0], steps[0]);
  unpack(words[1], steps[1]);
  if (const uint32_t ends = words[0].base_ends.y; ends != 0) {
    put_exceptions(chunk, ends, tile, 0, lane, steps[0]);
    put_exceptions(chunk, ends, tile, 1, lane, steps[1]);
  }
}

}  // namespace nibble::cuda::bf16_in_12
