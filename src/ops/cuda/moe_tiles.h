// The order in which the tensor-core kernels of 4-bit experts read their weights (moe_decode.cu), for host
// and device: what a repacking writes, one place for every shift.
//
// A chunk holds 2 x 16 weight rows by 128 columns: of gate and up, 16 rows of each; of down, 32 rows. Its
// bytes:
//   codes   [2 tiles][2 halves][32 lanes][16 bytes]: lane = 4 * g + q; half h: row 8 h + g of the tile,
//           columns 32 q .. 32 q + 31, as four words of eight codes
//   scales  [2 tiles][32 lanes][scale bytes]: of row g, then of row g + 8, the block scales of those columns
//           (NVFP4: place_scale; MXFP4: the exponent)
// A lane of an m16n8k16 product thus finds its own operand in 16-byte loads; that the columns of a product
// are permuted is free, for both operands are permuted alike. All chunks of a pair of tiles lie one after the
// other along K, so that a warp reads one contiguous stream.
//
// In a word the eight e2m1 codes stand so that three of its four pairs (two neighbouring columns each) turn
// into bfloat16 pairs by at most a rotation and a mask, and the fourth by a mask, a product and a mask: sign
// to bit 15, exponent and mantissa to bits 8..6, which is the code's value times 2^-126, subnormals included.
//
// q4 differs: a weight, of 14 bits, is no bfloat16, so that block scales go on the float32 sums of a block's
// two products. A lane's columns are 8 of each of the four blocks, 32 v + 8 q + 0..7 in word v; a code stands
// as its value + 8, that of the columns 2 p and 2 p + 1 at bits 4 p and 4 p + 16; scales (float16) are
// [2 tiles][8 rows][4 blocks][row g, row g + 8].
//
// Experts in BF16 (moe_many.cu; of dense matrices linear_tiles.cuh tells): [2 tiles][8 steps][32 lanes][16
// bytes], a lane's operands of a product, with the columns of e2m1.
#pragma once

#include <cstdint>

namespace nibble::cuda {

#ifdef __CUDACC__
#define NIBBLE_HOST_DEVICE __host__ __device__
#else
#define NIBBLE_HOST_DEVICE
#endif

// The forms of tiles. kBF16In12 (bf16_in_12.cuh) holds the same weights as kBF16 (linear_tiles.cuh) in three
// quarters of the bytes, and products have the same bits.
enum class TileKind { kBF16, kBF16In12, kNvfp4, kMxfp4, kQ4 };
constexpr const char* tile_kind_name(TileKind kind) {
  constexpr const char* kNames[] = {"BF16", "BF16-in-12", "NVFP4", "MXFP4", "q4"};
  return kNames[static_cast<int>(kind)];
}
NIBBLE_HOST_DEVICE constexpr bool is_bf16(TileKind kind) {
  return kind == TileKind::kBF16 || kind == TileKind::kBF16In12;
}

inline constexpr int kChunkColumns = 128;
inline constexpr int kTileRows = 16;
inline constexpr int kTileCodeBytes = kTileRows * kChunkColumns / 2;
// Columns of a block scale, and its bytes.
NIBBLE_HOST_DEVICE constexpr int block_columns(TileKind kind) { return kind == TileKind::kNvfp4 ? 16 : 32; }
NIBBLE_HOST_DEVICE constexpr int block_scale_bytes(TileKind kind) { return kind == TileKind::kQ4 ? 2 : 1; }
NIBBLE_HOST_DEVICE constexpr int tile_scale_bytes(TileKind kind) {
  return kTileRows * (kChunkColumns / block_columns(kind)) * block_scale_bytes(kind);
}
// Of a chunk of routed experts, or of any 4-bit matrix.
NIBBLE_HOST_DEVICE constexpr int chunk_bytes(TileKind kind) {
  if (kind == TileKind::kBF16) return 2 * kTileRows * kChunkColumns * 2;
  return 2 * (kTileCodeBytes + tile_scale_bytes(kind));
}
// Of a chunk, the first of the eight columns in word v of lane q.
NIBBLE_HOST_DEVICE constexpr int word_column(TileKind kind, int q, int v) {
  return kind == TileKind::kQ4 ? 32 * v + 8 * q : 32 * q + 8 * v;
}

// Bit of a word where bit `bit` (0 mantissa, 1 and 2 exponent, 3 sign) of code i (0..7) stands.
NIBBLE_HOST_DEVICE constexpr int code_bit_place(int i, int bit) {
  const int pair = i / 2, high = (i % 2) * 16;
  if (pair == 3) {
    constexpr int kPlace[4] = {4, 0, 1, 3};
    return kPlace[bit] + high;
  }
  // Where a rotation by 3 * pair brings it to.
  constexpr int kTarget[4] = {6, 7, 8, 15};
  return (kTarget[bit] + high + 3 * pair) % 32;
}

// An e4m3 scale without its sign as a 5-bit exponent (bias 10, so that subnormals become normal) and a 3-bit
// mantissa, which is a bfloat16 after a shift and a sum. The repacking folds signs of scales into the codes,
// and zero scales into zero codes.
NIBBLE_HOST_DEVICE constexpr uint8_t place_scale(uint8_t scale) {
  int exponent = scale >> 3 & 15, mantissa = scale & 7;
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    exponent = 1;
    while (mantissa < 8) mantissa *= 2, --exponent;
    mantissa -= 8;
  }
  return static_cast<uint8_t>((exponent + 3) << 3 | mantissa);
}

// Eight codes, the first in the low nibble, in that order.
NIBBLE_HOST_DEVICE constexpr uint32_t place_q4_codes(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= ((codes >> (4 * i) & 15u) ^ 8u) << (i / 2 * 4 + i % 2 * 16);
  return word;
}
NIBBLE_HOST_DEVICE constexpr uint32_t place_codes(uint32_t codes) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    for (int bit = 0; bit < 4; ++bit) word |= ((codes >> (4 * i + bit)) & 1u) << code_bit_place(i, bit);
  }
  return word;
}

}  // namespace nibble::cuda
