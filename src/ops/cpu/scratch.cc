#include "ops/cpu/scratch.h"

#include <array>

#include "ops/cpu/weight_tiles.h"

namespace nibble::cpu {
namespace {

// The formats that have kernels of their own.
struct KernelFormat {
  MatrixFormat format;
  WeightFormat kernels;
  Packing packing;
};
using enum MatrixFormat;
constexpr std::array kKernelFormats = {
    KernelFormat{kF32, WeightFormat::kF32, Packing::kPlain},
    KernelFormat{kF16, WeightFormat::kF16, Packing::kPlain},
    KernelFormat{kBF16, WeightFormat::kBF16, Packing::kPlain},
    KernelFormat{kNvfp4, WeightFormat::kNvfp4, Packing::kFixed},
    KernelFormat{kMxfp4, WeightFormat::kMxfp4, Packing::kFixed},
    KernelFormat{kQ4, WeightFormat::kQ4, Packing::kFixed},
    KernelFormat{kF8E4M3, WeightFormat::kF8E4M3, Packing::kPlain},
    KernelFormat{kFp8Block, WeightFormat::kFp8Block, Packing::kPlain},
};

KernelFormat kernel_format(MatrixFormat format) {
  for (const KernelFormat& row : kKernelFormats) {
    if (row.format == format) return row;
  }
  return {format, WeightFormat::kDecoded, Packing::kPlain};
}

}  // namespace

Weights kernel_weights(const Matrix& matrix, Rounding rounding) {
  const bool row_major = !matrix.tiled && tile_format(matrix.format).has_value();
  KernelFormat format = row_major ? KernelFormat{matrix.format, WeightFormat::kDecoded, Packing::kPlain}
                                  : kernel_format(matrix.format);
  if (format.packing == Packing::kFixed && rounding.int8) format.packing = Packing::kInt8;
  const bool pairs = format.kernels == WeightFormat::kBF16 && rounding.pairs && matrix.k % 2 == 0;
  if (matrix.in_12_bits) format.kernels = WeightFormat::kBF16In12;
  if (pairs) {
    format.kernels = matrix.in_12_bits ? WeightFormat::kBF16In12Pairs : WeightFormat::kBF16Pairs;
    format.packing = Packing::kPairs;
  }
  const MatrixFormatInfo& info = matrix_format_info(matrix.format);
  NIBBLE_CHECK(format.kernels != WeightFormat::kDecoded || info.scale_rows == 1);
  return {.format = format.kernels,
          .packing = format.packing,
          .codes = matrix.codes,
          .scales = matrix.scales,
          .n = matrix.n,
          .k = pairs ? matrix.k / 2 : matrix.k,
          .tensor_scale = matrix.tensor_scale,
          .group = info.group,
          .group_bytes = info.group_bytes,
          .scale_columns = info.scale_columns,
          .scale_bytes = info.scale_bytes,
          .decode = info.decode};
}

PackedRows pack_rows(ThreadPool& pool, const Kernels& kernels, Packing packing, Rows<const float> x,
                     Scratch& scratch) {
  const int64_t stride = packed_floats(packing, x.cols);
  float* packed = scratch.reserve(x.rows * stride);
  for_each(pool, x.rows, x.cols / 2,
           [&](int64_t t) { kernels.pack(packing, x.row(t), x.cols, packed + t * stride); });
  return {packed, nullptr, x.rows, stride};
}

}  // namespace nibble::cpu
