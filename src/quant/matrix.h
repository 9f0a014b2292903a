// A weight matrix [N, K] in one of the formats that we compute with: what the loader makes of the tensors on
// disk and what a backend takes. Plain data; does not own its bytes.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/result.h"
#include "quant/dtype.h"

namespace nibble {

enum class MatrixFormat {
  kF32,    // codes: float [N, K]
  kF16,    // codes: u16 [N, K]
  kBF16,   // codes: u16 [N, K]
  kNvfp4,  // codes: u8 [N, K/2], scales: e4m3 [N, K/16], tensor_scale; see nvfp4.h
};

std::string_view matrix_format_name(MatrixFormat format);
// Bytes of codes and scales of an [N, K] matrix. REQUIRES K a multiple of the format's group.
int64_t matrix_bytes(MatrixFormat format, int64_t n, int64_t k);

struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  int64_t n = 0;  // output rows
  int64_t k = 0;  // input columns
  const void* codes = nullptr;
  const void* scales = nullptr;  // block scales; null where the format has none
  // Value = code * block scale * tensor_scale, with tensor_scale applied to the float32 accumulator, never
  // folded into block scales (folding costs 2.68% mean error, 18.75% at worst; spec formats.md 1).
  float tensor_scale = 1.0f;

  bool empty() const { return codes == nullptr; }
};

// Row n as float32, tensor_scale included: the judge of every kernel. out has k elements.
void dequantize_row(const Matrix& matrix, int64_t n, float* out);

}  // namespace nibble
