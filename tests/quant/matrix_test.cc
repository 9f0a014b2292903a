#include "quant/matrix.h"

#include <gtest/gtest.h>

#include <vector>

#include "quant/float_codes.h"
#include "quant/gguf_blocks.h"

namespace nibble {
namespace {

constexpr int kFormats = static_cast<int>(MatrixFormat::kGgufNvfp4) + 1;

TEST(Matrix, TheTableIsInTheOrderOfTheEnum) {
  for (int i = 0; i < kFormats; ++i) {
    const auto format = static_cast<MatrixFormat>(i);
    EXPECT_EQ(matrix_format_info(format).format, format);
    EXPECT_FALSE(matrix_format_name(format).empty());
    EXPECT_NE(matrix_format_info(format).decode, nullptr);
  }
}

TEST(Matrix, BytesOfEachFormat) {
  using enum MatrixFormat;
  EXPECT_EQ(matrix_bytes(kF32, 3, 5), 60);
  EXPECT_EQ(matrix_bytes(kBF16, 3, 5), 30);
  EXPECT_EQ(matrix_bytes(kNvfp4, 3, 32), 3 * (16 + 2));
  EXPECT_EQ(matrix_bytes(kMxfp4, 3, 64), 3 * (32 + 2));
  EXPECT_EQ(matrix_bytes(kQ4, 3, 64), 3 * (32 + 4));
  EXPECT_EQ(matrix_bytes(kF8E4M3, 3, 5), 15);
  EXPECT_EQ(matrix_code_bytes(kFp8Block, 129, 130), 129 * 130);
  EXPECT_EQ(matrix_scale_bytes(kFp8Block, 129, 130), 2 * 2 * 4);
  EXPECT_EQ(matrix_scale_bytes(kFp8Block, 128, 128), 4);
  EXPECT_EQ(matrix_bytes(kGgufQ6K, 2, 512), 2 * 2 * 210);
}

TEST(Matrix, GgufSizesAreThoseOfItsTypes) {
  using enum MatrixFormat;
  const std::pair<MatrixFormat, GgufType> pairs[] = {
      {kGgufQ4_0, GgufType::kQ4_0},  {kGgufQ4_1, GgufType::kQ4_1}, {kGgufQ8_0, GgufType::kQ8_0},
      {kGgufQ4K, GgufType::kQ4_K},   {kGgufQ6K, GgufType::kQ6_K},  {kGgufMxfp4, GgufType::kMxfp4},
      {kGgufNvfp4, GgufType::kNvfp4}};
  for (const auto& [format, type] : pairs) {
    const MatrixFormatInfo& info = matrix_format_info(format);
    EXPECT_EQ(info.group, gguf_type_info(type).block_values);
    EXPECT_EQ(info.group_bytes, gguf_type_info(type).block_bytes);
    // The decoder is that type's.
    std::vector<uint8_t> row(static_cast<size_t>(info.group_bytes));
    for (size_t i = 0; i < row.size(); ++i) row[i] = static_cast<uint8_t>(i % 50 + 3);
    std::vector<float> wanted(static_cast<size_t>(info.group)), found = wanted;
    dequantize_gguf_row(type, row.data(), info.group, wanted.data());
    const Matrix matrix{.format = format, .n = 1, .k = info.group, .codes = row.data(), .tensor_scale = 0.5f};
    dequantize_row(matrix, 0, found.data());
    for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i], wanted[i] * 0.5f) << info.name;
  }
}

// A matrix that starts at a row of another counts its blocks of 128 rows from its own first row.
TEST(Matrix, Fp8BlocksCountFromTheMatrixsOwnRows) {
  std::vector<uint8_t> codes(258, 0x38);  // 1.0
  const std::vector<float> scales = {2, 3, 5};
  Matrix matrix{
      .format = MatrixFormat::kFp8Block, .n = 258, .k = 1, .codes = codes.data(), .scales = scales.data()};
  float value = 0;
  for (auto [n, wanted] : {std::pair<int64_t, float>{0, 2.0f}, {127, 2.0f}, {128, 3.0f}, {256, 5.0f}}) {
    dequantize_row(matrix, n, &value);
    EXPECT_EQ(value, wanted);
  }
  matrix.n = 2;
  matrix.codes = codes.data() + 127;
  dequantize_row(matrix, 1, &value);
  EXPECT_EQ(value, 2.0f);
}

}  // namespace
}  // namespace nibble
