#include "quant/float_codes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace nibble {
namespace {

// Nearest representable value by exhaustive search, ties to the even code.
template <class Decode>
uint8_t nearest_by_search(float x, int codes, Decode decode) {
  int best = 0;
  double best_distance = INFINITY;
  for (int code = 0; code < codes; ++code) {
    float value = decode(static_cast<uint8_t>(code));
    if (std::isnan(value)) continue;
    double distance = std::fabs(static_cast<double>(value) - static_cast<double>(x));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return static_cast<uint8_t>(best);
}

TEST(FloatCodes, EveryCodeSurvivesARoundTrip) {
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(float_to_e2m1(e2m1_to_float(static_cast<uint8_t>(code))), code);
  }
  for (int code = 0; code < 256; ++code) {
    uint8_t c = static_cast<uint8_t>(code);
    EXPECT_EQ(std::isnan(e4m3_to_float(c)), e4m3_is_nan(c));
    if (e4m3_is_nan(c)) {
      EXPECT_TRUE(e4m3_is_nan(float_to_e4m3(e4m3_to_float(c))));
    } else {
      EXPECT_EQ(float_to_e4m3(e4m3_to_float(c)), c);
    }
  }
  for (int code = 0; code < 65536; ++code) {
    uint16_t c = static_cast<uint16_t>(code);
    EXPECT_TRUE(std::isnan(f16_to_float(c)) || float_to_f16(f16_to_float(c)) == c) << code;
    EXPECT_TRUE(std::isnan(bf16_to_float(c)) || float_to_bf16(bf16_to_float(c)) == c) << code;
  }
}

TEST(FloatCodes, RoundingIsToNearestTiesToEven) {
  std::vector<float> probes;
  for (int i = -8000; i <= 8000; ++i) probes.push_back(static_cast<float>(i) / 1024.0f);
  for (float x : probes) {
    if (x < 0) continue;  // the sign bit is its own; codes with it are searched by symmetry
    EXPECT_EQ(float_to_e2m1(x), nearest_by_search(x, 8, e2m1_to_float)) << x;
    EXPECT_EQ(float_to_e2m1(-x), nearest_by_search(x, 8, e2m1_to_float) | 8) << -x;
  }
  for (int exponent = -14; exponent < 10; ++exponent) {
    for (int i = 0; i < 512; ++i) {
      float x = std::ldexp(1.0f + static_cast<float>(i) / 512.0f, exponent);
      EXPECT_EQ(float_to_e4m3(x), nearest_by_search(x, 127, e4m3_to_float)) << x;
    }
  }
  EXPECT_EQ(float_to_e4m3(1e9f), 0x7E);
  EXPECT_EQ(float_to_e2m1(1e9f), 7);
}

TEST(FloatCodes, TheSpecsTiePoints) {
  const float points[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const float wanted[] = {0, 1, 1, 2, 2, 4, 4};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(e2m1_to_float(float_to_e2m1(points[i])), wanted[i]);
}

TEST(FloatCodes, E8m0) {
  EXPECT_EQ(e8m0_to_float(127), 1.0f);
  EXPECT_EQ(e8m0_to_float(0), 0x1p-127f);
  EXPECT_EQ(e8m0_to_float(254), 0x1p127f);
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

TEST(FloatCodes, HalfPrecisionEdges) {
  EXPECT_EQ(f16_to_float(0x7BFF), 65504.0f);
  EXPECT_EQ(float_to_f16(65519.0f), 0x7BFF);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(float_to_f16(0x1p-25f), 0);  // tie with zero: even
  EXPECT_EQ(float_to_f16(0x1.8p-25f), 1);
  EXPECT_EQ(float_to_bf16(1.00390625f), 0x3F80);  // tie: even
  EXPECT_EQ(float_to_bf16(1.01171875f), 0x3F82);
}

}  // namespace
}  // namespace nibble
