#include "quant/mxfp4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "quant/float_codes.h"

namespace nibble::mxfp4 {
namespace {

// The codes from their definitions, apart from float_codes.h.
double e2m1_value(int code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// The header's definition by search: the power of two by trying, the code by the least distance.
void expect_quantizes_as_slowly(const std::vector<float>& row) {
  std::vector<uint8_t> codes(row.size() / 2), scales(row.size() / 32);
  quantize_row(row.data(), std::ssize(row), codes.data(), scales.data());
  for (size_t block = 0; block < scales.size(); ++block) {
    double amax = std::ldexp(1, -120);
    for (size_t i = 0; i < 32; ++i)
      amax = std::max(amax, std::fabs(static_cast<double>(row[block * 32 + i])));
    int exponent = -140;
    while (std::ldexp(1, exponent + 1) <= amax) ++exponent;
    ASSERT_EQ(scales[block], exponent - 2 + 127) << "amax " << amax;
    for (size_t i = block * 32; i < block * 32 + 32; ++i) {
      const double wanted = std::fabs(static_cast<double>(row[i])) / std::ldexp(1, exponent - 2);
      int best = 0;
      for (int code = 1; code < 8; ++code) {
        const double error = std::fabs(e2m1_value(code) - wanted);
        const double best_error = std::fabs(e2m1_value(best) - wanted);
        if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
      }
      if (std::signbit(row[i])) best += 8;
      ASSERT_EQ((codes[i / 2] >> (i % 2 == 0 ? 0 : 4)) & 15, best) << "value " << row[i] << " amax " << amax;
    }
  }
}

TEST(Mxfp4, EveryCodeUnderEveryScale) {
  for (int scale = 0; scale < 256; ++scale) {
    std::vector<uint8_t> codes(16);
    for (int i = 0; i < 16; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>(i | ((15 - i) << 4));
    const uint8_t scale_code = static_cast<uint8_t>(scale);
    std::vector<float> row(32);
    dequantize_row(codes.data(), &scale_code, 32, row.data());
    for (int i = 0; i < 32; ++i) {
      const double wanted = std::ldexp(e2m1_value(i % 2 == 0 ? i / 2 : 15 - i / 2), scale - 127);
      const float found = row[static_cast<size_t>(i)];
      if (scale == 255) {
        EXPECT_TRUE(std::isnan(found)) << i;
      } else {
        EXPECT_EQ(found, static_cast<float>(wanted)) << scale << " " << i;
        EXPECT_EQ(std::signbit(found), std::signbit(wanted)) << scale << " " << i;
      }
    }
  }
}

// A block with a code of 4 or 6 in it keeps its scale, and then every code.
TEST(Mxfp4, RoundTripOfEveryCode) {
  for (int scale = 5; scale <= 251; ++scale) {  // from amax 2^-120 up, and 6 * scale finite
    std::vector<uint8_t> codes(16), codes_back(16);
    for (int i = 0; i < 16; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>(i | ((15 - i) << 4));
    const uint8_t scale_code = static_cast<uint8_t>(scale);
    uint8_t scale_back = 0;
    std::vector<float> row(32);
    dequantize_row(codes.data(), &scale_code, 32, row.data());
    quantize_row(row.data(), 32, codes_back.data(), &scale_back);
    EXPECT_EQ(scale_back, scale_code);
    EXPECT_EQ(codes_back, codes) << scale;
  }
}

TEST(Mxfp4, QuantizesAsTheSlowFormula) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal;
  for (float magnitude : {0.0f, 1e-44f, 1e-38f, 1e-30f, 1e-3f, 1.0f, 3000.0f, 1e37f}) {
    std::vector<float> row(32 * 100);
    for (float& value : row) value = magnitude * normal(random);
    expect_quantizes_as_slowly(row);
  }
}

// Ties of the codes, and largest values at and next to powers of two.
TEST(Mxfp4, EdgesAsTheSlowFormula) {
  const float kMax = std::numeric_limits<float>::max();
  std::vector<float> row;
  for (float top :
       {1.0f, std::nextafter(1.0f, 0.0f), std::nextafter(8.0f, 0.0f), std::nextafter(0x1p-100f, 0.0f),
        0x1p-120f, std::nextafter(0x1p-120f, 0.0f), 0x1p127f, kMax, -kMax, 7.0f, 4.0f, -6.5f}) {
    const float unit = std::ldexp(0.125f, std::ilogb(top) - 2);
    row.push_back(top);
    for (int i = 1; i < 32; ++i) row.push_back(unit * static_cast<float>(i % 2 == 0 ? i : -i));
  }
  expect_quantizes_as_slowly(row);
}

TEST(Mxfp4, ZerosKeepTheirSign) {
  std::vector<float> row(32, 0.0f), back(32);
  row[3] = -0.0f;
  std::vector<uint8_t> codes(16);
  uint8_t scale = 0;
  quantize_row(row.data(), 32, codes.data(), &scale);
  EXPECT_EQ(scale, 127 - 122);
  dequantize_row(codes.data(), &scale, 32, back.data());
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_EQ(back[i], 0.0f);
    EXPECT_EQ(std::signbit(back[i]), i == 3);
  }
}

}  // namespace
}  // namespace nibble::mxfp4
