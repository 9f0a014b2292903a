#include "ops/backends.h"

namespace nibble::testing {
namespace {

struct Heads {
  int64_t query, kv, dim;
  int64_t value_dim = 0;  // 0: dim
  int64_t value_width() const { return value_dim > 0 ? value_dim : dim; }
};

// Sequences in a paged cache. Keys and values of (sequence, position) are a function of the seed alone, so
// two caches with other pages hold the same tokens.
class Cache {
 public:
  Cache(Ops& ops, Heads heads, int64_t sequences, int64_t positions, int64_t page_tokens, int64_t table_pages,
        uint32_t seed)
      : heads_(heads), positions_(positions), page_tokens_(page_tokens), table_pages_(table_pages) {
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
        if (s == 0 && p == 0) first_key_.assign(k.read().row(0), k.read().row(0) + width);
      }
    }
  }
  KvView view() {
    return {keys_.data(), values_.data(), heads_.kv,     heads_.dim,
            page_tokens_, table_pages_,   table_.data(), heads_.value_dim};
  }
  const std::vector<float>& first_key() const { return first_key_; }

  Heads heads_;
  int64_t positions_;

 private:
  int64_t page_tokens_, table_pages_;
  std::vector<int32_t> table_;
  std::vector<float> keys_, values_, first_key_;
};

int64_t pages_for(int64_t positions, int64_t page_tokens) {
  return (positions + page_tokens - 1) / page_tokens;
}

struct Step {
  std::vector<int32_t> positions, slots;
  RowsBuffer q;
};

Step random_step(Random& random, const Heads& heads, int64_t rows, int64_t sequences, int64_t positions) {
  Step step{{}, {}, RowsBuffer::random(random, rows, heads.query * heads.dim)};
  for (int64_t t = 0; t < rows; ++t) {
    step.positions.push_back(static_cast<int32_t>(random.below(positions)));
    step.slots.push_back(static_cast<int32_t>(random.below(sequences)));
  }
  return step;
}

RowsBuffer attend(Ops& ops, const Step& step, const KvView& kv, int64_t window, int64_t first = 0,
                  int64_t count = -1, const float* sinks = nullptr) {
  if (count < 0) count = step.q.view().rows;
  RowsBuffer out(count, step.q.view().cols / kv.head_dim * kv.value_width());
  RowsOfStep rows{count, step.positions.data() + first, step.slots.data() + first};
  ops.attend({step.q.read().slice(first, count), kv, rows, window,
              1.0f / std::sqrt(static_cast<float>(kv.head_dim)), out.view(), sinks});
  return out;
}

class Attend : public OnEveryBackend {};

