// Keys and values in pages, steps over them, and attention by its formula: what the tests of attention share.
#pragma once

#include "base/numbers.h"
#include "ops/backends.h"

namespace nibble::testing {

struct Heads {
  int64_t query, kv, dim;
  int64_t value_dim = 0;  // 0: dim
  int64_t value_width() const { return value_dim > 0 ? value_dim : dim; }
};

// Sequences in a paged cache. Keys and values of (sequence, position) are a function of the seed alone, so
// two caches with other pages hold the same tokens.
class Cache {
 public:
  Cache(OnHostData& ops, Heads heads, int64_t sequences, int64_t positions, int64_t page_tokens,
        int64_t table_pages, uint32_t seed)
      : heads_(heads), page_tokens_(page_tokens), table_pages_(table_pages) {
    const int64_t pages = sequences * table_pages, width = heads.kv * heads.dim;
    const int64_t value_width = heads.kv * heads.value_width();
    for (int64_t i = 0; i < pages; ++i) table_.push_back(static_cast<int32_t>(i));
    Random shuffle(seed + static_cast<uint32_t>(page_tokens));
    std::shuffle(table_.begin(), table_.end(), shuffle.engine());
    keys_.assign(static_cast<size_t>(pages * width * page_tokens), kNaN);
    values_.assign(static_cast<size_t>(pages * value_width * page_tokens), kNaN);
    Random random(seed);
    for (int64_t s = 0; s < sequences; ++s) {
      RowsBuffer k = RowsBuffer::random(random, positions, width),
                 v = RowsBuffer::random(random, positions, value_width);
      for (int64_t p = 0; p < positions; ++p) {
        auto position = static_cast<int32_t>(p), slot = static_cast<int32_t>(s);
        ops.write_kv(k.read().slice(p, 1), v.read().slice(p, 1), {1, &position, &slot}, view());
      }
    }
  }
  KvView view() {
    return {keys_.data(), values_.data(), heads_.kv,     heads_.dim,
            page_tokens_, table_pages_,   table_.data(), heads_.value_dim};
  }
  float* key(int64_t slot, int64_t position, int64_t g) {
    return keys_.data() + token(slot, position, g) * heads_.dim;
  }
  float* value(int64_t slot, int64_t position, int64_t g) {
    return values_.data() + token(slot, position, g) * heads_.value_width();
  }
  const Heads& heads() const { return heads_; }

 private:
  int64_t token(int64_t slot, int64_t position, int64_t g) const {
    const int64_t page =
        table_[static_cast<size_t>(slot * table_pages_ + position / page_tokens_ % table_pages_)];
    return (page * heads_.kv + g) * page_tokens_ + position % page_tokens_;
  }

  Heads heads_;
  int64_t page_tokens_, table_pages_;
  std::vector<int32_t> table_;
  std::vector<float> keys_, values_;
};

inline int64_t pages_for(int64_t positions, int64_t page_tokens) { return ceil_div(positions, page_tokens); }

struct Step {
  std::vector<int32_t> positions, slots;
  RowsBuffer q;
  bool one_sequence = false;

  RowsOfStep rows(int64_t first, int64_t count) const {
    return {count, positions.data() + first, slots.data() + first, count == 1, one_sequence};
  }
};

inline Step random_step(Random& random, const Heads& heads, int64_t rows, int64_t sequences,
                        int64_t positions) {
  Step step{{}, {}, RowsBuffer::random(random, rows, heads.query * heads.dim)};
  for (int64_t t = 0; t < rows; ++t) {
    step.positions.push_back(static_cast<int32_t>(random.below(positions)));
    step.slots.push_back(static_cast<int32_t>(random.below(sequences)));
  }
  return step;
}

inline float attend_scale(int64_t dim) { return 1.0f / std::sqrt(static_cast<float>(dim)); }

// Judges row t of `out` by the softmax over the positions that it sees.
inline void judge_attention(Judge& judge, Cache& cache, const Step& step, int64_t t,
                            const std::vector<int64_t>& seen, const float* sinks_H, Rows<const float> out) {
  const Heads& heads = cache.heads();
  const int64_t dim = heads.dim, width = heads.value_width(), slot = step.slots[static_cast<size_t>(t)];
  for (int64_t h = 0; h < heads.query; ++h) {
    const int64_t g = h / (heads.query / heads.kv);
    const float* q = step.q.read().row(t) + h * dim;
    std::vector<double> weights, wanted(static_cast<size_t>(width), 0.0), magnitude = wanted;
    const double sink = sinks_H != nullptr ? sinks_H[h] : -INFINITY, scale = attend_scale(dim);
    double top = sink, score_error = 0;
    for (int64_t p : seen) {
      double dot = 0, absolute = 0;
      for (int64_t c = 0; c < dim; ++c) {
        double product = static_cast<double>(q[c]) * cache.key(slot, p, g)[c];
        dot += product, absolute += std::fabs(product);
      }
      weights.push_back(dot * scale);
      top = std::max(top, weights.back());
      score_error = std::max(score_error, (static_cast<double>(dim) / 8 + 8) * kEpsilon * absolute * scale);
    }
    double total = std::exp(sink - top);
    for (double& w : weights) total += w = std::exp(w - top);
    for (size_t i = 0; i < seen.size(); ++i) {
      const float* value = cache.value(slot, seen[i], g);
      for (int64_t c = 0; c < width; ++c) {
        wanted[static_cast<size_t>(c)] += weights[i] / total * value[c];
        magnitude[static_cast<size_t>(c)] += weights[i] / total * std::fabs(value[c]);
      }
    }
    // Each weight is off by the error of its score (twice: top's too) and of exp; the sum by a rounding for
    // each position.
    const double relative = 4 * score_error + (2.0 * static_cast<double>(seen.size()) + 10) * kEpsilon;
    for (int64_t c = 0; c < width; ++c) {
      judge.check(out.row(t)[h * width + c], wanted[static_cast<size_t>(c)],
                  relative * magnitude[static_cast<size_t>(c)],
                  "head dim " + std::to_string(dim) + ", position " +
                      std::to_string(step.positions[static_cast<size_t>(t)]) + ", column " +
                      std::to_string(c));
    }
  }
}

}  // namespace nibble::testing
