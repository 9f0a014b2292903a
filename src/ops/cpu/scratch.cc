#include "ops/cpu/scratch.h"

namespace nibble::cpu {
namespace {

WeightFormat kernel_format(MatrixFormat format) {
  switch (format) {
    case MatrixFormat::kF32:
      return WeightFormat::kF32;
    case MatrixFormat::kF16:
      return WeightFormat::kF16;
    case MatrixFormat::kBF16:
      return WeightFormat::kBF16;
    case MatrixFormat::kNvfp4:
      return WeightFormat::kNvfp4;
  }
  NIBBLE_CHECK(false);
}

}  // namespace

Weights kernel_weights(const Matrix& matrix) {
  NIBBLE_CHECK(matrix.format != MatrixFormat::kNvfp4 || (matrix.scales != nullptr && matrix.k % 16 == 0));
  return {kernel_format(matrix.format), matrix.codes, matrix.scales, matrix.n, matrix.k, matrix.tensor_scale};
}

PackedRows pack_rows(ThreadPool& pool, const Kernels& kernels, WeightFormat format, Rows<const float> x,
                     Scratch& scratch) {
  const int64_t stride = round_up(x.cols, kPackedColumns);
  float* packed = scratch.reserve(x.rows * stride);
  for_each(pool, x.rows, x.cols / 2,
           [&](int64_t t) { kernels.pack(format, x.row(t), x.cols, packed + t * stride); });
  return {packed, nullptr, x.rows, stride};
}

}  // namespace nibble::cpu
