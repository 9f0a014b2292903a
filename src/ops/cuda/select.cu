// What sparse attention looks at: scores of whole pools of tokens, and the best of them.
//
//   score_kernel   a warp a pool: its key, channel by channel, then the heads in their order
//   choose_kernel  a block a row: the keep-th largest score by its bytes, from the highest down (a count for
//                  each value of a byte); then the pools in their order, those above it and the first of
//                  those equal to it
// Scores lie in scratch as unsigned numbers of the same order. Rows that see no more pools than they keep
// have no scores.
#include <algorithm>

#include "base/numbers.h"
#include "ops/cuda/common.cuh"
#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/limits.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

struct IndexSelect {
  Rows<const float> q, weights;
  KvView kv;
  const float* ape = nullptr;
  int64_t pool = 1, keep = 0;
  RowsOfStep rows;
  float scale = 1;
  Rows<int32_t> positions;
  int32_t* counts = nullptr;
  uint32_t* scores = nullptr;  // [T, most_pools]
  int64_t most_pools = 0;
};

__global__ void __launch_bounds__(kThreads) score_kernel(IndexSelect p) {
  __shared__ float s_keys[kWarps][kMaxHeadDim];
  const int64_t t = blockIdx.x, dim = p.kv.head_dim, pools = (p.rows.positions_T[t] + int64_t{1}) / p.pool;
  if (pools <= p.keep) return;
  const int32_t slot = p.rows.slots_T[t];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float* s_key = s_keys[warp];
  for (int64_t pool = int64_t{blockIdx.y} * kWarps + warp; pool < pools;
       pool += int64_t{gridDim.y} * kWarps) {
    __syncwarp();  // all lanes are done with the key before
    for (int64_t c = lane; c < dim; c += kWarp) {
      auto place = [&](int64_t j) {
        return token_index(p.kv, slot, static_cast<int32_t>(pool * p.pool + j), 0) * dim + c;
      };
      float top = -INFINITY, sum = 0, key = 0;
      for (int64_t j = 0; j < p.pool; ++j) top = fmaxf(top, p.kv.values[place(j)] + p.ape[j * dim + c]);
      for (int64_t j = 0; j < p.pool; ++j) {
        const float weight = exp_exactly(p.kv.values[place(j)] + p.ape[j * dim + c] - top);
        sum += weight;
        key = fmaf(weight, p.kv.keys[place(j)], key);
      }
      s_key[c] = key / sum;
    }
    __syncwarp();
    float score = 0;
    for (int64_t h = 0; h < p.weights.cols; ++h) {
      const float* q = p.q.data + t * p.q.stride + h * dim;
      float dot = 0;
      for (int64_t c = lane; c < dim; c += kWarp) dot = fmaf(q[c], s_key[c], dot);
      dot = warp_sum(dot) * p.scale;
      score = fmaf(p.weights.data[t * p.weights.stride + h], dot < 0 ? 0.0f : dot, score);
    }
    if (lane == 0) p.scores[t * p.most_pools + pool] = ordered(score);
  }
}

// How many threads before this one have the flag, and in `total` how many have it at all.
__device__ int count_before(bool flag, int* s_counts, int& total) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned votes = __ballot_sync(kAllLanes, flag);
  __syncthreads();  // s_counts may still be read by the call before
  if (lane == 0) s_counts[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < warp) before += s_counts[w];
    total += s_counts[w];
  }
  return before;
}

__global__ void __launch_bounds__(kThreads) choose_kernel(IndexSelect p) {
  __shared__ int s_histogram[256], s_counts[kWarps];
  __shared__ uint32_t s_prefix;
  __shared__ int s_equal;
  const int64_t t = blockIdx.x, known = p.rows.positions_T[t] + int64_t{1}, pools = known / p.pool;
  int32_t* out = p.positions.data + t * p.positions.stride;
  const bool all = pools <= p.keep;
  const uint32_t* scores = p.scores + t * p.most_pools;
  uint32_t edge = 0;  // the keep-th largest score
  int equal = 0;      // how many of those equal to it stay
  if (!all) {
    equal = static_cast<int>(p.keep);
    for (int shift = 24; shift >= 0; shift -= 8) {
      s_histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int64_t pool = threadIdx.x; pool < pools; pool += kThreads) {
        const uint32_t score = scores[pool];
        if (shift == 24 || score >> (shift + 8) == edge) atomicAdd(&s_histogram[score >> shift & 255u], 1);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int byte = 255;
        while (byte > 0 && s_histogram[byte] < equal) equal -= s_histogram[byte--];
        s_prefix = edge << 8 | static_cast<uint32_t>(byte);
        s_equal = equal;
      }
      __syncthreads();
      edge = s_prefix;
      equal = s_equal;
      __syncthreads();
    }
  }
  int chosen = 0;
  for (int64_t first = 0; first < pools; first += kThreads) {
    const int64_t pool = first + threadIdx.x;
    const bool is_pool = pool < pools;
    bool take = is_pool;
    if (!all) {
      const uint32_t score = is_pool ? scores[pool] : 0;
      int total = 0;
      const bool is_equal = is_pool && score == edge;
      const int rank = count_before(is_equal, s_counts, total);
      take = is_pool && (score > edge || (is_equal && rank < equal));
      equal = equal > total ? equal - total : 0;
    }
    int total = 0;
    const int place = chosen + count_before(take, s_counts, total);
    if (take) {
      for (int64_t j = 0; j < p.pool; ++j) out[place * p.pool + j] = static_cast<int32_t>(pool * p.pool + j);
    }
    chosen += total;
  }
  // The tokens of the pool that is not complete.
  const int64_t rest = known - pools * p.pool;
  for (int64_t j = threadIdx.x; j < rest; j += kThreads)
    out[chosen * p.pool + j] = static_cast<int32_t>(pools * p.pool + j);
  if (threadIdx.x == 0) p.counts[t] = static_cast<int32_t>(chosen * p.pool + rest);
}

int64_t most_pools(const IndexSelectArgs& args) {
  return args.kv.table_pages * args.kv.page_tokens / args.pool;
}

}  // namespace

int64_t index_select_scratch(const IndexSelectArgs& args) { return args.rows.count * most_pools(args); }

void index_select(cudaStream_t stream, const IndexSelectArgs& args, uint32_t* scores) {
  if (args.rows.count == 0) return;
  NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim);
  const IndexSelect p{.q = args.q,
                      .weights = args.weights,
                      .kv = args.kv,
                      .ape = args.ape,
                      .pool = args.pool,
                      .keep = args.top_k / args.pool,
                      .rows = args.rows,
                      .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(args.kv.head_dim))),
                      .positions = args.out.positions,
                      .counts = args.out.counts,
                      .scores = scores,
                      .most_pools = most_pools(args)};
  constexpr int64_t kMostBlocksARow = 256;  // each goes on to further pools
  const int64_t blocks = std::clamp<int64_t>(ceil_div(p.most_pools, kWarps), 1, kMostBlocksARow);
  const auto rows = static_cast<unsigned>(args.rows.count);
  score_kernel<<<dim3(rows, static_cast<unsigned>(blocks)), kThreads, 0, stream>>>(p);
  choose_kernel<<<rows, kThreads, 0, stream>>>(p);
  check_launch("index_select", args.rows.count, p.keep, args.kv.head_dim);
}

}  // namespace nibble::cuda
