// Residual streams (hyper-connections). Sums of S terms are taken in float64, as on the host: the kernels
// wait for memory.
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr auto kMost = static_cast<int>(kMaxStreams);

// A warp a row; lane i has row i of the matrix, then its column i.
__global__ void __launch_bounds__(kWarp)
    weights_kernel(HyperSpec spec, const float* base, const float* scale, Rows<float> mix) {
  __shared__ float s_comb[kMost * kMost];
  const auto s = static_cast<int>(spec.streams), lane = static_cast<int>(threadIdx.x);
  const bool has_row = lane < s;
  float* pre = mix.data + int64_t{blockIdx.x} * mix.stride;
  float* post = pre + s;
  float* comb = post + s;
  if (has_row) {
    pre[lane] = sigmoid(pre[lane] * scale[0] + base[lane]) + spec.eps;
    post[lane] = 2 * sigmoid(post[lane] * scale[1] + base[s + lane]);
    float* s_row = s_comb + lane * s;
    double top = -INFINITY, sum = 0;
    for (int j = 0; j < s; ++j) {
      s_row[j] = comb[lane * s + j] * scale[2] + base[2 * s + lane * s + j];
      top = fmax(top, static_cast<double>(s_row[j]));
    }
    for (int j = 0; j < s; ++j) sum += exp(s_row[j] - top);
    for (int j = 0; j < s; ++j) s_row[j] = static_cast<float>(exp(s_row[j] - top) / sum) + spec.eps;
  }
  // Divides a row (step s, stride 1) or a column (step 1, stride s) by its sum.
  auto divide = [&](int step, int stride) {
    __syncwarp();
    if (!has_row) return;
    float sum = spec.eps;
    for (int j = 0; j < s; ++j) sum += s_comb[lane * step + j * stride];
    for (int j = 0; j < s; ++j) s_comb[lane * step + j * stride] /= sum;
  };
  divide(1, s);
  for (int64_t i = 1; i < spec.sinkhorn_iterations; ++i) {
    divide(s, 1);
    divide(1, s);
  }
  __syncwarp();
  for (int i = lane; i < s * s; i += kWarp) comb[i] = s_comb[i];
}

__global__ void collect_kernel(HyperSpec spec, Rows<const float> streams, Rows<const float> mix,
                               Rows<float> out) {
  const int64_t t = this_row(), d = this_column();
  if (d >= out.cols) return;
  const float* pre = mix.data + t * mix.stride;
  const float* stream = streams.data + t * streams.stride + d;
  double sum = 0;
  for (int64_t i = 0; i < spec.streams; ++i) sum += static_cast<double>(pre[i]) * stream[i * out.cols];
  out.data[t * out.stride + d] = static_cast<float>(sum);
}

__global__ void distribute_kernel(HyperSpec spec, Rows<const float> y, Rows<const float> mix,
                                  Rows<float> streams) {
  const int64_t t = this_row(), d = this_column();
  if (d >= y.cols) return;
  const auto s = static_cast<int>(spec.streams);
  const float* post = mix.data + t * mix.stride + s;
  const float* comb = post + s;
  float* stream = streams.data + t * streams.stride + d;
  float before[kMost];
#pragma unroll
  for (int j = 0; j < kMost; ++j) before[j] = j < s ? stream[j * y.cols] : 0.0f;
  const float output = y.data[t * y.stride + d];
  for (int i = 0; i < s; ++i) {
    double sum = static_cast<double>(post[i]) * output;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j < s) sum += static_cast<double>(comb[j * s + i]) * before[j];
    }
    stream[i * y.cols] = static_cast<float>(sum);
  }
}

__global__ void mean_kernel(HyperSpec spec, Rows<const float> streams, Rows<float> out) {
  const int64_t t = this_row(), d = this_column();
  if (d >= out.cols) return;
  const float* stream = streams.data + t * streams.stride + d;
  double sum = 0;
  for (int64_t i = 0; i < spec.streams; ++i) sum += stream[i * out.cols];
  out.data[t * out.stride + d] = static_cast<float>(sum / static_cast<double>(spec.streams));
}

}  // namespace

void hyper_weights(cudaStream_t stream, const HyperSpec& spec, const float* base, const float* scale,
                   Rows<float> mix) {
  NIBBLE_CHECK(spec.streams <= kMaxStreams);
  if (mix.rows == 0) return;
  weights_kernel<<<static_cast<unsigned>(mix.rows), kWarp, 0, stream>>>(spec, base, scale, mix);
  check_launch("hyper_weights", mix.rows, spec.streams);
}

void hyper_collect(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams,
                   Rows<const float> mix, Rows<float> out) {
  if (out.rows == 0) return;
  collect_kernel<<<element_grid(out.rows, out.cols), kElementThreads, 0, stream>>>(spec, streams, mix, out);
  check_launch("hyper_collect", out.rows, spec.streams, out.cols);
}

void hyper_distribute(cudaStream_t stream, const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                      Rows<float> streams) {
  NIBBLE_CHECK(spec.streams <= kMaxStreams);
  if (y.rows == 0) return;
  distribute_kernel<<<element_grid(y.rows, y.cols), kElementThreads, 0, stream>>>(spec, y, mix, streams);
  check_launch("hyper_distribute", y.rows, spec.streams, y.cols);
}

void hyper_mean(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams, Rows<float> out) {
  if (out.rows == 0) return;
  mean_kernel<<<element_grid(out.rows, out.cols), kElementThreads, 0, stream>>>(spec, streams, out);
  check_launch("hyper_mean", out.rows, spec.streams, out.cols);
}

}  // namespace nibble::cuda
