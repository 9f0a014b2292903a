// The routed experts of a layer around their products (linear.cu): the order of the rows before, the weighted
// sum after.
#include "ops/cuda/common.cuh"
#include "ops/cuda/decode.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;

// The sum of the values of the threads before this one, and of all.
__device__ int sum_before(int value, int* s_warps, int& total) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int upto = value;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, distance);
    if (lane >= static_cast<unsigned>(distance)) upto += other;
  }
  __syncthreads();  // s_warps may still be read by the call before
  if (lane == kWarp - 1) s_warps[warp] = upto;
  __syncthreads();
  int before = upto - value;
  total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < warp) before += s_warps[w];
    total += s_warps[w];
  }
  return before;
}

// visit(i, how many before it in its expert) for every (token, rank) i that chose expert e, by the warp.
template <class Visit>
__device__ int for_rows_of(Rows<const int32_t> ids, int64_t e, Visit visit) {
  const unsigned lane = threadIdx.x % kWarp;
  const int64_t routed = ids.rows * ids.cols;
  int count = 0;
  for (int64_t first = 0; first < routed; first += kWarp) {
    const int64_t i = first + lane;
    const bool mine = i < routed && ids.data[i / ids.cols * ids.stride + i % ids.cols] == e;
    const unsigned votes = __ballot_sync(kAllLanes, mine);
    if (mine) visit(i, count + __popc(votes & ((1u << lane) - 1)));
    count += __popc(votes);
  }
  return count;
}

// One block: a warp counts an expert's rows, a scan gives each expert its place, a warp puts its rows there.
__global__ void __launch_bounds__(kThreads)
    group_kernel(Rows<const int32_t> ids, int64_t experts, Grouping g) {
  __shared__ int s_warps[kWarps];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t e = warp; e < experts; e += kWarps) {
    const int count = for_rows_of(ids, e, [](int64_t, int) {});
    if (lane == 0) g.begin[e] = count;
  }
  __syncthreads();
  // A thread has some neighbouring experts.
  const int64_t each = (experts + kThreads - 1) / kThreads, mine = threadIdx.x * each;
  const int64_t end = mine + each < experts ? mine + each : experts;
  int rows = 0, used = 0;
  for (int64_t e = mine; e < end; ++e) rows += g.begin[e], used += g.begin[e] > 0 ? 1 : 0;
  int all_rows = 0, all_used = 0;
  rows = sum_before(rows, s_warps, all_rows);
  used = sum_before(used, s_warps, all_used);
  for (int64_t e = mine; e < end; ++e) {
    const int count = g.begin[e];
    g.begin[e] = rows;
    if (count > 0) g.active[used++] = static_cast<int32_t>(e);
    rows += count;
  }
  const int64_t routed = ids.rows * ids.cols, places = experts < routed ? experts : routed;
  for (int64_t i = all_used + static_cast<int64_t>(threadIdx.x); i < places; i += kThreads) g.active[i] = -1;
  if (threadIdx.x == 0) g.begin[experts] = all_rows;
  __syncthreads();
  for (int64_t e = warp; e < experts; e += kWarps) {
    const int32_t first = g.begin[e];
    if (g.begin[e + 1] == first) continue;
    for_rows_of(ids, e, [&](int64_t i, int before) {
      const int32_t row = first + before;
      g.token[row] = static_cast<int32_t>(i / ids.cols);
      g.expert[row] = static_cast<int32_t>(e);
      g.row_of[i] = row;
    });
  }
}

__global__ void combine_kernel(Rows<const float> weights, Rows<const float> down, Grouping g,
                               Rows<float> out) {
  const int64_t t = this_row(), d = this_column();
  if (d >= out.cols) return;
  float sum = 0;
  for (int64_t a = 0; a < weights.cols; ++a) {
    const int64_t row = g.row_of[t * weights.cols + a];
    sum += weights.data[t * weights.stride + a] * down.data[row * down.stride + d];
  }
  out.data[t * out.stride + d] = sum;
}

