#include "ops/cpu/mixers.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/limits.h"

namespace nibble::cpu {
namespace {

// Where a position of the one key/value head lies, in tokens.
int64_t token_index(const KvView& kv, int32_t slot, int64_t position) {
  const int64_t page = kv.table[slot * kv.table_pages + position / kv.page_tokens % kv.table_pages];
  return page * kv.page_tokens + position % kv.page_tokens;
}

// Rows [first, first + count) of a step that belong to one sequence.
struct Run {
  int64_t first, count;
  int64_t pools;  // complete ones that its last row knows
};

// The rows that have more pools than they keep, in runs of at most `most` rows.
std::vector<Run> runs_that_choose(const IndexSelectArgs& args, int64_t keep, int64_t most) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < args.rows.count; ++t) {
    const int64_t pools = (args.rows.positions_T[t] + 1) / args.pool;
    if (pools <= keep) continue;
    if (!runs.empty()) {
      Run& run = runs.back();
      if (run.first + run.count == t && run.count < most &&
          args.rows.slots_T[run.first] == args.rows.slots_T[t]) {
        ++run.count;
        run.pools = std::max(run.pools, pools);
        continue;
      }
    }
    runs.push_back({t, 1, pools});
  }
  return runs;
}

// The `keep` best of `pools` scores, ascending; equal scores: the earlier.
void choose(float* scores, int64_t pools, int64_t keep, std::vector<int32_t>& order) {
  for (int64_t p = 0; p < pools; ++p) {
    if (std::isnan(scores[p])) scores[p] = -INFINITY;  // keeps the order an order
  }
  order.resize(static_cast<size_t>(pools));
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + keep, order.end(), [&](int32_t a, int32_t b) {
    return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
  });
  order.resize(static_cast<size_t>(keep));
  std::sort(order.begin(), order.end());
}

}  // namespace

void kda_rows(ThreadPool& pool, const Kernels& kernels, const KdaArgs& args) {
  const int64_t heads = args.beta.cols, dim = args.q.cols / heads;
  NIBBLE_CHECK(dim <= kMaxHeadDim);
  // A head's rows one after the other: each finds the state that the one before it left.
  for_each(pool, heads, args.rows.count * dim * dim / 4, [&](int64_t h) {
    for (int64_t t = 0; t < args.rows.count; ++t) {
      kernels.kda({.q = args.q.row(t) + h * dim,
                   .k = args.k.row(t) + h * dim,
                   .v = args.v.row(t) + h * dim,
                   .decay = args.decay.row(t) + h * dim,
                   .dt_bias = args.dt_bias + h * dim,
                   .beta = args.beta.row(t)[h],
                   .a_log = args.a_log[h],
                   .gate_lower_bound = args.gate_lower_bound ? &*args.gate_lower_bound : nullptr,
                   .dim = dim,
                   .state = args.state + (args.rows.slots_T[t] * heads + h) * dim * dim,
                   .out = args.out.row(t) + h * dim});
    }
  });
}

void causal_conv_rows(ThreadPool& pool, const Kernels& kernels, const CausalConvArgs& args) {
  constexpr int64_t kChannels = 256;  // of a task
  const int64_t channels = args.x.cols, taps = args.taps;
  for_each(pool, ceil_div(channels, kChannels), kChannels * taps * (1 + args.rows.count / 8), [&](int64_t i) {
    const int64_t first = i * kChannels, n = std::min(kChannels, channels - first);
    std::vector<float> weight(static_cast<size_t>(taps * n));  // [taps, n]
    for (int64_t c = 0; c < n; ++c) {
      for (int64_t j = 0; j < taps; ++j) {
        weight[static_cast<size_t>(j * n + c)] = args.weight[(first + c) * taps + j];
      }
    }
    for (int64_t t = 0; t < args.rows.count; ++t) {
      kernels.causal_conv({.x = args.x.row(t) + first,
                           .weight = weight.data(),
                           .taps = taps,
                           .n = n,
                           .state = args.state + args.rows.slots_T[t] * (taps - 1) * channels + first,
                           .state_stride = channels,
                           .out = args.out.row(t) + first});
    }
  });
}

void index_select_rows(ThreadPool& pool, const Kernels& kernels, const IndexSelectArgs& args,
                       Scratch& scratch) {
  constexpr int64_t kRows = 16;  // that share a computation of their pools' keys
  const KvView& kv = args.kv;
  const int64_t keep = args.top_k / args.pool, dim = kv.head_dim, heads = args.weights.cols;
  NIBBLE_CHECK(dim <= kMaxHeadDim);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  auto write = [&](int64_t t, int64_t pools, auto pool_at) {
    int32_t* out = args.out.positions.row(t);
    int32_t count = 0;
    for (int64_t p = 0; p < pools; ++p) {
      for (int64_t j = 0; j < args.pool; ++j) out[count++] = static_cast<int32_t>(pool_at(p) * args.pool + j);
    }
    const int64_t known = args.rows.positions_T[t] + 1;
    for (int64_t p = known / args.pool * args.pool; p < known; ++p) out[count++] = static_cast<int32_t>(p);
    args.out.counts[t] = count;
  };
  for (int64_t t = 0; t < args.rows.count; ++t) {
    const int64_t pools = (args.rows.positions_T[t] + 1) / args.pool;
    if (pools <= keep) write(t, pools, [](int64_t p) { return p; });
  }
  for (const Run& run : runs_that_choose(args, keep, kRows)) {
    float* scores = scratch.reserve(run.count * run.pools);
    const int64_t block_ns = kPoolsAtOnce * dim * (args.pool * 2 + run.count * heads / 32);
    for_each(pool, ceil_div(run.pools, kPoolsAtOnce), block_ns, [&](int64_t block) {
      const int64_t first = block * kPoolsAtOnce, count = std::min(kPoolsAtOnce, run.pools - first);
      std::vector<int64_t> tokens(static_cast<size_t>(count * args.pool));
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] =
            token_index(kv, args.rows.slots_T[run.first], first * args.pool + static_cast<int64_t>(i));
      }
      alignas(64) float keys[kPoolsAtOnce * kMaxHeadDim];
      kernels.pool_keys({.keys = kv.keys,
                         .gates = kv.values,
                         .ape = args.ape,
                         .tokens = tokens.data(),
                         .dim = dim,
                         .pool = args.pool,
                         .count = count,
                         .keys_out = keys});
      for (int64_t r = 0; r < run.count; ++r) {
        kernels.pool_scores(args.q.row(run.first + r), args.weights.row(run.first + r), heads, dim, scale,
                            keys, count, scores + r * run.pools + first);
      }
    });
    for_each(pool, run.count, run.pools * 10, [&](int64_t r) {
      const int64_t t = run.first + r;
      std::vector<int32_t> order;
      choose(scores + r * run.pools, (args.rows.positions_T[t] + 1) / args.pool, keep, order);
      write(t, keep, [&](int64_t p) { return order[static_cast<size_t>(p)]; });
    });
  }
}

}  // namespace nibble::cpu
