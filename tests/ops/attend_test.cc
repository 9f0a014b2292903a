#include "ops/paged_cache.h"

namespace nibble::testing {
namespace {

RowsBuffer attend(OnHostData& ops, const Step& step, const KvView& kv, int64_t window, int64_t first = 0,
                  int64_t count = -1, const float* sinks = nullptr) {
  if (count < 0) count = step.q.view().rows;
  RowsBuffer out(count, step.q.view().cols / kv.head_dim * kv.value_width());
  ops.attend({step.q.read().slice(first, count), kv, step.rows(first, count), window,
              attend_scale(kv.head_dim), out.view(), sinks});
  return out;
}

class Attend : public OnEveryBackend {};

TEST_P(Attend, AgreesWithTheFormula) {
  Judge judge("attend");
  for (Heads heads : {Heads{4, 2, 64}, Heads{2, 2, 32}, Heads{3, 1, 128}, Heads{2, 1, 96}, Heads{2, 1, 20},
                      Heads{1, 1, 7}, Heads{8, 2, 16}, Heads{2, 1, 192, 128}, Heads{4, 2, 20, 37}}) {
    for (int64_t window : {0, 1, 48}) {
      Random random(11);
      const int64_t positions = 150;
      // Without sinks where the window is 1; else with one far below, amid and far above the scores.
      std::vector<float> sinks = random.floats(heads.query);
      if (heads.query > 2) sinks[0] = -200, sinks[1] = 9;
      const bool has_sinks = window != 1;
      Cache cache(*ops_, heads, 2, positions, 16, pages_for(positions, 16), 5);
      Step step = random_step(random, heads, 9, 2, positions);
      step.positions[0] = 0;
      step.positions[1] = static_cast<int32_t>(positions - 1);
      const float* sinks_H = has_sinks ? sinks.data() : nullptr;
      RowsBuffer out = attend(*ops_, step, cache.view(), window, 0, -1, sinks_H);
      for (int64_t t = 0; t < 9; ++t) {
        const int64_t last = step.positions[static_cast<size_t>(t)];
        std::vector<int64_t> seen;
        for (int64_t p = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0; p <= last; ++p)
          seen.push_back(p);
        judge_attention(judge, cache, step, t, seen, sinks_H, out.read());
      }
    }
  }
}

// Longer than what a kernel takes at a time, with ends at and around its borders.
TEST_P(Attend, LongSequences) {
  Judge judge("attend_long");
  constexpr int64_t kPositions = 1100;
  const std::vector<int32_t> ends = {0, 255, 256, 257, 511, 512, 640, 767, 768, 899, 1023, 1024, 1099};
  for (Heads heads : {Heads{2, 1, 20, 36}, Heads{4, 2, 16}, Heads{35, 1, 16}}) {
    Random random(20);
    Cache cache(*ops_, heads, 1, kPositions, 16, pages_for(kPositions, 16), 21);
    Step step{ends, std::vector<int32_t>(ends.size(), 0),
              RowsBuffer::random(random, std::ssize(ends), heads.query * heads.dim)};
    const std::vector<float> sinks = random.floats(heads.query);
    for (int64_t window : {0, 256, 300, 513}) {
      RowsBuffer out = attend(*ops_, step, cache.view(), window, 0, -1, sinks.data());
      for (int64_t t = 0; t < std::ssize(ends); ++t) {
        const int64_t last = ends[static_cast<size_t>(t)];
        std::vector<int64_t> seen;
        for (int64_t p = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0; p <= last; ++p)
          seen.push_back(p);
        judge_attention(judge, cache, step, t, seen, sinks.data(), out.read());
        EXPECT_TRUE(same_bits(attend(*ops_, step, cache.view(), window, t, 1, sinks.data()).view(),
                              out.view().slice(t, 1)));
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
    std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
    EXPECT_TRUE(same_bits(attend(*ops, step, cache.view(), 0).view(), wanted.view()));
  }
}

// A single row's long context is shared by the threads, many rows are not cut so; with and without windows
// that begin in the middle of whatever a kernel takes at a time.
TEST_P(Attend, ThreadsAndOtherRowsChangeNoBitOfLongSequences) {
  constexpr int64_t kPositions = 2300;
  for (Heads heads : {Heads{4, 2, 64}, Heads{70, 1, 20, 36}}) {
    Random random(22);
    Cache cache(*ops_, heads, 2, kPositions, 16, pages_for(kPositions, 16), 23);
    Step step = random_step(random, heads, 9, 2, kPositions);
    step.positions[4] = static_cast<int32_t>(kPositions - 1);
    const std::vector<float> sinks = random.floats(heads.query);
    for (int64_t window : {0, 1000}) {
      const float* sinks_H = window > 0 ? sinks.data() : nullptr;
      const RowsBuffer wanted = attend(*ops_, step, cache.view(), window, 0, -1, sinks_H);
      for (int threads : {1, 2, 3, 7}) {
        std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
        EXPECT_TRUE(
            same_bits(attend(*ops, step, cache.view(), window, 0, -1, sinks_H).read(), wanted.read()));
        for (int64_t t : {3, 4}) {
          EXPECT_TRUE(same_bits(attend(*ops, step, cache.view(), window, t, 1, sinks_H).read(),
                                wanted.read().slice(t, 1)));
        }
      }
    }
  }
}

// Rows of a prompt, some of one sequence and some of another, or all of one: so many that a kernel may take
// several together.
TEST_P(Attend, PromptsHaveTheBitsOfTheirRows) {
  Judge judge("attend_prompts");
  struct Case {
    Heads heads;
    int64_t rows, of_first, begin, window;
    OutputGate gate = OutputGate::kNone;
  };
  for (const Case& c : {Case{{36, 4, 128}, 230, 100, 190, 0}, Case{{36, 4, 128}, 230, 230, 333, 200},
                        Case{{72, 8, 64}, 121, 56, 0, 0}, Case{{72, 8, 64}, 121, 121, 700, 512},
                        Case{{72, 8, 64}, 121, 121, 0, 90, OutputGate::kSoftplusHead},
                        Case{{32, 32, 64}, 256, 256, 0, 0, OutputGate::kSigmoidElement}}) {
    const int64_t positions = c.begin + c.rows;
    Random random(31);
    Cache cache(*ops_, c.heads, 2, positions, 16, pages_for(positions, 16), 32);
    Step step{{}, {}, RowsBuffer::random(random, c.rows, c.heads.query * c.heads.dim)};
    for (int64_t t = 0; t < c.rows; ++t) {
      step.slots.push_back(t < c.of_first ? 0 : 1);
      step.positions.push_back(static_cast<int32_t>(t < c.of_first ? c.begin + t : t - c.of_first));
    }
    step.one_sequence = c.of_first == c.rows;
    const std::vector<float> sinks = random.floats(c.heads.query);
    const float* sinks_H = c.window > 0 || c.begin == 0 ? sinks.data() : nullptr;
    const bool gates_heads = c.gate == OutputGate::kSoftplusHead;
    const RowsBuffer gate =
        RowsBuffer::random(random, c.rows, c.heads.query * (gates_heads ? 1 : c.heads.dim));
    auto rows = [&](int64_t first, int64_t count) {
      RowsBuffer out(count, c.heads.query * c.heads.dim);
      ops_->attend({step.q.read().slice(first, count), cache.view(), step.rows(first, count), c.window,
                    attend_scale(c.heads.dim), out.view(), sinks_H, c.gate, gate.read().slice(first, count)});
      return out;
    };
    const RowsBuffer all = rows(0, c.rows);
    for (int64_t t = 0; t < c.rows; t += 7) {
      const int64_t count = std::min<int64_t>(7, c.rows - t);
      EXPECT_TRUE(same_bits(rows(t, count).view(), all.view().slice(t, count)));
    }
    if (c.gate != OutputGate::kNone) continue;  // judged in Fused.AttendAndGate
    for (int64_t t : {int64_t{0}, c.rows / 2, c.rows - 1}) {
      const int64_t last = step.positions[static_cast<size_t>(t)];
      std::vector<int64_t> seen;
      for (int64_t p = c.window > 0 ? std::max<int64_t>(0, last - c.window + 1) : 0; p <= last; ++p)
        seen.push_back(p);
      judge_attention(judge, cache, step, t, seen, sinks_H, all.read());
    }
  }
}

// Scores far beyond what exp can hold: the softmax is then one-hot.
TEST_P(Attend, LargeScores) {
  Heads heads{1, 1, 16};
  Cache cache(*ops_, heads, 1, 100, 16, pages_for(100, 16), 15);
  Step step{{99}, {0}, RowsBuffer(1, 16)};
  for (int64_t c = 0; c < 16; ++c) step.q.view().row(0)[c] = cache.key(0, 0, 0)[c] * 1e6f;
  RowsBuffer out = attend(*ops_, step, cache.view(), 0);
  double best = -INFINITY;
  const float* winner = nullptr;
  for (int64_t p = 0; p < 100; ++p) {
    double dot = 0;
    for (int64_t c = 0; c < 16; ++c)
      dot += static_cast<double>(step.q.read().row(0)[c]) * cache.key(0, p, 0)[c];
    if (dot > best) best = dot, winner = cache.value(0, p, 0);
  }
  // On the tensor cores of a GPU a value is the sum of two parts of 11 bits.
  const double part = ops_->ops().description().starts_with("cuda") ? 0x1p-21 : 0;
  for (int64_t c = 0; c < 16; ++c) EXPECT_NEAR(out.view().row(0)[c], winner[c], part * std::fabs(winner[c]));
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
