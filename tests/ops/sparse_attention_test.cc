// What sparse attention chooses, and attention to what was chosen.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "ops/paged_cache.h"

namespace nibble::testing {
namespace {

// Rows of a step over the cache's sequences, those of one sequence in the order of their positions.
Step ordered_step(Random& random, const Heads& heads, int64_t rows, int64_t sequences, int64_t positions) {
  Step step = random_step(random, heads, rows, sequences, positions);
  std::sort(step.positions.begin(), step.positions.end());
  step.positions.back() = static_cast<int32_t>(positions - 1);
  return step;
}

class IndexSelect : public OnEveryBackend {
 protected:
  struct Case {
    int64_t heads, dim, pool, top_k;
  };
  struct Chosen {
    std::vector<int32_t> positions, counts;
    int64_t width;
    std::vector<int64_t> row(int64_t t) const {
      auto begin = positions.begin() + t * width;
      return {begin, begin + counts[static_cast<size_t>(t)]};
    }
  };
  Chosen select(Cache& cache, const Step& step, const RowsBuffer& weights, const std::vector<float>& ape,
                const Case& c, int64_t first = 0, int64_t count = -1) {
    if (count < 0) count = std::ssize(step.positions);
    const int64_t width = c.top_k + c.pool - 1;
    Chosen out{std::vector<int32_t>(static_cast<size_t>(count * width), -7),
               std::vector<int32_t>(static_cast<size_t>(count), -7), width};
    ops_->index_select({step.q.read().slice(first, count),
                        weights.read().slice(first, count),
                        cache.view(),
                        ape.data(),
                        c.pool,
                        c.top_k,
                        step.rows(first, count),
                        {{out.positions.data(), count, width}, out.counts.data()}});
    return out;
  }
  static std::vector<int64_t> tokens_of(std::vector<int64_t> pools, int64_t pool, int64_t known) {
    std::sort(pools.begin(), pools.end());
    std::vector<int64_t> tokens;
    for (int64_t p : pools) {
      for (int64_t j = 0; j < pool; ++j) tokens.push_back(p * pool + j);
    }
    for (int64_t p = known / pool * pool; p < known; ++p) tokens.push_back(p);
    return tokens;
  }
};

TEST_P(IndexSelect, AgreesWithTheFormula) {
  Random random(71);
  int64_t decided = 0, rows = 0;
  for (Case c : {Case{2, 16, 4, 8}, Case{3, 20, 3, 12}, Case{4, 128, 4, 32}, Case{1, 7, 1, 5}}) {
    for (int64_t page_tokens : {16, 5}) {
      const Heads heads{c.heads, 1, c.dim};
      constexpr int64_t kRows = 40, kPositions = 150;
      Cache cache(*ops_, heads, 2, kPositions, page_tokens, pages_for(kPositions, page_tokens), 72);
      Step step = ordered_step(random, heads, kRows, 2, kPositions);
      RowsBuffer weights = RowsBuffer::random(random, kRows, c.heads, 1);
      const std::vector<float> ape = random.floats(c.pool * c.dim);
      const Chosen chosen = select(cache, step, weights, ape, c);
      for (int64_t t = 0; t < kRows; ++t, ++rows) {
        const int64_t slot = step.slots[static_cast<size_t>(t)],
                      known = step.positions[static_cast<size_t>(t)] + 1, keep = c.top_k / c.pool;
        std::vector<double> scores;
        double tolerance = 0;
        for (int64_t p = 0; p < known / c.pool; ++p) {
          std::vector<double> key, magnitude;
          for (int64_t i = 0; i < c.dim; ++i) {
            double total = 0, sum = 0, absolute = 0, largest = 0;
            for (int64_t j = 0; j < c.pool; ++j) {
              const double logit = static_cast<double>(cache.value(slot, p * c.pool + j, 0)[i]) +
                                   ape[static_cast<size_t>(j * c.dim + i)];
              const double weight = std::exp(logit), x = cache.key(slot, p * c.pool + j, 0)[i];
              total += weight, sum += weight * x, absolute += weight * std::fabs(x);
              largest = std::max(largest, std::fabs(logit));
            }
            key.push_back(sum / total);
            magnitude.push_back(absolute / total * (16 + 4 * largest + static_cast<double>(c.pool)));
          }
          double score = 0, error = 0;
          for (int64_t h = 0; h < c.heads; ++h) {
            const float* q = step.q.view().row(t) + h * c.dim;
            double dot = 0, dot_error = 0;
            for (int64_t i = 0; i < c.dim; ++i) {
              dot += q[i] * key[static_cast<size_t>(i)];
              dot_error += std::fabs(q[i]) * magnitude[static_cast<size_t>(i)] * static_cast<double>(c.dim);
            }
            const double scale = 1 / std::sqrt(static_cast<double>(c.dim));
            score += weights.view().row(t)[h] * std::max(dot * scale, 0.0);
            error += std::fabs(weights.view().row(t)[h]) * dot_error * scale;
          }
          scores.push_back(score);
          tolerance = std::max(tolerance, error * kEpsilon);
        }
        std::vector<int64_t> best(scores.size());
        std::iota(best.begin(), best.end(), 0);
        std::stable_sort(best.begin(), best.end(), [&](int64_t a, int64_t b) {
          return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
        });
        auto score_at = [&](int64_t rank) {
          return scores[static_cast<size_t>(best[static_cast<size_t>(rank)])];
        };
        const bool all = std::ssize(best) <= keep;
        // Pools with equal scores (those whose every head is below zero) are no question either.
        const double edge = all ? INFINITY : score_at(keep - 1) - score_at(keep);
        best.resize(static_cast<size_t>(std::min(keep, std::ssize(best))));
        const std::vector<int64_t> found = chosen.row(t);
        EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
        if (edge != 0 && edge < 2 * tolerance) continue;
        ++decided;
        EXPECT_EQ(found, tokens_of(best, c.pool, known))
            << "pool " << c.pool << ", dim " << c.dim << ", position " << known - 1;
      }
    }
  }
  EXPECT_GT(decided, rows * 9 / 10);
}

TEST_P(IndexSelect, EqualScoresGoToTheEarlierPool) {
  const Case c{2, 16, 4, 12};
  const Heads heads{2, 1, 16};
  Random random(73);
  Cache cache(*ops_, heads, 1, 61, 16, 4, 74);
  Step step{{60}, {0}, RowsBuffer::random(random, 1, 32)};
  RowsBuffer weights(1, 2);
  const std::vector<float> ape = random.floats(4 * 16);
  weights.view().row(0)[0] = weights.view().row(0)[1] = 0;
  std::vector<int64_t> first_tokens(13);
  std::iota(first_tokens.begin(), first_tokens.end() - 1, 0);
  first_tokens.back() = 60;  // of the pool that is not complete
  EXPECT_EQ(select(cache, step, weights, ape, c).row(0), first_tokens);
  // The last pool repeated, key by key and gate by gate, scores what the last one scores.
  weights.view().row(0)[0] = weights.view().row(0)[1] = 1;
  for (int64_t p = 0; p < 60; ++p) {
    std::copy_n(cache.key(0, 56 + p % 4, 0), 16, cache.key(0, p, 0));
    std::copy_n(cache.value(0, 56 + p % 4, 0), 16, cache.value(0, p, 0));
  }
  EXPECT_EQ(select(cache, step, weights, ape, c).row(0), first_tokens);
}

TEST_P(IndexSelect, RowsAloneAndPagesChangeNothing) {
  const Case c{4, 128, 4, 16};
  const Heads heads{4, 1, 128};
  Random random(75);
  Cache whole(*ops_, heads, 2, 140, 140, 1, 76), paged(*ops_, heads, 2, 140, 6, pages_for(140, 6), 76);
  Step step = ordered_step(random, heads, 17, 2, 140);
  RowsBuffer weights = RowsBuffer::random(random, 17, 4);
  const std::vector<float> ape = random.floats(4 * 128);
  const Chosen wanted = select(whole, step, weights, ape, c);
  for (int64_t t = 0; t < 17; ++t)
    EXPECT_EQ(select(paged, step, weights, ape, c, t, 1).row(0), wanted.row(t));
}

class AttendSelected : public OnEveryBackend {
 protected:
  RowsBuffer attend(Cache& cache, const Step& step, std::vector<int32_t>& positions,
                    std::vector<int32_t>& counts, int64_t first = 0, int64_t count = -1) {
    const int64_t rows = std::ssize(counts), width = std::ssize(positions) / rows;
    if (count < 0) count = rows;
    const Heads& heads = cache.heads();
    RowsBuffer out(count, heads.query * heads.value_width(), 3);
    ops_->attend_selected(
        {step.q.read().slice(first, count), cache.view(), step.rows(first, count), 0, attend_scale(heads.dim),
         out.view()},
        {Rows<int32_t>(positions.data(), rows, width).slice(first, count), counts.data() + first});
    EXPECT_TRUE(out.gaps_untouched());
    return out;
  }
};

TEST_P(AttendSelected, AgreesWithTheFormula) {
  Judge judge("attend_selected");
  Random random(77);
  constexpr int64_t kRows = 9, kPositions = 150, kWidth = 43;
  for (Heads heads : {Heads{4, 2, 64}, Heads{2, 1, 20, 37}, Heads{8, 1, 192, 128}, Heads{1, 1, 7}}) {
    for (int64_t page_tokens : {16, 150}) {
      Cache cache(*ops_, heads, 2, kPositions, page_tokens, pages_for(kPositions, page_tokens), 78);
      Step step = ordered_step(random, heads, kRows, 2, kPositions);
      std::vector<int32_t> positions, counts;
      std::vector<std::vector<int64_t>> seen(kRows);
      for (int64_t t = 0; t < kRows; ++t) {
        // Some of the visible ones, ascending, its own position always; behind them stands nonsense.
        std::vector<int64_t>& tokens = seen[static_cast<size_t>(t)];
        const int64_t last = step.positions[static_cast<size_t>(t)];
        for (int64_t p = 0; p < last; ++p) {
          if (random.below(4) == 0 && std::ssize(tokens) + 1 < kWidth) tokens.push_back(p);
        }
        tokens.push_back(last);
        positions.insert(positions.end(), tokens.begin(), tokens.end());
        positions.resize(static_cast<size_t>((t + 1) * kWidth), 1 << 30);
        counts.push_back(static_cast<int32_t>(tokens.size()));
      }
      RowsBuffer out = attend(cache, step, positions, counts);
      RowsBuffer alone(kRows, out.view().cols);
      for (int64_t t = 0; t < kRows; ++t) {
        judge_attention(judge, cache, step, t, seen[static_cast<size_t>(t)], nullptr, out.read());
        EXPECT_TRUE(same_bits(attend(cache, step, positions, counts, t, 1).read(), out.read().slice(t, 1)));
      }
    }
  }
}

// More than what a kernel takes at a time.
TEST_P(AttendSelected, ManyPositions) {
  Judge judge("attend_selected_many");
  Random random(79);
  constexpr int64_t kPositions = 900, kWidth = 700;
  const Heads heads{2, 1, 20, 36};
  Cache cache(*ops_, heads, 1, kPositions, 16, pages_for(kPositions, 16), 80);
  Step step{{kPositions - 1, kPositions - 1, kPositions - 1},
            {0, 0, 0},
            RowsBuffer::random(random, 3, heads.query * heads.dim)};
  std::vector<int32_t> positions, counts = {256, 257, 600};
  for (int32_t count : counts) {
    for (int32_t i = 0; i < kWidth; ++i) positions.push_back(i < count ? i * 3 / 2 : 1 << 30);
  }
  RowsBuffer out = attend(cache, step, positions, counts);
  for (int64_t t = 0; t < 3; ++t) {
    const auto begin = positions.begin() + t * kWidth;
    judge_attention(judge, cache, step, t, {begin, begin + counts[static_cast<size_t>(t)]}, nullptr,
                    out.read());
    EXPECT_TRUE(same_bits(attend(cache, step, positions, counts, t, 1).read(), out.read().slice(t, 1)));
  }
}

// More pools than a kernel takes at a time, and scores of every size.
TEST_P(IndexSelect, ManyPools) {
  const Case c{2, 16, 2, 300};
  const Heads heads{2, 1, 16};
  Random random(81);
  constexpr int64_t kPositions = 1401;
  Cache cache(*ops_, heads, 1, kPositions, 16, pages_for(kPositions, 16), 82);
  Step step{{kPositions - 1, 298, 300, 700}, {0, 0, 0, 0}, RowsBuffer::random(random, 4, 32)};
  RowsBuffer weights = RowsBuffer::random(random, 4, 2);
  const std::vector<float> ape = random.floats(2 * 16);
  const Chosen chosen = select(cache, step, weights, ape, c);
  const std::unique_ptr<OnHostData> reference = make_ops({"reference", ""});
  std::vector<int32_t> wanted(4 * 301, -7), counts(4);
  reference->index_select({step.q.read(),
                           weights.read(),
                           cache.view(),
                           ape.data(),
                           c.pool,
                           c.top_k,
                           step.rows(0, 4),
                           {{wanted.data(), 4, 301}, counts.data()}});
  for (int64_t t = 0; t < 4; ++t) {
    const auto begin = wanted.begin() + t * 301;
    const std::vector<int64_t> best(begin, begin + counts[static_cast<size_t>(t)]);
    // Two pools whose scores differ by less than float32 knows may stand for each other.
    const std::vector<int64_t> found = chosen.row(t);
    std::vector<int64_t> other;
    std::set_difference(found.begin(), found.end(), best.begin(), best.end(), std::back_inserter(other));
    EXPECT_LE(std::ssize(other), c.pool) << "row " << t;
    EXPECT_EQ(found.size(), best.size());
    EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
    EXPECT_EQ(chosen.row(t), select(cache, step, weights, ape, c, t, 1).row(0));
  }
}

// So many rows and pools that each is cut several times.
TEST_P(IndexSelect, ThreadsAndOtherRowsChangeNothing) {
  const Case c{3, 20, 4, 40};
  const Heads heads{3, 1, 20};
  Random random(83);
  constexpr int64_t kPositions = 1403, kRows = 41;
  Cache cache(*ops_, heads, 2, kPositions, 16, pages_for(kPositions, 16), 84);
  Step step = ordered_step(random, heads, kRows, 2, kPositions);
  std::sort(step.slots.begin(), step.slots.end());
  RowsBuffer weights = RowsBuffer::random(random, kRows, 3);
  const std::vector<float> ape = random.floats(4 * 20);
  const Chosen wanted = select(cache, step, weights, ape, c);
  for (int threads : {1, 2, 3, 7}) {
    ops_ = make_ops(GetParam(), threads);
    const Chosen all = select(cache, step, weights, ape, c);
    EXPECT_EQ(all.counts, wanted.counts);
    for (int64_t t = 0; t < kRows; ++t) {
      EXPECT_EQ(all.row(t), wanted.row(t));
      if (t % 10 != 0) continue;
      EXPECT_EQ(select(cache, step, weights, ape, c, t, 1).row(0), wanted.row(t));
    }
  }
}

// More chosen positions than are taken at a time.
TEST_P(AttendSelected, ThreadsAndOtherRowsChangeNoBit) {
  constexpr int64_t kRows = 5, kPositions = 1900;
  Random random(85);
  for (Heads heads : {Heads{4, 1, 64}, Heads{70, 1, 20, 36}}) {
    Cache cache(*ops_, heads, 2, kPositions, 16, pages_for(kPositions, 16), 86);
    Step step = ordered_step(random, heads, kRows, 2, kPositions);
    std::vector<int32_t> positions, counts;
    for (int32_t last : step.positions) {
      const size_t begin = positions.size();
      for (int32_t p = 0; p < last; ++p) {
        if (random.below(3) > 0) positions.push_back(p);
      }
      positions.push_back(last);
      counts.push_back(static_cast<int32_t>(positions.size() - begin));
      positions.resize(begin + kPositions, 1 << 30);
    }
    const RowsBuffer wanted = attend(cache, step, positions, counts);
    for (int threads : {1, 2, 3, 7}) {
      ops_ = make_ops(GetParam(), threads);
      EXPECT_TRUE(same_bits(attend(cache, step, positions, counts).read(), wanted.read()));
      for (int64_t t = 0; t < kRows; ++t) {
        EXPECT_TRUE(
            same_bits(attend(cache, step, positions, counts, t, 1).read(), wanted.read().slice(t, 1)));
      }
    }
  }
}

INSTANTIATE_ON_ALL_BACKENDS(IndexSelect);
INSTANTIATE_ON_ALL_BACKENDS(AttendSelected);

}  // namespace
}  // namespace nibble::testing
