#include "quant/nvfp4.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "quant/float_codes.h"
#include "quant/matrix.h"

namespace nibble::nvfp4 {
namespace {

// The codes from their definitions, apart from float_codes.h.
double e2m1_value(int code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}
double e4m3_value(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The code whose value is nearest, an even code where two are: a search over all non-negative codes.
template <class Value>
int nearest_code(double wanted, int count, Value value) {
  int best = 0;
  for (int code = 1; code < count; ++code) {
    const double error = std::fabs(value(code) - wanted), best_error = std::fabs(value(best) - wanted);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return best;
}

// nvfp4.h's definition, step by step, with the quotients in float32 as it says and every rounding by search.
void quantize_slowly(const std::vector<float>& values, float tensor_scale, std::vector<uint8_t>& codes,
                     std::vector<uint8_t>& scales) {
  codes.assign(values.size() / 2, 0);
  scales.clear();
  for (size_t begin = 0; begin < values.size(); begin += 16) {
    float amax = 0;
    for (size_t i = begin; i < begin + 16; ++i) amax = std::max(amax, std::fabs(values[i]));
    const float ratio = amax / 6.0f / tensor_scale;
    const int scale_code = nearest_code(ratio, 0x7F, e4m3_value);
    scales.push_back(static_cast<uint8_t>(scale_code));
    const float scale = static_cast<float>(e4m3_value(scale_code)) * tensor_scale;
    for (size_t i = begin; i < begin + 16; ++i) {
      if (scale == 0) continue;
      const float quotient = values[i] / scale;
      int code = nearest_code(std::fabs(quotient), 8, e2m1_value);
      if (std::signbit(quotient)) code |= 8;
      codes[i / 2] = static_cast<uint8_t>(codes[i / 2] | (code << (i % 2 == 0 ? 0 : 4)));
    }
  }
}

void expect_quantizes_as_slowly(const std::vector<float>& values, float tensor_scale) {
  std::vector<uint8_t> want_codes, want_scales;
  quantize_slowly(values, tensor_scale, want_codes, want_scales);
  std::vector<uint8_t> codes(values.size() / 2, 0xEE), scales(values.size() / 16, 0xEE);
  quantize_row(values.data(), std::ssize(values), tensor_scale, codes.data(), scales.data());
  EXPECT_EQ(scales, want_scales);
  EXPECT_EQ(codes, want_codes);
}

// One block for each scale code, with all 16 e2m1 codes in it.
void all_codes(std::vector<uint8_t>& codes, std::vector<uint8_t>& scales) {
  for (int scale = 0; scale < 256; ++scale) {
    if ((scale & 0x7F) == 0x7F) continue;
    scales.push_back(static_cast<uint8_t>(scale));
    for (int pair = 0; pair < 8; ++pair)
      codes.push_back(static_cast<uint8_t>(2 * pair | ((2 * pair + 1) << 4)));
  }
}

TEST(Nvfp4, DequantizeIsTheFormula) {
  std::vector<uint8_t> codes, scales;
  all_codes(codes, scales);
  std::vector<float> row(scales.size() * 16);
  dequantize_row(codes.data(), scales.data(), std::ssize(row), row.data());
  for (size_t i = 0; i < row.size(); ++i) {
    const double want = e2m1_value(static_cast<int>(i % 16)) * e4m3_value(scales[i / 16]);
    ASSERT_EQ(row[i], want) << i;  // exact: the product has six significant bits
    ASSERT_EQ(std::signbit(row[i]), std::signbit(want)) << i;
    ASSERT_EQ(bf16_to_float(float_to_bf16(row[i])), row[i]) << i;
  }
}

TEST(Nvfp4, NanScaleGivesNan) {
  const std::vector<uint8_t> codes(8, 0x22), scales = {0xFF};
  std::vector<float> row(16);
  dequantize_row(codes.data(), scales.data(), 16, row.data());
  for (float value : row) EXPECT_TRUE(std::isnan(value));
}

// quantize(dequantize(x)) = x: a block that has a 6 in it finds its own scale again.
TEST(Nvfp4, RoundTripOfAllCodesAndScales) {
  for (float tensor_scale : {1.0f, 0x1p-12f, 0x1p5f, 0.3f}) {
    std::vector<uint8_t> codes, scales;
    all_codes(codes, scales);
    // A negative scale comes back as a positive one, and 0 as codes of 0; both are tested apart.
    const size_t positive = 0x7E;
    codes.erase(codes.begin(), codes.begin() + 8);
    scales.erase(scales.begin());
    codes.resize(8 * positive);
    scales.resize(positive);
    std::vector<float> row(16 * positive);
    const Matrix matrix{.format = MatrixFormat::kNvfp4,
                        .n = 1,
                        .k = std::ssize(row),
                        .codes = codes.data(),
                        .scales = scales.data(),
                        .tensor_scale = tensor_scale};
    nibble::dequantize_row(matrix, 0, row.data());
    std::vector<uint8_t> codes_again(codes.size()), scales_again(scales.size());
    quantize_row(row.data(), std::ssize(row), tensor_scale, codes_again.data(), scales_again.data());
    EXPECT_EQ(scales_again, scales) << tensor_scale;
    EXPECT_EQ(codes_again, codes) << tensor_scale;
  }
}

TEST(Nvfp4, ZeroBlocks) {
  std::vector<float> row(32, -0.0f);
  row[20] = 1e-30f;  // its block scale rounds to 0
  std::vector<uint8_t> codes(16, 0xEE), scales(2, 0xEE);
  quantize_row(row.data(), 32, 1.0f, codes.data(), scales.data());
  EXPECT_EQ(codes, std::vector<uint8_t>(16, 0));
  EXPECT_EQ(scales, std::vector<uint8_t>(2, 0));
}

TEST(Nvfp4, ByHand) {
  // amax 6 and tensor scale 1: block scale 1 (0x38). Ties go to the even code.
  const std::vector<float> row = {6, -6, 0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f,
                                  5, -5, 0,     -0.0f, 0.5f,  -1,    4,    3};
  std::vector<uint8_t> codes(8), scales(1);
  quantize_row(row.data(), 16, 1.0f, codes.data(), scales.data());
  EXPECT_EQ(scales[0], 0x38);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0xF7, 0x20, 0x42, 0x64, 0xE6, 0x80, 0xA1, 0x56}));
}

TEST(Nvfp4, QuantizesAsTheSlowFormula) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (float magnitude : {1e-3f, 0.02f, 1.0f, 300.0f}) {
    std::vector<float> row(16 * 200);
    for (float& value : row) value = magnitude * normal(random);
    float amax = 0;
    for (float value : row) amax = std::max(amax, std::fabs(value));
    expect_quantizes_as_slowly(row, choose_tensor_scale(amax));
    expect_quantizes_as_slowly(row, 1.0f);               // small ones reach subnormal scales and 0
    expect_quantizes_as_slowly(row, magnitude * 1e-4f);  // the scales saturate at 448
  }
}

