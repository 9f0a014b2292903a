// Routing: a warp a row, in the order of decisions of routing.cc. Keys lie in shared memory as numbers of the
// same order; 0 is a key that cannot be chosen (any more).
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

// The largest (key, lowest index) of the warp's bests, in every lane.
__device__ uint64_t warp_best(uint64_t best) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, best, distance);
    best = other > best ? other : best;
  }
  return best;
}
// Takes the best of `count` keys out of them, equal ones by the lower index; all lanes get its index.
__device__ int64_t take_best(uint32_t* s_keys, int64_t count, unsigned lane) {
  uint64_t best = 0;
  for (int64_t i = lane; i < count; i += kWarp) {
    const uint64_t candidate =
        static_cast<uint64_t>(s_keys[i]) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(i));
    if (candidate > best) best = candidate;
  }
  const int64_t index = 0xFFFFFFFFu - static_cast<uint32_t>(warp_best(best));
  __syncwarp();
  if (lane == 0) s_keys[index] = 0;
  __syncwarp();
  return index;
}

__global__ void __launch_bounds__(kWarp)
    route_kernel(Rows<const float> logits, const float* bias, RouterSpec spec, Rows<int32_t> ids,
                 Rows<float> weights) {
  extern __shared__ uint32_t s_keys[];  // [E], then [n_group]
  after_kernel_before();
  const int64_t t = blockIdx.x, experts = logits.cols, chosen = ids.cols;
  const unsigned lane = threadIdx.x;
  Scores scores{spec, logits.data + t * logits.stride};
  if (spec.score == RouterScore::kSoftmaxAll) {
    scores.top = -INFINITY;
    for (int64_t e = lane; e < experts; e += kWarp) scores.top = fmaxf(scores.top, scores.logit(e));
    scores.top = warp_max(scores.top);
    float sum = 0;
    for (int64_t e = lane; e < experts; e += kWarp) sum += exp_exactly(scores.logit(e) - scores.top);
    scores.sum = warp_sum(sum);
  }
  auto key_of = [&](int64_t e) { return scores.score(e) + (bias != nullptr ? bias[e] : 0.0f); };
  for (int64_t e = lane; e < experts; e += kWarp) s_keys[e] = ordered(key_of(e));

  if (spec.topk_group < spec.n_group) {
    uint32_t* s_groups = s_keys + experts;
    const int64_t size = experts / spec.n_group;
    for (int64_t g = lane; g < spec.n_group; g += kWarp) {
      float best = -INFINITY, second = -INFINITY;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        float key = key_of(e);
        if (isnan(key)) key = -INFINITY;
        second = fmaxf(second, fminf(best, key));
        best = fmaxf(best, key);
      }
      s_groups[g] = ordered(size > 1 ? best + second : best);
    }
    __syncwarp();
    // A group that is taken has key 0: those that keep one are out, with all their experts.
    for (int64_t i = 0; i < spec.topk_group; ++i) take_best(s_groups, spec.n_group, lane);
    for (int64_t e = lane; e < experts; e += kWarp) {
      if (s_groups[e / size] != 0) s_keys[e] = 0;
    }
  }
  __syncwarp();

  int32_t* row_ids = ids.data + t * ids.stride;
  float* row_weights = weights.data + t * weights.stride;
  for (int64_t a = 0; a < chosen; ++a) {
    const int64_t e = take_best(s_keys, experts, lane);
    if (lane == 0) {
      row_ids[a] = static_cast<int32_t>(e);
      row_weights[a] = scores.score(e);
    }
  }
  __syncwarp();
  float divisor = 1;
  if (spec.score == RouterScore::kSoftmaxChosen) {
    float top = -INFINITY;
    for (int64_t a = lane; a < chosen; a += kWarp) top = fmaxf(top, row_weights[a]);
    top = warp_max(top);
    for (int64_t a = lane; a < chosen; a += kWarp) row_weights[a] = exp_exactly(row_weights[a] - top);
  }
  if (spec.score == RouterScore::kSoftmaxChosen || spec.renormalize) {
    float sum = 0;
    for (int64_t a = lane; a < chosen; a += kWarp) sum += row_weights[a];
    sum = warp_sum(sum);
    divisor = spec.score == RouterScore::kSoftmaxChosen ? sum : sum + spec.renormalize_epsilon;
  }
  for (int64_t a = lane; a < chosen; a += kWarp) row_weights[a] = row_weights[a] / divisor * spec.scale;
}

}  // namespace

void route(cudaStream_t stream, const RouteArgs& args) {
  if (args.ids.rows == 0) return;
  const int64_t experts = args.logits.cols;
  const auto bytes = static_cast<int>((experts + args.spec.n_group) * static_cast<int64_t>(sizeof(uint32_t)));
  constexpr int kBytesWithoutAsking = 48 << 10;
  if (bytes > kBytesWithoutAsking)
    check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "route");
  launch_early(route_kernel, static_cast<unsigned>(args.ids.rows), kWarp, static_cast<size_t>(bytes), stream,
               args.logits, args.bias_E, args.spec, args.ids, args.weights);
  check_launch("route", args.ids.rows, experts, args.ids.cols);
}

}  // namespace nibble::cuda
