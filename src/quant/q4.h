// q4: symmetric int4 codes -7..7 with one float16 scale for each 32 columns.
// Layout: codes u32 little-endian [N, K/32, 4], element i of a block at bits 4*(i%8) of word i/8, two's
// complement; as bytes [N, K/2] that is the even column in the low nibble, the odd column in the high nibble.
// Scales float16 [N, K/32].
#pragma once

#include <cstdint>

namespace nibble::q4 {

inline constexpr int64_t kGroup = 32;  // columns that share a scale

// The nibble's two's complement value, -8..7. (quantize_row writes no -8; a file may hold one.)
inline int code_to_int(uint8_t code) { return static_cast<int>((code & 15u) ^ 8u) - 8; }

// One row of k values: code * scale; exact in float32.
void dequantize_row(const uint8_t* codes, const uint16_t* scales_f16, int64_t k, float* out);

// Quantizes one row: d = amax32 / 7 in float32, code = clamp(round(x / d), -7..7) with halves away from zero,
// 0 where d is 0; the scale is d rounded to float16, at most 65504. REQUIRES k a multiple of 32, finite
// values.
void quantize_row(const float* values, int64_t k, uint8_t* codes, uint16_t* scales_f16);

}  // namespace nibble::q4
