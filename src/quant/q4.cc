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
    // std::round is half away from zero.
    auto code_of = [&](float value) -> unsigned {
      if (d == 0) return 0;
      return static_cast<unsigned>(static_cast<int>(std::clamp(std::round(value / d), -kTopCode, kTopCode))) &
             15u;
    };
    for (int64_t i = 0; i < kGroup; i += 2)
      codes[(block * kGroup + i) / 2] = static_cast<uint8_t>(code_of(x[i]) | (code_of(x[i + 1]) << 4));
  }
}

}  // namespace nibble::q4
