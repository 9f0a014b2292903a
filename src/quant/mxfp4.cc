#include "quant/mxfp4.h"

#include <algorithm>
#include <cmath>

#include "quant/float_codes.h"

namespace nibble::mxfp4 {

void dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += 2) {
    const float scale = e8m0_to_float(scales[i / kGroup]);
    out[i] = e2m1_to_float(codes[i / 2] & 15u) * scale;
    out[i + 1] = e2m1_to_float(codes[i / 2] >> 4) * scale;
  }
}

void quantize_row(const float* values, int64_t k, uint8_t* codes, uint8_t* scales) {
  constexpr int kBias = 127, kTopExponent = 2;  // the largest e2m1 value is 1.5 * 2^2
  for (int64_t block = 0; block < k / kGroup; ++block) {
    const float* x = values + block * kGroup;
    float amax = 0x1p-120f;
    for (int64_t i = 0; i < kGroup; ++i) amax = std::max(amax, std::fabs(x[i]));
    // ilogb is the exact floor(log2()); a float32 log2 would round up just below a power of two.
    const uint8_t scale_code = static_cast<uint8_t>(std::ilogb(amax) - kTopExponent + kBias);
    scales[block] = scale_code;
    const float scale = e8m0_to_float(scale_code);
    uint8_t unpacked[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) unpacked[i] = float_to_e2m1(x[i] / scale);
    for (int64_t i = 0; i < kGroup; i += 2)
      codes[(block * kGroup + i) / 2] = static_cast<uint8_t>(unpacked[i] | (unpacked[i + 1] << 4));
  }
}

}  // namespace nibble::mxfp4
