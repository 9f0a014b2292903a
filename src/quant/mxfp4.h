// MXFP4 (OCP MX v1.0): e2m1 codes with one e8m0 scale, a power of two, for each 32 columns; no tensor scale.
// Layout on disk (gpt-oss and compressed-tensors mxfp4-pack-quantized alike): codes u8 [N, K/2], even column
// in the low nibble, odd column in the high nibble; scales e8m0 [N, K/32]; all row-major. (GGUF splits a
// block into halves instead.)
#pragma once

#include <cstdint>

namespace nibble::mxfp4 {

inline constexpr int64_t kGroup = 32;  // columns that share a scale

// One row of k values: code * scale. Exact in float32 wherever float32 has the value; NaN under a NaN scale.
void dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t k, float* out);

// Quantizes one row: scale = 2^(floor(log2(amax32)) - 2), so that amax lands in [4, 8) and saturates at 6
// (OCP MX v1.0 6.3); code = e2m1(x / scale). amax counts as 2^-120 where it is smaller, so a block of zeros
// has scale 2^-122. REQUIRES k a multiple of 32, finite values.
void quantize_row(const float* values, int64_t k, uint8_t* codes, uint8_t* scales);

}  // namespace nibble::mxfp4