// Every tie of scales and codes: multiples of halves, at scales that are powers of two.
TEST(Nvfp4, TiesAsTheSlowFormula) {
  for (int exponent = -12; exponent <= 4; ++exponent) {
    std::vector<float> row;
    for (int top = 16; top <= 32; ++top) {
      for (int i = 0; i < 16; ++i) {
        const float value = static_cast<float>(top * i) / 240.0f * 6.0f;
        row.push_back(std::ldexp(i % 2 == 0 ? value : -value, exponent));
      }
      for (int i = 0; i < 16; ++i)
        row.push_back(std::ldexp(6.0f * static_cast<float>(top) * (i == 3 ? 1.0f : 0.125f), exponent));
    }
    for (int i = 0; i < 32; ++i)
      row.push_back(std::ldexp(0.25f * static_cast<float>(i % 16 == 15 ? 24 : i), exponent));
    expect_quantizes_as_slowly(row, 1.0f);
  }
}

// Where amax / 6 / tensor_scale is within some last bits of a tie between two scale codes, the order of the
// two divisions decides.
TEST(Nvfp4, ScalesNextToTiesAsTheSlowFormula) {
  std::mt19937 random(9);
  std::uniform_real_distribution<float> uniform(1e-4f, 2e-4f);
  for (int repeat = 0; repeat < 100; ++repeat) {
    const float tensor_scale = uniform(random);
    std::vector<float> row;
    for (float tie : {1.0625f, 1.1875f, 1.9375f, 100.0f, 0x1.8p-9f}) {
      float amax = tie * 6.0f * tensor_scale;
      for (int i = 0; i < 3; ++i) amax = std::nextafter(amax, 0.0f);
      for (int i = 0; i < 7; ++i, amax = std::nextafter(amax, 1e9f)) {
        row.push_back(amax);
        row.resize(row.size() + 15, 0.3f * amax);
      }
    }
    expect_quantizes_as_slowly(row, tensor_scale);
  }
}

