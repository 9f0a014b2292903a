// Default bodies of sparse attention: plain loops over host memory, sums in float64.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/ops.h"

namespace nibble {
namespace {

// Index of the token at `position` among the pages of head g, in tokens.
int64_t token_index(const KvView& kv, int32_t slot, int64_t position, int64_t g) {
  int64_t page = kv.table[slot * kv.table_pages + (position / kv.page_tokens) % kv.table_pages];
  return (page * kv.kv_heads + g) * kv.page_tokens + position % kv.page_tokens;
}

// The pooled key of `pool` tokens from `first`.
void pool_key(const IndexSelectArgs& args, int32_t slot, int64_t first, std::vector<double>& out) {
  const int64_t dim = args.kv.head_dim;
  for (int64_t c = 0; c < dim; ++c) {
    double top = -INFINITY, sum = 0, key = 0;
    auto logit = [&](int64_t j) {
      const float gate = args.kv.values[token_index(args.kv, slot, first + j, 0) * dim + c];
      return static_cast<double>(gate + args.ape[j * dim + c]);
    };
    for (int64_t j = 0; j < args.pool; ++j) top = std::max(top, logit(j));
    for (int64_t j = 0; j < args.pool; ++j) {
      const double weight = std::exp(logit(j) - top);
      sum += weight;
      key += weight * args.kv.keys[token_index(args.kv, slot, first + j, 0) * dim + c];
    }
    out[static_cast<size_t>(c)] = key / sum;
  }
}

float pool_score(const IndexSelectArgs& args, int64_t t, const std::vector<double>& key) {
  const int64_t dim = args.kv.head_dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  double score = 0;
  for (int64_t h = 0; h < args.weights.cols; ++h) {
    const float* q = args.q.row(t) + h * dim;
    double dot = 0;
    for (int64_t c = 0; c < dim; ++c) dot += q[c] * key[static_cast<size_t>(c)];
    score += args.weights.row(t)[h] * std::max(dot * scale, 0.0);
  }
  return static_cast<float>(score);
}

}  // namespace

void Ops::do_index_select(const IndexSelectArgs& args) {
  const auto keep = static_cast<size_t>(args.top_k / args.pool);
  std::vector<double> key(static_cast<size_t>(args.kv.head_dim));
  std::vector<float> scores;
  std::vector<int64_t> order;
  for (int64_t t = 0; t < args.rows.count; ++t) {
    const int64_t known = args.rows.positions_T[t] + 1;
    const auto pools = static_cast<size_t>(known / args.pool);
    order.resize(pools);
    std::iota(order.begin(), order.end(), 0);
    if (pools > keep) {
      scores.resize(pools);
      for (size_t p = 0; p < pools; ++p) {
        pool_key(args, args.rows.slots_T[t], static_cast<int64_t>(p) * args.pool, key);
        scores[p] = pool_score(args, t, key);
        if (std::isnan(scores[p])) scores[p] = -INFINITY;  // keeps the order an order
      }
      std::partial_sort(
          order.begin(), order.begin() + static_cast<int64_t>(keep), order.end(), [&](int64_t a, int64_t b) {
            const float sa = scores[static_cast<size_t>(a)], sb = scores[static_cast<size_t>(b)];
            return sa != sb ? sa > sb : a < b;
          });
      order.resize(keep);
      std::sort(order.begin(), order.end());
    }
    int32_t* out = args.out.positions.row(t);
    int32_t count = 0;
    for (int64_t p : order) {
      for (int64_t j = 0; j < args.pool; ++j) out[count++] = static_cast<int32_t>(p * args.pool + j);
    }
    for (int64_t p = static_cast<int64_t>(pools) * args.pool; p < known; ++p)
      out[count++] = static_cast<int32_t>(p);
    args.out.counts[t] = count;
  }
}

void Ops::do_attend_selected(const AttendArgs& args, const Selection& selection) {
  const KvView& kv = args.kv;
  const int64_t heads = args.q.cols / kv.head_dim, group = heads / kv.kv_heads, value_dim = kv.value_width();
  std::vector<double> scores, out(static_cast<size_t>(value_dim));
  for (int64_t t = 0; t < args.q.rows; ++t) {
    const int32_t slot = args.rows.slots_T[t];
    const int32_t* positions = selection.positions.row(t);
    const auto count = static_cast<size_t>(selection.counts[t]);
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = args.q.row(t) + h * kv.head_dim;
      scores.resize(count);
      double top = -INFINITY, sum = 0;
      for (size_t i = 0; i < count; ++i) {
        const float* key = kv.keys + token_index(kv, slot, positions[i], h / group) * kv.head_dim;
        double dot = 0;
        for (int64_t c = 0; c < kv.head_dim; ++c) dot += static_cast<double>(q[c]) * key[c];
        scores[i] = dot * args.scale;
        top = std::max(top, scores[i]);
      }
      std::fill(out.begin(), out.end(), 0.0);
      for (size_t i = 0; i < count; ++i) {
        const double p = std::exp(scores[i] - top);
        const float* value = kv.values + token_index(kv, slot, positions[i], h / group) * value_dim;
        sum += p;
        for (int64_t c = 0; c < value_dim; ++c) out[static_cast<size_t>(c)] += p * value[c];
      }
      for (int64_t c = 0; c < value_dim; ++c) {
        args.out.row(t)[h * value_dim + c] = static_cast<float>(out[static_cast<size_t>(c)] / sum);
      }
    }
  }
}

}  // namespace nibble
