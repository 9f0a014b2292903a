// A weight matrix as kernels see it.
#pragma once

#include <cstdint>

#include "quant/matrix.h"

namespace nibble::cuda {

struct DeviceMatrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const float* bias = nullptr;  // [n], added to the products; null: none
  int64_t n = 0, k = 0;
  int64_t code_row_bytes = 0, scale_row_bytes = 0;
  int32_t scale_rows = 1;
  float tensor_scale = 1;
  MatrixFormat format = MatrixFormat::kF32;
};

inline DeviceMatrix device_matrix(const Matrix& m, const float* bias = nullptr) {
  const MatrixFormatInfo& info = matrix_format_info(m.format);
  return {.codes = static_cast<const uint8_t*>(m.codes),
          .scales = static_cast<const uint8_t*>(m.scales),
          .bias = bias,
          .n = m.n,
          .k = m.k,
          .code_row_bytes = info.code_row_bytes(m.k),
          .scale_row_bytes = info.scale_row_bytes(m.k),
          .scale_rows = static_cast<int32_t>(info.scale_rows),
          .tensor_scale = m.tensor_scale,
          .format = m.format};
}

}  // namespace nibble::cuda
