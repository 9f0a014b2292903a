// Routing: a block a row, in the order of decisions of routing.cc. Keys lie in shared memory as numbers of
// the same order; 0 is a key that cannot be chosen (any more).
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"

namespace nibble::cuda {
namespace {

// One row's scores. Those of a softmax need its top and sum.
struct Scores {
  const RouterSpec& spec;
  const float* logits;
  float top = 0, sum = 1;

  __device__ float logit(int64_t e) const {
    float x = logits[e];
    if (spec.logit_softcap > 0) {
      const double softened = tanh(static_cast<double>(x / spec.logit_softcap));
      x = spec.logit_softcap * static_cast<float>(softened);
    }
    return x;
  }
  __device__ float score(int64_t e) const {
    const float x = logit(e);
    switch (spec.score) {
      case RouterScore::kSigmoid:
        return sigmoid(x);
      case RouterScore::kSqrtSoftplus:
        return sqrtf(softplus(x));
      case RouterScore::kSoftmaxAll:
        return exp_exactly(x - top) / sum;
      case RouterScore::kSoftmaxChosen:  // later, over the chosen
        return x;
    }
    return x;
  }
};

constexpr int kThreads = 256;

__host__ __device__ inline int of_fours(int64_t count) { return static_cast<int>((count + 3) / 4 * 4); }

// How many of `count` keys come before key i: the larger ones, and of equal ones those of lower index. The
// keys are aligned to 16 bytes and zero up to a multiple of four.
__device__ int rank_of(const uint32_t* s_keys, int count, int i) {
  const uint32_t key = s_keys[i];
  int rank = 0;
#pragma unroll 4
  for (int j = 0; j < count; j += 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(s_keys + j);
    rank += other.x > key || (other.x == key && j < i) ? 1 : 0;
    rank += other.y > key || (other.y == key && j + 1 < i) ? 1 : 0;
    rank += other.z > key || (other.z == key && j + 2 < i) ? 1 : 0;
    rank += other.w > key || (other.w == key && j + 3 < i) ? 1 : 0;
  }
  return rank;
}

// Every key counts those before it, so that nobody waits for a choice.
__global__ void __launch_bounds__(kThreads)
    route_kernel(Rows<const float> logits, const float* bias, RouterSpec spec, Rows<int32_t> ids,
                 Rows<float> weights) {
  extern __shared__ __align__(16) uint32_t s_keys[];  // [E'], then [n_group'], float [E], float [A]
  __shared__ float s_warps[kThreads / kWarp];
  after_kernel_before();
  const int64_t t = blockIdx.x;
  const int experts = static_cast<int>(logits.cols), chosen = static_cast<int>(ids.cols);
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = static_cast<int>(spec.n_group);
  uint32_t* s_groups = s_keys + of_fours(experts);
  float* s_scores = reinterpret_cast<float*>(s_groups + of_fours(groups));
  float* s_weights = s_scores + experts;
  Scores scores{spec, logits.data + t * logits.stride};
  if (spec.score == RouterScore::kSoftmaxAll) {
    float top = -INFINITY, sum = 0;
    for (int e = thread; e < experts; e += kThreads) top = fmaxf(top, scores.logit(e));
    scores.top = block_max(top, s_warps);
    for (int e = thread; e < experts; e += kThreads) sum += exp_exactly(scores.logit(e) - scores.top);
    scores.sum = block_sum(sum, s_warps);
  }
  auto key_of = [&](int e) { return s_scores[e] + (bias != nullptr ? bias[e] : 0.0f); };
  for (int e = thread; e < experts; e += kThreads) {
    s_scores[e] = scores.score(e);
    s_keys[e] = ordered(key_of(e));
  }
  if (thread < of_fours(experts) - experts) s_keys[experts + thread] = 0;
  __syncthreads();

  if (spec.topk_group < spec.n_group) {
    const int size = experts / groups;
    for (int g = thread; g < groups; g += kThreads) {
      float best = -INFINITY, second = -INFINITY;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        float key = key_of(e);
        if (isnan(key)) key = -INFINITY;
        second = fmaxf(second, fminf(best, key));
        best = fmaxf(best, key);
      }
      s_groups[g] = ordered(size > 1 ? best + second : best);
    }
    if (thread < of_fours(groups) - groups) s_groups[groups + thread] = 0;
    __syncthreads();
    for (int e = thread; e < experts; e += kThreads) {
      if (rank_of(s_groups, groups, e / size) >= spec.topk_group) s_keys[e] = 0;
    }
    __syncthreads();
  }

  int32_t* row_ids = ids.data + t * ids.stride;
  float* row_weights = weights.data + t * weights.stride;
  for (int e = thread; e < experts; e += kThreads) {
    const int rank = s_keys[e] != 0 ? rank_of(s_keys, experts, e) : chosen;
    if (rank >= chosen) continue;
    row_ids[rank] = e;
    s_weights[rank] = s_scores[e];
  }
  __syncthreads();
  if (thread >= kWarp) return;
  float divisor = 1;
  if (spec.score == RouterScore::kSoftmaxChosen) {
    float top = -INFINITY;
    for (int a = thread; a < chosen; a += kWarp) top = fmaxf(top, s_weights[a]);
    top = warp_max(top);
    for (int a = thread; a < chosen; a += kWarp) s_weights[a] = exp_exactly(s_weights[a] - top);
  }
  if (spec.score == RouterScore::kSoftmaxChosen || spec.renormalize) {
    float sum = 0;
    for (int a = thread; a < chosen; a += kWarp) sum += s_weights[a];
    sum = warp_sum(sum);
    divisor = spec.score == RouterScore::kSoftmaxChosen ? sum : sum + spec.renormalize_epsilon;
  }
  for (int a = thread; a < chosen; a += kWarp) row_weights[a] = s_weights[a] / divisor * spec.scale;
}

}  // namespace

void route(cudaStream_t stream, const RouteArgs& args) {
  if (args.ids.rows == 0) return;
  const int64_t experts = args.logits.cols;
  const auto bytes =
      static_cast<int>((of_fours(experts) + of_fours(args.spec.n_group) + experts + args.ids.cols) *
                       int64_t{sizeof(uint32_t)});
  constexpr int kBytesWithoutAsking = 48 << 10;
  if (bytes > kBytesWithoutAsking)
    check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "route");
  launch_early(route_kernel, static_cast<unsigned>(args.ids.rows), kThreads, static_cast<size_t>(bytes),
               stream, args.logits, args.bias_E, args.spec, args.ids, args.weights);
  check_launch("route", args.ids.rows, experts, args.ids.cols);
}

}  // namespace nibble::cuda
