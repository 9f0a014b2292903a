// Operations with a state: causal convolution and delta attention. Rows of one sequence are taken in their
// order by the block of the sequence's first row in the step; the blocks of its other rows do nothing. So no
// grid depends on what the rows are.
#include "base/numbers.h"
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;

// Whether a row before row t belongs to the same sequence; the same in all threads of the block.
__device__ bool follows_another(const RowsOfStep& rows, int64_t t) {
  bool found = false;
  for (int64_t i = threadIdx.x; i < t; i += blockDim.x) found = found || rows.slots_T[i] == rows.slots_T[t];
  return __syncthreads_or(found ? 1 : 0) != 0;
}

__global__ void __launch_bounds__(kThreads) causal_conv_kernel(CausalConvArgs p) {
  after_kernel_before();
  const int64_t first = blockIdx.x;
  if (follows_another(p.rows, first)) return;
  const int64_t c = int64_t{blockIdx.y} * kThreads + threadIdx.x, channels = p.x.cols, kept = p.taps - 1;
  if (c >= channels) return;
  const int32_t slot = p.rows.slots_T[first];
  float* state = p.state + slot * kept * channels + c;
  const float* weight = p.weight + c * p.taps;
  for (int64_t t = first; t < p.rows.count; ++t) {
    if (p.rows.slots_T[t] != slot) continue;
    const float input = p.x.data[t * p.x.stride + c];  // out may be x
    float sum = 0;
    for (int64_t j = 0; j < kept; ++j) {
      const float past = state[j * channels];
      sum = fmaf(weight[j], past, sum);
      if (j > 0) state[(j - 1) * channels] = past;
    }
    state[(kept - 1) * channels] = input;
    sum = fmaf(weight[kept], input, sum);
    p.out.data[t * p.out.stride + c] = sum * sigmoid(sum);
  }
}

struct Kda {
  Rows<const float> q, k, v, decay, beta;
  const float* dt_bias = nullptr;
  const float* a_log = nullptr;
  bool has_bound = false;
  float bound = 0;
  float* state = nullptr;
  RowsOfStep rows;
  Rows<float> out;
  int64_t dim = 0;
};

constexpr int kKdaWarps = kThreads / kWarp;

