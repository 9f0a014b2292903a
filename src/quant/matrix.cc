#include "quant/matrix.h"

#include "base/check.h"
#include "quant/float_codes.h"
#include "quant/nvfp4.h"

namespace nibble {

std::string_view matrix_format_name(MatrixFormat format) {
  switch (format) {
    case MatrixFormat::kF32:
      return "F32";
    case MatrixFormat::kF16:
      return "F16";
    case MatrixFormat::kBF16:
      return "BF16";
    case MatrixFormat::kNvfp4:
      return "NVFP4";
  }
  NIBBLE_CHECK(false);
}

int64_t matrix_bytes(MatrixFormat format, int64_t n, int64_t k) {
  switch (format) {
    case MatrixFormat::kF32:
      return 4 * n * k;
    case MatrixFormat::kF16:
    case MatrixFormat::kBF16:
      return 2 * n * k;
    case MatrixFormat::kNvfp4:
      return n * (k / 2 + k / nvfp4::kGroup);
  }
  NIBBLE_CHECK(false);
}

void dequantize_row(const Matrix& matrix, int64_t n, float* out) {
  NIBBLE_DCHECK(n >= 0 && n < matrix.n);
  const int64_t k = matrix.k;
  switch (matrix.format) {
    case MatrixFormat::kF32: {
      const float* row = static_cast<const float*>(matrix.codes) + n * k;
      for (int64_t i = 0; i < k; ++i) out[i] = row[i] * matrix.tensor_scale;
      return;
    }
    case MatrixFormat::kF16: {
      const uint16_t* row = static_cast<const uint16_t*>(matrix.codes) + n * k;
      for (int64_t i = 0; i < k; ++i) out[i] = f16_to_float(row[i]) * matrix.tensor_scale;
      return;
    }
    case MatrixFormat::kBF16: {
      const uint16_t* row = static_cast<const uint16_t*>(matrix.codes) + n * k;
      for (int64_t i = 0; i < k; ++i) out[i] = bf16_to_float(row[i]) * matrix.tensor_scale;
      return;
    }
    case MatrixFormat::kNvfp4:
      nvfp4::dequantize_row(static_cast<const uint8_t*>(matrix.codes) + n * (k / 2),
                            static_cast<const uint8_t*>(matrix.scales) + n * (k / nvfp4::kGroup), k, out);
      for (int64_t i = 0; i < k; ++i) out[i] *= matrix.tensor_scale;
      return;
  }
}

}  // namespace nibble
