#include <numeric>

#include "ops/backends.h"

namespace nibble::testing {
namespace {

class TopLogits : public OnEveryBackend {
 protected:
  // Judged by a sort of everything.
  void check(const RowsBuffer& logits, int64_t count) {
    const Rows<const float> x = logits.read();
    constexpr int64_t kGap = 3;
    constexpr TokenLogit kPoison{-1, -1};
    std::vector<TokenLogit> found(static_cast<size_t>(x.rows * (count + kGap)), kPoison);
    const Rows<TokenLogit> out(found.data(), x.rows, count, count + kGap);
    ops_->top_logits(x, out);
    for (int64_t t = 0; t < x.rows; ++t) {
      std::vector<int32_t> ids(static_cast<size_t>(x.cols));
      std::iota(ids.begin(), ids.end(), 0);
      auto key = [&](int32_t id) {
        return std::isnan(x.row(t)[id]) ? std::numeric_limits<double>::max() : double{x.row(t)[id]};
      };
      std::ranges::stable_sort(ids, [&](int32_t a, int32_t b) { return key(a) > key(b); });
      for (int64_t i = 0; i < count; ++i) {
        const int32_t id = ids[static_cast<size_t>(i)];
        const TokenLogit& next = out.row(t)[i];
        ASSERT_EQ(next.id, id) << "row " << t << " of " << x.cols << ", place " << i;
        if (std::isnan(x.row(t)[id])) {
          ASSERT_TRUE(std::isnan(next.logit));
        } else {
          ASSERT_EQ(next.logit, x.row(t)[id]);
        }
      }
      for (int64_t gap = 0; gap < kGap; ++gap) ASSERT_EQ(out.row(t)[count + gap].id, -1);
    }
  }
};

TEST_P(TopLogits, AnyVocabulary) {
  Random random(1);
  // Both sides of what is asked for, of a part of the cuda kernel (4096), and of what two of its levels take
  // (64 parts).
  for (int64_t vocab : {1, 5, 63, 64, 65, 4095, 4096, 4097, 8200, 100352, 262144, 262145, 300001}) {
    SCOPED_TRACE(vocab);
    const RowsBuffer logits = RowsBuffer::random(random, vocab > 200000 ? 2 : 5, vocab, 2);
    for (int64_t count : {int64_t{1}, int64_t{40}, kTopLogits}) check(logits, std::min(count, vocab));
  }
}

TEST_P(TopLogits, EqualLogitsByTheirIds) {
  Random random(2);
  for (int64_t vocab : {100, 10000, 70000}) {
    RowsBuffer logits(4, vocab);
    for (int64_t id = 0; id < vocab; ++id) {
      logits.view().row(0)[id] = 1.5f;
      logits.view().row(1)[id] = static_cast<float>(random.below(5));
      logits.view().row(2)[id] = id % 2 == 0 ? 0.0f : -0.0f;
      logits.view().row(3)[id] = static_cast<float>(id);  // the largest in the last part
    }
    check(logits, kTopLogits);
  }
}

TEST_P(TopLogits, TheEndsOfFloat32) {
  Random random(3);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t vocab : {90, 5000}) {
    RowsBuffer logits = RowsBuffer::random(random, 4, vocab);
    std::fill_n(logits.view().row(1), vocab, -kInfinity);
    for (int64_t i = 0; i < 20; ++i) {
      logits.view().row(0)[random.below(vocab)] = i % 3 == 0 ? kInfinity : i % 3 == 1 ? -3e38f : 3e38f;
      logits.view().row(1)[random.below(vocab)] = -1e-45f;
      logits.view().row(2)[random.below(vocab)] = i % 2 == 0 ? kNaN : -kNaN;
      logits.view().row(3)[random.below(vocab)] = kInfinity;
    }
    check(logits, kTopLogits);
  }
}

INSTANTIATE_ON_ALL_BACKENDS(TopLogits);

}  // namespace
}  // namespace nibble::testing