// Column j of the state is a lane's; its rows i are dealt out to the warps, i % kKdaWarps. A row's products
// with k and q are added up within a warp in the order of i, then over the warps. kMostDim: of a head; a lane
// holds its part of a column meanwhile.
template <int kMostDim>
__global__ void __launch_bounds__(kThreads) kda_kernel(Kda p) {
  constexpr int kHeld = kMostDim / kKdaWarps;
  __shared__ float s_q[kMaxHeadDim], s_k[kMaxHeadDim], s_keep[kMaxHeadDim];
  __shared__ float s_delta[kKdaWarps][kWarp], s_out[kKdaWarps][kWarp], s_warps[kWarp];
  after_kernel_before();
  const int64_t first = blockIdx.x, h = blockIdx.y, dim = p.dim;
  if (follows_another(p.rows, first)) return;
  const int32_t slot = p.rows.slots_T[first];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t j = int64_t{blockIdx.z} * kWarp + lane;
  const bool has_column = j < dim;
  float* state = p.state + (slot * p.beta.cols + h) * dim * dim + j;
  const float rate = exp_exactly(p.a_log[h]), q_scale = 1.0f / sqrtf(static_cast<float>(dim));
  constexpr float kEps = 1e-6f;

  for (int64_t t = first; t < p.rows.count; ++t) {
    if (p.rows.slots_T[t] != slot) continue;
    const float* q = p.q.data + t * p.q.stride + h * dim;
    const float* k = p.k.data + t * p.k.stride + h * dim;
    const float* decay = p.decay.data + t * p.decay.stride + h * dim;
    float q_square = 0, k_square = 0;
    for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
      q_square = fmaf(q[i], q[i], q_square);
      k_square = fmaf(k[i], k[i], k_square);
    }
    // The barriers of the sums also end the row before: nobody reads its s_q, s_k, s_keep or s_out any more.
    const float q_factor = 1.0f / sqrtf(block_sum(q_square, s_warps) + kEps) * q_scale;
    const float k_factor = 1.0f / sqrtf(block_sum(k_square, s_warps) + kEps);
    for (int64_t i = threadIdx.x; i < dim; i += kThreads) {
      s_q[i] = q[i] * q_factor;
      s_k[i] = k[i] * k_factor;
      const float u = decay[i] + p.dt_bias[h * dim + i];
      s_keep[i] = exp_exactly(p.has_bound ? p.bound * sigmoid(rate * u) : -rate * softplus(u));
    }
    __syncthreads();
    float part = 0, held[kHeld];
    if (has_column) {
#pragma unroll
      for (int n = 0; n < kHeld; ++n) {
        const int64_t i = n * kKdaWarps + warp;
        held[n] = i < dim ? state[i * dim] : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < kHeld; ++n) {
        const int64_t i = n * kKdaWarps + warp;
        if (i >= dim) break;
        held[n] *= s_keep[i];
        part = fmaf(held[n], s_k[i], part);
      }
    }
    s_delta[warp][lane] = part;
    __syncthreads();
    float known = 0;
    for (int w = 0; w < kKdaWarps; ++w) known += s_delta[w][lane];
    part = 0;
    if (has_column) {
      const float beta = sigmoid(p.beta.data[t * p.beta.stride + h]);
      const float delta = beta * (p.v.data[t * p.v.stride + h * dim + j] - known);
#pragma unroll
      for (int n = 0; n < kHeld; ++n) {
        const int64_t i = n * kKdaWarps + warp;
        if (i >= dim) break;
        const float next = fmaf(s_k[i], delta, held[n]);
        state[i * dim] = next;
        part = fmaf(next, s_q[i], part);
      }
    }
    s_out[warp][lane] = part;
    __syncthreads();
    if (warp == 0 && has_column) {
      float sum = 0;
      for (int w = 0; w < kKdaWarps; ++w) sum += s_out[w][lane];
      p.out.data[t * p.out.stride + h * dim + j] = sum;
    }
  }
}

}  // namespace

void causal_conv(cudaStream_t stream, const CausalConvArgs& args) {
  if (args.rows.count == 0) return;
  const dim3 grid(static_cast<unsigned>(args.rows.count),
                  static_cast<unsigned>(ceil_div(args.x.cols, kThreads)));
  launch_early(causal_conv_kernel, grid, kThreads, 0, stream, args);
  check_launch("causal_conv", args.rows.count, args.x.cols, args.taps);
}

void kda(cudaStream_t stream, const KdaArgs& args) {
  if (args.rows.count == 0) return;
  const int64_t heads = args.beta.cols, dim = args.q.cols / heads;
  NIBBLE_CHECK(dim <= kMaxHeadDim);
  const Kda p{.q = args.q,
              .k = args.k,
              .v = args.v,
              .decay = args.decay,
              .beta = args.beta,
              .dt_bias = args.dt_bias,
              .a_log = args.a_log,
              .has_bound = args.gate_lower_bound.has_value(),
              .bound = args.gate_lower_bound.value_or(0),
              .state = args.state,
              .rows = args.rows,
              .out = args.out,
              .dim = dim};
  const dim3 grid(static_cast<unsigned>(args.rows.count), static_cast<unsigned>(heads),
                  static_cast<unsigned>(ceil_div(dim, kWarp)));
  launch_early(dim <= 128 ? kda_kernel<128> : kda_kernel<kMaxHeadDim>, grid, kThreads, 0, stream, p);
  check_launch("kda", args.rows.count, heads, dim);
}

}  // namespace nibble::cuda
