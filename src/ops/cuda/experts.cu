// The routed experts of a layer around their products (linear.cu): the order of the rows before, the weighted
// sum after.
#include "ops/cuda/common.cuh"
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
      g.token[row * g.stride] = static_cast<int32_t>(i / ids.cols);
      g.row_of[i * g.stride] = row;
    });
  }
}

__global__ void combine_kernel(Rows<const float> weights, Rows<const float> down, Grouping g,
                               Rows<float> out) {
  const int64_t t = this_row(), d = this_column();
  if (d >= out.cols) return;
  float sum = 0;
  for (int64_t a = 0; a < weights.cols; ++a) {
    const int64_t row = g.row_of[(t * weights.cols + a) * g.stride];
    sum += weights.data[t * weights.stride + a] * down.data[row * down.stride + d];
  }
  out.data[t * out.stride + d] = sum;
}

}  // namespace

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