// The codes of quant/float_codes.h from float32: nearest, ties to the even code, saturating. Not for NaN.
__device__ uint32_t to_e4m3(float value) {  // of values >= 0
  if (value >= 464.0f) return 0x7E;         // beyond the last tie
  if (value < 0x1p-6f) return static_cast<uint32_t>(rintf(value * 0x1p9f));
  uint32_t bits = __float_as_uint(value);
  bits += 0x7FFFFu + (bits >> 20 & 1u);
  const uint32_t code = (bits >> 20) - (120u << 3);
  return code > 0x7E ? 0x7E : code;
}
__device__ uint32_t to_e2m1(float value) {
  const uint32_t bits = __float_as_uint(value);
  const float a = fabsf(value);
  const int code =
      !(a <= 0.25f) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) + !(a < 3.5f) + !(a <= 5.0f);
  return static_cast<uint32_t>(code) | (bits >> 28 & 8u);
}

constexpr int kRoundThreads = 128, kGroup = 16;  // columns that share a block scale

// nvfp4::choose_row_scale and nvfp4::round_row, a block a row and a thread a block of columns.
__global__ void __launch_bounds__(kRoundThreads)
    round_kernel(ActScale scale, const DeviceMatrix* experts, const int32_t* expert, Rows<const float> x,
                 const int32_t* x_row, Rows<float> out, float* out_scale) {
  __shared__ float s_warps[kWarp];
  const int64_t row = blockIdx.x;
  const float* in = x.data + (x_row != nullptr ? x_row[row] : row) * x.stride;
  const float nan = __int_as_float(0x7FC00000);
  float g = scale == ActScale::kStatic ? experts[expert[row]].input_scale : 1.0f;
  if (scale == ActScale::kRow || !(g > 0)) {
    float amax = 0;
    bool finite = true;
    for (int64_t i = threadIdx.x; i < x.cols; i += kRoundThreads) {
      finite = finite && isfinite(in[i]);
      amax = fmaxf(amax, fabsf(in[i]));
    }
    amax = block_max(amax, s_warps);
    g = __syncthreads_or(finite ? 0 : 1) != 0 ? nan : amax / (6.0f * 448.0f);
  }
  if (threadIdx.x == 0) out_scale[row] = g;
  for (int64_t first = int64_t{threadIdx.x} * kGroup; first < x.cols; first += kRoundThreads * kGroup) {
    float values[kGroup], amax = 0;
    bool finite = !isnan(g);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      values[i] = in[first + i];
      finite = finite && isfinite(values[i]);
      amax = fmaxf(amax, fabsf(values[i]));
    }
    // The order of the divisions is that of nvfp4::quantize_row.
    const float block = g > 0 && finite ? e4m3_value(to_e4m3(amax / 6.0f / g)) : 0.0f, step = block * g;
    float* to = out.data + row * out.stride + first;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      to[i] = !finite ? nan : e2m1_value(step > 0 ? to_e2m1(values[i] / step) : 0) * block;
  }
}

}  // namespace

void round_rows(cudaStream_t stream, ActScale scale, const DeviceMatrix* experts, const int32_t* expert,
                Rows<const float> x, const int32_t* x_row, Rows<float> out, float* out_scale) {
  if (out.rows == 0) return;
  round_kernel<<<static_cast<unsigned>(out.rows), kRoundThreads, 0, stream>>>(scale, experts, expert, x,
                                                                              x_row, out, out_scale);
  check_launch("expert_ffn, rows in NVFP4", out.rows, out.cols);
}

void group_by_expert(cudaStream_t stream, Rows<const int32_t> ids, int64_t experts,
                     const Grouping& grouping) {
  if (ids.rows == 0) return;
  group_kernel<<<1, kThreads, 0, stream>>>(ids, experts, grouping);
  check_launch("expert_ffn, grouping", ids.rows, experts, ids.cols);
}

void combine(cudaStream_t stream, Rows<const float> weights, Rows<const float> down, const Grouping& grouping,
             Rows<float> out) {
  if (out.rows == 0) return;
  combine_kernel<<<element_grid(out.rows, out.cols), kElementThreads, 0, stream>>>(weights, down, grouping,
                                                                                   out);
  check_launch("expert_ffn, combine", out.rows, out.cols);
}

}  // namespace nibble::cuda
