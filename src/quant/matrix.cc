#include "quant/matrix.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/numbers.h"
#include "quant/float_codes.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q4.h"

namespace nibble {
namespace {

constexpr int64_t kFp8BlockSize = 128;  // rows and columns

void decode_f32(const void* codes, const void* /*scales*/, int64_t count, float* out) {
  std::copy_n(static_cast<const float*>(codes), count, out);
}
template <float (*kToFloat)(uint16_t)>
void decode_half(const void* codes, const void* /*scales*/, int64_t count, float* out) {
  std::transform(static_cast<const uint16_t*>(codes), static_cast<const uint16_t*>(codes) + count, out,
                 kToFloat);
}
void decode_e4m3(const void* codes, const void* /*scales*/, int64_t count, float* out) {
  std::transform(static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(codes) + count, out,
                 e4m3_to_float);
}
void decode_fp8_block(const void* codes, const void* scales, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = e4m3_to_float(static_cast<const uint8_t*>(codes)[i]) *
             static_cast<const float*>(scales)[i / kFp8BlockSize];
  }
}
// The codecs that take a row's codes and its scales of type Scale.
template <class Scale, void (*kRow)(const uint8_t*, const Scale*, int64_t, float*)>
void decode_scaled(const void* codes, const void* scales, int64_t count, float* out) {
  kRow(static_cast<const uint8_t*>(codes), static_cast<const Scale*>(scales), count, out);
}

// In the order of the enum.
using enum MatrixFormat;
constexpr std::array kTable = {
    //                                        codes          block scales
    //                                        group  bytes   columns  bytes  rows
    MatrixFormatInfo{kF32, "F32",             1,     4,      1,       0,     1, decode_f32},
    MatrixFormatInfo{kF16, "F16",             1,     2,      1,       0,     1, decode_half<f16_to_float>},
    MatrixFormatInfo{kBF16, "BF16",           1,     2,      1,       0,     1, decode_half<bf16_to_float>},
    MatrixFormatInfo{kNvfp4, "NVFP4",         16,    8,      16,      1,     1,
                     decode_scaled<uint8_t, nvfp4::dequantize_row>},
    MatrixFormatInfo{kMxfp4, "MXFP4",         32,    16,     32,      1,     1,
                     decode_scaled<uint8_t, mxfp4::dequantize_row>},
    MatrixFormatInfo{kQ4, "q4",               32,    16,     32,      2,     1,
                     decode_scaled<uint16_t, q4::dequantize_row>},
    MatrixFormatInfo{kF8E4M3, "FP8",          1,     1,      1,       0,     1, decode_e4m3},
    MatrixFormatInfo{kFp8Block, "FP8 blocks", 1,     1,      kFp8BlockSize, 4, kFp8BlockSize,
                     decode_fp8_block},
    MatrixFormatInfo{kGgufQ4_0, "Q4_0",       32,    18,     1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufQ4_1, "Q4_1",       32,    20,     1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufQ8_0, "Q8_0",       32,    34,     1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufQ4K, "Q4_K",        256,   144,    1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufQ6K, "Q6_K",        256,   210,    1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufMxfp4, "MXFP4 (GGUF)", 32, 17,     1,       0,     1, nullptr},
    MatrixFormatInfo{kGgufNvfp4, "NVFP4 (GGUF)", 64, 36,     1,       0,     1, nullptr},
};

}  // namespace

const MatrixFormatInfo& matrix_format_info(MatrixFormat format) {
  const MatrixFormatInfo& info = kTable[static_cast<size_t>(format)];
  NIBBLE_DCHECK(info.format == format);
  return info;
}

std::string_view matrix_format_name(MatrixFormat format) { return matrix_format_info(format).name; }

int64_t matrix_code_bytes(MatrixFormat format, int64_t n, int64_t k) {
  return n * matrix_format_info(format).code_row_bytes(k);
}

int64_t matrix_scale_bytes(MatrixFormat format, int64_t n, int64_t k) {
  const MatrixFormatInfo& info = matrix_format_info(format);
  return ceil_div(n, info.scale_rows) * info.scale_row_bytes(k);
}

int64_t matrix_bytes(MatrixFormat format, int64_t n, int64_t k) {
  return matrix_code_bytes(format, n, k) + matrix_scale_bytes(format, n, k);
}

void dequantize_row(const Matrix& matrix, int64_t n, float* out) {
  NIBBLE_DCHECK(n >= 0 && n < matrix.n);
  const MatrixFormatInfo& info = matrix_format_info(matrix.format);
  const auto* codes = static_cast<const std::byte*>(matrix.codes) + n * info.code_row_bytes(matrix.k);
  const auto* scales = static_cast<const std::byte*>(matrix.scales);
  if (scales != nullptr) scales += n / info.scale_rows * info.scale_row_bytes(matrix.k);
  info.decode(codes, scales, matrix.k, out);
  for (int64_t i = 0; i < matrix.k; ++i) out[i] *= matrix.tensor_scale;
}

}  // namespace nibble