TEST_P(Attend, AgreesWithTheFormula) {
  Judge judge("attend");
  for (Heads heads : {Heads{4, 2, 64}, Heads{2, 2, 32}, Heads{3, 1, 128}, Heads{2, 1, 96}, Heads{2, 1, 20},
                      Heads{1, 1, 7}, Heads{8, 2, 16}, Heads{2, 1, 192, 128}, Heads{4, 2, 20, 37}}) {
    for (int64_t window : {0, 1, 48}) {
      Random random(11);
      const int64_t positions = 150, dim = heads.dim, width = heads.value_width();
      // Without sinks where the window is 1; else with one far below, amid and far above the scores.
      std::vector<float> sinks = random.floats(heads.query);
      if (heads.query > 2) sinks[0] = -200, sinks[1] = 9;
      const bool has_sinks = window != 1;
      Cache cache(*ops_, heads, 2, positions, 16, pages_for(positions, 16), 5);
      KvView kv = cache.view();
      Step step = random_step(random, heads, 9, 2, positions);
      step.positions[0] = 0;
      step.positions[1] = static_cast<int32_t>(positions - 1);
      RowsBuffer out = attend(*ops_, step, kv, window, 0, -1, has_sinks ? sinks.data() : nullptr);
      for (int64_t t = 0; t < 9; ++t) {
        for (int64_t h = 0; h < heads.query; ++h) {
          const int64_t last = step.positions[static_cast<size_t>(t)];
          const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
          const int64_t g = h / (heads.query / heads.kv);
          const float* q = step.q.read().row(t) + h * dim;
          auto at = [&](int64_t p) {
            int64_t page = kv.table[step.slots[static_cast<size_t>(t)] * kv.table_pages + p / 16];
            return (page * heads.kv + g) * 16 + p % 16;
          };
          std::vector<double> weights, wanted(static_cast<size_t>(width), 0.0), magnitude = wanted;
          const double sink = has_sinks ? sinks[static_cast<size_t>(h)] : -INFINITY;
          double top = sink, total = 0, score_error = 0;
          for (int64_t p = first; p <= last; ++p) {
            double dot = 0, absolute = 0;
            for (int64_t c = 0; c < dim; ++c) {
              double product = static_cast<double>(q[c]) * kv.keys[at(p) * dim + c];
              dot += product, absolute += std::fabs(product);
            }
            const double scale = 1.0f / std::sqrt(static_cast<float>(dim));
            weights.push_back(dot * scale);
            top = std::max(top, weights.back());
            score_error =
                std::max(score_error, (static_cast<double>(dim) / 8 + 8) * kEpsilon * absolute * scale);
          }
          total = std::exp(sink - top);
          for (double& w : weights) total += w = std::exp(w - top);
          for (int64_t p = first; p <= last; ++p) {
            double w = weights[static_cast<size_t>(p - first)] / total;
            for (int64_t c = 0; c < width; ++c) {
              wanted[static_cast<size_t>(c)] += w * kv.values[at(p) * width + c];
              magnitude[static_cast<size_t>(c)] += w * std::fabs(kv.values[at(p) * width + c]);
            }
          }
          // Each weight is off by the error of its score (twice: top's too) and of exp; the sum by a
          // rounding for each position.
          const double relative = 4 * score_error + (2.0 * static_cast<double>(last - first) + 12) * kEpsilon;
          for (int64_t c = 0; c < width; ++c) {
            judge.check(out.view().row(t)[h * width + c], wanted[static_cast<size_t>(c)],
                        relative * magnitude[static_cast<size_t>(c)],
                        "head dim " + std::to_string(dim) + ", position " + std::to_string(last) +
                            ", column " + std::to_string(c));
          }
        }
      }
    }
  }
}

TEST_P(Attend, PagesChangeNoBit) {
  for (Heads heads : {Heads{4, 2, 64}, Heads{2, 1, 20}}) {
    Random random(12);
    const int64_t positions = 200;
    Step step = random_step(random, heads, 12, 3, positions);
    for (int64_t window : {0, 70}) {
      Cache whole(*ops_, heads, 3, positions, positions, 1, 7);
      RowsBuffer wanted = attend(*ops_, step, whole.view(), window);
      for (int64_t page : {1, 4, 16, 64}) {
        Cache paged(*ops_, heads, 3, positions, page, pages_for(positions, page), 7);
        EXPECT_TRUE(same_bits(attend(*ops_, step, paged.view(), window).view(), wanted.view()))
            << "page " << page;
      }
    }
  }
}

TEST_P(Attend, ARingIsALongTable) {
  Heads heads{4, 2, 32};
  const int64_t positions = 150, window = 40;
  for (int64_t page : {4, 16}) {
    Cache whole(*ops_, heads, 1, positions, page, pages_for(positions, page), 9);
    // Enough pages for a window that starts in the middle of one.
    Cache ring(*ops_, heads, 1, positions, page, pages_for(window, page) + 1, 9);
    Random random(13);
    Step step = random_step(random, heads, 3, 1, positions);
    // The ring has forgotten all but the last window.
    step.positions = {static_cast<int32_t>(positions - 1), static_cast<int32_t>(positions - 1),
                      static_cast<int32_t>(positions - 1)};
    EXPECT_TRUE(same_bits(attend(*ops_, step, ring.view(), window).view(),
                          attend(*ops_, step, whole.view(), window).view()));
  }
}

