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

TEST_P(Route, SoftmaxOverAll) {
  RouterSpec spec;
  spec.score = RouterScore::kSoftmaxAll;
  spec.renormalize = false;
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(-1.0) + std::exp(0.5);
  Choice choice = route(row({1, 2, -1, 0.5f}), 2, spec);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{1, 0}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], std::exp(2.0) / sum, 1e-6);
  EXPECT_NEAR(choice.weights.view().row(0)[1], std::exp(1.0) / sum, 1e-6);
  spec.renormalize = true;
  choice = route(row({1001, 1002, 999, 1000.5f}), 2, spec);  // beyond exp's range; the same differences
  EXPECT_NEAR(choice.weights.view().row(0)[0], std::exp(2.0) / (std::exp(1.0) + std::exp(2.0)), 1e-6);
  // A bias chooses by probability + bias and does not weigh.
  const float bias[4] = {0, 0, 0.9f, 0};
  choice = route(row({1, 2, -1, 0.5f}), 1, spec, bias);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{2}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], 1, 1e-6);
}

TEST_P(Route, SoftmaxOverTheChosen) {
  RouterSpec spec;
  spec.score = RouterScore::kSoftmaxChosen;
  spec.scale = 3;
  const RowsBuffer logits = row({1, 2, -1, 0.5f});
  Choice choice = route(logits, 2, spec);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{1, 0}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], 3 * sigmoid(1), 1e-6);
  EXPECT_NEAR(choice.weights.view().row(0)[1], 3 * sigmoid(-1), 1e-6);
  // A bias chooses and does not weigh.
  const float bias[4] = {0, 0, 4, 0};
  choice = route(logits, 2, spec, bias);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{2, 1}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], 3 * sigmoid(-3), 1e-6);
}

TEST_P(Route, GroupsByTheirTwoBest) {
  RouterSpec spec;
  spec.n_group = 4;
  spec.topk_group = 2;
  spec.renormalize = false;
  // Sums of the two best sigmoids: the third and second group win over the first, which has the best expert.
  const RowsBuffer logits = row({9, -9, -9, 1, 1, 0, 2, 0.5f, 1.5f, 0, 0, 0});
  Choice choice = route(logits, 4, spec);
  EXPECT_EQ(choice.ids, (std::vector<int32_t>{6, 8, 3, 4}));
  EXPECT_NEAR(choice.weights.view().row(0)[0], sigmoid(2), 1e-6);
  // The biased score chooses groups too, and all experts of the groups that stay can be chosen.
  std::vector<float> bias(12, 0.0f);
  bias[1] = 2;
  EXPECT_EQ(route(logits, 4, spec, bias.data()).ids, (std::vector<int32_t>{1, 0, 6, 8}));
  EXPECT_EQ(route(logits, 6, spec, bias.data()).ids, (std::vector<int32_t>{1, 0, 6, 8, 7, 2}));
}

TEST_P(Route, EqualGroupsGoToTheLowerGroup) {
  RouterSpec spec;
  spec.n_group = 3;
  spec.topk_group = 1;
  EXPECT_EQ(route(row({0, 1, 2, 1, 1, 2}), 2, spec).ids, (std::vector<int32_t>{2, 3}));
  EXPECT_EQ(route(row({1, 1, 1, 1, 1, 1}), 2, spec).ids, (std::vector<int32_t>{0, 1}));
  spec.n_group = 6;  // groups of one
  spec.topk_group = 3;
  EXPECT_EQ(route(row({0, 5, 1, 5, 5, 2}), 3, spec).ids, (std::vector<int32_t>{1, 3, 4}));
}

TEST_P(Route, AllGroupsAreNoGroups) {
  Random random(43);
  RowsBuffer logits = RowsBuffer::random(random, 20, 24);
  RouterSpec grouped;
  grouped.n_group = grouped.topk_group = 4;
  EXPECT_EQ(route(logits, 5, grouped).ids, route(logits, 5, {}).ids);
}

TEST_P(Route, NaNInGroupsAndSoftmaxCrashesNothing) {
  RouterSpec spec;
  spec.n_group = 2;
  spec.topk_group = 1;
  EXPECT_EQ(route(row({kNaN, 9, 1, 0}), 2, spec).ids, (std::vector<int32_t>{2, 3}));
  for (RouterScore score : {RouterScore::kSoftmaxAll, RouterScore::kSoftmaxChosen}) {
    spec.score = score;
    for (float bad : {kNaN, INFINITY, -INFINITY}) {
      for (int32_t id : route(row({bad, bad, bad, bad}), 2, spec).ids) EXPECT_TRUE(id >= 0 && id < 4);
    }
  }
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
