#include "quant/nvfp4.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "quant/float_codes.h"

namespace nibble::nvfp4 {
namespace {

constexpr float kRange = 6.0f * 448.0f;  // the largest code times the largest block scale

}  // namespace

void dequantize_row(const uint8_t* codes, const uint8_t* scales, int64_t k, float* out) {
  for (int64_t i = 0; i < k; i += 2) {
    float scale = e4m3_to_float(scales[i / kGroup]);
    out[i] = e2m1_to_float(codes[i / 2] & 15u) * scale;
    out[i + 1] = e2m1_to_float(codes[i / 2] >> 4) * scale;
  }
}

void quantize_row(const float* values, int64_t k, float tensor_scale, uint8_t* codes, uint8_t* scales) {
  for (int64_t block = 0; block < k / kGroup; ++block) {
    const float* x = values + block * kGroup;
    float amax = 0;
    for (int64_t i = 0; i < kGroup; ++i) amax = std::max(amax, std::fabs(x[i]));
    // The order of the divisions is ModelOpt's; amax / (6 * tensor_scale) rounds differently.
    uint8_t scale_code = tensor_scale > 0 ? float_to_e4m3(amax / 6.0f / tensor_scale) : uint8_t{0};
    scales[block] = scale_code;
    float scale = e4m3_to_float(scale_code) * tensor_scale;
    uint8_t unpacked[kGroup] = {};
    if (scale > 0) {
      for (int64_t i = 0; i < kGroup; ++i) unpacked[i] = float_to_e2m1(x[i] / scale);
    }
    for (int64_t i = 0; i < kGroup; i += 2)
      codes[(block * kGroup + i) / 2] = static_cast<uint8_t>(unpacked[i] | (unpacked[i + 1] << 4));
  }
}

float choose_row_scale(const float* values, int64_t k) {
  float amax = 0;
  for (int64_t i = 0; i < k; ++i) {
    if (!std::isfinite(values[i])) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, std::fabs(values[i]));
  }
  return amax / kRange;
}

void round_row(const float* values, int64_t k, float g, float* out) {
  for (int64_t i = 0; i < k; i += kGroup) {
    // The codes have no NaN to give back.
    const bool finite =
        std::all_of(values + i, values + i + kGroup, [](float x) { return std::isfinite(x); });
    if (!finite || std::isnan(g)) {
      std::fill_n(out + i, kGroup, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    uint8_t codes[kGroup / 2], scale = 0;
    quantize_row(values + i, kGroup, g, codes, &scale);
    dequantize_row(codes, &scale, kGroup, out + i);
  }
}

float choose_tensor_scale(float amax) { return std::max(amax / kRange, 1e-12f); }

}  // namespace nibble::nvfp4
