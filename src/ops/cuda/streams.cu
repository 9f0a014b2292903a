// Residual streams (hyper-connections). Sums of S terms are taken in float64, as on the host: the kernels
// wait for memory.
#include <algorithm>

#include "base/numbers.h"
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr auto kMost = static_cast<int>(kMaxStreams);

// A block a row of mix, a thread an element of comb [S, S] (the first 2S also those of pre and post).
__global__ void weights_kernel(HyperSpec spec, const float* base, const float* scale, Rows<float> mix) {
  __shared__ double s_exp[kMost * kMost];
  __shared__ float s_comb[2][kMost * kMost];
  after_kernel_before();
  const auto s = static_cast<int>(spec.streams), id = static_cast<int>(threadIdx.x);
  const int row = id / s * s, column = id % s;
  const bool is_element = id < s * s;
  float* pre = mix.data + int64_t{blockIdx.x} * mix.stride;
  float* comb = pre + 2 * s;
  float* s_first = s_comb[0];
  if (is_element) s_first[id] = comb[id] * scale[2] + base[2 * s + id];
  if (id < s) {
    pre[id] = sigmoid(pre[id] * scale[0] + base[id]) + spec.eps;
  } else if (id < 2 * s) {
    pre[id] = 2 * sigmoid(pre[id] * scale[1] + base[id]);
  }
  __syncthreads();
  if (is_element) {
    float top = -INFINITY;
    for (int j = 0; j < s; ++j) top = fmaxf(top, s_first[row + j]);
    s_exp[id] = exp(static_cast<double>(s_first[id]) - top);
  }
  __syncthreads();
  float value = 0;
  if (is_element) {
    double sum = 0;
    for (int j = 0; j < s; ++j) sum += s_exp[row + j];
    value = s_first[id] = static_cast<float>(s_exp[id] / sum) + spec.eps;
  }
  __syncthreads();
  // Divides each element by the sum of its row (from `row`, step 1) or its column (from `column`, step s).
  int now = 0;
  auto divide = [&](int from, int step) {
    if (is_element) {
      float sum = spec.eps;
#pragma unroll 4
      for (int j = 0; j < s; ++j) sum += s_comb[now][from + j * step];
      s_comb[1 - now][id] = value /= sum;
    }
    now = 1 - now;
    __syncthreads();
  };
  divide(column, s);
  for (int64_t i = 1; i < spec.sinkhorn_iterations; ++i) {
    divide(row, 1);
    divide(column, s);
  }
  if (is_element) comb[id] = value;
}

__global__ void collect_kernel(HyperSpec spec, Rows<const float> streams, Rows<const float> mix,
                               Rows<float> out) {
  after_kernel_before();
  const int64_t t = this_row(), d = this_column();
  if (d >= out.cols) return;
  const float* pre = mix.data + t * mix.stride;
  const float* stream = streams.data + t * streams.stride + d;
  double sum = 0;
  for (int64_t i = 0; i < spec.streams; ++i) sum += static_cast<double>(pre[i]) * stream[i * out.cols];
  out.data[t * out.stride + d] = static_cast<float>(sum);
}

// kMost: no more streams than that.
template <int kMost>
__global__ void distribute_kernel(HyperSpec spec, Rows<const float> y, Rows<const float> mix,
                                  Rows<float> streams) {
  after_kernel_before();
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
  after_kernel_before();
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
  const int64_t elements = std::max(spec.streams, int64_t{2}) * spec.streams;
  launch_early(weights_kernel, static_cast<unsigned>(mix.rows),
               static_cast<unsigned>(round_up(elements, kWarp)), 0, stream, spec, base, scale, mix);
  check_launch("hyper_weights", mix.rows, spec.streams);
}

void hyper_collect(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams,
                   Rows<const float> mix, Rows<float> out) {
  if (out.rows == 0) return;
  launch_early(collect_kernel, element_grid(out.rows, out.cols), kElementThreads, 0, stream, spec, streams,
               mix, out);
  check_launch("hyper_collect", out.rows, spec.streams, out.cols);
}

void hyper_distribute(cudaStream_t stream, const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                      Rows<float> streams) {
  NIBBLE_CHECK(spec.streams <= kMaxStreams);
  if (y.rows == 0) return;
  launch_early(spec.streams <= 4 ? distribute_kernel<4> : distribute_kernel<kMost>,
               element_grid(y.rows, y.cols), kElementThreads, 0, stream, spec, y, mix, streams);
  check_launch("hyper_distribute", y.rows, spec.streams, y.cols);
}

void hyper_mean(cudaStream_t stream, const HyperSpec& spec, Rows<const float> streams, Rows<float> out) {
  if (out.rows == 0) return;
  launch_early(mean_kernel, element_grid(out.rows, out.cols), kElementThreads, 0, stream, spec, streams, out);
  check_launch("hyper_mean", out.rows, spec.streams, out.cols);
}

}  // namespace nibble::cuda