TEST_P(Attend, ChunksThreadsAndOtherRowsChangeNoBit) {
  Heads heads{4, 2, 64};
  Random random(14);
  Cache cache(*ops_, heads, 2, 180, 16, pages_for(180, 16), 10);
  Step step = random_step(random, heads, 33, 2, 180);
  RowsBuffer wanted = attend(*ops_, step, cache.view(), 0);
  for (int64_t chunk : {1, 2, 5, 16}) {
    for (int64_t t = 0; t < 33; t += chunk) {
      const int64_t count = std::min<int64_t>(chunk, 33 - t);
      EXPECT_TRUE(
          same_bits(attend(*ops_, step, cache.view(), 0, t, count).view(), wanted.view().slice(t, count)));
    }
  }
  for (int threads : {1, 2, 3, 7}) {
    std::unique_ptr<Ops> ops = make_ops(GetParam(), threads);
    EXPECT_TRUE(same_bits(attend(*ops, step, cache.view(), 0).view(), wanted.view()));
  }
}

// Scores far beyond what exp can hold: the softmax is then one-hot.
TEST_P(Attend, LargeScores) {
  Heads heads{1, 1, 16};
  Cache cache(*ops_, heads, 1, 100, 16, pages_for(100, 16), 15);
  KvView kv = cache.view();
  Step step{{99}, {0}, RowsBuffer(1, 16)};
  for (int64_t c = 0; c < 16; ++c) step.q.view().row(0)[c] = cache.first_key()[static_cast<size_t>(c)] * 1e6f;
  RowsBuffer out = attend(*ops_, step, kv, 0);
  double best = -INFINITY;
  const float* winner = nullptr;
  for (int64_t p = 0; p < 100; ++p) {
    const int64_t at = (kv.table[p / 16] * 16 + p % 16) * 16;
    double dot = 0;
    for (int64_t c = 0; c < 16; ++c) dot += static_cast<double>(step.q.read().row(0)[c]) * kv.keys[at + c];
    if (dot > best) best = dot, winner = kv.values + at;
  }
  for (int64_t c = 0; c < 16; ++c) EXPECT_EQ(out.view().row(0)[c], winner[c]);
}

TEST_P(Attend, SinksAtTheEnds) {
  Heads heads{2, 1, 32};
  Random random(16);
  Cache cache(*ops_, heads, 1, 90, 16, pages_for(90, 16), 17);
  Step step = random_step(random, heads, 3, 1, 90);
  const std::vector<float> none(2, -INFINITY), all(2, 1e30f);
  // A logit of minus infinity is no sink, to the bit; one far above all scores leaves nothing.
  EXPECT_TRUE(same_bits(attend(*ops_, step, cache.view(), 0, 0, -1, none.data()).view(),
                        attend(*ops_, step, cache.view(), 0).view()));
  RowsBuffer nothing = attend(*ops_, step, cache.view(), 0, 0, -1, all.data());
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t c = 0; c < 64; ++c) EXPECT_EQ(nothing.view().row(t)[c], 0.0f);
  }
}

TEST_P(Attend, SinksAndWideValuesKeepTheLaws) {
  Random random(18);
  for (Heads heads : {Heads{4, 2, 48, 32}, Heads{2, 1, 20, 36}}) {
    std::vector<float> sinks = random.floats(heads.query);
    Cache whole(*ops_, heads, 2, 140, 140, 1, 19);
    Step step = random_step(random, heads, 9, 2, 140);
    RowsBuffer wanted = attend(*ops_, step, whole.view(), 0, 0, -1, sinks.data());
    for (int64_t page : {4, 16}) {
      Cache paged(*ops_, heads, 2, 140, page, pages_for(140, page), 19);
      for (int64_t t = 0; t < 9; ++t) {
        EXPECT_TRUE(same_bits(attend(*ops_, step, paged.view(), 0, t, 1, sinks.data()).view(),
                              wanted.view().slice(t, 1)));
      }
    }
  }
}

INSTANTIATE_ON_ALL_BACKENDS(Attend);

}  // namespace
}  // namespace nibble::testing
