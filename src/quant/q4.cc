#include "quant/q4.h"

#include <algorithm>
#include <cmath>

#include "quant/float_codes.h"

namespace nibble::q4 {

void dequantize_row(const uint8_t* codes, const uint16_t* scales_f16, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += 2) {
    const float scale = f16_to_float(scales_f16[i / kGroup]);
    out[i] = static_cast<float>(code_to_int(codes[i / 2])) * scale;
    out[i + 1] = static_cast<float>(code_to_int(codes[i / 2] >> 4)) * scale;
  }
}

void quantize_row(const float* values, int64_t k, uint8_t* codes, uint16_t* scales_f16) {
  constexpr float kTopCode = 7, kMaxF16 = 65504;
  for (int64_t block = 0; block < k / kGroup; ++block) {
    const float* x = values + block * kGroup;
    float amax = 0;
    for (int64_t i = 0; i < kGroup; ++i) amax = std::max(amax, std::fabs(x[i]));
    const float d = amax / kTopCode;
    scales_f16[block] = float_to_f16(std::min(d, kMaxF16));
    uint8_t unpacked[kGroup] = {};
    if (d > 0) {
      for (int64_t i = 0; i < kGroup; ++i) {
        // Only where d is a float32 subnormal is the quotient beyond 7 by more than a rounding.
        const float quotient = std::clamp(x[i] / d, -kTopCode, kTopCode);
        // std::round in a form that becomes vectors: the part behind the point is exact.
        const int whole = static_cast<int>(quotient);
        const float rest = quotient - static_cast<float>(whole);
        unpacked[i] = static_cast<uint8_t>((whole + (rest >= 0.5f) - (rest <= -0.5f)) & 15);
      }
    }
    for (int64_t i = 0; i < kGroup; i += 2)
      codes[(block * kGroup + i) / 2] = static_cast<uint8_t>(unpacked[i] | (unpacked[i + 1] << 4));
  }
}

}  // namespace nibble::q4
