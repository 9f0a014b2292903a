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

// Takes the best of some keys out of them, one after the other, equal ones by the lower index. By a warp.
class Best {
 public:
  __device__ Best(uint32_t* s_keys, int64_t count) : s_keys_(s_keys), count_(count) { look(); }

  // Its index, in every lane. REQUIRES a key that is not 0.
  __device__ uint32_t take() {
    const uint32_t top = __reduce_max_sync(kAllLanes, key_);
    const uint32_t index = __reduce_min_sync(kAllLanes, key_ == top ? index_ : ~0u);
    if (index_ == index) {
      s_keys_[index] = 0;
      look();
    }
    return index;
  }

 private:
  // The best of this lane's keys.
  __device__ void look() {
    key_ = 0, index_ = ~0u;
    for (uint32_t i = threadIdx.x % kWarp; i < count_; i += kWarp) {
      if (s_keys_[i] > key_) key_ = s_keys_[i], index_ = i;
    }
  }

  uint32_t* s_keys_;
  int64_t count_;
  uint32_t key_, index_;
};

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    route_kernel(Rows<const float> logits, const float* bias, RouterSpec spec, Rows<int32_t> ids,
                 Rows<float> weights) {
  extern __shared__ uint32_t s_keys[];  // [E], then [n_group]
  __shared__ float s_warps[kThreads / kWarp];
  after_kernel_before();
  const int64_t t = blockIdx.x, experts = logits.cols, chosen = ids.cols;
  const unsigned thread = threadIdx.x;
  Scores scores{spec, logits.data + t * logits.stride};
  if (spec.score == RouterScore::kSoftmaxAll) {
    float top = -INFINITY, sum = 0;
    for (int64_t e = thread; e < experts; e += kThreads) top = fmaxf(top, scores.logit(e));
    scores.top = block_max(top, s_warps);
    for (int64_t e = thread; e < experts; e += kThreads) sum += exp_exactly(scores.logit(e) - scores.top);
    scores.sum = block_sum(sum, s_warps);
  }
  auto key_of = [&](int64_t e) { return scores.score(e) + (bias != nullptr ? bias[e] : 0.0f); };
  for (int64_t e = thread; e < experts; e += kThreads) s_keys[e] = ordered(key_of(e));

  if (spec.topk_group < spec.n_group) {
    uint32_t* s_groups = s_keys + experts;
    const int64_t size = experts / spec.n_group;
    for (int64_t g = thread; g < spec.n_group; g += kThreads) {
      float best = -INFINITY, second = -INFINITY;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        float key = key_of(e);
        if (isnan(key)) key = -INFINITY;
        second = fmaxf(second, fminf(best, key));
        best = fmaxf(best, key);
      }
      s_groups[g] = ordered(size > 1 ? best + second : best);
    }
    __syncthreads();
    // A group that is taken has key 0: those that keep one are out, with all their experts.
    if (thread < kWarp) {
      Best groups(s_groups, spec.n_group);
      for (int64_t i = 0; i < spec.topk_group; ++i) groups.take();
    }
    __syncthreads();
    for (int64_t e = thread; e < experts; e += kThreads) {
      if (s_groups[e / size] != 0) s_keys[e] = 0;
    }
  }
  __syncthreads();
  if (thread >= kWarp) return;

  int32_t* row_ids = ids.data + t * ids.stride;
  float* row_weights = weights.data + t * weights.stride;
  Best best(s_keys, experts);
  // Lane a has the ranks a, a + 32 ...
  for (int64_t a = 0; a < chosen; ++a) {
    const uint32_t e = best.take();
    if (thread == a % kWarp) row_ids[a] = static_cast<int32_t>(e);
  }
  for (int64_t a = thread; a < chosen; a += kWarp) row_weights[a] = scores.score(row_ids[a]);
  float divisor = 1;
  if (spec.score == RouterScore::kSoftmaxChosen) {
    float top = -INFINITY;
    for (int64_t a = thread; a < chosen; a += kWarp) top = fmaxf(top, row_weights[a]);
    top = warp_max(top);
    for (int64_t a = thread; a < chosen; a += kWarp) row_weights[a] = exp_exactly(row_weights[a] - top);
  }
  if (spec.score == RouterScore::kSoftmaxChosen || spec.renormalize) {
    float sum = 0;
    for (int64_t a = thread; a < chosen; a += kWarp) sum += row_weights[a];
    sum = warp_sum(sum);
    divisor = spec.score == RouterScore::kSoftmaxChosen ? sum : sum + spec.renormalize_epsilon;
  }
  for (int64_t a = thread; a < chosen; a += kWarp) row_weights[a] = row_weights[a] / divisor * spec.scale;
}

}  // namespace

void route(cudaStream_t stream, const RouteArgs& args) {
  if (args.ids.rows == 0) return;
  const int64_t experts = args.logits.cols;
  const auto bytes = static_cast<int>((experts + args.spec.n_group) * static_cast<int64_t>(sizeof(uint32_t)));
  constexpr int kBytesWithoutAsking = 48 << 10;
  if (bytes > kBytesWithoutAsking)
    check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "route");
  launch_early(route_kernel, static_cast<unsigned>(args.ids.rows), kThreads, static_cast<size_t>(bytes),
               stream, args.logits, args.bias_E, args.spec, args.ids, args.weights);
  check_launch("route", args.ids.rows, experts, args.ids.cols);
}

}  // namespace nibble::cuda
