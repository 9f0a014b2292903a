// Norms: a block a row, whose size depends on the width alone; sums in a fixed order. Bytes: the row
// once, or twice where it is wide (the second time from the cache), and once written.
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

__global__ void rms_norm_kernel(Rows<const float> x, const float* weight, float eps, Rows<float> out) {
  after_kernel_before();
  __shared__ float s_pieces[kNormPieces];
  const float* row = x.data + int64_t{blockIdx.x} * x.stride;
  float* out_row = out.data + int64_t{blockIdx.x} * out.stride;
  rms_norm_row(row, weight, x.cols, eps, s_pieces,
               [&](int64_t c, const float4& values) { store_four(out_row, c, x.cols, values); });
}

__global__ void layer_norm_kernel(Rows<const float> x, const float* weight, const float* bias, float eps,
                                  Rows<float> out) {
  after_kernel_before();
  __shared__ float s_warps[kWarp];
  const float* row = x.data + int64_t{blockIdx.x} * x.stride;
  float* out_row = out.data + int64_t{blockIdx.x} * out.stride;
  const auto count = static_cast<float>(x.cols);
  float sum = 0, square = 0;
  for (int64_t i = threadIdx.x; i < x.cols; i += blockDim.x) sum += row[i];
  const float mean = block_sum(sum, s_warps) / count;
  for (int64_t i = threadIdx.x; i < x.cols; i += blockDim.x)
    square = fmaf(row[i] - mean, row[i] - mean, square);
  const float factor = 1.0f / sqrtf(block_sum(square, s_warps) / count + eps);
  for (int64_t i = threadIdx.x; i < x.cols; i += blockDim.x)
    out_row[i] = (row[i] - mean) * factor * weight[i] + bias[i];
}

}  // namespace

void rms_norm(cudaStream_t stream, Rows<const float> x, const float* weight, float eps, Rows<float> out) {
  if (x.rows == 0) return;
  launch_early(rms_norm_kernel, static_cast<unsigned>(x.rows), static_cast<unsigned>(norm_threads(x.cols)), 0,
               stream, x, weight, eps, out);
  check_launch("rms_norm", x.rows, x.cols);
}

void layer_norm(cudaStream_t stream, Rows<const float> x, const float* weight, const float* bias, float eps,
                Rows<float> out) {
  if (x.rows == 0) return;
  launch_early(layer_norm_kernel, static_cast<unsigned>(x.rows), static_cast<unsigned>(norm_threads(x.cols)),
               0, stream, x, weight, bias, eps, out);
  check_launch("layer_norm", x.rows, x.cols);
}

}  // namespace nibble::cuda
