#include "quant/matrix.h"

#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "base/numbers.h"
#include "quant/float_codes.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q4.h"

namespace nibble {
namespace {

constexpr int64_t kFp8BlockColumns = 128;

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
             static_cast<const float*>(scales)[i / kFp8BlockColumns];
  }
}
// The codecs that take a row's codes and its scales of type Scale.
template <class Scale, void (*kRow)(const uint8_t*, const Scale*, int64_t, float*)>
void decode_scaled(const void* codes, const void* scales, int64_t count, float* out) {
  kRow(static_cast<const uint8_t*>(codes), static_cast<const Scale*>(scales), count, out);
}

template <GgufType kType>
void decode_gguf(const void* codes, const void* /*scales*/, int64_t count, float* out) {
  dequantize_gguf_row(kType, static_cast<const uint8_t*>(codes), count, out);
}

using enum MatrixFormat;
// In the order of the enum.
// clang-format off
constexpr MatrixFormatInfo kTable[] = {
    //                              codes        block scales
    //                              group bytes  columns bytes rows
    {kF32,       "F32",             1,    4,     1,      0,    1,    decode_f32},
    {kF16,       "F16",             1,    2,     1,      0,    1,    decode_half<f16_to_float>},
    {kBF16,      "BF16",            1,    2,     1,      0,    1,    decode_half<bf16_to_float>},
    {kNvfp4,     "NVFP4",           16,   8,     16,     1,    1,    decode_scaled<uint8_t, nvfp4::dequantize_row>},
    {kMxfp4,     "MXFP4",           32,   16,    32,     1,    1,    decode_scaled<uint8_t, mxfp4::dequantize_row>},
    {kQ4,        "q4",              32,   16,    32,     2,    1,    decode_scaled<uint16_t, q4::dequantize_row>},
    {kF8E4M3,    "FP8",             1,    1,     1,      0,    1,    decode_e4m3},
    {kFp8Block,  "FP8 blocks",      1,    1,     128,    4,    128,  decode_fp8_block},
    {kGgufQ4_0,  "GGUF Q4_0",       32,   18,    1,      0,    1,    decode_gguf<GgufType::kQ4_0>},
    {kGgufQ4_1,  "GGUF Q4_1",       32,   20,    1,      0,    1,    decode_gguf<GgufType::kQ4_1>},
    {kGgufQ8_0,  "GGUF Q8_0",       32,   34,    1,      0,    1,    decode_gguf<GgufType::kQ8_0>},
    {kGgufQ4K,   "GGUF Q4_K",       256,  144,   1,      0,    1,    decode_gguf<GgufType::kQ4_K>},
    {kGgufQ6K,   "GGUF Q6_K",       256,  210,   1,      0,    1,    decode_gguf<GgufType::kQ6_K>},
    {kGgufMxfp4, "GGUF MXFP4",      32,   17,    1,      0,    1,    decode_gguf<GgufType::kMxfp4>},
    {kGgufNvfp4, "GGUF NVFP4",      64,   36,    1,      0,    1,    decode_gguf<GgufType::kNvfp4>},
};
// clang-format on

}  // namespace

const MatrixFormatInfo& matrix_format_info(MatrixFormat format) {
  const MatrixFormatInfo& info = kTable[static_cast<size_t>(format)];
  NIBBLE_DCHECK(info.format == format);
  return info;
}

std::span<const MatrixFormatInfo> matrix_formats() { return kTable; }

std::string_view matrix_format_name(MatrixFormat format) { return matrix_format_info(format).name; }

std::optional<MatrixFormat> plain_matrix_format(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return MatrixFormat::kF32;
    case DType::kF16:
      return MatrixFormat::kF16;
    case DType::kBF16:
      return MatrixFormat::kBF16;
    default:
      return std::nullopt;
  }
}

MatrixFormat gguf_matrix_format(GgufType type) {
  switch (type) {
    case GgufType::kF32:
      return MatrixFormat::kF32;
    case GgufType::kF16:
      return MatrixFormat::kF16;
    case GgufType::kBF16:
      return MatrixFormat::kBF16;
    case GgufType::kQ4_0:
      return MatrixFormat::kGgufQ4_0;
    case GgufType::kQ4_1:
      return MatrixFormat::kGgufQ4_1;
    case GgufType::kQ8_0:
      return MatrixFormat::kGgufQ8_0;
    case GgufType::kQ4_K:
      return MatrixFormat::kGgufQ4K;
    case GgufType::kQ6_K:
      return MatrixFormat::kGgufQ6K;
    case GgufType::kMxfp4:
      return MatrixFormat::kGgufMxfp4;
    case GgufType::kNvfp4:
      return MatrixFormat::kGgufNvfp4;
  }
  NIBBLE_CHECK(false);
}

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
