// NVFP4: e2m1 codes with one e4m3 scale for each 16 columns and one float32 scale for the tensor.
// Layout on disk (ModelOpt and compressed-tensors nvfp4-pack-quantized alike): codes u8 [N, K/2], even column
// in the low nibble, odd column in the high nibble; scales e4m3 [N, K/16]; all row-major.
#pragma once

#include <cstdint>

namespace nibble::nvfp4 {

inline constexpr int64_t kGroup = 16;  // columns that share a block scale

// One row of k values: code * block scale, without the tensor scale. Exact in float32 (and in bf16).
void dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t k, float* out);

// Quantizes one row against a given tensor scale: block scale = e4m3(amax16 / (6 * tensor_scale)), code =
// e2m1(x / (block scale * tensor_scale)), 0 where that product is 0. REQUIRES k a multiple of 16,
// tensor_scale >= 0.
void quantize_row(const float* values, int64_t k, float tensor_scale, uint8_t* codes, uint8_t* scales);

// Activations (spec formats.md 4): a row is quantized like a row of weights against its second-level scale g,
// which is multiplied on the products' sums afterwards.

// The g of a row that no calibration is needed for: amax / (6 * 448). NaN where a value is not finite.
float choose_row_scale(const float* values, int64_t k);
// What the row is in NVFP4 against g, without g: code * block scale, exact in float32. 0 where g is 0; NaN
// where a value is not finite. out may be values. REQUIRES k a multiple of 16.
void round_row(const float* values, int64_t k, float g, float* out);

// The tensor scale that ModelOpt chooses: amax / (6 * 448), at least 1e-12.
float choose_tensor_scale(float amax);

}  // namespace nibble::nvfp4
