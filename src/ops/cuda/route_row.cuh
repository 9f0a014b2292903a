// Routing of a row by a block, in the order of decisions of routing.cc. Keys lie in shared memory as numbers
// of the same order; 0 is a key that cannot be chosen (any more).
#pragma once

#include "ops/cuda/common.cuh"

namespace nibble::cuda {

inline constexpr int kRouteThreads = 1024;

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

__host__ __device__ inline int of_fours(int64_t count) { return static_cast<int>((count + 3) / 4 * 4); }

// How many of `count` keys come before key i: the larger ones, and of equal ones those of lower index. The
// keys are aligned to 16 bytes and zero up to a multiple of four; the thread looks at every `step`-th four
// from `from`.
__device__ inline int rank_of(const uint32_t* s_keys, int count, int i, int from = 0, int step = 1) {
  const uint32_t key = s_keys[i];
  int rank = 0;
#pragma unroll 4
  for (int j = 4 * from; j < count; j += 4 * step) {
    const uint4 other = *reinterpret_cast<const uint4*>(s_keys + j);
    rank += other.x > key || (other.x == key && j < i) ? 1 : 0;
    rank += other.y > key || (other.y == key && j + 1 < i) ? 1 : 0;
    rank += other.z > key || (other.z == key && j + 2 < i) ? 1 : 0;
    rank += other.w > key || (other.w == key && j + 3 < i) ? 1 : 0;
  }
  return rank;
}

// From the scores of a row's chosen experts, best first, to their weights, by a warp: give(rank, weight).
// Leaves other numbers in s_scores.
template <class Give>
__device__ inline void weigh_chosen(const RouterSpec& spec, int chosen, float* s_scores, Give give) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float divisor = 1;
  if (spec.score == RouterScore::kSoftmaxChosen) {
    float top = -INFINITY;
    for (int a = lane; a < chosen; a += kWarp) top = fmaxf(top, s_scores[a]);
    top = warp_max(top);
    for (int a = lane; a < chosen; a += kWarp) s_scores[a] = exp_exactly(s_scores[a] - top);
  }
  if (spec.score == RouterScore::kSoftmaxChosen || spec.renormalize) {
    float sum = 0;
    for (int a = lane; a < chosen; a += kWarp) sum += s_scores[a];
    sum = warp_sum(sum);
    divisor = spec.score == RouterScore::kSoftmaxChosen ? sum : sum + spec.renormalize_epsilon;
  }
  for (int a = lane; a < chosen; a += kWarp) give(a, s_scores[a] / divisor * spec.scale);
}

// Bytes of shared memory that route_row takes.
inline int route_shared_bytes(const RouteArgs& args) {
  return static_cast<int>(
      (of_fours(args.logits.cols) + of_fours(args.spec.n_group) + args.logits.cols + args.ids.cols) *
      int64_t{sizeof(uint32_t)});
}

// Of the expert of this thread's number. It does not wait for the kernel before.
__device__ inline float own_bias(const RouteArgs& args) {
  const int64_t e = threadIdx.x;
  return args.bias_E != nullptr && e < args.logits.cols ? args.bias_E[e] : 0.0f;
}

// Row t, by a block of kRouteThreads. Every key counts those before it, so that nobody waits for a choice.
// bias: own_bias(); s_keys: route_shared_bytes, aligned to 16; s_warps: a place for each warp; chose(rank,
// expert) hears of each choice as soon as it is made.
template <class Chose>
__device__ inline void route_row(const RouteArgs& args, int64_t t, float bias, uint32_t* s_keys,
                                 float* s_warps, Chose chose) {
  constexpr int kThreads = kRouteThreads;
  const RouterSpec& spec = args.spec;
  const int experts = static_cast<int>(args.logits.cols), chosen = static_cast<int>(args.ids.cols);
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = static_cast<int>(spec.n_group);
  uint32_t* s_groups = s_keys + of_fours(experts);
  float* s_scores = reinterpret_cast<float*>(s_groups + of_fours(groups));
  float* s_weights = s_scores + experts;
  Scores scores{spec, args.logits.data + t * args.logits.stride};
  if (spec.score == RouterScore::kSoftmaxAll) {
    float top = -INFINITY, sum = 0;
    for (int e = thread; e < experts; e += kThreads) top = fmaxf(top, scores.logit(e));
    scores.top = block_max(top, s_warps);
    for (int e = thread; e < experts; e += kThreads) sum += exp_exactly(scores.logit(e) - scores.top);
    scores.sum = block_sum(sum, s_warps);
  }
  auto key_of = [&](int e) {
    return s_scores[e] + (e == thread ? bias : args.bias_E != nullptr ? args.bias_E[e] : 0.0f);
  };
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

  int32_t* row_ids = args.ids.data + t * args.ids.stride;
  float* row_weights = args.weights.data + t * args.weights.stride;
  constexpr int kOfKey = 4;  // threads that count for a key
  for (int first = 0; first < experts; first += kThreads / kOfKey) {
    const int e = first + thread / kOfKey;
    const bool is_key = e < experts && s_keys[e] != 0;
    int rank = is_key ? rank_of(s_keys, experts, e, thread % kOfKey, kOfKey) : 0;
    for (int distance = 1; distance < kOfKey; distance *= 2)
      rank += __shfl_xor_sync(kAllLanes, rank, distance);
    if (!is_key || thread % kOfKey != 0 || rank >= chosen) continue;
    chose(rank, e);
    row_ids[rank] = e;
    s_weights[rank] = s_scores[e];
  }
  __syncthreads();
  if (thread < kWarp)
    weigh_chosen(spec, chosen, s_weights, [&](int rank, float weight) { row_weights[rank] = weight; });
}

}  // namespace nibble::cuda