// No value is farther from its result than half the widest step (6 - 4) of its block.
TEST(Nvfp4, ErrorIsBounded) {
  std::mt19937 random(8);
  std::uniform_real_distribution<float> uniform(-3, 3);
  std::vector<float> row(16 * 100), back(row.size());
  for (float& value : row) value = uniform(random);
  const float tensor_scale = choose_tensor_scale(3);
  std::vector<uint8_t> codes(row.size() / 2), scales(row.size() / 16);
  quantize_row(row.data(), std::ssize(row), tensor_scale, codes.data(), scales.data());
  dequantize_row(codes.data(), scales.data(), std::ssize(row), back.data());
  for (size_t i = 0; i < row.size(); ++i) {
    const float scale = e4m3_to_float(scales[i / 16]) * tensor_scale;
    // The scale itself rounds by up to 1/16, so that 6 * scale may be short of amax by 6 / 16.
    EXPECT_LE(std::fabs(back[i] * tensor_scale - row[i]), scale * 1.0001f) << i;
  }
}

TEST(Nvfp4, RoundedRowIsTheSlowFormulasCodes) {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  for (float magnitude : {1e-5f, 1.0f, 3000.0f}) {
    std::vector<float> row(16 * 50), rounded(row.size(), -1);
    for (float& value : row) value = magnitude * normal(random);
    std::fill_n(row.begin() + 32, 16, 0.0f);
    const float own = choose_row_scale(row.data(), std::ssize(row));
    float amax = 0;
    for (float value : row) amax = std::max(amax, std::fabs(value));
    EXPECT_EQ(own, amax / 2688.0f);
    for (float g : {own, 1.0f, 0.003f}) {
      std::vector<uint8_t> codes, scales;
      quantize_slowly(row, g, codes, scales);
      round_row(row.data(), std::ssize(row), g, rounded.data());
      for (size_t i = 0; i < row.size(); ++i) {
        const int code = i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
        ASSERT_EQ(rounded[i], e2m1_value(code) * e4m3_value(scales[i / 16])) << i;
      }
      std::vector<float> in_place = row;
      round_row(in_place.data(), std::ssize(row), g, in_place.data());
      EXPECT_EQ(in_place, rounded);
    }
  }
}

TEST(Nvfp4, RowsOfZerosAndOfWhatIsNoNumber) {
  std::vector<float> row(32, 0.0f), rounded(32, -1);
  EXPECT_EQ(choose_row_scale(row.data(), 32), 0.0f);
  round_row(row.data(), 32, 0, rounded.data());
  EXPECT_EQ(rounded, row);
  row[3] = 1e-42f;  // its scale is 0 in float32
  round_row(row.data(), 32, choose_row_scale(row.data(), 32), rounded.data());
  EXPECT_EQ(rounded, std::vector<float>(32, 0.0f));
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    row[20] = bad;
    EXPECT_TRUE(std::isnan(choose_row_scale(row.data(), 32)));
    for (float g : {choose_row_scale(row.data(), 32), 1.0f}) {
      round_row(row.data(), 32, g, rounded.data());
      EXPECT_TRUE(std::isnan(rounded[20]) && std::isnan(rounded[31]));
    }
    round_row(row.data(), 32, 1, rounded.data());
    EXPECT_EQ(rounded[0], 0.0f);  // a block of its own
  }
}

TEST(Nvfp4, TensorScale) {
  EXPECT_EQ(choose_tensor_scale(2688.0f), 1.0f);
  EXPECT_EQ(choose_tensor_scale(0.0f), 1e-12f);
}

TEST(FindE4m3Nan, EveryCodeAtEveryPlace) {
  EXPECT_FALSE(find_e4m3_nan({}).has_value());
  std::vector<uint8_t> codes;
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7F) != 0x7F) codes.push_back(static_cast<uint8_t>(code));
  }
  EXPECT_FALSE(find_e4m3_nan(codes).has_value());
  for (size_t size :
       {size_t{1}, size_t{7}, size_t{8}, size_t{9}, size_t{23}, size_t{4096}, size_t{4097}, size_t{8200}}) {
    std::vector<uint8_t> many(size, 0xFE);
    EXPECT_FALSE(find_e4m3_nan(many).has_value());
    for (size_t at = 0; at<size; at += size> 100 ? 13 : 1) {
      for (uint8_t nan : {uint8_t{0x7F}, uint8_t{0xFF}}) {
        many[at] = nan;
        EXPECT_EQ(find_e4m3_nan(many), at);
        many[at] = 0xFE;
      }
    }
    many[size - 1] = 0x7F;
    EXPECT_EQ(find_e4m3_nan(many), size - 1);
    many[size / 2] = 0x7F;
    EXPECT_EQ(find_e4m3_nan(many), size / 2);
  }
}

}  // namespace
}  // namespace nibble::nvfp4
