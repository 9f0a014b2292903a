#include "ops/backends.h"

namespace nibble::testing {
namespace {

class Route : public OnEveryBackend {
 protected:
  struct Choice {
    std::vector<int32_t> ids;
    RowsBuffer weights;
  };
  Choice route(const RowsBuffer& logits, int64_t chosen, const RouterSpec& spec,
               const float* bias = nullptr) {
    const int64_t rows = logits.view().rows;
    Choice out{std::vector<int32_t>(static_cast<size_t>(rows * chosen), -1), RowsBuffer(rows, chosen)};
    ops_->route({logits.view(), bias, spec, {out.ids.data(), rows, chosen}, out.weights.view()});
    return out;
  }
  static RowsBuffer row(const std::vector<float>& values) {
    RowsBuffer out(1, static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), out.view().row(0));
    return out;
  }
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST_P(Route, EqualScoresGoToTheLowerId) {
  EXPECT_EQ(route(row({1, 3, 3, 2, 3}), 3, {}).ids, (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(route(row({0, 0, 0, 0}), 2, {}).ids, (std::vector<int32_t>{0, 1}));
}

TEST_P(Route, BiasChoosesAndDoesNotWeigh) {
  RouterSpec spec;
  spec.renormalize = false;
  const float bias[3] = {0, 0, 5};
  Choice choice = route(row({2, 1, -1}), 2, spec, bias);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], sigmoid(-1), 1e-7);
  EXPECT_NEAR(choice.weights.view().row(0)[1], sigmoid(2), 1e-7);
}

TEST_P(Route, RenormalizeEpsilonAndScale) {
  RouterSpec spec;
  spec.renormalize_epsilon = 0.25f;
  spec.scale = 2.5f;
  Choice choice = route(row({0.5f, -0.5f, 1.5f}), 2, spec);
  const double a = sigmoid(1.5), b = sigmoid(0.5);
  EXPECT_NEAR(choice.weights.view().row(0)[0], 2.5 * a / (a + b + 0.25), 1e-6);
  EXPECT_NEAR(choice.weights.view().row(0)[1], 2.5 * b / (a + b + 0.25), 1e-6);
}

TEST_P(Route, SoftcapAndSqrtSoftplus) {
  RouterSpec spec;
  spec.score = RouterScore::kSqrtSoftplus;
  spec.logit_softcap = 3;
  spec.renormalize = false;
  Choice choice = route(row({1000, -2, 1}), 3, spec);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{0, 2, 1}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], std::sqrt(std::log1p(std::exp(3.0))), 1e-6);
  EXPECT_NEAR(choice.weights.view().row(0)[1], std::sqrt(std::log1p(std::exp(3 * std::tanh(1 / 3.0)))), 1e-6);
}

TEST_P(Route, NaNIsChosenLastAndCrashesNothing) {
  Choice choice = route(row({kNaN, 1, kNaN, 2}), 3, {});
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{3, 1, 0}));
  for (int32_t id : route(row(std::vector<float>(8, kNaN)), 4, {}).ids) EXPECT_TRUE(id >= 0 && id < 8);
  EXPECT_EQ(route(row({INFINITY, -INFINITY, 0}), 3, {}).ids, (std::vector<int32_t>{0, 2, 1}));
}

TEST_P(Route, ManyRowsAreEachRowAlone) {
  Random random(41);
  RowsBuffer logits = RowsBuffer::random(random, 300, 257, 3);
  Choice all = route(logits, 9, {});
  for (int64_t t = 0; t < 300; ++t) {
    std::vector<float> values(logits.view().row(t), logits.view().row(t) + 257);
    Choice alone = route(row(values), 9, {});
    EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), all.ids.begin() + t * 9));
    EXPECT_TRUE(same_bits(alone.weights.view(), all.weights.view().slice(t, 1)));
  }
}

INSTANTIATE_ON_ALL_BACKENDS(Route);

}  // namespace
}  // namespace nibble::testing
