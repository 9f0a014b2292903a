#include "quant/q4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "quant/float_codes.h"

namespace nibble::q4 {
namespace {

// Element i of a row, through the u32 words of the format's own definition.
int element(const std::vector<uint8_t>& codes, size_t i) {
  const uint8_t* bytes = codes.data() + i / 32 * 16 + i % 32 / 8 * 4;
  const uint32_t word = static_cast<uint32_t>(bytes[0]) | static_cast<uint32_t>(bytes[1]) << 8 |
                        static_cast<uint32_t>(bytes[2]) << 16 | static_cast<uint32_t>(bytes[3]) << 24;
  const int nibble = static_cast<int>((word >> (4 * (i % 8))) & 15u);
  return nibble < 8 ? nibble : nibble - 16;
}

TEST(Q4, EveryCodeUnderEveryScale) {
  std::vector<uint8_t> codes(16);
  for (int i = 0; i < 16; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>(i | ((15 - i) << 4));
  for (int scale = 0; scale < 0x7C00; ++scale) {  // every finite positive float16
    const uint16_t scale_f16 = static_cast<uint16_t>(scale);
    std::vector<float> row(32);
    dequantize_row(codes.data(), &scale_f16, 32, row.data());
    const int exponent = scale >> 10, mantissa = scale & 1023;
    const double d = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    for (size_t i = 0; i < 32; ++i)
      ASSERT_EQ(static_cast<double>(row[i]), d * element(codes, i)) << scale << " " << i;
  }
}

// A block that holds 7 or -7 keeps its codes, and its scale where 7 * scale / 7 is exact.
TEST(Q4, RoundTripOfEveryCode) {
  std::vector<uint8_t> codes(16), codes_back(16);
  for (int i = 0; i < 16; ++i) {
    const int low = i % 15 - 7, high = 7 - i % 15;
    codes[static_cast<size_t>(i)] = static_cast<uint8_t>((low & 15) | ((high & 15) << 4));
  }
  for (int scale = 1; scale < 0x7C00; ++scale) {
    const uint16_t scale_f16 = static_cast<uint16_t>(scale);
    uint16_t scale_back = 0;
    std::vector<float> row(32);
    dequantize_row(codes.data(), &scale_f16, 32, row.data());
    quantize_row(row.data(), 32, codes_back.data(), &scale_back);
    ASSERT_EQ(scale_back, scale_f16);
    ASSERT_EQ(codes_back, codes) << scale;
  }
}

TEST(Q4, QuantizesAsTheSlowFormula) {
  std::mt19937 random(27);
  std::normal_distribution<float> normal;
  for (float magnitude : {0.0f, 1e-44f, 1e-9f, 1e-5f, 0.02f, 1.0f, 30000.0f, 1e6f, 1e37f}) {
    std::vector<float> row(32 * 100);
    for (float& value : row) value = magnitude * normal(random);
    std::vector<uint8_t> codes(row.size() / 2);
    std::vector<uint16_t> scales(row.size() / 32);
    quantize_row(row.data(), std::ssize(row), codes.data(), scales.data());
    for (size_t i = 0; i < row.size(); ++i) {
      float amax = 0;
      for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32; ++j) amax = std::max(amax, std::fabs(row[j]));
      const float d = amax / 7.0f;
      int wanted = 0;  // floor(|x/d| + 1/2) with the sign of x: half away from zero
      if (d > 0) {
        const float quotient = row[i] / d;
        wanted = std::min(7, static_cast<int>(std::floor(std::fabs(static_cast<double>(quotient)) + 0.5)));
        if (quotient < 0) wanted = -wanted;
      }
      ASSERT_EQ(element(codes, i), wanted) << row[i] << " of " << amax;
      const float scale = f16_to_float(scales[i / 32]);
      if (d >= 65504.0f) {
        ASSERT_EQ(scale, 65504.0f);
      } else {
        ASSERT_LE(std::fabs(scale - d), std::max(d * 0x1p-11f, 0x1p-25f));
      }
    }
  }
}

TEST(Q4, HalvesGoAwayFromZero) {
  std::vector<float> row(32, 0.0f);
  row[0] = 7;  // d = 1
  row[1] = 0.5f, row[2] = -0.5f, row[3] = 1.5f, row[4] = -2.5f, row[5] = 6.5f, row[6] = -7, row[7] = 0.49f;
  row[8] = -0.0f;
  std::vector<uint8_t> codes(16);
  uint16_t scale = 0;
  quantize_row(row.data(), 32, codes.data(), &scale);
  EXPECT_EQ(scale, 0x3C00);
  const int wanted[9] = {7, 1, -1, 2, -3, 7, -7, 0, 0};
  for (size_t i = 0; i < 9; ++i) EXPECT_EQ(element(codes, i), wanted[i]) << i;
}

}  // namespace
}  // namespace nibble::q4
